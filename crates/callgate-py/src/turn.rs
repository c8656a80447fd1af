//! `Turn` and `Home`: calls that wait, and the event loops in which they do.
//!
//! Python waits by itself, with its own futures, timers and locks: no thread of Rust's is in it, but for one that
//! rings a [`Bell`], and nothing is locked here while Python runs. Python's objects are held where its garbage
//! collector sees them, so that tasks whose event loop is gone go, and give up their places.

use std::collections::BTreeMap;
use std::mem;
use std::num::NonZeroU64;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use callgate::Call;
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

use crate::bell::Bell;
use crate::decision::Decision;
use crate::limiter::{Field, Limiter, call};
use crate::logging::{say, say_kept};
use crate::seconds::seconds;

/// A call that waits for its turn: to be asked until it gives a decision.
#[pyclass(frozen, module = "callgate._callgate")]
pub(crate) struct Turn {
    limiter: Py<Limiter>,
    tool: Py<PyString>,
    call: CallParts,
    /// Before the sleeper, which must outlast it: what waits in a line has a waker.
    core: Mutex<callgate::Turn>,
    sleeper: Arc<Sleeper>,
    timed: Mutex<Option<Timed>>,
    /// Of a thread that waits by itself, while it asks a store.
    bell: Mutex<Option<Arc<Bell>>>,
    has_waited: AtomicBool,
}

/// All of a call but its tool.
pub(crate) struct CallParts {
    pub(crate) cost: Option<NonZeroU64>,
    pub(crate) max_wait: Option<Duration>,
    pub(crate) fields: Vec<Field>,
}

impl CallParts {
    /// The call, as it is asked each time.
    pub(crate) fn call<'a>(&'a self, tool: &'a str) -> Call<'a> {
        call(tool, self.cost, &self.fields)
    }
}

/// What a Turn sleeps on, and whether it was woken. It is looked into under the GIL alone.
#[derive(Default)]
pub(crate) struct Sleeper(Mutex<Sleep>);

#[derive(Default)]
enum Sleep {
    #[default]
    Awake,
    /// Woken before it slept.
    Woken,
    /// On a future, or on a lock.
    On(Py<PyAny>),
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        Python::attach(|py| {
            if let Some(on) = self.rouse() {
                end_sleep(py, &on);
            }
        });
    }
}

impl Sleeper {
    /// What it sleeps on, which is to be told; it does not sleep any more.
    fn rouse(&self) -> Option<Py<PyAny>> {
        match mem::replace(&mut *lock(&self.0), Sleep::Woken) {
            Sleep::On(on) => Some(on),
            Sleep::Awake | Sleep::Woken => None,
        }
    }
}

