//! Limits: a rate and a burst, the tools that they hold for, and what splits them.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::rate::count_per_unit;
use crate::{ConfigError, Count, Rate, Unit};

/// The largest burst, and the largest cost that a call can be admitted at: 2^32 - 1 tokens.
pub const MAX_BURST: u64 = u32::MAX as u64;

/// The longest time that a call may wait for its turn: a day.
pub const MAX_WAIT: Duration = Duration::from_secs(86_400);

/// A token bucket: a rate, and a burst (its capacity, in tokens). It starts full.
///
/// In any window of length W a limit admits at most `burst + rate x W`: 2 a second with
/// burst 2 lets 4 calls into one second, 2 at its start and 2 more while it lasts. Where a
/// service says "never more than 100 in any minute", ask for a [`quota`](Self::quota).
///
/// A value out of range is kept until [`LimiterBuilder::build`](crate::LimiterBuilder::build)
/// or [`Limit::check`] refuses it.
///
/// ```
/// use callgate::Limit;
///
/// let limit = Limit::per_minute(300).burst(20);
/// assert_eq!(limit, Limit::per_second(5).burst(20));
/// assert_eq!(limit, "300/min".parse::<Limit>()?.burst(20));
/// assert!(Limit::per_second(0.1).check().is_ok());
/// assert!(Limit::per_second(-1).check().is_err());
///
/// // One budget for several tools, and one bucket of it for each tenant.
/// let crm = limit.tools(["crm_*", "lookup_customer"]).per(["tenant"]);
/// assert!(crm.check().is_ok());
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Limit {
    pace: Result<Pace, ConfigError>,
    burst: u64,
    cost: u64,
    tools: Option<Vec<String>>,
    per: Vec<String>,
    max_wait: Duration,
    max_concurrent: Option<u64>,
    on_store_error: Option<OnStoreError>,
}

/// What becomes of a call whose store fails: which is down, does not answer in time or answers nonsense.
///
/// Of several limits on one call the strictest says it: raise before deny before local before admit.
///
/// ```
/// use callgate::OnStoreError;
///
/// assert_eq!("deny".parse(), Ok(OnStoreError::Deny));
/// assert!(OnStoreError::Raise > OnStoreError::Deny);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum OnStoreError {
    /// It is admitted, unless it costs more than the burst.
    Admit,
    /// A bucket of this process decides, at the same limit: N processes admit up to N times as much together.
    ///
    /// It holds no more than the store's did when that answered last, and is not refilled by an outage.
    #[default]
    Local,
    /// It is refused.
    Deny,
    /// It is refused, and front ends with exceptions raise one: see [`Rejection::raises`](crate::Rejection::raises).
    Raise,
}

impl OnStoreError {
    pub(crate) const ALL: [Self; 4] = [Self::Local, Self::Deny, Self::Admit, Self::Raise];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Local => "local",
            Self::Deny => "deny",
            Self::Raise => "raise",
        }
    }
}

impl fmt::Display for OnStoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OnStoreError {
    type Err = ConfigError;

    /// Reads `local`, `deny`, `admit` or `raise`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let found = Self::ALL.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| {
            let allowed = "'local', 'deny', 'admit' or 'raise'";
            ConfigError::new("on_store_error", allowed, quoted(text))
        })
    }
}

/// How fast a limit lets calls through, as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Pace {
    Rate(Rate),
    /// Never more than so many in any such time, the burst included.
    Quota(u64, Unit),
}

impl Limit {
    /// `count` tokens a second; the burst is 1 until [`burst`](Self::burst) sets it.
    #[must_use]
    pub fn per_second(count: impl Into<Count>) -> Self {
        Self::per_unit(count.into(), Unit::Second)
    }

    /// `count` tokens a minute; the burst is 1 until [`burst`](Self::burst) sets it.
    #[must_use]
    pub fn per_minute(count: impl Into<Count>) -> Self {
        Self::per_unit(count.into(), Unit::Minute)
    }

