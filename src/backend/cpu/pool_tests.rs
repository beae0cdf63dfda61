//! The pool under every kind of worker: own threads, lent ones, the host's parallel_for, good and bad.

use super::super::attend;
use super::*;
use crate::error::Kind;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

fn exactly(threads: usize) -> Pool {
    Pool::of(Team::Crew(Arc::new(Crew::exactly(threads).unwrap())), threads.max(1))
}

fn host(f: impl Fn(usize, usize) + Send + Sync + 'static, threads: usize) -> Pool {
    struct Host<F>(F);
    impl<F: Fn(usize, usize) + Send + Sync> ParallelFor for Host<F> {
        fn call(&self, count: usize, ticket: usize) {
            (self.0)(count, ticket);
        }
    }
    Pool::of(Team::Host(Arc::new(Host(f))), threads)
}

fn add(counter: &AtomicUsize, n: usize) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// All bodies on the calling thread.
fn serial(count: usize, ticket: usize) {
    (0..count).for_each(|i| attend(ticket, i));
}

/// Every body on a thread of its own, the last ones late.
fn threaded(count: usize, ticket: usize) {
    std::thread::scope(|s| {
        for i in 0..count {
            s.spawn(move || {
                if i > 1 {
                    std::thread::sleep(Duration::from_micros(100 * i as u64));
                }
                attend(ticket, i);
            });
        }
    });
}

/// A pool of each kind, with a name.
fn kinds() -> Vec<(&'static str, Pool)> {
    vec![
        ("one", Pool::new(1).unwrap()),
        ("two", exactly(2)),
        ("five", exactly(5)),
        ("nobody is lent", Pool::of(Team::Crew(Arc::new(Crew::empty())), 4)),
        ("serial host", host(serial, 4)),
        ("host with threads", host(threaded, 4)),
        ("host backwards", host(|count, ticket| (0..count).rev().for_each(|i| attend(ticket, i)), 3)),
    ]
}

