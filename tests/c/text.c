/* Text to tokens and back, the chat template, and the text stream. */
#include "check.h"

#define TEXT "Once upon a time, there was a little girl named Lily."

static metrale_model *model;

static size_t tokenize(const char *text, size_t len, uint32_t flags, metrale_token *out, size_t capacity) {
    size_t count = 0, needed = 0;
    metrale_status expected = METRALE_MORE;
    OK(metrale_tokenize(model, (const uint8_t *)text, len, flags, out, capacity, &count, &err));
    if (count == 0) expected = METRALE_OK;
    EXPECT(expected, metrale_tokenize(model, (const uint8_t *)text, len, flags, NULL, 0, &needed, &err));
    CHECK(needed == count);
    return count;
}

static void round_trip(void) {
    metrale_token plain[200], special[200];
    size_t count = tokenize(TEXT, strlen(TEXT), 0, plain, 200);
    CHECK(count > 5);
    size_t with = tokenize(TEXT, strlen(TEXT), METRALE_TOKENIZE_ADD_SPECIAL, special, 200);
    CHECK(with > count && special[0] == 1); /* the token that begins a text */

    uint8_t bytes[200];
    size_t len = 0;
    OK(metrale_detokenize(model, plain, count, 0, bytes, sizeof bytes, &len, &err));
    CHECK(len == strlen(TEXT) && memcmp(bytes, TEXT, len) == 0);
    OK(metrale_detokenize(model, special, with, METRALE_DETOKENIZE_SKIP_SPECIAL, bytes, sizeof bytes, &len, &err));
    CHECK(len == strlen(TEXT) && memcmp(bytes, TEXT, len) == 0);

    /* Too small a buffer: the size, and not a byte more. */
    memset(bytes, 7, sizeof bytes);
    EXPECT(METRALE_MORE, metrale_detokenize(model, plain, count, 0, bytes, len - 1, &len, &err));
    CHECK(len == strlen(TEXT) && bytes[0] == 7);
    memset(special, 0, sizeof special);
    EXPECT(METRALE_MORE, metrale_tokenize(model, (const uint8_t *)TEXT, strlen(TEXT), 0, special, 1, &len, &err));
    CHECK(len == count && special[0] == 0);

    /* No text is no token. */
    CHECK(tokenize("", 0, 0, plain, 200) == 0);
    OK(metrale_tokenize(model, NULL, 0, 0, NULL, 0, &count, &err));
    CHECK(count == 0);
}

static void strange_bytes(void) {
    metrale_token tokens[64];
    uint8_t bytes[64];
    size_t count = tokenize("a\0b", 3, 0, tokens, 64), len = 0;
    OK(metrale_detokenize(model, tokens, count, 0, bytes, sizeof bytes, &len, &err));
    CHECK(len == 3 && memcmp(bytes, "a\0b", 3) == 0);

    metrale_error *err = NULL;
    uint64_t offset = 0;
    CHECK(metrale_tokenize(model, (const uint8_t *)"ab\xff", 3, 0, tokens, 64, &count, &err) == METRALE_INVALID_ARGUMENT);
    CHECK(metrale_error_offset(err, &offset) && offset == 2);
    metrale_error_free(err);
}

