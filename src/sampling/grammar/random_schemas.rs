//! Random schemas times random tokens: whatever a schema says, following it ends in a text that it allows or in an error value, and
//! an error leaves the constraint as it was. 300 schemas, or as many as `METRALE_SCHEMAS` says.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::tests::{ascii, pseudo_random};
use super::*;

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        pseudo_random(&mut self.0) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn count(&mut self) -> u64 {
        [0, 1, 2, 3, 5, 40, 1000, 1_000_000_000][self.below(8) as usize]
    }

    /// A number for bounds.
    fn number(&mut self) -> Value {
        [json!(-1000), json!(-1), json!(0), json!(3), json!(2.5), json!(-0.25), json!(99999), json!(1e18), json!(7)][self.below(9) as usize]
            .clone()
    }

    fn value(&mut self) -> Value {
        [json!("a"), json!("x\"\\\n"), json!(12), json!(-0.5), json!(null), json!(true), json!([1, "b"]), json!({"k": [null]}), json!("é")]
            [self.below(9) as usize]
            .clone()
    }

    fn name(&mut self) -> String {
        ["a", "b", "name", "\"", "x y", "é"][self.below(6) as usize].into()
    }

    fn schema(&mut self, depth: u64) -> Value {
        let mut out = Map::new();
        let bounds = |dice: &mut Dice, out: &mut Map<String, Value>, least: &str, most: &str| {
            let (a, b) = (dice.count(), dice.count());
            // Sometimes they contradict each other.
            let (a, b) = if dice.one_in(8) { (a, b) } else { (a.min(b), a.max(b)) };
            if dice.one_in(2) {
                out.insert(least.into(), a.min(if dice.one_in(5) { a } else { 3 }).into());
            }
            if dice.one_in(2) {
                out.insert(most.into(), b.into());
            }
        };
        match self.below(if depth == 0 { 7 } else { 13 }) {
            0 => drop(out.insert("type".into(), "boolean".into())),
            1 => drop(out.insert("type".into(), "null".into())),
            2 | 3 => {
                out.insert("type".into(), if self.one_in(2) { "integer" } else { "number" }.into());
                for key in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"] {
                    if self.one_in(3) {
                        out.insert(key.into(), self.number());
                    }
                }
            }
            4 | 5 => {
                out.insert("type".into(), "string".into());
                bounds(self, &mut out, "minLength", "maxLength");
                if self.one_in(4) {
                    let patterns = ["^[a-z]{1,3}$", "a+b?", "(x|yy)*", "[0-9]{2}-[0-9]{2}", "*", "(a{1,500}){1,500}", "\\d+\\.\\d"];
                    out.insert("pattern".into(), patterns[self.below(7) as usize].into());
                } else if self.one_in(5) {
                    out.insert("format".into(), ["date", "uuid", "ipv4", "email", "nonsense"][self.below(5) as usize].into());
                }
            }
            6 if self.one_in(2) => drop(out.insert("const".into(), self.value())),
            6 => drop(out.insert("enum".into(), (0..1 + self.below(4)).map(|_| self.value()).collect())),
            7..=9 => {
                out.insert("type".into(), "object".into());
                let mut properties = Map::new();
                for _ in 0..self.below(4) {
                    properties.insert(self.name(), self.schema(depth - 1));
                }
                let required: Vec<String> = properties.keys().filter(|_| self.one_in(2)).cloned().collect();
                out.insert("properties".into(), properties.into());
                if !required.is_empty() {
                    out.insert("required".into(), required.into());
                }
                match self.below(3) {
                    0 => drop(out.insert("additionalProperties".into(), false.into())),
                    1 => drop(out.insert("additionalProperties".into(), self.schema(depth - 1))),
                    _ => {}
                }
            }
            10 | 11 => {
                out.insert("type".into(), "array".into());
                out.insert("items".into(), self.schema(depth - 1));
                bounds(self, &mut out, "minItems", "maxItems");
            }
            _ if self.one_in(3) => drop(out.insert("$ref".into(), "#/$defs/d".into())),
            _ => {
                let key = ["anyOf", "oneOf", "allOf"][self.below(3) as usize];
                out.insert(key.into(), (0..1 + self.below(3)).map(|_| self.schema(depth - 1)).collect());
            }
        }
        if self.one_in(60) {
            out.insert(["surprise", "not", "type", "minLength"][self.below(4) as usize].into(), self.value());
        }
        out.into()
    }

    fn document(&mut self) -> Value {
        let mut schema = self.schema(3);
        if schema.to_string().contains("$ref") {
            let definition = self.schema(2);
            schema["$defs"] = json!({"d": definition});
        }
        schema
    }
}

