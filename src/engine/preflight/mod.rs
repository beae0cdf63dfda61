//! Everything that can be checked before anything is allocated, from headers and config: one error lists all findings.
//!
//! The config's own contradictions are found by the families while they read it. Here the two sides meet: what the declarations
//! ask for, and what the checkpoint holds. Counts come before single tensors, since a wrong count explains many of those.

mod finding;
mod memory;

pub(super) use finding::{Class, Finding, report};
pub(super) use memory::{check as check_memory, check_device as check_device_memory, device_limit};

use crate::error::Kind;
use crate::layers::Config;
use crate::weights::{Checkpoint, Declarations, Part};
use finding::ranges;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Numbers that follow a stem in names: of `model.layers` 0, 1, 2.
type Numbered<'a> = BTreeMap<&'a str, BTreeSet<usize>>;

fn numbered<'a>(names: impl Iterator<Item = &'a str>) -> Numbered<'a> {
    let mut found = Numbered::new();
    for name in names {
        for (at, _) in name.match_indices('.') {
            let rest = &name[at + 1..];
            let number = rest.split('.').next().unwrap_or("");
            if rest.len() > number.len()
                && let Ok(n) = number.parse()
            {
                found.entry(&name[..at]).or_default().insert(n);
            }
        }
    }
    found
}

/// Words in names of tensors that only drafting uses.
const DRAFT: [&str; 6] = ["mtp", "eh_proj", "enorm", "hnorm", "shared_head", "nextn"];

/// Whether a tensor belongs to a draft head.
fn drafts(name: &str) -> bool {
    name.split('.').any(|word| DRAFT.contains(&word))
}

/// What a first look at all names says.
#[derive(Default)]
pub(super) struct Counts {
    pub findings: Vec<Finding>,
    /// Stems of tensors that are for drafting and that the model does not use: `mtp`, `model.layers.61`.
    pub drafts: Vec<String>,
    /// Stems, each with a dot at its end, that were found to be missing as a whole.
    absent: Vec<String>,
}

impl Counts {
    /// Whether a tensor's absence is already said.
    pub fn covers(&self, tensor: &str) -> bool {
        self.absent.iter().any(|stem| tensor.starts_with(stem))
    }

    /// Compares the numbers of layers and experts of both sides, and looks for tensors that change results and are not asked for.
    pub fn take(checkpoint: &Checkpoint, declarations: &Declarations, config: &Config<'_>) -> Counts {
        let asked: HashSet<&str> = declarations.weights.iter().flat_map(|w| w.parts()).map(|p| p.tensor.as_str()).collect();
        let (there, wanted) = (numbered(checkpoint.names()), numbered(asked.iter().copied()));
        let mut counts = Counts::default();
        // Stems sort before the longer ones below them, so layers come before their experts.
        for (stem, wanted) in &wanted {
            let Some(found) = there.get(stem).filter(|_| !counts.covers(&format!("{stem}."))) else { continue };
            match stem.rsplit('.').next() {
                Some("layers") => counts.layers(checkpoint, config, stem, wanted, found),
                Some("experts") => counts.experts(config, stem, wanted, found),
                _ => {}
            }
        }
        counts.draft_modules(checkpoint, &asked);
        counts.biases(checkpoint, &asked);
        counts
    }

    fn layers(&mut self, checkpoint: &Checkpoint, config: &Config<'_>, stem: &str, wanted: &BTreeSet<usize>, found: &BTreeSet<usize>) {
        let key = key_of(config, &["num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"]);
        let missing: BTreeSet<usize> = wanted.difference(found).copied().collect();
        if !missing.is_empty() {
            let text = format!(
                "{{}} asks for {} layers, the checkpoint has {}: nothing of {stem}.{}",
                wanted.len(),
                wanted.len() - missing.len(),
                ranges(&missing)
            );
            let help = format!("is {key} right, or is a shard missing?");
            self.findings.push(Finding::new(Class::Layers, Kind::Mismatch, key, text).help(help));
            self.absent.extend(missing.iter().map(|n| format!("{stem}.{n}.")));
        }
        let mut unused = BTreeSet::new();
        for n in found.difference(wanted) {
            let begin = format!("{stem}.{n}.");
            match checkpoint.names().filter(|name| name.starts_with(&begin)).any(drafts) {
                true => self.drafts.push(format!("{stem}.{n}")),
                false => drop(unused.insert(*n)),
            }
        }
        let announced = config.count("num_nextn_predict_layers").ok().flatten().unwrap_or(0);
        if unused.len() <= announced {
            self.drafts.extend(unused.iter().map(|n| format!("{stem}.{n}")));
        } else {
            let text = format!("{{}} asks for {} layers, the checkpoint has more: {stem}.{}", wanted.len(), ranges(&unused));
            let help = format!("is {key} right?");
            self.findings.push(Finding::new(Class::Layers, Kind::Mismatch, key, text).help(help));
        }
    }

