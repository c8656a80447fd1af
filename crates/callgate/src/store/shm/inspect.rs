//! A look into the file, by reading it as any other.

use std::fs::File;
use std::io::Read;
use std::mem::offset_of;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

use super::cells::{Cell, Stamped};
use super::counts::Process;
use super::file::{
    self, CELLS_AT, EDITIONS_AT, Edition, Header, LABEL, ROWS, ROWS_AT, Refused, Row,
};
use super::label::{Label, SEPARATOR};
use super::url::Url;
use super::{PAUSED, PAUSES, time, xor};
use crate::bucket::{Bucket, MAX_NANOS};
use crate::rules::{Secret, key_of};
use crate::store::inspect::{Inspection, SharedBucket, SharedLimit, SharedProcess, Source};
use crate::{Call, ConfigError, Rate};

/// What was read of a file.
#[derive(Debug)]
pub(crate) struct Look {
    secret: Secret,
    now: u64,
    /// With the number, and those of the first edition and of the limit it is listed as, if it is.
    editions: Vec<Seen>,
    cells: Vec<([u64; 2], Stamped)>,
}

/// An edition of a limit.
#[derive(Clone, Debug)]
struct Seen {
    number: usize,
    first: usize,
    identity: [u64; 2],
    used: u64,
    until: u64,
    own: Stamped,
    rate: Rate,
    burst: u64,
    bucket: Bucket,
    label: Label,
}

impl Look {
    /// Looks into the store of this URL or path.
    pub(crate) fn open(store: &str) -> Result<Inspection, ConfigError> {
        let path = Url::of_file(store)?.path;
        Self::read(&path).map_err(|refused| refused.of(&path))
    }

    /// Removes the store of this URL or path.
    pub(crate) fn remove(store: &str, force: bool) -> Result<Vec<u64>, ConfigError> {
        let path = Url::of_file(store)?.path;
        file::File::remove(&path, force).map_err(|refused| refused.of(&path))
    }

    fn read(path: &Path) -> Result<Inspection, Refused> {
        let bytes = bytes(path)?;
        let file = Bytes(&bytes);
        let ahead = time::ahead()
            .map_err(|found| Refused::new("looked at where time can be told", found))?;
        let editions = usize::try_from(file.word(offset_of!(Header, editions))).unwrap_or(0);
        let numbers = 1..editions.min(super::EDITIONS);
        let editions: Vec<_> = numbers
            .filter_map(|number| Seen::read(file, number))
            .collect();
        let slots = (bytes.len() - CELLS_AT) / size_of::<Cell>();
        let cells = (0..slots).map(|slot| CELLS_AT + slot * size_of::<Cell>());
        let cells = cells.map(|at| {
            let key = file.pair(at + offset_of!(Cell, key));
            (key, file.stamped(at + offset_of!(Cell, word)))
        });
        let look = Self {
            secret: Secret::of(file.pair(offset_of!(Header, secret))),
            now: time::now(ahead),
            editions,
            cells: cells.filter(|(_, stamped)| stamped.has_key()).collect(),
        };
        let (limits, processes) = look.list(file);
        Ok(Inspection {
            place: path.to_string_lossy().into_owned(),
            slots: Some(slots),
            used: look.cells.len(),
            is_whole: true,
            unreadable: 0,
            limits,
            processes,
            source: Source::Shared(look),
        })
    }

