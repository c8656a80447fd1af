//! Limiters that share a Redis store, in one process and in several, while it works and while it does not.
//!
//! The processes are this very test binary, asked for its one test that does what it is told.
#![cfg(all(feature = "redis", not(loom)))]

#[path = "../src/store/redis/tests/server.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod server;

use std::env;
use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZeroU64;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use callgate::{
    Call, Decision, Inspection, Limit, Limiter, LimiterBuilder, OnStoreError, Reason, Rejection,
    Turn,
};
use server::Server;

const TOLD: &str = "CALLGATE_TEST_REDIS";
const CALL: Call<'_> = Call::new("search");

/// Longer than anything takes that goes well.
const PATIENCE: Duration = Duration::from_secs(30);

fn url(server: &Server) -> String {
    format!("{}?prefix=test&timeout=20s", server.url())
}

/// One that gives a server up soon.
fn impatient(server: &Server) -> String {
    format!("{}?prefix=test&timeout=100ms", server.url())
}

fn search(limit: Limit) -> LimiterBuilder {
    Limiter::builder().limit("search", limit)
}

fn limiter(url: &str, limit: Limit) -> Limiter {
    built(url, search(limit))
}

fn built(url: &str, limits: LimiterBuilder) -> Limiter {
    limits.store(url).build().expect("limits in range")
}

/// So many tokens, and no more while a test runs.
fn tokens(burst: u64) -> Limit {
    Limit::per_day(1).burst(burst)
}

fn admitted(limiter: &Limiter, call: &Call<'_>, calls: usize) -> usize {
    let admits = |_: &usize| limiter.try_acquire(call).is_admitted();
    (0..calls).filter(admits).count()
}

fn refused<'a>(limiter: &'a Limiter, call: &Call<'_>) -> Rejection<'a> {
    match limiter.try_acquire(call) {
        Decision::Rejected(rejection) => rejection,
        Decision::Admitted(_) => panic!("{call:?} was admitted"),
    }
}

fn remaining(limiter: &Limiter) -> Vec<Option<u64>> {
    let levels = limiter.snapshot().into_iter();
    levels.map(|level| level.remaining).collect()
}

/// How often the server ran the script.
fn runs(server: &Server) -> u64 {
    let told = server.text("INFO commandstats");
    let lines = told.lines().filter(|line| line.contains("cmdstat_eval"));
    let calls = lines.filter_map(|line| line.split("calls=").nth(1)?.split(',').next());
    calls
        .map(|calls| calls.parse::<u64>().expect("a number"))
        .sum()
}

/// Waits until this is so.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn limiters_share_one_bucket_and_say_how_much_is_left() {
    let server = Server::start();
    let [one, other] = [(); 2].map(|()| limiter(&url(&server), tokens(3)));
    let Decision::Admitted(permit) = one.try_acquire(&CALL) else {
        panic!("it is full");
    };
    assert_eq!(permit.remaining(), Some(2));
    assert_eq!(admitted(&other, &CALL, 5), 2);
    let rejection = refused(&one, &CALL);
    assert_eq!(
        (rejection.reason, rejection.limit()),
        (Reason::Rate, "search")
    );
    assert_eq!(rejection.remaining(), 0);
    let wait = rejection.retry_after.expect("a time");
    let day = Duration::from_secs(86_400);
    assert!(wait <= day && wait + PATIENCE > day, "{wait:?}");
    assert_eq!(remaining(&other), [Some(0)]);
    assert!(one.try_acquire(&Call::new("another")).is_admitted());
}

#[test]
fn a_cost_above_the_burst_is_refused_for_ever_and_the_store_not_asked() {
    let server = Server::start();
    let limiter = limiter(&url(&server), tokens(3));
    let dear = CALL.cost(NonZeroU64::new(4).expect("not zero"));
    let rejection = refused(&limiter, &dear);
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Cost, None)
    );
    assert_eq!(runs(&server), 0);
}

#[test]
fn r32_a_refused_call_takes_nothing_whatever_the_order_of_the_limits() {
    let server = Server::start();
    for turned in [false, true] {
        let mut limits = [
            ("tool", tokens(100).tools(["search"])),
            ("user", tokens(1).tools(["search"]).per(["user"])),
        ];
        if turned {
            limits.reverse();
        }
        let url = format!("{}?prefix=turned-{turned}&timeout=20s", server.url());
        let limits = limits
            .into_iter()
            .fold(Limiter::builder(), |limits, (name, limit)| {
                limits.limit(name, limit)
            });
        let limiter = built(&url, limits);
        let first = CALL.field("user", "first");
        let got: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|_| scope.spawn(|| admitted(&limiter, &first, 5)))
                .collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|got| got.expect("no panic")).sum()
        });
        assert_eq!(got, 1);
        assert_eq!(refused(&limiter, &first).limit(), "user");
        assert_eq!(limiter.snapshot()[usize::from(turned)].remaining, Some(99));
        for user in 0..99 {
            let user = user.to_string();
            let call = Call::new("search").field("user", &user);
            assert!(limiter.try_acquire(&call).is_admitted());
        }
        assert_eq!(
            refused(&limiter, &CALL.field("user", "last")).limit(),
            "tool"
        );
    }
}

#[test]
fn every_one_of_many_calls_at_once_is_admitted_that_the_bucket_holds() {
    let server = Server::start();
    for round in 0..20 {
        let url = format!("{}?prefix=round-{round}&timeout=20s", server.url());
        let limiter = limiter(&url, tokens(8));
        let got: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| admitted(&limiter, &CALL, 1)))
                .collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|got| got.expect("no panic")).sum()
        });
        assert_eq!(got, 8);
    }
}

