//! The CPU is looked at once; the result is a table of functions that everything else calls.
//!
//! The scalar table is the definition and runs anywhere. Faster tables compile the same text with more instructions enabled, so a table
//! differs from another at most in the last bits (a fused multiply-add rounds once, a plain one twice). Within one table bits depend on nothing
//! but the operands.
#![allow(unsafe_code)] // Calls functions that need an instruction set, after looking for it.

pub mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod fill;
mod lane;
mod product;
mod quantize;
mod recurrence;
mod scalar;
mod table;
#[cfg(test)]
mod tests;
mod vector;
#[cfg(test)]
mod vector_tests;

use std::sync::OnceLock;
pub use table::Table;
use table::table_for;

table_for!(on_scalar, super::scalar::Scalar, "scalar", super::table::never_fill);
#[cfg(target_arch = "x86_64")]
table_for!(on_avx2, super::avx2::Avx2, "avx2", super::fill::fill, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table_for!(on_avx512, super::avx512::Avx512, "avx512", super::fill::fill, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");

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
