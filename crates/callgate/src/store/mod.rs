//! Where the state of buckets lives.

#[cfg(all(
    any(all(feature = "shm", target_os = "linux"), feature = "redis"),
    not(loom)
))]
pub(crate) mod inspect;
pub(crate) mod memory;
#[cfg_attr(not(all(feature = "redis", not(loom))), path = "no_redis.rs")]
pub(crate) mod redis;
#[cfg_attr(
    not(all(feature = "shm", target_os = "linux", not(loom))),
    path = "no_shm.rs"
)]
pub(crate) mod shm;
#[cfg(all(test, loom))]
#[path = "shm/loom_tests.rs"]
mod shm_loom_tests;
mod table;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use table::Key;

use crate::bucket::{Bucket, Fill, Price, Reached};
use crate::clock::Clock;
use crate::rules::Secret;
use crate::{ConfigError, Limit, OnStoreError};
use memory::{Moved, Pause};

/// Where a limiter's buckets are.
#[derive(Debug)]
pub(crate) enum Store {
    Memory,
    Shared(shm::Store),
    Redis(Box<redis::Store>),
}

impl Store {
    /// The store of a URL; this process's memory where there is none.
    pub(crate) fn open(url: Option<&str>) -> Result<Self, ConfigError> {
        Ok(match url {
            None => Self::Memory,
            Some(url) => match Place::of(url)? {
                Place::Shared(rest) => Self::Shared(shm::Store::open(rest)?),
                Place::Redis => Self::Redis(Box::new(redis::Store::open(url)?)),
            },
        })
    }

    /// The store that is asked over a network, if it is one.
    #[inline]
    pub(crate) fn redis(&self) -> Option<&redis::Store> {
        match self {
            Self::Redis(store) => Some(store),
            Self::Memory | Self::Shared(_) => None,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Memory => Kind::Memory,
            Self::Shared(_) => Kind::Shared,
            Self::Redis(_) => Kind::Redis,
        }
    }

    /// What keys are made with.
    pub(crate) fn secret(&self) -> Secret {
        match self {
            Self::Memory | Self::Redis(_) => Secret::new(),
            Self::Shared(store) => store.secret(),
        }
    }

    /// The clock by which the states are written.
    pub(crate) fn clock(&self) -> Clock {
        match self {
            Self::Memory | Self::Redis(_) => Clock::Monotonic(Instant::now()),
            Self::Shared(store) => store.clock(),
        }
    }

    /// The buckets of a limit that these fields split. They take over what `old` ones hold, whose keys may mean
    /// something else.
    pub(crate) fn buckets(
        &self,
        (name, limit, per): (&str, &Limit, &[&str]),
        bucket: Bucket,
        old: Option<(&Buckets, bool)>,
        now: &dyn Fn() -> u64,
    ) -> Result<Buckets, ConfigError> {
        let split = !per.is_empty();
        Ok(match (self, old) {
            (Self::Redis(_), Some((Buckets::Redis(old), false))) if old.are_of(limit, &bucket) => {
                Buckets::Redis(Arc::clone(old))
            }
            (Self::Redis(store), old) => {
                let old = old.and_then(|(old, new_keys)| Some((&**old.redis()?, new_keys)));
                let buckets = store.buckets((name, limit, per), bucket, old, now)?;
                Buckets::Redis(Arc::new(buckets))
            }
            (_, Some((old, false))) if *old.bucket() == bucket => old.clone(),
            (Self::Shared(store), _) => {
                let buckets = store.buckets((name, limit, per), bucket, now)?;
                Buckets::Shared(Arc::new(buckets))
            }
            (Self::Memory, Some((Buckets::Memory(old), new_keys))) => {
                Buckets::Memory(Arc::new(old.carry(bucket, split, new_keys, now)))
            }
            (Self::Memory, _) => Buckets::Memory(Arc::new(memory::Buckets::full(bucket, split))),
        })
    }
}

/// What stores differ by in what they take.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Memory,
    Shared,
    Redis,
}

impl Kind {
    /// The kind of the store of a URL.
    pub(crate) fn of(url: Option<&str>) -> Result<Self, ConfigError> {
        Ok(match url.map(Place::of).transpose()? {
            None => Self::Memory,
            Some(Place::Shared(_)) => Self::Shared,
            Some(Place::Redis) => Self::Redis,
        })
    }

