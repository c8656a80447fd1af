//! A call, and what is decided about it.

#![expect(
    clippy::inline_always,
    reason = "a call that is not inlined is copied for each field"
)]

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use smallvec::SmallVec;

use crate::Limit;
use crate::bucket::Fill;
use crate::names::same;
use crate::trace::Traced;
use crate::waiting::Running;

/// A tool's call: its name, its fields and its cost.
///
/// ```
/// use std::num::NonZeroU64;
/// use callgate::Call;
///
/// let call = Call::new("search_documents")
///     .field("tenant", "acme")
///     .cost(NonZeroU64::new(5).unwrap());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call<'a> {
    tool: &'a str,
    cost: Option<NonZeroU64>,
    fields: SmallVec<[(&'a str, &'a str); 2]>,
}

impl<'a> Call<'a> {
    /// A call of the tool of this name, without fields, at the cost that its limits give it.
    #[inline]
    #[must_use]
    pub const fn new(tool: &'a str) -> Self {
        Self {
            tool,
            cost: None,
            fields: SmallVec::new_const(),
        }
    }

    /// Sets the cost, in tokens, whatever its limits say a call costs.
    #[inline]
    #[must_use]
    pub fn cost(mut self, tokens: NonZeroU64) -> Self {
        self.cost = Some(tokens);
        self
    }

    /// Sets a field, for limits that are split [per](Limit::per) this field; others do not look at it.
    ///
    /// Any text is a value of its own, the empty one too. The field `tool` is the tool's name,
    /// whatever is set here.
    #[inline(always)]
    #[must_use]
    pub fn field(mut self, name: &'a str, value: &'a str) -> Self {
        match self.fields.iter_mut().find(|(known, _)| same(known, name)) {
            Some(known) => known.1 = value,
            None => self.fields.push((name, value)),
        }
        self
    }

    #[inline]
    pub(crate) fn tool(&self) -> &'a str {
        self.tool
    }

    #[inline]
    pub(crate) fn given_cost(&self) -> Option<u64> {
        self.cost.map(NonZeroU64::get)
    }

    #[cfg(feature = "trace")]
    pub(crate) fn fields(&self) -> &[(&'a str, &'a str)] {
        &self.fields
    }

    #[inline]
    pub(crate) fn value(&self, field: &str) -> Option<&'a str> {
        let mut fields = self.fields.iter();
        fields
            .find(|(name, _)| same(name, field))
            .map(|&(_, value)| value)
    }
}

/// Whether a call may run now.
#[derive(Debug)]
#[must_use = "a decision says whether the call may run"]
pub enum Decision<'a> {
    /// It may; its tokens are spent. It counts as running until the permit is dropped.
    Admitted(Permit<'a>),
    /// It may not; nothing was spent.
    Rejected(Rejection<'a>),
}

impl Decision<'_> {
    /// A tool without a limit.
    pub(crate) const UNRESTRICTED: Self = Self::Admitted(Permit {
        tool: None,
        fill: None,
        rest: None,
    });

    /// Whether the call may run.
    #[inline]
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        matches!(self, Self::Admitted(_))
    }

    /// Whether any limit held for the tool.
    #[inline]
    #[must_use]
    pub fn is_limited(&self) -> bool {
        match self {
            Self::Admitted(permit) => permit.fill.is_some(),
            Self::Rejected(_) => true,
        }
    }

    /// The number of the tool's name, where a limit names it exactly: see [`Limiter::names`](crate::Limiter::names).
    #[inline]
    #[must_use]
    pub fn tool_number(&self) -> Option<usize> {
        let number = match self {
            Self::Admitted(permit) => permit.tool,
            Self::Rejected(rejection) => rejection.tool,
        };
        number.map(|number| number as usize)
    }
}

/// What an admitted call was given.
///
/// Hold it while the call runs, where a limit says how many may [at the same time](Limit::max_concurrent):
/// whatever ends the call, dropping the permit lets the next one run.
pub struct Permit<'a> {
    pub(crate) tool: Option<Number>,
    pub(crate) fill: Option<Remaining>,
    /// Apart, since few have it.
    pub(crate) rest: Option<Box<Rest<'a>>>,
}

/// What few permits have.
#[derive(Debug, Default)]
pub(crate) struct Rest<'a> {
    pub(crate) overruled: Option<Rejection<'a>>,
    pub(crate) in_flight: Option<InFlight>,
}

/// Counts a call as running, under all its limits that say how many may, until it is dropped; and then its
/// line is written, where the limiter has a trace.
#[derive(Debug, Default)]
pub struct InFlight {
    #[expect(dead_code, reason = "held")]
    pub(crate) running: SmallVec<[Running; 1]>,
    pub(crate) traced: Option<Traced>,
}

