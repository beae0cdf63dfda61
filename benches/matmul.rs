//! Products against the ceilings of this machine, measured in the same run: `cargo bench --bench matmul [-- filter]`.
//!
//! One row is bound by memory (bytes of weights / read bandwidth), many rows by arithmetic (2 * rows * n * k / peak). Data are random;
//! weights for the one-row rates are larger than the caches. Rates are medians, and the machine may be shared: read the fractions.

#![allow(unsafe_code)] // Shares the output among threads, and measures ceilings with intrinsics.

#[path = "support/ceilings.rs"]
mod ceilings;

use metrale::backend::cpu::{Activations, Buffer, CodeRow, Epilogue, Layout, Packed, Pool, Q8Block, table};
use std::sync::atomic::{AtomicUsize, Ordering};

const REPEATS: usize = 15;

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let table = table();
    println!("table {}", table.name());
    for threads in [1, 2] {
        let pool = Pool::new(threads).expect("threads start");
        let barrier = median(pool.count(), || {
            pool.run(&|w| (0..1000).for_each(|i| _ = w.meet(i))).expect("no panic");
        }) / 1000.0;
        let fork = median(pool.count(), || (0..100).for_each(|_| pool.run(&|_| {}).expect("no panic"))) / 100.0;
        let read = read_bandwidth(&pool);
        let (fma, dot) = (peak(&pool, ceilings::fma), peak(&pool, ceilings::dot));
        println!(
            "{threads} thread(s): read {read:.1} GB/s, f32 FMA {fma:.0} GFLOP/s, int8 dot {dot:.0} Gop/s, barrier {:.0} ns, fork-join {:.0} ns",
            barrier * 1e9,
            fork * 1e9
        );
        for (name, layout, pairs) in layouts() {
            if !name.contains(&filter) {
                continue;
            }
            one_row(&pool, (name, layout, pairs), read, 256 << 20, "from memory");
            one_row(&pool, (name, layout, pairs), read, 512 << 10, "from the second cache");
            for rows in [4, 16, 64, 256] {
                let peak = if layout.is_integer() { dot } else { fma };
                many_rows(&pool, (name, layout, pairs), rows, peak);
            }
        }
    }
}

/// Name, layout, and whether activations are rounded to bfloat16.
type Form = (&'static str, Layout, bool);

fn layouts() -> Vec<Form> {
    let plain = [
        ("f32", Layout::F32),
        ("bf16", Layout::Bf16),
        ("f8", Layout::F8),
        ("f16", Layout::F16),
        ("i8/32", Layout::I8 { block: 32, min: false }),
        ("i8/16", Layout::I8 { block: 16, min: false }),
        ("i4/32", Layout::I4 { block: 32, min: false }),
        ("i4/32min", Layout::I4 { block: 32, min: true }),
        ("i4table", Layout::I4Table { block: 32, table: [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12] }),
    ];
    let pairs = [("bf16pairs", Layout::Bf16, true), ("f8pairs", Layout::F8, true)];
    let pairs = pairs.into_iter().filter(|_| table().has_pairs());
    plain.into_iter().map(|(name, layout)| (name, layout, false)).chain(pairs).collect()
}

fn one_row(pool: &Pool, (name, layout, pairs): Form, read: f64, bytes: usize, place: &str) {
    let k = 4096;
    let n = bytes / Packed::bytes(layout, 16, k).expect("fits") * 16;
    let w = weights(layout, n, k);
    let acts = Input::new(1, k);
    let mut y = vec![0.0f32; n];
    let seconds = run(pool, &w, &acts, pairs, 1, &mut y);
    let rate = w.data().len() as f64 / seconds / 1e9;
    println!("  {name:9} 1 row    {rate:8.1} GB/s    {:3.0} % of read {place}", 100.0 * rate / read);
}

fn many_rows(pool: &Pool, (name, layout, pairs): Form, rows: usize, peak: f64) {
    let n = 2048;
    let k: usize = std::env::var("K").map_or(2048, |k| k.parse().unwrap());
    let w = weights(layout, n, k);
    let acts = Input::new(rows, k);
    let mut y = vec![0.0f32; rows * n];
    let seconds = run(pool, &w, &acts, pairs, rows, &mut y);
    let rate = 2.0 * (rows * n * k) as f64 / seconds / 1e9;
    println!("  {name:9} {rows:3} rows {rate:8.1} G(FL)OP/s {:3.0} % of peak", 100.0 * rate / peak);
}

fn run(pool: &Pool, w: &Packed, input: &Input, pairs: bool, rows: usize, y: &mut [f32]) -> f64 {
    let acts = input.acts(w.layout(), pairs);
    let y = Shared(y.as_mut_ptr());
    let grain = if rows == 1 { 16 } else { 8 };
    median(pool.count(), || {
        let counter = AtomicUsize::new(0);
        pool.run(&|worker| {
            let y = &y;
            worker.each(&counter, w.panels(), grain, |panels| {
                // SAFETY: each panel is handed out once, and its columns of `y` with it.
                unsafe { table().matmul(w, panels, &acts, 0..rows, &Epilogue::default(), y.0, w.rows()) }
            });
        })
        .expect("no panic");
    })
}

struct Shared(*mut f32);
// SAFETY: threads write disjoint columns.
unsafe impl Sync for Shared {}

struct Input {
    x: Vec<f32>,
    blocks: Vec<Q8Block>,
    pairs: Vec<u32>,
    k: usize,
}

impl Input {
    fn new(rows: usize, k: usize) -> Input {
        let mut random = Random(3);
        let x: Vec<f32> = (0..rows * k).map(|_| random.float()).collect();
        let mut blocks = vec![Q8Block::ZERO; rows * k / 32];
        table().quantize_row(&x, &mut blocks);
        let mut pairs = vec![0; if table().has_pairs() { rows * k / 2 } else { 0 }];
        pairs.chunks_mut(k / 2).zip(x.chunks(k)).for_each(|(pairs, x)| table().round_row(x, pairs));
        Input { x, blocks, pairs, k }
    }
    fn acts(&self, layout: Layout, pairs: bool) -> Activations<'_> {
        match layout.is_integer() {
            _ if pairs => Activations::Pairs { x: &self.pairs, stride: self.k / 2 },
            true => Activations::Q8 { blocks: &self.blocks, stride: self.k / 32 },
            false => Activations::F32 { x: &self.x, stride: self.k },
        }
    }
}

