//! One limit a call, nobody late: every turn is known to the nanosecond.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use callgate::{Call, Decision, Limit, Reason};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::check_that_nothing_is_kept;
use super::simulation::{MS, Outcome, SECOND, Simulation};

const TOOLS: [&str; 2] = ["a", "b"];
const TENANTS: [&str; 2] = ["acme", "bolt"];

/// What a token is made of: a rate of n per second brings n of them in a nanosecond.
const TOKEN: u64 = 1_000_000_000;

/// How late a turn may come that was promised.
const GRACE: u64 = 50 * MS;

#[derive(Clone, Debug)]
pub(crate) struct Asked {
    rate: u64,
    burst: u64,
    per_tenant: bool,
    max_wait: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Pass(u64),
    Come { asks: Asks, home: u64 },
    Try(Asks),
    Leave(Index),
    AskEarly(Index),
    Pause(usize, u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Asks {
    tool: usize,
    tenant: usize,
    cost: u64,
    max_wait: Option<u64>,
}

pub(crate) fn limits() -> impl Strategy<Value = Vec<Asked>> {
    let limit = (
        select(&[1_u64, 2, 5, 10, 100][..]),
        1..6_u64,
        any::<bool>(),
        waits(),
    );
    let limit = limit.prop_map(|(rate, burst, per_tenant, max_wait)| Asked {
        rate,
        burst,
        per_tenant,
        max_wait,
    });
    prop::collection::vec(limit, TOOLS.len())
}

fn waits() -> impl Strategy<Value = u64> {
    select(&[0, SECOND, 1_950 * MS, 3 * SECOND, 10 * SECOND, 60 * SECOND][..])
}

fn asks() -> impl Strategy<Value = Asks> {
    let cost = prop_oneof![4 => Just(1_u64), 2 => 1..6_u64];
    let max_wait = prop::option::of(waits());
    (0..TOOLS.len(), 0..TENANTS.len(), cost, max_wait).prop_map(|(tool, tenant, cost, max_wait)| {
        Asks {
            tool,
            tenant,
            cost,
            max_wait,
        }
    })
}

/// What happens where nobody leaves, is in another home, or asks before they are to.
pub(crate) fn calm_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(prop_oneof![1 => pass(), 2 => come(1)], 1..60)
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pause = (0..TOOLS.len(), 1..300_u64);
    let step = prop_oneof![
        6 => pass(),
        12 => come(2),
        2 => asks().prop_map(Step::Try),
        2 => any::<Index>().prop_map(Step::Leave),
        1 => any::<Index>().prop_map(Step::AskEarly),
        1 => pause.prop_map(|(tool, time)| Step::Pause(tool, 10 * time * MS)),
    ];
    prop::collection::vec(step, 1..60)
}

fn pass() -> impl Strategy<Value = Step> {
    let ticks = (1..40_u64).prop_map(|ticks| ticks * 50 * MS);
    prop_oneof![2 => ticks, 1 => 1..2 * SECOND].prop_map(Step::Pass)
}

fn come(homes: u64) -> impl Strategy<Value = Step> {
    (asks(), 0..homes).prop_map(|(asks, home)| Step::Come { asks, home })
}

impl Asked {
    fn limit(&self) -> Limit {
        let limit = Limit::per_second(self.rate).burst(self.burst);
        let limit = limit.max_wait(Duration::from_nanos(self.max_wait));
        limit.per(self.per_tenant.then_some("tenant"))
    }
}

impl Asks {
    fn call(&self) -> Call<'static> {
        let call = Call::new(TOOLS[self.tool]).cost(self.cost.try_into().expect("not 0"));
        call.field("tenant", TENANTS[self.tenant])
    }
}

/// A bucket and those who wait for it.
#[derive(Clone)]
struct Queue {
    rate: u64,
    burst: u64,
    /// Below 0 until a pause ends.
    level: i128,
    at: u64,
    waiting: VecDeque<Waits>,
}

#[derive(Clone, Copy)]
struct Waits {
    call: usize,
    cost: u64,
    bound: u64,
}

