//! Numbers, keys, URLs and replies: what needs no server.

use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;
use redis::{Value, parse_redis_value};

use super::super::address::Address;
use super::*;

/// The bytes of a reply.
fn reply(text: &str) -> Value {
    parse_redis_value(text.as_bytes()).expect("a reply")
}

fn keys() -> Keys {
    Keys::new("test").expect("a prefix")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_token_takes_just_its_time_or_a_hair_longer(
        count in prop_oneof![1e-2..1e9_f64, 1e-6..1.0_f64],
        burst in 1..=crate::MAX_BURST,
    ) {
        let limit = Limit::per_second(count).burst(burst);
        prop_assume!(limit.check().is_ok());
        let (tokens, nanos) = limit.rate().expect("in range").fraction();
        let exact = BigRational::new(nanos.into(), BigInt::from(tokens) * 1_000);
        let years = BigRational::new(BigInt::from(71_u64 * 365 * 86_400 * 1_000_000), 1.into());
        let Ok(terms) = Terms::new(&limit) else {
            prop_assert!(exact * BigInt::from(burst) >= years);
            return Ok(());
        };
        let as_fraction = |time: Time| {
            BigRational::from_integer(time.whole.into())
                + BigRational::new(time.part.into(), terms.parts.into())
        };
        let token = as_fraction(terms.token);
        let late = &token - exact;
        prop_assert!(late >= BigRational::from_integer(0.into()));
        prop_assert!(late < BigRational::new(1.into(), BigInt::from(1_u64 << 52)));
        prop_assert!(u128::from(terms.parts) <= MOST_PARTS && terms.token.part < terms.parts);
        // A price is that many times as long, and so is the burst's time.
        prop_assert_eq!(as_fraction(terms.refill), &token * BigInt::from(burst));
        prop_assert_eq!(terms.price(burst), Some(terms.refill));
        prop_assert_eq!(terms.price(burst + 1), None);
        prop_assert!(terms.refill.whole < 1 << 51);
    }
}

#[test]
fn a_limit_that_takes_a_lifetime_to_refill_is_refused_with_the_range() {
    let limit = Limit::per_day(0.01);
    assert!(Terms::new(&limit.clone().burst(259)).is_ok());
    assert_eq!(
        Terms::new(&limit.burst(260)).unwrap_err().to_string(),
        "burst must be at most what comes in 71 years (with a Redis store), got 260"
    );
}

#[test]
fn r22_buckets_of_different_calls_have_different_keys_of_one_length() {
    let keys = keys();
    let long = ["x", "y"].map(|end| "t".repeat(1 << 20) + end);
    let values = [
        [Some("a:b"), Some("c")],
        [Some("a"), Some("b:c")],
        [Some("a\0b"), Some("c")],
        [Some("x\r\nDEL *"), Some("c")],
        [Some("{t}"), Some("c")],
        [Some("a}b{c"), Some("d")],
        [Some(""), Some("c")],
        [None, Some("c")],
        [Some("c"), None],
        [Some("missing"), Some("c")],
        [Some(&*long[0]), Some("c")],
        [Some(&*long[1]), Some("c")],
    ];
    let mut seen = std::collections::HashSet::new();
    for [tenant, user] in values {
        let key = keys.bucket("crm", [("tenant", tenant), ("user", user)]);
        assert_eq!(key.len(), "{test}:bucket:".len() + 16 + 1 + 32, "{key}");
        assert!(key.starts_with("{test}:bucket:"), "{key}");
        assert!(seen.insert(key), "{tenant:?} {user:?}");
    }
    // Other fields, another limit, nothing that splits it, another application.
    assert!(seen.insert(keys.bucket("crm", [("user", Some("a:b")), ("tenant", Some("c"))])));
    assert!(seen.insert(keys.bucket("cr", [("mtenant", Some("a:b")), ("user", Some("c"))])));
    assert!(seen.insert(keys.bucket("crm", [])));
    let other = Keys::new("test2").expect("a prefix");
    assert!(seen.insert(other.bucket("crm", [])));
    assert_ne!(keys.pause("crm", None), keys.pause("crm", Some("")));
}

