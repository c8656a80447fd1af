//! The way to a store and back: one connection, one deadline for each call, and a breaker.
//!
//! The calls of a process go down one connection, which a thread of our own has made. What is asked while
//! it is busy goes out together, and the answers come back together: under load, a read and a write of the
//! socket are shared by many calls. What was sent is never sent again, for it may have been done; the one
//! exception is a call whose script the server does not know. A thread that waits for its answer, alone, has a
//! shorter way beside it: the [`lane`](super::lane).
//!
//! A call fails at its deadline, whatever it is waiting for. A connection that left something unanswered
//! for that long, or on which the store answered with an error that is not about one key, is given up, and
//! the store is *down*: calls fail at once and cost nothing, until a new connection has read and written a
//! key. That is tried at growing intervals. A connection that just ends is replaced without that.
//!
//! After a fork the child starts a thread and a connection of its own at its first call.
//!
//! A link that is closed answers what was asked before, and then its thread ends.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as blocking};
use std::task::Waker;
use std::thread::{self, ThreadId};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, Pipeline,
    PushInfo, PushKind, RedisResult, ServerErrorKind, Value,
};
use rustc_hash::FxBuildHasher;
use tokio::runtime;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, WeakUnboundedSender};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};

use super::address::{self, Address};
use super::lane::Lane;
use super::telling::{self, Telling, Word};
use super::{Answer, Failure, Request, in_words};
use crate::forking::unforked;
use crate::rules::random;
use crate::store::StoreCounts;

/// So many calls go out together at most: the first of them are not to wait for too many others.
const TOGETHER: usize = 256;

/// How long a store that is down is left alone: longer each time, and each time less a random part of up
/// to a half, so that many processes do not come at once.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A node of a cluster sends us to another so often at most.
const HOPS: usize = 4;

/// One line in such a time is enough to tell that keys are not as they should be.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// The way to one store.
pub(crate) struct Link {
    address: Arc<Address>,
    /// What is told of this process now and then, while there is a connection.
    pub(super) telling: Arc<Telling>,
    /// One for each process that this link was used in: this one, and those that it was forked from.
    runs: boxcar::Vec<Run>,
    is_closed: AtomicBool,
    /// Whether it was said that there can be no thread.
    is_told: AtomicBool,
}

/// The link in one process.
struct Run {
    process: u32,
    thread: ThreadId,
    queue: WeakUnboundedSender<Pending>,
    /// Until it is closed: what keeps the thread.
    keeps: Mutex<Option<UnboundedSender<Pending>>>,
    state: Arc<State>,
    lane: Lane,
}

/// What a thread tells about its store.
#[derive(Debug, Default)]
pub(super) struct State {
    down: Mutex<Option<Down>>,
    /// The number of the connection that the thread has: odd while there is one.
    connection: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    nanos: AtomicU64,
    /// The decisions that were made without it.
    alone: AtomicU64,
    /// What came of the last call that failed.
    last: Mutex<Option<Failure>>,
    /// When a key was last told of that is not as it should be.
    told: Mutex<Option<Instant>>,
}

#[derive(Clone, Debug)]
struct Down {
    reason: Arc<str>,
    since: Instant,
    /// When it is tried again.
    until: Instant,
}

/// Takes a result, and says whom to wake. Those of a batch are woken when all its answers are there.
type OnAnswer = Box<dyn FnOnce(Result<Answer, Failure>) -> Option<Waker> + Send>;

/// A request on its way; answered once, whatever happens.
pub(super) struct Pending {
    request: Request,
    asked: Instant,
    pub(super) deadline: Instant,
    answer: Option<OnAnswer>,
    state: Arc<State>,
}

impl Link {
    /// Connects to nothing yet.
    pub(crate) fn new(address: Address) -> Self {
        Self {
            address: Arc::new(address),
            telling: Arc::new(Telling::new()),
            runs: boxcar::Vec::new(),
            is_closed: AtomicBool::new(false),
            is_told: AtomicBool::new(false),
        }
    }

