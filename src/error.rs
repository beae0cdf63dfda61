//! The one error of the crate: a kind that maps to a C status, and what a person needs to mend the cause.
//!
//! The text says what was found, what was expected and what helps. Fields a program can read (name, offset, wanted,
//! available) are kept apart from the text, because the C API hands them out separately.

use crate::runtime;
use std::fmt;

/// What went wrong, as coarse as a program needs to decide what to do next. Each kind is one negative C status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// An argument is NULL, out of range or contradicts another one.
    InvalidArgument,
    /// A handle is stale, freed or of another type.
    InvalidHandle,
    /// The call does not fit the state of its object (for example: logits before any token).
    InvalidState,
    /// A token id lies outside the vocabulary.
    InvalidToken,
    /// The sequence holds as many tokens as its context allows.
    ContextFull,
    /// An allocation failed or a memory cap would be passed.
    OutOfMemory,
    /// A file or folder does not exist.
    NotFound,
    /// The operating system refused to read something.
    Io,
    /// The file is not a model at all (HTML page, archive, empty, directory without config).
    NotAModel,
    /// The file says it is a model but contradicts itself or is cut short.
    CorruptFile,
    /// The file is sound, but asks for something this build does not do.
    Unsupported,
    /// Two parts that must agree do not (tensor shape against config, adapter against model).
    Mismatch,
    /// A size given by a caller or a file is beyond what can be handled.
    TooLarge,
    /// A limit that protects the host was reached (depth, time, size).
    LimitExceeded,
    /// An option, key or flag is not known.
    UnknownOption,
    /// The chat template failed; the text is the template's own.
    Template,
    /// A grammar or schema is malformed.
    InvalidGrammar,
    /// The host asked to stop.
    Cancelled,
    /// Logits are NaN or all minus infinity.
    NumericFault,
    /// No token satisfies the sampler's constraints.
    NoValidToken,
    /// The grammar has been followed to its end; nothing can come after.
    GrammarDone,
    /// Another call holds the object.
    Busy,
    /// The header the host was compiled with does not fit this library.
    VersionMismatch,
    /// The processor or device cannot run this build.
    DeviceUnsupported,
    /// The device stopped answering; only frees work now.
    DeviceLost,
    /// A defect of this library; the message is worth a bug report.
    Internal,
}

/// An error: kind, text and the readable fields. One pointer wide, so that `Result` stays small.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Parts>);

#[derive(Clone, PartialEq, Eq)]
struct Parts {
    kind: Kind,
    message: String,
    name: Option<String>,
    offset: Option<u64>,
    wanted: Option<u64>,
    available: Option<u64>,
    retry: bool,
}

/// `std::result::Result` with our error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with its text.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        let retry = matches!(kind, Kind::OutOfMemory | Kind::Busy | Kind::Cancelled);
        Error(Box::new(Parts { kind, message: message.into(), name: None, offset: None, wanted: None, available: None, retry }))
    }

    /// Names the option, key, file or tensor the error is about.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.0.name = Some(name.into());
        self
    }

    /// Byte offset in a file, or index in an array.
    pub fn at(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    /// How much was asked for and how much there is, in the unit the text names.
    pub fn sizes(mut self, wanted: u64, available: u64) -> Self {
        self.0.wanted = Some(wanted);
        self.0.available = Some(available);
        self
    }

    /// Puts `what` in front of the text: the place, added on the way up.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }
    /// The whole text.
    pub fn message(&self) -> &str {
        &self.0.message
    }
    /// Option, key, file or tensor, when there is one.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }
    /// Byte offset or index, when there is one.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }
    /// Amount asked for, when that is the trouble.
    pub fn wanted(&self) -> Option<u64> {
        self.0.wanted
    }
    /// Amount there is, when that is the trouble.
    pub fn available(&self) -> Option<u64> {
        self.0.available
    }
    /// Whether the same call may succeed later.
    pub fn retry(&self) -> bool {
        self.0.retry
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.0.message)
    }
}

impl std::error::Error for Error {}

/// Adds the place to an error on its way up.
pub trait Context<T> {
    /// Puts `what()` in front of the error's text.
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| e.context(what()))
    }
}

/// Returns an error of the given kind: `bail!(CorruptFile, "text {x}")`.
#[macro_export]
macro_rules! bail {
    ($kind:ident, $($text:tt)*) => {
        return Err($crate::error::Error::new($crate::error::Kind::$kind, format!($($text)*)))
    };
}

/// Returns an error unless the condition holds: `ensure!(n > 0, InvalidArgument, "n is {n}")`.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $kind:ident, $($text:tt)*) => {
        // A match, because clippy reads `!(a < b)` of floats as a slip; here it is meant: NaN fails.
        match $condition {
            true => {}
            false => $crate::bail!($kind, $($text)*),
        }
    };
}

/// A vector with room for `n` elements, or `OutOfMemory` naming `what`. For every size a file or a caller decides.
pub fn vec_with_capacity<T>(n: usize, what: &str) -> Result<Vec<T>> {
    let mut v = Vec::new();
    runtime::fallible(|| v.try_reserve_exact(n)).map_err(|_| out_of_memory::<T>(n, what))?;
    Ok(v)
}

/// Room for `n` more elements, or `OutOfMemory` naming `what`.
pub fn reserve<T>(v: &mut Vec<T>, n: usize, what: &str) -> Result<()> {
    runtime::fallible(|| v.try_reserve(n)).map_err(|_| out_of_memory::<T>(n, what))
}

/// An error if memory ran short in this call: for the places where long work can stop.
pub fn ensure_memory(what: impl fmt::Display) -> Result<()> {
    ensure!(!runtime::ran_short(), OutOfMemory, "memory ran out during {what}");
    Ok(())
}

/// A vector of `n` copies of `value`, or `OutOfMemory` naming `what`.
pub fn vec_filled<T: Clone>(n: usize, value: T, what: &str) -> Result<Vec<T>> {
    let mut v = vec_with_capacity(n, what)?;
    v.resize(n, value);
    Ok(v)
}

fn out_of_memory<T>(n: usize, what: &str) -> Error {
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    Error::new(Kind::OutOfMemory, format!("{what}: {bytes} bytes could not be allocated")).sizes(bytes, 0).named(what)
}
