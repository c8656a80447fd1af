//! Calls that wait for their turn, on simulated time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use callgate::{Call, Decision, Home, InFlight, Limit, Limiter, Reason, Turn};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// What a call came to.
#[derive(Debug)]
enum Outcome {
    Waits,
    Admitted(u64),
    Rejected(u64),
    Gone,
}

/// Calls that come, wait and leave as time passes.
struct Simulation {
    limiter: Limiter,
    now: u64,
    calls: Vec<Waiting>,
    polls: u64,
}

struct Waiting {
    call: Call<'static>,
    turn: Turn,
    woken: Arc<Woken>,
    /// When it asks again by itself.
    next: u64,
    outcome: Outcome,
    running: Option<InFlight>,
    stopped: bool,
}

#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Simulation {
    fn new(limits: impl IntoIterator<Item = (&'static str, Limit)>) -> Self {
        let mut builder = Limiter::builder();
        for (name, limit) in limits {
            builder = builder.limit(name, limit);
        }
        Self {
            limiter: builder.build().unwrap(),
            now: 0,
            calls: Vec::new(),
            polls: 0,
        }
    }

    /// A call comes now.
    fn come(&mut self, call: Call<'static>, home: Option<&Home>) -> usize {
        self.come_for(call, home, None)
    }

    /// One that may wait for so long, whatever its limits say.
    fn come_for(
        &mut self,
        call: Call<'static>,
        home: Option<&Home>,
        max_wait: Option<Duration>,
    ) -> usize {
        self.calls.push(Waiting {
            call,
            turn: Turn::of(home.cloned(), max_wait),
            woken: Arc::default(),
            next: 0,
            outcome: Outcome::Waits,
            running: None,
            stopped: false,
        });
        let index = self.calls.len() - 1;
        self.poll(index);
        index
    }

    fn poll(&mut self, index: usize) {
        self.polls += 1;
        let waiting = &mut self.calls[index];
        let waker = Waker::from(Arc::clone(&waiting.woken));
        waiting.woken.0.store(0, Ordering::Relaxed);
        let elapsed = Duration::from_nanos(self.now);
        let polled =
            self.limiter
                .poll_acquire_at(&waiting.call, &mut waiting.turn, &waker, elapsed);
        match polled {
            Poll::Pending => {
                waiting.next = self.now + u64::try_from(waiting.turn.wait().as_nanos()).unwrap();
            }
            Poll::Ready(Decision::Admitted(permit)) => {
                waiting.running = permit.in_flight();
                waiting.outcome = Outcome::Admitted(self.now);
            }
            Poll::Ready(Decision::Rejected(_)) => {
                waiting.outcome = Outcome::Rejected(self.now);
            }
        }
    }

    /// The time passes until then, and all who wait ask when they are to.
    fn until(&mut self, end: u64) {
        loop {
            let due = self.calls.iter().enumerate();
            let due =
                due.filter(|(_, call)| matches!(call.outcome, Outcome::Waits) && !call.stopped);
            let due = due.map(|(index, call)| {
                let is_woken = call.woken.0.load(Ordering::Relaxed) > 0;
                (if is_woken { self.now } else { call.next }, index)
            });
            match due.min() {
                Some((time, index)) if time <= end => {
                    self.now = self.now.max(time);
                    self.poll(index);
                }
                _ => {
                    self.now = end;
                    return;
                }
            }
        }
    }

    fn leave(&mut self, index: usize) {
        self.calls[index].turn = Turn::default();
        self.calls[index].outcome = Outcome::Gone;
    }

    fn admitted(&self) -> Vec<u64> {
        let times = self.calls.iter().filter_map(|call| match call.outcome {
            Outcome::Admitted(time) => Some(time),
            _ => None,
        });
        times.collect()
    }

    fn rejected(&self) -> Vec<u64> {
        let times = self.calls.iter().filter_map(|call| match call.outcome {
            Outcome::Rejected(time) => Some(time),
            _ => None,
        });
        times.collect()
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn r15_those_who_can_be_served_in_time_are_in_order_and_the_others_are_refused_at_once() {
    let limit = Limit::per_second(10).max_wait(Duration::from_millis(1950));
    let home = Home::default();
    let mut simulation = Simulation::new([("search", limit)]);
    for _ in 0..100 {
        simulation.come(Call::new("search"), Some(&home));
    }
    assert_eq!(simulation.rejected(), vec![0; 80]);
    simulation.until(10 * SECOND);
    let due: Vec<u64> = (0..20).map(|grant| grant * 100 * MS).collect();
    assert_eq!(simulation.admitted(), due);
    assert_eq!(simulation.polls, 100 + 19);
}

#[test]
fn r16_a_wait_is_for_what_is_missing() {
    let mut simulation = Simulation::new([("a", Limit::per_second(1).burst(3))]);
    simulation.come(Call::new("a"), None);
    let cost = 3.try_into().unwrap();
    simulation.come_for(Call::new("a").cost(cost), None, Some(seconds(10.0)));
    simulation.until(20 * SECOND);
    assert_eq!(simulation.admitted(), [0, SECOND]);
}

#[test]
fn r13_a_turn_that_is_given_up_goes_to_the_next() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let home = Home::default();
    let mut simulation = Simulation::new([("a", limit)]);
    for _ in 0..10 {
        simulation.come(Call::new("a"), Some(&home));
    }
    // Nobody asks in the tick in which the turn of the first has come: it leaves.
    simulation.now = SECOND;
    simulation.leave(1);
    let refused = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::from_secs(1));
    assert!(!refused.is_admitted());
    simulation.until(SECOND);
    assert_eq!(simulation.admitted(), [0, SECOND]);
    simulation.until(100 * SECOND);
    let due: Vec<u64> = (0..9).map(|grant| grant * SECOND).collect();
    assert_eq!(simulation.admitted(), due);
}

#[test]
fn whoever_does_not_come_is_passed_over_and_keeps_the_place() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let home = Home::default();
    let mut simulation = Simulation::new([("a", limit)]);
    simulation.come(Call::new("a"), Some(&home));
    let other = Home::default();
    let stopped = simulation.come(Call::new("a"), Some(&home));
    simulation.calls[stopped].stopped = true;
    simulation.come(Call::new("a"), Some(&other));
    simulation.come(Call::new("a"), Some(&other));
    simulation.until(1500 * MS);
    assert_eq!(simulation.admitted(), [0, 1050 * MS + 1]);
    simulation.calls[stopped].stopped = false;
    simulation.until(10 * SECOND);
    assert_eq!(
        simulation.admitted(),
        [0, 2050 * MS + 1, 1050 * MS + 1, 3050 * MS + 1]
    );
}

#[test]
fn calls_that_run_are_counted_and_the_next_one_comes_when_one_ends() {
    let limit = Limit::per_second(1000).burst(100).max_concurrent(2);
    let home = Home::default();
    let mut simulation = Simulation::new([("a", limit.max_wait(seconds(10.0)))]);
    for _ in 0..5 {
        simulation.come(Call::new("a"), Some(&home));
    }
    simulation.until(SECOND);
    assert_eq!(simulation.admitted(), [0, 0]);
    simulation.calls[1].running = None;
    simulation.until(2 * SECOND);
    assert_eq!(simulation.admitted(), [0, 0, SECOND]);
    assert_eq!(simulation.polls, 6);
    let Decision::Rejected(rejection) = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::from_secs(2))
    else {
        panic!("two run");
    };
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Concurrency, None)
    );
    simulation.until(20 * SECOND);
    assert_eq!(simulation.rejected(), [10 * SECOND, 10 * SECOND]);
}
