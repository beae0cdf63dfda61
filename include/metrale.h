/*
 * metrale: a language model inside your own process.
 *
 * This file is generated from src/abi and is the manual of the C interface. What holds for every function:
 *
 * Status     Calls that can fail return metrale_status: 0 is METRALE_OK, positive values are information, negative
 *            values are errors. After an error nothing has changed and no output was written.
 * Errors     `metrale_error **err` may be NULL. Start with `metrale_error *err = NULL;`: it is written only when the
 *            call fails, and the object is then yours to free with metrale_error_free.
 * Handles    Pointers to metrale_model, metrale_seq and the other nouns are numbers, never addresses: do not follow
 *            them. Free each once, in any order, on any thread; what still needs an object keeps it alive. A NULL,
 *            freed, invented or wrong handle is METRALE_INVALID_HANDLE; freeing one does nothing.
 * Threads    `const T *` may be used by several threads at once, `T *` by one; a second one gets METRALE_BUSY and
 *            nothing is waited for. Functions marked "any thread" are safe beside everything.
 * Structs    Set struct_size and zero the rest. Zero means default. Older and newer hosts are understood; a field
 *            that this library does not know must be zero.
 * Bytes      Texts are (pointer, length) and need no terminator unless the function says so. Pointers that a call
 *            borrows are read during the call only.
 * Memory     A host that lends an allocator (metrale_runtime_new) gets every request for memory of the models loaded
 *            with it and of all that is made of them. Mapped model files and stacks of threads are the system's.
 * Silence    Nothing is printed, no signal handler is set, no thread starts before a model is loaded.
 *
 * Not in the library's hands: the kernel's out-of-memory killer, and SIGBUS when another process shortens a file that
 * is being used.
 */


#ifndef METRALE_H
#define METRALE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A path or file is read into memory while it is loaded, rather than mapped. The file may change afterwards, and
// shortening it meanwhile is an error rather than SIGBUS. Its bytes stay in memory as long as the model.
#define METRALE_SOURCE_READ 1

// A buffer is copied at once, and the host's may go.
#define METRALE_SOURCE_COPY 2

// Precision of the mathematics: the library's default (`METRALE_COMPUTE` in the environment, else fast).
#define METRALE_COMPUTE_DEFAULT 0

// Quantised weights meet 8-bit activations, the cache is 16 bits wide unless `kv_type` says otherwise.
#define METRALE_COMPUTE_FAST 1

// Every weight decoded to its exact value, activations and, unless `kv_type` says otherwise, cache in f32.
#define METRALE_COMPUTE_F32 2

// Keys and values are kept in the library's default (`METRALE_KV_TYPE` in the environment: `f32`, `f16`, `bf16`, `q8`): f32 with
// `METRALE_COMPUTE_F32` and for files stored in f32, else half floats.
#define METRALE_KV_DEFAULT 0

// Keys and values are kept as they are computed.
#define METRALE_KV_F32 1

// Keys and values are kept as half floats.
#define METRALE_KV_F16 2

// Keys and values are kept as bfloat16: the bytes of half floats, the range of f32. Not on a GPU.
#define METRALE_KV_BF16 3

// Keys and values are kept in 8 bits, with a scale for each 32 elements of a key and for each value: 0.53 to 0.57 of the bytes of half floats.
// Queries meet keys in 8 bits as well. Not on a GPU, and not for architectures that keep latent, compressed or indexed rows.
#define METRALE_KV_Q8 4

// All layers of the model run on the device, or it is not loaded.
#define METRALE_ALL_LAYERS UINT64_MAX

// Work of the model gives way to the process's other work on the same device, such as drawing: its stream has the least priority the
// device knows. Nothing else changes. On the processor the flag is taken and means nothing: threads are the host's to rank.
#define METRALE_LOAD_LOW_PRIORITY 1

// On a device, a sequence's logits have the same bits alone and in any batch, however its tokens came in calls and steps, and after forks,
// rollbacks and restored states: every sum has one order. That takes longer, prompts several times as long. Bits are those of one device and one
// release of the library. The processor keeps to this in any case.
#define METRALE_LOAD_DETERMINISTIC 2

// The load packs all weights. Otherwise a load that is one call leaves weights of models with more than 32 MiB (or `METRALE_LATE_BYTES` in
// the environment) where they are stored until they are used a second time: the first token comes sooner, the
// second later, and a file that is mapped must stay as it is.
#define METRALE_LOAD_PACKED 4

// Tokens that end generation count as ordinary ones: `metrale_decode_step` never reports this sequence as done.
#define METRALE_SEQ_IGNORE_END 1

// `metrale_decode_step` records the log-probability of the token it chooses; see `metrale_sequence_info`. Costs one
// pass over the row for each token.
#define METRALE_SEQ_LOGPROBS 2

// The library's choice: the last token's row, for models that read from left to right; the mean for encoders.
#define METRALE_POOLING_DEFAULT 0

// A row for each token.
#define METRALE_POOLING_NONE 1

// The last token's row.
#define METRALE_POOLING_LAST 2

// The mean of all rows.
#define METRALE_POOLING_MEAN 3

// The first token's row.
#define METRALE_POOLING_FIRST 4

// Rows are scaled to length 1; one of zeros stays.
#define METRALE_EMBED_NORMALIZE 1

// Keeps only the highest logit; ties go to the lowest id. No field is used.
#define METRALE_STAGE_GREEDY 1

// Divides every logit by `value`, which is at least 0; below 1e-5 it is the greedy stage.
#define METRALE_STAGE_TEMPERATURE 2

// Keeps the `count` highest logits; 0 keeps all.
#define METRALE_STAGE_TOP_K 3

// Keeps the likeliest tokens until their probabilities reach `value` (0 to 1), and at least one.
#define METRALE_STAGE_TOP_P 4

// Keeps tokens at least `value` (0 to 1) times as likely as the likeliest.
#define METRALE_STAGE_MIN_P 5

// For every token among the newest `count` (0: all): divides a positive logit by `value`, multiplies another by it.
#define METRALE_STAGE_REPETITION 6

// For every token among the newest `count` (0: all): subtracts `value` once.
#define METRALE_STAGE_PRESENCE 7

// For every token among the newest `count` (0: all): subtracts `value` times how often it occurs there.
#define METRALE_STAGE_FREQUENCY 8

// Adds `value` to the logit of `token`; minus infinity rules the token out.
#define METRALE_STAGE_BIAS 9

// Locally typical sampling: keeps tokens, those first whose surprise is nearest to the entropy of the row, until their
// probabilities reach `value` (0 to 1), and at least one.
#define METRALE_STAGE_TYPICAL 10

// Top-n-sigma: keeps logits of at least the highest minus `value` standard deviations of the logits that were not ruled out.
#define METRALE_STAGE_TOP_N_SIGMA 11

// Exclude top choices: in a share of `second` (0 to 1) of all draws, of the tokens that are at least `value` (0 to 1) likely
// all but the least likely go. Above 0.5 `value` never finds two.
#define METRALE_STAGE_XTC 12

// Mirostat, first version: keeps as many of the likeliest tokens as make the surprise of the drawn one about `value` bits,
// by an exponent that is estimated from the likeliest `count` (at least 2; 100 is usual), and learns from the error at the
// rate `second` (0.1 is usual). Only as the last stage. Its state belongs to the sequence, like the generator.
#define METRALE_STAGE_MIROSTAT 13

// Mirostat, second version: keeps tokens up to a surprise that follows the drawn ones, so that they come to `value` bits; the
// rate is `second`. Only as the last stage. Its state belongs to the sequence, like the generator.
#define METRALE_STAGE_MIROSTAT_V2 14

// Don't repeat yourself: where a token would make a passage longer that occurs before among the newest `count` tokens (0: all)
// and has `length` (at least 1) or more tokens, subtracts `value` times `second` (at least 1) to the power of the tokens it has
// beyond `length`.
#define METRALE_STAGE_DRY 15

// No passage that a DRY stage of this sampler sees reaches over `token`. Its place does not matter.
#define METRALE_STAGE_DRY_BREAKER 16

// The host's function of `metrale_sampler_set_hook`. No field is used.
#define METRALE_STAGE_HOOK 17

// `metrale_tokenize` puts the tokens around the text that the model was trained to see there.
#define METRALE_TOKENIZE_ADD_SPECIAL 1

// `metrale_tokenize` takes the text of a special token for that token. Leave it out for text from a stranger.
#define METRALE_TOKENIZE_PARSE_SPECIAL 2

// `metrale_detokenize` leaves special tokens out.
#define METRALE_DETOKENIZE_SKIP_SPECIAL 1

// The text stream shows the text of special tokens.
#define METRALE_TEXT_SPECIALS 1

// The text stream gives bytes as they are, without waiting for whole characters.
#define METRALE_TEXT_RAW_BYTES 2

// `METRALE_LOG_INFO`.
#define METRALE_LOG_DEFAULT 0

// The reason of each error that a call returns.
#define METRALE_LOG_ERROR 1

// What works less well than it should.
#define METRALE_LOG_WARNING 2

// What is being done, such as the phases of a load.
#define METRALE_LOG_INFO 3

// For developers of the library.
#define METRALE_LOG_DEBUG 4

// The runtime makes threads of its own, `threads - 1` but no more than there are further processors, which all its models
// share. Lent ones help as well.
#define METRALE_WORKERS_OWN 0

// The runtime makes no thread: the calling one computes, and those of `metrale_runtime_run_worker`.
#define METRALE_WORKERS_LENT 1

// The runtime makes no thread: `parallel_for` runs everything.
#define METRALE_WORKERS_HOST 2

// The processor.
#define METRALE_DEVICE_CPU 1

// An NVIDIA device.
#define METRALE_DEVICE_CUDA 2

// The shape of this header: the upper 16 bits change when old hosts stop working, the lower when something is added.
#define METRALE_ABI_VERSION 65536

// Scores are sums of log-probabilities, whatever the length.
#define METRALE_BEAM_PLAIN_SCORE 1

// An error object, made by a call that failed. Free it with `metrale_error_free`.
typedef struct metrale_error metrale_error;

// A compiled grammar: immutable, may serve any number of sequences of its model.
typedef struct metrale_grammar metrale_grammar;

// A model that is being loaded, a little with each `metrale_load_step`.
typedef struct metrale_loading metrale_loading;

