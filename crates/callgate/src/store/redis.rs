//! Buckets in Redis or Valkey: what is asked of the script that decides there, and what it answers.
//!
//! A limit's rate comes to `p` tokens in a whole number of microseconds, and a time to two numbers, `a` and
//! `b`: exactly `a + b / p` microseconds. So nothing is rounded when a call is charged, and all numbers
//! fit the doubles that scripts count in. `redis/script.lua` is the contract.
//!
//! - [`Terms`] are a limit in these numbers, and [`Keys`] tell where its buckets are;
//! - a [`Request`] asks one thing of the script, in one step and for all limits of a call;
//! - a [`link::Link`] takes it there and brings the [`Answer`], or a [`Failure`] in good time, and a [`lane`] is
//!   its short way for a thread that waits;
//! - a [`Store`] is all of that as a limiter has it, with what this process knows of its [`Buckets`];
//! - [`telling`] is what a process says of itself, and a [`Look`] finds that and the buckets, for people.

mod address;
mod lane;
mod limits;
mod link;
mod look;
mod telling;
#[cfg(test)]
mod tests;

use std::fmt::{self, Write as _};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::{Cmd, RedisError, Script, Value};
use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use crate::rate::gcd;
use crate::{ConfigError, Limit, Rate};
pub use limits::StoreMeter;
#[cfg(feature = "config")]
pub(crate) use limits::check;
pub(crate) use limits::{Answered, Asking, Buckets, Peeking, Question, Store};
pub(crate) use look::Look;

/// Decides a call; its head is the contract.
static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(CODE));
const CODE: &str = include_str!("redis/script.lua");

/// The layout of what is kept under the keys.
const VERSION: u32 = 1;

/// The largest `p`: two numbers below it add up exactly in a double.
const MOST_PARTS: u128 = 1 << 52;

/// No burst takes longer to refill, in microseconds: 71 years, a little less than 2^51.
const LONGEST: u128 = 71 * 365 * 86_400 * 1_000_000;

/// A time in microseconds: `whole + part / p`, with the `p` of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Time {
    whole: u64,
    part: u64,
}

/// A limit in the script's numbers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// What its buckets say that they were written under.
    limit: Box<str>,
    /// `p`.
    parts: u64,
    /// The tokens that a full bucket holds, and the time in which they come.
    burst: u64,
    refill: Time,
    /// The time in which a token comes.
    token: Time,
}

impl Terms {
    /// Refuses a limit whose burst takes more than 71 years to refill.
    ///
    /// A rate of more than 15 digits may come to a larger `p` than there can be. A token then takes longer, by
    /// less than 2^-52 µs: even at 10^9 a second, a bucket has to be short of full for a hundred days to be 2 µs late.
    pub(crate) fn new(limit: &Limit) -> Result<Self, ConfigError> {
        limit.check()?;
        let (tokens, nanos) = limit.rate()?.fraction();
        let common = gcd(1_000, nanos);
        let (mut parts, micros) = (u128::from(tokens) * (1_000 / common), nanos / common);
        let (mut whole, mut part) = (micros / parts, micros % parts);
        if parts > MOST_PARTS {
            part = (part * MOST_PARTS).div_ceil(parts);
            parts = MOST_PARTS;
            (whole, part) = (whole + part / parts, part % parts);
        }
        let burst = limit.capacity();
        let in_range = |time: &Time| u128::from(time.whole) < LONGEST;
        let terms = Time::new(whole, part).and_then(|token| {
            let terms = Self::of(u64::try_from(parts).ok()?, token, burst)?;
            Some(terms).filter(|terms| in_range(&terms.refill))
        });
        terms.ok_or_else(|| {
            let allowed = "at most what comes in 71 years (with a Redis store)";
            ConfigError::new("burst", allowed, burst.to_string())
        })
    }

    fn of(parts: u64, token: Time, burst: u64) -> Option<Self> {
        let Time { whole, part } = token;
        Some(Self {
            limit: format!("{VERSION}:{parts}:{whole}:{part}:{burst}").into(),
            parts,
            burst,
            refill: token.times(burst, parts)?,
            token,
        })
    }

