#!/usr/bin/env python3
"""Draws the folders of the library as rooms: docs/pictures/architecture.svg of docs/architecture.md.

    scripts/draw_architecture.py [--output docs/pictures/architecture.svg]
    scripts/draw_architecture.py --check                         fails where the picture is not what would be drawn
    scripts/draw_architecture.py --ref 08ab487 --output FILE     the folders of another commit

The order and the nesting are those of PHALANX_FOLDERS in CMakeLists.txt (of older commits: of its list of folders). A
room says its lines of product code, without tests, rounded to two digits so that few commits change the picture, and
which rooms it includes. What follows from others is left out: who includes comm and base, and comm includes base, says
comm. As arrows even these would be more than an eye can follow, so they are text.
"""
import argparse
import io
import pathlib
import re
import subprocess
import sys
import tarfile
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = "docs/pictures/architecture.svg"
SOURCES = {".h", ".cc", ".cu", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"phalanx/([^"]+)"', re.MULTILINE)

WIDTH, MARGIN, GAP, PADDING = 1000, 20, 12, 10
ROOMS_IN_A_ROW = 5  # see units_of()
NARROWEST = 165     # of a room inside another
STYLE = """
.ground { fill: #ffffff } .ink { fill: #1b1f24 } .grey { fill: #4d5661 }
.torch { fill: #eef3fc; stroke: #3b6fb6 } .free { fill: #e8f5ee; stroke: #2e8b68 }
.in.torch { fill: #dce7f9 } .in.free { fill: #d2ecdf }
.bar.torch { fill: #3b6fb6; stroke: none } .bar.free { fill: #2e8b68; stroke: none }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } .ink { fill: #e6edf3 } .grey { fill: #a6aeb8 }
.torch { fill: #141d2f; stroke: #6699dd } .free { fill: #10231b; stroke: #46b083 }
.in.torch { fill: #1d2b47 } .in.free { fill: #183629 }
.bar.torch { fill: #6699dd } .bar.free { fill: #46b083 }
}
"""


class Room:
    def __init__(self, name, number, is_torch_free):
        self.name, self.number, self.is_torch_free = name, number, is_torch_free
        self.lines, self.includes, self.inner = 0, set(), []
        self.parent = None
        self.x = self.y = self.width = self.height = 0

    def label(self):
        inside = self.name[len(self.parent.name) + 1:] if self.parent else self.name
        return inside + ("*" if self.is_torch_free else "")

    def all_lines(self):
        return self.lines + sum(one.all_lines() for one in self.inner)

    def kind(self):
        return ("in " if self.parent else "") + ("free" if self.is_torch_free else "torch")


def files_of_tree():
    """Text by path, of the working tree."""
    wanted = [ROOT / "CMakeLists.txt", *sorted((ROOT / "phalanx").rglob("*"))]
    return {str(path.relative_to(ROOT)): path.read_text(errors="replace")
            for path in wanted if path.is_file() and (path.suffix in SOURCES or path.name == "CMakeLists.txt")}


def files_of_commit(ref):
    wanted = ["CMakeLists.txt", "scripts/check_layering.py", "phalanx"]
    done = subprocess.run(["git", "-C", str(ROOT), "archive", ref, "--", *wanted], capture_output=True)
    if done.returncode != 0:
        sys.exit(f"draw_architecture: no commit '{ref}' that can be read: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        return {one.name: archive.extractfile(one).read().decode(errors="replace")
                for one in archive.getmembers() if one.isfile()}


def folder_names(files):
    """The folders in their order, and those of them that hold no torch."""
    text = files["CMakeLists.txt"]
    match = re.search(r"set\(PHALANX_FOLDERS\s+([^)]+)\)", text)
    if match:
        names = match.group(1).split()
        return [name.rstrip("*") for name in names], {name.rstrip("*") for name in names if name.endswith("*")}
    match = re.search(r"foreach\(folder (base [a-z_ ]+)\)", text)
    if not match:
        sys.exit("draw_architecture: CMakeLists.txt has neither set(PHALANX_FOLDERS ...) nor foreach(folder base ...)")
    free = re.search(r"^TORCH_FREE = \{([^}]*)\}", files.get("scripts/check_layering.py", ""), re.MULTILINE)
    return match.group(1).split(), set(re.findall(r'"([^"]+)"', free.group(1))) if free else set()


