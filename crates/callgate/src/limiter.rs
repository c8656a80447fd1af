//! The limiter: calls in, decisions out.

#![expect(
    clippy::inline_always,
    reason = "a caller who asks a decision for one word need not have all of it in memory"
)]

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;

use crate::bucket::{Bucket, Fill, Price, Reached};
use crate::clock::{Clock, nanos};
use crate::current::{Current, InForce};
use crate::decision::{
    Call, Decision, Level, Names, Number, Permit, Reason, Rejection, Remaining, Rest,
};
use crate::names::same;
use crate::rules::{Config, Limited, Plain, Route, Rules, Secret};
use crate::store::memory::{Moved, draw_each};
use crate::store::redis::{self, Peeking, StoreMeter};
use crate::store::{Buckets, Draw, Kind, Store, Url, Verdict, draw_all};
use crate::trace::{Trace, Traced};
use crate::waiting::Wakes;
use crate::{ConfigError, Limit, OnStoreError};

/// Decides whether a call may run now.
///
/// Shared by reference or in an `Arc`: any number of threads may ask at once. A call under one limit is
/// decided without a lock, one under several or under a limit that fields split holds locks for less
/// than a microsecond.
///
/// ```
/// use callgate::{Call, Decision, Limit, Limiter};
///
/// let limiter = Limiter::builder()
///     .limit("lookup_customer", Limit::per_second(2).burst(2))
///     .limit("crm_*", Limit::per_minute(300).burst(20).per(["tenant"]))
///     .build()?;
///
/// match limiter.try_acquire(&Call::new("crm_search").field("tenant", "acme")) {
///     Decision::Admitted(_permit) => println!("call the tool"),
///     Decision::Rejected(rejection) => println!("retry in {:?}", rejection.retry_after),
/// }
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Limiter {
    pub(crate) clock: Clock,
    pub(crate) current: Current,
    names: Numbered,
    pub(crate) store: Store,
    store_url: Option<String>,
    pub(crate) secret: Secret,
    /// How many calls came to wait.
    pub(crate) arrivals: AtomicU64,
    pub(crate) trace: Option<Trace>,
}

/// A decision in a place of its own: with one place for both ways, the short one goes through memory too.
struct Apart<'a>(Decision<'a>);

/// The names of all limits and tools so far, each with a number for as long as the limiter lives.
#[derive(Debug, Default)]
struct Numbered {
    names: Names,
    numbers: Mutex<HashMap<Box<str>, Number>>,
}

impl Numbered {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "no memory holds 2^32 names"
    )]
    fn number(&self, name: &str) -> Number {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&number) = numbers.get(name) {
            return number;
        }
        let number = self.names.push(name.into()) as Number;
        numbers.insert(name.into(), number);
        number
    }
}

