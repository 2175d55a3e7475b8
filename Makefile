# What a newcomer types: `make demo`, then `make test`. Both install what is missing and say so.

# Where rustup puts cargo, which a shell knows from the next login on.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: all setup demo test lint sanitize bench fmt clean

all: setup
	cargo build --release
	dune build

setup:
	@scripts/setup

demo: setup
	@scripts/demo

test: setup
	dune build
	cargo build --release
	cargo test --workspace
	dune runtest
	scripts/test-as-user
	scripts/test-readme

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	dune build @check

# Needs a nightly Rust and valgrind, and says so.
sanitize: setup
	scripts/sanitize

bench: setup
	scripts/bench

fmt:
	cargo fmt --all

clean:
	cargo clean
	dune clean
