//! The loaded model, and the load that does not stop before it is there.

use super::cancel::Alarm;
use super::cost::Cost;
use super::fingerprint::Fingerprint;
use super::info::Info;
use super::loader::{Loader, Progress};
use super::plan::Plan;
use super::prefix::Prefixes;
use super::prepare::Prepared;
use super::runner::{Runner, Shapes};
use super::scheduler::Stepper;
use super::shift::Keys;
use crate::backend::cpu::lock_unless;
use crate::backend::cpu::pool::{Pool, inside};
use crate::backend::cuda::{KernelTime, Stream};
use crate::cache::{PagePool, State, StatePool};
use crate::circuit::DeviceWeights;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::ops::{ExpertCache, GpuWeight, Weight};
use crate::options::LoadOptions;
use crate::sampling::Vocabulary;
use crate::text::{ChatTemplate, Tokenizer};
use crate::weights::{Access, Input, Role};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Bytes of one step of a load that nobody slices: large enough to keep every worker busy, small enough to cancel between. After as many in little time
/// it is twice as many: a device's bus takes the most in two milliseconds.
const SLICE: usize = 32 << 20;
const MOST_SLICE: usize = 128 << 20;
const QUICK: Duration = Duration::from_millis(10);

/// A loaded model: immutable, shared by its sequences.
pub struct Engine {
    pub(super) prepared: Prepared,
    pub(super) info: Info,
    pub(super) plan: Plan,
    pub(super) weights: Vec<Weight>,
    /// The device that computes, with the weights there; none where the processor does.
    pub(super) device: Option<OnDevice>,
    /// Packed experts that are kept, where they stay in their file.
    pub(super) experts: Arc<ExpertCache>,
    pub(super) pool: Pool,
    pub(super) runner: Mutex<Runner>,
    /// Calls that wait for it.
    pub(super) waiting: AtomicUsize,
    pub(super) stepper: Mutex<Stepper>,
    pub(super) alarm: Arc<Alarm>,
    pub(super) cost: Cost,
    pub(super) pools: Vec<Arc<PagePool>>,
    pub(super) states: Arc<StatePool>,
    pub(super) zero: Arc<State>,
    pub(super) prefixes: Prefixes,
    pub(super) fingerprint: OnceLock<Fingerprint>,
    /// How keys move, or why they do not; found out when first asked for.
    pub(super) keys: OnceLock<Result<Vec<Keys>>>,
    pub(super) tokenizer: Result<Arc<Tokenizer>>,
    pub(super) template: Result<ChatTemplate>,
    /// The tokens for grammars, made when the first grammar is.
    pub(super) grammar_vocabulary: OnceLock<Arc<Vocabulary>>,
}

/// What a model has on its device.
pub(super) struct OnDevice {
    pub stream: Arc<Stream>,
    pub weights: DeviceWeights,
}

/// Loads a checkpoint: a Hugging Face folder or a GGUF file. `progress` is called between slices of work on the calling thread
/// and may stop the load.
pub fn load(path: &Path, options: &LoadOptions, progress: Option<&mut dyn FnMut(Progress) -> ControlFlow<()>>) -> Result<Arc<Engine>> {
    load_from(Input::path(path, Access::Map)?, options, progress)
}

/// As [`load`], from wherever the bytes come.
pub fn load_from(
    input: Input,
    options: &LoadOptions,
    progress: Option<&mut dyn FnMut(Progress) -> ControlFlow<()>>,
) -> Result<Arc<Engine>> {
    load_with(input, options, None, progress)
}

/// As [`load_from`]; with a pool, it computes instead of own threads.
pub fn load_with(
    input: Input,
    options: &LoadOptions,
    pool: Option<Pool>,
    mut progress: Option<&mut dyn FnMut(Progress) -> ControlFlow<()>>,
) -> Result<Arc<Engine>> {
    let mut loader = Loader::new(input, options).with_pool(pool).at_once();
    let mut slice = SLICE;
    loop {
        let (begun, before) = (Instant::now(), loader.progress());
        let engine = loader.step(slice)?;
        slice = next_slice(slice, begun.elapsed(), before, loader.progress());
        if let Some(progress) = progress.as_mut()
            && progress(loader.progress()).is_break()
        {
            return Err(Error::new(Kind::Cancelled, "the host cancelled the load"));
        }
        if let Some(engine) = engine {
            return Ok(engine);
        }
    }
}

fn next_slice(slice: usize, took: Duration, before: Progress, now: Progress) -> usize {
    let done = now.done_bytes.saturating_sub(before.done_bytes);
    match took < QUICK {
        true if now.phase == before.phase && done >= slice as u64 / 2 => (2 * slice).min(MOST_SLICE),
        true => slice,
        false => SLICE,
    }
}

