//! The kernels of a device: from their sources to functions that can be launched. A load asks for the files that it needs; others are loaded when the
//! first of their kernels is.
//!
//! Machine code is looked for where it costs least: in the pack that the library was built with, in the folder that `METRALE_KERNEL_CACHE` names,
//! from NVRTC, at last as PTX that the driver compiles. Each is the code of these very sources: packs and caches carry their hash.
#![allow(unsafe_code)] // calls of the driver

use super::device::Entered;
use super::launch::Kernel;
use super::probe::architecture;
use super::sys::{self, Api, CUfunction, CUmodule};
use super::{nvrtc, pack};
use crate::bail;
use crate::ensure;
use crate::error::{Error, Kind, Result, reserve, vec_with_capacity};
use crate::runtime::{self, Thread};
use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

// `SOURCES`: every file under kernels/ by its path there, with its text. `PACK`: the pack, where there was one.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Functions of one device.
pub(super) struct Kernels {
    capability: (u32, u32),
    inner: Mutex<Inner>,
    has_groups: OnceLock<bool>,
}

#[derive(Default)]
struct Inner {
    modules: Vec<(&'static str, CUmodule)>,
    functions: HashMap<Kernel, Function>,
}

struct Function {
    raw: CUfunction,
    /// Bytes of dynamic shared memory that it may be launched with.
    shared: u32,
}

/// What a function may use without asking.
const SHARED: u32 = 48 << 10;

impl Kernels {
    pub fn new(capability: (u32, u32)) -> Kernels {
        Kernels { capability, inner: Mutex::default(), has_groups: OnceLock::new() }
    }

    /// A kernel that takes `args` bytes, ready for launches with `shared` bytes of dynamic shared memory.
    pub fn get(&self, at: &Entered<'_>, kernel: Kernel, args: usize, shared: u32) -> Result<CUfunction> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = inner.functions.get_mut(&kernel)
            && (shared <= function.shared)
        {
            return Ok(function.raw);
        }
        let raw = match inner.functions.get(&kernel) {
            Some(function) => function.raw,
            None => find(&mut inner, self.capability, at, kernel, args)?,
        };
        let shared = shared.max(SHARED);
        if shared > SHARED {
            let bytes = i32::try_from(shared).unwrap_or(i32::MAX);
            // SAFETY: a function of a module that stays loaded.
            let code = unsafe { (at.api().cuFuncSetAttribute)(raw, sys::FUNCTION_DYNAMIC_SHARED, bytes) };
            at.check(code, kernel.name)?;
        }
        inner.functions.insert(kernel, Function { raw, shared });
        Ok(raw)
    }

    /// Loads files, so that no launch has to. They are unpacked, or compiled, which takes seconds each, by `threads` threads.
    pub fn ready(&self, at: &Entered<'_>, files: &[&'static str], threads: usize) -> Result<()> {
        let loaded = |file: &str| self.inner.lock().unwrap_or_else(PoisonError::into_inner).modules.iter().any(|(known, _)| *known == file);
        let mut images: Vec<Image> = Vec::new();
        for &file in files.iter().filter(|file| !loaded(file)) {
            reserve(&mut images, 1, "the list of kernel files")?;
            images.push(Image::of(file, self.capability)?);
        }
        for image in make(images, threads)? {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            if !inner.modules.iter().any(|(known, _)| *known == image.file) {
                reserve(&mut inner.modules, 1, "the list of kernel modules")?;
                let file = image.file;
                let module = image.load(at)?;
                inner.modules.push((file, module));
            }
        }
        Ok(())
    }

    /// Whether the kernels with products of groups of warps can be had: they are for capability 9.0, and only as machine code.
    pub fn has_groups(&self, at: &Entered<'_>) -> bool {
        *self.has_groups.get_or_init(|| {
            self.capability == (9, 0) && {
                let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                let has = |inner: &Inner| inner.modules.iter().any(|(file, _)| *file == "linear_group");
                let module = |inner: &mut Inner| {
                    reserve(&mut inner.modules, 1, "the list of kernel modules")?;
                    let module = Image::of("linear_group", self.capability)?.make().native(at)?;
                    inner.modules.push(("linear_group", module));
                    Ok::<(), Error>(())
                };
                has(&inner) || module(&mut inner).is_ok()
            }
        })
    }

