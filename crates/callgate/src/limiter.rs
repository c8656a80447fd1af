//! The limiter: names to buckets, and decisions.

#![expect(
    clippy::inline_always,
    reason = "a caller who asks a decision for one word need not have all of it in memory"
)]

use std::collections::HashSet;
use std::fmt;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use crate::bucket::Bucket;
use crate::clock::{Clock, nanos};
use crate::limit::check_name;
use crate::names::{Names, same};
use crate::store::memory::Cell;
use crate::{ConfigError, Limit};

/// Decides whether a call may run now.
///
/// Shared by reference or in an `Arc`: any number of threads may ask at once, and nothing is locked.
///
/// ```
/// use callgate::{Call, Decision, Limit, Limiter};
///
/// let limiter = Limiter::builder()
///     .limit("lookup_customer", Limit::per_second(2).burst(2))
///     .limit("search_documents", Limit::per_minute(300).burst(20))
///     .build()?;
///
/// match limiter.try_acquire(&Call::new("lookup_customer")) {
///     Decision::Admitted(_permit) => println!("call the tool"),
///     Decision::Rejected(rejection) => println!("retry in {:?}", rejection.retry_after),
/// }
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Limiter {
    clock: Clock,
    limits: Vec<Limited>,
    names: Names,
}

/// A limit with its name, its place among the others, and its bucket.
#[derive(Debug)]
struct Limited {
    cell: Cell,
    name: Box<str>,
    index: usize,
    limit: Limit,
}

impl Limiter {
    /// Starts a limiter without limits, on the operating system's monotonic clock.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder {
            limits: Vec::new(),
            default: None,
            dry_run: false,
            clock: None,
        }
    }

    /// Decides now; never waits. A tool without a limit is admitted.
    #[inline(always)]
    pub fn try_acquire(&self, call: &Call<'_>) -> Decision<'_> {
        let Some(limited) = self.candidate(call.tool) else {
            return Decision::UNRESTRICTED;
        };
        // The clock first: the names are compared while its answer is on its way.
        let now = self.clock.now();
        if !same(&limited.name, call.tool) {
            return Decision::UNRESTRICTED;
        }
        limited.decide(now, call.cost)
    }

    /// The same at a time of the caller's: `elapsed` since the limiter was made, at most 2^63 - 1 ns.
    ///
    /// For simulated time. Nothing is taken back when `elapsed` is less than before.
    #[inline]
    pub fn try_acquire_at(&self, call: &Call<'_>, elapsed: Duration) -> Decision<'_> {
        self.tool(call.tool).try_acquire_at(call.cost, elapsed)
    }

    /// Looks a tool up once, for callers that ask for it many times.
    #[inline]
    #[must_use]
    pub fn tool(&self, name: &str) -> Tool<'_> {
        Tool {
            clock: &self.clock,
            limited: self
                .candidate(name)
                .filter(|limited| same(&limited.name, name)),
        }
    }

    /// The one limit that may have this name; the caller compares.
    #[inline(always)]
    fn candidate(&self, name: &str) -> Option<&Limited> {
        self.names.candidate(name).map(|index| &self.limits[index])
    }

    /// The names of the limits that hold for a tool of this name.
    #[must_use]
    pub fn limits_of(&self, tool: &str) -> Vec<&str> {
        let limited = self.candidate(tool);
        let limited = limited.filter(|limited| same(&limited.name, tool));
        limited.iter().map(|limited| &*limited.name).collect()
    }

    /// The limits in the order they were given, each with its name and the whole tokens in its bucket.
    ///
    /// Looking changes nothing: no token is spent.
    pub fn snapshot(&self) -> impl Iterator<Item = Level<'_>> {
        self.levels(self.clock.now())
    }

    /// [`snapshot`](Self::snapshot) at a time of the caller's, as in [`try_acquire_at`](Self::try_acquire_at).
    pub fn snapshot_at(&self, elapsed: Duration) -> impl Iterator<Item = Level<'_>> {
        self.levels(nanos(elapsed))
    }

    fn levels(&self, now: u64) -> impl Iterator<Item = Level<'_>> {
        self.limits.iter().map(move |limited| Level {
            name: &limited.name,
            limit: &limited.limit,
            remaining: limited.level(now),
        })
    }
}

