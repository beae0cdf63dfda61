//! Tables whose rows stay as the checkpoint stores them and are decoded one by one.

use super::pack::{Supply, find, oriented};
use crate::error::{Result, vec_filled};
use crate::ops::{StoredRows, Weight};
use crate::quant;
use crate::tensor::DType;
use crate::weights::{Part, Stored};

/// Rows that stay where the checkpoint has them.
struct InFile {
    stored: Stored,
    part: Part,
}

impl StoredRows for InFile {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.stored.decode_row(self.part.stored(row), out).expect("shape and type were checked when the weight was made");
    }
}

/// Random rows in BF16.
struct InMemory(Vec<u8>);

impl StoredRows for InMemory {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        quant::decode(DType::BF16, &self.0[row * out.len() * 2..][..out.len() * 2], out).expect("two bytes an element");
    }
}

/// Rows of several tensors, one after another: the number of the first row of each, and its rows.
struct Shards(Vec<(usize, Box<dyn StoredRows>)>);

impl StoredRows for Shards {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        let after = self.0.partition_point(|(first, _)| *first <= row);
        let (first, rows) = &self.0[after - 1];
        rows.decode_row(row - first, out);
    }
}

/// Rows of `cols` elements, one part behind the other.
pub(super) fn rows(supply: &Supply, parts: &[Part], cols: usize) -> Result<Weight> {
    if let [part] = parts {
        return rows_of(supply, part, cols).map(Weight::Stored);
    }
    let mut shards = crate::error::vec_with_capacity(parts.len(), "the list of a table's shards")?;
    let mut first = 0;
    for part in parts {
        shards.push((first, rows_of(supply, part, cols)?));
        first += part.rows;
    }
    Ok(Weight::Stored(Box::new(Shards(shards))))
}

fn rows_of(supply: &Supply, part: &Part, cols: usize) -> Result<Box<dyn StoredRows>> {
    Ok(match supply {
        Supply::Checkpoint(checkpoint) => {
            let stored = find(checkpoint, &part.tensor)?;
            // Once now, so that a type nobody decodes is an error here and not a surprise later.
            stored.decode_row(part.stored(0), &mut vec_filled(cols, 0.0, "a row")?)?;
            Box::new(InFile { part: oriented(part, &stored), stored })
        }
        Supply::Random(random) => Box::new(InMemory(random.rows(&part.tensor, part.rows, cols)?)),
    })
}
