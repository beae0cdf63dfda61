//! Quantised safetensors: every scheme's rows against sums written out here from the published layouts, the integer codes
//! against the rows, and files with a piece missing or misshapen against the error that names it.

mod support;

use half::bf16;
use metrale::error::Kind;
use metrale::weights::{Checkpoint, Form, Stored};
use serde_json::{Value, json};
use support::{Random, Scratch, fixtures};

/// A tensor to be written: name, type, shape, bytes.
type Tensor = (&'static str, &'static str, Vec<usize>, Vec<u8>);

fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut entries, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        entries.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(entries).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn open(name: &str, quantization: &Value, tensors: &[Tensor]) -> (Scratch, Checkpoint) {
    let scratch = Scratch::new(name);
    scratch.file("config.json", json!({"model_type": "x", "quantization_config": quantization}).to_string());
    scratch.file("model.safetensors", safetensors(tensors));
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    (scratch, checkpoint)
}

/// Bytes and the numbers they stand for.
struct Numbers {
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn numbers<const N: usize>(n: usize, mut make: impl FnMut(usize) -> (f32, [u8; N])) -> Numbers {
    let all: Vec<(f32, [u8; N])> = (0..n).map(&mut make).collect();
    Numbers { bytes: all.iter().flat_map(|(_, b)| *b).collect(), values: all.iter().map(|(v, _)| *v).collect() }
}

/// Scales between 0.01 and 0.1.
fn scales_bf16(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let half = bf16::from_f32(0.01 + random.below(1000) as f32 * 9e-5);
        (half.to_f32(), half.to_le_bytes())
    })
}

fn scales_f32(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let value = 0.01 + random.below(1000) as f32 * 9e-5;
        (value, value.to_le_bytes())
    })
}

/// Exponents around 1.
fn exponents(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let byte = 120 + random.below(9) as u8;
        (2f32.powi(i32::from(byte) - 127), [byte])
    })
}

/// Finite e4m3: sign, four bits of exponent (bias 7), three of mantissa.
fn e4m3(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let byte = loop {
            let byte = random.below(256) as u8;
            if byte & 0x7f != 0x7f {
                break byte;
            }
        };
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
        let magnitude = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
        (if byte & 0x80 == 0 { magnitude } else { -magnitude }, [byte])
    })
}

/// Positive e4m3 scales.
fn scales_e4m3(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let byte = 0x30 + random.below(16) as u8;
        ((1.0 + f32::from(byte & 7) / 8.0) * 2f32.powi(i32::from(byte >> 3) - 7), [byte])
    })
}

/// Pairs of E2M1 codes, the first in the low half.
fn e2m1(n: usize, random: &mut Random) -> Numbers {
    const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let codes: Vec<usize> = (0..n).map(|_| random.below(16)).collect();
    let bytes = codes.chunks(2).map(|pair| (pair[0] | pair[1] << 4) as u8).collect();
    Numbers { bytes, values: codes.iter().map(|c| VALUES[*c]).collect() }
}

/// Rows of signed codes of `bits` bits, as words with the lowest first.
fn words(rows: usize, cols: usize, bits: u32, random: &mut Random) -> Numbers {
    let (per, half) = (32 / bits as usize, 1i64 << (bits - 1));
    let codes: Vec<i64> = (0..rows * cols).map(|_| random.below(2 * half as usize) as i64 - half).collect();
    let word = |codes: &[i64]| codes.iter().enumerate().fold(0u32, |w, (i, c)| w | ((c + half) as u32) << (i as u32 * bits));
    let bytes = codes.chunks(cols).flat_map(|row| row.chunks(per).map(word).collect::<Vec<_>>()).flat_map(u32::to_le_bytes).collect();
    Numbers { bytes, values: codes.iter().map(|c| *c as f32).collect() }
}