/// A limit, and what its bucket holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Level<'a> {
    /// The limit's name.
    pub name: &'a str,
    /// The limit.
    pub limit: &'a Limit,
    /// The whole tokens in the bucket.
    pub remaining: u64,
}

/// Collects limits for a [`Limiter`].
#[must_use]
pub struct LimiterBuilder {
    limits: Vec<(String, Limit)>,
    default: Option<Limit>,
    dry_run: bool,
    clock: Option<Box<dyn Fn() -> Duration + Send + Sync>>,
}

impl fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl LimiterBuilder {
    /// Adds a limit. Its name is the tool that it holds for, or a pattern of names, unless the
    /// limit names its [tools](Limit::tools) itself.
    pub fn limit(mut self, name: impl Into<String>, limit: Limit) -> Self {
        self.limits.push((name.into(), limit));
        self
    }

    /// Limits each tool that no other limit holds for, with one bucket for each tool.
    pub fn default_limit(mut self, limit: Limit) -> Self {
        self.default = Some(limit);
        self
    }

    /// Whether to let every call pass, and only say what would have been refused.
    pub fn dry_run(mut self, dry_run: bool) -> Self {
        self.dry_run = dry_run;
        self
    }

    /// Reads the time from `clock`: a duration since any start. For tests that move time.
    ///
    /// The clock may be wrong: a reading up to 2 s below the highest so far counts as the
    /// highest, and after a larger step back time goes on from the new reading.
    pub fn clock(mut self, clock: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Makes the limiter, every bucket full.
    ///
    /// # Errors
    /// When a rate or burst is out of range, or a name is empty, a pattern, or given twice.
    pub fn build(self) -> Result<Limiter, ConfigError> {
        let mut seen = HashSet::with_capacity(self.limits.len());
        let mut limits = Vec::with_capacity(self.limits.len());
        for (index, (name, limit)) in self.limits.into_iter().enumerate() {
            check_name("name", &name)?;
            let bucket = Bucket::new(&limit).map_err(|error| error.of_limit(&name))?;
            let name = name.into_boxed_str();
            if !seen.insert(name.clone()) {
                return Err(ConfigError::new("name", "given once", "it twice").of_limit(&name));
            }
            limits.push(Limited {
                cell: Cell::full(bucket),
                name,
                index,
                limit,
            });
        }
        let names: Vec<&str> = limits.iter().map(|limited| &*limited.name).collect();
        Ok(Limiter {
            names: Names::new(&names),
            clock: self
                .clock
                .map_or_else(|| Clock::Monotonic(Instant::now()), Clock::injected),
            limits,
        })
    }
}

/// A tool's call: its name and its cost.
///
/// ```
/// use std::num::NonZeroU64;
/// use callgate::Call;
///
/// let call = Call::new("search_documents").cost(NonZeroU64::new(5).unwrap());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call<'a> {
    tool: &'a str,
    cost: NonZeroU64,
}

impl<'a> Call<'a> {
    /// A call of the tool of this name, at a cost of one token.
    #[inline]
    #[must_use]
    pub const fn new(tool: &'a str) -> Self {
        Self {
            tool,
            cost: NonZeroU64::MIN,
        }
    }

    /// Sets the cost, in tokens.
    #[inline]
    #[must_use]
    pub const fn cost(mut self, tokens: NonZeroU64) -> Self {
        self.cost = tokens;
        self
    }
}

/// A tool of a limiter, looked up.
#[derive(Clone, Copy, Debug)]
pub struct Tool<'a> {
    clock: &'a Clock,
    limited: Option<&'a Limited>,
}

impl<'a> Tool<'a> {
    /// The place of the tool's limit in [`Limiter::snapshot`], or none where it has no limit.
    #[inline]
    #[must_use]
    pub fn index(&self) -> Option<usize> {
        self.limited.map(|limited| limited.index)
    }

