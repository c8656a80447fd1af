//! The store as a limiter has it: where each limit's buckets are, and what this process knows of them.
//!
//! Beside its buckets in the store, a limit has buckets of this process's own. Every answer takes from those
//! what the store does not have any more, so they never hold less than the store's, but for a clock that
//! runs otherwise. A call that they refuse is one that the store would refuse: it need not be asked. So
//! an agent in a loop costs the store nothing, and those who wait know how long. Where the store
//! fails, they decide in its place, and a process is given nothing then that it has spent before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use std::{mem, process};

use smallvec::SmallVec;

use super::address::Address;
use super::link::Link;
use super::telling::Account;
use super::{Answer, Ask, Failure, Found, Keys, Request, Terms};
use crate::bucket::{Bucket, Fill, MAX_NANOS};
use crate::clock::nanos;
use crate::rules::random;
use crate::store::{Key, StoreCounts, Verdict, memory};
use crate::waiting::forks;
use crate::{ConfigError, Limit};

/// Whether this is a store's URL; opens nothing.
#[cfg(feature = "config")]
pub(crate) fn check(url: &str) -> Result<(), ConfigError> {
    Address::parse(url).map(drop)
}

/// A store that is asked over a network.
#[derive(Debug)]
pub(crate) struct Store {
    address: Address,
    link: Arc<Link>,
    /// Tells this store's process from others that wait, together with the process's own.
    number: u64,
}

/// What a store was asked, in numbers: may outlive its limiter. See [`Limiter::store_meter`].
///
/// [`Limiter::store_meter`]: crate::Limiter::store_meter
#[derive(Clone, Debug)]
pub struct StoreMeter(Arc<Link>);

impl StoreMeter {
    /// The numbers, as they are now.
    #[must_use]
    pub fn counts(&self) -> StoreCounts {
        self.0.counts()
    }

    /// Why the store cannot be asked now, or could not the last time that it failed, in one line without user and
    /// password; none where it never failed in this process.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let failure = self.0.last_failure()?;
        Some(failure.to_string())
    }
}

/// Who reads the meter does not keep the thread.
impl Drop for Store {
    fn drop(&mut self) {
        self.link.close();
    }
}

impl Store {
    /// Connects to nothing yet.
    pub(crate) fn open(url: &str) -> Result<Self, ConfigError> {
        let address = Address::parse(url)?;
        let link = Arc::new(Link::new(address.clone()));
        Ok(Self {
            address,
            link,
            number: random(),
        })
    }

    /// What it is called in lines. A child that was forked is another.
    fn process(&self) -> u64 {
        self.number ^ u64::from(process::id())
    }

    /// Whether a URL is that of this store.
    pub(crate) fn is_at(&self, url: &str) -> bool {
        Address::parse(url).is_ok_and(|address| address == self.address)
    }

    /// How long a call waits for an answer at most.
    pub(crate) fn timeout(&self) -> Duration {
        self.address.timeout
    }

    /// Why there is no answer, where the store is known to be down.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.link.failure()
    }

    /// Says that a decision was made without it.
    pub(crate) fn count_alone(&self) {
        self.link.count_alone();
    }

    pub(crate) fn meter(&self) -> StoreMeter {
        StoreMeter(Arc::clone(&self.link))
    }

    /// Answers what was asked before, and nothing more.
    pub(crate) fn close(&self) {
        self.link.close();
    }

    /// Whether a limit is in range.
    pub(crate) fn check(limit: &Limit) -> Result<(), ConfigError> {
        Terms::new(limit).map(drop)
    }

    /// The buckets of a limit, which go on with what `old` ones know.
    pub(crate) fn buckets(
        &self,
        (name, limit, per): (&str, &Limit, &[&str]),
        bucket: Bucket,
        old: Option<(&Buckets, bool)>,
        now: &dyn Fn() -> u64,
    ) -> Result<Buckets, ConfigError> {
        let split = !per.is_empty();
        let own = match old {
            Some((old, new_keys)) => old.own.carry(bucket, split, new_keys, now),
            None => memory::Buckets::full(bucket, split),
        };
        let account = Arc::new(Account::new(name, per, Terms::new(limit)?));
        self.link.telling.add(&account);
        let keys = self.address.keys.clone();
        Ok(Buckets {
            whole: (keys.bucket(name, []), keys.pause(name, None)),
            keys,
            account,
            own,
            have_line: AtomicBool::new(false),
        })
    }

    /// Asks for a call's tokens; the answer wakes.
    pub(crate) fn ask(&self, mut question: Question, waker: &Waker) -> Asking {
        let forks = forks();
        let slot = Arc::new(Slot::default());
        slot.lock().waker = Some(waker.clone());
        let there = Arc::clone(&slot);
        self.link
            .ask(question.request(self.process()), move |result| {
                let mut state = there.lock();
                state.result = Some((result, Instant::now()));
                state.waker.take()
            });
        Asking {
            question,
            slot,
            forks,
        }
    }

    /// The same for a thread that has time.
    pub(crate) fn ask_blocking(&self, mut question: Question) -> Answered {
        let result = self.link.ask_blocking(question.request(self.process()));
        Answered {
            question,
            result,
            came: None,
        }
    }

    /// Asks what these buckets hold, which changes nothing; none where nothing is to be asked.
    pub(crate) fn peek<'b>(
        &self,
        buckets: impl Iterator<Item = &'b Buckets>,
        waker: Option<Waker>,
    ) -> Option<Peeking> {
        let asks = buckets.map(|buckets| buckets.ask(std::iter::empty(), None, 0));
        let asks: SmallVec<_> = asks.collect::<Option<_>>()?;
        if asks.is_empty() {
            return None;
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let forks = forks();
        self.link.ask(Request::Peek(asks), move |result| {
            // Nobody may wait for it any more.
            let _ = answer.send(result);
            waker
        });
        Some(Peeking {
            answered,
            told: None,
            forks,
        })
    }

    /// Lets nobody draw for so long; of the default limit only from the buckets of a tool.
    ///
    /// Nobody waits for that: until it comes there, whoever asks in this process is refused by its own buckets.
    pub(crate) fn pause(&self, buckets: &Buckets, tool: Option<&str>, time: Duration) {
        let request = Request::Pause {
            key: buckets.keys.pause(&buckets.account.name, tool),
            time,
            terms: Arc::clone(&buckets.account.terms),
        };
        let account = Arc::clone(&buckets.account);
        self.link.ask(request, move |result| {
            if let Err(failure) = result {
                let name = &account.name;
                log::warn!("limit '{name}' is paused in this process only: {failure}");
            }
            None
        });
    }
}

