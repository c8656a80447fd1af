//! Which limits hold for a call, which of their buckets it draws from, and what a reload keeps.
#![cfg(not(loom))]

#[path = "common/store.rs"]
mod store;

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter, LimiterBuilder, Reason, Rejection};
use store::{Stored, built};

const START: Duration = Duration::ZERO;
const HOUR: Duration = Duration::from_secs(3_600);

/// A bucket that nothing comes into while a test lasts.
fn bucket(burst: u64) -> Limit {
    Limit::per_hour(1).burst(burst)
}

fn admits(limiter: &Stored, call: &Call<'_>) -> bool {
    limiter.at(START).try_acquire_at(call, START).is_admitted()
}

/// How many of so many calls are admitted.
fn admitted(limiter: &Stored, call: &Call<'_>, calls: usize) -> usize {
    (0..calls).filter(|_| admits(limiter, call)).count()
}

fn refused<'a>(limiter: &'a Stored, call: &Call<'_>, now: Duration) -> Rejection<'a> {
    match limiter.at(now).try_acquire_at(call, now) {
        Decision::Rejected(rejection) => rejection,
        Decision::Admitted(_) => panic!("admitted: {call:?}"),
    }
}

fn remaining(limiter: &Stored, name: &str, now: Duration) -> u64 {
    let levels = limiter.at(now).snapshot_at(now);
    let level = levels.iter().find(|level| level.name == name);
    level.and_then(|level| level.remaining).expect("one bucket")
}

fn reload(limiter: &Stored, limits: LimiterBuilder, now: Duration) {
    let reloaded = limiter.at(now).reload_at(limits, now);
    reloaded.expect("limits in range");
}

fn tokens(cost: u64) -> NonZeroU64 {
    NonZeroU64::new(cost).expect("not zero")
}

fn of_tenant(tenant: &str) -> Call<'_> {
    Call::new("tool").field("tenant", tenant)
}

#[test]
fn tools_of_one_limit_share_its_bucket() {
    let crm = bucket(3).tools(["crm_*", "lookup"]);
    let limiter = built(Limiter::builder().limit("crm", crm));
    for tool in ["crm_find", "lookup", "crm_"] {
        assert!(admits(&limiter, &Call::new(tool)), "{tool}");
    }
    assert!(!admits(&limiter, &Call::new("crm_load")));
    // Its own name is no tool of it.
    assert!(admits(&limiter, &Call::new("crm")));
    assert!(limiter.limits_of("crm").is_empty());
}

#[test]
fn a_pattern_is_any_characters_or_any_one_and_everything_else_is_itself() {
    for (pattern, matching, others) in [
        (
            "crm_*",
            &["crm_", "crm_find", "crm_*"][..],
            &["crm", "xcrm_", "CRM_find"][..],
        ),
        ("*", &["", "a", "a b"], &[]),
        ("?", &["a", "\u{e9}", "*"], &["", "ab"]),
        ("a*b?c", &["abxc", "aXXbYc", "abbbc"], &["abc", "abxcd"]),
        ("a.b:c/d", &["a.b:c/d"], &["axb:c/d", "a.b:c/"]),
        ("a\\*", &["a\\", "a\\b"], &["a*", "a"]),
    ] {
        let limiter = built(Limiter::builder().limit("limit", bucket(1).tools([pattern])));
        for tool in matching {
            assert_eq!(limiter.limits_of(tool), ["limit"], "{pattern} for {tool:?}");
        }
        for tool in others {
            assert!(limiter.limits_of(tool).is_empty(), "{pattern} for {tool:?}");
        }
    }
}

#[test]
fn more_names_than_are_remembered_are_all_matched_right() {
    let limiter = built(
        Limiter::builder()
            .limit("even", bucket(1).tools(["*0", "*2", "*4", "*6", "*8"]))
            .limit("long", bucket(1).tools(["????*"]))
            .default_limit(bucket(1)),
    );
    for round in 0..2 {
        for number in 0..3_000 {
            let name = number.to_string();
            let due = match (number % 2 == 0, number > 999) {
                (true, true) => &["even", "long"][..],
                (true, false) => &["even"],
                (false, true) => &["long"],
                (false, false) => &["[default]"],
            };
            assert_eq!(limiter.limits_of(&name), due, "{name} in round {round}");
        }
    }
}

