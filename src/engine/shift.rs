//! Taking tokens out of the middle: what follows them moves to lower positions with its keys turned back to there.
//!
//! Later tokens were computed while the removed ones could be seen, and stay as they were computed. So the result is that of
//! StreamingLLM (Xiao et al., 2023): attention over the tokens that are left, at their new positions, and not what a fresh run over them
//! would give, except where a model has one layer. A key of position `p` moves to `p - count` by the difference of two angles, each
//! rounded as [`crate::ops::RopeTable`] rounds it, so it meets a fresh key to within the rounding of one rotation; a cache of 16
//! or 8 bits rounds the moved key once more.

use super::load::Engine;
use super::prepare::Prepared;
use super::sequence::Sequence;
use crate::backend::cpu::simd::table;
use crate::cache::LayerPages;
use crate::circuit::Circuit;
use crate::ensure;
use crate::error::{Error, Kind, Result, vec_filled, vec_with_capacity};
use crate::ops::{Attention, AttentionParts, CacheWrite, KvSpec, PAGE, Port, Rope, RopeStyle, RopeTable, Value, WeightId};
use std::ops::Range;

/// How the keys of one kind of pages follow their position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Keys {
    /// Not at all.
    Fixed,
    /// By rotation with these frequencies.
    Turned(WeightId, RopeStyle),
}

impl Prepared {
    /// How keys move, by kind of pages, or why something of the model's past does not.
    fn keys(&self) -> Result<Vec<Keys>> {
        let no = |what: String| Err(Error::new(Kind::Unsupported, format!("tokens cannot be taken out of the middle: {what}")));
        if let Some(slot) = self.declarations.slots.first() {
            return no(format!("{} is recurrent state, which holds all tokens at once", slot.name));
        }
        if self.model.encoder().is_some() {
            return no("the model translates, and its positions are part of what it reads".into());
        }
        let mut circuit = self.circuit(false)?;
        let mut keys = vec![None; self.declarations.kv.len()];
        let producers = producers(&mut circuit);
        for node in &circuit.nodes {
            let place = node.layer.map_or_else(String::new, |layer| format!("layer {layer}: "));
            if node.op.name() == "sinusoid" {
                return no("positions are part of the embeddings".into());
            }
            let any = node.op.as_any();
            if let Some(write) = any.downcast_ref::<CacheWrite>() {
                match turning(&circuit, &producers, write.k) {
                    Ok(turning) => keys[write.state.0 as usize] = Some(turning),
                    Err(op) => return no(format!("{place}keys come out of {op}, which is no rotation by position")),
                }
            } else if !node.op.states().is_empty() && !any.is::<Attention>() && !any.is::<AttentionParts>() {
                return no(format!(
                    "{place}{} keeps or reads latent, compressed or hashed rows, which stand at their positions",
                    node.op.name()
                ));
            }
        }
        let missing = || Error::new(Kind::Internal, "pages that nothing is written to");
        keys.into_iter().map(|keys| keys.ok_or_else(missing)).collect()
    }
}

/// The node that computes each value.
fn producers(circuit: &mut Circuit) -> Vec<Option<usize>> {
    let mut producers = vec![None; circuit.values.len()];
    for (index, node) in circuit.nodes.iter_mut().enumerate() {
        for (_, value) in node.op.ports().into_iter().filter(|(port, _)| *port == Port::Out) {
            producers[value.0 as usize] = Some(index);
        }
    }
    producers
}

/// How keys `k` were made: by a rotation last, or by a product and perhaps a norm without any.
fn turning(circuit: &Circuit, producers: &[Option<usize>], k: Value) -> Result<Keys, &'static str> {
    let find = |value: Value| producers[circuit.root(value).0 as usize].map(|index| &circuit.nodes[index]);
    let Some(mut node) = find(k) else { return Err("nowhere") };
    if let Some(rope) = node.op.as_any().downcast_ref::<Rope>() {
        let table = find(rope.table).and_then(|table| table.op.as_any().downcast_ref::<RopeTable>());
        return table.map(|table| Keys::Turned(table.frequencies, rope.style)).ok_or("a table");
    }
    if let Some(norm) = node.op.as_any().downcast_ref::<crate::ops::Norm>() {
        node = find(norm.x).ok_or("nowhere")?;
    }
    if node.op.name() == "linear" { Ok(Keys::Fixed) } else { Err(node.op.name()) }
}

impl Engine {
    fn keys(&self) -> Result<&[Keys]> {
        self.keys.get_or_init(|| self.prepared.keys()).as_ref().map(Vec::as_slice).map_err(Clone::clone)
    }
}

impl Sequence {
    /// Takes out `count` tokens from `from` on; later ones move to lower positions. The row of logits stays the one that was computed,
    /// unless nothing follows: then it is [`Sequence::truncate`]. Marks past `from` end. On error nothing changed.
    pub fn shift(&mut self, from: usize, count: usize) -> Result<()> {
        let len = self.len();
        ensure!(
            from.checked_add(count).is_some_and(|end| end <= len),
            InvalidArgument,
            "tokens {from} .. {from} + {count} are not all there; the sequence holds {len}"
        );
        if count == 0 {
            return Ok(());
        }
        if from + count == len {
            return self.truncate(from);
        }
        let engine = self.engine().clone();
        let keys = engine.keys()?;
        self.reserve_between(from, len)?;
        let mut mover = Mover::new(&engine, keys)?;
        // Pages on a device are copied here and back, as a whole: nothing is changed before all is known.
        let first = from / PAGE;
        let mut copies = self.pages.iter().map(|pages| copied(pages, first..len.div_ceil(PAGE))).collect::<Result<Vec<_>>>()?;
        for position in from + count..len {
            mover.turn(&engine, position, position - count);
            for (kind, (pages, copies)) in self.pages.iter_mut().zip(&mut copies).enumerate() {
                let (source, target) = (position / PAGE, (position - count) / PAGE);
                mover.read(kind, pages.bytes(source).unwrap_or_else(|| &copies[source - first]), position % PAGE);
                let page = pages.bytes_mut(target).unwrap_or_else(|| &mut copies[target - first]);
                mover.write(kind, page, (position - count) % PAGE);
            }
        }
        for (pages, copies) in self.pages.iter_mut().zip(&copies) {
            for (index, bytes) in copies.iter().enumerate().take((len - count).div_ceil(PAGE).saturating_sub(first)) {
                pages.write_page(first + index, bytes)?;
            }
        }
        self.drop_middle(from, count);
        Ok(())
    }
}

