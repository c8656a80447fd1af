//! Rules: which limits hold for a tool, and which of a limit's buckets a call draws from.
//!
//! A tool's limits are found once for each name. Names that limits give exactly are in a table made
//! for them; names that only patterns match are matched once and then remembered, as many as fit into
//! a cache of fixed size.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::SystemTime;
use std::{iter, mem, process};

use rustc_hash::FxBuildHasher;
use siphasher::sip128::{Hasher128, SipHasher13};
use wildmatch::WildMatch;

use crate::bucket::{Bucket, Price};
use crate::decision::{Call, Number};
use crate::limit::check_name;
use crate::names::{Names, same};
use crate::store::{Buckets, Key, Kind, Store, memory, shm};
use crate::waiting::{Lines, Wakes};
use crate::{ConfigError, Limit, OnStoreError};

/// The name of the limit for tools that no other limit holds for: nothing else can have it.
pub(crate) const DEFAULT: &str = "[default]";

/// How many names that are not given exactly are remembered, and how long they may be.
const REMEMBERED: usize = 256;
const LONGEST_REMEMBERED: usize = 256;

/// What a user asks for: the limits with their names, and what holds for the rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Config {
    pub(crate) limits: Vec<(String, Limit)>,
    pub(crate) default: Option<Limit>,
    pub(crate) dry_run: bool,
    pub(crate) on_store_error: Option<OnStoreError>,
    /// Whether all calls are to go the long way, where they are traced.
    pub(crate) traced: bool,
}

/// All limits, by tool.
#[derive(Debug)]
pub(crate) struct Rules {
    /// No other rules in this process have this number.
    pub(crate) edition: u64,
    /// Of the tools named exactly; none where calls are traced, which so go no short way.
    names: Names,
    traced_names: Option<Names>,
    routes: Box<[Route]>,
    /// In the order they were given, the default last.
    limits: Box<[Arc<Limited>]>,
    /// The limits that hold for some names not in `names`.
    patterns: Box<[Arc<Limited>]>,
    default: Box<[Arc<Limited>]>,
    remembered: Box<[Remembered]>,
    pub(crate) dry_run: bool,
    pub(crate) on_store_error: Option<OnStoreError>,
}

/// A tool that a limit names exactly.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) tool: Box<str>,
    /// The number of its name.
    pub(crate) number: Number,
    /// Where fields split none of its limits, none says how many calls may run, and this is no dry run.
    pub(crate) plain: Option<Plain>,
    pub(crate) limits: Box<[Arc<Limited>]>,
}

/// The buckets of limits that nothing splits, and what a call costs; at hand before the clock is read.
#[derive(Debug)]
pub(crate) enum Plain {
    /// With the number of the limit's name.
    One(Arc<memory::Buckets>, Price, Number),
    Several(Box<[(Arc<memory::Buckets>, Price)]>),
    /// The same in a shared store.
    Shared(Arc<shm::Buckets>, Price, Number),
}

/// A limit in force.
#[derive(Debug)]
pub(crate) struct Limited {
    /// The number of its name.
    pub(crate) number: Number,
    pub(crate) limit: Limit,
    pub(crate) buckets: Buckets,
    pub(crate) on_store_error: OnStoreError,
    /// Who waits for them, and how many calls run.
    pub(crate) lines: Arc<Lines>,
    tools: Box<[Tools]>,
    /// What splits it.
    parts: Box<[Part]>,
}

/// What a limit's `tools` says, or its name.
#[derive(Debug)]
enum Tools {
    Named(Box<str>),
    Like(WildMatch),
}

#[derive(Debug, PartialEq, Eq)]
enum Part {
    Tool,
    Field(Box<str>),
}

type Remembered = RwLock<Option<(Box<str>, Box<[Arc<Limited>]>)>>;

/// A limit that was found to be right, before it has buckets.
pub(crate) struct Checked<'a> {
    name: &'a str,
    limit: &'a Limit,
    bucket: Bucket,
    tools: Box<[Tools]>,
    parts: Box<[Part]>,
}

