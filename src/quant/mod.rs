//! Storage formats of weights: what the bytes mean, one file per format.
//!
//! Every block format is described once, by `unpack`: integer codes and, per run of 16 or 32 elements, a scale and a
//! minimum, so that `w = scale * code - min`. Decoding follows from that definition, and the kernels that pack weights
//! for SIMD start from the same fields, so there is one place where a bit layout is written down.
//!
//! This is the scalar truth that tests trust; the fast paths live with the operations that use them.

mod fit;
mod iq4_nl;
mod mxfp4;
mod plain;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod six_bit;

use crate::error::Result;
use crate::tensor::DType;
use crate::{bail, ensure};

/// What this crate can do with one element type. Lengths given to the functions are whole blocks that fit each other;
/// [`decode`] and [`encode`] check that first.
pub struct Format {
    /// The element type.
    pub dtype: DType,
    /// Stored bytes to values.
    pub decode: fn(&[u8], &mut [f32]),
    /// Values to stored bytes, rounded to nearest. No search for the best scale: for synthetic weights and tests.
    pub encode: Option<fn(&[f32], &mut [u8])>,
    /// Fields of one block; `None` for plain types.
    pub unpack: Option<fn(&[u8], &mut Unpacked)>,
    /// Smallest and largest code that `unpack` yields; zeros for plain types.
    pub codes: (i8, i8),
    /// Elements that share a scale; 1 for plain types.
    pub sub_len: usize,
}

/// The fields of one block: element `i` is `scale[i / sub_len] * codes[i] - min[i / sub_len]`.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// Integer codes; the first `len` count. The range is [`Format::codes`]; IQ4_NL and MXFP4 hold the table's value.
    pub codes: [i8; 256],
    /// Scale of each run of `sub_len` elements.
    pub scale: [f32; 16],
    /// What is subtracted from each run; zero in symmetric formats.
    pub min: [f32; 16],
    /// Elements that share a scale: 16 or 32.
    pub sub_len: usize,
    /// Elements in the block: 32 or 256.
    pub len: usize,
}

/// A block format, described by the fields of one block.
trait Block {
    const DTYPE: DType;
    /// Elements that share a scale.
    const SUB_LEN: usize;
    /// Smallest and largest code.
    const CODES: (i8, i8);
    /// Fills `codes`, `scale` and `min` from `DTYPE.block_bytes()` bytes. `min` arrives as zeros.
    fn unpack(block: &[u8], out: &mut Unpacked);
    /// Writes all of `block` from `DTYPE.block_len()` values.
    fn encode(values: &[f32], block: &mut [u8]);
}

impl Unpacked {
    /// An empty block to unpack into.
    pub fn new() -> Self {
        Unpacked { codes: [0; 256], scale: [0.0; 16], min: [0.0; 16], sub_len: 32, len: 0 }
    }

    /// The block's values. `out` holds `len` elements.
    pub fn values(&self, out: &mut [f32]) {
        for (j, (values, codes)) in out.chunks_mut(self.sub_len).zip(self.codes.chunks(self.sub_len)).enumerate() {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = self.scale[j] * f32::from(code) - self.min[j];
            }
        }
    }
}

impl Default for Unpacked {
    fn default() -> Self {
        Self::new()
    }
}

/// What is known of an element type; `None` for those nobody decodes yet.
pub fn format(dtype: DType) -> Option<&'static Format> {
    FORMATS.iter().find(|f| f.dtype == dtype)
}

/// The values that 4-bit codes of a block type stand for, where those are no evenly spaced numbers.
pub fn table(dtype: DType) -> Option<[i8; 16]> {
    match dtype {
        DType::IQ4NL => Some(iq4_nl::TABLE),
        DType::MXFP4 => Some(mxfp4::TABLE),
        _ => None,
    }
}

/// Stored bytes to values: any whole number of blocks.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let format = known(dtype)?;
    check(dtype, bytes.len(), out.len())?;
    (format.decode)(bytes, out);
    Ok(())
}

/// Values to stored bytes: any whole number of blocks.
pub fn encode(dtype: DType, values: &[f32], bytes: &mut [u8]) -> Result<()> {
    let Some(encode) = known(dtype)?.encode else { bail!(Unsupported, "{dtype} is read only here, nothing writes it") };
    check(dtype, bytes.len(), values.len())?;
    encode(values, bytes);
    Ok(())
}

/// The fields of one block of a block format.
pub fn unpack(dtype: DType, block: &[u8], out: &mut Unpacked) -> Result<()> {
    let Some(unpack) = known(dtype)?.unpack else { bail!(InvalidArgument, "{dtype} has no blocks to unpack") };
    check(dtype, block.len(), dtype.block_len())?;
    unpack(block, out);
    Ok(())
}

fn known(dtype: DType) -> Result<&'static Format> {
    match format(dtype) {
        Some(format) => Ok(format),
        None => bail!(Unsupported, "{dtype} is not decoded by this build"),
    }
}

