//! A bar, where a person looks and has to wait.

use std::fs::File;
use std::io::{IsTerminal, stderr};
#[cfg(target_os = "linux")]
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use indicatif::{ProgressBar, ProgressStyle};
#[cfg(target_os = "linux")]
use signal_hook::{SigId, consts::SIGINT, flag, low_level};

/// Less than so many bytes are read before anybody wonders.
const LONG: u64 = 32 << 20;

/// How often the bar moves, in calls, where they come one by one.
const STEP: u64 = 8_192;

#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    passes: u64,
    calls: u64,
    #[cfg(target_os = "linux")]
    interrupt: Interrupt,
}

/// Notes Ctrl-C, so that the bar can be taken away first.
#[cfg(target_os = "linux")]
#[derive(Debug, Default)]
struct Interrupt {
    came: Arc<AtomicBool>,
    handler: Option<SigId>,
}

#[cfg(target_os = "linux")]
impl Interrupt {
    fn noted() -> Self {
        let came = Arc::default();
        let handler = flag::register(SIGINT, Arc::clone(&came)).ok();
        Self { came, handler }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Interrupt {
    fn drop(&mut self) {
        self.handler.map(low_level::unregister);
    }
}

impl Progress {
    pub(crate) fn new(file: &File) -> Self {
        let is_long = file.metadata().is_ok_and(|file| file.len() >= LONG);
        let bar = if is_long && stderr().is_terminal() {
            let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}% {eta} left");
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        } else {
            ProgressBar::hidden()
        };
        Self {
            #[cfg(target_os = "linux")]
            interrupt: if bar.is_hidden() {
                Interrupt::default()
            } else {
                Interrupt::noted()
            },
            bar,
            passes: 0,
            calls: 0,
        }
    }

    /// Starts to read from the beginning.
    pub(crate) fn start(&mut self, length: u64) {
        self.passes += 1;
        self.calls = 0;
        // Each of these may draw the bar: its text comes first.
        self.bar.set_message(format!("pass {}", self.passes));
        self.bar.set_length(length);
        self.bar.reset();
    }

    pub(crate) fn reached(&self, position: u64) {
        #[cfg(target_os = "linux")]
        if self.interrupt.came.load(Ordering::Relaxed) {
            self.bar.finish_and_clear();
            // Ends the process as Ctrl-C does where nobody notes it.
            let _ = low_level::emulate_default_handler(SIGINT);
        }
        self.bar.set_position(position);
    }

    pub(crate) fn one(&mut self) {
        self.calls += 1;
        if self.calls.is_multiple_of(STEP) {
            self.reached(self.calls);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