impl Config {
    /// The rules that this asks for. Limits that `old` rules have under the same name keep what is in
    /// their buckets: nothing happens to those unless all is right.
    pub(crate) fn rules(
        &self,
        store: &Store,
        old: Option<&Rules>,
        now: &dyn Fn() -> u64,
        number: impl Fn(&str) -> Number,
    ) -> Result<Rules, ConfigError> {
        let checked = self.check(store.kind())?;
        let before = old.iter().flat_map(|old| &old.limits);
        let before: HashMap<_, _> = before.map(|limited| (limited.number, limited)).collect();
        let limits = checked.into_iter().map(|checked| {
            let number = number(checked.name);
            let before = before.get(&number).map(|old| &***old);
            Ok(Arc::new(checked.in_force(
                store,
                self.on_store_error,
                (number, before),
                now,
            )?))
        });
        let limits = limits.collect::<Result<Box<[_]>, ConfigError>>()?;
        Ok(Rules::new(limits, self, number))
    }

    /// The limits, if all of them are right.
    pub(crate) fn check(&self, kind: Kind) -> Result<Vec<Checked<'_>>, ConfigError> {
        let mut seen = HashSet::with_capacity(self.limits.len());
        let mut checked = Vec::with_capacity(self.limits.len() + 1);
        for (name, limit) in &self.limits {
            let named = |error: ConfigError| error.of_limit(name);
            check_name(name)?;
            if !seen.insert(name) {
                return Err(named(ConfigError::new("name", "given once", "it twice")));
            }
            let tools = match limit.shared_by() {
                None => Box::from([Tools::new(name)]),
                Some(tools) => tools.iter().map(|tool| Tools::new(tool)).collect(),
            };
            let parts = limit.split_by().iter().map(|field| Part::new(field));
            checked.push(Checked {
                bucket: Bucket::new(limit).map_err(named)?,
                tools,
                parts: parts.collect(),
                name,
                limit,
            });
        }
        if let Some(limit) = &self.default {
            checked.push(Checked::default(limit).map_err(|error| error.of_limit(DEFAULT))?);
        }
        for Checked { name, limit, .. } in &checked {
            let on_store_error = limit.when_store_fails().or(self.on_store_error);
            let checked = kind.check(limit, on_store_error);
            checked.map_err(|error| error.of_limit(name))?;
        }
        Ok(checked)
    }
}

impl<'a> Checked<'a> {
    /// The limit for all other tools is one of many buckets, split by the tool.
    fn default(limit: &'a Limit) -> Result<Self, ConfigError> {
        if let Some(tools) = limit.shared_by() {
            let given = format!("{tools:?}");
            return Err(ConfigError::new(
                "tools",
                "left out: it holds for all other tools",
                given,
            ));
        }
        let fields = limit.split_by().iter().map(|field| Part::new(field));
        let others = fields.filter(|part| *part != Part::Tool);
        Ok(Self {
            name: DEFAULT,
            limit,
            bucket: Bucket::new(limit)?,
            tools: Box::default(),
            parts: iter::once(Part::Tool).chain(others).collect(),
        })
    }

    fn in_force(
        self,
        store: &Store,
        on_store_error: Option<OnStoreError>,
        (number, old): (Number, Option<&Limited>),
        now: &dyn Fn() -> u64,
    ) -> Result<Limited, ConfigError> {
        let Self {
            name,
            bucket,
            tools,
            parts,
            limit,
        } = self;
        let before = old.map(|old| (&old.buckets, old.parts != parts));
        let per: Vec<_> = parts.iter().map(Part::name).collect();
        let policy = limit.when_store_fails().or(on_store_error);
        Ok(Limited {
            number,
            on_store_error: policy.unwrap_or_default(),
            limit: limit.clone(),
            buckets: store.buckets((name, limit, &per), bucket, before, now)?,
            lines: old.map_or_else(Arc::default, |old| Arc::clone(&old.lines)),
            tools,
            parts,
        })
    }
}

