//! The script against an exact model, with the time that the server tells chosen by the test.

use std::sync::Arc;
use std::time::Duration;

use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;
use redis::{Cmd, Commands, Connection, Value};
use smallvec::smallvec;

use super::super::*;
use super::server::Server;
use crate::{Call, Decision, Limiter};

/// The year 2065, in microseconds: a bucket that is kept until then does not expire while a test runs.
const START: u64 = 3_000_000_000_000_000;

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
        let mut command = Cmd::new();
        command.arg("EVAL").arg(&self.code);
        request.write(&mut command);
        command.arg(self.now / SECOND).arg(self.now % SECOND);
        let reply = command.query(&mut self.connection);
        request.read(reply.map_err(Failure::Refused)?)
    }

    fn take(&mut self, asks: &[Ask]) -> Answer {
        self.ask(&Request::Take(asks.into())).expect("an answer")
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
        let terms = Terms::new(limit).expect("a limit in range");
        Ask {
            bucket: self.keys.bucket(name, []),
            pause: self.keys.pause(name, None),
            price: terms.price(cost).expect("at most the burst"),
            terms: Arc::new(terms),
        }
    }

    fn get(&mut self, key: &str) -> Option<String> {
        self.connection.get(key).expect("a text or nothing")
    }
}

fn micros(number: u64) -> Duration {
    Duration::from_micros(number)
}

fn wait(answer: &Answer) -> u64 {
    u64::try_from(answer.limits[0].wait.as_micros()).expect("a wait in range")
}

#[test]
fn a_bucket_starts_full_and_refills_to_the_microsecond() {
    let mut store = Clocked::new();
    let ask = store.one("tool", &Limit::per_second(3).burst(2));
    for left in [1, 0] {
        let answer = store.take(std::slice::from_ref(&ask));
        assert!(answer.is_admitted);
        assert_eq!(answer.limits[0].tokens, left);
    }
    // A third of a second, rounded up.
    for (later, wait_for) in [(0, 333_334), (333_333, 1)] {
        store.now = START + later;
        let answer = store.take(std::slice::from_ref(&ask));
        assert_eq!((answer.is_admitted, wait(&answer)), (false, wait_for));
        assert_eq!(answer.refusing(), Some(0));
    }
    store.now = START + 333_334;
    assert!(store.take(std::slice::from_ref(&ask)).is_admitted);
    // No part of a microsecond was lost: the third token comes after exactly one second.
    store.now = START + 999_999;
    assert!(store.take(std::slice::from_ref(&ask)).is_admitted);
    assert_eq!(wait(&store.take(std::slice::from_ref(&ask))), 1);
    store.now = START + SECOND;
    assert!(store.take(&[ask]).is_admitted);
}
