#!/usr/bin/env python3
"""Compares the Swift files with the C library as clang's module parser sees it, for machines without Swift.

    check.py [PREFIX]    the header is that of PREFIX, else the one of this repository

The module map is parsed as Swift's importer does it, in C and in C with Objective-C's @import. Then every function, type and constant
that the Swift files name is looked up in what the module declares: functions with as many arguments as they are called with,
constants as plain integers, which is all that Swift takes from macros. SKIPPED without clang.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = pathlib.Path(sys.argv[1]) / "include" if len(sys.argv) > 1 else HERE.parents[1] / "include"
MODULE = HERE / "Sources/CMetrale"


def clang(language: str, source: str, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "use.c"
        path.write_text(source)
        modules = ["-fmodules", f"-fmodules-cache-path={folder}", f"-fmodule-map-file={MODULE / 'module.modulemap'}"]
        command = ["clang", "-x", language, "-std=c11", "-Wall", "-Werror", "-Wno-unused-command-line-argument"]
        command += [*modules, f"-I{INCLUDE}", f"-I{MODULE}", *flags, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return done.stdout


def declared() -> tuple[dict[str, int], set[str]]:
    """Functions with their number of parameters, and types."""
    tree = json.loads(clang("c", '#include "shim.h"\n', "-fno-modules", "-Xclang", "-ast-dump=json", "-fsyntax-only"))
    functions = {}
    types = set()
    for node in tree["inner"]:
        if node["kind"] == "FunctionDecl":
            functions[node["name"]] = sum(part["kind"] == "ParmVarDecl" for part in node.get("inner", []))
        elif node["kind"] == "TypedefDecl":
            types.add(node["name"])
    return functions, types


def constants() -> set[str]:
    """Macros that are an integer, which may have a sign."""
    text = clang("c", '#include "shim.h"\n', "-fno-modules", "-E", "-dM")
    return {m[1] for m in re.finditer(r"^#define (METRALE_\w+) -?\d+$", text, re.M)}


def without_comments(text: str) -> str:
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*', lambda m: m[0] if m[0][0] == '"' else "", text)


def arguments(text: str, start: int) -> int:
    """How many arguments stand between the bracket at `start` and its end."""
    depth = count = 0
    for at in range(start, len(text)):
        c = text[at]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return count + bool(text[start + 1 : at].strip())
        elif c == "," and depth == 1:
            count += 1
    raise ValueError("a bracket is not closed")


def faults(text: str, functions: dict[str, int], types: set[str], macros: set[str]) -> list[str]:
    found = []
    code = without_comments(text)
    for match in re.finditer(r"\bmetrale_\w+", code):
        name, after = match[0], code[match.end() : match.end() + 1]
        if name in functions:
            if after != "(":
                found.append(f"{name} is not called")
            elif arguments(code, match.end()) != functions[name]:
                found.append(f"{name} takes {functions[name]} arguments, not {arguments(code, match.end())}")
        elif name not in types:
            found.append(f"{name} is neither a function nor a type")
    found += [f"{name} is no integer constant" for name in set(re.findall(r"\bMETRALE_\w+", re.sub(r'"[^"\n]*"', "", code))) - macros]
    return found


def main() -> None:
    if not shutil.which("clang"):
        print("SKIPPED: there is no clang")
        return
    clang("c", '#include "shim.h"\nint main(void) { return metrale_version_number() == 0; }\n', "-fsyntax-only")
    clang("objective-c", "@import CMetrale;\nint main(void) { return metrale_version_number() == METRALE_OK; }\n", "-fsyntax-only")
    functions, types = declared()
    macros = constants()
    if len(functions) < 80 or len(types) < 20 or len(macros) < 50:
        sys.exit(f"{len(functions)} functions, {len(types)} types and {len(macros)} constants: not all were seen")
    planted = "metrale_free() metrale_free(a, b) metrale_nothing(a) METRALE_NOTHING x = metrale_free"
    if len(faults(planted, functions, types, macros)) != 5:
        sys.exit(f"of five planted faults these are found: {faults(planted, functions, types, macros)}")
    count = 0
    for path in sorted((HERE / "Sources").rglob("*.swift")):
        text = path.read_text()
        count += len(set(re.findall(r"\bmetrale_\w+(?=\()", text)))
        if bad := faults(text, functions, types, macros):
            sys.exit(f"{path.relative_to(HERE)}: " + "; ".join(bad))
    print(f"the Swift files use {count} functions as the module declares them")


main()
