//! What the core warns of, for Python's `logging`: under the name "callgate".

use log::{LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

struct ToPython;

impl Log for ToPython {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        Python::attach(|py| {
            let logged = py
                .import("logging")
                .and_then(|logging| logging.call_method1("getLogger", ("callgate",)))
                .and_then(|logger| logger.call_method1("warning", (record.args().to_string(),)));
            let Err(error) = logged else { return };
            say(py, error);
        });
    }

    fn flush(&self) {}
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
