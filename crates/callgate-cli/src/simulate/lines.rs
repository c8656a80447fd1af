//! The lines of a trace, and what they say.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::mem;
use std::num::NonZeroU64;

use csv_core::ReadRecordResult;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::trace::{Batch, Draft, Row};

/// The longest line, in bytes.
const LONGEST: u64 = 64 << 10;

/// A time in nanoseconds ends in the year 2262.
const LAST: u64 = i64::MAX as u64;

/// Powers of ten.
const TENS: [u64; 10] = {
    let mut tens = [1; 10];
    let mut place = 1;
    while place < tens.len() {
        tens[place] = tens[place - 1] * 10;
        place += 1;
    }
    tens
};

/// Lines that are no longer than they may be.
pub(crate) struct Lines<R> {
    reader: R,
    line: Vec<u8>,
    number: u64,
    bytes: u64,
    is_given_back: bool,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self {
            reader,
            line: Vec::new(),
            number: 0,
            bytes: 0,
            is_given_back: false,
        }
    }

    /// The number of the line that was read last, from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// So many bytes were read.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next line with anything in it, with its end; or what is wrong with it.
    pub(crate) fn next(&mut self) -> io::Result<Option<Result<&[u8], String>>> {
        while !mem::take(&mut self.is_given_back) {
            self.line.clear();
            let mut reader = (&mut self.reader).take(LONGEST + 1);
            let read = reader.read_until(b'\n', &mut self.line)? as u64;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.bytes += read;
            if read > LONGEST {
                if !self.line.ends_with(b"\n") {
                    self.bytes += self.reader.skip_until(b'\n')? as u64;
                }
                return Ok(Some(Err("longer than 64 KiB".into())));
            }
            if self.number == 1 && self.line.starts_with("\u{feff}".as_bytes()) {
                self.line.drain(..3);
            }
            if !self.line.ends_with(b"\n") {
                self.line.push(b'\n');
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        Ok(Some(Ok(&self.line)))
    }

    /// Has the next line be the last one again.
    fn give_back(&mut self) {
        self.is_given_back = true;
    }
}

/// How the lines are written.
pub(crate) enum Parser {
    Csv(Box<Csv>),
    Json,
}

impl Parser {
    /// Knows JSON lines by the name's ending or the first character; CSV has a line that names its columns.
    pub(crate) fn new<R: BufRead>(
        lines: &mut Lines<R>,
        name: &str,
        fields: &[String],
    ) -> Result<Self, String> {
        let read = lines.next();
        let line = read.map_err(|error| format!("cannot be read: {error}"))?;
        let Some(line) = line.transpose()? else {
            return Ok(Self::Json);
        };
        let ending = name.rsplit('.').next().unwrap_or_default();
        let is_json = match ending.to_ascii_lowercase().as_str() {
            "csv" => false,
            "jsonl" | "ndjson" | "json" => true,
            _ => line.trim_ascii_start().starts_with(b"{"),
        };
        if is_json {
            lines.give_back();
            return Ok(Self::Json);
        }
        Ok(Self::Csv(Box::new(Csv::new(line, fields)?)))
    }

    /// Adds the call of a line; whether it says how long it ran.
    pub(crate) fn read(
        &mut self,
        line: &[u8],
        batch: &mut Batch,
        fields: &[String],
        tool: impl FnMut(&str) -> Result<u32, String>,
    ) -> Result<bool, String> {
        match self {
            Self::Csv(csv) => csv.read(line, batch, fields.len(), tool),
            Self::Json => read_json(line, batch, fields, tool),
        }
    }
}

/// What a column holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Column {
    Time,
    Tool,
    Cost,
    Duration,
    Field(usize),
    Ignored,
}

