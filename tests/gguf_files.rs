//! GGUF files that are wrong in one way each: cut short, lying counts, odd values. Every one is an error that says where
//! and what, and no bytes at all make the reader panic.

mod support;

use metrale::error::Kind;
use metrale::weights::{Checkpoint, to_f32};
use serde_json::json;
use support::{ARRAY, BOOL, F32, GgufWriter, I32, Random, STRING, U8, U32, U64, counted, fixtures};

fn open(bytes: Vec<u8>) -> metrale::error::Result<Checkpoint> {
    Checkpoint::from_bytes("test.gguf", bytes)
}

/// Opens a fixture's bytes and reads all it offers, for the sake of reading.
fn read_everything(bytes: Vec<u8>) -> metrale::error::Result<()> {
    let checkpoint = open(bytes)?;
    checkpoint.describe();
    let gguf = checkpoint.gguf().expect("it is a GGUF");
    for (key, _) in gguf.metadata() {
        // Most keys are of another type than most getters want, which has to be an error and nothing worse.
        let _ = (gguf.u64(key), gguf.f64(key), gguf.bool(key), gguf.str(key));
        let _ = (gguf.f32_array(key), gguf.i64_array(key), gguf.bool_array(key));
        if let Ok(Some(strings)) = gguf.strings(key) {
            assert_eq!(strings.clone().count(), strings.len(), "{key}");
        }
    }
    for name in checkpoint.names() {
        let view = checkpoint.tensor(name).expect("its name was listed");
        if view.elements().is_some_and(|n| n < 1 << 20) {
            let _ = to_f32(&view);
        }
    }
    Ok(())
}

#[test]
fn the_smallest_model_opens() {
    read_everything(GgufWriter::llama().bytes()).unwrap();
    let mut two = GgufWriter::llama();
    two.version = 2;
    assert_eq!(open(two.bytes()).unwrap().gguf().unwrap().version(), 2);
}

#[test]
fn every_cut_is_refused() {
    let whole = std::fs::read(fixtures().join("llama-gguf-low/model.gguf")).unwrap();
    let checkpoint = open(whole.clone()).unwrap();
    let tensors = checkpoint.gguf().unwrap().tensors();
    let header = tensors.iter().map(|t| t.range.start).min().unwrap();
    let end = tensors.iter().map(|t| t.range.end).max().unwrap();
    let edges = tensors.iter().flat_map(|t| [t.range.start, t.range.start + 1, t.range.end - 1]);
    for cut in (0..header).chain((header..end).step_by(4096)).chain(edges).chain([end - 1]) {
        let error = open(whole[..cut].to_vec()).err().unwrap_or_else(|| panic!("cut at {cut} was accepted"));
        let expected = if cut < 4 { Kind::NotAModel } else { Kind::CorruptFile };
        assert_eq!(error.kind(), expected, "cut at {cut}: {error}");
        assert!(error.message().contains("test.gguf"), "{error}");
    }
}

/// A writer changed by `change`.
fn llama(change: impl FnOnce(&mut GgufWriter)) -> Vec<u8> {
    let mut w = GgufWriter::llama();
    change(&mut w);
    w.bytes()
}

fn array(element: u32, count: u64, bytes: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat()
}

/// `depth` arrays in each other, the innermost empty.
fn nested(depth: usize) -> Vec<u8> {
    (1..depth).fold(array(U8, 0, &[]), |inner, _| array(ARRAY, 1, &inner))
}

