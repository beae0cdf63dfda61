#!/usr/bin/env python3
"""Random blocks of every quantised format and what the `gguf` package (0.19.0) decodes them to.

    pip install gguf==0.19.0 && python tests/support/make_quant_fixtures.py tests/fixtures/quant

Per format: <name>.bin (stored bytes) and <name>.f32 (little-endian float32). Scales are any finite f16, subnormal and
negative ones included, so the files exercise every bit of a block.
"""
import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q
from gguf.quants import dequantize

# Where the f16 factors lie in a block.
HALVES = {Q.Q8_0: [0], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q2_K: [80, 82], Q.Q3_K: [108],
          Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.MXFP4: []}


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20240229)
    for kind, halves in HALVES.items():
        length, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (512 // length, size), dtype=np.uint8)
        for at in halves:
            scale = rng.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
            scale = np.where(scale >> 10 & 31 == 31, scale & 0x83FF, scale).astype(np.uint16)
            blocks[:, at:at + 2] = scale.view(np.uint8).reshape(-1, 2)
        if kind == Q.MXFP4:  # powers of two near the ends and the middle; 255 means NaN in the E8M0 standard
            blocks[:, 0] = [0, 1, 2, 3, 100, 126, 127, 128, 129, 140, 200, 250, 251, 252, 120, 90][:len(blocks)]
        with np.errstate(over="ignore"):
            values = dequantize(blocks.reshape(1, -1), kind).astype("<f4")
        (out / f"{kind.name.lower()}.bin").write_bytes(blocks.tobytes())
        (out / f"{kind.name.lower()}.f32").write_bytes(values.tobytes())
    bits = np.concatenate([np.arange(0, 1 << 16, 131), [0x7C00, 0xFC00, 0x7E00, 1, 0x8001, 0x3FF, 0x7F80, 0xFF80]]).astype("<u2")
    for name, values in (("f16", bits.view(np.float16).astype("<f4")), ("bf16", (bits.astype("<u4") << 16).view("<f4"))):
        (out / f"{name}.bin").write_bytes(bits.tobytes())
        (out / f"{name}.f32").write_bytes(values.tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