#[test]
fn a_buckets_line_is_beside_it() {
    for prefix in ["test", "a:bucket:b"] {
        let keys = Keys::new(prefix).expect("a prefix");
        let bucket = keys.bucket("crm", [("tenant", Some("acme"))]);
        let line = Keys::line(&bucket);
        let hashes = bucket.strip_prefix(&format!("{{{prefix}}}:bucket:"));
        let hashes = hashes.expect("a bucket");
        assert_eq!(line, format!("{{{prefix}}}:line:{hashes}"));
        assert_eq!(keys.kind(&line), Some("line"));
    }
}

#[test]
fn a_key_stays_what_it_was() {
    // Another one would be a full bucket.
    let key = keys().bucket("crm", [("tenant", Some("acme")), ("user", None)]);
    assert_eq!(
        &*key,
        "{test}:bucket:0f6f31965ef53e94:2b5a483a005578d4dad7c0c4bab6537d"
    );
    let limit = Limit::per_minute(7).burst(3);
    assert_eq!(
        &*Terms::new(&limit).expect("in range").limit,
        "1:7:8571428:4:3"
    );
}

#[test]
fn prefixes_that_would_move_a_key_to_another_slot_are_refused() {
    for bad in ["", "{a}", "a}b", "a b", "a\n", "ä", &"a".repeat(65)] {
        assert!(Keys::new(bad).is_err(), "{bad:?}");
    }
    assert_eq!(
        Keys::new("a{b}").unwrap_err().to_string(),
        "prefix must be the application's name, of 1 to 64 letters, digits and '.', '_', ':', '/' or '-', got 'a{b}'"
    );
    for good in ["a", "myapp:prod/eu-1.2_x", &"a".repeat(64)] {
        assert!(Keys::new(good).is_ok(), "{good}");
    }
}

#[test]
fn replies_that_break_the_contract_are_no_answers() {
    let ask = ask(&keys(), "tool", &Limit::per_second(3).burst(2), 1);
    let request = take(std::slice::from_ref(&ask));
    let good = request.read(1, &reply("*5\r\n:1\r\n:0\r\n:333333\r\n:1\r\n:0\r\n"));
    assert!(good.expect("an answer").admitted == 1);
    for bad in [
        "+OK\r\n",
        ":1\r\n",
        "$-1\r\n",
        "$1\r\n1\r\n",
        "*0\r\n",
        "*1\r\n:1\r\n",
        "*4\r\n:1\r\n:0\r\n:0\r\n:0\r\n",
        "*6\r\n:1\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*9\r\n:1\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        // Admitted, and yet to wait; refused without a wait; neither.
        "*5\r\n:1\r\n:5\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n:0\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n:2\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n:-1\r\n:1\r\n:0\r\n:0\r\n:0\r\n",
        // A part that is none, less than nothing, more than a burst, texts, nothing.
        "*5\r\n:1\r\n:0\r\n:0\r\n:3\r\n:0\r\n",
        "*5\r\n:1\r\n:0\r\n:-1\r\n:0\r\n:0\r\n",
        "*5\r\n:1\r\n:0\r\n:666667\r\n:0\r\n:0\r\n",
        "*5\r\n:0\r\n:-5\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n:0\r\n:5\r\n:0\r\n:0\r\n:9223372036854775807\r\n",
        "*5\r\n$1\r\n1\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n$-1\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n#t\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "*5\r\n,1.5\r\n:0\r\n:0\r\n:0\r\n:0\r\n",
        "-ERR no\r\n",
    ] {
        assert!(request.read(1, &reply(bad)).is_err(), "{bad:?}");
    }
    let pause = Request::Pause {
        key: ask.pause,
        time: Duration::from_secs(1),
        terms: ask.terms,
    };
    assert!(pause.read(1, &reply("+OK\r\n")).is_ok());
    assert!(pause.read(1, &reply("*1\r\n:1\r\n")).is_err());
    assert!(pause.read(1, &reply("+NO\r\n")).is_err());
}

