//! The device's side of a case: the same batches with pages and states in its memory.

use metrale::backend::cpu::pause::Control;
use metrale::backend::cuda::{Block, Device, Stream};
use metrale::circuit::{DeviceWeights, DeviceWorkspace, Program, Stop};
use metrale::error::{Kind, Result};
use metrale::ops::*;
use metrale::weights::Declarations;
use std::sync::{Arc, OnceLock};

/// The device that cases run on in place of the pool, if they are to.
pub fn device() -> Option<&'static Arc<Device>> {
    static DEVICE: OnceLock<Option<Arc<Device>>> = OnceLock::new();
    DEVICE.get_or_init(|| std::env::var_os("METRALE_TEST_DEVICE").map(|_| Device::open(0).unwrap())).as_ref()
}

/// One case on the device.
pub struct OnDevice {
    stream: Arc<Stream>,
    weights: DeviceWeights,
    workspace: DeviceWorkspace,
    specs: Vec<KvSpec>,
    /// By sequence and key/value state.
    pages: Vec<Vec<Vec<Block>>>,
    pub lists: Vec<Vec<Vec<*mut u8>>>,
    /// By sequence: the state before a run and the one after it.
    states: Vec<[Block; 2]>,
}

impl OnDevice {
    pub fn new(stream: &Arc<Stream>, program: &Program, weights: &[Weight], d: &Declarations, floats: usize, sequences: usize) -> OnDevice {
        let device = stream.device();
        // Each in memory of its own, so that the address sanitizer sees what lies outside.
        let mut put = DeviceWeights::new(stream, 0).unwrap();
        weights.iter().for_each(|weight| put.push(weight).unwrap());
        put.finish().unwrap();
        let block = |_| {
            let block = Block::new(device, 4 * floats.max(1), "a state").unwrap();
            stream.zero(block.address(), block.len()).unwrap();
            block
        };
        let kinds = d.kv.len();
        OnDevice {
            stream: Arc::clone(stream),
            weights: put,
            // Cases write their inputs as an operation.
            workspace: DeviceWorkspace::new(stream, &[program], kinds, 256).unwrap().without_graphs(),
            specs: d.kv.clone(),
            pages: (0..sequences).map(|_| (0..kinds).map(|_| Vec::new()).collect()).collect(),
            lists: vec![vec![Vec::new(); kinds]; sequences],
            states: (0..sequences).map(|_| [0, 1].map(block)).collect(),
        }
    }

    /// Makes positions up to `to` of a sequence writable.
    pub fn reserve(&mut self, sequence: usize, to: usize) {
        for (kind, spec) in self.specs.iter().enumerate() {
            while self.pages[sequence][kind].len() < to.div_ceil(PAGE) {
                let page = Block::new(self.stream.device(), spec.page_bytes(), "a page").unwrap();
                // What nobody has written there must not matter, even if it is no number.
                self.stream.write(page.address(), &vec![0xff; spec.page_bytes()]).unwrap();
                self.lists[sequence][kind].push(std::ptr::without_provenance_mut(page.address() as usize));
                self.pages[sequence][kind].push(page);
            }
        }
    }

    pub fn state(&self, sequence: usize) -> StatePointers {
        let [read, write] = &self.states[sequence];
        StatePointers::none().and_device(read.address(), write.address())
    }

    pub fn commit(&mut self, sequence: usize) {
        self.states[sequence].swap(0, 1);
    }

    /// The output rows; `None`, after saying so, where an operation has no kernel yet.
    pub fn run(&mut self, program: &Program, batch: &Batch, output: Value) -> Option<Vec<f32>> {
        let mut run = || -> Result<Vec<f32>> {
            self.workspace.poison()?;
            assert_eq!(self.workspace.run(program, batch, &self.weights.weights, None, Control::none())?, Stop::Done);
            let mut rows = Vec::new();
            self.workspace.read(program, batch, output, &mut rows)?;
            Ok(rows)
        };
        match run() {
            Ok(rows) => Some(rows),
            Err(e) if e.kind() == Kind::Unsupported && e.message().ends_with("has no GPU kernel") => {
                println!("PENDING {}", e.message().split(':').next().unwrap());
                None
            }
            Err(e) if e.kind() == Kind::Unsupported && e.message().contains("a GPU keeps them in") => {
                println!("PENDING {}", e.message());
                None
            }
            Err(e) => panic!("{e}"),
        }
    }
}
