//! How keys and samples change a model.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// `b` has the highest rate, `a` the most hits, `c` no hits.
fn model() -> Model {
    let mut model = Model::new(["c", "a", "b"], []);
    model.set_counts(SECOND, |name| Some(if name == "a" { 100 } else { 0 }), &[]);
    model.set_counts(2 * SECOND, final_hits, &[]);
    model
}

/// How many hits each point of [`model`] has had at last.
fn final_hits(name: &str) -> Option<u64> {
    Some(match name {
        "a" => 110,
        "b" => 30,
        _ => 0,
    })
}

fn names(model: &Model) -> String {
    let rows = model.rows(0, usize::MAX);
    rows.map(|row| row.name).collect()
}

fn selected(model: &Model) -> Option<&str> {
    let mut rows = model.rows(0, usize::MAX);
    rows.find(|row| row.is_selected).map(|row| row.name)
}

fn type_text(model: &mut Model, text: &str) {
    for character in text.chars() {
        assert_eq!(model.press(KeyPress::Character(character), 10), None);
    }
}

#[test]
fn rates_and_shares_are_of_the_last_interval() {
    let model = model();
    let figures: Vec<&HitFigures> = model.rows(0, 3).map(|row| row.figures).collect();
    let of = |hits, rate, share, history: [f64; 2]| HitFigures {
        hits,
        rate,
        share,
        history: history.into(),
    };
    assert_eq!(*figures[0], of(30, 30.0, 0.75, [0.0, 30.0]));
    assert_eq!(*figures[1], of(110, 10.0, 0.25, [100.0, 10.0]));
    assert_eq!(*figures[2], of(0, 0.0, 0.0, [0.0, 0.0]));
    assert_eq!(model.totals(), (140, 40.0));
}

#[test]
fn first_rate_is_of_the_first_interval() {
    let mut model = Model::new(["a"], []);
    model.begin(SECOND, |_| Some(1000), &[]);
    model.set_counts(2 * SECOND, |_| Some(1010), &[]);
    let row = model.rows(0, 1).next().unwrap();
    assert_eq!((row.figures.hits, row.figures.rate), (1010, 10.0));
    assert_eq!(row.figures.history, [10.0]);
}

#[test]
fn odd_times_and_counts_give_finite_figures() {
    let mut model = Model::new(["a", "b"], []);
    for (at, hits) in [(0, 0), (0, u64::MAX), (5, 3), (4, u64::MAX)] {
        model.set_counts(at * SECOND, |_| Some(hits), &[]);
        model.set_counts(at * SECOND, |_| None, &[]);
        assert!(model.totals().1.is_finite());
        for row in model.rows(0, 2) {
            assert!((0.0..=1.0).contains(&row.figures.share), "{row:?}");
        }
    }
}

#[test]
fn history_keeps_the_latest_samples() {
    let mut model = Model::new(["a"], []);
    for at in 1..=100 {
        model.set_counts(at * SECOND, |_| Some(u64::from(at * (at + 1) / 2)), &[]);
    }
    let row = model.rows(0, 1).next().unwrap();
    assert_eq!(row.figures.history.len(), HISTORY_LEN);
    assert_eq!(row.figures.history.back(), Some(&100.0));
}

#[test]
fn keys_sort_by_rate_hits_name_and_reverse() {
    let mut model = model();
    assert_eq!(names(&model), "bac");
    type_text(&mut model, "s");
    assert_eq!(names(&model), "abc");
    type_text(&mut model, "r");
    assert_eq!(names(&model), "cba");
    type_text(&mut model, "s");
    assert_eq!(
        (names(&model).as_str(), model.sort()),
        ("abc", (Sort::Name, false))
    );
    type_text(&mut model, "r");
    assert_eq!(names(&model), "cba");
    type_text(&mut model, "s");
    assert_eq!(model.sort(), (Sort::Rate, false));
}

#[test]
fn equal_rows_are_in_name_order_either_way() {
    let mut model = Model::new(["b", "a", "c"], []);
    assert_eq!(names(&model), "abc");
    type_text(&mut model, "r");
    assert_eq!(names(&model), "abc");
}

