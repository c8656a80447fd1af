//! In which store the tests of a contract make their limiters.

use std::ops::Deref;
use std::time::Duration;

use callgate::{Limiter, LimiterBuilder};

#[cfg(feature = "redis")]
#[path = "clocked.rs"]
mod clocked;

/// Whether these are the tests of a store that processes share.
pub(crate) fn is_shared() -> bool {
    env!("CARGO_CRATE_NAME") == "shared_contract" || is_redis()
}

/// Whether they are those of Redis: it counts in microseconds, and each call goes a long way.
pub(crate) fn is_redis() -> bool {
    env!("CARGO_CRATE_NAME") == "redis_contract"
}

/// A limiter, and the clock of its store if that is Redis.
#[derive(Debug)]
pub(crate) struct Stored {
    limiter: Limiter,
    #[cfg(feature = "redis")]
    clock: Option<clocked::Clock>,
}

impl Stored {
    /// The limiter at a time, which is what its store's clock says from now on.
    pub(crate) fn at(&self, elapsed: Duration) -> &Limiter {
        #[cfg(feature = "redis")]
        if let Some(clock) = &self.clock {
            clock.set(elapsed);
        }
        let _ = elapsed;
        &self.limiter
    }
}

impl Deref for Stored {
    type Target = Limiter;

    fn deref(&self) -> &Limiter {
        &self.limiter
    }
}

/// Makes a limiter: in this process's memory, but where the tests are run as those of another store.
pub(crate) fn built(limits: LimiterBuilder) -> Stored {
    let made = |limits: LimiterBuilder| limits.build().expect("limits in range");
    #[cfg(feature = "redis")]
    if is_redis() {
        let (url, clock) = clocked::store();
        return Stored {
            limiter: made(limits.store(url)),
            clock: Some(clock),
        };
    }
    let limiter = if is_shared() {
        // Each has a store of its own, whose name is gone when it is made.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        made(limits.store(format!("shm:{}/store?slots=4096", folder.path().display())))
    } else {
        made(limits)
    };
    Stored {
        limiter,
        #[cfg(feature = "redis")]
        clock: None,
    }
}
