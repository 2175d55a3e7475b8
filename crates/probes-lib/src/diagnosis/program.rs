//! Checks of the program that a process runs, and of what it has loaded.

use std::iter;

use nix::fcntl::OFlag;

use super::{Check, CheckKind, CheckResult, stale};
use crate::elf::ElfFile;
use crate::elf::bytecode::OCAML_FRAMETABLE;
use crate::elf::functions::{FunctionTable, NameCounts, frametable_calls};
use crate::error::{
    self, Error, ErrorKind, MemoryPart, Operation, ProcessError, RuntimeEventsError, number_of,
};
use crate::observe::install::installed::refuse_observed;
use crate::process::Process;
use crate::process::code_files::{CodeFiles, CodeKind};
use crate::process::denial;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::translator;
use crate::runtime_events::{RuntimeEvents, has_runtime, version_of_process};
use crate::site::SITE_LEN;
use crate::target::Target;
use crate::update::snapshot::State;

/// The checks of the files that are mapped with code.
const FILE_CHECKS: [CheckKind; 6] = [
    CheckKind::Translator,
    CheckKind::Bytecode,
    CheckKind::Symbols,
    CheckKind::Frametables,
    CheckKind::UnwindTables,
    CheckKind::OcamlVersion,
];

/// The other checks of a program that are always made.
const PROCESS_CHECKS: [CheckKind; 5] = [
    CheckKind::Observer,
    CheckKind::StaleObservation,
    CheckKind::Probes,
    CheckKind::HugePages,
    CheckKind::RuntimeEvents,
];

/// Checks the program of a process. Unless the kernel permits us to read it (`may_read`), all results are unknown.
pub(super) fn checks(process: &Process, may_read: bool) -> Vec<Check> {
    if !may_read {
        let unread = |kind| Check::unknown(kind, "the process may not be read");
        let kinds = FILE_CHECKS.into_iter().chain(PROCESS_CHECKS);
        return kinds.map(unread).collect();
    }
    let mut checks = of_files(process);
    checks.extend(of_probes(process));
    checks.push(observer(process));
    checks.push(stale::of_process(process));
    checks.extend(runtime_events(process));
    checks
}