/// Signed 4-bit zeros `[rows, groups]` packed along the rows, as words `[ceil(rows / 8), groups]`.
fn zeros(rows: usize, groups: usize, random: &mut Random) -> Numbers {
    let codes: Vec<i64> = (0..rows * groups).map(|_| random.below(16) as i64 - 8).collect();
    let mut bytes = Vec::new();
    for block in 0..rows.div_ceil(8) {
        for g in 0..groups {
            let word = (block * 8..rows.min(block * 8 + 8)).fold(0u32, |w, r| w | ((codes[r * groups + g] + 8) as u32) << (r % 8 * 4));
            bytes.extend(word.to_le_bytes());
        }
    }
    Numbers { bytes, values: codes.iter().map(|c| *c as f32).collect() }
}

fn signed_bytes(n: usize, random: &mut Random) -> Numbers {
    numbers(n, |_| {
        let code = random.below(256) as u8 as i8;
        (f32::from(code), code.to_le_bytes())
    })
}

fn i64s(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn ct(bits: u32, group: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": group}}}})
}

/// The rows of a stored matrix, and where it has integer codes that these give the same rows.
fn rows(stored: &Stored) -> Vec<f32> {
    let cols = *stored.shape.last().unwrap();
    let count = stored.shape.iter().product::<usize>() / cols;
    let mut out = vec![0.0f32; count * cols];
    for (row, out) in out.chunks_mut(cols).enumerate() {
        stored.decode_row(row, out).unwrap();
        if let Form::Codes(form) = stored.form() {
            let blocks = cols / form.block;
            let (mut codes, mut scale, mut min) = (vec![0i8; cols], vec![0.0f32; blocks], vec![0.0f32; if form.min { blocks } else { 0 }]);
            let gain = stored.code_row(row, form, &mut codes, &mut scale, &mut min).unwrap();
            for (k, value) in out.iter().enumerate() {
                let code = form.table.map_or(codes[k], |table| table[usize::from(codes[k] as u8)]);
                let found = gain * (scale[k / form.block] * f32::from(code) - min.get(k / form.block).copied().unwrap_or(0.0));
                assert!((found - value).abs() <= 1e-5 * value.abs().max(0.1), "{}: row {row} column {k}: {found}, {value}", stored.name);
            }
        }
    }
    out
}

fn check(
    case: &str,
    quantization: &Value,
    tensors: &[Tensor],
    name: &str,
    shape: &[usize],
    scheme: &str,
    integer: bool,
    expected: impl Fn(usize, usize) -> f32,
) {
    let (_scratch, checkpoint) = open(case, quantization, tensors);
    let stored = checkpoint.stored(name).unwrap_or_else(|e| panic!("{case}: {e}")).expect(case);
    assert_eq!((stored.shape.as_slice(), stored.scheme), (shape, scheme), "{case}");
    assert_eq!(matches!(stored.form(), Form::Codes(_)), integer, "{case}: {:?}", stored.form());
    let cols = *shape.last().unwrap();
    let found = rows(&stored);
    assert_eq!(found, stored.values().unwrap(), "{case}");
    for (i, found) in found.iter().enumerate() {
        let expected = expected(i / cols, i % cols);
        assert!(
            (found - expected).abs() <= 1e-6 * expected.abs(),
            "{case}: row {} column {}: {found}, expected {expected}",
            i / cols,
            i % cols
        );
    }
}

#[test]
fn packed_integers() {
    let r = &mut Random(1);
    let (q, s) = (words(5, 64, 4, r), scales_bf16(10, r));
    let shape = |rows, cols| ("m.weight_shape", "I64", vec![2], i64s(&[rows, cols]));
    let packed = |q: &Numbers, rows, words| ("m.weight_packed", "I32", vec![rows, words], q.bytes.clone());
    let scale = |s: &Numbers, rows, cols| ("m.weight_scale", "BF16", vec![rows, cols], s.bytes.clone());
    let tensors = [packed(&q, 5, 8), scale(&s, 5, 2), shape(5, 64)];
    check("int4", &ct(4, json!(32)), &tensors, "m.weight", &[5, 64], "packed integers", true, |i, k| {
        q.values[i * 64 + k] * s.values[i * 2 + k / 32]
    });

    let (q, s, z) = (words(9, 96, 4, r), scales_bf16(27, r), zeros(9, 3, r));
    let tensors = [packed(&q, 9, 12), scale(&s, 9, 3), shape(9, 96), ("m.weight_zero_point", "I32", vec![2, 3], z.bytes.clone())];
    let value = |i: usize, k: usize| (q.values[i * 96 + k] - z.values[i * 3 + k / 32]) * s.values[i * 3 + k / 32];
    check("int4-zero", &ct(4, json!(32)), &tensors, "m.weight", &[9, 96], "packed integers", true, value);

    let (q, s) = (words(3, 256, 4, r), scales_bf16(6, r));
    let tensors = [packed(&q, 3, 32), scale(&s, 3, 2), shape(3, 256)];
    check("int4-128", &ct(4, json!(128)), &tensors, "m.weight", &[3, 256], "packed integers", true, |i, k| {
        q.values[i * 256 + k] * s.values[i * 2 + k / 128]
    });

    let order: Vec<u32> = (0..64).map(|k| (k * 7 % 64) / 32).collect();
    let (q, s) = (words(3, 64, 4, r), scales_bf16(6, r));
    let index = ("m.weight_g_idx", "I32", vec![64], order.iter().flat_map(|g| g.to_le_bytes()).collect());
    let tensors = [packed(&q, 3, 8), scale(&s, 3, 2), shape(3, 64), index];
    let value = |i: usize, k: usize| q.values[i * 64 + k] * s.values[i * 2 + order[k] as usize];
    check("int4-order", &ct(4, json!(32)), &tensors, "m.weight", &[3, 64], "packed integers", false, value);

    // A row that fills no whole word, one scale for it.
    let (q, s) = (words(3, 20, 4, r), scales_bf16(3, r));
    let tensors = [packed(&q, 3, 3), scale(&s, 3, 1), shape(3, 20)];
    check("int4-odd", &ct(4, Value::Null), &tensors, "m.weight", &[3, 20], "packed integers", false, |i, k| {
        q.values[i * 20 + k] * s.values[i]
    });

    let (q, s) = (words(4, 64, 8, r), scales_bf16(4, r));
    let tensors = [packed(&q, 4, 16), scale(&s, 4, 1), shape(4, 64)];
    check("int8", &ct(8, Value::Null), &tensors, "m.weight", &[4, 64], "packed integers", true, |i, k| q.values[i * 64 + k] * s.values[i]);

    let (q, s) = (words(4, 64, 3, r), scales_bf16(8, r));
    let tensors = [packed(&q, 4, 7), scale(&s, 4, 2), shape(4, 64)];
    check("int3", &ct(3, json!(32)), &tensors, "m.weight", &[4, 64], "packed integers", true, |i, k| {
        q.values[i * 64 + k] * s.values[i * 2 + k / 32]
    });
}

#[test]
fn byte_integers() {
    let r = &mut Random(2);
    let (q, s, z) = (signed_bytes(4 * 64, r), scales_f32(4, r), signed_bytes(4, r));
    let plain = [("m.weight", "I8", vec![4, 64], q.bytes.clone()), ("m.weight_scale", "F32", vec![4, 1], s.bytes.clone())];
    check("i8", &ct(8, Value::Null), &plain, "m.weight", &[4, 64], "8-bit integers", true, |i, k| q.values[i * 64 + k] * s.values[i]);
    let zero = ("m.weight_zero_point", "I8", vec![4, 1], z.bytes.clone());
    let value = |i: usize, k: usize| (q.values[i * 64 + k] - z.values[i]) * s.values[i];
    check("i8-zero", &ct(8, Value::Null), &[&plain[..], &[zero]].concat(), "m.weight", &[4, 64], "8-bit integers", true, value);
}

#[test]
fn fp8() {
    let r = &mut Random(3);
    let q = e4m3(130 * 150, r);
    let codes = |rows: usize, cols: usize| ("m.weight", "F8_E4M3", vec![rows, cols], q.bytes[..rows * cols].to_vec());
    let config = |block: Value| json!({"quant_method": "fp8", "weight_block_size": block});
    // Blocks from the top left corner; the last ones are cut off.
    let s = scales_f32(4, r);
    let tensors = [codes(130, 150), ("m.weight_scale_inv", "F32", vec![2, 2], s.bytes.clone())];
    let value = |i: usize, k: usize| q.values[i * 150 + k] * s.values[i / 128 * 2 + k / 128];
    check("block", &config(json!([128, 128])), &tensors, "m.weight", &[130, 150], "FP8", false, value);
    check("block-default", &config(Value::Null), &tensors, "m.weight", &[130, 150], "FP8", false, value);
    let s = scales_bf16(3 * 2, r);
    let tensors = [codes(40, 50), ("m.weight_scale_inv", "BF16", vec![3, 2], s.bytes.clone())];
    check("block-odd", &config(json!([16, 32])), &tensors, "m.weight", &[40, 50], "FP8", false, |i, k| {
        q.values[i * 50 + k] * s.values[i / 16 * 2 + k / 32]
    });
    let s = exponents(2 * 2, r);
    let tensors = [codes(40, 50), ("m.scale", "F8_E8M0", vec![2, 2], s.bytes.clone())];
    check("exponents", &config(json!([32, 32])), &tensors, "m.weight", &[40, 50], "FP8", false, |i, k| {
        q.values[i * 50 + k] * s.values[i / 32 * 2 + k / 32]
    });
    // Runs of a row (the engram table).
    let s = exponents(40 * 2, r);
    let tensors = [codes(40, 50), ("m.scale", "F8_E8M0", vec![40, 2], s.bytes.clone())];
    check("runs", &config(json!([32, 32])), &tensors, "m.weight", &[40, 50], "FP8", false, |i, k| {
        q.values[i * 50 + k] * s.values[i * 2 + k / 32]
    });
    // One for the tensor, one for each row, exponents for runs of 32.
    let s = scales_f32(1, r);
    let tensors = [codes(6, 32), ("m.weight_scale", "F32", vec![], s.bytes.clone())];
    check("tensor", &json!({"quant_method": "modelopt", "quant_algo": "FP8"}), &tensors, "m.weight", &[6, 32], "FP8", false, |i, k| {
        q.values[i * 32 + k] * s.values[0]
    });
    let s = scales_bf16(6, r);
    let tensors = [codes(6, 32), ("m.weight_scale", "BF16", vec![6, 1], s.bytes.clone())];
    check("channel", &ct(8, Value::Null), &tensors, "m.weight", &[6, 32], "FP8", false, |i, k| q.values[i * 32 + k] * s.values[i]);
    let s = exponents(6 * 2, r);
    let tensors = [codes(6, 64), ("m.weight_scale", "U8", vec![6, 2], s.bytes.clone())];
    check("mxfp8", &json!({"quant_method": "modelopt", "quant_algo": "MXFP8"}), &tensors, "m.weight", &[6, 64], "FP8", false, |i, k| {
        q.values[i * 64 + k] * s.values[i * 2 + k / 32]
    });
    // Experts in one tensor, each with its own grid.
    let s = scales_f32(3 * 2 * 3, r);
    let tensors = [
        ("x.experts.up", "F8_E4M3", vec![3, 20, 40], q.bytes[..2400].to_vec()),
        ("x.experts.up_scale_inv", "F32", vec![3, 2, 3], s.bytes.clone()),
    ];
    let value = |i: usize, k: usize| q.values[i * 40 + k] * s.values[i / 20 * 6 + i % 20 / 16 * 3 + k / 16];
    check("experts", &config(json!([16, 16])), &tensors, "x.experts.up", &[3, 20, 40], "FP8", false, value);
}

#[test]
fn fp4() {
    let r = &mut Random(4);
    let q = e2m1(6 * 64, r);
    let (s, g) = (scales_e4m3(6 * 4, r), 0.37f32);
    let fine = ("m.weight_scale", "F8_E4M3", vec![6, 4], s.bytes.clone());
    let tensors = [
        ("m.weight_packed", "U8", vec![6, 32], q.bytes.clone()),
        fine.clone(),
        ("m.weight_global_scale", "F32", vec![1], g.to_le_bytes().to_vec()),
    ];
    check("nvfp4-ct", &ct(4, json!(16)), &tensors, "m.weight", &[6, 64], "NVFP4", true, |i, k| {
        q.values[i * 64 + k] * (s.values[i * 4 + k / 16] / g)
    });
    let tensors = [("m.weight", "U8", vec![6, 32], q.bytes.clone()), fine, ("m.weight_scale_2", "F32", vec![], g.to_le_bytes().to_vec())];
    let config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    check("nvfp4-modelopt", &config, &tensors, "m.weight", &[6, 64], "NVFP4", true, |i, k| {
        q.values[i * 64 + k] * (s.values[i * 4 + k / 16] * g)
    });

    let s = exponents(6 * 2, r);
    let value = |i: usize, k: usize| q.values[i * 64 + k] * s.values[i * 2 + k / 32];
    for (case, codes, dtype, scale, kind) in [
        ("mxfp4-ct", "m.weight_packed", "U8", "m.weight_scale", "U8"),
        ("mxfp4-deepseek", "m.weight", "I8", "m.scale", "F8_E8M0"),
        ("mxfp4-modelopt", "m.weight", "U8", "m.weight_scale", "U8"),
    ] {
        let tensors = [(codes, dtype, vec![6, 32], q.bytes.clone()), (scale, kind, vec![6, 2], s.bytes.clone())];
        check(case, &json!({"quant_method": "fp8"}), &tensors, "m.weight", &[6, 64], "MXFP4", true, value);
    }
    let tensors = [("e.up_blocks", "U8", vec![2, 3, 2, 16], q.bytes.clone()), ("e.up_scales", "U8", vec![2, 3, 2], s.bytes.clone())];
    check("mxfp4-blocks", &json!({"quant_method": "mxfp4"}), &tensors, "e.up", &[2, 3, 64], "MXFP4 blocks", true, value);
}

#[test]
fn a_missing_or_misshapen_piece_is_an_error_that_names_it() {
    let zeros = |name: &'static str, dtype: &'static str, shape: &[usize], bytes: usize| -> Tensor {
        (name, dtype, shape.to_vec(), vec![0; bytes])
    };
    let fp8 = || zeros("m.weight", "F8_E4M3", &[6, 64], 384);
    let packed = || zeros("m.weight_packed", "I32", &[6, 8], 192);
    let pairs = || zeros("m.weight_packed", "U8", &[6, 32], 192);
    let shape = |r, c| ("m.weight_shape", "I64", vec![2], i64s(&[r, c]));
    let fine = || zeros("m.weight_scale", "F8_E4M3", &[6, 4], 24);
    let group = || zeros("m.weight_scale", "BF16", &[6, 2], 24);
    for (case, tensors, kind, named) in [
        ("no scale", vec![fp8()], Kind::CorruptFile, "m.weight"),
        ("blocks misshapen", vec![fp8(), zeros("m.weight_scale_inv", "F32", &[1, 2], 8)], Kind::Mismatch, "m.weight_scale_inv"),
        ("channels misshapen", vec![fp8(), zeros("m.weight_scale", "F32", &[5, 1], 20)], Kind::Mismatch, "m.weight_scale"),
        ("scale of a wrong type", vec![fp8(), zeros("m.weight_scale", "I32", &[1], 4)], Kind::Mismatch, "m.weight_scale"),
        ("pairs without scale", vec![zeros("m.weight", "U8", &[6, 32], 192)], Kind::CorruptFile, "m.weight"),
        ("packed pairs without scale", vec![pairs()], Kind::CorruptFile, "m.weight_scale"),
        ("no global scale", vec![pairs(), fine()], Kind::CorruptFile, "m.weight_global_scale"),
        ("no second scale", vec![zeros("m.weight", "U8", &[6, 32], 192), fine()], Kind::CorruptFile, "m.weight_scale_2"),
        (
            "global scale of 0",
            vec![pairs(), fine(), zeros("m.weight_global_scale", "F32", &[1], 4)],
            Kind::Mismatch,
            "m.weight_global_scale",
        ),
        (
            "runs misshapen",
            vec![pairs(), zeros("m.weight_scale", "F8_E4M3", &[6, 3], 18), zeros("m.weight_global_scale", "F32", &[1], 4)],
            Kind::Mismatch,
            "m.weight_scale",
        ),
        ("words without scale", vec![packed(), shape(6, 64)], Kind::CorruptFile, "m.weight_scale"),
        ("other shape", vec![packed(), group(), shape(5, 64)], Kind::Mismatch, "m.weight_shape"),
        ("other columns", vec![packed(), group(), shape(6, 96)], Kind::Mismatch, "m.weight_packed"),
        (
            "zeros misshapen",
            vec![packed(), group(), shape(6, 64), zeros("m.weight_zero_point", "I32", &[2, 2], 16)],
            Kind::Mismatch,
            "m.weight_zero_point",
        ),
        (
            "order out of range",
            vec![packed(), group(), shape(6, 64), ("m.weight_g_idx", "I32", vec![64], vec![9; 256])],
            Kind::Mismatch,
            "m.weight_g_idx",
        ),
        ("experts without scales", vec![zeros("m.weight_blocks", "U8", &[2, 3, 1, 16], 96)], Kind::CorruptFile, "m.weight_scales"),
    ] {
        let (_scratch, checkpoint) = open("broken", &ct(4, Value::Null), &tensors);
        let e = checkpoint.stored("m.weight").err().unwrap_or_else(|| panic!("{case}: accepted"));
        assert_eq!((e.kind(), e.name()), (kind, Some(named)), "{case}: {e}");
        assert!(e.message().contains("m.weight"), "{case}: {e}");
    }
    // What the config says is not quantised may be bytes without scales.
    let ignored = json!({"quant_method": "fp8", "modules_to_not_convert": ["m"]});
    let (_scratch, checkpoint) = open("ignored", &ignored, &[fp8()]);
    assert!(checkpoint.stored("m.weight").unwrap().unwrap().is_plain());
    assert!(checkpoint.stored("absent.weight").unwrap().is_none());
}

#[test]
fn a_method_nobody_reads_stops_a_load_by_name() {
    let scratch = Scratch::new("method");
    let source = fixtures().join("llama");
    for file in ["model.safetensors", "generation_config.json"] {
        std::fs::copy(source.join(file), scratch.path().join(file)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for method in ["awq", "gptq", "bitsandbytes", "quanto"] {
        config["quantization_config"] = json!({"quant_method": method, "bits": 4});
        scratch.file("config.json", config.to_string());
        let e = metrale::engine::load(scratch.path(), &metrale::options::LoadOptions::default(), None).err().expect(method);
        assert_eq!((e.kind(), e.name()), (Kind::Unsupported, Some("quant_method")), "{e}");
        assert!(e.message().contains(method), "{e}");
    }
}

#[test]
fn integer_products_stay_near_the_exact_ones() {
    let reference = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/reference/models");
    let mut seen = 0;
    for name in [
        "llama-ct-w4a16",
        "llama-ct-nvfp4",
        "llama-ct-fp8",
        "llama-fp8-block",
        "llama-modelopt-fp8",
        "llama-modelopt-nvfp4",
        "llama-gguf-low",
    ] {
        let Some(path) = [reference.join(name), fixtures().join(name)].into_iter().find(|p| p.exists()) else {
            println!("SKIPPED: {name} is not here");
            continue;
        };
        let golden = support::golden::Golden::read(&path);
        let options = metrale::options::LoadOptions { compute: Some(metrale::options::Compute::Fast), threads: 2, ..Default::default() };
        let engine = metrale::engine::load(&path, &options, None).unwrap();
        let found = engine.capture(&golden.prompt, 64, &["logits"], metrale::engine::Bodies::Fast).unwrap();
        let square = |sum: f64, x: f64| sum + x * x;
        let error = found[0].values.iter().zip(&golden.prompt_logits).map(|(a, b)| f64::from(a - b)).fold(0.0, square);
        let size = golden.prompt_logits.iter().map(|x| f64::from(*x)).fold(0.0, square);
        let relative = (error / size).sqrt();
        println!("{name:<22} {relative:.4}");
        assert!(relative > 0.0 && relative < 0.03, "{name}: {relative}");
        assert_eq!(engine.plan().weights, engine.weight_bytes(), "{name}: planned and held bytes");
        seen += 1;
    }
    assert!(seen > 0);
}
