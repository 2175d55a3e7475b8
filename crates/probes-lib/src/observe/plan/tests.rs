use std::num::NonZeroU64;

use iced_x86::Register;
use test_support::{Talker, fixture};

use super::*;
use crate::address::{FileAddr, LiveAddr};
use crate::error::ErrorKind;
use crate::expression::MAX_ARGUMENTS;
use crate::expression::{Answer, Expression, Hit, Keys};
use crate::observe::frame_id::FrameId;
use crate::observe::layout::semaphores::WordChange;
use crate::observe::role::{ArgumentRoom, ArgumentSource, Marks, PairEnd, PairFilter, WatchRole};
use crate::select::Selector;
use crate::select::function::FunctionSelector;
use crate::testing::{ProgramSpec, loaded_twice, program_with_arguments};

const AGAIN: LoadBias = LoadBias(0x1000_0000);

/// Three probes, each with a site in each of two objects.
fn program() -> Arc<Program> {
    let seven = ["8@%rdi"; 7].join(" ");
    let probes = [("a", "8@%rdi"), ("b", "8@%rax 4@8(%rsp)"), ("c", &seven)];
    Arc::new(loaded_twice(&program_with_arguments(&probes), AGAIN))
}

fn plan(observation: &Observation) -> ObservationPlan {
    ObservationPlan::of(observation, program(), Arc::default()).unwrap()
}

#[test]
fn points_are_the_observed_sites_by_address() {
    let observation = Observation::new()
        .count(Selector::name("a"))
        .time("a", "b")
        .time("b", "b")
        .watch(Selector::name("b"));
    let plan = plan(&observation);
    let marks = |register| Marks {
        argument: Some(register),
        is_word: false,
        frame: FrameId::Stack,
    };
    let a = Role {
        is_counted: true,
        ends: vec![PairEnd::Start(0)],
        marks: marks(Register::RDI),
        ..Role::default()
    };
    let b = |point| Role {
        ends: vec![PairEnd::Stop(0), PairEnd::Stop(1), PairEnd::Start(1)],
        marks: marks(Register::RAX),
        watched: Some(WatchRole {
            point,
            function: None,
            is_ocaml: false,
            sample: None,
            formats: Vec::new(),
            result_format: Default::default(),
            arguments: vec![
                ArgumentSource::Register(Register::RAX),
                ArgumentSource::on_stack(8),
            ],
        }),
        ..Role::default()
    };
    let expected = [
        (ProgramSpec::TEXT, a.clone()),
        (ProgramSpec::TEXT + 8, b(1)),
        (ProgramSpec::TEXT + AGAIN.0, a),
        (ProgramSpec::TEXT + 8 + AGAIN.0, b(3)),
    ];
    assert_eq!(plan.points.len(), expected.len());
    for (planned, (address, role)) in plan.points.iter().zip(expected) {
        assert_eq!((planned.point.address.0, &planned.role), (address, &role));
        assert_eq!(
            plan.program.site(planned.site().unwrap()).address().0,
            address
        );
    }
    let record_len = record::len(2, ArgumentRoom::Fields);
    assert_eq!(
        plan.shared,
        SharedLayout {
            pairs: 2,
            record_len,
            ring_doublings: 1,
            ..SharedLayout::default()
        }
    );
    let pair = PlannedPair {
        start: "a".to_owned(),
        stop: "b".to_owned(),
        ..PlannedPair::default()
    };
    assert_eq!(plan.pairs[0], pair);
}

#[test]
fn marks_are_registers_of_four_bytes_or_more() {
    for (arguments, expected) in [
        ("8@%r12 8@%rax", Some(Register::R12)),
        ("4@%eax", Some(Register::RAX)),
        ("-8@%rdi", Some(Register::RDI)),
        ("2@%ax", None),
        ("8@8(%rsp) 8@%rax", None),
        ("8@%xmm1", None),
        ("", None),
    ] {
        let program = Arc::new(program_with_arguments(&[("a", arguments), ("b", "")]));
        let observation = Observation::new().time("a", "b");
        let plan = ObservationPlan::of(&observation, program, Arc::default()).unwrap();
        assert_eq!(plan.points[0].role.marks.argument, expected, "{arguments}");
    }
}

