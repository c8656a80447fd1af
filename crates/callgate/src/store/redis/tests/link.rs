//! The way to the store: what it does when all is well, and when anything is not.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, mpsc};
use std::task::{Wake, Waker};
use std::thread;
use std::time::Instant;

use super::super::address::Address;
use super::super::link::Link;
use super::server::{Server, free_port};
use super::*;

/// Longer than anything takes that goes well.
pub(super) const PATIENCE: &str = "timeout=20s";

pub(super) fn link(url: &str) -> Link {
    Link::new(Address::parse(url).expect("a URL"))
}

pub(super) fn patient(server: &Server) -> Link {
    link(&format!("{}?prefix=test&{PATIENCE}", server.url()))
}

/// Asks as those do who do not wait in their thread.
fn by_link(link: &Link, request: Request) -> Result<Answer, Failure> {
    let (answer, answered) = mpsc::channel();
    link.ask(request, move |result| {
        answer.send(result).expect("it waits");
        None
    });
    answered.recv().expect("an answer")
}

/// A token of "tool", of which there are so many and no more.
pub(super) fn token(burst: u64) -> Request {
    let keys = Keys::new("test").expect("a prefix");
    take(&[ask(&keys, "tool", &Limit::per_day(1).burst(burst), 1)])
}

/// The whole tokens that are left of so many.
pub(super) fn left(link: &Link, burst: u64) -> u64 {
    let Request::Take(asks) = token(burst) else {
        unreachable!("it is one");
    };
    let answer = by_link(link, Request::Peek(asks));
    answer.expect("an answer").limits[0].tokens
}

pub(super) fn is_admitted(link: &Link, burst: u64) -> bool {
    let answer = by_link(link, token(burst));
    answer.expect("an answer").is_admitted
}

