//! A server of a test's own: `redis-server`, or the program that `CALLGATE_REDIS_SERVER` names.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use redis::{Client, Connection, IntoConnectionInfo, RedisConnectionInfo, Value};

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// Ends with the test.
pub(super) struct Server {
    process: Child,
    pub(super) port: u16,
    /// For its socket, and whatever it writes.
    pub(super) folder: PathBuf,
    pub(super) arguments: Vec<String>,
}

impl Server {
    pub(super) fn start() -> Self {
        Self::with(&[])
    }

    /// With more arguments.
    pub(super) fn with(arguments: &[&str]) -> Self {
        let folder = new_folder();
        Self::run_in(folder, arguments)
    }

    /// A sentinel that knows one server.
    pub(super) fn sentinel(service: &str, port: u16) -> Self {
        let folder = new_folder();
        let text = format!("sentinel monitor {service} 127.0.0.1 {port} 1\n");
        fs::write(folder.join("sentinel.conf"), text).expect("a file");
        Self::run_in(folder, &["sentinel.conf", "--sentinel"])
    }

    fn run_in(folder: PathBuf, arguments: &[&str]) -> Self {
        let arguments: Vec<_> = arguments.iter().map(ToString::to_string).collect();
        // Others may take the port before the server does.
        let started = (0..10).find_map(|_| {
            let port = free_port();
            Some((port, run(port, &folder, &arguments)?))
        });
        let (port, process) = started.expect("the server starts");
        Self {
            process,
            port,
            folder,
            arguments,
        }
    }

    /// Ends it at once; what it held is gone.
    pub(super) fn stop(&mut self) {
        self.process.kill().expect("it was not waited for");
        self.process.wait().expect("it ends");
    }

    /// What it answers to a command, in words.
    pub(super) fn text(&self, command: &str) -> String {
        match self.run(command) {
            Value::Int(number) => number.to_string(),
            other => redis::from_redis_value(other).expect("a text"),
        }
    }

    /// Waits until it answers with this in it.
    pub(super) fn wait_for(&self, command: &str, text: &str) {
        let started = Instant::now();
        while !self.text(command).contains(text) {
            assert!(started.elapsed() < PATIENCE, "{command} never told {text}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has so many connections, with one that asks.
    pub(super) fn wait_for_clients(&self, count: usize) {
        self.wait_for("INFO clients", &format!("connected_clients:{count}\r"));
    }

    /// Sends it a signal.
    pub(super) fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.expect("a kill command").success());
    }

    /// Starts it where it was.
    pub(super) fn restart(&mut self) {
        let process = run(self.port, &self.folder, &self.arguments);
        self.process = process.expect("its port is still free");
    }

    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// A plain connection to it, which asks nothing by itself.
    pub(super) fn connect(&self) -> Connection {
        let server = self.url().into_connection_info().expect("a URL");
        let plain = RedisConnectionInfo::default().set_skip_set_lib_name();
        let client = Client::open(server.set_redis_settings(plain)).expect("a URL");
        client.get_connection().expect("it listens")
    }

    /// Runs a command on a connection of its own.
    pub(super) fn run(&self, command: &str) -> Value {
        let mut words = command.split(' ');
        let mut command = redis::cmd(words.next().expect("a word"));
        let command = words.fold(&mut command, |command, word| command.arg(word));
        command.query(&mut self.connect()).expect("no error")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have been ended by the test.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn new_folder() -> PathBuf {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("callgate-redis-{}-{number}", process::id()));
        // This file may be there several times in one program, and count anew each time.
        match fs::create_dir(&folder) {
            Ok(()) => return folder,
            Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}"),
        }
    }
}

/// A port that nobody listens at.
pub(super) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// A server that listens, unless it ended at once.
fn run(port: u16, folder: &Path, arguments: &[String]) -> Option<Child> {
    let program = env::var("CALLGATE_REDIS_SERVER");
    let mut process = Command::new(program.as_deref().unwrap_or("redis-server"))
        // A file comes before options.
        .args(arguments)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--unixsocket", "socket"])
        .current_dir(folder)
        .stdout(Stdio::null())
        .spawn()
        .expect("these tests need redis-server on the PATH (Debian: apt install redis-server)");
    let started = Instant::now();
    // Nobody else listens at its socket.
    while UnixStream::connect(folder.join("socket")).is_err() {
        if process.try_wait().expect("a process").is_some() {
            return None;
        }
        assert!(started.elapsed() < PATIENCE, "the server does not listen");
        thread::sleep(Duration::from_millis(5));
    }
    Some(process)
}
