//! Screens of several sizes, drawn on ratatui's test backend instead of a terminal.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::style::Modifier;

use super::super::keys::KeyPress;
use super::super::model::{NewRow, PairLatency};
use super::*;
use crate::output::Evidence;

const KEYS: &str = "q quit  s sort  r reverse  / filter  e enable or disable  p pause  ? keys";

fn program() -> ShownProgram {
    ShownProgram {
        name: "server.exe".to_owned(),
        processes: "process 4242".to_owned(),
        sources: RowSources::default(),
    }
}

fn buffer(model: &Model, width: u16, height: u16, scroll: &mut Scroll) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| draw(frame, &program(), model, scroll))
        .unwrap();
    terminal.backend().buffer().clone()
}

/// The lines of a screen, without the spaces at their ends.
fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
    let buffer = buffer(model, width, height, &mut Scroll::default());
    let line = |y| {
        let symbols = (0..width).map(|x| buffer[(x, y)].symbol());
        symbols.collect::<String>().trim_end().to_owned()
    };
    (0..height).map(line).collect()
}

/// The rate of `req_start` doubles each second; `tick` is hit once a second.
fn model() -> Model {
    let mut model = Model::new(["req_start", "tick", "never"], []);
    for at in 1..=8u32 {
        model.set_counts(
            Duration::from_secs(at.into()),
            |name| {
                Some(match name {
                    "req_start" => 1000 * ((1 << at) - 1),
                    "tick" => u64::from(at),
                    _ => 0,
                })
            },
            &[],
        );
    }
    model.set_states(|name| {
        Some(match name {
            "tick" => State::Enabled,
            "never" => State::Inconsistent,
            _ => State::Disabled,
        })
    });
    model
}

#[test]
fn screen_of_usual_size_has_everything() {
    let expected = [
        "top server.exe, process 4242",
        "3 probes, 1 on; 255,008 hits, 128,001/s; by rate",
        "PROBE          STATE           HITS         HITS/S   SHARE          LATEST RATES",
        "req_start      off          255,000        128,000  100.0%              ▁▁▁▁▁▂▄█",
        "tick           on                 8            1.0    0.0%              ████████",
        "never          mixed              0            0.0    0.0%",
        "",
        KEYS,
    ];
    assert_eq!(screen(&model(), 80, 8), expected);
}

fn collector() -> CollectorFigures {
    CollectorFigures {
        domain: 2,
        share: 0.1234,
        longest: Duration::from_micros(4_100),
        allocated: 118_400_000.0,
        lost_words: 0,
        events_are_paused: false,
    }
}

#[test]
fn collector_has_a_line_in_the_title() {
    let mut model = model();
    let lines = screen(&model, 80, 9);
    assert!(lines[2].starts_with("PROBE "), "{lines:?}");
    for (figures, expected) in [
        (
            collector(),
            "GC: domain 2 12.3% in pauses, longest 4.10 ms; 118 MB/s allocated",
        ),
        (
            CollectorFigures {
                longest: Duration::ZERO,
                share: 0.0,
                allocated: 0.0,
                ..collector()
            },
            "GC: no pauses; 0 B/s allocated",
        ),
        (
            CollectorFigures {
                lost_words: 12_345,
                ..collector()
            },
            "GC: domain 2 12.3% in pauses, longest 4.10 ms; 118 MB/s allocated; 12,345 words of events lost",
        ),
        (
            CollectorFigures {
                events_are_paused: true,
                ..collector()
            },
            "GC: its runtime events are off or paused",
        ),
    ] {
        model.set_collector(Some(figures));
        let lines = screen(&model, 100, 9);
        assert_eq!(lines[2], expected);
        assert!(lines[3].starts_with("PROBE "), "{lines:?}");
        assert!(lines[4].starts_with("req_start "), "{lines:?}");
        let printed = text(&program(), &model, 100, 20);
        assert_eq!(printed.lines().nth(2), Some(expected));
    }
    // Where there is little room, the table is more important.
    let lines = screen(&model, 80, 5);
    assert!(
        lines.iter().any(|line| line.starts_with("req_start ")),
        "{lines:?}"
    );
}

