//! What a model asks of a checkpoint: every weight with its name, shape and source, declared while layers are built.
//!
//! Declarations need the config alone, so memory can be planned and a checkpoint checked before any tensor is read.

use crate::circuit::Declared;
use crate::ensure;
use crate::error::Result;
use crate::ops::{KvSpec, SlotId, SlotSpec, StateId, WeightId};

/// How a weight is stored for operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// Packed for products.
    Matrix,
    /// One matrix for each expert, each packed for products.
    Experts,
    /// Looked up by row, never multiplied: stays as the checkpoint stores it.
    Rows,
    /// A vector in f32, with `add` put onto every element (norms stored as `w` that act as `1 + w`).
    Vector {
        /// Added once at load.
        add: f32,
    },
}

/// A tensor that makes up some rows of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The tensor's name in Hugging Face form.
    pub tensor: String,
    /// Rows it contributes (elements, for a vector).
    pub rows: usize,
    /// Which of the tensor's rows they are.
    pub pick: Pick,
}

/// Which rows of a stored tensor a part takes. `of` is the tensor's whole shape as three dimensions; a file may leave out a
/// first dimension of 1, and for vectors (where every element is a row, `cols` is 1) a last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// All of them, in order: the tensor is `[rows, cols]` (a vector `[rows]`).
    Whole,
    /// All elements of a tensor of this shape, in order, as a vector (the taps of a convolution).
    Flat([usize; 3]),
    /// Of `[E, N, cols]`: row `r` is stored row `first + r * step` of matrix `index`.
    Slice {
        /// The tensor's whole shape.
        of: [usize; 3],
        /// Which matrix.
        index: usize,
        /// Stored row of row 0.
        first: usize,
        /// Stored rows from one row to the next: 2 where gate and up alternate.
        step: usize,
    },
    /// Of `[E, K, N]`, input-major: row `r` is stored column `first + r * step` of matrix `index`, and its elements are
    /// that column's, from stored row `from` on.
    Transposed {
        /// The tensor's whole shape.
        of: [usize; 3],
        /// Which matrix.
        index: usize,
        /// Stored column of row 0.
        first: usize,
        /// Stored columns from one row to the next.
        step: usize,
        /// Stored row of column 0.
        from: usize,
    },
}

impl Part {
    /// A whole tensor.
    pub fn whole(tensor: impl Into<String>, rows: usize) -> Part {
        Part { tensor: tensor.into(), rows, pick: Pick::Whole }
    }

    /// All elements of a tensor, as a vector.
    pub fn flat(tensor: impl Into<String>, of: [usize; 3]) -> Part {
        Part { tensor: tensor.into(), rows: of.iter().fold(1, |n, &d| n.saturating_mul(d)), pick: Pick::Flat(of) }
    }

    /// The first `rows` rows of matrix `index` of a tensor `[E, N, cols]`.
    pub fn slice(tensor: impl Into<String>, of: [usize; 3], index: usize, rows: usize) -> Part {
        Part { tensor: tensor.into(), rows, pick: Pick::Slice { of, index, first: 0, step: 1 } }
    }

    /// The first `rows` columns of matrix `index` of a tensor `[E, K, N]`, as rows.
    pub fn transposed(tensor: impl Into<String>, of: [usize; 3], index: usize, rows: usize) -> Part {
        Part { tensor: tensor.into(), rows, pick: Pick::Transposed { of, index, first: 0, step: 1, from: 0 } }
    }

    /// Starts at stored row (column, where transposed) `first` and takes every `step`th.
    pub fn rows_from(mut self, start: usize, every: usize) -> Part {
        match &mut self.pick {
            Pick::Slice { first, step, .. } | Pick::Transposed { first, step, .. } => (*first, *step) = (start, every),
            _ => debug_assert!(false, "a whole tensor starts at its first row"),
        }
        self
    }

    /// Of a transposed part: its columns start at stored row `start`.
    pub fn columns_from(mut self, start: usize) -> Part {
        match &mut self.pick {
            Pick::Transposed { from, .. } => *from = start,
            _ => debug_assert!(false, "only a transposed part has its columns along stored rows"),
        }
        self
    }