    /// Of a text that may be any: what a bucket says that it was written under.
    fn read(limit: &str) -> Option<Self> {
        let mut numbers = limit.split(':').map(|number| number.parse::<u64>().ok());
        let mut next = || numbers.next()?;
        let [version, parts, whole, part, burst] = [next()?, next()?, next()?, next()?, next()?];
        let is_small = |number: &u64| u128::from(*number) <= MOST_PARTS;
        let in_range = version == u64::from(VERSION)
            && [parts, whole, burst].iter().all(is_small)
            && part < parts
            && whole + part > 0;
        let terms = in_range.then(|| Self::of(parts, Time { whole, part }, burst))??;
        // Numbers may be written in other ways.
        (*terms.limit == *limit).then_some(terms)
    }

    /// How fast tokens come.
    fn rate(&self) -> Option<Rate> {
        let parts = u128::from(self.parts);
        let micros = u128::from(self.token.whole) * parts + u128::from(self.token.part);
        let nanos = micros * 1_000;
        let common = gcd(parts, nanos);
        Rate::of((u64::try_from(parts / common).ok()?, nanos / common))
    }

    /// The time in which so many tokens come; none for more than the burst.
    pub(crate) fn price(&self, cost: u64) -> Option<Time> {
        let cost = (cost <= self.burst).then_some(cost)?;
        self.token.times(cost, self.parts)
    }

    /// The whole tokens in a bucket that is full after this time.
    fn tokens(&self, missing: Time) -> u64 {
        let parts =
            |time: Time| u128::from(time.whole) * u128::from(self.parts) + u128::from(time.part);
        let missing = parts(missing).div_ceil(parts(self.token));
        let left = u128::from(self.burst).saturating_sub(missing);
        u64::try_from(left).unwrap_or(0)
    }
}

impl Time {
    fn new(whole: u128, part: u128) -> Option<Self> {
        let (whole, part) = (u64::try_from(whole).ok()?, u64::try_from(part).ok()?);
        Some(Self { whole, part })
    }

    fn times(self, count: u64, parts: u64) -> Option<Self> {
        let part = u128::from(self.part) * u128::from(count);
        let parts = u128::from(parts);
        let whole = u128::from(self.whole) * u128::from(count) + part / parts;
        Self::new(whole, part % parts)
    }

    fn minus(self, other: Self, parts: u64) -> Option<Self> {
        let borrows = self.part < other.part;
        let part = if borrows {
            self.part + parts
        } else {
            self.part
        } - other.part;
        let whole = self.whole.checked_sub(other.whole)?;
        let whole = whole.checked_sub(u64::from(borrows))?;
        Some(Self { whole, part })
    }
}

/// Where the buckets of an application are.
///
/// All its keys are in one slot of a cluster, that of the prefix: a call is decided at once on one node. The
/// rest of a key is half of a SHA-256 hash of what it stands for, each part with its length in front, so
/// all of a kind are as long, and whoever chooses a value cannot choose one that falls into another's bucket. Before
/// that, a bucket's key has a quarter of its limit's hash, by which those who look tell whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    prefix: Box<str>,
}

/// The name of a bucket or a pause in the store.
pub(crate) type Key = Arc<str>;

impl Keys {
    /// The most bytes of a prefix.
    const LONGEST: usize = 64;

