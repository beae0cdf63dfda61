/* A long run: decode steps with forks, rollbacks, cancels, saves and restores from four threads on one model. Memory must not grow:
 * RssAnon + VmSwap is sampled, and a line fitted through the second half must be flat. The second argument is the number of steps.
 * Prints counts. */
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, STATE = 1 << 20, SAMPLES = 4096 };

static metrale_model *model;
static atomic_long steps, forks, rollbacks, cancels, cancelled, saves, restores, prefills, full;
static atomic_int working;
static long wanted;
/* The sequence of each thread, for whoever cancels; frees and cancels of stale handles are part of the run. */
static _Atomic(metrale_seq *) current[THREADS];

/* A step or a prefill works, is cancelled, or finds the context full. */
static metrale_status step(metrale_seq *seq, metrale_token *token) {
    metrale_error *err = NULL;
    metrale_status status = metrale_decode_step(&seq, 1, token, &err);
    CHECK(status == METRALE_OK || status == METRALE_DONE || status == METRALE_CANCELLED || status == METRALE_CONTEXT_FULL);
    if (status >= METRALE_OK) atomic_fetch_add(&steps, 1);
    if (status == METRALE_CANCELLED) atomic_fetch_add(&cancelled, 1);
    if (status == METRALE_CONTEXT_FULL) atomic_fetch_add(&full, 1);
    metrale_error_free(err);
    return status;
}

static int prefill(metrale_seq *seq, const metrale_token *tokens, size_t count) {
    metrale_status status = metrale_prefill(seq, tokens, count, NULL);
    CHECK(status == METRALE_OK || status == METRALE_CANCELLED || status == METRALE_CONTEXT_FULL);
    if (status == METRALE_OK) atomic_fetch_add(&prefills, 1);
    return status == METRALE_OK;
}

static uint64_t digest(const metrale_seq *seq) {
    size_t count = 0;
    const float *row = row_of(seq, &count);
    uint64_t hash = length_of(seq);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
}

/* One sequence's life. */
static void live(int index, unsigned *random, uint8_t *state) {
    static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};
    metrale_seq_options options = {.struct_size = sizeof options, .context = 96};
    metrale_seq *seq = new_seq(model, &options);
    atomic_store(&current[index], seq);
    while (!prefill(seq, PROMPT, 5)) {}
    metrale_token token = -1;
    for (int turn = 0; turn < 24 && atomic_load(&steps) < wanted; turn++) {
        uint64_t mark = 0, before;
        switch (rand_r(random) % 6) {
        case 0: { /* A fork goes its own way and leaves the original as it was. */
            metrale_seq *fork = NULL;
            before = digest(seq);
            OK(metrale_seq_fork(seq, &fork, &err));
            for (int i = 0; i < 4; i++) step(fork, &token);
            metrale_seq_free(fork);
            CHECK(digest(seq) == before);
            atomic_fetch_add(&forks, 1);
            break;
        }
        case 1: /* Back to a mark. */
            before = digest(seq);
            OK(metrale_seq_mark(seq, &mark, &err));
            for (int i = 0; i < 6; i++) step(seq, &token);
            OK(metrale_seq_rollback(seq, mark, &err));
            OK(metrale_seq_commit(seq, mark, &err));
            CHECK(digest(seq) == before);
            atomic_fetch_add(&rollbacks, 1);
            break;
        case 2: { /* Kept as bytes, and back. */
            size_t size = 0;
            before = digest(seq);
            OK(metrale_seq_save(seq, state, STATE, &size, &err));
            atomic_fetch_add(&saves, 1);
            step(seq, &token);
            OK(metrale_seq_restore(seq, state, size, &err));
            CHECK(digest(seq) == before);
            atomic_fetch_add(&restores, 1);
            break;
        }
        case 3: OK(metrale_seq_truncate(seq, length_of(seq) > 8 ? length_of(seq) - 3 : length_of(seq), &err)); break;
        default:
            for (int i = 0; i < 4; i++) step(seq, &token);
        }
        /* A neighbour's sequence, alive, busy or freed by now. */
        if (rand_r(random) % 16 == 0) {
            metrale_status status = metrale_cancel(atomic_load(&current[rand_r(random) % THREADS]), NULL);
            CHECK(status == METRALE_OK || status == METRALE_INVALID_HANDLE);
            atomic_fetch_add(&cancels, 1);
        }
    }
    metrale_seq_free(seq);
}

static void *work(void *index) {
    unsigned random = 7 + (unsigned)(uintptr_t)index;
    uint8_t *state = malloc(STATE);
    CHECK(state != NULL);
    while (atomic_load(&steps) < wanted) live((int)(uintptr_t)index, &random, state);
    free(state);
    atomic_fetch_sub(&working, 1);
    return NULL;
}

/* RssAnon + VmSwap in KiB. */
static double memory(void) {
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    double kib = 0;
    for (char line[256]; fgets(line, sizeof line, status);)
        if (strncmp(line, "RssAnon:", 8) == 0 || strncmp(line, "VmSwap:", 7) == 0) kib += atof(strchr(line, ':') + 1);
    fclose(status);
    return kib;
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    wanted = argc > 2 ? atol(argv[2]) : 200000;
    model = load_model(argv[1]);
    pthread_t threads[THREADS];
    atomic_store(&working, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    static double at[SAMPLES], kib[SAMPLES];
    int count = 0;
    while (atomic_load(&working) > 0) {
        usleep(wanted > 20000 ? 100000 : 10000);
        if (count == SAMPLES) { /* Every second one is kept. */
            count /= 2;
            for (int i = 0; i < count; i++) at[i] = at[2 * i], kib[i] = kib[2 * i];
        }
        at[count] = (double)atomic_load(&steps);
        kib[count++] = memory();
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    metrale_free(model);

    /* The line of least squares, without the first half, in which caches and arenas fill. */
    int first = count / 2, n = count - first;
    CHECK(n >= 5);
    double x = 0, y = 0, xy = 0, xx = 0, low = kib[first], high = kib[first];
    for (int i = first; i < count; i++) {
        x += at[i] / n, y += kib[i] / n;
        if (kib[i] < low) low = kib[i];
        if (kib[i] > high) high = kib[i];
    }
    for (int i = first; i < count; i++) xy += (at[i] - x) * (kib[i] - y), xx += (at[i] - x) * (at[i] - x);
    double slope = xx > 0 ? xy / xx * 1024 : 0;
    printf("%ld steps, %ld prefills, %ld forks, %ld rollbacks, %ld saves, %ld restores, %ld cancels (%ld steps cancelled), %ld times full\n",
           atomic_load(&steps), atomic_load(&prefills), atomic_load(&forks), atomic_load(&rollbacks), atomic_load(&saves), atomic_load(&restores),
           atomic_load(&cancels), atomic_load(&cancelled), atomic_load(&full));
    printf("memory: %.0f KiB on average over the second half, %.0f to %.0f; %.3f bytes a step over %d samples\n", y, low, high, slope, n);
    /* A leak of anything at all with each sequence, fork or save is more than a byte a step. Short runs only show large ones. */
    CHECK(slope < (wanted >= 100000 ? 1.0 : 64.0));
    CHECK(atomic_load(&steps) >= wanted && atomic_load(&forks) > 0 && atomic_load(&rollbacks) > 0 && atomic_load(&saves) > 0);
    return 0;
}
