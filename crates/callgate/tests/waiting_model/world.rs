//! Several limits a call, homes that stop, callers that are late, pauses and reloads: what holds in any case.

use std::collections::HashMap;
use std::time::Duration;

use callgate::{Call, Limit, Limiter, LimiterBuilder};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::check_that_nothing_is_kept;
use super::simulation::{MS, Outcome, SECOND, Simulation, Waiting};

const LIMITS: [&str; 3] = ["first", "second", "third"];
const TOOLS: [&str; 3] = ["a", "b", "c"];
const TENANTS: [&str; 2] = ["acme", "bolt"];

/// What a token is made of: a rate of n per second brings n of them in a nanosecond.
const TOKEN: i128 = 1_000_000_000;

/// What a reload may round away.
const ROUNDED: i128 = TOKEN / 10_000;

/// For how long a turn is kept, and how late a turn may come that was promised.
const CLAIM: u64 = 50 * MS;

/// How late callers are, at most.
const LATEST: u64 = 5 * MS;

#[derive(Clone, Debug)]
pub(crate) struct Rule {
    rate: u64,
    burst: u64,
    per_tenant: bool,
    max_wait: u64,
    most: Option<u64>,
    /// Which of the tools it holds for.
    tools: Vec<bool>,
    is_given: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Rate(u64),
    Burst(u64),
    PerTenant(bool),
    MaxWait(u64),
    /// Of a limit that says how many calls may run.
    Most(u64),
    Given(bool),
    /// Whether it holds for one of the other limits' tools.
    Tool(usize, bool),
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Pass(u64),
    Come(Asks),
    /// A call gives up, before anybody else asks.
    Leave(Index),
    End(Index),
    Ask(Index),
    /// A home stops, and the one that was stopped goes on.
    Stop(u64),
    Go,
    Pause(usize, u64),
    Reload(usize, Change),
}

#[derive(Clone, Debug)]
pub(crate) struct Asks {
    tool: usize,
    tenant: usize,
    cost: u64,
    max_wait: Option<u64>,
    home: Option<u64>,
    late: u64,
}

fn rates() -> impl Strategy<Value = u64> {
    select(&[1_u64, 2, 5, 10][..])
}

fn waits() -> impl Strategy<Value = u64> {
    select(&[0, SECOND, 3 * SECOND, 20 * SECOND][..])
}

pub(crate) fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let most = prop_oneof![Just(None), (1..4_u64).prop_map(Some)];
    let tools = prop::collection::vec(prop::bool::weighted(0.6), TOOLS.len());
    let rule = (rates(), 1..6_u64, any::<bool>(), waits(), most, tools);
    let rule = rule.prop_map(|(rate, burst, per_tenant, max_wait, most, tools)| Rule {
        rate,
        burst,
        per_tenant,
        max_wait,
        most,
        tools,
        is_given: true,
    });
    prop::collection::vec(rule, LIMITS.len()).prop_map(|mut rules| {
        // Each holds for some tool.
        for (limit, rule) in rules.iter_mut().enumerate() {
            rule.tools[limit] = true;
        }
        rules
    })
}

fn asks() -> impl Strategy<Value = Asks> {
    let who = (0..TOOLS.len(), 0..TENANTS.len());
    let cost = prop_oneof![4 => Just(1_u64), 1 => 1..4_u64];
    let max_wait = prop::option::weighted(0.7, waits());
    let home = prop::option::weighted(0.8, 0..3_u64);
    let late = prop_oneof![Just(0), 0..=LATEST];
    (who, cost, max_wait, home, late).prop_map(|((tool, tenant), cost, max_wait, home, late)| {
        Asks {
            tool,
            tenant,
            cost,
            max_wait,
            home,
            late,
        }
    })
}

