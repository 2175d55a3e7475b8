use super::*;
use crate::error::ErrorKind;
use crate::testing::program_with_probes;

fn program() -> Program {
    program_with_probes(&[
        "cache_hit",
        "cache_miss",
        "gc",
        "req_start",
        "req_stop",
        "request",
    ])
}

/// `NAME ACTION [named] STAGE` of each choice; `named` if disabling it fails when it is disabled already.
fn chosen(actions: &Actions) -> Vec<String> {
    let program = program();
    let choices = choose(&program, actions).unwrap();
    let text = |choice: &Choice| {
        let Choice {
            probe,
            ref counter_change,
            fails_if_disabled,
            stage,
        } = *choice;
        let name = program.by_id(probe).name();
        let CounterChange::Count(action) = counter_change else {
            panic!("{counter_change:?}");
        };
        let named = if fails_if_disabled { " named" } else { "" };
        format!("{name} {action:?}{named} {stage}")
    };
    choices.iter().map(text).collect()
}

fn message(actions: &Actions) -> String {
    choose(&program(), actions).unwrap_err().to_string()
}

fn pair(start: &str, stop: &str) -> Selector {
    let (start, stop) = (start.to_owned(), stop.to_owned());
    Selector::Pair { start, stop }
}

fn near(name: &str) -> Vec<String> {
    let program = program();
    near_names(program.probes().map(|probe| probe.name()), name)
}

#[test]
fn all_selects_every_probe_once() {
    let all = chosen(&Actions::new().enable(Selector::All));
    assert_eq!(all.len(), 6);
    assert!(all.iter().all(|choice| choice.ends_with(" Enable 0")));
}

#[test]
fn names_are_selected_in_the_order_of_actions() {
    let actions = Actions::new()
        .enable(Selector::name("request"))
        .disable(Selector::name("gc"));
    assert_eq!(
        chosen(&actions),
        ["request Enable named 0", "gc Disable named 0"]
    );
    assert_eq!(chosen(&Actions::new()), [""; 0]);
}

#[test]
fn pair_has_two_stages_and_skips_disabled_probes() {
    let both = |action| chosen(&Actions::of(action, pair("req_start", "req_stop")));
    assert_eq!(
        both(Action::Enable),
        ["req_stop Enable 0", "req_start Enable 1"]
    );
    assert_eq!(
        both(Action::Disable),
        ["req_start Disable 0", "req_stop Disable 1"]
    );
}

#[test]
fn regexp_is_anchored_at_the_start_only() {
    let by = |pattern: &str| {
        let actions = Actions::new().enable(Selector::regexp(pattern).unwrap());
        let names = chosen(&actions);
        let name = |choice: &String| choice.split(' ').next().unwrap().to_owned();
        names.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(by("req_"), ["req_start", "req_stop"]);
    assert_eq!(by("re.*t$"), ["req_start", "request"]);
    assert_eq!(by("cache_(hit|miss)"), ["cache_hit", "cache_miss"]);
    // An alternative that matches further on does not count, nor does it hide one that matches at
    // the start.
    assert_eq!(by("hit|gc"), ["gc"]);
    assert_eq!(by("it|cache_hit"), ["cache_hit"]);
    assert_eq!(by("").len(), 6);

    for pattern in ["start", "eq_", "x"] {
        let actions = Actions::new().disable(Selector::regexp(pattern).unwrap());
        assert_eq!(
            message(&actions),
            format!("no probe in server.exe matches \"{pattern}\"")
        );
    }
}

#[test]
fn invalid_regexp_is_reported_with_the_reason() {
    let error = Selector::regexp("req_(").unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::BadRegexp { pattern, .. }) if pattern == "req_(")
    );
    assert_eq!(
        error.to_string(),
        "\"req_(\" is not a regular expression: unclosed group"
    );
}

#[test]
fn predicate_selects_by_name_and_must_match_something() {
    let short = Actions::new().enable(Selector::predicate(|name| name.len() == 2));
    assert_eq!(chosen(&short), ["gc Enable 0"]);
    let none = Actions::new().enable(Selector::predicate(|_| false));
    assert_eq!(
        message(&none),
        "no probe in server.exe matches the predicate"
    );
}

#[test]
fn selecting_a_probe_twice_is_refused() {
    let hit = || Selector::name("cache_hit");
    for again in [
        hit(),
        Selector::All,
        Selector::regexp("cache").unwrap(),
        Selector::predicate(|name| name == "cache_hit"),
        pair("cache_hit", "cache_miss"),
        pair("cache_miss", "cache_hit"),
    ] {
        for action in [Action::Enable, Action::Disable] {
            let twice = Actions::of(action, hit()).and(action, again.clone());
            assert_eq!(
                message(&twice),
                "probe \"cache_hit\" is selected twice",
                "{again:?}"
            );
        }
    }
    let with_itself = Actions::of(Action::Enable, pair("gc", "gc"));
    assert_eq!(message(&with_itself), "probe \"gc\" is selected twice");
}

