//! The long way to a decision: by those who wait, calls that run, and pauses.

use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use futures_timer::Delay;
use smallvec::SmallVec;

use crate::bucket::{Fill, MAX_NANOS};
use crate::clock::nanos;
use crate::decision::{Call, Decision, InFlight, Number, Permit, Reason, Rest};
use crate::limiter::{decided, overruled};
use crate::rules::{Limited, Rules};
use crate::store::memory::Moved;
use crate::store::{Draw, Key, Verdict, draw_all, redis};
use crate::waiting::{CLAIM, Home, Left, Locked, Place, Running, Told, Waiting, Wakes, Why};
use crate::{ConfigError, Limiter, MAX_WAIT, OnStoreError, Rate, Rejection};

/// A store is asked so much earlier than it is known to admit: clock readings may be older than what it
/// answered to others, and answers take time.
const EARLY: Duration = Duration::from_millis(1);

thread_local! {
    /// The thread that polls, which may stop to do so.
    static HERE: Home = Home::default();
}

impl Limiter {
    /// Decides on a call that may wait for its turn.
    ///
    /// A call that can be served within its [`max_wait`](crate::Limit::max_wait) waits, in order of arrival,
    /// and any other is refused at once, without waiting. Of several limits that refuse a call it waits for the
    /// one that does so for the longest, no longer than the shortest `max_wait` of those. While calls wait for a
    /// bucket, others are refused there or wait behind them. A turn comes up to 50 ms after the bound where
    /// timers are late.
    ///
    /// Dropping the future gives the place up, and nothing is spent; but for a store over a network that is being
    /// asked, which may have charged the call. It needs no runtime: a thread
    /// keeps the time, which starts with the first call that waits. In a dry run nothing waits.
    ///
    /// Such a store is asked by those whose turn it is, in each process; between processes, it says when to ask. A
    /// refusal comes up to the store's deadline after the bound.
    ///
    /// ```
    /// use std::time::Duration;
    /// use callgate::{Call, Decision, Limit, Limiter};
    ///
    /// # pollster::block_on(async {
    /// let limit = Limit::per_second(100).max_wait(Duration::from_secs(1));
    /// let limiter = Limiter::builder().limit("search", limit).build()?;
    /// for _ in 0..3 {
    ///     match limiter.acquire(&Call::new("search")).await {
    ///         Decision::Admitted(_permit) => println!("call the tool"),
    ///         Decision::Rejected(rejection) => println!("retry in {:?}", rejection.retry_after),
    ///     }
    /// }
    /// # Ok::<(), callgate::ConfigError>(())
    /// # }).unwrap();
    /// ```
    pub async fn acquire(&self, call: &Call<'_>) -> Decision<'_> {
        self.wait(call, None).await
    }

    /// [`acquire`](Self::acquire) with another bound, whatever the limits say.
    pub async fn acquire_within(&self, call: &Call<'_>, max_wait: Duration) -> Decision<'_> {
        self.wait(call, Some(max_wait)).await
    }

    async fn wait(&self, call: &Call<'_>, max_wait: Option<Duration>) -> Decision<'_> {
        let mut traced = self.traced(call);
        // Where it has to be asked, nothing is decided at once.
        if self.store.redis().is_none() {
            let now = || self.clock.now();
            let decision = match traced {
                None => self.decide(call, now),
                Some(_) => self.decide_untraced(call, now),
            };
            if decision.is_admitted() {
                return decided(decision, traced);
            }
        }
        let mut turn = Turn::of(None, max_wait);
        let mut timer: Option<Delay> = None;
        let decision = poll_fn(|context| {
            turn.home = HERE.try_with(Home::clone).ok();
            loop {
                if let Poll::Ready(decision) = self.poll_acquire(call, &mut turn, context.waker()) {
                    return Poll::Ready(decision);
                }
                if turn.is_asking() {
                    return Poll::Pending;
                }
                let timer = match &mut timer {
                    Some(timer) => {
                        timer.reset(turn.wait);
                        timer
                    }
                    None => timer.insert(Delay::new(turn.wait)),
                };
                if Pin::new(timer).poll(context).is_pending() {
                    return Poll::Pending;
                }
            }
        })
        .await;
        if let Some(traced) = traced.as_mut().filter(|_| turn.has_waited) {
            traced.waited();
        }
        decided(decision, traced)
    }

    /// What [`acquire`](Self::acquire) is made of, for front ends that have timers of their own: decides, or
    /// gives the call a place.
    ///
    /// It is the long way: where [`try_acquire`](Self::try_acquire) admits a call, there is no need for it. Where
    /// it is pending, it is to be asked again after [`Turn::wait`], or when the waker is woken, whichever
    /// comes first; always with the same call and turn.
    pub fn poll_acquire(
        &self,
        call: &Call<'_>,
        turn: &mut Turn,
        waker: &Waker,
    ) -> Poll<Decision<'_>> {
        self.poll(call, turn, waker, || self.clock.now())
    }

    /// The same at a time of the caller's, as in [`try_acquire_at`](Self::try_acquire_at).
    pub fn poll_acquire_at(
        &self,
        call: &Call<'_>,
        turn: &mut Turn,
        waker: &Waker,
        elapsed: Duration,
    ) -> Poll<Decision<'_>> {
        self.poll(call, turn, waker, || nanos(elapsed))
    }

    fn poll(
        &self,
        call: &Call<'_>,
        turn: &mut Turn,
        waker: &Waker,
        now: impl Fn() -> u64,
    ) -> Poll<Decision<'_>> {
        loop {
            let answered = match &mut turn.asking {
                None => None,
                Some(asking) => match asking.poll(turn.listener.as_ref().unwrap_or(waker)) {
                    Poll::Ready(mut answered) => {
                        turn.asking = None;
                        if turn.is_simulated {
                            answered.answer.just_came();
                        }
                        Some(answered)
                    }
                    Poll::Pending => {
                        // It wakes by its deadline.
                        turn.wait = MAX_WAIT;
                        return Poll::Pending;
                    }
                },
            };
            let rules = self.current.take();
            let now = now();
            let decided = rules.with_limits(call.tool(), |limits, tool| {
                let asked = Asked {
                    limits,
                    tool,
                    call,
                    now,
                };
                self.take_turn(&rules, asked, Some((&mut *turn, waker)), answered)
            });
            self.current.keep(rules);
            match decided {
                Ok(Step::Decided(decision)) => return Poll::Ready(decision),
                Ok(Step::Waits) => return Poll::Pending,
                Ok(Step::Asks(store, question, held)) => {
                    let waker = turn.listener.as_ref().unwrap_or(waker);
                    let answer = store.ask(*question, waker);
                    turn.asking = Some(Asking { answer, held });
                }
                Err(Moved) => self.current.wait(),
            }
        }
    }

