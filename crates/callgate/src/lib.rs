//! Admission control for AI agents' tool calls: before a tool runs, decide whether it may run now.
//!
//! A [`Limiter`] holds a token bucket for each limited tool. [`Limiter::try_acquire`] admits a call or
//! rejects it at once, with the time after which to retry. It is exact: in every
//! window of length W on the limiter's clock, the admitted cost is at most `burst + rate x W`, for any number
//! of threads. Given the same earlier admissions, an exact bucket would have admitted a call less than
//! 2 ns earlier (or 10^-9 of a token's time, if that is more).
//!
//! A decision costs little more than reading the clock: one 64-bit word a bucket, one
//! compare-and-swap for an admitted call, no write for a rejected one, no lock.
//!
//! ```
//! use callgate::{Call, Limit, Limiter};
//!
//! let limiter = Limiter::builder()
//!     .limit("lookup_customer", Limit::per_second(2).burst(2))
//!     .build()?;
//! let call = Call::new("lookup_customer");
//! assert!(limiter.try_acquire(&call).is_admitted());
//! assert!(limiter.try_acquire(&call).is_admitted());
//! assert!(!limiter.try_acquire(&call).is_admitted()); // 2 at once; one more each half second
//! assert!(limiter.try_acquire(&Call::new("a_tool_without_a_limit")).is_admitted());
//! # Ok::<(), callgate::ConfigError>(())
//! ```

mod acquire;
mod bucket;
mod clock;
#[cfg(feature = "config")]
pub mod config;
mod current;
mod decision;
mod error;
mod forking;
mod limit;
mod limiter;
mod names;
mod rate;
mod rules;
mod store;
#[cfg_attr(not(feature = "trace"), path = "trace/off.rs")]
mod trace;
mod waiting;

pub use acquire::Turn;
pub use clock::{HighWater, Reading};
pub use decision::{Call, Decision, InFlight, Level, Permit, Reason, Rejection};
pub use error::ConfigError;
pub use forking::{BeforeFork, before_fork};
pub use limit::{Limit, MAX_BURST, MAX_WAIT, OnStoreError};
pub use limiter::{Limiter, LimiterBuilder, Look, Tool};
pub use rate::{Count, Rate, Unit};
pub use store::StoreCounts;
#[cfg(all(
    any(all(feature = "shm", target_os = "linux"), feature = "redis"),
    not(loom)
))]
pub use store::inspect::{Inspection, SharedBucket, SharedLimit, SharedProcess};
pub use store::redis::StoreMeter;
#[cfg(feature = "trace")]
pub use trace::{Trace, TraceOptions, Traced};
pub use waiting::{Home, after_fork};
