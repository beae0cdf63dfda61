//! What strangers' bytes reach, one function for each kind: files, texts that are compiled, saved states.
//!
//! A target gets any bytes at all and must come back, with an error or with something that works. Used by two drivers: the test
//! beside this file (mutations, on any toolchain) and `coverage` (libFuzzer).

use metrale::engine::{self, Engine, Sequence, SequenceOptions, Snapshot};
use metrale::error::{Error, Kind, Result};
use metrale::options::LoadOptions;
use metrale::sampling::grammar::{Constraint, Grammar, Vocabulary};
use metrale::text::{ChatTemplate, Tokenizer};
use metrale::weights::{FileBytes, Gguf, Input};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A name, which is also the folder of its corpus, and what to do with the bytes.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]) -> Result<()>,
    /// Words of the format, for mutations that keep it nearly sound.
    pub words: &'static [&'static str],
}

const JSON: &[&str] =
    &["{", "}", "[", "]", "\"", ":", ",", "null", "true", "-1", "0", "1e300", "18446744073709551616", "\\ud800", "{}", "[]"];

pub const TARGETS: &[Target] = &[
    Target {
        name: "gguf",
        run: gguf,
        words: &["GGUF", "general.architecture", "llama", "general.alignment", "tokenizer.ggml.tokens", "blk.0.attn_q.weight"],
    },
    Target {
        name: "safetensors",
        run: safetensors,
        words: &["F32", "BF16", "F8_E4M3", "U8", "dtype", "shape", "data_offsets", "__metadata__", "\"", ":", ",", "}"],
    },
    Target { name: "config", run: config, words: JSON },
    Target { name: "tokenizer", run: tokenizer, words: JSON },
    Target { name: "template", run: template, words: TEMPLATE },
    Target { name: "schema", run: schema, words: SCHEMA },
    Target {
        name: "gbnf",
        run: gbnf,
        words: &[
            "::=",
            "root",
            "|",
            "(",
            ")*",
            "+",
            "?",
            "{3,}",
            "{0,1000000}",
            "\"",
            "[",
            "^",
            "-",
            "]",
            "\\x41",
            "\\u{10FFFF}",
            "\n",
            "start: ",
        ],
    },
    Target {
        name: "lark",
        run: lark,
        words: &[
            "::=",
            "root",
            "|",
            "(",
            ")*",
            "+",
            "?",
            "{3,}",
            "{0,1000000}",
            "\"",
            "[",
            "^",
            "-",
            "]",
            "\\x41",
            "\\u{10FFFF}",
            "\n",
            "start: ",
        ],
    },
    Target {
        name: "regex",
        run: regex,
        words: &[
            "(", ")", "(?i)", "(?:", "|", "*", "+?", "{2,3}", "{999999}", "[^", "]", "\\p{L}", "\\b", "\\1", "(?=", "&&", "^", "$", ".",
        ],
    },
    Target { name: "state", run: state, words: &["mtrlseq1"] },
];

const TEMPLATE: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "-%}",
    "for x in messages",
    "endfor",
    "if",
    "else",
    "endif",
    "set x =",
    "macro m(a)",
    "endmacro",
    "loop.index",
    "messages[0]['content']",
    "|tojson",
    "|length",
    "range(1000000000)",
    "namespace(a=1)",
    "raise_exception('x')",
    "strftime_now('%Y')",
    "* 1000000000",
    "~ x",
    "[::-1]",
    ".split('a')",
    "x.x.x",
    "('a' * 100000)",
    "|replace('', 'aa')",
    "is defined",
    "bos_token",
];
const SCHEMA: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\"type\"",
    "\"object\"",
    "\"string\"",
    "\"integer\"",
    "\"properties\"",
    "\"required\"",
    "\"items\"",
    "\"$ref\"",
    "\"#\"",
    "\"#/$defs/a\"",
    "\"$defs\"",
    "\"anyOf\"",
    "\"allOf\"",
    "\"enum\"",
    "\"const\"",
    "\"pattern\"",
    "\"(a|b)*\"",
    "\"minLength\"",
    "\"maxItems\"",
    "\"additionalProperties\"",
    "false",
    "1000000000",
    "-1",
    "\"format\"",
    "\"date-time\"",
    "\"minimum\"",
    "1e300",
    "\"multipleOf\"",
    "0.1",
];

/// Runs a target. A defect that the library itself caught, and reports as `Internal`, is a find like a panic.
pub fn run(target: &Target, data: &[u8]) -> Option<Error> {
    match (target.run)(data) {
        Err(error) if error.kind() == Kind::Internal => Some(error),
        _ => None,
    }
}

fn fixtures() -> PathBuf {
    // The second driver lies two folders further down.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    [root.to_path_buf(), root.join("../../..")]
        .map(|root| root.join("tests/fixtures"))
        .into_iter()
        .find(|path| path.is_dir())
        .expect("fixtures are there")
}

fn options() -> LoadOptions {
    LoadOptions { threads: 1, context: 32, memory: 64 << 20, ..LoadOptions::default() }
}

/// Loads, and computes a token where that works.
fn use_model(input: Input) -> Result<()> {
    let engine = engine::load_from(input, &options(), None)?;
    let mut sequence = Sequence::new(&engine, &SequenceOptions { context: 8 })?;
    sequence.prefill(&[1, 2])
}

