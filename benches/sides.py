"""Both sides of a comparison as programs, each run once for a figure: ours (`metrale_bench`) and llama.cpp's tools.

A side that cannot run raises `Missing` with the reason, which the table prints in the row's place.
"""
import json
import os
import pathlib
import subprocess


class Missing(Exception):
    """Why a row has no figure."""


def output(command, env=None):
    command = list(map(str, command))
    if not pathlib.Path(command[0]).is_file():
        raise Missing(f"there is no {command[0]}")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **(env or {})))
    if done.returncode != 0:
        raise Missing(f"{pathlib.Path(command[0]).name}: status {done.returncode}, {' '.join(done.stderr.split())[-200:]}")
    return done.stdout


class Ours:
    """metrale_bench."""

    def __init__(self, program, simd=None, kv_type=None):
        self.program, self.simd = program, simd
        wanted = {"METRALE_SIMD": simd, "METRALE_KV_TYPE": kv_type}
        self.env = {name: value for name, value in wanted.items() if value}

    def run(self, model, threads, prompt=0, decode=0, batch=1, depth=0, synthetic=None):
        command = [self.program, model, "--threads", threads, "--prompt", prompt, "--decode", decode, "--batch", batch, "--rounds", 1, "--json"]
        if synthetic:
            command += ["--synthetic", synthetic]
        if depth or prompt > 4096:
            command += ["--depth", depth, "--context", max(depth, prompt) + decode + 64]
        found = json.loads(output(command, self.env))
        if self.simd and found["simd"] != self.simd:
            raise Missing(f"{self.simd} was asked for, {found['simd']} ran")
        return found


class Peer:
    """llama-bench, llama-batched-bench and peer_load of one build."""

    def __init__(self, folder, source):
        self.folder, self.source = folder, source

    def bench(self, model, threads, prompt=0, decode=0, flash=(0, 1)):
        """{flash attention: tokens per second} of a prompt, or of tokens one at a time."""
        command = [self.folder / "bin/llama-bench", "-m", model, "-p", prompt, "-n", decode, "-t", threads, "-fa", ",".join(map(str, flash)),
                   "-r", 1, "-o", "json"]
        return {int(row["flash_attn"]): row["avg_ts"] for row in json.loads(output(command))}

    def batches(self, model, threads, batches, decode):
        """{sequences: tokens per second of all of them}"""
        most = max(batches)
        command = [self.folder / "bin/llama-batched-bench", "-m", model, "-c", most * (16 + decode) + 64, "-b", 512, "-ub", 512, "-npp", 16, "-ntg",
                   decode, "-npl", ",".join(map(str, batches)), "-t", threads, "-tb", threads, "-fa", "on", "--output-format", "jsonl"]
        rows = [json.loads(line) for line in output(command).splitlines() if line.startswith("{")]
        return {row["pl"]: row["speed_tg"] for row in rows}

    def first_token(self, model, threads):
        from load import peer_program

        return json.loads(output([peer_program(self.folder, self.source), model, threads]).strip().splitlines()[-1])


def bests(rounds, *sides):
    """Runs the sides in turn, `rounds` times; the rows of results of each side."""
    results = [[] for _ in sides]
    for _ in range(rounds):
        for side, result in zip(sides, results):
            result.append(side())
    return results
