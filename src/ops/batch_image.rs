//! A batch as kernels read it: the struct `Batch` of `kernels/common/frame.cuh` and its arrays, as one run of bytes that is kept in two places.
//!
//! Every array and every list of pages has its place, whatever the batch, so that a captured graph finds it, and so that one run's batch is
//! mostly the one before it: the host writes what is new into its own copy and into a list, and the device takes up these words alone.
#![allow(unsafe_code)] // argument structs

use super::Batch;
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::ensure;
use crate::error::{Result, vec_with_capacity};
use std::ops::Range;

/// Takes up what is new: kernels/batch.cu.
pub const BATCH: Kernel = Kernel { file: "batch", name: "batch" };
/// Makes the batch of the step that follows.
pub const ADVANCE: Kernel = Kernel { file: "batch", name: "advance" };

/// How [`BATCH`] and [`ADVANCE`] are launched.
pub fn batch_grid() -> Grid {
    Grid::new([1, 1, 1], 256)
}

/// Addresses: the list of what is new, and the batch.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BatchArgs {
    /// The list.
    pub news: u64,
    /// The batch.
    pub to: u64,
}

// SAFETY: the struct of kernels/batch.cu.
unsafe impl Args for BatchArgs {}

/// Addresses, the last two as [`BatchPlaces`] says.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AdvanceArgs {
    /// The batch.
    pub batch: u64,
    /// The token that was found for each segment.
    pub found: u64,
    /// Where the states after the next step go.
    pub next: u64,
    /// Which of two places what is found goes to.
    pub turn: u64,
}

// SAFETY: the struct of kernels/batch.cu.
unsafe impl Args for AdvanceArgs {}

/// Arrays start on a multiple of this.
const ALIGN: usize = 16;
/// Bytes of `Batch`, and behind it which of two places what is found goes to: the first, unless the device has made the batch itself.
const TURN: usize = 80;
const HEAD: usize = TURN + 4;
/// Most words that are listed one by one; a slice of a prompt may have more.
const MOST_NEWS: usize = 8192;

/// Where everything lies, for batches of at most so many rows and segments.
#[derive(Clone, Copy, Debug)]
pub struct BatchPlaces {
    segments: usize,
    kv_states: usize,
    /// Most pages of a list.
    pages: usize,
    /// First byte of each array, of the lists of pages, and behind them.
    starts: [usize; 11],
}

impl BatchPlaces {
    /// For batches of at most `rows` rows and `segments` segments, with `kv_states` key/value states of at most `pages` pages.
    pub fn new(rows: usize, segments: usize, kv_states: usize, pages: usize) -> BatchPlaces {
        let lists = segments.saturating_mul(kv_states);
        let tables = [lists.saturating_mul(8), 8 * segments, 8 * segments, 8 * segments, lists.saturating_mul(pages).saturating_mul(8)];
        let sizes = [4 * rows, 4 * rows, 4 * rows, 4 * segments, 16 * segments].into_iter().chain(tables);
        let mut starts = [HEAD.next_multiple_of(ALIGN); 11];
        for (i, size) in sizes.enumerate() {
            starts[i + 1] = starts[i].saturating_add(size).checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        }
        BatchPlaces { segments, kv_states, pages, starts }
    }

    /// Bytes of a batch.
    pub fn bytes(&self) -> usize {
        self.starts[10]
    }

    /// From the start of a batch: where each segment's state after the step that follows goes, and which of two places what is found goes to.
    pub fn ahead(&self) -> [u64; 2] {
        [self.starts[8], TURN].map(|at| at as u64)
    }

    /// Bytes of the longest list of what is new.
    pub const NEWS_BYTES: usize = 16 + 8 * MOST_NEWS;
    /// Bytes of the list that a step copies in any case: as much as is new in a few dozen sequences.
    pub const FEW_NEWS_BYTES: usize = 4096;
}

/// The host's copy of a batch on a device: which of it is known there.
pub struct BatchImage {
    places: BatchPlaces,
    /// Where it lies on the device.
    base: u64,
    /// Names of the page lists that are there, by segment.
    stamps: Vec<u64>,
    /// Whether the device has what the host's copy says.
    known: bool,
}