#[test]
fn urls_of_all_forms_are_read() {
    for (url, shown, nodes) in [
        ("redis://h?prefix=a", "redis://h", "h:6379"),
        (
            "redis://u:p%40@h:1/2?prefix=a&timeout=5s",
            "redis://h:1/2",
            "h:1",
        ),
        (
            "rediss://:p@h:1,[::1]:2,i/?prefix=a",
            "rediss://h:1,[::1]:2,i/",
            "h:1 ::1:2 i:6379",
        ),
        (
            "unix:///run/redis.sock?prefix=a&db=3",
            "unix:///run/redis.sock",
            "/run/redis.sock",
        ),
        ("unix://u:p@/run/s?prefix=a", "unix:///run/s", "/run/s"),
        (
            "redis+sentinel://h,i:3/main/1?prefix=a",
            "redis+sentinel://h,i:3/main/1",
            "h:26379 i:3",
        ),
        (
            "redis+sentinel://h/0/?prefix=a",
            "redis+sentinel://h/0/",
            "h:26379",
        ),
    ] {
        let address = Address::parse(url).expect(url);
        assert_eq!(address.to_string(), shown);
        let read: Vec<_> = address.nodes.iter().map(ToString::to_string).collect();
        assert_eq!(read.join(" "), nodes);
    }
}

#[test]
fn urls_are_refused_with_what_is_allowed_and_without_the_password() {
    for (url, message) in [
        (
            "",
            "url must be redis://host, rediss://host (TLS), unix:///path or redis+sentinel://host/service, got ''",
        ),
        (
            "u:secret@h",
            "url must be redis://host, rediss://host (TLS), unix:///path or redis+sentinel://host/service, got 'h'",
        ),
        (
            "http://u:secret@h?prefix=a",
            "url must be redis://host, rediss://host (TLS), unix:///path or redis+sentinel://host/service, got 'http://h'",
        ),
        (
            "redis://u:secret@h/1",
            "url must be with '?prefix=' and the application's name, got 'redis://h/1'",
        ),
        (
            "redis://u:secret@h/x?prefix=a",
            "url must be with a database from 0 to 65,535, got 'x'",
        ),
        (
            "redis://u:secret@h:x?prefix=a",
            "url must be with hosts such as 'host', 'host:6379' or '[::1]:6379', got 'h:x'",
        ),
        (
            "redis://?prefix=a",
            "url must be with hosts such as 'host', 'host:6379' or '[::1]:6379', got ''",
        ),
        (
            "redis://h?prefix=a&db=3",
            "url must be with the database behind the hosts, as in redis://host/5 ('db' is for sockets), got 'db=3'",
        ),
        (
            "redis://h?prefix=a&prefix=b",
            "url must be with each of its settings once, got 'prefix' again",
        ),
        (
            "redis://h?prefix=a&password=secret",
            "url must be with 'prefix', 'timeout' or 'db' after '?', got 'password'",
        ),
        (
            "redis://h?prefix=a&timeout=0ms",
            "timeout must be from '1ms' to '60s', a whole number of ms or s, got '0ms'",
        ),
        (
            "redis://h?prefix=a&timeout=61s",
            "timeout must be from '1ms' to '60s', a whole number of ms or s, got '61s'",
        ),
        (
            "redis://h?prefix=a&timeout=1.5s",
            "timeout must be from '1ms' to '60s', a whole number of ms or s, got '1.5s'",
        ),
        (
            "redis+sentinel://h?prefix=a",
            "url must be with the service's name after the hosts, as in 'redis+sentinel://host:26379/service?prefix=myapp', got 'redis+sentinel://h'",
        ),
        (
            "redis+sentinel://h/0?prefix=a",
            "url must be with the service's name after the hosts, as in 'redis+sentinel://host:26379/service?prefix=myapp', got 'redis+sentinel://h/0'",
        ),
        (
            "redis://u:secret%ff@h?prefix=a",
            "url must be with a password in UTF-8, '%' and two digits for a byte, got other bytes",
        ),
    ] {
        assert_eq!(Address::parse(url).unwrap_err().to_string(), message);
    }
}

#[test]
fn nothing_shows_the_password() {
    let address = Address::parse("redis://user:secret@h/0?prefix=a").expect("a URL");
    let shown = format!("{address} {address:?}");
    assert!(
        !shown.contains("secret") && !shown.contains("user"),
        "{shown}"
    );
}
