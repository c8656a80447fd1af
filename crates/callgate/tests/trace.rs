//! Traces: what a limiter writes, and what becomes of it where the file cannot take it.

use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder, Trace, TraceOptions};
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::Value;
use tempfile::TempDir;

/// A folder, and a file in it.
fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    (folder, path)
}

/// The lines of a file, which are all whole.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// What became of the calls of a limiter.
fn outcomes(limits: LimiterBuilder, ask: impl FnOnce(&Limiter)) -> Vec<(String, bool)> {
    let (_folder, path) = place();
    let limiter = limits.trace(Trace::open(&path).unwrap()).build().unwrap();
    ask(&limiter);
    // The last who has the trace.
    drop(limiter);
    let outcome = |line: &Value| {
        (
            line["outcome"].as_str().unwrap().into(),
            line["duration"].is_f64(),
        )
    };
    lines(&path).iter().map(outcome).collect()
}

fn one_call() -> LimiterBuilder {
    Limiter::builder().limit("search", Limit::per_hour(1))
}

fn search() -> Call<'static> {
    Call::new("search")
}

const OK: (&str, bool) = ("ok", true);
const ERROR: (&str, bool) = ("error", true);
const REJECTED: (&str, bool) = ("rejected", false);
const CANCELLED: (&str, bool) = ("cancelled", false);

fn said(expected: &[(&str, bool)]) -> Vec<(String, bool)> {
    expected
        .iter()
        .map(|&(outcome, ran)| (outcome.into(), ran))
        .collect()
}

#[test]
fn a_call_is_written_when_it_ends_a_rejected_one_at_once() {
    let found = outcomes(one_call(), |limiter| {
        let held = limiter.try_acquire(&search());
        assert!(!limiter.try_acquire(&search()).is_admitted());
        drop(held);
        assert!(!limiter.tool("search").try_acquire().is_admitted());
        assert!(limiter.try_acquire(&Call::new("free")).is_admitted());
    });
    assert_eq!(found, said(&[REJECTED, OK, REJECTED, OK]));
}

#[test]
fn a_call_that_fails_or_panics_is_an_error() {
    let limits = Limiter::builder().limit("search", Limit::per_hour(9).burst(9).max_concurrent(9));
    let found = outcomes(limits, |limiter| {
        let Decision::Admitted(permit) = limiter.try_acquire(&search()) else {
            panic!("the bucket is full");
        };
        permit.failed();
        let panics = AssertUnwindSafe(|| {
            let _permit = limiter.try_acquire(&search());
            panic!("in the tool");
        });
        catch_unwind(panics).unwrap_err();
    });
    assert_eq!(found, said(&[ERROR, ERROR]));
}

#[test]
fn a_call_that_is_held_without_the_limiter_ends_when_that_is_dropped() {
    let found = outcomes(one_call(), |limiter| {
        let Decision::Admitted(permit) = limiter.try_acquire(&search()) else {
            panic!("the bucket is full");
        };
        let held = permit.in_flight();
        assert!(!limiter.try_acquire(&search()).is_admitted());
        drop(held);
    });
    assert_eq!(found, said(&[REJECTED, OK]));
}

#[test]
fn in_a_dry_run_the_line_says_what_became_of_the_call() {
    let found = outcomes(one_call().dry_run(true), |limiter| {
        for _ in 0..2 {
            assert!(limiter.try_acquire(&search()).is_admitted());
        }
    });
    assert_eq!(found, said(&[OK, OK]));
}

#[test]
fn a_future_that_is_dropped_while_it_waits_is_cancelled() {
    let limits = one_call().limit(
        "other",
        Limit::per_hour(1).max_wait(Duration::from_secs(7_200)),
    );
    let found = outcomes(limits, |limiter| {
        let call = Call::new("other");
        drop(pollster::block_on(limiter.acquire(&call)));
        let mut waits = Box::pin(limiter.acquire(&call));
        let polled = waits.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Pending));
        drop(waits);
        drop(pollster::block_on(
            limiter.acquire_within(&call, Duration::ZERO),
        ));
    });
    assert_eq!(found, said(&[OK, CANCELLED, REJECTED]));
}

