//! What a call of a trace costs `callgate simulate`, beside only parsing the same file, in the thread's CPU time.
//!
//! CSV is only parsed with the csv crate's `ByteRecord`, which is used again for each record: the bytes are
//! split, and no field is looked at. JSON lines are parsed with `serde_json` into texts and numbers.

use std::borrow::Cow;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;
use tempfile::TempDir;

use crate::measure::{Figure, nanos};

const CALLS: u32 = 300_000;
const ROUNDS: usize = 15;

/// How a trace can be written, with the name of its file and what parses it.
pub(crate) const FORMATS: [(&str, &str, Parse); 2] = [
    ("CSV", "calls.csv", parse_csv),
    ("JSON lines", "calls.jsonl", parse_json),
];

type Parse = fn(&Path) -> io::Result<u32>;

/// Two limits on each call, one of which has a bucket for each of 20,000 tenants.
const LIMITS: &str = "
[limits.all]
tools = ['*']
rate = '500/s'
burst = 100

[limits.tenants]
tools = ['crm_*']
rate = '1/min'
burst = 5
per = ['tenant']
";

/// What each format came to.
pub(crate) struct Measured {
    /// Nanoseconds a call.
    pub(crate) parsed: Figure,
    pub(crate) simulated: Figure,
    pub(crate) ratio: Figure,
}

/// Reads each trace and simulates it, in turn.
pub(crate) fn measured() -> io::Result<[Measured; 2]> {
    let folder = tempfile::tempdir()?;
    let limits = folder.path().join("limits.toml");
    std::fs::write(&limits, LIMITS)?;
    write_traces(&folder)?;
    let mut rounds = [const { Vec::new() }; 2];
    for _ in 0..ROUNDS {
        for ((_, file, parse), rounds) in FORMATS.iter().zip(&mut rounds) {
            let trace = folder.path().join(file);
            let parsed = spent(|| assert_eq!(parse(&trace).ok(), Some(CALLS)));
            let simulated = spent(|| simulate(&limits, &trace));
            rounds.push((parsed, simulated));
        }
    }
    Ok(rounds.map(|rounds| {
        let figure =
            |of: fn(&(f64, f64)) -> f64| Figure::of(&rounds.iter().map(of).collect::<Vec<_>>());
        Measured {
            parsed: figure(|(parsed, _)| parsed / f64::from(CALLS)),
            simulated: figure(|(_, simulated)| simulated / f64::from(CALLS)),
            ratio: figure(|(parsed, simulated)| simulated / parsed),
        }
    }))
}

/// Nanoseconds that this thread spends on a processor meanwhile.
fn spent(work: impl FnOnce()) -> f64 {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime));
    let start = now();
    work();
    match (start, now()) {
        (Ok(start), Ok(end)) => nanos(end.saturating_sub(start)),
        _ => f64::NAN,
    }
}

fn simulate(limits: &Path, trace: &Path) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = [
        "callgate".as_ref(),
        "simulate".as_ref(),
        limits.as_os_str(),
        trace.as_os_str(),
    ];
    let code = callgate_cli::run(args, &mut out, &mut err);
    assert_eq!(code, 0, "{}", String::from_utf8_lossy(&err));
    black_box(out);
}

/// The same calls in each format, some 1,000 a second.
fn write_traces(folder: &TempDir) -> io::Result<()> {
    let create = |name| File::create(folder.path().join(name)).map(BufWriter::new);
    let (mut csv, mut json) = (create(FORMATS[0].1)?, create(FORMATS[1].1)?);
    writeln!(csv, "time,tool,tenant,cost,duration")?;
    let mut random = 7_u64;
    let mut below = |most: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % most
    };
    let mut time = 1_764_489_600_000_000_000_u64;
    for _ in 0..CALLS {
        time += below(2_000_000);
        let (whole, part) = (time / 1_000_000_000, time % 1_000_000_000);
        let verb = ["search", "update"][usize::from(below(4) > 0)];
        let (tenant, duration) = (below(20_000), below(50_000));
        writeln!(
            csv,
            "{whole}.{part:09},crm_{verb},tenant-{tenant:05},,0.{duration:06}"
        )?;
        writeln!(
            json,
            "{{\"time\":{whole}.{part:09},\"tool\":\"crm_{verb}\",\"fields\":{{\"tenant\":\"tenant-{tenant:05}\"}},\
             \"duration\":0.{duration:06},\"outcome\":\"ok\"}}"
        )?;
    }
    csv.flush()?;
    json.flush()
}

fn parse_csv(path: &Path) -> io::Result<u32> {
    let mut reader = csv::Reader::from_path(path)?;
    let mut record = csv::ByteRecord::new();
    let mut calls = 0;
    while reader.read_byte_record(&mut record)? {
        black_box(&record);
        calls += 1;
    }
    Ok(calls)
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "only parsed")]
struct Line<'a> {
    time: f64,
    #[serde(borrow)]
    tool: Cow<'a, str>,
    #[serde(borrow)]
    fields: Fields<'a>,
    duration: f64,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "only parsed")]
struct Fields<'a> {
    #[serde(borrow)]
    tenant: Cow<'a, str>,
}

fn parse_json(path: &Path) -> io::Result<u32> {
    let mut reader = BufReader::with_capacity(1 << 16, File::open(path)?);
    let mut line = Vec::new();
    let mut calls = 0;
    while reader.read_until(b'\n', &mut line)? > 0 {
        black_box(serde_json::from_slice::<Line<'_>>(&line)?);
        line.clear();
        calls += 1;
    }
    Ok(calls)
}
