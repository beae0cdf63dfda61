//! Every C type of the header: opaque nouns, and structs that cross the border by pointer.
//!
//! They are kept in one file because their layout is the contract; nothing here has behaviour.

use std::ffi::{c_char, c_void};

use super::error::ErrorObject;
use super::grammar::GrammarObject;
use super::handle::opaque;
use super::loading::LoadingObject;
use super::model::ModelObject;
use super::runtime::RuntimeObject;
use super::sampler::SamplerObject;
use super::sequence::SequenceObject;
use super::source::SourceObject;
use super::status::metrale_status;
use super::text::TextObject;
use super::versioned::Versioned;

pub use super::runtime_types::*;

/// A token id. Negative values are never ids.
pub type metrale_token = i32;

/// An error object, made by a call that failed. Free it with `metrale_error_free`.
pub struct metrale_error {
    _opaque: [u8; 0],
}

/// A loaded model: immutable, shared by its sequences, safe to use from any number of threads at once.
pub struct metrale_model {
    _opaque: [u8; 0],
}

/// One timeline of tokens with its cache, recurrent state and sampler. One call at a time may change it; a second
/// one gets `METRALE_BUSY`.
pub struct metrale_seq {
    _opaque: [u8; 0],
}

/// A recipe for choosing tokens; may serve any number of sequences, each of which takes a copy.
pub struct metrale_sampler {
    _opaque: [u8; 0],
}

/// A compiled grammar: immutable, may serve any number of sequences of its model.
pub struct metrale_grammar {
    _opaque: [u8; 0],
}

/// Turns one sequence's tokens into text that is whole UTF-8 at every moment.
pub struct metrale_text {
    _opaque: [u8; 0],
}

/// Where a model's bytes come from: immutable, may be loaded any number of times.
pub struct metrale_source {
    _opaque: [u8; 0],
}

/// A model that is being loaded, a little with each `metrale_load_step`.
pub struct metrale_loading {
    _opaque: [u8; 0],
}

/// What a host lends models: an allocator, a limit of memory, a log, threads. Models that name none use the system's memory and
/// threads of their own.
pub struct metrale_runtime {
    _opaque: [u8; 0],
}

opaque!(metrale_error, ErrorObject, 1, "error");
opaque!(metrale_model, ModelObject, 2, "model");
opaque!(metrale_seq, SequenceObject, 3, "sequence");
opaque!(metrale_sampler, SamplerObject, 4, "sampler");
opaque!(metrale_text, TextObject, 5, "text stream");
opaque!(metrale_grammar, GrammarObject, 6, "grammar");
opaque!(metrale_source, SourceObject, 7, "source");
opaque!(metrale_loading, LoadingObject, 8, "load");
opaque!(metrale_runtime, RuntimeObject, 9, "runtime");

/// Called while a model loads, on the thread that loads. Both numbers are those of the phase; `total_bytes` is 0 while
/// it is not known. `phase` is a short word, valid during the call: `"reading"` (a source that is not mapped), `"kernels"` (a
/// GPU's), `"tokenizer"`, `"weights"`, `"done"`. A result other than 0 cancels the load (`METRALE_CANCELLED`), the last call's as well.
/// The function must return: no exception and no `longjmp` may leave it.
pub type metrale_progress_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, done_bytes: u64, total_bytes: u64, phase: *const c_char) -> i32>;

/// Fills `len` bytes at `into` with a source's bytes from `offset` on, and returns how many it filled. Everything but
/// `len` is a failure and ends the load with `METRALE_IO`: a negative number, or fewer. `offset + len` is never more
/// than the length given to `metrale_source_reader`. Called in order, each byte once for each load, only inside the
/// functions that load and on their thread. The function must return: no exception and no `longjmp` may leave it.
pub type metrale_read_at_fn = Option<unsafe extern "C" fn(user: *mut c_void, offset: u64, into: *mut c_void, len: usize) -> i64>;

