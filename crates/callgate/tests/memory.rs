//! What a limiter takes of memory: nothing for a known key, little for a new one, and never more than its cap.
#![cfg(not(loom))]

use std::fmt::Write;
use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use allocation_counter::measure;
use callgate::{Call, Limit, Limiter, LimiterBuilder};

/// No bucket is ever full again: none can be dropped.
fn slow() -> Limit {
    Limit::per_day(1).burst(2)
}

fn built(limits: LimiterBuilder) -> Limiter {
    limits.build().expect("limits in range")
}

fn per_tenant() -> Limiter {
    built(Limiter::builder().limit("tool", slow().per(["tenant"])))
}

/// A call of each of these tenants at time 0; their names take no memory.
fn call_as(limiter: &Limiter, tenants: Range<u32>) -> usize {
    let admitted = tenants.filter(|tenant| {
        let mut name = *b"tenant 00000000";
        for (place, digit) in name[7..].iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(tenant >> (28 - 4 * place)) as usize % 16];
        }
        let name = str::from_utf8(&name).expect("letters and digits");
        let call = Call::new("tool").field("tenant", name);
        limiter.try_acquire_at(&call, Duration::ZERO).is_admitted()
    });
    admitted.count()
}

#[test]
fn a_key_takes_at_most_40_bytes() {
    let mut empty = None;
    let used = measure(|| empty = Some(per_tenant()));
    assert!(
        used.bytes_current < 12_000,
        "{used:?} for a limit without a key"
    );
    for keys in [1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000] {
        let limiter = per_tenant();
        let used = measure(|| assert_eq!(call_as(&limiter, 0..keys), keys as usize));
        let bytes = u64::try_from(used.bytes_current).expect("kept");
        assert!(
            bytes <= 40 * u64::from(keys),
            "{bytes} bytes for {keys} keys"
        );
        // While a shard grows, for a moment: one of 64.
        assert!(
            used.bytes_max <= bytes + bytes / 8,
            "{used:?} for {keys} keys"
        );
    }
}

#[test]
fn r24_a_million_new_tenants_and_a_million_more_take_no_more_than_the_cap() {
    let limiter = per_tenant();
    let up_to_the_cap = measure(|| {
        call_as(&limiter, 0..1_500_000);
    });
    let cap = u64::try_from(up_to_the_cap.bytes_current).expect("kept");
    assert!(cap <= 40 << 20, "{cap} bytes at the cap");
    let beyond = measure(|| assert_eq!(call_as(&limiter, 1_500_000..2_500_000), 0));
    assert_eq!(beyond.bytes_current, 0);
}

#[test]
fn a_known_key_takes_no_memory() {
    let one_limit = || Limiter::builder().limit("tool", slow().burst(1_000));
    let several = ["one", "two", "three"]
        .iter()
        .fold(one_limit(), |limits, name| {
            limits.limit(*name, slow().burst(1_000).tools(["tool"]))
        });
    let split = Limiter::builder()
        .limit("tool", slow().burst(1_000).per(["tenant"]))
        .limit(
            "both",
            slow().burst(1_000).tools(["tool"]).per(["user", "tenant"]),
        );
    let globs = Limiter::builder()
        .limit("to*", slow().burst(1_000).per(["tool"]))
        .limit("*", slow().burst(1_000));
    let default = Limiter::builder().default_limit(slow().burst(1_000).per(["tenant"]));
    let none = Limiter::builder().limit("other", slow());
    let cases = [one_limit(), several, split, globs, default, none];
    for (case, limits) in cases.into_iter().enumerate() {
        let limiter = built(limits);
        let call = Call::new("tool").field("tenant", "a").field("user", "b");
        // The first calls make the buckets.
        assert!(limiter.try_acquire_at(&call, Duration::ZERO).is_admitted());
        assert!(limiter.tool("tool").try_acquire().is_admitted());
        let dear = call.clone().cost(1_000.try_into().expect("not zero"));
        let used = measure(|| {
            for _ in 0..100 {
                assert!(limiter.try_acquire_at(&call, Duration::ZERO).is_admitted());
                let _ = limiter.try_acquire_at(&dear, Duration::ZERO);
                assert!(limiter.tool("tool").try_acquire().is_admitted());
            }
        });
        assert_eq!(used.count_total, 0, "case {case}");
    }
}

#[test]
fn a_refused_call_of_a_new_key_takes_no_memory() {
    let limiter = built(
        Limiter::builder()
            .limit("all", slow().tools(["tool"]))
            .limit("tool", slow().per(["tenant"])),
    );
    assert_eq!(call_as(&limiter, 0..2), 2);
    let used = measure(|| assert_eq!(call_as(&limiter, 2..100_000), 0));
    assert_eq!(used.count_total, 0);
}

#[test]
fn unknown_tools_take_no_memory_beyond_a_fixed_cache_and_the_cap_of_keys() {
    let cases = [
        (
            "a pattern",
            Limiter::builder().limit("t*", Limit::per_second(1).burst(4_000_000_000)),
        ),
        ("another pattern", Limiter::builder().limit("x*", slow())),
        ("a default", Limiter::builder().default_limit(slow())),
        (
            "both",
            Limiter::builder().limit("x*", slow()).default_limit(slow()),
        ),
    ];
    for (name, limits) in cases {
        let limiter = built(limits);
        let mut called = String::with_capacity(300);
        let call_all = |tools: Range<u32>, called: &mut String| {
            for number in tools {
                called.clear();
                write!(called, "t{number:0200}").expect("a string");
                let _ = limiter.try_acquire_at(&Call::new(called), Duration::ZERO);
            }
        };
        let first = measure(|| call_all(0..1_200_000, &mut called));
        let bytes = u64::try_from(first.bytes_current).expect("kept");
        assert!(bytes <= 41 << 20, "{bytes} bytes under {name}");
        let second = measure(|| call_all(1_200_000..1_400_000, &mut called));
        let grown = second.bytes_current;
        assert!(grown < 200_000, "{grown} bytes more under {name}");
    }
}

/// What is left of a limiter's million keys after `end`, while a thread that used it lives on.
fn left_after(end: impl FnOnce(Arc<Limiter>)) -> i64 {
    let (used, ended) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let mut thread = None;
    let left = measure(|| {
        let limiter = Arc::new(per_tenant());
        assert_eq!(call_as(&limiter, 0..1_000_000), 1_000_000);
        let (shared, used_there, ended_there) = (limiter.clone(), used.clone(), ended.clone());
        thread = Some(thread::spawn(move || {
            assert_eq!(call_as(&shared, 0..10), 10);
            drop(shared);
            used_there.wait();
            ended_there.wait();
        }));
        used.wait();
        end(limiter);
    });
    ended.wait();
    thread.expect("started").join().expect("no panic");
    left.bytes_current
}

#[test]
fn a_limiter_that_is_dropped_gives_its_memory_back_while_a_thread_that_used_it_lives_on() {
    let left = left_after(drop);
    assert!(left < 30_000, "{left} bytes");
}

#[test]
fn a_limit_that_is_removed_gives_its_memory_back_while_a_thread_that_used_it_lives_on() {
    let mut kept = None;
    let left = left_after(|limiter| {
        limiter
            .reload_at(Limiter::builder(), Duration::ZERO)
            .expect("no limits");
        kept = Some(limiter);
    });
    assert!(left < 30_000, "{left} bytes");
    assert!(kept.is_some_and(|limiter| limiter.snapshot().is_empty()));
}
