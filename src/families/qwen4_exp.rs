//! Qwen 4 Exp (Qwen 3.8 Flash Next), text part: several gated residual streams around delta nets and attention over a budget of
//! positions, routed experts beside a gated shared one, and an n-gram memory before some layers.
//!
//! Odd things: norms are stored as `w` for `1 + w`, but for the delta nets' own; there are no norms besides the streams' and no
//! final one; `ple_layer_ids` counts layers from 1; table sizes are the primes from `ngram_vocab_size_base` on; the hash's factors
//! are in the checkpoint, and follow from `seed` where they are not.

use super::dense::Common;
use super::facts::facts;
use super::qwen3_next::{attention_layers, delta_net, experts};
use super::sizes;
use crate::circuit::Tape;
use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, Config, DeltaNet, DeltaNetDims, DeltaNetTensors, FeedForward, GatedMlp, GatedSite, GatedStreamDims,
    HeadGating, IndexedAttention, IndexedAttentionDims, Linear, Mixer, Moe, NgramMemory, NgramMemoryDims, QkNorm, RopeParameters, Ropes,
    Router, Streams, unused_primes,
};
use crate::model::{Build, Carry, Dims, Head, Model, StreamDecoder, StreamEnd, StreamLayer};
use crate::ops::{Activation, KvType, NgramTable, Records, Value};
use crate::weights::Declarations;
use crate::{bail, ensure};

struct Layer {
    memory: Option<NgramMemory>,
    mixer_site: GatedSite,
    mixer: Box<dyn Mixer>,
    mlp_site: GatedSite,
    mlp: Moe,
}

impl StreamLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, carry: &mut Carry, ropes: &[Value]) {
        if let Some(memory) = &self.memory {
            carry.x = memory.record(t, carry.x);
        }
        let (h, weights) = self.mixer_site.read(t, carry.x);
        let h = self.mixer.record(t, h, ropes);
        carry.x = self.mixer_site.write(t, h, carry.x, weights);
        let (h, weights) = self.mlp_site.read(t, carry.x);
        let h = self.mlp.record(t, h);
        carry.x = self.mlp_site.write(t, h, carry.x, weights);
    }
}

/// Most tokens of an n-gram, heads for each length, and taps of the memory's convolution.
const MOST: usize = 64;
/// Largest table; also keeps the search for primes short.
const MOST_ROWS: usize = 1 << 28;

/// Most tables of a model.
const MOST_TABLES: usize = 1 << 13;

