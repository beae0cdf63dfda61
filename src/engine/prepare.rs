//! Everything that is known of a model before its weights are read: declarations, formats, circuit, sizes.

use super::layouts::{Choice, is_packed};
use super::pack;
use super::plan::{DevicePlan, Plan};
use super::preflight::{self, Class, Counts, Finding, report};
use super::runner::{ON_DEVICE, ON_HOST, Shape, Shapes};
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::available_threads;
use crate::backend::cpu::pack::{LANES, Layout, Packed};
use crate::backend::cuda::Device;
use crate::cache::{PagePool, StateLayout};
use crate::circuit::{Circuit, DeviceWeights, DeviceWorkspace, Needs, Node, Program, Tape, fuse, fuse_for_device, lower, rehearse};
use crate::ensure;
use crate::error::{Error, Kind, Result, reserve};
use crate::families::loader_for_config;
use crate::layers::{Config, RopeParameters};
use crate::model::{Build, Model};
use crate::ops::{GpuWeight, KvType, Port, Value, WeightId, part_of};
use crate::options::{Compute, KvChoice, LoadOptions};
use crate::tensor::DType;
use crate::weights::{Checkpoint, Declarations, Part, Role, Source, WeightSpec, regroup};
use std::path::Path;
use std::sync::Arc;

/// A model ready to receive weights.
pub(super) struct Prepared {
    pub checkpoint: Arc<Checkpoint>,
    pub model_type: String,
    pub model: Box<dyn Model>,
    pub declarations: Declarations,
    /// Layout of each part of each weight; empty for vectors and stored rows.
    pub layouts: Vec<Vec<Layout>>,
    /// Stems of tensors that only drafting would use.
    pub drafts: Vec<String>,
    pub compute: Compute,
    /// Longest sequence.
    pub context: usize,
    /// Most bytes of packed experts, where they stay in their file.
    pub expert_budget: Option<u64>,
    pub options: LoadOptions,
    /// The device that computes, where that is not the processor.
    pub device: Option<Arc<Device>>,
}

/// The programs of a model, made one at a time.
#[derive(Default)]
pub(super) struct Programs {
    pub blocking: Vec<(Shape, Program)>,
    pub steps: Vec<(Shape, Program)>,
    pub encoder: Option<Program>,
    pub hidden: Option<Program>,
    /// Whether the last two were looked for.
    others: bool,
}

impl Programs {
    /// Makes one more. Whether all are there.
    pub fn step(&mut self, prepared: &Prepared) -> Result<bool> {
        let Shapes { all, steps } = prepared.shapes();
        for (list, shapes) in [(&mut self.blocking, all), (&mut self.steps, steps)] {
            if let Some(&shape) = shapes.get(list.len()) {
                reserve(list, 1, "the list of programs")?;
                list.push((shape, prepared.program(shape, false, &[])?.0));
                return Ok(false);
            }
        }
        if !self.others {
            self.encoder = prepared.encoder_program(prepared.context, &[])?.map(|(program, _)| program);
            self.hidden = prepared.hidden_program()?;
            self.others = true;
        }
        Ok(true)
    }
}

/// Most layers, several times what any published model has.
const MOST_LAYERS: usize = 1024;
/// Context taken where the host names none and the model would allow more. A model whose rotary frequencies depend on the longest
/// sequence (LongRoPE) keeps those it was trained with.
const DEFAULT_CONTEXT: usize = 4096;

impl Prepared {
    /// Reads headers and config; checks every declared tensor against the checkpoint.
    pub fn new(path: &Path, options: &LoadOptions) -> Result<Prepared> {
        let checkpoint = if options.synthetic.is_some() { Checkpoint::open_config(path)? } else { Checkpoint::open(path)? };
        Self::of(checkpoint, options)
    }

