//! From a checkpoint's tensors to weights as operations use them: panels filled in parallel, vectors decoded.

use super::filling::Filling;
use super::stored;
use super::synthetic::Random;
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::pack::{Layout, Packed};
use crate::backend::cpu::pool::Pool;
use crate::bail;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::ops::Weight;
use crate::weights::{Checkpoint, Part, Pick, Role, Source, Stored, WeightSpec};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Where bytes come from: the checkpoint, or a generator.
pub(super) enum Supply {
    Checkpoint(Arc<Checkpoint>),
    Random(Random),
}

/// Reads a weight that is not a matrix; [`Packing`] makes those.
pub(super) fn read(supply: &Supply, spec: &WeightSpec) -> Result<Weight> {
    match (&spec.source, spec.role) {
        (Source::Constant(values), _) => Ok(Weight::Vector(values.clone())),
        (Source::Tensors(parts), Role::Vector { add }) => vector(supply, parts, add).map(Weight::Vector),
        (Source::Tensors(parts), Role::Rows) => stored::rows(supply, parts, spec.cols),
        (Source::Tensors(_) | Source::Experts(_), _) => bail!(Internal, "{}: is a matrix", spec.name),
    }
}

pub(super) fn find(checkpoint: &Checkpoint, name: &str) -> Result<Stored> {
    checkpoint.stored(name)?.ok_or_else(|| Error::new(Kind::CorruptFile, format!("the checkpoint has no tensor {name}")).named(name))
}

/// The part as it reads a tensor that is stored output-major where its plain form is input-major: rows are then rows.
pub(super) fn oriented(part: &Part, stored: &Stored) -> Part {
    let mut part = part.clone();
    if let (true, Pick::Transposed { of: [count, cols, rows], index, first, step, from: 0 }) = (stored.output_major, part.pick) {
        part.pick = Pick::Slice { of: [count, rows, cols], index, first, step };
    }
    part
}

fn vector(supply: &Supply, parts: &[Part], add: f32) -> Result<Vec<f32>> {
    let len = parts.iter().map(|p| p.rows).sum();
    let mut out = vec_filled(len, 0.0, "a vector of weights")?;
    let mut at = 0;
    // Biases of experts are many parts of one tensor.
    let mut last: (&str, Vec<f32>) = ("", Vec::new());
    for part in parts {
        let piece = &mut out[at..at + part.rows];
        match supply {
            Supply::Checkpoint(checkpoint) => {
                if last.0 != part.tensor {
                    last = (&part.tensor, find(checkpoint, &part.tensor)?.values()?);
                }
                let stored = &last.1;
                piece.iter_mut().enumerate().for_each(|(row, v)| *v = stored[part.stored(row)]);
            }
            Supply::Random(random) => random.vector(&part.tensor, piece),
        }
        at += part.rows;
    }
    out.iter_mut().for_each(|v| *v += add);
    Ok(out)
}

/// One tensor on its way into panels in memory, some of them at a time.
pub(super) struct Packing {
    packed: Packed,
    filling: Filling,
    /// Shares of the tensor's bytes that went back to the system.
    given_back: usize,
}

impl Packing {
    /// Finds the tensor and makes room, in `region` where that has some left.
    pub fn new(supply: &Supply, part: &Part, cols: usize, layout: Layout, pool: &Pool, region: &Arc<Region>) -> Result<Packing> {
        let packed = Packed::new_in(layout, part.rows, cols, Some(region))?;
        Ok(Packing { packed, filling: Filling::new(supply, part, cols, layout, pool)?, given_back: 0 })
    }

    /// Whether every panel is full.
    pub fn is_done(&self) -> bool {
        self.filling.is_done()
    }

    /// Bytes of full panels.
    pub fn bytes(&self) -> u64 {
        self.filling.bytes()
    }

    /// The matrix, once it is done.
    pub fn finish(self) -> Packed {
        self.packed
    }

    /// Fills panels of about `most` bytes, at least one.
    pub fn step(&mut self, supply: &Supply, most: usize, pool: &Pool) -> Result<()> {
        let (first, count) = (self.filling.panels, (most / self.packed.panel_bytes().max(1)).max(1));
        self.filling.step(supply, self.packed.panels_mut().skip(first).take(count), pool)?;
        self.give_back(supply, pool)
    }

    /// Gives back what was read of a large tensor, which would else be in memory twice by its end.
    fn give_back(&mut self, supply: &Supply, pool: &Pool) -> Result<()> {
        let (part, shares) = (&self.filling.part, self.packed.len() / SHARE);
        let (Supply::Checkpoint(checkpoint), Pick::Whole, 2..) = (supply, part.pick, shares) else { return Ok(()) };
        let read = (self.filling.rows() as u128 * shares as u128 / part.rows.max(1) as u128) as usize;
        let (first, counter) = (self.given_back, AtomicUsize::new(0));
        self.given_back = read.max(first);
        pool.run(&|worker| {
            worker.each(&counter, self.given_back - first, 1, |range| {
                range.for_each(|share| checkpoint.release_part(&part.tensor, first + share..first + share + 1, shares));
            });
        })
    }
}