/// Asks until the store is back; says what it answered first.
pub(super) fn recovered(link: &Link, request: &Request) -> Answer {
    let started = Instant::now();
    loop {
        match by_link(link, request.clone()) {
            Ok(answer) => return answer,
            Err(failure) => {
                assert!(started.elapsed() < Duration::from_secs(30), "{failure}");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// What was logged about a store; it is told apart from others by its port.
pub(super) fn logged(port: u16) -> Vec<String> {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    static INSTALLED: Once = Once::new();
    struct Lines;
    impl log::Log for Lines {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            LINES
                .lock()
                .expect("no panic")
                .push(record.args().to_string());
        }
        fn flush(&self) {}
    }
    INSTALLED.call_once(|| {
        log::set_logger(&Lines).expect("the only one");
        log::set_max_level(log::LevelFilter::Warn);
    });
    let lines = LINES.lock().expect("no panic");
    let of_port = lines.iter().filter(|line| line.contains(&port.to_string()));
    of_port.cloned().collect()
}

#[test]
fn r11_clients_share_a_bucket_by_the_clock_of_the_server() {
    let server = Server::start();
    // No request holds a time.
    let [a, b] = [patient(&server), patient(&server)];
    let admitted = [&a, &a, &a, &a, &a, &a, &a, &a, &b, &a, &b];
    let admitted: Vec<_> = admitted.iter().map(|link| is_admitted(link, 4)).collect();
    assert_eq!(admitted[..4], [true; 4]);
    assert_eq!(admitted[4..], [false; 7]);
}

#[test]
fn a_socket_a_user_and_a_database_are_reached() {
    let users = "--user app on >pa@ss ~{test}:* +@all --user default off";
    let server = Server::with(&users.split(' ').collect::<Vec<_>>());
    let socket = server.folder.join("socket");
    let socket = socket.display();
    let unix = link(&format!(
        "unix://app:pa%40ss@{socket}?prefix=test&db=2&{PATIENCE}"
    ));
    let tcp = link(&format!(
        "redis://app:pa%40ss@localhost:{}/2?prefix=test&{PATIENCE}",
        server.port
    ));
    let other = link(&format!(
        "redis://app:pa%40ss@localhost:{}/0?prefix=test&{PATIENCE}",
        server.port
    ));
    assert!(is_admitted(&unix, 1));
    assert!(!is_admitted(&tcp, 1));
    assert!(is_admitted(&other, 1));
    for (url, reason) in [
        (
            format!("redis://app:wrong@localhost:{}?prefix=test", server.port),
            "WRONGPASS",
        ),
        (
            format!("redis://localhost:{}?prefix=test", server.port),
            "NOAUTH",
        ),
        (
            format!("redis://app:pa%40ss@localhost:{}?prefix=other", server.port),
            "NOPERM",
        ),
    ] {
        let failure = by_link(&link(&url), token(1))
            .expect_err("refused")
            .to_string();
        assert!(failure.contains(reason), "{failure}");
        assert!(
            !failure.contains("wrong") && !failure.contains("pa@ss"),
            "{failure}"
        );
    }
}

#[test]
fn many_calls_at_once_are_each_answered_once_and_admit_what_there_is() {
    let server = Server::start();
    let link = patient(&server);
    let (answered, answers) = mpsc::channel();
    for _ in 0..5_000 {
        let answered = answered.clone();
        link.ask(token(1_000), move |answer| {
            answered
                .send(answer.expect("an answer").is_admitted)
                .expect("it waits");
            None
        });
    }
    drop(answered);
    let answers: Vec<_> = answers.iter().collect();
    assert_eq!(answers.len(), 5_000);
    assert_eq!(answers.iter().filter(|admitted| **admitted).count(), 1_000);
    let counts = link.counts();
    assert_eq!(
        (counts.answered, counts.failed, counts.is_down),
        (5_000, 0, false)
    );
    assert!(!counts.time.is_zero());
}

#[test]
fn r27_a_script_that_was_flushed_is_loaded_again_and_the_call_charged_once() {
    let server = Server::start();
    let link = patient(&server);
    assert!(is_admitted(&link, 100));
    for taken in 2..10 {
        server.run("SCRIPT FLUSH");
        assert!(is_admitted(&link, 100));
        assert_eq!(left(&link, 100), 100 - taken);
    }
    server.run("SCRIPT FLUSH");
    // Many at once, none of which the server knows.
    let (answered, answers) = mpsc::channel();
    for _ in 0..300 {
        let answered = answered.clone();
        link.ask(token(100), move |answer| {
            answered
                .send(answer.expect("an answer").is_admitted)
                .expect("it waits");
            None
        });
    }
    drop(answered);
    assert_eq!(answers.iter().filter(|admitted| *admitted).count(), 91);
    assert_eq!(link.counts().failed, 0);
}

#[test]
fn equal_calls_that_wait_together_are_one_run_of_the_script() {
    let server = Server::start();
    let link = patient(&server);
    let keys = Keys::new("test").expect("a prefix");
    let limit = Limit::per_day(1).burst(100);
    let kinds = [("tool", 1), ("tool", 2), ("other", 1)];
    let kinds = kinds.map(|(name, cost)| take(&[ask(&keys, name, &limit, cost)]));
    let (sender, answered) = mpsc::channel();
    // There is no connection yet: all go out together, or nearly so.
    for call in 0..300 {
        let sender = sender.clone();
        link.ask(kinds[call % 3].clone(), move |result| {
            let answer = result.expect("an answer");
            sender.send((call % 3, answer)).expect("it is awaited");
            None
        });
    }
    drop(sender);
    let mut left = [Vec::new(), Vec::new(), Vec::new()];
    for (kind, answer) in &answered {
        if answer.is_admitted {
            left[kind].push(answer.limits[0].tokens);
        }
    }
    // Each call is told what it left behind, and of "tool" all was given away.
    assert!(left[2].iter().copied().eq((0..100).rev()), "{left:?}");
    assert_eq!(left[0].len() + 2 * left[1].len(), 100, "{left:?}");
    let runs = server.text("INFO commandstats");
    let calls = |name: &str| {
        let told = runs.lines().find_map(|told| told.strip_prefix(name));
        let calls = told.and_then(|told| told.split(['=', ',']).nth(1)?.parse().ok());
        calls.unwrap_or(0_u32)
    };
    let runs = calls("cmdstat_eval:") + calls("cmdstat_evalsha:");
    assert!(runs < 100, "{runs} runs for 300 calls");
}

#[test]
fn r27_a_server_that_restarts_is_found_again_and_told_of_once() {
    let mut server = Server::start();
    logged(server.port);
    let link = patient(&server);
    assert!(is_admitted(&link, 1));
    for round in 1..=2 {
        server.stop();
        let mut failures = 0;
        while failures < 100 {
            failures += usize::from(by_link(&link, token(1)).is_err());
        }
        assert!(link.counts().is_down);
        server.restart();
        assert!(recovered(&link, &token(1)).is_admitted);
        let logged = logged(server.port);
        assert_eq!(logged.len(), 2 * round, "{logged:?}");
        assert!(
            logged[2 * round - 2].contains("is down: ")
                && logged[2 * round - 1].contains("answers again")
        );
    }
}

#[test]
fn r27_a_server_that_became_a_replica_is_left_until_it_takes_writes() {
    let server = Server::start();
    logged(server.port);
    let link = patient(&server);
    assert!(is_admitted(&link, 3));
    server.run(&format!("REPLICAOF 127.0.0.1 {}", free_port()));
    let first = by_link(&link, token(3)).expect_err("refused").to_string();
    assert!(first.contains("READONLY"), "{first}");
    for _ in 0..20 {
        let failure = by_link(&link, token(3)).expect_err("down");
        let is_down = matches!(failure, Failure::Down { retry, .. } if retry.as_secs() < 4);
        assert!(is_down, "{failure}");
    }
    server.run("REPLICAOF NO ONE");
    assert!(recovered(&link, &token(3)).is_admitted);
    assert_eq!(left(&link, 3), 1);
    let logged = logged(server.port);
    assert_eq!(logged.len(), 2, "{logged:?}");
}

#[test]
fn who_waits_on_the_links_own_thread_is_answered_at_once() {
    let server = Server::start();
    let link = Arc::new(patient(&server));
    let (sender, answered) = mpsc::channel();
    let there = Arc::clone(&link);
    // As a logger may, to which that thread speaks.
    link.ask(token(9), move |_| {
        let failure = there.ask_blocking(token(9)).err();
        sender.send(failure).expect("it waits");
        None
    });
    let failure = answered.recv_timeout(Duration::from_secs(30));
    assert!(matches!(failure, Ok(Some(Failure::Lost))), "{failure:?}");
    assert!(is_admitted(&link, 9));
}

#[test]
fn a_user_who_may_not_ask_by_hash_is_down_and_not_up_in_between() {
    let users = "--user app on nopass ~{test}:* +@all -evalsha --user default off";
    let server = Server::with(&users.split(' ').collect::<Vec<_>>());
    logged(server.port);
    let link = link(&format!(
        "redis://app:x@127.0.0.1:{}?prefix=test&{PATIENCE}",
        server.port
    ));
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(600) {
        let failure = link.ask_blocking(token(1)).expect_err("not allowed");
        assert!(failure.to_string().contains("NOPERM"), "{failure}");
    }
    let logged = logged(server.port);
    assert_eq!(logged.len(), 1, "{logged:?}");
}

#[test]
fn a_server_without_memory_charges_no_limit_of_a_call() {
    let server = Server::start();
    let link = patient(&server);
    assert!(is_admitted(&link, 3));
    server.run("CONFIG SET maxmemory 1");
    let keys = Keys::new("test").expect("a prefix");
    let limit = Limit::per_day(1).burst(3);
    let both = take(&[
        ask(&keys, "tool", &limit, 1),
        ask(&keys, "other", &limit, 1),
    ]);
    let failure = by_link(&link, both.clone())
        .expect_err("no memory")
        .to_string();
    assert!(failure.contains("OOM"), "{failure}");
    server.run("CONFIG SET maxmemory 0");
    let answer = recovered(&link, &both);
    assert!(
        answer.limits.iter().map(|found| found.tokens).eq([1, 2]),
        "{answer:?}"
    );
}

#[test]
fn what_a_key_holds_fails_its_own_calls_alone() {
    let server = Server::start();
    let link = patient(&server);
    let keys = Keys::new("test").expect("a prefix");
    let bucket = keys.bucket("bad", []);
    server.run(&format!("SET {bucket} rubbish"));
    let bad = take(&[ask(&keys, "bad", &Limit::per_second(1), 1)]);
    let failure = by_link(&link, bad).expect_err("no bucket").to_string();
    assert!(failure.contains(&*bucket), "{failure}");
    assert!(is_admitted(&link, 1));
    assert!(!link.counts().is_down);
}

/// Accepts connections and does with them what it is told to, each on a thread.
pub(super) fn listen(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(stream));
        }
    });
    port
}

