//! Handles: what a `metrale_model *` and its kin really are.
//!
//! A handle is a number in a pointer's clothes and is never followed. It holds the kind of its object, the index of
//! a slot and the slot's generation, so a handle that is stale, freed twice, of another kind or simply invented is
//! found out and refused. The top bit is always set: no such address exists in user space, so a host that follows
//! one by mistake stops at once, and a garbage collector never takes it for a pointer of its own.
//!
//! Slots live in chunks that double in size and are never moved or returned, so a lookup takes no lock but the
//! slot's own, and two objects share neither a lock nor a cache line.

use std::ptr::without_provenance_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::{self, Result};
use crate::runtime::{self, Runtime};
use crate::{bail, ensure};

/// A C type and the object behind it.
pub(super) trait Opaque: Sized + 'static {
    /// The object that handles of this type stand for.
    type Object: Send + Sync + 'static;
    /// Distinct from every other type's; 1 to 15.
    const KIND: usize;
    /// Whether new objects are accepted when memory ran short.
    const KEPT_WHEN_SHORT: bool = Self::KIND == 1;
    /// What messages call it.
    const NAME: &'static str;
    /// The objects of this type.
    fn table() -> &'static Table<Self::Object>;
}

/// Gives a C type its table.
macro_rules! opaque {
    ($c:ty, $object:ty, $kind:literal, $name:literal) => {
        impl $crate::abi::handle::Opaque for $c {
            type Object = $object;
            const KIND: usize = $kind;
            const NAME: &'static str = $name;
            fn table() -> &'static $crate::abi::handle::Table<$object> {
                static TABLE: $crate::abi::handle::Table<$object> = $crate::abi::handle::Table::new();
                &TABLE
            }
        }
    };
}
pub(super) use opaque;

/// Names of the kinds, for the message about a handle of the wrong one.
const KINDS: [&str; 10] = ["", "error", "model", "sequence", "sampler", "text stream", "grammar", "source", "load", "runtime"];

const KIND_BITS: u32 = 4;
const INDEX_BITS: u32 = if usize::BITS == 64 { 28 } else { 16 };
const GENERATION_BITS: u32 = usize::BITS - 1 - KIND_BITS - INDEX_BITS;
const TOP: usize = 1 << (usize::BITS - 1);

/// Slots in the first chunk; chunk `c` has `FIRST << c`.
const FIRST: usize = 64;
const CHUNKS: usize = INDEX_BITS as usize - 6;

/// All objects of one type.
pub(super) struct Table<T> {
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
    free: Mutex<Free>,
}

struct Free {
    /// Slots that held an object and may hold another.
    reusable: Vec<usize>,
    /// The lowest index never used.
    fresh: usize,
}

/// On a cache line of its own, so that threads with different objects do not slow each other.
#[repr(align(64))]
struct Slot<T>(Mutex<Cell<T>>);

struct Cell<T> {
    generation: usize,
    object: Option<Arc<T>>,
    /// Where the object was made, and where calls about it are at home.
    runtime: Option<Runtime>,
}

/// Where a handle points, once its parts are taken apart.
struct Place {
    index: usize,
    generation: usize,
}