#[test]
fn equal_rates_are_sorted_by_hits() {
    let mut model = model();
    model.set_counts(3 * SECOND, final_hits, &[]);
    assert_eq!(names(&model), "abc");
    type_text(&mut model, "r");
    assert_eq!(names(&model), "cba");
}

#[test]
fn selection_stays_with_its_probe() {
    let mut model = model();
    assert_eq!(selected(&model), None);
    model.press(KeyPress::Down, 10);
    model.press(KeyPress::Down, 10);
    assert_eq!(selected(&model), Some("a"));
    type_text(&mut model, "s");
    assert_eq!(
        (selected(&model), model.selected_row()),
        (Some("a"), Some(0))
    );
    model.set_counts(
        3 * SECOND,
        |name| Some(if name == "c" { 1000 } else { 110 }),
        &[],
    );
    assert_eq!(
        (selected(&model), model.selected_row()),
        (Some("a"), Some(1))
    );
}

#[test]
fn selection_moves_within_the_shown_rows() {
    let names: Vec<String> = (0..100).map(|index| format!("p{index:02}")).collect();
    let mut model = Model::new(names.iter().map(String::as_str), []);
    for (key, expected) in [
        (KeyPress::Up, "p00"),
        (KeyPress::Up, "p00"),
        (KeyPress::PageDown, "p10"),
        (KeyPress::Character('j'), "p11"),
        (KeyPress::Character('k'), "p10"),
        (KeyPress::End, "p99"),
        (KeyPress::Down, "p99"),
        (KeyPress::PageUp, "p89"),
        (KeyPress::Home, "p00"),
    ] {
        model.press(key, 10);
        assert_eq!(selected(&model), Some(expected), "{key:?}");
    }
    // Also if no row fits on the screen.
    model.press(KeyPress::PageDown, 0);
    assert_eq!(selected(&model), Some("p01"));
    let mut empty = Model::new([], []);
    for key in [
        KeyPress::Down,
        KeyPress::End,
        KeyPress::PageUp,
        KeyPress::Home,
    ] {
        assert_eq!(empty.press(key, 10), None);
        assert_eq!(selected(&empty), None);
    }
}

#[test]
fn filter_applies_while_typed_then_kept_or_dropped() {
    let mut model = Model::new(["req_start", "req_end", "tick"], []);
    type_text(&mut model, "/REQ");
    assert_eq!(names(&model), "req_endreq_start");
    // While the filter is being typed, keys that are otherwise commands are part of it.
    type_text(&mut model, "q");
    assert_eq!((names(&model).as_str(), model.shown_count()), ("", 0));
    model.press(KeyPress::Backspace, 10);
    model.press(KeyPress::Enter, 10);
    assert_eq!((model.filter(), model.is_typing()), ("REQ", false));
    type_text(&mut model, "/_end");
    assert_eq!(names(&model), "req_end");
    model.press(KeyPress::Escape, 10);
    assert_eq!((model.filter(), model.shown_count()), ("REQ", 2));
    // Esc closes help, clears the filter that was kept, and quits.
    model.press(KeyPress::Character('?'), 10);
    assert_eq!(model.press(KeyPress::Escape, 10), None);
    assert_eq!((model.filter(), model.help_page()), ("REQ", None));
    assert_eq!(model.press(KeyPress::Escape, 10), None);
    assert_eq!((model.filter(), model.shown_count()), ("", 3));
    assert_eq!(model.press(KeyPress::Escape, 10), Some(Request::Quit));
    type_text(&mut model, "/");
    model.press(KeyPress::Control('u'), 10);
    assert_eq!(model.shown_count(), 3);
    assert_eq!(model.press(KeyPress::Control('c'), 10), Some(Request::Quit));
    type_text(&mut model, &"x".repeat(1000));
    assert_eq!(model.filter().len(), MAX_FILTER_LEN);
}

