//! The status codes, their names, and the one place where an error kind becomes a code.
//!
//! Codes are append-only: a number that was published keeps its meaning.

use crate::error::Kind;

/// Result of a call: 0 is success, positive values are information (outputs are as each one says), negative values
/// are errors, after which nothing has changed and no output was written. A later library may return codes that
/// this header does not name; their sign still tells.
pub type metrale_status = i32;

/// Success.
pub const METRALE_OK: metrale_status = 0;
/// The buffer is too small. The needed size was written to the size output, and nothing else.
pub const METRALE_MORE: metrale_status = 1;
/// Success, and there is nothing left to do: every sequence of the call has just produced a token that ends generation, or
/// what was to be cancelled had finished before.
pub const METRALE_DONE: metrale_status = 2;
/// Nothing wrong, nothing done yet: call again.
pub const METRALE_AGAIN: metrale_status = 3;

/// An argument is NULL, misaligned, out of range or contradicts another one.
pub const METRALE_INVALID_ARGUMENT: metrale_status = -1;
/// A handle is NULL, was freed, or belongs to another kind of object.
pub const METRALE_INVALID_HANDLE: metrale_status = -2;
/// The call does not fit the state of its object, such as a decode step before any token.
pub const METRALE_INVALID_STATE: metrale_status = -3;
/// A token id lies outside the vocabulary.
pub const METRALE_INVALID_TOKEN: metrale_status = -4;
/// The sequence would hold more tokens than its context allows; `available` says how many still fit.
pub const METRALE_CONTEXT_FULL: metrale_status = -5;
/// An allocation failed or a memory cap would be passed.
pub const METRALE_OUT_OF_MEMORY: metrale_status = -6;
/// A file, folder or key does not exist.
pub const METRALE_NOT_FOUND: metrale_status = -7;
/// The operating system refused to read something.
pub const METRALE_IO: metrale_status = -8;
/// The file is not a model at all.
pub const METRALE_NOT_A_MODEL: metrale_status = -9;
/// The file says it is a model but contradicts itself or is cut short.
pub const METRALE_CORRUPT_FILE: metrale_status = -10;
/// The request is sound, but this build does not do it.
pub const METRALE_UNSUPPORTED: metrale_status = -11;
/// Two parts that must agree do not.
pub const METRALE_MISMATCH: metrale_status = -12;
/// A size is beyond what can be handled.
pub const METRALE_TOO_LARGE: metrale_status = -13;
/// A limit that protects the host was reached (depth, time, size).
pub const METRALE_LIMIT_EXCEEDED: metrale_status = -14;
/// An option, key or flag is not known.
pub const METRALE_UNKNOWN_OPTION: metrale_status = -15;
/// The chat template failed; the text is the template's own.
pub const METRALE_TEMPLATE: metrale_status = -16;
/// A grammar or schema is malformed.
pub const METRALE_INVALID_GRAMMAR: metrale_status = -17;
/// The host asked to stop.
pub const METRALE_CANCELLED: metrale_status = -18;
/// Logits are NaN, infinite or all minus infinity.
pub const METRALE_NUMERIC_FAULT: metrale_status = -19;
/// The sampler or the grammar leaves no token to choose.
pub const METRALE_NO_VALID_TOKEN: metrale_status = -20;
/// Another call is using the object right now.
pub const METRALE_BUSY: metrale_status = -21;
/// The header the host was compiled with does not fit this library.
pub const METRALE_VERSION_MISMATCH: metrale_status = -22;
/// The processor or device cannot run this build.
pub const METRALE_DEVICE_UNSUPPORTED: metrale_status = -23;
/// The device stopped answering; only frees work now.
pub const METRALE_DEVICE_LOST: metrale_status = -24;
/// A defect of this library; the message is worth a bug report.
pub const METRALE_INTERNAL: metrale_status = -25;
/// The sequence's grammar has been followed to its end and allows nothing more.
pub const METRALE_GRAMMAR_DONE: metrale_status = -26;

/// The code of an error kind.
pub(super) const fn of(kind: Kind) -> metrale_status {
    match kind {
        Kind::InvalidArgument => METRALE_INVALID_ARGUMENT,
        Kind::InvalidHandle => METRALE_INVALID_HANDLE,
        Kind::InvalidState => METRALE_INVALID_STATE,
        Kind::InvalidToken => METRALE_INVALID_TOKEN,
        Kind::ContextFull => METRALE_CONTEXT_FULL,
        Kind::OutOfMemory => METRALE_OUT_OF_MEMORY,
        Kind::NotFound => METRALE_NOT_FOUND,
        Kind::Io => METRALE_IO,
        Kind::NotAModel => METRALE_NOT_A_MODEL,
        Kind::CorruptFile => METRALE_CORRUPT_FILE,
        Kind::Unsupported => METRALE_UNSUPPORTED,
        Kind::Mismatch => METRALE_MISMATCH,
        Kind::TooLarge => METRALE_TOO_LARGE,
        Kind::LimitExceeded => METRALE_LIMIT_EXCEEDED,
        Kind::UnknownOption => METRALE_UNKNOWN_OPTION,
        Kind::Template => METRALE_TEMPLATE,
        Kind::InvalidGrammar => METRALE_INVALID_GRAMMAR,
        Kind::Cancelled => METRALE_CANCELLED,
        Kind::NumericFault => METRALE_NUMERIC_FAULT,
        Kind::NoValidToken => METRALE_NO_VALID_TOKEN,
        Kind::GrammarDone => METRALE_GRAMMAR_DONE,
        Kind::Busy => METRALE_BUSY,
        Kind::VersionMismatch => METRALE_VERSION_MISMATCH,
        Kind::DeviceUnsupported => METRALE_DEVICE_UNSUPPORTED,
        Kind::DeviceLost => METRALE_DEVICE_LOST,
        Kind::Internal => METRALE_INTERNAL,
    }
}