/// A path or file is read into memory while it is loaded, rather than mapped. The file may change afterwards, and
/// shortening it meanwhile is an error rather than SIGBUS. Its bytes stay in memory as long as the model.
pub const METRALE_SOURCE_READ: u64 = 1;
/// A buffer is copied at once, and the host's may go.
pub const METRALE_SOURCE_COPY: u64 = 2;

/// How far a load is. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_load_progress {
    /// `sizeof(metrale_load_progress)` as the host was compiled.
    pub struct_size: usize,
    /// Bytes of this phase done so far.
    pub done_bytes: u64,
    /// Bytes of this phase in all; 0 while that is not known.
    pub total_bytes: u64,
    /// `"reading"`, `"tokenizer"`, `"weights"` or `"done"`: NUL-terminated, lives as long as the library.
    pub phase: *const c_char,
}

/// Precision of the mathematics: the library's default (`METRALE_COMPUTE` in the environment, else fast).
pub const METRALE_COMPUTE_DEFAULT: u32 = 0;
/// Quantised weights meet 8-bit activations, the cache is 16 bits wide unless `kv_type` says otherwise.
pub const METRALE_COMPUTE_FAST: u32 = 1;
/// Every weight decoded to its exact value, activations and, unless `kv_type` says otherwise, cache in f32.
pub const METRALE_COMPUTE_F32: u32 = 2;

/// Keys and values are kept in the library's default (`METRALE_KV_TYPE` in the environment: `f32`, `f16`, `bf16`, `q8`): f32 with
/// `METRALE_COMPUTE_F32` and for files stored in f32, else half floats.
pub const METRALE_KV_DEFAULT: u32 = 0;
/// Keys and values are kept as they are computed.
pub const METRALE_KV_F32: u32 = 1;
/// Keys and values are kept as half floats.
pub const METRALE_KV_F16: u32 = 2;
/// Keys and values are kept as bfloat16: the bytes of half floats, the range of f32. Not on a GPU.
pub const METRALE_KV_BF16: u32 = 3;
/// Keys and values are kept in 8 bits, with a scale for each 32 elements of a key and for each value: 0.53 to 0.57 of the bytes of half floats.
/// Queries meet keys in 8 bits as well. Not on a GPU, and not for architectures that keep latent, compressed or indexed rows.
pub const METRALE_KV_Q8: u32 = 4;

/// All layers of the model run on the device, or it is not loaded.
pub const METRALE_ALL_LAYERS: u64 = u64::MAX;

/// Work of the model gives way to the process's other work on the same device, such as drawing: its stream has the least priority the
/// device knows. Nothing else changes. On the processor the flag is taken and means nothing: threads are the host's to rank.
pub const METRALE_LOAD_LOW_PRIORITY: u64 = 1;
/// On a device, a sequence's logits have the same bits alone and in any batch, however its tokens came in calls and steps, and after forks,
/// rollbacks and restored states: every sum has one order. That takes longer, prompts several times as long. Bits are those of one device and one
/// release of the library. The processor keeps to this in any case.
pub const METRALE_LOAD_DETERMINISTIC: u64 = 2;
/// The load packs all weights. Otherwise a load that is one call leaves weights of models with more than 32 MiB (or `METRALE_LATE_BYTES` in
/// the environment) where they are stored until they are used a second time: the first token comes sooner, the
/// second later, and a file that is mapped must stay as it is.
pub const METRALE_LOAD_PACKED: u64 = 4;

