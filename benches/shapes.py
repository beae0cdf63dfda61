#!/usr/bin/env python3
"""Writes a GGUF file with the shapes of a known model and random BF16 weights, for speed measurements where the real one is out of reach.

    python3 benches/shapes.py qwen3-0.6b FILE.gguf
    llama-quantize FILE.gguf OTHER.gguf Q8_0        (the peer's tool makes the other formats, so both engines read the same bytes)

The file has no vocabulary: benchmarks feed token ids. Weights are normal with the deviation of a fresh model, so that activations stay
finite; zeros or constants would run faster than data does. Needs numpy.
"""
import struct
import sys

import numpy

# Architecture, then what its configuration says. All of these tie the output matrix to the embedding.
SHAPES = {
    "qwen3-0.6b": dict(arch="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, head=128, ffn=3072, vocab=151936, theta=1e6, eps=1e-6),
    "llama-3.2-1b": dict(arch="llama", layers=16, hidden=2048, heads=32, kv_heads=8, head=64, ffn=8192, vocab=128256, theta=5e5, eps=1e-5),
}
F32, BF16 = 0, 30
ALIGN = 32


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, value):
    kind, data = {str: (8, lambda v: text(v)), int: (4, lambda v: struct.pack("<I", v)), float: (6, lambda v: struct.pack("<f", v))}[type(value)]
    return text(key) + struct.pack("<I", kind) + data(value)


def tensors(shape):
    """(name, rows or None, columns)"""
    hidden, head = shape["hidden"], shape["head"]
    yield "token_embd.weight", shape["vocab"], hidden
    yield "output_norm.weight", None, hidden
    for layer in range(shape["layers"]):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", None, hidden
        yield at + "attn_q.weight", shape["heads"] * head, hidden
        yield at + "attn_k.weight", shape["kv_heads"] * head, hidden
        yield at + "attn_v.weight", shape["kv_heads"] * head, hidden
        yield at + "attn_output.weight", hidden, shape["heads"] * head
        if shape["arch"] == "qwen3":
            yield at + "attn_q_norm.weight", None, head
            yield at + "attn_k_norm.weight", None, head
        yield at + "ffn_norm.weight", None, hidden
        yield at + "ffn_gate.weight", shape["ffn"], hidden
        yield at + "ffn_up.weight", shape["ffn"], hidden
        yield at + "ffn_down.weight", hidden, shape["ffn"]


def main(name, path):
    shape = SHAPES[name]
    arch, every = shape["arch"], list(tensors(shape))
    values = {
        "general.architecture": arch, "general.name": f"{name} with random weights", f"{arch}.block_count": shape["layers"],
        f"{arch}.context_length": 32768, f"{arch}.embedding_length": shape["hidden"], f"{arch}.feed_forward_length": shape["ffn"],
        f"{arch}.attention.head_count": shape["heads"], f"{arch}.attention.head_count_kv": shape["kv_heads"],
        f"{arch}.attention.key_length": shape["head"], f"{arch}.attention.value_length": shape["head"],
        f"{arch}.attention.layer_norm_rms_epsilon": shape["eps"], f"{arch}.rope.freq_base": shape["theta"],
        f"{arch}.rope.dimension_count": shape["head"], f"{arch}.vocab_size": shape["vocab"], "tokenizer.ggml.model": "no_vocab",
    }
    head, offset = b"".join(entry(k, v) for k, v in values.items()), 0
    for tensor, rows, cols in every:
        dims = [cols] if rows is None else [cols, rows]
        size = cols * (4 if rows is None else rows * 2)
        head += text(tensor) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, F32 if rows is None else BF16, offset)
        offset += -(-size // ALIGN) * ALIGN
    random = numpy.random.default_rng(1)
    with open(path, "wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(every), len(values)) + head)
        for tensor, rows, cols in every:
            out.write(b"\0" * (-out.tell() % ALIGN))
            if rows is None:
                out.write(numpy.ones(cols, "<f4").tobytes())
                continue
            scale = numpy.float32(cols**-0.5)
            for at in range(0, rows, 4096):
                block = random.standard_normal((min(4096, rows - at), cols), numpy.float32) * scale
                out.write((block.view("<u4") >> 16).astype("<u2").tobytes())
        out.write(b"\0" * (-out.tell() % ALIGN))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: shapes.py {{{','.join(SHAPES)}}} FILE.gguf")
    main(sys.argv[1], sys.argv[2])