/// A lock whose data is whole at every moment, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Table<T> {
    pub(super) const fn new() -> Table<T> {
        Table { chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::new(Free { reusable: Vec::new(), fresh: 0 }) }
    }

    fn slot(&self, index: usize) -> Option<&Slot<T>> {
        let (chunk, within) = locate(index);
        self.chunks.get(chunk)?.get()?.get(within)
    }

    /// Puts an object into a free slot.
    fn insert(&self, object: Arc<T>) -> Result<Place> {
        let runtime = runtime::current();
        // The table outlives every runtime.
        let _outside = runtime::outside();
        let mut free = lock(&self.free);
        let index = match free.reusable.last() {
            Some(&index) => index,
            None => {
                let index = free.fresh;
                ensure!(locate(index).0 < CHUNKS, LimitExceeded, "{index} objects of one kind exist; no more can");
                // Room to give the slot back is made now, so that a free never needs memory.
                let room = index + 1 - free.reusable.len();
                error::reserve(&mut free.reusable, room, "the table of handles")?;
                self.grow(locate(index).0)?;
                index
            }
        };
        let Some(slot) = self.slot(index) else { bail!(Internal, "handle slot {index} does not exist") };
        if free.reusable.pop().is_none() {
            free.fresh += 1;
        }
        let mut cell = lock(&slot.0);
        cell.object = Some(object);
        cell.runtime = runtime;
        Ok(Place { index, generation: cell.generation })
    }

    fn grow(&self, chunk: usize) -> Result<()> {
        let Some(place) = self.chunks.get(chunk) else { bail!(Internal, "handle chunk {chunk} does not exist") };
        if place.get().is_none() {
            let size = FIRST << chunk;
            let mut slots = error::vec_with_capacity(size, "table of handles")?;
            slots.resize_with(size, || Slot(Mutex::new(Cell { generation: 0, object: None, runtime: None })));
            // Only the holder of `free` comes here, so nobody can have been faster.
            let _ = place.set(slots.into_boxed_slice());
        }
        Ok(())
    }

    fn get(&self, place: Place) -> Option<Arc<T>> {
        let cell = lock(&self.slot(place.index)?.0);
        if cell.generation != place.generation {
            return None;
        }
        let object = cell.object.clone()?;
        runtime::adopt(&cell.runtime);
        Some(object)
    }

    /// All objects of a runtime. Those made or removed meanwhile may be missed.
    fn of(&self, runtime: &Runtime) -> Result<Vec<Arc<T>>> {
        let fresh = lock(&self.free).fresh;
        let mut found = Vec::new();
        for index in 0..fresh {
            let Some(slot) = self.slot(index) else { continue };
            error::reserve(&mut found, 1, "a list of objects")?;
            let cell = lock(&slot.0);
            if cell.runtime.as_ref() == Some(runtime) {
                found.extend(cell.object.clone());
            }
        }
        Ok(found)
    }

    /// Takes the object out and makes every handle to it stale.
    fn remove(&self, place: Place) -> Option<Arc<T>> {
        let mut cell = lock(&self.slot(place.index)?.0);
        if cell.generation != place.generation {
            return None;
        }
        let object = cell.object.take()?;
        let _runtime = cell.runtime.take();
        cell.generation += 1;
        // A slot that has used up its generations is retired: no handle ever comes to life again.
        let retired = cell.generation >> GENERATION_BITS != 0;
        drop(cell);
        if !retired {
            lock(&self.free).reusable.push(place.index);
        }
        Some(object)
    }
}

/// Chunk and place within it.
fn locate(index: usize) -> (usize, usize) {
    let shifted = index + FIRST;
    let chunk = (shifted.ilog2() - FIRST.ilog2()) as usize;
    (chunk, shifted - (FIRST << chunk))
}

/// Registers an object. The handle must be freed once.
pub(super) fn insert<O: Opaque>(object: Arc<O::Object>) -> Result<*mut O> {
    // What was built with the last memory there is would keep it. Errors are small, and needed just then.
    ensure!(O::KEPT_WHEN_SHORT || !runtime::ran_short(), OutOfMemory, "memory ran out while the {} was made", O::NAME);
    let place = O::table().insert(object)?;
    let number = TOP | place.generation << (KIND_BITS + INDEX_BITS) | place.index << KIND_BITS | O::KIND;
    Ok(without_provenance_mut(number))
}

/// The object behind a handle; it stays alive while the result does, whoever frees the handle meanwhile.
pub(super) fn get<O: Opaque>(handle: *const O) -> Result<Arc<O::Object>> {
    let place = place(handle)?;
    match O::table().get(place) {
        Some(object) => Ok(object),
        None => bail!(InvalidHandle, "the {} handle was freed or never existed", O::NAME),
    }
}

/// Forgets a handle and returns its object, if there is one.
pub(super) fn remove<O: Opaque>(handle: *const O) -> Option<Arc<O::Object>> {
    O::table().remove(place(handle).ok()?)
}

