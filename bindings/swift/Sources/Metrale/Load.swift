// Loading, which a task can cancel.

import CMetrale

/// How far a load is, in bytes of the phase; `total` is 0 while it is not known.
public struct LoadProgress: Sendable {
    /// "reading", "weights" or "done".
    public let phase: String
    public let done: UInt64
    public let total: UInt64
}

/// What keys and values are kept in.
public enum KVType: UInt32, Sendable {
    /// f32 where everything is exact or the file is stored in f32, else f16.
    case automatic = 0
    case f32 = 1
    case f16 = 2
    /// The bytes of f16, the range of f32.
    case bf16 = 3
    /// 8 bits and scales: about half of the bytes of f16.
    case q8 = 4
}

/// How to load a model. Zeros are defaults.
public struct LoadOptions: Sendable {
    /// Most threads that compute; 0 takes the processors this process may use.
    public var threads: UInt32 = 0
    /// Most tokens of one sequence; 0 takes the model's limit, capped at 4,096.
    public var context: UInt64 = 0
    /// Most bytes that model and one sequence may take; 0 takes what the machine has free.
    public var memory: UInt64 = 0
    /// Most bytes kept of prompts, so that one that begins like an earlier one is not computed again.
    public var prefixBytes: UInt64 = 0
    /// The device that computes; 0 is the processor.
    public var device: UInt32 = 0
    /// Most bytes of that device that model and one sequence may take; 0 takes what is free there.
    public var deviceBytes: UInt64 = 0
    /// On a device, other work of the process goes first.
    public var lowPriority = false
    /// On a device, the same bits alone and in any batch; slower.
    public var deterministic = false
    /// Weights are packed by the load, not when they are used a second time.
    public var packed = false
    /// Every weight decoded to its exact value, activations and cache in f32.
    public var exact = false
    /// What keys and values are kept in.
    public var kv = KVType.automatic
    /// The device that computes; 0 is the processor.
    public var device: UInt32 = 0
    /// Most bytes of that device that model and one sequence may take; 0 takes what is free there.
    public var deviceBytes: UInt64 = 0
    /// The last layers that run there, `UInt64.max` for all of the model; 0 takes as many as `deviceBytes` hold.
    public var deviceLayers: UInt64 = 0
    /// Of these the first so many whose experts stay on the processor; 0 is as few as `deviceBytes` require.
    public var hostExperts: UInt64 = 0
    /// Called on the thread that loads.
    public var progress: (@Sendable (LoadProgress) -> Void)?

    public init() {}
}

/// One load. The library calls back into it, so it stays until the load is over.
final class Loading: @unchecked Sendable { // the handle may be used on any thread, and the rest does not change
    private let report: (@Sendable (LoadProgress) -> Void)?
    private var handle: OpaquePointer?

    init(path: String, options: LoadOptions) throws {
        report = options.progress
        try check { metrale_check_abi(UInt32(METRALE_ABI_VERSION), $0) }
        let source = try made { metrale_source_path(path, 0, $0, $1) }
        defer { metrale_source_free(source) }
        var wanted = metrale_load_options()
        wanted.struct_size = MemoryLayout<metrale_load_options>.size
        wanted.threads = options.threads
        wanted.context = options.context
        wanted.memory = options.memory
        wanted.prefix_bytes = options.prefixBytes
        wanted.device = options.device
        wanted.device_bytes = options.deviceBytes
        if options.deterministic { wanted.flags |= UInt64(METRALE_LOAD_DETERMINISTIC) }
        if options.packed { wanted.flags |= UInt64(METRALE_LOAD_PACKED) }
        if options.lowPriority { wanted.flags |= UInt64(METRALE_LOAD_LOW_PRIORITY) }
        wanted.compute = options.exact ? UInt32(METRALE_COMPUTE_F32) : UInt32(METRALE_COMPUTE_DEFAULT)
        wanted.kv_type = options.kv.rawValue
        wanted.device = options.device
        wanted.device_bytes = options.deviceBytes
        wanted.device_layers = options.deviceLayers
        wanted.host_experts = options.hostExperts
        if options.progress != nil {
            wanted.user = Unmanaged.passUnretained(self).toOpaque()
            wanted.progress = { user, done, total, phase in
                guard let user, let phase else { return 0 }
                let loading = Unmanaged<Loading>.fromOpaque(user).takeUnretainedValue()
                loading.report?(LoadProgress(phase: String(cString: phase), done: done, total: total))
                return 0
            }
        }
        handle = try made { metrale_load_begin(source, &wanted, $0, $1) }
    }

    deinit { metrale_loading_free(handle) }

    func finish() throws -> Model {
        Model(try made { metrale_load_step(handle, UInt64.max, nil, $0, $1) })
    }

    func cancel() { metrale_load_cancel(handle, nil) }
}

extension Model {
    /// Loads a model from a GGUF file or a folder with config.json, and returns when it is ready. When the task is cancelled, so is
    /// the load.
    public static func load(_ path: String, options: LoadOptions = LoadOptions()) async throws -> Model {
        try Task.checkCancellation()
        let loading = try Loading(path: path, options: options)
        do {
            return try await withTaskCancellationHandler {
                try await blocking { try loading.finish() }
            } onCancel: {
                loading.cancel()
            }
        } catch let error as MetraleError where error.status == .cancelled {
            throw CancellationError()
        }
    }
}
