//! A look into the store, which reads keys and writes none.
//!
//! Keys are found by `SCAN`. What they hold is read by `GETRANGE`, and no further than what we write goes: whoever
//! can write to the store may have put anything there. Levels are those at the time that the server tells.

use std::collections::{BTreeSet, HashMap};
use std::thread;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, Pipeline, Value, cmd, from_redis_value};
use tokio::runtime;
use tokio::time::timeout;

use super::address::Address;
use super::link::{Connection, reach};
use super::telling::{self, Told, ToldLimit};
use super::{Failure, Key, Keys, MOST_PARTS, Terms, Time, VERSION, in_words};
use crate::rules::value_of;
use crate::store::inspect::{Inspection, SharedBucket, SharedLimit, SharedProcess, Source};
use crate::{Call, ConfigError, Rate};

/// Keys are looked through until there are so many, ours or others', in steps of so many.
const MOST_KEYS: usize = 1_000_000;
const STEP: usize = 1_000;

/// Of ours, so many are listed.
const MOST_BUCKETS: usize = 100_000;
const MOST_PROCESSES: usize = 1_000;
const MOST_LIMITS: usize = 10_000;

/// So many keys are read together: up to 16 MB.
const TOGETHER: usize = 256;

/// Of a bucket or a pause so many bytes are read, which is more than it has.
const STATE: usize = 256;

/// Where to look for buckets.
#[derive(Debug)]
pub(crate) struct Look {
    address: Address,
    limits: Vec<Listed>,
    buckets: Vec<Key>,
}

/// A limit that processes tell of.
#[derive(Debug)]
struct Listed {
    name: String,
    per: Vec<String>,
    terms: Terms,
    rate: Rate,
    /// Its one bucket, where it is not split.
    bucket: Key,
    /// When its pause ends.
    paused: u64,
}

impl Look {
    /// Looks into the store of this URL.
    pub(crate) fn open(url: &str) -> Result<Inspection, ConfigError> {
        let address = Address::parse(url)?;
        let found = visit(&address, async |reader| {
            let keys = reader.keys().await?;
            let told = reader.told(&keys.processes).await?;
            let (limits, processes, all) = listed(told.known, reader.keys_of);
            Ok((
                keys,
                told.unreadable,
                all,
                reader.limits(limits).await?,
                processes,
            ))
        })?;
        let (keys, unreadable, all, (limits, shared, more), processes) = found;
        Ok(Inspection {
            place: address.whole(),
            slots: None,
            used: keys.buckets.len(),
            is_whole: keys.are_all && all,
            unreadable: unreadable + more,
            limits: shared,
            processes,
            source: Source::Redis(Self {
                address,
                limits,
                buckets: keys.buckets,
            }),
        })
    }

    /// Removes all that callgate has in the store of this URL; the numbers of the processes that told of themselves.
    pub(crate) fn remove(url: &str, force: bool) -> Result<Vec<u64>, ConfigError> {
        let address = Address::parse(url)?;
        let (users, is_removed) = visit(&address, async |reader| {
            let keys = reader.keys().await?;
            let told = reader.told(&keys.processes).await?.known;
            let mut users: Vec<_> = told.iter().map(|(told, _)| told.process).collect();
            users.sort_unstable();
            users.dedup();
            let is_removed = users.is_empty() || force;
            if is_removed {
                reader.remove().await?;
            }
            Ok((users, is_removed))
        })?;
        if is_removed {
            return Ok(users);
        }
        let users: Vec<_> = users.iter().map(u64::to_string).collect();
        let place = address.whole();
        let found = format!("'{place}', which is used by process {}", users.join(", "));
        Err(ConfigError::new("store", "one that no process uses", found))
    }

    /// The buckets that are not full, but for those of limits that are not split.
    pub(crate) fn buckets(&self) -> Result<Vec<SharedBucket>, ConfigError> {
        let (now, values) = visit(&self.address, async |reader| {
            reader.values(&self.buckets, STATE).await
        })?;
        let own = self.limits.iter().filter(|limit| limit.per.is_empty());
        let own: BTreeSet<&str> = own.map(|limit| &*limit.bucket).collect();
        let mut by_hash: HashMap<&str, Vec<&Listed>> = HashMap::new();
        for limit in &self.limits {
            let (whose, _) = hashes(&limit.bucket);
            by_hash.entry(whose).or_default().push(limit);
        }
        let buckets = self.buckets.iter().zip(&values);
        let split = buckets.filter(|(key, _)| !own.contains(&***key));
        let spent = split.filter_map(|(key, value)| {
            let empty = Time {
                whole: now,
                part: 0,
            };
            let kept = Kept::read(value.as_deref()?).filter(|kept| kept.full > empty)?;
            let (whose, key) = hashes(key);
            let limits = by_hash.get(whose).map_or(&[][..], Vec::as_slice);
            // Processes may have other numbers for it.
            let same = limits.iter().find(|limit| limit.terms == kept.terms);
            let limit = same.or(limits.first());
            let paused = limit.map_or(0, |limit| limit.paused);
            Some(SharedBucket {
                // No limit is called so.
                limit: limit.map_or_else(|| format!("[{whose}]"), |limit| limit.name.clone()),
                key: key.to_owned(),
                remaining: level(&kept.terms, Some(&kept), paused, now),
                burst: kept.terms.burst,
                paused: left(paused, now),
            })
        });
        Ok(spent.collect())
    }

