//! `Limiter`.

use std::mem;
use std::num::NonZeroU64;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use callgate::{Call, Decision as Core, HighWater, LimiterBuilder, Reading, Reason, Rejection};
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyDict, PyEllipsis, PyInt, PyList, PyMapping, PyString, PyTuple, PyType,
};

use crate::bell::Bell;
use crate::counts::Counts;
use crate::decision::Decision;
use crate::limit::{ToolRateLimit, policy, time, wait, whole};
use crate::logging::say_kept;
use crate::seconds::{nanos, seconds, seconds_until};
use crate::store::{Metered, StoreCounts};
use crate::trace::TracedCall;
use crate::turn::{CallParts, Turn, lock};
use crate::{Argument, config_error, of_kind, refusal, store_error};

/// What `callgate.Limiter` is made of: everything but waiting.
#[pyclass(frozen, subclass, module = "callgate._callgate")]
pub(crate) struct Limiter {
    core: callgate::Limiter,
    /// What Python needs of each name, by its number in the core.
    names: boxcar::Vec<Named>,
    /// Whether fields split any limit.
    split: AtomicBool,
    /// Whether calls may wait under any limit.
    waits: AtomicBool,
    clock: Option<Clock>,
    /// Of a store over a network.
    metered: Option<Metered>,
    is_closed: AtomicBool,
}

struct Named {
    name: Py<PyString>,
    counts: Arc<Counts>,
}

/// A limit, and what its buckets hold: see `Limiter.snapshot`.
#[pyclass(frozen, module = "callgate", get_all)]
pub(crate) struct LimitSnapshot {
    /// The limit.
    limit: Py<ToolRateLimit>,
    /// The whole tokens in the bucket; None where fields split the limit: each bucket has its own.
    remaining: Option<u64>,
    /// How many buckets are kept: 1 where no field splits the limit.
    ///
    /// Where some do: those that are not full, and those that were not when last looked at.
    buckets: usize,
    /// The seconds for which the limit is paused from now on; None where it is not.
    ///
    /// Of the default limit, the tool for which that is longest.
    paused: Option<f64>,
}

