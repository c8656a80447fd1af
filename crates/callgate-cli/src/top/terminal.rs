//! The terminal: taken over, given back whatever happens, and asked for keys.

use std::io::{self, IsTerminal, stdin, stdout};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use super::model::{Next, Top};
use super::screen;
use crate::stores::Store;

/// A signal that comes just before the wait for a key is seen after so long.
const PATIENCE: Duration = Duration::from_millis(250);

pub(crate) fn is_there() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

/// Shows the stores until somebody wants no more, and returns the exit code.
pub(crate) fn show(
    top: &mut Top,
    mut look: impl FnMut() -> Vec<Result<Store, String>>,
) -> io::Result<u8> {
    let signals = Signals::new()?;
    let _restored = Restored;
    // Where the terminal is gone, it would fail to say so, and panic.
    let mut terminal = ManuallyDrop::new(ratatui::try_init()?);
    let start = Instant::now();
    let mut due = start;
    loop {
        if !top.is_paused && Instant::now() >= due {
            top.look(start.elapsed(), look());
            due = Instant::now() + top.interval;
        }
        terminal.draw(|frame| screen::draw(frame, top))?;
        loop {
            if let Some(code) = signals.code() {
                return Ok(code);
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() && !top.is_paused {
                break;
            }
            let left = if top.is_paused {
                PATIENCE
            } else {
                left.min(PATIENCE)
            };
            match wait(left)? {
                Input::Nothing => {}
                Input::Closed => return Ok(code_of(SIGHUP)),
                Input::Keys => {
                    if obey(top)? == Next::Quit {
                        return Ok(0);
                    }
                    break;
                }
            }
        }
    }
}

/// Obeys what was pressed so far.
fn obey(top: &mut Top) -> io::Result<Next> {
    while event::poll(Duration::ZERO)? {
        if let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && top.press(key) == Next::Quit
        {
            return Ok(Next::Quit);
        }
    }
    Ok(Next::Show)
}

enum Input {
    Nothing,
    /// Keys, or another size.
    Keys,
    Closed,
}

/// Waits for input so long. Crossterm would look for keys forever where the terminal is gone, so it is not asked then.
fn wait(time: Duration) -> io::Result<Input> {
    let stdin = stdin();
    let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
    let time = Timespec::try_from(time).map_err(io::Error::other)?;
    match poll(&mut polled, Some(&time)) {
        Ok(_) => {}
        // A signal: perhaps that of another size.
        Err(Errno::INTR) => return Ok(Input::Keys),
        Err(error) => return Err(error.into()),
    }
    let seen = polled[0].revents();
    let closed = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    Ok(if seen.intersects(closed) {
        Input::Closed
    } else if seen.contains(PollFlags::IN) {
        Input::Keys
    } else {
        Input::Nothing
    })
}

/// Gives the terminal back. (Ratatui does so too where there is a panic, before it is told.)
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        // It may be gone.
        let _ = ratatui::try_restore();
        let _ = execute!(stdout(), Show);
    }
}

/// The signals that end the view; the second of them ends the process, whatever it does.
struct Signals(Arc<AtomicUsize>);

impl Signals {
    fn new() -> io::Result<Self> {
        let (seen, again) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register_conditional_default(signal, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            let number = usize::try_from(signal).unwrap_or(0);
            flag::register_usize(signal, Arc::clone(&seen), number)?;
        }
        Ok(Self(seen))
    }

    fn code(&self) -> Option<u8> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(code_of(i32::try_from(signal).unwrap_or(0))),
        }
    }
}

/// The exit code of a process that a signal ended, as shells say it.
fn code_of(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(0).saturating_add(128)
}
