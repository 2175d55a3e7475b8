//! The HTTP server: it answers `GET /metrics`, and nothing that a client does or leaves undone delays the thread that
//! observes.
//!
//! Each request has a connection of its own. The length of a request, the time in which it has to arrive, the time that
//! the whole connection may take, and the number of connections are bounded. If there are too many connections, the
//! oldest that has not sent its request is closed, or else the oldest that is reading its answer.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

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

/// How long a request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last, until its answer has been read.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How many connections there may be at a time.
const MAX_CONNECTIONS: usize = 64;

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
#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    /// Its request has not been read.
    Request,
    /// Its answer is being made.
    Waiting,
    /// Its answer is being read.
    Answer,
}

#[derive(Debug, Default)]
struct PhaseCell(AtomicU8);

struct Connection {
    phase: Arc<PhaseCell>,
    task: AbortHandle,
}

impl PhaseCell {
    fn set(&self, phase: ConnectionPhase) {
        self.0.store(phase as u8, Ordering::Relaxed);
    }

    fn is(&self, phase: ConnectionPhase) -> bool {
        self.0.load(Ordering::Relaxed) == phase as u8
    }
}

impl Server {
    /// Serves clients until that is not possible any more, and then notifies the main thread of the reason.
    pub(super) fn run(self) {
        let notifications = self.notifications.clone();
        let served = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .and_then(|runtime| runtime.block_on(self.serve()));
        let Err(error) = served;
        notifications.send(Notification::ServerEnded(error));
    }

    async fn serve(self) -> io::Result<Infallible> {
        self.listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        // The oldest first.
        let mut connections: Vec<Connection> = Vec::new();
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(_) => {
                    // The client has gone, or no descriptor is free until a connection ends.
                    sleep(PAUSE).await;
                    continue;
                }
            };
            self.figures.connections.fetch_add(1, Ordering::Relaxed);
            connections.retain(|it| !it.task.is_finished());
            if connections.len() >= MAX_CONNECTIONS {
                self.figures.over_limit.fetch_add(1, Ordering::Relaxed);
                let mut phases = [ConnectionPhase::Request, ConnectionPhase::Answer].into_iter();
                let closed =
                    phases.find_map(|phase| connections.iter().position(|it| it.phase.is(phase)));
                let Some(closed) = closed else {
                    // All wait for an answer, which comes soon: the new connection is closed.
                    continue;
                };
                connections.remove(closed).task.abort();
            }
            let phase = Arc::new(PhaseCell::default());
            let client = Client {
                notifications: self.notifications.clone(),
                phase: phase.clone(),
                is_loopback: self.is_loopback,
            };
            let figures = self.figures.clone();
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
            connections.push(Connection {
                phase,
                task: task.abort_handle(),
            });
        }
    }
}

/// One connection.
struct Client {
    notifications: NotificationSender,
    phase: Arc<PhaseCell>,
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
        self.phase.set(ConnectionPhase::Waiting);
        let response = self.response(&request).await;
        self.phase.set(ConnectionPhase::Answer);
        Ok(response)
    }

    async fn response(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
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
            Ok(page) => of_type(format.content_type(), page),
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
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
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
