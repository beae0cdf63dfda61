#!/bin/sh
# The C programs with a sanitizer in them and in the library: `sanitize.sh address` or `sanitize.sh thread`, then names of programs if not all.
# RUSTC_BOOTSTRAP opens the compiler's sanitizers without a nightly one: for this check only. The thread sanitizer has to see inside
# Rust's own library, which is built along (rustup component add rust-src); with the address sanitizer that makes no difference.
set -eu
cd "$(dirname "$0")/../.."
kind=${1:-address}
[ $# -eq 0 ] || shift
host=$(rustc -vV | sed -n 's/^host: //p')
# Beside the ordinary builds, since nothing of them fits.
target=${CARGO_TARGET_DIR:-target}/sanitize-$kind
also=''
names=''
if [ "$kind" = thread ]; then
    also='-Zbuild-std=std,panic_unwind'
    names=tests/support/tsan.c
fi
# --target: build scripts and macros stay as they are.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$kind -Cforce-frame-pointers=yes" CARGO_TARGET_DIR=$target \
    cargo rustc --locked --lib --crate-type staticlib --target "$host" $also
# Seconds for each program; the fault matrix makes some ten thousand calls, each slower by one or two orders here.
limit=${SANITIZE_SECONDS:-3600}
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
failed=0
# All programs but four: `memory` and `process` stand in for the parts of the C library that a sanitizer replaces, `unload` opens and closes
# the shared library, which has none in it, and `workers` holds times against each other that a sanitizer stretches unevenly.
for name in ${*:-library errors model source parts text sequence state prefix step embed sampler grammar structs stack runtime threads teardown leave field faults}; do
    cc -std=c11 -D_DEFAULT_SOURCE -O1 -g -pthread "-fsanitize=$kind" -Iinclude "tests/c/$name.c" $names -o "$programs/$name" "$target/$host/debug/libmetrale.a" -lm -ldl
    # Sizes beyond all memory are asked for on purpose.
    if ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=0 TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1 \
        timeout "$limit" "$programs/$name" tests/fixtures/stories260k/model.gguf quick >"$programs/said" 2>&1; then
        echo "$kind $name: clean"
    else
        failed=1
        echo "$kind $name: FAILED with $?"
        tail -60 "$programs/said"
    fi
done
exit $failed
