//! Lets a program whose sites are patched run until its OCaml runtime has started, to write the
//! digests of its code into the runtime's table of code fragments, which does not exist before.
//!
//! ```text
//! initialisers, main           C code, no OCaml code
//! caml_main                    registers the code, computes no digest
//!                              ◀── here the digests are written
//! caml_start_program           the first OCaml code
//! ```

use crate::address::{FileAddr, LiveAddr};
use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;
use crate::error::{Operation, Result};
use crate::observe::install::at_launch::AtLaunch;
use crate::observe::install::map_and_write::Installed;
use crate::process::image::Image;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::site::{JUMP_LEN, direct_call_target};
use crate::trace::at_exec::AtExec;
use crate::trace::run_to::NotReached;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;
use crate::update::code_digest::{self, CodeDigest};
use crate::update::options::Options;
use crate::update::report::Report;

/// A longer `main` is not that of the runtime.
const LONGEST_MAIN: u64 = 64;

/// A program whose sites are patched, and which has not run.
pub(super) struct Patched<'s> {
    pub(super) tracer: &'s Tracer<'s>,
    pub(super) at_exec: &'s AtExec,
    pub(super) image: &'s Image,
    pub(super) memory: &'s ProcessMemory,
    pub(super) options: Options,
}

impl<'s> Patched<'s> {
    /// Installs the observation, if there is one; writes the digests of code in which sites are
    /// patched into the runtime; and lets the program run. The state of the digests is stored in
    /// the report of the update, if that patched such sites, and in what is returned.
    ///
    /// # Errors
    ///
    /// Same as [`Target::observe`](crate::Target::observe), and if the program cannot be stopped
    /// again. It is killed then, at the latest when this thread ends.
    pub(super) fn release(
        &self,
        at_launch: Option<AtLaunch>,
        mut stopped: Stopped<'s>,
        report: &mut Report,
    ) -> Result<Option<Installed>> {
        let mut installed = None;
        if let Some(at_launch) = at_launch {
            let (tracer, at_exec) = (self.tracer, self.at_exec);
            let (again, new) = at_launch.install(
                tracer,
                at_exec,
                stopped,
                self.memory,
                self.image,
                self.options,
            )?;
            stopped = again;
            installed = Some(new);
        }
        let of_observation = installed.as_ref().map(|installed| installed.code_digest);
        let mut digest = of_observation.map_or(report.code_digest, |it| it.max(report.code_digest));
        let mut stopped = Some(stopped);
        if digest == CodeDigest::Pending {
            if let Some(before) = stopped.take() {
                let arenas = installed.iter().flat_map(|it| &it.arenas);
                let places = arenas.flat_map(|arena| arena.places().map(|(_, place)| place.at));
                let sites = self.image.program.sites_by_address();
                let patched: Vec<_> = sites.map(|site| site.address).chain(places).collect();
                (stopped, digest) = self.run_until_ocaml(before, &patched)?;
            }
        }
        if let Some(stopped) = stopped {
            stopped.release();
        }
        let patched = report.code_digest != CodeDigest::Unaffected;
        if patched {
            report.code_digest = digest;
        }
        if let Some(installed) = &mut installed {
            installed.code_digest = digest;
        }
        Ok(installed)
    }

    /// Runs the program until its first OCaml code, stops it there, and writes the digests. Returns the stopped
    /// program, `None` if it has exited or exec'd a new program, and the state of the digests. If `main` is not the
    /// runtime's (the program may start OCaml later or never), the program is not run, and nothing is written.
    /// `patched`: the sites of probes, and what is observed.
    ///
    /// # Errors
    ///
    /// If it cannot be stopped again.
    fn run_until_ocaml(
        &self,
        stopped: Stopped<'s>,
        patched: &[LiveAddr],
    ) -> Result<(Option<Stopped<'s>>, CodeDigest)> {
        let Some(start) = self.start_of_ocaml() else {
            return Ok((Some(stopped), CodeDigest::Pending));
        };
        let run = self
            .at_exec
            .run_to(self.tracer, stopped, self.memory, &[start], false);
        match run {
            Ok((stopped, _)) => {
                let (process, image) = (self.at_exec.process(), self.image);
                let digests = code_digest::prepare_patched(process, image, self.memory, patched);
                let digest = digests.write(&stopped, self.memory);
                Ok((Some(stopped), digest))
            }
            Err(NotReached::Exited) => Ok((None, CodeDigest::Unaffected)),
            Err(NotReached::Executed) => {
                self.at_exec.stopped(self.tracer).release();
                Ok((None, CodeDigest::Unaffected))
            }
            Err(reason) => Err(reason.error(self.at_exec.process().pid(), Operation::ControlStart)),
        }
    }

    /// Returns where the first OCaml code is called, if the executable's `main` is that of the runtime.
    fn start_of_ocaml(&self) -> Option<LiveAddr> {
        let program = &self.image.program;
        let mut objects = program.objects().iter();
        let executable: Option<&Object> = objects.find(|object| !program.can_unload(object));
        let (elf, bias) = match executable {
            Some(executable) => (&*executable.elf, executable.bias),
            None => (self.image).executable_without_probes(self.at_exec.process())?,
        };
        Some(bias.live(start_of_ocaml(elf)?))
    }
}

/// Returns the function of the runtime that calls the first OCaml code, if the file's `main` calls the
/// runtime at once.
fn start_of_ocaml(elf: &ElfFile) -> Option<FileAddr> {
    let symbols = elf.symbols(SymbolTable::Static).ok()??;
    let found = symbols.find(["main", "caml_main", "caml_start_program"]);
    let [[main], [caml_main], [start]] = found.as_ref().ok()?.each_ref().map(Vec::as_slice) else {
        return None;
    };
    if main.len > LONGEST_MAIN {
        return None;
    }
    let mut code = vec![0; main.len as usize];
    let mut segments = elf.loaded();
    let segment = segments.find(|it| it.executable && it.holds_in_file(main.address, main.len))?;
    elf.read_loaded(&segment, main.address, &mut code).ok()?;
    let calls_runtime = |(index, call): (usize, &[u8])| {
        let end = main.address.0 + (index + JUMP_LEN) as u64;
        let call = <[u8; JUMP_LEN]>::try_from(call).ok();
        let target = call.and_then(|call| direct_call_target(call, end));
        target == Some(caml_main.address.0)
    };
    let mut calls = code.windows(JUMP_LEN).enumerate();
    calls.any(calls_runtime).then_some(start.address)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use test_support::{fixture, program};

    #[test]
    fn start_of_ocaml_needs_the_runtimes_own_main() {
        let start = |file: &Path| start_of_ocaml(&ElfFile::open(file).unwrap());
        for name in ["closures/within", "closures/within_nopie", "service"] {
            assert!(start(&program(name)).is_some(), "{name}");
        }
        assert_eq!(start(&fixture("code_table_5_1.pie")), None);
    }
}
