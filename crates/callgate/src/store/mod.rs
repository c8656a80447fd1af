//! Where the state of buckets lives.

pub(crate) mod memory;
