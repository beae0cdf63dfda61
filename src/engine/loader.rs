//! A load as a machine that does a little at a time: bytes that must be read, headers, weights slice by slice, tokenizer.
//!
//! Whoever drives it decides how much each step may do and looks at clock and cancel flag in between; dropping it at any point
//! frees everything. Headers and each program are made in one piece.

use super::cost::Cost;
use super::info::Info;
use super::late;
use super::load::{Engine, OnDevice};
use super::making::{Making, Room};
use super::pack::Supply;
use super::paged;
use super::plan::Plan;
use super::prefix::Prefixes;
use super::preflight;
use super::prepare::{Prepared, Programs};
use super::runner::Runner;
use super::scheduler::Stepper;
use super::sending::Sending;
use super::synthetic::Random;
use super::vocabulary;
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::late::Desk;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd;
use crate::cache::{Home, PagePool, StatePool};
use crate::error::{Kind, Result, ensure_memory, vec_with_capacity};
use crate::ops::{ExpertCache, Weight};
use crate::options::{Compute, LoadOptions};
use crate::runtime::{self, Class, Level};
use crate::text::Tokenizer;
use crate::text::own_stack::Beside;
use crate::text::turns::Turns;
use crate::weights::{Checkpoint, Input, Pick, Reading, Source, WeightSpec};
use crate::{bail, ensure};
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// How far a load is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of this phase done so far.
    pub done_bytes: u64,
    /// Bytes of this phase in all; 0 while that is not known.
    pub total_bytes: u64,
    /// What is being done.
    pub phase: &'static str,
}

/// A load in progress.
pub struct Loader {
    options: LoadOptions,
    /// Given, rather than made with own threads.
    pool: Option<Pool>,
    /// Whether nobody waits between the steps, so that other threads may work on.
    at_once: bool,
    stage: Stage,
    /// Of the last stage that counts bytes.
    progress: Progress,
}

/// Boxed, because the stages differ much in size.
enum Stage {
    Reading(Box<Reading>),
    Headers(Box<Checkpoint>),
    Programs(Box<Prepared>, Box<Programs>),
    Pool(Box<Prepared>, Box<Programs>),
    Kernels(Box<Weights>),
    Vocabulary(Box<Weights>),
    Words(Box<Weights>, Turns<Vocabulary>),
    Weights(Box<Weights>, Words),
    Finish(Box<Weights>, Words),
    /// Done or failed.
    Ended,
}

/// The tokenizer, or why there is none, and tokens that end a generation: made, or being made by another thread.
enum Words {
    Made(Box<Vocabulary>),
    Coming(Beside<Vocabulary>),
}

type Vocabulary = (Result<Arc<Tokenizer>>, Vec<i32>);

impl Words {
    fn get(self) -> Result<Vocabulary> {
        let vocabulary = match self {
            Words::Made(vocabulary) => *vocabulary,
            Words::Coming(coming) => coming.join("tokenizer")?,
        };
        if let Err(e) = &vocabulary.0 {
            ensure!(e.kind() != Kind::OutOfMemory, OutOfMemory, "{e}");
            runtime::note(Level::Warning, 0, || format!("load: no text, only token ids: {e}"));
        }
        Ok(vocabulary)
    }
}

/// What is there while weights are made.
struct Weights {
    prepared: Prepared,
    plan: Plan,
    pool: Pool,
    supply: Supply,
    experts: Arc<ExpertCache>,
    /// All matrices that stay.
    region: Arc<Region>,
    /// Those that go to a device too are packed one by one, each in memory of its own.
    none: Arc<Region>,
    /// For those that wait until they are used.
    late: Option<Arc<Desk>>,
    weights: Vec<Weight>,
    /// Where they go, if that is not the host's memory.
    device: Option<Sending>,
    /// Files of kernels that are still to be loaded, the last ones first; whether they are those with products of groups of warps.
    kernels: Vec<&'static str>,
    has_groups: bool,
    programs: Programs,
    /// Bytes of finished weights.
    done: u64,
    making: Making,
}

impl Loader {
    /// Starts; nothing is read yet.
    pub fn new(input: Input, options: &LoadOptions) -> Loader {
        let reading = Reading::new(input);
        let progress = Progress { done_bytes: 0, total_bytes: reading.total(), phase: "reading" };
        Loader { options: options.clone(), pool: None, at_once: false, stage: Stage::Reading(Box::new(reading)), progress }
    }

