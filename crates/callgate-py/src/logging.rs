//! What the core warns of, for Python's `logging`: under the name "callgate".
//!
//! What is said of a Redis store is said on a thread that does not wait for the GIL: it is kept for the next
//! one who has it and asks the store, or reads of its answers, or ends the interpreter.

use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use log::{LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::turn::lock;

struct ToPython;

impl Log for ToPython {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string();
        if record.target().starts_with("callgate::store::redis") {
            let mut kept = lock(&KEPT);
            if kept.len() < MOST_KEPT {
                kept.push(line);
            }
            HAS_KEPT.store(true, Ordering::Relaxed);
        } else {
            Python::attach(|py| warn(py, line));
        }
    }

    fn flush(&self) {}
}

/// There is one for each change of a store's state, and somebody asks the store soon.
const MOST_KEPT: usize = 1_000;
static KEPT: Mutex<Vec<String>> = Mutex::new(Vec::new());
static HAS_KEPT: AtomicBool = AtomicBool::new(false);

/// Says what was kept.
#[inline]
pub(crate) fn say_kept(py: Python<'_>) {
    if HAS_KEPT.load(Ordering::Relaxed) {
        say_all(py);
    }
}

#[cold]
fn say_all(py: Python<'_>) {
    HAS_KEPT.store(false, Ordering::Relaxed);
    // Handlers may come here again.
    let lines = mem::take(&mut *lock(&KEPT));
    for line in lines {
        warn(py, line);
    }
}

/// The same, as Python ends.
#[pyfunction]
pub(crate) fn flush_log(py: Python<'_>) {
    say_all(py);
}

/// It is the parent that says it.
pub(crate) fn after_fork() {
    lock(&KEPT).clear();
}

fn warn(py: Python<'_>, line: String) {
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", ("callgate",)))
        .and_then(|logger| logger.call_method1("warning", (line,)));
    if let Err(error) = logged {
        say(py, error);
    }
}

/// Says that there was an error, where nobody up to the caller takes one.
pub(crate) fn say(py: Python<'_>, error: PyErr) {
    if !error.is_instance_of::<PyKeyboardInterrupt>(py) {
        error.write_unraisable(py, None);
        return;
    }
    // As if Ctrl-C came just now.
    let again = py
        .import("_thread")
        .and_then(|thread| thread.call_method0("interrupt_main"));
    again.map_or_else(|error| error.write_unraisable(py, None), drop);
}

/// Sends the core's warnings to Python.
pub(crate) fn start() {
    // Only a second start in one process is refused, and would change nothing.
    if log::set_logger(&ToPython).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
