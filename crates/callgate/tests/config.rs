//! Files of limits: what they say, and that whatever else they hold is refused in plain words.
#![cfg(all(feature = "config", not(loom)))]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use callgate::{Call, ConfigError, Decision, Limit, Limiter, LimiterBuilder, OnStoreError, Unit};
use proptest::prelude::*;

/// Every key, in each way that it can be written.
const GOOD: &str = r#"
dry_run = true

[limits.lookup_customer]
requests_per_second = 2
burst = 2

[limits.crm]
tools = ["crm_*", "lookup_customer"] # one budget for several tools
rate = "300/min"
burst = 20
cost = 2
per = ["tenant", "tool"]
max_wait = "1.5s"
max_concurrent = 4

[limits."search documents"]
quota = "1_00/h"

[limits]
a_slow_one = { requests_per_second = 1e-3, burst = 0x10 }
b.quota = '''100/min'''
b.burst = +20

[default]
rate = "0.5/s"
burst = 10
max_wait = "2min"
max_concurrent = 1
"#;

fn good() -> String {
    GOOD.replace("1_00", "100")
}

/// What a file says: its limits by name, and whether it is a dry run.
type Said = (Vec<(String, Limit)>, bool);

fn said(builder: Result<LimiterBuilder, ConfigError>) -> Result<Said, String> {
    let limiter = builder
        .and_then(LimiterBuilder::build)
        .map_err(|error| error.to_string())?;
    let levels = limiter.snapshot().into_iter();
    let limits = levels
        .map(|level| (level.name.to_owned(), level.limit))
        .collect();
    Ok((limits, limiter.is_dry_run()))
}

fn read(text: &str) -> Result<Said, String> {
    said(LimiterBuilder::from_toml(text, "limits.toml"))
}

fn refusal(text: &str) -> String {
    let refused = LimiterBuilder::from_toml(text, "limits.toml");
    refused.expect_err("a bad file").to_string()
}

fn refused(path: &Path) -> String {
    let refused = LimiterBuilder::from_file(path);
    refused.expect_err("a bad file").to_string()
}

/// A file of these bytes, under a name of its own.
fn written(name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, bytes).expect("a writable folder");
    path
}

#[test]
fn a_file_says_what_the_builder_says() {
    let (limits, dry_run) = read(&good()).expect("a good file");
    let expected = [
        ("lookup_customer", Limit::per_second(2).burst(2)),
        (
            "crm",
            Limit::per_minute(300)
                .burst(20)
                .cost(2)
                .tools(["crm_*", "lookup_customer"])
                .per(["tenant", "tool"])
                .max_wait(Duration::from_millis(1_500))
                .max_concurrent(4),
        ),
        ("search documents", Limit::quota(100, Unit::Hour)),
        ("a_slow_one", Limit::per_second(0.001).burst(16)),
        ("b", Limit::quota(100, Unit::Minute).burst(20)),
        (
            "[default]",
            Limit::per_second(0.5)
                .burst(10)
                .max_wait(Duration::from_secs(120))
                .max_concurrent(1),
        ),
    ];
    let expected = expected.map(|(name, limit)| (name.to_owned(), limit));
    assert_eq!(limits, expected, "in the file's order");
    assert!(dry_run);
}

#[test]
fn a_file_says_what_becomes_of_calls_when_the_store_fails() {
    let text = "
        on_store_error = 'deny'
        [limits.search]
        rate = '1/s'
        burst = 1
        on_store_error = 'raise'
        [default]
        rate = '1/s'
        burst = 1
    ";
    let builder = LimiterBuilder::from_toml(text, "limits.toml").expect("good");
    assert!(format!("{builder:?}").contains("on_store_error: Some(Deny)"));
    let limiter = builder.build().expect("limits in range");
    let policies = limiter.snapshot().into_iter();
    let policies: Vec<_> = policies
        .map(|level| level.limit.when_store_fails())
        .collect();
    assert_eq!(policies, [Some(OnStoreError::Raise), None]);
    for value in ["'closed'", "1", "true"] {
        for (given, limit) in [
            ("on_store_error = 'deny'".to_owned(), value.to_owned()),
            (format!("on_store_error = {value}"), "'deny'".to_owned()),
        ] {
            let limit = format!("[limits.a]\nrate = '1/s'\nburst = 1\non_store_error = {limit}");
            let said = refusal(&format!("{given}\n{limit}"));
            let why = format!("must be 'local', 'deny', 'admit' or 'raise', got {value}");
            assert!(said.contains(&why), "{said}");
        }
    }
}

