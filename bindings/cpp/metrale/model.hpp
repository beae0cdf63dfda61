// A loaded model, and a load that is done a little at a time.
#ifndef METRALE_MODEL_HPP
#define METRALE_MODEL_HPP

#include "source.hpp"

namespace metrale {
inline namespace METRALE_WAY {

// A turn of a conversation.
struct message {
    std::string_view role, content;
};

struct embed_options {
    std::uint32_t pooling = METRALE_POOLING_DEFAULT;
    std::uint64_t flags = 0; // METRALE_EMBED_*
};

namespace detail {

// `text` as a JSON string.
inline void append_json(std::string &out, std::string_view text) {
    static constexpr char digits[] = "0123456789abcdef";
    out += '"';
    for (char c : text) {
        if (c == '"' || c == '\\') {
            (out += '\\') += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            ((out += "\\u00") += digits[c >> 4]) += digits[c & 15];
        } else {
            out += c;
        }
    }
    out += '"';
}

} // namespace detail

// Immutable and shared: safe to use from any number of threads at once.
class model : public detail::handle<metrale_model, metrale_free> {
public:
    // A GGUF file or a folder with config.json.
    static result<model> load(const std::string &path, const load_options &options = {}) {
        const metrale_load_options c = options.c();
        return make(options.kept(), [&](metrale_model **out, metrale_error **err) { return metrale_load(path.c_str(), &c, out, err); });
    }

    static result<model> load(const source &from, const load_options &options = {}) {
        const metrale_load_options c = options.c();
        return make(options.kept(),
                    [&](metrale_model **out, metrale_error **err) { return metrale_load_source(from.get(), &c, out, err); });
    }

    // Another handle of the same model, for another owner.
    result<model> retain() const {
        return make(kept(), [&](metrale_model **out, metrale_error **err) { return metrale_model_retain(get(), out, err); });
    }

    // What it is, as a JSON object that lives as long as this handle.
    result<std::string_view> info() const {
        const char *json = nullptr;
        auto size = detail::value<std::size_t>(
            [&](std::size_t *out, metrale_error **err) { return metrale_model_info(get(), &json, out, err); });
        if (!size) return detail::give(expected<std::string_view>(size.error()));
        return std::string_view(json, *size);
    }

    // One fact of info(), or one value of the file's own metadata.
    result<std::string> meta(const std::string &key) const {
        return text_of(64, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_model_meta(get(), key.c_str(), out, room, size, err);
        });
    }

    // What tells it from others: 32 hexadecimal digits.
    result<std::string> fingerprint() const {
        return text_of(32, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_model_fingerprint(get(), out, room, size, err);
        });
    }

    result<metrale_model_counts> stats() const {
        return detail::give(detail::filled<metrale_model_counts>(
            [&](metrale_model_counts *out, metrale_error **err) { return metrale_model_stats(get(), out, err); }));
    }

    // `flags`: METRALE_TOKENIZE_*. The default is for a text that begins a sequence.
    result<std::vector<metrale_token>> tokenize(std::string_view text, std::uint32_t flags = METRALE_TOKENIZE_ADD_SPECIAL) const {
        return detail::give(detail::elements<std::vector<metrale_token>>(
            text.size() / 2 + 8, [&](metrale_token *out, std::size_t room, std::size_t *size, metrale_error **err) {
                return metrale_tokenize(get(), detail::bytes(text), text.size(), flags, out, room, size, err);
            }));
    }