    /// Computes with `pool`, instead of own threads: to load, and whenever the model computes.
    pub fn with_pool(mut self, pool: Option<Pool>) -> Loader {
        self.pool = pool;
        self
    }

    /// Says that steps follow each other without a pause.
    pub(super) fn at_once(mut self) -> Loader {
        self.at_once = true;
        self
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Does about `most` bytes of work, or one piece that is not counted in bytes. The engine, when that was the last one.
    /// After an error, and after the engine, only dropping is left.
    pub fn step(&mut self, most: usize) -> Result<Option<Arc<Engine>>> {
        self.step_for(most, None)
    }

    /// As [`Loader::step`]; the tokenizer, which takes longest of all that is not counted in bytes, is left off after `time`.
    pub fn step_for(&mut self, most: usize, time: Option<Duration>) -> Result<Option<Arc<Engine>>> {
        let made = self.advance(most, time)?;
        // What was made with the last memory there is must not stay.
        ensure_memory("the load").inspect_err(|_| self.stage = Stage::Ended)?;
        Ok(made)
    }

    fn advance(&mut self, most: usize, time: Option<Duration>) -> Result<Option<Arc<Engine>>> {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Reading(mut reading) => {
                let all = reading.step(most)?;
                self.progress.done_bytes = reading.done();
                match all {
                    true => Stage::Headers(Box::new(reading.open(self.options.synthetic.is_some())?)),
                    false => Stage::Reading(reading),
                }
            }
            Stage::Headers(checkpoint) => {
                let prepared = Prepared::of(*checkpoint, &self.options)?;
                runtime::note(Level::Info, 0, || format!("load: a model of type {}", prepared.model_type));
                Stage::Programs(Box::new(prepared), Box::default())
            }
            Stage::Programs(mut prepared, mut programs) => match programs.step(&mut prepared)? {
                true => Stage::Pool(prepared, programs),
                false => Stage::Programs(prepared, programs),
            },
            Stage::Pool(prepared, programs) => {
                let weights = Weights::new(*prepared, *programs, &self.options, self.pool.take(), self.at_once)?;
                runtime::note(Level::Info, 0, || format!("load: weights, {} bytes", weights.planned()));
                self.begin_vocabulary(Box::new(weights))
            }
            Stage::Kernels(mut weights) => {
                weights.load_kernels(self.at_once)?;
                self.begin_vocabulary(weights)
            }
            Stage::Vocabulary(weights) => {
                let checkpoint = Arc::clone(&weights.prepared.checkpoint);
                if time.is_some() {
                    Stage::Words(weights, Turns::start("tokenizer", move || vocabulary::open(&checkpoint))?)
                } else if self.at_once && weights.pool.count() > 1 {
                    self.begin_weights(weights, Words::Coming(Beside::start("tokenizer", move || vocabulary::open(&checkpoint))?))
                } else {
                    // One thread is all that a host asked for where it asked for one.
                    let words = Words::Made(Box::new(vocabulary::open(&checkpoint)));
                    self.begin_weights(weights, words)
                }
            }
            Stage::Words(weights, mut turns) => {
                let made = turns.give(time, "tokenizer")?;
                self.progress.done_bytes = turns.done();
                match made {
                    Some(made) => self.begin_weights(weights, Words::Made(Box::new(made))),
                    None => Stage::Words(weights, turns),
                }
            }
            Stage::Weights(mut weights, words) => {
                let all = weights.step(most)?;
                self.progress.done_bytes = (weights.done + weights.under_way()).min(weights.planned());
                if all { Stage::Finish(weights, words) } else { Stage::Weights(weights, words) }
            }
            Stage::Finish(weights, words) => {
                let (done_bytes, total_bytes) = (weights.planned(), weights.planned());
                let (tokenizer, ends) = words.get()?;
                let engine = weights.finish(tokenizer, ends)?;
                self.progress = Progress { done_bytes, total_bytes, phase: "done" };
                runtime::note(Level::Info, 0, || "load: done");
                return Ok(Some(engine));
            }
            Stage::Ended => bail!(InvalidState, "the load has ended"),
        };
        Ok(None)
    }
}

