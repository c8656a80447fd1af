//! In place of the shared-memory store, where callgate is built without it: nothing of it exists.

use super::memory::{Moved, Pause};
use super::{Draw, Key, Verdict};
use crate::bucket::{Bucket, Price, Reached};
use crate::clock::Clock;
use crate::rules::Secret;
use crate::{ConfigError, Limit};

/// Whether this build has it is seen when it is opened.
#[cfg(feature = "config")]
#[expect(clippy::unnecessary_wraps, reason = "the store itself may refuse")]
pub(crate) fn check(_: &str) -> Result<(), ConfigError> {
    Ok(())
}

#[derive(Debug)]
pub(crate) enum Store {}

impl Store {
    pub(crate) fn open(rest: &str) -> Result<Self, ConfigError> {
        let allowed = if cfg!(target_os = "linux") {
            "one that this build of callgate has: it was made without the feature 'shm'"
        } else {
            "one of this operating system: shared memory needs Linux"
        };
        let given = format!("'shm:{}'", rest.escape_debug());
        Err(ConfigError::new("store", allowed, given))
    }

    pub(crate) fn secret(&self) -> Secret {
        match *self {}
    }

    pub(crate) fn clock(&self) -> Clock {
        match *self {}
    }

    pub(crate) fn buckets(
        &self,
        _: (&str, &Limit, &[&str]),
        _: Bucket,
        _: &dyn Fn() -> u64,
    ) -> Result<Buckets, ConfigError> {
        match *self {}
    }
}

/// Into such a store there is none.
#[cfg(all(feature = "redis", not(loom)))]
pub(crate) enum Look {}

#[cfg(all(feature = "redis", not(loom)))]
impl Look {
    pub(crate) fn open(store: &str) -> Result<super::inspect::Inspection, ConfigError> {
        Store::open(store).map(|store| match store {})
    }

    pub(crate) fn remove(store: &str, _: bool) -> Result<Vec<u64>, ConfigError> {
        Store::open(store).map(|store| match store {})
    }
}

#[derive(Debug)]
pub(crate) enum Buckets {}

impl Buckets {
    pub(crate) fn bucket(&self) -> &Bucket {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }

    pub(crate) fn order(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn is_held(&self, _: u64) -> bool {
        match *self {}
    }

    pub(crate) fn hold(&self, _: bool) {
        match *self {}
    }

    pub(crate) fn has_pauses(&self, _: u64) -> bool {
        match *self {}
    }

    pub(crate) fn draw(
        &self,
        _: Option<Key>,
        _: Reached<'_>,
        _: Price,
    ) -> Option<Result<u64, u64>> {
        match *self {}
    }

    pub(crate) fn look(&self, _: Option<Key>, _: u64) -> Result<u64, Moved> {
        match *self {}
    }

    pub(crate) fn pause(&self, _: Option<Key>, _: u64, _: u64) {
        match *self {}
    }

    pub(crate) fn paused(&self, _: Option<Key>, _: u64) -> Option<Pause> {
        match *self {}
    }

    pub(crate) fn peek(&self, _: u64) -> (u64, Option<usize>) {
        match *self {}
    }

    pub(crate) fn count(&self, _: bool) {
        match *self {}
    }

    pub(crate) fn count_waiting(&self, _: usize) {
        match *self {}
    }

    pub(crate) fn was_pooled(&self) -> bool {
        match *self {}
    }
}

/// Of no clock.
pub(crate) fn now(_: i64) -> u64 {
    0
}

/// There are no shared ones to draw from.
pub(crate) fn draw_all(draws: &[Draw<'_>], _: u64) -> Result<Verdict, Moved> {
    if draws.is_empty() {
        Err(Moved)
    } else {
        Ok(Verdict::Unavailable)
    }
}