#[pymethods]
impl LimitSnapshot {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let limit = self.limit.get().__repr__(py)?;
        let remaining = self.remaining.into_pyobject(py)?.repr()?;
        let paused = self.paused.into_pyobject(py)?.repr()?;
        Ok(format!(
            "LimitSnapshot(limit={limit}, remaining={}, buckets={}, paused={})",
            remaining.to_string_lossy(),
            self.buckets,
            paused.to_string_lossy()
        ))
    }
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over")]
impl Limiter {
    #[new]
    #[pyo3(signature = (limits, *, default=None, store=None, on_store_error=None, dry_run=Argument::Default, clock=None),
        text_signature = "(limits, *, default=None, store=None, on_store_error=None, dry_run=False, clock=None)")]
    fn new(
        limits: &Bound<'_, PyAny>,
        default: Option<&Bound<'_, PyAny>>,
        store: Option<&Bound<'_, PyAny>>,
        on_store_error: Option<&Bound<'_, PyAny>>,
        dry_run: Argument<'_>,
        clock: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        if let Ok(file) = limits.cast::<File>() {
            let builder = file
                .get()
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            return Self::build(
                limits.py(),
                builder.unwrap_or_else(callgate::Limiter::builder),
                clock,
            );
        }
        let must = if of_kind(limits.py(), limits.extract::<PathBuf>())?.is_some() {
            "limits must be a mapping of names to ToolRateLimit (Limiter.from_file reads a file)"
        } else {
            "limits must be a mapping of names to ToolRateLimit"
        };
        let mut builder = builder(&items(limits, must)?)?;
        if let Some(default) = default {
            builder = builder.default_limit(limit_of("default", default)?);
        }
        if let Some(store) = store {
            let Some(url) = text(store) else {
                // Whatever it is, a password may be in it.
                return Err(config_error(
                    store.py(),
                    format!(
                        "store must be a store's URL as a str, such as 'shm:/run/myapp/callgate' or \
                     'redis://127.0.0.1:6379/0?prefix=myapp', got a value of type {}",
                        store.get_type().name()?
                    ),
                ));
            };
            builder = builder.store(&*url);
        }
        if let Some(given) = on_store_error {
            builder = builder.on_store_error(policy(given)?);
        }
        if let Argument::Given(dry_run) = &dry_run {
            builder = builder.dry_run(truth("dry_run", dry_run)?);
        }
        Self::build(limits.py(), builder, clock)
    }

    /// Makes a limiter from a TOML file of limits.
    ///
    /// Args:
    ///     `path`: The file, of at most 1 MiB: a str or a `pathlib.Path`.
    ///     `clock`: As in `Limiter`.
    ///
    /// Raises:
    ///     `ConfigError`: If the file cannot be read or anything in it is refused: the message has all faults,
    ///         each with its line.
    #[classmethod]
    #[pyo3(signature = (path, *, clock=None))]
    fn from_file<'py>(
        class: &Bound<'py, PyType>,
        path: &Bound<'py, PyAny>,
        clock: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = path.py();
        let Some(file) = of_kind(py, path.extract::<PathBuf>())? else {
            let must = "path must be a file's path: a str or a pathlib.Path";
            return Err(refusal(path, must));
        };
        let file = File(Mutex::new(Some(read(py, file)?)));
        let keywords = PyDict::new(py);
        keywords.set_item("clock", clock)?;
        class.call((file,), Some(&keywords))
    }

    /// Decides on one call, at once: never waits for tokens.
    ///
    /// A Redis store is asked, and waited for up to its timeout, while other threads run.
    ///
    /// Args:
    ///     `tool`: The tool's name.
    ///     `cost`: The call's cost in tokens, a whole number of at least 1; left out, what the limits say. A cost
    ///         above a limit's burst is refused with the reason 'cost'.
    ///     `fields`: What limits are split by, such as tenant='acme': a text, or a whole number, which counts as
    ///         its digits. None is as if it were not given. Fields that split no limit of the tool are not
    ///         looked at.
    ///
    /// Returns:
    ///     The `Decision`, which is true where the call may run. Its tokens are then spent, whatever becomes of it.
    ///
    /// Raises:
    ///     `ConfigError`: If the name, the cost or a field is not what it should be, or an injected clock returned
    ///         something else than a finite number.
    ///     `StoreError`: If a Redis store fails and `on_store_error` is 'raise', or the limiter is closed.
    #[pyo3(signature = (tool, *, cost=Argument::Default, **fields), text_signature = "($self, tool, *, cost=..., **fields)")]
    fn try_acquire<'py>(
        slf: &Bound<'py, Self>,
        tool: &Bound<'py, PyAny>,
        cost: Argument<'_>,
        fields: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Decision>> {
        let limiter = slf.get();
        let tool = named(tool)?;
        let cost = match cost {
            Argument::Default => None,
            Argument::Given(cost) => Some(tokens(tool, &cost)?),
        };
        if limiter.is_remote() {
            let fields = fields.map(|fields| values(tool, fields)).transpose()?;
            return ask_store(slf, tool, cost, fields.unwrap_or_default());
        }
        match fields {
            None => limiter.ask(tool, cost, &[], |asked| asked.decision(tool))?,
            Some(fields) => {
                let fields = values(tool, fields)?;
                limiter.ask(tool, cost, &fields, |asked| asked.decision(tool))?
            }
        }
    }

    /// Decides on a call that may wait: the decision, or else the turn to be asked for one.
    #[pyo3(signature = (tool, cost, max_wait, fields))]
    fn _begin<'py>(
        slf: &Bound<'py, Self>,
        tool: &Bound<'py, PyAny>,
        cost: &Bound<'py, PyAny>,
        max_wait: Option<&Bound<'py, PyAny>>,
        fields: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tool, call) = parts(tool, cost, max_wait, fields)?;
        match slf
            .get()
            .ask_first(tool, &call, |asked| asked.decision(tool))?
        {
            Some(decision) => Ok(decision?.into_any()),
            None => Ok(Turn::object(slf, tool, call)?.into_any()),
        }
    }

    /// Refuses what is no call.
    #[staticmethod]
    fn _check(
        tool: &Bound<'_, PyAny>,
        cost: &Bound<'_, PyAny>,
        max_wait: Option<&Bound<'_, PyAny>>,
        fields: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        parts(tool, cost, max_wait, fields)?;
        Ok(())
    }

    /// For front ends: what is to be done about a call other than to run it, or None.
    ///
    /// That is its decision, where it was rejected or would have been, or where it is to be held while the call
    /// runs; or its turn, where it is to wait. Most calls are admitted, and most front ends then look no
    /// further. `find(context, names)` is asked for the call's fields where a limit needs some, or it is traced.
    /// Without a cost it is what the limits say.
    #[pyo3(signature = (tool, context, find, cost=None, traced=None))]
    fn _admit<'py>(
        slf: &Bound<'py, Self>,
        tool: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
        find: &Bound<'py, PyAny>,
        cost: Option<&Bound<'py, PyAny>>,
        traced: Option<&Bound<'py, TracedCall>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let limiter = slf.get();
        let tool = named(tool)?;
        let mut call = CallParts {
            cost: cost.map(|cost| tokens(tool, cost)).transpose()?,
            max_wait: None,
            fields: Vec::new(),
        };
        if traced.is_some() || limiter.split.load(Ordering::Relaxed) {
            let needed = limiter.core.fields_of(&tool.to_string_lossy());
            if traced.is_some() || !needed.is_empty() {
                let needed = PyTuple::new(slf.py(), needed)?;
                call.fields = values(tool, &dict(find.call1((context, needed))?)?)?;
            }
        }
        if let Some(traced) = traced {
            traced.get().begin(&call.call(&tool.to_string_lossy()));
        }
        let decided = limiter.ask_first(tool, &call, |asked| match &asked.decision {
            Core::Admitted(permit) if !permit.is_special() => None,
            _ => Some(asked.decision(tool)),
        })?;
        Ok(match decided {
            Some(decision) => decision.transpose()?.map(Bound::into_any),
            None => Some(Turn::object(slf, tool, call)?.into_any()),
        })
    }

    /// Admits no call of a tool for some time, since the service behind it asked for that.
    ///
    /// It pauses the limit of the tool that refills fastest, with all its buckets and for all its tools, which is
    /// enough since all limits must admit a call. When the pause ends, its buckets are empty and refill from
    /// there; other limits keep their level. Of the default limit only the buckets of this tool pause. A pause
    /// that ends later stays as it is.
    ///
    /// Args:
    ///     `tool`: The tool's name.
    ///     `seconds`: How long: above 0, up to 86,400.
    ///     `limit`: The name of another limit of the tool's, to pause in place of the fastest.
    ///
    /// Raises:
    ///     `ConfigError`: If no limit holds for the tool, or not the one that is named, or a value is not what it
    ///         should be.
    ///     `StoreError`: If the limiter is closed.
    #[pyo3(signature = (tool, seconds, *, limit=None))]
    fn pause(
        &self,
        tool: &Bound<'_, PyAny>,
        seconds: &Bound<'_, PyAny>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = tool.py();
        let tool = named(tool)?.to_string_lossy();
        let Some(time) = time(seconds)?.filter(|time| !time.is_zero()) else {
            let must = "seconds must be an int or a float, above 0 and up to 86,400";
            return Err(refusal(seconds, must));
        };
        let name = limit.map(|limit| {
            let text = limit.cast::<PyString>().ok();
            let text = text.map(|text| text.to_string_lossy());
            text.ok_or_else(|| refusal(limit, "limit must be a limit's name"))
        });
        let name = name.transpose()?;
        self.check_open(py)?;
        match self.now(py)? {
            None => self.core.pause(&tool, time, name.as_deref()),
            Some(now) => self
                .core
                .pause_at(&tool, time, name.as_deref(), now.elapsed()),
        }
        .map_err(|error| config_error(py, error.to_string()))
    }

    /// Puts other limits in force: at once, and for every call from then on.
    ///
    /// A limit with the same name as one before keeps its level in tokens, in every bucket: a lower burst cuts
    /// it, a higher one adds nothing. Under a new name it starts full. Where other fields split a limit than
    /// before, all its buckets start as the emptiest of the old.
    ///
    /// Args:
    ///     `limits_or_path`: The limits by name, or the TOML file that has them. At least one, where there is no
    ///         default.
    ///     `default`: With a mapping, the limit of all other tools, or None for none; left out, it stays as it
    ///         is. A file says it itself.
    ///     `dry_run`: The same of the dry run. So does the limiter's `on_store_error`.
    ///
    /// Raises:
    ///     `ConfigError`: If anything is not what it should be. The limits before then stay in force, untouched.
    #[pyo3(signature = (limits_or_path, *, default=Argument::Default, dry_run=Argument::Default),
        text_signature = "($self, limits_or_path, *, default=..., dry_run=...)")]
    fn reload(
        &self,
        limits_or_path: &Bound<'_, PyAny>,
        default: Argument<'_>,
        dry_run: Argument<'_>,
    ) -> PyResult<()> {
        let py = limits_or_path.py();
        if let Some(path) = of_kind(py, limits_or_path.extract::<PathBuf>())? {
            for (name, argument) in [("default", &default), ("dry_run", &dry_run)] {
                if let Argument::Given(value) = argument {
                    let must = format!("{name} must be left out where a file says it");
                    return Err(refusal(value, &must));
                }
            }
            let builder = read(py, path)?;
            return self.put_in_force(py, || Ok(builder));
        }
        let must = "limits_or_path must be a mapping of names to ToolRateLimit, or a file's path";
        let limits = items(limits_or_path, must)?;
        let builder = builder(&limits)?;
        let default = match &default {
            Argument::Default => None,
            Argument::Given(none) if none.is_none() => Some(None),
            Argument::Given(default) => Some(Some(limit_of("default", default)?)),
        };
        let dry_run = match &dry_run {
            Argument::Default => None,
            Argument::Given(dry_run) => Some(truth("dry_run", dry_run)?),
        };
        self.put_in_force(py, || {
            let mut builder = builder.dry_run(dry_run.unwrap_or_else(|| self.core.is_dry_run()));
            if let Some(policy) = self.core.when_store_fails() {
                builder = builder.on_store_error(policy);
            }
            match default.unwrap_or_else(|| self.default()) {
                Some(default) => Ok(builder.default_limit(default)),
                None if limits.is_empty() => {
                    // Most likely a configuration that could not be fetched.
                    let must =
                        "limits_or_path must hold at least one limit where there is no default";
                    Err(refusal(limits_or_path, must))
                }
                None => Ok(builder),
            }
        })
    }

    /// What each limit's buckets hold now: a `LimitSnapshot` by the limit's name. Looking spends nothing.
    ///
    /// The limits are in the order they were given, the one for all other tools last, as '[default]'. A Redis store
    /// is asked, and waited for up to its timeout, while other threads run.
    ///
    /// Raises:
    ///     `StoreError`: If the limiter is closed.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut look = self.begin_look(py, None)?;
        if let Some(look) = &mut look {
            py.detach(|| look.wait());
        }
        self.levels_of(py, look)
    }

    /// Asks a Redis store what its buckets hold, for `_snapshot`; None where there is nothing to ask.
    fn _look(&self, py: Python<'_>) -> PyResult<Option<Look>> {
        let bell = Bell::of_thread(py)?;
        let look = self.begin_look(py, Some(bell.waker(&Arc::default())))?;
        Ok(look.map(|look| Look::new(look, bell)))
    }

    /// Whether its store is asked over a network.
    #[getter]
    fn _is_remote(&self) -> bool {
        self.is_remote()
    }

    /// The snapshot with what was told.
    fn _snapshot<'py>(&self, py: Python<'py>, look: Option<&Look>) -> PyResult<Bound<'py, PyDict>> {
        self.levels_of(py, look.and_then(Look::take))
    }

    /// What was asked of a Redis store in this process: its `StoreCounts`, or None with another store.
    fn store_counts(&self, py: Python<'_>) -> Option<StoreCounts> {
        say_kept(py);
        let metered = self.metered.as_ref();
        metered.map(|metered| StoreCounts::of(&metered.meter))
    }

    /// Lets go of a Redis store: what was asked before is answered or late, and then its connection and its thread
    /// end. With other stores it does nothing.
    fn close(&self) {
        if self.is_remote() {
            self.is_closed.store(true, Ordering::Relaxed);
            self.core.close();
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let limits = PyDict::new(py);
        let mut default = String::new();
        for (name, limit) in self.core.limits() {
            let limit = ToolRateLimit { limit };
            if name == DEFAULT {
                default = format!(", default={}", limit.__repr__(py)?);
            } else {
                limits.set_item(name, limit)?;
            }
        }
        let store = match self.core.store_url() {
            Some(url) => format!(", store={}", PyString::new(py, url).repr()?),
            None => String::new(),
        };
        let policy = match self.core.when_store_fails() {
            Some(policy) => format!(", on_store_error='{policy}'"),
            None => String::new(),
        };
        let dry_run = if self.core.is_dry_run() {
            ", dry_run=True"
        } else {
            ""
        };
        let limits = limits.repr()?;
        Ok(format!(
            "Limiter({}{default}{store}{policy}{dry_run})",
            limits.to_string_lossy()
        ))
    }

    /// An injected clock may hold the limiter, in a cycle.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.clock {
            Some(clock) => visit.call(&clock.read),
            None => Ok(()),
        }
    }
}