    /// As `new`, of a checkpoint that is open.
    pub fn of(checkpoint: Checkpoint, options: &LoadOptions) -> Result<Prepared> {
        let (family, model_type) = loader_for_config(checkpoint.config())?;
        let config = Config::new(checkpoint.config())?;
        // Models that also see have their language model's numbers in an object of their own.
        let text = config.opt_object("text_config")?.unwrap_or(config);
        // Every layer has tensors of its own; a count beyond this is no model and would only fill memory with names.
        for key in ["num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"] {
            let layers = text.count(key)?.unwrap_or(0);
            ensure!(layers <= MOST_LAYERS, LimitExceeded, "config.json: {key} is {layers}; at most {MOST_LAYERS} are possible");
        }
        let compute = Compute::resolve(options.compute)?;
        let schedule = options.precision.resolve()?;
        let expert_budget = options.expert_budget()?.filter(|_| options.synthetic.is_none());
        let device = options.device.checked_sub(1).map(Device::open).transpose()?;
        if device.is_some() && expert_budget.is_some() {
            let text = "expert_bytes: on a device all experts are packed; none can stay in their file";
            return Err(Error::new(Kind::Unsupported, text).named("expert_bytes"));
        }
        let kv_type = kv_type(&checkpoint, compute, options)?;
        if let Some(device) = &device {
            ensure_device_has(kv_type, &device.info().name)?;
        }
        let mut declarations = Declarations::default();
        let mut build = || -> Result<(usize, Box<dyn Model>)> {
            let context = context(&text, options.context)?;
            let model = (family.build)(&config, &Build { context, kv_type, checkpoint: &checkpoint }, &mut declarations)?;
            Ok((context, model))
        };
        let built = build();
        let mut findings = Vec::new();
        if options.synthetic.is_none()
            && let Err(e) = checkpoint.check_quantisation()
        {
            findings.push(Finding::from_error(Class::Quantisation, "quantization_config", e));
        }
        let (context, model) = match built {
            Ok(built) => built,
            Err(e) => {
                let said = Finding::from_error(Class::Config, "", e.clone());
                if options.synthetic.is_none() {
                    findings.extend(preflight::refused(&checkpoint, &text, &said));
                }
                // What ended the reading is said first among what is as telling.
                findings.insert(0, said);
                return Err(report(findings).unwrap_or(e));
            }
        };
        // Rows that all heads share, or that a selection names, have no values of their own.
        if kv_type == KvType::Q8 && declarations.kv.iter().any(|spec| spec.dtype == KvType::Q8 && spec.value_dim == 0) {
            let text =
                format!("kv_type: {model_type} keeps latent, compressed or indexed rows, which are not kept in 8 bits; f16 and bf16 are");
            return Err(Error::new(Kind::Unsupported, text).named("kv_type"));
        }
        let mut drafts = Vec::new();
        let mut counts = Counts::default();
        // No tensor can be found where nothing is known of how it is stored.
        if options.synthetic.is_none() && findings.is_empty() {
            regroup(&mut declarations, &checkpoint);
            counts = Counts::take(&checkpoint, &declarations, &text);
            findings.append(&mut counts.findings);
            drafts = std::mem::take(&mut counts.drafts);
        }
        let mut layouts = Vec::with_capacity(declarations.weights.len());
        if findings.iter().all(|finding| finding.class != Class::Quantisation) {
            let choice = Choice {
                checkpoint: &checkpoint,
                config: &text,
                counts: &counts,
                compute,
                schedule: &schedule,
                options,
                root: Default::default(),
            };
            for spec in &declarations.weights {
                layouts.push(choice.layouts(spec, &mut findings));
            }
        }
        match report(findings) {
            Some(e) => Err(e),
            None if options.prefix_bytes > 0 && model.encoder().is_some() => Err(Error::new(
                Kind::Unsupported,
                "prefix_bytes: the model translates, and what it makes of a beginning depends on the source; nothing can be kept for others",
            )
            .named("prefix_bytes")),
            None => Ok(Prepared {
                checkpoint: Arc::new(checkpoint),
                model_type,
                model,
                declarations,
                layouts,
                drafts,
                compute,
                context,
                expert_budget,
                options: options.clone(),
                device,
            }),
        }
    }

    /// The circuit with formats connected, fused unless `plain`.
    pub fn circuit(&self, all_logits: bool, plain: bool) -> Result<Circuit> {
        self.finished(all_logits, plain, |tape| self.model.record(tape))
    }

    /// The encoder's circuit, where the model has one.
    pub fn encoder_circuit(&self, plain: bool) -> Result<Option<Circuit>> {
        self.model.encoder().map(|encoder| self.finished(true, plain, |tape| encoder.record(tape))).transpose()
    }

