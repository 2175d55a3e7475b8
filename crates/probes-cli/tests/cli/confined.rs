//! Containers: each refusal names what the container lacks, and the process stays unchanged.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::unistd::geteuid;
use test_support::{Scratch, Talker, as_nobody, eventually, fixture, fixture_forms, process};

use crate::support::{Directory, image, run, run_command, states};
use crate::waits::filter_against;

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// The command that consists of the words of `command`, the tool, and the words of `line`; words
/// are separated by single spaces.
fn confined(command: &str, line: &str) -> Command {
    let mut words = command.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).arg(TOOL).args(line.split(' '));
    command
}

/// Asserts that `info` and `attach`, run by `command`, fail with the message `why` and the hint
/// `hint`, and change nothing.
#[track_caller]
fn refused(command: &str, pid: i32, why: &str, hint: &str) {
    let before = image(pid);
    for (line, end) in [
        ("info", ""),
        ("attach -enable-all", "; nothing was changed"),
        ("attach -live -enable-all", "; nothing was changed"),
    ] {
        let mut command = confined(command, &format!("{line} -pid {pid}"));
        let error = run_command(&mut command).failure();
        assert_eq!(error, format!("ocaml-probes: {why}{end}\nhint: {hint}\n"));
    }
    assert!(image(pid) == before);
}

/// Starts a program by `command`, whose words are separated by single spaces.
fn start_with_command(command: &str, program: &PathBuf) -> Talker {
    let mut words = command.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let mut talker = Talker::spawn(command.args(words).arg(program));
    talker.expect("ready");
    talker
}

/// The error for a process that cannot be observed, and its hint.
fn unobservable(pid: i32, reason: &str, hint: &str) -> String {
    format!("ocaml-probes: process {pid} {reason}; nothing was changed\nhint: {hint}\n")
}

const RISK: &str = "; or use -despite-seccomp, if you know that the filter allows mmap, munmap and (for watch) madvise: otherwise it may kill the process";

// promise: Observations: The tool says what a seccomp filter refuses, or why it cannot be read, with a
//    hint (2 × 4)
#[test]
fn seccomp_filter_against_observing_has_a_hint() {
    for file in fixture_forms("seccomp") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let call = "mmap of executable memory";
        let refused = unobservable(
            pid,
            &format!(
                "cannot be observed: observing injects {call}, and its seccomp filter kills it for that"
            ),
            &format!(
                "its filter would have to allow {call}; `attach` and `info` inject no system calls, and work"
            ),
        );
        let unreadable = unobservable(
            pid,
            "has a seccomp filter that only root can read, outside of containers: it may kill the process for \
             the system calls that observing injects",
            &format!("use sudo, outside of containers, to read it{RISK}"),
        );
        let expected = if geteuid().is_root() {
            &refused
        } else {
            &unreadable
        };
        for line in ["count", "watch -probe ping", "latency -pair ping,pong"] {
            let said = run(&format!("{line} -for 1ms -pid {pid}")).failure();
            assert_eq!(said, *expected);
        }
        if geteuid().is_root() {
            let filter = fixture("without_ptrace.exe").display().to_string();
            let line = format!("count -for 1ms -pid {pid}");
            let reader = unobservable(
                pid,
                "has a seccomp filter that cannot be read by a process that is under a seccomp filter itself: it \
                 may kill the process for the system calls that observing injects",
                &format!(
                    "run ocaml-probes outside of the container or service that restricts it{RISK}"
                ),
            );
            let said = run_command(&mut confined(&filter, &line)).failure();
            assert_eq!(said, reader);
        }
        target.hits();
    }
}

/// The address space of a process, in KiB.
fn mapped(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let words = line.unwrap().split_ascii_whitespace().next();
    words.unwrap().parse().unwrap()
}

/// Sets the soft limit of a process's address space: `unlimited`, or bytes.
fn limit_memory(pid: i32, limit: &str) {
    let mut prlimit = Command::new("prlimit");
    prlimit.args(["--pid", &pid.to_string(), &format!("--as={limit}:")]);
    assert!(prlimit.status().unwrap().success());
}

