package metrale

// #include "shim.h"
import "C"

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// SequenceOptions say how to make a sequence. The zero value is the default of everything.
type SequenceOptions struct {
	Context   int      // most tokens the sequence may hold; 0 takes the model's
	Sampler   *Sampler // how tokens are chosen; nil is greedy
	Seed      uint64   // replaces the sampler's unless 0, so that one sampler can serve many sequences
	IgnoreEnd bool     // tokens that end generation count as ordinary ones
	Logprobs  bool     // record the log-probability of chosen tokens
}

// Sequence is one timeline of tokens, with its cache, sampler and grammar. Methods that change it and methods that look at it
// exclude each other as a lock would, but nobody waits: the second one gets [ErrBusy].
type Sequence struct {
	handle   *C.metrale_seq
	model    *Model
	owned    *owned
	shares   *holdings // the callbacks that the sequence may call
	logprobs bool

	use    sync.RWMutex // tried, never waited for
	hook   *hook        // of the sampler in force, under use
	job    atomic.Pointer[job]
	closed atomic.Bool
}

// NewSequence makes an empty sequence; options may be nil.
func (m *Model) NewSequence(options *SequenceOptions) (*Sequence, error) {
	defer runtime.KeepAlive(m)
	if options == nil {
		options = &SequenceOptions{}
	}
	if options.Context < 0 {
		return nil, invalid("context is %d; it is a count, 0 for the model's", options.Context)
	}
	sampler, share, hook, err := options.Sampler.native()
	if err != nil {
		return nil, err
	}
	defer C.metrale_sampler_free(sampler)
	wanted := C.metrale_seq_options{context: C.uint64_t(options.Context), sampler: sampler, seed: C.uint64_t(options.Seed)}
	wanted.struct_size = C.size_t(unsafe.Sizeof(wanted))
	if options.IgnoreEnd {
		wanted.flags |= C.METRALE_SEQ_IGNORE_END
	}
	if options.Logprobs {
		wanted.flags |= C.METRALE_SEQ_LOGPROBS
	}
	var handle *C.metrale_seq
	err = do(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_new(m.handle, &wanted, &handle, err)
	})
	if err != nil {
		share.release()
		return nil, err
	}
	return m.newSequence(handle, hook, options.Logprobs, share, m.log.retain()), nil
}

func (m *Model) newSequence(handle *C.metrale_seq, hook *hook, logprobs bool, shares ...*held) *Sequence {
	s := &Sequence{handle: handle, model: m, shares: &holdings{}, hook: hook, logprobs: logprobs}
	s.shares.add(shares...)
	all := s.shares
	s.owned = own(s, func() {
		C.metrale_seq_free(handle)
		all.release()
	})
	return s
}

// Close gives the sequence up, and ends what it is doing: that returns [ErrCancelled]. It waits for nothing. Safe from any
// goroutine, as often as wanted.
func (s *Sequence) Close() error {
	s.closed.Store(true)
	s.Cancel()
	if s.use.TryLock() {
		s.owned.release()
		s.use.Unlock()
	}
	return nil // else whoever uses the sequence frees it
}

// Cancel ends what the sequence is doing: that returns [ErrCancelled] and leaves the sequence as it was. Later calls are not
// affected. It waits for nothing. Safe from any goroutine.
func (s *Sequence) Cancel() {
	defer runtime.KeepAlive(s)
	if j := s.job.Load(); j != nil {
		j.cancel()
	}
	C.metrale_cancel(s.handle, nil)
}

var errClosed = &Error{Status: ErrInvalidHandle, Message: "the sequence is closed"}
var errBusy = &Error{Status: ErrBusy, Message: "another goroutine is using the sequence", Retry: true}

// change is for methods that change the sequence; the result ends the change.
func (s *Sequence) change() (done func(), err error) {
	if s.closed.Load() {
		return nil, errClosed
	}
	if !s.use.TryLock() {
		return nil, errBusy
	}
	return func() { s.use.Unlock(); s.left() }, nil
}

// look is for methods that leave the sequence as it is.
func (s *Sequence) look() (done func(), err error) {
	if s.closed.Load() {
		return nil, errClosed
	}
	if !s.use.TryRLock() {
		return nil, errBusy
	}
	return func() { s.use.RUnlock(); s.left() }, nil
}

// left frees a sequence that was closed while it was in use.
func (s *Sequence) left() {
	if s.closed.Load() {
		s.owned.release()
	}
	runtime.KeepAlive(s)
}

// changing runs one function of the library that changes the sequence.
func (s *Sequence) changing(f func(err **C.metrale_error) C.metrale_status) error {
	done, err := s.change()
	if err != nil {
		return err
	}
	defer done()
	return do(f)
}

