//! From a tensor's name to its layer and part, and from there to the layout the precision schedule asks for.

use super::prepare::Prepared;
use crate::backend::cpu::pack::Layout;
use crate::error::Result;
use crate::options::{LoadOptions, ModelPart, Precision, check_precision};
use crate::tensor::DType;
use crate::weights::Role;
use crate::{bail, ensure};
use std::collections::BTreeMap;
use std::path::Path;

/// How the rules' Q8_0 is packed.
pub(super) const Q8_0: Layout = Layout::I8 { block: 32, min: false };

/// The layer and the part that a tensor belongs to, by its name.
pub(super) fn place(tensor: &str) -> (Option<usize>, ModelPart) {
    let words: Vec<&str> = tensor.split('.').collect();
    let layer = words.windows(2).find(|w| w[0] == "layers").and_then(|w| w[1].parse().ok());
    let has = |names: &[&str]| words.iter().any(|w| names.contains(w));
    let module = match words[..] {
        [.., module, "weight" | "bias"] | [.., module] => module,
        [] => "",
    };
    let part = if has(&["experts"]) {
        ModelPart::Experts
    } else if ["gate", "router", "classifier", "shared_expert_gate"].contains(&module) {
        ModelPart::Router
    } else if has(&["mixer"]) && ["up_proj", "down_proj"].contains(&module)
        || has(&["mlp", "mlps", "feed_forward", "ffn", "shared_experts", "shared_expert", "block_sparse_moe", "fc1", "fc2"])
    {
        ModelPart::Mlp
    } else if has(&["self_attn", "encoder_attn", "attn", "attention", "linear_attn", "mixer", "conv"]) {
        ModelPart::Attention
    } else if layer.is_none() && words.iter().any(|w| w.contains("head") || w.contains("embed") || *w == "shared") {
        ModelPart::Head
    } else {
        ModelPart::Other
    };
    (layer, part)
}

/// The layout of a matrix with rows of `cols` elements: what the schedule asks for, else `own`.
pub(super) fn layout(schedule: &Precision, tensor: &str, own: Layout, cols: usize) -> Result<Layout> {
    let (layer, part) = place(tensor);
    let Some(dtype) = schedule.dtype(layer, part) else { return Ok(own) };
    check_precision(dtype)?;
    Ok(match dtype {
        DType::F32 => Layout::F32,
        DType::BF16 => Layout::Bf16,
        DType::F16 => Layout::F16,
        DType::Q8_0 => {
            ensure!(
                cols.is_multiple_of(32),
                Unsupported,
                "{tensor}: a precision rule asks for Q8_0; rows of {cols} elements are no whole blocks of 32"
            );
            Q8_0
        }
        other => bail!(Internal, "{tensor}: no layout is known for {other}"),
    })
}

/// What a part of a layer is multiplied in.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Scheduled {
    /// Decoder layer; none for matrices outside of layers.
    pub layer: Option<usize>,
    /// The part's name, as rules write it.
    pub part: &'static str,
    /// Its layouts, each once (`F32`, `Bf16`, `I4 x32`).
    pub layouts: Vec<String>,
}

/// The precision schedule of a checkpoint under `options`: every layer and part with matrices. Reads headers only.
pub fn precision(path: &Path, options: &LoadOptions) -> Result<Vec<Scheduled>> {
    let prepared = Prepared::new(path, options)?;
    let mut table: BTreeMap<(Option<usize>, ModelPart), Vec<String>> = BTreeMap::new();
    for (spec, layouts) in prepared.declarations.weights.iter().zip(&prepared.layouts) {
        if !matches!(spec.role, Role::Matrix | Role::Experts) {
            continue;
        }
        for (part, layout) in spec.parts().zip(layouts) {
            let names = table.entry(place(&part.tensor)).or_default();
            let name = name(*layout);
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    Ok(table.into_iter().map(|((layer, part), layouts)| Scheduled { layer, part: part.name(), layouts }).collect())
}

/// A layout in a word: codes with the length of the run that shares a scale.
fn name(layout: Layout) -> String {
    match layout {
        Layout::F32 => "F32".into(),
        Layout::Bf16 => "BF16".into(),
        Layout::F16 => "F16".into(),
        Layout::F8 => format!("F8 x{}", layout.block()),
        Layout::I8 { block, .. } => format!("I8 x{block}"),
        Layout::I4 { block, .. } | Layout::I4Table { block, .. } => format!("I4 x{block}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_family_have_a_place() {
        use ModelPart::*;
        for (name, layer, part) in [
            ("model.layers.3.self_attn.q_proj.weight", Some(3), Attention),
            ("model.layers.11.mlp.down_proj.weight", Some(11), Mlp),
            ("model.layers.0.mlp.experts.7.up_proj.weight", Some(0), Experts),
            ("model.layers.0.mlp.experts.gate_up_proj", Some(0), Experts),
            ("model.layers.0.mlp.gate.weight", Some(0), Router),
            ("model.layers.0.mlp.router.classifier.weight", Some(0), Router),
            ("model.layers.0.block_sparse_moe.gate.weight", Some(0), Router),
            ("model.layers.2.mlp.shared_experts.gate_proj.weight", Some(2), Mlp),
            ("model.layers.2.feed_forward.w1.weight", Some(2), Mlp),
            ("model.layers.1.linear_attn.in_proj_qkvz.weight", Some(1), Attention),
            ("backbone.layers.4.mixer.in_proj.weight", Some(4), Attention),
            ("backbone.layers.5.mixer.up_proj.weight", Some(5), Mlp),
            ("layers.1.ffn.experts.0.w1.weight", Some(1), Experts),
            ("layers.1.attn.wq_a.weight", Some(1), Attention),
            ("lm_head.weight", None, Head),
            ("model.embed_tokens.weight", None, Head),
            ("head.weight", None, Head),
        ] {
            assert_eq!(place(name), (layer, part), "{name}");
        }
    }
}
