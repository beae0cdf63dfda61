// Several prompts at once, with a display that shows all of them grow: one step of the engine serves every line.
//
//     batch [--max-tokens N] [--threads N] [--chat] MODEL PROMPT...
//
// On a terminal each prompt has a line that is redrawn; elsewhere only the finished texts are printed. `--chat` asks through the model's chat
// template instead of continuing the text.
#include <metrale.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

struct settings {
    std::string model;
    std::vector<std::string> prompts;
    std::size_t max_tokens = 48;
    unsigned threads = 0;
    bool chat = false;
};

// A prompt and what has come of it.
struct line {
    std::string prompt, answer;
    metrale::seq seq;
    metrale::text text;
    std::size_t made = 0;
    bool over = false;
};

class display {
public:
    explicit display(const std::list<line> &lines) : lines_(lines), live_(isatty(STDOUT_FILENO) == 1) {}

    // Draws over what was drawn before.
    void draw(std::size_t tokens, double seconds) {
        if (!live_) return;
        if (drawn_) std::printf("\x1b[%zuA", lines_.size() + 1);
        for (const line &one : lines_) {
            std::string shown = one.prompt + one.answer;
            for (char &c : shown)
                if (c == '\n' || c == '\r') c = ' ';
            if (shown.size() > width) {
                std::size_t from = shown.size() - width;
                while (from < shown.size() && (shown[from] & 0xC0) == 0x80) from++; // not in the middle of a character
                shown = shown.substr(from);
            }
            std::printf("\x1b[2K%s %4zu  %s\n", one.over ? "done" : "    ", one.made, shown.c_str());
        }
        std::printf("\x1b[2K%zu tokens, %.1f a second\n", tokens, static_cast<double>(tokens) / seconds);
        std::fflush(stdout);
        drawn_ = true;
    }

    void finish() const {
        for (const line &one : lines_) std::printf("\n> %s\n%s\n", one.prompt.c_str(), one.answer.c_str());
    }

private:
    static constexpr std::size_t width = 68;
    const std::list<line> &lines_;
    bool live_, drawn_ = false;
};

std::vector<metrale_token> tokens_of(const metrale::model &model, const std::string &prompt, bool chat) {
    if (!chat) return model.tokenize(prompt);
    return model.tokenize(model.chat_render({{"user", prompt}}), METRALE_TOKENIZE_PARSE_SPECIAL);
}

void run(const settings &set) {
    using clock = std::chrono::steady_clock;
    metrale::load_options options;
    options.threads = set.threads;
    const bool told = isatty(STDERR_FILENO) == 1;
    options.progress = [&](const metrale::load_progress &now) {
        if (told && now.total_bytes) std::fprintf(stderr, "\r%3.0f %%", 100.0 * static_cast<double>(now.done_bytes) / static_cast<double>(now.total_bytes));
        return true;
    };
    const auto model = metrale::model::load(set.model, options);
    if (told) std::fprintf(stderr, "\r     \r");

    // A list: the batch names sequences that must stay where they are.
    std::list<line> lines;
    metrale::batch batch;
    std::vector<line *> order;
    for (const std::string &prompt : set.prompts) {
        lines.push_back({prompt, "", metrale::seq::create(model), metrale::text::create(model)});
        lines.back().seq.feed(tokens_of(model, prompt, set.chat)); // read by the first steps, together with what others produce
        batch.add(lines.back().seq);
        order.push_back(&lines.back());
    }

    display screen(lines);
    std::size_t tokens = 0;
    const auto start = clock::now();
    while (batch.size() > 0) {
        // A tenth of a second, then the display gets its turn.
        const auto results = batch.step(100'000'000);
        for (std::size_t i = 0; i < results.size(); i++) {
            line &one = *order[i];
            const bool ended = results[i].status == METRALE_DONE || results[i].status < METRALE_OK;
            if (results[i].token >= 0 && !ended) {
                one.answer += one.text.push(results[i].token).text;
                one.made++;
                tokens++;
            }
            one.over = ended || one.made == set.max_tokens;
        }
        for (std::size_t i = order.size(); i-- > 0;) {
            if (!order[i]->over) continue;
            order[i]->answer += order[i]->text.flush().text;
            order.erase(order.begin() + static_cast<std::ptrdiff_t>(i));
            batch.remove(i);
        }
        screen.draw(tokens, std::chrono::duration<double>(clock::now() - start).count());
    }
    screen.finish();
    std::fprintf(stderr, "%zu tokens, %.1f tokens/s\n", tokens, static_cast<double>(tokens) / std::chrono::duration<double>(clock::now() - start).count());
}

bool parse(int argc, char **argv, settings &set) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--chat") {
            set.chat = true;
        } else if (word == "--max-tokens" || word == "--threads") {
            char *end = nullptr;
            const unsigned long value = ++i < argc ? std::strtoul(argv[i], &end, 10) : 0;
            if (!end || end == argv[i] || *end || value > 1'000'000) return false;
            if (word == "--threads") set.threads = static_cast<unsigned>(value);
            else set.max_tokens = value;
        } else if (word.rfind("--", 0) == 0) {
            return false;
        } else if (set.model.empty()) {
            set.model = word;
        } else {
            set.prompts.push_back(word);
        }
    }
    return !set.prompts.empty() && set.max_tokens > 0;
}

} // namespace

int main(int argc, char **argv) {
    settings set;
    if (!parse(argc, argv, set)) {
        std::fprintf(stderr, "usage: batch [--max-tokens N] [--threads N] [--chat] MODEL PROMPT...\n");
        return 2;
    }
    try {
        run(set);
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "batch: %s\n", e.what());
        return 1;
    }
}
