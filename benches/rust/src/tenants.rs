//! A bucket for each tenant: in callgate, in governor's map, and in the maps that people put one in.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use callgate::{Call, Limiter};
use dashmap::DashMap;
use governor::clock::MonotonicClock;
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use moka::sync::Cache;

use crate::HEAP;
use crate::measure::{self, Case};
use crate::peers::{self, Rate};

/// How many tenants there are, and how many calls are made before the order of them repeats.
pub(crate) const TENANTS: u32 = 1_000_000;
const CALLS: usize = 1 << 20;

/// Calls that bring the part of a map that a cache can hold into it.
const WARM: u32 = 50_000;

/// A bucket that is never empty while this program runs, and never full again once drawn from.
const OPEN: (Rate, u32) = (Rate::new(1, "min"), 4_000_000);

/// A bucket that is full again at each call, as of a tenant who does not call often.
const FULL: (Rate, u32) = (Rate::new(1_000_000_000, "s"), 4_000_000);

/// A bucket that is empty after one call.
const SHUT: (Rate, u32) = (Rate::new(1, "h"), 1);

const TOOL: &str = "lookup_customer";

/// Who calls: by name, as calls come in. The number is for who needs no look-up.
#[derive(Clone)]
pub(crate) struct Tenant {
    number: usize,
    name: String,
}

impl Tenant {
    fn new(number: u32) -> Self {
        Self {
            number: number as usize,
            name: format!("tenant-{number:06}"),
        }
    }
}

/// The first so many tenants.
pub(crate) fn first(tenants: u32) -> Vec<Tenant> {
    (0..tenants).map(Tenant::new).collect()
}

/// Calls of so many tenants in random order: one after the other in memory, as a call's name is at hand.
pub(crate) fn calls(tenants: u32) -> &'static [Tenant] {
    // The upper half of a linear congruential generator (D. Knuth, The Art of Computer Programming 2, 3.2.1).
    let mut state = 1_u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let calls = (0..CALLS).map(|_| Tenant::new(next() % tenants));
    calls.collect::<Vec<_>>().leak()
}

/// The buckets of any number of tenants, each made when it is first asked for.
trait Buckets: Sync + Sized + 'static {
    /// No buckets yet. Each will hold `burst` tokens, and gets them back at this rate.
    fn none(rate: Rate, burst: u32) -> Self;

    /// Whether a call of this tenant is admitted now.
    fn admits(&self, tenant: &Tenant) -> bool;

    /// Does what it put off.
    fn settle(&self) {}
}

/// A way to keep buckets, and how to measure it.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    known: fn((Rate, u32), u32, &'static [Tenant]) -> Case,
    one: fn((Rate, u32)) -> Case,
    flood: fn(&[Tenant]) -> Duration,
    bytes: fn(&[Tenant]) -> f64,
}

impl Kind {
    const fn of<B: Buckets>(name: &'static str) -> Self {
        Self {
            name,
            known: known::<B>,
            one: one::<B>,
            flood: flood::<B>,
            bytes: bytes::<B>,
        }
    }

    /// Calls of so many known tenants, which are [`calls`].
    pub(crate) fn known(&self, tenants: u32, calls: &'static [Tenant]) -> Case {
        (self.known)(OPEN, tenants, calls)
    }

    /// The same, where all buckets are full again.
    pub(crate) fn refilled(&self, tenants: u32, calls: &'static [Tenant]) -> Case {
        (self.known)(FULL, tenants, calls)
    }

    /// Calls of one tenant, all admitted.
    pub(crate) fn admitting(&self) -> Case {
        (self.one)(OPEN)
    }

    /// Calls of one tenant, all refused.
    pub(crate) fn refusing(&self) -> Case {
        (self.one)(SHUT)
    }

    /// How long the first call of each of these tenants takes in all, from no buckets on.
    pub(crate) fn flood(&self, tenants: &[Tenant]) -> Duration {
        (self.flood)(tenants)
    }

    /// Bytes on the heap for each of these tenants.
    pub(crate) fn bytes(&self, tenants: &[Tenant]) -> f64 {
        (self.bytes)(tenants)
    }
}

pub(crate) const ARRAY: &str = "an array of 24 bytes each, by number";
pub(crate) const ARRAYS: Kind = Kind::of::<Cells>(ARRAY);
pub(crate) const CALLGATE: &str = "**callgate**, by name and field";
pub(crate) const REFILLED: &str = "**callgate**, where every bucket is full again";
pub(crate) const LIMITERS: Kind = Kind::of::<Limiter>(CALLGATE);
pub(crate) const KINDS: [Kind; 5] = [
    LIMITERS,
    Kind::of::<Keyed>("governor, `RateLimiter::dashmap`"),
    Kind::of::<Mapped<DashMap<String, AtomicU64>>>("dashmap"),
    Kind::of::<Mapped<papaya::HashMap<String, AtomicU64>>>("papaya"),
    Kind::of::<Mapped<Cache<String, Arc<AtomicU64>>>>("moka"),
];

fn known<B: Buckets>((rate, burst): (Rate, u32), tenants: u32, calls: &'static [Tenant]) -> Case {
    let buckets = B::none(rate, burst);
    for tenant in first(tenants) {
        buckets.admits(&tenant);
    }
    buckets.settle();
    let call = move |number: u32| &calls[number as usize % CALLS];
    let case = Case::new(buckets, move |buckets, number| buckets.admits(call(number)));
    case.warmed_by(tenants.min(WARM), move |number| {
        black_box(call(number).name.bytes().last());
    })
}

