"""Compiles every kernel file with NVRTC, without a GPU: the pack that the library embeds, and what each kernel takes of a processor.

    build.py [--library FOLDER] [--check] [ARCHITECTURE ...]

FOLDER holds NVRTC's libraries (libnvrtc.so.12 and libnvrtc-builtins.so.12.9), as unpacked from the wheel nvidia-cuda-nvrtc-cu12; without it, they are
looked for under build/nvrtc and on the loader's path. Writes build/kernels.pack (src/backend/cuda/pack.rs tells its form) and kernels/resources.txt; with
--check it writes neither and compares the latter: 1 where that differs, 77 where there is no NVRTC. Files whose text is the recorded one are taken
as checked; with --all they are compiled again.
"""
import argparse
import ctypes as C
import glob
import lzma
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(os.path.dirname(ROOT), 'build')
ARCHITECTURES = ['sm_80', 'sm_86', 'sm_89', 'sm_90a', 'sm_100a', 'sm_103a', 'sm_120a', 'sm_121a', 'ptx']
# Those whose code has much in common are compressed together, a file at a time.
ALIKE = [['sm_80', 'sm_86', 'sm_89'], ['sm_90a'], ['sm_100a', 'sm_103a'], ['sm_120a', 'sm_121a'], ['ptx']]
# Whoever reads the pack takes as much memory as the dictionary has.
LZMA = {'id': lzma.FILTER_LZMA1, 'preset': 9 | lzma.PRESET_EXTREME, 'dict_size': 1 << 23}
# Bytes of the pack: the library is to stay below 25 MB with it.
MOST = 9 << 20
# What resources.txt tells of: an old form and the newest that is at hand to be measured.
RECORDED = ['sm_80', 'sm_90a']


def flat(path, seen=None):
    """A file's text with its headers in place: as src/backend/cuda/kernels.rs puts it together, byte for byte."""
    seen = set() if seen is None else seen
    if path in seen:
        return ''
    seen.add(path)
    out = []
    with open(os.path.join(ROOT, path), encoding='utf-8') as file:
        for line in file.read().splitlines():
            include = re.fullmatch(r'#include "(.*)"', line)
            if include:
                beside = os.path.normpath(os.path.join(os.path.dirname(path), include[1]))
                for found in (beside, include[1]):
                    if os.path.isfile(os.path.join(ROOT, found)):
                        out.append(flat(found, seen))
                        break
            elif line != '#pragma once':
                out.append(line + '\n')
    return ''.join(out)


