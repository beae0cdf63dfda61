//! Masks against a search over all short texts, outputs against readers of their own, and hostile sources on a small stack.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::*;
use crate::sampling::{Sampler, Stage};

/// A vocabulary of these words and an end token after them.
fn vocabulary(words: &[&str]) -> Arc<Vocabulary> {
    let rows = words.len() + 1;
    let words: Vec<Vec<u8>> = words.iter().map(|w| w.as_bytes().to_vec()).collect();
    Vocabulary::new(rows, &[rows as i32 - 1], |id| words.get(id).cloned().unwrap_or_default()).unwrap()
}

/// Every printable ASCII character, some words, and an end token.
pub(super) fn ascii() -> (Vec<String>, Arc<Vocabulary>) {
    let mut words: Vec<String> = (b' '..=b'~').map(|b| char::from(b).to_string()).collect();
    words.extend(["\n", "true", "null", "\": ", "{\"", "\"}", ", ", "12", "abc", "\",", "é", "[1"].map(String::from));
    let vocabulary = vocabulary(&words.iter().map(String::as_str).collect::<Vec<_>>());
    (words, vocabulary)
}

pub(super) fn pseudo_random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    *state >> 33
}

/// A random text under a grammar: `None` if it has not ended after so many tokens.
fn random_text(grammar: &Arc<Grammar>, words: &[String], seed: u64, most: usize) -> Option<String> {
    let mut constraint = Constraint::new(Arc::clone(grammar));
    let mut sampler = Sampler::new(&[Stage::Temperature(1.0)], seed).unwrap();
    let (mut text, mut state) = (String::new(), seed);
    for position in 0..most {
        let mut logits: Vec<f32> = (0..=words.len()).map(|_| (pseudo_random(&mut state) % 8) as f32).collect();
        // The end and what closes are likelier, so that texts end.
        for (id, word) in words.iter().enumerate() {
            logits[id] += if ["\"", "}", "]", "\"}"].contains(&word.as_str()) { 5.0 } else { 0.0 };
        }
        logits[words.len()] += 8.0;
        let token = sampler.sample_under(&mut constraint, &logits, &[]).unwrap_or_else(|e| panic!("after {text:?}: {e}"));
        constraint.take(token, position).unwrap();
        if token as usize == words.len() {
            assert_eq!(constraint.mask(&logits).unwrap_err().kind(), Kind::GrammarDone);
            return Some(text);
        }
        text.push_str(&words[token as usize]);
    }
    None
}

/// All texts of at most `longest` letters.
fn all_texts(letters: &[char], longest: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut from = 0;
    for _ in 0..longest {
        let to = all.len();
        for index in from..to {
            for &letter in letters {
                all.push(format!("{}{letter}", all[index]));
            }
        }
        from = to;
    }
    all
}

/// Follows random ways of at most 4 letters through a grammar and compares every mask, token by token, with what the language
/// allows. `texts` are the language's texts, long enough that every beginning of at most 7 letters is one of theirs.
fn masks_agree(grammar: Grammar, words: &[&str], texts: &[String]) {
    assert!(!texts.is_empty());
    let beginnings: HashSet<&str> = texts.iter().flat_map(|t| (0..=t.len()).map(move |n| &t[..n])).collect();
    let whole: HashSet<&str> = texts.iter().map(String::as_str).collect();
    let grammar = Arc::new(grammar);
    let logits = vec![0.5f32; words.len() + 1];
    for seed in 0..12u64 {
        let (mut constraint, mut text, mut state) = (Constraint::new(Arc::clone(&grammar)), String::new(), seed);
        loop {
            let expected: Vec<bool> = words.iter().map(|w| beginnings.contains(format!("{text}{w}").as_str())).collect();
            let may_end = whole.contains(text.as_str());
            let row = constraint.mask(&logits).unwrap();
            let found: Vec<bool> = row.iter().map(|&x| x == 0.5).collect();
            assert_eq!(found[..words.len()], expected, "after {text:?}, of {words:?}");
            assert_eq!(found[words.len()], may_end, "the end after {text:?}");
            // A copy, and a token taken and given back, see the same.
            assert_eq!(constraint.clone().mask(&logits).unwrap(), constraint.mask(&logits).unwrap());
            let choices: Vec<usize> = (0..words.len()).filter(|&i| expected[i] && text.len() + words[i].len() <= 4).collect();
            if choices.is_empty() {
                break;
            }
            let token = choices[pseudo_random(&mut state) as usize % choices.len()];
            let before = constraint.mask(&logits).unwrap().to_vec();
            constraint.take(token as i32, text.len()).unwrap();
            let _ = constraint.mask(&logits);
            constraint.undo();
            assert_eq!(constraint.mask(&logits).unwrap(), before);
            constraint.take(token as i32, text.len()).unwrap();
            text.push_str(words[token]);
        }
    }
}

