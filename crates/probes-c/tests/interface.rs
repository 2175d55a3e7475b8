//! probes.h from the outside: it is what the source says, and programs in C with probes use it on
//! themselves, linked with either library, position independent and not.
//!
//! The programs are built by gcc when a test begins, with the library that lies beside this binary.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// The header that is committed.
#[path = "interface/header.rs"]
mod header;

// A program that is spoken to line by line, and switches its own probes.
#[path = "interface/own.rs"]
mod own;

// What it does from one thread.
#[path = "interface/calls.rs"]
mod calls;

// What it does while other threads execute the sites, and others change them too.
#[path = "interface/busy.rs"]
mod busy;

// The binding for OCaml.
#[path = "interface/ocaml.rs"]
mod ocaml;
