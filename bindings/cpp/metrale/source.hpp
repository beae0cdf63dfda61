// Where a model's bytes come from, and how it is loaded from there.
#ifndef METRALE_SOURCE_HPP
#define METRALE_SOURCE_HPP

#include "runtime.hpp"

namespace metrale {
inline namespace METRALE_WAY {

struct load_progress {
    std::uint64_t done_bytes = 0, total_bytes = 0; // of the phase; total 0 while it is not known
    std::string_view phase;                        // "reading", "weights", "done"
};

// Zero is the default of every field; metrale_load_options in metrale.h says what each does.
struct load_options {
    std::uint32_t threads = 0;
    std::uint32_t compute = METRALE_COMPUTE_DEFAULT;
    std::uint64_t context = 0;
    // Called on the thread that loads. False, or an exception, ends the load.
    std::function<bool(const load_progress &)> progress;
    std::string synthetic;
    std::uint64_t synthetic_seed = 0;
    const metrale::runtime *runtime = nullptr; // of the same way of errors
    std::uint64_t memory = 0;
    std::uint64_t expert_bytes = 0;
    std::string precision;
    std::uint64_t prefix_bytes = 0;
    std::uint32_t kv_type = METRALE_KV_DEFAULT;
    std::uint32_t device = 0;
    std::uint64_t device_bytes = 0;
    std::uint64_t device_layers = 0;
    std::uint64_t host_experts = 0;
    std::uint64_t flags = 0; // METRALE_LOAD_*

    // As the library takes them; points into this object.
    metrale_load_options c() const {
        metrale_load_options out{};
        out.struct_size = sizeof out;
        out.threads = threads;
        out.compute = compute;
        out.context = context;
        if (progress) {
            out.progress = on_progress;
            out.user = const_cast<load_options *>(this);
        }
        if (!synthetic.empty()) out.synthetic = synthetic.c_str();
        out.synthetic_seed = synthetic_seed;
        if (runtime) out.runtime = runtime->get();
        out.memory = memory;
        out.expert_bytes = expert_bytes;
        if (!precision.empty()) out.precision = precision.c_str();
        out.prefix_bytes = prefix_bytes;
        out.kv_type = kv_type;
        out.device = device;
        out.device_bytes = device_bytes;
        out.device_layers = device_layers;
        out.host_experts = host_experts;
        out.flags = flags;
        return out;
    }

    detail::keep kept() const { return runtime ? runtime->kept() : nullptr; }

private:
    static std::int32_t on_progress(void *user, std::uint64_t done, std::uint64_t total, const char *phase) {
        return detail::guarded(1, [&] { return static_cast<load_options *>(user)->progress({done, total, phase}) ? 0 : 1; });
    }
};

// What a model file or folder holds, from its headers alone, as a JSON object.
inline result<std::string> probe(const std::string &path) {
    return detail::give(detail::elements<std::string>(4096, [&](char *out, std::size_t room, std::size_t *size, metrale_error **err) {
        return metrale_model_probe(path.c_str(), detail::bytes(out), room, size, err);
    }));
}

// Bytes that loading it and making `sequences` full sequences would take.
inline result<metrale_memory_plan> plan(const std::string &path, const load_options &options = {}, std::size_t sequences = 1) {
    const metrale_load_options c = options.c();
    return detail::give(detail::filled<metrale_memory_plan>([&](metrale_memory_plan *out, metrale_error **err) {
        return metrale_plan(path.c_str(), &c, sequences, out, err);
    }));
}

class source : public detail::handle<metrale_source, metrale_source_free> {
public:
    // A GGUF file or a folder; `flags` is 0 or METRALE_SOURCE_READ.
    static result<source> path(const std::string &path, std::uint64_t flags = 0) {
        return make(nullptr, [&](metrale_source **out, metrale_error **err) { return metrale_source_path(path.c_str(), flags, out, err); });
    }

    // A whole file in memory, which must stay as long as what is loaded from it.
    static result<source> borrow(span<const std::uint8_t> bytes) { return buffer(bytes, 0); }

    // A whole file in memory, which is copied at once.
    static result<source> copy(span<const std::uint8_t> bytes) { return buffer(bytes, METRALE_SOURCE_COPY); }

    // `size` bytes from `offset` of an open file, or all from there with 0.
    static result<source> file(int fd, std::uint64_t offset = 0, std::uint64_t size = 0, std::uint64_t flags = 0) {
        return make(nullptr, [&](metrale_source **out, metrale_error **err) {
            return metrale_source_fd(fd, offset, size, flags, out, err);
        });
    }

    // Fills `size` bytes at `into` from `offset` on, and returns how many it filled.
    using read_at = std::function<std::int64_t(std::uint64_t offset, void *into, std::size_t size)>;

    // A whole file of `size` bytes that the host reads.
    static result<source> reader(read_at function, std::uint64_t size) {
        auto held = std::make_shared<read_at>(std::move(function));
        return make(detail::only(held), [&](metrale_source **out, metrale_error **err) {
            return metrale_source_reader(on_read, held.get(), size, 0, out, err);
        });
    }

    // A folder without files, which add() fills.
    static result<source> folder() {
        return make(nullptr, [&](metrale_source **out, metrale_error **err) { return metrale_source_folder(0, out, err); });
    }

    result<void> add(const std::string &name, const source &part) {
        keep_also(part.kept());
        return detail::give(detail::done([&](metrale_error **err) { return metrale_source_add(get(), name.c_str(), part.get(), err); }));
    }

    result<std::string> probe() const {
        return detail::give(detail::elements<std::string>(4096, [&](char *out, std::size_t room, std::size_t *size, metrale_error **err) {
            return metrale_source_probe(get(), detail::bytes(out), room, size, err);
        }));
    }

    result<metrale_memory_plan> plan(const load_options &options = {}, std::size_t sequences = 1) const {
        const metrale_load_options c = options.c();
        return detail::give(detail::filled<metrale_memory_plan>([&](metrale_memory_plan *out, metrale_error **err) {
            return metrale_source_plan(get(), &c, sequences, out, err);
        }));
    }

private:
    using handle::handle;

    template <class Call> static result<source> make(detail::keep kept, Call &&call) {
        metrale_source *raw = nullptr;
        auto status = detail::run([&](metrale_error **err) { return call(&raw, err); });
        if (!status) return detail::give(expected<source>(status.error()));
        return source(raw, std::move(kept));
    }

    static result<source> buffer(span<const std::uint8_t> bytes, std::uint64_t flags) {
        return make(nullptr, [&](metrale_source **out, metrale_error **err) {
            return metrale_source_buffer(bytes.data(), bytes.size(), flags, out, err);
        });
    }

    static std::int64_t on_read(void *user, std::uint64_t offset, void *into, std::size_t size) {
        return detail::guarded<std::int64_t>(-1, [&] { return (*static_cast<read_at *>(user))(offset, into, size); });
    }
};

} // namespace METRALE_WAY
} // namespace metrale

#endif
