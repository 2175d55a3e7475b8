//! `probes.h`: lets a program switch its own probes, from C or any language that calls C. Each function makes
//! one call to a [`probes_lib::Target`], which `Target::current` has opened.
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
