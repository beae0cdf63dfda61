//! Everything that is known of a model before its weights are read: declarations, formats, circuit, sizes.

use super::layouts::Choice;
use super::paged;
use super::placement::Placement;
use super::preflight::{self, Class, Counts, Finding, report};
use super::runner::{ON_BOTH, ON_DEVICE, ON_HOST, Shape, Shapes};
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::pack::{LANES, Layout, Packed};
use crate::backend::cuda::Device;
use crate::circuit::{Circuit, Needs, Node, Parts, Rehearsal, Segments, Tape, cut, fuse, fuse_for_device, lower, set_aside, split};
use crate::ensure;
use crate::error::{Error, Kind, Result, reserve};
use crate::families::loader_for_config;
use crate::layers::{Config, RopeParameters};
use crate::model::{Build, Model};
use crate::ops::{GpuWeight, KvType, Port, Value, WeightId, part_of, takes_prepared};
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
    /// What runs there, and what here.
    pub placement: Placement,
}

/// The programs of a model, made one at a time.
#[derive(Default)]
pub(super) struct Programs {
    pub blocking: Vec<(Shape, Segments)>,
    pub steps: Vec<(Shape, Segments)>,
    pub encoder: Option<Segments>,
    pub hidden: Option<Segments>,
    /// Whether the last two were looked for.
    others: bool,
}

