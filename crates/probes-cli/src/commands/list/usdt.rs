//! `list -provider`: the USDT probes of all providers.

use probes_lib::{Glob, UsdtProbes};

use super::{Args, usage};
use crate::commands::open_target::warn_of_unreadable;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{ProviderArgument, usdt_name};
use crate::hint::CommandTarget;
use crate::output::{self, Format, SiteSources, UsdtListing};
use crate::text::number_of;

pub(super) fn run(args: &Args, provider: &ProviderArgument) -> Result<(), Failure> {
    let names = args.wanted().map(|it| usdt_name(&it.typed));
    let names: Vec<Glob> = names.collect::<Result<_, _>>().map_err(usage)?;
    let provider = provider.glob.as_ref();
    match (&args.prog, args.pid) {
        (Some(file), _) => {
            let output = args.output.open()?;
            let failed = |error| Failure::Target(CommandTarget::File(file.clone()), error);
            let probes = UsdtProbes::of_file(file).map_err(failed)?;
            print(args, &probes, (provider, &names), &output, failed)
        }
        (None, Some(pid)) => {
            let output = args.output.open()?.with_pid(pid);
            let failed = Failure::of_process(pid);
            let probes = UsdtProbes::of_process(pid).map_err(&failed)?;
            warn_of_unreadable(&output.messages, probes.unreadable(), pid, "probes");
            print(args, &probes, (provider, &names), &output, failed)
        }
        (None, None) => Err(usage("needs -prog FILE or -pid N")),
    }
}

fn print(
    args: &Args,
    probes: &UsdtProbes,
    (provider, names): (Option<&Glob>, &[Glob]),
    output: &Output,
    failed: impl Fn(probes_lib::Error) -> Failure,
) -> Result<(), Failure> {
    let messages = &output.messages;
    for object in probes.objects() {
        let file = object.path().display();
        let sites = number_of(object.sites().len(), "USDT site");
        messages.step(format_args!("{file} has {sites}"));
        if object.left_out() > 0 {
            messages.note(&format!(
                "{} of {file} left out: addresses outside of its segments, or names that cannot be printed",
                number_of(object.left_out(), "note")
            ));
        }
    }
    let selected = probes.select(provider, names).map_err(failed)?;
    let mut sources = SiteSources::default();
    let shows_sites = args.sites || output.format == Format::Json;
    let of_sites = shows_sites.then_some(&mut sources);
    let listing = UsdtListing::of(probes, &selected, args.pid, args.paths.form(), of_sites);
    for why in &sources.unknown {
        messages.step(format_args!(
            "functions or source lines are left out: {why}"
        ));
    }
    let text = output::usdt(output.format, &listing, args.sites)?;
    output.print(&text)?;
    output.sum_up(messages, selected.len(), || listing.sum());
    Ok(())
}
