//! Faults that others shipped, from public bug reports: each as an input with the right answer.
#![cfg(not(loom))]

#[path = "common/store.rs"]
mod store;

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, MAX_BURST, Reason, Rejection, Unit};
use store::Stored;

const SECOND: Duration = Duration::from_secs(1);
const NANOSECOND: Duration = Duration::from_nanos(1);

/// What the store's clock counts in.
fn tick() -> Duration {
    if store::is_redis() {
        Duration::from_micros(1)
    } else {
        NANOSECOND
    }
}

/// A time, rounded up to a whole tick.
fn in_ticks(time: Duration) -> Duration {
    let nanos = time.as_nanos().next_multiple_of(tick().as_nanos());
    Duration::from_nanos(u64::try_from(nanos).expect("in range"))
}

/// So many times: fewer over a network.
fn times(count: u64) -> u64 {
    if store::is_redis() {
        count / 100
    } else {
        count
    }
}

fn limiter(limit: Limit) -> Stored {
    let builder = Limiter::builder().limit("tool", limit);
    store::built(builder)
}

fn decide(limiter: &Stored, cost: u64, now: Duration) -> Decision<'_> {
    let cost = NonZeroU64::new(cost).expect("not zero");
    let call = Call::new("tool").cost(cost);
    limiter.at(now).try_acquire_at(&call, now)
}

/// The refusal at this time.
fn refused(limiter: &Stored, cost: u64, now: Duration) -> Rejection<'_> {
    match decide(limiter, cost, now) {
        Decision::Rejected(rejection) => rejection,
        Decision::Admitted(_) => panic!("admitted at {now:?}"),
    }
}

/// Limiters that all hold calls of "tool" to this limit, which is given in other ways.
fn in_every_way(limit: &Limit) -> Vec<(&'static str, Stored)> {
    let limit = || limit.clone();
    let wide = || Limit::per_second(1e9).burst(MAX_BURST).tools(["*"]);
    let ways = [
        ("by name", Limiter::builder().limit("tool", limit())),
        ("by pattern", Limiter::builder().limit("t??l", limit())),
        ("by default", Limiter::builder().default_limit(limit())),
        (
            "for each tenant",
            Limiter::builder().limit("tool", limit().per(["tenant"])),
        ),
        (
            "under a wide one",
            Limiter::builder()
                .limit("tool", limit())
                .limit("all", wide()),
        ),
        (
            "over a wide one",
            Limiter::builder()
                .limit("*", wide().per(["user"]))
                .limit("tool", limit()),
        ),
    ];
    let built = ways.map(|(way, limits)| (way, store::built(limits)));
    built.into()
}

/// What a limit is refused with at the load.
fn refusal(limit: Limit) -> String {
    let built = Limiter::builder().limit("search", limit).build();
    built.expect_err("out of range").to_string()
}

fn remaining(limiter: &Stored, now: Duration) -> u64 {
    let level = limiter.at(now).snapshot_at(now).remove(0);
    level.remaining.expect("one bucket")
}

/// Takes a token whenever `retry_after` says, through `time`. Returns how many.
fn greedy(limiter: &Stored, time: Duration) -> u64 {
    let mut now = Duration::ZERO;
    let mut admitted = 0;
    while now <= time {
        match decide(limiter, 1, now) {
            Decision::Admitted(_) => admitted += 1,
            Decision::Rejected(rejection) => {
                let wait = rejection.retry_after.expect("affordable");
                assert!(wait > Duration::ZERO, "refused, and told not to wait");
                now = in_ticks(now + wait);
            }
        }
    }
    admitted
}

#[test]
fn r01_a_rate_or_burst_of_zero_is_refused_and_never_unlimited() {
    let rates =
        "limit 'search': rate must be from 1 per 366 days to 1,000,000,000 per second, got ";
    for (limit, got) in [
        (Limit::per_second(0), "0 per second"),
        (Limit::per_second(0.0), "0.0 per second"),
        (Limit::per_minute(-0.0), "-0.0 per minute"),
        (Limit::per_day(0_u64), "0 per day"),
    ] {
        assert_eq!(refusal(limit), format!("{rates}{got}"));
    }
    assert!("0/s".parse::<Limit>().is_err());
    assert_eq!(
        refusal(Limit::per_second(1).burst(0)),
        "limit 'search': burst must be a whole number from 1 to 4,294,967,295, got 0",
    );
}

