package metrale

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"io"
	"runtime/cgo"
	"sync"
	"unsafe"
)

// callback is the value behind a handle's number. A handle that has ended is no callback any more, rather than a panic: a log
// record may be on its way while the last owner lets go.
func callback[T any](number C.uintptr_t) (value T, ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	value, ok = cgo.Handle(number).Value().(T)
	return value, ok
}

// guarded runs a callback; a panic becomes an error, since nothing may unwind through C.
func guarded(f func() error) (err error) {
	defer gate.lend()()
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("callback panicked: %v", reason)
		}
	}()
	return f()
}

// firstError keeps what a callback said until the call that failed because of it asks.
type firstError struct {
	mu  sync.Mutex
	err error
}

func (f *firstError) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

func (f *firstError) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *firstError) take() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.err
	f.err = nil
	return err
}

// because adds the callback's error, if there is one, to the error of the call that it made fail.
func because(err error, callback *firstError) error {
	var object *Error
	if callback != nil && errors.As(err, &object) {
		if cause := callback.take(); cause != nil {
			object.cause = cause
		}
	}
	return err
}

type logSink struct{ log func(Record) }

//export metraleGoLog
func metraleGoLog(user C.uintptr_t, level C.uint32_t, status C.metrale_status, text *C.char, size C.size_t) {
	if sink, ok := callback[*logSink](user); ok {
		record := Record{Level: LogLevel(level), Text: C.GoStringN(text, C.int(size))}
		if status < 0 {
			record.Err = Status(status)
		}
		_ = guarded(func() error { sink.log(record); return nil })
	}
}

type reader struct {
	from   io.ReaderAt
	failed firstError
}

//export metraleGoRead
func metraleGoRead(user C.uintptr_t, offset C.uint64_t, into unsafe.Pointer, size C.size_t) C.int64_t {
	r, ok := callback[*reader](user)
	if !ok {
		return -1
	}
	count := 0
	err := guarded(func() (err error) {
		count, err = r.from.ReadAt(unsafe.Slice((*byte)(into), int(size)), int64(offset))
		if count == int(size) {
			return nil // io.EOF may come with the last bytes
		}
		return err
	})
	if err != nil {
		r.failed.set(err)
		return -1
	}
	return C.int64_t(count)
}

type progress struct {
	report func(Progress)
	failed firstError
}

//export metraleGoProgress
func metraleGoProgress(user C.uintptr_t, done, total C.uint64_t, phase *C.char) C.int32_t {
	p, ok := callback[*progress](user)
	if !ok {
		return 0
	}
	now := Progress{Phase: C.GoString(phase), Done: uint64(done), Total: uint64(total)}
	if err := guarded(func() error { p.report(now); return nil }); err != nil {
		p.failed.set(err)
		return 1
	}
	return 0
}

type hook struct {
	choose Hook
	failed firstError
}

//export metraleGoHook
func metraleGoHook(user C.uintptr_t, logits *C.float, count C.size_t, history *C.metrale_token, length C.size_t) C.int32_t {
	h, ok := callback[*hook](user)
	if !ok {
		return 1
	}
	err := guarded(func() error {
		return h.choose(unsafe.Slice((*float32)(unsafe.Pointer(logits)), int(count)), unsafe.Slice((*Token)(unsafe.Pointer(history)), int(length)))
	})
	if err != nil {
		h.failed.set(err)
		return 1
	}
	return 0
}
