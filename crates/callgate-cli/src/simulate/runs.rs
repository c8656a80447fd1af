//! Calls sorted on disk, for traces that are in no order at all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::num::NonZeroU64;

use super::trace::{Batch, Row};

/// Stands for a field that a call lacks.
const MISSING: u32 = u32::MAX;

/// Files of calls, each in order of time.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    files: Vec<File>,
    calls: u64,
}

impl Runs {
    /// What is sorted at once, in memory.
    pub(crate) const CALLS: usize = 1 << 20;
    pub(crate) const BYTES: usize = 128 << 20;

    /// Adds a run of calls, which come after all before where times are the same.
    pub(crate) fn add(&mut self, batch: &Batch, fields: usize) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 16, tempfile::tempfile()?);
        for row in &batch.rows {
            out.write_all(&row.time.to_le_bytes())?;
            out.write_all(&row.duration.to_le_bytes())?;
            out.write_all(&row.cost.map_or(0, NonZeroU64::get).to_le_bytes())?;
            out.write_all(&row.tool.to_le_bytes())?;
            for value in batch.values(row, fields).iter() {
                let length = value.map_or(MISSING, |value| {
                    u32::try_from(value.len()).unwrap_or(MISSING)
                });
                out.write_all(&length.to_le_bytes())?;
                out.write_all(value.unwrap_or_default().as_bytes())?;
            }
        }
        self.files.push(out.into_inner()?);
        self.calls += batch.rows.len() as u64;
        Ok(())
    }
}

/// Reads all runs as one.
pub(crate) struct Merge {
    runs: Vec<Run>,
    /// The time of each run's next call.
    heads: BinaryHeap<Reverse<(u64, usize)>>,
    /// The run whose call was given last.
    given: Option<usize>,
    calls: u64,
}

impl Merge {
    pub(crate) fn new(runs: &mut Runs, fields: usize) -> io::Result<Self> {
        let mut heads = BinaryHeap::new();
        let mut opened = Vec::new();
        for (index, file) in runs.files.iter_mut().enumerate() {
            file.rewind()?;
            let mut run = Run {
                file: BufReader::with_capacity(1 << 16, file.try_clone()?),
                head: Batch::default(),
                value: Vec::new(),
                fields,
            };
            heads.extend(run.advance()?.map(|time| Reverse((time, index))));
            opened.push(run);
        }
        Ok(Self {
            runs: opened,
            heads,
            given: None,
            calls: runs.calls,
        })
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    pub(crate) fn next(&mut self) -> io::Result<Option<(Row, &Batch)>> {
        if let Some(index) = self.given.take() {
            let next = self.runs[index].advance()?;
            self.heads.extend(next.map(|time| Reverse((time, index))));
        }
        let Some(Reverse((_, index))) = self.heads.pop() else {
            return Ok(None);
        };
        self.given = Some(index);
        let head = &self.runs[index].head;
        Ok(head.rows.first().map(|&row| (row, head)))
    }
}

/// One run, and its next call.
struct Run {
    file: BufReader<File>,
    head: Batch,
    value: Vec<u8>,
    fields: usize,
}

impl Run {
    /// Reads the next call; its time, or none at the end.
    fn advance(&mut self) -> io::Result<Option<u64>> {
        self.head.clear();
        let mut fixed = [0; 28];
        match self.file.read_exact(&mut fixed) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let long = |at: usize| {
            let bytes = fixed[at..].first_chunk().copied();
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let tool = fixed[24..].first_chunk().copied().unwrap_or_default();
        let mut draft = self.head.open(self.fields);
        for field in 0..self.fields {
            let mut length = [0; 4];
            self.file.read_exact(&mut length)?;
            let length = u32::from_le_bytes(length);
            if length == MISSING {
                continue;
            }
            self.value.resize(length as usize, 0);
            self.file.read_exact(&mut self.value)?;
            let value = str::from_utf8(&self.value);
            draft.set(field, value.map_err(|_| io::ErrorKind::InvalidData)?);
        }
        draft.push(Row {
            time: long(0),
            duration: long(8),
            cost: NonZeroU64::new(long(16)),
            tool: u32::from_le_bytes(tool),
            cells: 0,
        });
        Ok(Some(long(0)))
    }
}