#[test]
fn a_file_says_where_the_store_is() {
    let of = |store: &str| format!("{}\n[store]\n{store}\n", good());
    let refused = |store: &str| refusal(&of(store));
    for (store, why) in [
        ("", "`url` or `url_env` is missing"),
        ("url = 1", "url must be a text, got 1"),
        ("url = 'memory'", "store must be a store's URL"),
        ("url = 'http://:secret@127.0.0.1'", "a store's URL"),
        (
            "url_env = 'CALLGATE_TEST_NO_SUCH_VARIABLE'\nulr = 1",
            "environment variable that is set",
        ),
        (
            "url_env = 'CALLGATE_TEST_NO_SUCH_VARIABLE'\nurl = 'shm:/x'",
            "only one of them is allowed",
        ),
        ("url_env = ''", "environment variable that is set"),
        ("url_env = 2", "environment variable that is set"),
        ("url_env = 'A=B'", "environment variable that is set"),
        (
            "url = 'shm:/x'\nurl_env = 'HOME'",
            "only one of them is allowed",
        ),
        ("ulr = 'shm:/x'", "did you mean `url`?"),
    ] {
        let said = refused(store);
        assert!(said.contains(why), "{store}: {said}");
    }
    // Nor in the line that is shown.
    for store in [
        "url = 'http://:secret@127.0.0.1'",
        "url = 'redis://user:secret@127.0.0.1/0?prefix=test",
        "url = 'redis://user:sec@ret@127.0.0.1/0'\nulr = 1",
        "url = ['redis://user:secret@127.0.0.1/0']",
        "url_env = 'redis://user:secret@127.0.0.1/0?prefix=test'",
    ] {
        let said = refused(store);
        let is_shown = said.contains("secret") || said.contains("ret@");
        assert!(!is_shown, "{said}");
        assert!(said.contains("--> limits.toml:"), "{said}");
    }
    assert!(
        refusal("store = 'shm:/x'\nlimits.a.quota = '9/s'").contains("a table, written [store]")
    );
    // It is opened when the limiter is made.
    let builder =
        LimiterBuilder::from_toml(&of("url = 'shm:/no/such/folder/callgate'"), "limits.toml");
    let error = builder
        .expect("a good file")
        .build()
        .expect_err("no such folder");
    assert!(error.to_string().starts_with("store must be "), "{error}");
}

#[test]
fn a_variable_that_is_not_set_is_missed_when_a_limiter_is_made_with_the_store() {
    const NAME: &str = "CALLGATE_TEST_NO_SUCH_VARIABLE";
    let text = format!("{}\n[store]\nurl_env = '{NAME}'\n", good());
    let read = || LimiterBuilder::from_toml(&text, "limits.toml").expect("a good file");
    assert_eq!(read().unset_variable(), Some(NAME));
    let limiter = read().in_memory().build().expect("it needs no store");
    for missed in [
        read().build().map(drop),
        limiter.reload(read()),
        LimiterBuilder::from_toml(&text, "limits.toml").and_then(|read| read.build().map(drop)),
    ] {
        let said = missed.expect_err("no store").to_string();
        let why = format!("the name of an environment variable that is set, got '{NAME}'");
        assert!(
            said.contains(&why) && said.contains("--> limits.toml:"),
            "{said}"
        );
    }
}

fn with_wait(wait: &str) -> String {
    format!("limits.search = {{ rate = '1/s', burst = 1, max_wait = {wait} }}")
}

#[test]
fn a_time_is_read_to_the_nanosecond() {
    for (written, nanos) in [
        ("0s", 0),
        ("000.0h", 0),
        ("2s", 2_000_000_000),
        ("500ms", 500_000_000),
        ("1.5s", 1_500_000_000),
        ("2min", 120_000_000_000),
        ("0.1h", 360_000_000_000),
        (".5s", 500_000_000),
        ("5.s", 5_000_000_000),
        ("0.000001ms", 1),
        ("0.000000001s", 1),
        ("1.10000000000000000000s", 1_100_000_000),
        ("0.0000000000025h", 9),
        ("24h", 86_400_000_000_000),
        ("86399.999999999s", 86_399_999_999_999),
        ("86400000ms", 86_400_000_000_000),
    ] {
        let (limits, _) = read(&with_wait(&format!("'{written}'"))).expect("a good file");
        let time = limits[0].1.longest_wait();
        assert_eq!(time, Duration::from_nanos(nanos), "{written}");
    }
}