/// Has Python end a sleep. What becomes of it is not the business of whoever lets the next one have a turn.
fn end_sleep(py: Python<'_>, on: &Py<PyAny>) {
    static WAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let Ok(wake) = WAKE.import(py, "callgate._limiter", "wake") else {
        // Python takes its modules apart as it ends, and nobody wakes up any more.
        return;
    };
    if let Err(error) = wake.call1((on,)) {
        // Ctrl-C, say, which may have come before anything was done.
        let _done = wake.call1((on,));
        say(py, error);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Turn {
    /// The decision, or None where there is none yet: then sleep, and ask again.
    fn ask<'py>(slf: &Bound<'py, Self>) -> PyResult<Option<Bound<'py, Decision>>> {
        let turn = slf.get();
        turn.awake();
        let limiter = turn.limiter.get();
        if let Some(bell) = lock(&turn.bell).as_ref() {
            bell.hush();
        }
        let tool = turn.tool.bind(slf.py());
        let waker = Waker::from(Arc::clone(&turn.sleeper));
        let decision = limiter.poll(tool, &turn.call, &turn.core, &waker);
        let has_waited = lock(&turn.core).has_waited();
        turn.has_waited.store(has_waited, Ordering::Relaxed);
        decision
    }

    /// Whether it had to wait for its turn, and not for a store alone.
    fn has_waited(&self) -> bool {
        self.has_waited.load(Ordering::Relaxed)
    }

    /// This thread waits for it.
    fn take_thread(&self, py: Python<'_>) -> PyResult<()> {
        if self.limiter.get().is_remote() {
            let bell = Bell::of_thread(py)?;
            let core = callgate::Turn::of(None, self.call.max_wait);
            *lock(&self.core) = core.answered_by(bell.waker(&self.sleeper));
            *lock(&self.bell) = Some(bell);
        }
        Ok(())
    }

    /// What a thread is to read from until a store has answered, where one is asked.
    fn asks_at(&self) -> Option<RawFd> {
        let is_asking = lock(&self.core).is_asking();
        let bell = lock(&self.bell);
        bell.as_ref()
            .filter(|_| is_asking)
            .map(|bell| bell.descriptor())
    }

    /// Sleeps on a lock that is locked: returns how many seconds to wait for it.
    fn sleep(&self, on: Py<PyAny>) -> f64 {
        if self.fall_asleep(on) {
            seconds(lock(&self.core).wait())
        } else {
            0.0
        }
    }

    /// Gives up its place.
    fn leave(&self) {
        self.awake();
        // Dropped when nothing is locked: it has the next one come.
        let left = mem::take(&mut *lock(&self.core));
        drop(left);
        let bell = lock(&self.bell).take();
        if let Some(bell) = bell {
            bell.give_back();
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.limiter)?;
        match self.sleeper.0.try_lock().as_deref() {
            Ok(Sleep::On(on)) => visit.call(on),
            _ => Ok(()),
        }
    }

    fn __clear__(&self) {
        let _on = self.sleeper.rouse();
    }
}

impl Turn {
    /// One that has no place yet.
    pub(crate) fn object<'py>(
        limiter: &Bound<'py, Limiter>,
        tool: &Bound<'py, PyString>,
        call: CallParts,
    ) -> PyResult<Bound<'py, Self>> {
        let core = callgate::Turn::of(None, call.max_wait);
        let turn = Self {
            limiter: limiter.clone().unbind(),
            tool: tool.clone().unbind(),
            call,
            core: Mutex::new(core),
            sleeper: Arc::default(),
            timed: Mutex::default(),
            bell: Mutex::default(),
            has_waited: AtomicBool::new(false),
        };
        Bound::new(tool.py(), turn)
    }

    /// Whether it does; not where it was woken before.
    fn fall_asleep(&self, on: Py<PyAny>) -> bool {
        let mut sleep = lock(&self.sleeper.0);
        let sleeps = matches!(*sleep, Sleep::Awake);
        if sleeps {
            *sleep = Sleep::On(on);
        }
        sleeps
    }

    /// It is awake, whatever it slept on, and is not to be woken at a time.
    fn awake(&self) {
        let _on = mem::take(&mut *lock(&self.sleeper.0));
        if let Some(timed) = lock(&self.timed).take() {
            lock(&timed.timers).remove(&timed.key);
        }
    }
}

/// A store's thread may be the last to know of the sleeper, and must not find anything of Python's there.
impl Drop for Turn {
    fn drop(&mut self) {
        let _on = self.sleeper.rouse();
    }
}

type Key = (Instant, u64);
type Timers = Mutex<BTreeMap<Key, Arc<Sleeper>>>;

/// Where a Turn is to be woken at a time.
struct Timed {
    timers: Arc<Timers>,
    key: Key,
}

/// An event loop: when the turns that wait in it are to be woken.
///
/// One timer of the loop's is enough for all of them, and one more for each that is sooner than those before.
#[pyclass(frozen, module = "callgate._callgate")]
#[derive(Default)]
pub(crate) struct Home {
    core: callgate::Home,
    timers: Arc<Timers>,
    alarm: Mutex<Alarm>,
    bell: OnceLock<Arc<Bell>>,
    /// Whether the loop listens to the bell.
    listens: AtomicBool,
}

