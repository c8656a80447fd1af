//! Buckets in this process: one 64-bit word each, changed by compare-and-swap.
//!
//! A refused call writes nothing, so that callers who are all refused (an agent in a loop) do not
//! take the word's cache line from each other. A word only ever grows: a caller that was held up
//! between reading the clock and the swap cannot pull a bucket back.
//!
//! A call under one limit is one swap. A call under several freezes their words, in an order that
//! all callers keep, finds that all of them admit, and only then writes: so either all are charged
//! or none, and nothing has to be undone. What refuses is found by reading alone.
//!
//! When a limit changes, its buckets move: the new ones take over what the old ones hold, and leave a
//! mark behind that sends callers who still know the old ones to the new.

use std::cell::Cell;
#[cfg(not(loom))]
use std::hint::spin_loop;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Counter;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::thread::yield_now;
use std::time::Duration;

#[cfg(loom)]
use loom::hint::spin_loop;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(loom)]
use loom::thread::yield_now;

use super::table::{Key, Table};
use crate::bucket::{Bucket, Fill, MAX_STATE, Price, Reached};

/// No state: a caller under several limits is about to say what the state is.
const FROZEN: u64 = MAX_STATE + 2;

/// No state: this bucket has moved.
const MOVED: u64 = MAX_STATE + 1;

/// How often to look again before a thread lets others run.
const SPINS: u32 = 64;

/// A caller knew old buckets: it is to look up its limits again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved;

/// The buckets of one limit: its arithmetic, and the states.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Buckets {
    /// The one bucket of a limit that nothing splits.
    ///
    /// Of a limit that is split, the bucket in which all keys are that have none of their own: they
    /// share it where the table is full, and start from its state where it is not.
    word: AtomicU64,
    pub(crate) bucket: Bucket,
    table: Option<Table>,
    /// Callers freeze in this order.
    order: u64,
    pooled: AtomicBool,
}

impl Buckets {
    /// Full buckets: one, or one for each key.
    pub(crate) fn full(bucket: Bucket, split: bool) -> Self {
        Self::with_table(bucket, split.then(Table::new))
    }

    fn with_table(bucket: Bucket, table: Option<Table>) -> Self {
        static MADE: Counter = Counter::new(0);
        Self {
            word: AtomicU64::new(0),
            bucket,
            table,
            order: MADE.fetch_add(1, Ordering::Relaxed),
            pooled: AtomicBool::new(false),
        }
    }

    /// The place of these buckets in the order in which callers freeze.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    /// Draws from the one bucket of a limit that nothing splits: the state after an admitted call, or
    /// else the one that refused it.
    #[inline]
    pub(crate) fn draw(&self, now: Reached<'_>, price: Price) -> Result<Result<u64, u64>, Moved> {
        let drawn = swap(&self.word, |state| {
            let next = Bucket::draw(state, now, price)?;
            Some((next, next))
        })?;
        Ok(drawn.map(|(_, next)| next))
    }

    /// The whole tokens in the one bucket, and how many keys have a bucket; changes nothing.
    pub(crate) fn peek(&self, now: u64) -> Result<(u64, Option<usize>), Moved> {
        let missing = self.bucket.reached(now).missing(settled(&self.word)?);
        let kept = self.table.as_ref().map(Table::kept).transpose()?;
        Ok((self.bucket.fill(missing).tokens(), kept))
    }

    /// Whether a key found no place for a bucket of its own since this was last asked.
    pub(crate) fn was_pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed) && self.pooled.swap(false, Ordering::Relaxed)
    }

    /// Buckets of the same limit under other numbers, which take over what these hold; these are gone.
    ///
    /// A key keeps its tokens, and so does one that has no bucket: it is full, by the old burst. Where
    /// the keys are `new_keys`, nothing tells which of the old buckets they drew from: all of them
    /// start as the emptiest.
    ///
    /// The clock is read after a state was taken: nobody drew from it at a later time.
    pub(crate) fn carry(
        &self,
        bucket: Bucket,
        split: bool,
        new_keys: bool,
        now: &dyn Fn() -> u64,
    ) -> Self {
        let carried = |state, now| bucket.carry(state, &self.bucket, now);
        let full = |now| self.bucket.reached(now).floor();
        let mut word = self.take();
        let table = match &self.table {
            Some(table) if !new_keys => {
                let (moved, horizon) = table.carry(now, full, carried);
                word = word.max(horizon);
                Some(moved)
            }
            Some(table) => {
                word = word.max(table.clear());
                split.then(Table::new)
            }
            None => split.then(Table::new),
        };
        let word = carried(word, now());
        let buckets = Self::with_table(bucket, table);
        buckets.word.store(word, Ordering::Relaxed);
        buckets
    }

    /// Gives all memory back, and sends callers away who still know these buckets.
    pub(crate) fn close(&self) {
        self.take();
        if let Some(table) = &self.table {
            table.clear();
        }
    }

    /// The state, and the mark in its place.
    fn take(&self) -> u64 {
        loop {
            let Ok(state) = settled(&self.word) else {
                return 0;
            };
            let taken =
                self.word
                    .compare_exchange(state, MOVED, Ordering::Relaxed, Ordering::Relaxed);
            if taken.is_ok() {
                return state;
            }
        }
    }
}