/// What is wrong with a value, by the plain meaning of the keywords that are used here; formats and multiples are not looked at.
fn fault(schema: &Value, value: &Value, root: &Value) -> Option<String> {
    let wrong = |what: &str| Some(format!("{what}: {value} for {schema}"));
    let keys = schema.as_object()?;
    if let Some(name) = keys.get("type").and_then(Value::as_str) {
        let fits = match name {
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "object" => value.is_object(),
            "array" => value.is_array(),
            _ => true,
        };
        if !fits {
            return wrong("type");
        }
    }
    let number = |key: &str| keys.get(key).and_then(Value::as_f64);
    let within = |least: &str, most: &str, found: f64| number(least).is_none_or(|n| found >= n) && number(most).is_none_or(|n| found <= n);
    if let Some(x) = value.as_f64() {
        let inside = number("exclusiveMinimum").is_none_or(|n| x > n) && number("exclusiveMaximum").is_none_or(|n| x < n);
        if !within("minimum", "maximum", x) || !inside {
            return wrong("bounds");
        }
    }
    if value.as_str().is_some_and(|s| !within("minLength", "maxLength", s.chars().count() as f64)) {
        return wrong("length");
    }
    if let Some(items) = value.as_array() {
        if !within("minItems", "maxItems", items.len() as f64) {
            return wrong("count");
        }
        if let Some(found) = keys.get("items").and_then(|schema| items.iter().find_map(|item| fault(schema, item, root))) {
            return Some(found);
        }
    }
    if let Some(object) = value.as_object() {
        for key in keys.get("required").and_then(Value::as_array).into_iter().flatten() {
            if !object.contains_key(key.as_str().unwrap()) {
                return wrong("required");
            }
        }
        let properties = keys.get("properties").and_then(Value::as_object);
        for (key, item) in object {
            let schema = properties.and_then(|p| p.get(key)).or(keys.get("additionalProperties"));
            match schema {
                Some(Value::Bool(false)) => return wrong("additional"),
                Some(schema) => {
                    if let Some(found) = fault(schema, item, root) {
                        return Some(found);
                    }
                }
                None => {}
            }
        }
    }
    if keys.get("const").is_some_and(|wanted| wanted != value)
        || keys.get("enum").is_some_and(|all| !all.as_array().unwrap().contains(value))
    {
        return wrong("enum");
    }
    let of = |key: &str| keys.get(key).and_then(Value::as_array);
    for any in ["anyOf", "oneOf"] {
        if of(any).is_some_and(|all| all.iter().all(|schema| fault(schema, value, root).is_some())) {
            return wrong(any);
        }
    }
    let all = of("allOf").into_iter().flatten().find_map(|schema| fault(schema, value, root));
    all.or_else(|| keys.get("$ref").and_then(|_| fault(&root["$defs"]["d"], value, root)))
}

#[derive(Default, Debug)]
struct Counts {
    compiled: usize,
    refused: usize,
    limited: usize,
    ended: usize,
    dead: usize,
    masks: usize,
    slowest: Duration,
}

#[test]
fn random_schemas_and_random_tokens_end_in_values() {
    let count: u64 = std::env::var("METRALE_SCHEMAS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let (words, vocabulary) = ascii();
    let mut counts = Counts::default();
    for seed in 0..count {
        let mut dice = Dice(seed * 7919 + 1);
        let schema = dice.document();
        let grammar = match Grammar::json_schema(&vocabulary, &schema.to_string()) {
            Ok(grammar) => Arc::new(grammar),
            Err(e) => {
                let known = matches!(e.kind(), Kind::InvalidGrammar | Kind::LimitExceeded | Kind::Unsupported);
                assert!(known, "{seed}: {schema}: {e:?}");
                counts.refused += 1;
                continue;
            }
        };
        counts.compiled += 1;
        follow(seed, &schema, &grammar, &words, &mut dice, &mut counts);
    }
    println!("{count} schemas: {counts:?}");
    assert!(counts.compiled * 2 > counts.refused && counts.ended > 0);
}

/// Random tokens under one grammar, with steps back and copies between.
fn follow(seed: u64, schema: &Value, grammar: &Arc<Grammar>, words: &[String], dice: &mut Dice, counts: &mut Counts) {
    let mut constraint = Constraint::new(Arc::clone(grammar));
    let mut tokens: Vec<usize> = Vec::new();
    let end = words.len();
    // Late ones close what is open, so that texts end.
    for turn in 0..120 {
        let logits: Vec<f32> =
            (0..=end).map(|id| if turn > 30 && words.get(id).is_none_or(|w| w.contains(['"', '}', ']'])) { 2.0 } else { 1.0 }).collect();
        let begun = Instant::now();
        let mask = constraint.mask(&logits).map(<[f32]>::to_vec);
        counts.slowest = counts.slowest.max(begun.elapsed());
        counts.masks += 1;
        let row = match mask {
            Ok(row) => row,
            Err(e) => {
                assert!(matches!(e.kind(), Kind::NoValidToken | Kind::GrammarDone | Kind::LimitExceeded), "{seed}: {schema}: {e:?}");
                // The same again, here and in a copy; and a step back is exact.
                assert_eq!(constraint.mask(&logits).unwrap_err().kind(), e.kind(), "{seed}: {schema}");
                assert_eq!((constraint.taken(), constraint.clone().taken()), (tokens.len(), tokens.len()));
                counts.limited += usize::from(e.kind() == Kind::LimitExceeded);
                counts.dead += usize::from(e.kind() == Kind::NoValidToken);
                if e.kind() == Kind::GrammarDone {
                    assert_eq!(tokens.pop(), Some(end));
                    let text: String = tokens.iter().map(|&id| words[id].as_str()).collect();
                    match serde_json::from_str::<Value>(&text) {
                        Ok(value) => assert_eq!(fault(schema, &value, schema), None, "{seed}: {text}"),
                        // JSON has no largest number, a reader's f64 has.
                        Err(e) => assert!(e.to_string().contains("out of range"), "{seed}: {text:?} for {schema}: {e}"),
                    }
                    counts.ended += 1;
                }
                return;
            }
        };
        match dice.below(12) {
            0 if !tokens.is_empty() => {
                tokens.pop();
                constraint.undo();
            }
            1 => constraint = constraint.clone(),
            2 if turn % 5 == 0 => {
                let keep = dice.below(tokens.len() as u64 + 1) as usize;
                tokens.truncate(keep);
                constraint.truncate(keep);
            }
            _ => {
                let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let allowed: Vec<usize> = (0..row.len()).filter(|&id| row[id] == best).collect();
                let token = allowed[dice.below(allowed.len() as u64) as usize];
                constraint.take(token as i32, tokens.len()).unwrap();
                tokens.push(token);
            }
        }
    }
}
