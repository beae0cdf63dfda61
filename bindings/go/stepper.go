package metrale

// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// turn is the longest that one step takes. A cancel that comes during a step ends it at once; one that just misses it waits
// this long at most. New sequences join between steps.
const turn = 20 * time.Millisecond

// stepper computes for all sequences of a model that want something, together, on one goroutine. The goroutine lives while
// there are jobs, so a model that nobody uses can be collected.
type stepper struct {
	wake chan struct{} // something changed while all jobs wait for their readers

	mu      sync.Mutex
	jobs    []*job
	running bool

	// Of the goroutine alone; kept between steps.
	handles []*C.metrale_seq
	results []C.metrale_step_result
}

// job is what one sequence wants: to have its queue read, or tokens. Whoever started it holds the sequence's lock until it is over.
type job struct {
	seq   *Sequence
	want  int        // tokens still to be produced; 0 for a queue to be read
	out   chan Piece // has room for what the stepper puts in it, or the job is left out of the steps
	over  chan struct{}
	err   error // valid when over is closed
	text  *Text // or nil, for tokens alone
	hook  *hook // of the sequence's sampler, or nil
	stops atomic.Bool
	why   error // that the stepper gave it up; its own
}

func newStepper() *stepper { return &stepper{wake: make(chan struct{}, 1)} }

// start gives the stepper a job for the sequence, which is held by change(). ahead is how many tokens may wait for the reader.
func (s *Sequence) start(want, ahead int, text *Text) *job {
	j := &job{seq: s, want: want, out: make(chan Piece, ahead), over: make(chan struct{}), text: text, hook: s.hook}
	s.job.Store(j)
	if s.closed.Load() {
		j.stops.Store(true) // Close came before it could see the job
	}
	e := s.model.stepper
	e.mu.Lock()
	e.jobs = append(e.jobs, j)
	if !e.running {
		e.running = true
		go e.run()
	}
	e.mu.Unlock()
	e.poke()
	return j
}

// cancel asks for the end of the job; over says when it has come. Any goroutine.
func (j *job) cancel() {
	j.stops.Store(true)
	C.metrale_cancel(j.seq.handle, nil)
	j.seq.model.stepper.poke()
}

// wait waits for the end of the job, or of ctx and then of the job.
func (j *job) wait(ctx context.Context) error {
	select {
	case <-j.over:
		return j.err
	case <-ctx.Done():
		j.cancel()
		<-j.over
		if j.err != nil {
			return ctx.Err()
		}
		return nil
	}
}

// end is for the one who started the job, who no longer wants it. Afterwards nobody steps the sequence.
func (j *job) end() {
	select {
	case <-j.over:
	default:
		j.cancel()
		<-j.over
	}
	j.seq.job.Store(nil)
}

func (e *stepper) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *stepper) cancelAll() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, j := range e.jobs {
		j.stops.Store(true)
	}
	e.poke()
}

func (e *stepper) run() {
	for {
		ready, alive := e.ready()
		if !alive {
			return
		}
		if len(ready) == 0 {
			<-e.wake
			continue
		}
		e.step(ready)
	}
}

// ready lists the jobs to step, and ends those that were cancelled. Not alive: no job is left, and the goroutine is to end.
func (e *stepper) ready() (ready []*job, alive bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := e.jobs[:0]
	for _, j := range e.jobs {
		select {
		case <-j.over: // the last step ended it
			continue
		default:
		}
		if j.stops.Load() && !j.hasWork() {
			j.finish(j.cancelled())
			continue
		}
		kept = append(kept, j)
		if j.stops.Load() || len(j.out) < cap(j.out) {
			ready = append(ready, j)
		}
	}
	clear(e.jobs[len(kept):])
	e.jobs = kept
	e.running = len(kept) > 0
	return ready, e.running
}

// hasWork cancels what the sequence still has to do, and says whether that was something. The next step then reports it.
func (j *job) hasWork() bool {
	C.metrale_cancel(j.seq.handle, nil)
	return C.metrale_poll(j.seq.handle, nil, nil) == C.METRALE_AGAIN
}

// cancelled is why a job that was to stop did not succeed.
func (j *job) cancelled() error {
	if j.why != nil {
		return j.why
	}
	return &Error{Status: ErrCancelled, Message: "the sequence was cancelled"}
}

