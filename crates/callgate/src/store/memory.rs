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
//!
//! While a limit is paused, or calls wait for its buckets, a flag beside the word sends callers the
//! long way, where they ask about that first.

#![expect(
    clippy::inline_always,
    reason = "measured: two limits at less than a third more than one"
)]

use std::collections::HashMap;
#[cfg(not(loom))]
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64 as Counter};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(not(loom))]
use std::thread::yield_now;
use std::time::Duration;

#[cfg(loom)]
use loom::hint::spin_loop;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, AtomicU64, Ordering};
#[cfg(loom)]
use loom::thread::yield_now;

use smallvec::SmallVec;

use super::table::{Key, ReadShard, Table, WriteShard};
use super::{Draw, Verdict};
use crate::bucket::{Bucket, Fill, MAX_STATE, Price, Reached};

/// No state: a caller under several limits is about to say what the state is.
const FROZEN: u64 = MAX_STATE + 2;

/// No state: this bucket has moved.
const MOVED: u64 = MAX_STATE + 1;

/// How often to look again before a thread lets others run.
const SPINS: u32 = 64;

/// A bucket that has been full for ten minutes (in nanoseconds) is not expected to be asked for again.
const IDLE: u64 = 600 * 1_000_000_000;

/// A caller knew old buckets: it is to look up its limits again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved;

/// The buckets of one limit: its arithmetic, and the states.
///
/// What a decision reads is in front, on the same cache lines.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Buckets {
    /// The one bucket of a limit that nothing splits.
    ///
    /// Of a limit that is split, the bucket in which all keys are that have none of their own: they
    /// share it where the table is full, and start from its state where it is not.
    word: AtomicU64,
    /// Whether something else is to be asked before a draw: see [`is_held`](Self::is_held).
    held: AtomicBool,
    pub(crate) bucket: Bucket,
    table: Option<Table>,
    /// Callers freeze in this order. It stays the same when the buckets move.
    order: u64,
    /// Nothing, or one of the two below.
    pooled: AtomicU8,
    /// Of all buckets, or of those that a part of them has in common.
    pauses: Mutex<HashMap<Option<Key>, Pause>>,
}

/// Nobody draws until then.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pause {
    pub(super) until: u64,
    /// What no bucket stands below: it is empty when the pause ends.
    pub(super) floor: u64,
}

impl Pause {
    /// How long it goes on.
    pub(crate) fn left(self, now: u64) -> Option<Duration> {
        (self.until > now).then(|| Duration::from_nanos(self.until - now))
    }
}

