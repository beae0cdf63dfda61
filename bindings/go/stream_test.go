package metrale

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTokensAreThoseOfAnotherImplementation(t *testing.T) {
	g := readGolden(t)
	m := load(t, &LoadOptions{Compute: ComputeF32})
	for i, prompt := range g.Prompts {
		same(t, "tokens of "+prompt.Text, tokens(t, m, prompt.Text), prompt.IDs)
		want := g.Runs["hf_f32"].Results[i].Generated
		var got []Token
		options := &GenerateOptions{StreamOptions: StreamOptions{MaxTokens: len(want)}}
		for piece, err := range m.Generate(context.Background(), prompt.IDs, options) {
			must(t, err)
			got = append(got, piece.Token)
		}
		same(t, "after "+prompt.Text, got, want[:len(got)])
		if len(got) < len(want) && got[len(got)-1] != 2 {
			t.Errorf("stopped after %d of %d tokens", len(got), len(want))
		}
	}
}

func read(t *testing.T, s *Sequence, options *StreamOptions) (text string, end End, tokens []Token) {
	t.Helper()
	for piece, err := range s.Stream(context.Background(), options) {
		must(t, err)
		if text += piece.Text; !utf8.ValidString(piece.Text) {
			t.Errorf("%q is not whole UTF-8", piece.Text)
		}
		end = piece.End
		tokens = append(tokens, piece.Token)
	}
	return text, end, tokens
}

func TestStreamsSayWhyTheyEnd(t *testing.T) {
	m := load(t, nil)
	fresh := func(options *SequenceOptions) *Sequence { return prompted(t, m, options, "Once upon a time") }

	long, end, ids := read(t, fresh(nil), &StreamOptions{MaxTokens: 30})
	if end != EndLength || len(ids) != 30 {
		t.Errorf("30 tokens: %d and %q", len(ids), end)
	}
	// The text is that of the tokens, and the tokens are those of single steps.
	all, err := m.Detokenize(append(tokens(t, m, "Once upon a time"), ids...))
	if must(t, err); all != "Once upon a time"+long {
		t.Errorf("%q, as text of all tokens %q", long, all)
	}
	same(t, "single steps", next(t, fresh(nil), 30), ids)

	// Over more than one token, and inside of one.
	for _, stop := range []string{long[10:30], long[21:22]} {
		text, end, _ := read(t, fresh(nil), &StreamOptions{Stops: []string{"no such text", stop}})
		if want := long[:strings.Index(long, stop)]; end != EndStop || text != want {
			t.Errorf("stop at %q: %q and %q, expected %q", stop, end, text, want)
		}
	}
	s := fresh(&SequenceOptions{Context: 20, IgnoreEnd: true})
	start := length(t, s)
	if _, end, ids := read(t, s, nil); end != EndContext || len(ids) != 20-start+1 || ids[len(ids)-1] != NoToken {
		t.Errorf("a context of 20: %q and %v", end, ids)
	}
	s = fresh(&SequenceOptions{Sampler: &Sampler{Stages: []Stage{Bias(2, 1000)}}})
	if text, end, ids := read(t, s, nil); text != "" || end != EndToken || len(ids) != 1 || ids[0] != 2 {
		t.Errorf("a token that ends: %q, %q and %v", text, end, ids)
	}
	token, ended, err := s.Next(context.Background())
	if must(t, err); token != 2 || !ended {
		t.Errorf("again: %d, %t", token, ended)
	}
	for _, bad := range []*StreamOptions{{MaxTokens: -1}, {Stops: []string{""}}, {Stops: []string{"a\x00"}}} {
		for _, err := range s.Stream(context.Background(), bad) {
			if !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
	}
}

func TestAStreamThatIsLeftLeavesItsSequenceUsable(t *testing.T) {
	m := load(t, nil)
	s := prompted(t, m, nil, "Once upon a time")
	mark, err := s.Mark()
	must(t, err)
	for range s.Stream(context.Background(), nil) {
		if _, err := s.Fork(); !errors.Is(err, ErrBusy) {
			t.Errorf("a fork during a stream: %v", err)
		}
		break
	}
	must(t, s.Rollback(mark))
	same(t, "after going back", next(t, s, 5), next(t, prompted(t, m, nil, "Once upon a time"), 5))
}

func TestLogprobsAreThoseOfTheLogits(t *testing.T) {
	m := load(t, nil)
	s := prompted(t, m, &SequenceOptions{Logprobs: true}, "Once upon a time")
	_, top, err := s.Logprobs(nil, 3)
	must(t, err)
	given, _, err := s.Logprobs([]Token{top[2].Token, top[0].Token}, 0)
	must(t, err)
	logits, err := s.Logits()
	must(t, err)
	for piece, err := range s.Stream(context.Background(), &StreamOptions{MaxTokens: 1}) {
		if must(t, err); piece.Token != top[0].Token || piece.Logprob != top[0].Logprob {
			t.Errorf("%+v, expected %+v", piece, top[0])
		}
	}
	want := logSoftmax(logits)
	for i, pair := range []struct{ got, want float32 }{
		{given[0], want[top[2].Token]}, {given[1], want[top[0].Token]}, {top[1].Logprob, want[top[1].Token]},
	} {
		if d := pair.got - pair.want; d > 1e-4 || d < -1e-4 {
			t.Errorf("%d: %g, expected %g", i, pair.got, pair.want)
		}
	}
	if _, _, err := s.Logprobs(nil, 1<<40); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("too many: %v", err)
	}
}

func TestTextHoldsBackWhatIsNotCertain(t *testing.T) {
	m := load(t, nil)
	text, err := m.NewText(&TextOptions{Stops: []string{"xyz"}})
	must(t, err)
	defer text.Close()
	var whole string
	ids, err := m.TokenizeRaw("é xyz", false)
	must(t, err)
	stopped := false
	for _, id := range ids {
		piece, stop, err := text.Push(id)
		if must(t, err); !utf8.ValidString(piece) {
			t.Errorf("%q is not whole", piece)
		}
		whole += piece
		if stopped = stop; stop {
			break
		}
	}
	if !stopped || strings.TrimSpace(whole) != "é" {
		t.Errorf("%q, stopped %t", whole, stopped)
	}
	if _, _, err := text.Push(5); !errors.Is(err, ErrInvalidState) {
		t.Errorf("after a stop: %v", err)
	}
	must(t, text.Reset())
	_, _, err = text.Push(3 + 0xC3) // the first byte of a character
	must(t, err)
	if rest, err := text.Flush(); err != nil || rest != "\uFFFD" {
		t.Errorf("%q, %v", rest, err)
	}
}
