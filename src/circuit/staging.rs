//! Bytes on their way to a device: a ring of buffers in pinned memory, which a pool's workers fill piece by piece. Whoever fills the last piece of
//! a buffer sends it, while the others are in the next one; so no worker waits for another but where the bus is what all wait for.
#![allow(unsafe_code)] // pieces of one buffer for several threads

use crate::backend::cpu::arena;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::{lock, wait_until};
use crate::backend::cuda::{Device, Event, Pinned};
use crate::ensure;
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The ring.
#[derive(Default)]
pub struct Staging {
    buffers: Vec<Buffer>,
    /// Turns of all runs so far: a turn fills a buffer.
    turns: usize,
}

struct Buffer {
    bytes: Pinned,
    /// Of the copy that used it last.
    end: Event,
    /// The turn that may write it, counted from 1, and its pieces that are still to be filled.
    open: AtomicUsize,
    left: AtomicUsize,
}

/// What is to be filled: bytes by pieces, so many to a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// Bytes in all.
    pub total: usize,
    /// Of a piece; the last one has what is left.
    pub each: usize,
    /// Pieces of one buffer.
    pub together: usize,
}

impl Pieces {
    /// `total` bytes, as many pieces to a buffer as fit.
    pub fn new(total: usize, each: usize) -> Pieces {
        Pieces { total, each, together: (Staging::BYTES / each.max(1)).max(1) }
    }

    fn count(&self) -> usize {
        self.total.div_ceil(self.each)
    }

    fn turns(&self) -> usize {
        self.count().div_ceil(self.together)
    }

    fn of(&self, turn: usize) -> Range<usize> {
        turn * self.together..self.count().min((turn + 1) * self.together)
    }

    /// Where a turn's bytes begin and end.
    fn bytes(&self, turn: usize) -> Range<usize> {
        let Range { start, end } = self.of(turn);
        start * self.each..self.total.min(end * self.each)
    }
}

/// Queues the copy of a full buffer that begins with these bytes of the whole, and the event behind it.
pub type Sender<'a> = dyn FnMut(Range<usize>, &Pinned, &Event) -> Result<()> + Send + 'a;

impl Staging {
    /// Bytes of a buffer: a copy of so many hardly notices where it begins and ends.
    pub const BYTES: usize = 8 << 20;
    /// Buffers: one is filled, one is copied, and the others are what the bus lives on from one weight to the next.
    pub const BUFFERS: usize = 8;

    /// Fills pieces with `fill`, by their numbers, each by one of the pool's workers with an `S` of its own, and has full buffers sent in their order;
    /// `filled` is told which bytes of the whole a full one took. Returns when all are sent; the copies may be under way. A failure ends it as soon
    /// as all have noticed.
    pub fn run<S: Default>(
        &mut self,
        device: &Arc<Device>,
        pool: &Pool,
        pieces: Pieces,
        fill: impl Fn(&mut S, usize, &mut [u8]) -> Result<()> + Sync,
        filled: impl Fn(Range<usize>) + Sync,
        send: &mut Sender<'_>,
    ) -> Result<()> {
        let together = pieces.each.saturating_mul(pieces.together);
        ensure!((1..=Staging::BYTES).contains(&together), Internal, "pieces of {together} bytes together, a buffer has {}", Staging::BYTES);
        self.grow(device, pool, Staging::BUFFERS.min(self.turns + pieces.turns()))?;
        let first = self.turns;
        self.turns += pieces.turns();
        self.buffers.iter_mut().for_each(|buffer| *buffer.open.get_mut() = 0);
        let run = Run {
            buffers: &self.buffers,
            first,
            pieces,
            sent: AtomicUsize::new(0),
            sending: Mutex::new(send),
            has_failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        };
        let counter = AtomicUsize::new(0);
        let done = pool.run(&|worker| {
            let _whole = Whole(&run);
            let mut scratch = S::default();
            worker.each(&counter, pieces.count(), 1, |range| {
                for piece in range {
                    match run.piece(piece, |to| fill(&mut scratch, piece, to)) {
                        Ok(Some(all)) => filled(all),
                        Ok(None) => {}
                        Err(e) => run.fail(e),
                    }
                }
            });
        });
        match lock(&run.failure).take() {
            Some(e) => Err(e),
            None => done,
        }
    }
}

