#!/usr/bin/env python3
"""Makes the files that benches/table.py reads: real models in other formats, and known shapes with random weights.

    python3 benches/variants.py build/variants

llama.cpp's own tool writes the formats (`make peer` builds it), so that both engines read the same bytes; models come from the cache of
examples/get_model.py (`make models`). About 13 GB; a file that is there is not made again. The shapes need numpy.
"""
import os
import pathlib
import subprocess
import sys

import shapes
from peer import PEER
from table import FORMATS, SMALL


def main(folder, models, tool):
    folder.mkdir(parents=True, exist_ok=True)
    for model, formats in FORMATS.items():
        source = models / model / "model.gguf" if model in SMALL else folder / f"{model}-BF16.gguf"
        for form in formats:
            path = folder / f"{model}-{form}.gguf"
            if form == "shipped" or path.is_file():
                continue
            part = path.with_suffix(".part")
            if path == source:
                shapes.main(model, part)
            elif source.is_file():
                subprocess.run([tool, "--allow-requantize", source, part, form], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            else:
                print(f"{path.name} needs {source}: `make models`", file=sys.stderr)
                continue
            part.rename(path)
            print(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: variants.py FOLDER")
    cache = os.environ.get("METRALE_CACHE") or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "metrale"
    main(pathlib.Path(sys.argv[1]), pathlib.Path(cache), PEER / "bin/llama-quantize")