pub(crate) struct Csv {
    reader: csv_core::Reader,
    columns: Vec<Column>,
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Csv {
    fn new(header: &[u8], fields: &[String]) -> Result<Self, String> {
        let mut csv = Self {
            reader: csv_core::Reader::new(),
            columns: Vec::new(),
            text: Vec::new(),
            ends: vec![0; 64],
        };
        let names = csv.split(header)?;
        let mut columns = Vec::with_capacity(names);
        for index in 0..names {
            let name = csv.text(index).trim_ascii();
            let column = match name {
                b"time" => Column::Time,
                b"tool" => Column::Tool,
                b"cost" => Column::Cost,
                b"duration" => Column::Duration,
                b"waited" | b"outcome" => Column::Ignored,
                other => {
                    let mut fields = fields.iter();
                    let field = fields.position(|field| field.as_bytes() == other);
                    field.map_or(Column::Ignored, Column::Field)
                }
            };
            if column != Column::Ignored && columns.contains(&column) {
                let name = String::from_utf8_lossy(name);
                return Err(format!("the column '{name}' is there twice"));
            }
            columns.push(column);
        }
        for (column, name) in [(Column::Time, "time"), (Column::Tool, "tool")] {
            if !columns.contains(&column) {
                return Err(format!(
                    "the first line names the columns, and must have '{name}' among them: {}",
                    shortened(header)
                ));
            }
        }
        csv.columns = columns;
        Ok(csv)
    }

    /// Splits a line; how many fields it has.
    fn split(&mut self, line: &[u8]) -> Result<usize, String> {
        self.reader.reset();
        // What is unescaped is never longer.
        self.text.resize(self.text.len().max(line.len()), 0);
        loop {
            let (result, read, _, fields) =
                self.reader
                    .read_record(line, &mut self.text, &mut self.ends);
            match result {
                ReadRecordResult::Record if line[read..].trim_ascii().is_empty() => {
                    return Ok(fields);
                }
                ReadRecordResult::OutputEndsFull => {
                    self.ends.resize(self.ends.len() * 2, 0);
                    self.reader.reset();
                }
                _ => return Err("a quoted field does not end on its line".into()),
            }
        }
    }

    fn text(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.text[start..self.ends[index]]
    }

    fn read(
        &mut self,
        line: &[u8],
        batch: &mut Batch,
        fields: usize,
        mut tool: impl FnMut(&str) -> Result<u32, String>,
    ) -> Result<bool, String> {
        let count = self.split(line)?;
        if count != self.columns.len() {
            let columns = self.columns.len();
            return Err(format!(
                "{count} fields, where the first line names {columns}"
            ));
        }
        let mut call = Reading::new(batch.open(fields));
        for (index, column) in self.columns.iter().enumerate() {
            let text = self.text(index);
            match column {
                Column::Ignored => {}
                Column::Time => call.time = Some(time(utf8(text)?)?),
                Column::Tool => call.tool = Some(named(utf8(text)?, &mut tool)?),
                _ if text.is_empty() => {}
                Column::Cost => call.cost = Some(cost(utf8(text)?)?),
                Column::Duration => call.duration = Some(seconds("duration", utf8(text)?)?),
                Column::Field(field) => call.draft.set(*field, utf8(text)?),
            }
        }
        call.push()
    }
}

/// A line of JSON, as it is written.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    time: &'a RawValue,
    #[serde(borrow)]
    tool: Cow<'a, str>,
    #[serde(borrow, default)]
    fields: Fields<'a>,
    cost: Option<&'a RawValue>,
    duration: Option<&'a RawValue>,
}

#[derive(Default)]
struct Fields<'a>(Vec<(Text<'a>, Text<'a>)>);

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields<'de>, M::Error> {
                let mut fields = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    fields.push(entry);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

fn read_json(
    line: &[u8],
    batch: &mut Batch,
    fields: &[String],
    mut tool: impl FnMut(&str) -> Result<u32, String>,
) -> Result<bool, String> {
    let line: Line<'_> = serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
        // There is only one line.
        let error = error.to_string();
        error.replace(" at line 1 column", ", at byte")
    })?;
    let mut call = Reading::new(batch.open(fields.len()));
    let quoted: Result<Text<'_>, _> = serde_json::from_str(line.time.get());
    call.time = Some(match &quoted {
        Ok(Text(text)) => time(text)?,
        Err(_) => time(line.time.get())?,
    });
    call.tool = Some(named(&line.tool, &mut tool)?);
    for (Text(name), Text(value)) in &line.fields.0 {
        if let Some(field) = fields.iter().position(|field| field == name) {
            call.draft.set(field, value);
        }
    }
    call.cost = line.cost.map(|text| cost(text.get())).transpose()?;
    let duration = line.duration.map(|text| seconds("duration", text.get()));
    call.duration = duration.transpose()?;
    call.push()
}

