//! A llama in f64, written from the papers: what the engine's answers are held against. It also answers what a cache holds after
//! tokens were taken out of its middle.

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

pub struct Llama {
    config: Value,
    tensors: HashMap<String, (Vec<usize>, Vec<f64>)>,
}

/// A cached position of each layer: its key before rotation, its value, and where it stands.
pub struct Past {
    /// By layer, by position.
    pub keys: Vec<Vec<Vec<f64>>>,
    pub values: Vec<Vec<Vec<f64>>>,
    pub positions: Vec<usize>,
}

impl Llama {
    pub fn read(folder: &Path) -> Llama {
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::BF16, "{name}");
            let pairs = view.data().chunks_exact(2);
            let values = pairs.map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))).collect();
            (name.to_string(), (view.shape().to_vec(), values))
        });
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        Llama { tensors: tensors.collect(), config }
    }

    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (shape, w) = &self.tensors[name];
        assert_eq!(shape[1], x.len());
        w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + self.config["rms_norm_eps"].as_f64().unwrap()).sqrt();
        x.iter().zip(&self.tensors[name].1).map(|(v, w)| v * scale * w).collect()
    }

    fn turned(&self, head: &[f64], position: usize) -> Vec<f64> {
        let half = head.len() / 2;
        let theta = self.config["rope_theta"].as_f64().unwrap();
        let mut out = head.to_vec();
        for i in 0..half {
            let (sin, cos) = (position as f64 * theta.powf(-2.0 * i as f64 / head.len() as f64)).sin_cos();
            out[i] = head[i] * cos - head[i + half] * sin;
            out[i + half] = head[i + half] * cos + head[i] * sin;
        }
        out
    }

    pub fn past(&self) -> Past {
        let layers = self.number("num_hidden_layers");
        Past { keys: vec![Vec::new(); layers], values: vec![Vec::new(); layers], positions: Vec::new() }
    }

    /// Reads a token; the last layer's output after the final norm.
    pub fn hidden(&self, past: &mut Past, token: i32) -> Vec<f64> {
        let (heads, kv_heads, dim) = (self.number("num_attention_heads"), self.number("num_key_value_heads"), self.number("head_dim"));
        let width = self.number("hidden_size");
        let position = past.positions.last().map_or(0, |p| p + 1);
        past.positions.push(position);
        let mut x = self.tensors["model.embed_tokens.weight"].1[token as usize * width..][..width].to_vec();
        for layer in 0..self.number("num_hidden_layers") {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let h = self.norm(&name("input_layernorm"), &x);
            let q = self.times(&name("self_attn.q_proj"), &h);
            past.keys[layer].push(self.times(&name("self_attn.k_proj"), &h));
            past.values[layer].push(self.times(&name("self_attn.v_proj"), &h));
            let mut attended = Vec::new();
            for head in 0..heads {
                let at = head / (heads / kv_heads) * dim;
                let q = self.turned(&q[head * dim..][..dim], position);
                let score = |(key, p): (&Vec<f64>, &usize)| {
                    let key = self.turned(&key[at..at + dim], *p);
                    q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (dim as f64).sqrt()
                };
                let scores: Vec<f64> = past.keys[layer].iter().zip(&past.positions).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                let values = &past.values[layer];
                attended.extend((0..dim).map(|d| weights.iter().zip(values).map(|(w, v)| w / total * v[at + d]).sum::<f64>()));
            }
            let out = self.times(&name("self_attn.o_proj"), &attended);
            x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
            let h = self.norm(&name("post_attention_layernorm"), &x);
            let gate = self.times(&name("mlp.gate_proj"), &h);
            let up = self.times(&name("mlp.up_proj"), &h);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let out = self.times(&name("mlp.down_proj"), &inner);
            x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
        }
        self.norm("model.norm.weight", &x)
    }

    /// Reads tokens; the logits after the last.
    pub fn read_all(&self, past: &mut Past, tokens: &[i32]) -> Vec<f64> {
        let mut hidden = Vec::new();
        for token in tokens {
            hidden = self.hidden(past, *token);
        }
        self.times("lm_head.weight", &hidden)
    }
}

impl Past {
    /// Takes positions out of the middle: later ones move down and stay what they were.
    pub fn shift(&mut self, from: usize, count: usize) {
        for kept in self.keys.iter_mut().chain(&mut self.values) {
            kept.drain(from..from + count);
        }
        self.positions.truncate(self.positions.len() - count);
    }
}

/// The largest difference, as a share of the largest number.
pub fn difference(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let most = b.iter().fold(0.0f64, |most, v| most.max(v.abs()));
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / most
}
