//! A connection for a thread that waits, on which it asks by itself.
//!
//! By the link, two threads are woken for each call: the link's, which asks, and the one that waits. Where
//! processors sleep in between, that takes longer than the store does. So whoever waits in Rust takes the *lane*, if
//! nobody else has it: a second connection, and a runtime for it that runs on that very thread. All others go by the
//! link: those who find it taken, whose calls then travel together, and those who do not wait (`acquire`, and all of
//! Python, where a thread goes on to look for signals) or run in a runtime already.
//!
//! The link says how things are, and the lane follows:
//!
//! - it is there only beside a connection that the link has proved, and goes with that one: no old primary is
//!   asked after a failover. The first call beside a new one goes by the link, and its thread makes the lane
//!   while it waits;
//! - what happens to a call is decided by the link's own code ([`fly`]). A lane that does not do what it should is given
//!   up, and the link is told, which gives up its own: a dead store costs one deadline, not two;
//! - nobody watches it between calls. Before it is used after a while, it is looked at: one that the other
//!   side has ended fails no call.

use std::mem;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::{self, Handle, Runtime};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::link::{Connection, End, Pending, State, connect, fly, passed, turns};

/// Beside one connection a lane is made once in such a time: there may be a server that has no room for more.
const AGAIN: Duration = Duration::from_secs(60);

/// For so short a time nobody looks whether the connection has ended.
const A_WHILE: Duration = Duration::from_millis(1);

/// The lane of one process.
pub(super) struct Lane {
    address: Arc<Address>,
    state: Arc<State>,
    /// Tells the link's thread why it was given up, and beside which connection it was.
    complain: UnboundedSender<(u64, String)>,
    place: Mutex<Place>,
    process: u32,
}

/// What one thread at a time has.
#[derive(Default)]
struct Place {
    line: Option<Line>,
    /// When one was made, or should have been, and beside which connection.
    tried: Option<(u64, Instant)>,
    is_closed: bool,
}

/// A connection, and what it runs on.
struct Line {
    runtime: Runtime,
    connection: Connection,
    /// The link's connection that it is beside.
    beside: u64,
    used: Instant,
}

impl Lane {
    pub(super) fn new(
        address: Arc<Address>,
        state: Arc<State>,
        complain: UnboundedSender<(u64, String)>,
    ) -> Self {
        Self {
            address,
            state,
            complain,
            place: Mutex::default(),
            process: process::id(),
        }
    }

    /// Asks on this thread if it can, and otherwise hands over to the link.
    pub(super) fn ask(&self, pending: Pending, by_link: impl FnOnce(Pending)) {
        let Some(mut place) = self.enter() else {
            return by_link(pending);
        };
        let beside = self.state.connection();
        let is_over = |line: &mut Line| Some(line.beside) != beside || line.has_ended();
        if place.line.as_mut().is_some_and(is_over) {
            place.leave();
        }
        let Some(line) = &mut place.line else {
            let deadline = pending.deadline;
            by_link(pending);
            // While the answer is on its way.
            if let Some(beside) = beside {
                place.make(&self.address, beside, deadline);
            }
            return;
        };
        if let Some(end) = line.ask(pending, self.address.timeout) {
            if let End::Broken(reason) = end {
                // The link's thread may be gone.
                let _ = self.complain.send((line.beside, reason));
            }
            place.leave();
        }
    }

    /// None where it is taken, or a runtime would have to run inside another.
    fn enter(&self) -> Option<MutexGuard<'_, Place>> {
        let may_run = Handle::try_current().is_err_and(|error| error.is_missing_context());
        let place = may_run.then(|| self.place.try_lock().ok())??;
        (!place.is_closed).then_some(place)
    }

    /// Waits for whoever is asking: no longer than for the deadline.
    pub(super) fn close(&self) {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        place.is_closed = true;
        place.leave();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let place = self.place.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.process == process::id() {
            place.leave();
        } else {
            // A child's sockets and what watches them are its parent's too, which may just have had a lock.
            mem::forget(place.line.take());
        }
    }
}

impl Place {
    fn make(&mut self, address: &Address, beside: u64, deadline: Instant) {
        let now = Instant::now();
        let is_new = |(before, tried)| before != beside || now - tried > AGAIN;
        if self.tried.is_none_or(is_new) {
            self.tried = Some((beside, now));
            self.line = Line::make(address, beside, deadline);
        }
    }

    fn leave(&mut self) {
        if let Some(Line {
            runtime,
            connection,
            ..
        }) = self.line.take()
        {
            drop(connection);
            // To wait for its tasks is not allowed on all threads.
            runtime.shutdown_background();
        }
    }
}

impl Line {
    fn make(address: &Address, beside: u64, deadline: Instant) -> Option<Self> {
        let mut runtime = runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().enable_time().build().ok()?;
        let connection = runtime.block_on(async { timeout_at(deadline, connect(address)).await });
        if let Ok(Ok(connection)) = connection {
            return Some(Self {
                runtime,
                connection,
                beside,
                used: Instant::now(),
            });
        }
        runtime.shutdown_background();
        None
    }

    /// Asks, and says if the connection is to be given up.
    fn ask(&mut self, pending: Pending, time: Duration) -> Option<End> {
        let deadline = pending.deadline;
        let flight = fly(self.connection.commands.clone(), vec![pending], time);
        let end = self.runtime.block_on(async {
            tokio::select! {
                biased;
                end = flight => end,
                () = passed(deadline) => Some(End::Broken(format!("no answer in {time:?}"))),
            }
        });
        self.used = Instant::now();
        end
    }

    /// Whether the other side has ended it since it was used, if that was a while ago.
    fn has_ended(&mut self) -> bool {
        if self.used.elapsed() < A_WHILE {
            return false;
        }
        let connection = &mut self.connection;
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                () = connection.end() => true,
                () = turns() => false,
            }
        })
    }
}
