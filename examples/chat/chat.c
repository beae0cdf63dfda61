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

/* Room for `size` more bytes, or the end of this program: a terminal toy needs no better answer. */
static void reserve(bytes *b, size_t size) {
    if (size <= b->room - b->size) return;
    b->room = 2 * (b->size + size);
    b->data = realloc(b->data, b->room);
    if (b->data) return;
    fprintf(stderr, "chat: out of memory\n");
    exit(1);
}

static void append(bytes *b, const void *data, size_t size) {
    reserve(b, size);
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

/* The error in words, freed. Always false, so that a step can end with `return failed(err)`. */
static bool failed(metrale_error *err) {
    fprintf(stderr, "chat: %s\n", metrale_error_message(err));
    metrale_error_free(err);
    return false;
}

/* The conversation as the text that the model was trained to see. Asked twice: for the size, then for the text. */
static bool render(const metrale_model *model, const bytes *chat, bytes *out) {
    metrale_error *err = NULL;
    bytes request = {0};
    append_text(&request, "{\"messages\":");
    append(&request, chat->data, chat->size);
    append_text(&request, "]}");
    size_t size = 0;
    metrale_status status = metrale_chat_render(model, request.data, request.size, NULL, 0, &size, &err);
    if (status == METRALE_MORE) {
        reserve(out, size);
        status = metrale_chat_render(model, request.data, request.size, out->data, out->room, &out->size, &err);
    }
    free(request.data);
    if (status < 0) fprintf(stderr, "chat: --raw continues a text without a chat template\n");
    return status == METRALE_OK ? true : failed(err);
}

/* Tokens of `text`; NULL after a failure. The caller frees them. */
static metrale_token *tokenize(const metrale_model *model, const bytes *text, uint32_t flags, size_t *count) {
    metrale_error *err = NULL;
    metrale_token *tokens = NULL;
    metrale_status status = metrale_tokenize(model, text->data, text->size, flags, NULL, 0, count, &err);
    if (status == METRALE_MORE) {
        tokens = malloc(*count * sizeof *tokens);
        status = metrale_tokenize(model, text->data, text->size, flags, tokens, tokens ? *count : 0, count, &err);
    }
    if (status == METRALE_OK && *count > 0) return tokens;
    if (status == METRALE_OK) fprintf(stderr, "chat: the prompt is empty\n");
    else failed(err);
    free(tokens);
    return NULL;
}

/* Shows text at once and remembers it. */
static void show(bytes *answer, const uint8_t *text, size_t size) {
    fwrite(text, 1, size, stdout);
    fflush(stdout);
    append(answer, text, size);
}

/* Decodes until the model ends, `max_tokens` are made or the context is full. */
static bool answer(metrale_model *model, metrale_seq *seq, const settings *set, bytes *out, speed *sum) {
    metrale_error *err = NULL;
    metrale_text *text = NULL;
    metrale_text_piece piece = {.struct_size = sizeof piece}; /* whole characters: a token may show nothing yet */
    if (metrale_text_new(model, NULL, &text, &err) != METRALE_OK) return failed(err);
    metrale_status status = METRALE_OK;
    double start = now();
    for (size_t i = 0; i < set->max_tokens && status == METRALE_OK; i++) {
        metrale_token token;
        status = metrale_decode_step(&seq, 1, &token, &err);
        if (status != METRALE_OK) break; /* METRALE_DONE: the token only says that the answer ends */
        sum->decode_tokens++;
        status = metrale_text_push(text, token, &piece, &err);
        if (status == METRALE_OK) show(out, piece.bytes, piece.len);
    }
    sum->decode_seconds += now() - start;
    bool full = status == METRALE_CONTEXT_FULL;
    bool ok = full || status == METRALE_OK || status == METRALE_DONE;
    if (ok && metrale_text_flush(text, &piece, NULL) == METRALE_OK) show(out, piece.bytes, piece.len);
    printf("\n");
    if (full || !ok) failed(err);
    metrale_text_free(text);
    return ok;
}

/* One prompt, one answer, in a sequence of their own. `chat` is the conversation so far, the prompt included. */
static bool turn(metrale_model *model, const settings *set, const bytes *chat, const char *prompt, bytes *out, speed *sum) {
    metrale_error *err = NULL;
    metrale_seq *seq = NULL;
    bytes text = {0};
    size_t count = 0;
    bool ok = true;
    if (set->raw) append_text(&text, prompt);
    else ok = render(model, chat, &text);
    metrale_token *tokens = ok ? tokenize(model, &text, set->raw ? METRALE_TOKENIZE_ADD_SPECIAL : METRALE_TOKENIZE_PARSE_SPECIAL, &count) : NULL;
    ok = tokens != NULL;
    if (ok && metrale_seq_new(model, NULL, &seq, &err) != METRALE_OK) ok = failed(err);
    if (ok) {
        double start = now();
        if (metrale_prefill(seq, tokens, count, &err) != METRALE_OK) ok = failed(err);
        sum->prompt_seconds += now() - start;
        sum->prompt_tokens += count;
    }
    if (ok && set->raw) show(out, text.data, text.size);
    ok = ok && answer(model, seq, set, out, sum);
    metrale_seq_free(seq);
    free(tokens);
    free(text.data);
    return ok;
}

/* A line of any length from stdin, without its end; false at the end of the input. */
static bool read_line(bytes *line) {
    line->size = 0;
    int c;
    while ((c = getchar()) != EOF && c != '\n') append(line, &(char){(char)c}, 1);
    bool any = line->size > 0 || c != EOF;
    append(line, "", 1);
    return any;
}

static bool converse(metrale_model *model, const settings *set, speed *sum) {
    bytes chat = {0}, line = {0}, out = {0};
    bool ok = true;
    while (ok) {
        if (!set->prompt) {
            fprintf(stderr, "> ");
            if (!read_line(&line)) break;
            if (line.size == 1) continue;
        }
        const char *prompt = set->prompt ? set->prompt : (const char *)line.data;
        append_message(&chat, "user", (const uint8_t *)prompt, strlen(prompt));
        out.size = 0;
        ok = turn(model, set, &chat, prompt, &out, sum);
        append_message(&chat, "assistant", out.data, out.size);
        if (set->prompt) break;
    }
    free(chat.data);
    free(line.data);
    free(out.data);
    return ok;
}

static void report(const char *what, size_t tokens, double seconds) {
    if (tokens) fprintf(stderr, "%-7s %5zu tokens in %6.2f s: %8.1f tokens/s\n", what, tokens, seconds, (double)tokens / (seconds > 0 ? seconds : 1e-9));
}

static bool number(const char *text, size_t *out) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    *out = (size_t)value;
    return *text >= '0' && *text <= '9' && *end == '\0' && value <= 1u << 30;
}