/// Copies at random places, of copies too, each on its own way, taking back and forking on: their masks are those of a parser that goes
/// the whole way anew. Going on from a copy costs less than the way.
#[test]
fn copies_go_on_from_where_they_are() {
    let (words, vocabulary) = ascii();
    let schema =
        r#"{"type":"array","items":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"number"}},"required":["a"]}}"#;
    for (kind, grammar) in [
        ("schema", Grammar::json_schema(&vocabulary, schema)),
        ("regex", Grammar::regex(&vocabulary, "([a-z]+( |, )){3,}x*")),
        ("gbnf", Grammar::gbnf(&vocabulary, "root ::= \"(\" root \")\" | [a-z]+ root | \"[1\" [0-9]*")),
    ] {
        let grammar = Arc::new(grammar.unwrap());
        let logits = vec![1.0f32; words.len() + 1];
        let mut all = vec![(Constraint::new(Arc::clone(&grammar)), Vec::<i32>::new())];
        let (mut state, mut compared) = (kind.len() as u64, 0);
        for _ in 0..400 {
            let at = pseudo_random(&mut state) as usize % all.len();
            let (constraint, tokens) = &mut all[at];
            let mut anew = Constraint::resumed(&grammar, &(0..tokens.len()).collect::<Vec<_>>(), tokens).unwrap();
            match (constraint.mask(&logits), anew.mask(&logits)) {
                (Ok(row), Ok(expected)) => {
                    assert_eq!(row, expected, "{kind} after {tokens:?}");
                    compared += 1;
                    let open: Vec<i32> = (0..words.len() as i32).filter(|&id| row[id as usize] == 1.0).collect();
                    if let Some(&token) = open.get(pseudo_random(&mut state) as usize % open.len().max(1)) {
                        constraint.take(token, tokens.len()).unwrap();
                        tokens.push(token);
                    }
                }
                (row, expected) => assert_eq!(row.unwrap_err(), expected.unwrap_err(), "{kind} after {tokens:?}"),
            }
            match pseudo_random(&mut state) % 8 {
                0 | 1 if all.len() < 12 => {
                    let copy = (all[at].0.clone(), all[at].1.clone());
                    all.push(copy);
                }
                2 => {
                    all[at].1.pop();
                    all[at].0.undo();
                }
                3 => {
                    let length = all[at].1.len() / 2;
                    all[at].1.truncate(length);
                    all[at].0.truncate(length);
                }
                _ => {}
            }
        }
        assert!(compared > 200, "{kind}: {compared} masks");
    }
    // A long way: what a copy pays for its next mask, beside the way anew.
    let grammar = Arc::new(Grammar::regex(&vocabulary, "[a-z ]*").unwrap());
    let mut constraint = Constraint::new(Arc::clone(&grammar));
    let logits = vec![1.0f32; words.len() + 1];
    for position in 0..4000 {
        constraint.mask(&logits).unwrap();
        constraint.take(i32::from(b'a' - b' '), position).unwrap();
    }
    constraint.mask(&logits).unwrap();
    let timed = |copy: &mut Constraint| {
        copy.take(i32::from(b'b' - b' '), 4000).unwrap();
        let begun = Instant::now();
        copy.mask(&logits).unwrap();
        begun.elapsed()
    };
    let copied = (0..5).map(|_| timed(&mut constraint.clone())).min().unwrap();
    let positions: Vec<usize> = (0..4000).collect();
    let mut anew = Constraint::new(Arc::clone(&grammar));
    positions.iter().for_each(|&p| anew.take(i32::from(b'a' - b' '), p).unwrap());
    let whole = timed(&mut anew);
    println!("after 4,000 tokens: a copy goes on in {copied:?}, a parser anew in {whole:?}");
    assert!(copied < whole);
}

