//! One sequence's way through a grammar.
//!
//! What counts is the list of tokens that were taken; the parser is a cache that can be made anew from it at any time.
//! So a copy is an exact snapshot, taking a token back is exact, and a parser that failed is simply thrown away. Copies share the
//! parser until one of them goes on: a fork costs nothing, and its next token one copy of the parser instead of all tokens again.

use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;

use super::Grammar;
use crate::error::{self, Error, Kind, Result};
use crate::text::own_stack;
use crate::{bail, ensure};

/// Stack for a step of the parser.
const STACK: usize = 16 << 20;

/// A token that was taken, and where in the sequence it stands.
#[derive(Clone, Copy)]
struct Taken {
    position: usize,
    token: i32,
}

/// The state of one sequence under a grammar.
pub struct Constraint {
    grammar: Arc<Grammar>,
    taken: Vec<Taken>,
    parser: Option<Arc<Parser>>,
    /// The row with everything forbidden at minus infinity.
    row: Vec<f32>,
}

/// The parser after the first `fed` tokens of those taken.
struct Parser {
    parser: TokenParser,
    fed: usize,
    /// What may come next, once known.
    mask: Option<Mask>,
}

#[derive(Clone)]
struct Mask {
    tokens: SimpleVob,
    may_end: bool,
}

impl Constraint {
    /// At the start of a grammar.
    pub fn new(grammar: Arc<Grammar>) -> Constraint {
        Constraint { grammar, taken: Vec::new(), parser: None, row: Vec::new() }
    }

    /// The grammar that is followed.
    pub fn grammar(&self) -> &Arc<Grammar> {
        &self.grammar
    }

    /// A way that was gone before: those of a sequence's `tokens` at the `positions`, in their order. It is gone again at once, so
    /// that what the grammar does not allow is refused here.
    pub fn resumed(grammar: &Arc<Grammar>, positions: &[usize], tokens: &[i32]) -> Result<Constraint> {
        let mut constraint = Constraint::new(Arc::clone(grammar));
        constraint.taken = error::vec_with_capacity(positions.len(), "tokens under a grammar")?;
        for &position in positions {
            let rises = constraint.taken.last().is_none_or(|last| last.position < position);
            let Some(&token) = tokens.get(position).filter(|_| rises && !constraint.ended()) else {
                bail!(CorruptFile, "token {position} of {} cannot be one that the grammar took", tokens.len());
            };
            constraint.taken.push(Taken { position, token });
        }
        match constraint.allowed() {
            Err(e) if !matches!(e.kind(), Kind::GrammarDone | Kind::NoValidToken) => match e.kind() {
                Kind::Internal => bail!(CorruptFile, "the tokens are not what the grammar allows: {}", e.message()),
                _ => Err(e),
            },
            _ => Ok(constraint),
        }
    }

