//! The script against an exact model, with the time that the server tells chosen by the test.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;
use redis::{Cmd, Commands, Connection};

use super::super::look::{Kept, level, pause};
use super::server::Server;
use super::*;
use crate::{Call, Decision, Limiter};

/// The year 2065, in microseconds: a bucket that is kept until then does not expire while a test runs.
const START: u64 = 3_000_000_000_000_000;

/// The year 2109. The last one that the script takes is 2112.
const END: u64 = 4_400_000_000_000_000;

const SECOND: u64 = 1_000_000;

/// A server whose clock stands where the test puts it.
struct Clocked {
    connection: Connection,
    code: String,
    now: u64,
    keys: Keys,
    _server: Server,
}

impl Clocked {
    fn new() -> Self {
        let server = Server::start();
        let code = CODE.replace("redis.call('TIME')", "{ ARGV[#ARGV - 1], ARGV[#ARGV] }");
        assert_ne!(code, CODE, "no clock to replace");
        Self {
            connection: server.connect(),
            code,
            now: START,
            keys: Keys::new("test").expect("a prefix"),
            _server: server,
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, Failure> {
        let mut answers = self.ask_together(request, 1)?;
        request.next(&mut answers)
    }

    /// Asks for so many equal ones.
    fn ask_together(&mut self, request: &Request, count: u64) -> Result<Answers, Failure> {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(&self.code);
        request.write(count, &mut command);
        command.arg(self.now / SECOND).arg(self.now % SECOND);
        let reply = command.query(&mut self.connection);
        request.read(count, &reply.map_err(Failure::Refused)?)
    }

    fn take(&mut self, asks: &[Ask]) -> Answer {
        self.ask(&take(asks)).expect("an answer")
    }

    fn peek(&mut self, asks: &[Ask]) -> Answer {
        self.ask(&Request::Peek(asks.into())).expect("an answer")
    }

    fn pause(&mut self, ask: &Ask, time: Duration) {
        let (key, terms) = (ask.pause.clone(), Arc::clone(&ask.terms));
        let paused = self.ask(&Request::Pause { key, time, terms });
        assert!(paused.expect("an answer").is_admitted);
    }

    /// An ask for a token of a limit that nothing splits.
    fn one(&self, name: &str, limit: &Limit) -> Ask {
        self.so_many(name, limit, 1)
    }

    fn so_many(&self, name: &str, limit: &Limit, cost: u64) -> Ask {
        ask(&self.keys, name, limit, cost)
    }

    /// When a key expires, in milliseconds.
    fn expiry(&mut self, key: &str) -> u64 {
        let expiry = redis::cmd("PEXPIRETIME")
            .arg(key)
            .query(&mut self.connection);
        expiry.expect("a time")
    }

    fn get(&mut self, key: &str) -> Option<String> {
        self.connection.get(key).expect("a text or nothing")
    }
}

fn micros(number: u64) -> Duration {
    Duration::from_micros(number)
}

/// What a server answered when it refused.
fn error(result: Result<Answer, Failure>) -> String {
    match result {
        Err(failure) => failure.to_string(),
        Ok(answer) => panic!("answered {answer:?}"),
    }
}

#[test]
fn a_bucket_starts_full_and_refills_to_the_microsecond() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(3).burst(2))];
    for left in [1, 0] {
        let answer = store.take(&ask);
        assert!(answer.is_admitted);
        assert_eq!(answer.limits[0].tokens, left);
    }
    // A third of a second, rounded up.
    for (later, wait) in [(0, 333_334), (333_333, 1)] {
        store.now = START + later;
        let answer = store.take(&ask);
        assert_eq!((answer.is_admitted, answer.refusing()), (false, Some(0)));
        assert_eq!(answer.limits[0].wait, micros(wait));
    }
    store.now = START + 333_334;
    assert!(store.take(&ask).is_admitted);
    // No part of a microsecond was lost: three tokens come in just a second.
    store.now = START + 999_999;
    assert!(store.take(&ask).is_admitted);
    assert_eq!(store.take(&ask).limits[0].wait, micros(1));
    store.now = START + SECOND;
    assert!(store.take(&ask).is_admitted);
}

#[test]
fn r06_a_call_made_just_when_it_was_told_is_admitted() {
    let mut store = Clocked::new();
    for rate in ["3/s", "7/s", "0.1/s", "1/day", "1/h", "8000/s", "59999/min"] {
        let ask = [store.one(rate, &rate.parse().expect("a rate"))];
        assert!(store.take(&ask).is_admitted);
        for _ in 0..300 {
            let wait = store.take(&ask).limits[0].wait;
            assert!(!wait.is_zero());
            store.now += u64::try_from(wait.as_micros()).expect("short") - 1;
            assert_eq!(store.take(&ask).limits[0].wait, micros(1), "{rate}");
            store.now += 1;
            assert!(store.take(&ask).is_admitted, "{rate}");
        }
    }
}

#[test]
fn r07_decisions_are_those_of_the_memory_store() {
    let mut store = Clocked::new();
    for (rate, burst, step) in [
        ("1/s", 1, 100_000),
        ("1000/s", 3, 100),
        ("1/day", 2, 9_999_999_999),
    ] {
        let limit = rate.parse::<Limit>().expect("a rate").burst(burst);
        let ask = [store.one(rate, &limit)];
        let memory = Limiter::builder().limit("tool", limit);
        let memory = memory.build().expect("a limit in range");
        let start = store.now;
        for call in 0..1_000 {
            // At uneven times, and at those just before and at the refill.
            store.now += step * (call % 7) + u64::from(call % 3 == 0);
            let answer = store.take(&ask);
            let wait = match memory.try_acquire_at(&Call::new("tool"), micros(store.now - start)) {
                Decision::Admitted(_) => Duration::ZERO,
                Decision::Rejected(rejection) => rejection.retry_after.expect("a time"),
            };
            assert_eq!(answer.limits[0].wait, wait, "{rate}, call {call}");
            assert_eq!(answer.is_admitted, wait.is_zero());
        }
    }
}

