//! Operations: the words a circuit is written in.
//!
//! An operation is a struct with named fields: the values it reads and writes, the weights and states it uses, and its
//! numbers. It checks shapes, has a scalar body (the definition that tests trust) and a body for the CPU's worker
//! pool. Both bodies see the world through a [`Frame`]. One operation is one file and one line in [`cases`].
//!
//! Every value is `[rows, width]`. `rows` stays symbolic until a program runs: all rows of the batch, or one row for
//! each sequence.

mod act;
mod add;
mod aside;
mod attention;
mod attention_parts;
mod batch_image;
mod combine;
mod conv;
mod decay;
mod delta_rule;
mod embed;
mod engram;
mod expand_heads;
mod expert_linear;
mod failure;
mod frame;
mod gated_linear;
mod gpu;
mod hash_route;
mod head_gate;
mod head_linear;
mod heads;
mod hyper;
mod hyper_inject;
mod index;
mod join;
mod kv;
mod lanes;
mod last_rows;
mod linear;
mod linear_launch;
mod linear_plan;
mod mamba2;
mod mean_groups;
mod ngram;
mod norm;
mod paged;
mod pool_groups;
mod position_scale;
mod quantize;
mod quantized;
mod records;
mod regroup;
mod residual_mix;
mod rope;
mod rope_tail;
mod route;
mod routed;
mod row_attention;
mod scale;
mod scale_by;
mod scratch;
mod selected_attention;
mod shared_attention;
mod sinusoid;
mod softcap;
mod source_attention;
mod splits;
mod stream_gate;
mod tokens;
mod upload;

use crate::backend::cpu::pause::Pause;
use crate::backend::cpu::pool::Worker;
use crate::error::Result;
use std::cell::Cell;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use act::{ActMul, Activation};
pub use add::{Add, AddNorm};
pub use aside::Aside;
pub use attention::{Attention, CacheWrite};
pub use attention_parts::AttentionParts;
pub use batch_image::{ADVANCE, AdvanceArgs, BATCH, BatchArgs, BatchImage, BatchPlaces, News, batch_grid};
pub use combine::Combine;
pub use conv::Conv;
pub use decay::Decay;
pub use delta_rule::DeltaRule;
pub use embed::Embed;
pub use engram::{EngramHash, EngramInject, EngramRows};
pub use expand_heads::ExpandHeads;
pub use expert_linear::ExpertLinear;
pub use failure::Failure;
pub use frame::{Batch, Frame, KvPages, Matrix, OutRows, Segment, Slot, SlotSpec, SlotState, StatePointers, StoredRows, Weight};
pub use gated_linear::GatedLinear;
pub use gpu::{Gpu, GpuWeight, Kv, LayoutKind, Part, View, Words};
pub use hash_route::HashRoute;
pub use head_gate::HeadGate;
pub use head_linear::HeadLinear;
pub(crate) use heads::WIDEST_HEAD;
pub use heads::{HeadNorm, Heads};
pub use hyper::{HyperCollapse, HyperExpand, HyperMix, MOST_STREAMS};
pub use hyper_inject::HyperInject;
pub use index::{IndexBlocks, IndexSelect, Indexer};
pub use join::Join;
pub use kv::{KvSpec, KvType, PAGE};
pub use last_rows::LastRows;
pub use linear::Linear;
pub use linear_launch::{PREPARED_COLUMNS, prepared_bytes, takes_prepared};
pub use mamba2::Mamba2;
pub use mean_groups::MeanGroups;
pub use ngram::{NgramHash, NgramRows, NgramTable};
pub use norm::{Norm, NormKind};
pub use paged::{ExpertCache, PagedExperts, PanelSource};
pub use pool_groups::{GroupRopeTable, PoolGroups};
pub use position_scale::PositionScale;
pub use quantize::Quantize;
pub use quantized::{ActQuantize, AddNormQuantize};
pub use records::{RecordWrite, Records};
pub use regroup::{Piece, Regroup};
pub use residual_mix::ResidualMix;
pub use rope::{Rope, RopeStyle, RopeTable};
pub use rope_tail::RopeTail;
pub use route::{Groups, Route, Scoring};
pub use scale::Scale;
pub use scale_by::ScaleBy;
pub use scratch::Shelf;
pub use selected_attention::SelectedAttention;
pub use shared_attention::{Pooled, SharedAttention};
pub use sinusoid::Sinusoid;
pub use softcap::Softcap;
pub use source_attention::SourceAttention;
pub use stream_gate::StreamGate;
pub use tokens::{Lookup, TokenIds};
pub use upload::{Place, experts_of, part as part_of, upload};

/// A tensor of the circuit, by number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

impl Value {
    /// Not connected: an output before the tape numbers it, or an optional input that is absent.
    pub const NONE: Value = Value(u32::MAX);

    /// Whether the value is connected.
    pub fn is_some(self) -> bool {
        self != Value::NONE
    }
}

impl Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_some() { write!(f, "%{}", self.0) } else { f.write_str("-") }
    }
}

