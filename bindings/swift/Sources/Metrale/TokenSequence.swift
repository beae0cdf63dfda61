// One timeline of tokens.

import CMetrale

/// One timeline of tokens with its cache, sampler and grammar. One task at a time uses it; calls that meet inside the library throw
/// `.busy` rather than wait. `cancel` and `close` may come from anywhere.
public final class TokenSequence: @unchecked Sendable { // the library guards every call; `hook` changes in the calls of one task only
    public let model: Model
    let handle: OpaquePointer
    private(set) var hook: HookBox?
    private var earlierHooks: [HookBox] = [] // a rollback may bring them back

    /// Makes an empty sequence. `context` is the most tokens it may hold, 0 for the model's; `seed` replaces the sampler's unless 0.
    public init(_ model: Model, context: UInt64 = 0, sampler: Sampler = Sampler(), seed: UInt64 = 0) throws {
        let (native, hook) = try sampler.native()
        defer { metrale_sampler_free(native) }
        var options = metrale_seq_options()
        options.struct_size = MemoryLayout<metrale_seq_options>.size
        options.context = context
        options.sampler = native
        options.seed = seed
        handle = try made { metrale_seq_new(model.handle, &options, $0, $1) }
        self.model = model
        self.hook = hook
    }

    private init(_ handle: OpaquePointer, like other: TokenSequence) {
        self.handle = handle
        model = other.model
        hook = other.hook
        earlierHooks = other.earlierHooks
    }

    deinit { close() }

    /// Gives the sequence up. May be called often, and from any thread; calls on a closed sequence throw `.invalidHandle`.
    public func close() {
        metrale_cancel(handle, nil)
        metrale_seq_free(handle)
    }

    /// Ends what the sequence is doing, which throws `.cancelled` and leaves the sequence as it was. From any thread.
    public func cancel() { metrale_cancel(handle, nil) }

    /// Tokens it holds.
    public var count: Int { get throws { try Int(info().length) } }

    /// Most tokens it may hold.
    public var capacity: Int { get throws { try Int(info().capacity) } }

    private func info() throws -> metrale_sequence_info {
        var info = metrale_sequence_info()
        info.struct_size = MemoryLayout<metrale_sequence_info>.size
        try check { metrale_seq_info(handle, &info, $0) }
        return info
    }

    /// Appends tokens and computes what may follow them. When it fails, or the task is cancelled, the sequence is as before.
    public func prefill(_ tokens: [Token]) async throws {
        try Task.checkCancellation()
        if tokens.isEmpty { return }
        let mark = try self.mark() // the queue is read in pieces: the mark makes this all or nothing
        defer { metrale_seq_commit(handle, mark, nil) }
        try check { metrale_seq_feed(handle, tokens, tokens.count, $0) }
        do {
            _ = try await model.stepper.run(self)
        } catch {
            metrale_seq_rollback(handle, mark, nil)
            throw error
        }
    }

    /// Chooses one token, appends it and computes what may follow. `isEnd` when the token ends generation; going on is allowed.
    public func next() async throws -> (token: Token, isEnd: Bool) {
        try Task.checkCancellation()
        let stepped = try await model.stepper.run(self)
        return (stepped.token, stepped.isEnd)
    }

    /// Changes how the next tokens are chosen, from the sampler's seed on.
    public func use(_ sampler: Sampler) throws {
        let (native, hook) = try sampler.native()
        defer { metrale_sampler_free(native) }
        try check { metrale_seq_sampling(handle, native, $0) }
        if let before = self.hook { earlierHooks.append(before) }
        self.hook = hook
    }

    /// Makes the chosen tokens follow a grammar, from its start; nil lifts the one in force.
    public func follow(_ grammar: Grammar?) throws {
        try check { metrale_seq_grammar(handle, grammar?.handle, $0) }
    }

    /// A second sequence that holds the same tokens and will choose the same ones. Memory is shared until one of the two writes.
    public func fork() throws -> TokenSequence {
        TokenSequence(try made { metrale_seq_fork(handle, $0, $1) }, like: self)
    }

    /// Marks this point, for `rollback` and `commit`.
    public func mark() throws -> UInt64 {
        var mark: UInt64 = 0
        try check { metrale_seq_mark(handle, &mark, $0) }
        return mark
    }

    /// Goes back to a mark, as often as wanted, bit for bit. Later marks end.
    public func rollback(to mark: UInt64) throws { try check { metrale_seq_rollback(handle, mark, $0) } }

    /// Keeps what came since a mark and gives the mark up.
    public func commit(_ mark: UInt64) throws { try check { metrale_seq_commit(handle, mark, $0) } }

    /// Keeps the first tokens and forgets the rest; throws `.unsupported` where the model's state cannot go back.
    public func truncate(to count: Int) throws { try check { metrale_seq_truncate(handle, count, $0) } }

    /// The sequence's state as bytes, for `restore` on a sequence of the same model.
    public func save() throws -> [UInt8] { try sized(0) { metrale_seq_save(handle, $0, $1, $2, $3) } }

    /// Becomes what `save` wrote, all or nothing.
    public func restore(_ state: [UInt8]) throws { try check { metrale_seq_restore(handle, state, state.count, $0) } }

    /// The logits of the token that follows all tokens the sequence holds, one for each id.
    public func logits() throws -> [Float] {
        var row: UnsafePointer<Float>?
        var count = 0
        try check { metrale_seq_logits(handle, &row, &count, $0) }
        return Array(UnsafeBufferPointer(start: row, count: count))
    }
}
