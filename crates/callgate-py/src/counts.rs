//! How often each tool's calls were admitted and rejected, in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use callgate::{Decision, Reason, Rejection};
use pyo3::prelude::*;

/// How many tools that no limit names are counted apart, and how long their names may be, in bytes:
/// they come from whoever calls.
const MOST_TOOLS: usize = 2_000;
const LONGEST_NAME: usize = 256;

/// How many limits are told apart that reject one tool's calls: other names come with reloads and new
/// limiters.
const MOST_LIMITS: usize = 100;

/// The tool and the limit that all others are counted as.
const OTHER: &str = "_OTHER";

const ADMITTED: &str = "admitted";

/// What rejections come to, apart from each other: first those that held, then those of a dry run.
const REJECTED: [&str; 10] = [
    "rejected_rate",
    "rejected_cost",
    "rejected_paused",
    "rejected_concurrency",
    "rejected_store",
    "would_reject_rate",
    "would_reject_cost",
    "would_reject_paused",
    "would_reject_concurrency",
    "would_reject_store",
];

/// The counts of one tool.
#[derive(Default)]
pub(crate) struct Counts {
    admitted: AtomicU64,
    /// By the limit that rejected.
    rejected: boxcar::Vec<Rejected>,
}

/// A limit, and how often it rejected.
type Rejected = (Box<str>, [AtomicU64; REJECTED.len()]);

impl Counts {
    /// The counts of a tool: of all limiters together, so that a metric never goes down when one is dropped.
    pub(crate) fn of(tool: &str) -> Arc<Self> {
        Self::of_either(tool, true)
    }

    /// The counts of a tool that only a pattern or the default limits.
    pub(crate) fn of_unnamed(tool: &str) -> Arc<Self> {
        Self::of_either(tool, false)
    }

    fn of_either(tool: &str, is_named: bool) -> Arc<Self> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counts) = all.get(tool) {
            return Arc::clone(counts);
        }
        let apart = is_named || (all.len() < MOST_TOOLS && tool.len() <= LONGEST_NAME);
        let tool = if apart { tool } else { OTHER };
        Arc::clone(all.entry(tool.to_owned()).or_default())
    }

    #[inline]
    pub(crate) fn add(&self, decision: &Decision<'_>) {
        match decision {
            Decision::Rejected(rejection) => self.add_rejection(rejection, 0),
            Decision::Admitted(permit) => match permit.overruled() {
                None => one_more(&self.admitted),
                Some(rejection) => self.add_rejection(rejection, REJECTED.len() / 2),
            },
        }
    }

    fn add_rejection(&self, rejection: &Rejection<'_>, first: usize) {
        let outcome = match rejection.reason {
            Reason::Cost => 1,
            Reason::Paused => 2,
            Reason::Concurrency => 3,
            Reason::Store => 4,
            _ => 0,
        };
        let limit = rejection.limit();
        let (_, counts) = self.of_limit(limit).unwrap_or_else(|| {
            let apart = self.rejected.count() < MOST_LIMITS;
            let limit = if apart { limit } else { OTHER };
            self.of_limit(limit).unwrap_or_else(|| {
                let place = self.rejected.push((limit.into(), Default::default()));
                &self.rejected[place]
            })
        });
        one_more(&counts[first + outcome]);
    }

    fn of_limit(&self, limit: &str) -> Option<&Rejected> {
        let mut all = self.rejected.iter().map(|(_, of)| of);
        all.find(|(name, _)| **name == *limit)
    }

    /// The outcomes that there were: limit, outcome and count.
    fn rows(&self) -> impl Iterator<Item = (Option<&str>, &'static str, &AtomicU64)> {
        let rejected = self.rejected.iter().flat_map(|(_, (limit, counts))| {
            let outcomes = REJECTED.into_iter().zip(counts);
            outcomes.map(move |(outcome, count)| (Some(&**limit), outcome, count))
        });
        std::iter::once((None, ADMITTED, &self.admitted)).chain(rejected)
    }
}

/// Under the GIL nobody counts in between, and a locked addition costs as much as the decision.
#[inline]
fn one_more(count: &AtomicU64) {
    let next = count.load(Ordering::Relaxed).wrapping_add(1);
    count.store(next, Ordering::Relaxed);
}

static ALL: Mutex<BTreeMap<String, Arc<Counts>>> = Mutex::new(BTreeMap::new());

/// The decisions so far in this process: (tool, limit, outcome, count) of each that happened. The limit is
/// the one that rejected.
#[pyfunction]
pub(crate) fn decision_counts() -> Vec<(String, Option<String>, &'static str, u64)> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let rows = all.iter().flat_map(|(tool, counts)| {
        counts.rows().map(|(limit, outcome, count)| {
            let count = count.load(Ordering::Relaxed);
            (tool.clone(), limit.map(str::to_owned), outcome, count)
        })
    });
    rows.filter(|(.., count)| *count > 0).collect()
}

/// Begins again from zero: for a forked child, whose parent goes on counting what came before.
#[pyfunction]
pub(crate) fn reset_decision_counts() {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    for (.., count) in all.values().flat_map(|counts| counts.rows()) {
        count.store(0, Ordering::Relaxed);
    }
}
