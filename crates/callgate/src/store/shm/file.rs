//! The file: how it is made, opened, checked and locked.
//!
//! It is made without a name, filled, and only then linked, so that nobody ever opens half a file. Its size
//! never changes, since a process that touches a page beyond the end is killed. From another boot it is
//! worthless (the clock began again), and a new one is put in its place.

#![expect(
    unsafe_code,
    reason = "the memory is shared with other processes: only atomics may be in it"
)]

use std::fs;
use std::hash::Hasher;
use std::hint::spin_loop;
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use portable_atomic::AtomicU128;
use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use siphasher::sip::SipHasher13;

use super::cells::{self, Cell, EDITIONS, Stamped, Word};
use super::counts;
use super::url::Url;
use crate::ConfigError;
use crate::bucket::Bucket;

/// "callgate" as a number.
const MAGIC: u64 = u64::from_be_bytes(*b"callgate");

/// Of the layout. It is in the file's name too, so that versions of callgate that differ in it run side by side.
pub(super) const VERSION: u64 = 1;

/// How long a call tries for the lock, and who makes a limiter. Whoever holds it does so for microseconds, unless
/// stopped.
const PATIENCE: Duration = Duration::from_millis(250);
const MORE_PATIENCE: Duration = Duration::from_secs(5);

/// For calls while it is known that it cannot be had.
const LESS_PATIENCE: Duration = Duration::from_millis(1);

/// How often to try before each nap, and for how long to sleep.
const SPINS: u32 = 64;
const NAP: Duration = Duration::from_micros(50);

/// What comes before the editions.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU64,
    pub(super) size: AtomicU64,
    pub(super) slots: AtomicU64,
    boot: [AtomicU64; 2],
    /// What keys are made with.
    pub(super) secret: [AtomicU64; 2],
    /// Of all above but the boot, none of which change.
    pub(super) sum: AtomicU64,
    /// How many editions there are.
    pub(super) editions: AtomicU64,
    /// How many stamps were given.
    stamps: AtomicU64,
    /// No bucket gave up its cell at a later time. A caller with an old reading of the clock may find its
    /// bucket gone that is not full at that time: it starts as full as a bucket can be then.
    pub(super) horizon: AtomicU64,
    /// How long the slowest bucket takes to fill, in nanoseconds.
    pub(super) longest_fill: AtomicU64,
    /// Whether whoever holds the lock may have frozen cells.
    freezing: AtomicU64,
}

/// A limit's name and what splits it, its numbers, and what all its editions have in common.
#[derive(Debug)]
#[repr(C, align(256))]
pub(super) struct Edition {
    /// The one bucket of a limit that nothing splits; of one that is split, the bucket of all keys without a
    /// cell. Like all that follows up to `first`, it counts only in the first edition of a limit.
    pub(super) own: Word,
    /// When its pause ends, and when the bucket is full after the last pause.
    pub(super) until: AtomicU64,
    pub(super) held_until: AtomicU64,
    /// Grows when the limit comes into use.
    pub(super) used: AtomicU64,
    /// The number of the limit's first edition.
    pub(super) first: AtomicU64,
    /// A hash of its name, and one of its name and of what splits it.
    pub(super) named: AtomicU64,
    pub(super) identity: [AtomicU64; 2],
    /// So many tokens in so many nanoseconds: low half, high half.
    pub(super) tokens: AtomicU64,
    pub(super) nanos: [AtomicU64; 2],
    pub(super) burst: AtomicU64,
    /// Of the numbers from `first` on.
    pub(super) sum: AtomicU64,
    /// For people: see [`Label`](super::label::Label).
    pub(super) label: [AtomicU64; LABEL],
}

/// The words of a label.
pub(super) const LABEL: usize = 18;

/// What one process counts of one edition. Only that process writes it once it is its own.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Row {
    /// The process, and when it was started; no process where the row is free.
    pub(super) process: AtomicU64,
    pub(super) started: AtomicU64,
    /// The namespace in which the process has that number.
    pub(super) namespace: AtomicU64,
    pub(super) edition: AtomicU64,
    pub(super) admitted: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) waiting: AtomicU64,
}

pub(super) const ROWS: usize = 1024;

pub(super) const EDITIONS_AT: usize = size_of::<Header>();
pub(super) const ROWS_AT: usize = EDITIONS_AT + EDITIONS * size_of::<Edition>();
pub(super) const CELLS_AT: usize = ROWS_AT + ROWS * size_of::<Row>();

