//! Processes that share a store.
//!
//! The processes are this very test binary, asked for its one test that does what it is told.
#![cfg(all(feature = "shm", target_os = "linux", not(loom)))]

use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use callgate::{Call, Decision, Inspection, Limit, Limiter, Reason, Turn};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;

const TOLD: &str = "CALLGATE_TEST_PROCESS";

/// Where the file says which boot it is of.
const BOOT_AT: u64 = 32;

/// A folder, and the URL of a store in it.
struct Place {
    folder: TempDir,
    url: String,
}

impl Place {
    fn new() -> Self {
        Self::with_slots(1024)
    }

    fn with_slots(slots: usize) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let url = format!("shm:{}/quota?slots={slots}", folder.path().display());
        Self { folder, url }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("quota.v1")
    }

    fn length(&self) -> u64 {
        fs::metadata(self.file()).expect("a file").len()
    }

    fn resize(&self, length: u64) {
        let file = fs::OpenOptions::new().write(true).open(self.file());
        file.and_then(|file| file.set_len(length)).expect("a file");
    }

    fn overwrite(&self, at: u64, bytes: &[u8]) {
        let file = fs::OpenOptions::new()
            .write(true)
            .open(self.file())
            .expect("a file");
        file.write_all_at(bytes, at).expect("written");
    }

    fn set_mode(&self, mode: u32) {
        fs::set_permissions(self.file(), fs::Permissions::from_mode(mode)).expect("a file");
    }

    /// A process that does what `does` says, once it is told so.
    fn process(&self, does: &str, time: Duration) -> Process {
        let told = format!("{does} {} {}", self.url, time.as_millis());
        let process = Command::new(env::current_exe().expect("this program"))
            .args([
                "--exact",
                "a_process",
                "--ignored",
                "--nocapture",
                "--quiet",
            ])
            .env(TOLD, told)
            .stdout(Stdio::piped())
            .spawn();
        Process(process.expect("a process"))
    }
}

/// Ends with the test, also where that fails.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        self.0.kill().expect("a process");
        self.0.wait().expect("an end");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a process says that it has counted.
fn counted(mut process: Process) -> u64 {
    let process = &mut process.0;
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

fn limiter(url: &str, name: &str, limit: Limit) -> Limiter {
    let builder = Limiter::builder().limit(name, limit).store(url);
    builder.build().expect("a store")
}

/// The bucket that all processes of these tests share: an hour's burst is all that they get.
fn one_bucket(url: &str) -> Limiter {
    limiter(url, "search", Limit::per_second(RATE).burst(BURST))
}

const RATE: u64 = 1000;
const BURST: u64 = 500;

/// Under other limits than the others have, one after another.
fn changing(url: &str, time: Duration) -> u64 {
    let started = Instant::now();
    let limiter = one_bucket(url);
    let mut admitted = 0;
    for turn in 0_u64.. {
        if started.elapsed() >= time {
            break;
        }
        let limit = Limit::per_second(1 + turn * 37 % RATE).burst(1 + turn * 17 % BURST);
        limiter
            .reload(Limiter::builder().limit("search", limit))
            .expect("limits in range");
        for _ in 0..50 {
            admitted += taken(&limiter, &Call::new("search"));
        }
    }
    admitted
}

fn taken(limiter: &Limiter, call: &Call<'_>) -> u64 {
    limiter.try_acquire(call).is_admitted().into()
}

/// Many keys come and go, under two limits a call, until it is killed.
fn churn(url: &str, time: Duration) -> u64 {
    let limiter = churned(url);
    let started = Instant::now();
    let mut seed = u64::from(std::process::id());
    let mut admitted = 0;
    while started.elapsed() < time {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let tenant = (seed >> 40).to_string();
        admitted += taken(&limiter, &Call::new("search").field("tenant", &tenant));
    }
    admitted
}

/// A fast limit for each tenant, so that cells change hands, and a slow one for all.
fn churned(url: &str) -> Limiter {
    let tools = || ["search"];
    Limiter::builder()
        .limit(
            "tenant",
            Limit::per_second(100)
                .burst(1)
                .tools(tools())
                .per(["tenant"]),
        )
        .limit("all", Limit::per_second(100_000).burst(500).tools(tools()))
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
    let count = match does {
        "hammer" => hammered(&one_bucket(url), time),
        "change" => changing(url, time),
        "churn" => churn(url, time),
        "hour" => taken(
            &limiter(url, "search", Limit::per_hour(60).burst(BURST)),
            &Call::new("search"),
        ),
        "open" => one_bucket(url).limits_of("search").len() as u64,
        other => panic!("{other}?"),
    };
    println!("counted {count}");
}

/// How many calls four threads get through.
fn hammered(limiter: &Limiter, time: Duration) -> u64 {
    let started = Instant::now();
    let admitted = || {
        let call = Call::new("search");
        let mut admitted = 0;
        while started.elapsed() < time {
            admitted += taken(limiter, &call);
        }
        admitted
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(admitted)).collect();
        let counts = threads
            .into_iter()
            .map(|thread| thread.join().expect("a count"));
        counts.sum()
    })
}

