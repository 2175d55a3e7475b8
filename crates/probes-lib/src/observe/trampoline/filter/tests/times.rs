//! Conditions about the time that a pair or call takes.

use super::*;

// promise: Observations: Compiled ranges of times are those of the interpreter (500 random expressions about `elapsed`)
#[test]
fn compiled_and_interpreted_times_agree() {
    use proptest::test_runner::{Config, TestRunner};
    use std::time::Duration;

    use crate::observe::layout::shared::{TIMES_FROM, TIMES_LEN};
    use crate::observe::trampoline::emit::unless_in_range;

    let code = finished(
        &SAVED_IF_TIMED,
        &"times",
        ValuePages::TableOfObserver,
        |a, context, over, _| {
            a.mov(rcx, rax)?;
            load(a, rbx, context.shared)?;
            unless_in_range(a, rcx, over)
        },
    );
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(500)
    });
    let near = || prop_oneof![0..50_u64, any::<u32>().prop_map(u64::from), any::<u64>()];
    let compared = (0..8_usize, near());
    let compared = prop::collection::vec(compared, 1..4);
    let seen = RefCell::new([0_u32; 2]);
    runner
        .run(
            &(compared, near(), -2..3_i64, hits()),
            |(compared, time, by, mut hit)| {
                let bound = compared[0].1.saturating_add_signed(by);
                let time = if by == 2 { time } else { bound };
                let mut expected = true;
                let texts: Vec<String> = compared
                    .iter()
                    .map(|(relation, bound)| {
                        // Larger ones cannot be written.
                        let bound = *bound >> 1;
                        let (text, holds) = match relation {
                            0 | 4 => (format!("elapsed < {bound}ns"), time < bound),
                            1 => (format!("elapsed <= {bound}ns"), time <= bound),
                            2 | 5 => (format!("elapsed > {bound}ns"), time > bound),
                            3 => (format!("elapsed >= {bound}ns"), time >= bound),
                            6 => (format!("{bound}ns < elapsed"), time > bound),
                            _ => (format!("{bound}ns >= elapsed"), time <= bound),
                        };
                        expected &= holds;
                        text
                    })
                    .collect();
                let text = texts.join(" && ");
                let expression: Expression = format!("{text} && arg0 == 1").parse().unwrap();
                let (rest, times) = expression.split_times().unwrap();
                let (rest, times) = (rest.unwrap(), times.unwrap());
                assert!(rest.filter(&scope()).is_ok());
                assert_eq!(
                    times.contains(Duration::from_nanos(time)),
                    expected,
                    "{time} {text}"
                );
                // A tick is a nanosecond here.
                let from = times.from.as_nanos() as u64;
                let many = times.until.as_nanos() as u64 - from;
                hit.arguments[0] = time;
                let answer = with_puppet(|puppet| {
                    let pid = puppet.pid.as_raw();
                    poke(pid, SHARED + TIMES_FROM, &from.to_le_bytes());
                    poke(pid, SHARED + TIMES_LEN, &many.to_le_bytes());
                    puppet.execute(&code, &text, &hit).rax
                });
                assert_eq!(answer == 1, expected, "{time} {text}");
                seen.borrow_mut()[usize::from(expected)] += 1;
                Ok(())
            },
        )
        .unwrap();
    assert!(seen.borrow().iter().all(|many| *many > 50), "{seen:?}");
}