    /// Asks the store; `answer` is called once, on the store's thread or at once on this one, and must not
    /// block. It says whom to wake.
    pub(crate) fn ask(
        &self,
        request: Request,
        answer: impl FnOnce(Result<Answer, Failure>) -> Option<Waker> + Send + 'static,
    ) {
        if let Some((run, pending)) = self.begin(request, answer) {
            run.send(pending);
        }
    }

    /// Asks the store and waits for the answer. Not for threads on which others' tasks run.
    pub(crate) fn ask_blocking(&self, request: Request) -> Result<Answer, Failure> {
        let (answer, answered) = blocking::sync_channel(1);
        let asked = self.begin(request, move |result| {
            // The receiver waits below.
            let _ = answer.send(result);
            None
        });
        if let Some((run, mut pending)) = asked {
            if run.thread == thread::current().id() {
                // A logger asks, say: who would answer?
                pending.finish(Err(Failure::Lost));
            } else {
                run.lane.ask(pending, |pending| run.send(pending));
            }
        }
        answered.recv().unwrap_or(Err(Failure::Lost))
    }

    /// What is to be asked here; none if it is answered already.
    fn begin(
        &self,
        request: Request,
        answer: impl FnOnce(Result<Answer, Failure>) -> Option<Waker> + Send + 'static,
    ) -> Option<(&Run, Pending)> {
        let Some(run) = self.run() else {
            if let Some(waker) = answer(Err(Failure::Lost)) {
                waker.wake();
            }
            return None;
        };
        let asked = Instant::now();
        let mut pending = Pending {
            request,
            asked,
            deadline: asked + self.address.timeout,
            answer: Some(Box::new(answer)),
            state: Arc::clone(&run.state),
        };
        if let Some(failure) = run.state.failure() {
            pending.finish(Err(failure));
            return None;
        }
        Some((run, pending))
    }