#[test]
fn all_limits_that_match_hold_and_the_longest_wait_is_told() {
    let limiter = built(
        Limiter::builder()
            .limit("tool", Limit::per_second(1).burst(2))
            .limit("t*", Limit::per_minute(1).burst(2))
            .limit("all", Limit::per_hour(1).burst(3).tools(["*"])),
    );
    assert_eq!(limiter.limits_of("tool"), ["tool", "t*", "all"]);
    assert_eq!(limiter.limits_of("other"), ["all"]);
    let call = Call::new("tool");
    assert_eq!(admitted(&limiter, &call, 2), 2);
    let rejection = refused(&limiter, &call, START);
    assert_eq!((rejection.limit(), rejection.remaining()), ("t*", 0));
    assert_eq!(rejection.retry_after, Some(Duration::from_secs(60)));
    assert!(admits(&limiter, &Call::new("other")));
    assert_eq!(refused(&limiter, &call, START).limit(), "all");
    // What can never be is told before all that takes long.
    let rejection = refused(&limiter, &call.cost(tokens(3)), START);
    assert_eq!(rejection.reason, Reason::Cost);
    assert_eq!(rejection.retry_after, None);
    assert!(["tool", "t*"].contains(&rejection.limit()));
}

#[test]
fn r32_a_refused_call_takes_nothing_whatever_the_order_of_the_limits() {
    let per_tool = || ("per tool", bucket(100).tools(["tool"]));
    let per_user = || ("per user", bucket(1).tools(["tool"]).per(["user"]));
    for limits in [[per_tool(), per_user()], [per_user(), per_tool()]] {
        let limits = limits.into_iter();
        let limits = limits.fold(Limiter::builder(), |all, (name, limit)| {
            all.limit(name, limit)
        });
        let limiter = built(limits);
        let loud = Call::new("tool").field("user", "loud");
        assert_eq!(admitted(&limiter, &loud, 20), 1);
        let rejection = refused(&limiter, &loud, START);
        assert_eq!(
            (rejection.limit(), rejection.retry_after),
            ("per user", Some(HOUR))
        );
        assert_eq!(remaining(&limiter, "per tool", START), 99);
        for user in 0..99 {
            let user = user.to_string();
            assert!(admits(&limiter, &Call::new("tool").field("user", &user)));
        }
        assert_eq!(remaining(&limiter, "per tool", START), 0);
        let rejection = refused(&limiter, &Call::new("tool").field("user", "late"), START);
        assert_eq!(rejection.limit(), "per tool");
    }
}

#[test]
fn the_default_limit_has_a_bucket_for_each_tool_that_no_other_limit_holds_for() {
    let limiter = built(
        Limiter::builder()
            .limit("crm_*", bucket(5))
            .default_limit(bucket(1)),
    );
    for tool in ["search", "send", "", "[default]", "crm"] {
        assert_eq!(admitted(&limiter, &Call::new(tool), 2), 1, "{tool}");
        assert_eq!(limiter.limits_of(tool), ["[default]"]);
    }
    assert_eq!(
        refused(&limiter, &Call::new("search"), START).limit(),
        "[default]"
    );
    assert_eq!(admitted(&limiter, &Call::new("crm_find"), 9), 5);
    let split = built(Limiter::builder().default_limit(bucket(1).per(["tenant", "tool"])));
    for tool in ["search", "send"] {
        for tenant in ["a", "b"] {
            let call = Call::new(tool).field("tenant", tenant);
            assert_eq!(admitted(&split, &call, 2), 1, "{tool} of {tenant}");
        }
    }
}

