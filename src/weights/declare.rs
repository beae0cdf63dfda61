//! What a model asks of a checkpoint: every weight with its name, shape and source, declared while layers are built.
//!
//! Declarations need the config alone, so memory can be planned and a checkpoint checked before any tensor is read.

use crate::circuit::Declared;
use crate::ops::{KvSpec, StateId, WeightId};

/// How a weight is stored for operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// Packed for products.
    Matrix,
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
}

/// Where a weight comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Tensors of the checkpoint, stacked along the rows.
    Tensors(Vec<Part>),
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
    /// Output rows; 1 for a vector.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Where it comes from.
    pub source: Source,
}

/// All weights and states of a model, by number.
#[derive(Clone, Debug, Default)]
pub struct Declarations {
    /// By [`WeightId`].
    pub weights: Vec<WeightSpec>,
    /// Key/value pages, by [`StateId`].
    pub kv: Vec<KvSpec>,
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
        let rows = parts.iter().map(|p| p.1).sum();
        let parts = parts.iter().map(|(tensor, rows)| Part { tensor: (*tensor).to_string(), rows: *rows }).collect();
        self.push(WeightSpec { name: name.into(), role: Role::Matrix, rows, cols, source: Source::Tensors(parts) })
    }

    /// A table looked up by row.
    pub fn rows(&mut self, tensor: &str, rows: usize, cols: usize) -> WeightId {
        let id = self.matrix(tensor, rows, cols);
        self.weights[id.0 as usize].role = Role::Rows;
        id
    }

    /// A vector; `add` is put onto every element.
    pub fn vector(&mut self, tensor: &str, len: usize, add: f32) -> WeightId {
        self.stacked_vector(tensor, &[(tensor, len)], add)
    }

    /// A vector put together from tensors, one after another.
    pub fn stacked_vector(&mut self, name: &str, parts: &[(&str, usize)], add: f32) -> WeightId {
        let id = self.stacked(name, parts, 1);
        let spec = &mut self.weights[id.0 as usize];
        (spec.role, spec.rows, spec.cols) = (Role::Vector { add }, 1, spec.rows);
        id
    }

    /// Numbers that follow from the config.
    pub fn constant(&mut self, name: &str, values: Vec<f32>) -> WeightId {
        self.push(WeightSpec { name: name.into(), role: Role::Vector { add: 0.0 }, rows: 1, cols: values.len(), source: Source::Constant(values) })
    }

    /// A layer's key/value pages.
    pub fn kv(&mut self, spec: KvSpec) -> StateId {
        self.kv.push(spec);
        StateId(self.kv.len() as u32 - 1)
    }
}

impl Declared for Declarations {
    fn weight(&self, id: WeightId) -> (usize, usize) {
        let spec = &self.weights[id.0 as usize];
        (spec.rows, spec.cols)
    }
    fn kv(&self, id: StateId) -> KvSpec {
        self.kv[id.0 as usize]
    }
    fn weight_name(&self, id: WeightId) -> &str {
        &self.weights[id.0 as usize].name
    }
}
