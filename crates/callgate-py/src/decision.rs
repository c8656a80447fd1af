//! `Decision`.

use std::ffi::CString;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use callgate::{InFlight, Reason};
use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::logging::say;

/// Whether a call may run now. True where it may.
///
/// In a dry run every call may, and `limit`, `reason` and `retry_after` say what would have refused it.
///
/// Where a limit says how many calls may run at the same time, run the call in a `with` block of its decision:
/// at the end of the block the next one may run.
#[pyclass(frozen, module = "callgate")]
pub(crate) struct Decision {
    /// The tool that was asked for.
    #[pyo3(get)]
    pub(crate) tool: Py<PyString>,
    /// Whether the call may run; its tokens are then spent, but for one that a dry run lets pass.
    #[pyo3(get)]
    pub(crate) admitted: bool,
    /// The name of the limit that refused the call; None where none did.
    ///
    /// Of several it is the one that refuses for the longest. '[default]' is the limit for tools that no
    /// other holds for.
    #[pyo3(get)]
    pub(crate) limit: Option<Py<PyString>>,
    /// Why it was refused; None where it was not.
    ///
    /// 'rate', too few tokens now; 'paused', the limit is paused; 'concurrency', as many calls run as may; 'cost',
    /// a cost above the burst; 'store', a shared store could not be asked.
    #[pyo3(get)]
    pub(crate) reason: Option<&'static str>,
    /// The whole tokens left in the call's bucket, of several limits in the tightest.
    ///
    /// None where the tool has no limit.
    #[pyo3(get)]
    pub(crate) remaining: Option<u64>,
    /// Seconds to wait before the same call can be admitted, if nobody else spends.
    ///
    /// Never 0. None where the call was not refused, where no wait helps, and where no time can be told.
    #[pyo3(get)]
    pub(crate) retry_after: Option<f64>,
    running: Mutex<Run>,
}

/// Whether a limit counts the call as running.
enum Run {
    /// None does.
    Uncounted,
    Counted(Box<InFlight>),
    Ended,
}

impl Run {
    /// What counts the call as running, which it does no more.
    fn end(&mut self) -> Option<Box<InFlight>> {
        match mem::replace(self, Self::Ended) {
            Self::Counted(running) => Some(running),
            Self::Ended => None,
            Self::Uncounted => {
                *self = Self::Uncounted;
                None
            }
        }
    }
}

/// The reasons' names, in Python and in metrics.
pub(crate) fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Cost => "cost",
        Reason::Paused => "paused",
        Reason::Concurrency => "concurrency",
        Reason::Store => "store",
        _ => "rate",
    }
}

type Parts = (
    Py<PyString>,
    bool,
    Option<Py<PyString>>,
    Option<&'static str>,
    Option<u64>,
    Option<f64>,
);

#[pymethods]
impl Decision {
    fn __bool__(&self) -> bool {
        self.admitted
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text =
            |part: Bound<'_, PyAny>| Ok::<_, PyErr>(part.repr()?.to_string_lossy().into_owned());
        let (tool, _, limit, reason, remaining, retry_after) = self.parts(py);
        Ok(format!(
            "Decision(admitted={}, tool={}, limit={}, reason={}, remaining={}, retry_after={})",
            if self.admitted { "True" } else { "False" },
            text(tool.into_bound(py).into_any())?,
            text(limit.into_pyobject(py)?.into_any())?,
            text(reason.into_pyobject(py)?.into_any())?,
            text(remaining.into_pyobject(py)?.into_any())?,
            text(retry_after.into_pyobject(py)?.into_any())?,
        ))
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let decision = slf.get();
        if matches!(*decision.lock(), Run::Ended) {
            let tool = decision.tool.bind(slf.py()).to_string_lossy();
            return Err(PyRuntimeError::new_err(format!(
                "the call of tool '{tool}' that this decision is on has ended: ask for another decision"
            )));
        }
        Ok(slf)
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.end();
    }

    /// Pickled and copied as its parts: it may travel in an exception between processes.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Parts)> {
        let restore = py
            .import("callgate._callgate")?
            .getattr("restore_decision")?;
        Ok((restore, self.parts(py)))
    }
}

impl Decision {
    /// Makes the object.
    ///
    /// The one place that does, and never part of another function: the fields then arrive in
    /// registers, and are not copied from where they were just written.
    #[inline(never)]
    pub(crate) fn object<'py>(
        tool: &Bound<'py, PyString>,
        admitted: bool,
        limit: Option<&Py<PyString>>,
        reason: Option<Reason>,
        remaining: Option<u64>,
        retry_after: Option<f64>,
        running: Option<Box<InFlight>>,
    ) -> PyResult<Bound<'py, Self>> {
        let py = tool.py();
        let decision = Self {
            tool: tool.clone().unbind(),
            admitted,
            limit: limit.map(|limit| limit.clone_ref(py)),
            reason: reason.map(reason_name),
            remaining,
            retry_after,
            running: Mutex::new(running.map_or(Run::Uncounted, Run::Counted)),
        };
        Bound::new(py, decision)
    }

    /// The call does not run any more.
    fn end(&self) {
        // Dropped when nothing is locked: it has the next one run.
        let ended = self.lock().end();
        drop(ended);
    }

    fn lock(&self) -> MutexGuard<'_, Run> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn warn(&self, py: Python<'_>) {
        let message = format!(
            "the decision on a call of tool '{}' was dropped while the call counted as running: a limit with \
             max_concurrent holds for it, so run the call inside `with decision:`\0",
            self.tool.bind(py).to_string_lossy().replace('\0', "")
        );
        let message = CString::from_vec_with_nul(message.into_bytes()).unwrap_or_default();
        let category = py.get_type::<PyRuntimeWarning>();
        if let Err(error) = PyErr::warn(py, &category, &message, 1) {
            say(py, error);
        }
    }

    fn parts(&self, py: Python<'_>) -> Parts {
        let limit = self.limit.as_ref().map(|limit| limit.clone_ref(py));
        (
            self.tool.clone_ref(py),
            self.admitted,
            limit,
            self.reason,
            self.remaining,
            self.retry_after,
        )
    }
}

impl Drop for Decision {
    /// Nobody can run the call any more: as if it had ended.
    fn drop(&mut self) {
        let running = self.running.get_mut();
        let Some(running) = running.unwrap_or_else(PoisonError::into_inner).end() else {
            return;
        };
        Python::attach(|py| {
            // An exception may be on its way through the frame that held the decision, and Python must not run
            // while there is one.
            let before = PyErr::take(py);
            drop(running);
            self.warn(py);
            if let Some(before) = before {
                before.restore(py);
            }
        });
    }
}

/// Makes a pickled decision again.
#[pyfunction]
pub(crate) fn restore_decision<'py>(
    tool: &Bound<'py, PyString>,
    admitted: bool,
    limit: Option<&Bound<'py, PyString>>,
    reason: Option<&str>,
    remaining: Option<u64>,
    retry_after: Option<f64>,
) -> PyResult<Bound<'py, Decision>> {
    let reason = reason.map(|reason| match reason {
        "cost" => Reason::Cost,
        "paused" => Reason::Paused,
        "concurrency" => Reason::Concurrency,
        "store" => Reason::Store,
        _ => Reason::Rate,
    });
    let limit = limit.map(Bound::as_unbound);
    Decision::object(tool, admitted, limit, reason, remaining, retry_after, None)
}