/// How to load a model. Set `struct_size` to `sizeof(metrale_load_options)` and the rest to zero, then change what
/// matters: zero is the default of every field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_load_options {
    /// `sizeof(metrale_load_options)` as the host was compiled.
    pub struct_size: usize,
    /// `METRALE_LOAD_*`, or-ed.
    pub flags: u64,
    /// Most threads that compute, the caller's included; 0 takes the processors this process may use, or what the runtime
    /// has. The library starts no more than there are processors, and with a runtime no other than the runtime's.
    pub threads: u32,
    /// `METRALE_COMPUTE_*`.
    pub compute: u32,
    /// Most tokens one sequence may hold; 0 takes the model's own limit, capped at 4,096.
    pub context: u64,
    /// Called during the load, or NULL.
    pub progress: metrale_progress_fn,
    /// Handed to `progress`.
    pub user: *mut c_void,
    /// For timing: fills the shapes of the model's configuration with random weights of this type (`"Q8_0"`,
    /// `"BF16"`, `"Q4_K_M"`, ...) and reads no tensor. NULL loads the real ones. Copied.
    pub synthetic: *const c_char,
    /// Seed of the random weights.
    pub synthetic_seed: u64,
    /// The runtime that the model and all that is made of it belong to, which they keep; NULL for none: the system's
    /// memory, uncounted.
    pub runtime: *const metrale_runtime,
    /// Most bytes the plan of the model with one sequence may take; 0 takes what the machine has free. A plan beyond it
    /// is `METRALE_OUT_OF_MEMORY` before weights are read, with the bytes wanted and available.
    pub memory: u64,
    /// Leaves routed experts in their file and keeps at most this many bytes of them packed, those met most often; 0
    /// takes `METRALE_EXPERT_BYTES` from the environment, else packs all of them at load. With a device they are the processor's to compute, as
    /// if `host_experts` said all.
    pub expert_bytes: u64,
    /// Types that matrices are multiplied in where they are to differ from the file's: rules `<where>=<type>` parted by
    /// commas, `"layers.0-3.mlp=f32,head=bf16"`. NULL takes `METRALE_PRECISION` from the environment. Copied.
    pub precision: *const c_char,
    /// Most bytes that the model keeps of its sequences' beginnings, so that a prompt that begins like an earlier one is computed only from
    /// where they part. 0 keeps nothing: memory that a host did not grant is not taken. It is counted in the plan's `kv`.
    /// Kept are the keys and values and the recurrent state of prompts of 16 tokens and more once they are read, and of every sequence
    /// when it is freed; what was used longest ago gives way. Logits are the same bits as without. `METRALE_UNSUPPORTED` for
    /// models that translate.
    pub prefix_bytes: u64,
    /// The device that computes, as `metrale_device_info` numbers them; 0 is the processor. `METRALE_NOT_FOUND` or
    /// `METRALE_DEVICE_UNSUPPORTED`, before weights are read, where it cannot be used, and `METRALE_UNSUPPORTED` where it has no code for an
    /// operation of the model. On an NVIDIA device the order of a sum depends on how many rows are computed together: what this header calls the
    /// same bits holds for the processor, and there up to the last ones, unless `flags` has `METRALE_LOAD_DETERMINISTIC`.
    pub device: u32,
    /// What keys and values are kept in: `METRALE_KV_*`. `METRALE_UNSUPPORTED`, before weights are read, where the device or the architecture does
    /// not have it. Bits are the same for any threads, batch and chunk, whatever it is; states saved by a model loaded with another type are
    /// refused with `METRALE_MISMATCH`.
    pub kv_type: u32,
    /// Most bytes of that device the plan of the model with one sequence may take; 0 takes what it has free. For the processor, `memory` is
    /// the cap.
    pub device_bytes: u64,
    /// Layers that the device runs: the last so many, and what follows them; the others, and the embeddings, stay on the processor, each
    /// layer with its keys and values and its state. 0 takes as many as `device_bytes` hold, the whole model where that fits, else all of it but
    /// experts (`host_experts`) where that does, and at the least what follows the last layer; `metrale_plan` tells how many those are. Other numbers are taken as they are: the model's layers or more
    /// (`METRALE_ALL_LAYERS`) are all of the model. `METRALE_OUT_OF_MEMORY`, before weights are read, with the bytes wanted and available, where
    /// that does not fit, and `METRALE_UNSUPPORTED` where the model cannot be cut there, because a later layer reads what an earlier one keeps.
    pub device_layers: u64,
    /// Of the layers with experts that the device runs, the first so many whose experts stay on the processor, which computes them while the
    /// device waits; all else of such a layer, its keys and values among it, is the device's. More than there are, or `METRALE_ALL_LAYERS`, are
    /// all. 0 is as few as `device_bytes` require where `device_layers` is 0, and none where that is a number.
    pub host_experts: u64,
}

