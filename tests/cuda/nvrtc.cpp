// A libnvrtc.so.12 beside driver.cpp: "compiles" a program to its name, which is how the fake driver finds the kernels that g++ compiled.
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
EXPORT nvrtcCompileProgram(Program*, int, const char* const*) { return 0; }
EXPORT nvrtcGetProgramLogSize(Program*, size_t* bytes) { return *bytes = 1, 0; }
EXPORT nvrtcGetProgramLog(Program*, char* log) { return *log = 0, 0; }
EXPORT nvrtcGetCUBINSize(Program* program, size_t* bytes) { return *bytes = program->image.size() + 1, 0; }
EXPORT nvrtcGetCUBIN(Program* program, char* image) { return memcpy(image, program->image.c_str(), program->image.size() + 1), 0; }
EXPORT nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }
