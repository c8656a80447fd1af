//! Clusters, sentinels and TLS: where the way to the server leads by others.

use std::env;
use std::process::Command;

use super::super::address::Address;
use super::super::link::Link;
use super::link::recovered;
use super::server::{Server, free_port};
use super::*;

/// Three nodes, each with a third of the slots.
fn cluster() -> Vec<Server> {
    let nodes: Vec<_> = (0..3)
        .map(|_| {
            let bus = free_port().to_string();
            Server::with(&["--cluster-enabled", "yes", "--cluster-port", &bus])
        })
        .collect();
    for (place, node) in nodes.iter().enumerate() {
        let (first, last) = (5_462 * place, (5_462 * place + 5_461).min(16_383));
        node.run(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
        let bus = &nodes[0].arguments[3];
        node.run(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", nodes[0].port));
    }
    for node in &nodes {
        node.wait_for("CLUSTER INFO", "cluster_state:ok");
        node.wait_for("CLUSTER INFO", "cluster_slots_ok:16384");
    }
    nodes
}

#[test]
fn r29_a_cluster_decides_every_call_on_the_node_of_the_prefix() {
    let nodes = cluster();
    for prefix in ["a", "b", "c", "d"] {
        let keys = Keys::new(prefix).expect("a prefix");
        let limit = Limit::per_day(1).burst(250);
        let tenants = ["t1", "a{b", "}x{y}", "{}"];
        // By any node.
        let links = nodes.iter().map(|node| {
            let url = format!("{}?prefix={prefix}&timeout=20s", node.url());
            Link::new(Address::parse(&url).expect("a URL"))
        });
        let links: Vec<_> = links.collect();
        let mut admitted = 0;
        for call in 0..400 {
            let mut asks = [ask(&keys, "tool", &limit, 1), ask(&keys, "user", &limit, 1)];
            asks[1].bucket = keys.bucket("user", [("tenant", Some(tenants[call % 4]))]);
            let answer = links[call % 3].ask_blocking(take(&asks));
            admitted += u32::from(answer.expect("an answer").is_admitted);
        }
        assert_eq!(admitted, 250);
        // Who looks is sent on too.
        for node in &nodes {
            let url = format!("{}?prefix={prefix}&timeout=20s", node.url());
            let seen = Look::open(&url).expect("a store");
            assert_eq!((seen.used(), seen.is_whole()), (5, true));
        }
        for link in links {
            assert_eq!(link.counts().failed, 0);
        }
    }
}

#[test]
fn r27_a_slot_that_moved_to_another_node_is_followed() {
    let nodes = cluster();
    let url = format!("{}?prefix=test&timeout=20s", nodes[0].url());
    let link = Link::new(Address::parse(&url).expect("a URL"));
    let keys = Keys::new("test").expect("a prefix");
    let token = take(&[ask(&keys, "tool", &Limit::per_day(1).burst(9), 1)]);
    assert!(
        link.ask_blocking(token.clone())
            .expect("an answer")
            .is_admitted
    );
    // The slot of "test" is 6918, at the second node. The third takes it, with nothing in it.
    let id = nodes[2].text("CLUSTER MYID");
    nodes[1].run("FLUSHALL");
    for node in [2, 1, 0] {
        nodes[node].run(&format!("CLUSTER SETSLOT 6918 NODE {id}"));
    }
    let failure = link
        .ask_blocking(token.clone())
        .expect_err("moved")
        .to_string();
    assert!(failure.contains("MOVED"), "{failure}");
    assert!(recovered(&link, &token).is_admitted);
    let key = keys.bucket("tool", []);
    assert_eq!(nodes[2].text(&format!("EXISTS {key}")), "1");
}

#[test]
fn a_sentinel_tells_where_the_server_is() {
    let server = Server::start();
    let sentinel = Server::sentinel("main", server.port);
    let url = |service: &str| {
        let (nobody, port) = (free_port(), sentinel.port);
        // The first one does not answer.
        format!(
            "redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{port}/{service}?prefix=test&timeout=20s"
        )
    };
    let keys = Keys::new("test").expect("a prefix");
    let token = take(&[ask(&keys, "tool", &Limit::per_day(1), 1)]);
    let link = Link::new(Address::parse(&url("main")).expect("a URL"));
    assert!(
        link.ask_blocking(token.clone())
            .expect("an answer")
            .is_admitted
    );
    let key = keys.bucket("tool", []);
    assert_eq!(server.text(&format!("EXISTS {key}")), "1");
    let seen = Look::open(&url("main")).expect("a store");
    assert_eq!(seen.used(), 1);
    let link = Link::new(Address::parse(&url("other")).expect("a URL"));
    let failure = link.ask_blocking(token).expect_err("unknown").to_string();
    assert!(failure.contains("knows no service 'other'"), "{failure}");
}

/// A server that speaks TLS, with a certificate for "localhost" that the system does not trust.
fn secret_server() -> (Server, String) {
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/src/store/redis/tests/tls");
    let port = free_port();
    let options = format!(
        "--tls-port {port} --tls-auth-clients no --tls-cert-file {files}/cert.pem --tls-key-file {files}/key.pem"
    );
    let server = Server::with(&options.split(' ').collect::<Vec<_>>());
    let url = format!("rediss://localhost:{port}?prefix=test&timeout=20s");
    (server, url)
}

#[test]
fn a_port_without_tls_that_is_spoken_to_over_tls_is_told_of() {
    let server = Server::start();
    let url = format!(
        "rediss://127.0.0.1:{}?prefix=test&timeout=100ms",
        server.port
    );
    let link = Link::new(Address::parse(&url).expect("a URL"));
    let keys = Keys::new("test").expect("a prefix");
    let token = take(&[ask(&keys, "tool", &Limit::per_day(1), 1)]);
    loop {
        // The first ones may wait as long as it takes to know.
        match link.ask_blocking(token.clone()) {
            Err(Failure::Late) => {}
            answer => {
                let failure = answer.expect_err("no TLS").to_string();
                assert!(failure.contains("does it speak TLS?"), "{failure}");
                return;
            }
        }
    }
}

fn ask_once(url: &str) -> Result<Answer, Failure> {
    let keys = Keys::new("test").expect("a prefix");
    let link = Link::new(Address::parse(url).expect("a URL"));
    link.ask_blocking(take(&[ask(&keys, "tool", &Limit::per_day(1), 1)]))
}

#[test]
fn tls_is_spoken_only_to_whom_the_system_trusts() {
    const TRUSTED: &str = "CALLGATE_TEST_TLS_URL";
    if let Ok(url) = env::var(TRUSTED) {
        assert!(ask_once(&url).expect("an answer").is_admitted);
        return;
    }
    let (_server, url) = secret_server();
    let failure = ask_once(&url).expect_err("no trust").to_string();
    assert!(failure.contains("invalid peer certificate"), "{failure}");
    // In a process whose system trusts it, this test again.
    let trust = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/store/redis/tests/tls/ca.pem"
    );
    let name = "store::redis::tests::cluster::tls_is_spoken_only_to_whom_the_system_trusts";
    for (host, is_right) in [("localhost", true), ("127.0.0.1", false)] {
        let url = url.replace("localhost", host);
        let mut child = Command::new(env::current_exe().expect("a path"));
        child
            .args(["--exact", name])
            .env("SSL_CERT_FILE", trust)
            .env(TRUSTED, url);
        let output = child.output().expect("it runs");
        assert_eq!(output.status.success(), is_right, "{host}: {output:?}");
    }
}