// looking runs one function of the library that leaves the sequence as it is.
func (s *Sequence) looking(f func(err **C.metrale_error) C.metrale_status) error {
	done, err := s.look()
	if err != nil {
		return err
	}
	defer done()
	return do(f)
}

// Model is the model that the sequence belongs to.
func (s *Sequence) Model() *Model { return s.model }

// SequenceInfo is what a sequence is at the moment.
type SequenceInfo struct {
	Length, Capacity int     // tokens it holds, and may hold
	LastToken        Token   // [NoToken] when there is none
	LastLogprob      float32 // of the newest token that was chosen; NaN without [SequenceOptions].Logprobs
}

// Info says what the sequence is at the moment.
func (s *Sequence) Info() (SequenceInfo, error) {
	c := C.metrale_sequence_info{struct_size: C.size_t(unsafe.Sizeof(C.metrale_sequence_info{}))}
	err := s.looking(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_info(s.handle, &c, err) })
	return SequenceInfo{int(c.length), int(c.capacity), Token(c.last_token), float32(c.last_logprob)}, err
}

// Prefill appends tokens and computes what may follow them. When it fails, or ctx ends first, the sequence is as before.
func (s *Sequence) Prefill(ctx context.Context, tokens []Token) error {
	done, err := s.change()
	if err != nil {
		return err
	}
	defer done()
	if err := ctx.Err(); err != nil || len(tokens) == 0 {
		return err
	}
	// The queue is read in pieces, so a mark is what makes this all or nothing.
	var mark C.uint64_t
	if err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_mark(s.handle, &mark, err) }); err != nil {
		return err
	}
	defer C.metrale_seq_commit(s.handle, mark, nil)
	err = do(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_feed(s.handle, tokensOf(tokens), C.size_t(len(tokens)), err)
	})
	if err != nil {
		return err
	}
	j := s.start(0, 1, nil)
	defer j.end()
	if err := j.wait(ctx); err != nil {
		C.metrale_seq_rollback(s.handle, mark, nil)
		return err
	}
	return nil
}

// Next chooses one token, appends it and computes what may follow it. end is true when the token ends generation; going on is
// allowed. When it fails, or ctx ends first, the sequence is as before.
func (s *Sequence) Next(ctx context.Context) (token Token, end bool, err error) {
	done, err := s.change()
	if err != nil {
		return NoToken, false, err
	}
	defer done()
	if err := ctx.Err(); err != nil {
		return NoToken, false, err
	}
	j := s.start(1, 1, nil)
	defer j.end()
	err = j.wait(ctx)
	select {
	case piece := <-j.out: // also when ctx ended after the token was there
		return piece.Token, piece.End == EndToken, nil
	default:
		return NoToken, false, err
	}
}

// SetSampler changes how the next tokens are chosen, from the sampler's seed on. nil is greedy.
func (s *Sequence) SetSampler(sampler *Sampler) error {
	native, share, hook, err := sampler.native()
	if err != nil {
		return err
	}
	defer C.metrale_sampler_free(native)
	done, err := s.change()
	if err != nil {
		share.release()
		return err
	}
	defer done()
	if err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_sampling(s.handle, native, err) }); err != nil {
		share.release()
		return err
	}
	s.shares.add(share) // the one before stays: marks and forks may go back to it
	s.hook = hook
	return nil
}

// SetGrammar makes the chosen tokens follow a grammar, from its start. nil lifts the one in force.
func (s *Sequence) SetGrammar(grammar *Grammar) error {
	defer runtime.KeepAlive(grammar)
	var native *C.metrale_grammar
	if grammar != nil {
		native = grammar.handle
	}
	return s.changing(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_grammar(s.handle, native, err) })
}

// Stats are what a sequence has done since it was made, and the memory it holds.
type Stats struct {
	Read, Reused, Generated, Passes, Cancelled uint64 // tokens of prompts, those not computed, tokens produced, passes, cancels
	PrefillNanoseconds, DecodeNanoseconds      uint64
	KVOwned, KVShared, StateOwned, StateShared uint64 // bytes
}

// Stats says what the sequence has done and the memory it holds.
func (s *Sequence) Stats() (Stats, error) {
	c := C.metrale_stats{struct_size: C.size_t(unsafe.Sizeof(C.metrale_stats{}))}
	err := s.looking(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_stats(s.handle, &c, err) })
	return Stats{
		Read: uint64(c.read), Reused: uint64(c.reused), Generated: uint64(c.generated), Passes: uint64(c.passes), Cancelled: uint64(c.cancelled),
		PrefillNanoseconds: uint64(c.prefill_ns), DecodeNanoseconds: uint64(c.decode_ns),
		KVOwned: uint64(c.kv_owned), KVShared: uint64(c.kv_shared), StateOwned: uint64(c.state_owned), StateShared: uint64(c.state_shared),
	}, err
}