// A loaded model: immutable, shared by its sequences, safe to use from any number of threads at once.
typedef struct metrale_model metrale_model;

// What a host lends models: an allocator, a limit of memory, a log, threads. Models that name none use the system's memory and
// threads of their own.
typedef struct metrale_runtime metrale_runtime;

// A recipe for choosing tokens; may serve any number of sequences, each of which takes a copy.
typedef struct metrale_sampler metrale_sampler;

// One timeline of tokens with its cache, recurrent state and sampler. One call at a time may change it; a second
// one gets `METRALE_BUSY`.
typedef struct metrale_seq metrale_seq;

// Where a model's bytes come from: immutable, may be loaded any number of times.
typedef struct metrale_source metrale_source;

// Turns one sequence's tokens into text that is whole UTF-8 at every moment.
typedef struct metrale_text metrale_text;

// Result of a call: 0 is success, positive values are information (outputs are as each one says), negative values
// are errors, after which nothing has changed and no output was written. A later library may return codes that
// this header does not name; their sign still tells.
typedef int32_t metrale_status;

// What a device is. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_device)` as the host was compiled.
    size_t struct_size;
    // `METRALE_DEVICE_*`.
    uint32_t kind;
    // Processors the calling thread may use, by its affinity mask and control groups; of an NVIDIA device its multiprocessors.
    uint32_t threads;
    // Bytes this process may take in all; 0 where the system does not say. Of an NVIDIA device its memory.
    uint64_t memory_total;
    // Bytes it may still take.
    uint64_t memory_free;
    // The maker's name of the device: NUL-terminated, lives as long as the library, as the next ones do.
    const char *name;
    // The kernels in use: `"scalar"`, `"avx2"` or `"avx512"`; of an NVIDIA device the architecture they are made for: `"sm_90a"`.
    const char *kernels;
    // Instruction sets found, parted by spaces: `"avx2 fma f16c"`. Empty for a processor without any that are used, and
    // for other devices.
    const char *instruction_sets;
} metrale_device;

// Gives `size` bytes, at least 1, at a multiple of `align`, a power of two; NULL when there are none, which ends the
// call in `METRALE_OUT_OF_MEMORY`. Called on any thread, also on several at once, during calls on the runtime's objects
// and on threads of its models. It calls no function of this library, and it returns: no exception and no `longjmp`
// leaves it.
typedef void *(*metrale_alloc_fn)(void *user, size_t size, size_t align);

// Takes back what `metrale_alloc_fn` gave for this `size` and `align`. Otherwise as that.
typedef void (*metrale_free_fn)(void *user, void *pointer, size_t size, size_t align);

// Gets a log record: its level (`METRALE_LOG_*`), the status of the call that failed (`METRALE_OK` where none did), and
// `len` bytes of UTF-8 without a NUL or line end, which live during the call. Called on the thread that has something
// to say, on several at once where several have; nothing is recorded of what the function itself does with this
// library. It returns: no exception and no `longjmp` leaves it.
typedef void (*metrale_log_fn)(void *user, uint32_t level, metrale_status status, const uint8_t *text, size_t len);

// A piece of work that `metrale_parallel_for_fn` gets. May be called on any thread.
typedef void (*metrale_body_fn)(void *arg, size_t index);

// Calls `body(arg, i)` once for each `i` below `count`, and returns when all calls have returned. They may run on any
// threads, the calling one included, at the same time or one after another; the result is the same. So every body must
// get its turn without waiting for this library's calls on other threads: if they only run on threads that may be
// inside such calls, nothing goes on. While it waits, the calling thread may do other work, but computing with a model
// there is `METRALE_BUSY`. A body that is left out or called twice is an error of the call that computes
// (`METRALE_INVALID_ARGUMENT`, `"parallel_for"`); one that is called later, or with another `arg`, does nothing.
// Called by every step and load, on its thread. It returns: no exception and no `longjmp` leaves it.
typedef void (*metrale_parallel_for_fn)(void *user, size_t count, metrale_body_fn body, void *arg);

// How to make a runtime. Zero is the default of every field.
typedef struct {
    // `sizeof(metrale_runtime_options)` as the host was compiled.
    size_t struct_size;
    // No flag exists yet.
    uint64_t flags;
    // Where memory comes from, or NULL with `free` for the system's.
    metrale_alloc_fn alloc;
    // Where it goes back.
    metrale_free_fn free;
    // Handed to `alloc` and `free`.
    void *alloc_user;
    // Most bytes that may be taken at once; 0 for no limit. What would pass it is `METRALE_OUT_OF_MEMORY`.
    uint64_t memory_cap;
    // Where log records go, or NULL; `metrale_runtime_log_set` changes it.
    metrale_log_fn log;
    // Handed to `log`.
    void *log_user;
    // `METRALE_LOG_*`: the last level that is recorded.
    uint32_t log_level;
    // `METRALE_WORKERS_*`: whose threads compute.
    uint32_t workers;
    // Most threads of one computation, the calling one included; 0 takes the processors this process may use.
    uint32_t threads;
    // Must be zero.
    uint32_t reserved;
    // With `METRALE_WORKERS_HOST`, and NULL otherwise: the host's job system. `threads` is the count it gets.
    metrale_parallel_for_fn parallel_for;
    // Handed to `parallel_for`.
    void *parallel_user;
} metrale_runtime_options;

// Bytes that a runtime has taken of its allocator. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_memory_usage)` as the host was compiled.
    size_t struct_size;
    // Bytes taken and not given back.
    uint64_t live;
    // The most that were ever live.
    uint64_t peak;
    // The limit; 0 for none.
    uint64_t cap;
    // Of the live bytes: packed weights.
    uint64_t weights;
    // Of the live bytes: pages of caches and recurrent states.
    uint64_t cache;
    // The rest of the live bytes.
    uint64_t other;
} metrale_memory_usage;

// Called while a model loads, on the thread that loads. Both numbers are those of the phase; `total_bytes` is 0 while
// it is not known. `phase` is a short word, valid during the call: `"reading"` (a source that is not mapped), `"kernels"` (a
// GPU's), `"tokenizer"`, `"weights"`, `"done"`. A result other than 0 cancels the load (`METRALE_CANCELLED`), the last call's as well.
// The function must return: no exception and no `longjmp` may leave it.
typedef int32_t (*metrale_progress_fn)(void *user, uint64_t done_bytes, uint64_t total_bytes, const char *phase);

// How to load a model. Set `struct_size` to `sizeof(metrale_load_options)` and the rest to zero, then change what
// matters: zero is the default of every field.
typedef struct {
    // `sizeof(metrale_load_options)` as the host was compiled.
    size_t struct_size;
    // `METRALE_LOAD_*`, or-ed.
    uint64_t flags;
    // Most threads that compute, the caller's included; 0 takes the processors this process may use, or what the runtime
    // has. The library starts no more than there are processors, and with a runtime no other than the runtime's.
    uint32_t threads;
    // `METRALE_COMPUTE_*`.
    uint32_t compute;
    // Most tokens one sequence may hold; 0 takes the model's own limit, capped at 4,096.
    uint64_t context;
    // Called during the load, or NULL.
    metrale_progress_fn progress;
    // Handed to `progress`.
    void *user;
    // For timing: fills the shapes of the model's configuration with random weights of this type (`"Q8_0"`,
    // `"BF16"`, `"Q4_K_M"`, ...) and reads no tensor. NULL loads the real ones. Copied.
    const char *synthetic;
    // Seed of the random weights.
    uint64_t synthetic_seed;
    // The runtime that the model and all that is made of it belong to, which they keep; NULL for none: the system's
    // memory, uncounted.
    const metrale_runtime *runtime;
    // Most bytes the plan of the model with one sequence may take; 0 takes what the machine has free. A plan beyond it
    // is `METRALE_OUT_OF_MEMORY` before weights are read, with the bytes wanted and available.
    uint64_t memory;
    // Leaves routed experts in their file and keeps at most this many bytes of them packed, those met most often; 0
    // takes `METRALE_EXPERT_BYTES` from the environment, else packs all of them at load. With a device they are the processor's to compute, as
    // if `host_experts` said all.
    uint64_t expert_bytes;
    // Types that matrices are multiplied in where they are to differ from the file's: rules `<where>=<type>` parted by
    // commas, `"layers.0-3.mlp=f32,head=bf16"`. NULL takes `METRALE_PRECISION` from the environment. Copied.
    const char *precision;
    // Most bytes that the model keeps of its sequences' beginnings, so that a prompt that begins like an earlier one is computed only from
    // where they part. 0 keeps nothing: memory that a host did not grant is not taken. It is counted in the plan's `kv`.
    // Kept are the keys and values and the recurrent state of prompts of 16 tokens and more once they are read, and of every sequence
    // when it is freed; what was used longest ago gives way. Logits are the same bits as without. `METRALE_UNSUPPORTED` for
    // models that translate.
    uint64_t prefix_bytes;
    // The device that computes, as `metrale_device_info` numbers them; 0 is the processor. `METRALE_NOT_FOUND` or
    // `METRALE_DEVICE_UNSUPPORTED`, before weights are read, where it cannot be used, and `METRALE_UNSUPPORTED` where it has no code for an
    // operation of the model. On an NVIDIA device the order of a sum depends on how many rows are computed together: what this header calls the
    // same bits holds for the processor, and there up to the last ones, unless `flags` has `METRALE_LOAD_DETERMINISTIC`.
    uint32_t device;
    // What keys and values are kept in: `METRALE_KV_*`. `METRALE_UNSUPPORTED`, before weights are read, where the device or the architecture does
    // not have it. Bits are the same for any threads, batch and chunk, whatever it is; states saved by a model loaded with another type are
    // refused with `METRALE_MISMATCH`.
    uint32_t kv_type;
    // Most bytes of that device the plan of the model with one sequence may take; 0 takes what it has free. For the processor, `memory` is
    // the cap.
    uint64_t device_bytes;
    // Layers that the device runs: the last so many, and what follows them; the others, and the embeddings, stay on the processor, each
    // layer with its keys and values and its state. 0 takes as many as `device_bytes` hold, the whole model where that fits, else all of it but
    // experts (`host_experts`) where that does, and at the least what follows the last layer; `metrale_plan` tells how many those are. Other numbers are taken as they are: the model's layers or more
    // (`METRALE_ALL_LAYERS`) are all of the model. `METRALE_OUT_OF_MEMORY`, before weights are read, with the bytes wanted and available, where
    // that does not fit, and `METRALE_UNSUPPORTED` where the model cannot be cut there, because a later layer reads what an earlier one keeps.
    uint64_t device_layers;
    // Of the layers with experts that the device runs, the first so many whose experts stay on the processor, which computes them while the
    // device waits; all else of such a layer, its keys and values among it, is the device's. More than there are, or `METRALE_ALL_LAYERS`, are
    // all. 0 is as few as `device_bytes` require where `device_layers` is 0, and none where that is a number.
    uint64_t host_experts;
} metrale_load_options;