impl Limiter {
    /// Starts a limiter without limits, on the operating system's monotonic clock.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder {
            config: Config::default(),
            clock: None,
            trace: None,
            store: None,
            kept_apart: None,
            unset: None,
        }
    }

    /// Decides now; never waits for tokens. A tool without a limit is admitted.
    ///
    /// All limits that hold for the tool must admit the call: then it is charged to all of them, else to
    /// none.
    ///
    /// With a store over a network this waits for its answer, up to the store's deadline, unless it is known already that the
    /// store would refuse: not for threads on which others' tasks run, for which there is
    /// [`acquire`](Self::acquire).
    #[inline(always)]
    pub fn try_acquire(&self, call: &Call<'_>) -> Decision<'_> {
        self.decide(call, || self.clock.now())
    }

    /// The same at a time of the caller's: `elapsed` since the limiter was made, at most 2^63 - 1 ns.
    ///
    /// For simulated time. Nothing is taken back when `elapsed` is less than before. A store over a network decides by
    /// its own clock.
    #[inline]
    pub fn try_acquire_at(&self, call: &Call<'_>, elapsed: Duration) -> Decision<'_> {
        self.decide(call, || nanos(elapsed))
    }

    /// Looks a tool up once, for callers that ask for it many times.
    #[must_use]
    pub fn tool<'a>(&'a self, name: &'a str) -> Tool<'a> {
        let rules = self.current.get();
        Tool {
            limiter: self,
            name,
            route: rules.route(name),
            rules,
        }
    }

    /// Puts other limits in force: at once, and for every call from then on.
    ///
    /// A limit that has the same name as one before keeps its level in tokens, for each key; a lower
    /// burst cuts it, a higher one adds nothing. So the bound holds across the change, with the larger
    /// burst and the larger rate. Where other fields split the limit than before, all its new buckets
    /// start as the emptiest of the old. Names are all that tells one limit from another: under a new
    /// name it starts full.
    ///
    /// # Errors
    /// When something is not allowed, as for [`LimiterBuilder::build`], or a clock or trace is given: the limits
    /// before then stay in force, untouched.
    ///
    /// ```
    /// use callgate::{Call, Limit, Limiter};
    ///
    /// let limiter = Limiter::builder().limit("search", Limit::per_hour(1).burst(3)).build()?;
    /// for _ in 0..3 {
    ///     assert!(limiter.try_acquire(&Call::new("search")).is_admitted());
    /// }
    /// limiter.reload(Limiter::builder().limit("search", Limit::per_hour(2).burst(9)))?;
    /// assert!(!limiter.try_acquire(&Call::new("search")).is_admitted()); // as empty as before
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    pub fn reload(&self, limits: LimiterBuilder) -> Result<(), ConfigError> {
        // Reads a clock of the user's here, where nothing is held: `latest` runs none of their code.
        self.clock.now();
        self.put_in_force(limits, &|| self.clock.latest())
    }

    /// [`reload`](Self::reload) at a time of the caller's, as in [`try_acquire_at`](Self::try_acquire_at).
    ///
    /// The bound holds where no call before had a later time.
    ///
    /// # Errors
    /// As for [`reload`](Self::reload).
    pub fn reload_at(&self, limits: LimiterBuilder, elapsed: Duration) -> Result<(), ConfigError> {
        self.put_in_force(limits, &|| nanos(elapsed))
    }

    fn put_in_force(
        &self,
        limits: LimiterBuilder,
        now: &dyn Fn() -> u64,
    ) -> Result<(), ConfigError> {
        let LimiterBuilder {
            mut config,
            clock,
            trace,
            store,
            unset,
            ..
        } = limits;
        if let Some((_, error)) = unset {
            return Err(error);
        }
        if let Some(url) = &store
            && !self.is_of_store(url)
        {
            let given = format!("another one for a reload: '{}'", url.shown);
            return Err(ConfigError::new(
                "store",
                "given when the limiter is made",
                given,
            ));
        }
        for (name, is_given) in [("clock", clock.is_some()), ("trace", trace.is_some())] {
            if is_given {
                let allowed = "given when the limiter is made";
                return Err(ConfigError::new(name, allowed, "one for a reload"));
            }
        }
        config.traced = self.trace.is_some();
        let mut wakes = Wakes::default();
        let old = self.current.hold();
        let rules = config.rules(&self.store, Some(&old), now, |name| self.names.number(name))?;
        old.close(Some(&rules));
        old.disperse(&rules, &mut wakes);
        old.replace(rules);
        // Nobody comes to wait by the old rules any more.
        self.current.get().wake_all(&mut wakes);
        Ok(())
    }

    /// Whether this is the URL of its store.
    fn is_of_store(&self, url: &Url) -> bool {
        match self.store.redis() {
            Some(store) => store.is_at(&url.whole),
            None => self.store_url() == Some(&url.whole),
        }
    }

    /// The names of the limits that hold for a tool of this name.
    #[must_use]
    pub fn limits_of(&self, tool: &str) -> Vec<&str> {
        let rules = self.current.get();
        rules.with_limits(tool, |limits, _| {
            // In the order they were given.
            let all = rules.limits().iter();
            let held = all.filter(|all| limits.iter().any(|one| Arc::ptr_eq(all, one)));
            held.map(|limited| self.name(limited.number)).collect()
        })
    }

    /// Whether any limit holds for a tool of this name.
    #[must_use]
    pub fn is_limited(&self, tool: &str) -> bool {
        let rules = self.current.take();
        let limited = rules.with_limits(tool, |limits, _| !limits.is_empty());
        self.current.keep(rules);
        limited
    }

    /// The fields that split the limits of a tool of this name, each once.
    #[must_use]
    pub fn fields_of(&self, tool: &str) -> Vec<String> {
        let rules = self.current.take();
        let fields = rules.with_limits(tool, |limits, _| {
            let mut fields = Vec::new();
            for field in limits.iter().flat_map(|limited| limited.limit.split_by()) {
                if field != "tool" && !fields.contains(field) {
                    fields.push(field.clone());
                }
            }
            fields
        });
        self.current.keep(rules);
        fields
    }

    /// The limits in the order they were given, the default last, and what their buckets hold.
    ///
    /// Looking changes nothing: no token is spent, no bucket made. A store over a network is asked, and waited for,
    /// as in [`try_acquire`](Self::try_acquire).
    #[must_use]
    pub fn snapshot(&self) -> Vec<Level<'_>> {
        self.snapshot_of(self.look(None))
    }

    /// [`snapshot`](Self::snapshot) at a time of the caller's, as in [`try_acquire_at`](Self::try_acquire_at).
    #[must_use]
    pub fn snapshot_at(&self, elapsed: Duration) -> Vec<Level<'_>> {
        self.levels(nanos(elapsed), self.look(None))
    }

    /// Asks a store over a network what its buckets hold, where there is one, for a
    /// [snapshot](Self::snapshot_of): for front ends that wait in their own way. The answer wakes, on the store's
    /// thread.
    #[must_use]
    pub fn look(&self, waker: Option<Waker>) -> Option<Look> {
        let store = self.store.redis()?;
        let rules = self.current.get();
        let limits = rules.limits().iter().filter(|limited| !limited.is_split());
        let buckets = limits.filter_map(|limited| limited.buckets.redis());
        Some(Look {
            edition: rules.edition,
            told: store.peek(buckets.map(|buckets| &**buckets), waker)?,
        })
    }

    /// [`snapshot`](Self::snapshot), with what a store was asked. Waits for the answer if it is not there.
    #[must_use]
    pub fn snapshot_of(&self, look: Option<Look>) -> Vec<Level<'_>> {
        self.levels(self.clock.now(), look)
    }

    fn levels(&self, now: u64, look: Option<Look>) -> Vec<Level<'_>> {
        loop {
            let rules = self.current.get();
            let limits = rules.limits().iter();
            let levels = limits.map(|limited| self.level(limited, now)).collect();
            match levels {
                Ok(levels) => return told_by_store(&rules, levels, look),
                Err(Moved) => self.current.wait(),
            }
        }
    }

    /// The limits in the order they were given, the default last; asks no store.
    #[must_use]
    pub fn limits(&self) -> Vec<(&str, Limit)> {
        let rules = self.current.get();
        let limits = rules.limits().iter();
        let named = limits.map(|limited| (self.name(limited.number), limited.limit.clone()));
        named.collect()
    }

    fn level(&self, limited: &Limited, now: u64) -> Result<Level<'_>, Moved> {
        let (remaining, kept) = limited.buckets.peek(now)?;
        Ok(Level {
            name: self.name(limited.number),
            limit: limited.limit.clone(),
            remaining: kept.is_none().then_some(remaining),
            buckets: kept.unwrap_or(1),
            paused: limited.buckets.paused_for(now),
        })
    }

    /// The URL of the store that it shares with other processes, if it does: of Redis without user, password and
    /// what comes after `?`.
    #[must_use]
    pub fn store_url(&self) -> Option<&str> {
        self.store_url.as_deref()
    }

    /// What the store was asked, in numbers: where it is one over a network.
    #[must_use]
    pub fn store_meter(&self) -> Option<StoreMeter> {
        self.store.redis().map(redis::Store::meter)
    }

    /// Lets go of a store over a network: what was asked before is answered, in the store's timeout, and then
    /// the thread and the connections end. Whoever waits is woken, and all calls from now on are decided as when
    /// the store fails. With other stores it does nothing.
    ///
    /// A limiter that is dropped does so by itself.
    pub fn close(&self) {
        let Some(store) = self.store.redis() else {
            return;
        };
        store.close();
        let mut wakes = Wakes::default();
        self.current.get().wake_all(&mut wakes);
    }

    /// What becomes of a call when a store over a network fails, for limits that do not say it themselves; none
    /// if that was left open.
    #[must_use]
    pub fn when_store_fails(&self) -> Option<OnStoreError> {
        self.current.get().on_store_error
    }

    /// Whether calls that are refused pass all the same.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        self.current.get().dry_run
    }

    /// The names of all limits and exactly named tools so far, by number, from one number on.
    ///
    /// For front ends that keep something for each name: a name has the same number for as long as
    /// the limiter lives, through every reload.
    pub fn names(&self, from: usize) -> impl Iterator<Item = &str> {
        let names = &self.names.names;
        (from..names.count()).map(|number| &*names[number])
    }

    #[inline]
    pub(crate) fn name(&self, number: Number) -> &str {
        &self.names.names[number as usize]
    }

    /// Decides where there is little to decide: limits that nothing splits, or none. Leaves the rest.
    #[inline(always)]
    pub(crate) fn decide(&self, call: &Call<'_>, now: impl Fn() -> u64) -> Decision<'_> {
        let rules = self.current.take();
        let Some(index) = rules.candidate(call.tool()) else {
            let open = rules.is_open();
            self.current.keep(rules);
            return if open {
                self.decide_apart(call, now).0
            } else {
                Decision::UNRESTRICTED
            };
        };
        let route = rules.route_at(index);
        let plain = route.plain.as_ref().filter(|_| call.given_cost().is_none());
        // The clock first: the names are compared while its answer is on its way.
        let time = now();
        if !same(&route.tool, call.tool()) {
            self.current.keep(rules);
            return self.decide_apart(call, now).0;
        }
        if let Some(plain) = plain
            && let Some(decision) = self.decide_plain(route, plain, time)
        {
            self.current.keep(rules);
            return decision;
        }
        self.decide_routed((rules, index), call, time, now).0
    }

    /// Decides where it takes longer. With its code in between, the decision of [`decide`](Self::decide) would be
    /// written to memory and read again.
    #[inline(never)]
    fn decide_routed(
        &self,
        (rules, index): (InForce<'_>, usize),
        call: &Call<'_>,
        time: u64,
        now: impl Fn() -> u64,
    ) -> Apart<'_> {
        let route = rules.route_at(index);
        let decided = self.decide_by(&rules, &route.limits, Some(route.number), call, time);
        self.current.keep(rules);
        decided.map_or_else(|| self.decide_apart(call, now), Apart)
    }

    /// Begins a call's line, if there is a trace.
    pub(crate) fn traced(&self, call: &Call<'_>) -> Option<Traced> {
        self.trace.as_ref().map(|trace| trace.begin(call))
    }

    /// Decides in any case, and traces it.
    #[inline(never)]
    fn decide_apart(&self, call: &Call<'_>, now: impl Fn() -> u64) -> Apart<'_> {
        let traced = self.traced(call);
        Apart(decided(self.decide_untraced(call, now), traced))
    }

    /// Decides in any case; asks again where it met buckets that had moved.
    pub(crate) fn decide_untraced(&self, call: &Call<'_>, now: impl Fn() -> u64) -> Decision<'_> {
        loop {
            let rules = self.current.take();
            let time = now();
            let decided = rules.with_limits(call.tool(), |limits, tool| {
                if limits.iter().any(|limited| limited.is_held(time)) {
                    self.decide_in_turn(&rules, limits, tool, call, &now)
                } else {
                    self.decide_by(&rules, limits, tool, call, time)
                }
            });
            self.current.keep(rules);
            match decided {
                Some(decision) => return decision,
                None => self.current.wait(),
            }
        }
    }

    /// Decides by limits that nothing splits; not where a bucket has moved, or others
    /// were faster.
    #[inline(always)]
    fn decide_plain(&self, route: &Route, plain: &Plain, now: u64) -> Option<Decision<'_>> {
        let tool = Some(route.number);
        let (buckets, price, number) = match plain {
            Plain::One(buckets, ..) if buckets.is_held() => return None,
            Plain::One(buckets, price, number) => (buckets, *price, *number),
            Plain::Shared(buckets, ..) if buckets.is_held(now) => return None,
            Plain::Shared(buckets, price, number) => {
                let reached = buckets.bucket().reached(now);
                let drawn = buckets.draw(None, reached, *price)?;
                buckets.count(drawn.is_ok());
                let verdict = verdict(buckets.bucket(), reached, now, *price, drawn);
                return Some(self.decision(tool, verdict, |_| *number));
            }
            Plain::Several(limits) => {
                if limits.iter().any(|(buckets, _)| buckets.is_held()) {
                    return None;
                }
                let verdict = draw_each(limits, now).ok()??;
                return Some(self.decision(tool, verdict, |index| route.limits[index].number));
            }
        };
        let reached = buckets.bucket.reached(now);
        let drawn = buckets.draw(reached, price).ok()?;
        let verdict = verdict(&buckets.bucket, reached, now, price, drawn);
        Some(self.decision(tool, verdict, |_| number))
    }

    /// Decides by the one limit of a tool, if the call has a bucket there that has not moved.
    #[inline]
    fn decide_one(
        &self,
        rules: &Rules,
        limited: &Limited,
        tool: Option<Number>,
        call: &Call<'_>,
        now: u64,
    ) -> Option<Decision<'_>> {
        let price = limited.price(call.given_cost())?;
        let bucket = limited.buckets.bucket();
        let reached = bucket.reached(now);
        let key = limited.key(&self.secret, call);
        let drawn = limited.buckets.draw(key, reached, price)?;
        limited.buckets.count(drawn.is_ok());
        let verdict = verdict(bucket, reached, now, price, drawn);
        let decision = self.decision(tool, verdict, |_| limited.number);
        Some(overruled(rules, decision))
    }

    /// Decides by any number of limits; not where a bucket has moved, or has to be waited or asked for.
    fn decide_by(
        &self,
        rules: &Rules,
        limits: &[Arc<Limited>],
        tool: Option<Number>,
        call: &Call<'_>,
        now: u64,
    ) -> Option<Decision<'_>> {
        if limits.is_empty() {
            return Some(Decision::UNRESTRICTED);
        }
        if limits.iter().any(|limited| limited.is_held(now)) {
            return None;
        }
        if let [only] = limits
            && let Some(decision) = self.decide_one(rules, only, tool, call, now)
        {
            return Some(decision);
        }
        self.decide_all(rules, limits, tool, call, now)
    }

    /// Decides by any number of limits, in any case; not where a bucket has moved.
    #[inline(never)]
    fn decide_all(
        &self,
        rules: &Rules,
        limits: &[Arc<Limited>],
        tool: Option<Number>,
        call: &Call<'_>,
        now: u64,
    ) -> Option<Decision<'_>> {
        let draws = self.draws(limits, call, now);
        let verdict = draw_all(&draws, now).ok()?;
        match verdict {
            Verdict::Admitted(_) => limits
                .iter()
                .for_each(|limited| limited.buckets.count(true)),
            Verdict::Refused(place, ..) => limits[place].buckets.count(false),
            Verdict::Unavailable => {}
        }
        self.warn_of_all(limits);
        let decision = self.decision(tool, verdict, |index| limits[index].number);
        Some(overruled(rules, decision))
    }

    /// What a call asks of its limits.
    pub(crate) fn draws<'l>(
        &self,
        limits: &'l [Arc<Limited>],
        call: &Call<'_>,
        now: u64,
    ) -> SmallVec<[Draw<'l>; 4]> {
        let mut draws = SmallVec::new();
        let mut before: Option<(&Limited, _)> = None;
        for limited in limits {
            let key = match before {
                Some((other, key)) if other.splits_like(limited) => key,
                _ => limited.key(&self.secret, call),
            };
            before = Some((limited, key));
            let price = limited.price(call.given_cost());
            draws.push(Draw::new(limited.buckets.source(), now, price, key));
        }
        draws
    }

    /// What a verdict comes to, where this is no dry run. `number` is of a limit's name, by its place.
    #[inline(always)]
    fn decision(
        &self,
        tool: Option<Number>,
        verdict: Verdict,
        number: impl Fn(usize) -> Number,
    ) -> Decision<'_> {
        match verdict {
            Verdict::Admitted(fill) => Decision::Admitted(Permit::new(tool, fill)),
            Verdict::Refused(index, wait, fill) => {
                let reason = Reason::of(wait);
                Decision::Rejected(self.rejection(number(index), tool, reason, wait, fill))
            }
            Verdict::Unavailable => {
                let fill = Fill::NOTHING;
                Decision::Rejected(self.rejection(number(0), tool, Reason::Store, None, fill))
            }
        }
    }

    #[inline(always)]
    pub(crate) fn rejection(
        &self,
        number: Number,
        tool: Option<Number>,
        reason: Reason,
        wait: Option<Duration>,
        fill: Fill,
    ) -> Rejection<'_> {
        Rejection {
            names: &self.names.names,
            reason,
            retry_after: wait,
            number,
            tool,
            fill: Remaining(fill),
            raises: false,
        }
    }

    /// Tells of those limits whose keys found no place for a bucket of their own.
    pub(crate) fn warn_of_all(&self, limits: &[Arc<Limited>]) {
        for limited in limits.iter().filter(|limited| limited.buckets.was_pooled()) {
            let many = match limited.buckets {
                Buckets::Memory(_) | Buckets::Redis(_) => "a million",
                Buckets::Shared(_) => "too many",
            };
            log::warn!(
                "limit '{}' has {many} buckets that are not full: calls with other fields share one bucket until \
                 there is room",
                self.name(limited.number)
            );
        }
    }
}