    fn finished(&self, all_logits: bool, plain: bool, record: impl FnOnce(&mut Tape<'_>) -> Value) -> Result<Circuit> {
        let mut tape = Tape::new(&self.declarations, all_logits);
        let output = record(&mut tape);
        let mut circuit = tape.finish(output)?;
        circuit.rounds = self.compute == Compute::Fast;
        lower(&mut circuit, &|id| self.needs(id));
        if !plain {
            fuse(&mut circuit);
            if self.device.is_some() {
                fuse_for_device(&mut circuit, &|id| self.is_bf16(id));
            }
        }
        Ok(circuit)
    }

    /// A program for batches of `shape`; values named in `keep` can be read after a run.
    pub fn program(&self, shape: Shape, all_logits: bool, keep: &[&str]) -> Result<(Program, Vec<Value>)> {
        compiled(self.circuit(all_logits, false)?, shape, keep)
    }

    /// A program for sources of up to `rows` tokens, where the model has an encoder.
    pub fn encoder_program(&self, rows: usize, keep: &[&str]) -> Result<Option<(Program, Vec<Value>)>> {
        self.encoder_circuit(false)?.map(|circuit| compiled(circuit, Shape { rows, sequences: 1 }, keep)).transpose()
    }

    /// A program from tokens to the last layer's output after the final norm, for every row; none where an encoder does that.
    pub fn hidden_program(&self) -> Result<Option<Program>> {
        if self.model.encoder().is_some() {
            return Ok(None);
        }
        let mut tape = Tape::new(&self.declarations, true);
        let logits = self.model.record(&mut tape);
        let mut circuit = tape.finish(logits)?;
        circuit.output = circuit.named("hidden").ok_or_else(|| Error::new(Kind::Internal, "a model that names no value \"hidden\""))?;
        // The output matrix and what follows it are recorded last.
        let hidden = circuit.root(circuit.output);
        let makes = |node: &mut Node| node.op.ports().iter().any(|(port, value)| *port == Port::Out && **value == hidden);
        let last = circuit.nodes.iter_mut().position(makes);
        circuit.nodes.truncate(last.map_or(0, |last| last + 1));
        circuit.rounds = self.compute == Compute::Fast;
        lower(&mut circuit, &|id| self.needs(id));
        fuse(&mut circuit);
        if self.device.is_some() {
            fuse_for_device(&mut circuit, &|id| self.is_bf16(id));
        }
        Ok(Some(Program::new(circuit, self.shapes().most_rows(), 1, &[])?))
    }

    fn needs(&self, id: WeightId) -> Needs {
        let layouts = &self.layouts[id.0 as usize];
        Needs { f32: layouts.iter().any(|l| !l.is_integer()), q8: layouts.iter().any(|l| l.is_integer()) }
    }

    fn is_bf16(&self, id: WeightId) -> bool {
        self.layouts[id.0 as usize].iter().all(|l| *l == Layout::Bf16)
    }

    /// Bytes that a thread's rounded copy of a product's input takes at most.
    fn rounded_bytes(&self) -> u64 {
        if self.compute == Compute::F32 || !crate::backend::cpu::table().has_pairs() {
            return 0;
        }
        let matrices = self.declarations.weights.iter().zip(&self.layouts).filter(|(_, layouts)| layouts.contains(&Layout::Bf16));
        matrices.map(|(spec, _)| spec.cols as u64).max().unwrap_or(0).saturating_mul(2 * self.shapes().most_rows() as u64)
    }

    /// Batches that programs are made for.
    pub fn shapes(&self) -> &'static Shapes {
        if self.options.device > 0 { &ON_DEVICE } else { &ON_HOST }
    }

    /// Whether a weight is packed at load: matrices, and for a device, which decodes nothing else, tables that rows are looked up in.
    pub fn packs(&self, spec: &WeightSpec) -> bool {
        is_packed(spec.role, &self.options)
    }

    /// Whether a weight's experts stay in their file.
    pub fn pages(&self, spec: &WeightSpec) -> Result<bool> {
        Ok(self.expert_budget.is_some() && pack::pageable(&self.checkpoint, spec)?)
    }

    /// Bytes of all matrices that are made at load.
    pub fn region_bytes(&self) -> Result<usize> {
        let mut sum = 0usize;
        for (spec, layouts) in self.declarations.weights.iter().zip(&self.layouts) {
            if self.packs(spec) && !self.pages(spec)? {
                for (part, layout) in spec.parts().zip(layouts) {
                    let bytes = Packed::bytes(*layout, part.rows, spec.cols).map(Region::room);
                    // More than can be is refused where it is asked for.
                    sum = sum.saturating_add(bytes.unwrap_or(usize::MAX));
                }
            }
        }
        Ok(sum)
    }

