//! `ToolRateLimit`.

use callgate::{ConfigError, Count, Limit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString, PyType};

use crate::{of_kind, refusal};

/// A tool's rate limit: a token bucket with a rate and a burst (its capacity). It starts full.
///
/// In any window of W seconds at most `burst + requests_per_second * W` calls are admitted.
/// Rates range from 1 per 366 days to 1,000,000,000 a second, bursts from 1 to 4,294,967,295;
/// anything else raises `ConfigError`. A float means its shortest decimal: 0.1 is one tenth.
#[pyclass(frozen, eq, hash, module = "callgate")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ToolRateLimit {
    pub(crate) limit: Limit,
}

#[pymethods]
impl ToolRateLimit {
    #[new]
    #[pyo3(signature = (requests_per_second, burst))]
    fn new(requests_per_second: &Bound<'_, PyAny>, burst: &Bound<'_, PyAny>) -> PyResult<Self> {
        counted("requests_per_second", requests_per_second, burst, |count| {
            Limit::per_second(count)
        })
    }

    /// A limit of so many requests a minute.
    #[classmethod]
    #[pyo3(signature = (requests_per_minute, burst))]
    fn per_minute(
        _class: &Bound<'_, PyType>,
        requests_per_minute: &Bound<'_, PyAny>,
        burst: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        counted("requests_per_minute", requests_per_minute, burst, |count| {
            Limit::per_minute(count)
        })
    }

    /// A limit whose rate is written N/s, N/min, N/h or N/day.
    #[classmethod]
    #[pyo3(signature = (rate, burst))]
    fn parse(
        _class: &Bound<'_, PyType>,
        rate: &Bound<'_, PyAny>,
        burst: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let Ok(text) = rate.cast::<PyString>() else {
            let must = "rate must be a string such as '300/min' or '0.5/s'";
            return Err(refusal(rate, must));
        };
        match text.to_string_lossy().parse::<Limit>() {
            Ok(limit) => with_burst(limit, burst),
            Err(error) => Err(refused(&error, "rate", rate)),
        }
    }

    /// The rate in tokens a second, as the nearest float.
    #[getter]
    fn requests_per_second(&self) -> f64 {
        self.limit
            .rate()
            .map_or(f64::NAN, callgate::Rate::per_second)
    }

    /// The bucket's capacity in tokens.
    #[getter]
    fn burst(&self) -> u64 {
        self.limit.capacity()
    }

    pub(crate) fn __repr__(&self) -> String {
        let (text, burst) = self.written();
        let plain = text.strip_suffix("/s").filter(|count| {
            // Only what reads back as the same rate: a float has fewer digits than a rate may have.
            let back = count
                .parse::<f64>()
                .map(|count| Limit::per_second(count).rate());
            back == Ok(self.limit.rate())
        });
        match plain {
            Some(count) => format!("ToolRateLimit(requests_per_second={count}, burst={burst})"),
            None => format!("ToolRateLimit.parse('{text}', burst={burst})"),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String, u64))> {
        let parse = slf.get_type().getattr("parse")?;
        Ok((parse, slf.get().written()))
    }
}

impl ToolRateLimit {
    /// What `parse` takes to make this limit again.
    fn written(&self) -> (String, u64) {
        let rate = self
            .limit
            .rate()
            .map_or_else(|error| error.to_string(), |rate| rate.to_string());
        (rate, self.limit.capacity())
    }
}

/// A limit of a number of requests in a unit of time, both as Python gave them.
fn counted(
    field: &str,
    count: &Bound<'_, PyAny>,
    burst: &Bound<'_, PyAny>,
    limit: impl Fn(Count) -> Limit,
) -> PyResult<ToolRateLimit> {
    let number = match count.cast::<PyFloat>() {
        Ok(float) => Some(Count::from(float.value())),
        // What does not fit 64 bits is out of range whatever it is.
        Err(_) => integer(count)?.map(|whole| match whole.extract::<u64>() {
            Ok(whole) => Count::from(whole),
            Err(_) => Count::from(-1),
        }),
    };
    let Some(number) = number else {
        let must = "must be an int or a float, from 1 per 366 days to 1,000,000,000 per second";
        return Err(refusal(count, &format!("{field} {must}")));
    };
    let limit = limit(number);
    match limit.rate() {
        Ok(_) => with_burst(limit, burst),
        Err(error) => Err(refused(&error, field, count)),
    }
}

fn with_burst(limit: Limit, burst: &Bound<'_, PyAny>) -> PyResult<ToolRateLimit> {
    // What is no whole number is as far out of range as 0 is.
    let limit = limit.burst(whole(burst)?.unwrap_or(0));
    match limit.check() {
        Ok(()) => Ok(ToolRateLimit { limit }),
        Err(error) => Err(refused(&error, "burst", burst)),
    }
}

/// A whole number of at least 1; one that is too large for 64 bits counts as the largest.
pub(crate) fn whole(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let Some(number) = integer(value)? else {
        return Ok(None);
    };
    Ok(match number.extract::<u64>() {
        Ok(number) => Some(number).filter(|&number| number > 0),
        Err(_) => number.gt(0)?.then_some(u64::MAX),
    })
}

/// The integer that a value stands for, if it does; a bool does not.
fn integer<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyInt>>> {
    static INDEX: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if value.is_instance_of::<PyBool>() {
        return Ok(None);
    }
    if let Ok(integer) = value.cast::<PyInt>() {
        return Ok(Some(integer.clone()));
    }
    let index = INDEX.import(value.py(), "operator", "index")?;
    let index = of_kind(value.py(), index.call1((value,)))?;
    Ok(index.and_then(|index| index.cast_into().ok()))
}

fn refused(error: &ConfigError, field: &str, value: &Bound<'_, PyAny>) -> PyErr {
    refusal(value, &format!("{field} must be {}", error.allowed()))
}
