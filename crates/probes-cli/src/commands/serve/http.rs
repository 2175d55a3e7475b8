//! The HTTP server: it answers `GET /metrics`, and nothing that a client does or leaves undone delays the thread that
//! observes.
//!
//! Each request has a connection of its own. The length of a request, the time in which it has to arrive, the time that
//! the whole connection may take, the number of connections, and the memory for the pages that they read are bounded. If
//! there are too many connections, the oldest that should have sent its request by now is closed, or else the oldest
//! that is reading its answer. Those that wait for an answer all get the same, and soon: far more of them are kept.
//! Connections that were answered at the same time share a page. If there are too many pages, the oldest connections
//! that read others than the latest are closed.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::exposition::TextFormat;
use super::notifications::{Notification, NotificationSender};
use crate::text::is_number;

/// How long a request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last, until its answer has been read.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How many connections there may be at a time, beside those that wait for an answer.
const MAX_CONNECTIONS: usize = 64;

/// The same, with those that wait for an answer.
const MAX_WITH_WAITING: usize = 512;

/// How long a request usually takes to arrive, at most.
const USUAL_REQUEST_TIME: Duration = Duration::from_millis(250);

/// How many bytes the pages have that connections read, unless it is one page. A page has 4 MB of 1,000 functions.
const MAX_PAGE_BYTES: usize = 64 << 20;

/// The limits of a request.
const MAX_HEADERS: usize = 64;
const MAX_REQUEST_BYTES: usize = 16 << 10;

/// How long to wait if no descriptor is left for a connection.
const PAUSE: Duration = Duration::from_millis(50);

/// What the server has done, for the page.
#[derive(Debug, Default)]
pub(super) struct ServerFigures {
    pub(super) connections: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) over_limit: AtomicU64,
}

/// Serves clients, until that fails.
pub(super) struct Server {
    pub(super) listener: TcpListener,
    pub(super) notifications: NotificationSender,
    pub(super) figures: Arc<ServerFigures>,
    /// Whether only clients of this machine can connect.
    pub(super) is_loopback: bool,
}

/// How far a connection is.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ConnectionPhase {
    /// Its request has not been read.
    #[default]
    Request,
    /// Its answer is being made.
    Waiting,
    /// Its answer is being read.
    Answer(PageId),
}

/// Distinguishes pages that are there at the same time.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct PageId {
    address: usize,
    len: usize,
}

struct Connection {
    number: u64,
    begun: Instant,
    phase: ConnectionPhase,
    task: AbortHandle,
}

/// The connections, the oldest first.
#[derive(Default)]
struct Connections {
    each: Vec<Connection>,
    /// How many there were.
    accepted: u64,
}

impl Connections {
    /// Makes room for another one; returns whether there is, and whether one was closed for it.
    fn make_room(&mut self) -> (bool, bool) {
        self.each.retain(|it| !it.task.is_finished());
        let is_waiting = |it: &Connection| it.phase == ConnectionPhase::Waiting;
        let waiting = self.each.iter().filter(|it| is_waiting(it)).count();
        if self.each.len() < MAX_WITH_WAITING && self.each.len() - waiting < MAX_CONNECTIONS {
            return (true, false);
        }
        let is_before = |it: &Connection| it.phase == ConnectionPhase::Request;
        let is_late = |it: &Connection| is_before(it) && it.begun.elapsed() > USUAL_REQUEST_TIME;
        let is_after = |it: &Connection| matches!(it.phase, ConnectionPhase::Answer(_));
        let oldest = |is: &dyn Fn(&Connection) -> bool| self.each.iter().position(is);
        let closed = oldest(&is_late);
        let closed = closed
            .or_else(|| oldest(&is_after))
            .or_else(|| oldest(&is_before));
        // Otherwise all wait for an answer, which comes soon.
        if let Some(closed) = closed {
            self.each.remove(closed).task.abort();
        }
        (closed.is_some(), true)
    }

    fn set_phase(&mut self, number: u64, phase: ConnectionPhase) {
        let mut each = self.each.iter_mut();
        if let Some(connection) = each.find(|it| it.number == number) {
            connection.phase = phase;
        }
    }

    /// A connection reads `page` now. Closes the oldest ones that read others if all pages together have more bytes than
    /// `most`; returns how many were closed.
    fn begin_answer(&mut self, number: u64, page: PageId, most: usize) -> u64 {
        self.set_phase(number, ConnectionPhase::Answer(page));
        self.each.retain(|it| !it.task.is_finished());
        let mut closed = 0;
        loop {
            let pages = self.each.iter().filter_map(|it| match it.phase {
                ConnectionPhase::Answer(page) => Some((page.address, page.len)),
                _ => None,
            });
            let pages: BTreeMap<usize, usize> = pages.collect();
            let is_other = |it: &Connection| matches!(it.phase, ConnectionPhase::Answer(other) if other != page);
            let oldest = self.each.iter().position(is_other);
            let Some(oldest) = oldest.filter(|_| pages.values().sum::<usize>() > most) else {
                return closed;
            };
            self.each.remove(oldest).task.abort();
            closed += 1;
        }
    }
}

