//! Tests against real vocabularies: ids and chats made by Python's tokenizers and Jinja (`tests/support/make_text_fixtures.py`).
//!
//! One small vocabulary travels with the repository. The others are looked for where `METRALE_CACHE` says, or in
//! `build/models`; a test says so when it skips one.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use super::{ChatTemplate, GgufVocab, Tokenizer};

const MODELS: [&str; 4] = ["stories260k", "smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(name)
}

fn fixture_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// The folder of a model with `model.gguf` and `hf/`.
fn model_folder(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let named = std::env::var_os("METRALE_CACHE").map(PathBuf::from);
    let has_both = |dir: &PathBuf| dir.join("model.gguf").is_file() && dir.join("hf/tokenizer.json").is_file();
    let found = named.into_iter().chain([root.join("build/models")]).map(|dir| dir.join(name)).find(has_both);
    if found.is_none() {
        println!("SKIPPED {name}: not with model.gguf and hf/tokenizer.json in METRALE_CACHE or build/models");
    }
    found
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

/// Both ways to get the tokenizer of a model: from `tokenizer.json`, from GGUF metadata.
fn both(name: &str) -> Option<[(&'static str, Tokenizer); 2]> {
    let timed = |what: &'static str, load: &dyn Fn() -> Tokenizer| {
        let start = Instant::now();
        let tokenizer = load();
        println!("{name} {what}: {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
        (what, tokenizer)
    };
    let (json, metadata) = if name == "stories260k" {
        (fixture("stories260k"), as_map(&fixture_json("stories260k/gguf.json")))
    } else {
        let folder = model_folder(name)?;
        (folder.join("hf"), gguf_metadata(&folder.join("model.gguf")))
    };
    let vocab = vocab(&metadata);
    Some([
        timed("json", &|| Tokenizer::from_folder(&json).unwrap().unwrap()),
        timed("gguf", &|| Tokenizer::from_gguf(vocab.clone()).unwrap()),
    ])
}

#[test]
fn ids_equal_the_reference() {
    let listed = fixture_json("strings.json");
    let prompts = fixture_json("prompts.json");
    for name in MODELS {
        let Some(tokenizers) = both(name) else { continue };
        for (what, tokenizer) in &tokenizers {
            let strings = listed["strings"].as_array().unwrap();
            for (string, expected) in strings.iter().zip(listed["ids"][name].as_array().unwrap()) {
                let text = string.as_str().unwrap();
                assert_eq!(tokenizer.encode(text, true, true).unwrap(), ids(expected), "{name} {what}: {text:?}");
            }
            for prompt in prompts[name].as_array().unwrap() {
                let text = prompt["text"].as_str().unwrap();
                assert_eq!(tokenizer.encode(text, true, true).unwrap(), ids(&prompt["ids"]), "{name} {what}: {text:?}");
            }
        }
    }
}

#[test]
fn decoding_gives_the_text_back() {
    let listed = fixture_json("strings.json");
    for name in MODELS {
        let Some(tokenizers) = both(name) else { continue };
        let [json, gguf] = tokenizers.map(|(_, t)| t);
        for id in 0..json.vocab_len() as i32 {
            assert_eq!(json.token_bytes(id).ok(), gguf.token_bytes(id).ok(), "{name}: token {id}");
        }
        for string in listed["strings"].as_array().unwrap() {
            let text = string.as_str().unwrap();
            // NFC and a literal U+2581 do not come back; that is how these vocabularies are.
            if text.contains('\u{2581}') || (name.starts_with("qwen") && text.contains(['\u{301}', '\u{303}', '\u{1100}', '\u{212B}'])) {
                continue;
            }
            for (tokenizer, parse) in [(&json, true), (&json, false), (&gguf, true), (&gguf, false)] {
                let tokens = tokenizer.encode(text, false, parse).unwrap();
                let back = tokenizer.decode(&tokens, false).unwrap();
                // SentencePiece puts a blank before each text that follows a special token.
                if !(name == "stories260k" && parse && text.contains('<')) {
                    assert_eq!(String::from_utf8_lossy(&back), text, "{name} {parse}");
                }
                assert!(parse || tokens.iter().all(|&t| !tokenizer.is_special(t) || Some(t) == tokenizer.unk()), "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn encoding_works_on_a_small_stack() {
    let listed = fixture_json("strings.json");
    for name in MODELS {
        let Some([(_, tokenizer), _]) = both(name) else { continue };
        let mut text: String = listed["strings"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
        text = text.repeat(20);
        let small = std::thread::Builder::new().stack_size(64 << 10);
        std::thread::scope(|scope| {
            let count = small.spawn_scoped(scope, || tokenizer.encode(&text, true, false).unwrap().len()).unwrap().join().unwrap();
            assert!(count > 1000);
        });
    }
}

#[test]
fn too_long_a_text_is_refused() {
    let tokenizer = Tokenizer::from_folder(&fixture("stories260k")).unwrap().unwrap();
    let text = "a".repeat((16 << 20) + 1);
    assert_eq!(tokenizer.encode(&text, true, true).unwrap_err().kind(), crate::error::Kind::TooLarge);
    assert!(Tokenizer::from_folder(&fixture("no such folder")).unwrap().is_none());
}

#[test]
fn no_thread_pool_is_started() {
    let tokenizer = Tokenizer::from_folder(&fixture("stories260k")).unwrap().unwrap();
    tokenizer.encode("Once upon a time", true, true).unwrap();
    assert!(!tokenizers::utils::parallelism::has_parallelism_been_used());
}

#[test]
fn chats_render_like_jinja() {
    let chats = fixture_json("chats.json");
    for chat in chats.as_array().unwrap() {
        let text = |key: &str| chat[key].as_str().unwrap_or_default();
        let template = ChatTemplate::new(text("template"), text("bos_token"), text("eos_token")).unwrap();
        let tools = chat.get("tools");
        let prompt = chat.get("add_generation_prompt").is_none_or(|v| v.as_bool().unwrap());
        let got = template.render(&chat["messages"], tools, prompt, &Value::Null, None).unwrap();
        assert_eq!(got, text("expected"), "{} {}", text("model"), text("title"));
    }
}

#[test]
fn template_features_work_like_in_jinja() {
    let fixture = fixture_json("features.json");
    let mut wrong = Vec::new();
    for feature in fixture["features"].as_array().unwrap() {
        let (source, expected) = (feature["template"].as_str().unwrap(), feature["expected"].as_str().unwrap());
        let got = ChatTemplate::new(source, "<s>", "</s>").and_then(|t| t.render(&fixture["messages"], None, true, &Value::Null, None));
        if got.as_deref() != Ok(expected) {
            wrong.push(format!("{source}\n  expected {expected:?}\n  got      {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

// A reader of just enough GGUF, so that these tests depend on nothing but this module.

fn gguf_metadata(path: &Path) -> HashMap<String, Value> {
    let mut file = BufReader::new(File::open(path).unwrap());
    let mut magic = [0; 8];
    file.read_exact(&mut magic).unwrap();
    assert_eq!(&magic, b"GGUF\x03\0\0\0");
    let (_, count) = (u64_of(&mut file), u64_of(&mut file));
    let mut pairs = HashMap::new();
    for _ in 0..count {
        let key = string_of(&mut file);
        let kind = u32_of(&mut file);
        let value = value_of(&mut file, kind);
        if key.starts_with("tokenizer.") {
            pairs.insert(key, value);
        }
    }
    pairs
}

fn bytes_of<const N: usize>(file: &mut impl Read) -> [u8; N] {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes).unwrap();
    bytes
}

fn u32_of(file: &mut impl Read) -> u32 {
    u32::from_le_bytes(bytes_of(file))
}

fn u64_of(file: &mut impl Read) -> u64 {
    u64::from_le_bytes(bytes_of(file))
}

fn string_of(file: &mut impl Read) -> String {
    let mut bytes = vec![0; u64_of(file) as usize];
    file.read_exact(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn value_of(file: &mut impl Read, kind: u32) -> Value {
    match kind {
        0 => bytes_of::<1>(file)[0].into(),
        1 => (bytes_of::<1>(file)[0] as i8).into(),
        2 => u16::from_le_bytes(bytes_of(file)).into(),
        3 => i16::from_le_bytes(bytes_of(file)).into(),
        4 => u32_of(file).into(),
        5 => (u32_of(file) as i32).into(),
        6 => f64::from(f32::from_bits(u32_of(file))).into(),
        7 => (bytes_of::<1>(file)[0] != 0).into(),
        8 => string_of(file).into(),
        9 => {
            let item = u32_of(file);
            (0..u64_of(file)).map(|_| value_of(file, item)).collect()
        }
        10 => u64_of(file).into(),
        11 => (u64_of(file) as i64).into(),
        12 => f64::from_bits(u64_of(file)).into(),
        other => panic!("GGUF value type {other}"),
    }
}

fn as_map(value: &Value) -> HashMap<String, Value> {
    value.as_object().unwrap().iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn vocab(metadata: &HashMap<String, Value>) -> GgufVocab<'static> {
    let get = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let text = |key: &str| get(key).and_then(Value::as_str).unwrap_or_default().to_string();
    let id = |key: &str| get(&format!("{key}_token_id")).and_then(Value::as_i64);
    let flag = |key: &str| get(key).and_then(Value::as_bool);
    let list = |key: &str| get(key).and_then(Value::as_array);
    let texts = |key: &str| list(key).into_iter().flatten().map(|v| v.as_str().unwrap().to_string().into()).collect();
    GgufVocab {
        model: text("model"),
        pre: text("pre"),
        tokens: texts("tokens"),
        scores: list("scores").map(|l| l.iter().map(|v| v.as_f64().unwrap() as f32).collect()),
        types: list("token_type").map(|l| l.iter().map(|v| v.as_i64().unwrap() as i32).collect()),
        merges: texts("merges"),
        bos: id("bos"),
        eos: id("eos"),
        eot: id("eot"),
        eom: id("eom"),
        unk: id("unknown"),
        pad: id("padding"),
        add_bos: flag("add_bos_token"),
        add_eos: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
        chat_template: metadata.get("tokenizer.chat_template").and_then(Value::as_str).map(str::to_string),
        named_templates: Vec::new(),
    }
}