#[test]
fn r02_a_greedy_caller_gets_the_whole_rate_and_no_more() {
    let millis: u64 = if store::is_redis() { 300 } else { 60_000 };
    let time = Duration::from_millis(millis);
    for (per_minute, limit) in [
        (700, Limit::per_minute(700)),
        (59_999, Limit::per_minute(59_999)),
        (60_001, Limit::per_minute(60_001)),
        (120_000, Limit::per_minute(120_000)),
        (90_000, Limit::per_second(1_500)),
        (480_000, Limit::per_second(8_000)),
    ] {
        let due = 1 + per_minute * millis / 60_000;
        // With burst 1 no two calls may be closer than a token's time. Where that is no whole number of
        // ticks, each of a greedy caller's calls is up to one later.
        let admitted = greedy(&limiter(limit.clone()), time);
        let token = (60 * SECOND).as_nanos().div_ceil(per_minute.into());
        let least = 1 + time.as_nanos() / token.next_multiple_of(tick().as_nanos());
        assert!(
            (least..=due.into()).contains(&admitted.into()),
            "{admitted} for {limit:?}"
        );
        // With burst 2 the bucket is never full again, and loses nothing.
        let admitted = greedy(&limiter(limit.clone().burst(2)), time);
        assert_eq!(admitted, due + 1, "{limit:?}");
    }
}

#[test]
fn r02_a_greedy_caller_gets_the_same_in_whichever_way_a_limit_is_given() {
    for limit in [
        Limit::per_minute(700).burst(2),
        Limit::per_minute(59_999),
        Limit::quota(700, Unit::Minute),
        Limit::quota(3, Unit::Second).burst(2),
    ] {
        let time = if store::is_redis() {
            SECOND / 4
        } else {
            20 * SECOND
        };
        let due = greedy(&limiter(limit.clone()), time);
        for (way, limiter) in in_every_way(&limit) {
            assert_eq!(greedy(&limiter, time), due, "{limit:?} {way}");
        }
    }
}

#[test]
fn r01_no_quota_and_no_default_is_unlimited_by_a_zero() {
    for (limit, message) in [
        (
            Limit::quota(0, Unit::Minute),
            "quota must be at least 2 in a unit of time",
        ),
        (
            Limit::quota(10, Unit::Minute).burst(0),
            "burst must be a whole number from 1 to 9",
        ),
        (
            Limit::quota(10, Unit::Minute).burst(10),
            "burst must be a whole number from 1 to 9",
        ),
        (Limit::per_second(0), "rate must be from 1 per 366 days"),
        (
            Limit::per_second(1).burst(0),
            "burst must be a whole number from 1 to 4,294,967,295",
        ),
        (
            Limit::per_second(1).cost(0),
            "cost must be a whole number from 1 to 1",
        ),
    ] {
        let error = refusal(limit.clone());
        assert!(
            error.starts_with(&format!("limit 'search': {message}")),
            "{error}"
        );
        let built = Limiter::builder().default_limit(limit).build();
        let error = built.expect_err("out of range").to_string();
        assert!(
            error.starts_with(&format!("limit '[default]': {message}")),
            "{error}"
        );
    }
    assert!(Limit::parse_quota("0/min").is_ok_and(|limit| limit.check().is_err()));
}

#[test]
fn r02_a_rate_above_the_range_is_refused_with_the_range() {
    let message = refusal(Limit::per_second(2e9).burst(2_000_000_000));
    assert!(message.contains("to 1,000,000,000 per second"), "{message}");
    assert!(message.contains("got 2000000000.0 per second"), "{message}");
}

#[test]
fn r02_the_highest_rate_and_burst_never_refuse_two_threads() {
    let limiter = limiter(Limit::per_second(1e9).burst(MAX_BURST));
    let call = Call::new("tool");
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..times(100_000) {
                    assert!(limiter.try_acquire(&call).is_admitted());
                }
            });
        }
    });
}

#[test]
fn r04_a_bad_rate_stops_the_load_and_is_named() {
    for (bad, got) in [
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
        (-1.0, "-1.0"),
        (1e-9, "1e-9"),
        (5e-324, "5e-324"),
        (f64::MAX, "1.7976931348623157e308"),
    ] {
        let message = refusal(Limit::per_second(bad));
        assert!(
            message.starts_with("limit 'search': rate must be"),
            "{message}"
        );
        assert!(
            message.ends_with(&format!("got {got} per second")),
            "{message}"
        );
    }
    let message = refusal(Limit::per_second(-5));
    assert!(message.ends_with("got -5 per second"), "{message}");
    for bad in ["true", "yes/s", ".inf/s", "-5/s", "10", "NaN/s", "1/s/s"] {
        let message = bad.parse::<Limit>().expect_err("no rate").to_string();
        assert!(message.ends_with(&format!("got '{bad}'")), "{message}");
    }
    let message = refusal(Limit::per_second(1).burst(MAX_BURST + 1));
    assert!(message.ends_with("got 4294967296"), "{message}");
}

