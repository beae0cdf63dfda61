//! What a checkpoint says about its quantisation: `quantization_config` in `config.json`, or ModelOpt's `hf_quant_config.json`.
//!
//! How a tensor is stored shows in its pieces, so this is asked only for what pieces leave open (bits, block sizes) and for
//! what this build must refuse: methods and formats it would read wrongly.

use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};
use serde_json::Value;

/// The settings; all empty for a checkpoint that says nothing.
#[derive(Debug, Default)]
pub(in crate::weights) struct Settings {
    /// Side lengths of blocks that share an FP8 scale: rows, columns.
    block: Option<[usize; 2]>,
    groups: Vec<Group>,
    ignore: Vec<Pattern>,
}

/// Settings of a group of modules (compressed-tensors' `config_groups`).
#[derive(Debug, Default)]
pub(in crate::weights) struct Group {
    targets: Vec<Pattern>,
    /// Bits of a code.
    pub bits: Option<usize>,
    /// Elements of a row that share a scale.
    pub group_size: Option<usize>,
    /// Side lengths of blocks that share a scale.
    pub block: Option<[usize; 2]>,
}

/// Names of modules.
#[derive(Debug)]
enum Pattern {
    /// A module, or everything below it; `*` stands for any characters.
    Glob(String),
    /// `re:`, matched from the start of the name as Python's `re.match` does.
    Regex(Box<fancy_regex::Regex>),
    /// A class of modules (`Linear`): all that hold a weight.
    Class,
}

/// Methods whose pieces this build reads.
const METHODS: [&str; 8] = ["fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "mxfp4", "mxfp8"];
/// ModelOpt's algorithms this build reads.
const ALGORITHMS: [&str; 7] = ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP4", "MXFP8", "MIXED_PRECISION"];
/// Formats of compressed-tensors this build reads.
const FORMATS: [&str; 9] = [
    "dense",
    "pack-quantized",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
];

impl Settings {
    /// Reads the settings of a config and of `hf_quant_config.json`, where there is one.
    pub fn read(config: &Value, hf_quant: Option<&Value>) -> Result<Settings> {
        let mut settings = Settings::default();
        if let Some(q) = hf_quant.and_then(|v| v.get("quantization")).filter(|q| !q.is_null()) {
            settings.modelopt(q, "hf_quant_config.json")?;
        }
        let inside = |config: &Value| {
            ["quantization_config", "compression_config"].iter().find_map(|k| config.get(k).filter(|v| !v.is_null()).cloned())
        };
        let nested = || ["text_config", "llm_config"].iter().find_map(|k| config.get(k).and_then(inside));
        if let Some(q) = inside(config).or_else(nested) {
            settings.quantization_config(&q)?;
        }
        Ok(settings)
    }

    /// Blocks that share an FP8 scale, for a module: its group's, the config's, or the usual 128 x 128.
    pub fn block(&self, module: &str) -> [usize; 2] {
        self.group(module).and_then(|g| g.block).or(self.block).unwrap_or([128, 128])
    }

    /// The settings of the group a module belongs to.
    pub fn group(&self, module: &str) -> Option<&Group> {
        let of = |class: bool| move |g: &&Group| g.targets.iter().any(|t| matches!(t, Pattern::Class) == class && t.matches(module));
        // A group that names the module goes before one that names its class.
        self.groups.iter().find(of(false)).or_else(|| self.groups.iter().find(of(true)))
    }

    /// Whether the checkpoint says that a module is not quantised.
    pub fn ignores(&self, module: &str) -> bool {
        self.ignore.iter().any(|p| p.matches(module))
    }

    fn quantization_config(&mut self, q: &Value) -> Result<()> {
        const AT: &str = "config.json: quantization_config";
        ensure!(q.is_object(), CorruptFile, "{AT}: expected an object, found {q}");
        let method = match q.get("quant_method") {
            Some(Value::String(method)) => method.as_str(),
            None if q.get("quant_algo").is_some() => "modelopt",
            None if q.get("config_groups").is_some() => "compressed-tensors",
            found => {
                let found = found.map_or("nothing".into(), Value::to_string);
                return Err(Error::new(
                    Kind::Unsupported,
                    format!("{AT}.quant_method: found {found}, expected one of {}", METHODS.join(", ")),
                )
                .named("quant_method"));
            }
        };
        if !METHODS.contains(&method) {
            let text = format!("{AT}.quant_method: {method:?} is not read by this build; it reads {}", METHODS.join(", "));
            return Err(Error::new(Kind::Unsupported, text).named("quant_method"));
        }
        if method.starts_with("modelopt") {
            self.modelopt(q, AT)?;
        }
        known(q, "format", &FORMATS, AT)?;
        if let Some(sparse) = q.get("sparsity_config").and_then(|s| s.get("format")).and_then(Value::as_str).filter(|f| *f != "dense") {
            bail!(Unsupported, "{AT}.sparsity_config: format {sparse:?} is not read by this build");
        }
        self.block = pair(q.get("weight_block_size"), &format!("{AT}.weight_block_size"))?.or(self.block);
        if method == "compressed-tensors" {
            self.groups(q, AT)?;
        }
        self.ignored(q, AT)
    }

    fn modelopt(&mut self, q: &Value, at: &str) -> Result<()> {
        known(q, "quant_algo", &ALGORITHMS, at)?;
        for (layer, of) in q.get("quantized_layers").and_then(Value::as_object).into_iter().flatten() {
            known(of, "quant_algo", &ALGORITHMS, &format!("{at}: {layer}"))?;
        }
        self.ignored(q, at)
    }

    fn ignored(&mut self, q: &Value, at: &str) -> Result<()> {
        for key in ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"] {
            self.ignore.extend(patterns(q.get(key), &format!("{at}.{key}"))?);
        }
        Ok(())
    }

    fn groups(&mut self, q: &Value, at: &str) -> Result<()> {
        for (name, group) in q.get("config_groups").and_then(Value::as_object).into_iter().flatten() {
            let at = format!("{at}.{name}");
            known(group, "format", &FORMATS, &at)?;
            let Some(weights) = group.get("weights").filter(|w| w.is_object()) else { continue };
            let size = |key: &str| weights.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
            self.groups.push(Group {
                targets: patterns(group.get("targets"), &format!("{at}.targets"))?,
                bits: size("num_bits"),
                group_size: size("group_size"),
                block: pair(weights.get("block_structure"), &format!("{at}.block_structure"))?,
            });
        }
        Ok(())
    }
}

