//! `top` and `store` against stores that processes share.
#![cfg(target_os = "linux")]
#![expect(clippy::needless_raw_string_hashes, reason = "so snapbox writes them")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::num::NonZero;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use callgate::Call;
use common::{limiter, run};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use snapbox::{assert_data_eq, str};

const CALLGATE: &str = env!("CARGO_BIN_EXE_callgate");

/// A test that hangs fails instead.
const DEADLINE: Duration = Duration::from_secs(60);

/// A folder with a store in it that another process uses.
struct Shared {
    folder: tempfile::TempDir,
    process: Child,
    /// Kept, since it says how it ends.
    _said: BufReader<ChildStdout>,
}

impl Shared {
    /// The process has made three calls of lookup, one of which was refused, and two of crm by a tenant.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "process", "--ignored", "--nocapture"])
            .env("STORE", Self::url_in(folder.path()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let out = process.stdout.take().expect("its output");
        let mut said = BufReader::new(out);
        let mut lines = said.by_ref().lines().map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with("ready")));
        Self {
            folder,
            process,
            _said: said,
        }
    }

    fn url_in(folder: &Path) -> String {
        format!("shm:{}/callgate?slots=64", folder.display())
    }

    fn url(&self) -> String {
        Self::url_in(self.folder.path())
    }

    fn path(&self) -> String {
        self.folder.path().join("callgate").display().to_string()
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("callgate.v1")
    }

    fn pid(&self) -> u64 {
        self.process.id().into()
    }

    /// A text without what differs from run to run.
    fn same(&self, text: &str) -> String {
        let pid = format!("{:>7}", self.pid());
        let text = text
            .replace(&self.folder.path().display().to_string(), "[folder]")
            .replace(&pid, "  [pid]")
            .replace(&self.pid().to_string(), "[pid]");
        let is_key =
            |word: &&str| word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let keys: Vec<_> = text.split_whitespace().filter(is_key).collect();
        keys.iter()
            .fold(text.clone(), |text, key| text.replace(key, "[key]"))
    }

    fn end(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().expect("its end");
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
#[ignore = "is the process that uses a store"]
fn process() {
    let limiter = limiter(&std::env::var("STORE").expect("a store"));
    for call in [
        Call::new("lookup"),
        Call::new("lookup"),
        Call::new("lookup"),
        Call::new("crm").field("tenant", "acme"),
        Call::new("crm").field("tenant", "acme"),
        Call::new("other"),
    ] {
        let _ = limiter.try_acquire(&call);
    }
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_store_is_printed_with_its_limits_processes_and_buckets() {
    let shared = Shared::new();
    let printed = str![[r#"
[folder]/callgate.v1: 4 limits, 1 process, 2 of 64 slots taken

limit      rate    level  admitted  rejected  waiting  per
lookup     1/day     0/2         2         1        0
crm        10/day  of 20         2         0        0  tenant
search     1/day    of 5         0         0        0  tenant, user
[default]  1/day    of 3         1         0        0  tool

process  limit      rate    admitted  rejected  waiting
  [pid]  lookup     1/day          2         1        0
  [pid]  crm        10/day         2         0        0
  [pid]  search     1/day          0         0        0
  [pid]  [default]  1/day          1         0        0

bucket of  key                               level
[default]  [key]    2/3
crm        [key]  18/20

"#]];
    let file = shared.file().display().to_string();
    for args in [
        &["top", "--once", &shared.path()][..],
        &["top", "--once", &shared.url()],
        &["store", "inspect", &file],
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, &*err), (0, ""), "{args:?}");
        assert_data_eq!(shared.same(&out), printed.clone());
    }
}

#[test]
fn the_json_has_every_count_and_level() {
    let shared = Shared::new();
    let (code, out, err) = run(&["top", "--once", "--json", &shared.path(), "/nowhere/else"]);
    assert_eq!(code, 1);
    assert!(err.contains("/nowhere/else"), "{err}");
    let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let store = &json["stores"][0];
    assert_eq!(store["path"], shared.file().display().to_string());
    assert_eq!((&store["slots"], &store["used"]), (&64.into(), &2.into()));
    assert_data_eq!(
        store["limits"][0].to_string(),
        str![[
            r#"{"admitted":2,"burst":2,"name":"lookup","paused":null,"per":[],"rate":"1/day","rejected":1,"remaining":0,"waiting":0}"#
        ]]
    );
    assert_data_eq!(
        shared.same(&store["processes"][1].to_string()),
        str![[
            r#"{"admitted":2,"burst":20,"host":null,"limit":"crm","pid":[pid],"rate":"10/day","rejected":0,"told":null,"waiting":0}"#
        ]]
    );
    let buckets = store["buckets"].as_array().expect("buckets");
    let crm = buckets
        .iter()
        .find(|bucket| bucket["limit"] == "crm")
        .expect("a bucket");
    assert_eq!(
        (&crm["remaining"], &crm["burst"], &crm["paused"]),
        (&18.into(), &20.into(), &serde_json::Value::Null)
    );
    assert_eq!(json["stores"][1]["path"], "/nowhere/else");
    assert!(json["stores"][1]["error"].is_string());
}

#[test]
fn a_tenants_bucket_is_found_by_the_tenants_name_alone() {
    let shared = Shared::new();
    let level = |fields: &[&str]| {
        let path = shared.path();
        let args = [&["top", "--once", "--json", &path], fields].concat();
        let (code, out, err) = run(&args);
        assert_eq!(code, 0, "{err}");
        assert!(!out.contains("acme"));
        let json: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        let buckets = json["stores"][0]["buckets"]
            .as_array()
            .expect("buckets")
            .clone();
        let level =
            |bucket: &serde_json::Value| format!("{} {}", bucket["limit"], bucket["remaining"]);
        (
            buckets.iter().map(level).collect::<Vec<_>>().join(", "),
            err,
        )
    };
    let unclear = "warning: limit 'search' is split by user too: give --field user=...\n";
    assert_eq!(
        level(&["--tenant", "acme"]),
        ("\"crm\" 18".into(), unclear.into())
    );
    assert_eq!(level(&["--tenant", "other"]).0, "\"crm\" 20");
    assert_eq!(
        level(&["--field", "tenant=acme", "--field", "user=ada"]).0,
        "\"crm\" 18, \"search\" 5"
    );
    assert_eq!(
        level(&["--field", "tool=other"]),
        ("\"[default]\" 2".into(), String::new())
    );
    assert_eq!(
        level(&["--field", "region=eu"]),
        (String::new(), String::new())
    );
}

#[test]
fn what_is_no_store_is_refused_and_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("text.v1"), "hello").expect("a file");
    fs::write(at("zeros.v1"), vec![0; 1 << 20]).expect("a file");
    fs::create_dir(at("folder.v1")).expect("a folder");
    let (real, other) = (at("real"), at("real.v2"));
    drop(limiter(&format!("shm:{}", real.display())));
    fs::copy(at("real.v1"), &other).expect("a copy");
    std::os::unix::fs::symlink(at("real.v1"), at("link.v1")).expect("a link");
    for name in ["text", "zeros", "folder", "link", "real.v2", "none"] {
        let path = at(name).display().to_string();
        for args in [
            &["store", "remove", "--force", &path][..],
            &["store", "inspect", &path],
            &["top", "--once", &path],
        ] {
            let (code, out, err) = run(args);
            assert_eq!((code, &*out), (1, ""), "{args:?}");
            assert!(
                err.starts_with("error: ") && err.lines().count() == 1,
                "{err}"
            );
            assert!(err.contains(&path), "{err}");
        }
    }
    for name in [
        "text.v1",
        "zeros.v1",
        "folder.v1",
        "link.v1",
        "real.v1",
        "real.v2",
    ] {
        assert!(at(name).exists(), "{name}");
    }
}

