/* Cases from the field that no other program here holds: cut files, texts beyond all sizes, closed outputs, objects freed in
 * the unlucky order and at the unlucky moment, memory that must come back. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faults.h"

static const char *path;
static metrale_model *model;
static const metrale_token PROMPT[] = {1, 403, 407, 261, 378};

/* Every cut of the file is refused before anything of it is touched: a mapped page beyond the end would be a SIGBUS. */
static void cut_files(void) {
    FILE *in = fopen(path, "rb");
    CHECK(in != NULL && fseek(in, 0, SEEK_END) == 0);
    long whole = ftell(in);
    rewind(in);
    uint8_t *bytes = malloc((size_t)whole);
    CHECK(bytes != NULL && fread(bytes, 1, (size_t)whole, in) == (size_t)whole);
    fclose(in);
    char name[] = "/tmp/metrale-field-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && write(file, bytes, (size_t)whole) == whole);
    for (long cut = whole - 1; cut >= 0; cut = cut > 65536 ? (cut - 1) / 65536 * 65536 : cut > 64 ? cut / 2 : cut - 1) {
        metrale_model *made = NULL;
        metrale_error *err = NULL;
        CHECK(ftruncate(file, cut) == 0);
        metrale_status status = metrale_load(name, NULL, &made, &err);
        CHECK(status == METRALE_CORRUPT_FILE || status == METRALE_NOT_A_MODEL);
        CHECK(made == NULL && strlen(metrale_error_message(err)) > 10);
        metrale_error_free(err);
    }
    close(file);
    unlink(name);
    free(bytes);
}

