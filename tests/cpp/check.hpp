// What the C++ tests share: a failed check says where and what, and ends the program with 1.
#ifndef CHECK_HPP
#define CHECK_HPP

#include <metrale.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (0)

inline const char *argument(int argc, char **argv) {
    if (argc == 2) return argv[1];
    std::fprintf(stderr, "usage: %s MODEL\n", argv[0]);
    std::exit(2);
}

// What the C functions alone make of the model and a prompt: `count` tokens, by another way than the classes.
inline std::vector<metrale_token> plain_tokens(const char *path, const char *prompt, std::size_t count) {
    metrale_model *model = nullptr;
    metrale_seq *seq = nullptr;
    metrale_token prompt_tokens[256], token;
    std::size_t size = 0;
    std::vector<metrale_token> out;
    CHECK(metrale_load(path, nullptr, &model, nullptr) == METRALE_OK);
    CHECK(metrale_tokenize(model, reinterpret_cast<const std::uint8_t *>(prompt), std::strlen(prompt), METRALE_TOKENIZE_ADD_SPECIAL,
                           prompt_tokens, 256, &size, nullptr) == METRALE_OK);
    CHECK(metrale_seq_new(model, nullptr, &seq, nullptr) == METRALE_OK);
    CHECK(metrale_prefill(seq, prompt_tokens, size, nullptr) == METRALE_OK);
    while (out.size() < count && metrale_decode_step(&seq, 1, &token, nullptr) == METRALE_OK) out.push_back(token);
    metrale_seq_free(seq);
    metrale_free(model);
    return out;
}

#endif