/// Bytes that a model and its sequences take, by purpose. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_memory_plan {
    /// `sizeof(metrale_memory_plan)` as the host was compiled.
    pub struct_size: usize,
    /// Weights as they are held in memory.
    pub weights: u64,
    /// Key/value caches of all planned sequences.
    pub kv: u64,
    /// Recurrent state of all planned sequences.
    pub state: u64,
    /// Workspace of a step.
    pub scratch: u64,
    /// Everything else: tokenizer, tables, rows of logits, buffers.
    pub other: u64,
    /// The sum of the host's fields.
    pub total: u64,
    /// Bytes of files that were read or copied and stay in memory with the model (`METRALE_SOURCE_READ`,
    /// `METRALE_SOURCE_COPY`, `metrale_source_reader`).
    pub source: u64,
    /// Bytes of the device that computes, where that is not the processor: weights. The fields above then count the host's bytes alone.
    pub device_weights: u64,
    /// Key/value caches there.
    pub device_kv: u64,
    /// Recurrent state and rows of logits there.
    pub device_state: u64,
    /// Workspaces there.
    pub device_scratch: u64,
    /// The sum of the four.
    pub device_total: u64,
    /// Layers that run there: the last so many, and what follows the last one. The others run on the processor, whose bytes are the host's.
    pub device_layers: u64,
    /// Of those with experts, the first so many whose experts stay on the processor.
    pub host_experts: u64,
}

/// Tokens that end generation count as ordinary ones: `metrale_decode_step` never reports this sequence as done.
pub const METRALE_SEQ_IGNORE_END: u64 = 1;
/// `metrale_decode_step` records the log-probability of the token it chooses; see `metrale_sequence_info`. Costs one
/// pass over the row for each token.
pub const METRALE_SEQ_LOGPROBS: u64 = 2;

/// How to make a sequence. Zero is the default of every field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_seq_options {
    /// `sizeof(metrale_seq_options)` as the host was compiled.
    pub struct_size: usize,
    /// `METRALE_SEQ_*`, or-ed.
    pub flags: u64,
    /// Most tokens the sequence may hold; 0 takes the model's context. More than that is refused.
    pub context: u64,
    /// How tokens are chosen; NULL is greedy. Copied: the sampler may be freed afterwards.
    pub sampler: *const metrale_sampler,
    /// Replaces the sampler's seed unless 0, so that one sampler can serve many sequences.
    pub seed: u64,
}

/// What a sequence is at the moment. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_sequence_info {
    /// `sizeof(metrale_sequence_info)` as the host was compiled.
    pub struct_size: usize,
    /// Tokens it holds.
    pub length: u64,
    /// Most tokens it may hold.
    pub capacity: u64,
    /// The newest token; -1 when there is none.
    pub last_token: metrale_token,
    /// Natural logarithm of the probability that the model gave to the newest token `metrale_decode_step` chose,
    /// before any sampler stage; NaN without `METRALE_SEQ_LOGPROBS` or before the first step.
    pub last_logprob: f32,
}

