//! Buckets in memory that the processes of a host share: a file of atomic cells, and no server.
//!
//! A call under one limit, whose bucket is known, is one compare-and-swap, as in this process's memory, and a
//! refused call writes nothing there. A lock, the kernel's own, is for new keys and for calls that several
//! limits admit: whoever stops while holding it makes others refuse those calls, and whoever dies leaves a
//! table that is right.
//!
//! Processes may have other numbers for one limit, as while a change is rolled out. A state is converted, in
//! tokens, by whoever meets it under an edition of the limit that is not theirs.

mod cells;
mod counts;
mod file;
mod inspect;
mod label;
#[cfg(test)]
mod tests;
mod time;
mod url;

use std::cell::RefCell;
use std::hash::Hasher;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use siphasher::sip128::Hasher128;
use smallvec::SmallVec;

use super::memory::{self, Moved, Pause, Seen};
use super::{Draw, Key, Verdict};
use crate::bucket::{Bucket, MAX_NANOS, Price, Reached};
use crate::clock::{Clock, nanos};
use crate::rules::Secret;
use crate::{ConfigError, Limit};
use cells::{EDITIONS, Stamped, Word};
use counts::{Counts, Process};
use file::{Edition, File, Locked, pair, thawed};
pub(crate) use inspect::Look;
use label::Label;
pub(crate) use time::now;
use url::Url;

/// How often to look at a frozen cell again before taking the lock.
const SPINS: u32 = 64;

/// A pause's state is the time when it ends, and it is no limit's.
const PAUSES: usize = 0;

/// Makes the key of a pause out of that of what is paused.
const PAUSED: [u64; 2] = [
    u64::from_be_bytes(*b"is pause"),
    u64::from_be_bytes(*b"d for us"),
];

/// Why a state cannot be written now.
#[derive(Clone, Copy, Debug)]
enum Unsettled {
    /// The lock cannot be had.
    Busy,
    /// The clock is to be read again first.
    Stale,
    /// The file does not hold what was written there.
    Damaged,
}

/// In so many calls it is looked once whether the file was removed.
const SELDOM: u64 = 1 << 10;

/// What a reading of the clock may be older than: a state of another edition, and where it was seen; or, at a limit's
/// own bucket and without a stamp, the horizon.
type Met = SmallVec<[(*const Word, Stamped); 4]>;

thread_local! {
    /// What this thread met last: before it read the clock again.
    static MET: RefCell<Met> = const { RefCell::new(SmallVec::new_const()) };
}

/// When a call is decided.
struct Moment {
    now: u64,
    /// What the thread had seen before it read the clock.
    met: Met,
}

/// So many things are kept in mind: more than a call has limits.
const MOST_MET: usize = 64;

impl Moment {
    fn new(now: u64) -> Self {
        let met = MET.with_borrow(Met::clone);
        Self { now, met }
    }

    /// Goes on if the thread had seen this before it read the clock; else it is to read it again.
    fn is_after(&self, word: &Word, seen: Stamped) -> Result<(), Unsettled> {
        let met = (std::ptr::from_ref(word), seen);
        if self.met.contains(&met) {
            return Ok(());
        }
        MET.with_borrow_mut(|all| {
            if all.len() == MOST_MET {
                all.clear();
            }
            all.push(met);
        });
        Err(Unsettled::Stale)
    }
}

/// Whether this may come after `shm:`; opens nothing.
#[cfg(feature = "config")]
pub(crate) fn check(rest: &str) -> Result<(), ConfigError> {
    Url::parse(rest).map(|_| ())
}

/// A store that is open.
#[derive(Debug)]
pub(crate) struct Store {
    file: Arc<File>,
    /// By how much the clock is ahead of the host's.
    ahead: i64,
}

impl Store {
    /// Opens what comes after `shm:`, or makes it.
    pub(crate) fn open(rest: &str) -> Result<Self, ConfigError> {
        let url = Url::parse(rest)?;
        let ahead = time::ahead().map_err(|found| {
            let allowed = "used where the time since the host's start can be told";
            ConfigError::new("store", allowed, found)
        })?;
        let file = Arc::new(File::open(&url)?);
        Ok(Self { file, ahead })
    }

