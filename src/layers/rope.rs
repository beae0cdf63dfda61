//! Rotary frequencies and their scalings: linear (Chen et al., 2023), NTK, YaRN (Peng et al., 2023), Llama 3's bands,
//! LongRoPE (Ding et al., 2024), or factors given by the checkpoint.
//!
//! Both config styles are read: `rope_theta` + `rope_scaling`, and `rope_parameters` (flat, or one object for each layer type).

use super::Config;
use crate::circuit::Tape;
use crate::error::{Error, Kind, Result};
use crate::ops::{RopeTable, Value, WeightId};
use crate::weights::Declarations;
use crate::{bail, ensure};
use std::f64::consts::PI;

/// Frequencies for one kind of layer, and the factor on cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParameters {
    /// Radians per position, `[rotary_dim / 2]`.
    pub frequencies: Vec<f32>,
    /// YaRN's and LongRoPE's attention factor.
    pub factor: f32,
}

/// The scaling object of either style.
fn scaling<'a>(config: &Config<'a>, layer_type: Option<&str>) -> Result<Option<Config<'a>>> {
    if let Some(parameters) = config.opt_object("rope_parameters")? {
        if let Some(kind) = layer_type
            && let Some(own) = parameters.opt_object(kind)?
        {
            return Ok(Some(own));
        }
        return Ok(Some(parameters));
    }
    config.opt_object("rope_scaling")
}

impl RopeParameters {
    /// Reads a config. `context` is the longest sequence that will be run: LongRoPE picks its factors by it.
    /// `layer_type` selects among per-type parameters; `theta` overrides the base (Gemma 3's local layers).
    pub fn read(config: &Config<'_>, head_dim: usize, layer_type: Option<&str>, context: usize) -> Result<RopeParameters> {
        RopeParameters::read_partial(config, head_dim, layer_type, context, 1.0)
    }

    /// As [`RopeParameters::read`]; `partial` is the share of a head that turns where the config does not say.
    pub fn read_partial(
        config: &Config<'_>,
        head_dim: usize,
        layer_type: Option<&str>,
        context: usize,
        partial: f64,
    ) -> Result<RopeParameters> {
        let object = scaling(config, layer_type)?;
        let number = |key: &str| -> Result<Option<f64>> {
            match &object {
                Some(o) if o.get(key).is_some() => o.opt_f64(key),
                _ => config.opt_f64(key),
            }
        };
        let theta = number("rope_theta")?.unwrap_or(10_000.0);
        let partial = number("partial_rotary_factor")?.unwrap_or(partial);
        ensure!(
            theta > 0.0 && partial > 0.0 && partial <= 1.0,
            CorruptFile,
            "config.json: rope_theta {theta}, partial_rotary_factor {partial}"
        );
        let dim = (head_dim as f64 * partial) as usize;
        ensure!(
            dim >= 2 && dim.is_multiple_of(2),
            Unsupported,
            "config.json: {dim} rotary elements in heads of {head_dim}; an even number is needed"
        );
        let Some(object) = object else { return Ok(RopeParameters::plain(theta, dim)) };
        let kind = match object.opt_str("rope_type")? {
            Some(kind) => kind,
            None => object.opt_str("type")?.unwrap_or("default"),
        };
        let longest = config.usize_or("max_position_embeddings", 2048)? as f64;
        let original = match object.opt_f64("original_max_position_embeddings")? {
            Some(n) => n,
            None => config.f64_or("original_max_position_embeddings", longest)?,
        };
        match kind {
            "default" => Ok(RopeParameters::plain(theta, dim)),
            "linear" => {
                let factor = positive(&object, "factor")?;
                Ok(RopeParameters::from_f64(plain(theta, dim).map(|f| f / factor), 1.0))
            }
            // The base only grows once a sequence passes the trained length.
            "dynamic" => {
                let factor = positive(&object, "factor")?;
                let (n, dim_f) = ((context as f64).max(original), dim as f64);
                let theta = theta * (factor * n / original - (factor - 1.0)).powf(dim_f / (dim_f - 2.0));
                Ok(RopeParameters::plain(theta, dim))
            }
            // The slowest pairs stand still; the others turn as if all did, so they lie half a head apart.
            "proportional" => {
                let factor = object.f64_or("factor", 1.0)?;
                ensure!(factor > 0.0, CorruptFile, "config.json: factor is {factor}, expected more than 0");
                Ok(RopeParameters::proportional(theta, head_dim, dim, factor))
            }
            "llama3" => llama3(&object, theta, dim, original),
            "yarn" => yarn(&object, theta, dim, original),
            "longrope" | "su" => longrope(config, &object, theta, dim, original, context),
            "freq_factors" => {
                let factors = object.opt_numbers("factors")?.unwrap_or_default();
                ensure!(factors.len() == dim / 2, Mismatch, "rope factors: {} for {dim} rotary elements", factors.len());
                Ok(RopeParameters::from_f64(plain(theta, dim).zip(&factors).map(|(f, s)| f / s), 1.0))
            }
            other => bail!(
                Unsupported,
                "config.json: rope_type {other:?}; known: default, linear, dynamic, proportional, llama3, yarn, longrope"
            ),
        }
    }

