//! Loading: from a path to an engine that runs.

use super::cancel::Alarm;
use super::cost::Cost;
use super::info::Info;
use super::pack::{self, Supply};
use super::plan::Plan;
use super::preflight;
use super::prepare::Prepared;
use super::runner::{Runner, Shape};
use super::scheduler::Stepper;
use super::synthetic::Random;
use super::vocabulary;
use crate::backend::cpu::pool::{Pool, available_threads, lock_unless};
use crate::backend::cpu::simd;
use crate::cache::{PagePool, State, StateLayout, StatePool};
use crate::error::{Error, Kind, Result};
use crate::ops::{ExpertCache, Weight};
use crate::options::{Compute, LoadOptions};
use crate::sampling::Vocabulary;
use crate::text::{ChatTemplate, Tokenizer};
use crate::weights::{Role, Source, WeightSpec};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How far a load is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of weights made so far.
    pub done_bytes: u64,
    /// Bytes of weights in all.
    pub total_bytes: u64,
    /// What is being done.
    pub phase: &'static str,
}

/// A loaded model: immutable, shared by its sequences.
pub struct Engine {
    pub(super) prepared: Prepared,
    info: Info,
    plan: Plan,
    weights: Vec<Weight>,
    pool: Pool,
    runner: Mutex<Runner>,
    stepper: Mutex<Stepper>,
    alarm: Arc<Alarm>,
    cost: Cost,
    pools: Vec<Arc<PagePool>>,
    states: Arc<StatePool>,
    zero: Arc<State>,
    tokenizer: Result<Arc<Tokenizer>>,
    template: Result<ChatTemplate>,
    /// The tokens for grammars, made when the first grammar is.
    grammar_vocabulary: OnceLock<Arc<Vocabulary>>,
}

/// Loads a checkpoint: a Hugging Face folder or a GGUF file. `progress` is called between tensors on the calling thread and may stop the load.
pub fn load(path: &Path, options: &LoadOptions, mut progress: Option<&mut dyn FnMut(Progress) -> ControlFlow<()>>) -> Result<Arc<Engine>> {
    let prepared = Prepared::new(path, options)?;
    let plan = prepared.plan(1)?;
    preflight::check_memory(&plan, prepared.context, options.memory)?;
    let threads = if options.threads == 0 { available_threads() } else { options.threads };
    let pool = Pool::new(threads)?;
    let mut report = |done_bytes: u64, phase: &'static str| -> Result<()> {
        let Some(progress) = progress.as_mut() else { return Ok(()) };
        match progress(Progress { done_bytes, total_bytes: plan.weights, phase }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::new(Kind::Cancelled, "the host cancelled the load")),
        }
    };
    report(0, "weights")?;
    let supply = match options.synthetic {
        Some(synthetic) => Supply::Random(Random::new(synthetic)),
        None => Supply::Checkpoint(Arc::clone(&prepared.checkpoint)),
    };
    let mut weights = crate::error::vec_with_capacity(prepared.declarations.weights.len(), "the list of weights")?;
    let mut done = 0;
    let experts = Arc::new(ExpertCache::new(prepared.expert_budget.unwrap_or(0)));
    for (index, spec) in prepared.declarations.weights.iter().enumerate() {
        if prepared.pages(spec)? {
            weights.push(pack::paged(&prepared.checkpoint, spec, &prepared.layouts[index], &experts)?);
            continue;
        }
        let weight = pack::read(&supply, spec, &prepared.layouts[index], &pool)?;
        done += weight.bytes() as u64;
        weights.push(weight);
        if matches!(spec.role, Role::Matrix | Role::Experts) {
            spec.parts().for_each(|part| prepared.checkpoint.release(&part.tensor));
        }
        report(done.min(plan.weights), "weights")?;
    }
    let states = StatePool::new(StateLayout::new(&prepared.declarations.slots, prepared.model.dims().vocab)?);
    let zero = states.zero()?;
    let encoder = prepared.encoder_program(prepared.context, &[])?.map(|(program, _)| program);
    let runner = Mutex::new(Runner::new(&prepared, &Shape::ALL, encoder, states.layout().slots())?);
    let stepper = Mutex::new(Stepper::new(Runner::new(&prepared, &Shape::STEPS, None, states.layout().slots())?));
    let pools = prepared.declarations.kv.iter().map(|spec| PagePool::new(spec.page_bytes(), prepared.context)).collect();
    let (tokenizer, end_tokens) = vocabulary::open(&prepared.checkpoint);
    let template = match &tokenizer {
        Ok(tokenizer) => vocabulary::template(tokenizer),
        Err(e) => Err(e.clone()),
    };
    let dims = prepared.model.dims();
    let info = Info {
        model_type: prepared.model_type.clone(),
        architecture: prepared.checkpoint.config().get("architectures").and_then(|a| a.get(0)).and_then(|a| a.as_str()).map(str::to_string),
        parameters: prepared
            .declarations
            .weights
            .iter()
            .filter(|w| !matches!(w.source, Source::Constant(_)))
            .map(WeightSpec::elements)
            .sum(),
        layers: dims.layers,
        hidden: dims.hidden,
        vocab: dims.vocab,
        context: prepared.context,
        model_context: dims.context,
        compute: if prepared.compute == Compute::F32 { "f32" } else { "fast" },
        threads: pool.count(),
        simd: simd::table().name(),
        bos: tokenizer.as_ref().ok().and_then(|t| t.bos()),
        end_tokens,
        drafts: prepared.drafts.clone(),
    };
    report(plan.weights, "done")?;
    Ok(Arc::new(Engine {
        prepared,
        info,
        plan,
        weights,
        pool,
        runner,
        stepper,
        alarm: Arc::default(),
        cost: Cost::default(),
        pools,
        states,
        zero,
        tokenizer,
        template,
        grammar_vocabulary: OnceLock::new(),
    }))
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
        self.weights.iter().map(|w| w.bytes() as u64).sum()
    }

    /// Bytes of key/value pages that sequences have taken so far.
    pub fn cache_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.bytes() as u64).sum()
    }

    /// Bytes of weights one decode step reads: matrices, but not tables of which a row is looked up.
    pub fn step_bytes(&self) -> u64 {
        self.prepared
            .declarations
            .weights
            .iter()
            .enumerate()
            .filter(|(_, w)| matches!(w.role, Role::Matrix | Role::Experts))
            .map(|(i, w)| self.weights[i].bytes() as u64 / w.experts().max(1) as u64 * w.active as u64)
            .sum()
    }

    /// Multiply-adds of one token in the matrices, times two.
    pub fn token_flops(&self) -> u64 {
        let matrices = self.prepared.declarations.weights.iter().filter(|w| matches!(w.role, Role::Matrix | Role::Experts));
        matrices.map(|w| 2 * (w.rows * w.cols * w.active) as u64).sum()
    }

    pub(super) fn weights(&self) -> &[Weight] {
        &self.weights
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

    pub(super) fn runner(&self) -> MutexGuard<'_, Runner> {
        self.runner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runner of blocking calls, unless `give_up` says so while others have it.
    pub(super) fn runner_unless(&self, give_up: &dyn Fn() -> bool) -> Option<MutexGuard<'_, Runner>> {
        lock_unless(&self.runner, give_up)
    }

    /// The stepper, unless `give_up` says so while another call has it.
    pub(super) fn stepper_unless(&self, give_up: &dyn Fn() -> bool) -> Option<MutexGuard<'_, Stepper>> {
        lock_unless(&self.stepper, give_up)
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
