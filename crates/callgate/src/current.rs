//! The rules in force, for callers who may not wait for those who change them.
//!
//! A thread keeps the rules that it saw last. Whether they are still in force takes one load to find
//! out: a shared count of readers would cost each decision two writes to one cache line, and a lock
//! likewise. What a thread keeps, it keeps until it decides again or ends.

#![expect(
    clippy::inline_always,
    reason = "the way to a decision is as long as the decision"
)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::rules::Rules;

/// How many limiters' rules a thread keeps.
const KEPT: usize = 8;

thread_local! {
    static SEEN: [Cell<Option<Arc<Rules>>>; KEPT] = const { [const { Cell::new(None) }; KEPT] };
}

#[derive(Debug)]
pub(crate) struct Current {
    /// Of the rules in force.
    edition: AtomicU64,
    /// Which of the places a thread keeps them in.
    place: usize,
    rules: Mutex<Arc<Rules>>,
}

impl Current {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            place: usize::try_from(rules.edition % KEPT as u64).unwrap_or(0),
            edition: AtomicU64::new(rules.edition),
            rules: Mutex::new(Arc::new(rules)),
        }
    }

    /// Whether these are the rules in force.
    #[inline]
    pub(crate) fn is(&self, rules: &Rules) -> bool {
        rules.edition == self.edition.load(Ordering::Acquire)
    }

    /// The rules in force, to be kept when they are done with.
    ///
    /// Where somebody further up has them (a clock of the user's may ask the limiter), or the thread is
    /// about to end, there is nothing that was kept.
    #[inline(always)]
    pub(crate) fn take(&self) -> Arc<Rules> {
        match SEEN.try_with(|seen| seen[self.place % KEPT].take()) {
            Ok(Some(rules)) if self.is(&rules) => rules,
            _ => self.get(),
        }
    }

    /// Keeps rules for this thread's next call.
    #[inline(always)]
    pub(crate) fn keep(&self, rules: Arc<Rules>) {
        let _ = SEEN.try_with(|seen| seen[self.place % KEPT].set(Some(rules)));
    }

    #[cold]
    pub(crate) fn get(&self) -> Arc<Rules> {
        Arc::clone(&self.hold())
    }

    /// Waits until those that are being put in force are.
    #[cold]
    pub(crate) fn wait(&self) {
        drop(self.hold());
    }

    /// Holds the rules, so that nobody else changes them; the callers go on.
    pub(crate) fn hold(&self) -> MutexGuard<'_, Arc<Rules>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts other rules in force.
    pub(crate) fn replace(&self, mut held: MutexGuard<'_, Arc<Rules>>, rules: Rules) {
        let edition = rules.edition;
        *held = Arc::new(rules);
        self.edition.store(edition, Ordering::Release);
    }
}
