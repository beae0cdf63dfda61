package metrale

// #include "shim.h"
import "C"

import (
	"context"
	"unsafe"
)

// Mark is a point of a sequence that it can go back to.
type Mark uint64

// Fork makes a second sequence that holds the same tokens and will choose the same ones. Memory is shared until one of the two
// writes. Marks stay with the original.
func (s *Sequence) Fork() (*Sequence, error) {
	done, err := s.look()
	if err != nil {
		return nil, err
	}
	defer done()
	var handle *C.metrale_seq
	if err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_fork(s.handle, &handle, err) }); err != nil {
		return nil, err
	}
	return s.model.newSequence(handle, s.hook, s.logprobs, s.shares.retained()...), nil
}

// Mark marks this point. The mark lasts until it is committed or the sequence goes back to before it.
func (s *Sequence) Mark() (Mark, error) {
	var mark C.uint64_t
	err := s.changing(func(err **C.metrale_error) C.metrale_status { return C.metrale_seq_mark(s.handle, &mark, err) })
	return Mark(mark), err
}

// Rollback goes back to a mark, as often as wanted: tokens, state, logits, grammar and the sampler's generator are bit for bit
// what they were. Later marks end; this one stays.
func (s *Sequence) Rollback(mark Mark) error {
	return s.changing(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_rollback(s.handle, C.uint64_t(mark), err)
	})
}

// Commit keeps what came since a mark and gives the mark up.
func (s *Sequence) Commit(mark Mark) error {
	return s.changing(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_commit(s.handle, C.uint64_t(mark), err)
	})
}

// Truncate keeps the first length tokens and forgets the rest. [ErrUnsupported] where the model's state cannot go back.
func (s *Sequence) Truncate(length int) error {
	if length < 0 {
		return invalid("length is %d", length)
	}
	return s.changing(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_truncate(s.handle, C.size_t(length), err)
	})
}

// Shift takes count tokens out, from index from on, which makes room at the end of a full sequence. metrale.h says what that
// means for what follows.
func (s *Sequence) Shift(from, count int) error {
	if from < 0 || count < 0 {
		return invalid("from is %d and count %d", from, count)
	}
	return s.changing(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_shift(s.handle, C.size_t(from), C.size_t(count), err)
	})
}

// Match says how many of tokens the sequence begins with.
func (s *Sequence) Match(tokens []Token) (int, error) {
	var count C.size_t
	err := s.looking(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_match(s.handle, tokensOf(tokens), C.size_t(len(tokens)), &count, err)
	})
	return int(count), err
}

// Save gives the sequence's state as bytes, for [Sequence.Restore] on a sequence of the same model, also in another process.
func (s *Sequence) Save() ([]byte, error) {
	done, err := s.look()
	if err != nil {
		return nil, err
	}
	defer done()
	return sized(0, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_save(s.handle, (*C.uint8_t)(out), room, size, err)
	})
}

// Restore makes the sequence what [Sequence.Save] wrote, all or nothing. The sampler's stages stay; a grammar that was followed
// must be set before.
func (s *Sequence) Restore(state []byte) error {
	return s.changing(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_restore(s.handle, (*C.uint8_t)(unsafe.SliceData(state)), C.size_t(len(state)), err)
	})
}

// Logits are those of the token that follows all tokens the sequence holds, one for each id.
func (s *Sequence) Logits() ([]float32, error) {
	var logits []float32
	err := s.looking(func(err **C.metrale_error) C.metrale_status {
		var row *C.float
		var size C.size_t
		status := C.metrale_seq_logits(s.handle, &row, &size, err)
		if status == C.METRALE_OK {
			logits = append(logits, unsafe.Slice((*float32)(unsafe.Pointer(row)), int(size))...)
		}
		return status
	})
	return logits, err
}

// Candidate is a token that may come next, and the natural logarithm of its probability before any sampler stage.
type Candidate struct {
	Token   Token
	Logprob float32
}

// Logprobs gives the log-probabilities of the given tokens as the next one, and the top likeliest candidates, likeliest first.
func (s *Sequence) Logprobs(tokens []Token, top int) (given []float32, candidates []Candidate, err error) {
	if top < 0 {
		return nil, nil, invalid("top is %d", top)
	}
	// Bounded before room is made for it.
	if info, err := s.model.Info(); err == nil && top > info.Vocab {
		return nil, nil, invalid("top is %d, the vocabulary has %d tokens", top, info.Vocab)
	}
	given = make([]float32, len(tokens))
	ids, values := make([]Token, top), make([]float32, top)
	err = s.looking(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_logprobs(s.handle, tokensOf(tokens), C.size_t(len(tokens)), (*C.float)(unsafe.SliceData(given)),
			C.size_t(top), tokensOf(ids), (*C.float)(unsafe.SliceData(values)), err)
	})
	if err != nil {
		return nil, nil, err
	}
	candidates = make([]Candidate, top)
	for i := range candidates {
		candidates[i] = Candidate{ids[i], values[i]}
	}
	return given, candidates, nil
}

// Encode reads the source text of an empty sequence of a model that translates: [language, text ..., end] as tokens. It blocks
// until all is computed; [Sequence.Cancel] or the end of ctx ends it.
func (s *Sequence) Encode(ctx context.Context, tokens []Token) error {
	return s.blocking(ctx, s.changing, func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_encode(s.handle, tokensOf(tokens), C.size_t(len(tokens)), err)
	})
}

// BeamOptions say how to search; zeros are defaults.
type BeamOptions struct {
	Beams         int     // continuations kept at each step; 0 means 5
	MaxTokens     int     // 0 means what the sequence has room for
	LengthPenalty float32 // power of the length that scores are divided by; 0 means 1
	PlainScore    bool    // scores are sums of log-probabilities, whatever the length
}

// Beam gives the likeliest continuation by beam search, and its score. The sequence stays as it is. It blocks until the search
// is over; the end of ctx or [Sequence.Cancel] asks it to stop.
func (s *Sequence) Beam(ctx context.Context, options BeamOptions) ([]Token, float32, error) {
	if options.Beams < 0 || options.MaxTokens < 0 {
		return nil, 0, invalid("beams is %d and tokens %d", options.Beams, options.MaxTokens)
	}
	wanted := C.metrale_beam_options{
		beams: C.uint64_t(options.Beams), max_tokens: C.uint64_t(options.MaxTokens), length_penalty: C.float(options.LengthPenalty),
	}
	wanted.struct_size = C.size_t(unsafe.Sizeof(wanted))
	if options.PlainScore {
		wanted.flags = C.METRALE_BEAM_PLAIN_SCORE
	}
	info, err := s.Info()
	if err != nil {
		return nil, 0, err
	}
	// Room for the longest continuation there can be: with too little, the search would have to be done twice.
	out := make([]Token, info.Capacity-info.Length)
	var count C.size_t
	var score C.float
	err = s.blocking(ctx, s.looking, func(err **C.metrale_error) C.metrale_status {
		return C.metrale_seq_beam(s.handle, &wanted, tokensOf(out), C.size_t(len(out)), &count, &score, err)
	})
	if err != nil {
		return nil, 0, err
	}
	if int(count) > len(out) {
		return nil, 0, errBusy // somebody shortened the sequence meanwhile
	}
	return out[:count], float32(score), nil
}

type use func(f func(err **C.metrale_error) C.metrale_status) error

// blocking runs a function that computes on its own, and cancels it when ctx ends.
func (s *Sequence) blocking(ctx context.Context, use use, f func(err **C.metrale_error) C.metrale_status) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, s.Cancel)()
	err := use(f)
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
