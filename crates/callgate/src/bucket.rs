//! The bucket's arithmetic: pure, in integers, with time as an argument.
//!
//! A bucket is one number, the theoretical arrival time of the generic cell rate algorithm
//! (GCRA: ITU-T I.371, annex A; the same thing as a token bucket). It is kept in *units*, equal
//! parts of a token, on a scale that grows as time passes: at time `t` a bucket that is full
//! stands at `R(t) = rate x t` or below, and an empty one at `R(t) + burst`. Admitting a call adds
//! its cost.
//!
//! `R(t)` need not be a whole number of units, so it is rounded, always against the caller:
//! down where a call is tested, up where a full bucket starts to be drawn from. Let `T` be the
//! state after each admission, `c` its cost, and take the admissions `i..=j`. Each of them either
//! finds the bucket full and starts from `ceil R(t)`, or leaves `T <= floor R(t) + burst`, so
//! their costs add up to at most `burst + floor R(t_j) - ceil R(t_i)`: never more than
//! `burst + rate x (t_j - t_i)`, in any window and whatever the clock readings were.
//! Nothing is rounded when a cost is added (a token is a whole number of units), so rounding never
//! adds up: a call is late by less than one unit. Some rates of many digits with a burst of millions
//! are fractions too fine for 64 bits; they are rounded down, by less than one more unit in all.

use std::num::NonZeroU64;
use std::time::Duration;

use crate::rate::gcd;
use crate::{ConfigError, Limit};

/// Time stops here: 2^63 - 1 ns, 292 years, after a limiter was made.
pub(crate) const MAX_NANOS: u64 = (1 << 63) - 1;

/// No state is above this; stores mark words that hold none with the two numbers that are.
pub(crate) const MAX_STATE: u64 = u64::MAX - 2;

/// What one limit's rate and burst come to in units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    burst: u64,
    /// The units in a token.
    token: NonZeroU64,
    /// The units that come in a nanosecond, unless that is one: nothing is multiplied then.
    refill: Option<Ratio>,
    /// The nanoseconds that a unit takes to come, where that is less than one.
    wait: Option<Ratio>,
}

/// A call's cost in units, and what a bucket may be short of for the call to be admitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Price {
    units: u64,
    spare: u64,
}

impl Price {
    /// Of a call that every bucket admits, however empty it is.
    pub(crate) const FREE: Self = Self {
        units: 0,
        spare: u64::MAX,
    };
}

/// `R` at some time, rounded down; and up, where that is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached<'a> {
    refill: Option<&'a Ratio>,
    now: u64,
    floor: u64,
}

impl Reached<'_> {
    /// The units that a bucket in this state is short of.
    #[inline]
    pub(crate) fn missing(&self, state: u64) -> u64 {
        state.saturating_sub(self.floor)
    }

    /// A bucket in a state up to this one is full.
    #[inline]
    pub(crate) fn floor(self) -> u64 {
        self.floor
    }

    #[inline]
    pub(crate) fn now(self) -> u64 {
        self.now
    }

    #[inline]
    fn ceil(self) -> u64 {
        let exact = |refill: &Ratio| refill.is_exact(self.now, self.floor);
        self.floor + u64::from(!self.refill.is_none_or(exact))
    }
}

impl Bucket {
    /// Chooses the units: as fine as a bucket for all of [`MAX_NANOS`] can have them in 64 bits.
    ///
    /// Where it can be, a nanosecond brings a whole number of units and nothing is ever rounded:
    /// so for 1, 2, 5, 10, … a second and for one token in any whole number of nanoseconds. Else
    /// the shortest of 10 ns, 100 ns, … brings a whole number, so that round times are exact.
    pub(crate) fn new(limit: &Limit) -> Result<Self, ConfigError> {
        limit.check()?;
        Self::of(limit.rate()?.fraction(), limit.capacity()).ok_or_else(|| {
            ConfigError::new("rate", "a fraction that fits 64 bits", format!("{limit:?}"))
        })
    }

