//! Grammars: what a sequence may say, as a JSON schema, a regular expression, or a GBNF or Lark grammar.
//!
//! The parser is `llguidance`'s; here is what makes it fit to live in somebody else's process. A grammar is compiled for
//! one vocabulary, by exact token bytes. Everything of the dependency runs on a stack of its own (the caller may have
//! 64 KiB), within limits on size, depth and work, and what it panics about comes back as an error. [`Grammar`] is
//! immutable and shared; a [`Constraint`] is one sequence's way through it.

mod check;
mod constraint;
mod gbnf;
mod vocabulary;

use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};

use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::text::own_stack;

pub use constraint::Constraint;
pub use vocabulary::Vocabulary;

/// Longest source text of a grammar, in bytes.
pub const MAX_SOURCE: usize = 1 << 20;

/// Stack for compiling. Recursion follows nesting, which is limited to [`MAX_DEPTH`], and chains of rules, which are
/// limited to [`MAX_RULES`]. Only pages that are touched cost memory.
const COMPILE_STACK: usize = 512 << 20;

/// Deepest nesting of a source text.
const MAX_DEPTH: usize = 128;

/// Most rules or references of a source text.
const MAX_RULES: usize = 10_000;

/// Limits on the work of the parser. They count operations, not time, so that the same input always ends the same way;
/// the numbers keep a token's mask within 50 milliseconds on an ordinary processor (docs/latency.md).
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 500_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Limits for rules of the author's own (GBNF, Lark), which may be as ambiguous as a grammar can be. What the parser counts are items;
/// under such rules each item of a row is found again and again, so that a row takes the cube of its items, and a mask the items of
/// all its rows times the square of a row's. Rules that are only wide have rows as long as they have alternatives, which count as they are.
fn rule_limits(source: &str) -> ParserLimits {
    let alternatives = source.bytes().filter(|b| b"|?*+{:".contains(b)).count();
    let all = limits();
    ParserLimits {
        max_items_in_row: (300 + 2 * alternatives).min(all.max_items_in_row),
        step_max_items: (15_000 + 4 * alternatives).min(all.step_max_items),
        ..all
    }
}

/// A compiled grammar; any number of sequences may follow it.
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// The parser before the first token. It is only ever copied.
    start: TokenParser,
    fingerprint: u64,
}

impl Grammar {
    /// JSON values that a schema allows.
    pub fn json_schema(vocabulary: &Arc<Vocabulary>, schema: &str) -> Result<Grammar> {
        Grammar::compile(vocabulary, "JSON schema", schema, limits(), || {
            let schema = check::json(schema)?;
            Ok(GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema)))
        })
    }

    /// A grammar in GBNF: rules `name ::= ...`, the start is `root`.
    pub fn gbnf(vocabulary: &Arc<Vocabulary>, source: &str) -> Result<Grammar> {
        Grammar::compile(vocabulary, "GBNF grammar", source, rule_limits(source), || Ok(lark_init(gbnf::to_lark(source)?)))
    }

    /// A grammar in Lark's notation: rules `name: ...`, the start is `start`.
    pub fn lark(vocabulary: &Arc<Vocabulary>, source: &str) -> Result<Grammar> {
        Grammar::compile(vocabulary, "Lark grammar", source, rule_limits(source), || {
            check::lark(source)?;
            Ok(lark_init(source.to_string()))
        })
    }

    /// Texts that a regular expression matches from their first to their last byte.
    pub fn regex(vocabulary: &Arc<Vocabulary>, pattern: &str) -> Result<Grammar> {
        Grammar::compile(vocabulary, "regular expression", pattern, limits(), || {
            check::regex(pattern)?;
            Ok(GrammarInit::Serialized(TopLevelGrammar::from_regex(pattern)))
        })
    }

    /// A number of notation and text, the same in every process; never 0.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The vocabulary it was compiled for.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    fn compile(
        vocabulary: &Arc<Vocabulary>,
        what: &str,
        source: &str,
        limits: ParserLimits,
        init: impl FnOnce() -> Result<GrammarInit> + Send,
    ) -> Result<Grammar> {
        if source.len() > MAX_SOURCE {
            let text = format!("{what} of {} bytes; at most {MAX_SOURCE} are compiled", source.len());
            return Err(Error::new(Kind::LimitExceeded, text).sizes(source.len() as u64, MAX_SOURCE as u64));
        }
        ensure!(!source.trim().is_empty(), InvalidGrammar, "{what}: it is empty");
        let compiled = own_stack::run(COMPILE_STACK, what, || {
            let init = init()?;
            let mut parser = vocabulary.parser(init, limits).map_err(|text| check::refused(&text, source))?;
            parser.start_without_prompt();
            Ok(parser)
        });
        let start = compiled.map_err(|e| e.context(what))?;
        Ok(Grammar { vocabulary: Arc::clone(vocabulary), start, fingerprint: fingerprint(what, source) })
    }

    /// A parser at the start that shares nothing that changes.
    fn parser(&self) -> TokenParser {
        self.start.deep_clone()
    }
}

/// FNV-1a.
fn fingerprint(what: &str, source: &str) -> u64 {
    let bytes = what.bytes().chain([0]).chain(source.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum: u64, b| (sum ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)).max(1)
}

fn lark_init(source: String) -> GrammarInit {
    GrammarInit::Serialized(TopLevelGrammar::from_lark(source))
}

#[cfg(test)]
mod random_schemas;
#[cfg(test)]
mod tests;
