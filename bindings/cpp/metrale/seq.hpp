// One timeline of tokens: reading, choosing, going back.
#ifndef METRALE_SEQ_HPP
#define METRALE_SEQ_HPP

#include "choose.hpp"

namespace metrale {
inline namespace METRALE_WAY {

struct seq_options {
    std::uint64_t flags = 0; // METRALE_SEQ_*
    std::uint64_t context = 0;
    const metrale::sampler *sampler = nullptr; // NULL is greedy; copied
    std::uint64_t seed = 0;
};

struct beam_options {
    std::uint64_t beams = 0, max_tokens = 0;
    float length_penalty = 0;
    std::uint32_t flags = 0; // METRALE_BEAM_*
};

struct beam_result {
    std::vector<metrale_token> tokens;
    float score = 0;
};

// Natural logarithms of probabilities.
struct logprobs {
    std::vector<float> of;           // of the tokens that were asked for
    std::vector<metrale_token> top;  // the likeliest tokens
    std::vector<float> top_logprobs; // theirs
};

class token_range;

// One call at a time may change it; a second one gets METRALE_BUSY.
class seq : public detail::handle<metrale_seq, metrale_seq_free> {
public:
    static result<seq> create(const model &of, const seq_options &options = {}) {
        metrale_seq_options c{};
        c.struct_size = sizeof c;
        c.flags = options.flags;
        c.context = options.context;
        c.seed = options.seed;
        detail::keep kept = of.kept();
        if (options.sampler) {
            c.sampler = options.sampler->get();
            kept = detail::both(std::move(kept), options.sampler->hooked());
        }
        return make(std::move(kept), [&](metrale_seq **out, metrale_error **err) { return metrale_seq_new(of.get(), &c, out, err); });
    }

    // What it holds.

    result<metrale_sequence_info> info() const { return facts<metrale_sequence_info>(metrale_seq_info); }
    result<metrale_stats> stats() const { return facts<metrale_stats>(metrale_seq_stats); }

    // How many of `tokens` it begins with.
    result<std::size_t> match(span<const metrale_token> tokens) const {
        return detail::give(detail::value<std::size_t>([&](std::size_t *out, metrale_error **err) {
            return metrale_seq_match(get(), tokens.data(), tokens.size(), out, err);
        }));
    }

    // The row after all tokens; lives until the next call that changes the sequence.
    result<span<const float>> logits() const {
        const float *row = nullptr;
        auto size = detail::value<std::size_t>(
            [&](std::size_t *out, metrale_error **err) { return metrale_seq_logits(get(), &row, out, err); });
        if (!size) return detail::give(expected<span<const float>>(size.error()));
        return span<const float>(row, *size);
    }

    // Of given tokens, and of the `top_count` likeliest, to follow all tokens.
    result<metrale::logprobs> logprobs(span<const metrale_token> tokens, std::size_t top_count = 0) const {
        metrale::logprobs out;
        out.of.resize(tokens.size());
        out.top.resize(top_count);
        out.top_logprobs.resize(top_count);
        auto status = detail::run([&](metrale_error **err) {
            return metrale_seq_logprobs(get(), tokens.data(), tokens.size(), out.of.data(), top_count, out.top.data(),
                                        out.top_logprobs.data(), err);
        });
        if (!status) return detail::give(expected<metrale::logprobs>(status.error()));
        return out;
    }

    // Work.

    // Appends tokens and computes what may follow them.
    result<void> prefill(span<const metrale_token> tokens) {
        return done([&](metrale_error **err) { return metrale_prefill(get(), tokens.data(), tokens.size(), err); });
    }

    // Puts tokens into the queue that batch::step() reads.
    result<void> feed(span<const metrale_token> tokens) {
        return done([&](metrale_error **err) { return metrale_seq_feed(get(), tokens.data(), tokens.size(), err); });
    }

    // One token, chosen and appended; nothing when it is one that ends generation.
    result<std::optional<metrale_token>> decode() {
        metrale_token token = -1;
        metrale_seq *raw = get();
        auto status = detail::run([&](metrale_error **err) { return metrale_decode_step(&raw, 1, &token, err); });
        if (!status) return detail::give(expected<std::optional<metrale_token>>(status.error()));
        return *status == METRALE_DONE ? std::optional<metrale_token>() : token;
    }

    // For a range-based for: decodes until generation ends, or `limit` tokens are made.
    token_range tokens(std::size_t limit);

    // The source text of a model that translates.
    result<void> encode(span<const metrale_token> tokens) {
        return done([&](metrale_error **err) { return metrale_seq_encode(get(), tokens.data(), tokens.size(), err); });
    }

    // The likeliest continuation, by beam search; the sequence stays as it is.
    result<beam_result> beam(const beam_options &options = {}) const {
        metrale_beam_options c{};
        c.struct_size = sizeof c;
        c.beams = options.beams;
        c.max_tokens = options.max_tokens;
        c.length_penalty = options.length_penalty;
        c.flags = options.flags;
        beam_result out;
        auto found = detail::elements<std::vector<metrale_token>>(
            options.max_tokens && options.max_tokens < 4096 ? static_cast<std::size_t>(options.max_tokens) : 4096,
            [&](metrale_token *tokens, std::size_t room, std::size_t *size, metrale_error **err) {
                return metrale_seq_beam(get(), &c, tokens, room, size, &out.score, err);
            });
        if (!found) return detail::give(expected<beam_result>(found.error()));
        out.tokens = *std::move(found);
        return out;
    }

    // How many tokens wait in the queue; nothing when neither they nor a token under way are left to do.
    result<std::optional<std::size_t>> poll() const {
        std::size_t queued = 0;
        auto status = detail::run([&](metrale_error **err) { return metrale_poll(get(), &queued, err); });
        if (!status) return detail::give(expected<std::optional<std::size_t>>(status.error()));
        return *status == METRALE_AGAIN ? std::optional<std::size_t>(queued) : std::nullopt;
    }

    // Any thread.
    result<void> cancel() const {
        return done([&](metrale_error **err) { return metrale_cancel(get(), err); });
    }

    // How tokens are chosen.

    result<void> sampling(const sampler &by) {
        keep_also(by.hooked());
        return done([&](metrale_error **err) { return metrale_seq_sampling(get(), by.get(), err); });
    }
    result<void> sampling(std::nullptr_t) {
        return done([&](metrale_error **err) { return metrale_seq_sampling(get(), nullptr, err); });
    }
    result<void> follow(const grammar &rules) {
        return done([&](metrale_error **err) { return metrale_seq_grammar(get(), rules.get(), err); });
    }
    result<void> follow(std::nullptr_t) {
        return done([&](metrale_error **err) { return metrale_seq_grammar(get(), nullptr, err); });
    }

    // State.

    result<void> truncate(std::size_t length) {
        return done([&](metrale_error **err) { return metrale_seq_truncate(get(), length, err); });
    }
    // Takes `count` tokens out, from index `from` on.
    result<void> shift(std::size_t from, std::size_t count) {
        return done([&](metrale_error **err) { return metrale_seq_shift(get(), from, count, err); });
    }
    result<seq> fork() const {
        return make(kept(), [&](metrale_seq **out, metrale_error **err) { return metrale_seq_fork(get(), out, err); });
    }
    result<std::uint64_t> mark() {
        return detail::give(
            detail::value<std::uint64_t>([&](std::uint64_t *out, metrale_error **err) { return metrale_seq_mark(get(), out, err); }));
    }
    result<void> rollback(std::uint64_t mark) {
        return done([&](metrale_error **err) { return metrale_seq_rollback(get(), mark, err); });
    }
    result<void> commit(std::uint64_t mark) {
        return done([&](metrale_error **err) { return metrale_seq_commit(get(), mark, err); });
    }
    result<std::vector<std::uint8_t>> save() const {
        return detail::give(detail::elements<std::vector<std::uint8_t>>(
            0, [&](std::uint8_t *out, std::size_t room, std::size_t *size, metrale_error **err) {
                return metrale_seq_save(get(), out, room, size, err);
            }));
    }
    result<void> restore(span<const std::uint8_t> saved) {
        return done([&](metrale_error **err) { return metrale_seq_restore(get(), saved.data(), saved.size(), err); });
    }

private:
    using handle::handle;

    template <class Call> static result<void> done(Call &&call) { return detail::give(detail::done(std::forward<Call>(call))); }

    template <class Facts> result<Facts> facts(metrale_status (*ask)(const metrale_seq *, Facts *, metrale_error **)) const {
        return detail::give(detail::filled<Facts>([&](Facts *out, metrale_error **err) { return ask(get(), out, err); }));
    }

    template <class Call> static result<seq> make(detail::keep kept, Call &&call) {
        metrale_seq *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return call(&raw, err); });
        if (!status) return detail::give(expected<seq>(status.error()));
        return seq(raw, std::move(kept));
    }
};