    /// Stored row of row `row`, counted through all matrices; for a transposed part the stored column instead.
    pub fn stored(&self, row: usize) -> usize {
        match self.pick {
            Pick::Whole | Pick::Flat(_) => row,
            Pick::Slice { of, index, first, step } => index * of[1] + first + row * step,
            Pick::Transposed { first, step, .. } => first + row * step,
        }
    }

    /// The shape the tensor must have for rows of `cols` elements, or why no shape would do.
    pub fn shape(&self, cols: usize) -> Result<[usize; 3]> {
        let (of, index, last, within, width) = match self.pick {
            Pick::Whole => return Ok([1, self.rows, cols]),
            Pick::Flat(of) => return Ok(of),
            Pick::Slice { of, index, .. } => (of, index, self.stored(self.rows.saturating_sub(1)) - index * of[1], of[1], of[2] == cols),
            Pick::Transposed { of, index, from, .. } => (of, index, self.stored(self.rows.saturating_sub(1)), of[2], from + cols <= of[1]),
        };
        ensure!(
            index < of[0] && last < within && width,
            Mismatch,
            "{}: {} rows of {cols} are asked for as {:?}, which do not lie inside",
            self.tensor,
            self.rows,
            self.pick
        );
        Ok(of)
    }
}

/// Where a weight comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Tensors of the checkpoint, stacked along the rows.
    Tensors(Vec<Part>),
    /// As `Tensors`, for each expert.
    Experts(Vec<Vec<Part>>),
    /// Numbers that follow from the config (rotary frequencies).
    Constant(Vec<f32>),
}

/// One declared weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// Name in messages: the tensor's, or the common stem of several.
    pub name: String,
    /// How it is stored.
    pub role: Role,
    /// Output rows, of one expert where there are several; 1 for a vector.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Matrices one token meets: of experts the chosen ones.
    pub active: usize,
    /// Where it comes from.
    pub source: Source,
}

impl WeightSpec {
    /// Tensors it is made of, in order, all experts'.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        let lists: &[Vec<Part>] = match &self.source {
            Source::Tensors(parts) => std::slice::from_ref(parts),
            Source::Experts(lists) => lists,
            Source::Constant(_) => &[],
        };
        lists.iter().flatten()
    }

    /// Number of matrices: its experts, else 1.
    pub fn experts(&self) -> usize {
        if let Source::Experts(lists) = &self.source { lists.len() } else { 1 }
    }

    /// Elements, all experts'.
    pub fn elements(&self) -> u64 {
        self.experts() as u64 * self.rows as u64 * self.cols as u64
    }
}

/// All weights and states of a model, by number.
#[derive(Clone, Debug, Default)]
pub struct Declarations {
    /// By [`WeightId`].
    pub weights: Vec<WeightSpec>,
    /// Key/value pages, by [`StateId`].
    pub kv: Vec<KvSpec>,
    /// For each of those, whether its positions are the source's instead of the sequence's.
    pub of_source: Vec<bool>,
    /// Recurrent slots, by [`SlotId`].
    pub slots: Vec<SlotSpec>,
}