const fn size(slots: usize) -> usize {
    CELLS_AT + slots * size_of::<Cell>()
}

/// A file in use.
#[derive(Debug)]
pub(super) struct File {
    map: MmapRaw,
    slots: usize,
    lock: Lock,
    /// The arithmetic of editions that were met. (No lock: a child may have been forked while it was held.)
    met: boxcar::Vec<(usize, Bucket)>,
    told_unlinked: AtomicBool,
    told_unlockable: AtomicBool,
    told_damaged: AtomicBool,
}

impl File {
    /// Opens the file, or makes it where there is none of this boot.
    pub(super) fn open(url: &Url) -> Result<Self, ConfigError> {
        if !AtomicU128::is_lock_free() {
            let allowed = "used where a processor can swap 128 bits at once";
            return Err(ConfigError::new("store", allowed, "one that cannot"));
        }
        let refused = |error: Refused| error.of(&url.path);
        let boot = boot().map_err(refused)?;
        // Others may make it, or put a new one in its place, at the same time.
        for _ in 0..100 {
            let Some(file) = Self::open_existing(&url.path).map_err(refused)? else {
                if let Some(file) = Self::make(url, boot).map_err(refused)? {
                    return Ok(file);
                }
                continue;
            };
            if pair(&file.header().boot) == boot {
                if file.slots != url.slots && url.gives_slots {
                    log::warn!(
                        "store '{}' has {} slots, not {}: who makes the file says how many",
                        url.path.display(),
                        file.slots,
                        url.slots
                    );
                }
                return Ok(file);
            }
            file.replace(url, boot).map_err(refused)?;
        }
        Err(refused(Refused::new(
            "a file that stays",
            "one that others keep replacing",
        )))
    }

