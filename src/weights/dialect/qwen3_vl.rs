//! `qwen3vl`, `qwen3vlmoe`: the text part of Qwen 3 VL, which is Qwen 3 tensor by tensor; the vision tower is another file.

use super::{Dialect, TOP, qwen3, qwen3_moe};

pub(super) static DENSE: Dialect = Dialect { architecture: "qwen3vl", config: qwen3::config, top: TOP, layer: qwen3::LAYER };

pub(super) static MOE: Dialect = Dialect { architecture: "qwen3vlmoe", config: qwen3_moe::config, top: TOP, layer: qwen3_moe::LAYER };
