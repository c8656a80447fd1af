//! The live limiter over simulated time: calls come, wait, run and end.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use callgate::{Call, Decision, InFlight, Limiter, Reason, Turn};

use super::trace::Arrival;

/// What happened to a call, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Nanoseconds since the first call.
    pub(crate) now: u64,
    pub(crate) call: Known,
    pub(crate) what: What,
}

/// What is known of a call without looking anything up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its number, in the order in which calls come.
    pub(crate) number: u64,
    pub(crate) tool: usize,
    pub(crate) cost: Option<NonZeroU64>,
    duration: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Came,
    Admitted {
        waited: u64,
        /// The tokens left in the tightest bucket; none where nothing limits the tool.
        remaining: Option<u64>,
    },
    Rejected {
        waited: u64,
        /// The number of the limit's name.
        limit: usize,
        reason: Reason,
    },
    Ended,
}

/// A limiter, and the calls that wait for it and that run.
pub(crate) struct Run {
    limiter: Limiter,
    /// The names of the fields whose values arrivals have.
    fields: Arc<[String]>,
    calls: u64,
    waiting: HashMap<u64, Waiting>,
    /// When each of those is to ask again: the earliest of several times counts.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    woken: Arc<Woken>,
    running: BinaryHeap<Reverse<Running>>,
}

/// A call that waits.
struct Waiting {
    known: Known,
    came: u64,
    /// When it asks again.
    next: u64,
    name: Box<str>,
    values: Box<[Option<Box<str>>]>,
    turn: Turn,
}

/// A call that runs, in the order of the ends.
struct Running {
    end: u64,
    known: Known,
    permit: Option<Box<InFlight>>,
}

/// The numbers of the calls that were woken.
#[derive(Default)]
struct Woken(Mutex<Vec<u64>>);

impl Woken {
    fn waker(self: &Arc<Self>, number: u64) -> Waker {
        let woken = Arc::clone(self);
        Waker::from(Arc::new(Alarm { number, woken }))
    }

    fn list(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Alarm {
    number: u64,
    woken: Arc<Woken>,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.woken.list().push(self.number);
    }
}

impl Run {
    pub(crate) fn new(limiter: Limiter, fields: Arc<[String]>) -> Self {
        Self {
            limiter,
            fields,
            calls: 0,
            waiting: HashMap::new(),
            due: BinaryHeap::new(),
            woken: Arc::default(),
            running: BinaryHeap::new(),
        }
    }

    pub(crate) fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// A call comes of a tool of this name. What happens up to now, and to the call, is said in order.
    ///
    /// A tool none of whose limits has a `max_wait` need not ask whether it may wait.
    pub(crate) fn arrive(
        &mut self,
        arrival: &Arrival<'_>,
        name: &str,
        may_wait: bool,
        said: &mut impl FnMut(Event),
    ) {
        self.until(arrival.now, said);
        let known = Known {
            number: self.calls,
            tool: arrival.tool,
            cost: arrival.cost,
            duration: arrival.duration,
        };
        self.calls += 1;
        let now = arrival.now;
        said(Event {
            now,
            call: known,
            what: What::Came,
        });
        let time = Duration::from_nanos(now);
        let mut turn = Turn::simulated();
        let polled = {
            let call = call(name, known.cost, &self.fields, arrival.values.iter());
            match self.limiter.try_acquire_at(&call, time) {
                Decision::Rejected(_) if may_wait => {
                    let waker = self.woken.waker(known.number);
                    self.limiter.poll_acquire_at(&call, &mut turn, &waker, time)
                }
                decision => Poll::Ready(decision),
            }
        };
        match polled {
            Poll::Ready(decision) => {
                let what = decided(&mut self.running, decision, known, now, now);
                said(Event {
                    now,
                    call: known,
                    what,
                });
            }
            Poll::Pending => self.wait(Waiting {
                known,
                came: now,
                next: now.saturating_add(nanos(turn.wait())),
                name: name.into(),
                values: arrival
                    .values
                    .iter()
                    .map(|value| value.map(Box::from))
                    .collect(),
                turn,
            }),
        }
        self.hear(now);
    }