/// What a sequence has done since it was made, and the memory it holds. A fork starts at zero. Calls that fail are not counted, but for
/// `cancelled`. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_stats {
    /// `sizeof(metrale_stats)` as the host was compiled.
    pub struct_size: usize,
    /// Tokens of prompts it has taken (`metrale_prefill`, `metrale_seq_feed`), the reused ones included.
    pub read: u64,
    /// Those of them that were not computed, because the model had kept them (`metrale_load_options.prefix_bytes`).
    pub reused: u64,
    /// Tokens that were produced (`metrale_decode_step`, `metrale_decode`, `metrale_step`).
    pub generated: u64,
    /// Passes through the model that it took part in.
    pub passes: u64,
    /// Calls and steps that a cancel ended.
    pub cancelled: u64,
    /// Nanoseconds of passes over prompts; one shared with other sequences counts in full for each.
    pub prefill_ns: u64,
    /// Nanoseconds of passes over produced tokens; as above.
    pub decode_ns: u64,
    /// Bytes of keys and values that no other sequence and no prefix shares.
    pub kv_owned: u64,
    /// Bytes of keys and values shared with forks or kept prefixes; the next write to a page makes it the sequence's own. Right after
    /// `metrale_seq_fork` this is what the fork saved.
    pub kv_shared: u64,
    /// Bytes of recurrent state and rows of logits, those of marks included, that nobody shares.
    pub state_owned: u64,
    /// Such bytes that forks or kept prefixes share.
    pub state_shared: u64,
}

/// What a model keeps for prompts that begin alike (`metrale_load_options.prefix_bytes`); all zero without. Set `struct_size` before the
/// call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_model_counts {
    /// `sizeof(metrale_model_counts)` as the host was compiled.
    pub struct_size: usize,
    /// Bytes that may be kept.
    pub prefix_budget: u64,
    /// Bytes that are kept now: pages, states and lists, also where a sequence still shares them. Never more than the budget.
    pub prefix_bytes: u64,
    /// Pieces of prompts that are kept.
    pub prefix_entries: u64,
    /// Tokens of these pieces.
    pub prefix_tokens: u64,
    /// Prompts that found a beginning to take up.
    pub prefix_hits: u64,
    /// Prompts that found none.
    pub prefix_misses: u64,
    /// Tokens that did not have to be computed.
    pub prefix_reused: u64,
    /// Pieces and states that gave way to others.
    pub prefix_evicted: u64,
}

/// The library's choice: the last token's row, for models that read from left to right; the mean for encoders.
pub const METRALE_POOLING_DEFAULT: u32 = 0;
/// A row for each token.
pub const METRALE_POOLING_NONE: u32 = 1;
/// The last token's row.
pub const METRALE_POOLING_LAST: u32 = 2;
/// The mean of all rows.
pub const METRALE_POOLING_MEAN: u32 = 3;
/// The first token's row.
pub const METRALE_POOLING_FIRST: u32 = 4;
/// Rows are scaled to length 1; one of zeros stays.
pub const METRALE_EMBED_NORMALIZE: u64 = 1;

/// How to embed. Zero is the default of every field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_embed_options {
    /// `sizeof(metrale_embed_options)` as the host was compiled.
    pub struct_size: usize,
    /// `METRALE_EMBED_*`, or-ed.
    pub flags: u64,
    /// `METRALE_POOLING_*`.
    pub pooling: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// What `metrale_step` did for one sequence. Set `struct_size` of each before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_step_result {
    /// `sizeof(metrale_step_result)` as the host was compiled; the same in all of an array.
    pub struct_size: usize,
    /// `METRALE_OK`: its queue is read, or a token is produced. `METRALE_DONE`: a token that ends generation is produced.
    /// `METRALE_AGAIN`: the budget ran out, step again. Negative: why the sequence cannot go on (`METRALE_CONTEXT_FULL`,
    /// `METRALE_INVALID_STATE` without any token, `METRALE_NUMERIC_FAULT`, `METRALE_NO_VALID_TOKEN`) or that its work was
    /// cancelled (`METRALE_CANCELLED`); what `read` counts was done before that and stays.
    pub status: metrale_status,
    /// The token that was produced and appended; -1 for none.
    pub token: metrale_token,
    /// Tokens this call read from the queue and appended.
    pub read: u64,
    /// Tokens that still wait in the queue.
    pub queued: u64,
}

