//! The calls of a trace, in order of time.
//!
//! A line is written when its call has ended, so lines are nearly in order of time. They are sorted in a
//! window of so many; where that is not enough, in runs on disk. Either way memory does not grow with the
//! length of the trace.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::mem;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::lines::{Lines, Parser, utf8};
use super::progress::Progress;
use super::runs::{Merge, Runs};

/// A line may be out of its place by so many others before calls are sorted on disk.
const WINDOW: usize = 16_384;

/// So many are sorted at once: what stays for the next time is copied.
const SORTED: usize = 4 * WINDOW;

/// No more than so many bytes of fields are held in the window.
const WINDOW_BYTES: usize = 16 << 20;

/// A trace of more tools has something else in its column.
const MOST_TOOLS: usize = 10_000;

/// What a trace tells of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Nanoseconds since the Unix epoch.
    pub(crate) time: u64,
    pub(crate) duration: u64,
    pub(crate) cost: Option<NonZeroU64>,
    pub(crate) tool: u32,
    /// Where its fields are among the cells.
    pub(crate) cells: u32,
}

/// A field's place in the text; none where the call lacks it.
pub(crate) type Cell = Option<(u32, u32)>;

/// The values of those fields that limits look at, in their order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values<'a> {
    text: &'a str,
    cells: &'a [Cell],
}

impl<'a> Values<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = Option<&'a str>> {
        let text = self.text;
        let part = move |(start, end): (u32, u32)| &text[start as usize..end as usize];
        self.cells.iter().map(move |cell| cell.map(part))
    }
}

/// A call that comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    /// Nanoseconds since the first call.
    pub(crate) now: u64,
    pub(crate) tool: usize,
    pub(crate) cost: Option<NonZeroU64>,
    pub(crate) duration: u64,
    pub(crate) values: Values<'a>,
}

/// The names of tools, each with a number.
#[derive(Debug, Default)]
pub(crate) struct Tools {
    numbers: FxHashMap<Box<[u8]>, u32>,
    names: Vec<Box<str>>,
}

impl Tools {
    pub(crate) fn names(&self) -> &[Box<str>] {
        &self.names
    }

    fn number(&mut self, name: &[u8]) -> Result<u32, String> {
        if let Some(&number) = self.numbers.get(name) {
            return Ok(number);
        }
        if name.is_empty() {
            return Err("the tool must have a name".into());
        }
        let number = u32::try_from(self.names.len()).ok();
        let number = number.filter(|_| self.names.len() < MOST_TOOLS);
        let number = number.ok_or("the trace has more than 10,000 tools")?;
        self.names.push(utf8(name)?.into());
        self.numbers.insert(name.into(), number);
        Ok(number)
    }
}

/// Some calls, with room for more.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) rows: Vec<Row>,
    text: String,
    cells: Vec<Cell>,
}

impl Batch {
    /// Starts a call with so many fields, of which it has none yet. It is there when it is pushed.
    pub(crate) fn open(&mut self, fields: usize) -> Draft<'_> {
        let (text, cells) = (self.text.len(), self.cells.len());
        self.cells.resize(cells + fields, None);
        Draft {
            batch: self,
            text,
            cells,
        }
    }

    pub(crate) fn values(&self, row: &Row, fields: usize) -> Values<'_> {
        let start = row.cells as usize;
        Values {
            text: &self.text,
            cells: &self.cells[start..start + fields],
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.text.len() + self.cells.len() * size_of::<Cell>() + self.rows.len() * size_of::<Row>()
    }

    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.text.clear();
        self.cells.clear();
    }

    /// Sorts by time; calls of one time stay in their order.
    pub(crate) fn sort(&mut self) {
        self.rows.sort_by_key(|row| row.time);
    }

    fn copy(&mut self, from: &Self, row: &Row, fields: usize) {
        let mut draft = self.open(fields);
        for (field, value) in from.values(row, fields).iter().enumerate() {
            if let Some(value) = value {
                draft.set(field, value);
            }
        }
        draft.push(*row);
    }
}

/// A call that is being read. What is not pushed was never there.
pub(crate) struct Draft<'b> {
    batch: &'b mut Batch,
    text: usize,
    cells: usize,
}