fn changes() -> impl Strategy<Value = Change> {
    prop_oneof![
        rates().prop_map(Change::Rate),
        (1..6_u64).prop_map(Change::Burst),
        any::<bool>().prop_map(Change::PerTenant),
        waits().prop_map(Change::MaxWait),
        (1..4_u64).prop_map(Change::Most),
        any::<bool>().prop_map(Change::Given),
        (1..TOOLS.len(), any::<bool>()).prop_map(|(tool, holds)| Change::Tool(tool, holds)),
    ]
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pass = prop_oneof![0..20 * MS, 0..SECOND, Just(500 * MS)];
    let limit = 0..LIMITS.len();
    let step = prop_oneof![
        12 => pass.prop_map(Step::Pass),
        16 => asks().prop_map(Step::Come),
        2 => any::<Index>().prop_map(Step::Leave),
        8 => any::<Index>().prop_map(Step::End),
        1 => any::<Index>().prop_map(Step::Ask),
        1 => (0..3_u64).prop_map(Step::Stop),
        1 => Just(Step::Go),
        1 => (limit.clone(), 1..2 * SECOND).prop_map(|(limit, time)| Step::Pause(limit, time)),
        1 => (limit, changes()).prop_map(|(limit, change)| Step::Reload(limit, change)),
    ];
    prop::collection::vec(step, 1..100)
}

impl Rule {
    fn limit(&self) -> Limit {
        let tools = TOOLS.iter().zip(&self.tools);
        let tools = tools.filter_map(|(&tool, &holds)| holds.then_some(tool));
        let limit = Limit::per_second(self.rate)
            .burst(self.burst)
            .max_wait(Duration::from_nanos(self.max_wait))
            .tools(tools)
            .per(self.per_tenant.then_some("tenant"));
        match self.most {
            Some(most) => limit.max_concurrent(most),
            None => limit,
        }
    }

    fn holds_for(&self, asks: &Asks) -> bool {
        self.is_given && self.tools[asks.tool]
    }
}

fn given(rules: &[Rule]) -> impl Iterator<Item = (&'static str, Limit)> {
    let given = LIMITS.iter().zip(rules);
    let given = given.filter(|(_, rule)| rule.is_given);
    given.map(|(&name, rule)| (name, rule.limit()))
}

fn builder(rules: &[Rule]) -> LimiterBuilder {
    given(rules).fold(Limiter::builder(), |builder, (name, limit)| {
        builder.limit(name, limit)
    })
}

/// What a bucket holds: below 0 until a pause ends.
#[derive(Clone, Copy)]
struct Level {
    units: i128,
    at: u64,
}

impl Level {
    fn at(self, now: u64, rule: &Rule) -> i128 {
        let passed = i128::from(now) - i128::from(self.at);
        let level = self.units + i128::from(rule.rate) * passed;
        level.min(i128::from(rule.burst) * TOKEN)
    }

    fn carried(self, now: u64, old: &Rule, new: &Rule) -> Self {
        let at = now.max(self.at);
        let units = self.at(at, old).min(i128::from(new.burst) * TOKEN);
        Self { units, at }
    }
}

/// One limit's buckets.
struct Held {
    rule: Rule,
    /// Of those that nobody has drawn from.
    base: Level,
    keys: HashMap<Option<usize>, Level>,
    /// Counts how often the keys came to mean something else, and the limit to be another.
    edition: usize,
    born: usize,
}

impl Held {
    fn new(rule: &Rule) -> Self {
        let units = i128::from(rule.burst) * TOKEN;
        Self {
            rule: rule.clone(),
            base: Level { units, at: 0 },
            keys: HashMap::new(),
            edition: 0,
            born: 0,
        }
    }

    fn key(&self, asks: &Asks) -> Option<usize> {
        self.rule.per_tenant.then_some(asks.tenant)
    }

    fn level(&self, key: Option<usize>, now: u64) -> i128 {
        let level = self.keys.get(&key).unwrap_or(&self.base);
        level.at(now, &self.rule)
    }

    fn take(&mut self, asks: &Asks, now: u64) {
        let (key, cost) = (self.key(asks), i128::from(asks.cost) * TOKEN);
        let units = self.level(key, now) - cost;
        assert!(units >= 0, "admitted without tokens: {units}");
        self.keys.insert(key, Level { units, at: now });
    }

