//! A short list on the stack: the objects of one batch, without an allocation in the common sizes.

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use crate::error::{self, Result};

/// Batches up to this size stay on the stack.
const INLINE: usize = 16;

/// A list whose room is decided when it is made.
pub(super) struct Small<T> {
    inline: [MaybeUninit<T>; INLINE],
    /// Initialised elements of `inline`; 0 when `heap` is in use.
    len: usize,
    heap: Option<Vec<T>>,
}

impl<T> Small<T> {
    /// A list of `count` elements, made one by one; the first error ends it.
    pub(super) fn collect(count: usize, what: &str, mut make: impl FnMut(usize) -> Result<T>) -> Result<Small<T>> {
        let mut list = Small { inline: [const { MaybeUninit::uninit() }; INLINE], len: 0, heap: None };
        if count > INLINE {
            let mut heap = error::vec_with_capacity(count, what)?;
            for index in 0..count {
                heap.push(make(index)?);
            }
            list.heap = Some(heap);
        } else {
            for index in 0..count {
                list.inline[index].write(make(index)?);
                list.len += 1;
            }
        }
        Ok(list)
    }
}

impl<T> Deref for Small<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.heap {
            Some(heap) => heap,
            // SAFETY: the first `len` elements are initialised.
            None => unsafe { std::slice::from_raw_parts(self.inline.as_ptr().cast(), self.len) },
        }
    }
}

impl<T> DerefMut for Small<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.heap {
            Some(heap) => heap,
            // SAFETY: the first `len` elements are initialised.
            None => unsafe { std::slice::from_raw_parts_mut(self.inline.as_mut_ptr().cast(), self.len) },
        }
    }
}

impl<T> Drop for Small<T> {
    fn drop(&mut self) {
        let initialised = std::mem::take(&mut self.len);
        for element in &mut self.inline[..initialised] {
            // SAFETY: it is one of the initialised ones, and `len` no longer counts it.
            unsafe { element.assume_init_drop() };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::bail;

    #[test]
    fn every_element_is_dropped_once() {
        for count in [0, 1, INLINE, INLINE + 1, 100] {
            let one = Rc::new(());
            let mut list = Small::collect(count, "test", |_| Ok(one.clone())).unwrap();
            assert_eq!((list.len(), list.iter_mut().len(), Rc::strong_count(&one)), (count, count, count + 1));
            drop(list);
            assert_eq!(Rc::strong_count(&one), 1);
            let failed = Small::collect(count, "test", |i| if i + 1 == count { bail!(Busy, "last") } else { Ok(one.clone()) });
            assert_eq!(failed.is_err(), count > 0);
            drop(failed);
            assert_eq!(Rc::strong_count(&one), 1);
        }
        assert!(Small::collect(usize::MAX, "test", Ok).is_err());
    }
}
