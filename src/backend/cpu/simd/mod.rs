//! The CPU is looked at once; the result is a table of functions that everything else calls.
//!
//! The scalar table is the definition and runs anywhere. Faster tables compile the same text with more instructions enabled, so a table
//! differs from another at most in the last bits (a fused multiply-add rounds once, a plain one twice). Within one table bits depend on nothing
//! but the operands.
#![allow(unsafe_code)] // Calls functions that need an instruction set, after looking for it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod lane;
mod product;
mod quantize;
mod scalar;
#[cfg(test)]
mod tests;

use super::activations::{Activations, Epilogue, Q8Block};
use super::pack::{LANES, Packed};
use product::Product;
use std::ops::Range;
use std::sync::OnceLock;

/// Kernels for one instruction set.
pub struct Table {
    name: &'static str,
    matmul: unsafe fn(&Product<'_>),
    quantize: unsafe fn(&[f32], &mut [Q8Block]),
}

impl Table {
    /// `scalar`, `avx2` or `avx512`.
    pub fn name(&self) -> &'static str {
        self.name
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
        };
        assert_eq!(w.layout().is_integer(), matches!(acts, Activations::Q8 { .. }), "{:?} and the other kind of activations", w.layout());
        let last = (rows.end - 1).checked_mul(stride).and_then(|start| start.checked_add(width));
        assert!(last.is_some_and(|end| end <= len), "rows {rows:?} of {width} every {stride} exceed {len} activations");
        assert!(epilogue.bias.is_none_or(|b| b.len() >= w.rows()), "a bias for fewer than {} features", w.rows());
        let product = Product {
            layout: w.layout(),
            weights: w.data().as_ptr(),
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
        // SAFETY: the table exists only where its instructions do; weights, activations and bias were checked above, the outputs are
        // the caller's promise.
        unsafe { (self.matmul)(&product) }
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

/// Compiles the kernels once with `$features` enabled and makes their table.
macro_rules! instruction_set {
    ($module:ident, $lanes:ty, $fused:literal, $name:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            unsafe fn matmul(p: &Product<'_>) {
                // SAFETY: this function has the features of the lanes; the rest is the caller's promise.
                unsafe { product::product::<$lanes>(p) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn quantize(x: &[f32], out: &mut [Q8Block]) {
                quantize::row(x, out)
            }

            pub(super) static TABLE: Table = Table { name: $name, matmul, quantize };
        }
    };
}

instruction_set!(on_scalar, scalar::Scalar, false, "scalar");
#[cfg(target_arch = "x86_64")]
instruction_set!(on_avx2, avx2::Avx2, true, "avx2", "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
instruction_set!(on_avx512, avx512::Avx512, true, "avx512", "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");

/// Every table that this processor can run, slowest first.
pub fn tables() -> Vec<&'static Table> {
    let mut found = vec![&on_scalar::TABLE];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni");
        if avx2 {
            found.push(&on_avx2::TABLE);
        }
        if avx2 && avx512 {
            found.push(&on_avx512::TABLE);
        }
    }
    found
}

/// The table in use: the fastest, or the one that `METRALE_SIMD` (`scalar`, `avx2`, `avx512`) names if the processor can run it. Decided at the
/// first call and the same ever after, because a change in the middle would change bits.
pub fn table() -> &'static Table {
    static TABLE: OnceLock<&'static Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let found = tables();
        let wanted = std::env::var("METRALE_SIMD").unwrap_or_default();
        let fastest = found[found.len() - 1];
        found.into_iter().find(|t| t.name == wanted).unwrap_or(fastest)
    })
}
