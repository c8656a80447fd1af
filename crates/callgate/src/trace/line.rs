//! What is kept of a call, and the line that is made of it.

use std::fmt;
use std::io::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use crate::Call;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outcome {
    Ok,
    Error,
    Cancelled,
    Rejected,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
            Self::Rejected => "rejected",
        }
    }
}

/// A call, from when it is asked for until its line is written.
#[derive(Debug)]
pub(super) struct Record {
    asked: Instant,
    waited: Duration,
    pub(super) admitted: Option<Instant>,
    duration: Option<Duration>,
    pub(super) outcome: Outcome,
    cost: Option<u64>,
    /// The tool's name, then the fields' names and values, in one piece of memory.
    texts: String,
    ends: SmallVec<[usize; 5]>,
}

impl Record {
    pub(super) fn new(call: &Call<'_>) -> Self {
        let texts = || {
            let fields = call.fields().iter();
            [call.tool()]
                .into_iter()
                .chain(fields.flat_map(|&(name, value)| [name, value]))
        };
        let mut record = Self {
            asked: Instant::now(),
            waited: Duration::ZERO,
            admitted: None,
            duration: None,
            outcome: Outcome::Cancelled,
            cost: call.given_cost(),
            texts: String::with_capacity(texts().map(str::len).sum()),
            ends: SmallVec::new(),
        };
        for text in texts() {
            record.texts.push_str(text);
            record.ends.push(record.texts.len());
        }
        record
    }

    pub(super) fn waited_until(&mut self, now: Instant) {
        self.waited = now.saturating_duration_since(self.asked);
    }

    pub(super) fn ended(&mut self, now: Instant) {
        if self.admitted.is_none() && self.outcome == Outcome::Cancelled {
            self.waited_until(now);
        }
        self.duration = self
            .admitted
            .map(|admitted| now.saturating_duration_since(admitted));
        if self.outcome == Outcome::Ok && thread::panicking() {
            self.outcome = Outcome::Error;
        }
    }

    /// About how many bytes it takes.
    pub(super) fn size(&self) -> usize {
        size_of::<Self>() + self.texts.len() + size_of::<usize>() * self.ends.len()
    }

    /// The tool's name, and what comes after it.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, &end)| &self.texts[start..end])
    }
}

/// How lines are written, and what time it was by two clocks when that began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) plain_fields: bool,
    pub(super) opened: Instant,
    /// Since 1970.
    pub(super) wall: Duration,
}

impl Form {
    /// Adds a record's line.
    pub(super) fn write(&self, record: &Record, lines: &mut Vec<u8>) {
        let time = self
            .wall
            .saturating_add(record.asked.saturating_duration_since(self.opened));
        let mut texts = record.texts();
        put(
            lines,
            format_args!("{{\"time\":{},\"tool\":", Seconds(time)),
        );
        json(lines, texts.next().unwrap_or_default());
        let mut before = ",\"fields\":{";
        while let (Some(name), Some(value)) = (texts.next(), texts.next()) {
            put(lines, format_args!("{before}"));
            json(lines, name);
            put(lines, format_args!(":"));
            if self.plain_fields {
                json(lines, value);
            } else {
                put(lines, format_args!("\"{}\"", Hash::of(value)));
            }
            before = ",";
        }
        if before == "," {
            put(lines, format_args!("}}"));
        }
        if let Some(cost) = record.cost {
            put(lines, format_args!(",\"cost\":{cost}"));
        }
        if !record.waited.is_zero() {
            put(
                lines,
                format_args!(",\"waited\":{}", Seconds(record.waited)),
            );
        }
        if let Some(duration) = record.duration {
            put(lines, format_args!(",\"duration\":{}", Seconds(duration)));
        }
        put(
            lines,
            format_args!(",\"outcome\":\"{}\"}}\n", record.outcome.name()),
        );
    }
}

fn put(lines: &mut Vec<u8>, text: fmt::Arguments<'_>) {
    let Ok(()) = lines.write_fmt(text) else {
        unreachable!("memory takes all")
    };
}