    /// Where in the sequence the tokens stand that were taken.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.taken.iter().map(|t| t.position)
    }

    /// Rows and items that the parser has made since its start.
    #[cfg(test)]
    pub(super) fn work(&self) -> (usize, usize) {
        let stats = self.parser.as_ref().map(|p| p.parser.parser_stats().clone()).unwrap_or_default();
        (stats.rows, stats.all_items)
    }

    /// Tokens taken so far.
    pub fn taken(&self) -> usize {
        self.taken.len()
    }

    /// Whether an end token was taken: nothing can follow.
    fn ended(&self) -> bool {
        self.taken.last().is_some_and(|t| self.grammar.vocabulary.is_end(t.token))
    }

    /// The row with every token that may not come next at minus infinity. Nothing that a later call sees is changed.
    ///
    /// `GrammarDone` when the grammar allows nothing more, `NoValidToken` when no token of the vocabulary goes on or all
    /// that do are at minus infinity, `LimitExceeded` when finding out takes too much work.
    pub fn mask(&mut self, logits: &[f32]) -> Result<&[f32]> {
        let rows = self.grammar.vocabulary.rows();
        ensure!(logits.len() == rows, Mismatch, "the grammar is for rows of {rows} logits, this one has {}", logits.len());
        if self.row.capacity() < rows {
            self.row = error::vec_with_capacity(rows, "a row under a grammar")?;
        }
        let Mask { tokens, may_end } = self.allowed()?;
        let mut row = std::mem::take(&mut self.row);
        row.clear();
        row.resize(rows, f32::NEG_INFINITY);
        tokens.iter_set_entries(|id| {
            if id < rows {
                row[id] = logits[id];
            }
        });
        if may_end {
            for &end in self.grammar.vocabulary.ends() {
                row[end as usize] = logits[end as usize];
            }
        }
        self.row = row;
        if self.row.iter().all(|&x| x == f32::NEG_INFINITY) {
            bail!(NoValidToken, "every token that the grammar allows next has a logit of minus infinity");
        }
        Ok(&self.row)
    }

    /// Takes a token that the last mask allowed; it stands at `position` in the sequence.
    pub fn take(&mut self, token: i32, position: usize) -> Result<()> {
        error::reserve(&mut self.taken, 1, "tokens under a grammar")?;
        self.taken.push(Taken { position, token });
        Ok(())
    }

    /// Takes the newest token back.
    pub fn undo(&mut self) {
        self.taken.pop();
        self.forget_beyond();
    }

    /// Takes back every token at `length` or later in the sequence.
    pub fn truncate(&mut self, length: usize) {
        self.taken.retain(|t| t.position < length);
        self.forget_beyond();
    }

    /// Follows a sequence that lost `count` tokens from `from` on: what was taken stays, those of removed tokens as if they stood at `from`.
    pub fn shift(&mut self, from: usize, count: usize) {
        for taken in self.taken.iter_mut().filter(|taken| taken.position >= from) {
            taken.position = taken.position.saturating_sub(count).max(from);
        }
    }

    /// Drops a parser that has seen tokens which are no longer there.
    fn forget_beyond(&mut self) {
        if self.parser.as_ref().is_some_and(|p| p.fed > self.taken.len()) {
            self.parser = None;
        }
    }

    /// What may come next.
    fn allowed(&mut self) -> Result<Mask> {
        if self.ended() {
            bail!(GrammarDone, "the grammar was followed to its end");
        }
        if let Some(parser) = &self.parser
            && let Parser { fed, mask: Some(mask), .. } = &**parser
            && *fed == self.taken.len()
        {
            return Ok(mask.clone());
        }
        // Out of the way while it works: if it fails there is none, and the next call makes a new one.
        let held = self.parser.take();
        let (grammar, taken) = (&self.grammar, &self.taken);
        let (parser, mask) = own_stack::run(STACK, "grammar", || {
            let mut held = match held {
                Some(parser) => Arc::try_unwrap(parser).unwrap_or_else(|shared| shared.copy()),
                None => Parser { parser: grammar.parser(), fed: 0, mask: None },
            };
            let mask = held.advance(grammar, taken)?;
            Ok((held, mask))
        })?;
        self.parser = Some(Arc::new(parser));
        if mask.tokens.is_zero() && (!mask.may_end || grammar.vocabulary.ends().is_empty()) {
            match mask.may_end {
                true => bail!(GrammarDone, "the grammar was followed to its end, and the model has no token that says so"),
                false => bail!(NoValidToken, "no token of the vocabulary can come next in the grammar"),
            }
        }
        Ok(mask)
    }
}

impl Parser {
    /// One that goes its own way from here.
    fn copy(&self) -> Parser {
        Parser { parser: self.parser.deep_clone(), fed: self.fed, mask: None }
    }

    /// Feeds what was taken since, and finds what may come next.
    fn advance(&mut self, grammar: &Grammar, taken: &[Taken]) -> Result<Mask> {
        self.mask = None;
        for &Taken { token, .. } in &taken[self.fed..] {
            self.parser.consume_token(token as u32).map_err(|e| self.failed(&e.to_string()))?;
            self.fed += 1;
        }
        let mask = self.look(grammar.vocabulary.rows())?;
        self.mask = Some(mask.clone());
        Ok(mask)
    }

    fn look(&mut self, rows: usize) -> Result<Mask> {
        match self.parser.compute_mask() {
            Ok(mut tokens) => {
                let may_end = tokens.get(rows);
                tokens.disallow_token(rows as u32);
                Ok(Mask { tokens, may_end })
            }
            // A dead end: known, and the same every time.
            Err(_) if self.parser.stop_reason() == StopReason::NoExtensionBias => {
                Ok(Mask { tokens: SimpleVob::alloc(rows + 1), may_end: false })
            }
            Err(e) => Err(self.failed(&e.to_string())),
        }
    }

    fn failed(&self, text: &str) -> Error {
        let kind = match self.parser.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => Kind::LimitExceeded,
            _ => Kind::Internal,
        };
        Error::new(kind, format!("grammar, token {}: {text}", self.fed))
    }
}

impl Clone for Constraint {
    fn clone(&self) -> Constraint {
        Constraint { grammar: Arc::clone(&self.grammar), taken: self.taken.clone(), parser: self.parser.clone(), row: Vec::new() }
    }
}
