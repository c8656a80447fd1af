//! The short way of a thread that waits: when it is taken, and what becomes of calls on it.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::thread;
use std::time::Instant;

use super::super::link::Link;
use super::link::{PATIENCE, link, listen, logged, patient, proxy, read_command, recovered, token};
use super::server::{Server, free_port};
use super::*;

/// Long enough for a call that goes well.
const SOON: &str = "timeout=500ms";

/// What is left after the token that it admits.
fn taken(link: &Link, burst: u64) -> u64 {
    let answer = link.ask_blocking(token(burst)).expect("an answer");
    assert!(answer.is_admitted);
    answer.limits[0].tokens
}

/// A link with a lane beside its connection, by which two tokens of "tool" were taken.
fn with_lane(server: &Server, link: Link, burst: u64) -> Link {
    taken(&link, burst);
    taken(&link, burst);
    wait_for_ways(server, 2);
    link
}

/// The connections by which tokens were taken, from the first one on: a lane's comes after that which it is beside.
fn ways(server: &Server) -> Vec<String> {
    let list = server.text("CLIENT LIST");
    let lines = list.lines().filter(|line| line.contains(" cmd=eval"));
    let ids = lines.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    ids.map(str::to_owned).collect()
}

/// Waits until there are so many of them.
fn wait_for_ways(server: &Server, count: usize) {
    let started = Instant::now();
    while ways(server).len() != count {
        let found = ways(server);
        assert!(started.elapsed() < Duration::from_secs(30), "{found:?}");
    }
}

/// Ends one of them while nobody asks, and for a while more.
fn kill(server: &Server, id: &String) {
    server.run(&format!("CLIENT KILL ID {id}"));
    let killed = Instant::now();
    while ways(server).contains(id) || killed.elapsed() < Duration::from_millis(2) {}
}

const ADMITTED: &[u8] = b"*5\r\n:1\r\n:0\r\n:0\r\n:0\r\n:0\r\n";

fn admit(mut stream: &TcpStream) -> io::Result<()> {
    stream.write_all(ADMITTED)
}

/// Takes every proof, and does with calls what it is told to.
fn serve(stream: &TcpStream, mut answer: impl FnMut(&TcpStream) -> io::Result<()>) {
    let mut writer = stream;
    let mut reader = BufReader::new(stream);
    while let Some(command) = read_command(&mut reader) {
        let answered = match &*command[0] {
            b"HELLO" => writer.write_all(b"%1\r\n$5\r\nproto\r\n:3\r\n"),
            _ if command.iter().any(|word| word == b"take") => answer(stream),
            _ => writer.write_all(b"+OK\r\n"),
        };
        if answered.is_err() {
            return;
        }
    }
}

/// A server that admits calls on its first connection, and answers those on the others as it is told. Counts the
/// calls on each.
fn beside(
    answer: impl Fn(&TcpStream) -> io::Result<()> + Send + Sync + 'static,
) -> (u16, Arc<Mutex<Vec<usize>>>) {
    let counts = Arc::new(Mutex::new(Vec::new()));
    let counted = Arc::clone(&counts);
    let port = listen(move |stream| {
        let lock = || counted.lock().expect("no panic");
        let mut counts = lock();
        let number = counts.len();
        counts.push(0);
        drop(counts);
        serve(&stream, |stream| {
            lock()[number] += 1;
            if number == 0 {
                admit(stream)
            } else {
                answer(stream)
            }
        });
    });
    (port, counts)
}

/// A server that admits calls on its first connection, and does with the others what it is told to.
fn first(others: impl Fn(&TcpStream) + Send + Sync + 'static) -> u16 {
    let is_first = AtomicBool::new(true);
    listen(move |stream| {
        if is_first.swap(false, Ordering::SeqCst) {
            serve(&stream, admit);
        } else {
            others(&stream);
        }
    })
}

fn local(port: u16, timeout: &str) -> Link {
    link(&format!("redis://127.0.0.1:{port}?prefix=test&{timeout}"))
}

