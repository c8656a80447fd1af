//! `ToolRateLimit`.

use std::fmt::Write;
use std::time::Duration;

use callgate::{ConfigError, Count, Limit, MAX_WAIT, OnStoreError, Unit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString, PyTuple, PyType};

use crate::seconds::{nanos, seconds};
use crate::{Argument, config_error, of_kind, refusal};

/// A rate limit: a token bucket with a rate and a burst (its capacity). It starts full.
///
/// In any window of W seconds it lets at most `burst + requests_per_second * W` tokens through, so 2 a second
/// with burst 2 lets 4 calls into one second. Where a service says "never more than 100 in any minute", take
/// a `quota`. A float means its shortest decimal: 0.1 is one tenth.
///
/// Args:
///     `requests_per_second`: How fast the bucket refills, in tokens a second: from 1 per 366 days (about
///         3.17e-8) to 1,000,000,000.
///     `burst`: How many tokens it holds: a whole number from 1 to 4,294,967,295.
///     `tools`: The tools that share the limit, by name or by a pattern with * and ?. By default the limit's
///         name is its tool, or its pattern.
///     `per`: The fields of a call that split the limit, such as `['tenant']`: each combination of their values
///         has a bucket of its own, and a call without such a field falls into that field's one bucket for
///         "missing". 'tool' is the tool's name.
///     `max_wait`: How many seconds a call may wait for its turn, from 0 to 86,400, to the nearest nanosecond. One
///         that cannot be served within this time is refused at once, without waiting.
///     `max_concurrent`: How many admitted calls may run at the same time in this process, from 1 to
///         4,294,967,295; where fields split the limit, so many for each of its buckets. None for any number.
///     `cost`: What a call spends that does not say its cost itself: from 1 token to the burst.
///     `on_store_error`: What becomes of a call while a Redis store fails: 'local', 'deny', 'admit' or 'raise'. By
///         default what the limiter says.
///
/// Raises:
///     `ConfigError`: If a value is of the wrong kind or out of range.
#[pyclass(frozen, eq, hash, module = "callgate")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ToolRateLimit {
    pub(crate) limit: Limit,
}

/// What a limit is pickled and copied as.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Parts {
    /// The rate, or the quota.
    pace: String,
    is_quota: bool,
    burst: u64,
    tools: Option<Vec<String>>,
    per: Vec<String>,
    max_wait_nanos: u64,
    max_concurrent: Option<u64>,
    cost: u64,
    on_store_error: Option<String>,
}

