//! A terminal whose screen a test can read: a session of its own tmux server.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{children, status};
use crate::{DEADLINE, Guard, Scratch, eventually, output};

/// A session with a shell in it, which is closed when this is dropped.
#[derive(Debug)]
pub struct Terminal {
    /// Holds the server's socket.
    scratch: Scratch,
    _server: Guard,
    /// The shell.
    pid: i32,
}

impl Terminal {
    /// Opens a window of that size, and starts a shell in it.
    pub fn open(width: u16, height: u16) -> Terminal {
        let scratch = Scratch::new();
        let socket = scratch.file("tmux");
        // In the foreground, so that it is our child.
        let server = Guard::spawn(tmux(&socket).arg("-D").stdin(Stdio::null()));
        eventually("tmux takes commands", || {
            let listed = output(tmux(&socket).arg("list-sessions"));
            let errors = String::from_utf8_lossy(&listed.stderr);
            let is_up = listed.status.success() || errors.starts_with("no sessions");
            is_up.then_some(())
        });
        let mut terminal = Terminal {
            scratch,
            _server: server,
            pid: 0,
        };
        // A shell that exits stays on the screen, with its output.
        terminal.tmux(&["set-option", "-g", "remain-on-exit", "on"]);
        let (width, height) = (width.to_string(), height.to_string());
        let pid = terminal.tmux(
            &[
                &["new-session", "-d", "-P", "-F", "#{pane_pid}"][..],
                &["-x", &width, "-y", &height, "-e", "PS1=$ "],
                // Several words: tmux executes them itself, without the user's shell.
                &["bash", "--norc", "--noprofile", "-i"],
            ]
            .concat(),
        );
        terminal.pid = pid.trim_end().parse().expect("the pid of a shell");
        terminal.wait_for("$");
        terminal
    }

    /// Returns the pid of the shell.
    pub fn shell(&self) -> i32 {
        self.pid
    }

    /// Types a line.
    pub fn type_line(&self, line: &str) {
        self.tmux(&["send-keys", "-l", &format!("{line}\r")]);
    }

    /// Presses keys, by the names that tmux has for them: `q`, `Enter`, `C-c`, `PageDown`.
    pub fn press(&self, keys: &[&str]) {
        let mut words = vec!["send-keys"];
        words.extend(keys);
        self.tmux(&words);
    }

    /// What is on the screen, with lines that were wrapped joined.
    pub fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-J"])
    }

    /// Waits until the screen has `text`; returns the screen.
    pub fn wait_for(&self, text: &str) -> String {
        self.wait_until(text, |screen| screen.contains(text))
    }

    /// Waits until `is_so` holds for the screen; returns the screen.
    pub fn wait_until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let started = Instant::now();
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return screen;
            }
            let has_time = started.elapsed() < DEADLINE;
            assert!(has_time, "the screen never has {what:?}, but:\n{screen}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the value that a tmux format, such as `#{alternate_on}`, has for the window.
    pub fn format(&self, format: &str) -> String {
        let text = self.tmux(&["display-message", "-p", format]);
        text.trim_end().to_owned()
    }

    /// Gives the window another size.
    pub fn resize(&self, width: u16, height: u16) {
        let (width, height) = (width.to_string(), height.to_string());
        self.tmux(&["resize-window", "-x", &width, "-y", &height]);
    }

    /// Closes the terminal, as if its window were closed.
    pub fn close(&self) {
        self.tmux(&["kill-session"]);
    }

    /// Waits for a program of that name, started by the shell; returns its pid.
    pub fn child(&self, name: &str) -> i32 {
        eventually(&format!("the shell runs {name}"), || {
            let mut running = children(self.pid).into_iter();
            running.find(|&pid| status(pid, "Name") == name)
        })
    }

    /// Runs a tmux command; returns its output.
    fn tmux(&self, words: &[&str]) -> String {
        let output = output(tmux(&self.scratch.file("tmux")).args(words));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "tmux {words:?}: {errors}");
        String::from_utf8(output.stdout).expect("a screen is text")
    }
}

/// Returns a tmux command that inherits only PATH and HOME, and no other variable that the user or
/// a CI has set.
fn tmux(socket: &Path) -> Command {
    let mut command = Command::new("tmux");
    command.args(["-u", "-f", "/dev/null", "-S"]).arg(socket);
    command.env_clear();
    command.envs(["PATH", "HOME"].map(|name| (name, std::env::var_os(name).unwrap_or_default())));
    command
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // This also kills what runs in the terminal.
        let socket = self.scratch.file("tmux");
        output(tmux(&socket).arg("kill-server"));
    }
}