    /// The longest context that does not change the frequencies: the trained length where LongRoPE scales beyond it, else any.
    pub fn trained(config: &Config<'_>) -> Result<usize> {
        let Some(object) = scaling(config, None)? else { return Ok(usize::MAX) };
        let kind = object.opt_str("rope_type")?.or(object.opt_str("type")?);
        match kind {
            Some("longrope" | "su") => {
                let outer = config.usize_or("original_max_position_embeddings", usize::MAX)?;
                object.usize_or("original_max_position_embeddings", outer)
            }
            _ => Ok(usize::MAX),
        }
    }

    /// `theta^(-2i / dim)`.
    pub fn plain(theta: f64, dim: usize) -> RopeParameters {
        RopeParameters::from_f64(plain(theta, dim), 1.0)
    }

    /// `theta^(-2i / head_dim) / factor` for the first `turning / 2` pairs of a head, 0 for the others (Gemma 4).
    pub fn proportional(theta: f64, head_dim: usize, turning: usize, factor: f64) -> RopeParameters {
        let turns = |(i, f): (usize, f64)| if i < turning / 2 { f / factor } else { 0.0 };
        RopeParameters::from_f64(plain(theta, head_dim).enumerate().map(turns), 1.0)
    }

    fn from_f64(frequencies: impl Iterator<Item = f64>, factor: f64) -> RopeParameters {
        RopeParameters { frequencies: frequencies.map(|f| f as f32).collect(), factor: factor as f32 }
    }
}

fn plain(theta: f64, dim: usize) -> impl Iterator<Item = f64> {
    (0..dim / 2).map(move |i| theta.powf(-2.0 * i as f64 / dim as f64))
}

fn positive(object: &Config<'_>, key: &str) -> Result<f64> {
    let value = object.f64(key)?;
    if value > 0.0 {
        Ok(value)
    } else {
        Err(Error::new(Kind::CorruptFile, format!("config.json: {key} is {value}, expected more than 0")).named(key))
    }
}

/// Long wavelengths are stretched, short ones kept, those between are blended.
fn llama3(object: &Config<'_>, theta: f64, dim: usize, original: f64) -> Result<RopeParameters> {
    let (factor, low, high) = (positive(object, "factor")?, positive(object, "low_freq_factor")?, positive(object, "high_freq_factor")?);
    let scaled = plain(theta, dim).map(|f| {
        let wavelength = 2.0 * PI / f;
        if wavelength > original / low {
            f / factor
        } else if wavelength < original / high {
            f
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * f / factor + smooth * f
        }
    });
    Ok(RopeParameters::from_f64(scaled, 1.0))
}

fn yarn(object: &Config<'_>, theta: f64, dim: usize, original: f64) -> Result<RopeParameters> {
    let factor = positive(object, "factor")?;
    let (fast, slow) = (object.f64_or("beta_fast", 32.0)?, object.f64_or("beta_slow", 1.0)?);
    let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention = match (object.opt_f64("attention_factor")?, object.opt_f64("mscale")?, object.opt_f64("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => magnitude(m) / magnitude(all),
        _ => magnitude(1.0),
    };
    // The rotary pair that turns `rotations` times over the trained length.
    let pair = |rotations: f64| dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(fast), pair(slow));
    if object.bool_or("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let scaled = plain(theta, dim).enumerate().map(|(i, f)| {
        let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * stretched + f * (1.0 - stretched)
    });
    Ok(RopeParameters::from_f64(scaled, attention))
}

