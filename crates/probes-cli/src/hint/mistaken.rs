//! Hints for users who name a probe where a function is expected, or a function where a probe is.

use probes_lib::{
    FunctionKind, FunctionSelector, Functions, Glob, ProbeTable, SelectedFunction, Target,
};

use super::CommandTarget;

/// The hint if `name`, which no probe has, is a glob or the name of a function.
pub(super) fn as_function(name: &str, target: &CommandTarget) -> Option<String> {
    if name.contains(['*', '?', '[']) {
        let hint = match target {
            CommandTarget::Attached(_) => {
                "names of probes are not globs; -enable-regexp req_ and -disable-regexp req_ select those that begin with req_"
            }
            CommandTarget::Program(_) => {
                "names of probes are not globs; -regexp req_ (with trace: -enable-regexp req_) selects those that begin with req_"
            }
            CommandTarget::Process(_) | CommandTarget::File(_) => {
                "names of probes are not globs; where a command has -regexp, -regexp req_ selects those that begin with req_"
            }
        };
        return Some(hint.to_owned());
    }
    let functions = match target {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => Functions::of_process(*pid),
        CommandTarget::Program(file) | CommandTarget::File(file) => Functions::of_file(file),
    };
    let glob = FunctionSelector::Glob(name.parse().ok()?);
    let functions = functions.ok()?;
    let found = functions.select(&[glob]).ok()?;
    let is_site = |it: &SelectedFunction<'_>| it.function.kind() == FunctionKind::ProbeSite;
    if found.iter().all(is_site) {
        return None;
    }
    // For a program that is to be started, flags of `trace` replace the commands.
    let [counts, times] = match target {
        CommandTarget::Program(_) => ["trace -count", "trace -latency"],
        _ => ["count", "latency"],
    };
    Some(format!(
        "{name} is a function: `{counts} -fn {name}` counts its calls, `{times} -fn {name}` times them"
    ))
}

/// The hint if `glob`, which matches no function, matches a probe.
pub(super) fn as_probe(glob: &str, target: &CommandTarget) -> Option<String> {
    let glob: Glob = glob.parse().ok()?;
    let of_table = |table: &ProbeTable| {
        let mut names = table.probes().map(|probe| probe.name().to_owned());
        names.find(|name| glob.matches(name))
    };
    let name = match target {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
            let objects = Target::open(*pid).ok()?.objects();
            objects.iter().find_map(|object| of_table(object.table()))?
        }
        CommandTarget::Program(file) | CommandTarget::File(file) => {
            of_table(&ProbeTable::read(file).ok()?)?
        }
    };
    let instead = match target {
        CommandTarget::Process(_) | CommandTarget::Attached(_) => {
            format!("`count -probe {name}` counts its hits")
        }
        CommandTarget::Program(_) => {
            "`trace -count` without -fn counts the hits of probes".to_owned()
        }
        CommandTarget::File(_) => "without -functions, `list` lists probes".to_owned(),
    };
    Some(format!("{name} is a probe: {instead}"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn globs_for_probes_lead_to_regular_expressions() {
        let program = CommandTarget::Program(PathBuf::from("x"));
        assert_eq!(
            as_function("req_*", &program).as_deref(),
            Some(
                "names of probes are not globs; -regexp req_ (with trace: -enable-regexp req_) selects those that begin with req_"
            )
        );
    }
}