    /// Lists the processes, and the editions of limits that they have; of others the last.
    fn list(&self, file: Bytes<'_>) -> (Vec<SharedLimit>, Vec<SharedProcess>) {
        let me = Process::own();
        let rows = (0..ROWS).map(|row| ROWS_AT + row * size_of::<Row>());
        let rows: Vec<_> = rows
            .filter(|at| {
                let process = Process {
                    number: file.word(at + offset_of!(Row, process)),
                    started: file.word(at + offset_of!(Row, started)),
                    namespace: file.word(at + offset_of!(Row, namespace)),
                };
                process.number != 0 && !process.is_dead(&me)
            })
            .collect();
        let of =
            |row: usize| usize::try_from(file.word(row + offset_of!(Row, edition))).unwrap_or(0);
        let is_had = |edition: &Seen| rows.iter().any(|&row| of(row) == edition.number);
        let has_others = |edition: &Seen| {
            let others = self
                .editions
                .iter()
                .filter(|other| other.label.name == edition.label.name);
            others.clone().any(is_had) || others.clone().any(|other| other.used > edition.used)
        };
        let listed = |edition: &&Seen| {
            is_had(edition) || edition.own.edition() == edition.number && !has_others(edition)
        };
        let listed: Vec<_> = self.editions.iter().filter(listed).collect();
        let processes = rows
            .iter()
            .filter_map(|&row| {
                Some(SharedProcess {
                    process: file.word(row + offset_of!(Row, process)),
                    host: None,
                    told: None,
                    is_here: file.word(row + offset_of!(Row, namespace)) == me.namespace,
                    started: file.word(row + offset_of!(Row, started)),
                    limit: listed
                        .iter()
                        .position(|edition| edition.number == of(row))?,
                    admitted: file.word(row + offset_of!(Row, admitted)),
                    rejected: file.word(row + offset_of!(Row, rejected)),
                    waiting: file.word(row + offset_of!(Row, waiting)),
                })
            })
            .collect();
        let limits = listed.iter().map(|edition| self.limit(edition)).collect();
        (limits, processes)
    }

    fn limit(&self, edition: &Seen) -> SharedLimit {
        let shared = self.edition(edition.first).unwrap_or(edition);
        SharedLimit {
            name: edition.label.name.clone(),
            per: edition.per().map(str::to_owned).collect(),
            rate: edition.rate,
            burst: edition.burst,
            remaining: self.remaining(edition, shared.own, shared.until),
            paused: self.left(shared.until),
        }
    }

    fn edition(&self, number: usize) -> Option<&Seen> {
        self.editions
            .iter()
            .find(|edition| edition.number == number)
    }

    /// The whole tokens in a bucket of a limit, by the numbers of one of its editions.
    fn remaining(&self, edition: &Seen, stamped: Stamped, until: u64) -> u64 {
        let old = self.edition(stamped.edition());
        let state = match old {
            Some(old) if old.number != edition.number => {
                edition.bucket.carry(stamped.state, &old.bucket, self.now)
            }
            _ => stamped.state,
        };
        let floor = if until > 0 {
            edition.bucket.empty(until.min(MAX_NANOS))
        } else {
            0
        };
        let missing = edition.bucket.reached(self.now).missing(state.max(floor));
        edition.bucket.fill(missing).tokens()
    }

    fn left(&self, until: u64) -> Option<Duration> {
        let left = until.checked_sub(self.now).filter(|&left| left > 0);
        left.map(Duration::from_nanos)
    }

    /// The buckets of limits that are split: those that are not full.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = SharedBucket> {
        let cells = self.cells.iter();
        let cells = cells.filter_map(|&(key, stamped)| {
            let edition = self.edition(stamped.edition())?;
            let key = xor(key, edition.identity);
            Some((self.shown(edition, key, stamped, 0), edition, stamped))
        });
        let spent = cells.filter(|(_, edition, stamped)| {
            edition.bucket.reached(self.now).missing(stamped.state) > 0
        });
        spent.map(|(bucket, ..)| bucket)
    }

    /// The bucket that a call draws from under a limit of this name, full where there is none; none where there
    /// is no such limit, or its fields were cut.
    pub(crate) fn bucket(&self, limit: &str, call: &Call<'_>) -> Option<SharedBucket> {
        let named = self
            .editions
            .iter()
            .filter(|edition| edition.label.name == limit);
        let latest =
            named.max_by_key(|edition| self.edition(edition.first).map(|first| first.used))?;
        let shared = self.edition(latest.first)?;
        let per: Vec<_> = latest.per().collect();
        if per.is_empty() {
            return Some(self.shown(latest, latest.identity, shared.own, shared.until));
        }
        let key = key_of(&self.secret, per, call);
        let place = xor(key.halves(), latest.identity);
        let find = |key: [u64; 2]| self.cells.iter().find(|(of, _)| *of == key);
        // Of the default limit, a tool may pause alone.
        let part = xor(
            xor(self.secret.key(call.tool()).halves(), latest.identity),
            PAUSED,
        );
        let part = find(part).filter(|(_, stamped)| stamped.edition() == PAUSES);
        let until = part.map_or(shared.until, |(_, stamped)| stamped.state.max(shared.until));
        let stamped = find(place).map_or(shared.own, |&(_, stamped)| stamped);
        Some(self.shown(latest, key.halves(), stamped, until))
    }

    fn shown(&self, edition: &Seen, key: [u64; 2], stamped: Stamped, until: u64) -> SharedBucket {
        SharedBucket {
            limit: edition.label.name.clone(),
            key: format!("{:016x}{:016x}", key[0], key[1]),
            remaining: self.remaining(edition, stamped, until),
            burst: edition.burst,
            paused: self.left(until),
        }
    }
}

