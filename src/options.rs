//! Settings: read once, each with a default, a sentence and, where a host may set it from outside, a `METRALE_` name.

mod precision;

pub use precision::{ModelPart, Precision, PrecisionRule, check as check_precision};

use crate::bail;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;

/// How exactly the mathematics is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Compute {
    /// Quantised weights meet 8-bit activations, the cache is 16 bits wide unless `kv_type` says otherwise. Bits are the same for any threads and batch.
    #[default]
    Fast,
    /// Every weight decoded to its exact value, activations and, unless `kv_type` says otherwise, cache in f32.
    F32,
}

/// What keys and values are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvChoice {
    /// F32 where everything is exact or the checkpoint is stored in f32, else F16.
    #[default]
    Auto,
    /// Exact.
    F32,
    /// 16 bits.
    F16,
    /// 16 bits with the range of f32.
    Bf16,
    /// 8 bits and scales: about half of the bytes of 16 bits.
    Q8,
}

/// What `load` may be told.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads that compute, the caller's included; 0 takes the processors this process may use, and own threads are never more.
    pub threads: usize,
    /// Most tokens one sequence may hold; 0 takes the model's own limit, capped at 4,096.
    pub context: usize,
    /// Precision; `None` takes `METRALE_COMPUTE` from the environment, else `Fast`.
    pub compute: Option<Compute>,
    /// Element type of cached keys and values; `None` takes `METRALE_KV_TYPE` from the environment, else `Auto`.
    pub kv_type: Option<KvChoice>,
    /// Leave routed experts in their file and keep at most this many bytes of them packed, those met most often; `None` takes
    /// `METRALE_EXPERT_BYTES` from the environment, else packs all of them at load.
    pub expert_bytes: Option<u64>,
    /// Bytes of packed weights from which on a load that is not cut into steps leaves weights in their file until they are used a
    /// second time: the first token comes sooner, the second later. `None` takes `METRALE_LATE_BYTES` from the environment, else 32 MiB.
    pub late_bytes: Option<u64>,
    /// Types that matrices are multiplied in, where they are to differ from the checkpoint's; without rules those of
    /// `METRALE_PRECISION`.
    pub precision: Precision,
    /// Most bytes the model and one sequence may take; 0 takes what the machine has free.
    pub memory: u64,
    /// Most bytes that are kept of sequences' beginnings, for prompts that begin alike; 0 keeps nothing. The default is 0: a library inside
    /// somebody else's process takes no memory that nobody granted.
    pub prefix_bytes: u64,
    /// Which device computes: 0 is the processor, `n` the NVIDIA device `n - 1`.
    pub device: usize,
    /// Most bytes of that device the model and one sequence may take; 0 takes what is free there.
    pub device_bytes: u64,
    /// Layers that the device runs: the last so many, and what follows them; the others stay on the processor. 0 takes as many as
    /// `device_bytes` hold; as many as the model has, or more, are the whole model, or an error where it does not fit.
    pub device_layers: usize,
    /// Of the layers with experts that the device runs, the first so many whose experts stay on the processor. 0 takes as few as
    /// `device_bytes` allow, and none where `device_layers` says a number.
    pub host_experts: usize,
    /// On a device, other work of the process goes first.
    pub low_priority: bool,
    /// On a device, a sequence's logits have the same bits alone and in any batch, however its tokens were cut: slower. The processor always does so.
    pub deterministic: bool,
    /// Fill the shapes of `config.json` with random weights of this type instead of reading tensors: for timing.
    pub synthetic: Option<Synthetic>,
}

impl LoadOptions {
    /// The budget for experts that is in force, if any.
    pub fn expert_budget(&self) -> Result<Option<u64>> {
        bytes(self.expert_bytes, "METRALE_EXPERT_BYTES")
    }

    /// Bytes of weights from which on some are packed late, if that was said.
    pub fn late_bytes(&self) -> Result<Option<u64>> {
        bytes(self.late_bytes, "METRALE_LATE_BYTES")
    }
}

/// The option if given, else the number of bytes in the environment's `name`.
fn bytes(option: Option<u64>, name: &str) -> Result<Option<u64>> {
    if option.is_some() {
        return Ok(option);
    }
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => match text.parse() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => bail!(UnknownOption, "{name} is {text:?}; a number of bytes is expected"),
        },
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(e) => Err(Error::new(Kind::UnknownOption, format!("{name}: {e}"))),
    }
}

/// The folder that compiled kernels are kept in between processes: `METRALE_KERNEL_CACHE`; without it they are not kept.
pub fn kernel_cache() -> Option<std::path::PathBuf> {
    std::env::var_os("METRALE_KERNEL_CACHE").filter(|folder| !folder.is_empty()).map(Into::into)
}

/// Random weights instead of a checkpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// How matrices are stored.
    pub dtype: DType,
    /// How those are that a mixed type keeps in more bits.
    pub finer: Option<DType>,
    /// Seed of the generator.
    pub seed: u64,
}

impl Synthetic {
    /// All matrices in one type.
    pub fn of(dtype: DType, seed: u64) -> Synthetic {
        Synthetic { dtype, finer: None, seed }
    }

