//! Calls that wait for their turn, on simulated time.

#[path = "common/simulation.rs"]
mod simulation;

use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, Reason};
use simulation::{MS, Outcome, SECOND, Simulation};

/// When calls were admitted, in the order in which they came.
fn admitted(simulation: &Simulation) -> Vec<u64> {
    let calls = simulation.calls.iter();
    let times = calls.filter_map(|call| match call.outcome {
        Outcome::Admitted(time) => Some(time),
        _ => None,
    });
    times.collect()
}

/// When calls were rejected, in the order in which they came.
fn rejected(simulation: &Simulation) -> Vec<u64> {
    let calls = simulation.calls.iter();
    let times = calls.filter_map(|call| match call.outcome {
        Outcome::Rejected(time) => Some(time),
        _ => None,
    });
    times.collect()
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn r15_those_who_can_be_served_in_time_are_in_order_and_the_others_are_refused_at_once() {
    let limit = Limit::per_second(10).max_wait(Duration::from_millis(1950));
    let mut simulation = Simulation::new([("search", limit)]);
    for _ in 0..100 {
        simulation.come(Call::new("search"), Some(1));
    }
    assert_eq!(rejected(&simulation), vec![0; 80]);
    simulation.until(10 * SECOND);
    let due: Vec<u64> = (0..20).map(|grant| grant * 100 * MS).collect();
    assert_eq!(admitted(&simulation), due);
    assert_eq!(simulation.polls, 100 + 19);
}

#[test]
fn r16_a_wait_is_for_what_is_missing() {
    let mut simulation = Simulation::new([("a", Limit::per_second(1).burst(3))]);
    simulation.come(Call::new("a"), None);
    let cost = 3.try_into().unwrap();
    simulation.come(Call::new("a").cost(cost).max_wait(seconds(10.0)), None);
    simulation.until(20 * SECOND);
    assert_eq!(admitted(&simulation), [0, SECOND]);
}

#[test]
fn r13_a_turn_that_is_given_up_goes_to_the_next() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit)]);
    for _ in 0..10 {
        simulation.come(Call::new("a"), Some(1));
    }
    // Nobody asks in the tick in which the turn of the first has come: it leaves.
    simulation.now = SECOND;
    simulation.leave(1);
    let refused = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::from_secs(1));
    assert!(!refused.is_admitted());
    simulation.until(SECOND);
    assert_eq!(admitted(&simulation), [0, SECOND]);
    simulation.until(100 * SECOND);
    let due: Vec<u64> = (0..9).map(|grant| grant * SECOND).collect();
    assert_eq!(admitted(&simulation), due);
}

#[test]
fn whoever_does_not_come_is_passed_over_and_keeps_the_place() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit)]);
    simulation.come(Call::new("a"), Some(1));
    let stopped = simulation.come(Call::new("a"), Some(1));
    simulation.calls[stopped].stopped = true;
    simulation.come(Call::new("a"), Some(2));
    simulation.come(Call::new("a"), Some(2));
    simulation.until(1500 * MS);
    assert_eq!(admitted(&simulation), [0, 1050 * MS + 1]);
    simulation.calls[stopped].stopped = false;
    simulation.until(10 * SECOND);
    assert_eq!(
        admitted(&simulation),
        [0, 2050 * MS + 1, 1050 * MS + 1, 3050 * MS + 1]
    );
}

#[test]
fn calls_that_run_are_counted_and_the_next_one_comes_when_one_ends() {
    let limit = Limit::per_second(1000).burst(100).max_concurrent(2);
    let mut simulation = Simulation::new([("a", limit.max_wait(seconds(10.0)))]);
    for _ in 0..5 {
        simulation.come(Call::new("a"), Some(1));
    }
    simulation.until(SECOND);
    assert_eq!(admitted(&simulation), [0, 0]);
    simulation.end(1);
    simulation.until(2 * SECOND);
    assert_eq!(admitted(&simulation), [0, 0, SECOND]);
    assert_eq!(simulation.polls, 6);
    let Decision::Rejected(rejection) = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::from_secs(2))
    else {
        panic!("two run");
    };
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Concurrency, None)
    );
    simulation.until(20 * SECOND);
    assert_eq!(rejected(&simulation), [10 * SECOND, 10 * SECOND]);
}

#[test]
fn r16_a_turn_at_the_very_end_of_max_wait_is_in_time() {
    let limit = Limit::per_second(5).burst(5).max_wait(seconds(3.0));
    let mut simulation = Simulation::new([("a", limit)]);
    for _ in 0..200 {
        simulation.come(Call::new("a"), Some(1));
    }
    assert_eq!(rejected(&simulation), vec![0; 180]);
    simulation.until(10 * SECOND);
    let waited = (1..=15).map(|grant| grant * 200 * MS);
    let due: Vec<u64> = [0; 5].into_iter().chain(waited).collect();
    assert_eq!(admitted(&simulation), due);
}

#[test]
fn a_turn_that_is_put_off_again_and_again_comes_no_later_than_50_ms_after_the_bound() {
    let mut simulation = Simulation::new([("a", Limit::per_second(100).max_wait(seconds(1.0)))]);
    simulation.pause("a", 990 * MS, None);
    simulation.come(Call::new("a"), None);
    simulation.until(995 * MS);
    simulation.pause("a", 30 * MS, None);
    simulation.until(1_030 * MS);
    assert_eq!(simulation.calls[0].outcome, Outcome::Waits);
    simulation.pause("a", 30 * MS, None);
    simulation.until(2 * SECOND);
    assert_eq!(simulation.calls[0].outcome, Outcome::Rejected(1_030 * MS));
}

#[test]
fn a_call_whose_tokens_come_too_late_does_not_wait_for_one_that_runs() {
    let limit = Limit::per_minute(6).burst(2).max_concurrent(1);
    let mut simulation = Simulation::new([("a", limit.max_wait(seconds(5.0)))]);
    simulation.come(Call::new("a").cost(2.try_into().unwrap()), None);
    simulation.come(Call::new("a"), None);
    assert_eq!(rejected(&simulation), [0]);
}

#[test]
fn r49_calls_that_wait_when_other_fields_come_to_split_the_limit_leave_nothing_behind() {
    let limit = || Limit::per_second(1).max_wait(seconds(10.0));
    let mut simulation = Simulation::new([("a", limit())]);
    for _ in 0..3 {
        simulation.come(Call::new("a").field("tenant", "acme"), None);
    }
    let split = Limiter::builder().limit("a", limit().per(["tenant"]));
    simulation.reload(split);
    simulation.until(1_500 * MS);
    assert_eq!(admitted(&simulation), [0, SECOND]);
    simulation.leave(2);
    // Nobody waits, and there is a token.
    simulation.until(3 * SECOND);
    simulation.come(
        Call::new("a")
            .field("tenant", "acme")
            .max_wait(Duration::ZERO),
        None,
    );
    assert_eq!(admitted(&simulation), [0, SECOND, 3 * SECOND]);
}
