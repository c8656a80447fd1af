//! What one writes in ten minutes: a token bucket in floats under a mutex.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A token bucket, full at first.
pub(crate) struct MutexBucket {
    rate: f64,
    burst: f64,
    start: Instant,
    state: Mutex<State>,
}

struct State {
    tokens: f64,
    last: Duration,
}

impl MutexBucket {
    pub(crate) fn new(rate: f64, burst: f64) -> Self {
        let state = Mutex::new(State {
            tokens: burst,
            last: Duration::ZERO,
        });
        let start = Instant::now();
        Self {
            rate,
            burst,
            start,
            state,
        }
    }

    /// Takes a token, or says how long to wait for it.
    pub(crate) fn try_acquire(&self) -> Result<(), Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, so that time does not go back from one holder to the next.
        let now = self.start.elapsed();
        self.take(&mut state, now)
    }

    /// The same at a time of the caller's.
    pub(crate) fn try_acquire_at(&self, now: Duration) -> Result<(), Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(&mut state, now)
    }

    fn take(&self, state: &mut State, now: Duration) -> Result<(), Duration> {
        let refill = now.saturating_sub(state.last).as_secs_f64() * self.rate;
        state.tokens = (state.tokens + refill).min(self.burst);
        state.last = now;
        if state.tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - state.tokens) / self.rate));
        }
        state.tokens -= 1.0;
        Ok(())
    }
}
