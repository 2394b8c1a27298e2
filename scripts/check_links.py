#!/usr/bin/env python3
"""No link of a Markdown page is dead: each relative link names a file that exists, and a heading that the file has.
So does every docs/*.md that code, a script or an error text names. No page is longer than a stranger reads.

    scripts/check_links.py [--self-test] [ROOT]
"""
import pathlib
import re
import subprocess
import sys
import tempfile

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
PAGE = re.compile(r"\bdocs/[a-z0-9_]+\.md\b")
LONGEST = 1600  # words; the references are generated
GENERATED = {"configuration.md", "cli.md", "lecture.md"}
OTHER_PAGES = {"README.md", "CONTRIBUTING.md", "recipes/README.md"}  # outside of docs/


def slug(heading):
    """GitHub's: lower case, punctuation gone, blanks to dashes."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def tracked(root):
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, check=True,
                           capture_output=True, text=True).stdout.splitlines()
    return [root / name for name in names if (root / name).is_file()]


def problems(root, files):
    found = []
    for page in (path for path in files if path.suffix == ".md"):
        where = page.relative_to(root)
        text = page.read_text()
        for link in LINK.findall(without_code(text)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                found.append(f"{where}: the link {link} names no file")
            elif anchor and target.suffix == ".md" and anchor not in map(slug, HEADING.findall(target.read_text())):
                found.append(f"{where}: the link {link} names no heading of {target.name}")
        is_page = where.parts[0] == "docs" and page.name not in GENERATED or where.as_posix() in OTHER_PAGES
        if is_page and len(text.split()) > LONGEST:
            found.append(f"{where}: {len(text.split())} words; expected at most {LONGEST}: split it")
    for path in files:
        if path.suffix not in {".h", ".cc", ".sh", ".py", ".txt", ".toml", ".sbatch", ""}:
            continue
        if path.name == pathlib.Path(__file__).name:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for name in sorted(set(PAGE.findall(text))):
            if not (root / name).exists():
                found.append(f"{path.relative_to(root)}: names {name}, which is no page")
    return found


def self_test():
    cases = {
        "docs/a.md": ("[x](missing.md)", "names no file"),
        "docs/b.md": ("# One\n[x](#two)", "names no heading"),
        "docs/c.md": ("word " * (LONGEST + 1), "split it"),
        "docs/cli.md": ("word " * (LONGEST + 1), None),
        "recipes/README.md": ("word " * (LONGEST + 1), "split it"),
        "third_party/x/README.md": ("word " * (LONGEST + 1), None),
        "docs/d.md": ("# One `two`, three\n[x](#one-two-three) [y](https://a.b/c)\n```\n[z](no.md)\n```\n", None),
        "cli/e.cc": ('"see docs/gone.md"', "which is no page"),
    }
    for name, (text, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            path = root / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            found = problems(root, [path])
            if found if expected is None else len(found) != 1 or expected not in found[0]:
                sys.exit(f"check_links: self-test failed on {name}: expected {expected!r}, found {found}")
    print(f"check_links: self-test passed ({len(cases)} cases)")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    files = tracked(root)
    found = problems(root, files)
    for line in found:
        print(f"check_links: {line}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"check_links: {sum(path.suffix == '.md' for path in files)} pages, no dead link")


if __name__ == "__main__":
    main()
