//! Enables or disables (toggles) a probe of a running program: `cargo run --example toggle -- PID
//! NAME`.

use probes_lib::{Action, Actions, Selector, State, Target};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [pid, name] = args.as_slice() else {
        return Err("usage: toggle PID NAME".into());
    };
    let target = Target::open(pid.parse()?)?;
    let on = target
        .states()?
        .probe(name)
        .is_some_and(|probe| probe.state() == State::Enabled);
    let action = if on { Action::Disable } else { Action::Enable };
    let report = target.update(&Actions::of(action, Selector::name(name)))?;
    println!("{action:?}d {name}, stopped for {:?}", report.stopped);
    Ok(())
}
