//! How many calls each crate admits to a caller who comes back exactly when told to.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use callgate::{Call, Limiter};
use governor::clock::FakeRelativeClock;
use ratelimit::Builder;

use crate::peers::{self, Governor, Rate};

/// A limit with burst 2, and how long it is used.
#[derive(Clone, Copy)]
pub(crate) struct Trial {
    pub(crate) rate: Rate,
    pub(crate) length: Duration,
}

impl Trial {
    /// The most that the limit allows: two at once, and the rate x the time.
    pub(crate) fn due(self) -> u128 {
        let refill = u128::from(self.rate.tokens) * self.length.as_nanos();
        2 + refill / self.rate.period().as_nanos()
    }

    /// What each crate admits.
    pub(crate) fn admitted(self) -> [(&'static str, u128); 4] {
        [
            ("**callgate**", self.callgate()),
            ("governor", self.governor()),
            ("ratelimit", self.ratelimit()),
            ("a bucket of floats", self.floats()),
        ]
    }

    fn callgate(self) -> u128 {
        let limiter = Limiter::builder().limit("tool", self.rate.limit(2));
        let limiter = limiter.build().expect("a good limit");
        self.count(|now| peers::wait(&limiter.try_acquire_at(&Call::new("tool"), now)))
    }

    fn governor(self) -> u128 {
        let clock = FakeRelativeClock::default();
        let limiter = Governor::direct_with_clock(self.rate.quota(2), clock.clone());
        let mut last = Duration::ZERO;
        self.count(|now| {
            clock.advance(now.saturating_sub(last));
            last = now;
            peers::governor_wait(&limiter)
        })
    }

    fn ratelimit(self) -> u128 {
        let clock = Elapsed::default();
        let limiter = Builder::with_clock(self.rate.tokens.into(), clock.clone())
            .period(self.rate.period())
            .max_tokens(2)
            .initial_available(2)
            .build()
            .expect("a good limit");
        self.count(|now| {
            let now = u64::try_from(now.as_nanos()).expect("an hour at most");
            clock.0.store(now, Ordering::Relaxed);
            peers::ratelimit_wait(&limiter)
        })
    }

    fn floats(self) -> u128 {
        let bucket = self.rate.mutex(2);
        self.count(|now| bucket.try_acquire_at(now).err())
    }

    /// Asks until the time is up, at most once a microsecond; `wait` says when to ask again, if refused.
    fn count(self, mut wait: impl FnMut(Duration) -> Option<Duration>) -> u128 {
        let (mut now, mut admitted) = (Duration::ZERO, 0);
        while now <= self.length {
            match wait(now) {
                None => admitted += 1,
                Some(wait) => now += wait.max(Duration::from_micros(1)),
            }
        }
        admitted
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, burst 2, for {} s", self.rate, self.length.as_secs())
    }
}

/// Nanoseconds that a test sets.
#[derive(Clone, Default)]
struct Elapsed(Arc<AtomicU64>);

impl ratelimit::Clock for Elapsed {
    fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
