//! Who waits for a bucket, and how many calls run that it admitted: in this process, in front of the store.
//!
//! A [`Line`] says whose turn it is. It is a state machine: time comes in as an argument, and it does not
//! know how many tokens there are. Whoever waits is told a time at which to come and ask again, and is
//! woken before that if the turn comes earlier. So a bucket that refills costs one wake-up a grant,
//! however many wait for it, and nobody's turn depends on somebody else's timer.
//!
//! Those who came first are served first: by their arrival at the limiter, at whichever of its buckets
//! they wait. Somebody who does not come within [`CLAIM`] of the time that they were told (their event loop
//! is stopped, say) is passed over: out of the line, and first again when they do come.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};
use std::task::Waker;

#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};

use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::store::{self, Key};

/// How long a turn is kept for somebody who does not come, in nanoseconds: 50 ms.
pub(crate) const CLAIM: u64 = 50_000_000;

/// Counts the forks that this process is a child of.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Says that this process is a forked child: nobody waits here who waited in the parent, and none of the
/// parent's calls run here.
///
/// For front ends of languages that fork; while it runs, no other thread may use a limiter.
pub fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How many forks this process is a child of.
#[inline]
pub(crate) fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// What some who wait stop together with: an event loop, say.
///
/// Whoever waits longest of all may have stopped; then somebody with another home sees to it that
/// others get their turn.
#[derive(Clone, Debug, Default)]
pub struct Home(Arc<AtomicBool>);

/// Counts the homes that are gone.
static GONE: AtomicU64 = AtomicU64::new(0);

