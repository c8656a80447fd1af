//! `StoreCounts`, and the numbers of all stores of this process.

use std::collections::BTreeMap;
use std::sync::Mutex;

use callgate::StoreMeter;
use pyo3::prelude::*;

use crate::seconds::seconds;
use crate::turn::lock;

/// What a limiter has asked of its Redis store, in this process.
#[pyclass(frozen, eq, module = "callgate", get_all)]
#[derive(Clone, Default, PartialEq)]
pub(crate) struct StoreCounts {
    /// Whether the store is known to be down, and is not asked.
    is_down: bool,
    /// The requests that were answered.
    answered: u64,
    /// How many seconds those took in all.
    seconds: f64,
    /// The requests that failed.
    failed: u64,
    /// The decisions that were made without the store, by `on_store_error`.
    alone: u64,
}

#[pymethods]
impl StoreCounts {
    fn __repr__(&self) -> String {
        let Self {
            is_down,
            answered,
            seconds,
            failed,
            alone,
        } = self;
        let is_down = if *is_down { "True" } else { "False" };
        format!(
            "StoreCounts(is_down={is_down}, answered={answered}, seconds={seconds:?}, failed={failed}, alone={alone})"
        )
    }
}

impl StoreCounts {
    pub(crate) fn of(meter: &StoreMeter) -> Self {
        let counts = meter.counts();
        Self {
            is_down: counts.is_down,
            answered: counts.answered,
            seconds: seconds(counts.time),
            failed: counts.failed,
            alone: counts.alone,
        }
    }

    fn add(&mut self, other: &Self) {
        self.is_down |= other.is_down;
        self.answered += other.answered;
        self.seconds += other.seconds;
        self.failed += other.failed;
        self.alone += other.alone;
    }
}

/// What limiters have asked of their stores.
struct Stores {
    next: u64,
    live: BTreeMap<u64, (String, StoreMeter)>,
    /// By URL, of limiters that are gone: a metric never goes down.
    gone: BTreeMap<String, StoreCounts>,
}

static STORES: Mutex<Stores> = Mutex::new(Stores {
    next: 0,
    live: BTreeMap::new(),
    gone: BTreeMap::new(),
});

/// A limiter's store, which counts for the metrics.
pub(crate) struct Metered {
    pub(crate) meter: StoreMeter,
    number: u64,
}

impl Metered {
    pub(crate) fn new(url: &str, meter: StoreMeter) -> Self {
        let mut stores = lock(&STORES);
        stores.next += 1;
        let number = stores.next;
        stores.live.insert(number, (url.to_owned(), meter.clone()));
        Self { meter, number }
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        let mut stores = lock(&STORES);
        if let Some((url, meter)) = stores.live.remove(&self.number) {
            let mut last = StoreCounts::of(&meter);
            last.is_down = false;
            stores.gone.entry(url).or_default().add(&last);
        }
    }
}

/// What was asked of each store in this process, by its URL.
#[pyfunction]
pub(crate) fn store_counts() -> Vec<(String, StoreCounts)> {
    let stores = lock(&STORES);
    let mut all = stores.gone.clone();
    for (url, meter) in stores.live.values() {
        all.entry(url.clone())
            .or_default()
            .add(&StoreCounts::of(meter));
    }
    all.into_iter().collect()
}

/// Begins again from zero: what comes before a fork is the parent's.
pub(crate) fn after_fork() {
    lock(&STORES).gone.clear();
}
