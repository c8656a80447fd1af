//! What a decision costs, against reading the clock and against other crates, as tables in
//! Markdown: `cargo run --release -p callgate-bench`.

mod exact;
mod measure;
mod mutex;
mod peers;

use std::time::Duration;

use exact::Trial;
use measure::{Case, Cost, ROUNDS};
use peers::{Rate, Row};

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

/// The crates compared with, and what to know of them.
const PEERS: [(&str, &str); 3] = [
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
];

/// What each row of a table came to at one limit.
type Column = Vec<(&'static str, Cost)>;

fn main() {
    println!("# What a decision costs\n");
    println!("callgate {}, beside\n", version("callgate"));
    for (name, note) in PEERS {
        println!("- {name} {}: {note}", version(name));
    }
    println!("- `Mutex`: a bucket of floats in a mutex, as one would write it.\n");
    println!(
        "Ratios, each the median of up to {ROUNDS}, are against the monotonic clock \
         (`Instant::elapsed`, in nanoseconds) in the same run. In parentheses: nanoseconds, on this \
         machine today."
    );

    println!("\n## Admitted\n");
    let admit = one_thread(&FAST, |rate| peers::admitting(rate, PLENTY));
    println!("\n## Rejected, and told when to retry\n");
    let reject = one_thread(&SLOW, peers::refusing);
    println!("\n## Admitted, by name\n");
    let named = one_thread(&FAST, |rate| peers::by_name(rate, PLENTY));
    println!("\n## Two threads on one bucket, against one of them alone\n");
    let [refused, _] = two_threads();
    println!("\n## Calls admitted to a caller who comes back when told to, on a simulated clock\n");
    trials();

    let worst = |columns: &[Column], name| {
        let ratios = columns.iter().map(|column| ratio(column, name));
        ratios.fold(0.0, f64::max)
    };
    let by_name = named.iter();
    let by_name = by_name.map(|column| ratio(column, peers::NAME) / ratio(column, peers::TOOL));
    println!("\n## Targets, at the worst of the limits above\n");
    println!("| | at most | measured | |\n|---|---|---|---|");
    target("admit / clock", 1.35, worst(&admit, peers::TOOL));
    target("reject / clock", 1.35, worst(&reject, peers::TOOL));
    target(
        "by name among 16 / looked up once",
        1.2,
        by_name.fold(0.0, f64::max),
    );
    target(
        "two threads rejected / one",
        1.5,
        ratio(&refused, peers::TOOL),
    );
}

/// Measures what a call costs one thread, at each rate, and prints it.
fn one_thread(rates: &[Rate], rows: impl Fn(Rate) -> Vec<Row>) -> Vec<Column> {
    let (_, clock) = peers::clock();
    let rows: Vec<_> = rates.iter().map(|&rate| rows(rate)).collect();
    let columns = measured(&rows, |cases| measure::against(&clock, cases));
    print(
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
    print(&["rejected", "admitted"].map(str::to_owned), &columns);
    columns.try_into().expect("two columns")
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

/// Prints a table with the rows of the first column.
fn print(heads: &[String], columns: &[Column]) {
    println!("| | {} |", heads.join(" | "));
    println!("|---{}|", "|---".repeat(heads.len()));
    for (name, _) in &columns[0] {
        print!("| {name} |");
        for column in columns {
            match find(column, name) {
                Some(cost) => print!(" {:.2} ({:.1}) |", cost.ratio, cost.nanos),
                None => print!(" |"),
            }
        }
        println!();
    }
}

/// Prints how many calls each crate admits, and how many it should.
fn trials() {
    let heads = TRIALS.map(|trial| trial.to_string());
    println!("| | {} |\n|---|---|---|", heads.join(" | "));
    let columns = TRIALS.map(Trial::admitted);
    println!(
        "| the limit allows | {} | {} |",
        TRIALS[0].due(),
        TRIALS[1].due()
    );
    for ((name, first), (_, second)) in columns[0].iter().zip(&columns[1]) {
        println!("| {name} | {first} | {second} |");
    }
}

/// Prints whether a target was kept to.
fn target(what: &str, most: f64, measured: f64) {
    let verdict = if measured <= most { "ok" } else { "MISSED" };
    println!("| {what} | {most} | {measured:.3} | {verdict} |");
}

fn find(column: &Column, name: &str) -> Option<Cost> {
    let mut rows = column.iter();
    rows.find(|row| row.0 == name).map(|row| row.1)
}

fn ratio(column: &Column, name: &str) -> f64 {
    find(column, name).expect("a row of the table").ratio
}

/// The version of a package that was built.
fn version(name: &str) -> &'static str {
    let lock = include_str!("../../../Cargo.lock");
    let package = lock.split_once(&format!("name = \"{name}\"\nversion = \""));
    package
        .and_then(|(_, rest)| rest.split('"').next())
        .unwrap_or("?")
}
