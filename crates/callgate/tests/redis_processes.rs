//! Processes on one Redis store that are stopped and killed, with clocks that are wrong, on servers that fail over.
//!
//! The processes are this very test binary, asked for its one test that does what it is told.
#![cfg(all(feature = "redis", target_os = "linux", not(loom)))]

#[path = "../src/store/redis/tests/server.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod server;

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use callgate::{Call, Limit, Limiter, OnStoreError};
use rustix::time::{ClockId, clock_gettime};
use server::Server;

const TOLD: &str = "CALLGATE_TEST_REDIS";
const CALL: Call<'_> = Call::new("search");

const RATE: u64 = 200;
const BURST: u64 = 50;

/// Longer than anything takes that goes well.
const PATIENCE: Duration = Duration::from_secs(30);

/// A limiter that decides nothing by itself.
fn limiter(url: &str, limit: Limit) -> Limiter {
    let limiter = Limiter::builder()
        .limit("search", limit)
        .on_store_error(OnStoreError::Deny)
        .store(url);
    limiter.build().expect("a limit in range")
}

/// Nanoseconds since the host started, by a clock that all of its processes read.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    u64::try_from(1_000_000_000 * time.tv_sec + time.tv_nsec).expect("after the start")
}

/// What a process does: four threads take what they can get, and write down between which times each token was.
#[test]
#[ignore = "run by others, as a process of its own"]
fn a_process() {
    let Ok(told) = env::var(TOLD) else {
        return;
    };
    let (path, url) = told.split_once(' ').expect("a file, and where");
    let file = File::options().append(true).create(true).open(path);
    let file = file.expect("a file");
    let limit = Limit::per_second(RATE).burst(BURST).max_wait(PATIENCE);
    let limiter = limiter(url, limit);
    let started = Instant::now();
    thread::scope(|scope| {
        for waits in [true, true, false, false] {
            let (limiter, mut file) = (&limiter, &file);
            scope.spawn(move || {
                while started.elapsed() < TIME {
                    let asked = now();
                    let decision = if waits {
                        pollster::block_on(limiter.acquire_within(&CALL, TIME))
                    } else {
                        limiter.try_acquire(&CALL)
                    };
                    if decision.is_admitted() {
                        // At once: nothing is lost with a process.
                        let line = format!("{asked} {}\n", now());
                        file.write_all(line.as_bytes()).expect("room");
                    } else {
                        thread::yield_now();
                    }
                }
            });
        }
    });
}

/// How long a process runs.
const TIME: Duration = Duration::from_secs(3);

fn process(file: &Path, url: &str) -> Command {
    let mut process = Command::new(env::current_exe().expect("this program"));
    process
        .args(["--exact", "a_process", "--ignored", "--quiet"])
        .env(TOLD, format!("{} {url}", file.display()))
        .stdout(Stdio::null());
    process
}

/// The processes that share a server, and what they wrote down.
struct Processes {
    folder: tempfile::TempDir,
    running: Vec<Child>,
    started: usize,
}

