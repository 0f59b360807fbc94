"""Compare the tokenizer with its peers: python -m tests.bench.bench_tokenizer

Every row is a ratio of two things run in turn in this process, each with its
median over the rounds. Times are seconds of processor time (all threads and
child processes); the rows about processes are wall time. Each peer gets the
same pre-tokens in the way that is fastest for it, found by trying: the text
is cut where GPT-2's pattern must break, into pieces of several sizes.

BENCH_TEXT=path   a natural text, UTF-8 (default: ``tformer.corpora.stories``, level 3)
--quick           small sizes, one round: that everything runs, not how fast
--only WORD       only the rows whose section holds the word
"""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))
import itertools

import timing
from tformer.base.workers import map_ordered
from tformer.corpora import stories
from tformer.text import bpe
from tformer.text.bpe_trainer import count_source_pretokens
from tformer.text.pretokenizer import split_stream
from tformer.text.tokenizer import Tokenizer
from tformer.text.tokenizer_files import printable_to_bytes
from tformer.text.vocabulary import build_merge_tables, bytes_to_chars, merge_short
from timing import AT_LEAST, AT_MOST, fastest, head, in_turn, once, row


def natural_text():
    path = os.environ.get("BENCH_TEXT")
    if path:
        return Path(path).read_bytes().decode("utf-8"), path
    return stories.story_corpus(2_000_000, level=3), "tformer.corpora.stories, level 3"


