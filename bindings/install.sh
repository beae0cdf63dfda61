#!/bin/sh
# install.sh FROM | install.sh --uninstall: puts what is needed to build with the library under $DESTDIR$PREFIX, or takes it away.
# FROM holds libmetrale.so and libmetrale.a as cargo makes them. `make install`, `make uninstall` and `make dist` call it with
# PREFIX, DESTDIR, and LIBDIR, a folder under PREFIX such as lib64. Nothing that is installed names PREFIX: all of it may be moved.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
prefix=${PREFIX:-/usr/local} lib=${LIBDIR:-lib}
to=${DESTDIR:-}$prefix
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml")
# Until 1.0 the minor version is part of the SONAME: build.rs.
series=$(echo "$version" | sed 's/^\(0\.[0-9]*\)\..*/\1/; s/^\([1-9][0-9]*\)\..*/\1/')
headers=$(cd "$here/cpp" && find . -name '*.hpp' | sed 's|^\./||')

# Every file that is installed, below the prefix.
files() {
    echo "include/metrale.h include/metrale/module.modulemap" $(echo "$headers" | sed 's|^|include/|')
    echo "$lib/libmetrale.so $lib/libmetrale.so.$series $lib/libmetrale.so.$version $lib/libmetrale.a $lib/metrale/libmetrale.a"
    echo "$lib/pkgconfig/metrale.pc $lib/pkgconfig/metrale-static.pc"
    echo "$lib/cmake/metrale/metrale-config.cmake $lib/cmake/metrale/metrale-config-version.cmake"
    echo "share/doc/metrale/LICENSE-MIT share/doc/metrale/LICENSE-APACHE share/doc/metrale/THIRD-PARTY share/doc/metrale/CHANGELOG.md"
}

# A template with its values filled in.
fill() {
    sed -e "s|@VERSION@|$version|g" -e "s|@SERIES@|$series|g" -e "s|@SONAME@|libmetrale.so.$series|g" -e "s|@LIB@|$lib|g" \
        -e "s|@PREFIX_FROM_PC@|$(up "$lib/pkgconfig")|g" -e "s|@PREFIX_FROM_CMAKE@|$(up "$lib/cmake/metrale")|g" "$1" >"$2"
    chmod 644 "$2"
}

# The way from a folder below the prefix back to it.
up() { echo "$1" | sed 's|[^/][^/]*|..|g'; }

case $prefix in /*) ;; *) echo "PREFIX must begin with /, not be '$prefix'" >&2; exit 2 ;; esac
case /$lib/ in *//* | */../*) echo "LIBDIR is a folder under PREFIX, such as lib64, not '$lib'" >&2; exit 2 ;; esac

if [ "$1" = --uninstall ]; then
    for file in $(files); do rm -f "$to/$file"; done
    # What is the library's own, and empty now.
    for folder in include/metrale "$lib/metrale" "$lib/cmake/metrale" share/doc/metrale; do
        [ ! -d "$to/$folder" ] || rmdir "$to/$folder" 2>/dev/null || true
    done
    exit 0
fi

from=$1
for file in libmetrale.so libmetrale.a; do
    [ -f "$from/$file" ] || { echo "$from/$file is not there: build the library first" >&2; exit 1; }
done
for file in $(files); do install -d "$to/$(dirname "$file")"; done
install -m 755 "$from/libmetrale.so" "$to/$lib/libmetrale.so.$version"
ln -sf "libmetrale.so.$version" "$to/$lib/libmetrale.so.$series"
ln -sf "libmetrale.so.$series" "$to/$lib/libmetrale.so"
"$here/c/archive.sh" "$from/libmetrale.a" "$to/$lib/libmetrale.a"
ln -sf ../libmetrale.a "$to/$lib/metrale/libmetrale.a"
install -m 644 "$root/include/metrale.h" "$to/include/metrale.h"
for header in $headers; do install -m 644 "$here/cpp/$header" "$to/include/$header"; done
install -m 644 "$here/c/module.modulemap" "$to/include/metrale/module.modulemap"
for name in metrale metrale-static; do fill "$here/c/$name.pc.in" "$to/$lib/pkgconfig/$name.pc"; done
for name in metrale-config metrale-config-version; do fill "$here/cmake/$name.cmake.in" "$to/$lib/cmake/metrale/$name.cmake"; done
install -m 644 "$root/LICENSE-MIT" "$root/LICENSE-APACHE" "$root/CHANGELOG.md" "$to/share/doc/metrale/"
"${PYTHON:-python3}" "$here/licences.py" >"$to/share/doc/metrale/THIRD-PARTY"