impl Loader {
    /// The tokenizer's turn, where no kernels are to be loaded before.
    fn begin_vocabulary(&mut self, weights: Box<Weights>) -> Stage {
        let (phase, stage): (_, fn(_) -> _) = match weights.kernels.is_empty() {
            true => ("tokenizer", Stage::Vocabulary),
            false => ("kernels", Stage::Kernels),
        };
        self.progress = Progress { done_bytes: 0, total_bytes: 0, phase };
        stage(weights)
    }

    fn begin_weights(&mut self, weights: Box<Weights>, words: Words) -> Stage {
        self.progress = Progress { done_bytes: 0, total_bytes: weights.planned(), phase: "weights" };
        Stage::Weights(weights, words)
    }
}

impl Weights {
    fn new(prepared: Prepared, programs: Programs, options: &LoadOptions, pool: Option<Pool>, at_once: bool) -> Result<Weights> {
        let plan = prepared.plan_of(&programs, 1)?;
        preflight::check_memory(&plan, prepared.context, options.memory)?;
        if let Some(device) = &prepared.device {
            let placement = &prepared.placement;
            preflight::check_device_memory(&plan, prepared.context, options.device_bytes, device, &placement.share())?;
            if placement.is_split() {
                let (share, here, there) = (placement.share(), plan.total(), plan.device.total());
                runtime::note(Level::Info, 0, || format!("load: on the device {share}, {there} bytes there and {here} here"));
            }
        }
        let has_groups = prepared.device.as_ref().is_some_and(|device| device.may_have_groups());
        let kernels = prepared.kernel_files(&programs, has_groups)?;
        let pool = match pool {
            Some(pool) => pool,
            None => Pool::new(options.threads)?,
        };
        let supply = match options.synthetic {
            Some(synthetic) => Supply::Random(Random::new(synthetic)),
            None => Supply::Checkpoint(Arc::clone(&prepared.checkpoint)),
        };
        let weights = vec_with_capacity(prepared.declarations.weights.len(), "the list of weights")?;
        let experts = Arc::new(ExpertCache::new(prepared.expert_budget.unwrap_or(0)));
        let device = prepared.device.as_ref().map(|device| Sending::new(device, &prepared, &plan)).transpose()?;
        let bytes = prepared.region_bytes()?;
        let region = Region::new(Class::Weights, bytes, "packed weights")?;
        // Whoever loads in steps has frames to draw, which packing later would disturb.
        let late = if at_once { late::desk(&prepared, pool.count(), bytes as u64)? } else { None };
        let none = Region::new(Class::Weights, 0, "packed weights")?;
        Ok(Weights {
            prepared,
            plan,
            pool,
            supply,
            experts,
            region,
            none,
            late,
            weights,
            device,
            kernels,
            has_groups,
            programs,
            done: 0,
            making: Making::default(),
        })
    }

    /// Loads a few kernel files: one, or as many as there are threads to compile them.
    fn load_kernels(&mut self, at_once: bool) -> Result<()> {
        let Some(device) = &self.prepared.device else { return Ok(()) };
        let few = if at_once { self.pool.count() } else { 1 };
        let files = self.kernels.split_off(self.kernels.len().saturating_sub(few));
        let loaded = device.ready(&files, few);
        if loaded.is_err() && self.has_groups && !device.has_groups()? {
            // It does without: other kernels are slower, but run.
            (self.has_groups, self.kernels) = (false, self.prepared.kernel_files(&self.programs, false)?);
            return Ok(());
        }
        loaded
    }

    /// Bytes of all weights, where they go.
    fn planned(&self) -> u64 {
        match (self.device.is_some(), self.prepared.placement.is_split()) {
            (true, true) => self.plan.device.weights.saturating_add(self.plan.weights),
            (true, false) => self.plan.device.weights,
            _ => self.plan.weights,
        }
    }

    /// Bytes that are made of the next weight.
    fn under_way(&self) -> u64 {
        self.making.bytes() + self.device.as_ref().map_or(0, Sending::bytes)
    }

