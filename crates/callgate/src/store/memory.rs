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
    pub(crate) fn draw(&self, now: Reached, price: Price) -> Result<u64, u64> {
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
