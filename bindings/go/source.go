package metrale

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"io"
	"os"
	"runtime"
	"sync"
	"unsafe"
)

// Source is where a model's bytes come from. It may be loaded any number of times, and closed as soon as a load has begun.
type Source struct {
	handle *C.metrale_source
	owned  *owned
	shares *holdings // of the readers below

	mu      sync.Mutex
	readers []*reader // of this source and, of a folder, its parts
}

func newSource(from *reader, create func(reader C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status) (*Source, error) {
	if err := checkABI(); err != nil {
		return nil, err
	}
	s := &Source{shares: &holdings{}}
	var share *held
	if from != nil {
		share = hold(from)
		s.readers = []*reader{from}
	}
	// A variable of its own, since C may only be shown Go memory that holds no Go pointers.
	var handle *C.metrale_source
	err := do(func(err **C.metrale_error) C.metrale_status {
		return create(C.uintptr_t(share.number()), &handle, err)
	})
	if err != nil {
		share.release()
		return nil, err
	}
	s.handle = handle
	shares := s.shares
	shares.add(share)
	s.owned = own(s, func() {
		C.metrale_source_free(handle)
		shares.release()
	})
	return s, nil
}

// PathSource is a GGUF file (of a split one the first part) or a folder with config.json. Files are mapped.
func PathSource(path string) (*Source, error) { return pathSource(path, 0) }

// ReadPathSource is [PathSource], but files are read into memory while they load, and may change afterwards.
func ReadPathSource(path string) (*Source, error) { return pathSource(path, C.METRALE_SOURCE_READ) }

func pathSource(path string, flags C.uint64_t) (*Source, error) {
	text, err := cString("path", path)
	if err != nil {
		return nil, err
	}
	defer C.free(unsafe.Pointer(text))
	return newSource(nil, func(_ C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status {
		return C.metrale_source_path(text, flags, out, err)
	})
}

// BytesSource is one whole file in memory, which is copied.
func BytesSource(file []byte) (*Source, error) {
	return newSource(nil, func(_ C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status {
		return C.metrale_source_buffer((*C.uint8_t)(unsafe.SliceData(file)), C.size_t(len(file)), C.METRALE_SOURCE_COPY, out, err)
	})
}

// FileSource is one whole file of size bytes (0: all that follow) that lies in an open file from offset on. It is mapped; file
// may be closed at once.
func FileSource(file *os.File, offset, size uint64) (*Source, error) {
	defer runtime.KeepAlive(file)
	return newSource(nil, func(_ C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status {
		return C.metrale_source_fd(C.int32_t(file.Fd()), C.uint64_t(offset), C.uint64_t(size), 0, out, err)
	})
}

// ReaderSource is one whole file of size bytes behind an [io.ReaderAt], which is read in order during a load, by the goroutine
// that loads. The file stays in memory as long as the model. The reader's error is in the chain of the load's.
func ReaderSource(from io.ReaderAt, size int64) (*Source, error) {
	if from == nil || size < 0 {
		return nil, invalid("a source needs a reader and a size of at least 0, found %v and %d", from, size)
	}
	return newSource(&reader{from: from}, func(number C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status {
		return C.go_source_reader(number, C.uint64_t(size), out, err)
	})
}

// FolderSource is a folder without files, which [Source.Add] fills.
func FolderSource() (*Source, error) {
	return newSource(nil, func(_ C.uintptr_t, out **C.metrale_source, err **C.metrale_error) C.metrale_status {
		return C.metrale_source_folder(0, out, err)
	})
}

// Add puts part into a folder, under the name that its file has in a directory, such as "config.json". The part may be closed
// at once.
func (s *Source) Add(name string, part *Source) error {
	defer runtime.KeepAlive(s)
	defer runtime.KeepAlive(part)
	text, err := cString("name", name)
	if err != nil {
		return err
	}
	defer C.free(unsafe.Pointer(text))
	err = do(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_source_add(s.handle, text, part.handle, err)
	})
	if err == nil {
		s.shares.add(part.shares.retained()...)
		readers := part.allReaders()
		s.mu.Lock()
		s.readers = append(s.readers, readers...)
		s.mu.Unlock()
	}
	return err
}

func (s *Source) allReaders() []*reader {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*reader(nil), s.readers...)
}

// Probe says what the source holds, from its headers alone, as a JSON object: format, model_type, parameters and more.
func (s *Source) Probe() (string, error) {
	defer runtime.KeepAlive(s)
	text, err := sized(1024, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_source_probe(s.handle, (*C.uint8_t)(out), room, size, err)
	})
	return string(text), s.because(err)
}

// Close gives the source up. Loads that have begun go on. Safe from any goroutine, as often as wanted.
func (s *Source) Close() error {
	s.owned.release()
	return nil
}

// because adds what a reader said to the error of the call that it made fail.
func (s *Source) because(err error) error {
	if err != nil {
		for _, reader := range s.allReaders() {
			err = because(err, &reader.failed)
		}
	}
	return err
}

// cString is a copy for C; the caller frees it.
func cString(what, text string) (*C.char, error) {
	for i := range len(text) {
		if text[i] == 0 {
			return nil, invalid("the %s holds a NUL byte at %d", what, i)
		}
	}
	return C.CString(text), nil
}
