//! Traces: a line of JSON for each call, written by a thread of its own.
//!
//! A call copies its names into a queue and goes on. The thread hashes, formats and appends, in batches. Where it
//! cannot keep up, or the disk is full, lines are dropped and counted: no call waits for a disk.

mod file;
mod line;
mod queue;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use self::file::Appender;
use self::line::{Form, Outcome, Record};
use self::queue::Queue;
use crate::limit::grouped;
use crate::waiting::forks;
use crate::{Call, ConfigError};

/// A file to which a line is added for each call that has ended: who asked when, and what became of it.
///
/// For a limiter by [`LimiterBuilder::trace`](crate::LimiterBuilder::trace), and for front ends by
/// [`begin`](Self::begin). Clones write to the same file, and so may other processes: lines stay whole. A
/// line is in the file about 20 ms after its call has ended, and for certain after [`flush`](Self::flush) or once
/// the last clone is dropped.
///
/// ```
/// use callgate::{Call, Limit, Limiter, Trace};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("calls.jsonl");
/// let trace = Trace::open(&path)?;
/// let limiter = Limiter::builder()
///     .limit("search", Limit::per_second(1))
///     .trace(trace.clone())
///     .build()?;
/// drop(limiter.try_acquire(&Call::new("search").field("tenant", "test")));
/// drop(limiter.try_acquire(&Call::new("search")));
///
/// assert!(trace.flush());
/// let lines = std::fs::read_to_string(&path).unwrap();
/// let lines: Vec<_> = lines.lines().collect();
/// assert!(lines[0].contains(r#""tool":"search","fields":{"tenant":"9f86d081884c7d65"},"duration":0"#));
/// assert!(lines[1].ends_with(r#""tool":"search","outcome":"rejected"}"#));
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct Trace(Arc<Shared>);

struct Shared {
    path: PathBuf,
    options: TraceOptions,
    form: Form,
    here: OnceLock<Box<Here>>,
}

/// The queue of a process. A forked child has none of its parent's threads, and makes a queue of its own.
struct Here {
    queue: Queue,
    forks: u64,
    child: OnceLock<Box<Here>>,
}

impl Trace {
    /// Opens a trace with hashed fields, of nine files of 64 MiB at most: see [`TraceOptions`].
    ///
    /// # Errors
    /// When the file cannot be written, or is no plain file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        TraceOptions::new().open(path)
    }

    /// Begins a call, for front ends: it is asked for now.
    pub fn begin(&self, call: &Call<'_>) -> Traced {
        Traced {
            record: Some(Box::new(Record::new(call))),
            trace: self.clone(),
        }
    }

    /// Has all be written whose call has ended by now, and waits for that, no longer than 5 s.
    ///
    /// Returns whether it was done by then: written, or dropped and counted.
    pub fn flush(&self) -> bool {
        self.made().is_none_or(Queue::flush)
    }

    /// How many calls have no line, in this process: since more ended than could be written, or none could.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.made().map_or(0, Queue::dropped)
    }

    /// The queue of this process, if it has one yet.
    fn made(&self) -> Option<&Queue> {
        let forks = forks();
        let mut place = self.0.here.get();
        while let Some(here) = place {
            if here.forks == forks {
                return Some(&here.queue);
            }
            place = here.child.get();
        }
        None
    }

    /// The queue of this process; the first call that ends makes it.
    fn queue(&self) -> &Queue {
        let forks = forks();
        let mut place = &self.0.here;
        loop {
            let here = place.get_or_init(|| {
                Box::new(Here {
                    queue: Queue::start(self.0.appender(), self.0.form),
                    forks,
                    child: OnceLock::new(),
                })
            });
            if here.forks == forks {
                return &here.queue;
            }
            place = &here.child;
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trace").field(&self.0.path).finish()
    }
}

impl Shared {
    fn appender(&self) -> Appender {
        let TraceOptions {
            rotate_at, keep, ..
        } = self.options;
        Appender::new(self.path.clone(), rotate_at, keep)
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        if self.forks == forks() {
            self.queue.close();
        } else {
            // Its thread is the parent's, and so are the locks in it.
            self.queue.forget();
        }
    }
}

