// Failures as Swift errors.

import CMetrale

/// The kind of a failure. A later library may return kinds that are not named here.
public struct Status: RawRepresentable, Hashable, Sendable, CustomStringConvertible {
    public let rawValue: Int32
    public init(rawValue: Int32) { self.rawValue = rawValue }

    public static let invalidArgument = Status(rawValue: METRALE_INVALID_ARGUMENT)
    /// The object was closed.
    public static let invalidHandle = Status(rawValue: METRALE_INVALID_HANDLE)
    public static let invalidState = Status(rawValue: METRALE_INVALID_STATE)
    public static let invalidToken = Status(rawValue: METRALE_INVALID_TOKEN)
    public static let contextFull = Status(rawValue: METRALE_CONTEXT_FULL)
    public static let outOfMemory = Status(rawValue: METRALE_OUT_OF_MEMORY)
    public static let notFound = Status(rawValue: METRALE_NOT_FOUND)
    public static let io = Status(rawValue: METRALE_IO)
    public static let notAModel = Status(rawValue: METRALE_NOT_A_MODEL)
    public static let corruptFile = Status(rawValue: METRALE_CORRUPT_FILE)
    public static let unsupported = Status(rawValue: METRALE_UNSUPPORTED)
    public static let mismatch = Status(rawValue: METRALE_MISMATCH)
    public static let tooLarge = Status(rawValue: METRALE_TOO_LARGE)
    public static let limitExceeded = Status(rawValue: METRALE_LIMIT_EXCEEDED)
    public static let unknownOption = Status(rawValue: METRALE_UNKNOWN_OPTION)
    public static let template = Status(rawValue: METRALE_TEMPLATE)
    public static let invalidGrammar = Status(rawValue: METRALE_INVALID_GRAMMAR)
    public static let cancelled = Status(rawValue: METRALE_CANCELLED)
    public static let numericFault = Status(rawValue: METRALE_NUMERIC_FAULT)
    public static let noValidToken = Status(rawValue: METRALE_NO_VALID_TOKEN)
    public static let busy = Status(rawValue: METRALE_BUSY)
    public static let versionMismatch = Status(rawValue: METRALE_VERSION_MISMATCH)
    public static let deviceUnsupported = Status(rawValue: METRALE_DEVICE_UNSUPPORTED)
    public static let deviceLost = Status(rawValue: METRALE_DEVICE_LOST)
    public static let `internal` = Status(rawValue: METRALE_INTERNAL)
    public static let grammarDone = Status(rawValue: METRALE_GRAMMAR_DONE)

    /// The name in C, such as "METRALE_BUSY".
    public var description: String { String(cString: metrale_status_name(rawValue)) }
}

/// What a failed call says: what was found, what was expected and what helps.
public struct MetraleError: Error, Sendable, CustomStringConvertible {
    public let status: Status
    public let message: String
    /// The option, key, file or tensor that it is about.
    public var name: String?
    /// The byte or index that it is about.
    public var offset: UInt64?
    /// How much was asked for and how much there is, in the unit that the message names.
    public var wanted: UInt64?
    public var available: UInt64?
    /// The same call may succeed later without a change by the host.
    public var retry = false

    public var description: String { "\(status): \(message)" }

    init(_ status: Status, _ message: String) {
        self.status = status
        self.message = message
    }

    /// Takes over the error object of a call that failed.
    init(_ status: metrale_status, taking object: OpaquePointer?) {
        self.init(Status(rawValue: status), String(cString: metrale_error_message(object)))
        if let text = metrale_error_name(object) {
            name = String(cString: text)
        }
        offset = number { metrale_error_offset(object, $0) }
        wanted = number { metrale_error_wanted(object, $0) }
        available = number { metrale_error_available(object, $0) }
        retry = metrale_error_retry(object)
        metrale_error_free(object)
    }
}

private func number(_ read: (UnsafeMutablePointer<UInt64>) -> Bool) -> UInt64? {
    var value: UInt64 = 0
    return read(&value) ? value : nil
}