// promise: Observations: A process is not observed if its cgroup has less memory left than observing may use (4)
#[test]
fn memory_of_cgroup_is_left_to_the_process() {
    let Some(cgroup) = Cgroup::of_memory() else {
        // Only root may make one, and only where the file system of cgroups is writable.
        assert!(!geteuid().is_root() || Cgroup::is_unavailable());
        return;
    };
    let mut target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    cgroup.take(pid);
    let before = image(pid);
    let watch = format!("watch -probe plain -for 1ms -pid {pid}");
    cgroup.limit(24 << 20);
    let said = run(&watch).failure();
    let why =
        " KiB of memory are needed, but the memory limit of its cgroup allows 24576 KiB, of which ";
    assert!(said.contains(why), "{said}");
    assert!(
        said.contains("; nothing was changed\nhint: raise the limit (systemd: MemoryMax=,"),
        "{said}"
    );
    assert!(image(pid) == before);
    let count = run(&format!("count -for 1ms -pid {pid}"));
    assert_eq!(count.code, Some(0), "{count:?}");
    let doctor = run(&format!("doctor -pid {pid}"));
    assert!(
        doctor
            .stdout
            .contains("the memory limit of its cgroup is 25165824 bytes"),
        "{doctor:?}"
    );
    cgroup.limit(256 << 20);
    let watched = run(&watch);
    assert_eq!(watched.code, Some(0), "{watched:?}");
    target.hits();
}

/// A cgroup with a limit of memory. It is removed once its process has exited.
struct Cgroup {
    path: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    const V1: &str = "/sys/fs/cgroup/memory";
    const V2: &str = "/sys/fs/cgroup";

    /// Makes one; `None` if that is not possible here.
    fn of_memory() -> Option<Cgroup> {
        let name = format!("ocaml-probes-test-{}", std::process::id());
        [
            (Cgroup::V1, "memory.limit_in_bytes"),
            (Cgroup::V2, "memory.max"),
        ]
        .into_iter()
        .find_map(|(root, limit)| {
            let path = Path::new(root).join(&name);
            fs::create_dir(&path).ok()?;
            let cgroup = Cgroup { path, limit };
            cgroup.path.join(limit).exists().then_some(cgroup)
        })
    }

    fn is_unavailable() -> bool {
        let processes = Path::new(Cgroup::V1).join("cgroup.procs");
        fs::OpenOptions::new().write(true).open(processes).is_err()
    }

