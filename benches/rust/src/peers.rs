//! Each crate's bucket, set up and called as its documentation says.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder};
use governor::clock::{Clock, DefaultClock, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use leaky_bucket::RateLimiter as LeakyBucket;
use ratelimit::{Ratelimiter, TryWaitError};

use crate::measure::Case;
use crate::mutex::MutexBucket;

pub(crate) type Governor<C> =
    RateLimiter<NotKeyed, InMemoryState, C, NoOpMiddleware<<C as Clock>::Instant>>;

/// The names that a limiter of many tools knows.
const TOOLS: [&str; 16] = [
    "lookup_customer",
    "search_documents",
    "send_email",
    "create_ticket",
    "update_ticket",
    "close_ticket",
    "read_file",
    "write_file",
    "list_directory",
    "run_query",
    "fetch_url",
    "web_search",
    "get_weather",
    "book_meeting",
    "cancel_meeting",
    "translate_text",
];

/// Names that it does not know.
const OTHERS: [&str; 16] = [
    "lookup_supplier",
    "search_messages",
    "send_text",
    "create_invoice",
    "update_invoice",
    "close_invoice",
    "read_row",
    "write_row",
    "list_tables",
    "run_script",
    "fetch_page",
    "code_search",
    "get_forecast",
    "book_flight",
    "cancel_flight",
    "translate_page",
];

/// So many tokens per unit of time: "s", "min" or "h".
#[derive(Clone, Copy)]
pub(crate) struct Rate {
    pub(crate) tokens: u32,
    unit: &'static str,
}

impl Rate {
    pub(crate) const fn new(tokens: u32, unit: &'static str) -> Self {
        Self { tokens, unit }
    }

    pub(crate) fn period(self) -> Duration {
        Duration::from_secs(match self.unit {
            "s" => 1,
            "min" => 60,
            _ => 3_600,
        })
    }

    pub(crate) fn limit(self, burst: u32) -> Limit {
        let limit: Limit = self.to_string().parse().expect("a good rate");
        limit.burst(burst.into())
    }

    pub(crate) fn quota(self, burst: u32) -> Quota {
        let [tokens, burst] =
            [self.tokens, burst].map(|number| number.try_into().expect("not zero"));
        let quota: fn(NonZeroU32) -> Quota = match self.unit {
            "s" => Quota::per_second,
            "min" => Quota::per_minute,
            _ => Quota::per_hour,
        };
        quota(tokens).allow_burst(burst)
    }

    pub(crate) fn mutex(self, burst: u32) -> MutexBucket {
        let rate = f64::from(self.tokens) / self.period().as_secs_f64();
        MutexBucket::new(rate, burst.into())
    }

    fn ratelimit(self, burst: u32) -> Ratelimiter {
        Ratelimiter::builder(self.tokens.into())
            .period(self.period())
            .max_tokens(burst.into())
            .initial_available(burst.into())
            .build()
            .expect("a good limit")
    }

    fn leaky_bucket(self, burst: u32, fair: bool) -> LeakyBucket {
        // Tokens come once per interval, of a millisecond at least.
        let parts = if self.tokens.is_multiple_of(1_000) {
            1_000
        } else {
            1
        };
        LeakyBucket::builder()
            .refill((self.tokens / parts) as usize)
            .interval(self.period() / parts)
            .max(burst as usize)
            .initial(burst as usize)
            .fair(fair)
            .build()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tokens, self.unit)
    }
}

