/* A host thread with 64 KiB of stack is enough for everything: load, text, prefill, step, errors. */
#include "check.h"

#include <pthread.h>

static const char *path;

static void *all(void *unused) {
    (void)unused;
    metrale_model *model = load_model(path);
    metrale_memory_plan plan = {.struct_size = sizeof plan};
    OK(metrale_plan(path, NULL, 1, &plan, &err));
    static const char text[] = "Once upon a time";
    static metrale_token tokens[64];
    size_t count = 0;
    OK(metrale_tokenize(model, (const uint8_t *)text, strlen(text), METRALE_TOKENIZE_ADD_SPECIAL, tokens, 64, &count, &err));
    metrale_seq *seq = new_seq(model, NULL);
    OK(metrale_prefill(seq, tokens, count, &err));
    metrale_token token = -1;
    CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    EXPECT(METRALE_INVALID_TOKEN, metrale_prefill(seq, &(metrale_token){-1}, 1, &err));

    static const char request[] = "{\"messages\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}";
    EXPECT(METRALE_NOT_FOUND, metrale_chat_render(model, (const uint8_t *)request, strlen(request), NULL, 0, &count, &err));
    metrale_seq_free(seq);
    metrale_free(model);
    return NULL;
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 64 * 1024) == 0);
    CHECK(pthread_create(&thread, &attributes, all, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    pthread_attr_destroy(&attributes);
    return 0;
}
