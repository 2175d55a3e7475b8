//! [`Screen`]: the terminal in raw mode, on its alternate screen; restored at the end, also after a
//! panic.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::style::ResetColor;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, window_size,
};
use ratatui::layout::Rect;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};

use crate::interruptible_output::open_terminal;

/// How long a terminal that is being restored may accept no bytes, as one whose output is not read.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The size that is used if a terminal does not know its own: that of the VT100.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// The largest size that is used: a terminal may claim any size, and each cell takes memory.
const LARGEST: (u16, u16) = (1000, 400);

/// Whether the terminal is in raw mode and on the alternate screen.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// A terminal in raw mode, on its alternate screen, until this is dropped or the program panics.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<TerminalWriter>>,
}

impl Screen {
    /// Takes the terminal over. Once `interrupt` is readable, writes do not wait for the terminal any more.
    pub(super) fn take(interrupt: BorrowedFd<'_>) -> io::Result<Screen> {
        restore_on_panic();
        let output = TerminalWriter::open(Some(interrupt.try_clone_to_owned()?))?;
        // Before the terminal is changed: if this fails, there is nothing to restore.
        let viewport = Viewport::Fixed(area()?);
        take()?;
        // A viewport that is fixed, because asking for the size again, as ratatui does otherwise, may
        // start tput.
        let options = TerminalOptions { viewport };
        let terminal = Terminal::with_options(CrosstermBackend::new(output), options)?;
        let mut screen = Screen { terminal };
        // Terminals without an alternate screen, such as GNU screen by default, still show what was there.
        screen.terminal.clear()?;
        Ok(screen)
    }

    /// Draws what has changed since it was drawn last.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let area = area()?;
        if area != self.terminal.get_frame().area() {
            self.terminal.resize(area)?;
        }
        self.terminal.draw(draw).map(drop)
    }

    /// Restores the terminal while `meanwhile` runs, and takes it over again.
    pub(super) fn leave_while<T>(&mut self, meanwhile: impl FnOnce() -> T) -> io::Result<T> {
        restore();
        let done = meanwhile();
        take()?;
        self.terminal.clear()?;
        Ok(done)
    }

    /// Restores the terminal, and leaves `text` on it; returns whether that succeeded.
    pub(super) fn restore(self, text: &str) -> bool {
        restore() && leave(text).is_ok()
    }

    /// The width and the height of the terminal.
    pub(super) fn size(&self) -> (u16, u16) {
        area().map_or(DEFAULT_SIZE, |area| (area.width, area.height))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn take() -> io::Result<()> {
    // If a step fails, those before it are undone.
    IS_TAKEN.store(true, Ordering::SeqCst);
    let taken = enable_raw_mode()
        .and_then(|()| TerminalWriter::open(None))
        .and_then(|mut output| execute!(output, EnterAlternateScreen, Hide));
    taken.inspect_err(|_| {
        restore();
    })
}

/// Restores the terminal, unless that was done before. If the terminal is gone, there is no place
/// to report that.
fn restore() -> bool {
    if !IS_TAKEN.swap(false, Ordering::SeqCst) {
        return true;
    }
    let shown = TerminalWriter::open(None)
        .and_then(|mut output| execute!(output, ResetColor, LeaveAlternateScreen, Show));
    let raw_mode_disabled = disable_raw_mode();
    shown.is_ok() && raw_mode_disabled.is_ok()
}

/// Writes on a terminal that was restored.
fn leave(text: &str) -> io::Result<()> {
    let mut output = TerminalWriter::open(None)?;
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// Makes a panic restore the terminal first, so that its message can be read.
fn restore_on_panic() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        restore();
        others(panic);
    }));
}

fn area() -> io::Result<Rect> {
    let size = window_size()?;
    let (width, height) = match (size.columns, size.rows) {
        (0, _) | (_, 0) => DEFAULT_SIZE,
        size => size,
    };
    Ok(Rect::new(0, 0, width.min(LARGEST.0), height.min(LARGEST.1)))
}

/// Writes to the terminal without waiting forever: a terminal whose window hangs, or on which
/// Ctrl-S was pressed, would keep `top` from removing its observation.
struct TerminalWriter {
    file: File,
    /// Once this is readable, writes do not wait for the terminal any more.
    interrupt: Option<OwnedFd>,
    unwritten: Vec<u8>,
}

impl TerminalWriter {
    fn open(interrupt: Option<OwnedFd>) -> io::Result<TerminalWriter> {
        Ok(TerminalWriter {
            file: open_terminal()?,
            interrupt,
            unwritten: Vec::new(),
        })
    }

    /// Waits until the terminal takes more.
    fn wait(&self) -> io::Result<()> {
        let mut fds = vec![PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
        let interrupt = self.interrupt.as_ref();
        fds.extend(interrupt.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        let timeout = match interrupt {
            Some(_) => PollTimeout::NONE,
            None => PollTimeout::try_from(RESTORE_TIMEOUT).unwrap_or(PollTimeout::MAX),
        };
        match poll(&mut fds, timeout) {
            Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
            Ok(_) if fds[0].any() == Some(true) => Ok(()),
            Ok(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn write_out(&mut self) -> io::Result<()> {
        let mut rest = self.unwritten.as_slice();
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait()?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Write for TerminalWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.unwritten.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // When ratatui's terminal is dropped, it shows the cursor again. That was done already, and
        // with an `interrupt` the writing could wait without end.
        let is_late = self.interrupt.is_some() && !IS_TAKEN.load(Ordering::SeqCst);
        let written = if is_late { Ok(()) } else { self.write_out() };
        self.unwritten.clear();
        written
    }
}
