//! What happens to a trace under all limits of a file.

use std::sync::Arc;
use std::time::Duration;

use callgate::{Limit, Limiter, Reason};

use super::plot::Plot;
use super::run::{Event, Run, What};
use super::service::{Quota, Service};
use super::stats::{Steps, Tally};
use super::trace::{Arrival, Tools};

/// Runs the trace, and counts.
pub(crate) struct Overview {
    run: Run,
    pub(crate) counts: Counts,
}

pub(crate) struct Counts {
    pub(crate) limits: Vec<Limited>,
    /// By the number of a tool.
    pub(crate) tools: Vec<Tool>,
    /// The places of limits, by the numbers of their names.
    places: Vec<Option<usize>>,
    /// Nanoseconds from the first call to the last.
    pub(crate) length: u64,
    pub(crate) plot: Option<Plot>,
}

/// A limit, and the service behind it: called by all calls, and by those that the limits admit.
pub(crate) struct Limited {
    limit: Limit,
    pub(crate) tally: Tally,
    pub(crate) services: Option<[Service; 2]>,
}

/// A tool, and the limits that hold for it.
pub(crate) struct Tool {
    pub(crate) limits: Vec<usize>,
    may_wait: bool,
    pub(crate) tally: Tally,
}

impl Overview {
    pub(crate) fn new(
        limiter: Limiter,
        fields: Arc<[String]>,
        quota: Option<Quota>,
        is_drawn: bool,
    ) -> Self {
        let levels = limiter.snapshot();
        let plot = is_drawn.then(|| Plot::new(levels.len()));
        let names = limiter.names(0);
        let place = |name: &str| levels.iter().position(|level| level.name == name);
        let counts = Counts {
            places: names.map(place).collect(),
            limits: levels
                .into_iter()
                .map(|level| Limited {
                    limit: level.limit,
                    tally: Tally::default(),
                    services: quota.map(|quota| [Service::new(quota), Service::new(quota)]),
                })
                .collect(),
            tools: Vec::new(),
            length: 0,
            plot,
        };
        Self {
            run: Run::new(limiter, fields),
            counts,
        }
    }

    pub(crate) fn arrive(&mut self, tools: &Tools, arrival: &Arrival<'_>) {
        let names = tools.names();
        while self.counts.tools.len() <= arrival.tool {
            let name = &names[self.counts.tools.len()];
            let limiter = self.run.limiter();
            let tool = self.counts.tool(limiter, name);
            self.counts.tools.push(tool);
        }
        self.look_until(arrival.now);
        let counts = &mut self.counts;
        counts.length = arrival.now;
        let may_wait = counts.tools[arrival.tool].may_wait;
        let name = &names[arrival.tool];
        self.run
            .arrive(arrival, name, may_wait, &mut |event| counts.hear(event));
    }

    /// Looks at the levels as often as the picture needs it.
    fn look_until(&mut self, now: u64) {
        while let Some(now) = self
            .counts
            .plot
            .as_mut()
            .and_then(|plot| plot.next_look(now))
        {
            self.run.until(now, &mut |event| self.counts.hear(event));
            let levels = self.run.limiter().snapshot_at(Duration::from_nanos(now));
            if let Some(plot) = &mut self.counts.plot {
                plot.look(now, &levels);
            }
        }
    }

    pub(crate) fn finish(&mut self) {
        self.run.finish(&mut |event| self.counts.hear(event));
    }
}

impl Counts {
    fn tool(&self, limiter: &Limiter, name: &str) -> Tool {
        let snapshot = limiter.limits_of(name);
        let numbers = snapshot
            .iter()
            .filter_map(|limit| limiter.names(0).position(|name| name == *limit));
        let limits: Vec<usize> = numbers.filter_map(|number| self.places[number]).collect();
        let may_wait = limits
            .iter()
            .any(|&limit| !self.limits[limit].limit.longest_wait().is_zero());
        Tool {
            limits,
            may_wait,
            tally: Tally::default(),
        }
    }

    fn hear(&mut self, event: Event) {
        let Event { now, call, what } = event;
        let tool = &mut self.tools[call.tool];
        let steps = Steps::at(now);
        match what {
            What::Came => tool.tally.came(steps, 1),
            What::Admitted { waited, .. } => tool.tally.admitted(steps, 1, waited),
            What::Rejected { waited, reason, .. } => {
                tool.tally.rejected(waited, reason == Reason::Cost);
            }
            What::Ended => tool.tally.ended(),
        }
        for &place in &tool.limits {
            let Limited {
                limit,
                tally,
                services,
            } = &mut self.limits[place];
            let tokens = call.cost.map_or(limit.default_cost(), u64::from);
            match what {
                What::Came => tally.came(steps, tokens),
                What::Admitted { waited, .. } => tally.admitted(steps, tokens, waited),
                What::Rejected {
                    waited,
                    limit,
                    reason,
                } => {
                    if self.places[limit] == Some(place) {
                        tally.rejected(waited, reason == Reason::Cost);
                    }
                }
                What::Ended => tally.ended(),
            }
            match (what, &mut self.plot) {
                (What::Came, Some(plot)) => plot.asked(place, now, tokens),
                (What::Admitted { .. }, Some(plot)) => plot.admitted(place, now, tokens),
                _ => {}
            }
            match (what, services) {
                (What::Came, Some([without, _])) => without.call(now, tokens),
                (What::Admitted { .. }, Some([_, with])) => with.call(now, tokens),
                _ => {}
            }
        }
    }
}