fn one<B: Buckets>((rate, burst): (Rate, u32)) -> Case {
    let (buckets, tenant) = (B::none(rate, burst), Tenant::new(4_711));
    buckets.admits(&tenant);
    let admitted = burst > 1;
    Case::new((buckets, tenant), move |(buckets, tenant), _| {
        buckets.admits(tenant) == admitted
    })
}

fn flood<B: Buckets>(tenants: &[Tenant]) -> Duration {
    let buckets = B::none(OPEN.0, OPEN.1);
    measure::timed(|| {
        for tenant in tenants {
            black_box(buckets.admits(tenant));
        }
    })
}

#[expect(clippy::cast_precision_loss, reason = "a gigabyte at most")]
fn bytes<B: Buckets>(tenants: &[Tenant]) -> f64 {
    let buckets = B::none(OPEN.0, OPEN.1);
    let before = HEAP.allocated();
    for tenant in tenants {
        buckets.admits(tenant);
    }
    buckets.settle();
    (HEAP.allocated() - before) as f64 / tenants.len() as f64
}

impl Buckets for Limiter {
    fn none(rate: Rate, burst: u32) -> Self {
        let limit = rate.limit(burst).per(["tenant"]);
        let limiter = Self::builder().limit(TOOL, limit).build();
        limiter.expect("a good limit")
    }

    #[inline]
    fn admits(&self, tenant: &Tenant) -> bool {
        self.try_acquire(&Call::new(TOOL).field("tenant", &tenant.name))
            .is_admitted()
    }
}

type Keyed =
    RateLimiter<String, DashMapStateStore<String>, MonotonicClock, NoOpMiddleware<Instant>>;

impl Buckets for Keyed {
    fn none(rate: Rate, burst: u32) -> Self {
        let quota: Quota = rate.quota(burst);
        Self::dashmap_with_clock(quota, MonotonicClock)
    }

    #[inline]
    fn admits(&self, tenant: &Tenant) -> bool {
        self.check_key(&tenant.name).is_ok()
    }
}

/// What the memory alone costs: buckets side by side, each at a place that is known.
struct Cells {
    pace: Pace,
    cells: Box<[[AtomicU64; 3]]>,
}

impl Buckets for Cells {
    fn none(rate: Rate, burst: u32) -> Self {
        Self {
            pace: Pace::new(rate, burst),
            cells: (0..TENANTS).map(|_| Default::default()).collect(),
        }
    }

    #[inline]
    fn admits(&self, tenant: &Tenant) -> bool {
        let now = self.pace.now();
        self.pace.admits(&self.cells[tenant.number][0], now)
    }
}

/// Buckets in a map.
struct Mapped<M> {
    pace: Pace,
    map: M,
}

/// Words by name, each 0 at first.
trait Map: Sync + 'static {
    fn none() -> Self;

    fn with<T>(&self, name: &str, then: impl FnOnce(&AtomicU64) -> T) -> T;

    fn settle(&self) {}
}

impl<M: Map> Buckets for Mapped<M> {
    fn none(rate: Rate, burst: u32) -> Self {
        Self {
            pace: Pace::new(rate, burst),
            map: M::none(),
        }
    }

    #[inline]
    fn admits(&self, tenant: &Tenant) -> bool {
        let now = self.pace.now();
        self.map
            .with(&tenant.name, |word| self.pace.admits(word, now))
    }

    fn settle(&self) {
        self.map.settle();
    }
}

impl Map for DashMap<String, AtomicU64> {
    fn none() -> Self {
        Self::new()
    }

    #[inline]
    fn with<T>(&self, name: &str, then: impl FnOnce(&AtomicU64) -> T) -> T {
        match self.get(name) {
            Some(word) => then(&word),
            None => then(&self.entry(name.to_owned()).or_default()),
        }
    }
}

impl Map for papaya::HashMap<String, AtomicU64> {
    fn none() -> Self {
        Self::new()
    }

    #[inline]
    fn with<T>(&self, name: &str, then: impl FnOnce(&AtomicU64) -> T) -> T {
        let map = self.pin();
        match map.get(name) {
            Some(word) => then(word),
            None => then(map.get_or_insert_with(name.to_owned(), AtomicU64::default)),
        }
    }
}

impl Map for Cache<String, Arc<AtomicU64>> {
    fn none() -> Self {
        // As many as callgate keeps.
        Self::new(1 << 20)
    }

    #[inline]
    fn with<T>(&self, name: &str, then: impl FnOnce(&AtomicU64) -> T) -> T {
        match self.get(name) {
            Some(word) => then(&word),
            None => then(&self.get_with_by_ref(name, Arc::default)),
        }
    }

    fn settle(&self) {
        self.run_pending_tasks();
    }
}

/// The simplest sound bucket: the time at which it is full again (GCRA), in one word.
struct Pace {
    start: Instant,
    /// Nanoseconds for a token, and for a full bucket.
    token: u64,
    burst: u64,
}

impl Pace {
    fn new(rate: Rate, burst: u32) -> Self {
        let token = peers::nanos(rate.period()).div_ceil(rate.tokens.into());
        Self {
            start: Instant::now(),
            token,
            burst: token * u64::from(burst),
        }
    }

    #[inline]
    fn now(&self) -> u64 {
        peers::nanos(self.start.elapsed())
    }

    #[inline]
    fn admits(&self, full: &AtomicU64, now: u64) -> bool {
        let taken = full.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full| {
            let next = full.max(now) + self.token;
            (next <= now + self.burst).then_some(next)
        });
        taken.is_ok()
    }
}