fn gguf(data: &[u8]) -> Result<()> {
    let source = Arc::new(FileBytes::from_bytes("fuzz", data.to_vec()));
    let file = Gguf::read(source.clone())?;
    for (key, _) in file.metadata() {
        let _ = (file.u64(key), file.f64(key), file.bool(key), file.str(key));
        let _ = (file.strings(key).map(|all| all.map(|all| all.count())), file.f32_array(key), file.i64_array(key), file.bool_array(key));
    }
    use_model(Input::Ready(source))
}

/// A folder of this process, with a config and weights of which one is the fuzzer's.
fn folder(config: &[u8], weights: &[u8]) -> Result<()> {
    let path = std::env::temp_dir().join(format!("metrale-fuzz-{}-{:?}", std::process::id(), std::thread::current().id()));
    std::fs::create_dir_all(&path).expect("the temporary folder is writable");
    std::fs::write(path.join("config.json"), config).expect("writable");
    std::fs::write(path.join("model.safetensors"), weights).expect("writable");
    let done = Input::path(&path, metrale::weights::Access::Map).and_then(use_model);
    let _ = std::fs::remove_dir_all(&path);
    done
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(fixtures().join("models/llama").join(name)).expect("the fixture is there")
}

fn safetensors(data: &[u8]) -> Result<()> {
    static CONFIG: OnceLock<Vec<u8>> = OnceLock::new();
    folder(CONFIG.get_or_init(|| fixture("config.json")), data)
}

fn config(data: &[u8]) -> Result<()> {
    static WEIGHTS: OnceLock<Vec<u8>> = OnceLock::new();
    folder(data, WEIGHTS.get_or_init(|| fixture("model.safetensors")))
}

fn tokenizer(data: &[u8]) -> Result<()> {
    let tokenizer = Tokenizer::from_json(data, None)?;
    for text in ["Once upon a time", "\u{1f600}e\u{301} <s>\n\n\t", ""] {
        let ids = tokenizer.encode(text, true, true)?;
        tokenizer.decode(&ids, false)?;
    }
    (0..tokenizer.vocab_len().min(100)).for_each(|id| drop(tokenizer.token_bytes(id as i32)));
    Ok(())
}

fn template(data: &[u8]) -> Result<()> {
    let template = ChatTemplate::new(&String::from_utf8_lossy(data), "<s>", "</s>")?;
    let messages =
        json!([{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}, {"role": "assistant", "content": null}]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    template.render(&messages, Some(&tools), true, &json!({"enable_thinking": false}), None).map(drop)
}

fn engine() -> &'static Arc<Engine> {
    static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();
    ENGINE.get_or_init(|| engine::load(&fixtures().join("stories260k/model.gguf"), &options(), None).expect("the fixture loads"))
}

/// Follows a grammar for some tokens: each time the first that it allows, or the last.
fn follow(grammar: Grammar) -> Result<()> {
    let mut constraint = Constraint::new(Arc::new(grammar));
    let row = vec![0.0; vocabulary().rows()];
    for position in 0..6 {
        let masked = constraint.mask(&row)?;
        let allowed = |at: &usize| masked[*at] == 0.0;
        let token = if position % 2 == 0 { (0..masked.len()).find(allowed) } else { (0..masked.len()).rfind(allowed) };
        let token = token.expect("a mask that is no error allows a token");
        constraint.take(token as i32, position)?;
    }
    Ok(())
}

fn vocabulary() -> &'static Arc<Vocabulary> {
    engine().grammar_vocabulary().expect("the fixture has a tokenizer")
}

fn text(data: &[u8]) -> String {
    String::from_utf8_lossy(data).into_owned()
}

fn schema(data: &[u8]) -> Result<()> {
    follow(Grammar::json_schema(vocabulary(), &text(data))?)
}

fn gbnf(data: &[u8]) -> Result<()> {
    follow(Grammar::gbnf(vocabulary(), &text(data))?)
}

fn lark(data: &[u8]) -> Result<()> {
    follow(Grammar::lark(vocabulary(), &text(data))?)
}

fn regex(data: &[u8]) -> Result<()> {
    follow(Grammar::regex(vocabulary(), &text(data))?)
}

/// The bytes between magic and checksum are the fuzzer's; magic, fingerprint and checksum are made right for every second
/// input, so that what lies behind them is reached.
fn state(data: &[u8]) -> Result<()> {
    static SEED: OnceLock<Vec<u8>> = OnceLock::new();
    let seed = SEED.get_or_init(|| {
        let mut sequence = Sequence::new(engine(), &SequenceOptions { context: 32 }).expect("a sequence");
        sequence.prefill(&[1, 403, 407]).expect("three tokens");
        sequence.snapshot().and_then(|snapshot| snapshot.to_bytes()).expect("a state")
    });
    let mut bytes = data.to_vec();
    if data.first().is_some_and(|first| first % 2 == 1) {
        bytes.splice(..1, seed[..16].iter().copied());
        // A short input is the head of a state whose rest is sound.
        let len = bytes.len().min(seed.len() - 8);
        bytes.extend_from_slice(&seed[len..seed.len() - 8]);
        bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
    }
    let snapshot = Snapshot::from_bytes(engine(), &bytes)?;
    let mut sequence = Sequence::new(engine(), &SequenceOptions { context: 32 })?;
    sequence.restore(&snapshot)?;
    sequence.prefill(&[5])
}

/// What `Snapshot` writes at its end, said again: a stranger can compute it too.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let words = words.iter().map(|word| u64::from_le_bytes(*word)).chain(rest.iter().map(|b| u64::from(*b)));
    words.fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23))
}