    fn open_existing(path: &Path) -> Result<Option<Self>, Refused> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(unopened(error)),
        };
        let found = look(&file)?;
        let user = rustix::process::geteuid().as_raw();
        if found.st_uid != user {
            let allowed = format!("owned by this process's user ({user})");
            return Err(Refused::new(
                allowed,
                format!("one of user {}", found.st_uid),
            ));
        }
        let mode = found.st_mode & 0o7777;
        if mode != 0o600 {
            return Err(Refused::new("of mode 0600", format!("{mode:04o}")));
        }
        let length = length(&found)?;
        let file = Self::map(file, length, path)?;
        file.check(length)?;
        Ok(Some(file))
    }

    fn map(file: OwnedFd, length: usize, path: &Path) -> Result<Self, Refused> {
        let map = MmapOptions::new()
            .len(length)
            .map_raw(&file)
            .map_err(|error| Refused::failed("to map it", error))?;
        Ok(Self {
            map,
            slots: (length - CELLS_AT) / size_of::<Cell>(),
            lock: Lock::new(file, path).map_err(|error| Refused::failed("to look at it", error))?,
            met: boxcar::Vec::new(),
            told_unlinked: AtomicBool::new(false),
            told_unlockable: AtomicBool::new(false),
            told_damaged: AtomicBool::new(false),
        })
    }

    fn check(&self, length: usize) -> Result<(), Refused> {
        let header = self.header();
        let words = [&header.magic, &header.version, &header.size, &header.slots];
        check(words.map(|word| word.load(Ordering::Relaxed)), length)?;
        let sum = self.header().sum.load(Ordering::Relaxed);
        let editions = self.header().editions.load(Ordering::Acquire);
        if sum != self.header().summed() || !(1..=EDITIONS as u64).contains(&editions) {
            return Err(Refused::damaged());
        }
        Ok(())
    }

    /// The number that the next edition has, if all there are hold what was written there. Under the lock.
    pub(super) fn next_edition(&self) -> Result<usize, Refused> {
        self.check(self.map.len())?;
        let next = self.header().editions.load(Ordering::Acquire);
        let next = usize::try_from(next).unwrap_or(EDITIONS);
        let mut known = self.editions()[1..next].iter();
        if known.any(|edition| edition.bucket().is_none()) {
            return Err(Refused::damaged());
        }
        Ok(next)
    }

    /// Makes the file; none where somebody else was faster.
    fn make(url: &Url, boot: [u64; 2]) -> Result<Option<Self>, Refused> {
        let (file, nameless) = Self::fill(url, boot)?;
        match link(&nameless, &url.path) {
            Ok(()) => Ok(Some(file)),
            Err(Errno::EXIST) => Ok(None),
            Err(error) => Err(Refused::failed("to give it its name", error)),
        }
    }

    /// A file that has all but a name.
    fn fill(url: &Url, boot: [u64; 2]) -> Result<(Self, OwnedFd), Refused> {
        let folder = match url.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let given = url.path.with_extension("");
        if given.is_dir() {
            let inside = given.join("callgate");
            let allowed = format!("a path in a folder, such as '{}'", inside.display());
            return Err(Refused::new(allowed, "a folder itself"));
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let nameless = rustix::fs::open(folder, flags, mode).map_err(|error| match error {
            Errno::NOENT => Refused::new("in a folder that exists", "a folder that does not"),
            Errno::OPNOTSUPP | Errno::ISDIR => {
                let allowed = "on a file system with nameless files (O_TMPFILE), such as tmpfs";
                Refused::new(allowed, "one without")
            }
            error => Refused::failed("to make a file in its folder", error),
        })?;
        let length = size(url.slots);
        // So that nobody is killed for touching a page for which there turns out to be no room.
        rustix::fs::fallocate(&nameless, FallocateFlags::empty(), 0, length as u64)
            .map_err(|error| Refused::failed(format!("to get its {length} bytes"), error))?;
        // The umask may have taken something away.
        rustix::fs::fchmod(&nameless, mode)
            .map_err(|error| Refused::failed("to set its mode", error))?;
        let held = nameless
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| Refused::failed("to hold it", error))?;
        let file = Self::map(nameless, length, &url.path)?;
        let header = file.header();
        let random = random().map_err(|error| Refused::failed("to read /dev/urandom", error))?;
        let words = [
            (&header.magic, MAGIC),
            (&header.version, VERSION),
            (&header.size, length as u64),
            (&header.slots, url.slots as u64),
            (&header.boot[0], boot[0]),
            (&header.boot[1], boot[1]),
            (&header.secret[0], random[0]),
            (&header.secret[1], random[1]),
            // Zero is no edition's number.
            (&header.editions, 1),
        ];
        for (word, value) in words {
            word.store(value, Ordering::Relaxed);
        }
        header.sum.store(header.summed(), Ordering::Relaxed);
        Ok((file, held))
    }

    /// Puts a new file in the place of this one, unless somebody else has.
    fn replace(self, url: &Url, boot: [u64; 2]) -> Result<(), Refused> {
        let _locked = self.lock_patiently()?;
        if !self.is_at(&url.path) {
            return Ok(());
        }
        let (_, nameless) = Self::fill(url, boot)?;
        let mut beside = url.path.clone().into_os_string();
        beside.push(".new");
        // One that somebody left who was killed here.
        let _ = rustix::fs::unlink(&beside);
        link(&nameless, &beside)
            .and_then(|()| rustix::fs::rename(&beside, &url.path))
            .map_err(|error| Refused::failed("to replace it, which is from another boot", error))
    }

    /// Removes the file at a path, unless processes use it; by `force` even then. Those that use it.
    pub(super) fn remove(path: &Path, force: bool) -> Result<Vec<u64>, Refused> {
        let none = || Refused::new("a file that exists", "none");
        let file = Self::open_existing(path)?.ok_or_else(none)?;
        // Nobody comes to use it in the meantime.
        let _locked = match file.lock_patiently() {
            Err(refused) if !force => return Err(refused),
            locked => locked.ok(),
        };
        if !file.is_at(path) {
            return Err(Refused::new(
                "a file that stays",
                "one that others replaced",
            ));
        }
        let users = counts::users(&file);
        if users.is_empty() || force {
            rustix::fs::unlink(path).map_err(|error| Refused::failed("to remove it", error))?;
            return Ok(users);
        }
        let numbers: Vec<_> = users.iter().map(u64::to_string).collect();
        let noun = if users.len() == 1 {
            "process"
        } else {
            "processes"
        };
        let found = format!("one that is used by {noun} {}", numbers.join(", "));
        Err(Refused::new("one that no process uses", found))
    }

    /// Whether this file has this name.
    fn is_at(&self, path: &Path) -> bool {
        rustix::fs::lstat(path).is_ok_and(|found| self.lock.is_same(&found))
    }

    /// Says once if the file is gone that others would find.
    pub(super) fn is_removed(&self) -> bool {
        let links = self
            .lock
            .file()
            .and_then(|file| rustix::fs::fstat(file).ok());
        let removed = links.is_some_and(|found| found.st_nlink == 0);
        if removed && !self.told_unlinked.swap(true, Ordering::Relaxed) {
            log::warn!(
                "store '{}' was removed: the processes that use it go on together, but those started from now \
                 on do not share its quotas",
                self.path().display()
            );
        }
        removed
    }

    pub(super) fn secret(&self) -> [u64; 2] {
        pair(&self.header().secret)
    }

    pub(super) fn path(&self) -> &Path {
        &self.lock.path
    }

    #[inline]
    pub(super) fn header(&self) -> &Header {
        &self.slice(0, 1)[0]
    }

    pub(super) fn editions(&self) -> &[Edition] {
        self.slice(EDITIONS_AT, EDITIONS)
    }

    pub(super) fn rows(&self) -> &[Row] {
        self.slice(ROWS_AT, ROWS)
    }

    #[inline]
    pub(super) fn cells(&self) -> &[Cell] {
        self.slice(CELLS_AT, self.slots)
    }

    #[inline]
    fn slice<T: Shared>(&self, at: usize, count: usize) -> &[T] {
        debug_assert!(at + count * size_of::<T>() <= self.map.len());
        // SAFETY: the file was found to be as long as all its parts, and never gets shorter while callgate
        // has it; each part begins where its type may (a multiple of its alignment from the start of a page),
        // and consists of atomics, which any bytes are and which other processes may write.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(at).cast(), count) }
    }

    /// The arithmetic of an edition; none where there is no such edition.
    pub(super) fn bucket(&self, number: usize) -> Option<&Bucket> {
        if let Some((_, (_, bucket))) = self.met.iter().find(|(_, (met, _))| *met == number) {
            return Some(bucket);
        }
        if number == 0 || number as u64 >= self.header().editions.load(Ordering::Acquire) {
            return None;
        }
        let edition = self.editions().get(number)?;
        let bucket = edition.bucket()?;
        let place = self.met.push((number, bucket));
        self.met.get(place).map(|(_, bucket)| bucket)
    }

    /// A stamp that nobody was given before. Under the lock.
    pub(super) fn stamp(&self, edition: usize) -> u64 {
        let number = self
            .header()
            .stamps
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1);
        cells::stamp(number, edition)
    }

    /// Locks it for a moment, for a call; none where that takes too long.
    pub(super) fn lock(&self) -> Option<Locked<'_>> {
        let told = self.told_unlockable.load(Ordering::Relaxed);
        let locked = self.lock_within(if told { LESS_PATIENCE } else { PATIENCE });
        if told != locked.is_err() {
            self.tell(locked.as_ref().err());
        }
        locked.ok()
    }

    /// Says once that it cannot be locked, and why; and once that it can.
    #[cold]
    fn tell(&self, refused: Option<&Refused>) {
        let path = self.path().display();
        let told = self
            .told_unlockable
            .swap(refused.is_some(), Ordering::Relaxed);
        match refused {
            Some(Refused { found, .. }) if !told => log::error!(
                "store '{path}' cannot be locked: {found}. Calls that need the lock are refused until it can"
            ),
            None if told => log::warn!("store '{path}' can be locked again"),
            _ => {}
        }
    }

    /// Says once that a bucket cannot be read.
    #[cold]
    pub(super) fn tell_damaged(&self) {
        if !self.told_damaged.swap(true, Ordering::Relaxed) {
            log::error!(
                "store '{}' is damaged: calls are refused whose buckets cannot be read. Remove it and restart the \
                 processes that use it",
                self.path().display()
            );
        }
    }

    /// Locks it for somebody who makes a limiter.
    pub(super) fn lock_patiently(&self) -> Result<Locked<'_>, Refused> {
        self.lock_within(MORE_PATIENCE)
    }

    /// Only one thread of a process tries at a time: the others do not make it harder for it.
    fn lock_within(&self, patience: Duration) -> Result<Locked<'_>, Refused> {
        let refused = |found: String| Refused::new("one that can be locked", found);
        let busy = || refused("it has been locked by a process that does not go on".into());
        let mut waiting = Waiting::new(patience);
        while !self.lock.claim() {
            if !waiting.goes_on() {
                return Err(busy());
            }
        }
        loop {
            match self.lock.try_lock() {
                Ok(true) => return Ok(self.locked()),
                Ok(false) if waiting.goes_on() => {}
                failed => {
                    self.lock.give_up();
                    return Err(failed.map_or_else(refused, |_| busy()));
                }
            }
        }
    }

    /// Locks it if nobody has it.
    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        self.lock.claim().then_some(())?;
        if self.lock.try_lock() == Ok(true) {
            return Some(self.locked());
        }
        self.lock.give_up();
        None
    }

    /// After it was locked: what those had frozen who died is thawed.
    fn locked(&self) -> Locked<'_> {
        let locked = Locked(self);
        if self.header().freezing.load(Ordering::Acquire) != 0 {
            locked.thaw_all();
        }
        locked
    }
}

