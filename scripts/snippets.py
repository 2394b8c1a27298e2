#!/usr/bin/env python3
"""The examples of README.md, CONTRIBUTING.md, docs/ and the headers that phalanx/phalanx.h includes are real code.

    scripts/snippets.py --unit FILE --run FILE     writes all C++ examples as one source file, and those with a name, which
                                                   tests/snippets/snippets_test.cc runs, as a header
    scripts/snippets.py --check PROGRAM            reads TOML blocks by `PROGRAM train --print-config`, and holds the commands,
                                                   options and keys of shell lines against its help texts
    scripts/snippets.py --self-test

A C++ block is the body of a function. It sees the names of tests/snippets/given.h, and namespace phalanx unless it says
`phalanx::` itself. A line, or a body in braces, of nothing but `...` is left out. A comment above the block says more, in
parts that `|` parts:

    <!-- snippet: given int n; at::Tensor bucket -->    parameters of that function
    <!-- snippet: given base-model -->                  folders with a small Hugging Face model, for a TOML block
    <!-- snippet: include phalanx/nn/linear.h -->       a header that it does not name
    <!-- snippet: continues -->                         the previous block goes on
    <!-- snippet: declarations -->                      stands outside of functions
    <!-- snippet: named save_and_load -->               the function's name: a test calls it
    <!-- snippet: not compiled, because ... -->         is counted, and no more

For an example of a header the same words stand in tests/snippets/headers.txt.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GENERATED = {"docs/configuration.md", "docs/cli.md", "docs/lecture.md"}
QUOTING = {"docs/lecture.md"}  # its blocks are parts of sources that the build compiles
REMARK = re.compile(r"^<!-- snippet: (.*) -->$")
SMALL_MODEL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
               "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
CODE = re.compile(r"[;{}]\s*(//.*)?$")


class SnippetError(Exception):
    pass


@dataclasses.dataclass
class Block:
    file: str
    line: int  # of its first line of code
    language: str
    lines: list
    given: str = ""
    name: str = ""
    continues: bool = False
    declarations: bool = False
    left_out: str = ""  # why
    includes: list = dataclasses.field(default_factory=list)
    namespace: str = "phalanx"

    @property
    def where(self):
        return f"{self.file}:{self.line}"

    def take(self, remark):
        """The words of a remark."""
        if left_out := re.fullmatch(r"not compiled, because (.+)", remark):
            self.left_out = left_out[1]
            return
        for part in remark.split(" | "):
            if part == "continues":
                self.continues = True
            elif part == "declarations":
                self.declarations = True
            elif named := re.fullmatch(r"named (\w+)", part):
                self.name = named[1]
            elif given := re.fullmatch(r"given ?(.*)", part):
                self.given = given[1]
            elif include := re.fullmatch(r"include (\S+)", part):
                self.includes.append(f'#include "{include[1]}"')
            else:
                raise SnippetError(f"{self.where}: unknown remark '{part}': expected given ..., include ..., continues, declarations, "
                                   "named NAME, or not compiled, because ...")


def blocks_of_page(file, text):
    """Fenced blocks, whatever their language."""
    found, block, remark = [], None, None
    for number, line in enumerate(text.splitlines(), 1):
        if block is None and (fence := re.match(r"^```(\w*)$", line)):
            block = Block(file, number + 1, fence[1], [])
            if remark is not None:
                block.take(remark)
            remark = None
        elif line == "```":
            found.append(block)
            block = None
        elif block is not None:
            block.lines.append(line)
        else:
            if remark is not None:
                raise SnippetError(f"{file}:{number}: expected a block right below the snippet comment")
            if matched := REMARK.match(line):
                remark = matched[1]
    return found


def blocks_of_header(file, text):
    """Indented lines of comments, below an empty line of the comment or at its start, one of which ends like a statement."""
    found, lines = [], text.splitlines()
    namespace = (re.findall(r"^namespace (phalanx[\w:]*) \{", text, re.M) or ["phalanx"])[-1]
    number = 0
    while number < len(lines):
        start = number
        while number < len(lines) and re.match(r"\s*///?( {3}.*)?$", lines[number]):
            number += 1
        comment = [re.sub(r"^\s*///? {0,3}", "", line) for line in lines[start:number]]
        if start > 0 and re.match(r"\s*///? ", lines[start - 1]):  # the rest of an item or a paragraph
            while comment and comment[0]:
                comment, start = comment[1:], start + 1
        while comment and not comment[0]:
            comment, start = comment[1:], start + 1
        if any(CODE.search(line) for line in comment):
            found.append(Block(file, start + 1, "cpp", comment, namespace=namespace))
        number += 1
    return found


def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def public_headers():
    umbrella = "phalanx/phalanx.h"
    return [umbrella, *re.findall(r'^#include "(phalanx/.*)"$', (ROOT / umbrella).read_text(), re.M)]


def header_remarks():
    """Of tests/snippets/headers.txt: path -> remarks of its examples, in their order."""
    remarks = {}
    for line in (ROOT / "tests/snippets/headers.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            path, _, remark = line.partition(": ")
            remarks.setdefault(path, []).append(remark)
    return remarks


def all_blocks():
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        if name not in QUOTING:
            found += blocks_of_page(name, page.read_text())
    remarks = header_remarks()
    for header in public_headers():
        blocks = blocks_of_header(header, (ROOT / header).read_text())
        told = remarks.pop(header, [])
        if len(told) > len(blocks):
            raise SnippetError(f"tests/snippets/headers.txt: {len(told)} remarks on {header}, which has {len(blocks)} examples")
        for block, remark in zip(blocks, told):
            block.take(remark)
        found += blocks
    for header in remarks:
        raise SnippetError(f"tests/snippets/headers.txt: {header} is no public header")
    return found


def code_of(block, includes):
    """Its lines, without what is left out: as many as there were, so that the compiler counts right."""
    code = []
    includes += block.includes
    for line in block.lines:
        if re.match(r"#include ", line):
            includes.append(line)
            line = ""
        line = re.sub(r"^(\s*)\.\.\.(\s*(//.*)?)$", r"\1\2", line)
        code.append(re.sub(r"\{ \.\.\. \}", "{}", line))
    return [f'#line {block.line} "{block.file}"', *code]


def groups_of(blocks):
    """Blocks, each with those that continue it."""
    groups = []
    for block in blocks:
        if not block.continues:
            groups.append([block])
        elif groups and groups[-1][0].file == block.file:
            groups[-1].append(block)
        else:
            raise SnippetError(f"{block.where}: it continues a block, and there is none above it on this page")
    return groups


def function_of(group, includes):
    """Its blocks as one function, or as what stands outside of functions."""
    first, code = group[0], [line for block in group for line in code_of(block, includes)]
    given = [part.strip() for part in first.given.split(";") if part.strip()]
    using = []
    if first.file.endswith(".h"):
        using = [f"using namespace {name};" for name in dict.fromkeys(["phalanx", first.namespace])]
    elif not any("phalanx::" in line for block in group for line in block.lines if not line.startswith("using ")):
        using = ["using namespace phalanx;"]
    if first.declarations:
        return [*(f"extern {part};" for part in given), *code]
    if not any(re.match(r"int main\(", line) for line in code):
        signature = f"void {first.name or 'example'}({', '.join(given)}) {{"
        code = [f'#line {first.line - 1} "{first.file}"', signature, *code, "}"]
    return [f"namespace line_{first.line} {{", *using, *code, "}"]


def source_of(blocks, includes):
    """A namespace for each file."""
    out, file = [], None
    for group in groups_of(blocks):
        if group[0].file != file:
            out += ["}"] * (file is not None)
            file = group[0].file
            out.append("namespace %s {" % re.sub(r"\W", "_", file))
        out += function_of(group, includes)
    return "\n".join([*out, "}", ""])


def write_if_new(path, text):
    path = pathlib.Path(path)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_units(unit, run):
    blocks = [block for block in all_blocks() if block.language == "cpp"]
    compiled = [block for block in blocks if not block.left_out]
    includes = []
    source = source_of(compiled, includes)
    unique = "\n".join(dict.fromkeys(includes))
    write_if_new(unit, f'#include "tests/snippets/given.h"\n{unique}\n\nnamespace snippets {{\n{source}}}  // namespace snippets\n')

    run_blocks = [block for group in groups_of(compiled) if group[0].name for block in group]
    includes = []
    source = "\n".join(line for group in groups_of(run_blocks) for line in function_of(group, includes))
    source = re.sub(r"^namespace line_\d+ \{$", "namespace {", source, flags=re.M)
    unique = "\n".join(dict.fromkeys(includes))
    write_if_new(run, f"{unique}\n\n{source}\n")
    for block in blocks:
        if block.left_out:
            print(f"{block.where}: not compiled, because {block.left_out}")
    print(f"snippets: {len(compiled)} of {len(blocks)} C++ examples are compiled, {sum(bool(block.name) for block in blocks)} are run")


# Shell lines and TOML.

def shell_lines(text):
    """(line, command) of blocks fenced with sh and of indented lines, with continued lines joined; `phalanx ...` in prose."""
    language, joined, begun = None, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if fence := re.match(r"^```(\w*)$", line):
            language = fence[1] if language is None else None
            continue
        if language != "sh" and not (language is None and line.startswith("    ")):
            joined = ""
            yield from ((number, span) for span in re.findall(r"`(phalanx [^`]+)`", line) if language is None)
            continue
        begun = begun if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        yield begun, joined
        joined = ""


def commands_in(line):
    """(subcommand, options) of each call of phalanx in a line. What launch starts is the program's own."""
    line = re.sub(r'"[^"]*"|\'[^\']*\'', "TEXT", re.sub(r"(^|\s)#.*$", "", line))
    for part in re.split(r"[|;&]+|\$\(", line):
        words = part.split()
        starts = [i for i, word in enumerate(words) if word in ("phalanx", "$phalanx")]
        for start, end in zip(starts, starts[1:] + [len(words)]):
            call = words[start + 1:end]
            if not call or not re.fullmatch(r"[a-z]+", call[0]):
                continue
            if call[0] == "launch":
                kept = []
                for word in call[1:]:
                    if word == "--" or word.startswith(("./", "build/")):
                        break
                    kept.append(word)
                call = [call[0], *kept]
            yield call[0], [re.split(r"[=.,;:)]", word)[0] if not word.count(".") else word.split("=")[0]
                            for word in call[1:] if re.match(r"--?[a-zA-Z]", word)]


