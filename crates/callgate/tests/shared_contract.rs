//! The contract of every store, kept by shared memory: the tests of the memory store, once more.
#![cfg(all(feature = "shm", target_os = "linux", not(loom)))]
#![expect(
    clippy::duplicate_mod,
    reason = "each of them is a file of tests by itself too"
)]

#[path = "cases.rs"]
mod cases;
#[path = "exactness.rs"]
mod exactness;
#[path = "quota.rs"]
mod quota;
#[path = "rules.rs"]
mod rules;
#[path = "threads.rs"]
mod threads;
#[path = "whole_limiter.rs"]
mod whole_limiter;
