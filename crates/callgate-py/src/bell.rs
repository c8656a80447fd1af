//! How Python hears that a store has answered.
//!
//! The store's thread waits for nothing of Python's: an interpreter may hold its lock for long, and ends without
//! telling anybody. So the thread notes who was answered, and writes a byte where they listen: an event loop that
//! reads when it has time, or a thread that does nothing else. Until they have read, more answers are
//! only noted: a batch of them costs one byte.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use pyo3::prelude::*;

use crate::store_error;
use crate::turn::{Sleeper, lock};

pub(crate) struct Bell {
    /// Those who were answered since somebody looked.
    answered: Mutex<Vec<Arc<Sleeper>>>,
    process: u32,
    rings: UnixStream,
    hears: UnixStream,
}

/// A thread looks this often whether it was answered: a forked child that goes on where its parent waits may have
/// read the byte.
const LISTENS: Duration = Duration::from_secs(1);

/// So many are kept.
const MOST_IDLE: usize = 16;

/// Bells of threads that do not wait just now.
static IDLE: Mutex<Vec<Arc<Bell>>> = Mutex::new(Vec::new());

impl Bell {
    /// One for an event loop, which never waits for it.
    pub(crate) fn of_loop(py: Python<'_>) -> PyResult<Arc<Self>> {
        let bell = Self::new().and_then(|bell| {
            bell.hears.set_nonblocking(true)?;
            Ok(bell)
        });
        bell.map_err(|error| cannot_wait(py, &error))
    }

    /// One for a thread, to be given back when it has waited.
    pub(crate) fn of_thread(py: Python<'_>) -> PyResult<Arc<Self>> {
        let idle = lock(&IDLE).pop();
        let bell = idle.map_or_else(Self::new, Ok);
        bell.map_err(|error| cannot_wait(py, &error))
    }

    pub(crate) fn give_back(self: Arc<Self>) {
        // A parent's is its own.
        if self.process != process::id() {
            return;
        }
        let mut idle = lock(&IDLE);
        if idle.len() < MOST_IDLE {
            idle.push(self);
        }
    }

    /// Those of a parent are its own.
    pub(crate) fn after_fork() {
        lock(&IDLE).clear();
    }

    fn new() -> io::Result<Arc<Self>> {
        let (rings, hears) = UnixStream::pair()?;
        rings.set_nonblocking(true)?;
        hears.set_read_timeout(Some(LISTENS))?;
        Ok(Arc::new(Self {
            answered: Mutex::default(),
            process: process::id(),
            rings,
            hears,
        }))
    }

    /// What becomes readable when it rings.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.hears.as_raw_fd()
    }

    /// What an answer wakes.
    pub(crate) fn waker(self: &Arc<Self>, sleeper: &Arc<Sleeper>) -> Waker {
        Waker::from(Arc::new(Caller {
            bell: Arc::clone(self),
            sleeper: Arc::clone(sleeper),
        }))
    }

    /// Lets it ring again, for somebody who looks now whether they were answered.
    pub(crate) fn hush(&self) -> Vec<Arc<Sleeper>> {
        std::mem::take(&mut *lock(&self.answered))
    }

    /// Those who were answered.
    pub(crate) fn answered(&self) -> Vec<Arc<Sleeper>> {
        // Read first: whoever comes later rings again.
        let mut bytes = [0; 64];
        while matches!((&self.hears).read(&mut bytes), Ok(64)) {}
        self.hush()
    }

    fn ring(&self, sleeper: Arc<Sleeper>) {
        let mut answered = lock(&self.answered);
        answered.push(sleeper);
        let is_first = answered.len() == 1;
        drop(answered);
        if is_first {
            // Where there is no room for it, there are bytes enough.
            let _ = (&self.rings).write(&[1]);
        }
    }
}

fn cannot_wait(py: Python<'_>, error: &io::Error) -> PyErr {
    store_error(
        py,
        format!("an answer of the store cannot be waited for: {error}"),
    )
}

/// Somebody who waits for an answer.
struct Caller {
    bell: Arc<Bell>,
    sleeper: Arc<Sleeper>,
}

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        self.bell.ring(Arc::clone(&self.sleeper));
    }
}