impl Header {
    fn summed(&self) -> u64 {
        let [one, other] = pair(&self.secret);
        let words = [&self.magic, &self.version, &self.size, &self.slots];
        let [magic, version, size, slots] = words.map(|word| word.load(Ordering::Relaxed));
        sum(&[magic, version, size, slots, one, other])
    }
}

impl Edition {
    /// Its arithmetic, if it holds what was written there.
    pub(super) fn bucket(&self) -> Option<Bucket> {
        if self.sum.load(Ordering::Relaxed) != self.summed() {
            return None;
        }
        let [low, high] = pair(&self.nanos).map(u128::from);
        let (tokens, burst) = (&self.tokens, &self.burst);
        let [tokens, burst] = [tokens, burst].map(|word| word.load(Ordering::Relaxed));
        Bucket::of((tokens, high << 64 | low), burst).filter(|_| burst <= crate::MAX_BURST)
    }

    pub(super) fn set_bucket(&self, (tokens, nanos): (u64, u128), burst: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let [low, high] = [nanos as u64, (nanos >> 64) as u64];
        self.tokens.store(tokens, Ordering::Relaxed);
        self.nanos[0].store(low, Ordering::Relaxed);
        self.nanos[1].store(high, Ordering::Relaxed);
        self.burst.store(burst, Ordering::Relaxed);
    }

