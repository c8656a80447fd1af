//! Limits from a TOML file.
//!
//! ```toml
//! [limits.lookup_customer]        # a limit's name is its tool, unless `tools` is given
//! requests_per_second = 2
//! burst = 2
//!
//! [limits.crm]
//! tools = ["crm_*", "lookup_customer"]
//! quota = "300/min"
//! per = ["tenant"]
//! max_wait = "2s"
//! max_concurrent = 4
//!
//! [default]                       # each tool that no limit holds for
//! rate = "10/s"
//! burst = 10
//!
//! [store]                         # what processes share; without it, each has its own buckets
//! url = "shm:/run/myapp/callgate" # or url_env, the environment variable that has the URL
//! ```
//!
//! [`LimiterBuilder::from_file`] reads it. Nothing in a file is ignored: all that is wrong in it is said at
//! once, with line, key and what is allowed.

mod report;
mod schema;

use std::borrow::Cow;
use std::env;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::limit::{refused_fields, refused_tools};
use crate::rules::{Config, DEFAULT};
use crate::store::{self, Kind};
use crate::{ConfigError, Limit, Limiter, LimiterBuilder, MAX_BURST, MAX_WAIT, OnStoreError, Unit};
use report::{MOST, Problem, report};
pub use schema::schema;

/// The largest file that is read: some ten thousand limits. A device never ends.
const LARGEST: u64 = 1 << 20;

impl LimiterBuilder {
    /// Starts a limiter with the limits of a TOML [file](crate::config).
    ///
    /// ```no_run
    /// use callgate::LimiterBuilder;
    ///
    /// let limiter = LimiterBuilder::from_file("limits.toml")?.build()?;
    /// # Ok::<(), callgate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// When the file cannot be read, is larger than 1 MiB or anything in it is refused. Where the store's URL is in an
    /// environment variable that is [not set](Self::unset_variable), [`build`](Self::build) says so.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let name = path.to_string_lossy();
        let bytes = read(path).map_err(|why| report(&name, "", vec![Problem::whole(why)]))?;
        match str::from_utf8(&bytes) {
            Ok(text) => Self::from_toml(text, &name),
            Err(error) => {
                // What comes before the fault stays where it is in the text that is shown.
                let at = error.valid_up_to();
                let text = without_logins(&String::from_utf8_lossy(&bytes));
                Err(report(&name, &text, vec![not_utf8(&bytes, at)]))
            }
        }
    }

    /// Starts a limiter with the limits of such a file's text; `name` is what errors call it.
    ///
    /// ```
    /// use callgate::LimiterBuilder;
    ///
    /// let text = "
    /// [limits.search]
    /// rate = '300/min'
    /// brust = 20
    /// ";
    /// let refused = LimiterBuilder::from_toml(text, "limits.toml").unwrap_err().to_string();
    /// assert!(refused.contains("--> limits.toml:4:1"));
    /// assert!(refused.contains("did you mean `burst`?"));
    /// ```
    ///
    /// # Errors
    /// When anything in it is refused.
    pub fn from_toml(text: &str, name: &str) -> Result<Self, ConfigError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (document, errors) = DeTable::parse_recoverable(text);
        let text = &*without_logins(text);
        let mut reading = Reading {
            text,
            problems: Vec::new(),
            unset: None,
        };
        let mut builder = reading.file(document.get_ref(), &errors);
        let mut problems = reading.problems;
        let is_good = problems.is_empty();
        let (variable, problem) = reading.unset.unzip();
        problems.extend(problem);
        if problems.is_empty() {
            return Ok(builder);
        }
        let error = report(name, text, problems);
        match variable.filter(|_| is_good) {
            // Who only looks at the limits does without.
            Some(variable) => {
                builder.unset = Some((variable, error));
                Ok(builder)
            }
            None => Err(error),
        }
    }
}