    /// `count` tokens an hour; the burst is 1 until [`burst`](Self::burst) sets it.
    #[must_use]
    pub fn per_hour(count: impl Into<Count>) -> Self {
        Self::per_unit(count.into(), Unit::Hour)
    }

    /// `count` tokens a day; the burst is 1 until [`burst`](Self::burst) sets it.
    #[must_use]
    pub fn per_day(count: impl Into<Count>) -> Self {
        Self::per_unit(count.into(), Unit::Day)
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "what `into` made is used up here"
    )]
    fn per_unit(count: Count, unit: Unit) -> Self {
        Self::new(Rate::new(&count, unit).map(Pace::Rate), 1)
    }

    /// Never more than `count` tokens in any window of this unit's length, as services word it.
    ///
    /// `count` is 2 or more. The burst is a tenth of it, at least 1, until [`burst`](Self::burst) sets
    /// it, to less than `count`. It is the same bucket as any other limit's, refilled at
    /// `(count - burst)` a unit: a larger burst lets more calls through at once, and fewer after that.
    ///
    /// ```
    /// use callgate::{Limit, Unit};
    ///
    /// let limit = Limit::quota(100, Unit::Minute).burst(20);
    /// assert_eq!(limit.rate(), Limit::per_minute(80).rate());
    /// assert_eq!(Limit::quota(100, Unit::Minute).capacity(), 10);
    /// ```
    #[must_use]
    pub fn quota(count: u64, unit: Unit) -> Self {
        let pace = if count < 2 {
            Err(ConfigError::new(
                "quota",
                "at least 2 in a unit of time (for 1, ask for a rate of 1 with burst 1)",
                format!("{count} per {}", unit.name()),
            ))
        } else {
            Ok(Pace::Quota(count, unit))
        };
        Self::new(pace, (count / 10).max(1))
    }

    /// Reads a quota such as `100/min`, with a whole number.
    ///
    /// # Errors
    /// When it cannot be read. A number out of range is kept until [`check`](Self::check) refuses it.
    ///
    /// ```
    /// use callgate::{Limit, Unit};
    ///
    /// assert_eq!(Limit::parse_quota("100/min")?, Limit::quota(100, Unit::Minute));
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    pub fn parse_quota(text: &str) -> Result<Self, ConfigError> {
        let parsed = count_per_unit(text).and_then(|(count, unit)| {
            let digits = count.bytes().all(|byte| byte.is_ascii_digit());
            Some((count.parse().ok().filter(|_| digits)?, unit))
        });
        let (count, unit) = parsed.ok_or_else(|| {
            ConfigError::new(
                "quota",
                "N/s, N/min, N/h or N/day with N a whole number, such as '100/min'",
                format!("'{}'", text.escape_debug()),
            )
        })?;
        Ok(Self::quota(count, unit))
    }

    fn new(pace: Result<Pace, ConfigError>, burst: u64) -> Self {
        Self {
            pace,
            burst,
            cost: 1,
            tools: None,
            per: Vec::new(),
            max_wait: Duration::ZERO,
            max_concurrent: None,
            on_store_error: None,
        }
    }

    /// Sets the capacity, from 1 to 2^32 - 1 tokens; for a quota, to less than its count.
    #[must_use]
    pub fn burst(mut self, tokens: u64) -> Self {
        self.burst = tokens;
        self
    }

    /// Sets what a call costs that does not say its [cost](crate::Call::cost) itself: from 1 token to
    /// the burst. It is 1 until then.
    #[must_use]
    pub fn cost(mut self, tokens: u64) -> Self {
        self.cost = tokens;
        self
    }

    /// Sets the tools that share this limit, each once, by name or pattern: `*` is any characters, `?` any one.
    ///
    /// Without it, the limit's name is its tool.
    #[must_use]
    pub fn tools<T: Into<String>>(mut self, tools: impl IntoIterator<Item = T>) -> Self {
        self.tools = Some(tools.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the fields that split this limit: each combination of their values has a bucket of its own.
    ///
    /// A call without such a field falls into that field's one bucket for "missing". The field `tool`
    /// is the tool's name; `cost` and `max_wait` are no fields.
    #[must_use]
    pub fn per<T: Into<String>>(mut self, fields: impl IntoIterator<Item = T>) -> Self {
        self.per = fields.into_iter().map(Into::into).collect();
        self
    }

    /// Sets how long a call may wait for its turn, up to [`MAX_WAIT`]; it is zero
    /// until then: calls are refused at once.
    ///
    /// A call that cannot be served within this time is refused at once too, without waiting.
    #[must_use]
    pub fn max_wait(mut self, time: Duration) -> Self {
        self.max_wait = time;
        self
    }

    /// Sets how many admitted calls may run at the same time in this process: from 1 to 2^32 - 1.
    ///
    /// Where fields split the limit, so many for each of its buckets. A call runs until its
    /// [`Permit`](crate::Permit) is dropped.
    #[must_use]
    pub fn max_concurrent(mut self, calls: u64) -> Self {
        self.max_concurrent = Some(calls);
        self
    }

    /// Sets what becomes of its calls when a store over a network fails; until then, what the
    /// [limiter](crate::LimiterBuilder::on_store_error) says.
    #[must_use]
    pub fn on_store_error(mut self, policy: OnStoreError) -> Self {
        self.on_store_error = Some(policy);
        self
    }

    /// The capacity, in tokens.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.burst
    }

    /// What a call costs that does not say it, in tokens.
    #[must_use]
    pub fn default_cost(&self) -> u64 {
        self.cost
    }

    /// The names and patterns of the tools that share this limit; none where the limit's name is its tool.
    #[must_use]
    pub fn shared_by(&self) -> Option<&[String]> {
        self.tools.as_deref()
    }

    /// The fields that split this limit.
    #[must_use]
    pub fn split_by(&self) -> &[String] {
        &self.per
    }

    /// How long a call may wait for its turn.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        self.max_wait
    }

    /// How many calls may run at the same time, where that is limited.
    #[must_use]
    pub fn most_concurrent(&self) -> Option<u64> {
        self.max_concurrent
    }

    /// What becomes of its calls when the store fails, where this limit says so.
    #[must_use]
    pub fn when_store_fails(&self) -> Option<OnStoreError> {
        self.on_store_error
    }

    /// The quota, where this limit was asked for as one: never more than so many in any such time.
    #[must_use]
    pub fn as_quota(&self) -> Option<(u64, Unit)> {
        match self.pace {
            Ok(Pace::Quota(count, unit)) => Some((count, unit)),
            _ => None,
        }
    }

    /// The rate at which the bucket refills.
    ///
    /// # Errors
    /// When rate, quota or, for a quota, the burst is out of range.
    pub fn rate(&self) -> Result<Rate, ConfigError> {
        match self.pace.clone()? {
            Pace::Rate(rate) => Ok(rate),
            Pace::Quota(count, unit) => {
                let most = count.saturating_sub(1).min(MAX_BURST);
                check_whole("burst", self.burst, most, "below the quota")?;
                Rate::new(&Count::from(count - self.burst), unit)
            }
        }
    }

    /// The most that one bucket lets through in any window of a unit's length, in tokens: the burst,
    /// and what refills meanwhile.
    ///
    /// # Errors
    /// When the rate is out of range.
    ///
    /// ```
    /// use callgate::{Limit, Unit};
    ///
    /// assert_eq!(Limit::per_second(2).burst(2).most_in(Unit::Second)?, 4);
    /// assert_eq!(Limit::quota(100, Unit::Minute).most_in(Unit::Minute)?, 100);
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    pub fn most_in(&self, window: Unit) -> Result<u64, ConfigError> {
        let (tokens, nanos) = self.rate()?.fraction();
        let refilled = u128::from(tokens) * u128::from(window.nanos()) / nanos;
        let refilled = u64::try_from(refilled).unwrap_or(u64::MAX);
        Ok(self.burst.saturating_add(refilled))
    }

    /// Whether everything is in range.
    ///
    /// # Errors
    /// When something is not; the error says which, and what is allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.rate()?;
        check_whole("burst", self.burst, MAX_BURST, "")?;
        check_whole("cost", self.cost, self.burst, "at most the burst")?;
        if let Some(calls) = self.max_concurrent {
            check_whole("max_concurrent", calls, MAX_BURST, "")?;
        }
        check_wait(self.max_wait)?;
        if self.tools.as_ref().is_some_and(Vec::is_empty) {
            return Err(ConfigError::new("tools", "at least one name", "none"));
        }
        let tools = refused_tools(self.tools.iter().flatten());
        let mut refused = tools.chain(refused_fields(&self.per));
        refused.next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl fmt::Debug for Limit {
    /// As a user would ask for it, without what was left as it is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Limit");
        match &self.pace {
            Ok(Pace::Rate(rate)) => shown.field("rate", rate),
            Ok(Pace::Quota(count, unit)) => {
                shown.field("quota", &format_args!("{count}/{}", unit.symbol()))
            }
            Err(error) => shown.field("refused", &format_args!("{error}")),
        };
        shown.field("burst", &self.burst);
        if self.cost != 1 {
            shown.field("cost", &self.cost);
        }
        if let Some(tools) = &self.tools {
            shown.field("tools", tools);
        }
        if !self.per.is_empty() {
            shown.field("per", &self.per);
        }
        if !self.max_wait.is_zero() {
            shown.field("max_wait", &self.max_wait);
        }
        if let Some(calls) = &self.max_concurrent {
            shown.field("max_concurrent", calls);
        }
        if let Some(policy) = &self.on_store_error {
            shown.field("on_store_error", &format_args!("{policy}"));
        }
        shown.finish()
    }
}