    /// Refuses a prefix that is empty, long, or of more than letters, digits and `.`, `_`, `:`, `/` and `-`.
    pub(crate) fn new(prefix: &str) -> Result<Self, ConfigError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/-".contains(&byte);
        if (1..=Self::LONGEST).contains(&prefix.len()) && prefix.bytes().all(is_allowed) {
            return Ok(Self {
                prefix: prefix.into(),
            });
        }
        let allowed =
            "the application's name, of 1 to 64 letters, digits and '.', '_', ':', '/' or '-'";
        let given = format!("'{}'", prefix.escape_debug());
        Err(ConfigError::new("prefix", allowed, given))
    }

    /// A limit's bucket, by the fields that split it and a call's values; a call may lack some.
    pub(crate) fn bucket<'a>(
        &self,
        limit: &'a str,
        fields: impl IntoIterator<Item = (&'a str, Option<&'a str>)>,
    ) -> Key {
        let mut hash = Sha256::new();
        add(&mut hash, Some(limit));
        let whose = hex(&hash.clone().finalize()[..8]);
        for (field, value) in fields {
            add(&mut hash, Some(field));
            add(&mut hash, value);
        }
        self.key(&format!("bucket:{whose}"), &hash.finalize()[..16])
    }

    /// The pause of a limit, or of one tool's bucket under the default.
    pub(crate) fn pause(&self, limit: &str, tool: Option<&str>) -> Key {
        let mut hash = Sha256::new();
        add(&mut hash, Some(limit));
        add(&mut hash, tool);
        self.key("pause", &hash.finalize()[..16])
    }

    /// The processes that wait for a bucket.
    fn line(bucket: &str) -> String {
        // There are no braces in a prefix.
        bucket.replacen("}:bucket:", "}:line:", 1)
    }

    /// What a process tells of itself, by a number that no other has.
    fn process(&self, number: [u64; 2]) -> Key {
        let [one, other] = number.map(u64::to_le_bytes);
        self.key("process", &[one, other].concat())
    }

    /// What is written to prove that a store takes writes.
    fn proof(&self) -> Key {
        format!("{}proof", self.all()).into()
    }

    fn key(&self, kind: &str, hash: &[u8]) -> Key {
        format!("{}{kind}:{}", self.all(), hex(hash)).into()
    }

    /// What all keys begin with.
    fn all(&self) -> String {
        format!("{{{}}}:", self.prefix)
    }

    /// What a key is for, if it is one of these.
    fn kind<'k>(&self, key: &'k str) -> Option<&'k str> {
        let rest = key.strip_prefix(&self.all())?;
        let (kind, hashes) = rest.split_once(':').unwrap_or((rest, ""));
        let length = match kind {
            "bucket" | "line" => 16 + 1 + 32,
            "pause" | "process" => 32,
            "proof" => 0,
            _ => return None,
        };
        let is_ours = |byte: u8| byte == b':' || byte.is_ascii_hexdigit();
        (hashes.len() == length && hashes.bytes().all(is_ours)).then_some(kind)
    }
}

fn add(hash: &mut Sha256, part: Option<&str>) {
    let length = part.map_or(u64::MAX, |part| part.len() as u64);
    hash.update(length.to_le_bytes());
    hash.update(part.unwrap_or_default());
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What a call asks of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) terms: Arc<Terms>,
    pub(crate) bucket: Key,
    pub(crate) pause: Key,
    /// By the terms.
    pub(crate) price: Time,
}

/// What the script is to do.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Charges all limits or none.
    Take(SmallVec<[Ask; 2]>),
    /// The same for a call that waits, the first one in its process: where it is refused, it is told when to come
    /// again, by the line of processes.
    Wait {
        asks: SmallVec<[Ask; 2]>,
        /// A number that no other has.
        process: u64,
        /// For each limit, how much longer it may wait.
        left: SmallVec<[Duration; 2]>,
    },
    /// Says what that would come to, and changes nothing.
    Peek(SmallVec<[Ask; 2]>),
    /// Lets nobody draw for so long. A pause that ends later stays as it is.
    Pause {
        key: Key,
        time: Duration,
        terms: Arc<Terms>,
    },
    /// Reads and writes, as a call does.
    Prove(Key),
}

/// What equal requests came to, one after the other.
struct Answers {
    /// So many that are not handed out yet were admitted.
    admitted: u64,
    /// For each limit, after all of them.
    found: SmallVec<[[u64; 4]; 2]>,
    /// How many other processes are in line, if one was in it.
    others: Option<u64>,
}

/// What a request came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) is_admitted: bool,
    /// For each limit that was asked for.
    pub(crate) limits: SmallVec<[Found; 2]>,
    /// Of a call that waits: how many other processes do.
    pub(crate) others: Option<u64>,
}