#[test]
fn help_says_that_runtime_events_are_off() {
    let mut model = model();
    model.press(KeyPress::Character('?'), 5);
    let is_said = |model: &Model| {
        screen(model, 100, 30)
            .join(" ")
            .contains("`gc` switches them on")
    };
    assert!(!is_said(&model));
    model.set_events_off();
    assert!(is_said(&model));
}

fn function(name: &str, is_usdt: bool) -> NewRow {
    NewRow {
        name: name.to_owned(),
        address: LiveAddr(0x1000),
        is_usdt,
    }
}

/// A model of the probe `tick` and of functions, of which `f1` is called most.
fn functions(count: u64) -> Model {
    let functions = (0..count).map(|at| function(&format!("f{at}"), false));
    let functions: Vec<NewRow> = functions.collect();
    let mut model = Model::new(["tick"], &functions);
    let mut hits = vec![0; count as usize];
    (hits[1], hits[2]) = (8000, 2000);
    model.set_counts(Duration::from_secs(1), |_| Some(10), &hits);
    model
}

#[test]
fn functions_are_rows_beside_probes() {
    let lines = screen(&functions(3), 100, 8);
    assert_eq!(
        lines[1],
        "1 probe, 0 on; 3 functions, 2 called; 10,010 hits, 10,010/s; by rate"
    );
    let words: Vec<&str> = lines[2].split_ascii_whitespace().collect();
    assert_eq!(words[..4], ["PROBE,", "FUNCTION", "SOURCE", "STATE"]);
    let names: Vec<&str> = lines[3..7].iter().map(|line| first_word(line)).collect();
    assert_eq!(names, ["f1", "f2", "tick", "f0"]);
    // Nothing can be enabled where there are only functions.
    let mut alone = Model::new([], &[function("f", false)]);
    let lines = screen(&alone, 100, 8);
    assert!(lines[2].starts_with("FUNCTION ") && !lines[2].contains("STATE"));
    assert!(!lines[7].contains("enable"), "{lines:?}");
    assert_eq!(alone.press(KeyPress::Enter, 9), None);
    let said = "f is a function: only probes of OCaml can be enabled or disabled";
    assert_eq!(alone.message(), Some(said));
}

#[test]
fn usdt_sites_are_no_functions() {
    let mut model = Model::new([], &[function("python:line", true)]);
    model.set_counts(Duration::from_secs(1), |_| None, &[7]);
    let lines = screen(&model, 100, 8);
    assert_eq!(lines[1], "1 USDT site, 1 hit; 7 hits, 7.0/s; by rate");
    assert!(lines[2].starts_with("USDT SITE "), "{lines:?}");
    assert_eq!(model.press(KeyPress::Enter, 9), None);
    let said = "python:line is a USDT site: only probes of OCaml can be enabled or disabled";
    assert_eq!(model.message(), Some(said));
}

#[test]
fn of_many_functions_those_called_are_rows() {
    let mut model = functions(5000);
    assert_eq!(model.shown_count(), 3);
    let lines = screen(&model, 100, 8);
    assert!(lines[1].starts_with("1 probe, 0 on; 5000 functions, 2 called; "));
    assert_eq!(first_word(&lines[3]), "f1");
    let figures = text(&program(), &model, 100, 9);
    assert!(figures.ends_with("\nand 1 row more\n"), "{figures}");
    for key in "/f2".chars() {
        model.press(KeyPress::Character(key), 9);
    }
    assert_eq!(model.shown_count(), 1);
}

#[test]
fn long_source_lines_keep_their_ends() {
    assert_eq!(source_text("list.ml:55"), "list.ml:55");
    assert_eq!(
        source_text("a_long_name_of_a_file.ml:5512"),
        "…e_of_a_file.ml:5512"
    );
}

fn first_word(line: &str) -> &str {
    line.split(' ').next().unwrap()
}