    /// The bucket that a call draws from under a limit of this name.
    pub(crate) fn bucket(
        &self,
        limit: &str,
        call: &Call<'_>,
    ) -> Result<Option<SharedBucket>, ConfigError> {
        let Some(listed) = self.limits.iter().find(|listed| listed.name == limit) else {
            return Ok(None);
        };
        let fields = listed.per.iter();
        let fields = fields.map(|field| (&**field, value_of(field, call)));
        let keys = &self.address.keys;
        let places = [
            keys.bucket(limit, fields),
            keys.pause(limit, None),
            // Of the default limit, a tool may pause alone.
            keys.pause(limit, Some(call.tool())),
        ];
        let (now, values) = visit(&self.address, async |reader| {
            reader.values(&places, STATE).await
        })?;
        let mut values = values.iter().map(Option::as_deref);
        let kept = values.next().flatten().and_then(Kept::read);
        let paused = values.flatten().filter_map(pause).max().unwrap_or(0);
        Ok(Some(SharedBucket {
            limit: limit.to_owned(),
            key: hashes(&places[0]).1.to_owned(),
            remaining: level(&listed.terms, kept.as_ref(), paused, now),
            burst: listed.terms.burst,
            paused: left(paused, now),
        }))
    }
}

/// The limits that processes tell of, each once, and what each process says of each; whether that is all.
fn listed(
    told: Vec<(Told, Option<Duration>)>,
    keys: &Keys,
) -> (Vec<Listed>, Vec<SharedProcess>, bool) {
    let mut limits: Vec<Listed> = Vec::new();
    let mut places = HashMap::new();
    let mut processes = Vec::new();
    for (told, age) in told {
        for ToldLimit {
            name,
            per,
            terms,
            rate,
            admitted,
            rejected,
            waiting,
        } in told.limits
        {
            let known = (name.clone(), per.clone(), terms.limit.clone());
            let next = limits.len();
            let place = *places.entry(known).or_insert(next);
            if place == MOST_LIMITS {
                return (limits, processes, false);
            }
            if place == next {
                limits.push(Listed {
                    bucket: keys.bucket(&name, []),
                    name,
                    per,
                    terms,
                    rate,
                    paused: 0,
                });
            }
            processes.push(SharedProcess {
                process: told.process,
                host: Some(told.host.clone()),
                is_here: false,
                started: told.life,
                told: age,
                limit: place,
                admitted,
                rejected,
                waiting,
            });
        }
    }
    (limits, processes, true)
}

/// The hash of the limit in a bucket's key, and the one of the bucket.
fn hashes(key: &str) -> (&str, &str) {
    let mut hashes = key.rsplit(':');
    let bucket = hashes.next().unwrap_or_default();
    (hashes.next().unwrap_or_default(), bucket)
}

/// What a bucket holds, of whatever limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kept {
    terms: Terms,
    /// When it is full.
    full: Time,
}

impl Kept {
    #[cfg(test)]
    pub(super) fn is_of(&self, terms: &Terms) -> bool {
        self.terms == *terms
    }

    /// Of any bytes.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let text = str::from_utf8(bytes).ok()?;
        let (text, part) = text.rsplit_once(':')?;
        let (limit, whole) = text.rsplit_once(':')?;
        let (whole, part) = (digits(whole)?, digits(part)?);
        let terms = Terms::read(limit)?;
        let in_range = u128::from(whole) <= 2 * MOST_PARTS && part < terms.parts;
        in_range.then_some(Self {
            terms,
            full: Time { whole, part },
        })
    }
}

/// When a pause ends; of any bytes.
pub(super) fn pause(bytes: &[u8]) -> Option<u64> {
    let (version, end) = str::from_utf8(bytes).ok()?.split_once(':')?;
    let is_ours = digits(version)? == u64::from(VERSION);
    digits(end).filter(|end| is_ours && u128::from(*end) <= MOST_PARTS)
}

fn digits(text: &str) -> Option<u64> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