// Bytes that a model and its sequences take, by purpose. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_memory_plan)` as the host was compiled.
    size_t struct_size;
    // Weights as they are held in memory.
    uint64_t weights;
    // Key/value caches of all planned sequences.
    uint64_t kv;
    // Recurrent state of all planned sequences.
    uint64_t state;
    // Workspace of a step.
    uint64_t scratch;
    // Everything else: tokenizer, tables, rows of logits, buffers.
    uint64_t other;
    // The sum of the host's fields.
    uint64_t total;
    // Bytes of files that were read or copied and stay in memory with the model (`METRALE_SOURCE_READ`,
    // `METRALE_SOURCE_COPY`, `metrale_source_reader`).
    uint64_t source;
    // Bytes of the device that computes, where that is not the processor: weights. The fields above then count the host's bytes alone.
    uint64_t device_weights;
    // Key/value caches there.
    uint64_t device_kv;
    // Recurrent state and rows of logits there.
    uint64_t device_state;
    // Workspaces there.
    uint64_t device_scratch;
    // The sum of the four.
    uint64_t device_total;
    // Layers that run there: the last so many, and what follows the last one. The others run on the processor, whose bytes are the host's.
    uint64_t device_layers;
    // Of those with experts, the first so many whose experts stay on the processor.
    uint64_t host_experts;
} metrale_memory_plan;

// Fills `len` bytes at `into` with a source's bytes from `offset` on, and returns how many it filled. Everything but
// `len` is a failure and ends the load with `METRALE_IO`: a negative number, or fewer. `offset + len` is never more
// than the length given to `metrale_source_reader`. Called in order, each byte once for each load, only inside the
// functions that load and on their thread. The function must return: no exception and no `longjmp` may leave it.
typedef int64_t (*metrale_read_at_fn)(void *user, uint64_t offset, void *into, size_t len);

// How far a load is. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_load_progress)` as the host was compiled.
    size_t struct_size;
    // Bytes of this phase done so far.
    uint64_t done_bytes;
    // Bytes of this phase in all; 0 while that is not known.
    uint64_t total_bytes;
    // `"reading"`, `"tokenizer"`, `"weights"` or `"done"`: NUL-terminated, lives as long as the library.
    const char *phase;
} metrale_load_progress;

// A token id. Negative values are never ids.
typedef int32_t metrale_token;

// How to turn tokens into text. Zero is the default of every field.
typedef struct {
    // `sizeof(metrale_text_options)` as the host was compiled.
    size_t struct_size;
    // `METRALE_TEXT_*`, or-ed.
    uint64_t flags;
    // Stop strings, one after the other with a NUL byte between them: `"\nUser:\0###"`. Copied.
    const uint8_t *stops;
    // Bytes at `stops`; 0 for no stop string.
    size_t stops_len;
} metrale_text_options;

// A piece of text, filled by `metrale_text_push` and `metrale_text_flush`. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_text_piece)` as the host was compiled.
    size_t struct_size;
    // The bytes, not terminated; UTF-8 unless `METRALE_TEXT_RAW_BYTES`. They belong to the stream.
    const uint8_t *bytes;
    // How many.
    size_t len;
    // The tokens that the bytes came from, counted from the stream's first push: this one ...
    uint64_t first_token;
    // ... up to, and without, this one. Both are 0 when there are no bytes.
    uint64_t end_token;
    // Index of the stop string that was reached, which is not part of the bytes; -1 for none.
    int64_t stop;
} metrale_text_piece;

// One stage of a sampler. This struct never grows; fields that its stage does not use must be zero.
typedef struct {
    // `METRALE_STAGE_*`.
    uint32_t kind;
    // A count or window.
    uint32_t count;
    // A token.
    metrale_token token;
    // The stage's number.
    float value;
    // Its second number.
    float second;
    // A length in tokens.
    uint32_t length;
    // Must be zero.
    uint32_t reserved[2];
} metrale_sampler_stage;

// Called where `METRALE_STAGE_HOOK` stands among a sampler's stages, on the thread that steps, once for each token to be
// chosen. `logits` are `count` floats, one for each token: what earlier stages made of them, minus infinity for a token that
// they or the sequence's grammar ruled out; it may change them. A token that was ruled out stays so, whatever is written;
// minus infinity rules one out; NaN and infinity end the step with `METRALE_NUMERIC_FAULT`. `history` are the sequence's
// `history_count` tokens, prompt included. Both pointers are valid during the call. `user` is the host's.
//
// Returns 0, or any other number to fail: the sequence is then as before, its status is the number if that is an error of
// this header, else `METRALE_CANCELLED`, and other sequences of a `metrale_step` go on. The function must return: no
// exception and no `longjmp` may leave it. What it does may depend on its arguments only: where a step leaves off in the
// middle it is called again, and must come to the same. It may look at other sequences and work on them, but not call
// `metrale_step` (`METRALE_INVALID_STATE`); the sequence it is called for is `METRALE_BUSY`.
typedef int32_t (*metrale_hook_fn)(void *user,
                                   float *logits,
                                   size_t count,
                                   const metrale_token *history,
                                   size_t history_count);

// How to make a sequence. Zero is the default of every field.
typedef struct {
    // `sizeof(metrale_seq_options)` as the host was compiled.
    size_t struct_size;
    // `METRALE_SEQ_*`, or-ed.
    uint64_t flags;
    // Most tokens the sequence may hold; 0 takes the model's context. More than that is refused.
    uint64_t context;
    // How tokens are chosen; NULL is greedy. Copied: the sampler may be freed afterwards.
    const metrale_sampler *sampler;
    // Replaces the sampler's seed unless 0, so that one sampler can serve many sequences.
    uint64_t seed;
} metrale_seq_options;

// What a sequence is at the moment. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_sequence_info)` as the host was compiled.
    size_t struct_size;
    // Tokens it holds.
    uint64_t length;
    // Most tokens it may hold.
    uint64_t capacity;
    // The newest token; -1 when there is none.
    metrale_token last_token;
    // Natural logarithm of the probability that the model gave to the newest token `metrale_decode_step` chose,
    // before any sampler stage; NaN without `METRALE_SEQ_LOGPROBS` or before the first step.
    float last_logprob;
} metrale_sequence_info;

// How to search. Zeros are defaults.
typedef struct {
    // `sizeof(metrale_beam_options)` as the host was compiled.
    size_t struct_size;
    // Continuations kept at each step; 0 means 5, at most 1024.
    uint64_t beams;
    // Most tokens of a continuation; 0 means what the sequence has room for.
    uint64_t max_tokens;
    // Power of the length that scores are divided by; more favours long continuations. 0 means 1; for none at all set
    // `METRALE_BEAM_PLAIN_SCORE`.
    float length_penalty;
    // `METRALE_BEAM_*`, or-ed.
    uint32_t flags;
} metrale_beam_options;

// What `metrale_step` did for one sequence. Set `struct_size` of each before the call.
typedef struct {
    // `sizeof(metrale_step_result)` as the host was compiled; the same in all of an array.
    size_t struct_size;
    // `METRALE_OK`: its queue is read, or a token is produced. `METRALE_DONE`: a token that ends generation is produced.
    // `METRALE_AGAIN`: the budget ran out, step again. Negative: why the sequence cannot go on (`METRALE_CONTEXT_FULL`,
    // `METRALE_INVALID_STATE` without any token, `METRALE_NUMERIC_FAULT`, `METRALE_NO_VALID_TOKEN`) or that its work was
    // cancelled (`METRALE_CANCELLED`); what `read` counts was done before that and stays.
    metrale_status status;
    // The token that was produced and appended; -1 for none.
    metrale_token token;
    // Tokens this call read from the queue and appended.
    uint64_t read;
    // Tokens that still wait in the queue.
    uint64_t queued;
} metrale_step_result;

// How to embed. Zero is the default of every field.
typedef struct {
    // `sizeof(metrale_embed_options)` as the host was compiled.
    size_t struct_size;
    // `METRALE_EMBED_*`, or-ed.
    uint64_t flags;
    // `METRALE_POOLING_*`.
    uint32_t pooling;
    // Must be zero.
    uint32_t reserved;
} metrale_embed_options;

// What a sequence has done since it was made, and the memory it holds. A fork starts at zero. Calls that fail are not counted, but for
// `cancelled`. Set `struct_size` before the call.
typedef struct {
    // `sizeof(metrale_stats)` as the host was compiled.
    size_t struct_size;
    // Tokens of prompts it has taken (`metrale_prefill`, `metrale_seq_feed`), the reused ones included.
    uint64_t read;
    // Those of them that were not computed, because the model had kept them (`metrale_load_options.prefix_bytes`).
    uint64_t reused;
    // Tokens that were produced (`metrale_decode_step`, `metrale_decode`, `metrale_step`).
    uint64_t generated;
    // Passes through the model that it took part in.
    uint64_t passes;
    // Calls and steps that a cancel ended.
    uint64_t cancelled;
    // Nanoseconds of passes over prompts; one shared with other sequences counts in full for each.
    uint64_t prefill_ns;
    // Nanoseconds of passes over produced tokens; as above.
    uint64_t decode_ns;
    // Bytes of keys and values that no other sequence and no prefix shares.
    uint64_t kv_owned;
    // Bytes of keys and values shared with forks or kept prefixes; the next write to a page makes it the sequence's own. Right after
    // `metrale_seq_fork` this is what the fork saved.
    uint64_t kv_shared;
    // Bytes of recurrent state and rows of logits, those of marks included, that nobody shares.
    uint64_t state_owned;
    // Such bytes that forks or kept prefixes share.
    uint64_t state_shared;
} metrale_stats;