/// Those of the texts that an expression matches as a whole.
fn matching(texts: &[String], matcher: &fancy_regex::Regex) -> Vec<String> {
    texts.iter().filter(|text| matcher.is_match(text).unwrap()).cloned().collect()
}

const WORDS: [&str; 14] = ["a", "b", "1", ",", "ab", "ba", "aa", "a1", "11", ",a", "a,", "abb", "1,1", "bbb"];

#[test]
fn masks_are_those_of_a_regular_expression() {
    let vocabulary = vocabulary(&WORDS);
    // In all of these a beginning needs at most two letters more.
    let texts = all_texts(&['a', 'b', '1', ','], 9);
    for pattern in ["a*b", "(ab|a1)+", "a{2,3}(,1)?", "[^a]b?[ab1]", "(a|ab)(1|b1)", "(?:1+,)*b", "a?b?1?,?", ".{2}b", "(aa|bb|a)*1?"] {
        let matcher = fancy_regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
        masks_agree(Grammar::regex(&vocabulary, pattern).unwrap(), &WORDS, &matching(&texts, &matcher));
    }
}

#[test]
fn masks_are_those_of_gbnf() {
    let vocabulary = vocabulary(&WORDS);
    let regular = "root ::= item (\",\" item)* # items\nitem ::= [ab]{1,2} | \"1\"+\n";
    let matcher = fancy_regex::Regex::new("^(?:([ab]{1,2}|1+)(,([ab]{1,2}|1+))*)$").unwrap();
    let texts = matching(&all_texts(&['a', 'b', '1', ','], 8), &matcher);
    masks_agree(Grammar::gbnf(&vocabulary, regular).unwrap(), &WORDS, &texts);
    // Nested: as many b after the middle as a before it.
    let nested = "root ::= \"a\" root \"b\" | \"1\" [1]?";
    let balanced: Vec<String> = (0..9).flat_map(|n| ["1", "11"].map(|middle| "a".repeat(n) + middle + &"b".repeat(n))).collect();
    masks_agree(Grammar::gbnf(&vocabulary, nested).unwrap(), &WORDS, &balanced);
    let lark = "start: \"a\" start \"b\" | /11?/";
    masks_agree(Grammar::lark(&vocabulary, lark).unwrap(), &WORDS, &balanced);
}

#[test]
fn texts_under_a_schema_are_what_it_says() {
    let (words, vocabulary) = ascii();
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":6},"age":{"type":"integer","minimum":0,"maximum":150},
        "tags":{"type":"array","items":{"enum":["x","yy",null]},"minItems":1,"maxItems":3},"ok":{"type":"boolean"}},
        "required":["name","age","tags"],"additionalProperties":false}"#;
    let grammar = Arc::new(Grammar::json_schema(&vocabulary, schema).unwrap());
    let texts: Vec<String> = (0..60).filter_map(|seed| random_text(&grammar, &words, seed, 400)).collect();
    assert!(texts.len() >= 50, "{} of 60 texts ended", texts.len());
    for text in texts {
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let object = value.as_object().unwrap();
        assert!(object["name"].as_str().unwrap().chars().count() <= 6, "{text}");
        assert!(object["age"].as_i64().is_some_and(|age| (0..=150).contains(&age)), "{text}");
        let tags = object["tags"].as_array().unwrap();
        assert!((1..=3).contains(&tags.len()) && tags.iter().all(|t| t.is_null() || t == "x" || t == "yy"), "{text}");
        assert!(object.keys().all(|k| ["name", "age", "tags", "ok"].contains(&k.as_str())), "{text}");
        assert!(object.get("ok").is_none_or(serde_json::Value::is_boolean), "{text}");
    }
}

#[test]
fn texts_under_a_regular_expression_match_it() {
    let (words, vocabulary) = ascii();
    for pattern in [r"[0-9]{4}-[0-9]{2}", r"(abc|true)+,? é?", r"[^\n]{1,9}/x", r#""[a-z"]*\\"#, r"\w+@\w+\.(com|org)"] {
        let matcher = fancy_regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
        let grammar = Arc::new(Grammar::regex(&vocabulary, pattern).unwrap());
        let texts: Vec<String> = (0..20).filter_map(|seed| random_text(&grammar, &words, seed, 200)).collect();
        assert!(!texts.is_empty(), "{pattern}");
        for text in texts {
            assert!(matcher.is_match(&text).unwrap(), "{text:?} for {pattern}");
        }
    }
}

