#!/bin/sh
# archive.sh FROM TO: cargo's static library as one object that shows the names `metrale_*` and no other, so that it fits into a
# program beside any other library, one written in Rust included. Sections stay apart: `-Wl,--gc-sections` drops what is not used.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${LD:-ld}" -r --force-group-allocation -o "$work/all.o" --whole-archive "$1"
# The compiler's intermediate code of the standard library is of no use to a linker, and confuses some.
"${OBJCOPY:-objcopy}" --strip-debug -R .llvmbc -R .llvmcmd --wildcard --keep-global-symbol='metrale_*' "$work/all.o" "$work/metrale.o"
rm -f "$2"
"${AR:-ar}" rcs "$2" "$work/metrale.o"