// What a model keeps for prompts that begin alike (`metrale_load_options.prefix_bytes`); all zero without. Set `struct_size` before the
// call.
typedef struct {
    // `sizeof(metrale_model_counts)` as the host was compiled.
    size_t struct_size;
    // Bytes that may be kept.
    uint64_t prefix_budget;
    // Bytes that are kept now: pages, states and lists, also where a sequence still shares them. Never more than the budget.
    uint64_t prefix_bytes;
    // Pieces of prompts that are kept.
    uint64_t prefix_entries;
    // Tokens of these pieces.
    uint64_t prefix_tokens;
    // Prompts that found a beginning to take up.
    uint64_t prefix_hits;
    // Prompts that found none.
    uint64_t prefix_misses;
    // Tokens that did not have to be computed.
    uint64_t prefix_reused;
    // Pieces and states that gave way to others.
    uint64_t prefix_evicted;
} metrale_model_counts;

// Success.
#define METRALE_OK 0

// The buffer is too small. The needed size was written to the size output, and nothing else.
#define METRALE_MORE 1

// Success, and there is nothing left to do: every sequence of the call has just produced a token that ends generation, or
// what was to be cancelled had finished before.
#define METRALE_DONE 2

// Nothing wrong, nothing done yet: call again.
#define METRALE_AGAIN 3

// An argument is NULL, misaligned, out of range or contradicts another one.
#define METRALE_INVALID_ARGUMENT -1

// A handle is NULL, was freed, or belongs to another kind of object.
#define METRALE_INVALID_HANDLE -2

// The call does not fit the state of its object, such as a decode step before any token.
#define METRALE_INVALID_STATE -3

// A token id lies outside the vocabulary.
#define METRALE_INVALID_TOKEN -4

// The sequence would hold more tokens than its context allows; `available` says how many still fit.
#define METRALE_CONTEXT_FULL -5

// An allocation failed or a memory cap would be passed.
#define METRALE_OUT_OF_MEMORY -6

// A file, folder or key does not exist.
#define METRALE_NOT_FOUND -7

// The operating system refused to read something.
#define METRALE_IO -8

// The file is not a model at all.
#define METRALE_NOT_A_MODEL -9

// The file says it is a model but contradicts itself or is cut short.
#define METRALE_CORRUPT_FILE -10

// The request is sound, but this build does not do it.
#define METRALE_UNSUPPORTED -11

// Two parts that must agree do not.
#define METRALE_MISMATCH -12

// A size is beyond what can be handled.
#define METRALE_TOO_LARGE -13

// A limit that protects the host was reached (depth, time, size).
#define METRALE_LIMIT_EXCEEDED -14

// An option, key or flag is not known.
#define METRALE_UNKNOWN_OPTION -15

// The chat template failed; the text is the template's own.
#define METRALE_TEMPLATE -16

// A grammar or schema is malformed.
#define METRALE_INVALID_GRAMMAR -17

// The host asked to stop.
#define METRALE_CANCELLED -18

// Logits are NaN, infinite or all minus infinity.
#define METRALE_NUMERIC_FAULT -19

// The sampler or the grammar leaves no token to choose.
#define METRALE_NO_VALID_TOKEN -20

// Another call is using the object right now.
#define METRALE_BUSY -21

// The header the host was compiled with does not fit this library.
#define METRALE_VERSION_MISMATCH -22

// The processor or device cannot run this build.
#define METRALE_DEVICE_UNSUPPORTED -23

// The device stopped answering; only frees work now.
#define METRALE_DEVICE_LOST -24

// A defect of this library; the message is worth a bug report.
#define METRALE_INTERNAL -25

// The sequence's grammar has been followed to its end and allows nothing more.
#define METRALE_GRAMMAR_DONE -26

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, such as `"0.1.0"`. Static. Any thread.
const char *metrale_version_string(void);

// The library's version as `major << 16 | minor << 8 | patch`. Any thread.
uint32_t metrale_version_number(void);

// Whether a host compiled with this header can use this library: pass `METRALE_ABI_VERSION`. Worth calling first.
// `METRALE_VERSION_MISMATCH` when it cannot. Any thread.
//
// Statuses: `METRALE_VERSION_MISMATCH` with both versions in `wanted` and `available`.
metrale_status metrale_check_abi(uint32_t header_version, metrale_error **err);

// How the library was built and what it found on this machine, as a JSON object: `version`, `abi`, `target`,
// `profile`, `features`, `cpu` (instruction sets present). Static. Any thread.
const char *metrale_build_info(void);

// The name of a status constant, such as `"METRALE_BUSY"`; `"METRALE_UNKNOWN"` for a number that is none. Static.
// Any thread.
const char *metrale_status_name(metrale_status status);

// The status of the call that made the error. NULL is `METRALE_OK`, a handle that is none
// `METRALE_INVALID_HANDLE`. Any thread.
metrale_status metrale_error_code(const metrale_error *err);

// What went wrong, what was expected and what helps, in English UTF-8. Never NULL: an empty string for NULL, a fixed
// text for a handle that is none. The string lives until `metrale_error_free`. Any thread.
const char *metrale_error_message(const metrale_error *err);

// The whole error as one JSON object: `code`, `status`, `message`, `name`, `offset`, `wanted`, `available`, `retry`;
// what does not apply is `null`. Never NULL: `{}` for NULL and for a handle that is none. The string lives until
// `metrale_error_free`. Any thread.
const char *metrale_error_detail(const metrale_error *err);

// The option, key, file or tensor that the error is about; NULL when there is none. The string lives until
// `metrale_error_free`. Any thread.
const char *metrale_error_name(const metrale_error *err);

// Writes the byte offset in a file, or the index in an array, that the error is about, and returns true. Returns
// false and writes nothing when there is none. Any thread.
bool metrale_error_offset(const metrale_error *err, uint64_t *out);

// Writes how much was asked for, in the unit the message names, and returns true. Returns false and writes nothing
// when the error is not about an amount. Any thread.
bool metrale_error_wanted(const metrale_error *err, uint64_t *out);

// Writes how much there is, in the unit the message names, and returns true. Returns false and writes nothing when
// the error is not about an amount. Any thread.
bool metrale_error_available(const metrale_error *err, uint64_t *out);

// Whether the same call may succeed later without a change by the host (memory freed, another call finished). Any
// thread.
bool metrale_error_retry(const metrale_error *err);

// Frees an error and ends the life of its strings. NULL and handles that are none are ignored. Any thread.
void metrale_error_free(metrale_error *err);

// Number of devices that models can run on; at least 1, since device 0 is the processor. Others are NVIDIA devices, for which the first call
// looks for a driver: `libcuda.so.1` is opened where it is installed. Any thread.
size_t metrale_device_count(void);

// Fills `*out`, whose `struct_size` must be set, with what device `index` is, and what it has free at the moment. For an NVIDIA device that
// takes a context on it for as long as the call. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_NOT_FOUND` (there is no device of this index; the message says why there is no NVIDIA
// device), `METRALE_DEVICE_LOST`, `METRALE_DEVICE_UNSUPPORTED` (it is there, and too old).
metrale_status metrale_device_info(size_t index,
                                   metrale_device *out,
                                   metrale_error **err);

// Makes a runtime: an allocator, a limit of memory, a place for log records and threads, for the models that are loaded
// with it (`metrale_load_options.runtime`) and all that is made of them. `options` may be NULL: the system's memory,
// counted, and own threads for all processors, which start with the first load. On success `*out` is a handle for
// `metrale_runtime_free`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (one of `alloc` and `free` without the other, `parallel_for` without
// `METRALE_WORKERS_HOST` or the other way round), `METRALE_UNKNOWN_OPTION`, `METRALE_TOO_LARGE` (more than 1,024
// threads), `METRALE_OUT_OF_MEMORY`, `METRALE_UNSUPPORTED` (an allocator, in a build whose memory is not the library's
// to direct).
metrale_status metrale_runtime_new(const metrale_runtime_options *options, metrale_runtime **out, metrale_error **err);

// Gives up a runtime. Models loaded with it, and all that was made of them, keep it: the host's functions may be called
// until the last of those, and of the errors their calls returned, is freed and no call is running. Lent threads go home
// now, own ones end with the last model. NULL and handles that are none are ignored. Any thread.
void metrale_runtime_free(metrale_runtime *runtime);

// Fills `*out`, whose `struct_size` must be set, with what the runtime has taken of its allocator. Model files that are
// mapped and stacks of threads are not counted. Any thread.
//
// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_INVALID_ARGUMENT`.
metrale_status metrale_runtime_memory(const metrale_runtime *runtime, metrale_memory_usage *out, metrale_error **err);

// Gives memory back that nothing needs now: pages of caches and recurrent states that no sequence holds, prompts kept for
// later ones (`prefix_bytes`), experts that can be read again, and what the system's allocator keeps for later. Sequences go on as if nothing had happened; the
// next ones pay for the memory anew. Any thread.
//
// Statuses: only `METRALE_INVALID_HANDLE`.
metrale_status metrale_runtime_trim(metrale_runtime *runtime,
                                    metrale_error **err);

// Changes where the runtime's log records go, and up to which level (`METRALE_LOG_*`; 0 is `METRALE_LOG_INFO`). NULL for
// `log` is silence, as at first. A record that is being written on another thread may still reach the function that was
// set before. Any thread.
//
// Statuses: `METRALE_UNKNOWN_OPTION` (there is no such level).
metrale_status metrale_runtime_log_set(metrale_runtime *runtime,
                                       uint32_t level,
                                       metrale_log_fn log,
                                       void *user,
                                       metrale_error **err);

// Lends the calling thread to the runtime: it helps whatever is computed with the runtime's models, sleeps when there is
// nothing to do, and returns when `metrale_runtime_release_workers` is called (`METRALE_OK`) or the runtime's handle is
// freed (`METRALE_DONE`). In the middle of a step it leaves when its piece of work is done, some microseconds to
// milliseconds later. Results do not depend on who helps. Any number of threads may be lent; those beyond the number of
// processors sleep. 64 KiB of stack are enough. Any thread.
//
// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_INVALID_STATE` (the runtime uses `parallel_for`), `METRALE_BUSY` (called
// by a thread that is inside another call).
metrale_status metrale_runtime_run_worker(const metrale_runtime *runtime,
                                          metrale_error **err);

