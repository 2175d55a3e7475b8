# For a newcomer: `make demo`, then `make test`. Both install what is missing, and report it.

# The directory where rustup installs cargo, which is in PATH only from the next login on.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: all setup setup-tests install uninstall man package static demo test test-long test-all ci chaos adversary mutants lint sanitize bench docs fmt clean

# Where `make install` puts things; DESTDIR goes before it, for packages.
PREFIX = /usr/local
RELEASE = $(or $(CARGO_TARGET_DIR),target)

CHAOS = --workspace --test chaos -- --nocapture --test-threads=1

all: setup-tests
	cargo build --release
	dune build

setup:
	@scripts/setup

setup-tests:
	@scripts/setup --tests

install: setup
	cargo build --release --locked --bin ocaml-probes
	@scripts/install "$(DESTDIR)$(PREFIX)" "$(RELEASE)/release/ocaml-probes"

uninstall:
	@scripts/install --remove "$(DESTDIR)$(PREFIX)"

# Writes the manual pages to target/man.
man: setup
	cargo build --release --locked --bin ocaml-probes
	"$(RELEASE)/release/ocaml-probes" man -all "$(RELEASE)/man"

# A Debian package; `scripts/package --test` also tries it.
package: setup
	scripts/package

# One file that needs no library: target/static/ocaml-probes.
static: setup
	scripts/static

demo: setup
	@scripts/demo

# Run this after a change. `interface` runs alone, because cargo rewrites the library that it links before it runs other tests.
test: setup-tests
	@scripts/suites unit doc live+readme cli+ocaml interface

# What takes longer: faults and kills; programs that check themselves, and all tests, as an ordinary user; other compilers and C
# libraries; packages.
test-long: setup-tests
	@scripts/suites chaos+user+package,copy,matrix

test-all: test test-long

# What .ci/run calls after `make test`.
ci: setup-tests
	@scripts/suites chaos+user+package,copy,matrix,lint

# An hour, half of it as an ordinary user.
chaos: setup-tests
	dune build
	CHAOS_SECONDS=1800 cargo test $(CHAOS)
	CHAOS_SECONDS=1800 scripts/test-as-user $(CHAOS)

# Each program that checks itself, for ten minutes: four hours with this machine's OCaml, four with two others.
adversary: setup-tests
	dune build ./test-programs
	ADVERSARY_SECONDS=600 cargo test --workspace --test adversary -- --nocapture --test-threads=1
	ADVERSARY_SECONDS=600 scripts/matrix adversary

# Takes hours. SHARD=0/18 tests every 18th mutant. Needs cargo-mutants: `cargo install cargo-mutants --locked`.
mutants: setup-tests
	dune build ./test-programs
	OCAML_PROBES_TARGETS=$(CURDIR)/_build/default/test-programs \
		cargo mutants $(if $(SHARD),--shard $(SHARD) --sharding round-robin) --output target

lint: setup-tests
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --workspace --test chaos --test matrix -- -D warnings
	cargo clippy --workspace --lib --bins -- -D warnings # without fault injection
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	dune build @check
	! grep -rnE '(^|[^&])&& let ' crates fuzz --include='*.rs' # Rust 1.85 cannot compile it
	scripts/oldest-rust

# Needs a nightly Rust and valgrind; fails with a hint without them.
sanitize: setup-tests
	scripts/sanitize

bench: setup-tests
	scripts/bench

# The book, of all pages; needs mdbook.
docs:
	scripts/docs

fmt:
	cargo fmt --all

clean:
	cargo clean
	dune clean
