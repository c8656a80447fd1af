//! What `simulate` prints: tables, or JSON.

use callgate::{Rate, Unit};
use serde::Serialize;

use super::fit::Fit;
use super::service::Answers;
use super::stats::{Busiest, Tally};
use crate::table::{grouped, hide_if_empty, shown, table};

/// All that is known in the end, as `--json` prints it. Keys are only ever added.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The file of limits.
    pub(crate) file: String,
    pub(crate) trace: String,
    pub(crate) calls: u64,
    /// From the first call to the last.
    pub(crate) seconds: f64,
    /// Lines left out.
    pub(crate) skipped: u64,
    /// The quota of the service behind each limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) service: Option<String>,
    /// The limits that hold for no tool that was called.
    pub(crate) unmatched_limits: Vec<String>,
    /// In the order of the file.
    pub(crate) limits: Vec<Row>,
    /// With the most calls first.
    pub(crate) tools: Vec<Row>,
}

/// A limit, whose busiest times are in tokens; or a tool, whose are in calls.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) calls: u64,
    pub(crate) admitted: u64,
    pub(crate) waited: u64,
    pub(crate) rejected: u64,
    pub(crate) over_burst: u64,
    pub(crate) longest_wait: f64,
    /// None where the trace does not tell how long calls ran.
    pub(crate) most_running: Option<u64>,
    pub(crate) busiest_second: Pair,
    pub(crate) busiest_minute: Pair,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) service: Option<Answered>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fit: Option<Fit>,
}

/// What the service behind a limit answered: to all calls, and to those that all limits admitted.
#[derive(Debug, Serialize)]
pub(crate) struct Answered {
    pub(crate) without_limits: Answers,
    pub(crate) with_limits: Answers,
}

/// What was asked for, and what of that was let in.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    pub(crate) asked: u64,
    pub(crate) admitted: u64,
}

impl Row {
    pub(crate) fn new(name: &str, tally: &Tally, has_durations: bool) -> Self {
        let pair = |window: fn(&Busiest) -> u64| Pair {
            asked: window(&tally.asked),
            admitted: window(&tally.let_in),
        };
        Self {
            name: name.to_owned(),
            calls: tally.calls,
            admitted: tally.admitted,
            waited: tally.waited,
            rejected: tally.rejected,
            over_burst: tally.over_burst,
            longest_wait: seconds(tally.longest_wait),
            most_running: has_durations.then_some(tally.most_running),
            busiest_second: pair(|busiest| busiest.second.most()),
            busiest_minute: pair(|busiest| busiest.minute.most()),
            service: None,
            fit: None,
        }
    }
}

impl Report {
    pub(crate) fn json(&self) -> String {
        let text = serde_json::to_string_pretty(self);
        // Numbers and texts can always be written.
        text.unwrap_or_default() + "\n"
    }

    /// What was run, and under which limits.
    pub(crate) fn heading(&self) -> String {
        let calls = match self.calls {
            1 => "1 call".to_owned(),
            many => format!("{} calls", grouped(many)),
        };
        let tools = match self.tools.len() {
            1 => "1 tool".to_owned(),
            many => format!("{many} tools"),
        };
        format!(
            "{}: {calls} of {tools} in {}, under {}",
            shown(&self.trace),
            time(self.seconds),
            shown(&self.file),
        )
    }

    pub(crate) fn tables(&self) -> String {
        let mut parts = vec![self.heading()];
        parts.push(decisions("limit", &self.limits));
        if !self.unmatched_limits.is_empty() {
            let names = self.unmatched_limits.iter().map(|name| shown(name));
            let names: Vec<_> = names.collect();
            parts.push(format!("No call is of a tool of: {}", names.join(", ")));
        }
        parts.push(decisions("tool", &self.tools));
        parts.push("The busiest second and minute, of limits in tokens:".to_owned());
        parts.push(busiest("limit", &self.limits));
        parts.push("The same of tools, in calls:".to_owned());
        parts.push(busiest("tool", &self.tools));
        if let Some(quota) = &self.service {
            parts.push(format!("Calls that a service of {quota} answers with 429:"));
            parts.push(answers(&self.limits));
        }
        if self.limits.iter().any(|row| row.fit.is_some()) {
            parts.push("The least that rejects no call, of one limit by itself:".to_owned());
            parts.push(fits(&self.limits));
        }
        parts.join("\n\n") + "\n"
    }
}

