//! Programs made by other compilers, in other root folders: seen and changed from outside.
//!
//! `scripts/rooms` makes the rooms, builds the programs in them, and runs this once for each; the
//! room's folder is named by OCAML_PROBES_ROOM, and the programs in it by OCAML_PROBES_TARGETS.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// What the cases are made of: programs shut in, the command, and what an observation learns.
#[path = "chaos/learnt.rs"]
mod learnt;
#[path = "rooms/room.rs"]
mod room;
#[path = "cli/support.rs"]
#[allow(dead_code, reason = "golden files are of the other suite")]
mod support;

// What any compiler makes.
#[path = "rooms/programs.rs"]
mod programs;

// Domains and effects, also while they are observed.
#[path = "rooms/domains.rs"]
mod domains;
#[path = "rooms/effects.rs"]
mod effects;
#[path = "rooms/observe.rs"]
mod observe;
