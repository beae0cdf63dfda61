// The classes on the story teller of tests/fixtures, beside what an independent implementation made of it.

import Foundation
import Metrale
import Testing

let fixtures = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../../../../tests/fixtures/stories260k")
    .standardizedFileURL

func fixture(_ options: LoadOptions = LoadOptions()) async throws -> Model {
    var options = options
    if options.threads == 0 { options.threads = 1 }
    return try await Model.load(fixtures.appendingPathComponent("model.gguf").path, options: options)
}

func prompted(_ model: Model, context: UInt64 = 0, sampler: Sampler = Sampler()) async throws -> TokenSequence {
    let sequence = try TokenSequence(model, context: context, sampler: sampler)
    try await sequence.prefill(try model.tokenize("Once upon a time"))
    return sequence
}

func tokens(_ sequence: TokenSequence, _ count: Int) async throws -> [Token] {
    var out: [Token] = []
    for _ in 0..<count { out.append(try await sequence.next().token) }
    return out
}

/// A body that throws an error of this status.
func expect(_ wanted: Status, _ body: () async throws -> Void) async {
    var found: Status?
    do {
        try await body()
    } catch {
        found = (error as? MetraleError)?.status
    }
    #expect(found == wanted)
}

struct Golden: Decodable {
    struct Prompt: Decodable { let text: String; let ids: [Token] }
    struct Run: Decodable { let results: [Result] }
    struct Result: Decodable { let generated: [Token] }
    let prompts: [Prompt]
    let runs: [String: Run]
}

@Test func tokensAreThoseOfAnotherImplementation() async throws {
    let golden = try JSONDecoder().decode(Golden.self, from: Data(contentsOf: fixtures.appendingPathComponent("golden.json")))
    var options = LoadOptions()
    options.exact = true
    let model = try await fixture(options)
    let results = try #require(golden.runs["hf_f32"]).results
    for (prompt, result) in zip(golden.prompts, results) {
        let ids = try model.tokenize(prompt.text)
        #expect(ids == prompt.ids)
        let sequence = try TokenSequence(model)
        try await sequence.prefill(prompt.ids)
        let generated = try await tokens(sequence, 16)
        #expect(generated == Array(result.generated.prefix(16)))
    }
}

@Test func textStreams() async throws {
    let model = try await fixture()
    var text = ""
    for try await piece in try await prompted(model).text(stops: ["."]) { text += piece }
    #expect(text == ", there was a little girl named Lily")
    let sequence = try await prompted(model)
    var pieces = 0
    for try await _ in try sequence.text() {
        pieces += 1
        if pieces == 3 { break }
    }
    #expect(pieces == 3)
    _ = try await sequence.next() // usable after a loop that was left
    let small = try await prompted(model, context: 20)
    var rest = ""
    for try await piece in try small.text() { rest += piece }
    #expect(!rest.isEmpty)
    let held = try small.count
    #expect(held == 20)
}

@Test func manySequencesShareAModel() async throws {
    let model = try await fixture()
    let expected = try await tokens(prompted(model), 12)
    try await withThrowingTaskGroup(of: [Token].self) { group in
        for _ in 0..<100 {
            group.addTask { try await tokens(prompted(model, context: 64), 12) }
        }
        for try await got in group { #expect(got == expected) }
    }
}

@Test func errorsSayWhatIsWrong() async throws {
    await expect(.notFound) { _ = try await Model.load("no/such/model.gguf") }
    let model = try await fixture()
    let sequence = try TokenSequence(model, context: 4)
    do {
        try await sequence.prefill([1, 2, 3, 4, 5])
        Issue.record("a prompt of 5 fits in a context of 4")
    } catch let error as MetraleError {
        #expect(error.status == .contextFull)
        #expect(error.available == 4)
        #expect("\(error)".hasPrefix("METRALE_CONTEXT_FULL: "))
    }
    let held = try sequence.count
    #expect(held == 0)
    await expect(.invalidState) { _ = try await sequence.next() }
    await expect(.notFound) { _ = try model.renderChat([Message(role: "user", content: "Hi")]) }
}

@Test func closingIsDeterministicAndMayBeRepeated() async throws {
    let model = try await fixture()
    let sequence = try await prompted(model)
    model.close()
    model.close()
    _ = try await sequence.next() // keeps the model
    sequence.close()
    sequence.close()
    await expect(.invalidHandle) { _ = try await sequence.next() }
    await expect(.invalidHandle) { _ = try TokenSequence(model) }
}

@Test func aTaskThatIsCancelledEndsItsStream() async throws {
    let model = try await fixture()
    let slow = Sampler([.custom { _, _ in Thread.sleep(forTimeInterval: 0.001) }])
    let sequence = try await prompted(model, sampler: slow)
    let before = try sequence.count
    let task = Task {
        var count = 0
        while true {
            _ = try await sequence.next()
            count += 1
            if count == 3 { withUnsafeCurrentTask { $0?.cancel() } }
        }
    }
    await #expect(throws: CancellationError.self) { try await task.value }
    let after = try sequence.count
    #expect(after == before + 3)
    _ = try await sequence.next()
}

@Test func stateGoesBackAndForth() async throws {
    let model = try await fixture()
    let sampler = Sampler([.topK(100), .temperature(2)], seed: 3)
    let sequence = try await prompted(model, sampler: sampler)
    let mark = try sequence.mark()
    let fork = try sequence.fork()
    let state = try sequence.save()
    let expected = try await tokens(sequence, 20)
    let forked = try await tokens(fork, 20)
    #expect(forked == expected)
    try sequence.rollback(to: mark)
    let again = try await tokens(sequence, 20)
    #expect(again == expected)
    try sequence.commit(mark)
    let restored = try TokenSequence(model, sampler: sampler)
    try restored.restore(state)
    let taken = try await tokens(restored, 20)
    #expect(taken == expected)
    await expect(.corruptFile) { try restored.restore(Array(state.dropLast())) }
}

struct Enough: Error {}

@Test func hooksChooseAndFail() async throws {
    let model = try await fixture()
    let sampler = Sampler([
        .custom { logits, history in
            if history.count > 7 { throw Enough() }
            for i in logits.indices where i != history.count + 10 { logits[i] = -.infinity }
        }
    ])
    let sequence = try await prompted(model, sampler: sampler)
    let start = Token(try sequence.count)
    let chosen = try await tokens(sequence, 2)
    #expect(chosen == [start + 10, start + 11])
    await #expect(throws: Enough.self) { while true { _ = try await sequence.next() } }
}

@Test func grammarsAndEmbeddings() async throws {
    let model = try await fixture()
    let grammar = try Grammar.regex("yes|no", for: model)
    let sequence = try await prompted(model)
    try sequence.follow(grammar)
    grammar.close()
    var text = ""
    for try await piece in try sequence.text(maxTokens: 20) { text += piece }
    #expect(["yes", "no"].contains(text.trimmingCharacters(in: .whitespaces)))
    await expect(.invalidGrammar) { _ = try Grammar.jsonSchema("{", for: model) }
    let row = try await model.embed(try model.tokenize("Once upon a time"))
    #expect(row.count == 64)
    #expect(abs(row.reduce(0) { $0 + $1 * $1 } - 1) < 1e-4)
}
