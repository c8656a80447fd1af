//! `callgate simulate`: what a file of limits would have done to calls that were made.

mod fit;
mod lines;
mod overview;
mod plot;
mod progress;
mod report;
mod run;
mod runs;
mod service;
mod stats;
mod trace;

use std::cmp::Reverse;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use callgate::{ConfigError, Limit, Limiter, LimiterBuilder};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};

use crate::table::shown;
use crate::{DEFAULT, Outcome};
use overview::{Counts, Overview};
use report::{Answered, Report, Row};
use service::Quota;
use trace::Trace;

/// Run recorded calls under a file of limits, in simulated time.
///
/// The calls are decided by the same code as live ones, waiting included. Prints for each limit and tool
/// what was admitted, what waited and what was rejected, and the busiest second and minute.
///
/// Exits with 0 if the trace was run, and with 1 if the file or the trace is not good.
#[derive(Args)]
pub(crate) struct Simulate {
    /// The file of limits, in TOML.
    file: PathBuf,
    /// The calls, as JSON lines or CSV; - for the standard input.
    trace: PathBuf,
    /// Find the smallest burst at the rate that each limit has, and the smallest rate at its burst, under
    /// which it rejects no call.
    #[arg(long)]
    fit: bool,
    /// How often a service behind each limit would have answered 429, with and without these limits: one that
    /// accepts so many tokens in any time of this length, such as 100/min.
    #[arg(long, value_name = "N/UNIT")]
    service: Option<Quota>,
    /// Draw demand, admissions and the level of each limit's bucket over time.
    #[arg(long, value_name = "FILE.svg", value_parser = PathBufValueParser::new().try_map(svg))]
    plot: Option<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Leave lines out that cannot be read, instead of stopping at the first.
    #[arg(long)]
    skip_bad: bool,
}

fn svg(path: PathBuf) -> Result<PathBuf, &'static str> {
    let ending = path.extension();
    if ending.is_some_and(|ending| ending.eq_ignore_ascii_case("svg")) {
        Ok(path)
    } else {
        Err("a picture is SVG: give a name that ends in .svg")
    }
}

impl Simulate {
    pub(crate) fn run(&self) -> Outcome {
        let failed = |err| Outcome {
            code: 1,
            err,
            ..Outcome::default()
        };
        match Limits::read(&self.file) {
            Ok(limits) => self
                .outcome(&limits)
                .unwrap_or_else(|error| failed(format!("error: {error}\n"))),
            Err(_) if trace::looks_like_one(&self.file) => failed(format!(
                "error: {} looks like a trace: the limits' file comes first\n",
                shown(&self.file.to_string_lossy())
            )),
            Err(error) => failed(format!("{error}\n")),
        }
    }

    fn outcome(&self, limits: &Limits) -> Result<Outcome, String> {
        if self.plot.is_some() && limits.0.len() > plot::MOST_LIMITS {
            let (most, given) = (plot::MOST_LIMITS, limits.0.len());
            return Err(format!(
                "a picture is drawn of up to {most} limits, not of {given}"
            ));
        }
        let fields: Arc<[String]> = limits.fields().into();
        let mut trace = Trace::open(&self.trace, Arc::clone(&fields), self.skip_bad)?;
        let start = || {
            let limiter = limits.limiter()?;
            let fields = Arc::clone(&fields);
            Ok(Overview::new(
                limiter,
                fields,
                self.service,
                self.plot.is_some(),
            ))
        };
        let mut overview = trace.pass(start, Overview::arrive)?;
        overview.finish();
        let mut report = self.report(limits, &trace, &overview.counts)?;
        if self.fit {
            let tools = &overview.counts.tools;
            let fits = fit::fit(&mut trace, &limits.0, tools, &fields)?;
            for (row, fit) in report.limits.iter_mut().zip(fits) {
                row.fit = fit;
            }
        }
        if let (Some(path), Some(plot)) = (&self.plot, &overview.counts.plot) {
            let svg = plot.svg(&report.heading(), &limits.0)?;
            fs::write(path, svg).map_err(|error| {
                format!(
                    "{} cannot be written: {error}",
                    shown(&path.to_string_lossy())
                )
            })?;
        }
        Ok(Outcome {
            code: 0,
            out: if self.json {
                report.json()
            } else {
                report.tables()
            },
            err: self.warnings(limits, &trace),
        })
    }

