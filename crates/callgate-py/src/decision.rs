//! `Decision`.

use callgate::Reason;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// Whether a call may run now. True where it may.
///
/// In a dry run every call may, and `limit`, `reason` and `retry_after` say what would have refused it.
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
    /// Why it was refused: 'rate', too few tokens now, or 'cost', a cost above the burst. None where it was not.
    #[pyo3(get)]
    pub(crate) reason: Option<&'static str>,
    /// The whole tokens left in the call's bucket, of several limits in the tightest.
    ///
    /// None where the tool has no limit.
    #[pyo3(get)]
    pub(crate) remaining: Option<u64>,
    /// Seconds to wait before the same call can be admitted, if nobody else spends.
    ///
    /// Never 0. None where the call was not refused, and where no wait helps.
    #[pyo3(get)]
    pub(crate) retry_after: Option<f64>,
}

/// The reasons' names, in Python and in metrics.
pub(crate) fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Cost => "cost",
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
    ) -> PyResult<Bound<'py, Self>> {
        let py = tool.py();
        let decision = Self {
            tool: tool.clone().unbind(),
            admitted,
            limit: limit.map(|limit| limit.clone_ref(py)),
            reason: reason.map(reason_name),
            remaining,
            retry_after,
        };
        Bound::new(py, decision)
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
        _ => Reason::Rate,
    });
    let limit = limit.map(Bound::as_unbound);
    Decision::object(tool, admitted, limit, reason, remaining, retry_after)
}