#[test]
fn a_call_says_how_long_it_waited_where_it_did() {
    let (_folder, path) = place();
    let trace = Trace::open(&path).unwrap();
    let limit = Limit::per_second(1_000).max_wait(Duration::from_secs(60));
    let limiter = Limiter::builder()
        .limit("search", limit)
        .trace(trace.clone());
    let limiter = limiter.build().unwrap();
    for _ in 0..2 {
        drop(pollster::block_on(limiter.acquire(&search())));
    }
    assert!(trace.flush());
    let lines = lines(&path);
    assert!(lines[0]["waited"].is_null());
    assert!(lines[1]["waited"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_reload_cannot_bring_a_trace() {
    let (_folder, path) = place();
    let limiter = one_call().build().unwrap();
    let refused = limiter
        .reload(one_call().trace(Trace::open(path).unwrap()))
        .unwrap_err();
    let message = "trace must be given when the limiter is made, got one for a reload";
    assert_eq!(refused.to_string(), message);
}

#[test]
fn calls_are_traced_by_every_way_to_a_limit_after_a_reload_too() {
    let limits = || {
        let limit = || Limit::per_hour(1);
        let limits = Limiter::builder()
            .limit("search", limit())
            .limit("crm_*", limit().burst(9));
        limits.default_limit(limit())
    };
    let found = outcomes(limits(), |limiter| {
        for _ in 0..2 {
            for tool in ["search", "crm_a", "other"] {
                drop(limiter.try_acquire_at(&Call::new(tool), Duration::ZERO));
            }
            assert_eq!(limiter.limits_of("search"), ["search"]);
            assert!(limiter.is_limited("search"));
            limiter.reload_at(limits(), Duration::ZERO).unwrap();
        }
    });
    assert_eq!(found, said(&[OK, OK, OK, REJECTED, OK, REJECTED]));
}

// --- the file ------------------------------------------------------------------------------------

fn call_once(trace: &Trace) {
    trace.begin(&search()).rejected();
}

#[test]
fn what_cannot_be_written_is_refused() {
    let (folder, path) = place();
    let refused = |path: &Path| Trace::open(path).unwrap_err().to_string();
    let start = |path: &Path| {
        let path = path.display();
        format!("trace must be a file to which lines can be added, got '{path}': ")
    };
    assert!(refused(folder.path()).starts_with(&start(folder.path())));
    let missing = folder.path().join("missing/calls.jsonl");
    assert!(refused(&missing).starts_with(&start(&missing)));
    let device = Path::new("/dev/null");
    assert_eq!(refused(device), start(device) + "it is no plain file");
    for (there, why) in [
        ("[limits.search]\n", "its first line is none of a trace"),
        ("{\"time\":1}\nNotes", "its last line is none of a trace"),
    ] {
        fs::write(&path, there).unwrap();
        assert_eq!(refused(&path), start(&path) + why);
        assert_eq!(fs::read_to_string(&path).unwrap(), there);
    }
}

#[test]
fn sizes_and_numbers_out_of_range_are_refused() {
    let (_folder, path) = place();
    let refused = |options: TraceOptions| options.open(&path).unwrap_err().to_string();
    assert_eq!(
        refused(TraceOptions::new().rotate_at(4_095)),
        "rotate_at must be 4,096 bytes or more, got 4,095"
    );
    for keep in [0, 1_001] {
        let message = refused(TraceOptions::new().keep(keep));
        assert!(message.starts_with("keep must be a number of files from 1 to 1,000, got "));
    }
}

#[test]
fn a_line_that_was_torn_is_taken_away() {
    let whole = "{\"time\":1,\"tool\":\"a\",\"outcome\":\"ok\"}\n";
    let long = format!("{{\"time\":2,\"tool\":\"{}", "a".repeat(20_000));
    for torn in ["{", "{\"time\":2,\"to", &long] {
        for before in ["", whole] {
            let (_folder, path) = place();
            fs::write(&path, format!("{before}{torn}")).unwrap();
            let trace = Trace::open(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), before);
            call_once(&trace);
            drop(trace);
            assert_eq!(lines(&path).len(), before.lines().count() + 1);
        }
    }
}

#[test]
fn a_large_file_is_rotated_and_the_oldest_goes() {
    let (folder, path) = place();
    let trace = TraceOptions::new()
        .rotate_at(4_096)
        .keep(2)
        .open(&path)
        .unwrap();
    for _ in 0..10 {
        for _ in 0..20 {
            call_once(&trace);
        }
        assert!(trace.flush());
    }
    assert_eq!(trace.dropped(), 0);
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["calls.jsonl", "calls.jsonl.1", "calls.jsonl.2"]);
    for name in names {
        let path = folder.path().join(name);
        assert!(!lines(&path).is_empty());
        assert!(fs::metadata(path).unwrap().len() <= 4_096);
    }
}

#[test]
fn several_traces_of_one_file_lose_nothing_when_it_is_rotated() {
    let (folder, path) = place();
    let options = TraceOptions::new().rotate_at(4_096).keep(1_000);
    let traces: Vec<_> = (0..4).map(|_| options.open(&path).unwrap()).collect();
    thread::scope(|scope| {
        for trace in &traces {
            scope.spawn(|| {
                for _ in 0..100 {
                    for _ in 0..5 {
                        call_once(trace);
                    }
                    assert!(trace.flush());
                }
            });
        }
    });
    let files = fs::read_dir(folder.path()).unwrap();
    let written: usize = files.map(|file| lines(&file.unwrap().path()).len()).sum();
    assert_eq!(written, 4 * 500);
}

#[test]
fn a_file_that_is_taken_away_is_made_anew() {
    let (folder, path) = place();
    let trace = Trace::open(&path).unwrap();
    call_once(&trace);
    assert!(trace.flush());
    fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    call_once(&trace);
    assert!(trace.flush());
    assert_eq!(lines(&path).len(), 1);
}

// --- what is dropped -----------------------------------------------------------------------------

/// Keeps all writers from a file while it is held.
fn hold(path: &Path) -> File {
    let file = File::open(path).unwrap();
    file.lock().unwrap();
    file
}

#[test]
fn a_full_queue_drops_and_counts_and_nobody_waits() {
    const CALLS: u64 = 20_000;
    let (_folder, path) = place();
    let trace = Trace::open(&path).unwrap();
    let held = hold(&path);
    // Would not come to an end if a call waited.
    for _ in 0..CALLS {
        call_once(&trace);
    }
    let dropped = trace.dropped();
    // One batch is taken out of the queue, and waits for the file.
    assert!(
        (CALLS - 8_192 - 2_000..=CALLS - 8_192).contains(&dropped),
        "{dropped}"
    );
    drop(held);
    assert!(trace.flush());
    assert_eq!(trace.dropped(), dropped);
    assert_eq!(lines(&path).len() as u64, CALLS - dropped);
    call_once(&trace);
    assert!(trace.flush());
    assert_eq!(trace.dropped(), dropped);
}

#[test]
fn long_fields_fill_the_queue_sooner() {
    let (_folder, path) = place();
    let trace = Trace::open(&path).unwrap();
    let held = hold(&path);
    let long = "x".repeat(1 << 20);
    for _ in 0..20 {
        trace
            .begin(&Call::new("search").field("text", &long))
            .rejected();
    }
    assert_eq!(trace.dropped(), 20 - 7);
    drop(held);
    assert!(trace.flush());
    assert_eq!(lines(&path).len(), 7);
}

#[test]
fn what_is_dropped_is_said_once_until_the_queue_was_empty() {
    let (_folder, path) = place();
    let trace = Trace::open(&path).unwrap();
    let told = told_of(&path);
    for spell in 1..=2 {
        let held = hold(&path);
        for _ in 0..20_000 {
            call_once(&trace);
        }
        drop(held);
        assert!(trace.flush());
        // What is flushed may have been all: this one has come to an empty queue.
        call_once(&trace);
        assert!(trace.flush());
        assert_eq!(told.lock().unwrap().len(), spell);
    }
    let first = &told.lock().unwrap()[0];
    let path = path.display();
    let message = format!(
        "the trace '{path}' is written too slowly: some calls get no line there (1 so far)"
    );
    assert_eq!(*first, message);
}

#[test]
fn a_file_that_cannot_be_written_any_more_is_said_once_and_so_is_that_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = inner.join("calls.jsonl");
    let trace = Trace::open(&path).unwrap();
    let told = told_of(&path);
    fs::remove_dir_all(&inner).unwrap();
    for dropped in 1..=3 {
        call_once(&trace);
        assert!(trace.flush());
        assert_eq!(trace.dropped(), dropped);
    }
    fs::create_dir(&inner).unwrap();
    for _ in 0..2 {
        call_once(&trace);
        assert!(trace.flush());
    }
    assert_eq!((trace.dropped(), lines(&path).len()), (3, 2));
    let told = told.lock().unwrap();
    let path = path.display();
    let [stops, goes_on] = &told[..] else {
        panic!("{told:?}");
    };
    let start =
        format!("the trace '{path}' cannot be written, and calls get no line there until it can: ");
    assert!(stops.starts_with(&start), "{stops}");
    let message =
        format!("the trace '{path}' is written again: 3 calls of this process have no line there");
    assert_eq!(*goes_on, message);
}

type Lines = Arc<Mutex<Vec<String>>>;

/// What is logged of files, by what is in the message.
#[derive(Default)]
struct Logger(Mutex<Vec<(String, Lines)>>);

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let message = record.args().to_string();
        for (path, lines) in &*self.0.lock().unwrap() {
            if message.contains(path) {
                lines.lock().unwrap().push(message.clone());
            }
        }
    }

    fn flush(&self) {}
}

fn told_of(path: &Path) -> Lines {
    static LOGGER: OnceLock<Logger> = OnceLock::new();
    let logger = LOGGER.get_or_init(Logger::default);
    if log::set_logger(logger).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
    let lines = Lines::default();
    logger
        .0
        .lock()
        .unwrap()
        .push((path.display().to_string(), Arc::clone(&lines)));
    lines
}
