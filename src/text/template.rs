//! Chat templates: messages to the text that the model was trained to see.
//!
//! Templates are Jinja programs that come with a model, so they are a stranger's code. They run in `minijinja` (nothing of
//! the host is reachable) with its Python methods, under limits: length and form of the source (`template_source.rs`),
//! instructions, calls, depth and length of what is assigned, length of the output. They run on a stack of their own,
//! which is large enough for the deepest value these limits admit: 200 frames that each add one expression (150 deep) to
//! an argument that is at most 300 deep.

use std::fmt::Write as _;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, context};
use serde_json::Value as Json;

use super::clock::Clock;
use super::own_stack;
use super::python;
use super::template_source::{self, CHECK_ATTRIBUTE, CHECK_VARIABLE};
use crate::ensure;
use crate::error::{Error, Kind, Result};

/// Stack for compiling and rendering; see the top of the file. Only what is touched is ever real.
const STACK: usize = 64 << 20;
/// Calls and blocks inside each other. A call of a macro counts for about five.
const MAX_FRAMES: usize = 200;
/// Instructions for the template itself, and for each value in messages and tools.
const FUEL: u64 = 1_000_000;
const FUEL_PER_VALUE: u64 = 2_000;
/// Deepest argument, and deepest value that is assigned.
const MAX_ARGUMENT_DEPTH: usize = 128;
const MAX_VALUE_DEPTH: usize = 300;
/// Longest text that is assigned, and that comes out, beyond a multiple of what went in.
const MAX_TEXT: usize = 16 << 20;

/// A chat template, checked and ready to render. `Send + Sync`.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: Arc<str>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles the source once, to find mistakes early. `bos` and `eos` are the texts of `bos_token` and `eos_token`,
    /// empty where a model has none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        let source = template_source::prepare(source)?;
        own_stack::run(STACK, "chat template", || {
            environment(&Run::new(0, Clock::now())).template_from_str(&source).map(|_| ()).map_err(|e| failed(&e, None))
        })?;
        Ok(ChatTemplate { source: source.into(), bos: bos.to_string(), eos: eos.to_string() })
    }

    /// The prompt for these messages. `tools` is a list of JSON schemas or absent; `extra` is an object with further
    /// variables (`documents`, `enable_thinking`, ...), which stand above the usual ones; `now` is what `strftime_now`
    /// tells, the current UTC time if absent.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        extra: &Json,
        now: Option<Clock>,
    ) -> Result<String> {
        ensure!(extra.is_object() || extra.is_null(), InvalidArgument, "extra template variables must be an object");
        let mut size = Size::default();
        for (name, value) in [("messages", Some(messages)), ("tools", tools), ("extra", Some(extra))] {
            if let Some(value) = value {
                size.add(value, 0).ok_or_else(|| too_deep(name))?;
            }
        }
        own_stack::run(STACK, "chat template", || {
            let run = Run::new(size.bytes, now.unwrap_or_else(Clock::now));
            let mut env = environment(&run);
            env.set_fuel(Some(FUEL + FUEL_PER_VALUE.saturating_mul(size.values)));
            let failed = |e: JinjaError| failed(&e, run.raised());
            let template = env.template_from_str(&self.source).map_err(failed)?;
            let base = context! {
                messages => Value::from_serialize(messages),
                tools => tools.map_or_else(|| Value::from(()), Value::from_serialize),
                add_generation_prompt,
                bos_token => self.bos.as_str(),
                eos_token => self.eos.as_str(),
            };
            let variables = if extra.is_object() {
                context! { ..Value::from_serialize(extra), ..base }
            } else {
                base
            };
            let mut out = Capped { text: Vec::new(), limit: run.text_limit, passed: false };
            match template.render_captured_to(variables, &mut out) {
                _ if out.passed => Err(Error::new(Kind::LimitExceeded, format!("chat template wrote more than {} bytes", out.limit))),
                Err(e) => Err(failed(e)),
                Ok(_) => String::from_utf8(out.text).map_err(|e| Error::new(Kind::Internal, format!("chat template: {e}"))),
            }
        })
    }
}