#[test]
fn r05_a_call_dearer_than_the_bucket_is_told_never_and_takes_nothing() {
    let limiter = limiter(Limit::per_minute(100).burst(100));
    for cost in [101, 200, u64::from(u32::MAX) + 1, u64::MAX] {
        let rejection = refused(&limiter, cost, Duration::ZERO);
        assert_eq!(rejection.reason, Reason::Cost);
        assert_eq!(rejection.retry_after, None);
        assert_eq!(rejection.remaining(), 100);
        assert_eq!(rejection.limit(), "tool");
    }
    assert!(decide(&limiter, 100, Duration::ZERO).is_admitted());
    // An empty bucket does not change what can never be, nor a long time.
    assert_eq!(refused(&limiter, 101, Duration::ZERO).reason, Reason::Cost);
    assert_eq!(refused(&limiter, 100, Duration::ZERO).reason, Reason::Rate);
    assert_eq!(refused(&limiter, 101, Duration::MAX).retry_after, None);
}

#[test]
fn r05_never_is_told_in_whichever_way_a_limit_is_given() {
    for (way, limiter) in in_every_way(&Limit::per_minute(100).burst(100)) {
        let rejection = refused(&limiter, 200, Duration::ZERO);
        assert_eq!(
            (rejection.reason, rejection.retry_after),
            (Reason::Cost, None),
            "{way}"
        );
        assert!(decide(&limiter, 100, Duration::ZERO).is_admitted(), "{way}");
        let rejection = refused(&limiter, 200, Duration::ZERO);
        assert_eq!(rejection.reason, Reason::Cost, "{way}");
    }
}

#[test]
fn r06_every_retry_at_the_told_time_is_admitted_in_whichever_way_a_limit_is_given() {
    // What a process knows of Redis is rounded up to a nanosecond, which may be in the next tick.
    let early = tick() * if store::is_redis() { 2 } else { 1 };
    for limit in [
        Limit::per_second(3),
        Limit::per_second(7).burst(2),
        Limit::per_day(1),
        Limit::quota(17, Unit::Hour).burst(4),
    ] {
        for (way, limiter) in in_every_way(&limit) {
            let mut now = Duration::ZERO;
            assert!(
                decide(&limiter, limit.capacity(), now).is_admitted(),
                "{way}"
            );
            for _ in 0..times(2_000) {
                let wait = refused(&limiter, 1, now).retry_after.expect("affordable");
                assert!(wait > Duration::ZERO, "{limit:?} {way}");
                now = in_ticks(now + wait);
                assert!(!decide(&limiter, 1, now.saturating_sub(early)).is_admitted());
                assert!(decide(&limiter, 1, now).is_admitted(), "{limit:?} {way}");
            }
        }
    }
}

#[test]
fn r06_just_before_its_time_a_call_is_told_what_is_left() {
    let limiter = limiter(Limit::per_second(0.5));
    assert!(decide(&limiter, 1, Duration::ZERO).is_admitted());
    let early = Duration::from_micros(1_999_500);
    assert_eq!(
        refused(&limiter, 1, early).retry_after,
        Some(Duration::from_micros(500)),
    );
    let last = refused(&limiter, 1, (2 * SECOND).saturating_sub(tick()));
    assert_eq!(last.retry_after, Some(tick()));
    assert!(decide(&limiter, 1, 2 * SECOND).is_admitted());
}

const RETRIES: u64 = 100_000;

/// So many retries, each at the told time and admitted. Returns when the last one was.
fn retry_at_the_told_times(limit: Limit) -> u128 {
    let burst = limit.capacity();
    let limiter = limiter(limit);
    assert!(decide(&limiter, burst, Duration::ZERO).is_admitted());
    let mut now = Duration::ZERO;
    for _ in 0..times(RETRIES) {
        let wait = refused(&limiter, 1, now).retry_after.expect("affordable");
        assert!(wait > Duration::ZERO);
        now = in_ticks(now + wait);
        assert!(decide(&limiter, 1, now).is_admitted(), "refused at {now:?}");
    }
    now.as_nanos()
}

