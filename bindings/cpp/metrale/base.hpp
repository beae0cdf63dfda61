// What all nouns share: errors in both ways, views, handles, calls of the library, and callbacks that may throw.
#ifndef METRALE_BASE_HPP
#define METRALE_BASE_HPP

#include <metrale.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define METRALE_EXCEPTIONS 1
#else
#define METRALE_EXCEPTIONS 0
#ifndef METRALE_EXPECTED
#define METRALE_EXPECTED
#endif
#endif

// Files of both ways have different names for the linker.
#ifdef METRALE_EXPECTED
#define METRALE_WAY returning
#else
#define METRALE_WAY throwing
#endif

namespace metrale {
inline namespace METRALE_WAY {

// Why a call failed: everything that the library says of it, kept. Copies share it.
class error : public std::exception {
public:
    error(metrale_status status, std::string message, std::exception_ptr cause = nullptr) {
        auto made = std::make_shared<facts>();
        made->status = status;
        made->message = std::move(message);
        made->cause = std::move(cause);
        facts_ = std::move(made);
    }

    // Takes over an error of the library, which may be NULL.
    static error take(metrale_status status, metrale_error *raw, std::exception_ptr cause) {
        std::unique_ptr<metrale_error, void (*)(metrale_error *)> owner(raw, metrale_error_free);
        auto made = std::make_shared<facts>();
        made->status = status;
        made->message = raw ? metrale_error_message(raw) : metrale_status_name(status);
        made->cause = std::move(cause);
        if (raw) {
            made->status = metrale_error_code(raw);
            made->detail = metrale_error_detail(raw);
            if (const char *name = metrale_error_name(raw)) made->name = name;
            made->offset = amount(metrale_error_offset, raw);
            made->wanted = amount(metrale_error_wanted, raw);
            made->available = amount(metrale_error_available, raw);
            made->retry = metrale_error_retry(raw);
        }
        return error(std::move(made));
    }

    metrale_status status() const noexcept { return facts_->status; }
    const char *what() const noexcept override { return facts_->message.c_str(); }
    // The option, key, file or tensor it is about; empty when there is none.
    std::string_view name() const noexcept { return facts_->name; }
    // Byte offset in a file, or index in an array.
    std::optional<std::uint64_t> offset() const noexcept { return facts_->offset; }
    std::optional<std::uint64_t> wanted() const noexcept { return facts_->wanted; }
    std::optional<std::uint64_t> available() const noexcept { return facts_->available; }
    // Whether the same call may succeed later without a change by the host.
    bool retry() const noexcept { return facts_->retry; }
    // All of it as one JSON object.
    std::string_view detail() const noexcept { return facts_->detail; }
    // What a callback threw, where that was the reason.
    std::exception_ptr cause() const noexcept { return facts_->cause; }

#if METRALE_EXCEPTIONS
    [[noreturn]] void raise() const {
        if (facts_->cause) std::rethrow_exception(facts_->cause);
        throw *this;
    }
#endif

private:
    struct facts {
        metrale_status status = METRALE_OK;
        std::string message, name, detail = "{}";
        std::optional<std::uint64_t> offset, wanted, available;
        bool retry = false;
        std::exception_ptr cause;
    };

    explicit error(std::shared_ptr<const facts> made) : facts_(std::move(made)) {}

    static std::optional<std::uint64_t> amount(bool (*ask)(const metrale_error *, std::uint64_t *), const metrale_error *raw) {
        std::uint64_t value = 0;
        return ask(raw, &value) ? std::optional<std::uint64_t>(value) : std::nullopt;
    }

    std::shared_ptr<const facts> facts_;
};

// A value or the error that is there instead.
template <class T> class [[nodiscard]] expected {
public:
    expected(T value) : held_(std::in_place_index<0>, std::move(value)) {}
    expected(metrale::error error) : held_(std::in_place_index<1>, std::move(error)) {}

    bool has_value() const noexcept { return held_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }
    // Only when there is one.
    T &operator*() & noexcept { return *std::get_if<0>(&held_); }
    const T &operator*() const & noexcept { return *std::get_if<0>(&held_); }
    T &&operator*() && noexcept { return std::move(*std::get_if<0>(&held_)); }
    T *operator->() noexcept { return std::get_if<0>(&held_); }
    const T *operator->() const noexcept { return std::get_if<0>(&held_); }
    const metrale::error &error() const noexcept { return *std::get_if<1>(&held_); }
    template <class U> T value_or(U &&other) && { return has_value() ? std::move(**this) : static_cast<T>(std::forward<U>(other)); }

private:
    std::variant<T, metrale::error> held_;
};

template <> class [[nodiscard]] expected<void> {
public:
    expected() = default;
    expected(metrale::error error) : error_(std::move(error)) {}

    bool has_value() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return has_value(); }
    const metrale::error &error() const noexcept { return *error_; }

private:
    std::optional<metrale::error> error_;
};

// What a call that can fail returns.
#ifdef METRALE_EXPECTED
template <class T> using result = expected<T>;
#else
template <class T> using result = T;
#endif

// A view of `size` elements that somebody else owns.
template <class T> class span {
public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N> constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
    // Anything with data() and size(): vectors, arrays, std::span.
    template <class C, class = std::enable_if_t<!std::is_array_v<std::remove_reference_t<C>> &&
                                                std::is_convertible_v<decltype(std::declval<C &>().data()), T *>>>
    constexpr span(C &&all) noexcept : data_(all.data()), size_(all.size()) {}
    // For arguments, `{1, 2, 3}`: lives until the end of the call.
    template <class U = T, class = std::enable_if_t<std::is_const_v<U>>>
    constexpr span(std::initializer_list<std::remove_const_t<U>> list) noexcept {
        data_ = list.begin();
        size_ = list.size();
    }

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t index) const noexcept { return data_[index]; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

namespace detail {

// What has to stay alive as long as its owner, mostly functions of the host; NULL for nothing.
using thing = std::shared_ptr<const void>;
using keep = std::shared_ptr<const std::vector<thing>>;

inline keep only(thing one) { return one ? std::make_shared<const std::vector<thing>>(1, std::move(one)) : nullptr; }

inline keep both(keep a, const keep &b) {
    if (!a || a == b) return b;
    if (!b) return a;
    std::vector<thing> all = *a;
    for (const thing &one : *b)
        if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    return all.size() == a->size() ? a : std::make_shared<const std::vector<thing>>(std::move(all));
}

// A handle of the library and what its callbacks need, which goes after it.
template <class Raw, void (*Free)(Raw *)> class handle {
public:
    handle(handle &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)), keep_(std::move(other.keep_)) {}
    handle &operator=(handle &&other) noexcept {
        if (this != &other) {
            Free(raw_);
            raw_ = std::exchange(other.raw_, nullptr);
            keep_ = std::move(other.keep_);
        }
        return *this;
    }
    ~handle() { Free(raw_); }

    // For calls of metrale.h; NULL after the object was moved from.
    Raw *get() const noexcept { return raw_; }
    const keep &kept() const noexcept { return keep_; }

protected:
    handle(Raw *raw, keep kept) noexcept : raw_(raw), keep_(std::move(kept)) {}
    void keep_also(const keep &more) { keep_ = both(std::move(keep_), more); }

private:
    Raw *raw_;
    keep keep_;
};

// The exception that a callback threw on this thread, on its way through the library.
inline std::exception_ptr &thrown() noexcept {
    static thread_local std::exception_ptr exception;
    return exception;
}

// Calls a callback. What it throws waits for the end of the call it serves, and `failed` is the answer.
template <class R, class Call> R guarded(R failed, Call &&call) noexcept {
#if METRALE_EXCEPTIONS
    // Calls inside of the callback have exceptions of their own.
    std::exception_ptr before = std::exchange(thrown(), nullptr);
    try {
        R answer = call();
        thrown() = std::move(before);
        return answer;
    } catch (...) {
        thrown() = before ? std::move(before) : std::current_exception();
        return failed;
    }
#else
    (void)failed;
    return call();
#endif
}

// Calls a callback whose failure fails nothing.
template <class R, class Call> R quietly(R failed, Call &&call) noexcept {
    std::exception_ptr before = thrown();
    R answer = guarded(failed, std::forward<Call>(call));
    thrown() = std::move(before);
    return answer;
}

// Calls the library. A callback's exception is a failure even where the call as a whole has succeeded.
template <class Call> expected<metrale_status> run(Call &&call) {
    metrale_error *raw = nullptr;
    const metrale_status status = call(&raw);
    std::exception_ptr cause = std::exchange(thrown(), nullptr);
    if (status >= METRALE_OK && !cause) return status;
    return error::take(status < METRALE_OK ? status : METRALE_CANCELLED, raw, std::move(cause));
}

template <class Call> expected<void> done(Call &&call) {
    auto status = run(std::forward<Call>(call));
    return status ? expected<void>() : expected<void>(status.error());
}

// A value that the call writes.
template <class T, class Call> expected<T> value(Call &&call, T out = T()) {
    auto status = run([&](metrale_error **err) { return call(&out, err); });
    return status ? expected<T>(std::move(out)) : expected<T>(status.error());
}

// A struct of facts that the call fills.
template <class T, class Call> expected<T> filled(Call &&call) {
    T out{};
    out.struct_size = sizeof out;
    return value<T>(std::forward<Call>(call), out);
}

// Elements that the call writes, asked for again with more room where there are more than `guess`.
template <class Out, class Call> expected<Out> elements(std::size_t guess, Call &&call) {
    Out out;
    out.resize(guess);
    for (;;) {
        std::size_t size = 0;
        auto status = run([&](metrale_error **err) { return call(out.data(), out.size(), &size, err); });
        if (!status) return status.error();
        out.resize(size);
        if (*status != METRALE_MORE) return out;
    }
}

inline std::uint8_t *bytes(char *text) noexcept { return reinterpret_cast<std::uint8_t *>(text); }
inline const std::uint8_t *bytes(std::string_view text) noexcept { return reinterpret_cast<const std::uint8_t *>(text.data()); }
inline std::string_view view(const std::uint8_t *bytes, std::size_t size) noexcept { return {reinterpret_cast<const char *>(bytes), size}; }

#ifdef METRALE_EXPECTED
template <class T> expected<T> give(expected<T> &&outcome) { return std::move(outcome); }
#else
template <class T> T give(expected<T> &&outcome) {
    if (!outcome) outcome.error().raise();
    return *std::move(outcome);
}
inline void give(expected<void> &&outcome) {
    if (!outcome) outcome.error().raise();
}
#endif

} // namespace detail

// The library's version, such as "0.1.0".
inline std::string_view version() noexcept { return metrale_version_string(); }
inline std::uint32_t version_number() noexcept { return metrale_version_number(); }
// How it was built and what it found on this machine, as a JSON object.
inline std::string_view build_info() noexcept { return metrale_build_info(); }
inline std::string_view status_name(metrale_status status) noexcept { return metrale_status_name(status); }

// Whether this header fits the library. Worth calling first.
inline result<void> check_abi() {
    return detail::give(detail::done([](metrale_error **err) { return metrale_check_abi(METRALE_ABI_VERSION, err); }));
}

// The devices that models can run on; the first is the processor.
inline result<std::vector<metrale_device>> devices() {
    std::vector<metrale_device> all;
    for (std::size_t i = 0; i < metrale_device_count(); i++) {
        auto one = detail::filled<metrale_device>([&](metrale_device *out, metrale_error **err) { return metrale_device_info(i, out, err); });
        if (!one) return detail::give(expected<std::vector<metrale_device>>(one.error()));
        all.push_back(*one);
    }
    return all;
}

} // namespace METRALE_WAY
} // namespace metrale

#endif