#[test]
fn r32_a_call_that_one_limit_refuses_is_charged_to_none() {
    let mut store = Clocked::new();
    let wide = store.one("wide", &Limit::per_hour(1).burst(100));
    let narrow = store.one("narrow", &Limit::per_hour(1).burst(1));
    for [first, second] in [[&wide, &narrow], [&narrow, &wide]] {
        store.take(&[first.clone(), second.clone()]);
        let before = store.get(&wide.bucket);
        for _ in 0..19 {
            let answer = store.take(&[first.clone(), second.clone()]);
            assert!(!answer.is_admitted);
            let refusing = answer.refusing().expect("refused");
            assert_eq!([first, second][refusing].bucket, narrow.bucket);
        }
        assert_eq!(store.get(&wide.bucket), before);
    }
    assert_eq!(store.peek(&[wide]).limits[0].tokens, 99);
}

#[test]
fn a_peek_changes_nothing() {
    let mut store = Clocked::new();
    let limit = Limit::per_hour(1).burst(3);
    let ask = [store.one("tool", &limit)];
    assert_eq!(store.peek(&ask).limits[0].tokens, 3);
    assert_eq!(store.get(&ask[0].bucket), None);
    store.take(&ask);
    let before = store.get(&ask[0].bucket);
    let expiry = store.expiry(&ask[0].bucket);
    // Later, with the clock set back, and as another limit.
    let other = [store.one("tool", &Limit::per_second(1).burst(5))];
    for now in [START + SECOND, START - 3_600 * SECOND] {
        store.now = now;
        store.peek(&ask);
        store.peek(&other);
        assert_eq!(store.get(&ask[0].bucket), before);
        assert_eq!(store.expiry(&ask[0].bucket), expiry);
    }
}

/// What people see of a bucket is what the script finds.
#[test]
fn levels_that_are_looked_at_are_those_of_a_peek() {
    let mut store = Clocked::new();
    let limits = [
        Limit::per_second(3).burst(7),
        Limit::per_second(3).burst(4),
        Limit::per_hour(7).burst(30),
        "0.7/day".parse::<Limit>().expect("a rate").burst(5),
        Limit::per_second(7_000_000).burst(9),
    ];
    let asks: Vec<_> = limits
        .iter()
        .map(|limit| store.one("tool", limit))
        .collect();
    for step in 0..400_u64 {
        let ask = &asks[usize::try_from(step * 7 % 11).expect("small") % asks.len()];
        let later = [0, 1, 142_857, 333_334, SECOND, 3_600 * SECOND];
        store.now += later[usize::try_from(step * 5 % 13 % 6).expect("small")];
        if step % 40 == 39 {
            store.now -= 1_800 * SECOND;
        }
        if step % 50 == 17 {
            store.pause(ask, Duration::from_secs(2));
        }
        if step % 3 > 0 {
            store.take(std::slice::from_ref(ask));
        }
        let kept = store.get(&ask.bucket);
        let kept = kept.map(|text| Kept::read(text.as_bytes()).expect("a bucket"));
        let paused = store.get(&ask.pause);
        let paused = paused.map_or(0, |text| pause(text.as_bytes()).expect("a pause"));
        for other in &asks {
            let seen = level(&other.terms, kept.as_ref(), paused, store.now);
            let tokens = store.peek(std::slice::from_ref(other)).limits[0].tokens;
            let is_carried = kept.as_ref().is_some_and(|kept| !kept.is_of(&other.terms));
            // What is carried is rounded by a hair, against the caller.
            let hair = u64::from(is_carried);
            assert!(
                (tokens..=tokens + hair).contains(&seen),
                "step {step}: {seen}, not {tokens}"
            );
        }
    }
}

#[test]
fn a_bucket_is_kept_until_it_is_full() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(3).burst(4))];
    // A token takes 333,333 1/3 µs.
    for until in [333_334, 666_667, 1_000_000, 1_333_334] {
        store.take(&ask);
        let expiry = 1_000 * store.expiry(&ask[0].bucket);
        let late = expiry - START - until;
        assert!(late <= 1_000, "{late} µs");
    }
}

#[test]
fn a_bucket_expires_by_the_clock_of_the_server() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(2))];
    let mut clock = Vec::new();
    for command in [
        redis::cmd("TIME"),
        take(&ask).command(1, false),
        redis::cmd("TIME"),
    ] {
        let reply = command.query(&mut store.connection).expect("an answer");
        if let Ok((seconds, micros)) = redis::from_redis_value::<(u64, u64)>(reply) {
            clock.push(seconds * SECOND + micros);
        }
    }
    let full = clock[0] / 1_000 + 500..=clock[1] / 1_000 + 501;
    let expiry = store.expiry(&ask[0].bucket);
    assert!(full.contains(&expiry), "{expiry}, not in {full:?}");
}

#[test]
fn a_clock_that_is_set_back_leaves_an_empty_bucket_and_blocks_nobody_for_longer() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(1).burst(2))];
    store.take(&ask);
    store.take(&ask);
    store.now -= 3_600 * SECOND;
    // Refused, and kept: nothing comes back with the clock.
    assert_eq!(store.take(&ask).limits[0].wait, micros(SECOND));
    store.now += SECOND - 1;
    assert_eq!(store.take(&ask).limits[0].wait, micros(1));
    store.now += 1;
    assert!(store.take(&ask).is_admitted);
    assert!(!store.take(&ask).is_admitted);
}