    // Bytes, which need not be UTF-8 where the tokens begin or end inside a character. `flags`: METRALE_DETOKENIZE_*.
    result<std::string> detokenize(span<const metrale_token> tokens, std::uint32_t flags = 0) const {
        return text_of(tokens.size() * 8, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_detokenize(get(), tokens.data(), tokens.size(), flags, out, room, size, err);
        });
    }

    // Exactly the bytes that one token adds to a text.
    result<std::string> token_bytes(metrale_token token) const {
        return text_of(32, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_token_bytes(get(), token, out, room, size, err);
        });
    }

    // The prompt that the model's chat template makes of a request: JSON, as metrale_chat_render takes it. Tokenize it with
    // METRALE_TOKENIZE_PARSE_SPECIAL alone.
    result<std::string> chat_render(std::string_view request) const {
        return text_of(request.size() * 2 + 64, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_chat_render(get(), detail::bytes(request), request.size(), out, room, size, err);
        });
    }

    result<std::string> chat_render(span<const message> messages) const {
        std::string request = "{\"messages\":[";
        for (const message &turn : messages) {
            if (&turn != messages.begin()) request += ',';
            request += "{\"role\":";
            detail::append_json(request, turn.role);
            request += ",\"content\":";
            detail::append_json(request, turn.content);
            request += '}';
        }
        return chat_render(std::string_view(request += "]}"));
    }

    result<std::string> chat_render(std::initializer_list<message> messages) const {
        return chat_render(span<const message>(messages.begin(), messages.size()));
    }

    // What the model makes of tokens: one row of floats, or one for each token.
    result<std::vector<float>> embed(span<const metrale_token> tokens, const embed_options &options = {}) const {
        metrale_embed_options c{};
        c.struct_size = sizeof c;
        c.flags = options.flags;
        c.pooling = options.pooling;
        return detail::give(
            detail::elements<std::vector<float>>(0, [&](float *out, std::size_t room, std::size_t *size, metrale_error **err) {
                return metrale_embed(get(), tokens.data(), tokens.size(), &c, out, room, size, err);
            }));
    }

    // Cancels what every sequence of the model is doing.
    result<void> cancel_all() const {
        return detail::give(detail::done([&](metrale_error **err) { return metrale_cancel_all(get(), err); }));
    }

private:
    friend class loading;
    using handle::handle;

    template <class Call> static result<model> make(detail::keep kept, Call &&call) {
        metrale_model *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return call(&raw, err); });
        model made(raw, std::move(kept));
        if (!status) return detail::give(expected<model>(status.error()));
        return made;
    }

    template <class Call> static result<std::string> text_of(std::size_t guess, Call &&call) {
        return detail::give(detail::elements<std::string>(guess, [&](char *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return call(detail::bytes(out), room, size, err);
        }));
    }
};

// A load that each step() brings further.
class loading : public detail::handle<metrale_loading, metrale_loading_free> {
public:
    static result<loading> begin(const source &from, load_options options = {}) {
        auto held = std::make_shared<load_options>(std::move(options));
        const metrale_load_options c = held->c();
        metrale_loading *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return metrale_load_begin(from.get(), &c, &raw, err); });
        if (!status) return detail::give(expected<loading>(status.error()));
        detail::keep lent = held->kept();
        return loading(raw, detail::both(detail::both(from.kept(), detail::only(held)), lent), lent);
    }

    // Works for about `budget_ns` nanoseconds. The model, once; nothing while there is more to do.
    result<std::optional<model>> step(std::uint64_t budget_ns) { return advance(metrale_load_step, budget_ns); }

    // Reads or packs about `budget` bytes.
    result<std::optional<model>> step_bytes(std::uint64_t budget) { return advance(metrale_load_step_bytes, budget); }

    // As the last step left it.
    const load_progress &progress() const noexcept { return progress_; }

    // Any thread. False when it comes too late and the model is there.
    result<bool> cancel() const {
        auto status = detail::run([&](metrale_error **err) { return metrale_load_cancel(get(), err); });
        if (!status) return detail::give(expected<bool>(status.error()));
        return *status == METRALE_OK;
    }

private:
    loading(metrale_loading *raw, detail::keep kept, detail::keep lent) : handle(raw, std::move(kept)), lent_(std::move(lent)) {}

    template <class Step> result<std::optional<model>> advance(Step work, std::uint64_t budget) {
        metrale_load_progress now{};
        now.struct_size = sizeof now;
        metrale_model *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return work(get(), budget, &now, &raw, err); });
        std::optional<model> made;
        if (raw) made = model(raw, lent_);
        if (!status) return detail::give(expected<std::optional<model>>(status.error()));
        progress_ = {now.done_bytes, now.total_bytes, now.phase ? now.phase : ""};
        return made;
    }

    detail::keep lent_;
    load_progress progress_;
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
