//! What people see who look into a store that processes share.

use std::time::Duration;

use super::{Place, redis, shm};
use crate::{Call, ConfigError, Rate};

/// What is in a shared store at a moment: for people who look.
///
/// Looking changes nothing. A file is read, not mapped, and nothing in it is locked; of a Redis store keys are read, and
/// what is told of its limits and processes is what those told of themselves up to ten minutes ago. So what is told of
/// different buckets may be some moments apart.
///
/// ```
/// # #[cfg(all(feature = "shm", target_os = "linux"))] {
/// use callgate::{Call, Inspection, Limit, Limiter};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let url = format!("shm:{}/callgate", folder.path().display());
/// let limit = Limit::per_minute(300).burst(20).per(["tenant"]);
/// let limiter = Limiter::builder().limit("crm", limit).store(&url).build()?;
/// let call = Call::new("crm").field("tenant", "acme");
/// assert!(limiter.try_acquire(&call).is_admitted());
///
/// let inspection = Inspection::open(&url)?;
/// assert_eq!(inspection.limits()[0].name, "crm");
/// assert_eq!(inspection.processes()[0].admitted, 1);
/// assert_eq!(inspection.bucket("crm", &call)?.unwrap().remaining, 19);
/// # }
/// # Ok::<(), callgate::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Inspection {
    pub(super) place: String,
    pub(super) slots: Option<usize>,
    pub(super) used: usize,
    pub(super) is_whole: bool,
    pub(super) unreadable: usize,
    pub(super) limits: Vec<SharedLimit>,
    pub(super) processes: Vec<SharedProcess>,
    pub(super) source: Source,
}

/// Where its buckets are looked up.
#[derive(Debug)]
pub(super) enum Source {
    #[cfg(all(feature = "shm", target_os = "linux"))]
    Shared(shm::Look),
    #[cfg(feature = "redis")]
    Redis(redis::Look),
}

/// A limit that processes have, or in shared memory had last.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedLimit {
    /// The limit's name, in shared memory cut where it has more than 96 bytes; `[default]` for the default limit.
    pub name: String,
    /// The fields that split it, cut likewise where they have more than 46 bytes.
    pub per: Vec<String>,
    /// How fast its buckets refill.
    pub rate: Rate,
    /// How many tokens they hold.
    pub burst: u64,
    /// The whole tokens in its one bucket. Of a limit that is split, in shared memory those in the bucket that all keys
    /// share for which there is no room, in Redis the burst.
    pub remaining: u64,
    /// How long all its buckets pause still.
    pub paused: Option<Duration>,
}

/// What one process, or one limiter in it, has decided by one limit since it has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedProcess {
    /// Its process identifier, in its own namespace.
    pub process: u64,
    /// What its host is called; none in shared memory, which is one host's.
    pub host: Option<String>,
    /// Whether its identifier is of the reader's namespace. Of others it cannot be told whether they have ended.
    pub is_here: bool,
    /// When it was started, in the kernel's ticks since the host's start, or in Redis another number that is its own: tells
    /// processes that have one identifier.
    pub started: u64,
    /// How long ago it told this; none in shared memory, where it is so now.
    pub told: Option<Duration>,
    /// Which of [`Inspection::limits`].
    pub limit: usize,
    /// How many calls were admitted.
    pub admitted: u64,
    /// How many calls this limit refused.
    pub rejected: u64,
    /// How many calls waited when it was last said.
    pub waiting: u64,
}

/// A bucket of a limit that is split.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedBucket {
    /// The limit's name; in Redis, a part of its hash in brackets where no process told of it.
    pub limit: String,
    /// The fingerprint of the fields' values, as 32 hexadecimal digits. In shared memory nobody can tell the values from
    /// it; in Redis whoever guesses a value can see that it is the one.
    pub key: String,
    /// The whole tokens in it.
    pub remaining: u64,
    /// How many it holds.
    pub burst: u64,
    /// How long it pauses still.
    pub paused: Option<Duration>,
}

