//! Which layout each part of a weight is packed in, after checking that the checkpoint holds it in the declared shape.

use super::preflight::{self, Class, Counts, Finding};
use super::{pack, precision};
use crate::backend::cpu::pack::{Layout, Packed};
use crate::bail;
use crate::error::{Kind, Result};
use crate::layers::Config;
use crate::options::{Compute, LoadOptions, Precision};
use crate::tensor::DType;
use crate::weights::{Checkpoint, CodeForm, Form, Part, Pick, Role, Source, WeightSpec};
use std::cell::OnceCell;

/// What the choice of layouts looks at.
pub(super) struct Choice<'a> {
    pub checkpoint: &'a Checkpoint,
    pub config: &'a Config<'a>,
    pub counts: &'a Counts,
    pub compute: Compute,
    pub schedule: &'a Precision,
    pub options: &'a LoadOptions,
    /// Where the first missing tensor is instead; looked for once.
    pub root: OnceCell<Option<&'a str>>,
}

impl Choice<'_> {
    /// The layout of each part of a weight, after checking that the checkpoint holds it in the declared shape.
    pub fn layouts(&self, spec: &WeightSpec, findings: &mut Vec<Finding>) -> Vec<Layout> {
        let mut layouts = Vec::new();
        if let Source::Experts(experts) = &spec.source {
            for (index, parts) in experts.iter().enumerate() {
                let rows: usize = parts.iter().map(|p| p.rows).sum();
                if rows != spec.rows {
                    let text = format!("{}: expert {index} has {rows} rows, expert 0 has {}", spec.name, spec.rows);
                    findings.push(Finding::new(Class::Tensor, Kind::Internal, &spec.name, text));
                    return layouts;
                }
            }
        }
        for part in spec.parts() {
            match self
                .checked(spec, part)
                .and_then(|(form, pick)| self.layout(spec, part, form, pick).map_err(|e| preflight::unusable(part, e)))
            {
                Ok(layout) => layouts.extend(layout),
                Err(finding) if finding.class == Class::Missing && self.counts.covers(&part.tensor) => {}
                Err(finding) => findings.push(finding),
            }
        }
        layouts
    }

    /// How a part is stored, and which of its rows it takes, after comparing shapes.
    fn checked(&self, spec: &WeightSpec, part: &Part) -> Result<(Form, Pick), Finding> {
        if let Some(synthetic) = self.options.synthetic {
            return Ok((Form::Plain(synthetic.dtype_of(&part.tensor)), part.pick));
        }
        let cols = if matches!(spec.role, Role::Vector { .. }) { 1 } else { spec.cols };
        let found = self.checkpoint.stored(&part.tensor).map_err(|e| preflight::unusable(part, e))?;
        let stored = found.ok_or_else(|| {
            let root = self.root.get_or_init(|| preflight::other_root(self.checkpoint, &part.tensor));
            preflight::missing(self.config, &part.tensor, *root)
        })?;
        let oriented = pack::oriented(part, &stored);
        let wanted = oriented.shape(cols).map_err(|e| preflight::unusable(part, e))?;
        if squeezed(&stored.shape) != squeezed(&wanted) {
            return Err(preflight::misshapen(self.config, part, &squeezed(&stored.shape), &squeezed(&wanted)));
        }
        Ok((stored.form(), oriented.pick))
    }

    /// The layout of a matrix; nothing for what is not multiplied.
    fn layout(&self, spec: &WeightSpec, part: &Part, form: Form, pick: Pick) -> Result<Option<Layout>> {
        if !is_packed(spec.role, self.options) {
            if let Form::Plain(dtype) = form
                && crate::quant::format(dtype).is_none()
            {
                bail!(Unsupported, "{}: element type {dtype} is not decoded by this build", part.tensor);
            }
            return Ok(None);
        }
        // Whole numbers are looked up, not multiplied, and are to stay what they are.
        if spec.role == Role::Rows
            && let Form::Plain(dtype) = form
            && crate::quant::format(dtype).is_some()
            && layout_for(form, spec.cols, self.compute).is_err()
        {
            return Ok(Some(Layout::F32));
        }
        let mut own = layout_for(form, spec.cols, self.compute).map_err(|e| e.context(&part.tensor).named(&part.tensor))?;
        if matches!(pick, Pick::Transposed { .. }) && (own.is_integer() || own == Layout::F8) {
            // Scales run along stored rows, which a transposed part crosses.
            own = Layout::Bf16;
        }
        let layout = match self.options.synthetic {
            Some(_) => own,
            None => precision::layout(self.schedule, &part.tensor, own, spec.cols)?,
        };
        if Packed::bytes(layout, part.rows, spec.cols).is_none() {
            bail!(TooLarge, "{}: [{}, {}] does not fit {layout:?}", part.tensor, part.rows, spec.cols);
        }
        Ok(Some(layout))
    }
}

fn is_packed(role: Role, options: &LoadOptions) -> bool {
    matches!(role, Role::Matrix | Role::Experts) || role == Role::Rows && options.device > 0
}

/// A shape without its dimensions of 1, which change nothing about where elements lie.
fn squeezed(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// How a matrix is packed. Types that are exact f32, BF16 or F16 stay what they are. The exact mode decodes everything else to
/// f32; the fast mode keeps integer codes and E4M3 with scales for runs of 128 or more as they are. Other FP8 becomes BF16, which holds
/// every FP8 value, so that only the scale's last bits are rounded, and none where scales are powers of two.
pub(super) fn layout_for(form: Form, cols: usize, compute: Compute) -> Result<Layout> {
    let exact = compute == Compute::F32;
    let dtype = match form {
        Form::Plain(dtype) => dtype,
        Form::Real | Form::F8 | Form::Codes(_) if exact => return Ok(Layout::F32),
        Form::Real => return Ok(Layout::Bf16),
        Form::F8 => return Ok(Layout::F8),
        Form::Codes(CodeForm { block, table: Some(table), .. }) => return Ok(Layout::I4Table { block, table }),
        Form::Codes(CodeForm { bits: 4, block, min, .. }) => return Ok(Layout::I4 { block, min }),
        Form::Codes(CodeForm { block, min, .. }) => return Ok(Layout::I8 { block, min }),
    };
    match dtype {
        DType::BF16 => return Ok(Layout::Bf16),
        DType::F16 => return Ok(Layout::F16),
        DType::F32 | DType::F64 => return Ok(Layout::F32),
        DType::F8E4M3 if !exact && cols.is_multiple_of(32) => return Ok(Layout::F8),
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
