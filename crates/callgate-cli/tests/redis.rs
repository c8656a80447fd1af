//! `top` and `store` against a Redis store that processes share.
#![cfg(target_os = "linux")]
#![expect(clippy::needless_raw_string_hashes, reason = "so snapbox writes them")]

mod common;
#[path = "../../callgate/src/store/redis/tests/server.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod server;

use std::thread;
use std::time::{Duration, Instant};

use callgate::{Call, Inspection, Limiter};
use common::{limiter, run};
use serde_json::Value;
use server::Server;
use snapbox::{assert_data_eq, str};

/// Longer than anything takes that goes well.
const PATIENCE: Duration = Duration::from_secs(30);

fn json(args: &[&str]) -> Value {
    let (code, out, err) = run(args);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("JSON")
}

/// A server, and a process (this one) that has told what it decided there.
struct Shared {
    server: Server,
    _limiter: Limiter,
}

impl Shared {
    /// Three calls of lookup, one of which was refused, two of crm by a tenant, and one of another tool.
    fn new() -> Self {
        let server = Server::start();
        let url = Self::url_of(&server);
        let limiter = limiter(&url);
        for call in [
            Call::new("lookup"),
            Call::new("lookup"),
            Call::new("lookup"),
            Call::new("crm").field("tenant", "acme"),
            Call::new("crm").field("tenant", "acme"),
            Call::new("other"),
        ] {
            let _ = limiter.try_acquire(&call);
        }
        let started = Instant::now();
        loop {
            let seen = Inspection::open(&url).expect("a store");
            let counts = seen.processes().iter();
            if counts.map(|row| row.admitted + row.rejected).sum::<u64>() == 6 {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "it never told: {seen:?}");
            thread::sleep(Duration::from_millis(5));
        }
        Self {
            server,
            _limiter: limiter,
        }
    }

    fn url_of(server: &Server) -> String {
        format!("{}/0?prefix=test&timeout=20s", server.url())
    }

    fn url(&self) -> String {
        Self::url_of(&self.server)
    }

    /// A text without what differs from run to run.
    fn same(&self, text: &str) -> String {
        let own = std::process::id().to_string();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        let text = text
            .replace(&format!("127.0.0.1:{}", self.server.port), "[server]")
            .replace(&format!("{own:>7}"), "  [pid]")
            .replace(&own, "[pid]")
            .replace(&format!("  {}\n", host.trim()), "  [host]\n");
        let ago = |word: &str| {
            word.len() < 4 && word.ends_with('s') && word.as_bytes()[0].is_ascii_digit()
        };
        let is_key =
            |word: &str| word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
        words.iter().fold(text, |text, word| {
            if is_key(word) {
                text.replace(word, "[key]")
            } else if ago(word) {
                text.replace(&format!(" {word} ago"), " 0s ago")
            } else {
                text
            }
        })
    }
}

#[test]
fn a_redis_store_is_printed_with_its_limits_processes_and_buckets() {
    let shared = Shared::new();
    let printed = str![[r#"
redis://[server]/0?prefix=test: 4 limits, 1 process, 3 buckets

limit      rate    level  admitted  rejected  waiting  per
lookup     1/day     0/2         2         1        0
crm        10/day  of 20         2         0        0  tenant
search     1/day    of 5         0         0        0  tenant, user
[default]  1/day    of 3         1         0        0  tool

process  limit      rate    admitted  rejected  waiting    told  host
  [pid]  lookup     1/day          2         1        0  0s ago  [host]
  [pid]  crm        10/day         2         0        0  0s ago  [host]
  [pid]  search     1/day          0         0        0  0s ago  [host]
  [pid]  [default]  1/day          1         0        0  0s ago  [host]

bucket of  key                               level
[default]  [key]    2/3
crm        [key]  18/20

"#]];
    for args in [
        &["top", "--once", &shared.url()][..],
        &["store", "inspect", &shared.url()],
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, &*err), (0, ""), "{args:?}");
        assert_data_eq!(shared.same(&out), printed.clone());
    }
    let json = json(&["top", "--once", "--json", &shared.url()]);
    let store = &json["stores"][0];
    let about = ["slots", "used", "whole", "unreadable"].map(|key| store[key].to_string());
    assert_eq!(about, ["null", "3", "true", "0"]);
    let process = &store["processes"][0];
    assert!(process["told"].as_f64().is_some_and(|told| told < 60.0));
    assert!(process["host"].is_string());
    assert_eq!(store["limits"][0]["remaining"], 0);
}