#[test]
fn each_fault_has_its_error() {
    let without = |key: &str| GgufWriter::llama().without(key).bytes();
    let cases: Vec<(&str, Vec<u8>, Kind, &str)> = vec![
        ("version 1", llama(|w| w.version = 1), Kind::Unsupported, "version 1"),
        ("version 4", llama(|w| w.version = 4), Kind::Unsupported, "version 4"),
        ("big-endian", llama(|w| w.version = 3u32.swap_bytes()), Kind::Unsupported, "big-endian"),
        ("too many keys", llama(|w| w.claimed_keys = Some(u64::MAX)), Kind::CorruptFile, "at byte"),
        ("too many tensors", llama(|w| w.claimed_tensors = Some(u64::MAX)), Kind::CorruptFile, "tensor"),
        ("empty key", llama(|w| w.raw("", U32, &[0; 4])), Kind::CorruptFile, "has 0 bytes"),
        (
            "37 bytes with an empty key",
            {
                let mut w = GgufWriter::new();
                w.raw("", U8, &[1]);
                w.bytes()[..37].to_vec()
            },
            Kind::CorruptFile,
            "has 0 bytes",
        ),
        ("long key", llama(|w| w.raw("k".repeat(70_000), U8, &[1])), Kind::CorruptFile, "70000 bytes"),
        ("key that is no text", llama(|w| w.raw([0xFF, 0xFE], U8, &[1])), Kind::CorruptFile, "not UTF-8"),
        ("key twice", llama(|w| w.u32("llama.block_count", 1)), Kind::CorruptFile, "appears twice"),
        ("unknown value type", llama(|w| w.raw("x", 13, &[0; 8])), Kind::CorruptFile, "13 is not a known value type"),
        ("endless string", llama(|w| w.raw("x", STRING, &u64::MAX.to_le_bytes())), Kind::CorruptFile, "cut short"),
        ("string that is no text", llama(|w| w.raw("x", STRING, &counted(&[0xC3]))), Kind::CorruptFile, "not UTF-8"),
        ("bool of 2", llama(|w| w.raw("x", BOOL, &[2])), Kind::CorruptFile, "expected 0 or 1"),
        ("endless array", llama(|w| w.raw("x", ARRAY, &array(U64, u64::MAX, &[]))), Kind::CorruptFile, "cut short"),
        ("endless array of strings", llama(|w| w.raw("x", ARRAY, &array(STRING, u64::MAX, &[]))), Kind::CorruptFile, "cut short"),
        ("deep arrays", llama(|w| w.raw("x", ARRAY, &nested(10_000))), Kind::CorruptFile, "nested"),
        ("alignment 0", llama(|w| w.u32("general.alignment", 0)), Kind::CorruptFile, "power of two"),
        ("alignment 48", llama(|w| w.u32("general.alignment", 48)), Kind::CorruptFile, "power of two"),
        ("alignment as text", llama(|w| w.string("general.alignment", "32")), Kind::CorruptFile, "power of two"),
        ("tensor without name", llama(|w| w.info(b"", &[1], 0, 0)), Kind::CorruptFile, "has 0 bytes"),
        ("tensor twice", llama(|w| w.info(b"token_embd.weight", &[1], 0, 0)), Kind::CorruptFile, "appears twice"),
        ("five dimensions", llama(|w| w.info(b"x", &[1; 5], 0, 0)), Kind::CorruptFile, "5 dimensions"),
        ("many dimensions", llama(|w| w.info(b"x", &[1; 500], 0, 0)), Kind::CorruptFile, "500 dimensions"),
        ("huge dimensions", llama(|w| w.info(b"x", &[1 << 40, 1 << 40], 0, 0)), Kind::CorruptFile, "too large"),
        ("half a block", llama(|w| w.info(b"x", &[128], 12, 0)), Kind::CorruptFile, "blocks of 256"),
        ("rows of half blocks", llama(|w| w.info(b"x", &[16, 2], 8, 0)), Kind::CorruptFile, "blocks of 32"),
        ("unread type", llama(|w| w.info(b"x", &[256], 23, 0)), Kind::Unsupported, "IQ4_XS"),
        ("unknown type", llama(|w| w.info(b"x", &[256], 9999, 0)), Kind::CorruptFile, "9999"),
        ("unaligned tensor", llama(|w| w.info(b"x", &[1], 0, 4)), Kind::CorruptFile, "multiple of the alignment 32"),
        ("tensor past the end", llama(|w| w.info(b"x", &[1], 0, 1 << 20)), Kind::CorruptFile, "cut short"),
        ("offset that overflows", llama(|w| w.info(b"x", &[1], 0, u64::MAX - 31)), Kind::CorruptFile, "cut short"),
        ("overlap", llama(|w| w.info(b"x", &[1], 0, 32)), Kind::CorruptFile, "overlap"),
        ("no architecture", without("general.architecture"), Kind::CorruptFile, "general.architecture is missing"),
        (
            "foreign architecture",
            {
                let mut w = GgufWriter::llama().without("general.architecture");
                w.string("general.architecture", "whisper");
                w.bytes()
            },
            Kind::Unsupported,
            "whisper",
        ),
        (
            "architecture as a number",
            {
                let mut w = GgufWriter::llama().without("general.architecture");
                w.u32("general.architecture", 7);
                w.bytes()
            },
            Kind::CorruptFile,
            "general.architecture at byte",
        ),
        ("missing width", without("llama.embedding_length"), Kind::CorruptFile, "llama.embedding_length is missing"),
        (
            "width as text",
            {
                let mut w = GgufWriter::llama().without("llama.embedding_length");
                w.string("llama.embedding_length", "32");
                w.bytes()
            },
            Kind::CorruptFile,
            "string of 2 bytes, expected an integer",
        ),
        (
            "width below zero",
            {
                let mut w = GgufWriter::llama().without("llama.embedding_length");
                w.raw("llama.embedding_length", I32, &(-32i32).to_le_bytes());
                w.bytes()
            },
            Kind::CorruptFile,
            "i32 -32, expected an integer that is not negative",
        ),
        (
            "no heads",
            {
                let mut w = GgufWriter::llama().without("llama.attention.head_count");
                w.u32("llama.attention.head_count", 0);
                w.bytes()
            },
            Kind::CorruptFile,
            "head_count is 0",
        ),
        (
            "epsilon as an integer",
            {
                let mut w = GgufWriter::llama().without("llama.attention.layer_norm_rms_epsilon");
                w.u32("llama.attention.layer_norm_rms_epsilon", 1);
                w.bytes()
            },
            Kind::CorruptFile,
            "expected f32 or f64",
        ),
        (
            "layers that differ",
            {
                let mut w = GgufWriter::llama().without("llama.attention.head_count_kv");
                w.raw("llama.attention.head_count_kv", ARRAY, &array(U32, 2, &[1, 0, 0, 0, 2, 0, 0, 0]));
                w.bytes()
            },
            Kind::Unsupported,
            "differs between layers",
        ),
        ("rope scaling nobody knows", llama(|w| w.string("llama.rope.scaling.type", "spiral")), Kind::Unsupported, "spiral"),
        ("experts without a pick", llama(|w| w.u32("llama.expert_count", 8)), Kind::CorruptFile, "expert_used_count"),
        ("eos outside the vocabulary", llama(|w| w.u32("tokenizer.ggml.eos_token_id", 8)), Kind::CorruptFile, "eos_token_id is 8"),
        ("bos of minus one", llama(|w| w.raw("tokenizer.ggml.bos_token_id", I32, &[0xFF; 4])), Kind::CorruptFile, "i32 -1"),
        (
            "no embedding",
            {
                let mut w = GgufWriter::new();
                w.string("general.architecture", "llama");
                for key in ["embedding_length", "attention.head_count"] {
                    w.u32(&format!("llama.{key}"), 4);
                }
                w.bytes()
            },
            Kind::CorruptFile,
            "token_embd.weight is missing",
        ),
        ("odd heads", llama(|w| w.tensor("blk.0.attn_q.weight", &[32, 10], 0, &[0; 1280])), Kind::Mismatch, "10 rows are not 4"),
        ("no magic", llama(|w| w.magic = *b"GGUX"), Kind::NotAModel, "unknown format"),
    ];
    for (what, bytes, kind, text) in cases {
        let error = read_everything(bytes).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.message().contains(text), "{what}: {error} should say {text:?}");
    }
}

