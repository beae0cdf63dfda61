// A libnvrtc.so.12 beside driver.cpp: "compiles" a program to its name, which is how the fake driver finds the kernels that g++ compiled. It counts
// them, and refuses the one that METRALE_SHIM_REFUSES names.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

struct Program {
    std::string image;
};
#define EXPORT extern "C" __attribute__((visibility("default"))) int

EXPORT nvrtcCreateProgram(Program** program, const char* text, const char* name, int, const char* const*, const char* const*) {
    if (!text || !*text) return 3;
    // "norm.cu" becomes "shim:norm".
    *program = new Program{"shim:" + std::string(name, strcspn(name, "."))};
    return 0;
}
static std::atomic<int> compiled{0};
EXPORT shim_compiled() { return compiled; }

EXPORT nvrtcCompileProgram(Program* program, int, const char* const*) {
    const char* refused = getenv("METRALE_SHIM_REFUSES");
    compiled++;
    return refused && program->image == "shim:" + std::string(refused) ? 6 : 0;
}
static const char LOG[] = "it is refused";
EXPORT nvrtcGetProgramLogSize(Program*, size_t* bytes) { return *bytes = sizeof LOG, 0; }
EXPORT nvrtcGetProgramLog(Program*, char* log) { return memcpy(log, LOG, sizeof LOG), 0; }
EXPORT nvrtcGetCUBINSize(Program* program, size_t* bytes) { return *bytes = program->image.size() + 1, 0; }
EXPORT nvrtcGetCUBIN(Program* program, char* image) { return memcpy(image, program->image.c_str(), program->image.size() + 1), 0; }
EXPORT nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }
