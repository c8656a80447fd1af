//! What the command prints. `SNAPSHOTS=overwrite cargo test -p callgate-cli` writes what it prints now
//! into the files beside the tests; read the difference before you keep it.
#![expect(clippy::needless_raw_string_hashes, reason = "so snapbox writes them")]

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::run;
use snapbox::{Data, assert_data_eq, str};

/// The files of limits in a folder of the tests, as the command is given them.
fn files(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(Path::new("tests").join(folder)).expect("the tests' folder");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.retain(|file| file.extension().is_some_and(|kind| kind == "toml"));
    files.sort();
    assert!(!files.is_empty());
    files
}

/// The text in the file beside a file of limits.
fn beside(file: &Path) -> Data {
    Data::read_from(&file.with_extension("txt"), None).raw()
}

#[test]
fn a_bad_file_is_refused_at_each_place_where_it_is_wrong() {
    for file in files("bad") {
        let (code, out, err) = run(&["check", file.to_str().expect("UTF-8")]);
        assert_eq!((code, &*out), (1, ""), "{}", file.display());
        assert_data_eq!(err, beside(&file));
    }
}

#[test]
fn a_good_file_is_shown_as_it_is_in_force() {
    for file in files("good") {
        let (code, out, err) = run(&["check", file.to_str().expect("UTF-8")]);
        assert_eq!((code, &*err), (0, ""), "{}", file.display());
        assert_data_eq!(out, beside(&file));
    }
}

