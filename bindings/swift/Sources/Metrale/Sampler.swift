// How tokens are chosen.

import CMetrale

/// Stages that run in order on every row of logits, then a draw from what is left. No stage is greedy. The same seed gives the same
/// tokens.
public struct Sampler: Sendable {
    public var stages: [Stage]
    public var seed: UInt64

    public init(_ stages: [Stage] = [], seed: UInt64 = 0) {
        self.stages = stages
        self.seed = seed
    }

    /// One step. Windows are counts of the newest tokens, 0 for all.
    public struct Stage: Sendable {
        let kind: Int32
        var count: UInt32 = 0
        var token: Token = 0
        var value: Float = 0
        var second: Float = 0
        var length: UInt32 = 0
        var hook: Hook?

        public static let greedy = Stage(kind: METRALE_STAGE_GREEDY)
        /// Divides every logit by `value`.
        public static func temperature(_ value: Float) -> Stage { Stage(kind: METRALE_STAGE_TEMPERATURE, value: value) }
        /// Keeps the highest logits.
        public static func topK(_ count: UInt32) -> Stage { Stage(kind: METRALE_STAGE_TOP_K, count: count) }
        /// Keeps the likeliest tokens until their probabilities reach `value`.
        public static func topP(_ value: Float) -> Stage { Stage(kind: METRALE_STAGE_TOP_P, value: value) }
        /// Keeps tokens at least `value` times as likely as the likeliest.
        public static func minP(_ value: Float) -> Stage { Stage(kind: METRALE_STAGE_MIN_P, value: value) }
        public static func typical(_ value: Float) -> Stage { Stage(kind: METRALE_STAGE_TYPICAL, value: value) }
        public static func topNSigma(_ value: Float) -> Stage { Stage(kind: METRALE_STAGE_TOP_N_SIGMA, value: value) }
        public static func xtc(threshold: Float, share: Float) -> Stage {
            Stage(kind: METRALE_STAGE_XTC, value: threshold, second: share)
        }
        public static func repetition(_ value: Float, window: UInt32 = 0) -> Stage {
            Stage(kind: METRALE_STAGE_REPETITION, count: window, value: value)
        }
        public static func presence(_ value: Float, window: UInt32 = 0) -> Stage {
            Stage(kind: METRALE_STAGE_PRESENCE, count: window, value: value)
        }
        public static func frequency(_ value: Float, window: UInt32 = 0) -> Stage {
            Stage(kind: METRALE_STAGE_FREQUENCY, count: window, value: value)
        }
        public static func dry(multiplier: Float, base: Float, allowed: UInt32, window: UInt32 = 0) -> Stage {
            Stage(kind: METRALE_STAGE_DRY, count: window, value: multiplier, second: base, length: allowed)
        }
        /// Adds `value` to the logit of a token; minus infinity rules it out.
        public static func bias(_ token: Token, _ value: Float) -> Stage {
            Stage(kind: METRALE_STAGE_BIAS, token: token, value: value)
        }
        /// Only as the last stage.
        public static func mirostatV2(surprise: Float, rate: Float) -> Stage {
            Stage(kind: METRALE_STAGE_MIROSTAT_V2, value: surprise, second: rate)
        }
        /// A stage of the caller's own; a sampler has at most one.
        public static func custom(_ hook: @escaping Hook) -> Stage { Stage(kind: METRALE_STAGE_HOOK, hook: hook) }
    }

    /// May change logits, one for each token; minus infinity rules one out. The second argument are the sequence's tokens. Neither
    /// may be kept. What it does may depend on its arguments only. An error fails the step, which throws it.
    public typealias Hook = @Sendable (UnsafeMutableBufferPointer<Float>, UnsafeBufferPointer<Token>) throws -> Void

    /// The sampler for C, which the caller frees, and what its hook needs, which lives as long as sequences that have it.
    func native() throws -> (handle: OpaquePointer, hook: HookBox?) {
        let native = stages.map { stage in
            var out = metrale_sampler_stage()
            out.kind = UInt32(stage.kind)
            out.count = stage.count
            out.token = stage.token
            out.value = stage.value
            out.second = stage.second
            out.length = stage.length
            return out
        }
        let handle = try made { metrale_sampler_new(native, native.count, seed, $0, $1) }
        let hooks = stages.compactMap { $0.hook }
        guard let hook = hooks.first else { return (handle, nil) }
        let box = HookBox(hook)
        do {
            guard hooks.count == 1 else { throw MetraleError(.invalidArgument, "a sampler has at most one hook, not \(hooks.count)") }
            try check { metrale_sampler_set_hook(handle, callHook, Unmanaged.passUnretained(box).toOpaque(), $0) }
        } catch {
            metrale_sampler_free(handle)
            throw error
        }
        return (handle, box)
    }
}

/// A hook and the error it threw last.
final class HookBox: @unchecked Sendable { // `thrown` belongs to the stepper's queue, where hooks run
    let hook: Sampler.Hook
    var thrown: (any Error)?

    init(_ hook: @escaping Sampler.Hook) { self.hook = hook }
}

/// What the library calls: hands over to the box at `user`.
private func callHook(
    _ user: UnsafeMutableRawPointer?, _ logits: UnsafeMutablePointer<Float>?, _ count: Int,
    _ history: UnsafePointer<Token>?, _ length: Int
) -> Int32 {
    guard let user else { return 1 }
    let box = Unmanaged<HookBox>.fromOpaque(user).takeUnretainedValue()
    do {
        try box.hook(UnsafeMutableBufferPointer(start: logits, count: count), UnsafeBufferPointer(start: history, count: length))
        return 0
    } catch {
        box.thrown = error
        return 1
    }
}
