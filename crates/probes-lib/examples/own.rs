//! A program that enables a probe of its own, and undoes that:
//! `cargo run --example own -- NAME`. Its probes are those of the objects that it is linked with or has loaded.

use probes_lib::{Action, Actions, Options, Selector, Target};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name] = args.as_slice() else {
        return Err("usage: own NAME".into());
    };
    let target = Target::current()?;
    let report = target.update(&Actions::of(Action::Enable, Selector::name(name)))?;
    print_states(&target)?;
    target.undo(&report, Options::default())?;
    print_states(&target)?;
    Ok(())
}

fn print_states(target: &Target) -> probes_lib::Result<()> {
    for probe in target.states()?.probes() {
        println!("{} {:?}", probe.name(), probe.state());
    }
    Ok(())
}
