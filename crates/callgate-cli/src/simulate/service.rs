//! A service behind a limit, which answers 429 where it was called too often.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use callgate::Unit;
use serde::Serialize;

/// The largest window that is kept, in tokens.
const MOST: u64 = 1_000_000;

/// So many tokens in any window of this length, as `100/min` says it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quota {
    tokens: u64,
    unit: Unit,
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tokens, self.unit.symbol())
    }
}

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(tokens, unit)| {
            let is_number = tokens.bytes().all(|byte| byte.is_ascii_digit());
            let tokens = tokens.parse().ok().filter(|_| is_number)?;
            Some(Self {
                tokens,
                unit: unit.parse().ok()?,
            })
        });
        let allowed = |quota: &Self| (1..=MOST).contains(&quota.tokens);
        parsed.filter(allowed).ok_or_else(|| {
            "must be N/s, N/min, N/h or N/day with N a whole number from 1 to 1,000,000".to_owned()
        })
    }
}

/// How often the service of a limit is called, and how often it answers 429.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Answers {
    pub(crate) calls: u64,
    pub(crate) refused: u64,
}

/// A service that accepts a call where, with it, all that it accepted in the time of its window before is no
/// more than its quota. What it does not accept does not count.
#[derive(Debug)]
pub(crate) struct Service {
    quota: Quota,
    /// When it accepted how many tokens.
    accepted: VecDeque<(u64, u64)>,
    sum: u64,
    pub(crate) answers: Answers,
}

impl Service {
    pub(crate) fn new(quota: Quota) -> Self {
        Self {
            quota,
            accepted: VecDeque::new(),
            sum: 0,
            answers: Answers {
                calls: 0,
                refused: 0,
            },
        }
    }

    /// Times do not go back.
    pub(crate) fn call(&mut self, now: u64, tokens: u64) {
        let length = u64::try_from(self.quota.unit.length().as_nanos()).unwrap_or(u64::MAX);
        while let Some(&(time, tokens)) = self.accepted.front()
            && now - time >= length
        {
            self.sum -= tokens;
            self.accepted.pop_front();
        }
        self.answers.calls += 1;
        if tokens > self.quota.tokens - self.sum {
            self.answers.refused += 1;
        } else {
            self.sum += tokens;
            self.accepted.push_back((now, tokens));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes exactly a window later finds room again.
    #[test]
    fn a_window_slides_and_refused_calls_do_not_count() {
        let mut service = Service::new("3/s".parse().expect("a quota"));
        let refused = [
            (0, 2),
            (1, 1),
            (2, 1),
            (999_999_999, 1),
            (1_000_000_000, 2),
            (1_000_000_000, 1),
        ]
        .map(|(now, tokens)| {
            let before = service.answers.refused;
            service.call(now, tokens);
            service.answers.refused > before
        });
        assert_eq!(refused, [false, false, true, true, false, true]);
    }

    #[test]
    fn quotas_out_of_range_are_refused() {
        for text in ["0/s", "1000001/day", "+1/s", "1.5/s", "100", "1/week", "/s"] {
            assert!(text.parse::<Quota>().is_err(), "{text}");
        }
        let quota: Quota = "1000000/day".parse().expect("the largest");
        assert_eq!(quota.to_string(), "1000000/day");
    }
}