impl BatchImage {
    /// None yet, to lie at `base`.
    pub fn new(places: BatchPlaces, base: u64) -> Result<BatchImage> {
        Ok(BatchImage { places, base, stamps: vec_with_capacity(places.segments, "a batch for the device")?, known: false })
    }

    /// Forgets what the device has: the next batch is all new.
    pub fn forget(&mut self) {
        self.known = false;
    }

    /// Writes a batch into the host's copy `image`, and into `list` what of it is new.
    pub fn write(&mut self, batch: &Batch, image: &mut [u8], list: &mut [u8]) -> Result<News> {
        self.write_turn(batch, 0, image, list)
    }

    /// Writes into the host's copy what the device has made of its batch itself, `steps` times ([`ADVANCE`]): `batch`. `list` then means nothing.
    pub fn follow(&mut self, batch: &Batch, steps: usize, image: &mut [u8], list: &mut [u8]) -> Result<()> {
        self.write_turn(batch, steps as u32 % 2, image, list).map(|_| ())
    }

    fn write_turn(&mut self, batch: &Batch, turn: u32, image: &mut [u8], list: &mut [u8]) -> Result<News> {
        let BatchPlaces { segments, kv_states, pages, starts } = self.places;
        ensure!(batch.segments.len() <= segments, Internal, "a batch of {} segments, there is room for {segments}", batch.segments.len());
        let mut writer = Writer { image, list, count: 0, first: usize::MAX, end: 0 };
        // Until all is written, nothing is.
        let known = std::mem::take(&mut self.known);
        if !known {
            self.stamps.clear();
            self.stamps.resize(segments, 0);
            let at = |i: usize| self.base + starts[i] as u64;
            writer.put(16, [at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)].into_iter().map(u64::to_ne_bytes));
            let lists = (0..segments * kv_states).map(|list| at(9) + (8 * list * pages) as u64);
            writer.put(starts[5], lists.map(u64::to_ne_bytes));
        }
        let numbers = [batch.tokens.len(), batch.segments.len(), kv_states, 0];
        writer.put(0, numbers.into_iter().map(|n| (n as u32).to_ne_bytes()));
        writer.put(TURN, std::iter::once(turn.to_ne_bytes()));
        writer.put(starts[0], batch.tokens.iter().map(|token| token.to_ne_bytes()));
        writer.put(starts[1], batch.positions.iter().map(|position| position.to_ne_bytes()));
        let rows = batch.segments.iter().enumerate().flat_map(|(index, s)| s.rows.clone().map(move |_| index as u32));
        writer.put(starts[2], rows.map(u32::to_ne_bytes));
        writer.put(starts[3], batch.segments.iter().map(|s| (s.rows.end as u32).wrapping_sub(1).to_ne_bytes()));
        let words = batch.segments.iter().enumerate().flat_map(|(i, s)| [s.rows.start, s.rows.len(), s.position, batch.source(i)]);
        writer.put(starts[4], words.map(|word| (word as u32).to_ne_bytes()));
        writer.put(starts[6], batch.states.iter().map(|state| state.read_address().to_ne_bytes()));
        writer.put(starts[7], batch.states.iter().map(|state| state.write_address().to_ne_bytes()));
        writer.put(starts[8], batch.states.iter().map(|state| state.next_address().to_ne_bytes()));
        for segment in 0..batch.segments.len() {
            let stamp = batch.stamps.get(segment).copied().unwrap_or(0);
            if stamp != 0 && self.stamps[segment] == stamp {
                continue;
            }
            self.stamps[segment] = stamp;
            for list in segment * kv_states..(segment + 1) * kv_states {
                let Some(list_pages) = batch.kv.get(list).map(|list| list.pages()) else { continue };
                ensure!(list_pages.len() <= pages, Internal, "a list of {} pages, a sequence's context has {pages}", list_pages.len());
                writer.put(starts[9] + 8 * list * pages, list_pages.iter().map(|page| (page.addr() as u64).to_ne_bytes()));
            }
        }
        let Writer { count, first, end, .. } = writer;
        // What a device holds that was told nothing is unknown everywhere, also where this batch has no rows.
        let news = match count {
            _ if !known => News::Copy(0..self.places.bytes()),
            0 => News::None,
            1..=MOST_NEWS => News::Listed(count),
            _ => News::Copy(first..end),
        };
        let listed = if let News::Listed(count) = news { count } else { 0 };
        list[..4].copy_from_slice(&(listed as u32).to_ne_bytes());
        self.known = true;
        Ok(news)
    }
}