#[test]
fn counting_needs_no_time_and_no_record() {
    let counted = plan(&Observation::new().count(Selector::All));
    assert_eq!(counted.points.len(), 6);
    assert!(!counted.is_timed() && counted.shared.is_empty());
    assert!(plan(&Observation::new().time("a", "c")).is_timed());
    assert!(plan(&Observation::new().watch(Selector::name("a"))).is_timed());
}

#[test]
fn at_most_six_arguments_are_recorded() {
    let plan = plan(&Observation::new().watch(Selector::name("c")));
    let watched = plan.points[0].role.watched.as_ref().unwrap();
    assert_eq!(watched.arguments.len(), MAX_ARGUMENTS);
    assert_eq!(
        plan.shared.record_len,
        record::len(MAX_ARGUMENTS, ArgumentRoom::Fields)
    );
}

#[test]
fn more_pairs_than_possible_are_refused() {
    let pairs = |many| (0..many).fold(Observation::new(), |all, _| all.time("a", "b"));
    assert_eq!(plan(&pairs(64)).shared.pairs, 64);
    let refusal = ObservationPlan::of(&pairs(65), program(), Arc::default())
        .err()
        .unwrap();
    assert!(matches!(
        refusal.kind(),
        ErrorKind::Observe(ObserveError::TooManyPairs {
            given: 65,
            most: 64
        })
    ));
}

#[test]
fn unexpected_code_is_reported_with_its_probe() {
    let plan = plan(&Observation::new().count(Selector::All));
    let found = SiteCode([0xcc; 6]);
    let point = &plan.points[4];
    let ProbeError::UnexpectedSite {
        name,
        address,
        found: reported,
        expected,
    } = plan.unexpected(point.site().unwrap(), found)
    else {
        panic!("another error");
    };
    assert_eq!((&name[..], address), ("b", point.point.address));
    assert_eq!((reported, expected.operand()), (found, [1, 0, 0, 0]));
}

/// Returns the plan of an observation of the functions of a program that is running.
fn plan_of_functions(observation: &Observation) -> ObservationPlan {
    let target = Talker::start(&fixture("calls.pie"));
    let functions = ObservedFunctions::find(target.pid(), observation).unwrap();
    ObservationPlan::of(observation, program(), Arc::new(functions)).unwrap()
}

fn function(name: &str) -> FunctionSelector {
    FunctionSelector::Glob(name.parse().unwrap())
}

#[test]
fn role_of_a_function_follows_the_observation() {
    let counted = plan_of_functions(&Observation::new().count_functions(function("leaf")));
    let role = &counted.points[0].role;
    assert!(role.is_counted && role.watched.is_none() && role.timed.is_none());
    assert!(counted.shared.is_empty());
    let watching = Observation::new().watch_functions(function("leaf"));
    let watched = plan_of_functions(&watching);
    let role = &watched.points[0].role;
    assert!(!role.is_counted && role.watched.is_some() && role.timed.is_none());
    assert!(watched.shared.record_len > 0);
    assert_eq!(watched.shared.stacks, StackCopies::None);
    let with_stacks = plan_of_functions(&watching.with_stacks());
    assert_eq!(with_stacks.shared.stacks, StackCopies::OF_THREADS);
    let longer = watched.shared.record_len + StackCopies::OF_THREADS.len();
    assert_eq!(with_stacks.shared.record_len, longer);
    let expression = "arg0".parse::<Expression>().unwrap();
    let counting = Observation::new().count_functions(function("leaf"));
    let in_histogram = plan_of_functions(&counting.histogram_of(expression));
    let role = &in_histogram.points[0].role;
    assert!(!role.is_counted && role.histogram.is_some() && role.watched.is_none());
    assert_eq!(in_histogram.shared.values.histograms, 1);
}