    fn pause(&mut self, until: u64) {
        for level in self.keys.values_mut().chain([&mut self.base]) {
            if level.at <= until {
                let units = level.at(until, &self.rule).min(0);
                *level = Level { units, at: until };
            }
        }
    }

    fn reload(&mut self, change: &Change, now: u64) {
        let mut rule = self.rule.clone();
        match *change {
            Change::Rate(rate) => rule.rate = rate,
            Change::Burst(burst) => rule.burst = burst,
            Change::PerTenant(per_tenant) => rule.per_tenant = per_tenant,
            Change::MaxWait(max_wait) => rule.max_wait = max_wait,
            Change::Most(most) => rule.most = rule.most.map(|_| most),
            Change::Given(is_given) => rule.is_given = is_given,
            Change::Tool(tool, holds) => rule.tools[tool] = holds,
        }
        if rule.is_given != self.rule.is_given {
            *self = Self {
                born: self.born + 1,
                ..Self::new(&rule)
            };
            return;
        }
        for level in self.keys.values_mut().chain([&mut self.base]) {
            *level = level.carried(now, &self.rule, &rule);
        }
        if rule.per_tenant != self.rule.per_tenant {
            self.edition += 1;
            let levels = self.keys.values().copied().chain([self.base]);
            let emptiest = levels.min_by_key(|level| level.at(now, &rule));
            self.base = emptiest.unwrap_or(self.base);
            self.keys.clear();
        }
        self.rule = rule;
    }
}

/// What is known of a call beside its outcome.
struct Known {
    asks: Asks,
    came: u64,
    /// The longest that any rule of its tool let it wait.
    max_wait: u64,
    was_stopped: bool,
    /// The limits that held for it when it asked last: its place is at one of them.
    limits: Vec<usize>,
    is_admitted: bool,
    /// Under which limits it runs: in which edition.
    runs: Vec<Option<(usize, usize)>>,
}

struct World {
    simulation: Simulation,
    held: Vec<Held>,
    known: Vec<Known>,
    stopped: Option<u64>,
    /// When a home last stopped or went on, or the limits changed.
    changed: u64,
    has_changed: bool,
    /// Since when those could have been served before whom others are stopped.
    served_late: HashMap<usize, u64>,
}

pub(crate) fn run(rules: &[Rule], steps: &[Step]) {
    let mut world = World {
        simulation: Simulation::new(given(rules)),
        held: rules.iter().map(Held::new).collect(),
        known: Vec::new(),
        stopped: None,
        changed: 0,
        has_changed: false,
        served_late: HashMap::new(),
    };
    for step in steps {
        world.run(step);
    }
    world.finish();
}

impl World {
    fn run(&mut self, step: &Step) {
        match step {
            Step::Pass(time) => self.until(self.simulation.now + time),
            Step::Come(asks) => self.come(asks),
            Step::Leave(index) => {
                if let Some(call) =
                    self.some(*index, |simulation, call| simulation.calls[call].waits())
                {
                    self.simulation.leave(call);
                }
            }
            Step::End(index) => {
                if let Some(call) = self.some(*index, |simulation, call| {
                    simulation.calls[call].running.is_some()
                }) {
                    self.end(call);
                }
            }
            Step::Ask(index) => {
                let may_ask = |simulation: &Simulation, call: usize| {
                    let call = &simulation.calls[call];
                    call.waits() && !call.stopped
                };
                if let Some(call) = self.some(*index, may_ask) {
                    self.simulation.poll(call);
                    self.heard(call);
                }
            }
            Step::Stop(home) => self.stop(Some(*home)),
            Step::Go => self.stop(None),
            Step::Pause(limit, time) => self.pause(*limit, *time),
            Step::Reload(limit, change) => self.reload(*limit, change),
        }
    }

