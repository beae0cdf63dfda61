//! Facts that follow from the model type alone, as data: no config key and no tensor says them.

/// Facts of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Put onto every weight of an RMS norm: 1 where checkpoints store `w` and mean `1 + w`.
    pub norm_add: f32,
    /// Whether a prompt is one piece whose positions all see each other, so that no part of it can run before the rest.
    pub whole_prompt: bool,
}

const USUAL: Facts = Facts { norm_add: 0.0, whole_prompt: false };
const ZERO_CENTRED: Facts = Facts { norm_add: 1.0, ..USUAL };
const ENCODER: Facts = Facts { whole_prompt: true, ..USUAL };

/// Families that depart from the usual, by every normalised model type they go by.
const DEPARTURES: &[(&[&str], Facts)] = &[
    (&["gemma3", "gemma3_text"], ZERO_CENTRED),
    (&["qwen3_next", "qwen3_5", "qwen35", "qwen3_5_text", "qwen3_5_moe", "qwen3_6_moe", "holo3_1_moe", "qwen3_5_moe_text", "qwen4_exp"], ZERO_CENTRED),
    (&["step3p7", "step3p5"], ZERO_CENTRED),
    (&["nllb", "m2m_100"], ENCODER),
];

/// The facts of a normalised model type.
pub fn facts(model_type: &str) -> Facts {
    DEPARTURES.iter().find(|(names, _)| names.contains(&model_type)).map_or(USUAL, |(_, facts)| *facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_zero_centred_where_the_papers_code_adds_one() {
        for name in ["qwen3_next", "qwen3_5", "qwen3_6_moe", "holo3_1_moe", "gemma3_text"] {
            assert_eq!(facts(name).norm_add, 1.0, "{name}");
        }
        for name in ["qwen3", "qwen3_moe", "lfm2", "nemotron_h", "kimi_linear", "llama", "gemma4"] {
            assert_eq!(facts(name).norm_add, 0.0, "{name}");
        }
    }

    #[test]
    fn only_encoders_need_a_prompt_whole() {
        assert!(facts("nllb").whole_prompt && facts("m2m_100").whole_prompt);
        assert!(super::super::FAMILIES.iter().flat_map(|f| f.names).filter(|n| !n.starts_with("nllb") && !n.starts_with("m2m")).all(|n| !facts(n).whole_prompt));
    }
}