#[test]
fn filtered_out_selection_moves_to_the_next_row() {
    let mut model = Model::new(["a1", "b2", "c1"], []);
    model.press(KeyPress::Down, 10);
    model.press(KeyPress::Down, 10);
    assert_eq!(selected(&model), Some("b2"));
    type_text(&mut model, "/1");
    assert_eq!(selected(&model), Some("c1"));
    type_text(&mut model, "1");
    assert_eq!(selected(&model), None);
}

#[test]
fn shown_values_freeze_while_paused_and_counting_continues() {
    let mut model = model();
    type_text(&mut model, "p");
    model.set_counts(3 * SECOND, |_| Some(500), &[]);
    model.set_times(vec![PairLatency::default()]);
    assert!(model.is_paused() && model.times().is_empty());
    assert_eq!((names(&model).as_str(), model.totals().0), ("bac", 140));
    // It can still be sorted.
    type_text(&mut model, "s");
    assert_eq!(names(&model), "abc");
    type_text(&mut model, "p");
    assert_eq!((model.totals(), model.times().len()), ((1500, 1360.0), 1));
}

#[test]
fn selected_probe_is_switched_to_its_opposite() {
    let mut model = model();
    assert_eq!(model.press(KeyPress::Enter, 10), None);
    assert!(model.message().unwrap().contains("no probe is selected"));
    model.press(KeyPress::Down, 10);
    assert_eq!(model.message(), None);
    let expected_request = |on| {
        let name = "b".to_owned();
        Some(Request::Switch { name, on })
    };
    for (state, on) in [
        (None, true),
        (Some(State::Disabled), true),
        (Some(State::Inconsistent), true),
        (Some(State::Enabled), false),
    ] {
        model.set_states(|_| state);
        for key in [
            KeyPress::Enter,
            KeyPress::Character(' '),
            KeyPress::Character('e'),
        ] {
            assert_eq!(model.press(key, 10), expected_request(on));
        }
    }
    assert_eq!(model.enabled_count(), 3);
}

#[test]
fn quit_and_suspend_keys_work_others_do_nothing() {
    let mut model = model();
    for key in [
        KeyPress::Character('q'),
        KeyPress::Escape,
        KeyPress::Control('c'),
    ] {
        assert_eq!(model.press(key, 10), Some(Request::Quit));
    }
    model.press(KeyPress::Character('?'), 10);
    // Esc closes help first.
    assert_eq!(
        (model.press(KeyPress::Escape, 10), model.help_page()),
        (None, None)
    );
    assert_eq!(model.press(KeyPress::Escape, 10), Some(Request::Quit));
    assert_eq!(
        model.press(KeyPress::Control('z'), 10),
        Some(Request::Suspend)
    );
    assert_eq!(
        model.press(KeyPress::Control('l'), 10),
        Some(Request::Redraw)
    );
    for key in [
        KeyPress::Character('x'),
        KeyPress::Backspace,
        KeyPress::Control('x'),
    ] {
        assert_eq!(model.press(key, 10), None);
    }
}

#[test]
fn only_row_is_switched_without_being_selected() {
    let mut model = Model::new(["req_start", "req_end", "tick"], []);
    assert_eq!(model.press(KeyPress::Character('e'), 10), None);
    assert!(model.message().unwrap().starts_with("no probe is selected"));
    type_text(&mut model, "/tick");
    model.press(KeyPress::Enter, 10);
    let switched = Some(Request::Switch {
        name: "tick".to_owned(),
        on: true,
    });
    assert_eq!(model.press(KeyPress::Character('e'), 10), switched);
    assert_eq!(selected(&model), Some("tick"));
    // A selected probe that is filtered out is not switched.
    type_text(&mut model, "/");
    model.press(KeyPress::Control('u'), 10);
    type_text(&mut model, "_end");
    model.press(KeyPress::Enter, 10);
    let Some(Request::Switch { name, .. }) = model.press(KeyPress::Enter, 10) else {
        panic!("nothing is switched");
    };
    assert_eq!(name, "req_end");
    type_text(&mut model, "/x");
    model.press(KeyPress::Enter, 10);
    assert_eq!(model.press(KeyPress::Character('e'), 10), None);
    let nothing_shown = "no row has the filter in its name: / changes it";
    assert_eq!(model.message(), Some(nothing_shown));
}