/// The error kind of a code; `None` for a number that is none.
pub(super) fn kind(status: metrale_status) -> Option<Kind> {
    KINDS.into_iter().find(|kind| of(*kind) == status)
}

/// Every error kind.
const KINDS: [Kind; 26] = [
    Kind::InvalidArgument,
    Kind::InvalidHandle,
    Kind::InvalidState,
    Kind::InvalidToken,
    Kind::ContextFull,
    Kind::OutOfMemory,
    Kind::NotFound,
    Kind::Io,
    Kind::NotAModel,
    Kind::CorruptFile,
    Kind::Unsupported,
    Kind::Mismatch,
    Kind::TooLarge,
    Kind::LimitExceeded,
    Kind::UnknownOption,
    Kind::Template,
    Kind::InvalidGrammar,
    Kind::Cancelled,
    Kind::NumericFault,
    Kind::NoValidToken,
    Kind::GrammarDone,
    Kind::Busy,
    Kind::VersionMismatch,
    Kind::DeviceUnsupported,
    Kind::DeviceLost,
    Kind::Internal,
];

/// Every code with the name of its constant.
const NAMES: [(metrale_status, &std::ffi::CStr); 30] = [
    (METRALE_OK, c"METRALE_OK"),
    (METRALE_MORE, c"METRALE_MORE"),
    (METRALE_DONE, c"METRALE_DONE"),
    (METRALE_AGAIN, c"METRALE_AGAIN"),
    (METRALE_INVALID_ARGUMENT, c"METRALE_INVALID_ARGUMENT"),
    (METRALE_INVALID_HANDLE, c"METRALE_INVALID_HANDLE"),
    (METRALE_INVALID_STATE, c"METRALE_INVALID_STATE"),
    (METRALE_INVALID_TOKEN, c"METRALE_INVALID_TOKEN"),
    (METRALE_CONTEXT_FULL, c"METRALE_CONTEXT_FULL"),
    (METRALE_OUT_OF_MEMORY, c"METRALE_OUT_OF_MEMORY"),
    (METRALE_NOT_FOUND, c"METRALE_NOT_FOUND"),
    (METRALE_IO, c"METRALE_IO"),
    (METRALE_NOT_A_MODEL, c"METRALE_NOT_A_MODEL"),
    (METRALE_CORRUPT_FILE, c"METRALE_CORRUPT_FILE"),
    (METRALE_UNSUPPORTED, c"METRALE_UNSUPPORTED"),
    (METRALE_MISMATCH, c"METRALE_MISMATCH"),
    (METRALE_TOO_LARGE, c"METRALE_TOO_LARGE"),
    (METRALE_LIMIT_EXCEEDED, c"METRALE_LIMIT_EXCEEDED"),
    (METRALE_UNKNOWN_OPTION, c"METRALE_UNKNOWN_OPTION"),
    (METRALE_TEMPLATE, c"METRALE_TEMPLATE"),
    (METRALE_INVALID_GRAMMAR, c"METRALE_INVALID_GRAMMAR"),
    (METRALE_CANCELLED, c"METRALE_CANCELLED"),
    (METRALE_NUMERIC_FAULT, c"METRALE_NUMERIC_FAULT"),
    (METRALE_NO_VALID_TOKEN, c"METRALE_NO_VALID_TOKEN"),
    (METRALE_BUSY, c"METRALE_BUSY"),
    (METRALE_VERSION_MISMATCH, c"METRALE_VERSION_MISMATCH"),
    (METRALE_DEVICE_UNSUPPORTED, c"METRALE_DEVICE_UNSUPPORTED"),
    (METRALE_DEVICE_LOST, c"METRALE_DEVICE_LOST"),
    (METRALE_INTERNAL, c"METRALE_INTERNAL"),
    (METRALE_GRAMMAR_DONE, c"METRALE_GRAMMAR_DONE"),
];

/// The name of a code's constant; `METRALE_UNKNOWN` for a number that is none.
pub(super) fn name(status: metrale_status) -> &'static std::ffi::CStr {
    NAMES.iter().find(|(code, _)| *code == status).map_or(c"METRALE_UNKNOWN", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_without_gaps() {
        let mut codes: Vec<_> = NAMES.iter().map(|(code, _)| *code).collect();
        codes.sort();
        assert_eq!(codes, (METRALE_GRAMMAR_DONE..=METRALE_AGAIN).collect::<Vec<_>>());
    }

    #[test]
    fn every_negative_code_has_its_kind() {
        for (code, _) in NAMES {
            assert_eq!(kind(code).map(of), (code < 0).then_some(code));
        }
        assert_eq!((kind(-1000), kind(1000)), (None, None));
    }

    #[test]
    fn names_follow_kinds() {
        for kind in [Kind::InvalidArgument, Kind::ContextFull, Kind::NotAModel, Kind::NoValidToken, Kind::GrammarDone, Kind::Internal] {
            let snake: String = format!("{kind:?}").chars().flat_map(|c| c.is_uppercase().then_some('_').into_iter().chain([c])).collect();
            assert_eq!(name(of(kind)).to_str().unwrap(), format!("METRALE{}", snake.to_uppercase()));
        }
        assert_eq!(name(-1000), c"METRALE_UNKNOWN");
    }
}
