/* A game's loop at 60 frames a second that gives the engine a share of every frame and never misses one for it.
 *
 *     frame_loop [--frames N] [--budget-ms X] [--threads N] [--svg FILE] [--raw] MODEL PROMPT
 *
 * Each frame does the game's own work (a little arithmetic that stands for it), then lets `metrale_step` work for the budget, shows what
 * text there is, and sleeps until the next frame is due. The model, too, is loaded inside of frames. At the end there is a histogram of how
 * long the frames took: everything but the sleep. */
#define _POSIX_C_SOURCE 200809L
#include <metrale.h>

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FRAME_MS (1000.0 / 60.0)
#define BIN_MS 0.25
#define BINS 80 /* the last one holds everything above */

typedef struct {
    const char *model, *prompt, *svg;
    size_t frames, threads;
    double budget_ms;
    bool raw;
} settings;

typedef struct {
    double *ms; /* one for each frame */
    size_t count;
} times;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void sleep_until(double ms) {
    struct timespec t = {.tv_sec = (time_t)(ms / 1e3)};
    t.tv_nsec = (long)((ms - (double)t.tv_sec * 1e3) * 1e6);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0) continue;
}

static bool failed(metrale_error **err) {
    fprintf(stderr, "frame_loop: %s\n", metrale_error_message(*err));
    metrale_error_free(*err);
    *err = NULL;
    return false;
}

/* What a game does besides: about a fifth of a millisecond. */
static double play(double state) {
    for (int i = 0; i < 20000; i++) state += sin(state) * 1e-3;
    return state;
}

