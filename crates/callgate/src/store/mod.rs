//! Where the state of buckets lives.

pub(crate) mod memory;
#[cfg(all(feature = "redis", not(loom)))]
pub(crate) mod redis;
mod table;

pub(crate) use table::Key;
