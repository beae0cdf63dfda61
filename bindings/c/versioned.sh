#!/bin/sh
# Runs the linker for the shared library: gcc starts it through `-wrapper` (see build.rs).
#
# rustc hands the linker a list of the exported functions without versions, and linkers refuse a second list beside one
# that names no version. So the contents of that list are replaced by exports.map. The library's SONAME also gets a link
# beside it, so that programs linked with it start without an installation.
set -eu
exports=$(dirname "$0")/exports.map
soname='' out='' before=''
for argument in "$@"; do
    case $argument in
        --version-script=*) cat "$exports" >"${argument#--version-script=}" ;;
        -soname=*) soname=${argument#-soname=} ;;
    esac
    case $before in
        --version-script) cat "$exports" >"$argument" ;;
        -soname) soname=$argument ;;
        -o) out=$argument ;;
    esac
    before=$argument
done
"$@"
if [ -n "$soname" ] && [ -n "$out" ]; then
    ln -sf "$(basename "$out")" "$(dirname "$out")/$soname"
fi