    /// What the keys of all processes are made with.
    pub(crate) fn secret(&self) -> Secret {
        Secret::of(self.file.secret())
    }

    /// The host's time since it was started.
    pub(crate) fn clock(&self) -> Clock {
        Clock::Boot(self.ahead)
    }

    /// The buckets of a limit: as they are, or full where nobody had such a limit.
    pub(crate) fn buckets(
        &self,
        (name, limit, per): (&str, &Limit, &[&str]),
        bucket: Bucket,
        now: &dyn Fn() -> u64,
    ) -> Result<Buckets, ConfigError> {
        let file = &self.file;
        let me = Process::own();
        let locked = file.lock_patiently();
        let locked = locked.map_err(|refused| refused.of(file.path()))?;
        let identity = self.identity(name, per);
        let named = self.named(name);
        let known = file
            .next_edition()
            .map_err(|refused| refused.of(file.path()))?;
        let editions = file.editions()[..known].iter().enumerate();
        let mine = || {
            let mine = editions
                .clone()
                .filter(|(_, one)| pair(&one.identity) == identity);
            mine.map(|(number, edition)| (number, edition.bucket()))
        };
        let first = mine().next().map(|(number, _)| number);
        let same = mine().find(|(_, other)| other.as_ref() == Some(&bucket));
        let edition = same.map_or(known, |(number, _)| number);
        if edition == known {
            let label = Label::new(name, per);
            self.publish(known, first, limit, &label, (named, identity))?;
        }
        let whole = bucket.price(limit.capacity());
        let time_to_fill = whole.map_or(0, |whole| nanos(bucket.wait(bucket.empty(0), 0, whole)));
        let longest = &file.header().longest_fill;
        longest.fetch_max(time_to_fill, Ordering::Relaxed);
        let buckets = Buckets {
            bucket,
            file: Arc::clone(file),
            edition,
            first: first.unwrap_or(edition),
            split: !per.is_empty(),
            identity,
            time_to_fill,
            held: AtomicBool::new(false),
            pooled: AtomicU8::new(0),
            counts: Counts::new(file, &locked, edition, me),
        };
        buckets.come_into_use(&locked, named, now);
        Ok(buckets)
    }

    /// Makes an edition known. Under the lock.
    fn publish(
        &self,
        number: usize,
        first: Option<usize>,
        limit: &Limit,
        label: &Label,
        (named, identity): (u64, [u64; 2]),
    ) -> Result<(), ConfigError> {
        let Some(edition) = self.file.editions().get(number) else {
            let allowed = format!("one with at most {} editions of limits", EDITIONS - 1);
            let given = format!(
                "a full one (remove it to start anew): '{}'",
                self.file.path().display()
            );
            return Err(ConfigError::new("store", allowed, given));
        };
        edition.set_bucket(limit.rate()?.fraction(), limit.capacity());
        edition.named.store(named, Ordering::Relaxed);
        edition.identity[0].store(identity[0], Ordering::Relaxed);
        edition.identity[1].store(identity[1], Ordering::Relaxed);
        let place = first.unwrap_or(number) as u64;
        edition.first.store(place, Ordering::Relaxed);
        edition.seal();
        label.write(&edition.label);
        if first.is_none() {
            let stamp = self.file.stamp(number);
            edition.own.store(Stamped { stamp, state: 0 });
        }
        let known = &self.file.header().editions;
        known.store(number as u64 + 1, Ordering::Release);
        Ok(())
    }

    fn named(&self, name: &str) -> u64 {
        let mut hasher = self.secret().hasher();
        hasher.write(name.as_bytes());
        hasher.finish()
    }

    /// No two limits differ in name or in what splits them and have the same bytes hashed.
    fn identity(&self, name: &str, per: &[&str]) -> [u64; 2] {
        let mut hasher = self.secret().hasher();
        for text in std::iter::once(&name).chain(per) {
            hasher.write(&(text.len() as u64).to_le_bytes());
            hasher.write(text.as_bytes());
        }
        Key::new(hasher.finish128().as_u128()).halves()
    }
}

