// Errors as values, with METRALE_EXPECTED or in a compiler without exceptions: the same classes, and nothing is thrown.
#include "check.hpp"

namespace {

using namespace metrale;

void values(const char *path) {
    expected<model> missing = model::load("no-such-file.gguf");
    CHECK(!missing && missing.error().status() == METRALE_NOT_FOUND && std::strstr(missing.error().what(), "no-such-file.gguf"));
    CHECK(check_abi() && devices() && devices()->size() >= 1);

    auto one = model::load(path);
    CHECK(one && one->info() && one->tokenize("x")->size() > 1);
    CHECK(one->meta("no.such.key").error().status() == METRALE_NOT_FOUND);
    CHECK(one->meta("no.such.key").value_or("nothing") == "nothing");
    auto line = seq::create(*one);
    CHECK(line && line->prefill({1, 1 << 30}).error().offset() == 1u);

    const char *prompt = "Once upon a time";
    CHECK(line->prefill(*one->tokenize(prompt)));
    std::vector<metrale_token> got;
    for (metrale_token token : line->tokens(12)) got.push_back(token);
    CHECK(got == plain_tokens(path, prompt, 12));

    // The error that ends a loop over tokens is in the range.
    seq_options options;
    options.context = 4;
    auto narrow = seq::create(*one, options);
    CHECK(narrow->prefill({1, 2, 3}));
    auto tokens = narrow->tokens(8);
    std::size_t count = 0;
    for (metrale_token token : tokens) count += token >= 0;
    CHECK(count == 1 && !tokens.done() && tokens.failure() && tokens.failure()->status() == METRALE_CONTEXT_FULL);

    auto steps = loading::begin(*source::path(path));
    CHECK(steps);
    std::optional<model> made;
    while (!made) {
        auto next = steps->step(1000000);
        CHECK(next);
        made = *std::move(next);
    }
    CHECK(made->fingerprint().value_or("") == one->fingerprint().value_or("other"));
    CHECK(grammar::regex(*one, "(").error().status() == METRALE_INVALID_GRAMMAR);
    batch all{*line};
    CHECK(all.decode() && all.step(0) && all.results().size() == 1);
}

#if METRALE_EXCEPTIONS
void causes(const char *path) {
    load_options options;
    options.progress = [](const load_progress &) -> bool { throw 7; };
    auto failed = model::load(path, options);
    CHECK(!failed && failed.error().status() == METRALE_CANCELLED && failed.error().cause());
    try {
        failed.error().raise();
    } catch (int number) {
        CHECK(number == 7);
        return;
    }
    CHECK(false);
}
#endif

} // namespace

int main(int argc, char **argv) {
    const char *path = argument(argc, argv);
    values(path);
#if METRALE_EXCEPTIONS
    causes(path);
#endif
}
