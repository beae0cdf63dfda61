// Several sequences of one model, worked on together.
#ifndef METRALE_BATCH_HPP
#define METRALE_BATCH_HPP

#include "seq.hpp"

namespace metrale {
inline namespace METRALE_WAY {

// Names its sequences, which must outlive it; it owns their lists of results, so that a step allocates nothing here.
class batch {
public:
    batch() = default;
    batch(std::initializer_list<std::reference_wrapper<seq>> seqs) {
        for (seq &one : seqs) add(one);
    }

    void add(seq &one) {
        raw_.push_back(one.get());
        tokens_.push_back(-1);
        results_.push_back({});
    }
    // The ones after it move up by one place.
    void remove(std::size_t index) {
        raw_.erase(raw_.begin() + static_cast<std::ptrdiff_t>(index));
        tokens_.pop_back();
        results_.pop_back();
    }
    void clear() noexcept {
        raw_.clear();
        tokens_.clear();
        results_.clear();
    }
    std::size_t size() const noexcept { return raw_.size(); }

    // One token for each, in the order of the sequences, until the next call. `done()` when each has ended its text.
    result<span<const metrale_token>> decode() {
        auto status = detail::run(
            [&](metrale_error **err) { return metrale_decode_step(raw_.data(), raw_.size(), tokens_.data(), err); });
        if (!status) return detail::give(expected<span<const metrale_token>>(status.error()));
        status_ = *status;
        return span<const metrale_token>(tokens_);
    }

    // Up to `steps` tokens for each: step after step, those of one step in the order of the sequences, until the next call. Ends behind a step in
    // which some sequence has ended its text. After an error decoded() has what was done before it, which stays.
    result<span<const metrale_token>> decode(std::size_t steps) {
        std::size_t places = raw_.size() != 0 && steps > many_.max_size() / raw_.size() ? 0 : steps * raw_.size(), done = 0;
        many_.resize(places);
        auto status = detail::run(
            [&](metrale_error **err) { return metrale_decode(raw_.data(), raw_.size(), steps, many_.data(), &done, err); });
        many_.resize(done * raw_.size());
        if (!status) return detail::give(expected<span<const metrale_token>>(status.error()));
        status_ = *status;
        return decoded();
    }

    // What the last call for many steps has produced.
    span<const metrale_token> decoded() const noexcept { return span<const metrale_token>(many_); }

    // Works for about `budget_ns` nanoseconds (0: no limit) on queues and tokens. What each has got, until the next call. A
    // hook's exception goes on from here; results() has what the others got.
    result<span<const metrale_step_result>> step(std::uint64_t budget_ns) {
        for (metrale_step_result &one : results_) {
            one = {};
            one.struct_size = sizeof one;
            one.token = -1;
        }
        auto status = detail::run(
            [&](metrale_error **err) { return metrale_step(raw_.data(), raw_.size(), budget_ns, results_.data(), err); });
        if (!status) return detail::give(expected<span<const metrale_step_result>>(status.error()));
        status_ = *status;
        return results();
    }

    // About how many nanoseconds a step without a limit would take.
    result<std::uint64_t> estimate() const {
        return detail::give(detail::value<std::uint64_t>(
            [&](std::uint64_t *out, metrale_error **err) { return metrale_step_estimate(raw_.data(), raw_.size(), out, err); }));
    }

    span<const metrale_step_result> results() const noexcept { return span<const metrale_step_result>(results_); }
    // Of the last call: every sequence has just produced a token that ends generation.
    bool done() const noexcept { return status_ == METRALE_DONE; }
    // Of the last step: the budget ran out.
    bool again() const noexcept { return status_ == METRALE_AGAIN; }

private:
    std::vector<metrale_seq *> raw_;
    std::vector<metrale_token> tokens_, many_;
    std::vector<metrale_step_result> results_;
    metrale_status status_ = METRALE_OK;
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