/// The buckets of one limit.
#[derive(Debug)]
pub(crate) struct Buckets {
    bucket: Bucket,
    file: Arc<File>,
    edition: usize,
    /// The edition that holds what all editions of the limit have in common.
    first: usize,
    split: bool,
    identity: [u64; 2],
    /// In nanoseconds.
    time_to_fill: u64,
    /// Whether some wait in this process.
    held: AtomicBool,
    pooled: AtomicU8,
    counts: Counts,
}

impl Buckets {
    #[inline]
    pub(crate) fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    fn shared(&self) -> &Edition {
        &self.file.editions()[self.first]
    }

    #[inline]
    fn own(&self) -> &Word {
        &self.shared().own
    }

    /// A key that only this limit's buckets have.
    #[inline]
    fn key(&self, key: Key) -> [u64; 2] {
        xor(key.halves(), self.identity)
    }

    /// Their place in an order of all that are of one store.
    pub(crate) fn order(&self) -> u64 {
        self.first as u64
    }

    /// Draws from the bucket of a call, if it has one that nobody is changing: the state after an admitted
    /// call, or else the one that refused it.
    #[inline]
    pub(crate) fn draw(
        &self,
        key: Option<Key>,
        now: Reached<'_>,
        price: Price,
    ) -> Option<Result<u64, u64>> {
        let (word, mut seen) = match key {
            None => (self.own(), self.own().load()),
            Some(key) => cells::find(self.file.cells(), self.key(key))?,
        };
        let stamp = seen.stamp;
        loop {
            if seen.stamp != stamp || !self.is_mine(seen) {
                return None;
            }
            let Some(next) = Bucket::draw(seen.state, now, price) else {
                return Some(Err(seen.state));
            };
            match word.swap(seen, seen.with_state(next)) {
                Ok(()) => return Some(Ok(next)),
                Err(newer) => seen = newer,
            }
        }
    }

    #[inline]
    fn is_mine(&self, seen: Stamped) -> bool {
        seen.edition() == self.edition && !seen.is_frozen()
    }

    /// The same bucket's state under this edition, by a time at which nobody had drawn more.
    ///
    /// None where nobody knows its edition.
    fn carried(&self, seen: Stamped, now: u64) -> Option<Stamped> {
        if seen.edition() == self.edition {
            return Some(seen);
        }
        let old = self.file.bucket(seen.edition())?;
        let state = self.bucket.carry(seen.state, old, now);
        Some(seen.carried(self.edition, state))
    }

    /// The same, of a word, to be written there.
    ///
    /// A reading of the clock that is older than the state will not do: what was drawn in between would have
    /// the time since that reading to come back in, at a rate that may be higher. So a thread that meets a state of
    /// another edition reads the clock again, and carries the state if it is still the same.
    fn carried_at(&self, word: &Word, seen: Stamped, at: &Moment) -> Result<Stamped, Unsettled> {
        let carried = self.carried(seen, at.now).ok_or(Unsettled::Damaged)?;
        if carried != seen {
            at.is_after(word, seen)?;
        }
        Ok(carried)
    }

    /// What a call's bucket holds, or would if it had one; changes nothing. Not where the clock is to be read again.
    ///
    /// Where somebody is changing it, that is what it holds before.
    pub(crate) fn look(&self, key: Option<Key>, now: u64) -> Result<u64, Moved> {
        self.look_at(key, &Moment::new(now))
    }

    fn look_at(&self, key: Option<Key>, at: &Moment) -> Result<u64, Moved> {
        let own = || self.state(self.own().load(), at.now);
        let Some(key) = key.map(|key| self.key(key)) else {
            return Ok(own());
        };
        match cells::find(self.file.cells(), key) {
            Some((_, seen)) => Ok(self.state(seen, at.now)),
            None => Ok(self.full(at).map_err(|_| Moved)?.max(own())),
        }
    }

    /// A state in this edition's units. One of an edition that nobody knows is empty for ever.
    fn state(&self, seen: Stamped, now: u64) -> u64 {
        let carried = self.carried(seen.thawed(), now);
        carried.map_or(crate::bucket::MAX_STATE, |carried| carried.state)
    }

