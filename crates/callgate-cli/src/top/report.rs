//! What `top --once` and `store inspect` print: tables, or JSON.

use std::cmp::Reverse;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use crate::stores::{Bucket, Limit, Process, Store};
use crate::table::{grouped, hide_if_empty, listed, shown, table};

/// So many buckets are printed for people, the emptiest first.
const MOST_BUCKETS: usize = 20;

/// One store, or why there is none.
#[derive(Serialize)]
#[serde(untagged)]
enum Looked<'a> {
    Found(&'a Store),
    Failed { path: &'a str, error: &'a str },
}

/// All stores, each with the path it was given by.
pub(crate) fn json(stores: &[(String, Result<Store, String>)]) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        stores: Vec<Looked<'a>>,
    }
    let stores = stores.iter().map(|(path, found)| match found {
        Ok(store) => Looked::Found(store),
        Err(error) => Looked::Failed { path, error },
    });
    let document = Document {
        stores: stores.collect(),
    };
    serde_json::to_string_pretty(&document)
        .map_or_else(|error| error.to_string(), |json| json + "\n")
}

/// One store.
pub(crate) fn tables(store: &Store) -> String {
    let mut parts = vec![heading(store)];
    if !store.limits.is_empty() {
        parts.push(limits(&store.limits));
    }
    if !store.processes.is_empty() {
        parts.push(processes(&store.processes));
    }
    if let Some(listed) = store.buckets.as_deref().filter(|listed| !listed.is_empty()) {
        parts.push(buckets(listed));
    }
    parts.join("\n\n") + "\n"
}

pub(crate) fn heading(store: &Store) -> String {
    let mut heading = format!(
        "{}: {}, {}, {}",
        shown(&store.path),
        counted(store.limits.len(), "limit"),
        match store.process_count() {
            1 => "1 process".to_owned(),
            many => format!("{many} processes"),
        },
        match store.slots {
            Some(slots) => format!(
                "{} of {} slots taken",
                grouped(store.used as u64),
                grouped(slots as u64)
            ),
            None => counted(store.used, "bucket"),
        },
    );
    if store.unreadable > 0 {
        let keys = counted(store.unreadable, "key");
        let _ = write!(heading, ", {keys} that cannot be read");
    }
    if !store.is_whole {
        heading += "; that is not all";
    }
    heading
}

fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        many => format!("{} {what}s", grouped(many as u64)),
    }
}

fn limits(limits: &[Limit]) -> String {
    let header = [
        "limit", "rate", "level", "admitted", "rejected", "waiting", "paused", "per",
    ];
    let mut table = table(header, &[2, 3, 4, 5, 6]);
    for limit in limits {
        table.add_row([
            shown(&limit.name),
            limit.rate.clone(),
            limit.remaining.map_or_else(
                || format!("of {}", grouped(limit.burst)),
                |remaining| level(remaining, limit.burst),
            ),
            grouped(limit.counts.admitted),
            grouped(limit.counts.rejected),
            grouped(limit.counts.waiting),
            limit.paused.map_or_else(String::new, left),
            listed(&limit.per),
        ]);
    }
    hide_if_empty(&mut table, 6);
    hide_if_empty(&mut table, 7);
    table.trim_fmt()
}

fn processes(processes: &[Process]) -> String {
    let header = [
        "process", "limit", "rate", "admitted", "rejected", "waiting", "told", "host",
    ];
    let mut table = table(header, &[0, 3, 4, 5, 6]);
    for row in processes {
        table.add_row([
            row.pid.to_string(),
            shown(&row.limit),
            row.rate.clone(),
            grouped(row.counts.admitted),
            grouped(row.counts.rejected),
            grouped(row.counts.waiting),
            row.told.map_or_else(String::new, ago),
            shown(row.host.as_deref().unwrap_or_default()),
        ]);
    }
    hide_if_empty(&mut table, 6);
    hide_if_empty(&mut table, 7);
    table.trim_fmt()
}

fn buckets(buckets: &[Bucket]) -> String {
    let mut emptiest: Vec<_> = buckets.iter().collect();
    emptiest.sort_by_key(|bucket| (Reverse(bucket.paused), bucket.remaining));
    let mut table = table(["bucket of", "key", "level", "paused"], &[2, 3]);
    for bucket in emptiest.iter().take(MOST_BUCKETS) {
        table.add_row([
            shown(&bucket.limit),
            bucket.key.clone(),
            level(bucket.remaining, bucket.burst),
            bucket.paused.map_or_else(String::new, left),
        ]);
    }
    hide_if_empty(&mut table, 3);
    match buckets.len().saturating_sub(MOST_BUCKETS) {
        0 => table.trim_fmt(),
        more => format!(
            "{}\nand {} more that are not full: --json has all",
            table.trim_fmt(),
            grouped(more as u64)
        ),
    }
}

pub(crate) fn level(remaining: u64, burst: u64) -> String {
    format!("{}/{}", grouped(remaining), grouped(burst))
}

pub(crate) fn ago(time: Duration) -> String {
    format!("{} ago", left(Duration::from_secs(time.as_secs())))
}

/// A time that is left, up to the next second.
pub(crate) fn left(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    match seconds {
        0..100 => format!("{seconds}s"),
        100..6_000 => format!("{}m", seconds.div_ceil(60)),
        _ => format!("{}h", seconds.div_ceil(3_600)),
    }
}
