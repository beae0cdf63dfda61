//! Every example, built against the installed prefix and run on the small model, with the shared library and with the static one.

use crate::{against, golden, have, prefix, root, scratch, succeed, text};
use std::path::Path;
use std::process::Command;

/// An example is one entry. Both lines are run by `sh` in the repository's root with `PREFIX`, `PKG_CONFIG_PATH`, `MODEL`, `PROMPT`, `OUT` (an
/// empty folder), `LINK` (`shared` or `static`) and `FLAGS`, what a C or C++ compiler needs for that.
struct Example {
    name: &'static str,
    /// Tools without which it is skipped.
    needs: &'static [&'static str],
    /// How it is linked.
    links: &'static [&'static str],
    /// Makes `$OUT/program`, where it makes a program.
    build: &'static str,
    run: &'static str,
    /// What it says, on either stream; `GOLDEN` for how the text goes on after `$PROMPT`.
    says: &'static [&'static str],
}

/// Stands for the continuation that an independent implementation gives.
const GOLDEN: &str = "(the golden's continuation)";

const BOTH: &[&str] = &["shared", "static"];

const EXAMPLES: &[Example] = &[
    Example {
        name: "chat",
        needs: &["cc", "pkg-config"],
        links: BOTH,
        build: "cc -std=c11 -O1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror -o $OUT/program examples/chat/chat.c $FLAGS",
        run: "$OUT/program --raw --max-tokens 32 $MODEL \"$PROMPT\"",
        says: &[GOLDEN, "tokens/s"],
    },
    Example {
        name: "frame_loop",
        needs: &["cc", "pkg-config"],
        links: BOTH,
        build: "cc -std=c11 -O1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror -o $OUT/program examples/frame_loop/frame_loop.c $FLAGS -lm",
        run: "$OUT/program --raw --frames 60 --svg $OUT/frames.svg $MODEL \"$PROMPT\"; tail -n 1 $OUT/frames.svg",
        says: &[GOLDEN, "frame time: p50", "a second", "</svg>"],
    },
    Example {
        name: "batch",
        needs: &["c++", "pkg-config"],
        links: BOTH,
        build: "c++ -std=c++17 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror -o $OUT/program examples/batch/batch.cpp $FLAGS",
        run: "$OUT/program --max-tokens 32 $MODEL 'The dog' \"$PROMPT\" 'One day'",
        says: &[GOLDEN, "> The dog", "> One day", "tokens/s"],
    },
    // The Go binding's own tests, and those of the examples in Go, with the race detector.
    Example {
        name: "go",
        needs: &["go", "cc", "pkg-config"],
        links: BOTH,
        build: "",
        run: "sh bindings/go/test.sh $PREFIX $LINK",
        says: &["ok  \tmetrale", "ok  \textract", "ok  \tserve"],
    },
    Example {
        name: "extract-go",
        needs: &["go", "cc", "pkg-config"],
        links: BOTH,
        build: "cd examples/extract-go && export GOTOOLCHAIN=local GOFLAGS=-buildvcs=false GOPROXY=off && case $LINK in
            shared) CGO_LDFLAGS=-Wl,-rpath,$PREFIX/lib go build -o $OUT/program . ;; static) go build -tags metrale_static -o $OUT/program . ;; esac",
        run: "$OUT/program $MODEL \"$PROMPT\"",
        says: &["{\"title\":", "\"people\":["],
    },
    // What the Swift files use, beside what clang's module parser makes of the installed header; then Swift itself, where it is. Debian's
    // has no library for what Testing and Foundation have between them; the tests use nothing of it.
    Example {
        name: "swift-surface",
        needs: &["clang", "python3"],
        links: &["shared"],
        build: "",
        run: "python3 bindings/swift/check.py $PREFIX",
        says: &["functions as the module declares them"],
    },
    Example {
        name: "chat-swift",
        needs: &["swift", "pkg-config"],
        links: &["shared"],
        build: "(cd bindings/swift && LD_LIBRARY_PATH=$PREFIX/lib swift test --scratch-path $OUT/tests -Xswiftc -Xfrontend -Xswiftc -disable-cross-import-overlays) && cd examples/chat-swift && swift build --scratch-path $OUT/chat -Xlinker -rpath -Xlinker $PREFIX/lib && cp $OUT/chat/debug/chat $OUT/program",
        run: "$OUT/program --raw $MODEL \"$PROMPT\"",
        says: &[GOLDEN],
    },
];

#[test]
fn every_example_runs_against_the_prefix() {
    let Some(prefix) = prefix() else { return };
    let (prompt, continuation) = golden();
    for example in EXAMPLES {
        if !have(example.needs) {
            continue;
        }
        for link in example.links {
            let out = scratch(&format!("example-{}-{link}", example.name));
            let flags = match *link {
                "static" => "$(pkg-config --static --cflags --libs metrale)",
                _ => "$(pkg-config --cflags --libs metrale) -Wl,-rpath,$PREFIX/lib",
            };
            let line = |line: &str| {
                let mut command = against(prefix, &format!("FLAGS=\"{flags}\"\n{line}"));
                command.env("PROMPT", &prompt).env("OUT", &out).env("LINK", link);
                command
            };
            let what = format!("{} ({link})", example.name);
            succeed(&what, &mut line(example.build));
            let said = succeed(&what, &mut line(example.run));
            for expected in example.says.iter().map(|words| if *words == GOLDEN { continuation.as_str() } else { words }) {
                assert!(said.contains(expected), "{what} does not say {expected:?}:\n{said}");
            }
            let program = out.join("program");
            if program.exists() {
                linked_as_asked(&what, &program, *link == "shared");
                says_how_it_is_used(&what, example, &program);
            }
            println!("{what}: runs");
        }
    }
}

/// A program of the shared library names it by its SONAME; one of the static library does not.
fn linked_as_asked(what: &str, program: &Path, shared: bool) {
    if !have(&["readelf"]) {
        return;
    }
    let done = Command::new("readelf").arg("-d").arg(program).output().expect("readelf runs");
    let names = text(&done.stdout).contains("Shared library: [libmetrale.so.");
    assert_eq!(names, shared, "{what}: {}", text(&done.stdout));
}

/// Wrong arguments and missing files are answered, not signals; a README says what the example is.
fn says_how_it_is_used(what: &str, example: &Example, program: &Path) {
    let run = |arguments: &[&str]| {
        let done = Command::new(program).args(arguments).env_remove("LD_LIBRARY_PATH").output().expect("it starts");
        (done.status.code(), text(&done.stderr))
    };
    let (code, said) = run(&["--no-such-option"]);
    assert!(code == Some(2) && said.contains("usage:"), "{what}: {code:?} {said}");
    let (code, said) = run(&["no-such-file.gguf", "x"]);
    assert!(code == Some(1) && said.contains("no-such-file.gguf"), "{what}: {code:?} {said}");
    assert!(root().join("examples").join(example.name).join("README.md").exists(), "{what} has no README.md");
}