def repeated(text, size):
    return (text * (size // len(text) + 1))[:size]


def cut(text, size):
    return list(split_stream([text], size=size))


def hf_untrained():
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return hf


def hf_train(chunks, vocab_size, parallel=False):
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
    hf = hf_untrained()
    hf.train_from_iterator(
        chunks,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return hf


def hf_merges(hf):
    return [
        tuple(map(printable_to_bytes, pair))
        for pair in json.loads(hf.to_str())["model"]["merges"]
    ]


def our_train(source, vocab_size, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Tokenizer.train(
            source, vocab_size, progress=False, tie_break="ids", **options
        )


def hf_ways(text, vocab_size):
    sizes = [4000] if timing.quick else [1000, 10_000, 100_000]
    return {
        (size, parallel): lambda c=cut(text, size), p=parallel: hf_train(
            c, vocab_size, p
        )
        for size in sizes
        for parallel in (False, True)
    }


def bench_training(text):
    head("training: processor time, ours / tokenizers")
    vocab = 600 if timing.quick else 10_000
    for size, target in ((5_000_000, 0.8), (20_000_000, 0.6)):
        size = size // 100 if timing.quick else size
        whole = repeated(text, size)
        ways = hf_ways(whole, vocab)
        best = fastest(ways)
        same = our_train([whole], vocab).vocab.merges == hf_merges(ways[best]())
        t = in_turn({"ours": lambda: our_train([whole], vocab), "hf": ways[best]}, 5)
        row(
            f"{size / 1e6:g} MB, V = {vocab:,}",
            t["ours"] / t["hf"],
            (AT_MOST, target),
            f"{t['ours']:.2f} s / {t['hf']:.2f} s, pieces of {best[0]:,}, "
            f"{'threads' if best[1] else 'one thread'}; same merges: {same}",
        )


def hard_words(n):
    "Distinct words of two to five syllables, from a fixed seed."
    rng = random.Random(0)
    words = {}
    starts = "b c d f g h l m n p r s t v w th ch st tr pl gr sh".split()
    vowels = "a e i o u ea ou ai".split()
    ends = ["", "", "n", "s", "r", "t", "l", "nd", "ng", "rs", "m"]
    while len(words) < n:
        words[
            "".join(
                rng.choice(starts) + rng.choice(vowels) + rng.choice(ends)
                for _ in range(rng.choice((2, 2, 3, 3, 4, 5)))
            )
        ] = None
    return list(words)


def bench_hard(_):
    head("training, hard case: processor time, ours / tokenizers")
    n, vocab = (2000, 600) if timing.quick else (235_000, 10_000)
    text = " ".join(hard_words(n))
    chunks = cut(text, 10_000)
    same = our_train([text], vocab).vocab.merges == hf_merges(hf_train(chunks, vocab))
    t = in_turn(
        {
            "ours": lambda: our_train([text], vocab),
            "hf": lambda: hf_train(chunks, vocab),
        },
        3,
    )
    row(
        f"{n:,} distinct words, V = {vocab:,}",
        t["ours"] / t["hf"],
        (AT_MOST, 3),
        f"{t['ours']:.2f} s / {t['hf']:.2f} s; same merges: {same}",
    )


def bench_encoding(text):
    head("encoding: speed, ours / peer")
    text = text[:40_000] if timing.quick else text
    tok = our_train([text], 600 if timing.quick else 10_000)
    tik = tiktoken.Encoding("peer", **tok.to_tiktoken())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        tok.to_hf(path)
        hf = tokenizers.Tokenizer.from_file(str(path))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sizes = [1000, 10_000, 100_000]
    tik_ways = {"whole": lambda: tik.encode_ordinary(text)} | {
        size: lambda c=cut(text, size): [
            i for part in c for i in tik.encode_ordinary(part)
        ]
        for size in sizes
    }
    hf_ways = {
        size: lambda c=cut(text, size): [
            i for e in hf.encode_batch_fast(c) for i in e.ids
        ]
        for size in [300, *sizes]
    }
    tik_best = fastest(tik_ways)
    hf_best = fastest(hf_ways)
    ids = tok.encode(text)
    same = ids == tik_ways[tik_best]() == hf_ways[hf_best]()
    rounds = 7
    fresh = iter([pickle.loads(pickle.dumps(tok)) for _ in range(rounds)])
    t = in_turn(
        {
            "warm": lambda: tok.encode(text),
            "cold": lambda: next(fresh).encode(text),
            "tik": tik_ways[tik_best],
            "hf": hf_ways[hf_best],
        },
        rounds,
    )
    for name, peer, target in (
        ("warm", "tik", 0.5),
        ("cold", "tik", 0.35),
        ("warm", "hf", 2.5),
        ("cold", "hf", None),
    ):
        way = tik_best if peer == "tik" else hf_best
        row(
            f"{name}, against {'tiktoken' if peer == 'tik' else 'tokenizers'}",
            t[peer] / t[name],
            target and (AT_LEAST, target),
            f"{len(text) / t[name] / 1e6:.1f} / "
            f"{len(text) / t[peer] / 1e6:.1f} M characters/s, peer fed "
            f"{way if way == 'whole' else f'pieces of {way:,}'}; "
            f"same ids: {same}",
        )
    seconds, ids = once(lambda: tok.encode("a" * 1_000_000))
    row(
        "one letter, 1,000,000 times: seconds",
        seconds,
        (AT_MOST, 2),
        f"{len(ids):,} ids",
    )


def spin(n):
    for _i in range(n):
        pass


def bench_processes(text):
    head("two processes: wall time, one / two")
    whole = repeated(text, 400_000 if timing.quick else 20_000_000)
    documents = cut(whole, 2000)
    tok = our_train([text], 600 if timing.quick else 10_000)
    tok.encode(text)
    t = in_turn(
        {n: lambda n=n: list(map_ordered(spin, [3_000_000] * 4, n)) for n in (1, 2)},
        3,
        time.perf_counter,
    )
    row(
        "a bare loop: what this machine can give",
        t[1] / t[2],
        None,
        f"{t[1]:.2f} s / {t[2]:.2f} s",
    )
    works = {
        "pre-tokenization": lambda n: count_source_pretokens([whole], num_workers=n),
        "encoding": lambda n: tok.encode_batch(documents, num_workers=n),
    }
    for name, work in works.items():
        same = work(1) == work(2)
        both = {n: lambda n=n: work(n) for n in (1, 2)}
        t = in_turn(both, 5, time.perf_counter)
        c = in_turn(both, 3)
        row(
            name,
            t[1] / t[2],
            (AT_LEAST, 1.6),
            f"{t[1]:.2f} s / {t[2]:.2f} s by the clock at a load of "
            f"{os.getloadavg()[0]:.1f}; processor time {c[1]:.2f} s / "
            f"{c[2]:.2f} s, so at most {2 * c[1] / c[2]:.2f} x on two free "
            f"cores; same result: {same}",
        )


def count_and_merge(lists, pairs_seen, new):
    "One merge of the plain trainer: count all pairs, replace the best one."
    pairs = {}
    for ids in lists:
        for pair in itertools.pairwise(ids):
            if pair in pairs:
                pairs[pair] += 1
            else:
                pairs[pair] = 1
    left, right = max(pairs, key=lambda p: (pairs[p], p))
    for ids in lists:
        i = 0
        while i < len(ids) - 1:
            if ids[i] == left and ids[i + 1] == right:
                ids[i : i + 2] = [new]
            i += 1
    pairs_seen.append((left, right))


def bench_plain(text):
    head(
        "training against the plain trainer (one list per occurrence, "
        "all pairs counted again at every merge)"
    )
    size, vocab = (100_000, 600) if timing.quick else (22_000_000, 10_000)
    whole = repeated(text, size)
    ours, tok = once(lambda: our_train([whole], vocab))
    words = bpe.pretokenize_text(whole)
    rules = build_merge_tables(tok.vocab.merges)
    lists = [list(word.encode()) for word in words]
    first = median(
        once(lambda: count_and_merge(lists, [], 256 + k))[0]
        for k in range(1 if timing.quick else 3)
    )
    # the same lists as they are when all merges but the last have been made
    done = {w: [*map(ord, merge_short(bytes_to_chars(w), rules))] for w in set(words)}
    lists = [done[word][:] for word in words]
    if not any(len(ids) > 1 for ids in lists):
        lists.append([0, 1])
    last = once(lambda: count_and_merge(lists, [], 256 + vocab))[0]
    n = len(tok.vocab.merges)
    row(
        f"{size / 1e6:g} MB, V = {vocab:,}, at least",
        n * last / ours,
        (AT_LEAST, 1000),
        f"{n:,} merges at {first:.2f} s (the first ones, "
        f"measured) to {last:.2f} s (the last one, measured): extrapolated "
        f"to {n * last:,.0f} to {n * first:,.0f} s; ours {ours:.2f} s",
    )


# the largest memory since the program began; ``ru_maxrss`` is inherited
STREAM = """
import re, resource, sys, time
from pathlib import Path
from tformer.text.pretokenizer import read_text_chunks
from tformer.text.tokenizer import Tokenizer
tok = Tokenizer.load(sys.argv[1])
count, start = 0, time.process_time()
for id in tok.encode_iterable(read_text_chunks(sys.argv[2])):
    count += 1
status = Path("/proc/self/status")
peak = (int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
        if status.exists() else
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(count, peak // 1024, time.process_time() - start)
"""


def bench_stream(text):
    head("encode_iterable on files: largest memory of the process")
    tok = our_train([text[:300_000]], 2000)
    with tempfile.TemporaryDirectory() as folder:
        vocab = Path(folder, "t.json")
        path = Path(folder, "text.txt")
        tok.save(vocab)
        peaks = []
        for size in (
            (200_000, 2_000_000)
            if timing.quick
            else (2_000_000, 20_000_000, 200_000_000)
        ):
            with open(path, "w", encoding="utf-8", newline="") as file:
                for _ in range(-(-size // len(text))):
                    file.write(text)
            out = subprocess.run(
                [sys.executable, "-c", STREAM, str(vocab), str(path)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            peaks.append(int(out[1]))
            print(
                f"{path.stat().st_size / 1e6:>8.1f} MB: {int(out[0]):>12,} "
                f"ids, {out[1]} MiB, {float(out[2]):.1f} s"
            )
        row(
            "memory, longest / shortest file", peaks[-1] / peaks[0], (AT_MOST, 1.25), ""
        )


BENCHES = [
    bench_training,
    bench_hard,
    bench_encoding,
    bench_processes,
    bench_plain,
    bench_stream,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    timing.quick = options.quick
    text, name = natural_text()
    text = text[:100_000] if timing.quick else text
    print(
        f"text: {name}, {len(text):,} characters, repeated where longer; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; tokenizers "
        f"{tokenizers.__version__}, tiktoken {tiktoken.__version__}, Python "
        f"{sys.version.split()[0]}"
    )
    for bench in BENCHES:
        if options.only in bench.__name__:
            bench(text)


if __name__ == "__main__":
    main()
