//! A limiter as the design page has it, in exact fractions: no clocks, no words, no threads.

use std::collections::HashMap;

use num_bigint::BigInt;
use num_rational::BigRational;

use super::asked::{Asked, Config, Request};
use super::whole;

/// A token bucket: a level that grows with time, up to the burst.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    rate: BigRational,
    burst: BigRational,
    level: BigRational,
    last: u64,
    /// The tokens by which callgate's bucket may be behind, since it rounds against the caller.
    behind: BigRational,
    /// Whether it may be behind by more: see [`Model::look_back`] and [`Held::is_back`].
    lenient: bool,
}

impl Bucket {
    fn full(asked: &Asked, now: u64) -> Self {
        let burst = whole(asked.burst());
        let rate = asked.given.rate.clone();
        Self {
            behind: allowed(&rate),
            level: burst.clone(),
            burst,
            rate,
            last: now,
            lenient: false,
        }
    }

    /// The level at `now`, were the bucket without a bound.
    fn unbounded(&self, now: &BigInt) -> BigRational {
        &self.level + &self.rate * (now - self.last)
    }

    pub(crate) fn level(&self, now: u64) -> BigRational {
        self.unbounded(&now.into()).min(self.burst.clone())
    }

    /// The lowest that callgate's bucket may be at.
    pub(crate) fn lowest_level(&self, now: u64) -> BigRational {
        if self.lenient {
            return whole(0);
        }
        (self.unbounded(&now.into()) - &self.behind).min(self.burst.clone())
    }

    pub(crate) fn check_remaining(&self, now: u64, remaining: u64) {
        let levels = [self.lowest_level(now), self.level(now)];
        let [lowest, highest] = levels.map(|level| level.floor().max(whole(0)));
        let remaining = whole(remaining);
        assert!(
            (&lowest..=&highest).contains(&&remaining),
            "{remaining}, not {lowest} to {highest}"
        );
    }

    /// The nanoseconds until it holds so much.
    pub(crate) fn wait(&self, now: u64, cost: u64) -> BigInt {
        let missing = whole(cost) - self.unbounded(&now.into());
        (missing / &self.rate).ceil().to_integer()
    }

    /// Whether it has held so much for longer than callgate may take to see it.
    pub(crate) fn is_overdue(&self, now: &BigInt, cost: u64) -> bool {
        !self.lenient && self.unbounded(now) - whole(cost) >= self.behind
    }

    fn admit(&mut self, now: u64, cost: u64) {
        if self.unbounded(&now.into()) >= &self.burst + &self.behind {
            self.behind = allowed(&self.rate);
        }
        self.level = self.level(now) - whole(cost);
        self.last = now;
    }

    /// The same tokens under another limit.
    fn carried(&self, asked: &Asked, now: u64) -> Self {
        let full = Self::full(asked, now);
        if full.rate == self.rate && full.burst == self.burst {
            return self.clone();
        }
        Self {
            level: self.level(now).min(full.burst.clone()),
            // Rounded once by the old limit and once by the new, before the next decision rounds.
            behind: &self.behind + allowed(&self.rate) + allowed(&full.rate) + &full.behind,
            lenient: self.lenient,
            ..full
        }
    }
}

/// The tokens by which a decision may be late: those of 2 ns, or 10^-9 if that is more.
fn allowed(rate: &BigRational) -> BigRational {
    let billion = BigRational::from_integer(1_000_000_000.into());
    (rate * whole(2)).max(billion.recip())
}

type Key = Vec<Option<&'static str>>;

/// A limit in force, and its buckets.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) asked: Asked,
    /// What splits it: for the default limit the tool in any case.
    per: Vec<&'static str>,
    /// The one bucket, or that in which every key starts.
    pub(crate) base: Bucket,
    keys: HashMap<Key, Bucket>,
    /// No other limit has this number, not even one of the same name after this one was removed.
    born: usize,
    /// What split it before, one after another.
    splits: Vec<Vec<&'static str>>,
    /// The bursts and rates that it has had, the latest last.
    had: Vec<(BigRational, BigRational)>,
}

