//! Every order in which threads can meet at the words. Run by
//! `RUSTFLAGS="--cfg loom" cargo test -p callgate --lib --release --target-dir target/loom loom`.
//!
//! Each model comes with a mutant, a way of drawing that is nearly right, which it has to catch.

use std::panic::{UnwindSafe, catch_unwind};

use loom::sync::Mutex;
use loom::thread;

use super::super::Source;
use super::*;
use crate::Limit;

const SECOND: u64 = 1_000_000_000;

fn bucket(burst: u64) -> Bucket {
    let limit = Limit::per_second(1).burst(burst);
    Bucket::new(&limit).expect("a limit in range")
}

fn one(burst: u64) -> Buckets {
    Buckets::full(bucket(burst), false)
}

/// The whole tokens in a bucket that nothing splits.
fn level(buckets: &Buckets) -> u64 {
    buckets.peek(0).expect("not moved").0
}

/// What is admitted for a call at `now`: its cost, or nothing.
fn draw(buckets: &Buckets, now: u64, cost: u64) -> u64 {
    let price = buckets.bucket.price(cost).expect("at most the burst");
    let drawn = buckets.draw(buckets.bucket.reached(now), price);
    drawn.expect("not moved").map_or(0, |_| cost)
}

/// The same without compare-and-swap.
fn draw_by_load_and_store(buckets: &Buckets, now: u64, cost: u64) -> u64 {
    let price = buckets.bucket.price(cost).expect("at most the burst");
    let state = buckets.word.load(Ordering::Relaxed);
    match Bucket::draw(state, buckets.bucket.reached(now), price) {
        Some(next) => {
            buckets.word.store(next, Ordering::Relaxed);
            cost
        }
        None => 0,
    }
}

/// Every order in which threads are interrupted at most three times; all orders would take hours. Two
/// are what nearly all faults need (M. Musuvathi, S. Qadeer, "Iterative context bounding for systematic
/// testing of multithreaded programs", 2007).
fn every_likely_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Runs a model and says what it fails with.
fn caught(model: impl FnOnce() + UnwindSafe) -> Option<String> {
    let panic = catch_unwind(model).err()?;
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()))
}

mod one_bucket {
    use super::*;

    /// A draw, so that a faulty one can take its place.
    type Draw = fn(&Buckets, u64, u64) -> u64;

    /// Two calls of one token each.
    const TWICE: &[(u64, u64)] = &[(0, 1), (0, 1)];
    /// The same a second later: or the others read the clock a second before they draw.
    const LATER: &[(u64, u64)] = &[(SECOND, 1), (SECOND, 1)];

    /// What calls, given as time and cost, are admitted for.
    fn run(draw: Draw, buckets: &Buckets, calls: &[(u64, u64)]) -> u64 {
        let calls = calls.iter();
        calls.map(|&(now, cost)| draw(buckets, now, cost)).sum()
    }

    /// Threads that each make some calls get one of these numbers of tokens, in every order.
    fn model(burst: u64, threads: &[&'static [(u64, u64)]], due: &'static [u64], draw: Draw) {
        let threads = threads.to_vec();
        loom::model(move || {
            let buckets = Arc::new(one(burst));
            let started: Vec<_> = threads[1..]
                .iter()
                .map(|&calls| {
                    let buckets = Arc::clone(&buckets);
                    thread::spawn(move || run(draw, &buckets, calls))
                })
                .collect();
            let first = run(draw, &buckets, threads[0]);
            let others = started
                .into_iter()
                .map(|thread| thread.join().expect("no panic"));
            let got = first + others.sum::<u64>();
            assert!(due.contains(&got), "{got}, not one of {due:?}");
        });
    }

    #[test]
    fn threads_at_one_instant_get_exactly_the_burst() {
        model(1, &[TWICE, TWICE], &[1], draw);
        model(2, &[TWICE, TWICE], &[2], draw);
        model(3, &[TWICE, TWICE], &[3], draw);
        model(4, &[TWICE, TWICE], &[4], draw);
        model(2, &[&[(0, 1)], &[(0, 1)], &[(0, 1)]], &[2], draw);
        // One of the 2s, whichever comes first, and the 1.
        model(3, &[&[(0, 2)], &[(0, 2)], &[(0, 1)]], &[3], draw);
    }

    #[test]
    fn threads_with_stale_times_get_no_more_than_the_bound() {
        // The burst, and the token of the second: which a bucket that is full until then does not take.
        model(2, &[TWICE, LATER], &[2, 3], draw);
        model(2, &[&[(0, 1)], LATER, &[(0, 1)]], &[2, 3], draw);
    }

    #[test]
    fn a_load_and_a_store_are_caught() {
        let message_of = |burst, threads: [_; 2], due| {
            caught(move || model(burst, &threads, due, draw_by_load_and_store))
        };
        let message = |text: &str| Some(text.to_owned());
        assert_eq!(
            message_of(1, [TWICE, TWICE], &[1]),
            message("2, not one of [1]")
        );
        assert_eq!(
            message_of(3, [TWICE, TWICE], &[3]),
            message("4, not one of [3]")
        );
        assert_eq!(
            message_of(2, [TWICE, LATER], &[2, 3]),
            message("4, not one of [2, 3]")
        );
    }
}

mod several_limits {
    use super::*;

