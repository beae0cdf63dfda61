//! A precision schedule: the type that matrices are multiplied in, by layer and part of the model.
//!
//! Without rules every matrix keeps what the checkpoint stores, which may differ from tensor to tensor. A rule says otherwise for
//! some layers, some part, or both: `layers.0-3.mlp=f32`. Where several fit, the last one counts.

use crate::bail;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
use std::ops::RangeInclusive;

/// What a matrix belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModelPart {
    /// Where positions meet: attention, or what stands in its place.
    Attention,
    /// Feed-forward that every token meets, shared experts included.
    Mlp,
    /// Routed experts.
    Experts,
    /// What picks the experts.
    Router,
    /// The output matrix, and the embedding where it is the same.
    Head,
    /// Anything else.
    Other,
}

impl ModelPart {
    /// All, in the order messages list them.
    pub const ALL: [ModelPart; 6] =
        [ModelPart::Attention, ModelPart::Mlp, ModelPart::Experts, ModelPart::Router, ModelPart::Head, ModelPart::Other];

    /// The word for it in a rule.
    pub fn name(self) -> &'static str {
        match self {
            ModelPart::Attention => "attention",
            ModelPart::Mlp => "mlp",
            ModelPart::Experts => "experts",
            ModelPart::Router => "router",
            ModelPart::Head => "head",
            ModelPart::Other => "other",
        }
    }
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrecisionRule {
    /// Decoder layers it is for; none means all matrices, those outside of layers too.
    pub layers: Option<RangeInclusive<usize>>,
    /// Part it is for; none means all.
    pub part: Option<ModelPart>,
    /// Type of the product's matrix: F32, BF16, F16 or Q8_0.
    pub dtype: DType,
}

/// Rules, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Precision {
    /// The last one that fits counts.
    pub rules: Vec<PrecisionRule>,
}

/// Types a rule can ask for.
const TYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::Q8_0];

impl Precision {
    /// Reads rules `<where>=<type>`, parted by commas. `<where>` is `*`, a part (`mlp`), layers (`layers.7`, `layers.0-3`) or
    /// both (`layers.0-3.mlp`).
    pub fn parse(text: &str) -> Result<Precision> {
        let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(rule).collect::<Result<_>>()?;
        Ok(Precision { rules })
    }

    /// The option if it has rules, else those of the environment's `METRALE_PRECISION`.
    pub fn resolve(&self) -> Result<Precision> {
        if !self.rules.is_empty() {
            return Ok(self.clone());
        }
        match std::env::var("METRALE_PRECISION") {
            Ok(text) => Precision::parse(&text).map_err(|e| e.context("METRALE_PRECISION")),
            Err(std::env::VarError::NotPresent) => Ok(Precision::default()),
            Err(e) => Err(Error::new(Kind::UnknownOption, format!("METRALE_PRECISION: {e}"))),
        }
    }

    /// What the rules say of a part of a layer; `None` leaves it to the checkpoint.
    pub fn dtype(&self, layer: Option<usize>, part: ModelPart) -> Option<DType> {
        let fits = |rule: &&PrecisionRule| {
            let layers = rule.layers.as_ref().is_none_or(|range| layer.is_some_and(|layer| range.contains(&layer)));
            layers && rule.part.is_none_or(|p| p == part)
        };
        self.rules.iter().rev().find(fits).map(|rule| rule.dtype)
    }
}

fn rule(text: &str) -> Result<PrecisionRule> {
    let Some((place, name)) = text.split_once('=') else {
        return Err(unknown(text, "expected <where>=<type>, for example layers.0-3.mlp=f32"));
    };
    let name = name.trim();
    let Some(dtype) = TYPES.into_iter().find(|t| t.name().eq_ignore_ascii_case(name)) else {
        return Err(unknown(text, &format!("there is no type {name:?}; known: {}", TYPES.map(DType::name).join(", "))));
    };
    let place = place.trim();
    let (layers, rest) = match place.strip_prefix("layers.") {
        Some(rest) => {
            let (numbers, rest) = rest.split_once('.').unwrap_or((rest, "*"));
            (Some(range(numbers).ok_or_else(|| unknown(text, &format!("{numbers:?} are no layers; expected 7 or 0-3")))?), rest)
        }
        None => (None, place),
    };
    let part = match rest {
        "*" => None,
        name => match ModelPart::ALL.into_iter().find(|p| p.name() == name) {
            Some(part) => Some(part),
            None => {
                return Err(unknown(
                    text,
                    &format!("there is no part {name:?}; known: {}", ModelPart::ALL.map(ModelPart::name).join(", ")),
                ));
            }
        },
    };
    Ok(PrecisionRule { layers, part, dtype })
}

fn range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..=last)
}

fn unknown(rule: &str, what: &str) -> Error {
    Error::new(Kind::UnknownOption, format!("precision rule {rule:?}: {what}")).named("precision")
}

/// Refuses a type that rules cannot ask for, where rules were made without [`Precision::parse`].
pub fn check(dtype: DType) -> Result<()> {
    if !TYPES.contains(&dtype) {
        bail!(UnknownOption, "a precision rule asks for {dtype}; known: {}", TYPES.map(DType::name).join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_that_fits_counts() {
        let p = Precision::parse("*=bf16, layers.1-2=f16, layers.2.mlp=f32,head=Q8_0").unwrap();
        for (layer, part, expected) in [
            (Some(0), ModelPart::Mlp, DType::BF16),
            (Some(1), ModelPart::Mlp, DType::F16),
            (Some(2), ModelPart::Mlp, DType::F32),
            (Some(2), ModelPart::Attention, DType::F16),
            (Some(3), ModelPart::Experts, DType::BF16),
            (None, ModelPart::Head, DType::Q8_0),
            (None, ModelPart::Other, DType::BF16),
        ] {
            assert_eq!(p.dtype(layer, part), Some(expected), "{layer:?} {part:?}");
        }
        assert_eq!(Precision::parse("layers.5=f32").unwrap().dtype(None, ModelPart::Head), None);
        assert_eq!(Precision::parse("").unwrap().dtype(Some(0), ModelPart::Mlp), None);
    }

    #[test]
    fn what_is_no_rule_is_named() {
        for (text, word) in [
            ("mlp", "<where>=<type>"),
            ("mlp=int3", "int3"),
            ("layers.x=f32", "no layers"),
            ("layers.3-1=f32", "no layers"),
            ("layers.-1=f32", "no layers"),
            ("layers.99999999999999999999=f32", "no layers"),
            ("nose=f32", "nose"),
            ("layers.0.nose=f32", "nose"),
            ("=f32", "no part"),
        ] {
            let e = Precision::parse(text).unwrap_err();
            assert!(e.kind() == Kind::UnknownOption && e.message().contains(word), "{text}: {e}");
        }
    }
}
