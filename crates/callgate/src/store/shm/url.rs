//! `shm:/run/myapp/callgate?slots=65536`.

use std::path::PathBuf;

use super::cells::BLOCK;
use super::file::VERSION;
use crate::ConfigError;

/// Two megabytes.
const SLOTS: usize = 1 << 16;

/// 512 megabytes.
const MOST_SLOTS: usize = 1 << 24;
const FEWEST_SLOTS: usize = 1 << 6;

/// Where the file is, and how large it is where it is made.
#[derive(Debug)]
pub(super) struct Url {
    pub(super) path: PathBuf,
    pub(super) slots: usize,
    pub(super) gives_slots: bool,
}

impl Url {
    /// Of a file that people name: by the URL, by the path in it, or by the file's own.
    pub(super) fn of_file(given: &str) -> Result<Self, ConfigError> {
        if let Some(rest) = given.strip_prefix("shm:") {
            return Self::parse(rest);
        }
        let layout = given.rsplit_once(".v").filter(|(_, version)| {
            !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit())
        });
        let Some((path, version)) = layout else {
            return Self::parse(given);
        };
        if version.parse() != Ok(VERSION) {
            let given = format!("layout {version}: '{}'", given.escape_debug());
            return Err(ConfigError::new(
                "store",
                format!("of layout {VERSION}"),
                given,
            ));
        }
        Self::parse(path)
    }

    /// Reads what comes after `shm:`.
    pub(super) fn parse(rest: &str) -> Result<Self, ConfigError> {
        let refused = |allowed: &str| {
            let given = format!("'shm:{}'", rest.escape_debug());
            ConfigError::new("store", allowed, given)
        };
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
            return Err(refused(
                "shm: and the whole path of a file, such as 'shm:/run/myapp/callgate'",
            ));
        }
        let slots = query.map(|query| {
            let slots = query
                .strip_prefix("slots=")
                .and_then(|slots| slots.parse().ok());
            slots.filter(|slots| (FEWEST_SLOTS..=MOST_SLOTS).contains(slots))
        });
        let allowed = format!(
            "a path with nothing but '?slots=N' behind it, with N from {FEWEST_SLOTS} to {MOST_SLOTS}"
        );
        let given = slots
            .map(|slots| slots.ok_or_else(|| refused(&allowed)))
            .transpose()?;
        Ok(Self {
            path: format!("{path}.v{VERSION}").into(),
            slots: given.unwrap_or(SLOTS).next_multiple_of(BLOCK),
            gives_slots: given.is_some(),
        })
    }
}
