//! The file: whole lines at its end, and a new one when it is large.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Error, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use same_file::Handle;

/// Appends lines. It holds nothing in between: others may write there too, and take the file away.
pub(super) struct Appender {
    path: PathBuf,
    rotate_at: u64,
    keep: u32,
}

impl Appender {
    pub(super) fn new(path: PathBuf, rotate_at: u64, keep: u32) -> Self {
        Self {
            path,
            rotate_at,
            keep,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Finds out whether it can append: not to a file that is none of a trace.
    pub(super) fn check(&self) -> io::Result<()> {
        let file = self.open()?;
        // Where somebody else writes there, they have looked.
        if file.try_lock().is_ok() {
            let checked = is_trace(&file).and_then(|()| cut_torn(&file));
            file.unlock()?;
            checked?;
        }
        Ok(())
    }

    /// Opens the file; makes it, where there is none.
    fn open(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .append(true)
            .create(true)
            .open(&self.path)?;
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(Error::new(ErrorKind::InvalidInput, "it is no plain file"))
        }
    }

    /// Adds whole lines, all or none of them.
    pub(super) fn append(&self, lines: &[u8]) -> io::Result<()> {
        loop {
            let handle = self.open_locked()?;
            let added = self.add(handle.as_file(), lines);
            // A child that was forked meanwhile has the file open too: to close it here would leave it locked.
            handle.as_file().unlock()?;
            if added? {
                return Ok(());
            }
        }
    }

    /// The file that is there when it is locked: not one that another process has just rotated.
    fn open_locked(&self) -> io::Result<Handle> {
        loop {
            let handle = Handle::from_file(self.open()?)?;
            handle.as_file().lock()?;
            if Handle::from_path(&self.path).is_ok_and(|there| there == handle) {
                return Ok(handle);
            }
        }
    }

    /// Adds lines to a locked file; false where it was too large for them, and has been rotated.
    fn add(&self, file: &File, lines: &[u8]) -> io::Result<bool> {
        let length = cut_torn(file)?;
        if length > 0 && length + lines.len() as u64 > self.rotate_at {
            self.rotate()?;
            return Ok(false);
        }
        write_whole(file, lines)?;
        Ok(true)
    }

    /// Gives each file the next number; the last one goes.
    fn rotate(&self) -> io::Result<()> {
        for number in (1..self.keep).rev() {
            match fs::rename(self.numbered(number), self.numbered(number + 1)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, self.numbered(1))
    }

    fn numbered(&self, number: u32) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{number}"));
        path.into()
    }
}

/// Writes all of it to the end of a locked file, or nothing.
fn write_whole(mut file: &File, lines: &[u8]) -> io::Result<()> {
    let length = file.metadata()?.len();
    file.write_all(lines).inspect_err(|_| {
        // Where this fails too, whoever writes next finds the torn line.
        let _cut = file.set_len(length);
    })
}

/// How each line starts.
const START: &[u8] = b"{\"time\":";

/// Refuses a file that starts as no trace does: somebody else's, by its name.
fn is_trace(mut file: &File) -> io::Result<()> {
    let mut start = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(START.len() as u64).read_to_end(&mut start)?;
    if START.starts_with(&start) {
        Ok(())
    } else {
        Err(Error::new(
            ErrorKind::InvalidData,
            "its first line is none of a trace",
        ))
    }
}

/// Takes away the end of a line whose writer was killed; returns how long the file is then.
fn cut_torn(mut file: &File) -> io::Result<u64> {
    const STEP: u64 = 4 << 10;
    let length = file.metadata()?.len();
    let (mut start, mut torn) = (length, Vec::new());
    while start > 0 {
        let end = start;
        start = if torn.is_empty() && end == length {
            end - 1
        } else {
            end.saturating_sub(STEP)
        };
        let mut part = vec![0; usize::try_from(end - start).unwrap_or_default()];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut part)?;
        let newline = part.iter().rposition(|&byte| byte == b'\n');
        part.extend_from_slice(&torn);
        torn = part.split_off(newline.map_or(0, |at| at + 1));
        if newline.is_some() {
            break;
        }
    }
    if torn.is_empty() {
        return Ok(length);
    }
    if !torn.starts_with(&START[..START.len().min(torn.len())]) {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "its last line is none of a trace",
        ));
    }
    let whole = length - torn.len() as u64;
    file.set_len(whole)?;
    Ok(whole)
}
