"""The right values on the errata page are computed again, in 40 digits."""
import io
import math
import re
from collections import Counter
from decimal import Decimal as D
from decimal import getcontext

import pytest

from conftest import ROOT
from tformer.bpe import pretokenize, split_special, train_bpe

PAGE = (ROOT / "book" / "errata.md").read_text(encoding="utf-8")
getcontext().prec = 40
ROWS = [[D("0.1"), D("0.3")], [D("0.4"), D("0.6")], [D("0.7"), D("0.9")]]


def right(number):
    "The third cell of an entry."
    line = re.search(rf"^\| \[{number}\].*$", PAGE, re.M)[0]
    return re.split(r"(?<!\\)\|", line)[3]


def numbers(number):
    text = right(number).replace("−", "-")
    found = re.findall(r"(?<![\w√.,])-?\d+(?:,\d{3})*(?:\.\d+)?"
                       r"(?:e-\d+)?", text)
    return [D(n.replace(",", "")) for n in found]


def close(shown, exact):
    "Whether a printed number is the exact one, rounded where it ends."
    exponent = shown.as_tuple().exponent
    return abs(shown - exact) <= D((0, (5,), exponent - 1))


def matmul(a, b):
    return [[sum(p * q for p, q in zip(r, c)) for c in zip(*b)] for r in a]


def transposed(a):
    return [list(c) for c in zip(*a)]


def shares(scores):
    e = [s.exp() for s in scores]
    return [x / sum(e) for x in e]


def block(first, rows, cols):
    return [[D(first + cols * r + c) / 10 for c in range(cols)]
            for r in range(rows)]


def head(first, scale=D(1)):
    "q, k, v, scores, weights, output of one head of the second example."
    wq, wk, wv = (block(first + 8 * i, 4, 2) for i in range(3))
    q, k, v = (matmul(x, w) for x, w in (
        (block(5, 1, 4), wq), (block(1, 3, 4), wk), (block(13, 3, 4), wv)))
    scores = matmul(q, transposed(k))[0]
    weights = shares([s * scale for s in scores])
    return q[0], k, v, scores, weights, matmul([weights], v)[0]


def flat(rows):
    return [x for row in rows for x in row]


def attended(scale):
    scores = matmul(ROWS, transposed(ROWS))
    weights = [shares([s * scale for s in row]) for row in scores]
    return scores, weights, matmul(weights, ROWS)


PLAIN, SCALED = D(1), 1 / D(2).sqrt()
ONE, TWO = head(1), head(25)
ONE_S, TWO_S = head(1, SCALED), head(25, SCALED)
EXPECTED = {
    "TOY-01": flat(attended(PLAIN)[0]),
    "TOY-02": flat(attended(PLAIN)[1]),
    "TOY-03": flat(attended(PLAIN)[2]),
    "TOY-04": flat(attended(SCALED)[2]),
    "TOY-05": ONE[0],
    "TOY-06": ONE[1][1],
    "TOY-07": ONE[2][1] + ONE[2][2],
    "TOY-08": TWO[2][2],
    "TOY-09": ONE[3],
    "TOY-10": TWO[3],
    "TOY-11": ONE[4],
    "TOY-12": TWO[4] + TWO_S[4],
    "TOY-13": ONE[5],
    "TOY-14": TWO[5],
    "TOY-15": ONE_S[5] + TWO_S[5],
    "TOY-16": ONE_S[5] + TWO_S[5],
}


@pytest.mark.parametrize("number", EXPECTED)
def test_values_are_right(number):
    exact = EXPECTED[number]
    shown = numbers(number)[:len(exact)]
    if number == "TOY-15":
        shown = [n for n in numbers(number) if n > 2]
    assert len(shown) == len(exact)
    for a, b in zip(shown, exact):
        assert close(a, b), f"{number}: {a} is printed, {b:.12g} is right"


def test_saturation_is_as_said():
    assert "one-hot to 26 digits" in right("TOY-16")
    rest = 1 - TWO_S[4][2]
    assert D("1e-27") < rest < D("1e-26")