/// What a store over a network was asked about its buckets: see [`Limiter::look`].
#[derive(Debug)]
pub struct Look {
    /// Of the rules by which it was asked.
    edition: u64,
    told: Peeking,
}

impl Look {
    /// Whether the answer is there, or there is none.
    pub fn is_told(&mut self) -> bool {
        self.told.is_told()
    }

    /// Waits for the answer.
    pub fn wait(&mut self) {
        self.told.wait();
    }
}

/// Levels that this process knows, put right by what a store was asked.
fn told_by_store<'a>(
    rules: &Rules,
    mut levels: Vec<Level<'a>>,
    look: Option<Look>,
) -> Vec<Level<'a>> {
    let Some(mut look) = look else {
        return levels;
    };
    look.wait();
    // Others than were asked for, after a reload.
    let told = Some(look.told).filter(|_| look.edition == rules.edition);
    let told = told.and_then(Peeking::found);
    let mut told = told.into_iter().flatten();
    let limits = rules.limits().iter().zip(&mut levels);
    for (_, level) in limits.filter(|(limited, _)| !limited.is_split()) {
        let found = told.next();
        level.remaining = found.as_ref().map(|found| found.tokens);
        if let Some(found) = found {
            level.paused = Some(found.paused).filter(|paused| !paused.is_zero());
        }
    }
    levels
}

