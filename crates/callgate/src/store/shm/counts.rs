//! What each process counts, for those who look into the file.
//!
//! A row is one process's and one limit's, so no decision writes to a cache line that other processes
//! write to. A forked child takes rows of its own, once its front end said that it was forked. Where all
//! rows are taken, nothing is counted.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::file::{File, Locked, Row};
use crate::waiting::forks;

/// The row that a process counts in: how often it was forked in the high half, the row's number in the low one.
#[derive(Debug)]
pub(super) struct Counts(AtomicU64);

/// No row's number.
const NONE: u64 = u32::MAX as u64;

impl Counts {
    pub(super) fn new(file: &File, locked: &Locked<'_>, edition: usize, me: Process) -> Self {
        Self(AtomicU64::new(claim(file, locked, edition, me)))
    }

    #[inline]
    pub(super) fn row<'a>(&self, file: &'a File, edition: usize) -> Option<&'a Row> {
        let mut claimed = self.0.load(Ordering::Relaxed);
        if claimed >> 32 != forks() & NONE {
            claimed = self.claim_again(file, edition)?;
        }
        row(file, claimed)
    }

    /// Not where somebody has the lock just now.
    #[cold]
    fn claim_again(&self, file: &File, edition: usize) -> Option<u64> {
        let me = Process::own();
        let locked = file.try_lock()?;
        let mut claimed = self.0.load(Ordering::Relaxed);
        if claimed >> 32 != forks() & NONE {
            claimed = claim(file, &locked, edition, me);
            self.0.store(claimed, Ordering::Relaxed);
        }
        Some(claimed)
    }

    pub(super) fn give_up(&self, file: &File) {
        let mine = (forks() & NONE) << 32;
        let claimed = self.0.swap(mine | NONE, Ordering::Relaxed);
        // A forked child leaves its parent's.
        if let Some(row) = row(file, claimed).filter(|_| claimed >> 32 == mine >> 32) {
            row.process.store(0, Ordering::Release);
        }
    }
}

fn row(file: &File, claimed: u64) -> Option<&Row> {
    let number = usize::try_from(claimed & NONE).ok()?;
    file.rows().get(number)
}

/// Takes a free row, or one of a process that is no more. Under the lock.
fn claim(file: &File, _locked: &Locked<'_>, edition: usize, me: Process) -> u64 {
    let rows = file.rows();
    let free = |row: &Row| row.process.load(Ordering::Acquire) == 0;
    let number = rows.iter().position(free);
    let number = number.or_else(|| rows.iter().position(|row| Process::of(row).is_dead(&me)));
    let forked = (forks() & NONE) << 32;
    let Some((number, row)) = number.and_then(|number| Some((number, rows.get(number)?))) else {
        return forked | NONE;
    };
    for (word, value) in [
        (&row.started, me.started),
        (&row.namespace, me.namespace),
        (&row.edition, edition as u64),
        (&row.admitted, 0),
        (&row.rejected, 0),
        (&row.waiting, 0),
    ] {
        word.store(value, Ordering::Relaxed);
    }
    row.process.store(me.number, Ordering::Release);
    forked | number as u64
}

/// The numbers of the processes that have rows, in order.
pub(super) fn users(file: &File) -> Vec<u64> {
    let me = Process::own();
    let rows = file.rows().iter().map(Process::of);
    let users = rows.filter(|process| process.number != 0 && !process.is_dead(&me));
    let mut numbers: Vec<_> = users.map(|process| process.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// A process: its number, when it was started, and the namespace in which it has that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) number: u64,
    pub(super) started: u64,
    pub(super) namespace: u64,
}

impl Process {
    pub(super) fn own() -> Self {
        let number = u64::from(process::id());
        Self {
            number,
            started: started(number).unwrap_or(0),
            namespace: fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino()),
        }
    }

    fn of(row: &Row) -> Self {
        let said = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Self {
            number: said(&row.process),
            started: said(&row.started),
            namespace: said(&row.namespace),
        }
    }

    /// Whether it has ended; of processes in other namespaces nobody knows.
    pub(super) fn is_dead(&self, me: &Self) -> bool {
        self.namespace == me.namespace && started(self.number) != Some(self.started)
    }
}

/// When a process was started, in the kernel's ticks.
fn started(process: u64) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is a name in parentheses and may have anything in it; the 22nd is wanted.
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(19)?.parse().ok()
}
