//! What `make install`, `make uninstall` and `make dist` do: which files there are, that they may be moved, and what the libraries show and
//! need. Where the library's own code plays no part, a stand-in of one function takes its place.

use crate::{against, built, have, model, prefix, root, scratch, shell, succeed, text};
use std::path::{Path, PathBuf};

/// Every file below a folder, relative to it, in order.
fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).expect("it is a folder") {
            let path = entry.expect("it is readable").path();
            let link = path.symlink_metadata().expect("it is there").is_symlink();
            if path.is_dir() && !link {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).expect("it is inside").display().to_string());
            }
        }
    }
    found.sort();
    found
}

/// A folder with a libmetrale.so and a libmetrale.a of `source`.
fn stand_in(name: &str, source: &str) -> PathBuf {
    let folder = scratch(name);
    std::fs::write(folder.join("metrale.c"), source).expect("writable");
    let lines = "cc -shared -fPIC -o libmetrale.so metrale.c -pthread && cc -fPIC -c metrale.c && ar rcs libmetrale.a metrale.o";
    succeed("the stand-in", shell(lines).current_dir(&folder));
    folder
}

const SMALL: &str = "#include <stdio.h>\nint helper(void) { return puts(\"\"); }\nint metrale_small(void) { return helper(); }\n";

#[test]
fn what_is_installed_is_taken_away_again() {
    if !have(&["make", "cc", "ld", "objcopy", "ar", "nm", "python3"]) {
        return;
    }
    let built = stand_in("small", SMALL);
    let staged = scratch("staged");
    let make = |target: &str| {
        let mut command = shell(&format!("make -s {target} PREFIX=/usr LIBDIR=lib/x86_64-linux-gnu"));
        command.env("DESTDIR", &staged).env("BUILT", &built);
        command
    };
    succeed("make install", &mut make("install"));
    let found = files(&staged);
    let version = env!("CARGO_PKG_VERSION");
    for expected in [
        "usr/include/metrale.h".to_string(),
        "usr/include/metrale.hpp".into(),
        "usr/include/metrale/base.hpp".into(),
        "usr/include/metrale/module.modulemap".into(),
        "usr/lib/x86_64-linux-gnu/libmetrale.a".into(),
        "usr/lib/x86_64-linux-gnu/libmetrale.so".into(),
        "usr/lib/x86_64-linux-gnu/libmetrale.so.0.1".into(),
        format!("usr/lib/x86_64-linux-gnu/libmetrale.so.{version}"),
        "usr/lib/x86_64-linux-gnu/pkgconfig/metrale.pc".into(),
        "usr/lib/x86_64-linux-gnu/cmake/metrale/metrale-config.cmake".into(),
        "usr/share/doc/metrale/LICENSE-MIT".into(),
        "usr/share/doc/metrale/LICENSE-APACHE".into(),
    ] {
        assert!(found.contains(&expected), "{expected} is not among {found:#?}");
    }
    for name in found.iter().filter(|name| !name.contains("libmetrale")) {
        let contents = std::fs::read_to_string(staged.join(name)).expect("it is text");
        assert!(!contents.contains(&*staged.to_string_lossy()), "{name} names the folder it was staged in");
        assert!(name.contains("share/doc") || !contents.contains('@'), "{name} has a value that was not filled in:\n{contents}");
    }
    let third = std::fs::read_to_string(staged.join("usr/share/doc/metrale/THIRD-PARTY")).expect("it is there");
    for name in ["llguidance", "tokenizers", "safetensors"] {
        assert!(third.contains(&format!("\n  {name} ")), "the licence of {name} is missing");
    }
    assert!(third.contains("Permission is hereby granted") && !third.contains("proptest"));
    // Names that are not the library's own become local, in a program that has the same ones.
    let archive = staged.join("usr/lib/x86_64-linux-gnu/libmetrale.a");
    assert_eq!(global_names(&archive), ["metrale_small"]);

    // What others put there stays.
    std::fs::write(staged.join("usr/include/other.h"), "").expect("writable");
    succeed("make uninstall", &mut make("uninstall"));
    assert_eq!(files(&staged), ["usr/include/other.h"]);
    for gone in ["usr/include/metrale", "usr/share/doc/metrale", "usr/lib/x86_64-linux-gnu/cmake/metrale"] {
        assert!(!staged.join(gone).exists(), "{gone} is still there");
    }
    for (variable, value) in [("PREFIX", "relative"), ("LIBDIR", "/usr/lib"), ("LIBDIR", "../lib")] {
        let done = shell(&format!("bindings/install.sh {}", built.display())).env("DESTDIR", &staged).env(variable, value).output();
        assert_eq!(done.expect("sh runs").status.code(), Some(2), "{variable}={value}");
    }
    assert_eq!(files(&staged), ["usr/include/other.h"]);
}

