// Time from llama_model_load_from_file to the first greedy token of a 32-token prompt.
#include "llama.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <string>
// A helper of benches/load.py: prints one JSON object.
static void quiet(ggml_log_level, const char *, void *) {}
static long kb(const char *key) {
    FILE *f = fopen("/proc/self/status", "r"); char line[256]; long v = 0;
    while (fgets(line, sizeof line, f)) if (!strncmp(line, key, strlen(key))) v = atol(line + strlen(key));
    fclose(f); return v;
}
int main(int argc, char **argv) {
    int threads = argc > 2 ? atoi(argv[2]) : 1, count = argc > 3 ? atoi(argv[3]) : 32;
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    auto now = [] { return std::chrono::steady_clock::now(); };
    auto ms = [](auto a, auto b) { return std::chrono::duration<double, std::milli>(b - a).count(); };
    auto t0 = now();
    auto mp = llama_model_default_params();
    llama_model *model = llama_model_load_from_file(argv[1], mp);
    if (!model) return 1;
    auto t1 = now();
    auto cp = llama_context_default_params();
    cp.n_threads = cp.n_threads_batch = threads;
    if (const char *c = getenv("CTX")) cp.n_ctx = atoi(c);
    llama_context *ctx = llama_init_from_model(model, cp);
    auto t2 = now();
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> prompt(count);
    for (int i = 0; i < count; i++) prompt[i] = (i * 7919 + 13) % vocab;
    if (llama_decode(ctx, llama_batch_get_one(prompt.data(), count))) return 2;
    const float *logits = llama_get_logits_ith(ctx, -1);
    int best = 0;
    for (int i = 1; i < vocab; i++) if (logits[i] > logits[best]) best = i;
    auto t3 = now();
    printf("{\"load_ms\": %.1f, \"context_ms\": %.1f, \"prompt_ms\": %.1f, \"first_ms\": %.1f, \"token\": %d, \"hwm_mb\": %ld, \"anon_mb\": %ld}\n",
        ms(t0, t1), ms(t1, t2), ms(t2, t3), ms(t0, t3), best, kb("VmHWM:") >> 10, kb("RssAnon:") >> 10);
    fflush(stdout); _Exit(0);
}