    /// All calls that wait have their turn, and all that run end.
    pub(crate) fn finish(&mut self, said: &mut impl FnMut(Event)) {
        self.until(u64::MAX, said);
    }

    /// Time passes until then: of what happens at one time, calls end before others have their turn.
    pub(crate) fn until(&mut self, now: u64, said: &mut impl FnMut(Event)) {
        loop {
            let end = self.running.peek().map(|Reverse(running)| running.end);
            let due = self.due.peek().map(|&Reverse((next, _))| next);
            let Some(next) = end.into_iter().chain(due).min().filter(|&next| next <= now) else {
                return;
            };
            if end == Some(next) {
                self.end(said);
            } else {
                self.ask_again(said);
            }
        }
    }

    fn end(&mut self, said: &mut impl FnMut(Event)) {
        if let Some(Reverse(Running { end, known, permit })) = self.running.pop() {
            drop(permit);
            said(Event {
                now: end,
                call: known,
                what: What::Ended,
            });
            self.hear(end);
        }
    }

    /// Who is due asks again, unless that was an older time.
    fn ask_again(&mut self, said: &mut impl FnMut(Event)) {
        let Some(Reverse((now, number))) = self.due.pop() else {
            return;
        };
        let waits = self.waiting.get(&number);
        if waits.is_none_or(|waiting| waiting.next != now) {
            return;
        }
        let Some(mut waiting) = self.waiting.remove(&number) else {
            return;
        };
        let known = waiting.known;
        let polled = {
            let values = waiting.values.iter().map(|value| value.as_deref());
            let call = call(&waiting.name, known.cost, &self.fields, values);
            let waker = self.woken.waker(number);
            let time = Duration::from_nanos(now);
            self.limiter
                .poll_acquire_at(&call, &mut waiting.turn, &waker, time)
        };
        match polled {
            Poll::Ready(decision) => {
                let what = decided(&mut self.running, decision, known, waiting.came, now);
                said(Event {
                    now,
                    call: known,
                    what,
                });
            }
            Poll::Pending => {
                waiting.next = now.saturating_add(nanos(waiting.turn.wait()));
                self.wait(waiting);
            }
        }
        self.hear(now);
    }

    fn wait(&mut self, waiting: Waiting) {
        let number = waiting.known.number;
        self.due.push(Reverse((waiting.next, number)));
        self.waiting.insert(number, waiting);
    }

    /// Whoever was woken asks now.
    fn hear(&mut self, now: u64) {
        if self.waiting.is_empty() {
            return;
        }
        for number in self.woken.list().drain(..) {
            if let Some(waiting) = self.waiting.get_mut(&number)
                && waiting.next > now
            {
                waiting.next = now;
                self.due.push(Reverse((now, number)));
            }
        }
    }
}

/// A call with those of its fields that it has.
#[inline]
fn call<'a>(
    name: &'a str,
    cost: Option<NonZeroU64>,
    fields: &'a [String],
    values: impl Iterator<Item = Option<&'a str>>,
) -> Call<'a> {
    let call = match cost {
        Some(cost) => Call::new(name).cost(cost),
        None => Call::new(name),
    };
    let fields = fields.iter().zip(values);
    fields.fold(call, |call, (field, value)| match value {
        Some(value) => call.field(field, value),
        None => call,
    })
}

/// What a decision comes to. An admitted call runs from now on.
fn decided(
    running: &mut BinaryHeap<Reverse<Running>>,
    decision: Decision<'_>,
    known: Known,
    came: u64,
    now: u64,
) -> What {
    let waited = now - came;
    match decision {
        Decision::Admitted(permit) => {
            let remaining = permit.remaining();
            running.push(Reverse(Running {
                end: now.saturating_add(known.duration),
                known,
                permit: permit.in_flight().map(Box::new),
            }));
            What::Admitted { waited, remaining }
        }
        Decision::Rejected(rejection) => What::Rejected {
            waited,
            limit: rejection.limit_number(),
            reason: rejection.reason,
        },
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl PartialEq for Running {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Running {}

impl PartialOrd for Running {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Running {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let order = |running: &Self| (running.end, running.known.number);
        order(self).cmp(&order(other))
    }
}

#[cfg(test)]
mod tests;