// Sends all lent threads home: every `metrale_runtime_run_worker` that is under way returns soon, and this call does not
// wait for it. What is being computed goes on without them. Threads may be lent again afterwards, so one that was about to
// be lent at this moment stays; freeing the runtime takes care of those. Any thread.
//
// Statuses: only `METRALE_INVALID_HANDLE`.
metrale_status metrale_runtime_release_workers(const metrale_runtime *runtime,
                                               metrale_error **err);

// What a model file or folder holds, from its headers alone, as a JSON object: `format`, `model_type`, `parameters`,
// `bytes`, `context`, `vocab`, `tensors` and more. The text, without a NUL, goes to `out` and its length to
// `*out_len`; when `capacity` is too small, only `*out_len` is written and the status is `METRALE_MORE`. Any thread.
//
// Statuses: as for `metrale_load`.
metrale_status metrale_model_probe(const char *path,
                                   uint8_t *out,
                                   size_t capacity,
                                   size_t *out_len,
                                   metrale_error **err);

// As `metrale_model_probe`, of a source. Of what a host's function reads only the headers are asked for, a few megabytes,
// by calls of this function and on its thread. Any thread.
//
// Statuses: as for `metrale_load_source`.
metrale_status metrale_source_probe(const metrale_source *source,
                                    uint8_t *out,
                                    size_t capacity,
                                    size_t *out_len,
                                    metrale_error **err);

// Bytes that loading this model with these options and making `sequences` sequences of its full context would take.
// Reads headers, no weights. The plan is met within 5 % (and 1 MiB, which matters for models of toy size) and not
// exceeded; mapped files, which the system can drop at any time, and grammars are not in it. `options` may be NULL; its callback is not used. `out->struct_size` must be set. Any
// thread.
//
// Statuses: as for `metrale_load`.
metrale_status metrale_plan(const char *path,
                            const metrale_load_options *options,
                            size_t sequences,
                            metrale_memory_plan *out,
                            metrale_error **err);

// As `metrale_plan`, of a source: its read or copied bytes are among those planned. Any thread.
//
// Statuses: as for `metrale_load_source`.
metrale_status metrale_source_plan(const metrale_source *source,
                                   const metrale_load_options *options,
                                   size_t sequences,
                                   metrale_memory_plan *out,
                                   metrale_error **err);

// A GGUF file (of a split one the first part) or a folder with `config.json`, as for `metrale_load`. `path` is
// NUL-terminated, in the system's encoding, and copied. `flags` is 0, which maps files, or `METRALE_SOURCE_READ`; a
// folder's files and those of a split model are then read in one step of the load. On success `*out` is a handle for
// `metrale_source_free`. What the path leads to is looked at when it is loaded. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`; with `METRALE_SOURCE_READ` also `METRALE_NOT_FOUND`,
// `METRALE_IO`, `METRALE_NOT_A_MODEL`.
metrale_status metrale_source_path(const char *path, uint64_t flags, metrale_source **out, metrale_error **err);

// One whole file in memory, at any address: a GGUF file, or a file of a folder. With `flags` 0 nothing is copied: the `len` bytes must stay, and stay
// the same, until the source, its loads, and the models made from it with all their sequences are gone. With
// `METRALE_SOURCE_COPY` they are copied at once. On success `*out` is a handle for `metrale_source_free`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_source_buffer(const uint8_t *bytes,
                                     size_t len,
                                     uint64_t flags,
                                     metrale_source **out,
                                     metrale_error **err);

// One whole file (GGUF, or of a folder) inside an open regular file: `len` bytes from `offset` on, or all from there with `len` 0.
// `offset` may be any number, so that a model can lie inside a container. `fd` is duplicated: the host may close it at
// once, and its position is neither used nor moved. `flags` is 0, which maps the bytes, or `METRALE_SOURCE_READ`. On
// success `*out` is a handle for `metrale_source_free`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (no open file), `METRALE_UNKNOWN_OPTION`, `METRALE_NOT_A_MODEL` (a pipe, a device,
// a directory), `METRALE_CORRUPT_FILE` (the file ends earlier), `METRALE_IO`, `METRALE_UNSUPPORTED` (not on this system).
//
// A file that somebody else shortens while its bytes are mapped ends the process with SIGBUS.
metrale_status metrale_source_fd(int32_t fd,
                                 uint64_t offset,
                                 uint64_t len,
                                 uint64_t flags,
                                 metrale_source **out,
                                 metrale_error **err);

// One whole file (GGUF, or of a folder) of `len` bytes that the host reads: see `metrale_read_at_fn` for what `read_at` has to do. Its
// bytes stay in memory as long as a model made from them. `user` is handed to `read_at` and must stay valid until the
// source and its loads are gone; a finished model needs neither. Loads of one source on several threads call `read_at`
// on several threads. `flags` must be 0. On success `*out` is a handle for `metrale_source_free`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`.
metrale_status metrale_source_reader(metrale_read_at_fn read_at,
                                     void *user,
                                     uint64_t len,
                                     uint64_t flags,
                                     metrale_source **out,
                                     metrale_error **err);

// A folder without files, which `metrale_source_add` fills: what a checkpoint of several files is loaded from where they do
// not lie in a directory. `flags` must be 0. On success `*out` is a handle for `metrale_source_free`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`.
metrale_status metrale_source_folder(uint64_t flags,
                                     metrale_source **out,
                                     metrale_error **err);

// Puts `part` into `folder` under the name that its file has in a directory: `config.json`, `tokenizer.json`,
// `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`, `model.safetensors`, or
// `model.safetensors.index.json` and all that it names; or the one `.gguf` file, or all parts of a split one. `name` is
// NUL-terminated UTF-8 and copied; `part` is any source but a folder, of any file (a path then is the file's own), may be
// put into several folders, and may be freed at once. What loads have begun with stays as it was. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (no folder, no file name, or a name that is there), `METRALE_INVALID_HANDLE`,
// `METRALE_LIMIT_EXCEEDED` (4,096 parts), `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_source_add(metrale_source *folder,
                                  const char *name,
                                  const metrale_source *part,
                                  metrale_error **err);

// Gives up a source. Loads that have begun and models made from it go on. NULL and handles that are none are ignored.
// Any thread.
void metrale_source_free(metrale_source *source);

// Loads a model from a GGUF file or a folder with `config.json`. `path` is NUL-terminated, in the system's encoding;
// `options` may be NULL. On success `*out` is a handle for `metrale_free`. Blocks until the model is ready; the
// progress callback can cancel. Any thread; several loads may run at once.
//
// Statuses: `METRALE_NOT_FOUND`, `METRALE_IO`, `METRALE_NOT_A_MODEL`, `METRALE_CORRUPT_FILE`, `METRALE_UNSUPPORTED`,
// `METRALE_MISMATCH`, `METRALE_OUT_OF_MEMORY`, `METRALE_CANCELLED`, `METRALE_UNKNOWN_OPTION`; with another device than the processor also
// `METRALE_DEVICE_UNSUPPORTED` and `METRALE_DEVICE_LOST`. Calls on a model whose device is lost fail with the latter; handles are freed as ever.
//
// A file that somebody else shortens while a model made from it lives ends the process with SIGBUS.
metrale_status metrale_load(const char *path,
                            const metrale_load_options *options,
                            metrale_model **out,
                            metrale_error **err);

// Loads a model from a source: like `metrale_load`, which is the same for a path. `options` may be NULL. On success `*out`
// is a handle for `metrale_free`. Blocks until the model is ready; the progress callback can cancel. The source may be
// freed afterwards. Any thread; several loads of one source may run at once.
//
// Statuses: as for `metrale_load`; `METRALE_IO` names what a reader did not give, with its offset;
// `METRALE_UNSUPPORTED` for a single safetensors file, or one part of a split GGUF, that comes neither by path nor in a folder
// (`metrale_source_folder`).
metrale_status metrale_load_source(const metrale_source *source,
                                   const metrale_load_options *options,
                                   metrale_model **out,
                                   metrale_error **err);

// Begins to load a model from a source without reading anything yet; `metrale_load_step` does the work. `options` may be
// NULL. On success `*out` is a handle for `metrale_loading_free`. Each begin is a load of its own, also of the same
// source, and the source may be freed at once. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_INVALID_HANDLE`, `METRALE_UNKNOWN_OPTION`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_load_begin(const metrale_source *source,
                                  const metrale_load_options *options,
                                  metrale_loading **out,
                                  metrale_error **err);

// Works on a load for about `budget_ns` nanoseconds and at least one slice: 0 is the least there is, `UINT64_MAX` does
// all. Bytes are read and weights packed in slices of a fraction of a millisecond; the tokenizer is made on a thread of the load's
// own, which rests between steps, and is waited for no longer than the budget lasts; headers, the memory plan and each program
// are one slice that cannot be cut. `METRALE_AGAIN` while there is more to do. `METRALE_OK` once, with the
// model in `*out`, a handle for `metrale_free`. `progress`, which may be NULL, is filled in both cases. Steps may come
// from different threads, one at a time; the progress callback runs inside of them.
// One call at a time on a load.
//
// Statuses: as for `metrale_load_source`. After an error everything the load held is freed, and every further step
// returns that error; after `METRALE_OK` a step is `METRALE_INVALID_STATE`. `METRALE_BUSY` while another thread steps.
metrale_status metrale_load_step(metrale_loading *loading,
                                 uint64_t budget_ns,
                                 metrale_load_progress *progress,
                                 metrale_model **out,
                                 metrale_error **err);

// As `metrale_load_step`, by amount of work instead of time, which does not depend on the machine: reads or packs
// `budget_bytes` bytes and at most one panel of a matrix more, or makes one of the pieces that are not counted in bytes
// (headers, the tokenizer, the workspace). 0 is the least there is. The bytes are those of `progress`.
// One call at a time on a load.
//
// Statuses: as for `metrale_load_step`.
metrale_status metrale_load_step_bytes(metrale_loading *loading,
                                       uint64_t budget_bytes,
                                       metrale_load_progress *progress,
                                       metrale_model **out,
                                       metrale_error **err);

// Cancels a load. `METRALE_OK`: there will be no model, every step from now on is `METRALE_CANCELLED`, and a step that is
// running ends so after its slice; what the load held is freed then, or at once when none is running. `METRALE_DONE`: too
// late, a step has handed out the model or is about to, and it is the host's. Cancelling again is `METRALE_OK`, and so is
// cancelling a load that failed. Any thread, also inside a callback of the load.
//
// Statuses: `METRALE_OK`, `METRALE_DONE`, `METRALE_INVALID_HANDLE`.
metrale_status metrale_load_cancel(metrale_loading *loading,
                                   metrale_error **err);

