//! What the screen shows of the stores: which rows, in which order, and how they went. Time comes in as an
//! argument, and keys as events.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::columns::{Cell, Column, Table};
use crate::stores::{Counts, Limit, Process, Store, Wanted};

/// So many looks are remembered.
pub(crate) const HISTORY: usize = 60;

/// How long it is said that a store is another one now.
const NEWS: Duration = Duration::from_secs(60);

pub(crate) struct Top {
    pub(crate) stores: Vec<Watched>,
    pub(crate) wanted: Wanted,
    pub(crate) interval: Duration,
    pub(crate) table: Table,
    orders: [Order; 3],
    pub(crate) filter: String,
    pub(crate) is_typing: bool,
    pub(crate) is_paused: bool,
    pub(crate) is_help: bool,
    pub(crate) now: Duration,
    /// The rows that the filter leaves, in order: the store, and the place in its list.
    pub(crate) rows: Vec<(usize, usize)>,
    pub(crate) selected: usize,
    /// The first row on the screen, and how many it shows, as it was drawn last.
    pub(crate) first: usize,
    pub(crate) page: usize,
}

/// A store, as it was when last looked at.
pub(crate) struct Watched {
    pub(crate) name: String,
    pub(crate) found: Result<Store, String>,
    /// When it was last found, and which file it was.
    seen: Duration,
    file: Option<(u64, u64)>,
    replaced: Option<Duration>,
    trends: HashMap<Subject, Trend>,
}

/// Whose trend: a limit's, or one process's under it. Processes may have one limit with different numbers.
type Subject = (Option<(u64, Option<String>)>, String, String, u64);

/// What happened between looks, in tenths a second, the latest last.
#[derive(Default)]
pub(crate) struct Trend {
    last: Counts,
    pub(crate) admitted: VecDeque<u64>,
    pub(crate) rejected: VecDeque<u64>,
}

/// By which column a table is sorted, and whether the other way round.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    pub(crate) column: Column,
    pub(crate) is_reversed: bool,
}

/// What to do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Show,
    Quit,
}

impl Top {
    pub(crate) fn new(names: Vec<String>, wanted: Wanted, interval: Duration) -> Self {
        let watched = |name| Watched {
            name,
            found: Err("not looked at yet".to_owned()),
            seen: Duration::ZERO,
            file: None,
            replaced: None,
            trends: HashMap::new(),
        };
        let by = |column| Order {
            column,
            is_reversed: false,
        };
        Self {
            stores: names.into_iter().map(watched).collect(),
            table: if wanted.is_anything() {
                Table::Buckets
            } else {
                Table::Limits
            },
            wanted,
            interval,
            orders: [by(Column::Limit), by(Column::Admitted), by(Column::Level)],
            filter: String::new(),
            is_typing: false,
            is_paused: false,
            is_help: false,
            now: Duration::ZERO,
            rows: Vec::new(),
            selected: 0,
            first: 0,
            page: 1,
        }
    }

    /// Takes what was found in each store at a time.
    pub(crate) fn look(&mut self, now: Duration, found: Vec<Result<Store, String>>) {
        self.now = now;
        for (watched, found) in self.stores.iter_mut().zip(found) {
            watched.look(now, found);
        }
        self.arrange();
    }

