//! DeepSeek-V4.1: V4 whose compressed rows and selections are shared among layers, with n-gram memory before some of them.
//!
//! Odd things: a sublayer is collapsed with the mixing weights of the sublayer before it, the first one takes stream 0; compressed rows
//! and index keys come from one latent, without position bias; the numbers of the n-gram hash are in a GGUF file's
//! metadata, or follow from config and tokenizer.

use super::deepseek_v4::Common;
use crate::circuit::Tape;
use crate::error::{Error, Kind, Result};
use crate::layers::{
    Blocks, CompressedDims, Config, Engram, EngramDims, FeedForward, HyperSite, Moe, RmsNorm, Roles, RowSource, SharedRows, Streams,
    multipliers, unused_primes,
};
use crate::model::{Build, Carry, Head, Model, StreamDecoder, StreamEnd, StreamLayer};
use crate::ops::{EngramHash, KvType, Records, Value};
use crate::text::{Tokenizer, folded_ids};
use crate::weights::Declarations;
use crate::{bail, ensure};

struct Layer {
    streams: Streams,
    engram: Option<Engram>,
    attention_site: HyperSite,
    attention_norm: RmsNorm,
    attention: SharedRows,
    mlp_site: HyperSite,
    mlp_norm: RmsNorm,
    mlp: Moe,
}

impl StreamLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, carry: &mut Carry, ropes: &[Value]) {
        let s = &self.streams;
        if let Some(engram) = &self.engram {
            carry.x = engram.record(t, carry.x);
        }
        let own = self.attention_site.mix(t, carry.x);
        let h = match carry.mix.is_some() {
            true => s.collapse(t, carry.x, carry.mix),
            false => t.slice(carry.x, 0, s.hidden),
        };
        let h = self.attention_norm.record(t, h);
        let h = self.attention.record(t, h, ropes, &mut carry.selection, &mut carry.blocks);
        carry.x = s.expand(t, h, carry.x, own);
        let mix = self.mlp_site.mix(t, carry.x);
        let h = s.collapse(t, carry.x, own);
        let h = self.mlp_norm.record(t, h);
        let h = self.mlp.record(t, h);
        carry.x = s.expand(t, h, carry.x, mix);
        carry.mix = mix;
    }
}

/// A list of layers; absent is none.
fn layer_list(c: &Config<'_>, key: &str) -> Result<Vec<usize>> {
    Ok(c.opt_numbers(key)?.unwrap_or_default().into_iter().map(|n| n as usize).collect())
}

/// The hashes of all engram layers, and folded ids by token.
struct Hashes {
    layers: Vec<(usize, EngramHash)>,
    map: Vec<f32>,
    pad: i64,
}

impl Hashes {
    fn read(c: &Config<'_>, b: &Build<'_>, vocab: usize) -> Result<Option<Hashes>> {
        let ids = layer_list(c, "engram_layer_ids")?;
        if ids.is_empty() {
            return Ok(None);
        }
        let (tokens, heads) = (c.usize("engram_max_ngram_size")?, c.usize("engram_n_heads")?);
        ensure!(
            (2..=16).contains(&tokens) && heads <= 256,
            Unsupported,
            "config.json: n-grams of {tokens} tokens, {heads} heads; 2 to 16 and 1 to 256 are possible"
        );
        let columns = (tokens - 1) * heads;
        let (map, hashes) = match c.opt_object("engram_tables")? {
            Some(tables) => stored(&tables, ids.len(), tokens, columns)?,
            None => {
                let map = token_map(c, b, vocab)?;
                let count = map.iter().fold(-1.0f32, |a, b| a.max(*b)) as i64 + 1;
                let known = c.usize_or("engram_compressed_vocab_size", count as usize)?;
                ensure!(
                    known as i64 == count,
                    Mismatch,
                    "the tokenizer folds to {count} ids, config.json says {known} (engram_compressed_vocab_size)"
                );
                (map, computed(c, &ids, count as u64, tokens, heads)?)
            }
        };
        ensure!(map.len() >= vocab, Mismatch, "the engram's token map has {} entries, vocab_size is {vocab}", map.len());
        let pad = c.get("engram_pad_token_id").and_then(|v| v.as_u64()).unwrap_or(0) as usize;
        ensure!(pad < map.len(), Mismatch, "config.json: engram_pad_token_id is {pad}, the vocabulary has {}", map.len());
        Ok(Some(Hashes { pad: map[pad] as i64, layers: ids.into_iter().zip(hashes).collect(), map }))
    }
}