// Gives up a load, finished or not, and frees what it holds; a model that was handed out stays. A step that is running
// on another thread ends with `METRALE_CANCELLED`, or with the model. NULL and handles that are none are ignored. Any
// thread.
void metrale_loading_free(metrale_loading *loading);

// Gives up a handle of a model. The memory goes once the model's other handles, sequences, text streams and running
// calls are gone too. NULL and handles that are none (freed before, for example) are ignored. Any thread.
void metrale_free(metrale_model *model);

// Makes another handle of the same model, for another owner; each is freed once. Any thread.
//
// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_model_retain(const metrale_model *model, metrale_model **out, metrale_error **err);

// What the model is, as a JSON object: `model_type`, `architecture`, `parameters`, `layers`, `hidden`, `vocab`,
// `context`, `compute`, `threads`, `bos`, `end_tokens` and more. `*out_json` is NUL-terminated; `out_len`, which may
// be NULL, gets its length without the NUL. The text lives until this handle is freed. Any thread.
//
// Statuses: only `METRALE_INVALID_HANDLE`.
metrale_status metrale_model_info(const metrale_model *model,
                                  const char **out_json,
                                  size_t *out_len,
                                  metrale_error **err);

// One fact of the model by its name in `metrale_model_info`, or one value of the file's own metadata by its key:
// text as it is, everything else as JSON. `key` is NUL-terminated UTF-8. The value, without a NUL, goes to `out` and
// its length to `*out_len`; when `capacity` is too small, only `*out_len` is written and the status is
// `METRALE_MORE`. `METRALE_NOT_FOUND` for an unknown key. Any thread.
//
// Statuses: `METRALE_MORE`, `METRALE_NOT_FOUND`, `METRALE_INVALID_ARGUMENT`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_model_meta(const metrale_model *model,
                                  const char *key,
                                  uint8_t *out,
                                  size_t capacity,
                                  size_t *out_len,
                                  metrale_error **err);

// What tells this model from others, as 32 hexadecimal digits without a NUL: of its shapes, of how it computes (`compute`) and of rows of
// each weight, so that models with the same fingerprint can take up each other's saved sequences. It does not protect against
// somebody who makes two models agree on purpose. The digits go to `out` and their number to `*out_len`; when `capacity` is
// too small, only `*out_len` is written and the status is `METRALE_MORE`. The first call looks at the weights, later ones do
// not. Any thread.
//
// Statuses: `METRALE_MORE`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_model_fingerprint(const metrale_model *model,
                                         uint8_t *out,
                                         size_t capacity,
                                         size_t *out_len,
                                         metrale_error **err);

// The tokens of a text of `len` bytes, which may hold NULs and need not be terminated. `flags`:
// `METRALE_TOKENIZE_*`, or-ed. They go to `out` and their number to `*out_count`; when `capacity` is too small, only
// `*out_count` is written and the status is `METRALE_MORE`. NULL with capacity 0 asks for the number. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` with the offset of the first byte that is not UTF-8, `METRALE_TOO_LARGE`,
// `METRALE_UNKNOWN_OPTION`, `METRALE_NOT_FOUND` when the model comes without a tokenizer.
metrale_status metrale_tokenize(const metrale_model *model,
                                const uint8_t *text,
                                size_t len,
                                uint32_t flags,
                                metrale_token *out,
                                size_t capacity,
                                size_t *out_count,
                                metrale_error **err);

// The bytes of a whole text of tokens; they need not be UTF-8 where the tokens begin or end inside a character.
// `flags`: `METRALE_DETOKENIZE_*`, or-ed. For tokens that arrive one by one use `metrale_text_new`. Output as in
// `metrale_tokenize`. Any thread.
//
// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary, `METRALE_TOO_LARGE`.
metrale_status metrale_detokenize(const metrale_model *model,
                                  const metrale_token *tokens,
                                  size_t count,
                                  uint32_t flags,
                                  uint8_t *out,
                                  size_t capacity,
                                  size_t *out_len,
                                  metrale_error **err);

// Exactly the bytes that one token adds to a text; a special token gives its literal text. Output as in
// `metrale_tokenize`. Any thread.
//
// Statuses: `METRALE_MORE`, `METRALE_INVALID_TOKEN`, `METRALE_NOT_FOUND` when the model comes without a tokenizer.
metrale_status metrale_token_bytes(const metrale_model *model,
                                   metrale_token token,
                                   uint8_t *out,
                                   size_t capacity,
                                   size_t *out_len,
                                   metrale_error **err);

// The prompt that the model's chat template makes of a conversation. `request` is a JSON object of `request_len`
// bytes: `messages` (array of objects with `role` and `content`), and if wanted `tools` (array),
// `add_generation_prompt` (default true) and `variables` (object, handed to the template by name). Tokenize the
// result with `METRALE_TOKENIZE_PARSE_SPECIAL` and without `METRALE_TOKENIZE_ADD_SPECIAL`: the template writes the
// special tokens itself. Output as in `metrale_tokenize`. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (malformed JSON, wrong types), `METRALE_UNKNOWN_OPTION` (another key),
// `METRALE_TEMPLATE` with the template's own text, `METRALE_NOT_FOUND` when the model has no template,
// `METRALE_LIMIT_EXCEEDED`.
metrale_status metrale_chat_render(const metrale_model *model,
                                   const uint8_t *request,
                                   size_t request_len,
                                   uint8_t *out,
                                   size_t capacity,
                                   size_t *out_len,
                                   metrale_error **err);

// Makes a text stream: it takes the tokens of one sequence and gives text that is whole UTF-8 at every moment, and
// ends before any of the stop strings. `options` may be NULL. On success `*out` is a handle for `metrale_text_free`.
// The model's tokenizer stays in memory while the stream does. Any thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (an empty stop string, or one that is not UTF-8), `METRALE_UNKNOWN_OPTION`,
// `METRALE_NOT_FOUND` when the model comes without a tokenizer.
metrale_status metrale_text_new(const metrale_model *model,
                                const metrale_text_options *options,
                                metrale_text **out,
                                metrale_error **err);

// Takes one token and fills `*out` (whose `struct_size` must be set) with the text that became certain, which may be
// none. Returns `METRALE_DONE` when a stop string was reached, else `METRALE_OK`. The bytes live until the next call
// on this stream or its end. One call at a time.
//
// Statuses: `METRALE_INVALID_TOKEN`, `METRALE_INVALID_STATE` (a stop string was reached before; reset the stream),
// `METRALE_BUSY`.
metrale_status metrale_text_push(metrale_text *text, metrale_token token, metrale_text_piece *out, metrale_error **err);

// Gives out what is held back: the beginning of a character (as U+FFFD) or of a stop string. Call it when the
// sequence ends; the stream can go on afterwards, as if the text began there. Everything else is as in
// `metrale_text_push`.
// One call at a time on a stream.
//
// Statuses: `METRALE_INVALID_STATE`, `METRALE_BUSY`.
metrale_status metrale_text_flush(metrale_text *text, metrale_text_piece *out, metrale_error **err);

// Brings the stream back to its beginning; what was held back is dropped. One call at a time.
//
// Statuses: `METRALE_BUSY`.
metrale_status metrale_text_reset(metrale_text *text, metrale_error **err);

// Frees a text stream and ends the life of its last piece. NULL and handles that are none are ignored. Any thread.
void metrale_text_free(metrale_text *text);

// Makes a sampler of `count` stages, which run in the given order on every row of logits; then a token is drawn from
// what is left, in proportion to its probability. No stage at all is greedy. Draws depend on `seed` alone: the same
// seed gives the same tokens. The stages are copied. On success `*out` is a handle for `metrale_sampler_free`. Any
// thread.
//
// Statuses: `METRALE_INVALID_ARGUMENT` or `METRALE_UNKNOWN_OPTION` with the index of the stage.
metrale_status metrale_sampler_new(const metrale_sampler_stage *stages,
                                   size_t count,
                                   uint64_t seed,
                                   metrale_sampler **out,
                                   metrale_error **err);

// Says what the stages `METRALE_STAGE_HOOK` of a sampler do: `hook` is called with `user`, see `metrale_hook_fn`; NULL takes it away.
// Sequences that get the sampler from now on have it, until they get another; those that have a copy keep what they have. So both
// pointers must stay valid until those sequences, and forks and marks of them, are gone or have another sampler. One function may be
// called on several threads at once, for sequences that are stepped there. A sequence does not take a sampler with such a stage and no
// hook. Any thread.
//
// Statuses: `METRALE_INVALID_STATE` (the sampler has no such stage).
metrale_status metrale_sampler_set_hook(metrale_sampler *sampler,
                                        metrale_hook_fn hook,
                                        void *user,
                                        metrale_error **err);

// Frees a sampler; sequences that use it have their own copy. NULL and handles that are none are ignored. Any thread.
void metrale_sampler_free(metrale_sampler *sampler);

// Compiles a JSON schema (`len` bytes of UTF-8) for a model: a sequence that follows it says one JSON value that the schema allows.
// Keys that are not understood are refused rather than ignored. On success `*out` is a handle for `metrale_grammar_free`. Any thread;
// takes from milliseconds to seconds, the first grammar of a model some more.
//
// Statuses: `METRALE_INVALID_GRAMMAR` with the byte offset where one is known, `METRALE_LIMIT_EXCEEDED` (longer than 1 MiB, nested deeper
// than 127, or too complex), `METRALE_UNSUPPORTED` (a key that is not done), `METRALE_NOT_FOUND` (the model has no tokenizer),
// `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_grammar_json_schema(const metrale_model *model,
                                           const uint8_t *schema,
                                           size_t len,
                                           metrale_grammar **out,
                                           metrale_error **err);

// As `metrale_grammar_json_schema` for a grammar in GBNF: rules `name ::= ...`, the start is `root`. Where rules are recursive, parts
// between them that are not take the longest text they can.
// Any thread.
//
// Statuses: as `metrale_grammar_json_schema`.
metrale_status metrale_grammar_gbnf(const metrale_model *model,
                                    const uint8_t *source,
                                    size_t len,
                                    metrale_grammar **out,
                                    metrale_error **err);