#[test]
fn a_store_in_use_is_removed_only_by_force() {
    let mut shared = Shared::new();
    let (code, out, err) = run(&["store", "remove", &shared.path()]);
    assert_eq!((code, &*out), (1, ""));
    assert_data_eq!(
        shared.same(&err),
        str![[r#"
error: '[folder]/callgate.v1' is in use by process [pid]: stop it first, or give --force

"#]]
    );
    assert!(shared.file().exists());

    let (code, out, _) = run(&["store", "remove", "--force", &shared.path()]);
    assert_eq!(code, 0);
    assert_data_eq!(
        shared.same(&out),
        str![[r#"
removed [folder]/callgate.v1: 4 limits, 1 process, 2 of 64 slots taken
still in use by process [pid]

"#]]
    );
    assert!(!shared.file().exists());

    shared.end();
    drop(limiter(&shared.url()));
    let (code, out, err) = run(&["store", "remove", &shared.url()]);
    assert_eq!((code, &*err), (0, ""));
    assert!(out.starts_with("removed "), "{out}");
    assert!(!shared.file().exists());
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    for (args, said) in [
        (&["top"][..], "<PATH>..."),
        (&["top", "--json", "/x"], "--once"),
        (&["top", "--interval", "0s", "/x"], "from 100ms to 1h"),
        (&["top", "--interval", "soon", "/x"], "from 100ms to 1h"),
        (&["top", "--once", "--field", "tenant", "/x"], "FIELD=VALUE"),
        (
            &[
                "top", "--once", "--tenant", "a", "--field", "tenant=b", "/x",
            ],
            "given twice",
        ),
        (&["top", "--once", "/x?slots=64"], "give its URL"),
        (&["store", "remove"], "<PATH>"),
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, &*out), (2, ""), "{args:?}");
        assert!(err.contains(said), "{args:?}: {err}");
    }
}

#[test]
fn without_a_terminal_it_is_said_how_to_look_once() {
    let output = Command::new(CALLGATE)
        .args(["top", "/x"])
        .stdin(Stdio::null())
        .output()
        .expect("the command");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("give --once"));
}

/// `callgate top` on a terminal, and what the terminal shows.
struct Live {
    pty: Option<pty_process::blocking::Pty>,
    process: Child,
    before: String,
    /// The thread that reads what is written, and whether it is to end.
    reading: Option<(thread::JoinHandle<()>, Arc<AtomicBool>)>,
    bytes: Receiver<Vec<u8>>,
    terminal: vt100::Parser,
}

impl Live {
    fn new(args: &[&str]) -> Self {
        let [rows, columns] = [24, 80].map(|size| NonZero::new(size).expect("a size"));
        let (pty, pts) = pty_process::blocking::open().expect("a terminal");
        pty.resize(pty_process::Size::new(rows.get(), columns.get()))
            .expect("its size");
        let before = Self::modes(&pty);
        let command = pty_process::blocking::Command::new(CALLGATE);
        let command = command.arg("top").args(["--interval", "100ms"]).args(args);
        let process = command.spawn(pts).expect("the command");
        let mut reader = fs::File::from(rustix::io::dup(&pty).expect("the terminal"));
        let (sender, bytes) = channel();
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&is_closed);
        let reading = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while !closed.load(Ordering::Relaxed) {
                // Nobody can end a read of another thread.
                let mut polled = [PollFd::new(&reader, PollFlags::IN)];
                let moment = Timespec {
                    tv_sec: 0,
                    tv_nsec: 10_000_000,
                };
                if poll(&mut polled, Some(&moment)) == Ok(0) {
                    continue;
                }
                match reader.read(&mut buffer) {
                    Ok(length @ 1..) if sender.send(buffer[..length].to_vec()).is_ok() => {}
                    _ => break,
                }
            }
        });
        Self {
            pty: Some(pty),
            process,
            before,
            reading: Some((reading, is_closed)),
            bytes,
            terminal: vt100::Parser::new(rows, columns, 0),
        }
    }

    /// How the terminal treats what is typed and written.
    fn modes(pty: &pty_process::blocking::Pty) -> String {
        let modes = rustix::termios::tcgetattr(pty).expect("its modes");
        let (input, output, local) = (modes.input_modes, modes.output_modes, modes.local_modes);
        format!("{input:?} {output:?} {local:?}")
    }

    fn press(&mut self, keys: &str) {
        let pty = self.pty.as_mut().expect("a terminal");
        pty.write_all(keys.as_bytes()).expect("a reader");
    }

    /// Waits until the screen has a text.
    fn expect(&mut self, text: &str) {
        let end = Instant::now() + DEADLINE;
        while !self.terminal.screen().contents().contains(text) {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(bytes) = self.bytes.recv_timeout(left) else {
                panic!("no '{text}' on:\n{}", self.terminal.screen().contents());
            };
            self.terminal.process(&bytes);
        }
    }

    /// Closes the window.
    fn hang_up(&mut self) {
        if let Some((reading, closed)) = self.reading.take() {
            closed.store(true, Ordering::Relaxed);
            reading.join().expect("its end");
        }
        self.pty = None;
    }

    /// The exit code as shells say it, after everything was given back.
    fn end(mut self) -> Option<i32> {
        let status = self.process.wait().expect("its end");
        if let Some(pty) = self.pty.take() {
            while let Ok(bytes) = self.bytes.recv_timeout(DEADLINE) {
                self.terminal.process(&bytes);
            }
            let screen = self.terminal.screen();
            assert!(!screen.alternate_screen() && !screen.hide_cursor());
            assert_eq!(Self::modes(&pty), self.before);
        }
        status.code().or(status.signal().map(|signal| 128 + signal))
    }
}