/// Keeps only the highest logit; ties go to the lowest id. No field is used.
pub const METRALE_STAGE_GREEDY: u32 = 1;
/// Divides every logit by `value`, which is at least 0; below 1e-5 it is the greedy stage.
pub const METRALE_STAGE_TEMPERATURE: u32 = 2;
/// Keeps the `count` highest logits; 0 keeps all.
pub const METRALE_STAGE_TOP_K: u32 = 3;
/// Keeps the likeliest tokens until their probabilities reach `value` (0 to 1), and at least one.
pub const METRALE_STAGE_TOP_P: u32 = 4;
/// Keeps tokens at least `value` (0 to 1) times as likely as the likeliest.
pub const METRALE_STAGE_MIN_P: u32 = 5;
/// For every token among the newest `count` (0: all): divides a positive logit by `value`, multiplies another by it.
pub const METRALE_STAGE_REPETITION: u32 = 6;
/// For every token among the newest `count` (0: all): subtracts `value` once.
pub const METRALE_STAGE_PRESENCE: u32 = 7;
/// For every token among the newest `count` (0: all): subtracts `value` times how often it occurs there.
pub const METRALE_STAGE_FREQUENCY: u32 = 8;
/// Adds `value` to the logit of `token`; minus infinity rules the token out.
pub const METRALE_STAGE_BIAS: u32 = 9;

/// Locally typical sampling: keeps tokens, those first whose surprise is nearest to the entropy of the row, until their
/// probabilities reach `value` (0 to 1), and at least one.
pub const METRALE_STAGE_TYPICAL: u32 = 10;
/// Top-n-sigma: keeps logits of at least the highest minus `value` standard deviations of the logits that were not ruled out.
pub const METRALE_STAGE_TOP_N_SIGMA: u32 = 11;
/// Exclude top choices: in a share of `second` (0 to 1) of all draws, of the tokens that are at least `value` (0 to 1) likely
/// all but the least likely go. Above 0.5 `value` never finds two.
pub const METRALE_STAGE_XTC: u32 = 12;
/// Mirostat, first version: keeps as many of the likeliest tokens as make the surprise of the drawn one about `value` bits,
/// by an exponent that is estimated from the likeliest `count` (at least 2; 100 is usual), and learns from the error at the
/// rate `second` (0.1 is usual). Only as the last stage. Its state belongs to the sequence, like the generator.
pub const METRALE_STAGE_MIROSTAT: u32 = 13;
/// Mirostat, second version: keeps tokens up to a surprise that follows the drawn ones, so that they come to `value` bits; the
/// rate is `second`. Only as the last stage. Its state belongs to the sequence, like the generator.
pub const METRALE_STAGE_MIROSTAT_V2: u32 = 14;
/// Don't repeat yourself: where a token would make a passage longer that occurs before among the newest `count` tokens (0: all)
/// and has `length` (at least 1) or more tokens, subtracts `value` times `second` (at least 1) to the power of the tokens it has
/// beyond `length`.
pub const METRALE_STAGE_DRY: u32 = 15;
/// No passage that a DRY stage of this sampler sees reaches over `token`. Its place does not matter.
pub const METRALE_STAGE_DRY_BREAKER: u32 = 16;
/// The host's function of `metrale_sampler_set_hook`. No field is used.
pub const METRALE_STAGE_HOOK: u32 = 17;

/// One stage of a sampler. This struct never grows; fields that its stage does not use must be zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_sampler_stage {
    /// `METRALE_STAGE_*`.
    pub kind: u32,
    /// A count or window.
    pub count: u32,
    /// A token.
    pub token: metrale_token,
    /// The stage's number.
    pub value: f32,
    /// Its second number.
    pub second: f32,
    /// A length in tokens.
    pub length: u32,
    /// Must be zero.
    pub reserved: [u32; 2],
}

