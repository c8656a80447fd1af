//! The three tables, their columns, and what is in a cell: how it sorts, and its text.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Duration;

use ratatui::symbols::bar;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::report::{ago, left, level};
use crate::stores::Store;
use crate::table::{grouped, shown};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    Limits,
    Processes,
    Buckets,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Store,
    Process,
    Host,
    Told,
    Limit,
    Key,
    Rate,
    Level,
    Gauge,
    Admitted,
    AdmittedRate,
    Rejected,
    RejectedRate,
    Waiting,
    Paused,
    AdmittedTrend,
    RejectedTrend,
}

/// How a column is drawn.
pub(crate) struct Look {
    pub(crate) title: &'static str,
    /// At least; what is left over goes to names and drawings.
    pub(crate) width: usize,
    pub(crate) is_number: bool,
    /// The highest are left out first where the screen is narrow.
    pub(crate) rank: u8,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Cell<'a> {
    Nothing,
    Text(&'a str),
    /// A number that names something.
    Name(u64),
    Count(u64),
    /// Tenths, a second.
    Tenths(u64),
    /// So many tokens of so many.
    Level(u64, u64),
    Gauge(u64, u64),
    /// What a limit is split by.
    Split(&'a [String]),
    Left(Duration),
    Ago(Duration),
    Trend(&'a VecDeque<u64>),
}

impl Table {
    pub(crate) const ALL: [Self; 3] = [Self::Limits, Self::Processes, Self::Buckets];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Limits => "Limits",
            Self::Processes => "Processes",
            Self::Buckets => "Buckets",
        }
    }

    /// Those for several stores, and those for processes of several hosts.
    pub(crate) fn columns(self, several: bool, hosts: bool) -> impl Iterator<Item = Column> {
        let counts = [
            Column::Admitted,
            Column::AdmittedRate,
            Column::Rejected,
            Column::RejectedRate,
            Column::Waiting,
        ];
        let trends = [Column::AdmittedTrend, Column::RejectedTrend];
        let columns = match self {
            Self::Limits => [
                &[Column::Limit, Column::Rate, Column::Level][..],
                &counts,
                &[Column::Paused],
                &trends,
            ]
            .concat(),
            Self::Processes => [
                &[Column::Process, Column::Host, Column::Limit, Column::Rate][..],
                &counts,
                &[Column::Told],
                &trends,
            ]
            .concat(),
            Self::Buckets => vec![
                Column::Limit,
                Column::Key,
                Column::Level,
                Column::Gauge,
                Column::Paused,
            ],
        };
        let columns = columns
            .into_iter()
            .filter(move |column| hosts || !matches!(column, Column::Host | Column::Told));
        several.then_some(Column::Store).into_iter().chain(columns)
    }

    pub(crate) fn length(self, store: &Store) -> usize {
        match self {
            Self::Limits => store.limits.len(),
            Self::Processes => store.processes.len(),
            Self::Buckets => store.buckets.as_ref().map_or(0, Vec::len),
        }
    }
}

impl Column {
    pub(crate) fn is_drawing(self) -> bool {
        matches!(
            self,
            Self::Gauge | Self::AdmittedTrend | Self::RejectedTrend
        )
    }

    /// What it is called where its neighbour is not seen.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AdmittedRate => "admitted/s",
            Self::RejectedRate => "rejected/s",
            _ => self.look().title,
        }
    }

    pub(crate) fn look(self) -> Look {
        let (title, width, is_number, rank) = match self {
            Self::Store => ("store", 16, false, 2),
            Self::Process => ("process", 7, true, 0),
            Self::Host => ("host", 12, false, 3),
            Self::Told => ("told", 8, true, 2),
            Self::Limit => ("limit", 12, false, 0),
            Self::Key => ("key", 32, false, 1),
            Self::Rate => ("rate", 10, false, 4),
            Self::Level => ("level", 10, true, 0),
            Self::Gauge => ("", 10, false, 3),
            Self::Admitted => ("admitted", 8, true, 0),
            Self::Rejected => ("rejected", 8, true, 0),
            Self::AdmittedRate | Self::RejectedRate => ("/s", 6, true, 1),
            Self::Waiting => ("waits", 5, true, 0),
            Self::Paused => ("paused", 6, true, 0),
            Self::AdmittedTrend => ("admitted", 11, false, 3),
            Self::RejectedTrend => ("rejected", 11, false, 5),
        };
        Look {
            title,
            width,
            is_number,
            rank,
        }
    }
}

