//! The table of kernels: safe methods that check lengths, in front of functions compiled for one instruction set.
#![allow(unsafe_code)] // Calls functions that need an instruction set; the table exists only where it does.

use super::super::activations::{Activations, Epilogue, Q8Block};
use super::super::pack::{LANES, Layout, Packed};
use super::attend::{Attend, PAGE, QUERIES, VALUE_DIM};
use super::product::Product;
use super::stretch::{Join, STRETCHES};
use crate::tensor::DType;
use std::ops::Range;

/// Kernels for one instruction set. Get it from [`table`](super::table).
///
/// Methods panic on lengths that do not match, which is a defect of the caller; the pool turns it into an error.
pub struct Table {
    pub(super) name: &'static str,
    pub(super) matmul: unsafe fn(&Product<'_>),
    pub(super) quantize: unsafe fn(&[f32], &mut [Q8Block]),
    pub(super) attend: unsafe fn(&Attend<'_>),
    pub(super) join: unsafe fn(&Join),
    pub(super) pairs: Option<PairFunctions>,
    pub(super) row: RowFunctions,
    pub(super) fill: FillFunction,
}

/// What [`Table::fill`] calls.
pub(super) type FillFunction = unsafe fn(DType, Layout, usize, &[&[u8]; LANES], &mut [u8]) -> bool;

/// The scalar form: left to the definition.
pub(super) unsafe fn never_fill(_: DType, _: Layout, _: usize, _: &[&[u8]; LANES], _: &mut [u8]) -> bool {
    false
}

/// Products of bfloat16 and 8-bit weights with activations rounded to bfloat16.
#[derive(Clone, Copy)]
pub(super) struct PairFunctions {
    pub(super) matmul: unsafe fn(&Product<'_>),
    pub(super) round: unsafe fn(&[f32], &mut [u32]),
}

impl Table {
    /// Whether [`Layout::Bf16`](super::super::pack::Layout::Bf16) and [`Layout::F8`](super::super::pack::Layout::F8) also meet
    /// [`Activations::Pairs`], faster.
    pub fn has_pairs(&self) -> bool {
        self.pairs.is_some()
    }

    /// Rounds a row to the nearest bfloat16, ties to even, two elements to a word; subnormals become zero. Panics on a table without pairs.
    pub fn round_row(&self, x: &[f32], out: &mut [u32]) {
        assert!(x.len().div_ceil(2) == out.len(), "{} elements do not fill {} pairs", x.len(), out.len());
        let pairs = self.pairs.expect("callers ask for pairs first");
        // SAFETY: the table exists only where its instructions do.
        unsafe { (pairs.round)(x, out) }
    }

    /// `scalar`, `avx2`, `avx512` or `avx512bf16`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Attention of queries over pages.
    ///
    /// # Safety
    /// Queries are good for `key_dim` reads and `value_dim` writes that nobody else touches; pages are good for the head's keys and values at
    /// every position the queries see, and nobody writes those now.
    pub unsafe fn attend(&self, a: &Attend<'_>) {
        assert!(
            (1..=QUERIES).contains(&a.queries.len()) && a.value_dim <= VALUE_DIM,
            "{} queries, values of {}",
            a.queries.len(),
            a.value_dim
        );
        assert!(a.queries.iter().all(|q| q.first <= q.last && q.last / PAGE < a.pages.len()), "a query sees past the last page");
        // SAFETY: the table exists only where its instructions do; the rest is the caller's promise.
        unsafe { (self.attend)(a) }
    }

    /// Merges the parts of a query, with the bits of [`Table::attend`] over all of it.
    ///
    /// # Safety
    /// `parts` and `y` are good for what [`Join`] says.
    pub unsafe fn join(&self, join: &Join) {
        assert!((1..=STRETCHES).contains(&join.count), "{} parts", join.count);
        // SAFETY: the table exists only where its instructions do; the rest is the caller's promise.
        unsafe { (self.join)(join) }
    }

    /// Fills one panel from 16 rows of `cols` elements as a file stores them, with the bytes that `Layout::fill_*` gives. Whether it did:
    /// formats without a fast way, and what is unusual, are left to those, and the panel may then hold anything.
    pub fn fill(&self, dtype: DType, layout: Layout, cols: usize, rows: &[&[u8]; LANES], panel: &mut [u8]) -> bool {
        let Some(bytes) = dtype.bytes(cols) else { return false };
        if layout.panel_bytes(cols) != Some(panel.len()) || rows.iter().any(|row| row.len() != bytes) {
            return false;
        }
        // SAFETY: the table exists only where its instructions do, and the lengths were just compared.
        unsafe { (self.fill)(dtype, layout, cols, rows, panel) }
    }

    /// Quantises a row (a multiple of 32 elements) into `x.len() / 32` blocks; nearest code, ties to even.
    pub fn quantize_row(&self, x: &[f32], out: &mut [Q8Block]) {
        assert!(x.len() == out.len() * 32, "{} elements do not fill {} blocks", x.len(), out.len());
        // SAFETY: the table exists only where its instructions do.
        unsafe { (self.quantize)(x, out) }
    }

    /// Computes `y[row][panel * 16 ..]` for the given panels and rows: `y = w x + bias`, or `y += ..`. Row `r` of `y` starts at `r * ld`.
    ///
    /// Each element is one chain of multiply-adds over ascending k: the bits do not depend on how panels and rows are cut.
    ///
    /// # Safety
    /// For every row in `rows`, `y` is good for writes (and with `add` for reads) of the features of `panels`, and nobody else
    /// touches those elements during the call.
    pub unsafe fn matmul(
        &self,
        w: &Packed,
        panels: Range<usize>,
        acts: &Activations<'_>,
        rows: Range<usize>,
        epilogue: &Epilogue<'_>,
        y: *mut f32,
        ld: usize,
    ) {
        if panels.is_empty() || rows.is_empty() {
            return;
        }
        assert!(panels.end <= w.panels(), "panels {panels:?} of {}", w.panels());
        let (len, stride, width) = match acts {
            Activations::F32 { x, stride } => (x.len(), *stride, w.cols()),
            Activations::Q8 { blocks, stride } => (blocks.len(), *stride, w.cols() / 32),
            Activations::Pairs { x, stride } => (x.len(), *stride, w.cols().div_ceil(2)),
        };
        let matmul = match acts {
            Activations::Pairs { .. } => {
                assert!(matches!(w.layout(), Layout::Bf16 | Layout::F8), "pairs and {:?}", w.layout());
                self.pairs.expect("callers ask for pairs first").matmul
            }
            _ => self.matmul,
        };
        assert_eq!(w.layout().is_integer(), matches!(acts, Activations::Q8 { .. }), "{:?} and the other kind of activations", w.layout());
        let last = (rows.end - 1).checked_mul(stride).and_then(|start| start.checked_add(width));
        assert!(last.is_some_and(|end| end <= len), "rows {rows:?} of {width} every {stride} exceed {len} activations");
        assert!(epilogue.bias.is_none_or(|b| b.len() >= w.rows()), "a bias for fewer than {} features", w.rows());
        let (own, late) = w.places();
        let product = Product {
            layout: w.layout(),
            weights: own.data.as_ptr(),
            panel_bytes: w.panel_bytes(),
            cols: w.cols(),
            features: w.rows(),
            panels,
            acts: *acts,
            rows,
            bias: epilogue.bias,
            add: epilogue.add,
            y,
            y_stride: ld,
        };
        let Some(late) = late else {
            // SAFETY: the table exists only where its instructions do; weights, activations and bias were checked above, the outputs are
            // the caller's promise.
            return unsafe { matmul(&product) };
        };
        late.each(&own, product.panels.clone(), |panels, apart| {
            let product = match apart {
                None => Product { panels, rows: product.rows.clone(), ..product },
                Some(buffer) => {
                    assert!(panels.len() * own.panel_bytes <= buffer.len(), "a buffer for {panels:?}");
                    // The same outputs, counted from the first of these panels on.
                    let first = panels.start * LANES;
                    Product {
                        weights: buffer.as_ptr(),
                        panels: 0..panels.len(),
                        features: product.features - first,
                        rows: product.rows.clone(),
                        bias: product.bias.map(|bias| &bias[first..]),
                        // SAFETY: the outputs of these panels are the caller's promise.
                        y: unsafe { product.y.add(first) },
                        ..product
                    }
                }
            };
            // SAFETY: as above; these panels are filled.
            unsafe { matmul(&product) }
        });
    }

    /// The same into a slice that holds all rows, for callers that share nothing.
    pub fn matmul_into(
        &self,
        w: &Packed,
        panels: Range<usize>,
        acts: &Activations<'_>,
        rows: Range<usize>,
        epilogue: &Epilogue<'_>,
        y: &mut [f32],
        ld: usize,
    ) {
        if panels.is_empty() || rows.is_empty() {
            return;
        }
        let end = (rows.end - 1).checked_mul(ld).and_then(|start| start.checked_add(w.rows().min(panels.end.saturating_mul(LANES))));
        assert!(end.is_some_and(|end| end <= y.len()), "rows {rows:?} every {ld} exceed {} outputs", y.len());
        // SAFETY: the slice is borrowed alone and was just checked to hold the last row.
        unsafe { self.matmul(w, panels, acts, rows, epilogue, y.as_mut_ptr(), ld) }
    }
}

/// The row functions, given to the macro `$use` together with `$context`. `[a b]` after a signature lists arguments of equal lengths; the body
/// is compiled where `S` names the lanes.
macro_rules! row_functions {
    ($use:ident $context:tt) => {
        $use! {
            $context
            /// Sum of products.
            fn dot(a: &[f32], b: &[f32]) -> f32 [a b] = vector::dot::<S, _>(a, b);
            /// Sum of products with bfloat16.
            fn dot_bf16(a: &[f32], b: &[u16]) -> f32 [a b] = vector::dot::<S, _>(a, as_b16(b));
            /// Sum of products with half floats.
            fn dot_f16(a: &[f32], b: &[u16]) -> f32 [a b] = vector::dot::<S, _>(a, as_h16(b));
            /// Sum of squares.
            fn sum_squares(x: &[f32]) -> f32 [] = vector::dot::<S, _>(x, x);
            /// `y += a * x`
            fn axpy(a: f32, x: &[f32], y: &mut [f32]) [x y] = vector::axpy::<S, _>(a, x, y);
            /// `y += a * x` for bfloat16 `x`.
            fn axpy_bf16(a: f32, x: &[u16], y: &mut [f32]) [x y] = vector::axpy::<S, _>(a, as_b16(x), y);
            /// `y += a * x` for half floats `x`.
            fn axpy_f16(a: f32, x: &[u16], y: &mut [f32]) [x y] = vector::axpy::<S, _>(a, as_h16(x), y);
            /// `y += x`
            fn add(x: &[f32], y: &mut [f32]) [x y] = vector::add::<S>(x, y);
            /// `y[c] += sum_j w[c][j] x[j][c]`; each of `x` is as long as `y`.
            fn taps(w: &[f32], x: &[&[f32]], y: &mut [f32]) [] = vector::taps::<S>(w, x, y);
            /// `x *= a`
            fn scale(a: f32, x: &mut [f32]) [] = vector::scale(a, x);
            /// `out = x / sqrt(mean(x^2) + eps) * w`
            fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) [x w out] =
                vector::rms_norm::<S>(x, w, eps, out);
            /// `out = silu(gate) * up`
            fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) [gate up out] = vector::silu_mul::<S>(gate, up, out);
            /// `out = sigmoid(gate) * up`
            fn sigmoid_mul(gate: &[f32], up: &[f32], out: &mut [f32]) [gate up out] = vector::sigmoid_mul::<S>(gate, up, out);
            /// `out = gelu(gate) * up`, the tanh form of gelu.
            fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) [gate up out] = vector::gelu_tanh_mul::<S>(gate, up, out);
            /// `x = exp(x)`: within 2 units in the last place, 0 below the smallest normal number, NaN stays.
            fn exp(x: &mut [f32]) [] = vector::exp_row::<S>(x);
            /// `x = ln(1 + exp(x))`
            fn softplus(x: &mut [f32]) [] = vector::softplus_row::<S>(x);
            /// `x = cap * tanh(x / cap)`
            fn softcap(cap: f32, x: &mut [f32]) [] = vector::softcap::<S>(cap, x);
            /// The largest element; NaN if there is one, minus infinity for none.
            fn max(x: &[f32]) -> f32 [] = vector::max(x);
            /// Replaces `x` by `exp(x - shift)` and returns the sum.
            fn exp_sum(shift: f32, x: &mut [f32]) -> f32 [] = vector::exp_sum::<S>(shift, x);
            /// `S <- decay S`, `out = S^T k`; `decay` has one factor, or one for each key.
            fn decay_read(state: &mut [[f32; 16]], decay: &[f32], k: &[f32], out: &mut [f32; 16]) [state k] =
                recurrence::decay_read(state, decay, k, out);
            /// `S <- S + k delta^T`, `out = S^T q`
            fn learn_read(state: &mut [[f32; 16]], delta: &[f32; 16], k: &[f32], q: &[f32], out: &mut [f32; 16]) [state k q] =
                recurrence::learn_read(state, delta, k, q, out);
            /// `S <- decay S + b write^T`, `out = S^T c`
            fn scan_read(state: &mut [[f32; 16]], decay: f32, write: &[f32; 16], b: &[f32], c: &[f32], out: &mut [f32; 16]) [state b c] =
                recurrence::scan_read(state, decay, write, b, c, out);
            /// bfloat16 to f32.
            fn from_bf16(x: &[u16], out: &mut [f32]) [x out] = vector::widen::<S, _>(as_b16(x), out);
            /// Half floats to f32.
            fn from_f16(x: &[u16], out: &mut [f32]) [x out] = vector::widen::<S, _>(as_h16(x), out);
            /// f32 to the nearest bfloat16, ties to even.
            fn to_bf16(x: &[f32], out: &mut [u16]) [x out] = vector::to_bf16(x, out);
            /// f32 to the nearest half float, ties to even.
            fn to_f16(x: &[f32], out: &mut [u16]) [x out] = vector::to_f16::<S>(x, out);
        }
    };
}
pub(super) use row_functions;