#[test]
fn enabling_and_disabling_one_probe_is_refused() {
    for selector in [
        Selector::name("gc"),
        Selector::All,
        Selector::regexp("g").unwrap(),
        pair("gc", "request"),
    ] {
        for (one, other) in [
            (Action::Enable, Action::Disable),
            (Action::Disable, Action::Enable),
        ] {
            let both = Actions::of(one, selector.clone()).and(other, Selector::name("gc"));
            let expected = "probe \"gc\" is to be both enabled and disabled";
            assert_eq!(message(&both), expected, "{selector:?}");
            assert_eq!(message(&both.force(true)), expected, "{selector:?}");
        }
    }
}

#[test]
fn unknown_name_is_refused_with_near_ones() {
    let expected = "no probe \"req_strat\" in server.exe; did you mean \"req_start\"?";
    for selector in [
        Selector::name("req_strat"),
        pair("req_strat", "req_stop"),
        pair("req_stop", "req_strat"),
    ] {
        let actions = Actions::new().enable(Selector::name("gc")).enable(selector);
        assert_eq!(message(&actions), expected);
    }
}

#[test]
fn typing_mistakes_are_recognised() {
    assert_eq!(near("req_strat"), ["req_start"]);
    assert_eq!(near("req_sart"), ["req_start"]);
    assert_eq!(near("Req_Start"), ["req_start"]);
    assert_eq!(near("REQUEST"), ["request"]);
    assert_eq!(near("cache-hit"), ["cache_hit"]);
    assert_eq!(near("cache_hits")[0], "cache_hit");
    // The beginning of several names, or a name with something appended.
    assert_eq!(near("req_st"), ["req_start", "req_stop"]);
    assert_eq!(near("request_done"), ["request"]);
    assert_eq!(near("gc_start"), ["gc"]);
}

#[test]
fn nonsense_gets_no_suggestion() {
    for name in ["nonsense", "x", "start", "_", "ééé", &"request".repeat(40)] {
        assert_eq!(near(name), [""; 0], "{name}");
    }
    let nonsense = Actions::new().enable(Selector::name("nonsense"));
    assert_eq!(message(&nonsense), "no probe \"nonsense\" in server.exe");
}

#[test]
fn suggestions_are_three_at_most_nearest_first() {
    let names = ["probe_10", "probe_11", "probe_1", "probe_2", "probe_100"];
    let program = program_with_probes(&names);
    assert_eq!(
        near_names(names, "probe_12"),
        ["probe_1", "probe_10", "probe_11"]
    );
    let error = choose(&program, &Actions::new().enable(Selector::name("probe_12"))).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("; did you mean \"probe_1\", \"probe_10\" or \"probe_11\"?")
    );
}

#[test]
fn selectors_are_printed_as_written() {
    let cases = [
        (Selector::All, "All"),
        (Selector::name("gc"), "Name(\"gc\")"),
        (pair("a", "b"), "Pair(\"a\", \"b\")"),
        (Selector::regexp("a.").unwrap(), "Regexp(\"a.\")"),
        (Selector::predicate(|_| true), "Predicate(..)"),
    ];
    for (selector, text) in cases {
        assert_eq!(format!("{selector:?}"), text);
    }
}

#[test]
fn refusals_name_the_objects_that_were_unreadable() {
    let path = PathBuf::from("/srv/damaged.so");
    let program = program().with_unreadable(vec![UnreadableObject {
        path: path.clone(),
        why: Arc::new(Selector::regexp("(").unwrap_err()),
        may_have_usdt_probes: true,
    }]);
    let refusal = |selector| choose(&program, &Actions::new().enable(selector)).unwrap_err();
    for selector in [Selector::name("plug"), Selector::regexp("plug").unwrap()] {
        let error = refusal(selector);
        let (ErrorKind::Probe(ProbeError::Unknown { unreadable, .. })
        | ErrorKind::Probe(ProbeError::NoMatch { unreadable, .. })) = error.kind()
        else {
            panic!("{error}");
        };
        assert_eq!(unreadable, std::slice::from_ref(&path));
    }
}

#[test]
fn followed_programs_need_not_have_all_probes() {
    let program = program();
    let present = |actions: Actions| -> Vec<(String, bool, u8)> {
        let choices = choose_present(&program, &actions).unwrap().into_iter();
        let name = |probe| program.by_id(probe).name().to_owned();
        choices
            .map(|choice| (name(choice.probe), choice.fails_if_disabled, choice.stage))
            .collect()
    };
    let of = |selector| Actions::of(Action::Disable, selector);
    let gc = || ("gc".to_owned(), false, 0);
    assert_eq!(present(of(Selector::name("gc"))), [gc()]);
    assert_eq!(present(of(Selector::name("plug"))), []);
    assert_eq!(present(of(Selector::regexp("plug").unwrap())), []);
    assert_eq!(present(of(pair("gc", "plug"))), [gc()]);
    assert_eq!(present(of(pair("plug", "plug_end"))), []);
    // All other errors are the same.
    let twice = of(Selector::name("gc")).disable(Selector::All);
    assert!(choose_present(&program, &twice).is_err());
}

#[test]
fn names_are_compared_up_to_200_bytes() {
    let long = |len: usize| format!("request{}", "x".repeat(len - 7));
    assert_eq!(near(&long(200)), ["request"]);
    assert_eq!(near(&long(201)), [""; 0]);
}

#[test]
fn actions_are_empty_until_one_is_added() {
    assert!(Actions::new().is_empty() && !Actions::new().enable(Selector::All).is_empty());
}
