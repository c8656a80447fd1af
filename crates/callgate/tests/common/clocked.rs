//! A Redis server by whose clock it is the time that a test says: a proxy in front of it tells its script.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

#[path = "../../src/store/redis/tests/server.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod server;

use server::Server;

/// The script, which is told the time by its last two arguments.
static SCRIPT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let code = include_str!("../../src/store/redis/script.lua");
    let told = code.replace("redis.call('TIME')", "{ ARGV[#ARGV - 1], ARGV[#ARGV] }");
    assert_ne!(told, code, "no clock to replace");
    told.into_bytes()
});

/// The year 2033, in microseconds: what is kept until then does not expire while a test runs.
const START: u64 = 2_000_000_000_000_000;

/// The year 2109. The last one that the script takes is 2112.
const END: u64 = 4_400_000_000_000_000;

/// The microseconds since [`START`], by the clock of one store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    pub(crate) fn set(&self, elapsed: Duration) {
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.0.store(micros.min(END - START), Ordering::SeqCst);
    }

    fn time(&self) -> u64 {
        START + self.0.load(Ordering::SeqCst)
    }
}

thread_local! {
    /// Each test has its own, which ends with the test's thread.
    static STORES: Stores = Stores::start();
}

/// A store that is full, with a clock of its own: the URL, and the clock.
pub(crate) fn store() -> (String, Clock) {
    STORES.with(Stores::add)
}

/// Stores of one server, each with a number for its prefix.
struct Stores {
    port: u16,
    clocks: Arc<Mutex<Vec<Clock>>>,
    _server: Server,
}

impl Stores {
    fn start() -> Self {
        let server = Server::start();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let clocks = Arc::default();
        let (behind, known) = (server.port, Arc::clone(&clocks));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let clocks = Arc::clone(&known);
                // Either side may end at any time.
                thread::spawn(move || drop(relay(&client, behind, &clocks)));
            }
        });
        Self {
            port,
            clocks,
            _server: server,
        }
    }

    fn add(&self) -> (String, Clock) {
        let mut clocks = self.clocks.lock().expect("no panic");
        let (number, clock) = (clocks.len(), Clock::default());
        clocks.push(clock.clone());
        let url = format!(
            "redis://127.0.0.1:{}?prefix={number}&timeout=20s",
            self.port
        );
        (url, clock)
    }
}

fn relay(client: &TcpStream, port: u16, clocks: &Mutex<Vec<Clock>>) -> io::Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    for end in [client, &server] {
        end.set_nodelay(true)?;
    }
    let (mut replies, mut back) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || drop(io::copy(&mut replies, &mut back)));
    let mut commands = BufReader::new(client);
    loop {
        let mut words = read_command(&mut commands)?;
        if words[0].starts_with(b"EVAL") {
            let key = String::from_utf8_lossy(&words[3]).into_owned();
            let number = key.split(['{', '}']).nth(1).expect("a prefix");
            let number: usize = number.parse().expect("the number of a store");
            let time = clocks.lock().expect("no panic")[number].time();
            words[0] = b"EVAL".to_vec();
            words[1].clone_from(&SCRIPT);
            for part in [time / 1_000_000, time % 1_000_000] {
                words.push(part.to_string().into_bytes());
            }
        }
        server.write_all(&written(&words))?;
    }
}

fn read_command(commands: &mut impl BufRead) -> io::Result<Vec<Vec<u8>>> {
    let count = read_number(commands)?;
    let words = (0..count).map(|_| {
        let length = read_number(commands)?;
        let mut word = vec![0; length + 2];
        commands.read_exact(&mut word)?;
        word.truncate(length);
        Ok(word)
    });
    words.collect()
}

/// The number in a line after a letter.
fn read_number(commands: &mut impl BufRead) -> io::Result<usize> {
    let mut line = String::new();
    commands.read_line(&mut line)?;
    let number = line.get(1..).and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn written(words: &[Vec<u8>]) -> Vec<u8> {
    let mut command = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        command.extend(format!("${}\r\n", word.len()).into_bytes());
        command.extend(word);
        command.extend(b"\r\n");
    }
    command
}