    /// Makes about `most` bytes more of one weight. Whether all weights are there.
    fn step(&mut self, most: usize) -> Result<bool> {
        let (prepared, index) = (&self.prepared, self.weights.len());
        let Some(spec) = prepared.declarations.weights.get(index) else { return Ok(true) };
        let layouts = &prepared.layouts[index];
        let place = prepared.placement.weights[index];
        let is_paged = prepared.pages(spec)?;
        let made = match &mut self.device {
            Some(device) if Sending::packs(spec, layouts, place) => device.step(&self.supply, (spec, layouts, place), &self.pool, most)?,
            device => {
                let region = if place.device { &self.none } else { &self.region };
                let room = Room { pool: &self.pool, region, packs_rows: place.device, late: self.late.as_ref().filter(|_| !place.device) };
                let made = match is_paged {
                    true => Some(paged::weight(&prepared.checkpoint, spec, layouts, &self.experts)?),
                    false => self.making.step(&self.supply, spec, layouts, &room, most)?,
                };
                match (made, device) {
                    (Some(weight), Some(device)) => Some((weight.bytes(), device.put(&self.supply, spec, place, weight)?)),
                    (made, _) => made.map(|weight| (weight.bytes(), weight)),
                }
            }
        };
        if let Some((bytes, weight)) = made {
            self.making = Making::default();
            self.done += if is_paged { 0 } else { bytes as u64 };
            self.weights.push(weight);
            if prepared.packs(index) && !is_paged {
                let give_back = |shares: Range<usize>, count| {
                    spec.parts().for_each(|part| prepared.checkpoint.release_part(&part.tensor, shares.clone(), count));
                };
                // What was sent by pieces was given back by pieces, where it was a tensor of its own.
                match place.device && spec.parts().all(|part| part.pick == Pick::Whole) {
                    true => give_back(0..1, 1),
                    false => {
                        let (shares, counter) = (self.pool.count(), AtomicUsize::new(0));
                        self.pool.run(&|worker| worker.each(&counter, shares, 1, |range| give_back(range, shares)))?;
                    }
                }
            }
        }
        Ok(self.weights.len() == prepared.declarations.weights.len())
    }

    fn finish(self: Box<Self>, tokenizer: Result<Arc<Tokenizer>>, end_tokens: Vec<i32>) -> Result<Arc<Engine>> {
        let Weights { prepared, plan, pool, weights, experts, programs, device, .. } = *self;
        let (device, fingerprint) = match device {
            Some(device) => {
                let (stream, weights, fingerprint) = device.finish()?;
                (Some(OnDevice { stream, weights }), OnceLock::from(fingerprint))
            }
            None => (None, OnceLock::new()),
        };
        let stream = device.as_ref().map(|device| &device.stream);
        let home = stream.map_or(Home::Host, Home::device);
        let dims = prepared.model.dims();
        let states = StatePool::at(&home, prepared.state_layout(&prepared.placement)?);
        let zero = states.zero()?;
        let Programs { blocking, steps, encoder, hidden, .. } = programs;
        let (slots, sizes) = (states.layout().slots(), (prepared.declarations.kv.len(), prepared.context));
        let runner = Mutex::new(Runner::new(blocking, [encoder, hidden], slots, stream, sizes)?);
        let stepper = Mutex::new(Stepper::new(Runner::new(steps, [None, None], slots, stream, sizes)?));
        let homes = prepared.placement.held.kv.iter().map(|on_device| if *on_device { &home } else { &Home::Host });
        let pools = prepared.declarations.kv.iter().zip(homes);
        let pools = pools.map(|(spec, home)| PagePool::at(home, spec.page_bytes(), prepared.context)).collect();
        let template = match &tokenizer {
            Ok(tokenizer) => vocabulary::template(tokenizer),
            Err(e) => Err(e.clone()),
        };
        if let Err(e) = &template {
            ensure!(e.kind() != Kind::OutOfMemory, OutOfMemory, "{e}");
        }
        let real = prepared.declarations.weights.iter().filter(|w| !matches!(w.source, Source::Constant(_)));
        let info = Info {
            model_type: prepared.model_type.clone(),
            architecture: prepared
                .checkpoint
                .config()
                .get("architectures")
                .and_then(|a| a.get(0))
                .and_then(|a| a.as_str())
                .map(str::to_string),
            parameters: real.map(WeightSpec::elements).sum(),
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
        let prefixes = Prefixes::new(prepared.options.prefix_bytes, !prepared.declarations.slots.is_empty());
        Ok(Arc::new(Engine {
            prepared,
            info,
            plan,
            weights,
            device,
            experts,
            pool,
            runner,
            waiting: AtomicUsize::new(0),
            stepper,
            alarm: Arc::default(),
            cost: Cost::default(),
            pools,
            states,
            zero,
            prefixes,
            fingerprint,
            keys: OnceLock::new(),
            tokenizer,
            template,
            grammar_vocabulary: OnceLock::new(),
        }))
    }
}
