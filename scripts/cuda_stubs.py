#!/usr/bin/env python3
"""Makes shared libraries that only have names: what the given libraries need and no --have folder holds.

Every function in them ends the process if it is called. With them a program that links torch's CUDA libraries starts
on a machine without CUDA's mathematical libraries.

    scripts/cuda_stubs.py OUT LIBRARY... --have FOLDER...
"""
import argparse
import collections
import pathlib
import re
import subprocess


def needed(library):
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def undefined(library):
    """Pairs (symbol, version or None) of what the library takes from others."""
    text = subprocess.run(["nm", "-D", "--undefined-only", "--with-symbol-versions", library],
                          capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        name = line.split()[-1]
        symbol, _, version = name.partition("@")
        yield symbol, version.lstrip("@") or None


def defined(library):
    text = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in text.splitlines()}


def is_there(name, folders):
    if any((folder / name).exists() for folder in folders):
        return True
    cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    return f"\t{name} " in cache or name.startswith("ld-linux")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("libraries", nargs="+", type=pathlib.Path)
    parser.add_argument("--have", action="append", default=[], type=pathlib.Path)
    arguments = parser.parse_args()

    missing = []
    by_version = collections.defaultdict(set)
    unversioned = set()
    found = set()
    for library in arguments.libraries:
        for name in needed(library):
            if is_there(name, arguments.have):
                for folder in arguments.have:
                    if (folder / name).exists():
                        found |= defined(folder / name)
            elif name not in missing:
                missing.append(name)
        for symbol, version in undefined(library):
            (by_version[version] if version else unversioned).add(symbol)
    # C functions of CUDA's libraries; what is mangled comes from torch itself.
    loose = sorted(s for s in unversioned - found if re.match(r"(cu|nv)[A-Za-z]*", s))
    for position, name in enumerate(missing):
        symbols = sorted(by_version.get(name, ())) + (loose if position == 0 else [])
        source = arguments.out / f"{name}.s"
        lines = [".text"]
        for symbol in symbols:
            lines += [f".globl {symbol}", f".type {symbol},@function", f"{symbol}: ud2"]
        lines.append('.section .note.GNU-stack,"",@progbits')
        source.write_text("\n".join(lines) + "\n")
        command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", arguments.out / name, source]
        if by_version.get(name):
            script = arguments.out / f"{name}.map"
            script.write_text(f"{name} {{ global: {'; '.join(sorted(by_version[name]))}; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)
    print(f"cuda_stubs: {len(missing)} libraries stand in for those that are missing: {' '.join(missing)}")


if __name__ == "__main__":
    main()