/// Refuses a value outside of a list; absent is fine.
fn known(q: &Value, key: &str, known: &[&str], at: &str) -> Result<()> {
    match q.get(key) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(found)) if known.contains(&found.as_str()) => Ok(()),
        Some(found) => {
            let text = format!("{at}.{key}: {found} is not read by this build; it reads {}", known.join(", "));
            Err(Error::new(Kind::Unsupported, text).named(key))
        }
    }
}

/// Two side lengths: `[128, 128]` or `"128x128"`.
fn pair(v: Option<&Value>, at: &str) -> Result<Option<[usize; 2]>> {
    let Some(v) = v.filter(|v| !v.is_null()) else { return Ok(None) };
    let sides: Option<Vec<usize>> = match v {
        Value::Array(list) => list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect(),
        Value::String(text) => text.split('x').map(|n| n.trim().parse().ok()).collect(),
        _ => None,
    };
    match sides.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok(Some([rows, cols])),
        _ => bail!(CorruptFile, "{at}: found {v}, expected two lengths"),
    }
}

fn patterns(v: Option<&Value>, at: &str) -> Result<Vec<Pattern>> {
    let Some(v) = v.filter(|v| !v.is_null()) else { return Ok(Vec::new()) };
    let Some(list) = v.as_array() else { bail!(CorruptFile, "{at}: found {v}, expected a list of names") };
    list.iter()
        .map(|p| match p.as_str() {
            Some(p) => Pattern::new(p, at),
            None => bail!(CorruptFile, "{at}: found {p}, expected a name"),
        })
        .collect()
}

