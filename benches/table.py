#!/usr/bin/env python3
"""The whole table of speed on the CPU: every bar that we set ourselves, beside llama.cpp and beside the machine's limits.

    make bench                                          everything (hours); `make variants` makes the files it reads
    make bench ROWS='decode/smollm2* batch/*/Q8_0/*'    rows by name, with * and ?
    make bench QUICK=1                                  one round, shorter runs, half of the peer's settings
    python3 benches/table.py --list                     the rows' names

Rows are named kind/model/format/threads. Within a row the sides run in turn, `--rounds` times, and the best of each counts: on a shared
machine the worst measures the neighbours. A ratio is ours over the peer's, of rates and of times alike; the bar says whether more or
less is better. Limits (read bandwidth, peaks of f32 multiply-adds and of int8 dots) are measured by our side in the
same run. A row that cannot run says why. Lines are printed as they are found, and `--json` keeps every single figure.
"""
import argparse
import datetime
import fnmatch
import json
import os
import pathlib
import platform
import shlex
import sys

import configs
from peer import PEER, ROOT
from sides import Missing, Ours, Peer, bests

SMALL = ["smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"]
SHAPES = ["qwen3-0.6b", "llama-3.2-1b"]
FORMATS = {**{m: ["shipped", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M"] for m in SMALL}, **{m: ["BF16", "Q8_0", "Q4_K_M"] for m in SHAPES}}
BATCHES = [1, 4, 8, 16]
HYBRIDS = ["qwen3_next", "qwen3_5", "nemotron_h", "kimi_linear"]


def cell(value, bar=None, most=False, digits=2):
    """A figure with its bar and whether it is met."""
    if value is None:
        return "-"
    if bar is None:
        return f"{value:.{digits}f}"
    met = value <= bar if most else value >= bar
    return f"{value:.{digits}f} {'≤' if most else '≥'} {bar:g} {'✓' if met else '✗'}"


class Table:
    def __init__(self, options):
        self.options, self.quick = options, options.quick
        self.ours = Ours(options.ours)
        self.peer = Peer(options.peer, options.peer_source or next(options.peer.glob("*/llama.cpp"), None))
        self.log = []

    def file(self, model, form):
        o = self.options
        path = o.models / model / "model.gguf" if form == "shipped" else o.variants / f"{model}-{form}.gguf"
        if not path.is_file():
            raise Missing(f"{path.name if form != 'shipped' else model}: no such file; `make models variants` makes it")
        return path

    def rows(self):
        """(name, function) of every row."""
        for model, formats in FORMATS.items():
            for form in formats:
                for t in (1, 2):
                    at = f"{model}/{form}/{t}"
                    yield f"prefill512/{at}", lambda m=model, f=form, t=t: self.prefill(m, f, t, 512)
                    yield f"prefill2048/{at}", lambda m=model, f=form, t=t: self.prefill(m, f, t, 2048)
                    yield f"decode/{at}", lambda m=model, f=form, t=t: self.decode(m, f, t)
                    yield f"batch/{at}", lambda m=model, f=form, t=t: self.batch(m, f, t)
                    yield f"load/{at}", lambda m=model, f=form, t=t: self.load(m, f, t)
        for model in SMALL:
            for form in ("Q8_0", "Q4_K_M", "BF16"):
                for t in (1, 2):
                    yield f"avx2/{model}/{form}/{t}", lambda m=model, f=form, t=t: self.avx2(m, f, t)
        for t in (1, 2):
            yield f"step/stories260k/shipped/{t}", lambda t=t: self.step(t)
            for name in ("attention-64", "attention-128", "attention-256"):
                for form in ("F16", "Q8"):
                    yield f"context/{name}/{form}/{t}", lambda n=name, f=form, t=t: self.context(n, f, t)
            for name in HYBRIDS:
                for form in ("BF16", "Q8_0"):
                    yield f"hybrid/{name}/{form}/{t}", lambda n=name, f=form, t=t: self.hybrid(n, f, t)
            for form in ("BF16", "Q8_0", "Q4_K"):
                yield f"moe/mixture/{form}/{t}", lambda f=form, t=t: self.mixture(f, t)

    def flash(self):
        return (1,) if self.quick else (0, 1)

    @property
    def rounds(self):
        return 1 if self.quick else self.options.rounds

    def prefill(self, model, form, threads, n):
        path = self.file(model, form)
        peer, ours = bests(self.rounds, lambda: self.peer.bench(path, threads, prompt=n, flash=self.flash()),
                           lambda: self.ours.run(path, threads, prompt=n))
        theirs, rate = max(max(r.values()) for r in peer), max(r["prompt_best_tps"] for r in ours)
        exact = form in ("BF16", "F16")
        peak = max(r["fma_gflops" if exact else "int8_gops"] for r in ours)
        share = 100 * max(r["prompt_gflops"] for r in ours) / peak
        limit = f"{cell(share, 75 if exact else 60, digits=0)} % of the {'f32' if exact else 'int8'} peak"
        return [f"{theirs:.0f}", f"{rate:.0f}", cell(rate / theirs, 4 if form == "Q8_0" else 2), limit], (peer, ours)

    def decode(self, model, form, threads):
        path, n = self.file(model, form), 48 if self.quick else 128
        peer, ours = bests(self.rounds, lambda: self.peer.bench(path, threads, decode=n, flash=self.flash()),
                           lambda: self.ours.run(path, threads, decode=n))
        theirs, rate = max(max(r.values()) for r in peer), max(r["decode_tps"] for r in ours)
        read = max(r["read_gbps"] for r in ours)
        share = 100 * max(r["decode_gbps"] for r in ours) / read
        bar = 90 if form in ("BF16", "F16", "Q8_0") else 85
        limit = f"{cell(share, bar, digits=0)} % of {read:.0f} GB/s"
        return [f"{theirs:.1f}", f"{rate:.1f}", cell(rate / theirs, 1.5 if model in SHAPES else 1.3), limit], (peer, ours)

    def batch(self, model, form, threads):
        path, n = self.file(model, form), 24 if self.quick else 48
        sides = [lambda: self.peer.batches(path, threads, BATCHES, n)]
        sides += [lambda b=b: self.ours.run(path, threads, decode=n, batch=b) for b in BATCHES]
        peer, *ours = bests(self.rounds, *sides)
        theirs = {b: max(r[b] for r in peer) for b in BATCHES}
        rates = {b: max(r["decode_tps"] for r in runs) for b, runs in zip(BATCHES, ours)}
        falls = all(rates[a] < rates[b] for a, b in zip(BATCHES, BATCHES[1:]))
        shown = lambda rates: " ".join(f"{rates[b]:.0f}" for b in BATCHES)
        ratios = "; ".join(cell(rates[b] / theirs[b], 1.5) for b in BATCHES[1:])
        return [shown(theirs), shown(rates), ratios, f"cost per token falls {'✓' if falls else '✗'}"], (peer, ours)

    def load(self, model, form, threads):
        path = self.file(model, form)
        peer, ours = bests(self.rounds, lambda: self.peer.first_token(path, threads), lambda: self.ours.run(path, threads))
        theirs, time = min(r["first_ms"] for r in peer), 1e3 * min(r["first_token_seconds"] for r in ours)
        memory = min(r["peak_rss_bytes"] for r in ours) / ours[0]["plan_bytes"]
        limit = f"peak RSS {cell(memory, 1.1, most=True)} of the plan"
        return [f"{theirs:.0f} ms", f"{time:.0f} ms", cell(time / theirs, 0.5, most=True), limit], (peer, ours)

    def avx2(self, model, form, threads):
        path, narrow = self.file(model, form), Peer(self.options.peer_avx2, self.peer.source)
        ours = Ours(self.options.ours, simd="avx2")
        n = 32 if self.quick else 96
        runs = bests(self.rounds, lambda: narrow.bench(path, threads, prompt=512, flash=self.flash()), lambda: ours.run(path, threads, prompt=512),
                     lambda: narrow.bench(path, threads, decode=n, flash=self.flash()), lambda: ours.run(path, threads, decode=n))
        a, b = max(max(r.values()) for r in runs[0]), max(r["prompt_best_tps"] for r in runs[1])
        c, d = max(max(r.values()) for r in runs[2]), max(r["decode_tps"] for r in runs[3])
        return [f"{a:.0f} {c:.1f}", f"{b:.0f} {d:.1f}", f"prefill {cell(b / a, 1.1)}; decode {cell(d / c, 1.1)}", "-"], runs

    def step(self, threads):
        path = self.file("stories260k", "shipped")
        (ours,) = bests(max(self.rounds, 3), lambda: self.ours.run(path, threads, decode=256))
        # The best eight steps: the rest waits for neighbours.
        time, read = 1e6 / max(r["decode_best_tps"] for r in ours), max(r["read_gbps"] for r in ours)
        bytes_time = ours[0]["weight_bytes"] / read / 1e3
        over = time - bytes_time
        return ["-", f"{time:.0f} µs", "-", f"{cell(over, 25, most=True, digits=0)} µs over {bytes_time:.0f} µs of bytes at {read:.0f} GB/s"], ours

    def context(self, name, form, threads):
        ours = Ours(self.options.ours, kv_type=form.lower())
        path, depth = configs.folder(name, self.options.work), 4096 if self.quick else 16384
        near, far = bests(self.rounds, lambda: ours.run(path, threads, decode=64, synthetic="BF16"),
                          lambda: ours.run(path, threads, prompt=depth, decode=32, depth=depth, synthetic="BF16"))
        read = max(r["read_gbps"] for r in near + far)
        extra = 1 / max(r["decode_best_tps"] for r in far) - 1 / max(r["decode_best_tps"] for r in near)
        cost = extra / (far[0]["kv_bytes"] / read / 1e9)
        config = configs.CONFIGS[name]
        # Scores and weighted values: four operations for each pair of positions, head, and element.
        flops = 2.0 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * depth * depth
        share = 100 * flops / (depth / max(r["prompt_best_tps"] for r in far)) / 1e9 / max(r["fma_gflops"] for r in far)
        shown = f"prefill {cell(share, 60, digits=0)} % of the f32 peak"
        return ["-", f"{extra * 1e6:.0f} µs", "-", f"{cell(cost, 1.15, most=True)} of {far[0]['kv_bytes'] / 1e6:.0f} MB at {read:.0f} GB/s; {shown}"], (near, far)

    def hybrid(self, name, form, threads):
        path = configs.folder(name, self.options.work)
        (ours,) = bests(self.rounds, lambda: self.ours.run(path, threads, decode=48, synthetic=form))
        share, read = 100 * max(r["decode_gbps"] for r in ours) / max(r["read_gbps"] for r in ours), max(r["read_gbps"] for r in ours)
        size = f"{ours[0]['weight_bytes'] / 1e6:.0f} of {ours[0]['packed_bytes'] / 1e6:.0f} MB"
        return ["-", f"{max(r['decode_tps'] for r in ours):.1f}", "-", f"{cell(share, 80, digits=0)} % of {read:.0f} GB/s; a token reads {size}"], ours

    def mixture(self, form, threads):
        paths = [configs.folder(name, self.options.work) for name in ("mixture", "dense")]
        runs = bests(self.rounds, *(lambda p=p: self.ours.run(p, threads, prompt=512, decode=48, synthetic=form) for p in paths))
        (mixed, dense), read = ([max(r["prompt_gflops"] for r in rs) for rs in runs], max(r["read_gbps"] for rs in runs for r in rs))
        share = 100 * max(r["decode_gbps"] for r in runs[0]) / read
        size = f"{runs[0][0]['weight_bytes'] / 1e6:.0f} of {runs[0][0]['packed_bytes'] / 1e6:.0f} MB"
        limit = f"prefill {cell(100 * mixed / dense, 60, digits=0)} % of dense; decode {share:.0f} % of {read:.0f} GB/s, reads {size}"
        return ["-", f"{mixed:.0f} GFLOP/s", "-", limit], runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = os.environ.get("METRALE_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "metrale"
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    parser.add_argument("rows", nargs="*", help="names, with * and ?")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", type=pathlib.Path, default=target / "release/examples/metrale_bench")
    parser.add_argument("--peer", type=pathlib.Path, default=PEER, help="folder of the built peer")
    parser.add_argument("--peer-source", type=pathlib.Path, help="its sources, where they are not in that folder")
    parser.add_argument("--peer-avx2", type=pathlib.Path, default=PEER.with_name("peer-avx2"), help="the peer built without AVX-512")
    parser.add_argument("--models", type=pathlib.Path, default=cache, help="folders of real models")
    parser.add_argument("--variants", type=pathlib.Path, default=ROOT / "build/variants", help="files made by benches/variants.py")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/configs", help="where configurations are written")
    parser.add_argument("--json", type=pathlib.Path, help="append every figure there, a line for each row")
    options = parser.parse_args()
    table = Table(options)
    wanted = [pattern if "/" in pattern else pattern + "/*" for words in options.rows for pattern in words.split()]
    rows = [(name, row) for name, row in table.rows() if not wanted or any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    if options.list or not rows:
        print("\n".join(name for name, _ in rows) or "no row has such a name; --list shows them")
        return 0 if rows else 1
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    words = " ".join(shlex.quote(word) for word in options.rows)
    print(f"{datetime.date.today()}, {cpu}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}: `{'QUICK=1 ' if options.quick else ''}make bench"
          + (f" ROWS={words}`" if words else "`") + "\n")
    print("| row | peer | ours | ratio | of the limit |\n| --- | --- | --- | --- | --- |", flush=True)
    for name, row in rows:
        try:
            cells, figures = row()
        except (Missing, KeyError, ValueError) as reason:
            cells, figures = ["-", "-", "-", f"not run: {reason}"], None
        print("| " + " | ".join([name, *cells]) + " |", flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(dict(row=name, cells=cells, figures=figures)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
