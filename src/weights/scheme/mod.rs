//! How a checkpoint's files store a matrix: plainly, or as codes whose scales are tensors of their own.
//!
//! A weight is asked for by its plain name (`X.weight`). Which pieces the file holds under names derived from it decides the
//! scheme, for each tensor anew, so files may mix them as they like; the config only says what pieces leave open. One scheme is
//! one file and one line in [`SCHEMES`]. All give rows of numbers, exactly; most also give integer codes for fast products.

mod fp8;
mod grid;
mod mxfp4;
mod nvfp4;
mod packed_int;
mod piece;
mod plain_int;
mod scaled;
mod settings;

pub use piece::Piece;
pub(in crate::weights) use settings::Settings;

use super::Checkpoint;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::quant;
use crate::tensor::DType;
use scaled::Scaled;

/// One way to store a matrix.
struct Scheme {
    /// What people call it.
    name: &'static str,
    /// The tensor's pieces, checked; `None` where it is not stored this way.
    find: fn(&Lookup<'_>) -> Result<Option<Body>>,
}

static SCHEMES: [Scheme; 6] = [
    Scheme { name: "FP8", find: fp8::find },
    Scheme { name: "NVFP4", find: nvfp4::find },
    Scheme { name: "MXFP4", find: mxfp4::find },
    Scheme { name: "MXFP4 blocks", find: mxfp4::find_blocks },
    Scheme { name: "packed integers", find: packed_int::find },
    Scheme { name: "8-bit integers", find: plain_int::find },
];

/// What a row is made of, and so how it is best packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Elements of a type, without pieces beside them.
    Plain(DType),
    /// Numbers with no shorter form that panels could take.
    Real,
    /// 8-bit floats (E4M3) with scales that panels of such can take.
    F8,
    /// Integer codes.
    Codes(CodeForm),
}

/// Codes of a row: `w = gain * (scale * code - min)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodeForm {
    /// 4 (codes -8..=7, with minimum or table 0..=15) or 8.
    pub bits: u8,
    /// Elements that share a scale: 16 or 32.
    pub block: usize,
    /// Whether blocks have a minimum.
    pub min: bool,
    /// What each code stands for, where that is not its number.
    pub table: Option<[i8; 16]>,
}

enum Body {
    Plain(Piece),
    Scaled(Box<Scaled>),
}

/// A tensor as a family knows it, whatever pieces it is stored in. Owns its share of the files.
pub struct Stored {
    /// The name it was asked for by.
    pub name: String,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The scheme, `plain` for none.
    pub scheme: &'static str,
    /// Stored output-major (`[experts, rows, columns]`) though the plain form of this tensor is input-major.
    pub output_major: bool,
    body: Body,
}

/// Looks for the pieces of one tensor.
struct Lookup<'a> {
    checkpoint: &'a Checkpoint,
    settings: &'a Settings,
    name: &'a str,
}

impl Lookup<'_> {
    /// The name without `.weight`.
    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(self.name)
    }

    /// The tensor of the plain name itself.
    fn tensor(&self) -> Option<Piece> {
        self.checkpoint.piece(self.name)
    }

    /// `X.<leaf>` for `X.weight`.
    fn stem(&self, leaf: &str) -> Option<Piece> {
        self.checkpoint.piece(&format!("{}.{leaf}", self.name.strip_suffix(".weight")?))
    }

    /// `<name><suffix>`.
    fn suffixed(&self, suffix: &str) -> Option<Piece> {
        self.checkpoint.piece(&format!("{}{suffix}", self.name))
    }

    /// As `stem`, for a piece that `of` cannot do without.
    fn need_stem(&self, leaf: &str, of: &Piece) -> Result<Piece> {
        self.stem(leaf).ok_or_else(|| missing(&format!("{}.{leaf}", self.module()), of))
    }

    /// As `suffixed`, for a piece that `of` cannot do without.
    fn need_suffixed(&self, suffix: &str, of: &Piece) -> Result<Piece> {
        self.suffixed(suffix).ok_or_else(|| missing(&format!("{}{suffix}", self.name), of))
    }

    /// Refuses codes whose scales are nowhere, unless the config says the module is not quantised.
    fn plain(&self, piece: Piece) -> Result<Body> {
        // Tables of small integers exist under other names; matrices of 8-bit floats always have a scale.
        let float = matches!(piece.dtype, DType::F8E4M3 | DType::F8E5M2);
        if is_codes(piece.dtype)
            && piece.shape.len() > 1
            && (float || self.name.ends_with("weight"))
            && !self.settings.ignores(self.module())
        {
            let text = format!(
                "{}: {} {:?} holds codes, but no scale is beside it; looked for {}_scale_inv, {}_scale and {}.scale",
                piece.name,
                piece.dtype,
                piece.shape,
                self.name,
                self.name,
                self.module()
            );
            return Err(Error::new(Kind::CorruptFile, text).named(self.name));
        }
        Ok(Body::Plain(piece))
    }
}

fn missing(name: &str, of: &Piece) -> Error {
    let text = format!("the checkpoint has no tensor {name}, which {} ({} {:?}) needs", of.name, of.dtype, of.shape);
    Error::new(Kind::CorruptFile, text).named(name)
}

