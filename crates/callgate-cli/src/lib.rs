//! The command `callgate`, as a function: the binary and the Python package's script both run it.

mod check;
mod simulate;
#[cfg(target_os = "linux")]
mod store;
#[cfg(target_os = "linux")]
mod stores;
mod table;
#[cfg(target_os = "linux")]
mod top;

use std::ffi::OsString;
use std::io::{ErrorKind, Write};

use clap::{Parser, Subcommand};

use check::Check;
use simulate::Simulate;
#[cfg(target_os = "linux")]
use {store::StoreCommand, top::TopCommand};

/// The name of the default limit, as rejections say it.
const DEFAULT: &str = "[default]";

/// Admission control for AI agents' tool calls.
#[derive(Parser)]
#[command(name = "callgate", version)]
struct Callgate {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(Check),
    Simulate(Simulate),
    #[cfg(target_os = "linux")]
    Top(TopCommand),
    #[cfg(target_os = "linux")]
    Store(StoreCommand),
    /// Print the JSON Schema of a file of limits.
    Schema,
}

/// What a command says, and the exit code that it ends with.
#[derive(Default)]
struct Outcome {
    code: u8,
    out: String,
    err: String,
}

/// Runs the command with these arguments, the first of which is its name, and returns its exit code: 0
/// where all is well, 1 where it is not, 2 where the arguments cannot be understood.
///
/// ```
/// let mut out = Vec::new();
/// let code = callgate_cli::run(["callgate", "schema"], &mut out, &mut std::io::stderr());
/// assert_eq!(code, 0);
/// assert!(out.starts_with(b"{"));
/// ```
pub fn run<A: Into<OsString> + Clone>(
    args: impl IntoIterator<Item = A>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let outcome = match Callgate::try_parse_from(args) {
        Ok(Callgate { command }) => command.run(),
        Err(usage) => said(&usage),
    };
    outcome.write(out, err)
}

impl Command {
    fn run(&self) -> Outcome {
        match self {
            Self::Check(check) => check.run(),
            Self::Simulate(simulate) => simulate.run(),
            #[cfg(target_os = "linux")]
            Self::Top(top) => top.run(),
            #[cfg(target_os = "linux")]
            Self::Store(store) => store.run(),
            Self::Schema => Outcome {
                out: callgate::config::schema(),
                ..Outcome::default()
            },
        }
    }
}

/// What clap says: help and version, or what it could not understand.
fn said(usage: &clap::Error) -> Outcome {
    let text = usage.to_string();
    let code = u8::try_from(usage.exit_code()).unwrap_or(2);
    if usage.use_stderr() {
        Outcome {
            code,
            err: text,
            ..Outcome::default()
        }
    } else {
        Outcome {
            code,
            out: text,
            ..Outcome::default()
        }
    }
}

impl Outcome {
    /// What was asked for cannot be done.
    #[cfg(target_os = "linux")]
    fn failed(error: &str) -> Self {
        Self {
            code: 1,
            err: format!("error: {error}\n"),
            ..Self::default()
        }
    }

    /// The arguments do not fit what is there.
    #[cfg(target_os = "linux")]
    fn misused(error: &str) -> Self {
        Self {
            code: 2,
            ..Self::failed(error)
        }
    }

    /// Says it. Whoever has closed the other end of a pipe wants to hear no more, which is no fault.
    fn write(self, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
        let written = out
            .write_all(self.out.as_bytes())
            .and_then(|()| out.flush())
            .and_then(|()| err.write_all(self.err.as_bytes()));
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                // Where this cannot be written either, the exit code still says it.
                let _ = writeln!(err, "error: the output cannot be written: {error}");
                self.code.max(1)
            }
            _ => self.code,
        }
    }
}
