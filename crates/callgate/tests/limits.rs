//! Rates and limits: what is taken, how it is written, and how the rest is refused.
#![cfg(not(loom))]

mod common;

use std::time::Duration;

use callgate::{Call, Limit, Limiter, MAX_BURST, Rate};
use common::{UNITS, config, exact_rate, in_range, limits, log_uniform};
use num_rational::BigRational;
use proptest::prelude::*;

/// What a printed rate says, in tokens per nanosecond.
fn printed(rate: Rate) -> BigRational {
    let text = rate.to_string();
    let (count, unit) = text.split_once('/').expect("N/unit");
    let seconds = UNITS.iter().find(|(name, _)| *name == unit);
    exact_rate(count, seconds.expect("a unit").1).expect("a decimal")
}

/// The error that `limit` is refused with, which has to name the limit.
fn refusal(limit: &Limit) -> String {
    let error = limit.check().expect_err("out of range").to_string();
    let built = Limiter::builder().limit("search", limit.clone()).build();
    let message = built.expect_err("out of range").to_string();
    assert_eq!(message, format!("limit 'search': {error}"));
    error
}

const RATES: &str = "rate must be from 1 per 366 days to 1,000,000,000 per second, got ";
const BURSTS: &str = "burst must be a whole number from 1 to 4,294,967,295, got ";

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_limit_in_range_builds_a_limiter(given in limits()) {
        prop_assert_eq!(given.limit.check(), Ok(()));
        let built = Limiter::builder().limit("tool", given.limit).build();
        prop_assert!(built.is_ok(), "{:?}", built);
    }

    #[test]
    fn a_rate_is_exactly_what_was_asked_for_and_is_printed_so(given in limits()) {
        let rate = given.limit.rate()?;
        prop_assert_eq!(printed(rate), given.rate);
        prop_assert_eq!(rate.to_string().parse::<Rate>(), Ok(rate));
        prop_assert_eq!(rate.to_string().parse::<Limit>()?.burst(given.limit.capacity()), given.limit);
    }

    #[test]
    fn a_float_comes_back_as_it_was_given(exponent in 0.0..1.0) {
        let float = (1e9 * 31_622_400.0_f64).powf(exponent) / 31_622_400.0;
        let limit = Limit::per_second(float);
        prop_assume!(limit.check().is_ok());
        prop_assert_eq!(limit.rate()?.per_second().to_bits(), float.to_bits());
    }

    #[test]
    fn per_second_is_the_nearest_float(given in limits()) {
        let exact = &given.rate * BigRational::from_integer(1_000_000_000.into());
        let off = |float: f64| {
            let off = BigRational::from_float(float).expect("a number") - &exact;
            off.clone().max(-off)
        };
        let float = given.limit.rate()?.per_second();
        prop_assert!(off(float) <= off(float.next_up()), "{} is low", float);
        prop_assert!(off(float) <= off(float.next_down()), "{} is high", float);
    }

    #[test]
    fn one_rate_in_two_units_is_equal(count in 1..1_000_000_000_u64, more in 1..60_u64) {
        prop_assert_eq!(Limit::per_second(count), Limit::per_minute(60 * count));
        prop_assert_eq!(Limit::per_minute(count), Limit::per_hour(60 * count));
        prop_assert_eq!(Limit::per_hour(count), Limit::per_day(24 * count));
        prop_assert_ne!(Limit::per_second(count), Limit::per_minute(60 * count - more));
    }

    #[test]
    fn a_count_out_of_range_is_refused_with_the_range_and_the_value(
        float in prop_oneof![any::<f64>(), -1e12..1e12, 0.0..4e-8],
        whole in log_uniform(),
        small in any::<i32>(),
    ) {
        let out = |text: &str| exact_rate(text, 1).is_none_or(|rate| !in_range(&rate));
        if out(&format!("{float:e}")) {
            prop_assert_eq!(refusal(&Limit::per_second(float)), format!("{RATES}{float:?} per second"));
        }
        let above = whole.saturating_add(1_000_000_001);
        prop_assert_eq!(refusal(&Limit::per_second(above)), format!("{RATES}{above} per second"));
        if small <= 0 {
            prop_assert_eq!(refusal(&Limit::per_hour(small)), format!("{RATES}{small} per hour"));
        }
    }

    #[test]
    fn a_burst_out_of_range_is_refused_with_the_range_and_the_value(given in limits(), burst in log_uniform()) {
        let above = burst.saturating_add(MAX_BURST + 1);
        for bad in [0, above] {
            prop_assert_eq!(refusal(&given.limit.clone().burst(bad)), format!("{BURSTS}{bad}"));
        }
        // Where both are wrong, the rate is named.
        let both = Limit::per_day(0).burst(above);
        prop_assert_eq!(refusal(&both), format!("{RATES}0 per day"));
    }

    #[test]
    fn a_text_is_read_exactly_or_refused(
        text in prop_oneof![
            r"\PC*",
            r" ?[0-9]{0,12}\.?[0-9]{0,12}(e[+-]?[0-9]{0,3})? ?/ ?(s|min|h|day) ?",
            r"[0-9.e+-]{0,8}/(s|min|h|day|m|sec)",
        ],
    ) {
        let expected = text.split_once('/').and_then(|(count, unit)| {
            let (_, seconds) = UNITS.iter().find(|(name, _)| *name == unit.trim())?;
            let mantissa = count.trim().split('e').next()?;
            let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
            let fits = digits.trim_start_matches('0').trim_end_matches('0').len() <= 18;
            exact_rate(count.trim(), *seconds).filter(|rate| fits && in_range(rate))
        });
        match (text.parse::<Rate>(), expected) {
            (Ok(rate), Some(expected)) => prop_assert_eq!(printed(rate), expected),
            (Err(error), None) => {
                let error = error.to_string();
                let escaped = text.escape_debug().to_string();
                let named = error.ends_with(&format!("got '{escaped}'")) || error.starts_with(RATES);
                prop_assert!(named, "{}", error);
            }
            (read, expected) => prop_assert!(false, "{read:?}, not {expected:?}"),
        }
    }
}