#[test]
fn columns_disappear_one_by_one_when_space_shrinks() {
    let heading_words = |width| {
        let lines = screen(&model(), width, 8);
        let head = lines.iter().find(|line| line.starts_with("PROBE"));
        head.unwrap().split_ascii_whitespace().count()
    };
    // The heading of the last column, LATEST RATES, is two words.
    assert_eq!(
        [79, 78, 57, 56, 49, 48, 34, 33, 27, 26].map(heading_words),
        [7, 5, 5, 4, 4, 3, 3, 2, 2, 2]
    );
}

#[test]
fn tiny_screen_has_a_probe_and_its_rate() {
    let expected = [
        "top server.exe, proc",
        "3 probes, 1 on; 255,",
        "PROBE         HITS/S",
        "req_start    128,000",
        "q quit  ? keys",
    ];
    assert_eq!(screen(&model(), 20, 5), expected);
}

#[test]
fn screens_of_any_size_are_drawn() {
    let mut help = model();
    help.press(KeyPress::Character('?'), 10);
    help.press(KeyPress::End, 10);
    help.show_message("word ".repeat(100));
    for (width, height) in [(0, 0), (1, 1), (2, 100), (300, 1), (3, 3), (1000, 400)] {
        screen(&help, width, height);
        screen(&Model::new([], []), width, height);
    }
    let lines = screen(&model(), 1000, 400);
    assert!(lines[3].ends_with("▁▁▁▁▁▂▄█"), "{}", lines[3]);
    assert_eq!(lines[3].chars().count(), 1000);
}

fn timed(pairs: usize) -> Model {
    let mut model = model();
    let times = PairLatency {
        start: "req_start".to_owned(),
        stop: "req_end".to_owned(),
        count: 1_234_567,
        mean: Duration::from_nanos(1_200),
        p50: Duration::from_micros(100),
        p99: Duration::from_millis(20),
        max: Duration::from_secs(11),
        evidence: Evidence::default(),
    };
    model.set_times(vec![times; pairs]);
    model
}

#[test]
fn pairs_are_below_the_probes() {
    let expected = [
        "never            mixed              0            0.0    0.0%",
        "",
        "PAIR                             COUNT       MEAN        P50        P99        MAX",
        "req_start,req_end            1,234,567    1.20 us     100 us    20.0 ms     11.0 s",
        KEYS,
    ];
    assert_eq!(screen(&timed(1), 82, 10)[5..], expected);
    let expected = [
        "PAIR                         P50        P99",
        "req_start,req_end         100 us    20.0 ms",
    ];
    assert_eq!(screen(&timed(1), 43, 10)[7..9], expected);
}

#[test]
fn interleaving_pairs_are_red_below_a_warning() {
    let mut model = timed(1);
    let mut times = model.times()[0].clone();
    let nested = times.clone();
    times.evidence.doubtful = 2_000;
    let doubtful = times.clone();
    times.evidence.interleaved = 1_000;
    let shown = |model: &Model| {
        let buffer = buffer(model, 240, 12, &mut Scroll::default());
        let line: String = (0..240).map(|x| buffer[(x, 7)].symbol()).collect();
        let colors = [7, 8, 9, 10].map(|y| buffer[(0, y)].fg);
        (line.trim_end().to_owned(), colors)
    };
    model.set_times(vec![nested, doubtful.clone()]);
    let (line, colors) = shown(&model);
    let caution = "req_start,req_end: either pairs of a thread interleave, and no time can be trusted, or exceptions \
                   skip stops, and some times may be wrong: \
                   at 2000 stops, an earlier start of the stack frame waited";
    assert_eq!(line, caution);
    assert_eq!(colors, [Color::Red, Color::Reset, Color::Reset, Color::Red]);
    model.set_times(vec![doubtful, times]);
    let caution = "req_start,req_end: no time can be trusted: pairs of a thread seem to interleave \
                   (shown by 1000 stops)";
    assert_eq!(shown(&model).0, caution);
}