    /// Answers what was asked before, and nothing more.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        if let Some(run) = self.here() {
            let kept = lock(&run.keeps).take();
            drop(kept);
            run.lane.close();
        }
    }

    /// What a request comes to now, where the store is known to be down.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.here()?.state.failure()
    }

    /// Counts a decision that was made without the store.
    pub(crate) fn count_alone(&self) {
        if let Some(run) = self.here() {
            run.state.alone.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Why calls fail, or the last one that did.
    pub(crate) fn last_failure(&self) -> Option<Failure> {
        let state = &self.here()?.state;
        let last = || lock(&state.last).clone();
        state.failure().or_else(last)
    }

    pub(crate) fn counts(&self) -> StoreCounts {
        let here = self.here();
        here.map_or_else(StoreCounts::default, |run| run.state.counts())
    }

    /// The link in this process, if it was used here.
    fn here(&self) -> Option<&Run> {
        let mut runs = self.runs.iter();
        runs.find_map(|(_, run)| run.is_here().then_some(run))
    }

    /// The link in this process. Nothing is locked: a lock may be held for ever in a process that was forked.
    fn run(&self) -> Option<&Run> {
        if let Some(run) = self.here() {
            return Some(run);
        }
        if self.is_closed.load(Ordering::Relaxed) {
            return None;
        }
        if self.runs.count() > 0 {
            self.telling.forget();
        }
        // Where two threads come here at once, the first one's is found, and the other ends unused.
        let run = Run::start(Arc::clone(&self.address), Arc::clone(&self.telling));
        let told = |error| {
            if !self.is_told.swap(true, Ordering::Relaxed) {
                log::warn!("the store at {} cannot be asked: {error}", self.address);
            }
        };
        self.runs.push(run.map_err(told).ok()?);
        self.is_told.store(false, Ordering::Relaxed);
        self.here()
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("address", &self.address)
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

impl Run {
    /// Starts a thread, which ends when this is dropped.
    fn start(address: Arc<Address>, telling: Arc<Telling>) -> std::io::Result<Self> {
        let (queue, asked) = mpsc::unbounded_channel();
        let (complain, complaints) = mpsc::unbounded_channel();
        let state = Arc::new(State::default());
        let lane = Lane::new(Arc::clone(&address), Arc::clone(&state), complain);
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let driver = Driver {
            word: Word::new(telling, &address.keys),
            address,
            asked,
            complaints,
            waiting: VecDeque::new(),
            state: Arc::clone(&state),
            pause: FIRST_PAUSE,
        };
        let thread = thread::Builder::new().name("callgate-redis".to_owned());
        let thread = thread.spawn(move || {
            // In a task of its own: what wakes another task there needs no system call.
            let driver = runtime.spawn(unforked(driver.run()));
            // Whoever asks a driver that panicked is told that it is gone.
            let _ = runtime.block_on(driver);
            // Does not wait for a name that is being looked up.
            runtime.shutdown_background();
        })?;
        Ok(Self {
            process: process::id(),
            thread: thread.thread().id(),
            queue: queue.downgrade(),
            keeps: Mutex::new(Some(queue)),
            state,
            lane,
        })
    }

    /// Has the thread ask. Where that is gone, dropping it answers.
    fn send(&self, pending: Pending) {
        if let Some(queue) = self.queue.upgrade() {
            drop(queue.send(pending));
        }
    }

    fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn down(&self) -> MutexGuard<'_, Option<Down>> {
        lock(&self.down)
    }

    /// What a call comes to now, where the store is down.
    fn failure(&self) -> Option<Failure> {
        let down = self.down();
        let down = down.as_ref()?;
        Some(Failure::Down {
            reason: Arc::clone(&down.reason),
            retry: down.until.saturating_duration_since(Instant::now()),
        })
    }

    /// The number of the connection that there is.
    pub(super) fn connection(&self) -> Option<u64> {
        let number = self.connection.load(Ordering::Relaxed);
        (number % 2 == 1).then_some(number)
    }

    fn counts(&self) -> StoreCounts {
        StoreCounts {
            is_down: self.down().is_some(),
            answered: self.answered.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.nanos.load(Ordering::Relaxed)),
            failed: self.failed.load(Ordering::Relaxed),
            alone: self.alone.load(Ordering::Relaxed),
        }
    }

    /// Tells of a failure that is about a key, unless one was told of not long ago.
    fn tell(&self, failure: &Failure) {
        let mut told = lock(&self.told);
        if told.is_none_or(|told| told.elapsed() > TELL_AGAIN) {
            *told = Some(Instant::now());
            drop(told);
            log::warn!("the store has a key that is not as it should be: {failure}");
        }
    }
}

impl Pending {
    /// Hands over the result, if nothing has been before.
    fn finish(&mut self, result: Result<Answer, Failure>) {
        if let Some(waker) = self.settle(result) {
            waker.wake();
        }
    }

    /// The same; says whom to wake.
    fn settle(&mut self, result: Result<Answer, Failure>) -> Option<Waker> {
        let answer = self.answer.take()?;
        match &result {
            Ok(_) => {
                let nanos = u64::try_from(self.asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
                self.state.nanos.fetch_add(nanos, Ordering::Relaxed);
                self.state.answered.fetch_add(1, Ordering::Relaxed);
            }
            Err(failure) => {
                self.state.failed.fetch_add(1, Ordering::Relaxed);
                *lock(&self.state.last) = Some(failure.clone());
            }
        }
        answer(result)
    }

    fn is_open(&self) -> bool {
        self.answer.is_some()
    }

    /// Whether its deadline is over; then it has failed.
    fn is_late(&mut self) -> bool {
        let is_late = self.deadline <= Instant::now();
        if is_late {
            self.finish(Err(Failure::Late));
        }
        is_late
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.finish(Err(Failure::Lost));
    }
}

/// What the thread does.
struct Driver {
    address: Arc<Address>,
    word: Word,
    asked: UnboundedReceiver<Pending>,
    /// Why the lane is no good, and beside which connection.
    complaints: UnboundedReceiver<(u64, String)>,
    /// Those that wait for a connection, in the order of their deadlines.
    waiting: VecDeque<Pending>,
    state: Arc<State>,
    /// How long the store is left alone when it fails the next time.
    pause: Duration,
}

/// How a connection came to its end.
pub(super) enum End {
    /// Before anybody asked, or since nobody will.
    Unused,
    /// By the other side; there may be another.
    Dropped,
    /// The store does not do what it should.
    Broken(String),
}

impl Driver {
    async fn run(mut self) {
        let mut end = End::Unused;
        loop {
            // Nobody asked since the last connection was made: there may be a server that ends each at once.
            if matches!(end, End::Unused) {
                match self.asked.recv().await {
                    Some(first) => self.waiting.push_back(first),
                    None => return,
                }
            }
            end = match self.connect().await {
                None => return,
                Some(Err(reason)) => End::Broken(reason),
                Some(Ok(connection)) => {
                    self.up();
                    let end = self.serve(connection).await;
                    self.state.connection.fetch_add(1, Ordering::Relaxed);
                    end
                }
            };
            if let End::Broken(reason) = &end {
                let until = self.down(reason);
                if !self.rest(until).await {
                    return;
                }
            }
        }
    }

    /// Makes a connection, while calls wait for it up to their deadlines; none if nobody asks any more.
    async fn connect(&mut self) -> Option<Result<Connection, String>> {
        let address = Arc::clone(&self.address);
        let connecting = connect(&address);
        tokio::pin!(connecting);
        let (mut is_closed, mut was_late) = (false, false);
        loop {
            if is_closed && self.waiting.is_empty() {
                let reason = || Err(format!("no answer in {:?}", address.timeout));
                return was_late.then(reason);
            }
            let deadline = self.waiting.front().map(|first| first.deadline);
            tokio::select! {
                // Whoever is late as the connection fails is late.
                biased;
                () = until(deadline) => {
                    if let Some(mut late) = self.waiting.pop_front() {
                        late.finish(Err(Failure::Late));
                        was_late = true;
                    }
                }
                connection = &mut connecting => return Some(connection),
                asked = self.asked.recv(), if !is_closed => match asked {
                    Some(asked) => self.waiting.push_back(asked),
                    None => is_closed = true,
                },
            }
        }
    }

    /// Sends what is asked down a connection until it ends.
    async fn serve(&mut self, mut connection: Connection) -> End {
        let mut flights = JoinSet::new();
        let mut batch: Vec<_> = self.waiting.drain(..).collect();
        let mut was_answered = false;
        self.word.begin();
        let mut ticks = interval_at(Instant::now() + telling::EVERY, telling::EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if !batch.is_empty() {
                let (commands, time) = (connection.commands.clone(), self.address.timeout);
                flights.spawn(unforked(fly(commands, std::mem::take(&mut batch), time)));
            }
            tokio::select! {
                // What is asked after an answer is to find out what came of that one.
                biased;
                Some(landed) = flights.join_next() => match landed {
                    Ok(None) => {
                        was_answered = true;
                        self.pause = FIRST_PAUSE;
                    }
                    Ok(Some(End::Dropped)) if !was_answered => {
                        return End::Broken("the connection ends before an answer".to_owned());
                    }
                    Ok(Some(end)) => {
                        // Some may be answered by now. Where the store is down, nobody waits for that.
                        if matches!(end, End::Dropped) {
                            flights.detach_all();
                        }
                        return end;
                    }
                    Err(failed) => return End::Broken(failed.to_string()),
                },
                // What is asked after a complaint is to find the store down.
                Some((number, reason)) = self.complaints.recv() => {
                    if self.state.connection() == Some(number) {
                        return End::Broken(reason);
                    }
                }
                // Those on their way would know more of it.
                () = connection.end(), if flights.is_empty() => {
                    return if was_answered { End::Dropped } else { End::Unused };
                }
                _ = ticks.tick() => if let Some(word) = self.word.next() {
                    let mut commands = connection.commands.clone();
                    let time = self.address.timeout;
                    // Whether it comes there does not matter, and nobody waits for it.
                    tokio::spawn(unforked(async move {
                        let _ = timeout(time, commands.send_packed_command(&word)).await;
                    }));
                },
                count = self.asked.recv_many(&mut batch, TOGETHER) => if count == 0 {
                    // What was asked before is answered, or late.
                    while let Some(landed) = flights.join_next().await {
                        if let Ok(Some(End::Broken(reason))) = landed {
                            return End::Broken(reason);
                        }
                    }
                    if let Some(word) = self.word.end() {
                        let told = connection.commands.send_packed_command(&word);
                        let _ = timeout(self.address.timeout, told).await;
                    }
                    return End::Unused;
                },
            }
        }
    }

    fn up(&mut self) {
        self.state.connection.fetch_add(1, Ordering::Relaxed);
        let down = self.state.down().take();
        if let Some(down) = down {
            let time = down.since.elapsed();
            log::warn!(
                "the store at {} answers again after {time:.1?}",
                self.address
            );
        }
    }

    /// Fails those who wait, and says when to try again.
    fn down(&mut self, reason: &str) -> Instant {
        let now = Instant::now();
        let until = now + part_of(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        let mut down = self.state.down();
        let before = down.as_ref().map(|down| down.since);
        *down = Some(Down {
            reason: reason.into(),
            since: before.unwrap_or(now),
            until,
        });
        drop(down);
        if before.is_none() {
            log::warn!("the store at {} is down: {reason}", self.address);
        }
        for mut waiting in self.waiting.drain(..) {
            if let Some(failure) = self.state.failure() {
                waiting.finish(Err(failure));
            }
        }
        until
    }

    /// Lets time pass. False if nobody asks any more.
    async fn rest(&mut self, time: Instant) -> bool {
        loop {
            tokio::select! {
                () = sleep_until(time) => return true,
                asked = self.asked.recv() => match (asked, self.state.failure()) {
                    // It was asked before the store was known to be down.
                    (Some(mut asked), Some(failure)) => asked.finish(Err(failure)),
                    (Some(_), None) => {}
                    (None, _) => return false,
                }
            }
        }
    }
}

/// From a half of a time to all of it.
fn part_of(time: Duration) -> Duration {
    let [random, ..] = random().to_le_bytes();
    time / 2 + time / 512 * u32::from(random)
}

/// Waits for that time, or for ever.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Sends requests together and hands out the answers; says if the connection is to be given up.
pub(super) async fn fly(
    mut connection: MultiplexedConnection,
    mut batch: Vec<Pending>,
    time: Duration,
) -> Option<End> {
    let mut end = send(&mut connection, &mut batch, time, true).await;
    batch.retain(Pending::is_open);
    if end.is_none() && !batch.is_empty() {
        // The server did not know the script, and did nothing.
        end = send(&mut connection, &mut batch, time, false).await;
    }
    end
}

/// Leaves those open that were sent `by_hash` to a server that does not know the script.
async fn send(
    connection: &mut MultiplexedConnection,
    batch: &mut Vec<Pending>,
    time: Duration,
    by_hash: bool,
) -> Option<End> {
    batch.retain_mut(|pending| !pending.is_late());
    if batch.is_empty() {
        return None;
    }
    let give_up = Instant::now() + time;
    let groups = Groups::of(batch);
    let mut pipeline = Pipeline::with_capacity(groups.all.len());
    for (place, &(first, count)) in groups.all.iter().enumerate() {
        // The first one's text is the script for all.
        let by_hash = by_hash || place > 0;
        pipeline.add_command(batch[first].request.command(count, by_hash));
    }
    let replies = connection.send_packed_commands(&pipeline, 0, groups.all.len());
    tokio::pin!(replies);
    let mut late = 0;
    let replies = loop {
        let first = batch.get_mut(late);
        let deadline = first.as_ref().map_or(give_up, |first| first.deadline);
        tokio::select! {
            biased;
            replies = &mut replies => break replies,
            () = passed(deadline) => match first {
                Some(first) => {
                    first.finish(Err(Failure::Late));
                    late += 1;
                }
                None => return Some(End::Broken(format!("no answer in {time:?}"))),
            }
        }
    };
    match replies {
        Ok(replies) => hand_out(&replies, batch, &groups, by_hash),
        Err(error) if error.is_connection_dropped() => Some(End::Dropped),
        Err(error) => Some(End::Broken(in_words(error))),
    }
}

/// Waits until a time is over. Where this process stood still, the answer may be there and was not read yet.
pub(super) async fn passed(time: Instant) {
    sleep_until(time).await;
    turns().await;
}

/// Has what is there be read: in the first turn the runtime hears of it, in the second one the connection reads it.
pub(super) async fn turns() {
    yield_now().await;
    yield_now().await;
}

/// Which requests of a batch are equal: the script answers them at once.
struct Groups {
    /// For each group its first request, and how many there are.
    all: Vec<(usize, u64)>,
    /// The group of each request.
    of: Vec<usize>,
}

impl Groups {
    fn of(batch: &[Pending]) -> Self {
        let mut groups = Self {
            all: Vec::with_capacity(batch.len()),
            of: Vec::with_capacity(batch.len()),
        };
        let mut known: HashMap<_, usize, _> = HashMap::with_hasher(FxBuildHasher);
        for (place, Pending { request, .. }) in batch.iter().enumerate() {
            let first = request.first();
            let known_as = first.and_then(|first| known.get(&first)).copied();
            let is_equal = |group: &usize| {
                let (first, _) = groups.all[*group];
                batch[first].request.equals(request)
            };
            let group = known_as.filter(is_equal).unwrap_or(groups.all.len());
            if let Some((_, count)) = groups.all.get_mut(group) {
                *count += 1;
            } else {
                groups.all.push((place, 1));
                known.extend(first.map(|first| (first, group)));
            }
            groups.of.push(group);
        }
        groups
    }
}

fn hand_out(
    replies: &[Value],
    batch: &mut [Pending],
    groups: &Groups,
    by_hash: bool,
) -> Option<End> {
    if replies.len() != groups.all.len() {
        return Some(End::Broken(Failure::Nonsense.to_string()));
    }
    let mut end = None;
    let replies = groups.all.iter().zip(replies);
    let mut answers: Vec<_> = replies
        .map(|(&(first, count), reply)| {
            let is_known = !by_hash || !is_unknown_script(reply);
            is_known.then(|| batch[first].request.read(count, reply))
        })
        .collect();
    let mut woken = Vec::with_capacity(batch.len());
    for (pending, &group) in batch.iter_mut().zip(&groups.of) {
        // Nobody waits for what is late: it is the last to be given something.
        let answer = answers[group].as_mut().filter(|_| pending.is_open());
        let Some(answer) = answer else {
            continue;
        };
        let result = match answer {
            Ok(answers) => pending.request.next(answers),
            Err(failure) => Err(failure.clone()),
        };
        match &result {
            Err(failure) if failure.is_about_a_key() => pending.state.tell(failure),
            Err(failure) => end = Some(End::Broken(failure.to_string())),
            Ok(_) => {}
        }
        woken.extend(pending.settle(result));
    }
    woken.into_iter().for_each(Waker::wake);
    end
}

fn is_unknown_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// A connection to a server.
pub(super) struct Connection {
    pub(super) commands: MultiplexedConnection,
    events: UnboundedReceiver<PushInfo>,
}

impl Connection {
    async fn open(server: RedisResult<ConnectionInfo>) -> Result<Self, String> {
        let server = server.map_err(in_words)?;
        if matches!(server.addr(), ConnectionAddr::TcpTls { .. }) {
            // Others in this process may have chosen another; two that are compiled in are none.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let (sender, events) = mpsc::unbounded_channel();
        // Its own times did not hold: every wait here has a deadline around it.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(sender);
        let client = Client::open(server).map_err(in_words)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Ok(Self {
            commands: connection.await.map_err(in_words)?,
            events,
        })
    }

    /// Waits until the other side has ended it.
    pub(super) async fn end(&mut self) {
        while let Some(event) = self.events.recv().await {
            if event.kind == PushKind::Disconnection {
                return;
            }
        }
    }
}

/// A connection that was seen to read and write a key, by the script's text and then by its hash.
pub(super) async fn connect(address: &Address) -> Result<Connection, String> {
    let proof = Request::Prove(address.keys.proof());
    let [first, second] = [false, true].map(|by_hash| proof.command(1, by_hash));
    let read = |reply: &Value| proof.read(1, reply);
    let mut connection = reach(address, &first, read).await?;
    let reply = timeout(
        address.timeout,
        connection.commands.send_packed_command(&second),
    )
    .await;
    let reply = reply.map_err(|_| format!("no answer in {:?}", address.timeout))?;
    let reply = reply.map_err(in_words)?;
    if !is_unknown_script(&reply) {
        read(&reply).map_err(|failure| failure.to_string())?;
    }
    Ok(connection)
}

/// A connection to the server that has the keys, by the first node that leads there: its answer to a first command,
/// which is about one of the keys, is one that can be read.
pub(super) async fn reach<T>(
    address: &Address,
    first: &Cmd,
    read: impl Fn(&Value) -> Result<T, Failure>,
) -> Result<Connection, String> {
    let mut reason = String::new();
    for node in &address.nodes {
        reason = match timeout(address.timeout, reach_by(address, node, first, &read)).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(reason)) => reason,
            // A server that does not speak TLS waits for the rest of what it takes for a command.
            Err(_) if matches!(node, ConnectionAddr::TcpTls { .. }) => {
                format!(
                    "{node}: no answer in {:?} (does it speak TLS?)",
                    address.timeout
                )
            }
            Err(_) => format!("{node}: no answer in {:?}", address.timeout),
        };
    }
    Err(reason)
}

async fn reach_by<T>(
    address: &Address,
    node: &ConnectionAddr,
    first: &Cmd,
    read: impl Fn(&Value) -> Result<T, Failure>,
) -> Result<Connection, String> {
    let mut node = match &address.service {
        Some(service) => {
            let asked = ask_sentinel(node, service).await;
            asked.map_err(|reason| format!("{node}: {reason}"))?
        }
        None => node.clone(),
    };
    for _ in 0..HOPS {
        let said = |reason: String| format!("{node}: {reason}");
        let connection = Connection::open(address.server(&node)).await;
        let mut connection = connection.map_err(said)?;
        let reply = connection.commands.send_packed_command(first).await;
        match read(&reply.map_err(in_words).map_err(said)?) {
            Ok(_) => return Ok(connection),
            Err(failure) => {
                let there = moved(&node, &failure);
                node = there.ok_or_else(|| said(failure.to_string()))?;
            }
        }
    }
    Err(format!("{node}: sent on and on"))
}

/// Where a node of a cluster sends us, if that is what its answer says.
fn moved(from: &ConnectionAddr, failure: &Failure) -> Option<ConnectionAddr> {
    let Failure::Refused(error) = failure else {
        return None;
    };
    let is_moved = error.kind() == ErrorKind::Server(ServerErrorKind::Moved);
    let (there, _) = error.redirect_node().filter(|_| is_moved)?;
    address::beside(from, there)
}

async fn ask_sentinel(node: &ConnectionAddr, service: &str) -> Result<ConnectionAddr, String> {
    let mut sentinel = Connection::open(Address::sentinel(node)).await?;
    let mut question = redis::cmd("SENTINEL");
    question.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let place = question.query_async::<Option<(String, u16)>>(&mut sentinel.commands);
    let place = place.await.map_err(in_words)?;
    let (host, port) = place.ok_or_else(|| format!("the sentinel knows no service '{service}'"))?;
    let server = address::beside(node, &format!("{host}:{port}"));
    server.ok_or_else(|| format!("the sentinel sends us to '{}'", host.escape_debug()))
}
