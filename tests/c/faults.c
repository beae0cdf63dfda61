/* The fault matrix: every function of the library with every argument wrong in every way a host can get it wrong without
 * breaking a promise of memory: NULL in every combination, misaligned, handles that are stale, of another kind or invented,
 * sizes and numbers at every edge. After each error: the error object agrees, nothing was written, and the sequence is bit
 * for bit what it was. Then the same calls in random order. What is being called is told on stdout, so that a parent knows
 * where a signal came from; the last line holds the counts. */
#include <fcntl.h>
#include <stdalign.h>
#include <sys/mman.h>

#include "faults.h"

static const char *path;
static metrale_model *model;
static metrale_seq *witness;
static uint64_t expected;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
enum { PROMPT_LEN = 5, BUFFER = 1 << 20 };

static uint64_t calls, errors, nulls, handles, sizes, structs, random_calls;

/* What one call gets: objects of its own, so that whatever it does to them is over afterwards. */
static struct {
    metrale_model *model;
    metrale_seq *seq;
    metrale_sampler *sampler;
    metrale_text *text;
    metrale_error *error;
    metrale_source *source;
    metrale_loading *loading;
    metrale_runtime *runtime;
    metrale_seq *list[1];
    metrale_grammar *grammar;
    metrale_sampler_stage stages[3];
    metrale_load_options load;
    metrale_text_options text_options;
    metrale_seq_options seq_options;
    metrale_beam_options beam;
    metrale_embed_options embed;
    metrale_runtime_options lent;
} own;

/* Memory that is really there for every size below 2^32 tokens: pages of zeros. */
static uint8_t *zeros;
static const size_t ZEROS = (size_t)1 << 34;
/* A saved state, for restore. */
static uint8_t *saved;
static size_t saved_len;

/* Where a call writes, one region for each argument, with a pattern in front of and behind what it may touch. */
static alignas(64) uint8_t written[MOST_ARGUMENTS][256];
static uint8_t *buffers[MOST_ARGUMENTS];
static metrale_error *err_place;

/* Compiled once, because that takes its time: it is made again after it was freed. */
static metrale_grammar *grammar;
static const char SCHEMA[] = "{\"type\":\"boolean\"}", GBNF[] = "root ::= [a-c]+", LARK[] = "start: /[a-c]+/", REGEX[] = "[a-c]+";

static metrale_grammar *a_grammar(void) {
    metrale_grammar *made = NULL;
    OK(metrale_grammar_regex(model, (const uint8_t *)REGEX, sizeof REGEX - 1, &made, &err));
    return made;
}

/* A hook that looks and changes nothing. */
static int32_t looks(void *user, float *logits, size_t count, const metrale_token *history, size_t history_count) {
    (void)user, (void)history;
    return logits[0] > 1e30f && count + history_count == 0;
}

static const char TEXT[] = "Once upon a time";
/* A file for sources. */
static int file;
static int64_t reads_nothing(void *user, uint64_t offset, void *into, size_t len) {
    (void)user, (void)offset, (void)into, (void)len;
    return -1;
}

static void all_here(void *user, size_t count, metrale_body_fn body, void *arg) {
    (void)user;
    for (size_t i = 0; i < count; i++) body(arg, i);
}

static const char REQUEST[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}";

static metrale_error *an_error(void) {
    metrale_error *err = NULL;
    CHECK(metrale_check_abi(0, &err) < 0 && err != NULL);
    return err;
}