/* The prompt as the model wants it: its chat template around it, or as it stands. NULL after a failure. */
static metrale_token *prompt_tokens(const metrale_model *model, const settings *set, size_t *count) {
    metrale_error *err = NULL;
    size_t text_size = strlen(set->prompt), room = 2 * text_size + 4096;
    char *request = malloc(room), *text = malloc(room);
    metrale_token *tokens = malloc(room * sizeof *tokens);
    metrale_status status = request && text && tokens ? METRALE_OK : METRALE_OUT_OF_MEMORY;
    uint32_t flags = METRALE_TOKENIZE_ADD_SPECIAL;
    if (status == METRALE_OK && set->raw) memcpy(text, set->prompt, text_size);
    if (status == METRALE_OK && !set->raw) {
        size_t size = (size_t)sprintf(request, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
        for (const char *c = set->prompt; *c; c++) {
            if (*c == '"' || *c == '\\') request[size++] = '\\';
            request[size++] = *c >= 0 && *c < ' ' ? ' ' : *c;
        }
        size += (size_t)sprintf(request + size, "\"}]}");
        flags = METRALE_TOKENIZE_PARSE_SPECIAL;
        status = metrale_chat_render(model, (const uint8_t *)request, size, (uint8_t *)text, room, &text_size, &err);
    }
    if (status == METRALE_OK) status = metrale_tokenize(model, (const uint8_t *)text, text_size, flags, tokens, room, count, &err);
    free(request);
    free(text);
    if (status == METRALE_OK) return tokens;
    if (status == METRALE_MORE) fprintf(stderr, "frame_loop: the chat template is longer than this example expects\n");
    else failed(&err);
    free(tokens);
    return NULL;
}

/* All that the game has of the engine. */
typedef struct {
    metrale_loading *loading;
    metrale_model *model;
    metrale_seq *seq;
    metrale_text *text;
    size_t produced, first_frame; /* tokens; the frame that showed the first */
    bool ended;
} engine;

/* One frame's share: loads, then reads the prompt, then makes tokens. False when something failed. */
static bool engine_frame(engine *e, const settings *set, uint64_t budget_ns, size_t frame) {
    metrale_error *err = NULL;
    if (!e->model) {
        metrale_status status = metrale_load_step(e->loading, budget_ns, NULL, &e->model, &err);
        if (status < METRALE_OK) return failed(&err);
        if (status == METRALE_AGAIN) return true;
        size_t count = 0;
        metrale_token *tokens = prompt_tokens(e->model, set, &count);
        bool ok = tokens && metrale_seq_new(e->model, NULL, &e->seq, &err) == METRALE_OK &&
                  metrale_text_new(e->model, NULL, &e->text, &err) == METRALE_OK &&
                  metrale_seq_feed(e->seq, tokens, count, &err) == METRALE_OK; /* waits in the queue; nothing is computed yet */
        free(tokens);
        return ok || (tokens && failed(&err));
    }
    if (e->ended) return true;
    metrale_step_result result = {.struct_size = sizeof result};
    metrale_text_piece piece = {.struct_size = sizeof piece};
    metrale_status status = metrale_step(&e->seq, 1, budget_ns, &result, &err);
    if (status < METRALE_OK) return failed(&err);
    e->ended = status == METRALE_DONE || result.status < METRALE_OK; /* the text is over, or the context full */
    if (result.token < 0 || e->ended) return true;
    if (e->produced++ == 0) e->first_frame = frame;
    if (metrale_text_push(e->text, result.token, &piece, &err) < METRALE_OK) return failed(&err);
    fwrite(piece.bytes, 1, piece.len, stdout);
    fflush(stdout);
    return true;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* `ms` has to be sorted. */
static double percentile(const times *t, double share) { return t->ms[(size_t)(share * (double)(t->count - 1))]; }

static void count_bins(const times *t, size_t *bins) {
    for (size_t i = 0; i < t->count; i++) bins[t->ms[i] < BIN_MS * (BINS - 1) ? (size_t)(t->ms[i] / BIN_MS) : BINS - 1]++;
}

static void print_histogram(const times *t) {
    size_t bins[BINS] = {0}, most = 1;
    count_bins(t, bins);
    for (size_t i = 0; i < BINS; i++) most = bins[i] > most ? bins[i] : most;
    for (size_t i = 0; i < BINS; i++) {
        if (bins[i] == 0) continue;
        /* A mark for every frame would not fit: the longest row has 50. */
        int marks = (int)(50 * bins[i] / most);
        printf("%5.2f ms %c %6zu  %.*s\n", BIN_MS * (double)i, i == BINS - 1 ? '+' : ' ', bins[i], marks > 0 ? marks : 1,
               "##################################################");
    }
}

/* Bars of square roots: a single late frame can still be seen. */
static bool write_svg(const times *t, const char *path, double budget_ms) {
    size_t bins[BINS] = {0}, most = 1;
    FILE *out = fopen(path, "w");
    if (!out) return false;
    count_bins(t, bins);
    for (size_t i = 0; i < BINS; i++) most = bins[i] > most ? bins[i] : most;
    const double left = 40, base = 200, height = 160, step = 7;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 640 250\" font-family=\"sans-serif\" font-size=\"11\">\n");
    fprintf(out, "<rect width=\"640\" height=\"250\" fill=\"#fff\"/>\n");
    for (size_t i = 0; i < BINS; i++) {
        if (bins[i] == 0) continue;
        double h = height * sqrt((double)bins[i] / (double)most);
        fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#3b6ea5\"><title>%zu frames</title></rect>\n",
                left + step * (double)i, base - h, step - 1, h, bins[i]);
    }
    fprintf(out, "<path d=\"M%.0f %.0fh%.0f\" stroke=\"#333\"/>\n", left, base, step * BINS);
    for (int ms = 0; ms <= (int)(BIN_MS * BINS); ms += 2)
        fprintf(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%d</text>\n", left + step * ms / BIN_MS, base + 15, ms);
    const double lines[] = {budget_ms, FRAME_MS}, tops[] = {18, 32};
    const char *names[] = {"budget of the engine", "frame at 60 Hz"};
    for (int i = 0; i < 2; i++) {
        double x = left + step * lines[i] / BIN_MS;
        fprintf(out, "<path d=\"M%.1f %.0fV%.0f\" stroke=\"#b33\" stroke-dasharray=\"4 3\"/>\n", x, base, tops[i] + 4);
        fprintf(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"%s\" fill=\"#b33\">%s, %.1f ms</text>\n", x, tops[i], i ? "end" : "start", names[i], lines[i]);
    }
    fprintf(out, "<text x=\"%.0f\" y=\"%.0f\">milliseconds of a frame without its sleep; heights by square root</text>\n", left, base + 31);
    fprintf(out, "<text x=\"%.0f\" y=\"%.0f\">%zu frames: p50 %.2f, p99 %.2f, most %.2f</text>\n</svg>\n", left, base + 46, t->count,
            percentile(t, 0.5), percentile(t, 0.99), percentile(t, 1));
    return fclose(out) == 0;
}

static bool run(const settings *set, times *t, engine *e) {
    metrale_error *err = NULL;
    metrale_source *source = NULL;
    metrale_load_options options = {.struct_size = sizeof options, .threads = (uint32_t)set->threads};
    bool ok = metrale_source_path(set->model, 0, &source, &err) == METRALE_OK && metrale_load_begin(source, &options, &e->loading, &err) == METRALE_OK;
    metrale_source_free(source);
    if (!ok) return failed(&err);
    double state = 1, start = now_ms();
    size_t loaded = 0, late = 0;
    /* A frame that took too long is late once: the next one is due a whole frame after it. */
    for (size_t frame = 0; ok && t->count < set->frames; frame++) {
        bool loading = !e->model;
        double begin = now_ms();
        state = play(state);
        ok = engine_frame(e, set, (uint64_t)(set->budget_ms * 1e6), frame - loaded);
        double took = now_ms() - begin;
        if (loading) loaded = frame + 1; /* the tokenizer is one piece of some 30 ms: not among the frames of play */
        else t->ms[t->count++] = took;
        late += !loading && took > FRAME_MS;
        start += FRAME_MS;
        if (now_ms() > start) start = now_ms();
        sleep_until(start);
    }
    printf("\n\n");
    if (!ok) return false;
    qsort(t->ms, t->count, sizeof *t->ms, by_size);
    print_histogram(t);
    printf("loaded in %zu frames, first token after %zu, %zu tokens in %zu frames: %.1f a second\n", loaded, e->first_frame, e->produced, t->count,
           (double)e->produced / ((double)t->count * FRAME_MS / 1e3));
    printf("frame time: p50 %.2f ms, p99 %.2f ms, most %.2f ms; %zu of %zu later than %.1f ms%s\n", percentile(t, 0.5), percentile(t, 0.99),
           percentile(t, 1), late, t->count, FRAME_MS, state > 1e9 ? "!" : "");
    return true;
}

static bool number(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return *text >= '0' && *text <= '9' && *end == '\0' && *out <= 1e6;
}

static bool parse(int argc, char **argv, settings *set) {
    for (int i = 1; i < argc; i++) {
        double value = 0;
        bool known = !strcmp(argv[i], "--frames") || !strcmp(argv[i], "--budget-ms") || !strcmp(argv[i], "--threads");
        if (known) {
            if (i + 1 == argc || !number(argv[i + 1], &value)) return false;
            if (argv[i][2] == 'f') set->frames = (size_t)value;
            if (argv[i][2] == 'b') set->budget_ms = value;
            if (argv[i][2] == 't') set->threads = (size_t)value;
            i++;
        } else if (!strcmp(argv[i], "--svg")) {
            if (i + 1 == argc) return false;
            set->svg = argv[++i];
        } else if (!strcmp(argv[i], "--raw")) set->raw = true;
        else if (!set->model) set->model = argv[i];
        else if (!set->prompt) set->prompt = argv[i];
        else return false;
    }
    return set->prompt && set->frames > 0;
}

int main(int argc, char **argv) {
    settings set = {.frames = 600, .threads = 1, .budget_ms = 2};
    if (!parse(argc, argv, &set)) {
        fprintf(stderr, "usage: frame_loop [--frames N] [--budget-ms X] [--threads N] [--svg FILE] [--raw] MODEL PROMPT\n");
        return 2;
    }
    times t = {.ms = calloc(set.frames, sizeof *t.ms)};
    engine e = {0};
    bool ok = t.ms && run(&set, &t, &e);
    if (ok && set.svg && !write_svg(&t, set.svg, set.budget_ms)) {
        fprintf(stderr, "frame_loop: %s cannot be written\n", set.svg);
        ok = false;
    }
    metrale_text_free(e.text);
    metrale_seq_free(e.seq);
    metrale_free(e.model);
    metrale_loading_free(e.loading);
    free(t.ms);
    return ok ? 0 : 1;
}