/// What one dead store does to calls that come one after the other: the first may wait, for its deadline.
fn first_late_then_down(port: u16) {
    let link = link(&format!(
        "redis://127.0.0.1:{port}?prefix=test&timeout=50ms"
    ));
    let mut late = 0;
    for _ in 0..100 {
        match by_link(&link, token(1)) {
            Err(Failure::Late) => late += 1,
            Err(Failure::Down { .. } | Failure::Lost) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(late <= 1, "{late} calls waited");
    let counts = link.counts();
    assert_eq!(
        (counts.answered, counts.failed, counts.is_down),
        (0, 100, true)
    );
}

#[test]
fn r30_a_listener_that_says_nothing_costs_one_deadline() {
    logged(0);
    let port = listen(|stream| {
        // Until the other side has had enough.
        let _ = (&stream).read_to_end(&mut Vec::new());
    });
    first_late_then_down(port);
    let logged = logged(port);
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert!(logged[0].contains("no answer in 50ms"), "{logged:?}");
}

#[test]
fn r30_a_port_that_refuses_costs_nothing() {
    let port = free_port();
    let link = link(&format!("redis://127.0.0.1:{port}?prefix=test&{PATIENCE}"));
    for _ in 0..100 {
        let failure = by_link(&link, token(1)).expect_err("nobody is there");
        assert!(matches!(failure, Failure::Down { .. }), "{failure}");
    }
}

#[test]
fn r30_a_server_that_stands_still_costs_one_deadline_and_is_found_again() {
    let server = Server::start();
    let link = link(&format!("{}?prefix=test&timeout=200ms", server.url()));
    recovered(&link, &token(100));
    server.signal("STOP");
    let failures: Vec<_> = (0..100)
        .map(|_| by_link(&link, token(100)).expect_err("it stands still"))
        .collect();
    let late = failures
        .iter()
        .filter(|failure| matches!(failure, Failure::Late));
    assert_eq!(late.count(), 1);
    server.signal("CONT");
    assert!(recovered(&link, &token(100)).is_admitted);
}

/// Passes all on to a server, until it is told to cut its client off once that one's next command was
/// answered.
pub(super) fn proxy(server: u16, cuts: &Arc<AtomicUsize>) -> u16 {
    let cuts = Arc::clone(cuts);
    listen(move |client| {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).expect("it listens");
        let (mut from_client, mut to_server) = (&client, &server);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut from_server, mut to_client) = (&server, &client);
                let mut bytes = [0; 4_096];
                while let Ok(count @ 1..) = from_server.read(&mut bytes) {
                    let cut = |cuts: usize| cuts.checked_sub(1);
                    if cuts
                        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, cut)
                        .is_ok()
                    {
                        break;
                    }
                    if to_client.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(std::net::Shutdown::Both);
                let _ = server.shutdown(std::net::Shutdown::Both);
            });
            let _ = std::io::copy(&mut from_client, &mut to_server);
            let _ = server.shutdown(std::net::Shutdown::Both);
        });
    })
}