/// The most that may be admitted since then.
fn most(started: Instant) -> u64 {
    let millis = u64::try_from(started.elapsed().as_millis()).expect("short");
    BURST + RATE * (millis + 1) / 1000
}

#[test]
fn processes_share_one_quota_however_they_are_paused() {
    // A minute where there is time for it: see CONTRIBUTING.md.
    let long = env::var_os("CALLGATE_LONG_TESTS").is_some();
    let time = Duration::from_secs(if long { 60 } else { 4 });
    let place = Place::new();
    let started = Instant::now();
    let processes: Vec<_> = (0..4).map(|_| place.process("hammer", time)).collect();
    let mut random = Random(1);
    while started.elapsed() < time {
        let paused = &processes[random.below(4)];
        signal(paused, Signal::STOP);
        thread::sleep(Duration::from_micros(random.below(40_000) as u64));
        signal(paused, Signal::CONT);
    }
    let admitted: u64 = processes.into_iter().map(counted).sum();
    let due = BURST + RATE * u64::try_from(time.as_millis()).expect("short") / 1000;
    assert!(admitted <= most(started), "{admitted} of {}", most(started));
    // They end one after another: somebody is always there to take what comes.
    assert!(admitted >= due * 9 / 10, "{admitted} of {due}");
}

#[test]
fn a_change_of_limits_that_is_rolled_out_stays_within_the_larger_one() {
    let place = Place::new();
    let started = Instant::now();
    let time = Duration::from_secs(2);
    let does = ["hammer", "change", "change"];
    let processes: Vec<_> = does.iter().map(|does| place.process(does, time)).collect();
    let admitted: u64 = processes.into_iter().map(counted).sum();
    assert!(
        (BURST..=most(started)).contains(&admitted),
        "{admitted} of {}",
        most(started)
    );
}

#[test]
fn r21_processes_that_are_killed_leave_a_table_that_is_right() {
    let place = Place::new();
    let witness = churned(&place.url);
    let mut random = Random(2);
    let start = || place.process("churn", Duration::from_secs(600));
    let mut processes: Vec<_> = (0..4).map(|_| start()).collect();
    let mut unasked = 0;
    for round in 0..200 {
        thread::sleep(Duration::from_micros(random.below(15_000) as u64));
        let victim = &mut processes[random.below(4)];
        victim.kill();
        *victim = start();
        // New keys, known ones and two limits: all ways to a decision, and none of them waits long.
        let asked = Instant::now();
        let tenant = format!("witness {round}");
        let call = Call::new("search").field("tenant", &tenant);
        for _ in 0..3 {
            match witness.try_acquire(&call) {
                Decision::Admitted(_) => {}
                Decision::Rejected(rejection) => {
                    unasked += u64::from(rejection.reason == Reason::Store);
                }
            }
        }
        assert!(
            asked.elapsed() < Duration::from_secs(1),
            "round {round}: three calls took {:?}",
            asked.elapsed()
        );
    }
    drop(processes);
    drop(witness);
    // On a machine that is busy with other things, whoever has the lock may not run for 250 ms.
    assert!(unasked <= 2, "{unasked} of 600 calls were not decided");
    let inspection = Inspection::open(&place.url).expect("a store");
    assert_eq!(inspection.processes(), [], "rows of the dead");
    assert!(Some(inspection.used()) <= inspection.slots());
    // A limit that nobody drew from since is full at last, and then admits its burst and no more.
    let limiter = churned(&place.url);
    let later = limiter_now(&limiter) + Duration::from_secs(3600);
    let admit = |tenant: u32| {
        let tenant = tenant.to_string();
        let call = Call::new("search").field("tenant", &tenant);
        u64::from(limiter.try_acquire_at(&call, later).is_admitted())
    };
    assert_eq!((0..2000).map(admit).sum::<u64>(), 500);
    assert_eq!(admit(1), 0);
}