    /// Decides on a call that does not wait, where others may or a store is asked; not where a bucket has moved.
    #[cold]
    pub(crate) fn decide_in_turn(
        &self,
        rules: &Rules,
        limits: &[Arc<Limited>],
        tool: Option<Number>,
        call: &Call<'_>,
        now: impl Fn() -> u64,
    ) -> Option<Decision<'_>> {
        let mut asked = Asked {
            limits,
            tool,
            call,
            now: now(),
        };
        let mut answered = None;
        loop {
            match self.take_turn(rules, asked, None, answered.take()).ok()? {
                Step::Decided(decision) => return Some(decision),
                Step::Waits => return None,
                Step::Asks(store, question, held) => {
                    let answer = store.ask_blocking(*question);
                    asked.now = now();
                    answered = Some(Answered { answer, held });
                }
            }
        }
    }

    /// Decides on a call if its turn has come, and where it has a turn and can wait for it, gives it a place. A
    /// store that has to be asked is asked in between, when nothing is locked.
    fn take_turn(
        &self,
        rules: &Rules,
        asked: Asked<'_, '_>,
        turn: Option<(&mut Turn, &Waker)>,
        answered: Option<Answered>,
    ) -> Result<Step<'_>, Moved> {
        let Asked { limits, tool, .. } = asked;
        if limits.is_empty() {
            return Ok(Step::Decided(Decision::UNRESTRICTED));
        }
        let mut turn = turn.filter(|_| !rules.dry_run);
        let mut verdict = None;
        let mut failure = None;
        if let Some(Answered { answer, held }) = answered {
            match answer.verdict(asked.now) {
                Ok(Verdict::Admitted(fill)) => {
                    if let Some((turn, _)) = turn {
                        turn.be_granted(limits);
                    }
                    return Ok(Step::Decided(admitted(tool, fill, held.running)));
                }
                // By rules that are not in force any more: it has to be asked again.
                Ok(refused) => verdict = Some(refused).filter(|_| held.edition == rules.edition),
                Err(why) => failure = Some(why),
            }
            // Here the call stops to count as running: no line is locked yet.
        }
        let store = self.store.redis();
        let failure = failure.or_else(|| store?.failure());
        let rejection = failure.as_ref();
        let rejection = rejection.and_then(|failure| self.refused_by_store(limits, tool, failure));
        // Where the store fails, it is not asked.
        let alone = store.filter(|_| failure.is_some());
        let count_alone = || alone.map_or((), redis::Store::count_alone);
        if let Some(rejection) = rejection {
            if let Some((turn, _)) = turn {
                turn.place = None;
            }
            count_alone();
            return Ok(Step::Decided(overruled(
                rules,
                Decision::Rejected(rejection),
            )));
        }
        if let Some((turn, _)) = &mut turn {
            turn.come(self, asked);
        }
        // Who does not wait comes after all who do.
        let came = turn.as_ref().map_or((u64::MAX, None), |(turn, _)| {
            (turn.arrival, turn.home.clone())
        });
        // Dropped last: it wakes others when no line is locked any more.
        let mut wakes = Wakes::default();
        // All callers lock in the order in which they freeze.
        let lines = limits.iter().map(|limited| limited.lines.lock(&mut wakes));
        let lines: SmallVec<[_; 4]> = lines.collect();
        // From here on a reload wakes whoever comes to wait; one that came before has other rules.
        if !self.current.is(rules) {
            return Err(Moved);
        }
        let asks = store.filter(|_| failure.is_none());
        let mut counter = Counter {
            draws: self.draws_in_turn(asked, failure.is_some()),
            asked,
            lines,
            early: asks.map_or(Duration::ZERO, |_| EARLY),
            wakes: &mut wakes,
        };
        let refused = counter.refusal((came.0, came.1.as_ref()))?;
        // The store knows best, but not of those who are ahead of the call here.
        let knows_less = |refused: &Refused| refused.obstacle.passed_at.is_some();
        let refused = refused.filter(|refused| verdict.is_none() || knows_less(refused));
        let is_told = refused.is_none() && verdict.is_some();
        let refused = match (refused, verdict, asks) {
            (Some(refused), ..) => refused,
            (None, None, Some(store)) => {
                let too_early = turn
                    .as_ref()
                    .and_then(|(turn, _)| counter.too_early(turn, rules));
                match too_early {
                    Some(refused) => refused,
                    None => return Ok(self.ask(store, rules, counter, turn)),
                }
            }
            (None, verdict, _) => match counter.settled(verdict)? {
                Ok(fill) => {
                    let running = counter.admit(turn.map(|(turn, _)| turn));
                    drop(counter);
                    count_alone();
                    self.warn_of_all(limits);
                    return Ok(Step::Decided(admitted(tool, fill, running)));
                }
                Err(refused) => refused,
            },
        };
        if let Some((turn, waker)) = &mut turn
            && counter.wait(turn, waker, &refused)
        {
            if is_told && let Some((at, _)) = &mut turn.next_ask {
                *at = asked.now.saturating_add(nanos(turn.wait));
            }
            return Ok(match asks.filter(|_| counter.lines_up(turn, &refused)) {
                Some(store) => self.ask(store, rules, counter, Some((turn, waker))),
                None => Step::Waits,
            });
        }
        counter.settle();
        count_alone();
        let rejection = self.rejected(limits, tool, &refused);
        Ok(Step::Decided(overruled(
            rules,
            Decision::Rejected(rejection),
        )))
    }

    /// Asks a store, where a call that has a place is in line with those of other processes from then on.
    fn ask<'a>(
        &self,
        store: &'a redis::Store,
        rules: &Rules,
        mut counter: Counter<'_, '_, '_>,
        turn: Option<(&mut Turn, &Waker)>,
    ) -> Step<'a> {
        let held = Held {
            running: counter.start(),
            edition: rules.edition,
        };
        let turn = turn.map(|(turn, waker)| {
            counter.keep_place(turn, waker, store.timeout());
            let at = (counter.asked.now, rules.edition);
            turn.next_ask = turn.place.is_some().then_some(at);
            &*turn
        });
        counter.settle();
        let question = self.question(counter.asked, turn);
        Step::Asks(store, Box::new(question), held)
    }

    fn rejected(
        &self,
        limits: &[Arc<Limited>],
        tool: Option<Number>,
        refused: &Refused,
    ) -> Rejection<'_> {
        let Obstacle { reason, wait, .. } = refused.obstacle;
        let limited = &limits[refused.place];
        limited.buckets.count(false);
        self.rejection(limited.number, tool, reason, wait, refused.fill)
    }

    /// Why a call is refused, if no limit lets anything else decide where the store fails.
    fn refused_by_store(
        &self,
        limits: &[Arc<Limited>],
        tool: Option<Number>,
        failure: &redis::Failure,
    ) -> Option<Rejection<'_>> {
        let strictest = limits.iter().max_by_key(|limited| limited.on_store_error)?;
        let policy = strictest.on_store_error;
        if policy < OnStoreError::Deny {
            return None;
        }
        let (number, wait) = (strictest.number, failure.retry());
        let rejection = self.rejection(number, tool, Reason::Store, wait, Fill::NOTHING);
        Some(Rejection {
            raises: policy == OnStoreError::Raise,
            ..rejection
        })
    }

    /// What a call asks of its limits in the store.
    fn question(&self, asked: Asked<'_, '_>, turn: Option<&Turn>) -> redis::Question {
        let mut question = redis::Question::default();
        let Asked {
            limits, call, now, ..
        } = asked;
        let waits = turn.filter(|turn| turn.place.is_some());
        for limited in limits {
            let Some(buckets) = limited.buckets.redis() else {
                continue;
            };
            let cost = call.given_cost().unwrap_or(limited.limit.default_cost());
            let key = limited.key(&self.secret, call);
            let paused = limited.paused_part(&self.secret, call.tool());
            let tool = limited.paused_tool(call.tool());
            let left = waits.map(|turn| turn.left(limited.limit.longest_wait(), CLAIM, now));
            question.add(
                buckets,
                (limited.values(call), key),
                (tool, paused),
                cost,
                left.map(Duration::from_nanos),
            );
        }
        question
    }

    /// What a call asks of its limits here; if their store failed, at no cost where they say that they admit then.
    fn draws_in_turn<'l>(&self, asked: Asked<'l, '_>, failed: bool) -> SmallVec<[Draw<'l>; 4]> {
        let draws = self.draws(asked.limits, asked.call, asked.now);
        let draws = draws.into_iter().zip(asked.limits);
        let draws = draws.map(|(draw, limited)| {
            if failed && limited.on_store_error == OnStoreError::Admit {
                return draw.free();
            }
            let part = limited.paused_part(&self.secret, asked.call.tool());
            draw.paused(limited.buckets.paused(part, asked.now))
        });
        draws.collect()
    }

    /// Admits no call of a tool for some time, since the service behind it asked for that: up to a day.
    ///
    /// It pauses the limit of the tool that refills fastest, with all its buckets and for all its tools, which is
    /// enough since all limits must admit a call; `limit` names another one of the tool's. When the pause ends,
    /// its buckets are empty and refill from there; other limits keep their level. Of the default limit only
    /// the buckets of this tool pause. A pause that ends later stays as it is. Whoever waits is told: calls that
    /// cannot be served in time any more are refused.
    ///
    /// # Errors
    /// When no limit holds for the tool, or not the one that was named, or the time is zero or over a day.
    ///
    /// ```
    /// use std::time::Duration;
    /// use callgate::{Call, Decision, Limit, Limiter, Reason};
    ///
    /// let limiter = Limiter::builder().limit("search", Limit::per_second(2).burst(2)).build()?;
    /// limiter.pause_at("search", Duration::from_secs(10), None, Duration::ZERO)?;
    /// let call = Call::new("search");
    /// let Decision::Rejected(rejection) = limiter.try_acquire_at(&call, Duration::ZERO) else {
    ///     panic!("paused");
    /// };
    /// assert_eq!(rejection.reason, Reason::Paused);
    /// assert_eq!(rejection.retry_after, Some(Duration::from_millis(10_500)));
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    pub fn pause(
        &self,
        tool: &str,
        time: Duration,
        limit: Option<&str>,
    ) -> Result<(), ConfigError> {
        self.pause_by(tool, time, limit, || self.clock.now())
    }

    /// The same at a time of the caller's, as in [`try_acquire_at`](Self::try_acquire_at).
    ///
    /// # Errors
    /// As for [`pause`](Self::pause).
    pub fn pause_at(
        &self,
        tool: &str,
        time: Duration,
        limit: Option<&str>,
        elapsed: Duration,
    ) -> Result<(), ConfigError> {
        self.pause_by(tool, time, limit, || nanos(elapsed))
    }

    fn pause_by(
        &self,
        tool: &str,
        time: Duration,
        limit: Option<&str>,
        now: impl FnOnce() -> u64,
    ) -> Result<(), ConfigError> {
        if time.is_zero() || time > MAX_WAIT {
            let allowed = "a time above 0, up to 86,400 s";
            return Err(ConfigError::new("pause", allowed, format!("{time:?}")));
        }
        // Read before a reload may be held up.
        let now = now();
        // Dropped last, when the rules are not held any more: whatever it wakes may run, and wait for those who do.
        let mut wakes = Wakes::default();
        // Held, so that no reload carries a limit away in the meantime.
        let rules = self.current.hold();
        rules.with_limits(tool, |limits, _| {
            let limited = self.limit_to_pause(limits, limit).ok_or_else(|| {
                let names = limits.iter().map(|limited| self.name(limited.number));
                let names: Vec<_> = names.collect();
                if names.is_empty() {
                    let allowed = "the name of a tool that a limit holds for";
                    return ConfigError::new("tool", allowed, format!("'{}'", tool.escape_debug()));
                }
                let allowed = format!("a limit of the tool: '{}'", names.join("', '"));
                let given = limit.unwrap_or_default();
                ConfigError::new("limit", allowed, format!("'{}'", given.escape_debug()))
            })?;
            let until = now.saturating_add(nanos(time)).min(MAX_NANOS);
            let part = limited.paused_part(&self.secret, tool);
            let mut lines = limited.lines.lock(&mut wakes);
            limited.buckets.pause(part, until, now);
            if let (Some(store), Some(buckets)) = (self.store.redis(), limited.buckets.redis()) {
                store.pause(buckets, limited.paused_tool(tool), time);
            }
            lines.wake_all(&mut wakes);
            Ok(())
        })
    }

    /// The limit of this name, or the one that refills fastest.
    fn limit_to_pause<'l>(
        &self,
        limits: &'l [Arc<Limited>],
        name: Option<&str>,
    ) -> Option<&'l Arc<Limited>> {
        let mut limits = limits.iter();
        match name {
            Some(name) => limits.find(|limited| self.name(limited.number) == name),
            // In parts of a nanosecond.
            None => limits.min_by_key(|limited| {
                let rate = limited.limit.rate().map(Rate::fraction);
                rate.map_or(u128::MAX, |(tokens, nanos)| {
                    nanos.saturating_mul(1 << 20) / u128::from(tokens)
                })
            }),
        }
    }
}

