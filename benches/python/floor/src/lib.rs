//! The floor of `Limiter.try_acquire`: a method of the same signature that reads the clock and
//! returns a fresh object with as many fields, and decides nothing.

use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

#[pymodule]
mod callgate_bench_floor {
    #[pymodule_export]
    use super::{Decision, Floor};
}

/// A decision's fields.
#[pyclass(frozen, get_all)]
struct Decision {
    tool: Py<PyString>,
    admitted: bool,
    limit: Option<Py<PyString>>,
    reason: Option<&'static str>,
    remaining: Option<u64>,
    retry_after: Option<f64>,
}

/// A limiter without limits, names or buckets.
#[pyclass(frozen)]
struct Floor {
    start: Instant,
}

#[pymethods]
impl Floor {
    #[new]
    fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    #[pyo3(signature = (tool, *, cost=1, **fields))]
    fn try_acquire(
        &self,
        tool: &Bound<'_, PyString>,
        cost: u64,
        fields: Option<&Bound<'_, PyDict>>,
    ) -> Decision {
        let nanos = self.start.elapsed().as_nanos();
        Decision {
            tool: tool.clone().unbind(),
            admitted: fields.is_none(),
            limit: None,
            reason: None,
            remaining: u64::try_from(nanos).ok().map(|nanos| nanos / cost.max(1)),
            retry_after: None,
        }
    }
}
