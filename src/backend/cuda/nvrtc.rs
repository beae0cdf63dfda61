//! Kernels compiled at run time, by NVIDIA's compiler library where it is installed.
#![allow(unsafe_code)] // calls of NVRTC

use super::sys::{self, Nvrtc, Program};
use crate::bail;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::runtime;
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

/// The library, by the names it has: of CUDA 12 first, since drivers load what either makes.
const NAMES: [&CStr; 3] = [c"libnvrtc.so.12", c"libnvrtc.so.13", c"libnvrtc.so"];

fn library() -> Result<&'static Nvrtc, String> {
    static LIBRARY: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            let _outside = crate::runtime::outside();
            let mut why = String::new();
            for name in NAMES {
                match sys::open(name) {
                    // SAFETY: NVRTC's functions have the signatures of its header; the library stays open.
                    Ok(library) => return unsafe { Nvrtc::load(library) }.map_err(|symbol| format!("{name:?} has no {symbol}")),
                    Err(text) => why = text,
                }
            }
            Err(why)
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// A program that is destroyed when it goes.
struct Compilation(&'static Nvrtc, Program);

impl Drop for Compilation {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram`.
        unsafe { (self.0.nvrtcDestroyProgram)(&mut self.1) };
    }
}

/// The machine code of a kernel file's text.
pub(super) fn compile(file: &str, text: &str, architecture: &str) -> Result<Vec<u8>> {
    match runtime::with_stack("metrale-load", STACK, || compile_here(file, text, architecture)) {
        Some(Ok(made)) => made,
        Some(Err(_)) => bail!(Internal, "kernels/{file}.cu: a panic while NVRTC was asked"),
        None => bail!(OutOfMemory, "kernels/{file}.cu: no thread with a stack of {STACK} bytes could be started"),
    }
}

/// What a compiler may want of a stack, which a host's thread need not have.
const STACK: usize = 8 << 20;

fn compile_here(file: &str, text: &str, architecture: &str) -> Result<Vec<u8>> {
    let unsupported = |text: String| Error::new(Kind::DeviceUnsupported, text);
    let nvrtc = library().map_err(|why| {
        unsupported(format!("kernels/{file}.cu: this library carries no machine code for {architecture}, and NVRTC cannot be used: {why}"))
    })?;
    let string = |text: &str| CString::new(text).map_err(|_| Error::new(Kind::Internal, "a kernel file with NUL"));
    let (source, name) = (string(text)?, string(&format!("{file}.cu"))?);
    let mut program = Compilation(nvrtc, std::ptr::null_mut());
    // SAFETY: strings that end in NUL, and no headers.
    let code = unsafe { (nvrtc.nvrtcCreateProgram)(&mut program.1, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null()) };
    if code != 0 {
        bail!(Internal, "kernels/{file}.cu: NVRTC takes no program ({code})");
    }
    let options = [string(&format!("--gpu-architecture={architecture}"))?, string("--std=c++17")?, string("-default-device")?];
    let pointers = options.each_ref().map(|option| option.as_ptr());
    // SAFETY: as many strings as are told.
    let code = unsafe { (nvrtc.nvrtcCompileProgram)(program.1, pointers.len() as i32, pointers.as_ptr()) };
    if code != 0 {
        let log = bytes(&program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)?;
        return Err(unsupported(format!("kernels/{file}.cu for {architecture}: {}", String::from_utf8_lossy(&log).trim_end_matches('\0'))));
    }
    bytes(&program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
}

type Size = unsafe extern "C" fn(Program, *mut usize) -> u32;
type Fill = unsafe extern "C" fn(Program, *mut c_char) -> u32;

fn bytes(program: &Compilation, size: Size, fill: Fill) -> Result<Vec<u8>> {
    let mut len = 0;
    // SAFETY: writes a number.
    let mut code = unsafe { size(program.1, &mut len) };
    let mut out = vec_filled(len, 0u8, "a compiled kernel")?;
    if code == 0 {
        // SAFETY: writes as many bytes as it said.
        code = unsafe { fill(program.1, out.as_mut_ptr().cast()) };
    }
    if code != 0 {
        bail!(Internal, "NVRTC does not hand over what it made ({code})");
    }
    Ok(out)
}
