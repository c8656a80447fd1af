//! Where the state of buckets lives.

pub(crate) mod memory;
mod table;

pub(crate) use table::Key;