/// The time by the clock of all who share a store.
fn limiter_now(_limiter: &Limiter) -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(
        now.tv_sec.unsigned_abs(),
        now.tv_nsec.try_into().expect("nanoseconds"),
    )
}

#[test]
fn whoever_stops_with_the_lock_stops_nobody() {
    use rustix::fs::{FlockOperation, flock};
    let place = Place::new();
    let one = one_bucket(&place.url);
    let many = churned(&place.url);
    let known = Call::new("search").field("tenant", "known");
    assert!(many.try_acquire(&known).is_admitted());
    // As a process does that is stopped at the worst time.
    let file = fs::File::open(place.file()).expect("the file");
    flock(&file, FlockOperation::LockExclusive).expect("a lock");
    assert!(
        one.try_acquire(&Call::new("search")).is_admitted(),
        "one limit needs no lock"
    );
    assert!(
        !many.try_acquire(&known).is_admitted(),
        "a refusal needs none either"
    );
    let asked = Instant::now();
    let new = Call::new("search").field("tenant", "new");
    let Decision::Rejected(rejection) = many.try_acquire(&new) else {
        panic!("admitted")
    };
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Store, None)
    );
    assert!(asked.elapsed() < Duration::from_secs(2));
    flock(&file, FlockOperation::Unlock).expect("a lock");
    assert!(many.try_acquire(&new).is_admitted());
}

#[test]
fn many_who_make_a_store_at_once_make_one() {
    for _ in 0..10 {
        let place = Place::new();
        let processes: Vec<_> = (0..6)
            .map(|_| place.process("open", Duration::ZERO))
            .collect();
        let opened: u64 = processes.into_iter().map(counted).sum();
        assert_eq!(opened, 6);
        let entries = fs::read_dir(place.folder.path()).expect("the folder");
        assert_eq!(entries.count(), 1);
    }
}

#[test]
fn a_store_of_another_boot_is_replaced_once_however_many_come() {
    let place = Place::new();
    let before = one_bucket(&place.url);
    assert!(before.try_acquire(&Call::new("search")).is_admitted());
    place.overwrite(BOOT_AT, &[7; 16]);
    let processes: Vec<_> = (0..6)
        .map(|_| place.process("open", Duration::ZERO))
        .collect();
    assert_eq!(processes.into_iter().map(counted).sum::<u64>(), 6);
    let after = one_bucket(&place.url);
    assert_eq!(after.snapshot()[0].remaining, Some(BURST), "a new one");
    let entries = fs::read_dir(place.folder.path()).expect("the folder");
    assert_eq!(entries.count(), 1);
}

#[test]
fn a_folder_is_no_place_for_a_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).expect("a folder");
    let built = Limiter::builder()
        .limit("search", Limit::per_second(1))
        .store(format!("shm:{}", inner.display()))
        .build();
    let refused = built.expect_err("a folder").to_string();
    let said = format!(
        "such as '{}/callgate', got a folder itself",
        inner.display()
    );
    assert!(refused.contains(&said), "{refused}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
}

