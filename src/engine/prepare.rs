//! Everything that is known of a model before its weights are read: declarations, formats, circuit, sizes.

use super::pack;
use super::plan::Plan;
use super::runner::Shape;
use crate::cache::{PagePool, StateLayout};
use crate::circuit::{Circuit, Needs, Program, Tape, fuse, lower};
use crate::error::{Error, Kind, Result};
use crate::families::loader_for_config;
use crate::layers::{Config, RopeParameters};
use crate::model::{Build, Model};
use crate::ops::{KvType, Value, WeightId};
use crate::options::{Compute, LoadOptions};
use crate::tensor::DType;
use crate::weights::{Checkpoint, CodeForm, Declarations, Form, Part, Pick, Role, Source, WeightSpec, regroup};
use crate::{bail, ensure};
use crate::backend::cpu::pack::{Layout, Packed};
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
    pub compute: Compute,
    /// Longest sequence.
    pub context: usize,
    /// Most bytes of packed experts, where they stay in their file.
    pub expert_budget: Option<u64>,
    pub options: LoadOptions,
}

/// Context taken where the host names none and the model would allow more. A model whose rotary frequencies depend on the longest
/// sequence (LongRoPE) keeps those it was trained with.
const DEFAULT_CONTEXT: usize = 4096;

impl Prepared {
    /// Reads headers and config; checks every declared tensor against the checkpoint.
    pub fn new(path: &Path, options: &LoadOptions) -> Result<Prepared> {
        let checkpoint = if options.synthetic.is_some() { Checkpoint::open_config(path)? } else { Checkpoint::open(path)? };
        let (family, model_type) = loader_for_config(checkpoint.config())?;
        let config = Config::new(checkpoint.config())?;
        // Models that also see have their language model's numbers in an object of their own.
        let text = config.opt_object("text_config")?.unwrap_or(config);
        let longest = text.usize_or("max_position_embeddings", text.usize_or("model_max_length", 2048)?)?;
        let context = if options.context == 0 { longest.min(DEFAULT_CONTEXT).min(RopeParameters::trained(&config)?) } else { options.context };
        ensure!(
            context <= longest,
            LimitExceeded,
            "a context of {context} tokens was asked for; the model's limit is {longest} (max_position_embeddings)"
        );
        let compute = Compute::resolve(options.compute)?;
        let expert_budget = options.expert_budget()?.filter(|_| options.synthetic.is_none());
        // A checkpoint stored in f32 gets a cache of the same precision.
        let stored = checkpoint.describe().by_dtype.first().map(|(dtype, _)| *dtype);
        let exact = compute == Compute::F32 || stored == Some(DType::F32) && options.synthetic.is_none();
        let kv_type = if exact { KvType::F32 } else { KvType::F16 };
        let mut declarations = Declarations::default();
        let model = (family.build)(&config, &Build { context, kv_type, checkpoint: &checkpoint }, &mut declarations)?;
        if options.synthetic.is_none() {
            checkpoint.check_quantisation()?;
            regroup(&mut declarations, &checkpoint);
        }
        let mut findings = Vec::new();
        let mut layouts = Vec::with_capacity(declarations.weights.len());
        for spec in &declarations.weights {
            match part_layouts(&checkpoint, spec, compute, options) {
                Ok(layout) => layouts.push(layout),
                Err(e) => {
                    findings.push(e);
                    layouts.push(Vec::new());
                }
            }
        }
        if let Some(first) = findings.first().cloned() {
            return Err(match findings.len() {
                1 => first,
                n => {
                    let rest: Vec<&str> = findings[1..].iter().take(9).map(Error::message).collect();
                    let more = if n > 10 { format!("; and {} more", n - 10) } else { String::new() };
                    Error::new(first.kind(), format!("{} findings: {}; {}{more}", n, first.message(), rest.join("; "))).named(first.name().unwrap_or(""))
                }
            });
        }
        let checkpoint = Arc::new(checkpoint);
        Ok(Prepared { checkpoint, model_type, model, declarations, layouts, compute, context, expert_budget, options: options.clone() })
    }

