// Every class with errors as exceptions: what the members give is what the C functions give.
#include "check.hpp"

#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <thread>
#include <unistd.h>

namespace {

using namespace metrale;

constexpr const char *prompt = "Once upon a time, there was a little girl";
constexpr std::size_t count = 24;

template <class Call> error failure(Call &&call) {
    try {
        call();
    } catch (const error &e) {
        return e;
    }
    CHECK(!"an error was thrown");
    std::abort();
}

std::vector<std::uint8_t> contents(const char *path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<metrale_token> some(const model &of, seq_options options = {}) {
    auto one = seq::create(of, options);
    one.prefill(of.tokenize(prompt));
    std::vector<metrale_token> out;
    for (metrale_token token : one.tokens(count)) out.push_back(token);
    return out;
}

void library_and_errors(const char *path) {
    check_abi();
    CHECK(version() == metrale_version_string() && version_number() == metrale_version_number());
    CHECK(build_info().front() == '{' && status_name(METRALE_BUSY) == "METRALE_BUSY");
    CHECK(devices().size() == metrale_device_count() && devices()[0].kind == METRALE_DEVICE_CPU);

    const error missing = failure([] { (void)model::load("no-such-file.gguf"); });
    CHECK(missing.status() == METRALE_NOT_FOUND && std::strstr(missing.what(), "no-such-file.gguf"));
    CHECK(missing.detail().find("\"METRALE_NOT_FOUND\"") != std::string_view::npos && !missing.retry() && !missing.cause());

    auto one = model::load(path);
    auto line = seq::create(one);
    const error outside = failure([&] { line.prefill({1, 2, 1 << 30}); });
    CHECK(outside.status() == METRALE_INVALID_TOKEN && outside.offset() == 2u);
    seq_options small;
    small.context = 4;
    auto narrow = seq::create(one, small);
    const error full = failure([&] { narrow.prefill({1, 2, 3, 4, 5}); });
    CHECK(full.status() == METRALE_CONTEXT_FULL && full.available() == 4u);

    // Moved from: an empty handle, which is an error and not a crash.
    auto moved = std::move(line);
    CHECK(line.get() == nullptr && moved.get() != nullptr);
    CHECK(failure([&] { (void)line.info(); }).status() == METRALE_INVALID_HANDLE);
    moved = seq::create(one);
    CHECK(moved.info().length == 0);
}

void models_and_texts(const char *path, const std::vector<metrale_token> &expected) {
    CHECK(probe(path).find("\"format\"") != std::string::npos);
    auto one = model::load(path);
    CHECK(one.info().find("\"vocab\"") != std::string_view::npos && one.meta("layers") != "" && one.fingerprint().size() == 32);
    CHECK(one.retain().fingerprint() == one.fingerprint() && one.stats().prefix_budget == 0);
    CHECK(failure([&] { (void)one.meta("no.such.key"); }).status() == METRALE_NOT_FOUND);

    const auto tokens = one.tokenize(prompt);
    CHECK(one.tokenize(prompt, 0).size() + 1 == tokens.size() && one.tokenize("").size() == 1);
    CHECK(one.detokenize(tokens, METRALE_DETOKENIZE_SKIP_SPECIAL).find(prompt) != std::string::npos);
    CHECK(some(one) == expected);

    auto stream = text::create(one);
    std::string streamed, whole;
    for (metrale_token token : expected) {
        streamed += stream.push(token).text;
        whole += one.token_bytes(token);
    }
    streamed += stream.flush().text;
    CHECK(streamed == whole && !whole.empty());
    stream.reset();

    text_options stops;
    stops.stops = {"never said", whole.substr(4, 6)};
    auto stopping = text::create(one, stops);
    std::string before;
    for (metrale_token token : expected) {
        const piece now = stopping.push(token);
        before += now.text;
        if (now.stopped()) {
            CHECK(now.stop == 1 && before == whole.substr(0, 4));
            before = "stopped";
            break;
        }
    }
    CHECK(before == "stopped");

    CHECK(failure([&] { (void)one.chat_render({{"user", "a \"word\"\n"}}); }).status() == METRALE_NOT_FOUND);
    CHECK(failure([&] { (void)one.chat_render("{"); }).status() < 0);
    const auto row = one.embed(tokens);
    embed_options every;
    every.pooling = METRALE_POOLING_NONE;
    CHECK(!row.empty() && one.embed(tokens, every).size() == row.size() * tokens.size());
    one.cancel_all();
}

void sources(const char *path, const std::vector<metrale_token> &expected) {
    const auto bytes = contents(path);
    CHECK(some(model::load(source::path(path))) == expected);
    CHECK(some(model::load(source::borrow(bytes))) == expected);
    CHECK(some(model::load(source::copy(bytes))) == expected);
    const int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    CHECK(some(model::load(source::file(fd))) == expected);
    close(fd);

    std::size_t calls = 0;
    auto read = source::reader(
        [&](std::uint64_t offset, void *into, std::size_t size) {
            calls++;
            std::memcpy(into, bytes.data() + offset, size);
            return static_cast<std::int64_t>(size);
        },
        bytes.size());
    CHECK(source::path(path).probe() == probe(path) && read.probe().find("\"vocab\":512") != std::string::npos);
    CHECK(read.plan().total > plan(path).total && plan(path, {}, 2).total > plan(path).total);
    CHECK(some(model::load(read)) == expected && calls > 0);

    auto folder = source::folder();
    folder.add("model.gguf", read);
    CHECK(some(model::load(folder)) == expected);

    load_options options;
    std::size_t told = 0;
    options.progress = [&](const load_progress &now) { return told++, !now.phase.empty(); };
    options.threads = 1;
    auto steps = loading::begin(source::path(path), options);
    std::optional<model> made;
    for (int i = 0; !made && i < 1000000; i++) made = i % 2 ? steps.step(0) : steps.step_bytes(1 << 16);
    CHECK(made && some(*made) == expected && told > 0 && steps.progress().phase == "done" && !steps.cancel());
    auto dropped = loading::begin(source::path(path));
    CHECK(!dropped.step(0) && dropped.cancel());
    CHECK(failure([&] { (void)dropped.step(0); }).status() == METRALE_CANCELLED);
    options.progress = [](const load_progress &) { return false; };
    CHECK(failure([&] { (void)model::load(path, options); }).status() == METRALE_CANCELLED);
}

void choosing(const char *path, const std::vector<metrale_token> &expected) {
    auto one = model::load(path);
    seq_options options;
    auto greedy = sampler::create({stage::greedy()});
    options.sampler = &greedy;
    CHECK(some(one, options) == expected);
    auto varied = sampler::create({stage::repetition(1.1f, 64), stage::presence(0.1f), stage::frequency(0.1f), stage::dry(0.8f, 1.75f, 2),
                                   stage::dry_breaker(5), stage::bias(7, 0.5f), stage::top_k(40), stage::typical(0.95f), stage::top_p(0.9f),
                                   stage::min_p(0.01f), stage::top_n_sigma(3), stage::xtc(0.1f, 0.2f), stage::temperature(0.8f)},
                                  42);
    options.sampler = &varied;
    const auto first = some(one, options);
    CHECK(first == some(one, options) && first != expected);
    options.seed = 43;
    CHECK(first != some(one, options));
    CHECK(failure([] { (void)sampler::create({stage::temperature(-1)}); }).offset() == 0u);
    for (auto last : {stage::mirostat(4), stage::mirostat_v2(4)}) {
        auto mirostat = sampler::create({last}, 3);
        options.sampler = &mirostat;
        CHECK(some(one, options).size() > 0);
    }

    auto line = seq::create(one);
    line.prefill(one.tokenize("The answer: "));
    line.follow(grammar::regex(one, "(yes|no)"));
    std::string said;
    for (metrale_token token : line.tokens(8)) said += one.token_bytes(token);
    CHECK(said == "yes" || said == "no");
    line.follow(nullptr);
    CHECK(line.decode());
    (void)grammar::gbnf(one, "root ::= \"a\" | \"b\"");
    (void)grammar::lark(one, "start: \"a\" | \"b\"");
    (void)grammar::json_schema(one, R"({"type":"integer"})");
    CHECK(failure([&] { (void)grammar::json_schema(one, "{"); }).status() == METRALE_INVALID_GRAMMAR);
}

void sequences(const char *path, const std::vector<metrale_token> &expected) {
    auto one = model::load(path);
    const auto tokens = one.tokenize(prompt);
    seq_options scored;
    scored.flags = METRALE_SEQ_LOGPROBS;
    auto line = seq::create(one, scored);
    line.prefill(tokens);
    CHECK(line.match({tokens[0], tokens[1], 3, 3}) == 2 && line.match(tokens) == tokens.size());
    const auto row = line.logits();
    CHECK(std::max_element(row.begin(), row.end()) - row.begin() == expected[0]);
    const auto likely = line.logprobs({expected[0]}, 2);
    CHECK(likely.top[0] == expected[0] && likely.of[0] == likely.top_logprobs[0] && likely.top_logprobs[1] <= likely.of[0]);

    const auto mark = line.mark();
    auto other = line.fork();
    const auto saved = line.save();
    CHECK(line.decode() == expected[0] && line.info().last_token == expected[0] && line.info().last_logprob == likely.of[0]);
    line.rollback(mark);
    CHECK(line.decode() == expected[0] && other.decode() == expected[0]);
    line.commit(mark);
    line.truncate(tokens.size() - 1);
    line.prefill({tokens.back()});
    CHECK(line.decode() == expected[0]);
    line.shift(1, 2);
    CHECK(line.info().length == tokens.size() - 1);
    line.restore(saved);
    CHECK(line.decode() == expected[0] && line.decode() == expected[1] && line.stats().generated > 3);
    CHECK(failure([&] { line.restore({1, 2, 3}); }).status() == METRALE_CORRUPT_FILE);
    CHECK(failure([&] { line.encode({1}); }).status() == METRALE_UNSUPPORTED);
    beam_options narrow;
    narrow.beams = 1;
    narrow.max_tokens = 4;
    other.restore(saved);
    const auto found = other.beam(narrow);
    CHECK(found.tokens.size() <= 4 && std::equal(found.tokens.begin(), found.tokens.end(), expected.begin()) && found.score < 0);
    other.cancel();
    auto cold = sampler::create({stage::greedy()});
    other.sampling(cold);
    other.sampling(nullptr);
}

void batches(const char *path, const std::vector<metrale_token> &expected) {
    auto one = model::load(path);
    const auto tokens = one.tokenize(prompt);
    auto a = seq::create(one), b = seq::create(one), c = seq::create(one);
    batch all{a, b};
    a.prefill(tokens);
    b.prefill(tokens);
    for (std::size_t i = 0; i < 4; i++) {
        const auto got = all.decode();
        CHECK(got.size() == 2 && got[0] == expected[i] && got[1] == expected[i]);
    }
    auto d = seq::create(one);
    d.prefill(tokens);
    batch alone{d};
    const auto many = alone.decode(3);
    CHECK(many.size() == 3 && std::equal(many.begin(), many.end(), expected.begin()) && alone.decoded().size() == 3 && !alone.done());
    CHECK(alone.decode(0).empty());
    all.add(c);
    all.remove(1);
    c.feed(tokens);
    CHECK(c.poll() == tokens.size() && all.size() == 2 && all.estimate() > 0);
    std::vector<metrale_token> from_a, from_c;
    for (int i = 0; from_c.size() < 4 && i < 1000000; i++) {
        const auto got = all.step(50000);
        if (got[0].token >= 0) from_a.push_back(got[0].token);
        if (got[1].token >= 0) from_c.push_back(got[1].token);
        CHECK(got[1].status == METRALE_OK || got[1].status == METRALE_AGAIN);
    }
    CHECK(!all.done() && std::equal(from_c.begin(), from_c.end(), expected.begin()));
    CHECK(from_a.size() > 2 && std::equal(from_a.begin(), from_a.begin() + 3, expected.begin() + 4));
    all.step(0);
    CHECK(!all.again() && !c.poll());
    all.clear();
    CHECK(all.size() == 0);
}

void runtimes(const char *path, const std::vector<metrale_token> &expected) {
    std::vector<std::string> lines;
    std::mutex mutex;
    runtime_options options;
    options.threads = 1;
    options.alloc = [](std::size_t size, std::size_t align) {
        return std::aligned_alloc(std::max(align, sizeof(void *)), (size + std::max(align, sizeof(void *)) - 1) / align * align);
    };
    options.free = [](void *pointer, std::size_t, std::size_t) { std::free(pointer); };
    options.log = [&](const log_record &record) {
        std::lock_guard<std::mutex> lock(mutex);
        lines.emplace_back(record.text);
    };
    std::optional<runtime> lent = runtime::create(options);
    load_options with;
    with.runtime = &*lent;
    std::optional<model> one = model::load(path, with);
    CHECK(some(*one) == expected && lent->memory().live > 0 && lent->memory().weights > 0 && !lines.empty());
    lent->trim();
    lent->log(nullptr);
    const std::size_t before = lines.size();
    (void)failure([&] { (void)one->meta("no.such.key"); });
    CHECK(lines.size() == before);
    lent->log([&](const log_record &) { throw 7; }, METRALE_LOG_ERROR); // fails nothing
    CHECK(failure([&] { (void)one->meta("no.such.key"); }).status() == METRALE_NOT_FOUND);
    // What was made of the runtime keeps the host's functions.
    auto line = seq::create(*one);
    lent.reset();
    one.reset();
    line.prefill({1, 2, 3});
    CHECK(line.decode());

    runtime_options jobs;
    jobs.workers = METRALE_WORKERS_HOST;
    jobs.threads = 2;
    std::size_t bodies = 0;
    jobs.parallel_for = [&](std::size_t n, const body &work) {
        for (std::size_t i = n; i-- > 0; bodies++) work(i);
    };
    auto host = runtime::create(jobs);
    with.runtime = &host;
    CHECK(some(model::load(path, with)) == expected && bodies > 0);

    runtime_options lending;
    lending.workers = METRALE_WORKERS_LENT;
    auto helped = runtime::create(lending);
    bool sent_home = false;
    std::thread helper([&] { sent_home = helped.run_worker(); });
    with.runtime = &helped;
    CHECK(some(model::load(path, with)) == expected);
    // A thread that is about to be lent at this moment stays: ask until it has gone.
    std::thread asker([&] {
        for (int i = 0; i < 400; i++) {
            helped.release_workers();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
    helper.join();
    asker.join();
    CHECK(sent_home);
}

} // namespace

int main(int argc, char **argv) {
    const char *path = argument(argc, argv);
    const auto expected = plain_tokens(path, prompt, count);
    CHECK(expected.size() == count);
    library_and_errors(path);
    models_and_texts(path, expected);
    sources(path, expected);
    choosing(path, expected);
    sequences(path, expected);
    batches(path, expected);
    runtimes(path, expected);
}