#[test]
fn a_file_that_is_not_right_is_refused_by_name() {
    type Spoil = fn(&Place);
    let cases: [(Spoil, &str); 11] = [
        (|place| place.resize(100), "got 100 bytes"),
        (
            |place| place.resize(place.length() - 1),
            "as it says itself, got ",
        ),
        (|place| place.resize(0), "got 0 bytes"),
        (
            |place| place.overwrite(0, b"otherwise"),
            "another kind of file",
        ),
        (|place| place.overwrite(8, &9_u64.to_ne_bytes()), "layout 9"),
        (
            |place| place.overwrite(24, &1_000_000_u64.to_ne_bytes()),
            "1000000 slots, as it says itself",
        ),
        (|place| place.set_mode(0o400), "of mode 0600, got 0400"),
        (|place| place.set_mode(0o666), "of mode 0600, got 0666"),
        (|place| place.set_mode(0o644), "of mode 0600, got 0644"),
        (
            |place| {
                let other = place.folder.path().join("other");
                fs::rename(place.file(), &other).expect("a file");
                std::os::unix::fs::symlink(other, place.file()).expect("a link");
            },
            "a symbolic link",
        ),
        (
            |place| {
                fs::remove_file(place.file()).expect("a file");
                fs::create_dir(place.file()).expect("a folder");
            },
            "Is a directory",
        ),
    ];
    for (spoil, why) in cases {
        let place = Place::new();
        drop(one_bucket(&place.url));
        spoil(&place);
        let limit = Limit::per_second(1);
        let built = Limiter::builder()
            .limit("search", limit)
            .store(&place.url)
            .build();
        let error = built.expect_err(why).to_string();
        assert!(
            error.contains(why) && error.contains("quota.v1"),
            "{why}: {error}"
        );
    }
}

/// What comes of a file with other bytes in it: none of the calls is to hang, to fail, or to be admitted for ever.
#[test]
fn r21_whatever_bytes_are_in_the_file_calls_are_decided() {
    // The header, the first editions, rows and cells: where each begins and how many bytes of it are used.
    let header = (0, 120);
    let editions = (4096 + 256, 5 * 256);
    let rows = (4096 + 4096 * 256, 8 * 64);
    let table = (4096 + 4096 * 256 + 1024 * 64, 64 * 32);
    let mut random = Random(3);
    for round in 0..2000 {
        let place = Place::with_slots(64);
        let (limiter, other) = (spoiled(&place.url, 3), spoiled(&place.url, 5));
        let ask = |limiter: &Limiter| {
            let tenants = ["a", "b", "c"].iter();
            let tools = ["one", "each", "both", "any"].iter();
            let asked = tools.flat_map(|tool| {
                let each = tenants.clone();
                each.map(|tenant| Call::new(tool).field("tenant", tenant))
            });
            asked.map(|call| taken(limiter, &call)).sum::<u64>()
        };
        let mut admitted = ask(&limiter);
        let (at, length) = [header, editions, rows, table][round % 4];
        let mut bytes = vec![0; 1 << random.below(6)];
        let kind = random.below(4);
        for byte in &mut bytes {
            *byte = [
                0,
                255,
                128,
                u8::try_from(random.below(256)).expect("a byte"),
            ][kind];
        }
        place.overwrite((at + random.below(length)) as u64, &bytes);
        for limiter in [&limiter, &other] {
            admitted += (0..20).map(|_| ask(limiter)).sum::<u64>();
            let _ = limiter.pause("any", Duration::from_millis(1), None);
            let _ = limiter.snapshot();
        }
        // The bursts of all buckets, twice, and once more for each bucket of whom nothing is known.
        assert!(admitted <= 400, "round {round}: {admitted}");
        if let Ok(inspection) = Inspection::open(&place.url) {
            let _ = inspection.buckets();
            let _ = inspection.bucket("each", &Call::new("each").field("tenant", "a"));
            drop(format!("{inspection:?}"));
        }
        let limits = || Limiter::builder().limit("one", Limit::per_day(2).burst(2));
        let _ = limiter.reload(limits());
        let _ = limits().store(&place.url).build();
    }
}

/// Limits of each kind: all of one bucket, split, and both of these at once.
fn spoiled(url: &str, burst: u64) -> Limiter {
    let limit = || Limit::per_day(1).burst(burst);
    Limiter::builder()
        .limit("one", limit())
        .limit("each", limit().per(["tenant"]))
        .limit("both, each", limit().tools(["both"]).per(["tenant"]))
        .limit("both, all", limit().tools(["both"]))
        .default_limit(limit())
        .store(url)
        .build()
        .expect("a store")
}