fn check(dtype: DType, bytes: usize, elements: usize) -> Result<()> {
    let Some(wanted) = dtype.bytes(elements) else {
        bail!(InvalidArgument, "{dtype}: {elements} elements are no whole number of blocks of {}", dtype.block_len());
    };
    ensure!(wanted == bytes, InvalidArgument, "{dtype}: {elements} elements take {wanted} bytes, {bytes} are given");
    Ok(())
}

/// Every format, one line each.
static FORMATS: [Format; 26] = [
    plain::F32,
    plain::F16,
    plain::BF16,
    plain::F64,
    plain::I64,
    plain::I32,
    plain::I16,
    plain::I8,
    plain::U8,
    plain::BOOL,
    plain::F8E4M3,
    plain::F8E5M2,
    plain::F8E8M0,
    plain::F4,
    blocks::<q8_0::Q8_0>(),
    blocks::<q4_0::Q4_0>(),
    blocks::<q4_1::Q4_1>(),
    blocks::<q5_0::Q5_0>(),
    blocks::<q5_1::Q5_1>(),
    blocks::<q2_k::Q2K>(),
    blocks::<q3_k::Q3K>(),
    blocks::<q4_k::Q4K>(),
    blocks::<q5_k::Q5K>(),
    blocks::<q6_k::Q6K>(),
    blocks::<iq4_nl::IQ4NL>(),
    blocks::<mxfp4::MXFP4>(),
];

const fn blocks<B: Block>() -> Format {
    Format {
        dtype: B::DTYPE,
        decode: decode_blocks::<B>,
        encode: Some(encode_blocks::<B>),
        unpack: Some(unpack_block::<B>),
        codes: B::CODES,
        sub_len: B::SUB_LEN,
    }
}

fn unpack_block<B: Block>(block: &[u8], out: &mut Unpacked) {
    out.len = B::DTYPE.block_len();
    out.sub_len = B::SUB_LEN;
    out.min = [0.0; 16];
    B::unpack(block, out);
}

fn decode_blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    let mut unpacked = Unpacked::new();
    for (block, values) in bytes.chunks_exact(B::DTYPE.block_bytes()).zip(out.chunks_exact_mut(B::DTYPE.block_len())) {
        unpack_block::<B>(block, &mut unpacked);
        unpacked.values(values);
    }
}

fn encode_blocks<B: Block>(values: &[f32], bytes: &mut [u8]) {
    for (values, block) in values.chunks_exact(B::DTYPE.block_len()).zip(bytes.chunks_exact_mut(B::DTYPE.block_bytes())) {
        B::encode(values, block);
    }
}

