//! Tests of a sequence's states: who writes which, and what stays.

use super::*;

fn state() -> SequenceState {
    let slots = [3, 20].map(|elements| SlotSpec { name: "s".into(), elements });
    let pool = StatePool::new(StateLayout::new(&slots, 5).unwrap());
    let zero = pool.zero().unwrap();
    SequenceState::new(&pool, &zero)
}

fn step(s: &mut SequenceState, value: f32, before: usize) {
    s.begin().unwrap();
    s.next_logits().unwrap().fill(value);
    s.commit(Some(before));
}

#[test]
fn slots_and_logits_do_not_overlap() {
    let s = state();
    let layout = s.pool.layout();
    assert_eq!(&layout.slots()[..], [0..3, 16..36]);
    assert_eq!((layout.slot_floats(false), layout.floats_of(false), layout.floats(), layout.floats_of(true)), (48, 53, 53, 0));
    let huge = SlotSpec { name: "x".into(), elements: usize::MAX / 2 };
    assert_eq!(StateLayout::new(&[huge], 1).unwrap_err().kind(), Kind::TooLarge);
}

#[test]
fn slots_of_two_sides_lie_apart_and_are_written_in_their_order() {
    let slots = [3, 20, 16, 1].map(|elements| SlotSpec { name: "s".into(), elements });
    let whole = StateLayout::new(&slots, 5).unwrap();
    let layout = StateLayout::apart(&slots, 5, |index| index == 1 || index == 3, true).unwrap();
    assert_eq!(&layout.slots()[..], [0..3, 0..20, 16..32, 32..33]);
    assert_eq!(layout.runs, [(false, 0..16), (true, 0..32), (false, 16..32), (true, 32..53)]);
    assert_eq!([false, true].map(|there| (layout.slot_floats(there), layout.floats_of(there))), [(32, 32), (48, 53)]);
    assert_eq!(layout.floats(), whole.floats());
}

#[test]
fn a_shared_state_is_never_written() {
    let mut s = state();
    step(&mut s, 1.0, 0);
    let mark = s.share();
    for i in 2..9 {
        step(&mut s, i as f32, i - 1);
    }
    assert_eq!((mark.logits().unwrap()[0], s.logits().unwrap()[0]), (1.0, 8.0));
    s.set(&mark);
    assert_eq!(s.logits().unwrap()[0], 1.0);
    s.reset();
    step(&mut s, 4.0, 0);
    assert_eq!((mark.logits().unwrap()[0], s.logits().unwrap()[0], s.zero.logits().unwrap()[0]), (1.0, 4.0, 0.0));
}

#[test]
fn the_last_call_can_be_undone_once_and_a_begun_one_not() {
    let mut s = state();
    step(&mut s, 1.0, 0);
    step(&mut s, 2.0, 7);
    assert!(!s.undo(6) && s.undo(7) && !s.undo(7));
    assert_eq!(s.logits().unwrap()[0], 1.0);
    step(&mut s, 3.0, 7);
    s.begin().unwrap();
    assert!(!s.undo(7));
    assert_eq!(s.logits().unwrap()[0], 3.0);
}

#[test]
fn of_three_states_the_committed_one_and_the_one_before_it_stay() {
    let mut s = state();
    step(&mut s, 1.0, 0);
    s.begin_two().unwrap();
    let third = s.third.as_ref().unwrap().memories().host();
    s.next_logits().unwrap().fill(2.0);
    // The device writes the third meanwhile.
    s.commit(Some(1));
    assert_eq!((s.logits().unwrap()[0], s.before), (2.0, Some(1)));
    // Nobody wants that: as if it had never begun.
    assert!(s.undo(1) && s.logits().unwrap()[0] == 1.0);
    step(&mut s, 2.0, 1);
    s.begin_two().unwrap();
    s.next_logits().unwrap().fill(3.0);
    s.commit(Some(2));
    assert!(s.has_third());
    s.begin_third();
    assert_eq!(s.spare().memories().host(), third);
    assert!(!s.undo(2) && s.has_third());
    s.next_logits().unwrap().fill(4.0);
    s.commit(Some(3));
    assert!(s.logits().unwrap()[0] == 4.0 && s.undo(3) && s.logits().unwrap()[0] == 3.0);
    // A mark's state is not written by the one after the next.
    step(&mut s, 5.0, 4);
    let mark = s.share();
    s.begin_two().unwrap();
    s.commit(Some(5));
    assert!(s.has_third());
    s.begin_third();
    assert!(!s.has_third());
    s.commit(Some(6));
    s.begin_two().unwrap();
    assert!(s.has_third() && mark.logits().unwrap()[0] == 5.0);
}

#[test]
fn steady_steps_take_no_new_memory() {
    let mut s = state();
    step(&mut s, 1.0, 0);
    step(&mut s, 2.0, 1);
    let known = [s.committed.memories().host(), s.spare.as_ref().unwrap().memories().host()];
    for i in 3..6 {
        step(&mut s, i as f32, i - 1);
        assert!(known.contains(&s.committed.memories().host()));
    }
}
