/* A plugin's life: the library is opened by name, used, closed and opened again, a hundred times. It stays resident, so that
 * nothing crashes whatever was left unfreed: live handles, a model's workers, threads that used it and end afterwards. The second argument is the library's path, a third asks for a quick run. */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "metrale.h"

static void *library;

/* A function of the library; function pointers travel through an integer, since C has no other way. */
#define FUNCTION(name) ((__typeof__(&(name)))(uintptr_t)symbol(#name))

static void *symbol(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s is missing\n", name);
        exit(1);
    }
    return found;
}

static size_t thread_count(void) {
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL) return 1;
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static int use(const char *path, int leave_all) {
    metrale_load_options options = {.struct_size = sizeof options, .threads = 2};
    metrale_model *model = NULL;
    metrale_seq *seq = NULL;
    metrale_error *err = NULL;
    metrale_token token = 1;
    if (FUNCTION(metrale_load)("no such file", NULL, &model, &err) != METRALE_NOT_FOUND) return 1;
    if (FUNCTION(metrale_load)(path, &options, &model, NULL) != METRALE_OK) return 2;
    if (FUNCTION(metrale_seq_new)(model, NULL, &seq, NULL) != METRALE_OK) return 3;
    if (FUNCTION(metrale_prefill)(seq, &token, 1, NULL) != METRALE_OK) return 4;
    if (FUNCTION(metrale_decode_step)(&seq, 1, &token, NULL) < METRALE_OK) return 5;
    if (leave_all) return 0;
    FUNCTION(metrale_error_free)(err);
    FUNCTION(metrale_free)(model);
    FUNCTION(metrale_seq_free)(seq);
    return 0;
}

/* A thread that uses the library, outlives the dlclose, and then ends. */
static atomic_int used, closed;

static void *outlive(void *path) {
    if (use(path, 0) != 0) exit(3);
    atomic_store(&used, 1);
    while (!atomic_load(&closed)) sched_yield();
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int rounds = argc > 3 ? 3 : 100;
    for (int round = 0; round < rounds; round++) {
        library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        if (round == 0 && thread_count() != 1) {
            fprintf(stderr, "%zu threads after the library was opened\n", thread_count());
            return 1;
        }
        pthread_t thread;
        atomic_store(&used, 0);
        atomic_store(&closed, 0);
        if (round % 10 == 1) {
            if (pthread_create(&thread, NULL, outlive, argv[1]) != 0) return 1;
            while (!atomic_load(&used)) sched_yield();
        }
        /* Sometimes with live handles, and so with workers that wait. */
        int failed = use(argv[1], round % 10 == 5);
        if (failed) {
            fprintf(stderr, "round %d stopped at %d\n", round, failed);
            return 1;
        }
        if (dlclose(library) != 0) return 1;
        if (round % 10 == 1) {
            atomic_store(&closed, 1);
            if (pthread_join(thread, NULL) != 0) return 1;
        }
    }
    return 0;
}