/// R04, R48
#[test]
fn what_is_no_time_that_a_call_may_wait_is_refused_with_what_is_allowed() {
    let long = "9".repeat(1_000);
    let texts = [
        "",
        " ",
        "2",
        "s",
        ".s",
        "2 s",
        " 2s",
        "2s ",
        "2m",
        "2S",
        "2sec",
        "2d",
        "2us",
        "2µs",
        "1day",
        "-2s",
        "-0s",
        "+2s",
        "inf",
        "nan",
        "NaNs",
        "1e3s",
        "1_000s",
        "1,5s",
        "1.2.3s",
        "1s500ms",
        "0x10s",
        "\u{ff12}s",
        "2/s",
        "24.1h",
        "86400.000000001s",
        "86400001ms",
        "0.0000000001s",
        "0.0000001ms",
        "18446744073709551616s",
        &format!("{long}s"),
        &format!("0.{long}s"),
    ]
    .map(|text| format!("'{text}'"));
    let others = [
        "2",
        "0",
        "2.0",
        "inf",
        "true",
        "[2]",
        "['2s']",
        "{ s = 2 }",
        "07:32:00",
    ];
    for written in texts.iter().map(String::as_str).chain(others) {
        let error = refusal(&with_wait(written));
        let said = "error: limit 'search': max_wait must be a time with its unit (ms, s, min or h), \
            such as '2s', from 0 to 86,400 s in whole nanoseconds, got ";
        assert!(error.starts_with(said), "{written}: {error}");
        let shown: String = written.chars().take(60).collect();
        assert!(error[said.len()..].starts_with(&shown), "{error}");
        assert!(error.contains("--> limits.toml:1:55\n"), "{error}");
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
    }
}

#[test]
fn the_limits_of_a_file_are_in_force() {
    let path = written("in_force.toml", good());
    let limiter = Limiter::from_file(&path).expect("a good file");
    assert_eq!(limiter.limits_of("a_slow_one"), ["a_slow_one"]);
    assert_eq!(
        limiter.limits_of("lookup_customer"),
        ["lookup_customer", "crm"]
    );
    assert_eq!(limiter.limits_of("crm_find"), ["crm"]);
    assert_eq!(limiter.limits_of("another"), ["[default]"]);
}

#[test]
fn a_limiter_is_built_from_a_text_as_from_a_file() {
    let text = "limits.search = { rate = '10/s', burst = 5 }";
    let path = written("text.toml", text);
    let of_text = LimiterBuilder::from_toml(text, "limits.toml").expect("a good file");
    let of_file = LimiterBuilder::from_file(path).expect("a good file");
    for builder in [of_text, of_file] {
        let limiter = builder.build().expect("good limits");
        let names: Vec<&str> = limiter.names(0).collect();
        assert_eq!(names, ["search"]);
    }
}

/// R48
#[test]
fn a_byte_order_mark_and_windows_line_ends_are_taken() {
    let expected = read(&good()).expect("a good file");
    let windows = good().replace('\n', "\r\n");
    for text in [
        format!("\u{feff}{}", good()),
        windows.clone(),
        format!("\u{feff}{windows}"),
    ] {
        assert_eq!(read(&text), Ok(expected.clone()));
        let path = written("marked.toml", text);
        assert_eq!(said(LimiterBuilder::from_file(path)), Ok(expected.clone()));
    }
    let bad = "\u{feff}brust = 5\r\n[limits.search]\r\nbrust = 5\r\n";
    let error = refusal(bad);
    assert!(error.contains("--> limits.toml:1:1\n"), "{error}");
    assert!(error.contains("--> limits.toml:3:1\n"), "{error}");
}

#[test]
fn what_is_not_utf_8_is_refused_where_it_is() {
    for (bytes, place, hint) in [
        (&b"[limits.caf\xe9]\n"[..], ":1:12\n", "^\n"),
        (b"# \xe2\x82\xac\n# \xff\n", ":2:3\n", "^\n"),
        (b"dry_run = true # \xe2\x82", ":1:18\n", "^\n"),
        (b"\xff\xfe[\0l\0", ":1:1\n", "^ this is how UTF-16 starts\n"),
        (b"\xfe\xff\0[\0l", ":1:1\n", "^ this is how UTF-16 starts\n"),
    ] {
        let path = written("not_utf_8.toml", bytes);
        let error = refused(&path) + "\n";
        assert!(
            error.starts_with("error: the file is not UTF-8\n"),
            "{error}"
        );
        assert!(error.contains(place) && error.contains(hint), "{error}");
    }
}