impl Seen {
    fn read(file: Bytes<'_>, number: usize) -> Option<Self> {
        let at = EDITIONS_AT + number * size_of::<Edition>();
        let word = |offset: usize| file.word(at + offset);
        let [low, high] = file.pair(at + offset_of!(Edition, nanos));
        let nanos = u128::from(high) << 64 | u128::from(low);
        let fraction = (word(offset_of!(Edition, tokens)), nanos);
        let burst = word(offset_of!(Edition, burst));
        let first = word(offset_of!(Edition, first));
        let named = word(offset_of!(Edition, named));
        let [identity, other] = file.pair(at + offset_of!(Edition, identity));
        let sum = file::sum(&[first, named, identity, other, fraction.0, low, high, burst]);
        if sum != word(offset_of!(Edition, sum)) {
            return None;
        }
        let label: [u64; LABEL] =
            std::array::from_fn(|place| word(offset_of!(Edition, label) + place * 8));
        Some(Self {
            number,
            first: usize::try_from(first).ok()?,
            identity: [identity, other],
            used: word(offset_of!(Edition, used)),
            until: word(offset_of!(Edition, until)),
            own: file.stamped(at + offset_of!(Edition, own)),
            rate: Rate::of(fraction)?,
            burst,
            bucket: Bucket::of(fraction, burst)?,
            label: Label::read(&label),
        })
    }

    fn per(&self) -> impl Iterator<Item = &str> {
        let fields = self.label.per.split(SEPARATOR);
        fields.filter(|field| !field.is_empty())
    }
}

/// The file's bytes, at least as many as are asked for.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn word(self, at: usize) -> u64 {
        let bytes = self
            .0
            .get(at..at + 8)
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    }

    fn pair(self, at: usize) -> [u64; 2] {
        [self.word(at), self.word(at + 8)]
    }

    fn stamped(self, at: usize) -> Stamped {
        let bytes = self
            .0
            .get(at..at + 16)
            .and_then(|bytes| bytes.try_into().ok());
        Stamped::of(bytes.map_or(0, u128::from_ne_bytes)).thawed()
    }
}

/// The file's bytes, if it begins as a store does: what else may be there need not fit into memory.
fn bytes(path: &Path) -> Result<Vec<u8>, Refused> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(file::unopened)?;
    let length = file::length(&file::look(&file)?)?;
    let mut file = File::from(file).take(length as u64);
    let mut bytes = vec![0; size_of::<Header>()];
    let unread = |error| Refused::failed("to read it", error);
    file.read_exact(&mut bytes).map_err(unread)?;
    let header = [
        offset_of!(Header, magic),
        offset_of!(Header, version),
        offset_of!(Header, size),
        offset_of!(Header, slots),
    ];
    file::check(header.map(|at| Bytes(&bytes).word(at)), length)?;
    file.read_to_end(&mut bytes).map_err(unread)?;
    if bytes.len() < length {
        let found = format!("{} bytes", bytes.len());
        return Err(Refused::new(format!("of {length} bytes still"), found));
    }
    Ok(bytes)
}