#[test]
fn watching_changes_no_byte_of_the_store() {
    let shared = Shared::new();
    let before = fs::read(shared.file()).expect("the store");
    let path = shared.path();
    let mut live = Live::new(&[&path]);
    live.expect("lookup");
    live.expect("per tenant");
    live.press("\t");
    live.expect(&shared.pid().to_string());
    live.press("\t");
    live.expect("18/20");
    live.press("/default\r");
    live.expect("only those with 'default'");
    live.press("q");
    assert_eq!(live.end(), Some(0));
    assert_eq!(
        run(&["top", "--once", "--json", "--tenant", "acme", &path]).0,
        0
    );
    assert_eq!(run(&["store", "inspect", &path]).0, 0);
    assert!(fs::read(shared.file()).expect("the store") == before);
}

#[test]
fn a_store_may_come_go_and_be_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = Shared::url_in(folder.path());
    let mut live = Live::new(&[&url]);
    live.expect("waiting for a store");
    let first = limiter(&url);
    live.expect("1 process");
    assert_eq!(run(&["store", "remove", "--force", &url]).0, 0);
    live.expect("waiting for a store");
    let _second = limiter(&url);
    live.expect("another file since");
    live.press("\u{3}");
    assert_eq!(live.end(), Some(0));
    drop(first);
}

#[test]
fn a_signal_gives_the_terminal_back() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut live = Live::new(&["/nowhere"]);
        live.expect("waiting for a store");
        kill_process(Pid::from_child(&live.process), signal).expect("a process");
        assert_eq!(live.end(), Some(code));
    }
}

#[test]
fn a_terminal_that_is_closed_ends_it() {
    let mut live = Live::new(&["/nowhere"]);
    live.expect("waiting for a store");
    live.hang_up();
    assert_eq!(live.end(), Some(129));
}
