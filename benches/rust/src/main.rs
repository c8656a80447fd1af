//! What a decision costs, against reading the clock and against other crates, as tables in
//! Markdown: `cargo run --release -p callgate-bench`.

mod exact;
mod measure;
mod mutex;
mod peers;
mod redis;
mod report;
mod several;
mod shared;
mod simulate;
mod tenants;

use std::alloc::System;
use std::time::Duration;

use cap::Cap;
use exact::Trial;
use measure::{Case, Cost, Figure, ROUNDS};
use peers::{Rate, Row};
use report::{Column, ratio, target, worst};
use simulate::Measured;
use tenants::{ARRAY, ARRAYS, CALLGATE, KINDS, LIMITERS, REFILLED};

/// Counts what is on the heap: one addition more for each allocation, which is 5 ns or so.
#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

/// Tokens for as many calls as this program makes.
const PLENTY: u32 = 4_000_000_000;

/// Two rates at which a nanosecond brings a whole number of callgate's units, and two at which not.
const FAST: [Rate; 4] = [
    Rate::new(1_000_000_000, "s"),
    Rate::new(1, "s"),
    Rate::new(7, "s"),
    Rate::new(700, "min"),
];

/// One of each, at which nothing comes in while this program runs.
const SLOW: [Rate; 2] = [Rate::new(1, "h"), Rate::new(7, "h")];

const TRIALS: [Trial; 2] = [
    Trial {
        rate: Rate::new(59_999, "min"),
        length: Duration::from_secs(3_600),
    },
    Trial {
        rate: Rate::new(300_000, "s"),
        length: Duration::from_secs(10),
    },
];

/// So many tenants are known, for the time of a call; and for the bytes of each, with one number just
/// after the maps that double have.
const KNOWN: [u32; 4] = [1_000, 10_000, 100_000, tenants::TENANTS];
const KEPT: [u32; 4] = [1_000, 100_000, 120_000, tenants::TENANTS];
const MANY: u32 = 100_000;
const FEW: u32 = 10_000;

/// The crates compared with, and what to know of them.
const PEERS: [(&str, &str); 6] = [
    (
        "governor",
        "keeps a rate as whole nanoseconds a token, rounded down: it admits more than most rates \
         allow. `wait_time_from` takes a second reading of the clock, `earliest_possible` does not. \
         Its own clock is the processor's counter, measured once against the system's clock.",
    ),
    (
        "ratelimit",
        "adds tokens in a step of its own, at most once a microsecond, rounded down.",
    ),
    (
        "leaky-bucket",
        "gives no retry time, and adds tokens once in an interval of whole milliseconds. With \
         `fair(false)` it reads no clock while it has tokens, but two threads can make it refuse all \
         calls for good (udoprog/leaky-bucket#39): so it is not in the table of two threads.",
    ),
    (
        "dashmap",
        "holds a bucket in one `AtomicU64` by a `String`, as do the next two: the simplest sound one.",
    ),
    ("papaya", "the same."),
    (
        "moka",
        "the same in an `Arc`, for at most 1,048,576 tenants; it may drop a bucket that is not full.",
    ),
];

