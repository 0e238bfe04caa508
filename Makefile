# The front door. `make help` lists the targets.
BUILD ?= build
PREFIX ?= /usr/local
# Tests at a time; most of them use two threads.
TEST_JOBS ?= 2
SOURCES = $(shell find model planner profiler runtime tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup build test sanitize tsan asan bench demo install format format-check clean

help:
	@echo "make demo             fine-tune a real model on two CPU ranks, with what that takes (about 15 minutes at first)"
	@echo "make test             build and run all tests, those of make sanitize first"
	@echo "make sanitize         build and run what ThreadSanitizer, AddressSanitizer and UBSan look at (build-*san/)"
	@echo "make bench            measure the host engine beside memory and torch; results in $(BUILD)/bench"
	@echo "make setup            install Debian packages (root or sudo) and Python packages (.venv)"
	@echo "make build            build the programs into $(BUILD)/"
	@echo "make install PREFIX=  install the programs (now: $(PREFIX))"
	@echo "make format           format the C++ sources; make format-check only looks"
	@echo "make clean            remove $(BUILD)/, build-*san/ and the demo's files; .venv stays"

setup:
	@tools/setup.sh

build: setup
	@started=$$(date +%s); \
	if [ ! -f $(BUILD)/build.ninja ]; then \
	  echo "build: configuring $(BUILD)/"; \
	  cmake -G Ninja -B $(BUILD) -S . $(CMAKE_ARGS); \
	fi && cmake --build $(BUILD) && echo "build: done in $$(($$(date +%s) - started)) s"

test: build sanitize
	@ctest --test-dir $(BUILD) -j $(TEST_JOBS) --output-on-failure --no-tests=error

# For a small machine: make bench BENCH_ARGS='--gib 1'.
bench: build
	@tests/bench/host_engine.sh --bench $(BUILD)/tests/host_engine_bench --out $(BUILD)/bench $(BENCH_ARGS)

# The one's tests run on one core for a minute or two, while the other builds.
sanitize:
	@$(MAKE) --no-print-directory -j2 --output-sync=target tsan asan

tsan asan: setup
	@tests/sanitize.sh $@

demo: build
	@tests/demo/demo.sh $(BUILD) .demo

# An install as root must not run the build as root, so it takes what `make build` left.
install:
	@[ -f $(BUILD)/build.ninja ] || { echo "install: error: nothing is built; run make build first." >&2; exit 1; }
	@cmake --install $(BUILD) --prefix $(PREFIX)

format:
	@clang-format -i $(SOURCES)

format-check:
	@clang-format --dry-run -Werror $(SOURCES)

clean:
	rm -rf $(BUILD) build-tsan build-asan .demo