/// The name of the default limit.
const DEFAULT: &str = "[default]";

impl Limiter {
    fn build(
        py: Python<'_>,
        builder: LimiterBuilder,
        clock: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        if let (Some(clock), Some(_)) = (&clock, builder.store_url()) {
            let must =
                "clock must be left out beside a store: all processes that share it have one clock";
            return Err(refusal(clock, must));
        }
        let clock = clock.map(Clock::new).transpose()?;
        let core = py.detach(|| builder.build());
        let core = core.map_err(|error| config_error(py, error.to_string()))?;
        let meter = core.store_meter();
        let url = core.store_url().unwrap_or_default();
        let limiter = Self {
            metered: meter.map(|meter| Metered::new(url, meter)),
            core,
            names: boxcar::Vec::new(),
            split: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            clock,
            is_closed: AtomicBool::new(false),
        };
        limiter.look(py);
        Ok(limiter)
    }

    /// Takes in what the core has in force.
    fn look(&self, py: Python<'_>) {
        for name in self.core.names(self.names.count()) {
            self.names.push(Named {
                name: PyString::new(py, name).unbind(),
                counts: Counts::of(name),
            });
        }
        let (mut split, mut waits) = (false, false);
        for (_, limit) in self.core.limits() {
            split |= limit.split_by().iter().any(|field| field != "tool");
            waits |= !limit.longest_wait().is_zero();
        }
        self.split.store(split, Ordering::Relaxed);
        self.waits.store(waits, Ordering::Relaxed);
    }

