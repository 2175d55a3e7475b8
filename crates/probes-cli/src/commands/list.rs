//! `list`: the probes of a file, or the functions or USDT probes of a file or process.

mod usdt;

use std::path::{Path, PathBuf};

use probes_lib::{Functions, Linking, ProbeTable, SourceMap};

use super::open_target::{detail, warn_of_unreadable};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, FunctionArgument, FunctionList, OutputFlags, PathFlags, ProviderArgument, functions,
    pid, provider,
};
use crate::hint::CommandTarget;
use crate::output::{self, FunctionListing, Listing, WarningKind};
use crate::progress::LongWork;
use crate::text::{Escaped, is_number, number_of};
use crate::usage::UsageError;

const HELP: &str = "\
In plain format, it prints one name on each line, sorted. With -sites, below each name
    site ADDRESS FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS
with addresses in the file; `-` stands for what the file does not tell.

With -functions, it prints a line for each function, by its address:
    ADDRESS SIZE OBJECT FILE:LINE CAN NAME
with the size in bytes, and with -pid addresses in the process, also of the libraries that it has
loaded. CAN is `count,time` if a jump can be put at its entry and at all its exits, `count(REASON)`
if only at its entry, and `no(REASON)` if not there either. `count -fn` counts; `latency -fn` times
them. GLOBS are separated by commas; if there are ( or <, a comma that a space follows belongs to a
name. Each is for the whole name as it is shown here, such as 'Stdlib.List.*': * stands for any
characters, ? for one, [ab] for one of these, [!ab] for another. A function with several names is
shown by the one that is asked for, or the first that matches; -json has them all. 0xADDRESS is the
function whose code is there, in the process or in the file. FILE:LINE(call) is the first call of a
function whose own line is not known. Calls that the compiler has inlined are not calls of a
function.

With -provider, it prints the USDT probes of all providers (any), or of those that the glob matches,
also of OCaml: one PROVIDER:NAME on each line, sorted. `count -usdt` counts those that are not of
OCaml. GLOBS are for NAME alone: -provider postgresql 'query__*'. With -sites, below each name
    site ADDRESS OBJECT FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS
with -pid addresses in the process, also of the libraries that it has loaded. FUNCTION may have
spaces.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes list -prog FILE [FLAGS]
       ocaml-probes list -functions -prog FILE|-pid N [FLAGS] [GLOBS...]
       ocaml-probes list -provider any|GLOB -prog FILE|-pid N [FLAGS] [GLOBS...]")]
#[command(after_help = HELP, next_help_heading = "Flags")]
pub(crate) struct Args {
    /// The file, as a path: it is not looked up in PATH
    #[arg(short, long, value_name = "FILE")]
    prog: Option<PathBuf>,
    /// The process whose functions or USDT probes to show
    #[arg(long, value_name = "N", value_parser = pid, conflicts_with = "prog")]
    pid: Option<i32>,
    /// Show functions instead of probes
    #[arg(long)]
    functions: bool,
    /// Show USDT probes of all providers (any), or of those that match
    #[arg(long, value_name = "GLOB", value_parser = provider, conflicts_with = "functions")]
    provider: Option<ProviderArgument>,
    /// Also show each site and semaphore
    #[arg(long, conflicts_with = "functions")]
    sites: bool,
    #[command(flatten)]
    paths: PathFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
    /// Globs for functions or USDT probes, 0xADDRESS or FILE:LINE; all without any
    #[arg(value_name = "GLOBS", value_parser = functions)]
    wanted: Vec<FunctionList>,
}

impl Args {
    /// What is to be listed; all, if there is none.
    fn wanted(&self) -> impl Iterator<Item = &FunctionArgument> {
        self.wanted.iter().flat_map(|list| &list.0)
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if let Some(file) = &args.prog {
        args.output.refuse_to_overwrite("-prog", file)?;
    }
    if let (Some(FunctionArgument { typed: glob, .. }), false) = (
        args.wanted().next(),
        args.functions || args.provider.is_some(),
    ) {
        let why = if args.prog.is_some() || args.pid.is_some() {
            format!(
                "\"{glob}\" needs -functions or -provider: a GLOB selects functions or USDT probes"
            )
        } else if is_number(glob) {
            format!(
                "needs -prog FILE, or -functions and -pid N: `ocaml-probes info -pid {glob}` shows the probes of a process"
            )
        } else {
            format!("needs -prog FILE, or -functions and -pid N: write -prog {glob}")
        };
        return Err(usage(why));
    }
    let with_paths = if args.provider.is_some() {
        "-sites"
    } else {
        "-sites or -functions"
    };
    let shows_paths = args.sites || args.functions;
    let refused = args.paths.refuse_without(with_paths, shows_paths);
    refused.map_err(usage)?;
    if let Some(provider) = &args.provider {
        return usdt::run(args, provider);
    }
    let output = args.output.open()?;
    match (&args.prog, args.pid) {
        (Some(file), _) if args.functions => {
            let failed = |error| Failure::Target(CommandTarget::File(file.clone()), error);
            let file_name = file.display().to_string();
            let what = format!("reading the functions of {}", Escaped(&file_name));
            let reading = LongWork::begin(what, &output.messages);
            list_functions(args, || Functions::of_file(file), reading, &output, failed)
        }
        (Some(file), _) => list_probes(args, file, &output),
        (None, Some(pid)) if args.functions => {
            let what = format!("reading the functions of process {pid}");
            let reading = LongWork::begin(what, &output.messages);
            list_functions(
                args,
                || Functions::of_process(pid),
                reading,
                &output.with_pid(pid),
                Failure::of_process(pid),
            )
        }
        (None, Some(pid)) => {
            let instead = format!("`ocaml-probes info -pid {pid}` shows the probes of a process");
            Err(usage(format!(
                "-pid needs -functions or -provider; {instead}"
            )))
        }
        (None, None) if args.functions => Err(usage("needs -prog FILE or -pid N")),
        (None, None) => Err(usage("needs -prog FILE")),
    }
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::Usage(UsageError::new(Some("list"), message))
}

fn list_probes(args: &Args, file: &Path, output: &Output) -> Result<(), Failure> {
    let table = ProbeTable::read(file)
        .map_err(|error| Failure::Target(CommandTarget::File(file.to_owned()), error))?;
    let linking = match table.linking() {
        Linking::Fixed => "linked to fixed addresses",
        Linking::PositionIndependent => "position independent",
    };
    output.messages.step(format_args!(
        "{} has {} and is {linking}",
        file.display(),
        number_of(table.probes().len(), "probe")
    ));
    let sources = std::iter::once_with(|| SourceMap::read(file));
    let detail = detail(output, args.sites, args.paths.form(), sources);
    let listing = Listing::of_file(&table, &detail);
    let text = output::listing(output.format, &listing, args.sites, false)?;
    output.print(&text)?;
    let probes = table.probes().len();
    output.sum_up(&output.messages, probes, || {
        let sites: usize = table.probes().map(|probe| probe.sites().len()).sum();
        let (probes, sites) = (number_of(probes, "probe"), number_of(sites, "site"));
        format!("{probes}, {sites}")
    });
    Ok(())
}

fn list_functions(
    args: &Args,
    read: impl FnOnce() -> probes_lib::Result<Functions>,
    reading: Option<LongWork>,
    output: &Output,
    failed: impl Fn(probes_lib::Error) -> Failure,
) -> Result<(), Failure> {
    let functions = read().map_err(&failed)?;
    let wanted = args.wanted().map(|it| it.selector.clone());
    let wanted: Vec<_> = wanted.collect();
    let selected = functions.select(&wanted).map_err(&failed)?;
    let listing = FunctionListing::of(&functions, &selected, args.pid, args.paths.form());
    // Erases its line before others are written.
    drop(reading);
    let messages = &output.messages;
    for object in functions.objects() {
        messages.step(format_args!(
            "{} has {}",
            object.table().path().display(),
            number_of(object.table().functions().len(), "function")
        ));
    }
    if let Some(pid) = args.pid {
        warn_of_unreadable(messages, functions.unreadable(), pid, "functions");
    }
    for why in listing.unknown() {
        messages.warning(
            WarningKind::UnreadableFile,
            &format!("not known which functions can be counted and timed: {why}"),
            "everything else about them is shown",
        );
    }
    output.print_parts(|to| output::functions(output.format, &listing, to))?;
    output.sum_up(messages, selected.len(), || listing.sum());
    Ok(())
}