static void make_own(void) {
    memset(&own, 0, sizeof own);
    OK(metrale_model_retain(model, &own.model, &err));
    OK(metrale_seq_fork(witness, &own.seq, &err));
    own.stages[0].kind = METRALE_STAGE_TOP_K;
    own.stages[0].count = 5;
    own.stages[1].kind = METRALE_STAGE_TEMPERATURE;
    own.stages[1].value = 0.8f;
    own.stages[2].kind = METRALE_STAGE_HOOK;
    OK(metrale_sampler_new(own.stages, 3, 1, &own.sampler, &err));
    OK(metrale_sampler_set_hook(own.sampler, looks, NULL, &err));
    if (grammar == NULL) grammar = a_grammar();
    own.grammar = grammar;
    OK(metrale_text_new(model, NULL, &own.text, &err));
    own.error = an_error();
    /* One that takes no lent thread, since a thread that is lent stays. */
    metrale_runtime_options by_host = {.struct_size = sizeof by_host, .workers = METRALE_WORKERS_HOST, .threads = 2, .parallel_for = all_here};
    OK(metrale_runtime_new(&by_host, &own.runtime, &err));
    own.lent.struct_size = sizeof own.lent;
    own.list[0] = own.seq;
    own.load.struct_size = sizeof own.load;
    own.load.threads = 1;
    own.load.flags = METRALE_LOAD_LOW_PRIORITY | METRALE_LOAD_DETERMINISTIC;
    OK(metrale_source_path(path, 0, &own.source, &err));
    OK(metrale_load_begin(own.source, &own.load, &own.loading, &err));
    own.text_options.struct_size = sizeof own.text_options;
    own.seq_options.struct_size = sizeof own.seq_options;
    own.beam.struct_size = sizeof own.beam;
    own.beam.beams = 2;
    own.beam.max_tokens = 2;
    own.embed.struct_size = sizeof own.embed;
}

static void free_own(void) {
    metrale_free(own.model);
    metrale_seq_free(own.seq);
    metrale_sampler_free(own.sampler);
    metrale_text_free(own.text);
    metrale_error_free(own.error);
    metrale_source_free(own.source);
    metrale_loading_free(own.loading);
    metrale_runtime_free(own.runtime);
}

/* What handles are of, and the places for new ones in the same order; nothing makes an error but a failure. */
static const char KINDS[] = "MSAXYZUDE", MADE[] = "mqaxyw6p";
enum { KIND_COUNT = sizeof KINDS - 1 };

static int is_handle(char c) { return strchr(KINDS, c) != NULL; }
static int is_made(char c) { return strchr(MADE, c) != NULL; }
static int is_number(char c) { return strchr("nNcdifk8", c) != NULL; }
static int is_written(char c) { return strchr("zIFWRG1257", c) != NULL || is_made(c); }

/* A sound argument. */
static uintptr_t sound(char letter, char before, int index) {
    switch (letter) {
    case 'M': return (uintptr_t)own.model;
    case 'S': return (uintptr_t)own.seq;
    case 'A': return (uintptr_t)own.sampler;
    case 'X': return (uintptr_t)own.text;
    case 'E': return (uintptr_t)own.error;
    case 'Y': return (uintptr_t)own.source;
    case 'Z': return (uintptr_t)own.loading;
    case 'D': return (uintptr_t)own.grammar;
    case 'U': return (uintptr_t)own.runtime;
    case '4': return (uintptr_t)&own.lent;
    case '3': return (uintptr_t)&own;
    case 'J': return (uintptr_t)SCHEMA;
    case 'H': return (uintptr_t)GBNF;
    case 'O': return (uintptr_t)LARK;
    case 'v': return (uintptr_t)REGEX;
    case 'j': return (uintptr_t)looks;
    case 'b': return (uintptr_t)TEXT;
    case 'h': return (uintptr_t)reads_nothing;
    case 'u': return (uintptr_t)&own;
    case 'k': return (uintptr_t)file;
    case 'L': return (uintptr_t)own.list;
    case 't': return (uintptr_t)PROMPT;
    case 's': return (uintptr_t)TEXT;
    case 'r': return (uintptr_t)REQUEST;
    case 'B': return (uintptr_t)saved;
    case 'g': return (uintptr_t)own.stages;
    case 'P': return (uintptr_t)path;
    case 'K': return (uintptr_t) "vocab";
    case 'o': return (uintptr_t)buffers[index];
    case 'c': return BUFFER;
    case 'l': return (uintptr_t)&own.load;
    case 'T': return (uintptr_t)&own.text_options;
    case 'Q': return (uintptr_t)&own.seq_options;
    case 'V': return (uintptr_t)&own.beam;
    case 'C': return (uintptr_t)&own.embed;
    case 'e': return (uintptr_t)&err_place;
    case 'i': return 5;
    case 'd':
    case '8': return 1;
    case 'f': return 0;
    case 'n':
    case 'N':
        switch (before) {
        case 't': return PROMPT_LEN;
        case 's':
        case 'b': return sizeof TEXT - 1;
        case 'r': return sizeof REQUEST - 1;
        case 'B': return saved_len;
        case 'g': return 2;
        case 'J': return sizeof SCHEMA - 1;
        case 'H': return sizeof GBNF - 1;
        case 'O': return sizeof LARK - 1;
        case 'v': return sizeof REGEX - 1;
        default: return 1;
        }
    default: return (uintptr_t)(written[index] + 64);
    }
}