impl Pattern {
    fn new(text: &str, at: &str) -> Result<Pattern> {
        let Some(regex) = text.strip_prefix("re:") else {
            // Class names are written in capitals and without dots; modules are not.
            let class = !text.contains(['.', '*']) && text.starts_with(|c: char| c.is_ascii_uppercase());
            return Ok(if class { Pattern::Class } else { Pattern::Glob(text.into()) });
        };
        match fancy_regex::RegexBuilder::new(&format!("^(?:{regex})")).backtrack_limit(100_000).build() {
            Ok(regex) => Ok(Pattern::Regex(Box::new(regex))),
            Err(e) => bail!(CorruptFile, "{at}: {text:?} is no regular expression: {e}"),
        }
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Pattern::Class => true,
            // A pattern that runs out of steps matches nothing.
            Pattern::Regex(regex) => regex.is_match(module).unwrap_or(false),
            Pattern::Glob(glob) => glob_matches(glob.as_bytes(), module.as_bytes()),
        }
    }
}

/// Whether `name`, or a module it lies in, is `glob`; `*` stands for any run of characters.
fn glob_matches(glob: &[u8], name: &[u8]) -> bool {
    let (mut g, mut n, mut star) = (0, 0, None);
    loop {
        if g == glob.len() && (n == name.len() || name[n] == b'.') {
            return true;
        }
        if glob.get(g) == Some(&b'*') {
            (star, g) = (Some((g, n)), g + 1);
        } else if g < glob.len() && n < name.len() && glob[g] == name[n] {
            (g, n) = (g + 1, n + 1);
        } else if let Some((at, taken)) = star.filter(|(_, taken)| *taken < name.len()) {
            (g, n, star) = (at + 1, taken + 1, Some((at, taken + 1)));
        } else {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ignores(pattern: &str, module: &str) -> bool {
        Pattern::new(pattern, "test").unwrap().matches(module)
    }

    #[test]
    fn names_globs_and_expressions_match_as_their_writers_meant() {
        for (pattern, module, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "lm_heads", false),
            ("model.layers.1.mlp", "model.layers.1.mlp.gate", true),
            ("model.layers.1", "model.layers.10.mlp", false),
            ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", true),
            ("model.layers.*.mlp.router", "model.layers.3.mlp.experts", false),
            ("*lm_head*", "model.lm_head", true),
            ("*.gate", "a.b.gate", true),
            ("*.gate", "a.b.gate_proj", false),
            ("*", "anything.at.all", true),
            ("re:.*mlp\\.gate$", "model.layers.0.mlp.gate", true),
            ("re:.*mlp\\.gate$", "model.layers.0.mlp.gate_proj", false),
            ("re:mlp", "model.mlp", false),
            ("re:(?!.*experts).*mlp.*", "model.mlp.up", true),
            ("re:(?!.*experts).*mlp.*", "model.mlp.experts.0", false),
        ] {
            assert_eq!(ignores(pattern, module), expected, "{pattern} on {module}");
        }
        assert!(Pattern::new("re:(", "test").is_err());
    }

    #[test]
    fn what_would_be_read_wrongly_is_refused_by_name() {
        for (q, named) in [
            (json!({"quant_method": "awq"}), "quant_method"),
            (json!({"bits": 4}), "quant_method"),
            (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "format"),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}), "quant_algo"),
        ] {
            let e = Settings::read(&json!({"quantization_config": q}), None).unwrap_err();
            assert_eq!((e.kind(), e.name()), (Kind::Unsupported, Some(named)), "{e}");
        }
        let e = Settings::read(&json!({}), Some(&json!({"quantization": {"quant_algo": "W4A8_AWQ"}}))).unwrap_err();
        assert_eq!((e.kind(), e.name()), (Kind::Unsupported, Some("quant_algo")));
        assert!(Settings::read(&json!({"quantization_config": null}), None).is_ok());
    }

    #[test]
    fn groups_are_found_by_name_before_class() {
        let q = json!({"quant_method": "compressed-tensors", "config_groups": {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
            "b": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "group_size": null, "block_structure": "64x32"}}}});
        let settings = Settings::read(&json!({"text_config": {"quantization_config": q}}), None).unwrap();
        let group = settings.group("model.layers.0.mlp.down_proj").unwrap();
        assert_eq!((group.bits, group.group_size, group.block), (Some(8), None, Some([64, 32])));
        assert_eq!(settings.group("model.layers.0.mlp.up_proj").unwrap().group_size, Some(32));
        assert_eq!(settings.block("model.layers.0.mlp.up_proj"), [128, 128]);
    }
}