// As `metrale_grammar_json_schema` for a grammar in Lark's notation: rules `name: ...`, terminals `NAME: ...`, the start is `start`.
// Terminals take the longest text they can.
// Any thread.
//
// Statuses: as `metrale_grammar_json_schema`.
metrale_status metrale_grammar_lark(const metrale_model *model,
                                    const uint8_t *source,
                                    size_t len,
                                    metrale_grammar **out,
                                    metrale_error **err);

// As `metrale_grammar_json_schema` for a regular expression, which the whole text matches. Unicode classes and counted repetitions are
// fine; references back and look-around are not.
// Any thread.
//
// Statuses: as `metrale_grammar_json_schema`.
metrale_status metrale_grammar_regex(const metrale_model *model,
                                     const uint8_t *pattern,
                                     size_t len,
                                     metrale_grammar **out,
                                     metrale_error **err);

// Frees a grammar; sequences that follow it keep it. NULL and handles that are none are ignored. Any thread.
void metrale_grammar_free(metrale_grammar *grammar);

// From now on the sequence's chosen tokens follow `grammar`, from its start; NULL lifts the grammar in force. Only tokens that
// `metrale_decode_step` chooses count, so a prompt may come before or between. The grammar rules tokens out before the sampler's stages
// run, and allows tokens that end generation only where it may end. Forks, marks and truncation carry it. The grammar may be freed
// afterwards.
//
// When a step finds no token that goes on it returns `METRALE_NO_VALID_TOKEN`, after the end `METRALE_GRAMMAR_DONE`; the sequence is then
// as before and usable, for example after lifting the grammar.
// One call at a time on a sequence.
//
// Statuses: `METRALE_MISMATCH` (the grammar was compiled for another model), `METRALE_BUSY`.
metrale_status metrale_seq_grammar(metrale_seq *seq,
                                   const metrale_grammar *grammar,
                                   metrale_error **err);

// Makes an empty sequence. `options` may be NULL. On success `*out` is a handle for `metrale_seq_free`; the model
// stays in memory while the sequence does. Any thread.
//
// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_LIMIT_EXCEEDED` (more context than the model was loaded for),
// `METRALE_INVALID_ARGUMENT`, `METRALE_TOO_LARGE`, `METRALE_UNKNOWN_OPTION`,
// `METRALE_INVALID_TOKEN` (the sampler names a token outside the vocabulary), `METRALE_INVALID_STATE` (its hook was not set).
metrale_status metrale_seq_new(metrale_model *model,
                               const metrale_seq_options *options,
                               metrale_seq **out,
                               metrale_error **err);

// Frees a sequence. A call that is using it on another thread finishes first, on its own. NULL and handles that are
// none (freed before, for example) are ignored. Any thread.
void metrale_seq_free(metrale_seq *seq);

// Fills `*out` with what the sequence is now; `out->struct_size` must be set. Safe beside other calls that take a
// const sequence.
//
// Statuses: `METRALE_BUSY`.
metrale_status metrale_seq_info(const metrale_seq *seq, metrale_sequence_info *out, metrale_error **err);

// Keeps the first `length` tokens and forgets the rest, exactly: what follows is as if they had never been there.
// The sampler's generator stays where it is, a grammar goes back with the tokens. Refused without a change where the model's state cannot go back
// (`METRALE_UNSUPPORTED`) and when the sequence is shorter (`METRALE_INVALID_ARGUMENT`).
// One call at a time on a sequence.
//
// Statuses: `METRALE_BUSY`.
metrale_status metrale_seq_truncate(metrale_seq *seq,
                                    size_t length,
                                    metrale_error **err);

// Takes `count` tokens out, from index `from` on; those after them move to lower positions, which makes room at the end of a full sequence. What
// is left keeps the values it was computed with, when the removed tokens could still be seen; its keys are turned back to their new
// positions. So what follows is attention over the tokens that are left (StreamingLLM), not what a fresh run over them would
// give: use a fresh sequence where that is wanted. Turning rounds once, and where the cache is not kept in
// f32 (`kv_type`) the turned key is rounded to its type a second time. It takes about as long as copying what is moved.
//
// The row of logits stays as it was computed, with all tokens. Where nothing follows the removed tokens, this is
// `metrale_seq_truncate`. Marks past `from` end. A grammar keeps what was chosen under it, also of removed tokens. What the queue
// holds stays. The sequence no longer shares its later tokens with prompts that begin alike. On error nothing has changed.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (the tokens are not all there), `METRALE_UNSUPPORTED` with the reason where the model's past does not
// move: recurrent layers, latent or compressed caches, hashed tokens, absolute positions, translation.
// `METRALE_OUT_OF_MEMORY` (pages shared with forks are copied), `METRALE_BUSY`.
metrale_status metrale_seq_shift(metrale_seq *seq,
                                 size_t from,
                                 size_t count,
                                 metrale_error **err);

// Changes how the sequence's next tokens are chosen, starting from the sampler's seed. NULL is greedy. The sampler is
// copied and may be freed afterwards.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_TOKEN` (the sampler names a token outside the vocabulary), `METRALE_INVALID_STATE` (its hook was not
// set), `METRALE_BUSY`.
metrale_status metrale_seq_sampling(metrale_seq *seq,
                                    const metrale_sampler *sampler,
                                    metrale_error **err);

// Makes a second sequence that holds the same tokens and will choose the same ones. Memory is shared page by page until one of
// the two writes, so a fork costs a list of pages and one row of logits; `metrale_seq_stats` says how many bytes are shared. Marks stay with the original. `*out` is a handle for
// `metrale_seq_free`. Safe beside other calls that take a const sequence.
//
// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_fork(const metrale_seq *seq,
                                metrale_seq **out,
                                metrale_error **err);

// Marks this point of the sequence. `*out_mark` is a number, never 0, for `metrale_seq_rollback` and `metrale_seq_commit`. A mark lasts
// until it is committed or the sequence goes back to before it; meanwhile it keeps one recurrent state, where the model has one.
// One call at a time on a sequence.
//
// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_mark(metrale_seq *seq,
                                uint64_t *out_mark,
                                metrale_error **err);

// Goes back to a mark, as often as wanted: tokens, state, logits, grammar and the sampler's generator are bit for bit what they were. Later
// marks end; this one stays.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (no such mark), `METRALE_BUSY`.
metrale_status metrale_seq_rollback(metrale_seq *seq,
                                    uint64_t mark,
                                    metrale_error **err);

// Keeps what came since a mark and gives the mark up.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_ARGUMENT` (no such mark), `METRALE_BUSY`.
metrale_status metrale_seq_commit(metrale_seq *seq, uint64_t mark, metrale_error **err);

// Writes to `*out_count` how many of `tokens` the sequence begins with: what a prompt need not be computed for again. Safe beside other
// calls that take a const sequence.
//
// Statuses: `METRALE_BUSY`.
metrale_status metrale_seq_match(const metrale_seq *seq,
                                 const metrale_token *tokens,
                                 size_t count,
                                 size_t *out_count,
                                 metrale_error **err);

// Writes the sequence's state as bytes: tokens, keys and values, recurrent state, logits, the sampler's state (generator, mirostat)
// and how far its grammar was followed. They carry a version, fingerprints of the model, of how it was loaded and of the grammar,
// and checksums. `*out_len` gets the size; with too small a `capacity` the status is `METRALE_MORE` and nothing else is written.
// Marks are not saved, nor are the sampler's stages and the grammar itself, which the host sets on the sequence that it restores.
// Safe beside other calls that take a const sequence.
//
// Statuses: `METRALE_MORE`, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_save(const metrale_seq *seq,
                                uint8_t *out,
                                size_t capacity,
                                size_t *out_len,
                                metrale_error **err);

// Becomes what `metrale_seq_save` wrote, from a sequence of the same model loaded the same way. The stages of the sampler stay, its
// state goes to where it was. Where the saved sequence followed a grammar, this one must have the same grammar set (compiled from
// the same text; how far it was followed does not matter) and goes on in it from where it was saved; else a grammar in force is
// lifted. Marks end. All or nothing: on error the sequence is as before.
// One call at a time on a sequence.
//
// Statuses: `METRALE_CORRUPT_FILE` (cut short or changed), `METRALE_VERSION_MISMATCH` (written by another version of the library),
// `METRALE_MISMATCH` (another model or other load options, with both fingerprints in the error; or another grammar), `METRALE_CONTEXT_FULL` (more tokens than this sequence may hold), `METRALE_LIMIT_EXCEEDED` (the way through the grammar
// takes more work than is allowed), `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_restore(metrale_seq *seq,
                                   const uint8_t *bytes,
                                   size_t len,
                                   metrale_error **err);

// Reads the source text of an empty sequence of a model that translates (NLLB, M2M-100): `[language, text ..., end]` as tokens. Afterwards
// prefill the decoder's first tokens (`[end, target language]`) and step or search. The source stays until the sequence
// is freed or given another one while it is empty. On error the sequence is as before.
// One call at a time on a sequence.
//
// Statuses: `METRALE_UNSUPPORTED` (the model does not translate), `METRALE_INVALID_STATE` (the sequence holds tokens),
// `METRALE_INVALID_ARGUMENT` (no token), `METRALE_INVALID_TOKEN`, `METRALE_CONTEXT_FULL`, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_encode(metrale_seq *seq,
                                  const metrale_token *tokens,
                                  size_t count,
                                  metrale_error **err);

// The likeliest continuation of a sequence by beam search, without the token that ended it. The sequence stays as it is. `options` may be
// NULL. Tokens go to `out` and their number to `*out_count`; when `capacity` is too small, only `*out_count` is written and
// the status is `METRALE_MORE`. `out_score`, which may be NULL, gets the score. Safe beside other calls that take a const sequence.
//
// Statuses: `METRALE_INVALID_STATE` (the sequence holds no token), `METRALE_INVALID_ARGUMENT`, `METRALE_CONTEXT_FULL`,
// `METRALE_NUMERIC_FAULT`, `METRALE_OUT_OF_MEMORY`, `METRALE_UNKNOWN_OPTION`, `METRALE_BUSY`.
metrale_status metrale_seq_beam(const metrale_seq *seq,
                                const metrale_beam_options *options,
                                metrale_token *out,
                                size_t capacity,
                                size_t *out_count,
                                float *out_score,
                                metrale_error **err);