    /// The same from so many tokens in so many nanoseconds, and a burst.
    pub(crate) fn of((tokens, nanos): (u64, u128), capacity: u64) -> Option<Self> {
        if tokens == 0 || nanos == 0 {
            return None;
        }
        let (tokens, burst) = (u128::from(tokens), u128::from(capacity));
        let in_all = (tokens * u128::from(MAX_NANOS)).div_ceil(nanos) + burst;
        let finest = u128::from(MAX_STATE) / in_all;
        // More than half of the finest, so a unit comes in less than 2 ns or 10^-9 of a token's time.
        let token = (0..=18)
            .map(|exponent| nanos / gcd(nanos, 10_u128.pow(exponent)))
            .find(|&token| token <= finest)
            .map_or(finest, |token| finest / token * token);
        let common = gcd(token * tokens, nanos);
        let (up, down) = rounded_down(token * tokens / common, nanos / common);
        let narrow = |number: u128| u64::try_from(number).ok();
        let (up, down) = (narrow(up)?, narrow(down)?);
        Some(Self {
            burst: capacity,
            token: NonZeroU64::new(narrow(token)?)?,
            refill: if up == down {
                None
            } else {
                Some(Ratio::new(up, down, 1)?)
            },
            wait: Ratio::new(down, up, 0),
        })
    }

    /// What `cost` tokens come to, or none where a full bucket holds less.
    #[inline]
    pub(crate) fn price(&self, cost: u64) -> Option<Price> {
        let spare = self.burst.checked_sub(cost)? * self.token.get();
        let units = cost * self.token.get();
        Some(Price { units, spare })
    }

    /// The tokens of a price.
    pub(crate) fn tokens(&self, price: &Price) -> u64 {
        price.units / self.token.get()
    }

    /// `R(now)`, for a time of at most [`MAX_NANOS`].
    #[inline]
    pub(crate) fn reached(&self, now: u64) -> Reached<'_> {
        let refill = self.refill.as_ref();
        let floor = refill.map_or(now, |refill| refill.floor(now));
        Reached { refill, now, floor }
    }

    /// The state after a call at this price, or none where it has to wait.
    #[inline]
    pub(crate) fn draw(state: u64, now: Reached<'_>, price: Price) -> Option<u64> {
        if state <= now.floor {
            return Some(now.ceil() + price.units);
        }
        (state - now.floor <= price.spare).then(|| state + price.units)
    }

    /// The shortest time after `now` at which a bucket in this state admits a call at this price.
    #[inline]
    pub(crate) fn wait(&self, state: u64, now: u64, price: Price) -> Duration {
        let due = state.saturating_sub(price.spare);
        match (&self.refill, &self.wait) {
            (None, _) => Duration::from_nanos(due.saturating_sub(now)),
            (_, Some(wait)) => {
                let nanos = wait.floor(due);
                let nanos = nanos + u64::from(!wait.is_exact(due, nanos));
                Duration::from_nanos(nanos.saturating_sub(now))
            }
            (Some(refill), None) => refill.long_wait(due, now),
        }
    }

    /// The state after so many tokens more, however long that takes.
    pub(crate) fn after(&self, state: u64, now: Reached<'_>, tokens: u64) -> u64 {
        if tokens == 0 {
            return state;
        }
        let start = if state <= now.floor {
            now.ceil()
        } else {
            state
        };
        let units = tokens.saturating_mul(self.token.get());
        start.saturating_add(units).min(MAX_STATE)
    }

    /// The state of a bucket that is empty at this time.
    pub(crate) fn empty(&self, at: u64) -> u64 {
        self.after(0, self.reached(at), self.burst)
    }

    /// The state of a bucket that is full at this time, and was not before.
    #[cfg_attr(
        not(all(feature = "redis", not(loom))),
        expect(dead_code, reason = "for what another store tells")
    )]
    pub(crate) fn full(&self, at: u64) -> u64 {
        self.reached(at).ceil()
    }

    /// How full a bucket is that is short of so many units.
    #[inline]
    pub(crate) fn fill(&self, missing: u64) -> Fill {
        Fill {
            burst: self.burst,
            token: self.token,
            missing,
        }
    }

    /// The state in this bucket that holds what `state` does in `old`: the same tokens, as far as they
    /// fit, and rounded against the caller.
    pub(crate) fn carry(&self, state: u64, old: &Self, now: u64) -> u64 {
        let missing = old.reached(now).missing(state);
        let (whole, rest) = (missing / old.token, missing % old.token);
        // A larger burst is missing from the start.
        let whole = i128::from(whole) + i128::from(self.burst) - i128::from(old.burst);
        let [token, rest, of] = [self.token.get(), rest, old.token.get()].map(i128::from);
        let rest = rest * token;
        let missing = whole * token + rest / of + i128::from(rest % of > 0);
        let state = i128::from(self.reached(now).ceil()) + missing.max(0);
        u64::try_from(state).unwrap_or(MAX_STATE).min(MAX_STATE)
    }
}

