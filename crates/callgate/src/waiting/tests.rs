use std::sync::atomic::AtomicUsize;
use std::task::Wake;

use super::*;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A line, and who of it was woken.
#[derive(Default)]
struct Row {
    line: Line,
    woken: [Arc<Count>; 5],
    homes: [Home; 4],
}

impl Row {
    /// Somebody is told when to come.
    fn wait(&mut self, arrival: usize, home: Option<usize>, at: u64, why: Why) {
        let waiting = Waiting {
            tokens: 1,
            home: home.map(|home| self.homes[home].clone()),
            told: Told::At(at, why),
            waker: Arc::clone(&self.woken[arrival]).into(),
        };
        let line = &mut self.line;
        line.wait(arrival as u64, waiting, &mut Wakes::default());
    }

    fn leave(&mut self, arrival: u64, left: Left) {
        self.line.leave(arrival, left, &mut Wakes::default());
    }

    /// How often each was woken.
    fn woken(&self) -> [usize; 5] {
        [0, 1, 2, 3, 4].map(|arrival| self.woken[arrival].0.load(Ordering::Relaxed))
    }
}

#[test]
fn nobody_is_woken_when_somebody_behind_them_leaves() {
    let mut row = Row::default();
    for arrival in 0..3 {
        row.wait(arrival, None, 10 * arrival as u64, Why::Tokens);
    }
    row.leave(1, Left::Gone);
    assert_eq!(row.woken(), [0; 5]);
    row.leave(0, Left::Granted { has_room: true });
    assert_eq!(row.woken(), [0, 0, 1, 0, 0]);
}

#[test]
fn nobody_is_woken_when_somebody_leaves_who_had_no_room() {
    let mut row = Row::default();
    for arrival in 0..2 {
        row.wait(arrival, None, 1_000, Why::Running);
    }
    row.leave(0, Left::Gone);
    assert_eq!(row.woken(), [0; 5]);
}

#[test]
fn whoever_looks_after_the_first_is_replaced_when_they_go() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    row.wait(1, Some(1), 0, Why::Tokens);
    row.wait(2, Some(2), CLAIM, Why::Tokens);
    row.wait(3, Some(2), 10 * CLAIM, Why::Tokens);
    row.leave(0, Left::Granted { has_room: true });
    assert!(!row.line.is_watched_by(3, Some(&row.homes[2])));
    assert_eq!(row.woken(), [0; 5]);
    row.leave(2, Left::Gone);
    assert_eq!(row.woken(), [0, 0, 0, 1, 0]);
}

#[test]
fn whoever_looks_after_the_first_and_comes_in_time_is_not_woken() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    row.wait(1, Some(2), CLAIM, Why::Tokens);
    row.wait(2, Some(2), 10 * CLAIM, Why::Tokens);
    row.leave(2, Left::Gone);
    assert_eq!(row.woken(), [0; 5]);
}

#[test]
fn nobody_looks_after_a_first_who_does_not_stop() {
    let mut row = Row::default();
    row.wait(0, None, 0, Why::Tokens);
    assert!(!row.line.is_watched_by(1, Some(&row.homes[1])));
}

#[test]
fn whoever_looked_after_the_first_is_replaced_when_they_become_the_first() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    row.wait(1, Some(2), CLAIM, Why::Tokens);
    row.wait(2, Some(3), 10 * CLAIM, Why::Tokens);
    row.leave(0, Left::Granted { has_room: true });
    assert_eq!(row.woken(), [0, 0, 1, 0, 0]);
}

#[test]
fn somebody_of_another_home_looks_after_a_first_who_came_to_this_line_late() {
    let mut row = Row::default();
    row.wait(1, Some(1), 10 * CLAIM, Why::Tokens);
    row.wait(2, Some(2), 11 * CLAIM, Why::Tokens);
    row.wait(0, Some(2), 0, Why::Tokens);
    assert_eq!(row.woken(), [0, 1, 0, 0, 0]);
}

#[test]
fn somebody_of_another_home_looks_after_a_first_who_asks_from_another_home() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    row.wait(1, Some(2), CLAIM, Why::Tokens);
    row.wait(2, Some(3), 10 * CLAIM, Why::Tokens);
    row.wait(0, Some(2), 0, Why::Tokens);
    assert_eq!(row.woken(), [0, 0, 1, 0, 0]);
}

#[test]
fn those_who_stop_together_are_passed_over_together_and_told_to_come() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    row.wait(1, Some(1), 10 * CLAIM, Why::Running);
    row.wait(2, Some(2), 10 * CLAIM, Why::Tokens);
    let other = Some(row.homes[2].clone());
    let before = row
        .line
        .before(2, other.as_ref(), CLAIM, &mut Wakes::default());
    assert_eq!(before, None);
    // The first was to come by now.
    assert_eq!(row.woken(), [0, 1, 0, 0, 0]);
}

#[test]
fn nobody_is_passed_over_from_where_they_wait_themselves() {
    let mut row = Row::default();
    row.wait(0, Some(1), 0, Why::Tokens);
    let same = Some(row.homes[1].clone());
    let before = row
        .line
        .before(1, same.as_ref(), 10 * CLAIM, &mut Wakes::default());
    let ahead = Ahead {
        tokens: 1,
        passed_at: 11 * CLAIM,
        asks: false,
    };
    assert_eq!(before, Some(ahead));
}
