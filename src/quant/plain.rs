//! Types that store each element by itself: floats of all widths and integers.

use super::Format;
use crate::tensor::DType;

/// A plain format out of its element reader, and its writer where there is one.
macro_rules! plain {
    ($dtype:ident, $bytes:literal, $read:expr) => {
        plain!(@ $dtype, $bytes, $read, None)
    };
    ($dtype:ident, $bytes:literal, $read:expr, $write:expr) => {
        plain!(@ $dtype, $bytes, $read, Some(|values, bytes| {
            let write: fn(f32) -> [u8; $bytes] = $write;
            for (value, element) in values.iter().zip(bytes.chunks_exact_mut($bytes)) {
                element.copy_from_slice(&write(*value));
            }
        }))
    };
    (@ $dtype:ident, $bytes:literal, $read:expr, $encode:expr) => {
        Format {
            dtype: DType::$dtype,
            decode: |bytes, out| {
                let read: fn([u8; $bytes]) -> f32 = $read;
                let (elements, _) = bytes.as_chunks::<$bytes>();
                for (element, value) in elements.iter().zip(out) {
                    *value = read(*element);
                }
            },
            encode: $encode,
            unpack: None,
            codes: (0, 0),
            sub_len: 1,
        }
    };
}

pub(super) const F32: Format = plain!(F32, 4, f32::from_le_bytes, f32::to_le_bytes);
pub(super) const F16: Format = plain!(F16, 2, |b| half::f16::from_le_bytes(b).to_f32(), |x| half::f16::from_f32(x).to_le_bytes());
pub(super) const BF16: Format = plain!(BF16, 2, |b| half::bf16::from_le_bytes(b).to_f32(), |x| half::bf16::from_f32(x).to_le_bytes());
pub(super) const F64: Format = plain!(F64, 8, |b| f64::from_le_bytes(b) as f32);
pub(super) const I64: Format = plain!(I64, 8, |b| i64::from_le_bytes(b) as f32);
pub(super) const I32: Format = plain!(I32, 4, |b| i32::from_le_bytes(b) as f32);
pub(super) const I16: Format = plain!(I16, 2, |b| f32::from(i16::from_le_bytes(b)));
pub(super) const I8: Format = plain!(I8, 1, |b| f32::from(i8::from_le_bytes(b)));
pub(super) const U8: Format = plain!(U8, 1, |b| f32::from(b[0]));
pub(super) const BOOL: Format = plain!(Bool, 1, |b| f32::from(u8::from(b[0] != 0)));
pub(super) const F8E4M3: Format = plain!(F8E4M3, 1, |b| e4m3(b[0]));
pub(super) const F8E5M2: Format = plain!(F8E5M2, 1, |b| half::f16::from_bits(u16::from(b[0]) << 8).to_f32());
pub(super) const F8E8M0: Format = plain!(F8E8M0, 1, |b| e8m0(b[0]));

/// Two E2M1 codes in a byte, the first in the low half.
pub(super) const F4: Format = Format {
    dtype: DType::F4,
    decode: |bytes, out| {
        for (byte, pair) in bytes.iter().zip(out.chunks_mut(2)) {
            pair.iter_mut().zip([byte & 15, byte >> 4]).for_each(|(v, code)| *v = e2m1(code));
        }
    },
    encode: None,
    unpack: None,
    codes: (0, 0),
    sub_len: 1,
};

/// 1 sign, 2 exponent (bias 1), 1 mantissa bit; no infinity and no NaN.
fn e2m1(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// An exponent alone: `2^(byte - 127)`, 255 is NaN. The smallest is subnormal in f32.
fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, all ones is NaN ("fn" variant).
fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 != 0 { -magnitude } else { magnitude }
}