    /// One of the calls that this is true of.
    fn some(&self, index: Index, is: impl Fn(&Simulation, usize) -> bool) -> Option<usize> {
        let calls = (0..self.known.len()).filter(|&call| is(&self.simulation, call));
        let calls: Vec<_> = calls.collect();
        (!calls.is_empty()).then(|| *index.get(&calls))
    }

    fn come(&mut self, asks: &Asks) {
        let call = Call::new(TOOLS[asks.tool]).field("tenant", TENANTS[asks.tenant]);
        let call = call.cost(asks.cost.try_into().expect("not 0"));
        self.known.push(Known {
            asks: asks.clone(),
            came: self.simulation.now,
            max_wait: self.longest_wait(asks),
            was_stopped: false,
            limits: Vec::new(),
            is_admitted: false,
            runs: Vec::new(),
        });
        let is_stopped = asks.home.is_some() && asks.home == self.stopped;
        let late = if is_stopped { 0 } else { asks.late };
        let index = self.simulation.come_for(
            call,
            asks.home,
            late,
            asks.max_wait.map(Duration::from_nanos),
        );
        self.heard(index);
        self.simulation.calls[index].stopped = is_stopped;
        self.known[index].was_stopped = is_stopped;
    }

    fn longest_wait(&self, asks: &Asks) -> u64 {
        let rules = self
            .limits_of(asks)
            .into_iter()
            .map(|limit| self.held[limit].rule.max_wait);
        asks.max_wait.unwrap_or_else(|| rules.max().unwrap_or(0))
    }

    fn limits_of(&self, asks: &Asks) -> Vec<usize> {
        let held = self.held.iter().enumerate();
        let holding = held.filter(|(_, held)| held.rule.holds_for(asks));
        holding.map(|(limit, _)| limit).collect()
    }

    fn end(&mut self, call: usize) {
        self.simulation.end(call);
        self.known[call].runs.clear();
    }

    fn stop(&mut self, home: Option<u64>) {
        self.stopped = home;
        self.changed = self.simulation.now;
        let calls = self.simulation.calls.iter_mut().zip(&mut self.known);
        for (call, known) in calls {
            call.stopped = home.is_some() && known.asks.home == home;
            known.was_stopped |= call.stopped && call.waits();
        }
        self.served_late.clear();
    }

    fn pause(&mut self, limit: usize, time: u64) {
        let rule = &self.held[limit].rule;
        let Some(tool) = rule.tools.iter().position(|&holds| holds && rule.is_given) else {
            return;
        };
        let until = self.simulation.now + time;
        self.held[limit].pause(until);
        self.simulation
            .pause(TOOLS[tool], time, Some(LIMITS[limit]));
        self.has_changed = true;
    }

    fn reload(&mut self, limit: usize, change: &Change) {
        let change = match *change {
            Change::Tool(tool, holds) => Change::Tool((limit + tool) % TOOLS.len(), holds),
            _ => change.clone(),
        };
        self.held[limit].reload(&change, self.simulation.now);
        let rules: Vec<_> = self.held.iter().map(|held| held.rule.clone()).collect();
        self.simulation.reload(builder(&rules));
        (self.changed, self.has_changed) = (self.simulation.now, true);
        self.served_late.clear();
        for call in 0..self.known.len() {
            let longest = self.longest_wait(&self.known[call].asks);
            let known = &mut self.known[call];
            known.max_wait = known.max_wait.max(longest);
        }
    }

    fn until(&mut self, end: u64) {
        while let Some(call) = self.simulation.step(end) {
            self.heard(call);
            self.check();
        }
        self.simulation.now = end;
        self.check();
    }

    /// A call asked: what it came to is looked at.
    fn heard(&mut self, call: usize) {
        let now = self.simulation.now;
        self.known[call].limits = self.limits_of(&self.known[call].asks);
        match self.simulation.calls[call].outcome {
            Outcome::Admitted(_) => self.admitted(call),
            Outcome::Rejected(_) => self.rejected(call),
            Outcome::Waits => {}
            Outcome::Gone => unreachable!("{call} is gone at {now}"),
        }
    }