impl Limiter {
    /// Makes a limiter from a TOML [file](crate::config).
    ///
    /// # Errors
    /// As [`LimiterBuilder::from_file`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        LimiterBuilder::from_file(path)?.build()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("the file cannot be read: {error}"))?;
    if bytes.len() as u64 > LARGEST {
        return Err("the file is larger than 1 MiB".into());
    }
    Ok(bytes)
}

/// The text with every user and password of a URL in it blotted out: each byte stays where it is.
fn without_logins(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("://") {
        let (before, after) = rest.split_at(start + "://".len());
        shown.push_str(before);
        // Whatever follows, a quote that is missing included, ends with the line.
        let line = after.find(['\n', '\r']).unwrap_or(after.len());
        let login = after[..line].rfind('@').unwrap_or(0);
        shown.extend(std::iter::repeat_n('*', login));
        rest = &after[login..];
    }
    shown + rest
}

fn not_utf8(bytes: &[u8], at: usize) -> Problem {
    let label = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "this is how UTF-16 starts",
        _ => "",
    };
    Problem::new(
        "the file is not UTF-8",
        at..at + '\u{fffd}'.len_utf8(),
        label,
    )
}

/// A key that a limit may have: its name, what it takes, and what it means.
struct Key {
    name: &'static str,
    takes: Takes,
    means: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Number,
    Rate,
    Quota,
    Whole,
    Tools,
    Fields,
    Time,
    Policy,
}

/// The keys of a limit. What is read, the schema and the spelling hints all come from here.
const KEYS: [Key; 10] = [
    Key {
        name: "requests_per_second",
        takes: Takes::Number,
        means: "How fast the bucket refills, in tokens a second: from 1 per 366 days to 1,000,000,000.",
    },
    Key {
        name: "rate",
        takes: Takes::Rate,
        means: "How fast the bucket refills, as N/s, N/min, N/h or N/day.",
    },
    Key {
        name: "quota",
        takes: Takes::Quota,
        means: "Never more than N tokens in any second, minute, hour or day, the burst included: N/s, N/min, N/h or N/day with a whole N of at least 2.",
    },
    Key {
        name: "burst",
        takes: Takes::Whole,
        means: "How many tokens the bucket holds. With a quota it may be left out: a tenth of the quota, at least 1.",
    },
    Key {
        name: "cost",
        takes: Takes::Whole,
        means: "What a call costs that does not say it, in tokens: 1 unless given, at most the burst.",
    },
    Key {
        name: "tools",
        takes: Takes::Tools,
        means: "The tools that share this limit, by name or by a pattern with * and ?. Unless given, the limit's name is its tool.",
    },
    Key {
        name: "per",
        takes: Takes::Fields,
        means: "The fields of a call that split this limit: each combination of their values has a bucket of its own. The field 'tool' is the tool's name.",
    },
    Key {
        name: "max_wait",
        takes: Takes::Time,
        means: "How long a call may wait for its turn, such as '2s': up to 86,400 s, in ms, s, min or h. One that cannot be served within that time is refused at once. 0s unless given: no call waits.",
    },
    Key {
        name: "max_concurrent",
        takes: Takes::Whole,
        means: "How many admitted calls may run at the same time in one process; where fields split the limit, so many for each of its buckets. As many as there are unless given.",
    },
    Key {
        name: ON_STORE_ERROR,
        takes: Takes::Policy,
        means: "What becomes of this limit's calls when a store over a network fails; what the top of the file says unless given. Of several limits on a call the strictest says it: raise, deny, local, admit.",
    },
];

const ON_STORE_ERROR: &str = "on_store_error";

/// The units that a time is written in, in nanoseconds.
const TIME_UNITS: [(&str, u128); 4] = [
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// The keys at the top of the file.
const TOP: [&str; 5] = ["default", "dry_run", "limits", ON_STORE_ERROR, "store"];

/// The keys of the store.
const STORE_KEYS: [&str; 2] = ["url", "url_env"];

type Name<'t> = Spanned<Cow<'t, str>>;
type Value<'t> = Spanned<DeValue<'t>>;

/// Reads one text and collects what is wrong in it.
struct Reading<'t> {
    /// To be shown.
    text: &'t str,
    problems: Vec<Problem>,
    /// The variable that the store's URL is to be in, where it is not set, and what is wrong then.
    unset: Option<(String, Problem)>,
}

