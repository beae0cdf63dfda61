#!/bin/sh
# dist.sh FROM: an archive of what `make install` installs, which may be unpacked anywhere, in $DIST, with the SHA-256 of each file
# inside and of the archive beside it. The same libraries give the same bytes. Refused where the shared library needs a newer glibc
# than that of Debian 11.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
glibc=2.31
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml")
name=metrale-$version-$("${CC:-cc}" -dumpmachine)
mkdir -p "$DIST"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$root/bindings/c/glibc.sh" "$1/libmetrale.so" "$glibc" >"$work/glibc"
DESTDIR=$work PREFIX=/$name LIBDIR=lib "$root/bindings/install.sh" "$1"
cat >"$work/$name/README" <<END
metrale $version, for $("${CC:-cc}" -dumpmachine) with glibc $(cat "$work/glibc") or newer; built for any processor of this kind.

This folder may lie anywhere. To build with it:

    export PKG_CONFIG_PATH=\$PWD/lib/pkgconfig          and then  cc app.c \$(pkg-config --cflags --libs metrale)
    cmake -DCMAKE_PREFIX_PATH=\$PWD ...                 with  find_package(metrale)  and  metrale::metrale  or  metrale::static

A program that is linked with the shared library finds it through its rpath, LD_LIBRARY_PATH or the system's list of folders.
include/metrale.h is the manual. \`sha256sum -c SHA256SUMS\` checks the files. Licences are in share/doc/metrale.
END
(cd "$work/$name" && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | sed 's|^\./||' | xargs sha256sum >"$work/sums" && mv "$work/sums" SHA256SUMS)
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime='2000-01-01 00:00:00Z' -cf "$work/archive" "$name"
gzip -9 -n -c "$work/archive" >"$DIST/$name.tar.gz"
(cd "$DIST" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "$DIST/$name.tar.gz"