#[pymethods]
#[expect(
    clippy::too_many_arguments,
    reason = "Python gives most of them by name, or not at all"
)]
impl ToolRateLimit {
    #[new]
    #[pyo3(signature = (requests_per_second, burst, *, tools=None, per=Argument::Default, max_wait=Argument::Default,
        max_concurrent=None, cost=Argument::Default, on_store_error=None),
        text_signature = "(requests_per_second, burst, *, tools=None, per=(), max_wait=0.0, max_concurrent=None, cost=1, on_store_error=None)")]
    fn new(
        requests_per_second: &Bound<'_, PyAny>,
        burst: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        per: Argument<'_>,
        max_wait: Argument<'_>,
        max_concurrent: Option<&Bound<'_, PyAny>>,
        cost: Argument<'_>,
        on_store_error: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let limit = counted("requests_per_second", requests_per_second, |count| {
            Limit::per_second(count)
        })?;
        Options {
            tools,
            per,
            max_wait,
            max_concurrent,
            cost,
            on_store_error,
        }
        .complete(with_burst(limit, burst)?, "per")
    }

    /// A limit of so many requests a minute.
    ///
    /// Args:
    ///     `requests_per_minute`: Tokens a minute, in the same range as `requests_per_second`.
    ///     `burst`: How many tokens the bucket holds.
    ///     `tools`, `per`, `max_wait`, `max_concurrent`, `cost`, `on_store_error`: As in `ToolRateLimit`.
    ///
    /// Raises:
    ///     `ConfigError`: If a value is of the wrong kind or out of range.
    #[classmethod]
    #[pyo3(signature = (requests_per_minute, burst, *, tools=None, per=Argument::Default, max_wait=Argument::Default,
        max_concurrent=None, cost=Argument::Default, on_store_error=None),
        text_signature = "(requests_per_minute, burst, *, tools=None, per=(), max_wait=0.0, max_concurrent=None, cost=1, on_store_error=None)")]
    fn per_minute(
        _class: &Bound<'_, PyType>,
        requests_per_minute: &Bound<'_, PyAny>,
        burst: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        per: Argument<'_>,
        max_wait: Argument<'_>,
        max_concurrent: Option<&Bound<'_, PyAny>>,
        cost: Argument<'_>,
        on_store_error: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let limit = counted("requests_per_minute", requests_per_minute, |count| {
            Limit::per_minute(count)
        })?;
        Options {
            tools,
            per,
            max_wait,
            max_concurrent,
            cost,
            on_store_error,
        }
        .complete(with_burst(limit, burst)?, "per")
    }

    /// A limit whose rate is written as services write it.
    ///
    /// Args:
    ///     `rate`: 'N/s', 'N/min', 'N/h' or 'N/day', with N a decimal of up to 18 digits.
    ///     `burst`: How many tokens the bucket holds.
    ///     `tools`, `per`, `max_wait`, `max_concurrent`, `cost`, `on_store_error`: As in `ToolRateLimit`.
    ///
    /// Raises:
    ///     `ConfigError`: If the rate cannot be read, or a value is of the wrong kind or out of range.
    #[classmethod]
    #[pyo3(signature = (rate, burst, *, tools=None, per=Argument::Default, max_wait=Argument::Default,
        max_concurrent=None, cost=Argument::Default, on_store_error=None),
        text_signature = "(rate, burst, *, tools=None, per=(), max_wait=0.0, max_concurrent=None, cost=1, on_store_error=None)")]
    fn parse(
        _class: &Bound<'_, PyType>,
        rate: &Bound<'_, PyAny>,
        burst: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        per: Argument<'_>,
        max_wait: Argument<'_>,
        max_concurrent: Option<&Bound<'_, PyAny>>,
        cost: Argument<'_>,
        on_store_error: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let Ok(text) = rate.cast::<PyString>() else {
            let must = "rate must be a string such as '300/min' or '0.5/s'";
            return Err(refusal(rate, must));
        };
        let limit = text.to_string_lossy().parse::<Limit>();
        let limit = limit.map_err(|error| refused(&error, "rate", rate))?;
        Options {
            tools,
            per,
            max_wait,
            max_concurrent,
            cost,
            on_store_error,
        }
        .complete(with_burst(limit, burst)?, "per")
    }

    /// A limit of never more than so many tokens in any second, minute, hour or day.
    ///
    /// It is a bucket like any other, refilled at `count - burst` a unit of time. A larger burst lets more calls
    /// through at once, and fewer after that.
    ///
    /// Args:
    ///     `count`: The most tokens in any window of the unit's length: a whole number of at least 2.
    ///     `per`: The unit of time: 's', 'min', 'h' or 'day'.
    ///     `burst`: How many tokens the bucket holds: at least 1 and below the count; by default a tenth of it, at
    ///         least 1.
    ///     `fields`: The fields that split the limit: what is `per` in `ToolRateLimit`.
    ///     `tools`, `max_wait`, `max_concurrent`, `cost`, `on_store_error`: As in `ToolRateLimit`.
    ///
    /// Raises:
    ///     `ConfigError`: If a value is of the wrong kind or out of range.
    #[classmethod]
    #[pyo3(signature = (count, per, burst=None, *, tools=None, fields=Argument::Default, max_wait=Argument::Default,
        max_concurrent=None, cost=Argument::Default, on_store_error=None),
        text_signature = "(count, per, burst=None, *, tools=None, fields=(), max_wait=0.0, max_concurrent=None, cost=1, on_store_error=None)")]
    fn quota(
        _class: &Bound<'_, PyType>,
        count: &Bound<'_, PyAny>,
        per: &Bound<'_, PyAny>,
        burst: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
        fields: Argument<'_>,
        max_wait: Argument<'_>,
        max_concurrent: Option<&Bound<'_, PyAny>>,
        cost: Argument<'_>,
        on_store_error: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let Some(unit) = unit(per) else {
            let must = "per must be the quota's unit of time, 's', 'min', 'h' or 'day' (the fields that split it are `fields`)";
            return Err(refusal(per, must));
        };
        let limit = Limit::quota(whole(count)?.unwrap_or(0), unit);
        if limit.as_quota().is_none() {
            let must = "count must be a whole number of at least 2 (for 1, ask for a rate of 1 with burst 1)";
            return Err(refusal(count, must));
        }
        let limit = match burst {
            None => limit,
            Some(burst) => {
                let must = "burst must be a whole number, at least 1 and below the quota";
                limit.burst(whole(burst)?.ok_or_else(|| refusal(burst, must))?)
            }
        };
        // The core says what is out of range: it may be a burst that was not given, or the rate that
        // one leaves.
        let checked = limit.check();
        checked.map_err(|error| config_error(count.py(), error.to_string()))?;
        let options = Options {
            tools,
            per: fields,
            max_wait,
            max_concurrent,
            cost,
            on_store_error,
        };
        options.complete(limit, "fields")
    }

    /// How fast the bucket refills, in tokens a second, as the nearest float.
    ///
    /// Of a quota too, where that is what its burst leaves of it.
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

    /// The names and patterns of the tools that share this limit; None where its name is its tool.
    #[getter]
    fn tools<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let tools = self.limit.shared_by();
        tools.map(|tools| PyTuple::new(py, tools)).transpose()
    }

    /// The fields that split this limit.
    #[getter]
    fn per<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.limit.split_by())
    }

    /// How long a call may wait for its turn, in seconds.
    #[getter]
    fn max_wait(&self) -> f64 {
        seconds(self.limit.longest_wait())
    }

    /// How many calls may run at the same time in this process; None for any number.
    #[getter]
    fn max_concurrent(&self) -> Option<u64> {
        self.limit.most_concurrent()
    }

    /// What a call spends that does not say its cost itself, in tokens.
    #[getter]
    fn cost(&self) -> u64 {
        self.limit.default_cost()
    }

    /// What becomes of a call while a Redis store fails; None where the limiter says it.
    #[getter]
    fn on_store_error(&self) -> Option<String> {
        self.limit
            .when_store_fails()
            .map(|policy| policy.to_string())
    }

    pub(crate) fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let burst = self.limit.capacity();
        let Parts { pace, is_quota, .. } = self.parts();
        let mut shown = match (self.limit.as_quota(), plain_count(&self.limit, &pace)) {
            (Some((count, unit)), _) => {
                format!(
                    "ToolRateLimit.quota({count}, per='{}', burst={burst}",
                    unit.symbol()
                )
            }
            (None, Some(count)) => {
                format!("ToolRateLimit(requests_per_second={count}, burst={burst}")
            }
            (None, None) => format!("ToolRateLimit.parse('{pace}', burst={burst}"),
        };
        if let Some(tools) = self.tools(py)? {
            let _ = write!(shown, ", tools={}", tools.repr()?.to_string_lossy());
        }
        let per = self.per(py)?;
        if !per.is_empty() {
            let name = if is_quota { "fields" } else { "per" };
            let _ = write!(shown, ", {name}={}", per.repr()?.to_string_lossy());
        }
        if !self.limit.longest_wait().is_zero() {
            let _ = write!(shown, ", max_wait={:?}", self.max_wait());
        }
        if let Some(calls) = self.max_concurrent() {
            let _ = write!(shown, ", max_concurrent={calls}");
        }
        if self.cost() != 1 {
            let _ = write!(shown, ", cost={}", self.cost());
        }
        if let Some(policy) = self.on_store_error() {
            let _ = write!(shown, ", on_store_error='{policy}'");
        }
        Ok(shown + ")")
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Parts,))> {
        let restore = py.import("callgate._callgate")?.getattr("restore_limit")?;
        Ok((restore, (self.parts(),)))
    }
}

