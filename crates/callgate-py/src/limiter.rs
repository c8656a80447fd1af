//! `Limiter`.

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use callgate::{Decision as Core, HighWater, Level, Limit, Reading};
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyString};

use crate::counts::Counts;
use crate::decision::Decision;
use crate::limit::{ToolRateLimit, whole};
use crate::seconds::{nanos, seconds, seconds_until};
use crate::{config_error, of_kind, refusal};

/// Decides whether a tool's call may run now.
///
/// `limits` maps each tool's exact name to its `ToolRateLimit`; a tool that is not named is not limited.
/// `clock`, for tests, is a callable that returns seconds as a float, as `time.monotonic` does.
///
/// One instance may be used from any number of threads and event loops at once.
#[pyclass(frozen, module = "callgate")]
pub(crate) struct Limiter {
    core: callgate::Limiter,
    /// What Python needs of each limit, at the place that it has in the core.
    limits: Vec<Named>,
    clock: Option<Clock>,
}

struct Named {
    name: Py<PyString>,
    counts: Arc<Counts>,
}

/// A limit, and what its bucket holds.
#[pyclass(frozen, module = "callgate", get_all)]
pub(crate) struct LimitSnapshot {
    /// The limit.
    limit: Py<ToolRateLimit>,
    /// The whole tokens in the bucket.
    remaining: u64,
}

#[pymethods]
impl LimitSnapshot {
    fn __repr__(&self) -> String {
        let limit = self.limit.get().__repr__();
        format!("LimitSnapshot(limit={limit}, remaining={})", self.remaining)
    }
}

#[pymethods]
impl Limiter {
    #[new]
    #[pyo3(signature = (limits, *, clock=None))]
    fn new(limits: &Bound<'_, PyAny>, clock: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let py = limits.py();
        let mut builder = callgate::Limiter::builder();
        let mut names = Vec::new();
        for (name, limit) in pairs(limits)? {
            let (name, limit) = named_limit(&name, &limit)?;
            let text = name
                .to_str()
                .map_err(|_| refusal(&name, "a tool's name must be valid Unicode"))?;
            builder = builder.limit(text, limit);
            names.push(name.unbind());
        }
        let core = builder
            .build()
            .map_err(|error| config_error(py, error.to_string()))?;
        let counts = core.snapshot().map(|level| Counts::of(level.name));
        let limits = names
            .into_iter()
            .zip(counts)
            .map(|(name, counts)| Named { name, counts })
            .collect();
        Ok(Self {
            core,
            limits,
            clock: clock.map(Clock::new).transpose()?,
        })
    }

    /// Decides on one call, at once: never waits.
    ///
    /// The tokens (cost, a whole number of at least 1) are spent when it admits, whatever becomes of the call.
    #[pyo3(signature = (tool, *, cost=Cost::One), text_signature = "($self, tool, *, cost=1)")]
    fn try_acquire<'py>(
        &self,
        tool: &Bound<'py, PyAny>,
        cost: Cost<'_>,
    ) -> PyResult<Bound<'py, Decision>> {
        let tool = named(tool)?;
        let cost = match cost {
            Cost::One => NonZeroU64::MIN,
            Cost::Given(cost) => tokens(tool, &cost)?,
        };
        match self.ask(tool, cost, |asked| asked.decision(tool))? {
            Some(decision) => decision,
            None => Decision::object(tool, None, None, None, None),
        }
    }

    /// For front ends: the decision on a call where it was rejected, and nothing where it was admitted.
    ///
    /// Most calls are admitted, and most front ends then look no further.
    fn _admit<'py>(&self, tool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, Decision>>> {
        let tool = named(tool)?;
        let rejected = self.ask(tool, NonZeroU64::MIN, |asked| {
            (!asked.decision.is_admitted()).then(|| asked.decision(tool))
        })?;
        rejected.flatten().transpose()
    }

    /// What each limit's bucket holds now, by the limit's name. Looking spends nothing.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshots = PyDict::new(py);
        let now = self.clock.as_ref().map(|clock| clock.now(py)).transpose()?;
        let levels: Vec<Level<'_>> = match now {
            None => self.core.snapshot().collect(),
            Some(now) => self.core.snapshot_at(now.elapsed()).collect(),
        };
        for (named, level) in self.limits.iter().zip(levels) {
            let limit = level.limit.clone();
            let snapshot = LimitSnapshot {
                limit: Py::new(py, ToolRateLimit { limit })?,
                remaining: level.remaining,
            };
            snapshots.set_item(&named.name, snapshot)?;
        }
        Ok(snapshots)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let limits = PyDict::new(py);
        for (named, level) in self.limits.iter().zip(self.core.snapshot()) {
            let limit = level.limit.clone();
            limits.set_item(&named.name, ToolRateLimit { limit })?;
        }
        Ok(format!("Limiter({})", limits.repr()?.to_string_lossy()))
    }

    /// An injected clock may hold the limiter, in a cycle.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.clock {
            Some(clock) => visit.call(&clock.read),
            None => Ok(()),
        }
    }
}