impl<'a> Permit<'a> {
    #[inline]
    pub(crate) fn new(tool: Option<Number>, fill: Fill) -> Self {
        Self {
            tool,
            fill: Some(Remaining(fill)),
            rest: None,
        }
    }

    /// The whole tokens left after the call under the tightest of its limits; none where it has none.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.fill.map(|fill| fill.0.tokens())
    }

    /// What would have refused the call, had this not been a [dry run](crate::LimiterBuilder::dry_run).
    #[inline]
    #[must_use]
    pub fn overruled(&self) -> Option<&Rejection<'a>> {
        self.rest.as_deref()?.overruled.as_ref()
    }

    /// Ends a call that has failed: as dropping it does, but for the line in a trace, which says `"error"`.
    pub fn failed(self) {
        if let Some(traced) = self.in_flight().and_then(|mut call| call.traced.take()) {
            traced.failed();
        }
    }

    /// Whether it says more than that the call may run: what would have refused it, or that it counts as
    /// running or is traced.
    #[inline]
    #[must_use]
    pub fn is_special(&self) -> bool {
        self.rest.is_some()
    }

    /// What counts the call as running, where a limit says how many may or it is traced: to be held without
    /// the limiter.
    #[inline]
    #[must_use]
    pub fn in_flight(self) -> Option<InFlight> {
        self.rest?.in_flight
    }
}

impl fmt::Debug for Permit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("tool", &self.tool)
            .field("fill", &self.fill)
            .field("overruled", &self.overruled())
            .finish()
    }
}

/// Why a call was refused, and when to try again.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Rejection<'a> {
    /// Why.
    pub reason: Reason,
    /// Enough time to wait, if nobody else spends, and no more than callgate needs; never zero.
    /// None where no wait helps, and where nobody knows how long it would be.
    pub retry_after: Option<Duration>,
    pub(crate) names: &'a Names,
    pub(crate) number: Number,
    pub(crate) tool: Option<Number>,
    pub(crate) fill: Remaining,
    pub(crate) raises: bool,
}

impl<'a> Rejection<'a> {
    /// The name of the limit that refused the call: of several, the one that does so for the longest.
    #[inline]
    #[must_use]
    pub fn limit(&self) -> &'a str {
        &self.names[self.number as usize]
    }

    /// The whole tokens in the bucket, of several limits in the tightest.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.fill.0.tokens()
    }

    /// Whether the store failed and a limit asks for an exception then: see
    /// [`OnStoreError::Raise`](crate::OnStoreError::Raise).
    ///
    /// It is a rejection all the same: who does not look at this refuses the call.
    #[inline]
    #[must_use]
    pub fn raises(&self) -> bool {
        self.raises
    }

    /// The number of the limit's name: see [`Limiter::names`](crate::Limiter::names).
    #[inline]
    #[must_use]
    pub fn limit_number(&self) -> usize {
        self.number as usize
    }
}

impl fmt::Debug for Rejection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejection")
            .field("limit", &self.limit())
            .field("reason", &self.reason)
            .field("retry_after", &self.retry_after)
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// All names of limits and tools that a limiter had so far, by number.
pub(crate) type Names = boxcar::Vec<Box<str>>;

/// Of the name of a limit or a tool.
pub(crate) type Number = u32;

/// A bucket's fill, for those who ask how many tokens it is: telling takes a division.
#[derive(Clone, Copy)]
pub(crate) struct Remaining(pub(crate) Fill);

impl fmt::Debug for Remaining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.0.tokens())
    }
}

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The bucket holds too few tokens now.
    Rate,
    /// The call costs more than the bucket ever holds.
    Cost,
    /// The limit is [paused](crate::Limiter::pause).
    Paused,
    /// As many calls run as may at the same time: no time can be told.
    Concurrency,
    /// The store could not be asked, and no other way to decide [is allowed](crate::OnStoreError); of shared
    /// memory, a process that stopped has had it locked for 250 ms. The time to wait is that to the next attempt to
    /// reach the store, where it is known.
    Store,
}

impl Reason {
    /// Why a bucket refuses a call that is to wait so long; none for ever.
    #[inline]
    pub(crate) fn of(wait: Option<Duration>) -> Self {
        if wait.is_some() {
            Self::Rate
        } else {
            Self::Cost
        }
    }
}

/// A limit, and what its buckets hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Level<'a> {
    /// The limit's name; `[default]` for the one that holds for tools without another.
    pub name: &'a str,
    /// The limit.
    pub limit: Limit,
    /// The whole tokens in the bucket; none where fields split the limit, since each bucket has its own, or a
    /// store over a network does not tell.
    pub remaining: Option<u64>,
    /// How many buckets are not full, or were not when last looked at: 1 where nothing splits the limit. Of those in
    /// a store over a network, as many as this process knows of.
    pub buckets: usize,
    /// How long it is [paused](crate::Limiter::pause) from now on; of the default, the tool for which that is longest.
    pub paused: Option<Duration>,
}
