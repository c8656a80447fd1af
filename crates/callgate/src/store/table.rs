//! The buckets of many keys: 24 bytes each, in shards that are locked one at a time.
//!
//! A key is a fingerprint of 128 bits, so a known one is found without an allocation and without
//! reading what it was made of. Shards are open addressing with linear probing (D. Knuth, The Art of
//! Computer Programming 3, 6.4), of any size and not only powers of two: four of five slots are
//! taken at most, and five of eight or so after a shard has grown, so a key takes 30 to 38 bytes.
//!
//! Whoever draws from a known bucket holds its shard for reading; only a new key locks it for
//! writing. Room is made by dropping full buckets, which is no loss: a key without a bucket is full. When
//! a shard grows, only those that have been full for a while; when it may grow no more, any.

use std::mem;
use std::ops::Deref;
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::memory::Moved;

const SHARDS: usize = if cfg!(loom) { 1 } else { 64 };

/// How many keys a shard has buckets for: a million in all shards, and some more, since they do not
/// fill up evenly.
const MOST_KEYS: usize = 1 << 14;

/// How many slots are searched for a full bucket when a shard holds that many.
const SEARCHED: usize = 16;

/// A fingerprint: two halves of 64 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key([u64; 2]);

impl Key {
    /// Marks a free slot.
    const NONE: Self = Self([0; 2]);

    pub(crate) fn new(fingerprint: u128) -> Self {
        // Nothing has the mark of a free slot.
        let halves = fingerprint.max(1);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        Self([(halves >> 64) as u64, halves as u64])
    }

    /// Both halves, for stores of other processes.
    #[cfg_attr(
        not(all(feature = "shm", target_os = "linux", not(loom))),
        expect(dead_code, reason = "there are none")
    )]
    pub(super) fn halves(self) -> [u64; 2] {
        self.0
    }

    #[expect(clippy::cast_possible_truncation, reason = "below 64")]
    fn shard(self) -> usize {
        (self.0[1] % SHARDS as u64) as usize
    }

    /// Where to look first among so many slots.
    #[expect(clippy::cast_possible_truncation, reason = "below `slots`")]
    fn home(self, slots: usize) -> usize {
        ((u128::from(self.0[0]) * slots as u128) >> 64) as usize
    }
}

#[derive(Debug)]
pub(crate) struct Table {
    shards: Box<[Locked]>,
}

/// A shard with its lock, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Locked(RwLock<Shard>);

#[derive(Debug)]
pub(crate) struct Shard {
    slots: Box<[Slot]>,
    kept: usize,
    most: usize,
    /// No bucket that was dropped stood higher. A caller with an old reading of the clock may find its
    /// bucket gone that is not full at that time: it starts from here.
    horizon: u64,
    /// Where to search for full buckets next.
    hand: usize,
    moved: bool,
}

#[derive(Debug)]
struct Slot {
    key: Key,
    word: AtomicU64,
}

pub(crate) type ReadShard<'a> = Held<RwLockReadGuard<'a, Shard>>;
pub(crate) type WriteShard<'a> = Held<RwLockWriteGuard<'a, Shard>>;

/// A shard that is held and has not moved.
pub(crate) struct Held<Guard>(Guard);

impl<Guard: Deref<Target = Shard>> Held<Guard> {
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<usize> {
        self.0.find(key).ok()
    }

    #[inline]
    pub(crate) fn word(&self, slot: usize) -> &AtomicU64 {
        &self.0.slots[slot].word
    }

    /// The state of a bucket that is made now, where a full one has this state.
    pub(crate) fn start(&self, full: u64) -> u64 {
        full.max(self.0.horizon)
    }
}

impl WriteShard<'_> {
    /// The slot of a key, made where it has none; none where there is no room either. Buckets at
    /// `full` or below are full, and those at `idle` or below have been so for a while.
    pub(crate) fn find_or_make(
        &mut self,
        key: Key,
        start: u64,
        full: u64,
        idle: u64,
    ) -> Option<usize> {
        let start = self.start(start);
        let shard = &mut *self.0;
        match shard.find(key) {
            Ok(slot) => Some(slot),
            Err(_) if !shard.make_room(full, idle) => None,
            Err(_) => Some(shard.insert(key, start)),
        }
    }
}

impl Table {
    pub(crate) fn new() -> Self {
        Self::of((0..SHARDS).map(|_| Shard::new(MOST_KEYS)))
    }

