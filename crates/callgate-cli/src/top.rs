//! `callgate top`: a live view of stores that processes share, or what is in them now.

mod columns;
mod model;
pub(crate) mod report;
mod screen;
mod terminal;

use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use jiff::SignedDuration;

use crate::Outcome;
use crate::stores::{Store, Target, Wanted};
use model::Top;

/// Watch stores that processes share: what is admitted, rejected and waiting, and how full the buckets are.
///
/// Watching changes nothing in a store. Values of fields, such as tenants, are in it only as
/// fingerprints; --tenant and --field find the bucket of a value that you know.
///
/// Exits with 0 if all is well, with 1 if a store cannot be looked into (with --once), and with 2 if there is no
/// terminal to show it on.
#[derive(Args)]
pub(crate) struct TopCommand {
    /// The stores' paths, or their URLs.
    #[arg(value_name = "PATH", required = true)]
    targets: Vec<Target>,
    #[command(flatten)]
    wanted: Wanted,
    /// How often to look, from 100ms to 1h.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print what is in the stores now, and end.
    #[arg(long)]
    once: bool,
    /// Print JSON instead of tables.
    #[arg(long, requires = "once")]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let refused = || "a time from 100ms to 1h, such as 2s".to_owned();
    let time: SignedDuration = text.parse().map_err(|_| refused())?;
    let time = Duration::try_from(time).map_err(|_| refused())?;
    let allowed = Duration::from_millis(100)..=Duration::from_secs(3_600);
    Some(time)
        .filter(|time| allowed.contains(time))
        .ok_or_else(refused)
}

impl TopCommand {
    pub(crate) fn run(&self) -> Outcome {
        if let Err(error) = self.wanted.check() {
            return Outcome::misused(&error);
        }
        if self.once {
            return self.print();
        }
        if !terminal::is_there() {
            return Outcome::misused(
                "top shows itself on a terminal, and there is none: give --once, with --json for scripts",
            );
        }
        let names = self.targets.iter().map(|target| target.shown.clone());
        let mut top = Top::new(names.collect(), self.wanted.clone(), self.interval);
        match terminal::show(&mut top, || self.look()) {
            Ok(code) => Outcome {
                code,
                ..Outcome::default()
            },
            Err(error) => Outcome::failed(&format!("the terminal cannot be used: {error}")),
        }
    }

    fn look(&self) -> Vec<Result<Store, String>> {
        self.targets.iter().map(Target::look).collect()
    }

    fn print(&self) -> Outcome {
        let mut outcome = Outcome::default();
        let mut stores = Vec::new();
        for (target, found) in self.targets.iter().zip(self.look()) {
            let found = found.and_then(|mut store| {
                store.list_buckets(&self.wanted)?;
                Ok(store)
            });
            match &found {
                Ok(store) => {
                    for unclear in &store.unclear {
                        let _ = writeln!(outcome.err, "warning: {unclear}");
                    }
                }
                Err(error) => {
                    outcome.code = 1;
                    let _ = writeln!(outcome.err, "error: {error}");
                }
            }
            stores.push((target.shown.clone(), found));
        }
        outcome.out = if self.json {
            report::json(&stores)
        } else {
            let found = stores.iter().filter_map(|(_, found)| found.as_ref().ok());
            let tables: Vec<_> = found.map(report::tables).collect();
            tables.join("\n")
        };
        outcome
    }
}

#[cfg(test)]
mod tests;
