//! The smallest burst and the smallest rate under which a limit rejects no call of a trace.
//!
//! Each limit is fitted by itself, to all calls of its tools. A burst or a rate is tried by running the calls
//! under it; several are tried at once, and what is told in the end was tried, and so was the next smaller.

use std::sync::Arc;

use callgate::{Limit, Limiter, MAX_BURST, Rate, Unit};
use serde::Serialize;

use super::overview::Tool;
use super::run::{Event, Run, What};
use super::trace::{Arrival, Tools, Trace};
use super::with;

/// So many are tried at once of each that is looked for.
const AT_ONCE: u64 = 7;

/// Rates have three digits: from 100 to 999, and a power of ten from this one on.
const DIGITS: u64 = 900;
const LEAST_POWER: i64 = -10;
const POWERS: u64 = 22;

/// What is enough for a limit, to reject nothing; null where nothing is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Fit {
    /// At the rate that the limit has.
    pub(crate) burst: Option<u64>,
    /// At the burst that it has.
    pub(crate) rate: Option<String>,
}

/// Fits all limits; none for one whose tools are not called.
pub(crate) fn fit(
    trace: &mut Trace,
    limits: &[(String, Limit)],
    tools: &[Tool],
    fields: &Arc<[String]>,
) -> Result<Vec<Option<Fit>>, String> {
    let mut searches = Vec::new();
    for (place, (name, limit)) in limits.iter().enumerate() {
        if tools.iter().any(|tool| tool.limits.contains(&place)) {
            searches.push(Search::new(place, name, limit, Knob::Burst));
            searches.push(Search::new(place, name, limit, Knob::rate_of(limit)));
        }
    }
    while searches.iter().any(|search| !search.next().is_empty()) {
        let start = || Trial::new(&searches, fields);
        let visit = |trial: &mut Trial, names: &Tools, arrival: &Arrival<'_>| {
            trial.arrive(names, &tools[arrival.tool].limits, arrival);
        };
        let tried = trace.pass(start, visit)?.finish();
        for (search, tried) in searches.iter_mut().zip(tried) {
            search.learn(&tried);
        }
    }
    let mut fits = vec![None; limits.len()];
    for search in &searches {
        let fit = fits[search.place].get_or_insert_with(Fit::default);
        match search.knob {
            Knob::Burst => fit.burst = search.enough,
            Knob::Rate(unit) => fit.rate = search.enough.map(|value| rate(value, unit)),
        }
    }
    Ok(fits)
}

/// What is changed of a limit.
#[derive(Clone, Copy, Debug)]
enum Knob {
    Burst,
    /// In tokens per such a unit. Its values are the places of rates in the order of their size.
    Rate(Unit),
}

impl Knob {
    /// In the unit that the limit's rate is shown in.
    fn rate_of(limit: &Limit) -> Self {
        let shown = limit
            .rate()
            .map(|rate| rate.to_string())
            .unwrap_or_default();
        let unit = shown.rsplit('/').next().and_then(|unit| unit.parse().ok());
        let unit = limit.as_quota().map(|(_, unit)| unit).or(unit);
        Self::Rate(unit.unwrap_or(Unit::Second))
    }

    /// The limit with this value, if it is in range.
    fn turned(self, limit: &Limit, value: u64) -> Option<Limit> {
        let (rate, burst) = match self {
            Self::Burst => (limit.rate().ok()?.to_string(), value),
            Self::Rate(unit) => (rate(value, unit), limit.capacity()),
        };
        let turned: Limit = rate.parse().ok()?;
        let turned = turned
            .burst(burst)
            .cost(limit.default_cost())
            .per(limit.split_by())
            .max_wait(limit.longest_wait());
        let turned = match limit.most_concurrent() {
            Some(calls) => turned.max_concurrent(calls),
            None => turned,
        };
        let turned = match limit.shared_by() {
            Some(tools) => turned.tools(tools),
            None => turned,
        };
        turned.check().is_ok().then_some(turned)
    }
}