    /// A small one: so many keys in each shard.
    #[cfg(test)]
    pub(super) fn with_room_for(most: usize) -> Self {
        Self::of((0..SHARDS).map(|_| Shard::new(most)))
    }

    fn of(shards: impl Iterator<Item = Shard>) -> Self {
        Self {
            shards: shards.map(|shard| Locked(RwLock::new(shard))).collect(),
        }
    }

    #[inline]
    pub(crate) fn read(&self, key: Key) -> Result<ReadShard<'_>, Moved> {
        held(self.shards[key.shard()].read())
    }

    pub(crate) fn write(&self, key: Key) -> Result<WriteShard<'_>, Moved> {
        held(self.shards[key.shard()].write())
    }

    /// How many keys have a bucket.
    pub(crate) fn kept(&self) -> Result<usize, Moved> {
        let kept = |shard: &Locked| Ok(held(shard.read())?.0.kept);
        self.shards.iter().map(kept).sum()
    }

    /// A table with the same keys and what their states come to now, and the highest state of those
    /// that have none; this one is empty from then on. Buckets at what is `full` then or below are full.
    pub(crate) fn carry(
        &self,
        now: &dyn Fn() -> u64,
        full: impl Fn(u64) -> u64,
        carried: impl Fn(u64, u64) -> u64,
    ) -> (Self, u64) {
        let mut highest = 0;
        let shards = self.shards.iter().map(|shard| {
            let mut old = shard.write().leave();
            let now = now();
            old.rebuild(full(now));
            highest = highest.max(mem::take(&mut old.horizon));
            for slot in &old.slots {
                if slot.key != Key::NONE {
                    slot.word
                        .store(carried(slot.state(), now), Ordering::Relaxed);
                }
            }
            old
        });
        (Self::of(shards), highest)
    }

    /// Empties the table for good, and says what its highest state was.
    pub(crate) fn clear(&self) -> u64 {
        let highest = |shard: &Locked| {
            let old = shard.write().leave();
            let states = old.slots.iter().map(Slot::state);
            states.max().unwrap_or(0).max(old.horizon)
        };
        self.shards.iter().map(highest).max().unwrap_or(0)
    }
}

impl Locked {
    #[inline]
    fn read(&self) -> RwLockReadGuard<'_, Shard> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Shard> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn new(most: usize) -> Self {
        Self {
            slots: Box::default(),
            kept: 0,
            most,
            horizon: 0,
            hand: 0,
            moved: false,
        }
    }

    /// The slot of a key, or else the free one where it would go.
    #[inline]
    fn find(&self, key: Key) -> Result<usize, usize> {
        if self.slots.is_empty() {
            return Err(0);
        }
        let mut slot = key.home(self.slots.len());
        loop {
            let found = self.slots[slot].key;
            if found == key {
                return Ok(slot);
            }
            if found == Key::NONE {
                return Err(slot);
            }
            slot = self.after(slot);
        }
    }

    fn after(&self, slot: usize) -> usize {
        let next = slot + 1;
        if next == self.slots.len() { 0 } else { next }
    }

    /// Puts in a key that is not there, where there is room for it.
    fn insert(&mut self, key: Key, state: u64) -> usize {
        let (Ok(slot) | Err(slot)) = self.find(key);
        self.slots[slot].key = key;
        self.slots[slot].word.store(state, Ordering::Relaxed);
        self.kept += 1;
        slot
    }

    /// Whether one more key has room, made where there was none.
    ///
    /// While it may grow, buckets that were full just now are kept: their keys are likely to come again.
    fn make_room(&mut self, full: u64, idle: u64) -> bool {
        if self.kept < room(self.slots.len()) {
            return true;
        }
        if self.kept < self.most {
            self.rebuild(idle);
            return true;
        }
        self.drop_some(full)
    }

    /// Drops all buckets at `full` or below, and takes a size at which a quarter as many keys as are left
    /// fit in.
    fn rebuild(&mut self, full: u64) {
        let mut left = Vec::with_capacity(self.kept);
        for slot in self.slots.iter().filter(|slot| slot.key != Key::NONE) {
            match slot.state() {
                state if state > full => left.push((slot.key, state)),
                state => self.horizon = self.horizon.max(state),
            }
        }
        let keys = (left.len() + (left.len() / 4).max(1)).min(self.most);
        self.slots = (0..slots_for(keys)).map(|_| Slot::free()).collect();
        self.kept = 0;
        self.hand = 0;
        for (key, state) in left {
            self.insert(key, state);
        }
    }

    /// All that is in it; it is empty from then on, and sends callers away.
    fn leave(&mut self) -> Self {
        let left = Self {
            moved: true,
            ..Self::new(self.most)
        };
        mem::replace(self, left)
    }

    /// Drops full buckets from the next few slots; whether there were any.
    fn drop_some(&mut self, full: u64) -> bool {
        let before = self.kept;
        for _ in 0..SEARCHED {
            let slot = &self.slots[self.hand];
            let state = slot.state();
            if slot.key != Key::NONE && state <= full {
                self.horizon = self.horizon.max(state);
                self.remove(self.hand);
            } else {
                self.hand = self.after(self.hand);
            }
        }
        self.kept < before
    }

    /// Frees a slot, and moves those back that it had pushed on (Knuth's algorithm R).
    fn remove(&mut self, slot: usize) {
        let slots = self.slots.len();
        let (mut hole, mut next) = (slot, self.after(slot));
        while self.slots[next].key != Key::NONE {
            let from = |start: usize| (next + slots - start) % slots;
            if from(self.slots[next].key.home(slots)) >= from(hole) {
                self.slots.swap(hole, next);
                hole = next;
            }
            next = self.after(next);
        }
        self.slots[hole] = Slot::free();
        self.kept -= 1;
    }
}

