package metrale

import (
	"runtime"
	"runtime/cgo"
	"sync"
	"sync/atomic"
)

// owned is one object of the library. It is given back once, by Close or after the garbage collector found that nobody has
// its Go object any more. free must not reach that Go object.
type owned struct {
	once sync.Once
	free func()
}

func (o *owned) release() { o.once.Do(o.free) }

// own ties the end of object's life to free.
func own[T any](object *T, free func()) *owned {
	o := &owned{free: free}
	runtime.AddCleanup(object, (*owned).release, o)
	return o
}

// held is a callback, shared by all that may still call it. The library keeps the handle's number; the last holder ends it.
// A nil *held is no callback.
type held struct {
	handle cgo.Handle
	count  atomic.Int32
}

func hold(callback any) *held {
	h := &held{handle: cgo.NewHandle(callback)}
	h.count.Store(1)
	return h
}

func (h *held) retain() *held {
	if h != nil {
		h.count.Add(1)
	}
	return h
}

func (h *held) release() {
	if h != nil && h.count.Add(-1) == 0 {
		h.handle.Delete()
	}
}

// number is what C keeps; 0 for none.
func (h *held) number() uintptr {
	if h == nil {
		return 0
	}
	return uintptr(h.handle)
}

// holdings are the callbacks that a sequence may call, now or after a rollback.
type holdings struct {
	mu   sync.Mutex
	all  []*held
	done bool
}

// add takes over one share of each.
func (h *holdings) add(callbacks ...*held) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, callback := range callbacks {
		if h.done {
			callback.release()
		} else if callback != nil {
			h.all = append(h.all, callback)
		}
	}
}

// retained gives a share of each to somebody else.
func (h *holdings) retained() []*held {
	h.mu.Lock()
	defer h.mu.Unlock()
	shares := make([]*held, len(h.all))
	for i, callback := range h.all {
		shares[i] = callback.retain()
	}
	return shares
}

func (h *holdings) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, callback := range h.all {
		callback.release()
	}
	h.all, h.done = nil, true
}
