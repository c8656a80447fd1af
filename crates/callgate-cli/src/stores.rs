//! Stores that processes share as people see them: what `top` and `store` have in common.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::time::Duration;

use callgate::{Call, ConfigError, Inspection, Limiter, SharedBucket, SharedProcess};
use clap::Args;
use serde::{Serialize, Serializer};

/// Where a store is, by its path or by its URL.
#[derive(Clone)]
pub(crate) struct Target {
    /// As it was given, but for user and password.
    pub(crate) shown: String,
    /// The same whole, and from the root on.
    pub(crate) store: String,
}

/// One bucket among many, by the fields of a call.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Show this tenant's buckets: the same as --field tenant=NAME.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Show the buckets of calls with this field; give it once for each field that splits a limit. A
    /// tool's is called tool.
    #[arg(long = "field", value_name = "FIELD=VALUE", value_parser = field)]
    fields: Vec<(String, String)>,
}

/// What is in a store at a moment. As `--json` prints it, keys are only ever added.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Store {
    /// The file, or the URL without user and password.
    pub(crate) path: String,
    /// How many buckets there is room for, where that can be told, and how many places are taken.
    pub(crate) slots: Option<usize>,
    pub(crate) used: usize,
    /// Whether that is all there is, and how many keys hold something else.
    #[serde(rename = "whole")]
    pub(crate) is_whole: bool,
    pub(crate) unreadable: usize,
    pub(crate) limits: Vec<Limit>,
    pub(crate) processes: Vec<Process>,
    /// Those that are not full, or those that were asked for. None until they are listed.
    pub(crate) buckets: Option<Vec<Bucket>>,
    /// Limits that split by more fields than were given.
    #[serde(skip)]
    pub(crate) unclear: Vec<String>,
    /// Which file it is, whatever its name.
    #[serde(skip)]
    pub(crate) file: Option<(u64, u64)>,
    #[serde(skip)]
    pub(crate) inspection: Option<Inspection>,
}

/// A limit, with the sums of the processes that live.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Limit {
    pub(crate) name: String,
    pub(crate) per: Vec<String>,
    pub(crate) rate: String,
    pub(crate) burst: u64,
    /// None where it is split: then each of its buckets has its own.
    pub(crate) remaining: Option<u64>,
    #[serde(serialize_with = "seconds")]
    pub(crate) paused: Option<Duration>,
    #[serde(flatten)]
    pub(crate) counts: Counts,
}

/// What one process has decided by one limit.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Process {
    pub(crate) pid: u64,
    /// None where it is this one.
    pub(crate) host: Option<String>,
    /// How long ago it told of itself, if it is not so now.
    #[serde(serialize_with = "seconds")]
    pub(crate) told: Option<Duration>,
    pub(crate) limit: String,
    /// With the rate and the burst, since processes may have others under one name.
    pub(crate) rate: String,
    pub(crate) burst: u64,
    #[serde(flatten)]
    pub(crate) counts: Counts,
    #[serde(skip)]
    pub(crate) at: usize,
    /// When it was started, and whether its number is of this namespace: tells those of one number.
    #[serde(skip)]
    pub(crate) life: (u64, bool),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) admitted: u64,
    pub(crate) rejected: u64,
    pub(crate) waiting: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Bucket {
    pub(crate) limit: String,
    pub(crate) key: String,
    pub(crate) remaining: u64,
    pub(crate) burst: u64,
    #[serde(serialize_with = "seconds")]
    pub(crate) paused: Option<Duration>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let target = |store| Self {
            shown: given.to_owned(),
            store,
        };
        if given.starts_with("shm:") {
            return Ok(target(given.to_owned()));
        }
        if let Some((_, query)) = given.split_once("://") {
            let prefix = query
                .rsplit_once("prefix=")
                .map_or("", |(_, prefix)| prefix);
            let prefix = prefix.split('&').next().unwrap_or_default();
            let limits = Limiter::builder().store(given);
            let place = limits.store_url().unwrap_or_default();
            return Ok(Self {
                shown: format!("{place}?prefix={prefix}"),
                store: given.to_owned(),
            });
        }
        if given.contains('?') {
            return Err(
                "a store's path has no '?': give its URL, such as shm:/run/callgate".into(),
            );
        }
        let path = std::path::absolute(given).map_err(|error| error.to_string())?;
        let path = path.to_str().ok_or("a store's path is UTF-8")?;
        Ok(target(path.to_owned()))
    }
}

impl fmt::Debug for Target {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl Target {
    /// Looks into it, but for the buckets, which changes nothing.
    pub(crate) fn look(&self) -> Result<Store, String> {
        let found = Inspection::open(&self.store);
        found.map(Store::new).map_err(|error| error.to_string())
    }
}

impl Wanted {
    pub(crate) fn is_anything(&self) -> bool {
        self.tenant.is_some() || !self.fields.is_empty()
    }

    /// Each field once.
    pub(crate) fn check(&self) -> Result<(), String> {
        let fields: Vec<_> = self.fields().map(|(field, _)| field).collect();
        let doubled = fields
            .iter()
            .enumerate()
            .find(|(at, field)| fields[..*at].contains(field));
        doubled.map_or(Ok(()), |(_, field)| {
            Err(format!(
                "the field '{}' is given twice",
                field.escape_debug()
            ))
        })
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        let tenant = self.tenant.iter().map(|tenant| ("tenant", &**tenant));
        tenant.chain(
            self.fields
                .iter()
                .map(|(field, value)| (&**field, &**value)),
        )
    }

