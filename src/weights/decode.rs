//! A stored tensor as plain numbers in logical order: for vectors, and for whoever wants exact values.

use crate::error::{Error, Kind, Result, vec_filled};
use crate::quant;
use crate::tensor::{RowMap, TensorView};

/// All elements, row maps and offsets applied. A vector has no rows to move, so there the map moves its elements (the
/// bias of an interleaved projection).
pub fn to_f32(view: &TensorView<'_>) -> Result<Vec<f32>> {
    let elements = view.elements().ok_or_else(|| Error::new(Kind::TooLarge, format!("{}: {:?} overflows", view.name, view.shape)))?;
    let mut out = vec_filled(elements, 0f32, &view.name)?;
    if view.row_map == RowMap::Straight {
        quant::decode(view.dtype, view.data, &mut out).map_err(|e| e.context(&view.name))?;
    } else if view.shape.len() < 2 {
        let mut stored = vec_filled(elements, 0f32, &view.name)?;
        quant::decode(view.dtype, view.data, &mut stored).map_err(|e| e.context(&view.name))?;
        for (i, value) in out.iter_mut().enumerate() {
            *value = stored[view.row_map.stored(i)];
        }
    } else if elements > 0 {
        for (row, values) in out.chunks_exact_mut(view.cols()).enumerate() {
            quant::decode(view.dtype, view.row(row), values).map_err(|e| e.context(&view.name))?;
        }
    }
    if view.offset != 0.0 {
        out.iter_mut().for_each(|x| *x += view.offset);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn maps_and_offsets_apply_to_rows_and_to_vectors() {
        let data: Vec<u8> = (0..8).collect();
        let mut view = TensorView::new("w", DType::U8, vec![4, 2], &data).unwrap();
        view.row_map = RowMap::Interleaved { head_dim: 4 };
        assert_eq!(to_f32(&view).unwrap(), [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        let mut view = TensorView::new("b", DType::U8, vec![8], &data).unwrap();
        view.row_map = RowMap::Interleaved { head_dim: 4 };
        view.offset = -1.0;
        assert_eq!(to_f32(&view).unwrap(), [-1.0, 1.0, 0.0, 2.0, 3.0, 5.0, 4.0, 6.0]);
        let empty = TensorView::new("e", DType::F32, vec![0, 4], &[]).unwrap();
        assert!(to_f32(&empty).unwrap().is_empty());
    }
}
