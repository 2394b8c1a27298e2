#!/usr/bin/env python3
"""Moves files and renames identifiers over the whole repository, from two tables. Run in a clean work tree.

    scripts/rename/rename.py [--moves TABLE] [--words TABLE]

A table of moves has lines "old path<TAB>new path". The script moves the files with `git mv` and rewrites what names them:
#include lines, and mentions in comments, documents and scripts, with or without the leading "phalanx/". Where the file
name itself changes, and no other file has it, bare mentions follow too.

In other files than C++ a word changes wherever it stands: say in the third column where it may. The words of one table go
before the moves of the next: words.tsv, file_names.tsv, words2.tsv, file_names2.tsv, after moves.tsv.

A table of words has lines "old<TAB>new[<TAB>prefix,prefix...[<TAB>code]]": each whole word becomes the other one, in code
and in comments. String literals stay as they are: what stands there is in users' hands, on disk or on the wire. The third
column restricts a line to files whose path begins so. "code" marks an English word: it changes in C++ alone, and in a
comment only where it is code: behind . -> :: or a back quote, or before ( or a back quote. Lines that begin with # are
comments.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

CODE = {".h", ".cc", ".inc", ".cu"}
TEXT = CODE | {".md", ".py", ".sh", ".bash", ".txt", ".cmake", ".in", ".toml", ".json", ".sbatch", ".yml", ""}
# Never rewritten: the tables themselves.
OWN = "scripts/rename/"
# A string or character literal, with its prefix; raw strings first. A digit separator (1'000) begins no literal.
LITERAL = re.compile(r'(?:u8|u|U|L)?R"([^()\\\s]{0,16})\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|(?:\b(?:u8|u|U|L)|(?<![0-9a-zA-Z]))\'(?:[^\'\\\n]|\\.)+\'', re.S)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[^\n]*', re.M)


def table(path):
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) < 2 or not cells[0] or not cells[1]:
            sys.exit(f"{path}:{number}: expected old<TAB>new, found '{line}'")
        rows.append(cells)
    return rows


def tracked():
    names = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [pathlib.Path(name) for name in names if pathlib.Path(name).suffix in TEXT and not name.startswith(OWN) and "testdata/" not in name]


def rewrite(change):
    count = 0
    for path in tracked():
        if not path.is_file() or path.is_symlink():
            continue
        try:
            before = path.read_text()
        except UnicodeDecodeError:
            continue
        after = change(path, before)
        if after != before:
            path.write_text(after)
            count += 1
    print(f"{count} files rewritten")


def move(rows):
    new_of = {}
    names = [path.name for path in tracked()]
    for old, new in (row[:2] for row in rows):
        pathlib.Path(new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], check=True)
        new_of[old] = new
        base, new_base = pathlib.Path(old).name, pathlib.Path(new).name
        if base != new_base and names.count(base) == 1:  # "(board.h)" in a comment
            new_of[base] = new_base
        if old.startswith("phalanx/") and new.startswith("phalanx/"):
            new_of[old.removeprefix("phalanx/")] = new.removeprefix("phalanx/")
    longest = sorted(new_of, key=len, reverse=True)
    pattern = re.compile(r"(?<![\w/.-])(" + "|".join(re.escape(old) for old in longest) + r")(?!\w)")
    # A path after a variable ($ROOT/phalanx/...) or a dot (./phalanx/...) counts too, if it is a whole one.
    whole = [old for old in longest if old.startswith(("phalanx/", "cli/"))]
    behind = re.compile(r"(?<=[/])(" + "|".join(re.escape(old) for old in whole) + r")(?!\w)")

    def change(path, text):
        return behind.sub(lambda m: new_of[m[1]], pattern.sub(lambda m: new_of[m[1]], text))

    rewrite(change)


TOKENS = re.compile(f"(?P<include>{INCLUDE.pattern})|(?P<comment>{COMMENT.pattern})|(?P<literal>{LITERAL.pattern.replace(chr(92) + '1', '(?P=delimiter)').replace('([^()', '(?P<delimiter>[^()', 1)})",
                    re.S | re.M)


def over_code(text, code, comment):
    """The C++ text with its code and its comments changed; literals and #include lines stay."""
    parts, end = [], 0
    for match in TOKENS.finditer(text):
        parts.append(code(text[end:match.start()]))
        parts.append(comment(match[0]) if match["comment"] else match[0])
        end = match.end()
    parts.append(code(text[end:]))
    return "".join(parts)


def pattern_of(words):
    return r"\b(" + "|".join(sorted(map(re.escape, words), key=len, reverse=True)) + r")\b"


def rename(rows):
    def renamers(path):
        """For code, and for a comment or a document."""
        words, code_words = {}, {}
        for row in rows:
            where = tuple(row[2].split(",")) if len(row) > 2 and row[2] else ("",)
            if str(path).startswith(where):
                (code_words if len(row) > 3 and row[3] == "code" else words)[row[0]] = row[1]
        both = {**code_words, **words}
        in_code = re.compile(pattern_of(both)) if both else None
        in_text = re.compile(pattern_of(words)) if words else None
        marked = re.compile(rf"(?<=[.>:`]){pattern_of(code_words)}|{pattern_of(code_words)}(?=[(`])") if code_words else None

        def code(text):
            return in_code.sub(lambda m: both[m[1]], text) if in_code else text

        def comment(text):
            # Marked words first: what a plain word becomes may itself be a code word.
            if path.suffix in CODE and marked:
                text = marked.sub(lambda m: code_words[m[1] or m[2]], text)
            return in_text.sub(lambda m: words[m[1]], text) if in_text else text

        return code, comment

    def change(path, text):
        code, comment = renamers(path)
        if path.suffix not in CODE:
            return comment(text)
        return over_code(text, code, comment)

    rewrite(change)


def require_clean():
    if subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True).stdout.strip():
        sys.exit("the work tree has changes: commit or stash them, so that this change stands alone")


def main():
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], check=True, capture_output=True, text=True).stdout.strip()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves")
    parser.add_argument("--words")
    args = parser.parse_args()
    require_clean()
    moves, words = (table(path) if path else [] for path in (args.moves, args.words))
    os.chdir(top)  # names are the repository's, wherever this is run
    if moves:
        move(moves)
    if words:
        rename(words)


if __name__ == "__main__":
    main()
