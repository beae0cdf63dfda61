package metrale

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"sync"
	"testing"
)

// fixture is a model of 260,000 parameters that tells stories.
const fixture = "../../tests/fixtures/stories260k/model.gguf"

// golden is what an independent implementation made of the fixture, in f32.
type golden struct {
	Prompts []struct {
		Text string
		IDs  []Token
	}
	Runs map[string]struct {
		Results []struct{ Generated []Token }
	}
}

func readGolden(t *testing.T) golden {
	t.Helper()
	text, err := os.ReadFile("../../tests/fixtures/stories260k/golden.json")
	must(t, err)
	var g golden
	must(t, json.Unmarshal(text, &g))
	if len(g.Prompts) == 0 || len(g.Runs["hf_f32"].Results) != len(g.Prompts) {
		t.Fatalf("golden.json has %d prompts", len(g.Prompts))
	}
	return g
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func load(t testing.TB, options *LoadOptions) *Model {
	t.Helper()
	if options == nil {
		options = &LoadOptions{}
	}
	if options.Threads == 0 {
		options.Threads = 1 // so small a model is quickest alone, above all beside other tests
	}
	m, err := Load(context.Background(), fixture, options)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

func sequence(t testing.TB, m *Model, options *SequenceOptions) *Sequence {
	t.Helper()
	s, err := m.NewSequence(options)
	must(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func tokens(t testing.TB, m *Model, text string) []Token {
	t.Helper()
	tokens, err := m.Tokenize(text)
	must(t, err)
	return tokens
}

// prompted is a sequence that has read a text.
func prompted(t testing.TB, m *Model, options *SequenceOptions, text string) *Sequence {
	t.Helper()
	s := sequence(t, m, options)
	must(t, s.Prefill(context.Background(), tokens(t, m, text)))
	return s
}

// next takes n tokens, one call each.
func next(t testing.TB, s *Sequence, n int) []Token {
	t.Helper()
	var out []Token
	for range n {
		token, _, err := s.Next(context.Background())
		must(t, err)
		out = append(out, token)
	}
	return out
}

func same[T comparable](t testing.TB, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %v, expected %v", what, got, want)
	}
}

func length(t testing.TB, s *Sequence) int {
	t.Helper()
	info, err := s.Info()
	must(t, err)
	return info.Length
}

func spawn(group *sync.WaitGroup, f func()) {
	group.Add(1)
	go func() {
		defer group.Done()
		f()
	}()
}