impl Home {
    /// Says that it is gone, as a closed event loop is: nobody who waits there will come, and all places are
    /// given up.
    pub fn close(&self) {
        if !self.0.swap(true, Ordering::Relaxed) {
            GONE.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_gone(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for Home {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Home {}

/// The lines of one limit, one for each of its buckets that anybody waits for or that has calls running.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<Buckets>);

#[derive(Debug, Default)]
pub(crate) struct Buckets {
    lines: HashMap<Option<Key>, Line, FxBuildHasher>,
    /// Grows when keys come to mean something else.
    edition: u64,
    /// The calls running that were admitted under keys from before.
    elsewhere: u64,
    forks: u64,
    gone: u64,
}

pub(crate) type Locked<'a> = MutexGuard<'a, Buckets>;

/// Those to be woken when it is dropped: when no line is locked any more, since whatever they are may
/// run, or go, in there.
#[derive(Default)]
pub(crate) struct Wakes {
    woken: SmallVec<[Waker; 2]>,
    gone: SmallVec<[Waker; 1]>,
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.woken.drain(..).for_each(Waker::wake);
    }
}

impl Lines {
    /// Locks all of them, without those who cannot come any more.
    pub(crate) fn lock(&self, wakes: &mut Wakes) -> Locked<'_> {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let forks = forks();
        if buckets.forks != forks {
            buckets.clear(wakes);
            buckets.elsewhere = 0;
            buckets.forks = forks;
        }
        let gone = GONE.load(Ordering::Relaxed);
        if buckets.gone != gone {
            buckets.gone = gone;
            for line in buckets.lines.values_mut() {
                line.forget_the_gone(wakes);
            }
            buckets.lines.retain(|_, line| !line.is_empty());
        }
        buckets
    }

    /// Has everybody give their places up and ask again, since the keys mean something else from now on.
    pub(crate) fn disperse(&self, wakes: &mut Wakes) {
        let mut buckets = self.lock(wakes);
        buckets.wake_all(wakes);
        buckets.clear(wakes);
    }
}

impl Buckets {
    pub(crate) fn wake_all(&mut self, wakes: &mut Wakes) {
        for line in self.lines.values_mut() {
            for waiting in line.waiting.values_mut() {
                waiting.wake(wakes);
            }
        }
    }

    /// Starts with other keys, and without any places.
    fn clear(&mut self, wakes: &mut Wakes) {
        self.edition += 1;
        for line in mem::take(&mut self.lines).into_values() {
            self.elsewhere += line.running;
            let places = line.waiting.into_values();
            wakes.gone.extend(places.map(|waiting| waiting.waker));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.lines.values().map(|line| line.waiting.len()).sum()
    }

    /// How many calls of a bucket run.
    pub(crate) fn running(&self, key: Option<Key>) -> u64 {
        self.lines.get(&key).map_or(0, |line| line.running) + self.elsewhere
    }

    /// Who comes before somebody of this arrival and home.
    pub(crate) fn before(
        &mut self,
        key: Option<Key>,
        (arrival, home): (u64, Option<&Home>),
        now: u64,
        wakes: &mut Wakes,
    ) -> Option<Ahead> {
        self.lines.get_mut(&key)?.before(arrival, home, now, wakes)
    }

    pub(crate) fn line(&mut self, key: Option<Key>) -> &mut Line {
        self.lines.entry(key).or_default()
    }

    /// Takes somebody out of their line.
    pub(crate) fn leave(&mut self, key: Option<Key>, arrival: u64, left: Left, wakes: &mut Wakes) {
        if let Some(line) = self.lines.get_mut(&key) {
            line.leave(arrival, left, wakes);
            if line.is_empty() {
                self.lines.remove(&key);
            }
        }
    }

    /// One more call of a bucket runs.
    pub(crate) fn start(&mut self, key: Option<Key>) -> u64 {
        self.line(key).running += 1;
        self.edition
    }

    /// A call that was started in this edition has ended.
    fn end(&mut self, key: Option<Key>, edition: u64, wakes: &mut Wakes) {
        if edition != self.edition {
            self.elsewhere = self.elsewhere.saturating_sub(1);
            for line in self.lines.values_mut() {
                line.has_room(wakes);
            }
        } else if let Some(line) = self.lines.get_mut(&key) {
            line.running = line.running.saturating_sub(1);
            line.has_room(wakes);
            if line.is_empty() {
                self.lines.remove(&key);
            }
        }
    }
}

/// Those who wait for one bucket, and the calls of it that run.
#[derive(Debug, Default)]
pub(crate) struct Line {
    running: u64,
    /// By arrival.
    waiting: BTreeMap<u64, Waiting>,
    /// What all of them ask for.
    tokens: u64,
    /// Somebody left who was before those up to this arrival: their turn may come earlier than they know.
    early: u64,
    /// The first who is not where the very first is, if anybody is; and where that one was.
    watcher: Option<u64>,
    watched: Option<Home>,
}

/// Somebody who waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) tokens: u64,
    /// None where it is a thread of their own, which does not stop.
    pub(crate) home: Option<Home>,
    pub(crate) told: Told,
    pub(crate) waker: Waker,
}

/// What somebody was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// To come at this time, for a reason.
    At(u64, Why),
    /// To come now, at a time that nobody has looked at yet.
    Now,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The bucket will have refilled.
    Tokens,
    /// Others are to come first.
    Others,
    /// So many calls run as may; the time is the last that there is.
    Running,
    /// They were woken.
    Woken,
    /// They come when a store has answered, and that is the time by which it has.
    Answer,
}

/// How somebody left a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// With what they waited for; whether one more call may run beside theirs.
    Granted { has_room: bool },
    /// Without: those behind may come earlier.
    Gone,
}

/// Who comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// What they ask for.
    pub(crate) tokens: u64,
    /// When the first of them is passed over, having not come.
    pub(crate) passed_at: u64,
    /// Whether the first of them asks a store.
    pub(crate) asks: bool,
}

impl Line {
    fn is_empty(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }

