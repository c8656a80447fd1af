//! Rates: what a user asks for, held as exact fractions.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::ConfigError;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// The slowest rate is one token in this time: 366 days, so that "one a year" fits in any year.
const SLOWEST_PERIOD: u128 = 366 * 86_400 * NANOS_PER_SECOND as u128;

/// A count may have this many significant digits: all of a float's, and room to spare.
const MAX_DIGITS: usize = 18;

/// A unit of time that a rate or a quota is written in.
///
/// ```
/// use callgate::Unit;
///
/// assert_eq!("min".parse(), Ok(Unit::Minute)); // as in "300/min"
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// `s`
    Second,
    /// `min`
    Minute,
    /// `h`
    Hour,
    /// `day`, of 24 hours
    Day,
}

impl Unit {
    /// All of them, the shortest first.
    pub const ALL: [Self; 4] = [Self::Second, Self::Minute, Self::Hour, Self::Day];

    /// As it is written in a rate.
    #[must_use]
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Second => "s",
            Self::Minute => "min",
            Self::Hour => "h",
            Self::Day => "day",
        }
    }

    /// As it is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    /// Its length.
    #[must_use]
    pub const fn length(self) -> Duration {
        Duration::from_nanos(self.nanos())
    }

    pub(crate) const fn nanos(self) -> u64 {
        NANOS_PER_SECOND
            * match self {
                Self::Second => 1,
                Self::Minute => 60,
                Self::Hour => 3_600,
                Self::Day => 86_400,
            }
    }
}

impl FromStr for Unit {
    type Err = ConfigError;

    /// Reads `s`, `min`, `h` or `day`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let unit = Self::ALL.into_iter().find(|unit| unit.symbol() == text);
        unit.ok_or_else(|| {
            let value = format!("'{}'", text.escape_debug());
            ConfigError::new("unit", "'s', 'min', 'h' or 'day'", value)
        })
    }
}

/// A number and a unit with a slash between, such as `300/min`; none where it is not that.
pub(crate) fn count_per_unit(text: &str) -> Option<(&str, Unit)> {
    let (count, unit) = text.split_once('/')?;
    Some((count.trim(), unit.trim().parse().ok()?))
}

/// How fast a bucket refills: an exact fraction, in lowest terms, of tokens per nanosecond.
///
/// From 1 token in 366 days to 1,000,000,000 tokens a second.
///
/// ```
/// use callgate::Rate;
///
/// let rate: Rate = "300/min".parse()?;
/// assert_eq!(rate, "5/s".parse()?);
/// assert_eq!(rate.to_string(), "5/s");
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rate {
    tokens: u64,
    nanos: u128,
}

impl Rate {
    /// `count` tokens in each `unit`.
    pub(crate) fn new(count: &Count, unit: Unit) -> Result<Self, ConfigError> {
        let refused = || {
            ConfigError::new(
                "rate",
                "from 1 per 366 days to 1,000,000,000 per second",
                format!("{} per {}", count.text, unit.name()),
            )
        };
        let (digits, exponent) = count.decimal.ok_or_else(refused)?;
        let scale = 10_u128.checked_pow(exponent.unsigned_abs());
        let [digits, nanos] = [digits, unit.nanos()].map(u128::from);
        let scaled = |number: u128| scale.and_then(|scale| number.checked_mul(scale));
        // What overflows here is far out of range.
        let (tokens, nanos) = if exponent < 0 {
            (digits, scaled(nanos).ok_or_else(refused)?)
        } else {
            (scaled(digits).ok_or_else(refused)?, nanos)
        };
        let common = gcd(tokens, nanos);
        let (tokens, nanos) = (tokens / common, nanos / common);
        let fits = tokens > 0 && tokens <= nanos && nanos <= tokens.saturating_mul(SLOWEST_PERIOD);
        match u64::try_from(tokens) {
            Ok(tokens) if fits => Ok(Self { tokens, nanos }),
            _ => Err(refused()),
        }
    }

