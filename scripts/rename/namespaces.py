#!/usr/bin/env python3
"""Gives folders a namespace of their own, from a table. Run in a clean work tree; it needs Universal Ctags.

    scripts/rename/namespaces.py TABLE

The table has lines "folder<TAB>old namespace<TAB>new namespace". In the folder, subfolders too, the old namespace becomes
the new one. What the folder's headers declare in it is then qualified in every other file of the old namespace, and what
that one keeps is qualified in the folder. `old::name` becomes `new::name` everywhere, in comments and documents too. A bare
name in a comment stays: it is prose, or an example within its own folder. String literals stay as they are.

A function is a name before "(" that no type precedes. It stays bare where several of the namespaces declare it, or the
file itself: calls find it by their arguments.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

import rename

# Words before a call; any other word before name( makes it a declaration, such as of a member with the same name.
BEFORE_CALL = {"return", "case", "else", "throw", "co_return", "co_yield", "not", "and", "or", "do"}


def declared(headers, namespace):
    """What the headers declare at the scope of the namespace: names of types and constants, and of functions."""
    command = ["ctags", "-f", "-", "--language-force=C++", "--kinds-C++=cfgpstuvx", "--fields=ksZ", *headers]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    values, functions = set(), set()
    for line in lines:
        name, _, _, kind, *fields = re.sub(r'/\^.*?\$?/;"', "", line).split("\t")
        if f"scope:namespace:{namespace}" in fields and not name.startswith("__anon"):
            (functions if kind in ("p", "f") else values).add(name)
    return values, functions - values


class Namespaces:
    def __init__(self, rows):
        self.old = {row[1] for row in rows}
        if len(self.old) != 1:
            sys.exit("one table, one old namespace")
        self.old = self.old.pop()
        self.new_of = {row[0]: row[2] for row in rows}
        headers = [path for path in rename.tracked() if path.suffix in (".h", ".inc") and self.old in path.read_text()]
        self.home, self.values = {}, set()
        for home in {self.old, *self.new_of.values()}:
            of_home = [str(path) for path in headers if self.namespace_of(path) == home]
            values, functions = declared(of_home, self.old)
            for name in values | functions:
                if self.home.setdefault(name, home) != home:
                    print(f"{name}: declared by several, left bare")
                    self.home[name] = None
            self.values |= values
        self.home = {name: home for name, home in self.home.items() if home}

    def namespace_of(self, path):
        folders = [folder for folder in self.new_of if str(path).startswith(folder + "/")]
        return self.new_of[folders[0]] if folders else self.old

    def outer(self, namespace):
        return namespace.rsplit("::", 1)[1]

    def qualified(self, text):
        """old::name of another home, with or without the namespaces around the old one."""
        last = self.outer(self.old)
        pattern = rf"(?<![\w]){last}::({'|'.join(map(re.escape, self.home))})\b"
        return re.sub(pattern, lambda m: f"{self.outer(self.home[m[1]])}::{m[1]}", text)

    def bare(self, text, own, own_functions):
        names = [name for name, home in self.home.items() if home != own]
        pattern = re.compile(rf"(?<![\w.:])(?<!->)({'|'.join(map(re.escape, names))})\b")

        def is_call(match):
            word = re.search(r"\w+$", text[: match.start()].rstrip())
            return text[match.end():].startswith("(") and not (word and word[0] not in BEFORE_CALL)

        def change(match):
            name = match[1]
            if name in own_functions or name not in self.values and not is_call(match):
                return name
            return f"{self.outer(self.home[name])}::{name}"

        return pattern.sub(change, text)

    def opened(self, text, own):
        return re.sub(rf"\bnamespace {self.old}\b", f"namespace {own}", text)

    def change(self, path, text):
        own = self.namespace_of(path)
        if path.suffix not in rename.CODE:
            text = self.qualified(text)
            return text.replace(f"NAMESPACE {self.old} ", f"NAMESPACE {own} ") if path.name == "CMakeLists.txt" else text
        within = re.search(rf"^namespace {self.old}\b", text, re.M)
        # Such as a helper of one file whose name another folder has too.
        own_functions = {m[2] for m in re.finditer(r"^(?!using)[\w:<>,]*[\w>&*] (\w+::)?(\w+)\(", text, re.M) if m[0].split()[0] not in BEFORE_CALL}

        def code(part):
            part = self.qualified(part)
            return self.bare(self.opened(part, own), own, own_functions) if within else part

        return rename.over_code(text, code, lambda part: self.opened(self.qualified(part), own))


def main():
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], check=True, capture_output=True, text=True).stdout.strip()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    args = parser.parse_args()
    rename.require_clean()
    rows = rename.table(args.table)
    os.chdir(top)
    rename.rewrite(Namespaces(rows).change)


if __name__ == "__main__":
    main()
