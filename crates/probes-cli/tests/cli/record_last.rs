//! `record -last`: a flight recorder, and hits that end a recording.

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::{Scratch, Talker, program};

use crate::record::{FORMATS, limited_command, read, recording, slices, started};
use crate::support::{is_observed, object};

#[test]
fn flight_recorder_keeps_the_last_millisecond() {
    let scratch = Scratch::new();
    for format in FORMATS {
        let mut target = Talker::start(&program("calls"));
        let file = scratch.file(format);
        File::create(&file).unwrap();
        let flags = ["-fn", "Calls.leaf,Calls.work", "-last", "1ms", "-json"];
        let tool = recording(target.pid(), &flags, &file);
        target.ask("run 1 20000", "calls");
        assert_eq!(fs::metadata(&file).unwrap().len(), 0);
        let report = object(&tool.end().answer());
        let timeline = read(&file);
        let all = timeline["slices"].as_array().unwrap();
        assert_eq!(report["slices"], all.len());
        assert!(!all.is_empty() && all.len() < 20_001);
        assert!(report["last_seconds"].as_f64().unwrap() <= 0.001);
        // `work` was called before the last millisecond, and has returned within it.
        let outer = slices(&timeline, "Calls.work");
        assert!(outer.len() <= 1);
        for one in outer {
            assert!(one["args"]["began_ns_earlier"].as_u64().unwrap() > 0);
        }
    }
}

/// The names in the directory of a file.
fn names_beside(file: &Path) -> Vec<String> {
    let entries = fs::read_dir(file.parent().unwrap()).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

// promise: Time lines: A flight recorder that cannot write its file leaves the old one as it was, or none, and no other (3 formats)
#[test]
fn flight_recorder_keeps_the_old_file() {
    for format in FORMATS {
        let scratch = Scratch::new();
        let mut target = Talker::start(&program("calls"));
        let file = scratch.file(format);
        // The latter are more than are kept.
        for (old, rounds) in [(Some("old"), 300), (None, 200_000)] {
            let before = names_beside(&file);
            let _ = fs::remove_file(&file);
            if let Some(old) = old {
                fs::write(&file, old).unwrap();
            }
            let flags = ["-fn", "Calls.*", "-last", "1h", "-json"];
            let tool = started(limited_command(8, target.pid(), &flags, &file), "stopped ");
            target.ask(&format!("run 1 {rounds}"), "calls");
            let done = tool.end();
            assert!(!done.stderr.contains("only the last"), "{}", done.stderr);
            let expected = format!(
                "cannot write {}: File too large; the file is as it was before",
                file.display()
            );
            assert!(done.stderr.contains(&expected), "{}", done.stderr);
            assert_eq!(done.code, Some(1));
            let report = object(&done.stdout);
            assert_eq!(
                (&report["bytes"], &report["slices"]),
                (&0.into(), &0.into())
            );
            assert_eq!(fs::read_to_string(&file).ok().as_deref(), old);
            let names = names_beside(&file);
            let own = names.iter().filter(|it| !before.contains(it));
            assert!(own.eq(old.map(|_| format)), "{names:?}");
            assert!(!is_observed(target.pid()));
        }
    }
}

#[test]
fn flight_recorder_replaces_the_file_as_a_whole() {
    let scratch = Scratch::new();
    let (file, link) = (scratch.file("old.json"), scratch.file("link.json"));
    let mut target = Talker::start(&program("calls"));
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    symlink("old.json", &link).unwrap();
    let mut old = File::open(&file).unwrap();
    let before = names_beside(&file);
    let mut record = |flags: &[&str], to: &Path| {
        let tool = recording(target.pid(), flags, to);
        target.ask("run 1 20", "calls");
        tool.end().answer();
        assert_eq!(names_beside(&file), before);
    };
    let flags = ["-fn", "Calls.leaf", "-last", "1h"];
    record(&flags, &link);
    assert_eq!(slices(&read(&link), "Calls.leaf").len(), 30);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    // The old file, which is still open, is unchanged.
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    // A file with several names stays the same file.
    fs::remove_file(&link).unwrap();
    fs::hard_link(&file, &link).unwrap();
    record(&flags, &file);
    assert_eq!(slices(&read(&link), "Calls.leaf").len(), 30);
    // A file that was removed is created again.
    fs::remove_file(&link).unwrap();
    let tool = recording(target.pid(), &flags, &file);
    target.ask("run 1 20", "calls");
    fs::remove_file(&file).unwrap();
    tool.end().answer();
    assert_eq!(slices(&read(&file), "Calls.leaf").len(), 30);
}

// promise: Time lines: A flight recorder that is interrupted again while it writes leaves one whole file, and no other (20)
#[test]
fn interrupted_flight_recorder_leaves_one_file() {
    let scratch = Scratch::new();
    let file = scratch.file("twice.json");
    fs::write(&file, "[]").unwrap();
    let before = names_beside(&file);
    let mut target = Talker::start(&program("calls"));
    for milliseconds in 0..20 {
        let flags = ["-fn", "Calls.*", "-last", "1h", "-force"];
        let tool = recording(target.pid(), &flags, &file);
        target.ask("run 1 500", "calls");
        let pid = Pid::from_raw(tool.tool.pid());
        kill(pid, Signal::SIGINT).unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        tool.end();
        assert_eq!(names_beside(&file), before);
        read(&file);
    }
}

#[test]
fn probe_or_slow_pair_ends_the_recording() {
    let scratch = Scratch::new();
    let file = scratch.file("end.json");
    let target = Talker::start(&program("service"));
    let flags = ["-pair", "req_start,req_end", "-until", "tick"];
    let run = recording(target.pid(), &flags, &file).until_end();
    assert!(run.stderr.contains("tick was hit\n"), "{}", run.stderr);
    let timeline = read(&file);
    assert_eq!(timeline["instants"][0]["name"], "tick");
    let flags = ["-pair", "req_start,req_end", "-over", "1ns", "-last", "10s"];
    let run = recording(target.pid(), &flags, &file).until_end();
    let took = "req_start,req_end took ";
    assert!(run.stderr.contains(took), "{}", run.stderr);
    assert!(!slices(&read(&file), "req_start,req_end").is_empty());
}