/// A weight of the model, by its place in the model's declarations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WeightId(pub u32);

/// A layer's key/value pages, by their place in the model's declarations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StateId(pub u32);

/// A layer's recurrent slot (a fixed number of floats for each sequence), by its place in the model's declarations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SlotId(pub u32);

/// How many rows a value has once a batch is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rows {
    /// One row for each token of the batch.
    All,
    /// One row for each sequence: its last token.
    Last,
}

/// What a value's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// f32.
    F32,
    /// 8-bit codes with a scale and a sum for each block of 32 (see [`Quantize`]).
    Q8,
    /// f32; on a device, in runs of rows that products meet in tensor cores, words of bfloat16 in the order of those products.
    Prepared,
}

/// Rows, width (elements in a row) and kind of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Row count, symbolic.
    pub rows: Rows,
    /// Elements in a row.
    pub width: usize,
    /// What its bytes are.
    pub kind: Kind,
    /// Whether it is a column range of another value (rows are then not next to each other).
    pub sliced: bool,
}

impl Shape {
    /// An f32 value.
    pub const fn f32(rows: Rows, width: usize) -> Shape {
        Shape { rows, width, kind: Kind::F32, sliced: false }
    }
}

/// Whether an operation reads or writes a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Port {
    /// Read.
    In,
    /// Written; each value is written by exactly one operation.
    Out,
}

/// Shapes known while recording: of values and of weights.
pub trait Shapes {
    /// Shape of a value recorded before.
    fn value(&self, value: Value) -> Shape;
    /// `[rows, cols]` of a weight, of one expert where it has several; a vector is `[1, len]`.
    fn weight(&self, weight: WeightId) -> (usize, usize);
    /// Matrices of a weight: its experts, else 1.
    fn experts(&self, weight: WeightId) -> usize;
    /// Dims of a layer's key/value pages.
    fn kv(&self, state: StateId) -> KvSpec;
    /// Elements of a recurrent slot.
    fn slot(&self, slot: SlotId) -> usize;
}

/// A product's weight, and its input in both forms; [`crate::circuit`] connects what the weight's format wants.
pub struct Product<'a> {
    /// The weight.
    pub weight: WeightId,
    /// f32, or none once no part wants it and there is no tail.
    pub x: &'a mut Value,
    /// Q8, without tails, or none until some part wants it.
    pub q: &'a mut Value,
    /// Runs of a row that are multiplied; 1 is the row.
    pub runs: usize,
    /// Elements behind each run that are not.
    pub tail: usize,
}

/// How an operation uses a matrix, or a matrix for each expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Uses {
    /// Looks up rows, few of them.
    Rows(WeightId),
    /// Multiplies.
    Whole(WeightId),
}

/// One operation. Implementations are data; they hold no buffers.
pub trait Op: Debug + Send + Sync {
    /// The name, the same in files, kernels, tests and docs.
    fn name(&self) -> &'static str;

    /// Every connected value with its direction, in order, for the passes over a circuit to read and rewrite.
    fn ports(&mut self) -> Vec<(Port, &mut Value)>;

    /// Key/value pages it touches, for the order of operations.
    fn states(&self) -> Vec<(Port, StateId)> {
        Vec::new()
    }

    /// For a product with a weight: what the pass that picks formats connects.
    fn product(&mut self) -> Option<Product<'_>> {
        None
    }

    /// The weight it multiplies with or looks rows up in, where it has one; vectors are everywhere.
    fn weight(&self) -> Option<Uses> {
        None
    }

    /// Recurrent slots it carries forward, for the order of operations.
    fn slots(&self) -> Vec<SlotId> {
        Vec::new()
    }

    /// Whether this batch's work all falls to the leader, so that neighbours of the same kind need no barrier.
    fn solo(&self, _frame: &Frame<'_>) -> bool {
        false
    }

    /// Whether this batch gives it nothing to do, so that nobody waits for it.
    fn idle(&self, _frame: &Frame<'_>) -> bool {
        false
    }

    /// Checks the inputs and gives the shape of each output, in port order.
    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>>;

    /// The definition: plain loops in the order the mathematics is written, single thread.
    fn scalar(&self, frame: &Frame<'_>);

    /// The body every participant of a run calls; they share the work through `turn`. Helpers may call it when the work is done.
    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>);

    /// Queues the kernels that compute it on a GPU.
    fn launch(&self, _gpu: &Gpu<'_>) -> Result<()> {
        crate::bail!(Unsupported, "{}: has no GPU kernel", self.name())
    }

    /// Bytes of device memory that [`Op::launch`] uses between its kernels, for at most `rows` rows of `segments` sequences of `context`
    /// positions on a device of `processors` multiprocessors.
    fn gpu_scratch(&self, _rows: usize, _segments: usize, _context: usize, _processors: usize) -> usize {
        0
    }

    /// As [`Op::gpu_scratch`], for operations whose need depends on the width of values.
    fn gpu_scratch_of(&self, _width: &dyn Fn(Value) -> usize, rows: usize, segments: usize, context: usize, processors: usize) -> usize {
        self.gpu_scratch(rows, segments, context, processors)
    }

    /// The output that it can write as [`Kind::Prepared`] on a device, where its width is a multiple of [`PREPARED_COLUMNS`].
    fn prepares(&self) -> Option<Value> {
        None
    }

    /// A copy behind a fresh box.
    fn boxed(&self) -> Box<dyn Op>;

    /// For passes that look for one kind of operation.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// The parts of [`Op`] that read alike everywhere.