/// What a decision came to.
pub(crate) enum Verdict {
    /// All limits were charged; the tightest of them is this full.
    Admitted(Fill),
    /// None was. The place of the limit that refused for the longest, and for how long: none for ever.
    Refused(usize, Option<Duration>, Fill),
}

/// What a call asks of one limit.
pub(crate) struct Draw<'a> {
    buckets: &'a Buckets,
    reached: Reached<'a>,
    /// None where a full bucket holds less.
    price: Option<Price>,
    /// Of the bucket, where the limit is split.
    key: Option<Key>,
    /// Whether the key was found to have no bucket, and is to get one.
    make: Cell<bool>,
}

impl<'a> Draw<'a> {
    #[inline]
    pub(crate) fn new(
        buckets: &'a Buckets,
        now: u64,
        price: Option<Price>,
        key: Option<Key>,
    ) -> Self {
        Self {
            buckets,
            reached: buckets.bucket.reached(now),
            price,
            key,
            make: Cell::new(false),
        }
    }
}

/// Draws from limits that nothing splits, or from none of them: how full the tightest then is, or none
/// where one refuses. They are in the order that [`Buckets::order`] gives.
pub(crate) fn draw_each(limits: &[(Arc<Buckets>, Price)], now: u64) -> Result<Option<Fill>, Moved> {
    // Last to first, as `decide` meets what was found: callers of both kinds freeze in one order.
    let charges = limits.iter().rev().map(|(buckets, price)| Charge {
        word: &buckets.word,
        bucket: &buckets.bucket,
        reached: buckets.bucket.reached(now),
        price: *price,
    });
    for charge in charges.clone() {
        if charge.next(settled(charge.word)?).is_none() {
            return Ok(None);
        }
    }
    charge(charges, None)
}

/// Draws from all limits of a call, or from none. They are in the order that [`Buckets::order`] gives.
pub(crate) fn draw_all(draws: &[Draw<'_>], now: u64) -> Result<Verdict, Moved> {
    loop {
        if let Some(verdict) = find(draws, 0, None, now)? {
            return Ok(verdict);
        }
    }
}

/// A bucket that was found for one of a call's limits, and those found before it.
struct Found<'a> {
    draw: &'a Draw<'a>,
    index: usize,
    at: At<'a>,
    before: Option<&'a Found<'a>>,
}

#[derive(Clone, Copy)]
enum At<'a> {
    Word(&'a AtomicU64),
    /// Not made yet: the state from which it would start.
    Start(u64),
}

/// Finds the buckets from one limit on, holding on to where they are, and then decides.
///
/// None where some had to be made first, or others were faster: to be tried again.
fn find(
    draws: &[Draw<'_>],
    index: usize,
    before: Option<&Found<'_>>,
    now: u64,
) -> Result<Option<Verdict>, Moved> {
    let Some(draw) = draws.get(index) else {
        return decide(before, now);
    };
    let go_on = |at| {
        let found = Found {
            draw,
            index,
            at,
            before,
        };
        find(draws, index + 1, Some(&found), now)
    };
    let own = &draw.buckets.word;
    let (Some(key), Some(table)) = (draw.key, &draw.buckets.table) else {
        return go_on(At::Word(own));
    };
    if !draw.make.get() {
        let shard = table.read(key)?;
        if let Some(slot) = shard.find(key) {
            return go_on(At::Word(shard.word(slot)));
        }
        draw.make.set(true);
        return go_on(At::Start(shard.start(settled(own)?)));
    }
    let mut shard = table.write(key)?;
    let made = shard.find_or_make(key, settled(own)?, draw.reached.floor());
    // Without a place of its own it draws from the bucket for all of those. Its shard is still held, so
    // that it cannot get one in the meantime, from a state that does not have this charge in it.
    if let Some(slot) = made {
        return go_on(At::Word(shard.word(slot)));
    }
    draw.buckets.pooled.store(true, Ordering::Relaxed);
    // A caller with an old reading may be here because its bucket was dropped.
    let horizon = shard.start(0);
    let _ = swap(own, |state| (state < horizon).then_some((horizon, horizon)))?;
    go_on(At::Word(own))
}

/// Decides, where all buckets are found and held.
fn decide(found: Option<&Found<'_>>, now: u64) -> Result<Option<Verdict>, Moved> {
    let found = || iter::successors(found, |found| found.before);
    let mut all_made = true;
    for found_one in found() {
        if found_one.next(found_one.at.state()?).is_none() {
            return refusal(found(), now);
        }
        all_made &= matches!(found_one.at, At::Word(_));
    }
    if !all_made {
        return Ok(None);
    }
    let charged = charge(found().filter_map(Found::charge), None)?;
    Ok(charged.map(Verdict::Admitted))
}

/// Who refuses for the longest, where somebody does. Reads only.
fn refusal<'a>(
    found: impl Iterator<Item = &'a Found<'a>>,
    now: u64,
) -> Result<Option<Verdict>, Moved> {
    let mut refused: Option<(usize, Option<Duration>)> = None;
    let mut tightest = None;
    // Never is longer than any time.
    let length = |wait: Option<Duration>| (wait.is_none(), wait);
    for found in found {
        let Draw {
            buckets,
            reached,
            price,
            ..
        } = found.draw;
        let (bucket, state) = (&buckets.bucket, found.at.state()?);
        tightest = Some(bucket.fill(reached.missing(state)).tighter(tightest));
        if found.next(state).is_some() {
            continue;
        }
        let wait = price.map(|price| bucket.wait(state, now, price));
        if refused.is_none_or(|(_, longest)| length(wait) > length(longest)) {
            refused = Some((found.index, wait));
        }
    }
    let refused = refused.zip(tightest);
    Ok(refused.map(|((index, wait), fill)| Verdict::Refused(index, wait, fill)))
}

