// A loaded model, and what it does without a sequence.

import CMetrale

/// A token's id. Negative values are never ids.
public typealias Token = Int32

/// A loaded model: immutable, shared by its sequences, safe to use from any number of tasks and threads at once.
public final class Model: @unchecked Sendable { // the library allows every call on a model from any thread
    let handle: OpaquePointer
    let stepper = Stepper()

    init(_ handle: OpaquePointer) { self.handle = handle }

    deinit { close() }

    /// Gives the model up; its memory goes once its sequences are gone, too. May be called often, and from any thread; calls on a
    /// closed model throw `.invalidHandle`.
    public func close() { metrale_free(handle) }

    /// What the model is, as a JSON object: `model_type`, `parameters`, `context`, `vocab` and more.
    public func info() throws -> String {
        var text: UnsafePointer<CChar>?
        try check { metrale_model_info(handle, &text, nil, $0) }
        return text.map { String(cString: $0) } ?? ""
    }

    /// One fact of `info()`, or one value of the file's own metadata: text as it is, everything else as JSON.
    public func meta(_ key: String) throws -> String {
        let bytes: [UInt8] = try sized(256) { metrale_model_meta(handle, key, $0, $1, $2, $3) }
        return String(decoding: bytes, as: UTF8.self)
    }

    /// The tokens of a text. `addSpecial` puts those around it that the model was trained to see there; `parseSpecial` takes the
    /// text of a special token for that token, which is for prompts of `renderChat`, never for text from a stranger.
    public func tokenize(_ text: String, addSpecial: Bool = true, parseSpecial: Bool = false) throws -> [Token] {
        let bytes = Array(text.utf8)
        var flags: UInt32 = 0
        if addSpecial { flags |= UInt32(METRALE_TOKENIZE_ADD_SPECIAL) }
        if parseSpecial { flags |= UInt32(METRALE_TOKENIZE_PARSE_SPECIAL) }
        return try sized(bytes.count / 2 + 8) { metrale_tokenize(handle, bytes, bytes.count, flags, $0, $1, $2, $3) }
    }

    /// The text of tokens, by default without special ones.
    public func detokenize(_ tokens: [Token], specials: Bool = false) throws -> String {
        let flags = specials ? 0 : UInt32(METRALE_DETOKENIZE_SKIP_SPECIAL)
        let bytes: [UInt8] = try sized(8 * tokens.count + 8) { metrale_detokenize(handle, tokens, tokens.count, flags, $0, $1, $2, $3) }
        return String(decoding: bytes, as: UTF8.self)
    }

    /// What the model makes of tokens, as one row of floats, by default scaled to length 1.
    public func embed(_ tokens: [Token], normalize: Bool = true) async throws -> [Float] {
        try await blocking {
            var options = metrale_embed_options()
            options.struct_size = MemoryLayout<metrale_embed_options>.size
            options.flags = normalize ? UInt64(METRALE_EMBED_NORMALIZE) : 0
            return try sized(0) { metrale_embed(self.handle, tokens, tokens.count, &options, $0, $1, $2, $3) }
        }
    }

    /// The library's version, such as "0.1.0".
    public static var libraryVersion: String { String(cString: metrale_version_string()) }

    /// Ends what every sequence of the model is doing: those calls throw `.cancelled`.
    public func cancelAll() { metrale_cancel_all(handle, nil) }
}

/// A compiled grammar: immutable, it may serve any number of sequences of its model.
public final class Grammar: @unchecked Sendable { // as Model
    let handle: OpaquePointer

    private init(_ handle: OpaquePointer) { self.handle = handle }

    deinit { close() }

    /// Gives the grammar up; sequences that follow it keep it.
    public func close() { metrale_grammar_free(handle) }

    /// One JSON value that the schema allows.
    public static func jsonSchema(_ schema: String, for model: Model) throws -> Grammar {
        let bytes = Array(schema.utf8)
        return Grammar(try made { metrale_grammar_json_schema(model.handle, bytes, bytes.count, $0, $1) })
    }

    /// Rules `name ::= ...`; the start is `root`.
    public static func gbnf(_ source: String, for model: Model) throws -> Grammar {
        let bytes = Array(source.utf8)
        return Grammar(try made { metrale_grammar_gbnf(model.handle, bytes, bytes.count, $0, $1) })
    }

    /// Lark's notation; the start is `start`.
    public static func lark(_ source: String, for model: Model) throws -> Grammar {
        let bytes = Array(source.utf8)
        return Grammar(try made { metrale_grammar_lark(model.handle, bytes, bytes.count, $0, $1) })
    }

    /// A regular expression, which the whole text matches.
    public static func regex(_ pattern: String, for model: Model) throws -> Grammar {
        let bytes = Array(pattern.utf8)
        return Grammar(try made { metrale_grammar_regex(model.handle, bytes, bytes.count, $0, $1) })
    }
}
