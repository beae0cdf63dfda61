package metrale

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
)

func logSoftmax(logits []float32) []float32 {
	most, sum := math.Inf(-1), 0.0
	for _, x := range logits {
		most = max(most, float64(x))
	}
	for _, x := range logits {
		sum += math.Exp(float64(x) - most)
	}
	out := make([]float32, len(logits))
	for i, x := range logits {
		out[i] = float32(float64(x) - most - math.Log(sum))
	}
	return out
}

func TestTheSeedRepeatsTheRun(t *testing.T) {
	m := load(t, nil)
	sampler := &Sampler{Seed: 7, Stages: []Stage{
		Repetition(1.1, 64), Presence(0.1, 64), Frequency(0.1, 0), DRY(0.8, 1.75, 2, 0), DRYBreaker(13), Bias(400, -1),
		TopK(200), Typical(0.99), TopNSigma(4), MinP(0.001), TopP(0.99), XTC(0.4, 0.1), Temperature(1.5),
	}}
	run := func(options *SequenceOptions) []Token {
		return next(t, prompted(t, m, options, "Once upon a time"), 30)
	}
	first := run(&SequenceOptions{Sampler: sampler})
	same(t, "the same seed", run(&SequenceOptions{Sampler: sampler}), first)
	if other := run(&SequenceOptions{Sampler: sampler, Seed: 8}); strings.Join(strs(other), " ") == strings.Join(strs(first), " ") {
		t.Error("another seed gives the same 30 tokens at temperature 1.5")
	}
	s := prompted(t, m, nil, "Once upon a time")
	must(t, s.SetSampler(sampler))
	same(t, "set later", next(t, s, 30), first)
	must(t, s.SetSampler(nil))
	greedy := prompted(t, m, nil, "Once upon a time")
	same(t, "the greedy stage", run(&SequenceOptions{Sampler: &Sampler{Stages: []Stage{Greedy()}}}), next(t, greedy, 30))
	for _, last := range []Stage{Mirostat(3, 0.1, 100), MirostatV2(3, 0.1)} {
		run(&SequenceOptions{Sampler: &Sampler{Stages: []Stage{last}}})
	}
	for _, bad := range []Stage{{kind: 999}, HookStage(nil), Temperature(-1)} {
		if _, err := m.NewSequence(&SequenceOptions{Sampler: &Sampler{Stages: []Stage{bad}}}); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func strs(tokens []Token) (out []string) {
	for _, token := range tokens {
		text, _ := json.Marshal(token)
		out = append(out, string(text))
	}
	return out
}

func TestHooksChooseAndFail(t *testing.T) {
	m := load(t, nil)
	ctx := context.Background()
	var s *Sequence
	mode := ""
	errStop := errors.New("stop here")
	s = prompted(t, m, &SequenceOptions{Sampler: &Sampler{Stages: []Stage{HookStage(func(logits []float32, history []Token) error {
		switch mode {
		case "fail":
			return errStop
		case "panic":
			panic("out of ideas")
		case "own":
			_, err := s.Info() // the sequence that is being stepped
			return err
		}
		for i := range logits {
			if i != len(history)+10 {
				logits[i] = float32(math.Inf(-1))
			}
		}
		return nil
	})}}}, "Once upon a time")
	n := Token(length(t, s))
	same(t, "chosen by the hook", next(t, s, 3), []Token{n + 10, n + 11, n + 12})
	mode = "fail"
	if _, _, err := s.Next(ctx); !errors.Is(err, errStop) || !errors.Is(err, ErrCancelled) {
		t.Errorf("a hook that fails: %v", err)
	}
	mode = "panic"
	if _, _, err := s.Next(ctx); err == nil || !strings.Contains(err.Error(), "out of ideas") {
		t.Errorf("a hook that panics: %v", err)
	}
	mode = "own"
	if _, _, err := s.Next(ctx); !errors.Is(err, ErrBusy) {
		t.Errorf("a hook that looks at its own sequence: %v", err)
	}
	mode = ""
	fork, err := s.Fork()
	must(t, err)
	must(t, s.Close()) // the fork keeps the hook
	same(t, "the fork's hook", next(t, fork, 1), []Token{n + 13})
	must(t, fork.Close())
}

func TestGrammarsAreFollowed(t *testing.T) {
	m := load(t, nil)
	schema := `{"type":"object","properties":{"name":{"type":"string","maxLength":12},"age":{"type":"integer","minimum":0,"maximum":99}},"required":["name","age"],"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}`
	g, err := m.JSONSchema(schema)
	must(t, err)
	var text strings.Builder
	var end End
	options := &GenerateOptions{Grammar: g, StreamOptions: StreamOptions{MaxTokens: 120}}
	for piece, err := range m.Generate(context.Background(), tokens(t, m, "Once upon a time"), options) {
		must(t, err)
		text.WriteString(piece.Text)
		end = piece.End
	}
	var value struct {
		Name *string
		Age  *int
	}
	decoder := json.NewDecoder(strings.NewReader(text.String()))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&value); err != nil || value.Name == nil || value.Age == nil || *value.Age < 0 || *value.Age > 99 {
		t.Errorf("%q is not what the schema asks for (%v, ended by %s)", text.String(), err, end)
	}
	must(t, g.Close())
	must(t, g.Close())

	for name, compile := range map[string]func(string) (*Grammar, error){"gbnf": m.GBNF, "lark": m.Lark, "regex": m.Regex} {
		source := map[string]string{"gbnf": `root ::= "yes" | "no"`, "lark": "start: \"yes\" | \"no\"", "regex": "yes|no"}[name]
		g, err := compile(source)
		must(t, err)
		s := prompted(t, m, nil, "Once upon a time")
		must(t, s.SetGrammar(g))
		text, end, _ := read(t, s, &StreamOptions{MaxTokens: 20})
		if strings.TrimSpace(text) != "yes" && strings.TrimSpace(text) != "no" || end != EndToken && end != EndGrammar {
			t.Errorf("%s: %q and %q", name, text, end)
		}
		must(t, s.SetGrammar(nil))
		next(t, s, 1)
		must(t, g.Close())
	}
	if _, err := m.JSONSchema(`{"type":`); !errors.Is(err, ErrInvalidGrammar) {
		t.Errorf("half a schema: %v", err)
	}
}