/// A key found no place for a bucket of its own; and that was told.
pub(super) const POOLED: u8 = 1;
pub(super) const TOLD: u8 = 2;

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
            pooled: AtomicU8::new(0),
            held: AtomicBool::new(false),
            pauses: Mutex::default(),
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
        draw(&self.word, now, price)
    }

    /// Whether a pause or those who wait may be in the way of a draw.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn hold(&self, held: bool) {
        if self.is_held() != held {
            self.held.store(held, Ordering::Relaxed);
        }
    }

    /// Lets nobody draw until then, from all buckets or from those of a part; they are empty when it ends.
    ///
    /// One that ends later stays as it is.
    pub(crate) fn pause(&self, part: Option<Key>, until: u64, now: u64) {
        let full = self.bucket.reached(now).floor();
        let mut pauses = self.pauses();
        pauses.retain(|_, pause| pause.floor > full);
        let pause = pauses.entry(part).or_default();
        if until > pause.until {
            let floor = self.bucket.empty(until);
            *pause = Pause { until, floor };
        }
        self.hold(true);
    }

    /// The pause of a part, where it matters still.
    pub(crate) fn paused(&self, part: Option<Key>, now: u64) -> Option<Pause> {
        let pause = self.pauses().get(&part).copied();
        pause.filter(|pause| pause.floor > self.bucket.reached(now).floor())
    }

    /// How long the longest pause goes on.
    pub(crate) fn paused_for(&self, now: u64) -> Option<Duration> {
        let pauses = self.pauses();
        pauses.values().filter_map(|pause| pause.left(now)).max()
    }

    /// Whether there are pauses that matter still.
    pub(crate) fn has_pauses(&self, now: u64) -> bool {
        let full = self.bucket.reached(now).floor();
        self.pauses().values().any(|pause| pause.floor > full)
    }

    fn pauses(&self) -> MutexGuard<'_, HashMap<Option<Key>, Pause>> {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole tokens in the one bucket, and how many keys have a bucket; changes nothing.
    pub(crate) fn peek(&self, now: u64) -> Result<(u64, Option<usize>), Moved> {
        let floor = self.paused(None, now).map_or(0, |pause| pause.floor);
        let missing = self
            .bucket
            .reached(now)
            .missing(settled(&self.word)?.max(floor));
        let kept = self.table.as_ref().map(Table::kept).transpose()?;
        Ok((self.bucket.fill(missing).tokens(), kept))
    }

    /// Draws from a key's bucket, as [`draw`](Self::draw), where the key has one.
    #[inline]
    pub(crate) fn draw_kept(
        &self,
        key: Key,
        now: Reached<'_>,
        price: Price,
    ) -> Result<Option<Result<u64, u64>>, Moved> {
        let Some(table) = &self.table else {
            return Ok(None);
        };
        let shard = table.read(key)?;
        let slot = shard.find(key);
        slot.map(|slot| draw(shard.word(slot), now, price))
            .transpose()
    }

    /// Takes from a bucket what is above this state, as somebody knows that it is not there any more.
    ///
    /// What has moved, or finds no place, stays as it is.
    #[cfg_attr(
        not(all(feature = "redis", not(loom))),
        expect(dead_code, reason = "for what another store tells")
    )]
    pub(crate) fn lift(&self, key: Option<Key>, state: u64, now: u64) -> Result<(), Moved> {
        let higher = |seen| (seen < state).then_some((state, state));
        let own = settled(&self.word)?;
        let (Some(key), Some(table)) = (key, &self.table) else {
            return swap(&self.word, own, higher).map(drop);
        };
        let mut shard = table.write(key)?;
        let full = |at| self.bucket.reached(at).floor();
        let slot = shard.find_or_make(key, own, full(now), full(now.saturating_sub(IDLE)));
        let lifted = slot.map(|slot| swap(shard.word(slot), own, higher));
        lifted.transpose().map(drop)
    }

    /// Whether a key found no place for a bucket of its own; says so only once.
    pub(crate) fn was_pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed) == POOLED
            && self.pooled.swap(TOLD, Ordering::Relaxed) == POOLED
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
        let now = now();
        let word = carried(word, now);
        let mut pauses = self.pauses().clone();
        for pause in pauses.values_mut() {
            pause.floor = if pause.until > now {
                bucket.empty(pause.until)
            } else {
                carried(pause.floor, now)
            };
        }
        let buckets = Self {
            order: self.order,
            pauses: Mutex::new(pauses),
            // Until a caller finds that nothing is in the way.
            held: AtomicBool::new(true),
            ..Self::with_table(bucket, table)
        };
        buckets.word.store(word, Ordering::Relaxed);
        let pooled = self.pooled.load(Ordering::Relaxed);
        buckets.pooled.store(pooled, Ordering::Relaxed);
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

/// What a bucket holds that a call draws from; changes nothing.
pub(super) fn look(buckets: &Buckets, key: Option<Key>) -> Result<u64, Moved> {
    let own = settled(&buckets.word)?;
    let (Some(key), Some(table)) = (key, &buckets.table) else {
        return Ok(own);
    };
    let shard = table.read(key)?;
    match shard.find(key) {
        Some(slot) => settled(shard.word(slot)),
        None => Ok(shard.start(own)),
    }
}

/// Draws from limits that nothing splits, or from none of them; none where others were faster. They are in
/// the order that [`Buckets::order`] gives.
#[inline(always)]
pub(crate) fn draw_each(
    limits: &[(Arc<Buckets>, Price)],
    now: u64,
) -> Result<Option<Verdict>, Moved> {
    if let [one, other] = limits {
        return Ok(decide_both(
            &Seen::own(one, now)?,
            &Seen::own(other, now)?,
            now,
        ));
    }
    let seen = limits.iter().map(|limit| Seen::own(limit, now));
    let seen: SmallVec<[_; 4]> = seen.collect::<Result<_, _>>()?;
    decide(&seen, now)
}

