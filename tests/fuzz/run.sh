#!/bin/sh
# Every target under libFuzzer for $1 seconds (60) each; $2 names one. New inputs go to the build folder, finds to tests/fuzz/corpus.
# Coverage comes from LLVM's own pass, which the stable compiler has too. Needs a C++ compiler.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-60}
target_folder=${CARGO_TARGET_DIR:-target}/fuzz
flags='-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares'
# With --target, build scripts and macros are built without the pass.
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS=$flags CARGO_TARGET_DIR=$target_folder cargo build --release --target "$host" --manifest-path tests/fuzz/coverage/Cargo.toml
failed=0
for corpus in tests/fuzz/corpus/*/; do
    name=$(basename "$corpus")
    [ -z "${2:-}" ] || [ "$2" = "$name" ] || continue
    found=$target_folder/corpus/$name
    mkdir -p "$found"
    log=$target_folder/$name.log
    if METRALE_FUZZ_TARGET=$name "$target_folder/$host/release/fuzz" "$found" "$corpus" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=3000 \
        -max_len=65536 -artifact_prefix="${corpus}found-" >"$log" 2>&1; then
        echo "$name: $(grep -o 'Done [0-9]* runs in [0-9]* second' "$log")s; $(grep -o 'cov: [0-9]*' "$log" | tail -1)"
    else
        failed=1
        echo "$name: FAILED"
        tail -30 "$log"
    fi
done
exit $failed