#[test]
fn a_pause_holds_all_calls_and_leaves_empty_buckets() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(2).burst(3))];
    store.pause(&ask[0], Duration::from_secs(10));
    // A shorter one changes nothing.
    store.pause(&ask[0], Duration::from_secs(1));
    let answer = store.take(&ask);
    assert!(!answer.is_admitted);
    let found = answer.limits[0];
    assert_eq!(found.paused, Duration::from_secs(10));
    assert_eq!((found.wait, found.tokens), (micros(10_500_000), 0));
    assert_eq!(store.get(&ask[0].bucket), None);
    store.now += 10 * SECOND;
    let found = store.take(&ask).limits[0];
    assert_eq!(
        (found.paused, found.wait),
        (Duration::ZERO, micros(500_000))
    );
    store.now += SECOND;
    assert_eq!(store.peek(&ask).limits[0].tokens, 2);
    assert!(store.take(&ask).is_admitted);
    assert_eq!(store.take(&ask).limits[0].tokens, 0);
    // It is remembered for as long as it tells of a bucket that is not full.
    let expiry = 1_000 * store.expiry(&ask[0].pause);
    let full = START + 10 * SECOND + 1_500_000;
    assert!((full..=full + 2_000).contains(&expiry), "{expiry}");
}

#[test]
fn a_limit_that_changes_keeps_the_tokens_in_its_buckets() {
    let mut store = Clocked::new();
    let narrow = Limit::per_second(1).burst(4);
    for (limit, tokens) in [
        // One of four is taken: no gift, a cut, another rate.
        (Limit::per_second(1).burst(9), 3),
        (Limit::per_second(1).burst(2), 2),
        (Limit::per_hour(7).burst(4), 3),
    ] {
        let old = [store.one("tool", &narrow)];
        let new = [store.one("tool", &limit)];
        store.take(&old);
        let all = [store.so_many("tool", &limit, tokens)];
        let more = [store.so_many("tool", &limit, (tokens + 1).min(limit.capacity()))];
        assert_eq!(store.take(&more).is_admitted, tokens == limit.capacity());
        // What rounding may have taken comes in less than a microsecond.
        store.now += 1;
        assert_eq!(
            store.take(&all).is_admitted,
            tokens < limit.capacity(),
            "{limit:?}"
        );
        assert_eq!(store.peek(&new).limits[0].tokens, 0, "{limit:?}");
        let _: () = store.connection.del(&*old[0].bucket).expect("no error");
    }
}

#[test]
fn a_refused_call_puts_the_new_rate_in_force() {
    let mut store = Clocked::new();
    let slow = [store.one("tool", &Limit::per_day(1).burst(1))];
    let fast = [store.one("tool", &Limit::per_second(1).burst(1))];
    store.take(&slow);
    let wait = store.take(&fast).limits[0].wait;
    assert!(wait <= micros(SECOND + 1), "{wait:?}");
    store.now += SECOND + 1;
    assert!(store.take(&fast).is_admitted);
}

#[test]
fn what_is_no_bucket_and_no_pause_is_named_and_left_alone() {
    let mut store = Clocked::new();
    let ask = [
        store.one("other", &Limit::per_second(1)),
        store.one("tool", &Limit::per_second(1)),
    ];
    let good = format!("{}:{START}:0", ask[1].terms.limit);
    for bad in [
        "",
        "x",
        "1",
        "1:1:1000000:0:1",
        "2:1:1000000:0:1:5:0",
        "0:1:1000000:0:1:5:0",
        "1:1:1000000:0:1:5:1",
        "1:0:1000000:0:1:5:0",
        "1:1:0:0:1:5:0",
        "1:1:1000000:1:1:5:0",
        "1:1:1000000:0:1:-5:0",
        "1:1:1000000:0:1:5.5:0",
        "1:1:1000000:0:1:1e9:0",
        "1:1:1000000:0:1:99999999999999999999:0",
        "1:99999999999999999999:1:0:1:5:0",
        "1:1:99999999999999999999:0:1:5:0",
        "1:1:1000000:0:99999999999999999999:5:0",
        "1:1:1000000:0:1:nan:0",
        "1:1:1000000:0:1:5:0\n",
        &format!(" {good}"),
    ] {
        let _: () = store
            .connection
            .set(&*ask[1].bucket, bad)
            .expect("no error");
        let message = error(store.ask(&take(&ask)));
        assert!(message.contains(&*ask[1].bucket), "{bad:?}: {message}");
        assert_eq!(store.get(&ask[1].bucket).as_deref(), Some(bad));
        assert_eq!(store.get(&ask[0].bucket), None);
    }
    let _: () = store.connection.del(&*ask[1].bucket).expect("no error");
    for bad in [
        "",
        "1:",
        "1:x",
        "2:5",
        "1:-5",
        "1:99999999999999999999",
        "1:inf",
    ] {
        let _: () = store.connection.set(&*ask[1].pause, bad).expect("no error");
        let message = error(store.ask(&take(&ask)));
        assert!(message.contains(&*ask[1].pause), "{bad:?}: {message}");
        let (key, terms) = (ask[1].pause.clone(), Arc::clone(&ask[1].terms));
        let time = Duration::from_secs(1);
        let message = error(store.ask(&Request::Pause { key, time, terms }));
        assert!(message.contains(&*ask[1].pause), "{bad:?}: {message}");
    }
    let _: () = store.connection.del(&*ask[1].pause).expect("no error");
    let _: () = store
        .connection
        .lpush(&*ask[1].bucket, 1)
        .expect("no error");
    let message = error(store.ask(&take(&ask)));
    assert!(
        message.contains(&*ask[1].bucket) && message.contains("WRONGTYPE"),
        "{message}"
    );
}

