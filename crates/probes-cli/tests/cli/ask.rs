//! The twenty questions of docs/ask.md: each command answers as the page says, on a running program.

use std::process::Command;

use test_support::{Guard, output, program};

const PAGE: &str = include_str!("../../../../docs/ask.md");

/// A question of the page: its command, and the lines of its answer.
pub(crate) struct Question {
    /// The whole command line.
    command: &'static str,
    answer: Vec<&'static str>,
}

impl Question {
    /// The first question whose process has this pid in the page.
    pub(crate) fn about(pid: &str) -> Question {
        let found = questions().into_iter().find(|it| it.command.contains(pid));
        found.unwrap()
    }

    /// The flags after the pid.
    pub(crate) fn flags(&self) -> &'static str {
        let (_, after) = self.command.split_once(" -pid ").unwrap();
        after.split_once(' ').unwrap().1
    }

    /// Asserts that each line of the answer was printed, with the same words and other numbers, and that no other
    /// lines were printed, except more slow pairs.
    pub(crate) fn assert_answered(&self, stdout: &str) {
        let printed = stdout.lines().filter(|it| !is_bar(it));
        let shapes: Vec<String> = printed.map(shape).collect();
        for line in &self.answer {
            let is_there = shapes.contains(&shape(line));
            assert!(
                is_there,
                "{}: no line like {line} in\n{stdout}",
                self.command
            );
        }
        let is_whole = shapes.len() == self.answer.len() || self.command.contains(" -over ");
        assert!(is_whole, "{}: other lines in\n{stdout}", self.command);
    }
}

/// The questions, in their order.
fn questions() -> Vec<Question> {
    let (_, section) = PAGE.split_once("\n## Twenty questions\n").unwrap();
    let question = |(number, part): (usize, &'static str)| {
        assert!(part.starts_with(&format!("{number}. ")), "{part}");
        let (_, block) = part.split_once("```console\n$ ").unwrap();
        let (block, script) = block.split_once("```\n").unwrap();
        // How bpftrace answers it, or why it does not.
        assert!(script.trim().len() > 20, "{part}");
        let (command, answer) = block.split_once('\n').unwrap();
        Question {
            command,
            answer: answer.lines().filter(|it| !is_bar(it)).collect(),
        }
    };
    let parts = section.split("\n### ").skip(1);
    (1..).zip(parts).map(question).collect()
}

/// Whether a line is a bar of a histogram: bars differ in each run.
fn is_bar(line: &str) -> bool {
    line.contains(" |")
}

/// A line with `#` for each number.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    let is_number = |it: char| it.is_ascii_digit() || it == '.';
    for word in line.split(' ') {
        if !shape.is_empty() {
            shape.push(' ');
        }
        if word.starts_with("0x") {
            shape.push_str("0x#");
            continue;
        }
        let mut rest = word;
        while let Some(at) = rest.find(|it: char| it.is_ascii_digit()) {
            shape.push_str(&rest[..at]);
            shape.push('#');
            rest = rest[at..].trim_start_matches(is_number);
        }
        shape.push_str(rest);
    }
    shape
}

#[test]
fn shapes_are_lines_without_numbers() {
    assert_eq!(shape("12 1.5 a 0x7f2 [8, 16)"), "# # a 0x# [#, #)");
    assert_eq!(
        shape("page=\"<p>6</p>\" x.ml:31"),
        "page=\"<p>#</p>\" x.ml:#"
    );
}

// promise: Observations: The twenty questions of docs/ask.md are answered by a line each, as the page says (20 commands)
#[test]
fn twenty_questions_are_answered_as_documented() {
    let mut service = Command::new(program("service"));
    // Almost no pause between ticks, and a small minor heap, so that it is collected.
    service.arg("5").env("OCAMLRUNPARAM", "s=4k");
    service.stdout(std::process::Stdio::null());
    let service = Guard::spawn(&mut service);
    let all = questions();
    assert_eq!(all.len(), 20);
    // The others are about PostgreSQL.
    for question in all.iter().filter(|it| it.command.contains(" -pid 4242 ")) {
        let words = question.command.replace("4242", &service.pid().to_string());
        let words = words.replace("-for 10s", "-for 1s");
        let words = words.strip_prefix("ocaml-probes ").unwrap();
        let tool = env!("CARGO_BIN_EXE_ocaml-probes");
        let asked = output(Command::new("sh").args(["-c", &format!("'{tool}' {words}")]));
        let stderr = String::from_utf8_lossy(&asked.stderr);
        assert!(asked.status.success(), "{words}: {stderr}");
        question.assert_answered(&String::from_utf8_lossy(&asked.stdout));
    }
}
