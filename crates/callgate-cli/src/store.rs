//! `callgate store`: looks into a store that processes share, and removes it.

use std::fmt::Write;

use callgate::Inspection;
use clap::{Args, Subcommand};

use crate::Outcome;
use crate::stores::{Target, Wanted};
use crate::table::shown;
use crate::top::report;

/// Look into a store that processes share, or remove it.
#[derive(Args)]
pub(crate) struct StoreCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print what is in a store.
    Inspect {
        /// The store's path, or its URL.
        path: Target,
        /// Print JSON instead of tables.
        #[arg(long)]
        json: bool,
    },
    /// Remove a store, so that the next process makes a new one with full buckets.
    ///
    /// Refuses what is no store of callgate or is another user's, and a store that processes use. Of a Redis store
    /// it deletes callgate's keys of the prefix; the processes that use it go on, with full buckets.
    Remove {
        /// The store's path, or its URL.
        path: Target,
        /// Remove it while processes use it. They go on with it, and share nothing with those that come.
        #[arg(long)]
        force: bool,
    },
}

impl StoreCommand {
    pub(crate) fn run(&self) -> Outcome {
        let said = match &self.command {
            Command::Inspect { path, json } => inspect(path, *json),
            Command::Remove { path, force } => remove(path, *force),
        };
        said.map_or_else(
            |error| Outcome::failed(&error),
            |out| Outcome {
                out,
                ..Outcome::default()
            },
        )
    }
}

fn inspect(target: &Target, json: bool) -> Result<String, String> {
    let mut store = target.look()?;
    store.list_buckets(&Wanted::default())?;
    Ok(if json {
        report::json(&[(target.shown.clone(), Ok(store))])
    } else {
        report::tables(&store)
    })
}

fn remove(target: &Target, force: bool) -> Result<String, String> {
    let store = target.look()?;
    if !force && !store.processes.is_empty() {
        return Err(format!(
            "'{}' is in use by {}: stop {} first, or give --force{}",
            shown(&store.path),
            numbered(store.processes.iter().map(|row| row.pid).collect()),
            if store.process_count() == 1 {
                "it"
            } else {
                "them"
            },
            // A file knows who lives.
            if store.slots.is_some() {
                ""
            } else {
                " (what was killed is listed for ten minutes)"
            },
        ));
    }
    let users = Inspection::remove(&target.store, force).map_err(|error| error.to_string())?;
    let mut said = format!("removed {}\n", report::heading(&store));
    if !users.is_empty() {
        let _ = writeln!(said, "still in use by {}", numbered(users));
    }
    Ok(said)
}

/// Processes, by their numbers.
fn numbered(mut numbers: Vec<u64>) -> String {
    numbers.sort_unstable();
    numbers.dedup();
    let numbers: Vec<_> = numbers.iter().map(u64::to_string).collect();
    let noun = if numbers.len() == 1 {
        "process"
    } else {
        "processes"
    };
    format!("{noun} {}", numbers.join(", "))
}
