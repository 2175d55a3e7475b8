//! `stack`: what all threads of a process do now.

use std::fmt::Write;

use probes_lib::{StackReport, Stacks};

use crate::failure::Failure;
use crate::flags::{Checked, OneProcess, OutputFlags};
use crate::hint::{self, CommandTarget};
use crate::output::{ThreadStacks, WarningKind};
use crate::text::number_of;

const HELP: &str = "\
Reads the stacks of blocked threads while they are blocked, and stops the process if any run,
or wait where a stack needs a register: for about 50 us a thread, not at all with -live. Nothing has
to be compiled in: no frame pointers, no debugging information. In plain format, it prints for each
thread
    thread TID ROLE STATE SYSTEM_CALL KERNEL_FUNCTION STACK NAME
and then its frames, the innermost first, `-` for what is not known:
    frame ADDRESS FUNCTION OBJECT FILE:LINE
ROLE is main, domain, systhread, tick (has systhreads take turns), backup (of a domain) or other,
STATE running, blocked, waiting (in the kernel, outside of a system call), stopped or frozen (by
its cgroup), STACK complete, guessed, cut or unread. In OCaml 5
    domain 3
follows if the domain of the thread is known (0 is that of the main thread), and of a blocked thread
    waits for file descriptor 5 (/tmp/fifo)
    waits for the futex at 0x55fbeae05a10, a mutex held by thread 4247
if the system call, and a mutex of the C library, say so. A stack is complete if it reaches to the
code that the thread began with; if it is cut, its last line says why; if it is guessed, a frame was
found by searching the stack, because a register was not known. docs/profile.md says more.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes stack -pid N [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    /// Stop nothing: threads that are running are shown without frames
    #[arg(long)]
    live: bool,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let pid = args.process.pid;
    let output = &args.output.open()?.with_pid(pid);
    let of_process = Failure::of_process(pid);
    let mut stacks = Stacks::of_process(pid).map_err(&of_process)?;
    let report = stacks.read(args.live).map_err(&of_process)?;
    output.begin()?;
    if let Some(stopped) = report.stopped {
        let time = stopped.as_micros();
        output.messages.note(&format!("stopped {time} us"));
    }
    let shown = ThreadStacks::new(pid, stacks.program(), &report);
    output.print_result(&shown.text(output.format)?)?;
    let unreadable: Vec<String> = stacks
        .unreadable()
        .map(|path| path.display().to_string())
        .collect();
    warn(pid, &report, args.live, &unreadable, output);
    Ok(())
}

/// Says which stacks are not what they should be, and why.
fn warn(
    pid: i32,
    report: &StackReport,
    is_live: bool,
    unreadable: &[String],
    output: &crate::destination::Output,
) {
    let count = |is_so: &dyn Fn(&probes_lib::ThreadStack) -> bool| {
        let threads = report.threads.iter();
        threads.filter(|thread| is_so(thread)).count()
    };
    let unread = count(&|thread| thread.end.is_none());
    if unread > 0 {
        let (why, remedy) = match &report.not_stopped {
            Some(error) => {
                let hint = hint::of(error, &CommandTarget::Process(pid));
                let otherwise = || "try again, or stop what traces it".to_owned();
                (error.to_string(), hint.unwrap_or_else(otherwise))
            }
            None if is_live => (
                "they were running, and -live stops nothing".to_owned(),
                "without -live, they are stopped for about 50 us each".to_owned(),
            ),
            None => ("they have exited since".to_owned(), "try again".to_owned()),
        };
        let threads = number_of(unread, "thread");
        let text = format!("{threads} without frames: {why}");
        output
            .messages
            .warning(WarningKind::UnreadStacks, &text, &remedy);
    }
    let cut = count(&|thread| thread.end.is_some() && !thread.is_complete());
    if cut > 0 {
        let stacks = number_of(cut, "stack");
        let mut why = match unreadable {
            [] => String::new(),
            paths => format!("; these files could not be read: {}", paths.join(", ")),
        };
        let is_guessed = report.threads.iter().any(|thread| thread.is_guessed);
        if let Some(error) = report.not_stopped.as_ref().filter(|_| is_guessed) {
            // Writing to a String does not fail.
            let _ = write!(why, "; it was not stopped to read registers: {error}");
        }
        output.messages.warning(
            WarningKind::CutStacks,
            &format!("{stacks} cut or guessed{why}"),
            "the last line of a cut stack says why (`cut` in JSON); of a guessed one, a register was not known",
        );
    }
}
