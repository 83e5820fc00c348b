# Thin: what the programs need to be built together, and the demonstration, tests and benchmarks.
#   make demo   make test   make bench      each installs what it needs first (Debian, root)

BIN    := target/bin
STATIC := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"
IMAGES := target/images

.PHONY: all build demo test bench lint unit e2e scale containment recipes image setup-demo setup-test install clean-lab

all: build

# parbake and parbaked are ordinary programs; the monitor and the agent must run anywhere.
build:
	cargo build --release --locked --bin parbake --bin parbaked
	$(STATIC) cargo build --profile small --locked --target x86_64-unknown-linux-gnu \
		-p parbake-vmm -p parbake-agent
	@mkdir -p $(BIN)
	@install -m 755 target/release/parbake target/release/parbaked target/x86_64-unknown-linux-gnu/small/parbake-vmm \
		target/x86_64-unknown-linux-gnu/small/parbake-agent $(BIN)/

setup-demo:
	@tests/setup demo

setup-test:
	@tests/setup test

image: setup-demo
	@tests/images/debian $(IMAGES)/debian small

demo: setup-demo build image
	tests/demo $(BIN)/parbake $(IMAGES)/debian

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --release --locked -- -D warnings

# In the release profile, as its dependencies are built already; overflow checks are on there.
unit: setup-test build
	PARBAKE_BIN=$(abspath $(BIN)) cargo test --workspace --exclude parbake-tests --release --locked

# The programs from the outside, with real guests (in the lab where KVM cannot run them), a real
# registry, Dockerfiles and recipes. One at a time: two labs would share two cores.
e2e: setup-test build image
	PARBAKE_BIN=$(abspath $(BIN)) PARBAKE_IMAGE=$(abspath $(IMAGES))/debian timeout 3000 \
		cargo test -p parbake-tests --release --locked -- --nocapture --test-threads 1
	PARBAKE_BIN=$(abspath $(BIN)) PARBAKE_AGENT=$(abspath $(BIN))/parbake-agent \
		PARBAKE_VMM=$(abspath $(BIN))/parbake-vmm timeout 1200 cargo test -p parbake-builder --release \
		--locked --lib differential::machines -- --nocapture

# Nothing is left of a thousand sandboxes in a row and a hundred at once (bare guests, /dev/kvm).
scale: setup-test build
	PARBAKE_BIN=$(abspath $(BIN)) PARBAKE_SCALE=1000 cargo test -p parbake-node --release --locked \
		--test scale -- --nocapture

# What a sandbox must not get away with, tried from inside: prints attempted, contained, noticed.
containment: setup-test build image
	cargo build --release --locked -p parbake-tests --bin containment
	@install -m 755 target/release/containment $(BIN)/
	timeout 1200 tests/containment $(BIN) $(IMAGES)/debian

# The ready-made recipes, built, baked and used; installs a distribution for each (half an hour).
recipes: setup-test build
	tests/recipes $(BIN)/parbake

test: setup-test lint build unit e2e containment

# Everything in one run; the figures are only worth something on a quiet machine.
bench: setup-test build image
	@tests/images/debian $(IMAGES)/debian-large large
	cargo build --release --locked -p parbake-tests --bins
	@install -m 755 target/release/guest-bench target/release/rootfs-bench \
		target/release/registry-bench target/release/rootfs-cases $(BIN)/
	target/release/bench $(BIN) target/bench.json $(IMAGES)/debian $(IMAGES)/debian-large

PREFIX ?= /usr/local
SHARE   = $(DESTDIR)$(PREFIX)/share
install: build
	install -Dm 755 -t $(DESTDIR)$(PREFIX)/bin $(BIN)/parbake $(BIN)/parbaked
	install -Dm 755 -t $(DESTDIR)$(PREFIX)/libexec/parbake $(BIN)/parbake-vmm $(BIN)/parbake-agent
	install -d $(addprefix $(SHARE)/,man/man1 bash-completion/completions zsh/site-functions \
		fish/vendor_completions.d)
	for program in parbake parbaked; do \
		$(BIN)/$$program man $(SHARE)/man/man1; \
		$(BIN)/$$program completions bash >$(SHARE)/bash-completion/completions/$$program; \
		$(BIN)/$$program completions zsh >$(SHARE)/zsh/site-functions/_$$program; \
		$(BIN)/$$program completions fish >$(SHARE)/fish/vendor_completions.d/$$program.fish; \
	done
