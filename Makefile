# Every target makes sure first that what it needs is installed; with nothing
# to install that is silent and takes a fraction of a second.
#   make build JOBS=8         parallel compiles (default: all cores)
#   make bench ONLY=step,ddp  some families of benchmarks
#   make fuzz FOR=600         seconds for each fuzzer (default: 30)
#   make fuzz RUNS=10000000   so many inputs for each fuzzer, however long it takes
#   make soak KILLS=500 SEED=7
#   make parity DEVICE=cuda:0
#   make lint BASE=HEAD~3     clang-tidy on sources that changed since (default: origin/main)
#   make tidy FILES="tests/fsdp/start_test.cpp"

SHELL := /bin/bash
JOBS ?= $(shell nproc)
ONLY ?=
FOR ?= 30
RUNS ?=
KILLS ?= 20
SEED ?=
DEVICE ?= cpu
BASE ?= origin/main
FILES ?=

RELEASE := build/release

.DEFAULT_GOAL := help
# Two builds in one folder at a time would fight over it.
.NOTPARALLEL:
.PHONY: help setup build demo test package docs bench record format lint tidy asan tsan fuzz soak parity zoo offline-deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## install what building and testing need, find LibTorch
	@scripts/setup.sh test

build: ## the library, the command line and the examples, in build/release
	@scripts/setup.sh build
	@scripts/configure.sh release
	cmake --build $(RELEASE) -j $(JOBS)

demo: ## train a small GPT on 2 ranks, kill it, resume it on 4
	@scripts/setup.sh build
	@scripts/configure.sh release
	@JOBS=$(JOBS) scripts/build_for_demo.sh $(RELEASE)
	@examples/gpt/demo.py --build $(RELEASE)

test: ## lint, build and run every test; the last line is the count
	@scripts/setup.sh test
	@JOBS=$(JOBS) scripts/test.sh

package: ## a .deb, a .tar.gz and a Python wheel, in build/packages
	@scripts/setup.sh package
	@scripts/configure.sh release
	cmake --build $(RELEASE) -j $(JOBS) --target tessera tessera_cli
	@scripts/make_packages.py --build $(RELEASE) --out build/packages

docs: ## the documentation as a site, in build/site
	@scripts/setup.sh docs
	@scripts/build_docs.sh

bench: ## run the benchmarks beside their peers; ONLY=step,ddp runs these families
	@scripts/setup.sh bench
	@scripts/configure.sh release bench
	cmake --build $(RELEASE) -j $(JOBS)
	python3 bench/run.py --build $(RELEASE) --only "$(ONLY)"

record: bench ## make bench, then docs/performance.md from its results
	python3 bench/record.py --take build/bench/results.jsonl

format: ## lay out the sources with clang-format 14
	@scripts/setup.sh test
	@scripts/format.sh

lint: ## layout, include direction, public headers alone, clang-tidy on what changed since BASE
	@scripts/setup.sh lint
	scripts/format.sh --check
	scripts/check_includes.py --self-test
	scripts/check_includes.py
	scripts/check_headers.py --self-test
	scripts/check_headers.py --jobs $(JOBS)
	scripts/tidy.sh --self-test
	@JOBS=$(JOBS) scripts/tidy.sh --changed $(BASE)

tidy: ## clang-tidy 14 on all sources of the library; FILES="tests/a.cpp ..." on some
	@scripts/setup.sh lint
	@JOBS=$(JOBS) scripts/tidy.sh $(FILES)

# detect_leaks=0: LibTorch keeps registries and thread pools until the process
# ends, on purpose, and they would drown a leak of ours.
# protect_shadow_gap=0: CUDA maps memory there when LibTorch brings it in.
asan: export ASAN_OPTIONS = detect_leaks=0:protect_shadow_gap=0:detect_stack_use_after_return=1:abort_on_error=1
asan: export UBSAN_OPTIONS = print_stacktrace=1:halt_on_error=1
asan: ## every test program, under ASan and UBSan
	@scripts/setup.sh test
	@scripts/configure.sh asan-ubsan tests
	cmake --build build/asan-ubsan -j $(JOBS)
	ctest --test-dir build/asan-ubsan -L '^sanitize$$' -j 2 --no-tests=error --output-on-failure

# Kernels with many random address bits map where g++ 12's TSan wants its
# shadow. setarch -R turns the randomness off; some containers refuse it.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)
# LibTorch is not compiled for TSan: what it does by itself is not looked at, and
# tests/tsan.supp names where that shows in code of ours.
tsan: export TSAN_OPTIONS = halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1:suppressions=$(CURDIR)/tests/tsan.supp
tsan: ## shared memory, store, async save and the launcher's threads, under TSan
	@scripts/setup.sh test
	@scripts/configure.sh tsan tests
	cmake --build build/tsan -j $(JOBS) --target tsan_programs
	$(NO_ASLR) ctest --test-dir build/tsan -L '^tsan$$' --no-tests=error --output-on-failure

fuzz: ## libFuzzer on the formats of checkpoints; FOR=seconds or RUNS=inputs for each
	@scripts/setup.sh fuzz
	@FOR=$(FOR) RUNS=$(RUNS) JOBS=$(JOBS) scripts/fuzz.sh

soak: ## kill training runs at random, resume them otherwise, compare bits; KILLS=, SEED=
	@scripts/setup.sh build
	@scripts/configure.sh release
	cmake --build $(RELEASE) -j $(JOBS) --target tessera_cli gpt
	scripts/soak.py --build $(RELEASE) --kills $(KILLS) $(if $(SEED),--seed $(SEED))

parity: ## the tests of PyTorch on DEVICE=cpu or cuda:0, and their record
	@JOBS=$(JOBS) scripts/parity.sh $(DEVICE)

zoo: ## export every model of the zoo, train it in C++, write the table of docs/exported.md
	@scripts/setup.sh test
	@scripts/configure.sh release tests
	cmake --build $(RELEASE) -j $(JOBS) --target tessera_cli exported_zoo exported_memory
	tests/exported/zoo/run_zoo.py build/zoo/results.xml --bin $(RELEASE)/bin --folder build/zoo --table docs/exported.md

offline-deps: ## gather headers and small libraries in .deps/ for a host with no network
	@scripts/offline_deps.sh

clean: ## remove build/ (.venv, .deps, .launchers, .tensorboard, .transformers and .checkers stay)
	rm -rf build