#[test]
fn a_call_whose_answer_was_lost_is_charged_once_and_not_sent_again() {
    let server = Server::start();
    let cuts = Arc::new(AtomicUsize::new(0));
    let port = proxy(server.port, &cuts);
    let direct = patient(&server);
    let link = link(&format!("redis://127.0.0.1:{port}?prefix=test&{PATIENCE}"));
    for round in 1..10 {
        assert!(recovered(&link, &token(1_000)).is_admitted);
        cuts.store(1, Ordering::SeqCst);
        let failure = by_link(&link, token(1_000)).expect_err("cut off");
        assert!(matches!(failure, Failure::Lost), "{failure}");
        // A new connection is made at once: it is no failure of the store.
        assert!(is_admitted(&link, 1_000));
        assert_eq!(left(&direct, 1_000), 1_000 - 3 * round);
    }
    assert!(!link.counts().is_down);
}

#[test]
fn an_idle_connection_that_ends_fails_no_call() {
    let server = Server::start();
    let link = patient(&server);
    for _ in 0..5 {
        assert!(is_admitted(&link, 100));
        server.run("CLIENT KILL TYPE normal");
        // And asks this, alone until the link has a new connection.
        server.wait_for_clients(2);
    }
    assert_eq!(link.counts().failed, 0);
}