/// Bytes of panels whose rows of the tensor go back to the system together.
const SHARE: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::super::making::{Making, Room};
    use super::*;
    use crate::tensor::DType;
    use crate::weights::Declarations;

    /// `[2, 6, 32]`, element `i` is `i` in BF16-exact small numbers, and a vector `[2, 6]`.
    fn checkpoint(name: &str) -> (std::path::PathBuf, Supply) {
        let folder = std::env::temp_dir().join(format!("metrale-pack-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let header = br#"{"t":{"dtype":"F32","shape":[2,6,32],"data_offsets":[0,1536]},"b":{"dtype":"F32","shape":[2,6],"data_offsets":[1536,1584]}}"#;
        let values = (0..384).chain(0..12).flat_map(|i| (i as f32).to_le_bytes());
        let bytes: Vec<u8> = (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(values).collect();
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
        std::fs::write(folder.join("config.json"), b"{}").unwrap();
        let opened = Checkpoint::open(&folder).unwrap();
        (folder, Supply::Checkpoint(Arc::new(opened)))
    }

    #[test]
    fn parts_pick_rows_and_columns_of_stacked_tensors() {
        let (folder, supply) = checkpoint("picks");
        let pool = Pool::new(2).unwrap();
        let mut d = Declarations::default();
        // Of output-major experts every second row; of input-major ones columns, from a row on.
        let slice = |e: usize| vec![Part::slice("t", [2, 6, 32], e, 3).rows_from(1, 2), Part::slice("t", [2, 6, 32], e, 1)];
        let turned = |e: usize| vec![Part::transposed("t", [2, 6, 32], e, 17).rows_from(4, 1).columns_from(2)];
        let rows = d.experts("rows", vec![slice(0), slice(1)], 32);
        let columns = d.experts("columns", vec![turned(0), turned(1)], 4);
        let biases =
            d.vector_parts("biases", vec![Part::slice("b", [2, 6, 1], 1, 3).rows_from(1, 2), Part::slice("b", [2, 6, 1], 0, 2)], 0.5);
        let read = |id: crate::ops::WeightId| {
            let spec = &d.weights[id.0 as usize];
            let layouts = vec![Layout::F32; spec.parts().count()];
            let mut making = Making::default();
            let region = Region::new(crate::runtime::Class::Other, 0, "test").unwrap();
            loop {
                // One panel at a time.
                if let Some(weight) =
                    making.step(&supply, spec, &layouts, &Room { pool: &pool, region: &region, packs_rows: false, late: None }, 1).unwrap()
                {
                    return weight;
                }
            }
        };
        let weight = read(rows);
        let mut row = [0.0; 32];
        for e in 0..2 {
            for (r, stored) in [1, 3, 5, 0].into_iter().enumerate() {
                weight.experts()[e].decode_row(r, &mut row);
                assert!((0..32).all(|k| row[k] == (e * 192 + stored * 32 + k) as f32), "expert {e} row {r}: {row:?}");
            }
        }
        let weight = read(columns);
        let mut row = [0.0; 4];
        for e in 0..2 {
            for r in 0..17 {
                weight.experts()[e].decode_row(r, &mut row);
                assert!((0..4).all(|k| row[k] == (e * 192 + (k + 2) * 32 + r + 4) as f32), "expert {e} row {r}: {row:?}");
            }
        }
        assert_eq!(read(biases).vector(), [7.5, 9.5, 11.5, 0.5, 1.5]);
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn random_values_reach_panels_of_every_kind() {
        let pool = Pool::new(2).unwrap();
        let region = Region::new(crate::runtime::Class::Other, 0, "test").unwrap();
        let part = Part::whole("t", 20);
        for (dtype, own, error) in [
            (DType::F32, Layout::F32, 0.0),
            (DType::BF16, Layout::Bf16, 0.004),
            (DType::F16, Layout::F16, 0.0005),
            (DType::Q8_0, Layout::I8 { block: 32, min: false }, 0.01),
            (DType::Q4_0, Layout::I4 { block: 32, min: false }, 0.15),
        ] {
            // Its own kind, and those that a matrix gets which is read across its rows, or whose precision is chosen.
            for (layout, rounding) in [(own, 0.0), (Layout::F32, 0.0), (Layout::Bf16, 0.004), (Layout::F16, 0.0005), (Layout::F8, 0.07)] {
                let supply = Supply::Random(Random::new(crate::options::Synthetic::of(dtype, 3)));
                let mut packing = Packing::new(&supply, &part, 64, layout, &pool, &region).unwrap();
                while !packing.is_done() {
                    packing.step(&supply, 1, &pool).unwrap();
                }
                let (packed, Supply::Random(random)) = (packing.finish(), supply) else { unreachable!() };
                let (mut row, mut expected) = ([0.0; 64], [0.0; 64]);
                let most = (3.0f32 / 64.0).sqrt();
                for r in 0..20 {
                    packed.decode_row(r, &mut row).unwrap();
                    random.matrix_row("t", r, &mut expected);
                    let worst = row.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(worst <= (error + rounding) * most, "{dtype} as {layout:?}, row {r}: off by {worst}");
                }
            }
        }
    }

    #[test]
    fn parts_outside_of_their_tensor_have_no_shape() {
        let of = [2, 6, 32];
        assert_eq!(Part::slice("t", of, 1, 6).shape(32).unwrap(), of);
        for part in [
            Part::slice("t", of, 2, 6),
            Part::slice("t", of, 0, 7),
            Part::slice("t", of, 0, 3).rows_from(2, 2),
            Part::transposed("t", of, 0, 33),
            Part::transposed("t", of, 0, 32).columns_from(1),
        ] {
            let cols = if matches!(part.pick, Pick::Slice { .. }) { 32 } else { 6 };
            assert_eq!(part.shape(cols).unwrap_err().kind(), Kind::Mismatch, "{part:?}");
        }
        assert!(Part::slice("t", of, 0, 6).shape(31).is_err());
    }
}
