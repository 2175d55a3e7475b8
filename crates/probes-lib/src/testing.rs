//! Shared by the tests of several modules: fixtures that are loaded into memory to try updates on
//! them, and generated notes and programs.

mod compiled;
mod program;
mod recorded;

pub(crate) use compiled::{compile, unit_with_indexed_address};
pub(crate) use program::{NoteSpec, ProgramSpec, memory_file};
pub(crate) use recorded::{RecordedData, arena};

use std::sync::Arc;

use goblin::elf::Elf;
use goblin::elf::program_header::PT_LOAD;
use proptest::test_runner::{Config as ProptestConfig, RngSeed};

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::elf::table::{Probe, ProbeTable};
use crate::elf::{ElfFile, Linking};
use crate::error::Result;
use crate::memory::double::SliceMemory;
use crate::process::object::Object;
use crate::process::program::{MergedProbe, Program};
use crate::select::{Actions, AppliedChange, Choice, choose, choose_undo};
use crate::site::{OPCODE_OFFSET, Opcode};
use crate::update::breakpoints;
use crate::update::patch::{self, PatchOutcome};
use crate::update::plan::{PlanInputs, UpdatePlan};
use crate::update::snapshot::{Layout, Snapshot};

/// The pid that errors name.
pub(crate) const PID: i32 = 4242;

/// A fixture, loaded into memory of the test as the kernel would load it.
#[derive(Debug)]
pub(crate) struct SimulatedProcess {
    pub(crate) program: Program,
    pub(crate) table: Arc<ProbeTable>,
    pub(crate) bias: LoadBias,
    pub(crate) memory: SliceMemory,
    /// The memory as it was loaded.
    pub(crate) loaded: SliceMemory,
}

impl SimulatedProcess {
    pub(crate) fn of(fixture: &str) -> SimulatedProcess {
        SimulatedProcess::edited(fixture, |_| ())
    }

    /// The fixture with some bytes of its file changed.
    pub(crate) fn edited(fixture: &str, edit: impl FnOnce(&mut [u8])) -> SimulatedProcess {
        let path = test_support::fixture(fixture);
        let mut bytes = std::fs::read(&path).unwrap();
        edit(&mut bytes);
        let elf = ElfFile::read(memory_file(&bytes), path).unwrap();
        let table = Arc::new(ProbeTable::of(&elf).unwrap());
        let bias = match table.linking() {
            Linking::Fixed => LoadBias::NONE,
            Linking::PositionIndependent => LoadBias(0x5637_d2a0_0000),
        };
        let loaded = load(&bytes, bias);
        SimulatedProcess {
            program: Program::alone(elf, table.clone(), bias),
            table,
            bias,
            memory: loaded.clone(),
            loaded,
        }
    }

    /// The same fixture with other memory.
    pub(crate) fn with_memory(&self, memory: SliceMemory) -> SimulatedProcess {
        let object = self.program.objects()[0].clone();
        SimulatedProcess {
            program: Program::of(self.table.path().to_owned(), vec![object]),
            table: self.table.clone(),
            bias: self.bias,
            memory,
            loaded: self.loaded.clone(),
        }
    }

    /// The offset in the file of what is at `address`.
    pub(crate) fn offset(&self, address: LiveAddr) -> usize {
        let address = self.bias.file(address);
        let segments = self.table.segments().iter();
        let mut holding = segments.filter(|segment| segment.holds_in_file(address, 1));
        let segment = holding.next().unwrap();
        (address.0 - segment.start.0 + segment.offset) as usize
    }

    /// Sets the counters of a probe, and its sites to match.
    pub(crate) fn set(&mut self, name: &str, counter: u16) {
        set(&self.table, self.bias, &mut self.memory, name, counter);
    }

    pub(crate) fn probe(&self, name: &str) -> Probe<'_> {
        self.table.probe(name).unwrap()
    }

    /// Returns the probe of this name in the whole program, which may be one of several objects.
    pub(crate) fn merged_probe(&self, name: &str) -> MergedProbe<'_> {
        self.program.probe(name).unwrap()
    }

    /// Returns the addresses of the opcodes of a probe.
    pub(crate) fn opcodes(&self, name: &str) -> Vec<LiveAddr> {
        let sites = self.probe(name).sites();
        sites.map(|site| self.opcode(site.address())).collect()
    }

    /// Returns the addresses of the counters of a probe.
    pub(crate) fn counters(&self, name: &str) -> Vec<LiveAddr> {
        let semaphores = self.probe(name).semaphores();
        semaphores
            .map(|semaphore| self.bias.live(semaphore.counter()))
            .collect()
    }

    fn opcode(&self, site: FileAddr) -> LiveAddr {
        self.bias.live(site).plus(OPCODE_OFFSET)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let layout = Layout::of(&self.program, self.program.probes());
        layout.read(PID, &self.memory).unwrap()
    }

    /// Returns the layout of what is written, and the plan.
    pub(crate) fn plan(&self, actions: &Actions) -> Result<(Layout, UpdatePlan)> {
        self.plan_for(&choose(&self.program, actions)?, false)
    }

    /// Same as `plan`, for choices. If `one_by_one`, each opcode is a write of its own.
    pub(crate) fn plan_for(
        &self,
        choices: &[Choice],
        one_by_one: bool,
    ) -> Result<(Layout, UpdatePlan)> {
        let program = &self.program;
        let probes = choices.iter().map(|choice| program.by_id(choice.probe));
        let layout = Layout::of(program, probes);
        let before = layout.read(PID, &self.memory)?;
        let breakpoints = breakpoints::find(program.objects(), &before.code)?;
        let inputs = PlanInputs {
            program,
            breakpoints: &breakpoints,
            one_by_one,
        };
        let plan = inputs.plan(choices, before)?;
        Ok((layout, plan))
    }

    /// Returns the choices that undo a plan which has been carried out.
    pub(crate) fn undo(&self, plan: &UpdatePlan) -> Vec<Choice> {
        let applied: Vec<AppliedChange> = plan.applied(&self.program).collect();
        choose_undo(&self.program, &applied).unwrap()
    }

    /// Plans `actions` and carries the plan out.
    pub(crate) fn update(&mut self, actions: &Actions) -> Result<PatchOutcome> {
        let choices = choose(&self.program, actions)?;
        self.update_for(&choices)
    }

    /// Same as `update`, for choices.
    pub(crate) fn update_for(&mut self, choices: &[Choice]) -> Result<PatchOutcome> {
        let (layout, plan) = self.plan_for(choices, false)?;
        patch::apply(&plan, &layout, PID, &mut self.memory)
    }
}

