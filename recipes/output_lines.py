"""Lines that a program is to print, and whether it has printed them; check_output.py says how they are written."""
import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]\d+)?")
ANY_TEXT = re.compile(r"<[^<>]+>")
ONE_WORD = re.compile(r"(?<!\S)<[^<> ]+>(?!\S)")
ANY_UNIT = re.compile(r" ?(ms|s|seconds|us|tokens/s|.?B/s|x the|times)\b")
ANY_NUMBER_OF = "* "


def commands_of(text, ending):
    """[(command, expected lines)]"""
    found, lines, mark = [], None, {".md": "    ", ".cc": "//", ".txt": ""}.get(ending, "#")
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if ending == ".md" and not line.startswith(mark):
            lines = lines if not line else None
            continue
        if not line.startswith(mark):
            break
        text = line.removeprefix(mark).strip()
        if text.startswith("$ "):
            lines = []
            found.append((text[2:], lines))
        elif not text:
            lines = lines if ending == ".txt" else None
        elif lines is not None:
            lines.append(text)
    return found


def is_close(expected, found, tolerance):
    places = len(expected.partition(".")[2])
    difference = abs(float(expected) - float(found))
    return difference <= max(2.001 * 10**-places, tolerance * abs(float(expected)))


def pattern_of(expected):
    """A regular expression with a group for each number outside of < >, and where these numbers stand in the line."""
    pattern, numbers, end = "", [], 0
    for part in re.finditer(f"{ANY_TEXT.pattern}|{NUMBER.pattern}", expected):
        is_number = part[0][0] != "<"
        numbers += [part] if is_number else []
        any_text = r"\S+" if ONE_WORD.match(expected, part.start()) else ".+"
        pattern += re.escape(expected[end:part.start()]) + (f"({NUMBER.pattern})" if is_number else any_text)
        end = part.end()
    return pattern + re.escape(expected[end:]), numbers


def line_matches(expected, found, tolerance):
    expected, found = " ".join(expected.split()), " ".join(found.split())
    pattern, numbers = pattern_of(expected)
    match = re.fullmatch(pattern, found)
    for a, b in zip(numbers, match.groups() if match else ()):
        is_measured = ANY_UNIT.match(expected, a.end()) or expected[: a.start()].endswith("speed-up ")
        if is_measured or "e" in a[0] or "e" in b:
            continue
        may_differ = "Accuracy" in expected[: a.start()] or ("." in a[0] and "." in b)
        if a[0] != b and not (may_differ and is_close(a[0], b, tolerance)):
            return False
    return match is not None


def output_matches(expected, found, tolerance=0.01):
    if not expected:
        return not found
    if expected[0] == "...":
        return any(output_matches(expected[1:], found[i:], tolerance) for i in range(len(found) + 1))
    if expected[0].startswith(ANY_NUMBER_OF):
        line = expected[0].removeprefix(ANY_NUMBER_OF)
        count = 0
        while count < len(found) and line_matches(line, found[count], tolerance):
            count += 1
        return any(output_matches(expected[1:], found[i:], tolerance) for i in range(count, -1, -1))
    if not found or not line_matches(expected[0], found[0], tolerance):
        return False
    return output_matches(expected[1:], found[1:], tolerance)


def first_difference(expected, found, tolerance=0.01):
    """(the first expected line that is not there, the line in its place); either is None where there is none."""
    begin = max(i for i in range(len(expected) + 1) if output_matches([*expected[:i], "..."], found, tolerance))
    ends = [i for i in range(len(found) + 1) if output_matches(expected[:begin], found[:i], tolerance)]
    return next(iter(expected[begin:]), None), next(iter(found[ends[-1]:]), None)


def self_test():
    assert output_matches(["a 1.50, 2", "...", "z"], ["a 1.51, 2", "b", "z"])
    steps = ["a", "* step <N>", "* b 2", "c"]
    assert output_matches(steps, ["a", "step 1", "step 2", "c"]) and output_matches(steps, ["a", "b 2", "c"])
    for wrong in (["a", "b 3", "c"], ["a", "b 2", "step 1", "c"], ["a", "step 1"], ["a", "d", "c"]):
        assert not output_matches(steps, wrong), wrong
    assert output_matches(["a 1.50"], ["a 1.51"]) and not output_matches(["a 1.50"], ["a 1.54"])
    assert not output_matches(["a 100"], ["a 101"]) and not output_matches(["a"], ["a", "b"])
    assert not output_matches(["a", "b"], ["a"]) and not output_matches(["the same"], ["NOT the same"])
    assert output_matches(["2.5 ms, 1.1 x the a, by 1.0e-07"], ["9.7 ms, 2.9 x the a, by 0.0e+00"])
    assert not output_matches(["loss 1.5, 2"], ["loss nan, 2"])
    assert output_matches(["  <2> of <3 CPUs>, all"], ["4 of 8 CPUs (a quota), all"])
    assert not output_matches(["<2> of <3>, all"], ["4 of 8"]) and not output_matches(["L1 <48 KiB>"], ["L2 48 KiB"])
    assert output_matches(["a <us> <GB/s> 0 <%>"], ["a 3.1 9 0 17"])
    assert not output_matches(["a <us> <GB/s> 0 <%>"], ["a 3.1 9 2 0 17"])
    assert output_matches(["<any one>: 1.50"], ["b c: 1.51"]) and not output_matches(["<any one>: 1.50"], ["b: 1.54"])
    assert first_difference(steps, ["a", "step 1", "d", "c"]) == ("c", "d")
    assert first_difference(["a"], ["a", "b"]) == (None, "b") and first_difference(["a", "b"], ["a"]) == ("b", None)
    page = commands_of("$ no\n\n    $ a --b \\\n        --c | d\n    one\n\n      two\n\nthree\n\n    four\n", ".md")
    assert page == [("a --b  --c | d", ["one", "two"])], page
    file = commands_of("a remark\n\n$ a # b\none\n\n  two\n$ c\n* three\n", ".txt")
    assert file == [("a # b", ["one", "two"]), ("c", ["* three"])], file
    accuracy = ["Accuracy: 530/534 (99%)"]
    assert output_matches(accuracy, ["Accuracy: 526/534 (98%)"])
    assert not output_matches(accuracy, ["Accuracy: 500/534 (99%)"])
