//! Buckets in this process: one 64-bit word each, changed by compare-and-swap.
//!
//! A refused call writes nothing, so that callers who are all refused (an agent in a loop) do not
//! take the word's cache line from each other. A word only ever grows: a caller that was held up
//! between reading the clock and the swap cannot pull a bucket back.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bucket::{Bucket, Price, Reached};

/// A bucket's arithmetic beside its word, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Cell {
    word: AtomicU64,
    pub(crate) bucket: Bucket,
}

impl Cell {
    pub(crate) fn full(bucket: Bucket) -> Self {
        Self {
            word: AtomicU64::new(0),
            bucket,
        }
    }

    /// Draws once at `now`: the state after an admitted call, or else the one that refused it.
    ///
    /// The word is all that callers share, so no ordering beyond its own is needed.
    #[inline]
    pub(crate) fn draw(&self, now: Reached<'_>, price: Price) -> Result<u64, u64> {
        let mut word = self.word.load(Ordering::Relaxed);
        while let Some(next) = Bucket::draw(word, now, price) {
            match self
                .word
                .compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Ok(next),
                Err(newer) => word = newer,
            }
        }
        Err(word)
    }

    /// The state; changes nothing.
    #[inline]
    pub(crate) fn state(&self) -> u64 {
        self.word.load(Ordering::Relaxed)
    }
}

/// Every order in which threads can meet at the word. Run by
/// `RUSTFLAGS="--cfg loom" cargo test -p callgate --lib --release --target-dir target/loom loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use std::panic::catch_unwind;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::Limit;

    fn cell(burst: u64) -> Cell {
        let limit = Limit::per_second(1).burst(burst);
        Cell::full(Bucket::new(&limit).expect("a limit in range"))
    }

    /// A draw at `now`: the cost where it was admitted.
    fn draw(cell: &Cell, now: u64, cost: u64) -> u64 {
        let price = cell.bucket.price(cost).expect("at most the burst");
        match cell.draw(cell.bucket.reached(now), price) {
            Ok(_) => cost,
            Err(_) => 0,
        }
    }

    /// The same without compare-and-swap: what the models have to catch.
    fn draw_by_load_and_store(cell: &Cell, now: u64, cost: u64) -> u64 {
        let price = cell.bucket.price(cost).expect("at most the burst");
        let word = cell.word.load(Ordering::Relaxed);
        match Bucket::draw(word, cell.bucket.reached(now), price) {
            Some(next) => {
                cell.word.store(next, Ordering::Relaxed);
                cost
            }
            None => 0,
        }
    }

    /// A draw, so that a faulty one can take its place.
    type Draw = fn(&Cell, u64, u64) -> u64;

    /// What calls, given as time and cost, are admitted for.
    fn run(draw: Draw, cell: &Cell, calls: &[(u64, u64)]) -> u64 {
        calls.iter().map(|&(now, cost)| draw(cell, now, cost)).sum()
    }

    /// Threads that each make some calls get one of these numbers of tokens, in every order.
    fn model(burst: u64, threads: &[&'static [(u64, u64)]], due: &'static [u64], draw: Draw) {
        let threads = threads.to_vec();
        loom::model(move || {
            let cell = Arc::new(cell(burst));
            let started: Vec<_> = threads[1..]
                .iter()
                .map(|&calls| {
                    let cell = Arc::clone(&cell);
                    thread::spawn(move || run(draw, &cell, calls))
                })
                .collect();
            let first = run(draw, &cell, threads[0]);
            let others = started
                .into_iter()
                .map(|thread| thread.join().expect("no panic"));
            let got = first + others.sum::<u64>();
            assert!(due.contains(&got), "{got}, not one of {due:?}");
        });
    }

    /// Two calls of one token each.
    const TWICE: &[(u64, u64)] = &[(0, 1), (0, 1)];
    /// The same a second later: or the others read the clock a second before they draw.
    const LATER: &[(u64, u64)] = &[(1_000_000_000, 1), (1_000_000_000, 1)];

    #[test]
    fn threads_at_one_instant_get_exactly_the_burst() {
        model(1, &[TWICE, TWICE], &[1], draw);
        model(2, &[TWICE, TWICE], &[2], draw);
        model(3, &[TWICE, TWICE], &[3], draw);
        model(4, &[TWICE, TWICE], &[4], draw);
        model(2, &[&[(0, 1)], &[(0, 1)], &[(0, 1)]], &[2], draw);
        // One of the 2s, whichever comes first, and the 1.
        model(3, &[&[(0, 2)], &[(0, 2)], &[(0, 1)]], &[3], draw);
    }

    #[test]
    fn threads_with_stale_times_get_no_more_than_the_bound() {
        // The burst, and the token of the second: which a bucket that is full until then does not take.
        model(2, &[TWICE, LATER], &[2, 3], draw);
        model(2, &[&[(0, 1)], LATER, &[(0, 1)]], &[2, 3], draw);
    }

    #[test]
    fn the_models_catch_a_load_and_a_store() {
        let caught = |burst, threads: [_; 2], due| {
            let run = || model(burst, &threads, due, draw_by_load_and_store);
            let panic = catch_unwind(run).expect_err("more than the bound");
            panic.downcast_ref::<String>().cloned()
        };
        let message = |text: &str| Some(text.to_owned());
        assert_eq!(
            caught(1, [TWICE, TWICE], &[1]),
            message("2, not one of [1]")
        );
        assert_eq!(
            caught(3, [TWICE, TWICE], &[3]),
            message("4, not one of [3]")
        );
        assert_eq!(
            caught(2, [TWICE, LATER], &[2, 3]),
            message("4, not one of [2, 3]")
        );
    }
}
