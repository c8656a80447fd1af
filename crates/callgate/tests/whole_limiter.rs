//! The whole limiter against an exact model: any limits, any calls, any reloads, at any times.
#![cfg(not(loom))]

#[path = "whole_limiter/asked.rs"]
mod asked;
mod common;
#[path = "whole_limiter/model.rs"]
mod model;
#[path = "common/store.rs"]
mod store;

use std::collections::HashMap;
use std::time::Duration;

use asked::{CALLS, Change, Config, Request, changes, configs, requests};
use callgate::{Decision, Limiter, Reason, Rejection};
use common::{config, log_uniform};
use model::{Bucket, Held, Model, Spent};
use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;
use store::Stored;

/// A limiter's last nanosecond.
const END: u64 = (1 << 63) - 1;

/// A year. Longer waits are not waited for.
const LONG: u64 = 366 * 86_400 * 1_000_000_000;

/// When the next thing happens.
#[derive(Clone, Debug)]
enum When {
    /// At the same time as the one before.
    Same,
    Later(u64),
    /// By a clock reading that is this much too old: calls only.
    Back(u64),
}

#[derive(Clone, Debug)]
enum Step {
    Call(When, Request),
    /// The call that was refused last, exactly when it was told to come again.
    Retry,
    Reload(When, Vec<Change>),
}

fn steps(back: bool) -> impl Strategy<Value = Vec<Step>> {
    let later = || log_uniform().prop_map(|nanos| When::Later(nanos >> 22));
    let when = move || {
        prop_oneof![
            4 => Just(When::Same),
            3 => later(),
            u32::from(back) => log_uniform().prop_map(|nanos| When::Back(nanos >> 26)),
        ]
    };
    let step = prop_oneof![
        24 => (when(), requests()).prop_map(|(when, request)| Step::Call(when, request)),
        8 => Just(Step::Retry),
        2 => (prop_oneof![Just(When::Same), later()], prop::collection::vec(changes(), 0..4))
            .prop_map(|(when, changes)| Step::Reload(when, changes)),
    ];
    prop::collection::vec(step, 40)
}

/// A decision, and what it would have been in earnest where it was made in a dry run.
enum Outcome<'a> {
    Admitted(Option<u64>),
    Rejected(Rejection<'a>),
}

fn outcome<'a>(limiter: &'a Stored, request: &'a Request, now: u64) -> Outcome<'a> {
    let now = Duration::from_nanos(now);
    let decision = limiter.at(now).try_acquire_at(&request.call(), now);
    match decision {
        Decision::Admitted(permit) => match permit.overruled() {
            Some(rejection) => {
                assert!(limiter.is_dry_run());
                Outcome::Rejected(*rejection)
            }
            None => Outcome::Admitted(permit.remaining()),
        },
        Decision::Rejected(rejection) => {
            assert!(!limiter.is_dry_run());
            Outcome::Rejected(rejection)
        }
    }
}

/// A limiter, the model that follows its decisions, and what has happened so far.
struct Trace {
    limiter: Stored,
    /// Is given the admitted calls and the reloads only, and never looked at. None once a call came with
    /// an old reading: what that finds depends on which keys happen to be neighbours.
    undisturbed: Option<Stored>,
    asked: Config,
    model: Model,
    now: u64,
    latest: u64,
    /// When the limits changed last. Callers read the clock after they looked up their limits.
    changed: u64,
    /// The last refused call, and when it is due.
    due: Option<(Request, u64)>,
    /// What was spent from each bucket, and by each kind of call under each limit.
    spent: HashMap<String, Spent>,
}

impl Trace {
    fn new(asked: Config) -> Self {
        let limiter = || store::built(asked.builder());
        Self {
            limiter: limiter(),
            undisturbed: Some(limiter()),
            model: Model::new(&asked),
            asked,
            now: 0,
            latest: 0,
            changed: 0,
            due: None,
            spent: HashMap::new(),
        }
    }

