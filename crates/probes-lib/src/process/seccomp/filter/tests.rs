//! The kernel as an oracle: a process makes the call under the same filters. And what real filters say.

use std::fmt::Write;
use std::process::Command;

use libc::sock_filter;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use test_support::{Talker, fixture};

use super::*;

fn instruction(code: u32, k: u32) -> sock_filter {
    branch(code, 0, 0, k)
}

fn branch(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    let code = code as u16;
    sock_filter { code, jt, jf, k }
}

fn call(number: i64, arguments: [u64; 6]) -> SeccompData {
    SeccompData {
        number: number as u32,
        instruction_pointer: 0x5555_5555_6789,
        arguments,
    }
}

/// Executes calls under filters.
struct Oracle {
    talker: Talker,
    instruction_pointer: u64,
}

impl Oracle {
    fn start() -> Oracle {
        let mut talker = Talker::spawn(&mut Command::new(fixture("filtered_call.exe")));
        let line = talker.expect("ready ");
        let address = line.trim_start_matches("ready ");
        Oracle {
            talker,
            instruction_pointer: u64::from_str_radix(address, 16).unwrap(),
        }
    }

    /// What becomes of a call, in the oracle's words.
    fn ask(&mut self, filters: &[SeccompFilter], call: &SeccompData) -> String {
        let mut line = format!("{:x}", call.number);
        for argument in call.arguments {
            write!(line, " {argument:x}").unwrap();
        }
        for filter in filters {
            line += " /";
            for sock_filter { code, jt, jf, k } in &filter.0 {
                write!(line, " {code:x} {jt:x} {jf:x} {k:x}").unwrap();
            }
        }
        self.talker.ask(&line, "")
    }
}

/// What the oracle says of a call that returns a positive number if it is allowed.
fn expected(refusal: Result<Option<SeccompAction>, Invalid>) -> Option<String> {
    Some(match refusal.unwrap()? {
        SeccompAction::Kill => "killed".to_owned(),
        SeccompAction::Errno(errno) => format!("value {}", -errno),
        SeccompAction::Trap => "trap".to_owned(),
        // There is no supervisor, and the tracer has not set PTRACE_O_TRACESECCOMP.
        SeccompAction::Notify | SeccompAction::Trace => format!("value {}", -libc::ENOSYS),
    })
}

/// A word that a filter may return: every action, and some that do not exist.
fn returned() -> impl Strategy<Value = u32> {
    let actions = [
        libc::SECCOMP_RET_ALLOW,
        libc::SECCOMP_RET_LOG,
        libc::SECCOMP_RET_TRACE,
        libc::SECCOMP_RET_USER_NOTIF,
        libc::SECCOMP_RET_ERRNO,
        libc::SECCOMP_RET_TRAP,
        libc::SECCOMP_RET_KILL_THREAD,
        libc::SECCOMP_RET_KILL_PROCESS,
        0x7fff_0000 - 0x0001_0000,
        0x0006_0000,
        0xffff_0000,
    ];
    let data = prop_oneof![0..200_u32, Just(4095), Just(0xffff), Just(0)];
    (select(actions.to_vec()), data).prop_map(|(action, data)| action | data)
}

/// How many words of memory the programs use: the kernel wants each to be stored first.
const WORDS: u32 = 4;

/// Operands that make a difference.
fn operand() -> impl Strategy<Value = u32> {
    let numbers = [0, 1, 2, 7, 31, 39, 64, 186, 0x8000_0000, u32::MAX];
    prop_oneof![
        any::<u32>(),
        select(numbers.to_vec()),
        select(numbers.to_vec())
    ]
}

