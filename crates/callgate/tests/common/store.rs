//! In which store the tests of a contract make their limiters.

use callgate::{Limiter, LimiterBuilder};

/// Whether these are the tests of the shared store.
pub(crate) fn is_shared() -> bool {
    env!("CARGO_CRATE_NAME") == "shared_contract"
}

/// Makes a limiter: in this process's memory, but where the tests are run by `shared_contract.rs`.
pub(crate) fn built(limits: LimiterBuilder) -> Limiter {
    if !is_shared() {
        return limits.build().expect("limits in range");
    }
    // Each has a store of its own, whose name is gone when it is made.
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let url = format!("shm:{}/store?slots=4096", folder.path().display());
    limits.store(url).build().expect("limits in range")
}
