//! The lines of a trace, and what they say.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::ops::Range;

use csv_core::ReadRecordResult;
use jiff::Timestamp;
use memchr::memchr;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::trace::{Batch, Row};

/// The longest line, in bytes.
const LONGEST: usize = 64 << 10;

/// So many bytes are read at once; less what is left of a line.
const BUFFER: usize = 256 << 10;

/// Some write it before the first line of UTF-8.
const MARK: &[u8] = "\u{feff}".as_bytes();

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

/// Lines that are no longer than they may be, where they were read to.
pub(crate) struct Lines<R> {
    reader: R,
    buffer: Box<[u8]>,
    /// What was read into it beyond the last line.
    rest: Range<usize>,
    line: Range<usize>,
    number: u64,
    bytes: u64,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self {
            reader,
            buffer: vec![0; BUFFER].into(),
            rest: 0..0,
            line: 0..0,
            number: 0,
            bytes: 0,
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
        while let Some(length) = self.find_end()? {
            let line = self.take(length);
            self.number += 1;
            if length > LONGEST {
                self.skip_from(line)?;
                return Ok(Some(Err("longer than 64 KiB".into())));
            }
            let is_marked = self.number == 1 && self.buffer[line.clone()].starts_with(MARK);
            self.line = line.start + if is_marked { MARK.len() } else { 0 }..line.end;
            if !self.buffer[self.line.clone()].trim_ascii().is_empty() {
                return Ok(Some(Ok(&self.buffer[self.line.clone()])));
            }
        }
        Ok(None)
    }

    /// Has the next line be the last one again.
    fn give_back(&mut self) {
        self.rest.start = self.line.start;
        self.bytes -= self.line.len() as u64;
        self.number -= 1;
    }

    /// Finds the end of the next line: how long it is, or so much of it that it is too long.
    fn find_end(&mut self) -> io::Result<Option<usize>> {
        let mut searched = 0;
        loop {
            let rest = &self.buffer[self.rest.clone()];
            if let Some(place) = memchr(b'\n', &rest[searched..]) {
                return Ok(Some(searched + place + 1));
            }
            searched = rest.len();
            if searched > LONGEST {
                return Ok(Some(searched));
            }
            if self.fill()? == 0 {
                if searched == 0 {
                    return Ok(None);
                }
                // The last line has an end too.
                self.buffer[self.rest.end] = b'\n';
                self.rest.end += 1;
            }
        }
    }

    fn take(&mut self, length: usize) -> Range<usize> {
        let start = self.rest.start;
        self.rest.start += length;
        self.bytes += length as u64;
        start..self.rest.start
    }

    /// Leaves out what comes of a line after its start.
    fn skip_from(&mut self, mut line: Range<usize>) -> io::Result<()> {
        while !self.buffer[line].ends_with(b"\n")
            && let Some(length) = self.find_end()?
        {
            line = self.take(length);
        }
        Ok(())
    }

    /// Reads on, where there is room since no line is too long; how many bytes there were.
    fn fill(&mut self) -> io::Result<usize> {
        self.buffer.copy_within(self.rest.clone(), 0);
        self.rest = 0..self.rest.len();
        loop {
            match self.reader.read(&mut self.buffer[self.rest.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    self.rest.end += read;
                    return Ok(read);
                }
            }
        }
    }
}

/// How the lines are written.
pub(crate) enum Parser {
    Csv(Box<Csv>),
    Json,
}

impl Parser {
    /// Knows JSON lines by the name's ending or the first character; CSV has a line that names its columns.
    pub(crate) fn new<R: Read>(
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
        tool: impl FnMut(&[u8]) -> Result<u32, String>,
    ) -> Result<bool, String> {
        match self {
            Self::Csv(csv) => csv.read(line, batch, tool),
            Self::Json => read_json(line, batch, fields, tool),
        }
    }
}

pub(crate) struct Csv {
    columns: Columns,
    splitter: Splitter,
}

/// Splits lines into fields.
struct Splitter {
    reader: csv_core::Reader,
    /// What is unescaped, and where its fields end.
    text: Vec<u8>,
    ends: Vec<usize>,
    /// Where fields start and end, in the line or in the text.
    places: Vec<(usize, usize)>,
}

/// Which column holds what.
#[derive(Default)]
struct Columns {
    count: usize,
    time: usize,
    tool: usize,
    cost: Option<usize>,
    duration: Option<usize>,
    /// In the order in which limits look at them.
    fields: Box<[Option<usize>]>,
}

/// The fields of a line.
#[derive(Clone, Copy)]
struct Record<'a> {
    text: &'a [u8],
    places: &'a [(usize, usize)],
}