#[test]
fn r06_every_retry_at_the_told_time_is_admitted_and_nothing_drifts() {
    let second = SECOND.as_nanos();
    for (limit, tokens, nanos) in [
        (Limit::per_second(3), 3, second),
        (Limit::per_second(7), 7, second),
        (Limit::per_second(0.1), 1, 10 * second),
        (Limit::per_second(0.5), 1, 2 * second),
        (Limit::per_day(1), 1, 86_400 * second),
    ] {
        let (tick, retries) = (tick().as_nanos(), u128::from(times(RETRIES)));
        // With burst 1 no two calls may be closer than a token's time, so each is at a whole
        // tick after that. Here callgate adds less than one more; none where the time is whole.
        let last = retry_at_the_told_times(limit.clone());
        let shortest = u128::div_ceil(nanos, tokens).next_multiple_of(tick);
        let longest = shortest + if nanos % tokens > 0 { tick } else { 0 };
        assert!(last >= retries * shortest, "{last} for {limit:?}");
        assert!(last <= retries * longest, "{last} for {limit:?}");
        // With burst 2 the bucket is never full again, and no part of a tick is lost.
        let last = retry_at_the_told_times(limit.clone().burst(2));
        let due = (retries * nanos).div_ceil(tokens).next_multiple_of(tick);
        assert_eq!(last, due, "{limit:?}");
    }
}

#[test]
fn r06_retries_in_whole_seconds_are_admitted_too() {
    for limit in [
        Limit::per_second(0.1),
        Limit::per_minute(7),
        Limit::per_hour(1_000),
    ] {
        let limiter = limiter(limit.clone());
        let mut now = Duration::ZERO;
        assert!(decide(&limiter, 1, now).is_admitted());
        for _ in 0..times(10_000) {
            let wait = refused(&limiter, 1, now).retry_after.expect("affordable");
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            assert!(seconds > 0);
            now += Duration::from_secs(seconds);
            assert!(
                decide(&limiter, 1, now).is_admitted(),
                "{limit:?} at {now:?}"
            );
        }
    }
}

/// A clock for tests: the nanoseconds it stands at, and how often it was read.
#[derive(Debug, Default)]
struct FakeClock {
    nanos: AtomicU64,
    reads: AtomicU64,
}

impl FakeClock {
    fn set(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).expect("a time");
        self.nanos.store(nanos, Ordering::SeqCst);
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::SeqCst))
    }

    /// The time, on every second reading `low` less.
    fn read(&self, low: Duration) -> Duration {
        let odd = self.reads.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        let low = if odd { low } else { Duration::ZERO };
        self.time().saturating_sub(low)
    }
}

/// A limiter on a clock that starts at 1,000 s and is `low` on every second reading.
fn on_a_clock(limit: Limit, low: Duration) -> (Limiter, Arc<FakeClock>) {
    let clock = Arc::new(FakeClock::default());
    clock.set(1_000 * SECOND);
    let read = Arc::clone(&clock);
    let builder = Limiter::builder().limit("tool", limit);
    let limiter = builder.clock(move || read.read(low)).build();
    (limiter.expect("a limit in range"), clock)
}

#[test]
fn r09_a_clock_that_is_low_on_every_second_call_costs_no_tokens_and_mints_none() {
    let (limiter, clock) = on_a_clock(Limit::per_second(1).burst(5), Duration::from_millis(1_600));
    let call = Call::new("tool");
    let take = |calls: u64| {
        (0..calls)
            .filter(|_| limiter.try_acquire(&call).is_admitted())
            .count()
    };
    let at_once = thread::scope(|scope| {
        let threads = [scope.spawn(|| take(3)), scope.spawn(|| take(2))];
        threads.map(|thread| thread.join().expect("no panic"))
    });
    assert_eq!(at_once, [3, 2]);
    let mut admitted = 5;
    for call in 1..=1_000 {
        clock.set(1_000 * SECOND + call * Duration::from_millis(100));
        admitted += take(1);
    }
    assert!(admitted <= 105, "{admitted} of 105");
    assert!(admitted * 100 >= 105 * 95, "{admitted} of 105");
}