/// What is new in a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum News {
    /// Nothing.
    None,
    /// So many words, which are listed.
    Listed(usize),
    /// More than can be listed, all of it in these bytes; the list is empty.
    Copy(Range<usize>),
}

impl News {
    /// Bytes of the list, whose words are read two by two.
    pub fn list_bytes(&self) -> usize {
        16 + if let News::Listed(count) = self { 8 * count.next_multiple_of(2) } else { 0 }
    }
}

struct Writer<'a> {
    image: &'a mut [u8],
    list: &'a mut [u8],
    count: usize,
    /// First byte that is new, and the one behind the last.
    first: usize,
    end: usize,
}

impl Writer<'_> {
    /// Writes values from `start` on.
    fn put<const N: usize>(&mut self, start: usize, values: impl Iterator<Item = [u8; N]>) {
        let Writer { image, list, count, first, end } = self;
        let room = image[start..].as_chunks_mut::<N>().0;
        for (index, (place, value)) in room.iter_mut().zip(values).enumerate() {
            if *place == value {
                continue;
            }
            *place = value;
            let at = start + index * N;
            (*first, *end) = ((*first).min(at), (*end).max(at + N));
            for (word, bytes) in value.as_chunks::<4>().0.iter().enumerate() {
                if *count < MOST_NEWS {
                    let pair = [((at / 4 + word) as u32).to_ne_bytes(), *bytes];
                    list[16 + 8 * *count..][..8].copy_from_slice(pair.as_flattened());
                }
                *count += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KvPages, Segment};
    use super::*;

    /// What the kernel does.
    fn take_up(news: &News, image: &[u8], list: &[u8], to: &mut [u8]) {
        let words: Vec<usize> = list.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        for pair in words[4..].chunks(2).take(words[0]) {
            to[4 * pair[0]..][..4].copy_from_slice(&(pair[1] as u32).to_ne_bytes());
        }
        match news {
            News::Copy(range) => to[range.clone()].copy_from_slice(&image[range.clone()]),
            News::Listed(count) => assert_eq!(*count, words[0]),
            News::None => assert_eq!(words[0], 0),
        }
    }

    struct Seen<'a>(&'a [u8]);

    impl Seen<'_> {
        fn word(&self, at: usize) -> u32 {
            u32::from_ne_bytes(self.0[at..at + 4].try_into().unwrap())
        }

        fn long(&self, at: usize) -> usize {
            u64::from_ne_bytes(self.0[at..at + 8].try_into().unwrap()) as usize
        }

        /// Compares with the batch, following the addresses.
        fn is(&self, batch: &Batch) {
            assert_eq!([self.word(0), self.word(4), self.word(8)], [batch.tokens.len(), batch.segments.len(), 1].map(|n| n as u32));
            let [tokens, positions, segment_of, last_row, segment, pages] = [16, 24, 32, 40, 48, 56].map(|at| self.long(at));
            for (i, s) in batch.segments.iter().enumerate() {
                for row in s.rows.clone() {
                    assert_eq!(self.word(tokens + 4 * row) as i32, batch.tokens[row]);
                    assert_eq!(self.word(positions + 4 * row), batch.positions[row]);
                    assert_eq!(self.word(segment_of + 4 * row), i as u32);
                }
                assert_eq!(self.word(last_row + 4 * i) as usize, s.rows.end - 1);
                let words = [0, 4, 8].map(|at| self.word(segment + 16 * i + at) as usize);
                assert_eq!(words, [s.rows.start, s.rows.len(), s.position]);
                for (n, page) in batch.kv[i].pages().iter().enumerate() {
                    assert_eq!(self.long(self.long(pages + 8 * i) + 8 * n), page.addr());
                }
            }
        }
    }

    #[test]
    fn the_device_has_each_batch_though_it_takes_up_what_is_new_alone() {
        let page = |n: usize| std::ptr::without_provenance_mut::<u8>(16 * n);
        let mut lists = [vec![page(1), page(2)], vec![page(3)]];
        let mut batch = Batch { tokens: vec![7, 8, 9], positions: vec![4, 5, 0], kv_states: 1, stamps: vec![1, 2], ..Batch::default() };
        batch.segments = vec![Segment { rows: 0..2, position: 4 }, Segment { rows: 2..3, position: 0 }];
        batch.kv = lists.iter().map(|l| KvPages::new(l)).collect();
        let places = BatchPlaces::new(8, 4, 1, 3);
        let mut image = BatchImage::new(places, 0).unwrap();
        let (mut host, mut list, mut device) = (vec![0; places.bytes()], vec![0; BatchPlaces::NEWS_BYTES], vec![0xff; places.bytes()]);
        let mut run = |image: &mut BatchImage, batch: &Batch, lost: bool| {
            if lost {
                device.fill(0xff);
                image.forget();
            }
            let news = image.write(batch, &mut host, &mut list).unwrap();
            take_up(&news, &host, &list, &mut device);
            Seen(&device).is(batch);
            news
        };
        run(&mut image, &batch, false);
        // A step of one token each: tokens, positions, segments.
        (batch.tokens, batch.positions) = (vec![3, 4], vec![6, 1]);
        batch.segments = vec![Segment { rows: 0..1, position: 6 }, Segment { rows: 1..2, position: 1 }];
        run(&mut image, &batch, false);
        // More rows than before, of zeros: what the device had there was never told.
        let (tokens, positions, segments) = (batch.tokens.clone(), batch.positions.clone(), batch.segments.clone());
        (batch.tokens, batch.positions) = (vec![0; 5], vec![6, 7, 8, 9, 1]);
        batch.segments = vec![Segment { rows: 0..4, position: 6 }, Segment { rows: 4..5, position: 1 }];
        run(&mut image, &batch, false);
        (batch.tokens, batch.positions, batch.segments) = (tokens, positions, segments);
        run(&mut image, &batch, false);
        // The same again is nothing; another position is two words; a new page is an address, in a list of another name.
        assert_eq!(run(&mut image, &batch, false), News::None);
        (batch.positions[1], batch.segments[1].position) = (2, 2);
        assert_eq!(run(&mut image, &batch, false), News::Listed(2));
        lists[0].push(page(9));
        (batch.kv[0], batch.stamps[0]) = (KvPages::new(&lists[0]), 3);
        assert_eq!(run(&mut image, &batch, false), News::Listed(2));
        // Lists without a name are looked at each time; a device that lost what it had is told everything.
        lists[1][0] = page(5);
        (batch.kv[1], batch.stamps[1]) = (KvPages::new(&lists[1]), 0);
        assert_eq!(run(&mut image, &batch, false), News::Listed(2));
        assert!(matches!(run(&mut image, &batch, true), News::Copy(_)));
        // A list that is too long is refused, and what was written by then is not relied on.
        lists[1].extend([page(1); 3]);
        batch.kv[1] = KvPages::new(&lists[1]);
        assert!(image.write(&batch, &mut vec![0; places.bytes()], &mut vec![0; BatchPlaces::NEWS_BYTES]).is_err());
        batch.kv[1] = KvPages::new(&lists[1][..1]);
        assert!(matches!(run(&mut image, &batch, false), News::Copy(_)));
    }

    #[test]
    fn more_than_can_be_listed_is_copied() {
        let rows = MOST_NEWS;
        let pages = [std::ptr::without_provenance_mut::<u8>(16)];
        let mut batch = Batch { tokens: vec![7; rows], positions: vec![1; rows], kv_states: 1, ..Batch::default() };
        batch.segments = vec![Segment { rows: 0..rows, position: 0 }];
        batch.kv = vec![KvPages::new(&pages)];
        let places = BatchPlaces::new(rows, 1, 1, 1);
        let mut image = BatchImage::new(places, 0).unwrap();
        let (mut host, mut list, mut device) = (vec![0; places.bytes()], vec![0; BatchPlaces::NEWS_BYTES], vec![0xff; places.bytes()]);
        let news = image.write(&batch, &mut host, &mut list).unwrap();
        assert!(matches!(news, News::Copy(_)));
        take_up(&news, &host, &list, &mut device);
        Seen(&device).is(&batch);
    }
}
