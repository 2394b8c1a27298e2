"""Phalanx's tokenizer against the `tokenizers` package, one thread each, in turns, on one text.

    python benchmarks/tokenizer_speed.py --program build/release/bin/tokenizer_speed --text corpus.txt --rounds 5

    python benchmarks/tokenizer_speed.py --program build/release/bin/tokenizer_speed --text corpus.txt --family llama2

Both use the tokenizer.json that Phalanx trains first, or one of a kind of scripts/tokenizer_families.py, which the package
trains on the first half of the text. Figures are MB/s of CPU time, the median of the rounds. The
package gets the text whole (these ids are compared) and in documents of about 20 kB; the ratio is to the better one.
"""

import argparse
import array
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

from tokenizers import Tokenizer  # noqa: E402  (reads the environment when it is imported)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
import tokenizer_families  # noqa: E402


def documents(text, size):
    """Cuts before line breaks."""
    parts, start = [], 0
    while start < len(text):
        end = start + size
        while end < len(text) and not (text[end] == "\n" and not text[end - 1].isspace()):
            end += 1
        parts.append(text[start:end])
        start = end
    return parts


def peer(tokenizer, texts):
    """CPU seconds of the package's fastest call (no offsets), and the ids, whose copying to Python is not timed."""
    start = time.process_time()
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    seconds = time.process_time() - start
    return seconds, [token for encoding in encodings for token in encoding.ids]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokenizer", help="use this file and do not train one")
    parser.add_argument("--family", choices=list(tokenizer_families.FAMILIES), help="train one of this kind")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    raw = pathlib.Path(arguments.text).read_bytes()
    text = raw.decode()
    megabytes = len(raw) / 1e6
    ours, whole, split, result = [], [], [], {"megabytes": megabytes}
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.tokenizer or os.path.join(folder, "tokenizer.json")
        ids_path = os.path.join(folder, "ids")

        def run(*options):
            done = subprocess.run([arguments.program, arguments.text, *options], check=True, capture_output=True, text=True)
            return json.loads(done.stdout)

        if arguments.family:
            tokenizer_families.train_on(documents(text[: len(text) // 2], 20000), arguments.vocab_size)
            pathlib.Path(path).write_text(tokenizer_families.FAMILIES[arguments.family]().to_str())
        elif not arguments.tokenizer:
            result.update(run("--train", str(arguments.vocab_size), path))
        tokenizer = Tokenizer.from_file(path)
        parts = documents(text, 20000)
        for _ in range(arguments.rounds):
            ours.append(run("--encode", path, ids_path))
            seconds, _ = peer(tokenizer, parts)
            split.append(megabytes / seconds)
            seconds, ids = peer(tokenizer, [text])
            whole.append(megabytes / seconds)
        found = array.array("i", pathlib.Path(ids_path).read_bytes()).tolist()
        result["ids_equal"] = found == ids
    result["round_trip"] = all(run["round_trip"] for run in ours)
    result["tokens"] = ours[0]["tokens"]
    for key in ("encode_mb_s", "decode_mb_s", "load_s"):
        result[key] = round(statistics.median(run[key] for run in ours), 4)
    result["tokenizers_documents_mb_s"] = round(statistics.median(split), 2)
    result["tokenizers_whole_mb_s"] = round(statistics.median(whole), 2)
    best = max(result["tokenizers_documents_mb_s"], result["tokenizers_whole_mb_s"])
    result["ratio"] = round(result["encode_mb_s"] / best, 2)
    print(f"{'':24}{'MB/s':>10}\n{'Phalanx encode':24}{result['encode_mb_s']:10.1f}\n{'Phalanx decode':24}"
          f"{result['decode_mb_s']:10.1f}\n{'tokenizers, documents':24}{result['tokenizers_documents_mb_s']:10.1f}\n"
          f"{'tokenizers, whole':24}{result['tokenizers_whole_mb_s']:10.1f}\nratio {result['ratio']}, ids equal: "
          f"{result['ids_equal']}, round trip: {result['round_trip']}")
    print(json.dumps(result))
    return 0 if result["ids_equal"] and result["round_trip"] else 1


if __name__ == "__main__":
    sys.exit(main())