/// Shared by the tasks of one thread.
type SharedConnections = Arc<Mutex<Connections>>;

fn locked(connections: &SharedConnections) -> MutexGuard<'_, Connections> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Serves clients, in a thread of its own, which has all that it needs when this returns.
    pub(super) fn start(self) -> io::Result<()> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        self.listener.set_nonblocking(true)?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener)?
        };
        let Server {
            notifications,
            figures,
            is_loopback,
            ..
        } = self;
        let serve = serve(listener, notifications, figures, is_loopback);
        let serve = move || match runtime.block_on(serve) {};
        thread::Builder::new().spawn(serve).map(drop)
    }
}

async fn serve(
    listener: tokio::net::TcpListener,
    notifications: NotificationSender,
    figures: Arc<ServerFigures>,
    is_loopback: bool,
) -> Infallible {
    let connections = SharedConnections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                // The client has gone, or no descriptor is free until a connection ends.
                sleep(PAUSE).await;
                continue;
            }
        };
        figures.connections.fetch_add(1, Ordering::Relaxed);
        let (has_room, is_over_limit) = locked(&connections).make_room();
        if is_over_limit {
            figures.over_limit.fetch_add(1, Ordering::Relaxed);
        }
        if !has_room {
            continue;
        }
        let mut held = locked(&connections);
        held.accepted += 1;
        let number = held.accepted;
        let client = Client {
            notifications: notifications.clone(),
            figures: figures.clone(),
            connections: connections.clone(),
            number,
            is_loopback,
        };
        let figures = figures.clone();
        let task = tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_TIMEOUT)
                .keep_alive(false)
                .max_headers(MAX_HEADERS)
                .max_buf_size(MAX_REQUEST_BYTES)
                .serve_connection(
                    TokioIo::new(stream),
                    service_fn(|request| client.answer(request)),
                );
            let is_too_slow = match timeout(CONNECTION_TIMEOUT, connection).await {
                Err(_) => true,
                Ok(Err(error)) => error.is_timeout(),
                Ok(Ok(())) => false,
            };
            if is_too_slow {
                figures.timed_out.fetch_add(1, Ordering::Relaxed);
            }
        });
        // No other task runs before it is there: this thread runs them all.
        held.each.push(Connection {
            number,
            begun: Instant::now(),
            phase: ConnectionPhase::default(),
            task: task.abort_handle(),
        });
    }
}

/// One connection.
struct Client {
    notifications: NotificationSender,
    figures: Arc<ServerFigures>,
    connections: SharedConnections,
    number: u64,
    is_loopback: bool,
}

/// What `/` shows.
const ABOUT: &str = "\
<!DOCTYPE html>
<title>ocaml-probes</title>
<h1>ocaml-probes</h1>
<p>Figures of live OCaml programs, for Prometheus: <a href=\"/metrics\">/metrics</a>.</p>
";

impl Client {
    async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        locked(&self.connections).set_phase(self.number, ConnectionPhase::Waiting);
        let mut page = PageId::default();
        let response = self.response(&request, &mut page).await;
        let mut connections = locked(&self.connections);
        let closed = connections.begin_answer(self.number, page, MAX_PAGE_BYTES);
        self.figures.over_limit.fetch_add(closed, Ordering::Relaxed);
        Ok(response)
    }

    /// Sets `id` if the answer is a page.
    async fn response(
        &self,
        request: &Request<Incoming>,
        id: &mut PageId,
    ) -> Response<Full<Bytes>> {
        if !self.is_loopback_name(request) {
            let why = "this exporter listens on a loopback address only: ask for localhost, or for an address\n";
            return plain(StatusCode::FORBIDDEN, why);
        }
        let path = request.uri().path();
        if !matches!(path, "/" | "/metrics") {
            return plain(
                StatusCode::NOT_FOUND,
                "not found: the metrics are at /metrics\n",
            );
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let why = "only GET and HEAD are allowed\n";
            let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, why);
            let allowed = HeaderValue::from_static("GET, HEAD");
            response.headers_mut().insert(ALLOW, allowed);
            return response;
        }
        if path == "/" {
            return of_type(
                "text/html; charset=utf-8",
                Bytes::from_static(ABOUT.as_bytes()),
            );
        }
        let accept = request.headers().get_all(ACCEPT).iter();
        let accept: Vec<&str> = accept.filter_map(|it| it.to_str().ok()).collect();
        let format = TextFormat::accepted(&accept.join(","));
        let (reply, page) = oneshot::channel();
        self.notifications
            .send(Notification::Scrape { format, reply });
        match page.await {
            Ok(page) => {
                *id = PageId {
                    address: page.as_ptr().addr(),
                    len: page.len(),
                };
                of_type(format.content_type(), page)
            }
            Err(_) => plain(StatusCode::SERVICE_UNAVAILABLE, "the exporter is ending\n"),
        }
    }

    /// Whether the client knows this machine as localhost or by an address; always true if other machines can connect.
    /// A web page from elsewhere that a browser of this machine shows may have its own name lead here (DNS rebinding):
    /// it must not read.
    fn is_loopback_name(&self, request: &Request<Incoming>) -> bool {
        let Some(host) = request.headers().get(HOST).filter(|_| self.is_loopback) else {
            return true;
        };
        let host = host.to_str().unwrap_or("-");
        is_local(host)
    }
}

