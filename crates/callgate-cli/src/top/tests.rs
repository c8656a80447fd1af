//! The model by keys and a clock of the test's, and the screens that it makes.

#![expect(clippy::needless_raw_string_hashes, reason = "so snapbox writes them")]

use std::collections::VecDeque;
use std::time::Duration;

use clap::Parser;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use snapbox::{IntoData, assert_data_eq, str};

use super::columns::Cell;
use super::model::{Next, Top};
use super::screen;
use crate::stores::{Bucket, Counts, Limit, Process, Store, Wanted};

const SECOND: Duration = Duration::from_secs(1);

fn top(stores: &[&str]) -> Top {
    let names = stores.iter().map(|name| (*name).to_owned());
    Top::new(names.collect(), Wanted::default(), SECOND)
}

fn wanted(args: &[&str]) -> Wanted {
    #[derive(Parser)]
    struct Given {
        #[command(flatten)]
        wanted: Wanted,
    }
    Given::parse_from(["top"].iter().chain(args)).wanted
}

fn counts(admitted: u64, rejected: u64, waiting: u64) -> Counts {
    Counts {
        admitted,
        rejected,
        waiting,
    }
}

/// Two limits and two processes, of which the first has made so many calls of crm.
fn store(admitted: u64, rejected: u64) -> Store {
    let limit = |name: &str, per: &[&str], counts| Limit {
        name: name.to_owned(),
        per: per.iter().map(|&field| field.to_owned()).collect(),
        rate: "300/min".to_owned(),
        burst: 20,
        remaining: per.is_empty().then_some(7),
        paused: None,
        counts,
    };
    let process = |pid, limit: &str, counts| Process {
        pid,
        limit: limit.to_owned(),
        rate: "300/min".to_owned(),
        burst: 20,
        counts,
        ..Process::default()
    };
    let bucket = |limit: &str, key: u32, remaining, paused| Bucket {
        limit: limit.to_owned(),
        key: format!("{key:032x}"),
        remaining,
        burst: 20,
        paused,
    };
    let mut lookup = limit("lookup", &[], counts(1_234_567, 0, 0));
    lookup.paused = Some(Duration::from_millis(1_500));
    Store {
        path: "/run/callgate.v1".to_owned(),
        slots: Some(65_536),
        is_whole: true,
        used: 3,
        limits: vec![
            lookup,
            limit("crm", &["tenant"], counts(admitted + 5, rejected, 3)),
        ],
        processes: vec![
            process(4_711, "crm", counts(admitted, rejected, 3)),
            process(815, "lookup", counts(1_234_567, 0, 0)),
            process(815, "crm", counts(5, 0, 0)),
        ],
        buckets: Some(vec![
            bucket("crm", 0xbeef, 18, None),
            bucket("crm", 0xacce, 0, Some(90 * SECOND)),
            bucket("search", 0xfade, 10, None),
        ]),
        file: Some((1, 1)),
        ..Store::default()
    }
}

/// A view after five looks, a second apart, with calls that came more and more often.
fn watched() -> Top {
    let mut top = top(&["/run/callgate"]);
    for (second, (admitted, rejected)) in (0..).zip([(0, 0), (1, 0), (4, 0), (9, 2), (29, 44)]) {
        top.look(SECOND * second, vec![Ok(store(admitted, rejected))]);
    }
    top
}

fn press(top: &mut Top, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\t' => KeyCode::Tab,
            '\r' => KeyCode::Enter,
            '\u{8}' => KeyCode::Backspace,
            '\u{1b}' => KeyCode::Esc,
            key => KeyCode::Char(key),
        };
        assert_eq!(top.press(code.into()), Next::Show);
    }
}

/// The screen, without the spaces at the ends of lines.
fn drawn(top: &mut Top, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal
        .draw(|frame| screen::draw(frame, top))
        .expect("a drawing");
    let text = terminal.backend().to_string();
    let lines = text.lines().map(|line| {
        // What a wide character hides is told behind the line.
        let line = line.split("\" Hidden by").next().unwrap_or(line);
        line.trim_start_matches('"')
            .trim_end_matches('"')
            .trim_end()
    });
    lines.collect::<Vec<_>>().join("\n").trim_end().to_owned() + "\n"
}

/// The first column of the rows, and those after it that are asked for.
fn names(top: &Top) -> Vec<String> {
    let columns: Vec<_> = top.table.columns(false, false).collect();
    let row = |&row| {
        let texts = columns
            .iter()
            .take(2)
            .map(|column| match top.cell(row, *column) {
                Cell::Text(text) => text.trim_start_matches('0').to_owned(),
                Cell::Name(number) => number.to_string(),
                _ => String::new(),
            });
        texts.collect::<Vec<_>>().join(" ")
    };
    top.rows.iter().map(row).collect()
}