fn main() {
    if shared::is_other() {
        return;
    }
    println!("# What a decision costs\n");
    println!("callgate {}, beside\n", version("callgate"));
    for (name, note) in PEERS {
        println!("- {name} {}: {note}", version(name));
    }
    println!("- `Mutex`: a bucket of floats in a mutex, as one would write it.\n");
    println!(
        "Ratios, each the median of up to {ROUNDS}, are against the monotonic clock \
         (`Instant::elapsed`, in nanoseconds) in the same run. In parentheses: nanoseconds, on this \
         machine today. Too noisy is what moved by more than {:.0}% in the meantime.",
        measure::NOISY * 100.0
    );

    println!("\n## Admitted\n");
    let admit = one_thread(&FAST, |rate| peers::admitting(rate, PLENTY));
    println!("\n## Rejected, and told when to retry\n");
    let reject = one_thread(&SLOW, peers::refusing);
    println!("\n## Admitted, by name\n");
    let named = one_thread(&FAST, |rate| peers::by_name(rate, PLENTY));
    println!("\n## Under several limits, by name: admitted\n");
    let several = one_thread(&FAST, |rate| several::admitting(rate, PLENTY));
    println!("\n## Under several limits, by name: rejected, and told when to retry\n");
    one_thread(&SLOW, |rate| several::refusing(rate, PLENTY));
    println!("\n## Two threads on one bucket, against one of them alone\n");
    let [refused, _] = two_threads();
    println!("\n## Shared memory: alone, and two processes against one of them alone\n");
    let (stores, beside) = shared_memory();
    println!("\n## Redis on this host: one caller, against a bare round trip\n");
    let redis = redis::Store::start();
    let redis = redis.map(|store| over_redis(&store));
    if redis.is_none() {
        println!("Not measured: there is no redis-server on the PATH.");
    }
    println!("\n## A bucket for each tenant: admitted, in random order of so many\n");
    let known = known_tenants();
    println!("\n## A bucket for each tenant: bytes on the heap for each of so many\n");
    let bytes = bytes();
    println!("\n## A bucket for each tenant: the first call of each of {MANY}\n");
    new_tenants();
    println!("\n## A bucket for each tenant: two threads, against one of them alone\n");
    two_threads_of_tenants();
    println!("\n## Calls admitted to a caller who comes back when told to, on a simulated clock\n");
    trials();

    println!("\n## A trace of calls: CPU nanoseconds a call\n");
    let simulated = simulated();

    println!("\n## Targets, at the worst of the limits above\n");
    println!("| | at most | measured | |\n|---|---|---|---|");
    target("admit / clock", 1.35, worst(&admit, peers::TOOL, None));
    target("reject / clock", 1.35, worst(&reject, peers::TOOL, None));
    target(
        "by name among 16 / looked up once",
        1.2,
        worst(&named, peers::NAME, Some(peers::TOOL)),
    );
    target(
        "under two limits / under one",
        1.4,
        worst(&several, several::TWO, Some(several::ONE)),
    );
    target(
        "two threads rejected / one",
        1.5,
        ratio(&refused, peers::TOOL),
    );
    shared_targets(&stores, &beside);
    if let Some(redis) = &redis {
        redis_targets(redis);
    }
    let place = KNOWN.iter().position(|&tenants| tenants == MANY);
    let known = &known[place.expect("many among them")];
    target(
        &format!("{MANY} tenants, time / the best of the others"),
        1.0,
        beside_others(|name| ratio(known, name)),
    );
    let place = KEPT.iter().position(|&tenants| tenants == MANY);
    let bytes = &bytes[place.expect("many among them")];
    target(
        &format!("{MANY} tenants, bytes / the best of the others"),
        1.0,
        beside_others(|name| {
            let row = KINDS.iter().position(|kind| kind.name == name);
            Figure::exact(bytes[row.expect("a kind")])
        }),
    );
    let [csv, _] = simulated;
    target("a trace in CSV, ns a call", 1_000.0, csv.simulated);
    target("a trace in CSV, simulated / only parsed", 6.0, csv.ratio);
}

/// Measures what a call of a trace costs, and prints it.
fn simulated() -> [Measured; 2] {
    let measured = simulate::measured().expect("room for the traces");
    report::head(&["only parsed", "`callgate simulate`", "ratio"].map(str::to_owned));
    for ((name, ..), measured) in simulate::FORMATS.iter().zip(&measured) {
        let cells = [
            format!("{:.0}", measured.parsed.value),
            format!("{:.0}", measured.simulated.value),
            format!("{:.2}", measured.ratio.value),
        ];
        report::row(name, cells.into_iter().map(Some));
    }
    measured
}

/// The highest of callgate's quotients with all others.
fn beside_others(figure: impl Fn(&str) -> Figure) -> Figure {
    let others = KINDS.iter().filter(|kind| kind.name != CALLGATE);
    report::highest(others.map(|kind| figure(CALLGATE).over(figure(kind.name))))
}

/// Measures what a call costs one thread, at each rate, and prints it.
fn one_thread(rates: &[Rate], rows: impl Fn(Rate) -> Vec<Row>) -> Vec<Column> {
    let (_, clock) = peers::clock();
    let rows: Vec<_> = rates.iter().map(|&rate| rows(rate)).collect();
    let columns = measured(&rows, |cases| measure::against(&clock, cases));
    report::costs(
        &rates.iter().map(Rate::to_string).collect::<Vec<_>>(),
        &columns,
    );
    columns
}

