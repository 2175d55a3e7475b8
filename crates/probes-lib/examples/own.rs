//! A program that switches a probe of its own on and off: `cargo run --example own -- NAME`. It has
//! those of the objects that it is linked with or has loaded.

use probes_lib::{Action, Actions, Selector, Target};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name] = args.as_slice() else {
        return Err("usage: own NAME".into());
    };
    let target = Target::current()?;
    for action in [Action::Enable, Action::Disable] {
        target.update(&Actions::of(action, Selector::name(name)))?;
        let states = target.states()?;
        let states = states.probes();
        let states: Vec<_> = states
            .map(|it| format!("{} {:?}", it.name(), it.state()))
            .collect();
        println!("{}", states.join(", "));
    }
    Ok(())
}