/// How full a bucket is.
#[derive(Clone, Copy)]
pub(crate) struct Fill {
    burst: u64,
    token: NonZeroU64,
    missing: u64,
}

impl Fill {
    /// Of a bucket that nobody could look at.
    pub(crate) const NOTHING: Self = Self {
        burst: 0,
        token: NonZeroU64::MIN,
        missing: 0,
    };

    /// Of a bucket that holds so many whole tokens.
    #[cfg_attr(
        not(all(feature = "redis", not(loom))),
        expect(dead_code, reason = "for what another store tells")
    )]
    pub(crate) const fn of(tokens: u64) -> Self {
        Self {
            burst: tokens,
            ..Self::NOTHING
        }
    }

    /// The whole tokens in it.
    #[inline]
    pub(crate) fn tokens(self) -> u64 {
        self.burst
            .saturating_sub(self.missing.div_ceil(self.token.get()))
    }

    /// The one of two that holds less.
    #[inline]
    pub(crate) fn tighter(self, other: Option<Self>) -> Self {
        let level = |fill: Self, of: Self| {
            let units = (fill.burst * fill.token.get()).saturating_sub(fill.missing);
            u128::from(units) * u128::from(of.token.get())
        };
        match other {
            Some(other) if level(other, self) <= level(self, other) => other,
            _ => self,
        }
    }
}

/// The largest denominator of a [`Ratio`].
const LARGEST: u64 = 1 << 63;

/// `up / down` with a denominator of at most [`LARGEST`]: where it has none, less than 1 / `LARGEST` lower.
fn rounded_down(up: u128, down: u128) -> (u128, u128) {
    if down <= u128::from(LARGEST) {
        return (up, down);
    }
    let (mut quotient, mut rest) = (up / down, up % down);
    for _ in 0..LARGEST.ilog2() {
        rest *= 2;
        quotient = quotient * 2 + rest / down;
        rest %= down;
    }
    (quotient, u128::from(LARGEST))
}

/// Multiplication by a fraction `numerator / denominator`, exactly and without a division.
///
/// A reciprocal that is rounded up gives the answer or 1 more, and just the answer for numbers that
/// are not huge (T. Granlund, P. L. Montgomery, "Division by invariant integers using
/// multiplication", 1994). So nothing has to wait for the remainder, which settles the others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ratio {
    numerator: u64,
    denominator: u64,
    /// The fraction x 2^(64 - `shift`), rounded up.
    factor: u64,
    /// The largest number for which that does not matter.
    sure: u64,
    shift: u32,
}

impl Ratio {
    /// A fraction below 2^`shift`, for numbers below 2^(64 - `shift`).
    ///
    /// None where it is too large, or so fine that remainders would not fit 64 bits.
    fn new(numerator: u64, denominator: u64, shift: u32) -> Option<Self> {
        if denominator > LARGEST {
            return None;
        }
        let one = 1_u128 << (64 - shift);
        let (up, down) = (u128::from(numerator), u128::from(denominator));
        let factor = (up * one).div_ceil(down);
        // A product is too large by number x excess / (one x denominator): by less than
        // 1 / denominator, it stays below the next integer, and always it is by less than 1.
        let excess = factor * down - up * one;
        let sure = (one - 1).checked_div(excess).unwrap_or(one - 1);
        Some(Self {
            numerator,
            denominator,
            factor: u64::try_from(factor).ok()?,
            sure: u64::try_from(sure).ok()?,
            shift,
        })
    }