impl<'a> Record<'a> {
    fn field(self, column: usize) -> &'a [u8] {
        let (start, end) = self.places[column];
        &self.text[start..end]
    }

    /// What there is in a column that may be missing or left empty.
    fn given(self, column: Option<usize>) -> Option<&'a [u8]> {
        let field = column.map(|column| self.field(column));
        field.filter(|field| !field.is_empty())
    }
}

impl Columns {
    fn new(header: Record<'_>, fields: &[String]) -> Result<Self, String> {
        let (mut time, mut tool) = (None, None);
        let mut columns = Self {
            count: header.places.len(),
            fields: vec![None; fields.len()].into(),
            ..Self::default()
        };
        for column in 0..columns.count {
            let name = header.field(column).trim_ascii();
            let place = match name {
                b"time" => &mut time,
                b"tool" => &mut tool,
                b"cost" => &mut columns.cost,
                b"duration" => &mut columns.duration,
                b"waited" | b"outcome" => continue,
                other => {
                    let mut fields = fields.iter();
                    match fields.position(|field| field.as_bytes() == other) {
                        Some(field) => &mut columns.fields[field],
                        None => continue,
                    }
                }
            };
            if place.replace(column).is_some() {
                let name = String::from_utf8_lossy(name);
                return Err(format!("the column '{name}' is there twice"));
            }
        }
        let needed = |column: Option<usize>, name| {
            column.ok_or_else(|| {
                let line = shortened(header.text);
                format!(
                    "the first line names the columns, and must have '{name}' among them: {line}"
                )
            })
        };
        columns.time = needed(time, "time")?;
        columns.tool = needed(tool, "tool")?;
        Ok(columns)
    }
}

impl Splitter {
    fn new() -> Self {
        Self {
            reader: csv_core::Reader::new(),
            text: Vec::new(),
            ends: vec![0; 64],
            places: Vec::new(),
        }
    }

    fn split<'l>(&'l mut self, line: &'l [u8]) -> Result<Record<'l>, String> {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        self.places.clear();
        let mut start = 0;
        let (eights, rest) = text.as_chunks();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for (index, &eight) in eights.iter().chain([&last]).enumerate() {
            if equal(eight, b'"') | equal(eight, b'\r') != 0 {
                return self.unescape(line);
            }
            let mut commas = equal(eight, b',');
            while commas != 0 {
                let place = 8 * index + commas.trailing_zeros() as usize / 8;
                self.places.push((start, place));
                start = place + 1;
                commas &= commas - 1;
            }
        }
        self.places.push((start, text.len()));
        Ok(Record {
            text,
            places: &self.places,
        })
    }

    /// Splits a line that has more in it than fields and commas.
    fn unescape(&mut self, line: &[u8]) -> Result<Record<'_>, String> {
        self.reader.reset();
        // What is unescaped is never longer.
        self.text.resize(self.text.len().max(line.len()), 0);
        let fields = loop {
            let (result, read, _, fields) =
                self.reader
                    .read_record(line, &mut self.text, &mut self.ends);
            match result {
                ReadRecordResult::Record if line[read..].trim_ascii().is_empty() => break fields,
                ReadRecordResult::OutputEndsFull => {
                    self.ends.resize(self.ends.len() * 2, 0);
                    self.reader.reset();
                }
                _ => return Err("a quoted field does not end on its line".into()),
            }
        };
        self.places.clear();
        let mut start = 0;
        for &end in &self.ends[..fields] {
            self.places.push((start, end));
            start = end;
        }
        Ok(Record {
            text: &self.text,
            places: &self.places,
        })
    }
}

impl Csv {
    fn new(header: &[u8], fields: &[String]) -> Result<Self, String> {
        let mut splitter = Splitter::new();
        let columns = Columns::new(splitter.split(header)?, fields)?;
        Ok(Self { columns, splitter })
    }

    fn read(
        &mut self,
        line: &[u8],
        batch: &mut Batch,
        mut tool: impl FnMut(&[u8]) -> Result<u32, String>,
    ) -> Result<bool, String> {
        let Self { columns, splitter } = self;
        let record = splitter.split(line)?;
        let (count, named) = (record.places.len(), columns.count);
        if count != named {
            return Err(format!(
                "{count} fields, where the first line names {named}"
            ));
        }
        let duration = record.given(columns.duration);
        let row = Row {
            time: time(record.field(columns.time))?,
            tool: tool(record.field(columns.tool))?,
            cost: record.given(columns.cost).map(cost).transpose()?,
            duration: duration.map_or(Ok(0), |text| seconds("duration", text))?,
            cells: 0,
        };
        let mut draft = batch.open(columns.fields.len());
        for (field, &column) in columns.fields.iter().enumerate() {
            if let Some(value) = record.given(column) {
                draft.set(field, utf8(value)?);
            }
        }
        draft.push(row);
        Ok(duration.is_some())
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
    mut tool: impl FnMut(&[u8]) -> Result<u32, String>,
) -> Result<bool, String> {
    let line: Line<'_> = serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
        // There is only one line.
        let error = error.to_string();
        error.replace(" at line 1 column", ", at byte")
    })?;
    let quoted: Result<Text<'_>, _> = serde_json::from_str(line.time.get());
    let row = Row {
        time: match &quoted {
            Ok(Text(text)) => time(text.as_bytes())?,
            Err(_) => time(bytes(line.time))?,
        },
        tool: tool(line.tool.as_bytes())?,
        cost: line.cost.map(|text| cost(bytes(text))).transpose()?,
        duration: line
            .duration
            .map_or(Ok(0), |text| seconds("duration", bytes(text)))?,
        cells: 0,
    };
    let mut draft = batch.open(fields.len());
    for (Text(name), Text(value)) in &line.fields.0 {
        if let Some(field) = fields.iter().position(|field| field == name) {
            draft.set(field, value);
        }
    }
    draft.push(row);
    Ok(line.duration.is_some())
}

