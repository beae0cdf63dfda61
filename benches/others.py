#!/usr/bin/env python3
"""SmolLM2-135M in other engines, measured in turn with ours: CTranslate2, ONNX Runtime GenAI, OpenVINO GenAI, mistral.rs.

    python3 benches/others.py                          installs them into build/others with pip, converts, measures
    python3 benches/others.py --engines openvino       one of them
    python3 benches/others.py --converter PYTHON       a Python with torch and transformers, for those that need weights converted

OpenVINO and mistral.rs read the GGUF files of benches/variants.py; CTranslate2 and ONNX Runtime need the Hugging Face folder (`--folder`)
converted, for which nothing is fetched. Each run is a process of its own: a prompt of 512 token ids, then 64 tokens after a prompt of 4, both
the best of three after a warm-up; prefill is the time to one token, decode what the further 63 took. Ours runs in turn on the same kind of
weights. An engine that cannot be installed, converted or run says SKIPPED and why. The bar: at least 1.3 times the best of them.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = {"ctranslate2": "ctranslate2", "onnxruntime": "onnxruntime-genai onnx onnx-ir", "openvino": "openvino-genai", "mistralrs": "mistralrs"}
# Kinds of weights, and the format of ours that is comparable.
KINDS = {
    "ctranslate2": {"int8": "Q8_0", "float32": "F16"},
    "onnxruntime": {"int4": "Q4_0", "fp32": "F16"},
    "openvino": {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "F16": "F16"},
    "mistralrs": {"Q8_0": "Q8_0"},
}
SKIPPED = 77


# What a worker process does: load, then return a function of (prompt ids, tokens to make) -> seconds.


def ctranslate2(model, threads):
    import ctranslate2

    generator = ctranslate2.Generator(model, device="cpu", intra_threads=threads)
    tokens = json.loads((pathlib.Path(model) / "vocabulary.json").read_text())

    def run(prompt, count):
        start = time.perf_counter()
        generator.generate_batch([[tokens[i] for i in prompt]], max_length=count, min_length=count, sampling_topk=1,
                                 include_prompt_in_result=False)
        return time.perf_counter() - start

    return run


def onnxruntime(model, threads):
    import onnxruntime_genai as genai

    config = genai.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    loaded = genai.Model(config)

    def run(prompt, count):
        options = genai.GeneratorParams(loaded)
        options.set_search_options(max_length=len(prompt) + count, min_length=len(prompt) + count, do_sample=False)
        generator = genai.Generator(loaded, options)
        start = time.perf_counter()
        generator.append_tokens([prompt])
        for _ in range(count):
            generator.generate_next_token()
        return time.perf_counter() - start

    return run


def openvino(model, threads):
    import numpy
    import openvino
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def run(prompt, count):
        options = genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        start = time.perf_counter()
        pipeline.generate(inputs, options)
        return time.perf_counter() - start

    return run


def mistralrs(model, threads):
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import mistralrs

    path = pathlib.Path(model)
    which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    runner = mistralrs.Runner(which=which, max_seqs=1, prefix_cache_n=0)
    fresh = [0]

    def run(prompt, count):
        # It takes text alone, and caches repeats: words that differ in each run, about a token each.
        fresh[0] += 1
        words = " ".join(str((i * 7919 + fresh[0] * 104729) % 10) for i in range(len(prompt) // 2))
        request = mistralrs.CompletionRequest(model="default", prompt=words, max_tokens=count, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        answer = runner.send_completion_request(request)
        run.tokens = answer.usage.prompt_tokens
        run.made = answer.usage.completion_tokens
        return time.perf_counter() - start

    return run


def worker(engine, model, threads):
    run = globals()[engine](model, threads)
    runs = iter(range(1, 100))

    def best(length, count):
        """Of three prompts that were not there before: some engines keep what they have read."""
        prompts = [[(i * 7919 + fresh * 104729 + 13) % 49152 for i in range(length)] for fresh in (next(runs) for _ in range(3))]
        return min(run(prompt, count) for prompt in prompts)

    best(512, 1), best(4, 4)
    whole = best(512, 1)
    read = getattr(run, "tokens", 512)
    one, many = best(4, 1), best(4, 64)
    made = getattr(run, "made", 64)
    print(json.dumps({"prefill": read / whole, "decode": (made - 1) / max(many - one, 1e-9)}))


def call(command, env=None, limit=900):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=limit, env=env)
    if done.returncode:
        raise RuntimeError(" ".join((done.stderr or done.stdout).split())[-160:] or f"status {done.returncode}")
    return done.stdout


def converted(engine, kind, options, python):
    """The model as the engine reads it, made once."""
    if engine in ("openvino", "mistralrs"):
        path = options.variants / f"smollm2-135m-instruct-{kind}.gguf"
        if not path.is_file():
            raise RuntimeError(f"there is no {path.name}: `make variants`")
        return path
    path = options.work / f"{engine}-{kind}"
    if path.is_dir():
        return path
    if not (options.folder / "config.json").is_file():
        raise RuntimeError("needs --folder, the Hugging Face folder of SmolLM2-135M-Instruct")
    converter, part = options.converter or python, options.work / f"{engine}-{kind}.part"
    # The engine's own package beside the converter's torch and transformers.
    env = dict(os.environ, PYTHONPATH=call([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]).strip())
    if engine == "ctranslate2":
        code = f"import ctranslate2.converters as c; c.TransformersConverter({str(options.folder)!r}).convert({str(part)!r}, quantization={kind!r}, force=True)"
        call([converter, "-c", code], env)
    else:
        call([converter, "-m", "onnxruntime_genai.models.builder", "-m", options.folder, "-i", options.folder, "-o", part, "-p", kind, "-e", "cpu"], env)
    part.rename(path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    parser.add_argument("--engines", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/others", help="where they are installed and converted")
    parser.add_argument("--python", type=pathlib.Path, help="a Python that has the engines already")
    parser.add_argument("--converter", type=pathlib.Path, help="a Python that has torch and transformers")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("smollm2"), help="Hugging Face folder of the model")
    parser.add_argument("--variants", type=pathlib.Path, default=ROOT / "build/variants")
    parser.add_argument("--ours", type=pathlib.Path, default=target / "release/examples/metrale_bench")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "MODEL", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker[0], options.worker[1], int(options.worker[2]))
    options.work.mkdir(parents=True, exist_ok=True)
    python = options.python or options.work / "venv/bin/python"
    if not options.python and not python.is_file():
        call([sys.executable, "-m", "venv", options.work / "venv"])
    print("| engine | weights | threads | prefill | ours | ratio | decode | ours | ratio |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for engine in options.engines:
        try:
            if not options.python:
                call([python, "-m", "pip", "install", "--quiet", "numpy", *PACKAGES[engine].split()])
        except (RuntimeError, subprocess.TimeoutExpired) as reason:
            print(f"| {engine} | | | SKIPPED: {reason} |", flush=True)
            continue
        for kind, form in KINDS[engine].items():
            for threads in options.threads:
                try:
                    model, ours = converted(engine, kind, options, python), options.variants / f"smollm2-135m-instruct-{form}.gguf"
                    theirs, us = [], []
                    for _ in range(options.rounds):
                        theirs.append(json.loads(call([python, __file__, "--worker", engine, model, threads]).strip().splitlines()[-1]))
                        us.append(json.loads(call([options.ours, ours, "--threads", threads, "--prompt", 512, "--decode", 64, "--rounds", 2, "--json"])))
                    a, b = (max(t[k] for t in theirs) for k in ("prefill", "decode"))
                    c, d = max(o["prompt_best_tps"] for o in us), max(o["decode_tps"] for o in us)
                    print(f"| {engine} | {kind} (ours {form}) | {threads} | {a:.0f} | {c:.0f} | {c / a:.2f} | {b:.1f} | {d:.1f} | {d / b:.2f} |", flush=True)
                except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as reason:
                    print(f"| {engine} | {kind} | {threads} | SKIPPED: {reason} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
