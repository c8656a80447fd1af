//! Many threads under several limits at once, and while others reload them.
#![cfg(not(loom))]

use std::num::NonZeroU64;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder};

const START: Duration = Duration::ZERO;

/// Runs a test that would hang if threads waited for each other, and fails it then.
fn without_a_hang(test: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let run = thread::spawn(move || {
        test();
        // Nobody hears it after a hang.
        let _ = done.send(());
    });
    if finished.recv_timeout(Duration::from_secs(120)) == Err(RecvTimeoutError::Timeout) {
        panic!("the threads wait for each other");
    }
    run.join().expect("no panic");
}

/// What each of so many threads makes of its number, all at once.
fn threads<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..count)
            .map(|thread| scope.spawn(move || run(thread)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.expect("no panic")).collect()
    })
}

fn built(limits: LimiterBuilder) -> Limiter {
    limits.build().expect("limits in range")
}

fn level(limiter: &Limiter, name: &str) -> u64 {
    let levels = limiter.snapshot_at(START);
    let level = levels.iter().find(|level| level.name == name);
    level.and_then(|level| level.remaining).expect("one bucket")
}

fn tokens(cost: u64) -> NonZeroU64 {
    NonZeroU64::new(cost).expect("not zero")
}

/// What each of so many calls of a user gets, by thread.
fn calls_of_a_user(limiter: &Limiter, count: usize) -> usize {
    let admitted = threads(16, |thread| {
        let calls = (0..count).filter(|call| call % 16 == thread);
        calls
            .filter(|_| {
                let call = Call::new("tool").field("user", "loud");
                match limiter.try_acquire_at(&call, START) {
                    Decision::Admitted(_) => true,
                    Decision::Rejected(rejection) => {
                        assert_eq!(rejection.limit, "per user");
                        assert_eq!(rejection.retry_after, Some(Duration::from_secs(3_600)));
                        false
                    }
                }
            })
            .count()
    });
    admitted.iter().sum()
}

#[test]
fn r32_a_user_who_is_refused_takes_nothing_from_the_others() {
    without_a_hang(|| {
        let per_tool = ("per tool", Limit::per_hour(1).burst(100).tools(["tool"]));
        let per_user = Limit::per_hour(1).tools(["tool"]).per(["user"]);
        let per_user = ("per user", per_user);
        for order in [
            [per_tool.clone(), per_user.clone()],
            [per_user.clone(), per_tool.clone()],
        ] {
            let limits = order
                .into_iter()
                .fold(Limiter::builder(), |limits, (name, limit)| {
                    limits.limit(name, limit)
                });
            let limiter = built(limits);
            assert_eq!(calls_of_a_user(&limiter, 20), 1);
            assert_eq!(level(&limiter, "per tool"), 99);
            let users: Vec<String> = (0..99).map(|user| format!("user {user}")).collect();
            threads(16, |thread| {
                for user in users.iter().skip(thread).step_by(16) {
                    let call = Call::new("tool").field("user", user);
                    assert!(limiter.try_acquire_at(&call, START).is_admitted(), "{user}");
                }
            });
            assert_eq!(level(&limiter, "per tool"), 0);
            let one_more = Call::new("tool").field("user", "one more");
            let Decision::Rejected(rejection) = limiter.try_acquire_at(&one_more, START) else {
                panic!("101 calls of the tool");
            };
            assert_eq!(rejection.limit, "per tool");
        }
    });
}

#[test]
fn threads_under_several_limits_get_exactly_what_each_of_them_allows() {
    without_a_hang(|| {
        // Each call is under three limits or four, of which one is split; no refill.
        let limits = Limiter::builder()
            .limit("all", Limit::per_day(1).burst(1_000).tools(["*"]))
            .limit("a", Limit::per_day(1).burst(300))
            .limit(
                "letters",
                Limit::per_day(1).burst(2_000).tools(["?"]).cost(3),
            )
            .limit(
                "user",
                Limit::per_day(1).burst(250).tools(["*"]).per(["user"]),
            )
            .limit("b", Limit::per_day(1).burst(700).cost(7));
        let limiter = built(limits);
        let users = ["1", "2", "3", "4"];
        let admitted = threads(8, |thread| {
            let (tool, user) = (["a", "b"][thread % 2], users[thread / 2]);
            let calls = (0..1_000).filter(|_| {
                let call = Call::new(tool).field("user", user);
                limiter.try_acquire_at(&call, START).is_admitted()
            });
            calls.count() as u64
        });
        let [of_a, of_b] = [0, 1].map(|tool| admitted.iter().skip(tool).step_by(2).sum::<u64>());
        let all = of_a + of_b;
        for (user, calls) in admitted.chunks(2).enumerate() {
            assert!(calls.iter().sum::<u64>() <= 250, "user {user}");
        }
        assert_eq!(level(&limiter, "all"), 1_000 - all);
        assert_eq!(level(&limiter, "a"), 300 - of_a);
        assert_eq!(level(&limiter, "letters"), 2_000 - 3 * all);
        assert_eq!(level(&limiter, "b"), 700 - 7 * of_b);
        // 300 of one tool and 100 of the other: all that those two allow.
        assert_eq!((of_a, of_b), (300, 100));
    });
}

#[test]
fn a_call_that_says_its_cost_and_one_that_does_not_never_wait_for_each_other() {
    without_a_hang(|| {
        let names = ["one", "two", "three"];
        let limiter = names.iter().fold(Limiter::builder(), |limits, name| {
            limits.limit(
                *name,
                Limit::per_second(1e9).burst(1_000_000_000).tools(["tool"]),
            )
        });
        let limiter = built(limiter);
        threads(4, |thread| {
            for _ in 0..100_000 {
                let call = Call::new("tool");
                let call = if thread % 2 == 0 {
                    call
                } else {
                    call.cost(tokens(1))
                };
                assert!(limiter.try_acquire_at(&call, START).is_admitted());
            }
        });
        for name in names {
            assert_eq!(level(&limiter, name), 1_000_000_000 - 400_000, "{name}");
        }
    });
}
