//! The limiter's time: nanoseconds since it was made, never going back.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::bucket::MAX_NANOS;
use crate::store::shm;

/// A reading of an injected clock that is at most this much below the highest one counts as the
/// highest. Clocks that differ between processor cores stay within it.
const TOLERANCE: i128 = 2_000_000_000;

/// Where `Limiter::try_acquire` reads the time.
pub(crate) enum Clock {
    /// The operating system's monotonic clock, and what it said when the limiter was made.
    Monotonic(Instant),
    /// The host's time since its start, by a clock that is ahead of it by so many nanoseconds.
    #[cfg_attr(
        not(all(feature = "shm", target_os = "linux", not(loom))),
        expect(dead_code, reason = "for processes that share a store")
    )]
    Boot(i64),
    /// A clock of the user's.
    Injected {
        read: Box<dyn Fn() -> Duration + Send + Sync>,
        mark: HighWater,
    },
}

impl Clock {
    pub(crate) fn injected(read: Box<dyn Fn() -> Duration + Send + Sync>) -> Self {
        let mark = HighWater::new(signed(read()));
        Self::Injected { read, mark }
    }

    /// Nanoseconds since the limiter was made or the host started, at most [`MAX_NANOS`].
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "no machine runs for 292 years"
    )]
    pub(crate) fn now(&self) -> u64 {
        match self {
            Self::Monotonic(start) => start.elapsed().as_nanos() as u64,
            Self::Boot(ahead) => shm::now(*ahead),
            Self::Injected { read, mark } => injected_now(read, mark),
        }
    }

    /// The time now; of a clock of the user's the latest that anybody was told, since none of their code
    /// is to run.
    pub(crate) fn latest(&self) -> u64 {
        match self {
            Self::Monotonic(_) | Self::Boot(_) => self.now(),
            Self::Injected { mark, .. } => mark.lock().elapsed.min(MAX_NANOS),
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Monotonic(_) => "Monotonic",
            Self::Boot(_) => "Boot",
            Self::Injected { .. } => "Injected",
        })
    }
}

/// Kept out of the way of the operating system's clock, which is to be fast.
#[cold]
fn injected_now(read: &dyn Fn() -> Duration, mark: &HighWater) -> u64 {
    let Ok(time) = mark.now::<Infallible>(|| Ok(signed(read())));
    time.elapsed.min(MAX_NANOS)
}

/// A duration in nanoseconds, up to the end of a limiter's time.
#[inline]
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).map_or(MAX_NANOS, |nanos| nanos.min(MAX_NANOS))
}

fn signed(duration: Duration) -> i128 {
    duration.as_nanos().cast_signed()
}

/// Makes time that only goes forward out of the readings of a clock that may not.
///
/// A reading above the highest one so far moves time on. One that is up to 2 s below counts as
/// the highest. One further below is a step back: readings are counted from it on, so that nothing
/// elapses because of the step, and nobody waits for the clock to catch up.
///
/// ```
/// use callgate::HighWater;
///
/// const SECOND: i128 = 1_000_000_000;
/// let mark = HighWater::new(100 * SECOND);
/// let elapsed = |reading| mark.now(|| Ok::<_, ()>(reading)).map(|time| time.elapsed);
/// assert_eq!(elapsed(101 * SECOND), Ok(1_000_000_000));
/// assert_eq!(elapsed(99 * SECOND), Ok(1_000_000_000)); // 2 s low: as 101
/// assert_eq!(elapsed(0), Ok(1_000_000_000)); // a step back: counted from here
/// assert_eq!(elapsed(SECOND), Ok(2_000_000_000));
/// ```
#[derive(Debug)]
pub struct HighWater(Mutex<Marked>);

#[derive(Debug)]
struct Marked {
    highest: i128,
    elapsed: u64,
    /// How many readings were taken in: tells whether one overtook another.
    count: u64,
    /// How often the clock stepped back.
    steps: u64,
}

/// What a reading came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reading {
    /// Nanoseconds since the first reading; never less than before.
    pub elapsed: u64,
    /// The reading, in the clock's own nanoseconds, from which on `elapsed` grows again.
    pub highest: i128,
}

impl HighWater {
    /// Starts at the clock's first reading, in nanoseconds.
    #[must_use]
    pub fn new(first: i128) -> Self {
        Self(Mutex::new(Marked {
            highest: first,
            elapsed: 0,
            count: 0,
            steps: 0,
        }))
    }

    /// Reads the clock (in nanoseconds from any start) and says what time it is.
    ///
    /// A reading that another one overtook may be old. It moves time on unless the clock was found to
    /// have stepped back in the meantime, and is never taken for a step back itself.
    ///
    /// # Errors
    /// What `read` fails with.
    pub fn now<E>(&self, read: impl FnOnce() -> Result<i128, E>) -> Result<Reading, E> {
        // Nothing is locked while `read` runs: it is the user's code, and may come here again.
        let Marked { count, steps, .. } = *self.lock();
        let reading = read()?;
        let mut marked = self.lock();
        let ahead = reading.saturating_sub(marked.highest);
        if ahead > 0 && marked.steps == steps {
            let ahead = u64::try_from(ahead).unwrap_or(u64::MAX);
            marked.elapsed = marked.elapsed.saturating_add(ahead);
            marked.highest = reading;
        } else if ahead < -TOLERANCE && marked.count == count {
            marked.highest = reading;
            marked.steps += 1;
        }
        marked.count += 1;
        Ok(Reading {
            elapsed: marked.elapsed,
            highest: marked.highest,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Marked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    /// What a caller finds who holds a reading while another one's comes in.
    fn overtaken(mark: &HighWater, held: i128, by: i128) -> i128 {
        let time = mark.now(|| {
            mark.now(|| Ok::<_, ()>(by)).unwrap();
            Ok::<_, ()>(held)
        });
        time.unwrap().elapsed.into()
    }

    #[test]
    fn an_old_reading_is_no_step_back() {
        let mark = HighWater::new(0);
        assert_eq!(overtaken(&mark, 3 * SECOND, 10 * SECOND), 10 * SECOND);
        let next = mark.now(|| Ok::<_, ()>(11 * SECOND)).unwrap();
        assert_eq!(i128::from(next.elapsed), 11 * SECOND);
    }

    #[test]
    fn a_reading_from_before_a_step_back_does_not_undo_it() {
        let mark = HighWater::new(1000 * SECOND);
        assert_eq!(overtaken(&mark, 1001 * SECOND, 10 * SECOND), 0);
        let next = mark.now(|| Ok::<_, ()>(11 * SECOND)).unwrap();
        assert_eq!(i128::from(next.elapsed), SECOND);
    }

    #[test]
    fn a_reading_that_overtakes_without_a_step_back_leaves_the_other_as_it_is() {
        let mark = HighWater::new(0);
        assert_eq!(overtaken(&mark, 5 * SECOND, 4 * SECOND), 5 * SECOND);
    }

    #[test]
    fn a_clock_that_says_absurd_things_mints_no_time_twice() {
        let mark = HighWater::new(0);
        let elapsed = |reading| mark.now(|| Ok::<_, ()>(reading)).unwrap().elapsed;
        assert_eq!(elapsed(i128::MAX), u64::MAX);
        assert_eq!(elapsed(i128::MIN), u64::MAX);
        assert_eq!(elapsed(0), u64::MAX);
    }
}
