//! A stage that the host computes: it sees the row as it stands and the tokens before, and may change the row.

use std::cell::Cell;

use super::candidates::{Candidates, changed, reserve};
use crate::bail;
use crate::error::Result;

/// What the host does with a row. `row[i]` is the logit of token `i`, minus infinity where it was ruled out.
pub trait Hook: Send + Sync {
    /// Changes `row`, or fails. `history` holds the sequence's tokens, oldest first.
    fn call(&self, row: &mut [f32], history: &[i32]) -> Result<()>;
}

thread_local! {
    /// Whether a hook is running on this thread. Without a destructor, so that the library can be unloaded.
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a hook: what takes turns with the caller would wait for ever.
pub fn in_hook() -> bool {
    RUNNING.get()
}

/// Sets the mark, and takes it back however the hook ends.
struct Running(bool);

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.set(self.0);
    }
}

/// Hands the list to the hook as a row of `vocab` logits, and takes back what it wrote for the tokens that are still there. A token
/// that was ruled out stays so.
pub(super) fn run(hook: &dyn Hook, list: &mut Candidates, row: &mut Vec<f32>, vocab: usize, history: &[i32]) -> Result<()> {
    reserve(row, vocab)?;
    row.clear();
    row.resize(vocab, f32::NEG_INFINITY);
    for c in &list.items {
        row[c.id as usize] = c.logit;
    }
    let running = Running(RUNNING.replace(true));
    hook.call(row, history)?;
    drop(running);
    if let Some(index) = row.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
        let text = format!("the host's hook set logit {index} to {}", row[index]);
        return Err(crate::error::Error::new(crate::error::Kind::NumericFault, text).named("hook").at(index as u64));
    }
    for c in &mut list.items {
        c.logit = changed(c.logit, row[c.id as usize]);
    }
    list.disturbed();
    if list.maximum() == f32::NEG_INFINITY {
        bail!(NoValidToken, "the host's hook ruled out every token that was left");
    }
    Ok(())
}
