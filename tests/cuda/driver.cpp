// A libcuda.so.1 for machines without a GPU: the functions that the library uses, around the kernels of shim.hpp. Work is done when it is
// queued; what a stream captures is done when its graph is launched. Every allocation is one of the system's, so that the address sanitizer sees
// what lies outside, and holds NaN at first.
//
// METRALE_SHIM_MEMORY: bytes of the device (4 GiB). METRALE_SHIM_PROCESSORS: 4. METRALE_SHIM_DEVICES: 1. METRALE_SHIM_FAIL=n: from the n-th
// launch on everything fails, as on a device that is lost. METRALE_SHIM_LATE=1: work is done as late as it may be, when somebody waits for it or
// what it uses is freed; so what the host changes too early shows.
#define FILE_NAME none
#include "shim.hpp"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

typedef int Result;
typedef u64 Address;
enum : Result {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
    NOT_FOUND = 500, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
};

struct Graph {
    std::vector<std::function<Result()>> nodes;
};
struct Stream {
    Graph* capture;
    int priority;
    // What is done late, and how much of it has been queued and done.
    std::deque<std::function<Result()>> waiting;
    u64 queued, done;
    // Graphs among it.
    u64 graphs;
};
struct Event {
    Stream* stream;
    u64 place;
};
struct Module {
    char file[64];
};
struct Config {
    u32 blocks[3], threads[3], shared;
    Stream* stream;
    void* attributes;
    u32 attribute_count;
};

static std::recursive_mutex lock;
static thread_local std::vector<void*> contexts;
static std::map<Address, size_t> allocations;
static size_t allocated;
static u64 launches;
// Bytes copied to the host.
static u64 copied;
// Graphs queued behind one that was under way.
static u64 behind;
// Kernels queued, by their stream's priority.
static std::map<int, u64> queued;
static bool lost;
static std::set<Stream*> streams;
// Memory that copies are queued for as it is; of other memory they take the bytes at once.
static std::map<const u8*, size_t> pinned;

static u64 setting(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}
static u64 total_memory() { return setting("METRALE_SHIM_MEMORY", 4ull << 30); }

static bool is_late() {
    static const bool late = setting("METRALE_SHIM_LATE", 0);
    return late;
}
// Does what a stream has waiting, up to a place in it.
static Result work_off(Stream* stream, u64 place) {
    std::lock_guard<std::recursive_mutex> held(lock);
    while (streams.count(stream) && stream->done < place && !stream->waiting.empty()) {
        auto work = stream->waiting.front();
        stream->waiting.pop_front();
        stream->done++;
        if (!lost)
            if (Result r = work()) return r;
    }
    return lost ? LAUNCH_FAILED : OK;
}
static void work_off_all() {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (Stream* stream : streams) work_off(stream, ~0ull);
}
static bool is_pinned(const void* at) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto after = pinned.upper_bound((const u8*)at);
    return after != pinned.begin() && (--after, (const u8*)at < after->first + after->second);
}

// Does it now, or when the graph that the stream captures is launched.
static Result queue(Stream* stream, std::function<Result()> work) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (lost) return LAUNCH_FAILED;
    if (contexts.empty()) return INVALID_CONTEXT;
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->nodes.push_back(work);
        return OK;
    }
    if (is_late()) {
        stream->waiting.push_back(work);
        stream->queued++;
        return OK;
    }
    return work();
}
// For calls that no stream may be capturing for, and that need a context.
static Result here_and_now() { return lost ? LAUNCH_FAILED : contexts.empty() ? INVALID_CONTEXT : OK; }

#define EXPORT extern "C" __attribute__((visibility("default"))) Result

