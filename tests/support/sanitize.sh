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
[ "$kind" = address ] || also='-Zbuild-std=std,panic_unwind'
# --target: build scripts and macros stay as they are.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$kind -Cforce-frame-pointers=yes" CARGO_TARGET_DIR=$target \
    cargo rustc --locked --lib --crate-type staticlib --target "$host" $also
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
failed=0
# Not `memory` and `process`, which stand in for parts of the C library, `unload`, which opens the shared library, and `stack`: frames
# are larger here.
for name in ${*:-library errors model source text sequence state step sampler grammar structs threads teardown leave field faults}; do
    cc -std=c11 -D_DEFAULT_SOURCE -O1 -g -pthread "-fsanitize=$kind" -Iinclude "tests/c/$name.c" -o "$programs/$name" "$target/$host/debug/libmetrale.a" -lm -ldl
    # Sizes beyond all memory are asked for on purpose.
    if ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=0 TSAN_OPTIONS=halt_on_error=1 \
        timeout 900 "$programs/$name" tests/fixtures/stories260k/model.gguf quick >"$programs/said" 2>&1; then
        echo "$kind $name: clean"
    else
        failed=1
        echo "$kind $name: FAILED with $?"
        tail -60 "$programs/said"
    fi
done
exit $failed
