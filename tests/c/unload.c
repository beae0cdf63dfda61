/* A plugin's life: the library is opened by name, used, closed and opened again. It may stay resident; it may not
 * crash, whatever was left unfreed. The second argument is the library's path, a third asks for a quick run. */
#include <dirent.h>
#include <dlfcn.h>
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

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int rounds = argc > 3 ? 3 : 50;
    for (int round = 0; round < rounds; round++) {
        library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        if (thread_count() != 1) {
            fprintf(stderr, "%zu threads after the library was opened\n", thread_count());
            return 1;
        }
        int failed = use(argv[1], round == rounds - 1);
        if (failed) {
            fprintf(stderr, "round %d stopped at %d\n", round, failed);
            return 1;
        }
        /* With live handles in the last round: the process then ends as it is. */
        if (round < rounds - 1 && dlclose(library) != 0) return 1;
    }
    return 0;
}