impl Rules {
    fn new(limits: Box<[Arc<Limited>]>, config: &Config, number: impl Fn(&str) -> Number) -> Self {
        static EDITIONS: AtomicU64 = AtomicU64::new(0);
        let (given, default) = limits.split_at(config.limits.len());
        let patterns: Box<[_]> = given
            .iter()
            .filter(|limited| limited.has_pattern())
            .cloned()
            .collect();
        let mut by_name: HashMap<&str, Vec<Arc<Limited>>> = HashMap::new();
        for limited in given {
            for tool in limited.names() {
                by_name.entry(tool).or_default().push(Arc::clone(limited));
            }
        }
        let tools = given.iter().flat_map(|limited| limited.names());
        let routes = tools.filter_map(|tool| {
            let limits = by_name.remove(tool)?.into_iter();
            let like = patterns.iter().filter(|limited| limited.is_like(tool));
            Some(Route::new(
                tool,
                number(tool),
                in_order(limits.chain(like.cloned())),
                config.dry_run,
            ))
        });
        let routes: Box<[_]> = routes.collect();
        let names: Vec<&str> = routes.iter().map(|route| &*route.tool).collect();
        let mut names = Names::new(&names);
        let traced_names = config
            .traced
            .then(|| mem::replace(&mut names, Names::new(&[])));
        let remembered = if patterns.is_empty() { 0 } else { REMEMBERED };
        Self {
            edition: EDITIONS.fetch_add(1, Ordering::Relaxed),
            names,
            traced_names,
            patterns,
            default: default.into(),
            remembered: (0..remembered).map(|_| RwLock::default()).collect(),
            dry_run: config.dry_run,
            on_store_error: config.on_store_error,
            routes,
            limits,
        }
    }

    /// The limits in the order they were given, the default last.
    pub(crate) fn limits(&self) -> &[Arc<Limited>] {
        &self.limits
    }

    /// The only tool named exactly that may have this name, on the short way; the caller compares.
    #[inline]
    pub(crate) fn candidate(&self, tool: &str) -> Option<usize> {
        self.names.candidate(tool)
    }

    /// The tool of this name, if it is named exactly and has a short way.
    pub(crate) fn route(&self, tool: &str) -> Option<usize> {
        let index = self.names.candidate(tool)?;
        same(&self.routes[index].tool, tool).then_some(index)
    }

    #[inline]
    pub(crate) fn route_at(&self, index: usize) -> &Route {
        &self.routes[index]
    }

    /// Whether a tool for which there is no short way may be limited, or is traced.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        !(self.patterns.is_empty() && self.default.is_empty()) || self.traced_names.is_some()
    }

    /// Gives `then` the limits of a tool, and the number of its name if it is named exactly.
    pub(crate) fn with_limits<T>(
        &self,
        tool: &str,
        then: impl FnOnce(&[Arc<Limited>], Option<Number>) -> T,
    ) -> T {
        let names = self.traced_names.as_ref().unwrap_or(&self.names);
        let route = names.candidate(tool).map(|index| &self.routes[index]);
        if let Some(route) = route.filter(|route| same(&route.tool, tool)) {
            return then(&route.limits, Some(route.number));
        }
        if self.patterns.is_empty() {
            return then(&self.default, None);
        }
        let place = usize::try_from(FxBuildHasher.hash_one(tool) % REMEMBERED as u64).unwrap_or(0);
        let place = &self.remembered[place];
        // Nobody waits here: it is as well to match again.
        if let Ok(remembered) = place.try_read()
            && let Some((name, limits)) = &*remembered
            && **name == *tool
        {
            return then(limits, None);
        }
        let like = self.patterns.iter().filter(|limited| limited.is_like(tool));
        let limits = in_order(like.cloned());
        let limits = if limits.is_empty() {
            self.default.clone()
        } else {
            limits
        };
        if tool.len() <= LONGEST_REMEMBERED
            && let Ok(mut place) = place.try_write()
        {
            *place = Some((tool.into(), limits.clone()));
        }
        then(&limits, None)
    }

    /// Gives the memory of all buckets back that `next` does not go on with, and sends their callers away.
    pub(crate) fn close(&self, next: Option<&Self>) {
        let kept = next.iter().flat_map(|next| &next.limits);
        let kept: HashMap<_, _> = kept.map(|kept| (kept.number, &kept.buckets)).collect();
        for old in &self.limits {
            if !kept
                .get(&old.number)
                .is_some_and(|kept| kept.is(&old.buckets))
            {
                old.buckets.close();
            }
        }
    }

    /// Has all who wait ask again.
    pub(crate) fn wake_all(&self, wakes: &mut Wakes) {
        for limited in &self.limits {
            limited.lines.lock(wakes).wake_all(wakes);
        }
    }

    /// Has those ask again who wait where `next` have no such limit, or other keys.
    pub(crate) fn disperse(&self, next: &Self, wakes: &mut Wakes) {
        let next = next.limits.iter().map(|limited| (limited.number, limited));
        let next: HashMap<_, _> = next.collect();
        for old in &self.limits {
            let kept = next.get(&old.number);
            if !kept.is_some_and(|next| next.splits_like(old)) {
                old.lines.disperse(wakes);
            }
        }
    }
}