#[test]
fn a_url_that_is_wrong_says_what_is_allowed() {
    for (url, why) in [
        ("shm:callgate", "the whole path of a file"),
        ("shm:/run/callgate/", "the whole path of a file"),
        ("shm:/dev/shm/x?slots=63", "N from 64 to 16777216"),
        ("shm:/dev/shm/x?slots=16777217", "N from 64 to 16777216"),
        ("shm:/dev/shm/x?slots=many", "N from 64 to 16777216"),
        ("shm:/dev/shm/x?size=64", "N from 64 to 16777216"),
        ("shm:/no/such/folder/x", "a folder that exists"),
        ("shm:/proc/x", "got "),
        ("http://127.0.0.1", "a store's URL"),
        ("memory", "a store's URL"),
    ] {
        let built = Limiter::builder()
            .limit("search", Limit::per_second(1))
            .store(url)
            .build();
        let error = built.expect_err(url).to_string();
        assert!(
            error.starts_with("store must be ") && error.contains(why),
            "{url}: {error}"
        );
    }
    let builder = Limiter::builder().limit("search", Limit::per_second(1));
    let error = builder
        .store("shm:/dev/shm/x")
        .clock(|| Duration::ZERO)
        .build();
    assert!(
        error
            .expect_err("two clocks")
            .to_string()
            .starts_with("clock must be left out")
    );
}

#[test]
fn a_reload_keeps_the_store_and_takes_no_other() {
    let place = Place::new();
    let limiter = one_bucket(&place.url);
    let reload = |url: Option<&str>| {
        let builder = Limiter::builder().limit("search", Limit::per_hour(1).burst(5));
        limiter.reload(match url {
            Some(url) => builder.store(url),
            None => builder,
        })
    };
    assert_eq!(reload(None), Ok(()));
    assert_eq!(reload(Some(&place.url)), Ok(()));
    let error = reload(Some("shm:/dev/shm/other"))
        .expect_err("another store")
        .to_string();
    assert!(error.contains("'shm:/dev/shm/other'"), "{error}");
    assert_eq!(limiter.snapshot()[0].remaining, Some(5));
}

#[test]
fn when_the_table_is_full_new_keys_share_one_bucket_and_known_ones_keep_theirs() {
    let place = Place::with_slots(64);
    let limiter = limiter(
        &place.url,
        "search",
        Limit::per_day(1).burst(3).per(["tenant"]),
    );
    let acquire = |tenant: u32| {
        let tenant = tenant.to_string();
        taken(&limiter, &Call::new("search").field("tenant", &tenant))
    };
    let admitted: u64 = (0..1000).map(acquire).sum();
    // A cell's window is half of this table: nearly all are taken, and three tokens are for all the rest.
    assert!((56..=64 + 3).contains(&admitted), "{admitted}");
    assert_eq!(
        (0..1000).skip(900).map(acquire).sum::<u64>(),
        0,
        "shared, and empty"
    );
    assert_eq!(acquire(0) + acquire(0) + acquire(0), 2, "its own");
}

#[test]
fn a_store_that_is_removed_goes_on_for_those_who_have_it() {
    let place = Place::new();
    let (one, other) = (one_bucket(&place.url), one_bucket(&place.url));
    fs::remove_file(place.file()).expect("a file");
    assert_eq!(
        (0..BURST)
            .map(|_| taken(&one, &Call::new("search")))
            .sum::<u64>(),
        BURST
    );
    assert!(other.snapshot()[0].remaining < Some(BURST));
    let later = one_bucket(&place.url);
    assert_eq!(later.snapshot()[0].remaining, Some(BURST), "another file");
}

#[test]
#[ignore = "needs root, to mount a small disk: make test runs it"]
fn as_root_a_disk_that_is_full_is_told_when_the_store_is_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(folder.path())
        .status();
    assert!(mount.is_ok_and(|status| status.success()), "mounted");
    let url = format!("shm:{}/quota", folder.path().display());
    let built = Limiter::builder()
        .limit("search", Limit::per_second(1))
        .store(url)
        .build();
    let left = fs::read_dir(folder.path()).expect("the folder").count();
    let unmounted = Command::new("umount").arg(folder.path()).status();
    let error = built.expect_err("no room").to_string();
    assert!(error.contains("No space left on device"), "{error}");
    assert_eq!(left, 0, "nothing half made");
    assert!(unmounted.is_ok_and(|status| status.success()));
}