/// A key of a limit as the file has it.
struct Entry<'v> {
    key: &'static Key,
    at: Range<usize>,
    value: &'v Value<'v>,
}

impl Reading<'_> {
    fn file(&mut self, document: &DeTable<'_>, errors: &[toml::de::Error]) -> LimiterBuilder {
        let mut builder = Limiter::builder();
        let mut limits_nothing = true;
        if !errors.is_empty() {
            self.problems = not_toml(self.text, errors);
            return builder;
        }
        for (key, value) in in_order(document) {
            match (&**key.get_ref(), value.get_ref()) {
                ("dry_run", DeValue::Boolean(dry_run)) => builder = builder.dry_run(*dry_run),
                ("dry_run", _) => self.refuse("dry_run", "true or false", value),
                ("limits", DeValue::Table(limits)) => {
                    for (name, value) in in_order(limits) {
                        limits_nothing = false;
                        if name.get_ref() == DEFAULT {
                            let why = format!("{DEFAULT} is no name of a limit");
                            let label = "the default limit is written [default]";
                            self.problems.push(Problem::new(why, name.span(), label));
                        } else if let Some(limit) = self.limit(name.get_ref(), name.span(), value) {
                            builder = builder.limit(name.get_ref().as_ref(), limit);
                        }
                    }
                }
                ("limits", _) => self.refuse("limits", "tables, each written [limits.NAME]", value),
                ("default", _) => {
                    limits_nothing = false;
                    if let Some(limit) = self.limit(DEFAULT, key.span(), value) {
                        builder = builder.default_limit(limit);
                    }
                }
                (ON_STORE_ERROR, value_given) => match policy(value_given) {
                    Ok(policy) => builder = builder.on_store_error(policy),
                    Err(error) => self.refuse(ON_STORE_ERROR, error.allowed(), value),
                },
                ("store", DeValue::Table(store)) => {
                    if let Some(url) = self.store(key, store) {
                        builder = builder.store(url);
                    }
                }
                ("store", _) => self.refuse("store", "a table, written [store]", value),
                _ => self.problems.push(unknown_on_top(key, value)),
            }
        }
        if limits_nothing && self.problems.is_empty() {
            let why = "the file would limit nothing: it has no [limits.NAME] and no [default]";
            self.problems.push(Problem::whole(why));
        }
        builder
    }

    /// The URL of the store; none where it is wrong.
    fn store(&mut self, header: &Name<'_>, table: &DeTable<'_>) -> Option<String> {
        let before = self.problems.len();
        let mut url = None;
        for (key, value) in in_order(table) {
            let text = value.get_ref().as_str();
            let found = match (&**key.get_ref(), text) {
                ("url" | "url_env", _) if url.is_some() || self.unset.is_some() => {
                    let why = "store has both `url` and `url_env`";
                    let problem = Problem::new(why, key.span(), "only one of them is allowed");
                    self.problems.push(problem);
                    continue;
                }
                ("url", Some(text)) => Ok(text.to_owned()),
                ("url", None) => Err(ConfigError::new("url", "a text", self.shown(value))),
                ("url_env", text) => env::var(text.unwrap_or_default()).map_err(|_| {
                    let allowed = "the name of an environment variable that is set";
                    ConfigError::new("url_env", allowed, self.shown(value))
                }),
                (given, _) => {
                    let why = format!("unknown key `{}` in store", cut(given));
                    let label = nearest(given, &STORE_KEYS)
                        .map(|nearest| format!("did you mean `{nearest}`?"));
                    let problem = Problem::new(why, key.span(), label.unwrap_or_default());
                    let allowed = format!("allowed here: {}", STORE_KEYS.join(", "));
                    self.problems.push(problem.note(allowed));
                    continue;
                }
            };
            let checked = found.and_then(|found| store::check(&found).map(|()| found));
            match checked {
                Ok(found) => url = Some(found),
                Err(error) => {
                    let problem = Problem::new(error.to_string(), value.span(), "");
                    let is_unset = |name: &&str| is_variable(name) && env::var_os(name).is_none();
                    let in_variable = key.get_ref() == "url_env";
                    match text.filter(|_| in_variable).filter(is_unset) {
                        Some(name) => self.unset = Some((name.to_owned(), problem)),
                        None => self.problems.push(problem),
                    }
                }
            }
        }
        if url.is_none() && self.unset.is_none() && self.problems.len() == before {
            let label = "`url` or `url_env` is missing";
            self.problems.push(Problem::new(
                "store does not say where it is",
                header.span(),
                label,
            ));
        }
        url
    }

    /// Reads a limit; none where anything in it is wrong.
    fn limit(&mut self, name: &str, header: Range<usize>, value: &Value<'_>) -> Option<Limit> {
        let before = self.problems.len();
        let DeValue::Table(table) = value.get_ref() else {
            let why = format!("limit '{}' must be a table", cut(name));
            let label = "such as { rate = '10/s', burst = 10 }";
            self.problems.push(Problem::new(why, value.span(), label));
            return None;
        };
        let mut entries = self.entries(name, table);
        if self.problems.len() == before {
            // Only now: what is misspelt above may be what is missing.
            self.problems.extend(missing(name, &header, &entries));
        }
        let limit = loop {
            match assemble(name, &entries) {
                Ok(limit) => break limit,
                Err(error) => {
                    // All faults are found, not just the first: what was refused is left out next time.
                    let Some(place) = culprit(&entries, error.field()) else {
                        let message = error.of_limit(&cut(name)).to_string();
                        self.problems.push(Problem::new(message, header, ""));
                        return None;
                    };
                    let entry = entries.remove(place);
                    let wrong = wrong_names(entry.key, entry.value);
                    if wrong.is_empty() {
                        let refused = self.refused(name, entry.key, entry.value, &error);
                        self.problems.push(refused);
                    }
                    for (value, error) in wrong {
                        let refused = self.refused(name, entry.key, value, &error);
                        self.problems.push(refused);
                    }
                    if entry.key.name == "burst" {
                        // A quota would bring another burst along, and the cost be held against it.
                        entries.retain(|entry| entry.key.takes != Takes::Quota);
                    }
                }
            }
        };
        (self.problems.len() == before).then_some(limit)
    }

    /// The keys that a limit may have, and one way to say its rate; the others are refused.
    fn entries<'v>(&mut self, name: &str, table: &'v DeTable<'v>) -> Vec<Entry<'v>> {
        let mut entries: Vec<Entry<'v>> = Vec::new();
        for (given, value) in in_order(table) {
            if name != DEFAULT && says_a_rate(value) {
                self.unquoted(name, given.get_ref(), given, value);
                continue;
            }
            let known = allowed_in(name).find(|key| key.name == given.get_ref());
            let Some(key) = known else {
                self.problems.push(unknown_in_limit(name, given, value));
                continue;
            };
            let first = entries.iter().find(|entry| entry.key.is_pace());
            if let Some(first) = first.filter(|_| key.is_pace()) {
                let [one, other] = [first.key.name, key.name];
                let why = format!("limit '{}' has both `{one}` and `{other}`", cut(name));
                let problem = Problem::new(why, given.span(), "only one of them is allowed");
                self.problems
                    .push(problem.beside(first.at.clone(), "the other"));
                continue;
            }
            entries.push(Entry {
                key,
                at: given.span(),
                value,
            });
        }
        entries
    }

    /// Refuses the limits below a limit: their names have dots, and were to have quotes. `path` is where the
    /// key is, below the limit.
    fn unquoted(&mut self, limit: &str, path: &str, key: &Name<'_>, value: &Value<'_>) {
        let Some(table) = value.get_ref().as_table() else {
            return;
        };
        if has_pace(table) {
            self.problems.push(dotted(limit, path, key));
        }
        for (key, value) in in_order(table) {
            if says_a_rate(value) {
                let path = format!("{path}.{}", key.get_ref());
                self.unquoted(limit, &path, key, value);
            }
        }
    }

    fn refuse(&mut self, field: &'static str, allowed: &str, value: &Value<'_>) {
        let error = ConfigError::new(field, allowed, self.shown(value));
        self.problems
            .push(Problem::new(error.to_string(), value.span(), ""));
    }

    /// What is wrong with a key's value, or with one of a list.
    fn refused(&self, limit: &str, key: &Key, value: &Value<'_>, error: &ConfigError) -> Problem {
        let (field, allowed) = match key.takes {
            Takes::Number => (key.name, format!("a number {}", error.allowed())),
            // A tenth of a quota is the burst that nobody gave.
            Takes::Quota if error.field() == "burst" => {
                ("a tenth of quota", error.allowed().into())
            }
            _ => (key.name, error.allowed().to_owned()),
        };
        let error = ConfigError::new(field, allowed, self.shown(value)).of_limit(&cut(limit));
        let quoted = matches!(key.takes, Takes::Number | Takes::Whole) && value.get_ref().is_str();
        let label = if quoted { "a number has no quotes" } else { "" };
        Problem::new(error.to_string(), value.span(), label)
    }

    /// A value as it is written.
    fn shown(&self, value: &Value<'_>) -> String {
        let written = self.text.get(value.span()).unwrap_or_default();
        let line = written.lines().next().unwrap_or_default();
        let mut shown = shortened(line);
        if line.len() < written.len() && !shown.ends_with('…') {
            shown.push('…');
        }
        shown
    }
}