/// An instruction. `accepted` adjusts jumps, so that they lead to an instruction that exists.
fn step() -> impl Strategy<Value = sock_filter> {
    let calculations = [
        BPF_ADD, BPF_SUB, BPF_MUL, BPF_DIV, BPF_OR, BPF_AND, BPF_XOR, BPF_LSH, BPF_RSH,
    ];
    let comparisons = [BPF_JEQ, BPF_JGT, BPF_JGE, BPF_JSET];
    let sources = || select([BPF_K, BPF_X].to_vec());
    let calculation = (select(calculations.to_vec()), sources(), operand());
    let comparison = (
        select(comparisons.to_vec()),
        sources(),
        operand(),
        any::<(u8, u8)>(),
    );
    let memory = [LOAD_MEMORY, LOAD_X_MEMORY, BPF_ST, BPF_STX];
    let others = [LOAD_LEN, LOAD_X_LEN, A_TO_X, X_TO_A, NEGATE];
    prop_oneof![
        4 => (0..16_u32).prop_map(|word| instruction(LOAD_DATA, word * 4)),
        2 => (select([LOAD, LOAD_X].to_vec()), operand()).prop_map(|(code, k)| instruction(code, k)),
        2 => (select(memory.to_vec()), 0..WORDS).prop_map(|(code, k)| instruction(code, k)),
        2 => select(others.to_vec()).prop_map(|code| instruction(code, 0)),
        4 => calculation.prop_map(|(operation, source, k)| {
            // The kernel rejects a division by the constant 0, and a shift by a constant of 32 or more.
            let k = match (operation, source) {
                (BPF_DIV, BPF_K) => k.max(1),
                (BPF_LSH | BPF_RSH, BPF_K) => k % 32,
                _ => k,
            };
            instruction(BPF_ALU | operation | source, k)
        }),
        4 => comparison.prop_map(|(operation, source, k, (jt, jf))| {
            branch(BPF_JMP | operation | source, jt, jf, k)
        }),
        1 => any::<u32>().prop_map(|k| instruction(JUMP, k)),
        1 => returned().prop_map(|k| instruction(RETURN, k)),
        1 => Just(instruction(RETURN_A, 0)),
    ]
}

/// A filter that the kernel accepts.
fn accepted() -> impl Strategy<Value = SeccompFilter> {
    (prop::collection::vec(step(), 0..24), returned()).prop_map(|(steps, last)| {
        let mut filter = vec![
            // Allows seccomp(2), so that more filters can be set.
            instruction(LOAD_DATA, 0),
            branch(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, libc::SYS_seccomp as u32),
            instruction(RETURN, libc::SECCOMP_RET_ALLOW),
        ];
        filter.extend((0..WORDS).map(|word| instruction(BPF_ST, word)));
        let len = steps.len();
        for (index, mut step) in steps.into_iter().enumerate() {
            let after = len - index;
            step.jt = (usize::from(step.jt) % after) as u8;
            step.jf = (usize::from(step.jf) % after) as u8;
            if u32::from(step.code) == JUMP {
                step.k %= after as u32;
            }
            filter.push(step);
        }
        filter.push(instruction(RETURN, last));
        SeccompFilter(filter)
    })
}

// promise: Observations: What seccomp filters say of a system call is what the kernel does (512 sets
//    of filters)
#[test]
fn filters_mean_what_the_kernel_does() {
    let oracle = std::cell::RefCell::new(Oracle::start());
    let instruction_pointer = oracle.borrow().instruction_pointer;
    let number = select([libc::SYS_getpid, libc::SYS_gettid].to_vec());
    let filters = prop::collection::vec(accepted(), 1..4);
    let config = Config {
        cases: 512,
        failure_persistence: None,
        ..Config::default()
    };
    let tried = TestRunner::new(config).run(
        &(number, any::<[u64; 6]>(), filters),
        |(number, arguments, filters)| {
            let call = SeccompData {
                number: number as u32,
                instruction_pointer,
                arguments,
            };
            let said = oracle.borrow_mut().ask(&filters, &call);
            match expected(refusal(&filters, &call)) {
                Some(expected) if expected == "trap" => prop_assert!(said.starts_with("trap")),
                Some(expected) => prop_assert_eq!(said, expected),
                None => {
                    let result = said.strip_prefix("value ").map(str::parse::<i64>);
                    prop_assert!(matches!(result, Some(Ok(1..))), "{}", said);
                }
            }
            Ok(())
        },
    );
    tried.unwrap();
}