/// The objects of this type that belong to a runtime.
pub(super) fn all_of<O: Opaque>(runtime: &Runtime) -> Result<Vec<Arc<O::Object>>> {
    O::table().of(runtime)
}

fn place<O: Opaque>(handle: *const O) -> Result<Place> {
    let number = handle.addr();
    ensure!(number != 0, InvalidHandle, "the {} handle is NULL", O::NAME);
    ensure!(number & TOP != 0, InvalidHandle, "{number:#x} is not a {} handle, nor any other", O::NAME);
    let kind = number & ((1 << KIND_BITS) - 1);
    if kind != O::KIND {
        match KINDS.get(kind) {
            Some(other) if !other.is_empty() => bail!(InvalidHandle, "this is a {other} handle, a {} is expected", O::NAME),
            _ => bail!(InvalidHandle, "{number:#x} is not a {} handle, nor any other", O::NAME),
        }
    }
    let index = number >> KIND_BITS & ((1 << INDEX_BITS) - 1);
    let generation = (number & !TOP) >> (KIND_BITS + INDEX_BITS);
    Ok(Place { index, generation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    struct Cat;
    struct Dog;
    opaque!(Cat, String, 2, "model");
    opaque!(Dog, u64, 3, "sequence");

    fn refused<O: Opaque>(handle: *const O) -> bool {
        get(handle).err().map(|e| e.kind()) == Some(Kind::InvalidHandle)
    }

    #[test]
    fn handles_live_until_they_are_freed_once() {
        let a = insert::<Cat>(Arc::new("a".into())).unwrap();
        let b = insert::<Cat>(Arc::new("b".into())).unwrap();
        assert_eq!((get(a).unwrap().as_str(), get(b).unwrap().as_str()), ("a", "b"));
        let held = get(a).unwrap();
        assert!(remove(a).is_some());
        assert!(refused(a));
        assert!(remove(a).is_none());
        assert_eq!(held.as_str(), "a");
        let c = insert::<Cat>(Arc::new("c".into())).unwrap();
        assert_ne!(a, c);
        assert!(refused(a));
        assert_eq!(get(c).unwrap().as_str(), "c");
        assert!(remove(b).is_some() && remove(c).is_some());
    }

    #[test]
    fn other_kinds_and_inventions_are_refused() {
        let dog = insert::<Dog>(Arc::new(1)).unwrap();
        let message = get(dog.cast::<Cat>()).unwrap_err();
        assert!(message.message().contains("sequence handle, a model is expected"), "{message}");
        assert!(remove(dog.cast::<Cat>()).is_none());
        let local = 5u64;
        for number in [0, 1, 8, usize::MAX, usize::MAX - 15, TOP, TOP | 2, TOP >> 1, (&raw const local).addr(), dog.addr() ^ 1 << 40] {
            assert!(refused::<Dog>(without_provenance_mut(number)), "{number:#x}");
        }
        assert_eq!(*get(dog).unwrap(), 1);
        assert!(remove(dog).is_some());
    }

    #[test]
    fn every_index_has_one_place() {
        let (mut chunk, mut within) = (0, 0);
        for index in 0..100_000 {
            assert_eq!(locate(index), (chunk, within));
            within += 1;
            if within == FIRST << chunk {
                (chunk, within) = (chunk + 1, 0);
            }
        }
        // The chunks hold no index that the bits of a handle do not.
        assert_eq!(locate((1 << INDEX_BITS) - FIRST).0, CHUNKS);
    }

    #[test]
    fn threads_see_only_their_own() {
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                scope.spawn(move || {
                    for round in 0..500 {
                        let mine = thread * 1000 + round;
                        let handles: Vec<_> = (0..20).map(|_| insert::<Dog>(Arc::new(mine)).unwrap()).collect();
                        assert!(handles.iter().all(|&h| *get(h).unwrap() == mine));
                        assert!(handles.iter().all(|&h| remove(h).as_deref() == Some(&mine)));
                        assert!(handles.iter().all(|&h| refused(h)));
                    }
                });
            }
        });
    }
}
