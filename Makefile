# The two commands of the README, `make demo` and `make test`, and the few that help while working.
# Everything goes through cargo; this file only knows the order.

CARGO ?= cargo
CC ?= cc
PYTHON ?= python3
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
PROMPT ?= Explain in three sentences why the sky is blue.
THREADS ?= 0
FIXTURE := tests/fixtures/stories260k/model.gguf
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Until 1.0 the minor version is part of the SONAME: build.rs.
SONAME := libmetrale.so.$(shell echo $(VERSION) | sed 's/^\(0\.[0-9]*\)\..*/\1/; s/^\([1-9][0-9]*\)\..*/\1/')
PREFIX ?= /usr/local
LIBDIR ?= lib
DIST ?= build/dist
WARNINGS := -std=c11 -O2 -Wall -Wextra -Wpedantic

# The program that writes the header: on the path, or where .ci/run puts it.
CBINDGEN ?= $(or $(shell command -v cbindgen),$(wildcard build/own-tools/bin/cbindgen))

.PHONY: demo chat library nvrtc kernels gpu-bench load-bench archive install uninstall dist manual test format lint header header-check abi fuzz sanitize soak models peer peer-avx2 variants bench latency frames clean help

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile

demo: chat ## answer a prompt with a small real model: builds, fetches the model once, runs
	@if model=$$($(PYTHON) examples/get_model.py smollm2-135m-instruct); then \
		$(RELEASE)/chat --threads $(THREADS) "$$model" '$(subst ','\'',$(PROMPT))'; \
	else \
		echo 'The model cannot be fetched here (see above): the 1 MB story teller of tests/fixtures runs instead.'; \
		$(RELEASE)/chat --threads $(THREADS) --raw $(FIXTURE) 'Once upon a time, there was a little girl named Lily.'; \
	fi

chat: library
	$(CC) $(WARNINGS) -Iinclude -o $(RELEASE)/chat examples/chat/chat.c -L$(RELEASE) -lmetrale -Wl,-rpath,'$$ORIGIN'

# Only the shared library: alone it is optimised across crates, which it is not when Rust's own format is made beside it.
library: ## the release libmetrale.so
	$(CARGO) rustc --locked --release --lib --crate-type cdylib
	ln -sf libmetrale.so $(RELEASE)/$(SONAME)