    /// Says that all its numbers are there.
    pub(super) fn seal(&self) {
        self.sum.store(self.summed(), Ordering::Relaxed);
    }

    fn summed(&self) -> u64 {
        let words = [
            &self.first,
            &self.named,
            &self.identity[0],
            &self.identity[1],
            &self.tokens,
            &self.nanos[0],
            &self.nanos[1],
            &self.burst,
        ];
        sum(&words.map(|word| word.load(Ordering::Relaxed)))
    }
}

/// Differs, most likely, where a word does: what is damaged by accident is refused and not guessed at.
pub(super) fn sum(words: &[u64]) -> u64 {
    let mut hasher = SipHasher13::new();
    for &word in words {
        hasher.write_u64(word);
    }
    hasher.finish()
}

/// What may be in the file: atomics only.
trait Shared {}
impl Shared for Header {}
impl Shared for Edition {}
impl Shared for Row {}
impl Shared for Cell {}

pub(super) fn pair(words: &[AtomicU64; 2]) -> [u64; 2] {
    [&words[0], &words[1]].map(|word| word.load(Ordering::Relaxed))
}

/// The file, held by nobody else.
pub(super) struct Locked<'a>(&'a File);

impl Locked<'_> {
    /// Says that cells are about to be frozen, or that they are thawed.
    pub(super) fn freezing(&self, freezing: bool) {
        let word = &self.0.header().freezing;
        word.store(freezing.into(), Ordering::SeqCst);
    }

    #[cold]
    fn thaw_all(&self) {
        let cells = self.0.cells().iter().map(|cell| &cell.word);
        let own = self.0.editions().iter().map(|edition| &edition.own);
        for word in cells.chain(own) {
            thawed(word, self);
        }
        self.freezing(false);
    }
}

/// What a word holds, which nobody has frozen but who has the lock.
pub(super) fn thawed(word: &Word, _locked: &Locked<'_>) -> Stamped {
    let seen = word.load();
    if seen.is_frozen() {
        word.store(seen.thawed());
    }
    seen.thawed()
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.lock.unlock();
    }
}

/// One holder among all processes by the kernel's lock, which ends with its process, and one among this
/// process's threads, which share it.
///
/// A forked child opens the file again, since its parent's lock would be its own. It may find that a thread of
/// its parent held the lock of the threads, and takes that over. A process may close descriptors that are not its
/// own, as daemons do, and their numbers are used again: so nothing is locked before it was looked at.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    /// Which file it is.
    is: Stat,
    /// The process whose thread holds it, or tries to; zero for none.
    holder: AtomicU32,
    /// (No lock: a child may have been forked while it was held.)
    opened: boxcar::Vec<Opened>,
}

