//! Those who wait for a bucket in Redis, in simulated time: who is served, when, and how often the server is asked.
#![cfg(all(feature = "redis", not(loom)))]

#[path = "common/clocked.rs"]
mod clocked;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, MAX_WAIT, OnStoreError, Turn};
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
    let woken = Arc::new(Answered(thread::current(), AtomicBool::new(false)));
    poll_by(limiter, turn, &woken, now)
}

/// The same for somebody who is woken by this.
fn poll_by(
    limiter: &Limiter,
    turn: &mut Turn,
    woken: &Arc<Answered>,
    now: u64,
) -> Result<bool, u64> {
    let waker = Waker::from(Arc::clone(woken));
    loop {
        let time = Duration::from_nanos(now);
        if let Poll::Ready(decision) = limiter.poll_acquire_at(&CALL, turn, &waker, time) {
            return Ok(decision.is_admitted());
        }
        if !turn.is_asking() {
            return Err(nanos(turn.wait()));
        }
        while !woken.1.swap(false, Ordering::SeqCst) {
            thread::park();
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("short")
}

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        self.0 = hasher.finish();
        self.0 % most
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
    let limiter = limiter.on_store_error(OnStoreError::Deny);
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
    // One ask a token, and two to prove the connection.
    assert_eq!(asked(&url), 22);
}

/// Processes that share a bucket, whose callers come again as soon as they are served.
#[derive(Clone, Copy, Debug, Default)]
struct Crowd {
    processes: usize,
    burst: u64,
    /// So many callers in the first one, and one in each other.
    tasks: usize,
    /// Of so many times that a caller waits, once the process ends, and another begins.
    leaves: Option<u64>,
    /// Whether one more process asks whenever it is told, and never waits.
    has_loop: bool,
    /// Until so many calls are served.
    calls: usize,
}

/// What they came to.
struct Run {
    /// When each call was served, and by which process.
    served: Vec<(u64, usize)>,
    asked: u64,
    burst: u64,
}

/// Somebody who waits, in a process.
struct Caller {
    process: usize,
    turn: Turn,
    woken: Arc<Answered>,
    /// When he asks next.
    due: u64,
}

impl Caller {
    fn new(process: usize) -> Self {
        Self {
            process,
            turn: Turn::simulated(),
            woken: Arc::new(Answered(thread::current(), AtomicBool::new(false))),
            due: 0,
        }
    }
}

impl Crowd {
    fn callers(&self) -> Vec<Caller> {
        let alone = 1..self.processes + usize::from(self.has_loop);
        let many = (0..self.tasks.max(1)).map(|_| 0);
        many.chain(alone).map(Caller::new).collect()
    }

    fn run(&self) -> Run {
        // There are no more descriptors than some thousand connections take.
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (url, clock) = clocked::store();
        let open = || limiter(&url, self.burst, MAX_WAIT);
        let mut limiters: Vec<_> = (0..=self.processes).map(|_| open()).collect();
        let mut callers = self.callers();
        let mut agenda = Agenda::default();
        (0..callers.len()).for_each(|caller| agenda.add(0, caller));
        let mut served = Vec::new();
        // After a while of their coming and going.
        let start = 2 * SECOND + TOKEN * self.processes as u64 * 3;
        let mut before = None;
        let mut random = Random(1);
        while let Some((now, place)) = agenda.next() {
            if callers[place].due != now {
                continue;
            }
            if now >= start && before.is_none() {
                before = Some(asked(&url));
                served.clear();
            }
            if before.is_some() && served.len() >= self.calls {
                break;
            }
            go_to(&clock, now);
            let caller = &mut callers[place];
            let process = caller.process;
            let wait = if process == self.processes {
                match limiters[process].try_acquire_at(&CALL, Duration::from_nanos(now)) {
                    Decision::Admitted(_) => {
                        served.push((now, process));
                        0
                    }
                    Decision::Rejected(rejection) => nanos(rejection.retry_after.expect("a time")),
                }
            } else {
                match poll_by(&limiters[process], &mut caller.turn, &caller.woken, now) {
                    Ok(is_admitted) => {
                        assert!(is_admitted, "it may wait for a day");
                        served.push((now, process));
                        caller.turn = Turn::simulated();
                        0
                    }
                    Err(wait) if self.leaves.is_some_and(|often| random.below(often) == 0) => {
                        limiters[process] = open();
                        caller.turn = Turn::simulated();
                        random.below(wait)
                    }
                    Err(wait) => wait,
                }
            };
            caller.due = now + wait;
            agenda.add(now + wait, place);
            for (place, caller) in callers.iter_mut().enumerate() {
                if caller.process == process && caller.woken.1.swap(false, Ordering::SeqCst) {
                    caller.due = now;
                    agenda.add(now, place);
                }
            }
        }
        let asked = asked(&url) - before.expect("it was long enough");
        Run {
            served,
            asked,
            burst: self.burst,
        }
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

    /// The least and the most that one of these processes got.
    fn shares(&self, processes: usize) -> [u64; 2] {
        let mut got = vec![0; processes];
        for (_, process) in &self.served {
            if let Some(got) = got.get_mut(*process) {
                *got += 1;
            }
        }
        [got.iter().min(), got.iter().max()].map(|got| *got.expect("one"))
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

/// How many processes, their burst, and how often the store may be asked for a token, times a hundred.
const FEW: [(usize, u64, u64); 6] = [
    (1, 1, 105),
    (2, 1, 305),
    (10, 1, 405),
    (30, 1, 405),
    (30, 10, 405),
    (100, 1, 505),
];
const MANY: [(usize, u64, u64); 2] = [(1_000, 1, 605), (1_000, 10, 605)];

fn crowds(sizes: &[(usize, u64, u64)]) -> impl Iterator<Item = (Crowd, u64)> {
    sizes.iter().map(|&(processes, burst, most)| {
        let crowd = Crowd {
            processes,
            burst,
            calls: (20 * processes).clamp(40, 3_000),
            ..Crowd::default()
        };
        (crowd, most)
    })
}

/// Whether a thousand limiters may have their connections here, each with some four descriptors.
#[cfg(target_os = "linux")]
fn has_room_for_a_thousand() -> bool {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let is_raised = setrlimit(Resource::Nofile, limit).is_ok();
    is_raised && limit.current.is_none_or(|most| most >= 8_000)
}

#[cfg(not(target_os = "linux"))]
fn has_room_for_a_thousand() -> bool {
    false
}

fn sizes() -> &'static [(usize, u64, u64)] {
    let is_long = env::var("CALLGATE_LONG_TESTS").is_ok();
    if is_long { &MANY } else { &FEW }
}

impl Crowd {
    /// Runs it: how often the store was asked for a token, times a hundred, the percentage of the rate that was served,
    /// and the least and the most that a process got.
    fn figures(&self) -> (u64, u64, [u64; 2]) {
        let run = self.run();
        run.assert_bound();
        let figures = (run.asks(), run.rate(), run.shares(self.processes));
        println!("{self:?}: {figures:?}");
        figures
    }
}

#[test]
fn processes_that_wait_share_alike_and_a_token_costs_a_few_asks_however_many_they_are() {
    let many = has_room_for_a_thousand().then_some(MANY[0]);
    if many.is_none() {
        println!("NOT RUN, for want of descriptors: a thousand processes");
    }
    for (crowd, most) in crowds(sizes()).chain(crowds(many.as_slice())) {
        let (asks, rate, [least, greatest]) = crowd.figures();
        assert!(asks <= most);
        assert!(rate >= 99);
        assert!(greatest <= least + 3);
    }
}

#[test]
fn processes_that_end_leave_no_token_to_nobody() {
    for (crowd, most) in crowds(&FEW) {
        for (leaves, least) in [(40, 98), (10, 90)] {
            let leaves = Some(leaves);
            let (asks, rate, _) = Crowd { leaves, ..crowd }.figures();
            assert!(asks <= most + 50);
            assert!(rate >= least);
        }
    }
}

#[test]
fn a_process_with_many_tasks_starves_none_with_one() {
    for (crowd, most) in crowds(&sizes()[1..]) {
        let tasks = 1_000;
        let (asks, rate, [least, greatest]) = Crowd { tasks, ..crowd }.figures();
        assert!(asks <= most);
        assert!(rate >= 99);
        assert!(greatest <= least + 3);
    }
}

#[test]
fn beside_one_who_never_waits_no_token_is_lost_and_no_stampede_begins() {
    for (crowd, most) in crowds(sizes()) {
        let has_loop = true;
        let (asks, rate, [least, greatest]) = Crowd { has_loop, ..crowd }.figures();
        assert!(asks <= most + 300);
        assert!(rate >= 99);
        assert!(greatest <= least + 3);
    }
}

#[test]
fn of_many_processes_those_wait_that_can_be_served_in_time() {
    let (url, clock) = clocked::store();
    let limiters = (0..60).map(|_| limiter(&url, 1, Duration::from_millis(1_940)));
    let mut all: Vec<_> = limiters
        .map(|limiter| (limiter, Turn::simulated()))
        .collect();
    let mut agenda = Agenda::default();
    (0..all.len()).for_each(|place| agenda.add(0, place));
    let (mut admitted, mut refused) = (Vec::new(), Vec::new());
    while let Some((now, place)) = agenda.next() {
        go_to(&clock, now);
        let (limiter, turn) = &mut all[place];
        match poll(limiter, turn, now) {
            Ok(true) => admitted.push(now / TOKEN),
            Ok(false) => refused.push(now),
            Err(wait) => agenda.add(now + wait, place),
        }
    }
    assert_eq!(admitted, (0..20).collect::<Vec<_>>());
    // They lined up with the first token that they knew of.
    assert!(refused.iter().all(|&at| at == TOKEN), "{refused:?}");
}

#[test]
fn who_is_polled_without_a_reason_does_not_ask_before_the_time() {
    let (url, clock) = clocked::store();
    let all: Vec<_> = (0..10).map(|_| limiter(&url, 1, MAX_WAIT)).collect();
    let mut turns: Vec<_> = all.iter().map(|_| Turn::simulated()).collect();
    let mut told = Vec::new();
    for now in [0, TOKEN] {
        go_to(&clock, now);
        let polled = all.iter().zip(&mut turns);
        told = polled
            .map(|(limiter, turn)| poll(limiter, turn, now))
            .collect();
    }
    let before = asked(&url);
    let wait = told[9].expect_err("nine are ahead");
    assert!(wait > 5 * TOKEN);
    for step in 1..100 {
        let now = TOKEN + wait / 100 * step;
        go_to(&clock, now);
        let left = poll(&all[9], &mut turns[9], now).expect_err("others are ahead");
        assert!(left <= TOKEN + wait - now);
    }
    assert_eq!(asked(&url), before);
}
