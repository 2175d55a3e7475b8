use std::fs;
use std::process::Command;
use std::time::Duration;

use nix::fcntl::OFlag;
use test_support::{Talker, fixture};

use super::*;
use crate::address::PAGE;
use crate::memory::WriteMemory;
use crate::observe::observation::Observation;
use crate::observer::Observer;
use crate::select::function::FunctionSelector;
use crate::target::Target;

const PATIENT: Duration = test_support::DEADLINE;

/// Pins the calling thread and a process to one processor: then a thread of the process runs only while this one waits.
fn pin(pid: i32) {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let field = |name: &str| {
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().to_owned()
    };
    let allowed = field("Cpus_allowed_list:");
    let first = allowed.split(['-', ',']).next().unwrap();
    for task in [field("Pid:"), pid.to_string()] {
        let mut taskset = Command::new("taskset");
        let taskset = taskset.args(["--pid", "--cpu-list", first, &task]);
        let done = taskset.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
}

/// Leaves a thread about to make a system call, as a killed tool does.
fn abandon(injector: &Injector<'_>, call: InjectedCall) {
    let stopped = injector.tracer.stop(injector.process, PATIENT).unwrap();
    let (tid, before) = stopped.first().unwrap();
    let code = injected_call::code(&[call], &before, false);
    let mut memory = stopped.memory(injector.memory).unwrap();
    memory.write_code(injector.code_cave.at, &code).unwrap();
    let mut registers = stopped.calls().registers(tid).unwrap();
    registers.rip = injected_call::entry(injector.code_cave.at).0;
    registers.orig_rax = injected_call::NO_CALL;
    stopped.calls().set_registers(tid, registers).unwrap();
}

/// A process, the code cave that calls are made from, and a call that maps memory.
struct Injected {
    talker: Talker,
    process: Process,
    memory: ProcessMemory,
    code_cave: CodeCave,
    call: InjectedCall,
}

impl Injected {
    fn start() -> Injected {
        let talker = Talker::start(&fixture("page_borders.pie"));
        let process = Process::open(talker.pid()).unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDWR).unwrap();
        let maps = read_maps(&process).unwrap();
        let code_cave = code_cave::find(&process, &memory, &maps).unwrap();
        let page = LiveAddr(maps[0].start.0 - (64 << 20));
        let call = InjectedCall::map(page, PAGE, libc::PROT_READ | libc::PROT_EXEC);
        Injected {
            talker,
            process,
            memory,
            code_cave,
            call,
        }
    }

    /// Leaves a thread about to make the call. Waits until it has.
    fn abandon_and_wait(&self) {
        let (process, memory) = (&self.process, &self.memory);
        let (code_cave, call) = (self.code_cave, self.call);
        let waited = with_tracer(&[process], |tracer| {
            let injector = Injector {
                tracer,
                process,
                memory,
                code_cave,
                limit: PATIENT,
                despite_seccomp: false,
                mode: RedirectMode::RunningProcess,
            };
            abandon(&injector, call);
            let stopped = tracer.stop(process, PATIENT)?;
            let left = injector.wait_until_left(stopped, &[code_cave.range()], PATIENT)?;
            assert!(left.is_ok());
            Ok(())
        });
        waited.unwrap();
    }

    fn remove_stale(&self) -> Result<Cleaned> {
        self.remove_stale_within(PATIENT)
    }

    /// Makes attempts in this time, each as long as it needs.
    fn remove_stale_within(&self, time: Duration) -> Result<Cleaned> {
        let (process, memory, budget) = (&self.process, &self.memory, TimeBudget::new(time));
        let options = Options {
            time_limit: PATIENT,
            ..Options::default()
        };
        remove_stale_within(process, memory, options, None, &|_| None, budget)
    }

    fn is_mapped(&self) -> bool {
        let maps = read_maps(&self.process).unwrap();
        maps.iter().any(|mapping| self.call.matches(mapping))
    }

    fn is_cave_empty(&self) -> bool {
        let mut code = vec![1; self.code_cave.len as usize];
        self.memory.read(self.code_cave.at, &mut code).unwrap();
        code.iter().all(|&byte| byte == 0)
    }
}

#[test]
fn redirected_thread_gets_time_to_leave() {
    let mut injected = Injected::start();
    pin(injected.talker.pid());
    for _ in 0..10 {
        injected.abandon_and_wait();
        assert!(injected.is_mapped() && !injected.is_cave_empty());
        let cleaned = injected.remove_stale().unwrap();
        assert_eq!(cleaned.report, CleanReport::default());
        assert!(!injected.is_mapped() && injected.is_cave_empty());
        injected.talker.hits();
    }
}

#[test]
fn last_attempt_to_remove_may_succeed() {
    let mut injected = Injected::start();
    injected.abandon_and_wait();
    let cleaned = injected.remove_stale_within(Duration::from_nanos(1));
    assert_eq!(cleaned.unwrap().report, CleanReport::default());
    assert!(!injected.is_mapped() && injected.is_cave_empty());
    injected.talker.hits();
}