/// SplitMix64's step and output (Steele et al., 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn split_mix(value: u64) -> u64 {
    let z = value.wrapping_add(GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Odd factors, so small that a token times one stays a positive 64-bit number.
fn multipliers(seed: u64, index: usize, vocab: usize, count: usize) -> Vec<u64> {
    let bound = ((i64::MAX as u64) / vocab.max(1) as u64 / 2).max(1);
    let base = seed.wrapping_add(10_007 * index as u64);
    (1..=count as u64).map(|i| 2 * (split_mix(base.wrapping_add(GAMMA.wrapping_mul(i))) % bound) + 1).collect()
}

/// The tables of memory number `index`: `heads` for each length from 2 to `longest`, as large as the primes from `base` on, which
/// the model's memories use up in turn.
fn tables(base: usize, index: usize, longest: usize, heads: usize) -> Option<Vec<NgramTable>> {
    let count = (longest - 1) * heads;
    let primes = unused_primes(&mut Vec::new(), u32::try_from(base).ok()?, index + 1, count)?;
    let mut offset = 0u32;
    let mut list = Vec::with_capacity(count);
    for (i, rows) in primes[index * count..].iter().copied().enumerate() {
        list.push(NgramTable { rows, offset, tokens: i / heads + 2 });
        offset = offset.checked_add(rows)?;
    }
    Some(list)
}

/// The memory before layer `i`, the `index`th of the model's.
fn memory(
    c: &Config<'_>,
    b: &Build<'_>,
    d: &mut Declarations,
    streams: GatedStreamDims,
    name: &str,
    index: usize,
    history: Records,
) -> Result<NgramMemory> {
    let (vocab, longest, heads) = (c.usize("vocab_size")?, c.usize_or("ngram_size", 3)?, c.usize_or("heads_per_ngram", 8)?);
    let (base, taps) = (c.usize_or("ngram_vocab_size_base", 20_000_000)?, c.usize_or("ple_conv_kernel_size", 4)?);
    ensure!(
        (2..=MOST).contains(&longest) && heads <= MOST && taps <= MOST && base <= MOST_ROWS,
        Unsupported,
        "config.json: ngram_size {longest}, heads_per_ngram {heads}, ple_conv_kernel_size {taps}, ngram_vocab_size_base {base}; 2 to {MOST}, {MOST}, {MOST} and {MOST_ROWS} are possible"
    );
    let count = (longest - 1) * heads;
    ensure!(
        (index + 1) * count <= MOST_TABLES,
        Unsupported,
        "config.json: {} n-gram tables; at most {MOST_TABLES} are possible",
        (index + 1) * count
    );
    let width = c.usize_or("ple_embed_dim", streams.hidden)?;
    ensure!(width.is_multiple_of(count), Mismatch, "config.json: ple_embed_dim {width} does not split into {count} n-gram heads");
    let part = |p: &str| format!("{name}.ple_embedding.{p}");
    let Some(mut tables) = tables(base, index, longest, heads) else {
        bail!(TooLarge, "config.json: {count} n-gram tables from {base} rows on (ngram_vocab_size_base)")
    };
    // What the checkpoint says counts; it says the same as the config wherever nobody changed either.
    if let (Some(rows), Some(offsets)) = (b.integers(&part("ngram_heads_vocab_sizes")), b.integers(&part("ngram_heads_offsets"))) {
        ensure!(
            rows.len() == count && offsets.len() == count,
            Mismatch,
            "{name}: {} sizes and {} offsets of {count} n-gram heads",
            rows.len(),
            offsets.len()
        );
        for ((table, rows), offset) in tables.iter_mut().zip(rows).zip(offsets) {
            let (Ok(rows), Ok(offset)) = (u32::try_from(rows), u32::try_from(offset)) else {
                bail!(CorruptFile, "{name}: an n-gram table of {rows} rows at row {offset}")
            };
            (table.rows, table.offset) = (rows, offset);
        }
    }
    let factors = match b.integers(&part("layer_multipliers")) {
        Some(stored) => stored.into_iter().map(|m| m as u64).collect(),
        None => multipliers(c.f64_or("seed", 1234.0)? as u64, index, vocab, longest),
    };
    ensure!(factors.len() == longest, Mismatch, "{name}: {} multipliers for n-grams of up to {longest} tokens", factors.len());
    let end = c.get("eos_token_id").map(|v| v.get(0).unwrap_or(v)).and_then(|v| v.as_i64()).and_then(|v| i32::try_from(v).ok());
    let Some(end) = end else { bail!(Mismatch, "config.json: n-gram memories need eos_token_id") };
    let dims = NgramMemoryDims {
        streams: streams.streams,
        hidden: streams.hidden,
        width: width / count,
        taps,
        dilation: longest,
        eps: streams.eps,
        norm_add: streams.norm_add,
        end,
        multipliers: factors,
        shards: shards(c, b, &part("ngram_embedding"), &tables)?,
        tables,
    };
    NgramMemory::new(d, name, dims, history)
}

/// The tensors that hold the tables: one, or as many shards as the checkpoint has.
fn shards(c: &Config<'_>, b: &Build<'_>, name: &str, tables: &[NgramTable]) -> Result<Vec<(String, usize)>> {
    let rows = |tensor: &str| b.shape(tensor).and_then(|shape| shape.first().copied());
    let whole = format!("{name}.weight");
    if let Some(rows) = rows(&whole) {
        return Ok(vec![(whole, rows)]);
    }
    let shard = |k: usize| format!("{name}.shard_{k}.weight");
    let found: Vec<(String, usize)> = (0..).map_while(|k| rows(&shard(k)).map(|n| (shard(k), n))).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let (unit, parts) = (c.usize_or("make_ngram_vocab_size_divisible_by", 128)?, c.usize_or("split_ngram_parts", 512)?);
    let all = tables.iter().map(|t| t.rows as usize).sum::<usize>().next_multiple_of(unit);
    ensure!(all.is_multiple_of(parts), Mismatch, "config.json: {all} rows of n-gram tables do not split into {parts} (split_ngram_parts)");
    Ok((0..parts).map(|k| (shard(k), all / parts)).collect())
}

/// An attention layer: over a budget where the config has an indexer.
fn attention(
    c: &Config<'_>,
    d: &mut Declarations,
    name: &str,
    dims: AttentionDims,
    streams: GatedStreamDims,
    ropes: [usize; 2],
) -> Result<Box<dyn Mixer>> {
    let Some(index_heads) = c.count("indexer_n_heads")? else { return Ok(Box::new(Attention::new(d, name, dims))) };
    let (budget, every) = (c.usize("indexer_budget")?, c.usize("indexer_compress_ratio")?);
    ensure!(c.usize_or("indexer_kv_heads", 1)? == 1, Unsupported, "config.json: indexer_kv_heads is not 1");
    ensure!(
        budget.is_multiple_of(every),
        Mismatch,
        "config.json: indexer_budget {budget} does not split into blocks of {every} (indexer_compress_ratio)"
    );
    Ok(Box::new(IndexedAttention::new(
        d,
        name,
        IndexedAttentionDims {
            attention: dims,
            index_heads,
            index_dim: c.usize("indexer_head_dim")?,
            every,
            top_k: budget / every,
            eps: streams.eps,
            norm_add: streams.norm_add,
            rope: ropes[0],
            block_rope: ropes[1],
        },
    )))
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let tied = c.bool_or("tie_word_embeddings", false)?;
    let text = c.opt_object("text_config")?.unwrap_or(*c);
    let c = &text;
    // A text-only checkpoint names its tensors without the middle name.
    let root = if b.shape("model.embed_tokens.weight").is_some() { "model" } else { "model.language_model" };
    let common = Common::with_inner(c, tied, c.usize_or("intermediate_size", 0)?)?;
    let common = Common { head_dim: c.usize_or("head_dim", 256)?, root, ..common };
    let add = facts("qwen4_exp").norm_add;
    let streams = GatedStreamDims {
        streams: c.usize_or("hc_count", 4)?,
        hidden: common.hidden,
        rank: c.usize_or("hc_lowrank", 320)?,
        eps: common.eps,
        norm_add: add,
    };
    ensure!(
        (2..=8).contains(&streams.streams),
        Unsupported,
        "config.json: hc_count is {}; 2 to 8 residual streams are possible",
        streams.streams
    );
    let gate = match c.opt_str("output_gate_type")?.unwrap_or("silu") {
        "sigmoid" => Activation::Sigmoid,
        "silu" | "swish" => Activation::Silu,
        other => bail!(Unsupported, "config.json: output_gate_type {other:?}; known: sigmoid, silu"),
    };
    let net = DeltaNetDims { gate, ..delta_net(c, &common, DeltaNetTensors::Separate)? };
    let attends = attention_layers(c, common.layers)?;
    let bias = c.bool_or("attention_bias", false)?;
    let routed = sizes(c, &common, "num_experts", "moe_intermediate_size")?;
    let shared = c.usize("shared_expert_intermediate_size")?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read_partial(c, common.head_dim, None, b.context, 0.25)?);
    // Blocks of the indexer turn at their first position; that table stands behind the plain one.
    let group_ropes = c.count("indexer_compress_ratio")?.map(|every| (rope, every)).into_iter().collect();
    let block_rope = ropes.count();
    let mut memories: Vec<usize> = c.opt_numbers("ple_layer_ids")?.unwrap_or_default().into_iter().map(|n| n as usize).collect();
    memories.sort_unstable();
    memories.dedup();
    if let Some(wrong) = memories.iter().find(|n| !(1..=common.layers).contains(*n)) {
        bail!(Mismatch, "config.json: ple_layer_ids holds {wrong}, of {} layers counted from 1", common.layers);
    }
    let history =
        (!memories.is_empty()).then(|| Records { state: d.kv(Records::spec(1, 1, KvType::F32)), width: 1, every: 1, dtype: KvType::F32 });
    let mut layers: Vec<Box<dyn StreamLayer>> = Vec::with_capacity(common.layers);
    for i in 0..common.layers {
        let name = |part: &str| common.name(i, part);
        let memory = match (memories.iter().position(|n| *n == i + 1), history) {
            (Some(index), Some(history)) => Some(memory(c, b, d, streams, &name("ple"), index, history)?),
            _ => None,
        };
        let mixer: Box<dyn Mixer> = if attends[i] {
            let dims = AttentionDims {
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::PerHead(common.eps, add),
                gating: HeadGating::InQuery(Activation::Sigmoid),
                rope: Some(rope),
                ..common.attention(b)
            };
            attention(c, d, &name("self_attn"), dims, streams, [rope, block_rope])?
        } else {
            Box::new(DeltaNet::new(d, &name("linear_attn"), net)?)
        };
        let logits = Linear::new(d, &name("mlp.gate"), routed.count, common.hidden, false);
        let router = Router { normalize: c.bool_or("norm_topk_prob", true)?, ..Router::softmax(logits, routed.top_k) };
        let experts = experts(b, d, &common, i, routed);
        let shared_gate = Linear::new(d, &name("mlp.shared_expert_gate"), 1, common.hidden, false);
        let shared = GatedMlp::new(d, &name("mlp.shared_expert"), common.hidden, shared, common.act, false);
        layers.push(Box::new(Layer {
            memory,
            mixer_site: GatedSite::new(d, &name("attn_hyper_connection"), streams),
            mixer,
            mlp_site: GatedSite::new(d, &name("mlp_hyper_connection"), streams),
            mlp: Moe { shared: Some(shared), shared_gate: Some(shared_gate), ..Moe::new(router, experts) },
        }));
    }
    Ok(Box::new(StreamDecoder {
        head: Head::new(d, &format!("{root}.embed_tokens.weight"), common.head, common.vocab, common.hidden, common.tied),
        streams: Streams { count: streams.streams, hidden: common.hidden, rounds: 0, eps: 0.0, norm_eps: common.eps },
        ropes,
        group_ropes,
        history,
        layers,
        end: StreamEnd::Gated(GatedSite::end(d, &format!("{root}.hyper_connection_mixer"), streams)),
        norm: None,
        dims: Dims { vocab: common.vocab, hidden: common.hidden, layers: common.layers, context: common.context },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_take_the_primes_in_turn() {
        let first = tables(128, 0, 3, 2).unwrap();
        assert_eq!(first.iter().map(|t| t.rows).collect::<Vec<_>>(), [131, 137, 139, 149]);
        assert_eq!(first.iter().map(|t| (t.offset, t.tokens)).collect::<Vec<_>>(), [(0, 2), (131, 2), (268, 3), (407, 3)]);
        assert_eq!(tables(131, 0, 2, 1).unwrap()[0].rows, 131);
        assert_eq!(tables(128, 1, 3, 2).unwrap()[0].rows, 151);
    }

    #[test]
    fn multipliers_are_odd_and_leave_room_for_every_token() {
        for vocab in [1, 320, 248_320] {
            for m in multipliers(1234, 0, vocab, 3) {
                assert!(m % 2 == 1 && (m as u128) * (vocab as u128 - 1) < 1 << 63, "{m}");
            }
        }
    }
}