#[test]
fn dead_ends_and_ends_leave_the_constraint_as_it_was() {
    // Nothing in this vocabulary spells a "c".
    let vocabulary = vocabulary(&["a", "b"]);
    let mut constraint = Constraint::new(Arc::new(Grammar::regex(&vocabulary, "a(b|c{2})").unwrap()));
    assert_eq!(constraint.mask(&[1.0, 2.0, 9.0]).unwrap(), [1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    constraint.take(0, 7).unwrap();
    assert_eq!(constraint.mask(&[1.0, 2.0, 9.0]).unwrap(), [f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY]);
    assert_eq!(constraint.mask(&[1.0, f32::NEG_INFINITY, 9.0]).unwrap_err().kind(), Kind::NoValidToken);
    constraint.take(1, 8).unwrap();
    assert_eq!(constraint.mask(&[1.0, 2.0, 9.0]).unwrap(), [f32::NEG_INFINITY, f32::NEG_INFINITY, 9.0]);
    constraint.take(2, 9).unwrap();
    for _ in 0..3 {
        assert_eq!(constraint.mask(&[1.0, 2.0, 9.0]).unwrap_err().kind(), Kind::GrammarDone);
    }
    constraint.truncate(8);
    assert_eq!((constraint.taken(), constraint.mask(&[1.0, 2.0, 9.0]).unwrap()[1]), (1, 2.0));
    let mut blocked = Constraint::new(Arc::new(Grammar::regex(&vocabulary, "ac").unwrap()));
    blocked.mask(&[1.0; 3]).unwrap();
    blocked.take(0, 0).unwrap();
    for _ in 0..3 {
        assert_eq!(blocked.mask(&[1.0; 3]).unwrap_err().kind(), Kind::NoValidToken);
    }
    blocked.undo();
    assert_eq!(blocked.mask(&[1.0; 3]).unwrap(), [1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    // Without an end token the end itself is the news.
    let endless = Vocabulary::new(2, &[], |id| vec![b'a' + id as u8]).unwrap();
    let mut constraint = Constraint::new(Arc::new(Grammar::regex(&endless, "ab").unwrap()));
    constraint.take(0, 0).unwrap();
    constraint.take(1, 1).unwrap();
    assert_eq!(constraint.mask(&[1.0; 2]).unwrap_err().kind(), Kind::GrammarDone);
}

/// Runs on the small stack of a host.
fn on_a_small_stack<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::Builder::new().stack_size(64 << 10).spawn(work).unwrap().join().unwrap()
}

#[test]
fn malformed_sources_say_where() {
    let (_, vocabulary) = ascii();
    on_a_small_stack(move || {
        let regex = |source: &str| Grammar::regex(&vocabulary, source).err().unwrap();
        for (source, at) in [("*a", 0), ("a(b", 1), ("ab)", 2), ("a{2", 1), ("[z-a]", 1), ("a{3,2}", 1)] {
            let e = regex(source);
            assert_eq!((e.kind(), e.offset()), (Kind::InvalidGrammar, Some(at)), "{source}: {e}");
        }
        let json = |source: &str| Grammar::json_schema(&vocabulary, source).err().unwrap();
        assert_eq!((json("{\"a\":\n 1,}").kind(), json("{\"a\":\n 1,}").offset()), (Kind::InvalidGrammar, Some(9)));
        for source in ["[]", "12", r#"{"type":"objekt"}"#, r#"{"type":"string","pattern":"*a"}"#, r##"{"$ref":"#/nowhere"}"##] {
            assert_eq!(json(source).kind(), Kind::InvalidGrammar, "{source}: {}", json(source));
        }
        let gbnf = |source: &str| Grammar::gbnf(&vocabulary, source).err().unwrap();
        let faults = [
            ("root ::= \"a", 9),
            ("root ::= other", 9),
            ("root ::= (\"a\"", 13),
            ("root ::= *", 9),
            ("root ::= [a", 9),
            ("root ::= \"a\"{3,2}", 12),
            ("a ::= \"a\"", 0),
        ];
        for (source, at) in faults {
            assert_eq!((gbnf(source).kind(), gbnf(source).offset()), (Kind::InvalidGrammar, Some(at)), "{source}: {}", gbnf(source));
        }
        let lark = |source: &str| Grammar::lark(&vocabulary, source).err().unwrap();
        for source in ["start: \"a\" (", "start: other", "root ::= \"a\"", "a"] {
            assert_eq!(lark(source).kind(), Kind::InvalidGrammar, "{source}: {}", lark(source));
        }
        // One notation is not taken for the other.
        assert_eq!((gbnf("start: \"a\"").kind(), gbnf("start: \"a\"").offset()), (Kind::InvalidGrammar, Some(5)));
    });
}

#[test]
fn deep_and_large_sources_are_refused_or_compiled_but_never_fatal() {
    let (_, vocabulary) = ascii();
    on_a_small_stack(move || {
        let begun = Instant::now();
        for depth in [10usize, 1_000, 100_000] {
            let expected = if depth == 10 { None } else { Some(Kind::LimitExceeded) };
            let schema = format!("{}true{}", r#"{"items":"#.repeat(depth), "}".repeat(depth));
            assert_eq!(Grammar::json_schema(&vocabulary, &schema).err().map(|e| e.kind()), expected, "schema {depth}");
            let nested = format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
            assert_eq!(Grammar::regex(&vocabulary, &nested).err().map(|e| e.kind()), expected, "regex {depth}");
            let gbnf = format!("root ::= {}\"a\"{}", "(".repeat(depth), ")".repeat(depth));
            assert_eq!(Grammar::gbnf(&vocabulary, &gbnf).err().map(|e| e.kind()), expected, "gbnf {depth}");
            let lark = format!("start: {}\"a\"{}", "(".repeat(depth), ")".repeat(depth));
            assert_eq!(Grammar::lark(&vocabulary, &lark).err().map(|e| e.kind()), expected, "lark {depth}");
            let plus = Grammar::gbnf(&vocabulary, &format!("root ::= \"a\"{}", "+".repeat(depth)));
            assert_eq!(plus.err().map(|e| e.kind()), expected, "gbnf repetitions {depth}");
        }
        // Chains of rules and references, which nest only once they are followed.
        let chain: String = (0..9_000).map(|i| format!("r{i} ::= \"a\" r{} | \"b\" root\n", i + 1)).collect();
        drop(Grammar::gbnf(&vocabulary, &format!("root ::= r0\n{chain}r9000 ::= \"c\"")));
        let chain: String = (0..9_000).map(|i| format!("T{i}: \"a\" T{}\n", i + 1)).collect();
        drop(Grammar::lark(&vocabulary, &format!("start: T0\n{chain}T9000: \"c\"")));
        let chain: String = (0..9_000).map(|i| format!("\"d{i}\":{{\"$ref\":\"#/$defs/d{}\"}},", i + 1)).collect();
        drop(Grammar::json_schema(&vocabulary, &format!("{{\"$defs\":{{{chain}\"d9000\":true}},\"$ref\":\"#/$defs/d0\"}}")));
        // Doubling at every step.
        let doubling: String = (0..60).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
        drop(Grammar::gbnf(&vocabulary, &format!("root ::= r0\n{doubling}r60 ::= \"a\"")));
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
    });
}

#[test]
fn huge_counts_are_neither_expanded_nor_waited_for() {
    let (_, vocabulary) = ascii();
    on_a_small_stack(move || {
        let begun = Instant::now();
        for count in [10u64, 10_000, 1_000_000_000] {
            let sources = [
                Grammar::json_schema(
                    &vocabulary,
                    &format!(r#"{{"type":"array","items":{{"type":"string","maxLength":{count}}},"maxItems":{count}}}"#),
                ),
                Grammar::json_schema(
                    &vocabulary,
                    &format!(r#"{{"type":"array","minItems":{count},"items":{{"type":"array","maxItems":{count}}}}}"#),
                ),
                Grammar::regex(&vocabulary, &format!("(a{{{count}}}b){{0,{count}}}")),
                Grammar::gbnf(&vocabulary, &format!("root ::= (\"a\"{{{count}}} [b] root?){{0,{count}}}")),
            ];
            for (index, grammar) in sources.into_iter().enumerate() {
                let mut constraint = match grammar {
                    Ok(grammar) => Constraint::new(Arc::new(grammar)),
                    Err(e) => {
                        assert!(count > 10 && e.kind() == Kind::LimitExceeded, "source {index}, count {count}: {e:?}");
                        continue;
                    }
                };
                let logits = vec![1.0; vocabulary.rows()];
                for position in 0..20 {
                    match constraint.mask(&logits) {
                        Ok(row) => {
                            let token = row.iter().position(|&x| x == 1.0).unwrap() as i32;
                            constraint.take(token, position).unwrap();
                        }
                        Err(e) => {
                            assert!(matches!(e.kind(), Kind::LimitExceeded | Kind::GrammarDone), "{index} {count}: {e:?}");
                            break;
                        }
                    }
                }
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    });
}

/// Every word of one to three letters from `a` to `p`, so that a mask goes many ways.
fn many_words() -> Arc<Vocabulary> {
    let letters: Vec<char> = ('a'..='p').collect();
    let words = all_texts(&letters, 3);
    vocabulary(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn ambiguous_rules_make_no_more_work_for_a_token_than_the_limit() {
    let rules: [(&str, String); 6] = [
        ("concatenation", "root ::= root root | [a-h] | [i-p]".into()),
        ("by two and three", "root ::= s\ns ::= s s | s s s | [a-h] | [i-p]".into()),
        ("with nothing", "root ::= root root | [a-h]? [i-p]?".into()),
        ("expressions", "root ::= root [a-d] root | root [c-f] root | [a-p]".into()),
        ("splits", "root ::= l l l l l l\nl ::= [a-p] l | l [a-p] |".into()),
        (
            "left recursion over 40 rules",
            (0..40)
                .fold("root ::= r0\n".to_string(), |s, i| format!("{s}r{i} ::= r{} | r{i} [a-p] | r{} r{i}\n", (i + 1) % 40, (i + 7) % 40))
                .replace("r39 ::=", "r39 ::= [a-p] |"),
        ),
    ];
    for (name, source) in rules {
        for vocabulary in [many_words(), ascii().1] {
            let limits = rule_limits(&source);
            let grammar = Arc::new(Grammar::gbnf(&vocabulary, &source).unwrap());
            let mut constraint = Constraint::new(grammar);
            let logits = vec![1.0; vocabulary.rows()];
            let (mut before, mut state, mut ended) = (constraint.work(), 7, false);
            for position in 0..1000 {
                let row = match constraint.mask(&logits) {
                    Ok(row) => row,
                    Err(e) => {
                        assert_eq!(e.kind(), Kind::LimitExceeded, "{name}, token {position}: {e}");
                        ended = true;
                        break;
                    }
                };
                let may: Vec<usize> = (0..row.len() - 1).filter(|&id| row[id] == 1.0).collect();
                let token = may[pseudo_random(&mut state) as usize % may.len()];
                let after = constraint.work();
                // What is taken was made before, when the mask was looked for; the row that goes beyond the limit is its last.
                let most = 2 * (limits.step_max_items + limits.max_items_in_row);
                let items = after.1 - before.1;
                assert!(items <= most, "{name}, token {position}: {items} items in {} rows, at most {most}", after.0 - before.0);
                before = after;
                constraint.take(token as i32, position).unwrap();
            }
            assert!(ended, "{name}: no limit was met");
        }
    }
}

#[test]
fn wide_rules_are_followed() {
    let vocabulary = many_words();
    let words: Vec<String> = all_texts(&('a'..='p').collect::<Vec<_>>(), 2).into_iter().filter(|w| w.len() == 2).collect();
    let choice: Vec<String> = words.iter().map(|w| format!("\"{w}\"")).collect();
    let source = format!("root ::= word{{40}}\nword ::= {}", choice.join(" | "));
    let grammar = Arc::new(Grammar::gbnf(&vocabulary, &source).unwrap());
    let all: Vec<String> = all_texts(&('a'..='p').collect::<Vec<_>>(), 3);
    let text = random_text(&grammar, &all, 5, 200).unwrap();
    assert_eq!(text.len(), 80);
}
