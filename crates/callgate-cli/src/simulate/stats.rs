//! What is counted of calls, as they come and go.

use callgate::MAX_BURST;

/// A window slides in steps of so many parts of its length.
const STEPS: usize = 100;

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
    pub(crate) fn came(&mut self, now: u64, amount: u64) {
        self.calls += 1;
        self.asked.add(now, amount);
    }

    pub(crate) fn admitted(&mut self, now: u64, amount: u64, waited: u64) {
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
#[derive(Clone, Debug)]
pub(crate) struct Busiest {
    pub(crate) second: Window,
    pub(crate) minute: Window,
}

impl Default for Busiest {
    fn default() -> Self {
        Self {
            second: Window::new(1_000_000_000),
            minute: Window::new(60_000_000_000),
        }
    }
}

impl Busiest {
    fn add(&mut self, now: u64, amount: u64) {
        // What costs more is never admitted, and sums are to fit.
        let amount = amount.min(MAX_BURST);
        self.second.add(now, amount);
        self.minute.add(now, amount);
    }
}

/// The most in any window of a length that starts at a whole hundredth of it.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    step: u64,
    /// The number of the latest step.
    last: u64,
    parts: Box<[u64; STEPS]>,
    sum: u64,
    pub(crate) most: u64,
}

impl Window {
    fn new(length: u64) -> Self {
        Self {
            step: length / STEPS as u64,
            last: 0,
            parts: Box::new([0; STEPS]),
            sum: 0,
            most: 0,
        }
    }

    /// Times do not go back.
    fn add(&mut self, now: u64, amount: u64) {
        let step = now / self.step;
        if step - self.last >= STEPS as u64 {
            self.parts.fill(0);
            self.sum = 0;
        } else {
            for gone in self.last + 1..=step {
                self.sum -= std::mem::take(self.part(gone));
            }
        }
        self.last = step;
        *self.part(step) += amount;
        self.sum += amount;
        self.most = self.most.max(self.sum);
    }

    #[expect(clippy::cast_possible_truncation, reason = "below 100")]
    fn part(&mut self, step: u64) -> &mut u64 {
        &mut self.parts[(step % STEPS as u64) as usize]
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
            let mut window = Window::new(1_000_000_000);
            let mut calls = Vec::new();
            let mut now = 0;
            for (after, amount) in steps {
                now += after * 7_000_000;
                window.add(now, amount);
                calls.push((now / window.step, amount));
            }
            let within = |first: u64| {
                let calls = calls.iter().filter(|(step, _)| (first..first + 100).contains(step));
                calls.map(|(_, amount)| amount).sum::<u64>()
            };
            let most = (0..=now / window.step).map(within).max();
            prop_assert_eq!(Some(window.most), most);
        }
    }
}
