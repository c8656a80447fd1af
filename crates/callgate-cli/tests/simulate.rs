//! What `callgate simulate` prints. `SNAPSHOTS=overwrite cargo test -p callgate-cli` writes what it prints
//! now into the files beside the tests; read the difference before you keep it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use snapbox::{Data, assert_data_eq};

const LIMITS: &str = "tests/simulate/limits.toml";
const CSV: &str = "tests/simulate/calls.csv";
const JSON: &str = "tests/simulate/calls.jsonl";

/// The exit code, and what was written to the output and to the errors.
fn run(args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = ["callgate", "simulate"].iter().chain(args);
    let code = callgate_cli::run(args.copied(), &mut out, &mut err);
    let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    (code, out, err)
}

/// What is printed where all is well.
fn printed(args: &[&str]) -> String {
    let (code, out, err) = run(args);
    assert_eq!((code, &*err), (0, ""), "{args:?}");
    out
}

/// The text in a file beside the trace.
fn beside(name: &str) -> Data {
    Data::read_from(&Path::new("tests/simulate").join(name), None).raw()
}

/// A trace of this text.
fn trace(name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).expect("a writable folder");
    path
}

#[test]
fn calls_are_counted_by_limit_and_by_tool() {
    assert_data_eq!(printed(&[LIMITS, CSV]), beside("calls.txt"));
    assert_data_eq!(printed(&[LIMITS, CSV, "--json"]), beside("calls.json.txt"));
}

#[test]
fn json_lines_say_the_same_as_csv_and_so_does_the_standard_input() {
    let csv = printed(&[LIMITS, CSV]);
    assert_eq!(
        printed(&[LIMITS, JSON]).replace("calls.jsonl", "calls.csv"),
        csv
    );
    for file in [CSV, JSON] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_callgate"));
        command.args(["simulate", LIMITS, "-"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut command = command.spawn().expect("the binary runs");
        let mut input = command.stdin.take().expect("a pipe");
        input
            .write_all(&fs::read(file).expect("a trace"))
            .expect("it is read");
        drop(input);
        let said = command.wait_with_output().expect("the binary ends");
        let said = String::from_utf8(said.stdout).expect("UTF-8");
        assert_eq!(said, csv.replacen(CSV, "-", 1));
    }
}