/// Measures what a call costs when two threads make it, and prints it.
fn two_threads() -> [Column; 2] {
    let mut rows = [peers::refusing(SLOW[1]), peers::admitting(FAST[2], PLENTY)];
    for rows in &mut rows {
        rows.retain(|(name, _)| *name != peers::UNFAIR);
    }
    let columns = measured(&rows, measure::two_threads);
    report::costs(&["rejected", "admitted"].map(str::to_owned), &columns);
    columns.try_into().expect("two columns")
}

/// Measures what a call in shared memory costs, and prints it.
fn shared_memory() -> (Vec<Column>, Column) {
    let folder = shared::folder();
    let rows = [PLENTY, 1].map(|burst| shared::rows(folder.path(), burst));
    let (_, clock) = peers::clock();
    let stores = measured(&rows, |cases| measure::against(&clock, cases));
    report::costs(&["admitted", "rejected"].map(str::to_owned), &stores);
    println!();
    let cases = shared::beside(folder.path());
    let costs = measure::beside(&cases);
    let column: Column = cases.iter().map(|(name, ..)| *name).zip(costs).collect();
    report::costs(&["two processes".to_owned()], std::slice::from_ref(&column));
    (stores, column)
}

/// Prints the targets of shared memory.
fn shared_targets(stores: &[Column], beside: &Column) {
    let over = |row, over| worst(stores, row, Some(over));
    target(
        "shared memory / memory",
        1.35,
        over(shared::SHARED, shared::MEMORY),
    );
    target(
        "two processes, each its own key / one",
        1.2,
        ratio(beside, shared::KEYS),
    );
    target(
        "two processes rejected / one",
        1.3,
        ratio(beside, shared::HOT),
    );
    // It writes nothing either where it refuses.
    target(
        "shared memory / LMDB, admitted",
        0.1,
        worst(&stores[..1], shared::SHARED, Some(shared::LMDB)),
    );
    target(
        "shared memory / a locked file",
        0.1,
        over(shared::SHARED, shared::FILE_LOCK),
    );
}

/// Measures what a decision by Redis costs one caller, prints that, and prints what many callers get.
fn over_redis(store: &redis::Store) -> Vec<Column> {
    let (_, ping) = store.ping();
    let rows = [store.rows(PLENTY)];
    let columns = measured(&rows, |cases| measure::against(&ping, cases));
    report::costs(&["a call".to_owned()], &columns);
    println!(
        "\nMany callers: so many a second, and microseconds of this process's CPU for each.\n"
    );
    report::head(&redis::CALLERS.map(|callers| format!("{callers} callers")));
    let many = redis::CALLERS.map(|callers| store.many(callers, PLENTY));
    for (row, name) in ["`PING`, multiplexed", redis::AWAITED]
        .into_iter()
        .enumerate()
    {
        let cells = many.iter().map(|many| {
            let redis::Many { a_second, micros } = many[row];
            Some(format!("{:.0} ({:.1})", a_second.value, micros.value))
        });
        report::row(name, cells);
    }
    let share = |figure: fn(&redis::Many) -> Figure| {
        let shares = many
            .iter()
            .map(move |[pings, decisions]| figure(decisions).over(figure(pings)));
        shares.map(|share| Some(format!("{:.2} x", share.value)))
    };
    report::row("decisions / round trips", share(|many| many.a_second));
    report::row("their CPU", share(|many| many.micros));
    columns
}

/// Prints the targets of Redis.
fn redis_targets(columns: &[Column]) {
    let over = |row, over| worst(columns, row, Some(over));
    for (row, other) in [
        (redis::TRY, redis::PING),
        (redis::TRY, redis::SCRIPT),
        (redis::AWAITED, redis::SENT),
    ] {
        target(&format!("Redis: {row} / {other}"), 1.5, over(row, other));
    }
    target(
        "Redis: three limits / one",
        1.8,
        over(redis::THREE, redis::TRY),
    );
}

