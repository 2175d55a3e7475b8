//! The machine, as far as it matters to the figures; nothing that identifies it.

use std::fs;

use crate::failure::{Failure, Result};

/// Returns a list in Markdown: the processor and how many there are, memory, kernel, load.
pub(crate) fn describe() -> Result<String> {
    let cpu = read("/proc/cpuinfo")?;
    let model = field(&cpu, "model name").unwrap_or("unknown");
    let processors = cpu.lines().filter(|l| l.starts_with("processor")).count();
    let memory = read("/proc/meminfo")?;
    let memory = field(&memory, "MemTotal")
        .and_then(|total| total.strip_suffix(" kB")?.parse().ok())
        .map_or(0, |kib: u64| kib.div_ceil(1 << 20));
    let kernel = read("/proc/sys/kernel/osrelease")?;
    // Only the version, without the build.
    let kernel = kernel.trim().split('-').next().unwrap_or("unknown");
    let load = read("/proc/loadavg")?;
    let load = load.split(' ').next().unwrap_or("unknown");
    let virtual_machine = if cpu.contains(" hypervisor") {
        ", virtual"
    } else {
        ""
    };
    Ok(format!(
        "- processor: {model}{virtual_machine}, {processors} processors\n\
         - memory: {memory} GiB\n\
         - kernel: Linux {kernel}\n\
         - load average at the start: {load}\n"
    ))
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(Failure::of(format!("cannot read {path}")))
}

fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}