    fn experts(&mut self, config: &Config<'_>, stem: &str, wanted: &BTreeSet<usize>, found: &BTreeSet<usize>) {
        let key = key_of(config, &["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"]);
        let missing: BTreeSet<usize> = wanted.difference(found).copied().collect();
        let more = found.difference(wanted).count();
        // Experts that hand on their input compute nothing, yet some files hold tensors for them.
        let idle = config.count("zero_expert_num").ok().flatten().unwrap_or(0);
        if missing.is_empty() && more <= idle {
            return;
        }
        let text = format!("{{}}: the config asks for {} experts ({key}), the checkpoint has {}", wanted.len(), found.len());
        self.findings.push(Finding::new(Class::Experts, Kind::Mismatch, stem, text).help(format!("is {key} right?")));
        self.absent.extend(missing.iter().map(|n| format!("{stem}.{n}.")));
    }

    /// Modules for drafting beside the layers.
    fn draft_modules(&mut self, checkpoint: &Checkpoint, asked: &HashSet<&str>) {
        for name in checkpoint.names().filter(|name| !asked.contains(name)) {
            let words: Vec<&str> = name.split('.').collect();
            if let Some(at) = words.iter().position(|word| ["mtp", "nextn"].contains(word)) {
                let stem = words[..=at].join(".");
                if !self.drafts.contains(&stem) {
                    self.drafts.push(stem);
                }
            }
        }
    }

    /// A bias beside a matrix that is used, which the config does not ask for, would be left out in silence. Zeros change nothing.
    fn biases(&mut self, checkpoint: &Checkpoint, asked: &HashSet<&str>) {
        for name in checkpoint.names() {
            let Some(module) = name.strip_suffix(".bias").filter(|_| !asked.contains(name)) else { continue };
            if !asked.contains(format!("{module}.weight").as_str()) {
                continue;
            }
            let values = checkpoint.stored(name).ok().flatten().and_then(|stored| stored.values().ok());
            if values.is_some_and(|values| values.iter().any(|v| *v != 0.0)) {
                let text = "the checkpoint has {}, which the config does not ask for and which would be left out";
                let help = "is attention_bias or mlp_bias right?";
                self.findings.push(Finding::new(Class::Unasked, Kind::Mismatch, name, text).help(help));
            }
        }
    }
}

/// The first of some keys that the config, or its language model's part, has.
fn key_of(config: &Config<'_>, keys: &'static [&'static str]) -> &'static str {
    keys.iter().copied().find(|key| config.get(key).is_some()).unwrap_or(keys[0])
}

/// A tensor that is not there. `root` is what [`other_root`] says, for names that leave no other explanation.
pub(super) fn missing(config: &Config<'_>, tensor: &str, root: Option<&str>) -> Finding {
    let finding = Finding::new(Class::Missing, Kind::CorruptFile, tensor, "the checkpoint has no tensor {}, which the config asks for");
    let tied = config.get("tie_word_embeddings").is_some_and(|v| v.as_bool() == Some(true));
    if tensor.contains("head") && tensor.ends_with(".weight") && !tensor.contains("layers.") && !tied {
        return finding.help("if the output matrix is the embedding, tie_word_embeddings has to be true");
    }
    if tensor.ends_with(".bias") {
        return finding.help("was the model made without biases (attention_bias, mlp_bias)?");
    }
    match root {
        Some(root) => finding.help(format!("names of this model's tensors begin with {root}")),
        None => finding,
    }
}

/// Where a tensor is there under another root (a wrapper's prefix, or without one): that root.
pub(super) fn other_root<'a>(checkpoint: &'a Checkpoint, tensor: &str) -> Option<&'a str> {
    let at = ["layers.", "embed_tokens."].iter().find_map(|word| tensor.find(word))?;
    let end = &tensor[at..];
    let other = checkpoint.names().find(|name| name.ends_with(end) && *name != tensor && !drafts(name))?;
    other.strip_suffix(end)?.strip_suffix('.')
}

/// A tensor whose shape is not what the config asks for; says which numbers of the config ask for what departs.
pub(super) fn misshapen(config: &Config<'_>, part: &Part, stored: &[usize], wanted: &[usize]) -> Finding {
    let text = format!("{{}}: the checkpoint holds {stored:?}, the config asks for {wanted:?}");
    let finding = Finding::new(Class::Shape, Kind::Mismatch, &part.tensor, text);
    let departing = wanted.iter().enumerate().filter(|(i, n)| stored.get(*i) != Some(n)).map(|(_, n)| *n);
    let mut sources: Vec<String> = Vec::new();
    for n in departing {
        sources.extend(sources_of(config, &part.tensor, n).into_iter().take(3));
    }
    sources.dedup();
    match sources.len() {
        0 => finding,
        _ => finding.help(format!("is {} right?", sources.join(" or "))),
    }
}

/// Whether a key can be about a tensor at all: sizes of small models coincide.
fn concerns(key: &str, tensor: &str) -> bool {
    let tensor_has = |words: &[&str]| words.iter().any(|word| tensor.contains(word));
    if ["_id", "_ids"].iter().any(|end| key.ends_with(end))
        || ["position", "window", "layers", "length", "context"].iter().any(|word| key.contains(word))
    {
        return false;
    }
    if key.contains("vocab") {
        return tensor_has(&["embed", "head.", "ngram", "tid2eid"]);
    }
    if key.contains("expert") || key.contains("intermediate") {
        return tensor_has(&["mlp", "ffn", "feed_forward", "moe", "expert", "gate", "router", "mixer"]);
    }
    true
}