static void sound_arguments(const struct function *f, uintptr_t *a) {
    size_t count = strlen(f->letters);
    for (size_t i = 0; i < count; i++) a[i] = sound(f->letters[i], i ? f->letters[i - 1] : 0, (int)i);
}

/* Places to write to, in a pattern; structs know their size. */
static void prepare_places(const struct function *f) {
    memset(written, 0xA5, sizeof written);
    for (size_t i = 0; f->letters[i]; i++) {
        size_t size = 0;
        switch (f->letters[i]) {
        case 'I': size = sizeof(metrale_sequence_info); break;
        case 'F': size = sizeof(metrale_memory_plan); break;
        case 'W': size = sizeof(metrale_text_piece); break;
        case 'R': size = sizeof(metrale_step_result); break;
        case '7': size = sizeof(metrale_device); break;
        case 'G': size = sizeof(metrale_load_progress); break;
        case '1': size = sizeof(metrale_stats); break;
        case '2': size = sizeof(metrale_model_counts); break;
        case '5': size = sizeof(metrale_memory_usage); break;
        case 'o': memset(buffers[i], 0xA5, 64); break;
        default: break;
        }
        if (size) memcpy(written[i] + 64, &size, sizeof size);
    }
    err_place = NULL;
}

static void free_handle(char made, void *handle) {
    switch (made) {
    case 'm': metrale_free(handle); break;
    case 'q': metrale_seq_free(handle); break;
    case 'a': metrale_sampler_free(handle); break;
    case 'y': metrale_source_free(handle); break;
    case 'w': metrale_loading_free(handle); break;
    case 'p': metrale_grammar_free(handle); break;
    case '6': metrale_runtime_free(handle); break;
    default: metrale_text_free(handle);
    }
}

/* `status` is that of a call that succeeded; a load that goes on has written no model yet. */
static void free_results(const struct function *f, const uintptr_t *a, int64_t status) {
    for (size_t i = 0; f->letters[i]; i++) {
        void *handle = NULL;
        if (!is_made(f->letters[i]) || a[i] == 0 || status == METRALE_AGAIN) continue;
        memcpy(&handle, (void *)a[i], sizeof handle);
        free_handle(f->letters[i], handle);
    }
}

#define FAIL(...)                                                      \
    do {                                                               \
        fprintf(stderr, "%s: ", f->name);                              \
        fprintf(stderr, __VA_ARGS__);                                  \
        for (size_t j = 0; f->letters[j]; j++) fprintf(stderr, " %c=%#zx", f->letters[j], (size_t)a[j]); \
        fprintf(stderr, "\n");                                         \
        exit(1);                                                       \
    } while (0)

/* Calls, and checks all that an error promises. Returns the status. */
static int64_t checked(const struct function *f, uintptr_t *a) {
    size_t last = strlen(f->letters);
    uint8_t before[sizeof written];
    memcpy(before, written, sizeof written);
    int64_t status = f->call(a);
    calls++;
    if (strcmp(f->name, "metrale_grammar_free") == 0 && a[0] == (uintptr_t)grammar) grammar = NULL;
    if (!f->status) {
        if (status) FAIL("a result that cannot be");
    } else if (status < 0) {
        errors++;
        int told = a[last - 1] == (uintptr_t)&err_place;
        if (told && metrale_error_code(err_place) != status) FAIL("status %d, but the error says %d", (int)status, metrale_error_code(err_place));
        if (told && strlen(metrale_error_message(err_place)) < 5) FAIL("an error without a text");
        if (status == METRALE_INTERNAL) FAIL("a defect: %s", metrale_error_message(err_place));
        if (memcmp(before, written, sizeof written) != 0) FAIL("status %d, and yet something was written", (int)status);
        for (size_t i = 0; i < last; i++)
            for (size_t k = 0; f->letters[i] == 'o' && k < 64; k++)
                if (buffers[i][k] != 0xA5) FAIL("status %d, and yet the buffer was written", (int)status);
        if (digest_of(own.seq) != expected) FAIL("status %d, and the sequence has changed", (int)status);
    } else {
        if (err_place != NULL) FAIL("success with an error object");
        free_results(f, a, status);
    }
    metrale_error_free(err_place);
    if (digest_of(witness) != expected) FAIL("another sequence has changed");
    return status;
}

