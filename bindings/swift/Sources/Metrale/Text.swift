// Text as it is made.

import CMetrale

extension TokenSequence {
    /// The text of the next tokens, as they are made, in pieces that are whole characters. It ends when the model does, before one of
    /// the `stops`, after `maxTokens`, or when the sequence is full. Each piece is made when it is asked for, so the sequence holds
    /// what was read, and leaving the loop early is all it takes to stop. When the task is cancelled, what is being computed is too.
    ///
    ///     for try await piece in try sequence.text() { print(piece, terminator: "") }
    public func text(maxTokens: Int = .max, stops: [String] = []) throws -> AsyncThrowingStream<String, any Error> {
        let maker = try TextMaker(self, maxTokens: maxTokens, stops: stops)
        return AsyncThrowingStream(unfolding: { try await maker.next() })
    }
}

/// The state of one stream.
private final class TextMaker: @unchecked Sendable { // a stream asks for one piece at a time
    private let sequence: TokenSequence
    private let handle: OpaquePointer
    private var left: Int
    private var isOver = false

    init(_ sequence: TokenSequence, maxTokens: Int, stops: [String]) throws {
        let bytes = Array(stops.joined(separator: "\0").utf8)
        handle = try bytes.withUnsafeBufferPointer { stops in
            var options = metrale_text_options()
            options.struct_size = MemoryLayout<metrale_text_options>.size
            options.stops = stops.baseAddress
            options.stops_len = stops.count
            return try made { metrale_text_new(sequence.model.handle, &options, $0, $1) }
        }
        self.sequence = sequence
        left = maxTokens
    }

    deinit { metrale_text_free(handle) }

    /// The next piece that is not empty; nil at the end.
    func next() async throws -> String? {
        while !isOver {
            let piece = try await step()
            if !piece.isEmpty { return piece }
        }
        return nil
    }

    private func step() async throws -> String {
        if left <= 0 { return try flush() }
        left -= 1
        let token: Token
        do {
            let next = try await sequence.next()
            if next.isEnd { return try flush() }
            token = next.token
        } catch let error as MetraleError where error.status == .contextFull || error.status == .grammarDone {
            return try flush()
        }
        var isStop = false
        let piece = try read { piece, error in
            let status = metrale_text_push(handle, token, piece, error)
            isStop = status == METRALE_DONE
            return status
        }
        if isStop { isOver = true }
        return piece
    }

    /// What was held back, at the end.
    private func flush() throws -> String {
        isOver = true
        return try read { metrale_text_flush(handle, $0, $1) }
    }

    private func read(_ call: (UnsafeMutablePointer<metrale_text_piece>, ErrorPlace) -> metrale_status) throws -> String {
        var piece = metrale_text_piece()
        piece.struct_size = MemoryLayout<metrale_text_piece>.size
        try check { call(&piece, $0) }
        return String(decoding: UnsafeBufferPointer(start: piece.bytes, count: piece.len), as: UTF8.self)
    }
}
