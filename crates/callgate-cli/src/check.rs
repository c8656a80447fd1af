//! `callgate check`: what a file of limits really says.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use callgate::{ConfigError, Level, Limit, Limiter, LimiterBuilder, OnStoreError, Unit};
use clap::Args;

use crate::table::{grouped, hide_if_empty, listed, shown, table};
use crate::{DEFAULT, Outcome};

/// Check a file of limits, and print the limits in force.
///
/// Prints each limit, and the most tokens that one bucket of it admits in any second, minute, hour and
/// day. With the names of TOOLs, prints which limits hold for each, and warns of limits and patterns that
/// match none of them. Always warns of a default that is left no tool.
///
/// Exits with 0 if the file is good, and with 1 if it is not.
#[derive(Args)]
pub(crate) struct Check {
    /// The file, in TOML.
    file: PathBuf,
    /// The names of tools.
    #[arg(value_name = "TOOL")]
    tools: Vec<String>,
}

impl Check {
    pub(crate) fn run(&self) -> Outcome {
        self.report().unwrap_or_else(|error| Outcome {
            code: 1,
            err: format!("{error}\n"),
            ..Outcome::default()
        })
    }

    fn report(&self) -> Result<Outcome, ConfigError> {
        let builder = LimiterBuilder::from_file(&self.file)?;
        let store = store(&builder);
        let url = builder.store_url();
        let is_remote = url.is_some_and(|url| !url.starts_with("shm:"));
        let limiter = builder.in_memory().build()?;
        let limits = limiter.snapshot();
        let mut out = format!(
            "{}: {}{store}{}\n\n{}\n\nThe most that one bucket admits in any window of that length, in tokens:\n\n{}\n",
            shown(&self.file.to_string_lossy()),
            number(limits.len()),
            settings(&limiter, is_remote),
            limits_table(&limits),
            most_table(&limits)?,
        );
        let mut err = String::new();
        if !self.tools.is_empty() {
            let _ = writeln!(out, "\n{}", tools_table(&limiter, &self.tools));
            err = idle(&limits, &self.tools)?;
        }
        err.extend(idle_default(&limiter, &limits, &self.tools));
        Ok(Outcome { code: 0, out, err })
    }
}

fn number(limits: usize) -> String {
    match limits {
        1 => "1 limit".to_owned(),
        many => format!("{many} limits"),
    }
}

/// Where the buckets are, on a line of its own; nothing where there is no store.
fn store(builder: &LimiterBuilder) -> String {
    match (builder.store_url(), builder.unset_variable()) {
        (Some(url), _) => format!("\nstore: {}", shown(url)),
        (None, Some(variable)) => {
            let variable = shown(variable);
            format!("\nstore: where the environment variable {variable} says; it is not set here")
        }
        (None, None) => String::new(),
    }
}

/// What holds for all limits, each on a line of its own.
fn settings(limiter: &Limiter, is_remote: bool) -> String {
    let mut settings = String::new();
    let policy = limiter.when_store_fails();
    if let Some(policy) = policy.or(is_remote.then(OnStoreError::default)) {
        let _ = write!(settings, "\non_store_error = \"{policy}\"");
        settings.push_str(": what becomes of calls while the store fails");
    }
    if limiter.is_dry_run() {
        settings.push_str("\ndry_run = true: every call passes; what would be refused is counted");
    }
    settings
}