#[test]
fn layout_of_calls_follows_the_observation() {
    let timing = || Observation::new().time_functions(function("outer"));
    let calls = |observation: &Observation| {
        let plan = plan_of_functions(observation);
        assert!(plan.points.iter().all(|it| !it.role.is_counted));
        assert!(plan.points.len() > 1, "an entry and exits");
        let entries = plan.points.iter().filter_map(|it| it.role.timed.as_ref());
        assert_eq!(entries.filter(|it| it.is_entry).count(), 1);
        let calls = plan.shared.calls;
        assert_eq!(calls.functions, 1);
        [calls.of_self, calls.by_caller, calls.keeps_arguments]
    };
    assert_eq!(calls(&timing()), [false, false, false]);
    assert_eq!(calls(&timing().self_times()), [true, false, false]);
    assert_eq!(calls(&timing().by_caller()), [false, true, false]);
    let slow = timing().report_slow(Duration::from_millis(1));
    assert_eq!(calls(&slow), [false, false, true]);
    // If only pairs are timed, there is no layout for calls.
    let pairs = Observation::new().time("a", "b").self_times().by_caller();
    let plan = plan(&pairs.report_slow(Duration::from_millis(1)));
    assert_eq!(plan.shared.calls, CallsLayout::default());
}

/// A hit with these words as arguments.
struct Words([u64; 5]);

impl Hit for Words {
    fn argument(&self, index: usize) -> Option<u64> {
        self.0.get(index).copied()
    }

    fn word_at(&self, _: u64) -> Option<u64> {
        None
    }
}

fn expression(text: &str) -> Expression {
    text.parse().unwrap()
}

fn keys(text: &str) -> Keys {
    text.parse().unwrap()
}

/// Returns the plan of a program with these probes and arguments in their notes.
fn plan_with(observation: &Observation, probes: &[(&str, &str)]) -> Result<ObservationPlan> {
    let program = Arc::new(program_with_arguments(probes));
    ObservationPlan::of(observation, program, Arc::default())
}

#[test]
fn expressions_use_the_argument_types_of_notes() {
    let probes = [("a", "8@%rdi 4@%esi -2@%dx 8@%xmm1 8@$5")];
    let words = Words([
        7 << 1 | 1,
        0xdead_beef_8000_1007,
        0xfffe,
        2.5_f64.to_bits(),
        5,
    ]);
    for (text, expected) in [
        ("arg0 == 7", Answer::True),
        ("arg1 == 0x80001007", Answer::True),
        ("arg2 == -2", Answer::True),
        ("arg3 > 2.4 && arg3 < 2.6", Answer::True),
        ("arg0 == 15 || arg1 < 0 || arg2 > 0", Answer::False),
    ] {
        let counted = Observation::new().count(Selector::name("a"));
        let plan = plan_with(&counted.only_where(expression(text)), &probes).unwrap();
        let filter = plan.points[0].role.filter.as_ref().unwrap();
        assert_eq!(filter.filter.answer(&words), expected, "{text}");
    }
    // An integer as a float; a constant, which is not known; an argument that there is not.
    for text in ["arg1 > 2.5", "arg4 == 5", "arg5 == 5"] {
        let counted = Observation::new().count(Selector::name("a"));
        let refusal = plan_with(&counted.only_where(expression(text)), &probes).err();
        let refusal = refusal.expect(text);
        let is_it = matches!(
            refusal.kind(),
            ErrorKind::Observe(ObserveError::Expression(_))
        );
        assert!(is_it, "{text} {refusal:?}");
    }
}

#[test]
fn sites_of_a_probe_share_its_histogram() {
    let counted = || Observation::new().count(Selector::All);
    let numbers = |plan: &ObservationPlan| -> Vec<u32> {
        let roles = plan.points.iter().map(|it| &it.role);
        roles
            .map(|it| it.histogram.as_ref().unwrap().number)
            .collect()
    };
    let by_name = plan(&counted().histogram_of(expression("arg0")));
    assert_eq!(numbers(&by_name), [0, 1, 2, 0, 1, 2]);
    assert_eq!(by_name.shared.values.histograms, 3);
    let names: Vec<&str> = by_name.histograms.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(by_name.is_filtered() && !by_name.counts_by_key());
    assert!(by_name.has_expressions() && !plan(&counted()).has_expressions());
    // With keys, each key has a histogram, and probes have none.
    let by_key = plan(&counted().histogram_of(expression("arg0")).by(keys("tid")));
    assert_eq!(numbers(&by_key), [0; 6]);
    assert!(by_key.histograms.is_empty() && !by_key.counts_by_key());
    assert_eq!(by_key.shared.values.histograms, keys::histograms::ALL);
    assert!(by_key.shared.keys.has_histograms);
    let linear = plan(
        &counted()
            .histogram_of(expression("arg0"))
            .linear("0,9,3".parse().unwrap()),
    );
    assert_eq!(linear.shared.values.steps, 3);
    let linear_by_key = counted().histogram_of(expression("arg0")).by(keys("tid"));
    let linear_by_key = plan(&linear_by_key.linear("0,9,3".parse().unwrap()));
    assert_eq!(linear_by_key.shared.values.steps, 3);
    // Histograms of times have no linear steps.
    let times = Observation::new().time("a", "b").time_by(keys("tid"));
    let times = plan(&times.linear("0,9,3".parse().unwrap()));
    assert!(times.shared.keys.has_histograms && times.shared.values.steps == 0);
}

