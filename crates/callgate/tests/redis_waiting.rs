//! Those who wait for a bucket in Redis, in simulated time: who is served, when, and how often the server is asked.
#![cfg(all(feature = "redis", not(loom)))]

#[path = "common/clocked.rs"]
mod clocked;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use callgate::{Call, Limit, Limiter, MAX_WAIT, Turn};
use clocked::Clock;

const CALL: Call<'_> = Call::new("search");
const SECOND: u64 = 1_000_000_000;

/// Tokens a second.
const RATE: u64 = 10;
const TOKEN: u64 = SECOND / RATE;

/// Wakes the thread that waits for an answer.
struct Answered(Thread, AtomicBool);

impl Wake for Answered {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// Whether a call is admitted at this time; or else after what time to ask again.
fn poll(limiter: &Limiter, turn: &mut Turn, now: u64) -> Result<bool, u64> {
    let answered = Arc::new(Answered(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&answered));
    loop {
        let time = Duration::from_nanos(now);
        if let Poll::Ready(decision) = limiter.poll_acquire_at(&CALL, turn, &waker, time) {
            return Ok(decision.is_admitted());
        }
        if !turn.is_asking() {
            return Err(u64::try_from(turn.wait().as_nanos()).expect("short"));
        }
        while !answered.1.swap(false, Ordering::SeqCst) {
            thread::park();
        }
    }
}

/// What comes when; at the same time in any order.
#[derive(Default)]
struct Agenda(BinaryHeap<Reverse<(u64, u64, usize)>>);

impl Agenda {
    fn add(&mut self, time: u64, what: usize) {
        let mut hasher = DefaultHasher::new();
        (time, what).hash(&mut hasher);
        self.0.push(Reverse((time, hasher.finish(), what)));
    }

    fn next(&mut self) -> Option<(u64, usize)> {
        self.0.pop().map(|Reverse((time, _, what))| (time, what))
    }
}

fn limiter(url: &str, burst: u64, max_wait: Duration) -> Limiter {
    let limit = Limit::per_second(RATE).burst(burst).max_wait(max_wait);
    let limiter = Limiter::builder().limit("search", limit).store(url);
    limiter.build().expect("a limit in range")
}

/// How often the server ran the script.
fn asked(url: &str) -> u64 {
    let (url, _) = url.split_once('?').expect("a prefix");
    let client = redis::Client::open(url).expect("a URL");
    let mut connection = client.get_connection().expect("it listens");
    let mut question = redis::cmd("INFO");
    let told = question.arg("commandstats").query(&mut connection);
    let told: String = told.expect("a text");
    let lines = told.lines().filter(|line| line.contains("cmdstat_eval"));
    let calls = lines.filter_map(|line| line.split("calls=").nth(1)?.split(',').next());
    let calls = calls.map(|calls| calls.parse::<u64>().expect("a number"));
    calls.sum()
}

fn go_to(clock: &Clock, now: u64) {
    clock.set(Duration::from_nanos(now));
}

#[test]
fn r15_whoever_can_be_served_in_time_waits_and_all_others_are_refused_at_once() {
    let (url, clock) = clocked::store();
    let limiter = limiter(&url, 1, Duration::from_millis(1_950));
    let mut turns: Vec<_> = (0..100).map(|_| Turn::simulated()).collect();
    let mut agenda = Agenda::default();
    let mut admitted = Vec::new();
    for (place, turn) in turns.iter_mut().enumerate() {
        match poll(&limiter, turn, 0) {
            Ok(true) => admitted.push((0, place)),
            Ok(false) => {}
            Err(wait) => agenda.add(wait, place),
        }
    }
    assert_eq!((admitted.len(), agenda.0.len()), (1, 19));
    while let Some((now, place)) = agenda.next() {
        go_to(&clock, now);
        match poll(&limiter, &mut turns[place], now) {
            Ok(is_admitted) => {
                assert!(is_admitted, "it had been given hope");
                admitted.push((now, place));
            }
            Err(wait) => agenda.add(now + wait, place),
        }
    }
    let due = (0..20).map(|place| (TOKEN * place as u64, place));
    assert_eq!(admitted, due.collect::<Vec<_>>());
    // One ask a token, and the proof of the connection.
    assert_eq!(asked(&url), 21);
}

/// What processes came to that share a bucket.
struct Run {
    /// When each call was served, and by which process.
    served: Vec<(u64, usize)>,
    asked: u64,
    burst: u64,
}

/// Processes with one caller each, who comes again as soon as he is served: until so many calls are.
fn run(processes: usize, burst: u64, calls: usize) -> Run {
    let (url, clock) = clocked::store();
    let limiters = (0..processes).map(|_| limiter(&url, burst, MAX_WAIT));
    let mut all: Vec<_> = limiters
        .map(|limiter| (limiter, Turn::simulated()))
        .collect();
    let mut agenda = Agenda::default();
    (0..processes).for_each(|place| agenda.add(0, place));
    let mut served = Vec::new();
    // After a while of their coming and going.
    let start = 2 * SECOND + TOKEN * processes as u64 * 3;
    let mut before = None;
    while let Some((now, place)) = agenda.next() {
        if now >= start && before.is_none() {
            before = Some(asked(&url));
            served.clear();
        }
        if before.is_some() && served.len() == calls {
            break;
        }
        go_to(&clock, now);
        let (limiter, turn) = &mut all[place];
        let wait = match poll(limiter, turn, now) {
            Ok(is_admitted) => {
                assert!(is_admitted, "it may wait for a day");
                served.push((now, place));
                *turn = Turn::simulated();
                0
            }
            Err(wait) => wait,
        };
        agenda.add(now + wait, place);
    }
    let asked = asked(&url) - before.expect("it was long enough");
    Run {
        served,
        asked,
        burst,
    }
}

impl Run {
    /// A hundred times as many asks as calls were served.
    fn asks(&self) -> u64 {
        100 * self.asked / self.served.len() as u64
    }

