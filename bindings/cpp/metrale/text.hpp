// Tokens of one sequence as text that is whole UTF-8 at every moment.
#ifndef METRALE_TEXT_HPP
#define METRALE_TEXT_HPP

#include "model.hpp"

namespace metrale {
inline namespace METRALE_WAY {

struct text_options {
    std::uint64_t flags = 0; // METRALE_TEXT_*
    std::vector<std::string> stops;
};

// The text that became certain, which may be none. It lives until the next call on its stream.
struct piece {
    std::string_view text;
    std::uint64_t first_token = 0, end_token = 0; // the tokens it came from: first ... end - 1
    std::int64_t stop = -1;                       // index of the stop string that was reached

    bool stopped() const noexcept { return stop >= 0; }
};

class text : public detail::handle<metrale_text, metrale_text_free> {
public:
    static result<text> create(const model &of, const text_options &options = {}) {
        std::string stops;
        for (const std::string &stop : options.stops) {
            if (&stop != options.stops.data()) stops += '\0';
            stops += stop;
        }
        metrale_text_options c{};
        c.struct_size = sizeof c;
        c.flags = options.flags;
        if (!stops.empty()) c.stops = detail::bytes(std::string_view(stops));
        c.stops_len = stops.size();
        metrale_text *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return metrale_text_new(of.get(), &c, &raw, err); });
        if (!status) return detail::give(expected<text>(status.error()));
        return text(raw, of.kept());
    }

    result<piece> push(metrale_token token) {
        return taken([&](metrale_text_piece *out, metrale_error **err) { return metrale_text_push(get(), token, out, err); });
    }

    // What is held back: call it when the sequence ends.
    result<piece> flush() {
        return taken([&](metrale_text_piece *out, metrale_error **err) { return metrale_text_flush(get(), out, err); });
    }

    result<void> reset() {
        return detail::give(detail::done([&](metrale_error **err) { return metrale_text_reset(get(), err); }));
    }

private:
    using handle::handle;

    template <class Call> static result<piece> taken(Call &&call) {
        auto c = detail::filled<metrale_text_piece>(std::forward<Call>(call));
        if (!c) return detail::give(expected<piece>(c.error()));
        return piece{detail::view(c->bytes, c->len), c->first_token, c->end_token, c->stop};
    }
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
