//! Buckets in shared memory: against this process's memory, with another process beside, and against what else
//! processes could share.

use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use callgate::{Call, Limit, Limiter};
use heed::types::Bytes;
use heed::{Database, Env, EnvOpenOptions};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::measure::Case;
use crate::peers::{self, Rate, Row};

/// Says to this program that it is the other process, and on which store.
const OTHER: &str = "CALLGATE_BENCH_STORE";

const TOOL: &str = "lookup_customer";
pub(crate) const MEMORY: &str = "memory";
pub(crate) const SHARED: &str = "**shared memory**";
const TENANT: &str = "**shared memory**, a tenant's bucket";
const TENANT_IN_MEMORY: &str = "memory, a tenant's bucket";
pub(crate) const KEYS: &str = "each its own key, admitted";
pub(crate) const HOT: &str = "both the same, rejected";

/// How long the other process calls: some time before it says so, and longer than it takes to time this one.
const WARM: Duration = Duration::from_micros(100);
const WHILE: Duration = Duration::from_millis(1);

pub(crate) const LMDB: &str = "a bucket in LMDB (heed), no sync";
pub(crate) const FILE_LOCK: &str = "a bucket in a file, locked";

/// A folder for stores, in memory.
pub(crate) fn folder() -> TempDir {
    let shm = Path::new("/dev/shm");
    let folder = if shm.is_dir() {
        tempfile::tempdir_in(shm)
    } else {
        tempfile::tempdir()
    };
    folder.expect("a folder")
}

fn limiter(url: Option<&str>, rate: Rate, burst: u32, tenants: bool) -> Limiter {
    let fields = if tenants { &["tenant"][..] } else { &[] };
    let limit: Limit = rate.limit(burst).per(fields.iter().copied());
    let builder = Limiter::builder().limit(TOOL, limit);
    let builder = match url {
        Some(url) => builder.store(url),
        None => builder,
    };
    builder.build().expect("a good limit")
}

fn url(folder: &Path, name: &str) -> String {
    format!("shm:{}/{name}", folder.display())
}

/// Calls that are admitted, or that are refused and told when to retry.
pub(crate) fn rows(folder: &Path, burst: u32) -> Vec<Row> {
    let rate = Rate::new(1, "h");
    let admits = burst > 1;
    let name = |kind: &str| url(folder, &format!("{kind}-{burst}"));
    let case = |limiter: Limiter, tenant: bool| {
        let call = move || {
            let call = Call::new(TOOL);
            if tenant {
                call.field("tenant", "acme")
            } else {
                call
            }
        };
        let _ = limiter.try_acquire(&call());
        if admits {
            Case::new(limiter, move |limiter, _| {
                limiter.try_acquire(&call()).is_admitted()
            })
        } else {
            Case::new(limiter, move |limiter, _| {
                peers::wait(&limiter.try_acquire(&call()))
            })
        }
    };
    let mut rows = vec![
        peers::clock(),
        (MEMORY, case(limiter(None, rate, burst, false), false)),
        (
            SHARED,
            case(limiter(Some(&name("one")), rate, burst, false), false),
        ),
        (
            TENANT_IN_MEMORY,
            case(limiter(None, rate, burst, true), true),
        ),
        (
            TENANT,
            case(limiter(Some(&name("each")), rate, burst, true), true),
        ),
    ];
    let lmdb = Lmdb::new(folder, burst);
    let file = Locked::new(folder, burst);
    rows.push((LMDB, Case::new(lmdb, move |lmdb, _| lmdb.draw() == admits)));
    rows.push((
        FILE_LOCK,
        Case::new(file, move |file, _| file.draw() == admits),
    ));
    rows
}

/// A token an hour, in nanoseconds.
const TOKEN: u64 = 3_600_000_000_000;

/// A bucket as one would write it.
fn draw(state: u64, now: u64, burst: u32) -> Option<u64> {
    let next = state.max(now).saturating_add(TOKEN);
    let most = now.saturating_add(TOKEN.saturating_mul(burst.into()));
    (next <= most).then_some(next)
}

struct Lmdb {
    env: Env,
    database: Database<Bytes, Bytes>,
    burst: u32,
    start: Instant,
}

