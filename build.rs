//! The shared library's face for the linker: SONAME, symbol versions, and no symbol besides `metrale_*` (some dependencies
//! declare a C interface of their own).
//!
//! Until 1.0 the minor version is part of the SONAME (`libmetrale.so.0.1`), since minor versions may break hosts; then the
//! major one alone. Symbol versions come from `bindings/c/exports.map`, see `bindings/c/versioned.sh`; a linker driver that does not know
//! gcc's `-wrapper` makes a library without both, and the symbols of dependencies are hidden all the same.
//!
//! `bindings/c/glibc.c` lets it run with an older glibc than that of the machine that builds it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=bindings/c/exports.map");
    println!("cargo:rerun-if-changed=bindings/c/versioned.sh");
    println!("cargo:rerun-if-changed=bindings/c/glibc.c");
    println!("cargo:rerun-if-changed=kernels");
    write_sources();
    if !env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux" || os == "android") {
        return;
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    // Resident: threads of a model that is still loaded, or of the host with destructors of ours, may outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|libc| libc == "gnu") {
        older_glibc();
    }
    if !takes_wrapper() {
        println!("cargo:warning=the linker driver takes no -wrapper: libmetrale.so will have no SONAME and no symbol versions");
        return;
    }
    let wrapper = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("bindings/c/versioned.sh");
    println!("cargo:rustc-cdylib-link-arg=-wrapper");
    println!("cargo:rustc-cdylib-link-arg={}", wrapper.display());
    let (major, minor) = (variable("CARGO_PKG_VERSION_MAJOR"), variable("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmetrale.so.{version}");
}

/// Sends calls of functions that got a new version lately to the old one. Before glibc 2.34 those were in libraries of their own,
/// which are still there, empty.
fn older_glibc() {
    let source = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("bindings/c/glibc.c");
    let object = PathBuf::from(variable("OUT_DIR")).join("glibc.o");
    let mut compiler = Command::new(driver());
    compiler.args(["-O2", "-fPIC", "-ffunction-sections", "-c"]).arg(&source).arg("-o").arg(&object);
    let libraries = ["libpthread.so.0", "libdl.so.2"];
    if !compiler.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) || !libraries.iter().all(|name| is_found(name)) {
        println!("cargo:warning=bindings/c/glibc.c cannot be used here: libmetrale.so will need this machine's glibc or a newer one");
        return;
    }
    let text = std::fs::read_to_string(&source).expect("it was compiled");
    let names = text.lines().filter_map(|line| line.strip_prefix("OLD(").or(line.strip_prefix("OLD_STAT("))?.split(',').next());
    names.for_each(|name| println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}"));
    println!("cargo:rustc-cdylib-link-arg={}", object.display());
    for library in libraries {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--push-state,--no-as-needed,-l:{library},--pop-state");
    }
}

/// Whether the linker has a file of this name in its folders: the driver then says where.
fn is_found(library: &str) -> bool {
    let said = Command::new(driver()).arg(format!("-print-file-name={library}")).output();
    said.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).trim().contains('/'))
}

/// What rustc calls to link.
fn driver() -> String {
    env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into())
}

/// Whether it is gcc, or acts like it.
fn takes_wrapper() -> bool {
    let tried =
        Command::new(driver()).args(["-wrapper", "env", "-E", "-x", "c", "/dev/null"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success())
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

/// The table of kernel sources: `SOURCES`, each path below kernels/ with the text.
fn write_sources() {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("kernels");
    let mut files = Vec::new();
    collect(&root, &mut files);
    files.sort();
    let lines = files.iter().map(|path| {
        let name = path.strip_prefix(&root).expect("files lie below the folder that was searched");
        format!("    ({:?}, include_str!({:?})),\n", name.display().to_string(), path.display().to_string())
    });
    let text = format!("static SOURCES: &[(&str, &str)] = &[\n{}];\n", lines.collect::<String>());
    // Made by kernels/build.py; nothing is fetched or compiled here.
    let pack = root.with_file_name("build").join("kernels.pack");
    let pack = if pack.is_file() {
        println!("cargo:rerun-if-changed={}", pack.display());
        format!("Some(include_bytes!({:?}))", pack.display().to_string())
    } else {
        // A file that is not there would count as changed each time; build.py touches a file of kernels/, which is watched.
        "None".into()
    };
    let text = format!("{text}static PACK: Option<&[u8]> = {pack};\n");
    fs::write(PathBuf::from(variable("OUT_DIR")).join("kernels.rs"), text).expect("cargo's OUT_DIR can be written to");
}

/// Kernel files and their headers below a folder.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for path in entries.map(|entry| entry.expect("a folder's entries can be read").path()) {
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|kind| kind == "cu" || kind == "cuh") {
            files.push(path);
        }
    }
}