#[test]
fn an_agent_in_a_loop_costs_the_store_nothing() {
    let server = Server::start();
    let limits = || tokens(2).per(["tenant"]);
    // Each proves its connection twice, and this one a second one for whoever waits.
    let limiter = limiter(&url(&server), limits());
    for tenant in ["a", "b"] {
        let call = CALL.field("tenant", tenant);
        assert_eq!(admitted(&limiter, &call, 2), 2);
        let before = runs(&server);
        let first = refused(&limiter, &call).retry_after;
        assert!((0..10_000).all(|_| refused(&limiter, &call).retry_after <= first));
        assert_eq!(runs(&server), before, "what it spent itself it knows");
    }
    let other = built(&url(&server), search(limits()));
    assert_eq!(admitted(&other, &CALL.field("tenant", "a"), 10_000), 0);
    assert_eq!(runs(&server), 11, "what another spent it was told once");
}

#[test]
fn r07_who_comes_when_told_is_admitted() {
    let server = Server::start();
    for rate in [20, 300] {
        let url = format!("{}?prefix=rate-{rate}&timeout=20s", server.url());
        let limiter = limiter(&url, Limit::per_second(rate));
        assert!(limiter.try_acquire(&CALL).is_admitted());
        for _ in 0..20 {
            let Decision::Rejected(rejection) = limiter.try_acquire(&CALL) else {
                // It took longer than that to ask.
                continue;
            };
            thread::sleep(rejection.retry_after.expect("a time"));
            assert!(limiter.try_acquire(&CALL).is_admitted());
        }
    }
}

#[test]
fn a_pause_holds_for_all_who_share_the_store() {
    let server = Server::start();
    let limits = || {
        search(tokens(5))
            .limit("slow", tokens(9).tools(["search"]).cost(2))
            .default_limit(tokens(5))
    };
    let [one, other] = [(); 2].map(|()| built(&url(&server), limits()));
    let minute = Duration::from_secs(60);
    one.pause("search", minute, Some("search"))
        .expect("a limit");
    one.pause("mail", minute, None).expect("a limit");
    for limiter in [&one, &other] {
        for tool in ["search", "mail"] {
            let call = Call::new(tool);
            for _ in 0..2 {
                let rejection = refused(limiter, &call);
                assert_eq!(rejection.reason, Reason::Paused);
                assert!(rejection.retry_after > Some(minute), "it is empty then");
            }
        }
        assert!(limiter.try_acquire(&Call::new("other")).is_admitted());
        let levels = limiter.snapshot();
        assert!(levels[0].paused.is_some_and(|left| left <= minute));
        assert_eq!(
            (levels[0].remaining, levels[1].remaining),
            (Some(0), Some(9))
        );
    }
}

#[test]
fn a_pause_holds_here_before_the_store_has_heard_of_it() {
    let server = Server::start();
    let limiter = limiter(&url(&server), tokens(1_000));
    // The last ones on another way than a pause.
    assert_eq!(admitted(&limiter, &CALL, 4), 4);
    server.signal("STOP");
    let minute = Duration::from_secs(60);
    limiter.pause("search", minute, None).expect("a limit");
    assert_eq!(refused(&limiter, &CALL).reason, Reason::Paused);
    server.signal("CONT");
}

#[test]
fn a_reload_keeps_the_level_and_the_new_rate_holds_at_once() {
    let server = Server::start();
    let [one, other] = [(); 2].map(|()| limiter(&url(&server), tokens(10)));
    assert_eq!(admitted(&one, &CALL, 4), 4);
    one.reload(search(tokens(8))).expect("limits in range");
    assert_eq!(admitted(&one, &CALL, 2), 2);
    one.reload(search(tokens(20).on_store_error(OnStoreError::Deny)))
        .expect("limits in range");
    assert_eq!(admitted(&one, &CALL, 9), 4, "a higher burst is no gift");
    assert_eq!(admitted(&other, &CALL, 9), 0, "nor is a lower one");
    one.reload(search(Limit::per_second(1_000).burst(5)))
        .expect("limits in range");
    until("the new rate", || one.try_acquire(&CALL).is_admitted());
}

#[test]
fn a_reload_out_of_the_range_of_the_store_changes_nothing() {
    let server = Server::start();
    let limits = || search(tokens(3)).limit("mail", tokens(3));
    let limiter = built(&url(&server), limits());
    assert!(limiter.try_acquire(&CALL).is_admitted());
    let slow = Limit::per_day(1).burst(80 * 365);
    let reload = search(tokens(2)).limit("mail", slow.clone());
    let refused = limiter.reload(reload).unwrap_err().to_string();
    let said = "limit 'mail': burst must be at most what comes in 71 years (with a Redis store), got 29200";
    assert_eq!(refused, said);
    assert_eq!(remaining(&limiter), [Some(2), Some(3)]);
    let made = search(slow).store(url(&server)).build();
    assert!(
        made.unwrap_err()
            .to_string()
            .starts_with("limit 'search': burst")
    );
    let elsewhere = limits().store("redis://127.0.0.1:1?prefix=test");
    assert!(limiter.reload(elsewhere).is_err());
    limiter
        .reload(limits().store(url(&server)))
        .expect("the same");
}

#[test]
fn a_permit_is_given_back_where_the_store_refuses() {
    let server = Server::start();
    let limit = || tokens(2).max_concurrent(1);
    let [one, other] = [(); 2].map(|()| limiter(&url(&server), limit()));
    let running = one.try_acquire(&CALL);
    assert!(running.is_admitted());
    assert_eq!(refused(&one, &CALL).reason, Reason::Concurrency);
    assert!(other.try_acquire(&CALL).is_admitted(), "in another process");
    drop(running);
    for _ in 0..2 {
        assert_eq!(refused(&one, &CALL).reason, Reason::Rate);
    }
}

