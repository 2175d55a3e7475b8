//! [`Output`]: how the answer of a command is written, and where to: standard output, a file (-o), or, beside
//! a traced program whose standard output is its own, standard error.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, LineWriter, Stdout, Write, stderr, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::Format;
use crate::output_file::OutputFile;
use crate::poll::{PIPE_BUF, WaitingWriter, is_writable};
use crate::text::TERMINAL_LINES;

/// How the answer of a command is written and where to, and the messages beside it.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) format: Format,
    pub(crate) messages: Messages,
    pub(crate) destination: Destination,
    /// Whether commands that change something print what they have changed.
    pub(crate) reports_changes: bool,
}

/// Where an answer is written.
#[derive(Clone, Debug)]
pub(crate) enum Destination {
    Stdout,
    Stderr,
    File(Arc<AnswerFile>),
}

/// The file of -o. It keeps its old contents until the command has begun, so a command that fails earlier leaves
/// them.
#[derive(Debug)]
pub(crate) struct AnswerFile {
    file: OutputFile,
    is_emptied: AtomicBool,
}

impl AnswerFile {
    /// Opens a file, or creates it.
    fn open(path: &Path, messages: &Messages) -> Result<AnswerFile, Failure> {
        let file = OutputFile::create(path, messages)?;
        let is_emptied = AtomicBool::new(!file.is_regular());
        Ok(AnswerFile { file, is_emptied })
    }

    /// The file, emptied by the first call.
    fn emptied(&self) -> io::Result<&File> {
        let file = self.file.file();
        if !self.is_emptied.load(Ordering::Relaxed) {
            file.set_len(0)?;
            self.file.keep();
            self.is_emptied.store(true, Ordering::Relaxed);
        }
        Ok(file)
    }
}

impl Output {
    /// Empties the file of -o, if there is one, as the first write does: from now on, it holds the answer of this command
    /// alone.
    pub(crate) fn begin(&self) -> Result<(), Failure> {
        self.destination.print(b"")
    }

    /// Writes an answer.
    pub(crate) fn print(&self, text: &str) -> Result<(), Failure> {
        self.destination.print(text.as_bytes())
    }

    /// Writes an answer part by part: it may be larger than memory.
    pub(crate) fn print_parts(
        &self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let mut to: Box<dyn Write> = match &self.destination {
            Destination::Stdout => {
                Box::new(BufWriter::new(WaitingWriter(StandardOutput(stdout()))))
            }
            Destination::Stderr => Box::new(LineWriter::new(WaitingWriter(stderr()))),
            Destination::File(file) => {
                let emptied = file.emptied();
                Box::new(BufWriter::new(
                    emptied.map_err(|error| self.destination.unwritten(error))?,
                ))
            }
        };
        let written = write(&mut to).and_then(|()| to.flush());
        written.map_err(|error| self.destination.unwritten(error))
    }

    /// Writes a result that took time to obtain. If that fails, writes it to standard error, so that it is not lost,
    /// and still returns the failure. If the pipe is closed, its reader does not want the answer, and nothing more is
    /// written.
    pub(crate) fn print_result(&self, text: &str) -> Result<(), Failure> {
        let printed = self.print(text);
        if let Err(failure) = &printed {
            let is_elsewhere = !matches!(self.destination, Destination::Stderr);
            if is_elsewhere && !failure.is_closed_pipe() {
                // If it cannot be written there either, there is no other place.
                let _ = Destination::Stderr.print(text.as_bytes());
            }
        }
        printed
    }

    /// Writes the end of an answer, as [`Output::print_result`] does. If the reader of the output has
    /// stopped reading, writes it to standard error, without waiting.
    pub(crate) fn print_last(&self, text: &str, output_was_read: bool) -> Result<(), Failure> {
        if output_was_read {
            self.print_result(text)
        } else {
            print_result_without_waiting(text)
        }
    }

    /// Notes what the lines of an answer for people add up to, if they do not fit on a usual terminal.
    pub(crate) fn sum_up(&self, messages: &Messages, lines: usize, sum: impl FnOnce() -> String) {
        if self.format != Format::Json && lines > TERMINAL_LINES {
            messages.note(&sum());
        }
    }

    /// The same output, with messages about `pid`, the only process.
    pub(crate) fn with_pid(self, pid: i32) -> Output {
        Output {
            messages: self.messages.with_pid(pid),
            ..self
        }
    }

    /// Whether programs can tell the answer from anything else that is written to the same place.
    pub(crate) fn is_separable(&self) -> bool {
        matches!(self.destination, Destination::File(_)) || self.format == Format::Json
    }
}

impl Destination {
    /// Opens or creates the file of -o.
    pub(crate) fn file(path: &Path, messages: &Messages) -> Result<Destination, Failure> {
        let file = AnswerFile::open(path, messages)?;
        Ok(Destination::File(Arc::new(file)))
    }

