/* The library leaves the process as it found it: open files, signal handlers and masks, threads, locale, umask, working
 * folder, environment, rounding. What it might call to change them stands here in place of the C library's own and says so.
 * Compiled with -rdynamic, so that the library finds these functions first. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"

extern char **environ;

/* Names that were read from the environment, and calls that must not come. */
static char names[64][64];
static int name_count, forbidden;

char *getenv(const char *name) {
    int known = 0;
    for (int i = 0; i < name_count; i++) known |= strcmp(names[i], name) == 0;
    if (!known && name_count < 64) snprintf(names[name_count++], sizeof names[0], "%s", name);
    size_t len = strlen(name);
    for (char **entry = environ; *entry; entry++)
        if (strncmp(*entry, name, len) == 0 && (*entry)[len] == '=') return *entry + len + 1;
    return NULL;
}

#define FORBIDDEN(result, name, arguments, value)         \
    result name arguments {                               \
        fprintf(stderr, "the library calls %s\n", #name); \
        forbidden++;                                      \
        return value;                                     \
    }

/* The program itself calls none of these; what it needs of them it reads from /proc. */
FORBIDDEN(int, setenv, (const char *a, const char *b, int c), 0)
FORBIDDEN(int, unsetenv, (const char *a), 0)
FORBIDDEN(int, putenv, (char *a), 0)
FORBIDDEN(int, atexit, (void (*a)(void)), 0)
FORBIDDEN(int, on_exit, (void (*a)(int, void *), void *b), 0)
FORBIDDEN(int, sigaction, (int a, const struct sigaction *b, struct sigaction *c), 0)
FORBIDDEN(__sighandler_t, signal, (int a, __sighandler_t b), SIG_DFL)
FORBIDDEN(int, pthread_atfork, (void (*a)(void), void (*b)(void), void (*c)(void)), 0)
FORBIDDEN(int, chdir, (const char *a), 0)
FORBIDDEN(void *, dlopen, (const char *a, int b), NULL)
FORBIDDEN(int, socket, (int a, int b, int c), -1)
FORBIDDEN(int, fork, (void), -1)
FORBIDDEN(int, system, (const char *a), 0)

/* Everything that is the process's and not the library's. */
struct seen {
    char files[4096];
    char signals[1024];
    int threads;
    char folder[512];
    char locale[128];
    mode_t mask;
    int rounding;
    unsigned long environment;
};

static void look(struct seen *seen) {
    memset(seen, 0, sizeof *seen);
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char target[256] = "", path[300];
        snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
        if (readlink(path, target, sizeof target - 1) < 0 || atoi(entry->d_name) == dirfd(folder)) continue;
        size_t used = strlen(seen->files);
        snprintf(seen->files + used, sizeof seen->files - used, "%.20s=%s\n", entry->d_name, target);
    }
    closedir(folder);
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    for (char line[512]; fgets(line, sizeof line, status);) {
        /* Pending and blocked signals, ignored ones, those with a handler; not SigQ, which counts those of the user's other processes too. */
        if ((strncmp(line, "Sig", 3) == 0 && line[3] != 'Q') || strncmp(line, "ShdPnd", 6) == 0) strncat(seen->signals, line, sizeof seen->signals - strlen(seen->signals) - 1);
        if (strncmp(line, "Threads:", 8) == 0) seen->threads = atoi(line + 8);
    }
    fclose(status);
    CHECK(getcwd(seen->folder, sizeof seen->folder) != NULL);
    snprintf(seen->locale, sizeof seen->locale, "%s", setlocale(LC_ALL, NULL));
    seen->mask = umask(0);
    umask(seen->mask);
    seen->rounding = fegetround();
    seen->environment = 5381;
    for (char **entry = environ; *entry; entry++)
        for (char *c = *entry; *c; c++) seen->environment = seen->environment * 33 + (unsigned char)*c;
}

static void compare(const char *when, const struct seen *before, const struct seen *now) {
    if (memcmp(before, now, sizeof *now) == 0) return;
    fprintf(stderr, "%s: files\n%s->\n%ssignals\n%s->\n%sthreads %d -> %d, %s -> %s, %s -> %s\n", when, before->files, now->files, before->signals,
            now->signals, before->threads, now->threads, before->folder, now->folder, before->locale, now->locale);
    exit(1);
}

static void use(const char *path) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 3};
    metrale_model *model = NULL;
    OK(metrale_load(path, &options, &model, &err));
    metrale_seq *seq = new_seq(model, NULL), *fork = NULL;
    static const metrale_token prompt[] = {1, 403, 407};
    OK(metrale_prefill(seq, prompt, 3, &err));
    OK(metrale_seq_fork(seq, &fork, &err));
    metrale_token token = -1;
    for (int i = 0; i < 8; i++) CHECK(metrale_decode_step(&seq, 1, &token, NULL) >= METRALE_OK);
    metrale_grammar *grammar = NULL;
    OK(metrale_grammar_regex(model, (const uint8_t *)"[a-z]+", 6, &grammar, &err));
    OK(metrale_seq_grammar(fork, grammar, &err));
    CHECK(metrale_decode_step(&fork, 1, &token, NULL) >= METRALE_OK);
    size_t size = 0;
    CHECK(metrale_seq_save(seq, NULL, 0, &size, NULL) == METRALE_MORE);
    EXPECT(METRALE_NOT_FOUND, metrale_chat_render(model, (const uint8_t *)"{\"messages\":[]}", 15, NULL, 0, &size, &err));
    EXPECT(METRALE_NOT_FOUND, metrale_load("no such file", NULL, &model, &err));
    metrale_grammar_free(grammar);
    metrale_seq_free(fork);
    metrale_seq_free(seq);
    metrale_free(model);
}

static void *nothing(void *unused) { return unused; }

int main(int argc, char **argv) {
    const char *path = arguments(argc, argv);
    /* The C library has a signal of its own for threads, whose handler comes with the first of them. */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
    static struct seen before, now;
    look(&before);
    CHECK(before.threads == 1); /* Loading the library started none. */
    CHECK(strcmp(before.locale, "C") == 0);
    CHECK(metrale_version_number() > 0 && metrale_build_info() != NULL);
    look(&now);
    compare("after a call without a model", &before, &now);
    for (int round = 0; round < 3; round++) {
        use(path);
        look(&now);
        compare("after everything was freed", &before, &now);
    }
    CHECK(forbidden == 0);
    CHECK(name_count > 0); /* The watch works. */
    for (int i = 0; i < name_count; i++) {
        if (strncmp(names[i], "METRALE_", 8) != 0) fprintf(stderr, "the library reads %s from the environment\n", names[i]);
        CHECK(strncmp(names[i], "METRALE_", 8) == 0);
    }
    return 0;
}