impl FromStr for Limit {
    type Err = ConfigError;

    /// Reads a rate such as `300/min`; the burst is 1 until [`burst`](Limit::burst) sets it.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(Ok(Pace::Rate(text.parse()?)), 1))
    }
}

fn check_whole(
    field: &'static str,
    value: u64,
    most: u64,
    why: &'static str,
) -> Result<(), ConfigError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    let why = if why.is_empty() {
        why.into()
    } else {
        format!(" ({why})")
    };
    let allowed = format!("a whole number from 1 to {}{why}", grouped(most));
    Err(ConfigError::new(field, allowed, value.to_string()))
}

/// Whether a call may wait so long.
fn check_wait(time: Duration) -> Result<(), ConfigError> {
    if time <= MAX_WAIT {
        return Ok(());
    }
    let allowed = "a time from 0 to 86,400 s";
    Err(ConfigError::new("max_wait", allowed, format!("{time:?}")))
}

/// A number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A limit's name: that of its tool, or a pattern. What no tool is called would limit nothing, and nobody
/// would see it.
pub(crate) fn check_name(name: &str) -> Result<(), ConfigError> {
    if may_be_called(name) {
        return Ok(());
    }
    let allowed = "a tool's name or a pattern with * and ?, without spaces around it and without [, ], { or }";
    Err(ConfigError::new("name", allowed, quoted(name)))
}