    /// The state of a full bucket that is made now.
    ///
    /// Since another one may have been full, and gave up its cell, by a later reading of the clock than the
    /// caller's, the clock is then read again.
    fn full(&self, at: &Moment) -> Result<u64, Unsettled> {
        let horizon = self.file.header().horizon.load(Ordering::Acquire);
        let horizon = horizon.min(MAX_NANOS);
        if horizon > at.now {
            let (stamp, state) = (0, horizon);
            at.is_after(self.own(), Stamped { stamp, state })?;
        }
        Ok(self.bucket.reached(horizon).floor())
    }

    /// What a cell holds, under this edition and once nobody has it frozen; none where it has become another
    /// key's.
    fn settled(
        &self,
        word: &Word,
        first: Stamped,
        at: &Moment,
    ) -> Result<Option<Stamped>, Unsettled> {
        let (mut seen, mut spins) = (first, 0);
        while seen.is_of(first) {
            if seen.is_frozen() {
                spins += 1;
                if spins < SPINS {
                    spin_loop();
                    seen = word.load();
                } else {
                    // Whoever froze it is done, or has died.
                    let locked = self.file.lock().ok_or(Unsettled::Busy)?;
                    seen = thawed(word, &locked);
                }
                continue;
            }
            let carried = self.carried_at(word, seen, at)?;
            if carried == seen {
                return Ok(Some(seen));
            }
            match word.swap(seen, carried) {
                Ok(()) => return Ok(Some(carried)),
                Err(newer) => seen = newer,
            }
        }
        Ok(None)
    }

