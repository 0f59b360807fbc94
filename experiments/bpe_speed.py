"""Training a byte-pair tokenizer: what do processes gain, and what do kept counts?

    python experiments/bpe_speed.py path/to/sample.txt      on a quiet machine
    python experiments/bpe_speed.py some.txt --megabytes 1 --rounds 1 --out some.csv

Two changes make the training of a tokenizer faster: pre-tokens are cut and counted
in several processes (`processes`, 1 or 2), and the counts of pairs are kept up to
date in the words that a merge touches (`counting` is "kept") instead of being
counted again in all words after each merge ("again"). Each round trains with
neither change, with each of them and with both, in turn. All four count each
distinct word once, look for the best pair among all pairs, and find the same merges.

The corpora are 22 million bytes of stories of the course (level 1), and a sample of
TinyStories (Eldan and Li, 2023), a text file in which <|endoftext|> stands between
two stories and of which nothing is kept. It is read as it is: it is as large as its
`bytes` say. `vocabulary` is the size that was asked for or, where no pair was left
before, the size that was reached.

Seconds are those of the clock, medians of the rounds with the lowest and the highest
beside them: `pretokenize` until the words are counted, with the start of the
processes, `merge` from there to the last merge, `total` both. The rows go to
tformer/records/bpe_speed.csv. Without a path the script says so and ends.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from operator import add
from pathlib import Path
from statistics import median

import torch

import common
from tformer.corpora import stories
from tformer.text.bpe_trainer import (
    count_source_pretokens,
    index_pairs,
    learn_merges,
    merge_pair_in_words,
)
from tformer.text.pretokenizer import split_pretokens
from tformer.text.vocabulary import bytes_to_chars

OUT = common.RECORDS / "bpe_speed.csv"
END = "<|endoftext|>"
MEGABYTES = 22
VOCAB = 2000
ROUNDS = 3
PROCESSES = 2
FORMS = ((1, "again"), (PROCESSES, "again"), (1, "kept"), (PROCESSES, "kept"))


def best_of(total, vocab):
    "The most frequent pair; among equals the greatest by its bytes."
    return max(total, key=lambda p: (total[p], vocab[ord(p[0])], vocab[ord(p[1])]))


def merge_and_count_again(words, n_merges):
    "Merges, with all pairs of all distinct words counted again for each."
    texts = [bytes_to_chars(word) for word in words]
    n = list(words.values())
    vocab = {i: bytes([i]) for i in range(256)}
    merges = []
    for new in range(256, 256 + n_merges):
        total = defaultdict(int)
        for text, times in zip(texts, n, strict=True):
            for pair in map(add, text, text[1:]):
                total[pair] += times
        if not total:
            break
        best = best_of(total, vocab)
        texts = [text.replace(best, chr(new)) for text in texts]
        merges.append(tuple(vocab[ord(c)] for c in best))
        vocab[new] = b"".join(merges[-1])
    return merges


def merge_with_kept_counts(words, n_merges):
    "Merges, with the counts kept up to date in the words that hold the pair."
    texts = [bytes_to_chars(word) for word in words]
    n = list(words.values())
    total, where = index_pairs(texts, n)
    vocab = {i: bytes([i]) for i in range(256)}
    merges = []
    for new in range(256, 256 + n_merges):
        best = best_of(total, vocab) if total else None
        if best is None or not total[best]:
            break
        merge_pair_in_words(best, chr(new), texts, n, total, where)
        merges.append(tuple(vocab[ord(c)] for c in best))
        vocab[new] = b"".join(merges[-1])
    return merges


MERGING = {"again": merge_and_count_again, "kept": merge_with_kept_counts}


def write_stories(path, num_bytes):
    "Stories of the course with END between them, so many bytes and a few."
    size = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for text in stories.generate_stories(None, seed=0, level=1):
            size += file.write(f"{text}{END}\n")
            if size >= num_bytes:
                return


def one_run(path, processes, counting, vocab):
    "Seconds of both parts, the words and the merges."
    began = time.perf_counter()
    words = count_source_pretokens(path, frozenset([END]), num_workers=processes)
    counted = time.perf_counter()
    merges = MERGING[counting](words, vocab - 257)
    return (counted - began, time.perf_counter() - counted), words, merges


def measure(name, path, args):
    "The rows of one corpus."
    took = {form: [] for form in FORMS}
    for _ in range(args.rounds):
        found = []
        for form in FORMS:
            seconds, words, merges = one_run(path, *form, args.vocab)
            took[form].append((*seconds, sum(seconds)))
            found.append(merges)
        if any(merges != found[0] for merges in found):
            raise SystemExit(f"{name}: the merges of the four forms differ")
    if found[0] != learn_merges(words, args.vocab - 257):
        raise SystemExit(f"{name}: the merges are not those of learn_merges")
    for form, runs in took.items():
        row = {
            "corpus": name,
            "bytes": path.stat().st_size,
            "processes": form[0],
            "counting": form[1],
        }
        parts = ("pretokenize", "merge", "total")
        for part, seconds in zip(parts, zip(*runs, strict=True), strict=True):
            row |= {
                f"{part}_seconds": f"{median(seconds):.3f}",
                f"{part}_lowest": f"{min(seconds):.3f}",
                f"{part}_highest": f"{max(seconds):.3f}",
            }
        print(*row.values(), flush=True)
        yield row | {
            "words": sum(words.values()),
            "distinct": len(words),
            "vocabulary": 257 + len(found[0]),
            "rounds": args.rounds,
            "cores": os.cpu_count(),
            "processor": common.processor(),
            **common.about(),
        }


def main():
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("sample", type=Path, nargs="?")
    made.add_argument("--megabytes", type=float, default=MEGABYTES)
    made.add_argument("--vocab", type=int, default=VOCAB)
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--out", type=Path, default=OUT)
    args = made.parse_args()
    common.skip_without(args.sample, "a text file of TinyStories")
    torch.set_num_threads(1)
    split_pretokens("an é")  # builds the pattern, which then is kept
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "stories.txt")
        write_stories(own, round(args.megabytes * 1_000_000))
        for name, path in (("stories", own), ("tinystories", args.sample)):
            rows += measure(name, path, args)
            common.write(rows, args.out)


if __name__ == "__main__":
    main()