/// The file, as one process opened it.
#[derive(Debug)]
struct Opened {
    opener: u32,
    file: OwnedFd,
    /// Where it is read from, which it never is: tells it from what else has its number by now.
    mark: u64,
}

impl Opened {
    fn new(file: OwnedFd) -> rustix::io::Result<Self> {
        /// Of those that this process and its parents opened.
        static OPENED: AtomicU32 = AtomicU32::new(0);
        let opener = process::id();
        let number = OPENED.fetch_add(1, Ordering::Relaxed) & 0xffff;
        let mark = u64::from(opener) << 16 | u64::from(number);
        rustix::fs::seek(&file, SeekFrom::Start(mark))?;
        Ok(Self { opener, file, mark })
    }

    fn is_there(&self) -> bool {
        rustix::fs::seek(&self.file, SeekFrom::Current(0)) == Ok(self.mark)
    }
}

impl Lock {
    fn new(file: OwnedFd, path: &Path) -> rustix::io::Result<Self> {
        let is = rustix::fs::fstat(&file)?;
        let opened = boxcar::Vec::new();
        opened.push(Opened::new(file)?);
        Ok(Self {
            path: path.to_owned(),
            is,
            holder: AtomicU32::new(0),
            opened,
        })
    }

    fn is_same(&self, found: &Stat) -> bool {
        (found.st_dev, found.st_ino) == (self.is.st_dev, self.is.st_ino)
    }

    /// Whether a descriptor is of this file, whoever opened it.
    fn is_of(&self, file: &OwnedFd) -> bool {
        rustix::fs::fstat(file).is_ok_and(|found| self.is_same(&found))
    }

    /// As this process opened it; none where it cannot be had any more.
    fn file(&self) -> Option<&OwnedFd> {
        let process = process::id();
        let mine = self.opened.iter().map(|(_, opened)| opened).find(|opened| {
            opened.opener == process && self.is_of(&opened.file) && opened.is_there()
        });
        if let Some(opened) = mine {
            return Some(&opened.file);
        }
        let again = Opened::new(self.open_again()?).ok()?;
        let place = self.opened.push(again);
        self.opened.get(place).map(|opened| &opened.file)
    }

