//! Tool names to the places of their limits, for a set of names that never changes.

#![expect(
    clippy::inline_always,
    reason = "a name without a limit costs little more than the call"
)]

use std::hash::{DefaultHasher, Hash, Hasher};

use rustc_hash::FxHasher;

/// A table of hashes alone, found by linear probing; at least three of four slots are free.
///
/// It answers with the only name that may be meant, for the caller to compare. That can then be
/// done while the processor waits for other things: reading the clock costs three look-ups.
#[derive(Debug)]
pub(crate) struct Names {
    seed: u64,
    slots: Box<[Option<Slot>]>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    hash: u64,
    index: usize,
}

impl Names {
    /// A table of these names, which are all different; each is at the place it has here.
    pub(crate) fn new(names: &[&str]) -> Self {
        // Two names with one hash are not to be expected, unless somebody made them: another seed
        // parts them.
        let mut seed = 0;
        loop {
            if let Some(slots) = fill(seed, names) {
                return Self { seed, slots };
            }
            seed += 1;
        }
    }

    /// The place of the name with this name's hash: no other name of the table can be equal to it.
    #[inline(always)]
    pub(crate) fn candidate(&self, name: &str) -> Option<usize> {
        let hash = hash(self.seed, name);
        let mut place = start(hash);
        loop {
            let slot = self.slots[place & (self.slots.len() - 1)]?;
            if slot.hash == hash {
                return Some(slot.index);
            }
            place += 1;
        }
    }
}

/// Whether two names are the same; those of 4 to 16 bytes, as most are, without calling `memcmp`.
#[inline]
pub(crate) fn same(one: &str, other: &str) -> bool {
    match (ends(one), ends(other)) {
        (Some(one_ends), Some(other_ends)) => one.len() == other.len() && one_ends == other_ends,
        _ => one == other,
    }
}

/// The first and the last bytes of a name of 4 to 16 bytes: with its length, all of it.
#[inline(always)]
fn ends(name: &str) -> Option<(u64, u64)> {
    let bytes = name.as_bytes();
    let long = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
    let short = |bytes: &[u8; 4]| u64::from(u32::from_le_bytes(*bytes));
    match bytes.len() {
        8..=16 => Some((long(bytes.first_chunk()?), long(bytes.last_chunk()?))),
        4..8 => Some((short(bytes.first_chunk()?), short(bytes.last_chunk()?))),
        _ => None,
    }
}

/// The table under this seed, or none where two names share a hash.
fn fill(seed: u64, names: &[&str]) -> Option<Box<[Option<Slot>]>> {
    let size = (names.len() * 4).next_power_of_two();
    let mut slots = vec![None; size].into_boxed_slice();
    for (index, name) in names.iter().enumerate() {
        let hash = hash(seed, name);
        let mut place = start(hash) & (size - 1);
        while let Some(Slot { hash: other, .. }) = slots[place] {
            if other == hash {
                return None;
            }
            place = (place + 1) & (size - 1);
        }
        slots[place] = Some(Slot { hash, index });
    }
    Some(slots)
}

#[inline(always)]
fn hash(seed: u64, name: &str) -> u64 {
    if seed > 0 {
        return slow_hash(seed, name);
    }
    if let Some((first, last)) = ends(name) {
        // One multiplication, by the golden ratio's fraction; its upper bits depend on all of both.
        let mixed = (first ^ last.rotate_left(29)).wrapping_add(name.len() as u64);
        return mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
    let mut hasher = FxHasher::default();
    hasher.write(name.as_bytes());
    hasher.finish()
}

/// `FxHasher` only adds a seed to what it made of the bytes, so two names that collide under one of
/// its seeds do under all of them.
#[cold]
fn slow_hash(seed: u64, name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seed, name).hash(&mut hasher);
    hasher.finish()
}

/// Where to look first; only the lower bits count.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower bits are what is wanted"
)]
fn start(hash: u64) -> usize {
    hash as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_were_made_to_collide_are_told_apart() {
        let names = [
            "search_000007435documents_public.Q4bpSS/_east_1__of_the_archives",
            "search_000007435documents_public.Q4bpSS/_west_2__of_the_archives",
            "another",
        ];
        assert_eq!(hash(0, names[0]), hash(0, names[1]), "no longer a test");
        let table = Names::new(&names);
        for (index, name) in names.iter().enumerate() {
            assert_eq!(table.candidate(name), Some(index), "{name}");
        }
        assert_eq!(table.candidate("a third"), None);
    }

    #[test]
    fn names_are_the_same_only_byte_for_byte() {
        let long = "abcdefghijklmnopqrstuvwxyz";
        for length in 0..long.len() {
            let name = &long[..length];
            assert!(same(name, name), "{name}");
            assert!(!same(name, &long[..=length]), "{name} and longer");
            for other in 0..length {
                let mut bytes = name.as_bytes().to_vec();
                bytes[other] = b'-';
                assert!(
                    !same(name, str::from_utf8(&bytes).unwrap()),
                    "{name} at {other}"
                );
            }
        }
    }
}