#[test]
fn a_clock_that_doubles_do_not_hold_is_an_error() {
    let mut store = Clocked::new();
    let ask = [store.one("tool", &Limit::per_second(1))];
    store.now = (1 << 52) + 1;
    let message = error(store.ask(&take(&ask)));
    assert!(message.contains("clock"), "{message}");
}

/// Processes that wait for tokens of one limit, which come once a second.
struct Line {
    store: Clocked,
    ask: Ask,
}

impl Line {
    /// At a bucket that is empty.
    fn new() -> Self {
        let mut store = Clocked::new();
        let ask = store.one("tool", &Limit::per_second(1));
        assert!(store.take(std::slice::from_ref(&ask)).is_admitted);
        Self { store, ask }
    }

    /// The microseconds after which a process that may wait for so many seconds is to ask again: none if it is
    /// admitted.
    fn told(&mut self, process: u64, left: u64) -> u64 {
        let request = wait(
            std::slice::from_ref(&self.ask),
            process,
            Duration::from_secs(left),
        );
        let answer = self.store.ask(&request).expect("an answer");
        let wait = answer.limits[0].wait.as_micros();
        assert_eq!(answer.is_admitted, wait == 0);
        u64::try_from(wait).expect("short")
    }

    fn at(&mut self, elapsed: u64) -> &mut Self {
        self.store.now = START + elapsed;
        self
    }

    fn key(&self) -> String {
        Keys::line(&self.ask.bucket)
    }

    fn length(&mut self) -> u64 {
        let key = self.key();
        let members: u64 = self.store.connection.zcard(key).expect("a number");
        assert_eq!(members % 2, 0);
        members / 2
    }

    /// Has these ask as they are told, beginning now, until all are admitted or have no more time: when each was, how
    /// often it had asked.
    fn serve(&mut self, processes: impl IntoIterator<Item = u64>) -> Vec<(u64, u64, u64)> {
        let mut agenda: BTreeSet<_> = processes
            .into_iter()
            .enumerate()
            .map(|(place, process)| (self.store.now, place, process, 1))
            .collect();
        let mut served = Vec::new();
        while let Some((now, place, process, asked)) = agenda.pop_first() {
            self.store.now = now;
            match self.told(process, 86_400) {
                0 => served.push((now - START, process, asked)),
                wait => {
                    agenda.insert((now + wait, place, process, asked + 1));
                }
            }
        }
        served
    }
}

#[test]
fn processes_in_line_are_served_as_they_came_and_each_asks_a_few_times() {
    for (processes, asked) in [(1, 2), (3, 3), (10, 4), (30, 4), (100, 5), (1_000, 6)] {
        let mut line = Line::new();
        // Later ones sort before earlier ones by name.
        let served = line.serve((1..=processes).rev());
        for (place, (time, process, times)) in served.into_iter().enumerate() {
            let due = SECOND * (place as u64 + 1);
            assert_eq!((time, process), (due, processes - place as u64));
            assert!(times <= asked, "{times} times, the one at {place}");
        }
        assert_eq!(line.length(), 0);
    }
}

#[test]
fn the_second_in_line_asks_a_little_after_the_first_and_others_when_few_are_left() {
    let mut line = Line::new();
    let told: Vec<_> = (1..=12).map(|process| line.told(process, 60)).collect();
    let after = |seconds: u64| seconds * SECOND + 5_000;
    assert_eq!(told[..4], [SECOND, after(1), after(2), after(3)]);
    // Two of the eleven ahead are then left, or fewer.
    assert_eq!(told[11], after(10));
}

#[test]
fn who_asks_early_keeps_the_place_and_who_comes_in_time_stays_in_front() {
    let mut line = Line::new();
    for process in 1..=3 {
        line.told(process, 60);
    }
    line.at(SECOND / 2);
    assert_eq!(line.told(3, 60), 1_505_000);
    assert_eq!(line.told(1, 60), SECOND / 2);
    assert_eq!(line.length(), 3);
    // Somebody who does not wait takes the token.
    line.at(SECOND);
    let ask = [line.ask.clone()];
    assert!(line.store.take(&ask).is_admitted);
    assert_eq!(line.told(1, 60), SECOND);
    assert_eq!(line.at(SECOND + 5_000).told(2, 60), SECOND);
    assert_eq!(line.at(2 * SECOND).told(1, 60), 0);
}

#[test]
fn whoever_asks_while_there_are_tokens_is_admitted() {
    let mut line = Line::new();
    for process in 1..=3 {
        line.told(process, 60);
    }
    assert_eq!(line.at(SECOND).told(4, 60), 0);
    assert_eq!(line.at(2 * SECOND).told(3, 60), 0);
    assert_eq!(line.length(), 2);
}

#[test]
fn no_token_is_lost_where_one_leaves_and_those_behind_move_up() {
    for gone in 1..=6 {
        let mut line = Line::new();
        for process in 1..=6 {
            line.told(process, 60);
        }
        let left = (1..=6).filter(|process| *process != gone);
        let served = line.serve(left.clone());
        for ((place, process), (time, who, _)) in (1..).zip(left).zip(served) {
            assert_eq!(who, process);
            let due = SECOND * place;
            let most = if process > gone { 5_000 } else { 0 };
            assert!((due..=due + most).contains(&time), "{time} of {due}");
        }
    }
}