    /// Puts limits in force that are finished once the time is known: no Python runs from then on, so
    /// that no other reload comes in between.
    fn put_in_force(
        &self,
        py: Python<'_>,
        finished: impl FnOnce() -> PyResult<LimiterBuilder>,
    ) -> PyResult<()> {
        let now = self.now(py)?;
        let builder = finished()?;
        match now {
            None => self.core.reload(builder),
            Some(now) => self.core.reload_at(builder, now.elapsed()),
        }
        .map_err(|error| config_error(py, error.to_string()))?;
        self.look(py);
        Ok(())
    }

    /// Whether its store has to be asked, over a network.
    #[inline]
    pub(crate) fn is_remote(&self) -> bool {
        self.metered.is_some()
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(store_error(py, "the limiter is closed".to_owned()));
        }
        Ok(())
    }

    /// The limit of the tools that no other limit holds for.
    fn default(&self) -> Option<callgate::Limit> {
        let mut limits = self.core.limits().into_iter();
        let (_, default) = limits.find(|(name, _)| *name == DEFAULT)?;
        Some(default)
    }

    fn begin_look(&self, py: Python<'_>, waker: Option<Waker>) -> PyResult<Option<callgate::Look>> {
        self.check_open(py)?;
        Ok(self.core.look(waker))
    }

    fn levels_of<'py>(
        &self,
        py: Python<'py>,
        look: Option<callgate::Look>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let levels = match self.now(py)? {
            None => self.core.snapshot_of(look),
            Some(now) => self.core.snapshot_at(now.elapsed()),
        };
        let snapshots = PyDict::new(py);
        for level in levels {
            let limit = level.limit;
            let snapshot = LimitSnapshot {
                limit: Py::new(py, ToolRateLimit { limit })?,
                remaining: level.remaining,
                buckets: level.buckets,
                paused: level.paused.map(seconds),
            };
            snapshots.set_item(level.name, snapshot)?;
        }
        Ok(snapshots)
    }

    /// What time an injected clock makes it.
    fn now(&self, py: Python<'_>) -> PyResult<Option<Now>> {
        self.clock.as_ref().map(|clock| clock.now(py)).transpose()
    }

    /// Asks the core, counts, and makes an answer of it.
    ///
    /// The answer is made in here, where the compiler has all parts at hand: what is handed out and
    /// taken apart again costs more than the decision.
    #[inline]
    fn ask<T>(
        &self,
        tool: &Bound<'_, PyString>,
        cost: Option<NonZeroU64>,
        fields: &[Field],
        answer: impl FnOnce(Asked<'_>) -> T,
    ) -> PyResult<T> {
        // What is no valid Unicode cannot be named, but may be meant by a pattern.
        let text = tool.to_string_lossy();
        let (decision, now) = self.decide(tool, &text, &call(&text, cost, fields))?;
        Ok(self.count(&text, decision, now, answer))
    }

    /// The same for a call that may wait: None where it is to ask for its turn, or a store is to be asked.
    #[inline]
    fn ask_first<T>(
        &self,
        tool: &Bound<'_, PyString>,
        call: &CallParts,
        answer: impl FnOnce(Asked<'_>) -> T,
    ) -> PyResult<Option<T>> {
        let text = tool.to_string_lossy();
        if self.is_remote()
            && (self.is_closed.load(Ordering::Relaxed) || self.core.is_limited(&text))
        {
            return Ok(None);
        }
        let (decision, now) = self.decide(tool, &text, &call.call(&text))?;
        let may_wait = match (&decision, call.max_wait) {
            (Core::Admitted(_), _) => false,
            (Core::Rejected(rejection), _) if rejection.reason == Reason::Cost => false,
            (_, Some(time)) => !time.is_zero(),
            (_, None) => self.waits.load(Ordering::Relaxed),
        };
        if may_wait {
            return Ok(None);
        }
        Ok(Some(self.count(&text, decision, now, answer)))
    }

    /// Asks for a call's turn: None while it has not come.
    pub(crate) fn poll<'py>(
        &self,
        tool: &Bound<'py, PyString>,
        call: &CallParts,
        turn: &Mutex<callgate::Turn>,
        waker: &Waker,
    ) -> PyResult<Option<Bound<'py, Decision>>> {
        let text = tool.to_string_lossy();
        let call = call.call(&text);
        let now = self.now(tool.py())?;
        // Out of its place, since nothing is locked while others are woken, which runs Python.
        let mut taken = mem::take(&mut *lock(turn));
        if !taken.is_asking() {
            self.check_open(tool.py())?;
        }
        let polled = match &now {
            None => self.core.poll_acquire(&call, &mut taken, waker),
            Some(now) => {
                let elapsed = now.elapsed();
                self.core.poll_acquire_at(&call, &mut taken, waker, elapsed)
            }
        };
        *lock(turn) = taken;
        say_kept(tool.py());
        match polled {
            Poll::Pending => Ok(None),
            Poll::Ready(decision) => {
                let decided = self.count(&text, decision, now, |asked| {
                    asked.decision_or_error(self, tool)
                });
                decided.map(Some)
            }
        }
    }

    #[inline]
    fn decide(
        &self,
        tool: &Bound<'_, PyString>,
        text: &str,
        call: &Call<'_>,
    ) -> PyResult<(Core<'_>, Option<Now>)> {
        let now = match &self.clock {
            Some(clock) if self.core.is_limited(text) => Some(clock.now(tool.py())?),
            _ => None,
        };
        let decision = match &now {
            None => self.core.try_acquire(call),
            Some(now) => self.core.try_acquire_at(call, now.elapsed()),
        };
        Ok((decision, now))
    }

    #[inline]
    fn count<'a, T>(
        &'a self,
        text: &str,
        decision: Core<'a>,
        now: Option<Now>,
        answer: impl FnOnce(Asked<'a>) -> T,
    ) -> T {
        match decision.tool_number() {
            Some(number) => self.names[number].counts.add(&decision),
            None if decision.is_limited() => Counts::of_unnamed(text).add(&decision),
            None => {}
        }
        let rest = Answer {
            names: &self.names,
            now,
        };
        answer(Asked {
            decision,
            answer: rest,
        })
    }
}