fn decisions(head: &str, rows: &[Row]) -> String {
    let header = [
        head,
        "calls",
        "admitted",
        "waited",
        "longest wait",
        "rejected",
        "over burst",
        "running",
    ];
    let mut table = table(header, &[1, 2, 3, 4, 5, 6, 7]);
    for row in rows {
        let some = |number: u64| {
            if number == 0 {
                String::new()
            } else {
                grouped(number)
            }
        };
        let wait = if row.longest_wait > 0.0 {
            time(row.longest_wait)
        } else {
            String::new()
        };
        table.add_row([
            shown(&row.name),
            grouped(row.calls),
            grouped(row.admitted),
            some(row.waited),
            wait,
            grouped(row.rejected),
            some(row.over_burst),
            row.most_running.map_or_else(String::new, grouped),
        ]);
    }
    for column in [3, 4, 6, 7] {
        hide_if_empty(&mut table, column);
    }
    table.trim_fmt()
}

fn busiest(head: &str, rows: &[Row]) -> String {
    let header = [
        head,
        "second: asked",
        "admitted",
        "minute: asked",
        "admitted",
    ];
    let mut table = table(header, &[1, 2, 3, 4]);
    for row in rows {
        table.add_row([
            shown(&row.name),
            grouped(row.busiest_second.asked),
            grouped(row.busiest_second.admitted),
            grouped(row.busiest_minute.asked),
            grouped(row.busiest_minute.admitted),
        ]);
    }
    table.trim_fmt()
}

fn answers(rows: &[Row]) -> String {
    let header = ["limit", "without limits", "of", "with limits", "of"];
    let mut table = table(header, &[1, 2, 3, 4]);
    for row in rows {
        let Some(answered) = &row.service else {
            continue;
        };
        let (without, with) = (answered.without_limits, answered.with_limits);
        let cells = [without.refused, without.calls, with.refused, with.calls];
        let [a, b, c, d] = cells.map(grouped);
        table.add_row([shown(&row.name), a, b, c, d]);
    }
    table.trim_fmt()
}

fn fits(rows: &[Row]) -> String {
    let mut table = table(["limit", "burst at its rate", "rate at its burst"], &[1, 2]);
    for row in rows {
        let Some(fit) = &row.fit else {
            continue;
        };
        let none = || "none".to_owned();
        let rate = fit.rate.as_deref().map_or_else(none, readable);
        table.add_row([shown(&row.name), fit.burst.map_or_else(none, grouped), rate]);
    }
    table.trim_fmt()
}

/// A rate, and if it is far below one in its unit, what it is in a longer one.
fn readable(rate: &str) -> String {
    let count = rate.split('/').next().and_then(|count| count.parse().ok());
    let per_second = rate.parse().map_or(0.0, Rate::per_second);
    if rate.ends_with(Unit::Day.symbol()) || count.is_none_or(|count: f64| count >= 0.01) {
        return rate.to_owned();
    }
    let units = [
        (Unit::Minute, 60.0),
        (Unit::Hour, 3_600.0),
        (Unit::Day, 86_400.0),
    ];
    let mut counts = units
        .map(|(unit, seconds)| (unit, per_second * seconds))
        .into_iter();
    let (unit, count) = counts
        .find(|(unit, count)| *count >= 0.01 || *unit == Unit::Day)
        .unwrap_or((Unit::Second, per_second));
    // Three digits.
    let places = (1..9)
        .find(|&places| count * 10_f64.powi(places) >= 100.0)
        .unwrap_or(9);
    format!(
        "{rate} (about {count:.0$}/{1})",
        places.unsigned_abs() as usize,
        unit.symbol()
    )
}

#[expect(clippy::cast_precision_loss, reason = "to be read")]
pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// A time as one says it.
fn time(seconds: f64) -> String {
    // What would be rounded to a thousand of them is a second.
    if seconds < 0.999_5 {
        format!("{:.0} ms", seconds * 1e3)
    } else if seconds < 120.0 {
        format!("{seconds:.2} s")
    } else if seconds < 2.0 * 3_600.0 {
        format!("{:.1} min", seconds / 60.0)
    } else if seconds < 2.0 * 86_400.0 {
        format!("{:.1} h", seconds / 3_600.0)
    } else {
        format!("{:.1} days", seconds / 86_400.0)
    }
}