    /// By an inherited descriptor, since the name may be gone, or else by the name.
    fn open_again(&self) -> Option<OwnedFd> {
        let opened = self.opened.iter().map(|(_, opened)| &opened.file);
        let inherited = opened.filter(|file| self.is_of(file));
        let inherited = inherited.map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()).into());
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let by_name = std::iter::once((self.path.clone(), flags | OFlags::NOFOLLOW));
        let mut places = inherited.map(|path: PathBuf| (path, flags)).chain(by_name);
        places.find_map(|(path, flags)| {
            let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
            self.is_of(&file).then_some(file)
        })
    }

    /// Keeps other threads from trying; not where one of them does.
    fn claim(&self) -> bool {
        let process = process::id();
        let holder = self.holder.load(Ordering::Relaxed);
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        holder != process
            && self
                .holder
                .compare_exchange(holder, process, acquire, relaxed)
                .is_ok()
    }

    /// Locks it, by the one thread that may, if no process has it.
    fn try_lock(&self) -> Result<bool, String> {
        let gone = "this process has closed it, and it is not at its path any more";
        let file = self.file().ok_or(gone)?;
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn unlock(&self) {
        // What was closed in the meantime is not locked any more.
        if let Some(file) = self.file() {
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
        self.give_up();
    }

    fn give_up(&self) {
        self.holder.store(0, Ordering::Release);
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        for opened in std::mem::take(&mut self.opened) {
            // What has its number by now is not ours to close.
            if !(self.is_of(&opened.file) && opened.is_there()) {
                let _ = opened.file.into_raw_fd();
            }
        }
    }
}

/// Waits for what cannot be waited for with an end: whoever has it runs, and has it for microseconds, or does not
/// run, and needs a processor.
struct Waiting {
    patience: Duration,
    started: Option<Instant>,
    tries: u32,
}

impl Waiting {
    fn new(patience: Duration) -> Self {
        Self {
            patience,
            started: None,
            tries: 0,
        }
    }

    /// Whether to try again. On a busy machine a nap may be long: it is followed by many tries before this ends.
    fn goes_on(&mut self) -> bool {
        self.tries += 1;
        if !self.tries.is_multiple_of(SPINS) {
            spin_loop();
            return true;
        }
        let started = self.started.get_or_insert_with(Instant::now);
        let goes_on = started.elapsed() <= self.patience;
        if goes_on {
            thread::sleep(NAP);
        }
        goes_on
    }
}

/// Why a file was not opened.
pub(super) fn unopened(error: Errno) -> Refused {
    match error {
        Errno::LOOP => Refused::new("a regular file", "a symbolic link"),
        Errno::NOENT => Refused::new("a file that exists", "none"),
        error => Refused::failed("to open it", error),
    }
}

/// What is known of a regular file.
pub(super) fn look(file: &OwnedFd) -> Result<Stat, Refused> {
    let found = rustix::fs::fstat(file).map_err(|error| Refused::failed("to look at it", error))?;
    if rustix::fs::FileType::from_raw_mode(found.st_mode).is_file() {
        Ok(found)
    } else {
        Err(Refused::new("a regular file", "something else"))
    }
}

/// The length of a file that is as long as a store at least.
pub(super) fn length(found: &Stat) -> Result<usize, Refused> {
    let length = usize::try_from(found.st_size).unwrap_or(0);
    if length < CELLS_AT {
        let allowed = format!("a store of callgate: at least {CELLS_AT} bytes");
        return Err(Refused::new(allowed, format!("{length} bytes")));
    }
    Ok(length)
}

/// Whether a file of this length begins as a store does.
pub(super) fn check([magic, version, said, slots]: [u64; 4], length: usize) -> Result<(), Refused> {
    if magic != MAGIC {
        return Err(Refused::new("a store of callgate", "another kind of file"));
    }
    if version != VERSION {
        let allowed = format!("of layout {VERSION}");
        return Err(Refused::new(allowed, format!("layout {version}")));
    }
    let due = usize::try_from(slots)
        .ok()
        .and_then(|slots| slots.checked_mul(size_of::<Cell>()));
    let due = due.and_then(|cells| cells.checked_add(CELLS_AT));
    if said != length as u64 || due != Some(length) {
        let allowed = format!("{said} bytes for {slots} slots, as it says itself");
        return Err(Refused::new(allowed, format!("{length} bytes")));
    }
    Ok(())
}

/// Gives a nameless file a name that nothing has.
fn link(nameless: &OwnedFd, path: impl rustix::path::Arg) -> rustix::io::Result<()> {
    let from = format!("/proc/self/fd/{}", nameless.as_raw_fd());
    rustix::fs::linkat(CWD, from, CWD, path, AtFlags::SYMLINK_FOLLOW)
}

/// Which boot of the host this is.
fn boot() -> Result<[u64; 2], Refused> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(PATH)
        .map_err(|error| Refused::failed(format!("to read {PATH}"), error))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        Ok(boot) => Ok([(boot >> 64) as u64, boot as u64]),
        Err(_) => Err(Refused::new(
            format!("used where {PATH} is a UUID"),
            text.trim(),
        )),
    }
}

fn random() -> io::Result<[u64; 2]> {
    use std::io::Read;
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let (low, high) = bytes.split_at(8);
    Ok([low, high].map(|half| {
        half.iter()
            .fold(0, |word, &byte| word << 8 | u64::from(byte))
    }))
}

/// What is wrong with a file, before it is said which.
pub(super) struct Refused {
    allowed: String,
    found: String,
}

impl Refused {
    pub(super) fn new(allowed: impl Into<String>, found: impl Into<String>) -> Self {
        let (allowed, found) = (allowed.into(), found.into());
        Self { allowed, found }
    }

    fn damaged() -> Self {
        Self::new(
            "a store that holds what was written there",
            "a damaged one (remove it to start anew)",
        )
    }

    pub(super) fn failed(what: impl Into<String>, error: impl std::fmt::Display) -> Self {
        Self::new(
            format!("one that allows {}", what.into()),
            error.to_string(),
        )
    }