#[test]
fn who_waits_alone_asks_on_a_connection_of_its_own_but_for_the_first_times() {
    let (port, calls) = beside(admit);
    let link = local(port, PATIENCE);
    for _ in 0..10 {
        taken(&link, 1);
    }
    // Before there was a connection, and while the lane was made.
    assert_eq!(*calls.lock().expect("no panic"), [2, 8]);
    let counts = link.counts();
    assert_eq!((counts.answered, counts.failed), (10, 0));
}

#[test]
fn who_runs_in_a_runtime_goes_by_the_link() {
    let (port, calls) = beside(admit);
    let link = local(port, PATIENCE);
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async {
        for _ in 0..10 {
            taken(&link, 1);
        }
    });
    assert_eq!(*calls.lock().expect("no panic"), [10]);
}

#[test]
fn many_threads_at_once_are_admitted_what_there_is_on_both_ways() {
    let server = Server::start();
    let link = with_lane(&server, patient(&server), 1_000);
    let (admitted, starts) = (AtomicUsize::new(0), Barrier::new(8));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                starts.wait();
                for _ in 0..200 {
                    let answer = link.ask_blocking(token(1_000)).expect("an answer");
                    admitted.fetch_add(usize::from(answer.is_admitted), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(admitted.into_inner(), 998);
    let counts = link.counts();
    assert_eq!((counts.answered, counts.failed), (1_602, 0));
    assert_eq!(ways(&server).len(), 2);
}

#[test]
fn who_finds_the_lane_taken_goes_by_the_link() {
    let (asked, was_asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let (asked, answers) = (Mutex::new(asked), Mutex::new(answers));
    let (port, calls) = beside(move |stream| {
        let _ = asked.lock().expect("no panic").send(());
        let _ = answers.lock().expect("no panic").recv();
        admit(stream)
    });
    let link = local(port, PATIENCE);
    taken(&link, 1);
    taken(&link, 1);
    thread::scope(|scope| {
        let first = scope.spawn(|| taken(&link, 1));
        was_asked.recv().expect("a call on the lane");
        taken(&link, 1);
        answer.send(()).expect("it waits");
        first.join().expect("no panic");
    });
    assert_eq!(*calls.lock().expect("no panic"), [3, 1]);
}

#[test]
fn r27_a_script_that_was_flushed_is_loaded_by_the_lane_and_the_call_charged_once() {
    let server = Server::start();
    let link = with_lane(&server, patient(&server), 100);
    for taken in 3..10 {
        server.run("SCRIPT FLUSH");
        assert_eq!(self::taken(&link, 100), 100 - taken);
    }
    assert_eq!((link.counts().failed, ways(&server).len()), (0, 2));
}

#[test]
fn r30_a_server_that_stands_still_costs_who_waits_one_deadline() {
    let server = Server::start();
    logged(server.port);
    let url = format!("{}?prefix=test&{SOON}", server.url());
    let link = with_lane(&server, link(&url), 100);
    server.signal("STOP");
    let failures = (0..100).map(|_| link.ask_blocking(token(100)).expect_err("it stands still"));
    let late = failures.filter(|failure| matches!(failure, Failure::Late));
    assert_eq!(late.count(), 1);
    assert!(link.counts().is_down);
    let logged = logged(server.port);
    assert!(
        logged.len() == 1 && logged[0].ends_with("is down: no answer in 500ms"),
        "{logged:?}"
    );
    server.signal("CONT");
    assert!(recovered(&link, &token(100)).is_admitted);
}

#[test]
fn r30_bytes_that_trickle_in_are_no_answer() {
    let (port, _) = beside(|mut stream| {
        stream.write_all(b"*5\r\n:1\r\n:")?;
        loop {
            thread::sleep(Duration::from_millis(10));
            stream.write_all(b"0")?;
        }
    });
    let link = local(port, SOON);
    taken(&link, 1);
    taken(&link, 1);
    let late = link.ask_blocking(token(1)).expect_err("no answer");
    assert!(matches!(late, Failure::Late), "{late}");
    // The link gives its own connection up, which is as good as before.
    let next = link.ask_blocking(token(1)).expect_err("down");
    assert!(
        matches!(&next, Failure::Down { reason, .. } if &**reason == "no answer in 500ms"),
        "{next}"
    );
    let counts = link.counts();
    assert_eq!((counts.answered, counts.failed), (2, 2));
}

#[test]
fn a_lane_on_which_the_store_answers_with_errors_or_nonsense_takes_the_link_down() {
    for (reply, reason) in [
        (
            b"-LOADING Redis is loading the dataset in memory\r\n".as_slice(),
            "LOADING",
        ),
        (b"-MOVED 6918 127.0.0.1:1\r\n", "MOVED"),
        (b"-NOSCRIPT No matching script.\r\n", "NOSCRIPT"),
        (b"*1\r\n:1\r\n", "makes no sense"),
    ] {
        let (port, _) = beside(move |mut stream| stream.write_all(reply));
        let link = local(port, PATIENCE);
        taken(&link, 1);
        taken(&link, 1);
        let failure = link.ask_blocking(token(1)).expect_err(reason).to_string();
        assert!(failure.contains(reason), "{failure}, not {reason}");
        let next = link.ask_blocking(token(1)).expect_err(reason);
        assert!(matches!(next, Failure::Down { .. }), "{reason}: {next}");
    }
}

#[test]
fn a_lane_that_ends_or_is_garbled_fails_one_call() {
    for (reply, ends) in [(b"*5\r\n:1\r\n:".as_slice(), true), (b"?what\r\n", false)] {
        let (port, calls) = beside(move |mut stream| {
            stream.write_all(reply)?;
            if ends {
                stream.shutdown(Shutdown::Both)?;
            }
            Ok(())
        });
        let link = local(port, PATIENCE);
        taken(&link, 1);
        taken(&link, 1);
        let failure = link.ask_blocking(token(1)).expect_err("no answer");
        assert!(matches!(failure, Failure::Lost), "{failure}");
        // The rest goes by the link.
        for _ in 0..10 {
            taken(&link, 1);
        }
        assert_eq!(*calls.lock().expect("no panic"), [12, 1]);
        let counts = link.counts();
        assert_eq!((counts.failed, counts.is_down), (1, false));
    }
}

#[test]
fn r27_a_server_that_became_a_replica_is_left_by_who_waits() {
    let server = Server::start();
    let link = with_lane(&server, patient(&server), 100);
    server.run(&format!("REPLICAOF 127.0.0.1 {}", free_port()));
    let first = link.ask_blocking(token(100)).expect_err("refused");
    assert!(first.to_string().contains("READONLY"), "{first}");
    let next = link.ask_blocking(token(100)).expect_err("down");
    assert!(matches!(next, Failure::Down { .. }), "{next}");
    server.run("REPLICAOF NO ONE");
    assert_eq!(recovered(&link, &token(100)).limits[0].tokens, 97);
}

#[test]
fn what_a_key_holds_fails_its_own_calls_alone_on_the_lane() {
    let server = Server::start();
    let link = with_lane(&server, patient(&server), 100);
    let keys = Keys::new("test").expect("a prefix");
    let bucket = keys.bucket("bad", []);
    server.run(&format!("SET {bucket} rubbish"));
    let bad = take(&[ask(&keys, "bad", &Limit::per_second(1), 1)]);
    let failure = link.ask_blocking(bad).expect_err("no bucket").to_string();
    assert!(failure.contains(&*bucket), "{failure}");
    assert_eq!(taken(&link, 100), 97);
    assert_eq!((link.counts().is_down, ways(&server).len()), (false, 2));
}

#[test]
fn a_call_whose_answer_was_lost_on_the_lane_is_charged_once_and_not_sent_again() {
    let server = Server::start();
    for round in 0..5 {
        let cuts = Arc::new(AtomicUsize::new(0));
        let port = proxy(server.port, &cuts);
        let link = with_lane(&server, local(port, PATIENCE), 1_000);
        cuts.store(1, Ordering::SeqCst);
        let failure = link.ask_blocking(token(1_000)).expect_err("cut off");
        assert!(matches!(failure, Failure::Lost), "{failure}");
        // It is no failure of the store: the link's connection is as good as before.
        assert_eq!(taken(&link, 1_000), 1_000 - 4 * (round + 1));
        let counts = link.counts();
        assert_eq!((counts.failed, counts.is_down), (1, false));
    }
}

#[test]
fn a_lane_that_ended_while_nobody_asked_fails_no_call() {
    let server = Server::start();
    for _ in 0..5 {
        let link = with_lane(&server, patient(&server), 100);
        let [.., lane] = &ways(&server)[..] else {
            panic!("no lane");
        };
        kill(&server, lane);
        taken(&link, 100);
        assert_eq!(link.counts().failed, 0);
    }
}

#[test]
fn r27_after_a_restart_who_waits_has_a_lane_again() {
    let mut server = Server::start();
    let link = with_lane(&server, patient(&server), 100);
    server.stop();
    while !link.counts().is_down {
        link.ask_blocking(token(100)).expect_err("nobody is there");
    }
    server.restart();
    assert_eq!(recovered(&link, &token(100)).limits[0].tokens, 99);
    let link = with_lane(&server, link, 100);
    assert_eq!(taken(&link, 100), 96);
}

#[test]
fn r27_a_lane_asks_no_old_primary_after_a_failover() {
    let [old, new] = [Server::start(), Server::start()];
    let sentinel = Server::sentinel("main", old.port);
    let url = format!(
        "redis+sentinel://127.0.0.1:{}/main?prefix=test&{PATIENCE}",
        sentinel.port
    );
    let link = with_lane(&old, link(&url), 100);
    assert_eq!(taken(&link, 100), 97);
    // The old one still takes writes, and the lane is still there.
    sentinel.run("SENTINEL REMOVE main");
    sentinel.run(&format!("SENTINEL MONITOR main 127.0.0.1 {} 1", new.port));
    kill(&old, &ways(&old)[0]);
    new.wait_for("CLIENT LIST TYPE normal", "cmd=eval");
    // All of it is there, by the link and by the lane.
    for left in [99, 98, 97] {
        assert_eq!(taken(&link, 100), left);
    }
    wait_for_ways(&old, 0);
}

#[test]
fn where_there_is_no_room_for_a_lane_nobody_notices() {
    let (refused, was_refused) = mpsc::channel();
    let port = first(move |mut stream| {
        let _ = stream.write_all(b"-ERR max number of clients reached\r\n");
        let _ = refused.send(());
    });
    let link = local(port, PATIENCE);
    for _ in 0..20 {
        taken(&link, 1);
    }
    assert_eq!(link.counts().failed, 0);
    // It is not tried with each call.
    drop(link);
    assert_eq!(was_refused.try_iter().count(), 1);
}

#[test]
fn a_lane_that_cannot_be_made_in_time_fails_no_call() {
    let port = first(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let link = local(port, SOON);
    for _ in 0..20 {
        taken(&link, 1);
    }
    let counts = link.counts();
    assert_eq!((counts.answered, counts.failed), (20, 0));
}

#[test]
fn a_link_that_is_closed_or_dropped_leaves_no_lane() {
    let server = Server::start();
    let link = with_lane(&server, patient(&server), 100);
    link.close();
    let next = link.ask_blocking(token(100)).expect_err("closed");
    assert!(matches!(next, Failure::Lost), "{next}");
    wait_for_ways(&server, 0);
    let link = with_lane(&server, patient(&server), 100);
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    // Where nothing may be waited for.
    runtime.expect("a runtime").block_on(async { drop(link) });
    wait_for_ways(&server, 0);
}