def test_every_entry_is_listed_once():
    for kind, n in (("TOY", 16), ("TOK", 19), ("POS", 29), ("ATT", 28)):
        found = re.findall(rf"^\| \[({kind}-\d\d)\]", PAGE, re.M)
        assert found == [f"{kind}-{i:02}" for i in range(1, n + 1)]


def test_tokenizer_values_are_right():
    runs = [("aa", 4, 2), ("ab", 2, 2)]
    text = "aaabdaaabac"
    overlapping = Counter(zip(text, text[1:]))
    for pair, with_overlap, without in runs:
        assert overlapping[tuple(pair)] == with_overlap
        assert text.count(pair) == without
    assert numbers("TOK-12") == [4, 2, 2]
    assert numbers("TOK-13") == [256, 0, 255, 256]
    assert pretokenize("DON'T") == ["DON", "'", "T"]
    with pytest.raises(re.error):
        re.compile(r"\p{L}")
    whole = pretokenize("a\n\n\nb")
    cut = pretokenize("a\n") + pretokenize("\n\nb")
    assert (len(whole), len(cut)) == (4, 5) and "four" in right("TOK-08")
    assert io.TextIOWrapper(io.BytesIO(b"a\r\nb")).read() == "a\nb"
    assert split_special("x<|a|><|b|>y", ["<|a|>", "<|a|><|b|>"]) == [
        "x", "<|a|><|b|>", "y"]
    assert close(D("3.614"), D("373.58") / D("103.37"))
    assert "3.614" in right("TOK-18")
    assert ord("ê") == 0xEA and len("e\u0302") == 2
    assert train_bpe("ab cd", 257)[0] != train_bpe("ab cd", 257,
                                                   ties="ids")[0]


def cosines(offset, d):
    "Sum of cos(offset / 10000^(2k/d)) over the pairs of columns."
    return math.fsum(math.cos(offset / 10_000 ** (2 * k / d))
                     for k in range(d // 2))


NEMOTRON = dict(d=18_432, n=4_096)
# what is right, computed here by plain Python, in the order of the page

VALUES = {
    "POS-08": [2 * cosines(k, 64) for k in (0, 1, 2, 8, 64)]
    + [2 * math.fsum(math.cos(k * i) for i in range(32))
       for k in (0, 1, 2, 8, 64)]
    + [4095 * 10_000 ** (-62 / 64), 4095 * 31],
    "POS-14": [256, *(cosines(k, 512) for k in (1, 2, 10, 64))],
    "POS-15": [math.cos(10), math.cos(10 / 10_000 ** (1 / 512))],
    "POS-16": [math.sqrt(2 * 512), math.sqrt(2 * 256), math.sqrt(2)],
    "POS-20": [cosines(1, 512), cosines(45, 512)],
    "POS-21": [cosines(10, 512)],
    "POS-26": [2 * math.pi, *(2 * math.pi * 10_000 ** (1 - 2 / d)
                              for d in (64, 128))],
    "ATT-13": [4 * 4096 ** 2],
    "ATT-21": [512 // 8],
    "ATT-22": [4 * NEMOTRON["d"] / (4 * NEMOTRON["d"] + 2 * NEMOTRON["n"])],
    "ARC-06": [12 * 512 ** 2, 8 * 512 ** 2],
    "ARC-13": [int(8 * 512 / 3), int(8 * 4096 / 3),
               64 * round(8 * 512 / 3 / 64), 64 * round(8 * 4096 / 3 / 64)],
    "ARC-15": [2 * 512 * 2048 + 2048 + 512,
               4 * (512 ** 2 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512],
}


@pytest.mark.parametrize("number", VALUES)
def test_values_of_the_parts_are_right(number):
    shown = [n for n in numbers(number)]
    for value in VALUES[number]:
        exact = D(value)
        assert any(close(n, exact) for n in shown), \
            f"{number}: {value:.10g} is right, not among {shown}"


def test_the_least_value_of_silu_is_right():
    place, least = D("-1.278465"), D("-0.278465")
    sigmoid = 1 / (1 + (-place).exp())
    slope = sigmoid * (1 + place * (1 - sigmoid))
    assert abs(slope) < D("1e-6") and close(least, place * sigmoid)
    assert {place, least} <= set(numbers("ARC-20"))
    assert least in numbers("ARC-21")
