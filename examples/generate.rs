//! Text from Rust: load, tokenize, prefill, decode, text.
//!
//!     generate [--chat] [--max-tokens 256] [--temperature 0] [--threads 0] [--device 0] MODEL PROMPT
//!
//! Continues the prompt, or answers it with the model's chat template; with `--device 1` on the first NVIDIA device. The text goes to stdout as it is
//! made, speed to stderr.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions};
use metrale::error::{Error, Kind, Result};
use metrale::options::LoadOptions;
use metrale::sampling::{Sampler, Stage};
use metrale::text::{StreamOptions, TextStream};
use serde_json::{Value, json};

struct Arguments {
    model: PathBuf,
    prompt: String,
    chat: bool,
    max_tokens: usize,
    temperature: f32,
    options: LoadOptions,
}

fn arguments() -> std::result::Result<Arguments, String> {
    let usage = "usage: generate [--chat] [--max-tokens 256] [--temperature 0] [--threads 0] [--device 0] MODEL PROMPT";
    let mut chat = false;
    let (mut max_tokens, mut temperature, mut options) = (256, 0.0, LoadOptions::default());
    let mut plain = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let bad = |e: &dyn std::fmt::Display| format!("{word}: {e}");
        match word.as_str() {
            "--chat" => chat = true,
            "--max-tokens" => max_tokens = value()?.parse().map_err(|e| bad(&e))?,
            "--temperature" => temperature = value()?.parse().map_err(|e| bad(&e))?,
            "--threads" => options.threads = value()?.parse().map_err(|e| bad(&e))?,
            "--device" => options.device = value()?.parse().map_err(|e| bad(&e))?,
            _ if word.starts_with("--") => return Err(usage.into()),
            _ => plain.push(word),
        }
    }
    let [model, prompt] = <[String; 2]>::try_from(plain).map_err(|_| usage)?;
    Ok(Arguments { model: model.into(), prompt, chat, max_tokens, temperature, options })
}

/// The prompt as tokens: as it stands, or as a user's message that waits for an answer.
fn prompt_tokens(model: &Engine, prompt: &str, chat: bool) -> Result<Vec<i32>> {
    let tokenizer = model.tokenizer()?;
    if !chat {
        return tokenizer.encode(prompt, true, false);
    }
    let messages = json!([{"role": "user", "content": prompt}]);
    let text = model.chat_template()?.render(&messages, None, true, &Value::Null, None)?;
    tokenizer.encode(&text, false, true)
}

/// Tokens per second, and how many, for people.
fn speed(what: &str, tokens: usize, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{what}: {tokens} tokens in {seconds:.2} s: {:.1} tokens/s", tokens as f64 / seconds.max(1e-9));
}

fn show(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|e| Error::new(Kind::Io, format!("stdout: {e}")))
}

fn run(a: &Arguments) -> Result<()> {
    let model = engine::load(&a.model, &a.options, None)?;
    let tokens = prompt_tokens(&model, &a.prompt, a.chat)?;
    let mut sequence = Sequence::new(&model, &SequenceOptions::default())?;
    let start = Instant::now();
    sequence.prefill(&tokens)?;
    speed("prompt", tokens.len(), start);

    let mut chooser = Chooser::new(Sampler::new(&[Stage::MinP(0.05), Stage::Temperature(a.temperature)], 1)?);
    let mut text = TextStream::new(Arc::clone(model.tokenizer()?), &[] as &[&str], StreamOptions::default())?;
    let start = Instant::now();
    let mut made = 0;
    while made < a.max_tokens && sequence.len() < sequence.capacity() {
        let mut token = [0];
        if engine::decode_step(&mut [&mut sequence], &mut [&mut chooser], &mut token)? {
            break;
        }
        made += 1;
        show(&text.push(token[0])?.bytes)?;
    }
    show(&text.flush().bytes)?;
    show(b"\n")?;
    speed("decode", made, start);
    Ok(())
}

fn main() {
    let arguments = arguments().unwrap_or_else(|usage| {
        eprintln!("{usage}");
        std::process::exit(2);
    });
    if let Err(e) = run(&arguments) {
        eprintln!("generate: {e}");
        std::process::exit(1);
    }
}
