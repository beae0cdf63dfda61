/* What Swift sees of the C library: its installed header. */
#ifndef METRALE_SWIFT_SHIM_H
#define METRALE_SWIFT_SHIM_H
#include <metrale.h>
#endif