impl Queue {
    fn full(asked: &Asked) -> Self {
        Self {
            rate: asked.rate,
            burst: asked.burst,
            level: i128::from(asked.burst * TOKEN),
            at: 0,
            waiting: VecDeque::new(),
        }
    }

    fn level(&self, now: u64) -> i128 {
        let passed = i128::from(now) - i128::from(self.at);
        let level = self.level + i128::from(self.rate) * passed;
        level.min(i128::from(self.burst * TOKEN))
    }

    /// The first time from `now` on at which it holds so much.
    fn ready(&self, now: u64, cost: u64) -> u64 {
        let missing = i128::from(cost * TOKEN) - self.level(now);
        let missing = u64::try_from(missing.max(0)).expect("at most the burst and a pause");
        now + missing.div_ceil(self.rate)
    }

    fn take(&mut self, now: u64, cost: u64) {
        (self.level, self.at) = (self.level(now) - i128::from(cost * TOKEN), now);
    }

    /// When the turn of somebody comes who asks for so much behind all who wait.
    fn turn(&self, now: u64, cost: u64) -> u64 {
        let mut queue = self.clone();
        let mut time = now;
        for waits in &self.waiting {
            time = queue.ready(time, waits.cost);
            queue.take(time, waits.cost);
        }
        queue.ready(time, cost)
    }

    /// Those whose turn comes until then, and when it does.
    fn serve(&mut self, from: u64, until: u64) -> Vec<(usize, u64)> {
        let mut served = Vec::new();
        let mut now = from;
        while let Some(&Waits { call, cost, .. }) = self.waiting.front() {
            now = self.ready(now, cost);
            if now > until {
                break;
            }
            self.take(now, cost);
            self.waiting.pop_front();
            served.push((call, now));
        }
        served
    }

    /// Lets nobody draw for some time, and nobody wait in vain: those who have to go.
    fn pause(&mut self, now: u64, until: u64) -> Vec<usize> {
        (self.level, self.at) = (self.level(until).min(0), until);
        let mut gone = Vec::new();
        for waits in std::mem::take(&mut self.waiting) {
            if self.turn(now, waits.cost) <= waits.bound + GRACE {
                self.waiting.push_back(waits);
            } else {
                gone.push(waits.call);
            }
        }
        gone
    }
}

struct Model<'a> {
    limits: &'a [Asked],
    queues: HashMap<(usize, Option<usize>), Queue>,
    /// When the latest pause of each limit ends: for buckets that nobody has drawn from yet.
    paused: Vec<Option<u64>>,
    outcomes: Vec<Outcome>,
    now: u64,
}

impl Model<'_> {
    fn waiting(&self, index: Index) -> Option<usize> {
        let calls = 0..self.outcomes.len();
        let waiting = calls.filter(|&call| self.outcomes[call] == Outcome::Waits);
        let waiting: Vec<_> = waiting.collect();
        (!waiting.is_empty()).then(|| *index.get(&waiting))
    }

    fn queue(&mut self, asks: &Asks) -> &mut Queue {
        let asked = &self.limits[asks.tool];
        let tenant = asked.per_tenant.then_some(asks.tenant);
        let paused = self.paused[asks.tool];
        self.queues.entry((asks.tool, tenant)).or_insert_with(|| {
            let mut queue = Queue::full(asked);
            if let Some(until) = paused {
                queue.pause(0, until);
            }
            queue
        })
    }

    fn serve(&mut self, until: u64) {
        for queue in self.queues.values_mut() {
            for (call, time) in queue.serve(self.now, until) {
                self.outcomes[call] = Outcome::Admitted(time);
            }
        }
        self.now = until;
    }

    /// Admits a call, or says when its turn would come: none where it never does.
    fn ask(&mut self, asks: &Asks) -> Result<(), Option<u64>> {
        let now = self.now;
        let queue = self.queue(asks);
        if asks.cost > queue.burst {
            return Err(None);
        }
        let turn = queue.turn(now, asks.cost);
        if turn > now || !queue.waiting.is_empty() {
            return Err(Some(turn));
        }
        queue.take(now, asks.cost);
        Ok(())
    }

    fn come(&mut self, asks: &Asks) {
        let (now, call) = (self.now, self.outcomes.len());
        let max_wait = asks.max_wait.unwrap_or(self.limits[asks.tool].max_wait);
        let outcome = match self.ask(asks) {
            Ok(()) => Outcome::Admitted(now),
            Err(Some(turn)) if turn - now <= max_wait => {
                self.queue(asks).waiting.push_back(Waits {
                    call,
                    cost: asks.cost,
                    bound: now + max_wait,
                });
                Outcome::Waits
            }
            Err(_) => Outcome::Rejected(now),
        };
        self.outcomes.push(outcome);
    }

    fn leave(&mut self, call: usize) {
        for queue in self.queues.values_mut() {
            queue.waiting.retain(|waits| waits.call != call);
        }
        self.outcomes[call] = Outcome::Gone;
        self.serve(self.now);
    }

    fn pause(&mut self, tool: usize, until: u64) {
        let before = self.paused[tool].get_or_insert(until);
        *before = until.max(*before);
        let queues = self.queues.iter_mut();
        for (_, queue) in queues.filter(|((of, _), _)| *of == tool) {
            for call in queue.pause(self.now, until) {
                self.outcomes[call] = Outcome::Rejected(self.now);
            }
        }
    }
}

