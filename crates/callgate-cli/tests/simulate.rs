//! What `callgate simulate` prints. `SNAPSHOTS=overwrite cargo test -p callgate-cli` writes what it prints
//! now into the files beside the tests; read the difference before you keep it.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use snapbox::{Data, assert_data_eq};

const LIMITS: &str = "tests/simulate/limits.toml";
const CSV: &str = "tests/simulate/calls.csv";
const JSON: &str = "tests/simulate/calls.jsonl";

/// The exit code, and what was written to the output and to the errors.
fn run(args: &[&str]) -> (u8, String, String) {
    common::run(&[&["simulate"], args].concat())
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

#[test]
fn a_service_and_the_least_that_rejects_nothing_are_told() {
    let args = [LIMITS, CSV, "--service", "3/s", "--fit"];
    assert_data_eq!(printed(&args), beside("fit.txt"));
    let json = printed(&[&args[..], &["--json"]].concat());
    assert_data_eq!(json, beside("fit.json.txt"));
}

#[test]
fn a_picture_shows_demand_admissions_and_level() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("calls.svg");
    let drawn = || {
        let text = printed(&[LIMITS, CSV, "--plot", path.to_str().expect("UTF-8")]);
        assert_eq!(text, printed(&[LIMITS, CSV]));
        fs::read_to_string(&path).expect("a picture")
    };
    let svg = drawn();
    assert_data_eq!(&svg, beside("calls.svg"));
    assert_eq!(svg, drawn());
}

/// The limits of the tests, or those of this text.
fn rejected(limits: &str, trace: &Path) -> u64 {
    let path = self::trace("fitted.toml", limits);
    let trace = trace.to_str().expect("UTF-8");
    let json = printed(&[path.to_str().expect("UTF-8"), trace, "--json"]);
    number_after(&json, "\"rejected\": ")
}

fn number_after(json: &str, key: &str) -> u64 {
    let (_, rest) = json.split_once(key).expect(key);
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a number")
}