/// The buckets of one limit.
#[derive(Debug)]
pub(crate) struct Buckets {
    keys: Keys,
    /// The bucket and the pause of a call without fields.
    whole: (super::Key, super::Key),
    account: Arc<Account>,
    own: memory::Buckets,
    /// Whether other processes were found to wait for one of them.
    have_line: AtomicBool,
}

impl Buckets {
    /// What this process knows of them.
    pub(crate) fn own(&self) -> &memory::Buckets {
        &self.own
    }

    /// Whether they are those of such a limit.
    pub(crate) fn are_of(&self, limit: &Limit, bucket: &Bucket) -> bool {
        self.own.bucket == *bucket
            && Terms::new(limit).is_ok_and(|terms| terms == *self.account.terms)
    }

    /// Counts a decision, for those who look into the store.
    pub(crate) fn count(&self, admitted: bool) {
        self.account.count(admitted);
    }

    pub(crate) fn count_waiting(&self, waiting: usize) {
        self.account.count_waiting(waiting);
    }

    /// Whether who waits is to line up at once, with those of other processes.
    pub(crate) fn have_line(&self) -> bool {
        self.have_line.load(Ordering::Relaxed)
    }

    /// Gives this process's memory back, and is told of no more.
    pub(crate) fn close(&self) {
        self.account.close();
        self.own.close();
    }

    /// What a call asks of the limit, by its fields that split it and the tool by which it pauses; none for more
    /// than the burst.
    fn ask<'a>(
        &'a self,
        fields: impl Iterator<Item = (&'a str, Option<&'a str>)>,
        tool: Option<&str>,
        cost: u64,
    ) -> Option<Ask> {
        let Account { name, terms, .. } = &*self.account;
        let mut fields = fields.peekable();
        let (bucket, pause) = &self.whole;
        Some(Ask {
            price: terms.price(cost)?,
            terms: Arc::clone(terms),
            bucket: match fields.peek() {
                None => bucket.clone(),
                Some(_) => self.keys.bucket(name, fields),
            },
            pause: match tool {
                None => pause.clone(),
                Some(_) => self.keys.pause(name, tool),
            },
        })
    }

    /// Takes from a bucket of this process what the store's does not hold, which was so at this time.
    fn learn(&self, part: &Part, found: &Found, at: u64) {
        let full = at.saturating_add(nanos(found.refill)).min(MAX_NANOS);
        // Whoever finds one that has moved asks the store again.
        let _ = self.own.lift(part.key, self.own.bucket.full(full), at);
        if !found.paused.is_zero() {
            let until = at.saturating_add(nanos(found.paused)).min(MAX_NANOS);
            self.own.pause(part.paused, until, at);
        }
    }
}

/// What a call asks of its limits.
#[derive(Debug, Default)]
pub(crate) struct Question {
    asks: SmallVec<[Ask; 2]>,
    parts: SmallVec<[Part; 2]>,
    /// Of a call that has a place in a line, for each limit: how much longer it may wait.
    left: SmallVec<[Duration; 2]>,
}

