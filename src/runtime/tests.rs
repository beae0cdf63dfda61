//! Runtimes: bytes are counted, limits kept, and every piece goes back to whoever gave it.

use super::*;
use std::alloc::Layout;
use std::sync::Mutex;

/// A host that counts, and refuses from a number of bytes on.
#[derive(Default)]
struct Host {
    live: AtomicUsize,
    pieces: AtomicUsize,
    refuse: AtomicUsize,
}

unsafe extern "C" fn alloc(user: *mut c_void, size: usize, align: usize) -> *mut c_void {
    // SAFETY: the tests hand over a `Host` that outlives its runtime.
    let host = unsafe { &*user.cast::<Host>() };
    let refuse = host.refuse.load(Ordering::Relaxed);
    if refuse > 0 && size >= refuse {
        return std::ptr::null_mut();
    }
    host.live.fetch_add(size, Ordering::Relaxed);
    host.pieces.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the size is not 0.
    unsafe { System.alloc(Layout::from_size_align(size, align).unwrap()).cast() }
}

unsafe extern "C" fn free(user: *mut c_void, pointer: *mut c_void, size: usize, align: usize) {
    // SAFETY: as above.
    let host = unsafe { &*user.cast::<Host>() };
    host.live.fetch_sub(size, Ordering::Relaxed);
    host.pieces.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: `alloc` gave it.
    unsafe { System.dealloc(pointer.cast(), Layout::from_size_align(size, align).unwrap()) }
}

fn runtime(host: &Host, cap: u64) -> Runtime {
    let hooks = Hooks { alloc, free, user: std::ptr::from_ref(host).cast_mut().cast() };
    Runtime::new(&Settings { hooks: Some(hooks), cap }).unwrap()
}

impl Host {
    fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed) as u64
    }
}

#[cfg(feature = "reserve")]
#[test]
fn memory_goes_back_to_where_it_came_from_and_keeps_its_runtime() {
    let host = Host::default();
    let lent = runtime(&host, 0);
    let own = host.live();
    let scope = enter(Some(lent.clone()));
    let mut text = String::from("from the host");
    let zeroed = std::hint::black_box(vec![0u64; 1000]);
    assert!(zeroed.iter().all(|&n| n == 0));
    drop(scope);
    assert!(host.live() > own + 8000);
    assert_eq!(lent.usage().live, host.live());
    // Outside, it grows into the system's memory, and the host's comes back.
    text.push_str(&"x".repeat(1000));
    drop(zeroed);
    assert_eq!((host.live(), text.len()), (own, 1013));
    let scope = enter(Some(lent.clone()));
    let kept = Box::new([7u8; 100]);
    drop((scope, lent));
    assert!(host.live() > own);
    std::thread::spawn(move || drop(kept)).join().unwrap();
    assert_eq!((host.live(), host.pieces.load(Ordering::Relaxed)), (0, 0));
}

#[cfg(feature = "reserve")]
#[test]
fn what_is_refused_fails_or_comes_from_the_reserve() {
    let host = Host::default();
    let lent = runtime(&host, 100_000);
    let call = Call::begin();
    adopt(&Some(lent.clone()));
    assert!(crate::error::vec_with_capacity::<u8>(200_000, "test").is_err());
    assert!(!ran_short());
    let over = vec![1u8; 200_000];
    assert!(ran_short() && reserve::owns(over.as_ptr()) && over.iter().all(|&b| b == 1));
    drop(over);
    drop(call);
    assert!(!ran_short());
    host.refuse.store(50, Ordering::Relaxed);
    let _call = Call::begin();
    adopt(&Some(lent.clone()));
    let small = Box::new(1u64);
    assert!(!ran_short() && !reserve::owns((&raw const *small).cast()));
    let mut grown = vec![3u8; 20];
    grown.extend([4; 100]);
    assert!(ran_short() && reserve::owns(grown.as_ptr()) && grown[..20] == [3; 20] && grown[20..] == [4; 100]);
}

#[test]
fn the_limit_holds_and_the_peak_is_kept() {
    let host = Host::default();
    let lent = runtime(&host, 10_000);
    let own = lent.usage().live;
    let _scope = enter(Some(lent.clone()));
    let charge = Charge::new(Class::Cache, 6000, 6000).unwrap();
    assert!(Charge::new(Class::Cache, 6000, 6000).is_none());
    let usage = lent.usage();
    assert_eq!((usage.live, usage.peak, usage.cap, usage.cache, usage.weights), (own + 6000, own + 6000, 10_000, 6000, 0));
    drop(charge);
    let usage = lent.usage();
    assert_eq!((usage.live, usage.peak, usage.cache), (own, own + 6000, 0));
    assert!(Runtime::new(&Settings { hooks: None, cap: 1 }).is_none());
}

#[cfg(feature = "reserve")]
#[test]
fn pieces_of_the_reserve_are_apart_aligned_and_used_again() {
    reserve::prepare();
    let layouts =
        [(1, 1), (100, 64), (70_000, 4096), (16, 16), (5 << 20, 8)].map(|(size, align)| Layout::from_size_align(size, align).unwrap());
    let pieces = layouts.map(reserve::take);
    for (i, (piece, layout)) in pieces.iter().zip(layouts).enumerate() {
        assert!(reserve::owns(*piece) && piece.addr().is_multiple_of(layout.align()));
        // SAFETY: the piece has that many bytes.
        unsafe { piece.write_bytes(i as u8 + 1, layout.size()) };
    }
    for (i, (piece, layout)) in pieces.iter().zip(layouts).enumerate() {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(*piece, layout.size()) };
        assert!(bytes.iter().all(|&b| b == i as u8 + 1), "piece {i} was written to by another");
    }
    reserve::give_back(pieces[2], layouts[2]);
    assert_eq!(reserve::take(layouts[2]), pieces[2]);
    assert!(reserve::take(Layout::from_size_align(1, 8192).unwrap()).is_null());
    assert!(reserve::take(Layout::from_size_align((1 << 30) + 1, 1).unwrap()).is_null());
    for (piece, layout) in pieces.into_iter().zip(layouts) {
        reserve::give_back(piece, layout);
    }
}

#[test]
fn records_are_whole_and_not_made_for_nobody() {
    static HEARD: Mutex<Vec<(u32, i32, String)>> = Mutex::new(Vec::new());
    unsafe extern "C" fn write(_: *mut c_void, level: u32, status: i32, text: *const u8, len: usize) {
        // SAFETY: the contract of the function.
        let text = unsafe { std::slice::from_raw_parts(text, len) };
        note(Level::Error, 0, || -> String { unreachable!("nothing is recorded of what the sink does") });
        HEARD.lock().unwrap().push((level, status, String::from_utf8(text.to_vec()).unwrap()));
    }
    let host = Host::default();
    let lent = runtime(&host, 0);
    let _scope = enter(Some(lent.clone()));
    note(Level::Error, -1, || -> String { unreachable!("nobody listens") });
    lent.log_to(Some(Sink { write, user: std::ptr::null_mut(), level: Level::Warning }));
    note(Level::Error, -1, || "an error");
    note(Level::Info, 0, || -> String { unreachable!("not at this level") });
    assert_eq!(*HEARD.lock().unwrap(), [(1, -1, "an error".to_string())]);
    lent.log_to(None);
    note(Level::Error, -1, || -> String { unreachable!("nobody listens any more") });
}
