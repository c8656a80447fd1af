//! What processes tell, and what is read of a store that may hold anything.

use std::sync::Arc;

use proptest::prelude::*;
use redis::Arg;

use super::super::look::{Kept, level, pause};
use super::super::telling::{Account, MOST_BYTES, Telling, Told, Word};
use super::*;

fn account(name: &str, per: &[&str]) -> Arc<Account> {
    let limit = Limit::per_minute(300).burst(20);
    let terms = Terms::new(&limit).expect("in range");
    Arc::new(Account::new(name, per, terms))
}

fn word(telling: &Arc<Telling>) -> Word {
    let keys = Keys::new("test").expect("a prefix");
    Word::new(Arc::clone(telling), &keys)
}

/// What is told now, if anything is, and how it is read.
fn told(word: &mut Word) -> Option<(String, Told)> {
    let command = word.next()?;
    let words: Vec<_> = command
        .args_iter()
        .map(|word| match word {
            Arg::Simple(bytes) => String::from_utf8(bytes.to_vec()).expect("UTF-8"),
            _ => panic!("another kind of word"),
        })
        .collect();
    let [set, key, text, ex, kept] = &words[..] else {
        panic!("{words:?}");
    };
    assert_eq!([&**set, ex, kept], ["SET", "EX", "600"]);
    assert!(text.len() <= MOST_BYTES);
    let told = Told::read(text.as_bytes());
    Some((key.clone(), told.unwrap_or_else(|| panic!("{text}"))))
}

#[test]
fn what_is_told_is_read_again_whatever_the_names() {
    let telling = Arc::new(Telling::new());
    let mut word = word(&telling);
    assert!(told(&mut word).is_none(), "there is no limit");
    let names = ["crm", "顧客 %41\n1:1", "[default]", "a\tb%"];
    let accounts = names.map(|name| account(name, &["tenant", "", "b c"]));
    for account in &accounts {
        telling.add(account);
    }
    accounts[1].count(true);
    accounts[1].count(false);
    accounts[1].count(false);
    accounts[1].count_waiting(7);
    let (key, read) = told(&mut word).expect("it is new");
    assert_eq!(read.process, u64::from(std::process::id()));
    assert_eq!(read.limits.len(), names.len());
    for (limit, name) in read.limits.iter().zip(names) {
        assert_eq!(limit.name, name);
        assert_eq!(limit.per, ["tenant", "", "b c"]);
        assert_eq!(limit.rate.to_string(), "5/s");
        assert_eq!(limit.terms.burst, 20);
    }
    let limit = &read.limits[1];
    assert_eq!((limit.admitted, limit.rejected, limit.waiting), (1, 2, 7));
    let keys = Keys::new("test").expect("a prefix");
    assert_eq!(keys.kind(&key), Some("process"));
}

#[test]
fn nothing_is_told_that_is_not_new() {
    let telling = Arc::new(Telling::new());
    let mut word = word(&telling);
    let account = account("crm", &[]);
    telling.add(&account);
    let (key, read) = told(&mut word).expect("it is new");
    assert!(told(&mut word).is_none());
    account.count(true);
    assert_eq!(told(&mut word).expect("a call").1.limits[0].admitted, 1);
    assert!(told(&mut word).is_none());
    // A server that is there again may have lost it.
    word.begin();
    let (again, same) = told(&mut word).expect("a new connection");
    assert_eq!((again, same.life), (key, read.life));
    // A forked child counts anew.
    telling.forget();
    assert_eq!(told(&mut word).expect("another").1.limits[0].admitted, 0);
}

#[test]
fn limits_that_are_not_in_force_make_room_for_others() {
    let telling = Arc::new(Telling::new());
    let mut word = word(&telling);
    let mut names = || -> Vec<String> {
        let told = told(&mut word).map(|(_, told)| told.limits);
        let limits = told.into_iter().flatten();
        limits.map(|limit| limit.name).collect()
    };
    for round in 0..3_000 {
        let closed = account("closed", &[]);
        telling.add(&closed);
        closed.close();
        telling.add(&account("dropped", &[]));
        if round == 1_000 {
            let kept = account("kept", &[]);
            telling.add(&kept);
            assert_eq!(names(), ["kept"]);
        }
    }
    assert!(names().is_empty());
}

