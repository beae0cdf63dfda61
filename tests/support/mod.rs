//! What several integration tests need: scratch folders and a writer of small GGUF files.
#![allow(dead_code)] // each test binary uses its own part

pub mod copies;
pub mod cuda;
pub mod golden;
pub mod llama64;
pub mod models;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Folder of the committed checkpoints.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

/// The device that models are loaded for: the processor, or with METRALE_TEST_DEVICE the first NVIDIA device.
pub fn device() -> usize {
    usize::from(is_on_device())
}

/// Whether METRALE_TEST_DEVICE is set.
pub fn is_on_device() -> bool {
    std::env::var_os("METRALE_TEST_DEVICE").is_some()
}

/// What a device may take beside what is planned: on a real one the driver takes memory in pieces of 2 MiB, and some for kernels and graphs.
#[allow(dead_code)]
pub fn driver_bytes(device: &metrale::backend::cuda::Device) -> u64 {
    if device.info().name == "kernels on the host" { 0 } else { 64 << 20 }
}

/// Runs this test program again with the kernels on the host as its NVIDIA driver, some of its tests and folders.
pub fn run_on_device(mode: cuda::Mode, folders: &str, tests: &[&str]) {
    if is_on_device() {
        return;
    }
    let Some(mut command) = cuda::command(&std::env::current_exe().unwrap(), mode) else { return };
    let done = command.args(["--nocapture", "--test-threads=2"]).args(tests).env("METRALE_ONLY", folders).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{out}");
    assert!(done.status.success() && out.contains(" passed"), "{mode:?}: {err}");
}

/// Whether this process is a child whose device the test `name` runs on; else one is started, in which it is.
pub fn is_child(name: &str, settings: &[(&str, &str)]) -> bool {
    if is_on_device() {
        return true;
    }
    let Some(mut command) = cuda::command(&std::env::current_exe().unwrap(), cuda::Mode::Plain) else { return false };
    ran(command.args(["--exact", name, "--nocapture"]).envs(settings.iter().copied()));
    false
}

fn ran(command: &mut std::process::Command) {
    let done = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// A folder that is removed with its contents.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A folder that nobody else has: tests of one process run beside each other.
    pub fn new(name: &str) -> Scratch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("metrale-test-{}-{number}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and gives its path.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, contents).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Type ids of metadata values.
pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

/// Writes GGUF bytes field by field, so that any field can be wrong.
#[derive(Clone)]
pub struct GgufWriter {
    pub magic: [u8; 4],
    pub version: u32,
    /// Count that the header claims; the real one if `None`.
    pub claimed_tensors: Option<u64>,
    pub claimed_keys: Option<u64>,
    keys: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: Vec<u8>,
    alignment: usize,
}

impl GgufWriter {
    pub fn new() -> Self {
        GgufWriter {
            magic: *b"GGUF",
            version: 3,
            claimed_tensors: None,
            claimed_keys: None,
            keys: Vec::new(),
            infos: Vec::new(),
            data: Vec::new(),
            alignment: 32,
        }
    }

    /// The smallest llama that has a config: one layer's worth of keys and an embedding of 8 x 32.
    pub fn llama() -> Self {
        let mut w = GgufWriter::new();
        w.string("general.architecture", "llama");
        for (key, value) in [
            ("llama.context_length", 64),
            ("llama.embedding_length", 32),
            ("llama.block_count", 1),
            ("llama.feed_forward_length", 64),
            ("llama.attention.head_count", 4),
            ("llama.attention.head_count_kv", 2),
        ] {
            w.u32(key, value);
        }
        w.raw("llama.attention.layer_norm_rms_epsilon", F32, &1e-5f32.to_le_bytes());
        w.tensor("token_embd.weight", &[32, 8], 0, &vec![0; 8 * 32 * 4]);
        w
    }

    /// Pads tensors to this; the key that says so is written separately.
    pub fn aligned(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// A key with a type and the bytes after it as they come.
    pub fn raw(&mut self, key: impl AsRef<[u8]>, kind: u32, value: &[u8]) {
        let mut bytes = counted(key.as_ref());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
        self.keys.push(bytes);
    }

    pub fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, U32, &value.to_le_bytes());
    }

    pub fn string(&mut self, key: &str, value: &str) {
        self.raw(key, STRING, &counted(value.as_bytes()));
    }

    /// Drops a key and gives the writer back.
    pub fn without(mut self, key: &str) -> Self {
        let start = counted(key.as_bytes());
        let before = self.keys.len();
        self.keys.retain(|k| !k.starts_with(&start));
        assert_eq!(before, self.keys.len() + 1, "{key} was there");
        self
    }

    /// A tensor with its bytes; dimensions innermost first, as in the file.
    pub fn tensor(&mut self, name: &str, dimensions: &[u64], kind: u32, bytes: &[u8]) {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        self.info(name.as_bytes(), dimensions, kind, self.data.len() as u64);
        self.data.extend(bytes);
    }

    /// A tensor info without bytes.
    pub fn info(&mut self, name: &[u8], dimensions: &[u64], kind: u32, offset: u64) {
        let mut bytes = counted(name);
        bytes.extend((dimensions.len() as u32).to_le_bytes());
        dimensions.iter().for_each(|d| bytes.extend(d.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        self.infos.push(bytes);
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.claimed_tensors.unwrap_or(self.infos.len() as u64).to_le_bytes());
        out.extend(self.claimed_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.concat());
        out.extend(self.infos.concat());
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A string as GGUF stores it: length, bytes.
pub fn counted(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// Repeatable numbers without a pattern.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }
}