static int is_pointer(char c) { return !is_handle(c) && !is_number(c); }

/* Pointers in every combination of NULL, and each misaligned. */
static void bad_pointers(const struct function *f) {
    size_t count = strlen(f->letters), pointers = 0, place[MOST_ARGUMENTS];
    for (size_t i = 0; i < count; i++)
        if (is_pointer(f->letters[i])) place[pointers++] = i;
    for (size_t mask = 0; mask < (size_t)1 << pointers; mask++) {
        uintptr_t a[MOST_ARGUMENTS] = {0};
        make_own();
        prepare_places(f);
        sound_arguments(f, a);
        for (size_t i = 0; i < pointers; i++)
            if (mask >> i & 1) a[place[i]] = 0;
        int64_t status = checked(f, a);
        if (mask == 0 && f->status && status < 0 && status != METRALE_NOT_FOUND && status != METRALE_INVALID_ARGUMENT && status != METRALE_VERSION_MISMATCH && status != METRALE_UNSUPPORTED &&
            status != METRALE_INVALID_STATE)
            FAIL("sound arguments: %d", (int)status);
        free_own();
        nulls++;
    }
    for (size_t i = 0; i < pointers; i++) {
        char letter = f->letters[place[i]];
        if (!is_written(letter) && !strchr("tLgTQVCl4", letter)) continue;
        uintptr_t a[MOST_ARGUMENTS] = {0};
        make_own();
        prepare_places(f);
        sound_arguments(f, a);
        a[place[i]] += 1;
        if (f->status && checked(f, a) >= 0) FAIL("a misaligned pointer was taken");
        free_own();
        nulls++;
    }
}

/* Numbers that are no handle of the wanted kind; `n` of them. */
static size_t bad_handles(char kind, uintptr_t *out) {
    size_t n = 0;
    uintptr_t right = 0;
    for (int i = 0; i < KIND_COUNT; i++) {
        uintptr_t live = sound(KINDS[i], 0, 0);
        if (KINDS[i] == kind) right = live;
        else out[n++] = live;
    }
    metrale_model *stale_model = NULL;
    metrale_seq *stale_seq = NULL;
    metrale_sampler *stale_sampler = NULL;
    metrale_text *stale_text = NULL;
    metrale_source *stale_source = NULL;
    metrale_loading *stale_loading = NULL;
    metrale_runtime *stale_runtime = NULL;
    OK(metrale_runtime_new(NULL, &stale_runtime, &err));
    metrale_error *stale_error = an_error();
    OK(metrale_model_retain(model, &stale_model, &err));
    OK(metrale_seq_fork(witness, &stale_seq, &err));
    OK(metrale_sampler_new(NULL, 0, 1, &stale_sampler, &err));
    OK(metrale_text_new(model, NULL, &stale_text, &err));
    OK(metrale_source_path(path, 0, &stale_source, &err));
    OK(metrale_load_begin(stale_source, NULL, &stale_loading, &err));
    void *stale[] = {stale_model, stale_seq, stale_sampler, stale_text, stale_source, stale_loading, stale_runtime};
    for (size_t i = 0; i < sizeof stale / sizeof *stale; i++) {
        free_handle(MADE[i], stale[i]);
        out[n++] = (uintptr_t)stale[i];
    }
    metrale_error_free(stale_error);
    out[n++] = (uintptr_t)stale_error;
    static metrale_grammar *stale_grammar;
    if (stale_grammar == NULL) {
        stale_grammar = a_grammar();
        metrale_grammar_free(stale_grammar);
    }
    out[n++] = (uintptr_t)stale_grammar;
    const uintptr_t invented[] = {0, 1, 8, UINTPTR_MAX, UINTPTR_MAX - 15, (uintptr_t)INTPTR_MAX, (uintptr_t)1 << 63, (uintptr_t)&own};
    for (size_t i = 0; i < sizeof invented / sizeof *invented; i++) out[n++] = invented[i];
    for (int bit = 4; bit < 64; bit++) out[n++] = right ^ (uintptr_t)1 << bit;
    return n;
}