// abandon gives a job up. What still waits in the sequence's queue has to go first, as with a cancel.
func (j *job) abandon(err error) {
	if j.stops.Load() {
		j.finish(err) // nothing else helped
		return
	}
	j.why = err
	j.stops.Store(true)
}

func (j *job) finish(err error) {
	j.err = err
	close(j.over)
}

// step lets the library work for one turn, and hands out what came of it.
func (e *stepper) step(jobs []*job) {
	e.handles, e.results = e.handles[:0], e.results[:0]
	for _, j := range jobs {
		e.handles = append(e.handles, j.seq.handle)
		e.results = append(e.results, C.metrale_step_result{struct_size: C.size_t(unsafe.Sizeof(C.metrale_step_result{}))})
	}
	var object *C.metrale_error
	status := C.metrale_step(&e.handles[0], C.size_t(len(jobs)), C.uint64_t(turn), &e.results[0], &object)
	if status < 0 {
		err := failure(status, object)
		// The one that it is about, else the newest: the others may be able to go on without it.
		at := len(jobs) - 1
		if err.Offset != nil && *err.Offset < uint64(len(jobs)) {
			at = int(*err.Offset)
		}
		jobs[at].abandon(err)
		return
	}
	for i, j := range jobs {
		j.take(&e.results[i])
	}
	for _, j := range jobs {
		if j.hook != nil {
			j.hook.failed.take()
		}
	}
}

// take looks at what a step did for the job.
func (j *job) take(result *C.metrale_step_result) {
	switch {
	case result.status == C.METRALE_AGAIN:
	case result.status < 0:
		j.fail(Status(result.status))
	case j.want == 0:
		if result.queued == 0 {
			j.finish(nil)
		}
	case result.token >= 0:
		j.give(Token(result.token), result.status == C.METRALE_DONE)
	}
}

// fail ends the job for a reason that concerns its sequence alone. For a stream some are ends like others.
func (j *job) fail(status Status) {
	if j.text != nil && (status == ErrContextFull || status == ErrGrammarDone) {
		end := EndContext
		if status == ErrGrammarDone {
			end = EndGrammar
		}
		j.close(Piece{Token: NoToken, End: end})
		return
	}
	switch {
	case status == ErrCancelled && j.stops.Load():
		j.finish(j.cancelled())
	case status == ErrCancelled && j.hook != nil && j.hook.failed.get() != nil:
		// Forks share the hook, so its error stays until all have looked.
		j.finish(&Error{Status: status, Message: "the sampler's hook failed", cause: j.hook.failed.get()})
	case status == ErrCancelled:
		j.finish(j.cancelled())
	default:
		j.abandon(&Error{Status: status, Message: "the sequence cannot go on"})
	}
}

// give hands out a token, as text where that is wanted.
func (j *job) give(token Token, end bool) {
	piece := Piece{Token: token}
	if j.seq.logprobs {
		info := C.metrale_sequence_info{struct_size: C.size_t(unsafe.Sizeof(C.metrale_sequence_info{}))}
		if C.metrale_seq_info(j.seq.handle, &info, nil) == C.METRALE_OK {
			piece.Logprob = float32(info.last_logprob)
		}
	}
	j.want--
	if end {
		piece.End = EndToken
	} else if j.text != nil {
		text, stopped, err := j.text.Push(token)
		if err != nil {
			j.finish(fmt.Errorf("token %d: %w", token, err))
			return
		}
		if piece.Text = text; stopped {
			piece.End = EndStop
		}
	}
	if piece.End == EndNone && j.want == 0 {
		piece.End = EndLength
	}
	if piece.End != EndNone {
		j.close(piece)
		return
	}
	j.put(piece)
}

// close hands out the last piece, with the text that was held back.
func (j *job) close(piece Piece) {
	if j.text != nil && piece.End != EndStop {
		text, _ := j.text.Flush() // fails only where nothing is held back
		piece.Text += text
	}
	j.put(piece)
	j.finish(nil)
}

// put hands out a piece. There is room, but for a job that is to stop.
func (j *job) put(piece Piece) {
	select {
	case j.out <- piece:
	default:
	}
}