def is_product(path):
    return path.suffix in SOURCES and not path.stem.endswith("_test") and not {"testing", "testdata"} & set(path.parts)


def room_of(path, rooms):
    """The innermost room around phalanx/<path>; None of what lies in none."""
    parts = path.parts[:-1]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in rooms:
            return rooms["/".join(parts[:length])]
    return None


def read_rooms(files):
    order, free = folder_names(files)
    rooms = {name: Room(name, number, name in free) for number, name in enumerate(order, 1)}
    for room in rooms.values():
        room.parent = room_of(pathlib.PurePosixPath(room.name), rooms)
        if room.parent:
            room.parent.inner.append(room)
    for name, text in files.items():
        path = pathlib.PurePosixPath(name)
        if path.parts[0] != "phalanx" or not is_product(path):
            continue
        room = room_of(path.relative_to("phalanx"), rooms)
        if room is None:
            continue
        room.lines += text.count("\n")
        for included in INCLUDE.findall(text):
            other = room_of(pathlib.PurePosixPath(included), rooms)
            if other and other.number < room.number:  # any other is an error of scripts/check_layering.py
                room.includes.add(other)
    leave_out_what_follows(rooms.values())
    return list(rooms.values())


def leave_out_what_follows(rooms):
    """Leaves those of a room's includes that none of the others reaches."""
    reached = {}
    for room in rooms:  # those that it includes come before it
        reached[room] = set().union(room.includes, *(reached[one] for one in room.includes))
    for room in rooms:
        room.includes -= set().union(*(reached[one] for one in room.includes))


def rounded(lines):
    return round(lines, 2 - len(str(lines))) if lines > 99 else lines


def lines_text(room):
    text = f"{rounded(room.lines):,} lines"
    return text + f", {rounded(room.all_lines()):,} with its rooms" if room.inner else text


def lines_in(room, width):
    text = lines_text(room)
    return [text] if text_width(text, 12) <= width else text.replace(", ", ",\n").split("\n")


def text_width(text, size, bold=False):
    """An upper bound for the fonts that may be there."""
    return len(text) * size * (0.68 if bold else 0.6)


def wrapped(words, size, width):
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def includes_text(room, width):
    names = [one.name for one in sorted(room.includes, key=lambda one: one.number)]
    if not names:
        return []
    return wrapped(["includes:"] + [name + "," for name in names[:-1]] + names[-1:], 11, width)


def units_of(room):
    """How wide a room is beside others: what holds several rooms, or includes many, needs more than one."""
    return min(ROOMS_IN_A_ROW, max(1, len(room.inner), 2 if len(room.includes) > 5 else 1))


def in_rows(rooms):
    """In their order, as evenly as it goes."""
    best = {0: (0, [])}  # of the first rooms: what is left free, squared and added up, and the rows
    for end in range(1, len(rooms) + 1):
        choices = []
        for begin in range(end):
            free = ROOMS_IN_A_ROW - sum(units_of(room) for room in rooms[begin:end])
            if free >= 0:
                choices.append((best[begin][0] + free * free, best[begin][1] + [rooms[begin:end]]))
        best[end] = min(choices, key=lambda choice: choice[0])
    return best[len(rooms)][1]


def place_rows(rows, units, x, y, width):
    """Each row fills the width; returns where the next one would begin."""
    for row in rows:
        unit = (width - GAP * (len(row) - 1)) / sum(units(room) for room in row)
        left = x
        for room in row:
            room.x, room.y, room.width = left, y, unit * units(room)
            place_inside(room)
            left += room.width + GAP
        height = max(room.height for room in row)
        for room in row:
            room.height = height
        y += height + GAP
    return y