    /// A call's bucket, made where it has none, frozen until it is written.
    fn freeze(
        &self,
        key: Option<Key>,
        at: &Moment,
        locked: &Locked<'_>,
    ) -> Result<Frozen<'_>, Unsettled> {
        let (word, floor) = self.find_or_make(key, at, locked)?;
        loop {
            let seen = thawed(word, locked);
            let carried = self.carried_at(word, seen, at)?;
            if word.swap(seen, carried.frozen()).is_ok() {
                return Ok(Frozen {
                    word,
                    seen: carried,
                    floor,
                });
            }
        }
    }

    /// A call's bucket, and what its state counts as at least.
    ///
    /// Where there is no room for one it is the one that all share who have none.
    fn find_or_make(
        &self,
        key: Option<Key>,
        at: &Moment,
        locked: &Locked<'_>,
    ) -> Result<(&Word, u64), Unsettled> {
        let own = self.own();
        let Some(key) = key.map(|key| self.key(key)) else {
            return Ok((own, 0));
        };
        let cells = self.file.cells();
        if let Some((word, _)) = cells::find(cells, key) {
            return Ok((word, 0));
        }
        let full = self.full(at)?;
        let pooled = self.carried_at(own, thawed(own, locked), at)?;
        let state = full.max(pooled.state);
        let stamp = self.file.stamp(self.edition);
        if let Some(word) = self.insert(key, Stamped { stamp, state }, at.now) {
            self.file.is_removed();
            return Ok((word, 0));
        }
        if self.pooled.load(Ordering::Relaxed) == 0 {
            self.pooled.store(memory::POOLED, Ordering::Relaxed);
        }
        Ok((own, full))
    }

    /// Gives a key a cell, if there is room for it. Under the lock.
    fn insert(&self, key: [u64; 2], first: Stamped, now: u64) -> Option<&Word> {
        let header = self.file.header();
        let giving_up = || {
            header.horizon.fetch_max(now, Ordering::AcqRel);
        };
        let worthless = |seen| self.is_worthless(seen, now);
        cells::insert(self.file.cells(), key, first, worthless, giving_up)
    }

    /// Whether a bucket is full, or a pause is over for all that may have asked for it.
    fn is_worthless(&self, seen: Stamped, now: u64) -> bool {
        if seen.edition() == PAUSES {
            let longest = self.file.header().longest_fill.load(Ordering::Relaxed);
            return seen.state.saturating_add(longest) < now;
        }
        let bucket = self.file.bucket(seen.edition());
        bucket.is_some_and(|bucket| seen.state <= bucket.reached(now).floor())
    }

    /// Whether somebody else is to be asked before a draw.
    #[inline]
    pub(crate) fn is_held(&self, now: u64) -> bool {
        self.held.load(Ordering::Relaxed) || self.has_pauses(now)
    }

    pub(crate) fn hold(&self, held: bool) {
        if self.held.load(Ordering::Relaxed) != held {
            self.held.store(held, Ordering::Relaxed);
        }
    }

    /// Whether there are pauses that matter still.
    #[inline]
    pub(crate) fn has_pauses(&self, now: u64) -> bool {
        now < self.shared().held_until.load(Ordering::Relaxed)
    }

    /// Lets nobody draw until then: from all buckets, or from those of a part.
    pub(crate) fn pause(&self, part: Option<Key>, until: u64, now: u64) {
        let shared = self.shared();
        let paused = part.is_some_and(|part| self.pause_part(part, until, now));
        if !paused {
            shared.until.fetch_max(until, Ordering::AcqRel);
        }
        let held_until = until.saturating_add(self.time_to_fill).saturating_add(1);
        shared.held_until.fetch_max(held_until, Ordering::AcqRel);
    }

    /// Whether there was a cell for it.
    fn pause_part(&self, part: Key, until: u64, now: u64) -> bool {
        let Some(_locked) = self.file.lock() else {
            return false;
        };
        let key = xor(self.key(part), PAUSED);
        let cells = self.file.cells();
        let stamp = self.file.stamp(PAUSES);
        let first = Stamped {
            stamp,
            state: until,
        };
        match cells::find(cells, key) {
            Some((word, seen)) => word.store(seen.with_state(seen.state.max(until))),
            None => {
                return self.insert(key, first, now).is_some();
            }
        }
        true
    }

    /// The pause of a part, where it matters still.
    pub(crate) fn paused(&self, part: Option<Key>, now: u64) -> Option<Pause> {
        if !self.has_pauses(now) {
            return None;
        }
        let all = self.shared().until.load(Ordering::Acquire);
        let part = part.and_then(|part| {
            let key = xor(self.key(part), PAUSED);
            cells::find(self.file.cells(), key)
        });
        let until = part.map_or(all, |(_, seen)| seen.state.max(all));
        let floor = self.bucket.empty(until.min(MAX_NANOS));
        let matters = until > 0 && floor > self.bucket.reached(now).floor();
        matters.then_some(Pause { until, floor })
    }

    /// The whole tokens in the one bucket, and how many keys have one that is not full; changes nothing.
    pub(crate) fn peek(&self, now: u64) -> (u64, Option<usize>) {
        self.file.is_removed();
        let floor = self.paused(None, now).map_or(0, |pause| pause.floor);
        let state = self.state(self.own().load(), now).max(floor);
        let missing = self.bucket.reached(now).missing(state);
        let kept = self.split.then(|| self.kept(now));
        (self.bucket.fill(missing).tokens(), kept)
    }

    fn kept(&self, now: u64) -> usize {
        let cells = self.file.cells().iter().map(|cell| cell.word.load());
        let mine = cells.filter(|seen| self.is_of(self.first, *seen));
        let spent = mine.filter(|seen| {
            let bucket = self.file.bucket(seen.edition());
            bucket.is_some_and(|bucket| seen.state > bucket.reached(now).floor())
        });
        spent.count()
    }

    /// Whether it is the bucket of a key, of the limit whose first edition has this number.
    fn is_of(&self, first: usize, seen: Stamped) -> bool {
        let edition = seen.has_key().then(|| seen.edition());
        let edition = edition.filter(|&edition| edition != PAUSES);
        let edition = edition.and_then(|edition| self.file.editions().get(edition));
        edition.is_some_and(|edition| edition.first.load(Ordering::Relaxed) == first as u64)
    }

    #[inline]
    pub(crate) fn count(&self, admitted: bool) {
        if let Some(row) = self.counts.row(&self.file, self.edition) {
            let count = if admitted {
                &row.admitted
            } else {
                &row.rejected
            };
            // A limit that nothing splits has no other occasion to look.
            if count.fetch_add(1, Ordering::Relaxed) % SELDOM == SELDOM - 1 {
                self.file.is_removed();
            }
        }
    }

    pub(crate) fn count_waiting(&self, waiting: usize) {
        if let Some(row) = self.counts.row(&self.file, self.edition) {
            row.waiting.store(waiting as u64, Ordering::Relaxed);
        }
    }

    /// Counts no more. Whoever knows these buckets from before still draws from them.
    pub(crate) fn close(&self) {
        self.counts.give_up(&self.file);
    }

    /// Whether a key found no place for a bucket of its own; says so only once.
    pub(crate) fn was_pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed) == memory::POOLED
            && self.pooled.swap(memory::TOLD, Ordering::Relaxed) == memory::POOLED
    }

    /// Puts the edition in force: what the buckets hold is under it from now on, whoever touches them.
    ///
    /// Where other fields split the limit before, nothing tells which of the old buckets a key drew from: all
    /// start as the emptiest.
    fn come_into_use(&self, _locked: &Locked<'_>, named: u64, now: &dyn Fn() -> u64) {
        let used = |edition: &Edition| edition.used.load(Ordering::Relaxed);
        let all = self.file.editions();
        let others = all.iter().enumerate().filter(|(_, edition)| {
            edition.named.load(Ordering::Relaxed) == named
                && pair(&edition.identity) != self.identity
        });
        let last = others.max_by_key(|(_, other)| used(other));
        let last = last.filter(|(_, other)| used(other) > used(self.shared()));
        if let Some((number, other)) = last {
            self.start_as_the_emptiest(number, &other.own, now);
        } else if self.own().load().edition() != self.edition {
            // The limit's own last, since it tells whether this was done.
            self.words_of(self.first)
                .chain([self.own()])
                .for_each(|word| self.lift(word, 0, now));
        }
        let latest = all.iter().map(used).max().unwrap_or(0);
        let next = latest.saturating_add(1);
        self.shared().used.store(next, Ordering::Relaxed);
    }

    /// As the emptiest of the buckets whose first edition has this number, or of those there were before.
    ///
    /// Whoever dies in between has made no bucket fuller, and the next one begins anew.
    fn start_as_the_emptiest(&self, other: usize, own: &Word, now: &dyn Fn() -> u64) {
        let old = self.words_of(other).chain(self.words_of(self.first));
        let states = old.chain([own]).map(|word| {
            let seen = word.load();
            self.carried(seen, now()).map_or(0, |carried| carried.state)
        });
        self.lift(self.own(), states.max().unwrap_or(0), now);
        // Keys without a cell start as the limit's own bucket.
        for word in self.words_of(self.first) {
            self.lift(word, 0, now);
            let seen = word.load();
            if self.is_mine(seen) && seen.state <= self.own().load().state {
                // Not where somebody draws from it at this moment.
                let _ = word.swap(seen, Stamped::UNUSED);
            }
        }
    }

    /// Puts a bucket under this edition, no fuller than this.
    fn lift(&self, word: &Word, least: u64, now: &dyn Fn() -> u64) {
        let first = word.load();
        let mut seen = first;
        while seen.is_of(first)
            && let Some(carried) = self.carried(seen, now())
            && let Err(newer) = word.swap(seen, carried.with_state(carried.state.max(least)))
        {
            seen = newer;
        }
    }

    /// The buckets of keys, of the limit whose first edition has this number.
    fn words_of(&self, first: usize) -> impl Iterator<Item = &Word> {
        let words = self.file.cells().iter().map(|cell| &cell.word);
        words.filter(move |word| self.is_of(first, word.load()))
    }
}