fn json(lines: &mut Vec<u8>, text: &str) {
    let Ok(()) = serde_json::to_writer(lines, text) else {
        unreachable!("a text is JSON, and memory takes all")
    };
}

/// A duration as a decimal number of seconds, to the nanosecond.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs())?;
        let (mut part, mut digits) = (self.0.subsec_nanos(), 9);
        if part == 0 {
            return Ok(());
        }
        while part % 10 == 0 {
            part /= 10;
            digits -= 1;
        }
        write!(f, ".{part:0digits$}")
    }
}

/// The first 16 hex digits of a text's SHA-256.
struct Hash([u8; 8]);

impl Hash {
    fn of(text: &str) -> Self {
        let all = Sha256::digest(text);
        let mut first = [0; 8];
        first.copy_from_slice(&all[..8]);
        Self(first)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    const OPENED: Duration = Duration::from_secs(1_764_489_600);

    /// The line of a call that is asked for so long after the trace was opened.
    fn line(call: &Call<'_>, after: Duration, change: impl FnOnce(&mut Record)) -> String {
        let mut record = Record::new(call);
        let form = Form {
            plain_fields: call.value("plain").is_some(),
            opened: record.asked,
            wall: OPENED,
        };
        record.asked += after;
        change(&mut record);
        let mut lines = b"before".to_vec();
        form.write(&record, &mut lines);
        let lines = String::from_utf8(lines).unwrap();
        lines.strip_prefix("before").unwrap().to_owned()
    }

    fn ran(waited: u64, duration: u64) -> impl FnOnce(&mut Record) {
        move |record| {
            let asked = record.asked;
            record.waited_until(asked + Duration::from_nanos(waited));
            let admitted = asked + Duration::from_nanos(waited);
            record.admitted = Some(admitted);
            record.outcome = Outcome::Ok;
            record.ended(admitted + Duration::from_nanos(duration));
        }
    }

    #[test]
    fn a_line_has_the_keys_in_order_and_the_values_to_the_nanosecond() {
        let call = Call::new("crm_search")
            .field("tenant", "test")
            .cost(NonZeroU64::new(3).unwrap());
        let after = Duration::from_nanos(123_456_789);
        assert_eq!(
            line(&call, after, ran(250_000_000, 32_104_000)),
            "{\"time\":1764489600.123456789,\"tool\":\"crm_search\",\"fields\":{\"tenant\":\"9f86d081884c7d65\"},\
             \"cost\":3,\"waited\":0.25,\"duration\":0.032104,\"outcome\":\"ok\"}\n"
        );
    }

    #[test]
    fn what_is_as_usual_is_left_out() {
        let call = Call::new("search");
        assert_eq!(
            line(&call, Duration::ZERO, ran(0, 1)),
            "{\"time\":1764489600,\"tool\":\"search\",\"duration\":0.000000001,\"outcome\":\"ok\"}\n"
        );
        assert_eq!(
            line(&call, Duration::from_secs(1), |record| {
                record.outcome = Outcome::Rejected;
                record.ended(record.asked);
            }),
            "{\"time\":1764489601,\"tool\":\"search\",\"outcome\":\"rejected\"}\n"
        );
    }

    #[test]
    fn a_call_that_is_given_up_while_it_waits_says_how_long_it_did() {
        let given_up = line(&Call::new("search"), Duration::ZERO, |record| {
            record.ended(record.asked + Duration::from_millis(1_500));
        });
        assert_eq!(
            given_up,
            "{\"time\":1764489600,\"tool\":\"search\",\"waited\":1.5,\"outcome\":\"cancelled\"}\n"
        );
    }

    #[test]
    fn names_and_plain_values_are_escaped() {
        let call = Call::new("a\"\\\n\u{1}\u{2028}é")
            .field("plain", "\t")
            .field("", "");
        let line = line(&call, Duration::ZERO, ran(0, 0));
        let said: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(said["tool"], "a\"\\\n\u{1}\u{2028}é");
        assert_eq!(said["fields"]["plain"], "\t");
        assert_eq!(said["fields"][""], "");
        assert_eq!(line.matches('\n').count(), 1);
    }
}