/// What a draw from one bucket came to: the state after it, or the one that refused it.
#[inline(always)]
fn verdict(
    bucket: &Bucket,
    reached: Reached<'_>,
    now: u64,
    price: Price,
    drawn: Result<u64, u64>,
) -> Verdict {
    let fill = |state| bucket.fill(reached.missing(state));
    match drawn {
        Ok(state) => Verdict::Admitted(fill(state)),
        Err(state) => Verdict::Refused(0, Some(bucket.wait(state, now, price)), fill(state)),
    }
}

/// A decision whose line is written when the call has ended, where it is traced.
pub(crate) fn decided(decision: Decision<'_>, traced: Option<Traced>) -> Decision<'_> {
    match (decision, traced) {
        (Decision::Admitted(mut permit), Some(mut traced)) => {
            traced.admitted();
            let rest = permit.rest.get_or_insert_default();
            rest.in_flight.get_or_insert_default().traced = Some(traced);
            Decision::Admitted(permit)
        }
        (Decision::Rejected(rejection), Some(traced)) => {
            traced.rejected();
            Decision::Rejected(rejection)
        }
        (decision, None) => decision,
    }
}

/// A decision, which in a dry run admits.
pub(crate) fn overruled<'a>(rules: &Rules, decision: Decision<'a>) -> Decision<'a> {
    match decision {
        Decision::Rejected(rejection) if rules.dry_run => Decision::Admitted(Permit {
            tool: rejection.tool,
            fill: Some(rejection.fill),
            rest: Some(Box::new(Rest {
                overruled: Some(rejection),
                ..Rest::default()
            })),
        }),
        decision => decision,
    }
}