#[test]
fn pairs_leave_space_for_probes() {
    for height in 0..30 {
        let lines = screen(&timed(100), 82, height);
        let pairs = lines.iter().filter(|line| line.starts_with("req_start,"));
        // Below the title and a probe, and above the keys.
        let room = (height / 2).min(height.saturating_sub(5));
        let expected = usize::from(room).saturating_sub(2);
        assert_eq!(pairs.count(), expected, "{height}");
    }
    screen(&timed(100), 1, 30);
}

#[test]
fn no_probe_gives_a_table_without_rows() {
    let lines = screen(&Model::new([], []), 80, 6);
    assert_eq!(lines[1], "0 probes, 0 on; 0 hits, 0.0/s; by rate");
    assert_eq!(lines[3..5], ["", ""]);
}

#[test]
fn names_of_any_kind_stay_in_their_column() {
    let wide = "日本語の名前はとても長いです".repeat(10);
    let marks = format!("e{}", "\u{301}".repeat(5000));
    let names = ["\x1b[31mred\n\u{202e}", &wide, &marks, "", "\u{200b}"];
    let mut model = Model::new(names, []);
    model.set_counts(Duration::from_secs(1), |_| Some(7), &[]);
    for width in [20, 40, 80, 81, 200] {
        let buffer = buffer(&model, width, 9, &mut Scroll::default());
        for y in 3..8 {
            let end: String = (width - 4..width)
                .map(|x| buffer[(x, y)].symbol())
                .collect();
            let expected = if width < 50 { " 7.0" } else { "    █" };
            assert_eq!(end.trim_start(), expected.trim_start(), "{width}");
        }
        let all: String = buffer.content().iter().map(|cell| cell.symbol()).collect();
        assert!(!all.contains(['\x1b', '\n', '\u{202e}', '\u{200b}']));
        assert!(width < 40 || all.contains("\\u{1b}[31"), "{all}");
    }
}

#[test]
fn selected_row_is_shown_and_marked() {
    let names: Vec<String> = (0..100).map(|index| format!("probe{index:02}")).collect();
    let mut model = Model::new(names.iter().map(String::as_str), []);
    let mut scroll = Scroll::default();
    for (key, first) in [
        (KeyPress::Down, "probe00"),
        (KeyPress::End, "probe94"),
        (KeyPress::Up, "probe94"),
        (KeyPress::PageUp, "probe92"),
        (KeyPress::PageUp, "probe86"),
        (KeyPress::Home, "probe00"),
    ] {
        model.press(key, scroll.page);
        let buffer = buffer(&model, 80, 10, &mut scroll);
        assert_eq!(scroll.page, 6);
        let row = |y| -> String { (0..7).map(|x| buffer[(x, y)].symbol()).collect() };
        assert_eq!(row(3), first, "{key:?}");
        let is_marked = |&y: &u16| buffer[(0, y)].modifier.contains(Modifier::REVERSED);
        let marked: Vec<String> = (0..10).filter(is_marked).map(row).collect();
        let selected = model.rows(0, 100).find(|row| row.is_selected).unwrap();
        assert_eq!(marked, [selected.name]);
    }
}

#[test]
fn last_line_shows_the_input_and_the_message() {
    let mut model = model();
    let last = |model: &Model| screen(model, 80, 12).pop().unwrap();
    model.press(KeyPress::Character('/'), 5);
    model.press(KeyPress::Character('t'), 5);
    assert_eq!(
        last(&model),
        "filter: t_  Enter keep  Esc drop  Ctrl-U clear"
    );
    model.press(KeyPress::Enter, 5);
    let lines = screen(&model, 80, 12);
    assert!(lines[1].ends_with("; 2 with \"t\""), "{}", lines[1]);
    model.show_message("cannot do\x1b that");
    assert_eq!(last(&model), "cannot do\\u{1b} that");
    model.show_message(format!(
        "{} what is too long for one line",
        "word ".repeat(14).trim()
    ));
    let lines = screen(&model, 80, 12);
    assert_eq!(lines[11], "too long for one line");
    assert!(lines[10].ends_with("word what is"), "{lines:?}");
    model.show_message("word ".repeat(1000));
    let lines = screen(&model, 20, 12);
    assert_eq!((&*lines[7], &*lines[11]), ("", "word word word word…"));
    model.press(KeyPress::Character('p'), 5);
    assert!(screen(&model, 80, 12)[0].ends_with("PAUSED"));
}