/// Copies of pages that live on a device; nothing of others.
fn copied(pages: &LayerPages, range: Range<usize>) -> Result<Vec<Vec<u8>>> {
    let mut copies = Vec::new();
    for index in range {
        if pages.bytes(index).is_some() {
            break;
        }
        let mut bytes = Vec::new();
        pages.append_page(index, &mut bytes)?;
        copies.push(bytes);
    }
    Ok(copies)
}

/// Moves one position after the other.
struct Mover<'a> {
    keys: &'a [Keys],
    specs: &'a [KvSpec],
    /// Cosine and sine of the angle to turn by, for each distinct set of frequencies.
    tables: Vec<(WeightId, Vec<(f64, f64)>)>,
    /// Keys of a position, all heads.
    key: Vec<f32>,
    /// Bytes of its values, and of keys that do not turn.
    bytes: Vec<u8>,
}

impl<'a> Mover<'a> {
    fn new(engine: &'a Engine, keys: &'a [Keys]) -> Result<Mover<'a>> {
        let specs = &engine.prepared.declarations.kv;
        let mut tables: Vec<(WeightId, Vec<(f64, f64)>)> = vec_with_capacity(keys.len(), "tables of angles")?;
        for (key, spec) in keys.iter().zip(specs) {
            let Keys::Turned(id, _) = *key else { continue };
            let pairs = engine.weights()[id.0 as usize].vector().len();
            ensure!(2 * pairs <= spec.key_dim, Internal, "{pairs} rotary pairs in keys of {}", spec.key_dim);
            if tables.iter().all(|table| table.0 != id) {
                tables.push((id, vec_filled(pairs, (1.0, 0.0), "a table of angles")?));
            }
        }
        let most = |size: fn(&KvSpec) -> usize| specs.iter().map(size).max().unwrap_or(0);
        let key = vec_filled(most(|s| s.heads * s.key_dim), 0.0, "the keys of a position")?;
        let bytes = vec_with_capacity(most(|s| s.heads * s.place_bytes()), "the values of a position")?;
        Ok(Mover { keys, specs, tables, key, bytes })
    }

    /// Sets the angles for a move.
    fn turn(&mut self, engine: &Engine, from: usize, to: usize) {
        for (id, table) in &mut self.tables {
            for (f, turn) in engine.weights()[id.0 as usize].vector().iter().zip(table) {
                let (sin, cos) = (f64::from(to as f32 * f) - f64::from(from as f32 * f)).sin_cos();
                *turn = (cos, sin);
            }
        }
    }

    fn read(&mut self, kind: usize, page: &[u8], at: usize) {
        let (spec, turned) = (&self.specs[kind], self.keys[kind]);
        self.bytes.clear();
        for head in 0..spec.heads {
            spec.value_runs(head, at).for_each(|run| self.bytes.extend_from_slice(&page[run]));
            if let Keys::Turned(id, style) = turned {
                let key = &mut self.key[head * spec.key_dim..][..spec.key_dim];
                spec.read_key(page, head, at, key);
                let table = self.tables.iter().find(|table| table.0 == id).expect("new() made a table for each");
                rotate(key, &table.1, style);
            } else {
                spec.key_runs(head, at).for_each(|run| self.bytes.extend_from_slice(&page[run]));
            }
        }
    }

    fn write(&self, kind: usize, page: &mut [u8], at: usize) {
        let (spec, turned) = (&self.specs[kind], self.keys[kind]);
        let mut bytes = &self.bytes[..];
        let mut put = |page: &mut [u8], run: Range<usize>| {
            let (taken, rest) = bytes.split_at(run.len());
            page[run].copy_from_slice(taken);
            bytes = rest;
        };
        for head in 0..spec.heads {
            spec.value_runs(head, at).for_each(|run| put(page, run));
            match turned {
                Keys::Turned(..) => spec.write_key(table(), page, head, at, &self.key[head * spec.key_dim..][..spec.key_dim]),
                Keys::Fixed => spec.key_runs(head, at).for_each(|run| put(page, run)),
            }
        }
    }
}

/// Turns a head's key.
fn rotate(key: &mut [f32], table: &[(f64, f64)], style: RopeStyle) {
    for (i, (cos, sin)) in table.iter().enumerate() {
        let (a, b) = match style {
            RopeStyle::Halves => (i, i + table.len()),
            RopeStyle::Pairs => (2 * i, 2 * i + 1),
        };
        let (x, y) = (f64::from(key[a]), f64::from(key[b]));
        key[a] = (x * cos - y * sin) as f32;
        key[b] = (y * cos + x * sin) as f32;
    }
}
