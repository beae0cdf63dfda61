//! What lives as long as the process, made before anything that does not.
//!
//! Libraries underneath keep tables and compiled expressions that they make when they first need them and never give up. A host's
//! allocator gets all of a model back, so none of that may come from it.

use crate::error::{Result, ensure_memory};
use crate::runtime;
use crate::sampling::{Grammar, Vocabulary};
use crate::text::{ChatTemplate, Tokenizer};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};

/// Uses all such libraries a little, outside of any runtime, once in a process.
pub fn warm() -> Result<()> {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.load(Ordering::Acquire) {
        return Ok(());
    }
    let _outside = runtime::outside();
    let tokenizer = Tokenizer::from_json(TOKENIZER.as_bytes(), None)?;
    tokenizer.encode("ab</s>a", false, true)?;
    ChatTemplate::new(TEMPLATE, "", "")?.render(&json!([{"role": "user", "content": "a"}]), None, false, &json!(null), None)?;
    let vocabulary = Vocabulary::of(&tokenizer, 3, &[2])?;
    Grammar::regex(&vocabulary, "a")?;
    Grammar::json_schema(&vocabulary, r#"{"type": "string", "format": "date"}"#)?;
    ensure_memory("the preparation of what lives as long as the process")?;
    DONE.store(true, Ordering::Release);
    Ok(())
}

/// Two letters, and an added token that looks at its neighbours.
const TOKENIZER: &str = r#"{"version": "1.0", "normalizer": null, "post_processor": null, "decoder": null, "truncation": null, "padding": null,
"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
"added_tokens": [{"id": 2, "content": "</s>", "single_word": true, "lstrip": true, "rstrip": true, "normalized": false, "special": true}],
"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}}"#;

const TEMPLATE: &str = "{% for m in messages %}{{ m.role|upper }}{{ m|tojson }}{{ range(2)|list|length }}{% endfor %}";

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_used_to_warm_up_works() {
        super::warm().unwrap();
        super::warm().unwrap();
    }
}