    /// The percentage of the rate that was served.
    fn rate(&self) -> u64 {
        let [first, .., last] = *self.served else {
            panic!("too few");
        };
        100 * (self.served.len() as u64 - 1) * TOKEN / (last.0 - first.0)
    }

    /// The least that a process got, in percent of its share.
    fn least(&self, processes: usize) -> usize {
        let of = |process| self.served.iter().filter(|one| one.1 == process).count();
        let least = (0..processes).map(of).min().expect("one");
        100 * least * processes / self.served.len()
    }

    /// In no window there is more than the bucket gives, give or take the microseconds of the server's clock.
    fn assert_bound(&self) {
        for (first, (from, _)) in self.served.iter().enumerate() {
            for (count, (until, _)) in (1..).zip(&self.served[first..]) {
                let most = self.burst + (until - from + 1_000) / TOKEN;
                assert!(count <= most, "{count} of {most} from {from} to {until}");
            }
        }
    }
}

#[test]
fn processes_that_wait_share_alike_lose_nothing_and_each_asks_for_a_token() {
    let is_long = env::var("CALLGATE_LONG_TESTS").is_ok();
    let few = [(2, 1, 40), (10, 1, 200), (30, 1, 600), (30, 10, 600)];
    let many = [(1_000, 1, 3_000), (1_000, 10, 3_000)];
    let runs: &[_] = if is_long { &many } else { &few };
    for &(processes, burst, calls) in runs {
        let run = run(processes, burst, calls);
        run.assert_bound();
        let (asks, got, least) = (run.asks(), run.rate(), run.least(processes));
        let said = format!("burst {burst}: {asks} asks, {got}% of the rate, the least {least}%");
        println!("{processes} processes, {said}");
        assert!(asks <= 100 * processes as u64 + 50, "{said}");
        assert!(got >= 99, "{said}");
        assert!(least >= 33, "{said}");
    }
}
