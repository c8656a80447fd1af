//! Calls that wait, against models: any calls at any times, on simulated time.
#![cfg(not(loom))]

#[path = "common/simulation.rs"]
#[expect(
    dead_code,
    reason = "other tests have calls that say no bound of their own"
)]
mod simulation;
#[path = "waiting_model/turns.rs"]
mod turns;
#[path = "waiting_model/world.rs"]
mod world;

use proptest::prelude::*;

/// Once the limiter's lines are empty, nothing is kept of those who waited.
fn check_that_nothing_is_kept(limiter: &callgate::Limiter) {
    let text = format!("{limiter:?}");
    assert!(text.contains("lines: {}"), "no lines in {text}");
    assert!(!text.contains("waiting: {"), "a line is left in {text}");
}

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig {
        cases: default.cases * 4,
        failure_persistence: None,
        ..default
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn turns_come_exactly_when_a_queue_before_a_bucket_has_them(
        limits in turns::limits(),
        steps in turns::steps(),
    ) {
        turns::run(&limits, &steps);
    }

    #[test]
    fn r15_a_turn_costs_one_wake_up(
        limits in turns::limits(),
        steps in turns::calm_steps(),
    ) {
        let (asked, needed) = turns::run(&limits, &steps);
        prop_assert_eq!(asked, needed);
    }

    #[test]
    fn whatever_happens_no_bound_is_broken_and_nobody_waits_in_vain(
        rules in world::rules(),
        steps in world::steps(),
    ) {
        world::run(&rules, &steps);
    }
}