    fn admitted(&mut self, call: usize) {
        let now = self.simulation.now;
        let Known {
            asks,
            came,
            max_wait,
            was_stopped,
            ..
        } = &self.known[call];
        let asks = asks.clone();
        let latest = came + max_wait + CLAIM + asks.late;
        assert!(*was_stopped || now == *came || now <= latest, "too late");
        for limit in self.limits_of(&asks) {
            self.held[limit].take(&asks, now);
            let held = &self.held[limit];
            if let Some(most) = held.rule.most {
                let running = self.running(limit, held.key(&asks));
                assert!(running < most, "{running} run, and one more is to");
            }
        }
        for other in 0..call {
            assert!(
                !self.is_certainly_before(other, call),
                "{call} came after {other}, which waits"
            );
        }
        let editions = (0..self.held.len()).map(|limit| {
            let held = &self.held[limit];
            let is_counted = held.rule.holds_for(&asks) && held.rule.most.is_some();
            is_counted.then_some((held.born, held.edition))
        });
        let editions = editions.collect();
        (self.known[call].runs, self.known[call].is_admitted) = (editions, true);
    }

    /// How many calls of a bucket run, with those that were in no bucket that is there still.
    fn running(&self, limit: usize, key: Option<usize>) -> u64 {
        let held = &self.held[limit];
        let runs = |known: &&Known| {
            matches!(known.runs.get(limit), Some(Some((born, edition)))
                if *born == held.born && (*edition != held.edition || held.key(&known.asks) == key))
        };
        self.known.iter().filter(runs).count() as u64
    }

    /// Whether one waits for a bucket of another, came before it, and was never stopped.
    fn is_certainly_before(&self, one: usize, other: usize) -> bool {
        let known = [&self.known[one], &self.known[other]];
        let [asks, others] = known.map(|known| &known.asks);
        let [limit] = self.limits_of(asks)[..] else {
            return false;
        };
        let has_a_place =
            self.changed + LATEST < self.simulation.now || known[0].came > self.changed;
        self.simulation.calls[one].waits()
            && !known[0].was_stopped
            && has_a_place
            && self.shares(limit, asks, others)
    }

    fn shares(&self, limit: usize, one: &Asks, other: &Asks) -> bool {
        let held = &self.held[limit];
        held.rule.holds_for(one) && held.rule.holds_for(other) && held.key(one) == held.key(other)
    }

    /// Where nothing was changed, a call under one limit is refused for good reasons only.
    fn rejected(&mut self, call: usize) {
        let now = self.simulation.now;
        let known = &self.known[call];
        let ([limit], false) = (&self.limits_of(&known.asks)[..], self.has_changed) else {
            return;
        };
        let held = &self.held[*limit];
        let (rule, key) = (&held.rule, held.key(&known.asks));
        let max_wait = known.asks.max_wait.unwrap_or(rule.max_wait);
        let bound = known.came + max_wait;
        let before = (0..call).filter(|&other| {
            self.simulation.calls[other].waits()
                && self.shares(*limit, &self.known[other].asks, &known.asks)
        });
        let before: Vec<_> = before.collect();
        let on_time = |&other: &usize| {
            let Known {
                asks, was_stopped, ..
            } = &self.known[other];
            self.limits_of(asks).len() == 1 && !was_stopped && asks.late == 0
        };
        let cost: u64 = before
            .iter()
            .map(|&other| self.known[other].asks.cost)
            .sum();
        let missing = i128::from(cost + known.asks.cost) * TOKEN - held.level(key, now);
        let turn = i128::from(now) + missing / i128::from(rule.rate);
        assert!(
            known.asks.cost > rule.burst
                || now >= bound
                || turn > i128::from(bound)
                || !before.iter().all(on_time),
            "refused at {now}, with a turn at {turn} and a bound at {bound}"
        );
    }