    /// Who comes before somebody of this arrival, at this time. Passes over those who should have come, unless
    /// they are at the same home: that does not stand still, it is late.
    fn before(
        &mut self,
        arrival: u64,
        home: Option<&Home>,
        now: u64,
        wakes: &mut Wakes,
    ) -> Option<Ahead> {
        loop {
            let mut first = self.waiting.first_entry()?;
            if *first.key() >= arrival {
                return None;
            }
            let told = match first.get().told {
                Told::At(told, _) => told,
                Told::Now => {
                    first.get_mut().told = Told::At(now, Why::Woken);
                    now
                }
            };
            let asks = matches!(first.get().told, Told::At(_, Why::Answer));
            let is_late = home.is_some() && first.get().home.as_ref() == home;
            let told = if is_late { told.max(now) } else { told };
            let passed_at = told.saturating_add(CLAIM);
            if now < passed_at {
                let tokens = self.tokens_before(arrival);
                return Some(Ahead {
                    tokens,
                    passed_at,
                    asks,
                });
            }
            let stopped = first.get().home.clone();
            let mut has_room = false;
            // Those who come next and stop together with the first are not coming either. All of them will
            // when they can: they were told a time that is over, or are told now.
            while let Some(first) = self.waiting.first_entry()
                && *first.key() < arrival
            {
                let mut absent = first.remove();
                self.tokens -= absent.tokens;
                if absent.is_to_come_after(now) {
                    absent.wake(wakes);
                }
                has_room |= absent.may_have_had_room();
                wakes.gone.push(absent.waker);
                let next = self.waiting.first_key_value();
                if stopped.is_none() || next.is_some_and(|(_, next)| next.home != stopped) {
                    break;
                }
            }
            self.come_early();
            self.next(has_room, Some(arrival), wakes);
        }
    }

    fn tokens_before(&self, arrival: u64) -> u64 {
        match self.waiting.last_key_value() {
            Some((&last, _)) if last >= arrival => {
                let before = self.waiting.range(..arrival);
                before.map(|(_, waiting)| waiting.tokens).sum()
            }
            _ => self.tokens,
        }
    }

    /// Whether somebody who is about to wait is to look after the first: the first one who does not stop
    /// together with them.
    pub(crate) fn is_watched_by(&self, arrival: u64, home: Option<&Home>) -> bool {
        let Some((&first, waiting)) = self.waiting.first_key_value() else {
            return false;
        };
        first < arrival
            && waiting.home.is_some()
            && waiting.home.as_ref() != home
            && self.watcher.is_none_or(|watcher| watcher >= arrival)
    }

    /// Takes somebody in, or what they are told now.
    pub(crate) fn wait(&mut self, arrival: u64, waiting: Waiting, wakes: &mut Wakes) {
        let watches = self.is_watched_by(arrival, waiting.home.as_ref());
        let was_first = self.waiting.first_key_value().map(|(&first, _)| first);
        self.tokens += waiting.tokens;
        if let Some(before) = self.waiting.insert(arrival, waiting) {
            self.tokens -= before.tokens;
            wakes.gone.push(before.waker);
        }
        if watches {
            self.watcher = Some(arrival);
        }
        if was_first.is_some_and(|first| arrival <= first) {
            self.watch(wakes);
        }
    }

    fn leave(&mut self, arrival: u64, how: Left, wakes: &mut Wakes) {
        let first = self.waiting.first_key_value().map(|(&first, _)| first);
        let Some(left) = self.waiting.remove(&arrival) else {
            return;
        };
        self.tokens -= left.tokens;
        let has_room = match how {
            Left::Granted { has_room } => has_room,
            Left::Gone => {
                self.come_early();
                left.may_have_had_room()
            }
        };
        if first == Some(arrival) {
            self.next(has_room, None, wakes);
        } else {
            self.watch(wakes);
        }
        wakes.gone.push(left.waker);
    }

    /// Lets those go whose home is gone.
    fn forget_the_gone(&mut self, wakes: &mut Wakes) {
        let is_gone = |waiting: &Waiting| waiting.home.as_ref().is_some_and(Home::is_gone);
        let before = self.waiting.len();
        self.waiting.retain(|_, waiting| {
            if is_gone(waiting) {
                wakes.gone.push(waiting.waker.clone());
            }
            !is_gone(waiting)
        });
        if self.waiting.len() < before {
            self.tokens = self.waiting.values().map(|waiting| waiting.tokens).sum();
            self.come_early();
            self.next(true, None, wakes);
        }
    }

