//! A program whose functions are executed, and its observed copy.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, Instruction};
use nix::libc::{PROT_EXEC, PROT_READ, PROT_WRITE, SYS_read, user_regs_struct};
use nix::sys::ptrace;
use nix::unistd::Pid;
use probes_lib::{
    ErrorKind, FunctionError, FunctionSelector, Functions, Language, Observation, Observer, Target,
};

use super::instruction::decode;
use super::tracee::{Tracee, pin, wait_until_reading};
use super::{DATA, GATE, RETURN, STACK};
use crate::observe::options;

/// A function that may be called.
pub(super) struct Callee {
    pub(super) name: String,
    pub(super) has_name: bool,
    pub(super) code: Range<u64>,
    pub(super) is_ocaml: bool,
}

/// A program that waits, stopped.
pub(super) struct Program {
    pub(super) original: Tracee,
    pub(super) _guard: Box<dyn std::any::Any>,
    pub(super) callees: Vec<Callee>,
    /// The callees of the program itself, not of a library.
    pub(super) own: Range<usize>,
    /// Where callees begin.
    pub(super) entries: BTreeSet<u64>,
    /// What is mapped, by its start.
    pub(super) mapped: BTreeMap<u64, Mapped>,
    pub(super) instructions: RefCell<HashMap<u64, Instruction>>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Mapped {
    pub(super) end: u64,
    pub(super) is_code: bool,
    pub(super) is_private_data: bool,
    pub(super) is_kernels: bool,
}

pub(super) fn mapped(pid: Pid) -> BTreeMap<u64, Mapped> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = |line: &str| {
        let hex = |digits: &str| u64::from_str_radix(digits, 16).unwrap();
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        let access = words.next().unwrap();
        let mapped = Mapped {
            end: hex(end),
            is_code: access.contains('x'),
            is_private_data: access.starts_with("rw") && access.ends_with('p'),
            is_kernels: line.ends_with("[vdso]")
                || line.contains("[vvar")
                || line.ends_with("[vsyscall]"),
        };
        (hex(start), mapped)
    };
    maps.lines().map(line).collect()
}