/// Whether a `Host` header is localhost or an address, with or without a port.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.is_empty() || is_number(port) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let is_address = address.unwrap_or(name).parse::<IpAddr>().is_ok();
    is_address || name.eq_ignore_ascii_case("localhost") || name.is_empty()
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = of_type(
        "text/plain; charset=utf-8",
        Bytes::from_static(text.as_bytes()),
    );
    *response.status_mut() = status;
    response
}

fn of_type(content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_pages_take_bounded_memory() {
        let runtime = runtime::Builder::new_current_thread().build().unwrap();
        let waiting = || runtime.spawn(std::future::pending::<()>()).abort_handle();
        let mut connections = Connections::default();
        for number in 0..6 {
            connections.each.push(Connection {
                number,
                begun: Instant::now(),
                phase: ConnectionPhase::Waiting,
                task: waiting(),
            });
        }
        let page = |address| PageId { address, len: 40 };
        let mut begin = |number, address| connections.begin_answer(number, page(address), 100);
        // Those that share a page count once.
        assert_eq!([begin(0, 1), begin(1, 1), begin(2, 2)], [0; 3]);
        assert_eq!(begin(3, 3), 2);
        assert_eq!(begin(4, 3), 0);
        // One page may have more.
        let large = PageId {
            address: 9,
            len: 400,
        };
        assert_eq!(connections.begin_answer(5, large, 100), 3);
        let left: Vec<u64> = connections.each.iter().map(|it| it.number).collect();
        assert_eq!(left, [5]);
    }

    #[test]
    fn newcomers_have_room_beside_waiting_connections() {
        let runtime = runtime::Builder::new_current_thread().build().unwrap();
        let mut connections = Connections::default();
        let long_ago = Instant::now().checked_sub(2 * USUAL_REQUEST_TIME).unwrap();
        let add = |connections: &mut Connections, number, begun, phase| {
            let made = connections.make_room();
            let task = runtime.spawn(std::future::pending::<()>()).abort_handle();
            connections.each.push(Connection {
                number,
                begun,
                phase,
                task,
            });
            made
        };
        // None is late with its request, however slow the machine is.
        let later = Instant::now() + Duration::from_secs(3600);
        let answer = ConnectionPhase::Answer(PageId::default());
        // Twice as many as there may be of the others.
        for number in 0..128 {
            let made = add(&mut connections, number, later, ConnectionPhase::Waiting);
            assert_eq!(made, (true, false));
        }
        for number in 128..190 {
            assert_eq!(add(&mut connections, number, later, answer), (true, false));
        }
        add(&mut connections, 190, long_ago, ConnectionPhase::Request);
        add(&mut connections, 191, later, ConnectionPhase::Request);
        // First the one that is late with its request, then the oldest that reads its answer.
        for (number, closed) in [(192, 190), (193, 128), (194, 129)] {
            let made = add(&mut connections, number, later, ConnectionPhase::Request);
            assert_eq!(made, (true, true));
            assert!(connections.each.iter().all(|it| it.number != closed));
        }
        assert!(connections.each.iter().any(|it| it.number == 191));
        for number in 195.. {
            if add(&mut connections, number, later, ConnectionPhase::Waiting) == (false, true) {
                assert_eq!(connections.each.len(), MAX_WITH_WAITING + 1);
                break;
            }
        }
    }

    #[test]
    fn names_of_other_machines_are_not_local() {
        for host in [
            "localhost",
            "LOCALHOST:9464",
            "127.0.0.1:9464",
            "[::1]:80",
            "[::1]",
            "",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "example.org",
            "example.org:9464",
            "localhost.example.org",
            "-",
            "[a]:1",
        ] {
            assert!(!is_local(host), "{host}");
        }
    }
}
