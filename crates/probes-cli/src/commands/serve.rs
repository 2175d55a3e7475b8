//! `serve`: an exporter of what processes record, for Prometheus. Four threads: the main one reads the processes, one
//! finds them and begins to observe them ([`scan`]), one makes pages of what was read ([`page_maker`]), which may take long, and one
//! serves clients ([`http`]). A client waits for the next reading of the processes, but never for a process that is about to be
//! observed; and no client delays the thread that reads, whose runtime events are overwritten if they are not read in time.

mod exposition;
mod figures;
mod http;
mod notifications;
mod observed;
mod page;
mod page_maker;
mod processes;
mod scan;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use tokio::sync::oneshot;

use self::exposition::TextFormat;
use self::http::{Server, ServerFigures};
use self::notifications::{Notification, NotificationReceiver, NotificationSender, notifications};
use self::page::ShownExporter;
use self::page_maker::{PageMaker, PageRequest};
use self::processes::Processes;
use self::scan::{Ended, Scanner, ServeRequest};
use crate::descriptors;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, OutputFlags, OverrideFlags, ServedFlags, TargetSelection, duration, with_regexp_help,
};
use crate::messages::Messages;
use crate::output::{self, WarningKind};
use crate::poll::poll_timeout;
use crate::signals::TerminationSignals;
use crate::usage::UsageError;

const HELP: &str = "\
Observes processes as `count`, `latency` and `gc` do, and serves their figures to Prometheus and
others, as OpenMetrics or as Prometheus' text, at /metrics. docs/serve.md names the metrics, and has
rules for alerts and a unit for systemd. It prints the address once the processes that run have been
found, and then serves until Ctrl-C.

With -name, processes that are started later are found within the time of -scan. One that exits
keeps its last figures for a minute. One that cannot be observed is reported once, as an error and
as a metric, and is tried again; the others are served. What is exported:
    -probe, -regexp, -usdt    ocaml_probes_hits_total; all probes, if nothing else is selected
    -pair START,STOP          ocaml_probes_pair_duration_seconds, a histogram; see `help latency`
    -fn GLOBS                 ocaml_probes_call_duration_seconds, a histogram
    -gc                       ocaml_probes_gc_pause_seconds, a histogram, and allocated bytes, from
                              the events that the runtime of OCaml 5 writes itself; see `help gc`

Every client that can connect can read all figures, and can do nothing else. If the address is not
one of this machine alone, a warning says so. When serve ends, by SIGINT, SIGTERM, SIGHUP or
SIGQUIT, it removes the instrumentation. If it is killed by SIGKILL, the processes go on recording,
which does no harm; the next serve removes that.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes serve -pid N [FLAGS]
       ocaml-probes serve -name RE [FLAGS]")]
#[command(after_help = with_regexp_help(HELP), next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    served: Checked<ServedFlags>,
    /// Where to listen; port 0 is any that is free
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = address, default_value = "127.0.0.1:9464")]
    listen: SocketAddr,
    /// How often to look for processes
    #[arg(long, value_name = "DURATION", value_parser = scan_interval, default_value = "5s")]
    scan: Duration,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

/// How often processes are read, however seldom they are scraped. If one exits, the last reading is all there is.
const FIGURES_INTERVAL: Duration = Duration::from_secs(1);

/// How often runtime events are read: their rings hold more than what is written in this time.
const RUNTIME_EVENTS_INTERVAL: Duration = Duration::from_millis(20);

/// The shortest time from the beginning of one reading to the beginning of the next, however many clients there are.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Enough descriptors for as many processes as are observed at a time, and for clients.
const DESCRIPTORS: u64 = 8192;

/// Looking for processes more often than this costs time and finds nothing more.
const SHORTEST_SCAN: Duration = Duration::from_millis(100);