impl Engine {
    /// Facts.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Planned bytes, for one sequence.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The tokenizer, or why there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().map_err(Clone::clone)
    }

    /// The chat template, or why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().map_err(Clone::clone)
    }

    /// The tokens as grammars see them, or why there are none.
    pub fn grammar_vocabulary(&self) -> Result<&Arc<Vocabulary>> {
        if let Some(made) = self.grammar_vocabulary.get() {
            return Ok(made);
        }
        let made = Vocabulary::of(self.tokenizer()?, self.info.vocab, &self.info.end_tokens)?;
        Ok(self.grammar_vocabulary.get_or_init(|| made))
    }

    /// Whether a token ends a generation.
    pub fn is_end(&self, token: i32) -> bool {
        self.info.end_tokens.contains(&token)
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> u64 {
        (0..self.weights.len()).map(|index| self.bytes_of(index)).sum()
    }

    /// Bytes of a weight where it is multiplied with.
    fn bytes_of(&self, index: usize) -> u64 {
        let there = self.prepared.device_bytes_of(index, &self.prepared.placement);
        if there > 0 { there } else { self.weights[index].bytes() as u64 }
    }

    /// Bytes of key/value pages that sequences have taken so far.
    pub fn cache_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.bytes() as u64).sum()
    }

    /// Gives back memory that no sequence needs now.
    pub fn trim(&self) {
        // Whoever is computing keeps what it uses.
        if let Ok(mut runner) = self.runner.try_lock() {
            runner.trim();
        }
        if let Ok(mut stepper) = self.stepper.try_lock() {
            stepper.trim();
        }
        self.prefixes.clear();
        self.pools.iter().for_each(|pool| pool.trim());
        self.states.trim();
        self.experts.trim();
    }

    /// Bytes of weights one decode step reads: matrices, but not tables of which a row is looked up.
    pub fn step_bytes(&self) -> u64 {
        self.prepared
            .declarations
            .weights
            .iter()
            .enumerate()
            .filter(|(_, w)| matches!(w.role, Role::Matrix | Role::Experts))
            .map(|(i, w)| self.bytes_of(i) / w.experts().max(1) as u64 * w.active as u64)
            .sum()
    }

    /// Multiply-adds of one token in the matrices, times two.
    pub fn token_flops(&self) -> u64 {
        let matrices = self.prepared.declarations.weights.iter().filter(|w| matches!(w.role, Role::Matrix | Role::Experts));
        matrices.map(|w| 2 * (w.rows * w.cols * w.active) as u64).sum()
    }

    /// Time that blocking calls spent waiting for the device, all together: what is left of theirs is the host's.
    pub fn device_waited(&self) -> Result<Duration> {
        Ok(self.runner()?.waited())
    }

    /// Begins to time the kernels of runs, which are then queued one by one; nothing on the processor.
    pub fn time_kernels(&self) {
        self.device.iter().for_each(|device| device.stream.time_kernels());
    }

    /// Ends that: what each kernel took since, most first.
    pub fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        self.device.as_ref().map_or(Ok(Vec::new()), |device| device.stream.kernel_times())
    }

    pub(super) fn weights(&self) -> &[Weight] {
        &self.weights
    }

    pub(super) fn device_weights(&self) -> Result<&[GpuWeight]> {
        match &self.device {
            Some(device) => Ok(&device.weights.weights),
            None => crate::bail!(Internal, "a run on a device of a model that has none"),
        }
    }

    pub(super) fn shapes(&self) -> &'static Shapes {
        self.prepared.shapes()
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// For each kind of pages, whether its positions are a source's.
    pub(super) fn of_source(&self) -> &[bool] {
        &self.prepared.declarations.of_source
    }

    pub(super) fn pools(&self) -> &[Arc<PagePool>] {
        &self.pools
    }

    /// Memory of recurrent states, and the state before any token.
    pub(super) fn states(&self) -> (&Arc<StatePool>, &Arc<State>) {
        (&self.states, &self.zero)
    }

    /// Whether sequences carry recurrent slots.
    pub fn is_recurrent(&self) -> bool {
        !self.prepared.declarations.slots.is_empty()
    }

    pub(super) fn runner(&self) -> Result<MutexGuard<'_, Runner>> {
        not_inside()?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(runner)
    }

    /// The runner of blocking calls, unless `give_up` says so while others have it.
    pub(super) fn runner_unless(&self, give_up: &dyn Fn() -> bool) -> Result<Option<MutexGuard<'_, Runner>>> {
        not_inside()?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let runner = lock_unless(&self.runner, give_up);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(runner)
    }

    /// The runner of blocking calls, if nobody has it or waits for it and no step is under way.
    pub(super) fn runner_if_free(&self) -> Option<MutexGuard<'_, Runner>> {
        if self.is_wanted() || not_inside().is_err() {
            return None;
        }
        match self.runner.try_lock() {
            Ok(runner) => Some(runner),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether a call waits for the runner, or a step of bounded work is under way.
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 || matches!(self.stepper.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// The stepper, unless `give_up` says so while another call has it.
    pub(super) fn stepper_unless(&self, give_up: &dyn Fn() -> bool) -> Result<Option<MutexGuard<'_, Stepper>>> {
        not_inside()?;
        Ok(lock_unless(&self.stepper, give_up))
    }

    /// What rows cost.
    pub(super) fn cost(&self) -> &Cost {
        &self.cost
    }

    pub(super) fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// Cancels every sequence of the model, as [`super::Canceller::cancel`] does one. Any thread.
    pub fn cancel(&self) {
        self.alarm.cancel_all();
    }
}

/// A host's `parallel_for` may do other work on the calling thread while it waits. Work on a model would wait for the call that
/// is under way on the same thread.
fn not_inside() -> Result<()> {
    ensure!(!inside(), Busy, "this thread is inside a call that computes; another one cannot begin before that has returned");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_grow_only_while_whole_ones_are_quick() {
        let at = |phase, done_bytes| Progress { done_bytes, total_bytes: 1 << 40, phase };
        let (quick, slow) = (QUICK / 2, QUICK);
        let next = |slice: usize, took, done: usize| next_slice(slice, took, at("weights", 7), at("weights", 7 + done as u64));
        assert_eq!([1, 2, 4].map(|n| next(n * SLICE, quick, n * SLICE)), [2, 4, 4].map(|n| n * SLICE));
        // A small weight says nothing, nor does a step that counts no bytes; a slow one is enough.
        assert_eq!((next(2 * SLICE, quick, 4096), next(2 * SLICE, slow, 2 * SLICE)), (2 * SLICE, SLICE));
        assert_eq!(next_slice(SLICE, quick, at("tokenizer", 0), at("weights", 1 << 30)), SLICE);
    }
}