    /// Decides now, as [`Limiter::try_acquire`] does.
    #[inline(always)]
    pub fn try_acquire(&self, cost: NonZeroU64) -> Decision<'a> {
        match self.limited {
            Some(limited) => limited.decide(self.clock.now(), cost),
            None => Decision::UNRESTRICTED,
        }
    }

    /// Decides at a time of the caller's, as [`Limiter::try_acquire_at`] does.
    #[inline]
    pub fn try_acquire_at(&self, cost: NonZeroU64, elapsed: Duration) -> Decision<'a> {
        match self.limited {
            Some(limited) => limited.decide(nanos(elapsed), cost),
            None => Decision::UNRESTRICTED,
        }
    }
}

impl Limited {
    #[inline(always)]
    fn decide(&self, now: u64, cost: NonZeroU64) -> Decision<'_> {
        let bucket = &self.cell.bucket;
        let Some(price) = bucket.price(cost.get()) else {
            let missing = bucket.reached(now).missing(self.cell.state());
            return self.reject(Reason::Cost, None, Peek { bucket, missing });
        };
        let reached = bucket.reached(now);
        let drawn = self.cell.draw(reached, price);
        let (Ok(state) | Err(state)) = drawn;
        let missing = reached.missing(state);
        let level = Peek { bucket, missing };
        match drawn {
            Ok(_) => Decision::Admitted(Permit { level: Some(level) }),
            Err(_) => self.reject(Reason::Rate, Some(bucket.wait(state, now, price)), level),
        }
    }

    #[inline]
    fn reject<'a>(
        &'a self,
        reason: Reason,
        retry_after: Option<Duration>,
        level: Peek<'a>,
    ) -> Decision<'a> {
        Decision::Rejected(Rejection {
            limit: &self.name,
            reason,
            retry_after,
            level,
        })
    }

    /// The whole tokens in the bucket; changes nothing.
    fn level(&self, now: u64) -> u64 {
        let bucket = &self.cell.bucket;
        bucket.level(bucket.reached(now).missing(self.cell.state()))
    }
}

/// A bucket as a decision saw it, and the units that it was then short of.
#[derive(Clone, Copy)]
struct Peek<'a> {
    bucket: &'a Bucket,
    missing: u64,
}

impl Peek<'_> {
    #[inline]
    fn remaining(&self) -> u64 {
        self.bucket.level(self.missing)
    }
}

impl fmt::Debug for Peek<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.remaining())
    }
}

/// Whether a call may run now.
#[derive(Clone, Copy, Debug)]
#[must_use = "a decision says whether the call may run"]
pub enum Decision<'a> {
    /// It may; its tokens are spent.
    Admitted(Permit<'a>),
    /// It may not; nothing was spent.
    Rejected(Rejection<'a>),
}

impl Decision<'_> {
    /// A tool without a limit.
    const UNRESTRICTED: Self = Self::Admitted(Permit { level: None });

    /// Whether the call may run.
    #[inline]
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        matches!(self, Self::Admitted(_))
    }
}

/// What an admitted call was given.
#[derive(Clone, Copy, Debug)]
pub struct Permit<'a> {
    level: Option<Peek<'a>>,
}

impl Permit<'_> {
    /// The whole tokens left after the call; none where the tool has no limit.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.level.map(|level| level.remaining())
    }
}

/// Why a call was refused, and when to try again.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rejection<'a> {
    /// The limit that refused it.
    pub limit: &'a str,
    /// Why.
    pub reason: Reason,
    /// Enough time to wait, if nobody else spends, and no more than callgate needs; never zero.
    /// None where no wait helps.
    pub retry_after: Option<Duration>,
    level: Peek<'a>,
}

impl Rejection<'_> {
    /// The whole tokens in the bucket.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.level.remaining()
    }
}

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The bucket holds too few tokens now.
    Rate,
    /// The call costs more than the bucket ever holds.
    Cost,
}
