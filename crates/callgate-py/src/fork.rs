//! Around a fork.

use std::cell::RefCell;

use callgate::BeforeFork;
use pyo3::prelude::*;

use crate::bell::Bell;
use crate::{logging, store};

thread_local! {
    static FORKING: RefCell<Option<BeforeFork>> = const { RefCell::new(None) };
}

/// Says that this thread is about to fork. All that is locked under the GIL is free then, and the threads that do
/// without the GIL stand still from now on.
#[pyfunction]
pub(crate) fn before_fork() {
    FORKING.with_borrow_mut(|forking| {
        forking.get_or_insert_with(callgate::before_fork);
    });
}

/// Says that it has forked, or could not.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    drop(FORKING.take());
}

/// Says that this process is a forked child: who waited in its parent does not wait here.
#[pyfunction]
pub(crate) fn after_fork() {
    drop(FORKING.take());
    callgate::after_fork();
    Bell::after_fork();
    logging::after_fork();
    store::after_fork();
}