#[derive(Default)]
struct Alarm {
    /// How many slept here.
    slept: u64,
    /// When the loop is going to look for who is due, the soonest last.
    set: Vec<Instant>,
}

impl Alarm {
    /// Sets it to this time too; not where it rings no later than that anyway.
    fn set(&mut self, time: Instant) -> bool {
        let sooner = self.set.last().is_none_or(|&set| time < set);
        if sooner {
            self.set.push(time);
        }
        sooner
    }
}

#[pymethods]
impl Home {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Has a turn wait here. Says what the loop has to listen to from now on, if it does not yet.
    fn take_in(&self, py: Python<'_>, turn: &Turn) -> PyResult<Option<RawFd>> {
        let core = callgate::Turn::of(Some(self.core.clone()), turn.call.max_wait);
        if !turn.limiter.get().is_remote() {
            *lock(&turn.core) = core;
            return Ok(None);
        }
        let bell = self.bell(py)?;
        *lock(&turn.core) = core.answered_by(bell.waker(&turn.sleeper));
        let listens = self.listens.load(Ordering::Relaxed);
        Ok((!listens).then(|| bell.descriptor()))
    }

    /// The loop listens.
    fn listens(&self) {
        self.listens.store(true, Ordering::Relaxed);
    }

    /// The futures of those whom a store has answered.
    fn answered(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        say_kept(py);
        let bell = self.bell.get();
        let answered = bell.map(|bell| bell.answered()).unwrap_or_default();
        answered
            .iter()
            .filter_map(|sleeper| sleeper.rouse())
            .collect()
    }

    /// Sleeps on a future. Returns after how many seconds to look for who is due, 0.0 where that is no sooner
    /// than before, or None where the turn was woken already and does not sleep.
    fn sleep(&self, turn: &Turn, on: Py<PyAny>) -> Option<f64> {
        if !turn.fall_asleep(on) {
            return None;
        }
        let core = lock(&turn.core);
        if core.is_asking() {
            return Some(0.0);
        }
        let wait = core.wait();
        drop(core);
        let due = Instant::now() + wait;
        let mut alarm = lock(&self.alarm);
        alarm.slept += 1;
        let key = (due, alarm.slept);
        lock(&self.timers).insert(key, Arc::clone(&turn.sleeper));
        let timers = Arc::clone(&self.timers);
        *lock(&turn.timed) = Some(Timed { timers, key });
        Some(if alarm.set(due) { seconds(wait) } else { 0.0 })
    }

    /// The futures of those who are due, and after how many seconds to look again, if not sooner by what was set
    /// before.
    fn due(&self) -> (Vec<Py<PyAny>>, Option<f64>) {
        /// Some loops wake up to half of it too early.
        const TICK: Duration = Duration::from_millis(1);
        let now = Instant::now();
        let mut due = Vec::new();
        let mut timers = lock(&self.timers);
        let next = loop {
            match timers.first_entry() {
                Some(first) if first.key().0 <= now => due.push(first.remove()),
                next => break next.map(|next| next.key().0),
            }
        };
        drop(timers);
        let futures: Vec<_> = due.iter().filter_map(|sleeper| sleeper.rouse()).collect();
        let mut alarm = lock(&self.alarm);
        alarm.set.pop();
        let next = next.filter(|&next| alarm.set(next));
        let wait = next.map(|next| next - now);
        let wait = wait.map(|wait| {
            if futures.is_empty() {
                wait.max(TICK)
            } else {
                wait
            }
        });
        (futures, wait.map(seconds))
    }

    /// The event loop is closed: nobody who waits in it will come.
    fn close(&self) {
        self.core.close();
        let _gone = mem::take(&mut *lock(&self.timers));
    }
}

impl Home {
    fn bell(&self, py: Python<'_>) -> PyResult<&Arc<Bell>> {
        if let Some(bell) = self.bell.get() {
            return Ok(bell);
        }
        let bell = Bell::of_loop(py)?;
        Ok(self.bell.get_or_init(|| bell))
    }
}