    fn run(mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Call(when, request) => {
                    self.go_to(when);
                    self.call(request);
                }
                Step::Retry => {
                    if let Some((request, due)) = self.due.take() {
                        self.now = due;
                        let admitted = self.call(&request);
                        assert!(admitted, "refused at the time that it was told");
                    }
                }
                Step::Reload(when, changes) => {
                    self.go_to(when);
                    self.now = self.now.max(self.latest);
                    self.reload(changes);
                }
            }
            self.latest = self.latest.max(self.now);
            self.look();
        }
        for spent in self.spent.values_mut() {
            spent.check_every_window();
            spent.sort_by_time();
            spent.check_every_window();
        }
        self.probe();
    }

    fn go_to(&mut self, when: &When) {
        self.now = match *when {
            When::Same => self.now,
            When::Later(nanos) => self.now.saturating_add(nanos),
            When::Back(nanos) => self.now.saturating_sub(nanos).max(self.changed),
        };
        if self.now < self.latest {
            self.model.look_back();
            self.undisturbed = None;
        }
    }

    /// One call, with all that is to be said about it. Returns whether it was admitted.
    fn call(&mut self, request: &Request) -> bool {
        let held = self.model.limits_of(request);
        let mut names: Vec<&str> = held.iter().map(|held| &*held.name).collect();
        assert_eq!(self.limiter.limits_of(request.tool), names);
        names.sort_unstable();
        match outcome(&self.limiter, request, self.now) {
            Outcome::Admitted(remaining) => {
                self.admitted(request, remaining);
                true
            }
            Outcome::Rejected(rejection) => {
                let retry_after = rejected(&held, request, self.now, &rejection);
                self.due = retry_after.and_then(|wait| self.due(request, wait));
                false
            }
        }
    }

    fn admitted(&mut self, request: &Request, remaining: Option<u64>) {
        let now = self.now;
        let held = self.model.limits_of(request);
        for held in &held {
            let cost = held.cost(request);
            let level = held.bucket(request).level(now);
            assert!(
                level >= whole(cost),
                "{} of {level} in '{}'",
                cost,
                held.name
            );
        }
        if let Some(undisturbed) = &self.undisturbed {
            match outcome(undisturbed, request, now) {
                Outcome::Admitted(other) => assert_eq!(other, remaining),
                Outcome::Rejected(_) => panic!("a look or a refusal gave a token"),
            }
        }
        for held in self.model.limits_of_mut(request) {
            let cost = held.cost(request);
            for line in held.lines(request) {
                let spent = self.spent.entry(line).or_default();
                spent.admit(now, cost, held);
            }
            held.admit(request, now, cost);
        }
        self.due = None;
        let held = self.model.limits_of(request);
        assert_eq!(remaining.is_none(), held.is_empty());
        if let Some(remaining) = remaining {
            check_remaining(&held, request, now, remaining);
        }
    }

    /// When a refused call is due, if that is soon: not a nanosecond earlier, by the limiter itself.
    fn due(&self, request: &Request, wait: u128) -> Option<(Request, u64)> {
        let due = u64::try_from(u128::from(self.now) + wait).ok();
        let due = due.filter(|&due| due <= END.min(self.now.saturating_add(LONG)))?;
        let Outcome::Rejected(again) = outcome(&self.limiter, request, due - 1) else {
            panic!("retry_after was more than it takes");
        };
        assert_eq!(again.retry_after, Some(Duration::from_nanos(1)));
        Some((request.clone(), due))
    }

    fn reload(&mut self, changes: &[Change]) {
        for change in changes {
            self.asked.change(change);
        }
        let time = Duration::from_nanos(self.now);
        for limiter in [&self.limiter].into_iter().chain(&self.undisturbed) {
            limiter
                .reload_at(self.asked.builder(), time)
                .expect("limits in range");
        }
        self.model.reload(&self.asked, self.now);
        self.changed = self.now;
        self.due = None;
    }

    /// What the limiter shows of its levels.
    fn look(&self) {
        let levels = self.limiter.snapshot_at(Duration::from_nanos(self.now));
        assert_eq!(levels.len(), self.model.held.len());
        for (level, held) in levels.iter().zip(&self.model.held) {
            assert_eq!(level.name, held.name);
            assert_eq!(level.limit, held.asked.limit());
            if held.is_split() {
                assert_eq!(level.remaining, None);
                let drawn = held.drawn(self.latest);
                assert!(
                    (drawn..=held.known()).contains(&level.buckets),
                    "{level:?}, {drawn}"
                );
            } else {
                assert_eq!(level.buckets, 1);
                let remaining = level.remaining.expect("one bucket");
                held.base.check_remaining(self.now, remaining);
            }
        }
    }

    /// The limiter that was looked at, and refused calls, decides all as the one that was not.
    fn probe(&self) {
        let Some(undisturbed) = &self.undisturbed else {
            return;
        };
        let at = Duration::from_nanos(self.latest);
        let levels = |limiter: &Limiter| {
            let levels = limiter.snapshot_at(at).into_iter();
            // How many full buckets are still kept is a matter of chance.
            levels
                .map(|level| (level.name.to_owned(), level.limit, level.remaining))
                .collect::<Vec<_>>()
        };
        assert_eq!(levels(&self.limiter), levels(undisturbed));
        for request in CALLS.iter() {
            let [one, other] = [&self.limiter, undisturbed]
                .map(|limiter| format!("{:?}", limiter.try_acquire_at(&request.call(), at)));
            assert_eq!(one, other, "{request:?}");
        }
    }
}