EXPORT cuInit(u32) { return OK; }
EXPORT cuDeviceGetCount(int* count) { return *count = (int)setting("METRALE_SHIM_DEVICES", 1), OK; }
EXPORT cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= (int)setting("METRALE_SHIM_DEVICES", 1)) return INVALID_DEVICE;
    return *device = ordinal, OK;
}
EXPORT cuDeviceGetName(char* name, int room, int) { return snprintf(name, room, "kernels on the host"), OK; }
EXPORT cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = total_memory(), OK; }
EXPORT cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = (int)setting("METRALE_SHIM_PROCESSORS", 4); break;
        case 75: *value = 9; break;
        case 76: *value = 0; break;
        case 97: *value = 232448; break;
        default: *value = 0;
    }
    return OK;
}
EXPORT cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(size_t)(device + 1), OK; }
EXPORT cuDevicePrimaryCtxRelease_v2(int) { return OK; }
EXPORT cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), OK; }
EXPORT cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    if (context) *context = contexts.back();
    contexts.pop_back();
    return OK;
}
EXPORT cuMemGetInfo_v2(size_t* free, size_t* total) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (Result r = here_and_now()) return r;
    *total = total_memory();
    *free = *total - allocated;
    return OK;
}
EXPORT cuMemAlloc_v2(Address* at, size_t bytes) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (Result r = here_and_now()) return r;
    void* p = nullptr;
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > total_memory() - allocated || posix_memalign(&p, 256, bytes)) return OUT_OF_MEMORY;
    memset(p, 0xff, bytes);
    allocations[(Address)p] = bytes;
    allocated += bytes;
    return *at = (Address)p, OK;
}
EXPORT cuMemFree_v2(Address at) {
    work_off_all();
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID_VALUE;
    allocated -= found->second;
    allocations.erase(found);
    free((void*)at);
    return lost ? LAUNCH_FAILED : OK;
}
EXPORT cuMemHostAlloc(void** p, size_t bytes, u32) {
    if (posix_memalign(p, 4096, bytes)) return OUT_OF_MEMORY;
    memset(*p, 0xff, bytes);
    std::lock_guard<std::recursive_mutex> held(lock);
    return pinned[(u8*)*p] = bytes, OK;
}
EXPORT cuMemFreeHost(void* p) {
    work_off_all();
    std::lock_guard<std::recursive_mutex> held(lock);
    return pinned.erase((u8*)p), free(p), OK;
}
EXPORT cuMemHostRegister_v2(void* p, size_t bytes, u32) {
    if (setting("METRALE_SHIM_UNPINNED", 0)) return NOT_SUPPORTED;
    std::lock_guard<std::recursive_mutex> held(lock);
    return pinned[(u8*)p] = bytes, OK;
}
EXPORT cuMemHostUnregister(void* p) {
    work_off_all();
    std::lock_guard<std::recursive_mutex> held(lock);
    return pinned.erase((u8*)p), OK;
}
EXPORT cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream* stream) {
    if (is_late() && !is_pinned(from)) {
        std::vector<u8> taken((const u8*)from, (const u8*)from + bytes);
        return queue(stream, [=] { return memcpy((void*)to, taken.data(), bytes), OK; });
    }
    return queue(stream, [=] { return memcpy((void*)to, from, bytes), OK; });
}
EXPORT cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream* stream) {
    return queue(stream, [=] { return copied += bytes, memcpy(to, (const void*)from, bytes), OK; });
}
EXPORT cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream* stream) {
    return queue(stream, [=] { return memmove((void*)to, (const void*)from, bytes), OK; });
}
EXPORT cuMemsetD8Async(Address to, u8 value, size_t bytes, Stream* stream) {
    return queue(stream, [=] { return memset((void*)to, value, bytes), OK; });
}

EXPORT cuStreamCreateWithPriority(Stream** stream, u32, int priority) {
    std::lock_guard<std::recursive_mutex> held(lock);
    return *stream = new Stream{nullptr, priority, {}, 0, 0, 0}, streams.insert(*stream), here_and_now();
}
EXPORT cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, OK; }
EXPORT cuStreamDestroy_v2(Stream* stream) {
    work_off(stream, ~0ull);
    std::lock_guard<std::recursive_mutex> held(lock);
    return streams.erase(stream), delete stream, OK;
}
EXPORT cuStreamSynchronize(Stream* stream) {
    if (stream->capture) return NOT_PERMITTED;
    if (Result r = work_off(stream, ~0ull)) return r;
    return here_and_now();
}
EXPORT cuStreamQuery(Stream* stream) { return cuStreamSynchronize(stream); }
EXPORT cuEventCreate(Event** event, u32) { return *event = new Event{nullptr, 0}, here_and_now(); }
EXPORT cuEventRecord(Event* event, Stream* stream) {
    std::lock_guard<std::recursive_mutex> held(lock);
    return *event = {stream, stream->queued}, here_and_now();
}
EXPORT cuEventSynchronize(Event* event) {
    if (Result r = work_off(event->stream, event->place)) return r;
    return here_and_now();
}
EXPORT cuEventQuery(Event* event) { return cuEventSynchronize(event); }
EXPORT cuEventElapsedTime(float* milliseconds, Event*, Event*) { return *milliseconds = 1.0f, here_and_now(); }
EXPORT cuEventDestroy_v2(Event* event) { return delete event, OK; }

