//! Every order in which processes can meet at a cell, as in `store/loom_tests.rs`: threads take their place.
//!
//! Each model comes with a mutant, a way that is nearly right, which it has to catch.

#[path = "cells.rs"]
#[expect(dead_code, reason = "what finds and changes cells is what is modelled")]
mod cells;

use std::panic::{UnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::sync::atomic::Ordering;
use loom::thread;

use cells::{BLOCK, Cell, Stamped, Word, find, insert};

/// What stands for 128 bits: all numbers here are small.
#[derive(Debug, Default)]
struct AtomicU128(loom::sync::atomic::AtomicU64);

#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
impl AtomicU128 {
    fn load(&self, order: Ordering) -> u128 {
        wide(self.0.load(order))
    }

    fn store(&self, bits: u128, order: Ordering) {
        self.0.store(narrow(bits), order);
    }

    fn compare_exchange(
        &self,
        seen: u128,
        next: u128,
        swapped: Ordering,
        kept: Ordering,
    ) -> Result<u128, u128> {
        let (seen, next) = (narrow(seen), narrow(next));
        let found = self.0.compare_exchange(seen, next, swapped, kept);
        found.map(wide).map_err(wide)
    }
}

/// The stamp in the high half, with its highest bit, and the state in the low one.
fn narrow(bits: u128) -> u64 {
    let (stamp, state) = ((bits >> 64) as u64, bits as u64 & 0xffff_ffff);
    (stamp >> 63 << 63) | (stamp & 0x7fff_ffff) << 32 | state
}

fn wide(bits: u64) -> u128 {
    let stamp = (bits >> 63 << 63) | (bits >> 32 & 0x7fff_ffff);
    u128::from(stamp) << 64 | u128::from(bits & 0xffff_ffff)
}

const OLD: [u64; 2] = [1, 1];
const NEW: [u64; 2] = [2, 2];

/// A state up to this is worth nothing.
const FULL: u64 = 5;

fn first(number: u64, state: u64) -> Stamped {
    let stamp = cells::stamp(number, 1);
    Stamped { stamp, state }
}

/// A block with a full bucket, and others that are not.
fn table() -> Arc<Vec<Cell>> {
    let cells: Vec<_> = (0..BLOCK).map(|_| Cell::default()).collect();
    let keys = std::iter::once((OLD, FULL)).chain((3..).map(|key| ([key, key], 100)));
    for (number, (cell, (key, state))) in (1..).zip(cells.iter().zip(keys)) {
        cell.key[0].store(key[0], Ordering::Relaxed);
        cell.key[1].store(key[1], Ordering::Relaxed);
        cell.word.store(first(number, state));
    }
    Arc::new(cells)
}

fn every_likely_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn caught(model: impl FnOnce() + UnwindSafe) -> Option<String> {
    let panic = catch_unwind(model).err()?;
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()))
}

type Insert = fn(&[Cell], [u64; 2], Stamped) -> bool;

fn as_it_is(cells: &[Cell], key: [u64; 2], first: Stamped) -> bool {
    insert(cells, key, first, |seen| seen.state <= FULL, || ()).is_some()
}

/// The key first, and its state in one step with the end of the old.
fn key_first(cells: &[Cell], key: [u64; 2], first: Stamped) -> bool {
    let seen = cells[0].word.load();
    if seen.state > FULL {
        return false;
    }
    cells[0].key[0].store(key[0], Ordering::Release);
    cells[0].key[1].store(key[1], Ordering::Release);
    cells[0].word.swap(seen, first).is_ok()
}

/// Without looking whether somebody has drawn in the meantime.
fn unseen(cells: &[Cell], key: [u64; 2], first: Stamped) -> bool {
    if cells[0].word.load().state > FULL {
        return false;
    }
    cells[0].word.store(Stamped { stamp: 1, state: 0 });
    cells[0].key[0].store(key[0], Ordering::Release);
    cells[0].key[1].store(key[1], Ordering::Release);
    cells[0].word.store(first);
    true
}

/// One draws from a bucket, another one looks for a new key's, while a third one gives the cell to that.
fn a_cell_changes_hands(insert: Insert) {
    every_likely_order(move || {
        let cells = table();
        let draws = Arc::clone(&cells);
        let draws = thread::spawn(move || {
            let found = find(&draws, OLD);
            found.is_some_and(|(word, seen)| {
                assert_eq!(seen, first(1, FULL), "of another key");
                word.swap(seen, seen.with_state(FULL + 1)).is_ok()
            })
        });
        let looks = Arc::clone(&cells);
        let looks = thread::spawn(move || {
            if let Some((_, seen)) = find(&looks, NEW) {
                assert_eq!(seen, first(9, 200), "of another key");
            }
        });
        let inserted = insert(&cells, NEW, first(9, 200));
        let drawn = draws.join().expect("no panic");
        looks.join().expect("no panic");
        assert_ne!(drawn, inserted, "a call is lost, or a cell");
        let key = if inserted { NEW } else { OLD };
        assert!(find(&cells, key).is_some());
    });
}

#[test]
fn loom_a_cell_is_of_one_key_at_a_time() {
    a_cell_changes_hands(as_it_is);
    for (mutant, why) in [(key_first as Insert, "of another key"), (unseen, "is lost")] {
        let caught = caught(move || a_cell_changes_hands(mutant)).expect("caught");
        assert!(caught.contains(why), "{caught}");
    }
}

type Charge = fn(&Word);

/// By who has the lock, for several limits.
fn frozen(word: &Word) {
    loop {
        let seen = word.load();
        if word.swap(seen, seen.frozen()).is_ok() {
            word.store(seen.with_state(seen.state + 1));
            return;
        }
    }
}

fn not_frozen(word: &Word) {
    let seen = word.load();
    word.store(seen.with_state(seen.state + 1));
}

/// One draws without a lock, while who has it charges several limits.
fn both_draw(charge: Charge) {
    every_likely_order(move || {
        let cells = table();
        let draws = Arc::clone(&cells);
        let draws = thread::spawn(move || {
            let seen = draws[0].word.load();
            let next = seen.with_state(seen.state + 1);
            !seen.is_frozen() && draws[0].word.swap(seen, next).is_ok()
        });
        charge(&cells[0].word);
        let drawn = u64::from(draws.join().expect("no panic"));
        assert_eq!(
            cells[0].word.load(),
            first(1, FULL + 1 + drawn),
            "a call is lost"
        );
    });
}

#[test]
fn loom_nobody_draws_from_a_frozen_cell() {
    both_draw(frozen);
    let caught = caught(|| both_draw(not_frozen)).expect("caught");
    assert!(caught.contains("is lost"), "{caught}");
}
