//! Calls that wait, on real threads and runtimes. Nothing here depends on how fast they are.
#![cfg(not(loom))]

use std::future::poll_fn;
use std::hash::BuildHasher;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder};
use rustc_hash::FxBuildHasher;

/// Nothing takes that long, unless it takes for ever.
const HANG: Duration = Duration::from_secs(60);

const MOST: usize = 4;

const CALLS: usize = 2_000;

/// Fails where this takes for ever.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let running = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    let hangs = is_done.recv_timeout(HANG) == Err(mpsc::RecvTimeoutError::Timeout);
    assert!(!hangs, "for ever");
    running.join().expect("no panic");
}

fn limits(burst: u64) -> LimiterBuilder {
    let limit = Limit::per_second(4_000).burst(burst).max_wait(2 * HANG);
    Limiter::builder().limit("a", limit.max_concurrent(MOST as u64))
}

/// What calls came to, and how many run.
#[derive(Default)]
struct Counts {
    running: AtomicUsize,
    admitted: AtomicUsize,
    given_up: AtomicUsize,
}

/// A call that is asked for more often than needed, and some give up early.
async fn call(limiter: &Limiter, number: usize, counts: &Counts) {
    let random = FxBuildHasher.hash_one(number);
    let gives_up = random.is_multiple_of(4);
    let mut asks = random / 4 % 4;
    let call = Call::new("a");
    let mut waiting = pin!(limiter.acquire(&call));
    let decision = poll_fn(|context| match waiting.as_mut().poll(context) {
        Poll::Ready(decision) => Poll::Ready(Some(decision)),
        Poll::Pending if asks > 0 => {
            asks -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }
        Poll::Pending if gives_up => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    });
    match decision.await {
        Some(Decision::Admitted(permit)) => {
            let running = counts.running.fetch_add(1, Ordering::SeqCst);
            assert!(running < MOST, "{running} run, and one more");
            tokio::task::yield_now().await;
            counts.running.fetch_sub(1, Ordering::SeqCst);
            counts.admitted.fetch_add(1, Ordering::SeqCst);
            drop(permit);
        }
        Some(Decision::Rejected(rejection)) => panic!("{rejection:?}"),
        None => {
            counts.given_up.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn r13_threads_and_a_runtime_wait_give_up_and_all_have_their_turn() {
    ends(|| {
        let limiter = Arc::new(limits(1).build().expect("limits in range"));
        let counts = Arc::new(Counts::default());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .build()
            .expect("a runtime");
        let tasks = (0..CALLS / 2).map(|number| {
            let (limiter, counts) = (Arc::clone(&limiter), Arc::clone(&counts));
            runtime.spawn(async move { call(&limiter, number, &counts).await })
        });
        let tasks: Vec<_> = tasks.collect();
        thread::scope(|scope| {
            for first in 0..8 {
                let (limiter, counts) = (&limiter, &counts);
                scope.spawn(move || {
                    for number in (CALLS / 2 + first..CALLS).step_by(8) {
                        pollster::block_on(call(limiter, number, counts));
                    }
                });
            }
            for burst in (1..5).cycle().take(40) {
                limiter.reload(limits(burst)).expect("limits in range");
                let paused = limiter.pause("a", Duration::from_micros(500), None);
                paused.expect("a limit of the tool");
                thread::yield_now();
            }
        });
        for task in tasks {
            runtime.block_on(task).expect("no panic");
        }
        let [admitted, given_up] =
            [&counts.admitted, &counts.given_up].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(admitted + given_up, CALLS);
        assert!(admitted >= CALLS / 2 && given_up > 0, "{given_up} gave up");
        let text = format!("{limiter:?}");
        assert!(!text.contains("waiting: {"), "a line is left in {text}");
    });
}

#[test]
fn r17_whoever_waits_for_one_bucket_keeps_nobody_from_another() {
    let limit = Limit::per_day(10)
        .burst(10)
        .max_wait(Duration::from_secs(86_400));
    let limiter = Limiter::builder()
        .limit("a", limit.clone().per(["tenant"]))
        .limit("b", limit)
        .build()
        .expect("limits in range");
    let busy = Call::new("a").field("tenant", "busy");
    let drained = (0..10).all(|_| limiter.try_acquire(&busy).is_admitted());
    assert!(drained);
    let mut context = Context::from_waker(Waker::noop());
    let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(limiter.acquire(&busy))).collect();
    for waits in &mut waiting {
        assert!(waits.as_mut().poll(&mut context).is_pending());
    }
    for other in [Call::new("a").field("tenant", "other"), Call::new("b")] {
        for turn in 0..10 {
            let admitted = if turn % 2 == 0 {
                limiter.try_acquire(&other).is_admitted()
            } else {
                let ready = pin!(limiter.acquire(&other)).poll(&mut context);
                matches!(ready, Poll::Ready(Decision::Admitted(_)))
            };
            assert!(admitted);
        }
    }
    assert!(!limiter.try_acquire(&busy).is_admitted());
}

#[test]
fn r16_nobody_waits_for_ever_by_a_clock_that_stands_still() {
    ends(|| {
        let tools = ["tokens", "running"];
        let limit = Limit::per_second(100).max_wait(Duration::from_millis(20));
        let limiter = Limiter::builder()
            .limit("tokens", limit.clone())
            .limit("running", limit.burst(9).max_concurrent(1))
            .clock(|| Duration::ZERO)
            .build()
            .expect("limits in range");
        for call in tools.map(Call::new) {
            let Decision::Admitted(_running) = limiter.try_acquire(&call) else {
                panic!("full");
            };
            let decision = pollster::block_on(limiter.acquire(&call));
            assert!(!decision.is_admitted());
        }
    });
}