impl ToolRateLimit {
    fn parts(&self) -> Parts {
        let limit = &self.limit;
        let pace = match limit.as_quota() {
            Some((count, unit)) => format!("{count}/{}", unit.symbol()),
            None => limit
                .rate()
                .map_or_else(|error| error.to_string(), |rate| rate.to_string()),
        };
        Parts {
            pace,
            is_quota: limit.as_quota().is_some(),
            burst: limit.capacity(),
            tools: limit.shared_by().map(<[String]>::to_vec),
            per: limit.split_by().to_vec(),
            // A limit that was taken has no wait of more than a day.
            max_wait_nanos: limit
                .longest_wait()
                .as_nanos()
                .try_into()
                .unwrap_or(u64::MAX),
            max_concurrent: limit.most_concurrent(),
            cost: limit.default_cost(),
            on_store_error: self.on_store_error(),
        }
    }
}

/// Makes a pickled limit again.
#[pyfunction]
pub(crate) fn restore_limit(py: Python<'_>, parts: Parts) -> PyResult<ToolRateLimit> {
    let limit = if parts.is_quota {
        Limit::parse_quota(&parts.pace)
    } else {
        parts.pace.parse()
    };
    let complete = |limit: Limit| {
        let mut limit = limit.burst(parts.burst).per(parts.per).cost(parts.cost);
        limit = limit.max_wait(Duration::from_nanos(parts.max_wait_nanos));
        if let Some(tools) = parts.tools {
            limit = limit.tools(tools);
        }
        if let Some(calls) = parts.max_concurrent {
            limit = limit.max_concurrent(calls);
        }
        if let Some(policy) = parts.on_store_error {
            limit = limit.on_store_error(policy.parse()?);
        }
        limit.check()?;
        Ok(ToolRateLimit { limit })
    };
    limit
        .and_then(complete)
        .map_err(|error| config_error(py, error.to_string()))
}

