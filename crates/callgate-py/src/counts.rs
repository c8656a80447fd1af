//! How often each limit admitted and rejected, in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use callgate::{Decision, Reason};
use pyo3::prelude::*;

/// What decisions come to, apart from each other.
const OUTCOMES: [&str; 3] = ["admitted", "rejected_rate", "rejected_cost"];

/// The counts of one tool under one limit, by outcome.
#[derive(Default)]
pub(crate) struct Counts([AtomicU64; OUTCOMES.len()]);

impl Counts {
    /// The counts of this tool: of all limiters together, so that a metric never goes down when one is dropped.
    pub(crate) fn of(tool: &str) -> Arc<Self> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(tool.to_owned()).or_default())
    }

    pub(crate) fn add(&self, decision: &Decision<'_>) {
        let Self([admitted, rejected_rate, rejected_cost]) = self;
        let count = match decision {
            Decision::Admitted(_) => admitted,
            Decision::Rejected(rejection) if rejection.reason == Reason::Cost => rejected_cost,
            Decision::Rejected(_) => rejected_rate,
        };
        // Under the GIL nobody counts in between, and a locked addition costs as much as the decision.
        let next = count.load(Ordering::Relaxed).wrapping_add(1);
        count.store(next, Ordering::Relaxed);
    }
}

/// By tool. Only configured names come in, so its size does not depend on what is called.
static ALL: Mutex<BTreeMap<String, Arc<Counts>>> = Mutex::new(BTreeMap::new());

/// The decisions so far in this process: (tool, limit, outcome, count) of each that happened.
#[pyfunction]
pub(crate) fn decision_counts() -> Vec<(String, String, &'static str, u64)> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let rows = all.iter().flat_map(|(tool, counts)| {
        OUTCOMES.iter().zip(&counts.0).map(|(outcome, count)| {
            let count = count.load(Ordering::Relaxed);
            (tool.clone(), tool.clone(), *outcome, count)
        })
    });
    rows.filter(|(.., count)| *count > 0).collect()
}

/// Begins again from zero: for a forked child, whose parent goes on counting what came before.
#[pyfunction]
pub(crate) fn reset_decision_counts() {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    for count in all.values().flat_map(|counts| &counts.0) {
        count.store(0, Ordering::Relaxed);
    }
}