    /// Nobody waits for a turn that has come.
    fn check(&mut self) {
        let now = self.simulation.now;
        for limit in 0..self.held.len() {
            for key in [None, Some(0), Some(1)] {
                self.check_bucket(limit, key, now);
            }
        }
        for call in 0..self.known.len() {
            self.check_first(call, now);
        }
    }

    /// The first of all who wait for any of its buckets is to ask once all of them would admit it.
    fn check_first(&self, call: usize, now: u64) {
        let (waiting, asks) = (&self.simulation.calls[call], &self.known[call].asks);
        if !waiting.waits() || waiting.stopped {
            return;
        }
        let would_admit = |&limit: &usize| {
            let held = &self.held[limit];
            let is_before = |&other: &usize| {
                self.simulation.calls[other].waits()
                    && (self.shares(limit, &self.known[other].asks, asks)
                        || self.is_left_over(other, limit))
            };
            let key = held.key(asks);
            let most = held.rule.most;
            most.is_none_or(|most| self.running(limit, key) < most)
                && held.level(key, now) >= i128::from(asks.cost) * TOKEN + ROUNDED
                && !(0..call).any(|other| is_before(&other))
        };
        assert!(
            waiting.next <= now + asks.late + MS || !self.limits_of(asks).iter().all(would_admit),
            "{call} is to ask at {}, though its turn has come at {now}",
            waiting.next
        );
    }

    /// Whether somebody may still have a place at a limit that does not hold for them any more.
    fn is_left_over(&self, call: usize, limit: usize) -> bool {
        let known = &self.known[call];
        self.simulation.calls[call].waits()
            && known.limits.contains(&limit)
            && !self.held[limit].rule.holds_for(&known.asks)
    }

    fn check_bucket(&mut self, limit: usize, key: Option<usize>, now: u64) {
        let held = &self.held[limit];
        let waits = |&call: &usize| {
            let asks = &self.known[call].asks;
            self.simulation.calls[call].waits()
                && held.rule.holds_for(asks)
                && held.key(asks) == key
        };
        let waiting: Vec<_> = (0..self.known.len()).filter(waits).collect();
        let is_stopped = |call: &usize| self.simulation.calls[*call].stopped;
        let stopped = waiting.iter().take_while(|call| is_stopped(call)).count();
        let Some(&call) = waiting.get(stopped) else {
            return;
        };
        let Known { asks, .. } = &self.known[call];
        let has_room = held
            .rule
            .most
            .is_none_or(|most| self.running(limit, key) < most);
        // Nobody is passed over before their own turn would have come.
        let front = &waiting[..=stopped];
        let cost = front.iter().map(|&call| self.known[call].asks.cost).max();
        let cost = i128::from(cost.unwrap_or(0)) * TOKEN;
        let has_tokens = held.level(key, now) >= cost + ROUNDED;
        let is_alone = |call: &usize| self.limits_of(&self.known[*call].asks).len() == 1;
        let is_known = front.iter().all(is_alone)
            && !(0..self.known.len()).any(|call| self.is_left_over(call, limit));
        if !(has_room && has_tokens && is_known) {
            self.served_late.remove(&call);
            return;
        }
        let since = *self.served_late.entry(call).or_insert(now);
        let allowed = if stopped == 0 {
            asks.late
        } else {
            (stopped as u64 + 1) * (CLAIM + 2 * LATEST)
        };
        assert!(
            now <= since + allowed,
            "{call} waits at {now}, though its turn came at {since}"
        );
    }

    /// All go on, all who run end, and then nobody waits any more.
    fn finish(&mut self) {
        self.stop(None);
        for _ in 0..100 {
            for call in 0..self.known.len() {
                self.end(call);
            }
            self.until(self.simulation.now + SECOND);
        }
        let calls = self.simulation.calls.iter();
        assert!(!calls.clone().any(Waiting::waits), "for ever");
        check_that_nothing_is_kept(&self.simulation.limiter);
        let admitted = self.known.iter().map(|known| known.is_admitted);
        assert!(
            calls
                .map(|call| matches!(call.outcome, Outcome::Admitted(_)))
                .eq(admitted)
        );
    }
}