/// R48: what no tool is called would limit nothing.
#[test]
fn limits_and_patterns_that_match_no_tool_are_warned_of() {
    let (code, out, err) = run(&[
        "check",
        "tests/good/typical.toml",
        "lookup_customer",
        "search_document",
    ]);
    assert_eq!(code, 0);
    let (_, tools) = out.split_once("\ntool").expect("a table of tools");
    assert_data_eq!(
        tools,
        str![[r#"
             limits
lookup_customer  lookup_customer, crm
search_document  [default]

"#]]
    );
    assert_data_eq!(
        err,
        str![[r#"
warning: 'crm_*' in the tools of limit 'crm' matches none of these tools
warning: limit 'search_documents' matches none of these tools

"#]]
    );
}

/// A limit of all tools leaves the default none, whatever they are called.
#[test]
fn a_default_that_holds_for_no_tool_is_warned_of() {
    let all = "[limits.all]\ntools = ['crm_*', '**']\nquota = '100/min'\n";
    let default = "[default]\nrate = '10/s'\nburst = 10\n";
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("all.toml");
    let warnings = |text: &str, tools: &[&str]| {
        fs::write(&path, text).expect("a writable folder");
        let args = [&["check", path.to_str().expect("UTF-8")], tools].concat();
        let (code, _, err) = run(&args);
        assert_eq!(code, 0, "{err}");
        err
    };
    assert_eq!(warnings(all, &["crm_find"]), "");
    assert_eq!(warnings(default, &[]), "");
    let both = format!("{default}{all}");
    for tools in [&[][..], &["crm_find"]] {
        assert_data_eq!(
            warnings(&both, tools),
            str![[r#"
warning: [default] holds for no tool: limit 'all' holds for all of them

"#]]
        );
    }
}

#[test]
fn a_default_that_holds_for_none_of_the_tools_is_warned_of() {
    let file = "tests/good/typical.toml";
    let tools = ["lookup_customer", "crm_find", "search_documents"];
    let (code, _, err) = run(&[&["check", file], &tools[..]].concat());
    assert_eq!(code, 0);
    assert_data_eq!(
        err,
        str![[r#"
warning: [default] holds for none of these tools

"#]]
    );
    let (_, _, err) = run(&[&["check", file, "send_mail"], &tools[..]].concat());
    assert_eq!(err, "");
}

#[test]
fn a_tool_that_nothing_limits_is_said_to_be_free() {
    let file = "tests/good/one_limit_in_dry_run.toml";
    let (code, out, err) = run(&["check", file, "search", "find"]);
    assert_eq!((code, &*err), (0, ""));
    assert!(
        out.ends_with("\ntool    limits\nsearch  search\nfind    none: not limited\n"),
        "{out}"
    );
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    for (file, why) in [
        ("tests/none.toml", "No such file or directory (os error 2)"),
        ("tests", "Is a directory (os error 21)"),
    ] {
        let (code, out, err) = run(&["check", file]);
        assert_eq!((code, &*out), (1, ""), "{file}");
        assert_eq!(
            err,
            format!("error: the file cannot be read: {why}\n--> {file}\n")
        );
    }
}

/// The example is the first block of TOML, and each block of a session shows what the command prints.
#[test]
fn the_page_about_the_file_shows_what_the_command_prints() {
    let page = fs::read_to_string("../../docs/file.md").expect("the page");
    let blocks = |kind: &str| -> Vec<String> {
        let opening = format!("\n```{kind}\n");
        let blocks = page
            .split(&opening)
            .skip(1)
            .filter_map(|block| block.split("\n```").next());
        blocks.map(str::to_owned).collect()
    };
    let misspelt = "[limits.search]\nrate = '300/min'\nbrust = 20\n";
    let files = [
        ("limits.toml", &*blocks("toml")[0]),
        ("misspelt.toml", misspelt),
    ];
    let recipe = &*blocks("toml")[1];
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recipe.toml");
    fs::write(&path, recipe).expect("a writable folder");
    let (code, _, err) = run(&["check", path.to_str().expect("UTF-8"), "any"]);
    assert_eq!((code, &*err), (0, ""), "{recipe}");

    let sessions = blocks("console");
    assert_eq!(sessions.len(), files.len());
    for ((name, text), session) in files.into_iter().zip(sessions) {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&path, text).expect("a writable folder");
        let path = path.to_str().expect("UTF-8");
        let (typed, printed) = session.split_once('\n').expect("a command and its output");
        let args: Vec<&str> = typed.split(' ').skip(2).collect();
        let args: Vec<&str> = args
            .iter()
            .map(|arg| if *arg == name { path } else { arg })
            .collect();
        let (_, out, err) = run(&args);
        assert_eq!((out + &err).replace(path, name), format!("{printed}\n"));
    }
}

#[test]
fn the_committed_schema_is_current() {
    let (code, out, err) = run(&["schema"]);
    assert_eq!((code, &*err), (0, ""));
    let committed = Path::new("../../docs/callgate.schema.json");
    assert_data_eq!(out, Data::read_from(committed, None).raw());
}

#[test]
fn help_says_what_each_command_does() {
    let (code, out, err) = run(&["--help"]);
    assert_eq!((code, &*err), (0, ""));
    assert_data_eq!(
        out,
        str![[r#"
Admission control for AI agents' tool calls

Usage: callgate <COMMAND>

Commands:
  check     Check a file of limits, and print the limits in force
  simulate  Run recorded calls under a file of limits, in simulated time
  top       Watch stores that processes share: what is admitted, rejected and waiting, and how full the buckets are
  store     Look into a store that processes share, or remove it
  schema    Print the JSON Schema of a file of limits
  help      Print this message or the help of the given subcommand(s)

Options:
  -h, --help     Print help
  -V, --version  Print version

"#]]
    );
    let (code, out, err) = run(&["check", "--help"]);
    assert_eq!((code, &*err), (0, ""));
    assert_data_eq!(
        out,
        str![[r#"
Check a file of limits, and print the limits in force.

Prints each limit, and the most tokens that one bucket of it admits in any second, minute, hour and day. With the names of TOOLs, prints which limits hold for each, and warns of limits and patterns that match none of them. Always warns of a default that is left no tool.

Exits with 0 if the file is good, and with 1 if it is not.

Usage: callgate check <FILE> [TOOL]...

Arguments:
  <FILE>
          The file, in TOML

  [TOOL]...
          The names of tools

Options:
  -h, --help
          Print help (see a summary with '-h')

"#]]
    );
    let version = run(&["--version"]);
    let expected = format!("callgate {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(version, (0, expected, String::new()));
}

#[test]
fn arguments_that_cannot_be_understood_end_with_2() {
    for (args, said) in [
        (&["check"][..], "<FILE>"),
        (&["chek", "limits.toml"], "unrecognized subcommand 'chek'"),
        (
            &["check", "--fast", "limits.toml"],
            "unexpected argument '--fast'",
        ),
        (&[], "Usage: callgate <COMMAND>"),
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, &*out), (2, ""), "{args:?}");
        assert!(err.contains(said), "{args:?}: {err}");
    }
}

/// An end of a pipe, or a disk, that takes nothing.
struct Refusing(ErrorKind);

impl Write for Refusing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

#[test]
fn a_closed_pipe_is_no_fault_and_a_full_disk_is() {
    let args = ["callgate", "schema"];
    let mut err = Vec::new();
    let code = callgate_cli::run(args, &mut Refusing(ErrorKind::BrokenPipe), &mut err);
    assert_eq!((code, &*err), (0, &b""[..]));

    let code = callgate_cli::run(args, &mut Refusing(ErrorKind::StorageFull), &mut err);
    assert_eq!(code, 1);
    assert!(err.starts_with(b"error: the output cannot be written: "));

    // What is wrong with a file is told by the exit code even where nobody listens.
    let args = ["callgate", "check", "tests/bad/empty.toml"];
    let closed = || Refusing(ErrorKind::BrokenPipe);
    assert_eq!(callgate_cli::run(args, &mut closed(), &mut closed()), 1);
}

fn binary(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_callgate"));
    command.args(args).output().expect("the binary runs")
}

#[test]
fn the_binary_says_the_same_without_color() {
    for args in [
        &["check", "tests/good/typical.toml", "lookup_customer"][..],
        &["check", "tests/bad/rates.toml"],
        &["schema"],
        &["--help"],
        &["nothing"],
    ] {
        let (code, out, err) = run(args);
        let said = binary(args);
        assert_eq!(said.status.code(), Some(code.into()), "{args:?}");
        assert_eq!(String::from_utf8_lossy(&said.stdout), out, "{args:?}");
        assert_eq!(String::from_utf8_lossy(&said.stderr), err, "{args:?}");
        assert!(
            !out.contains('\u{1b}') && !err.contains('\u{1b}'),
            "{args:?}"
        );
    }
}

#[test]
fn the_binary_outlives_the_reader_of_its_pipe() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_callgate"));
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    let command = command.arg("schema").stdout(writer).stderr(Stdio::piped());
    let said = command.output().expect("the binary runs");
    assert_eq!(said.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&said.stderr), "");
}