/// How a [`Trace`] is to be written.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("calls.jsonl");
/// use callgate::TraceOptions;
///
/// let trace = TraceOptions::new().plain_fields().rotate_at(1 << 20).keep(2).open(path)?;
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct TraceOptions {
    plain_fields: bool,
    rotate_at: u64,
    keep: u32,
}

impl TraceOptions {
    /// The smallest file that is worth a rotation, in bytes.
    const LEAST: u64 = 4 << 10;
    const MOST_KEPT: u32 = 1_000;

    /// Hashed fields; a file is rotated at 64 MiB, which is half a million calls, and 8 older ones are kept.
    pub const fn new() -> Self {
        Self {
            plain_fields: false,
            rotate_at: 64 << 20,
            keep: 8,
        }
    }

    /// Writes the values of fields as they are, not the first 16 hex digits of their SHA-256.
    ///
    /// A hash is the same in every process, so that traces can be merged: whoever guesses a value can tell that it is
    /// the right one.
    pub const fn plain_fields(mut self) -> Self {
        self.plain_fields = true;
        self
    }

    /// How large a file may grow, in bytes: 4,096 or more. Then it gets the ending `.1`, and a new one is begun.
    pub const fn rotate_at(mut self, bytes: u64) -> Self {
        self.rotate_at = bytes;
        self
    }

    /// How many older files are kept, from 1 to 1,000: the last one with that number for its ending.
    pub const fn keep(mut self, files: u32) -> Self {
        self.keep = files;
        self
    }

    /// Opens the trace: to be made, or to be gone on with.
    ///
    /// # Errors
    /// When the file cannot be written or is no plain file, or a value is out of range.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Trace, ConfigError> {
        if self.rotate_at < Self::LEAST {
            let allowed = "4,096 bytes or more";
            return Err(ConfigError::new(
                "rotate_at",
                allowed,
                grouped(self.rotate_at),
            ));
        }
        if !(1..=Self::MOST_KEPT).contains(&self.keep) {
            let allowed = "a number of files from 1 to 1,000";
            return Err(ConfigError::new("keep", allowed, grouped(self.keep.into())));
        }
        let form = Form {
            plain_fields: self.plain_fields,
            opened: Instant::now(),
            wall: SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default(),
        };
        let shared = Shared {
            path: path.as_ref().to_owned(),
            options: self,
            form,
            here: OnceLock::new(),
        };
        shared.appender().check().map_err(|error| {
            let path = path.as_ref().display();
            ConfigError::new(
                "trace",
                "a file to which lines can be added",
                format!("'{path}': {error}"),
            )
        })?;
        Ok(Trace(Arc::new(shared)))
    }
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A call that was begun: when it is dropped it has ended, and its line is written.
///
/// Dropped before it is said to be [admitted](Self::admitted), it was cancelled while it waited; after that it went
/// well, unless it is dropped by a panic. The other endings have methods.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("calls.jsonl");
/// use callgate::{Call, Trace};
///
/// # let trace = Trace::open(&path)?;
/// let mut traced = trace.begin(&Call::new("search"));
/// traced.admitted();
/// traced.failed();
/// # trace.flush();
/// # assert!(std::fs::read_to_string(path).unwrap().ends_with("\"outcome\":\"error\"}\n"));
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Debug)]
#[must_use = "its line is written when it is dropped"]
pub struct Traced {
    trace: Trace,
    /// Taken by what ends it.
    record: Option<Box<Record>>,
}

impl Traced {
    /// It has waited for its turn, up to now.
    pub fn waited(&mut self) {
        if let Some(record) = &mut self.record {
            record.waited_until(Instant::now());
        }
    }

    /// It runs from now on.
    pub fn admitted(&mut self) {
        if let Some(record) = &mut self.record {
            record.admitted = Some(Instant::now());
            record.outcome = Outcome::Ok;
        }
    }

    /// It does not run.
    pub fn rejected(mut self) {
        self.end(Outcome::Rejected);
    }

    /// It has ended with an error.
    pub fn failed(mut self) {
        self.end(Outcome::Error);
    }

    /// It was given up.
    pub fn cancelled(mut self) {
        self.end(Outcome::Cancelled);
    }

    /// There is to be no line.
    pub fn discard(mut self) {
        self.record = None;
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(record) = &mut self.record {
            record.outcome = outcome;
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let Some(mut record) = self.record.take() else {
            return;
        };
        record.ended(Instant::now());
        self.trace.queue().send(record);
    }
}