/// Measures what a call of a known tenant costs, and prints it.
fn known_tenants() -> Vec<Column> {
    let (_, clock) = peers::clock();
    let rows = KNOWN.map(|tenants| {
        let calls = tenants::calls(tenants);
        let rows = [ARRAYS].into_iter().chain(KINDS);
        let rows = rows.map(|kind| (kind.name, kind.known(tenants, calls)));
        let refilled = LIMITERS.refilled(tenants, calls);
        rows.chain([(REFILLED, refilled)]).collect()
    });
    let columns = measured(&rows, |cases| measure::against(&clock, cases));
    report::costs(&KNOWN.map(|tenants| tenants.to_string()), &columns);
    let beyond = columns.iter().map(|column| {
        let [callgate, array] =
            [CALLGATE, ARRAY].map(|name| report::find(column, name).expect("a row").nanos);
        Some(format!("({:.1})", callgate - array))
    });
    report::row("**callgate** less the array", beyond);
    columns
}

/// Counts the bytes that each way to keep buckets takes for a tenant, and prints them.
fn bytes() -> Vec<[f64; KINDS.len()]> {
    let columns: Vec<_> = KEPT
        .iter()
        .map(|&tenants| {
            let tenants = tenants::first(tenants);
            KINDS.map(|kind| kind.bytes(&tenants))
        })
        .collect();
    report::head(&KEPT.map(|tenants| tenants.to_string()));
    for (index, kind) in KINDS.iter().enumerate() {
        let cells = columns.iter().map(|column| format!("{:.0}", column[index]));
        report::row(kind.name, cells.map(Some));
    }
    columns
}

/// Measures what a tenant's first call costs, and prints it.
fn new_tenants() {
    let (_, clock) = peers::clock();
    let tenants = tenants::first(MANY);
    let costs = measure::together(&clock, &KINDS, MANY, |kind| kind.flood(&tenants));
    let column = KINDS.iter().map(|kind| kind.name).zip(costs).collect();
    report::costs(&["admitted".to_owned()], &[column]);
}

/// Measures what calls of tenants cost when two threads make them, and prints it.
fn two_threads_of_tenants() {
    let calls = tenants::calls(FEW);
    let kinds = || KINDS.iter();
    let rows = [
        kinds()
            .map(|kind| (kind.name, kind.known(FEW, calls)))
            .collect(),
        kinds().map(|kind| (kind.name, kind.admitting())).collect(),
        kinds().map(|kind| (kind.name, kind.refusing())).collect(),
    ];
    let columns = measured(&rows, measure::two_threads);
    let heads = [
        format!("{FEW} tenants, admitted"),
        "one tenant, admitted".to_owned(),
        "one tenant, rejected".to_owned(),
    ];
    report::costs(&heads, &columns);
}

/// Times the rows of all columns in turn.
fn measured(columns: &[Vec<Row>], time: impl Fn(&[&Case]) -> Vec<Cost>) -> Vec<Column> {
    let cases: Vec<&Case> = columns.iter().flatten().map(|(_, case)| case).collect();
    let mut costs = time(&cases).into_iter();
    for (name, case) in columns.iter().flatten() {
        assert!(case.holds(), "{name}: not answered as it was to be");
    }
    let named = |rows: &Vec<Row>| rows.iter().map(|(name, _)| *name).zip(&mut costs).collect();
    columns.iter().map(named).collect()
}

/// Prints how many calls each crate admits, and how many it should.
fn trials() {
    report::head(&TRIALS.map(|trial| trial.to_string()));
    let due = TRIALS.iter().map(|trial| trial.due().to_string());
    report::row("the limit allows", due.map(Some));
    let [first, second] = TRIALS.map(Trial::admitted);
    for ((name, first), (_, second)) in first.iter().zip(&second) {
        report::row(
            name,
            [first, second]
                .map(|admitted| Some(admitted.to_string()))
                .into_iter(),
        );
    }
}

/// The version of a package that was built.
fn version(name: &str) -> &'static str {
    let lock = include_str!("../../../Cargo.lock");
    let package = lock.split_once(&format!("name = \"{name}\"\nversion = \""));
    package
        .and_then(|(_, rest)| rest.split('"').next())
        .unwrap_or("?")
}