// Appends `count` tokens to the sequence and computes what may follow them. Blocks until all are done; may be called
// again to append more. No token is no change. On error the sequence is as before.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary,
// `METRALE_CONTEXT_FULL` with the number that still fits, `METRALE_OUT_OF_MEMORY`, `METRALE_NUMERIC_FAULT`,
// `METRALE_BUSY`.
metrale_status metrale_prefill(metrale_seq *seq, const metrale_token *tokens, size_t count, metrale_error **err);

// One token for each of `count` sequences of one model, computed together. For each sequence a token is chosen from
// the row of logits after the tokens it holds, appended to it and written to the same place of `out_tokens`; the row
// after it is then computed. A sequence may be listed once. With `count` 0 nothing happens.
// One call at a time on a sequence.
//
// Returns `METRALE_DONE` when every sequence has just produced a token that ends generation, else `METRALE_OK`; in
// both cases all tokens are written, and stepping on is allowed. On error every sequence (tokens, sampler) is as
// before and nothing is written. In steady state a step of up to 16 sequences allocates nothing here.
//
// Statuses, with the index of the sequence: `METRALE_INVALID_STATE` (it holds no token yet), `METRALE_CONTEXT_FULL`,
// `METRALE_NUMERIC_FAULT`, `METRALE_NO_VALID_TOKEN`, `METRALE_GRAMMAR_DONE`, `METRALE_INVALID_ARGUMENT` (listed twice, or of another model),
// `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_decode_step(metrale_seq *const *seqs,
                                   size_t count,
                                   metrale_token *out_tokens,
                                   metrale_error **err);

// Up to `steps` tokens for each of `count` sequences of one model: what as many calls of `metrale_decode_step` would do, with the same
// tokens and the same bits. It ends behind the first step in which some sequence has produced a token that ends generation, so that
// the sequence can be taken out. `*out_steps` is the number of steps done; the token of step `i` for sequence `j` is at
// `out_tokens[i * count + j]`, which has places for all `steps`. On a GPU greedy sequences are computed faster this way than step by step,
// since the device begins a step as soon as it has found the tokens of the one before. With `count` or `steps` 0 nothing is done.
// A sequence may be listed once. One call at a time on a sequence; `metrale_cancel` ends the call between two steps at the latest.
//
// Returns `METRALE_DONE` when every sequence has produced a token that ends generation in the last step, else `METRALE_OK`.
// On error the steps before the one that failed stay: if there are any, they are counted in `*out_steps` and their tokens written; if not, nothing
// is written, so set `*out_steps` to 0 before. The step that failed has changed nothing. The call allocates room for its tokens
// when they are more than 16.
//
// Statuses, with the index of the sequence: those of `metrale_decode_step`, and `METRALE_TOO_LARGE` (tokens that no memory could hold),
// `METRALE_CANCELLED`.
metrale_status metrale_decode(metrale_seq *const *seqs,
                              size_t count,
                              size_t steps,
                              metrale_token *out_tokens,
                              size_t *out_steps,
                              metrale_error **err);

// Puts `count` tokens at the end of the sequence's queue, which `metrale_step` reads. Nothing is computed yet, and other
// calls leave the queue alone. The tokens are copied. On error nothing has changed.
// One call at a time on a sequence.
//
// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary, `METRALE_CONTEXT_FULL` with
// the number that still fits, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_seq_feed(metrale_seq *seq,
                                const metrale_token *tokens,
                                size_t count,
                                metrale_error **err);

// Works on `count` sequences of one model for about `budget_ns` nanoseconds, then returns with what is left undone; made for
// hosts with a frame to draw. 0 is no limit. A sequence whose queue holds tokens reads them, until the queue is empty; one
// with an empty queue produces one token, as `metrale_decode_step` would. So a prompt is read first, and the token after it
// is produced by the next call. Results are the same bits as those of the blocking calls, however the work is cut.
//
// `results` has a place for each sequence. Work is done in slices; each is appended to its sequences as a whole. A slice
// that is not done in time stays with the model and is continued when the same sequences are stepped again; until then they
// are as before it. If one of them is freed, cancelled, changed by another call or left out of the next step, the slice is
// dropped, which costs its time and nothing else. So step all sequences of a model together, from one thread; a second
// thread that steps gets no turn until the first returns. Blocking calls on other sequences may run meanwhile, and take
// processor time from the step: one of their operations at a time is waited for, up to the budget.
// One call at a time on a sequence.
//
// Returns `METRALE_AGAIN` when the budget ran out before some sequence was done, `METRALE_DONE` when every sequence has just
// produced a token that ends generation, else `METRALE_OK`. In these cases all results are written; one sequence that
// cannot go on says so in its own result and does not stop the others. After an error no result is written; slices done
// before it stay.
//
// Statuses, with the index of the sequence: `METRALE_INVALID_ARGUMENT` (listed twice, or of another model),
// `METRALE_INVALID_STATE` (called from a sampler's hook), `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
metrale_status metrale_step(metrale_seq *const *seqs,
                            size_t count,
                            uint64_t budget_ns,
                            metrale_step_result *results,
                            metrale_error **err);

// About how many nanoseconds a `metrale_step` without a limit would take on these sequences now, learned from earlier steps;
// before the first, a guess. Does not wait.
// Safe beside other calls that take a const sequence.
//
// Statuses, with the index of the sequence: `METRALE_INVALID_ARGUMENT` (of another model), `METRALE_BUSY`.
metrale_status metrale_step_estimate(metrale_seq *const *seqs,
                                     size_t count,
                                     uint64_t *out_ns,
                                     metrale_error **err);

// Whether `metrale_step` has something left to do for the sequence: `METRALE_AGAIN` when tokens wait in its queue or a token
// is under way, else `METRALE_OK`. The number that waits goes to `*out_queued`, which may be NULL. Never waits: while another
// call changes the sequence, this is `METRALE_BUSY`. Safe beside other calls that take a const sequence.
//
// Statuses: `METRALE_OK`, `METRALE_AGAIN`, `METRALE_BUSY`.
metrale_status metrale_poll(const metrale_seq *seq,
                            size_t *out_queued,
                            metrale_error **err);

// Cancels what the sequence is doing. A call that is running on it (`metrale_prefill`, `metrale_decode_step`) soon returns
// `METRALE_CANCELLED` and leaves its sequences as before it (`metrale_decode`: as before the step that was cancelled); in `metrale_step` the sequence's own result says so. Tokens that
// wait in the queue and a slice under way are dropped, which the next step reports. Where nothing is running, waiting or
// under way, nothing happens: later calls are not affected. Does not wait. Any thread.
//
// Statuses: only `METRALE_INVALID_HANDLE`.
metrale_status metrale_cancel(metrale_seq *seq,
                              metrale_error **err);

// Cancels what every sequence of the model is doing, as `metrale_cancel` does for one. Any thread. A load is cancelled through
// its progress callback.
//
// Statuses: only `METRALE_INVALID_HANDLE`.
metrale_status metrale_cancel_all(metrale_model *model,
                                  metrale_error **err);

// The logits of the token that follows all tokens the sequence holds: `*out_len` floats at `*out_row`, one for each
// id. The row belongs to the sequence and lives until the next call that changes or frees it, from whatever thread.
// Safe beside other calls that take a const sequence.
//
// Statuses: `METRALE_INVALID_STATE` when the sequence holds no token, `METRALE_BUSY`.
metrale_status metrale_seq_logits(const metrale_seq *seq, const float **out_row, size_t *out_len, metrale_error **err);

// Natural logarithms of the probabilities of the token that follows all tokens the sequence holds, before any sampler
// stage: those of the `count` given `tokens` go to `out`, and the `top_count` likeliest, likeliest first and ties by
// id, to `top_tokens` and `top_out`. Either count may be 0, its pointers NULL. Safe beside other calls that take a
// const sequence.
//
// Statuses: `METRALE_INVALID_TOKEN`, `METRALE_INVALID_ARGUMENT` (`top_count` above the vocabulary),
// `METRALE_INVALID_STATE`, `METRALE_NUMERIC_FAULT`, `METRALE_BUSY`.
metrale_status metrale_seq_logprobs(const metrale_seq *seq,
                                    const metrale_token *tokens,
                                    size_t count,
                                    float *out,
                                    size_t top_count,
                                    metrale_token *top_tokens,
                                    float *top_out,
                                    metrale_error **err);

// What the model makes of `count` tokens: the output of its last layer after the final norm, which its output matrix would turn into
// logits; of a model that translates, the encoder's output. `options` may be NULL. `out` gets one row of the model's `hidden`
// floats, or a row for each token with `METRALE_POOLING_NONE`; `*out_len` gets the number of floats. With too small a
// `capacity`, in floats, the status is `METRALE_MORE`, only `*out_len` is written and nothing is computed.
//
// Blocks until all is computed; `metrale_cancel_all` ends it. No sequence takes part, and prefixes are neither used nor kept. The same
// bits for any number of threads. Any thread.
//
// Statuses: `METRALE_MORE`, `METRALE_INVALID_ARGUMENT` (no tokens), `METRALE_INVALID_TOKEN` with the index,
// `METRALE_CONTEXT_FULL`, `METRALE_UNKNOWN_OPTION`, `METRALE_NUMERIC_FAULT`, `METRALE_CANCELLED`, `METRALE_OUT_OF_MEMORY`.
metrale_status metrale_embed(const metrale_model *model,
                             const metrale_token *tokens,
                             size_t count,
                             const metrale_embed_options *options,
                             float *out,
                             size_t capacity,
                             size_t *out_len,
                             metrale_error **err);

// Fills `*out` with what the sequence has done since it was made and the memory it holds now; `out->struct_size` must be set. Safe beside
// other calls that take a const sequence.
//
// Statuses: `METRALE_BUSY`.
metrale_status metrale_seq_stats(const metrale_seq *seq,
                                 metrale_stats *out,
                                 metrale_error **err);

// Fills `*out` with what the model keeps of its sequences' beginnings and how often that served; `out->struct_size` must be set. Any
// thread; waits for no computation.
//
// Statuses: only those of arguments.
metrale_status metrale_model_stats(const metrale_model *model,
                                   metrale_model_counts *out,
                                   metrale_error **err);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* METRALE_H */