/// A tool of a limiter, looked up.
///
/// ```
/// use callgate::{Limit, Limiter};
///
/// let limiter = Limiter::builder().limit("search", Limit::per_second(1)).build()?;
/// let search = limiter.tool("search");
/// assert!(search.try_acquire().is_admitted());
/// assert!(!search.try_acquire().is_admitted());
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tool<'a> {
    limiter: &'a Limiter,
    name: &'a str,
    rules: InForce<'a>,
    /// Its place in the rules, where they name it exactly.
    route: Option<usize>,
}

impl<'a> Tool<'a> {
    /// Decides now about a call without fields, as [`Limiter::try_acquire`] does.
    #[inline(always)]
    pub fn try_acquire(&self) -> Decision<'a> {
        let limiter = self.limiter;
        if let Some(index) = self.route
            && limiter.current.is(&self.rules)
        {
            let route = self.rules.route_at(index);
            if let Some(plain) = &route.plain {
                let now = limiter.clock.now();
                if let Some(decision) = limiter.decide_plain(route, plain, now) {
                    return decision;
                }
            }
        }
        limiter
            .decide_apart(&Call::new(self.name), || limiter.clock.now())
            .0
    }
}

/// Threads keep the rules that they saw last: not the memory of a million buckets.
impl Drop for Limiter {
    fn drop(&mut self) {
        self.current.hold().close(None);
    }
}