#[test]
fn who_does_not_come_is_taken_out_of_the_line() {
    let mut line = Line::new();
    for process in 1..=40 {
        line.told(process, 1);
    }
    assert_eq!(line.length(), 1, "others were not to be served in time");
    for process in 2..=40 {
        line.told(process, 60);
    }
    // All should have come long ago. Some are taken out at a time.
    line.at(120 * SECOND);
    let ask = [line.ask.clone()];
    line.store.take(&ask);
    assert_eq!(line.told(99, 60), SECOND, "they do not count");
    assert_eq!(line.length(), 25);
    line.told(99, 60);
    line.told(99, 60);
    assert_eq!(line.length(), 1);
}

#[test]
fn who_cannot_be_served_in_time_is_told_so_and_takes_no_place() {
    let mut line = Line::new();
    for process in 1..=3 {
        line.told(process, 60);
    }
    assert_eq!(line.told(4, 3), 4 * SECOND);
    assert_eq!(line.told(4, 0), 4 * SECOND);
    assert_eq!(line.length(), 3);
    assert_eq!(line.told(4, 4), 3 * SECOND + 5_000);
    assert_eq!(line.length(), 4);
    // Who was told to come is not told less when the time is short.
    assert_eq!(line.told(4, 1), 3 * SECOND + 5_000);
    assert_eq!(line.length(), 4);
}

#[test]
fn calls_of_several_costs_ask_in_time_for_what_is_ahead() {
    let mut line = Line::new();
    let limit = Limit::per_second(1).burst(5);
    let small = line.store.one("costs", &limit);
    let large = line.store.so_many("costs", &limit, 5);
    assert!(line.store.take(std::slice::from_ref(&large)).is_admitted);
    let mut told = |ask: &Ask, process| {
        let request = wait(std::slice::from_ref(ask), process, Duration::from_secs(60));
        let wait = line.store.ask(&request).expect("an answer").limits[0].wait;
        u64::try_from(wait.as_micros()).expect("short")
    };
    assert_eq!(told(&small, 1), SECOND);
    assert_eq!(told(&small, 2), SECOND + 5_000);
    assert_eq!(told(&large, 3), 6 * SECOND + 5_000);
    // No later than if those ahead were all as cheap.
    assert_eq!(told(&small, 4), 3 * SECOND + 5_000);
}

#[test]
fn a_clock_that_is_set_back_sends_nobody_away() {
    let mut line = Line::new();
    line.at(7_200 * SECOND);
    let ask = [line.ask.clone()];
    line.store.take(&ask);
    for process in 1..=3 {
        line.told(process, 60);
    }
    line.at(0);
    assert_eq!(line.told(4, 60), 3 * SECOND + 5_000);
    assert_eq!(line.told(1, 60), SECOND);
    let served = line.serve([1, 2, 3, 4]);
    let order: Vec<_> = served
        .iter()
        .map(|&(time, process, _)| (time, process))
        .collect();
    assert_eq!(
        order,
        [
            (SECOND, 1),
            (2 * SECOND, 2),
            (3 * SECOND, 3),
            (4 * SECOND, 4)
        ]
    );
}

#[test]
fn a_line_is_kept_until_all_should_have_come() {
    let mut line = Line::new();
    let key = line.key();
    for (process, last) in [(1, 1_000), (2, 1_005), (3, 2_005)] {
        line.told(process, 60);
        assert_eq!(line.store.expiry(&key), START / 1_000 + last + 1_000);
    }
    // One who asks again before others keeps it no shorter.
    line.told(1, 60);
    assert_eq!(line.store.expiry(&key), START / 1_000 + 3_005);
    line.serve([1, 2, 3]);
    let kept: bool = line.store.connection.exists(&key).expect("an answer");
    assert!(!kept);
}

#[test]
fn a_call_waits_in_the_line_of_the_limit_that_refuses_it_the_longest() {
    let mut store = Clocked::new();
    let asks = [
        store.one("fast", &Limit::per_second(2)),
        store.one("slow", &Limit::per_second(1)),
    ];
    store.take(&asks);
    let request = |process| wait(&asks, process, Duration::from_secs(60));
    let lengths = |store: &mut Clocked| {
        let mut length = |ask: &Ask| -> u64 {
            let length = store.connection.zcard(Keys::line(&ask.bucket));
            length.expect("a number")
        };
        asks.each_ref().map(&mut length)
    };
    for (process, slow) in [(1, SECOND), (2, SECOND + 5_000)] {
        let answer = store.ask(&request(process)).expect("an answer");
        let waits = answer.limits.iter().map(|found| found.wait);
        let waits: Vec<_> = waits.collect();
        assert_eq!(waits, [micros(SECOND / 2), micros(slow)]);
        assert_eq!(answer.others, Some(process - 1));
    }
    assert_eq!(lengths(&mut store), [0, 4]);
    store.now += SECOND;
    let answer = store.ask(&request(1)).expect("an answer");
    assert!(answer.is_admitted);
    assert_eq!(answer.others, Some(1));
    assert_eq!(lengths(&mut store), [0, 2]);
    // The other limit pauses.
    store.pause(&asks[0], Duration::from_secs(9));
    let answer = store.ask(&request(2)).expect("an answer");
    assert_eq!(answer.limits[0].wait, micros(9 * SECOND + SECOND / 2));
    assert_eq!(lengths(&mut store), [2, 2]);
    store.now += 10 * SECOND;
    assert!(store.ask(&request(2)).expect("an answer").is_admitted);
    assert_eq!(lengths(&mut store), [0, 0]);
}

#[test]
fn what_is_no_line_is_named_and_nothing_is_charged() {
    let mut line = Line::new();
    line.at(5 * SECOND);
    let key = line.key();
    let before = line.store.get(&line.ask.bucket);
    let _: () = line.store.connection.set(&key, "x").expect("no error");
    let asks = [line.ask.clone()];
    let request = wait(&asks, 1, Duration::from_secs(60));
    let message = error(line.store.ask(&request));
    assert!(
        message.starts_with("CALLGATE") && message.contains(&key) && message.contains("WRONGTYPE"),
        "{message}"
    );
    assert_eq!(line.store.get(&line.ask.bucket), before);
    // Who does not wait does not care.
    assert!(line.store.take(&asks).is_admitted);
}