    /// Whether a limit that is right is one for such a store, and so is what is to become of its calls when the
    /// store fails.
    pub(crate) fn check(
        self,
        limit: &Limit,
        on_store_error: Option<OnStoreError>,
    ) -> Result<(), ConfigError> {
        match (self, on_store_error) {
            (Self::Redis, _) => redis::Store::check(limit),
            (Self::Shared, Some(other)) if other != OnStoreError::Deny => {
                let allowed = "'deny' or left out, with a store of shared memory";
                let given = format!("'{other}'");
                Err(ConfigError::new("on_store_error", allowed, given))
            }
            _ => Ok(()),
        }
    }
}

/// Numbers of a store that is asked over a network, since this process began to ask it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreCounts {
    /// Whether it is known to be down, and is not asked.
    pub is_down: bool,
    /// The requests that were answered.
    pub answered: u64,
    /// How long those took in all, from when they were asked.
    pub time: Duration,
    /// The requests that failed.
    pub failed: u64,
    /// The decisions that were made without it since it failed: see [`OnStoreError`].
    pub alone: u64,
}

/// Whether this may be a store's URL; opens nothing.
#[cfg(feature = "config")]
pub(crate) fn check(url: &str) -> Result<(), ConfigError> {
    match Place::of(url)? {
        Place::Shared(rest) => shm::check(rest),
        Place::Redis => redis::check(url),
    }
}

/// A store's URL, as it is and as others may see it.
pub(crate) struct Url {
    pub(crate) whole: String,
    pub(crate) shown: String,
}

impl Url {
    pub(crate) fn new(url: String) -> Self {
        let shown = match Place::of(&url) {
            Ok(Place::Shared(_)) => url.clone(),
            _ => without_password(&url),
        };
        Self { whole: url, shown }
    }
}

/// A URL up to the question mark, with the login taken out, whatever is in that.
pub(crate) fn without_password(url: &str) -> String {
    let (login, rest) = url.rsplit_once('@').unwrap_or(("", url));
    let rest = rest.split_once('?').map_or(rest, |(rest, _)| rest);
    match login.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://{rest}"),
        None => rest.to_owned(),
    }
}

/// Where a store is.
enum Place<'a> {
    /// In shared memory, at what comes after `shm:`.
    Shared(&'a str),
    /// Behind the whole URL.
    Redis,
}

impl<'a> Place<'a> {
    fn of(url: &'a str) -> Result<Self, ConfigError> {
        const REDIS: [&str; 5] = [
            "redis",
            "rediss",
            "unix",
            "redis+sentinel",
            "rediss+sentinel",
        ];
        match url.split_once(':') {
            Some(("shm", rest)) => Ok(Self::Shared(rest)),
            Some((scheme, _)) if REDIS.contains(&scheme) => Ok(Self::Redis),
            _ => {
                let allowed = "a store's URL, such as 'shm:/run/myapp/callgate?slots=65536' or \
                    'redis://127.0.0.1:6379/0?prefix=myapp'";
                let given = format!("'{}'", without_password(url).escape_debug());
                Err(ConfigError::new("store", allowed, given))
            }
        }
    }
}

/// The buckets of one limit, wherever they are.
#[derive(Clone, Debug)]
pub(crate) enum Buckets {
    Memory(Arc<memory::Buckets>),
    Shared(Arc<shm::Buckets>),
    Redis(Arc<redis::Buckets>),
}

impl Buckets {
    /// The arithmetic of all of them.
    #[inline]
    pub(crate) fn bucket(&self) -> &Bucket {
        match self {
            Self::Memory(buckets) => &buckets.bucket,
            Self::Shared(buckets) => buckets.bucket(),
            Self::Redis(buckets) => &buckets.own().bucket,
        }
    }

    /// The place of these buckets in the order in which callers freeze.
    pub(crate) fn order(&self) -> u64 {
        match self {
            Self::Memory(buckets) => buckets.order(),
            Self::Shared(buckets) => buckets.order(),
            Self::Redis(buckets) => buckets.own().order(),
        }
    }

    /// Whether a pause or those who wait may be in the way of a draw.
    #[inline]
    pub(crate) fn is_held(&self, now: u64) -> bool {
        match self {
            Self::Memory(buckets) => buckets.is_held(),
            Self::Shared(buckets) => buckets.is_held(now),
            // It has to be asked.
            Self::Redis(_) => true,
        }
    }