#[macro_export]
#[doc(hidden)]
macro_rules! op_common {
    ($name:literal) => {
        fn name(&self) -> &'static str {
            $name
        }
        fn boxed(&self) -> Box<dyn $crate::ops::Op> {
            Box::new(self.clone())
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    };
}

/// `solo`, `scalar` and `run` of an operation whose rows are computed one by one: `fn row(&self, frame, row, y: &mut [f32])` is both the
/// definition and the body. `$cost` weighs an element's work against a plain multiply-add.
#[macro_export]
#[doc(hidden)]
macro_rules! op_by_row {
    ($cost:literal) => {
        fn solo(&self, frame: &$crate::ops::Frame<'_>) -> bool {
            frame.rows(self.y) <= $crate::ops::row_grain(frame.slot(self.y).width * $cost)
        }
        #[allow(unsafe_code)]
        fn scalar(&self, frame: &$crate::ops::Frame<'_>) {
            let y = frame.output(self.y);
            for row in 0..y.rows() {
                // SAFETY: alone.
                self.row(frame, row, unsafe { y.row(row) });
            }
        }
        #[allow(unsafe_code)]
        fn run(&self, frame: &$crate::ops::Frame<'_>, turn: &$crate::ops::Turn<'_>) {
            let y = frame.output(self.y);
            // SAFETY: `each_row` gives a row to one worker.
            turn.each_row(y.rows(), y.width() * $cost, |row| self.row(frame, row, unsafe { y.row(row) }));
        }
    };
}

/// A worker's turn at one operation: the worker, the counter its operation shares work through, and when to leave off.
///
/// An operation that was left off is run again later and takes the pieces that are left; a helper that comes late runs operations
/// that are done. So whatever must happen once happens inside the pieces, and an operation has one loop over them.
pub struct Turn<'a> {
    /// The worker.
    pub worker: &'a Worker<'a>,
    /// Zero when the operation starts; belongs to this operation alone.
    counter: &'a AtomicUsize,
    pause: &'a Pause<'a>,
    worked: Cell<bool>,
    cut: Cell<bool>,
}

impl<'a> Turn<'a> {
    /// A turn at an operation whose pieces `counter` has counted so far.
    pub fn new(worker: &'a Worker<'a>, counter: &'a AtomicUsize, pause: &'a Pause<'a>) -> Turn<'a> {
        Turn { worker, counter, pause, worked: Cell::new(false), cut: Cell::new(false) }
    }

    /// Whether a piece was done.
    pub fn has_worked(&self) -> bool {
        self.worked.get()
    }

    /// Whether pieces were left for later.
    pub fn was_cut(&self) -> bool {
        self.cut.get()
    }

    /// Calls `f` with pieces of `0..total`, each on one worker, `grain` at a time, until none is left or the run leaves off. At
    /// least one piece is done in either case, so that a run gets on however little time it is given.
    pub fn pieces(&self, total: usize, grain: usize, mut f: impl FnMut(Range<usize>)) {
        let grain = grain.max(1);
        loop {
            // The first look keeps a counter from growing without end when idle workers come by again and again.
            if self.counter.load(Ordering::Relaxed) >= total {
                return;
            }
            let start = self.counter.fetch_add(grain, Ordering::Relaxed);
            if start >= total {
                return;
            }
            f(start..total.min(start.saturating_add(grain)));
            self.worked.set(true);
            if self.pause.due() || self.worker.is_called_away() {
                self.cut.set(self.counter.load(Ordering::Relaxed) < total);
                return;
            }
        }
    }

    /// Runs `f` over `0..total` in chunks of `grain`, each chunk on one worker. Work of one chunk stays on the
    /// leader: sharing it would cost more than it brings.
    pub fn each(&self, total: usize, grain: usize, mut f: impl FnMut(Range<usize>)) {
        if total > grain {
            self.pieces(total, grain, f);
        } else if self.worker.is_leader() && total > 0 {
            f(0..total);
            self.worked.set(true);
        }
    }

    /// Runs `f` for every row, in chunks of [`row_grain`].
    pub fn each_row(&self, rows: usize, width: usize, mut f: impl FnMut(usize)) {
        self.each(rows, row_grain(width), |range| range.for_each(&mut f));
    }
}

/// Rows of `width` elements that make a chunk worth sharing: about 2,000 elements.
pub fn row_grain(width: usize) -> usize {
    (2048 / width.max(1)).max(1)
}
