//! `Trace`, and the calls whose lines are in it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use callgate::{Call, TraceOptions, Traced};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::limit::whole;
use crate::limiter::truth;
use crate::{Argument, config_error, of_kind, refusal};

/// A file to which a line of JSON is added for each call that has ended: for `callgate simulate`.
///
/// A thread writes it, some 20 ms after a call has ended, and no call waits for it.
///
/// Args:
///     `path`: The file: a str or a `pathlib.Path`. What is in it stays.
///     `plain_fields`: Whether to write the values of fields as they are. By default they are the first 16 hex
///         digits of their SHA-256: no secret, since whoever guesses a value can tell that it is right.
///     `rotate_at`: How large the file may grow in bytes, 4,096 or more. Then it is renamed to end in '.1', older
///         ones move on to '.2' and so forth, and a new one is begun.
///     `keep`: How many older files are kept, from 1 to 1,000.
///
/// Raises:
///     `ConfigError`: If the file cannot be written or is no plain file, or a value is not what it should be.
#[pyclass(frozen, module = "callgate")]
pub(crate) struct Trace {
    core: Arc<callgate::Trace>,
    path: PathBuf,
}

/// All traces there are, to be flushed when Python ends.
static TRACES: Mutex<Vec<Weak<callgate::Trace>>> = Mutex::new(Vec::new());

#[pymethods]
impl Trace {
    #[new]
    #[pyo3(signature = (path, *, plain_fields=Argument::Default, rotate_at=Argument::Default, keep=Argument::Default),
        text_signature = "(path, *, plain_fields=False, rotate_at=67108864, keep=8)")]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over")]
    fn new(
        path: &Bound<'_, PyAny>,
        plain_fields: Argument<'_>,
        rotate_at: Argument<'_>,
        keep: Argument<'_>,
    ) -> PyResult<Self> {
        let py = path.py();
        let Some(file) = of_kind(py, path.extract::<PathBuf>())? else {
            return Err(refusal(
                path,
                "path must be a file's path: a str or a pathlib.Path",
            ));
        };
        let mut options = TraceOptions::new();
        if let Argument::Given(plain) = &plain_fields
            && truth("plain_fields", plain)?
        {
            options = options.plain_fields();
        }
        if let Argument::Given(bytes) = &rotate_at {
            let must = "rotate_at must be a whole number of bytes, 4,096 or more";
            options = options.rotate_at(whole(bytes)?.ok_or_else(|| refusal(bytes, must))?);
        }
        if let Argument::Given(files) = &keep {
            let number = whole(files)?.and_then(|number| number.try_into().ok());
            let must = "keep must be a whole number of files from 1 to 1,000";
            options = options.keep(number.ok_or_else(|| refusal(files, must))?);
        }
        let core = options.open(&file);
        let core = core.map_err(|error| config_error(py, error.to_string()))?;
        let core = Arc::new(core);
        let mut traces = traces();
        traces.retain(|trace| trace.strong_count() > 0);
        traces.push(Arc::downgrade(&core));
        Ok(Self { core, path: file })
    }

    /// The file.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// How many calls of this process have no line.
    #[getter]
    fn dropped(&self) -> u64 {
        self.core.dropped()
    }

    /// Has all be written whose call has ended by now, and waits for that, no longer than 5 s.
    ///
    /// Returns:
    ///     Whether it was done by then.
    fn flush(&self, py: Python<'_>) -> bool {
        py.detach(|| self.core.flush())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let path = self.path.as_os_str().into_pyobject(py)?.repr()?;
        Ok(format!("Trace({})", path.to_string_lossy()))
    }
}

fn traces() -> MutexGuard<'static, Vec<Weak<callgate::Trace>>> {
    TRACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Flushes every trace, as Python ends.
#[pyfunction]
pub(crate) fn flush_traces(py: Python<'_>) {
    let traces: Vec<_> = traces().iter().filter_map(Weak::upgrade).collect();
    py.detach(|| {
        for trace in traces {
            trace.flush();
        }
    });
}

/// A call that is traced, by a front end.
#[pyclass(frozen, module = "callgate._callgate")]
pub(crate) struct TracedCall {
    trace: Py<Trace>,
    /// From when it is asked for until it ends.
    core: Mutex<Option<Traced>>,
}

#[pymethods]
impl TracedCall {
    #[new]
    fn new(trace: Py<Trace>) -> Self {
        Self {
            trace,
            core: Mutex::default(),
        }
    }

    /// It runs from now on, or it does not, after it has waited for its turn, if it has.
    #[pyo3(signature = (*, admitted, waited))]
    fn decided(&self, admitted: bool, waited: bool) {
        let Some(mut traced) = self.core().take() else {
            return;
        };
        if waited {
            traced.waited();
        }
        if admitted {
            traced.admitted();
            *self.core() = Some(traced);
        } else {
            traced.rejected();
        }
    }

    /// It has ended, well or by an error.
    #[pyo3(signature = (error=None))]
    fn ended(&self, error: Option<&Bound<'_, PyAny>>) {
        let Some(traced) = self.core().take() else {
            return;
        };
        match error {
            None => drop(traced),
            Some(error) if error.is_instance_of::<PyException>() => traced.failed(),
            Some(_) => traced.cancelled(),
        }
    }
}

impl TracedCall {
    /// It is asked for now.
    pub(crate) fn begin(&self, call: &Call<'_>) {
        let traced = self.trace.get().core.begin(call);
        *self.core() = Some(traced);
    }

    fn core(&self) -> MutexGuard<'_, Option<Traced>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