/// Numbers that look random, the same each time.
fn noise(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// The next smaller number of three digits.
fn next_smaller(count: &str) -> String {
    let mut power = count
        .split_once('.')
        .map_or(0, |(_, places)| -i64::try_from(places.len()).expect("few"));
    let mut digits: u64 = count.replace('.', "").parse().expect("digits");
    while digits < 100 {
        (digits, power) = (digits * 10, power - 1);
    }
    while digits > 999 {
        assert_eq!(digits % 10, 0, "{count} has more than three digits");
        (digits, power) = (digits / 10, power + 1);
    }
    assert!(digits > 100, "{count}: the next smaller has another power");
    format!("{}e{power}", digits - 1)
}

#[test]
fn what_fits_rejects_nothing_and_one_less_does() {
    for (seed, more) in [
        "",
        "max_wait = '700ms'\n",
        "per = ['tenant']\n",
        "max_wait = '2s'\nper = ['tenant']\n",
    ]
    .into_iter()
    .enumerate()
    {
        let mut noise = noise(seed as u64);
        let mut text = String::from("time,tool,tenant,cost\n");
        let mut now = 0;
        for _ in 0..400 {
            now += 50_000_000 + noise(2) * noise(2_500_000_000);
            let (whole, part) = (now / 1_000_000_000, now % 1_000_000_000);
            let _ = writeln!(
                text,
                "{whole}.{part:09},search,t{},{}",
                noise(3),
                1 + noise(3)
            );
        }
        let calls = trace("fit.csv", text);
        let limits = |rate: &str, burst: u64| {
            format!("[limits.search]\nrate = '{rate}'\nburst = {burst}\n{more}")
        };
        let path = trace("fit.toml", limits("50/min", 5));
        let args = [
            path.to_str().expect("UTF-8"),
            calls.to_str().expect("UTF-8"),
            "--fit",
            "--json",
        ];
        let json = printed(&args);

        let burst = number_after(&json, "\"burst\": ");
        assert_eq!(
            rejected(&limits("50/min", burst), &calls),
            0,
            "{more}: {burst}"
        );
        assert!(
            rejected(&limits("50/min", burst - 1), &calls) > 0,
            "{more}: {burst}"
        );

        let (_, rate) = json.split_once("\"rate\": \"").expect("a rate");
        let (count, _) = rate.split_once("/min").expect("in the unit of the file");
        assert_eq!(
            rejected(&limits(&format!("{count}/min"), 5), &calls),
            0,
            "{more}: {count}"
        );
        let less = next_smaller(count);
        assert!(
            rejected(&limits(&format!("{less}/min"), 5), &calls) > 0,
            "{more}: {less}"
        );
    }
}

#[test]
fn any_order_of_lines_is_put_in_order_of_time() {
    let mut noise = noise(1);
    let lines: Vec<String> = (0..150_000)
        .map(|line| {
            format!(
                "{}.{:03},crm_{},t{},,0.3\n",
                line / 40,
                line % 1_000,
                line % 7,
                noise(50)
            )
        })
        .collect();
    let head = "time,tool,tenant,cost,duration\n";
    let mut sorted = lines.clone();
    let time = |line: &String| {
        line.split(',')
            .next()
            .map(|time| time.parse::<f64>().unwrap_or(0.0).to_bits())
    };
    sorted.sort_by_key(time);
    let mut near = sorted.clone();
    near.chunks_mut(9_000)
        .for_each(|chunk| chunk.sort_by_key(|line| std::cmp::Reverse(time(line))));
    let mut far = lines;
    far.reverse();
    let said = |name: &str, lines: &[String]| {
        let path = trace(name, head.to_owned() + &lines.concat());
        let args = [LIMITS, path.to_str().expect("UTF-8"), "--json"];
        printed(&args).replace(name, "sorted.csv")
    };
    // Calls of one time stay in the order of the file: here there are none.
    sorted.dedup_by_key(|line| time(line));
    near.retain(|line| {
        sorted
            .binary_search_by_key(&time(line), time)
            .is_ok_and(|at| sorted[at] == *line)
    });
    far.retain(|line| {
        sorted
            .binary_search_by_key(&time(line), time)
            .is_ok_and(|at| sorted[at] == *line)
    });
    assert_eq!((near.len(), far.len()), (sorted.len(), sorted.len()));
    let right = said("sorted.csv", &sorted);
    assert_eq!(said("near.csv", &near), right);
    assert_eq!(said("far.csv", &far), right);
}

/// In the window and on disk: of two calls at a time the first is admitted.
#[test]
fn calls_of_one_time_stay_in_the_order_of_the_file() {
    let limits = "[limits.both]\ntools = ['first', 'then']\nrate = '1/s'\nburst = 1\n";
    let limits = trace("ties.toml", limits);
    for calls in [10, 80_000] {
        let pairs = (0..calls).rev();
        let pairs: Vec<String> = pairs
            .map(|time| format!("{time},first\n{time},then\n"))
            .collect();
        let path = trace("ties.csv", format!("time,tool\n{}", pairs.concat()));
        let args = [
            limits.to_str().expect("UTF-8"),
            path.to_str().expect("UTF-8"),
            "--json",
        ];
        let json = printed(&args);
        for (tool, admitted) in [("first", calls), ("then", 0)] {
            let (_, tool) = json
                .split_once(&format!("\"name\": \"{tool}\""))
                .expect(tool);
            assert_eq!(number_after(tool, "\"admitted\": "), admitted);
        }
    }
}

#[test]
fn a_dry_run_is_warned_of_and_ignored() {
    let text = fs::read_to_string(LIMITS).expect("the limits");
    let dry = trace("dry.toml", format!("dry_run = true\n{text}"));
    let dry = dry.to_str().expect("UTF-8");
    let (code, out, err) = run(&[dry, CSV]);
    assert_eq!(
        (code, out.replace(dry, LIMITS)),
        (0, printed(&[LIMITS, CSV]))
    );
    assert!(
        err.starts_with("warning: ") && err.contains("dry_run"),
        "{err}"
    );
}

/// Marks at the start, line ends of both kinds, quotes, blank lines, no end of the last line.
#[test]
fn odd_files_are_read() {
    let plain = "time,tool,tenant\n1,crm_a,x\n2,crm_b,y\n";
    let calls = |name: &str, text: &str| {
        let path = trace(name, text);
        printed(&[LIMITS, path.to_str().expect("UTF-8"), "--json"]).replace(name, "odd")
    };
    let right = calls("plain.csv", plain);
    for text in [
        format!("\u{feff}{plain}"),
        plain.replace('\n', "\r\n"),
        plain.replace('\n', "\n\n"),
        plain.trim_end().to_owned(),
        plain
            .replace("crm_a", "\"crm_a\"")
            .replace("tenant", "\"tenant\""),
        plain.replace("1,crm_a,x\n2,crm_b,y", "2,crm_b,y\n1,crm_a,x"),
    ] {
        assert_eq!(calls("odd.csv", &text), right, "{text:?}");
    }
    let json = "{\"time\":1,\"tool\":\"crm_a\",\"fields\":{\"tenant\":\"x\"}}\n{\"time\":2,\"tool\":\"crm_b\",\"fields\":{\"tenant\":\"y\"},\"new\":[{}]}";
    for text in [
        json.to_owned(),
        format!("\u{feff}{json}"),
        json.replace('\n', "\r\n") + "\r\n",
    ] {
        assert_eq!(calls("odd.jsonl", &text), right, "{text:?}");
        assert_eq!(calls("odd.log", &text), right, "{text:?}");
    }
    let one = calls("one.csv", "time,tool\n5,crm_a\n");
    assert_eq!(number_after(&one, "\"calls\": "), 1);
}

#[test]
fn a_line_that_cannot_be_read_is_named_by_its_number() {
    let long = format!("1,{}\n", "x".repeat(70_000));
    for (text, why) in [
        ("", "there is no call in it"),
        ("\n\n", "there is no call in it"),
        ("time,tool\n", "there is no call in it"),
        (
            "1,search\n2,search\n",
            "line 1: the first line names the columns, and must have 'time' among them: '1,search'",
        ),
        (
            "time,tool,time\n",
            "line 1: the column 'time' is there twice",
        ),
        (
            "time,tool\n1,a\nsoon,a\n",
            "line 3: time must be seconds since 1970 or a date and time such as 2026-11-30T07:00:00.25Z, with at most 9 digits after the point, not 'soon'",
        ),
        (
            "time,tool\n1,a,b\n",
            "line 2: 3 fields, where the first line names 2",
        ),
        ("time,tool\n1,\n", "line 2: the tool must have a name"),
        (
            "time,tool,cost\n1,a,0\n",
            "line 2: cost must be a whole number of at least 1, not '0'",
        ),
        (
            "time,tool,duration\n1,a,-1\n",
            "line 2: duration must be seconds, with at most 9 digits after the point, not '-1'",
        ),
        (
            "time,tool\n1,\"a\n2,b\n",
            "line 2: a quoted field does not end on its line",
        ),
        (&format!("time,tool\n{long}"), "line 2: longer than 64 KiB"),
        ("{\"time\":1}\n", "line 1: missing field `tool`, at byte 10"),
        (
            "{\"time\":1,\"tool\":\"a\",\"fields\":{\"tenant\":5}}\n",
            "line 1: invalid type: integer `5`, expected a string, at byte 41",
        ),
        (
            "{\"time\":1,\"tool\":\"a\"\n",
            "line 1: EOF while parsing an object, at byte 20",
        ),
    ] {
        let path = trace("bad", text);
        let path = path.to_str().expect("UTF-8");
        let (code, out, err) = run(&[LIMITS, path]);
        assert_eq!((code, &*out), (1, ""), "{text:?}");
        assert_eq!(err, format!("error: {path}: {why}\n"));
    }
    let path = trace(
        "partly_bad.csv",
        format!("time,tool\n1,a\nb\n2,\"a\n3,a\n{long}4,a\n"),
    );
    let path = path.to_str().expect("UTF-8");
    let (code, out, err) = run(&[LIMITS, path, "--skip-bad", "--json"]);
    assert_eq!(code, 0);
    assert_eq!(
        (
            number_after(&out, "\"calls\": "),
            number_after(&out, "\"skipped\": ")
        ),
        (3, 3)
    );
    let first = "line 3: 1 fields, where the first line names 2";
    let lines = "3 lines left out that cannot be read, the first of them";
    assert_eq!(err, format!("warning: {path}: {lines} {first}\n"));
}

#[test]
fn what_cannot_be_asked_for_is_refused() {
    for (args, status, said) in [
        (
            &[LIMITS, "tests/none.csv"][..],
            1,
            "error: tests/none.csv cannot be read: No such file",
        ),
        (
            &[LIMITS, "tests"],
            1,
            "error: tests cannot be read: is a directory",
        ),
        (
            &["tests/none.toml", CSV],
            1,
            "error: the file cannot be read: No such file",
        ),
        (&["tests/bad/no_rate.toml", CSV], 1, "error: "),
        (
            &[LIMITS, CSV, "--plot", "tests/none/a.svg"],
            1,
            "error: tests/none/a.svg cannot be written: No such",
        ),
        (
            &[LIMITS, CSV, "--service", "0/s"],
            2,
            "N/s, N/min, N/h or N/day with N a whole number from 1 to 1,000,000",
        ),
    ] {
        let (code, out, err) = run(args);
        assert_eq!((code, &*out), (status, ""), "{args:?}");
        assert!(err.contains(said), "{args:?}: {err}");
        assert!(!err.contains("error: error"), "{err}");
    }
}

#[test]
fn a_trace_in_the_place_of_the_limits_is_told_in_one_line() {
    for file in [CSV, JSON] {
        let (code, out, err) = run(&[file, LIMITS]);
        assert_eq!((code, &*out), (1, ""));
        assert_eq!(
            err,
            format!("error: {file} looks like a trace: the limits' file comes first\n")
        );
    }
}

#[test]
fn a_picture_has_a_name_that_says_svg() {
    let (code, out, err) = run(&[LIMITS, CSV, "--plot", "x.png"]);
    assert_eq!((code, &*out), (2, ""));
    assert!(
        err.contains("'x.png'") && err.contains("ends in .svg"),
        "{err}"
    );
    assert!(!Path::new("x.png").exists());
}

#[test]
fn limits_of_which_no_tool_is_called_are_told() {
    let limits = "[limits.used]\nrate = \"1/s\"\nburst = 1\n\
        [limits.unused]\nrate = \"1/s\"\nburst = 1\n\
        [limits.\"other_*\"]\nrate = \"1/s\"\nburst = 1\n";
    let limits = trace("unmatched.toml", limits);
    let calls = trace("unmatched.csv", "time,tool\n1,used\n2,free\n");
    let args = [&limits, &calls].map(|path| path.to_str().expect("UTF-8"));
    let text = printed(&args);
    assert!(
        text.contains("\n\nNo call is of a tool of: unused, other_*\n\n"),
        "{text}"
    );
    let json = printed(&[&args[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        json["unmatched_limits"].to_string(),
        r#"["unused","other_*"]"#
    );
}

#[test]
fn a_rate_far_below_one_is_told_in_a_longer_unit_too() {
    let limits = trace("slow.toml", "[limits.slow]\nrate = \"2/s\"\nburst = 1\n");
    let calls = trace("slow.csv", "time,tool\n0,slow\n31536000,slow\n");
    let args = [&limits, &calls].map(|path| path.to_str().expect("UTF-8"));
    let text = printed(&[&args[..], &["--fit"]].concat());
    assert!(
        text.contains("0.0000000318/s (about 0.00275/day)"),
        "{text}"
    );
}

#[test]
fn just_under_a_second_is_not_a_thousand_milliseconds() {
    let limits = trace(
        "nearly.toml",
        "[limits.tool]\nrate = \"1/s\"\nburst = 1\nmax_wait = \"1s\"\n",
    );
    let calls = trace("nearly.csv", "time,tool\n0,tool\n0.0001,tool\n");
    let args = [&limits, &calls].map(|path| path.to_str().expect("UTF-8"));
    let text = printed(&args);
    assert!(
        text.contains("1.00 s") && !text.contains("1000 ms"),
        "{text}"
    );
}

#[test]
fn names_that_a_terminal_would_obey_are_escaped() {
    let path = trace("names.csv", "time,tool\n1,\u{1b}[2J\n");
    let text = printed(&[LIMITS, path.to_str().expect("UTF-8")]);
    assert!(
        text.contains("\\u{1b}[2J") && !text.contains('\u{1b}'),
        "{text}"
    );
}

/// The first blocks of TOML and CSV are the files of the session, which shows what the command prints.
#[test]
fn the_page_about_simulate_shows_what_the_command_prints() {
    let page = fs::read_to_string("../../docs/simulate.md").expect("the page");
    let block = |kind: &str| {
        let (_, block) = page.split_once(&format!("\n```{kind}\n")).expect(kind);
        block.split("\n```").next().expect("its end")
    };
    let files = [("limits.toml", block("toml")), ("calls.csv", block("csv"))];
    let files = files.map(|(name, text)| {
        let path = trace(&format!("page-{name}"), text);
        (name, path.to_str().expect("UTF-8").to_owned())
    });
    let (typed, shown) = block("console")
        .split_once('\n')
        .expect("a command and its output");
    let args = typed.split(' ').skip(3).map(|arg| {
        let file = files.iter().find(|(name, _)| *name == arg);
        file.map_or(arg, |(_, path)| path.as_str())
    });
    let mut out = printed(&args.collect::<Vec<_>>());
    for (name, path) in &files {
        out = out.replace(path, name);
    }
    assert_eq!(out, format!("{shown}\n"));
}

/// Each session of the guide shows what the command prints, and each of its pictures what it draws.
#[test]
fn the_guide_shows_what_the_command_prints_and_draws() {
    let page = fs::read_to_string("../../docs/choose-your-limits.md").expect("the page");
    let blocks = |kind: &str| -> Vec<String> {
        let opening = format!("\n```{kind}\n");
        let blocks = page.split(&opening).skip(1);
        blocks
            .filter_map(|block| Some(block.split("\n```").next()?.to_owned()))
            .collect()
    };
    let (limits, sessions) = (blocks("toml"), blocks("console"));
    assert_eq!((limits.len(), sessions.len()), (2, 2));
    for ((name, limits), session) in ["quota", "waiting"].iter().zip(limits).zip(sessions) {
        let path = |name: &str| {
            Path::new(env!("CARGO_TARGET_TMPDIR"))
                .join(name)
                .display()
                .to_string()
        };
        let files = [
            (
                format!("{name}.toml"),
                trace(&format!("{name}.toml"), limits).display().to_string(),
            ),
            (format!("{name}.svg"), path(&format!("{name}.svg"))),
            (
                "support.csv".to_owned(),
                "../../examples/traces/support.csv".to_owned(),
            ),
        ];
        let (typed, shown) = session.split_once('\n').expect("a command and its output");
        let args = typed.split(' ').skip(3).map(|arg| {
            let file = files.iter().find(|(name, _)| name == arg);
            file.map_or(arg, |(_, path)| path.as_str())
        });
        let said = |text: String| {
            let files = files.iter();
            files.fold(text, |text, (name, path)| text.replace(path, name))
        };
        let out = printed(&args.collect::<Vec<_>>());
        assert_eq!(said(out), format!("{shown}\n"));
        let drawn = fs::read_to_string(path(&format!("{name}.svg"))).expect("a picture");
        let committed = Path::new("../../docs/pictures").join(format!("{name}.svg"));
        assert_data_eq!(said(drawn), Data::read_from(&committed, None).raw());
    }
}

/// In 192 MiB of addresses, of which the program and its stacks take a part: what grew with the length of
/// the trace by 16 bytes a call would not fit.
#[cfg(target_os = "linux")]
#[test]
fn ten_million_lines_take_no_more_memory_than_a_few() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("long.csv");
    let mut out = BufWriter::new(fs::File::create(&path).expect("a writable folder"));
    let mut line = || -> io::Result<()> {
        writeln!(out, "time,tool,tenant,duration")?;
        for call in 0..10_000_000_u64 {
            writeln!(
                out,
                "{}.{:03},crm_a,t{},1",
                call / 1_000,
                call % 1_000,
                call % 1_000
            )?;
        }
        out.flush()
    };
    line().expect("room for 250 MB");
    let mut command = Command::new("sh");
    let limited = "ulimit -v 196608; exec \"$@\"";
    command.args([
        "-c",
        limited,
        "sh",
        env!("CARGO_BIN_EXE_callgate"),
        "simulate",
        LIMITS,
    ]);
    let said = command.arg(&path).output().expect("the binary runs");
    fs::remove_file(&path).expect("the trace");
    assert_eq!(String::from_utf8_lossy(&said.stderr), "");
    let text = String::from_utf8(said.stdout).expect("UTF-8");
    assert!(text.contains(": 10,000,000 calls of 1 tool in"), "{text}");
}
