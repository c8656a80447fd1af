//! In place of the Redis store, where callgate is built without it: nothing of it exists.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use super::{Key, StoreCounts, Verdict, memory, without_password};
use crate::bucket::Bucket;
use crate::{ConfigError, Limit};

/// This build has none, whatever the URL.
#[cfg(feature = "config")]
pub(crate) fn check(url: &str) -> Result<(), ConfigError> {
    Store::open(url).map(|_| ())
}

#[derive(Debug)]
pub(crate) enum Store {}

impl Store {
    pub(crate) fn open(url: &str) -> Result<Self, ConfigError> {
        let allowed =
            "one that this build of callgate has: it was made without the feature 'redis'";
        let given = format!("'{}'", without_password(url).escape_debug());
        Err(ConfigError::new("store", allowed, given))
    }

    pub(crate) fn is_at(&self, _: &str) -> bool {
        match *self {}
    }

    pub(crate) fn timeout(&self) -> Duration {
        match *self {}
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        match *self {}
    }

    pub(crate) fn count_alone(&self) {
        match *self {}
    }

    pub(crate) fn meter(&self) -> StoreMeter {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }

    #[expect(clippy::unnecessary_wraps, reason = "the store itself may refuse")]
    pub(crate) fn check(_: &Limit) -> Result<(), ConfigError> {
        Ok(())
    }

    pub(crate) fn buckets(
        &self,
        _: (&str, &Limit, &[&str]),
        _: Bucket,
        _: Option<(&Buckets, bool)>,
        _: &dyn Fn() -> u64,
    ) -> Result<Buckets, ConfigError> {
        match *self {}
    }

    pub(crate) fn ask(&self, _: Question, _: &Waker) -> Asking {
        match *self {}
    }

    pub(crate) fn ask_blocking(&self, _: Question) -> Answered {
        match *self {}
    }

    pub(crate) fn peek<'b>(
        &self,
        _: impl Iterator<Item = &'b Buckets>,
        _: Option<Waker>,
    ) -> Option<Peeking> {
        match *self {}
    }

    pub(crate) fn pause(&self, _: &Buckets, _: Option<&str>, _: Duration) {
        match *self {}
    }
}

/// Into such a store there is none.
#[cfg(all(feature = "shm", target_os = "linux", not(loom)))]
pub(crate) enum Look {}

#[cfg(all(feature = "shm", target_os = "linux", not(loom)))]
impl Look {
    pub(crate) fn open(url: &str) -> Result<super::inspect::Inspection, ConfigError> {
        Store::open(url).map(|store| match store {})
    }

    pub(crate) fn remove(url: &str, _: bool) -> Result<Vec<u64>, ConfigError> {
        Store::open(url).map(|store| match store {})
    }
}

#[derive(Debug)]
pub(crate) enum Buckets {}

impl Buckets {
    pub(crate) fn own(&self) -> &memory::Buckets {
        match *self {}
    }

    pub(crate) fn are_of(&self, _: &Limit, _: &Bucket) -> bool {
        match *self {}
    }

    pub(crate) fn count(&self, _: bool) {
        match *self {}
    }

    pub(crate) fn count_waiting(&self, _: usize) {
        match *self {}
    }

    pub(crate) fn have_line(&self) -> bool {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }
}

#[derive(Debug, Default)]
pub(crate) struct Question(());

impl Question {
    #[expect(clippy::unused_self, reason = "the store itself uses it")]
    pub(crate) fn add<'a>(
        &mut self,
        buckets: &'a Arc<Buckets>,
        _: (
            impl Iterator<Item = (&'a str, Option<&'a str>)>,
            Option<Key>,
        ),
        _: (Option<&str>, Option<Key>),
        _: u64,
        _: Option<Duration>,
    ) {
        match **buckets {}
    }
}

#[derive(Debug)]
pub(crate) struct Asking(Infallible);

impl Asking {
    pub(crate) fn poll(&mut self, _: &Waker) -> Poll<Answered> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Peeking(Infallible);

impl Peeking {
    pub(crate) fn is_told(&mut self) -> bool {
        match self.0 {}
    }

    pub(crate) fn wait(&mut self) {
        match self.0 {}
    }

    pub(crate) fn found(self) -> Option<Vec<Found>> {
        match self.0 {}
    }
}

/// What a store over a network was asked, in numbers: this build has none.
#[derive(Clone, Debug)]
pub struct StoreMeter(Infallible);

impl StoreMeter {
    /// The numbers, as they are now.
    #[must_use]
    pub fn counts(&self) -> StoreCounts {
        match self.0 {}
    }

    /// Why the store cannot be asked now, or could not the last time that it failed.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Answered(Infallible);

impl Answered {
    pub(crate) fn just_came(&mut self) {
        match self.0 {}
    }

    pub(crate) fn verdict(self, _: u64) -> Result<Verdict, Failure> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Failure(Infallible);

impl Failure {
    pub(crate) fn retry(&self) -> Option<Duration> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) tokens: u64,
    pub(crate) paused: Duration,
}
