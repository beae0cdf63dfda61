//! Loops written out, for the tiles of every kernel.

/// Repeats a block for an index from 0 on, written out: the sums are registers only if every index is a constant. `r` counts rows, `j`
/// panels, `g` groups of four k's and `q` pairs of groups.
macro_rules! unroll {
    (r < $n:ident $body:block) => { unroll!(@ r $n $body 0 1 2 3 4 5 6 7) };
    (j < $n:ident $body:block) => { unroll!(@ j $n $body 0 1 2 3) };
    (q < $n:ident $body:block) => { unroll!(@ q $n $body 0 1 2 3) };
    (g < $n:ident $body:block) => { unroll!(@ g $n $body 0 1 2 3 4 5 6 7) };
    (@ $i:ident $n:ident $body:block $($at:literal)+) => {
        $(if const { $at < $n } {
            #[allow(non_upper_case_globals)]
            const $i: usize = $at;
            $body
        })+
    };
}