/// The number in front of `/s`, where it reads back as the same rate: a float has fewer digits than a
/// rate may have.
fn plain_count<'a>(limit: &Limit, text: &'a str) -> Option<&'a str> {
    text.strip_suffix("/s").filter(|count| {
        let back = count.parse::<f64>();
        back.map(|count| Limit::per_second(count).rate()) == Ok(limit.rate())
    })
}

/// What may be left out, as Python gave it.
struct Options<'a, 'py> {
    tools: Option<&'a Bound<'py, PyAny>>,
    per: Argument<'py>,
    max_wait: Argument<'py>,
    max_concurrent: Option<&'a Bound<'py, PyAny>>,
    cost: Argument<'py>,
    on_store_error: Option<&'a Bound<'py, PyAny>>,
}

impl Options<'_, '_> {
    /// The limit with these; `per` is what the fields that split it are called.
    fn complete(&self, mut limit: Limit, per: &str) -> PyResult<ToolRateLimit> {
        if let Argument::Given(cost) = &self.cost {
            limit = checked(limit.cost(whole(cost)?.unwrap_or(0)), "cost", cost)?;
        }
        if let Some(tools) = self.tools {
            limit = named(&limit, "tools", tools, Limit::tools)?;
        }
        if let Argument::Given(fields) = &self.per {
            if unit(fields).is_some() {
                let must = format!(
                    "{per} must be the fields that split the limit, not a unit of time (ToolRateLimit.parse takes a rate such as '300/min')"
                );
                return Err(refusal(fields, &must));
            }
            limit = named(&limit, per, fields, Limit::per)?;
        }
        if let Argument::Given(time) = &self.max_wait {
            limit = limit.max_wait(wait(time)?);
        }
        if let Some(calls) = self.max_concurrent {
            let limited = limit.max_concurrent(whole(calls)?.unwrap_or(0));
            limit = checked(limited, "max_concurrent", calls)?;
        }
        if let Some(given) = self.on_store_error {
            limit = limit.on_store_error(policy(given)?);
        }
        Ok(ToolRateLimit { limit })
    }
}

