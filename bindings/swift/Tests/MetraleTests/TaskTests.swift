// Many tasks at once: samplers that change between steps, loads and prompts that are cancelled, models given up by the last who has them.

import Foundation
import Metrale
import Testing

/// A hook that allows one token only.
func only(_ token: Token) -> Sampler {
    Sampler([.custom { logits, _ in for i in logits.indices where i != Int(token) { logits[i] = -.infinity } }])
}

@Test func samplersChangeWhileOthersAreStepped() async throws {
    let model = try await fixture()
    try await withThrowingTaskGroup(of: Void.self) { group in
        for first in 0..<8 {
            group.addTask {
                let sequence = try await prompted(model, context: 128)
                for round in 0..<40 {
                    let wanted = Token(300 + (first + round) % 100)
                    try sequence.use(only(wanted))
                    let chosen = try await sequence.next().token
                    #expect(chosen == wanted)
                }
            }
        }
        try await group.waitForAll()
    }
}

@Test func aHookThatThrowsFailsItsOwnSequenceOnly() async throws {
    let model = try await fixture()
    let failing = Sampler([.custom { _, history in if history.count % 2 == 1 { throw Enough() } }])
    let plain = try await prompted(model, context: 64)
    let expected = try await tokens(plain.fork(), 40)
    try await withThrowingTaskGroup(of: Void.self) { group in
        group.addTask {
            let got = try await tokens(plain, 40)
            #expect(got == expected)
        }
        for _ in 0..<4 {
            group.addTask {
                let sequence = try await prompted(model, context: 64, sampler: failing)
                if try sequence.count % 2 == 0 { _ = try await sequence.next() }
                for _ in 0..<20 { await #expect(throws: Enough.self) { _ = try await sequence.next() } }
                try sequence.use(Sampler())
                _ = try await sequence.next()
            }
        }
        try await group.waitForAll()
    }
}

@Test func loadsReportAndAreCancelled() async throws {
    let seen = Seen()
    var options = LoadOptions()
    options.progress = { seen.add($0) }
    let model = try await fixture(options)
    let last = try #require(seen.all.last)
    #expect(last.phase == "done")
    #expect(seen.all.allSatisfy { $0.total == 0 || $0.done <= $0.total })
    #expect(try model.meta("model_type") == "llama")
}

@Test func aLoadThatIsCancelledEnds() async throws {
    let seen = Seen()
    let cancelled = DispatchSemaphore(value: 0)
    var options = LoadOptions()
    options.progress = { report in
        seen.add(report)
        if seen.all.count == 1 { cancelled.wait() }
    }
    let task = Task { [options] in try await fixture(options) }
    while seen.all.isEmpty { try await Task.sleep(nanoseconds: 1_000_000) }
    task.cancel()
    cancelled.signal()
    await #expect(throws: CancellationError.self) { _ = try await task.value }
}

@Test func aPromptThatIsCancelledLeavesTheSequenceAsItWas() async throws {
    let model = try await fixture()
    let prompt = [Token](repeating: 300, count: 400)
    for delay in 0..<20 {
        let sequence = try await prompted(model)
        let before = try sequence.logits()
        let count = try sequence.count
        let task = Task { try await sequence.prefill(prompt) }
        try await Task.sleep(nanoseconds: UInt64(delay) * 100_000)
        task.cancel()
        do {
            try await task.value
            let held = try sequence.count
            #expect(held == count + prompt.count)
        } catch is CancellationError {
            let held = try sequence.count
            #expect(held == count)
            let after = try sequence.logits()
            #expect(after == before)
        }
        _ = try await sequence.next() // usable
    }
}

@Test func whatNobodyHasAnyMoreClosesItself() async throws {
    weak var gone: Model?
    do {
        let model = try await fixture()
        gone = model
        try await withThrowingTaskGroup(of: Void.self) { group in
            for _ in 0..<16 {
                group.addTask {
                    for try await _ in try await prompted(model, context: 32).text(maxTokens: 3) {}
                }
            }
            try await group.waitForAll()
        }
    }
    // The stepper's queue may still be leaving its last turn.
    for _ in 0..<200 where gone != nil { try await Task.sleep(nanoseconds: 10_000_000) }
    #expect(gone == nil)
}

/// What a load reported.
final class Seen: @unchecked Sendable { // guarded by the lock
    private let lock = NSLock()
    private var reports: [LoadProgress] = []
    func add(_ report: LoadProgress) { lock.withLock { reports.append(report) } }
    var all: [LoadProgress] { lock.withLock { reports } }
}