#[test]
fn in_a_dry_run_the_store_says_what_it_would_have_refused() {
    let server = Server::start();
    let limiter = built(&url(&server), search(tokens(1)).dry_run(true));
    let overruled = |decision| match decision {
        Decision::Admitted(permit) => permit.overruled().map(|rejection| rejection.reason),
        Decision::Rejected(_) => panic!("a dry run"),
    };
    assert_eq!(overruled(limiter.try_acquire(&CALL)), None);
    assert_eq!(overruled(limiter.try_acquire(&CALL)), Some(Reason::Rate));
    let waited = pollster::block_on(limiter.acquire_within(&CALL, PATIENCE));
    assert_eq!(overruled(waited), Some(Reason::Rate));
}

#[test]
fn r22_no_two_values_share_a_bucket_and_none_is_a_value_of_its_own() {
    let server = Server::start();
    let limiter = limiter(
        &url(&server),
        tokens(1).tools(["*"]).per(["tenant", "tool"]),
    );
    let pairs = [
        ("a:b", "c"),
        ("a", "b:c"),
        ("a\0b", "c"),
        ("x\r\nDEL *", "c"),
        ("{t}", "c"),
        ("a}b{c", "d"),
        ("", "c"),
        ("None", "c"),
        ("default", "c"),
    ];
    let named = pairs.map(|(tenant, tool)| Call::new(tool).field("tenant", tenant));
    for call in named.into_iter().chain([Call::new("c")]) {
        assert_eq!(admitted(&limiter, &call, 2), 1, "{call:?}");
    }
}

#[test]
fn r22_two_applications_on_one_server_do_not_meet() {
    let server = Server::start();
    for (prefix, burst) in [("one", 2), ("other", 3)] {
        let url = format!("{}?prefix={prefix}&timeout=20s", server.url());
        let limiter = limiter(&url, tokens(burst));
        assert_eq!(admitted(&limiter, &CALL, 9) as u64, burst);
    }
}

#[test]
fn r24_new_tenants_free_nobody_and_what_is_full_again_is_gone() {
    let server = Server::start();
    let limits =
        search(tokens(1).per(["tenant"])).limit("mail", Limit::per_second(1_000).per(["tenant"]));
    let limiter = built(&url(&server), limits);
    let victim = CALL.field("tenant", "victim");
    assert_eq!(admitted(&limiter, &victim, 2), 1);
    for tenant in 0..2_000 {
        let tenant = tenant.to_string();
        let call = Call::new("mail").field("tenant", &tenant);
        assert!(limiter.try_acquire(&call).is_admitted());
    }
    assert_eq!(refused(&limiter, &victim).reason, Reason::Rate);
    until("they are gone", || {
        let kept = server.text("DBSIZE").parse::<u64>();
        kept.expect("a number") < 10
    });
}

/// What a limiter says whose store has failed, by policy.
fn assert_policies(url: &str, reason: &str) {
    let [local, deny, admit, raise] = [
        OnStoreError::Local,
        OnStoreError::Deny,
        OnStoreError::Admit,
        OnStoreError::Raise,
    ];
    let made = |policy| built(url, search(tokens(2)).on_store_error(policy));
    let started = Instant::now();
    assert_eq!(admitted(&made(local), &CALL, 100), 2);
    assert_eq!(admitted(&made(admit), &CALL, 100), 100);
    for (policy, raises) in [(deny, false), (raise, true)] {
        let limiter = made(policy);
        for _ in 0..100 {
            let rejection = refused(&limiter, &CALL);
            assert_eq!(
                (rejection.reason, rejection.limit()),
                (Reason::Store, "search")
            );
            assert_eq!(rejection.raises(), raises);
            let meter = limiter.store_meter().expect("a store over a network");
            assert!(meter.failure().is_some_and(|why| why.contains(reason)));
            assert_ne!(rejection.retry_after, Some(Duration::ZERO));
        }
    }
    // A deadline for each of them, and not for each call: half a minute.
    assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());

    // The strictest of several limits on one call says it.
    let strictest = |limits: &[(OnStoreError, u64)]| {
        let mut builder = Limiter::builder().on_store_error(raise);
        for (place, (policy, burst)) in limits.iter().enumerate() {
            let limit = tokens(*burst).tools(["search"]).on_store_error(*policy);
            builder = builder.limit(format!("limit {place}"), limit);
        }
        built(url, builder)
    };
    assert!(refused(&strictest(&[(local, 1), (raise, 1), (deny, 1)]), &CALL).raises());
    let denied = strictest(&[(admit, 1), (local, 1), (deny, 1)]);
    assert_eq!(refused(&denied, &CALL).reason, Reason::Store);
    assert!(!refused(&denied, &CALL).raises());
    let here = strictest(&[(admit, 1), (local, 3)]);
    assert_eq!(admitted(&here, &CALL, 9), 3);
    let rejection = refused(&here, &CALL);
    assert_eq!(
        (rejection.reason, rejection.limit()),
        (Reason::Rate, "limit 1")
    );
    assert_eq!(admitted(&strictest(&[(admit, 1)]), &CALL, 9), 9);
}

#[test]
fn r30_where_nobody_listens_each_policy_is_as_written() {
    let port = server::free_port();
    let url = format!("redis://127.0.0.1:{port}?prefix=test&timeout=100ms");
    assert_policies(&url, "Connection refused");
}

#[test]
fn r30_where_nobody_answers_each_policy_is_as_written() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let url = format!("redis://127.0.0.1:{port}?prefix=test&timeout=100ms");
    assert_policies(&url, "answer");
}

#[test]
fn r29_where_the_store_answers_errors_each_policy_is_as_written() {
    let server = Server::with(&["--requirepass", "secret"]);
    let url = format!("redis://127.0.0.1:{}?prefix=test", server.port);
    assert_policies(&url, "NOAUTH");
}