    fn take(&self, pid: i32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    fn limit(&self, bytes: u64) {
        fs::write(self.path.join(self.limit), bytes.to_string()).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let processes = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in processes.lines() {
            let parent = self.path.parent().unwrap().join("cgroup.procs");
            let _ = fs::write(parent, pid);
        }
        let _ = fs::remove_dir(&self.path);
    }
}

// promise: Observations: A process that has locked its memory is not observed by what reserves much (2)
#[test]
fn locked_memory_is_not_filled() {
    let mut target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let mut gdb = Command::new("gdb");
    gdb.args([
        "-batch",
        "-p",
        &pid.to_string(),
        "-ex",
        "print (int)mlockall(3)",
    ]);
    let locked = gdb.output().unwrap();
    let is_locked = String::from_utf8_lossy(&locked.stdout).contains("$1 = 0\n");
    assert!(is_locked || !geteuid().is_root(), "{locked:?}");
    let before = image(pid);
    let watched = run(&format!("watch -probe plain -for 1ms -pid {pid}"));
    if is_locked {
        let said = watched.failure();
        let why = "cannot be observed: it has locked its memory (mlockall), so that all of the ";
        assert!(said.contains(why), "{said}");
        let hint = "; nothing was changed\nhint: ask for what needs less memory: `count` without -by, then `latency`\n";
        assert!(said.ends_with(hint), "{said}");
        assert!(image(pid) == before);
    } else {
        assert_eq!(watched.code, Some(0), "{watched:?}");
    }
    let count = run(&format!("count -for 1ms -pid {pid}"));
    assert_eq!(count.code, Some(0), "{count:?}");
    target.hits();
}

// promise: Observations: A process is not observed if a limit of its memory would leave it less than observing takes, and
//    the error says how much that is (2 × 2 limits × 3)
#[test]
fn little_memory_is_left_to_the_process() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let before = image(pid);
        let used = mapped(pid);
        for (line, needed) in [
            ("count", 36),
            ("watch -probe plain", 41_000),
            ("latency -pair plain,watched", 4_600),
        ] {
            let line = format!("{line} -for 1ms -pid {pid}");
            // It does not fit, or leaves too little.
            for limit in [used + 8, used + needed * 3 / 2] {
                limit_memory(pid, &(limit * 1024).to_string());
                let said = run(&line).failure();
                let start = format!("ocaml-probes: process {pid} cannot be observed: ");
                let allowed = format!(
                    " KiB more have to be left to the program, but RLIMIT_AS allows {limit} KiB, of which {used} KiB are in use"
                );
                assert!(
                    said.starts_with(&start) && said.contains(&allowed),
                    "{said}"
                );
                assert!(said.contains("; nothing was changed\n"), "{said}");
                assert!(said.contains("hint: `prlimit --pid"), "{said}");
                assert_eq!(mapped(pid), used, "{said}");
            }
            assert!(image(pid) == before);
            limit_memory(pid, &((used + needed * 3) * 1024).to_string());
            let observed = run(&line);
            assert_eq!(observed.code, Some(0), "{observed:?}");
        }
        target.hits();
    }
}

// promise: Observations: `-despite-seccomp` observes a process whose seccomp filter cannot be read (2 × 4)
#[test]
fn despite_seccomp_observes_under_unreadable_filters() {
    let under = fixture("under_filters.exe").display().to_string();
    let docker = fixture("filters/docker.bpf").display().to_string();
    for file in fixture_forms("gen_ocaml_2") {
        let mut target = start_with_command(&format!("{under} {docker} --"), &file);
        let pid = target.pid();
        for line in ["count", "watch -probe plain", "latency -pair plain,watched"] {
            let line = format!("{line} -quiet -despite-seccomp -for 1ms -pid {pid}");
            run(&line).answer();
        }
        let cleaned = run(&format!(
            "observe -clean -despite-seccomp -format plain -quiet -pid {pid}"
        ));
        assert_eq!(cleaned.answer(), format!("{pid} 0\n"));
        target.hits();
    }
}

// promise: Containers: Where a seccomp filter forbids ptrace, `info` and `-live` work, and the
//    message names the filter (2 targets)
#[test]
fn info_and_live_work_where_seccomp_forbids_ptrace() {
    let filter = fixture("without_ptrace.exe").display().to_string();
    const WHY: &str = "this container's or service's seccomp filter blocks ptrace";
    const HINT: &str = "start the container with --cap-add=SYS_PTRACE";
    for file in fixture_forms("gen_ocaml_2") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let run = |line: &str| run_command(&mut confined(&filter, line));
        let shown = run(&format!("info -pid {pid}"));
        assert_eq!(shown.answer(), states(pid));
        let before = image(pid);
        let refused = run(&format!("attach -pid {pid} -enable plain")).failure();
        assert_eq!(
            refused,
            format!(
                "ocaml-probes: cannot attach to process {pid}: {WHY}; nothing was changed\n\
                 hint: {HINT}; or use -live, which does not use ptrace\n"
            )
        );
        assert!(image(pid) == before);
        let changed = run(&format!("attach -live -pid {pid} -enable plain"));
        assert_eq!(changed.answer(), "plain 0 -> 1, 1 site\n");

        let mut trace = confined(&filter, "trace -enable plain -prog");
        let refused = run_command(trace.arg(&file)).failure();
        let file = file.display();
        assert_eq!(
            refused,
            format!(
                "ocaml-probes: cannot trace {file} from its start: {WHY}; the program was not started\n\
                 hint: {HINT}\n"
            )
        );
    }
}

