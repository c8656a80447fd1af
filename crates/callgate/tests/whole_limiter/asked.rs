//! What is asked of a limiter: limits, calls and changes of limits, from all that is allowed.

use std::num::NonZeroU64;
use std::sync::LazyLock;

use callgate::{Call, Limit, Limiter, LimiterBuilder, MAX_BURST};
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};

use super::common::{Given, UNITS, given as asked_for, in_range, limits, log_uniform};

/// Names of limits. Without `tools` they are names of tools or patterns, too.
const NAMES: &[&str] = &[
    "search", "crm_find", "crm_*", "l??kup", "*", "shared", "budget",
];

/// What a limit's `tools` can name.
const PATTERNS: &[&str] = &[
    "search",
    "crm_find",
    "crm_load",
    "lookup",
    "\u{e9}t\u{e9}",
    "crm_*",
    "*_find",
    "l??kup",
    "?t?",
    "*",
    "*o*",
];

const TOOLS: &[&str] = &[
    "search",
    "crm_find",
    "crm_load",
    "crm_",
    "lookup",
    "look up",
    "\u{e9}t\u{e9}",
    "a",
    "other",
    "[default]",
    "",
];

const FIELDS: &[&str] = &["tenant", "user", "tool"];

const VALUES: &[&str] = &[
    "a", "b", "c", "d", "", "None", "missing", "default", "a:b", "a\0b", "search",
];

/// A limit as it is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) given: Given,
    tools: Option<Vec<&'static str>>,
    pub(crate) per: Vec<&'static str>,
    /// More than a bucket can hold counts from 1 again.
    cost: u64,
}

impl Asked {
    pub(crate) fn limit(&self) -> Limit {
        let limit = self
            .given
            .limit
            .clone()
            .cost(self.cost())
            .per(self.per.iter().copied());
        match &self.tools {
            Some(tools) => limit.tools(tools.iter().copied()),
            None => limit,
        }
    }

    pub(crate) fn burst(&self) -> u64 {
        self.given.limit.capacity()
    }

    pub(crate) fn cost(&self) -> u64 {
        self.cost % self.burst() + 1
    }

    /// Whether a limit of this name holds for a tool.
    pub(crate) fn holds_for(&self, name: &str, tool: &str) -> bool {
        let one = [name];
        let tools = self.tools.as_deref().unwrap_or(&one);
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        tools
            .iter()
            .any(|pattern| matches(&letters(pattern), &letters(tool)))
    }
}

fn matches(pattern: &[char], name: &[char]) -> bool {
    match (pattern, name) {
        ([], _) => name.is_empty(),
        (['*', rest @ ..], _) => (0..=name.len()).any(|skipped| matches(rest, &name[skipped..])),
        (['?', rest @ ..], [_, others @ ..]) => matches(rest, others),
        ([one, rest @ ..], [other, others @ ..]) => one == other && matches(rest, others),
        (_, []) => false,
    }
}

/// All that a limiter is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) limits: Vec<(&'static str, Asked)>,
    pub(crate) default: Option<Asked>,
    dry_run: bool,
}

impl Config {
    pub(crate) fn builder(&self) -> LimiterBuilder {
        let builder = Limiter::builder().dry_run(self.dry_run);
        let limits = self.limits.iter();
        let builder = limits.fold(builder, |builder, (name, asked)| {
            builder.limit(*name, asked.limit())
        });
        match &self.default {
            Some(asked) => builder.default_limit(asked.limit()),
            None => builder,
        }
    }