#[test]
fn nesting_has_an_end() {
    let deep = 100_000;
    for text in [
        format!("a = {}{}", "[".repeat(deep), "]".repeat(deep)),
        format!("a = {}1{}", "{ a = ".repeat(deep), " }".repeat(deep)),
        format!("{}a = 1", "a.".repeat(deep)),
        format!("[{}a]", "a.".repeat(deep)),
        "[".repeat(deep),
    ] {
        let error = refusal(&text);
        assert!(error.starts_with("error: "), "{error}");
        assert!(error.len() < 100_000, "{} bytes", error.len());
    }
}

#[test]
fn a_large_file_is_read_and_one_without_end_is_not() {
    let limits = (0..2_000).map(|n| format!("[limits.tool_{n}]\nrate = '1/s'\nburst = 100\n\n"));
    let large: String = limits.collect();
    let (limits, _) = read(&large).expect("a good file");
    assert_eq!(limits.len(), 2_000);
    assert_eq!(limits[1_999].0, "tool_1999");

    let error = refusal(&large.replace("burst = 100", "burst = 0"));
    assert_eq!(error.matches("error: ").count(), 20);
    assert!(error.ends_with("\n1980 more problems are not shown"));

    let path = written("endless.toml", vec![b'#'; 10_000_000]);
    let error = refused(&path);
    assert!(
        error.starts_with("error: the file is larger than 1 MiB\n"),
        "{error}"
    );
    fs::remove_file(path).expect("its own file");
}

#[test]
fn a_long_line_is_cut() {
    let long = "x".repeat(1_000_000);
    for text in [
        format!("[limits.search]\nrate = '{long}'\nburst = 5"),
        format!("[limits.search]\nrate = '10/s' # {long}\nburst = 0 # {long}"),
        format!("[limits.{long}]\nrate = 5\n{long} = 5"),
        format!("[limits.search]\ntools = ['{long}', '[']\nper = ['{long}', '{long}']"),
        format!("dry_run = [{}]", "'a', ".repeat(200_000)),
        format!("{long} = {long}"),
        long.clone(),
    ] {
        let error = refusal(&text);
        let longest = error.lines().map(|line| line.chars().count()).max();
        assert!(longest < Some(350), "{longest:?}");
    }
}

/// R49: what a writer leaves that was stopped half way.
#[test]
fn half_a_file_is_refused_or_good_by_itself() {
    let text = good();
    let mut good = 0;
    for (end, _) in text.char_indices() {
        match read(&text[..end]) {
            Ok(_) => good += 1,
            Err(error) => assert!(error.contains("--> limits.toml"), "{error}"),
        }
    }
    assert!(
        (5..text.len() / 2).contains(&good),
        "{good} of {}",
        text.len()
    );
}

/// R49
#[test]
fn reloading_a_file_fills_no_bucket_and_a_broken_one_changes_nothing() {
    let text = "[limits.search]\nrate = '1/h'\nburst = 3\n";
    let path = written("reloaded.toml", text);
    let limiter = Limiter::from_file(&path).expect("a good file");
    let now = Duration::from_secs(1);
    let ask = |tool: &str| limiter.try_acquire_at(&Call::new(tool), now);
    let reload = || limiter.reload_at(LimiterBuilder::from_file(&path)?, now);
    for _ in 0..3 {
        assert!(ask("search").is_admitted());
    }
    let retry_after = || match ask("search") {
        Decision::Rejected(rejection) => rejection.retry_after,
        Decision::Admitted(_) => None,
    };
    let told = retry_after();
    assert!(told.is_some());

    for _ in 0..10 {
        assert_eq!(reload(), Ok(()));
        assert_eq!(retry_after(), told);
    }
    fs::write(
        &path,
        format!("{text}[limits.lookup]\nrate = '1/h'\nburst = 1\n"),
    )
    .expect("its own file");
    assert_eq!(reload(), Ok(()));
    assert_eq!(retry_after(), told);
    assert!(ask("lookup").is_admitted());

    for broken in [
        &text[..30],
        "",
        "[limits.search]\nrate = '1/s'\nburst = 0",
        "]",
    ] {
        fs::write(&path, broken).expect("its own file");
        let error = reload().expect_err("a broken file").to_string();
        assert!(error.contains("reloaded.toml"), "{error}");
        assert_eq!(retry_after(), told, "{broken}");
    }
    fs::remove_file(&path).expect("its own file");
    assert!(reload().is_err());
    assert_eq!(retry_after(), told);
}

/// Whether a text can be printed: no character in it is obeyed by a terminal.
fn is_printable(text: &str) -> bool {
    let obeyed = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
    !text.contains(obeyed)
}