#[test]
fn filter_that_returns_any_error_is_named() {
    const PTRACE: u32 = 101;
    let scratch = Scratch::new();
    let path = scratch.file("filter");
    let file = fixture("gen_ocaml_2.pie");
    let target = Talker::start(&file);
    for errno in [Errno::EPERM, Errno::EACCES, Errno::ENOSYS, Errno::EIO] {
        filter_against(PTRACE, errno as u32, &path);
        let attach = format!("attach -enable plain -pid {}", target.pid());
        let trace = format!("trace -enable plain -prog {}", file.display());
        for line in [attach, trace] {
            let mut confined = Command::new(fixture("under_filters.exe"));
            confined.arg(&path).args(["--", TOOL]);
            let refused = run_command(confined.args(line.split(' '))).failure();
            assert!(
                refused.contains("seccomp filter blocks ptrace"),
                "{errno}: {refused}"
            );
        }
    }
}

// promise: Containers: A process in a user namespace that we may not enter is refused, and nothing
//    is changed (2 targets × 6 commands, memory compared byte by byte)
#[test]
fn process_in_a_sibling_user_namespace_is_refused() {
    const HINT: &str = "run ocaml-probes inside that container, or as root outside of it";
    for file in fixture_forms("gen_ocaml_2") {
        let target = start_with_command("unshare --user --map-root-user", &file);
        let pid = target.pid();
        let why = format!("process {pid} is in another user namespace");
        refused("unshare --user --map-root-user", pid, &why, HINT);
        refused("unshare --user --map-current-user", pid, &why, HINT);
        // From the parent namespace it is a process like any other.
        run(&format!("attach -pid {pid} -enable-all")).answer();
    }
}

/// Starts a program as nobody in a user namespace that belongs to root.
fn start_as_nobody_in_namespace_of_root(program: &PathBuf) -> Talker {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "sh", "-c"]);
    unshare.arg(r#"read line; exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0""#);
    let mut talker = Talker::spawn(unshare.arg(program));
    let directory = PathBuf::from(format!("/proc/{}", talker.pid()));
    eventually("it is in a namespace of its own", || {
        let namespace = |directory: &PathBuf| fs::read_link(directory.join("ns/user")).ok();
        (namespace(&directory)? != namespace(&"/proc/self".into())?).then_some(())
    });
    for map in ["uid_map", "gid_map"] {
        let mut file = fs::File::options()
            .write(true)
            .open(directory.join(map))
            .unwrap();
        file.write_all(b"0 0 65536").unwrap();
    }
    talker.send("");
    talker.expect("ready");
    talker
}

// promise: Containers: A process in a user namespace of root is refused to the user as whom it
//    runs, and nothing is changed (2 targets × 2 commands, memory compared byte by byte)
#[test]
fn process_in_namespace_of_root_is_refused() {
    if !geteuid().is_root() {
        // Only root can test this. An ordinary user tests the view from inside a user namespace:
        // every process outside of it belongs to other users.
        let command = "unshare --user --map-root-user";
        let error = run_command(&mut confined(command, "info -pid 1")).failure();
        assert!(error.contains("1 is in another user namespace"), "{error}");
        return;
    }
    // The build directory may be inaccessible to the user `nobody`.
    let scratch = Scratch::new();
    let tool = scratch.copy(TOOL.as_ref(), "ocaml-probes");
    for file in fixture_forms("gen_ocaml_2") {
        let file = scratch.copy(&file, "program");
        let target = start_as_nobody_in_namespace_of_root(&file);
        let pid = target.pid();
        let before = image(pid);
        for (flag, end) in [("-quiet", ""), ("-enable-all", "; nothing was changed")] {
            let mut nobody = as_nobody(&tool);
            let subcommand = if end.is_empty() { "info" } else { "attach" };
            nobody.args([subcommand, flag, "-pid", &pid.to_string()]);
            assert_eq!(
                run_command(&mut nobody).failure(),
                format!(
                    "ocaml-probes: process {pid} is in another user namespace{end}\n\
                     hint: run ocaml-probes inside that container, or as root outside of it\n"
                )
            );
        }
        assert!(image(pid) == before);
    }
}