/// Draws from all limits of a call, or from none. They are in the order that [`Buckets::order`] gives.
pub(crate) fn draw_all(draws: &[Draw<'_>], now: u64) -> Result<Verdict, Moved> {
    loop {
        if let Some(verdict) = draw_found(draws, now)? {
            return Ok(verdict);
        }
    }
}

/// None where some had to be made first, or others were faster: to be tried again.
fn draw_found(draws: &[Draw<'_>], now: u64) -> Result<Option<Verdict>, Moved> {
    // In two steps: what is found first holds on to where the buckets are.
    if let [one, other] = draws {
        let places = [Place::find(one, now)?, Place::find(other, now)?];
        let seen = [places[0].seen(one)?, places[1].seen(other)?];
        return Ok(decide_both(&seen[0], &seen[1], now));
    }
    let mut places: SmallVec<[_; 4]> = SmallVec::new();
    for draw in draws {
        places.push(Place::find(draw, now)?);
    }
    let mut seen: SmallVec<[_; 4]> = SmallVec::new();
    for (draw, place) in draws.iter().zip(&places) {
        seen.push(place.seen(draw)?);
    }
    decide(&seen, now)
}

/// Where a bucket is that a call draws from, held so that it stays there.
enum Place<'a> {
    /// The one bucket of a limit that nothing splits.
    One(&'a AtomicU64),
    Known(ReadShard<'a>, usize),
    /// Nowhere yet. It would start from this state, and is made only if all admit the call.
    Nowhere(u64),
    Made(WriteShard<'a>, usize),
    /// The bucket of all who have none of their own. This one cannot get one in the meantime, from a state that
    /// does not have this charge in it: its shard is held.
    Pooled(
        #[expect(dead_code, reason = "held")] WriteShard<'a>,
        &'a AtomicU64,
    ),
}

impl<'a> Place<'a> {
    #[inline]
    fn find(draw: &Draw<'a>, now: u64) -> Result<Self, Moved> {
        let Some(buckets) = draw.memory() else {
            return Ok(Self::Nowhere(0));
        };
        let (Some(key), Some(table)) = (draw.key, &buckets.table) else {
            return Ok(Self::One(&buckets.word));
        };
        if draw.make.get() {
            return Self::make(buckets, table.write(key)?, key, draw.reached, now);
        }
        let own = settled(&buckets.word)?;
        let shard = table.read(key)?;
        if let Some(slot) = shard.find(key) {
            return Ok(Self::Known(shard, slot));
        }
        draw.make.set(true);
        Ok(Self::Nowhere(shard.start(own)))
    }

    #[cold]
    fn make(
        buckets: &'a Buckets,
        mut shard: WriteShard<'a>,
        key: Key,
        reached: Reached<'_>,
        now: u64,
    ) -> Result<Self, Moved> {
        let own = &buckets.word;
        let idle = buckets.bucket.reached(now.saturating_sub(IDLE)).floor();
        let (start, full) = (settled(own)?, reached.floor());
        if let Some(slot) = shard.find_or_make(key, start, full, idle) {
            return Ok(Self::Made(shard, slot));
        }
        if buckets.pooled.load(Ordering::Relaxed) == 0 {
            buckets.pooled.store(POOLED, Ordering::Relaxed);
        }
        // A caller with an old reading may be here because its bucket was dropped.
        let horizon = shard.start(0);
        let lift = |state| (state < horizon).then_some((horizon, horizon));
        // Who finds it as high has nothing to do.
        let (Ok(_) | Err(_)) = swap(own, settled(own)?, lift)?;
        Ok(Self::Pooled(shard, own))
    }

    #[inline]
    fn word(&self) -> Option<&AtomicU64> {
        match self {
            Self::One(word) | Self::Pooled(_, word) => Some(word),
            Self::Known(shard, slot) => Some(shard.word(*slot)),
            Self::Made(shard, slot) => Some(shard.word(*slot)),
            Self::Nowhere(_) => None,
        }
    }

    #[inline]
    fn seen<'s>(&'s self, draw: &Draw<'s>) -> Result<Seen<'s>, Moved> {
        let word = self.word();
        Ok(Seen {
            word,
            bucket: draw.bucket,
            reached: draw.reached,
            price: draw.price,
            state: match self {
                Self::Nowhere(state) => *state,
                _ => word.map_or(Err(Moved), settled)?,
            },
            floor: draw.floor,
        })
    }
}

/// A bucket and the state in which it was seen last.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    /// None where there is no bucket yet, or it is elsewhere: the state is the one from which it would start.
    pub(super) word: Option<&'a AtomicU64>,
    pub(super) bucket: &'a Bucket,
    pub(super) reached: Reached<'a>,
    /// None where a full bucket holds less.
    pub(super) price: Option<Price>,
    pub(super) state: u64,
    pub(super) floor: u64,
}

impl<'a> Seen<'a> {
    /// The one bucket of a limit that nothing splits.
    #[inline(always)]
    fn own((buckets, price): &'a (Arc<Buckets>, Price), now: u64) -> Result<Self, Moved> {
        Ok(Self {
            word: Some(&buckets.word),
            bucket: &buckets.bucket,
            reached: buckets.bucket.reached(now),
            price: Some(*price),
            state: settled(&buckets.word)?,
            floor: 0,
        })
    }

    /// The state that follows, if it admits.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<u64> {
        Bucket::draw(self.state.max(self.floor), self.reached, self.price?)
    }

    #[inline(always)]
    pub(super) fn fill(&self, state: u64) -> Fill {
        let state = state.max(self.floor);
        self.bucket.fill(self.reached.missing(state))
    }
}

/// Decides, where all buckets are found and held.
fn decide(seen: &[Seen<'_>], now: u64) -> Result<Option<Verdict>, Moved> {
    if seen.iter().any(|seen| seen.next().is_none()) {
        return Ok(refusal(seen, now));
    }
    Ok(charge(seen)?.map(Verdict::Admitted))
}

/// [`decide`] for two, as most have who have several: without memory for what is under way.
#[inline(always)]
fn decide_both(one: &Seen<'_>, other: &Seen<'_>, now: u64) -> Option<Verdict> {
    let ((Some(one_next), Some(other_next)), (Some(one_word), Some(other_word))) =
        ((one.next(), other.next()), (one.word, other.word))
    else {
        return refusal(&[*one, *other], now);
    };
    let relaxed = Ordering::Relaxed;
    let frozen = one_word.compare_exchange(one.state, FROZEN, relaxed, relaxed);
    if frozen.is_err() {
        return None;
    }
    let drawn = other_word.compare_exchange(other.state, other_next, relaxed, relaxed);
    let state = if drawn.is_ok() { one_next } else { one.state };
    one_word.store(state, relaxed);
    if drawn.is_err() {
        return None;
    }
    let fill = one.fill(one_next).tighter(Some(other.fill(other_next)));
    Some(Verdict::Admitted(fill))
}

/// Who refuses for the longest, where somebody does.
#[cold]
pub(super) fn refusal(seen: &[Seen<'_>], now: u64) -> Option<Verdict> {
    let mut refused: Option<(usize, Option<Duration>)> = None;
    let mut tightest = None;
    // Never is longer than any time.
    let length = |wait: Option<Duration>| (wait.is_none(), wait);
    for (index, seen) in seen.iter().enumerate() {
        tightest = Some(seen.fill(seen.state).tighter(tightest));
        if seen.next().is_some() {
            continue;
        }
        let wait = seen
            .price
            .map(|price| seen.bucket.wait(seen.state.max(seen.floor), now, price));
        if refused.is_none_or(|(_, longest)| length(wait) > length(longest)) {
            refused = Some((index, wait));
        }
    }
    let ((index, wait), fill) = refused.zip(tightest)?;
    Some(Verdict::Refused(index, wait, fill))
}

/// Charges all: or none, where one refuses after all or is not made yet. How full the tightest then is.
fn charge(seen: &[Seen<'_>]) -> Result<Option<Fill>, Moved> {
    let Some((first, rest)) = seen.split_first() else {
        return Ok(None);
    };
    let (Some(word), Some(price)) = (first.word, first.price) else {
        return Ok(None);
    };
    // Nobody waits for the last one: it is written at once.
    let last = rest.is_empty();
    let swapped = swap(word, first.state, |state| {
        let next = Bucket::draw(state.max(first.floor), first.reached, price)?;
        Some((next, if last { next } else { FROZEN }))
    })?;
    let Ok((old, next)) = swapped else {
        return Ok(None);
    };
    if last {
        return Ok(Some(first.fill(next)));
    }
    let rest = charge(rest);
    let all = matches!(rest, Ok(Some(_)));
    word.store(if all { next } else { old }, Ordering::Relaxed);
    Ok(rest?.map(|rest| first.fill(next).tighter(Some(rest))))
}

#[inline]
fn draw(word: &AtomicU64, now: Reached<'_>, price: Price) -> Result<Result<u64, u64>, Moved> {
    let seen = word.load(Ordering::Relaxed);
    let drawn = swap(word, seen, |state| {
        let next = Bucket::draw(state, now, price)?;
        Some((next, next))
    })?;
    Ok(drawn.map(|(_, next)| next))
}

/// Swaps a state for what `write` makes of it, first of the one that was seen last: the old state and
/// the one that follows it; or else the state for which there is none.
///
/// The word is all that callers share, so no ordering beyond its own is needed.
#[inline]
fn swap(
    word: &AtomicU64,
    seen: u64,
    write: impl Fn(u64) -> Option<(u64, u64)>,
) -> Result<Result<(u64, u64), u64>, Moved> {
    let mut state = seen;
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
