//! A test in its own process: other tests start threads and children and open files meanwhile, so
//! counts of these in this process are right only if nothing else runs.

use std::any::type_name;
use std::process::Command;
use std::time::Duration;

/// The environment variable that holds the role of a process started by [`rerun_command`].
const ROLE: &str = "OCAML_PROBES_TEST_ROLE";

/// How long a test in its own process may take, as a whole; each of its steps has its own deadline.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs `body` in a new process of this binary, with no other test.
pub(crate) fn alone<F: FnOnce()>(body: F) {
    if role().is_some() {
        return body();
    }
    let mut command = rerun_command(&body, "alone");
    let output = test_support::output_within(LIMIT, &mut command, || {});
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The role for which [`rerun_command`] started this process, if it did.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A command that runs the test to which the closure `of` belongs, with a role.
pub(crate) fn rerun_command<F>(_of: &F, role: &str) -> Command {
    let path = type_name::<F>();
    let (_, test) = path.split_once("::").expect("crate::module::test");
    let test = test.strip_suffix("::{{closure}}").expect("a closure");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role);
    command
}