    /// The circuit with formats connected, fused unless `plain`.
    pub fn circuit(&self, all_logits: bool, plain: bool) -> Result<Circuit> {
        let mut tape = Tape::new(&self.declarations, all_logits);
        let output = self.model.record(&mut tape);
        let mut circuit = tape.finish(output)?;
        lower(&mut circuit, &|id| self.needs(id));
        if !plain {
            fuse(&mut circuit);
        }
        Ok(circuit)
    }

    /// A program for batches of `shape`; values named in `keep` can be read after a run.
    pub fn program(&self, shape: Shape, all_logits: bool, keep: &[&str]) -> Result<(Program, Vec<Value>)> {
        let circuit = self.circuit(all_logits, false)?;
        let mut values = Vec::with_capacity(keep.len());
        for name in keep {
            let found = circuit.named(name).ok_or_else(|| Error::new(Kind::NotFound, format!("no tensor is named {name:?} in this circuit")).named(*name))?;
            values.push(found);
        }
        Ok((Program::new(circuit, shape.rows, shape.sequences, &values)?, values))
    }

    fn needs(&self, id: WeightId) -> Needs {
        let layouts = &self.layouts[id.0 as usize];
        Needs { f32: layouts.iter().any(|l| !l.is_integer()), q8: layouts.iter().any(|l| l.is_integer()) }
    }

    /// Whether a weight's experts stay in their file.
    pub fn pages(&self, spec: &WeightSpec) -> Result<bool> {
        Ok(self.expert_budget.is_some() && pack::pageable(&self.checkpoint, spec)?)
    }

    /// Bytes by class, for `sequences` sequences of the longest context.
    pub fn plan(&self, sequences: usize) -> Result<Plan> {
        let (mut weights, mut paged) = (0u64, 0u64);
        for (spec, layouts) in self.declarations.weights.iter().zip(&self.layouts) {
            let place = if self.pages(spec)? { &mut paged } else { &mut weights };
            *place += match spec.role {
                Role::Matrix | Role::Experts => {
                    let bytes = |(part, layout): (&Part, &Layout)| Packed::bytes(*layout, part.rows, spec.cols).unwrap_or(0) as u64;
                    spec.parts().zip(layouts).map(bytes).sum()
                }
                Role::Rows => if self.options.synthetic.is_some() { (spec.rows * spec.cols * 2) as u64 } else { 0 },
                Role::Vector { .. } => (spec.cols * 4) as u64,
            };
        }
        weights += paged.min(self.expert_budget.unwrap_or(0));
        let kv = self.declarations.kv.iter().map(|spec| PagePool::planned(spec.page_bytes(), self.context, sequences)).sum();
        // Blocking calls and steps each have a workspace, as large as their largest program needs.
        let bytes = |shape: Shape| -> Result<u64> { Ok(self.program(shape, false, &[])?.0.workspace_bytes() as u64) };
        let small = bytes(Shape::ALL[0])?.max(bytes(Shape::ALL[1])?);
        let scratch = bytes(Shape::ALL[2])?.max(small) + bytes(Shape::STEPS[2])?.max(small);
        // Each sequence has a committed and a spare state, and all share the one before any token.
        let layout = StateLayout::new(&self.declarations.slots, self.model.dims().vocab)?;
        let states = (2 * sequences as u64 + 1) * 4;
        let state = states * layout.slot_floats() as u64;
        Ok(Plan { weights, kv, state, scratch, other: states * self.model.dims().vocab as u64 })
    }
}