impl Held {
    fn key(&self, request: &Request) -> Key {
        self.per.iter().map(|field| request.value(field)).collect()
    }

    pub(crate) fn is_split(&self) -> bool {
        !self.per.is_empty()
    }

    pub(crate) fn cost(&self, request: &Request) -> u64 {
        request.cost.map_or(self.asked.cost(), u64::from)
    }

    pub(crate) fn bucket(&self, request: &Request) -> Bucket {
        self.keys
            .get(&self.key(request))
            .unwrap_or(&self.base)
            .clone()
    }

    pub(crate) fn admit(&mut self, request: &Request, now: u64, cost: u64) {
        let key = self.key(request);
        if self.is_split() {
            let base = &self.base;
            let bucket = self.keys.entry(key).or_insert_with(|| base.clone());
            bucket.admit(now, cost);
        } else {
            self.base.admit(now, cost);
        }
    }

    /// How many keys have been drawn from.
    pub(crate) fn known(&self) -> usize {
        self.keys.len()
    }

    /// How many of them hold less than those that have not been.
    pub(crate) fn drawn(&self, now: u64) -> usize {
        let undrawn = self.base.level(now);
        self.keys
            .values()
            .filter(|bucket| bucket.level(now) < undrawn)
            .count()
    }

    /// What the bound holds for: the bucket, and the calls of this kind, which fall into one bucket
    /// after the other as other fields split the limit.
    pub(crate) fn lines(&self, request: &Request) -> [String; 2] {
        let (born, splits) = (self.born, self.splits.len());
        [
            format!("bucket {born} {splits} {:?}", self.key(request)),
            format!("calls {born} {}", request.kind()),
        ]
    }

    fn new(name: &str, asked: &Asked, per: Vec<&'static str>, born: usize) -> Self {
        // Full since ever.
        let base = Bucket::full(asked, 0);
        Self {
            name: name.to_owned(),
            asked: asked.clone(),
            had: vec![(base.burst.clone(), base.rate.clone())],
            base,
            per,
            keys: HashMap::new(),
            born,
            splits: Vec::new(),
        }
    }

