//! How long a grammar's mask takes: the worst of many tokens under grammars made to be slow, over a real vocabulary; and what a fork pays
//! for its first mask, by copying the parser and by going the whole way anew.
//!
//! `cargo run --release --example mask_time -- MODEL`

use std::sync::Arc;
use std::time::{Duration, Instant};

use metrale::engine;
use metrale::error::Kind;
use metrale::options::LoadOptions;
use metrale::sampling::{Constraint, Grammar};

fn main() {
    let Some(path) = std::env::args().nth(1) else { return eprintln!("usage: mask_time MODEL") };
    let engine = engine::load(path.as_ref(), &LoadOptions::default(), None).unwrap_or_else(|e| panic!("{e}"));
    let begun = Instant::now();
    let vocabulary = engine.grammar_vocabulary().unwrap_or_else(|e| panic!("{e}"));
    println!("{} tokens; the vocabulary took {:.1?}", vocabulary.rows(), begun.elapsed());
    println!("{:<28} {:>9} {:>7} {:>9} {:>9} {:>9}  ended by", "grammar", "first", "masks", "p50", "p99", "worst");

    let schema = |source: &str| Grammar::json_schema(vocabulary, source);
    let wide: String = (0..500).map(|i| format!("\"property number {i}\":{{\"type\":\"string\",\"maxLength\":{}}},", i + 1)).collect();
    let choices: String = (0..2000).map(|i| format!("\"choice {}\",", i * 7919 % 100_003)).collect();
    let nested = (0..100).fold("true".to_string(), |inner, _| format!("{{\"type\":\"array\",\"items\":{inner}}}"));
    let cases: Vec<(&str, metrale::error::Result<Grammar>)> = vec![
        ("any JSON", schema("true")),
        ("string", schema(r#"{"type":"string"}"#)),
        ("string of 1e9", schema(r#"{"type":"string","maxLength":1000000000}"#)),
        (
            "arrays of 1e9 nested",
            schema(
                r#"{"type":"array","maxItems":1000000000,"items":{"type":"array","maxItems":1000000000,"items":{"type":"string","maxLength":1000000000}}}"#,
            ),
        ),
        ("500 properties", schema(&format!("{{\"type\":\"object\",\"properties\":{{{}}}}}", wide.trim_end_matches(',')))),
        ("2,000 choices", schema(&format!("{{\"enum\":[{}]}}", choices.trim_end_matches(',')))),
        ("100 deep", schema(&nested)),
        (
            "any of everything",
            schema(
                r##"{"$defs":{"d":{"anyOf":[{"type":"array","items":{"$ref":"#/$defs/d"}},{"type":"object","additionalProperties":{"$ref":"#/$defs/d"}},{"type":"string","pattern":"(a|b)*a(a|b){12}"},{"type":"number"}]}},"$ref":"#/$defs/d"}"##,
            ),
        ),
        ("(a|b)*a(a|b){15}", Grammar::regex(vocabulary, "(a|b)*a(a|b){15}")),
        (r"(\w+\s?){1,1000}", Grammar::regex(vocabulary, r"(\w+\s?){1,1000}")),
        (".{0,5000}x.{0,5000}y", Grammar::regex(vocabulary, ".{0,5000}x.{0,5000}y")),
        ("(.*a){60}", Grammar::regex(vocabulary, "(.*a){60}")),
        (r"[^\x00]*(\p{L}{3,9}\W){200}", Grammar::regex(vocabulary, r"[^\x00]*(\p{L}{3,9}\W){200}")),
        ("ambiguous: s s | a | s s s", Grammar::gbnf(vocabulary, "root ::= s\ns ::= s s | s s s | [a-z] | [ ]")),
        ("empty: (a? a?){...}", Grammar::gbnf(vocabulary, "root ::= e root | [a-z]\ne ::= | \"a\" | e e")),
        (
            "left recursion, 40 rules",
            Grammar::gbnf(
                vocabulary,
                &(0..40)
                    .fold("root ::= r0\n".to_string(), |s, i| {
                        format!("{s}r{i} ::= r{} | r{i} [a-z ] | r{} r{i}\n", (i + 1) % 40, (i + 7) % 40)
                    })
                    .replace("r39 ::=", "r39 ::= [a-z] |"),
            ),
        ),
        (
            "Lark: overlapping terminals",
            Grammar::lark(vocabulary, "start: (A | B | C | D)+\nA: /[a-z ]+/\nB: /[a-y ]+/\nC: /([a-x]| )+/\nD: /(.| )+?;/"),
        ),
    ];
    let mut worst = Duration::ZERO;
    for (name, grammar) in cases {
        match grammar {
            Ok(grammar) => worst = worst.max(measure(name, Arc::new(grammar))),
            Err(e) => println!("{name:<28} refused: {:?}", e.kind()),
        }
    }
    println!("the slowest mask took {worst:.1?}");
    println!("{:<28} {:>7} {:>9} {:>9} {:>9}", "a fork's first token", "after", "fork", "copied", "anew");
    for (name, grammar) in [("any JSON", schema("true")), (r"(\w+\s?){1,1000}", Grammar::regex(vocabulary, r"(\w+\s?){1,1000}"))] {
        fork(name, &Arc::new(grammar.unwrap_or_else(|e| panic!("{e}"))));
    }
}

/// What copying a constraint costs after some tokens, and the next mask of the copy beside that of a parser that starts anew.
fn fork(name: &str, grammar: &Arc<Grammar>) {
    let rows = grammar.vocabulary().rows();
    let mut constraint = Constraint::new(Arc::clone(grammar));
    let (mut tokens, mut state) = (Vec::new(), 1u64);
    while tokens.len() <= 1000 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let logits: Vec<f32> = (0..rows as u64).map(|id| ((id ^ state).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32).collect();
        let goes_on = |id: &usize| !grammar.vocabulary().ends().contains(&(*id as i32));
        let Ok(row) = constraint.mask(&logits) else { break };
        let best = (0..rows).filter(goes_on).max_by(|a, b| row[*a].total_cmp(&row[*b])).filter(|id| row[*id] > f32::NEG_INFINITY);
        let Some(best) = best else { break };
        if [10, 100, 1000].contains(&tokens.len()) {
            let begun = Instant::now();
            let mut copy = constraint.clone();
            let cloned = begun.elapsed();
            let next = |constraint: &mut Constraint| {
                let begun = Instant::now();
                let _ = constraint.take(best as i32, tokens.len());
                let _ = constraint.mask(&logits);
                begun.elapsed()
            };
            let copied = next(&mut copy);
            let mut anew = Constraint::new(Arc::clone(grammar));
            tokens.iter().enumerate().for_each(|(position, &token)| drop(anew.take(token, position)));
            println!("{name:<28} {:>7} {cloned:>9.1?} {copied:>9.1?} {:>9.1?}", tokens.len(), next(&mut anew));
        }
        if constraint.take(best as i32, tokens.len()).is_err() {
            break;
        }
        tokens.push(best as i32);
    }
}

/// Follows a grammar by tokens that are allowed, chosen all over the vocabulary.
fn measure(name: &str, grammar: Arc<Grammar>) -> Duration {
    let rows = grammar.vocabulary().rows();
    let mut times = Vec::new();
    let mut ended = String::from("-");
    let mut first = Duration::ZERO;
    for seed in 0..4u64 {
        let mut constraint = Constraint::new(Arc::clone(&grammar));
        let mut state = seed;
        for position in 0..100 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let logits: Vec<f32> = (0..rows as u64).map(|id| ((id ^ state).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32).collect();
            let begun = Instant::now();
            let row = constraint.mask(&logits);
            let took = begun.elapsed();
            if position == 0 && seed == 0 {
                first = took;
            }
            times.push(took);
            match row {
                Ok(row) => {
                    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(id, _)| id);
                    if constraint.take(best as i32, position).is_err() {
                        break;
                    }
                }
                Err(e) => {
                    if e.kind() != Kind::GrammarDone {
                        ended = format!("{:?}", e.kind());
                    }
                    break;
                }
            }
        }
    }
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{name:<28} {first:>9.1?} {:>7} {:>9.1?} {:>9.1?} {:>9.1?}  {ended}", times.len(), at(0.5), at(0.99), at(1.0));
    at(1.0)
}
