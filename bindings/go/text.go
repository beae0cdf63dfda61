package metrale

// #include "shim.h"
import "C"

import (
	"runtime"
	"strings"
	"unsafe"
)

// TextOptions say how tokens become text.
type TextOptions struct {
	Stops    []string // strings that end the text
	Specials bool     // show the text of special tokens
}

// Text turns one sequence's tokens into text that is whole UTF-8 at every moment, and ends before any of its stop strings. For
// those who use [Sequence.Next]; a stream has its own. One goroutine at a time.
type Text struct {
	handle *C.metrale_text
	owned  *owned
}

// NewText makes a text stream; options may be nil. [ErrNotFound] for a model without a tokenizer.
func (m *Model) NewText(options *TextOptions) (*Text, error) {
	defer runtime.KeepAlive(m)
	if options == nil {
		options = &TextOptions{}
	}
	var flags C.uint64_t
	if options.Specials {
		flags = C.METRALE_TEXT_SPECIALS
	}
	for i, stop := range options.Stops {
		if stop == "" || strings.Contains(stop, "\x00") {
			return nil, invalid("stop string %d is empty or holds a NUL byte", i)
		}
	}
	stops := strings.Join(options.Stops, "\x00")
	var handle *C.metrale_text
	err := do(func(err **C.metrale_error) C.metrale_status {
		return C.go_text_new(m.handle, flags, bytesOf(stops), C.size_t(len(stops)), &handle, err)
	})
	if err != nil {
		return nil, err
	}
	t := &Text{handle: handle}
	t.owned = own(t, func() { C.metrale_text_free(handle) })
	return t, nil
}

// Push takes a token and gives the text that became certain, which may be none; stopped when a stop string was reached, which is
// not part of the text.
func (t *Text) Push(token Token) (text string, stopped bool, err error) {
	return t.piece(func(piece *C.metrale_text_piece, err **C.metrale_error) C.metrale_status {
		return C.metrale_text_push(t.handle, C.metrale_token(token), piece, err)
	})
}

// Flush gives out what is held back: the beginning of a character, as U+FFFD, or of a stop string.
func (t *Text) Flush() (string, error) {
	text, _, err := t.piece(func(piece *C.metrale_text_piece, err **C.metrale_error) C.metrale_status {
		return C.metrale_text_flush(t.handle, piece, err)
	})
	return text, err
}

// Reset brings the stream back to its beginning; what was held back is dropped.
func (t *Text) Reset() error {
	defer runtime.KeepAlive(t)
	_, err := direct(func(err **C.metrale_error) C.metrale_status { return C.metrale_text_reset(t.handle, err) })
	return err
}

// Close gives the stream up. Safe from any goroutine, as often as wanted.
func (t *Text) Close() error {
	t.owned.release()
	return nil
}

func (t *Text) piece(f func(piece *C.metrale_text_piece, err **C.metrale_error) C.metrale_status) (string, bool, error) {
	defer runtime.KeepAlive(t)
	piece := C.metrale_text_piece{struct_size: C.size_t(unsafe.Sizeof(C.metrale_text_piece{}))}
	status, err := direct(func(err **C.metrale_error) C.metrale_status { return f(&piece, err) })
	if err != nil {
		return "", false, err
	}
	return string(unsafe.Slice((*byte)(unsafe.Pointer(piece.bytes)), int(piece.len))), status == C.METRALE_DONE, nil
}
