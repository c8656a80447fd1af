//! Stores in shared memory as people see them: what `top` and `store` have in common.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use callgate::{Call, Inspection, SharedBucket};
use clap::Args;
use serde::{Serialize, Serializer};

/// Where a store is, by its path or by its URL.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) given: String,
    /// The same, from the root on.
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
    /// The file.
    pub(crate) path: String,
    /// How many buckets there is room for, and how many places are taken.
    pub(crate) slots: usize,
    pub(crate) used: usize,
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
            given: given.to_owned(),
            store,
        };
        if given.starts_with("shm:") {
            return Ok(target(given.to_owned()));
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

impl Target {
    /// Looks into it, which changes nothing.
    pub(crate) fn inspect(&self) -> Result<Inspection, String> {
        Inspection::open(&self.store).map_err(|error| error.to_string())
    }

    /// Looks into it, but for the buckets.
    pub(crate) fn look(&self) -> Result<Store, String> {
        self.inspect().map(Store::new)
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
            path: inspection.path().to_string_lossy().into_owned(),
            slots: inspection.slots(),
            used: inspection.used(),
            limits: limits.collect(),
            file: file(inspection.path()),
            ..Self::default()
        };
        for row in inspection.processes() {
            let counts = Counts {
                admitted: row.admitted,
                rejected: row.rejected,
                waiting: row.waiting,
            };
            store.count((row.process, row.started, row.is_here), row.limit, counts);
        }
        store.inspection = Some(inspection);
        store
    }

    /// Adds what a process counts: to its sum, since it may have several limiters, and to the limit's.
    fn count(&mut self, (pid, started, is_here): (u64, u64, bool), at: usize, counts: Counts) {
        let Some(limit) = self.limits.get_mut(at) else {
            return;
        };
        limit.counts.add(counts);
        let life = (started, is_here);
        let is_known = |known: &&mut Process| (known.pid, known.life, known.at) == (pid, life, at);
        if let Some(known) = self.processes.iter_mut().find(is_known) {
            known.counts.add(counts);
        } else {
            self.processes.push(Process {
                pid,
                limit: limit.name.clone(),
                rate: limit.rate.clone(),
                burst: limit.burst,
                counts,
                at,
                life,
            });
        }
    }

    /// Lists the buckets of this same moment, once.
    pub(crate) fn list_buckets(&mut self, wanted: &Wanted) {
        if let (None, Some(inspection)) = (&self.buckets, &self.inspection) {
            self.buckets = Some(if wanted.is_anything() {
                find(inspection, wanted, &mut self.unclear)
            } else {
                inspection.buckets().map(Bucket::from).collect()
            });
        }
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
fn find(inspection: &Inspection, wanted: &Wanted, unclear: &mut Vec<String>) -> Vec<Bucket> {
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
        if !missing.is_empty() {
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
        } else if let Some(bucket) = inspection.bucket(&limit.name, &call) {
            found.push(bucket.into());
        }
    }
    found
}

/// The device and the number of a file.
fn file(path: &Path) -> Option<(u64, u64)> {
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
