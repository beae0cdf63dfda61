#!/bin/sh
# glibc.sh FILE [MOST]: the newest version of glibc's symbols that an ELF file needs. With MOST, such as 2.31, names every symbol
# that needs a newer glibc than that, and fails if there is one.
set -eu
needed=$(objdump -T "$1" | sed -n 's/.*\*UND\*.*(\{0,1\}GLIBC_\([0-9.]*\))\{0,1\} *\([^ ]*\)$/\1 \2/p' | sort -V)
newest=$(echo "$needed" | tail -n 1 | cut -d ' ' -f 1)
[ -n "$newest" ] || { echo "$1: no symbol of glibc" >&2; exit 1; }
echo "$newest"
if [ $# -gt 1 ]; then
    newer=$(echo "$needed" | while read -r version name; do
        [ "$(printf '%s\n%s\n' "$version" "$2" | sort -V | tail -n 1)" = "$2" ] || echo "$name (GLIBC_$version)"
    done)
    [ -z "$newer" ] || { echo "$1: newer than glibc $2:" $newer >&2; exit 1; }
fi