/// Keys of the config that say `n` for a tensor: by themselves, as heads times elements (a gate beside each query doubles it), or as
/// the sum of two kinds of experts.
fn sources_of(config: &Config<'_>, tensor: &str, n: usize) -> Vec<String> {
    let number = |(key, value): (&'_ String, &serde_json::Value)| Some((key.clone(), usize::try_from(value.as_u64()?).ok()?));
    let numbers: Vec<(String, usize)> = config.entries().filter_map(number).filter(|(key, _)| concerns(key, tensor)).collect();
    let mut found: Vec<String> = numbers.iter().filter(|(_, v)| *v == n && n > 1).map(|(key, _)| key.clone()).collect();
    if !found.is_empty() {
        return found;
    }
    let hidden = numbers.iter().find(|(key, _)| key == "hidden_size").map_or(0, |(_, v)| *v);
    for (heads, a) in numbers.iter().filter(|(key, _)| key.ends_with("heads")) {
        if hidden == n && !heads.contains("value") {
            found.push(heads.clone());
        }
        for (dim, b) in numbers.iter().filter(|(key, _)| key.ends_with("head_dim")) {
            let product = a.saturating_mul(*b);
            if product == n || product.saturating_mul(2) == n {
                found.push(format!("{heads} x {dim}"));
            }
        }
    }
    let experts: Vec<&(String, usize)> = numbers.iter().filter(|(key, _)| key.contains("expert")).collect();
    for (i, (one, a)) in experts.iter().enumerate() {
        found.extend(experts[i + 1..].iter().filter(|(_, b)| a.saturating_add(*b) == n && *b > 0).map(|(two, _)| format!("{one} + {two}")));
    }
    found
}

/// A tensor that is there and cannot be used.
pub(super) fn unusable(part: &Part, error: crate::error::Error) -> Finding {
    Finding::from_error(Class::Tensor, &part.tensor, error)
}

/// Numbers that most families read; where the first wrong one ended the reading, the others are worth saying too.
const NUMBERS: [&str; 14] = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "v_head_dim",
];

/// What can be said of a config that its family refused: other numbers that are none, and its number of layers.
pub(super) fn refused(checkpoint: &Checkpoint, config: &Config<'_>, said: &Finding) -> Vec<Finding> {
    let mut findings = Vec::new();
    for key in NUMBERS.into_iter().filter(|key| config.get(key).is_some() && *key != said.name) {
        if let Err(e) = config.usize(key) {
            findings.push(Finding::from_error(Class::Config, key, e));
        }
    }
    let key = key_of(config, &["num_hidden_layers", "num_layers"]);
    let there = numbered(checkpoint.names().filter(|name| !drafts(name)));
    let most = there.iter().filter(|(stem, _)| **stem == "layers" || stem.ends_with(".layers")).map(|(_, found)| found.len()).max();
    if let (Ok(Some(asked)), Some(found)) = (config.count(key), most)
        && asked > found
    {
        let text = format!("{{}} asks for {asked} layers, the checkpoint has {found}");
        findings.push(Finding::new(Class::Layers, Kind::Mismatch, key, text));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_in_names_are_counted_by_stem() {
        let names = ["model.layers.0.mlp.experts.3.up.weight", "model.layers.10.a.weight", "layers.2.w", "x.9", "model.layers.1a.w"];
        let found = numbered(names.into_iter());
        let of = |stem: &str| found[stem].iter().copied().collect::<Vec<_>>();
        assert_eq!((of("model.layers"), of("model.layers.0.mlp.experts"), of("layers")), (vec![0, 10], vec![3], vec![2]));
        assert!(!found.contains_key("x"));
    }

    #[test]
    fn a_departing_dimension_is_traced_to_its_keys() {
        let c = json!({"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 400, "pad_token_id": 400,
            "sliding_window": 32, "num_hidden_layers": 9, "n_routed_experts": 9, "zero_expert_num": 3});
        let c = Config::new(&c).unwrap();
        let sources = |tensor: &str, n: usize| sources_of(&c, tensor, n);
        assert_eq!(sources("lm_head.weight", 400), ["vocab_size"]);
        assert_eq!(sources("self_attn.q_proj.weight", 128), ["num_attention_heads x head_dim"]);
        assert_eq!(sources("self_attn.q_proj.weight", 256), ["num_attention_heads x head_dim"]);
        assert_eq!(sources("self_attn.k_proj.weight", 32), ["num_key_value_heads x head_dim"]);
        assert_eq!(sources("mlp.router.classifier.weight", 12), ["n_routed_experts + zero_expert_num"]);
        assert!(sources("self_attn.q_proj.weight", 400).is_empty() && sources("self_attn.q_proj.weight", 7).is_empty());
    }
}
