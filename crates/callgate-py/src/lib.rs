//! The extension module `callgate._callgate`.
use pyo3::prelude::*;

#[pymodule]
mod _callgate {}