    /// The rate of such a fraction, if it is one.
    #[cfg(all(
        any(all(feature = "shm", target_os = "linux"), feature = "redis"),
        not(loom)
    ))]
    pub(crate) fn of((tokens, nanos): (u64, u128)) -> Option<Self> {
        let is_one = tokens > 0 && (1..10_u128.pow(37)).contains(&nanos);
        is_one.then_some(Self { tokens, nanos })
    }

    /// The fraction: so many tokens in so many nanoseconds, in lowest terms.
    pub(crate) fn fraction(self) -> (u64, u128) {
        (self.tokens, self.nanos)
    }

    /// The count of tokens per `nanos` as a decimal, where it has one of at most 18 digits.
    fn decimal(self, nanos: u64) -> Option<String> {
        let (text, exact) = self.digits(nanos, MAX_DIGITS);
        exact.then_some(text)
    }

    /// The first `most` significant digits of the count per `nanos`, and whether they are all of it.
    fn digits(self, nanos: u64, most: usize) -> (String, bool) {
        let numerator = u128::from(self.tokens) * u128::from(nanos);
        let (whole, mut rest) = (numerator / self.nanos, numerator % self.nanos);
        let mut text = whole.to_string();
        let mut digits = if whole == 0 { 0 } else { text.len() };
        if rest > 0 {
            text.push('.');
        }
        while rest > 0 && digits < most {
            // `rest` is below `nanos`, which is below 10^37.
            let digit = rest * 10 / self.nanos;
            rest = rest * 10 % self.nanos;
            if digits > 0 || digit > 0 {
                digits += 1;
            }
            text.extend(char::from_digit(u32::try_from(digit).unwrap_or(0), 10));
        }
        (text, rest == 0)
    }

    /// Tokens a second, as the nearest float.
    #[must_use]
    pub fn per_second(self) -> f64 {
        // Halfway between two floats is a fraction with a denominator of at most 2^79, and `nanos`
        // is below 10^37: a rate that agrees with it in 62 digits is it.
        let (mut text, exact) = self.digits(NANOS_PER_SECOND, 62);
        if !exact {
            text.push('1');
        }
        text.parse().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Rate {
    /// As a user would write it: `2/s`, `100/min`, `0.5/day`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = Unit::ALL
            .into_iter()
            .find_map(|unit| Some((self.decimal(unit.nanos())?, unit)));
        match written {
            Some((count, unit)) => write!(f, "{count}/{}", unit.symbol()),
            None => write!(f, "{}/{}ns", self.tokens, self.nanos),
        }
    }
}

impl fmt::Debug for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rate({self})")
    }
}

impl FromStr for Rate {
    type Err = ConfigError;

    /// Reads `N/s`, `N/min`, `N/h` or `N/day`, with `N` a decimal such as `300` or `0.5`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let parsed = count_per_unit(text).and_then(|(count, unit)| {
            let decimal = Some(Count::parse(count)?);
            let text = count.to_owned();
            Some((Count { text, decimal }, unit))
        });
        match parsed {
            Some((count, unit)) => Self::new(&count, unit),
            None => Err(ConfigError::new(
                "rate",
                "N/s, N/min, N/h or N/day with N a number, such as '300/min' or '0.5/s'",
                format!("'{}'", text.escape_debug()),
            )),
        }
    }
}

/// A number of tokens, as a decimal: what [`Limit::per_second`](crate::Limit::per_second) and its siblings take.
///
/// A float means its shortest decimal: `0.1` is one tenth, not the binary number beside it.
#[derive(Clone, Debug)]
pub struct Count {
    text: String,
    /// Significant digits and the power of ten they are multiplied by; none where the text is no such number.
    decimal: Option<(u64, i32)>,
}