#[test]
fn the_range_of_rates_is_exact_at_both_ends() {
    // 1/366 is 0.002732240437158469945...
    for (good, bad) in [
        ("0.00273224043715846995/day", "0.00273224043715846994/day"),
        ("1000000000/s", "1000000000.00000001/s"),
        ("60000000000/min", "60000000001/min"),
        ("3600000000000/h", "3600000000000.0001/h"),
        ("86400000000000/day", "86400000000000.0001/day"),
    ] {
        assert!(good.parse::<Rate>().is_ok(), "{good}");
        assert!(bad.parse::<Rate>().is_err(), "{bad}");
    }
}

#[test]
fn debug_output_says_what_a_user_wrote_and_not_how_it_is_kept() {
    let limit = Limit::per_minute(100).burst(2);
    assert_eq!(
        format!("{limit:?}"),
        "Limit { rate: Rate(100/min), burst: 2 }"
    );
    let limiter = Limiter::builder().limit("tool", limit);
    let limiter = limiter.build().expect("a limit in range");
    let decision = limiter.try_acquire_at(&Call::new("tool"), Duration::ZERO);
    assert_eq!(
        format!("{decision:?}"),
        "Admitted(Permit { tool: Some(0), fill: Some(1 tokens), overruled: None })"
    );
}

#[test]
fn the_rate_of_a_whole_number_a_minute_is_the_float_that_division_gives() {
    for (count, float) in [(175_u32, 175.0_f64), (100, 100.0), (275, 275.0), (7, 7.0)] {
        let rate = Limit::per_minute(count).rate().expect("in range");
        assert_eq!(
            rate.per_second().to_bits(),
            (float / 60.0).to_bits(),
            "{count}"
        );
    }
}

#[test]
fn eighteen_digits_are_read_and_nineteen_are_refused() {
    assert!("1.00000000000000001/s".parse::<Rate>().is_ok());
    assert!("1.000000000000000001/s".parse::<Rate>().is_err());
    // Zeros at either end are no digits.
    assert!("0001.0000000000000000000/s".parse::<Rate>().is_ok());
}