/// What the core answered.
struct Asked<'a> {
    decision: Core<'a>,
    answer: Answer<'a>,
}

impl Asked<'_> {
    /// The decision; where the store failed and that is to be an error, the error.
    fn decision_or_error<'py>(
        self,
        limiter: &Limiter,
        tool: &Bound<'py, PyString>,
    ) -> PyResult<Bound<'py, Decision>> {
        if let Core::Rejected(rejection) = &self.decision
            && rejection.raises()
        {
            let why = limiter.metered.as_ref();
            let why = why.and_then(|metered| metered.meter.failure());
            let message = format!(
                "the store failed, and limit '{}' of tool '{}' says to raise an error then: {}",
                rejection.limit(),
                tool.to_string_lossy(),
                why.as_deref().unwrap_or("nobody answers in this process")
            );
            return Err(store_error(tool.py(), message));
        }
        self.decision(tool)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "measured: a tenth of a call")]
    fn decision<'py>(self, tool: &Bound<'py, PyString>) -> PyResult<Bound<'py, Decision>> {
        let answer = self.answer;
        match self.decision {
            Core::Rejected(rejection) => answer.rejected(tool, false, &rejection),
            Core::Admitted(permit) => match permit.overruled() {
                None => {
                    let remaining = permit.remaining();
                    let running = permit.in_flight().map(Box::new);
                    Decision::object(tool, true, None, None, remaining, None, running)
                }
                Some(rejection) => answer.rejected(tool, true, rejection),
            },
        }
    }
}