    /// Says whether they may be, but for what this process cannot know.
    pub(crate) fn hold(&self, held: bool) {
        match self {
            Self::Memory(buckets) => buckets.hold(held),
            Self::Shared(buckets) => buckets.hold(held),
            Self::Redis(_) => {}
        }
    }

    /// Lets nobody draw until then, from all buckets or from those of a part; they are empty when it ends.
    ///
    /// One that ends later stays as it is.
    pub(crate) fn pause(&self, part: Option<Key>, until: u64, now: u64) {
        match self {
            Self::Memory(buckets) => buckets.pause(part, until, now),
            Self::Shared(buckets) => buckets.pause(part, until, now),
            Self::Redis(buckets) => buckets.own().pause(part, until, now),
        }
    }

    /// The pause of a part, where it matters still.
    pub(crate) fn paused(&self, part: Option<Key>, now: u64) -> Option<Pause> {
        match self {
            Self::Memory(buckets) => buckets.paused(part, now),
            Self::Shared(buckets) => buckets.paused(part, now),
            Self::Redis(buckets) => buckets.own().paused(part, now),
        }
    }

    /// How long the longest pause goes on; of a shared store, the one of all buckets.
    pub(crate) fn paused_for(&self, now: u64) -> Option<Duration> {
        match self {
            Self::Memory(buckets) => buckets.paused_for(now),
            Self::Shared(buckets) => buckets.paused(None, now)?.left(now),
            Self::Redis(buckets) => buckets.own().paused_for(now),
        }
    }

    /// Whether there are pauses that matter still.
    pub(crate) fn has_pauses(&self, now: u64) -> bool {
        match self {
            Self::Memory(buckets) => buckets.has_pauses(now),
            Self::Shared(buckets) => buckets.has_pauses(now),
            Self::Redis(buckets) => buckets.own().has_pauses(now),
        }
    }

    /// The whole tokens in the one bucket, and how many keys have a bucket; changes nothing.
    pub(crate) fn peek(&self, now: u64) -> Result<(u64, Option<usize>), Moved> {
        match self {
            Self::Memory(buckets) => buckets.peek(now),
            Self::Shared(buckets) => Ok(buckets.peek(now)),
            Self::Redis(buckets) => buckets.own().peek(now),
        }
    }

    /// Whether a key found no place for a bucket of its own; says so only once.
    #[inline]
    pub(crate) fn was_pooled(&self) -> bool {
        match self {
            Self::Memory(buckets) => buckets.was_pooled(),
            Self::Shared(buckets) => buckets.was_pooled(),
            Self::Redis(buckets) => buckets.own().was_pooled(),
        }
    }

    /// Draws from a bucket that is known and at hand: the state after an admitted call, or else the one that
    /// refused it.
    #[inline]
    pub(crate) fn draw(
        &self,
        key: Option<Key>,
        now: Reached<'_>,
        price: Price,
    ) -> Option<Result<u64, u64>> {
        match self {
            Self::Memory(buckets) => match key {
                None => buckets.draw(now, price).ok(),
                Some(key) => buckets.draw_kept(key, now, price).ok()?,
            },
            Self::Shared(buckets) => buckets.draw(key, now, price),
            Self::Redis(_) => None,
        }
    }

    /// Counts a decision, for those who look into the store.
    #[inline]
    pub(crate) fn count(&self, admitted: bool) {
        match self {
            Self::Memory(_) => {}
            Self::Shared(buckets) => buckets.count(admitted),
            Self::Redis(buckets) => buckets.count(admitted),
        }
    }

    /// Says how many wait for them in this process, likewise.
    pub(crate) fn count_waiting(&self, waiting: usize) {
        match self {
            Self::Memory(_) => {}
            Self::Shared(buckets) => buckets.count_waiting(waiting),
            Self::Redis(buckets) => buckets.count_waiting(waiting),
        }
    }

    /// Those of a store that is asked over a network.
    pub(crate) fn redis(&self) -> Option<&Arc<redis::Buckets>> {
        match self {
            Self::Redis(buckets) => Some(buckets),
            Self::Memory(_) | Self::Shared(_) => None,
        }
    }

