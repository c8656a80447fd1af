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
    assert_eq!(draws(&fast, 5, 10 * MS), Some(true));
    // A token a microsecond from then on, and not from 0 on.
    assert_eq!(draws(&fast, 2, 10 * MS + 1_000), Some(false));
    assert_eq!(draws(&fast, 1, 10 * MS + 1_000), Some(true));
}