static void bad_handle_arguments(const struct function *f) {
    for (size_t place = 0; f->letters[place]; place++) {
        char letter = f->letters[place];
        if (!is_handle(letter) && letter != 'L') continue;
        for (size_t index = 0;; index++) {
            uintptr_t a[MOST_ARGUMENTS] = {0}, bad[128];
            make_own();
            size_t count = bad_handles(letter == 'L' ? 'S' : letter, bad);
            if (index < count) {
                prepare_places(f);
                sound_arguments(f, a);
                if (letter == 'L') own.list[0] = (metrale_seq *)bad[index];
                else a[place] = bad[index];
                int64_t status = checked(f, a);
                int no_sampler = (letter == 'A' || letter == 'D') && bad[index] == 0;
                if (f->status && !no_sampler && status != METRALE_INVALID_HANDLE) FAIL("status %d for the handle %#zx", (int)status, (size_t)bad[index]);
                handles++;
            }
            free_own();
            if (index >= count) break;
        }
    }
}

static const uint64_t EDGES[] = {
    0, 1, 2, 511, 512, 0x7ffffffe, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 0x7ffffffffffffffe, 0x7fffffffffffffff,
    0x8000000000000000, 0xffffffffffffffff, 0xfffffffffffffffe, 0xffffffff80000000, 0x3fffffffffffffff, 0x4000000000000000,
};
enum { EDGE_COUNT = sizeof EDGES / sizeof EDGES[0] };

/* Every number at every edge. A pointer whose count is made up points at as many zeros as there may be. */
static void bad_numbers(const struct function *f) {
    for (size_t place = 0; f->letters[place]; place++) {
        char letter = f->letters[place];
        if (!is_number(letter)) continue;
        for (size_t e = 0; e < EDGE_COUNT; e++) {
            uintptr_t a[MOST_ARGUMENTS] = {0};
            /* Zeros are a sound token: who reads all is only given counts that cannot exist, and few. 0x7ffffffe would be read. */
            if (letter == 'N' && EDGES[e] > 512 && EDGES[e] < 0x7fffffffffffffff) continue;
            if (letter == 'n' && EDGES[e] == 0x7ffffffe) continue;
            /* Steps that exist are done until the context is full, and stay. */
            if (letter == '8' && EDGES[e] > 2 && EDGES[e] < 0x3fffffffffffffff) continue;
            make_own();
            prepare_places(f);
            sound_arguments(f, a);
            a[place] = (uintptr_t)EDGES[e];
            if (letter == 'n' && place > 0 && EDGES[e] > 2) a[place - 1] = (uintptr_t)zeros;
            if (letter == 'n' && f->letters[place - 1] == 'L' && EDGES[e] == 2) a[place - 1] = (uintptr_t)zeros;
            if (f->letters[place] == 'N' && EDGES[e] > 2 && place > 0 && f->letters[place - 1] == 't') a[place - 1] = (uintptr_t)zeros;
            checked(f, a);
            free_own();
            sizes++;
        }
    }
}

