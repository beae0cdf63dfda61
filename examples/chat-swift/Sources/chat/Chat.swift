// A chat in a terminal.
//
//     chat MODEL "What is a monad?"     one answer
//     chat MODEL                        a conversation: a line in, an answer out
//     chat --raw MODEL "Once upon"      continue the text as it stands, without the model's chat template
//
// The answer goes to stdout piece by piece as it is made; everything else goes to stderr.

import Foundation
import Metrale

@main
struct Chat {
    let model: Model
    let isRaw: Bool

    static func main() async {
        var words = Array(CommandLine.arguments.dropFirst())
        let isRaw = words.first == "--raw"
        if isRaw { words.removeFirst() }
        let isOption = words.first?.hasPrefix("-") ?? false
        guard !isOption, words.count == 2 || words.count == 1 && !isRaw else {
            note("usage: chat [--raw] MODEL [PROMPT]\n")
            exit(2)
        }
        do {
            var options = LoadOptions()
            options.prefixBytes = 64 << 20 // a conversation is not computed again for each turn
            let chat = Chat(model: try await Model.load(words[0], options: options), isRaw: isRaw)
            defer { chat.model.close() }
            if words.count == 2 {
                _ = try await chat.answer([Message(role: "user", content: words[1])])
            } else {
                try await chat.converse()
            }
        } catch {
            note("chat: \(error)\n")
            exit(1)
        }
    }

    func converse() async throws {
        var messages: [Message] = []
        note("> ")
        while let line = readLine() {
            if !line.isEmpty {
                messages.append(Message(role: "user", content: line))
                messages.append(Message(role: "assistant", content: try await answer(messages)))
            }
            note("> ")
        }
    }

    /// Shows what the model says to the conversation, and gives it back.
    func answer(_ messages: [Message]) async throws -> String {
        let sequence = try TokenSequence(model)
        defer { sequence.close() }
        let last = messages.last?.content ?? ""
        try await sequence.prefill(isRaw ? model.tokenize(last) : model.chatTokens(messages))
        var text = isRaw ? last : ""
        FileHandle.standardOutput.write(Data(text.utf8))
        for try await piece in try sequence.text(maxTokens: 256) {
            FileHandle.standardOutput.write(Data(piece.utf8))
            text += piece
        }
        FileHandle.standardOutput.write(Data("\n".utf8))
        return text
    }
}

func note(_ text: String) {
    FileHandle.standardError.write(Data(text.utf8))
}
