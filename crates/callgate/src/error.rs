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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConfigError {
    limit: Option<String>,
    field: &'static str,
    allowed: String,
    value: String,
}

impl ConfigError {
    pub(crate) fn new(
        field: &'static str,
        allowed: impl Into<String>,
        value: impl Into<String>,
    ) -> Self {
        Self {
            limit: None,
            field,
            allowed: allowed.into(),
            value: value.into(),
        }
    }

    /// What is allowed, as in "a whole number from 1 to 4,294,967,295".
    #[must_use]
    pub fn allowed(&self) -> &str {
        &self.allowed
    }

    /// Names the limit that the value was given for.
    pub(crate) fn of_limit(mut self, name: &str) -> Self {
        self.limit = Some(name.to_owned());
        self
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limit) = &self.limit {
            write!(f, "limit '{limit}': ")?;
        }
        write!(
            f,
            "{} must be {}, got {}",
            self.field, self.allowed, self.value
        )
    }
}

impl std::error::Error for ConfigError {}