/// What one rendering shares with its functions.
#[derive(Clone)]
struct Run {
    /// The text of `raise_exception`.
    raised: Arc<Mutex<Option<String>>>,
    text_limit: usize,
    now: Clock,
}

impl Run {
    fn new(input_bytes: usize, now: Clock) -> Run {
        Run { raised: Arc::default(), text_limit: MAX_TEXT.saturating_add(input_bytes.saturating_mul(8)), now }
    }

    fn raised(&self) -> Option<String> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The engine as transformers sets up Jinja: blocks take their line with them, nothing is escaped.
fn environment(run: &Run) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_recursion_limit(MAX_FRAMES);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => out.write_str(text)?,
            None => out.write_str(&python::text(value)?)?,
        }
        Ok(())
    });
    env.add_filter("tojson", |value: Value, indent: Option<Value>, kwargs| python::tojson(&value, indent, kwargs));
    env.add_filter("string", |value: Value| python::text(&value));
    let raised = Arc::clone(&run.raised);
    env.add_function("raise_exception", move |message: Rest<Value>| -> std::result::Result<Value, JinjaError> {
        let text = message.first().map_or(Ok(String::new()), python::text)?;
        *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.clone());
        Err(JinjaError::new(ErrorKind::InvalidOperation, text))
    });
    let now = run.now;
    env.add_function("strftime_now", move |format: &str| {
        let text = format.len() <= 1024;
        let text = if text { now.format(format) } else { None };
        text.ok_or_else(|| JinjaError::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown format '{format:.64}'")))
    });
    for (name, data_only) in [(CHECK_VARIABLE, false), (CHECK_ATTRIBUTE, true)] {
        let limit = run.text_limit;
        env.add_filter(name, move |value: Value| -> std::result::Result<Value, JinjaError> {
            let mut check = Check { data_only, text_limit: limit, values_left: 1 << 20 };
            check.value(&value, 0)?;
            Ok(value)
        });
    }
    env
}

/// Looks through a value that is about to be kept.
struct Check {
    data_only: bool,
    text_limit: usize,
    values_left: usize,
}

