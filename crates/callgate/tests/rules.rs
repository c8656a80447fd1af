//! Which limits hold for a call, and what they do together.

use std::time::Duration;

use callgate::{Call, Decision, Limit, Limiter};

const AT: Duration = Duration::ZERO;

#[test]
fn smoke() {
    let limiter = Limiter::builder()
        .limit(
            "crm",
            Limit::per_hour(1)
                .burst(3)
                .tools(["crm_*", "lookup"])
                .per(["tenant"]),
        )
        .limit("lookup", Limit::per_hour(1).burst(2))
        .default_limit(Limit::per_hour(1).burst(1))
        .build()
        .unwrap();
    let admitted = |call: Call<'_>| limiter.try_acquire_at(&call, AT).is_admitted();
    assert!(admitted(Call::new("lookup").field("tenant", "a")));
    assert!(admitted(Call::new("lookup").field("tenant", "a")));
    let refused = limiter.try_acquire_at(&Call::new("lookup").field("tenant", "a"), AT);
    let Decision::Rejected(refused) = refused else {
        panic!()
    };
    assert_eq!(refused.limit, "lookup");
    assert!(admitted(Call::new("crm_x").field("tenant", "a")));
    assert!(!admitted(Call::new("crm_x").field("tenant", "a")));
    assert!(admitted(Call::new("crm_x").field("tenant", "b")));
    assert!(admitted(Call::new("crm_x")));
    assert!(admitted(Call::new("other")));
    assert!(!admitted(Call::new("other")));
    assert!(admitted(Call::new("third")));
    assert_eq!(limiter.limits_of("lookup"), ["crm", "lookup"]);
    assert_eq!(limiter.limits_of("x"), ["[default]"]);
    println!("{:#?}", limiter.snapshot_at(AT));
    limiter
        .reload_at(
            Limiter::builder().limit("lookup", Limit::per_hour(5).burst(9)),
            AT,
        )
        .unwrap();
    assert_eq!(limiter.snapshot_at(AT)[0].remaining, Some(0));
    assert!(admitted(Call::new("other")));
}