/// Numbers that follow from the config.
fn computed(c: &Config<'_>, ids: &[usize], folded: u64, tokens: usize, heads: usize) -> Result<Vec<EngramHash>> {
    let size = u32::try_from(c.usize("engram_vocab_size")?).unwrap_or(u32::MAX);
    let mut seen = Vec::new();
    ids.iter()
        .map(|layer| {
            let primes = unused_primes(&mut seen, size, tokens - 1, heads).ok_or_else(|| {
                Error::new(Kind::Unsupported, format!("config.json: engram_vocab_size {size} leaves no primes")).named("engram_vocab_size")
            })?;
            with_offsets(multipliers(*layer as u32, folded, tokens), primes)
        })
        .collect()
}

fn with_offsets(multipliers: Vec<i64>, primes: Vec<u32>) -> Result<EngramHash> {
    let mut offsets = Vec::with_capacity(primes.len());
    let mut next = 0u32;
    for prime in &primes {
        offsets.push(next);
        next = next.checked_add(*prime).ok_or_else(|| Error::new(Kind::Unsupported, "an engram table of 2^32 rows and more"))?;
    }
    Ok(EngramHash { multipliers, primes, offsets })
}

/// Numbers of a GGUF file's metadata.
fn stored(tables: &Config<'_>, layers: usize, tokens: usize, columns: usize) -> Result<(Vec<f32>, Vec<EngramHash>)> {
    let list = |key: &str| -> Result<Vec<i64>> {
        let list = tables.opt_list(key)?.unwrap_or_default();
        list.iter()
            .map(|v| v.as_i64().ok_or_else(|| Error::new(Kind::CorruptFile, format!("engram {key}: found {v}, expected whole numbers"))))
            .collect()
    };
    let (map, factors, primes, offsets) = (list("token_map")?, list("multipliers")?, list("primes")?, list("offsets")?);
    ensure!(
        factors.len() == layers * tokens && primes.len() == layers * columns && offsets.len() == primes.len(),
        Mismatch,
        "engram: {} multipliers, {} primes, {} offsets for {layers} layers of {columns} columns",
        factors.len(),
        primes.len(),
        offsets.len()
    );
    let small = |v: &[i64]| -> Result<Vec<u32>> {
        v.iter()
            .map(|n| u32::try_from(*n).map_err(|_| Error::new(Kind::CorruptFile, format!("engram: {n} is no row of a table"))))
            .collect()
    };
    let hashes = (0..layers)
        .map(|l| {
            let span = l * columns..(l + 1) * columns;
            let (primes, offsets) = (small(&primes[span.clone()])?, small(&offsets[span])?);
            Ok(EngramHash { multipliers: factors[l * tokens..(l + 1) * tokens].to_vec(), primes, offsets })
        })
        .collect::<Result<_>>()?;
    ensure!(map.iter().all(|id| (-1..1 << 24).contains(id)), CorruptFile, "engram: the token map holds an id beyond 2^24");
    Ok((map.into_iter().map(|id| id as f32).collect(), hashes))
}

/// Folded ids by the checkpoint's tokenizer; any ids at all where weights are made up.
fn token_map(c: &Config<'_>, b: &Build<'_>, vocab: usize) -> Result<Vec<f32>> {
    if b.checkpoint.names().next().is_none() {
        let count = c.usize_or("engram_compressed_vocab_size", vocab)?;
        return Ok((0..vocab).map(|i| (i % count) as f32).collect());
    }
    let tokenizer = match b.checkpoint.beside() {
        Some(files) => Tokenizer::from_files(files)?,
        None => None,
    };
    let Some(tokenizer) = tokenizer else {
        bail!(NotFound, "the engram's hash needs tokenizer.json, which the checkpoint lacks");
    };
    let mut map: Vec<f32> = folded_ids(&tokenizer)?.into_iter().map(|id| id as f32).collect();
    // Rows of the embedding that no token uses end an n-gram.
    map.resize(map.len().max(vocab), -1.0);
    Ok(map)
}