#[test]
fn r09_a_clock_that_steps_far_back_mints_nothing_and_blocks_nobody() {
    let (limiter, clock) = on_a_clock(Limit::per_second(1).burst(5), Duration::ZERO);
    let call = Call::new("tool");
    for _ in 0..5 {
        assert!(limiter.try_acquire(&call).is_admitted());
    }
    clock.set(10 * SECOND);
    let Decision::Rejected(rejection) = limiter.try_acquire(&call) else {
        panic!("a step back gave a token");
    };
    assert_eq!(rejection.retry_after, Some(SECOND));
    clock.set(Duration::from_nanos(10_999_999_999));
    assert!(!limiter.try_acquire(&call).is_admitted());
    clock.set(11 * SECOND);
    assert!(limiter.try_acquire(&call).is_admitted());
    assert!(!limiter.try_acquire(&call).is_admitted());
}

#[test]
fn r09_a_clock_that_steps_back_mints_nothing_for_a_key() {
    let clock = Arc::new(FakeClock::default());
    clock.set(1_000 * SECOND);
    let read = Arc::clone(&clock);
    let limiter = Limiter::builder()
        .limit("tool", Limit::per_second(1).burst(5).per(["tenant"]))
        .clock(move || read.time())
        .build()
        .expect("a limit in range");
    let tenants: Vec<String> = (0..100).map(|tenant| tenant.to_string()).collect();
    let take = |calls: usize| {
        let of_each = |tenant| {
            let call = Call::new("tool").field("tenant", tenant);
            (0..calls)
                .filter(|_| limiter.try_acquire(&call).is_admitted())
                .count()
        };
        tenants
            .iter()
            .map(|tenant| of_each(tenant))
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(take(9), BTreeSet::from([5]));
    clock.set(SECOND);
    assert_eq!(take(1), BTreeSet::from([0]));
    clock.set(3 * SECOND);
    assert_eq!(take(9), BTreeSet::from([2]));
}

#[test]
fn r09_a_reading_two_seconds_low_counts_as_the_highest_and_a_lower_one_starts_anew() {
    let low = 2 * SECOND;
    for (step, elapsed) in [(low, Duration::ZERO), (low + NANOSECOND, low + NANOSECOND)] {
        let (limiter, clock) = on_a_clock(Limit::per_second(1), Duration::ZERO);
        let call = Call::new("tool");
        assert!(limiter.try_acquire(&call).is_admitted());
        clock.set((1_000 * SECOND).saturating_sub(step));
        assert!(!limiter.try_acquire(&call).is_admitted());
        clock.set(1_000 * SECOND);
        // Back at the highest reading: no time has passed, or what it took to come back.
        let admitted = limiter.try_acquire(&call).is_admitted();
        assert_eq!(admitted, elapsed >= SECOND, "a step of {step:?}");
    }
}

/// What a package is built from, by the lock file.
fn dependencies<'a>(lock: &'a str, package: &str) -> Vec<&'a str> {
    let start = format!("name = \"{package}\"\n");
    lock.split("[[package]]\n")
        .filter(|text| text.starts_with(&start))
        .filter_map(|text| text.split_once("dependencies = ["))
        // "name", or "name version" where there are several: what is quoted.
        .flat_map(|(_, names)| names.split('"').skip(1).step_by(2))
        .filter_map(|name| name.split(' ').next())
        .collect()
}

#[test]
fn r09_no_clock_reads_a_cpu_counter() {
    let read = |path: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        fs::read_to_string(path).expect("a file of the workspace")
    };
    let (manifest, lock) = (read("Cargo.toml"), read("../../Cargo.lock"));
    let (_, normal) = manifest.split_once("\n[dependencies]\n").expect("some");
    let mut open: Vec<&str> = normal
        .lines()
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| Some(line.split_once(" = ")?.0))
        .collect();
    let mut found = BTreeSet::new();
    while let Some(package) = open.pop() {
        if found.insert(package) {
            open.extend(dependencies(&lock, package));
        }
    }
    assert!(found.contains("rustc-hash"), "{found:?}");
    let counters = [
        "quanta",
        "minstant",
        "fastant",
        "tsc",
        "rdtsc",
        "raw-cpuid",
        "coarsetime",
    ];
    for counter in counters {
        assert!(!found.contains(counter), "{counter} in {found:?}");
    }
}

#[test]
fn looking_at_a_limiter_takes_nothing() {
    let limiter = limiter(Limit::per_second(1).burst(3));
    for _ in 0..100 {
        assert_eq!(remaining(&limiter, Duration::ZERO), 3);
        let _ = format!("{limiter:?}");
    }
    assert!(decide(&limiter, 3, Duration::ZERO).is_admitted());
    assert_eq!(remaining(&limiter, Duration::MAX), 3);
    assert_eq!(remaining(&limiter, Duration::ZERO), 0);
}
