// Compiled twice, for either way of errors, and linked into one program: each half keeps its own classes.
#include <metrale.hpp>

#ifdef METRALE_EXPECTED
bool values_are_returned(const char *path) {
    const auto missing = metrale::model::load("no-such-file.gguf");
    const auto model = metrale::model::load(path);
    return !missing && missing.error().status() == METRALE_NOT_FOUND && model && model->tokenize("Once")->size() > 1;
}
#else
bool values_are_returned(const char *path);

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    try {
        (void)metrale::model::load("no-such-file.gguf");
    } catch (const metrale::error &e) {
        const auto model = metrale::model::load(argv[1]);
        return e.status() == METRALE_NOT_FOUND && model.tokenize("Once").size() > 1 && values_are_returned(argv[1]) ? 0 : 1;
    }
    return 1;
}
#endif
