// Conversations as prompts.

import CMetrale
import Foundation

/// One message of a conversation.
public struct Message: Codable, Hashable, Sendable {
    /// "system", "user" or "assistant".
    public var role: String
    public var content: String

    public init(role: String, content: String) {
        self.role = role
        self.content = content
    }
}

extension Model {
    /// The prompt that the model's chat template makes of a conversation; throws `.notFound` for a model without one.
    public func renderChat(_ messages: [Message]) throws -> String {
        let request = [UInt8](try JSONEncoder().encode(["messages": messages]))
        let bytes: [UInt8] = try sized(2 * request.count + 1024) { metrale_chat_render(handle, request, request.count, $0, $1, $2, $3) }
        return String(decoding: bytes, as: UTF8.self)
    }

    /// The tokens of a conversation: what to `prefill`.
    public func chatTokens(_ messages: [Message]) throws -> [Token] {
        try tokenize(renderChat(messages), addSpecial: false, parseSpecial: true)
    }
}