#[test]
fn forked_processes_share_what_is_not_timed() {
    let shares = |observation: Observation| {
        assert!(!plan_of_functions(&observation).shares_data());
        let forked = plan_of_functions(&observation.record_forked());
        (forked.has_times(), forked.shares_data())
    };
    let observation = Observation::new;
    let counted = observation().count(Selector::All);
    let counted = counted.count_functions(function("leaf"));
    assert_eq!(shares(counted), (false, true));
    assert_eq!(shares(observation().time("a", "b")), (true, false));
    let timed = observation().time_functions(function("outer"));
    assert_eq!(shares(timed), (true, false));
}

#[test]
fn nothing_is_laid_out_that_is_not_asked() {
    let counted = || Observation::new().count(Selector::All);
    let linear = plan(&counted().linear("0,9,3".parse().unwrap()));
    assert!(linear.shared.is_empty() && linear.shared.values.steps == 0);
    assert_eq!(
        plan(&counted().with_stacks()).shared.stacks,
        StackCopies::None
    );
    let every = NonZeroU64::new(7);
    let watching = Observation::new().watch(Selector::All);
    let sample = |plan: ObservationPlan| plan.points[0].role.watched.as_ref().unwrap().sample;
    assert!(!plan(&watching).is_sampled() && !plan(&counted()).is_filtered());
    assert_eq!(sample(plan(&watching)), None);
    let sampled = watching.sample(every.unwrap());
    assert!(plan(&sampled).is_sampled());
    assert_eq!(sample(plan(&sampled)), every);
}

#[test]
fn too_many_histograms_are_refused() {
    let of = |many: usize| {
        let names: Vec<String> = (0..many).map(|it| format!("p{it}")).collect();
        let probes: Vec<(&str, &str)> = names.iter().map(|it| (&**it, "8@%rdi")).collect();
        let counted = Observation::new().count(Selector::All);
        plan_with(&counted.histogram_of(expression("arg0")), &probes)
    };
    let most = MAX_HISTOGRAMS as usize;
    assert_eq!(of(most).unwrap().shared.values.histograms, MAX_HISTOGRAMS);
    let refusal = of(most + 1).err().unwrap();
    let kind = refusal.kind();
    let too_many = ObserveError::TooManyHistograms {
        given: most + 1,
        most,
    };
    assert_eq!(
        format!("{kind:?}"),
        format!("{:?}", ErrorKind::Observe(too_many))
    );
}

#[test]
fn names_are_numbered_by_probe() {
    let counted = Observation::new().count(Selector::All).by(keys("probe"));
    let plan = plan(&counted);
    let number = |it: &PlannedPoint| it.role.keys.as_ref().unwrap().name;
    let numbers: Vec<u32> = plan.points.iter().map(number).collect();
    assert_eq!(numbers, [0, 1, 2, 0, 1, 2]);
    let format = plan.key_format();
    let names: Vec<Option<&str>> = (0..4).map(|it| format.name(it)).collect();
    assert_eq!(names, [Some("a"), Some("b"), Some("c"), None]);
    assert!(plan.counts_by_key() && plan.key_kinds == [KeyKind::Probe]);
    assert!(!plan_of_code(&Observation::new()).counts_by_key());
    // The names of functions follow those of probes.
    let mut functions = plan_of_code(&counted);
    functions.key_names = plan.key_names;
    let last = functions.functions.functions[1].wanted.name.clone();
    let format = functions.key_format();
    assert_eq!(format.name(4), Some(&*last));
    assert_eq!(format.name(6), None);
}

