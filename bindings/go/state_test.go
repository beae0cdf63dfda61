package metrale

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"strings"
	"testing"
)

func TestStateGoesBackAndForth(t *testing.T) {
	m := load(t, nil)
	hot := &SequenceOptions{Sampler: &Sampler{Seed: 3, Stages: []Stage{Temperature(2)}}}
	s := prompted(t, m, hot, "Once upon a time")
	start := length(t, s)
	mark, err := s.Mark()
	must(t, err)
	fork, err := s.Fork()
	must(t, err)
	defer fork.Close()
	state, err := s.Save()
	must(t, err)
	want := next(t, s, 20)
	same(t, "the fork", next(t, fork, 20), want)

	must(t, s.Rollback(mark))
	same(t, "after going back", next(t, s, 20), want)
	must(t, s.Rollback(mark))
	must(t, s.Commit(mark))
	if err := s.Rollback(mark); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a mark that was given up: %v", err)
	}
	restored := sequence(t, m, hot)
	must(t, restored.Restore(state))
	same(t, "the restored one", next(t, restored, 20), want)
	if err := restored.Restore(state[:len(state)-1]); !errors.Is(err, ErrCorruptFile) {
		t.Errorf("a state that is cut short: %v", err)
	}
	if err := restored.Restore(nil); err == nil {
		t.Error("nothing is taken for a state")
	}
	prompt := tokens(t, m, "Once upon a time")
	count, err := restored.Match(append(append([]Token{}, prompt...), want[0], want[1]+1))
	if must(t, err); count != start+1 {
		t.Errorf("%d tokens match, expected %d", count, start+1)
	}
	must(t, restored.Truncate(start))
	if length(t, restored) != start {
		t.Errorf("%d tokens after truncating to %d", length(t, restored), start)
	}
	must(t, restored.Shift(1, 2))
	if length(t, restored) != start-2 {
		t.Errorf("%d tokens after taking 2 of %d out", length(t, restored), start)
	}
	if err := restored.Truncate(-1); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("%v", err)
	}
	stats, err := restored.Stats()
	if must(t, err); stats.Generated != 20 || stats.KVOwned == 0 {
		t.Errorf("%+v", stats)
	}
}

func TestOneBeamIsGreedy(t *testing.T) {
	m := load(t, nil)
	s := prompted(t, m, nil, "Once upon a time")
	beam, score, err := s.Beam(context.Background(), BeamOptions{Beams: 1, MaxTokens: 6})
	must(t, err)
	if score >= 0 {
		t.Errorf("score %g", score)
	}
	same(t, "one beam", beam, next(t, s, 6))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := s.Beam(ctx, BeamOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := s.Encode(context.Background(), []Token{1}); err == nil {
		t.Error("a model that does not translate encodes")
	}
}

func TestEmbeddings(t *testing.T) {
	m := load(t, nil)
	ctx := context.Background()
	prompt := tokens(t, m, "Once upon a time")
	rows, err := m.EmbedTokens(ctx, prompt, false)
	must(t, err)
	info, err := m.Info()
	must(t, err)
	if len(rows) != len(prompt) || len(rows[0]) != info.Hidden || info.Vocab != 512 || info.Parameters != 260032 {
		t.Fatalf("%d rows of %d, %+v", len(rows), len(rows[0]), info)
	}
	for pooling, want := range map[Pooling]func(column int) float64{
		PoolingLast:  func(c int) float64 { return float64(rows[len(rows)-1][c]) },
		PoolingFirst: func(c int) float64 { return float64(rows[0][c]) },
		PoolingMean: func(c int) (sum float64) {
			for _, row := range rows {
				sum += float64(row[c])
			}
			return sum / float64(len(rows))
		},
	} {
		got, err := m.Embed(ctx, prompt, pooling, true)
		must(t, err)
		size, square := 0.0, 0.0
		for c := range got {
			size += want(c) * want(c)
			square += float64(got[c]) * float64(got[c])
		}
		if math.Abs(square-1) > 1e-4 {
			t.Errorf("pooling %d: squares add up to %g", pooling, square)
		}
		for c := range got {
			if math.Abs(want(c)/math.Sqrt(size)-float64(got[c])) > 1e-4 {
				t.Fatalf("pooling %d, column %d: %g, expected %g", pooling, c, got[c], want(c)/math.Sqrt(size))
			}
		}
	}
	if _, err := m.EmbedTokens(ctx, nil, false); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("nothing: %v", err)
	}
}

