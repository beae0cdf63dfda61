/* What Go calls instead of the header's own functions, where a struct would have to carry a Go pointer or a callback.
 *
 * Callbacks travel as the number of a cgo.Handle: C keeps numbers, never Go memory. */
#ifndef METRALE_GO_SHIM_H
#define METRALE_GO_SHIM_H

#include <metrale.h>

metrale_status go_runtime_new(metrale_runtime_options options, uintptr_t log, metrale_runtime **out, metrale_error **err);
metrale_status go_source_reader(uintptr_t reader, uint64_t len, metrale_source **out, metrale_error **err);
metrale_status go_load_begin(const metrale_source *source, metrale_load_options options, uintptr_t progress, metrale_loading **out,
                             metrale_error **err);
metrale_status go_sampler_set_hook(metrale_sampler *sampler, uintptr_t hook, metrale_error **err);
metrale_status go_text_new(const metrale_model *model, uint64_t flags, const uint8_t *stops, size_t stops_len, metrale_text **out,
                           metrale_error **err);

#endif