    pub(crate) fn is_terminal_on_stdout(&self) -> bool {
        matches!(self, Destination::Stdout) && stdout().is_terminal()
    }

    /// Writes all of `text`, which may begin in the middle of a UTF-8 character. Waits for room.
    pub(crate) fn print(&self, text: &[u8]) -> Result<(), Failure> {
        let written = match self {
            Destination::Stdout => WaitingWriter(StandardOutput(stdout())).write_all(text),
            Destination::File(file) => file.emptied().and_then(|mut file| file.write_all(text)),
            Destination::Stderr => {
                pieces(text).try_for_each(|piece| WaitingWriter(stderr()).write_all(piece))
            }
        };
        written.map_err(|error| self.unwritten(error))
    }

    /// The failure to write to it.
    pub(crate) fn unwritten(&self, source: io::Error) -> Failure {
        let file = match self {
            Destination::File(file) => Some(file.file.path().to_owned()),
            Destination::Stdout | Destination::Stderr => None,
        };
        Failure::Output { file, source }
    }

    /// Writes as many whole lines as fit into [`PIPE_BUF`] bytes, which a pipe that poll(2) reports as writable has room
    /// for; of a longer first line, its first [`PIPE_BUF`] bytes. Returns how many bytes were written.
    pub(crate) fn write_some(&self, text: &[u8]) -> io::Result<usize> {
        let most = &text[..text.len().min(PIPE_BUF)];
        // Whole lines, so that no signal cuts one.
        let end = most.iter().rposition(|&byte| byte == b'\n');
        let piece = &most[..end.map_or(most.len(), |end| end + 1)];
        match self {
            Destination::Stdout => return StandardOutput(stdout()).write(piece),
            Destination::Stderr => return stderr().write(piece),
            Destination::File(file) => file.emptied()?.write_all(piece)?,
        }
        Ok(piece.len())
    }

    /// Calls `action` with the descriptor that is written to.
    pub(crate) fn with_fd<T>(&self, action: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        match self {
            Destination::Stdout => action(stdout().as_fd()),
            Destination::Stderr => action(stderr().as_fd()),
            Destination::File(file) => action(file.file.file().as_fd()),
        }
    }
}

/// Writes a result to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    Destination::Stdout.print(text.as_bytes())
}

/// Standard output. [`std::io::Stdout`] ignores that its descriptor is not open for writing (EBADF), and the text would
/// be lost silently.
struct StandardOutput(Stdout);

impl AsFd for StandardOutput {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(nix::unistd::write(&self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Fails if standard output is not open for writing, as after `1<FILE`. Called before a command does its work, whose
/// answer would be lost.
pub(crate) fn check_standard_output() -> Result<(), Failure> {
    let flags = fcntl(stdout(), FcntlArg::F_GETFL).map(OFlag::from_bits_truncate);
    let failed = |errno: Errno| Err(Failure::of_output(errno.into()));
    match flags {
        Ok(flags) if flags & OFlag::O_ACCMODE == OFlag::O_RDONLY => failed(Errno::EBADF),
        Ok(_) => Ok(()),
        Err(errno) => failed(errno),
    }
}

/// Splits lines into pieces to be written by one write(2) each, so that what other processes write to the same
/// place comes between lines: as many lines as fit into PIPE_BUF, or one longer line.
fn pieces(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end_after = |from: usize| {
            let newline = rest[from..].iter().position(|&byte| byte == b'\n');
            newline.map_or(rest.len(), |at| from + at + 1)
        };
        let mut end = end_after(0);
        while end < rest.len() && end_after(end) <= PIPE_BUF {
            end = end_after(end);
        }
        let (piece, others) = rest.split_at(end);
        rest = others;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Writes as much of a result to standard error as is possible without waiting: the command was interrupted, and the
/// answer is not read.
fn print_result_without_waiting(text: &str) -> Result<(), Failure> {
    for piece in text.as_bytes().chunks(PIPE_BUF) {
        let mut errors = stderr();
        if !is_writable(errors.as_fd()) {
            break;
        }
        errors.write_all(piece).map_err(Failure::of_output)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_lines_of_bounded_length() {
        let split =
            |text: &str| -> Vec<usize> { pieces(text.as_bytes()).map(<[u8]>::len).collect() };
        assert_eq!(split(""), [0; 0]);
        assert_eq!(split("a\nb"), [3]);
        let line = |len: usize| "x".repeat(len - 1) + "\n";
        assert_eq!(split(&(line(4000) + &line(96) + &line(1))), [4096, 1]);
        assert_eq!(split(&(line(4000) + &line(97) + &line(1))), [4000, 98]);
        assert_eq!(
            split(&(line(1) + &line(9000) + &line(2) + "y")),
            [1, 9000, 3]
        );
    }
}
