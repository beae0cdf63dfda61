/* Embeddings: sizes, pooling, and what is refused. */
#include <math.h>

#include "check.h"

enum { COUNT = 40, HIDDEN = 64 };
static metrale_token text[COUNT];
static float every[COUNT * HIDDEN], one[HIDDEN];

static metrale_embed_options with(uint32_t pooling, uint64_t flags) {
    metrale_embed_options options = {0};
    options.struct_size = sizeof options;
    options.pooling = pooling;
    options.flags = flags;
    return options;
}

static void pooled(const metrale_model *model, uint32_t pooling, uint64_t flags) {
    metrale_embed_options options = with(pooling, flags);
    size_t len = 0;
    OK(metrale_embed(model, text, COUNT, &options, one, HIDDEN, &len, &err));
    CHECK(len == HIDDEN);
}

int main(int argc, char **argv) {
    metrale_model *model = load_model(arguments(argc, argv));
    for (int i = 0; i < COUNT; i++) text[i] = i == 0 ? 1 : 259 + i * 37 % 200;
    metrale_embed_options options = with(METRALE_POOLING_NONE, 0);
    size_t len = 0;
    EXPECT(METRALE_MORE, metrale_embed(model, text, COUNT, &options, NULL, 0, &len, &err));
    CHECK(len == COUNT * HIDDEN);
    OK(metrale_embed(model, text, COUNT, &options, every, COUNT * HIDDEN, &len, &err));
    pooled(model, METRALE_POOLING_LAST, 0);
    CHECK(memcmp(one, every + (COUNT - 1) * HIDDEN, sizeof one) == 0);
    pooled(model, METRALE_POOLING_FIRST, 0);
    CHECK(memcmp(one, every, sizeof one) == 0);
    pooled(model, METRALE_POOLING_DEFAULT, 0);
    CHECK(memcmp(one, every + (COUNT - 1) * HIDDEN, sizeof one) == 0);
    pooled(model, METRALE_POOLING_MEAN, 0);
    for (int d = 0; d < HIDDEN; d++) {
        double sum = 0;
        for (int i = 0; i < COUNT; i++) sum += every[i * HIDDEN + d];
        CHECK(fabs(sum / COUNT - one[d]) < 1e-5);
    }
    pooled(model, METRALE_POOLING_MEAN, METRALE_EMBED_NORMALIZE);
    double length = 0;
    for (int d = 0; d < HIDDEN; d++) length += (double)one[d] * one[d];
    CHECK(fabs(length - 1) < 1e-5);
    OK(metrale_embed(model, text, COUNT, NULL, one, HIDDEN, &len, &err));

    len = 77;
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_embed(model, text, 0, NULL, one, HIDDEN, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_embed(model, NULL, COUNT, NULL, one, HIDDEN, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_embed(model, text, COUNT, NULL, NULL, HIDDEN, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_embed(model, text, COUNT, NULL, one, HIDDEN, NULL, &err));
    EXPECT(METRALE_INVALID_HANDLE, metrale_embed(NULL, text, COUNT, NULL, one, HIDDEN, &len, &err));
    options = with(5, 0);
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_embed(model, text, COUNT, &options, one, HIDDEN, &len, &err));
    options = with(0, 2);
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_embed(model, text, COUNT, &options, one, HIDDEN, &len, &err));
    options = with(0, 0);
    options.reserved = 1;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_embed(model, text, COUNT, &options, one, HIDDEN, &len, &err));
    static metrale_token many[513];
    EXPECT(METRALE_CONTEXT_FULL, metrale_embed(model, many, 513, NULL, one, HIDDEN, &len, &err));
    text[7] = 512;
    metrale_error *err = NULL;
    CHECK(metrale_embed(model, text, COUNT, NULL, one, HIDDEN, &len, &err) == METRALE_INVALID_TOKEN);
    uint64_t at = 0;
    CHECK(metrale_error_offset(err, &at) && at == 7);
    metrale_error_free(err);
    CHECK(len == 77);
    metrale_free(model);
    return 0;
}
