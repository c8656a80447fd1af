//! Tables that are full, with room for few keys: at the real cap they take a million calls to fill.

use super::super::Source;
use super::*;
use crate::Limit;

const SECOND: u64 = 1_000_000_000;

/// So many keys fit into a shard. All keys here are in one.
const ROOM: usize = 8;

fn key(number: u64) -> Key {
    Key::new(u128::from(number) << 96 | 64)
}

/// Buckets that refill in `burst` seconds.
fn buckets(burst: u64) -> Buckets {
    let limit = Limit::per_second(1).burst(burst);
    let bucket = Bucket::new(&limit).expect("a limit in range");
    Buckets::with_table(bucket, Some(Table::with_room_for(ROOM)))
}

fn draw(buckets: &Buckets, key: Key, second: u64, cost: u64) -> Result<(), Option<Duration>> {
    draw_both(&[buckets], key, second, cost).map_err(|(_, wait)| wait)
}

/// Draws from all: the place of the one that refuses and the wait.
fn draw_both(
    all: &[&Buckets],
    key: Key,
    second: u64,
    cost: u64,
) -> Result<(), (usize, Option<Duration>)> {
    let now = second * SECOND;
    let draws: Vec<_> = all
        .iter()
        .map(|buckets| {
            let key = buckets.table.is_some().then_some(key);
            Draw::new(
                Source::Memory(buckets),
                now,
                buckets.bucket.price(cost),
                key,
            )
        })
        .collect();
    match draw_all(&draws, now).expect("not moved") {
        Verdict::Admitted(_) => Ok(()),
        Verdict::Refused(index, wait, _) => Err((index, wait)),
        Verdict::Unavailable => panic!("memory is always there"),
    }
}

fn kept(buckets: &Buckets) -> usize {
    let (_, kept) = buckets.peek(0).expect("not moved");
    kept.expect("split")
}

/// Tenants from `first` on fill the table, with buckets that are full again a second later.
fn fill(buckets: &Buckets, first: u64, second: u64) {
    for number in (first..).take(ROOM) {
        let _ = draw(buckets, key(number), second, 1);
    }
}

#[test]
fn r24_a_tenant_who_is_blocked_stays_so_when_the_table_is_full() {
    let buckets = buckets(10);
    let victim = key(1);
    assert_eq!(draw(&buckets, victim, 0, 10), Ok(()));
    let blocked = Err(Some(Duration::from_secs(10)));
    assert_eq!(draw(&buckets, victim, 0, 10), blocked);
    for second in 0..9 {
        // Others come, many more than there is room for, and are full again with each second.
        fill(&buckets, 100 * second + 2, second);
        fill(&buckets, 100 * second + 50, second);
        let left = Duration::from_secs(10 - second);
        assert_eq!(draw(&buckets, victim, second, 10), Err(Some(left)));
    }
    assert_eq!(draw(&buckets, victim, 10, 10), Ok(()));
    assert_eq!(kept(&buckets), ROOM);
}

#[test]
fn keys_without_a_place_share_one_bucket() {
    let buckets = buckets(3);
    fill(&buckets, 1, 0);
    assert!(!buckets.was_pooled());
    // Together they get what one key would.
    let admitted = (100..110).filter(|&number| draw(&buckets, key(number), 0, 1).is_ok());
    assert_eq!(admitted.count(), 3);
    assert!(buckets.was_pooled());
    assert!(!buckets.was_pooled());
    assert_eq!(
        draw(&buckets, key(200), 0, 1),
        Err(Some(Duration::from_secs(1)))
    );
    // The others have theirs.
    for number in (1..).take(ROOM) {
        assert_eq!(draw(&buckets, key(number), 0, 2), Ok(()), "{number}");
    }
}

#[test]
fn a_key_that_gets_its_own_bucket_after_it_drew_from_the_shared_one_has_not_gained_a_token() {
    let buckets = buckets(3);
    fill(&buckets, 1, 0);
    assert_eq!(draw(&buckets, key(100), 0, 3), Ok(()));
    assert!(buckets.was_pooled());
    // Now there is room.
    assert_eq!(
        draw(&buckets, key(100), 1, 2),
        Err(Some(Duration::from_secs(1)))
    );
    assert_eq!(draw(&buckets, key(100), 1, 1), Ok(()));
    assert!(!buckets.was_pooled(), "no bucket of its own");
    assert_eq!(
        draw(&buckets, key(100), 1, 1),
        Err(Some(Duration::from_secs(1)))
    );
}