    pub(crate) fn change(&mut self, change: &Change) {
        let known =
            |limits: &[(&str, Asked)], name: &str| limits.iter().any(|(other, _)| *other == name);
        match change {
            Change::Limit(index, change) => {
                let place = index.index(self.limits.len() + 1);
                match (self.limits.get_mut(place), &mut self.default) {
                    (Some((_, asked)), _) => change_one(asked, change, false),
                    (None, Some(asked)) => change_one(asked, change, true),
                    (None, None) => (),
                }
            }
            Change::Add(name, asked) if !known(&self.limits, name) => {
                self.limits.push((name, asked.clone()));
            }
            Change::Rename(index, name)
                if !self.limits.is_empty() && !known(&self.limits, name) =>
            {
                let index = index.index(self.limits.len());
                self.limits[index].0 = name;
            }
            Change::Remove(index) if !self.limits.is_empty() => {
                self.limits.remove(index.index(self.limits.len()));
            }
            Change::Add(..) | Change::Rename(..) | Change::Remove(_) => (),
            Change::Default(asked) => self.default.clone_from(asked),
            Change::DryRun(dry_run) => self.dry_run = *dry_run,
        }
    }
}

fn change_one(asked: &mut Asked, change: &OneChange, is_default: bool) {
    match change {
        OneChange::Given(given) => asked.given = given.clone(),
        OneChange::Burst(burst) if asked.given.limit.as_quota().is_none() => {
            asked.given.limit = asked.given.limit.clone().burst(*burst);
        }
        OneChange::Tools(tools) if !is_default => asked.tools.clone_from(tools),
        OneChange::Burst(_) | OneChange::Tools(_) => (),
        OneChange::Per(per) => asked.per.clone_from(per),
        OneChange::Cost(cost) => asked.cost = *cost,
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Limit(Index, OneChange),
    Add(&'static str, Asked),
    Remove(Index),
    Rename(Index, &'static str),
    Default(Option<Asked>),
    DryRun(bool),
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few at a time")]
pub(crate) enum OneChange {
    Given(Given),
    Burst(u64),
    Tools(Option<Vec<&'static str>>),
    Per(Vec<&'static str>),
    Cost(u64),
}

/// A call. Its fields are in the order of their names, and those it has are all different.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    pub(crate) tool: &'static str,
    tenant: Option<&'static str>,
    user: Option<&'static str>,
    pub(crate) cost: Option<NonZeroU64>,
}

impl Request {
    pub(crate) fn call(&self) -> Call<'_> {
        // Nobody looks at these two.
        let call = Call::new(self.tool)
            .field("session", "1")
            .field("tool", "not a tool");
        let fields = [("tenant", self.tenant), ("user", self.user)];
        let call = fields
            .into_iter()
            .fold(call, |call, (field, value)| match value {
                Some(value) => call.field(field, value),
                None => call,
            });
        match self.cost {
            Some(cost) => call.cost(cost),
            None => call,
        }
    }

    pub(crate) fn value(&self, field: &str) -> Option<&'static str> {
        match field {
            "tool" => Some(self.tool),
            "tenant" => self.tenant,
            "user" => self.user,
            _ => None,
        }
    }

    /// All that tells it from other calls, apart from the cost.
    pub(crate) fn kind(&self) -> String {
        format!("{:?}", (self.tool, self.tenant, self.user))
    }
}

/// Every tool with every value in one of the fields.
pub(crate) static CALLS: LazyLock<Vec<Request>> = LazyLock::new(|| {
    let values = || VALUES.iter().map(|&value| Some(value)).chain([None]);
    let of = |tool| {
        values().flat_map(move |value| {
            [
                (value, None),
                (value, Some("a")),
                (Some("a"), value),
                (None, value),
            ]
            .map(|(tenant, user)| Request {
                tool,
                tenant,
                user,
                cost: None,
            })
        })
    };
    TOOLS.iter().copied().flat_map(of).collect()
});

pub(crate) fn requests() -> impl Strategy<Value = Request> {
    // Few values, so that calls meet in a bucket; and all.
    let value = || {
        prop_oneof![
            4 => select(&VALUES[..2]).prop_map(Some),
            2 => select(VALUES).prop_map(Some),
            2 => Just(None),
        ]
    };
    let cost = prop_oneof![
        6 => Just(None),
        3 => (1..6_u64).prop_map(NonZeroU64::new),
        1 => log_uniform().prop_map(NonZeroU64::new),
    ];
    let tool = prop_oneof![3 => select(&TOOLS[..3]), 2 => select(TOOLS)];
    (tool, value(), value(), cost).prop_map(|(tool, tenant, user, cost)| Request {
        tool,
        tenant,
        user,
        cost,
    })
}

pub(crate) fn configs() -> impl Strategy<Value = Config> {
    let limits = subsequence(NAMES, 0..6)
        .prop_shuffle()
        .prop_flat_map(|names| {
            let asked = prop::collection::vec(asked(), names.len());
            asked.prop_map(move |asked| names.iter().copied().zip(asked).collect())
        });
    let default = prop::option::of(asked_of_default());
    (limits, default, prop::bool::weighted(0.1)).prop_map(|(limits, default, dry_run)| Config {
        limits,
        default,
        dry_run,
    })
}

fn asked() -> impl Strategy<Value = Asked> {
    (given(), tools(), per(), cost()).prop_map(|(given, tools, per, cost)| Asked {
        given,
        tools,
        per,
        cost,
    })
}

fn asked_of_default() -> impl Strategy<Value = Asked> {
    asked().prop_map(|asked| Asked {
        tools: None,
        ..asked
    })
}

fn given() -> impl Strategy<Value = Given> {
    prop_oneof![6 => few_tokens(), 2 => limits(), 2 => quotas()]
}

/// Limits that a few calls come up against: a few tokens in a unit of time, or in several.
fn few_tokens() -> impl Strategy<Value = Given> {
    (0..3_usize, 1..20_u64, 1..9_u64).prop_map(|(unit, count, burst)| {
        let (name, seconds) = UNITS[unit];
        let text = format!("{count}/{name}");
        let limit = text.parse::<Limit>().expect("a rate").burst(burst);
        asked_for(limit, &count.to_string(), seconds, text)
    })
}

/// Any quota that is allowed.
fn quotas() -> impl Strategy<Value = Given> {
    let most = |seconds: u32| u64::from(seconds) * 1_000_000_000;
    let counts = prop_oneof![2 => 2..40_u64, 1 => log_uniform()];
    (0..4_usize, counts, log_uniform())
        .prop_map(move |(unit, count, burst)| {
            let (name, seconds) = UNITS[unit];
            let count = count % most(seconds) + 2;
            let burst = burst % (count - 1).min(MAX_BURST) + 1;
            let limit = Limit::parse_quota(&format!("{count}/{name}")).expect("a quota");
            let asked = format!("quota {count}/{name}");
            asked_for(
                limit.burst(burst),
                &(count - burst).to_string(),
                seconds,
                asked,
            )
        })
        .prop_filter("out of range", |given| in_range(&given.rate))
}

fn tools() -> impl Strategy<Value = Option<Vec<&'static str>>> {
    prop::option::weighted(0.7, subsequence(PATTERNS, 1..4).prop_shuffle())
}

fn per() -> impl Strategy<Value = Vec<&'static str>> {
    prop_oneof![
        2 => Just(Vec::new()),
        3 => subsequence(FIELDS, 1..=3).prop_shuffle(),
    ]
}

fn cost() -> impl Strategy<Value = u64> {
    prop_oneof![5 => Just(0), 2 => 1..4_u64, 1 => log_uniform()]
}

pub(crate) fn changes() -> impl Strategy<Value = Change> {
    let one = prop_oneof![
        4 => given().prop_map(OneChange::Given),
        3 => (1..10_u64).prop_map(OneChange::Burst),
        1 => tools().prop_map(OneChange::Tools),
        2 => per().prop_map(OneChange::Per),
        1 => cost().prop_map(OneChange::Cost),
    ];
    prop_oneof![
        10 => (any::<Index>(), one).prop_map(|(index, change)| Change::Limit(index, change)),
        2 => (select(NAMES), asked()).prop_map(|(name, asked)| Change::Add(name, asked)),
        1 => any::<Index>().prop_map(Change::Remove),
        1 => (any::<Index>(), select(NAMES)).prop_map(|(index, name)| Change::Rename(index, name)),
        1 => prop::option::of(asked_of_default()).prop_map(Change::Default),
        1 => any::<bool>().prop_map(Change::DryRun),
    ]
}
