//! Every order in which threads can meet at a line, as in `store/loom_tests.rs`.
//!
//! Each model comes with a mutant, a way of waiting or ending that is nearly right, which it has to catch.

use std::panic::{UnwindSafe, catch_unwind};
use std::task::{Poll, Wake};
use std::time::Duration;

use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;
use crate::{Call, Decision, InFlight, Limit, Limiter, Turn};

/// How a call waits that came to a full bucket, and one that runs ends, so that faulty ways can take
/// their places.
type Way = fn(&World);

/// A limit under which one call runs at a time; and who waits for it.
struct World {
    lines: Lines,
    woken: [Arc<Woken>; 2],
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Woken {
    fn is(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl World {
    /// One runs, and so many wait.
    fn new(waiting: usize) -> Self {
        let world = Self {
            lines: Lines::default(),
            woken: Default::default(),
        };
        world.lines.lock(&mut Wakes::default()).start(None);
        for arrival in 0..waiting {
            world.register(&mut world.lines.lock(&mut Wakes::default()), arrival);
        }
        world
    }

    fn is_full(buckets: &Buckets) -> bool {
        buckets.running(None) > 0
    }

    fn register(&self, buckets: &mut Buckets, arrival: usize) {
        let waiting = Waiting {
            tokens: 1,
            home: None,
            told: Told::At(u64::MAX, Why::Running),
            waker: Arc::clone(&self.woken[arrival]).into(),
        };
        let line = buckets.line(None);
        line.wait(arrival as u64, waiting, &mut Wakes::default());
    }
}

/// Every order in which threads are interrupted at most three times.
fn every_likely_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn is_caught(model: impl FnOnce() + UnwindSafe) -> bool {
    catch_unwind(model).is_err()
}

/// Waits, if one runs.
fn wait(world: &World) {
    let mut buckets = world.lines.lock(&mut Wakes::default());
    if World::is_full(&buckets) {
        world.register(&mut buckets, 0);
    } else {
        world.woken[0].wake_by_ref();
    }
}

fn wait_in_two_steps(world: &World) {
    if World::is_full(&world.lines.lock(&mut Wakes::default())) {
        world.register(&mut world.lines.lock(&mut Wakes::default()), 0);
    } else {
        world.woken[0].wake_by_ref();
    }
}

/// The one that runs ends.
fn end(world: &World) {
    let mut wakes = Wakes::default();
    let mut buckets = world.lines.lock(&mut Wakes::default());
    buckets.end(None, 0, &mut wakes);
    drop(buckets);
}

fn wake_before_the_end(world: &World) {
    let mut wakes = Wakes::default();
    if let Some(line) = world.lines.lock(&mut Wakes::default()).lines.get_mut(&None) {
        line.has_room(&mut wakes);
    }
    drop(wakes);
    if let Some(line) = world.lines.lock(&mut Wakes::default()).lines.get_mut(&None) {
        line.running -= 1;
    }
}

/// One waits while the one that runs ends: it is woken, or finds room.
fn end_and_wait(wait: Way, end: Way) {
    every_likely_order(move || {
        let world = Arc::new(World::new(0));
        let ending = thread::spawn({
            let world = Arc::clone(&world);
            move || end(&world)
        });
        wait(&world);
        ending.join().expect("no panic");
        assert!(world.woken[0].is(), "not woken");
    });
}

#[test]
fn a_call_that_comes_to_wait_while_the_last_one_ends_is_woken() {
    end_and_wait(wait, end);
}

#[test]
fn to_wait_in_two_steps_and_to_wake_before_the_end_are_caught() {
    assert!(is_caught(|| end_and_wait(wait_in_two_steps, end)));
    assert!(is_caught(|| end_and_wait(wait, wake_before_the_end)));
}

/// The first of those who wait gives up.
fn leave(world: &World) {
    let mut wakes = Wakes::default();
    let mut buckets = world.lines.lock(&mut Wakes::default());
    buckets.leave(None, 0, Left::Gone, &mut wakes);
    drop(buckets);
}

fn leave_unless_woken(world: &World) {
    if !world.woken[0].is() {
        leave(world);
    }
}

/// The first of two who wait gives up while the one that runs ends: the next is woken.
fn end_and_leave(leave: Way) {
    every_likely_order(move || {
        let world = Arc::new(World::new(2));
        let ending = thread::spawn({
            let world = Arc::clone(&world);
            move || end(&world)
        });
        leave(&world);
        ending.join().expect("no panic");
        assert!(world.woken[1].is(), "not woken");
    });
}

#[test]
fn a_turn_that_is_given_up_as_it_comes_goes_to_the_next() {
    end_and_leave(leave);
}

#[test]
fn to_leave_only_who_was_not_woken_is_caught() {
    assert!(is_caught(|| end_and_leave(leave_unless_woken)));
}

mod limiter {
    use super::*;

    fn limiter(most: u64) -> Limiter {
        let limit = Limit::per_second(1).burst(10).max_concurrent(most);
        let limit = limit.max_wait(Duration::from_secs(10_000));
        let limiter = Limiter::builder().limit("a", limit);
        limiter.build().expect("a limit in range")
    }

    /// A call that waits for its turn.
    #[derive(Default)]
    struct Waits {
        turn: Turn,
        woken: Arc<Woken>,
        running: Option<InFlight>,
    }

    impl Waits {
        fn ask(&mut self, limiter: &Limiter) {
            let waker = Arc::clone(&self.woken).into();
            let call = Call::new("a");
            match limiter.poll_acquire_at(&call, &mut self.turn, &waker, Duration::ZERO) {
                Poll::Pending => {}
                Poll::Ready(Decision::Admitted(permit)) => self.running = permit.in_flight(),
                Poll::Ready(Decision::Rejected(rejection)) => panic!("{rejection:?}"),
            }
        }

        /// Asks as often as it is woken.
        fn go_on(&mut self, limiter: &Limiter) {
            while self.running.is_none() && self.woken.0.swap(false, Ordering::SeqCst) {
                self.ask(limiter);
            }
        }
    }

    fn run(limiter: &Limiter) -> InFlight {
        let mut call = Waits::default();
        call.ask(limiter);
        call.running.expect("room")
    }

    #[test]
    fn a_call_that_asks_while_the_last_one_ends_runs() {
        every_likely_order(|| {
            let limiter = limiter(1);
            let running = run(&limiter);
            let ending = thread::spawn(move || drop(running));
            let mut call = Waits::default();
            call.ask(&limiter);
            ending.join().expect("no panic");
            call.go_on(&limiter);
            assert!(call.running.is_some(), "waits in vain");
        });
    }

    #[test]
    fn two_that_end_let_two_run() {
        every_likely_order(|| {
            let limiter = limiter(2);
            let ending =
                [run(&limiter), run(&limiter)].map(|running| thread::spawn(move || drop(running)));
            let mut calls = [Waits::default(), Waits::default()];
            calls.iter_mut().for_each(|call| call.ask(&limiter));
            for thread in ending {
                thread.join().expect("no panic");
            }
            // The first to be woken may wake the other.
            for _ in 0..2 {
                calls.iter_mut().for_each(|call| call.go_on(&limiter));
            }
            assert!(
                calls.iter().all(|call| call.running.is_some()),
                "waits in vain"
            );
        });
    }

    #[test]
    fn a_call_that_gives_up_while_the_last_one_ends_lets_the_next_run() {
        every_likely_order(|| {
            let limiter = limiter(1);
            let running = run(&limiter);
            let [mut first, mut next] = [Waits::default(), Waits::default()];
            first.ask(&limiter);
            next.ask(&limiter);
            let ending = thread::spawn(move || drop(running));
            drop(first);
            ending.join().expect("no panic");
            next.go_on(&limiter);
            assert!(next.running.is_some(), "waits in vain");
        });
    }
}
