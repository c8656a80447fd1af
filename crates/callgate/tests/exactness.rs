//! Decisions against an exact bucket, for any limit, at any time and in any order.
#![cfg(not(loom))]

mod common;
#[path = "common/store.rs"]
mod store;

use std::num::NonZeroU64;
use std::time::Duration;

use callgate::{Call, Decision, Limiter, Reason};
use common::{Given, config, limits, log_uniform};
use num_bigint::BigInt;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use store::Stored;

/// A limiter's last nanosecond.
const END: u64 = (1 << 63) - 1;

/// Ten years. Longer waits are not waited for, or most traces would soon be at the end of all time.
const LONG: u64 = 10 * 366 * 86_400 * 1_000_000_000;

/// A token bucket as the textbooks have it: a level that grows with time, up to the burst.
///
/// Exact: the rate is `rate / token` tokens per nanosecond, and everything is counted in parts of
/// `1 / token` token.
struct Exact {
    rate: BigInt,
    token: BigInt,
    full: BigInt,
    level: BigInt,
    last: u64,
}

impl Exact {
    fn new(given: &Given) -> Self {
        let full = given.rate.denom() * given.limit.capacity();
        Self {
            rate: given.rate.numer().clone(),
            token: given.rate.denom().clone(),
            level: full.clone(),
            full,
            last: 0,
        }
    }

    /// The level at `now`, were the bucket without a bound.
    fn unbounded(&self, now: u64) -> BigInt {
        &self.level + &self.rate * (i128::from(now) - i128::from(self.last))
    }

    fn admits(&self, now: u64, cost: u64) -> bool {
        self.unbounded(now).min(self.full.clone()) >= &self.token * cost
    }

    fn admit(&mut self, now: u64, cost: u64) {
        self.level = self.unbounded(now).min(self.full.clone()) - &self.token * cost;
        self.last = now;
    }

    /// Whether it has been able to admit the call for 2 ns, or 10^-9 of a token's time if that is more.
    fn is_overdue(&self, now: u64, cost: u64) -> bool {
        let over = self.unbounded(now) - &self.token * cost;
        let allowed = (&self.rate * 2_000_000_000_u64).max(self.token.clone());
        over * 1_000_000_000 >= allowed
    }

    /// When it is full, if nobody draws.
    fn full_at(&self) -> u64 {
        let missing = &self.full - &self.level;
        to_time(BigInt::from(self.last) + (missing + &self.rate - 1) / &self.rate)
    }
}

/// The time, or the end of all time if that is sooner.
fn to_time(nanos: BigInt) -> u64 {
    u64::try_from(nanos).map_or(END, |nanos| nanos.min(END))
}

/// Every window from one admission to a later one: the cost in it is at most burst + rate x its length.
///
/// Counted in the parts of [`Exact`]. A window's sum is `spent` after it less `spent` before it, so the
/// fullest window that ends here begins where `spent - rate x time` was least.
struct Windows {
    spent: BigInt,
    least: Option<BigInt>,
}

impl Windows {
    fn new() -> Self {
        Self {
            spent: BigInt::ZERO,
            least: None,
        }
    }

    fn admit(&mut self, exact: &Exact, now: u64, cost: u64) {
        let refilled = &exact.rate * now;
        let before = &self.spent - &refilled;
        self.spent += &exact.token * cost;
        let least = match self.least.take() {
            Some(least) => least.min(before),
            None => before,
        };
        let fullest = &self.spent - &refilled - &least;
        assert!(
            fullest <= exact.full,
            "a window that ends at {now} ns holds {fullest} / {}",
            exact.token
        );
        self.least = Some(least);
    }
}

/// When the next call comes.
#[derive(Clone, Debug)]
enum When {
    /// At the same time as the one before.
    Same,
    /// Exactly when the last refusal said, with the refused cost.
    Due,
    /// A nanosecond before that.
    Early,
    Later(u64),
    /// After so many tokens' time, give or take a few nanoseconds.
    Tokens(u64, i8),
    /// When the bucket is full, give or take a few nanoseconds.
    Full(i8),
    /// By a clock reading that is this much too old.
    Back(u64),
    /// At the latest time so far.
    Latest,
    /// So long before the end of all time.
    End(u64),
}

#[derive(Clone, Debug)]
enum Cost {
    One,
    Any(u64),
    Burst,
    /// All that is left.
    Rest,
    /// One more than is left.
    Excess,
    TooMuch(u64),
}

fn steps(count: usize) -> impl Strategy<Value = Vec<(When, Cost)>> {
    let few = -4..=4_i8;
    let when = prop_oneof![
        400 => Just(When::Same),
        800 => Just(When::Due),
        80 => Just(When::Early),
        120 => log_uniform().prop_map(|nanos| When::Later(nanos >> 16)),
        1 => log_uniform().prop_map(When::Later),
        400 => (0..4_u64, few.clone()).prop_map(|(tokens, nanos)| When::Tokens(tokens, nanos)),
        200 => few.prop_map(When::Full),
        40 => log_uniform().prop_map(When::Back),
        80 => Just(When::Latest),
        1 => log_uniform().prop_map(When::End),
    ];
    let cost = prop_oneof![
        6 => Just(Cost::One),
        4 => log_uniform().prop_map(Cost::Any),
        2 => Just(Cost::Burst),
        4 => Just(Cost::Rest),
        4 => Just(Cost::Excess),
        1 => log_uniform().prop_map(Cost::TooMuch),
    ];
    prop::collection::vec((when, cost), count)
}