/// Whether it may be the name of an environment variable. A URL in its place is none, and may hold a password.
fn is_variable(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    !name.is_empty() && name.bytes().all(is_allowed)
}

/// A text cut where it is long.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A name from the file: one line, and no character that a terminal would obey.
fn cut(name: &str) -> String {
    shortened(name).escape_debug().to_string()
}

impl Key {
    /// Whether it says how fast the bucket refills.
    fn is_pace(&self) -> bool {
        matches!(self.takes, Takes::Number | Takes::Rate | Takes::Quota)
    }
}

/// The keys that a limit of this name may have.
fn allowed_in(limit: &str) -> impl Iterator<Item = &'static Key> {
    let default = limit == DEFAULT;
    KEYS.iter()
        .filter(move |key| !(default && key.takes == Takes::Tools))
}

/// A table's entries in the order of the file.
fn in_order<'v>(table: &'v DeTable<'v>) -> Vec<(&'v Name<'v>, &'v Value<'v>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// Whether a limit is meant by this: a table that says a rate, or has one in it that does.
fn says_a_rate(value: &Value<'_>) -> bool {
    let table = value.get_ref().as_table();
    table.is_some_and(|table| has_pace(table) || table.values().any(says_a_rate))
}

fn has_pace(table: &DeTable<'_>) -> bool {
    let paces = || KEYS.iter().filter(|key| key.is_pace());
    table
        .keys()
        .any(|given| paces().any(|key| key.name == given.get_ref()))
}

