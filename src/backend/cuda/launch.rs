//! Launches: a kernel by name, a grid, and one struct of arguments.
#![allow(unsafe_code)] // argument structs are handed to the driver as bytes

use crate::error::Result;

/// A kernel: the file under `kernels/` (without `.cu`) and the function in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Kernel {
    /// File.
    pub file: &'static str,
    /// Function; unique over all files.
    pub name: &'static str,
}

/// How a launch covers its work.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks in each direction; none may be 0.
    pub blocks: [u32; 3],
    /// Threads of a block, in one dimension.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Whether it may begin before the kernels queued earlier have ended (programmatic dependent launch): it waits for them itself, by
    /// `wait_for_before`, ahead of the first look at what they write.
    pub early: bool,
}

impl Grid {
    /// `blocks` blocks of `threads`, without dynamic shared memory.
    pub fn new(blocks: [usize; 3], threads: usize) -> Grid {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Grid { blocks: blocks.map(narrow), threads: narrow(threads), shared: 0, early: false }
    }

    /// For kernels that walk over columns and begin early: a block takes four columns a thread of one row; of few rows, whose time is that of one
    /// thread, a column.
    pub fn columns(rows: usize, width: usize) -> Grid {
        let each = if rows <= Grid::FEW_ROWS { 1 } else { 4 };
        let threads = width.div_ceil(4).next_multiple_of(32).clamp(32, 256);
        Grid::new([rows, width.div_ceil(each * threads), 1], threads).early()
    }

    /// Rows that do not fill a device by themselves.
    pub const FEW_ROWS: usize = 4;

    /// For kernels that sum a row of up to eight elements a thread and begin early: of few rows, several blocks sum the same one and each writes
    /// its share.
    pub fn sums(rows: usize, width: usize) -> Grid {
        let threads = width.div_ceil(8).next_multiple_of(32).clamp(32, 1024);
        let shares = if rows <= Grid::FEW_ROWS { width.div_ceil(threads).min(8) } else { 1 };
        Grid::new([rows, shares, 1], threads).early()
    }

    /// For kernels with a thread for each column of each row, in blocks of at most `threads`.
    pub fn cells(rows: usize, width: usize, threads: usize) -> Grid {
        let threads = width.next_multiple_of(32).clamp(32, threads);
        Grid::new([rows, width.div_ceil(threads), 1], threads)
    }

    /// With dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Grid {
        Grid { shared: u32::try_from(bytes).unwrap_or(u32::MAX), ..self }
    }

    /// That may begin early: see [`Grid::early`].
    pub fn early(self) -> Grid {
        Grid { early: true, ..self }
    }
}

/// The one argument of a kernel.
///
/// # Safety
/// `#[repr(C)]` without padding bytes that matter, and field for field the struct of the kernels that it is launched with; every address in it
/// is one of the device's.
pub unsafe trait Args: Copy {}

/// Where launches go, in order.
pub trait Launch {
    /// Queues a kernel.
    fn launch(&self, kernel: Kernel, grid: Grid, args: &[u8]) -> Result<()>;
    /// Queues a copy to the device; the bytes may be anything afterwards.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;
    /// Multiprocessors of the device.
    fn processors(&self) -> usize;
    /// Whether the device takes kernels with products of groups of warps (compute capability 9.0).
    fn has_groups(&self) -> bool;
    /// Bytes of shared memory that a block may have; every device has these.
    fn shared(&self) -> usize {
        99 << 10
    }
}

/// The bytes of an argument struct.
pub fn bytes_of<A: Args>(args: &A) -> &[u8] {
    // SAFETY: a `Copy` struct read as its bytes, only to be copied (padding is never looked at).
    unsafe { std::slice::from_raw_parts((&raw const *args).cast(), size_of::<A>()) }
}