def place_inside(room):
    width = room.width - 2 * PADDING
    top = room.y + PADDING + 27 + 15 * len(lines_in(room, width)) + 14 * len(includes_text(room, width))
    if room.inner:
        fit = max(1, int((width + GAP) // (NARROWEST + GAP)))
        rows = -(-len(room.inner) // fit)
        each = -(-len(room.inner) // rows)
        parts = [room.inner[begin:begin + each] for begin in range(0, len(room.inner), each)]
        top = place_rows(parts, lambda one: 1, room.x + PADDING, top + 4, width) - GAP + 2
    room.height = top + PADDING - 4 - room.y


def drawn(room, widest):
    x, y, width = room.x + PADDING, room.y + PADDING, room.width - 2 * PADDING
    kind = "free" if room.is_torch_free else "torch"
    included = ", ".join(one.name for one in sorted(room.includes, key=lambda one: one.number)) or "nothing"
    yield f"<g><title>{escape(room.name)}: {escape(lines_text(room))}; includes: {escape(included)}</title>"
    yield (f'<rect class="{room.kind()}" x="{room.x:.1f}" y="{room.y:.1f}" width="{room.width:.1f}" '
           f'height="{room.height:.1f}" rx="6"/>')
    yield (f'<text class="ink" x="{x:.1f}" y="{y + 11:.1f}" font-size="{13 if room.parent else 15}" '
           f'font-weight="bold">{escape(room.label())}</text>')
    yield (f'<text class="grey" x="{x + width:.1f}" y="{y + 11:.1f}" font-size="11" text-anchor="end">{room.number}'
           '</text>')
    y += 12
    for line in lines_in(room, width):
        y += 15
        yield f'<text class="ink" x="{x:.1f}" y="{y:.1f}" font-size="12">{escape(line)}</text>'
    yield (f'<rect class="bar {kind}" x="{x:.1f}" y="{y + 5:.1f}" width="{widest * rounded(room.lines):.1f}" '
           'height="3"/>')
    y += 7
    for line in includes_text(room, width):
        y += 14
        yield f'<text class="grey" x="{x:.1f}" y="{y:.1f}" font-size="11">{escape(line)}</text>'
    yield "</g>"
    for one in room.inner:
        yield from drawn(one, widest)


def picture(rooms, title):
    outer = [room for room in rooms if room.parent is None]
    lines = sum(room.lines for room in rooms)
    words = (f"{len(rooms)} folders, {rounded(lines):,} lines of product code (tests left out; numbers rounded to two "
             "digits; bars to scale). A room includes only rooms of smaller numbers. What follows from the includes "
             "shown is left out.").split()
    notes = wrapped(words, 12, WIDTH - 2 * MARGIN)
    legend = 66 + 16 * len(notes)
    bottom = place_rows(in_rows(outer), units_of, MARGIN, legend + 20, WIDTH - 2 * MARGIN)
    height = round(bottom - GAP + MARGIN)
    widest = min(room.width - 2 * PADDING for room in rooms) / max(rounded(room.lines) for room in rooms)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
           """role="img" font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif">""",
           f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
           '<rect class="ground" width="100%" height="100%"/>',
           f'<text class="ink" x="{MARGIN}" y="34" font-size="19" font-weight="bold">{escape(title)}</text>']
    for number, line in enumerate(notes):
        out.append(f'<text class="grey" x="{MARGIN}" y="{56 + 16 * number}" font-size="12">{escape(line)}</text>')
    for x, kind, text in ((MARGIN, "free", "* torch-free: no source in it sees torch"),
                          (MARGIN + 340, "torch", "built on torch")):
        out.append(f'<rect class="{kind}" x="{x}" y="{legend - 12}" width="22" height="14" rx="3"/>')
        out.append(f'<text class="ink" x="{x + 30}" y="{legend}" font-size="12">{text}</text>')
    for room in outer:
        out += drawn(room, widest)
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", help=f"where the picture is; {PICTURE} of the repository if not given")
    parser.add_argument("--ref", help="a commit to draw in place of the working tree; needs --output")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the picture is another one")
    options = parser.parse_args()
    if options.ref and not options.output:
        parser.error("--ref needs --output: the picture of the repository is that of the working tree")
    path = pathlib.Path(options.output) if options.output else ROOT / PICTURE
    files = files_of_commit(options.ref) if options.ref else files_of_tree()
    title = f"The folders of phalanx/ at {options.ref}" if options.ref else "The rooms of phalanx/"
    text = picture(read_rooms(files), title)
    if not options.check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.is_file() or path.read_text() != text:
        given = (("--ref", options.ref), ("--output", options.output))
        again = "".join(f" {name} {value}" for name, value in given if value)
        sys.exit(f"draw_architecture: {options.output or PICTURE} is not what the folders are: rewrite it with "
                 f"scripts/draw_architecture.py{again}")
    print(f"draw_architecture: {options.output or PICTURE} is what the folders are")


if __name__ == "__main__":
    main()