/* 2^31 bytes and more, really there: refused by their number. */
static void texts_beyond_all_sizes(void) {
    size_t there = (size_t)1 << 33, count = 77;
    uint8_t *zeros = mmap(NULL, there, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(zeros != MAP_FAILED);
    const size_t sizes[] = {(size_t)1 << 31, ((size_t)1 << 31) + 1, (size_t)1 << 32, there, SIZE_MAX / 2, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        EXPECT(METRALE_TOO_LARGE, metrale_tokenize(model, zeros, sizes[i], 0, NULL, 0, &count, &err));
        EXPECT(METRALE_TOO_LARGE, metrale_chat_render(model, zeros, sizes[i], NULL, 0, &count, &err));
        if (sizes[i] <= there / 4 || sizes[i] > there)
            EXPECT(METRALE_TOO_LARGE, metrale_detokenize(model, (const metrale_token *)(const void *)zeros, sizes[i], 0, NULL, 0, &count, &err));
    }
    CHECK(count == 77);
    munmap(zeros, there);
}

/* Without a console the whole reason is in the error object. */
static void closed_outputs(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(0);
        close(1);
        close(2);
        metrale_model *made = NULL;
        metrale_error *err = NULL;
        if (metrale_load("nowhere/model.gguf", NULL, &made, &err) != METRALE_NOT_FOUND) _exit(2);
        if (strstr(metrale_error_message(err), "nowhere/model.gguf") == NULL) _exit(3);
        if (metrale_load(path, NULL, &made, &err) != METRALE_OK) _exit(4);
        metrale_seq *seq = NULL;
        if (metrale_seq_new(made, NULL, &seq, &err) != METRALE_OK || metrale_prefill(seq, PROMPT, 5, &err) != METRALE_OK) _exit(5);
        if (metrale_prefill(seq, (const metrale_token[]){512}, 1, &err) != METRALE_INVALID_TOKEN) _exit(6);
        if (strstr(metrale_error_message(err), "512") == NULL) _exit(7);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fprintf(stderr, "closed outputs: %#x\n", status);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The model's handle goes first; all that was made of it works on. */
static void the_model_goes_first(void) {
    metrale_model *own = load_model(path);
    metrale_seq *seq = new_seq(own, NULL), *fork = NULL;
    metrale_text *text = NULL;
    OK(metrale_text_new(own, NULL, &text, &err));
    metrale_free(own);
    OK(metrale_prefill(seq, PROMPT, 5, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    size_t len = 0;
    EXPECT(METRALE_MORE, metrale_seq_save(fork, NULL, 0, &len, &err));
    uint8_t *bytes = malloc(len);
    CHECK(bytes != NULL);
    OK(metrale_seq_save(fork, bytes, len, &len, &err));
    metrale_seq_free(seq);
    metrale_token token = -1;
    uint64_t before = digest_of(fork);
    CHECK(metrale_decode_step(&fork, 1, &token, NULL) >= METRALE_OK);
    OK(metrale_seq_restore(fork, bytes, len, &err));
    CHECK(digest_of(fork) == before);
    metrale_text_piece piece = {.struct_size = sizeof piece};
    OK(metrale_text_push(text, token, &piece, &err));
    metrale_text_free(text);
    metrale_seq_free(fork);
    free(bytes);
}

static _Atomic(metrale_seq *) under_way;
static atomic_int over;

static void *frees(void *unused) {
    (void)unused;
    while (!atomic_load(&over)) metrale_seq_free(atomic_exchange(&under_way, NULL));
    return NULL;
}

/* Sequences freed by another thread in the middle of a save, a prefill, a fork: the call ends, or finds no handle. */
static void freed_under_way(void) {
    pthread_t thread;
    size_t len = 0, room = 1 << 20;
    uint8_t *bytes = malloc(room);
    CHECK(bytes != NULL && pthread_create(&thread, NULL, frees, NULL) == 0);
    for (int round = 0; round < (quick ? 50 : 1000); round++) {
        metrale_seq *seq = new_seq(model, NULL), *fork = NULL;
        OK(metrale_prefill(seq, PROMPT, 5, &err));
        atomic_store(&under_way, seq);
        for (metrale_status status = METRALE_OK; status != METRALE_INVALID_HANDLE;) {
            status = metrale_seq_save(seq, bytes, room, &len, NULL);
            CHECK(status == METRALE_OK || status == METRALE_INVALID_HANDLE);
            if (metrale_seq_fork(seq, &fork, NULL) == METRALE_OK) metrale_seq_free(fork);
            status = metrale_prefill(seq, PROMPT + 1, 1, NULL);
            CHECK(status == METRALE_OK || status == METRALE_INVALID_HANDLE || status == METRALE_CANCELLED || status == METRALE_CONTEXT_FULL);
        }
    }
    atomic_store(&over, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    free(bytes);
}

/* Bytes of this process that are its own and present. */
static long own_kib(void) {
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
    if (status) fclose(status);
    return kib;
}

/* Loaded and freed a hundred times, with everything that hangs on a model: no more memory than after the tenth time. */
static void memory_comes_back(void) {
    long settled = 0;
    for (int round = 0; round < (quick ? 12 : 100); round++) {
        metrale_model *own = load_model(path);
        metrale_seq *seq = new_seq(own, NULL);
        OK(metrale_prefill(seq, PROMPT, 5, &err));
        metrale_seq_free(seq);
        metrale_free(own);
        if (round == 9) settled = own_kib();
    }
    long now = own_kib();
    if (now > settled + 2048) fprintf(stderr, "RssAnon was %ld KiB and is %ld KiB\n", settled, now);
    CHECK(now <= settled + 2048);
}

/* Output larger than the buffer: the size is told, and nothing is written. */
static void sizes_are_told(void) {
    const char *text = "one two three four five six seven eight nine ten";
    metrale_token tokens[64];
    size_t count = 0, again = 0;
    EXPECT(METRALE_MORE, metrale_tokenize(model, (const uint8_t *)text, strlen(text), 0, NULL, 0, &count, &err));
    CHECK(count > 4 && count <= 64);
    memset(tokens, 0x5A, sizeof tokens);
    EXPECT(METRALE_MORE, metrale_tokenize(model, (const uint8_t *)text, strlen(text), 0, tokens, count - 1, &again, &err));
    CHECK(again == count && tokens[0] == 0x5A5A5A5A);
    OK(metrale_tokenize(model, (const uint8_t *)text, strlen(text), 0, tokens, count, &again, &err));
    CHECK(again == count && tokens[count - 1] != 0x5A5A5A5A);
}

int main(int argc, char **argv) {
    path = arguments(argc, argv);
    closed_outputs();
    model = load_model(path);
    cut_files();
    texts_beyond_all_sizes();
    sizes_are_told();
    the_model_goes_first();
    freed_under_way();
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* They keep freed memory, to find uses of it. */
    memory_comes_back();
#endif
    metrale_free(model);
    printf("counts: 7 cases from the field\n");
    return 0;
}
