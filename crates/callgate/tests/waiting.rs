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
    simulation.come_for(Call::new("a").cost(cost), None, 0, Some(seconds(10.0)));
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
    assert_eq!(admitted(&simulation), [0, 1050 * MS]);
    simulation.calls[stopped].stopped = false;
    simulation.until(10 * SECOND);
    assert_eq!(admitted(&simulation), [0, 2050 * MS, 1050 * MS, 3050 * MS]);
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
    let call = Call::new("a").field("tenant", "acme");
    simulation.come_for(call, None, 0, Some(Duration::ZERO));
    assert_eq!(admitted(&simulation), [0, SECOND, 3 * SECOND]);
}

#[test]
fn a_turn_that_nobody_takes_goes_to_the_next_of_the_same_home_too() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit)]);
    simulation.come(Call::new("a"), Some(1));
    let stopped = simulation.come(Call::new("a"), Some(1));
    simulation.calls[stopped].stopped = true;
    simulation.come(Call::new("a"), Some(1));
    simulation.come(Call::new("a"), Some(2));
    simulation.until(1_100 * MS);
    assert_eq!(admitted(&simulation), [0, 1_050 * MS]);
}

#[test]
fn one_of_another_home_looks_after_the_first_and_no_more() {
    let limit = Limit::per_second(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit)]);
    for home in [1, 1, 2, 2, 2] {
        simulation.come(Call::new("a"), Some(home));
    }
    simulation.until(10 * SECOND);
    assert_eq!(
        admitted(&simulation),
        [0, 1, 2, 3, 4].map(|grant| grant * SECOND)
    );
    // When they came, when their turn did, and once to see whether the first is gone.
    assert_eq!(simulation.polls, 5 + 4 + 1);
}

/// Two limits for `both`, of which `slow` holds for that alone.
fn slow_and_fast() -> [(&'static str, Limit); 2] {
    let slow = Limit::per_minute(6).max_wait(seconds(20.0)).tools(["both"]);
    let fast = Limit::per_second(1).max_wait(seconds(5.0));
    [("slow", slow), ("fast", fast.tools(["both", "fast"]))]
}

#[test]
fn a_call_waits_for_the_limit_that_refuses_it_for_the_longest_and_keeps_no_place_elsewhere() {
    let mut simulation = Simulation::new(slow_and_fast());
    simulation.come(Call::new("both"), None);
    simulation.come_for(Call::new("both"), None, 0, Some(seconds(20.0)));
    simulation.come(Call::new("fast"), None);
    simulation.until(20 * SECOND);
    assert_eq!(admitted(&simulation), [0, 10 * SECOND, SECOND]);
}

#[test]
fn a_call_waits_no_longer_than_any_limit_lets_it_that_refuses_it() {
    let mut simulation = Simulation::new(slow_and_fast());
    simulation.come(Call::new("both"), None);
    simulation.come(Call::new("both"), None);
    assert_eq!(rejected(&simulation), [0]);
    // The fast one would admit it.
    simulation.until(SECOND);
    simulation.come(Call::new("both"), None);
    simulation.until(20 * SECOND);
    assert_eq!(admitted(&simulation), [0, 10 * SECOND]);
}

#[test]
fn what_never_comes_is_longer_than_any_pause() {
    let limit = |burst| Limit::per_second(1).burst(burst).tools(["both"]);
    let mut simulation = Simulation::new([("large", limit(2)), ("small", limit(1))]);
    simulation.pause("both", 3_600 * SECOND, Some("large"));
    let call = Call::new("both").cost(2.try_into().unwrap());
    let Decision::Rejected(rejection) = simulation.limiter.try_acquire_at(&call, Duration::ZERO)
    else {
        panic!("more than the burst");
    };
    assert_eq!(
        (rejection.reason, rejection.retry_after),
        (Reason::Cost, None)
    );
}

#[test]
fn nobody_waits_in_a_dry_run() {
    let limit = || Limit::per_second(1).max_wait(seconds(10.0));
    let mut simulation = Simulation::new([("a", limit())]);
    for _ in 0..3 {
        simulation.come(Call::new("a"), None);
    }
    simulation.reload(Limiter::builder().limit("a", limit()).dry_run(true));
    simulation.until(0);
    simulation.come(Call::new("a"), None);
    assert_eq!(admitted(&simulation), [0; 4]);
}

#[test]
fn r49_calls_that_wait_keep_their_order_through_reloads() {
    let limit = |rate: u64| Limit::per_second(rate).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit(1))]);
    for _ in 0..21 {
        simulation.come(Call::new("a"), Some(1));
    }
    for second in 1..=10 {
        simulation.until(second * SECOND);
        simulation.reload(Limiter::builder().limit("a", limit(1)));
        simulation.reload(
            Limiter::builder()
                .limit("a", limit(1))
                .limit("b", limit(second)),
        );
    }
    simulation.reload(Limiter::builder().limit("a", limit(2)));
    simulation.until(100 * SECOND);
    let (slow, fast) = ((0..=10).map(|turn| turn * 2), 21..31);
    let due: Vec<u64> = slow.chain(fast).map(|turn| turn * SECOND / 2).collect();
    assert_eq!(admitted(&simulation), due);
}