#[test]
fn starts_are_filtered_and_stops_follow() {
    let filters = |observation: Observation| {
        let filtered = observation.only_starts_where(expression("arg0 == 1"));
        let plan = plan(&filtered);
        plan.points[..3]
            .iter()
            .map(|it| match it.role.pair_filter {
                PairFilter::All => "all",
                PairFilter::Starts(_) => "starts",
                PairFilter::Stops => "stops",
            })
            .collect::<Vec<_>>()
    };
    let one_pair = Observation::new().time("a", "b");
    let with_c = one_pair.clone().count(Selector::name("c"));
    assert_eq!(filters(with_c), ["starts", "stops", "all"]);
    // Probe b both stops a pair and starts one; the pairs are given in either order.
    let chain = one_pair.clone().time("b", "c");
    assert_eq!(filters(chain), ["starts", "starts", "stops"]);
    let chain = Observation::new().time("b", "c").time("a", "b");
    assert_eq!(filters(chain), ["starts", "starts", "stops"]);
}

#[test]
fn only_timed_points_have_a_time_range() {
    let timed = Observation::new().time("a", "b").count(Selector::name("c"));
    let in_range = |plan: &ObservationPlan| -> Vec<bool> {
        plan.points[..3]
            .iter()
            .map(|it| it.role.is_in_range)
            .collect()
    };
    assert_eq!(in_range(&plan(&timed)), [false; 3]);
    let plan = plan(&timed.only_starts_where(expression("elapsed > 1ms")));
    assert_eq!(in_range(&plan), [true, true, false]);
    assert!(plan.times.is_some());
    let timed = Observation::new().time_functions(function("outer"));
    let mut of_functions = plan_of_functions(&timed.only_starts_where(expression("elapsed > 1ms")));
    assert!(of_functions.points.iter().all(|it| it.role.is_in_range));
    of_functions.renew_function_points();
    assert!(of_functions.points.iter().all(|it| it.role.is_in_range));
}

#[test]
fn slow_pairs_keep_arguments_of_both_ends() {
    let timed = Observation::new().time("a", "b");
    assert_eq!(plan(&timed).shared.record_len, 0);
    let slow = plan(&timed.report_slow(Duration::from_millis(1)));
    // Probe b has two arguments.
    assert_eq!(slow.shared.kept_len, record::len(2, ArgumentRoom::Fields));
    assert_eq!(
        slow.shared.record_len,
        2 * record::len(2, ArgumentRoom::Fields)
    );
    assert!(slow.shared.ring_doublings == 1 && slow.slow_from == Duration::from_millis(1));
    let reported = |it: &PlannedPoint| it.role.reported.as_ref().map(|it| it.arguments.len());
    assert_eq!(reported(&slow.points[0]), Some(1));
    assert_eq!(reported(&slow.points[1]), Some(2));
}

#[test]
fn rings_are_large_if_more_is_recorded() {
    let watching = Observation::new().watch(Selector::name("a"));
    assert_eq!(plan(&watching).shared.ring_doublings, 1);
    let bare = plan_with(&watching, &[("a", "")]).unwrap();
    assert!(bare.shared.record_len > 0 && bare.shared.ring_doublings == 0);
    let exits = plan_with(&watching.watch_exits(), &[("a", "")]).unwrap();
    assert_eq!(exits.shared.ring_doublings, 1);
    let larger = Observation::new()
        .watch(Selector::name("a"))
        .with_rings_of(16 << 20);
    assert_eq!(plan(&larger).shared.ring_doublings, 4);
    let counted = Observation::new()
        .count(Selector::name("a"))
        .with_rings_of(16 << 20);
    assert!(plan(&counted).shared.is_empty());
}

#[test]
fn pairs_with_keys_are_matched_by_them() {
    let matched = Observation::new().match_by(keys("arg0"));
    assert!(!plan(&matched).shared.pairs_by_key);
    let pairs = plan(&matched.clone().time("a", "b"));
    assert!(pairs.shared.pairs_by_key && pairs.points[0].role.pair_key.is_some());
    assert!(!plan(&Observation::new().time("a", "b")).shared.pairs_by_key);
    let by_key = plan(&Observation::new().time("a", "b").time_by(keys("tid")));
    assert!(by_key.times_by_key && *by_key.key_names == ["a,b"]);
    let keyed = |it: &PlannedPoint| it.role.time_keys.is_some();
    assert!(!keyed(&by_key.points[0]) && keyed(&by_key.points[1]));
}