#[test]
fn caution_stays_above_message_and_keys() {
    let mut model = model();
    model.set_caution(Some("too\x1b low".to_owned()));
    let last = |model: &Model| screen(model, 80, 12).split_off(10);
    assert_eq!(last(&model)[0], "too\\u{1b} low");
    assert!(last(&model)[1].contains("q quit"));
    model.show_message("done");
    assert_eq!(last(&model), ["too\\u{1b} low", "done"]);
    model.press(KeyPress::Character('p'), 5);
    assert_eq!(last(&model)[0], "too\\u{1b} low");
    // Help has all its pages.
    model.press(KeyPress::Character('?'), 5);
    let lines = screen(&model, 80, 6);
    assert!(
        lines.iter().any(|line| line == "too\\u{1b} low"),
        "{lines:?}"
    );
    model.set_caution(None);
    assert!(!screen(&model, 80, 12).join("").contains("low"));
}

#[test]
fn help_says_which_keys_work_now() {
    let mut model = model();
    let shown = |model: &Model| screen(model, 100, 16).join("\n");
    let mut press = |keys: &str| {
        keys.chars()
            .for_each(|key| drop(model.press(KeyPress::Character(key), 5)));
        shown(&model)
    };
    let help = press("?");
    for expected in [
        "PgUp PgDn Home End: select",
        "e Enter space: enable or disable the selected probe, or the only one",
        "/: filter names, Enter keeps it, Esc drops it",
        "p: pause the display; counting continues",
        "Quitting removes all instrumentation, and undoes what was enabled or disabled here.",
        "q Ctrl-C: quit",
        "? Esc: less help",
    ] {
        assert!(help.contains(expected), "{help}");
    }
    let paused = press("p");
    assert!(
        paused.contains("p: resume; the figures are frozen"),
        "{paused}"
    );
    let filter = press("p/t");
    assert!(
        filter.contains("Enter keep  Esc drop  Ctrl-U clear"),
        "{filter}"
    );
    model.press(KeyPress::Enter, 5);
    let filtered = shown(&model);
    assert!(
        filtered.contains("/: change the filter, Ctrl-U clears it")
            && filtered.contains("Esc: clear the filter, once help is closed"),
        "{filtered}"
    );
    model.press(KeyPress::Character('?'), 5);
    model.close_help_after(1);
    let kept = shown(&model);
    assert!(kept.contains("/ filter  Esc clears it"), "{kept}");
    model.press(KeyPress::Escape, 5);
    assert!(!shown(&model).contains("Esc clears it"));
    model.press(KeyPress::Character('p'), 5);
    let paused = screen(&model, 26, 12).pop().unwrap();
    assert_eq!(paused, "q quit  p resume  ? keys");
    for key in "/x".chars() {
        model.press(KeyPress::Character(key), 5);
    }
    model.press(KeyPress::Enter, 5);
    let nothing = shown(&model);
    assert!(
        nothing.ends_with("no row has the filter in its name: / changes it, Esc clears it"),
        "{nothing}"
    );
}