impl Check {
    fn value(&mut self, value: &Value, depth: usize) -> std::result::Result<(), JinjaError> {
        let refuse = |text: &str| Err(JinjaError::new(ErrorKind::OutOfFuel, text.to_string()));
        if depth > MAX_VALUE_DEPTH {
            return refuse("a value is nested too deeply");
        }
        if self.values_left == 0 {
            return refuse("a value has too many parts");
        }
        self.values_left -= 1;
        let Some(object) = value.as_object() else {
            return match value.as_str() {
                Some(text) if text.len() > self.text_limit => refuse("a text is too long"),
                _ => Ok(()),
            };
        };
        // Objects of the engine that can reach other variables, and so themselves.
        let engine = ["Namespace", "loop_object", "macro_object", "closure_object", "module_object"];
        if self.data_only && engine.iter().any(|name| object.type_name().contains(name)) {
            return Err(JinjaError::new(ErrorKind::InvalidOperation, "only data can be kept in a namespace"));
        }
        match value.kind() {
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.value(&key, depth + 1)?;
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
            }
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.value(&item, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Size of the arguments.
#[derive(Default)]
struct Size {
    values: u64,
    bytes: usize,
}

impl Size {
    /// `None` if a value is nested too deeply.
    fn add(&mut self, value: &Json, depth: usize) -> Option<()> {
        if depth > MAX_ARGUMENT_DEPTH {
            return None;
        }
        self.values += 1;
        match value {
            Json::String(text) => self.bytes += text.len(),
            Json::Array(items) => items.iter().try_for_each(|item| self.add(item, depth + 1))?,
            Json::Object(map) => map.iter().try_for_each(|(key, item)| {
                self.bytes += key.len();
                self.add(item, depth + 1)
            })?,
            _ => {}
        }
        Some(())
    }
}

fn too_deep(name: &str) -> Error {
    Error::new(Kind::LimitExceeded, format!("{name} is nested more than {MAX_ARGUMENT_DEPTH} deep")).named(name)
}

/// Collects output up to a limit.
struct Capped {
    text: Vec<u8>,
    limit: usize,
    passed: bool,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.text.len() {
            self.passed = true;
            return Err(io::Error::other("output limit"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine's error as ours: the template's own text where it raised one, else what went wrong and in which line.
fn failed(error: &JinjaError, raised: Option<String>) -> Error {
    if let Some(text) = raised {
        return Error::new(Kind::Template, text);
    }
    let mut text = "chat template: ".to_string();
    let mut kind = if error.kind() == ErrorKind::OutOfFuel { Kind::LimitExceeded } else { Kind::Template };
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut first = true;
    while let Some(e) = next {
        let _ = write!(text, "{}{e}", if first { "" } else { ": " });
        first = false;
        next = e.source();
    }
    // The parser and the machine report their limits as errors of other kinds.
    if text.contains("recursion limit") {
        kind = Kind::LimitExceeded;
    }
    let error_at = Error::new(kind, text);
    match error.line() {
        Some(line) => error_at.at(line as u64),
        None => error_at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, extra: Json) -> Result<String> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(
            &json!([{"role": "user", "content": "hi"}]),
            None,
            true,
            &extra,
            Some(Clock { unix_seconds: 0, utc_offset: 0 }),
        )
    }

    /// On a stack as small as a host may have.
    fn render_small(source: String) -> Result<String> {
        let thread = std::thread::Builder::new().stack_size(64 << 10).spawn(move || render(&source, Json::Null));
        thread.unwrap().join().expect("no panic")
    }

    #[test]
    fn prints_like_python() {
        // Expected texts are what Jinja2 on Python prints for the same source.
        let cases = [
            ("{{ true }} {{ none }} {{ 1.0 }} {{ 1e16 }} {{ 0.00001 }} {{ nothing }}|", "True None 1.0 1e+16 1e-05 |"),
            ("{{ [1, 'a', \"it's\", none, {'k': true}] }}", "[1, 'a', \"it's\", None, {'k': True}]"),
            ("{{ {'a': [1, 2.5], 'é': 'x\"\\n'} | tojson }}", "{\"a\": [1, 2.5], \"é\": \"x\\\"\\n\"}"),
            ("{{ {'b': 1, 'a': []} | tojson(indent=2, sort_keys=true) }}", "{\n  \"a\": [],\n  \"b\": 1\n}"),
            ("{{ ['é', 1] | tojson(separators=(',', ':'), ensure_ascii=true) }}", "[\"\\u00e9\",1]"),
            ("{{ '<a>&' | tojson }} {{ '<a>' }}", "\"<a>&\" <a>"),
            ("{{ bos_token }}{{ messages[0].content.upper() }}{{ 'a,b'.split(',')[1] }}{{ eos_token }}", "<s>HIb</s>"),
            ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}", "8"),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "013",
            ),
            ("{% set a, b = 1, 2 %}{{ a + b }}{% set u = nothing %}{{ u is defined }}", "3False"),
            ("{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}{{ m(1, y='z') }}", "121z"),
            ("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970"),
            ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
            ("{% generation %}a{% endgeneration %}{{ add_generation_prompt }}{{ tools is none }}", "aTrueTrue"),
            ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a' ~ 1 ~ true }}", "1a1True"),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source, Json::Null).unwrap_or_else(|e| panic!("{source}: {e:?}")), expected, "{source}");
        }
    }

    #[test]
    fn extra_variables_stand_above() {
        assert_eq!(render("{{ bos_token }}{{ enable_thinking }}", json!({"bos_token": "B", "enable_thinking": false})).unwrap(), "BFalse");
        assert_eq!(render("", json!([1])).unwrap_err().kind(), Kind::InvalidArgument);
    }

    #[test]
    fn errors_carry_the_templates_text() {
        let error = render("{{ raise_exception('Only user and assistant roles are supported!') }}", Json::Null).unwrap_err();
        assert_eq!((error.kind(), error.message()), (Kind::Template, "Only user and assistant roles are supported!"));
        for source in [
            "{% if %}",
            "{{ x.y.z }}",
            "{{ 1 // 0 }}",
            "{% unknown %}",
            "{{ 'a' | nofilter }}",
            "{% include 'x' %}",
            "{{ strftime_now('%Q') }}",
        ] {
            let error = render(source, Json::Null).unwrap_err();
            assert_eq!(error.kind(), Kind::Template, "{source}: {error:?}");
        }
    }

    #[test]
    fn hostile_templates_end() {
        let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
        let looped = |body: &str| {
            format!(
                "{{% set ns = namespace(x=[], s='ab') %}}{{% for a in range(90000) %}}{{% set ns.{body} %}}{{% endfor %}}{{{{ ns.x }}}}"
            )
        };
        let cases: Vec<String> = vec![
            format!("{{{{ {} }}}}", deep("[", "]", 100_000)),
            format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
            format!("{{{{ {}x.y }}}}", "- ".repeat(100_000)),
            format!("{{{{ {}x.y.z }}}}", "not ".repeat(50_000)),
            format!("{{{{ x{} }}}}", ".y".repeat(100_000)),
            format!("{{{{ x{} }}}}", ".y".repeat(2000)),
            format!("{{{{ {}x.y.z }}}}", "not ".repeat(1000)).repeat(60),
            format!("{{{{ 1{} }}}}", "|string".repeat(30_000)),
            format!("{{% if x %}}{}{{% endif %}}{{{{ x.y.z }}}}", "{% elif x %}".repeat(20_000)),
            deep("{% if true %}", "{% endif %}", 10_000),
            deep("{% for x in [1] %}", "{% endfor %}", 8_000),
            looped("x = [ns.x]"),
            looped("x = ns"),
            looped("x = [ns]"),
            looped("s = ns.s ~ ns.s"),
            looped("x = ns.x + [ns.x]"),
            "{% set x = [] %}".to_string() + &"{% set x = [[[[[[[[x]]]]]]]] %}".repeat(5000) + "{{ x }}",
            "{% macro m(x) %}{{ m([[[[[[[[[[x]]]]]]]]]]) }}{% endmacro %}{{ m(1) }}".to_string(),
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".to_string(),
            "{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}".to_string(),
            "{% set ns = namespace() %}{% macro m() %}{{ ns }}{% endmacro %}{% set ns.m = m %}{{ ns }}".to_string(),
            "{% for a in [1] %}{% set ns = namespace() %}{% for n in [ns, ns] %}{% set ns.l = loop %}{{ ns }}{% endfor %}{% endfor %}"
                .to_string(),
        ];
        for source in cases {
            let start = source.chars().take(90).collect::<String>();
            let began = std::time::Instant::now();
            let error = render_small(source).expect_err(&start);
            assert!(matches!(error.kind(), Kind::LimitExceeded | Kind::Template), "{start}: {error:?}");
            assert!(began.elapsed().as_secs() < 60, "{start}: {:?}", began.elapsed());
        }
    }

    #[test]
    fn the_deepest_value_the_limits_admit_is_dropped_and_printed() {
        // Each call of the macro is given an argument that is 100 deeper than the one before.
        let nest = format!("{}x{}", "[".repeat(100), "]".repeat(100));
        for shown in ["{{ x }}", "{{ x | tojson }}", "{{ x == [x] }}", "{{ [x] | join }}", "{{ x | pprint }}"] {
            let source = format!(
                "{{% macro m(x, n) %}}{{% if n %}}{{{{ m({nest}, n - 1) }}}}{{% else %}}{shown}{{% endif %}}{{% endmacro %}}{{{{ m(1, 30) }}}}"
            );
            let _ = render_small(source);
        }
    }

    #[test]
    fn deep_arguments_are_refused() {
        let mut value = json!(1);
        for _ in 0..MAX_ARGUMENT_DEPTH {
            value = json!([value]);
        }
        let template = ChatTemplate::new("{{ messages }}", "", "").unwrap();
        assert!(template.render(&value, None, false, &Json::Null, None).is_ok());
        let error = template.render(&json!([value]), None, false, &Json::Null, None).unwrap_err();
        assert_eq!((error.kind(), error.name()), (Kind::LimitExceeded, Some("messages")));
    }
}