impl Drop for Buckets {
    fn drop(&mut self) {
        self.close();
    }
}

fn xor(one: [u64; 2], other: [u64; 2]) -> [u64; 2] {
    [one[0] ^ other[0], one[1] ^ other[1]]
}

/// A cell that nobody else draws from, and what it holds.
struct Frozen<'a> {
    word: &'a Word,
    seen: Stamped,
    /// No bucket stands lower.
    floor: u64,
}

/// What a call finds in a bucket, which counts as at least so empty.
fn seen<'a>(draw: &Draw<'a>, state: u64, floor: u64) -> Seen<'a> {
    Seen {
        word: None,
        bucket: draw.bucket,
        reached: draw.reached,
        price: draw.price,
        state,
        floor: draw.floor.max(floor),
    }
}

/// Draws from all limits of a call, or from none.
pub(crate) fn draw_all(draws: &[Draw<'_>], now: u64) -> Result<Verdict, Moved> {
    let decided = draw_all_at(draws, &Moment::new(now));
    if decided.is_ok() {
        MET.with_borrow_mut(Met::clear);
    }
    decided
}

fn draw_all_at(draws: &[Draw<'_>], at: &Moment) -> Result<Verdict, Moved> {
    let shared = draws.iter().filter_map(|draw| Some((draw, draw.shared()?)));
    let looked = shared.map(|(draw, buckets)| {
        let state = buckets.look_at(draw.key, at)?;
        Ok(seen(draw, state, 0))
    });
    let looked = looked.collect::<Result<SmallVec<[_; 4]>, Moved>>()?;
    if let Some(refused) = memory::refusal(&looked, at.now) {
        return Ok(refused);
    }
    let verdict = match draws {
        [only] => draw_one(only, at),
        _ => Ok(None),
    };
    let verdict = verdict.and_then(|one| one.map_or_else(|| charge(draws, at), Ok));
    verdict.or_else(|unsettled| match unsettled {
        Unsettled::Stale => Err(Moved),
        Unsettled::Busy => Ok(Verdict::Unavailable),
        Unsettled::Damaged => {
            let shared = draws.iter().find_map(Draw::shared);
            shared.inspect(|buckets| buckets.file.tell_damaged());
            Ok(Verdict::Unavailable)
        }
    })
}

/// Draws from the only limit of a call; none where the call has no bucket there.
fn draw_one(draw: &Draw<'_>, at: &Moment) -> Result<Option<Verdict>, Unsettled> {
    let Some(buckets) = draw.shared() else {
        return Ok(None);
    };
    loop {
        let known = match draw.key() {
            None => Some((buckets.own(), buckets.own().load())),
            Some(key) => cells::find(buckets.file.cells(), buckets.key(key)),
        };
        let Some((word, first)) = known else {
            return Ok(None);
        };
        let Some(found) = buckets.settled(word, first, at)? else {
            if draw.key().is_none() {
                // Nobody ever takes this one away.
                return Err(Unsettled::Damaged);
            }
            continue;
        };
        let found_there = seen(draw, found.state, 0);
        let Some(next) = found_there.next() else {
            return Ok(memory::refusal(&[found_there], at.now));
        };
        if word.swap(found, found.with_state(next)).is_ok() {
            return Ok(Some(Verdict::Admitted(found_there.fill(next))));
        }
    }
}

/// Freezes all buckets of a call, finds that all admit, and writes what follows.
fn charge(draws: &[Draw<'_>], at: &Moment) -> Result<Verdict, Unsettled> {
    let shared: SmallVec<[_; 4]> = draws.iter().filter_map(Draw::shared).collect();
    let file = shared.first().map(|buckets| &buckets.file);
    let locked = file.and_then(|file| file.lock()).ok_or(Unsettled::Busy)?;
    locked.freezing(true);
    let mut frozen: SmallVec<[(Frozen<'_>, Seen<'_>); 4]> = SmallVec::new();
    let mut unsettled = None;
    for (draw, buckets) in draws.iter().zip(shared) {
        match buckets.freeze(draw.key(), at, &locked) {
            Ok(bucket) => {
                let seen = seen(draw, bucket.seen.state, bucket.floor);
                frozen.push((bucket, seen));
            }
            // All that are stale are seen to at once, or two processes could undo each other's for ever.
            Err(why) => unsettled = Some(why),
        }
    }
    let seen: SmallVec<[_; 4]> = frozen.iter().map(|(_, seen)| *seen).collect();
    let refused = memory::refusal(&seen, at.now);
    let admits = unsettled.is_none() && refused.is_none();
    let mut tightest = None;
    for (bucket, seen) in &frozen {
        let next = seen.next().filter(|_| admits);
        let state = next.unwrap_or(bucket.seen.state);
        bucket.word.store(bucket.seen.with_state(state));
        tightest = Some(seen.fill(state).tighter(tightest));
    }
    locked.freezing(false);
    match unsettled {
        Some(why) => Err(why),
        None => refused
            .or(tightest.map(Verdict::Admitted))
            .ok_or(Unsettled::Busy),
    }
}