/// The f16 stored at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Stores `x` as f16 at `at` and gives back the value it became, so that codes are chosen for the scale a reader sees.
fn put_half(block: &mut [u8], at: usize, x: f32) -> f32 {
    let stored = half::f16::from_f32(x);
    block[at..at + 2].copy_from_slice(&stored.to_le_bytes());
    stored.to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name)).expect("fixture")
    }

    /// Numbers without a pattern, roughly normal, with a different size in each run of 16.
    fn noise(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|i| (next() + next() + next()) * (1.0 + (i / 16 % 7) as f32)).collect()
    }

    #[test]
    fn decoding_agrees_with_another_implementation() {
        let mut seen = 0;
        for format in &FORMATS {
            let name = format.dtype.name().to_lowercase();
            if format.sub_len == 1 && !matches!(format.dtype, DType::F16 | DType::BF16) {
                continue;
            }
            let bytes = fixture(&format!("{name}.bin"));
            let expected: Vec<f32> =
                fixture(&format!("{name}.f32")).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let mut found = vec![0.0; expected.len()];
            decode(format.dtype, &bytes, &mut found).unwrap();
            for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{name} element {i}: {a} but expected {b}");
            }
            seen += 1;
        }
        assert_eq!(seen, 14);
    }

    #[test]
    fn unpacked_fields_give_the_decoded_values_and_stay_in_range() {
        let mut seen = 0;
        for format in FORMATS.iter().filter(|f| f.unpack.is_some()) {
            let bytes = fixture(&format!("{}.bin", format.dtype.name().to_lowercase()));
            let (block_bytes, block_len) = (format.dtype.block_bytes(), format.dtype.block_len());
            let mut all = vec![0.0; bytes.len() / block_bytes * block_len];
            decode(format.dtype, &bytes, &mut all).unwrap();
            let mut fields = Unpacked::new();
            for (block, values) in bytes.chunks_exact(block_bytes).zip(all.chunks_exact(block_len)) {
                unpack(format.dtype, block, &mut fields).unwrap();
                assert_eq!((fields.len, fields.sub_len), (block_len, format.sub_len));
                for i in 0..block_len {
                    assert!((format.codes.0..=format.codes.1).contains(&fields.codes[i]), "{} code {}", format.dtype, fields.codes[i]);
                    let j = i / fields.sub_len;
                    assert_eq!(fields.scale[j] * f32::from(fields.codes[i]) - fields.min[j], values[i]);
                }
            }
            seen += 1;
        }
        assert_eq!(seen, 12);
    }

    /// Relative error that a step of the format explains; ggml's own search is up to a third better at 2 and 3 bits.
    fn tolerance(dtype: DType) -> f64 {
        match dtype {
            DType::F32 => 0.0,
            DType::F16 => 5e-4,
            DType::BF16 => 4e-3,
            DType::Q8_0 => 8e-3,
            DType::Q6K => 3e-2,
            DType::Q5_0 | DType::Q5_1 | DType::Q5K => 6e-2,
            DType::Q4_0 | DType::Q4_1 | DType::Q4K | DType::IQ4NL | DType::MXFP4 => 0.14,
            DType::Q3K => 0.27,
            DType::Q2K => 0.45,
            other => panic!("{other} has an encoder and needs a tolerance"),
        }
    }

    #[test]
    fn encoding_keeps_values_within_a_step() {
        for format in FORMATS.iter().filter(|f| f.encode.is_some()) {
            let values = noise(2048, 7);
            let mut bytes = vec![0; format.dtype.bytes(values.len()).unwrap()];
            encode(format.dtype, &values, &mut bytes).unwrap();
            let mut back = vec![0.0; values.len()];
            decode(format.dtype, &bytes, &mut back).unwrap();
            let square = |x: f64| x * x;
            let error: f64 = values.iter().zip(&back).map(|(a, b)| square(f64::from(a - b))).sum();
            let size: f64 = values.iter().map(|a| square(f64::from(*a))).sum();
            let relative = (error / size).sqrt();
            assert!(relative <= tolerance(format.dtype), "{}: relative error {relative}", format.dtype);
        }
    }

    #[test]
    fn encoding_odd_values_stays_finite_where_the_input_is() {
        for format in FORMATS.iter().filter(|f| f.encode.is_some()) {
            for value in [0.0f32, -0.0, 1e-30, 1e-6, 1.0, -1.0, 3e4] {
                let mut values = vec![value; 256];
                values[17] = 0.0;
                let mut bytes = vec![0; format.dtype.bytes(256).unwrap()];
                encode(format.dtype, &values, &mut bytes).unwrap();
                let mut back = vec![f32::NAN; 256];
                decode(format.dtype, &bytes, &mut back).unwrap();
                assert!(back.iter().all(|x| x.is_finite()), "{} of {value}", format.dtype);
            }
            // Not a number and infinities have no place in a block; they must not panic.
            let mut bytes = vec![0; format.dtype.bytes(256).unwrap()];
            let odd: Vec<f32> = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX].into_iter().cycle().take(256).collect();
            encode(format.dtype, &odd, &mut bytes).unwrap();
        }
    }

    #[test]
    fn plain_types_decode_their_numbers() {
        let mut out = [0.0; 2];
        for (dtype, bytes, expected) in [
            (DType::F32, [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat(), [1.5, -2.0]),
            (DType::F64, [1.5f64.to_le_bytes(), (-2.0f64).to_le_bytes()].concat(), [1.5, -2.0]),
            (DType::I64, [7i64.to_le_bytes(), (-9i64).to_le_bytes()].concat(), [7.0, -9.0]),
            (DType::I32, [7i32.to_le_bytes(), (-9i32).to_le_bytes()].concat(), [7.0, -9.0]),
            (DType::I16, [7i16.to_le_bytes(), (-9i16).to_le_bytes()].concat(), [7.0, -9.0]),
            (DType::I8, vec![7, 0xF7], [7.0, -9.0]),
            (DType::U8, vec![7, 0xF7], [7.0, 247.0]),
            (DType::Bool, vec![0, 1], [0.0, 1.0]),
            (DType::F8E4M3, vec![0x38, 0xFE], [1.0, -448.0]),
            (DType::F8E5M2, vec![0x3C, 0xFB], [1.0, -57344.0]),
            (DType::F8E8M0, vec![127, 130], [1.0, 8.0]),
            (DType::F8E8M0, vec![0, 254], [2f32.powi(-127), 2f32.powi(127)]),
            (DType::F4, vec![0xD3], [1.5, -3.0]),
            (DType::F4, vec![0x97], [6.0, -0.5]),
        ] {
            decode(dtype, &bytes, &mut out).unwrap();
            assert_eq!(out, expected, "{dtype}");
        }
        // The smallest subnormal and the only NaN of e4m3, which has no infinity.
        decode(DType::F8E4M3, &[0x01, 0x7F], &mut out).unwrap();
        assert!(out[0] == 2f32.powi(-9) && out[1].is_nan());
        decode(DType::F8E5M2, &[0x01, 0x7C], &mut out).unwrap();
        assert!(out[0] == 2f32.powi(-16) && out[1] == f32::INFINITY);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let mut out = vec![0.0; 256];
        assert_eq!(decode(DType::Q4K, &[0; 143], &mut out).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(decode(DType::Q4K, &[0; 144], &mut out[..255]).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(encode(DType::I8, &out, &mut [0; 256]).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(unpack(DType::F32, &[0; 4], &mut Unpacked::new()).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(unpack(DType::Q8_0, &[0; 33], &mut Unpacked::new()).unwrap_err().kind(), Kind::InvalidArgument);
    }
}