    /// Where to draw from: of a store that is asked, what this process knows of it.
    pub(crate) fn source(&self) -> Source<'_> {
        match self {
            Self::Memory(buckets) => Source::Memory(buckets),
            Self::Shared(buckets) => Source::Shared(buckets),
            Self::Redis(buckets) => Source::Memory(buckets.own()),
        }
    }

    /// Whether they are the same ones.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Memory(one), Self::Memory(other)) => Arc::ptr_eq(one, other),
            (Self::Shared(one), Self::Shared(other)) => Arc::ptr_eq(one, other),
            (Self::Redis(one), Self::Redis(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Gives all of this process's memory back, and sends callers away who still know these buckets; those of a
    /// shared store go on.
    pub(crate) fn close(&self) {
        match self {
            Self::Memory(buckets) => buckets.close(),
            Self::Shared(buckets) => buckets.close(),
            Self::Redis(buckets) => buckets.close(),
        }
    }
}

/// What a decision came to.
#[derive(Clone, Copy)]
pub(crate) enum Verdict {
    /// All limits were charged; the tightest of them is this full.
    Admitted(Fill),
    /// None was. The place of the limit that refused for the longest, and for how long: none for ever.
    Refused(usize, Option<Duration>, Fill),
    /// The store could not be asked.
    Unavailable,
}

/// Buckets to draw from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Memory(&'a memory::Buckets),
    Shared(&'a shm::Buckets),
}

/// What a call asks of one limit.
pub(crate) struct Draw<'a> {
    source: Source<'a>,
    bucket: &'a Bucket,
    reached: Reached<'a>,
    /// None where a full bucket holds less.
    price: Option<Price>,
    /// Of the bucket, where the limit is split.
    key: Option<Key>,
    /// Whether the key was found to have no bucket, and is to get one.
    make: Cell<bool>,
    /// No bucket stands lower: it is empty when a pause ends.
    floor: u64,
    is_paused: bool,
}

impl<'a> Draw<'a> {
    #[inline]
    pub(crate) fn new(
        source: Source<'a>,
        now: u64,
        price: Option<Price>,
        key: Option<Key>,
    ) -> Self {
        let bucket = match source {
            Source::Memory(buckets) => &buckets.bucket,
            Source::Shared(buckets) => buckets.bucket(),
        };
        Self {
            source,
            bucket,
            reached: bucket.reached(now),
            price,
            key,
            make: Cell::new(false),
            floor: 0,
            is_paused: false,
        }
    }

    /// Under a pause, which may have ended.
    pub(crate) fn paused(mut self, pause: Option<Pause>) -> Self {
        if let Some(pause) = pause {
            self.floor = pause.floor;
            self.is_paused = self.reached.now() < pause.until;
        }
        self
    }

    /// At no cost, and whatever is in the bucket, unless the cost is above the burst.
    pub(crate) fn free(mut self) -> Self {
        (self.floor, self.is_paused) = (0, false);
        self.price = self.price.map(|_| Price::FREE);
        self
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(crate) fn key(&self) -> Option<Key> {
        self.key
    }

    /// The tokens that it asks for.
    pub(crate) fn tokens(&self) -> u64 {
        let price = self.price.as_ref();
        price.map_or(0, |price| self.bucket.tokens(price))
    }

    /// The state of the bucket; changes nothing.
    pub(crate) fn look(&self) -> Result<u64, Moved> {
        let state = match self.source {
            Source::Memory(buckets) => memory::look(buckets, self.key)?,
            Source::Shared(buckets) => buckets.look(self.key, self.reached.now())?,
        };
        Ok(state.max(self.floor))
    }

    /// How long a bucket in this state makes the call wait, behind calls that come to so many tokens; none
    /// for ever.
    pub(crate) fn wait(&self, state: u64, behind: u64) -> Option<Duration> {
        let state = self.bucket.after(state, self.reached, behind);
        Some(self.bucket.wait(state, self.reached.now(), self.price?))
    }

    pub(crate) fn fill(&self, state: u64) -> Fill {
        self.bucket.fill(self.reached.missing(state))
    }

    fn memory(&self) -> Option<&'a memory::Buckets> {
        match self.source {
            Source::Memory(buckets) => Some(buckets),
            Source::Shared(_) => None,
        }
    }

    fn shared(&self) -> Option<&'a shm::Buckets> {
        match self.source {
            Source::Memory(_) => None,
            Source::Shared(buckets) => Some(buckets),
        }
    }
}

/// Draws from all limits of a call, or from none. They are of one store, in the order that
/// [`Buckets::order`] gives.
pub(crate) fn draw_all(draws: &[Draw<'_>], now: u64) -> Result<Verdict, Moved> {
    if draws.iter().any(|draw| draw.shared().is_some()) {
        return shm::draw_all(draws, now);
    }
    memory::draw_all(draws, now)
}