/// Limits, each once, in the order in which callers freeze.
fn in_order(limits: impl Iterator<Item = Arc<Limited>>) -> Box<[Arc<Limited>]> {
    let mut limits: Vec<_> = limits.collect();
    limits.sort_by_key(|limited| limited.buckets.order());
    limits.dedup_by_key(|limited| limited.buckets.order());
    limits.into()
}

impl Route {
    fn new(tool: &str, number: Number, limits: Box<[Arc<Limited>]>, dry_run: bool) -> Self {
        let plain = limits.iter().map(|limited| {
            let is_capped = limited.limit.most_concurrent().is_some();
            let plain = limited.parts.is_empty() && !dry_run && !is_capped;
            let price = limited.price(None).filter(|_| plain)?;
            Some((&limited.buckets, price))
        });
        let plain = plain.collect::<Option<Vec<_>>>();
        let plain = plain.and_then(|plain| Plain::new(&plain, &limits));
        Self {
            tool: tool.into(),
            number,
            plain,
            limits,
        }
    }
}

impl Plain {
    /// None for several limits of a shared store, or a store that is asked.
    fn new(plain: &[(&Buckets, Price)], limits: &[Arc<Limited>]) -> Option<Self> {
        if let ([(buckets, price)], [only]) = (plain, limits) {
            return match buckets {
                Buckets::Memory(buckets) => {
                    Some(Self::One(Arc::clone(buckets), *price, only.number))
                }
                Buckets::Shared(buckets) => {
                    Some(Self::Shared(Arc::clone(buckets), *price, only.number))
                }
                Buckets::Redis(_) => None,
            };
        }
        let all = plain.iter().map(|(buckets, price)| match buckets {
            Buckets::Memory(buckets) => Some((Arc::clone(buckets), *price)),
            Buckets::Shared(_) | Buckets::Redis(_) => None,
        });
        Some(Self::Several(all.collect::<Option<_>>()?))
    }
}

impl Limited {
    /// The tools that it names exactly.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tools| match tools {
            Tools::Named(name) => Some(&**name),
            Tools::Like(_) => None,
        })
    }

    fn has_pattern(&self) -> bool {
        let mut tools = self.tools.iter();
        tools.any(|tools| matches!(tools, Tools::Like(_)))
    }

    /// Whether one of its patterns matches.
    fn is_like(&self, tool: &str) -> bool {
        self.tools.iter().any(|tools| match tools {
            Tools::Named(_) => false,
            Tools::Like(pattern) => pattern.matches(tool),
        })
    }

    /// What a call comes to that costs so much, or does not say.
    pub(crate) fn price(&self, cost: Option<u64>) -> Option<Price> {
        self.buckets
            .bucket()
            .price(cost.unwrap_or(self.limit.default_cost()))
    }

    /// Whether another limit is split the same way.
    pub(crate) fn splits_like(&self, other: &Self) -> bool {
        self.parts == other.parts
    }

    /// Whether more is to be asked than whether there are tokens.
    #[inline]
    pub(crate) fn is_held(&self, now: u64) -> bool {
        self.buckets.is_held(now) || self.limit.most_concurrent().is_some()
    }

    /// The tool that a pause is for alone, where this is the default limit.
    pub(crate) fn paused_tool<'t>(&self, tool: &'t str) -> Option<&'t str> {
        self.tools.is_empty().then_some(tool)
    }

    /// The part of its buckets that a pause for a tool is for: all, but for the default limit.
    pub(crate) fn paused_part(&self, secret: &Secret, tool: &str) -> Option<Key> {
        self.paused_tool(tool).map(|tool| secret.key(tool))
    }

    /// Whether fields split it.
    pub(crate) fn is_split(&self) -> bool {
        !self.parts.is_empty()
    }

    /// The fields that split it, and a call's values.
    pub(crate) fn values<'l>(
        &'l self,
        call: &'l Call<'_>,
    ) -> impl Iterator<Item = (&'l str, Option<&'l str>)> {
        let parts = self.parts.iter();
        parts.map(|part| (part.name(), part.value(call)))
    }

    /// The key of a call's bucket, where something splits the limit.
    #[inline]
    pub(crate) fn key(&self, secret: &Secret, call: &Call<'_>) -> Option<Key> {
        if self.parts.is_empty() {
            return None;
        }
        let values = self.parts.iter().map(|part| part.value(call));
        Some(secret.key_of(values))
    }
}