impl Draft<'_> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a batch is far smaller than 4 GiB"
    )]
    pub(crate) fn set(&mut self, field: usize, value: &str) {
        let start = self.batch.text.len() as u32;
        self.batch.text.push_str(value);
        self.batch.cells[self.cells + field] = Some((start, self.batch.text.len() as u32));
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "a batch is far smaller than 4 GiB"
    )]
    pub(crate) fn push(self, row: Row) {
        let cells = self.cells as u32;
        self.batch.rows.push(Row { cells, ..row });
        mem::forget(self);
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        self.batch.text.truncate(self.text);
        self.batch.cells.truncate(self.cells);
    }
}

/// Whether the first line of a file is one of a trace.
pub(crate) fn looks_like_one(path: &Path) -> bool {
    const ENOUGH: u64 = 1 << 16;
    let mut line = Vec::new();
    // Something else than a file may never end, or have been read.
    let is_file = fs::metadata(path).is_ok_and(|found| found.is_file());
    if !is_file {
        return false;
    }
    let read = File::open(path).map(|file| {
        let mut file = BufReader::new(file.take(ENOUGH));
        file.read_until(b'\n', &mut line)
    });
    let line = String::from_utf8_lossy(&line);
    let columns: Vec<_> = line.split(',').map(str::trim).collect();
    let names_columns = columns.contains(&"time") && columns.contains(&"tool");
    read.is_ok() && (line.starts_with('{') || names_columns)
}

/// A trace, to be read as often as one likes.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) name: String,
    file: File,
    /// The fields that limits look at.
    fields: Arc<[String]>,
    skip_bad: bool,
    /// In order, where the window was too small.
    runs: Option<Runs>,
    progress: Progress,
    pub(crate) tools: Tools,
    pub(crate) skipped: Skipped,
    /// Whether any call says how long it ran.
    pub(crate) has_durations: bool,
}

/// The lines that were left out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skipped {
    pub(crate) lines: u64,
    pub(crate) first: Option<String>,
}

/// Why calls cannot be read on.
enum Stop {
    /// Another window is too small for.
    Unsorted,
    Error(String),
}

impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Error(error)
    }
}

impl Trace {
    /// Opens a file, or what comes on the standard input (`-`), which is kept in a file without a name.
    pub(crate) fn open(path: &Path, fields: Arc<[String]>, skip_bad: bool) -> Result<Self, String> {
        let is_input = path == Path::new("-");
        let name = if is_input {
            "the standard input".into()
        } else {
            path.to_string_lossy().escape_debug().to_string()
        };
        let file = if is_input { spooled() } else { regular(path) };
        let file = file.map_err(|error| format!("{name} cannot be read: {error}"))?;
        Ok(Self {
            progress: Progress::new(&file),
            name,
            file,
            fields,
            skip_bad,
            runs: None,
            tools: Tools::default(),
            skipped: Skipped::default(),
            has_durations: false,
        })
    }