/// Sets the counters of a probe, and its sites to match.
pub(crate) fn set(
    table: &ProbeTable,
    bias: LoadBias,
    memory: &mut SliceMemory,
    name: &str,
    counter: u16,
) {
    let probe = table.probe(name).unwrap();
    for site in probe.sites() {
        let opcode = bias.live(site.address()).plus(OPCODE_OFFSET);
        memory.poke(opcode, &[Opcode::of(counter > 0).byte()]);
    }
    for semaphore in probe.semaphores() {
        memory.poke(bias.live(semaphore.counter()), &counter.to_le_bytes());
    }
}

/// Loads the segments of a file, in whole pages.
fn load(file: &[u8], bias: LoadBias) -> SliceMemory {
    let elf = Elf::parse(file).unwrap();
    let loaded = elf.program_headers.iter().filter(|it| it.p_type == PT_LOAD);
    SliceMemory::new(loaded.map(|segment| {
        let start = segment.p_vaddr / PAGE * PAGE;
        let end = (segment.p_vaddr + segment.p_memsz).next_multiple_of(PAGE);
        let mut bytes = vec![0; (end - start) as usize];
        let (first, last) = (
            segment.p_offset - (segment.p_vaddr - start),
            segment.p_offset + segment.p_filesz,
        );
        let content = &file[first as usize..last as usize];
        bytes[..content.len()].copy_from_slice(content);
        (bias.live(FileAddr(start)).0, bytes)
    }))
}

/// Reads the probes of a file called `server.exe` with these bytes.
pub(crate) fn read_table(bytes: &[u8]) -> Result<ProbeTable> {
    let file = memory_file(bytes);
    ProbeTable::of(&ElfFile::read(file, "/srv/server.exe".into())?)
}

/// Returns a program with these probes, each with one site.
pub(crate) fn program_with_probes(names: &[&str]) -> Program {
    let probes: Vec<(&str, &str)> = names.iter().map(|name| (*name, "")).collect();
    program_with_arguments(&probes)
}

/// Same as [`program_with_probes`], for probes with these arguments in their notes.
pub(crate) fn program_with_arguments(probes: &[(&str, &str)]) -> Program {
    let note = |(i, (name, arguments)): (u64, &(&str, &str))| {
        NoteSpec::new("ocaml_2", name, arguments)
            .at(ProgramSpec::TEXT + 8 * i, ProgramSpec::PROBES + 4 * i)
    };
    let notes: Vec<NoteSpec> = (0..).zip(probes).map(note).collect();
    // For each probe: a disabled site, which is `nop; cmp $1, %eax`, and two bytes of padding.
    let text = [0x90, 0x3d, 1, 0, 0, 0, 0x90, 0x90].repeat(probes.len());
    let mut program = ProgramSpec::new(&notes, &text);
    program.probes = 4 * probes.len();
    let file = memory_file(&program.bytes());
    let elf = ElfFile::read(file, "/srv/server.exe".into()).unwrap();
    let table = Arc::new(ProbeTable::of(&elf).unwrap());
    Program::alone(elf, table, LoadBias::NONE)
}

/// Returns the program with its object loaded a second time, with this bias.
pub(crate) fn loaded_twice(program: &Program, bias: LoadBias) -> Program {
    let object = &program.objects()[0];
    let again = Object {
        bias,
        ..object.clone()
    };
    Program::of(program.path().to_owned(), vec![object.clone(), again])
}

/// Returns the configuration of property tests: this number of cases, the same ones every time. The
/// variable `PROPTEST_CASES` sets another number, and `PROPTEST_RNG_SEED` selects other cases.
pub(crate) fn properties(cases: u32) -> ProptestConfig {
    let given = ProptestConfig::default();
    let is_given = |name: &str| std::env::var_os(name).is_some();
    ProptestConfig {
        cases: if is_given("PROPTEST_CASES") {
            given.cases
        } else {
            cases
        },
        rng_seed: if is_given("PROPTEST_RNG_SEED") {
            given.rng_seed
        } else {
            RngSeed::Fixed(20_261_120)
        },
        failure_persistence: None,
        ..given
    }
}