/// How often calls asked, and how often that was needed: when they came, and when their turn did.
pub(crate) fn run(limits: &[Asked], steps: &[Step]) -> (usize, usize) {
    let given = TOOLS.iter().zip(limits);
    let mut simulation = Simulation::new(given.map(|(&tool, asked)| (tool, asked.limit())));
    let mut model = Model {
        limits,
        queues: HashMap::new(),
        paused: vec![None; limits.len()],
        outcomes: Vec::new(),
        now: 0,
    };
    let mut needed = 0;
    for step in steps {
        match step {
            Step::Pass(time) => model.serve(model.now + time),
            Step::Come { asks, home } => {
                model.come(asks);
                let call = simulation.come_for(
                    asks.call(),
                    Some(*home),
                    0,
                    asks.max_wait.map(Duration::from_nanos),
                );
                needed += 1 + usize::from(simulation.calls[call].waits());
            }
            Step::Try(asks) => check_try(&mut model, &simulation, asks),
            Step::Leave(index) => {
                if let Some(call) = model.waiting(*index) {
                    model.leave(call);
                    simulation.leave(call);
                }
            }
            Step::AskEarly(index) => {
                if let Some(call) = model.waiting(*index) {
                    simulation.poll(call);
                }
            }
            Step::Pause(tool, time) => {
                model.pause(*tool, model.now + time);
                simulation.pause(TOOLS[*tool], *time, None);
            }
        }
        simulation.until(model.now);
        check(&model, &simulation);
    }
    model.serve(model.now + 1_000 * SECOND);
    simulation.until(model.now);
    check(&model, &simulation);
    check_that_nothing_is_kept(&simulation.limiter);
    (simulation.polls, needed)
}

fn check(model: &Model<'_>, simulation: &Simulation) {
    let outcomes: Vec<_> = simulation.calls.iter().map(|call| call.outcome).collect();
    assert_eq!(outcomes, model.outcomes);
}

/// A call that does not wait is behind all who do, and is told when its turn comes if nobody else does.
fn check_try(model: &mut Model<'_>, simulation: &Simulation, asks: &Asks) {
    let decision = simulation
        .limiter
        .try_acquire_at(&asks.call(), simulation.time());
    match (model.ask(asks), decision) {
        (Ok(()), Decision::Admitted(_)) => {}
        (Err(turn), Decision::Rejected(rejection)) => {
            let wait = turn.map(|turn| Duration::from_nanos(turn - model.now));
            assert_eq!(rejection.retry_after, wait);
            let is_never = rejection.reason == Reason::Cost;
            assert_eq!(is_never, wait.is_none());
        }
        (turn, decision) => panic!("{decision:?}, not {turn:?}"),
    }
}