#[test]
fn a_tenants_bucket_in_redis_is_found_by_the_tenants_name_alone() {
    let shared = Shared::new();
    let level = |fields: &[&str]| {
        let json = json(&[&["top", "--once", "--json", &shared.url()], fields].concat());
        assert!(!json.to_string().contains("acme"));
        let buckets = json["stores"][0]["buckets"]
            .as_array()
            .expect("buckets")
            .clone();
        let level = |bucket: &Value| format!("{} {}", bucket["limit"], bucket["remaining"]);
        buckets.iter().map(level).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(level(&["--tenant", "acme"]), "\"crm\" 18");
    assert_eq!(level(&["--tenant", "other"]), "\"crm\" 20");
    let both = ["--field", "tenant=acme", "--field", "user=ada"];
    assert_eq!(level(&both), "\"crm\" 18, \"search\" 5");
    assert_eq!(level(&["--field", "tool=other"]), "\"[default]\" 2");
}

#[test]
fn what_others_put_into_redis_gives_the_terminal_no_orders() {
    let server = Server::start();
    let told = "1 4711 ff %1b%5b2Jhost\n1:5:1000000:0:20 1 2 3 evil%1b%5b31m te%0anant";
    let key = format!("{{test}}:process:{:032x}", 1);
    let set = redis::cmd("SET")
        .arg(key)
        .arg(told)
        .exec(&mut server.connect());
    set.expect("it is set");
    let (code, out, err) = run(&["top", "--once", &Shared::url_of(&server)]);
    assert_eq!((code, &*err), (0, ""));
    assert!(
        out.contains(r"evil\u{1b}[31m") && out.contains(r"\u{1b}[2Jhost"),
        "{out}"
    );
    assert!(out.contains(r"te\nnant"), "{out}");
    assert!(!out.contains('\u{1b}'));
}

#[test]
fn a_redis_store_that_cannot_be_looked_into_is_one_line_without_the_password() {
    let port = server::free_port();
    let url = format!("redis://me:secret@127.0.0.1:{port}/0?prefix=test");
    let shown = format!("redis://127.0.0.1:{port}/0?prefix=test");
    for args in [
        &["top", "--once", &url][..],
        &["top", "--once", "--json", &url],
        &["store", "inspect", &url],
        &["store", "remove", "--force", &url],
    ] {
        let (code, out, err) = run(args);
        assert_eq!(code, 1, "{args:?}");
        assert!(
            !out.contains("secret") && !err.contains("secret"),
            "{out}{err}"
        );
        assert_eq!(
            err,
            format!(
                "error: store must be one that can be looked into, got '{shown}': 127.0.0.1:{port}: \
                 Connection refused (os error 111)\n"
            )
        );
    }
    for (wrong, said) in [
        ("redis://me:secret@127.0.0.1/0", "with '?prefix='"),
        (
            "redis://me:secret@127.0.0.1/x?prefix=test",
            "a database from 0",
        ),
        ("http://me:secret@127.0.0.1/?prefix=test", "a store's URL"),
        ("redis://me:secret@?prefix=test", "with hosts"),
    ] {
        let (code, out, err) = run(&["top", "--once", wrong]);
        assert_eq!((code, &*out), (1, ""));
        assert!(err.contains(said) && !err.contains("secret"), "{err}");
    }
}

#[test]
fn a_redis_store_in_use_is_removed_only_by_force() {
    let shared = Shared::new();
    shared.server.run("SET mine kept");
    let (code, out, err) = run(&["store", "remove", &shared.url()]);
    assert_eq!((code, &*out), (1, ""));
    assert_data_eq!(
        shared.same(&err),
        str![[r#"
error: 'redis://[server]/0?prefix=test' is in use by process [pid]: stop it first, or give --force (what was killed is listed for ten minutes)

"#]]
    );
    let (code, out, err) = run(&["store", "remove", "--force", &shared.url()]);
    assert_eq!((code, &*err), (0, ""));
    assert_data_eq!(
        shared.same(&out),
        str![[r#"
removed redis://[server]/0?prefix=test: 4 limits, 1 process, 3 buckets
still in use by process [pid]

"#]]
    );
    assert_eq!(shared.server.text("DBSIZE"), "1");
}