fn global_names(archive: &Path) -> Vec<String> {
    let shown = succeed("nm", std::process::Command::new("nm").args(["-g", "--defined-only"]).arg(archive));
    let mut names: Vec<String> = shown.lines().filter_map(|line| Some(line.split_whitespace().nth(2)?.to_string())).collect();
    names.sort();
    names
}

/// The static library shows exactly what the shared one does.
#[test]
fn the_static_library_shows_only_its_own_names() {
    let Some(prefix) = prefix() else { return };
    if !have(&["nm"]) {
        return;
    }
    let mut shown = std::process::Command::new("nm");
    let shown = succeed("nm", shown.args(["-D", "--defined-only"]).arg(prefix.join("lib/libmetrale.so")));
    let mut shared: Vec<&str> = shown
        .lines()
        .filter_map(|line| line.split_whitespace().last()?.split('@').next())
        .filter(|name| name.starts_with("metrale_"))
        .collect();
    shared.sort();
    assert!(shared.len() > 90);
    assert_eq!(global_names(&prefix.join("lib/libmetrale.a")), shared);
}

/// No symbol of the shared library is newer than the C library of Debian 11.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn an_older_c_library_is_enough() {
    if !have(&["objdump", "cc"]) {
        return;
    }
    let check = |library: &Path, most: &str| {
        let done = shell(&format!("bindings/c/glibc.sh {} {most}", library.display())).output().expect("sh runs");
        (done.status.success(), text(&done.stdout) + &text(&done.stderr))
    };
    let (fine, said) = check(&built().join("libmetrale.so"), "2.31");
    assert!(fine, "{said}");
    println!("the newest symbol is of glibc {said}");
    // The check finds what it is for, and names it.
    let (fine, said) = check(&built().join("libmetrale.so"), "2.2.5");
    assert!(!fine && said.contains("statx (GLIBC_2.28)"), "{said}");
}

