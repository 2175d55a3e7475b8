//! What it costs to evaluate an expression at each hit: a filter, keys, a histogram. bpftrace does so, too, at the same
//! site of the same process.

use std::path::Path;

use probes_lib::{Expression, Keys, Observation, Options, Selector, Target};

use crate::document::Table;
use crate::failure::{Failure, Result};
use crate::observe::ns;
use crate::observe::others::{self, AddedTime};
use crate::observe::workload::{Kind, Workload};
use crate::stats::Samples;

/// What a question costs.
pub(crate) struct QuestionCost {
    what: &'static str,
    /// In picoseconds for each hit, or each event: the most that it may add, and what it adds.
    goal: f64,
    adds: f64,
    bpftrace: AddedTime,
}

/// What is asked of each hit, as an observation and as a script for bpftrace.
struct Question {
    what: &'static str,
    goal: f64,
    kind: Kind,
    observation: Observation,
    /// The script for bpftrace, in which `@P` stands for `FILE:PROVIDER`.
    script: &'static str,
}

fn questions() -> Result<[Question; 5]> {
    let expression = |text: &str| -> Result<Expression> {
        let parsed = text.parse();
        parsed.map_err(|_| Failure::new(format!("{text} is not an expression")))
    };
    let keys = |text: &str| -> Result<Keys> {
        let parsed = text.parse();
        parsed.map_err(|_| Failure::new(format!("{text} is not a key")))
    };
    let count = |kind: Kind| Observation::new().count(Selector::name(kind.probe()));
    Ok([
        Question {
            what: "a filter that rejects",
            goal: 5e3,
            kind: Kind::Int,
            observation: count(Kind::Int).only_where(expression("u64(arg0) == 12345678901")?),
            script: "usdt:@P:int /arg0 == 12345678901/ { @ = count(); }",
        },
        Question {
            what: "counted by an integer",
            goal: 15e3,
            kind: Kind::Int,
            observation: count(Kind::Int).by(keys("u64(arg0)")?),
            script: "usdt:@P:int { @[arg0] = count(); }",
        },
        Question {
            what: "a histogram",
            goal: 12e3,
            kind: Kind::Int,
            observation: count(Kind::Int).histogram_of(expression("u64(arg0) & 1023")?),
            script: "usdt:@P:int { @ = hist(arg0 & 1023); }",
        },
        Question {
            what: "counted by a string",
            goal: 40e3,
            kind: Kind::String,
            observation: count(Kind::String).by(keys("str(arg0)")?),
            script: "usdt:@P:string { @[str(arg0)] = count(); }",
        },
        Question {
            what: "a pair by key, each event",
            goal: 40e3,
            kind: Kind::Pair,
            observation: Observation::new()
                .time("start", "stop")
                .match_by(keys("tid")?),
            script: "usdt:@P:start { @s[tid] = nsecs; } \
                     usdt:@P:stop /@s[tid]/ { @ = hist(nsecs - @s[tid]); delete(@s[tid]); }",
        },
    ])
}

/// Measures all questions, in a program with one thread.
pub(crate) fn measure(file: &Path, rounds: usize) -> Result<Vec<QuestionCost>> {
    let mut work = Workload::start(file, 1);
    let target = Target::open(work.pid())?;
    let questions = questions()?;
    let mut costs: Vec<(Samples, Samples)> = Vec::new();
    costs.resize_with(questions.len(), Default::default);
    for _ in 0..rounds {
        for (question, (bare, observed)) in questions.iter().zip(&mut costs) {
            work.run_only(question.kind);
            bare.push(work.sample()?.cpu_ps);
            let mut observer = target.observe(&question.observation, Options::default())?;
            observed.push(work.sample()?.cpu_ps);
            observer.remove()?;
        }
    }
    let measured = questions.iter().zip(costs);
    let costs = measured.map(|(question, (bare, observed))| {
        eprintln!("bench: {} with bpftrace", question.what);
        let provider = format!("{}:*", file.display());
        let script = question.script.replace("@P", &provider);
        Ok(QuestionCost {
            what: question.what,
            goal: question.goal,
            adds: observed.median() as f64 - bare.median() as f64,
            bpftrace: others::added_by_script(&mut work, question.kind, &script)?,
        })
    });
    costs.collect()
}

pub(crate) fn table(costs: &[QuestionCost]) -> String {
    let mut table = Table::new(&[
        "at each hit",
        "adds",
        "goal",
        "reached",
        "bpftrace adds",
        "times as much",
    ]);
    let mut reasons: Vec<&str> = Vec::new();
    for cost in costs {
        let (adds, times) = match &cost.bpftrace {
            Ok(adds) => (ns(*adds), format!("{:.0}", adds / cost.adds)),
            Err(why) => {
                reasons.push(why);
                ("not there".to_owned(), "–".to_owned())
            }
        };
        let reached = if cost.adds <= cost.goal { "yes" } else { "no" };
        let goal = format!("at most {:.0} ns", cost.goal / 1e3);
        let cells = [cost.what, &ns(cost.adds), &goal, reached, &adds, &times];
        table.row(cells.map(str::to_owned));
    }
    reasons.dedup();
    let reasons = reasons.iter().map(|why| format!("\nnot there: {why}.\n"));
    table.finish() + &reasons.collect::<String>()
}
