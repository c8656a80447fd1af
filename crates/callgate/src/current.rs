//! The rules in force, for callers who may not wait for those who change them.
//!
//! The first rules live as long as the limiter does, so they are at hand until a reload. From then on a
//! thread keeps the rules that it saw last. Whether they are still in force takes one load to find
//! out: a shared count of readers would cost each decision two writes to one cache line, and a lock
//! likewise. What a thread keeps, it keeps until it decides again or ends.

#![expect(
    clippy::inline_always,
    reason = "the way to a decision is as long as the decision"
)]

use std::cell::Cell;
use std::ops::Deref;
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
    first: Rules,
    /// What came after the first.
    later: Mutex<Option<Arc<Rules>>>,
}

/// Rules that are, or were, in force.
#[derive(Clone, Debug)]
pub(crate) enum InForce<'a> {
    First(&'a Rules),
    Later(Arc<Rules>),
}

impl Deref for InForce<'_> {
    type Target = Rules;

    #[inline(always)]
    fn deref(&self) -> &Rules {
        match self {
            Self::First(rules) => rules,
            Self::Later(rules) => rules,
        }
    }
}

impl Current {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            edition: AtomicU64::new(rules.edition),
            first: rules,
            later: Mutex::new(None),
        }
    }

    /// Whether these are the rules in force.
    #[inline]
    pub(crate) fn is(&self, rules: &Rules) -> bool {
        rules.edition == self.edition.load(Ordering::Acquire)
    }

    /// The rules in force, to be kept when they are done with.
    #[inline(always)]
    pub(crate) fn take(&self) -> InForce<'_> {
        if self.is(&self.first) {
            return InForce::First(&self.first);
        }
        // Where somebody further up has them (a clock of the user's may ask the limiter), or the thread
        // is about to end, there is nothing that was kept.
        match SEEN.try_with(|seen| seen[self.place()].take()) {
            Ok(Some(rules)) if self.is(&rules) => InForce::Later(rules),
            _ => self.get(),
        }
    }

    /// Keeps rules for this thread's next call.
    #[inline(always)]
    pub(crate) fn keep(&self, rules: InForce<'_>) {
        if let InForce::Later(rules) = rules {
            let _ = SEEN.try_with(|seen| seen[self.place()].set(Some(rules)));
        }
    }

    /// Which of its places a thread keeps these rules in.
    #[inline(always)]
    fn place(&self) -> usize {
        usize::try_from(self.first.edition % KEPT as u64).unwrap_or(0)
    }

    #[cold]
    pub(crate) fn get(&self) -> InForce<'_> {
        match &*self.lock() {
            None => InForce::First(&self.first),
            Some(rules) => InForce::Later(Arc::clone(rules)),
        }
    }

    /// Waits until those that are being put in force are.
    #[cold]
    pub(crate) fn wait(&self) {
        drop(self.lock());
    }

    /// Holds the rules, so that nobody else changes them; the callers go on.
    pub(crate) fn hold(&self) -> Held<'_> {
        Held {
            current: self,
            later: self.lock(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Rules>>> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rules in force, for the one who may change them.
pub(crate) struct Held<'a> {
    current: &'a Current,
    later: MutexGuard<'a, Option<Arc<Rules>>>,
}

impl Held<'_> {
    /// Puts other rules in force.
    pub(crate) fn replace(mut self, rules: Rules) {
        let edition = rules.edition;
        *self.later = Some(Arc::new(rules));
        self.current.edition.store(edition, Ordering::Release);
    }
}

impl Deref for Held<'_> {
    type Target = Rules;

    fn deref(&self) -> &Rules {
        self.later.as_deref().unwrap_or(&self.current.first)
    }
}
