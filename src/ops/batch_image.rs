//! A batch as kernels read it: the struct `Batch` of `kernels/common/frame.cuh` and its arrays, as one run of bytes for one copy.
//!
//! The arrays lie at places that depend on the most rows and segments alone, so that a captured graph finds them in every batch. Lists of pages
//! come last, where their lengths matter to nobody.
#![allow(unsafe_code)] // structs as bytes

use super::Batch;

/// `Batch`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Head {
    rows: u32,
    segments: u32,
    kv_states: u32,
    spare: u32,
    tokens: u64,
    positions: u64,
    segment_of: u64,
    last_row: u64,
    segment: u64,
    pages: u64,
    state_read: u64,
    state_write: u64,
}

/// Arrays start on a multiple of this.
const ALIGN: usize = 16;

/// Where the arrays lie for batches of at most so many rows and segments.
#[derive(Clone, Copy, Debug)]
pub struct BatchPlaces {
    rows: usize,
    segments: usize,
    kv_states: usize,
}

impl BatchPlaces {
    /// For batches of at most `rows` rows and `segments` segments, with `kv_states` key/value states.
    pub fn new(rows: usize, segments: usize, kv_states: usize) -> BatchPlaces {
        BatchPlaces { rows, segments, kv_states }
    }

    /// First byte of each array, and of the lists of pages.
    fn starts(&self) -> [usize; 9] {
        let (rows, segments) = (self.rows, self.segments);
        let sizes = [4 * rows, 4 * rows, 4 * rows, 4 * segments, 16 * segments, 8 * segments * self.kv_states, 8 * segments, 8 * segments];
        let mut starts = [size_of::<Head>().next_multiple_of(ALIGN); 9];
        for (i, size) in sizes.into_iter().enumerate() {
            starts[i + 1] = (starts[i] + size).next_multiple_of(ALIGN);
        }
        starts
    }

    /// Bytes of a batch that is `pages` pages long in all lists together.
    pub fn bytes(&self, pages: usize) -> usize {
        self.starts()[8] + 8 * pages
    }

    /// Bytes that a batch takes.
    pub fn bytes_of(&self, batch: &Batch) -> usize {
        self.bytes(batch.kv.iter().map(|list| list.pages().len()).sum())
    }

    /// Writes a batch that will lie at `base`; `out` has room for it. The batch's pointers are addresses of the device.
    pub fn write(&self, batch: &Batch, base: u64, out: &mut [u8]) {
        let starts = self.starts();
        let at = |i: usize| base + starts[i] as u64;
        let head = Head {
            rows: batch.tokens.len() as u32,
            segments: batch.segments.len() as u32,
            kv_states: self.kv_states as u32,
            spare: 0,
            tokens: at(0),
            positions: at(1),
            segment_of: at(2),
            last_row: at(3),
            segment: at(4),
            pages: at(5),
            state_read: at(6),
            state_write: at(7),
        };
        put(out, 0, std::slice::from_ref(&head));
        put(out, starts[0], &batch.tokens);
        put(out, starts[1], &batch.positions);
        for (index, segment) in batch.segments.iter().enumerate() {
            let number = index as u32;
            segment.rows.clone().for_each(|row| put(out, starts[2] + 4 * row, &[number]));
            put(out, starts[3] + 4 * index, &[(segment.rows.end as u32).wrapping_sub(1)]);
            let words = [segment.rows.start, segment.rows.len(), segment.position, batch.source(index)];
            put(out, starts[4] + 16 * index, &words.map(|word| word as u32));
        }
        for (index, state) in batch.states.iter().enumerate() {
            put(out, starts[6] + 8 * index, &[state.read_address()]);
            put(out, starts[7] + 8 * index, &[state.write_address()]);
        }
        let mut next = starts[8];
        for (index, list) in batch.kv.iter().enumerate() {
            put(out, starts[5] + 8 * index, &[base + next as u64]);
            put(out, next, list.pages());
            next += 8 * list.pages().len();
        }
    }
}

/// Writes numbers, or addresses, at a place.
fn put<T: Copy>(out: &mut [u8], at: usize, values: &[T]) {
    let bytes = size_of_val(values);
    // SAFETY: what is written here are numbers and structs of numbers without padding, and addresses that are kept as numbers.
    let from = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
    out[at..at + bytes].copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::super::{KvPages, Segment};
    use super::*;

    #[test]
    fn every_array_is_where_the_head_says() {
        let lists =
            [vec![16 as *mut u8, 32 as *mut u8], vec![48 as *mut u8]].map(|l| l.into_iter().map(|p: *mut u8| p).collect::<Vec<_>>());
        let mut batch = Batch { tokens: vec![7, 8, 9], positions: vec![4, 5, 0], kv_states: 1, ..Batch::default() };
        batch.segments = vec![Segment { rows: 0..2, position: 4 }, Segment { rows: 2..3, position: 0 }];
        batch.kv = lists.iter().map(|l| KvPages::new(l)).collect();
        let places = BatchPlaces::new(8, 4, 1);
        let mut bytes = vec![0; places.bytes_of(&batch)];
        places.write(&batch, 0, &mut bytes);
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        assert_eq!([word(0), word(4), word(8)], [3, 2, 1]);
        let [tokens, positions, segment_of, last_row, segment, pages] = [16, 24, 32, 40, 48, 56].map(long);
        assert_eq!([word(tokens), word(tokens + 8), word(positions + 4)], [7, 9, 5]);
        assert_eq!([word(segment_of + 4), word(segment_of + 8), word(last_row), word(last_row + 4)], [0, 1, 1, 2]);
        assert_eq!([word(segment), word(segment + 4), word(segment + 8), word(segment + 16)], [0, 2, 4, 2]);
        assert_eq!([long(long(pages)), long(long(pages) + 8), long(long(pages + 8))], [16, 32, 48]);
    }
}
