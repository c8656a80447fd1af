//! Against servers that each test starts for itself.

mod cluster;
mod lane;
mod link;
mod look;
mod numbers;
mod script;
mod server;

use std::sync::Arc;

use super::*;
use crate::Limit;

/// An ask for so many tokens of a limit that nothing splits.
fn ask(keys: &Keys, name: &str, limit: &Limit, cost: u64) -> Ask {
    let terms = Terms::new(limit).expect("a limit in range");
    Ask {
        bucket: keys.bucket(name, []),
        pause: keys.pause(name, None),
        price: terms.price(cost).expect("at most the burst"),
        terms: Arc::new(terms),
    }
}

/// A request for a token of each of these.
fn take(asks: &[Ask]) -> Request {
    Request::Take(asks.into())
}

/// The same for a process that waits, for so long at most.
fn wait(asks: &[Ask], process: u64, left: Duration) -> Request {
    Request::Wait {
        asks: asks.into(),
        process,
        left: asks.iter().map(|_| left).collect(),
    }
}