#[test]
fn whatever_is_in_a_line_there_is_an_answer() {
    let mut line = Line::new();
    let key = line.key();
    let own = format!("{:016x}", 1);
    let scores = ["-inf", "-1e300", "-0.5", "0", "0.5", "1e17", "1e300", "inf"];
    let names = ["", "x", "-x", &own, &format!("-{own}")];
    for (score, name) in scores
        .iter()
        .flat_map(|score| names.map(|name| (score, name)))
    {
        for (other, others) in [("5", "y"), ("inf", "y"), ("-inf", "-y")] {
            let _: () = line.store.connection.del(&key).expect("no error");
            for (score, name) in [(*score, name), (other, others)] {
                let mut add = redis::cmd("ZADD");
                let added: u64 = add
                    .arg(&key)
                    .arg(score)
                    .arg(name)
                    .query(&mut line.store.connection)
                    .expect("no error");
                assert_eq!(added, 1);
            }
            for process in [1, 2, 1] {
                let told = line.told(process, 86_400);
                assert!(told >= SECOND, "{score} of {name:?}, and {other}: {told}");
            }
        }
    }
}

/// A bucket as the textbooks have it, in fractions of any size.
struct Exact {
    /// Its theoretical arrival time, where it was drawn from, and under which of its limits.
    kept: Option<(BigRational, usize)>,
    /// When its last pause ends.
    pause: u64,
    /// The limits that it is under in turn, and which of them it is now.
    limits: [Arc<Terms>; 2],
    turn: usize,
}

fn whole(number: u64) -> BigRational {
    BigRational::from_integer(number.into())
}

fn time(time: Time, terms: &Terms) -> BigRational {
    whole(time.whole) + whole(time.part) / whole(terms.parts)
}

impl Exact {
    fn terms(&self) -> &Arc<Terms> {
        &self.limits[self.turn]
    }

    fn price(&self, cost: u64) -> BigRational {
        time(self.terms().token, self.terms()) * whole(cost)
    }

    fn empty(&self, now: u64) -> BigRational {
        whole(now) + self.price(self.terms().burst)
    }

    fn is_carried(&self) -> bool {
        self.kept
            .as_ref()
            .is_some_and(|(_, turn)| *turn != self.turn)
    }

    /// The arrival time now: of at least a full bucket, of at most an empty one.
    fn read(&self, now: u64) -> BigRational {
        let now_exactly = whole(now);
        let Some((state, turn)) = &self.kept else {
            return now_exactly;
        };
        let mut state = state.clone().max(now_exactly.clone());
        let (old, new) = (&self.limits[*turn], self.terms());
        if *turn != self.turn {
            let missing = (state - &now_exactly) / time(old.token, old);
            let missing = missing.min(whole(old.burst)) + whole(new.burst) - whole(old.burst);
            state = now_exactly + missing.max(whole(0)) * time(new.token, new);
        }
        state.min(self.empty(now))
    }

    /// The tokens that were missing under the limit that it was written under.
    fn missing_before(&self, now: u64) -> BigRational {
        let (state, turn) = self.kept.as_ref().expect("it was written");
        let old = &self.limits[*turn];
        let missing = (state - whole(now)) / time(old.token, old);
        missing.max(whole(0)).min(whole(old.burst))
    }

    fn held(&self, state: BigRational) -> BigRational {
        if self.pause == 0 {
            state
        } else {
            state.max(self.empty(self.pause))
        }
    }

    /// The wait of a call; zero if it is admitted.
    fn wait(&self, state: &BigRational, now: u64, cost: u64) -> Duration {
        let wait = (state + self.price(cost) - self.empty(now))
            .ceil()
            .to_integer();
        micros(u64::try_from(wait.max(BigInt::ZERO)).expect("in range"))
    }

