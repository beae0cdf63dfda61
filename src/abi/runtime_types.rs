//! C types of what a host lends: allocator, log, threads, and what is told about memory and devices.
//!
//! Their layout is the contract, as that of `types`.

use std::ffi::{c_char, c_void};

use super::status::metrale_status;

/// Gives `size` bytes, at least 1, at a multiple of `align`, a power of two; NULL when there are none, which ends the
/// call in `METRALE_OUT_OF_MEMORY`. Called on any thread, also on several at once, during calls on the runtime's objects
/// and on threads of its models. It calls no function of this library, and it returns: no exception and no `longjmp`
/// leaves it.
pub type metrale_alloc_fn = Option<unsafe extern "C" fn(user: *mut c_void, size: usize, align: usize) -> *mut c_void>;

/// Takes back what `metrale_alloc_fn` gave for this `size` and `align`. Otherwise as that.
pub type metrale_free_fn = Option<unsafe extern "C" fn(user: *mut c_void, pointer: *mut c_void, size: usize, align: usize)>;

/// Gets a log record: its level (`METRALE_LOG_*`), the status of the call that failed (`METRALE_OK` where none did), and
/// `len` bytes of UTF-8 without a NUL or line end, which live during the call. Called on the thread that has something
/// to say, on several at once where several have; nothing is recorded of what the function itself does with this
/// library. It returns: no exception and no `longjmp` leaves it.
pub type metrale_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: u32, status: metrale_status, text: *const u8, len: usize)>;

/// `METRALE_LOG_INFO`.
pub const METRALE_LOG_DEFAULT: u32 = 0;
/// The reason of each error that a call returns.
pub const METRALE_LOG_ERROR: u32 = 1;
/// What works less well than it should.
pub const METRALE_LOG_WARNING: u32 = 2;
/// What is being done, such as the phases of a load.
pub const METRALE_LOG_INFO: u32 = 3;
/// For developers of the library.
pub const METRALE_LOG_DEBUG: u32 = 4;

/// A piece of work that `metrale_parallel_for_fn` gets. May be called on any thread.
pub type metrale_body_fn = Option<unsafe extern "C" fn(arg: *mut c_void, index: usize)>;

/// Calls `body(arg, i)` once for each `i` below `count`, and returns when all calls have returned. They may run on any
/// threads, the calling one included, at the same time or one after another; the result is the same. So every body must
/// get its turn without waiting for this library's calls on other threads: if they only run on threads that may be
/// inside such calls, nothing goes on. While it waits, the calling thread may do other work, but computing with a model
/// there is `METRALE_BUSY`. A body that is left out or called twice is an error of the call that computes
/// (`METRALE_INVALID_ARGUMENT`, `"parallel_for"`); one that is called later, or with another `arg`, does nothing.
/// Called by every step and load, on its thread. It returns: no exception and no `longjmp` leaves it.
pub type metrale_parallel_for_fn = Option<unsafe extern "C" fn(user: *mut c_void, count: usize, body: metrale_body_fn, arg: *mut c_void)>;

/// The runtime makes threads of its own, `threads - 1` but no more than there are further processors, which all its models
/// share. Lent ones help as well.
pub const METRALE_WORKERS_OWN: u32 = 0;
/// The runtime makes no thread: the calling one computes, and those of `metrale_runtime_run_worker`.
pub const METRALE_WORKERS_LENT: u32 = 1;
/// The runtime makes no thread: `parallel_for` runs everything.
pub const METRALE_WORKERS_HOST: u32 = 2;

/// How to make a runtime. Zero is the default of every field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_runtime_options {
    /// `sizeof(metrale_runtime_options)` as the host was compiled.
    pub struct_size: usize,
    /// No flag exists yet.
    pub flags: u64,
    /// Where memory comes from, or NULL with `free` for the system's.
    pub alloc: metrale_alloc_fn,
    /// Where it goes back.
    pub free: metrale_free_fn,
    /// Handed to `alloc` and `free`.
    pub alloc_user: *mut c_void,
    /// Most bytes that may be taken at once; 0 for no limit. What would pass it is `METRALE_OUT_OF_MEMORY`.
    pub memory_cap: u64,
    /// Where log records go, or NULL; `metrale_runtime_log_set` changes it.
    pub log: metrale_log_fn,
    /// Handed to `log`.
    pub log_user: *mut c_void,
    /// `METRALE_LOG_*`: the last level that is recorded.
    pub log_level: u32,
    /// `METRALE_WORKERS_*`: whose threads compute.
    pub workers: u32,
    /// Most threads of one computation, the calling one included; 0 takes the processors this process may use.
    pub threads: u32,
    /// Must be zero.
    pub reserved: u32,
    /// With `METRALE_WORKERS_HOST`, and NULL otherwise: the host's job system. `threads` is the count it gets.
    pub parallel_for: metrale_parallel_for_fn,
    /// Handed to `parallel_for`.
    pub parallel_user: *mut c_void,
}

/// The processor.
pub const METRALE_DEVICE_CPU: u32 = 1;
/// An NVIDIA device.
pub const METRALE_DEVICE_CUDA: u32 = 2;

/// What a device is. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_device {
    /// `sizeof(metrale_device)` as the host was compiled.
    pub struct_size: usize,
    /// `METRALE_DEVICE_*`.
    pub kind: u32,
    /// Processors the calling thread may use, by its affinity mask and control groups; of an NVIDIA device its multiprocessors.
    pub threads: u32,
    /// Bytes this process may take in all; 0 where the system does not say. Of an NVIDIA device its memory.
    pub memory_total: u64,
    /// Bytes it may still take.
    pub memory_free: u64,
    /// The maker's name of the device: NUL-terminated, lives as long as the library, as the next ones do.
    pub name: *const c_char,
    /// The kernels in use: `"scalar"`, `"avx2"` or `"avx512"`; of an NVIDIA device the architecture they are made for: `"sm_90a"`.
    pub kernels: *const c_char,
    /// Instruction sets found, parted by spaces: `"avx2 fma f16c"`. Empty for a processor without any that are used, and
    /// for other devices.
    pub instruction_sets: *const c_char,
}

/// Bytes that a runtime has taken of its allocator. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_memory_usage {
    /// `sizeof(metrale_memory_usage)` as the host was compiled.
    pub struct_size: usize,
    /// Bytes taken and not given back.
    pub live: u64,
    /// The most that were ever live.
    pub peak: u64,
    /// The limit; 0 for none.
    pub cap: u64,
    /// Of the live bytes: packed weights.
    pub weights: u64,
    /// Of the live bytes: pages of caches and recurrent states.
    pub cache: u64,
    /// The rest of the live bytes.
    pub other: u64,
}