impl Inspection {
    /// Looks into the store of this URL, such as `shm:/run/myapp/callgate` or `redis://127.0.0.1:6379/0?prefix=myapp`; or of
    /// this path in shared memory, with the version of the layout behind it or without.
    ///
    /// A Redis store is asked on a thread of its own, which is waited for. No answer takes longer than the URL's `timeout`, or it is an
    /// error; there is one answer for each thousand keys of the database, up to a million.
    ///
    /// # Errors
    /// When the URL is wrong; when there is no such file, it cannot be read, or it is no store of this layout; when the
    /// server does not answer, or refuses.
    pub fn open(store: &str) -> Result<Self, ConfigError> {
        match Place::of(store) {
            Ok(Place::Redis) => redis::Look::open(store),
            Err(wrong) if store.contains("://") => Err(wrong),
            _ => shm::Look::open(store),
        }
    }

    /// Removes the store of this URL or path, so that the next limiter makes a new one with full buckets; the
    /// identifiers of the processes that use it. They go on with a file by themselves; in Redis they find the new buckets.
    ///
    /// In Redis, the keys of the prefix are deleted that are callgate's.
    ///
    /// # Errors
    /// As for [`open`](Self::open), when it is another user's, or when processes use it, unless by `force`. Those of
    /// them that run in another namespace count as long as they have not been seen to end; in Redis, those that told of
    /// themselves in the last ten minutes.
    ///
    /// ```
    /// # #[cfg(all(feature = "shm", target_os = "linux"))] {
    /// use callgate::{Inspection, Limit, Limiter};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let url = format!("shm:{}/callgate", folder.path().display());
    /// let limiter = Limiter::builder().limit("crm", Limit::per_second(1)).store(&url).build()?;
    /// assert!(Inspection::remove(&url, false).is_err());
    /// drop(limiter);
    /// assert!(Inspection::remove(&url, false)?.is_empty());
    /// # }
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    pub fn remove(store: &str, force: bool) -> Result<Vec<u64>, ConfigError> {
        match Place::of(store) {
            Ok(Place::Redis) => redis::Look::remove(store, force),
            Err(wrong) if store.contains("://") => Err(wrong),
            _ => shm::Look::remove(store, force),
        }
    }

    /// The file, whose name ends in the version of its layout; or the URL, without user and password.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }

    /// How many keys there is room for; none in Redis, which does not say.
    #[must_use]
    pub fn slots(&self) -> Option<usize> {
        self.slots
    }

    /// How many buckets there are. In shared memory, those that are full are given to other keys when needed.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// Whether that is all. Of a Redis store, no more than 100,000 buckets, 1,000 processes and 10,000 limits are listed, from a
    /// million keys of the database, whoever's they are.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// How many keys of limits and processes hold something else than they should; always 0 in shared memory.
    #[must_use]
    pub fn unreadable(&self) -> usize {
        self.unreadable
    }

    /// The limits that processes have now, and in shared memory of others the last of each name. One that processes have
    /// with different numbers is there several times.
    #[must_use]
    pub fn limits(&self) -> &[SharedLimit] {
        &self.limits
    }

    /// What each process has decided by each limit. Processes that have ended are not there; in Redis, those that told
    /// nothing for ten minutes.
    #[must_use]
    pub fn processes(&self) -> &[SharedProcess] {
        &self.processes
    }

    /// The buckets of limits that are split: those that are not full. In Redis, those of other limits too that no process
    /// told of.
    ///
    /// # Errors
    /// When a Redis store, which is asked again for this, does not answer.
    pub fn buckets(&self) -> Result<Vec<SharedBucket>, ConfigError> {
        match &self.source {
            #[cfg(all(feature = "shm", target_os = "linux"))]
            Source::Shared(look) => Ok(look.buckets().collect()),
            #[cfg(feature = "redis")]
            Source::Redis(look) => look.buckets(),
        }
    }

    /// The bucket that a call draws from under a limit of this name, full where there is none; none where there
    /// is no such limit, or its fields were cut.
    ///
    /// # Errors
    /// As for [`buckets`](Self::buckets).
    pub fn bucket(
        &self,
        limit: &str,
        call: &Call<'_>,
    ) -> Result<Option<SharedBucket>, ConfigError> {
        match &self.source {
            #[cfg(all(feature = "shm", target_os = "linux"))]
            Source::Shared(look) => Ok(look.bucket(limit, call)),
            #[cfg(feature = "redis")]
            Source::Redis(look) => look.bucket(limit, call),
        }
    }
}