impl Declarations {
    fn push(&mut self, spec: WeightSpec) -> WeightId {
        self.weights.push(spec);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// A matrix `[rows, cols]` from one tensor.
    pub fn matrix(&mut self, tensor: &str, rows: usize, cols: usize) -> WeightId {
        self.stacked(tensor, &[(tensor, rows)], cols)
    }

    /// A matrix put together from tensors, stacked along the rows.
    pub fn stacked(&mut self, name: &str, parts: &[(&str, usize)], cols: usize) -> WeightId {
        self.parts(name, parts.iter().map(|(tensor, rows)| Part::whole(*tensor, *rows)).collect(), cols)
    }

    /// A matrix put together from parts of tensors, stacked along the rows.
    pub fn parts(&mut self, name: &str, parts: Vec<Part>, cols: usize) -> WeightId {
        let rows = parts.iter().map(|p| p.rows).sum();
        self.push(WeightSpec { name: name.into(), role: Role::Matrix, rows, cols, active: 1, source: Source::Tensors(parts) })
    }

    /// A matrix for each expert, each put together from parts stacked along the rows; all have the first one's row count.
    /// A token meets all of them unless [`Declarations::meets`] says less.
    pub fn experts(&mut self, name: &str, experts: Vec<Vec<Part>>, cols: usize) -> WeightId {
        let active = experts.len();
        let rows = experts.first().map_or(0, |parts| parts.iter().map(|p| p.rows).sum());
        self.push(WeightSpec { name: name.into(), role: Role::Experts, rows, cols, active, source: Source::Experts(experts) })
    }

    /// Says how many experts of a weight one token meets.
    pub fn meets(&mut self, id: WeightId, active: usize) {
        self.weights[id.0 as usize].active = active;
    }

    /// A table looked up by row.
    pub fn rows(&mut self, tensor: &str, rows: usize, cols: usize) -> WeightId {
        let id = self.matrix(tensor, rows, cols);
        self.weights[id.0 as usize].role = Role::Rows;
        id
    }

    /// A table looked up by row that lies in several tensors, one after another.
    pub fn row_parts(&mut self, name: &str, parts: Vec<Part>, cols: usize) -> WeightId {
        let id = self.parts(name, parts, cols);
        self.weights[id.0 as usize].role = Role::Rows;
        id
    }

    /// A vector; `add` is put onto every element.
    pub fn vector(&mut self, tensor: &str, len: usize, add: f32) -> WeightId {
        self.stacked_vector(tensor, &[(tensor, len)], add)
    }

    /// A vector put together from tensors, one after another.
    pub fn stacked_vector(&mut self, name: &str, parts: &[(&str, usize)], add: f32) -> WeightId {
        self.vector_parts(name, parts.iter().map(|(tensor, len)| Part::whole(*tensor, *len)).collect(), add)
    }

    /// A vector put together from parts of tensors (biases of experts: `Part::slice(tensor, [experts, len, 1], e, len)`).
    pub fn vector_parts(&mut self, name: &str, parts: Vec<Part>, add: f32) -> WeightId {
        let id = self.parts(name, parts, 1);
        let spec = &mut self.weights[id.0 as usize];
        (spec.role, spec.rows, spec.cols) = (Role::Vector { add }, 1, spec.rows);
        id
    }

    /// Numbers that follow from the config.
    pub fn constant(&mut self, name: &str, values: Vec<f32>) -> WeightId {
        self.push(WeightSpec {
            name: name.into(),
            role: Role::Vector { add: 0.0 },
            rows: 1,
            cols: values.len(),
            active: 0,
            source: Source::Constant(values),
        })
    }

    /// A layer's key/value pages.
    pub fn kv(&mut self, spec: KvSpec) -> StateId {
        self.pages(spec, false)
    }

    /// Key/value pages for the positions of a source text, written once when an encoder reads it.
    pub fn source_kv(&mut self, spec: KvSpec) -> StateId {
        self.pages(spec, true)
    }

    fn pages(&mut self, spec: KvSpec, of_source: bool) -> StateId {
        self.kv.push(spec);
        self.of_source.push(of_source);
        StateId(self.kv.len() as u32 - 1)
    }

    /// A layer's recurrent slot.
    pub fn slot(&mut self, name: impl Into<String>, elements: usize) -> SlotId {
        self.slots.push(SlotSpec { name: name.into(), elements });
        SlotId(self.slots.len() as u32 - 1)
    }
}

impl Declared for Declarations {
    fn weight(&self, id: WeightId) -> (usize, usize) {
        let spec = &self.weights[id.0 as usize];
        (spec.rows, spec.cols)
    }
    fn experts(&self, id: WeightId) -> usize {
        self.weights[id.0 as usize].experts()
    }
    fn kv(&self, id: StateId) -> KvSpec {
        self.kv[id.0 as usize]
    }
    fn slot(&self, id: SlotId) -> usize {
        self.slots[id.0 as usize].elements
    }
    fn weight_name(&self, id: WeightId) -> &str {
        &self.weights[id.0 as usize].name
    }
}