/// The whole tokens in a bucket as a limit of these terms has it, by the script's arithmetic: a level that is carried
/// from other terms is the same in tokens, but for what does not fit.
pub(super) fn level(terms: &Terms, kept: Option<&Kept>, paused: u64, now: u64) -> u64 {
    let held = kept.map_or(terms.burst, |kept| kept.terms.tokens(kept.full.since(now)));
    // It is empty when the pause ends.
    let resumed = Time {
        whole: paused.saturating_add(terms.refill.whole),
        part: terms.refill.part,
    };
    let resumed = if paused == 0 {
        terms.burst
    } else {
        terms.tokens(resumed.since(now))
    };
    held.min(terms.burst).min(resumed)
}

impl Time {
    fn since(self, now: u64) -> Self {
        match self.whole.checked_sub(now) {
            Some(whole) => Self { whole, ..self },
            None => Self { whole: 0, part: 0 },
        }
    }
}

fn left(until: u64, now: u64) -> Option<Duration> {
    let left = until.checked_sub(now).filter(|&left| left > 0);
    left.map(Duration::from_micros)
}

/// Goes to a store on a thread of its own, since the caller's may be one of a runtime.
fn visit<T: Send>(
    address: &Address,
    task: impl AsyncFnOnce(&mut Reader<'_>) -> Result<T, String> + Send,
) -> Result<T, ConfigError> {
    let visit = || {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| error.to_string())?;
        let visited = runtime.block_on(async {
            let mut reader = Reader::open(address).await?;
            task(&mut reader).await
        });
        // Does not wait for a name that is being looked up.
        runtime.shutdown_background();
        visited
    };
    let visited = thread::scope(|scope| {
        let visitor = thread::Builder::new().spawn_scoped(scope, visit);
        let visitor = visitor.map_err(|error| error.to_string())?;
        visitor.join().unwrap_or_else(|_| Err("a fault".to_owned()))
    });
    visited.map_err(|why| {
        let found = format!("'{}': {why}", address.whole());
        ConfigError::new("store", "one that can be looked into", found)
    })
}

/// A connection that only reads, but for [`Reader::remove`].
struct Reader<'a> {
    connection: Connection,
    keys_of: &'a Keys,
    time: Duration,
}

/// The keys that are callgate's.
#[derive(Default)]
struct Ours {
    buckets: Vec<Key>,
    processes: Vec<Key>,
    are_all: bool,
}

/// What processes told, and how long ago; and how many keys of theirs hold something else.
struct AllTold {
    known: Vec<(Told, Option<Duration>)>,
    unreadable: usize,
}

impl<'a> Reader<'a> {
    async fn open(address: &'a Address) -> Result<Self, String> {
        // About a key, so that a node of a cluster says where that is.
        let first = peek(&address.keys.proof(), 1);
        let read = |reply: &Value| match reply {
            Value::ServerError(error) => Err(Failure::Refused(error.clone().into())),
            _ => Ok(()),
        };
        Ok(Self {
            connection: reach(address, &first, read).await?,
            keys_of: &address.keys,
            time: address.timeout,
        })
    }