    type Limits = [(Arc<Buckets>, Price)];

    /// A way to draw a token from all of these, or none.
    type Way = fn(&Limits) -> Result<bool, Moved>;

    fn limits(bursts: &[u64]) -> Vec<(Arc<Buckets>, Price)> {
        let limits = bursts.iter().map(|&burst| Arc::new(one(burst)));
        limits.map(priced).collect()
    }

    fn priced(buckets: Arc<Buckets>) -> (Arc<Buckets>, Price) {
        let price = buckets.bucket.price(1).expect("at most the burst");
        (buckets, price)
    }

    /// As calls are decided that say their cost, or whose limits are split.
    fn all(limits: &Limits) -> Result<bool, Moved> {
        let draws = limits
            .iter()
            .map(|(buckets, price)| Draw::new(Source::Memory(buckets), 0, Some(*price), None));
        let draws: Vec<_> = draws.collect();
        Ok(matches!(draw_all(&draws, 0)?, Verdict::Admitted(_)))
    }

    /// As other calls are.
    fn each(limits: &Limits) -> Result<bool, Moved> {
        match draw_each(limits, 0)? {
            Some(verdict) => Ok(matches!(verdict, Verdict::Admitted(_))),
            None => all(limits),
        }
    }

    /// As `each`, in the other order.
    fn each_backwards(limits: &Limits) -> Result<bool, Moved> {
        let limits: Vec<_> = limits.iter().cloned().rev().collect();
        each(&limits)
    }

    /// One after the other; gives the first token back where the next limit refuses.
    #[expect(clippy::unnecessary_wraps, reason = "it takes the place of others")]
    fn with_undo(limits: &Limits) -> Result<bool, Moved> {
        let [(next, _), (first, _)] = limits else {
            unreachable!("two limits");
        };
        let before = first.word.load(Ordering::Relaxed);
        if draw(first, 0, 1) == 0 {
            return Ok(false);
        }
        let admitted = draw(next, 0, 1) == 1;
        if !admitted {
            first.word.store(before, Ordering::Relaxed);
        }
        Ok(admitted)
    }

    /// Looks at all, and then charges all.
    #[expect(clippy::unnecessary_wraps, reason = "it takes the place of others")]
    fn look_and_charge(limits: &Limits) -> Result<bool, Moved> {
        let admitted = limits.iter().all(|(buckets, _)| level(buckets) > 0);
        if admitted {
            for (buckets, _) in limits {
                draw(buckets, 0, 1);
            }
        }
        Ok(admitted)
    }

    /// Two threads draw from both limits, of which the first has a token for one of them, and a third
    /// draws from the second alone: there is a token for it, too, whatever the refused one did.
    ///
    /// The second is the one that is written at once: loom lets two that wait for a frozen word keep a
    /// third from going on for ever.
    fn model(ways: [Way; 2]) {
        every_likely_order(move || {
            let limits = limits(&[1, 2]);
            let started = ways.map(|way| {
                let limits = limits.clone();
                thread::spawn(move || way(&limits).expect("not moved"))
            });
            let alone = draw(&limits[1].0, 0, 1);
            let both = started.map(|thread| u64::from(thread.join().expect("no panic")));
            assert_eq!((alone, both.iter().sum::<u64>()), (1, 1), "tokens");
            let left = [0, 1].map(|limit| level(&limits[limit].0));
            assert_eq!(left, [0, 0], "left");
        });
    }

    #[test]
    fn all_are_charged_or_none_and_nobody_is_refused_for_the_sake_of_a_refused_call() {
        model([all, all]);
        model([each, each]);
        model([all, each]);
    }