    /// Bytes by class, for `sequences` sequences of the longest context.
    pub fn plan(&self, sequences: usize) -> Result<Plan> {
        let mut programs = Programs::default();
        while !programs.step(self)? {}
        self.plan_of(&programs, sequences)
    }

    /// As `plan`, where the programs are there.
    pub fn plan_of(&self, programs: &Programs, sequences: usize) -> Result<Plan> {
        // Sizes of made-up weights follow the config alone, so sums stop at the largest number instead of passing it.
        let (mut weights, mut paged) = (0u64, 0u64);
        for (spec, layouts) in self.declarations.weights.iter().zip(&self.layouts) {
            let bytes = |(part, layout): (&Part, &Layout)| Packed::bytes(*layout, part.rows, spec.cols).map_or(u64::MAX, |n| n as u64);
            let place = if self.pages(spec)? { &mut paged } else { &mut weights };
            *place = place.saturating_add(match spec.role {
                _ if self.packs(spec) => spec.parts().zip(layouts).map(bytes).fold(0, u64::saturating_add),
                Role::Matrix | Role::Experts => 0,
                Role::Rows if self.options.synthetic.is_some() => (spec.rows as u64).saturating_mul(spec.cols as u64).saturating_mul(2),
                Role::Rows => 0,
                Role::Vector { .. } => (spec.cols as u64).saturating_mul(4),
            });
        }
        let weights = weights.saturating_add(paged.min(self.expert_budget.unwrap_or(0)));
        if let Some(device) = &self.device {
            return self.device_plan(device, programs, sequences, weights);
        }
        let pools = self.declarations.kv.iter().map(|spec| PagePool::planned(spec.page_bytes(), self.context, sequences, self.kept()));
        let kv = pools.fold(0, u64::saturating_add);
        // Blocking calls and steps each have a workspace, as large as their largest program needs.
        let bytes = |program: &Program| program.workspace_bytes() as u64;
        let most = |list: &[(Shape, Program)]| list.iter().map(|(_, program)| bytes(program)).max().unwrap_or(0);
        let tables: u64 = programs.blocking.iter().chain(&programs.steps).map(|(_, program)| program.table_bytes() as u64).sum();
        let others = programs.encoder.iter().chain(&programs.hidden).map(bytes).max().unwrap_or(0);
        let scratch = most(&programs.blocking).max(others).saturating_add(most(&programs.steps));
        // Each sequence has a committed and a spare state, and all share the one before any token.
        let layout = StateLayout::new(&self.declarations.slots, self.model.dims().vocab)?;
        let states = (sequences as u64).saturating_mul(2).saturating_add(1).saturating_mul(4);
        let rows = states.saturating_mul(self.model.dims().vocab as u64);
        Ok(Plan {
            weights,
            kv,
            state: states.saturating_mul(layout.slot_floats() as u64),
            scratch,
            other: [rows, tables, self.overhead(sequences)?].into_iter().fold(0, u64::saturating_add),
            source: self.checkpoint.held_bytes(),
            device: DevicePlan::default(),
        })
    }