    fn is_given(&self, field: &str) -> bool {
        self.fields().any(|(given, _)| given == field)
    }

    fn call(&self) -> Call<'_> {
        let tool = self.fields().find(|(field, _)| *field == "tool");
        let others = self.fields().filter(|(field, _)| *field != "tool");
        let call = Call::new(tool.map_or("", |(_, tool)| tool));
        others.fold(call, |call, (field, value)| call.field(field, value))
    }
}

fn field(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((field, value)) if !field.is_empty() => Ok((field.to_owned(), value.to_owned())),
        _ => Err("a field is given as FIELD=VALUE, such as user=ada".to_owned()),
    }
}

impl Store {
    fn new(inspection: Inspection) -> Self {
        let limits = inspection.limits().iter().map(|limit| Limit {
            name: limit.name.clone(),
            per: limit.per.clone(),
            rate: limit.rate.to_string(),
            burst: limit.burst,
            remaining: limit.per.is_empty().then_some(limit.remaining),
            paused: limit.paused,
            counts: Counts::default(),
        });
        let mut store = Self {
            path: inspection.place().to_owned(),
            slots: inspection.slots(),
            used: inspection.used(),
            is_whole: inspection.is_whole(),
            unreadable: inspection.unreadable(),
            limits: limits.collect(),
            file: file(inspection.place()),
            ..Self::default()
        };
        for row in inspection.processes() {
            store.count(row);
        }
        store.inspection = Some(inspection);
        store
    }

    /// Adds what a process counts: to its sum, since it may have several limiters, and to the limit's.
    fn count(&mut self, row: &SharedProcess) {
        let Some(limit) = self.limits.get_mut(row.limit) else {
            return;
        };
        let counts = Counts {
            admitted: row.admitted,
            rejected: row.rejected,
            waiting: row.waiting,
        };
        limit.counts.add(counts);
        let life = (row.started, row.is_here);
        let is_known = |known: &&mut Process| {
            (known.pid, known.life, known.at) == (row.process, life, row.limit)
        };
        if let Some(known) = self.processes.iter_mut().find(is_known) {
            known.counts.add(counts);
            known.told = known.told.min(row.told);
        } else {
            self.processes.push(Process {
                pid: row.process,
                host: row.host.clone(),
                told: row.told,
                limit: limit.name.clone(),
                rate: limit.rate.clone(),
                burst: limit.burst,
                counts,
                at: row.limit,
                life,
            });
        }
    }

    /// Lists the buckets, once: of a file those of this same moment.
    pub(crate) fn list_buckets(&mut self, wanted: &Wanted) -> Result<(), String> {
        let (None, Some(inspection)) = (&self.buckets, &self.inspection) else {
            return Ok(());
        };
        let found = if wanted.is_anything() {
            find(inspection, wanted, &mut self.unclear)
        } else {
            inspection.buckets()
        };
        let found = found.map_err(|error| error.to_string())?;
        self.buckets = Some(found.into_iter().map(Bucket::from).collect());
        Ok(())
    }

    /// How many processes there are: each has a row a limit.
    pub(crate) fn process_count(&self) -> usize {
        let rows = self.processes.iter();
        let mut processes: Vec<_> = rows.map(|row| (row.pid, row.life)).collect();
        processes.sort_unstable();
        processes.dedup();
        processes.len()
    }
}

/// The bucket of each limit that is split by fields that were all given.
fn find(
    inspection: &Inspection,
    wanted: &Wanted,
    unclear: &mut Vec<String>,
) -> Result<Vec<SharedBucket>, ConfigError> {
    let call = wanted.call();
    let mut names: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for limit in inspection.limits() {
        let missing: Vec<_> = limit
            .per
            .iter()
            .filter(|field| !wanted.is_given(field))
            .collect();
        if names.contains(&&*limit.name) || missing.len() == limit.per.len() {
            continue;
        }
        names.push(&limit.name);
        if missing.is_empty() {
            found.extend(inspection.bucket(&limit.name, &call)?);
            continue;
        }
        unclear.push(format!(
            "limit '{}' is split by {} too: give --field {}=...",
            limit.name.escape_debug(),
            missing
                .iter()
                .map(|field| &***field)
                .collect::<Vec<_>>()
                .join(", "),
            missing[0],
        ));
    }
    Ok(found)
}

/// The device and the number of a file.
fn file(path: &str) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.admitted = self.admitted.saturating_add(other.admitted);
        self.rejected = self.rejected.saturating_add(other.rejected);
        self.waiting = self.waiting.saturating_add(other.waiting);
    }
}

impl From<SharedBucket> for Bucket {
    fn from(bucket: SharedBucket) -> Self {
        Self {
            limit: bucket.limit,
            key: bucket.key,
            remaining: bucket.remaining,
            burst: bucket.burst,
            paused: bucket.paused,
        }
    }
}

#[expect(clippy::ref_option, reason = "what serde calls")]
fn seconds<S: Serializer>(time: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(out)
}
