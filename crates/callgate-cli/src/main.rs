//! The command `callgate`.

use std::env;
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let code = callgate_cli::run(env::args_os(), &mut io::stdout(), &mut io::stderr());
    code.into()
}
