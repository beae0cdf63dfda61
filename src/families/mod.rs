//! The factory table: which model type is built by which file. The model type is matched here and nowhere else.

mod deepseek_v3;
mod dense;
mod gemma3;
mod olmo;
mod phi3;

use crate::error::{Error, Kind, Result};
use crate::layers::Config;
use crate::model::ModelWeightLoader;
use serde_json::Value;

/// A family: the model types it goes by, and how its config becomes a model.
pub struct Family {
    /// Names in `model_type`, lower case with `_` for `-` and `.`.
    pub names: &'static [&'static str],
    /// Builds the model.
    pub build: ModelWeightLoader,
}

/// Every family.
pub const FAMILIES: &[Family] = &[
    Family { names: &["llama"], build: dense::llama },
    Family { names: &["mistral"], build: dense::mistral },
    Family { names: &["qwen2"], build: dense::qwen2 },
    Family { names: &["qwen3"], build: dense::qwen3 },
    Family { names: &["smollm3"], build: dense::smollm3 },
    Family { names: &["gemma3_text"], build: gemma3::build },
    Family { names: &["phi3"], build: phi3::build },
    Family { names: &["olmo2"], build: olmo::olmo2 },
    Family { names: &["olmo3"], build: olmo::olmo3 },
    Family { names: &["deepseek_v3"], build: deepseek_v3::build },
];

/// The family of a config, and its normalised model type.
pub fn loader_for_config(config: &Value) -> Result<(&'static Family, String)> {
    let config = Config::new(config)?;
    let found = config.opt_str("model_type")?.ok_or_else(|| {
        Error::new(Kind::NotAModel, "config.json has no model_type, so this is no checkpoint of a language model").named("model_type")
    })?;
    let name: String = found.to_lowercase().chars().map(|c| if c == '-' || c == '.' { '_' } else { c }).collect();
    let family = FAMILIES.iter().find(|f| f.names.contains(&name.as_str()));
    family.map(|f| (f, name)).ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|f| f.names).copied().collect();
        Error::new(Kind::Unsupported, format!("model_type {found:?} is not supported; known: {}", known.join(", "))).named("model_type")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn model_types_are_normalised_and_unknown_ones_named() {
        assert_eq!(loader_for_config(&json!({"model_type": "Gemma3-Text"})).unwrap().1, "gemma3_text");
        let e = loader_for_config(&json!({"model_type": "perceptron"})).err().unwrap();
        assert!(e.kind() == Kind::Unsupported && e.message().contains("perceptron") && e.message().contains("qwen3"), "{e}");
        assert_eq!(loader_for_config(&json!({"a": 1})).err().unwrap().kind(), Kind::NotAModel);
    }

    #[test]
    fn no_two_families_share_a_name() {
        let mut names: Vec<_> = FAMILIES.iter().flat_map(|f| f.names).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