#[test]
fn limits_on_a_usual_screen() {
    assert_data_eq!(
        drawn(&mut watched(), 80, 24),
        str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   2 by limit
limit             level admitted     /s rejected     /s waits paused admitted
crm          per tenant       34     20       44     42     3               ▁▂▂█
lookup             7/20     1.2M    0.0        0    0.0     0     2s

















q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
}

#[test]
fn limits_on_a_wide_screen() {
    assert_data_eq!(drawn(&mut watched(), 120, 40), str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   2 by limit
limit                         rate            level admitted     /s rejected     /s waits paused admitted    rejected
crm                           300/min    per tenant       34     20       44     42     3               ▁▂▂█          ▁█
lookup                        300/min          7/20     1.2M    0.0        0    0.0     0     2s

































q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]].raw());
}

#[test]
fn processes_on_a_usual_screen() {
    let mut top = watched();
    press(&mut top, "\t");
    assert_data_eq!(
        drawn(&mut top, 80, 24),
        str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   3 by admitted
process limit                  admitted     /s rejected     /s waits admitted
    815 lookup                     1.2M    0.0        0    0.0     0
   4711 crm                          29     20       44     42     3        ▁▂▂█
    815 crm                           5    0.0        0    0.0     0
















q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
}

#[test]
fn processes_of_several_hosts_and_when_they_told() {
    let mut top = top(&["redis://127.0.0.1:6379/0?prefix=myapp"]);
    let mut store = store(9, 2);
    store.slots = None;
    (store.is_whole, store.unreadable) = (false, 2);
    for (row, (host, told)) in
        store
            .processes
            .iter_mut()
            .zip([("web-1", 0), ("web-2", 75), ("web-2\u{1b}[31m", 590)])
    {
        row.host = Some(host.to_owned());
        row.told = Some(Duration::from_secs(told));
    }
    top.look(SECOND, vec![Ok(store)]);
    press(&mut top, "\t/web-\r");
    assert_data_eq!(drawn(&mut top, 120, 10), str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 buckets, 2 keys that cannot be read; that is not all
 Limits  Processes  Buckets   3 by admitted  only those with 'web-'
process host         limit             rate       admitted     /s rejected     /s waits     told admitted    rejected
    815 web-2        lookup            300/min        1.2M               0            0  75s ago
   4711 web-1        crm               300/min           9               2            3   0s ago
    815 web-2\u{1b}… crm               300/min           5               0            0  10m ago


q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]].raw());
}

