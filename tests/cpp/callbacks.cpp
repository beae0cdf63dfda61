// Lambdas that throw inside of the library: the call fails, nothing has changed, and the exception itself arrives.
#include "check.hpp"

#include <stdexcept>

namespace {

using namespace metrale;

// Not derived from anything, so that only the very exception will do.
struct odd {
    int number;
};

template <class Call> int number_of(Call &&call) {
    try {
        call();
    } catch (const odd &e) {
        return e.number;
    }
    return 0;
}

void loads(const char *path) {
    load_options options;
    options.progress = [](const load_progress &now) -> bool { throw odd{now.phase.empty() ? 0 : 1}; };
    CHECK(number_of([&] { (void)model::load(path, options); }) == 1);
    auto stepped = loading::begin(source::path(path), options);
    CHECK(number_of([&] {
              for (;;) (void)stepped.step(0);
          }) == 1);
    auto broken = source::reader([](std::uint64_t, void *, std::size_t) -> std::int64_t { throw odd{2}; }, 1 << 20);
    CHECK(number_of([&] { (void)model::load(broken); }) == 2);
    CHECK(number_of([&] { (void)broken.probe(); }) == 2);
    // What was thrown is gone afterwards: the next call succeeds.
    (void)model::load(path);
}

void hooks(const char *path) {
    auto one = model::load(path);
    auto by = sampler::create({stage::hook(), stage::greedy()});
    int failures = 2;
    metrale_token wanted = 5;
    std::size_t seen = 0;
    by.set_hook([&](span<float> logits, span<const metrale_token> history) {
        if (failures-- > 0) throw odd{3};
        seen = history.size();
        // Calls of the library are fine here, and so are their exceptions.
        try {
            (void)one.meta("no.such.key");
            CHECK(false);
        } catch (const error &e) {
            CHECK(e.status() == METRALE_NOT_FOUND);
        }
        for (float &one_logit : logits) one_logit = -1;
        logits[static_cast<std::size_t>(wanted)] = 1;
    });
    seq_options options;
    options.sampler = &by;
    auto line = seq::create(one, options);
    by = sampler::create({stage::greedy()}); // the sequence keeps the function
    line.prefill({1, 2, 3});
    CHECK(number_of([&] { (void)line.decode(); }) == 3 && line.info().length == 3);
    batch all{line};
    CHECK(number_of([&] { (void)all.step(0); }) == 3 && line.info().length == 3);
    CHECK(all.results()[0].status == METRALE_CANCELLED);
    CHECK(line.decode() == wanted && seen == 3);
    auto other = line.fork();
    line = seq::create(one);
    wanted = 6;
    CHECK(other.decode() == wanted && seen == 4);

    // One of several fails: the others have got their token.
    auto failing = sampler::create({stage::hook()});
    failing.set_hook([](span<float>, span<const metrale_token>) { throw std::runtime_error("of the host"); });
    options.sampler = &failing;
    auto bad = seq::create(one, options), good = seq::create(one);
    bad.prefill({1, 2});
    good.prefill({1, 2});
    batch both{bad, good};
    std::string said;
    try {
        (void)both.step(0);
    } catch (const std::runtime_error &e) {
        said = e.what();
    }
    CHECK(said == "of the host" && both.results()[0].status < 0 && both.results()[1].status == METRALE_OK);
    CHECK(bad.info().length == 2 && good.info().length == 3);
}

void runtimes(const char *path) {
    runtime_options options;
    options.workers = METRALE_WORKERS_HOST;
    options.threads = 2;
    bool fail = false;
    options.parallel_for = [&](std::size_t count, const body &work) {
        if (fail) throw odd{4};
        for (std::size_t i = 0; i < count; i++) work(i);
    };
    auto host = runtime::create(options);
    load_options with;
    with.runtime = &host;
    auto one = model::load(path, with);
    auto line = seq::create(one);
    line.prefill({1, 2, 3});
    fail = true;
    CHECK(number_of([&] { (void)line.decode(); }) == 4 && line.info().length == 3);
    fail = false;
    CHECK(line.decode());

    // An allocator that throws has no memory to give.
    runtime_options poor;
    poor.alloc = [](std::size_t, std::size_t) -> void * { throw odd{5}; };
    poor.free = [](void *, std::size_t, std::size_t) {};
    try {
        auto none = runtime::create(poor);
        with.runtime = &none;
        (void)model::load(path, with);
        CHECK(false);
    } catch (const error &e) {
        CHECK(e.status() == METRALE_OUT_OF_MEMORY);
    }
}

} // namespace

int main(int argc, char **argv) {
    const char *path = argument(argc, argv);
    loads(path);
    hooks(path);
    runtimes(path);
}