/// A call's turn among those that wait: see [`Limiter::poll_acquire`]. Dropping it gives the place up.
#[derive(Debug, Default)]
pub struct Turn {
    /// When it came first, by the limiter's clock and by the machine's: a clock of the user's may stand still,
    /// and nobody is to wait for ever.
    came: Option<(u64, Option<Instant>)>,
    is_simulated: bool,
    /// Its number among all that came.
    arrival: u64,
    place: Option<Place>,
    /// When the store is to be asked again, by the line that it keeps, and the edition of the rules by which it was
    /// asked. None as long as it was not asked for one that has a place.
    next_ask: Option<(u64, u64)>,
    wait: Duration,
    home: Option<Home>,
    max_wait: Option<Duration>,
    asking: Option<Asking>,
    has_waited: bool,
    /// What answers wake, if not who waits.
    listener: Option<Waker>,
}

/// A store that is asked for a call.
#[derive(Debug)]
struct Asking {
    answer: redis::Asking,
    held: Held,
}

/// A store that was asked for a call.
struct Answered {
    answer: redis::Answered,
    held: Held,
}

/// What a call has while a store is asked.
#[derive(Debug, Default)]
struct Held {
    /// It counts as running already.
    running: SmallVec<[Running; 1]>,
    /// Of the rules by which it was asked.
    edition: u64,
}

