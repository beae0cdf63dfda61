// What a host lends models: an allocator, a limit of memory, a log, threads.
#ifndef METRALE_RUNTIME_HPP
#define METRALE_RUNTIME_HPP

#include "base.hpp"

#include <mutex>

namespace metrale {
inline namespace METRALE_WAY {

// One line of the log; `text` lives during the call.
struct log_record {
    std::uint32_t level; // METRALE_LOG_*
    metrale_status status;
    std::string_view text;
};

// A piece of work that `runtime_options::parallel_for` has to call once with each index.
class body {
public:
    body(metrale_body_fn call, void *arg) noexcept : call_(call), arg_(arg) {}
    void operator()(std::size_t index) const noexcept { call_(arg_, index); }

private:
    metrale_body_fn call_;
    void *arg_;
};

struct runtime_options {
    // Both or none. An exception of `alloc` is as if there were no memory. Called on any thread, also on several at once.
    std::function<void *(std::size_t size, std::size_t align)> alloc;
    std::function<void(void *pointer, std::size_t size, std::size_t align)> free;
    std::uint64_t memory_cap = 0; // bytes
    // Called on any thread, also on several at once. Its exceptions are dropped: a record that is not written fails nothing.
    std::function<void(const log_record &)> log;
    std::uint32_t log_level = METRALE_LOG_DEFAULT;
    std::uint32_t workers = METRALE_WORKERS_OWN;
    std::uint32_t threads = 0;
    // With METRALE_WORKERS_HOST: calls the body for each index below `count`, and returns when all have returned.
    std::function<void(std::size_t count, const body &)> parallel_for;
};

class runtime : public detail::handle<metrale_runtime, metrale_runtime_free> {
public:
    static result<runtime> create(runtime_options options = {}) {
        auto host = std::make_shared<functions>();
        host->given = std::move(options);
        const runtime_options &set = host->given;
        metrale_runtime_options c{};
        c.struct_size = sizeof c;
        c.memory_cap = set.memory_cap;
        c.log_level = set.log_level;
        c.workers = set.workers;
        c.threads = set.threads;
        if (set.alloc) c.alloc = on_alloc;
        if (set.free) c.free = on_free;
        c.alloc_user = host.get();
        if (set.log) {
            host->logs.push_back(std::make_unique<logger>(set.log));
            c.log = on_log;
            c.log_user = host->logs.back().get();
        }
        if (set.parallel_for) {
            c.parallel_for = on_parallel_for;
            c.parallel_user = host.get();
        }
        metrale_runtime *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return metrale_runtime_new(&c, &raw, err); });
        if (!status) return detail::give(expected<runtime>(status.error()));
        return runtime(raw, std::move(host));
    }

    result<metrale_memory_usage> memory() const {
        return detail::give(detail::filled<metrale_memory_usage>(
            [&](metrale_memory_usage *out, metrale_error **err) { return metrale_runtime_memory(get(), out, err); }));
    }

    // Gives memory back that nothing needs now.
    result<void> trim() {
        return detail::give(detail::done([&](metrale_error **err) { return metrale_runtime_trim(get(), err); }));
    }

    // Changes where log records go; an empty function is silence.
    result<void> log(std::function<void(const log_record &)> function, std::uint32_t level = METRALE_LOG_DEFAULT) {
        logger *user = nullptr;
        if (function) {
            // The one before may still get a record that is being written: all stay as long as the runtime.
            std::lock_guard<std::mutex> lock(host_->mutex);
            host_->logs.push_back(std::make_unique<logger>(std::move(function)));
            user = host_->logs.back().get();
        }
        return detail::give(detail::done([&](metrale_error **err) {
            return metrale_runtime_log_set(get(), level, user ? on_log : nullptr, user, err);
        }));
    }

    // Lends the calling thread. True when it was sent home by release_workers, false when the runtime was freed.
    result<bool> run_worker() const {
        auto status = detail::run([&](metrale_error **err) { return metrale_runtime_run_worker(get(), err); });
        if (!status) return detail::give(expected<bool>(status.error()));
        return *status == METRALE_OK;
    }

    result<void> release_workers() const {
        return detail::give(detail::done([&](metrale_error **err) { return metrale_runtime_release_workers(get(), err); }));
    }

private:
    using logger = std::function<void(const log_record &)>;
    struct functions {
        runtime_options given;
        std::mutex mutex;
        std::vector<std::unique_ptr<logger>> logs;
    };

    runtime(metrale_runtime *raw, std::shared_ptr<functions> host) : handle(raw, detail::only(host)), host_(std::move(host)) {}

    static void *on_alloc(void *user, std::size_t size, std::size_t align) {
        return detail::quietly<void *>(nullptr, [&] { return static_cast<functions *>(user)->given.alloc(size, align); });
    }
    static void on_free(void *user, void *pointer, std::size_t size, std::size_t align) {
        detail::quietly(0, [&] { return static_cast<functions *>(user)->given.free(pointer, size, align), 0; });
    }
    static void on_log(void *user, std::uint32_t level, metrale_status status, const std::uint8_t *text, std::size_t size) {
        detail::quietly(0, [&] { return (*static_cast<logger *>(user))(log_record{level, status, detail::view(text, size)}), 0; });
    }
    static void on_parallel_for(void *user, std::size_t count, metrale_body_fn call, void *arg) {
        detail::guarded(0, [&] { return static_cast<functions *>(user)->given.parallel_for(count, body(call, arg)), 0; });
    }

    std::shared_ptr<functions> host_;
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