impl Processes {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            running: Vec::new(),
            started: 0,
        }
    }

    fn start(&mut self, url: &str, with: impl FnOnce(&mut Command)) {
        self.started += 1;
        let mut process = process(&self.file(self.started), url);
        with(&mut process);
        self.running.push(process.spawn().expect("a process"));
    }

    fn file(&self, number: usize) -> PathBuf {
        self.folder.path().join(number.to_string())
    }

    fn signal(&self, place: usize, name: &str) {
        let id = self.running[place].id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.expect("a kill command").success());
    }

    /// For each token of each process the times between which it was taken.
    fn end(mut self) -> Vec<Vec<(u64, u64)>> {
        for process in &mut self.running {
            assert!(process.wait().expect("an end").success());
        }
        let read = |number| {
            // It may have been killed before it wrote anything.
            let text = fs::read_to_string(self.file(number)).unwrap_or_default();
            let lines = text.lines().map(|line| {
                let (asked, answered) = line.split_once(' ').expect("two times");
                let number = |text: &str| text.parse().expect("a number");
                (number(asked), number(answered))
            });
            lines.collect()
        };
        (1..=self.started).map(read).collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // Where the test fails.
        for process in &mut self.running {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// In no window there are more tokens than the burst and what comes in its time.
fn assert_bound(mut tokens: Vec<(u64, u64)>) {
    tokens.sort_unstable_by_key(|&(_, answered)| answered);
    for &(from, _) in &tokens {
        // Those that were surely taken in it.
        let within = tokens.iter().filter(|&&(asked, _)| asked >= from);
        for (before, &(_, until)) in within.enumerate() {
            let most = BURST + RATE * (until - from) / 1_000_000_000;
            let got = before as u64 + 1;
            assert!(got <= most, "{got} of {most} from {from} to {until}");
        }
    }
}

/// Numbers that look random, the same in each run.
fn numbers() -> impl Iterator<Item = usize> {
    let next = |number: &u64| {
        Some(
            number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1),
        )
    };
    std::iter::successors(Some(20_260_728), next).map(|number| (number >> 40) as usize)
}

#[test]
fn processes_that_are_stopped_and_killed_get_one_quota_together_in_every_window() {
    let server = Server::start();
    let url = format!("{}?prefix=test&timeout=20s", server.url());
    let mut processes = Processes::new();
    for _ in 0..4 {
        processes.start(&url, |_| {});
    }
    let started = Instant::now();
    let mut numbers = numbers();
    let mut next = |below: usize| numbers.next().expect("no end") % below;
    // Until they are about to end.
    while started.elapsed() < TIME * 4 / 5 {
        let place = next(4);
        processes.signal(place, "STOP");
        thread::sleep(Duration::from_millis(next(150) as u64));
        processes.signal(place, "CONT");
        match next(4) {
            0 => drop(server.run("SCRIPT FLUSH")),
            1 => {
                let mut killed = processes.running.swap_remove(next(4));
                killed.kill().expect("it was not waited for");
                killed.wait().expect("it ends");
                processes.start(&url, |_| {});
            }
            _ => thread::sleep(Duration::from_millis(next(50) as u64)),
        }
    }
    let tokens = processes.end().concat();
    assert!(tokens.len() as u64 > BURST + RATE, "{}", tokens.len());
    assert_bound(tokens);
}

/// Debian's libfaketime, if it is installed.
fn faketime() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten();
    let files = folders.map(|folder| folder.path().join("faketime/libfaketime.so.1"));
    files.into_iter().find(|file| file.exists())
}

fn server_time(server: &Server) -> u64 {
    let time = redis::from_redis_value::<(u64, u64)>(server.run("TIME"));
    let (seconds, micros) = time.expect("a time");
    1_000_000 * seconds + micros
}

#[test]
fn r11_a_process_whose_clock_is_an_hour_off_gets_no_more() {
    let Some(faketime) = faketime() else {
        eprintln!("NOT RUN: a test that needs libfaketime (Debian: apt install faketime)");
        return;
    };
    let server = Server::start();
    let url = format!("{}?prefix=test&timeout=20s", server.url());
    let mut processes = Processes::new();
    let before = server_time(&server);
    for clock in [None, Some("+1h"), Some("-1h")] {
        processes.start(&url, |process| {
            if let Some(clock) = clock {
                // Under a monotonic clock that is off, no timer would ever ring.
                process.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
                process.env("LD_PRELOAD", &faketime).env("FAKETIME", clock);
            }
        });
    }
    let got: Vec<_> = processes.end().iter().map(Vec::len).collect();
    let most = BURST + RATE * (server_time(&server) - before) / 1_000_000;
    assert!(
        got.iter().sum::<usize>() as u64 <= most,
        "{got:?} of {most}"
    );
    assert!(got.iter().all(|&got| got > 0), "{got:?}");
}

