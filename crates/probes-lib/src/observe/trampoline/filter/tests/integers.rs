//! Integers: in which registers they are, and the buckets of histograms that they are added to.

use super::*;

// promise: Observations: Compiled integers of expressions are those of the interpreter (2,000 random expressions, with random arguments and memory)
#[test]
fn compiled_and_interpreted_integers_agree() {
    use proptest::test_runner::{Config, TestRunner};
    let cases = std::env::var("EXPRESSION_CASES").map_or(2000, |many| many.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases)
    });
    let texts = (numbers(), any::<bool>()).prop_map(|(text, is_signed)| {
        if is_signed {
            text
        } else {
            format!("u64({text})")
        }
    });
    let (typed, untyped) = (Cell::new(0_u32), Cell::new(0_u32));
    runner
        .run(&(texts, hits()), |(text, hit)| {
            let expression: Expression = text.parse().unwrap();
            let Ok(integer) = expression.integer(&scope()) else {
                // Too many numbers at a time.
                return Ok(());
            };
            let compiled = with_puppet(|puppet| puppet.integer(&integer, &hit));
            assert_eq!(compiled, integer.value(&hit), "{text} with {hit:x?}");
            let seen = if compiled.is_some() { &typed } else { &untyped };
            seen.set(seen.get() + 1);
            Ok(())
        })
        .unwrap();
    let seen = [typed.get(), untyped.get()];
    assert!(seen.iter().all(|many| *many > cases / 10), "{seen:?}");
}

#[test]
fn integers_take_all_registers_and_no_more() {
    let tree = |depth| (0..depth).fold("arg2".to_owned(), |tree, _| format!("({tree} + {tree})"));
    let largest: Expression = tree(4).parse().unwrap();
    let integer = largest.integer(&scope()).unwrap();
    assert_eq!(integer.number.registers(), POOL.len());
    assert!(!code_of_integer(&integer, ValuePages::TableOfObserver).is_empty());
    let larger: Expression = tree(5).parse().unwrap();
    assert!(larger.integer(&scope()).is_err());
}

#[test]
fn integers_in_registers_need_no_memory() {
    for (expression, saved) in [
        ("arg0", 2),
        ("arg2 * 3 + arg4", 2),
        ("(arg0 + arg1) * (arg2 + arg4)", 8),
    ] {
        let expression: Expression = expression.parse().unwrap();
        let role = role_of_integer(&expression.integer(&scope()).unwrap());
        assert!(!role.reads_memory());
        assert_eq!(saved_of_integer(&role).len(), saved);
    }
    for expression in ["arg5", "u64(arg5)", "len(arg0)", "arg0.1", "1 + tag(arg0)"] {
        let expression: Expression = expression.parse().unwrap();
        let role = role_of_integer(&expression.integer(&scope()).unwrap());
        assert!(role.reads_memory());
    }
    for expression in ["arg0 == 42", "arg2 > 5 && arg1 != arg6 || arg4 & 3 == 1"] {
        let expression: Expression = expression.parse().unwrap();
        let filter = expression.filter(&scope()).unwrap();
        assert!(!role(&filter).reads_memory());
        assert_eq!(saved(&role(&filter)).len(), 2);
    }
    for expression in [
        "arg5 == 1",
        "arg0 == \"a\"",
        "len(arg0) == 1",
        "arg0.1 == 1",
        "float(arg0) < 1.",
    ] {
        let expression: Expression = expression.parse().unwrap();
        let filter = expression.filter(&scope()).unwrap();
        assert!(role(&filter).reads_memory());
    }
}

/// Returns code that adds what is in r12 to a histogram.
fn code_of_values(role: &HistogramRole, layout: ValuesLayout) -> Vec<u8> {
    finished(
        values::saved(None, role),
        role,
        ValuePages::TableOfObserver,
        |a, mut context, _, untyped| {
            context.layout.values = layout;
            values::record(a, role, None, context, untyped)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    // Each number in each kind of histogram: buckets, sum and extremes are those of the layout.
    #[test]
    fn values_are_added_to_their_bucket(
        numbers in prop::collection::vec(
            prop_oneof![any::<u64>(), 0_u64..3000, (0_u64..3000).prop_map(|it| it.wrapping_neg())],
            1..20,
        ),
        near in -3_i64..3,
    ) {
        let puppet = Puppet::new();
        let borders = [0, 1 << 10, 1 << 11, 1 << 40, i64::MAX, i64::MIN, 50, 1000, -7];
        let borders = borders.map(|it: i64| it.wrapping_add(near) as u64);
        // The last step of a range below has this value alone.
        let numbers: Vec<u64> = numbers.into_iter().chain(borders).chain([-51_i64 as u64]).collect();
        let ranges = [
            "",
            "0,1000,1",
            "-7,1000,50",
            "-2048,2048,16",
            "-100,-50,7",
            "-9000000000000000000,9000000000000000000,9000000000000001",
        ];
        for (range, expression) in ranges.into_iter().flat_map(|it| [(it, "arg2"), (it, "u64(arg2)")]) {
            let linear: Option<Linear> = range.parse().ok();
            let layout = ValuesLayout {
                histograms: 2,
                steps: linear.map_or(0, Linear::steps),
            };
            let expression: Expression = expression.parse().unwrap();
            let integer = expression.integer(&scope()).unwrap();
            let is_signed = integer.is_signed();
            let role = HistogramRole {
                number: 1,
                integer: Arc::new(role_of_integer(&integer)),
                linear,
            };
            let code = code_of_values(&role, layout);
            let group = ((STACK >> STACK_PART_BITS) as u32).wrapping_mul(0x9e37_79b9) >> 28;
            let shared = SharedLayout { values: layout, ..LAYOUT };
            let at = SHARED + shared.values();
            let len = layout.len() as usize;
            poke(puppet.pid.as_raw(), at, &vec![0; len]);
            let mut expected = vec![0_u64; len / 8];
            let header_at = layout.header(1, group.into());
            let first_bucket = layout.first_bucket(1, group.into()) as usize / 8;
            for number in &numbers {
                let mut arguments = [0; 7];
                arguments[2] = *number;
                let hit = RecordedHit {
                    arguments,
                    words: BTreeMap::new(),
                    readable: 0,
                    is_valid: true,
                    may_ask: true,
                };
                prop_assert_eq!(puppet.execute(&code, &role, &hit).rax, 1);
                let value = if is_signed { i128::from(*number as i64) } else { i128::from(*number) };
                let ordered = order(*number, is_signed);
                let field = |of: u64| (header_at + of) as usize / 8;
                let most = &mut expected[field(header::GREATEST)];
                *most = (*most).max(ordered);
                let least = &mut expected[field(header::LEAST)];
                *least = (*least).max(!ordered);
                let bucket = layout.bucket(value, linear);
                let (least, most) = layout.values_of(bucket, linear);
                if least.is_none() || least != most {
                    let sum = &mut expected[field(header::SUM)];
                    *sum = sum.wrapping_add(*number);
                }
                expected[first_bucket + bucket as usize] += 1;
            }
            let found = peek(puppet.pid.as_raw(), at, len);
            let found: Vec<u64> = found
                .chunks_exact(8)
                .map(|it| u64::from_le_bytes(it.try_into().unwrap()))
                .collect();
            let differs = |(index, (one, other)): (usize, (&u64, &u64))| {
                (one != other).then_some((index, *one, *other))
            };
            let both = found.iter().zip(&expected).enumerate();
            let different: Vec<_> = both.filter_map(differs).collect();
            prop_assert!(different.is_empty(), "{:?} of {:?}: {:?}", role, numbers, different);
        }
    }
}
