package metrale

// #include "shim.h"
import "C"

import (
	"runtime"
	"sync"
	"unsafe"
)

// gate bounds how many calls are inside the library at once. A goroutine in C keeps a thread to itself, so without a bound a
// thousand goroutines that tokenize would be a thousand threads. Callbacks count as outside while they run: they may call
// the library themselves, and would otherwise wait for each other.
var gate = newSemaphore(max(4, runtime.GOMAXPROCS(0)))

type semaphore struct {
	mu               sync.Mutex
	free             sync.Cond
	used, room, lent int
}

func newSemaphore(room int) *semaphore {
	s := &semaphore{room: room}
	s.free.L = &s.mu
	return s
}

func (s *semaphore) acquire() {
	s.mu.Lock()
	for s.used >= s.room+s.lent {
		s.free.Wait()
	}
	s.used++
	s.mu.Unlock()
}

func (s *semaphore) release() {
	s.mu.Lock()
	s.used--
	s.mu.Unlock()
	s.free.Signal()
}

// lend makes room for one more while a callback runs; the result takes it back.
func (s *semaphore) lend() func() {
	s.mu.Lock()
	s.lent++
	s.mu.Unlock()
	s.free.Signal()
	return func() {
		s.mu.Lock()
		s.lent--
		s.mu.Unlock()
	}
}

// call runs one function of the library through the gate. The status is not negative when the error is nil.
func call(f func(err **C.metrale_error) C.metrale_status) (C.metrale_status, error) {
	gate.acquire()
	defer gate.release()
	return direct(f)
}

// direct is call for functions that wait for nothing, or that must not wait for others.
func direct(f func(err **C.metrale_error) C.metrale_status) (C.metrale_status, error) {
	var object *C.metrale_error
	status := f(&object)
	if status < 0 {
		return status, failure(status, object)
	}
	return status, nil
}

// do is call where only success matters.
func do(f func(err **C.metrale_error) C.metrale_status) error {
	_, err := call(f)
	return err
}

// sized asks for a result of unknown size: with room for guess items, then with the room that was said to be needed.
func sized[T any](guess int, f func(out *T, room C.size_t, count *C.size_t, err **C.metrale_error) C.metrale_status) ([]T, error) {
	for room := guess; ; {
		out := make([]T, room)
		var count C.size_t
		status, err := call(func(err **C.metrale_error) C.metrale_status {
			return f(unsafe.SliceData(out), C.size_t(room), &count, err)
		})
		if err != nil {
			return nil, err
		}
		if status != C.METRALE_MORE {
			return out[:count], nil
		}
		room = int(count)
	}
}

func bytesOf(text string) *C.uint8_t {
	return (*C.uint8_t)(unsafe.Pointer(unsafe.StringData(text)))
}

func tokensOf(tokens []Token) *C.metrale_token {
	return (*C.metrale_token)(unsafe.Pointer(unsafe.SliceData(tokens)))
}

// checkABI says once whether this package, as it was compiled, fits the library that runs.
var checkABI = sync.OnceValue(func() error {
	_, err := direct(func(err **C.metrale_error) C.metrale_status { return C.metrale_check_abi(C.METRALE_ABI_VERSION, err) })
	return err
})

// Version is the library's version, such as "0.1.0".
func Version() string { return C.GoString(C.metrale_version_string()) }

// BuildInfo says how the library was built and what it found on this machine, as a JSON object.
func BuildInfo() string { return C.GoString(C.metrale_build_info()) }