#[test]
fn a_call_costs_what_it_says_or_else_what_its_limits_say() {
    let limiter = built(
        Limiter::builder()
            .limit("dear", bucket(10).cost(4).tools(["tool"]))
            .limit("cheap", bucket(10).tools(["tool"])),
    );
    let call = Call::new("tool");
    let levels = || ["dear", "cheap"].map(|name| remaining(&limiter, name, START));
    assert!(admits(&limiter, &call));
    assert_eq!(levels(), [6, 9]);
    assert!(admits(&limiter, &call.clone().cost(tokens(2))));
    assert_eq!(levels(), [4, 7]);
    assert!(admits(&limiter, &call));
    let rejection = refused(&limiter, &call, START);
    assert_eq!(
        (rejection.limit(), rejection.retry_after),
        ("dear", Some(4 * HOUR))
    );
    assert_eq!(levels(), [0, 6]);
}

#[test]
fn a_dry_run_admits_all_and_says_what_it_would_have_refused_and_spends_nothing_for_that() {
    let limits = || Limiter::builder().limit("tool", bucket(2));
    let limiter = built(limits().dry_run(true));
    let call = Call::new("tool");
    for refusals in [0, 0, 1, 2] {
        let Decision::Admitted(permit) = limiter.try_acquire_at(&call, START) else {
            panic!("refused in a dry run");
        };
        let overruled = permit.overruled().map(|rejection| rejection.retry_after);
        assert_eq!(overruled, (refusals > 0).then_some(Some(HOUR)));
    }
    assert_eq!(remaining(&limiter, "tool", HOUR), 1);
    reload(&limiter, limits(), START);
    assert!(!admits(&limiter, &call));
}

