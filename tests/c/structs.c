/* Structs across ages: older hosts with shorter ones, newer hosts with longer ones, and the layout itself. */
#include "check.h"

static const char *path;

/* Offsets are the contract: they may only be added to. */
#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

static void layout(void) {
    AT(metrale_load_options, struct_size, 0);
    AT(metrale_load_options, flags, 8);
    AT(metrale_load_options, threads, 16);
    AT(metrale_load_options, compute, 20);
    AT(metrale_load_options, context, 24);
    AT(metrale_load_options, progress, 32);
    AT(metrale_load_options, user, 40);
    AT(metrale_load_options, synthetic, 48);
    AT(metrale_load_options, synthetic_seed, 56);
    AT(metrale_load_options, runtime, 64);
    AT(metrale_load_options, memory, 72);
    AT(metrale_load_options, expert_bytes, 80);
    AT(metrale_load_options, precision, 88);
    AT(metrale_load_options, kv_type, 108);
    AT(metrale_load_options, device_layers, 120);
    AT(metrale_load_options, host_experts, 128);
    AT(metrale_runtime_options, flags, 8);
    AT(metrale_runtime_options, alloc, 16);
    AT(metrale_runtime_options, free, 24);
    AT(metrale_runtime_options, alloc_user, 32);
    AT(metrale_runtime_options, memory_cap, 40);
    AT(metrale_runtime_options, log, 48);
    AT(metrale_runtime_options, log_user, 56);
    AT(metrale_runtime_options, log_level, 64);
    AT(metrale_memory_usage, live, 8);
    AT(metrale_memory_usage, other, 48);
    AT(metrale_load_progress, done_bytes, 8);
    AT(metrale_load_progress, total_bytes, 16);
    AT(metrale_load_progress, phase, 24);
    AT(metrale_memory_plan, weights, 8);
    AT(metrale_memory_plan, total, 48);
    AT(metrale_memory_plan, source, 56);
    AT(metrale_memory_plan, device_layers, 104);
    AT(metrale_memory_plan, host_experts, 112);
    AT(metrale_seq_options, flags, 8);
    AT(metrale_seq_options, context, 16);
    AT(metrale_seq_options, sampler, 24);
    AT(metrale_seq_options, seed, 32);
    AT(metrale_sequence_info, length, 8);
    AT(metrale_sequence_info, capacity, 16);
    AT(metrale_sequence_info, last_token, 24);
    AT(metrale_sequence_info, last_logprob, 28);
    AT(metrale_text_options, stops, 16);
    AT(metrale_text_options, stops_len, 24);
    AT(metrale_text_piece, bytes, 8);
    AT(metrale_text_piece, len, 16);
    AT(metrale_text_piece, first_token, 24);
    AT(metrale_text_piece, end_token, 32);
    AT(metrale_text_piece, stop, 40);
    AT(metrale_sampler_stage, second, 16);
    AT(metrale_sampler_stage, length, 20);
    AT(metrale_sampler_stage, reserved, 24);
    CHECK(sizeof(metrale_sampler_stage) == 32);
    CHECK(sizeof(metrale_token) == 4 && sizeof(metrale_status) == 4);
}

static void load_options_of_all_ages(void) {
    struct {
        metrale_load_options known;
        uint64_t later[4];
    } newer;
    metrale_model *model = NULL;
    for (size_t size = 8; size <= sizeof newer; size += 8) {
        memset(&newer, 0, sizeof newer);
        newer.known.struct_size = size;
        newer.known.threads = 1;
        if (size <= offsetof(metrale_load_options, precision)) newer.known.precision = "no rule"; /* beyond the host's struct: not looked at */
        if (size < 24) newer.known.flags = size < 16 ? 1 : 0;
        OK(metrale_load(path, &newer.known, &model, &err));
        metrale_free(model);
    }
    newer.later[3] = 1;
    metrale_error *err = NULL;
    uint64_t offset = 0;
    model = NULL;
    CHECK(metrale_load(path, &newer.known, &model, &err) == METRALE_VERSION_MISMATCH);
    CHECK(metrale_error_offset(err, &offset) && offset >= sizeof newer.known + 24 && offset < sizeof newer);
    metrale_error_free(err);
    static const size_t wrong[] = {0, 1, 7, 9, 12, 63, 100000, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        newer.known.struct_size = wrong[i];
        EXPECT(METRALE_INVALID_ARGUMENT, metrale_load(path, &newer.known, &model, &err));
    }
    CHECK(model == NULL);
}

static void results_of_all_ages(void) {
    struct {
        metrale_memory_plan known;
        uint64_t later[2];
        uint64_t fence;
    } newer;
    memset(&newer, 0xee, sizeof newer);
    newer.known.struct_size = sizeof newer.known + sizeof newer.later;
    newer.fence = 42;
    OK(metrale_plan(path, NULL, 1, &newer.known, &err));
    CHECK(newer.known.weights > 0 && newer.later[0] == 0 && newer.later[1] == 0 && newer.fence == 42);
    uint64_t older[3] = {16, 0, 42};
    OK(metrale_plan(path, NULL, 1, (metrale_memory_plan *)(void *)older, &err));
    CHECK(older[0] == 16 && older[1] == newer.known.weights && older[2] == 42);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    layout();
    load_options_of_all_ages();
    results_of_all_ages();
    return 0;
}