fn bytes(text: &RawValue) -> &[u8] {
    text.get().as_bytes()
}

pub(super) fn utf8(text: &[u8]) -> Result<&str, String> {
    str::from_utf8(text).map_err(|_| "not UTF-8".into())
}

fn cost(text: &[u8]) -> Result<NonZeroU64, String> {
    let cost = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    cost.ok_or_else(|| {
        let text = shortened(text);
        format!("cost must be a whole number of at least 1, not {text}")
    })
}

/// Seconds since the Unix epoch, or a date and time of RFC 3339, in nanoseconds.
fn time(text: &[u8]) -> Result<u64, String> {
    let nanos = decimal(text).or_else(|| date(text));
    nanos.map_or_else(|| seconds("time", text), Ok)
}

fn date(text: &[u8]) -> Option<u64> {
    let text = str::from_utf8(text)
        .ok()
        .filter(|text| text.contains('-'))?;
    let date: Timestamp = text.parse().ok()?;
    let nanos = u64::try_from(date.as_nanosecond()).ok()?;
    (nanos <= LAST).then_some(nanos)
}

/// A decimal with up to 9 digits after the point, in nanoseconds.
fn seconds(name: &str, text: &[u8]) -> Result<u64, String> {
    decimal(text).ok_or_else(|| {
        let text = shortened(text);
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
    let (eights, rest) = digits.as_chunks();
    let mut number = 0;
    for &eight in eights {
        number = number * TENS[8] + of_eight(eight)?;
    }
    for digit in rest {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number = number * 10 + u64::from(digit);
    }
    Some(number)
}

/// The upper bit of each of eight bytes that is this one, all at once (H. S. Warren, "Hacker's Delight", 2002, 6-1).
fn equal(eight: [u8; 8], byte: u8) -> u64 {
    const LOWER: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let other = u64::from_le_bytes(eight) ^ u64::from_le_bytes([byte; 8]);
    !((other & LOWER).wrapping_add(LOWER) | other | LOWER)
}

/// The number of eight digits, all at once (D. Lemire, "Quickly parsing eight digits", 2018).
fn of_eight(digits: [u8; 8]) -> Option<u64> {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let ones = u64::from_le_bytes(digits) ^ (EACH * 0x30);
    // What is above 9 has an upper half, or gets one from 6 more.
    if (ones | ones.wrapping_add(EACH * 6)) & (EACH * 0xf0) != 0 {
        return None;
    }
    // The first digit is in the lowest byte.
    let pairs = (ones * 10 + (ones >> 8)) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs * 100 + (pairs >> 16)) & 0x0000_ffff_0000_ffff;
    Some((fours * 10_000 + (fours >> 32)) & 0xffff_ffff)
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn lines_are_split_at_every_comma(fields in proptest::collection::vec("[a-c,+-]{0,12}", 1..8)) {
            let line = fields.join(",");
            let mut splitter = Splitter::new();
            let record = splitter.split(line.as_bytes()).expect("no quotes");
            let split: Vec<_> = (0..record.places.len()).map(|place| record.field(place)).collect();
            prop_assert_eq!(split, line.as_bytes().split(|&byte| byte == b',').collect::<Vec<_>>());
        }

        #[test]
        fn a_quote_anywhere_is_seen(before in "[a,]{0,20}", after in "[a,]{0,20}") {
            let line = format!("{before},\"{after}\",\"\"\n");
            let mut splitter = Splitter::new();
            let record = splitter.split(line.as_bytes()).expect("closed quotes");
            prop_assert_eq!(record.places.len(), before.split(',').count() + 2);
            prop_assert_eq!(record.field(record.places.len() - 2), after.as_bytes());
        }
    }

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
            assert_eq!(time(text.as_bytes()).ok(), nanos, "{text}");
        }
    }
}