impl Asking {
    fn poll(&mut self, waker: &Waker) -> Poll<Answered> {
        let answer = self.answer.poll(waker);
        answer.map(|answer| Answered {
            answer,
            held: mem::take(&mut self.held),
        })
    }
}

/// What becomes of a call for now.
enum Step<'a> {
    Decided(Decision<'a>),
    /// It has a place in a line.
    Waits,
    /// The store is to be asked, when nothing is locked.
    Asks(&'a redis::Store, Box<redis::Question>, Held),
}

/// An admitted call, which counts as running as long as its permit lives.
fn admitted<'a>(tool: Option<Number>, fill: Fill, running: SmallVec<[Running; 1]>) -> Decision<'a> {
    let mut permit = Permit::new(tool, fill);
    if !running.is_empty() {
        let in_flight = InFlight {
            running,
            ..InFlight::default()
        };
        permit.rest = Some(Box::new(Rest {
            in_flight: Some(in_flight),
            ..Rest::default()
        }));
    }
    Decision::Admitted(permit)
}

impl Turn {
    /// A turn of somebody who may stop together with others of the same home; none for who does not, such as a
    /// thread that does nothing else. They wait for no longer than `max_wait`; none for what the limits say.
    #[must_use]
    pub fn of(home: Option<Home>, max_wait: Option<Duration>) -> Self {
        Self {
            home,
            max_wait,
            ..Self::default()
        }
    }

    /// Has the answers of a store wake this, on the store's thread, in place of the waker: for front ends that
    /// can be woken from a thread of others' in one way only. Whoever hears of several answers of one batch
    /// is woken when all are there.
    #[must_use]
    pub fn answered_by(mut self, waker: Waker) -> Self {
        self.listener = Some(waker);
        self
    }

    /// Whether the call has had to wait for its turn.
    #[must_use]
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Whether a store is being asked: then there is no time to ask again at, since it wakes by its deadline.
    #[must_use]
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// A turn of a call in simulated time, which may pass more slowly than the machine's: only the times that
    /// the call is asked at count.
    #[must_use]
    pub fn simulated() -> Self {
        Self {
            is_simulated: true,
            ..Self::default()
        }
    }

    /// After what time to ask again.
    #[must_use]
    pub fn wait(&self) -> Duration {
        self.wait
    }

    fn come(&mut self, limiter: &Limiter, asked: Asked<'_, '_>) {
        if self.came.is_none() {
            let started = (!self.is_simulated).then(Instant::now);
            self.came = Some((asked.now, started));
            self.arrival = limiter.arrivals.fetch_add(1, Ordering::Relaxed);
        }
        // It may be at a limit that does not hold for the call any more.
        let is_here = |place: &mut Place| {
            let mut limits = asked.limits.iter();
            limits.any(|limited| Arc::ptr_eq(&limited.lines, &place.lines))
        };
        self.place.take_if(|place| !is_here(place));
        self.next_ask.take_if(|_| self.place.is_none());
    }

    /// Leaves its line with what it waited for.
    fn be_granted(&mut self, limits: &[Arc<Limited>]) {
        let Some(mut place) = self.place.take() else {
            return;
        };
        let mut limits = limits.iter();
        let limited = limits.find(|limited| Arc::ptr_eq(&limited.lines, &place.lines));
        let mut wakes = Wakes::default();
        let mut lines = place.lines.lock(&mut wakes);
        let has_room = limited.is_some_and(|limited| has_room(limited, &lines, place.key));
        // The next one lines up with those of other processes.
        let left = match limited.and_then(|limited| limited.buckets.redis()) {
            Some(buckets) if buckets.have_line() => Left::Gone,
            _ => Left::Granted { has_room },
        };
        lines.leave(place.key, place.arrival, left, &mut wakes);
        place.buckets.count_waiting(lines.waiting());
        drop(lines);
        place.is_left = true;
    }

    /// How much longer it may wait where limits let it wait so long, with so much grace.
    fn left(&self, max_wait: Duration, grace: u64, now: u64) -> u64 {
        let max_wait = nanos(self.max_wait.unwrap_or(max_wait));
        max_wait
            .saturating_add(grace)
            .saturating_sub(self.waited(now))
    }

    /// How long it has been waiting. By the machine's clock that is somewhat more, which is read later.
    fn waited(&self, now: u64) -> u64 {
        self.came.map_or(0, |(came, started)| {
            let at_least = started.map_or(0, |started| nanos(started.elapsed()));
            now.saturating_sub(came).max(at_least.saturating_sub(CLAIM))
        })
    }
}

/// What is asked: a call, at a time, of these limits.
#[derive(Clone, Copy)]
struct Asked<'l, 'c> {
    limits: &'l [Arc<Limited>],
    tool: Option<Number>,
    call: &'l Call<'c>,
    now: u64,
}

/// Where a call asks for its turn: with the lines of all its limits locked.
struct Counter<'l, 'c, 'a> {
    asked: Asked<'l, 'c>,
    draws: SmallVec<[Draw<'l>; 4]>,
    lines: SmallVec<[Locked<'l>; 4]>,
    /// A wait that counts as none.
    early: Duration,
    wakes: &'a mut Wakes,
}

/// What is in the way of a call at one limit.
#[derive(Clone, Copy)]
struct Obstacle {
    reason: Reason,
    /// None where no time can be told.
    wait: Option<Duration>,
    /// How long the tokens take, whatever else is in the way.
    refill: Duration,
    why: Why,
    /// When somebody who comes first is passed over.
    passed_at: Option<u64>,
}

/// Why a call is refused.
struct Refused {
    /// The limit that does so for the longest.
    place: usize,
    obstacle: Obstacle,
    /// Of the tightest limit.
    fill: Fill,
    /// The shortest of the times that the limits that refuse let it wait.
    max_wait: Duration,
    /// Nothing else is in the way at any limit.
    only_tokens: bool,
}

impl Counter<'_, '_, '_> {
    /// Why a call of this arrival and home is refused now, if it is.
    fn refusal(&mut self, came: (u64, Option<&Home>)) -> Result<Option<Refused>, Moved> {
        let mut refused: Option<Refused> = None;
        let mut tightest = None;
        for place in 0..self.draws.len() {
            let state = self.draws[place].look()?;
            let fill = self.draws[place].fill(state).tighter(tightest);
            tightest = Some(fill);
            let Some(obstacle) = self.obstacle(place, state, came) else {
                continue;
            };
            let max_wait = self.asked.limits[place].limit.longest_wait();
            let refused = refused.get_or_insert(Refused {
                place,
                obstacle,
                fill,
                max_wait,
                only_tokens: true,
            });
            refused.only_tokens &= obstacle.why == Why::Tokens && obstacle.passed_at.is_none();
            refused.max_wait = refused.max_wait.min(max_wait);
            if obstacle.length() > refused.obstacle.length() {
                (refused.place, refused.obstacle) = (place, obstacle);
            }
        }
        if let (Some(refused), Some(tightest)) = (&mut refused, tightest) {
            refused.fill = tightest;
        }
        Ok(refused)
    }

    fn obstacle(
        &mut self,
        place: usize,
        state: u64,
        came: (u64, Option<&Home>),
    ) -> Option<Obstacle> {
        let (draw, now) = (&self.draws[place], self.asked.now);
        let lines = &mut self.lines[place];
        let ahead = lines.before(draw.key(), came, now, self.wakes);
        let is_full = !has_room(&self.asked.limits[place], lines, draw.key());
        let passed_at = ahead.map(|ahead| ahead.passed_at);
        let asks = ahead.is_some_and(|ahead| ahead.asks);
        let wait = draw.wait(state, ahead.map_or(0, |ahead| ahead.tokens));
        let is_early = |wait: Duration| wait <= self.early && !draw.is_paused();
        let wait = wait.map(|wait| if is_early(wait) { Duration::ZERO } else { wait });
        let refill = wait.unwrap_or_default();
        let (reason, wait, why) = match (wait, passed_at) {
            (None, _) => (Reason::Cost, None, Why::Tokens),
            (Some(_), _) if is_full => (Reason::Concurrency, None, Why::Running),
            (Some(Duration::ZERO), None) => return None,
            // There are tokens for all: it is only that somebody else comes first.
            (Some(Duration::ZERO), Some(at)) => {
                let wait = at.saturating_sub(now);
                // A store need not take all the time that it has.
                let wait = if asks { wait.min(CLAIM) } else { wait };
                (Reason::Rate, Some(Duration::from_nanos(wait)), Why::Others)
            }
            (wait, _) if draw.is_paused() => (Reason::Paused, wait, Why::Tokens),
            (wait, _) => (Reason::Rate, wait, Why::Tokens),
        };
        Some(Obstacle {
            reason,
            wait,
            refill,
            why,
            passed_at,
        })
    }

    /// Draws, unless a store has told its verdict, which is no admission.
    fn settled(&self, told: Option<Verdict>) -> Result<Result<Fill, Refused>, Moved> {
        let verdict = told.map_or_else(|| draw_all(&self.draws, self.asked.now), Ok)?;
        Ok(match verdict {
            Verdict::Admitted(fill) => Ok(fill),
            // Others were faster, who did not ask whose turn it is; or the store says so.
            Verdict::Refused(place, wait, fill) => {
                let is_paused = self.draws[place].is_paused();
                let reason = if is_paused {
                    Reason::Paused
                } else {
                    Reason::of(wait)
                };
                Err(self.refused_after_all(place, reason, wait, fill))
            }
            Verdict::Unavailable => {
                Err(self.refused_after_all(0, Reason::Store, None, Fill::NOTHING))
            }
        })
    }

    fn refused_after_all(
        &self,
        place: usize,
        reason: Reason,
        wait: Option<Duration>,
        fill: Fill,
    ) -> Refused {
        Refused {
            place,
            obstacle: Obstacle {
                reason,
                wait,
                refill: wait.unwrap_or_default(),
                why: Why::Tokens,
                passed_at: None,
            },
            fill,
            max_wait: self.asked.limits[place].limit.longest_wait(),
            only_tokens: true,
        }
    }

    /// Counts a call as running.
    fn start(&mut self) -> SmallVec<[Running; 1]> {
        let mut running = SmallVec::new();
        for (place, limited) in self.asked.limits.iter().enumerate() {
            if limited.limit.most_concurrent().is_some() {
                let key = self.draws[place].key();
                running.push(Running {
                    lines: Arc::clone(&limited.lines),
                    key,
                    edition: self.lines[place].start(key),
                });
            }
        }
        running
    }

    /// Counts a call as running and takes it out of its line.
    fn admit(&mut self, turn: Option<&mut Turn>) -> SmallVec<[Running; 1]> {
        for limited in self.asked.limits {
            limited.buckets.count(true);
        }
        let running = self.start();
        if let Some(turn) = turn {
            self.leave(turn, true);
        }
        self.settle();
        running
    }

    /// Keeps a call's turn while a store is asked for it: it does not come for so long.
    fn keep_place(&mut self, turn: &Turn, waker: &Waker, time: Duration) {
        let Some(there) = &turn.place else {
            return;
        };
        let at = |limited: &Arc<Limited>| Arc::ptr_eq(&limited.lines, &there.lines);
        if let Some(place) = self.asked.limits.iter().position(at) {
            let until = self.asked.now.saturating_add(nanos(time));
            let waiting = Waiting {
                tokens: self.draws[place].tokens(),
                home: turn.home.clone(),
                told: Told::At(until, Why::Answer),
                waker: waker.clone(),
            };
            let line = self.lines[place].line(there.key);
            line.wait(there.arrival, waiting, self.wakes);
        }
    }

    /// Takes a call out of its line.
    fn leave(&mut self, turn: &mut Turn, granted: bool) {
        let Some(mut place) = turn.place.take() else {
            return;
        };
        let at = |limited: &Arc<Limited>| Arc::ptr_eq(&limited.lines, &place.lines);
        if let Some(index) = self.asked.limits.iter().position(at) {
            let left = if granted {
                let limited = &self.asked.limits[index];
                Left::Granted {
                    has_room: has_room(limited, &self.lines[index], place.key),
                }
            } else {
                Left::Gone
            };
            self.lines[index].leave(place.key, place.arrival, left, self.wakes);
        }
        place.is_left = true;
    }

    /// Gives a call a place to wait at, if it can be served in time from there.
    fn wait(&mut self, turn: &mut Turn, waker: &Waker, refused: &Refused) -> bool {
        let Refused {
            place, obstacle, ..
        } = *refused;
        let now = self.asked.now;
        // Who has been promised a turn is not refused because a timer was late.
        let grace = if turn.place.is_some() { CLAIM } else { 0 };
        let [left, most] = [0, grace].map(|grace| turn.left(refused.max_wait, grace, now));
        let in_time = |wait| wait <= most;
        let told = match (obstacle.wait.map(nanos), obstacle.why) {
            (Some(wait), _) if in_time(wait) => wait,
            // Nobody knows when those who are in the way are done: maybe soon.
            (None, Why::Running) | (Some(_), Why::Others)
                if left > 0 && in_time(nanos(obstacle.refill)) =>
            {
                left
            }
            _ => {
                self.leave(turn, false);
                return false;
            }
        };
        let key = self.draws[place].key();
        let lines = &self.asked.limits[place].lines;
        let moves = |there: &Place| !Arc::ptr_eq(&there.lines, lines) || there.key != key;
        if turn.place.as_ref().is_some_and(moves) {
            self.leave(turn, false);
        }
        let line = self.lines[place].line(key);
        let mut at = now.saturating_add(told);
        if let Some(passed_at) = obstacle.passed_at
            && line.is_watched_by(turn.arrival, turn.home.as_ref())
        {
            at = at.min(passed_at);
        }
        let waiting = Waiting {
            tokens: self.draws[place].tokens(),
            home: turn.home.clone(),
            told: Told::At(at, obstacle.why),
            waker: waker.clone(),
        };
        line.wait(turn.arrival, waiting, self.wakes);
        turn.place.get_or_insert_with(|| Place {
            lines: Arc::clone(lines),
            buckets: self.asked.limits[place].buckets.clone(),
            key,
            arrival: turn.arrival,
            is_left: false,
        });
        turn.has_waited = true;
        turn.wait = Duration::from_nanos(at.saturating_sub(now).max(1));
        self.settle();
        true
    }

    /// Somebody may ask before the time that a store has told: any wake-up will do.
    fn too_early(&self, turn: &Turn, rules: &Rules) -> Option<Refused> {
        let (at, _) = turn.next_ask.filter(|(_, by)| *by == rules.edition)?;
        let wait = Duration::from_nanos(at.checked_sub(self.asked.now)?);
        let there = turn.place.as_ref()?;
        let is_there = |limited: &Arc<Limited>| Arc::ptr_eq(&limited.lines, &there.lines);
        let place = self.asked.limits.iter().position(is_there)?;
        let refused = self.refused_after_all(place, Reason::Rate, Some(wait), Fill::NOTHING);
        (wait > self.early).then_some(refused)
    }

    /// Whether a call that has a place is to ask a store already, since other processes wait there.
    fn lines_up(&self, turn: &Turn, refused: &Refused) -> bool {
        let buckets = self.asked.limits[refused.place].buckets.redis();
        refused.only_tokens
            && turn.next_ask.is_none()
            && buckets.is_some_and(|buckets| buckets.have_line())
    }

    /// Lets callers go the short way again where nothing is in theirs.
    fn settle(&mut self) {
        for (place, limited) in self.asked.limits.iter().enumerate() {
            let has_pauses = limited.buckets.has_pauses(self.asked.now);
            limited
                .buckets
                .hold(has_pauses || !self.lines[place].is_empty());
            let waiting = self.lines[place].waiting();
            limited.buckets.count_waiting(waiting);
        }
    }
}

/// Whether one more call of a bucket may run.
fn has_room(limited: &Limited, lines: &Locked<'_>, key: Option<Key>) -> bool {
    let most = limited.limit.most_concurrent();
    most.is_none_or(|most| lines.running(key) < most)
}

impl Obstacle {
    /// Never is longer than any time, and what nobody can tell is shorter.
    fn length(&self) -> (bool, Option<Duration>) {
        (self.reason == Reason::Cost, self.wait)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Limit;

    /// However slowly a simulation runs, its calls wait as long as it says.
    #[test]
    fn in_simulated_time_the_machines_clock_does_not_count() {
        let limit = Limit::per_second(1).max_wait(MAX_WAIT);
        let limiter = Limiter::builder().limit("search", limit).build();
        let limiter = limiter.expect("a limit in range");
        let call = Call::new("search");
        let second = Duration::from_secs(1);
        assert!(limiter.try_acquire_at(&call, second).is_admitted());
        for (mut turn, reads_the_clock) in [(Turn::simulated(), false), (Turn::default(), true)] {
            let polled = limiter.poll_acquire_at(&call, &mut turn, Waker::noop(), second);
            assert!(polled.is_pending());
            let (came, started) = turn.came.expect("it came");
            assert_eq!((came, started.is_some()), (nanos(second), reads_the_clock));
        }
    }
}
