package metrale

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"context"
	"encoding/json"
	"math"
	"runtime"
	"unsafe"
)

// Token is a token's id. Negative values are never ids.
type Token int32

// NoToken stands where there is no token.
const NoToken Token = -1

// Model is a loaded model: immutable, safe to use from any number of goroutines, shared by its sequences.
//
// One goroutine computes for all sequences of a model that want tokens, together, so that the weights are read once for all.
// Goroutines that wait for tokens wait as goroutines do, and cost no thread.
type Model struct {
	handle  *C.metrale_model
	log     *held
	stepper *stepper
	owned   *owned
}

func newModel(handle *C.metrale_model, log *held) *Model {
	m := &Model{handle: handle, log: log, stepper: newStepper()}
	m.owned = own(m, func() {
		C.metrale_free(handle)
		log.release()
	})
	return m
}

// Close gives the model up; the memory goes once its sequences are closed, too. Safe from any goroutine, as often as wanted. The
// garbage collector closes what was forgotten, but it does not know how large a model is.
func (m *Model) Close() error {
	m.owned.release()
	return nil
}

// Info is what a model is.
type Info struct {
	ModelType    string  `json:"model_type"`
	Architecture string  `json:"architecture"`
	Parameters   uint64  `json:"parameters"`
	Layers       int     `json:"layers"`
	Hidden       int     `json:"hidden"` // floats of an embedding
	Vocab        int     `json:"vocab"`
	Context      int     `json:"context"` // most tokens of a sequence
	Compute      string  `json:"compute"`
	Threads      int     `json:"threads"`
	EndTokens    []Token `json:"end_tokens"`
	JSON         string  `json:"-"` // all facts, as the library gives them
}

// Info says what the model is.
func (m *Model) Info() (Info, error) {
	defer runtime.KeepAlive(m)
	var info Info
	var text *C.char
	var size C.size_t
	err := do(func(err **C.metrale_error) C.metrale_status {
		status := C.metrale_model_info(m.handle, &text, &size, err)
		if status == C.METRALE_OK {
			info.JSON = C.GoStringN(text, C.int(size)) // lives until Close
		}
		return status
	})
	if err == nil {
		err = json.Unmarshal([]byte(info.JSON), &info)
	}
	return info, err
}

// Meta is one fact by its name in [Info].JSON, or one value of the file's own metadata: text as it is, everything else as JSON.
// [ErrNotFound] for an unknown key.
func (m *Model) Meta(key string) (string, error) {
	defer runtime.KeepAlive(m)
	name, err := cString("key", key)
	if err != nil {
		return "", err
	}
	defer C.free(unsafe.Pointer(name))
	text, err := sized(256, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_model_meta(m.handle, name, (*C.uint8_t)(out), room, size, err)
	})
	return string(text), err
}

// Fingerprint tells this model from others, as 32 hexadecimal digits. Models with the same one can take up each other's saved
// sequences.
func (m *Model) Fingerprint() (string, error) {
	defer runtime.KeepAlive(m)
	text, err := sized(32, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_model_fingerprint(m.handle, (*C.uint8_t)(out), room, size, err)
	})
	return string(text), err
}

// Tokenize gives the tokens of a text, with those around it that the model was trained to see there. The text of a special
// token is only text.
func (m *Model) Tokenize(text string) ([]Token, error) {
	return m.tokenize(text, C.METRALE_TOKENIZE_ADD_SPECIAL)
}

// TokenizeRaw gives the tokens of a text and nothing more. With special, the text of a special token is that token: for prompts
// of [Model.RenderChat], never for text from a stranger.
func (m *Model) TokenizeRaw(text string, special bool) ([]Token, error) {
	if special {
		return m.tokenize(text, C.METRALE_TOKENIZE_PARSE_SPECIAL)
	}
	return m.tokenize(text, 0)
}

func (m *Model) tokenize(text string, flags C.uint32_t) ([]Token, error) {
	defer runtime.KeepAlive(m)
	return sized(len(text)/2+8, func(out *Token, room C.size_t, count *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_tokenize(m.handle, bytesOf(text), C.size_t(len(text)), flags, (*C.metrale_token)(out), room, count, err)
	})
}

// Detokenize gives the text of tokens, without special ones. It need not be valid UTF-8 where the tokens begin or end inside a
// character.
func (m *Model) Detokenize(tokens []Token) (string, error) {
	return m.detokenize(tokens, C.METRALE_DETOKENIZE_SKIP_SPECIAL)
}