nvrtc: ## NVIDIA's compiler for kernels, in build/nvrtc (fetched once, 90 MB): with it `make test` also sees what kernels take of a processor
	@test -d build/nvrtc || { $(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest build/nvrtc-wheel nvidia-cuda-nvrtc-cu12==12.9.86 && \
		$(PYTHON) -m zipfile -e build/nvrtc-wheel/*.whl build/nvrtc && rm -r build/nvrtc-wheel; }

# A library that is built afterwards carries the code; without it each load compiles those it needs, where NVRTC is installed.
kernels: nvrtc ## compile the GPU kernels for all architectures into build/kernels.pack, and kernels/resources.txt
	$(PYTHON) kernels/build.py

gpu-bench: ## speed on an NVIDIA device, as shares of its memory's
	$(CARGO) run --locked --release --example gpu_bench

load-bench: ## from a checkpoint in the page cache to the first token on an NVIDIA device; writes 16 GB for a while
	$(CARGO) run --locked --release --example load_bench

archive:
	$(CARGO) rustc --locked --release --lib --crate-type staticlib

install: $(if $(BUILT),,library archive) ## libraries, headers, pkg-config and CMake files, licences, to $(DESTDIR)$(PREFIX); BUILT=folder takes what was built there
	PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' LIBDIR='$(LIBDIR)' bindings/install.sh '$(or $(BUILT),$(RELEASE))'

uninstall: ## take away what `make install` put there
	PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' LIBDIR='$(LIBDIR)' bindings/install.sh --uninstall

dist: $(if $(BUILT),,library archive) ## the same as an archive that may be unpacked anywhere, with checksums, in $(DIST)
	DIST='$(DIST)' bindings/dist.sh '$(or $(BUILT),$(RELEASE))'

manual: ## include/metrale.h as HTML, in build/manual (needs doxygen)
	mkdir -p build
	VERSION=$(VERSION) doxygen docs/Doxyfile
	@echo build/manual/index.html

test: format lint header-check ## everything that CI runs
	$(CARGO) test --locked --no-fail-fast

format:
	$(CARGO) fmt --check

lint:
	$(CARGO) clippy --locked --all-targets -- -D warnings

header: ## write include/metrale.h anew (needs cbindgen: cargo install cbindgen --version '^0.29')
	CBINDGEN=$(CBINDGEN) tests/support/header.sh

header-check:
	$(if $(CBINDGEN),CBINDGEN=$(CBINDGEN) tests/support/header.sh --check,@echo 'SKIPPED: there is no cbindgen to compare include/metrale.h with')

abi: ## write the record of the C interface in tests/abi, and the change log's section on it, for the release in preparation
	METRALE_ABI=write $(CARGO) test --locked --test abi what_was_published

fuzz: ## 60 seconds of libFuzzer for each kind of input from strangers
	tests/fuzz/run.sh $(or $(SECONDS_EACH),60)

sanitize: ## the C programs under the address sanitizer, then the thread sanitizer
	tests/support/sanitize.sh address
	tests/support/sanitize.sh thread

soak: library ## 200,000 decode steps on four threads; memory must not grow
	$(CC) $(WARNINGS) -D_DEFAULT_SOURCE -pthread -Iinclude -o $(RELEASE)/soak tests/c/soak.c -L$(RELEASE) -lmetrale -Wl,-rpath,'$$ORIGIN'
	$(RELEASE)/soak $(FIXTURE) 200000

models: ## fetch three real models, which tests then use (840 MB, once)
	$(PYTHON) examples/get_model.py smollm2-135m-instruct gemma-3-270m qwen2.5-coder-0.5b-instruct

peer: ## build llama.cpp's llama-bench into build/peer, for benches/peer.py
	$(PYTHON) benches/peer.py --build build/peer

peer-avx2: ## the same without AVX-512, into build/peer-avx2
	$(PYTHON) benches/peer.py --build build/peer-avx2 --avx2

variants: peer ## models in other formats and shapes with random weights, for the table (13 GB)
	$(PYTHON) benches/variants.py build/variants

# ROWS='decode/* step/*' chooses rows; QUICK=1 is shorter; `python3 benches/table.py --list` names them all.
bench: peer ## every speed beside the peer's and beside the machine's limits (docs/performance.md)
	$(CARGO) build --locked --release --example metrale_bench
	$(PYTHON) benches/table.py $(if $(QUICK),--quick) '$(ROWS)'

latency: ## how well steps and cancels keep their bounds (docs/latency.md), on one thread and two
	$(CARGO) build --locked --release --example step_latency
	@model=$$($(PYTHON) examples/get_model.py smollm2-135m-instruct) && for threads in 1 2; do \
		$(RELEASE)/examples/step_latency "$$model" --threads $$threads; \
	done

frames: library ## a loop at 60 frames a second that gives the engine 2 ms of each (docs/frames.md)
	$(CC) $(WARNINGS) -Iinclude -o $(RELEASE)/frame_loop examples/frame_loop/frame_loop.c -L$(RELEASE) -lmetrale -lm -Wl,-rpath,'$$ORIGIN'
	@model=$$($(PYTHON) examples/get_model.py smollm2-135m-instruct) && mkdir -p build && \
		$(RELEASE)/frame_loop --frames 3600 --svg build/frames.svg "$$model" 'Write a long story about a fox who wants to be a baker.'

clean: ## remove what was built (fetched models stay)
	$(CARGO) clean
	rm -rf build