#[test]
fn r24_a_wider_limit_holds_for_keys_with_a_place_and_for_those_without() {
    let limit = Limit::per_second(1).burst(12);
    let wide = Buckets::full(Bucket::new(&limit).expect("a limit in range"), false);
    let split = buckets(10);
    let all = [&wide, &split];
    let admitted = (1..100).filter(|&number| draw_both(&all, key(number), 0, 1).is_ok());
    assert_eq!(admitted.count(), 12);
    // Eight keys of their own, and four tokens of the shared bucket.
    assert_eq!(kept(&split), ROOM);
    assert_eq!(draw(&split, key(100), 0, 6), Ok(()));
    assert!(draw(&split, key(101), 0, 1).is_err());
}

#[test]
fn a_call_that_another_limit_refuses_makes_no_bucket_and_drops_none() {
    let limit = Limit::per_second(1).burst(1);
    let wide = Buckets::full(Bucket::new(&limit).expect("a limit in range"), false);
    let split = buckets(10);
    let all = [&wide, &split];
    assert_eq!(draw_both(&all, key(1), 0, 1), Ok(()));
    for number in 2..50 {
        let refused = draw_both(&all, key(number), 0, 1);
        assert_eq!(refused, Err((0, Some(Duration::from_secs(1)))));
    }
    assert_eq!(kept(&split), 1);
}

#[test]
fn an_old_reading_finds_no_tokens_where_its_bucket_was_dropped() {
    let buckets = buckets(10);
    let late = key(1);
    assert_eq!(draw(&buckets, late, 0, 10), Ok(()));
    // Full again, dropped, and all places taken and left.
    fill(&buckets, 2, 10);
    fill(&buckets, 100, 11);
    // A thread that read the clock ten seconds ago.
    assert!(draw(&buckets, late, 0, 1).is_err());
}

#[test]
fn an_old_reading_finds_no_more_than_was_left_where_its_bucket_was_dropped_and_all_places_are_taken()
 {
    let buckets = buckets(10);
    let late = key(1);
    assert_eq!(draw(&buckets, late, 0, 7), Ok(()));
    // Full again, and dropped; nobody else is full.
    for number in (2..).take(ROOM) {
        assert_eq!(draw(&buckets, key(number), 10, 10), Ok(()));
    }
    // A thread that read the clock ten seconds ago, and draws from the shared bucket.
    let admitted = (0..10).filter(|_| draw(&buckets, late, 0, 1).is_ok());
    assert_eq!(admitted.count(), 3);
}

#[test]
fn what_a_full_table_holds_is_carried() {
    let old = buckets(10);
    for number in (1..).take(ROOM) {
        assert_eq!(draw(&old, key(number), 0, number), Ok(()));
    }
    // From the shared bucket.
    assert_eq!(draw(&old, key(100), 0, 4), Ok(()));
    let limit = Limit::per_second(1).burst(20);
    let bucket = || Bucket::new(&limit).expect("a limit in range");
    let new = old.carry(bucket(), true, false, &|| 0);
    for number in (1..).take(ROOM).chain([100]) {
        let left = if number == 100 { 6 } else { 10 - number };
        assert!(draw(&new, key(number), 0, left + 1).is_err(), "{number}");
        assert_eq!(draw(&new, key(number), 0, left), Ok(()), "{number}");
    }
    // Under other keys, all start as the emptiest: here as one that is empty.
    let other = new.carry(bucket(), true, true, &|| 0);
    assert!(draw(&other, key(1_000), 0, 1).is_err());
    let one = other.carry(bucket(), false, true, &|| 0);
    assert!(draw(&one, key(1_000), 0, 1).is_err());
    assert_eq!(draw(&one, key(1_000), 1, 1), Ok(()));
}
