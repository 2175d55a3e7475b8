//! A test in a process of its own: other tests start threads and children and open files meanwhile,
//! so what is counted in this process is only right where nothing else runs.

use std::any::type_name;
use std::process::Command;

/// Tells a process that it is to run the body of the test, and what for.
const ROLE: &str = "OCAML_PROBES_TEST_ROLE";

/// Runs `body` in a new process of this binary, with no other test.
pub(crate) fn alone<F: FnOnce()>(body: F) {
    if role().is_some() {
        return body();
    }
    let output = test_support::output(&mut again(&body, "alone"));
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// What this process was started for by `again`, if it was.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A command that runs the test to which the closure `of` belongs, and tells it its role.
pub(crate) fn again<F>(_of: &F, role: &str) -> Command {
    let path = type_name::<F>();
    let (_, test) = path.split_once("::").expect("crate::module::test");
    let test = test.strip_suffix("::{{closure}}").expect("a closure");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role);
    command
}