/// A look into a store, which has to answer: Python waits for that by itself.
#[pyclass(frozen, module = "callgate._callgate")]
pub(crate) struct Look {
    core: Mutex<Option<callgate::Look>>,
    bell: Arc<Bell>,
}

#[pymethods]
impl Look {
    /// The file descriptor to read from until the store has answered; None once it has.
    fn asks_at(&self) -> Option<RawFd> {
        self.bell.hush();
        let mut core = lock(&self.core);
        let is_told = core.as_mut().is_none_or(callgate::Look::is_told);
        (!is_told).then(|| self.bell.descriptor())
    }
}

impl Look {
    fn new(core: callgate::Look, bell: Arc<Bell>) -> Self {
        Self {
            core: Mutex::new(Some(core)),
            bell,
        }
    }

    fn take(&self) -> Option<callgate::Look> {
        lock(&self.core).take()
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        Arc::clone(&self.bell).give_back();
    }
}

/// Decides on a call at once by a store that is to be asked: waits for its answer, in this thread.
///
/// For classes of others: a thread that Python ends in there takes the process along, for Rust's frames on its
/// stack.
fn ask_store<'py>(
    limiter: &Bound<'py, Limiter>,
    tool: &Bound<'py, PyString>,
    cost: Option<NonZeroU64>,
    fields: Vec<Field>,
) -> PyResult<Bound<'py, Decision>> {
    static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let call = CallParts {
        cost,
        max_wait: Some(Duration::ZERO),
        fields,
    };
    let turn = Turn::object(limiter, tool, call)?;
    let wait = WAIT.import(tool.py(), "callgate._limiter", "wait_in_thread")?;
    Ok(wait.call1((turn,))?.cast_into()?)
}

