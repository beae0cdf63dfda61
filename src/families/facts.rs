//! Facts that follow from the model type alone, as data: no config key and no tensor says them.

/// Facts of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Put onto every weight of an RMS norm: 1 where checkpoints store `w` and mean `1 + w`.
    pub norm_add: f32,
    /// Whether a prompt is one piece whose positions all see each other, so that no part of it can run before the rest.
    pub whole_prompt: bool,
    /// Whether a second stack of layers reads the source text and the decoder attends to it.
    pub encoder_decoder: bool,
    /// Whether some layers carry a state that every token changes, so that a sequence cannot be cut anywhere.
    pub recurrent: bool,
}

const USUAL: Facts = Facts { norm_add: 0.0, whole_prompt: false, encoder_decoder: false, recurrent: false };
const ZERO_CENTRED: Facts = Facts { norm_add: 1.0, ..USUAL };
const RECURRENT: Facts = Facts { recurrent: true, ..USUAL };
const ENCODER: Facts = Facts { whole_prompt: true, encoder_decoder: true, ..USUAL };

/// Families that depart from the usual, by every normalised model type they go by.
const DEPARTURES: &[(&[&str], Facts)] = &[
    (&["gemma3", "gemma3_text"], ZERO_CENTRED),
    (
        &["qwen3_next", "qwen3_5", "qwen35", "qwen3_6", "qwen3_5_text", "qwen3_5_moe", "qwen3_6_moe", "holo3_1_moe", "qwen3_5_moe_text"],
        Facts { recurrent: true, ..ZERO_CENTRED },
    ),
    (&["qwen4_exp", "qwen3_8_flash_next", "qwen4_exp_text"], Facts { recurrent: true, ..ZERO_CENTRED }),
    (&["lfm2", "nemotron_h", "nemotron_h_puzzle", "kimi_linear", "kimi_k3", "glm5_next", "glm5_next_text"], RECURRENT),
    (&["step3p7", "step3p5", "step3_7"], ZERO_CENTRED),
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
        assert!(
            super::super::FAMILIES
                .iter()
                .flat_map(|f| f.names)
                .filter(|n| !n.starts_with("nllb") && !n.starts_with("m2m"))
                .all(|n| !facts(n).whole_prompt)
        );
    }

    #[test]
    fn recurrent_families_and_encoders_are_told_apart() {
        for name in ["lfm2", "qwen3_next", "qwen3_5", "holo3_1_moe", "nemotron_h", "nemotron_h_puzzle", "kimi_linear", "kimi_k3"] {
            assert!(facts(name).recurrent && !facts(name).encoder_decoder, "{name}");
        }
        for name in ["llama", "gemma3_text", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "nllb"] {
            assert!(!facts(name).recurrent, "{name}");
        }
        assert!(facts("m2m_100").encoder_decoder && !facts("llama").encoder_decoder);
    }

    #[test]
    fn departures_name_a_type_once() {
        let mut names: Vec<&str> = DEPARTURES.iter().flat_map(|(names, _)| *names).copied().collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