/// Each of these calls has a bucket of its own.
fn assert_all_apart(limiter: &Stored, calls: &[Call<'_>]) {
    for call in calls {
        assert!(admits(limiter, call), "shares a bucket: {call:?}");
    }
    for call in calls {
        assert!(!admits(limiter, call), "two buckets: {call:?}");
    }
}

#[test]
fn r22_every_pair_of_a_tenant_and_a_tool_has_a_bucket_of_its_own() {
    let pairs = [
        (Some("a:b"), "c"),
        (Some("a"), "b:c"),
        (Some("a"), ":bc"),
        (Some("a\0b"), "c"),
        (Some("a"), "\0bc"),
        (Some("x\r\nDEL *"), "c"),
        (Some("{t}"), "c"),
        (Some("a}b{c"), "d"),
        (Some("a}b{"), "cd"),
        (Some(""), "c"),
        (Some("c"), ""),
        (Some(""), ""),
        (None, ""),
        (None, "c"),
        (Some("default"), "c"),
        (Some("None"), "c"),
        (Some("null"), "c"),
        (Some("missing"), "c"),
        (Some("[default]"), "c"),
        (Some("\u{0}"), "c"),
        (
            Some("\u{ff}\u{ff}\u{ff}\u{ff}\u{ff}\u{ff}\u{ff}\u{ff}"),
            "c",
        ),
    ];
    let call = |(tenant, tool): &(Option<&'static str>, &'static str)| {
        let call = Call::new(tool);
        tenant.map_or(call.clone(), |tenant| call.field("tenant", tenant))
    };
    let calls: Vec<_> = pairs.iter().map(call).collect();
    for per in [["tenant", "tool"], ["tool", "tenant"]] {
        let limit = bucket(1).tools(["*"]).per(per);
        assert_all_apart(&built(Limiter::builder().limit("all", limit)), &calls);
    }
    let default = Limiter::builder().default_limit(bucket(1).per(["tenant"]));
    assert_all_apart(&built(default), &calls);
}

#[test]
fn r22_a_mebibyte_of_tenant_counts_to_its_last_byte() {
    let mut tenants = [
        "a".repeat(1 << 20),
        "a".repeat(1 << 20),
        "a".repeat((1 << 20) - 1),
    ];
    tenants[1].replace_range((1 << 20) - 1.., "b");
    let limiter = built(Limiter::builder().limit("tool", bucket(1).per(["tenant"])));
    assert_all_apart(
        &limiter,
        &tenants.each_ref().map(|tenant| of_tenant(tenant)),
    );
}

#[test]
fn r22_values_of_two_fields_do_not_run_into_each_other() {
    let limiter = built(Limiter::builder().limit("tool", bucket(1).per(["tenant", "user"])));
    let call = |tenant: Option<&'static str>, user: Option<&'static str>| {
        let fields = [("tenant", tenant), ("user", user)].into_iter();
        let given = fields.filter_map(|(field, value)| Some((field, value?)));
        given.fold(Call::new("tool"), |call, (field, value)| {
            call.field(field, value)
        })
    };
    assert_all_apart(
        &limiter,
        &[
            call(Some("a"), Some("b")),
            call(Some("b"), Some("a")),
            call(Some("ab"), Some("")),
            call(Some(""), Some("ab")),
            call(Some("ab"), None),
            call(None, Some("ab")),
            call(None, None),
            call(Some(""), None),
            call(None, Some("")),
            call(Some(""), Some("")),
        ],
    );
    // The order in which fields are set is no matter, nor are those that nothing asks for.
    let again = Call::new("tool")
        .field("session", "1")
        .field("user", "b")
        .field("tenant", "a");
    assert!(!admits(&limiter, &again));
}

#[test]
fn the_field_tool_is_the_name_of_the_tool_whatever_is_set() {
    let limiter = built(Limiter::builder().limit("all", bucket(1).tools(["*"]).per(["tool"])));
    assert!(admits(&limiter, &Call::new("one")));
    assert!(!admits(&limiter, &Call::new("one").field("tool", "two")));
    assert!(admits(&limiter, &Call::new("two").field("tool", "one")));
}

#[test]
fn r25_tools_of_one_name_on_two_servers_have_their_own_limits_and_are_charged_once() {
    let limiter = built(
        Limiter::builder()
            .limit("web:search", Limit::per_minute(2).burst(2))
            .limit("files/search", Limit::per_minute(3).burst(3))
            .limit("a.b:c/search", Limit::per_minute(4).burst(4)),
    );
    for (tool, due) in [("web:search", 2), ("files/search", 3), ("a.b:c/search", 4)] {
        assert_eq!(admitted(&limiter, &Call::new(tool), 9), due, "{tool}");
    }
    // The bare name is neither.
    assert!(limiter.limits_of("search").is_empty());
    let other = built(Limiter::builder().limit("search", Limit::per_minute(3).burst(3)));
    assert_eq!(admitted(&other, &Call::new("search"), 9), 3);
}

#[test]
fn r37_two_users_at_fifty_a_minute_for_three_days_are_never_refused() {
    let limit = Limit::per_minute(60).burst(60).per(["user"]);
    let limiter = built(Limiter::builder().limit("tool", limit));
    let agents = [&limiter, &limiter];
    let hours = if store::is_redis() { 1 } else { 3 * 24 };
    let calls = hours * 60 * 50;
    for call in 0..calls {
        let now = Duration::from_millis(1_200 * call);
        for user in ["a", "b"] {
            let agent = agents[usize::try_from(call % 2).expect("0 or 1")];
            // An agent is made anew for each call.
            let call = Call::new("tool").field("user", user);
            assert!(
                agent.at(now).try_acquire_at(&call, now).is_admitted(),
                "{user} at {now:?}"
            );
        }
    }
    // The same at the end as at the start: 60 at once.
    let end = Duration::from_secs(3 * 86_400) + HOUR;
    for user in ["a", "b"] {
        let call = Call::new("tool").field("user", user);
        let got = (0..100).filter(|_| limiter.at(end).try_acquire_at(&call, end).is_admitted());
        assert_eq!(got.count(), 60, "{user}");
    }
}

#[test]
fn r48_what_is_wrong_stops_the_load_and_the_limit_is_named() {
    let limiter = || Limiter::builder();
    for (limits, message) in [
        (
            limiter().limit("a", bucket(1)).limit("a", bucket(2)),
            "limit 'a': name must be given once",
        ),
        (
            limiter().limit("", bucket(1)),
            "name must be a tool's name or a pattern",
        ),
        (
            limiter().limit("[default]", bucket(1)),
            "name must be a tool's name or a pattern",
        ),
        (
            limiter().limit("a", bucket(1).cost(2)),
            "limit 'a': cost must be a whole number from 1 to 1",
        ),
        (
            limiter().limit("a", bucket(1).tools(["b", " c"])),
            "limit 'a': tools must be",
        ),
        (
            limiter().limit("a", bucket(1).per(["cost"])),
            "limit 'a': per must be",
        ),
        (
            limiter().limit("a", bucket(1).per(["x", "x"])),
            "limit 'a': per must be",
        ),
        (
            limiter().default_limit(bucket(0)),
            "limit '[default]': burst must be",
        ),
        (
            limiter().default_limit(bucket(1).tools(["a"])),
            "limit '[default]': tools must be left out",
        ),
    ] {
        let error = limits.build().expect_err(message).to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn r49_reloading_the_same_limits_changes_nothing() {
    let limits = || {
        Limiter::builder()
            .limit("tool", Limit::per_hour(1).burst(3))
            .limit("split", Limit::per_hour(1).burst(3).per(["tenant"]))
            .default_limit(bucket(3))
    };
    let limiter = built(limits());
    let calls = [
        Call::new("tool"),
        Call::new("split").field("tenant", "a"),
        Call::new("other"),
    ];
    for call in &calls {
        assert!(admits(&limiter, &call.clone().cost(tokens(3))));
    }
    // At times that are no whole number of anything.
    for minute in 0..10 {
        let now = Duration::from_nanos(minute * 60_000_000_007);
        for call in &calls {
            let before = refused(&limiter, call, now).retry_after;
            reload(&limiter, limits(), now);
            assert_eq!(before.map(|wait| now + wait), Some(HOUR));
            assert_eq!(refused(&limiter, call, now).retry_after, before);
        }
    }
}

#[test]
fn r49_only_the_limit_that_changed_moves() {
    let limits = |rate: u64| {
        Limiter::builder()
            .limit("same", Limit::per_second(3).burst(7))
            .limit("tool", Limit::per_hour(rate).burst(3))
    };
    let limiter = built(limits(1));
    assert!(admits(&limiter, &Call::new("same").cost(tokens(7))));
    assert!(admits(&limiter, &Call::new("tool").cost(tokens(3))));
    let now = Duration::from_nanos(1);
    let same = refused(&limiter, &Call::new("same"), now).retry_after;
    reload(&limiter, limits(3_600), now);
    assert_eq!(refused(&limiter, &Call::new("same"), now).retry_after, same);
    // A token in a second now; what had come until then stays.
    let wait = refused(&limiter, &Call::new("tool"), now)
        .retry_after
        .expect("affordable");
    assert!(
        wait <= Duration::from_secs(1) && wait > Duration::from_millis(999),
        "{wait:?}"
    );
}

#[test]
fn r49_a_reload_that_is_refused_leaves_the_old_limits_in_force() {
    let limiter = built(Limiter::builder().limit("tool", bucket(2)));
    let call = Call::new("tool");
    assert!(admits(&limiter, &call));
    let before = limiter.snapshot_at(START);
    for bad in [
        Limiter::builder().limit("tool", bucket(0)),
        Limiter::builder()
            .limit("other", bucket(1))
            .limit("tool", bucket(1).cost(9)),
        Limiter::builder()
            .limit("tool", bucket(9))
            .default_limit(bucket(1).tools(["a"])),
        Limiter::builder().limit("tool", bucket(9)).clock(|| START),
    ] {
        assert!(limiter.reload_at(bad, START).is_err());
        assert_eq!(limiter.snapshot_at(START), before);
    }
    assert_eq!(admitted(&limiter, &call, 9), 1);
}

#[test]
fn a_lower_burst_cuts_the_level_and_a_higher_one_adds_nothing() {
    for (drawn, burst, left) in [
        (0, 4, 4),
        (3, 4, 4),
        (7, 4, 3),
        (10, 4, 0),
        (0, 20, 10),
        (6, 20, 4),
    ] {
        for (per, read) in [(&[][..], "tool"), (&["tenant"][..], "split")] {
            let limiter =
                built(Limiter::builder().limit("tool", bucket(10).per(per.iter().copied())));
            let call = of_tenant("a");
            if drawn > 0 {
                assert!(admits(&limiter, &call.clone().cost(tokens(drawn))));
            }
            let changed = bucket(burst).per(per.iter().copied());
            reload(&limiter, Limiter::builder().limit("tool", changed), START);
            // In Redis, what is full is not kept.
            let is_new = store::is_redis() && drawn == 0;
            let left = if is_new { burst } else { left };
            // And what is carried is rounded up, to the next microsecond.
            let now = Duration::from_micros(1);
            let admits = |_: &usize| limiter.at(now).try_acquire_at(&call, now).is_admitted();
            let got = (0..30).filter(admits).count() as u64;
            assert_eq!(got, left, "{drawn} of 10 drawn, then {burst}: {read}");
        }
    }
}

#[test]
fn limits_keep_their_levels_by_name_whatever_else_changes() {
    let limiter = built(Limiter::builder().limit("crm", bucket(5).tools(["a"])));
    assert!(admits(&limiter, &Call::new("a").cost(tokens(3))));
    // Other tools, another cost, another place, another limit before it.
    let limits = Limiter::builder()
        .limit("new", bucket(9).tools(["*"]))
        .limit("crm", bucket(5).tools(["b", "c*"]).cost(2));
    reload(&limiter, limits, START);
    assert_eq!(remaining(&limiter, "crm", START), 2);
    assert_eq!(admitted(&limiter, &Call::new("b"), 9), 1);
    assert!(admits(&limiter, &Call::new("a")));
    // Under a new name it is full; under its old one again, too, where nobody else can have it still.
    reload(
        &limiter,
        Limiter::builder().limit("other", bucket(5).tools(["b"])),
        START,
    );
    assert_eq!(admitted(&limiter, &Call::new("b"), 9), 5);
    reload(
        &limiter,
        Limiter::builder().limit("crm", bucket(5).tools(["b"])),
        START,
    );
    let left = if store::is_shared() { 0 } else { 5 };
    assert_eq!(admitted(&limiter, &Call::new("b"), 9), left);
}

#[test]
fn buckets_under_other_fields_start_as_the_emptiest() {
    let fields = |fields: &'static [&'static str]| {
        let limit = bucket(10).tools(["*"]).per(fields.iter().copied());
        Limiter::builder().limit("all", limit)
    };
    // In Redis all start full, as those of other limits.
    let left = |left| if store::is_redis() { 10 } else { left };
    for new in [&["user"][..], &["tenant", "user"], &["tool"], &[]] {
        let limiter = built(fields(&["tenant"]));
        for (tenant, cost) in [("a", 2), ("b", 7), ("c", 1)] {
            assert!(admits(&limiter, &of_tenant(tenant).cost(tokens(cost))));
        }
        reload(&limiter, fields(new), START);
        let call = of_tenant("a").field("user", "u");
        assert_eq!(admitted(&limiter, &call, 20), left(3), "{new:?}");
    }
    let limiter = built(fields(&[]));
    assert!(admits(&limiter, &of_tenant("a").cost(tokens(4))));
    reload(&limiter, fields(&["tenant"]), START);
    for tenant in ["a", "b", "c"] {
        assert_eq!(
            admitted(&limiter, &of_tenant(tenant), 20),
            left(6),
            "{tenant}"
        );
    }
}

#[test]
fn names_keep_their_numbers_through_reloads() {
    let limiter = built(Limiter::builder().limit("crm", bucket(5).tools(["a", "b"])));
    let number = |tool: &str| {
        limiter
            .try_acquire_at(&Call::new(tool), START)
            .tool_number()
    };
    let name = |number: Option<usize>| limiter.names(0).nth(number.expect("named exactly"));
    let before = number("a");
    assert_eq!(name(before), Some("a"));
    assert_eq!(number("unknown"), None);
    reload(
        &limiter,
        Limiter::builder().limit("x", bucket(5).tools(["b", "a", "c*"])),
        START,
    );
    assert_eq!(number("a"), before);
    assert_eq!(number("c"), None);
    assert_eq!(name(number("b")), Some("b"));
    let names: Vec<_> = limiter.names(0).collect();
    let different: BTreeSet<_> = names.iter().collect();
    assert_eq!(names.len(), different.len());
}