// Tokens as they are decoded; made by seq::tokens, walked once. The sequence must outlive it.
class token_range {
public:
    token_range(seq &of, std::size_t limit) noexcept : of_(&of), left_(limit) {}

    struct end_of_tokens {};

    class iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = metrale_token;
        using difference_type = std::ptrdiff_t;
        using pointer = const metrale_token *;
        using reference = metrale_token;

        explicit iterator(token_range *range) noexcept : range_(range) {}
        metrale_token operator*() const noexcept { return *range_->token_; }
        iterator &operator++() {
            range_->advance();
            return *this;
        }
        bool operator!=(end_of_tokens) const noexcept { return range_->token_.has_value(); }
        bool operator==(end_of_tokens) const noexcept { return !range_->token_; }

    private:
        token_range *range_;
    };

    iterator begin() {
        advance();
        return iterator(this);
    }
    end_of_tokens end() const noexcept { return {}; }

    // Whether the model ended its text, rather than the limit.
    bool done() const noexcept { return done_; }
    // With METRALE_EXPECTED: the error that ended the tokens, if one did.
    const std::optional<error> &failure() const noexcept { return failure_; }

private:
    void advance() {
        token_.reset();
        if (left_ == 0 || done_ || failure_) return;
        left_--;
#ifdef METRALE_EXPECTED
        auto next = of_->decode();
        if (!next) {
            failure_ = next.error();
            return;
        }
        token_ = *next;
#else
        token_ = of_->decode();
#endif
        done_ = !token_;
    }

    seq *of_;
    std::size_t left_;
    std::optional<metrale_token> token_;
    bool done_ = false;
    std::optional<error> failure_;
};

inline token_range seq::tokens(std::size_t limit) { return token_range(*this, limit); }

} // namespace METRALE_WAY
} // namespace metrale

#endif
