//! Element types of checkpoints, and how many bytes a run of elements takes.

/// How the elements of a tensor are stored. Block types (`Q*`, `IQ*`) store `block_len` elements in `block_bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    /// Two E2M1 codes in a byte.
    F4,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    /// ggml's MXFP4: 32 E2M1 codes and one E8M0 scale.
    MXFP4,
}

impl DType {
    /// Elements in a block; 1 for plain types.
    pub const fn block_len(self) -> usize {
        use DType::*;
        match self {
            Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4NL | MXFP4 => 32,
            Q2K | Q3K | Q4K | Q5K | Q6K => 256,
            F4 => 2,
            _ => 1,
        }
    }

    /// Bytes in a block.
    pub const fn block_bytes(self) -> usize {
        use DType::*;
        match self {
            F64 | I64 => 8,
            F32 | I32 => 4,
            F16 | BF16 | I16 => 2,
            I8 | U8 | Bool | F8E4M3 | F8E5M2 | F8E8M0 | F4 => 1,
            Q8_0 => 34,
            Q4_0 | IQ4NL => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q2K => 84,
            Q3K => 110,
            Q4K => 144,
            Q5K => 176,
            Q6K => 210,
            MXFP4 => 17,
        }
    }

    /// Bytes that `elements` take, or `None` where they are no whole number of blocks or the product overflows.
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether elements come in blocks with a shared scale.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 2
    }

    /// The published name, as files and documentation write it.
    pub const fn name(self) -> &'static str {
        use DType::*;
        match self {
            F64 => "F64",
            F32 => "F32",
            F16 => "F16",
            BF16 => "BF16",
            I64 => "I64",
            I32 => "I32",
            I16 => "I16",
            I8 => "I8",
            U8 => "U8",
            Bool => "BOOL",
            F8E4M3 => "F8_E4M3",
            F8E5M2 => "F8_E5M2",
            F8E8M0 => "F8_E8M0",
            F4 => "F4",
            Q8_0 => "Q8_0",
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q2K => "Q2_K",
            Q3K => "Q3_K",
            Q4K => "Q4_K",
            Q5K => "Q5_K",
            Q6K => "Q6_K",
            IQ4NL => "IQ4_NL",
            MXFP4 => "MXFP4",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