fn weights(layout: Layout, n: usize, k: usize) -> Packed {
    let mut random = Random(11);
    let mut w = Packed::new(layout, n, k).expect("memory");
    let floats: Vec<f32> = (0..k).map(|_| random.float()).collect();
    let codes: Vec<i8> = (0..k).map(|_| (random.next() % if layout.has_min() { 16 } else { 8 }) as i8).collect();
    let factors: Vec<f32> = (0..k / layout.block()).map(|_| random.float()).collect();
    // One random panel, turned a little for each next one: filling all of it by the slow road would take minutes.
    let mut first = Vec::new();
    for (i, panel) in w.panels_mut().enumerate() {
        if i == 0 {
            if layout.is_integer() {
                let min = if layout.has_min() { &factors[..] } else { &[] };
                layout.fill_codes(k, panel, &[CodeRow { codes: &codes, scale: &factors, min, gain: 1.0 }; 16]).expect("fits");
            } else {
                layout.fill_f32(k, panel, &[&floats[..]; 16]).expect("fits");
            }
            first = panel.to_vec();
        } else {
            panel.copy_from_slice(&first);
        }
    }
    w
}

fn read_bandwidth(pool: &Pool) -> f64 {
    let mut buffer = Buffer::new(512 << 20, "bandwidth").expect("memory");
    let mut random = Random(5);
    buffer.as_mut_slice_of::<u32>().iter_mut().for_each(|v| *v = random.next() as u32);
    let bytes = buffer.as_slice();
    let sink = AtomicUsize::new(0);
    let seconds = median(pool.count(), || {
        let counter = AtomicUsize::new(0);
        pool.run(&|w| {
            w.each(&counter, bytes.len(), 1 << 20, |r| {
                sink.fetch_add(ceilings::read(&bytes[r]) as usize, Ordering::Relaxed);
            });
        })
        .expect("no panic");
    });
    bytes.len() as f64 / seconds / 1e9
}

fn peak(pool: &Pool, one: fn(usize) -> f64) -> f64 {
    let operations = AtomicUsize::new(0);
    let seconds = median(pool.count(), || {
        operations.store(0, Ordering::Relaxed);
        pool.run(&|_| add(&operations, one(500_000) as usize)).expect("no panic");
    });
    operations.into_inner() as f64 / seconds / 1e9
}

fn add(counter: &AtomicUsize, n: usize) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Processor time of all threads of this process: on a shared machine the clock on the wall measures the neighbours.
fn processor_seconds() -> f64 {
    // SAFETY: plain memory that the call fills in.
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: `t` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn median(threads: usize, mut f: impl FnMut()) -> f64 {
    f();
    let mut times: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let start = processor_seconds();
            f();
            (processor_seconds() - start) / threads as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPEATS / 2]
}

struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
    fn float(&mut self) -> f32 {
        (self.next() % 65_536) as f32 / 32_768.0 - 1.0
    }
}