impl Program {
    pub(super) fn of(guard: impl std::any::Any, pid: i32) -> Program {
        wait_until_reading(pid);
        pin(pid);
        let original = Tracee::of(Pid::from_raw(pid));
        original.seize();
        let here = original.registers().rip;
        let code = original.read(here, 2).unwrap();
        original.write(here, &[0x0f, 0x05]);
        let access = PROT_READ | PROT_WRITE;
        for (range, access) in [
            (DATA, access),
            (STACK, access),
            (GATE, PROT_READ | PROT_EXEC),
        ] {
            assert!(original.map(here, range, access));
        }
        original.write(here, &code);
        original.write(GATE.start, &[0x0f, 0x05]);
        original.write(RETURN, &[0xcc]);
        let functions = Functions::of_process(pid).unwrap();
        let callee = |it: probes_lib::SelectedFunction<'_>| {
            let start = it.address()?.0;
            let name = it.name();
            Some(Callee {
                is_ocaml: name
                    .as_ref()
                    .is_some_and(|it| it.language == Some(Language::Ocaml)),
                has_name: name.is_some(),
                name: name.map_or_else(|| format!("{start:#x}"), |it| it.text),
                code: start..start + it.function.len(),
            })
        };
        let selected = functions.select(&[]).unwrap();
        let mut callees: Vec<Callee> = selected.into_iter().filter_map(callee).collect();
        callees.sort_by_key(|it| it.code.start);
        let executable = &functions.objects()[0];
        let bias = executable.load_bias().unwrap();
        let own = executable
            .table()
            .functions()
            .map(|it| bias.live(it.address()).0);
        let own: BTreeSet<u64> = own.collect();
        let first = callees.partition_point(|it| Some(&it.code.start) < own.first());
        let last = callees.partition_point(|it| Some(&it.code.start) <= own.last());
        Program {
            own: first..last,
            mapped: mapped(original.pid),
            entries: callees.iter().map(|it| it.code.start).collect(),
            callees,
            original,
            _guard: Box::new(guard),
            instructions: RefCell::default(),
        }
    }

    pub(super) fn mapping(&self, address: u64) -> Option<Mapped> {
        let (_, mapped) = self.mapped.range(..=address).next_back()?;
        (address < mapped.end).then_some(*mapped)
    }

    /// Returns the instruction at an address of its code.
    pub(super) fn instruction(&self, address: u64) -> Option<Instruction> {
        let known = self.instructions.borrow().get(&address).copied();
        if known.is_some() {
            return known;
        }
        let mapping = self
            .mapping(address)
            .filter(|it| it.is_code && !it.is_kernels)?;
        let len = (mapping.end - address).min(15) as usize;
        let instruction = decode(&self.original.read(address, len)?, address);
        self.instructions.borrow_mut().insert(address, instruction);
        Some(instruction)
    }

    pub(super) fn callee_at(&self, address: u64) -> Option<&Callee> {
        let next = self.callees.partition_point(|it| it.code.start <= address);
        let last = self.callees.get(next.checked_sub(1)?)?;
        last.code.contains(&address).then_some(last)
    }

    pub(super) fn place(&self, address: u64) -> String {
        match self.callee_at(address) {
            Some(callee) => format!("{}+{:#x}", callee.name, address - callee.code.start),
            None => format!("{address:#x}"),
        }
    }

    /// Returns the places of random instructions of its functions, and how an observation calls them.
    pub(super) fn instructions_within(&self, random: &mut fastrand::Rng) -> BTreeMap<String, u64> {
        let mut places = BTreeMap::new();
        for _ in 0..400 {
            let callee = random.choice(&self.callees).unwrap();
            let len = (callee.code.end - callee.code.start).min(1 << 12) as usize;
            let Some(code) = self.original.read(callee.code.start, len) else {
                continue;
            };
            let decoder = Decoder::with_ip(64, &code, callee.code.start, DecoderOptions::NONE);
            let all: Vec<u64> = decoder.into_iter().map(|it| it.ip()).collect();
            let at = *random.choice(&all).unwrap();
            let offset = at - callee.code.start;
            if offset > 0 {
                let name = if callee.has_name {
                    format!("{}+{offset:#x}", callee.name)
                } else {
                    format!("{at:#x}")
                };
                places.insert(name, at);
            }
        }
        places
    }
}

/// Which places of a program are observed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ObservedPlaces {
    /// The entries of all functions.
    Entries,
    /// The entries of all functions, and the exits of those with these names.
    EntriesAndExits(&'static [&'static str]),
    /// Instructions in functions.
    Instructions,
}

/// A copy of a program, observed.
pub(super) struct Twin<'p> {
    pub(super) program: &'p Program,
    pub(super) copy: Tracee,
    pub(super) _observer: Observer,
    /// The memory of the observation.
    pub(super) arenas: Vec<Range<u64>>,
    /// The bytes of code that it has changed.
    pub(super) patched: BTreeSet<u64>,
    /// Where the jumps to its trampolines are.
    pub(super) sites: Vec<u64>,
}

