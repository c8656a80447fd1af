//! Buckets in Redis: what a decision costs against a bare round trip, for one caller and for many.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use callgate::{Call, Limiter};
use redis::aio::MultiplexedConnection;
use redis::{Client, Connection, Script};
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{self, Runtime};

use crate::measure::{Case, Figure};
use crate::peers::{Rate, Row};

#[path = "../../../crates/callgate/src/store/redis/tests/server.rs"]
#[expect(dead_code, reason = "tests use the rest")]
mod server;

use server::Server;

const TOOL: &str = "lookup_customer";
const NAMES: [&str; 3] = ["one", "two", "three"];

/// So many calls are timed together: a fraction of a second.
const SLICE: u32 = 200;

/// So many callers ask at once, for so long, so often.
pub(crate) const CALLERS: [usize; 2] = [16, 256];
const WHILE: Duration = Duration::from_millis(300);
const TIMES: usize = 15;

pub(crate) const PING: &str = "`PING`, blocking";
const PINGS: &str = "`PING`, multiplexed, on the caller's thread";
pub(crate) const SENT: &str = "`PING`, multiplexed, on a thread of its own";
pub(crate) const SCRIPT: &str = "the least such script, blocking";
pub(crate) const TRY: &str = "**try_acquire**";
pub(crate) const AWAITED: &str = "**acquire**";
pub(crate) const THREE: &str = "**try_acquire** under three limits";

/// What a decision reads and writes, and no decision.
const LEAST: &str = "redis.call('TIME') redis.call('GET', KEYS[1]) redis.call('GET', KEYS[2]) \
    redis.call('SET', KEYS[1], ARGV[1], 'PX', '10000') return 1";

/// A server of this program's own.
pub(crate) struct Store {
    server: Server,
    url: String,
}

impl Store {
    /// None where there is no `redis-server` on the PATH.
    pub(crate) fn start() -> Option<Self> {
        let version = Command::new("redis-server")
            .arg("--version")
            .stdout(Stdio::null())
            .status();
        version.is_ok_and(|status| status.success()).then(|| {
            let server = Server::start();
            let url = format!("{}?prefix=bench&timeout=20s", server.url());
            Self { server, url }
        })
    }

    fn client(&self) -> Client {
        Client::open(self.server.url()).expect("a URL")
    }

    async fn multiplexed(client: Client) -> MultiplexedConnection {
        let connection = client.get_multiplexed_async_connection();
        connection.await.expect("it listens")
    }

    fn limiter(&self, limits: usize, burst: u32) -> Limiter {
        let rate = Rate::new(1_000_000_000, "s");
        let names = NAMES[..limits].iter();
        let builder = names.fold(Limiter::builder(), |builder, name| {
            builder.limit(*name, rate.limit(burst).tools([TOOL]))
        });
        builder.store(&*self.url).build().expect("limits in range")
    }

    /// A bare round trip.
    pub(crate) fn ping(&self) -> Row {
        let connection = self.client().get_connection().expect("it listens");
        let case = Case::new(Mutex::new(connection), |connection, _| {
            ping(&mut connection.lock().expect("no panic"))
        });
        (PING, case.in_slices_of(SLICE))
    }

    /// Round trips of one caller.
    pub(crate) fn rows(&self, burst: u32) -> Vec<Row> {
        let own = runtime::Builder::new_current_thread().enable_all().build();
        let own = own.expect("a runtime");
        let connection = own.block_on(Self::multiplexed(self.client()));
        let pings = Case::new((Mutex::new(own), connection), |(own, connection), _| {
            let own = own.lock().expect("no panic");
            own.block_on(ping_by(connection.clone()))
        });
        let apart = workers(1);
        let connection = apart.block_on(Self::multiplexed(self.client()));
        let sent = Case::new((apart, connection), |(apart, connection), _| {
            apart.block_on(ping_by(connection.clone()))
        });
        let connection = self.client().get_connection().expect("it listens");
        let script = Case::new(
            (Script::new(LEAST), Mutex::new(connection)),
            |(script, connection), _| {
                let mut asked = script.key("{bench}:bucket");
                asked.key("{bench}:pause").arg("1:1:1:0:1:1:0");
                let connection = &mut *connection.lock().expect("no panic");
                asked.invoke::<u64>(connection).is_ok()
            },
        );
        let tried = |limits| {
            Case::new(self.limiter(limits, burst), |limiter, _| {
                limiter.try_acquire(&Call::new(TOOL)).is_admitted()
            })
        };
        let awaited = Case::new(
            (self.limiter(1, burst), workers(1)),
            |(limiter, runtime), _| {
                runtime
                    .block_on(limiter.acquire(&Call::new(TOOL)))
                    .is_admitted()
            },
        );
        let rows = [
            self.ping(),
            (PINGS, pings),
            (SENT, sent),
            (SCRIPT, script),
            (TRY, tried(1)),
            (AWAITED, awaited),
            (THREE, tried(3)),
        ];
        rows.map(|(name, case)| (name, case.in_slices_of(SLICE)))
            .into()
    }

    /// What many callers at once get: of round trips, and of decisions.
    pub(crate) fn many(&self, callers: usize, burst: u32) -> [Many; 2] {
        let runtime = workers(2);
        let connection = runtime.block_on(Self::multiplexed(self.client()));
        let limiter = Arc::new(self.limiter(1, burst));
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..TIMES {
            runs[0].push(run(&runtime, callers, || {
                let connection = connection.clone();
                move || ping_by(connection.clone())
            }));
            runs[1].push(run(&runtime, callers, || {
                let limiter = Arc::clone(&limiter);
                move || {
                    let limiter = Arc::clone(&limiter);
                    async move { limiter.acquire(&Call::new(TOOL)).await.is_admitted() }
                }
            }));
        }
        runs.map(|runs| {
            let of = |figure: fn(&(f64, f64)) -> f64| {
                Figure::of(&runs.iter().map(figure).collect::<Vec<_>>())
            };
            Many {
                a_second: of(|run| run.0),
                micros: of(|run| run.1),
            }
        })
    }
}

/// What many callers came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Many {
    pub(crate) a_second: Figure,
    /// Of this process's processor time, for each.
    pub(crate) micros: Figure,
}

/// Lets callers ask for a while: how often they did in a second, and the microseconds of CPU for each.
fn run<C, F>(runtime: &Runtime, callers: usize, caller: impl Fn() -> C) -> (f64, f64)
where
    C: Fn() -> F + Send + 'static,
    F: Future<Output = bool> + Send,
{
    let asked = Arc::new(AtomicU64::new(0));
    let (cpu, started) = (cpu(), Instant::now());
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let (ask, asked) = (caller(), Arc::clone(&asked));
            runtime.spawn(async move {
                while started.elapsed() < WHILE {
                    assert!(ask().await, "not answered as it was to be");
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
    let time = started.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    let asked = asked.load(Ordering::Relaxed) as f64;
    (
        asked / time,
        self::cpu().saturating_sub(cpu).as_secs_f64() * 1e6 / asked,
    )
}

/// The processor time of this process so far.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("not negative")
}

fn workers(count: usize) -> Runtime {
    let mut builder = runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(count).enable_all().build();
    runtime.expect("a runtime")
}

fn ping(connection: &mut Connection) -> bool {
    let pong: String = redis::cmd("PING").query(connection).expect("an answer");
    pong == "PONG"
}

async fn ping_by(mut connection: MultiplexedConnection) -> bool {
    let command = redis::cmd("PING");
    let pong: String = command
        .query_async(&mut connection)
        .await
        .expect("an answer");
    pong == "PONG"
}
