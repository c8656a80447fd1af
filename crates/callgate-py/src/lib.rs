//! The extension module `callgate._callgate`: the core's types for Python, and nothing else.
//!
//! Everything here runs with the GIL held and never lets go of it, other than to run what a value or
//! an injected clock brings along, and to wait: a decision is far shorter than handing the GIL over, and a lock that is
//! only ever held under the GIL cannot be held by another thread when a process forks. The thread of a Redis
//! store does without the GIL, and stands still while a process forks.

mod bell;
mod command;
mod counts;
mod decision;
mod fork;
mod limit;
mod limiter;
mod logging;
mod seconds;
mod store;
mod trace;
mod turn;

use std::convert::Infallible;

use pyo3::exceptions::{PyException, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

#[pymodule]
mod _callgate {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::command::main;
    #[pymodule_export]
    use crate::counts::{decision_counts, reset_decision_counts};
    #[pymodule_export]
    use crate::decision::{Decision, restore_decision};
    #[pymodule_export]
    use crate::fork::{after_fork, after_fork_in_parent, before_fork};
    #[pymodule_export]
    use crate::limit::{ToolRateLimit, restore_limit};
    #[pymodule_export]
    use crate::limiter::{LimitSnapshot, Limiter, Look};
    #[pymodule_export]
    use crate::logging::flush_log;
    #[pymodule_export]
    use crate::store::{StoreCounts, store_counts};
    #[pymodule_export]
    use crate::trace::{Trace, TracedCall, flush_traces};
    #[pymodule_export]
    use crate::turn::{Home, Turn};
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python knows")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    #[expect(clippy::unnecessary_wraps, reason = "as PyO3 wants it")]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::logging::start();
        Ok(())
    }
}

/// An argument that was given or left out: None is not a way to leave it out.
enum Argument<'py> {
    Default,
    Given(Bound<'py, PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Argument<'py> {
    type Error = Infallible;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self::Given(given.to_owned()))
    }
}

/// `callgate.ConfigError` with this message.
fn config_error(py: Python<'_>, message: String) -> PyErr {
    static CLASS: ErrorClass = ErrorClass::new();
    error_of(py, &CLASS, "ConfigError", message)
}

/// `callgate.StoreError` with this message.
fn store_error(py: Python<'_>, message: String) -> PyErr {
    static CLASS: ErrorClass = ErrorClass::new();
    error_of(py, &CLASS, "StoreError", message)
}

type ErrorClass = PyOnceLock<Py<PyType>>;

fn error_of(py: Python<'_>, class: &ErrorClass, name: &str, message: String) -> PyErr {
    match class.import(py, "callgate._errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), message),
        Err(error) => error,
    }
}

/// A `ConfigError` for a value that is not what it must be; shows the value, cut where it is long.
fn refusal(value: &Bound<'_, PyAny>, must: &str) -> PyErr {
    const LONGEST: usize = 80;
    let mut shown = match value.repr() {
        Ok(repr) => repr.to_string_lossy().into_owned(),
        Err(error) if error.is_instance_of::<PyException>(value.py()) => {
            format!("a {}", value.get_type())
        }
        Err(error) => return error,
    };
    if let Some((end, _)) = shown.char_indices().nth(LONGEST) {
        shown.truncate(end);
        shown.push('…');
    }
    config_error(value.py(), format!("{must}, got {shown}"))
}

/// None where Python found a value to be of the wrong kind; any other error (Ctrl-C, say) is passed on.
fn of_kind<T>(py: Python<'_>, found: PyResult<T>) -> PyResult<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyValueError>(py)
                || error.is_instance_of::<PyOverflowError>(py) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