EXPORT cuStreamBeginCapture_v2(Stream* stream, int) {
    if (Result r = here_and_now()) return r;
    if (stream->capture) return NOT_PERMITTED;
    return stream->capture = new Graph, OK;
}
EXPORT cuStreamEndCapture(Stream* stream, Graph** graph) {
    *graph = stream->capture;
    stream->capture = nullptr;
    return *graph ? here_and_now() : NOT_PERMITTED;
}
EXPORT cuGraphInstantiateWithFlags(Graph** made, Graph* graph, u64) { return *made = new Graph(*graph), here_and_now(); }
EXPORT cuGraphUpload(Graph*, Stream*) { return here_and_now(); }
EXPORT cuGraphLaunch(Graph* graph, Stream* stream) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto all = [](const std::vector<std::function<Result()>>& nodes) {
        for (auto& node : nodes)
            if (Result r = node()) return r;
        return (Result)OK;
    };
    if (!is_late()) return queue(stream, [=] { return all(graph->nodes); });
    behind += stream->graphs++ > 0;
    // A graph may be destroyed before it has run.
    return queue(stream, [=, nodes = graph->nodes] { return stream->graphs--, all(nodes); });
}
EXPORT cuGraphExecDestroy(Graph* graph) { return delete graph, OK; }
EXPORT cuGraphDestroy(Graph* graph) { return delete graph, OK; }

// An image is what nvrtc.cpp makes: "shim:" and the file's name.
EXPORT cuModuleLoadData(Module** module, const void* image) {
    if (Result r = here_and_now()) return r;
    if (memcmp(image, "shim:", 5)) return INVALID_IMAGE;
    *module = new Module;
    snprintf((*module)->file, sizeof (*module)->file, "%s", (const char*)image + 5);
    return OK;
}
EXPORT cuModuleUnload(Module* module) { return work_off_all(), delete module, OK; }
EXPORT cuModuleGetFunction(const shim::Kernel** function, Module* module, const char* name) {
    const char prefix[] = "metrale_";
    if (!strncmp(name, prefix, sizeof prefix - 1)) name += sizeof prefix - 1;
    for (const shim::Kernel* kernel = shim::kernels; kernel; kernel = kernel->next) {
        if (!strcmp(kernel->name, name) && !strcmp(kernel->file, module->file)) return *function = kernel, OK;
    }
    return NOT_FOUND;
}
EXPORT cuFuncSetAttribute(const shim::Kernel*, int, int) { return here_and_now(); }
EXPORT cuFuncGetParamInfo(const shim::Kernel* kernel, size_t index, size_t* offset, size_t* size) {
    if (index) return INVALID_VALUE;
    return *offset = 0, *size = kernel->args, OK;
}
EXPORT cuLaunchKernelEx(const Config* config, const shim::Kernel* kernel, void** arguments, void**) {
    const u8* from = (const u8*)arguments[0];
    std::vector<u8> args(from, from + kernel->args);
    const u32 *b = config->blocks, *t = config->threads;
    shim::Dim blocks = {b[0], b[1], b[2]}, threads = {t[0], t[1], t[2]};
    u32 shared = config->shared;
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535 || shared > 232448) return INVALID_VALUE;
    {
        std::lock_guard<std::recursive_mutex> held(lock);
        if (config->stream) ++queued[config->stream->priority];
    }
    return queue(config->stream, [=] {
        u64 fails = setting("METRALE_SHIM_FAIL", 0);
        lost |= fails && ++launches >= fails;
        lost |= !lost && !shim::launch(*kernel, blocks, threads, shared, args.data());
        return (Result)(lost ? LAUNCH_FAILED : OK);
    });
}
EXPORT cuGetErrorName(Result code, const char** name) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
    return *name = text, OK;
}
EXPORT cuGetErrorString(Result, const char** text) { return *text = shim::failure[0] ? shim::failure : "an error of the host's kernels", OK; }
// For tests: kernels that were queued, or captured, on streams of this priority.
extern "C" __attribute__((visibility("default"))) u64 shim_queued(int priority) {
    std::lock_guard<std::recursive_mutex> held(lock);
    return queued[priority];
}
// And bytes that were copied to the host.
extern "C" __attribute__((visibility("default"))) u64 shim_copied() {
    std::lock_guard<std::recursive_mutex> held(lock);
    return copied;
}
// And graphs that were queued behind one that was under way, where work is done late.
extern "C" __attribute__((visibility("default"))) u64 shim_behind() {
    std::lock_guard<std::recursive_mutex> held(lock);
    return behind;
}
