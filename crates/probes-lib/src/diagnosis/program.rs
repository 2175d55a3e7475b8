//! Checks of the program that a process runs, and of what it has loaded.

use nix::fcntl::OFlag;

use super::{Check, CheckKind, CheckResult};
use crate::elf::ElfFile;
use crate::elf::functions::{FunctionTable, NameCounts, frametable_calls};
use crate::error::{
    Error, ErrorKind, MemoryPart, Operation, ProcessError, Result, RuntimeEventsError,
};
use crate::observe::installed::refuse_observed;
use crate::process::Process;
use crate::process::code_files::{CodeFiles, CodeKind};
use crate::process::denial;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::translator;
use crate::runtime_events::{RuntimeEvents, version_of_process};
use crate::site::SITE_LEN;
use crate::target::Target;
use crate::update::snapshot::State;

/// What every native OCaml program has, unless it is stripped.
const OF_OCAML: &str = "caml_frametable";

/// What the files of the process say.
const OF_FILES: [CheckKind; 6] = [
    CheckKind::Translator,
    CheckKind::Bytecode,
    CheckKind::Symbols,
    CheckKind::Frametables,
    CheckKind::UnwindTables,
    CheckKind::OcamlVersion,
];

/// What else takes reading the process.
const OTHERS: [CheckKind; 4] = [
    CheckKind::Observer,
    CheckKind::Probes,
    CheckKind::HugePages,
    CheckKind::RuntimeEvents,
];

/// `may_read`: whether the kernel lets us.
pub(super) fn checks(process: &Process, may_read: bool) -> Vec<Check> {
    if !may_read {
        let unread = |kind| Check::unknown(kind, "the process may not be read");
        let kinds = OF_FILES.into_iter().chain(OTHERS);
        return kinds.map(unread).collect();
    }
    let mut checks = of_files(process);
    checks.extend(of_probes(process));
    checks.push(observer(process));
    checks.extend(runtime_events(process));
    checks
}

/// What its files say.
fn of_files(process: &Process) -> Vec<Check> {
    let read = CodeFiles::of(process).and_then(|files| Ok((files, read_maps(process)?)));
    let (files, maps) = match read {
        Ok(read) => read,
        Err(error) => {
            let why = error.to_string();
            let unread = |kind| Check::unknown(kind, &*why);
            return OF_FILES.into_iter().map(unread).collect();
        }
    };
    let translator = translator::translator(&files.program, &maps);
    let translated = match translator {
        Some(translator) => {
            let kind = ProcessError::Translated { translator };
            Check::error(
                CheckKind::Translator,
                Error::of_process(process.pid(), kind),
            )
        }
        None => Check::pass(
            CheckKind::Translator,
            "the processor executes the program itself",
        ),
    };
    let executable = files
        .files
        .iter()
        .find(|it| it.kind == CodeKind::Executable);
    let Some(elf) = executable.map(|file| file.elf.clone()) else {
        return vec![translated];
    };
    let bytecode = if elf.interprets_bytecode() {
        let error = Error::of_process(process.pid(), ProcessError::Bytecode);
        Check::error(CheckKind::Bytecode, error)
    } else {
        Check::pass(CheckKind::Bytecode, "native code")
    };
    let version = match version_of_process(process, &maps) {
        Some(version) => Check::pass(CheckKind::OcamlVersion, format!("OCaml {version}")),
        None => Check::unknown(
            CheckKind::OcamlVersion,
            "nothing in the program says so: it is not of OCaml, or uses nothing of Sys",
        ),
    };
    vec![
        translated,
        bytecode,
        symbols(FunctionTable::with_names_of(&elf)),
        frametables(&elf),
        unwind_tables(&files),
        version,
    ]
}

fn symbols(table: Result<FunctionTable>) -> Check {
    let kind = CheckKind::Symbols;
    let counts = match table {
        Ok(table) => table.name_counts(),
        Err(error) => return Check::error(kind, error),
    };
    let NameCounts {
        symbols,
        dynamic,
        frametables,
        unnamed,
    } = counts;
    let finding = format!(
        "functions of the program by where their names are: {symbols} in .symtab, {dynamic} in .dynsym, {frametables} in frametables, \
         {unnamed} without a name"
    );
    if symbols > 0 {
        Check::pass(kind, finding)
    } else {
        Check::fail(kind, format!("the program is stripped; {finding}"))
    }
}

fn frametables(elf: &ElfFile) -> Check {
    let kind = CheckKind::Frametables;
    let calls = frametable_calls(elf);
    if calls > 0 {
        Check::pass(
            kind,
            format!("{calls} calls of OCaml code with their source lines"),
        )
    } else if elf.data_symbol(OF_OCAML).is_some() {
        Check::fail(kind, "the frametables of the program have no source lines")
    } else {
        Check::pass(
            kind,
            "the program has no symbol of native OCaml code, and needs none",
        )
    }
}

