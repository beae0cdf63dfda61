#!/usr/bin/env python3
"""The licences of everything that is linked into the library, with their texts, each once: what has to travel along.

Read from the sources that cargo has on this machine; nothing is fetched.
"""
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE", "NOTICE", "COPYRIGHT")


def linked(metadata):
    """Packages that the library needs when it runs: neither those of tests and build scripts nor those of macros."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    root = metadata["resolve"]["root"]
    found, waiting = set(), [root]
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            package = packages[dependency["pkg"]]
            macros = any("proc-macro" in target["kind"] for target in package["targets"])
            ordinary = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if ordinary and not macros and package["id"] not in found:
                found.add(package["id"])
                waiting.append(package["id"])
    return sorted((packages[name] for name in found), key=lambda package: (package["name"], package["version"]))


def texts(package):
    """The licence files in a package's folder."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stem.upper().startswith(NAMES) and path.suffix != ".rs"]
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in files]


def main():
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--format-version", "1", "--locked", "--offline"]
    host = subprocess.run(["rustc", "-vV"], stdout=subprocess.PIPE, check=True, text=True).stdout
    command += ["--filter-platform", next(line.split()[1] for line in host.splitlines() if line.startswith("host:"))]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    packages = linked(metadata)
    owners = {}
    print("Linked into the library, besides its own code and Rust's standard library (MIT OR Apache-2.0):\n")
    for package in packages:
        print(f"  {package['name']} {package['version']}: {package['license'] or 'see its file'}")
        for text in texts(package):
            owners.setdefault(text, []).append(package["name"])
    for text, names in sorted(owners.items(), key=lambda pair: pair[1]):
        print(f"\n{'=' * 80}\n{', '.join(names)}\n{'-' * 80}\n{text}")
    if not packages:
        sys.exit("cargo names no dependency")


main()