    /// As `plan_of` for a device, where `weights` bytes of weights go.
    fn device_plan(&self, device: &Arc<Device>, programs: &Programs, sequences: usize, weights: u64) -> Result<Plan> {
        let specs = || self.declarations.weights.iter().zip(&self.layouts);
        let parts: usize = specs().map(|(_, layouts)| layouts.len() + 1).sum();
        let vectors: u64 = specs().filter(|(spec, _)| matches!(spec.role, Role::Vector { .. })).map(|(spec, _)| 4 * spec.cols as u64).sum();
        let whole = |(spec, layouts): (&WeightSpec, &Vec<Layout>)| {
            let bytes = |(part, layout): (&Part, &Layout)| Packed::bytes(*layout, part.rows, spec.cols).map_or(u64::MAX, |n| n as u64);
            spec.parts().zip(layouts).map(bytes).fold(0, u64::saturating_add)
        };
        let pools = self.declarations.kv.iter().map(|spec| PagePool::planned(spec.page_bytes(), self.context, sequences, self.kept()));
        let spare = self.declarations.kv.iter().map(|spec| PagePool::spare(spec.page_bytes(), self.context)).max().unwrap_or(0);
        let layout = StateLayout::new(&self.declarations.slots, self.model.dims().vocab)?;
        let states = (sequences as u64).saturating_mul(2).saturating_add(1).saturating_mul(4);
        let workspace =
            |list: &[&Program]| DeviceWorkspace::bytes(list, self.declarations.kv.len(), self.context, device.info().processors);
        let others = programs.encoder.iter().chain(&programs.hidden);
        let blocking: Vec<&Program> = programs.blocking.iter().map(|(_, program)| program).chain(others).collect();
        let steps: Vec<&Program> = programs.steps.iter().map(|(_, program)| program).collect();
        let tables: u64 = programs.blocking.iter().chain(&programs.steps).map(|(_, program)| program.table_bytes() as u64).sum();
        let rows = states.saturating_mul(self.model.dims().vocab as u64);
        Ok(Plan {
            // A weight is packed here before it goes.
            weights: vectors.saturating_add(specs().map(whole).max().unwrap_or(0)),
            kv: 0,
            state: 0,
            scratch: DeviceWeights::STAGING as u64,
            other: [rows, tables, self.overhead(sequences)?].into_iter().fold(0, u64::saturating_add),
            source: self.checkpoint.held_bytes(),
            device: DevicePlan {
                weights: weights.saturating_add(ROOM * parts as u64),
                kv: pools.fold(spare, u64::saturating_add),
                state: states.saturating_mul(layout.floats() as u64),
                scratch: (workspace(&blocking) as u64).saturating_add(workspace(&steps) as u64),
            },
        })
    }

    /// Pages of what is kept for later prompts, as if all of it were pages.
    fn kept(&self) -> usize {
        let set = self.declarations.kv.iter().map(|spec| spec.page_bytes()).fold(0, usize::saturating_add).max(1);
        usize::try_from(self.options.prefix_bytes).unwrap_or(usize::MAX) / set
    }

    /// How the weights will be described to operations that are launched, at no address.
    pub fn outlines(&self) -> Vec<GpuWeight> {
        let outline = |(spec, layouts): (&WeightSpec, &Vec<Layout>)| {
            if !self.packs(spec) {
                return GpuWeight::Vector { data: 0, len: spec.cols };
            }
            let mut layouts = layouts.iter();
            let mut parts = |parts: &[Part]| {
                let mut first = 0;
                let describe = |(part, layout): (&Part, &Layout)| {
                    let panel = Packed::bytes(*layout, part.rows, spec.cols).unwrap_or(0) / part.rows.div_ceil(LANES).max(1);
                    first += part.rows;
                    part_of(*layout, part.rows, spec.cols, panel, first - part.rows, 0)
                };
                parts.iter().zip(layouts.by_ref()).map(describe).collect::<Vec<_>>()
            };
            match &spec.source {
                Source::Experts(experts) => GpuWeight::Experts { parts: experts.iter().map(|own| parts(own)).collect(), table: 0 },
                Source::Tensors(list) => GpuWeight::Matrix(parts(list)),
                Source::Constant(values) => GpuWeight::Vector { data: 0, len: values.len() },
            }
        };
        self.declarations.weights.iter().zip(&self.layouts).map(outline).collect()
    }

    /// Whether the device has code for every operation of the programs.
    pub fn check_kernels(&self, programs: &Programs) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let weights = self.outlines();
        let layout = StateLayout::new(&self.declarations.slots, self.model.dims().vocab)?;
        let listed = programs.blocking.iter().chain(&programs.steps).map(|(_, program)| program);
        for program in listed.chain(&programs.encoder).chain(&programs.hidden) {
            rehearse(program, &weights, self.declarations.kv.len(), layout.slots(), device.info().processors)?;
        }
        Ok(())
    }

    /// What is not made of buffers whose size is known: the tokenizer, names, lists of pages, stacks. Estimates, from
    /// vocabularies of 512 to 262,144 tokens; tests hold them against the kernel's counters.
    fn overhead(&self, sequences: usize) -> Result<u64> {
        let tokenizer = match (self.checkpoint.gguf(), self.checkpoint.beside()) {
            (Some(gguf), _) => {
                let each = if gguf.value("tokenizer.ggml.scores").is_some() { SCORED_TOKEN } else { TOKEN };
                gguf.strings("tokenizer.ggml.tokens")?.map_or(0, |tokens| tokens.count() as u64 * each)
            }
            (None, Some(files)) => match files.size("tokenizer.json") {
                0 => 0,
                size => (self.model.dims().vocab as u64 * JSON_TOKEN).max(size.saturating_mul(JSON_TENTHS) / 10),
            },
            (None, None) => 0,
        };
        let pages = self.declarations.kv.len() as u64 * self.context.div_ceil(crate::ops::PAGE) as u64;
        let sequence = pages.saturating_mul(PAGE_ENTRY).saturating_add(4 * self.context as u64 + SEQUENCE);
        let threads = if self.options.threads == 0 { available_threads() } else { self.options.threads };
        let own = LIBRARY + threads as u64 * (THREAD + self.rounded_bytes()) + self.declarations.weights.len() as u64 * NAMES;
        Ok([tokenizer, sequence.saturating_mul(sequences as u64), own].into_iter().fold(0, u64::saturating_add))
    }
}