#[test]
fn a_server_that_ends_each_connection_is_not_run_after() {
    let (ended, was_ended) = mpsc::channel();
    let port = listen(move |stream| {
        let mut reader = std::io::BufReader::new(&stream);
        for reply in [b"%1\r\n$5\r\nproto\r\n:3\r\n".as_slice(), b"+OK\r\n"] {
            read_command(&mut reader);
            let _ = (&stream).write_all(reply);
        }
        drop(stream);
        let _ = ended.send(());
    });
    let link = link(&format!("redis://127.0.0.1:{port}?prefix=test&{PATIENCE}"));
    by_link(&link, token(1)).expect_err("no answer");
    // The call's connection, and one to find out whether the store is back. Nobody asks for a third.
    for _ in 0..2 {
        let patience = Duration::from_secs(30);
        was_ended.recv_timeout(patience).expect("a connection");
    }
    let third = was_ended.recv_timeout(Duration::from_millis(200));
    assert!(third.is_err(), "a connection that nobody asked for");
    by_link(&link, token(1)).expect_err("no answer");
}

/// A server that takes every proof, and answers calls as it is told.
fn answers(reply: &'static [u8]) -> u16 {
    listen(move |stream| {
        let mut reader = std::io::BufReader::new(&stream);
        while let Some(command) = read_command(&mut reader) {
            let is_call = command.iter().any(|word| word == b"take");
            let reply = match &*command[0] {
                b"HELLO" => b"%1\r\n$5\r\nproto\r\n:3\r\n",
                _ if is_call => reply,
                _ => b"+OK\r\n",
            };
            if (&stream).write_all(reply).is_err() {
                return;
            }
        }
    })
}

pub(super) fn read_command(reader: &mut impl std::io::BufRead) -> Option<Vec<Vec<u8>>> {
    let number = |reader: &mut dyn std::io::BufRead| {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        line.get(1..)?.trim().parse::<usize>().ok()
    };
    let count = number(reader)?;
    let word = |_| {
        let mut word = vec![0; number(reader)? + 2];
        reader.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        Some(word)
    };
    (0..count).map(word).collect()
}

