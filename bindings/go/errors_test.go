package metrale

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
)

func TestEveryStatusHasItsName(t *testing.T) {
	for status := ErrGrammarDone; status < 0; status++ {
		if name := status.Error(); !strings.HasPrefix(name, "METRALE_") || name == "METRALE_UNKNOWN" {
			t.Errorf("status %d is called %q", int32(status), name)
		}
	}
	if ErrBusy.Error() != "METRALE_BUSY" || ErrContextFull.Error() != "METRALE_CONTEXT_FULL" {
		t.Errorf("%q and %q", ErrBusy.Error(), ErrContextFull.Error())
	}
}

func TestErrorsAreMatchedByStatusAndCarryDetails(t *testing.T) {
	_, err := Load(context.Background(), "no/such/model.gguf", nil)
	var object *Error
	if !errors.Is(err, ErrNotFound) || !errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrBusy) || !errors.As(err, &object) {
		t.Fatalf("%v", err)
	}
	if !strings.Contains(object.Error(), "no/such/model.gguf") || !strings.Contains(object.Error(), "METRALE_NOT_FOUND") {
		t.Errorf("%q does not name the file and the status", object)
	}

	m := load(t, nil)
	s := sequence(t, m, &SequenceOptions{Context: 8})
	err = s.Prefill(context.Background(), make([]Token, 9))
	if !errors.Is(err, ErrContextFull) || !errors.As(err, &object) || object.Available == nil || *object.Available != 8 || *object.Wanted != 9 {
		t.Errorf("a prompt of 9 in a context of 8: %v, %+v", err, object)
	}
	err = s.Prefill(context.Background(), []Token{1, 2, 100000})
	if !errors.Is(err, ErrInvalidToken) || !errors.As(err, &object) || object.Offset == nil || *object.Offset != 2 {
		t.Errorf("a token outside the vocabulary: %v, %+v", err, object)
	}
	if length(t, s) != 0 {
		t.Errorf("a prompt that was refused left %d tokens", length(t, s))
	}
	if _, _, err := s.Next(context.Background()); !errors.Is(err, ErrInvalidState) {
		t.Errorf("the next token of nothing: %v", err)
	}
	if _, err := PathSource("a\x00b"); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a path with a NUL: %v", err)
	}
}
