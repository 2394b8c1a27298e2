#!/usr/bin/env python3
"""Parquet and Arrow files as pyarrow writes them, against the same texts as JSON lines: `phalanx tokenize` must give the
same ids.

    python scripts/parquet_test.py --build build/parquet [--cache build/parquet/python]

Brings pyarrow through pip into --cache (55 MB), builds the program `phalanx` with its Arrow C++ into --build, and encodes
each file twice. Exits with 77 where pyarrow cannot be had, and says so.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pypi_libraries

PYARROW = "pyarrow==26.0.1"
ROOT = pathlib.Path(__file__).resolve().parent.parent


def bring_pyarrow(cache):
    pypi_libraries.bring(cache, [PYARROW])
    return cache / "pyarrow"


def build(folder, pyarrow, jobs):
    flags = [f"-DCMAKE_PREFIX_PATH={ROOT / '.deps'}"] if (ROOT / ".deps/lib/cmake").exists() else []
    subprocess.run(["cmake", "--preset", "release", "-B", folder, f"-DPHALANX_PYARROW={pyarrow}", *flags], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "--parallel", str(jobs), "--target", "phalanx"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    return folder / "bin/phalanx"


def texts():
    """Texts of all lengths, of several scripts, empty ones and nulls."""
    words = "the quick brown fox über naïve 東京 данные 🙂 \"quoted\" a\\b tab\tline\nend".split(" ")
    rows = []
    for number in range(5000):
        length = number * 7919 % 60
        rows.append(" ".join(words[(number * 31 + i * i) % len(words)] for i in range(length)))
        if number % 17 == 3:
            rows[-1] = None
    return rows


class Cases:
    def __init__(self, phalanx, folder):
        self.phalanx, self.folder, self.failures = phalanx, folder, 0
        self.rows = texts()
        self.tokenizer = folder / "tokenizer.json"

    def tokenize(self, *arguments):
        return subprocess.run([str(self.phalanx), "tokenize", *map(str, arguments)], capture_output=True, text=True)

    def say(self, name, problem):
        print(f"{name:<34} {problem or 'as expected'}")
        self.failures += problem is not None

    def same(self, name, path, rows, *options):
        """The file's ids and documents are those of the same rows as JSON lines."""
        lines = self.folder / "rows.jsonl"
        with open(lines, "w") as file:
            for row in rows:
                file.write(json.dumps({"text": row}) + "\n")
        outputs = []
        for source, more in ((lines, []), (path, options)):
            output = self.folder / f"ids{len(outputs)}"
            done = self.tokenize(source, "--tokenizer", self.tokenizer, "--output", output, "--force", *more)
            if done.returncode != 0:
                return self.say(name, done.stderr.strip())
            outputs.append([pathlib.Path(f"{output}{ending}").read_bytes() for ending in (".bin", ".idx")])
        self.say(name, None if outputs[0] == outputs[1] else "other ids than as JSON lines")

    def refused(self, name, path, words, *options):
        done = self.tokenize(path, "--tokenizer", self.tokenizer, "--output", self.folder / "none", *options)
        told = done.returncode == 1 and all(word in done.stderr for word in words)
        self.say(name, None if told else f"status {done.returncode}: {done.stderr.strip()}")


