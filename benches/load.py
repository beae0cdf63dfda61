#!/usr/bin/env python3
"""Time from a load's begin to the first token of a 32-token prompt, beside llama.cpp.

    python3 benches/peer.py --build build/peer             builds llama.cpp
    cargo build --release --example metrale_bench          builds ours
    python3 benches/load.py MODEL.gguf [more ...]          runs both and prints the ratios

Both are fresh processes for each figure, run in turn, with the file in the page cache; figures are medians over the rounds, in
milliseconds. The clock starts when the library is asked for the model and stops when the token with the largest logit is known.
The peer is `benches/peer_load.cpp`, linked with the peer's own libraries: no warm-up run, its default context. The ratio is
ours over the peer's: below 1 we are faster. `rss` is the most that was in memory, mapped files included.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def peer_program(folder, source):
    """Compiles `peer_load` beside the peer's libraries, once."""
    program = folder / "peer_load"
    if not program.is_file():
        libraries = folder / "bin"
        command = ["c++", "-O2", "-std=c++17", f"-I{source}/include", f"-I{source}/ggml/include", ROOT / "benches" / "peer_load.cpp",
                   "-o", program, f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{libraries.resolve()}"]
        subprocess.run(list(map(str, command)), check=True)
    return program


def output(command):
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours", default=ROOT / "target/release/examples/metrale_bench")
    parser.add_argument("--peer", type=pathlib.Path, default=ROOT / "build/peer", help="folder of the built peer")
    parser.add_argument("--peer-source", type=pathlib.Path, help="its sources, where they are not in that folder")
    options = parser.parse_args()
    source = options.peer_source or next(options.peer.glob("*/llama.cpp"), None)
    if source is None:
        sys.exit(f"{options.peer}: no sources of the peer; see --peer-source")
    peer = peer_program(options.peer, source)
    print(f"{'model':<40} {'threads':>7} {'peer ms':>8} {'ours ms':>8} {'of that load':>12} {'ratio':>6} {'peer rss':>9} {'ours rss':>9}")
    for model in options.models:
        for threads in options.threads.split(","):
            theirs, ours = [], []
            for _ in range(options.rounds):
                theirs.append(output([peer, model, threads]))
                ours.append(output([options.ours, model, "--threads", threads, "--prompt", 0, "--decode", 0, "--json"]))
            their = statistics.median(t["first_ms"] for t in theirs)
            our = 1e3 * statistics.median(o["first_token_seconds"] for o in ours)
            load = 1e3 * statistics.median(o["load_seconds"] for o in ours)
            rss = max(o["peak_rss_bytes"] for o in ours) >> 20
            name = "/".join(pathlib.Path(model).parts[-2:])
            print(f"{name:<40} {threads:>7} {their:>8.0f} {our:>8.0f} {load:>12.0f} {our / their:>6.2f} {max(t['hwm_mb'] for t in theirs):>9} {rss:>9}",
                  flush=True)


if __name__ == "__main__":
    main()
