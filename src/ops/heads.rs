//! What lies between the product of queries, keys and values and attention, in one operation for devices, where each launch costs more than the
//! work: norms, rotation, and the write into the cache.
#![allow(unsafe_code)] // pages and rows of outputs, disjoint by row; argument structs

use super::{Frame, Gpu, Kv, KvSpec, Op, PAGE, Port, RopeStyle, Shape, Shapes, StateId, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// RMS norm of each head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// `[head_dim]`, or one for each column.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
}

/// `y = rope(norm(q))`; `rope(norm(k))` and `v` go into the pages. Fusion of [`super::Norm`], [`super::Rope`] and [`super::CacheWrite`].
#[derive(Clone, Debug)]
pub struct Heads {
    /// `[rows, heads * head_dim]`.
    pub q: Value,
    /// `[rows, kv_heads * head_dim]`.
    pub k: Value,
    /// `[rows, kv_heads * value_dim]`.
    pub v: Value,
    /// `[rows, rotary_dim]` from [`super::RopeTable`].
    pub table: Value,
    /// Norm of queries, if any.
    pub q_norm: Option<HeadNorm>,
    /// Norm of keys, if any.
    pub k_norm: Option<HeadNorm>,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which elements turn together.
    pub style: RopeStyle,
    /// The layer's pages.
    pub state: StateId,
    /// Their dims.
    pub spec: KvSpec,
    /// `[rows, heads * head_dim]`.
    pub y: Value,
}

/// Elements of the widest head.
pub(crate) const WIDEST_HEAD: usize = 512;

const HEADS: Kernel = Kernel { file: "heads", name: "heads" };
const HEADS_OF_MANY: Kernel = Kernel { file: "heads", name: "heads_of_many" };
/// Rows that fill a device with a warp for four heads.
const MANY_ROWS: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
struct HeadsArgs {
    q: View,
    k: View,
    v: View,
    table: View,
    y: View,
    batch: u64,
    q_norm: u64,
    k_norm: u64,
    kv: Kv,
    q_len: u32,
    k_len: u32,
    q_eps: f32,
    k_eps: f32,
    heads: u32,
    head_dim: u32,
    pairs: u32,
    state: u32,
}

// SAFETY: the struct of kernels/heads.cu.
unsafe impl Args for HeadsArgs {}

impl Heads {
    /// One head, normed and turned.
    fn head(&self, frame: &Frame<'_>, row: usize, x: &[f32], first: usize, norm: Option<HeadNorm>, y: &mut [f32]) {
        y.copy_from_slice(x);
        if let Some(norm) = norm {
            let weight = frame.weight(norm.weight).vector();
            let squares: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let factor = 1.0 / (squares / x.len() as f64 + f64::from(norm.eps)).sqrt();
            for (i, y) in y.iter_mut().enumerate() {
                *y = (f64::from(*y) * factor * f64::from(weight[(first + i) % weight.len()])) as f32;
            }
        }
        let table = frame.row(self.table, row);
        let (cos, sin) = table.split_at(table.len() / 2);
        super::rope_tail::turn_tail(&mut y[..table.len()], cos, sin, self.style, false);
    }

    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (spec, dim) = (&self.spec, self.head_dim);
        for (head, (x, y)) in frame.row(self.q, row).chunks(dim).zip(y.chunks_mut(dim)).enumerate() {
            self.head(frame, row, x, head * dim, self.q_norm, y);
        }
        let position = frame.batch.positions[row] as usize;
        let page = frame.pages(frame.segment_of(row), self.state).page(position / PAGE);
        let at = position % PAGE;
        let mut turned = [0.0; WIDEST_HEAD];
        for (head, x) in frame.row(self.k, row).chunks(dim).enumerate() {
            self.head(frame, row, x, head * dim, self.k_norm, &mut turned[..dim]);
            // SAFETY: the page has `page_bytes`; this position's elements belong to this row alone.
            unsafe { spec.store_key(frame.simd, page, head, at, &turned[..dim]) };
        }
        for (head, v) in frame.row(self.v, row).chunks(spec.value_dim).enumerate() {
            // SAFETY: as above.
            unsafe { spec.store_value(frame.simd, page, head, at, v) };
        }
    }
}

impl Op for Heads {
    op_common!("heads");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let inputs = [&mut self.q, &mut self.k, &mut self.v, &mut self.table].map(|value| (Port::In, value));
        inputs.into_iter().chain([(Port::Out, &mut self.y)]).collect()
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::Out, self.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (q, k, v, table) = (shapes.value(self.q), shapes.value(self.k), shapes.value(self.v), shapes.value(self.table));
        let (spec, dim) = (&self.spec, self.head_dim);
        ensure!(
            k.width == spec.heads * spec.key_dim && v.width == spec.heads * spec.value_dim && *spec == shapes.kv(self.state),
            Internal,
            "heads: {k:?} and {v:?} for {spec:?}"
        );
        ensure!(
            dim == spec.key_dim && dim <= WIDEST_HEAD && q.width.is_multiple_of(dim) && table.width <= dim,
            Internal,
            "heads: {q:?} in heads of {dim}, {} of them rotary",
            table.width
        );
        Ok(vec![Shape::f32(q.rows, q.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let weight = |norm: Option<HeadNorm>| norm.map(|norm| norm.weight);
        let eps = |norm: Option<HeadNorm>| norm.map_or(0.0, |norm| norm.eps);
        let heads = gpu.width(self.y) / self.head_dim;
        let args = HeadsArgs {
            q: gpu.view(self.q),
            k: gpu.view(self.k),
            v: gpu.view(self.v),
            table: gpu.view(self.table),
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            q_norm: gpu.vector(weight(self.q_norm)),
            k_norm: gpu.vector(weight(self.k_norm)),
            kv: self.spec.on_gpu()?,
            q_len: gpu.vector_len(weight(self.q_norm)) as u32,
            k_len: gpu.vector_len(weight(self.k_norm)) as u32,
            q_eps: eps(self.q_norm),
            k_eps: eps(self.k_norm),
            heads: heads as u32,
            head_dim: self.head_dim as u32,
            pairs: u32::from(self.style == RopeStyle::Pairs),
            state: gpu.kv_index(self.state),
        };
        let (rows, all) = (gpu.rows(self.y), heads + 2 * self.spec.heads);
        let many = rows >= MANY_ROWS && self.head_dim.max(self.spec.value_dim) <= 128;
        let (kernel, each) = if many { (HEADS_OF_MANY, 16) } else { (HEADS, 4) };
        gpu.launch(kernel, Grid::new([rows, all.div_ceil(each), 1], 128).early(), &args)
    }

    op_by_row!(2);
}