#[test]
fn orphaned_calls_in_use_are_kept_and_reported() {
    let mut injected = Injected::start();
    injected.abandon_and_wait();
    // As if the thread might return to the cave: its address goes into the last word of the stack, which is 0.
    let maps = read_maps(&injected.process).unwrap();
    let stack = maps.iter().find(|mapping| mapping.path() == b"[stack]");
    let last = LiveAddr(stack.unwrap().end.0 - 8);
    let put = |word: u64| injected.memory.write(last, &word.to_le_bytes()).unwrap();
    put(injected.code_cave.at.0 + 8);
    let error = injected.remove_stale().err().unwrap();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::Observe(ObserveError::StillInside { .. })
        ),
        "{error}"
    );
    assert!(error.to_string().contains("a system call that"), "{error}");
    assert!(injected.is_mapped() && !injected.is_cave_empty());
    put(0);
    let cleaned = injected.remove_stale().unwrap();
    assert_eq!(cleaned.report, CleanReport::default());
    assert!(!injected.is_mapped() && injected.is_cave_empty());
    injected.talker.hits();
}

/// The functions of fixture `externals`, each timed together with the next, and their arenas.
struct Wrappers {
    talker: Talker,
    observer: Observer,
    process: Process,
    memory: ProcessMemory,
    arenas: Vec<Arena>,
}

impl Wrappers {
    fn observe() -> Wrappers {
        let talker = Talker::start(&fixture("externals.pie"));
        let target = Target::open_any(talker.pid()).unwrap();
        let globs = ["wrapper_?", "padded_wrapper", "after_wrappers"];
        let selectors = globs.map(|glob| FunctionSelector::Glob(glob.parse().unwrap()));
        let timed = selectors
            .into_iter()
            .fold(Observation::new(), Observation::time_functions);
        let observer = target.observe(&timed, Options::default()).unwrap();
        let process = Process::open(talker.pid()).unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDWR).unwrap();
        let arenas = installed::find(&memory, &read_maps(&process).unwrap());
        Wrappers {
            talker,
            observer,
            process,
            memory,
            arenas,
        }
    }

    /// Asserts that a thread at any jump that is in the middle of an instruction is moved to the trampoline.
    fn assert_moved(&self, what: &str) {
        let plan = restoring_patches(&self.process, &self.memory, &self.arenas);
        let moves = plan.unwrap().moves;
        let trampolines = self.arenas.iter().flat_map(|arena| {
            let points = arena.points.iter().enumerate();
            points.map(|(index, point)| (*point, arena.trampoline(index)))
        });
        // Functions begin at multiples of 16.
        let inside = trampolines.filter(|(point, _)| point.address.0 % 16 == 1);
        let inside: Vec<_> = inside.collect();
        for (point, trampoline) in &inside {
            let moved = moves.of_address(point.address.0);
            assert_eq!(moved, Some(trampoline.0), "{what}: {point:?}");
        }
        assert_eq!(inside.len(), 7);
    }

    /// Where the returns are that have become short jumps.
    fn short_jumps(&self) -> Vec<LiveAddr> {
        let places = self.arenas.iter().flat_map(Arena::places);
        let shorts = places.filter(|(_, place)| place.after.first() == Some(&SHORT_JMP));
        shorts.map(|(_, place)| place.at).collect()
    }
}

#[test]
fn arenas_unmapped_meanwhile_are_looked_for_again() {
    let mut wrappers = Wrappers::observe();
    let changing = Error::of_process(1, ProcessError::KeepsChanging);
    let exited = Error::of_process(1, ProcessError::Exited);
    let is_unmapped = |wrappers: &Wrappers, error| {
        is_unmapped_meanwhile(&wrappers.process, &wrappers.memory, &wrappers.arenas, error)
    };
    // Something else has changed.
    assert!(!is_unmapped(&wrappers, &changing));
    wrappers.observer.remove().unwrap();
    assert!(is_unmapped(&wrappers, &changing) && !is_unmapped(&wrappers, &exited));
}

#[test]
fn thread_at_jump_amid_instruction_is_moved() {
    let mut wrappers = Wrappers::observe();
    wrappers.assert_moved("as they were patched");
    let jumps = wrappers.short_jumps();
    assert_eq!(jumps.len(), 8);
    // Whatever another tool has written over the jump before it: a thread may be there already.
    let memory = &wrappers.memory;
    for other in [[0xc3, 0x48], [0xc3, 0xf8], [0xcc, 0xf8], [0x0f, 0x0b]] {
        let found: Vec<[u8; 2]> = installed::read_each(0, memory, &jumps).unwrap();
        for at in &jumps {
            memory.write(*at, &other).unwrap();
        }
        wrappers.assert_moved(&format!("{other:x?}"));
        for (at, found) in jumps.iter().zip(found) {
            memory.write(*at, &found).unwrap();
        }
    }
    wrappers.observer.remove().unwrap();
}

// promise: Functions: If the byte of a return is the original one again, as after a uprobe there, the function after it is
//    restored as a whole (8 functions)
#[test]
fn first_byte_of_next_function_is_restored() {
    /// ret
    const RETURN: u8 = 0xc3;
    let mut wrappers = Wrappers::observe();
    for at in wrappers.short_jumps() {
        wrappers.memory.write(at, &[RETURN]).unwrap();
    }
    wrappers.talker.ask("call 2 100", "called");
    wrappers.observer.remove().unwrap();
    // It answers only if each function has returned what it should.
    wrappers.talker.ask("call 2 100", "called");
    let mut first = [0];
    for at in wrappers.short_jumps() {
        wrappers.memory.read(at.plus(1), &mut first).unwrap();
        assert!(first == [0x48] || first == [0x90], "{at} {first:x?}");
    }
}
