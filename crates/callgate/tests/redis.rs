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
use std::thread;
use std::time::{Duration, Instant};

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder, OnStoreError, Reason, Rejection};
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
    // Each proves its connection first.
    let limiter = limiter(&url(&server), limits());
    for tenant in ["a", "b"] {
        let call = CALL.field("tenant", tenant);
        assert_eq!(admitted(&limiter, &call, 2), 2);
        let before = runs(&server);
        let first = refused(&limiter, &call).retry_after;
        assert!((0..1_000).all(|_| refused(&limiter, &call).retry_after <= first));
        assert_eq!(runs(&server), before, "what it spent itself it knows");
    }
    let other = built(&url(&server), search(limits()));
    assert_eq!(admitted(&other, &CALL.field("tenant", "a"), 1_000), 0);
    assert_eq!(runs(&server), 7, "what another spent it was told once");
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

/// What a limiter says whose store has failed, by policy.
fn assert_policies(url: &str) {
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
    assert_policies(&format!(
        "redis://127.0.0.1:{port}?prefix=test&timeout=100ms"
    ));
}

#[test]
fn r30_where_nobody_answers_each_policy_is_as_written() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    assert_policies(&format!(
        "redis://127.0.0.1:{port}?prefix=test&timeout=100ms"
    ));
}

#[test]
fn r29_where_the_store_answers_errors_each_policy_is_as_written() {
    let server = Server::with(&["--requirepass", "secret"]);
    assert_policies(&format!("redis://127.0.0.1:{}?prefix=test", server.port));
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
    assert_eq!(before, 2, "a proof of the connection, and the first call");
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