def run_program(program, *arguments, cwd=None):
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def keys_of(reference):
    """section.key of docs/configuration.md."""
    keys, section = set(), ""
    for line in reference.splitlines():
        if heading := re.match(r"## \[(.+)\]$", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` ", line):
            keys.add(f"{section}.{row[1]}")
    return keys


class HelpTexts:
    def __init__(self, program):
        self.program, self.options = program, {}
        self.commands = set(re.findall(r"^  ([a-z]+) ", run_program(program, "--help").stdout, re.M))
        self.keys = keys_of((ROOT / "docs/configuration.md").read_text())

    def knows(self, command, option):
        if "." in option:
            section, _, key = option[2:].rpartition(".")
            return {f"{section}.{key}", f"{section}.{key.removeprefix('no-')}"} & self.keys
        if command not in self.options:
            text = run_program(self.program, command, "--help").stdout
            self.options[command] = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)) | {"--help"}
        return option in self.options[command]


def shell_problems(name, text, helps):
    for number, line in shell_lines(text):
        for command, options in commands_in(line):
            if command not in helps.commands:
                yield f"{name}:{number}: phalanx {command}: no such command"
                continue
            for option in options:
                if not helps.knows(command, option):
                    yield f"{name}:{number}: phalanx {command} has no option {option}"


def toml_problem(block, program):
    with tempfile.TemporaryDirectory() as folder:
        for given in filter(None, block.given.split("; ")):
            model = pathlib.Path(folder) / given
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(SMALL_MODEL))
        (pathlib.Path(folder) / "block.toml").write_text("\n".join(block.lines) + "\n")
        run = run_program(program, "train", "block.toml", "--print-config", cwd=folder)
        return f"{block.where}: {run.stderr.strip()}" if run.returncode != 0 else None


def check(program):
    helps, problems, calls = HelpTexts(program), [], 0
    for page in pages():
        name, text = str(page.relative_to(ROOT)), page.read_text()
        if name in GENERATED:
            continue
        calls += sum(len(list(commands_in(line))) for _, line in shell_lines(text))
        problems += shell_problems(name, text, helps)
    tables = [block for block in all_blocks() if block.language == "toml"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        problems += [problem for problem in pool.map(lambda block: toml_problem(block, program), tables) if problem]
    for problem in problems:
        print(f"snippets: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"snippets: {len(tables)} TOML blocks are read, {calls} calls of phalanx name options that there are")


def self_test():
    page = """
```cpp
phalanx::f(n);
```
<!-- snippet: given int n; at::Tensor x | named run -->
```cpp
#include "a.h"
g(n);
...     // words
h([] { ... });
```
<!-- snippet: continues -->
```cpp
i();
```
<!-- snippet: not compiled, because it is a drawing -->
```cpp
/\\
```
"""
    blocks = blocks_of_page("p.md", page)
    expect([block.left_out for block in blocks], ["", "", "", "it is a drawing"])
    includes = []
    expect(source_of(blocks[:3], includes).splitlines(), [
        "namespace p_md {", "namespace line_3 {", '#line 2 "p.md"', "void example() {", '#line 3 "p.md"', "phalanx::f(n);",
        "}", "}", "namespace line_7 {", "using namespace phalanx;", '#line 6 "p.md"', "void run(int n, at::Tensor x) {",
        '#line 7 "p.md"', "", "g(n);", "     // words", "h([] {});", '#line 14 "p.md"', "i();", "}", "}", "}"])
    expect(includes, ['#include "a.h"'])
    header = """// Says what it does:
//   - an item;
//     its rest;
//
//   f(x);   // [batch]
//
namespace phalanx::nn {
  /// Text.
  ///
  ///   g();
  void g();
}"""
    expect([(block.line, block.namespace, block.lines[0]) for block in blocks_of_header("a.h", header)],
           [(5, "phalanx::nn", "f(x);   // [batch]"), (10, "phalanx::nn", "g();")])
    for wrong, says in {"<!-- snippet: givn int n -->\n```cpp\n```": "p.md:3: unknown remark 'givn int n'",
                        "<!-- snippet: continues -->\n\n```cpp\n```": "p.md:2: expected a block right below",
                        "<!-- snippet: continues -->\n```cpp\n```": "p.md:3: it continues a block, and there is none"}.items():
        try:
            groups_of(blocks_of_page("p.md", wrong))
            sys.exit(f"snippets: self-test failed: {wrong!r} passed")
        except SnippetError as error:
            expect(str(error).startswith(says), True)
    expect(list(shell_lines("    a \\\n        --b\nprose\n```sh\nc\n```\n```\nd\n```\n")), [(1, "a --b"), (5, "c")])
    expect(list(shell_lines("of `phalanx train --x` and `y`")), [(1, "phalanx train --x")])
    expect(list(commands_in('X=1 phalanx train -n 2 "--a b" --c.d=1 # --e')), [("train", ["-n", "--c.d"])])
    expect(list(commands_in("phalanx launch -n 2 -- ./x --y | phalanx report --z; the phalanx")),
           [("launch", ["-n"]), ("report", ["--z"])])
    expect(list(commands_in("phalanx launch --nnodes 2 phalanx train a.toml --job.b c")),
           [("launch", ["--nnodes"]), ("train", ["--job.b"])])
    expect(keys_of("## [a.b]\n| `c` | x |\n"), {"a.b.c"})
    print("snippets: self-test passed")


def expect(found, expected):
    if found != expected:
        sys.exit(f"snippets: self-test failed: expected {expected!r}, found {found!r}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--unit")
    parser.add_argument("--run")
    parser.add_argument("--check", metavar="PROGRAM")
    arguments = parser.parse_args()
    try:
        if arguments.self_test:
            self_test()
        if arguments.unit:
            write_units(arguments.unit, arguments.run)
        if arguments.check:
            check(str(pathlib.Path(arguments.check).resolve()))
    except SnippetError as error:
        sys.exit(f"snippets: {error}")


if __name__ == "__main__":
    main()
