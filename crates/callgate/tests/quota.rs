//! Quotas: never more than so many in any window of their length, whenever the calls come.
#![cfg(not(loom))]

#[path = "common/store.rs"]
mod store;

use std::num::NonZeroU64;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, Unit};
use proptest::prelude::*;
use proptest::sample::select;

/// When a caller comes again.
#[derive(Clone, Copy, Debug)]
enum When {
    /// At the same time.
    Now,
    /// Exactly when the last refusal said; at once where there was none.
    Told,
    /// A nanosecond before that.
    Early,
    /// After so many thousandths of the quota's time.
    Later(u64),
    After(u64),
}

fn whens() -> impl Strategy<Value = Vec<When>> {
    let when = prop_oneof![
        6 => Just(When::Told),
        3 => Just(When::Now),
        1 => Just(When::Early),
        2 => (0..200_u64).prop_map(When::Later),
        1 => (any::<u64>(), 24..64_u32).prop_map(|(nanos, shift)| When::After(nanos >> shift)),
    ];
    prop_oneof![
        4 => prop::collection::vec(when, 1..400),
        // Nothing but greed.
        1 => (1..800_usize).prop_map(|calls| vec![When::Told; calls]),
    ]
}

/// The admissions of a caller who comes like this: when, and for how much.
fn admissions(limit: &Limit, whens: &[When], costs: &[u64]) -> Vec<(u64, u64)> {
    let (_, unit) = limit.as_quota().expect("a quota");
    let unit = u64::try_from(unit.length().as_nanos()).expect("short");
    let limiter = Limiter::builder().limit("tool", limit.clone());
    let limiter = store::built(limiter);
    let (mut now, mut due) = (0_u64, 0_u64);
    let mut admitted = Vec::new();
    for (when, cost) in whens.iter().zip(costs.iter().cycle()) {
        now = match *when {
            When::Now => now,
            When::Told => due.max(now),
            When::Early => due.saturating_sub(1).max(now),
            When::Later(parts) => now + unit / 1_000 * parts,
            When::After(nanos) => now + nanos,
        };
        if store::is_redis() {
            // Its clock has whole microseconds.
            now = now.next_multiple_of(1_000);
        }
        let cost = cost % limit.capacity() + 1;
        let call = Call::new("tool").cost(NonZeroU64::new(cost).expect("not zero"));
        let time = Duration::from_nanos(now);
        match limiter.at(time).try_acquire_at(&call, time) {
            Decision::Admitted(_) => admitted.push((now, cost)),
            Decision::Rejected(rejection) => {
                let wait = rejection.retry_after.expect("affordable").as_nanos();
                due = now + u64::try_from(wait).expect("short");
            }
        }
    }
    admitted
}

/// The most that any window of this length holds, both its ends included.
fn fullest_window(admitted: &[(u64, u64)], length: u64) -> u64 {
    let windows = admitted.iter().enumerate().map(|(first, &(from, _))| {
        let within = admitted[first..].iter();
        let within = within.take_while(|&&(now, _)| now - from <= length);
        within.map(|&(_, cost)| cost).sum()
    });
    windows.max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: if store::is_redis() { 8 } else { 256 },
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_window_of_its_length_ever_holds_more_than_a_quota(
        count in prop_oneof![2..12_u64, 2..200_u64],
        burst in any::<u64>(),
        unit in select(&Unit::ALL[..]),
        whens in whens(),
        costs in prop_oneof![Just(vec![0]), prop::collection::vec(0..5_u64, 1..20)],
    ) {
        let limit = Limit::quota(count, unit).burst(burst % (count - 1) + 1);
        let admitted = admissions(&limit, &whens, &costs);
        let length = u64::try_from(unit.length().as_nanos())?;
        let fullest = fullest_window(&admitted, length);
        prop_assert!(fullest <= count, "{} of {} in {:?}", fullest, count, limit);
    }

    #[test]
    fn a_greedy_caller_gets_all_that_the_quota_refills(
        count in 2..100_u64,
        burst in any::<u64>(),
        unit in select(&Unit::ALL[..]),
    ) {
        let limit = Limit::quota(count, unit).burst(burst % (count - 1) + 1);
        let admitted = admissions(&limit, &vec![When::Told; 1_200], &[0]);
        let length = u64::try_from(unit.length().as_nanos())?;
        let until = 5 * length;
        let got = admitted.iter().filter(|&&(now, _)| now <= until).count() as u64;
        let due = limit.capacity() + 5 * (count - limit.capacity());
        // Each comes at a whole nanosecond, so the last may come a few too late.
        prop_assert!((due - 1..=due).contains(&got), "{} of {} in {:?}", got, due, limit);
        prop_assert!(fullest_window(&admitted, length) <= count);
    }
}