/// Collects limits for a [`Limiter`], or for one to [reload](Limiter::reload).
#[must_use]
pub struct LimiterBuilder {
    config: Config,
    clock: Option<Box<dyn Fn() -> Duration + Send + Sync>>,
    trace: Option<Trace>,
    store: Option<Url>,
    /// Where the limits are from, but not the buckets.
    kept_apart: Option<Url>,
    /// The environment variable that is to say where the store is and is not set, and what to say of that.
    pub(crate) unset: Option<(String, ConfigError)>,
}

impl fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("limits", &self.config.limits)
            .field("default_limit", &self.config.default)
            .field("dry_run", &self.config.dry_run)
            .field("store", &self.store_url())
            .field("on_store_error", &self.config.on_store_error)
            .finish_non_exhaustive()
    }
}

impl LimiterBuilder {
    /// Adds a limit. Its name is the tool that it holds for, or a pattern of names, unless the
    /// limit names its [tools](Limit::tools) itself.
    pub fn limit(mut self, name: impl Into<String>, limit: Limit) -> Self {
        self.config.limits.push((name.into(), limit));
        self
    }

    /// Limits each tool that no other limit holds for: with a bucket for each of them, and for each
    /// value of the fields that split it.
    ///
    /// Its name is `[default]`.
    pub fn default_limit(mut self, limit: Limit) -> Self {
        self.config.default = Some(limit);
        self
    }