/* Options and results whose size or fields are anything. Words that are pointers keep their value. */
static void bad_structs(const struct function *f) {
    static alignas(64) uint64_t words[1024];
    for (size_t place = 0; f->letters[place]; place++) {
        char letter = f->letters[place];
        if (!strchr("lTQVC4IFWRG1257", letter)) continue;
        size_t count = letter == 'l' ? sizeof own.load / 8 : letter == 'T' ? sizeof own.text_options / 8 : letter == 'Q' ? sizeof own.seq_options / 8 : letter == 'V' ? sizeof own.beam / 8 : letter == 'C' ? sizeof own.embed / 8 : letter == '4' ? sizeof own.lent / 8 : 1;
        for (size_t word = 0; word < count + 1; word++) {
            if (letter == 'l' && (word == 4 || word == 6 || word == 11)) continue;
            if (letter == '4' && word == 6) continue;
            if (letter == 'T' && (word == 2 || word == 3)) continue;
            for (size_t e = 0; e < EDGE_COUNT + 80; e++) {
                uintptr_t a[MOST_ARGUMENTS] = {0};
                if (word > 0 && e >= EDGE_COUNT) break;
                /* Many threads and a huge context are honest wishes that this test has no time for. */
                if (letter == 'l' && word == 2 && (EDGES[e % EDGE_COUNT] & 0xffffffff) != 0 && EDGES[e % EDGE_COUNT] > 2 && f->letters[2] == 'm') continue;
                make_own();
                prepare_places(f);
                sound_arguments(f, a);
                memset(words, 0, sizeof words);
                words[0] = letter == 'l' ? sizeof own.load : letter == 'T' ? sizeof own.text_options : letter == 'Q' ? sizeof own.seq_options : letter == 'V' ? sizeof own.beam : letter == 'C' ? sizeof own.embed : letter == '4' ? sizeof own.lent : 0;
                if (letter == 'l') words[2] = 1;
                if (letter == 'V') words[1] = words[2] = 2;
                if (word == count) words[0] += 8;
                words[word] = e < EDGE_COUNT ? EDGES[e] : (e - EDGE_COUNT) * 8 / (e % 2 + 1);
                if (strchr("IFWRG1257", letter)) {
                    /* What is filled may be as large as it says, up to what a struct may be. */
                    if (words[0] >= 8 && words[0] <= 4096) { free_own(); continue; }
                    memcpy((void *)a[place], words, 8);
                } else {
                    a[place] = (uintptr_t)words;
                }
                checked(f, a);
                free_own();
                structs++;
            }
        }
    }
}

/* Random calls on objects that live and die at random. */
enum { POOL = 6 };
static struct { uintptr_t handle; uint64_t digest; } pool[KIND_COUNT][POOL];
static uint64_t state = 88172645463325252u;