fn limits_table(limits: &[Level<'_>]) -> String {
    let header = [
        "limit",
        "rate",
        "burst",
        "cost",
        "max_wait",
        "max_concurrent",
        "on_store_error",
        "per",
        "tools",
    ];
    let mut table = table(header, &[2, 3, 4, 5]);
    for Level { name, limit, .. } in limits {
        let mut per = limit.split_by().to_vec();
        let tools = if *name == DEFAULT {
            per.insert(0, "tool".into());
            "any other".into()
        } else {
            limit.shared_by().map_or_else(|| shown(name), listed)
        };
        let policy = limit.when_store_fails();
        table.add_row([
            shown(name),
            rate(limit),
            grouped(limit.capacity()),
            grouped(limit.default_cost()),
            max_wait(limit),
            limit.most_concurrent().map_or_else(String::new, grouped),
            policy.map_or_else(String::new, |policy| policy.to_string()),
            listed(&per),
            tools,
        ]);
    }
    for column in [4, 5, 6] {
        hide_if_empty(&mut table, column);
    }
    table.trim_fmt()
}

/// As a table or a picture says it: of a quota, what was asked for.
pub(crate) fn rate(limit: &Limit) -> String {
    match (limit.as_quota(), limit.rate()) {
        (Some((count, unit)), _) => format!("{count}/{} quota", unit.symbol()),
        (None, Ok(rate)) => rate.to_string(),
        (None, Err(error)) => error.to_string(),
    }
}

fn max_wait(limit: &Limit) -> String {
    match limit.longest_wait() {
        Duration::ZERO => String::new(),
        time => format!("{time:?}"),
    }
}

fn most_table(limits: &[Level<'_>]) -> Result<String, ConfigError> {
    let mut table = table(["limit", "second", "minute", "hour", "day"], &[1, 2, 3, 4]);
    for Level { name, limit, .. } in limits {
        let mut row = vec![shown(name)];
        for window in Unit::ALL {
            row.push(grouped(limit.most_in(window)?));
        }
        table.add_row(row);
    }
    Ok(table.trim_fmt())
}

fn tools_table(limiter: &Limiter, tools: &[String]) -> String {
    let mut table = table(["tool", "limits"], &[]);
    for tool in tools {
        let limits = limiter.limits_of(tool);
        let limits = if limits.is_empty() {
            "none: not limited".into()
        } else {
            listed(&limits)
        };
        table.add_row([shown(tool), limits]);
    }
    table.trim_fmt()
}

/// Warns of the limits, and of the patterns in their `tools`, that match none of these tools.
fn idle(limits: &[Level<'_>], tools: &[String]) -> Result<String, ConfigError> {
    // A limiter with a limit for each pattern tells which patterns match.
    let limits = || limits.iter().filter(|level| level.name != DEFAULT);
    let patterns: HashSet<&str> = limits().flat_map(patterns_of).collect();
    let probe = patterns.iter().fold(Limiter::builder(), |probe, pattern| {
        probe.limit(*pattern, Limit::per_second(1))
    });
    let probe = probe.build()?;
    let busy: HashSet<&str> = tools
        .iter()
        .flat_map(|tool| probe.limits_of(tool))
        .collect();

    let mut warnings = String::new();
    for level in limits() {
        let patterns = patterns_of(level);
        let name = shown(level.name);
        if patterns.iter().all(|pattern| !busy.contains(pattern)) {
            let _ = writeln!(
                warnings,
                "warning: limit '{name}' matches none of these tools"
            );
            continue;
        }
        for pattern in patterns
            .into_iter()
            .filter(|pattern| !busy.contains(pattern))
        {
            let pattern = shown(pattern);
            let _ = writeln!(
                warnings,
                "warning: '{pattern}' in the tools of limit '{name}' matches none of these tools"
            );
        }
    }
    Ok(warnings)
}

/// Warns of a default limit that holds for no tool, or for none of these tools.
fn idle_default(limiter: &Limiter, limits: &[Level<'_>], tools: &[String]) -> Option<String> {
    limits.iter().find(|level| level.name == DEFAULT)?;
    let is_any = |pattern: &&str| pattern.bytes().all(|byte| byte == b'*');
    let of_all = |level: &&Level<'_>| patterns_of(level).iter().any(is_any);
    if let Some(level) = limits.iter().find(of_all) {
        let name = shown(level.name);
        return Some(format!(
            "warning: {DEFAULT} holds for no tool: limit '{name}' holds for all of them\n"
        ));
    }
    let falls_under = |tool: &String| limiter.limits_of(tool) == [DEFAULT];
    (!tools.is_empty() && !tools.iter().any(falls_under))
        .then(|| format!("warning: {DEFAULT} holds for none of these tools\n"))
}

fn patterns_of<'a>(level: &'a Level<'a>) -> Vec<&'a str> {
    level.limit.shared_by().map_or_else(
        || vec![level.name],
        |tools| tools.iter().map(String::as_str).collect(),
    )
}
