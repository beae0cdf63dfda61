//! Keeps the symbols of dependencies out of the shared library: some of them declare a C interface of their own, and only
//! `metrale_*` may be visible in a host's process.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux" || os == "android") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