fn address(typed: &str) -> Result<SocketAddr, String> {
    typed.parse().map_err(|_| {
        format!("\"{typed}\" is not ADDRESS:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    })
}

fn scan_interval(typed: &str) -> Result<Duration, String> {
    let interval = duration(typed)?;
    if interval < SHORTEST_SCAN {
        let shortest = humantime::format_duration(SHORTEST_SCAN);
        return Err(format!("{typed} is too short; {shortest} is the shortest"));
    }
    Ok(interval)
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if args.served.observation().is_none() {
        let refused = args.overrides.refuse_without_observation("-gc");
        refused.map_err(|why| Failure::Usage(UsageError::new(Some("serve"), why)))?;
    }
    let output = args.output.open()?;
    // Before anything is changed, because it may fail.
    let failed = |source| Failure::Listen(args.listen, source);
    let listener = TcpListener::bind(args.listen).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    descriptors::raise_limit(DESCRIPTORS);
    // Blocked, so that no signal ends this process before it has removed the instrumentation.
    let signals = TerminationSignals::block()?;
    let (sender, receiver) = notifications()?;
    let (ends, received_ends) = channel();
    let is_ending = Arc::new(AtomicBool::new(false));
    let request = args.request(output.messages);
    let scanner = Scanner::new(request, sender.clone(), received_ends, is_ending.clone())?;
    let page_maker = PageMaker::start(sender.clone())?;
    let server_figures = Arc::new(ServerFigures::default());
    let server = Server {
        listener,
        notifications: sender.clone(),
        figures: server_figures.clone(),
        is_loopback: address.ip().is_loopback(),
    };
    let mut exporter = Exporter {
        args,
        output: &output,
        address,
        signals: &signals,
        receiver,
        processes: args.processes(ends, output.messages),
        server: Some(server),
        server_figures,
        scrapes: Vec::new(),
        page_maker,
        makes_page: false,
        shown: ShownExporter::default(),
    };
    let ended = exporter.run_beside(scanner, &sender, &is_ending);
    let removed = exporter.remove_instrumentation();
    signals.unblock();
    match ended {
        Ok(ended) => ended.and(removed),
        Err(panic) => resume_unwind(panic),
    }
}

impl Args {
    /// What is to be found, and observed.
    fn request(&self, messages: Messages) -> ServeRequest<'_> {
        ServeRequest {
            selection: &self.selection,
            observation: self.served.observation(),
            needs_probes: self.served.needs_probes(),
            has_functions: self.served.has_functions(),
            events: self.served.gc,
            options: self.overrides.options(),
            interval: self.scan,
            messages,
        }
    }

    /// The observed processes: none yet.
    fn processes(&self, ends: Sender<Ended>, messages: Messages) -> Processes {
        let buckets = self.served.buckets.clone();
        let is_one = self.selection.is_one_pid();
        Processes::new(ends, buckets, self.served.gc, is_one, messages)
    }
}

/// The thread that reads the processes.
struct Exporter<'e> {
    args: &'e Args,
    output: &'e Output,
    address: SocketAddr,
    signals: &'e TerminationSignals,
    receiver: NotificationReceiver,
    processes: Processes,
    /// What is to serve clients after the first scan; `None` once it does.
    server: Option<Server>,
    server_figures: Arc<ServerFigures>,
    /// The clients that wait for a page.
    scrapes: Vec<(TextFormat, oneshot::Sender<Bytes>)>,
    page_maker: PageMaker,
    /// Whether a page is being made: there is one at a time.
    makes_page: bool,
    shown: ShownExporter,
}

impl Exporter<'_> {
    /// Serves, while a second thread looks for processes. If either thread panics, returns what it has panicked with.
    fn run_beside(
        &mut self,
        scanner: Scanner<'_>,
        sender: &NotificationSender,
        is_ending: &AtomicBool,
    ) -> thread::Result<Result<(), Failure>> {
        let scan = || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| scanner.run())) {
                sender.send(Notification::Panicked(panic));
            }
        };
        thread::scope(|scope| {
            let ended = match thread::Builder::new().spawn_scoped(scope, scan) {
                // If it panics, the instrumentation is removed as well.
                Ok(_) => catch_unwind(AssertUnwindSafe(|| self.run())),
                Err(source) => Ok(Err(Failure::System("start a thread", source))),
            };
            // The scanner may be about to observe a process: the scope waits until it has ended, before the
            // instrumentation is removed.
            is_ending.store(true, Ordering::Relaxed);
            self.processes.end_scan();
            ended
        })
    }

    /// Serves until a signal comes or, if all processes were given by pid, until all have exited and their last figures
    /// have expired.
    fn run(&mut self) -> Result<(), Failure> {
        let mut read_at = Instant::now();
        loop {
            let is_scraped = !self.scrapes.is_empty() && !self.makes_page;
            let interval = if is_scraped {
                SHORTEST_INTERVAL
            } else {
                FIGURES_INTERVAL
            };
            let mut left = interval.saturating_sub(read_at.elapsed());
            if self.processes.reads_events() {
                left = left.min(RUNTIME_EVENTS_INTERVAL);
            }
            if self.wait(left)? {
                return Ok(());
            }
            while let Some(notification) = self.receiver.next() {
                self.handle(notification)?;
            }
            self.processes.read_events();
            if read_at.elapsed() >= interval {
                read_at = Instant::now();
                self.processes.read();
                self.shown.collection = read_at.elapsed();
                self.answer();
            }
            let is_by_pid = !self.args.selection.is_by_name();
            if is_by_pid && self.server.is_none() && self.processes.is_empty() {
                let messages = self.output.messages;
                messages.note("all processes have exited");
                return Ok(());
            }
        }
    }

    /// Waits for a notification or a signal, at most this long; returns whether a signal has come.
    fn wait(&self, left: Duration) -> Result<bool, Failure> {
        let mut fds = [self.signals.as_fd(), self.receiver.as_fd()]
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, poll_timeout(left)) {
            Ok(_) | Err(Errno::EINTR) => Ok(self.signals.take_interrupt()),
            Err(errno) => Err(Failure::System("wait", errno.into())),
        }
    }

    fn handle(&mut self, notification: Notification) -> Result<(), Failure> {
        match notification {
            Notification::Scrape { format, reply } => self.scrapes.push((format, reply)),
            Notification::PageMade => self.makes_page = false,
            Notification::Panicked(panic) => resume_unwind(panic),
            Notification::Scanned(took) => {
                self.shown.scan = took;
                if let Some(server) = self.server.take() {
                    self.begin_to_serve(server)?;
                }
            }
            Notification::Observed(observed) => self.processes.begin(*observed),
            Notification::Refused {
                pid,
                program,
                failure,
            } => self.processes.refuse(pid, program, failure),
            Notification::Missing(pid, failures) => self.processes.report_missing(pid, &failures),
            Notification::RuntimeEvents(pid, events) => self.processes.begin_events(pid, *events),
            Notification::NoRuntimeEvents(pid, failure) => {
                self.processes.refuse_events(pid, &failure)
            }
            Notification::Gone(pid) => self.processes.forget(pid),
        }
        Ok(())
    }

    /// Serves clients from now on: all processes that run have been looked at.
    fn begin_to_serve(&mut self, server: Server) -> Result<(), Failure> {
        let messages = &self.output.messages;
        let is_by_name = self.args.selection.is_by_name();
        self.processes.begin_to_serve(!is_by_name)?;
        if !self.address.ip().is_loopback() {
            messages.warning(
                WarningKind::NotLoopback,
                &format!("every client that can connect to {} can read all figures", self.address),
                "-listen 127.0.0.1:9464 lets only this machine connect; docs/serve.md says how to let others",
            );
        }
        let started = server.start();
        started.map_err(|source| Failure::System("serve clients", source))?;
        let observed = self.processes.observed();
        if self.processes.is_empty() {
            // With -name: those that are started later are observed.
            messages.note_to_people(
                "no process is selected yet: -name is the name of the program's file, to which /proc/PID/exe points",
            );
        }
        let text = output::serving(self.output.format, self.address, observed)?;
        self.output.print(&text)
    }

    /// Answers the clients that wait.
    fn answer(&mut self) {
        // Clients that have gone need no answer.
        self.scrapes.retain(|(_, reply)| !reply.is_closed());
        if self.scrapes.is_empty() || self.makes_page {
            return;
        }
        let figures = &self.server_figures;
        let read = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        self.shown.scrapes += self.scrapes.len() as u64;
        self.shown.connections = read(&figures.connections);
        self.shown.timed_out = read(&figures.timed_out);
        self.shown.over_limit = read(&figures.over_limit);
        self.shown.unshown = self.processes.unshown();
        self.makes_page = true;
        self.page_maker.make(PageRequest {
            bounds: self.processes.bounds().to_vec(),
            processes: self.processes.shown(),
            exporter: self.shown,
            scrapes: std::mem::take(&mut self.scrapes),
        });
    }

    /// Removes the instrumentation from all processes.
    fn remove_instrumentation(&mut self) -> Result<(), Failure> {
        // The scanner may have begun observations whose notifications were not handled yet: they are removed, too.
        while let Some(notification) = self.receiver.next() {
            if let Notification::Observed(observed) = notification {
                self.processes.begin(*observed);
            }
        }
        self.processes.remove_instrumentation(self.signals)
    }
}