    fn tokens(&self, state: &BigRational, now: u64) -> u64 {
        let missing = ((state - whole(now)) / time(self.terms().token, self.terms())).ceil();
        let left = BigInt::from(self.terms().burst) - missing.to_integer();
        u64::try_from(left.max(BigInt::ZERO)).expect("in range")
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Takes so much of the burst of each limit, in 256ths, from so many limits; if not 0, for a process that waits.
    Take {
        parts: [u8; 3],
        limits: usize,
        process: u64,
    },
    Peek,
    /// Puts a limit's other numbers in force.
    Change(usize),
    Pause(usize, u32),
    /// Lets a token's time of a limit pass, in 16ths.
    Later(usize, u8),
    /// Until the last call would be admitted, or just before.
    Due,
    Early,
    Back(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let limit = 0..3_usize;
    let part = || prop_oneof![4 => Just(0_u8), 1 => any::<u8>()];
    let step = prop_oneof![
        8 => ([part(), part(), part()], 1..=3_usize, 0..6_u64)
            .prop_map(|(parts, limits, process)| Step::Take { parts, limits, process }),
        1 => Just(Step::Peek),
        1 => limit.clone().prop_map(Step::Change),
        1 => (limit.clone(), 1..100_000_000_u32).prop_map(|(limit, time)| Step::Pause(limit, time)),
        3 => (limit, any::<u8>()).prop_map(|(limit, sixteenths)| Step::Later(limit, sixteenths)),
        3 => Just(Step::Due),
        1 => Just(Step::Early),
        1 => any::<u32>().prop_map(Step::Back),
    ];
    prop::collection::vec(step, 1..40)
}

/// Limits of all kinds that a store takes.
fn terms() -> impl Strategy<Value = Arc<Terms>> {
    let texts = prop::sample::select(vec![
        "1/s",
        "3/s",
        "7/h",
        "59999/min",
        "1/day",
        "0.0123456789012345678/s",
        "1000000000/s",
        "999999999.999999999/s",
        "0.999999999999999999/s",
    ]);
    let limits = prop_oneof![
        texts.prop_map(|text| text.parse::<Limit>().expect("a rate")),
        (1..=1_000_000_000_u64, 0..30_u32)
            .prop_map(|(count, shift)| { Limit::per_second((count >> shift).max(1)) }),
        (1e-3..1e9_f64).prop_map(Limit::per_second),
        (1e-2..1e3_f64).prop_map(Limit::per_day),
    ];
    let bursts = prop_oneof![
        1..10_u64,
        (1..=crate::MAX_BURST, 0..32_u32).prop_map(|(burst, shift)| (burst >> shift).max(1))
    ];
    (limits, bursts).prop_filter_map("out of range", |(limit, burst)| {
        Terms::new(&limit.burst(burst)).ok().map(Arc::new)
    })
}

/// The script beside the model.
struct Pair {
    store: Clocked,
    names: Vec<(Key, Key)>,
    models: Vec<Exact>,
    /// The wait of the last call that was refused.
    wait: u64,
}

impl Pair {
    fn run(&mut self, step: &Step) {
        match *step {
            Step::Take {
                parts,
                limits,
                process,
            } => self.take(parts, limits, process),
            Step::Peek => self.peek(),
            Step::Change(limit) => self.models[limit].turn ^= 1,
            Step::Pause(limit, time) => {
                let model = &mut self.models[limit];
                model.pause = model.pause.max(self.store.now + u64::from(time));
                let (key, terms) = (self.names[limit].1.clone(), Arc::clone(model.terms()));
                let time = micros(time.into());
                let paused = self.store.ask(&Request::Pause { key, time, terms });
                assert!(paused.expect("an answer").is_admitted);
            }
            Step::Later(limit, sixteenths) => {
                let token = self.models[limit].terms().token.whole + 1;
                self.store.now += token * u64::from(sixteenths) / 16;
            }
            Step::Due => self.store.now += self.wait,
            Step::Early => self.store.now += self.wait.saturating_sub(1),
            Step::Back(time) => self.store.now -= u64::from(time),
        }
        self.store.now = self.store.now.min(END);
    }

    fn asks(&self, parts: [u8; 3], limits: usize) -> (Vec<Ask>, Vec<u64>) {
        let costs = self.models.iter().zip(parts).take(limits);
        let costs: Vec<_> = costs
            .map(|(model, part)| (model.terms().burst * u64::from(part) / 256).max(1))
            .collect();
        let asks = self.names.iter().zip(&self.models).zip(&costs);
        let asks = asks.map(|(((bucket, pause), model), cost)| Ask {
            bucket: bucket.clone(),
            pause: pause.clone(),
            price: model.terms().price(*cost).expect("at most the burst"),
            terms: Arc::clone(model.terms()),
        });
        (asks.collect(), costs)
    }

    fn take(&mut self, parts: [u8; 3], limits: usize, process: u64) {
        let now = self.store.now;
        let (asks, costs) = self.asks(parts, limits);
        let request = match process {
            0 => take(&asks),
            _ => wait(&asks, process, Duration::from_secs(86_400)),
        };
        let answer = self.store.ask(&request).expect("an answer");
        // Who waits is told there when to ask again.
        let lines_up = answer.refusing().filter(|_| process > 0);
        let mut is_admitted = true;
        let mut states = Vec::new();
        for ((ask, cost), model) in asks.iter().zip(&costs).zip(&mut self.models) {
            let mut kept = model.read(now);
            if model.is_carried() {
                kept = carried(
                    &mut self.store,
                    ask,
                    model,
                    kept,
                    answer.is_admitted.then_some(*cost),
                );
                model.kept = Some((kept.clone(), model.turn));
            } else if model.kept.as_ref().is_some_and(|(state, _)| *state > kept) {
                // Set back.
                model.kept = Some((kept.clone(), model.turn));
            }
            is_admitted &= model.wait(&model.held(kept.clone()), now, *cost).is_zero();
            states.push(kept);
        }
        assert_eq!(answer.is_admitted, is_admitted, "{asks:?}");
        self.wait = 0;
        for (place, (((state, cost), model), found)) in states
            .into_iter()
            .zip(costs)
            .zip(&mut self.models)
            .zip(&answer.limits)
            .enumerate()
        {
            let mut state = model.held(state);
            let wait = model.wait(&state, now, cost);
            if lines_up == Some(place) {
                assert!(found.wait >= wait, "{:?} of {wait:?}", found.wait);
            } else {
                assert_eq!(found.wait, wait);
            }
            self.wait = self
                .wait
                .max(u64::try_from(wait.as_micros()).expect("in range"));
            if is_admitted {
                state += model.price(cost);
                model.kept = Some((state.clone(), model.turn));
            }
            assert_eq!(found.tokens, model.tokens(&state, now));
            assert_eq!(found.paused, micros(model.pause.saturating_sub(now)));
        }
    }

    /// And what it answers, where no limit changed.
    fn peek(&mut self) {
        let (asks, costs) = self.asks([0; 3], 3);
        let before: Vec<_> = self
            .names
            .iter()
            .map(|(bucket, _)| {
                self.store
                    .connection
                    .get::<_, Option<String>>(&**bucket)
                    .expect("a text")
            })
            .collect();
        let answer = self.store.peek(&asks);
        for ((model, found), cost) in self.models.iter().zip(&answer.limits).zip(costs) {
            if !model.is_carried() {
                let state = model.held(model.read(self.store.now));
                assert_eq!(found.wait, model.wait(&state, self.store.now, cost));
                assert_eq!(found.tokens, model.tokens(&state, self.store.now));
            }
        }
        let after: Vec<_> = self
            .names
            .iter()
            .map(|(bucket, _)| {
                self.store
                    .connection
                    .get::<_, Option<String>>(&**bucket)
                    .expect("a text")
            })
            .collect();
        assert_eq!(before, after);
    }
}

/// The state that a bucket was carried to: as it should be, or later by the rounding of doubles.
fn carried(
    store: &mut Clocked,
    ask: &Ask,
    model: &Exact,
    due: BigRational,
    charged: Option<u64>,
) -> BigRational {
    let kept = store.get(&ask.bucket).expect("kept");
    let (limit, state) = kept.split_at(ask.terms.limit.len());
    assert_eq!(*limit, *ask.terms.limit);
    let numbers: Vec<u64> = state
        .split(':')
        .skip(1)
        .map(|number| number.parse().expect("a number"))
        .collect();
    let [whole_part, part] = *numbers else {
        panic!("{kept}")
    };
    let state = whole(whole_part) + whole(part) / whole(ask.terms.parts);
    let (state, due) = if let Some(cost) = charged {
        (state - model.price(cost), model.held(due))
    } else {
        assert!(state <= model.empty(store.now), "{state} is beyond empty");
        (state, due)
    };
    assert!(state >= due, "{state} is a gift over {due}");
    // By so much of what was and is missing, in tokens, and by a part of a microsecond.
    let missing = model.missing_before(store.now) + whole(model.terms().burst);
    let most = missing / whole(1 << 47) * model.price(1) + whole(1) / whole(ask.terms.parts);
    assert!(&state - &due <= most, "{state} is late for {due}");
    state
}

#[test]
fn decisions_are_those_of_exact_buckets() {
    let store = Clocked::new();
    let mut number = 0;
    let mut pair = Pair {
        store,
        names: Vec::new(),
        models: Vec::new(),
        wait: 0,
    };
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        cases: 400,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    });
    let pair = std::cell::RefCell::new(&mut pair);
    let number = std::cell::RefCell::new(&mut number);
    let limits = prop::array::uniform3([terms(), terms()]);
    let result = runner.run(&(limits, steps()), |(limits, steps)| {
        let mut pair = pair.borrow_mut();
        let mut number = number.borrow_mut();
        **number += 1;
        pair.wait = 0;
        pair.store.now = START;
        let keys = pair.store.keys.clone();
        let names = (0..3).map(|limit| format!("{limit} of {number}"));
        pair.names = names
            .map(|name| (keys.bucket(&name, []), keys.pause(&name, None)))
            .collect();
        let models = limits.into_iter().map(|limits| Exact {
            kept: None,
            pause: 0,
            limits,
            turn: 0,
        });
        pair.models = models.collect();
        for step in &steps {
            pair.run(step);
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_burst_that_takes_longer_than_the_clock_has_run_is_whole() {
    let mut store = Clocked::new();
    // 63 years, and a server whose clock says 2027.
    store.now = 1_800_000_000 * SECOND;
    let limit = Limit::per_second(2).burst(4_000_000_000);
    let all = store.so_many("tool", &limit, 4_000_000_000);
    assert!(store.take(&[all]).is_admitted);
}

/// The same limits twice: what was asked of them one by one, and at once.
fn are_answered_alike(store: &mut Clocked, number: u64, limits: &[Arc<Terms>], steps: &Calls) {
    let keys = store.keys.clone();
    let asks = ["one by one", "at once"].map(|how| -> Vec<Ask> {
        let asks = limits.iter().enumerate().map(|(limit, terms)| {
            let name = format!("{limit} of {number}, {how}");
            Ask {
                bucket: keys.bucket(&name, []),
                pause: keys.pause(&name, None),
                price: terms.price(1).expect("at most the burst"),
                terms: Arc::clone(terms),
            }
        });
        asks.collect()
    });
    store.now = START;
    for &(count, sixteenths, pauses) in steps {
        let token = limits[0].token.whole + 1;
        store.now += token * u64::from(sixteenths) / 16;
        if pauses {
            for asks in &asks {
                store.pause(&asks[0], micros(token * 2));
            }
        }
        let [one_by_one, at_once] = asks.each_ref().map(|asks| take(asks));
        let one_by_one: Vec<_> = (0..count)
            .map(|_| store.ask(&one_by_one).expect("an answer"))
            .collect();
        let mut answers = store.ask_together(&at_once, count).expect("an answer");
        let at_once: Vec<_> = (0..count)
            .map(|_| at_once.next(&mut answers).expect("an answer"))
            .collect();
        assert_eq!(one_by_one, at_once, "{limits:?}");
        for (one, other) in asks[0].iter().zip(&asks[1]) {
            assert_eq!(store.get(&one.bucket), store.get(&other.bucket));
        }
    }
}

/// How many, after how many sixteenths of a token, and whether there is a pause first.
type Calls = Vec<(u64, u8, bool)>;

#[test]
fn equal_calls_at_once_are_answered_as_one_after_the_other() {
    let store = std::cell::RefCell::new((Clocked::new(), 0));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        cases: 200,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    });
    let limits = prop::collection::vec(terms(), 1..4);
    let calls = prop::collection::vec((1..20_u64, any::<u8>(), prop::bool::weighted(0.1)), 1..8);
    let result = runner.run(&(limits, calls), |(limits, calls)| {
        let (store, number) = &mut *store.borrow_mut();
        *number += 1;
        are_answered_alike(store, *number, &limits, &calls);
        Ok(())
    });
    result.unwrap();
}