/// Checks the files that are mapped with code.
fn of_files(process: &Process) -> Vec<Check> {
    let read = CodeFiles::of(process).and_then(|files| Ok((files, read_maps(process)?)));
    let (files, maps) = match read {
        Ok(read) => read,
        Err(error) => {
            let why = error.to_string();
            let unread = |kind| Check::unknown(kind, &*why);
            return FILE_CHECKS.into_iter().map(unread).collect();
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
        let others = FILE_CHECKS.into_iter().skip(1);
        let unknown = others.map(|kind| Check::unknown(kind, "the executable is not mapped"));
        return iter::once(translated).chain(unknown).collect();
    };
    let bytecode = if elf.interprets_bytecode() {
        let error = Error::of_process(process.pid(), ProcessError::Bytecode);
        Check::error(CheckKind::Bytecode, error)
    } else {
        Check::pass(CheckKind::Bytecode, "native code")
    };
    let version = match version_of_process(process, &maps) {
        Some(version) => Check::pass(CheckKind::OcamlVersion, format!("OCaml {version}")),
        None if elf.interprets_bytecode() => Check::unknown(
            CheckKind::OcamlVersion,
            "no OCaml version found in the program: bytecode does not say it",
        ),
        None if has_runtime(process, &maps) => Check::unknown(
            CheckKind::OcamlVersion,
            "no OCaml version found in the program: it is of OCaml 4.13 or earlier, or does not use the module Sys",
        ),
        None => Check::unknown(
            CheckKind::OcamlVersion,
            "no OCaml version found in the program: it is not an OCaml program, or is stripped and does not use the module Sys",
        ),
    };
    vec![
        translated,
        bytecode,
        symbols(&elf),
        frametables(&elf),
        unwind_tables(&files),
        version,
    ]
}

fn symbols(elf: &ElfFile) -> Check {
    let kind = CheckKind::Symbols;
    let counts = match FunctionTable::with_names_of(elf) {
        Ok(table) => table.name_counts(),
        Err(error) => return Check::error(kind, error),
    };
    let NameCounts {
        symbols,
        dynamic,
        frametables,
        unnamed,
    } = counts;
    let debug_file = elf.path_of_symbols();
    let debug_file = debug_file.map_or(String::new(), |path| format!(" of {}", path.display()));
    let finding = format!(
        "functions of the program by where their names are: {symbols} in .symtab{debug_file}, {dynamic} in .dynsym, {frametables} in frametables, \
         {unnamed} without a name"
    );
    if symbols > 0 {
        Check::pass(kind, finding)
    } else {
        let unusable = error::and_unusable(elf.unusable_debug_file());
        Check::fail(
            kind,
            format!("the program is stripped{unusable}; {finding}"),
        )
    }
}

fn frametables(elf: &ElfFile) -> Check {
    let kind = CheckKind::Frametables;
    let calls = frametable_calls(elf);
    if calls > 0 {
        Check::pass(
            kind,
            format!(
                "{} of OCaml code with source lines",
                number_of(calls, "call")
            ),
        )
    } else if elf.data_symbol(OCAML_FRAMETABLE).is_some() {
        Check::fail(kind, "the frametables of the program have no source lines")
    } else {
        Check::pass(
            kind,
            format!("no symbol {OCAML_FRAMETABLE}: the program has no OCaml code, or is stripped"),
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

/// Checks the probes, and whether their sites can be changed.
fn of_probes(process: &Process) -> Vec<Check> {
    let target = match Target::open(process.pid()) {
        Ok(target) => target,
        Err(error) => {
            let kind = CheckKind::HugePages;
            let sites = if error.has_no_sites() {
                Check::pass(kind, "there is no site to change")
            } else {
                Check::unknown(kind, "the probes could not be read")
            };
            return vec![Check::error(CheckKind::Probes, error), sites];
        }
    };
    vec![probes(&target), huge_pages(process, &target)]
}

fn probes(target: &Target) -> Check {
    let kind = CheckKind::Probes;
    let states = match target.states() {
        Ok(states) => states,
        // What is denied has a check of its own.
        Err(error) if error.denial().is_some() => {
            let objects = target.objects();
            let count = objects
                .iter()
                .map(|it| it.table().probes().len())
                .sum::<usize>();
            return Check::unknown(
                kind,
                format!("{}, whose states cannot be read", number_of(count, "probe")),
            );
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
        "{} with provider {}: {} enabled, {} disabled, {inconsistent} inconsistent",
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
        Ok(()) => Check::pass(kind, "no other tool observes it"),
        Err(error) if error.denial().is_some() => Check::unknown(kind, error.to_string()),
        Err(error) => Check::error(kind, error),
    }
}

/// Whether an update could change the sites.
fn huge_pages(process: &Process, target: &Target) -> Check {
    let kind = CheckKind::HugePages;
    let image = target.opened.image();
    let sites = (0..image.program.site_count()).map(|index| {
        let address = image.program.site(index).address();
        (address, SITE_LEN as u64, MemoryPart::Site)
    });
    match image.mappings(process, sites, false) {
        Ok(_) => Check::pass(kind, "no site is on a page of 1 GiB or in a shared mapping"),
        Err(error) => Check::error(kind, error),
    }
}

/// Whether events can be read, and whether they have to be switched on for that.
fn runtime_events(process: &Process) -> Vec<Check> {
    let (kind, on) = (CheckKind::RuntimeEvents, CheckKind::RuntimeEventsOn);
    let are_on = || Target::open_any(process.pid())?.check_events();
    let error = match RuntimeEvents::of_process(process.pid()) {
        Err(error) => error,
        Ok(events) => {
            let found = Check::pass(kind, format!("on, of OCaml {}", events.version()));
            // They may be paused.
            return match are_on() {
                Ok(true) => vec![found, Check::pass(on, "nothing has to be switched on")],
                Ok(false) => {
                    let finding =
                        "off or paused: `gc` switches them on while it observes the process";
                    vec![
                        Check::pass(kind, finding),
                        Check::fail(on, "they are off or paused"),
                    ]
                }
                Err(why) => vec![found, Check::unknown(on, why.to_string())],
            };
        }
    };
    if !matches!(
        error.kind(),
        ErrorKind::RuntimeEvents(RuntimeEventsError::NotOn)
    ) {
        return vec![Check::error(kind, error)];
    }
    match are_on() {
        Ok(_) => {
            let finding = "off: `gc` switches them on while it observes the process";
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
