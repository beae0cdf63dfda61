package metrale

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"context"
	"math"
	"runtime"
	"unsafe"
)

// Compute is the precision of the mathematics.
type Compute uint32

// The precisions.
const (
	ComputeDefault Compute = C.METRALE_COMPUTE_DEFAULT
	ComputeFast    Compute = C.METRALE_COMPUTE_FAST // 8-bit activations for quantised weights, a 16-bit cache
	ComputeF32     Compute = C.METRALE_COMPUTE_F32  // every weight decoded to its exact value, activations and cache in f32
)

// KV is what keys and values are kept in.
type KV uint32

// The element types of keys and values.
const (
	KVDefault KV = C.METRALE_KV_DEFAULT // f32 with ComputeF32 and for files stored in f32, else f16
	KVF32     KV = C.METRALE_KV_F32
	KVF16     KV = C.METRALE_KV_F16
	KVBF16    KV = C.METRALE_KV_BF16 // the bytes of f16, the range of f32
	KVQ8      KV = C.METRALE_KV_Q8   // 8 bits and scales, about half of the bytes of f16
)

// Progress is how far a load is. Total is 0 while it is not known; the numbers are bytes of the phase.
type Progress struct {
	Phase       string // "reading", "weights" or "done"
	Done, Total uint64
}

// LoadOptions say how to load a model. The zero value is the default of everything.
type LoadOptions struct {
	Runtime       *Runtime       // threads, memory and log shared with other models; nil for none
	Threads       int            // most threads that compute; 0 takes the processors this process may use
	Compute       Compute        // precision
	KV            KV             // what keys and values are kept in
	Context       int            // most tokens of one sequence; 0 takes the model's limit, capped at 4,096
	Memory        uint64         // most bytes that model and one sequence may take; 0 takes what the machine has free
	ExpertBytes   uint64         // most bytes of routed experts that are kept packed; 0 for all
	PrefixBytes   uint64         // most bytes kept of prompts, so that one that begins like an earlier one is not computed again
	Device        int            // the device that computes, as [Devices] numbers them; 0 is the processor
	DeviceBytes   uint64         // most bytes of that device that model and one sequence may take; 0 takes what is free there
	DeviceLayers  uint64         // the last layers that run there, [AllLayers] for all; 0 takes as many as DeviceBytes hold
	HostExperts   uint64         // of these the first so many whose experts stay on the processor, [AllLayers] for all; 0 is as few as DeviceBytes require
	LowPriority   bool           // on a device, other work of the process goes first
	Deterministic bool           // on a device, the same bits alone and in any batch; slower
	Packed        bool           // weights are packed by the load, not when they are used a second time
	Precision     string         // types of chosen layers, such as "layers.0-3.mlp=f32,head=bf16"
	Progress      func(Progress) // called by the goroutine that loads
}

// AllLayers asks for all of a model on its device, or for an error.
const AllLayers uint64 = C.METRALE_ALL_LAYERS

// native is the options as C reads them. The caller frees the precision.
func (o *LoadOptions) native() (options C.metrale_load_options, err error) {
	options.struct_size = C.size_t(unsafe.Sizeof(options))
	if o == nil {
		return options, nil
	}
	if o.Threads < 0 || int64(o.Threads) > math.MaxUint32 || o.Context < 0 {
		return options, invalid("threads is %d and context %d; both are counts, 0 for the default", o.Threads, o.Context)
	}
	if o.Device < 0 || int64(o.Device) > math.MaxUint32 {
		return options, invalid("device is %d; devices are counted from 0, the processor", o.Device)
	}
	options.threads = C.uint32_t(o.Threads)
	options.compute = C.uint32_t(o.Compute)
	options.kv_type = C.uint32_t(o.KV)
	options.context = C.uint64_t(o.Context)
	options.memory = C.uint64_t(o.Memory)
	options.expert_bytes = C.uint64_t(o.ExpertBytes)
	options.prefix_bytes = C.uint64_t(o.PrefixBytes)
	options.device = C.uint32_t(o.Device)
	options.device_bytes = C.uint64_t(o.DeviceBytes)
	options.device_layers = C.uint64_t(o.DeviceLayers)
	options.host_experts = C.uint64_t(o.HostExperts)
	if o.LowPriority {
		options.flags |= C.METRALE_LOAD_LOW_PRIORITY
	}
	if o.Deterministic {
		options.flags |= C.METRALE_LOAD_DETERMINISTIC
	}
	if o.Packed {
		options.flags |= C.METRALE_LOAD_PACKED
	}
	if o.Runtime != nil {
		options.runtime = o.Runtime.handle
	}
	if o.Precision != "" {
		options.precision, err = cString("precision", o.Precision)
	}
	return options, err
}