#[test]
fn of_many_limits_only_as_many_are_told_as_have_room() {
    let telling = Arc::new(Telling::new());
    let names = (0..2_000).map(|number| format!("{number}{}", "x".repeat(1_000)));
    let accounts: Vec<_> = names.map(|name| account(&name, &[])).collect();
    for account in &accounts {
        telling.add(account);
    }
    let (_, read) = told(&mut word(&telling)).expect("it is new");
    assert!(
        (50..66).contains(&read.limits.len()),
        "{}",
        read.limits.len()
    );
}

#[test]
fn what_nobody_told_is_no_process() {
    let good = "1 4711 00000000000000ff host\n1:5:1000000:0:20 1 2 3 crm tenant";
    let read = Told::read(good.as_bytes()).expect("one");
    assert_eq!((read.process, read.life, &*read.host), (4_711, 255, "host"));
    assert!(Told::read(b"1 4711 ff \n1:5:1000000:0:20 1 2 3 crm").is_some());
    for bad in [
        "",
        "\n",
        "2 4711 ff host\n1:5:1000000:0:20 1 2 3 crm",
        "1 4711 ff host more\n1:5:1000000:0:20 1 2 3 crm",
        "1 -1 ff host\n1:5:1000000:0:20 1 2 3 crm",
        "1 4294967296 ff host\n1:5:1000000:0:20 1 2 3 crm",
        "1 4711 xx host\n1:5:1000000:0:20 1 2 3 crm",
        "1 4711 ff %ff\n1:5:1000000:0:20 1 2 3 crm",
        "1 4711 ff host\n1:5:1000000:0:20 1 2 3",
        "1 4711 ff host\n1:5:1000000:0:20 1 2 3 ",
        "1 4711 ff host\n1:5:1000000:0:20 1 2 -3 crm",
        "1 4711 ff host\n1:5:1000000:0:20 1 2 18446744073709551616 crm",
        "1 4711 ff host\n2:5:1000000:0:20 1 2 3 crm",
        "1 4711 ff host\n1:0:1000000:0:20 1 2 3 crm",
        "1 4711 ff host\n1:5:0:0:20 1 2 3 crm",
        "1 4711 ff host\n1:5:1000000:5:20 1 2 3 crm",
        "1 4711 ff host\n1:5:1000000:0:020 1 2 3 crm",
        "1 4711 ff host\n1:5:4503599627370497:0:20 1 2 3 crm",
        "1 4711 ff host\n1:5:4503599627370496:0:4503599627370496 1 2 3 crm",
        "1 4711 ff host\n1:5:1000000:0:20 1 2 3 crm\n",
    ] {
        assert_eq!(Told::read(bad.as_bytes()), None, "{bad:?}");
    }
    assert_eq!(Told::read(b"1 4711 ff \xff\n"), None);
}

#[test]
fn what_is_no_bucket_and_no_pause_is_none() {
    assert!(Kept::read(b"1:5:1000000:0:20:123:4").is_some());
    for bad in [
        "",
        ":",
        "1:5:1000000:0:20:123",
        "1:5:1000000:0:20:123:5",
        "1:5:1000000:0:20:123:+4",
        "1:5:1000000:0:20::4",
        "1:5:1000000:0:20:123:4:",
        "2:5:1000000:0:20:123:4",
        "1:5:1000000:0:20:9007199254740993:4",
        "1:5:1000000:0:20:123:4\n",
    ] {
        assert_eq!(Kept::read(bad.as_bytes()), None, "{bad:?}");
    }
    assert_eq!(pause(b"1:4503599627370496"), Some(1 << 52));
    for bad in [
        "",
        "1:",
        "1",
        "2:5",
        "1:4503599627370497",
        "1:5:6",
        "1:-5",
        "1: 5",
    ] {
        assert_eq!(pause(bad.as_bytes()), None, "{bad:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_can_be_looked_at(
        text in "[0-9a-f: %\n+-]{0,80}|(1:[0-9]{1,17}:[0-9]{1,17}:[0-9]{1,17}:[0-9]{1,17}:[0-9]{1,17}:[0-9]{1,17})",
        now in 0..=u64::MAX,
    ) {
        let terms = Terms::new(&Limit::per_second(3).burst(7)).expect("in range");
        let _ = Told::read(text.as_bytes());
        for paused in [0, now, pause(text.as_bytes()).unwrap_or(u64::MAX)] {
            prop_assert!(level(&terms, Kept::read(text.as_bytes()).as_ref(), paused, now) <= 7);
        }
    }
}
