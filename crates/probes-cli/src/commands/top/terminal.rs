//! The terminal: taken over for a screen, and given back as it was, however that ends.

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

use crate::output;

/// How long a terminal may take to be given back: one that nobody reads from takes nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where a terminal does not know its size: that of the VT100.
const USUAL: (u16, u16) = (80, 24);

/// Terminals say what they like, and each cell takes memory.
const LARGEST: (u16, u16) = (1000, 400);

/// Whether the terminal is taken over.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// A terminal that is taken over, until this is dropped or the program panics.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Output>>,
}

impl Screen {
    /// Takes the terminal over. Once `ending` can be read, nobody waits for the terminal any more.
    pub(super) fn take(ending: BorrowedFd<'_>) -> io::Result<Screen> {
        give_back_in_a_panic();
        let output = Output::open(Some(ending.try_clone_to_owned()?))?;
        take()?;
        let viewport = Viewport::Fixed(area()?);
        // A viewport that is fixed, because asking for the size again, as ratatui does otherwise, may
        // start tput.
        let options = TerminalOptions { viewport };
        let terminal = Terminal::with_options(CrosstermBackend::new(output), options)?;
        Ok(Screen { terminal })
    }

    /// Draws what has changed since it was drawn last.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let area = area()?;
        if area != self.terminal.get_frame().area() {
            self.terminal.resize(area)?;
        }
        self.terminal.draw(draw).map(drop)
    }

    /// Gives the terminal back while `meanwhile` is done, and takes it over again.
    pub(super) fn lend<T>(&mut self, meanwhile: impl FnOnce() -> T) -> io::Result<T> {
        give_back();
        let done = meanwhile();
        take()?;
        self.terminal.clear()?;
        Ok(done)
    }

    /// Gives the terminal back; says whether it has taken it.
    pub(super) fn give_back(self) -> bool {
        give_back()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn take() -> io::Result<()> {
    // Whatever fails from here on, the rest is given back.
    IS_TAKEN.store(true, Ordering::SeqCst);
    let taken = enable_raw_mode()
        .and_then(|()| Output::open(None))
        .and_then(|mut output| execute!(output, EnterAlternateScreen, Hide));
    taken.inspect_err(|_| {
        give_back();
    })
}

/// Does nothing if it was done before. Nobody is told that a terminal is gone.
fn give_back() -> bool {
    if !IS_TAKEN.swap(false, Ordering::SeqCst) {
        return true;
    }
    let shown = Output::open(None)
        .and_then(|mut output| execute!(output, ResetColor, LeaveAlternateScreen, Show));
    let is_cooked = disable_raw_mode();
    shown.is_ok() && is_cooked.is_ok()
}

/// So that what a panic says can be read.
fn give_back_in_a_panic() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        give_back();
        others(panic);
    }));
}

fn area() -> io::Result<Rect> {
    let size = window_size()?;
    let (width, height) = match (size.columns, size.rows) {
        (0, _) | (_, 0) => USUAL,
        size => size,
    };
    Ok(Rect::new(0, 0, width.min(LARGEST.0), height.min(LARGEST.1)))
}

/// Writes to the terminal without waiting for ever: one whose window hangs, or on which Ctrl-S was
/// pressed, would keep us from putting the process back.
struct Output {
    file: File,
    /// Not to wait for the terminal any more once this can be read.
    ending: Option<OwnedFd>,
    unwritten: Vec<u8>,
}

impl Output {
    fn open(ending: Option<OwnedFd>) -> io::Result<Output> {
        Ok(Output {
            file: output::terminal()?,
            ending,
            unwritten: Vec::new(),
        })
    }

    /// Waits until the terminal takes more.
    fn wait(&self) -> io::Result<()> {
        let mut ends = vec![PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
        let ending = self.ending.as_ref();
        ends.extend(ending.map(|ending| PollFd::new(ending.as_fd(), PollFlags::POLLIN)));
        let timeout = match ending {
            Some(_) => PollTimeout::NONE,
            None => PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX),
        };
        match poll(&mut ends, timeout) {
            Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
            Ok(_) if ends[0].any() == Some(true) => Ok(()),
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

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.unwritten.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // When ratatui ends it shows the cursor again, which was done, and would wait without end.
        let is_late = self.ending.is_some() && !IS_TAKEN.load(Ordering::SeqCst);
        let written = if is_late { Ok(()) } else { self.write_out() };
        self.unwritten.clear();
        written
    }
}