/// The names in `tools` that are refused, with their places.
pub(crate) fn refused_tools<'a>(
    tools: impl IntoIterator<Item = &'a String>,
) -> impl Iterator<Item = (usize, ConfigError)> {
    let allowed = "names of tools or patterns with * and ?, without spaces around them and without [, ], { or }";
    refused_names("tools", tools, may_be_called, allowed)
}

/// The names in `per` that are refused, with their places.
pub(crate) fn refused_fields<'a>(
    fields: impl IntoIterator<Item = &'a String>,
) -> impl Iterator<Item = (usize, ConfigError)> {
    let is_field = |name: &str| {
        !name.is_empty() && name.trim() == name && !["cost", "max_wait"].contains(&name)
    };
    let allowed = "names of fields, such as 'tenant', without spaces around them and other than 'cost' and 'max_wait'";
    refused_names("per", fields, is_field, allowed)
}

fn refused_names<'a>(
    field: &'static str,
    names: impl IntoIterator<Item = &'a String>,
    is_name: impl Fn(&str) -> bool,
    allowed: &'static str,
) -> impl Iterator<Item = (usize, ConfigError)> {
    let mut seen = HashSet::new();
    let refused = move |(place, name): (usize, &'a String)| {
        let error = if !is_name(name) {
            ConfigError::new(field, allowed, quoted(name))
        } else if !seen.insert(name) {
            let twice = format!("{} twice", quoted(name));
            ConfigError::new(field, "names that are all different", twice)
        } else {
            return None;
        };
        Some((place, error))
    };
    names.into_iter().enumerate().filter_map(refused)
}