    /// By a type's published name, in either case: of an element (`BF16`, `Q8_0`, `Q4_K` ...), or of a mix of them as llama.cpp makes it
    /// (`Q4_K_M`, `Q5_K_M`).
    pub fn parse(name: &str, seed: u64) -> Result<Synthetic> {
        use DType::*;
        let known = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4NL, MXFP4, F8E4M3, F8E5M2];
        let mixes = [("Q4_K_M", Q4K, Q6K), ("Q5_K_M", Q5K, Q6K)];
        if let Some((_, dtype, finer)) = mixes.into_iter().find(|(mix, ..)| mix.eq_ignore_ascii_case(name)) {
            return Ok(Synthetic { dtype, finer: Some(finer), seed });
        }
        let dtype = known.into_iter().find(|d| d.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let names: Vec<&str> = known.map(DType::name).into_iter().chain(mixes.map(|(mix, ..)| mix)).collect();
            let text = format!("there is no element type {name:?}; known are {}", names.join(" "));
            Error::new(Kind::UnknownOption, text).named("synthetic")
        })?;
        Ok(Synthetic::of(dtype, seed))
    }

    /// How a matrix is stored. Mixes keep the head in more bits, and values and down projections of half of the layers; a head that is the table of
    /// tokens as well, which llama.cpp keeps in more bits too, has no name of its own and stays as the others are.
    pub fn dtype_of(&self, tensor: &str) -> DType {
        let Some(finer) = self.finer else { return self.dtype };
        let layer = tensor.split('.').find_map(|word| word.parse::<usize>().ok());
        let is_finer = match layer {
            Some(layer) => layer % 2 == 1 && ["v_proj", "down_proj"].iter().any(|part| tensor.contains(part)),
            None => tensor.contains("lm_head"),
        };
        if is_finer { finer } else { self.dtype }
    }
}

impl KvChoice {
    /// The option if given, else the environment's `METRALE_KV_TYPE` (`auto`, `f32`, `f16`, `bf16`, `q8`), else `Auto`.
    pub fn resolve(option: Option<KvChoice>) -> Result<KvChoice> {
        if let Some(choice) = option {
            return Ok(choice);
        }
        match std::env::var("METRALE_KV_TYPE") {
            Ok(value) => match value.as_str() {
                "" | "auto" => Ok(KvChoice::Auto),
                "f32" => Ok(KvChoice::F32),
                "f16" => Ok(KvChoice::F16),
                "bf16" => Ok(KvChoice::Bf16),
                "q8" => Ok(KvChoice::Q8),
                other => bail!(UnknownOption, "METRALE_KV_TYPE is {other:?}; `auto`, `f32`, `f16`, `bf16` and `q8` are known"),
            },
            Err(std::env::VarError::NotPresent) => Ok(KvChoice::Auto),
            Err(e) => Err(Error::new(Kind::UnknownOption, format!("METRALE_KV_TYPE: {e}"))),
        }
    }
}

impl Compute {
    /// The option if given, else the environment's `METRALE_COMPUTE` (`f32` or `fast`), else `Fast`.
    pub fn resolve(option: Option<Compute>) -> Result<Compute> {
        if let Some(compute) = option {
            return Ok(compute);
        }
        match std::env::var("METRALE_COMPUTE") {
            Ok(value) => match value.as_str() {
                "f32" => Ok(Compute::F32),
                "fast" | "" => Ok(Compute::Fast),
                other => bail!(UnknownOption, "METRALE_COMPUTE is {other:?}; `f32` and `fast` are known"),
            },
            Err(std::env::VarError::NotPresent) => Ok(Compute::Fast),
            Err(e) => Err(Error::new(Kind::UnknownOption, format!("METRALE_COMPUTE: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What llama.cpp's quantize tells of Q4_K_M: Q6_K for the head and for values and down projections of every other layer or so.
    #[test]
    fn mixed_types_keep_some_matrices_in_more_bits() {
        let mix = Synthetic::parse("q4_k_m", 1).unwrap();
        let (coarse, finer) = (DType::Q4K, DType::Q6K);
        for (tensor, dtype) in [
            ("lm_head.weight", finer),
            ("model.layers.0.self_attn.v_proj.weight", coarse),
            ("model.layers.1.self_attn.v_proj.weight", finer),
            ("model.layers.35.mlp.down_proj.weight", finer),
            ("model.layers.35.mlp.up_proj.weight", coarse),
            ("model.layers.35.mlp.experts.3.down_proj.weight", finer),
            ("model.embed_tokens.weight", coarse),
        ] {
            assert_eq!(mix.dtype_of(tensor), dtype, "{tensor}");
        }
        assert_eq!(Synthetic::parse("Q8_0", 3).unwrap(), Synthetic::of(DType::Q8_0, 3));
        assert_eq!(Synthetic::of(DType::Q4K, 0).dtype_of("lm_head.weight"), DType::Q4K);
        let unknown = Synthetic::parse("Q9", 0).unwrap_err();
        assert!(unknown.kind() == Kind::UnknownOption && unknown.to_string().contains("Q4_K_M"), "{unknown}");
    }
}