/// What lies between a weight on a device and the next at most, with a part's place in a table of experts.
const ROOM: u64 = 320;
/// Bytes of a token: its text, its merge, their places in tables, and what building those leaves behind.
const TOKEN: u64 = 84;
/// Where merges follow from scores.
const SCORED_TOKEN: u64 = 64;
/// Where a `tokenizer.json` is read, which passes through maps of strings.
const JSON_TOKEN: u64 = 216;
/// Tenths of a byte for each of `tokenizer.json`, which writes some vocabularies at greater length.
const JSON_TENTHS: u64 = 58;
/// Of a page: its count and its places in two lists.
const PAGE_ENTRY: u64 = 72;
/// Of a sequence besides.
const SEQUENCE: u64 = 2048;
/// Of a weight: its name and description.
const NAMES: u64 = 1024;
/// Of a thread: what it touches of its stack, and its buffers.
const THREAD: u64 = 48 << 10;
/// Of everything else.
const LIBRARY: u64 = 512 << 10;

/// What keys and values are kept in.
fn kv_type(checkpoint: &Checkpoint, compute: Compute, options: &LoadOptions) -> Result<KvType> {
    Ok(match KvChoice::resolve(options.kv_type)? {
        KvChoice::F32 => KvType::F32,
        KvChoice::F16 => KvType::F16,
        KvChoice::Bf16 => KvType::Bf16,
        KvChoice::Q8 => KvType::Q8,
        KvChoice::Auto => {
            // A checkpoint stored in f32 gets a cache of the same precision.
            let stored = checkpoint.describe().by_dtype.first().map(|(dtype, _)| *dtype);
            let exact = compute == Compute::F32 || stored == Some(DType::F32) && options.synthetic.is_none();
            if exact { KvType::F32 } else { KvType::F16 }
        }
    })
}

/// Refuses what a device has no kernels for.
fn ensure_device_has(kv_type: KvType, device: &str) -> Result<()> {
    let asked = match kv_type {
        KvType::F32 | KvType::F16 => return Ok(()),
        KvType::Bf16 => "bf16",
        KvType::Q8 => "q8",
    };
    let text = format!("kv_type: {device} keeps keys and values in f16 or f32, not in {asked}");
    Err(Error::new(Kind::Unsupported, text).named("kv_type"))
}

/// A program for batches of `shape`, and the values of those names, which can be read after a run.
pub(super) fn compiled(circuit: Circuit, shape: Shape, keep: &[&str]) -> Result<(Program, Vec<Value>)> {
    let mut values = Vec::with_capacity(keep.len());
    for name in keep {
        let found = circuit
            .named(name)
            .ok_or_else(|| Error::new(Kind::NotFound, format!("no tensor is named {name:?} in this circuit")).named(*name))?;
        values.push(found);
    }
    Ok((Program::new(circuit, shape.rows, shape.sequences, &values)?, values))
}

/// The longest sequence: what the host asks for, within what the model allows.
fn context(text: &Config<'_>, asked: usize) -> Result<usize> {
    let longest = text.usize_or("max_position_embeddings", text.usize_or("model_max_length", 2048)?)?;
    let context = if asked == 0 { longest.min(DEFAULT_CONTEXT).min(RopeParameters::trained(text)?) } else { asked };
    ensure!(
        context <= longest,
        LimitExceeded,
        "a context of {context} tokens was asked for; the model's limit is {longest} (max_position_embeddings)"
    );
    Ok(context)
}
