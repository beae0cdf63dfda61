package metrale

// #include "shim.h"
import "C"

import (
	"runtime"
	"unsafe"
)

// Sampler is how tokens are chosen: stages that run in order on every row of logits, then a draw from what is left. The zero
// Sampler is greedy. The same seed gives the same tokens.
type Sampler struct {
	Stages []Stage
	Seed   uint64
}

// Stage is one step of a [Sampler].
type Stage struct {
	kind, count   uint32
	token         Token
	value, second float32
	length        uint32
	hook          Hook
}

// Hook is a stage of the caller's own: it may change logits, one for each token. Minus infinity rules a token out, and one that
// was ruled out stays so. history are the sequence's tokens, prompt included. Neither slice may be kept. An error fails the
// sequence's step and is in the chain of its error; so does a panic. What it does may depend on its arguments only, since it may
// be called again for the same token. It may be called on several goroutines at once, and must not wait for sequences of
// its model, all of which wait for it.
type Hook func(logits []float32, history []Token) error

// Greedy keeps only the highest logit.
func Greedy() Stage { return Stage{kind: C.METRALE_STAGE_GREEDY} }

// Temperature divides every logit by t.
func Temperature(t float32) Stage { return Stage{kind: C.METRALE_STAGE_TEMPERATURE, value: t} }

// TopK keeps the n highest logits; 0 keeps all.
func TopK(n uint32) Stage { return Stage{kind: C.METRALE_STAGE_TOP_K, count: n} }

// TopP keeps the likeliest tokens until their probabilities reach p.
func TopP(p float32) Stage { return Stage{kind: C.METRALE_STAGE_TOP_P, value: p} }

// MinP keeps tokens at least p times as likely as the likeliest.
func MinP(p float32) Stage { return Stage{kind: C.METRALE_STAGE_MIN_P, value: p} }

// Typical keeps tokens whose surprise is nearest to the entropy of the row, until their probabilities reach p.
func Typical(p float32) Stage { return Stage{kind: C.METRALE_STAGE_TYPICAL, value: p} }

// TopNSigma keeps logits of at least the highest minus n standard deviations.
func TopNSigma(n float32) Stage { return Stage{kind: C.METRALE_STAGE_TOP_N_SIGMA, value: n} }

// XTC leaves out, in a share of all draws, all but the least likely of the tokens that are at least threshold likely.
func XTC(threshold, share float32) Stage {
	return Stage{kind: C.METRALE_STAGE_XTC, value: threshold, second: share}
}

// Repetition divides positive logits of tokens among the newest window (0: all) by penalty, and multiplies negative ones.
func Repetition(penalty float32, window uint32) Stage {
	return Stage{kind: C.METRALE_STAGE_REPETITION, value: penalty, count: window}
}

// Presence subtracts penalty once from the logit of every token among the newest window (0: all).
func Presence(penalty float32, window uint32) Stage {
	return Stage{kind: C.METRALE_STAGE_PRESENCE, value: penalty, count: window}
}

// Frequency subtracts penalty for every occurrence of a token among the newest window (0: all).
func Frequency(penalty float32, window uint32) Stage {
	return Stage{kind: C.METRALE_STAGE_FREQUENCY, value: penalty, count: window}
}

// DRY subtracts multiplier times base to the power of the tokens beyond allowed, where a token would make a passage longer that
// occurs before among the newest window (0: all).
func DRY(multiplier, base float32, allowed, window uint32) Stage {
	return Stage{kind: C.METRALE_STAGE_DRY, value: multiplier, second: base, length: allowed, count: window}
}

// DRYBreaker is a token that no passage of [DRY] reaches over.
func DRYBreaker(token Token) Stage { return Stage{kind: C.METRALE_STAGE_DRY_BREAKER, token: token} }

// Bias adds value to the logit of a token; minus infinity rules it out.
func Bias(token Token, value float32) Stage {
	return Stage{kind: C.METRALE_STAGE_BIAS, token: token, value: value}
}

// Mirostat holds the surprise of drawn tokens at about surprise bits, learning at rate (0.1 is usual) from the likeliest count
// (100 is usual). Only as the last stage.
func Mirostat(surprise, rate float32, count uint32) Stage {
	return Stage{kind: C.METRALE_STAGE_MIROSTAT, value: surprise, second: rate, count: count}
}

// MirostatV2 holds the surprise of drawn tokens at surprise bits. Only as the last stage.
func MirostatV2(surprise, rate float32) Stage {
	return Stage{kind: C.METRALE_STAGE_MIROSTAT_V2, value: surprise, second: rate}
}

// HookStage calls h where it stands among the stages. A sampler has at most one.
func HookStage(h Hook) Stage { return Stage{kind: C.METRALE_STAGE_HOOK, hook: h} }

// native makes the sampler for C, which the caller frees, and its hook, of which the caller gets the only share; nil where there
// is none. A nil sampler is nil.
func (s *Sampler) native() (sampler *C.metrale_sampler, share *held, h *hook, err error) {
	if s == nil {
		return nil, nil, nil, nil
	}
	stages := make([]C.metrale_sampler_stage, len(s.Stages))
	for i, stage := range s.Stages {
		stages[i] = C.metrale_sampler_stage{
			kind: C.uint32_t(stage.kind), count: C.uint32_t(stage.count), token: C.metrale_token(stage.token),
			value: C.float(stage.value), second: C.float(stage.second), length: C.uint32_t(stage.length),
		}
		if stage.kind != C.METRALE_STAGE_HOOK {
			continue
		}
		if stage.hook == nil || h != nil {
			return nil, nil, nil, invalid("stage %d: a sampler has at most one hook, and it is a function", i)
		}
		h = &hook{choose: stage.hook}
	}
	err = do(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_sampler_new(unsafe.SliceData(stages), C.size_t(len(stages)), C.uint64_t(s.Seed), &sampler, err)
	})
	if err == nil && h != nil {
		share = hold(h)
		err = do(func(err **C.metrale_error) C.metrale_status {
			return C.go_sampler_set_hook(sampler, C.uintptr_t(share.number()), err)
		})
	}
	if err != nil {
		share.release()
		C.metrale_sampler_free(sampler)
		return nil, nil, nil, err
	}
	runtime.KeepAlive(s)
	return sampler, share, h, nil
}
