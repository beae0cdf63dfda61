//! NLLB-200 and M2M-100: an encoder and a decoder with one embedding for both sides and the output.
//!
//! A source is `[language, text.., end]`; the decoder starts with `[end, language]`, the second token being the language to
//! translate into. Odd things: embeddings are scaled by the width's square root; positions count from one past the padding
//! token's id; there is no limit to them but the trained length.

use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, AttentionNames, Config, CrossAttention, EncoderAttention, GatedMlp, HeadGating, LayerNorm, QkNorm,
    SourceAttentionDims, Values,
};
use crate::model::{Build, DecoderLayer, Dims, EncoderLayer, Head, Model, Translator};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};

/// Of all norms; no config says it.
const EPS: f32 = 1e-5;

fn activation(c: &Config<'_>) -> Result<Activation> {
    Ok(match c.opt_str("activation_function")?.unwrap_or("relu") {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "silu" | "swish" => Activation::Silu,
        other => bail!(Unsupported, "config.json: activation_function {other:?}; known: relu, gelu, silu"),
    })
}

/// `10000^(-i / (n - 1))`, in f32 steps as the reference takes them.
fn frequencies(n: usize) -> Vec<f32> {
    let step = (10_000f64.ln() / (n as f64 - 1.0)) as f32;
    (0..n).map(|i| f64::from(i as f32 * -step).exp() as f32).collect()
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let (vocab, hidden) = (c.usize("vocab_size")?, c.usize("d_model")?);
    let heads = |side: &str| -> Result<usize> {
        let heads = c.usize(&format!("{side}_attention_heads"))?;
        ensure!(
            hidden.is_multiple_of(heads),
            Mismatch,
            "config.json: d_model {hidden} does not split into {heads} heads ({side}_attention_heads)"
        );
        Ok(heads)
    };
    ensure!((4..=1 << 20).contains(&hidden), Unsupported, "config.json: d_model is {hidden}; 4 to 2^20 are possible");
    let (encoder_heads, decoder_heads) = (heads("encoder")?, heads("decoder")?);
    let (encoder_layers, decoder_layers) = (c.usize("encoder_layers")?, c.usize("decoder_layers")?);
    let (encoder_inner, decoder_inner) = (c.usize("encoder_ffn_dim")?, c.usize("decoder_ffn_dim")?);
    let act = activation(c)?;
    let norm = |d: &mut Declarations, name: String| LayerNorm::new(d, &name, hidden, EPS);
    let mlp = |d: &mut Declarations, name: &str, inner| GatedMlp::plain_named(d, name, ["fc1", "fc2"], hidden, inner, act, true);

    let source = SourceAttentionDims { hidden, heads: encoder_heads, kv_type: b.kv_type };
    let state = d.source_kv(source.spec());
    let mut encoder = Vec::new();
    for i in 0..encoder_layers {
        let name = format!("model.encoder.layers.{i}");
        encoder.push(EncoderLayer {
            attention_norm: norm(d, format!("{name}.self_attn_layer_norm")),
            attention: EncoderAttention::new(d, &format!("{name}.self_attn"), source, state),
            mlp_norm: norm(d, format!("{name}.final_layer_norm")),
            mlp: mlp(d, &name, encoder_inner),
        });
    }
    let head_dim = hidden / decoder_heads;
    let own = AttentionDims {
        hidden,
        heads: decoder_heads,
        kv_heads: decoder_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        softcap: None,
        qkv_bias: true,
        out_bias: true,
        qk_norm: QkNorm::No,
        values: Values::Own,
        sinks: false,
        gating: HeadGating::No,
        rope: None,
        kv_type: b.kv_type,
    };
    let names = AttentionNames { out: "out_proj", ..AttentionNames::USUAL };
    let mut decoder = Vec::new();
    for i in 0..decoder_layers {
        let name = format!("model.decoder.layers.{i}");
        decoder.push(DecoderLayer {
            attention_norm: norm(d, format!("{name}.self_attn_layer_norm")),
            attention: Attention::named(d, &format!("{name}.self_attn"), own, names),
            cross_norm: norm(d, format!("{name}.encoder_attn_layer_norm")),
            cross: CrossAttention::new(d, &format!("{name}.encoder_attn"), SourceAttentionDims { heads: decoder_heads, ..source }),
            mlp_norm: norm(d, format!("{name}.final_layer_norm")),
            mlp: mlp(d, &name, decoder_inner),
        });
    }
    let tied = c.bool_or("tie_word_embeddings", true)?;
    Ok(Box::new(Translator {
        head: Head::new(d, "model.shared.weight", "lm_head", vocab, hidden, tied),
        embed_factor: if c.bool_or("scale_embedding", true)? { (hidden as f64).sqrt() as f32 } else { 1.0 },
        frequencies: d.constant("positions", frequencies(hidden / 2)),
        first_position: c.count("pad_token_id")?.unwrap_or(0) + 1,
        encoder,
        encoder_norm: norm(d, "model.encoder.layer_norm".into()),
        decoder,
        decoder_norm: norm(d, "model.decoder.layer_norm".into()),
        dims: Dims { vocab, hidden, layers: decoder_layers, context: c.usize_or("max_position_embeddings", 1024)? },
    }))
}
