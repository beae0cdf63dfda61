#!/bin/sh
# test.sh PREFIX [shared|static]: the Go binding and its examples, vetted and tested under the race detector, against the library
# that is installed in PREFIX. What Go downloads or caches is left as it is; nothing is downloaded, since nothing else is imported.
set -eu
prefix=$(cd "${1:?usage: test.sh PREFIX [shared|static]}" && pwd) link=${2:-shared}
cd "$(dirname "$0")"
for tool in go cc pkg-config; do
    command -v "$tool" >/dev/null 2>&1 || { echo "SKIPPED: there is no $tool"; exit 0; }
done
# The Go that is here, without fetching another one.
export GOTOOLCHAIN=local GOFLAGS=-buildvcs=false GOPROXY=off
if ! go list . >/dev/null 2>&1; then
    echo "SKIPPED: $(go version) is older than go.mod asks for"
    exit 0
fi
for folder in lib lib64 "lib/$(cc -print-multiarch 2>/dev/null || true)"; do
    if [ -f "$prefix/$folder/pkgconfig/metrale.pc" ]; then
        export PKG_CONFIG_PATH="$prefix/$folder/pkgconfig" LD_LIBRARY_PATH="$prefix/$folder"
    fi
done
tags=
if [ "$link" = static ]; then
    tags=-tags=metrale_static
    unset LD_LIBRARY_PATH
fi
# The stricter check of pointers that C gets; the plain one is always on.
strict=GOEXPERIMENT=cgocheck2
env "$strict" go version >/dev/null 2>&1 || strict=GOEXPERIMENT=

unformatted=$(gofmt -l . ../../examples/*-go)
[ -z "$unformatted" ] || { echo "not formatted: $unformatted"; exit 1; }
for module in . ../../examples/*-go; do
    (
        cd "$module"
        go vet $tags ./...
        GODEBUG=cgocheck=1 go test $tags -race -count=1 ./...
        [ "$module" != . ] || env "$strict" go test $tags -count=1 ./...
    )
done
