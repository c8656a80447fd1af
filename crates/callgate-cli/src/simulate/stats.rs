//! What is counted of calls, as they come and go.

use callgate::MAX_BURST;

/// A window slides in steps of so many parts of its length.
const STEPS: u64 = 100;

/// Calls of one limit or one tool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: u64,
    /// At once or after waiting.
    pub(crate) admitted: u64,
    /// Of those, so many had to wait.
    pub(crate) waited: u64,
    /// By any limit of a tool; of a limit, by itself.
    pub(crate) rejected: u64,
    /// Of those, so many cost more than the burst.
    pub(crate) over_burst: u64,
    /// Nanoseconds.
    pub(crate) longest_wait: u64,
    running: u64,
    pub(crate) most_running: u64,
    pub(crate) asked: Busiest,
    pub(crate) let_in: Busiest,
}

impl Tally {
    pub(crate) fn came(&mut self, now: Steps, amount: u64) {
        self.calls += 1;
        self.asked.add(now, amount);
    }

    pub(crate) fn admitted(&mut self, now: Steps, amount: u64, waited: u64) {
        self.admitted += 1;
        self.waited += u64::from(waited > 0);
        self.longest_wait = self.longest_wait.max(waited);
        self.running += 1;
        self.most_running = self.most_running.max(self.running);
        self.let_in.add(now, amount);
    }

    pub(crate) fn rejected(&mut self, waited: u64, is_over_burst: bool) {
        self.rejected += 1;
        self.over_burst += u64::from(is_over_burst);
        self.longest_wait = self.longest_wait.max(waited);
    }

    pub(crate) fn ended(&mut self) {
        self.running -= 1;
    }
}

/// The busiest second and minute.
#[derive(Clone, Debug, Default)]
pub(crate) struct Busiest {
    pub(crate) second: Window,
    pub(crate) minute: Window,
}

impl Busiest {
    fn add(&mut self, now: Steps, amount: u64) {
        // What costs more is never admitted, and sums are to fit.
        let amount = amount.min(MAX_BURST);
        self.second.add(now.of_second, amount);
        self.minute.add(now.of_minute, amount);
    }
}

/// A time, in the numbers of the steps that it is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    of_second: u64,
    of_minute: u64,
}

impl Steps {
    pub(crate) fn at(nanos: u64) -> Self {
        let of_second = nanos / (1_000_000_000 / STEPS);
        Self {
            of_second,
            of_minute: of_second / 60,
        }
    }
}

/// The most in any window of as many steps.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// The latest step.
    last: u64,
    /// Of those before it.
    parts: Box<[u64; 100]>,
    sum_before: u64,
    /// Of all.
    sum: u64,
    most_before: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self {
            last: 0,
            parts: Box::new([0; 100]),
            sum_before: 0,
            sum: 0,
            most_before: 0,
        }
    }
}

impl Window {
    pub(crate) fn most(&self) -> u64 {
        self.most_before.max(self.sum)
    }

    /// Times do not go back.
    fn add(&mut self, step: u64, amount: u64) {
        if step != self.last {
            self.go_on(step);
        }
        self.sum += amount;
    }

    fn go_on(&mut self, step: u64) {
        self.most_before = self.most();
        *self.part(self.last) = self.sum - self.sum_before;
        if step - self.last >= STEPS {
            self.parts.fill(0);
            self.sum = 0;
        } else {
            for gone in self.last + 1..=step {
                self.sum -= std::mem::take(self.part(gone));
            }
        }
        self.last = step;
        self.sum_before = self.sum;
    }

    fn part(&mut self, step: u64) -> &mut u64 {
        &mut self.parts[(step % STEPS) as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_busiest_window_is_the_best_of_all_that_start_at_a_step(
            steps in proptest::collection::vec((0..250_u64, 1..5_u64), 1..40)
        ) {
            let mut window = Window::default();
            let mut calls = Vec::new();
            let mut now = 0;
            for (after, amount) in steps {
                now += after;
                window.add(now, amount);
                calls.push((now, amount));
            }
            let within = |first: u64| {
                let calls = calls.iter().filter(|(step, _)| (first..first + STEPS).contains(step));
                calls.map(|(_, amount)| amount).sum::<u64>()
            };
            prop_assert_eq!(Some(window.most()), (0..=now).map(within).max());
        }
    }
}