fn may_be_called(name: &str) -> bool {
    !name.is_empty() && name.trim() == name && !name.contains(['[', ']', '{', '}'])
}

fn quoted(name: &str) -> String {
    format!("'{}'", name.escape_debug())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_a_bucket_that_refills_with_what_its_burst_leaves() {
        for (count, burst, rate) in [(100, 20, 80), (100, 99, 1), (2, 1, 1), (19, 1, 18)] {
            let limit = Limit::quota(count, Unit::Minute).burst(burst);
            assert_eq!(
                limit.rate(),
                Limit::per_minute(rate).rate(),
                "{count} {burst}"
            );
            assert_eq!(limit.check(), Ok(()), "{count} {burst}");
        }
        assert_eq!(Limit::quota(5, Unit::Day).capacity(), 1);
        assert_eq!(Limit::quota(1000, Unit::Day).capacity(), 100);
    }

    #[test]
    fn what_no_quota_can_be_is_refused_with_what_is_allowed() {
        let refused = |limit: Limit| limit.check().unwrap_err().to_string();
        assert!(refused(Limit::quota(1, Unit::Minute)).contains("at least 2"));
        let burst = refused(Limit::quota(100, Unit::Minute).burst(100));
        assert_eq!(
            burst,
            "burst must be a whole number from 1 to 99 (below the quota), got 100"
        );
        for bad in [
            "100", "1.5/min", "+5/min", "/min", "1e2/min", "100/m", "-3/s",
        ] {
            assert!(Limit::parse_quota(bad).is_err(), "{bad}");
        }
        assert!(
            Limit::parse_quota("18446744073709551615/s")
                .unwrap()
                .check()
                .is_err()
        );
    }

    #[test]
    fn names_and_fields_that_mean_nothing_are_refused() {
        let limit = || Limit::per_second(1);
        for bad in ["", " a", "a ", "crm_[ab]", "{a,b}"] {
            assert!(limit().tools([bad]).check().is_err(), "{bad:?}");
        }
        for bad in ["", " tenant", "cost", "max_wait"] {
            assert!(limit().per([bad]).check().is_err(), "{bad:?}");
        }
        let twice = |limit: Limit| limit.check().unwrap_err().to_string();
        assert_eq!(
            twice(limit().per(["tenant", "user", "tenant"])),
            "per must be names that are all different, got 'tenant' twice"
        );
        assert_eq!(
            twice(limit().tools(["crm_*", "crm_*"])),
            "tools must be names that are all different, got 'crm_*' twice"
        );
        assert!(limit().tools(Vec::<String>::new()).check().is_err());
        assert!(limit().cost(2).check().is_err());
        assert!(limit().cost(0).check().is_err());
        assert!(limit().burst(2).cost(2).check().is_ok());
    }
}