impl Cell<'_> {
    /// Names rise; of numbers the largest come first, of levels the emptiest.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => one.cmp(other),
            (Self::Name(one), Self::Name(other)) => one.cmp(other),
            (Self::Count(one), Self::Count(other)) | (Self::Tenths(one), Self::Tenths(other)) => {
                other.cmp(one)
            }
            (Self::Left(one), Self::Left(other)) => other.cmp(one),
            (Self::Ago(one), Self::Ago(other)) => one.cmp(other),
            (Self::Level(one, of), Self::Level(other, of_other)) => {
                let share = |part: u64, whole: u64| u128::from(part) * u128::from(whole);
                share(*one, *of_other).cmp(&share(*other, *of))
            }
            (one, other) => one.is_nothing().cmp(&other.is_nothing()),
        }
    }

    /// Whether rows with other cells come first.
    fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing | Self::Split(_))
    }

    /// Its text, at most so wide, with no character that a terminal would obey.
    pub(crate) fn text(&self, width: usize) -> String {
        match *self {
            Self::Nothing => String::new(),
            Self::Text(text) => fit(&shown(text), width),
            Self::Name(number) => number.to_string(),
            Self::Count(number) => short(number),
            Self::Tenths(tenths @ 0..100) => format!("{}.{}", tenths / 10, tenths % 10),
            Self::Tenths(tenths) => short(tenths / 10),
            Self::Level(remaining, burst) => match level(remaining, burst) {
                text if text.len() <= width => text,
                _ => format!("{}/{}", short(remaining), short(burst)),
            },
            Self::Gauge(remaining, burst) => gauge(remaining, burst, width),
            Self::Split(per) => fit(&format!("per {}", shown(&per.join("+"))), width),
            Self::Left(time) => left(time),
            Self::Ago(time) => ago(time),
            Self::Trend(rates) => sparkline(rates, width),
        }
    }
}

/// A text cut to a width, with a sign where it is.
pub(crate) fn fit(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut cut = String::new();
    let mut room = width.saturating_sub(1);
    for char in text.chars() {
        match room.checked_sub(char.width().unwrap_or(0)) {
            Some(left) => room = left,
            None => break,
        }
        cut.push(char);
    }
    cut.push('…');
    cut
}

/// A number in up to six characters.
fn short(number: u64) -> String {
    const UNITS: [(u64, char); 6] = [
        (1_000_000_000_000_000_000, 'E'),
        (1_000_000_000_000_000, 'P'),
        (1_000_000_000_000, 'T'),
        (1_000_000_000, 'G'),
        (1_000_000, 'M'),
        (1_000, 'k'),
    ];
    if number < 100_000 {
        return grouped(number);
    }
    let unit = UNITS.iter().find(|(unit, _)| number >= *unit);
    let (unit, symbol) = unit.unwrap_or(&(1, ' '));
    match number / unit {
        whole @ 0..100 => format!("{whole}.{}{symbol}", number % unit / (unit / 10)),
        whole => format!("{whole}{symbol}"),
    }
}

fn gauge(remaining: u64, burst: u64, width: usize) -> String {
    let full = u128::from(remaining.min(burst)) * width as u128 / u128::from(burst.max(1));
    let full = usize::try_from(full).unwrap_or(width);
    "█".repeat(full) + &"░".repeat(width - full)
}

/// The latest rates as bars, the largest of them as high as it goes; whatever is not zero is seen.
fn sparkline(rates: &VecDeque<u64>, width: usize) -> String {
    let shown = rates.iter().skip(rates.len().saturating_sub(width));
    let most = shown.clone().copied().max().unwrap_or(0).max(1);
    let bars = [
        " ",
        bar::ONE_EIGHTH,
        bar::ONE_QUARTER,
        bar::THREE_EIGHTHS,
        bar::HALF,
        bar::FIVE_EIGHTHS,
        bar::THREE_QUARTERS,
        bar::SEVEN_EIGHTHS,
        bar::FULL,
    ];
    let height = |rate: u64| (u128::from(rate) * 8).div_ceil(u128::from(most));
    let bars = shown.map(|&rate| bars[usize::try_from(height(rate)).unwrap_or(8)]);
    let text: String = bars.collect();
    " ".repeat(width - text.chars().count()) + &text
}
