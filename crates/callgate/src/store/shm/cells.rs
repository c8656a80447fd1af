//! The atomic cells: 32 bytes a key, in a table that never moves anything.
//!
//! A state belongs to a stamp, and both change in one compare-and-swap of 128 bits. A stamp says under which
//! edition of a limit the state was written, and has a number that is never used twice. So a swap cannot
//! succeed on a cell that meanwhile has another key, or whose state was converted.
//!
//! A key lives in one of two blocks of [`BLOCK`] cells, in the one that had more room when it came: so a table
//! can be nearly full before a key finds none (Y. Azar et al., "Balanced Allocations", 1999). A cell that was
//! used once is never free again, so a search of a block is over where it meets a free one. Only
//! whoever holds the file's lock gives a cell another key, in three steps, each of which leaves a table
//! that is right.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use portable_atomic::AtomicU128;

#[cfg(loom)]
use super::AtomicU128;

/// How many cells are searched together; a table is a multiple of it.
pub(super) const BLOCK: usize = if cfg!(loom) { 2 } else { 16 };

/// How many editions there may be, with the one that no limit has.
pub(super) const EDITIONS: usize = 1 << EDITION_BITS;

const EDITION_BITS: u32 = 12;

/// A call under several limits is about to change the state, which may only grow.
const FROZEN: u64 = 1 << 63;

/// Has no key at the moment.
const USED: u64 = 1;

/// A stamp and the state that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamped {
    pub(super) stamp: u64,
    pub(super) state: u64,
}

impl Stamped {
    const FREE: Self = Self { stamp: 0, state: 0 };
    /// Of no key, after one.
    pub(super) const UNUSED: Self = Self {
        stamp: USED,
        state: 0,
    };

    pub(super) fn of(bits: u128) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (stamp, state) = ((bits >> 64) as u64, bits as u64);
        Self { stamp, state }
    }

    fn bits(self) -> u128 {
        u128::from(self.stamp) << 64 | u128::from(self.state)
    }

    pub(super) fn with_state(self, state: u64) -> Self {
        Self { state, ..self }
    }

    pub(super) fn has_key(self) -> bool {
        self.stamp > USED
    }

    pub(super) fn is_frozen(self) -> bool {
        self.stamp & FROZEN != 0
    }

    pub(super) fn frozen(self) -> Self {
        let stamp = self.stamp | FROZEN;
        Self { stamp, ..self }
    }

    pub(super) fn thawed(self) -> Self {
        let stamp = self.stamp & !FROZEN;
        Self { stamp, ..self }
    }

    /// The number of the edition under which the state was written.
    #[expect(clippy::cast_possible_truncation, reason = "12 bits")]
    pub(super) fn edition(self) -> usize {
        (self.stamp & (EDITIONS as u64 - 1)) as usize
    }

    /// The same key's under another edition.
    pub(super) fn carried(self, edition: usize, state: u64) -> Self {
        let stamp = self.stamp & !(EDITIONS as u64 - 1) | edition as u64;
        Self { stamp, state }
    }

    /// Whether both are of the same use of a cell.
    pub(super) fn is_of(self, other: Self) -> bool {
        let use_of = |stamped: Self| (stamped.stamp & !FROZEN) >> EDITION_BITS;
        use_of(self) == use_of(other) && self.has_key() && other.has_key()
    }
}

/// The stamp of the cell's `number`th use, under an edition.
pub(super) fn stamp(number: u64, edition: usize) -> u64 {
    (number << EDITION_BITS | edition as u64) & !FROZEN
}

/// Holds a stamp and its state.
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
#[repr(transparent)]
pub(super) struct Word(AtomicU128);

impl Word {
    #[inline]
    pub(super) fn load(&self) -> Stamped {
        Stamped::of(self.0.load(Ordering::Acquire))
    }