    /// Whether the same fields split it before, in a store where other processes may have kept it that way.
    ///
    /// Those buckets count too, and have refilled at the old rate since.
    fn is_back(&self, per: &[&'static str]) -> bool {
        super::store::is_shared() && self.splits.iter().any(|split| split == per)
    }

    fn carried(&self, asked: &Asked, per: Vec<&'static str>, now: u64) -> Self {
        let mut buckets: Vec<_> = self.keys.values().chain([&self.base]).collect();
        let (base, keys, splits) = if per == self.per {
            let keys = self.keys.iter();
            let keys = keys.map(|(key, bucket)| (key.clone(), bucket.carried(asked, now)));
            (
                self.base.carried(asked, now),
                keys.collect(),
                self.splits.clone(),
            )
        } else {
            buckets.sort_by_key(|bucket| bucket.level(now));
            let behind = buckets.iter().map(|bucket| &bucket.behind).max();
            let emptiest = Bucket {
                behind: behind.expect("at least one").clone(),
                level: buckets[0].level(now),
                last: now,
                lenient: buckets.iter().any(|bucket| bucket.lenient),
                ..self.base.clone()
            };
            let mut carried = emptiest.carried(asked, now);
            carried.behind += allowed(&self.base.rate) + allowed(&asked.given.rate);
            carried.lenient |= self.is_back(&per);
            let splits = self.splits.iter().chain([&self.per]).cloned();
            (carried, HashMap::new(), splits.collect())
        };
        let mut had = self.had.clone();
        had.push((base.burst.clone(), base.rate.clone()));
        Self {
            name: self.name.clone(),
            asked: asked.clone(),
            born: self.born,
            had,
            per,
            base,
            keys,
            splits,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Model {
    /// In the order that they were given, the default last.
    pub(crate) held: Vec<Held>,
    /// Limits that were there before, in a store that keeps them.
    gone: Vec<Held>,
    has_default: bool,
    born: usize,
}

impl Model {
    pub(crate) fn new(asked: &Config) -> Self {
        let mut model = Self {
            held: Vec::new(),
            gone: Vec::new(),
            has_default: false,
            born: 0,
        };
        model.reload(asked, 0);
        model
    }

    pub(crate) fn reload(&mut self, config: &Config, now: u64) {
        let limits = config
            .limits
            .iter()
            .map(|(name, asked)| (*name, asked, asked.per.clone()));
        let default = config.default.as_ref().map(|asked| {
            let others = asked.per.iter().copied().filter(|field| *field != "tool");
            (
                "[default]",
                asked,
                ["tool"].into_iter().chain(others).collect(),
            )
        });
        let mut old = std::mem::take(&mut self.held);
        old.append(&mut self.gone);
        for (name, asked, per) in limits.chain(default) {
            let before = old.iter().find(|held| held.name == name);
            self.born += 1;
            self.held.push(match before {
                Some(held) => held.carried(asked, per, now),
                None => Held::new(name, asked, per, self.born),
            });
        }
        self.has_default = config.default.is_some();
        if super::store::is_shared() {
            // Other processes may have them still.
            let is_gone = |old: &Held| self.held.iter().all(|held| held.name != old.name);
            self.gone = old.into_iter().filter(is_gone).collect();
        }
    }

    /// A call comes with an old reading of the clock. If its bucket was dropped, as a full one at a
    /// later time, it starts from there: empty, for all that this call knows.
    pub(crate) fn look_back(&mut self) {
        for held in self.held.iter_mut().filter(|held| held.is_split()) {
            for bucket in held.keys.values_mut().chain([&mut held.base]) {
                bucket.lenient = true;
            }
        }
    }

    pub(crate) fn limits_of(&self, request: &Request) -> Vec<&Held> {
        let given = self.held.len() - usize::from(self.has_default);
        let (given, default) = self.held.split_at(given);
        let holding = given
            .iter()
            .filter(|held| held.asked.holds_for(&held.name, request.tool));
        let holding: Vec<_> = holding.collect();
        if holding.is_empty() {
            default.iter().collect()
        } else {
            holding
        }
    }

    pub(crate) fn limits_of_mut(&mut self, request: &Request) -> impl Iterator<Item = &mut Held> {
        let names: Vec<_> = self
            .limits_of(request)
            .iter()
            .map(|held| held.name.clone())
            .collect();
        self.held
            .iter_mut()
            .filter(move |held| names.contains(&held.name))
    }
}

/// What was spent from a bucket: when and how much, and which of its limit's settings it was under.
#[derive(Default)]
pub(crate) struct Spent {
    admitted: Vec<(u64, u64, usize)>,
    had: Vec<(BigRational, BigRational)>,
}

impl Spent {
    pub(crate) fn admit(&mut self, now: u64, cost: u64, held: &Held) {
        self.had.clone_from(&held.had);
        self.admitted.push((now, cost, self.had.len() - 1));
    }

    pub(crate) fn sort_by_time(&mut self) {
        self.admitted.sort_by_key(|&(now, ..)| now);
    }

    /// From each admission to each later one: at most the larger burst, and the larger rate x the time.
    pub(crate) fn check_every_window(&self) {
        for (first, &(from, _, first_under)) in self.admitted.iter().enumerate() {
            let mut spent = whole(0);
            for &(until, cost, under) in &self.admitted[first..] {
                spent += whole(cost);
                let had = &self.had[first_under..=under];
                let burst = had.iter().map(|(burst, _)| burst).max().expect("one");
                let rate = had.iter().map(|(_, rate)| rate).max().expect("one");
                let most = burst + rate * BigInt::from(until.saturating_sub(from));
                assert!(
                    spent <= most,
                    "{spent} from {from} to {until} ns, {most} at most"
                );
            }
        }
    }
}