    /// Unloads everything.
    pub fn unload(&self, api: &Api) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.functions.clear();
        for (_, module) in inner.modules.drain(..) {
            // SAFETY: loaded by `find`, and its functions are forgotten.
            unsafe { (api.cuModuleUnload)(module) };
        }
    }
}

/// Looks a kernel up in its file's module, which is made and loaded if need be.
fn find(inner: &mut Inner, capability: (u32, u32), at: &Entered<'_>, kernel: Kernel, args: usize) -> Result<CUfunction> {
    let loaded = inner.modules.iter().find(|(file, _)| *file == kernel.file).map(|(_, module)| *module);
    let module = match loaded {
        Some(module) => module,
        None => {
            reserve(&mut inner.modules, 1, "the list of kernel modules")?;
            let module = Image::of(kernel.file, capability)?.make().load(at)?;
            inner.modules.push((kernel.file, module));
            module
        }
    };
    let Ok(name) = CString::new(format!("metrale_{}", kernel.name)) else { bail!(Internal, "a kernel's name with NUL") };
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes a function; the name ends in NUL.
    let code = unsafe { (at.api().cuModuleGetFunction)(&mut raw, module, name.as_ptr()) };
    ensure!(code == 0, Internal, "there is no kernel {} in kernels/{}.cu", kernel.name, kernel.file);
    if let Some(bytes) = at.api().parameter_bytes(raw) {
        ensure!(bytes == args, Internal, "kernel {} takes {bytes} bytes of arguments, {args} are handed over", kernel.name);
    }
    Ok(raw)
}

/// A kernel file on its way to a device.
struct Image {
    file: &'static str,
    text: String,
    hash: u64,
    architecture: String,
    /// Its machine code from the pack, and what NVRTC made of it, where that was looked for already.
    packed: Option<Vec<u8>>,
    made: Option<Result<Vec<u8>>>,
}

impl Image {
    fn of(file: &'static str, capability: (u32, u32)) -> Result<Image> {
        let text = flat(file)?;
        Ok(Image { file, hash: pack::hash(text.as_bytes()), text, architecture: architecture(capability), packed: None, made: None })
    }

    /// Where its machine code is kept between processes, if the host names a folder.
    fn cache_file(&self) -> Option<PathBuf> {
        let Image { file, architecture, hash, .. } = self;
        let folder = crate::options::kernel_cache()?;
        Some(folder.join(format!("{file}-{architecture}-{hash:016x}.cubin")))
    }

    /// Unpacks it, or compiles it if nobody has before.
    fn make(mut self) -> Image {
        self.packed = PACK.and_then(|bytes| pack::find(bytes, self.file, &self.architecture, self.hash));
        if self.packed.is_none() && !self.cache_file().is_some_and(|path| path.is_file()) {
            self.made = Some(nvrtc::compile(self.file, &self.text, &self.architecture));
        }
        self
    }

    /// Its module, from the first of its images that the driver takes.
    fn load(mut self, at: &Entered<'_>) -> Result<CUmodule> {
        match self.native(at) {
            Err(e) if e.kind() == Kind::DeviceUnsupported && !self.is_native_only() => {
                match PACK.and_then(|bytes| pack::find(bytes, self.file, "ptx", self.hash)) {
                    Some(image) => take(at, self.file, &image),
                    None => Err(e),
                }
            }
            loaded => loaded,
        }
    }

    /// Whether PTX holds none of its kernels: those with products of groups of warps are there as machine code alone.
    fn is_native_only(&self) -> bool {
        self.text.contains("\n#if SM90\n")
    }

    /// As `load`, but as machine code of the device's own architecture.
    fn native(&mut self, at: &Entered<'_>) -> Result<CUmodule> {
        if let Some(module) = self.packed.take().and_then(|image| take(at, self.file, &image).ok()) {
            return Ok(module);
        }
        let kept = self.cache_file();
        if let Some(module) = kept.as_ref().and_then(|path| std::fs::read(path).ok()).and_then(|image| take(at, self.file, &image).ok()) {
            return Ok(module);
        }
        let image = self.made.take().unwrap_or_else(|| nvrtc::compile(self.file, &self.text, &self.architecture))?;
        let module = take(at, self.file, &image)?;
        if let Some(path) = kept {
            // A cache that cannot be written to costs the next process time, nothing else.
            let _ = keep(&path, &image);
        }
        Ok(module)
    }
}

/// For unpacking; compiling takes a stack of its own.
const STACK: usize = 1 << 20;