/// What one of the limits knows of it.
#[derive(Debug)]
struct Part {
    buckets: Arc<Buckets>,
    key: Option<Key>,
    paused: Option<Key>,
}

impl Question {
    /// Adds a limit: by a call's fields that split it, the tool by which it pauses, and both of them as this
    /// process has them. And how much longer the call may wait for it, if it has a place in a line.
    pub(crate) fn add<'a>(
        &mut self,
        buckets: &'a Arc<Buckets>,
        (fields, key): (
            impl Iterator<Item = (&'a str, Option<&'a str>)>,
            Option<Key>,
        ),
        (tool, paused): (Option<&str>, Option<Key>),
        cost: u64,
        left: Option<Duration>,
    ) {
        // A call that costs more than the burst was refused before.
        if let Some(ask) = buckets.ask(fields, tool, cost) {
            self.asks.push(ask);
            self.left.extend(left);
            self.parts.push(Part {
                buckets: Arc::clone(buckets),
                key,
                paused,
            });
        }
    }

    /// To be sent once.
    fn request(&mut self, process: u64) -> Request {
        let (asks, left) = (mem::take(&mut self.asks), mem::take(&mut self.left));
        if left.is_empty() {
            return Request::Take(asks);
        }
        Request::Wait {
            asks,
            process,
            left,
        }
    }
}

/// A question that is on its way.
#[derive(Debug)]
pub(crate) struct Asking {
    question: Question,
    slot: Arc<Slot>,
    /// In which process it was asked: a forked child gets no answer.
    forks: u64,
}

/// Where the answer comes to.
#[derive(Debug, Default)]
struct Slot(Mutex<Awaited>);

#[derive(Debug, Default)]
struct Awaited {
    result: Option<(Result<Answer, Failure>, Instant)>,
    waker: Option<Waker>,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Awaited> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Asking {
    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Answered> {
        let mut awaited = self.slot.lock();
        let lost = || (self.forks != forks()).then(|| (Err(Failure::Lost), Instant::now()));
        let Some((result, at)) = awaited.result.take().or_else(lost) else {
            awaited.waker = Some(waker.clone());
            return Poll::Pending;
        };
        Poll::Ready(Answered {
            question: mem::take(&mut self.question),
            result,
            came: Some(at),
        })
    }
}

/// Nobody waits for the answer.
impl Drop for Asking {
    fn drop(&mut self) {
        self.slot.lock().waker = None;
    }
}

/// Buckets that the store is asked about.
#[derive(Debug)]
pub(crate) struct Peeking {
    answered: Receiver<Result<Answer, Failure>>,
    told: Option<Result<Answer, Failure>>,
    /// As of [`Asking`].
    forks: u64,
}

impl Peeking {
    pub(crate) fn is_told(&mut self) -> bool {
        if self.told.is_none() {
            let lost = || (self.forks != forks()).then_some(Err(Failure::Lost));
            self.told = self.answered.try_recv().ok().or_else(lost);
        }
        self.told.is_some()
    }

    pub(crate) fn wait(&mut self) {
        if !self.is_told() {
            self.told = self.answered.recv().ok();
        }
    }

    /// What they hold, if the store has told.
    pub(crate) fn found(self) -> Option<SmallVec<[Found; 2]>> {
        self.told?.ok().map(|answer| answer.limits)
    }
}

/// A question, and what it came to.
#[derive(Debug)]
pub(crate) struct Answered {
    question: Question,
    result: Result<Answer, Failure>,
    /// When it came, if not just now.
    came: Option<Instant>,
}

impl Answered {
    /// In simulated time an answer has no age.
    pub(crate) fn just_came(&mut self) {
        self.came = None;
    }

    /// The verdict. Before that, this process's buckets take in what the answer tells of the store's.
    pub(crate) fn verdict(self, now: u64) -> Result<Verdict, Failure> {
        let answer = self.result?;
        let age = self.came.map_or(Duration::ZERO, |came| came.elapsed());
        let at = now.saturating_sub(nanos(age));
        for (part, found) in self.question.parts.iter().zip(&answer.limits) {
            part.buckets.learn(part, found, at);
            if let Some(others) = answer.others {
                part.buckets.have_line.store(others > 0, Ordering::Relaxed);
            }
        }
        let tokens = answer.limits.iter().map(|found| found.tokens).min();
        let fill = Fill::of(tokens.unwrap_or(0));
        Ok(match answer.refusing() {
            None => {
                for part in &self.question.parts {
                    part.buckets.count(true);
                }
                Verdict::Admitted(fill)
            }
            Some(place) => {
                let wait = answer.limits[place].wait.saturating_sub(age);
                Verdict::Refused(place, Some(wait.max(Duration::from_nanos(1))), fill)
            }
        })
    }
}