impl Count {
    /// Reads digits with at most one point, and an exponent as Rust writes one (`1e-7`).
    fn parse(text: &str) -> Option<(u64, i32)> {
        let (mantissa, exponent) = match text.split_once('e') {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
            None => (text, 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = [whole, fraction].concat();
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let significant = digits.trim_end_matches('0');
        let trailing = i32::try_from(digits.len() - significant.len()).ok()?;
        let exponent = exponent
            .checked_sub(i32::try_from(fraction.len()).ok()?)?
            .checked_add(trailing)?;
        match significant.trim_start_matches('0') {
            "" => Some((0, 0)),
            long if long.len() > MAX_DIGITS => None,
            digits => Some((digits.parse().ok()?, exponent)),
        }
    }
}

impl From<u64> for Count {
    fn from(count: u64) -> Self {
        let text = count.to_string();
        Self {
            decimal: Self::parse(&text),
            text,
        }
    }
}

impl From<u32> for Count {
    fn from(count: u32) -> Self {
        u64::from(count).into()
    }
}

impl From<i32> for Count {
    fn from(count: i32) -> Self {
        u64::try_from(count).map_or_else(
            |_| Self {
                text: count.to_string(),
                decimal: None,
            },
            Self::from,
        )
    }
}

impl From<f64> for Count {
    fn from(count: f64) -> Self {
        // `{:e}` writes the shortest decimal that reads back as the same float.
        Self {
            text: format!("{count:?}"),
            decimal: Self::parse(&format!("{count:e}")),
        }
    }
}

/// The greatest common divisor (Euclid).
pub(crate) fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, MAX_BURST};

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    #[test]
    fn a_float_means_its_shortest_decimal() {
        for (float, text) in [
            (0.1, "0.1/s"),
            (0.3, "0.3/s"),
            (1e-7, "0.0000001/s"),
            (1e9, "1000000000/s"),
        ] {
            assert_eq!(Limit::per_second(float).rate(), Ok(rate(text)), "{text}");
            assert!((rate(text).per_second() - float).abs() == 0.0, "{text}");
        }
    }

    #[test]
    fn every_rate_is_written_as_it_can_be_read() {
        for text in [
            "2/s",
            "100/min",
            "0.5/h",
            "7/h",
            "1/day",
            "1000/day",
            "0.1/s",
            "59999/min",
            "8000/s",
        ] {
            assert_eq!(rate(&rate(text).to_string()), rate(text), "{text}");
        }
        assert_eq!(rate("120/min").to_string(), "2/s");
        assert_eq!(rate("100/min").to_string(), "100/min");
    }

    #[test]
    fn rates_in_range_are_taken_and_others_refused() {
        for good in [
            1.0 / 31_536_000.0,
            1.0 / 31_622_400.0,
            1e9,
            0.1,
            123_456_789.123_456_79,
        ] {
            assert!(Limit::per_second(good).check().is_ok(), "{good}");
        }
        for bad in [
            0.0,
            -0.0,
            -1.0,
            f64::NAN,
            f64::INFINITY,
            -f64::INFINITY,
            1e9 + 1.0,
            3e-8,
            5e-324,
            1e308,
        ] {
            assert!(Limit::per_second(bad).check().is_err(), "{bad}");
        }
        for bad in [0, MAX_BURST + 1, u64::MAX] {
            assert!(Limit::per_second(1).burst(bad).check().is_err(), "{bad}");
        }
        assert!(Limit::per_day(86_400_000_000_000_u64).check().is_ok());
        assert!(Limit::per_day(86_400_000_000_001_u64).check().is_err());
        assert!(Limit::per_second(u64::MAX).check().is_err());
    }

    #[test]
    fn text_that_is_no_rate_is_refused_with_what_is_allowed() {
        for bad in [
            "",
            "/",
            "5",
            "5/",
            "/s",
            "5/m",
            "5/5m",
            "10 per fortnight",
            "1/2/s",
            "-1/s",
            "+1/s",
            "nan/s",
            "inf/s",
            "1_000/s",
            "0x10/s",
            "1.2.3/s",
            "1e/s",
            "./s",
            "\u{661}/s",
            "5/S",
        ] {
            let error = bad.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains("N/s, N/min, N/h or N/day"), "{bad}: {error}");
        }
        let error = "0/s".parse::<Rate>().unwrap_err().to_string();
        assert!(error.ends_with("got 0 per second"), "{error}");
        assert!(
            format!("{}/s", "9".repeat(1_000_000))
                .parse::<Rate>()
                .is_err()
        );
    }
}