/// Called where `METRALE_STAGE_HOOK` stands among a sampler's stages, on the thread that steps, once for each token to be
/// chosen. `logits` are `count` floats, one for each token: what earlier stages made of them, minus infinity for a token that
/// they or the sequence's grammar ruled out; it may change them. A token that was ruled out stays so, whatever is written;
/// minus infinity rules one out; NaN and infinity end the step with `METRALE_NUMERIC_FAULT`. `history` are the sequence's
/// `history_count` tokens, prompt included. Both pointers are valid during the call. `user` is the host's.
///
/// Returns 0, or any other number to fail: the sequence is then as before, its status is the number if that is an error of
/// this header, else `METRALE_CANCELLED`, and other sequences of a `metrale_step` go on. The function must return: no
/// exception and no `longjmp` may leave it. What it does may depend on its arguments only: where a step leaves off in the
/// middle it is called again, and must come to the same. It may look at other sequences and work on them, but not call
/// `metrale_step` (`METRALE_INVALID_STATE`); the sequence it is called for is `METRALE_BUSY`.
pub type metrale_hook_fn = Option<
    unsafe extern "C" fn(user: *mut c_void, logits: *mut f32, count: usize, history: *const metrale_token, history_count: usize) -> i32,
>;

/// `metrale_tokenize` puts the tokens around the text that the model was trained to see there.
pub const METRALE_TOKENIZE_ADD_SPECIAL: u32 = 1;
/// `metrale_tokenize` takes the text of a special token for that token. Leave it out for text from a stranger.
pub const METRALE_TOKENIZE_PARSE_SPECIAL: u32 = 2;
/// `metrale_detokenize` leaves special tokens out.
pub const METRALE_DETOKENIZE_SKIP_SPECIAL: u32 = 1;
/// The text stream shows the text of special tokens.
pub const METRALE_TEXT_SPECIALS: u64 = 1;
/// The text stream gives bytes as they are, without waiting for whole characters.
pub const METRALE_TEXT_RAW_BYTES: u64 = 2;

/// How to turn tokens into text. Zero is the default of every field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_text_options {
    /// `sizeof(metrale_text_options)` as the host was compiled.
    pub struct_size: usize,
    /// `METRALE_TEXT_*`, or-ed.
    pub flags: u64,
    /// Stop strings, one after the other with a NUL byte between them: `"\nUser:\0###"`. Copied.
    pub stops: *const u8,
    /// Bytes at `stops`; 0 for no stop string.
    pub stops_len: usize,
}

/// A piece of text, filled by `metrale_text_push` and `metrale_text_flush`. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_text_piece {
    /// `sizeof(metrale_text_piece)` as the host was compiled.
    pub struct_size: usize,
    /// The bytes, not terminated; UTF-8 unless `METRALE_TEXT_RAW_BYTES`. They belong to the stream.
    pub bytes: *const u8,
    /// How many.
    pub len: usize,
    /// The tokens that the bytes came from, counted from the stream's first push: this one ...
    pub first_token: u64,
    /// ... up to, and without, this one. Both are 0 when there are no bytes.
    pub end_token: u64,
    /// Index of the stop string that was reached, which is not part of the bytes; -1 for none.
    pub stop: i64,
}

// SAFETY: for all of these: repr(C), `struct_size` first; integers, floats, pointers and an optional function pointer
// may all be zero.
unsafe impl Versioned for metrale_load_options {
    const NAME: &'static str = "metrale_load_options";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_load_progress {
    const NAME: &'static str = "metrale_load_progress";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_runtime_options {
    const NAME: &'static str = "metrale_runtime_options";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_device {
    const NAME: &'static str = "metrale_device";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_memory_usage {
    const NAME: &'static str = "metrale_memory_usage";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_memory_plan {
    const NAME: &'static str = "metrale_memory_plan";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_seq_options {
    const NAME: &'static str = "metrale_seq_options";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_sequence_info {
    const NAME: &'static str = "metrale_sequence_info";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_step_result {
    const NAME: &'static str = "metrale_step_result";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_text_options {
    const NAME: &'static str = "metrale_text_options";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_text_piece {
    const NAME: &'static str = "metrale_text_piece";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_stats {
    const NAME: &'static str = "metrale_stats";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_model_counts {
    const NAME: &'static str = "metrale_model_counts";
}
// SAFETY: as above.
unsafe impl Versioned for metrale_embed_options {
    const NAME: &'static str = "metrale_embed_options";
}