pub(super) fn build(outer: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let c = outer.opt_object("text_config")?.unwrap_or(*outer);
    let mut common = Common::read(&c, b)?;
    common.attention.query_norm = false;
    common.tied = outer.bool_or("tie_word_embeddings", common.tied)?;
    let (ropes, [plain, scaled]) = common.ropes(&c, b, d)?;
    let (sources, indexers) = (layer_list(&c, "kv_source_layer_ids")?, layer_list(&c, "index_source_layer_ids")?);
    let by_token = c.count("num_hash_layers")?.unwrap_or(0);
    // -1 says that no layer picks blocks.
    let picker = c.opt_f64("candidate_source_layer_id")?.filter(|n| *n >= 0.0).map(|n| n as usize);
    let (block, top_blocks) = (c.usize_or("candidate_block_size", 8)?, c.usize_or("candidate_topk_blocks", 2048)?);
    let hashes = Hashes::read(&c, b, common.dims.vocab)?;
    let history =
        hashes.as_ref().map(|_| Records { state: d.kv(Records::spec(1, 1, KvType::F32)), width: 1, every: 1, dtype: KvType::F32 });
    let map = hashes.as_ref().map(|h| d.constant("engram.token_map", h.map.clone()));
    let mut group_ropes: Vec<(usize, usize)> = Vec::new();
    let mut layers: Vec<Box<dyn StreamLayer>> = Vec::new();
    let (mut source, mut selected, mut picked): (Option<RowSource>, bool, Option<usize>) = (None, false, None);
    for i in 0..common.dims.layers {
        let name = |part: &str| format!("layers.{i}.{part}");
        let every = common.ratios[i];
        let group = group_ropes.iter().position(|g| g.1 == every.max(1)).unwrap_or_else(|| {
            group_ropes.push((scaled, every.max(1)));
            group_ropes.len() - 1
        });
        let blocks = match picker {
            Some(p) if p == i => Blocks::Pick { block, top_k: top_blocks },
            Some(p) if i > p => Blocks::Inside { block },
            _ => Blocks::No,
        };
        let roles = Roles {
            every,
            source: every > 0 && sources.contains(&i),
            index: every > 0 && indexers.contains(&i),
            blocks,
            group_rope: ropes.count() + group,
        };
        selected |= roles.index;
        if roles.index && matches!(blocks, Blocks::Pick { .. }) {
            picked = Some(every);
        }
        let made = roles.source || source.is_some_and(|s| s.rows.every == every);
        ensure!(
            every == 0 || (made && selected),
            Mismatch,
            "config.json: layer {i} sees rows of {every} positions, and no layer up to it makes and selects such rows"
        );
        ensure!(
            !(roles.index && matches!(blocks, Blocks::Inside { .. })) || picked == Some(every),
            Mismatch,
            "config.json: layer {i} chooses inside blocks, and candidate_source_layer_id picks none of rows of {every} positions"
        );
        let engram = match (&hashes, history, map) {
            (Some(hashes), Some(history), Some(map)) => hashes.layers.iter().find(|l| l.0 == i).map(|(_, hash)| {
                let rows = hash.primes.iter().zip(&hash.offsets).map(|(p, o)| *p as usize + *o as usize).max().unwrap_or(0);
                let dims = c.usize("engram_head_dim").map(|dim| EngramDims { history, map, pad: hashes.pad, dim, rows });
                dims.map(|dims| Engram::new(d, &name("engram"), common.streams, dims, hash.clone()))
            }),
            _ => None,
        };
        let dims = CompressedDims { rope: if every > 0 { scaled } else { plain }, ..common.attention };
        let attention = SharedRows::new(d, &name("attn"), dims, roles, source);
        source = attention.source().or(source);
        layers.push(Box::new(Layer {
            streams: common.streams,
            engram: engram.transpose()?,
            attention_site: HyperSite::new(d, &name("hc_attn"), common.streams),
            attention_norm: RmsNorm::new(d, &name("attn_norm"), common.dims.hidden, common.eps, 0.0),
            attention,
            mlp_site: HyperSite::new(d, &name("hc_ffn"), common.streams),
            mlp_norm: RmsNorm::new(d, &name("ffn_norm"), common.dims.hidden, common.eps, 0.0),
            mlp: common.moe(b, d, i, i < by_token),
        }));
    }
    Ok(Box::new(StreamDecoder {
        head: Head::new(d, "embed.weight", "head", common.dims.vocab, common.dims.hidden, common.tied),
        streams: common.streams,
        ropes,
        group_ropes,
        history,
        layers,
        end: StreamEnd::Carried,
        norm: Some(RmsNorm::new(d, "norm", common.dims.hidden, common.eps, 0.0)),
        dims: common.dims,
    }))
}