/// What a refusal has to be, given the buckets that it comes from. Returns the nanoseconds to wait.
fn rejected(
    held: &[&Held],
    request: &Request,
    now: u64,
    rejection: &Rejection<'_>,
) -> Option<u128> {
    let refusing = held.iter().find(|held| held.name == rejection.limit());
    let refusing = refusing.expect("one of the call's limits");
    check_remaining(held, request, now, rejection.remaining());
    let too_dear = |held: &Held| held.cost(request) > held.asked.burst();
    let Some(wait) = rejection.retry_after else {
        assert_eq!(rejection.reason, Reason::Cost);
        assert!(too_dear(refusing), "never, for a cost that fits");
        return None;
    };
    assert_eq!(rejection.reason, Reason::Rate);
    assert!(!held.iter().any(|held| too_dear(held)), "a wait, for never");
    assert!(!wait.is_zero(), "refused, and told not to wait");
    let nanos = wait.as_nanos();
    for held in held {
        let longest = held.bucket(request).wait(now, held.cost(request));
        assert!(
            BigInt::from(nanos) >= longest,
            "told {wait:?} of {longest} ns in '{}'",
            held.name
        );
    }
    // A nanosecond earlier, an exact bucket would not have had the tokens for longer than is allowed.
    let just_before = BigInt::min(END.into(), BigInt::from(now) + nanos - 1);
    let late = refusing
        .bucket(request)
        .is_overdue(&just_before, refusing.cost(request));
    assert!(
        !late,
        "late by more than is allowed: told {wait:?} by {refusing:?}"
    );
    Some(nanos)
}

/// The whole tokens in the tightest bucket: of an exact one, or one less for what an exact bucket may
/// be ahead.
fn check_remaining(held: &[&Held], request: &Request, now: u64, remaining: u64) {
    let buckets = held.iter().map(|held| held.bucket(request));
    let least = |level: fn(&Bucket, u64) -> BigRational| {
        let levels = buckets.clone().map(|bucket| level(&bucket, now).floor());
        levels.min().expect("a limit").max(whole(0))
    };
    let (lowest, highest) = (least(Bucket::lowest_level), least(Bucket::level));
    let remaining = whole(remaining);
    assert!(
        (&lowest..=&highest).contains(&&remaining),
        "{remaining} for {lowest} to {highest}"
    );
}

fn whole(number: u64) -> BigRational {
    BigRational::from_integer(number.into())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_limiter_decides_as_its_model_through_every_reload(
        limits in configs(),
        steps in steps(false),
    ) {
        Trace::new(limits).run(&steps);
    }

    #[test]
    fn a_limiter_whose_callers_come_with_old_readings_admits_no_more_than_its_model(
        limits in configs(),
        steps in steps(true),
    ) {
        Trace::new(limits).run(&steps);
    }
}