    #[test]
    fn a_call_that_the_last_limit_refuses_leaves_the_others_as_they_were() {
        for (way, count) in [(all as Way, 2), (each, 2), (all, 3), (each, 3)] {
            every_likely_order(move || {
                let limits = limits(&vec![1; count]);
                let started = thread::spawn({
                    let limits = limits.clone();
                    move || way(&limits).expect("not moved")
                });
                let alone = draw(&limits[count - 1].0, 0, 1);
                let together = u64::from(started.join().expect("no panic"));
                assert_eq!(alone + together, 1);
                for (buckets, _) in &limits[..count - 1] {
                    assert_eq!(level(buckets), 1 - together);
                }
            });
        }
    }

    #[test]
    fn calls_under_some_of_three_limits_never_wait_for_each_other() {
        // Two threads, as above.
        for (some, others) in [(0..2, 0..3), (1..3, 0..3), (0..2, 1..3)] {
            every_likely_order(move || {
                let limits = limits(&[2, 2, 2]);
                let started = thread::spawn({
                    let limits = limits[others.clone()].to_vec();
                    move || all(&limits)
                });
                assert_eq!(each(&limits[some.clone()]), Ok(true));
                assert_eq!(started.join().expect("no panic"), Ok(true));
                for (limit, (buckets, _)) in limits.iter().enumerate() {
                    let calls =
                        u64::from(some.contains(&limit)) + u64::from(others.contains(&limit));
                    assert_eq!(level(buckets), 2 - calls);
                }
            });
        }
    }

    #[test]
    fn undoing_looking_first_and_another_order_are_caught() {
        for way in [with_undo as Way, look_and_charge] {
            let message = caught(move || model([way, way])).expect("caught");
            assert!(
                message.contains("tokens") || message.contains("left"),
                "{message}"
            );
        }
        // Each waits for the other for ever.
        let message = caught(|| model([all, each_backwards])).expect("caught");
        assert!(message.contains("maximum number of branches"), "{message}");
    }

    /// A way to move buckets to another burst.
    type Carry = fn(&Buckets) -> Buckets;

    fn carry(old: &Buckets) -> Buckets {
        old.carry(bucket(5), false, false, &|| 0)
    }

    /// Without compare-and-swap.
    fn carry_by_load_and_store(old: &Buckets) -> Buckets {
        let new = one(5);
        let state = settled(&old.word).expect("not moved");
        old.word.store(MOVED, Ordering::Relaxed);
        new.word
            .store(new.bucket.carry(state, &old.bucket, 0), Ordering::Relaxed);
        new
    }

    /// Two threads draw from both limits while both are moved: as rules are put in force.
    ///
    /// No token is gained or lost, and nobody draws from one of the old and one of the new.
    fn reload_model(way: Way, carry: Carry) {
        every_likely_order(move || {
            let current = Arc::new(Mutex::new(limits(&[2, 3])));
            let started = thread::spawn({
                let current = Arc::clone(&current);
                move || loop {
                    let limits = current.lock().expect("no panic").clone();
                    if let Ok(admitted) = way(&limits) {
                        return admitted;
                    }
                    // Until the new ones are in force.
                    drop(current.lock());
                }
            });
            let mut held = current.lock().expect("no panic");
            let moved = held
                .iter()
                .map(|(old, _)| priced(Arc::new(carry(old))))
                .collect();
            *held = moved;
            drop(held);
            assert!(started.join().expect("no panic"));
            let limits = current.lock().expect("no panic").clone();
            let left = [0, 1].map(|limit| level(&limits[limit].0));
            assert_eq!(left, [1, 2], "left");
        });
    }

    #[test]
    fn a_call_that_meets_a_reload_is_charged_once_to_all() {
        reload_model(all, carry);
        reload_model(each, carry);
    }

    #[test]
    fn moving_by_a_load_and_a_store_is_caught() {
        let message = caught(|| reload_model(all, carry_by_load_and_store)).expect("caught");
        assert!(message.contains("left"), "{message}");
    }

    #[test]
    fn a_call_that_meets_the_end_is_decided_or_sent_away() {
        every_likely_order(|| {
            let limits = limits(&[1, 1]);
            let started = thread::spawn({
                let limits = limits.clone();
                move || all(&limits)
            });
            for (buckets, _) in &limits {
                buckets.close();
            }
            assert_ne!(started.join().expect("no panic"), Ok(false));
            assert_eq!(all(&limits), Err(Moved));
        });
    }
}

mod keys {
    use super::*;

