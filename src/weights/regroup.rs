//! Experts that a family declares fused, read from a checkpoint that stores them one by one.
//!
//! Families follow the published files of their model. Others of the same model (Mistral's own layout, quantised exports) hold
//! `experts.7.gate_proj.weight` where those hold matrix 7 of `experts.gate_up_proj`; declarations are rewritten to what is there.

use super::{Checkpoint, Declarations, Part, Pick, Source};

/// Rewrites parts of fused experts that the checkpoint stores apart.
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
    let (stem, fused) = part.tensor.rsplit_once(".experts.")?;
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
