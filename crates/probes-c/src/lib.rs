//! `probes.h`: a program switches its own probes, from C or any language that calls C. Each function is
//! one call of [`probes_lib::Target`], opened by `Target::current`.
//!
//! The header is include/probes.h, which cbindgen generates from [`abi`] and [`types`]; the library is `libprobes.so`
//! or `libprobes.a`. An example:
//!
//! ```c
//! char *error = NULL;
//! Probes *probes = probes_current(&error);
//! if (!probes || !probes_enable(probes, "req_start", &error)) {
//!     fprintf(stderr, "%s\n", error);
//!     probes_error_free(error);
//! }
//! probes_free(probes);
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod abi;
mod list;
pub mod types;
