//! The kernels on the host: builds tests/cuda into a folder with a `libcuda.so.1` and a `libnvrtc.so.12`, for a child process to be run with.
#![allow(dead_code)] // not every test uses all of it

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// How the kernels are compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Optimised.
    Plain,
    /// Under the address sanitizer.
    Address,
}

impl Mode {
    fn folder(self) -> &'static str {
        match self {
            Mode::Plain => "plain",
            Mode::Address => "address",
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Mode::Plain => &["-O2"],
            Mode::Address => &["-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"],
        }
    }
}

/// What every file is compiled with. Aliasing: kernels look at memory as words of other types.
const FLAGS: [&str; 12] = [
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-mavx2",
    "-mfma",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    "-Wno-parentheses",
    "-DMETRALE_HOST",
];

/// A command run with the kernels on the host as its NVIDIA driver; `None`, after saying so, where they cannot be built.
pub fn command(program: &Path, mode: Mode) -> Option<Command> {
    let folder = build(mode)?;
    let mut command = Command::new(program);
    let mut path = folder.into_os_string();
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(more);
    }
    command.env("LD_LIBRARY_PATH", path).env("METRALE_TEST_DEVICE", "1");
    if mode == Mode::Address {
        let found = Command::new("g++").arg("-print-file-name=libasan.so").output().expect("g++ was there a moment ago");
        command.env("LD_PRELOAD", String::from_utf8_lossy(&found.stdout).trim());
        // The program itself is not instrumented; it may keep what it has at its end.
        command.env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1:handle_segv=0");
    }
    Some(command)
}

/// A program of one file, with the fibres.
pub fn program(mode: Mode, source: &str) -> Option<PathBuf> {
    let folder = build(mode)?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let program = folder.join("planted");
    let shim = folder.join("shim.o");
    let mut arguments = vec!["-o".to_string()];
    arguments.extend([&program, &source, &shim].map(|path| path.display().to_string()));
    compile(mode, &arguments);
    Some(program)
}

fn compile(mode: Mode, arguments: &[String]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = ["tests/cuda", "kernels"].map(|folder| format!("-I{}", root.join(folder).display()));
    let done = Command::new("g++").args(FLAGS).args(mode.flags()).args(include).args(arguments).output().unwrap();
    assert!(done.status.success(), "g++ {arguments:?}:\n{}", String::from_utf8_lossy(&done.stderr));
}

fn build(mode: Mode) -> Option<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) || Command::new("g++").arg("--version").output().is_err() {
        println!("SKIPPED: kernels run on the host on x86-64 with g++ alone");
        return None;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda").join(mode.folder());
    fs::create_dir_all(&folder).unwrap();
    // Test programs may be run side by side.
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    let headers = ["kernels/common", "kernels/formats"].map(|dir| newest(&root.join(dir), "cuh"));
    let headers = headers.into_iter().fold(newest(&root.join("tests/cuda"), "hpp"), SystemTime::max);
    let mut jobs: Vec<(PathBuf, PathBuf, Vec<String>)> = Vec::new();
    let mut objects = Vec::new();
    for (dir, kind) in [("kernels", "cu"), ("tests/cuda", "cpp")] {
        for source in list(&root.join(dir), kind) {
            let name = source.file_stem().unwrap().to_str().unwrap().to_string();
            if name == "nvrtc" {
                continue;
            }
            let object = folder.join(format!("{name}.o"));
            objects.push(object.clone());
            if modified(&object) > headers.max(modified(&source)) {
                continue;
            }
            if kind == "cu" {
                let unit = folder.join(format!("{name}.cpp"));
                fs::write(&unit, format!("#include \"shim.hpp\"\nnamespace {{\n#include \"{}\"\n}}\n", source.display())).unwrap();
                jobs.push((unit, object, vec![format!("-DFILE_NAME={name}")]));
            } else {
                jobs.push((source, object, vec!["-fvisibility=hidden".into()]));
            }
        }
    }
    let gpp = |arguments: &[String]| compile(mode, arguments);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((source, object, more)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut arguments = more.clone();
                    arguments.extend(["-c".into(), source.display().to_string(), "-o".into(), object.display().to_string()]);
                    gpp(&arguments);
                }
            });
        }
    });
    let library = folder.join("libcuda.so.1");
    if objects.iter().map(|o| modified(o)).max() > Some(modified(&library)) {
        let mut arguments: Vec<String> = vec!["-shared".into(), "-o".into(), library.display().to_string()];
        arguments.extend(objects.iter().map(|o| o.display().to_string()));
        gpp(&arguments);
    }
    let compiler = folder.join("libnvrtc.so.12");
    let source = root.join("tests/cuda/nvrtc.cpp");
    if modified(&source) > modified(&compiler) {
        gpp(&["-shared".into(), "-o".into(), compiler.display().to_string(), source.display().to_string()]);
    }
    Some(folder)
}

fn list(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|k| k == kind)).collect();
    files.sort();
    files
}

fn newest(folder: &Path, kind: &str) -> SystemTime {
    list(folder, kind).iter().map(|path| modified(path)).max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// When a file was written; long ago where there is none.
fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}
