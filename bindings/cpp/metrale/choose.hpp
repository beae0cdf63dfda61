// How tokens are chosen: samplers made of stages, and grammars.
#ifndef METRALE_CHOOSE_HPP
#define METRALE_CHOOSE_HPP

#include "model.hpp"

namespace metrale {
inline namespace METRALE_WAY {

// The stages of a sampler, in the words of METRALE_STAGE_*.
namespace stage {

using type = metrale_sampler_stage;

namespace detail {
inline type make(std::uint32_t kind, float value = 0, std::uint32_t count = 0, float second = 0) noexcept {
    type made{};
    made.kind = kind;
    made.value = value;
    made.count = count;
    made.second = second;
    return made;
}
} // namespace detail

inline type greedy() noexcept { return detail::make(METRALE_STAGE_GREEDY); }
inline type temperature(float value) noexcept { return detail::make(METRALE_STAGE_TEMPERATURE, value); }
inline type top_k(std::uint32_t count) noexcept { return detail::make(METRALE_STAGE_TOP_K, 0, count); }
inline type top_p(float share) noexcept { return detail::make(METRALE_STAGE_TOP_P, share); }
inline type min_p(float share) noexcept { return detail::make(METRALE_STAGE_MIN_P, share); }
inline type typical(float share) noexcept { return detail::make(METRALE_STAGE_TYPICAL, share); }
inline type top_n_sigma(float deviations) noexcept { return detail::make(METRALE_STAGE_TOP_N_SIGMA, deviations); }
inline type xtc(float threshold, float share) noexcept { return detail::make(METRALE_STAGE_XTC, threshold, 0, share); }
inline type mirostat(float bits, float rate = 0.1f, std::uint32_t likeliest = 100) noexcept {
    return detail::make(METRALE_STAGE_MIROSTAT, bits, likeliest, rate);
}
inline type mirostat_v2(float bits, float rate = 0.1f) noexcept { return detail::make(METRALE_STAGE_MIROSTAT_V2, bits, 0, rate); }
inline type repetition(float value, std::uint32_t window = 0) noexcept { return detail::make(METRALE_STAGE_REPETITION, value, window); }
inline type presence(float value, std::uint32_t window = 0) noexcept { return detail::make(METRALE_STAGE_PRESENCE, value, window); }
inline type frequency(float value, std::uint32_t window = 0) noexcept { return detail::make(METRALE_STAGE_FREQUENCY, value, window); }
inline type bias(metrale_token token, float value) noexcept {
    type made = detail::make(METRALE_STAGE_BIAS, value);
    made.token = token;
    return made;
}
inline type dry(float multiplier, float base, std::uint32_t length, std::uint32_t window = 0) noexcept {
    type made = detail::make(METRALE_STAGE_DRY, multiplier, window, base);
    made.length = length;
    return made;
}
inline type dry_breaker(metrale_token token) noexcept {
    type made = detail::make(METRALE_STAGE_DRY_BREAKER);
    made.token = token;
    return made;
}
// Where sampler::set_hook's function runs.
inline type hook() noexcept { return detail::make(METRALE_STAGE_HOOK); }

} // namespace stage

// A recipe, of which each sequence takes a copy.
class sampler : public detail::handle<metrale_sampler, metrale_sampler_free> {
public:
    static result<sampler> create(span<const stage::type> stages, std::uint64_t seed = 0) {
        metrale_sampler *raw = nullptr;
        auto status =
            detail::run([&](metrale_error **err) { return metrale_sampler_new(stages.data(), stages.size(), seed, &raw, err); });
        if (!status) return detail::give(expected<sampler>(status.error()));
        return sampler(raw, nullptr);
    }

    // Changes the logits, and sees the sequence's tokens. An exception fails the sequence it is called for.
    using hook = std::function<void(span<float> logits, span<const metrale_token> history)>;

    // What stage::hook() does in the sequences that get this sampler from now on. They keep the function alive.
    result<void> set_hook(hook function) {
        auto held = std::make_shared<hook>(std::move(function));
        auto status = detail::run([&](metrale_error **err) {
            return metrale_sampler_set_hook(get(), *held ? on_hook : nullptr, held.get(), err);
        });
        if (!status) return detail::give(expected<void>(status.error()));
        hook_ = std::move(held);
        return detail::give(expected<void>());
    }

    // What sequences have to keep.
    detail::keep hooked() const { return detail::both(kept(), detail::only(hook_)); }

private:
    using handle::handle;

    static std::int32_t on_hook(void *user, float *logits, std::size_t count, const metrale_token *history, std::size_t history_count) {
        return detail::guarded(1, [&] { return (*static_cast<hook *>(user))({logits, count}, {history, history_count}), 0; });
    }

    std::shared_ptr<hook> hook_;
};

// A compiled grammar of one model.
class grammar : public detail::handle<metrale_grammar, metrale_grammar_free> {
public:
    static result<grammar> json_schema(const model &of, std::string_view schema) { return make(of, schema, metrale_grammar_json_schema); }
    static result<grammar> gbnf(const model &of, std::string_view rules) { return make(of, rules, metrale_grammar_gbnf); }
    static result<grammar> lark(const model &of, std::string_view rules) { return make(of, rules, metrale_grammar_lark); }
    static result<grammar> regex(const model &of, std::string_view pattern) { return make(of, pattern, metrale_grammar_regex); }

private:
    using handle::handle;
    using compiler = metrale_status(const metrale_model *, const std::uint8_t *, std::size_t, metrale_grammar **, metrale_error **);

    static result<grammar> make(const model &of, std::string_view text, compiler *compile) {
        metrale_grammar *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return compile(of.get(), detail::bytes(text), text.size(), &raw, err); });
        if (!status) return detail::give(expected<grammar>(status.error()));
        return grammar(raw, of.kept());
    }
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