/// How a limit's bucket was found, and is left if the call was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The shortest time, in whole microseconds, after which it admits: zero if it does now. Of a call that waits, the
    /// time after which it is to ask again.
    pub(crate) wait: Duration,
    /// The whole tokens in it.
    pub(crate) tokens: u64,
    /// The time in which it is full.
    pub(crate) refill: Duration,
    /// How long its pause goes on.
    pub(crate) paused: Duration,
}

impl Answer {
    /// The place of the limit that refuses for the longest.
    pub(crate) fn refusing(&self) -> Option<usize> {
        let waits = self.limits.iter().map(|found| found.wait);
        let longest = waits.clone().max().filter(|wait| !wait.is_zero())?;
        waits.into_iter().position(|wait| wait == longest)
    }
}

impl Request {
    /// The limits that a call is to be admitted by.
    fn asks(&self) -> &[Ask] {
        match self {
            Self::Take(asks) | Self::Wait { asks, .. } | Self::Peek(asks) => asks,
            Self::Pause { .. } | Self::Prove(_) => &[],
        }
    }

    /// The first bucket that a call is charged to, and how much. Equal ones have the same.
    fn first(&self) -> Option<(&str, Time)> {
        match self {
            Self::Take(asks) => asks.first().map(|ask| (&*ask.bucket, ask.price)),
            _ => None,
        }
    }

    /// Whether the script can answer both at once.
    fn equals(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Take(asks), Self::Take(others)) if asks == others)
    }

    /// The command for so many equal ones, by the script's hash or with its text.
    fn command(&self, count: u64, by_hash: bool) -> Cmd {
        let mut command = Cmd::new();
        if by_hash {
            command.arg("EVALSHA").arg(SCRIPT.get_hash());
        } else {
            command.arg("EVAL").arg(CODE);
        }
        self.write(count, &mut command);
        command
    }

    fn write(&self, count: u64, command: &mut Cmd) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let mode = match self {
            Self::Take(_) => "take",
            Self::Wait { .. } => "wait",
            Self::Peek(_) => "peek",
            Self::Pause { key, time, terms } => {
                command.arg(1).arg(&**key).arg("pause");
                command.arg(micros(*time)).arg(terms.refill.whole + 1);
                return;
            }
            Self::Prove(key) => {
                command.arg(1).arg(&**key).arg("prove");
                return;
            }
        };
        let waits = matches!(self, Self::Wait { .. });
        command.arg((2 + usize::from(waits)) * self.asks().len());
        for ask in self.asks() {
            command.arg(&*ask.bucket).arg(&*ask.pause);
        }
        for ask in self.asks().iter().filter(|_| waits) {
            command.arg(Keys::line(&ask.bucket));
        }
        command.arg(mode).arg(count);
        for Ask { terms, price, .. } in self.asks() {
            command.arg(&*terms.limit).arg(terms.parts);
            for Time { whole, part } in [&terms.refill, price] {
                command.arg(whole).arg(part);
            }
        }
        if let Self::Wait { process, left, .. } = self {
            command.arg(format!("{process:016x}"));
            for &left in left {
                command.arg(micros(left));
            }
        }
    }

    /// Reads the reply to so many; whatever is not just as the contract says is a failure.
    fn read(&self, count: u64, reply: &Value) -> Result<Answers, Failure> {
        let answers = match (self, reply) {
            (_, Value::ServerError(error)) => return Err(Failure::Refused(error.clone().into())),
            (Self::Take(_) | Self::Wait { .. } | Self::Peek(_), Value::Array(values)) => {
                self.answers(count, values)
            }
            (Self::Pause { .. } | Self::Prove(_), Value::Okay) => Some(Answers {
                admitted: count,
                found: SmallVec::new(),
                others: None,
            }),
            _ => None,
        };
        answers.ok_or(Failure::Nonsense)
    }

    fn answers(&self, count: u64, values: &[Value]) -> Option<Answers> {
        let whole = |value: &Value| match value {
            Value::Int(number) => u64::try_from(*number)
                .ok()
                .filter(|number| *number < 1 << 53),
            _ => None,
        };
        let numbers: SmallVec<[u64; 9]> = values.iter().map(whole).collect::<Option<_>>()?;
        let (&admitted, found) = numbers.split_first()?;
        let (found, others) = match (self, found.as_chunks::<4>()) {
            (Self::Wait { .. }, (found, &[others])) => (found, Some(others)),
            (Self::Take(_) | Self::Peek(_), (found, [])) => (found, None),
            _ => return None,
        };
        let all_admit = found.iter().all(|[wait, ..]| *wait == 0);
        let mut limits = self.asks().iter().zip(found);
        let makes_sense = found.len() == self.asks().len()
            && admitted <= count
            && all_admit == (admitted == count)
            && limits.all(|(ask, found)| ask.read(*found, admitted.saturating_sub(1)).is_some());
        makes_sense.then(|| Answers {
            admitted,
            found: found.into(),
            others,
        })
    }

    /// What the next of them came to.
    fn next(&self, answers: &mut Answers) -> Result<Answer, Failure> {
        let is_admitted = answers.admitted > 0;
        // So many were admitted after it.
        answers.admitted = answers.admitted.saturating_sub(1);
        let limits = self.asks().iter().zip(&answers.found);
        let limits = limits.map(|(ask, &[wait, whole, part, paused])| {
            let wait = if is_admitted { 0 } else { wait };
            ask.read([wait, whole, part, paused], answers.admitted)
        });
        let limits = limits.collect::<Option<_>>().ok_or(Failure::Nonsense)?;
        Ok(Answer {
            is_admitted,
            limits,
            others: answers.others,
        })
    }
}