#[test]
fn errors_carry_the_offset_of_the_field() {
    let mut w = GgufWriter::new();
    w.u32("a", 1);
    w.raw("b", 77, &[0; 8]);
    let error = open(w.bytes()).err().unwrap();
    // Magic, version, counts; then key a: length, name, type, value; then length and name of b.
    assert_eq!(error.offset(), Some(24 + (8 + 1 + 4 + 4) + (8 + 1)));
}

#[test]
fn getters_read_every_kind_of_value() {
    let checkpoint = open(llama(|w| {
        w.raw("int", 1, &[0xFE]);
        w.raw("float", F32, &0.1f32.to_le_bytes());
        w.raw("double", 12, &0.1f64.to_le_bytes());
        w.raw("yes", BOOL, &[1]);
        w.raw("words", ARRAY, &array(STRING, 2, &[counted(b"a"), counted(&[0xFF])].concat()));
        w.raw("numbers", ARRAY, &array(3, 2, &[1, 0, 0xFF, 0xFF]));
        w.raw("floats", ARRAY, &array(F32, 1, &2.5f32.to_le_bytes()));
        w.raw("flags", ARRAY, &array(BOOL, 2, &[0, 1]));
        w.raw("nested", ARRAY, &nested(8));
    }))
    .unwrap();
    let g = checkpoint.gguf().unwrap();
    assert_eq!(g.f64("float").unwrap(), Some(0.1), "an f32 is the decimal it was written from");
    assert_eq!(g.f64("double").unwrap(), Some(0.1));
    assert_eq!(g.bool("yes").unwrap(), Some(true));
    assert_eq!(g.str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(g.strings("words").unwrap().unwrap().collect::<Vec<_>>(), [&b"a"[..], &[0xFF]]);
    assert_eq!(g.i64_array("numbers").unwrap().unwrap(), [1, -1]);
    assert_eq!(g.f32_array("floats").unwrap().unwrap(), [2.5]);
    assert_eq!(g.bool_array("flags").unwrap().unwrap(), [false, true]);
    assert_eq!(g.u64("absent").unwrap(), None);
    assert!(g.u64("int").unwrap_err().message().contains("i8 -2"));
    assert!(g.strings("numbers").is_err() && g.f32_array("words").is_err() && g.i64_array("words").is_err());
}

#[test]
fn larger_alignments_are_followed() {
    let mut w = GgufWriter::llama().aligned(64);
    w.u32("general.alignment", 64);
    w.tensor("x", &[4], 24, &[1, 2, 3, 4]);
    let checkpoint = open(w.bytes()).unwrap();
    assert_eq!(checkpoint.tensor("x").unwrap().data, [1, 2, 3, 4]);
}

#[test]
fn factors_of_the_rotary_frequencies_are_in_the_config() {
    let factors: Vec<u8> = [1.0f32, 2.0, 4.0, 8.0].iter().flat_map(|f| f.to_le_bytes()).collect();
    let checkpoint = open(llama(|w| w.tensor("rope_freqs.weight", &[4], 0, &factors))).unwrap();
    assert_eq!(checkpoint.config()["rope_scaling"], serde_json::json!({"rope_type": "freq_factors", "factors": [1.0, 2.0, 4.0, 8.0]}));
    assert!(checkpoint.tensor("rope_freqs.weight").is_some());
    let checkpoint = open(llama(|w| {
        w.string("llama.rope.scaling.type", "yarn");
        w.raw("llama.rope.scaling.factor", F32, &4f32.to_le_bytes());
        w.u32("llama.rope.scaling.original_context_length", 16);
    }))
    .unwrap();
    let expected = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    assert_eq!(checkpoint.config()["rope_scaling"], expected);
}

#[test]
fn long_and_short_rotary_factors_are_in_the_config() {
    let mut w = GgufWriter::new();
    w.string("general.architecture", "phi3");
    let counts =
        [("context_length", 4096), ("embedding_length", 32), ("block_count", 1), ("feed_forward_length", 64), ("attention.head_count", 4)];
    for (key, value) in counts.into_iter().chain([("rope.scaling.original_context_length", 1024), ("rope.dimension_count", 4)]) {
        w.u32(&format!("phi3.{key}"), value);
    }
    w.raw("phi3.attention.layer_norm_rms_epsilon", F32, &1e-5f32.to_le_bytes());
    w.raw("phi3.rope.scaling.attn_factor", F32, &1.25f32.to_le_bytes());
    w.tensor("token_embd.weight", &[32, 8], 0, &vec![0; 8 * 32 * 4]);
    for (name, values) in [("rope_factors_short.weight", [1.0f32, 1.5]), ("rope_factors_long.weight", [2.0, 3.0])] {
        w.tensor(name, &[2], 0, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    }
    w.tensor("blk.0.attn_qkv.weight", &[32, 96], 0, &vec![0; 32 * 96 * 4]);
    let c = open(w.bytes()).unwrap();
    let scaling = json!({"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 1024, "attention_factor": 1.25});
    assert_eq!(c.config()["rope_scaling"], scaling);
    assert_eq!((&c.config()["model_type"], &c.config()["partial_rotary_factor"]), (&json!("phi3"), &json!(0.5)));
    assert_eq!(c.tensor("model.layers.0.self_attn.qkv_proj.weight").unwrap().shape, [96, 32]);
}

#[test]
fn a_turn_end_of_its_own_ends_generation() {
    let checkpoint = open(llama(|w| {
        w.u32("tokenizer.ggml.bos_token_id", 1);
        w.u32("tokenizer.ggml.eos_token_id", 2);
        w.u32("tokenizer.ggml.eot_token_id", 3);
    }))
    .unwrap();
    let expected = serde_json::json!({"bos_token_id": 1, "eos_token_id": [2, 3]});
    assert_eq!(checkpoint.generation_config(), Some(&expected));
    assert_eq!(checkpoint.config()["eos_token_id"], 2);
}

#[test]
fn no_bytes_make_the_reader_panic() {
    let mut random = Random(0x1234_5678_9ABC_DEF1);
    const EDGES: [u64; 8] = [0, 1, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 32, u64::MAX, u64::MAX - 7, 1 << 62];
    let (mut accepted, mut refused) = (0, 0);
    for fixture in ["qwen3-gguf-q4", "llama-gguf-low", "gemma3_text-gguf-bf16", "qwen3_moe-gguf-q8_0"] {
        let whole = std::fs::read(fixtures().join(fixture).join("model.gguf")).unwrap();
        let header = open(whole.clone()).unwrap().gguf().unwrap().tensors().iter().map(|t| t.range.start).min().unwrap();
        for _ in 0..1500 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(header - 8);
                match random.below(3) {
                    0 => bytes[at] ^= 1 << random.below(8),
                    1 => bytes[at] = random.next() as u8,
                    _ => bytes[at..at + 8].copy_from_slice(&EDGES[random.below(8)].to_le_bytes()),
                }
            }
            match read_everything(bytes) {
                Ok(()) => accepted += 1,
                Err(_) => refused += 1,
            }
        }
    }
    // Changes inside strings go unnoticed, changes of lengths do not; both must have been tried.
    assert!(accepted > 200 && refused > 200, "{accepted} accepted, {refused} refused");
}