#[test]
fn buckets_on_a_usual_screen() {
    let mut top = watched();
    press(&mut top, "\t\t");
    assert_data_eq!(
        drawn(&mut top, 80, 24),
        str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   3 by level
limit              key                                   level            paused
crm                0000000000000000000000000000acce       0/20 ░░░░░░░░░░    90s
search             0000000000000000000000000000fade      10/20 █████░░░░░
crm                0000000000000000000000000000beef      18/20 █████████░
















q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
}

#[test]
fn help_lies_over_the_screen_until_a_key() {
    let mut top = watched();
    press(&mut top, "?");
    assert_data_eq!(
        drawn(&mut top, 80, 24),
        str![[r#"
callgate top  every 1s
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   2 by limit
limit             level admitted     /s rejected     /s waits paused admitted
crm          per tenant       34     20       44     42     3               ▁▂▂█
lookup             7/20     1.2M    0.0        0    0.0     0     2s
        ┌ Keys ────────────────────────────────────────────────────────┐
        │ Tab  Shift-Tab   limits, processes, buckets                  │
        │ j k  arrows      a row down, up; PgDn PgUp, Home End         │
        │ s or >  <        sort by the next column, the one before     │
        │ r                sort the other way round                    │
        │ /                filter by name, process or key; Esc ends it │
        │ p                pause the view (the store goes on)          │
        │ q  Ctrl-C        quit                                        │
        │                                                              │
        │ A tenant's bucket: callgate top PATH --tenant NAME           │
        │ Looking changes nothing in the store.                        │
        └──────────────────────────────────────────────────────────────┘





q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
    press(&mut top, "q");
    assert!(!drawn(&mut top, 80, 24).contains("Ctrl-C"));
}

#[test]
fn several_stores_and_what_is_wrong_with_them() {
    let mut top = top(&["/run/a", "/run/b", "/run/c", "/run/d", "/run/e"]);
    let gone = || Err("store must be one that allows to read it".to_owned());
    let stores = [Ok(store(1, 0)), gone(), gone(), gone(), Ok(store(2, 0))];
    top.look(SECOND, stores.into());
    let mut other = store(0, 0);
    other.file = Some((1, 2));
    let stores = [Ok(other), gone(), gone(), gone(), Ok(store(2, 0))];
    top.look(SECOND * 2, stores.into());
    top.look(SECOND * 5, vec![]);
    assert_data_eq!(drawn(&mut top, 120, 14), str![[r#"
callgate top  every 1s
another file since 3s; /run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
/run/b: store must be one that allows to read it
/run/c: store must be one that allows to read it
/run/d: store must be one that allows to read it
and 1 more
 Limits  Processes  Buckets   4 by limit
store            limit        rate            level admitted     /s rejected     /s waits paused admitted    rejected
/run/a           crm          300/min    per tenant        5               0            3
/run/e           crm          300/min    per tenant        7    0.0        0    0.0     3
/run/a           lookup       300/min          7/20     1.2M               0            0     2s
/run/e           lookup       300/min          7/20     1.2M    0.0        0    0.0     0     2s

q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]].raw());
}

#[test]
fn odd_names_stay_in_their_cells_and_give_no_orders() {
    let mut top = top(&["/run/callgate"]);
    let odd = [
        "a_name_that_is_much_too_long_for_the_screen_and_goes_on_and_on_for_ninety_six_bytes_or_so_too",
        "顧客検索顧客検索顧客検索顧客検索",
        "red\u{1b}[31mand\nbell\u{7}",
        "q\u{301}\u{202e}evil",
        "",
    ];
    let mut odd_store = store(0, 0);
    odd_store.limits = odd
        .iter()
        .map(|name| Limit {
            name: (*name).to_owned(),
            per: vec!["\u{1b}[2J".to_owned(), "顧客顧客".to_owned()],
            rate: "18446744073709551615/day".to_owned(),
            burst: u64::MAX,
            counts: counts(u64::MAX, 999_999, 100_000),
            ..Limit::default()
        })
        .collect();
    top.look(SECOND, vec![Ok(odd_store)]);
    assert_data_eq!(
        drawn(&mut top, 80, 12),
        str![[r#"
callgate top  every 1s
/run/callgate.v1: 5 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   5 by limit
limit             level admitted     /s rejected     /s waits paused admitted
             per \u{1b…    18.4E            999k         100k
a_name_that… per \u{1b…    18.4E            999k         100k
q́\u{202e}ev… per \u{1b…    18.4E            999k         100k
red\u{1b}[3… per \u{1b…    18.4E            999k         100k
顧客検索顧…  per \u{1b…    18.4E            999k         100k


q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
}

#[test]
fn any_size_of_screen_can_be_drawn() {
    let mut top = watched();
    for keys in ["", "\t", "\t", "/x", "\r?"] {
        press(&mut top, keys);
        for (width, height) in [(1, 1), (2, 3), (10, 4), (40, 5), (300, 100)] {
            drawn(&mut top, width, height);
        }
    }
}

#[test]
fn rates_are_of_the_time_between_looks() {
    let mut top = top(&["/run/callgate"]);
    let rate = |top: &Top| {
        top.cell((0, 1), super::columns::Column::AdmittedRate)
            .text(6)
    };
    top.look(SECOND, vec![Ok(store(100, 0))]);
    assert_eq!(rate(&top), "");
    top.look(SECOND * 3, vec![Ok(store(103, 0))]);
    assert_eq!(rate(&top), "1.5");
    // Whoever ends takes what it counted along.
    top.look(SECOND * 4, vec![Ok(store(0, 0))]);
    assert_eq!(rate(&top), "0.0");
    top.look(SECOND * 4, vec![Ok(store(9, 0))]);
    assert_eq!(rate(&top), "9,000");
}

#[test]
fn a_look_that_failed_leaves_the_history_and_another_file_does_not() {
    let mut top = watched();
    let trend = |top: &Top| match top.cell((0, 1), super::columns::Column::AdmittedTrend) {
        Cell::Trend(rates) => rates.clone(),
        _ => VecDeque::new(),
    };
    assert_eq!(trend(&top), [10, 30, 50, 200]);
    top.look(SECOND * 5, vec![Err("gone".to_owned())]);
    assert_eq!(top.rows.len(), 0);
    top.look(SECOND * 6, vec![Ok(store(30, 44))]);
    assert_eq!(trend(&top), [10, 30, 50, 200, 5]);
    let mut other = store(0, 0);
    other.file = Some((1, 2));
    top.look(SECOND * 7, vec![Ok(other)]);
    assert!(trend(&top).is_empty());
    assert!(drawn(&mut top, 80, 24).contains("another file since 0s"));
    top.look(SECOND * 70, vec![Err("gone".to_owned())]);
    assert!(!drawn(&mut top, 80, 24).contains("another file"));
}

#[test]
fn only_so_much_history_is_kept() {
    let mut top = top(&["/run/callgate"]);
    for second in 0..1_000 {
        top.look(SECOND * second, vec![Ok(store(u64::from(second), 0))]);
    }
    let cell = top.cell((0, 1), super::columns::Column::AdmittedTrend);
    assert!(matches!(cell, Cell::Trend(rates) if rates.len() == 60));
}

#[test]
fn tables_are_sorted_by_any_column_both_ways() {
    let mut top = watched();
    let firsts = |top: &Top| names(top).iter().map(|name| name.starts_with("crm")).next();
    assert_eq!(firsts(&top), Some(true));
    press(&mut top, "r");
    assert_eq!(firsts(&top), Some(false));
    for expected in [
        "rate",
        "level",
        "admitted",
        "admitted/s",
        "rejected",
        "rejected/s",
        "waits",
        "paused",
        "limit",
    ] {
        press(&mut top, "s");
        assert_eq!(top.order().column.name(), expected);
    }
    press(&mut top, ">>");
    // A level there is comes before what is split.
    assert_eq!(firsts(&top), Some(false));
    press(&mut top, "<<<");
    assert_eq!(top.order().column.name(), "paused");
    assert_eq!(firsts(&top), Some(false));

    press(&mut top, "\t");
    assert_eq!(names(&top), ["815 lookup", "4711 crm", "815 crm"]);
    press(&mut top, "<<<r");
    assert_eq!(top.order().column.name(), "process");
    assert_eq!(names(&top), ["4711 crm", "815 lookup", "815 crm"]);
    press(&mut top, "\t");
    assert_eq!(names(&top), ["crm acce", "search fade", "crm beef"]);
}

#[test]
fn a_filter_finds_names_numbers_and_keys() {
    let mut top = watched();
    press(&mut top, "/CRX\u{8}M\r");
    assert_eq!(names(&top), ["crm 300/min"]);
    press(&mut top, "\t");
    assert_eq!(names(&top), ["4711 crm", "815 crm"]);
    press(&mut top, "\u{1b}/4711q\u{8}");
    assert_eq!(names(&top), ["4711 crm"]);
    press(&mut top, "\u{1b}\t/fade");
    assert_eq!(names(&top), ["search fade"]);
    press(&mut top, "x");
    assert!(drawn(&mut top, 80, 24).contains("Esc ends the filter"));
    press(&mut top, "\u{1b}");
    assert_eq!(top.rows.len(), 3);
}

#[test]
fn a_selected_row_is_always_on_the_screen() {
    let mut top = top(&["/run/callgate"]);
    let mut many = store(0, 0);
    many.processes = (0..100)
        .map(|pid| Process {
            pid: 1_000 + pid,
            ..Process::default()
        })
        .collect();
    top.look(SECOND, vec![Ok(many)]);
    press(&mut top, "\t");
    let shows = |top: &mut Top, code: KeyCode, pid: u64| {
        assert_eq!(top.press(code.into()), Next::Show);
        let screen = drawn(top, 80, 24);
        assert!(screen.contains(&pid.to_string()), "{pid}: {screen}");
        assert_eq!(top.selected, usize::try_from(pid).expect("small") - 1_000);
    };
    shows(&mut top, KeyCode::Down, 1_001);
    shows(&mut top, KeyCode::PageDown, 1_020);
    shows(&mut top, KeyCode::End, 1_099);
    shows(&mut top, KeyCode::Char('j'), 1_099);
    shows(&mut top, KeyCode::PageUp, 1_080);
    shows(&mut top, KeyCode::Char('g'), 1_000);
    shows(&mut top, KeyCode::Char('k'), 1_000);
}

#[test]
fn quit_is_a_key_but_not_a_letter_of_a_filter() {
    let mut top = watched();
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(top.press(KeyCode::Char('q').into()), Next::Quit);
    press(&mut top, "/q");
    assert_eq!(top.press(control_c), Next::Quit);
}

#[test]
fn a_tenant_is_asked_for_by_name_and_nothing_else_is_listed() {
    let wanted = wanted(&["--tenant", "ac\u{1b}me", "--field", "user=a=b"]);
    let fields: Vec<_> = wanted.fields().collect();
    assert_eq!(fields, [("tenant", "ac\u{1b}me"), ("user", "a=b")]);
    let mut top = Top::new(vec!["/run/callgate".to_owned()], wanted, SECOND);
    let mut store = store(0, 0);
    store.buckets = Some(vec![]);
    store.unclear = vec!["limit 'crm' is split by region too: give --field region=...".to_owned()];
    top.look(SECOND, vec![Ok(store)]);
    assert_data_eq!(
        drawn(&mut top, 80, 24),
        str![[r#"
callgate top  every 1s  tenant=ac\u{1b}me user=a=b
/run/callgate.v1: 2 limits, 2 processes, 3 of 65,536 slots taken
 Limits  Processes  Buckets   0 by level
limit              key                                   level            paused

limit 'crm' is split by region too: give --field region=...

















q quit   Tab next table   < > sort   r reverse   / filter   p pause   ? help

"#]]
        .raw()
    );
}
