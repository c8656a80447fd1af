//! What a process tells of itself, for those who look into the store: its limits, and what they decided.
//!
//! The link's thread tells it while there is a connection: every two seconds in which something changed, as one
//! value that the store keeps for ten minutes. So no call pays for it, a process that is not used tells nothing,
//! and whether it comes there does not matter.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;
use std::{env, fs, process};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use redis::Cmd;

use super::{Key, Keys, Terms};
use crate::Rate;
use crate::rules::random;

/// How often it is told.
pub(super) const EVERY: Duration = Duration::from_secs(2);

/// How long the store keeps it.
pub(super) const KEPT: Duration = Duration::from_secs(600);

/// So many limits are told of at most, in so many bytes.
const MOST_LIMITS: usize = 1_024;
pub(super) const MOST_BYTES: usize = 1 << 16;

/// The layout of what is told.
const VERSION: &str = "1";

/// In names: what stands between them, and what escapes.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// Tells processes apart that have one number, one after the other.
static LIFE: LazyLock<u64> = LazyLock::new(random);

/// What one limit is called here, and what it has decided.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) name: Box<str>,
    per: Box<[Box<str>]>,
    pub(super) terms: Arc<Terms>,
    admitted: AtomicU64,
    rejected: AtomicU64,
    waiting: AtomicU64,
    is_closed: AtomicBool,
}

impl Account {
    pub(super) fn new(name: &str, per: &[&str], terms: Terms) -> Self {
        Self {
            name: name.into(),
            per: per.iter().map(|&field| field.into()).collect(),
            terms: Arc::new(terms),
            admitted: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        }
    }

    pub(super) fn count(&self, admitted: bool) {
        let count = if admitted {
            &self.admitted
        } else {
            &self.rejected
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_waiting(&self, waiting: usize) {
        self.waiting.store(waiting as u64, Ordering::Relaxed);
    }

    /// It is told of no more: the limit is not in force any longer.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.terms.limit)?;
        for count in [&self.admitted, &self.rejected, &self.waiting] {
            write!(f, " {}", count.load(Ordering::Relaxed))?;
        }
        for name in std::iter::once(&self.name).chain(&self.per) {
            write!(f, " {}", utf8_percent_encode(name, ESCAPED))?;
        }
        Ok(())
    }
}

/// The limits of a limiter that are told of.
#[derive(Debug)]
pub(super) struct Telling {
    /// Nobody waits for one of these: in a process that was forked a lock may be held for ever.
    places: boxcar::Vec<Mutex<Weak<Account>>>,
    life: u64,
}

impl Telling {
    pub(super) fn new() -> Self {
        Self {
            places: boxcar::Vec::new(),
            life: *LIFE,
        }
    }

    pub(super) fn add(&self, account: &Arc<Account>) {
        let account = Arc::downgrade(account);
        for (_, place) in &self.places {
            if let Ok(mut place) = place.try_lock()
                && open(&place).is_none()
            {
                *place = account;
                return;
            }
        }
        if self.places.count() < MOST_LIMITS {
            self.places.push(Mutex::new(account));
        }
    }

    /// Counts anew, in a process that was forked.
    pub(super) fn forget(&self) {
        for account in self.accounts() {
            for count in [&account.admitted, &account.rejected, &account.waiting] {
                count.store(0, Ordering::Relaxed);
            }
        }
    }

    fn accounts(&self) -> impl Iterator<Item = Arc<Account>> {
        let places = self.places.iter();
        places.filter_map(|(_, place)| open(&*place.try_lock().ok()?))
    }

    /// A line for the process and one for each limit; none where there is no limit.
    fn text(&self) -> Option<String> {
        let (number, host) = (process::id(), host());
        let host = utf8_percent_encode(&host, ESCAPED);
        let head = format!("{VERSION} {number} {:016x} {host}", self.life);
        let mut text = head.clone();
        for account in self.accounts() {
            let length = text.len();
            // Writing to a text does not fail.
            let _ = write!(text, "\n{account}");
            if text.len() > MOST_BYTES {
                text.truncate(length);
            }
        }
        (text.len() > head.len()).then_some(text)
    }
}

fn open(place: &Weak<Account>) -> Option<Arc<Account>> {
    let account = place.upgrade()?;
    (!account.is_closed.load(Ordering::Relaxed)).then_some(account)
}

/// What a process tells by one link.
pub(super) struct Word {
    telling: Arc<Telling>,
    key: Key,
    last: Option<String>,
    is_told: bool,
}

impl Word {
    pub(super) fn new(telling: Arc<Telling>, keys: &Keys) -> Self {
        Self {
            telling,
            key: keys.process([random(), random()]),
            last: None,
            is_told: false,
        }
    }

    /// On a new connection all is new: the store may have lost it.
    pub(super) fn begin(&mut self) {
        self.last = None;
    }

    /// What is to be told now, if that is anything new.
    pub(super) fn next(&mut self) -> Option<Cmd> {
        let text = self.telling.text()?;
        if self.last.as_ref() == Some(&text) {
            return None;
        }
        let mut command = redis::cmd("SET");
        command.arg(&*self.key).arg(&text);
        command.arg("EX").arg(KEPT.as_secs());
        self.last = Some(text);
        self.is_told = true;
        Some(command)
    }

    /// What ends all that was told.
    pub(super) fn end(&self) -> Option<Cmd> {
        self.is_told.then(|| {
            let mut command = redis::cmd("SET");
            command.arg(&*self.key).arg("").arg("PX").arg(1);
            command
        })
    }
}

/// What a process told of itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) process: u64,
    pub(super) life: u64,
    pub(super) host: String,
    pub(super) limits: Vec<ToldLimit>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ToldLimit {
    pub(super) name: String,
    pub(super) per: Vec<String>,
    pub(super) terms: Terms,
    pub(super) rate: Rate,
    pub(super) admitted: u64,
    pub(super) rejected: u64,
    pub(super) waiting: u64,
}

impl Told {
    /// Of any bytes; none where anything in them is not as it is told.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let text = str::from_utf8(bytes).ok()?;
        let mut lines = text.split('\n');
        let head: Vec<_> = lines.next()?.split(' ').collect();
        let [VERSION, process, life, host] = head[..] else {
            return None;
        };
        Some(Self {
            process: process.parse::<u32>().ok()?.into(),
            life: u64::from_str_radix(life, 16).ok()?,
            host: decoded(host)?,
            limits: lines.map(ToldLimit::read).collect::<Option<_>>()?,
        })
    }
}

impl ToldLimit {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let terms = Terms::read(words.next()?)?;
        let mut count = || words.next()?.parse().ok();
        let (admitted, rejected, waiting) = (count()?, count()?, count()?);
        let name = decoded(words.next()?).filter(|name| !name.is_empty())?;
        Some(Self {
            name,
            per: words.map(decoded).collect::<Option<_>>()?,
            rate: terms.rate()?,
            terms,
            admitted,
            rejected,
            waiting,
        })
    }
}

fn decoded(text: &str) -> Option<String> {
    let decoded = percent_decode_str(text).decode_utf8().ok()?;
    Some(decoded.into_owned())
}

/// What people call this machine.
fn host() -> String {
    let told = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let told = told.or_else(|| env::var("HOSTNAME").ok());
    told.unwrap_or_default().trim().to_owned()
}
