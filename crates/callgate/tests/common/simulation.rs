//! Calls that come, wait and leave as simulated time passes.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use callgate::{Call, Decision, Home, InFlight, Limit, Limiter, LimiterBuilder, Turn};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000 * MS;

/// What a call came to, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Waits,
    Admitted(u64),
    Rejected(u64),
    Gone,
}

pub(crate) struct Simulation {
    pub(crate) limiter: Limiter,
    pub(crate) now: u64,
    /// In the order in which they came.
    pub(crate) calls: Vec<Waiting>,
    pub(crate) polls: usize,
    /// By the numbers that tests give them.
    homes: HashMap<u64, Home>,
}

pub(crate) struct Waiting {
    call: Call<'static>,
    turn: Turn,
    woken: Arc<Woken>,
    /// When it asks again: as it was told, or woken.
    pub(crate) next: u64,
    /// How late its timers and its wake-ups are.
    pub(crate) late: u64,
    pub(crate) outcome: Outcome,
    pub(crate) running: Option<InFlight>,
    pub(crate) stopped: bool,
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Waiting {
    pub(crate) fn waits(&self) -> bool {
        self.outcome == Outcome::Waits
    }
}

impl Simulation {
    pub(crate) fn new<'a>(limits: impl IntoIterator<Item = (&'a str, Limit)>) -> Self {
        let mut builder = Limiter::builder();
        for (name, limit) in limits {
            builder = builder.limit(name, limit);
        }
        Self {
            limiter: builder.build().expect("limits in range"),
            now: 0,
            calls: Vec::new(),
            polls: 0,
            homes: HashMap::new(),
        }
    }

    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// A call comes now.
    pub(crate) fn come(&mut self, call: Call<'static>, home: Option<u64>) -> usize {
        self.come_late(call, home, 0)
    }

    /// A call comes now, whose timers and wake-ups are late.
    pub(crate) fn come_late(&mut self, call: Call<'static>, home: Option<u64>, late: u64) -> usize {
        self.come_for(call, home, late, None)
    }

    /// A call comes now that may wait for so long, whatever its limits say.
    pub(crate) fn come_for(
        &mut self,
        call: Call<'static>,
        home: Option<u64>,
        late: u64,
        max_wait: Option<Duration>,
    ) -> usize {
        let home = home.map(|home| self.homes.entry(home).or_default().clone());
        self.calls.push(Waiting {
            call,
            turn: Turn::of(home, max_wait),
            woken: Arc::default(),
            next: 0,
            late,
            outcome: Outcome::Waits,
            running: None,
            stopped: false,
        });
        let index = self.calls.len() - 1;
        self.poll(index);
        index
    }

    pub(crate) fn poll(&mut self, index: usize) {
        self.polls += 1;
        let time = self.time();
        let waiting = &mut self.calls[index];
        let waker = Waker::from(Arc::clone(&waiting.woken));
        let polled = self
            .limiter
            .poll_acquire_at(&waiting.call, &mut waiting.turn, &waker, time);
        match polled {
            Poll::Pending => {
                let wait = u64::try_from(waiting.turn.wait().as_nanos()).expect("less than years");
                waiting.next = self.now + wait + waiting.late;
            }
            Poll::Ready(decision) => {
                waiting.turn = Turn::default();
                waiting.outcome = match decision {
                    Decision::Admitted(permit) => {
                        waiting.running = permit.in_flight();
                        Outcome::Admitted(self.now)
                    }
                    Decision::Rejected(_) => Outcome::Rejected(self.now),
                };
            }
        }
        self.hear();
    }

    /// Whoever was woken asks now, or as much later as they are late.
    fn hear(&mut self) {
        for call in &mut self.calls {
            if call.woken.0.swap(false, Ordering::Relaxed) {
                call.next = call.next.min(self.now + call.late);
            }
        }
    }

    /// The first who is to ask, and when.
    fn due(&self) -> Option<(u64, usize)> {
        let calls = self.calls.iter().enumerate();
        let awake = calls.filter(|(_, call)| call.waits() && !call.stopped);
        awake.map(|(index, call)| (call.next, index)).min()
    }

    /// The time passes until then, and all who wait ask when they are to.
    pub(crate) fn until(&mut self, end: u64) {
        while self.step(end).is_some() {}
        self.now = end;
    }

    /// The next who is to ask until then does so: who that was.
    pub(crate) fn step(&mut self, end: u64) -> Option<usize> {
        self.hear();
        let (time, index) = self.due().filter(|&(time, _)| time <= end)?;
        self.now = self.now.max(time);
        self.poll(index);
        Some(index)
    }

    /// A call gives its place up.
    pub(crate) fn leave(&mut self, index: usize) {
        self.calls[index].turn = Turn::default();
        self.calls[index].outcome = Outcome::Gone;
        self.hear();
    }

    /// A call that runs ends.
    pub(crate) fn end(&mut self, index: usize) {
        drop(mem::take(&mut self.calls[index].running));
        self.hear();
    }

    pub(crate) fn pause(&mut self, tool: &str, time: u64, limit: Option<&str>) {
        let time = Duration::from_nanos(time);
        let paused = self.limiter.pause_at(tool, time, limit, self.time());
        paused.expect("a limit of the tool");
        self.hear();
    }

    pub(crate) fn reload(&mut self, limits: LimiterBuilder) {
        let reloaded = self.limiter.reload_at(limits, self.time());
        reloaded.expect("limits in range");
        self.hear();
    }
}