#[test]
fn smallest_terminal_keeps_a_probe_in_every_state() {
    let mut model = timed(100);
    let shows_probe = |model: &Model, state: &str| {
        let lines = screen(model, 20, 5);
        let has_row = lines.iter().any(|line| line.starts_with("req_start "));
        assert!(has_row, "{state}: {lines:?}");
        lines
    };
    shows_probe(&model, "at first");
    model.press(KeyPress::Character('e'), 1);
    let lines = shows_probe(&model, "message");
    assert_eq!(
        lines[2..],
        ["no probe is", "selected: the arrow", "keys select one"]
    );
    model.press(KeyPress::Character('/'), 1);
    let lines = shows_probe(&model, "filter");
    let keys = ["filter: _", "Enter keep  Esc drop", "Ctrl-U clear"];
    assert_eq!(lines[2..], keys);
    model.press(KeyPress::Escape, 1);
    // Help has pages, of which each is shown.
    let (mut help, mut pages) = (String::new(), 0);
    loop {
        model.press(KeyPress::Character('?'), 1);
        let mut scroll = Scroll::default();
        buffer(&model, 20, 5, &mut scroll);
        model.close_help_after(scroll.help_pages);
        let lines = shows_probe(&model, "help");
        if model.help_page().is_none() {
            break;
        }
        pages += 1;
        help += &format!("{} {} ", lines[2], lines[3]);
        let next = format!("?: more ({pages} of {})", scroll.help_pages);
        assert!(
            lines[4] == next || lines[4] == "? Esc: less help",
            "{lines:?}"
        );
        assert!(pages < 100);
    }
    assert!(pages > 1 && help.contains("Quitting removes all"), "{help}");
    model.press(KeyPress::Character('p'), 1);
    shows_probe(&model, "paused");
    for height in [1, 2, 3, 4] {
        let lines = screen(&model, 20, height);
        let has_row = lines.iter().any(|line| line.starts_with("req_start"));
        assert!(has_row, "{height}: {lines:?}");
    }
}

#[test]
fn figures_as_text_are_those_of_the_screen() {
    let model = timed(1);
    let expected = "\
top server.exe, process 4242
3 probes, 1 on; 255,008 hits, 128,001/s; by rate
PROBE          STATE           HITS         HITS/S   SHARE          LATEST RATES
req_start      off          255,000        128,000  100.0%              ▁▁▁▁▁▂▄█
tick           on                 8            1.0    0.0%              ████████
never          mixed              0            0.0    0.0%

PAIR                           COUNT       MEAN        P50        P99        MAX
req_start,req_end          1,234,567    1.20 us     100 us    20.0 ms     11.0 s
";
    assert_eq!(text(&program(), &model, 80, 24), expected);
    // The rest of the terminal is for what comes below.
    let lines = text(&program(), &model, 80, 12);
    let lines: Vec<&str> = lines.lines().collect();
    assert!(lines[4].starts_with("tick "), "{lines:?}");
    assert_eq!(lines[5..7], ["and 1 probe more", ""]);
    let mut wide = Model::new(["日本", "x"], []);
    wide.set_counts(Duration::from_secs(1), |_| Some(7), &[]);
    let lines = text(&program(), &wide, 30, 24);
    assert!(lines.contains("\n日本 "), "{lines}");
    let widths = lines.lines().skip(3).map(|line| Line::from(line).width());
    assert!(widths.clone().all(|width| width == 30), "{lines}");
    for (width, height) in [(0, 0), (1, 1), (1000, 400)] {
        text(&program(), &model, width, height);
        text(&program(), &Model::new([], []), width, height);
    }
}

#[test]
fn numbers_fit_their_columns() {
    for (number, expected) in [
        (0, "0"),
        (999, "999"),
        (1000, "1,000"),
        (1_234_567, "1,234,567"),
        (9_999_999_999, "9,999,999,999"),
        (10_000_000_000, "10.000G"),
        (999_999_999_999, "1.000T"),
        (u64::MAX, "18.447E"),
    ] {
        assert_eq!(grouped(number), expected);
    }
    for (rate, expected) in [
        (0.0, "0.0"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (1e30, "18.447E"),
    ] {
        assert_eq!(rate_text(rate), expected);
    }
}

#[test]
fn sparkline_scales_to_its_highest_value() {
    let of = |rates: &[f64]| sparkline(rates.iter().copied(), 4);
    assert_eq!(of(&[]), "");
    assert_eq!(of(&[0.0, 0.0]), "  ");
    assert_eq!(of(&[0.0, 1.0, 4.0, 8.0]), " ▁▄█");
    assert_eq!(of(&[9.0, 0.001, 4.0, 8.0, 8.0]), "▁▄██");
}
