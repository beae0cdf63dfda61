/* What the library says about itself, before any model. */
#include "check.h"

static void versions(void) {
    unsigned major = 0, minor = 0, patch = 0;
    CHECK(sscanf(metrale_version_string(), "%u.%u.%u", &major, &minor, &patch) == 3);
    CHECK(metrale_version_number() == (major << 16 | minor << 8 | patch));
    OK(metrale_check_abi(METRALE_ABI_VERSION, &err));
    EXPECT(METRALE_VERSION_MISMATCH, metrale_check_abi(METRALE_ABI_VERSION + 1, &err));
    EXPECT(METRALE_VERSION_MISMATCH, metrale_check_abi(METRALE_ABI_VERSION + 0x10000, &err));
    EXPECT(METRALE_VERSION_MISMATCH, metrale_check_abi(0, &err));
    CHECK(metrale_check_abi(0, NULL) == METRALE_VERSION_MISMATCH);
}

static void names(void) {
    CHECK(strcmp(metrale_status_name(METRALE_OK), "METRALE_OK") == 0);
    CHECK(strcmp(metrale_status_name(METRALE_DONE), "METRALE_DONE") == 0);
    CHECK(strcmp(metrale_status_name(METRALE_INTERNAL), "METRALE_INTERNAL") == 0);
    CHECK(strcmp(metrale_status_name(METRALE_GRAMMAR_DONE - 1), "METRALE_UNKNOWN") == 0);
    CHECK(strcmp(metrale_status_name(INT32_MIN), "METRALE_UNKNOWN") == 0);
    for (metrale_status status = METRALE_GRAMMAR_DONE; status <= METRALE_AGAIN; status++)
        CHECK(strcmp(metrale_status_name(status), "METRALE_UNKNOWN") != 0);
}

int main(int argc, char **argv) {
    arguments(argc, argv);
    versions();
    names();
    const char *info = metrale_build_info();
    CHECK(info[0] == '{' && strstr(info, "\"version\":\"") != NULL && strstr(info, "\"features\":[") != NULL);
    CHECK(info == metrale_build_info());
    return 0;
}