/// The rate at this place, such as `12.5/s`.
fn rate(place: u64, unit: Unit) -> String {
    let digits = (100 + place % DIGITS).to_string();
    let zeros = i64::try_from(place / DIGITS).unwrap_or(0) + LEAST_POWER;
    let count = if let Ok(zeros) = usize::try_from(zeros) {
        digits + &"0".repeat(zeros)
    } else {
        let places = usize::try_from(-zeros).unwrap_or(0);
        let padded = format!("{digits:0>width$}", width = places + 1);
        let (whole, fraction) = padded.split_at(padded.len() - places);
        let text = format!("{whole}.{fraction}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    format!("{count}/{}", unit.symbol())
}

/// The search for the smallest value that is enough.
#[derive(Debug)]
struct Search {
    /// The limit's.
    place: usize,
    name: String,
    limit: Limit,
    knob: Knob,
    /// The next value is allowed.
    too_small: u64,
    enough: Option<u64>,
    /// The largest that is allowed.
    most: u64,
    /// What the largest told about the smallest.
    guess: Option<u64>,
    has_begun: bool,
}

/// What came of a value.
#[derive(Clone, Copy, Debug)]
struct Tried {
    value: u64,
    is_enough: bool,
    /// The most tokens that any bucket was short of being full.
    missing: u64,
}

impl Search {
    fn new(place: usize, name: &str, limit: &Limit, knob: Knob) -> Self {
        let (least, most) = match knob {
            Knob::Burst => (limit.default_cost(), MAX_BURST),
            Knob::Rate(_) => {
                let mut all = 0..POWERS * DIGITS;
                let is_allowed = |&value: &u64| knob.turned(limit, value).is_some();
                let least = all.find(is_allowed).unwrap_or(0);
                (least, all.rfind(is_allowed).unwrap_or(least))
            }
        };
        Self {
            place,
            name: name.to_owned(),
            limit: limit.clone(),
            knob,
            too_small: least.saturating_sub(1),
            enough: None,
            most,
            guess: None,
            has_begun: false,
        }
    }

    /// The values to be tried next, in order.
    fn next(&self) -> Vec<u64> {
        let (low, high) = match self.enough {
            Some(enough) => (self.too_small, enough),
            // Not even the largest.
            None if self.has_begun => return Vec::new(),
            None if matches!(self.knob, Knob::Burst) => return vec![self.most],
            None => (self.too_small, self.most + 1),
        };
        let mut values: Vec<u64> = match self.guess {
            Some(guess) => (guess.saturating_sub(2)..=guess + 1).collect(),
            None => (1..=AT_ONCE)
                .map(|part| low + (high - low) * part / (AT_ONCE + 1))
                .collect(),
        };
        values.extend((!self.has_begun).then_some(self.most));
        values.retain(|&value| low < value && value < high);
        values.dedup();
        values
    }

    /// The smallest that was enough counts, and the largest below it that was not.
    fn learn(&mut self, tried: &[Tried]) {
        self.guess = None;
        for tried in tried {
            if tried.is_enough {
                if !self.has_begun && matches!(self.knob, Knob::Burst) {
                    self.guess = Some(self.least_burst(tried.missing));
                }
                self.enough = Some(tried.value);
                break;
            }
            self.too_small = tried.value;
        }
        self.has_begun = true;
    }

    /// The burst for buckets that are short of so much, some of which comes in while calls wait.
    ///
    /// A guess: floats will do.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a guess"
    )]
    fn least_burst(&self, missing: u64) -> u64 {
        let rate = self.limit.rate().map_or(0.0, Rate::per_second);
        let waited = (rate * self.limit.longest_wait().as_secs_f64()) as u64;
        missing.saturating_sub(waited)
    }
}

/// One pass over the calls, under all limits that are tried.
struct Trial(Vec<Vec<Candidate>>);

struct Candidate {
    place: usize,
    may_wait: bool,
    run: Run,
    tried: Tried,
}

impl Trial {
    fn new(searches: &[Search], fields: &Arc<[String]>) -> Result<Self, String> {
        let candidates = searches.iter().map(|search| {
            let values = search.next().into_iter();
            let candidates = values.map(|value| Candidate::new(search, value, fields));
            candidates.collect()
        });
        candidates.collect::<Result<_, _>>().map(Self)
    }

    fn arrive(&mut self, tools: &Tools, limits: &[usize], arrival: &Arrival<'_>) {
        let name = &tools.names()[arrival.tool];
        for candidate in self.0.iter_mut().flatten() {
            // What has rejected a call need not go on.
            if candidate.tried.is_enough && limits.contains(&candidate.place) {
                let tried = &mut candidate.tried;
                let said = &mut |event| tried.hear(event);
                candidate
                    .run
                    .arrive(arrival, name, candidate.may_wait, said);
            }
        }
    }

    fn finish(self) -> Vec<Vec<Tried>> {
        let finished = |mut candidate: Candidate| {
            candidate
                .run
                .finish(&mut |event| candidate.tried.hear(event));
            candidate.tried
        };
        let searches = self.0.into_iter();
        searches
            .map(|candidates| candidates.into_iter().map(finished).collect())
            .collect()
    }
}

impl Candidate {
    fn new(search: &Search, value: u64, fields: &Arc<[String]>) -> Result<Self, String> {
        let limit = search.knob.turned(&search.limit, value);
        let limit = limit.unwrap_or_else(|| search.limit.clone());
        let may_wait = !limit.longest_wait().is_zero();
        let limiter = with(Limiter::builder(), &search.name, limit).build();
        let limiter = limiter.map_err(|error| error.to_string())?;
        Ok(Self {
            place: search.place,
            may_wait,
            run: Run::new(limiter, Arc::clone(fields)),
            tried: Tried {
                value,
                is_enough: true,
                missing: 0,
            },
        })
    }
}

impl Tried {
    fn hear(&mut self, event: Event) {
        match event.what {
            What::Rejected { .. } => self.is_enough = false,
            What::Admitted { remaining, .. } => {
                // Only the largest burst is asked for this.
                let missing = remaining.map_or(0, |remaining| MAX_BURST.saturating_sub(remaining));
                self.missing = self.missing.max(missing);
            }
            What::Came | What::Ended => {}
        }
    }
}