#[test]
fn a_store_that_answers_with_errors_or_nonsense_is_down_until_it_does_not() {
    for (reply, reason) in [
        (
            b"-LOADING Redis is loading the dataset in memory\r\n".as_slice(),
            "LOADING",
        ),
        (b"-CLUSTERDOWN The cluster is down\r\n", "CLUSTERDOWN"),
        (
            b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
            "TRYAGAIN",
        ),
        (b"-ASK 1 127.0.0.1:1\r\n", "ASK"),
        (b"-MISCONF Errors writing to the AOF file\r\n", "MISCONF"),
        (
            b"-NOREPLICAS Not enough good replicas to write.\r\n",
            "NOREPLICAS",
        ),
        (b"-NOPERM this user has no permissions\r\n", "NOPERM"),
        (b"-NOSCRIPT No matching script.\r\n", "NOSCRIPT"),
        (b"-BUSY Redis is busy running a script.\r\n", "BUSY"),
        (b"-ERR user_script:1: what\r\n", "what"),
        (b"*1\r\n:1\r\n", "makes no sense"),
        (b":1\r\n", "makes no sense"),
        (b"$-1\r\n", "makes no sense"),
        (b"?what\r\n", ""),
    ] {
        let link = link(&format!(
            "redis://127.0.0.1:{}?prefix=test&{PATIENCE}",
            answers(reply)
        ));
        let failure = by_link(&link, token(1)).expect_err(reason);
        assert!(
            failure.to_string().contains(reason),
            "{failure}, not {reason}"
        );
        let next = by_link(&link, token(1)).expect_err(reason);
        assert!(matches!(next, Failure::Down { .. }), "{reason}: {next}");
    }
}

#[test]
fn an_answer_that_comes_too_late_is_none() {
    // Proves itself at once, and then takes its time.
    let port = listen(|stream| {
        let mut reader = std::io::BufReader::new(&stream);
        while let Some(command) = read_command(&mut reader) {
            let reply = match &*command[0] {
                b"HELLO" => b"%1\r\n$5\r\nproto\r\n:3\r\n".as_slice(),
                b"EVAL" => b"+OK\r\n",
                _ => {
                    thread::sleep(Duration::from_millis(400));
                    b"*5\r\n:1\r\n:0\r\n:0\r\n:0\r\n:0\r\n"
                }
            };
            if (&stream).write_all(reply).is_err() {
                return;
            }
        }
    });
    first_late_then_down_after_proof(port);
}

#[test]
fn a_call_that_is_late_before_it_is_sent_is_no_outage() {
    let server = Server::start();
    logged(server.port);
    let link = link(&format!("{}?prefix=test&timeout=500ms", server.url()));
    assert!(is_admitted(&link, 3));
    let (stands, stood) = mpsc::channel();
    let (go_on, told) = mpsc::channel::<()>();
    link.ask(token(3), move |_| {
        // The link's thread comes no further.
        stands.send(()).expect("it waits");
        let _ = told.recv();
        None
    });
    stood.recv().expect("an answer");
    let (answer, answered) = mpsc::channel();
    link.ask(token(3), move |result| {
        answer.send(result).expect("it waits");
        None
    });
    thread::sleep(Duration::from_millis(500));
    drop(go_on);
    let late = answered.recv().expect("an answer").expect_err("late");
    assert!(matches!(late, Failure::Late), "{late}");
    // It was not sent.
    assert_eq!(left(&link, 3), 1);
    assert!(logged(server.port).is_empty());
}

fn first_late_then_down_after_proof(port: u16) {
    let link = link(&format!(
        "redis://127.0.0.1:{port}?prefix=test&timeout=100ms"
    ));
    let first = by_link(&link, token(1)).expect_err("late");
    assert!(matches!(first, Failure::Late), "{first}");
    let next = by_link(&link, token(1)).expect_err("down");
    assert!(
        matches!(next, Failure::Down { .. } | Failure::Lost),
        "{next}"
    );
}