#[test]
fn a_key_that_cannot_be_read_fails_its_own_calls_alone() {
    let server = Server::start();
    let limit = tokens(2).per(["tenant"]).on_store_error(OnStoreError::Deny);
    let limiter = limiter(&url(&server), limit);
    let [broken, sound] = ["broken", "sound"].map(|tenant| CALL.field("tenant", tenant));
    assert!(limiter.try_acquire(&broken).is_admitted());
    let key = server.text("RANDOMKEY");
    let key = if key.contains("proof") {
        server.run(&format!("DEL {key}"));
        server.text("RANDOMKEY")
    } else {
        key
    };
    server.run(&format!("SET {key} nonsense"));
    let rejection = refused(&limiter, &broken);
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Store, None)
    );
    assert!(limiter.try_acquire(&sound).is_admitted());
}

#[test]
fn an_outage_refills_no_bucket_of_this_process() {
    let mut server = Server::start();
    let limits = search(tokens(5).per(["tenant"])).limit("another", tokens(1));
    let limiter = built(&impatient(&server), limits);
    let [one, other] = ["a", "b"].map(|tenant| CALL.field("tenant", tenant));
    until("the store", || remaining(&limiter)[1].is_some());
    let mut got = admitted(&limiter, &one, 4);
    for _ in 0..3 {
        server.stop();
        got += admitted(&limiter, &one, 100);
        assert_eq!(got, 5, "what it spent at the store is spent here");
        server.restart();
        // What the store held is lost; what this process knows is not.
        until("the store", || remaining(&limiter)[1].is_some());
        got += admitted(&limiter, &one, 100);
        assert_eq!(got, 5);
    }
    assert_eq!(admitted(&limiter, &other, 9), 5);
}

#[test]
fn r27_a_store_that_stops_or_restarts_is_used_again_when_it_is_back() {
    let mut server = Server::start();
    let limiter = limiter(
        &impatient(&server),
        tokens(1_000).on_store_error(OnStoreError::Deny),
    );
    let back = || until("the store", || limiter.try_acquire(&CALL).is_admitted());
    back();
    server.run("SCRIPT FLUSH");
    assert!(limiter.try_acquire(&CALL).is_admitted());

    server.signal("STOP");
    let rejection = refused(&limiter, &CALL);
    assert_eq!(rejection.reason, Reason::Store);
    assert_eq!(remaining(&limiter), [None]);
    server.signal("CONT");
    back();

    server.stop();
    until("it is known to be down", || {
        refused(&limiter, &CALL).retry_after.is_some()
    });
    server.restart();
    back();
    assert!(remaining(&limiter)[0] >= Some(990));
}

