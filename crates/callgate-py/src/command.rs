//! The command `callgate`, for the package's script.

use std::ffi::OsString;
use std::io;

use pyo3::prelude::*;

/// Runs the command `callgate` with these arguments, the first of which is its name.
///
/// It writes to the process's own standard output and error; the interpreter goes on meanwhile.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> u8 {
    py.detach(|| callgate_cli::run(argv, &mut io::stdout(), &mut io::stderr()))
}