// DetokenizeRaw is [Model.Detokenize] with the text of special tokens.
func (m *Model) DetokenizeRaw(tokens []Token) (string, error) { return m.detokenize(tokens, 0) }

func (m *Model) detokenize(tokens []Token, flags C.uint32_t) (string, error) {
	defer runtime.KeepAlive(m)
	text, err := sized(8*len(tokens)+8, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_detokenize(m.handle, tokensOf(tokens), C.size_t(len(tokens)), flags, (*C.uint8_t)(out), room, size, err)
	})
	return string(text), err
}

// TokenBytes are exactly the bytes that one token adds to a text; a special token gives its literal text.
func (m *Model) TokenBytes(token Token) ([]byte, error) {
	defer runtime.KeepAlive(m)
	return sized(64, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_token_bytes(m.handle, C.metrale_token(token), (*C.uint8_t)(out), room, size, err)
	})
}

// Pooling says how rows become one embedding.
type Pooling uint32

// The ways of pooling.
const (
	PoolingDefault Pooling = C.METRALE_POOLING_DEFAULT // what the model was made for
	PoolingLast    Pooling = C.METRALE_POOLING_LAST
	PoolingMean    Pooling = C.METRALE_POOLING_MEAN
	PoolingFirst   Pooling = C.METRALE_POOLING_FIRST
)

// Embed gives what the model makes of tokens, as one row of [Info].Hidden floats; normalize scales it to length 1. It blocks
// until all is computed: ctx is looked at before that, and [Model.Cancel] ends it.
func (m *Model) Embed(ctx context.Context, tokens []Token, pooling Pooling, normalize bool) ([]float32, error) {
	return m.embed(ctx, tokens, C.uint32_t(pooling), normalize, 1)
}

// EmbedTokens is [Model.Embed] with a row for each token.
func (m *Model) EmbedTokens(ctx context.Context, tokens []Token, normalize bool) ([][]float32, error) {
	flat, err := m.embed(ctx, tokens, C.METRALE_POOLING_NONE, normalize, len(tokens))
	if err != nil {
		return nil, err
	}
	rows := make([][]float32, len(tokens))
	width := len(flat) / len(tokens)
	for i := range rows {
		rows[i] = flat[i*width : (i+1)*width : (i+1)*width]
	}
	return rows, nil
}

func (m *Model) embed(ctx context.Context, tokens []Token, pooling C.uint32_t, normalize bool, rows int) ([]float32, error) {
	defer runtime.KeepAlive(m)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	options := C.metrale_embed_options{pooling: pooling}
	options.struct_size = C.size_t(unsafe.Sizeof(options))
	if normalize {
		options.flags = C.METRALE_EMBED_NORMALIZE
	}
	info, err := m.Info()
	if err != nil {
		return nil, err
	}
	if rows > 0 && info.Hidden > math.MaxInt/rows {
		return nil, &Error{Status: ErrTooLarge, Message: "the rows do not fit in memory"}
	}
	return sized(rows*info.Hidden, func(out *float32, room C.size_t, count *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_embed(m.handle, tokensOf(tokens), C.size_t(len(tokens)), &options, (*C.float)(out), room, count, err)
	})
}

// Cancel ends what every sequence of the model is doing: those calls return [ErrCancelled]. Later ones are not affected.
func (m *Model) Cancel() {
	defer runtime.KeepAlive(m)
	m.stepper.cancelAll()
	C.metrale_cancel_all(m.handle, nil)
}

// PrefixStats say what a model keeps for prompts that begin alike ([LoadOptions].PrefixBytes).
type PrefixStats struct {
	Budget, Bytes                                  uint64 // bytes that may be kept, and that are
	Entries, Tokens, Hits, Misses, Reused, Evicted uint64
}

// Stats says what the model keeps of its sequences' beginnings and how often that served.
func (m *Model) Stats() (PrefixStats, error) {
	defer runtime.KeepAlive(m)
	c := C.metrale_model_counts{struct_size: C.size_t(unsafe.Sizeof(C.metrale_model_counts{}))}
	err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_model_stats(m.handle, &c, err) })
	return PrefixStats{
		Budget: uint64(c.prefix_budget), Bytes: uint64(c.prefix_bytes), Entries: uint64(c.prefix_entries), Tokens: uint64(c.prefix_tokens),
		Hits: uint64(c.prefix_hits), Misses: uint64(c.prefix_misses), Reused: uint64(c.prefix_reused), Evicted: uint64(c.prefix_evicted),
	}, err
}