#[test]
fn no_password_is_shown() {
    let secret = "redis://user:hunter2@127.0.0.1:1/0?prefix=test&timeout=10ms";
    let builder = search(tokens(1)).store(secret);
    let mut said = vec![format!("{builder:?}"), format!("{:?}", builder.store_url())];
    let limiter = builder.build().expect("it connects to nothing yet");
    said.push(format!("{limiter:?} {:?}", limiter.store_url()));
    assert_eq!(limiter.store_url(), Some("redis://127.0.0.1:1/0"));
    for bad in [
        "redis://user:hunter2@127.0.0.1:1/x?prefix=test",
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://user:hunter2@127.0.0.1:1/0?prefix=a&password=hunter2",
        "redis://user:1?hunter2@127.0.0.1:1/x?prefix=test",
        "redis://user:hunter2?@127.0.0.1:y/0?prefix=test",
        "redis://user:hunter2/?/hunter2@127.0.0.1:1/0",
        "rediss://user:hunter2@127.0.0.1:y/0?prefix=test",
        "http://user:hunter2@127.0.0.1",
        "hunter2@127.0.0.1",
    ] {
        let error = search(tokens(1)).store(bad).build().unwrap_err();
        said.push(error.to_string());
        let error = limiter.reload(search(tokens(1)).store(bad)).unwrap_err();
        said.push(error.to_string());
    }
    for said in said {
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[test]
fn a_clock_of_ones_own_beside_the_store_is_refused() {
    let builder = search(tokens(1)).store("redis://127.0.0.1:1?prefix=test");
    assert!(builder.clock(|| Duration::ZERO).build().is_err());
}

/// What becomes of calls that come one after another and wait, and in which order they are served.
async fn served(limiters: &[Arc<Limiter>], calls: usize) -> Vec<(usize, usize)> {
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..calls {
        for (place, limiter) in limiters.iter().enumerate() {
            let (limiter, served) = (Arc::clone(limiter), Arc::clone(&served));
            tasks.push(tokio::spawn(async move {
                if limiter.acquire(&CALL).await.is_admitted() {
                    served.lock().expect("no panic").push((place, number));
                }
            }));
        }
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    let served = served.lock().expect("no panic");
    served.clone()
}

#[tokio::test]
async fn whoever_waits_is_served_in_order_in_each_process() {
    let server = Server::start();
    let limit = || Limit::per_second(50).max_wait(PATIENCE);
    let limiters = [(); 2].map(|()| Arc::new(limiter(&url(&server), limit())));
    let started = Instant::now();
    let got = served(&limiters, 6).await;
    assert_eq!(got.len(), 12);
    // One, and 50 a second.
    assert!(started.elapsed() >= Duration::from_millis(20) * 11);
    for place in 0..2 {
        let here = got.iter().filter(|one| one.0 == place);
        assert!(here.map(|one| one.1).is_sorted(), "{got:?}");
    }
}

#[tokio::test]
async fn who_cannot_be_served_in_time_is_refused_at_once() {
    let server = Server::start();
    let limit = tokens(2).max_wait(Duration::from_secs(3_600));
    let limiter = limiter(&url(&server), limit);
    for _ in 0..2 {
        assert!(limiter.acquire(&CALL).await.is_admitted());
    }
    let Decision::Rejected(rejection) = limiter.acquire(&CALL).await else {
        panic!("it was empty");
    };
    assert_eq!(rejection.reason, Reason::Rate);
    assert!(rejection.retry_after > Some(Duration::from_secs(3_600)));
}

#[test]
fn who_comes_while_the_first_asks_waits_though_the_answer_may_take_longer_than_it_may_wait() {
    let server = Server::start();
    let limit = Limit::per_second(20)
        .burst(2)
        .max_wait(Duration::from_secs(5));
    let limiter = limiter(&url(&server), limit);
    assert_eq!(admitted(&limiter, &CALL, 2), 2);
    let waits = |turn: &mut Turn| {
        let polled = limiter.poll_acquire(&CALL, turn, Waker::noop());
        assert!(polled.is_pending());
    };
    let [mut first, mut next] = [Turn::default(), Turn::default()];
    waits(&mut first);
    // By then there are tokens for both.
    thread::sleep(2 * first.wait() + Duration::from_millis(10));
    server.signal("STOP");
    waits(&mut first);
    waits(&mut next);
    server.signal("CONT");
    assert_eq!((first.is_asking(), next.is_asking()), (true, false));
}

#[tokio::test]
async fn who_goes_gives_its_place_up_and_only_the_first_asks_the_store() {
    let server = Server::start();
    let limit = Limit::per_hour(1).max_wait(callgate::MAX_WAIT);
    let limiter = Arc::new(limiter(&url(&server), limit));
    assert!(limiter.acquire(&CALL).await.is_admitted());
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let limiter = Arc::clone(&limiter);
            tokio::spawn(async move { limiter.acquire(&CALL).await.is_admitted() })
        })
        .collect();
    tokio::task::yield_now().await;
    let before = runs(&server);
    assert_eq!(
        before, 3,
        "two proofs of the connection, and the first call"
    );
    assert_eq!(refused(&limiter, &CALL).reason, Reason::Rate);
    for task in tasks {
        task.abort();
        assert!(task.await.is_err());
    }
    assert_eq!(runs(&server), before);
    let wait = refused(&limiter, &CALL).retry_after;
    let hour = Duration::from_secs(3_600);
    assert!(wait <= Some(hour), "nobody is before it: {wait:?}");
}

#[tokio::test]
async fn a_wait_goes_on_here_while_the_store_is_down() {
    let mut server = Server::start();
    let limit = Limit::per_second(20).max_wait(PATIENCE);
    let limiter = Arc::new(limiter(&impatient(&server), limit));
    until("the store", || limiter.try_acquire(&CALL).is_admitted());
    server.stop();
    let started = Instant::now();
    let got = served(&[limiter], 5).await;
    assert_eq!(got.len(), 5);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_call_that_waits_ends_with_a_store_that_is_denied() {
    let mut server = Server::start();
    let limit = Limit::per_second(5)
        .max_wait(PATIENCE)
        .on_store_error(OnStoreError::Deny);
    let limiter = limiter(&impatient(&server), limit);
    until("the store", || limiter.try_acquire(&CALL).is_admitted());
    server.stop();
    let Decision::Rejected(rejection) = limiter.acquire(&CALL).await else {
        panic!("the store is down");
    };
    assert_eq!(rejection.reason, Reason::Store);
}

/// A store in which two limiters of this process have told what they decided.
fn watched(server: &Server) -> (Vec<Limiter>, Inspection) {
    let limits = || {
        search(tokens(3))
            .limit("crm", tokens(20).per(["tenant"]))
            .default_limit(tokens(5))
    };
    let limiters = vec![built(&url(server), limits()), built(&url(server), limits())];
    for limiter in &limiters {
        assert_eq!(
            admitted(limiter, &Call::new("crm").field("tenant", "acme"), 2),
            2
        );
        let _ = admitted(limiter, &CALL, 3);
    }
    assert_eq!(admitted(&limiters[0], &Call::new("other"), 1), 1);
    let look = || Inspection::open(&url(server)).expect("a store");
    until("what they decided", || {
        let told = look();
        let told = told.processes().iter();
        told.map(|row| row.admitted + row.rejected).sum::<u64>() == 11
    });
    (limiters, look())
}

#[test]
fn who_looks_sees_what_each_process_decided_and_how_full_buckets_are() {
    let server = Server::start();
    let (limiters, seen) = watched(&server);
    assert_eq!(seen.place(), format!("{}?prefix=test", server.url()));
    assert_eq!(
        (seen.slots(), seen.is_whole(), seen.unreadable()),
        (None, true, 0)
    );
    let limits = seen.limits().iter().map(|limit| {
        let per = limit.per.join("+");
        format!(
            "{} {} {}/{} {per}",
            limit.name, limit.rate, limit.remaining, limit.burst
        )
    });
    let limits = limits.collect::<Vec<_>>();
    assert_eq!(
        limits,
        [
            "search 1/day 0/3 ",
            "crm 1/day 20/20 tenant",
            "[default] 1/day 5/5 tool"
        ]
    );
    assert_eq!(seen.processes().len(), 6);
    for row in seen.processes() {
        assert_eq!(row.process, u64::from(std::process::id()));
        assert!(row.host.as_ref().is_some_and(|host| !host.is_empty()));
        assert!(
            row.told.is_some_and(|told| told < PATIENCE),
            "{:?}",
            row.told
        );
    }
    let sum = |name: &str| {
        let rows = seen.processes().iter();
        let rows = rows.filter(|row| seen.limits()[row.limit].name == name);
        rows.fold((0, 0), |(admitted, rejected), row| {
            (admitted + row.admitted, rejected + row.rejected)
        })
    };
    assert_eq!(
        [sum("search"), sum("crm"), sum("[default]")],
        [(3, 3), (4, 0), (1, 0)]
    );

    // Tenants are hashes; who knows one finds it.
    let mut buckets = seen.buckets().expect("an answer");
    buckets.sort_by(|one, other| other.limit.cmp(&one.limit));
    let levels: Vec<_> = buckets
        .iter()
        .map(|one| (&*one.limit, one.remaining, one.burst))
        .collect();
    assert_eq!(levels, [("crm", 16, 20), ("[default]", 4, 5)]);
    let acme = Call::new("crm").field("tenant", "acme");
    assert_eq!(
        seen.bucket("crm", &acme).expect("an answer").as_ref(),
        Some(&buckets[0])
    );
    let other = seen.bucket("crm", &Call::new("crm").field("tenant", "other"));
    assert_eq!(other.expect("an answer").expect("a limit").remaining, 20);
    assert_eq!(seen.bucket("none", &acme).expect("an answer"), None);

    let minute = Duration::from_secs(60);
    limiters[0].pause("search", minute, None).expect("a limit");
    limiters[0].pause("other", minute, None).expect("a limit");
    let is_paused =
        |paused: Option<Duration>| paused.is_some_and(|left| left <= minute && left > minute / 2);
    until("a pause", || {
        let seen = Inspection::open(&url(&server)).expect("a store");
        let tool = |tool| {
            seen.bucket("[default]", &Call::new(tool))
                .expect("an answer")
                .expect("a limit")
        };
        is_paused(seen.limits()[0].paused)
            && is_paused(tool("other").paused)
            && tool("more").paused.is_none()
    });

    // Without processes nobody tells what a limit is called.
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("{test}:process:*")
        .query(&mut server.connect())
        .expect("keys");
    assert_eq!(keys.len(), 2);
    for key in keys {
        server.run(&format!("DEL {key}"));
    }
    let seen = Inspection::open(&url(&server)).expect("a store");
    assert!(seen.limits().is_empty() && seen.processes().is_empty());
    let buckets = seen.buckets().expect("an answer");
    assert_eq!(buckets.len(), 3);
    assert!(
        buckets
            .iter()
            .all(|one| one.limit.len() == 18 && one.limit.starts_with('['))
    );
}

/// How often the server was asked what.
fn asked(server: &Server) -> Vec<(String, String)> {
    let told = server.text("INFO commandstats");
    let lines = told
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(':'));
    let calls = lines.map(|(name, rest)| {
        (
            name.to_owned(),
            rest.split(',').next().unwrap_or("").to_owned(),
        )
    });
    calls.filter(|(name, _)| name != "info").collect()
}

#[test]
fn who_looks_changes_no_key_and_no_time_to_live() {
    let server = Server::start();
    let (_limiters, seen) = watched(&server);
    let all = || {
        let mut connection = server.connect();
        let mut keys: Vec<String> = redis::cmd("KEYS")
            .arg("*")
            .query(&mut connection)
            .expect("keys");
        keys.sort();
        let ask = |command: &str, key: &str| -> Vec<u8> {
            let said = redis::cmd(command).arg(key).query(&mut server.connect());
            said.expect("an answer")
        };
        let whole = |key: String| {
            let ends: u64 = redis::cmd("PEXPIRETIME")
                .arg(&key)
                .query(&mut server.connect())
                .expect("a time");
            (ask("DUMP", &key), ends, key)
        };
        keys.into_iter()
            .filter(|key| !key.ends_with("proof"))
            .map(whole)
            .collect::<Vec<_>>()
    };
    let before = all();
    assert!(before.len() >= 5, "{before:?}");
    server.run("CONFIG RESETSTAT");
    for _ in 0..3 {
        let seen = Inspection::open(&url(&server)).expect("a store");
        let _ = seen.buckets().expect("an answer");
        let call = Call::new("new").field("tenant", "new");
        for limit in seen.limits() {
            let _ = seen.bucket(&limit.name, &call).expect("an answer");
        }
    }
    let commands: Vec<_> = asked(&server).into_iter().map(|(name, _)| name).collect();
    for command in commands {
        let reads = [
            "scan",
            "getrange",
            "pttl",
            "time",
            "hello",
            "config|resetstat",
        ];
        assert!(reads.contains(&&*command), "{command}");
    }
    assert_eq!(all(), before);
    drop(seen);
}

#[test]
fn a_store_that_holds_anything_can_be_looked_into() {
    let server = Server::start();
    let id = |number: u32| format!("{{test}}:process:{number:032x}");
    let line = "1:5:1000000:0:20 1 2 3 evil%1b%5b31m%0a tenant";
    let texts = [
        format!("1 4711 ff %1b%5bhost\n{line}"),
        "nonsense".to_owned(),
        "\u{1b}[2J".to_owned(),
        "1 4711 ff host\n".repeat(20_000),
    ];
    let set = |key: &str, text: &[u8]| {
        redis::cmd("SET")
            .arg(key)
            .arg(text)
            .exec(&mut server.connect())
            .expect("it is set");
    };
    for (number, text) in (0..).zip(&texts) {
        set(&id(number), text.as_bytes());
    }
    set(&id(50), b"\xff\xfe");
    server.run(&format!("RPUSH {} a b", id(51)));
    // Not ours by the shape of the key.
    for key in [
        "{test}:process:short",
        "{test}:bucket:1",
        "{test}:other",
        "{test}",
        "test:process",
    ] {
        set(key, b"1 1 1 1");
    }
    let bucket = |last: &str| format!("{{test}}:bucket:{:016x}:{last:0>32}", 7);
    set(&bucket("a"), b"nonsense");
    set(&bucket("b"), b"1:5:1000000:0:20:9007199254740992:4");
    server.run(&format!("RPUSH {} a", bucket("c")));
    let seen = Inspection::open(&url(&server)).expect("a store");
    assert_eq!((seen.used(), seen.unreadable()), (3, 4));
    assert_eq!(seen.processes().len(), 1);
    assert_eq!(seen.limits()[0].name, "evil\u{1b}[31m\n");
    assert_eq!(
        seen.processes()[0].told,
        None,
        "it does not say when it ends"
    );
    let buckets = seen.buckets().expect("an answer");
    assert_eq!(buckets.len(), 1);
    assert_eq!(
        (&*buckets[0].limit, buckets[0].remaining),
        ("[0000000000000007]", 0)
    );

    // So many processes that not all are listed.
    let many = "for i = 1, 1100 do redis.call('SET', string.format('{test}:process:%032x', i + 100), ARGV[1]) end";
    let many = redis::cmd("EVAL")
        .arg(many)
        .arg(0)
        .arg(&texts[0])
        .exec(&mut server.connect());
    many.expect("they are set");
    let seen = Inspection::open(&url(&server)).expect("a store");
    assert!(!seen.is_whole());
    assert!(seen.processes().len() <= 1_000);
}

#[test]
fn a_store_that_cannot_be_looked_into_is_named_without_the_password() {
    let server = Server::with(&["--requirepass", "right"]);
    let free = server::free_port();
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let silent = silent.local_addr().expect("its address").port();
    for (url, said) in [
        (
            format!("redis://me:secret@127.0.0.1:{}/0?prefix=test", server.port),
            format!(
                "'redis://127.0.0.1:{0}/0?prefix=test': 127.0.0.1:{0}: WRONGPASS",
                server.port
            ),
        ),
        (
            format!("redis://127.0.0.1:{}/0?prefix=test", server.port),
            format!("127.0.0.1:{}: NOAUTH", server.port),
        ),
        (
            format!("redis://me:secret@127.0.0.1:{free}/0?prefix=test"),
            format!("127.0.0.1:{free}: Connection refused"),
        ),
        (
            format!("redis://me:secret@127.0.0.1:{silent}/0?prefix=test&timeout=50ms"),
            format!("127.0.0.1:{silent}: no answer in 50ms"),
        ),
    ] {
        let error = Inspection::open(&url).expect_err("none").to_string();
        assert!(error.contains(&said), "{error}");
        assert!(
            !error.contains("secret") && !error.contains('\n'),
            "{error}"
        );
        let removed = Inspection::remove(&url, true)
            .expect_err("none")
            .to_string();
        assert_eq!(removed, error);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_counted_until_the_turn_has_come() {
    let server = Server::start();
    let limiter = Arc::new(limiter(
        &url(&server),
        Limit::per_second(1).max_wait(PATIENCE),
    ));
    assert!(limiter.acquire(&CALL).await.is_admitted());
    let seen = |what: fn(&callgate::SharedProcess) -> bool| {
        until("what it tells", || {
            let seen = Inspection::open(&url(&server)).expect("a store");
            seen.processes().iter().any(what)
        });
    };
    let waiting = (0..4).map(|_| {
        let limiter = Arc::clone(&limiter);
        tokio::spawn(async move { limiter.acquire(&CALL).await.is_admitted() })
    });
    let waiting: Vec<_> = waiting.collect();
    seen(|row| row.waiting > 0);
    for waiting in waiting {
        assert!(waiting.await.expect("no panic"));
    }
    seen(|row| row.waiting == 0 && row.admitted == 5);
}

#[tokio::test]
async fn who_looks_may_do_so_on_a_thread_of_a_runtime() {
    let server = Server::start();
    assert!(Inspection::open(&url(&server)).is_ok());
}

#[test]
fn a_process_that_lets_go_of_the_store_is_listed_no_more() {
    let server = Server::start();
    let (limiters, seen) = watched(&server);
    assert!(!seen.processes().is_empty());
    drop(limiters);
    until("they are gone", || {
        let seen = Inspection::open(&url(&server)).expect("a store");
        seen.processes().is_empty()
    });
}

#[test]
fn a_store_is_removed_when_no_process_uses_it_or_by_force() {
    let server = Server::start();
    let (_limiters, _) = watched(&server);
    let hashes = format!("{:016x}:{:032x}", 1, 2);
    server.run(&format!("ZADD {{test}}:line:{hashes} 1 x"));
    server.run("SET {test}:other mine");
    server.run("SET {test2}:proof other");
    let refused = Inspection::remove(&url(&server), false)
        .expect_err("it is in use")
        .to_string();
    let own = std::process::id();
    assert_eq!(
        refused,
        format!(
            "store must be one that no process uses, got '{}?prefix=test', which is used by process {own}",
            server.url()
        )
    );
    assert_eq!(
        Inspection::remove(&url(&server), true).expect("by force"),
        [u64::from(own)]
    );
    let mut left: Vec<String> = redis::cmd("KEYS")
        .arg("*")
        .query(&mut server.connect())
        .expect("keys");
    left.sort();
    assert_eq!(left, ["{test2}:proof", "{test}:other"]);
    let users = Inspection::remove(&url(&server), false).expect("none uses it");
    assert!(users.is_empty());
}

/// The rules for users in docs/redis.md, as they are there.
#[test]
fn the_documented_users_may_do_what_they_need_and_no_more() {
    let page = include_str!("../../../docs/redis.md");
    let rules: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("ACL SETUSER "))
        .collect();
    let [app, watcher] = &rules[..] else {
        panic!("{rules:?}");
    };
    let server = Server::start();
    server.run(app);
    server.run(watcher);
    let url = |user: &str, prefix: &str| {
        format!(
            "redis://{user}:secret@127.0.0.1:{}/0?prefix={prefix}&timeout=20s",
            server.port
        )
    };
    let limits = || {
        search(tokens(3).on_store_error(OnStoreError::Raise))
            .limit("crm", tokens(2).per(["tenant"]))
            .limit("mail", Limit::per_second(50).max_wait(PATIENCE))
    };
    let limiter = built(&url("myapp", "myapp"), limits());
    assert_eq!(admitted(&limiter, &CALL, 5), 3);
    assert_eq!(remaining(&limiter), [Some(0), None, Some(1)]);
    assert_eq!(
        admitted(&limiter, &Call::new("crm").field("tenant", "acme"), 5),
        2
    );
    for _ in 0..3 {
        let decision = pollster::block_on(limiter.acquire(&Call::new("mail")));
        assert!(decision.is_admitted());
    }
    // One that waits beside others.
    let other = built(&url("myapp", "myapp"), limits());
    until("a line", || {
        thread::scope(|scope| {
            for limiter in [&limiter, &other] {
                scope.spawn(|| {
                    for _ in 0..3 {
                        let decision = pollster::block_on(limiter.acquire(&Call::new("mail")));
                        assert!(decision.is_admitted());
                    }
                });
            }
        });
        server.text("INFO commandstats").contains("cmdstat_zrem:")
    });
    drop(other);
    limiter
        .pause("search", Duration::from_secs(60), None)
        .expect("a limit");
    until("what it tells", || {
        let seen = Inspection::open(&url("watcher", "myapp")).expect("a watcher may look");
        seen.processes().len() == 3 && seen.limits()[0].paused.is_some()
    });
    let seen = Inspection::open(&url("watcher", "myapp")).expect("a watcher may look");
    assert_eq!(seen.buckets().expect("an answer").len(), 1);
    let denied = server.run("ACL LOG");
    assert_eq!(denied, redis::Value::Array(Vec::new()));

    // Nobody may do anything beside that.
    assert!(Inspection::remove(&url("watcher", "myapp"), true).is_err());
    let reason = |url: &str| {
        let limiter = built(url, limits());
        refused(&limiter, &CALL).reason
    };
    assert_eq!(reason(&url("watcher", "myapp")), Reason::Store);
    assert_eq!(reason(&url("myapp", "other")), Reason::Store);
    assert!(Inspection::open(&url("watcher", "other")).is_err());
}

/// What a process does: it takes what it can get for a while, waiting or not, and says how much that was.
#[test]
#[ignore = "run by others, as a process of its own"]
fn a_process() {
    let Ok(told) = env::var(TOLD) else {
        return;
    };
    let (does, url) = told.split_once(' ').expect("what to do, and where");
    let limit = Limit::per_second(RATE).burst(BURST).max_wait(PATIENCE);
    let limiter = limiter(url, limit);
    let started = Instant::now();
    let mut admitted = 0;
    while started.elapsed() < Duration::from_millis(500) {
        let decision = if does == "waits" {
            pollster::block_on(limiter.acquire(&CALL))
        } else {
            limiter.try_acquire(&CALL)
        };
        admitted += u64::from(decision.is_admitted());
    }
    println!("counted {admitted} ");
}

const RATE: u64 = 200;
const BURST: u64 = 50;

/// What processes get together that do this, and for how long they ran.
fn processes(server: &Server, does: &[&str]) -> (Vec<u64>, Duration) {
    let started = Instant::now();
    let processes = does.iter().map(|does| {
        Command::new(env::current_exe().expect("this program"))
            .args([
                "--exact",
                "a_process",
                "--ignored",
                "--nocapture",
                "--quiet",
            ])
            .env(TOLD, format!("{does} {}", url(server)))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process")
    });
    let processes: Vec<_> = processes.collect();
    let counts = processes.into_iter().map(|process| {
        let said = process.wait_with_output().expect("an end");
        assert!(said.status.success());
        let said = String::from_utf8(said.stdout).expect("text");
        let count = said.split("counted ").nth(1).expect("a count");
        let count = count.split_whitespace().next().expect("a count");
        count.parse().expect("a number")
    });
    (counts.collect(), started.elapsed())
}

/// The most that the bucket of the processes holds in such a time.
fn most(time: Duration) -> u64 {
    let micros = u64::try_from(time.as_micros()).expect("a short time");
    BURST + micros * RATE / 1_000_000
}

#[test]
fn processes_that_share_a_store_get_one_quota_together() {
    let server = Server::start();
    let (counts, time) = processes(&server, &["tries"; 4]);
    let got = counts.iter().sum::<u64>();
    assert!(
        (BURST..=most(time)).contains(&got),
        "{counts:?} in {time:?}"
    );
}

#[test]
fn processes_that_wait_get_one_quota_together_and_none_goes_without() {
    let server = Server::start();
    let (counts, time) = processes(&server, &["waits"; 2]);
    let got = counts.iter().sum::<u64>();
    assert!(
        (BURST..=most(time)).contains(&got),
        "{counts:?} in {time:?}"
    );
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
}

#[test]
fn r11_no_clock_but_the_servers_counts() {
    // A client's elapsed time may be anything: the server's clock decides.
    let server = Server::start();
    let [one, other] = [(); 2].map(|()| limiter(&url(&server), Limit::per_hour(1).burst(4)));
    let at = |limiter: &Limiter, hours: u64| {
        let time = Duration::from_secs(3_600 * hours);
        limiter.try_acquire_at(&CALL, time).is_admitted()
    };
    assert_eq!((0..9).filter(|_| at(&one, 0)).count(), 4);
    assert!(!at(&other, 0) && !at(&one, 0));
    assert!(!at(&other, 100) && !at(&one, 200));
}

#[test]
fn calls_wait_behind_one_that_asks_though_the_store_may_take_longer_than_they_may_wait() {
    let server = Server::start();
    let limit = Limit::per_second(100).max_wait(Duration::from_secs(10));
    // The store may take twenty.
    let limiter = limiter(&url(&server), limit);
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                let decision = pollster::block_on(limiter.acquire(&CALL));
                assert!(decision.is_admitted(), "{decision:?}");
            });
        }
    });
}