#[test]
fn r49_calls_that_wait_for_a_limit_that_is_taken_away_are_admitted() {
    let limit = || Limit::per_second(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("a", limit())]);
    for _ in 0..20 {
        simulation.come(Call::new("a"), None);
    }
    simulation.until(500 * MS);
    simulation.reload(Limiter::builder().limit("b", limit()));
    simulation.until(500 * MS);
    assert_eq!(admitted(&simulation)[1..], [500 * MS; 19]);
}

#[test]
fn r49_calls_that_wait_leave_a_limit_that_holds_for_them_no_more() {
    let limit = || Limit::per_minute(1).max_wait(seconds(100.0));
    let mut simulation = Simulation::new([("all", limit().tools(["a", "b"]))]);
    simulation.come(Call::new("a"), None);
    simulation.come(Call::new("a"), None);
    simulation.reload(Limiter::builder().limit("all", limit().tools(["b"])));
    simulation.until(SECOND);
    assert_eq!(admitted(&simulation), [0, 0]);
    simulation.until(60 * SECOND);
    simulation.come_for(Call::new("b"), None, 0, Some(Duration::ZERO));
    assert_eq!(admitted(&simulation), [0, 0, 60 * SECOND]);
}

#[test]
fn r15_a_stream_of_calls_that_do_not_wait_passes_nobody_who_does() {
    let limit = Limit::per_second(10).max_wait(seconds(60.0));
    let mut simulation = Simulation::new([("a", limit)]);
    for _ in 0..6 {
        simulation.come(Call::new("a"), Some(1));
    }
    let mut passed = 0;
    for millisecond in 0..60_000 {
        simulation.until(millisecond * MS);
        let decision = simulation
            .limiter
            .try_acquire_at(&Call::new("a"), simulation.time());
        passed += u64::from(decision.is_admitted());
        let waits = simulation
            .calls
            .iter()
            .any(|call| call.outcome == Outcome::Waits);
        assert!(!(waits && passed > 0));
    }
    assert_eq!(
        admitted(&simulation),
        [0, 1, 2, 3, 4, 5].map(|grant| grant * 100 * MS)
    );
    assert_eq!(passed, 600 - 6);
}

#[test]
fn r16_a_call_that_cannot_be_served_in_time_is_refused_at_once_and_told_when() {
    let mut simulation = Simulation::new([("a", Limit::per_minute(1))]);
    simulation.come(Call::new("a"), None);
    for max_wait in [5.0, 1.0, 0.0] {
        simulation.come_for(Call::new("a"), None, 0, Some(seconds(max_wait)));
    }
    assert_eq!(rejected(&simulation), [0; 3]);
    let refused = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::ZERO);
    let Decision::Rejected(rejection) = refused else {
        panic!("empty");
    };
    assert_eq!(rejection.retry_after, Some(seconds(60.0)));
}

#[test]
fn a_call_behind_somebody_who_does_not_come_is_told_when_they_are_passed_over() {
    let limit = Limit::per_second(100).burst(10).max_wait(seconds(1.0));
    let mut simulation = Simulation::new([("a", limit)]);
    simulation.come(Call::new("a").cost(10.try_into().unwrap()), None);
    let stopped = simulation.come(Call::new("a"), Some(1));
    simulation.calls[stopped].stopped = true;
    // Their turn came at 10 ms.
    for (time, retry_after) in [(30 * MS, 30 * MS), (60 * MS - 1, 1)] {
        simulation.until(time);
        let refused = simulation
            .limiter
            .try_acquire_at(&Call::new("a"), simulation.time());
        let Decision::Rejected(rejection) = refused else {
            panic!("passed over at {time}");
        };
        assert_eq!(
            rejection.retry_after,
            Some(Duration::from_nanos(retry_after))
        );
    }
    simulation.until(60 * MS);
    let decision = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), simulation.time());
    assert!(decision.is_admitted());
}

#[test]
fn a_pause_holds_the_limit_that_refills_fastest() {
    let hour = Limit::per_hour(3_000).burst(1_000).tools(["a"]);
    let minute = Limit::per_minute(100).burst(1_000).tools(["a"]);
    let mut simulation = Simulation::new([("hour", hour), ("minute", minute)]);
    simulation.pause("a", SECOND, None);
    let refused = simulation
        .limiter
        .try_acquire_at(&Call::new("a"), Duration::ZERO);
    let Decision::Rejected(rejection) = refused else {
        panic!("paused");
    };
    assert_eq!(
        (rejection.limit(), rejection.reason),
        ("minute", Reason::Paused)
    );
}

#[test]
fn room_that_nobody_takes_goes_to_the_next_of_the_same_home_too() {
    let limit = Limit::per_second(100).burst(10).max_concurrent(1);
    let mut simulation = Simulation::new([("a", limit.max_wait(seconds(10.0)))]);
    simulation.come(Call::new("a"), Some(1));
    let stopped = simulation.come(Call::new("a"), Some(1));
    simulation.calls[stopped].stopped = true;
    simulation.come(Call::new("a"), Some(1));
    simulation.come(Call::new("a"), Some(2));
    simulation.until(SECOND);
    simulation.end(0);
    simulation.until(2 * SECOND);
    assert_eq!(admitted(&simulation), [0, 1_050 * MS]);
}