impl Staging {
    /// Makes buffers until there are so many. The system provides memory page by page, so all workers ask for it.
    fn grow(&mut self, device: &Arc<Device>, pool: &Pool, count: usize) -> Result<()> {
        const PIECE: usize = 2 << 20;
        let more = count.saturating_sub(self.buffers.len());
        let mut made = (0..more).map(|_| arena::Buffer::new(Staging::BYTES, WHAT)).collect::<Result<Vec<_>>>()?;
        let pieces: Vec<Mutex<&mut [u8]>> =
            made.iter_mut().flat_map(|bytes| bytes.as_mut_slice().chunks_mut(PIECE)).map(Mutex::new).collect();
        let counter = AtomicUsize::new(0);
        if more > 0 {
            pool.run(&|worker| worker.each(&counter, pieces.len(), 1, |range| pieces[range].iter().for_each(|piece| lock(piece).fill(0))))?;
        }
        drop(pieces);
        for bytes in made {
            // Where the system has no such memory pinned, the driver gives some.
            let bytes = Pinned::of(device, bytes, WHAT).or_else(|_| Pinned::new(device, Staging::BYTES, WHAT))?;
            self.buffers.push(Buffer { bytes, end: Event::new(device, false)?, open: AtomicUsize::new(0), left: AtomicUsize::new(0) });
        }
        Ok(())
    }
}

const WHAT: &str = "staging of weights";

struct Run<'a, 'b> {
    buffers: &'a [Buffer],
    /// Turns of all runs before.
    first: usize,
    pieces: Pieces,
    /// Turns that were sent.
    sent: AtomicUsize,
    sending: Mutex<&'a mut Sender<'b>>,
    has_failed: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Run<'_, '_> {
    fn buffer(&self, turn: usize) -> &Buffer {
        &self.buffers[(self.first + turn) % self.buffers.len()]
    }

    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    fn fail(&self, e: Error) {
        lock(&self.failure).get_or_insert(e);
        self.has_failed.store(true, Ordering::Release);
    }

    /// The bytes of a buffer, to whoever fills its last piece.
    fn piece(&self, piece: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Option<Range<usize>>> {
        let turn = piece / self.pieces.together;
        let (buffer, all) = (self.buffer(turn), self.pieces.of(turn));
        if piece == all.start {
            // What was in it must have left.
            let before = (turn + 1).saturating_sub(self.buffers.len());
            self.wait(|| self.sent.load(Ordering::Acquire) >= before);
            if self.has_failed() {
                return Ok(None);
            }
            buffer.end.wait()?;
            buffer.left.store(all.len(), Ordering::Relaxed);
            buffer.open.store(turn + 1, Ordering::Release);
        } else {
            self.wait(|| buffer.open.load(Ordering::Acquire) > turn);
        }
        if self.has_failed() {
            return Ok(None);
        }
        let at = (piece - all.start) * self.pieces.each;
        let bytes = self.pieces.each.min(self.pieces.bytes(turn).len() - at);
        let start = std::ptr::with_exposed_provenance_mut::<u8>(buffer.bytes.address() as usize);
        // SAFETY: inside of the buffer, since all pieces of a turn fit it. It is open for this turn: its last copy was waited for, the next one begins
        // when all pieces of the turn are full, and each piece is dealt out once.
        fill(unsafe { std::slice::from_raw_parts_mut(start.add(at), bytes) })?;
        if buffer.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return Ok(None);
        }
        self.send()?;
        Ok(Some(self.pieces.bytes(turn)))
    }

    /// Sends what is full and has its turn.
    fn send(&self) -> Result<()> {
        let mut send = lock(&self.sending);
        loop {
            let turn = self.sent.load(Ordering::Relaxed);
            let buffer = self.buffer(turn);
            let is_full = buffer.open.load(Ordering::Acquire) == turn + 1 && buffer.left.load(Ordering::Acquire) == 0;
            if turn == self.pieces.turns() || !is_full || self.has_failed() {
                return Ok(());
            }
            send(self.pieces.bytes(turn), &buffer.bytes, &buffer.end)?;
            self.sent.store(turn + 1, Ordering::Release);
        }
    }

    fn wait(&self, ready: impl Fn() -> bool) {
        wait_until(SPINS, || ready() || self.has_failed());
    }
}

/// Looks before yielding: some microseconds, a small part of a buffer's copy.
const SPINS: u32 = 200;

/// Whoever unwinds leaves a piece that nobody fills: the others must not wait for it.
struct Whole<'a, 'b, 'c>(&'a Run<'b, 'c>);

impl Drop for Whole<'_, '_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.has_failed.store(true, Ordering::Release);
        }
    }
}