/// A unit of time, by its name.
fn unit(value: &Bound<'_, PyAny>) -> Option<Unit> {
    let text = value.cast::<PyString>().ok()?;
    text.to_str().ok()?.parse().ok()
}

/// What is to become of a call while the store fails.
pub(crate) fn policy(value: &Bound<'_, PyAny>) -> PyResult<OnStoreError> {
    let text = value.cast::<PyString>().ok();
    let policy = text.and_then(|text| text.to_str().ok()?.parse().ok());
    policy.ok_or_else(|| {
        let must = "on_store_error must be 'local', 'deny', 'admit' or 'raise'";
        refusal(value, must)
    })
}

/// What is no whole number is as far out of range as 0 is.
fn with_burst(limit: Limit, burst: &Bound<'_, PyAny>) -> PyResult<Limit> {
    checked(limit.burst(whole(burst)?.unwrap_or(0)), "burst", burst)
}

/// A limit that was found to be right; else the value is refused that it was just given.
fn checked(limit: Limit, field: &str, value: &Bound<'_, PyAny>) -> PyResult<Limit> {
    match limit.check() {
        Ok(()) => Ok(limit),
        Err(error) => Err(refused(&error, field, value)),
    }
}

/// A limit with some names, or one. A name that is refused is shown without the others.
fn named(
    limit: &Limit,
    field: &str,
    value: &Bound<'_, PyAny>,
    set: impl Fn(Limit, Vec<String>) -> Limit,
) -> PyResult<Limit> {
    let names = texts(field, value)?;
    for name in &names {
        let shown = PyString::new(value.py(), name);
        checked(set(limit.clone(), vec![name.clone()]), field, &shown)?;
    }
    checked(set(limit.clone(), names), field, value)
}

/// Some names, or one.
fn texts(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let text = |name: &Bound<'_, PyAny>| {
        let Ok(text) = name.cast::<PyString>() else {
            return Err(refusal(name, &format!("each of {field} must be a str")));
        };
        let text = text.to_str().map(str::to_owned);
        text.map_err(|_| refusal(name, &format!("each of {field} must be valid Unicode")))
    };
    if value.is_instance_of::<PyString>() {
        return Ok(vec![text(value)?]);
    }
    let Some(names) = of_kind(value.py(), value.try_iter())? else {
        let must = format!("{field} must be a name or a list of names");
        return Err(refusal(value, &must));
    };
    names.map(|name| text(&name?)).collect()
}

/// A limit of a number of requests in a unit of time, as Python gave it.
fn counted(
    field: &str,
    count: &Bound<'_, PyAny>,
    limit: impl Fn(Count) -> Limit,
) -> PyResult<Limit> {
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
        Ok(_) => Ok(limit),
        Err(error) => Err(refused(&error, field, count)),
    }
}

/// How long a call may wait, from seconds as Python gave them.
pub(crate) fn wait(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    time(value)?.ok_or_else(|| {
        let must = "max_wait must be an int or a float, from 0 to 86,400 seconds";
        refusal(value, must)
    })
}

/// A time of at most a day, to the nearest nanosecond, from seconds as Python gave them.
pub(crate) fn time(value: &Bound<'_, PyAny>) -> PyResult<Option<Duration>> {
    Ok(match value.cast::<PyFloat>() {
        Ok(float) => Some(float.value())
            .filter(|seconds| (0.0..=MAX_WAIT.as_secs_f64()).contains(seconds))
            .and_then(|seconds| nanos(seconds)?.try_into().ok())
            .map(Duration::from_nanos),
        Err(_) => integer(value)?
            .and_then(|whole| whole.extract().ok())
            .map(Duration::from_secs)
            .filter(|wait| *wait <= MAX_WAIT),
    })
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