    /// Obeys a key.
    pub(crate) fn press(&mut self, key: KeyEvent) -> Next {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return Next::Quit,
            KeyCode::Char(_) if is_control => {}
            _ if self.is_typing => self.type_filter(key.code),
            _ if self.is_help => self.is_help = false,
            KeyCode::Char('q') => return Next::Quit,
            code => self.obey(code),
        }
        Next::Show
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(typed) => self.filter.push(typed),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            _ => return,
        }
        self.arrange();
    }

    fn obey(&mut self, code: KeyCode) {
        let last = self.rows.len().saturating_sub(1);
        let to = match code {
            KeyCode::Down | KeyCode::Char('j') => self.selected + 1,
            KeyCode::Up | KeyCode::Char('k') => self.selected.saturating_sub(1),
            KeyCode::PageDown => self.selected + self.page,
            KeyCode::PageUp => self.selected.saturating_sub(self.page),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            _ => return self.change(code),
        };
        self.selected = to.min(last);
    }

    fn change(&mut self, code: KeyCode) {
        let tables = Table::ALL.len();
        match code {
            KeyCode::Tab => self.turn_to((self.table as usize + 1) % tables),
            KeyCode::BackTab => self.turn_to((self.table as usize + tables - 1) % tables),
            KeyCode::Char('>' | 's') => self.sort(1),
            KeyCode::Char('<') => self.sort(-1),
            KeyCode::Char('r') => self.orders[self.table as usize].is_reversed ^= true,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('p') => self.is_paused ^= true,
            KeyCode::Char('?' | 'h') => self.is_help = true,
            _ => return,
        }
        self.arrange();
    }

    fn turn_to(&mut self, table: usize) {
        self.table = Table::ALL[table];
        self.selected = 0;
    }

    /// Sorts by the column that is so many further.
    fn sort(&mut self, further: isize) {
        let sortable: Vec<_> = self
            .columns()
            .filter(|column| !column.is_drawing())
            .collect();
        let at = sortable
            .iter()
            .position(|column| *column == self.order().column);
        let count = isize::try_from(sortable.len()).unwrap_or(1);
        let at = isize::try_from(at.unwrap_or(0)).unwrap_or(0) + further;
        let at = usize::try_from(at.rem_euclid(count)).unwrap_or(0);
        self.orders[self.table as usize] = Order {
            column: sortable[at],
            is_reversed: false,
        };
    }

    /// The columns of the table, if there is room for all.
    pub(crate) fn columns(&self) -> impl Iterator<Item = Column> {
        let found = self
            .stores
            .iter()
            .filter_map(|store| store.found.as_ref().ok());
        let mut processes = found.flat_map(|store| &store.processes);
        let has_hosts = processes.any(|process| process.host.is_some());
        self.table.columns(self.stores.len() > 1, has_hosts)
    }

    pub(crate) fn order(&self) -> Order {
        self.orders[self.table as usize]
    }

    /// Finds the rows of the table, filters and sorts them.
    fn arrange(&mut self) {
        if self.table == Table::Buckets {
            for watched in &mut self.stores {
                if let Ok(store) = &mut watched.found
                    && let Err(error) = store.list_buckets(&self.wanted)
                {
                    watched.found = Err(error);
                }
            }
        }
        let filter = self.filter.to_lowercase();
        let stores = self.stores.iter().enumerate();
        let rows = stores.flat_map(|(at, watched)| {
            let length = watched
                .found
                .as_ref()
                .map_or(0, |store| self.table.length(store));
            (0..length).map(move |row| (at, row))
        });
        let mut rows: Vec<_> = rows
            .filter(|&row| filter.is_empty() || self.matches(row, &filter))
            .collect();
        let Order {
            column,
            is_reversed,
        } = self.order();
        rows.sort_by(|&one, &other| {
            let order = self.cell(one, column).order(&self.cell(other, column));
            if is_reversed { order.reverse() } else { order }
        });
        self.rows = rows;
        self.selected = self.selected.min(self.rows.len().saturating_sub(1));
    }

    /// Whether a name, a number or a key in the row has the filter in it.
    fn matches(&self, row: (usize, usize), filter: &str) -> bool {
        let names = [
            Column::Store,
            Column::Limit,
            Column::Process,
            Column::Host,
            Column::Key,
        ];
        names
            .into_iter()
            .any(|column| match self.cell(row, column) {
                Cell::Text(text) => text.to_lowercase().contains(filter),
                Cell::Name(number) => number.to_string().contains(filter),
                _ => false,
            })
    }

    /// What a row has in a column.
    pub(crate) fn cell(&self, (at, row): (usize, usize), column: Column) -> Cell<'_> {
        let Some(watched) = self.stores.get(at) else {
            return Cell::Nothing;
        };
        match (column, &watched.found) {
            (Column::Store, _) => Cell::Text(&watched.name),
            (_, Ok(store)) => watched.cell(store, self.table, row, column),
            _ => Cell::Nothing,
        }
    }
}

impl Watched {
    fn look(&mut self, now: Duration, found: Result<Store, String>) {
        if let Ok(store) = &found {
            if self.file.is_some() && self.file != store.file {
                self.replaced = Some(now);
                self.trends.clear();
            }
            self.file = store.file;
            self.follow(store, now.saturating_sub(self.seen));
            self.seen = now;
        }
        if self
            .replaced
            .is_some_and(|then| now.saturating_sub(then) > NEWS)
        {
            self.replaced = None;
        }
        self.found = found;
    }