#[test]
fn results_of_sampled_calls_are_refused() {
    let watching = Observation::new().watch_functions(function("leaf"));
    let some = |observation: Observation| {
        let every = NonZeroU64::new(2).unwrap();
        let refusal = ObservationPlan::of(&observation.sample(every), program(), Arc::default());
        refusal.is_err()
    };
    assert!(!some(watching.clone()));
    assert!(some(watching.clone().watch_results()) && some(watching.watch_exits()));
}

/// sub $8,%rsp; call; add $8,%rsp; ret: the patch of its entry is a punned jump or, if that is not possible, the call is moved.
const WITH_CALL: &[u8] = b"\x48\x83\xec\x08\xe8\0\0\0\0\x48\x83\xc4\x08\xc3";
/// mov $1,%eax; ret
const PLAIN: &[u8] = b"\xb8\x01\0\0\0\xc3";

/// Returns a plan with two functions of `PLAIN` and one of `WITH_CALL` between them, besides probes.
fn plan_of_code(observation: &Observation) -> ObservationPlan {
    let codes = [PLAIN, WITH_CALL, PLAIN];
    let codes = (0..)
        .zip(codes)
        .map(|(index, code)| (FileAddr(0x60_0000 + 0x100 * index), code));
    let functions = ObservedFunctions::of_code(&codes.collect::<Vec<_>>(), LoadBias::NONE);
    ObservationPlan::of(observation, program(), Arc::new(functions)).unwrap()
}

fn function_points_of(plan: &ObservationPlan) -> Vec<(u64, usize)> {
    let points = plan.points.iter().filter(|it| it.site().is_none());
    let len = |it: &PlannedPoint| plan.patch_site(it).unwrap().0.displaced().len();
    points.map(|it| (it.point.address.0, len(it))).collect()
}

#[test]
fn refused_functions_have_no_points() {
    let refusal = Refusal::ChangedCode;
    let counted = Observation::new().count(Selector::name("a"));
    let mut plan = plan_of_code(&counted);
    let all = [(0x60_0000, 5), (0x60_0100, 4), (0x60_0200, 5)];
    assert_eq!(function_points_of(&plan), all);
    plan.refuse(&[]);
    assert_eq!(function_points_of(&plan), all);
    // The second function gets another patch.
    plan.try_next(&[(1, refusal.clone())]);
    assert_eq!(function_points_of(&plan), [all[0], (0x60_0100, 9), all[2]]);
    assert!(plan.functions.refused.is_empty());
    plan.try_next(&[(1, refusal.clone())]);
    assert_eq!(function_points_of(&plan), [all[0], all[2]]);
    assert_eq!(plan.functions.refused.len(), 1);
    // `refuse` also refuses functions that could be patched in another way.
    let mut plan = plan_of_code(&counted);
    plan.refuse(&[(0, refusal.clone()), (1, refusal.clone())]);
    assert_eq!(function_points_of(&plan), [all[2]]);
    assert!(plan.refuse_empty().is_ok());
    plan.refuse(&[(0, refusal)]);
    // The sites are still there, by address.
    assert_eq!(plan.points.len(), 2);
    assert!(plan.points.is_sorted_by_key(|it| it.point.address));
    let empty = plan.refuse_empty().err().unwrap();
    let ErrorKind::Function(FunctionError::NonePossible { refused, .. }) = empty.kind() else {
        panic!("{empty:?}");
    };
    assert_eq!(refused.len(), 3);
    // If refused functions may be left out, it is enough that there are sites.
    plan.leaves_out_refused = true;
    assert!(plan.refuse_empty().is_ok());
    plan.points.clear();
    assert!(plan.refuse_empty().is_err());
}