/// What an answer has beside the decision.
struct Answer<'a> {
    names: &'a boxcar::Vec<Named>,
    now: Option<Now>,
}

impl Answer<'_> {
    #[inline]
    fn rejected<'py>(
        &self,
        tool: &Bound<'py, PyString>,
        admitted: bool,
        rejection: &Rejection<'_>,
    ) -> PyResult<Bound<'py, Decision>> {
        Decision::object(
            tool,
            admitted,
            Some(&self.names[rejection.limit_number()].name),
            Some(rejection.reason),
            Some(rejection.remaining()),
            rejection.retry_after.map(|wait| match &self.now {
                None => seconds(wait),
                Some(now) => now.seconds_until(wait),
            }),
            None,
        )
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

/// The names and limits of a mapping, whatever kind it is.
fn items<'py>(limits: &Bound<'py, PyAny>, must: &str) -> PyResult<Bound<'py, PyList>> {
    match limits.cast::<PyMapping>() {
        Ok(mapping) => mapping.items(),
        Err(_) => Err(refusal(limits, must)),
    }
}

fn builder(limits: &Bound<'_, PyList>) -> PyResult<LimiterBuilder> {
    let mut builder = callgate::Limiter::builder();
    for pair in limits {
        let (name, limit) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(text) = name.cast::<PyString>() else {
            let must = "a limit's name must be a str: its tool's name, such as tool.name";
            return Err(refusal(&name, must));
        };
        let text = text
            .to_str()
            .map_err(|_| refusal(&name, "a limit's name must be valid Unicode"))?;
        builder = builder.limit(text, limit_of(&format!("limit '{text}'"), &limit)?);
    }
    Ok(builder)
}

