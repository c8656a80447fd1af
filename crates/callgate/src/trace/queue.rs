//! The queue between calls, which never wait, and the thread that writes.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use super::file::Appender;
use super::line::{Form, Record};
use crate::limit::grouped;

/// So much waits to be written at most: the number of records, and the bytes of all together.
const MOST_RECORDS: usize = 8 << 10;
const MOST_BYTES: usize = 8 << 20;

/// So many bytes of lines are written at once.
const BATCH: usize = 64 << 10;

/// How long the thread lets records gather, so that calls need not wake it each time.
const NAP: Duration = Duration::from_millis(20);

/// How long it may take to write what is left.
const PATIENCE: Duration = Duration::from_secs(5);

/// The queue of one process.
pub(super) struct Queue {
    /// None once it is closed.
    sender: Option<SyncSender<Box<Record>>>,
    thread: Option<Thread>,
    /// How many records were sent.
    sent: AtomicU64,
    shared: Arc<Shared>,
}

/// What calls and the thread both see.
struct Shared {
    path: String,
    /// Of all records that are not written.
    bytes: AtomicUsize,
    dropped: AtomicU64,
    /// Records were dropped since the queue was last empty.
    is_behind: AtomicBool,
    /// There is something to be said: by a call, since a logger may be one that no thread of ours can use.
    has_news: AtomicBool,
    news: Mutex<Option<String>>,
    /// How many of the sent records were written or dropped.
    done: Mutex<u64>,
    more_done: Condvar,
}

impl Queue {
    /// Makes the queue and its thread. Where there can be no thread, all is dropped.
    pub(super) fn start(appender: Appender, form: Form) -> Self {
        let (sender, receiver) = sync_channel(MOST_RECORDS);
        let shared = Arc::new(Shared {
            path: appender.path().display().to_string(),
            bytes: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            is_behind: AtomicBool::new(false),
            has_news: AtomicBool::new(false),
            news: Mutex::default(),
            done: Mutex::default(),
            more_done: Condvar::new(),
        });
        let writer = Writer {
            receiver,
            appender,
            form,
            is_failing: false,
            shared: Arc::clone(&shared),
        };
        let thread = thread::Builder::new().name("callgate-trace".into());
        let thread = thread.spawn(move || writer.run());
        Self {
            sender: Some(sender),
            thread: thread.ok().map(|thread| thread.thread().clone()),
            sent: AtomicU64::new(0),
            shared,
        }
    }

    /// Leaves a record to be written, or drops it: never waits.
    pub(super) fn send(&self, record: Box<Record>) {
        let shared = &*self.shared;
        let size = record.size();
        let fits = shared.bytes.fetch_add(size, Ordering::Relaxed) + size <= MOST_BYTES;
        let sender = self.sender.as_ref().filter(|_| fits);
        if sender.is_some_and(|sender| sender.try_send(record).is_ok()) {
            self.sent.fetch_add(1, Ordering::Relaxed);
        } else {
            shared.bytes.fetch_sub(size, Ordering::Relaxed);
            shared.dropped.fetch_add(1, Ordering::Relaxed);
            if !shared.is_behind.swap(true, Ordering::Relaxed) {
                log::warn!(
                    "the trace '{}' is written too slowly: some calls get no line there ({} so far)",
                    shared.path,
                    grouped(self.dropped())
                );
            }
        }
        if shared.has_news.load(Ordering::Relaxed) {
            shared.tell();
        }
    }

    pub(super) fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all that was sent so far is done; returns whether it came to that.
    pub(super) fn flush(&self) -> bool {
        let sent = self.sent.load(Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
        let done = lock(&self.shared.done);
        let waited = self
            .shared
            .more_done
            .wait_timeout_while(done, PATIENCE, |done| *done < sent);
        let done = *waited.unwrap_or_else(PoisonError::into_inner).0;
        self.shared.tell();
        done >= sent
    }

    /// Writes what is left, and ends the thread.
    pub(super) fn close(&mut self) {
        self.flush();
        self.sender = None;
    }

    /// Lets go of a queue that belongs to another process, without a look at it.
    pub(super) fn forget(&mut self) {
        mem::forget((self.sender.take(), self.thread.take()));
    }
}

impl Shared {
    /// Says what has come up, if no other thread does.
    #[cold]
    fn tell(&self) {
        self.has_news.store(false, Ordering::Relaxed);
        let news = self.news.try_lock().ok().and_then(|mut news| news.take());
        if let Some(news) = news {
            log::warn!("{news}");
        }
    }
}

/// The thread that writes.
struct Writer {
    receiver: Receiver<Box<Record>>,
    appender: Appender,
    form: Form,
    /// The last batch could not be written.
    is_failing: bool,
    shared: Arc<Shared>,
}

impl Writer {
    /// Writes until nobody can send any more.
    fn run(mut self) {
        let mut lines = Vec::new();
        while let Ok(first) = self.receiver.recv() {
            let (mut count, mut bytes) = (0, 0);
            let mut next = Some(first);
            while let Some(record) = next {
                self.form.write(&record, &mut lines);
                count += 1;
                bytes += record.size();
                let has_room = lines.len() < BATCH;
                next = has_room.then(|| self.receiver.try_recv().ok()).flatten();
            }
            self.append(&lines, count);
            let was_all = lines.len() < BATCH;
            lines.clear();
            lines.shrink_to(BATCH);
            let shared = &self.shared;
            shared.bytes.fetch_sub(bytes, Ordering::Relaxed);
            if was_all {
                shared.is_behind.store(false, Ordering::Relaxed);
            }
            *lock(&shared.done) += count;
            shared.more_done.notify_all();
            if was_all {
                thread::park_timeout(NAP);
            }
        }
    }

    fn append(&mut self, lines: &[u8], count: u64) {
        let appended = self.appender.append(lines);
        let shared = &self.shared;
        let dropped = if appended.is_err() { count } else { 0 };
        let dropped = shared.dropped.fetch_add(dropped, Ordering::Relaxed) + dropped;
        if appended.is_err() == self.is_failing {
            return;
        }
        self.is_failing = appended.is_err();
        let (path, dropped) = (&shared.path, grouped(dropped));
        *lock(&shared.news) = Some(match appended {
            Err(error) => format!(
                "the trace '{path}' cannot be written, and calls get no line there until it can: {error}"
            ),
            Ok(()) => format!(
                "the trace '{path}' is written again: {dropped} calls of this process have no line there"
            ),
        });
        shared.has_news.store(true, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
