//! How often each limit admitted and rejected, in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use callgate::Reason;
use pyo3::prelude::*;

/// The counts of one tool under one limit.
#[derive(Default)]
pub(crate) struct Counts {
    admitted: AtomicU64,
    rejected_rate: AtomicU64,
    rejected_cost: AtomicU64,
}

/// The decisions that are counted apart.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    Admitted,
    Rejected(Reason),
}

impl Counts {
    /// The counts of this tool: of all limiters together, so that a metric never goes down when one is dropped.
    pub(crate) fn of(tool: &str) -> Arc<Self> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(tool.to_owned()).or_default())
    }

    pub(crate) fn add(&self, outcome: Outcome) {
        let count = match outcome {
            Outcome::Admitted => &self.admitted,
            Outcome::Rejected(Reason::Cost) => &self.rejected_cost,
            Outcome::Rejected(_) => &self.rejected_rate,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// By tool. Only configured names come in, so its size does not depend on what is called.
static ALL: Mutex<BTreeMap<String, Arc<Counts>>> = Mutex::new(BTreeMap::new());

/// The decisions so far in this process: (tool, limit, outcome, count) of each that happened.
#[pyfunction]
pub(crate) fn decision_counts() -> Vec<(String, String, &'static str, u64)> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter()
        .flat_map(|(tool, counts)| {
            [
                ("admitted", &counts.admitted),
                ("rejected_rate", &counts.rejected_rate),
                ("rejected_cost", &counts.rejected_cost),
            ]
            .map(|(outcome, count)| {
                (
                    tool.clone(),
                    tool.clone(),
                    outcome,
                    count.load(Ordering::Relaxed),
                )
            })
        })
        .filter(|(.., count)| *count > 0)
        .collect()
}