impl Ask {
    /// How the limit's bucket was before so many later calls.
    fn read(&self, [wait, whole, part, paused]: [u64; 4], later: u64) -> Option<Found> {
        let Terms { parts, refill, .. } = &*self.terms;
        // Not emptier than when the pause ends.
        let in_range = part < *parts && whole <= refill.whole + paused;
        let missing = Time { whole, part }.minus(self.price.times(later, *parts)?, *parts)?;
        let nanos = (u128::from(missing.part) * 1_000).div_ceil(u128::from(*parts));
        let nanos = u64::try_from(nanos).ok()?;
        in_range.then(|| Found {
            wait: Duration::from_micros(wait),
            tokens: self.terms.tokens(missing),
            refill: Duration::from_micros(missing.whole) + Duration::from_nanos(nanos),
            paused: Duration::from_micros(paused),
        })
    }
}

/// Why there is no answer. But for [`Down`](Self::Down), what was asked may have been done.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The store was found to fail, and is tried again after this time. Nothing was sent.
    Down { reason: Arc<str>, retry: Duration },
    /// There was no answer by the deadline.
    Late,
    /// The connection ended or was given up, or the link was.
    Lost,
    /// The store answered with an error.
    Refused(RedisError),
    /// The answer makes no sense.
    Nonsense,
}

impl Failure {
    /// After what time the store is tried again, where that is known.
    pub(crate) fn retry(&self) -> Option<Duration> {
        match self {
            Self::Down { retry, .. } => Some(*retry).filter(|retry| !retry.is_zero()),
            _ => None,
        }
    }

    /// Whether it is about what a key holds: the store answers for others.
    fn is_about_a_key(&self) -> bool {
        matches!(self, Self::Refused(error) if error.code() == Some("CALLGATE"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down { reason, .. } => write!(f, "the store is down: {reason}"),
            Self::Late => f.write_str("the store did not answer in time"),
            Self::Lost => f.write_str("the connection to the store was lost"),
            Self::Refused(error) => f.write_str(&in_words(error.clone())),
            Self::Nonsense => f.write_str("the store's answer makes no sense"),
        }
    }
}

/// An error, in the server's own words if it is one of its, on one line.
#[expect(clippy::needless_pass_by_value, reason = "what errors are mapped by")]
fn in_words(error: RedisError) -> String {
    let words = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    words.trim().replace(char::is_control, " ")
}
