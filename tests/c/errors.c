/* Errors as objects: what they say, how long they live, and that no handle is ever followed. */
#include "check.h"

static metrale_error *missing_file(void) {
    metrale_error *err = NULL;
    metrale_model *model = NULL;
    CHECK(metrale_load("no such folder/no such file.gguf", NULL, &model, &err) == METRALE_NOT_FOUND);
    CHECK(model == NULL && err != NULL);
    return err;
}

static void an_error_says_all(void) {
    metrale_error *err = missing_file();
    CHECK(metrale_error_code(err) == METRALE_NOT_FOUND);
    CHECK(strstr(metrale_error_message(err), "no such file.gguf") != NULL);
    const char *detail = metrale_error_detail(err);
    CHECK(strstr(detail, "\"status\":\"METRALE_NOT_FOUND\"") != NULL);
    CHECK(strstr(detail, "\"retry\":false") != NULL);
    CHECK(!metrale_error_retry(err));
    CHECK(metrale_error_message(err) == metrale_error_message(err));
    CHECK(detail == metrale_error_detail(err));

    uint64_t number = 77;
    CHECK(!metrale_error_wanted(err, &number) && number == 77);
    CHECK(!metrale_error_wanted(err, NULL));
    metrale_error_free(err);
}

static void fields(void) {
    metrale_error *err = NULL;
    metrale_load_options options = {0};
    metrale_model *model = NULL;
    CHECK(metrale_load("x", &options, &model, &err) == METRALE_INVALID_ARGUMENT); /* struct_size was forgotten */
    CHECK(strcmp(metrale_error_name(err), "struct_size") == 0);
    uint64_t wanted = 1, available = 0;
    CHECK(metrale_error_wanted(err, &wanted) && wanted == 0);
    CHECK(metrale_error_available(err, &available) && available == sizeof options);
    metrale_error_free(err);
}

static void dead_and_foreign_handles(void) {
    metrale_error *err = missing_file();
    metrale_error *other = missing_file();
    metrale_error_free(err);
    metrale_error_free(err);
    CHECK(metrale_error_code(err) == METRALE_INVALID_HANDLE);
    CHECK(strlen(metrale_error_message(err)) > 0);
    CHECK(strcmp(metrale_error_detail(err), "{}") == 0);
    CHECK(metrale_error_name(err) == NULL);
    CHECK(metrale_error_code(other) == METRALE_NOT_FOUND);

    /* A new error may take the old one's place, but never its handle. */
    metrale_error *next = missing_file();
    CHECK(next != err && metrale_error_code(err) == METRALE_INVALID_HANDLE);
    metrale_error_free(next);

    int local = 0;
    metrale_error_free((metrale_error *)(void *)&local);
    metrale_error_free((metrale_error *)(uintptr_t)1);
    metrale_error_free((metrale_error *)UINTPTR_MAX);
    CHECK(metrale_error_code((metrale_error *)(void *)&local) == METRALE_INVALID_HANDLE);
    metrale_free((metrale_model *)(void *)other);
    metrale_seq_free((metrale_seq *)(void *)other);
    CHECK(metrale_error_code(other) == METRALE_NOT_FOUND);
    metrale_error_free(other);
}

static void null_is_fine(void) {
    metrale_error_free(NULL);
    CHECK(metrale_error_code(NULL) == METRALE_OK);
    CHECK(strcmp(metrale_error_message(NULL), "") == 0);
    CHECK(strcmp(metrale_error_detail(NULL), "{}") == 0);
    CHECK(metrale_error_name(NULL) == NULL);
    CHECK(!metrale_error_retry(NULL));
    metrale_model *model = NULL;
    CHECK(metrale_load("nowhere", NULL, &model, NULL) == METRALE_NOT_FOUND);
    CHECK(metrale_load(NULL, NULL, &model, NULL) == METRALE_INVALID_ARGUMENT);
    CHECK(metrale_load("nowhere", NULL, NULL, NULL) == METRALE_INVALID_ARGUMENT);
}

int main(int argc, char **argv) {
    arguments(argc, argv);
    an_error_says_all();
    fields();
    dead_and_foreign_handles();
    null_is_fine();
    for (int i = 0; i < (quick ? 100 : 10000); i++) metrale_error_free(missing_file());
    return 0;
}
