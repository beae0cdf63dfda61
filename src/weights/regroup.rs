//! Tensors that a family declares as one, read from a checkpoint that stores them in pieces.
//!
//! Families follow the published files of their model. Others of the same model (Mistral's own layout, quantised exports) hold
//! `experts.7.gate_proj.weight` where those hold matrix 7 of `experts.gate_up_proj`, and GGUF files each head's key and value rows
//! apart where those have `kv_b_proj`; declarations are rewritten to what is there.

use super::{Checkpoint, Declarations, Part, Pick, Source};

/// Rewrites parts of tensors that the checkpoint stores apart.
pub fn regroup(declarations: &mut Declarations, checkpoint: &Checkpoint) {
    for spec in &mut declarations.weights {
        let lists: &mut [Vec<Part>] = match &mut spec.source {
            Source::Tensors(parts) => std::slice::from_mut(parts),
            Source::Experts(lists) => lists,
            Source::Constant(_) => continue,
        };
        for parts in lists {
            if parts.iter().any(|part| apart(part, checkpoint).is_some()) {
                *parts = parts.iter().flat_map(|part| apart(part, checkpoint).unwrap_or_else(|| vec![part.clone()])).collect();
            }
        }
    }
}

/// The parts that stand for one of a fused tensor, where that is stored apart; `None` where it is not.
fn apart(part: &Part, checkpoint: &Checkpoint) -> Option<Vec<Part>> {
    match part.tensor.rsplit_once(".experts.") {
        Some((stem, fused)) => experts(part, checkpoint, stem, fused),
        None => heads(part, checkpoint),
    }
}

/// `kv_b_proj` from `k_b_proj` `[heads, latent, key]` and `v_b_proj` `[heads, value, latent]`.
fn heads(part: &Part, checkpoint: &Checkpoint) -> Option<Vec<Part>> {
    let stem = part.tensor.strip_suffix("kv_b_proj.weight")?;
    let shape = |name: &str| checkpoint.tensor(name).map(|view| view.shape);
    if part.pick != Pick::Whole || shape(&part.tensor).is_some() {
        return None;
    }
    let (keys, values) = (format!("{stem}k_b_proj.weight"), format!("{stem}v_b_proj.weight"));
    let [heads, latent, key] = shape(&keys)?[..] else { return None };
    let [value_heads, value, value_latent] = shape(&values)?[..] else { return None };
    if (value_heads, value_latent) != (heads, latent) || heads * (key + value) != part.rows {
        return None;
    }
    let of_head =
        |h: usize| [Part::transposed(&*keys, [heads, latent, key], h, key), Part::slice(&*values, [heads, value, latent], h, value)];
    Some((0..heads).flat_map(of_head).collect())
}

/// One expert's matrix, or half of one, of a fused tensor.
fn experts(part: &Part, checkpoint: &Checkpoint, stem: &str, fused: &str) -> Option<Vec<Part>> {
    // Rows of one expert's matrix as the fused tensor stacks them, output-major or not.
    let (all, index, first, step) = match part.pick {
        Pick::Slice { of, index, first, step } => (of[1], index, first, step),
        Pick::Transposed { of, index, first, step, from: 0 } => (of[2], index, first, step),
        _ => return None,
    };
    let name = |projection: &str| format!("{stem}.experts.{index}.{projection}.weight");
    let there = |projection: &str| checkpoint.has_module(name(projection).trim_end_matches(".weight"));
    match fused {
        "down_proj" if there("down_proj") && (first, step, part.rows) == (0, 1, all) => Some(vec![Part::whole(name("down_proj"), all)]),
        "gate_up_proj" if there("gate_proj") && all.is_multiple_of(2) => {
            let half = all / 2;
            match (first, step, part.rows) {
                (0, 1, rows) if rows == all => Some(vec![Part::whole(name("gate_proj"), half), Part::whole(name("up_proj"), half)]),
                (0, _, rows) if rows == half => Some(vec![Part::whole(name("gate_proj"), half)]),
                (first, 1, rows) if rows == half && first == half => Some(vec![Part::whole(name("up_proj"), half)]),
                (1, 2, rows) if rows == half => Some(vec![Part::whole(name("up_proj"), half)]),
                _ => None,
            }
        }
        _ => None,
    }
}
