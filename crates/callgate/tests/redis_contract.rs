//! The contract of every store, kept by Redis: tests of the memory store once more, and the memory store beside it.
//!
//! The server's clock is where each call says. It counts in microseconds and is the only one: so nobody comes with
//! an old reading, and the exact fractions of a nanosecond are the script's tests'.
#![cfg(all(feature = "redis", not(loom)))]
#![expect(
    clippy::duplicate_mod,
    reason = "each of them is a file of tests by itself too"
)]

#[path = "whole_limiter/asked.rs"]
#[expect(dead_code, reason = "the model uses the rest")]
mod asked;
#[path = "cases.rs"]
mod cases;
mod common;
#[path = "quota.rs"]
mod quota;
#[path = "rules.rs"]
mod rules;
#[path = "common/store.rs"]
mod store;

use std::time::Duration;

use asked::{Change, Config, OneChange, Request, changes, configs, requests};
use callgate::{Call, Decision, Limit, Limiter, Rejection};
use common::{config, log_uniform};
use proptest::prelude::*;
use store::Stored;

/// By so much decisions may come apart: R07.
const APART: Duration = Duration::from_millis(1);

/// A day. Longer waits are not waited for, or most traces would soon be at the end of all time.
const LONG: Duration = Duration::from_secs(86_400);

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few at a time")]
enum Step {
    /// A call, so many microseconds after the one before.
    Call(u64, Request),
    /// The call that was refused last, when memory told it to come again, or just before.
    Retry {
        early: bool,
    },
    Reload(Change),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let later = prop_oneof![
        3 => Just(0),
        2 => log_uniform().prop_map(|micros| micros >> 30),
    ];
    let step = prop_oneof![
        24 => (later, requests()).prop_map(|(later, request)| Step::Call(later, request)),
        8 => any::<bool>().prop_map(|early| Step::Retry { early }),
        2 => changes()
            .prop_filter_map("other buckets", same_buckets)
            .prop_map(Step::Reload),
    ];
    prop::collection::vec(step, 60)
}

/// A change that leaves every bucket what it is: others start full in Redis, and levels are carried at the next
/// call there and not when the limits change.
fn same_buckets(change: Change) -> Option<Change> {
    match &change {
        Change::Limit(_, OneChange::Tools(_) | OneChange::Cost(_)) | Change::DryRun(_) => {
            Some(change)
        }
        _ => None,
    }
}

/// A limiter on Redis, and one in memory that gets the same calls at the same times.
struct Pair {
    redis: Stored,
    memory: Limiter,
    asked: Config,
    now: Duration,
    /// The last refused call, and when memory says that it is due.
    due: Option<(Request, Duration)>,
}

impl Pair {
    fn new(asked: Config) -> Self {
        Self {
            redis: store::built(asked.builder()),
            memory: asked.builder().build().expect("limits in range"),
            asked,
            now: Duration::ZERO,
            due: None,
        }
    }

    /// Until the two have come apart, as far as they may: from there on they are not alike.
    fn run(mut self, steps: &[Step]) {
        for step in steps {
            let agree = match step {
                Step::Call(later, request) => {
                    self.now += Duration::from_micros(*later);
                    self.call(request)
                }
                Step::Retry { early } => match self.due.take() {
                    Some((request, due)) if due <= self.now + LONG => {
                        let early = Duration::from_micros(2) * u32::from(*early);
                        self.now = self.now.max(due.saturating_sub(early));
                        self.call(&request)
                    }
                    _ => true,
                },
                Step::Reload(change) => {
                    self.reload(change);
                    true
                }
            };
            if !agree {
                return;
            }
        }
    }

    /// Whether both decide alike.
    fn call(&mut self, request: &Request) -> bool {
        let call = request.call();
        let memory = refusal(self.memory.try_acquire_at(&call, self.now));
        let redis = refusal(self.redis.at(self.now).try_acquire_at(&call, self.now));
        match (&memory, &redis) {
            (None, None) => true,
            (Some(memory), Some(redis)) => {
                assert_eq!(memory.reason, redis.reason, "{request:?}");
                let waits = [memory.retry_after, redis.retry_after];
                let wait = memory.retry_after.unwrap_or_default();
                self.due = Some((request.clone(), in_micros(self.now + wait)));
                assert!(waits[0].is_some() == waits[1].is_some());
                let [memory, redis] = waits.map(Option::unwrap_or_default);
                let apart = redis.abs_diff(memory);
                assert!(apart <= APART, "{redis:?} for {memory:?}: {request:?}");
                true
            }
            (None, Some(redis)) => {
                assert!(redis.retry_after <= Some(APART), "{redis:?}: {request:?}");
                false
            }
            (Some(memory), None) => {
                assert!(memory.retry_after.is_some_and(|wait| wait <= APART));
                false
            }
        }
    }

    fn reload(&mut self, change: &Change) {
        self.asked.change(change);
        for limiter in [self.redis.at(self.now), &self.memory] {
            let reloaded = limiter.reload_at(self.asked.builder(), self.now);
            reloaded.expect("limits in range");
        }
        self.due = None;
    }
}

/// Whether Redis takes these limits, which is told without a server.
fn in_range(asked: &Config) -> bool {
    let nowhere = "redis://127.0.0.1:1?prefix=test";
    asked.builder().store(nowhere).build().is_ok()
}

fn refusal(decision: Decision<'_>) -> Option<Rejection<'_>> {
    match decision {
        Decision::Admitted(permit) => permit.overruled().copied(),
        Decision::Rejected(rejection) => Some(rejection),
    }
}

/// A time, rounded up to microseconds.
fn in_micros(time: Duration) -> Duration {
    let nanos = time.as_nanos().next_multiple_of(1_000);
    Duration::from_nanos(u64::try_from(nanos).expect("in range"))
}

#[test]
fn r11_a_clock_of_the_server_that_is_set_back_mints_nothing_and_blocks_nobody() {
    let limiter = store::built(Limiter::builder().limit("tool", Limit::per_second(1).burst(5)));
    let call = Call::new("tool");
    // The process's own clock goes on.
    let admits = |server: u64, here: u64| {
        let [server, here] = [server, here].map(Duration::from_secs);
        limiter.at(server).try_acquire_at(&call, here).is_admitted()
    };
    assert_eq!((0..9).filter(|_| admits(1_000, 1_000)).count(), 5);
    for server in [10, 10, 9, 5_000, 3] {
        // Ten seconds pass here, whatever it says there.
        let _ = admits(server, 1_000);
    }
    assert_eq!((0..9).filter(|_| admits(3, 1_000)).count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..config() })]

    #[test]
    fn r07_redis_decides_as_memory_within_a_millisecond(
        limits in configs().prop_filter("out of range", in_range),
        steps in steps(),
    ) {
        Pair::new(limits).run(&steps);
    }
}