/// A limiter, the exact bucket that follows its admissions, and what has happened so far.
struct Trace {
    limiter: Stored,
    /// Is given the admitted calls only, and never looked at.
    undisturbed: Stored,
    exact: Exact,
    burst: u64,
    windows: Windows,
    admitted: Vec<(u64, u64)>,
    now: u64,
    latest: u64,
    /// When the last refused call is due, and its cost.
    due: Option<(u128, u64)>,
}

impl Trace {
    fn new(given: &Given) -> Self {
        Self {
            limiter: limiter(given),
            undisturbed: limiter(given),
            exact: Exact::new(given),
            burst: given.limit.capacity(),
            windows: Windows::new(),
            admitted: Vec::new(),
            now: 0,
            latest: 0,
            due: None,
        }
    }

    fn run(mut self, steps: &[(When, Cost)]) {
        for (when, cost) in steps {
            match (when, self.due) {
                (When::Due, Some((due, cost))) if due <= u128::from(END.min(self.now + LONG)) => {
                    self.now = u64::try_from(due).expect("below the end");
                    let admitted = self.call(self.now, cost);
                    assert!(admitted, "refused at the time that it was told");
                }
                _ => {
                    self.now = self.time(when);
                    let cost = self.cost(cost);
                    self.call(self.now, cost);
                }
            }
            self.latest = self.latest.max(self.now);
        }
        // In the order of their times, too.
        self.admitted.sort_by_key(|&(now, _)| now);
        let mut windows = Windows::new();
        for &(now, cost) in &self.admitted {
            windows.admit(&self.exact, now, cost);
        }
    }

    /// The time of the next call.
    fn time(&self, when: &When) -> u64 {
        let near = |time: u64, nanos: i8| time.saturating_add_signed(nanos.into());
        let time = match *when {
            When::Same | When::Due => self.now,
            When::Early => self
                .due
                .map_or(self.now, |(due, _)| u64::try_from(due - 1).unwrap_or(END)),
            When::Later(nanos) => self.now.saturating_add(nanos),
            When::Tokens(tokens, nanos) => {
                let wait = &self.exact.token * tokens / &self.exact.rate;
                near(to_time(wait + self.now), nanos)
            }
            When::Full(nanos) => match self.exact.full_at() {
                time if time > self.now + LONG => self.now,
                time => near(time, nanos),
            },
            When::Back(nanos) => self.now.saturating_sub(nanos),
            When::Latest => self.latest,
            When::End(nanos) => END.saturating_sub(nanos),
        };
        time.min(END)
    }

    fn cost(&self, cost: &Cost) -> u64 {
        match *cost {
            Cost::One => 1,
            Cost::Any(tokens) => tokens % self.burst + 1,
            Cost::Burst => self.burst,
            Cost::Rest => self.remaining(self.now).max(1),
            Cost::Excess => self.remaining(self.now) + 1,
            Cost::TooMuch(tokens) => (self.burst + 1).saturating_add(tokens),
        }
    }

    fn remaining(&self, now: u64) -> u64 {
        let level = self
            .limiter
            .snapshot_at(Duration::from_nanos(now))
            .remove(0);
        level.remaining.expect("one bucket")
    }

    /// One call, with all that is to be said about it. Returns whether it was admitted.
    fn call(&mut self, now: u64, cost: u64) -> bool {
        let _ = self.remaining(END);
        let remaining = self.remaining(now);
        match decide(&self.limiter, now, cost) {
            Decision::Admitted(permit) => {
                assert!(cost <= remaining, "{cost} of {remaining}");
                assert!(self.exact.admits(now, cost), "more than an exact bucket");
                assert_eq!(permit.remaining(), Some(self.remaining(now)));
                match decide(&self.undisturbed, now, cost) {
                    Decision::Admitted(other) => {
                        assert_eq!(other.remaining(), permit.remaining());
                    }
                    Decision::Rejected(_) => panic!("a look or a refusal gave a token"),
                }
                self.exact.admit(now, cost);
                self.windows.admit(&self.exact, now, cost);
                self.admitted.push((now, cost));
                self.due = None;
                true
            }
            Decision::Rejected(rejection) => {
                assert_eq!(rejection.limit(), "tool");
                assert!(cost > remaining, "{cost} of {remaining}");
                assert_eq!(rejection.remaining(), remaining);
                assert_eq!(self.remaining(now), remaining, "a refusal took tokens");
                let Some(wait) = rejection.retry_after else {
                    assert_eq!(rejection.reason, Reason::Cost);
                    assert!(cost > self.burst, "never, for {cost} of {}", self.burst);
                    return false;
                };
                assert_eq!(rejection.reason, Reason::Rate);
                assert!(cost <= self.burst, "{wait:?} for {cost} of {}", self.burst);
                assert!(!self.exact.is_overdue(now, cost), "later than exact");
                assert!(!wait.is_zero());
                let due = u128::from(now) + wait.as_nanos();
                self.just_before(due, cost);
                self.due = Some((due, cost));
                false
            }
        }
    }