/// Images on their way through some threads.
struct Shared {
    left: Vec<Image>,
    made: Vec<Image>,
    /// Whether memory ran short.
    short: bool,
}

/// Makes images by so many threads, this one among them, or as many as can be started.
fn make(left: Vec<Image>, threads: usize) -> Result<Vec<Image>> {
    let count = left.len();
    let shared = Arc::new(Mutex::new(Shared { left, made: vec_with_capacity(count, "the list of kernel files")?, short: false }));
    fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
        shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn work(shared: &Mutex<Shared>) {
        let next = || lock(shared).left.pop();
        while let Some(image) = next() {
            let made = image.make();
            lock(shared).made.push(made);
        }
        lock(shared).short |= runtime::ran_short();
    }
    let start = |_| {
        let (shared, runtime) = (Arc::clone(&shared), runtime::current());
        Thread::start("metrale-load", STACK, move || {
            let _scope = runtime::enter(runtime);
            work(&shared);
        })
    };
    let others: Vec<Thread> = (1..threads.min(count)).map_while(start).collect();
    work(&shared);
    others.into_iter().for_each(Thread::join);
    let mut shared = lock(&shared);
    runtime::set_short(shared.short);
    ensure!(shared.made.len() == count, Internal, "kernels: {} of {count} files were made", shared.made.len());
    Ok(std::mem::take(&mut shared.made))
}

/// The module of an image.
fn take(at: &Entered<'_>, file: &str, image: &[u8]) -> Result<CUmodule> {
    let mut module = std::ptr::null_mut();
    // SAFETY: an image in memory, with a NUL at its end where it is text; the driver checks and copies it.
    let code = unsafe { (at.api().cuModuleLoadData)(&mut module, image.as_ptr().cast()) };
    at.check(code, file).map(|()| module)
}

/// Writes a file whole or not at all.
fn keep(path: &std::path::Path, image: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let whole = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&whole, image)?;
    std::fs::rename(&whole, path)
}

/// The text of a kernel file, with the headers it includes in their places.
pub fn flat(file: &str) -> Result<String> {
    let mut out = String::new();
    let mut seen = Vec::new();
    include(&format!("{file}.cu"), &mut seen, &mut out)?;
    Ok(out)
}

fn include(path: &str, seen: &mut Vec<String>, out: &mut String) -> Result<()> {
    if seen.iter().any(|known| known == path) {
        return Ok(());
    }
    let (_, text) = SOURCES
        .iter()
        .find(|(name, _)| *name == path)
        .ok_or_else(|| Error::new(Kind::Unsupported, format!("there is no kernel file kernels/{path}")))?;
    seen.push(path.to_string());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            // Beside the file that includes it, or below kernels/.
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let found = [joined(folder, name), name.to_string()].into_iter().find(|p| SOURCES.iter().any(|(known, _)| known == p));
            match found {
                Some(found) => include(&found, seen, out)?,
                // The twins of everything for the host, which no compiler for a device comes to.
                None if name == "shim.hpp" => {}
                None => bail!(Internal, "kernels/{path} includes {name}, which is not there"),
            }
        } else if line != "#pragma once" {
            out.push_str(line);
            out.push('\n');
        }
    }
    Ok(())
}

/// A path as seen from a folder, both below kernels/.
fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Every kernel file, without extension.
pub fn files() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().filter_map(|(name, _)| name.strip_suffix(".cu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The groups of warps of kernels/common/sm90.cuh.
    #[test]
    fn files_with_groups_are_never_taken_as_ptx() {
        let native: Vec<&str> = files().filter(|&file| Image::of(file, (9, 0)).unwrap().is_native_only()).collect();
        assert_eq!(native, ["attention_group", "linear_group", "linear_stream"]);
    }

    #[test]
    fn headers_are_put_in_once() {
        let text = flat("norm").unwrap();
        assert_eq!(text.matches("struct View {").count(), 1);
        assert_eq!(text.matches("#define DEVICE ").count(), 1);
        assert!(!text.contains("#include") && !text.contains("#pragma once"));
        // Every file finds what it includes, those that include from another folder too.
        files().for_each(|file| drop(flat(file).unwrap()));
        assert_eq!(joined("common", "../formats/panel.cuh"), "formats/panel.cuh");
        assert!(flat("nothing").is_err() && files().any(|name| name == "norm"));
    }
}
