//! What integration tests share.
#![allow(dead_code)] // each test uses its part

pub mod golden;