/// A row of a table: what is asked, and calls of it.
pub(crate) type Row = (&'static str, Case);

pub(crate) const TOOL: &str = "**callgate**";
pub(crate) const NAME: &str = "**callgate**, by name among 16";
const GLOB: &str = "**callgate**, by a name that a pattern has";
const DEFAULT: &str = "**callgate**, by a name that only the default has";
const OTHER_NAME: &str = "**callgate**, by a name without a limit";
const GOVERNOR: &str = "governor, the same clock";
const GOVERNOR_QUANTA: &str = "governor, its own clock (quanta)";
const GOVERNOR_DUE: &str = "governor, the same clock, `earliest_possible`";
const GOVERNOR_NAME: &str = "governor, the same clock, by name: 16 in a `HashMap`";
const RATELIMIT: &str = "ratelimit";
const LEAKY: &str = "leaky-bucket";
pub(crate) const UNFAIR: &str = "leaky-bucket, `fair(false)`";
const MUTEX: &str = "a bucket of floats in a `Mutex`";

/// What everything is compared with: the monotonic clock, in nanoseconds.
pub(crate) fn clock() -> Row {
    let clock = |start: &Instant, _| nanos(start.elapsed());
    ("the clock alone", Case::new(Instant::now(), clock))
}

/// governor's own clock: on x86 the processor's counter, which nobody keeps in step.
fn own_clock() -> Row {
    let clock = |clock: &DefaultClock, _| clock.now();
    (
        "governor's own clock alone (quanta)",
        Case::new(DefaultClock::default(), clock),
    )
}

/// One bucket of each crate, where there are tokens for every call.
pub(crate) fn admitting(rate: Rate, burst: u32) -> Vec<Row> {
    let monotonic = Governor::direct_with_clock(rate.quota(burst), MonotonicClock);
    let quanta = RateLimiter::direct(rate.quota(burst));
    vec![
        clock(),
        own_clock(),
        (TOOL, one_tool(rate, burst)),
        (
            GOVERNOR,
            Case::new(monotonic, |limiter, _| limiter.check().is_ok()),
        ),
        (
            GOVERNOR_QUANTA,
            Case::new(quanta, |limiter, _| limiter.check().is_ok()),
        ),
        (
            RATELIMIT,
            Case::new(rate.ratelimit(burst), |limiter, _| {
                limiter.try_wait().is_ok()
            }),
        ),
        (
            LEAKY,
            Case::new(rate.leaky_bucket(burst, true), |limiter, _| {
                limiter.try_acquire(1)
            }),
        ),
        (
            UNFAIR,
            Case::new(rate.leaky_bucket(burst, false), |limiter, _| {
                limiter.try_acquire(1)
            }),
        ),
        (
            MUTEX,
            Case::new(rate.mutex(burst), |bucket, _| bucket.try_acquire().is_ok()),
        ),
    ]
}

/// One bucket of each crate, where there are no tokens, and the time to wait is asked for.
pub(crate) fn refusing(rate: Rate) -> Vec<Row> {
    let monotonic = || Governor::direct_with_clock(rate.quota(1), MonotonicClock);
    let quanta = RateLimiter::direct(rate.quota(1));
    let rows = vec![
        clock(),
        own_clock(),
        (
            TOOL,
            Case::new(limiter(&[TOOLS[0]], rate, 1).tool(TOOLS[0]), |tool, _| {
                wait(&tool.try_acquire())
            }),
        ),
        (
            GOVERNOR,
            Case::new(monotonic(), |limiter, _| governor_wait(limiter)),
        ),
        (
            GOVERNOR_DUE,
            Case::new(monotonic(), |limiter, _| {
                Some(limiter.check().err()?.earliest_possible())
            }),
        ),
        (
            GOVERNOR_QUANTA,
            Case::new(quanta, |limiter, _| governor_wait(limiter)),
        ),
        (
            RATELIMIT,
            Case::new(rate.ratelimit(1), |limiter, _| ratelimit_wait(limiter)),
        ),
        (
            LEAKY,
            Case::new(rate.leaky_bucket(1, true), |limiter, _| {
                !limiter.try_acquire(1)
            }),
        ),
        (
            UNFAIR,
            Case::new(rate.leaky_bucket(1, false), |limiter, _| {
                !limiter.try_acquire(1)
            }),
        ),
        (
            MUTEX,
            Case::new(rate.mutex(1), |bucket, _| bucket.try_acquire().err()),
        ),
    ];
    for (_, case) in &rows {
        case.holds(); // takes the one token there is
    }
    rows
}

/// Limiters of 16 tools, asked for each in turn by its name; all is admitted.
pub(crate) fn by_name(rate: Rate, burst: u32) -> Vec<Row> {
    let governor = || Governor::direct_with_clock(rate.quota(burst), MonotonicClock);
    let governors: HashMap<_, _> = TOOLS.map(|name| (name.to_owned(), governor())).into();
    vec![
        clock(),
        (TOOL, one_tool(rate, burst)),
        (
            NAME,
            Case::new(limiter(&TOOLS, rate, burst), |limiter, number| {
                limiter
                    .try_acquire(&Call::new(pick(&TOOLS, number)))
                    .is_admitted()
            }),
        ),
        (GLOB, others(builder(&["*_*"], rate, burst))),
        (
            DEFAULT,
            others(builder(&TOOLS, rate, burst).default_limit(rate.limit(burst))),
        ),
        (OTHER_NAME, others(builder(&TOOLS, rate, burst))),
        (
            GOVERNOR_NAME,
            Case::new(governors, |governors, number| {
                governors
                    .get(pick(&TOOLS, number))
                    .is_none_or(|governor| governor.check().is_ok())
            }),
        ),
    ]
}

fn one_tool(rate: Rate, burst: u32) -> Case {
    let tool = limiter(&[TOOLS[0]], rate, burst).tool(TOOLS[0]);
    Case::new(tool, |tool, _| tool.try_acquire().is_admitted())
}

/// Calls of names that are not among its limits'.
fn others(builder: LimiterBuilder) -> Case {
    let limiter = builder.build().expect("good limits");
    Case::new(limiter, |limiter, number| {
        limiter
            .try_acquire(&Call::new(pick(&OTHERS, number)))
            .is_admitted()
    })
}

fn limiter(tools: &[&str], rate: Rate, burst: u32) -> &'static Limiter {
    let limiter = builder(tools, rate, burst).build();
    Box::leak(Box::new(limiter.expect("good limits")))
}

fn builder(tools: &[&str], rate: Rate, burst: u32) -> LimiterBuilder {
    tools.iter().fold(Limiter::builder(), |builder, &tool| {
        builder.limit(tool, rate.limit(burst))
    })
}

fn pick(names: &[&'static str; 16], number: u32) -> &'static str {
    names[number as usize % names.len()]
}

#[inline]
pub(crate) fn wait(decision: &Decision<'_>) -> Option<Duration> {
    match decision {
        Decision::Admitted(_) => None,
        Decision::Rejected(rejection) => rejection.retry_after,
    }
}

/// As in governor's documentation: the clock is read again.
#[inline]
pub(crate) fn governor_wait<C: Clock>(limiter: &Governor<C>) -> Option<Duration> {
    Some(limiter.check().err()?.wait_time_from(limiter.clock().now()))
}

#[inline]
pub(crate) fn ratelimit_wait<C: ratelimit::Clock>(limiter: &Ratelimiter<C>) -> Option<Duration> {
    match limiter.try_wait() {
        Err(TryWaitError::Insufficient(wait)) => Some(wait),
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "as callgate does")]
#[inline]
pub(crate) fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}