impl Programs {
    /// Makes one more. Whether all are there, for a placement that fits.
    pub fn step(&mut self, prepared: &mut Prepared) -> Result<bool> {
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
        let settled = prepared.settle(self)?;
        if !settled {
            *self = Programs::default();
        }
        Ok(settled)
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
        let mut options = options.clone();
        if device.is_some() && expert_budget.is_some() {
            // What comes out of the file while the model runs is the processor's.
            options.host_experts = usize::MAX;
        }
        let kv_type = kv_type(&checkpoint, compute, &options)?;
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
                options: &options,
                root: Default::default(),
            };
            for spec in &declarations.weights {
                layouts.push(choice.layouts(spec, &mut findings));
            }
        }
        if let Some(e) = report(findings) {
            return Err(e);
        }
        if options.prefix_bytes > 0 && model.encoder().is_some() {
            let text = "prefix_bytes: the model translates, and what it makes of a beginning depends on the source; nothing can be kept for others";
            return Err(Error::new(Kind::Unsupported, text).named("prefix_bytes"));
        }
        let placement = Placement::whole(&declarations, device.is_some(), model.dims().layers);
        let mut prepared = Prepared {
            checkpoint: Arc::new(checkpoint),
            model_type,
            model,
            declarations,
            layouts,
            drafts,
            compute,
            context,
            expert_budget,
            options,
            device,
            placement,
        };
        prepared.place_asked()?;
        Ok(prepared)
    }

    /// The circuit as a whole, with formats connected and nothing fused.
    pub fn circuit(&self, all_logits: bool) -> Result<Circuit> {
        let mut circuit = self.record(all_logits, |tape| self.model.record(tape))?;
        lower(&mut circuit, &|id| self.needs(id));
        Ok(circuit)
    }

    /// The circuit's parts with formats connected, fused unless `plain`.
    pub fn parts(&self, all_logits: bool, plain: bool) -> Result<Parts<Circuit>> {
        self.finished(self.record(all_logits, |tape| self.model.record(tape))?, self.placement.cut, plain)
    }

    /// The parts of the encoder's circuit, where the model has one.
    pub fn encoder_parts(&self, plain: bool) -> Result<Option<Parts<Circuit>>> {
        // Of a model that is split the encoder stays here, but for what later layers read of it.
        let cut = if self.placement.is_cut() { usize::MAX } else { self.placement.cut };
        self.encoder_circuit()?.map(|circuit| self.finished(circuit, cut, plain)).transpose()
    }

    /// The circuits as the model records them: from tokens to logits, and of its encoder.
    pub fn recorded(&self) -> Result<(Circuit, Option<Circuit>)> {
        Ok((self.record(false, |tape| self.model.record(tape))?, self.encoder_circuit()?))
    }

    fn encoder_circuit(&self) -> Result<Option<Circuit>> {
        self.model.encoder().map(|encoder| self.record(true, |tape| encoder.record(tape))).transpose()
    }

    fn record(&self, all_logits: bool, record: impl FnOnce(&mut Tape<'_>) -> Value) -> Result<Circuit> {
        let mut tape = Tape::new(&self.declarations, all_logits);
        let output = record(&mut tape);
        let mut circuit = tape.finish(output)?;
        circuit.rounds = self.compute == Compute::Fast;
        circuit.fixed_order = self.options.deterministic;
        Ok(circuit)
    }

    fn finished(&self, circuit: Circuit, stage: usize, plain: bool) -> Result<Parts<Circuit>> {
        let mut parts = cut(circuit, stage, &self.placement.held);
        if let (Some(device), true) = (&mut parts.device, self.placement.host_experts > 0) {
            parts.asides = set_aside(device, |node| self.placement.stays(node));
        }
        parts.map(|mut circuit, on_device| {
            lower(&mut circuit, &|id| self.needs(id));
            if !plain {
                fuse(&mut circuit);
                if on_device {
                    fuse_for_device(&mut circuit, &|id| self.takes_words(id));
                }
            }
            if !on_device {
                split(&mut circuit);
            }
            Ok(circuit)
        })
    }

    /// A program for batches of `shape`; values named in `keep` can be read after a run.
    pub fn program(&self, shape: Shape, all_logits: bool, keep: &[&str]) -> Result<(Segments, Vec<Value>)> {
        compiled(self.parts(all_logits, false)?, shape, keep)
    }

    /// A program for sources of up to `rows` tokens, where the model has an encoder.
    pub fn encoder_program(&self, rows: usize, keep: &[&str]) -> Result<Option<(Segments, Vec<Value>)>> {
        self.encoder_parts(false)?.map(|parts| compiled(parts, Shape { rows, sequences: 1 }, keep)).transpose()
    }

    /// A program from tokens to the last layer's output after the final norm, for every row; none where an encoder does that.
    pub fn hidden_program(&self) -> Result<Option<Segments>> {
        if self.model.encoder().is_some() {
            return Ok(None);
        }
        let mut circuit = self.record(true, |tape| self.model.record(tape))?;
        circuit.output = circuit.named("hidden").ok_or_else(|| Error::new(Kind::Internal, "a model that names no value \"hidden\""))?;
        // The output matrix and what follows it are recorded last.
        let hidden = circuit.root(circuit.output);
        let makes = |node: &mut Node| node.op.ports().iter().any(|(port, value)| *port == Port::Out && **value == hidden);
        let last = circuit.nodes.iter_mut().position(makes);
        circuit.nodes.truncate(last.map_or(0, |last| last + 1));
        let parts = self.finished(circuit, self.placement.cut, false)?;
        Ok(Some(Segments::new(parts, self.shapes().most_rows(), 1, &[])?))
    }

    fn needs(&self, id: WeightId) -> Needs {
        let layouts = &self.layouts[id.0 as usize];
        Needs { f32: layouts.iter().any(|l| !l.is_integer()), q8: layouts.iter().any(|l| l.is_integer()) }
    }

    fn takes_words(&self, id: WeightId) -> bool {
        let index = id.0 as usize;
        self.layouts[index].iter().all(|layout| takes_prepared(*layout, self.declarations.weights[index].cols))
    }

    /// Bytes that a thread's rounded copy of a product's input takes at most.
    pub fn rounded_bytes(&self) -> u64 {
        if self.compute == Compute::F32 || !crate::backend::cpu::table().has_pairs() {
            return 0;
        }
        let meets = |layouts: &Vec<Layout>| layouts.iter().any(|layout| matches!(layout, Layout::Bf16 | Layout::F8));
        let matrices = self.declarations.weights.iter().zip(&self.layouts).filter(|(_, layouts)| meets(layouts));
        matrices.map(|(spec, _)| spec.cols as u64).max().unwrap_or(0).saturating_mul(2 * self.shapes().most_rows() as u64)
    }

    /// Batches that programs are made for.
    pub fn shapes(&self) -> &'static Shapes {
        match (self.device.is_some(), self.placement.is_split()) {
            (true, true) => &ON_BOTH,
            (true, false) => &ON_DEVICE,
            _ => &ON_HOST,
        }
    }

    /// Whether a weight is packed at load: matrices, and for a device, which decodes nothing else, tables that rows are looked up in.
    pub fn packs(&self, index: usize) -> bool {
        let (role, place) = (self.declarations.weights[index].role, self.placement.weights[index]);
        matches!(role, Role::Matrix | Role::Experts) || role == Role::Rows && place.device
    }

    /// Whether a weight's experts stay in their file.
    pub fn pages(&self, spec: &WeightSpec) -> Result<bool> {
        Ok(self.expert_budget.is_some() && paged::pageable(&self.checkpoint, spec)?)
    }

    /// Bytes of all matrices that are made at load to stay here.
    pub fn region_bytes(&self) -> Result<usize> {
        let mut sum = 0usize;
        for (index, (spec, layouts)) in self.declarations.weights.iter().zip(&self.layouts).enumerate() {
            if self.packs(index) && !self.placement.weights[index].device && !self.pages(spec)? {
                for (part, layout) in spec.parts().zip(layouts) {
                    let bytes = Packed::bytes(*layout, part.rows, spec.cols).map(Region::room);
                    // More than can be is refused where it is asked for.
                    sum = sum.saturating_add(bytes.unwrap_or(usize::MAX));
                }
            }
        }
        Ok(sum)
    }

    /// How the weights will be described to operations that are launched, at no address.
    pub fn outlines(&self) -> Vec<GpuWeight> {
        let outline = |(index, (spec, layouts)): (usize, (&WeightSpec, &Vec<Layout>))| {
            if !self.packs(index) || !self.placement.weights[index].device {
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
        self.declarations.weights.iter().zip(&self.layouts).enumerate().map(outline).collect()
    }

    /// Files of the kernels that the programs launch, on a device with products of groups of warps or one without; whether every operation has some.
    pub fn kernel_files(&self, programs: &Programs, has_groups: bool) -> Result<Vec<&'static str>> {
        let Some(device) = &self.device else { return Ok(Vec::new()) };
        let weights = self.outlines();
        let layout = self.state_layout(&self.placement)?;
        let listed = programs.blocking.iter().chain(&programs.steps).map(|(_, program)| program);
        let listed = listed.chain(&programs.encoder).chain(&programs.hidden);
        let rehearsal = Rehearsal::new(device.info().processors, has_groups);
        for program in listed.filter_map(|program| program.both().1) {
            rehearsal.run(program, &weights, self.declarations.kv.len(), layout.slots())?;
        }
        Ok(rehearsal.files())
    }
}

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
pub(super) fn compiled(parts: Parts<Circuit>, shape: Shape, keep: &[&str]) -> Result<(Segments, Vec<Value>)> {
    let mut values = Vec::with_capacity(keep.len());
    for name in keep {
        let found = parts
            .named(name)
            .ok_or_else(|| Error::new(Kind::NotFound, format!("no tensor is named {name:?} in this circuit")).named(*name))?;
        values.push(found);
    }
    Ok((Segments::new(parts, shape.rows, shape.sequences, &values)?, values))
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
