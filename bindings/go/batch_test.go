package metrale

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Skip("SKIPPED: there is no /proc/self/task to count threads in")
	}
	return len(tasks)
}

func TestAThousandGoroutinesAreNotAThousandThreads(t *testing.T) {
	const made = 5
	m := load(t, nil)
	before := threads(t)
	var most atomic.Int64
	stop := make(chan struct{})
	var watch, group sync.WaitGroup
	spawn(&watch, func() {
		for {
			most.Store(max(most.Load(), int64(threads(t))))
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	prompts := []string{"Once upon a time", "The dog", "Lily and Tom", "One day, a bird"}
	want := make([][]Token, len(prompts))
	for i, prompt := range prompts {
		want[i] = next(t, prompted(t, m, nil, prompt), made)
	}
	var waiting atomic.Int64
	for i := range 1000 {
		spawn(&group, func() {
			waiting.Add(1)
			prompt, err := m.Tokenize(prompts[i%4])
			if err != nil {
				t.Error(err)
				return
			}
			var got []Token
			options := &GenerateOptions{SequenceOptions: SequenceOptions{Context: 64}, StreamOptions: StreamOptions{MaxTokens: made}}
			for piece, err := range m.Generate(context.Background(), prompt, options) {
				if err != nil {
					t.Error(err)
					return
				}
				got = append(got, piece.Token)
			}
			same(t, prompts[i%4], got, want[i%4])
		})
	}
	group.Wait()
	close(stop)
	watch.Wait()
	t.Logf("%d goroutines, %d threads before, at most %d", waiting.Load(), before, most.Load())
	if most.Load() > int64(before)+48 {
		t.Errorf("%d threads for 1,000 goroutines, %d before", most.Load(), before)
	}
}

func TestOneSequenceThatFailsDoesNotStopOthers(t *testing.T) {
	m := load(t, nil)
	errHook := errors.New("enough")
	var group sync.WaitGroup
	for i := range 12 {
		spawn(&group, func() {
			count := 0
			sampler := &Sampler{Stages: []Stage{HookStage(func(_ []float32, history []Token) error {
				if i%3 == 0 && len(history) == 15 {
					return errHook
				}
				return nil
			})}}
			options := &GenerateOptions{SequenceOptions: SequenceOptions{Sampler: sampler, IgnoreEnd: true}, StreamOptions: StreamOptions{MaxTokens: 40}}
			for _, err := range m.Generate(context.Background(), []Token{1, 403, 407, 261, 378}, options) {
				if err != nil {
					if i%3 != 0 || !errors.Is(err, errHook) {
						t.Errorf("%d: %v", i, err)
					}
					break
				}
				count++
			}
			if want := map[bool]int{true: 10, false: 40}[i%3 == 0]; count != want {
				t.Errorf("%d: %d tokens, expected %d", i, count, want)
			}
		})
	}
	group.Wait()
}

// A reader that is late does not hold up the others, and does not let its own stream run away.
func TestASlowReaderWaitsAlone(t *testing.T) {
	m := load(t, nil)
	late := prompted(t, m, &SequenceOptions{IgnoreEnd: true}, "Once upon a time")
	first := true
	got := 0
	for _, err := range late.Stream(context.Background(), &StreamOptions{MaxTokens: 60}) {
		must(t, err)
		if first {
			first = false
			options := &GenerateOptions{SequenceOptions: SequenceOptions{IgnoreEnd: true}, StreamOptions: StreamOptions{MaxTokens: 100}}
			for _, err := range m.Generate(context.Background(), tokens(t, m, "The dog"), options) {
				must(t, err)
			}
			if made := len(late.job.Load().out); made > ahead {
				t.Errorf("%d tokens ahead", made)
			}
		}
		got++
	}
	if got != 60 {
		t.Errorf("%d tokens", got)
	}
}