    /// A limit that is split, with room for a single key.
    fn split(burst: u64) -> Arc<Buckets> {
        let table = Table::with_room_for(1);
        Arc::new(Buckets::with_table(bucket(burst), Some(table)))
    }

    fn key(number: u128) -> Key {
        Key::new(number)
    }

    /// A way to draw so many tokens for a key at a time: what is admitted.
    type Way = fn(&Buckets, Key, u64, u64) -> u64;

    fn take(buckets: &Buckets, key: Key, now: u64, cost: u64) -> u64 {
        let draw = Draw::new(
            Source::Memory(buckets),
            now,
            buckets.bucket.price(cost),
            Some(key),
        );
        match draw_all(&[draw], now).expect("not moved") {
            Verdict::Admitted(_) => cost,
            Verdict::Refused(..) | Verdict::Unavailable => 0,
        }
    }

    /// Without holding the shard from finding the bucket to drawing from it.
    fn take_from_a_place_that_was_found(buckets: &Buckets, key: Key, now: u64, cost: u64) -> u64 {
        let table = buckets.table.as_ref().expect("split");
        let reached = buckets.bucket.reached(now);
        let price = buckets.bucket.price(cost).expect("at most the burst");
        let start = settled(&buckets.word).expect("not moved");
        let mut shard = table.write(key).expect("not moved");
        let place = shard.find_or_make(key, start, reached.floor(), 0);
        drop(shard);
        let shard = table.read(key).expect("not moved");
        let word = place.map_or(&buckets.word, |slot| shard.word(slot));
        let seen = settled(word).expect("not moved");
        let drawn = swap(word, seen, |state| {
            Bucket::draw(state, reached, price).map(|next| (next, next))
        });
        drawn.expect("not moved").map_or(0, |_| cost)
    }

    /// One key has the only place, in a bucket that is full again after a second. Then it comes again,
    /// twice, and another one comes.
    fn dropping_model(way: Way) {
        every_likely_order(move || {
            let buckets = split(1);
            assert_eq!(take(&buckets, key(1), 0, 1), 1);
            let other = thread::spawn({
                let buckets = Arc::clone(&buckets);
                move || way(&buckets, key(2), SECOND, 1)
            });
            let first = way(&buckets, key(1), SECOND, 1) + way(&buckets, key(1), SECOND, 1);
            let got = (first, other.join().expect("no panic"));
            assert_eq!(got, (1, 1), "tokens");
        });
    }

    /// One key has the only place. Another one comes, at a time at which it has to share, and a second
    /// later, when there is a place for it: two tokens are all that it can have.
    fn sharing_model(way: Way) {
        every_likely_order(move || {
            let buckets = split(2);
            assert_eq!(take(&buckets, key(1), 0, 1), 1);
            let later = thread::spawn({
                let buckets = Arc::clone(&buckets);
                move || way(&buckets, key(2), SECOND, 2)
            });
            let got = way(&buckets, key(2), 0, 2) + later.join().expect("no panic");
            assert_eq!(got, 2, "tokens");
        });
    }

    #[test]
    fn a_key_whose_place_is_taken_by_another_gets_what_is_its_own() {
        dropping_model(take);
    }

    #[test]
    fn a_key_that_shares_a_bucket_and_then_has_its_own_gains_nothing() {
        sharing_model(take);
    }

    #[test]
    fn drawing_from_a_place_without_holding_it_is_caught() {
        for model in [dropping_model, sharing_model] {
            let message = caught(move || model(take_from_a_place_that_was_found)).expect("caught");
            assert!(message.contains("tokens"), "{message}");
        }
    }

    #[test]
    fn a_key_that_comes_while_its_limit_is_moved_is_charged_once() {
        every_likely_order(|| {
            let old = split(2);
            assert_eq!(take(&old, key(1), 0, 1), 1);
            let started = [1, 2].map(|number| {
                let old = Arc::clone(&old);
                thread::spawn(move || {
                    let draw = Draw::new(
                        Source::Memory(&old),
                        0,
                        old.bucket.price(1),
                        Some(key(number)),
                    );
                    matches!(draw_all(&[draw], 0), Ok(Verdict::Admitted(_)))
                })
            });
            let new = old.carry(bucket(2), true, false, &|| 0);
            let [first, second] = started.map(|thread| u64::from(thread.join().expect("no panic")));
            let left = |number| take(&new, key(number), 0, 1) + take(&new, key(number), 0, 1);
            assert_eq!([left(1), left(2)], [1 - first, 2 - second]);
        });
    }
}
