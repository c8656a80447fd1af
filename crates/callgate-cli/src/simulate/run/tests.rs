//! The simulation against the live limiter, asked by a clock that is moved by hand.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use callgate::Limit;
use proptest::prelude::*;

use super::*;
use crate::simulate::trace::{Batch, Row};

const MS: u64 = 1_000_000;

/// What came of each call: when, and whether it was admitted.
type Outcomes = Vec<Option<(u64, bool)>>;

#[derive(Clone, Debug)]
struct Asked {
    now: u64,
    tool: usize,
    tenant: Option<&'static str>,
    cost: Option<NonZeroU64>,
    duration: u64,
}

const TOOLS: [&str; 3] = ["crm_find", "crm_edit", "mail"];

fn limits() -> impl Strategy<Value = Vec<(&'static str, Limit)>> {
    let limit = (1..8_u64, 1..5_u64, 0..4_u64, proptest::option::of(1..3_u64));
    let limit = limit.prop_map(|(rate, burst, wait, most)| {
        let limit = Limit::per_second(rate).burst(burst);
        let limit = limit.max_wait(Duration::from_millis(wait * 400));
        most.map_or(limit.clone(), |most| limit.max_concurrent(most))
    });
    let split = limit.clone().prop_map(|limit| limit.per(["tenant"]));
    (limit.clone(), split, limit).prop_map(|(all, split, default)| {
        let all = all.tools(["crm_*"]);
        let split = split.tools(["crm_find", "mail"]);
        vec![("all", all), ("split", split), (DEFAULT, default)]
    })
}

const DEFAULT: &str = crate::DEFAULT;

fn limiter(limits: &[(&str, Limit)], clock: Option<&Arc<AtomicU64>>) -> Limiter {
    let mut builder = Limiter::builder();
    for (name, limit) in limits {
        builder = crate::simulate::with(builder, name, limit.clone());
    }
    if let Some(clock) = clock.cloned() {
        builder = builder.clock(move || Duration::from_nanos(clock.load(Ordering::Relaxed)));
    }
    builder.build().expect("limits in range")
}

fn calls() -> impl Strategy<Value = Vec<Asked>> {
    let tenants = vec![None, Some("acme"), Some("globex")];
    let call = (
        // Many at the same time.
        prop_oneof![Just(0), 0..400 * MS],
        0..TOOLS.len(),
        proptest::sample::select(tenants),
        proptest::option::of(1..4_u64),
        prop_oneof![Just(0), 0..900 * MS],
    );
    let calls = proptest::collection::vec(call, 1..60);
    calls.prop_map(|calls| {
        let mut now = 0;
        let calls = calls
            .into_iter()
            .map(|(after, tool, tenant, cost, duration)| {
                now += after;
                let cost = cost.and_then(NonZeroU64::new);
                Asked {
                    now,
                    tool,
                    tenant,
                    cost,
                    duration,
                }
            });
        calls.collect()
    })
}

fn simulated(limits: &[(&str, Limit)], calls: &[Asked]) -> Outcomes {
    let fields: Arc<[String]> = Arc::from(["tenant".to_owned()]);
    let mut run = Run::new(limiter(limits, None), fields);
    let mut outcomes = vec![None; calls.len()];
    let mut said = |event: Event| {
        let outcome = match event.what {
            What::Admitted { .. } => true,
            What::Rejected { .. } => false,
            What::Came | What::Ended => return,
        };
        let number = usize::try_from(event.call.number).expect("few");
        assert_eq!(outcomes[number].replace((event.now, outcome)), None);
    };
    for call in calls {
        let mut batch = Batch::default();
        let mut draft = batch.open(1);
        if let Some(tenant) = call.tenant {
            draft.set(0, tenant);
        }
        draft.push(Row {
            time: call.now,
            duration: call.duration,
            cost: call.cost,
            tool: 0,
            cells: 0,
        });
        let arrival = Arrival {
            now: call.now,
            tool: call.tool,
            cost: call.cost,
            duration: call.duration,
            values: batch.values(&batch.rows[0], 1),
        };
        run.arrive(&arrival, TOOLS[call.tool], true, &mut said);
    }
    run.finish(&mut said);
    outcomes
}

/// A call of the live limiter's.
struct Live {
    turn: Turn,
    woken: Arc<Rung>,
    next: Option<u64>,
    end: Option<u64>,
    running: Option<InFlight>,
}

#[derive(Default)]
struct Rung(AtomicBool);

impl Wake for Rung {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same, by the simplest way there is.
fn live(limits: &[(&str, Limit)], calls: &[Asked]) -> Outcomes {
    let clock = Arc::new(AtomicU64::new(0));
    let limiter = limiter(limits, Some(&clock));
    let mut came: Vec<Live> = Vec::new();
    let mut outcomes = vec![None; calls.len()];
    loop {
        let ends = came
            .iter()
            .enumerate()
            .filter_map(|(index, live)| Some((live.end?, 0, index)));
        let asks = came
            .iter()
            .enumerate()
            .filter_map(|(index, live)| Some((live.next?, 1, index)));
        let arrives = calls.get(came.len()).map(|call| (call.now, 2, came.len()));
        let Some((now, kind, index)) = ends.chain(asks).chain(arrives).min() else {
            return outcomes;
        };
        clock.store(now, Ordering::Relaxed);
        if kind == 0 {
            came[index].end = None;
            drop(came[index].running.take());
        } else {
            if kind == 2 {
                let (turn, woken) = (Turn::default(), Arc::default());
                came.push(Live {
                    turn,
                    woken,
                    next: None,
                    end: None,
                    running: None,
                });
            }
            let asked = &calls[index];
            let mut call = Call::new(TOOLS[asked.tool]);
            call = asked.cost.map_or(call.clone(), |cost| call.cost(cost));
            call = asked
                .tenant
                .map_or(call.clone(), |tenant| call.field("tenant", tenant));
            let live = &mut came[index];
            let waker = Waker::from(Arc::clone(&live.woken));
            live.next = None;
            match limiter.poll_acquire(&call, &mut live.turn, &waker) {
                Poll::Pending => live.next = Some(now + nanos(live.turn.wait())),
                Poll::Ready(decision) => {
                    outcomes[index] = Some((now, decision.is_admitted()));
                    if let Decision::Admitted(permit) = decision {
                        live.end = Some(now + asked.duration);
                        live.running = permit.in_flight();
                    }
                }
            }
        }
        for live in &mut came {
            if live.woken.0.swap(false, Ordering::Relaxed) {
                live.next = live.next.map(|next| next.min(now));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decisions_are_those_of_the_live_limiter(limits in limits(), calls in calls()) {
        let simulated = simulated(&limits, &calls);
        prop_assert!(simulated.iter().all(Option::is_some));
        prop_assert_eq!(simulated, live(&limits, &calls));
    }
}