    /// Gives `visit` all calls in order of time. What it starts with is made anew where it has to begin again.
    pub(crate) fn pass<S>(
        &mut self,
        start: impl Fn() -> Result<S, String>,
        mut visit: impl FnMut(&mut S, &Tools, &Arrival<'_>),
    ) -> Result<S, String> {
        if self.runs.is_none() {
            let mut state = start()?;
            match self.sorted_in_a_window(|tools, arrival| visit(&mut state, tools, arrival)) {
                Ok(()) => return Ok(state),
                Err(Stop::Error(error)) => return Err(error),
                Err(Stop::Unsorted) => self.runs = Some(self.sorted_on_disk()?),
            }
        }
        let mut state = start()?;
        let failed = |error| format!("the sorted calls cannot be read: {error}");
        if let Some(runs) = &mut self.runs {
            let mut merge = Merge::new(runs, self.fields.len()).map_err(failed)?;
            let mut first = None;
            self.progress.start(merge.calls());
            while let Some((row, batch)) = merge.next().map_err(failed)? {
                let first = *first.get_or_insert(row.time);
                let values = batch.values(&row, self.fields.len());
                visit(&mut state, &self.tools, &arrival(&row, first, values));
                self.progress.one();
            }
        }
        Ok(state)
    }

    fn sorted_in_a_window(
        &mut self,
        mut visit: impl FnMut(&Tools, &Arrival<'_>),
    ) -> Result<(), Stop> {
        let fields = self.fields.len();
        let mut lines = self.lines()?;
        let (mut batch, mut next) = (Batch::default(), Batch::default());
        let mut first = None;
        let mut last = 0;
        loop {
            let more = self.fill(&mut lines, &mut batch, SORTED, WINDOW_BYTES)?;
            batch.sort();
            let ready = if more {
                (batch.rows.len() - batch.rows.len() / 4).max(1)
            } else {
                batch.rows.len()
            };
            for row in &batch.rows[..ready] {
                if row.time < last {
                    return Err(Stop::Unsorted);
                }
                last = row.time;
                let first = *first.get_or_insert(row.time);
                let values = batch.values(row, fields);
                visit(&self.tools, &arrival(row, first, values));
            }
            if !more {
                return Ok(());
            }
            next.clear();
            for row in &batch.rows[ready..] {
                next.copy(&batch, row, fields);
            }
            mem::swap(&mut batch, &mut next);
        }
    }

    fn sorted_on_disk(&mut self) -> Result<Runs, String> {
        let failed = |error| format!("the calls cannot be sorted on disk: {error}");
        let mut lines = self.lines()?;
        let mut runs = Runs::default();
        let mut batch = Batch::default();
        loop {
            let more = self.fill(&mut lines, &mut batch, Runs::CALLS, Runs::BYTES)?;
            batch.sort();
            runs.add(&batch, self.fields.len()).map_err(failed)?;
            batch.clear();
            if !more {
                return Ok(runs);
            }
        }
    }

    /// The lines from the first.
    fn lines(&mut self) -> Result<(Lines<File>, Parser), String> {
        self.skipped = Skipped::default();
        let cannot = |error: io::Error| format!("{} cannot be read: {error}", self.name);
        let mut file = self.file.try_clone().map_err(cannot)?;
        file.rewind().map_err(cannot)?;
        let bytes = file.metadata().map_err(cannot)?.len();
        self.progress.start(bytes);
        let mut lines = Lines::new(file);
        let parser = Parser::new(&mut lines, &self.name, &self.fields);
        let parser = parser.map_err(|why| self.named(lines.number(), &why))?;
        Ok((lines, parser))
    }

    fn named(&self, line: u64, why: &str) -> String {
        format!("{}: line {line}: {why}", self.name)
    }

    /// Reads calls until there are so many, or so many bytes; whether there are more.
    fn fill(
        &mut self,
        (lines, parser): &mut (Lines<File>, Parser),
        batch: &mut Batch,
        calls: usize,
        bytes: usize,
    ) -> Result<bool, String> {
        while batch.rows.len() < calls && batch.bytes() < bytes {
            let line = match lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(false),
                Err(error) => return Err(format!("{} cannot be read: {error}", self.name)),
            };
            let tools = &mut self.tools;
            let mut read = |line| parser.read(line, batch, &self.fields, |name| tools.number(name));
            match line.and_then(&mut read) {
                Ok(has_duration) => self.has_durations |= has_duration,
                Err(why) => {
                    if !self.skip_bad {
                        return Err(self.named(lines.number(), &why));
                    }
                    self.skipped.lines += 1;
                    let first = &mut self.skipped.first;
                    first.get_or_insert_with(|| format!("line {}: {why}", lines.number()));
                }
            }
        }
        self.progress.reached(lines.bytes());
        Ok(true)
    }
}

fn arrival<'a>(row: &Row, first: u64, values: Values<'a>) -> Arrival<'a> {
    Arrival {
        now: row.time - first,
        tool: row.tool as usize,
        cost: row.cost,
        duration: row.duration,
        values,
    }
}

/// A file that can be read again. What cannot, such as a pipe with a name, is kept in one that can.
fn regular(path: &Path) -> io::Result<File> {
    let mut file = File::open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if kind.is_file() {
        Ok(file)
    } else {
        kept(&mut file)
    }
}

fn spooled() -> io::Result<File> {
    kept(&mut io::stdin().lock())
}

fn kept(from: &mut impl Read) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    io::copy(from, &mut file)?;
    Ok(file)
}
