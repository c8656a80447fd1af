//! Python's float seconds and the core's whole nanoseconds.

use std::time::Duration;

/// A clock's reading in nanoseconds, to the nearest; none for what is not finite or beyond 2^63 s.
#[expect(
    clippy::cast_possible_truncation,
    reason = "what is cast was made to fit"
)]
pub(crate) fn nanos(seconds: f64) -> Option<i128> {
    const LARGEST: f64 = 9_223_372_036_854_775_808.0;
    if seconds.is_nan() || seconds.abs() >= LARGEST {
        return None;
    }
    // Whole seconds and the rest are both exact, and so is the sum in integers.
    let whole = seconds.trunc();
    let rest = (seconds - whole) * 1e9;
    Some(whole as i128 * 1_000_000_000 + rest.round() as i128)
}

/// The seconds after which a wait is over, to the nanosecond.
///
/// As `seconds_until(0.0, …)` says too, but without its arithmetic in 128 bits: below 2^50 ns (13
/// days) floats lie less than a quarter of a nanosecond apart, so the nearest one will do.
#[inline]
#[expect(clippy::cast_precision_loss, reason = "2^50 is exact")]
pub(crate) fn seconds(wait: Duration) -> f64 {
    match u64::try_from(wait.as_nanos()) {
        Ok(nanos) if nanos < 1 << 50 => nanos as f64 / 1e9,
        _ => seconds_until(0.0, wait.as_nanos().cast_signed()),
    }
}

/// The seconds after which a clock that reads `reading` will read `target` nanoseconds or more.
///
/// With the same floats: `nanos(reading + seconds_until(reading, target)) >= target`.
#[expect(
    clippy::cast_precision_loss,
    reason = "what is lost is made up for below"
)]
pub(crate) fn seconds_until(reading: f64, target: i128) -> f64 {
    let now = nanos(reading).unwrap_or(target);
    let plain = (target - now) as f64 / 1e9;
    let reached = |seconds| nanos(seconds).is_none_or(|nanos| nanos >= target);
    let mut then = reading + plain;
    if reached(then) {
        return plain;
    }
    while !reached(then) {
        then = then.next_up();
    }
    let mut wait = then - reading;
    while reading + wait < then {
        wait = wait.next_up();
    }
    wait
}