    fn report(&self, limits: &Limits, trace: &Trace, counts: &Counts) -> Result<Report, String> {
        let has_durations = trace.has_durations;
        let rows = limits.0.iter().zip(&counts.limits);
        let rows = rows.map(|((name, _), limited)| {
            let row = Row::new(name, &limited.tally, has_durations);
            let service = limited.services.as_ref();
            Row {
                service: service.map(|[without, with]| Answered {
                    without_limits: without.answers,
                    with_limits: with.answers,
                }),
                ..row
            }
        });
        let limits: Vec<_> = rows.collect();
        let unmatched = limits.iter().filter(|row| row.calls == 0);
        let unmatched = unmatched.map(|row| row.name.clone());
        let tools = trace.tools.names().iter().zip(&counts.tools);
        let tools = tools.map(|(name, tool)| Row::new(name, &tool.tally, has_durations));
        // A line that was left out may have named a tool.
        let mut tools: Vec<_> = tools.filter(|tool| tool.calls > 0).collect();
        tools.sort_by(|one, other| {
            (Reverse(one.calls), &one.name).cmp(&(Reverse(other.calls), &other.name))
        });
        let calls = tools.iter().map(|tool| tool.calls).sum();
        if calls == 0 {
            return Err(format!("{}: there is no call in it", trace.name));
        }
        Ok(Report {
            file: self.file.to_string_lossy().into_owned(),
            trace: self.trace.to_string_lossy().into_owned(),
            calls,
            seconds: report::seconds(counts.length),
            skipped: trace.skipped.lines,
            service: self.service.map(|quota| quota.to_string()),
            unmatched_limits: unmatched.collect(),
            limits,
            tools,
        })
    }

    fn warnings(&self, limits: &Limits, trace: &Trace) -> String {
        let mut warnings = String::new();
        if limits.1 {
            let _ = writeln!(
                warnings,
                "warning: {} says dry_run = true; the calls were run as if it did not",
                shown(&self.file.to_string_lossy())
            );
        }
        if let Some(first) = &trace.skipped.first {
            let lines = trace.skipped.lines;
            let _ = writeln!(
                warnings,
                "warning: {}: {lines} lines left out that cannot be read, the first of them {first}",
                trace.name
            );
        }
        warnings
    }
}

/// The limits of a file by name, the default last; and whether they are not in force.
struct Limits(Vec<(String, Limit)>, bool);

impl Limits {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let limiter = LimiterBuilder::from_file(path)?.in_memory().build()?;
        let limits = limiter.snapshot().into_iter();
        let limits = limits.map(|level| (level.name.to_owned(), level.limit));
        Ok(Self(limits.collect(), limiter.is_dry_run()))
    }

    /// All fields that split any of them.
    fn fields(&self) -> Vec<String> {
        let mut fields = Vec::new();
        for field in self.0.iter().flat_map(|(_, limit)| limit.split_by()) {
            if field != "tool" && !fields.contains(field) {
                fields.push(field.clone());
            }
        }
        fields
    }

    fn limiter(&self) -> Result<Limiter, String> {
        let limits = self.0.iter();
        let limits = limits.fold(Limiter::builder(), |limits, (name, limit)| {
            with(limits, name, limit.clone())
        });
        limits.build().map_err(|error| error.to_string())
    }
}

fn with(limits: LimiterBuilder, name: &str, limit: Limit) -> LimiterBuilder {
    if name == DEFAULT {
        limits.default_limit(limit)
    } else {
        limits.limit(name, limit)
    }
}
