//! Lists the probes of a file: `cargo run --example list -- FILE`.

use probes_lib::ProbeTable;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("usage: list FILE")?;
    for probe in ProbeTable::read(file)?.probes() {
        println!("{} ({} sites)", probe.name(), probe.sites().len());
    }
    Ok(())
}