fn admitted(limiter: &Limiter, calls: usize) -> usize {
    let admits = |_: &usize| limiter.try_acquire(&CALL).is_admitted();
    (0..calls).filter(admits).count()
}

/// Asks until there is a server.
fn found(limiter: &Limiter) {
    let started = Instant::now();
    while limiter.snapshot()[0].remaining.is_none() {
        assert!(started.elapsed() < PATIENCE, "no server");
        thread::sleep(Duration::from_millis(5));
    }
}

/// How far a server is in what is replicated.
fn offset(server: &Server, name: &str) -> Option<String> {
    let told = server.text("INFO replication");
    let mut lines = told.lines();
    lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
}

/// Fails over from a server to its replica, which has everything or what there was at first. Returns what
/// processes got before, and after.
fn fail_over(
    is_behind: bool,
    url: impl Fn(&Server, &Server) -> String,
    promote: impl Fn(&Server),
) -> [usize; 2] {
    let mut primary = Server::with(&["--repl-diskless-sync-delay", "0"]);
    let replica = Server::with(&["--replicaof", "127.0.0.1", &primary.port.to_string()]);
    replica.wait_for("INFO replication", "master_link_status:up");
    let url = url(&primary, &replica);
    // Two that are there before, and one that comes afterwards.
    let [one, other, late] = [(); 3].map(|()| limiter(&url, Limit::per_day(1).burst(50)));
    let mut before = admitted(&one, 10);
    let replicated = || {
        let started = Instant::now();
        while offset(&primary, "master_repl_offset:") != offset(&replica, "slave_repl_offset:") {
            assert!(started.elapsed() < PATIENCE, "it is behind");
            thread::sleep(Duration::from_millis(1));
        }
    };
    replicated();
    if is_behind {
        // Where nobody listens, and no other test's server will.
        replica.run("REPLICAOF 127.0.0.1 1");
    }
    before += admitted(&one, 10) + admitted(&other, 99);
    if !is_behind {
        replicated();
    }
    primary.stop();
    let meanwhile = admitted(&one, 9) + admitted(&other, 9);
    assert_eq!(meanwhile, 0, "nothing is written there");
    promote(&replica);
    for limiter in [&one, &other, &late] {
        found(limiter);
    }
    assert_eq!(admitted(&other, 99), 0, "it knows that nothing is left");
    [before, admitted(&one, 99) + admitted(&late, 99)]
}

/// What the replica did not have is given once more: a burst at most.
fn assert_one_more_burst([before, after]: [usize; 2]) {
    assert_eq!(before, 50);
    assert!((40..=50).contains(&after), "{after}");
}

#[test]
fn r27_a_failover_gives_back_what_was_lost_and_no_more() {
    let url = |primary: &Server, replica: &Server| {
        let (primary, replica) = (primary.port, replica.port);
        format!("redis://127.0.0.1:{primary},127.0.0.1:{replica}?prefix=test&timeout=5s")
    };
    let promote = |replica: &Server| drop(replica.run("REPLICAOF NO ONE"));
    assert_eq!(fail_over(false, url, promote), [50, 0]);
    assert_one_more_burst(fail_over(true, url, promote));
}

#[test]
fn r27_a_failover_that_a_sentinel_tells_of_is_followed() {
    let sentinel = OnceCell::new();
    let url = |primary: &Server, _: &Server| {
        let sentinel = sentinel.get_or_init(|| Server::sentinel("main", primary.port));
        let port = sentinel.port;
        format!("redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main?prefix=test&timeout=5s")
    };
    let promote = |replica: &Server| {
        replica.run("REPLICAOF NO ONE");
        let sentinel = sentinel.get().expect("it was started");
        sentinel.run("SENTINEL REMOVE main");
        let port = replica.port;
        sentinel.run(&format!("SENTINEL MONITOR main 127.0.0.1 {port} 1"));
    };
    assert_one_more_burst(fail_over(true, url, promote));
}
