//! [`Output`]: how the answer of a command is written, and where to: standard output, a file (-o), or, beside
//! a traced program whose standard output is its own, standard error.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, IsTerminal, LineWriter, Stdout, Write, stderr, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::Format;
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
    path: PathBuf,
    file: File,
    is_emptied: AtomicBool,
    /// Whether we have made it.
    is_new: bool,
}

impl AnswerFile {
    /// Opens a file, or creates it.
    fn open(path: &Path, messages: &Messages) -> io::Result<AnswerFile> {
        let (file, is_new) = open_or_create(path, messages)?;
        let is_emptied = AtomicBool::new(!file.metadata()?.is_file());
        Ok(AnswerFile {
            path: path.to_owned(),
            file,
            is_emptied,
            is_new,
        })
    }

    /// The file, emptied by the first call.
    fn emptied(&self) -> io::Result<&File> {
        if !self.is_emptied.load(Ordering::Relaxed) {
            self.file.set_len(0)?;
            self.is_emptied.store(true, Ordering::Relaxed);
        }
        Ok(&self.file)
    }
}

impl Drop for AnswerFile {
    /// If the command has not begun, no new file is left.
    fn drop(&mut self) {
        if self.is_new && !self.is_emptied.load(Ordering::Relaxed) {
            remove_new(&self.path, &self.file);
        }
    }
}

impl Output {
    /// Empties the file of -o, if there is one: the command has begun, and what is there is not its answer. The first
    /// part of an answer does so, too.
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
                Box::new(BufWriter::new(file.emptied().map_err(Failure::Output)?))
            }
        };
        let written = write(&mut to).and_then(|()| to.flush());
        written.map_err(Failure::Output)
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

    /// Writes the end of an answer, as [`Output::print_result`] does. If the reader of the output did not read,
    /// writes it to standard error, without waiting.
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
        let file = AnswerFile::open(path, messages);
        let file = file.map_err(|error| Failure::WriteFile(path.to_owned(), error))?;
        Ok(Destination::File(Arc::new(file)))
    }

    pub(crate) fn is_terminal_on_stdout(&self) -> bool {
        matches!(self, Destination::Stdout) && stdout().is_terminal()
    }

    /// Writes text.
    pub(crate) fn print(&self, text: &[u8]) -> Result<(), Failure> {
        let written = match self {
            Destination::Stdout => return print_bytes(text),
            Destination::File(file) => file.emptied().and_then(|mut file| file.write_all(text)),
            Destination::Stderr => {
                pieces(text).try_for_each(|piece| WaitingWriter(stderr()).write_all(piece))
            }
        };
        written.map_err(Failure::Output)
    }

    /// Writes the first lines of a text, or a part of the first line: no more than fits into a pipe that poll(2)
    /// reports as writable. Returns how many bytes were written.
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
            Destination::File(file) => action(file.file.as_fd()),
        }
    }
}

/// Opens a file to be written to, or creates it. Returns the file, and whether it is new; an existing one keeps its
/// contents. Waits for a reader if it is a pipe without one, and says so. Has to be called before signals are blocked,
/// so that they end the wait.
pub(crate) fn open_or_create(path: &Path, messages: &Messages) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    let options = options.write(true);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let options = options.create(true).truncate(false);
            Ok((open_to_write(options, path, messages)?, false))
        }
        created => Ok((created?, true)),
    }
}

/// Removes a file that we have made, unless it has contents by now, or its name is that of another file.
pub(crate) fn remove_new(path: &Path, file: &File) {
    let (Ok(made), Ok(found)) = (file.metadata(), fs::symlink_metadata(path)) else {
        return;
    };
    let is_same = (made.dev(), made.ino()) == (found.dev(), found.ino());
    if is_same && made.len() == 0 {
        // That it stays does no harm.
        let _ = fs::remove_file(path);
    }
}

fn open_to_write(options: &mut OpenOptions, path: &Path, messages: &Messages) -> io::Result<File> {
    let mut at_once = options.clone();
    match at_once.custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        Ok(file) => {
            // Writes wait for room.
            let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
            fcntl(&file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
            Ok(file)
        }
        Err(error) if is_pipe_without_reader(path, &error) => {
            let path_shown = path.display();
            messages.note(&format!(
                "{path_shown} is a pipe that no process reads: waits for a reader, until Ctrl-C"
            ));
            options.open(path)
        }
        Err(error) => Err(error),
    }
}

/// fifo(7): "A process can open a FIFO in nonblocking mode. [...] opening for write-only will fail with ENXIO (no such
/// device or address) unless the other end has already been opened."
fn is_pipe_without_reader(path: &Path, error: &io::Error) -> bool {
    let is_pipe = || path.metadata().is_ok_and(|it| it.file_type().is_fifo());
    error.raw_os_error() == Some(Errno::ENXIO as i32) && is_pipe()
}

/// Writes a result to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// Same as [`print()`], for text that may begin in the middle of a UTF-8 character.
fn print_bytes(text: &[u8]) -> Result<(), Failure> {
    let written = WaitingWriter(StandardOutput(stdout())).write_all(text);
    written.map_err(Failure::Output)
}

/// Standard output. [`std::io::Stdout`] passes over what it writes to a descriptor that is not open for writing.
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

/// Fails if standard output is not open for writing, as after `1<FILE`: before anything is done, because the answer
/// would be lost.
pub(crate) fn check_standard_output() -> Result<(), Failure> {
    let flags = fcntl(stdout(), FcntlArg::F_GETFL).map(OFlag::from_bits_truncate);
    let failed = |errno: Errno| Err(Failure::Output(errno.into()));
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
        errors.write_all(piece).map_err(Failure::Output)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use test_support::Scratch;

    use super::*;

    #[test]
    fn new_file_with_contents_is_kept() {
        let scratch = Scratch::new();
        let [empty, filled, moved] = ["empty", "filled", "moved"].map(|name| {
            let path = scratch.file(name);
            let file = File::create_new(&path).unwrap();
            (path, file)
        });
        // By another process.
        fs::write(&filled.0, "its answer").unwrap();
        fs::remove_file(&moved.0).unwrap();
        fs::write(&moved.0, "").unwrap();
        for (path, file) in [&empty, &filled, &moved] {
            remove_new(path, file);
        }
        let are_kept = [&empty, &filled, &moved].map(|(path, _)| path.exists());
        assert_eq!(are_kept, [false, true, true]);
    }

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
