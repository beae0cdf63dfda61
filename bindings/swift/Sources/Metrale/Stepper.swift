// One queue per model steps all sequences that want something, together, so that they share each pass over the weights. Tasks that
// wait hold no thread.

import CMetrale
import Dispatch

/// What one sequence wants: its queue of tokens read, or one token.
final class Request: @unchecked Sendable { // all but `sequence` belongs to the stepper's queue
    let sequence: TokenSequence
    var continuation: CheckedContinuation<Stepped, any Error>?
    var isCancelled = false
    var error: (any Error)?

    init(_ sequence: TokenSequence) { self.sequence = sequence }

    func finish(_ result: Result<Stepped, any Error>) {
        continuation?.resume(with: result)
        continuation = nil
    }
}

/// What came of a request.
struct Stepped: Sendable {
    let token: Token
    let isEnd: Bool
}

final class Stepper: @unchecked Sendable { // its variables belong to its queue
    private let queue = DispatchQueue(label: "metrale.stepper")
    private var requests: [Request] = []
    private var isScheduled = false

    /// The longest that one step takes, in nanoseconds; new requests join between steps.
    private static let turn: UInt64 = 20_000_000

    /// Waits until the request is done. When the task is cancelled, so is what the sequence is doing.
    func run(_ sequence: TokenSequence) async throws -> Stepped {
        let request = Request(sequence)
        do {
            return try await withTaskCancellationHandler {
                try await withCheckedThrowingContinuation { (continuation: CheckedContinuation<Stepped, any Error>) in
                    self.queue.async {
                        request.continuation = continuation
                        self.requests.append(request)
                        self.schedule()
                    }
                }
            } onCancel: {
                // Before the request is there this marks it; during a step the cancel ends the step, and then marks it.
                sequence.cancel()
                self.queue.async { request.isCancelled = true }
            }
        } catch let error as MetraleError where error.status == .cancelled && Task.isCancelled {
            throw CancellationError()
        }
    }

    private func schedule() {
        guard !isScheduled, !requests.isEmpty else { return }
        isScheduled = true
        queue.async {
            self.isScheduled = false
            self.step()
            self.schedule()
        }
    }

    private func step() {
        // A cancelled one leaves, unless it has work that the next step has to report as cancelled.
        for request in requests where request.isCancelled || request.error != nil {
            let handle = request.sequence.handle
            metrale_cancel(handle, nil)
            if metrale_poll(handle, nil, nil) != METRALE_AGAIN {
                request.finish(.failure(request.error ?? CancellationError()))
            }
        }
        requests.removeAll { $0.continuation == nil }
        guard !requests.isEmpty else { return }

        let handles: [OpaquePointer?] = requests.map { $0.sequence.handle }
        var empty = metrale_step_result()
        empty.struct_size = MemoryLayout<metrale_step_result>.size
        var results = [metrale_step_result](repeating: empty, count: handles.count)
        do {
            try check { metrale_step(handles, handles.count, Stepper.turn, &results, $0) }
        } catch {
            fail(error)
            return
        }
        // Before anybody is told: a task that is told may give its sequence another hook at once.
        let thrown = requests.map { $0.sequence.hook?.thrown }
        for request in requests { request.sequence.hook?.thrown = nil }
        for (index, request) in requests.enumerated() {
            take(results[index], thrown: thrown[index], for: request)
        }
        requests.removeAll { $0.continuation == nil }
    }

    /// A step failed as a whole: for the request that the error is about, else for the newest, without which others may go on.
    private func fail(_ error: any Error) {
        var index = requests.count - 1
        if let offset = (error as? MetraleError)?.offset, offset < UInt64(requests.count) { index = Int(offset) }
        if requests[index].error != nil {
            requests.remove(at: index).finish(.failure(error))
        } else {
            requests[index].error = error // what waits in its queue has to go first
        }
    }

    private func take(_ result: metrale_step_result, thrown: (any Error)?, for request: Request) {
        if result.status == METRALE_AGAIN { return }
        if result.status >= 0 {
            request.finish(.success(Stepped(token: result.token, isEnd: result.status == METRALE_DONE)))
        } else if result.status != METRALE_CANCELLED {
            request.error = MetraleError(Status(rawValue: result.status), "the sequence cannot go on")
        } else if let error = request.error {
            request.finish(.failure(error))
        } else if request.isCancelled {
            request.finish(.failure(CancellationError()))
        } else if let thrown {
            request.finish(.failure(thrown))
        } else {
            request.finish(.failure(MetraleError(.cancelled, "the sequence was cancelled")))
        }
    }
}