/// A struct with a field for each row function, and a checked method of `Table` around it.
macro_rules! declare {
    ([] $($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)? [$($first:ident $($other:ident)*)?] = $body:expr;)+) => {
        /// One function per row operation.
        pub(super) struct RowFunctions {
            $(pub(super) $name: unsafe fn($($type),*) $(-> $ret)?,)+
        }

        impl Table {
            $($(#[$doc])*
            #[inline]
            pub fn $name(&self, $($arg: $type),*) $(-> $ret)? {
                $($(assert_eq!($first.len(), $other.len(), "lengths of {} and {}", stringify!($first), stringify!($other));)*)?
                // SAFETY: the table exists only where its instructions do, and lengths are equal where they must be.
                unsafe { (self.row.$name)($($arg),*) }
            })+
        }
    };
}
row_functions!(declare []);

/// The row functions with an instruction set enabled, and their struct.
macro_rules! compile {
    ($features:tt $($(#[$doc:meta])* fn $name:ident $args:tt $(-> $ret:ty)? [$($equal:tt)*] = $body:expr;)+) => {
        $(compile_one!($features $name $args [$($ret)?] $body);)+
        const ROW: RowFunctions = RowFunctions { $($name),+ };
    };
}
pub(super) use compile;

macro_rules! compile_one {
    ([$($features:literal)?] $name:ident($($arg:ident: $type:ty),*) [$($ret:ty)?] $body:expr) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $name($($arg: $type),*) $(-> $ret)? {
            // SAFETY: the features are enabled here, and `Table` has checked the lengths.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    };
}
pub(super) use compile_one;

/// Makes the module `$module` with the table for the lanes `$lanes` and the products of `$matmul`, compiled with `$features` enabled.
macro_rules! table_for {
    ($module:ident, $lanes:ty, $name:literal, $matmul:expr, $fill:path $(, $features:literal)?) => {
        mod $module {
            use super::super::activations::Q8Block;
            use super::table::{RowFunctions, Table, compile, compile_one, row_functions};
            use super::vector::{self, as_b16, as_h16};
            use super::{attend, quantize, recurrence, stretch};

            type S = $lanes;
            row_functions!(compile [$($features)?]);

            $(#[target_feature(enable = $features)])?
            unsafe fn quantize_row(x: &[f32], out: &mut [Q8Block]) {
                // SAFETY: the features are enabled here.
                #[allow(unused_unsafe)]
                unsafe {
                    quantize::row::<S>(x, out)
                }
            }

            pub(super) const TABLE: Table = Table {
                name: $name,
                attend: attend::attend::<S>,
                join: stretch::join::<S>,
                matmul: $matmul,
                quantize: quantize_row,
                pairs: None,
                row: ROW,
                fill: $fill,
            };
            pub(super) static STATIC: Table = TABLE;
        }
    };
}
pub(super) use table_for;
