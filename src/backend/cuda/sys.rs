//! The driver's functions that we call, found by name at run time. The table is the list of what a driver must have, so the probe and the calls
//! cannot differ. `cudarc` gives the types; its own functions are not called, because they panic where a library or a symbol is absent, look a
//! symbol up at each call, and take a status that this build does not know for one of an enum.
#![allow(unsafe_code, non_snake_case, missing_docs)] // a table of foreign functions, under their own names

pub use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUmodule,
    CUstream,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// A status as a number; 0 is success.
pub type Code = u32;

macro_rules! table {
    ($(#[$doc:meta])* $table:ident: $(fn $name:ident($($type:ty),*);)*) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        impl $table {
            /// All of them, or the name of the first that is absent.
            ///
            /// # Safety
            /// `library` is open, stays so, and has functions of these names with these signatures.
            pub unsafe fn load(library: *mut c_void) -> Result<$table, &'static str> {
                Ok($table {
                    $($name: {
                        // SAFETY: the name ends in NUL.
                        let symbol = unsafe { libc::dlsym(library, concat!(stringify!($name), "\0").as_ptr().cast()) };
                        if symbol.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: the library's function of this name has this signature.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> Code>(symbol) }
                    },)*
                })
            }
        }
    };
}

table! {
    /// Functions of `libcuda.so.1`; all are in drivers for CUDA 12.0.
    Api:
    fn cuInit(c_uint);
    fn cuDeviceGetCount(*mut c_int);
    fn cuDeviceGet(*mut c_int, c_int);
    fn cuDeviceGetName(*mut c_char, c_int, c_int);
    fn cuDeviceTotalMem_v2(*mut usize, c_int);
    fn cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    fn cuDevicePrimaryCtxRetain(*mut CUcontext, c_int);
    fn cuDevicePrimaryCtxRelease_v2(c_int);
    fn cuCtxPushCurrent_v2(CUcontext);
    fn cuCtxPopCurrent_v2(*mut CUcontext);
    fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
    fn cuMemFree_v2(CUdeviceptr);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    fn cuMemHostUnregister(*mut c_void);
    fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    fn cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    fn cuStreamDestroy_v2(CUstream);
    fn cuStreamSynchronize(CUstream);
    fn cuStreamQuery(CUstream);
    fn cuEventCreate(*mut CUevent, c_uint);
    fn cuEventRecord(CUevent, CUstream);
    fn cuEventQuery(CUevent);
    fn cuEventSynchronize(CUevent);
    fn cuEventElapsedTime(*mut f32, CUevent, CUevent);
    fn cuEventDestroy_v2(CUevent);
    fn cuStreamBeginCapture_v2(CUstream, c_int);
    fn cuStreamEndCapture(CUstream, *mut CUgraph);
    fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
    fn cuGraphUpload(CUgraphExec, CUstream);
    fn cuGraphLaunch(CUgraphExec, CUstream);
    fn cuGraphExecDestroy(CUgraphExec);
    fn cuGraphDestroy(CUgraph);
    fn cuModuleLoadData(*mut CUmodule, *const c_void);
    fn cuModuleUnload(CUmodule);
    fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    fn cuFuncSetAttribute(CUfunction, c_int, c_int);
    fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    fn cuGetErrorName(Code, *mut *const c_char);
    fn cuGetErrorString(Code, *mut *const c_char);
}

/// A compilation at run time.
pub type Program = *mut c_void;

table! {
    /// Functions of NVRTC.
    Nvrtc:
    fn nvrtcCreateProgram(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    fn nvrtcCompileProgram(Program, c_int, *const *const c_char);
    fn nvrtcGetProgramLogSize(Program, *mut usize);
    fn nvrtcGetProgramLog(Program, *mut c_char);
    fn nvrtcGetCUBINSize(Program, *mut usize);
    fn nvrtcGetCUBIN(Program, *mut c_char);
    fn nvrtcDestroyProgram(*mut Program);
}

// Attributes of devices and functions, flags, statuses that are told apart.
pub const MULTIPROCESSORS: c_int = 16;
pub const CAPABILITY_MAJOR: c_int = 75;
pub const CAPABILITY_MINOR: c_int = 76;
pub const MOST_SHARED: c_int = 97;
pub const FUNCTION_DYNAMIC_SHARED: c_int = 8;
pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const CAPTURE_RELAXED: c_int = 2;
pub const EVENT_NO_TIMING: c_uint = 2;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_READY: Code = 600;

/// Opens a library by name or path; it stays open.
pub fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a string that ends in NUL. Initialisers of the library run, as they would in any program that uses it.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: after a failure dlerror gives a string of the C library, or NULL.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err("cannot be opened".into());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl Api {
    /// Bytes of a kernel's one argument, where the driver can tell (CUDA 12.4).
    pub fn parameter_bytes(&self, function: CUfunction) -> Option<usize> {
        type Tell = unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> Code;
        // SAFETY: the driver is open; the name ends in NUL.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cuFuncGetParamInfo".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: the driver's function of this name has this signature.
        let tell = unsafe { std::mem::transmute::<*mut c_void, Tell>(symbol) };
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two numbers.
        (unsafe { tell(function, 0, &mut offset, &mut size) } == 0).then_some(size)
    }
}
