//! Whether the threads of a process may read their `fs` base, which distinguishes them in its trampolines.

use crate::process::Process;
use crate::process::load_bias::auxv_value;

/// `AT_HWCAP2` of getauxval(3).
const AT_HWCAP2: u64 = 26;

/// "Kernel allows FSGSBASE instructions available in Ring 3" (asm/hwcap2.h, since Linux 5.9).
const HWCAP2_FSGSBASE: u64 = 1 << 1;

/// Returns whether the threads may execute `rdfsbase`; false if that cannot be found out.
pub(super) fn may_be_read(process: &Process) -> bool {
    let auxv = process.read_of_living_thread("auxv");
    let hwcap2 = auxv.ok().and_then(|auxv| auxv_value(&auxv, AT_HWCAP2));
    hwcap2.is_some_and(|hwcap2| hwcap2 & HWCAP2_FSGSBASE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_says_the_same_as_the_auxiliary_vector() {
        let own = Process::open(std::process::id() as i32).unwrap();
        // Both since Linux 5.9, on processors that have the instructions.
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = text.lines().find(|line| line.starts_with("flags"));
        let has_instruction = flags.unwrap().split(' ').any(|flag| flag == "fsgsbase");
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0));
        let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(may_be_read(&own), has_instruction && version >= (5, 9));
    }
}
