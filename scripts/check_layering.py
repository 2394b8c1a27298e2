#!/usr/bin/env python3
"""Checks who includes whom.

- A folder of phalanx/ includes only itself and folders above it, in the order of PHALANX_FOLDERS in CMakeLists.txt; the
  programs (cli, recipes, benchmarks) include all of them and are included by none of them. A subfolder is a folder of its
  own; testing/ belongs to the one that it lies in, and phalanx/testing/NAME is one for tests alone.
- No header includes one of torch's catch-all headers: each costs its includer 10 to 20 s of compilation.
- A folder marked * there holds no torch and includes only such folders, so that the front program starts without it; its
  CMakeLists.txt does not say TORCH, and every other one does.

    scripts/check_layering.py [--self-test] [ROOT]
"""
import pathlib
import re
import sys
import tempfile

PROGRAMS = ["cli", "recipes", "benchmarks"]
# Knows no torch, in a folder that does.
TORCH_FREE_HEADERS = {"phalanx/comm/types.h"}
CATCH_ALL = {"torch/torch.h", "torch/all.h", "torch/extension.h", "torch/nn.h", "torch/optim.h", "ATen/ATen.h"}
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def folder_order(root):
    """The folders, uppermost first, and those of them that hold no torch, from the one list that the build uses too."""
    text = (root / "CMakeLists.txt").read_text()
    match = re.search(r"set\(PHALANX_FOLDERS\s+([^)]+)\)", text)
    if not match:
        sys.exit("check_layering: CMakeLists.txt no longer has its list set(PHALANX_FOLDERS ...)")
    names = match.group(1).split()
    return [name.rstrip("*") for name in names], {name.rstrip("*") for name in names if name.endswith("*")}


def folder_of(parts):
    """comm/backends/gloo of phalanx/comm/backends/gloo/testing/x.h; testing/sim_device of phalanx/testing/sim_device/x.h;
    "" of phalanx/x.h; None outside of phalanx/."""
    if parts[0] != "phalanx":
        return None
    return "/".join(tuple(parts[1:2]) + tuple(part for part in parts[2:-1] if part not in {"testing", "testdata"})
                    if len(parts) > 2 else ())


def includes_of(path):
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def is_test(path):
    return path.stem.endswith("_test") or "testing" in path.parts or "testdata" in path.parts


def problems(root):
    order, torch_free = folder_order(root)
    found = []
    for folder in order:
        build = root / "phalanx" / folder / "CMakeLists.txt"
        if build.exists() and (re.search(r"phalanx_(library|test_support)\(TORCH\b", build.read_text()) is None) != (folder in torch_free):
            found.append(f"{build.relative_to(root)}: {folder} is marked * in PHALANX_FOLDERS or says TORCH: expected one of them")
    for path in sorted((root / "phalanx").rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu", ".inc"} or not path.is_file():
            continue
        where = path.relative_to(root)
        folder = folder_of(where.parts)
        if folder and folder not in order:
            found.append(f"{where}: folder '{folder}' is not in CMakeLists.txt's list, so it has no place in the order")
            continue
        for number, name in includes_of(path):
            parts = name.split("/")
            place = f"{where}:{number}"
            if parts[0] in PROGRAMS:
                found.append(f"{place}: the library includes {name} of a program")
            if folder and name == "phalanx/phalanx.h" and not is_test(path):
                found.append(f"{place}: the library includes its own umbrella header")
            if parts[0] == "phalanx" and "testing" in parts and not is_test(path):
                found.append(f"{place}: {name} is for tests, and is not installed")
            if name.startswith("."):
                found.append(f"{place}: {name} is relative; expected the path in the repository")
            other = folder_of(parts)
            if folder and other:
                if other not in order:
                    found.append(f"{place}: {name} is in no folder of CMakeLists.txt's list")
                elif order.index(other) > order.index(folder) and not is_test(path):
                    found.append(f"{place}: {folder}/ includes {name}, but {other}/ is below it")
                elif folder in torch_free and not is_test(path) and other not in torch_free and name not in TORCH_FREE_HEADERS:
                    found.append(f"{place}: {folder}/ is torch-free, but includes {name}, and {other}/ is not")
            if path.suffix == ".h" and not is_test(path) and name in CATCH_ALL:
                found.append(f"{place}: a header includes {name}; include ATen/core/Tensor.h or ATen/ops/<op>.h instead")
            if folder in torch_free and not is_test(path) and name.startswith(TORCH_PREFIXES):
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
        "phalanx/launch/sub/h.cc": ('#include "phalanx/comm/types.h"\n#include "phalanx/comm/x.h"', "comm/ is not"),
        "phalanx/comm/sub/i.cc": ('#include "phalanx/comm/x.h"\n#include <torch/torch.h>', None),
        "phalanx/comm/j.cc": ('#include "phalanx/comm/sub/x.h"', "comm/sub/ is below it"),
        "phalanx/comm/testing/k.cc": ('#include "phalanx/comm/sub/x.h"', None),
        "phalanx/base/CMakeLists.txt": ("phalanx_library(TORCH DEPENDS x)", "expected one of them"),
        "phalanx/comm/CMakeLists.txt": ("phalanx_library(DEPENDS x)", "expected one of them"),
        "phalanx/base/m.cc": ('#include "phalanx/phalanx.h"', "its own umbrella header"),
        "phalanx/base/n.cc": ('#include "phalanx/base/testing/x.h"', "is for tests"),
        "phalanx/base/o.inc": ('#include "../base/x.h"', "is relative"),
        "phalanx/base/l_test.cc": ('#include <torch/torch.h>', None),
        "phalanx/base/commented.h": ('// #include "phalanx/comm/b.h"', None),
        "phalanx/testing/sim/p.h": ('#include "phalanx/comm/x.h"\n#include <torch/torch.h>', None),
        "phalanx/testing/unlisted/q.h": ("int x;", "has no place in the order"),
        "phalanx/phalanx.h": ('#include "phalanx/comm/b.h"', None),
    }
    for name, (text, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "CMakeLists.txt").write_text("set(PHALANX_FOLDERS base* observe* comm comm/sub launch/sub* testing/sim*)\n")
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