    /// Swaps what was seen; or what is there now instead.
    #[inline]
    pub(super) fn swap(&self, seen: Stamped, next: Stamped) -> Result<(), Stamped> {
        let (seen, next) = (seen.bits(), next.bits());
        let swapped = self
            .0
            .compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire);
        swapped.map(|_| ()).map_err(Stamped::of)
    }

    /// For those who hold the lock, where nobody else writes: no cell that is used, or none that is frozen.
    pub(super) fn store(&self, next: Stamped) {
        self.0.store(next.bits(), Ordering::Release);
    }
}

#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(32))]
pub(super) struct Cell {
    pub(super) key: [AtomicU64; 2],
    pub(super) word: Word,
}

impl Cell {
    fn key_now(&self) -> [u64; 2] {
        [&self.key[0], &self.key[1]].map(|half| half.load(Ordering::Acquire))
    }

    /// What it holds, if it is this key's.
    #[inline]
    fn of(&self, key: [u64; 2], seen: Stamped) -> Option<Stamped> {
        let mut seen = seen;
        loop {
            if !seen.has_key() || self.key_now() != key {
                return None;
            }
            // The key was this use's if the cell was of no other before it and after it.
            let again = self.word.load();
            if again.is_of(seen) {
                return Some(again);
            }
            seen = again;
        }
    }
}

/// The two blocks in which this key may be.
#[inline]
fn blocks(cells: &[Cell], key: [u64; 2]) -> [&[Cell]; 2] {
    let blocks = (cells.len() / BLOCK) as u128;
    key.map(|half| {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the number of blocks"
        )]
        let block = ((u128::from(half) * blocks) >> 64) as usize;
        &cells[block * BLOCK..(block + 1) * BLOCK]
    })
}

/// The cell of this key, and what it holds.
#[inline]
pub(super) fn find(cells: &[Cell], key: [u64; 2]) -> Option<(&Word, Stamped)> {
    for block in blocks(cells, key) {
        for cell in block {
            let seen = cell.word.load();
            if seen == Stamped::FREE {
                break;
            }
            if let Some(seen) = cell.of(key, seen) {
                return Some((&cell.word, seen));
            }
        }
    }
    None
}

/// Gives a key that has none a cell: one that has no key, or where there is none one whose state is `worthless`,
/// after `giving_up` was told. Under the lock.
///
/// Keys whose buckets are full are likely to come again: they keep their cells while there are others.
pub(super) fn insert(
    cells: &[Cell],
    key: [u64; 2],
    first: Stamped,
    worthless: impl Fn(Stamped) -> bool,
    giving_up: impl Fn(),
) -> Option<&Word> {
    let is_free = |seen: Stamped| !seen.has_key();
    let is_worthless = |seen: Stamped| seen.has_key() && !seen.is_frozen() && worthless(seen);
    insert_where(cells, key, first, is_free, || {})
        .or_else(|| insert_where(cells, key, first, is_worthless, giving_up))
}

/// The same, in the block where there is `room` in more cells; `taking` is told before.
fn insert_where(
    cells: &[Cell],
    key: [u64; 2],
    first: Stamped,
    room: impl Fn(Stamped) -> bool,
    taking: impl Fn(),
) -> Option<&Word> {
    let rooms = |block: &[Cell]| {
        let rooms = block.iter().filter(|cell| room(cell.word.load()));
        rooms.count()
    };
    let [mut one, mut other] = blocks(cells, key);
    if rooms(one) < rooms(other) {
        (one, other) = (other, one);
    }
    for cell in one.iter().chain(other) {
        let seen = cell.word.load();
        if !room(seen) {
            continue;
        }
        taking();
        // Somebody may have drawn from it at this moment.
        if cell.word.swap(seen, Stamped::UNUSED).is_err() {
            continue;
        }
        // Whoever sees a half of the new key also sees that the cell was given up.
        cell.key[0].store(key[0], Ordering::Release);
        cell.key[1].store(key[1], Ordering::Release);
        cell.word.store(first);
        return Some(&cell.word);
    }
    None
}