/// A call as far as it has been read.
struct Reading<'b> {
    draft: Draft<'b>,
    time: Option<u64>,
    tool: Option<u32>,
    cost: Option<NonZeroU64>,
    duration: Option<u64>,
}

impl<'b> Reading<'b> {
    fn new(draft: Draft<'b>) -> Self {
        Self {
            draft,
            time: None,
            tool: None,
            cost: None,
            duration: None,
        }
    }

    fn push(self) -> Result<bool, String> {
        let (Some(time), Some(tool)) = (self.time, self.tool) else {
            return Err("a call has a time and a tool".into());
        };
        self.draft.push(Row {
            time,
            duration: self.duration.unwrap_or(0),
            cost: self.cost,
            tool,
            cells: 0,
        });
        Ok(self.duration.is_some())
    }
}

fn utf8(text: &[u8]) -> Result<&str, String> {
    str::from_utf8(text).map_err(|_| "not UTF-8".into())
}

fn named(name: &str, tool: &mut impl FnMut(&str) -> Result<u32, String>) -> Result<u32, String> {
    if name.is_empty() {
        return Err("the tool must have a name".into());
    }
    tool(name)
}

fn cost(text: &str) -> Result<NonZeroU64, String> {
    let cost = text.parse().ok();
    cost.ok_or_else(|| {
        let text = shortened(text.as_bytes());
        format!("cost must be a whole number of at least 1, not {text}")
    })
}

/// Seconds since the Unix epoch, or a date and time of RFC 3339, in nanoseconds.
fn time(text: &str) -> Result<u64, String> {
    if text.contains('-') {
        let date: Option<Timestamp> = text.parse().ok();
        let nanos = date.and_then(|date| u64::try_from(date.as_nanosecond()).ok());
        if let Some(nanos) = nanos.filter(|&nanos| nanos <= LAST) {
            return Ok(nanos);
        }
    }
    seconds("time", text)
}

/// A decimal with up to 9 digits after the point, in nanoseconds.
fn seconds(name: &str, text: &str) -> Result<u64, String> {
    decimal(text.as_bytes()).ok_or_else(|| {
        let text = shortened(text.as_bytes());
        let allowed = match name {
            "time" => "seconds since 1970 or a date and time such as 2026-11-30T07:00:00.25Z",
            _ => "seconds",
        };
        format!("{name} must be {allowed}, with at most 9 digits after the point, not {text}")
    })
}

fn decimal(text: &[u8]) -> Option<u64> {
    let point = text.iter().position(|&byte| byte == b'.');
    let (whole, part) = point.map_or((text, &[][..]), |at| (&text[..at], &text[at + 1..]));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    let missing = 9_usize.checked_sub(part.len())?;
    let part = number(part)? * TENS[missing];
    let nanos = number(whole)?.checked_mul(TENS[9])?.checked_add(part)?;
    (nanos <= LAST).then_some(nanos)
}

fn number(digits: &[u8]) -> Option<u64> {
    // No longer number is in range, and none of this length is too large to be read.
    if digits.len() > 18 {
        return None;
    }
    digits.iter().try_fold(0, |number, digit| {
        let digit = digit.wrapping_sub(b'0');
        (digit < 10).then_some(number * 10 + u64::from(digit))
    })
}

/// The start of a text, as a message can hold it.
fn shortened(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let text = text.trim();
    let start: String = text.chars().take(40).collect();
    let rest = if start.len() < text.len() { "…" } else { "" };
    format!("'{}{rest}'", start.escape_debug())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_exactly() {
        for (text, nanos) in [
            ("1764489600.123456789", Some(1_764_489_600_123_456_789)),
            ("0.1", Some(100_000_000)),
            ("9223372036.854775807", Some(LAST)),
            ("2025-11-30T08:00:00.25Z", Some(1_764_489_600_250_000_000)),
            (
                "2025-11-30T09:00:00.25+01:00",
                Some(1_764_489_600_250_000_000),
            ),
            ("9223372036.854775808", None),
            ("1764489600.1234567891", None),
            ("1764489600123", None),
            ("1969-12-31T23:59:59Z", None),
            ("-1", None),
            ("1e3", None),
            (".", None),
            ("", None),
            ("1.2.3", None),
        ] {
            assert_eq!(time(text).ok(), nanos, "{text}");
        }
    }
}
