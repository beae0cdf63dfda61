//! Calls as C makes them, for what needs no model: wrong pointers, wrong handles, samplers.

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use super::*;

/// The error's message; the error is freed.
fn message(err: *mut metrale_error) -> String {
    // SAFETY: `metrale_error_message` never returns NULL.
    let text = unsafe { CStr::from_ptr(metrale_error_message(err)) }.to_str().expect("messages are UTF-8").to_owned();
    metrale_error_free(err);
    text
}

fn stage(kind: u32) -> metrale_sampler_stage {
    metrale_sampler_stage { kind, count: 0, token: 0, value: 0.0, second: 0.0, length: 0, reserved: [0; 2] }
}

#[test]
fn null_everywhere_is_a_status() {
    let mut err = null_mut();
    assert_eq!(metrale_load(null(), null(), null_mut(), &mut err), METRALE_INVALID_ARGUMENT);
    assert_eq!(message(err), "out is NULL");
    let mut model = null_mut();
    assert_eq!(metrale_load(null(), null(), &mut model, &mut err), METRALE_INVALID_ARGUMENT);
    assert_eq!(message(err), "path is NULL");
    assert!(model.is_null());
    assert_eq!(metrale_seq_new(null_mut(), null(), &mut null_mut(), null_mut()), METRALE_INVALID_HANDLE);
    assert_eq!(metrale_prefill(null_mut(), null(), 0, null_mut()), METRALE_INVALID_HANDLE);
    assert_eq!(metrale_decode_step(null(), 1, null_mut(), null_mut()), METRALE_INVALID_ARGUMENT);
    assert_eq!(metrale_decode_step(null(), 0, null_mut(), null_mut()), METRALE_OK);
    assert_eq!(metrale_decode_step(&null_mut(), usize::MAX, &mut 0, null_mut()), METRALE_TOO_LARGE);
    let (mut token, mut steps) = (0, 9);
    assert_eq!(metrale_decode(null(), 1, 1, &mut token, &mut steps, null_mut()), METRALE_INVALID_ARGUMENT);
    assert_eq!(metrale_decode(&null_mut(), 1, 1, &mut token, null_mut(), null_mut()), METRALE_INVALID_ARGUMENT);
    assert_eq!(metrale_decode(&null_mut(), 1, usize::MAX, &mut token, &mut steps, null_mut()), METRALE_TOO_LARGE);
    assert_eq!((metrale_decode(null(), 0, 1, null_mut(), &mut steps, null_mut()), steps), (METRALE_OK, 0));
    metrale_free(null_mut());
    metrale_seq_free(null_mut());
    metrale_sampler_free(null_mut());
    metrale_text_free(null_mut());
    metrale_error_free(null_mut());
    assert_eq!(metrale_error_code(null()), METRALE_OK);
    assert_eq!(message(null_mut()), "");
}

#[test]
fn errors_outlive_nothing_and_say_all() {
    let mut err = null_mut();
    assert_eq!(metrale_check_abi(0x0002_0000, &mut err), METRALE_VERSION_MISMATCH);
    assert_eq!(metrale_error_code(err), METRALE_VERSION_MISMATCH);
    let (mut wanted, mut offset) = (0, 7);
    assert!(metrale_error_wanted(err, &mut wanted));
    assert_eq!(wanted, 0x0002_0000);
    assert!(!metrale_error_offset(err, &mut offset));
    assert_eq!(offset, 7);
    assert!(!metrale_error_retry(err));
    // SAFETY: never NULL.
    let detail: serde_json::Value = serde_json::from_str(unsafe { CStr::from_ptr(metrale_error_detail(err)) }.to_str().unwrap()).unwrap();
    assert_eq!(detail["status"], "METRALE_VERSION_MISMATCH");
    assert_eq!(detail["offset"], serde_json::Value::Null);
    metrale_error_free(err);
    assert_eq!(metrale_error_code(err), METRALE_INVALID_HANDLE);
    assert_eq!(message(err), "the error handle was freed or never existed");
    assert_eq!(metrale_check_abi(METRALE_ABI_VERSION, null_mut()), METRALE_OK);
}

#[test]
fn samplers_refuse_what_has_no_meaning() {
    let mut out = null_mut();
    let mut err = null_mut();
    let good = metrale_sampler_stage { value: 0.8, ..stage(METRALE_STAGE_TEMPERATURE) };
    assert_eq!(metrale_sampler_new(&good, 1, 1, &mut out, &mut err), METRALE_OK);
    metrale_sampler_free(out);
    let bad = [
        (metrale_sampler_stage { count: 1, ..good }, METRALE_INVALID_ARGUMENT),
        (metrale_sampler_stage { token: 1, ..good }, METRALE_INVALID_ARGUMENT),
        (metrale_sampler_stage { reserved: [0, 1], ..good }, METRALE_INVALID_ARGUMENT),
        (metrale_sampler_stage { value: f32::NAN, ..good }, METRALE_INVALID_ARGUMENT),
        (metrale_sampler_stage { value: 0.5, ..stage(METRALE_STAGE_TOP_K) }, METRALE_INVALID_ARGUMENT),
        (stage(METRALE_STAGE_REPETITION), METRALE_INVALID_ARGUMENT),
        (stage(0), METRALE_UNKNOWN_OPTION),
        (stage(1000), METRALE_UNKNOWN_OPTION),
    ];
    for (stage, status) in bad {
        let stages = [good, stage];
        let mut untouched = null_mut();
        assert_eq!(metrale_sampler_new(stages.as_ptr(), 2, 1, &mut untouched, &mut err), status);
        let mut index = 0;
        assert!(metrale_error_offset(err, &mut index) && index == 1, "{}", message(err));
        metrale_error_free(err);
        assert!(untouched.is_null());
    }
    assert_eq!(metrale_sampler_new(null(), 0, 0, &mut out, &mut err), METRALE_OK);
    assert_eq!(metrale_seq_info(out.cast(), null_mut(), null_mut()), METRALE_INVALID_ARGUMENT);
    assert_eq!(metrale_prefill(out.cast(), null(), 0, &mut err), METRALE_INVALID_HANDLE);
    assert_eq!(message(err), "this is a sampler handle, a sequence is expected");
    metrale_sampler_free(out);
}