// promise: Containers: The message in a container without `CAP_SYS_PTRACE` names the missing
//    capability (2 targets × 6 commands, memory compared byte by byte)
#[test]
fn missing_ptrace_capability_of_a_container_is_named() {
    const HINT: &str = "start the container with --cap-add=SYS_PTRACE";
    const LACKS: &str = "and this container or service lacks CAP_SYS_PTRACE";
    let directory = Directory::new("incapable");
    for file in fixture_forms("gen_ocaml_2") {
        let target = start_with_command("unshare --user --map-root-user", &file);
        let pid = target.pid();
        let inside = format!(
            "nsenter --user --preserve-credentials --target {pid} setpriv --bounding-set=-sys_ptrace"
        );
        let why = format!("process {pid} has capabilities that the calling process lacks, {LACKS}");
        refused(&inside, pid, &why, HINT);

        if geteuid().is_root() {
            let file = directory.copy(&file, "program");
            let as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups";
            let target = start_with_command(as_nobody, &file);
            let pid = target.pid();
            let why = format!("process {pid} belongs to uid 65534 (nobody), {LACKS}");
            let hint = format!("{HINT}, or be that user: sudo -u nobody");
            refused("setpriv --bounding-set=-sys_ptrace", pid, &why, &hint);
        }
    }
}

// promise: Containers: The error for a pid that exists only inside a container names the pid that
//    the process has outside (2 targets)
#[test]
fn error_for_pid_in_container_names_outer_pid() {
    // Half the pid range away from the pids that are being assigned out here.
    let pid_max: i32 = fs::read_to_string("/proc/sys/kernel/pid_max")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let first = 300 + (std::process::id() as i32 + pid_max / 2) % (pid_max - 400);
    // Each file gets a different pid: the process that had the previous one may take
    // a while to exit.
    let mut files = fixture_forms("gen_ocaml_2").into_iter().peekable();
    for inside in first..first + 100 {
        let Some(file) = files.peek() else {
            return;
        };
        let mut unshare = Command::new("unshare");
        unshare.args([
            "--kill-child",
            "--user",
            "--map-root-user",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
        ]);
        unshare.args([
            "sh",
            "-c",
            r#"echo "$1" >/proc/sys/kernel/ns_last_pid; "$0"; true"#,
        ]);
        unshare.arg(file).arg((inside - 1).to_string());
        let mut outer = Talker::spawn(unshare.stderr(Stdio::inherit()));
        outer.expect("ready");
        let init = process::children(outer.pid())[0];
        let outside = process::children(init)[0];
        let name = process::status(outside, "Name");
        // Another process or thread out here may have the same id.
        let is_used = || Path::new(&format!("/proc/{inside}")).exists();
        let was_used = is_used();
        let info = run(&format!("info -pid {inside}"));
        if was_used || is_used() {
            continue;
        }
        assert_eq!(
            info.failure(),
            format!(
                "ocaml-probes: no process {inside}\nhint: it has exited, or you mean the process that \
                 has this pid in its container: -pid {outside} ({name})\n"
            )
        );
        let shown = run(&format!("info -json -pid {outside}")).json();
        assert_eq!(shown["pid"], outside);
        files.next();
    }
    assert_eq!(files.next(), None, "every pid was in use");
}

