//! Processes that share a store.
//!
//! The processes are this very test binary, asked for its one test that does what it is told.
#![cfg(all(feature = "shm", target_os = "linux", not(loom)))]

use std::env;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use callgate::{Call, Limit, Limiter};
use tempfile::TempDir;

const TOLD: &str = "CALLGATE_TEST_PROCESS";

/// A folder, and the URL of a store in it.
struct Place {
    folder: TempDir,
    url: String,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let url = format!("shm:{}/quota?slots=1024", folder.path().display());
        Self { folder, url }
    }

    /// A process that does what `does` says, once it is told so.
    fn process(&self, does: &str, time: Duration) -> Child {
        let told = format!("{does} {} {}", self.url, time.as_millis());
        Command::new(env::current_exe().expect("this program"))
            .args([
                "--exact",
                "a_process",
                "--ignored",
                "--nocapture",
                "--quiet",
            ])
            .env(TOLD, told)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process")
    }
}

/// What a process says that it has counted.
fn counted(mut process: Child) -> u64 {
    let mut said = String::new();
    let mut stdout = process.stdout.take().expect("piped");
    stdout.read_to_string(&mut said).expect("text");
    assert!(process.wait().expect("an end").success(), "{said}");
    let number = said
        .split("counted ")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no count: {said}"))
}

fn one_bucket(url: &str) -> Limiter {
    let limit = Limit::per_second(1000).burst(500);
    Limiter::builder()
        .limit("search", limit)
        .store(url)
        .build()
        .expect("a store")
}

#[test]
#[ignore = "the others start it"]
fn a_process() {
    let Ok(told) = env::var(TOLD) else { return };
    let mut words = told.split(' ');
    let mut word = || words.next().expect("a word");
    let (does, url) = (word(), word());
    let time = Duration::from_millis(word().parse().expect("milliseconds"));
    match does {
        "hammer" => println!("counted {}", hammered(&one_bucket(url), time)),
        other => panic!("{other}?"),
    }
}

/// How many calls four threads get through.
fn hammered(limiter: &Limiter, time: Duration) -> u64 {
    let started = Instant::now();
    let admitted = || {
        let call = Call::new("search");
        let mut admitted = 0;
        while started.elapsed() < time {
            admitted += u64::from(limiter.try_acquire(&call).is_admitted());
        }
        admitted
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(admitted)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a count"))
            .sum()
    })
}

#[test]
fn two_processes_share_one_quota() {
    let place = Place::new();
    let limiter = one_bucket(&place.url);
    let started = Instant::now();
    let processes: Vec<_> = (0..2)
        .map(|_| place.process("hammer", Duration::from_millis(1500)))
        .collect();
    let admitted: u64 = processes.into_iter().map(counted).sum();
    let most = 500 + u64::try_from(started.elapsed().as_millis()).expect("short");
    assert!((1500..=most).contains(&admitted), "{admitted} of {most}");
    assert!(limiter.snapshot()[0].remaining.is_some());
    assert!(place.folder.path().join("quota.v1").is_file());
}