proptest! {
    // promise: Bad input: Any instructions of a seccomp filter are run to an end or rejected
    #[test]
    fn any_instructions_are_run_or_rejected(
        filter in prop::collection::vec(any::<(u16, u8, u8, u32)>(), 0..64),
        arguments in any::<[u64; 6]>(),
    ) {
        let filter = filter.into_iter().map(|(code, jt, jf, k)| sock_filter { code, jt, jf, k });
        let filters = [SeccompFilter(filter.collect())];
        let _ = refusal(&filters, &call(libc::SYS_mmap, arguments));
    }

    #[test]
    fn any_plausible_instructions_are_run_or_rejected(steps in prop::collection::vec(step(), 0..64)) {
        let _ = refusal(&[SeccompFilter(steps)], &call(libc::SYS_mmap, [0; 6]));
    }
}

/// Reads one of the real filters.
fn real(name: &str) -> SeccompFilter {
    let bytes = std::fs::read(fixture("filters").join(name)).unwrap();
    let instructions = bytes.chunks_exact(8).map(|bytes| sock_filter {
        code: u16::from_le_bytes([bytes[0], bytes[1]]),
        jt: bytes[2],
        jf: bytes[3],
        k: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
    });
    SeccompFilter(instructions.collect())
}

/// What a real filter does for mmap of executable memory, the same also writable, munmap, and mount.
fn of_real(names: &[&str]) -> [Option<SeccompAction>; 4] {
    let filters: Vec<SeccompFilter> = names.iter().map(|name| real(name)).collect();
    let map = |protection: i32| {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        call(
            libc::SYS_mmap,
            [0x1_0000, 4096, protection as u64, flags, u64::MAX, 0],
        )
    };
    let code = libc::PROT_READ | libc::PROT_EXEC;
    [
        map(code),
        map(code | libc::PROT_WRITE),
        call(libc::SYS_munmap, [0x1_0000, 4096, 0, 0, 0, 0]),
        call(libc::SYS_mount, [0; 6]),
    ]
    .map(|call| refusal(&filters, &call).unwrap())
}

// promise: Observations: The real filters of systemd and Docker allow what observing needs (3)
#[test]
fn real_filters_allow_what_observing_needs() {
    let denied = |errno| Some(SeccompAction::Errno(errno));
    let service = ["system-service.x86_64.bpf", "system-service.x32.bpf"];
    let killed = Some(SeccompAction::Kill);
    assert_eq!(of_real(&service), [None, None, None, killed]);
    let no_writable_code = [
        "deny-write-execute.x86_64.bpf",
        "deny-write-execute.x32.bpf",
    ];
    let refused = denied(libc::EPERM);
    assert_eq!(of_real(&no_writable_code), [None, refused, None, None]);
    assert_eq!(of_real(&["docker.bpf"]), [None, None, None, refused]);
    let all = [&service[..], &no_writable_code, &["docker.bpf"]].concat();
    assert_eq!(of_real(&all), [None, refused, None, killed]);
}

#[test]
fn invalid_filters_are_rejected() {
    let getpid = call(libc::SYS_getpid, [0; 6]);
    let invalid = |instructions: &[sock_filter]| {
        let filters = [SeccompFilter(instructions.to_vec())];
        assert_eq!(refusal(&filters, &getpid), Err(Invalid));
    };
    let allow = instruction(RETURN, libc::SECCOMP_RET_ALLOW);
    invalid(&[]);
    invalid(&[instruction(LOAD_DATA, 0)]);
    invalid(&[instruction(LOAD_DATA, 2), allow]);
    invalid(&[instruction(LOAD_DATA, 64), allow]);
    invalid(&[instruction(LOAD_DATA, u32::MAX - 3), allow]);
    invalid(&[instruction(LOAD_MEMORY, 16), allow]);
    invalid(&[instruction(BPF_ST, u32::MAX), allow]);
    invalid(&[instruction(JUMP, 1), allow]);
    invalid(&[instruction(JUMP, u32::MAX), allow]);
    invalid(&[branch(BPF_JMP | BPF_JEQ, 1, 0, getpid.number), allow, allow][..1]);
    // BPF_MOD, which seccomp does not have; a load of a byte.
    invalid(&[instruction(BPF_ALU | 0x90, 1), allow]);
    invalid(&[instruction(BPF_LD | BPF_ABS | libc::BPF_B, 0), allow]);
}
