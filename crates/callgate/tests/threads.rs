//! Many threads on one limiter: together they get what one caller would, on any clock.
#![cfg(not(loom))]

#[path = "common/store.rs"]
mod store;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use callgate::{Call, Limit, Limiter};

const THREADS: u64 = 8;
const CALL: Call<'_> = Call::new("tool");

/// What the calls of all threads together got; each makes `calls` calls and says what each got.
fn together(calls: u64, call: impl Fn(u64) -> u64 + Sync) -> u64 {
    let run = || (0..calls).map(&call).sum::<u64>();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    })
}

/// A limiter on a clock that the test moves.
fn on_a_clock(limit: Limit) -> (Limiter, Arc<AtomicU64>) {
    let nanos = Arc::new(AtomicU64::new(0));
    let read = Arc::clone(&nanos);
    let clock = move || Duration::from_nanos(read.load(Ordering::SeqCst));
    let builder = Limiter::builder().limit("tool", limit).clock(clock);
    (builder.build().expect("a limit in range"), nanos)
}

/// Takes the burst of 50 at time 0.
fn drain(limiter: &Limiter) {
    let burst = CALL.cost(NonZeroU64::new(50).expect("not zero"));
    let drained = limiter.try_acquire_at(&burst, Duration::ZERO);
    assert!(drained.is_admitted());
    assert!(!limiter.try_acquire_at(&CALL, Duration::ZERO).is_admitted());
}

#[test]
fn a_limiter_can_be_shared() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&on_a_clock(Limit::per_second(1)).0);
}

#[test]
fn threads_at_one_instant_get_exactly_the_burst() {
    for burst in [1, 7, 1_000, 10_010] {
        let (limiter, _) = on_a_clock(Limit::per_second(100).burst(burst));
        let got = together(10_000, |_| {
            u64::from(limiter.try_acquire(&CALL).is_admitted())
        });
        assert_eq!(got, burst);
        let level = limiter.snapshot().remove(0);
        assert_eq!(level.remaining, Some(0));
    }
}

#[test]
fn threads_get_exactly_what_each_step_of_the_clock_brings() {
    // 7 tokens every 10 ms, and at no time more than the burst of 50.
    let (limiter, nanos) = on_a_clock(Limit::per_second(700).burst(50));
    let take = || together(20, |_| u64::from(limiter.try_acquire(&CALL).is_admitted()));
    assert_eq!(take(), 50);
    for step in 1..=200_u64 {
        nanos.store(step * 10_000_000, Ordering::SeqCst);
        assert_eq!(take(), 7, "step {step}");
    }
    nanos.fetch_add(3_600_000_000_000, Ordering::SeqCst);
    assert_eq!(take(), 50, "full again");
}

#[test]
fn threads_that_move_the_clock_while_others_draw_get_exactly_the_bound() {
    let (limiter, nanos) = on_a_clock(Limit::per_second(700).burst(50));
    drain(&limiter);
    let got = together(50_000, |call| {
        // A millionth of a second with each call: the calls want far more than there is.
        nanos.fetch_add(1_000, Ordering::SeqCst);
        let cost = NonZeroU64::MIN.saturating_add(call % 3);
        let admitted = limiter.try_acquire(&CALL.cost(cost)).is_admitted();
        if admitted { cost.get() } else { 0 }
    });
    let elapsed = nanos.load(Ordering::SeqCst);
    assert_eq!(elapsed, THREADS * 50_000 * 1_000);
    let rest = limiter.snapshot().remove(0).remaining.expect("one bucket");
    // All of it: the bucket was never full again, so no token was lost.
    assert_eq!(got + rest, 700 * elapsed / 1_000_000_000);
}

#[test]
fn threads_with_stale_readings_get_exactly_the_bound() {
    // A thread that was held up between reading the clock and drawing comes with an old time.
    let limiter = Limiter::builder().limit("tool", Limit::per_second(700).burst(50));
    let limiter = store::built(limiter);
    drain(&limiter);
    let nanos = AtomicU64::new(0);
    let got = together(50_000, |call| {
        let now = nanos.fetch_add(1_000, Ordering::SeqCst);
        let stale = if call % 50 == 0 { 10_000_000 } else { 0 };
        let time = Duration::from_nanos(now.saturating_sub(stale));
        u64::from(limiter.at(time).try_acquire_at(&CALL, time).is_admitted())
    });
    let elapsed = nanos.load(Ordering::SeqCst);
    let rest = limiter.snapshot_at(Duration::from_nanos(elapsed)).remove(0);
    let got = got + rest.remaining.expect("one bucket");
    assert_eq!(got, 700 * elapsed / 1_000_000_000);
}

#[test]
fn threads_on_the_real_clock_get_no_more_than_the_bound() {
    let start = Instant::now();
    let limiter = Limiter::builder().limit("tool", Limit::per_second(1_000).burst(100));
    let limiter = store::built(limiter);
    let got = together(50_000, |_| {
        u64::from(limiter.try_acquire(&CALL).is_admitted())
    });
    let most = 100 + 1_000 * start.elapsed().as_nanos() / 1_000_000_000;
    assert!(u128::from(got) <= most, "{got} of {most}");
    assert!(got >= 100, "{got} of a burst of 100");
}

#[test]
fn tools_do_not_share_a_bucket() {
    let names: Vec<String> = (0..100).map(|tool| format!("tool_{tool}")).collect();
    let limiter = names.iter().fold(Limiter::builder(), |builder, name| {
        builder.limit(name, Limit::per_day(1).burst(10))
    });
    let limiter = store::built(limiter);
    let got = together(names.len() as u64 * 5, |call| {
        let name = &names[usize::try_from(call).expect("small") % names.len()];
        u64::from(
            limiter
                .try_acquire_at(&Call::new(name), Duration::ZERO)
                .is_admitted(),
        )
    });
    assert_eq!(got, names.len() as u64 * 10);
    assert!(
        limiter
            .snapshot_at(Duration::ZERO)
            .iter()
            .all(|level| level.remaining == Some(0))
    );
}
