//! What is refused, and how it is said.

use std::fmt;

/// A value that was refused when it was given: which one, what it was, and what is allowed.
///
/// ```
/// use callgate::{Limit, Limiter};
///
/// let refused = Limiter::builder()
///     .limit("search", Limit::per_second(0).burst(10))
///     .build()
///     .unwrap_err();
/// assert_eq!(
///     refused.to_string(),
///     "limit 'search': rate must be from 1 per 366 days to 1,000,000,000 per second, got 0 per second",
/// );
/// ```
///
/// For a file it is everything that was refused in it, each with its line, as a compiler says it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConfigError(Refused);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Refused {
    Value {
        limit: Option<String>,
        field: &'static str,
        allowed: String,
        value: String,
    },
    #[cfg(feature = "config")]
    File(String),
}

impl ConfigError {
    pub(crate) fn new(
        field: &'static str,
        allowed: impl Into<String>,
        value: impl Into<String>,
    ) -> Self {
        Self(Refused::Value {
            limit: None,
            field,
            allowed: allowed.into(),
            value: value.into(),
        })
    }

    /// A file that was refused; the text says all of it.
    #[cfg(feature = "config")]
    pub(crate) fn file(text: String) -> Self {
        Self(Refused::File(text))
    }

    /// What is allowed, as in "a whole number from 1 to 4,294,967,295"; empty for a file, whose text
    /// says it line by line.
    #[must_use]
    pub fn allowed(&self) -> &str {
        match &self.0 {
            Refused::Value { allowed, .. } => allowed,
            #[cfg(feature = "config")]
            Refused::File(_) => "",
        }
    }

    /// The value's name; empty for a file.
    #[cfg(feature = "config")]
    pub(crate) fn field(&self) -> &'static str {
        match self.0 {
            Refused::Value { field, .. } => field,
            Refused::File(_) => "",
        }
    }

    /// Names the limit that the value was given for.
    pub(crate) fn of_limit(mut self, name: &str) -> Self {
        match &mut self.0 {
            Refused::Value { limit, .. } => *limit = Some(name.to_owned()),
            #[cfg(feature = "config")]
            Refused::File(_) => {}
        }
        self
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Refused::Value {
                limit,
                field,
                allowed,
                value,
            } => {
                if let Some(limit) = limit {
                    write!(f, "limit '{limit}': ")?;
                }
                write!(f, "{field} must be {allowed}, got {value}")
            }
            #[cfg(feature = "config")]
            Refused::File(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for ConfigError {}