/// The key of the bucket that a call has under a limit that these fields split.
#[cfg(all(feature = "shm", target_os = "linux", not(loom)))]
pub(crate) fn key_of(secret: &Secret, per: Vec<&str>, call: &Call<'_>) -> Key {
    let values = per.into_iter().map(|field| Part::new(field).value(call));
    secret.key_of(values)
}

/// A call's value of a field that splits a limit.
#[cfg(all(feature = "redis", not(loom)))]
pub(crate) fn value_of<'c>(field: &str, call: &Call<'c>) -> Option<&'c str> {
    Part::new(field).value(call)
}

impl Tools {
    fn new(text: &str) -> Self {
        if text.contains(['*', '?']) {
            Self::Like(WildMatch::new(text))
        } else {
            Self::Named(text.into())
        }
    }
}

impl Part {
    fn new(field: &str) -> Self {
        if field == "tool" {
            Self::Tool
        } else {
            Self::Field(field.into())
        }
    }

    #[inline]
    fn value<'c>(&self, call: &Call<'c>) -> Option<&'c str> {
        match self {
            Self::Tool => Some(call.tool()),
            Self::Field(name) => call.value(name),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Tool => "tool",
            Self::Field(name) => name,
        }
    }
}

/// A number that nobody can foretell, and another one in each process.
pub(crate) fn random() -> u64 {
    // The standard library has no other source of randomness, and its next one is the same in all forked children.
    RandomState::new().hash_one((process::id(), SystemTime::now()))
}

/// What fingerprints are made with: who does not know it cannot make two keys share a bucket.
///
/// `SipHash-1-3` of 128 bits (J.-P. Aumasson, D. J. Bernstein, "`SipHash`: a fast short-input PRF", 2012),
/// under a random secret that lives as long as the limiter, or as the store that it shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Secret(SipHasher13);

impl Secret {
    pub(crate) fn new() -> Self {
        Self::of([random(), random()])
    }

    /// One that somebody made before.
    pub(crate) fn of([one, other]: [u64; 2]) -> Self {
        Self(SipHasher13::new_with_keys(one, other))
    }

    /// Hashes names and fields.
    pub(crate) fn hasher(&self) -> SipHasher13 {
        self.0
    }

    /// No two calls that differ in a value hash the same bytes: these two are in no text.
    #[inline]
    fn key_of<'v>(&self, mut values: impl Iterator<Item = Option<&'v str>>) -> Key {
        const NONE: &[u8] = b"\xfe";
        const NEXT: &[u8] = b"\xff";
        let bytes = |value: Option<&'v str>| value.map_or(NONE, str::as_bytes);
        let first = bytes(values.next().flatten());
        let Some(second) = values.next() else {
            return Key::new(self.0.hash(first).as_u128());
        };
        let mut hasher = self.hasher();
        hasher.write(first);
        for value in iter::once(second).chain(values) {
            hasher.write(NEXT);
            hasher.write(bytes(value));
        }
        Key::new(hasher.finish128().as_u128())
    }

    pub(crate) fn key(&self, text: &str) -> Key {
        Key::new(self.0.hash(text.as_bytes()).as_u128())
    }
}
