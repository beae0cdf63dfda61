#!/bin/sh
# Makes include/metrale.h from src/abi, or with `--check` says whether the committed one is what would be made.
# Needs cbindgen 0.29 (`cargo install cbindgen --version '^0.29'`), found through $CBINDGEN or the path.
set -eu
cd "$(dirname "$0")/../.."
exec "${CBINDGEN:-cbindgen}" --quiet --config cbindgen.toml --crate metrale --output include/metrale.h ${1:+--verify} .