    /// `number x fraction` rounded down.
    #[inline]
    fn floor(&self, number: u64) -> u64 {
        let product = u128::from(number << self.shift) * u128::from(self.factor);
        let quotient = (product >> 64) as u64;
        if number <= self.sure {
            return quotient;
        }
        self.corrected(number, quotient)
    }

    /// Whether the quotient of a number is all of `number x fraction`.
    #[inline]
    fn is_exact(&self, number: u64, quotient: u64) -> bool {
        self.rest(number, quotient) == 0
    }

    /// The quotient, from one that may be 1 too high.
    #[cold]
    fn corrected(&self, number: u64, quotient: u64) -> u64 {
        // What is below zero wraps to 2^63 or more.
        quotient - u64::from(self.rest(number, quotient) >= self.denominator)
    }

    /// `number x fraction - quotient`, in parts of the denominator.
    #[inline]
    fn rest(&self, number: u64, quotient: u64) -> u64 {
        let product = number.wrapping_mul(self.numerator);
        product.wrapping_sub(quotient.wrapping_mul(self.denominator))
    }

    /// [`Bucket::wait`] by division, for buckets that take centuries to fill.
    #[cold]
    fn long_wait(&self, due: u64, now: u64) -> Duration {
        const SECOND: u128 = 1_000_000_000;
        let numbers = [due, self.numerator, self.denominator, now];
        let [due, up, down, now] = numbers.map(u128::from);
        let nanos = (due * down).div_ceil(up).saturating_sub(now);
        let seconds = u64::try_from(nanos / SECOND).unwrap_or(u64::MAX);
        Duration::new(seconds, u32::try_from(nanos % SECOND).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use num_bigint::BigInt;
    use num_rational::BigRational;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn a_ratio_is_exact_up_to_the_largest_numbers(
            number in prop_oneof![any::<u64>(), u64::MAX - 3..],
            denominator in prop_oneof![1..1000_u64, 1..=LARGEST, LARGEST - 3..=LARGEST],
            numerator in prop_oneof![any::<u64>(), 0..4_u64],
        ) {
            // Below 2 for half the numbers, below 1 for all of them.
            for (numerator, number, shift) in [
                (u128::from(numerator) % (2 * u128::from(denominator)), number >> 1, 1),
                (u128::from(numerator % denominator), number, 0),
            ] {
                let ratio = Ratio::new(u64::try_from(numerator)?, denominator, shift).unwrap();
                let product = numerator * u128::from(number);
                let exact = product % u128::from(denominator) == 0;
                let quotient = u64::try_from(product / u128::from(denominator))?;
                prop_assert_eq!(ratio.floor(number), quotient);
                prop_assert_eq!(ratio.is_exact(number, quotient), exact);
            }
        }
    }

    /// Buckets of all kinds: units of a nanosecond's refill or much more, whole and not.
    fn buckets() -> impl Strategy<Value = Bucket> {
        let rate = prop::sample::select(vec![
            "1/s",
            "3/s",
            "7/h",
            "59999/min",
            "1/day",
            "0.0123456789012345678/s",
            "1000000000/s",
        ]);
        (rate, prop_oneof![1..10_u64, 1..=crate::MAX_BURST]).prop_map(|(rate, burst)| {
            let limit: Limit = rate.parse().unwrap();
            Bucket::new(&limit.burst(burst)).unwrap()
        })
    }

    /// What a state holds, in tokens.
    fn level(bucket: &Bucket, state: u64, now: u64) -> BigRational {
        let (up, down) = match &bucket.refill {
            Some(refill) => (refill.numerator, refill.denominator),
            None => (1, 1),
        };
        let reached = BigRational::new(BigInt::from(up) * now, down.into());
        let missing = BigRational::from_integer(state.into()) - reached;
        let missing = missing.max(BigRational::from_integer(0.into()));
        BigRational::from_integer(bucket.burst.into()) - missing / BigInt::from(bucket.token.get())
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn a_level_is_carried_as_far_as_it_fits_and_rounded_down_by_less_than_three_units(
            old in buckets(),
            new in buckets(),
            now in (any::<u64>(), 1..64_u32).prop_map(|(now, shift)| now >> shift),
            missing in any::<u64>(),
        ) {
            let missing = missing % (old.burst * old.token.get() + 1);
            let state = old.reached(now).floor() + missing;
            let carried = new.carry(state, &old, now);
            let due = level(&old, state, now).min(BigRational::from_integer(new.burst.into()));
            let got = level(&new, carried, now);
            prop_assert!(got <= due, "{} from {}", got, due);
            let unit = |bucket: &Bucket| BigRational::new(1.into(), bucket.token.get().into());
            let least = &due - unit(&old) - unit(&new) * BigInt::from(2);
            prop_assert!(got > least, "{} from {}", got, due);
        }

        #[test]
        fn a_level_that_is_carried_to_and_fro_never_grows(
            one in buckets(),
            other in buckets(),
            now in (any::<u64>(), 1..64_u32).prop_map(|(now, shift)| now >> shift),
            missing in any::<u64>(),
        ) {
            let mut state = one.reached(now).floor() + missing % (one.burst * one.token.get() + 1);
            let mut before = level(&one, state, now);
            for _ in 0..10 {
                state = one.carry(other.carry(state, &one, now), &other, now);
                let after = level(&one, state, now);
                prop_assert!(after <= before, "{} from {}", after, before);
                before = after;
            }
        }
    }

    #[test]
    fn round_times_are_exact() {
        // The shortest round time in nanoseconds, for rates that people ask for.
        for (rate, burst, grain) in [
            ("1/s", 1, 1),
            ("2/s", 2, 1),
            ("10/s", 10, 1),
            ("300/min", 20, 1),
            ("100/min", 100, 1),
            ("0.1/s", 1, 1),
            ("1/day", 1, 1),
            ("1000/day", 100, 1),
            ("1000000000/s", crate::MAX_BURST, 1),
            ("3/s", 1, 10),
            ("7/s", 7, 10),
            ("1.5/s", 3, 10),
            ("59999/min", 1, 100_000),
            ("7/h", 7, 10),
            ("1234.5/s", 100, 10_000),
        ] {
            let limit: Limit = rate.parse().unwrap();
            let bucket = Bucket::new(&limit.burst(burst)).unwrap();
            let exact = |now| {
                let reached = bucket.reached(now);
                reached.floor == reached.ceil()
            };
            for step in [0, 1, 2, 3, 999_999_937, MAX_NANOS / grain] {
                assert!(exact(step * grain), "{rate} at {step} x {grain} ns");
            }
            assert!(grain == 1 || !exact(grain / 10), "{rate} in {grain} ns");
        }
    }

    #[test]
    fn a_rate_too_fine_for_64_bits_is_rounded_down_by_less_than_a_unit_in_all_time() {
        let limit: Limit = "0.0123456789012345678/s".parse().unwrap();
        let bucket = Bucket::new(&limit.burst(crate::MAX_BURST)).unwrap();
        assert_eq!(bucket.refill.as_ref().unwrap().denominator, LARGEST);
        // 0.0123456789012345678 x (2^63 - 1) ns, in units of which a token has so many.
        let exact = BigInt::from(MAX_NANOS) * 123_456_789_012_345_678_u64 * bucket.token.get();
        let exact = exact / BigInt::from(10).pow(28);
        let reached = BigInt::from(bucket.reached(MAX_NANOS).floor);
        assert!((&exact - 1..=exact).contains(&reached), "{reached}");
    }
}
