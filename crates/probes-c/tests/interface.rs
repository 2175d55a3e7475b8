//! probes.h from the outside: it is generated from the source, and C programs with probes use it on
//! themselves, linked with the shared or the static library, in both forms (PIE and fixed address).
//!
//! The programs are built by gcc when a test starts, with the library that is beside this binary.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// The committed header.
#[path = "interface/header.rs"]
mod header;

// A program that takes commands line by line, and switches its own probes.
#[path = "interface/own.rs"]
mod own;

// Calls from one thread.
#[path = "interface/calls.rs"]
mod calls;

// Calls while other threads execute the sites, and other tools change them too.
#[path = "interface/busy.rs"]
mod busy;

// The binding for OCaml.
#[path = "interface/ocaml.rs"]
mod ocaml;
