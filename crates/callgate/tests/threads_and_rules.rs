//! Many threads under several limits at once, and while others reload them.
#![cfg(not(loom))]

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, ScopedJoinHandle};
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
    let in_time = finished.recv_timeout(Duration::from_secs(120));
    assert_ne!(
        in_time,
        Err(RecvTimeoutError::Timeout),
        "the threads wait for each other"
    );
    run.join().expect("no panic");
}

/// What each of so many threads makes of its number, all at once.
fn threads<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..count)
            .map(|thread| scope.spawn(move || run(thread)))
            .collect();
        let joined = threads.into_iter().map(ScopedJoinHandle::join);
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
                        assert_eq!(rejection.limit(), "per user");
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
            assert_eq!(rejection.limit(), "per tool");
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

/// Reloads from so many threads while others decide. Whoever decides is done when `decide` returns.
fn under_reload<T: Send>(
    limiter: &Limiter,
    editions: [&(dyn Fn() -> LimiterBuilder + Sync); 2],
    decide: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let deciding = AtomicUsize::new(4);
    let results = threads(8, |thread| {
        if thread < 4 {
            let decided = decide(thread);
            deciding.fetch_sub(1, Ordering::SeqCst);
            return Some(decided);
        }
        for edition in editions.into_iter().cycle() {
            if deciding.load(Ordering::SeqCst) == 0 {
                break;
            }
            limiter.reload(edition()).expect("limits in range");
        }
        None
    });
    results.into_iter().flatten().collect()
}

#[test]
fn r49_reloads_under_load_give_nobody_a_token() {
    without_a_hang(|| {
        let nanos = Arc::new(AtomicU64::new(0));
        let read = Arc::clone(&nanos);
        let clock = move || Duration::from_nanos(read.load(Ordering::SeqCst));
        // One is the same in both; of the others, one changes with each reload, and one is split.
        let edition = |rate: u64, burst: u64| {
            move || {
                Limiter::builder()
                    .limit("same", Limit::per_second(2_000).burst(100).tools(["tool"]))
                    .limit(
                        "changes",
                        Limit::per_second(rate).burst(burst).tools(["tool"]),
                    )
                    .limit(
                        "user",
                        Limit::per_second(rate)
                            .burst(burst)
                            .tools(["tool"])
                            .per(["user"]),
                    )
            }
        };
        let (slow, fast) = (edition(100, 50), edition(1_000, 20));
        let limiter = built(slow().clock(clock));
        let admitted = under_reload(&limiter, [&fast, &slow], |thread| {
            let user = ["a", "b"][thread % 2];
            let call = Call::new("tool").field("user", user);
            let admitted = (0..20_000).filter(|_| {
                nanos.fetch_add(1_000, Ordering::SeqCst);
                limiter.try_acquire(&call).is_admitted()
            });
            admitted.count() as u64
        });
        let elapsed = nanos.load(Ordering::SeqCst);
        let most = |burst: u64, rate: u64| burst + rate * elapsed / 1_000_000_000;
        let all: u64 = admitted.iter().sum();
        assert!(all <= most(50, 1_000), "{all} of {}", most(50, 1_000));
        // The burst at the start, and no less than the slower rate.
        assert!(all >= most(0, 100), "{all} of {}", most(0, 100));
        let left = limiter.snapshot().remove(0).remaining.expect("one bucket");
        assert!(all + left <= most(100, 2_000), "{all} and {left}");
    });
}