/// Whether elements of this type may be codes whose scales are another tensor.
fn is_codes(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::F4)
}

/// Whether bytes can be pairs of 4-bit codes.
fn is_pairs(piece: &Piece) -> bool {
    matches!(piece.dtype, DType::U8 | DType::I8 | DType::F4)
}

/// The shape of the matrices that pairs of codes make.
fn pairs_of(codes: &Piece) -> Result<[usize; 3]> {
    let [count, rows, cols] = codes.matrices()?;
    match codes.dtype {
        DType::F4 if cols.is_multiple_of(2) => Ok([count, rows, cols]),
        DType::F4 => Err(codes.misfit("an even number of columns")),
        // A row of bytes inside a file is far below half of what can be counted.
        _ => Ok([count, rows, cols * 2]),
    }
}

impl Stored {
    /// Finds a tensor by its plain name; `None` where the checkpoint holds it in no form.
    pub(in crate::weights) fn find(checkpoint: &Checkpoint, settings: &Settings, name: &str) -> Result<Option<Stored>> {
        let at = Lookup { checkpoint, settings, name };
        if let Some(piece) = at.tensor().filter(|p| !is_codes(p.dtype)) {
            return Ok(Some(Stored {
                name: name.into(),
                shape: piece.shape.clone(),
                scheme: "plain",
                output_major: false,
                body: Body::Plain(piece),
            }));
        }
        for scheme in &SCHEMES {
            if let Some(body) = (scheme.find)(&at).map_err(|e| e.context(format!("{name} as {}", scheme.name)))? {
                let Body::Scaled(scaled) = &body else { continue };
                let [count, rows, cols] = scaled.of;
                let stacked = scaled.codes.shape.len() == 3;
                let shape = if stacked { vec![count, rows, cols] } else { vec![rows, cols] };
                let output_major = stacked && !name.ends_with(".weight");
                return Ok(Some(Stored { name: name.into(), shape, scheme: scheme.name, output_major, body }));
            }
        }
        let Some(piece) = at.tensor() else { return Ok(None) };
        let shape = piece.shape.clone();
        Ok(Some(Stored { name: name.into(), shape, scheme: "plain", output_major: false, body: at.plain(piece)? }))
    }

    /// What a row is made of.
    pub fn form(&self) -> Form {
        match &self.body {
            Body::Plain(piece) => Form::Plain(piece.dtype),
            Body::Scaled(scaled) => scaled.form(),
        }
    }

    /// Whether the file holds it as it is, without pieces beside it.
    pub fn is_plain(&self) -> bool {
        matches!(self.body, Body::Plain(_))
    }

    /// Row `row`, counted through all matrices, as exact numbers. `out` has the row's length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match &self.body {
            Body::Plain(piece) => quant::decode(piece.dtype, piece.row(row, out.len()), out),
            Body::Scaled(scaled) => {
                scaled.decode_row(scaled.codes.row_map.stored(row), out);
                Ok(())
            }
        }
    }

    /// Row `row` of `cols` elements as stored; empty unless [`Form::Plain`].
    pub fn plain_row(&self, row: usize, cols: usize) -> &[u8] {
        match &self.body {
            Body::Plain(piece) => piece.row(row, cols),
            Body::Scaled(_) => &[],
        }
    }

    /// Row `row` as codes of [`Form::Codes`]; gives back the row's gain.
    pub fn code_row(&self, row: usize, form: CodeForm, codes: &mut [i8], scale: &mut [f32], min: &mut [f32]) -> Result<f32> {
        match &self.body {
            Body::Plain(piece) => crate::bail!(Internal, "{}: plain elements are no codes with scales", piece.name),
            Body::Scaled(scaled) => scaled.code_row(scaled.codes.row_map.stored(row), form, codes, scale, min),
        }
    }

    /// Row `row` as E4M3 codes of [`Form::F8`], or of plain ones; its scales, one per run of panels, go into `scale`.
    pub fn f8_row(&self, row: usize, cols: usize, scale: &mut [f32]) -> &[u8] {
        match &self.body {
            Body::Plain(piece) => {
                scale.fill(1.0);
                piece.row(row, cols)
            }
            Body::Scaled(scaled) => scaled.f8_row(scaled.codes.row_map.stored(row), scale),
        }
    }

    /// All elements in logical order. In a vector every element is a row, so there the row map moves elements.
    pub fn values(&self) -> Result<Vec<f32>> {
        match &self.body {
            Body::Plain(piece) => {
                let stored = piece.values()?;
                let at = |i: usize| stored[piece.row_map.stored(i)] + piece.offset;
                Ok((0..stored.len()).map(at).collect())
            }
            Body::Scaled(scaled) => {
                let [count, rows, cols] = scaled.of;
                let mut out = vec_filled(count.saturating_mul(rows).saturating_mul(cols), 0.0f32, &self.name)?;
                out.chunks_mut(cols.max(1)).enumerate().for_each(|(row, out)| scaled.decode_row(row, out));
                Ok(out)
            }
        }
    }
}
