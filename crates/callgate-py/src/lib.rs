//! The extension module `callgate._callgate`: the core's types for Python, and nothing else.
//!
//! Everything here runs with the GIL held and never lets go of it, other than to call an injected
//! clock: a decision is far shorter than handing the GIL over, and a lock that is only ever held
//! under the GIL cannot be held by another thread when a process forks.

mod counts;
mod decision;
mod limit;
mod limiter;
mod seconds;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

#[pymodule]
mod _callgate {
    #[pymodule_export]
    use crate::counts::{decision_counts, reset_decision_counts};
    #[pymodule_export]
    use crate::decision::{Decision, restore_decision};
    #[pymodule_export]
    use crate::limit::ToolRateLimit;
    #[pymodule_export]
    use crate::limiter::{LimitSnapshot, Limiter};
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python knows")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

/// `callgate.ConfigError` with this message.
fn config_error(py: Python<'_>, message: String) -> PyErr {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    match CLASS.import(py, "callgate._errors", "ConfigError") {
        Ok(class) => PyErr::from_type(class.clone(), message),
        Err(error) => error,
    }
}

/// How a refused value is shown: its `repr`, cut where it is long.
fn shown(value: &Bound<'_, PyAny>) -> String {
    const LONGEST: usize = 80;
    let Ok(repr) = value.repr() else {
        return format!("a {}", value.get_type());
    };
    let text = repr.to_string_lossy();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}
