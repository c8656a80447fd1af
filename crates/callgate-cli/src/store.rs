//! `callgate store`: looks into a store in shared memory, and removes it.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;

use clap::{Args, Subcommand};

use crate::Outcome;
use crate::stores::{Store, Target, Wanted};
use crate::table::shown;
use crate::top::report;

/// Look into a store in shared memory, or remove it.
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
    /// Refuses what is no store of callgate or is another user's, and a store that processes use.
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
    store.list_buckets(&Wanted::default());
    Ok(if json {
        report::json(&[(target.given.clone(), Ok(store))])
    } else {
        report::tables(&store)
    })
}

fn remove(target: &Target, force: bool) -> Result<String, String> {
    let store = target.look()?;
    let shown = shown(&store.path);
    let failed = |error: std::io::Error| format!("'{shown}' cannot be removed: {error}");
    let owner = fs::symlink_metadata(&store.path).map_err(failed)?.uid();
    let user = rustix::process::geteuid().as_raw();
    if owner != user {
        return Err(format!("'{shown}' is user {owner}'s, not yours ({user})"));
    }
    if !force && !store.processes.is_empty() {
        return Err(format!(
            "'{shown}' is in use by {}: stop {} first, or give --force",
            processes(&store),
            if store.process_count() == 1 {
                "it"
            } else {
                "them"
            },
        ));
    }
    fs::remove_file(&store.path).map_err(failed)?;
    let mut said = format!("removed {}\n", report::heading(&store));
    if !store.processes.is_empty() {
        let _ = writeln!(said, "still in use by {}", processes(&store));
    }
    Ok(said)
}

/// Those that use a store, by number.
fn processes(store: &Store) -> String {
    let mut processes: Vec<_> = store.processes.iter().map(|row| row.pid).collect();
    processes.sort_unstable();
    processes.dedup();
    let numbers: Vec<_> = processes.iter().map(u64::to_string).collect();
    let noun = if numbers.len() == 1 {
        "process"
    } else {
        "processes"
    };
    format!("{noun} {}", numbers.join(", "))
}