impl Lmdb {
    #[expect(unsafe_code, reason = "heed maps a file that nobody else changes")]
    fn new(folder: &Path, burst: u32) -> Self {
        let path = folder.join(format!("lmdb-{burst}"));
        std::fs::create_dir(&path).expect("a folder");
        let mut options = EnvOpenOptions::new();
        // SAFETY: nobody else opens this file.
        let env = unsafe { options.flags(heed::EnvFlags::NO_SYNC).open(path) }.expect("a file");
        let mut writing = env.write_txn().expect("a transaction");
        let database = env.create_database(&mut writing, None).expect("a database");
        writing.commit().expect("written");
        Self {
            env,
            database,
            burst,
            start: Instant::now(),
        }
    }

    fn draw(&self) -> bool {
        let mut writing = self.env.write_txn().expect("a transaction");
        let now = peers::nanos(self.start.elapsed());
        let found = self
            .database
            .get(&writing, TOOL.as_bytes())
            .expect("a value");
        let state = found.map_or(0, |bytes| {
            u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
        });
        let Some(next) = draw(state, now, self.burst) else {
            return false;
        };
        let put = self
            .database
            .put(&mut writing, TOOL.as_bytes(), &next.to_ne_bytes());
        put.and_then(|()| writing.commit()).expect("written");
        true
    }
}

struct Locked {
    file: File,
    burst: u32,
    start: Instant,
}

impl Locked {
    fn new(folder: &Path, burst: u32) -> Self {
        let path: PathBuf = folder.join(format!("file-{burst}"));
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path);
        let file = file.expect("a file");
        file.write_all_at(&[0; 8], 0).expect("written");
        Self {
            file,
            burst,
            start: Instant::now(),
        }
    }

    fn draw(&self) -> bool {
        flock(&self.file, FlockOperation::LockExclusive).expect("a lock");
        let now = peers::nanos(self.start.elapsed());
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, 0).expect("8 bytes");
        let next = draw(u64::from_ne_bytes(bytes), now, self.burst);
        if let Some(next) = next {
            self.file
                .write_all_at(&next.to_ne_bytes(), 0)
                .expect("written");
        }
        flock(&self.file, FlockOperation::Unlock).expect("a lock");
        next.is_some()
    }
}

/// Another process that calls while this one is timed.
pub(crate) struct Beside {
    process: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Beside {
    fn new(url: &str, kind: &str) -> Self {
        let mut process = Command::new(env::current_exe().expect("this program"))
            .env(OTHER, format!("{kind} {url}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let stdin = process.stdin.take().expect("piped");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        Self {
            process,
            pipes: Mutex::new((stdin, stdout)),
        }
    }

    /// Does something while the other process calls.
    pub(crate) fn during<T>(&self, what: impl FnOnce() -> T) -> T {
        let mut pipes = self.pipes.lock().expect("no panic before");
        let (stdin, stdout) = &mut *pipes;
        let mut said = || stdout.read_line(&mut String::new()).expect("an answer");
        writeln!(stdin, "go").expect("a listener");
        said();
        let done = what();
        said();
        done
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A case, and another process that does the same: each its own key, or both the same that refuses.
pub(crate) fn beside(folder: &Path) -> Vec<(&'static str, Case, Beside)> {
    let pair = |name, kind: &'static str| {
        let url = url(folder, kind);
        let case = called(&url, kind, "this");
        (name, case, Beside::new(&url, kind))
    };
    vec![pair(KEYS, "keys"), pair(HOT, "hot")]
}

fn called(url: &str, kind: &str, tenant: &'static str) -> Case {
    if kind == "keys" {
        let limiter = limiter(Some(url), Rate::new(1_000_000_000, "s"), 1_000, true);
        return Case::new(limiter, move |limiter, _| {
            let call = Call::new(TOOL).field("tenant", tenant);
            limiter.try_acquire(&call).is_admitted()
        });
    }
    let limiter = limiter(Some(url), Rate::new(1, "h"), 1, false);
    let _ = limiter.try_acquire(&Call::new(TOOL));
    Case::new(limiter, |limiter, _| {
        peers::wait(&limiter.try_acquire(&Call::new(TOOL)))
    })
}

/// Is the other process, if this is one.
pub(crate) fn is_other() -> bool {
    let Ok(told) = env::var(OTHER) else {
        return false;
    };
    let (kind, url) = told.split_once(' ').expect("what to do, and where");
    let case = called(url, kind, "other");
    let mut stdout = std::io::stdout();
    let mut say = |word| writeln!(stdout, "{word}").and_then(|()| stdout.flush());
    for _ in std::io::stdin().lines().map_while(Result::ok) {
        case.run_for(WARM);
        let going = say("going");
        case.run_for(WHILE);
        if going.and_then(|()| say("done")).is_err() {
            break;
        }
    }
    true
}
