//! Limits from all of the allowed range, each with its rate as an exact fraction.

use std::fmt;

use callgate::{Limit, MAX_BURST};
use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;

/// How a property is tested: without a file of the inputs that failed, which are printed.
pub(crate) fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// The units that a rate can be written in, with their lengths in seconds.
pub(crate) const UNITS: [(&str, u32); 4] = [("s", 1), ("min", 60), ("h", 3_600), ("day", 86_400)];

/// A limit, how it was asked for, and what that means.
#[derive(Clone)]
pub(crate) struct Given {
    pub(crate) limit: Limit,
    /// The rate in tokens per nanosecond.
    pub(crate) rate: BigRational,
    asked: String,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} burst {}", self.asked, self.limit.capacity())
    }
}

/// Any limit that is allowed: its rate a whole number, a float or a text, in any unit.
pub(crate) fn limits() -> impl Strategy<Value = Given> {
    let rates = prop_oneof![whole_numbers(), floats(), texts()];
    (rates, bursts())
        .prop_map(|(given, burst)| Given {
            limit: given.limit.burst(burst),
            ..given
        })
        .prop_filter("out of range", |given| in_range(&given.rate))
}

/// Bursts of all sizes.
fn bursts() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => log_uniform().prop_map(|burst| burst % MAX_BURST + 1),
        2 => 1..20_u64,
        1 => MAX_BURST - 1..=MAX_BURST,
    ]
}

/// Numbers of all lengths, in bits.
pub(crate) fn log_uniform() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0..64_u32).prop_map(|(number, shift)| number >> shift)
}

/// Whether a rate (in tokens per nanosecond) is allowed: 1 per 366 days to 1,000,000,000 per second.
pub(crate) fn in_range(rate: &BigRational) -> bool {
    let slowest = BigRational::new(1.into(), 31_622_400_000_000_000_u64.into());
    let fastest = BigRational::from_integer(1.into());
    (slowest..=fastest).contains(rate)
}

/// What a count in a unit comes to in tokens per nanosecond; none where the count is no decimal.
pub(crate) fn exact_rate(count: &str, unit_seconds: u32) -> Option<BigRational> {
    let nanos = BigInt::from(unit_seconds) * 1_000_000_000;
    Some(decimal(count)? / BigRational::from_integer(nanos))
}

/// The value of digits with at most one point and perhaps an exponent; none for any other text.
fn decimal(text: &str) -> Option<BigRational> {
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let point = mantissa.find('.').unwrap_or(mantissa.len());
    let digits = mantissa.replacen('.', "", 1);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let digits: BigInt = is_number.then(|| digits.parse().ok())??;
    let places = i32::try_from(mantissa.len().saturating_sub(point + 1)).ok()?;
    let exponent: i32 = exponent.parse().ok()?;
    let power = BigRational::from_integer(10.into()).pow(exponent - places);
    Some(BigRational::from_integer(digits) * power)
}

/// A limit that was asked for as `asked`: so much in so many seconds.
pub(crate) fn given(limit: Limit, count: &str, unit_seconds: u32, asked: String) -> Given {
    let rate = exact_rate(count, unit_seconds).expect("a decimal");
    Given { limit, rate, asked }
}

fn whole_numbers() -> BoxedStrategy<Given> {
    let limit = |count: u64, unit: usize| {
        let limit = match unit {
            0 => Limit::per_second(count),
            1 => Limit::per_minute(count),
            2 => Limit::per_hour(count),
            _ => Limit::per_day(count),
        };
        let (name, seconds) = UNITS[unit];
        let asked = format!("whole number {count}/{name}");
        given(limit, &count.to_string(), seconds, asked)
    };
    (0..4_usize, log_uniform())
        .prop_map(move |(unit, count)| {
            let most = u64::from(UNITS[unit].1) * 1_000_000_000;
            limit(count % most + 1, unit)
        })
        .boxed()
}

fn floats() -> BoxedStrategy<Given> {
    // By the logarithm: as many slow rates as fast ones, nearly all of them with 16 or 17 digits.
    let long = (0.0..1.0).prop_map(|x: f64| (1e9 * 31_622_400.0_f64).powf(x) / 31_622_400.0);
    let short = (1..10_000_u32, -7..=5).prop_map(|(digits, places)| {
        let text = format!("{digits}e{places}");
        text.parse::<f64>().expect("a float")
    });
    (0..4_usize, prop_oneof![2 => long, 1 => short])
        .prop_map(|(unit, per_second)| {
            let (name, seconds) = UNITS[unit];
            let count = per_second * f64::from(seconds);
            let limit = match unit {
                0 => Limit::per_second(count),
                1 => Limit::per_minute(count),
                2 => Limit::per_hour(count),
                _ => Limit::per_day(count),
            };
            // Rust prints the shortest decimal that is read as the same float.
            let text = format!("{count}");
            let asked = format!("float {text}/{name}");
            given(limit, &text, seconds, asked)
        })
        .boxed()
}

fn texts() -> BoxedStrategy<Given> {
    let digits = (1..=18_u32, any::<u64>()).prop_map(|(length, number)| {
        let tens = 10_u64.pow(length - 1);
        (tens + number % (9 * tens)).to_string()
    });
    (0..4_usize, digits, -8..=14_i32, any::<bool>())
        .prop_map(|(unit, digits, magnitude, exponent)| {
            let places = i32::try_from(digits.len()).expect("short") - 1 - magnitude;
            let count = if exponent {
                format!("{digits}e{}", -places)
            } else {
                with_point(&digits, places)
            };
            let (name, seconds) = UNITS[unit];
            let rate = exact_rate(&count, seconds).expect("a decimal");
            (count, name, seconds, rate)
        })
        .prop_filter("out of range", |(.., rate)| in_range(rate))
        .prop_map(|(count, name, seconds, _)| {
            let text = format!("{count}/{name}");
            let limit = text.parse().expect("a rate");
            given(limit, &count, seconds, format!("text {text}"))
        })
        .boxed()
}

/// The digits with a point before the last `places` of them, and the zeros that takes.
fn with_point(digits: &str, places: i32) -> String {
    let Ok(places) = usize::try_from(places) else {
        return format!("{digits}{}", "0".repeat(places.unsigned_abs() as usize));
    };
    let padded = format!("{digits:0>width$}", width = places + 1);
    let (whole, fraction) = padded.split_at(padded.len() - places);
    format!("{whole}.{fraction}")
}
