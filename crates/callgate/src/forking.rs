//! What a fork must not come in the midst of.

#[cfg(all(feature = "redis", not(loom)))]
use std::{future::poll_fn, pin::pin};

use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

/// Read by threads that do something, written by whoever forks.
static WORK: RwLock<()> = RwLock::new(());

/// Threads of callgate's own do nothing as long as this lives: see [`before_fork`].
#[derive(Debug)]
#[must_use]
pub struct BeforeFork {
    _held: RwLockWriteGuard<'static, ()>,
}

/// Has callgate's own threads stand still, with nothing locked, until what is returned is dropped: in the parent
/// and in the child, each.
///
/// For front ends of languages that fork, which see to it that no other thread is within a call of a limiter's
/// meanwhile. The child goes on with [`after_fork`](crate::after_fork).
pub fn before_fork() -> BeforeFork {
    BeforeFork {
        _held: WORK.write().unwrap_or_else(PoisonError::into_inner),
    }
}

/// A future that does nothing while the process forks.
#[cfg(all(feature = "redis", not(loom)))]
pub(crate) async fn unforked<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _held = WORK.read().unwrap_or_else(PoisonError::into_inner);
        future.as_mut().poll(context)
    })
    .await
}