fn unwind_tables(files: &CodeFiles) -> Check {
    let kind = CheckKind::UnwindTables;
    let lacking: Vec<String> = files
        .files
        .iter()
        .filter(|file| !file.elf.has_section(".eh_frame"))
        .map(|file| file.elf.path().display().to_string())
        .collect();
    match lacking.as_slice() {
        [] => Check::pass(
            kind,
            format!(".eh_frame in all {} files", files.files.len()),
        ),
        files => Check::fail(kind, format!("no .eh_frame in {}", files.join(", "))),
    }
}

/// The probes, and where they are.
fn of_probes(process: &Process) -> Vec<Check> {
    let target = match Target::open(process.pid()) {
        Ok(target) => target,
        Err(error) => {
            let none = Check::pass(CheckKind::HugePages, "there is no site to change");
            return vec![Check::error(CheckKind::Probes, error), none];
        }
    };
    vec![probes(&target), sites(process, &target)]
}

fn probes(target: &Target) -> Check {
    let kind = CheckKind::Probes;
    let states = match target.states() {
        Ok(states) => states,
        // What is denied has a check of its own.
        Err(error) if error.denial().is_some() => {
            let objects = target.objects();
            let names = objects
                .iter()
                .map(|it| it.table().probes().len())
                .sum::<usize>();
            return Check::unknown(kind, format!("{names}, whose states cannot be read"));
        }
        Err(error) => return Check::error(kind, error),
    };
    let count = |state| states.probes().filter(|it| it.state() == state).count();
    let mut providers: Vec<&str> = states
        .objects()
        .iter()
        .flat_map(|object| object.table().generations())
        .map(crate::elf::table::Generation::provider)
        .collect();
    providers.sort_unstable();
    providers.dedup();
    let inconsistent = count(State::Inconsistent);
    let finding = format!(
        "{} of {}: {} enabled, {} disabled, {inconsistent} inconsistent",
        states.probes().len(),
        providers.join(", "),
        count(State::Enabled),
        count(State::Disabled),
    );
    let result = if inconsistent > 0 {
        CheckResult::Fail
    } else {
        CheckResult::Pass
    };
    Check::with(kind, result, finding)
}

fn observer(process: &Process) -> Check {
    let kind = CheckKind::Observer;
    let memory = ProcessMemory::open(process, OFlag::O_RDONLY);
    let memory =
        memory.map_err(|source| denial::denied_or_exited(process, Operation::Read, source));
    match memory.and_then(|memory| refuse_observed(process, &memory)) {
        Ok(()) => Check::pass(kind, "nobody observes it"),
        Err(error) if error.denial().is_some() => Check::unknown(kind, error.to_string()),
        Err(error) => Check::error(kind, error),
    }
}

/// Whether an update could change the sites.
fn sites(process: &Process, target: &Target) -> Check {
    let kind = CheckKind::HugePages;
    let image = target.opened.image();
    let sites = (0..image.program.site_count()).map(|index| {
        let address = image.program.site(index).address();
        (address, SITE_LEN as u64, MemoryPart::Site)
    });
    match image.mappings(process, sites, false) {
        Ok(_) => Check::pass(
            kind,
            "the sites of all probes can be changed at little cost",
        ),
        Err(error) => Check::error(kind, error),
    }
}

/// Whether events can be read, and whether they have to be switched on for that.
fn runtime_events(process: &Process) -> Vec<Check> {
    let (kind, on) = (CheckKind::RuntimeEvents, CheckKind::RuntimeEventsOn);
    let version = |events: RuntimeEvents| format!("on, of OCaml {}", events.version());
    let switchable = || Target::open_any(process.pid())?.check_events();
    let error = match RuntimeEvents::of_process(process.pid()) {
        Err(error) => error,
        // They may be paused.
        Ok(events) => match switchable() {
            Ok(false) => {
                let finding = "paused: `gc` lets them go on as long as it observes the process";
                let paused = Check::fail(on, "they are paused");
                return vec![Check::pass(kind, finding), paused];
            }
            _ => {
                let is_on = Check::pass(on, "nothing has to be switched on");
                return vec![Check::pass(kind, version(events)), is_on];
            }
        },
    };
    if !matches!(
        error.kind(),
        ErrorKind::RuntimeEvents(RuntimeEventsError::NotOn)
    ) {
        return vec![Check::error(kind, error)];
    }
    match switchable() {
        Ok(_) => {
            let finding = "off: `gc` switches them on as long as it observes the process";
            vec![Check::pass(kind, finding), Check::error(on, error)]
        }
        Err(why) if why.denial().is_some() => vec![
            Check::unknown(
                kind,
                "off, and it is not known whether they can be switched on",
            ),
            Check::error(on, error),
        ],
        Err(why) => vec![Check::error(kind, why)],
    }
}
