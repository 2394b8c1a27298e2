#!/usr/bin/env python3
"""Checks who includes whom.

- A folder of phalanx/ includes only itself and folders above it, in the order of the list in CMakeLists.txt; the
  programs (cli, recipes, benchmarks) include all of them and are included by none of them.
- No header includes one of torch's catch-all headers: each costs its includer 10 to 20 s of compilation.
- The torch-free folders hold no torch at all, so that the front program starts without it.

    scripts/check_layering.py [--self-test] [ROOT]
"""
import pathlib
import re
import sys
import tempfile

PROGRAMS = ["cli", "recipes", "benchmarks"]
TORCH_FREE = {"base", "observe", "schedule", "data"}
CATCH_ALL = {"torch/torch.h", "torch/all.h", "torch/extension.h", "torch/nn.h", "torch/optim.h", "ATen/ATen.h"}
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def folder_order(root):
    """The folders, uppermost first, from the one list that the build uses too."""
    text = (root / "CMakeLists.txt").read_text()
    match = re.search(r"foreach\(folder (base [a-z_ ]+)\)", text)
    if not match:
        sys.exit("check_layering: CMakeLists.txt no longer has its 'foreach(folder base ...)' list")
    return match.group(1).split()


def includes_of(path):
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def is_test(path):
    return path.stem.endswith("_test") or "testing" in path.parts or "testdata" in path.parts


def problems(root):
    order = folder_order(root)
    found = []
    for path in sorted((root / "phalanx").rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu"} or not path.is_file():
            continue
        where = path.relative_to(root)
        folder = where.parts[1] if len(where.parts) > 2 else None
        if folder is not None and folder not in order:
            found.append(f"{where}: folder '{folder}' is not in CMakeLists.txt's list, so it has no place in the order")
            continue
        for number, name in includes_of(path):
            parts = name.split("/")
            place = f"{where}:{number}"
            if parts[0] in PROGRAMS:
                found.append(f"{place}: the library includes {name} of a program")
            if folder and parts[0] == "phalanx" and len(parts) > 2:
                if parts[1] not in order:
                    found.append(f"{place}: {name} is in no folder of CMakeLists.txt's list")
                elif order.index(parts[1]) > order.index(folder) and not is_test(path):
                    found.append(f"{place}: {folder}/ includes {name}, but {parts[1]}/ is below it")
            if path.suffix == ".h" and not is_test(path) and name in CATCH_ALL:
                found.append(f"{place}: a header includes {name}; include ATen/core/Tensor.h or ATen/ops/<op>.h instead")
            if folder in TORCH_FREE and name.startswith(TORCH_PREFIXES):
                found.append(f"{place}: {folder}/ is torch-free, but includes {name}")
    return found


def self_test():
    """Each rule must go red on a tree that breaks it, and stay quiet on one that does not."""
    cases = {
        "phalanx/base/a.h": ('#include "phalanx/comm/b.h"', "comm/ is below it"),
        "phalanx/comm/c.h": ("#include <torch/torch.h>", "a header includes torch/torch.h"),
        "phalanx/observe/d.cc": ("#include <ATen/core/Tensor.h>", "observe/ is torch-free"),
        "phalanx/comm/e.cc": ('#include "cli/main.h"', "of a program"),
        "phalanx/other/f.cc": ("int x;", "has no place in the order"),
        "phalanx/comm/g.cc": ('  #  include "phalanx/nowhere/x.h"', "in no folder"),
        "phalanx/comm/good.cc": ('#include <torch/torch.h>\n#include "phalanx/base/a.h"\n#include "phalanx/comm/c.h"', None),
        "phalanx/base/commented.h": ('// #include "phalanx/comm/b.h"', None),
        "phalanx/phalanx.h": ('#include "phalanx/comm/b.h"', None),
    }
    for name, (text, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "CMakeLists.txt").write_text("foreach(folder base observe comm)\n")
            path = root / name
            path.parent.mkdir(parents=True)
            path.write_text(text + "\n")
            found = problems(root)
            right = not found if expected is None else len(found) == 1 and expected in found[0]
            if not right:
                sys.exit(f"check_layering: self-test failed on {name}: expected {expected!r}, found {found}")
    print(f"check_layering: self-test passed ({len(cases)} cases)")


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        self_test()
        return
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    found = problems(root)
    for line in found:
        print(f"check_layering: {line}", file=sys.stderr)
    if found:
        sys.exit(1)
    print("check_layering: every include points upwards")


if __name__ == "__main__":
    main()