impl Slot {
    fn free() -> Self {
        Self {
            key: Key::NONE,
            word: AtomicU64::new(0),
        }
    }

    /// Of a bucket that nobody else can draw from now.
    fn state(&self) -> u64 {
        self.word.load(Ordering::Relaxed)
    }
}

/// How many keys so many slots are for.
fn room(slots: usize) -> usize {
    slots * 4 / 5
}

/// The slots for so many keys.
fn slots_for(keys: usize) -> usize {
    (keys * 5).div_ceil(4)
}

#[inline]
fn held<Guard: Deref<Target = Shard>>(guard: Guard) -> Result<Held<Guard>, Moved> {
    if guard.moved {
        Err(Moved)
    } else {
        Ok(Held(guard))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// A key whose home is at this part of the slots, of 256; there are several for each.
    fn key(home: u8, number: u8) -> Key {
        let number = u64::from(number) + 1;
        Key([u64::from(home) << 56 | number, number * SHARDS as u64])
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// A caller asks for a key at this time, and draws so much if it has or gets a bucket.
        Draw {
            home: u8,
            number: u8,
            now: u64,
            units: u64,
        },
        Remove {
            home: u8,
            number: u8,
        },
        Rebuild {
            now: u64,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Homes at both ends, so that searches go round; times that go forth and back.
        let home = || prop_oneof![0..4_u8, 252..=255_u8, any::<u8>()];
        let step = prop_oneof![
            12 => (home(), 0..4_u8, 0..100_u64, 1..40_u64)
                .prop_map(|(home, number, now, units)| Step::Draw { home, number, now, units }),
            2 => (home(), 0..4_u8).prop_map(|(home, number)| Step::Remove { home, number }),
            1 => (0..60_u64).prop_map(|now| Step::Rebuild { now }),
        ];
        prop::collection::vec(step, 1..120)
    }

    /// A shard beside a map that keeps every key for ever. A state is a time here: up to it, a bucket is
    /// not full.
    struct Pair {
        shard: Shard,
        model: HashMap<(u64, u64), u64>,
    }

    impl Pair {
        fn run(&mut self, step: &Step) {
            match *step {
                Step::Draw {
                    home,
                    number,
                    now,
                    units,
                } => self.draw(key(home, number), now, units),
                Step::Remove { home, number } => {
                    if let Ok(slot) = self.shard.find(key(home, number)) {
                        self.shard.remove(slot);
                        self.model.remove(&id(key(home, number)));
                    }
                }
                Step::Rebuild { now } => self.shard.rebuild(now),
            }
            self.check(step);
        }

        fn draw(&mut self, key: Key, now: u64, units: u64) {
            let before = self.model.get(&id(key)).copied().unwrap_or(0);
            let known = self.shard.find(key).is_ok();
            let room = known || self.shard.kept < self.shard.most;
            let made = if known {
                true
            } else {
                self.shard.make_room(now, now)
            };
            if !made {
                assert!(!room, "room, and none was made");
                return;
            }
            let start = self.shard.horizon;
            let slot = self
                .shard
                .find(key)
                .unwrap_or_else(|_| self.shard.insert(key, start));
            let state = self.shard.slots[slot].state();
            // Never less than what was drawn, whenever its bucket was dropped: nothing is minted.
            assert!(state >= before, "{state} for {before}");
            let next = state.max(now) + units;
            self.shard.slots[slot].word.store(next, Ordering::Relaxed);
            self.model.insert(id(key), next);
        }

        fn check(&self, step: &Step) {
            let Shard {
                slots,
                kept,
                most,
                horizon,
                ..
            } = &self.shard;
            let full: Vec<_> = slots.iter().filter(|slot| slot.key != Key::NONE).collect();
            assert_eq!(full.len(), *kept);
            assert!(kept <= most && (*kept == 0 || *kept <= room(slots.len())));
            for slot in full {
                let found = self.shard.find(slot.key).expect("it is there");
                assert!(std::ptr::eq(&raw const slots[found], slot), "twice");
                assert_eq!(self.model.get(&id(slot.key)), Some(&slot.state()));
            }
            for (&(high, low), &state) in &self.model {
                if self.shard.find(Key([high, low])).is_err() {
                    assert!(state <= *horizon, "dropped above the horizon, by {step:?}");
                }
            }
        }
    }

    fn id(key: Key) -> (u64, u64) {
        (key.0[0], key.0[1])
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn a_shard_finds_what_a_map_does_and_drops_only_full_buckets(
            most in 1..24_usize,
            steps in steps(),
        ) {
            let mut pair = Pair { shard: Shard::new(most), model: HashMap::new() };
            for step in &steps {
                pair.run(step);
            }
        }

        #[test]
        fn what_is_carried_is_all_that_was_there_and_not_full(
            states in prop::collection::hash_map(any::<(u8, u8)>(), 1..100_u64, 0..60),
            full in 0..100_u64,
        ) {
            let old = Table::new();
            for (&(home, number), &state) in &states {
                let mut shard = old.write(key(home, number)).expect("not moved");
                prop_assert!(shard.find_or_make(key(home, number), state, 0, 0).is_some());
            }
            let (new, highest) = old.carry(&|| full, |full| full, |state, _| 2 * state);
            prop_assert_eq!(highest, states.values().copied().filter(|&state| state <= full).max().unwrap_or(0));
            for (&(home, number), &state) in &states {
                prop_assert!(old.read(key(home, number)).is_err(), "not told that it moved");
                let shard = new.read(key(home, number)).expect("not moved");
                let carried = shard.find(key(home, number));
                let carried = carried.map(|slot| shard.word(slot).load(Ordering::Relaxed));
                prop_assert_eq!(carried, (state > full).then_some(2 * state));
            }
            prop_assert!(old.kept().is_err());
            prop_assert_eq!(new.kept().expect("not moved"), states.values().filter(|&&state| state > full).count());
        }
    }

    #[test]
    fn a_full_table_makes_room_only_where_a_bucket_is_full() {
        let table = Table::with_room_for(4);
        let keys: Vec<_> = (0..5_u64).map(|number| Key([number << 60, 64])).collect();
        for (number, &key) in keys[..4].iter().enumerate() {
            let mut shard = table.write(key).expect("not moved");
            assert!(shard.find_or_make(key, 100 + number as u64, 0, 0).is_some());
        }
        let mut shard = table.write(keys[4]).expect("not moved");
        assert_eq!(shard.find_or_make(keys[4], 0, 99, 0), None);
        // The first of them is full now.
        assert!(shard.find_or_make(keys[4], 0, 100, 0).is_some());
        let left: Vec<_> = keys.iter().map(|&key| shard.find(key).is_some()).collect();
        assert_eq!(left, [false, true, true, true, true]);
        // Should it come with an old reading, it draws from no more than was left then.
        assert_eq!(shard.start(0), 100);
    }

    #[test]
    fn a_table_that_was_emptied_keeps_no_memory_and_says_what_was_highest() {
        let table = Table::new();
        for number in 0..200 {
            let key = key(number, number);
            let mut shard = table.write(key).expect("not moved");
            assert!(shard.find_or_make(key, number.into(), 0, 0).is_some());
        }
        assert_eq!(table.clear(), 199);
        for shard in &table.shards {
            let shard = shard.read();
            assert!(shard.moved && shard.slots.is_empty());
        }
    }

    #[test]
    fn no_key_has_the_mark_of_a_free_slot() {
        assert_ne!(Key::new(0), Key::NONE);
    }
}