#[test]
#[ignore = "needs root, to have another time: make test runs it"]
fn as_root_a_time_namespace_does_not_change_the_time() {
    let place = Place::new();
    let limit = || Limit::per_hour(60).burst(BURST);
    let here = limiter(&place.url, "search", limit());
    assert_eq!(
        (0..BURST)
            .map(|_| taken(&here, &Call::new("search")))
            .sum::<u64>(),
        BURST
    );
    // A day ahead.
    let told = format!("hour {} 0", place.url);
    let output = Command::new("unshare")
        .args(["--time", "--boottime", "86400", "--fork", "--"])
        .arg(env::current_exe().expect("this program"))
        .args([
            "--exact",
            "a_process",
            "--ignored",
            "--nocapture",
            "--quiet",
        ])
        .env(TOLD, told)
        .output();
    let output = output.expect("unshare");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("counted 0"), "{output:?}");
}

#[test]
fn a_pause_holds_for_all_processes_and_resumes_empty() {
    let place = Place::new();
    let limits = || {
        Limiter::builder()
            .limit("search", Limit::per_second(10).burst(10))
            .default_limit(Limit::per_second(10).burst(10))
            .store(&place.url)
            .build()
            .expect("a store")
    };
    let (one, other) = (limits(), limits());
    let now = limiter_now(&one);
    let at = |seconds: u64| now + Duration::from_secs(seconds);
    for tool in ["search", "unlisted"] {
        let call = Call::new(tool);
        assert!(other.try_acquire_at(&call, at(0)).is_admitted());
        one.pause_at(tool, Duration::from_secs(10), None, at(0))
            .expect("a pause");
        let Decision::Rejected(rejection) = other.try_acquire_at(&call, at(4)) else {
            panic!("paused")
        };
        assert_eq!(rejection.reason, Reason::Paused);
        assert_eq!(rejection.retry_after, Some(Duration::from_millis(6_100)));
        let Decision::Rejected(rejection) = other.try_acquire_at(&call, at(10)) else {
            panic!("empty")
        };
        assert_eq!(rejection.reason, Reason::Rate);
        let admitted = (0..20).filter(|_| other.try_acquire_at(&call, at(11)).is_admitted());
        assert_eq!(admitted.count(), 10, "what came since");
        let admitted = (0..20).filter(|_| other.try_acquire_at(&call, at(40)).is_admitted());
        assert_eq!(admitted.count(), 10);
    }
    assert!(
        other
            .try_acquire_at(&Call::new("another"), at(4))
            .is_admitted(),
        "only the tool pauses"
    );
}

#[test]
fn a_limit_that_other_fields_split_starts_as_the_emptiest() {
    let place = Place::new();
    let of = |per: &[&str]| {
        let limit = Limit::per_day(1).burst(10).per(per.iter().copied());
        limiter(&place.url, "search", limit)
    };
    let tenants = of(&["tenant"]);
    let call = Call::new("search")
        .field("tenant", "acme")
        .field("user", "ann");
    assert_eq!((0..7).map(|_| taken(&tenants, &call)).sum::<u64>(), 7);
    let users = of(&["user"]);
    assert_eq!((0..10).map(|_| taken(&users, &call)).sum::<u64>(), 3);
    let all = of(&[]);
    assert_eq!(taken(&all, &call), 0);
    // And back: none is fuller than what was spent in the meantime allows.
    let again = of(&["tenant"]);
    let other = Call::new("search").field("tenant", "other");
    assert_eq!(taken(&again, &call) + taken(&again, &other), 0);
}

#[test]
fn who_gives_up_waiting_is_not_counted_as_waiting() {
    let place = Place::new();
    let limit = Limit::per_second(1).max_wait(Duration::from_secs(60));
    let limiter = limiter(&place.url, "search", limit);
    let call = Call::new("search");
    assert_eq!(taken(&limiter, &call), 1);
    let waiting = || {
        let inspection = Inspection::open(&place.url).expect("a store");
        inspection.processes()[0].waiting
    };
    let mut turn = Turn::default();
    assert!(
        limiter
            .poll_acquire(&call, &mut turn, Waker::noop())
            .is_pending()
    );
    assert_eq!(waiting(), 1);
    drop(turn);
    assert_eq!(waiting(), 0);
}

/// Numbers for pauses; the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % most
    }
}

fn signal(Process(process): &Process, signal: Signal) {
    // One that has ended is still there until it is waited for.
    kill_process(Pid::from_child(process), signal).expect("a process");
}
