//! The CPU is looked at once; the result is a table of functions that everything else calls.
//!
//! The scalar table is the definition and runs anywhere. Faster tables compile the same text with more instructions enabled, so a table
//! differs from another at most in the last bits (a fused multiply-add rounds once, a plain one twice). Within one table bits depend on nothing
//! but the operands.
#![allow(unsafe_code)] // Calls functions that need an instruction set, after looking for it.

#[macro_use]
mod unroll;
pub mod attend;
mod attend_ahead;
mod attend_elements;
pub mod attend_q8;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod fill;
mod lane;
#[cfg(test)]
mod pairs_tests;
mod product;
mod quantize;
mod recurrence;
mod scalar;
pub mod stretch;
mod table;
#[cfg(test)]
mod tests;
mod vector;
#[cfg(test)]
mod vector_tests;

use std::sync::OnceLock;
pub use table::Table;
use table::table_for;

table_for!(on_scalar, super::scalar::Scalar, "scalar", super::product::product::<S>, super::table::never_fill);
#[cfg(target_arch = "x86_64")]
table_for!(on_avx2, super::avx2::Avx2, "avx2", super::product::narrow, super::fill::fill, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table_for!(
    on_avx512,
    super::avx512::Avx512,
    "avx512",
    super::product::product::<S>,
    super::fill::fill,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
);

#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Table = Table { name: "avx512bf16", pairs: Some(product::PAIRS), ..on_avx512::TABLE };

/// Every table that this processor can run, slowest first. The last may be slower than the one before it; see [`table`].
pub fn tables() -> Vec<&'static Table> {
    let mut found = vec![&on_scalar::STATIC];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni");
        if avx2 {
            found.push(&on_avx2::STATIC);
        }
        if avx2 && avx512 {
            found.push(&on_avx512::STATIC);
        }
        if avx2 && avx512 && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi") {
            found.push(&AVX512_BF16);
        }
    }
    found
}

/// Whether the bfloat16 dot instruction does twice the work of an f32 multiply-add in the same time. On AMD's processors it does; on the Intel ones
/// measured it does half of that work. A rule, not a measurement at run time, because the choice shows in the bits.
fn pairs_are_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The table in use: the fastest, or the one that `METRALE_SIMD` (`scalar`, `avx2`, `avx512`, `avx512bf16`) names if the processor can run it. Decided at
/// the first call and the same ever after, because a change in the middle would change bits.
pub fn table() -> &'static Table {
    static TABLE: OnceLock<&'static Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let found = tables();
        let wanted = std::env::var("METRALE_SIMD").unwrap_or_default();
        let fastest = found.iter().rev().find(|t| !t.has_pairs() || pairs_are_fast()).copied();
        found.iter().find(|t| t.name == wanted).copied().or(fastest).unwrap_or(found[0])
    })
}
