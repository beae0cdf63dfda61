/* A chat in a terminal, and the shortest complete tour of the interface: load, render, tokenize, prefill, decode, text.
 *
 *     chat MODEL "What is a monad?"     one answer
 *     chat MODEL                        a conversation: a line in, an answer out
 *     chat --raw MODEL "Once upon"      continue the text as it stands, without the model's chat template
 *
 * The answer goes to stdout piece by piece as it is made; speed and errors go to stderr. */
#include <metrale.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    uint8_t *data;
    size_t size, room;
} bytes;

typedef struct {
    const char *model, *prompt;
    size_t threads, max_tokens;
    bool raw;
} settings;

/* Work done so far, for the line at the end. */
typedef struct {
    size_t prompt_tokens, decode_tokens;
    double prompt_seconds, decode_seconds;
} speed;

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void append(bytes *b, const void *data, size_t size) {
    if (size > b->room - b->size) {
        b->room = 2 * (b->size + size);
        b->data = realloc(b->data, b->room);
        if (!b->data) {
            fprintf(stderr, "chat: out of memory\n");
            exit(1);
        }
    }
    if (size) memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void append_text(bytes *b, const char *text) { append(b, text, strlen(text)); }

/* `text` as the inside of a JSON string. UTF-8 stands as it is. */
static void append_json(bytes *b, const uint8_t *text, size_t size) {
    for (size_t i = 0; i < size; i++) {
        char escape[8];
        if (text[i] == '"' || text[i] == '\\') {
            append(b, (const char[]){'\\', (char)text[i]}, 2);
        } else if (text[i] < 0x20) {
            append(b, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", text[i]));
        } else {
            append(b, text + i, 1);
        }
    }
}

static void append_message(bytes *chat, const char *role, const uint8_t *text, size_t size) {
    append_text(chat, chat->size ? ",{\"role\":\"" : "[{\"role\":\"");
    append_text(chat, role);
    append_text(chat, "\",\"content\":\"");
    append_json(chat, text, size);
    append_text(chat, "\"}");
}
