//! LongCat-Flash-Lite: LongCat-Flash whose embeddings are means of the word's and of rows that hashes of the last tokens choose.

use super::longcat_flash;
use crate::circuit::Tape;
use crate::error::Result;
use crate::layers::{Config, Linear};
use crate::model::{Build, Entry, Model};
use crate::ops::{KvType, Lookup, NgramHash, NgramRows, NgramTable, RecordWrite, Records, TokenIds, Value, WeightId};
use crate::weights::Declarations;
use crate::{bail, ensure};

/// Tables with the products their rows pass.
struct NgramEmbedding {
    history: Records,
    hash: NgramHash,
    tables: Vec<NgramTable>,
    weights: Vec<(WeightId, Linear)>,
}

impl Entry for NgramEmbedding {
    fn record(&self, t: &mut Tape<'_>, mut x: Value) -> Value {
        let tokens = t.op(TokenIds { y: Value::NONE });
        t.record(RecordWrite { x: tokens, records: self.history });
        let (hash, tables) = (self.hash.clone(), self.tables.clone());
        let ids = t.op(NgramRows { history: self.history, hash, tables, y: Value::NONE });
        for (column, (table, project)) in self.weights.iter().enumerate() {
            let row = t.op(Lookup { ids, column, count: 1, table: *table, y: Value::NONE });
            let row = project.record(t, row);
            x = t.add(x, row);
        }
        t.scale(x, 1.0 / (self.weights.len() + 1) as f32)
    }
}

/// Most tokens a hash reads, and most tables for each length.
const MOST: usize = 64;

/// End-of-text tokens: one, or a list.
fn ends(c: &Config<'_>) -> Vec<i32> {
    let ids = c.get("eos_token_id").map(|v| v.as_array().cloned().unwrap_or_else(|| vec![v.clone()])).unwrap_or_default();
    ids.iter().filter_map(|v| v.as_i64().and_then(|v| i32::try_from(v).ok())).collect()
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let mut decoder = longcat_flash::decoder(c, b, d)?;
    let (hidden, vocab) = (decoder.dims.hidden, decoder.dims.vocab);
    let (ratio, longest, split) = (c.usize("ngram_vocab_size_ratio")?, c.usize("emb_neighbor_num")?, c.usize("emb_split_num")?);
    ensure!(
        (2..=MOST).contains(&longest) && split <= MOST,
        Unsupported,
        "config.json: emb_neighbor_num {longest}, emb_split_num {split}; 2 to {MOST} and 1 to {MOST} are possible"
    );
    let count = split * (longest - 1);
    ensure!(hidden.is_multiple_of(count), Mismatch, "config.json: hidden_size {hidden} does not split into {count} n-gram tables");
    let width = hidden / count;
    let base = (ratio as u64).saturating_mul(vocab as u64);
    let rows = |i: usize| u32::try_from(base.saturating_add(2 * i as u64 + 1)).ok();
    let tables: Option<Vec<_>> = (0..count).map(|i| Some(NgramTable { rows: rows(i)?, offset: 0, tokens: i / split + 2 })).collect();
    let Some(tables) = tables else {
        bail!(Unsupported, "config.json: ngram_vocab_size_ratio {ratio} makes tables of {base} rows; below 2^32 are possible");
    };
    let weights = tables
        .iter()
        .enumerate()
        .map(|(i, table)| {
            let name = |part: &str| format!("model.ngram_embeddings.{part}.{i}");
            let rows = d.rows(&format!("{}.weight", name("embedders")), table.rows as usize, width);
            (rows, Linear::new(d, &name("post_projs"), hidden, width, false))
        })
        .collect();
    let history = Records { state: d.kv(Records::spec(1, 1, KvType::F32)), width: 1, every: 1, dtype: KvType::F32 };
    decoder.entry =
        Some(Box::new(NgramEmbedding { history, hash: NgramHash::Polynomial { base: vocab as u64, ends: ends(c) }, tables, weights }));
    Ok(Box::new(decoder))
}