/// Factors for each pair: the short list within the trained length, the long list beyond it. The choice is made once, by
/// the longest sequence this model is loaded for, so that a prompt split any way gives the same numbers.
fn longrope(config: &Config<'_>, object: &Config<'_>, theta: f64, dim: usize, original: f64, context: usize) -> Result<RopeParameters> {
    let key = if context as f64 > original { "long_factor" } else { "short_factor" };
    let factors = object
        .opt_numbers(key)?
        .ok_or_else(|| Error::new(Kind::CorruptFile, format!("config.json: rope_scaling lacks {key}")).named(key))?;
    ensure!(
        factors.len() == dim / 2,
        Mismatch,
        "config.json: {key} lists {} factors, {} rotary pairs need one each",
        factors.len(),
        dim / 2
    );
    ensure!(factors.iter().all(|f| *f > 0.0), CorruptFile, "config.json: {key} holds a factor that is not positive");
    let longest = config.usize_or("max_position_embeddings", 2048)? as f64;
    let stretch = match object.opt_f64("factor")? {
        Some(factor) => factor,
        None => longest / original,
    };
    let attention = match object.opt_f64("attention_factor")? {
        Some(given) => given,
        None if stretch <= 1.0 => 1.0,
        None => (1.0 + stretch.ln() / original.ln()).sqrt(),
    };
    Ok(RopeParameters::from_f64(plain(theta, dim).zip(&factors).map(|(f, s)| f / s), attention))
}

/// The rotary tables of a model: each distinct set of frequencies once.
#[derive(Clone, Debug, Default)]
pub struct Ropes {
    tables: Vec<(RopeParameters, WeightId)>,
}

impl Ropes {
    /// The index of the table for these parameters, declared if new.
    pub fn add(&mut self, d: &mut Declarations, parameters: RopeParameters) -> usize {
        if let Some(index) = self.tables.iter().position(|(p, _)| *p == parameters) {
            return index;
        }
        let id = d.constant(&format!("rope.{}", self.tables.len()), parameters.frequencies.clone());
        self.tables.push((parameters, id));
        self.tables.len() - 1
    }

    /// Tables there are.
    pub fn count(&self) -> usize {
        self.tables.len()
    }

    /// Frequencies and factor of a table, for operations that turn at other positions than a row's.
    pub fn parameters(&self, index: usize) -> (WeightId, f32) {
        let (parameters, frequencies) = &self.tables[index];
        (*frequencies, parameters.factor)
    }

    /// Records every table, for layers to index.
    pub fn record(&self, t: &mut Tape<'_>) -> Vec<Value> {
        self.tables.iter().map(|(p, frequencies)| t.op(RopeTable { frequencies: *frequencies, factor: p.factor, y: Value::NONE })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(config: serde_json::Value, context: usize) -> RopeParameters {
        RopeParameters::read(&Config::new(&config).unwrap(), 8, None, context).unwrap()
    }

    #[test]
    fn both_config_styles_agree() {
        let old = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}});
        let new = json!({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}});
        assert_eq!(read(old.clone(), 64), read(new, 64));
        assert_eq!(read(old, 64).frequencies[0], 0.25);
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_stretches_long_ones() {
        let c = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}});
        let scaled = read(c, 64).frequencies;
        let plain = RopeParameters::plain(500000.0, 8).frequencies;
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[3], plain[3] / 8.0);
    }

    #[test]
    fn longrope_picks_its_factors_by_the_context() {
        let c = json!({"max_position_embeddings": 4096, "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}});
        assert_eq!(read(c.clone(), 1024).frequencies[0], 1.0);
        assert_eq!(read(c.clone(), 1025).frequencies[0], 0.5);
        assert_eq!(read(c, 64).factor, ((1.0 + 4f64.ln() / 1024f64.ln()).sqrt()) as f32);
    }

    #[test]
    fn proportional_leaves_the_slow_pairs_unturned() {
        let c = json!({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}});
        assert_eq!(read(c, 64).frequencies, [1.0, 0.1, 0.0, 0.0]);
    }

    #[test]
    fn unknown_scaling_is_refused_by_name() {
        let c = json!({"rope_scaling": {"rope_type": "spiral"}});
        let e = RopeParameters::read(&Config::new(&c).unwrap(), 8, None, 64).unwrap_err();
        assert!(e.kind() == Kind::Unsupported && e.message().contains("spiral"), "{e}");
    }
}
