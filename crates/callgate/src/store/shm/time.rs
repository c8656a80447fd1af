//! The host's time since it was started, which is the same in all its containers.

use std::fs;

use rustix::time::{ClockId, clock_gettime};

use crate::bucket::MAX_NANOS;

/// The time since the host's start, in nanoseconds: by a clock that is `ahead` of it by so much.
#[inline]
pub(crate) fn now(ahead: i64) -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let nanos = now
        .tv_sec
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec);
    u64::try_from(nanos.wrapping_sub(ahead)).map_or(0, |nanos| nanos.min(MAX_NANOS))
}

/// By how many nanoseconds the clock of this process is ahead of the host's: in a time namespace, it may be.
pub(super) fn ahead() -> Result<i64, String> {
    const OFFSETS: &str = "/proc/self/timens_offsets";
    let Ok(text) = fs::read_to_string(OFFSETS) else {
        // A kernel without time namespaces.
        return Ok(0);
    };
    // The offsets are those of the children: the process's own, unless only those are to have another.
    let [own, children] =
        ["time", "time_for_children"].map(|name| fs::read_link(format!("/proc/self/ns/{name}")));
    if own.ok() != children.ok() {
        return Err("a process whose children have another time namespace than itself".into());
    }
    offset(&text).ok_or_else(|| format!("{OFFSETS}: '{}'", text.escape_debug()))
}

/// The second and third word of the line for the clock.
fn offset(text: &str) -> Option<i64> {
    let line = text.lines().find(|line| line.starts_with("boottime"))?;
    let mut words = line.split_whitespace().skip(1).map(str::parse::<i64>);
    let (seconds, nanos) = (words.next()?.ok()?, words.next()?.ok()?);
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_may_be_negative() {
        let text = "monotonic           0         0\nboottime        -86400 500000000\n";
        assert_eq!(offset(text), Some(-86_399_500_000_000));
        assert_eq!(offset("monotonic 1 2\n"), None);
    }
}