/// What a program does: sections whose pieces are dealt out, each reading what all pieces of the one before wrote. Every cell must
/// have been written exactly once in each section, whoever came when. `each` runs between pieces.
fn sections(pool: &Pool, rounds: usize, cells: usize, each: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<()> {
    let values: Vec<AtomicUsize> = (0..cells).map(|_| AtomicUsize::new(0)).collect();
    let counters: Vec<AtomicUsize> = (0..rounds).map(|_| AtomicUsize::new(0)).collect();
    let leaders = AtomicUsize::new(0);
    let bad = AtomicUsize::new(0);
    pool.run_from(0, &|w| {
        leaders.fetch_add(usize::from(w.is_leader()), Ordering::Relaxed);
        for round in w.start()..rounds {
            w.each(&counters[round], cells, 3, |range| {
                for i in range {
                    // The neighbour may have been written by anybody, in this section or the one before, never earlier.
                    let next = values[(i + 1) % cells].load(Ordering::Relaxed);
                    let old = values[i].fetch_add(1, Ordering::Relaxed);
                    bad.fetch_add(usize::from(old != round || !(round..=round + 1).contains(&next)), Ordering::Relaxed);
                }
                each(w);
            });
            if !w.meet(round + 1) {
                return;
            }
        }
    })?;
    assert_eq!(bad.into_inner(), 0);
    assert_eq!(leaders.into_inner(), 1);
    assert!(values.iter().all(|v| v.load(Ordering::Relaxed) == rounds));
    Ok(())
}

#[test]
fn every_piece_is_done_once_under_every_kind() {
    for (name, pool) in kinds() {
        for run in 0..50 {
            sections(&pool, 1 + run % 40, 7 + run, &|_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        // No section at all, and a run right after.
        pool.run(&|_| {}).unwrap();
        let total = AtomicUsize::new(0);
        let counter = AtomicUsize::new(0);
        pool.run(&|w| w.each(&counter, 100, 7, |r| add(&total, r.len()))).unwrap();
        assert_eq!(total.into_inner(), 100, "{name}");
    }
}

/// Pieces long enough that helpers do come.
#[test]
fn helpers_do_help() {
    for (name, pool, threads) in [("own", exactly(3), 3), ("host", host(threaded, 3), 3)] {
        let seen = Mutex::new(std::collections::HashSet::new());
        sections(&pool, 20, 12, &|_| {
            seen.lock().unwrap().insert(std::thread::current().id());
            std::thread::sleep(Duration::from_millis(1));
        })
        .unwrap();
        assert_eq!(seen.into_inner().unwrap().len(), threads, "{name}");
    }
}

#[test]
fn panics_are_errors_and_the_pool_lives_on() {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for (name, pool) in kinds() {
        for victim in [true, false] {
            for at in 0..4 {
                let hit = AtomicBool::new(false);
                let done = sections(&pool, 4, 9, &|w| {
                    if w.is_leader() == victim {
                        hit.store(true, Ordering::Relaxed);
                        panic!("victim {at}");
                    }
                    std::thread::yield_now();
                });
                match (done, hit.into_inner()) {
                    (Err(e), true) => {
                        assert_eq!(e.kind(), Kind::Internal, "{name}");
                        assert!(e.message().contains(&format!("victim {at}")), "{name}: {e}");
                    }
                    (Ok(()), false) => {}
                    (done, hit) => panic!("{name}: {done:?} after a panic: {hit}"),
                }
                sections(&pool, 3, 9, &|_| {}).unwrap();
            }
        }
        assert_eq!(pool.run(&|_| panic!("all")).unwrap_err().message(), "a computation panicked: all", "{name}");
        pool.run(&|_| assert!(catch_unwind(|| panic!("inner")).is_err())).unwrap();
    }
    std::panic::set_hook(quiet);
}

#[test]
fn a_run_inside_a_run_is_refused() {
    for (name, pool) in kinds() {
        let other = exactly(2);
        let (ok, busy) = (AtomicUsize::new(0), AtomicUsize::new(0));
        pool.run(&|_| {
            for p in [&pool, &other] {
                match p.run(&|_| {}) {
                    Err(e) if e.kind() == Kind::Busy && e.retry() => busy.fetch_add(1, Ordering::Relaxed),
                    _ => ok.fetch_add(1, Ordering::Relaxed),
                };
            }
        })
        .unwrap();
        assert_eq!(ok.into_inner(), 0, "{name}");
        assert!(busy.into_inner() >= 2);
        pool.run(&|_| {}).unwrap();
    }
}

/// A job system may do other work on the thread that waits.
#[test]
fn a_run_inside_of_parallel_for_is_refused_on_that_thread_only() {
    let other = Arc::new(exactly(2));
    let found: Arc<Mutex<Vec<Option<Kind>>>> = Arc::default();
    let pool = {
        let (other, found) = (Arc::clone(&other), Arc::clone(&found));
        host(
            move |count, ticket| {
                let here = other.run(&|_| {}).err().map(|e| e.kind());
                let there = std::thread::scope(|s| s.spawn(|| other.run(&|_| {}).err().map(|e| e.kind())).join().unwrap());
                found.lock().unwrap().extend([here, there]);
                serial(count, ticket);
            },
            2,
        )
    };
    pool.run(&|_| {}).unwrap();
    assert_eq!(*found.lock().unwrap(), [Some(Kind::Busy), None]);
    assert!(!inside());
}

#[test]
fn many_runs_from_many_threads_beside_each_other() {
    for pool in [exactly(3), host(threaded, 2), Pool::of(Team::Crew(Arc::new(Crew::empty())), 3)] {
        let runs = if matches!(pool.team, Team::Host(_)) { 40 } else { 1500 };
        std::thread::scope(|s| {
            // More leaders than posts.
            for leader in 0..12 {
                let pool = &pool;
                s.spawn(move || {
                    for run in 0..runs {
                        sections(pool, 1 + run % 5, 5 + leader, &|_| {}).unwrap();
                        if run % 500 == 0 {
                            std::thread::sleep(Duration::from_millis(1)); // Long enough for the helpers to fall asleep.
                        }
                    }
                });
            }
        });
    }
}

/// Runs until `stop`, while threads are lent and called away at every moment.
#[test]
fn lent_threads_come_late_and_go_early() {
    let crew = Arc::new(Crew::empty());
    let pool = Pool::of(Team::Crew(Arc::clone(&crew)), 4);
    let stop = AtomicBool::new(false);
    let lent = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    crew.lend().unwrap();
                    lent.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                crew.release();
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(400) {
            sections(&pool, 30, 20, &|_| {}).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        crew.end();
    });
    assert!(lent.into_inner() > 3, "threads came home more than once");
    // Whoever comes after the end goes home at once.
    crew.lend().unwrap();
    sections(&pool, 5, 5, &|_| {}).unwrap();
}

/// A lent thread helps a run that was there before it came, and returns in the middle of one when it is called away.
#[test]
fn a_lent_thread_helps_a_run_under_way_and_leaves_it() {
    if crate::backend::cpu::available_threads() < 2 {
        println!("SKIPPED: on one processor a lent thread sleeps");
        return;
    }
    let crew = Arc::new(Crew::empty());
    let pool = Pool::of(Team::Crew(Arc::clone(&crew)), 2);
    let (began, helped, home) = (AtomicBool::new(false), AtomicBool::new(false), (Mutex::new(false), Condvar::new()));
    std::thread::scope(|s| {
        s.spawn(|| {
            while !began.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            crew.lend().unwrap();
            *home.0.lock().unwrap() = true;
            home.1.notify_all();
        });
        let released = AtomicBool::new(false);
        sections(&pool, 200, 20, &|w| {
            began.store(true, Ordering::Relaxed);
            if !w.is_leader() {
                helped.store(true, Ordering::Relaxed);
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
            if helped.load(Ordering::Relaxed) && !released.swap(true, Ordering::Relaxed) {
                crew.release();
                // It comes home while this run goes on.
                let at_home = home.0.lock().unwrap();
                let waited = home.1.wait_timeout_while(at_home, Duration::from_secs(20), |home| !*home).unwrap();
                assert!(!waited.1.timed_out(), "the lent thread did not leave");
            }
        })
        .unwrap();
        crew.end();
    });
    assert!(helped.into_inner());
}

#[test]
fn a_computing_thread_cannot_be_lent() {
    let crew = Arc::new(Crew::empty());
    let pool = exactly(2);
    pool.run(&|_| assert_eq!(crew.lend().unwrap_err().kind(), Kind::Busy)).unwrap();
}

/// Each breach of the contract is an error that names it, the job is done or not begun, and the next run is none the worse.
#[test]
fn hosts_that_misbehave_get_errors() {
    let kept: Arc<Mutex<Vec<usize>>> = Arc::default();
    let late = {
        let kept = Arc::clone(&kept);
        move |count: usize, ticket: usize| {
            // Bodies of earlier runs, and tickets that never were.
            for old in kept.lock().unwrap().drain(..) {
                attend(old, 0);
                attend(old, usize::MAX);
            }
            [0, 1, ticket ^ 1 << 20, ticket + 16, usize::MAX].into_iter().for_each(|invented| attend(invented, 0));
            serial(count, ticket);
            kept.lock().unwrap().push(ticket);
        }
    };
    let pools: [(&str, Pool); 6] = [
        ("without having called body 0 of 3", host(|_, _| {}, 3)),
        ("without having called body 2 of 3", host(|_, ticket| (0..2).for_each(|i| attend(ticket, i)), 3)),
        ("called body 1 twice", host(|count, ticket| [0, 1, 1].into_iter().chain(2..count).for_each(|i| attend(ticket, i)), 3)),
        ("called body 7 of 3", host(|count, ticket| (0..count).chain([7]).for_each(|i| attend(ticket, i)), 3)),
        ("without having called body 1 of 2", host(|_, ticket| attend(ticket, 0), 2)),
        ("", host(late, 3)),
    ];
    for (text, pool) in &pools {
        for _ in 0..3 {
            let done = AtomicUsize::new(0);
            let ran = pool.run(&|w| add(&done, usize::from(w.is_leader())));
            match ran {
                Ok(()) => assert!(text.is_empty(), "{text}"),
                Err(e) => {
                    assert!(!text.is_empty() && e.message().contains(text), "{text:?}: {e}");
                    assert_eq!((e.kind(), e.name()), (Kind::InvalidArgument, Some("parallel_for")));
                }
            }
            assert!(done.into_inner() <= 1);
        }
    }
    attend(kept.lock().unwrap()[0], 0);
    assert!(!inside());
}

/// It returns while its bodies run: they are waited for, and it is told.
#[test]
fn a_parallel_for_that_returns_early_is_waited_for() {
    let threads: Arc<Mutex<Vec<std::thread::JoinHandle<()>>>> = Arc::default();
    let kept = Arc::clone(&threads);
    let (started, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let begun = Arc::clone(&started);
    let pool = host(
        move |count, ticket| {
            kept.lock().unwrap().extend((0..count).map(|i| std::thread::spawn(move || attend(ticket, i))));
            while !begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        },
        2,
    );
    let e = pool
        .run(&|w| {
            if w.is_leader() {
                started.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(30));
                over.store(true, Ordering::Relaxed);
            }
        })
        .unwrap_err();
    assert!(over.load(Ordering::Relaxed), "the run was not waited for");
    assert!(e.message().contains("returned while") || e.message().contains("without having called"), "{e}");
    threads.lock().unwrap().drain(..).for_each(|t| t.join().unwrap());
}

#[test]
fn oversubscription_makes_progress() {
    let threads = 4 * available_threads();
    let pool = exactly(threads);
    let start = Instant::now();
    sections(&pool, 200, 64, &|_| {}).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "200 sections took {:?}", start.elapsed());
    // What a model gets is never more than there are processors.
    assert_eq!(Pool::new(threads).unwrap().count(), available_threads());
}

#[test]
fn subnormals_are_zero_inside_only() {
    for (name, pool) in kinds() {
        let product = |x: f32| std::hint::black_box(x) * std::hint::black_box(0.5f32);
        let others = AtomicUsize::new(0);
        pool.run(&|_| add(&others, usize::from(product(f32::MIN_POSITIVE) != 0.0))).unwrap();
        assert_eq!(others.into_inner() > 0, !cfg!(target_arch = "x86_64"), "{name}");
        assert_ne!(product(f32::MIN_POSITIVE), 0.0);
    }
}

#[test]
fn too_many_threads_is_an_error() {
    assert_eq!(Pool::new(usize::MAX).err().unwrap().kind(), Kind::TooLarge);
    assert!(available_threads() >= 1);
}

/// What a run borrows ends with it: helpers that learn in a meeting that the run is over, or are called away there, may take their
/// time to come out.
#[test]
fn a_run_ends_when_all_are_out_of_the_function() {
    let crew = Arc::new(Crew::exactly(2).unwrap());
    let pool = Pool::of(Team::Crew(crew), 2);
    let mut helped = 0;
    for _ in 0..40 {
        let (joined, inside) = (AtomicUsize::new(0), AtomicUsize::new(0));
        pool.run(&|w| {
            inside.fetch_add(1, Ordering::SeqCst);
            if w.is_leader() {
                let start = Instant::now();
                while joined.load(Ordering::SeqCst) == 0 && start.elapsed() < Duration::from_millis(50) {
                    std::thread::yield_now();
                }
            } else {
                joined.fetch_add(1, Ordering::SeqCst);
                while w.meet(0) {}
                std::thread::sleep(Duration::from_micros(500));
            }
            inside.fetch_sub(1, Ordering::SeqCst);
        })
        .unwrap();
        assert_eq!(inside.load(Ordering::SeqCst), 0, "somebody is still in the function");
        helped += joined.load(Ordering::SeqCst);
    }
    assert!(helped > 0, "no helper ever came");
}
