#!/bin/sh
# Makes include/metrale.h from src/abi, or with `--check` says whether the committed one is what would be made.
# Needs cbindgen 0.29 (`cargo install cbindgen --version '^0.29'`), found through $CBINDGEN or the path.
#
# cbindgen takes every public constant and type of a crate, so it is shown the files of src/abi alone, as one file
# without their opening comments; the order of the files is the order of the header.
set -eu
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for noun in status types runtime_types library error device runtime workers plan source load loading model tokenize text sampler grammar sequence state translate work step results embed stats; do
    grep -v '^//!\|^#!\[' "src/abi/$noun.rs"
done >"$folder/abi.rs"
"${CBINDGEN:-cbindgen}" --quiet --config cbindgen.toml --output include/metrale.h ${1:+--verify} "$folder/abi.rs"