static uint64_t pick(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

static int pool_of(char letter) { return (int)(strchr(KINDS, letter) - KINDS); }

/* A sequence's digest, or 0 when the handle is none. */
static uint64_t digest_or_none(uintptr_t handle) {
    metrale_sequence_info info = {.struct_size = sizeof info};
    if (metrale_seq_info((metrale_seq *)handle, &info, NULL) != METRALE_OK) return 0;
    return digest_of((metrale_seq *)handle);
}

static void random_walk(uint64_t rounds) {
    static const uint64_t SMALL[] = {0, 1, 2, 3, 5, 40, 511, 512, 0xffffffffffffffff, 0x8000000000000000};
    for (int k = 0; k < KIND_COUNT; k++)
        for (int i = 0; i < POOL; i++) pool[k][i].handle = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        const struct function *f = &FUNCTIONS[pick(FUNCTION_COUNT)];
        uintptr_t a[MOST_ARGUMENTS] = {0};
        if ((strcmp(f->name, "metrale_load") == 0 || strcmp(f->name, "metrale_load_source") == 0) && pick(20)) continue;
        if (strchr(f->letters, 'p') && pick(20)) continue;
        /* Objects stay for a while, and what is freed is used again. */
        if (strstr(f->name, "free") && pick(3)) continue;
        if (round % 64 == 0) {
            metrale_model *m = NULL;
            metrale_seq *s = NULL;
            OK(metrale_model_retain(model, &m, &err));
            OK(metrale_seq_fork(witness, &s, &err));
            pool[0][pick(POOL)].handle = (uintptr_t)m;
            pool[1][pick(POOL)].handle = (uintptr_t)s;
        }
        make_own();
        prepare_places(f);
        sound_arguments(f, a);
        metrale_seq *list[3];
        for (size_t i = 0; f->letters[i]; i++) {
            char c = f->letters[i];
            if (is_handle(c)) {
                int k = pick(12) ? pool_of(c) : (int)pick(KIND_COUNT);
                a[i] = pool[k][pick(POOL)].handle;
            } else if (c == 'L') {
                for (int k = 0; k < 3; k++) list[k] = (metrale_seq *)pool[pick(20) ? 1 : pick(KIND_COUNT)][pick(POOL)].handle;
                a[i] = (uintptr_t)list;
            } else if (c == 'n' || c == 'N') {
                if (f->letters[i - 1] == 'L') a[i] = f->letters[i + 1] == 'd' ? 1 : pick(4);
                else if (pick(3) == 0) a[i] = pick(a[i] + 1);
            } else if (c == '8') {
                a[i] = pick(3) ? pick(2) : (uintptr_t)SMALL[8 + pick(2)];
            } else if (is_number(c)) {
                if (pick(2)) a[i] = SMALL[pick(sizeof SMALL / sizeof *SMALL)];
            } else if (pick(25) == 0) {
                a[i] = 0;
            }
        }
        for (int i = 0; i < POOL; i++) pool[1][i].digest = digest_or_none(pool[1][i].handle);
        int64_t status = strcmp(f->name, "metrale_runtime_run_worker") == 0 ? call_and_release(f, a) : f->call(a);
        random_calls++;
        if (f->status && status < 0) {
            errors++;
            if (status == METRALE_INTERNAL) FAIL("a defect: %s", metrale_error_message(err_place));
            for (int i = 0; i < POOL; i++)
                if (digest_or_none(pool[1][i].handle) != pool[1][i].digest) FAIL("status %d, and a sequence has changed", (int)status);
        }
        for (size_t i = 0; f->letters[i] && f->status && status >= 0; i++) {
            if (!is_made(f->letters[i]) || status == METRALE_AGAIN) continue;
            uintptr_t made;
            memcpy(&made, (void *)a[i], sizeof made);
            pool[strchr(MADE, f->letters[i]) - MADE][pick(POOL)].handle = made;
        }
        /* Errors are objects too: some are kept. */
        if (err_place != NULL && pick(4) == 0) pool[KIND_COUNT - 1][pick(POOL)].handle = (uintptr_t)err_place;
        else metrale_error_free(err_place);
        free_own();
    }
    if (digest_of(witness) != expected) {
        fprintf(stderr, "the witness has changed\n");
        exit(1);
    }
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    zeros = mmap(NULL, ZEROS, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(zeros != MAP_FAILED);
    for (int i = 0; i < MOST_ARGUMENTS; i++) CHECK((buffers[i] = malloc(BUFFER)) != NULL);
    CHECK((file = open(path, O_RDONLY)) >= 0);
    model = load_model(path);
    witness = new_seq(model, NULL);
    OK(metrale_prefill(witness, PROMPT, PROMPT_LEN, &err));
    expected = digest_of(witness);
    EXPECT(METRALE_MORE, metrale_seq_save(witness, NULL, 0, &saved_len, &err));
    CHECK((saved = malloc(saved_len)) != NULL && saved_len <= BUFFER);
    OK(metrale_seq_save(witness, saved, saved_len, &saved_len, &err));

    for (int i = 0; i < FUNCTION_COUNT; i++) {
        printf("%s\n", FUNCTIONS[i].name);
        bad_pointers(&FUNCTIONS[i]);
        bad_handle_arguments(&FUNCTIONS[i]);
        bad_numbers(&FUNCTIONS[i]);
        bad_structs(&FUNCTIONS[i]);
    }
    printf("random\n");
    random_walk(quick ? 2000 : 40000);
    metrale_grammar_free(grammar);
    metrale_seq_free(witness);
    metrale_free(model);
    printf("counts: %d functions, %llu calls, %llu with NULLs or misaligned, %llu with bad handles, %llu with edge numbers, %llu with odd structs, "
           "%llu in random order, %llu errors\n", FUNCTION_COUNT, (unsigned long long)(calls + random_calls), (unsigned long long)nulls,
           (unsigned long long)handles, (unsigned long long)sizes, (unsigned long long)structs, (unsigned long long)random_calls,
           (unsigned long long)errors);
    return 0;
}
