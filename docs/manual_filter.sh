#!/bin/sh
# manual_filter.sh HEADER: the header with its comments as doxygen reads them. `//` before a declaration becomes `///`; the comment at the top
# becomes the first page; groups of functions are marked by their nouns.
exec awk '
    NR == 1 && /^\/\*$/ { print "/** @file"; top = 1; next }
    # The table at the top keeps its columns.
    top && /^ \*\/$/ { print " * @endverbatim"; print " */"; top = 0; next }
    top && /^ \* What holds|^ \* This file is generated/ && !verbatim { print " * @verbatim"; verbatim = 1 }
    { sub(/^ *\/\/ /, "/// "); print }
' "$1"