impl Limiter {
    /// Asks the core, counts, and makes an answer of it; none for a tool without a limit.
    ///
    /// The answer is made in here, where the compiler has all parts at hand: what is handed out and
    /// taken apart again costs more than the decision.
    fn ask<T>(
        &self,
        tool: &Bound<'_, PyString>,
        cost: NonZeroU64,
        answer: impl FnOnce(Asked<'_>) -> T,
    ) -> PyResult<Option<T>> {
        // What is no valid Unicode cannot have been given a limit.
        let Ok(name) = tool.to_str() else {
            return Ok(None);
        };
        let found = self.core.tool(name);
        let Some(named) = found.index().and_then(|index| self.limits.get(index)) else {
            return Ok(None);
        };
        let now = match &self.clock {
            None => None,
            Some(clock) => Some(clock.now(tool.py())?),
        };
        let decision = match &now {
            None => found.try_acquire(cost),
            Some(now) => found.try_acquire_at(cost, now.elapsed()),
        };
        named.counts.add(&decision);
        Ok(Some(answer(Asked {
            named,
            decision,
            now,
        })))
    }
}

/// The cost of a call, as Python gave it or not: None is not a way to leave it out.
enum Cost<'py> {
    One,
    Given(Bound<'py, PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Cost<'py> {
    type Error = Infallible;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self::Given(given.to_owned()))
    }
}

/// What the core answered for a limited tool.
struct Asked<'a> {
    named: &'a Named,
    decision: Core<'a>,
    now: Option<Now>,
}

impl Asked<'_> {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "measured: a tenth of a call")]
    fn decision<'py>(self, tool: &Bound<'py, PyString>) -> PyResult<Bound<'py, Decision>> {
        match self.decision {
            Core::Admitted(permit) => Decision::object(tool, None, None, permit.remaining(), None),
            Core::Rejected(rejection) => Decision::object(
                tool,
                Some(&self.named.name),
                Some(rejection.reason),
                Some(rejection.remaining()),
                rejection.retry_after.map(|wait| match self.now {
                    None => seconds(wait),
                    Some(now) => now.seconds_until(wait),
                }),
            ),
        }
    }
}

/// An injected clock.
struct Clock {
    read: Py<PyAny>,
    /// Its first reading, in nanoseconds.
    first: i128,
    mark: HighWater,
}

/// What an injected clock said, and what time that makes it.
struct Now {
    reading: f64,
    time: Reading,
}

impl Now {
    fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.time.elapsed)
    }

    /// The seconds from this reading on until the limiter's time has moved by `wait`.
    fn seconds_until(&self, wait: Duration) -> f64 {
        let target = self.time.highest + wait.as_nanos().cast_signed();
        if nanos(self.reading).is_some_and(|reading| reading <= self.time.highest) {
            seconds_until(self.reading, target)
        } else {
            // Another thread saw the clock step back after this reading, which counts no more.
            seconds(wait)
        }
    }
}

impl Clock {
    fn new(read: Bound<'_, PyAny>) -> PyResult<Self> {
        if !read.is_callable() {
            let must = "clock must be a callable that returns seconds as a float";
            return Err(refusal(&read, must));
        }
        let (_, first) = reading(&read, None)?;
        Ok(Self {
            mark: HighWater::new(first),
            first,
            read: read.unbind(),
        })
    }

    fn now(&self, py: Python<'_>) -> PyResult<Now> {
        let mut seconds = f64::NAN;
        let time = self.mark.now(|| {
            let (float, nanos) = reading(self.read.bind(py), Some(self.first))?;
            seconds = float;
            Ok::<_, PyErr>(nanos)
        })?;
        Ok(Now {
            reading: seconds,
            time,
        })
    }
}

/// One reading of an injected clock, in seconds and in nanoseconds.
///
/// One that is further from the first than a limiter's time reaches would stop that time for good: it
/// is refused, and most likely in another unit.
fn reading(clock: &Bound<'_, PyAny>, first: Option<i128>) -> PyResult<(f64, i128)> {
    let answer = clock.call0()?;
    let seconds = of_kind(clock.py(), answer.extract::<f64>())?;
    let Some((seconds, nanos)) = seconds.and_then(|seconds| Some((seconds, nanos(seconds)?)))
    else {
        let must = "clock must return seconds as a finite float";
        return Err(refusal(&answer, must));
    };
    if first.is_some_and(|first| nanos.abs_diff(first) >= 1 << 63) {
        let must = "clock must return seconds, within 2^63 ns (292 years) of its first reading";
        return Err(refusal(&answer, must));
    }
    Ok((seconds, nanos))
}

/// The entries of a mapping, whatever kind it is.
fn pairs<'py>(limits: &Bound<'py, PyAny>) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let Ok(mapping) = limits.cast::<PyMapping>() else {
        let must = "limits must be a mapping of tool names to ToolRateLimit";
        return Err(refusal(limits, must));
    };
    mapping.items()?.iter().map(|pair| pair.extract()).collect()
}

/// One entry of the mapping, checked.
fn named_limit<'py>(
    name: &Bound<'py, PyAny>,
    limit: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyString>, Limit)> {
    let name = named(name)?;
    if let Ok(limit) = limit.cast::<ToolRateLimit>() {
        return Ok((name.clone(), limit.get().limit.clone()));
    }
    let must = format!("limit '{}' must be a ToolRateLimit", name.to_string_lossy());
    Err(refusal(limit, &must))
}

fn tokens(tool: &Bound<'_, PyString>, cost: &Bound<'_, PyAny>) -> PyResult<NonZeroU64> {
    whole(cost)?.and_then(NonZeroU64::new).ok_or_else(|| {
        let must = format!(
            "tool '{}': cost must be a whole number of at least 1",
            tool.to_string_lossy()
        );
        refusal(cost, &must)
    })
}

/// A tool's name, where it is one.
#[inline]
fn named<'a, 'py>(tool: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyString>> {
    tool.cast().map_err(|_| {
        refusal(
            tool,
            "tool must be a tool's name (a str, such as its .name)",
        )
    })
}