impl<'p> Twin<'p> {
    pub(super) fn of(
        program: &'p Program,
        observed: ObservedPlaces,
        random: &mut fastrand::Rng,
    ) -> Twin<'p> {
        let copy = program.original.fork();
        let pid = copy.pid;
        // It waits in its system call again.
        let registers = program.original.registers();
        let waiting = user_regs_struct {
            rip: registers.rip - 2,
            rax: SYS_read as u64,
            orig_rax: u64::MAX,
            ..registers
        };
        ptrace::setregs(pid, waiting).unwrap();
        ptrace::detach(pid, None).unwrap();
        wait_until_reading(pid.as_raw());
        let target = Target::open_any(pid.as_raw()).unwrap();
        let glob = |text: &str| FunctionSelector::Glob(text.parse().unwrap());
        let mut within = program.instructions_within(random);
        let observer = loop {
            let observation = match observed {
                ObservedPlaces::Entries => Observation::new().count_functions(glob("*")),
                ObservedPlaces::EntriesAndExits(names) => {
                    let all = Observation::new().count_functions(glob("*"));
                    names
                        .iter()
                        .fold(all, |all, name| all.time_functions(glob(name)))
                }
                ObservedPlaces::Instructions => {
                    let places = within.values().map(|at| probes_lib::LiveAddr(*at));
                    places.fold(Observation::new(), |all, at| {
                        all.count_functions(FunctionSelector::Address(at))
                    })
                }
            };
            match target.observe(&observation, options()) {
                Ok(observer) => break observer,
                Err(error) => match error.kind() {
                    ErrorKind::Function(FunctionError::NonePossible { refused, .. }) => {
                        let before = within.len();
                        within.retain(|name, _| {
                            !refused
                                .iter()
                                .any(|(other, _)| without_remark(other) == name)
                        });
                        assert!(within.len() < before, "{error}");
                    }
                    _ => panic!("{error}"),
                },
            }
        };
        copy.seize();
        let mapped = mapped(pid);
        let is_new = |(start, _): &(&u64, &Mapped)| !program.mapped.contains_key(start);
        let arenas = mapped.iter().filter(is_new);
        let arenas: Vec<Range<u64>> = arenas.map(|(start, it)| *start..it.end).collect();
        let (mut patched, mut digests) = (BTreeSet::new(), 0);
        for (&start, mapping) in &program.mapped {
            let is_compared = mapping.is_code || mapping.is_private_data;
            if mapping.is_kernels || !is_compared {
                continue;
            }
            let len = (mapping.end - start) as usize;
            let before = program.original.read(start, len).unwrap();
            let after = copy.read(start, len).unwrap();
            let differing = (start..).zip(before.iter().zip(&after));
            let differing = differing.filter(|(_, (one, other))| one != other);
            if mapping.is_code {
                patched.extend(differing.map(|(at, _)| at));
            } else {
                // The digests of OCaml's code, which Marshal compares.
                for (at, (_, byte)) in differing {
                    program.original.write(at, &[*byte]);
                    digests += 1;
                }
            }
        }
        assert!(digests <= 256);
        let is_inside = |at: u64| arenas.iter().any(|it| it.contains(&at));
        let jump = |at: u64| {
            let code = copy.read(at, 15).or_else(|| copy.read(at, 5));
            code.map_or(0, |code| decode(&code, at).near_branch_target())
        };
        let by_island = |at: u64| !is_inside(jump(at)) && is_inside(jump(jump(at)));
        let islands = patched.iter().filter(|at| by_island(**at));
        let islands: BTreeSet<u64> = islands.map(|at| jump(*at)).collect();
        let is_site = |at: &u64| {
            let is_operand = (1..5).any(|before| is_inside(jump(*at - before)));
            let is_jump = is_inside(jump(*at)) || by_island(*at);
            is_jump && !is_operand && !islands.contains(at)
        };
        let sites = patched.iter().copied().filter(is_site).collect();
        Twin {
            program,
            copy,
            _observer: observer,
            arenas,
            patched,
            sites,
        }
    }

    pub(super) fn is_inside(&self, address: u64) -> bool {
        self.arenas.iter().any(|it| it.contains(&address))
    }
}

/// A name without what is written after it: `(resolver)`, `(probe site)`.
fn without_remark(name: &str) -> &str {
    let resolver = name.strip_suffix(" (resolver)");
    resolver
        .or_else(|| name.strip_suffix(" (probe site)"))
        .unwrap_or(name)
}
