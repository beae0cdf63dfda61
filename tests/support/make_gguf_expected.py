#!/usr/bin/env python3
"""What the tensors of the GGUF fixtures are under Hugging Face names, by the `gguf` package (0.19.0) and numpy.

    pip install gguf==0.19.0 && python tests/support/make_gguf_expected.py tests/fixtures/models

Writes expected_tensors.json beside each model.gguf: per tensor its shape, its first values and a sum weighted by
position, so that a moved row or a wrong offset shows.
"""
import json
import sys
from pathlib import Path

import gguf
import numpy as np

TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate"}
NORMS = {"gemma3": {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm"}}
PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}


def halves_apart(x, heads):
    """Undo the interleaving of rotary halves: even rows of a head first, then odd ones."""
    per_head = x.reshape(heads, x.shape[0] // heads, -1)
    return np.concatenate([per_head[:, 0::2], per_head[:, 1::2]], axis=1).reshape(x.shape)


def translate(reader):
    field = lambda key: reader.get_field(key).contents()
    arch = field("general.architecture")
    names = {**LAYER, **NORMS.get(arch, PLAIN_NORMS)}
    for t in reader.tensors:
        x = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape([int(d) for d in reversed(t.shape)])
        if arch == "gemma3" and t.name.endswith("norm.weight"):
            x = x - np.float32(1)
        if t.name in TOP:
            yield TOP[t.name], x
            continue
        _, layer, stem, leaf = t.name.split(".")
        if arch == "llama" and stem in ("attn_q", "attn_k"):
            x = halves_apart(x, field("llama.attention.head_count" if stem == "attn_q" else "llama.attention.head_count_kv"))
        if stem.endswith("_exps"):
            for e, one in enumerate(x):
                yield f"model.layers.{layer}.mlp.experts.{e}.{stem[4:-5]}_proj.{leaf}", one
        else:
            yield f"model.layers.{layer}.{names[stem]}.{leaf}", x


def summary(x):
    flat = x.reshape(-1).astype(np.float64)
    weights = (np.arange(flat.size) * 7919 % 1009) / 1009
    return {"shape": list(x.shape), "first": [float(v) for v in flat[:4]], "weighted_sum": float(np.sum(flat * weights))}


def main(root):
    for path in sorted(root.glob("*/model.gguf")):
        found = {name: summary(x) for name, x in translate(gguf.GGUFReader(path))}
        (path.parent / "expected_tensors.json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