    /// All who wait now may come earlier than they know.
    fn come_early(&mut self) {
        let last = self.waiting.last_key_value();
        self.early = last.map_or(0, |(&last, _)| last);
    }

    /// Somebody else is the first, and is woken if their turn may have come. One who is asking just now is
    /// awake.
    fn next(&mut self, has_room: bool, asking: Option<u64>, wakes: &mut Wakes) {
        let early = self.early;
        if let Some(mut first) = self.waiting.first_entry()
            && asking != Some(*first.key())
        {
            let may_come = match first.get().told {
                Told::At(_, Why::Tokens) => *first.key() <= early,
                Told::At(_, Why::Others) => true,
                Told::At(_, Why::Running) => has_room,
                Told::At(_, Why::Woken | Why::Answer) | Told::Now => false,
            };
            if may_come {
                first.get_mut().wake(wakes);
            }
        }
        self.watch(wakes);
    }

    /// One call fewer runs.
    fn has_room(&mut self, wakes: &mut Wakes) {
        if let Some(mut first) = self.waiting.first_entry()
            && let Told::At(_, Why::Running) = first.get().told
        {
            first.get_mut().wake(wakes);
            self.watch(wakes);
        }
    }

    /// Sees to it that the first is looked after, who may be in an event loop that is stopped.
    fn watch(&mut self, wakes: &mut Wakes) {
        let Some((&first, waiting)) = self.waiting.first_key_value() else {
            *self = Self {
                running: self.running,
                ..Self::default()
            };
            return;
        };
        let (home, told) = (waiting.home.clone(), waiting.told);
        let gone = |watcher: u64| watcher <= first || !self.waiting.contains_key(&watcher);
        if home != self.watched || self.watcher.is_some_and(gone) {
            self.watcher = home.as_ref().and_then(|_| {
                let mut others = self.waiting.iter();
                let other = others.find(|(_, waiting)| waiting.home != home);
                other.map(|(&arrival, _)| arrival)
            });
            self.watched = home;
        }
        let watcher = self
            .watcher
            .and_then(|watcher| self.waiting.get_mut(&watcher));
        let in_time =
            |at: u64| matches!(told, Told::At(told, _) if at <= told.saturating_add(CLAIM));
        if let Some(watcher) = watcher
            && !matches!(watcher.told, Told::At(at, _) if in_time(at))
        {
            watcher.wake(wakes);
        }
    }
}

impl Waiting {
    fn wake(&mut self, wakes: &mut Wakes) {
        if !matches!(self.told, Told::At(_, Why::Woken | Why::Answer) | Told::Now) {
            self.told = Told::Now;
            wakes.woken.push(self.waker.clone());
        }
    }

    fn is_to_come_after(&self, now: u64) -> bool {
        matches!(self.told, Told::At(told, _) if told > now)
    }

    /// Whether, if they go, it may be that one more call may run.
    fn may_have_had_room(&self) -> bool {
        !matches!(self.told, Told::At(_, Why::Running))
    }
}

/// A place in a line. It is given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) lines: Arc<Lines>,
    /// What they wait for.
    pub(crate) buckets: store::Buckets,
    pub(crate) key: Option<Key>,
    pub(crate) arrival: u64,
    /// Whether it was given up before.
    pub(crate) is_left: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        let mut wakes = Wakes::default();
        let mut buckets = self.lines.lock(&mut wakes);
        buckets.leave(self.key, self.arrival, Left::Gone, &mut wakes);
        self.buckets.count_waiting(buckets.waiting());
        drop(buckets);
    }
}

/// Calls that count as running until this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) lines: Arc<Lines>,
    pub(crate) key: Option<Key>,
    pub(crate) edition: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut wakes = Wakes::default();
        let mut buckets = self.lines.lock(&mut wakes);
        buckets.end(self.key, self.edition, &mut wakes);
        drop(buckets);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "waiting/tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "waiting/loom_tests.rs"]
mod loom_tests;
