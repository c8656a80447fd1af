//! Times that mean something on a busy machine: short slices in turn, and medians of ratios.
//!
//! A slice is so short that few are interrupted; a ratio is of two slices, one right after the
//! other, so a processor that speeds up or slows down does so in both.

use std::fs;
use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use governor::clock::QuantaInstant;

use crate::shared::Beside;

/// How many calls a slice has.
const SLICE: u32 = 2_000;

/// How many calls come before it, so that the processor has seen code and data.
const WARM: u32 = 200;

/// How long a slice lasts where two threads call at once.
const TOGETHER: Duration = Duration::from_micros(300);

/// The calls between two looks at the time in such a slice.
const BATCH: u32 = 100;

/// How often everything is measured, as long as there is time for it.
pub(crate) const ROUNDS: usize = 500;
const BUDGET: Duration = Duration::from_secs(15);

/// Into how many parts the rounds are cut to see whether they agree, and how many a part has at least.
const PARTS: usize = 5;
const LEAST: usize = 3;

/// A figure is noisy whose parts are further apart than this, as a part of it.
pub(crate) const NOISY: f64 = 0.1;

/// What a call came to.
pub(crate) trait Answer {
    /// Whether it is the answer that was to be timed.
    fn expected(&self) -> bool;
}

/// A time, which is as good as any other.
impl Answer for u64 {
    fn expected(&self) -> bool {
        true
    }
}

/// A time of governor's own clock.
impl Answer for QuantaInstant {
    fn expected(&self) -> bool {
        true
    }
}

/// Whether the call went as expected, where that is all that is asked.
impl Answer for bool {
    fn expected(&self) -> bool {
        *self
    }
}

/// How long a refused call is to wait; none where it was admitted.
impl Answer for Option<Duration> {
    fn expected(&self) -> bool {
        self.is_some_and(|wait| wait > Duration::ZERO)
    }
}

/// When a refused call may come again; none where it was admitted.
impl Answer for Option<Instant> {
    fn expected(&self) -> bool {
        self.is_some_and(|due| due > Instant::now())
    }
}

/// Something to time.
pub(crate) struct Case {
    run: Box<dyn Fn(u32) + Sync>,
    check: Box<dyn Fn() -> bool + Sync>,
    /// The number of the next call.
    next: Arc<AtomicU32>,
    warm: u32,
    read: Box<dyn Fn(u32) + Sync>,
    slice: u32,
}

impl Case {
    /// Times `call`, which is given the subject and the number of the call, ever.
    ///
    /// The compiler may assume nothing about the subject and has to produce the answer, a word
    /// or two; all else is compiled as in a user's program.
    pub(crate) fn new<S, A, F>(subject: S, call: F) -> Self
    where
        S: Sync + 'static,
        A: Answer,
        F: Fn(&S, u32) -> A + Sync + Copy + 'static,
    {
        let subject: &'static S = Box::leak(Box::new(subject));
        let next = Arc::new(AtomicU32::new(0));
        Self {
            next: Arc::clone(&next),
            run: Box::new(move |calls| {
                let first = next.fetch_add(calls, Ordering::Relaxed);
                for number in 0..calls {
                    black_box(call(black_box(subject), first.wrapping_add(number)));
                }
            }),
            check: Box::new(move || call(subject, 0).expected()),
            warm: 0,
            read: Box::new(|_| ()),
            slice: SLICE,
        }
    }

    /// For calls that take long: so many of them are a slice.
    pub(crate) fn in_slices_of(self, calls: u32) -> Self {
        Self {
            slice: calls,
            ..self
        }
    }

    /// So many calls are to bring a processor's caches to where they would be without the other cases;
    /// and what a call is asked with is to be at hand, as it is in life: `read` reads it.
    pub(crate) fn warmed_by(self, calls: u32, read: impl Fn(u32) + Sync + 'static) -> Self {
        Self {
            warm: calls,
            read: Box::new(read),
            ..self
        }
    }

    fn warm_up(&self) {
        (self.run)(self.warm);
        let next = self.next.load(Ordering::Relaxed);
        for number in 0..WARM + self.slice {
            (self.read)(next.wrapping_add(number));
        }
    }

    /// Whether a call is answered as expected.
    pub(crate) fn holds(&self) -> bool {
        (self.check)()
    }

    /// Nanoseconds a call, over a slice.
    fn slice(&self) -> f64 {
        (self.run)(WARM.min(self.slice / 10));
        let start = Instant::now();
        (self.run)(self.slice);
        nanos(start.elapsed()) / f64::from(self.slice)
    }

    /// Calls for so long.
    pub(crate) fn run_for(&self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            (self.run)(BATCH);
        }
    }

    /// Calls for a while.
    fn stretch(&self) -> Stretch {
        let waited = runnable();
        let (start, mut calls) = (Instant::now(), 0);
        loop {
            (self.run)(BATCH);
            calls += BATCH;
            let end = Instant::now();
            if end.duration_since(start) >= TOGETHER {
                let waited = runnable().saturating_sub(waited);
                return Stretch {
                    start,
                    end,
                    calls,
                    waited,
                };
            }
        }
    }
}

/// What a call costs, and how that compares with something else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) nanos: f64,
    pub(crate) ratio: Figure,
}

/// A number, and how far it moved while it was taken: as a part of it, NaN where there is too little to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) value: f64,
    spread: f64,
}

impl Figure {
    /// What was counted and not timed.
    pub(crate) fn exact(value: f64) -> Self {
        Self { value, spread: 0.0 }
    }