def fnv(data):
    total = 0xcbf29ce484222325
    for byte in data:
        total = (total ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return total


def nvrtc(folder):
    folders = [folder] if folder else [os.path.dirname(p) for p in glob.glob(BUILD + '/nvrtc/**/libnvrtc.so.12', recursive=True)]
    try:
        for place in folders:
            # First: NVRTC looks it up by name.
            C.CDLL(glob.glob(place + '/libnvrtc-builtins.so*')[0], C.RTLD_GLOBAL)
            return C.CDLL(place + '/libnvrtc.so.12')
        return C.CDLL('libnvrtc.so.12')
    except (OSError, IndexError):
        return None


def compiled(lib, name, text, architecture):
    """The image and the log."""
    is_ptx = architecture == 'ptx'
    program = C.c_void_p()
    assert lib.nvrtcCreateProgram(C.byref(program), text.encode(), (name + '.cu').encode(), 0, None, None) == 0
    options = ['--gpu-architecture=' + ('compute_80' if is_ptx else architecture), '--std=c++17', '-default-device']
    if not is_ptx:
        options.append('--ptxas-options=-v')
    array = (C.c_char_p * len(options))(*[o.encode() for o in options])
    failed = lib.nvrtcCompileProgram(program, len(options), array)
    size = C.c_size_t()
    lib.nvrtcGetProgramLogSize(program, C.byref(size))
    log = C.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if failed:
        sys.exit(f'kernels/{name}.cu for {architecture}:\n{log.value.decode()}')
    kind = 'PTX' if is_ptx else 'CUBIN'
    getattr(lib, f'nvrtcGet{kind}Size')(program, C.byref(size))
    image = C.create_string_buffer(size.value)
    getattr(lib, f'nvrtcGet{kind}')(program, image)
    lib.nvrtcDestroyProgram(C.byref(program))
    return image.raw, log.value.decode()


def resources(log):
    """Lines of what each kernel takes, from the log of ptxas."""
    pattern = r"Compiling entry function 'metrale_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
    for m in re.finditer(pattern, log, re.S):
        shared = re.search(r'(\d+) bytes smem', m[6])
        yield f'{m[1]}: registers {m[5]}, spilled {int(m[3]) + int(m[4])}, stack {m[2]}, shared {shared[1] if shared else 0}'


def source(architecture, name, text):
    """The line that ends what is recorded of a file."""
    return f'{architecture} source {name} {fnv(text.encode()):016x}\n'


def blocks(lines):
    """What is recorded, by architecture and file."""
    found, block = {}, []
    for line in lines:
        block.append(line)
        words = line.split()
        if words[1] == 'source':
            found[words[2], words[0]], block = block, []
    return found


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--library')
    arguments.add_argument('--check', action='store_true')
    arguments.add_argument('--all', action='store_true')
    arguments.add_argument('architectures', nargs='*')
    given = arguments.parse_args()
    lib = nvrtc(given.library)
    if lib is None:
        print('SKIPPED: there is no NVRTC; `make nvrtc` fetches it')
        return 77
    lib.nvrtcCompileProgram.argtypes = [C.c_void_p, C.c_int, C.POINTER(C.c_char_p)]
    names = sorted(os.path.splitext(f)[0] for f in os.listdir(ROOT) if f.endswith('.cu'))
    texts = {name: flat(name + '.cu') for name in names}
    architectures = given.architectures or (RECORDED if given.check else ARCHITECTURES)
    jobs = [(name, architecture) for architecture in architectures for name in names]
    record = os.path.join(ROOT, 'resources.txt')
    known = {}
    if given.check:
        with open(record, encoding='utf-8') as file:
            known = {job: block for job, block in blocks(file).items() if job[1] in architectures}
        gone = [line for job, block in known.items() if job not in jobs for line in block]
        if not given.all:
            jobs = [job for job in jobs if known.get(job, [''])[-1] != source(job[1], job[0], texts[job[0]])]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda job: compiled(lib, job[0], texts[job[0]], job[1]), jobs))
    told = {}
    for (name, architecture), (_, log) in zip(jobs, made):
        if architecture in RECORDED:
            told[name, architecture] = [f'{architecture} {line}\n' for line in resources(log)] + [source(architecture, name, texts[name])]
    if given.check:
        before, after = ({line for job in jobs for line in by_job.get(job, [''])[:-1]} for by_job in (known, told))
        for line in gone + sorted(before ^ after):
            print(('+ ' if line in after else '- ') + line, end='')
        print(f'{len(jobs)} files compiled, {len(names) * len(architectures) - len(jobs)} as recorded')
        return 0 if before == after and not gone else 1
    made = {job: image for job, (image, _) in zip(jobs, made)}
    head, packed, at = [], [], 0
    for name in names:
        for alike in ALIKE:
            images = [(architecture, made[name, architecture]) for architecture in alike if architecture in architectures]
            small = lzma.compress(b''.join(image for _, image in images), lzma.FORMAT_ALONE, filters=[LZMA]) if images else b''
            start = 0
            for architecture, image in images:
                head.append(f'{name} {architecture} {fnv(texts[name].encode()):016x} {at} {len(small)} {start} {len(image)}\n')
                start += len(image)
            packed.append(small)
            at += len(small)
    if at > MOST:
        sys.exit(f'the pack has {at} bytes, {MOST} are the most')
    os.makedirs(BUILD, exist_ok=True)
    with open(os.path.join(BUILD, 'kernels.pack'), 'wb') as file:
        file.write((''.join(head) + '\n').encode() + b''.join(packed))
    if set(RECORDED) <= set(architectures):
        with open(record, 'w', encoding='utf-8') as file:
            file.writelines(line for block in told.values() for line in block)
    os.utime(record)  # build.rs does not watch a pack that was not there
    print(f'{len(jobs)} images of {len(names)} files, {at} bytes')
    return 0


if __name__ == '__main__':
    sys.exit(main())