def run(phalanx, folder):
    import pyarrow as pa
    import pyarrow.parquet as pq
    cases = Cases(phalanx, folder)
    rows = cases.rows
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(row for row in rows if row))
    trained = cases.tokenize(corpus, "--tokenizer", cases.tokenizer, "--vocab-size", 400, "--force")
    if trained.returncode != 0:
        raise SystemExit(trained.stderr)

    def write(name, table, **options):
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, **options)
        return path

    def same(name, column, options=(), **how):
        cases.same(name, write("same", pa.table({"text": column}), **how), rows, *options)

    for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
        same(f"compressed by {codec}", pa.array(rows, pa.string()), compression=codec)
    same("row groups of 7 rows", pa.array(rows, pa.string()), row_group_size=7)
    same("one page a few rows", pa.array(rows, pa.string()), data_page_size=64, use_dictionary=False)
    same("data pages of version 2", pa.array(rows, pa.string()), data_page_version="2.0", version="2.6")
    same("large strings", pa.array(rows, pa.large_string()))
    same("views of strings", pa.array(rows, pa.string()).cast(pa.string_view()))
    same("a categorical column", pa.array(rows, pa.string()).dictionary_encode())
    same("a categorical of large strings", pa.array(rows, pa.large_string()).dictionary_encode(), row_group_size=1000)
    beside = {"id": pa.array(range(len(rows))), "meta": pa.array([{"a": 1, "b": [1, 2]}] * len(rows)),
              "text": pa.array(rows, pa.string())}
    cases.same("nested columns before it", write("beside", pa.table(beside)), rows)
    cases.same("another column by --field", write("field", pa.table({"body": rows, "text": ["no"] * len(rows)})), rows, "--field",
               "body")
    data = folder / "set"
    data.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": rows[:2000]}), data / "train-00000-of-00002.parquet")
    pq.write_table(pa.table({"text": rows[2000:]}), data / "train-00001-of-00002.parquet")
    cases.same("a folder of two files", data, rows)

    cases.refused("no such column", write("none", pa.table({"body": rows, "url": rows})), ["\"text\"", "body, url", "--field"])
    cases.refused("a column of numbers", write("numbers", pa.table({"text": [1, 2]})), ["\"text\"", "expected strings", "int64"])
    cases.refused("chat messages", write("chat", pa.table({"messages": [[{"role": "user", "content": "hi"}]]})), ["messages"])
    cases.refused("nothing but nulls", write("nulls", pa.table({"text": pa.array([None] * 9, pa.string())})), ["9 records", "without text"])
    whole = write("cut", pa.table({"text": rows})).read_bytes()
    cut = folder / "cut.parquet"
    cut.write_bytes(whole[:len(whole) // 2])
    cases.refused("half a file", cut, ["cut.parquet"])
    damaged = bytearray(whole)
    damaged[200:5000] = bytes(4800)
    cut.write_bytes(damaged)
    cases.refused("a damaged file", cut, ["cut.parquet"])
    run_arrow(cases, folder)
    return cases.failures


def write_arrow(path, table, rows_a_batch=1000, writer=None, **options):
    import pyarrow as pa
    with pa.OSFile(str(path), "wb") as file, (writer or pa.ipc.new_stream)(file, table.schema, **options) as out:
        out.write_table(table, max_chunksize=rows_a_batch)
    return path


def run_arrow(cases, folder):
    """Files of Arrow's own format, and the folders of them that save_to_disk() of the datasets package writes."""
    import pyarrow as pa
    rows = cases.rows

    def same(name, column, **how):
        cases.same("Arrow: " + name, write_arrow(folder / "same.arrow", pa.table({"text": column}), **how), rows)

    same("a stream", pa.array(rows, pa.string()))
    same("a file", pa.array(rows, pa.string()), writer=pa.ipc.new_file)
    same("batches of 7 rows", pa.array(rows, pa.string()), rows_a_batch=7)
    same("large strings", pa.array(rows, pa.large_string()))
    same("a categorical column", pa.array(rows, pa.string()).dictionary_encode())
    for codec in ("lz4", "zstd"):
        same(f"compressed by {codec}", pa.array(rows, pa.string()), options=pa.ipc.IpcWriteOptions(compression=codec))
    beside = pa.table({"id": pa.array(range(len(rows))), "meta": pa.array([{"a": 1, "b": [1, 2]}] * len(rows)),
                       "body": pa.array(rows, pa.string())})
    cases.same("Arrow: another column by --field", write_arrow(folder / "field.arrow", beside), rows, "--field", "body")

    data = folder / "saved"
    data.mkdir(exist_ok=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_arrow(data / names[0], pa.table({"text": rows[:2000]}))
    write_arrow(data / names[1], pa.table({"text": rows[2000:]}))
    (data / "dataset_info.json").write_text("{}")
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    cases.same("a saved data set", data, rows)
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in reversed(names)]}))
    cases.same("a saved data set, in its own order", data, rows[2000:] + rows[:2000])

    cases.refused("Arrow: no such column", folder / "field.arrow", ["\"text\"", "id, meta, body", "--field"])
    cases.refused("Arrow: a column of numbers", write_arrow(folder / "numbers.arrow", pa.table({"text": [1, 2]})),
                  ["expected strings", "int64"])
    whole = write_arrow(folder / "whole.arrow", pa.table({"text": rows})).read_bytes()
    cut = folder / "cut.arrow"
    for name, size in (("without its end mark", len(whole) - 8), ("half a stream", len(whole) // 2)):
        cut.write_bytes(whole[:size])
        cases.refused(f"Arrow: {name}", cut, ["cut.arrow", "ends too soon"])
    cut.write_bytes(whole + whole)
    cases.refused("Arrow: two streams in a file", cut, ["cut.arrow", "is followed by something else"])
    words = [pa.array(part).dictionary_encode() for part in (rows[:2000], rows[2000:])]  # another dictionary each, with nulls
    cases.same("Arrow: categories that change", write_arrow(folder / "changing.arrow", pa.table(
        {"text": pa.chunked_array(words)}), rows_a_batch=5000), rows)
    cut.write_bytes(write_arrow(folder / "file.arrow", pa.table({"text": rows}), writer=pa.ipc.new_file).read_bytes()[:9000])
    cases.refused("Arrow: half a file", cut, ["cut.arrow"])
    damaged = bytearray(whole)
    damaged[2000:6000] = b"\xff" * 4000
    cut.write_bytes(damaged)
    cases.refused("Arrow: a damaged stream", cut, ["cut.arrow"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/parquet")
    parser.add_argument("--cache", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    folder = arguments.build.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow = bring_pyarrow((arguments.cache or folder / "python").resolve())
    phalanx = build(folder, pyarrow, arguments.jobs)
    scratch = folder / "cases"
    scratch.mkdir(exist_ok=True)
    failures = run(phalanx, scratch)
    print(f"{failures} failures" if failures else "all as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
