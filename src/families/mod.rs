//! The factory table: which model type is built by which file. The model type is matched here and nowhere else.

mod deepseek_v3;
mod deepseek_v4;
mod deepseek_v41;
mod dense;
mod facts;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod glm5_next;
mod gpt_oss;
mod kimi_k3;
mod kimi_linear;
mod laguna;
mod lfm2;
mod longcat_flash;
mod longcat_flash_ngram;
mod minimax_m2;
mod mistral4;
mod mixtral;
mod nemotron_h;
mod nllb;
mod olmo;
mod phi3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod qwen4_exp;
mod step3p7;

pub use facts::{Facts, facts};

use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::layers::{Config, ExpertDims};
use crate::model::ModelWeightLoader;
use crate::ops::Groups;
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
    Family { names: &["gemma4", "gemma4_text"], build: gemma4::build },
    Family { names: &["phi3"], build: phi3::build },
    Family { names: &["olmo2"], build: olmo::olmo2 },
    Family { names: &["olmo3"], build: olmo::olmo3 },
    Family { names: &["qwen3_moe"], build: qwen3_moe::build },
    Family { names: &["qwen3_vl"], build: qwen3_vl::dense },
    Family { names: &["qwen3_vl_moe"], build: qwen3_vl::moe },
    Family { names: &["mixtral"], build: mixtral::build },
    Family { names: &["gpt_oss"], build: gpt_oss::build },
    Family { names: &["glm4_moe"], build: glm4_moe::build },
    Family { names: &["minimax_m2"], build: minimax_m2::build },
    Family { names: &["laguna"], build: laguna::build },
    Family { names: &["lfm2"], build: lfm2::build },
    Family { names: &["qwen3_next"], build: qwen3_next::build },
    Family { names: &["qwen3_5", "qwen35", "qwen3_6", "qwen3_5_text"], build: qwen3_5::dense },
    Family { names: &["qwen3_5_moe", "qwen3_6_moe", "holo3_1_moe", "qwen3_5_moe_text"], build: qwen3_5::moe },
    Family { names: &["qwen4_exp", "qwen3_8_flash_next", "qwen4_exp_text"], build: qwen4_exp::build },
    Family { names: &["nemotron_h", "nemotron_h_puzzle"], build: nemotron_h::build },
    Family { names: &["kimi_linear"], build: kimi_linear::build },
    Family { names: &["deepseek_v3"], build: deepseek_v3::build },
    Family { names: &["mistral4"], build: mistral4::build },
    Family { names: &["mistral3", "mistral_small4"], build: mistral4::wrapped },
    Family { names: &["step3p7", "step3p5", "step3_7"], build: step3p7::build },
    Family { names: &["longcat_flash"], build: longcat_flash::build },
    Family { names: &["longcat_flash_ngram"], build: longcat_flash_ngram::build },
    Family { names: &["deepseek_v4"], build: deepseek_v4::build },
    Family { names: &["m2m_100", "nllb"], build: nllb::build },
    Family { names: &["deepseek_v41", "deepseek_v4_1", "deepseek_v41_text"], build: deepseek_v41::build },
    Family { names: &["glm5_next", "glm5_next_text"], build: glm5_next::build },
    Family { names: &["kimi_k3"], build: kimi_k3::build },
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

/// Sizes of routed experts, under the names a family's config has for them.
fn sizes(c: &Config<'_>, common: &dense::Common, count: &str, inner: &str) -> Result<ExpertDims> {
    sizes_picking(c, common, count, inner, "num_experts_per_tok")
}

/// As [`sizes`], with the name for the number of experts a row meets.
fn sizes_picking(c: &Config<'_>, common: &dense::Common, count: &str, inner: &str, picks: &str) -> Result<ExpertDims> {
    let (experts, top_k) = (c.usize(count)?, c.usize(picks)?);
    // Each expert has tensors of its own; a count beyond this is no model and would only fill memory with names.
    ensure!(
        experts <= MOST_EXPERTS && experts * common.layers <= MOST_EXPERTS_IN_ALL,
        LimitExceeded,
        "config.json: {count} is {experts} in {} layers; at most {MOST_EXPERTS} in one and {MOST_EXPERTS_IN_ALL} in all are possible",
        common.layers
    );
    ensure!(top_k <= experts, Mismatch, "config.json: {picks} is {top_k}, {count} is {experts}");
    Ok(ExpertDims { hidden: common.hidden, inner: c.usize(inner)?, count: experts, top_k, act: common.act })
}

/// Most experts of a layer, several times what any published model has.
const MOST_EXPERTS: usize = 4096;
/// Most experts of a model, likewise.
const MOST_EXPERTS_IN_ALL: usize = 1 << 19;

/// The limit of the choice to groups (`n_group`, `topk_group`), if it limits anything.
fn group_limit(c: &Config<'_>, experts: usize) -> Result<Option<Groups>> {
    let (count, keep) = (c.usize_or("n_group", 1)?, c.usize_or("topk_group", 1)?);
    if count == 1 {
        return Ok(None);
    }
    ensure!(experts.is_multiple_of(count), Mismatch, "config.json: {experts} experts do not split into {count} groups (n_group)");
    Ok(Some(Groups { count, keep, best_two: true }))
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