#[test]
fn no_character_that_a_terminal_obeys_is_printed() {
    for obeyed in [
        "\u{1b}[31m",
        "\u{7}",
        "\u{9b}2J",
        "\r",
        "\u{202e}",
        "\u{7f}",
        "\0",
    ] {
        let escaped = format!(
            "\\U{:08x}",
            u32::from(obeyed.chars().next().unwrap_or_default())
        );
        for shown in [obeyed, &escaped] {
            for text in [
                format!("[limits.\"{shown}\"]"),
                format!("[limits.\"a{shown}a\"]\nrate = \"{shown}\"\nburst = \"{shown}\""),
                format!("[limits.a]\ntools = [\"[{shown}\"]\nper = [\"\", \"{shown}\"]"),
                format!("\"{shown}\" = 1\n[\"a{shown}\"]\n[limits.\"a{shown}\".\"b{shown}\"]"),
                format!("default.\"{shown}\" = 1 # {shown}"),
                format!("# {shown}\n[limits.a]\n{shown}"),
            ] {
                let error = refusal(&text);
                assert!(is_printable(&error), "{error:?}");
                let named = LimiterBuilder::from_toml(&text, &format!("{shown}.toml"));
                let error = named.expect_err("a bad file").to_string();
                assert!(is_printable(&error), "{error:?}");
            }
        }
    }
}

/// What files are made of, and what does not belong in them.
fn pieces() -> impl Strategy<Value = String> {
    const KNOWN: &[&str] = &[
        "\n",
        " ",
        "=",
        " = ",
        ".",
        ",",
        "[",
        "]",
        "[[",
        "]]",
        "{",
        "}",
        "\"",
        "'",
        "\"\"\"",
        "'''",
        "#",
        "\\",
        "\\u",
        "\r\n",
        "\r",
        "\t",
        "\0",
        "\u{1b}[2J",
        "\u{feff}",
        "\u{202e}",
        "é",
        "検索",
        "👩‍👩‍👧",
        "e\u{301}",
        "limits",
        "[limits.search]\n",
        "[limits.\"crm_*\"]\n",
        "[default]\n",
        "dry_run = true\n",
        "requests_per_second = ",
        "rate = ",
        "quota = ",
        "burst = ",
        "cost = ",
        "tools = ",
        "per = ",
        "max_wait = ",
        "max_concurrent = ",
        "store",
        "brust",
        "\"300/min\"",
        "\"100/s\"",
        "\"1.5s\"",
        "2min",
        "0",
        "1",
        "2.0",
        "-1",
        "nan",
        "inf",
        "true",
        "99999999999999999999",
        "1e400",
        "0xff",
        "1979-05-27T07:32:00Z",
        "['tenant', 'tool']",
        "[]",
    ];
    prop_oneof![
        8 => prop::sample::select(KNOWN).prop_map(ToOwned::to_owned),
        1 => any::<String>(),
        1 => any::<char>().prop_map(String::from),
    ]
}

/// A good file with some of its parts replaced.
fn mutated() -> impl Strategy<Value = String> {
    let changes =
        prop::collection::vec((any::<prop::sample::Index>(), 0..12_usize, pieces()), 0..6);
    changes.prop_map(|changes| {
        let mut text: Vec<char> = good().chars().collect();
        for (at, length, piece) in changes {
            let at = at.index(text.len() + 1);
            let end = (at + length).min(text.len());
            text.splice(at..end, piece.chars());
        }
        text.into_iter().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_taken_or_refused_in_plain_words(
        text in prop_oneof![3 => mutated(), 1 => prop::collection::vec(pieces(), 0..40).prop_map(|pieces| pieces.concat())]
    ) {
        if let Err(error) = read(&text) {
                prop_assert!(error.starts_with("error: "), "{error}");
                prop_assert!(error.contains("--> limits.toml"), "{error}");
                prop_assert!(is_printable(&error), "{error:?}");
        }
    }

    #[test]
    fn a_limit_is_read_as_it_is_written(
        count in 1..1_000_000_u64, unit in prop::sample::select(&Unit::ALL[..]), burst in 1..=callgate::MAX_BURST
    ) {
        let symbol = unit.symbol();
        let file = read(&format!("limits.a = {{ rate = '{count}/{symbol}', burst = {burst} }}"));
        let rate: Limit = format!("{count}/{symbol}").parse()?;
        prop_assert_eq!(file.map(|(limits, _)| limits), Ok(vec![("a".to_owned(), rate.burst(burst))]));

        let file = read(&format!("limits.a.quota = '{count}/{symbol}'"));
        let quota = Limit::quota(count, unit);
        let expected = quota.check().is_ok().then(|| vec![("a".to_owned(), quota)]);
        prop_assert_eq!(file.ok().map(|(limits, _)| limits), expected);
    }
}