func TestPromptsThatBeginAlike(t *testing.T) {
	m := load(t, &LoadOptions{PrefixBytes: 1 << 20})
	story := "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
	want := next(t, prompted(t, m, nil, story), 4)
	same(t, "the second time", next(t, prompted(t, m, nil, story), 4), want)
	stats, err := m.Stats()
	if must(t, err); stats.Hits == 0 || stats.Reused < 16 {
		t.Errorf("%+v", stats)
	}
}

// withTemplate is a GGUF file with a chat template among its metadata. The entry's size is a multiple of 32, so that the tensors
// stay aligned.
func withTemplate(file []byte, template string) []byte {
	const header = 24 // magic, version, tensors, entries
	key := "tokenizer.chat_template"
	fixed := 8 + len(key) + 4 + 8
	pad := (32 - (fixed+len(template)+len("{##}"))%32) % 32
	template += "{#" + strings.Repeat("-", pad) + "#}"
	little := binary.LittleEndian
	entry := little.AppendUint64(nil, uint64(len(key)))
	entry = append(entry, key...)
	entry = little.AppendUint32(entry, 8) // a string
	entry = little.AppendUint64(entry, uint64(len(template)))
	entry = append(entry, template...)
	out := append([]byte(nil), file[:header]...)
	little.PutUint64(out[16:], little.Uint64(out[16:])+1)
	return append(append(out, entry...), file[header:]...)
}

func TestChatTemplates(t *testing.T) {
	plain := load(t, nil)
	if _, err := plain.ChatTokens(Message{Role: "user", Content: "Hi"}); !errors.Is(err, ErrNotFound) {
		t.Errorf("a model without a template: %v", err)
	}
	file, err := os.ReadFile(fixture)
	must(t, err)
	source, err := BytesSource(withTemplate(file, `{% for m in messages %}{% if m.role == "robot" %}{{ raise_exception("no robots") }}{% endif %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if tools %}({{ tools|length }} tools){% endif %}{{ mood }}{% if add_generation_prompt %}[assistant]{% endif %}`))
	must(t, err)
	defer source.Close()
	m, err := LoadSource(context.Background(), source, nil)
	must(t, err)
	defer m.Close()
	for _, c := range []struct {
		chat Chat
		want string
	}{
		{Chat{Messages: []Message{{Role: "user", Content: "say \"<s>\" é"}}}, "[user] say \"<s>\" é\n[assistant]"},
		{Chat{Messages: []Message{{Role: "user", Content: "Hi"}}, Continue: true}, "[user] Hi\n"},
		{Chat{Tools: []any{map[string]string{"name": "f"}}, Variables: map[string]any{"mood": "!"}}, "(1 tools)![assistant]"},
	} {
		got, err := m.RenderChat(c.chat)
		if must(t, err); got != c.want {
			t.Errorf("%q, expected %q", got, c.want)
		}
	}
	if _, err := m.RenderChat(Chat{Messages: []Message{{Role: "robot"}}}); !errors.Is(err, ErrTemplate) {
		t.Errorf("a template that refuses: %v", err)
	}
	ids, err := m.ChatTokens(Message{Role: "user", Content: "Hi"})
	must(t, err)
	want, err := m.TokenizeRaw("[user] Hi\n[assistant]", true)
	must(t, err)
	same(t, "tokens of a chat", ids, want)
}