static bool parse(int argc, char **argv, settings *set) {
    for (int i = 1; i < argc; i++) {
        size_t *target = !strcmp(argv[i], "--threads") ? &set->threads : !strcmp(argv[i], "--max-tokens") ? &set->max_tokens : NULL;
        if (target) {
            if (++i == argc || !number(argv[i], target)) return false;
        } else if (!strcmp(argv[i], "--raw")) {
            set->raw = true;
        } else if (argv[i][0] == '-' && argv[i][1] == '-') {
            return false;
        } else if (!set->model) {
            set->model = argv[i];
        } else if (!set->prompt) {
            set->prompt = argv[i];
        } else {
            return false;
        }
    }
    return set->model != NULL;
}

int main(int argc, char **argv) {
    settings set = {.max_tokens = 256};
    if (!parse(argc, argv, &set)) {
        fprintf(stderr, "usage: chat [--threads N] [--max-tokens N] [--raw] MODEL [PROMPT]\n");
        return 2;
    }
    metrale_error *err = NULL;
    metrale_model *model = NULL;
    metrale_load_options options = {.struct_size = sizeof options, .threads = (uint32_t)set.threads};
    double start = now();
    if (metrale_load(set.model, &options, &model, &err) != METRALE_OK) {
        failed(err);
        return 1;
    }
    fprintf(stderr, "metrale %s: %s loaded in %.2f s\n", metrale_version_string(), set.model, now() - start);
    speed sum = {0};
    bool ok = converse(model, &set, &sum);
    report("prompt", sum.prompt_tokens, sum.prompt_seconds);
    report("decode", sum.decode_tokens, sum.decode_seconds);
    metrale_free(model);
    return ok ? 0 : 1;
}
