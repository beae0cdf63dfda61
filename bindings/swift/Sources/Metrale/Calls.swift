// How functions of the library are called: errors thrown, results of unknown size, work that blocks.

import CMetrale
import Dispatch

typealias ErrorPlace = UnsafeMutablePointer<OpaquePointer?>

/// Runs one function of the library. Its status is not negative.
@discardableResult
func check(_ call: (ErrorPlace) -> metrale_status) throws -> metrale_status {
    var object: OpaquePointer?
    let status = call(&object)
    if status < 0 {
        throw MetraleError(status, taking: object)
    }
    return status
}

/// The handle that a function of the library makes.
func made(_ call: (UnsafeMutablePointer<OpaquePointer?>, ErrorPlace) -> metrale_status) throws -> OpaquePointer {
    var handle: OpaquePointer?
    try check { call(&handle, $0) }
    guard let handle else { throw MetraleError(.internal, "success without a handle") }
    return handle
}

/// A result of unknown size: asked for with room for `guess` items, then with what was said to be needed.
func sized<Item>(
    _ guess: Int, _ call: (UnsafeMutablePointer<Item>?, Int, UnsafeMutablePointer<Int>, ErrorPlace) -> metrale_status
) throws -> [Item] {
    var room = guess
    while true {
        var count = 0
        var status = METRALE_OK
        let out = try [Item](unsafeUninitializedCapacity: room) { buffer, filled in
            status = try check { call(buffer.baseAddress, room, &count, $0) }
            filled = status == METRALE_MORE ? 0 : count
        }
        if status != METRALE_MORE { return out }
        room = count
    }
}

/// Runs work that blocks on a thread that may: tasks share few threads.
func blocking<Value: Sendable>(_ work: @escaping @Sendable () throws -> Value) async throws -> Value {
    try await withCheckedThrowingContinuation { (continuation: CheckedContinuation<Value, any Error>) in
        DispatchQueue.global().async {
            do {
                continuation.resume(returning: try work())
            } catch {
                continuation.resume(throwing: error)
            }
        }
    }
}