    /// The answers to some commands, each of which may be an error.
    async fn ask(&mut self, commands: &[Cmd]) -> Result<Vec<Value>, String> {
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command.clone());
        }
        let commands = commands.len();
        let connection = &mut self.connection.commands;
        let answers = connection.send_packed_commands(&pipeline, 0, commands);
        let late = |_| format!("no answer in {:?}", self.time);
        let answers = timeout(self.time, answers).await.map_err(late)?;
        let answers = answers.map_err(in_words)?;
        if answers.len() == commands {
            Ok(answers)
        } else {
            Err(Failure::Nonsense.to_string())
        }
    }

    async fn ask_one<T: FromRedisValue>(&mut self, command: Cmd) -> Result<T, String> {
        match self.ask(&[command]).await?.pop() {
            Some(Value::ServerError(error)) => Err(in_words(error.into())),
            Some(answer) => from_redis_value(answer).map_err(|_| Failure::Nonsense.to_string()),
            None => Err(Failure::Nonsense.to_string()),
        }
    }

    /// One step through all keys: those of ours, and where the next one starts.
    async fn step(&mut self, cursor: &str) -> Result<(String, Vec<Key>), String> {
        let prefix = self.keys_of.all();
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(format!("{prefix}*"));
        scan.arg("COUNT").arg(STEP);
        let (next, keys): (String, Vec<Vec<u8>>) = self.ask_one(scan).await?;
        let keys = keys
            .into_iter()
            .filter_map(|key| String::from_utf8(key).ok());
        let keys = keys.filter(|key| self.keys_of.kind(key).is_some());
        Ok((next, keys.map(Key::from).collect()))
    }

    async fn keys(&mut self) -> Result<Ours, String> {
        let mut found = BTreeSet::new();
        let mut cursor = "0".to_owned();
        for _ in 0..MOST_KEYS / STEP {
            let (next, keys) = self.step(&cursor).await?;
            found.extend(keys);
            cursor = next;
            if cursor == "0" || found.len() > MOST_BUCKETS + MOST_PROCESSES {
                break;
            }
        }
        let mut ours = Ours {
            are_all: cursor == "0",
            ..Ours::default()
        };
        for key in found {
            let (list, most) = match self.keys_of.kind(&key) {
                Some("bucket") => (&mut ours.buckets, MOST_BUCKETS),
                Some("process") => (&mut ours.processes, MOST_PROCESSES),
                _ => continue,
            };
            if list.len() < most {
                list.push(key);
            } else {
                ours.are_all = false;
            }
        }
        Ok(ours)
    }

    /// What some keys hold, no more than so many bytes each, and the server's time; nothing where there is no such
    /// key, or it holds no text.
    async fn values(
        &mut self,
        keys: &[Key],
        most: usize,
    ) -> Result<(u64, Vec<Option<Vec<u8>>>), String> {
        let (seconds, micros): (u64, u64) = self.ask_one(cmd("TIME")).await?;
        let now = seconds.saturating_mul(1_000_000).saturating_add(micros);
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(TOGETHER) {
            let commands: Vec<_> = keys.iter().map(|key| peek(key, most)).collect();
            values.extend(
                self.ask(&commands)
                    .await?
                    .into_iter()
                    .map(|answer| match answer {
                        Value::BulkString(bytes) if !bytes.is_empty() => Some(bytes),
                        _ => None,
                    }),
            );
        }
        Ok((now, values))
    }

    async fn told(&mut self, keys: &[Key]) -> Result<AllTold, String> {
        let (_, values) = self.values(keys, telling::MOST_BYTES + 1).await?;
        let mut ages = Vec::with_capacity(keys.len());
        for keys in keys.chunks(TOGETHER) {
            let left = |key: &Key| cmd("PTTL").arg(&**key).clone();
            let commands: Vec<_> = keys.iter().map(left).collect();
            ages.extend(self.ask(&commands).await?);
        }
        let mut told = AllTold {
            known: Vec::new(),
            unreadable: 0,
        };
        for (value, left) in values.into_iter().zip(ages) {
            let read = value.map(|bytes| Told::read(&bytes));
            let age = match left {
                Value::Int(left) => u64::try_from(left).ok(),
                _ => None,
            };
            let age = age.and_then(|left| telling::KEPT.checked_sub(Duration::from_millis(left)));
            match read {
                Some(Some(process)) => told.known.push((process, age)),
                Some(None) => told.unreadable += 1,
                // It has ended in the meantime.
                None => {}
            }
        }
        Ok(told)
    }

    /// How full the limits' own buckets are and how long they pause, and how many of them say something else.
    async fn limits(
        &mut self,
        mut limits: Vec<Listed>,
    ) -> Result<(Vec<Listed>, Vec<SharedLimit>, usize), String> {
        let pauses = limits.iter();
        let pauses: Vec<_> = pauses
            .map(|limit| self.keys_of.pause(&limit.name, None))
            .collect();
        let (_, pauses) = self.values(&pauses, STATE).await?;
        let buckets: Vec<_> = limits.iter().map(|limit| limit.bucket.clone()).collect();
        let (now, buckets) = self.values(&buckets, STATE).await?;
        let mut unreadable = 0;
        let mut shared = Vec::with_capacity(limits.len());
        for ((limit, until), bucket) in limits.iter_mut().zip(pauses).zip(buckets) {
            let until = until.map(|bytes| pause(&bytes));
            let kept = bucket.map(|bytes| Kept::read(&bytes));
            unreadable += usize::from(until == Some(None)) + usize::from(kept == Some(None));
            limit.paused = until.flatten().unwrap_or(0);
            shared.push(SharedLimit {
                name: limit.name.clone(),
                per: limit.per.clone(),
                rate: limit.rate,
                burst: limit.terms.burst,
                remaining: level(&limit.terms, kept.flatten().as_ref(), limit.paused, now),
                paused: left(limit.paused, now),
            });
        }
        Ok((limits, shared, unreadable))
    }

    /// Deletes all keys that are callgate's.
    async fn remove(&mut self) -> Result<(), String> {
        let mut cursor = "0".to_owned();
        loop {
            let (next, keys) = self.step(&cursor).await?;
            if !keys.is_empty() {
                let keys: Vec<&str> = keys.iter().map(|key| &**key).collect();
                let delete = cmd("DEL").arg(keys).clone();
                let _: u64 = self.ask_one(delete).await?;
            }
            if next == "0" {
                return Ok(());
            }
            cursor = next;
        }
    }
}

/// Reads so many bytes of a key.
fn peek(key: &Key, most: usize) -> Cmd {
    let mut command = cmd("GETRANGE");
    command.arg(&**key).arg(0).arg(most - 1);
    command
}
