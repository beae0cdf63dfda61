package metrale

// #include "shim.h"
import "C"

import (
	"runtime"
	"unsafe"
)

// LogLevel says how much a log record matters.
type LogLevel uint32

// The levels, most important first. The zero LogLevel of [RuntimeOptions] is LogInfo.
const (
	LogError   LogLevel = C.METRALE_LOG_ERROR   // the reason of each error that a call returns
	LogWarning LogLevel = C.METRALE_LOG_WARNING // what works less well than it should
	LogInfo    LogLevel = C.METRALE_LOG_INFO    // what is being done
	LogDebug   LogLevel = C.METRALE_LOG_DEBUG   // for developers of the library
)

// Record is one entry of the library's log.
type Record struct {
	Level LogLevel
	Text  string
	Err   error // the [Status] of the call that failed, or nil
}

// RuntimeOptions say what a [Runtime] gives its models. The zero value is the default of everything.
type RuntimeOptions struct {
	Threads   int    // most threads of one computation; 0 takes the processors this process may use
	MemoryCap uint64 // most bytes that may be taken at once; 0 for no limit
	// Log gets the records up to LogLevel; it is called on several goroutines at once where several have something to say,
	// some of which others wait for: it must not wait for sequences.
	Log      func(Record)
	LogLevel LogLevel
}

// Runtime is what several models share: threads, a limit of memory, a log. Models load without one as well.
type Runtime struct {
	handle *C.metrale_runtime
	log    *held
	owned  *owned
}

// NewRuntime makes a runtime; options may be nil. Its threads start with the first load.
func NewRuntime(options *RuntimeOptions) (*Runtime, error) {
	if err := checkABI(); err != nil {
		return nil, err
	}
	if options == nil {
		options = &RuntimeOptions{}
	}
	r := &Runtime{}
	if options.Log != nil {
		r.log = hold(&logSink{options.Log})
	}
	wanted := C.metrale_runtime_options{
		memory_cap: C.uint64_t(options.MemoryCap), log_level: C.uint32_t(options.LogLevel), threads: C.uint32_t(options.Threads),
	}
	var handle *C.metrale_runtime
	err := do(func(err **C.metrale_error) C.metrale_status {
		return C.go_runtime_new(wanted, C.uintptr_t(r.log.number()), &handle, err)
	})
	if err != nil {
		r.log.release()
		return nil, err
	}
	r.handle = handle
	log := r.log
	r.owned = own(r, func() {
		C.metrale_runtime_free(handle)
		log.release()
	})
	return r, nil
}

// Close gives the runtime up. Models loaded with it keep it. Safe from any goroutine, as often as wanted.
func (r *Runtime) Close() error {
	r.owned.release()
	return nil
}

// MemoryUsage are bytes that a runtime's models hold.
type MemoryUsage struct {
	Live, Peak, Cap       uint64 // now, at most ever, and the limit (0 for none)
	Weights, Cache, Other uint64 // what Live is made of
}

// Memory says what the runtime's models hold. Mapped model files are not counted.
func (r *Runtime) Memory() (MemoryUsage, error) {
	defer runtime.KeepAlive(r)
	usage := C.metrale_memory_usage{struct_size: C.size_t(unsafe.Sizeof(C.metrale_memory_usage{}))}
	err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_runtime_memory(r.handle, &usage, err) })
	return MemoryUsage{
		Live: uint64(usage.live), Peak: uint64(usage.peak), Cap: uint64(usage.cap),
		Weights: uint64(usage.weights), Cache: uint64(usage.cache), Other: uint64(usage.other),
	}, err
}

// Trim gives memory back that nothing needs now.
func (r *Runtime) Trim() error {
	defer runtime.KeepAlive(r)
	return do(func(err **C.metrale_error) C.metrale_status { return C.metrale_runtime_trim(r.handle, err) })
}

// Device is something that models can run on.
type Device struct {
	Name            string // the maker's
	Kernels         string // those in use: "scalar", "avx2" or "avx512"
	InstructionSets string // found, parted by spaces
	Threads         int    // processors this process may use
	MemoryTotal     uint64 // bytes this process may take in all; 0 where the system does not say
	MemoryFree      uint64 // bytes it may still take
}

// Devices lists what models can run on; the first is the processor.
func Devices() ([]Device, error) {
	var devices []Device
	for i := range C.metrale_device_count() {
		c := C.metrale_device{struct_size: C.size_t(unsafe.Sizeof(C.metrale_device{}))}
		if err := do(func(err **C.metrale_error) C.metrale_status { return C.metrale_device_info(i, &c, err) }); err != nil {
			return nil, err
		}
		devices = append(devices, Device{
			Name: C.GoString(c.name), Kernels: C.GoString(c.kernels), InstructionSets: C.GoString(c.instruction_sets),
			Threads: int(c.threads), MemoryTotal: uint64(c.memory_total), MemoryFree: uint64(c.memory_free),
		})
	}
	return devices, nil
}