#[test]
fn call_once_is_made_at_one_point() {
    let mut plan = plan_of_code(&Observation::new().count(Selector::name("a")));
    let functions = Arc::make_mut(&mut plan.functions);
    let before = functions.functions[1].wanted.address;
    functions.calls_once = Some(CallOnce {
        before,
        callee: LiveAddr(0x1000),
        ret: LiveAddr(0x2000),
        pid: 1,
        word: ChangedWord {
            at: LiveAddr(0x3000),
            change: WordChange::Set,
        },
    });
    let called = |it: &&PlannedPoint| plan.calls_once_at(it).is_some();
    let called: Vec<LiveAddr> = plan
        .points
        .iter()
        .filter(called)
        .map(|it| it.point.address)
        .collect();
    assert_eq!(called, [before]);
}

#[test]
fn kernel_is_asked_about_words_of_c() {
    let asks = |observation: &Observation| plan_of_functions(observation).asks_kernel();
    let watching = Observation::new().watch_functions(function("leaf"));
    assert!(asks(&watching) && plan_of_functions(&watching).watches_functions());
    let counted = Observation::new().count_functions(function("leaf"));
    assert!(!asks(&counted) && !plan_of_functions(&counted).watches_functions());
    let counted = Observation::new().count_functions(function("fixture_command"));
    assert!(asks(&counted.only_where(expression("str(arg0) == \"x\""))));
    let of_probes = plan(&Observation::new().watch(Selector::name("a")));
    assert!(!of_probes.asks_kernel() && !of_probes.watches_functions());
}

#[test]
fn ocaml_functions_are_known_by_name_and_runtime() {
    let target = Talker::start(&test_support::program("service"));
    let plan = |selector: &str| {
        let counted = Observation::new().count_functions(function(selector));
        let functions = ObservedFunctions::find(target.pid(), &counted).unwrap();
        let counted = counted.count(Selector::name("a"));
        ObservationPlan::of(&counted, program(), Arc::new(functions)).unwrap()
    };
    let is_ocaml = |selector| {
        let plan = plan(selector);
        let [of_sites, of_functions] = [true, false].map(|is_site| {
            let points = plan
                .points
                .iter()
                .filter(|it| it.site().is_some() == is_site);
            points.map(|it| plan.is_of_ocaml(it)).collect::<Vec<bool>>()
        });
        assert!(!of_sites.is_empty() && !of_sites.contains(&true));
        of_functions
    };
    assert_eq!(is_ocaml("caml_alloc_string"), [false]);
    assert_eq!(is_ocaml("Stdlib.failwith"), [true]);
}

#[test]
fn sites_called_by_ocaml_are_known() {
    let target = Talker::start(&test_support::program("service"));
    let process = Process::open(target.pid()).unwrap();
    let image = Image::of(&process, Arc::default()).unwrap();
    let watching = Observation::new().watch(Selector::All);
    let of_ocaml = ObservationPlan::of(&watching, image.program, Arc::default()).unwrap();
    let watched = |plan: &ObservationPlan| -> Vec<bool> {
        let watched = plan.points.iter().filter_map(|it| it.role.watched.as_ref());
        watched.map(|it| it.is_ocaml).collect()
    };
    let are_called = watched(&of_ocaml);
    assert!(!are_called.is_empty() && !are_called.contains(&false));
    assert!(!watched(&plan(&watching)).contains(&true));
}

#[test]
fn stacks_and_pages_are_those_of_runtimes() {
    let target = Talker::start(&test_support::program("service"));
    let process = Process::open(target.pid()).unwrap();
    let image = Image::of(&process, Arc::default()).unwrap();
    let found = |observation: &Observation| {
        let program = image.program.clone();
        let mut plan = ObservationPlan::of(observation, program, Arc::default()).unwrap();
        plan.find_values_and_stacks(&process, &image);
        (plan.shared.stacks, plan.shared.value_pages)
    };
    let objects = image.program.objects().iter();
    let pages = ValuePages::of(objects.map(|object| (&*object.elf, object.bias)));
    let counted = Observation::new().count(Selector::All);
    assert_eq!(found(&counted), (StackCopies::None, ValuePages::default()));
    let watching = Observation::new().watch(Selector::All);
    assert_eq!(found(&watching), (StackCopies::None, pages));
    let (stacks, of_stacks) = found(&watching.with_stacks());
    assert!(stacks.may_ask_kernel() && of_stacks == pages);
}