// Load loads a model from a GGUF file or a folder with config.json, and returns when it is ready. options may be nil. When ctx
// ends first, the error is that of ctx.
func Load(ctx context.Context, path string, options *LoadOptions) (*Model, error) {
	source, err := PathSource(path)
	if err != nil {
		return nil, err
	}
	defer source.Close()
	return LoadSource(ctx, source, options)
}

// LoadSource is [Load] for a [Source].
func LoadSource(ctx context.Context, source *Source, options *LoadOptions) (*Model, error) {
	defer runtime.KeepAlive(source)
	defer runtime.KeepAlive(options)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	wanted, err := options.native()
	defer C.free(unsafe.Pointer(wanted.precision))
	if err != nil {
		return nil, err
	}
	var report *held
	var reported *firstError
	if options != nil && options.Progress != nil {
		p := &progress{report: options.Progress}
		report, reported = hold(p), &p.failed
		defer report.release()
	}
	// The readers stay callable until the load is over, also when somebody closes the source meanwhile.
	readers := &holdings{}
	readers.add(source.shares.retained()...)
	defer readers.release()

	var loading *C.metrale_loading
	_, err = direct(func(err **C.metrale_error) C.metrale_status {
		return C.go_load_begin(source.handle, wanted, C.uintptr_t(report.number()), &loading, err)
	})
	if err != nil {
		return nil, err
	}
	defer C.metrale_loading_free(loading)
	defer context.AfterFunc(ctx, func() { C.metrale_load_cancel(loading, nil) })()

	// Not through the gate: a load takes seconds, and its callbacks are the host's.
	var handle *C.metrale_model
	_, err = direct(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_load_step(loading, C.UINT64_MAX, nil, &handle, err)
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, source.because(because(err, reported))
	}
	var log *held
	if options != nil && options.Runtime != nil {
		log = options.Runtime.log
	}
	return newModel(handle, log.retain()), nil
}

// MemoryPlan are the bytes that a model and its sequences take, by purpose.
type MemoryPlan struct {
	Weights, KV, State, Scratch, Other, Source uint64
	Total                                      uint64
	Device                                     DevicePlan
}

// DevicePlan are the bytes on the device that computes, the layers that run there, the last so many, and how many of these have their experts on the processor.
type DevicePlan struct {
	Weights, KV, State, Scratch, Total uint64
	Layers, HostExperts                uint64
}

// Plan says what loading a model and making so many sequences of its full context would take, from its headers alone.
func Plan(path string, options *LoadOptions, sequences int) (MemoryPlan, error) {
	source, err := PathSource(path)
	if err != nil {
		return MemoryPlan{}, err
	}
	defer source.Close()
	return source.Plan(options, sequences)
}

// Plan is the package's [Plan] for a source.
func (s *Source) Plan(options *LoadOptions, sequences int) (MemoryPlan, error) {
	defer runtime.KeepAlive(s)
	defer runtime.KeepAlive(options)
	wanted, err := options.native()
	defer C.free(unsafe.Pointer(wanted.precision))
	if err != nil {
		return MemoryPlan{}, err
	}
	if sequences < 0 {
		return MemoryPlan{}, invalid("%d sequences", sequences)
	}
	plan := C.metrale_memory_plan{struct_size: C.size_t(unsafe.Sizeof(C.metrale_memory_plan{}))}
	err = do(func(err **C.metrale_error) C.metrale_status {
		return C.metrale_source_plan(s.handle, &wanted, C.size_t(sequences), &plan, err)
	})
	return MemoryPlan{
		Weights: uint64(plan.weights), KV: uint64(plan.kv), State: uint64(plan.state), Scratch: uint64(plan.scratch),
		Other: uint64(plan.other), Source: uint64(plan.source), Total: uint64(plan.total),
		Device: DevicePlan{
			Weights: uint64(plan.device_weights), KV: uint64(plan.device_kv), State: uint64(plan.device_state),
			Scratch: uint64(plan.device_scratch), Total: uint64(plan.device_total), Layers: uint64(plan.device_layers), HostExperts: uint64(plan.host_experts),
		},
	}, s.because(err)
}