/// The layout of each part of a weight, after checking that the checkpoint holds it in the declared shape.
fn part_layouts(checkpoint: &Checkpoint, spec: &WeightSpec, compute: Compute, options: &LoadOptions) -> Result<Vec<Layout>> {
    if let Source::Experts(experts) = &spec.source {
        for (index, parts) in experts.iter().enumerate() {
            let rows: usize = parts.iter().map(|p| p.rows).sum();
            ensure!(rows == spec.rows, Internal, "{}: expert {index} has {rows} rows, expert 0 has {}", spec.name, spec.rows);
        }
    }
    let mut layouts = Vec::new();
    for part in spec.parts() {
        let cols = if matches!(spec.role, Role::Vector { .. }) { 1 } else { spec.cols };
        let (form, pick) = match options.synthetic {
            Some(synthetic) => (Form::Plain(synthetic.dtype), part.pick),
            None => {
                let stored = checkpoint.stored(&part.tensor)?.ok_or_else(|| {
                    Error::new(Kind::CorruptFile, format!("the checkpoint has no tensor {}, which the config asks for", part.tensor)).named(&part.tensor)
                })?;
                let part = pack::oriented(part, &stored);
                let wanted = part.shape(cols)?;
                if squeezed(&stored.shape) != squeezed(&wanted) {
                    let text = format!("{}: the checkpoint holds {:?}, the config asks for {:?}", part.tensor, stored.shape, squeezed(&wanted));
                    return Err(Error::new(Kind::Mismatch, text).named(&part.tensor));
                }
                (stored.form(), part.pick)
            }
        };
        match spec.role {
            Role::Matrix | Role::Experts => {
                let mut layout = layout_for(form, spec.cols, compute).map_err(|e| e.context(&part.tensor).named(&part.tensor))?;
                if matches!(pick, Pick::Transposed { .. }) && layout.is_integer() {
                    // Scales run along stored rows, which a transposed part crosses.
                    layout = Layout::Bf16;
                }
                if Packed::bytes(layout, part.rows, spec.cols).is_none() {
                    bail!(TooLarge, "{}: [{}, {}] does not fit {layout:?}", part.tensor, part.rows, spec.cols);
                }
                layouts.push(layout);
            }
            _ => {
                if let Form::Plain(dtype) = form
                    && crate::quant::format(dtype).is_none()
                {
                    bail!(Unsupported, "{}: element type {dtype} is not decoded by this build", part.tensor);
                }
            }
        }
    }
    Ok(layouts)
}

/// A shape without its dimensions of 1, which change nothing about where elements lie.
fn squeezed(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// How a matrix is packed. Types that are exact f32, BF16 or F16 stay what they are. The exact mode decodes everything else to
/// f32; the fast mode keeps integer codes as they are, and numbers without any (FP8 with its scales) become BF16, which holds
/// every FP8 value, so that only the scale's last bits are rounded, and none where scales are powers of two.
pub(super) fn layout_for(form: Form, cols: usize, compute: Compute) -> Result<Layout> {
    let exact = compute == Compute::F32;
    let dtype = match form {
        Form::Plain(dtype) => dtype,
        Form::Real | Form::Codes(_) if exact => return Ok(Layout::F32),
        Form::Real => return Ok(Layout::Bf16),
        Form::Codes(CodeForm { block, table: Some(table), .. }) => return Ok(Layout::I4Table { block, table }),
        Form::Codes(CodeForm { bits: 4, block, min, .. }) => return Ok(Layout::I4 { block, min }),
        Form::Codes(CodeForm { block, min, .. }) => return Ok(Layout::I8 { block, min }),
    };
    match dtype {
        DType::BF16 => return Ok(Layout::Bf16),
        DType::F16 => return Ok(Layout::F16),
        DType::F32 | DType::F64 => return Ok(Layout::F32),
        // Without scales, where the config says that the module is not quantised.
        DType::F8E4M3 | DType::F8E5M2 => return Ok(Layout::Bf16),
        _ => {}
    }
    let Some(format) = crate::quant::format(dtype).filter(|f| f.unpack.is_some()) else {
        bail!(Unsupported, "element type {dtype} is not multiplied by this build");
    };
    if exact || !cols.is_multiple_of(32) {
        return Ok(Layout::F32);
    }
    let min = matches!(dtype, DType::Q4_1 | DType::Q5_1 | DType::Q2K | DType::Q4K | DType::Q5K);
    let block = format.sub_len;
    if let Some(table) = crate::quant::table(dtype) {
        return Ok(Layout::I4Table { block, table });
    }
    Ok(match format.codes {
        (0..=15, 0..=15) if min => Layout::I4 { block, min },
        (-8..=7, -8..=7) if !min => Layout::I4 { block, min },
        _ => Layout::I8 { block, min },
    })
}