    /// A nanosecond before it is due, a call is still refused, and not late.
    fn just_before(&self, due: u128, cost: u64) {
        let just_before = u64::try_from(due - 1).map_or(END, |nanos| nanos.min(END));
        let Decision::Rejected(again) = decide(&self.limiter, just_before, cost) else {
            panic!("retry_after was more than it takes");
        };
        let wait = again.retry_after.expect("an affordable call").as_nanos();
        assert_eq!(u128::from(just_before) + wait, due);
        assert!(!self.exact.is_overdue(just_before, cost), "late");
    }
}

fn limiter(given: &Given) -> Stored {
    let builder = Limiter::builder().limit("tool", given.limit.clone());
    store::built(builder)
}

fn decide(limiter: &Stored, now: u64, cost: u64) -> Decision<'_> {
    let cost = NonZeroU64::new(cost).expect("a cost is never zero");
    let (call, now) = (Call::new("tool").cost(cost), Duration::from_nanos(now));
    limiter.at(now).try_acquire_at(&call, now)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4_000,
        rng_seed: RngSeed::Fixed(20_260_728),
        max_shrink_iters: 5_000,
        ..config()
    })]

    /// 4,000 limits, 2,000,000 calls, the same each time.
    #[test]
    fn decisions_are_those_of_an_exact_bucket(given in limits(), steps in steps(500)) {
        Trace::new(&given).run(&steps);
    }
}

proptest! {
    #![proptest_config(config())]

    /// A full bucket is rounded down only at times that are no whole number of units: never at
    /// time 0, and never when the rate has brought a whole number of tokens, which is at every
    /// whole second, minute, hour or day for a whole number in that unit. (Rounded down, it gives
    /// the last token a nanosecond later.)
    #[test]
    fn a_full_bucket_gives_its_whole_burst_at_once_at_round_times(
        given in limits(),
        times in log_uniform(),
        parts in prop::collection::vec(log_uniform(), 0..8),
    ) {
        // In lowest terms: the time in which a whole number of tokens comes.
        let round = given.rate.denom();
        let times = times % (u64::try_from(END / round).unwrap_or(0) + 1);
        let now = to_time(round * times);
        let limiter = limiter(&given);
        let mut left = given.limit.capacity();
        for part in parts {
            let part = part % left + 1;
            assert!(decide(&limiter, now, part).is_admitted(), "{part} of {left}");
            left -= part;
            if left == 0 {
                break;
            }
        }
        if left > 0 {
            assert!(decide(&limiter, now, left).is_admitted(), "the last {left}");
        }
        assert!(!decide(&limiter, now, 1).is_admitted(), "one more");
    }

    /// The same once more after it was drained and has filled again.
    #[test]
    fn a_bucket_is_full_again_after_exactly_the_time_that_its_burst_takes(given in limits()) {
        let burst = given.limit.capacity();
        let limiter = limiter(&given);
        let time = given.rate.denom() * burst;
        let full = (&time + given.rate.numer() - 1) / given.rate.numer();
        prop_assume!(full <= BigInt::from(END));
        let full = to_time(full);
        prop_assert!(decide(&limiter, 0, burst).is_admitted());
        prop_assert!(!decide(&limiter, full - 1, burst).is_admitted());
        let Decision::Rejected(rejection) = decide(&limiter, 0, burst) else {
            panic!("twice the burst at once");
        };
        // To the nanosecond, from time 0 on.
        let wait = rejection.retry_after.expect("an affordable call");
        prop_assert_eq!(wait, Duration::from_nanos(full));
        prop_assert!(decide(&limiter, full, burst).is_admitted());
    }

    /// Time past the end counts as the end.
    #[test]
    fn time_ends_after_two_to_the_63_nanoseconds(given in limits(), past in END + 1..) {
        let limiter = limiter(&given);
        let level = |time| limiter.snapshot_at(time).pop().and_then(|level| level.remaining);
        let end = Duration::from_nanos(END);
        prop_assert!(decide(&limiter, 0, given.limit.capacity()).is_admitted());
        let refilled = level(end).expect("one limit");
        for late in [Duration::from_nanos(past), Duration::MAX] {
            prop_assert_eq!(level(late), Some(refilled));
        }
        if let Some(cost) = NonZeroU64::new(refilled) {
            let call = Call::new("tool").cost(cost);
            prop_assert!(limiter.try_acquire_at(&call, Duration::from_nanos(past)).is_admitted());
        }
        for late in [end, Duration::from_nanos(past), Duration::MAX] {
            prop_assert_eq!(level(late), Some(0));
            prop_assert!(!limiter.try_acquire_at(&Call::new("tool"), late).is_admitted());
        }
    }
}