fn limit_of(what: &str, limit: &Bound<'_, PyAny>) -> PyResult<callgate::Limit> {
    match limit.cast::<ToolRateLimit>() {
        Ok(limit) => Ok(limit.get().limit.clone()),
        Err(_) => Err(refusal(limit, &format!("{what} must be a ToolRateLimit"))),
    }
}

fn read(py: Python<'_>, path: PathBuf) -> PyResult<LimiterBuilder> {
    let builder = py.detach(|| LimiterBuilder::from_file(path));
    builder.map_err(|error| config_error(py, error.to_string()))
}

pub(crate) fn truth(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match value.cast::<PyBool>() {
        Ok(truth) => Ok(truth.is_true()),
        Err(_) => Err(refusal(value, &format!("{name} must be True or False"))),
    }
}

/// What a file says, on its way into a limiter.
#[pyclass(frozen, module = "callgate._callgate")]
struct File(Mutex<Option<LimiterBuilder>>);

/// A call, if it is one.
fn parts<'a, 'py>(
    tool: &'a Bound<'py, PyAny>,
    cost: &Bound<'py, PyAny>,
    max_wait: Option<&Bound<'py, PyAny>>,
    fields: &Bound<'py, PyDict>,
) -> PyResult<(&'a Bound<'py, PyString>, CallParts)> {
    let tool = named(tool)?;
    let is_given = !cost.is(PyEllipsis::get(tool.py()));
    let call = CallParts {
        cost: is_given.then(|| tokens(tool, cost)).transpose()?,
        max_wait: max_wait.map(wait).transpose()?,
        fields: values(tool, fields)?,
    };
    Ok((tool, call))
}

/// The call, for the core.
#[inline]
pub(crate) fn call<'a>(tool: &'a str, cost: Option<NonZeroU64>, fields: &'a [Field]) -> Call<'a> {
    let mut call = Call::new(tool);
    if let Some(cost) = cost {
        call = call.cost(cost);
    }
    for (name, value) in fields {
        call = call.field(name, value);
    }
    call
}

/// A call's field and its value.
pub(crate) type Field = (PyBackedStr, PyBackedStr);

/// What a callable found, which may be any mapping.
fn dict(found: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyDict>> {
    let found = match found.cast_into::<PyDict>() {
        Ok(dict) => return Ok(dict),
        Err(error) => error.into_inner(),
    };
    let Ok(mapping) = found.cast::<PyMapping>() else {
        let must = "fields must return a mapping of names to values";
        return Err(refusal(&found, must));
    };
    let dict = PyDict::new(found.py());
    dict.update(mapping)?;
    Ok(dict)
}

/// The fields of a call. A number is taken as its digits, and None as if the field were not there.
fn values(tool: &Bound<'_, PyString>, fields: &Bound<'_, PyDict>) -> PyResult<Vec<Field>> {
    let refused = |value: &Bound<'_, PyAny>, what: &str| {
        let tool = tool.to_string_lossy();
        refusal(value, &format!("tool '{tool}': {what}"))
    };
    let mut values = Vec::with_capacity(fields.len());
    for (name, value) in fields {
        let Some(field) = text(&name) else {
            let must = "a field's name must be a str, and valid Unicode";
            return Err(refused(&name, must));
        };
        if *field == *"max_wait" {
            let must = "max_wait is no field of a call (a call that may wait is for acquire): it must be left out";
            return Err(refused(&value, must));
        }
        if value.is_none() {
            continue;
        }
        let value = match whole_digits(&value)? {
            Some(digits) => text(&digits),
            None => text(&value),
        }
        .ok_or_else(|| {
            let must = format!("field '{field}' must be a str (of valid Unicode), an int or None");
            refused(&value, &must)
        })?;
        values.push((field, value));
    }
    Ok(values)
}

/// A text, if it is one and can be written in UTF-8.
fn text(value: &Bound<'_, PyAny>) -> Option<PyBackedStr> {
    PyBackedStr::try_from(value.cast::<PyString>().ok()?.clone()).ok()
}

/// The digits of an int, whatever a subclass (an enum, say) makes of itself.
fn whole_digits<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if !value.is_instance_of::<PyInt>() || value.is_instance_of::<PyBool>() {
        return Ok(None);
    }
    let int = value.py().get_type::<PyInt>();
    of_kind(value.py(), int.call_method1("__repr__", (value,)))
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