    /// Whether to let every call pass, and only say what would have been refused.
    ///
    /// What would have been refused spends nothing.
    pub fn dry_run(mut self, dry_run: bool) -> Self {
        self.config.dry_run = dry_run;
        self
    }

    /// Reads the time from `clock`: a duration since any start. For tests that move time.
    ///
    /// The clock may be wrong: a reading up to 2 s below the highest so far counts as the
    /// highest, and after a larger step back time goes on from the new reading.
    pub fn clock(mut self, clock: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Writes a line for each call to a trace: when it is rejected, or else when its permit is dropped.
    ///
    /// Of [`poll_acquire`](Limiter::poll_acquire) it knows nothing: front ends have [`Trace::begin`]. Its times
    /// are the operating system's, whatever clock the limiter reads. Of a dry run the lines say what
    /// became of the calls, all of which run.
    #[cfg(feature = "trace")]
    pub fn trace(mut self, trace: Trace) -> Self {
        self.trace = Some(trace);
        self
    }

    /// Keeps the buckets in a store, by its URL, that other processes share; without one, in this process.
    ///
    /// `shm:/run/myapp/callgate?slots=65536` is a file in memory, for the processes of one host and one user
    /// (Linux, feature `shm`). The folder has to exist; the path is extended by the version of the
    /// layout. Whoever makes the file says how many slots it has, 65,536 unless given, from 64 to 16,777,216: about
    /// so many keys have buckets of their own, at 32 bytes each.
    ///
    /// All limiters of such a store have one time: what is called `elapsed` here is the time since the host started.
    ///
    /// `redis://user:password@host:6379/0?prefix=myapp&timeout=250ms` is a Redis or Valkey server, for any number of
    /// hosts (feature `redis`); or `rediss://…` over TLS, `unix:///path/to/socket?prefix=myapp&db=0`,
    /// `redis+sentinel://host:26379/service/0?prefix=myapp` and `rediss+sentinel://…`. Several hosts have commas between
    /// them. The prefix keeps applications apart, and is required; no call waits longer than the timeout, from 1 ms
    /// to 60 s, 250 ms unless given. The server's clock counts. A burst has to come in 71 years. The limiter is made
    /// whether the server is there or not: see [`on_store_error`](Self::on_store_error).
    pub fn store(mut self, url: impl Into<String>) -> Self {
        self.store = Some(Url::new(url.into()));
        self
    }

    /// Sets what becomes of a call when a store over a network fails, for limits that do not say it
    /// [themselves](Limit::on_store_error): until then, a bucket of this process decides.
    pub fn on_store_error(mut self, policy: OnStoreError) -> Self {
        self.config.on_store_error = Some(policy);
        self
    }

    /// The URL of the store, if there is one: of Redis without user, password and what comes after `?`.
    #[must_use]
    pub fn store_url(&self) -> Option<&str> {
        self.store.as_ref().map(|url| &*url.shown)
    }

    /// The environment variable in which a file says that the store's URL is, where it is not set here: then
    /// [`build`](Self::build) fails, unless the buckets are kept [in this process](Self::in_memory).
    #[must_use]
    pub fn unset_variable(&self) -> Option<&str> {
        self.unset.as_ref().map(|(variable, _)| &**variable)
    }

    /// Keeps the buckets in this process after all: for those who only look at the limits of a file.
    ///
    /// The limits are to be ones that the store takes all the same.
    pub fn in_memory(mut self) -> Self {
        self.kept_apart = self.store.take();
        self.unset = None;
        self
    }

    /// Makes the limiter, every bucket full, or in a shared store as it is there.
    ///
    /// # Errors
    /// When a rate, burst or cost is out of range, a name is empty or given twice, or the default limit
    /// names tools; when a store is wrong or cannot be used, or there is a clock beside it.
    pub fn build(self) -> Result<Limiter, ConfigError> {
        if let Some((_, error)) = self.unset {
            return Err(error);
        }
        if self.store.is_some() && self.clock.is_some() {
            let allowed = "left out: all processes that share a store have one clock";
            return Err(ConfigError::new("clock", allowed, "one beside a store"));
        }
        // Before a store is made for them.
        let url = self.store.as_ref().or(self.kept_apart.as_ref());
        self.config.check(Kind::of(url.map(|url| &*url.whole))?)?;
        let store = Store::open(self.store.as_ref().map(|url| &*url.whole))?;
        let clock = self.clock.map_or_else(|| store.clock(), Clock::injected);
        let names = Numbered::default();
        let mut config = self.config;
        config.traced = self.trace.is_some();
        let now = || clock.latest();
        let rules = config.rules(&store, None, &now, |name| names.number(name))?;
        Ok(Limiter {
            current: Current::new(rules),
            clock,
            names,
            secret: store.secret(),
            store,
            store_url: self.store.map(|url| url.shown),
            arrivals: AtomicU64::new(1),
            trace: self.trace,
        })
    }
}
