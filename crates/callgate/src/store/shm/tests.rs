//! What only shows between looking at a shared bucket and writing to it.

use super::*;
use crate::store::Source;

const MS: u64 = 1_000_000;

/// Whether so many tokens are drawn at this time; none where the clock is to be read again first.
fn draws(buckets: &Buckets, tokens: u64, now: u64) -> Option<bool> {
    let price = buckets.bucket().price(tokens);
    let draw = Draw::new(Source::Shared(buckets), now, price, None);
    match draw_all(&[draw], now) {
        Ok(Verdict::Admitted(_)) => Some(true),
        Ok(_) => Some(false),
        Err(Moved) => None,
    }
}

#[test]
fn what_others_drew_since_the_clock_was_read_does_not_come_back_at_a_higher_rate() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("quota");
    let store = Store::open(&path.to_string_lossy()).expect("a store");
    let buckets = |limit: Limit| {
        let bucket = Bucket::new(&limit).expect("a limit in range");
        let buckets = store.buckets(("search", &limit, &[]), bucket, &|| 0);
        buckets.expect("room for a limit")
    };
    let slow = buckets(Limit::per_second(1).burst(10));
    let fast = buckets(Limit::per_second(1_000_000).burst(10));

    // While who has the fast limit is held up, having read the clock at 0, the other one draws half of it.
    assert_eq!(draws(&slow, 5, 10 * MS), None);
    assert_eq!(draws(&slow, 5, 10 * MS), Some(true));
    assert_eq!(draws(&fast, 1, 0), None);
    assert_eq!(draws(&fast, 6, 10 * MS), Some(false));
    assert_eq!(draws(&fast, 5, 10 * MS), None);
    assert_eq!(draws(&fast, 5, 10 * MS), Some(true));
    // A token a microsecond from then on, and not from 0 on.
    assert_eq!(draws(&fast, 2, 10 * MS + 1_000), Some(false));
    assert_eq!(draws(&fast, 1, 10 * MS + 1_000), Some(true));
}

#[test]
fn two_who_have_other_limits_convert_all_of_a_call_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("quota");
    let store = Store::open(&path.to_string_lossy()).expect("a store");
    let both = |rate: u64| {
        ["one", "other"].map(|name| {
            let limit = Limit::per_second(rate).burst(10);
            let bucket = Bucket::new(&limit).expect("a limit in range");
            let buckets = store.buckets((name, &limit, &[]), bucket, &|| 0);
            buckets.expect("room for a limit")
        })
    };
    let draws = |limits: &[Buckets; 2]| {
        let draw = |buckets| {
            let price = Buckets::bucket(buckets).price(1);
            Draw::new(Source::Shared(buckets), MS, price, None)
        };
        draw_all(&limits.each_ref().map(draw), MS)
    };
    let (slow, fast) = (both(1), both(1_000));
    for _ in 0..3 {
        for limits in [&slow, &fast] {
            assert!(matches!(draws(limits), Err(Moved)));
            assert!(matches!(draws(limits), Ok(Verdict::Admitted(_))));
        }
    }
}

/// As whoever dies leaves them who takes over what other fields split.
#[test]
fn r21_a_death_while_fields_change_makes_no_bucket_fuller() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("quota");
    let store = Store::open(&path.to_string_lossy()).expect("a store");
    let limit = Limit::per_day(1).burst(10);
    let of = |per: &[&str]| {
        let bucket = Bucket::new(&limit).expect("a limit in range");
        let buckets = store.buckets(("search", &limit, per), bucket, &|| 0);
        buckets.expect("room for a limit")
    };
    let key = store.secret().key("acme");
    let left = |buckets: &Buckets| {
        let state = buckets.look(Some(key), 0).expect("no eviction");
        let missing = buckets.bucket().reached(0).missing(state);
        buckets.bucket().fill(missing).tokens()
    };
    let tenants = of(&["tenant"]);
    let draw = Draw::new(
        Source::Shared(&tenants),
        0,
        tenants.bucket().price(7),
        Some(key),
    );
    assert!(matches!(draw_all(&[draw], 0), Ok(Verdict::Admitted(_))));
    drop(of(&["user"]));
    // It reads the clock for each bucket: nobody comes further than to one of them.
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let times = std::cell::Cell::new(3);
        let bucket = Bucket::new(&limit).expect("a limit in range");
        let _ = store.buckets(("search", &limit, &["tenant"]), bucket, &|| {
            times.set(times.get() - 1);
            assert!(times.get() > 0, "dies");
            0
        });
    }));
    assert!(died.is_err(), "came to the end");
    assert_eq!(left(&tenants), 3);
    assert_eq!(left(&of(&["tenant"])), 3);
}