#[test]
fn proc_of_another_pid_namespace_is_refused() {
    for file in fixture_forms("gen_ocaml_2") {
        let outside = Talker::start(&file);
        let before = image(outside.pid());
        let tool = env!("CARGO_BIN_EXE_ocaml-probes");
        let pid = outside.pid();
        for line in [
            format!("attach -enable-all -pid {pid}"),
            format!("attach -live -enable-all -pid {pid}"),
            format!("info -pid {pid}"),
            "ps".to_owned(),
            format!("trace -prog {}", file.display()),
        ] {
            let mut unshare = Command::new("unshare");
            // The pids in its /proc are not those that system calls take.
            unshare.args(["--user", "--map-root-user", "--pid", "--fork", tool]);
            let failure = run_command(unshare.args(line.split(' '))).failure();
            let why = "/proc shows another pid namespace than that of the calling process";
            assert!(failure.contains(why), "{line}: {failure}");
            assert!(
                failure.contains("unshare --mount-proc"),
                "{line}: {failure}"
            );
        }
        assert!(image(pid) == before);
    }
}

/// The tool with the words of `line`, run as nobody where /proc is mounted with `hidepid` by root.
fn under_hidepid(mode: u8, tool: &Path, line: &str) -> Command {
    let script = format!(
        "mount -t proc -o hidepid={mode} proc /proc && \
         exec setpriv --reuid=65534 --regid=65534 --clear-groups -- \"$@\""
    );
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", &script, "-"]);
    unshare.arg(tool).args(line.split(' '));
    unshare
}

// promise: Containers: A process that /proc hides (`hidepid`) is not said to have exited (3 modes × 4 commands)
#[test]
fn process_that_proc_hides_is_named() {
    if !geteuid().is_root() {
        // Only root may mount it like that.
        return;
    }
    let scratch = Scratch::new();
    let tool = scratch.copy(TOOL.as_ref(), "ocaml-probes");
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let why =
        format!("process {pid} is hidden from this user by /proc, which is mounted with hidepid");
    for mode in [1, 2, 4] {
        for (line, end) in [
            ("info", ""),
            ("count -for 1ms", "; nothing was changed"),
            ("attach -enable-all", "; nothing was changed"),
            ("attach -live -enable-all", "; nothing was changed"),
        ] {
            let line = format!("{line} -pid {pid}");
            let said = run_command(&mut under_hidepid(mode, &tool, &line)).failure();
            let expected = format!("ocaml-probes: {why}{end}\nhint: use sudo\n");
            assert_eq!(said, expected, "hidepid={mode}: {line}");
        }
        // One that does not exist is not hidden. proc_sys_kernel_pid_max(5): pids are below 2^22.
        let said = run_command(&mut under_hidepid(mode, &tool, "info -pid 4194305")).failure();
        assert!(said.contains("no process 4194305\n"), "{said}");
        // Not `ps`: other processes of this user may have probes.
        let line = "info -name there_is_no_such_program";
        let found = run_command(&mut under_hidepid(mode, &tool, line));
        assert_eq!(found.code, Some(1), "{found:?}");
        assert!(found.stderr.contains("mounted with hidepid"), "{found:?}");
    }
}

/// The tool with these words, where /proc is empty.
pub(crate) fn without_proc(line: &str) -> Command {
    let mut unshare = Command::new("unshare");
    if !geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    unshare.args(["--mount", "sh", "-c"]);
    unshare.args([r#"mount -t tmpfs none /proc && exec "$@""#, "-", TOOL]);
    unshare.args(line.split(' '));
    unshare
}

#[test]
fn serve_by_name_needs_proc() {
    let line = "serve -name service -listen 127.0.0.1:0";
    let said = run_command(&mut without_proc(line)).failure();
    assert!(said.contains("/proc is not mounted"), "{said}");
}

#[test]
fn trace_that_follows_needs_proc() {
    for flag in ["", " -follow", " -follow -wait"] {
        let mut trace = without_proc(&format!("trace -enable plain{flag} -prog"));
        let said = run_command(trace.arg(fixture("gen_ocaml_2.pie"))).failure();
        assert!(said.contains("/proc is not mounted"), "{flag}: {said}");
        assert!(
            said.contains("; the program was not started\n"),
            "{flag}: {said}"
        );
    }
}