    /// The median, and how far the medians of consecutive parts are apart.
    pub(crate) fn of(values: &[f64]) -> Self {
        let value = median(values);
        let part = values.len() / PARTS;
        let spread = if part < LEAST {
            f64::NAN
        } else {
            let parts = values.chunks_exact(part).map(median);
            let (low, high) = parts.fold((f64::MAX, 0.0_f64), |(low, high), part| {
                (low.min(part), high.max(part))
            });
            (high - low) / value
        };
        Self { value, spread }
    }

    pub(crate) fn over(self, other: Self) -> Self {
        Self {
            value: self.value / other.value,
            spread: self.spread + other.spread,
        }
    }

    /// Whether it moved so much that it says little.
    pub(crate) fn is_noisy(self) -> bool {
        self.spread.is_nan() || self.spread > NOISY
    }

    /// Whether it is at most this, where it says that much.
    pub(crate) fn is_at_most(self, most: f64) -> Option<bool> {
        let apart = (self.value / most - 1.0).abs();
        (!self.is_noisy() || apart > self.spread).then_some(self.value <= most)
    }
}

/// What each case costs, against the clock.
pub(crate) fn against(clock: &Case, cases: &[&Case]) -> Vec<Cost> {
    in_turn(cases, |case| {
        case.warm_up();
        Some((clock.slice(), case.slice()))
    })
}

/// What each thing costs, one of so many that are done together, against the clock.
pub(crate) fn together<T>(
    clock: &Case,
    things: &[T],
    times: u32,
    time: impl Fn(&T) -> Duration,
) -> Vec<Cost> {
    in_turn(things, |thing| {
        Some((clock.slice(), nanos(time(thing)) / f64::from(times)))
    })
}

/// How long something takes this thread; a wait for a processor does not count.
pub(crate) fn timed(what: impl FnOnce()) -> Duration {
    let (waited, start) = (runnable(), Instant::now());
    what();
    let elapsed = start.elapsed();
    elapsed.saturating_sub(runnable().saturating_sub(waited))
}

/// What each case costs two threads at once, against one of them alone.
pub(crate) fn two_threads(cases: &[&Case]) -> Vec<Cost> {
    let arrived = AtomicU32::new(0);
    let together = |case: &Case| {
        case.warm_up();
        let both = (arrived.fetch_add(1, Ordering::Relaxed) | 1) + 1;
        while arrived.load(Ordering::Relaxed) < both {
            spin_loop();
        }
        case.stretch()
    };
    thread::scope(|scope| {
        let (send, cases_to_run) = mpsc::channel();
        let (done, other) = mpsc::channel();
        scope.spawn(move || {
            for case in cases_to_run {
                done.send(together(case)).expect("a listener");
            }
        });
        in_turn(cases, |&case| {
            case.warm_up();
            let alone = side_by_side([case.stretch()])?;
            send.send(case).expect("a listener");
            let both = [together(case), other.recv().expect("an answer")];
            Some((alone, side_by_side(both)?))
        })
    })
}

/// What each case costs while another process calls too, against alone.
pub(crate) fn beside(cases: &[(&'static str, Case, Beside)]) -> Vec<Cost> {
    in_turn(cases, |(_, case, other)| {
        case.warm_up();
        let alone = side_by_side([case.stretch()])?;
        let together = other.during(|| case.stretch());
        Some((alone, side_by_side([together])?))
    })
}

/// Calls of one thread.
#[derive(Clone, Copy)]
struct Stretch {
    start: Instant,
    end: Instant,
    calls: u32,
    /// How long the thread could have run and did not.
    waited: Duration,
}

/// Nanoseconds a call and thread, if the threads ran side by side.
///
/// A thread may have slept, since a lock may be why, but not have waited for a processor.
fn side_by_side<const THREADS: usize>(threads: [Stretch; THREADS]) -> Option<f64> {
    let start = threads.iter().map(|thread| thread.start).max()?;
    let end = threads.iter().map(|thread| thread.end).min()?;
    let waited = threads.iter().map(|thread| thread.waited).max()?;
    let calls: u32 = threads.iter().map(|thread| thread.calls).sum();
    let times = threads
        .iter()
        .map(|thread| nanos(thread.end.duration_since(thread.start)));
    let good = end.saturating_duration_since(start) > TOGETHER * 3 / 4 && waited < TOGETHER / 4;
    good.then(|| times.sum::<f64>() / f64::from(calls))
}

/// How long this thread was ready to run and did not, ever; nothing where Linux does not say.
fn runnable() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let waited = stat
        .split_whitespace()
        .nth(1)
        .and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(waited.unwrap_or(0))
}

/// Takes pairs of times (the base and the subject's) of each subject in turn, and their medians.
fn in_turn<T>(subjects: &[T], time: impl Fn(&T) -> Option<(f64, f64)>) -> Vec<Cost> {
    let mut pairs = vec![Vec::with_capacity(ROUNDS); subjects.len()];
    for subject in subjects {
        time(subject); // warms up
    }
    let start = Instant::now();
    for _ in 0..ROUNDS {
        for (subject, pairs) in subjects.iter().zip(&mut pairs) {
            pairs.extend(time(subject));
        }
        if start.elapsed() > BUDGET {
            break;
        }
    }
    let cost = |pairs: &Vec<(f64, f64)>| {
        let times: Vec<_> = pairs.iter().map(|(_, time)| *time).collect();
        let ratios: Vec<_> = pairs.iter().map(|(base, time)| time / base).collect();
        Cost {
            nanos: median(&times),
            ratio: Figure::of(&ratios),
        }
    };
    pairs.iter().map(cost).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn nanos(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e9
}
