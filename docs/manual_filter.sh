#!/bin/sh
# manual_filter.sh HEADER: the header with its comments as doxygen reads them. `//` before a declaration becomes `///`; the comment at the top
# becomes the first page.
exec awk '
    NR == 1 && /^\/\*$/ {
        print "/** @file"; print " * The C interface. Each function says who owns what, from which thread it may be called, and how it fails. */"
        print "/** @mainpage The C interface"; print " *"; print " * All declarations, in the order of a host: @ref metrale.h. By name: <a href=\"globals_func.html\">functions</a>,"
        print " * <a href=\"annotated.html\">structs</a>, <a href=\"globals_defs.html\">constants and statuses</a>."; print " *"; top = 1; next
    }
    # The table at the top keeps its columns.
    top && /^ \*\/$/ { print "@endverbatim"; print " */"; top = 0; next }
    top && /^ \* What holds|^ \* This file is generated/ && !verbatim { print " * @verbatim"; verbatim = 1 }
    verbatim && top { sub(/^ \* ?/, "") }
    { sub(/^ *\/\/ /, "/// "); print }
' "$1"
