//! `completion`: the script with which a shell completes command lines of this tool, and the answers that the script
//! asks for.

mod answer;
mod names;

use std::ffi::OsString;

use crate::destination::print;
use crate::failure::Failure;

const HELP: &str = "\
The script has the shell ask ocaml-probes itself what can come next: subcommands, flags, values,
pids with the names of their programs, and the probes and functions of the process (-pid) or file
(-prog) that is on the line. For this shell alone:
    source <(ocaml-probes completion bash)
    source <(ocaml-probes completion zsh)
    ocaml-probes completion fish | source
To keep it, write the script to where the shell looks for it:
    bash  ~/.local/share/bash-completion/completions/ocaml-probes
    zsh   _ocaml-probes in a directory of $fpath
    fish  ~/.config/fish/completions/ocaml-probes.fish";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes completion bash|zsh|fish", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    /// bash, zsh or fish
    #[arg(value_name = "SHELL", required_unless_present = "answer", value_parser = shell)]
    shell: Option<Shell>,
    /// Print what can complete the last of the words after `--`
    // For the scripts.
    #[arg(long, hide = true)]
    answer: bool,
    #[arg(value_name = "WORDS", last = true, hide = true)]
    words: Vec<OsString>,
}

#[derive(Clone, Copy, Debug)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

fn shell(typed: &str) -> Result<Shell, String> {
    match typed {
        "bash" => Ok(Shell::Bash),
        "zsh" => Ok(Shell::Zsh),
        "fish" => Ok(Shell::Fish),
        _ => Err(format!(
            "\"{typed}\" is not supported: SHELL is bash, zsh or fish"
        )),
    }
}

/// `definition` takes the words of a command line, and returns clap's definition of it, with all flags of the
/// subcommand that the words name.
pub(super) fn run(
    args: &Args,
    definition: fn(&[OsString]) -> clap::Command,
) -> Result<(), Failure> {
    match args.shell {
        Some(Shell::Bash) => print(include_str!("completion/completion.bash")),
        Some(Shell::Zsh) => print(include_str!("completion/completion.zsh")),
        Some(Shell::Fish) => print(include_str!("completion/completion.fish")),
        None => {
            let program = std::iter::once(OsString::from("ocaml-probes"));
            let words: Vec<OsString> = program.chain(args.words.iter().cloned()).collect();
            print(&answer::answer(&definition(&words), &words))
        }
    }
}