    /// Compares each count with the one before.
    fn follow(&mut self, store: &Store, passed: Duration) {
        let limits = store.limits.iter().map(|row| (of_limit(row), row.counts));
        let processes = store.processes.iter();
        let processes = processes.map(|row| (of_process(row), row.counts));
        let mut old = std::mem::take(&mut self.trends);
        for (subject, counts) in limits.chain(processes) {
            let mut trend = old.remove(&subject);
            if let Some(trend) = &mut trend {
                trend.add(counts, passed);
            }
            let trend = trend.unwrap_or_else(|| Trend {
                last: counts,
                ..Trend::default()
            });
            self.trends.insert(subject, trend);
        }
    }

    /// How long ago it became another file, if that is news.
    pub(crate) fn replaced(&self, now: Duration) -> Option<Duration> {
        self.replaced.map(|then| now.saturating_sub(then))
    }

    fn cell<'a>(&'a self, store: &'a Store, table: Table, row: usize, column: Column) -> Cell<'a> {
        let cell = match table {
            Table::Limits => store.limits.get(row).map(|limit| match column {
                Column::Limit => Cell::Text(&limit.name),
                Column::Rate => Cell::Text(&limit.rate),
                Column::Level => limit
                    .remaining
                    .map_or(Cell::Split(&limit.per), |remaining| {
                        Cell::Level(remaining, limit.burst)
                    }),
                Column::Paused => limit.paused.map_or(Cell::Nothing, Cell::Left),
                _ => self.counted(limit.counts, column, || of_limit(limit)),
            }),
            Table::Processes => store.processes.get(row).map(|process| match column {
                Column::Process => Cell::Name(process.pid),
                Column::Host => process.host.as_deref().map_or(Cell::Nothing, Cell::Text),
                Column::Told => process.told.map_or(Cell::Nothing, Cell::Ago),
                Column::Limit => Cell::Text(&process.limit),
                Column::Rate => Cell::Text(&process.rate),
                _ => self.counted(process.counts, column, || of_process(process)),
            }),
            Table::Buckets => {
                let buckets = store.buckets.as_deref().unwrap_or_default();
                buckets.get(row).map(|bucket| match column {
                    Column::Limit => Cell::Text(&bucket.limit),
                    Column::Key => Cell::Text(&bucket.key),
                    Column::Level => Cell::Level(bucket.remaining, bucket.burst),
                    Column::Gauge => Cell::Gauge(bucket.remaining, bucket.burst),
                    Column::Paused => bucket.paused.map_or(Cell::Nothing, Cell::Left),
                    _ => Cell::Nothing,
                })
            }
        };
        cell.unwrap_or(Cell::Nothing)
    }

    fn counted(
        &self,
        counts: Counts,
        column: Column,
        subject: impl FnOnce() -> Subject,
    ) -> Cell<'_> {
        match column {
            Column::Admitted => return Cell::Count(counts.admitted),
            Column::Rejected => return Cell::Count(counts.rejected),
            Column::Waiting => return Cell::Count(counts.waiting),
            _ => {}
        }
        let Some(trend) = self.trends.get(&subject()) else {
            return Cell::Nothing;
        };
        let rate = |rates: &VecDeque<u64>| {
            rates
                .back()
                .map_or(Cell::Nothing, |&rate| Cell::Tenths(rate))
        };
        match column {
            Column::AdmittedRate => rate(&trend.admitted),
            Column::RejectedRate => rate(&trend.rejected),
            Column::AdmittedTrend => Cell::Trend(&trend.admitted),
            Column::RejectedTrend => Cell::Trend(&trend.rejected),
            _ => Cell::Nothing,
        }
    }
}

fn of_limit(limit: &Limit) -> Subject {
    (None, limit.name.clone(), limit.rate.clone(), limit.burst)
}

fn of_process(row: &Process) -> Subject {
    (
        Some((row.pid, row.host.clone())),
        row.limit.clone(),
        row.rate.clone(),
        row.burst,
    )
}

impl Trend {
    fn add(&mut self, counts: Counts, passed: Duration) {
        let passed = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = |now: u64, before: u64| {
            // A process that ended takes its counts along.
            now.saturating_sub(before).saturating_mul(10_000) / passed
        };
        let admitted = rate(counts.admitted, self.last.admitted);
        let rejected = rate(counts.rejected, self.last.rejected);
        for (rates, rate) in [
            (&mut self.admitted, admitted),
            (&mut self.rejected, rejected),
        ] {
            rates.push_back(rate);
            if rates.len() > HISTORY {
                rates.pop_front();
            }
        }
        self.last = counts;
    }
}