#[test]
fn r49_no_call_is_decided_by_half_of_a_reload() {
    for per in [&[][..], &["user"]] {
        without_a_hang(move || {
            // Both buckets hold 5, and nothing comes. In each edition one of the two asks for 6, so a call
            // that is admitted was decided by one limit of this edition and one of that.
            let edition = |rate: u64, one: u64, two: u64| {
                move || {
                    let limit = |cost: u64| {
                        let limit = Limit::per_day(rate).burst(10).cost(cost);
                        limit.tools(["tool"]).per(per.iter().copied())
                    };
                    Limiter::builder()
                        .limit("one", limit(one))
                        .limit("two", limit(two))
                }
            };
            let (this, that) = (edition(1, 1, 6), edition(2, 6, 1));
            let limiter = built(this().clock(|| START));
            let call = Call::new("tool").field("user", "a");
            assert!(
                limiter
                    .try_acquire(&call.clone().cost(tokens(5)))
                    .is_admitted()
            );
            under_reload(&limiter, [&that, &this], |_| {
                for _ in 0..20_000 {
                    let Decision::Rejected(rejection) = limiter.try_acquire(&call) else {
                        panic!("one limit of this edition, and one of that");
                    };
                    assert_eq!(rejection.remaining(), 5);
                }
            });
            assert!(
                limiter
                    .try_acquire(&call.clone().cost(tokens(5)))
                    .is_admitted()
            );
            assert!(!limiter.try_acquire(&call.cost(tokens(1))).is_admitted());
        });
    }
}

#[test]
fn limits_that_change_places_with_every_reload_make_nobody_wait_for_ever() {
    without_a_hang(|| {
        let limit = |rate: u64| Limit::per_day(rate).burst(1_000_000_000).tools(["tool"]);
        // Limits that change get new buckets, which come after all others in the order of freezing.
        let edition = |rates: [u64; 3]| {
            move || {
                let limits = ["one", "two", "three"].into_iter().zip(rates);
                limits.fold(Limiter::builder(), |limits, (name, rate)| {
                    limits.limit(name, limit(rate))
                })
            }
        };
        let (this, that) = (edition([1, 2, 1]), edition([2, 2, 2]));
        let limiter = built(this().clock(|| START));
        under_reload(&limiter, [&that, &this], |thread| {
            for _ in 0..20_000 {
                let call = Call::new("tool");
                let call = if thread % 2 == 0 {
                    call
                } else {
                    call.cost(tokens(1))
                };
                assert!(limiter.try_acquire(&call).is_admitted());
            }
        });
        for name in ["one", "two", "three"] {
            assert_eq!(level(&limiter, name), 1_000_000_000 - 80_000, "{name}");
        }
    });
}

#[test]
fn r49_what_is_drawn_while_a_reload_goes_on_is_drawn() {
    without_a_hang(|| {
        let nanos = Arc::new(AtomicU64::new(0));
        let reading = Arc::new(AtomicBool::new(false));
        let (time, read) = (Arc::clone(&nanos), Arc::clone(&reading));
        let clock = move || {
            read.store(true, Ordering::SeqCst);
            Duration::from_nanos(time.load(Ordering::SeqCst))
        };
        let edition = |rate: u64| {
            Limiter::builder()
                .limit("large", Limit::per_day(rate).burst(2).per(["tenant"]))
                .limit("tool", Limit::per_second(rate).burst(10))
        };
        let limiter = built(edition(1).clock(clock));
        // It takes a while to carry these.
        for tenant in 0..500_000 {
            let tenant = tenant.to_string();
            let call = Call::new("large").field("tenant", &tenant);
            assert!(limiter.try_acquire(&call).is_admitted());
        }
        let call = Call::new("tool").cost(tokens(10));
        reading.store(false, Ordering::SeqCst);
        let admitted = thread::scope(|scope| {
            let reload = scope.spawn(|| limiter.reload(edition(1_000)));
            while !reading.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // A second after the reload read the clock.
            nanos.store(1_000_000_000, Ordering::SeqCst);
            let admitted = limiter.try_acquire(&call).is_admitted();
            reload.join().expect("no panic").expect("limits in range");
            admitted
        });
        assert!(admitted);
        assert!(
            !limiter.try_acquire(&call).is_admitted(),
            "20 at once, of a burst of 10"
        );
    });
}