    pub(super) fn of(self, path: &Path) -> ConfigError {
        let Self { allowed, found } = self;
        ConfigError::new("store", allowed, format!("{found}: '{}'", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder, and the lock of a file in it as often as it is asked for.
    fn locks() -> (tempfile::TempDir, impl Fn() -> Lock) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "").expect("a file");
        (folder, move || {
            Lock::new(open(&path), &path).expect("a file")
        })
    }

    fn open(path: &Path) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE;
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).expect("a file")
    }

    fn locked(lock: &Lock) -> bool {
        let locked = lock.claim() && lock.try_lock() == Ok(true);
        if !locked && lock.holder.load(Ordering::Relaxed) == process::id() {
            lock.give_up();
        }
        locked
    }

    /// A lock as a child finds it that was forked by another process.
    fn inherited(mut lock: Lock) -> Lock {
        let parent = process::id() + 1;
        for opened in std::mem::take(&mut lock.opened) {
            let opener = parent;
            lock.opened.push(Opened { opener, ..opened });
        }
        if *lock.holder.get_mut() != 0 {
            *lock.holder.get_mut() = parent;
        }
        lock
    }

    #[test]
    fn one_at_a_time_holds_the_lock() {
        let (_folder, lock) = locks();
        let (one, other) = (lock(), lock());
        assert!(locked(&one));
        assert!(!one.claim(), "threads share it");
        assert!(!locked(&other));
        one.unlock();
        assert!(locked(&other));
    }

    #[test]
    fn r19_a_child_takes_over_what_a_thread_of_its_parent_held() {
        let (_folder, lock) = locks();
        let lock = lock();
        assert!(lock.claim());
        let child = inherited(lock);
        assert!(locked(&child));
        child.unlock();
        assert!(locked(&child));
    }

    #[test]
    fn r19_a_child_is_kept_out_while_its_parent_has_the_lock() {
        let (_folder, lock) = locks();
        let lock = lock();
        assert!(locked(&lock));
        let child = inherited(lock);
        assert!(!locked(&child), "its parent's lock is not its own");
        let openers: Vec<_> = child.opened.iter().map(|(_, one)| one.opener).collect();
        assert_eq!(openers, [process::id() + 1, process::id()]);
        // The parent goes on; it shares the first file with the child.
        let parents = &child.opened.get(0).expect("inherited").file;
        rustix::fs::flock(parents, FlockOperation::Unlock).expect("unlocked");
        assert!(locked(&child));
    }

    /// Makes the number of a descriptor that of another file, as when it is closed and used again.
    fn reuse(lock: &Lock, by: &OwnedFd) -> std::os::fd::RawFd {
        let mine = &lock.opened.get(0).expect("its own").file;
        // Its owner is the lock still, which is to notice.
        let mut number = std::mem::ManuallyDrop::new(borrowed(mine));
        rustix::io::dup2(by, &mut number).expect("a number");
        mine.as_raw_fd()
    }

    #[expect(
        unsafe_code,
        reason = "somebody closes a descriptor that is not theirs"
    )]
    fn borrowed(file: &OwnedFd) -> OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: it is never dropped.
        unsafe { OwnedFd::from_raw_fd(file.as_raw_fd()) }
    }

    #[test]
    fn a_descriptor_that_became_another_files_is_neither_locked_nor_closed() {
        let (folder, lock) = locks();
        let (one, other) = (lock(), lock());
        let foreign = open(&folder.path().join("foreign"));
        let number = reuse(&one, &foreign);
        assert!(locked(&one));
        assert!(!locked(&other), "it is the same lock still");
        drop(one);
        assert!(locked(&other));
        let left = fs::read_link(format!("/proc/self/fd/{number}")).expect("open still");
        assert!(left.ends_with("foreign"), "{left:?}");
    }

    #[test]
    fn a_descriptor_that_became_anothers_of_the_same_file_is_not_shared() {
        let (_folder, lock) = locks();
        let (one, other) = (lock(), lock());
        reuse(&one, &other.opened.get(0).expect("its own").file);
        assert!(locked(&other));
        assert!(!locked(&one), "the other's lock is not its own");
        other.unlock();
        assert!(locked(&one));
    }

    #[test]
    fn what_was_closed_and_removed_says_that_it_cannot_be_locked() {
        let (folder, lock) = locks();
        let lock = lock();
        reuse(&lock, &open(&folder.path().join("foreign")));
        fs::remove_file(&lock.path).expect("a file");
        assert!(lock.claim());
        let refused = lock.try_lock().expect_err("gone");
        assert!(refused.contains("has closed it"), "{refused}");
        fs::rename(folder.path().join("foreign"), &lock.path).expect("a file");
        assert!(lock.try_lock().is_err(), "another file");
    }
}