#[test]
fn a_link_that_is_closed_answers_who_waits_or_is_late_and_ends_its_thread() {
    let (closed, was_closed) = mpsc::channel();
    let port = listen(move |mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
        let _ = closed.send(());
    });
    logged(port);
    let link = link(&format!(
        "redis://127.0.0.1:{port}?prefix=test&timeout=200ms"
    ));
    let (answered, answers) = mpsc::channel();
    for _ in 0..10 {
        let answered = answered.clone();
        link.ask(token(1), move |answer| {
            answered.send(answer).expect("it waits");
            None
        });
    }
    drop(answered);
    link.close();
    let next = by_link(&link, token(1)).expect_err("closed");
    assert!(matches!(next, Failure::Lost));
    let failures: Vec<_> = answers
        .iter()
        .map(|answer| answer.expect_err("nobody answers"))
        .collect();
    assert!(
        failures.len() == 10
            && failures
                .iter()
                .all(|failure| matches!(failure, Failure::Late | Failure::Down { .. }))
    );
    was_closed
        .recv_timeout(Duration::from_secs(30))
        .expect("the connection is closed");
    assert_is_told(port);
}

/// That a store is down, once, in good time.
fn assert_is_told(port: u16) {
    let started = Instant::now();
    while logged(port).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(30), "not told");
        thread::sleep(Duration::from_millis(1));
    }
    let logged = logged(port);
    assert!(
        logged.len() == 1 && logged[0].contains("is down: no answer in 200ms"),
        "{logged:?}"
    );
}

#[test]
fn a_link_that_is_closed_tells_that_what_was_asked_before_was_not_answered() {
    let server = Server::start();
    logged(server.port);
    let link = link(&format!("{}?prefix=test&timeout=200ms", server.url()));
    let _ = recovered(&link, &token(9));
    assert_eq!(logged(server.port).len() % 2, 0);
    server.signal("STOP");
    link.ask(token(9), |_| None);
    link.close();
    let last = || logged(server.port).pop();
    let is_told = || last().is_some_and(|line| line.contains("is down: no answer in 200ms"));
    let started = Instant::now();
    while !is_told() {
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", last());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_link_that_is_closed_is_told_what_the_store_answers_to_what_was_asked_before() {
    let server = Server::start();
    let (answered, answers) = mpsc::channel();
    let link = patient(&server);
    for _ in 0..300 {
        let answered = answered.clone();
        link.ask(token(200), move |answer| {
            let _ = answered.send(answer.expect("an answer").is_admitted);
            None
        });
    }
    link.close();
    drop(answered);
    assert_eq!(answers.iter().filter(|admitted| *admitted).count(), 200);
    // The one that looks.
    server.wait_for_clients(1);
}

#[test]
fn those_who_hear_of_a_batch_are_woken_when_all_its_answers_are_there() {
    struct Listener(Arc<AtomicUsize>, Mutex<mpsc::Sender<usize>>);
    impl Wake for Listener {
        fn wake(self: Arc<Self>) {
            let answers = self.0.load(Ordering::SeqCst);
            self.1
                .lock()
                .expect("no panic")
                .send(answers)
                .expect("it waits");
        }
    }
    let server = Server::start();
    let link = patient(&server);
    assert!(is_admitted(&link, 1_000));
    let (sender, counts) = mpsc::channel();
    let answers = Arc::new(AtomicUsize::new(0));
    let waker = Waker::from(Arc::new(Listener(Arc::clone(&answers), Mutex::new(sender))));
    // While the server is stopped, many come together.
    server.signal("STOP");
    for _ in 0..100 {
        let (answers, waker) = (Arc::clone(&answers), waker.clone());
        link.ask(token(1_000), move |_| {
            answers.fetch_add(1, Ordering::SeqCst);
            Some(waker)
        });
    }
    server.signal("CONT");
    let found: Vec<_> = counts.iter().take(100).collect();
    let is_together = |answers: &[usize]| answers[0] == answers[1];
    assert!(found.windows(2).any(is_together), "{found:?}");
    assert!(found.is_sorted(), "{found:?}");
}

#[test]
fn a_link_that_is_not_used_connects_to_nothing_and_shows_no_password() {
    let port = listen(|_| panic!("a connection"));
    let link = link(&format!("redis://u:secret@127.0.0.1:{port}?prefix=test"));
    assert!(!format!("{link:?}").contains("secret"));
    assert_eq!(link.counts().answered, 0);
}
