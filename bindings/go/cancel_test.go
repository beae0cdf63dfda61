package metrale

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"
)

// slow makes every token take a while, without changing it.
func slow(d time.Duration) *Sampler {
	return &Sampler{Stages: []Stage{HookStage(func([]float32, []Token) error { time.Sleep(d); return nil })}}
}

func TestTheEndOfAContextEndsAPromptWithoutATrace(t *testing.T) {
	m := load(t, &LoadOptions{Threads: 1, Compute: ComputeF32})
	s := sequence(t, m, nil)
	must(t, s.Prefill(context.Background(), tokens(t, m, "Once upon a time")))
	before := length(t, s)
	long := make([]Token, 500)
	for i := range long {
		long[i] = Token(5 + i%400)
	}
	// At every moment of it: the end comes earlier and earlier until it is in time.
	cancelled := 0
	for wait := 20 * time.Millisecond; wait > 10*time.Microsecond && cancelled < 8; wait = wait * 2 / 3 {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		err := s.Prefill(ctx, long[:500-before])
		cancel()
		if err == nil {
			must(t, s.Truncate(before))
			continue
		}
		cancelled++
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("after %v: %v", wait, err)
		}
		if length(t, s) != before {
			t.Fatalf("%d tokens, expected %d", length(t, s), before)
		}
	}
	if cancelled == 0 {
		t.Fatal("no prompt was long enough")
	}
	// Nothing waits in the queue, and no cancel is left over.
	same(t, "afterwards", next(t, s, 10), next(t, prompted(t, m, nil, "Once upon a time"), 10))
}

func TestTheEndOfAContextEndsAStreamAtOnce(t *testing.T) {
	m := load(t, nil)
	s := prompted(t, m, &SequenceOptions{Sampler: slow(20 * time.Millisecond), IgnoreEnd: true}, "Once upon a time")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var asked time.Time
	var last error
	count := 0
	for _, err := range s.Stream(ctx, nil) {
		if last = err; err != nil {
			break
		}
		if count++; count == 5 {
			asked = time.Now()
			cancel()
		}
	}
	if !errors.Is(last, context.Canceled) || count != 5 {
		t.Errorf("%v after %d tokens", last, count)
	}
	if took := time.Since(asked); took > 8*time.Second { // to its end it would take 10
		t.Errorf("took %v", took)
	}
	next(t, s, 1)
	if _, _, err := s.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

func TestCancelAndCloseEndWhatRuns(t *testing.T) {
	m := load(t, nil)
	for name, end := range map[string]func(*Sequence){
		"Cancel": (*Sequence).Cancel,
		"Model":  func(s *Sequence) { m.Cancel() },
		"Close":  func(s *Sequence) { s.Close() },
	} {
		s := prompted(t, m, &SequenceOptions{Sampler: slow(20 * time.Millisecond), IgnoreEnd: true}, "Once upon a time")
		go func() {
			time.Sleep(20 * time.Millisecond)
			end(s)
		}()
		var last error
		for _, err := range s.Stream(context.Background(), nil) {
			last = err
		}
		if !errors.Is(last, ErrCancelled) {
			t.Errorf("%s: %v", name, last)
		}
		_, _, err := s.Next(context.Background())
		if name == "Close" != errors.Is(err, ErrInvalidHandle) || name != "Close" && err != nil {
			t.Errorf("after %s: %v", name, err)
		}
	}
}

func TestCloseIsSafeFromAnywhere(t *testing.T) {
	m := load(t, nil)
	var group sync.WaitGroup
	prompt := tokens(t, m, "Once upon a time")
	for range 20 {
		s := sequence(t, m, nil)
		for range 4 {
			spawn(&group, func() {
				for range 20 {
					switch err := s.Prefill(context.Background(), prompt[:1]); {
					case err == nil, errors.Is(err, ErrBusy), errors.Is(err, ErrCancelled), errors.Is(err, ErrInvalidHandle):
					default:
						t.Errorf("%v", err)
					}
					_, _ = s.Info()
				}
			})
			spawn(&group, func() { time.Sleep(time.Millisecond); s.Close() })
		}
	}
	spawn(&group, func() { m.Close() }) // sequences keep it
	group.Wait()
	if _, err := m.NewSequence(nil); !errors.Is(err, ErrInvalidHandle) {
		t.Errorf("a closed model: %v", err)
	}
}

func TestTheCollectorClosesWhatWasForgotten(t *testing.T) {
	r, err := NewRuntime(nil)
	must(t, err)
	defer r.Close()
	func() {
		m, err := Load(context.Background(), fixture, &LoadOptions{Runtime: r})
		must(t, err)
		s, err := m.NewSequence(&SequenceOptions{Sampler: slow(0)})
		must(t, err)
		must(t, s.Prefill(context.Background(), tokens(t, m, "Once upon a time")))
		for range s.Stream(context.Background(), nil) {
			break
		}
		g, err := m.Regex("[a-z]+")
		must(t, err)
		must(t, s.SetGrammar(g))
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		runtime.GC()
		usage, err := r.Memory()
		must(t, err)
		if usage.Weights == 0 && usage.Cache == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %+v", usage)
		}
	}
}