#[test]
fn the_archive_may_lie_anywhere() {
    if !have(&["make", "cc", "ld", "objcopy", "objdump", "ar", "python3", "sha256sum", "tar", "pkg-config"]) {
        return;
    }
    let built = stand_in("small-dist", SMALL);
    let out = scratch("dist");
    let dist = |built: &Path| {
        let mut command = shell("make -s dist");
        command.env("DIST", &out).env("BUILT", built);
        command
    };
    let said = succeed("make dist", &mut dist(&built));
    let archive = PathBuf::from(said.lines().last().expect("it says where"));
    let before = std::fs::read(&archive).expect("the archive is there");
    succeed("make dist", &mut dist(&built));
    assert!(before == std::fs::read(&archive).expect("the archive is there"), "the same libraries gave another archive");
    let name = archive.file_name().expect("a name").to_string_lossy().trim_end_matches(".tar.gz").to_string();
    let lines = format!(
        "sha256sum -c --quiet {name}.tar.gz.sha256; mkdir moved; tar -C moved -xzf {name}.tar.gz; cd moved/{name}; sha256sum -c --quiet SHA256SUMS
         PKG_CONFIG_PATH=$PWD/lib/pkgconfig; export PKG_CONFIG_PATH
         echo 'int metrale_small(void); int main(void) {{ return metrale_small() < 0; }}' >app.c
         cc app.c -o shared $(pkg-config --libs metrale) -Wl,-rpath,$PWD/lib && ./shared
         cc app.c -o static $(pkg-config --static --cflags --libs metrale) && cc app.c -o other $(pkg-config --libs metrale-static) && rm -r lib && ./static && ./other"
    );
    succeed("the archive", shell(&lines).current_dir(&out));
    // A library that asks for more than it may is not handed out.
    if cfg!(target_env = "gnu") {
        let newer = stand_in("newer", "#include <pthread.h>\nint metrale_small(void) { return pthread_create(0, 0, 0, 0); }\n");
        let done = dist(&newer).output().expect("make runs");
        let needs =
            text(&std::process::Command::new("objdump").arg("-T").arg(newer.join("libmetrale.so")).output().expect("objdump runs").stdout);
        assert_eq!(done.status.success(), !needs.contains("GLIBC_2.34"), "{}", text(&done.stderr));
        assert!(done.status.success() || text(&done.stderr).contains("pthread_create (GLIBC_2.34)"), "{}", text(&done.stderr));
    }
}

/// `find_package`, both targets, the version, from a prefix that was moved.
#[test]
fn cmake_finds_it() {
    let Some(prefix) = prefix() else { return };
    if !have(&["cmake", "cc", "c++", "make"]) {
        return;
    }
    let folder = scratch("cmake");
    succeed("cp", shell("cp -al $PREFIX $TO/moved").env("PREFIX", prefix).env("TO", &folder));
    let lists = format!(
        "cmake_minimum_required(VERSION 3.16)\nproject(host C CXX)\nfind_package(metrale {} REQUIRED)\n\
         find_package(metrale 9 QUIET)\nif(metrale_FOUND)\n  message(FATAL_ERROR \"version 9 was found\")\nendif()\n\
         find_package(metrale 0.1 REQUIRED)\n\
         add_executable(shared {root}/examples/chat/chat.c)\ntarget_link_libraries(shared metrale::metrale)\n\
         add_executable(static {root}/examples/batch/batch.cpp)\ntarget_compile_features(static PRIVATE cxx_std_17)\ntarget_link_libraries(static metrale::static)\n",
        env!("CARGO_PKG_VERSION"),
        root = root().display()
    );
    std::fs::write(folder.join("CMakeLists.txt"), lists).expect("writable");
    let line = "cmake -S . -B build -DCMAKE_PREFIX_PATH=$PWD/moved >log 2>&1 && cmake --build build >>log 2>&1 || { cat log; exit 1; }
        build/shared --raw --max-tokens 4 $MODEL 'Once upon a time'; rm -r moved; build/static --max-tokens 4 $MODEL 'Once upon a time'";
    let said = succeed("cmake", shell(line).current_dir(&folder).env("MODEL", model()));
    assert_eq!(said.matches("tokens/s").count(), 3, "{said}");
}

/// clang reads the header as a module, which is how Swift sees it.
#[test]
fn clang_imports_the_module() {
    let Some(prefix) = prefix() else { return };
    if !have(&["clang"]) {
        return;
    }
    let out = scratch("module");
    std::fs::write(out.join("host.c"), "@import CMetrale;\nint main(void) { return metrale_check_abi(METRALE_ABI_VERSION, 0); }\n")
        .expect("writable");
    let line = "clang -fmodules -fcxx-modules -fmodules-cache-path=$OUT/cache -x objective-c -fsyntax-only -Werror -I $PREFIX/include/metrale $OUT/host.c";
    succeed("clang", against(prefix, line).env("OUT", &out));
}