impl<'a> Found<'a> {
    fn next(&self, state: u64) -> Option<u64> {
        Bucket::draw(state, self.draw.reached, self.draw.price?)
    }

    fn charge(&'a self) -> Option<Charge<'a>> {
        match self.at {
            At::Word(word) => Some(Charge {
                word,
                bucket: &self.draw.buckets.bucket,
                reached: self.draw.reached,
                price: self.draw.price?,
            }),
            At::Start(_) => None,
        }
    }
}

impl At<'_> {
    #[inline]
    fn state(self) -> Result<u64, Moved> {
        match self {
            Self::Word(word) => settled(word),
            Self::Start(state) => Ok(state),
        }
    }
}

/// What is about to be written to a word.
struct Charge<'a> {
    word: &'a AtomicU64,
    bucket: &'a Bucket,
    reached: Reached<'a>,
    price: Price,
}

impl Charge<'_> {
    #[inline]
    fn next(&self, state: u64) -> Option<u64> {
        Bucket::draw(state, self.reached, self.price)
    }
}

/// Charges all: or none, where one refuses after all. How full the tightest then is, with one before.
#[inline]
fn charge<'a>(
    mut charges: impl Iterator<Item = Charge<'a>> + Clone,
    tightest: Option<Fill>,
) -> Result<Option<Fill>, Moved> {
    let Some(first) = charges.next() else {
        return Ok(tightest);
    };
    // Nobody waits for the last one: it is written at once.
    let last = charges.clone().next().is_none();
    let swapped = swap(first.word, |state| {
        let next = first.next(state)?;
        Some((next, if last { next } else { FROZEN }))
    })?;
    let Ok((old, next)) = swapped else {
        return Ok(None);
    };
    let fill = first.bucket.fill(first.reached.missing(next));
    let tightest = Some(fill.tighter(tightest));
    if last {
        return Ok(tightest);
    }
    let rest = charge(charges, tightest);
    let all = matches!(rest, Ok(Some(_)));
    first
        .word
        .store(if all { next } else { old }, Ordering::Relaxed);
    rest
}

/// Swaps a state for what `write` makes of it: the old state and the one that follows it; or else the
/// state for which there is none.
///
/// The word is all that callers share, so no ordering beyond its own is needed.
#[inline]
fn swap(
    word: &AtomicU64,
    write: impl Fn(u64) -> Option<(u64, u64)>,
) -> Result<Result<(u64, u64), u64>, Moved> {
    let mut state = word.load(Ordering::Relaxed);
    loop {
        // What is no state is above all that admit.
        while let Some((next, written)) = write(state) {
            match word.compare_exchange_weak(state, written, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(Ok((state, next))),
                Err(newer) => state = newer,
            }
        }
        if state < MOVED {
            return Ok(Err(state));
        }
        state = settled(word)?;
    }
}

/// The state, once nobody holds it frozen.
#[inline]
fn settled(word: &AtomicU64) -> Result<u64, Moved> {
    let mut spins = 0;
    loop {
        match word.load(Ordering::Relaxed) {
            MOVED => return Err(Moved),
            FROZEN if spins < SPINS => {
                spins += 1;
                spin_loop();
            }
            FROZEN => yield_now(),
            state => return Ok(state),
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "loom_tests.rs"]
mod loom_tests;
