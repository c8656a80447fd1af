//! A call under several limits, all charged or none.

use callgate::{Call, Limit, Limiter};

use crate::measure::Case;
use crate::peers::{self, Rate, Row};

const TOOL: &str = "lookup_customer";
const NAMES: [&str; 3] = ["one", "two", "three"];

pub(crate) const ONE: &str = "one limit";
pub(crate) const TWO: &str = "two limits";
pub(crate) const TWO_LATER: &str = "two limits, of which the second refuses";
pub(crate) const THREE: &str = "three limits";

/// Calls that all limits admit.
pub(crate) fn admitting(rate: Rate, burst: u32) -> Vec<Row> {
    let case = |limits| {
        Case::new(limiter(&vec![rate.limit(burst); limits]), |limiter, _| {
            limiter.try_acquire(&Call::new(TOOL)).is_admitted()
        })
    };
    vec![
        peers::clock(),
        (ONE, case(1)),
        (TWO, case(2)),
        (THREE, case(3)),
    ]
}

/// Calls that all limits refuse, or one.
pub(crate) fn refusing(rate: Rate, plenty: u32) -> Vec<Row> {
    let case = |limits: &[Limit]| {
        Case::new(limiter(limits), |limiter, _| {
            peers::wait(&limiter.try_acquire(&Call::new(TOOL)))
        })
    };
    let empty = || rate.limit(1);
    let rows = vec![
        peers::clock(),
        (ONE, case(&[empty()])),
        (TWO, case(&[empty(), empty()])),
        (TWO_LATER, case(&[rate.limit(plenty), empty()])),
        (THREE, case(&[empty(), empty(), empty()])),
    ];
    for (_, case) in &rows {
        case.holds(); // takes the one token there is
    }
    rows
}

/// All of these limits hold for the tool.
fn limiter(limits: &[Limit]) -> Limiter {
    let named = NAMES.iter().zip(limits);
    let builder = named.fold(Limiter::builder(), |builder, (&name, limit)| {
        builder.limit(name, limit.clone().tools([TOOL]))
    });
    builder.build().expect("good limits")
}