/// What a limit lacks.
fn missing(name: &str, header: &Range<usize>, entries: &[Entry<'_>]) -> Option<Problem> {
    let has = |key: &str| entries.iter().any(|entry| entry.key.name == key);
    let Some(pace) = entries.iter().find(|entry| entry.key.is_pace()) else {
        let why = format!("limit '{}' does not say how much it admits", cut(name));
        let label = "`rate`, `requests_per_second` or `quota` is missing";
        return Some(Problem::new(why, header.clone(), label));
    };
    if pace.key.takes == Takes::Quota || has("burst") {
        return None;
    }
    let why = format!("limit '{}' has a rate and no burst", cut(name));
    let problem = Problem::new(why, header.clone(), "`burst` is missing");
    Some(problem.note("burst is how many tokens the bucket holds: so many calls may come at once"))
}

/// The limit that these entries make.
fn assemble(name: &str, entries: &[Entry<'_>]) -> Result<Limit, ConfigError> {
    let find = |wanted: &str| entries.iter().find(|entry| entry.key.name == wanted);
    let mut limit = match entries.iter().find(|entry| entry.key.is_pace()) {
        Some(entry) => pace(entry)?,
        None => Limit::per_second(1),
    };
    if let Some(burst) = find("burst") {
        limit = limit.burst(whole(burst.value.get_ref()));
    } else if limit.as_quota().is_none() {
        // It was refused, or its lack was: nothing else is to be refused for that.
        limit = limit.burst(MAX_BURST);
    }
    if let Some(cost) = find("cost") {
        limit = limit.cost(whole(cost.value.get_ref()));
    }
    if let Some(wait) = find("max_wait") {
        limit = limit.max_wait(time(wait)?);
    }
    if let Some(calls) = find("max_concurrent") {
        limit = limit.max_concurrent(whole(calls.value.get_ref()));
    }
    if let Some(entry) = find(ON_STORE_ERROR) {
        limit = limit.on_store_error(policy(entry.value.get_ref())?);
    }
    for entry in entries {
        limit = match (entry.key.takes, entry.value.get_ref()) {
            (Takes::Tools | Takes::Fields, DeValue::Array(values)) => {
                named(limit, entry.key, values)?
            }
            (Takes::Tools | Takes::Fields, _) => return Err(no_names(entry.key)),
            _ => limit,
        };
    }
    checked(name, limit)
}

/// The limit, where a limiter takes it.
fn checked(name: &str, limit: Limit) -> Result<Limit, ConfigError> {
    limit.check()?;
    let mut config = Config::default();
    if name == DEFAULT {
        config.default = Some(limit.clone());
    } else {
        config.limits.push((name.to_owned(), limit.clone()));
    }
    config.check(Kind::Memory).map(|_| limit)
}

fn pace(entry: &Entry<'_>) -> Result<Limit, ConfigError> {
    let value = entry.value.get_ref();
    // What has the wrong type is as far out of range as what is not there.
    let text = value.as_str().unwrap_or_default();
    match entry.key.takes {
        Takes::Rate => text.parse(),
        Takes::Quota => Limit::parse_quota(text),
        _ => Ok(match value {
            DeValue::Float(float) => Limit::per_second(float.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Integer(_) => Limit::per_second(whole(value)),
            _ => Limit::per_second(f64::NAN),
        }),
    }
}

/// A whole number; the largest for one that is larger, 0 for anything else: both are out of range.
fn whole(value: &DeValue<'_>) -> u64 {
    let DeValue::Integer(number) = value else {
        return 0;
    };
    let parsed = u64::from_str_radix(number.as_str(), number.radix());
    parsed.unwrap_or(if number.as_str().starts_with('-') {
        0
    } else {
        u64::MAX
    })
}

fn policy(value: &DeValue<'_>) -> Result<OnStoreError, ConfigError> {
    value.as_str().unwrap_or_default().parse()
}

fn time(entry: &Entry<'_>) -> Result<Duration, ConfigError> {
    let text = entry.value.get_ref().as_str().unwrap_or_default();
    parse_time(text).ok_or_else(|| {
        let allowed = "a time with its unit (ms, s, min or h), such as '2s', from 0 to 86,400 s in whole nanoseconds";
        ConfigError::new(entry.key.name, allowed, "")
    })
}

/// Reads a decimal and its unit; none where it is not that, longer than a call may wait, or finer than a
/// nanosecond.
fn parse_time(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
    let (_, unit) = TIME_UNITS.into_iter().find(|(symbol, _)| *symbol == unit)?;
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let digits = [whole, decimals].concat();
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // What overflows here is far out of range, or far too fine.
    let scaled = digits.parse::<u128>().ok()?.checked_mul(unit)?;
    let scale = 10_u128.checked_pow(u32::try_from(decimals.len()).ok()?)?;
    let nanos = Some(scaled / scale).filter(|_| scaled.is_multiple_of(scale))?;
    let time = Duration::from_nanos(u64::try_from(nanos).ok()?);
    Some(time).filter(|time| *time <= MAX_WAIT)
}

/// The limit with these names as its tools or fields.
fn named(limit: Limit, key: &'static Key, values: &[Value<'_>]) -> Result<Limit, ConfigError> {
    let names = values.iter().map(|value| value.get_ref().as_str());
    let names: Vec<&str> = names.collect::<Option<_>>().ok_or_else(|| no_names(key))?;
    Ok(match key.takes {
        Takes::Tools => limit.tools(names),
        _ => limit.per(names),
    })
}

fn no_names(key: &Key) -> ConfigError {
    let allowed = match key.takes {
        Takes::Tools => "a list of names and patterns, such as ['crm_*', 'lookup_customer']",
        _ => "a list of fields, such as ['tenant', 'tool']",
    };
    ConfigError::new(key.name, allowed, "")
}

/// The names in a list of tools or fields that are refused.
fn wrong_names<'v>(key: &'static Key, value: &'v Value<'v>) -> Vec<(&'v Value<'v>, ConfigError)> {
    let values = value.get_ref().as_array().into_iter().flatten();
    let (texts, others): (Vec<_>, Vec<_>) = values.partition(|value| value.get_ref().is_str());
    let names = texts.iter().filter_map(|value| value.get_ref().as_str());
    let names: Vec<String> = names.map(ToOwned::to_owned).collect();
    let refused: Vec<_> = match key.takes {
        Takes::Tools => refused_tools(&names).collect(),
        Takes::Fields => refused_fields(&names).collect(),
        _ => return Vec::new(),
    };
    let refused = refused
        .into_iter()
        .map(|(place, error)| (texts[place], error));
    refused
        .chain(others.into_iter().map(|value| (value, no_names(key))))
        .collect()
}

/// The entry that an error is about.
fn culprit(entries: &[Entry<'_>], field: &str) -> Option<usize> {
    let named = entries.iter().position(|entry| entry.key.name == field);
    // The rate goes by three names, and a quota brings a burst along.
    let pace = || entries.iter().position(|entry| entry.key.is_pace());
    match field {
        "rate" | "quota" | "burst" => named.or_else(pace),
        _ => named,
    }
}

fn not_toml(text: &str, errors: &[toml::de::Error]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut doubled: Option<usize> = None;
    // Where the last error was, and where its line starts: one line may have a million of them.
    let (mut last, mut line) = (0, 0);
    for error in errors {
        let at = error.span().unwrap_or(text.len()..text.len());
        let before = &text[..at.start];
        if at.start < last {
            (last, line) = (0, 0);
        }
        line = before[last..]
            .rfind('\n')
            .map_or(line, |end| last + end + 1);
        last = at.start;
        let in_header = before[line..].trim_start().starts_with('[');
        let twice = error.message() == "duplicate key";
        // The keys of a table that is given twice are given twice for that.
        if twice && doubled.is_some_and(|start| !before[start..].contains("\n[")) {
            continue;
        }
        doubled = (twice && in_header).then_some(at.start);
        problems.push(match error.message() {
            _ if twice => {
                let message = format!("`{}` is given twice", cut(&text[at.clone()]));
                Problem::new(message, at, "the second is here")
            }
            message
                if message.starts_with("string values") && text[at.clone()].trim().is_empty() =>
            {
                Problem::new("a key without a value", at, "")
            }
            // What is not shown needs no note, and looking for it takes time.
            message
                if problems.len() < MOST && lacks_quotes(message, before, &text[at.start..]) =>
            {
                let note = "a name with other characters than letters, digits, - and _ has quotes";
                Problem::new(message, at, "").note(format!("{note}: [limits.\"crm_*\"]"))
            }
            message => Problem::new(message, at, ""),
        });
    }
    problems
}

/// Whether this is about a limit's name that has no quotes, and needs them.
fn lacks_quotes(message: &str, before: &str, behind: &str) -> bool {
    let (above, line) = before.rsplit_once('\n').unwrap_or(("", before));
    let mut headers = above.lines().rev().map(str::trim_start);
    let header = headers.find(|line| line.starts_with('['));
    let below_limits = header.is_some_and(|header| header.starts_with("[limits]"));
    let line = line.trim_start();
    let in_header = line.starts_with('[');
    if !in_header && !below_limits && !line.starts_with("limits.") {
        return false;
    }
    // A name ends where a space is, or the line: only with a space is it the name that is wrong.
    let goes_on = |end: char| behind.lines().next().is_some_and(|rest| rest.contains(end));
    message.starts_with("invalid unquoted key")
        || message.starts_with("unclosed table") && goes_on(']')
        || message.starts_with("key with no value") && goes_on('=')
}

fn unknown_on_top(key: &Name<'_>, value: &Value<'_>) -> Problem {
    let name = cut(key.get_ref());
    let problem = |label: &str| Problem::new(format!("unknown key `{name}`"), key.span(), label);
    if KEYS.iter().any(|limit_key| limit_key.name == key.get_ref()) {
        return problem("it belongs to a limit, below [limits.NAME] or [default]");
    }
    let label = match nearest(key.get_ref(), &TOP) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None if value.get_ref().is_table() => format!("a limit is written [limits.{name}]"),
        None => String::new(),
    };
    problem(&label).note(format!("allowed here: {}", TOP.join(", ")))
}

fn unknown_in_limit(limit: &str, key: &Name<'_>, value: &Value<'_>) -> Problem {
    let [limit_name, name] = [limit, key.get_ref()].map(cut);
    let problem = |label: &str| {
        let why = format!("unknown key `{name}` in limit '{limit_name}'");
        Problem::new(why, key.span(), label)
    };
    let given = &**key.get_ref();
    if TOP.contains(&given) {
        return problem("it belongs at the top of the file, before the first [table]");
    }
    if value.get_ref().is_table() && limit != DEFAULT {
        return dotted(limit, given, key);
    }
    let in_unit = |unit: &Unit| given.strip_prefix("requests_per_") == Some(unit.name());
    if let Some(unit) = Unit::ALL.into_iter().find(in_unit) {
        return problem(&format!("this is written rate = \"N/{}\"", unit.symbol()));
    }
    let allowed: Vec<&str> = allowed_in(limit).map(|key| key.name).collect();
    let label = match in_python(given).or_else(|| nearest(given, &allowed)) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => String::new(),
    };
    problem(&label).note(format!("allowed here: {}", allowed.join(", ")))
}

/// The key for what Python calls otherwise: there `per` is a quota's unit.
fn in_python(given: &str) -> Option<&'static str> {
    (given == "fields").then_some("per")
}

/// A key that is the end of a limit's name.
fn dotted(limit: &str, path: &str, key: &Name<'_>) -> Problem {
    let why = format!("unknown table `{}` in limit '{}'", cut(path), cut(limit));
    let name = cut(&format!("{limit}.{path}"));
    let label = format!("a name with dots has quotes: [limits.\"{name}\"]");
    Problem::new(why, key.span(), label)
}

/// The key that was meant, if one is near enough.
fn nearest<'k>(given: &str, keys: &[&'k str]) -> Option<&'k str> {
    let given = given.to_lowercase().replace('-', "_");
    let distance = |key: &str| strsim::osa_distance(&given, key);
    let nearest = keys.iter().min_by_key(|key| distance(key))?;
    (distance(nearest) <= nearest.len() / 3).then_some(nearest)
}