static void refusals(void) {
    metrale_token bad[] = {5, -1};
    uint8_t bytes[64] = {7};
    size_t len = 99;
    metrale_error *err = NULL;
    uint64_t offset = 0;
    CHECK(metrale_detokenize(model, bad, 2, 0, bytes, 64, &len, &err) == METRALE_INVALID_TOKEN);
    CHECK(metrale_error_offset(err, &offset) && offset == 1);
    CHECK(len == 99 && bytes[0] == 7);
    metrale_error_free(err);
    bad[1] = 512;
    EXPECT(METRALE_INVALID_TOKEN, metrale_detokenize(model, bad, 2, 0, bytes, 64, &len, &err));
    EXPECT(METRALE_INVALID_TOKEN, metrale_token_bytes(model, INT32_MAX, bytes, 64, &len, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_detokenize(model, bad, 1, 8, bytes, 64, &len, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_tokenize(model, bytes, 1, 4, bad, 2, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_tokenize(model, NULL, 1, 0, bad, 2, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_tokenize(model, bytes, 1, 0, bad, 2, NULL, &err));
    EXPECT(METRALE_TOO_LARGE, metrale_tokenize(model, bytes, SIZE_MAX, 0, bad, 2, &len, &err));
    EXPECT(METRALE_TOO_LARGE, metrale_detokenize(model, bad, SIZE_MAX / 2, 0, bytes, 64, &len, &err));
    CHECK(len == 99);
    OK(metrale_token_bytes(model, 13, bytes, 64, &len, &err));
    CHECK(len > 0);
}

static void chat(void) {
    const char *good = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";
    const char *odd = "{\"messages\":[],\"temperature\":1}";
    size_t len = 0;
    uint8_t out[256];
    /* This model has no template. */
    EXPECT(METRALE_NOT_FOUND, metrale_chat_render(model, (const uint8_t *)good, strlen(good), out, 256, &len, &err));
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_chat_render(model, (const uint8_t *)odd, strlen(odd), out, 256, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_chat_render(model, (const uint8_t *)good, 5, out, 256, &len, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_chat_render(model, NULL, 0, out, 256, &len, &err));
}

static metrale_text_piece piece(void) {
    metrale_text_piece piece = {0};
    piece.struct_size = sizeof piece;
    return piece;
}

static void stream(void) {
    metrale_token tokens[200];
    size_t count = tokenize(TEXT, strlen(TEXT), 0, tokens, 200), shown = 0;
    char text[200];
    metrale_text *stream = NULL;
    OK(metrale_text_new(model, NULL, &stream, &err));
    metrale_text_piece out = piece();
    for (size_t i = 0; i < count; i++) {
        OK(metrale_text_push(stream, tokens[i], &out, &err));
        CHECK(shown + out.len < sizeof text && out.stop == -1);
        memcpy(text + shown, out.bytes, out.len);
        shown += out.len;
    }
    OK(metrale_text_flush(stream, &out, &err));
    memcpy(text + shown, out.bytes, out.len);
    shown += out.len;
    text[shown] = '\0';
    CHECK(strstr(text, "upon a time, there was a little girl named Lily.") != NULL);
    EXPECT(METRALE_INVALID_TOKEN, metrale_text_push(stream, -1, &out, &err));
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_text_push(stream, 5, NULL, &err));

    /* The stream keeps what it needs of the model, and nothing else. */
    metrale_text_free(stream);
    metrale_text_free(stream);
    EXPECT(METRALE_INVALID_HANDLE, metrale_text_push(stream, 5, &out, &err));
}

static void stop_strings(void) {
    metrale_token tokens[200];
    size_t count = tokenize(TEXT, strlen(TEXT), 0, tokens, 200), shown = 0;
    char text[200];
    metrale_text_options options = {0};
    options.struct_size = sizeof options;
    options.stops = (const uint8_t *)"never\0 there was";
    options.stops_len = sizeof "never\0 there was" - 1;
    metrale_text *stream = NULL;
    OK(metrale_text_new(model, &options, &stream, &err));
    metrale_text_piece out = piece();
    metrale_status status = METRALE_OK;
    for (size_t i = 0; i < count && status == METRALE_OK; i++) {
        metrale_error *err = NULL;
        status = metrale_text_push(stream, tokens[i], &out, &err);
        CHECK(err == NULL);
        memcpy(text + shown, out.bytes, out.len);
        shown += out.len;
    }
    text[shown] = '\0';
    CHECK(status == METRALE_DONE && out.stop == 1);
    CHECK(shown >= 5 && strcmp(text + shown - 5, "time,") == 0);
    EXPECT(METRALE_INVALID_STATE, metrale_text_push(stream, tokens[0], &out, &err));
    OK(metrale_text_reset(stream, &err));
    OK(metrale_text_push(stream, tokens[0], &out, &err));
    metrale_text_free(stream);

    options.stops_len = 6; /* "never" and an empty one */
    EXPECT(METRALE_INVALID_ARGUMENT, metrale_text_new(model, &options, &stream, &err));
    options.flags = 1 << 20;
    EXPECT(METRALE_UNKNOWN_OPTION, metrale_text_new(model, &options, &stream, &err));
}

/* Row 62: with stop strings and characters that are held back, each piece still says which tokens it came from, so that their
 * log-probabilities can be put beside it. What is right is counted here from the bytes of each token. */
static void spans_beside_logprobs(void) {
    enum { STEPS = 40 };
    metrale_token tokens[STEPS], prompt[] = {1, 403, 407, 261, 378};
    float logprobs[STEPS];
    size_t starts[STEPS + 1] = {0};
    char all[1024];
    metrale_seq_options options = {.struct_size = sizeof options, .flags = METRALE_SEQ_LOGPROBS | METRALE_SEQ_IGNORE_END};
    metrale_seq *seq = NULL;
    OK(metrale_seq_new(model, &options, &seq, &err));
    OK(metrale_prefill(seq, prompt, 5, &err));
    for (size_t i = 0; i < STEPS; i++) {
        float row = 0;
        CHECK(metrale_decode_step(&seq, 1, &tokens[i], NULL) >= METRALE_OK);
        metrale_sequence_info info = {.struct_size = sizeof info};
        OK(metrale_seq_info(seq, &info, &err));
        logprobs[i] = info.last_logprob;
        CHECK(logprobs[i] <= 0 && info.last_token == tokens[i]);
        /* The same number from the row it was chosen from. */
        metrale_seq *before = NULL;
        OK(metrale_seq_fork(seq, &before, &err));
        OK(metrale_seq_truncate(before, 5 + i, &err));
        OK(metrale_seq_logprobs(before, &tokens[i], 1, &row, 0, NULL, NULL, &err));
        CHECK(row == logprobs[i]);
        metrale_seq_free(before);
        size_t n = 0;
        OK(metrale_token_bytes(model, tokens[i], (uint8_t *)all + starts[i], sizeof all - starts[i], &n, &err));
        starts[i + 1] = starts[i] + n;
    }
    metrale_seq_free(seq);
    all[starts[STEPS]] = 0;
    /* A stop string out of the middle of what comes, across a token's end, and one that only begins. */
    char stops[64];
    size_t at = starts[STEPS / 2] - 1, stops_len = (size_t)sprintf(stops, "%.4s", all + at) + 1;
    const char *found = strstr(all, stops);
    CHECK(found != NULL);
    at = (size_t)(found - all);
    stops_len += (size_t)sprintf(stops + stops_len, "%.2s~", all + at / 2);
    metrale_text_options text = {.struct_size = sizeof text, .stops = (const uint8_t *)stops, .stops_len = stops_len};
    metrale_text *stream = NULL;
    OK(metrale_text_new(model, &text, &stream, &err));
    /* A stream drops the space that its first token begins with; bytes are counted from there. */
    size_t shown = all[0] == ' ' ? 1 : 0;
    for (size_t i = 0; i < STEPS; i++) {
        metrale_text_piece out = piece();
        metrale_status status = metrale_text_push(stream, tokens[i], &out, NULL);
        CHECK(status >= METRALE_OK);
        if (out.len) {
            CHECK(memcmp(all + shown, out.bytes, out.len) == 0);
            /* Its first byte lies in its first token, its last byte in its last one. */
            CHECK(out.first_token < out.end_token && out.end_token <= i + 1);
            CHECK(starts[out.first_token] <= shown && shown < starts[out.first_token + 1]);
            size_t last = shown + out.len - 1;
            CHECK(starts[out.end_token - 1] <= last && last < starts[out.end_token]);
            shown += out.len;
        } else {
            CHECK(out.first_token == 0 && out.end_token == 0);
        }
        if (status == METRALE_DONE) {
            CHECK(out.stop == 0 && shown == at);
            break;
        }
        CHECK(i + 1 < STEPS);
    }
    metrale_text_free(stream);
}

int main(int argc, char **argv) {
    model = load_model(arguments(argc, argv));
    round_trip();
    strange_bytes();
    refusals();
    chat();
    stream();
    stop_strings();
    spans_beside_logprobs();
    metrale_free(model);
    return 0;
}
