"""The right values on the errata page are computed again, in 40 digits."""
import io
import itertools
import json
import math
import re
from collections import Counter
from decimal import Decimal as D
from decimal import getcontext

import pytest
import torch
from torch import nn

import course  # book/_ext, where the conftest of the root looks
from conftest import ROOT
from tformer.bpe import pretokenize_text, split_special, train_bpe

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
    return [
        [sum(p * q for p, q in zip(r, c, strict=True)) for c in zip(*b, strict=False)]
        for r in a
    ]


def transposed(a):
    return [list(c) for c in zip(*a, strict=False)]


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


PLAIN = D(1)
SCALED = 1 / D(2).sqrt()
ONE = head(1)
TWO = head(25)
ONE_S = head(1, SCALED)
TWO_S = head(25, SCALED)
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
    "TRN-05": [(2 * D(10).ln() - 4 * D("0.9999").ln()) / 6, D(10).ln()],
    "TRN-12": [(1 - D("0.9") ** t) / (1 - D("0.999") ** t).sqrt()
               for t in (1, 12, 1000)],
}


@pytest.mark.parametrize("number", EXPECTED)
def test_values_are_right(number):
    exact = EXPECTED[number]
    shown = numbers(number)[:len(exact)]
    if number == "TOY-15":
        shown = [n for n in numbers(number) if n > 2]
    if number in ("TRN-05", "TRN-12"):
        shown = [n for n in numbers(number) if n % 1]
    assert len(shown) == len(exact)
    for a, b in zip(shown, exact, strict=True):
        assert close(a, b), f"{number}: {a} is printed, {b:.12g} is right"


def test_saturation_is_as_said():
    assert "one-hot to 26 digits" in right("TOY-16")
    rest = 1 - TWO_S[4][2]
    assert D("1e-27") < rest < D("1e-26")


def test_every_entry_is_listed_once():
    for kind, n in (("TOY", 16), ("TOK", 19), ("POS", 29), ("ATT", 28),
                    ("ARC", 25)):
        found = re.findall(rf"^\| \[({kind}-\d\d)\]", PAGE, re.M)
        assert found == [f"{kind}-{i:02}" for i in range(1, n + 1)]


def test_tokenizer_values_are_right():
    runs = [("aa", 4, 2), ("ab", 2, 2)]
    text = "aaabdaaabac"
    overlapping = Counter(itertools.pairwise(text))
    for pair, with_overlap, without in runs:
        assert overlapping[tuple(pair)] == with_overlap
        assert text.count(pair) == without
    assert numbers("TOK-12") == [4, 2, 2]
    assert numbers("TOK-13") == [256, 0, 255, 256]
    assert pretokenize_text("DON'T") == ["DON", "'", "T"]
    with pytest.raises(re.error):
        re.compile(r"\p{L}")
    whole = pretokenize_text("a\n\n\nb")
    cut = pretokenize_text("a\n") + pretokenize_text("\n\nb")
    assert (len(whole), len(cut)) == (4, 5) and "four" in right("TOK-08")
    assert io.TextIOWrapper(io.BytesIO(b"a\r\nb")).read() == "a\nb"
    assert split_special("x<|a|><|b|>y", ["<|a|>", "<|a|><|b|>"]) == [
        "x", "<|a|><|b|>", "y"]
    assert close(D("3.614"), D("373.58") / D("103.37"))
    assert "3.614" in right("TOK-18")
    assert ord("ê") == 0xEA and len("e\u0302") == 2
    assert train_bpe("ab cd", 257)[0] != train_bpe("ab cd", 257,
                                                   tie_break="ids")[0]


def cosines(offset, d):
    "Sum of cos(offset / 10000^(2k/d)) over the pairs of columns."
    return math.fsum(math.cos(offset / 10_000 ** (2 * k / d))
                     for k in range(d // 2))


def attention_parameters(d):
    "Queries, keys, values and output, with biases."
    return 4 * (d * d + d)


def base_parameters(final_norms):
    "The stacks of 2017: six layers each, d = 512, d_ff = 2048."
    d = 512
    d_ff = 2048
    forward = 2 * d * d_ff + d_ff + d
    norm = 2 * d
    encoder = attention_parameters(d) + forward + 2 * norm
    decoder = 2 * attention_parameters(d) + forward + 3 * norm
    return 6 * (encoder + decoder) + 2 * final_norms * norm


def xavier(vocab_size, d):
    "The variance, cut off at three standard deviations."
    density = math.exp(-9 / 2) / math.sqrt(2 * math.pi)
    kept = 1 - 6 * density / math.erf(3 / math.sqrt(2))
    return kept * 2 / (vocab_size + d)


def normed(variance, eps=1e-5):
    "Root mean square of what a norm makes of such vectors."
    return math.sqrt(variance / (variance + eps))


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
    "ARC-10": [base_parameters(True), base_parameters(False),
               base_parameters(True) - base_parameters(False)],
    "ARC-12": [xavier(10_000, 512), normed(xavier(10_000, 512)),
               normed(xavier(50_257, 768))],
    "ARC-25": [2.0 ** -5 * (1 + 52 / 128), 2.0 ** -5 / 128, 2 ** 8, 1e-4,
               1 + 1 / 2],
    "ARC-13": [int(8 * 512 / 3), int(8 * 4096 / 3),
               64 * round(8 * 512 / 3 / 64), 64 * round(8 * 4096 / 3 / 64)],
    "ARC-15": [2 * 512 * 2048 + 2048 + 512,
               4 * (512 ** 2 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512],
}


@pytest.mark.parametrize("number", VALUES)
def test_values_of_the_parts_are_right(number):
    shown = list(numbers(number))
    for value in VALUES[number]:
        exact = D(value)
        assert any(close(n, exact) for n in shown), \
            f"{number}: {value:.10g} is right, not among {shown}"


def test_the_least_value_of_silu_is_right():
    place = D("-1.278465")
    least = D("-0.278465")
    sigmoid = 1 / (1 + (-place).exp())
    slope = sigmoid * (1 + place * (1 - sigmoid))
    assert abs(slope) < D("1e-6") and close(least, place * sigmoid)
    assert {place, least} <= set(numbers("ARC-20"))
    assert least in numbers("ARC-21")


def test_xavier_of_a_drawn_table_is_as_computed():
    torch.manual_seed(0)
    for size, row in (((10_000, 512), "0.974"), ((50_257, 768), "0.890")):
        std = math.sqrt(2 / sum(size))
        x = nn.init.trunc_normal_(torch.empty(1000, size[1]), std=std,
                                  a=-3 * std, b=3 * std)
        rms = nn.RMSNorm(size[1], eps=1e-5)(x).square().mean(-1).sqrt()
        assert f"{rms.mean():.3f}" == row
        assert row in right("ARC-12")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_parameters_are_those_of_pytorch():
    whole = nn.Transformer(device="meta")
    bare = nn.ModuleList([whole.encoder.layers, whole.decoder.layers])
    for module, final in ((whole, True), (bare, False)):
        n = sum(p.numel() for p in module.parameters())
        assert n == base_parameters(final)
    assert not whole.batch_first
    assert nn.TransformerEncoderLayer(8, 2).self_attn.dropout == 0.1


def test_output_0_sees_token_4_without_a_mask():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    src = torch.randn(1, 6, 32)
    tgt = torch.randn(1, 5, 32)
    other = torch.cat([tgt[:, :4], torch.randn(1, 1, 32)], 1)
    later = torch.ones(5, 5).triu(1).bool()
    moved = {mask is None: (
        model(src, other, tgt_mask=mask) - model(src, tgt, tgt_mask=mask)
        )[0, 0].abs().max().item() for mask in (None, later)}
    assert moved[True] > 0.01 and moved[False] < 1e-6
    assert "output 0 moves" in right("ARC-14")


def test_masks_fail_as_is_said():
    lower = torch.ones(4, 4).tril().bool()
    with pytest.raises(RuntimeError, match="bool"):
        1 - lower.triu()
    weights = torch.zeros(4, 4).masked_fill(lower, -math.inf).softmax(-1)
    seen = weights > 0                    # of the inverted mask, ARC-07
    assert torch.equal(seen[:3], ~lower[:3])
    assert weights[3].isnan().all() and not weights[:3].isnan().any()
    pads = torch.tensor([False, False, True, True])
    # ARC-08
    joined = ~lower | pads
    met = ~lower & pads
    assert joined[:, 2:].all() and not met[3].any()
    keep = (~pads).expand(4, 4)           # given where True = blocked
    scores = torch.zeros(4, 4).masked_fill(keep, -math.inf)
    assert (scores.softmax(-1)[:, :2] == 0).all()
    everything = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).bool(),
                                               -math.inf)
    assert everything.softmax(-1).isnan().all()


def test_bfloat16_loses_what_is_said():
    w = torch.tensor(0.044).bfloat16()
    after = torch.nextafter(w, torch.tensor(1.0).bfloat16())
    assert D(w.item()) == D("0.0439453125") in numbers("ARC-25")
    assert D((after - w).item()) == D("0.000244140625")
    assert w + 1e-4 == w
    whole = torch.arange(300)
    exact = whole == whole.bfloat16().long()
    assert exact[:257].all() and not exact[257]
    place = torch.arange(64)[:, None]
    angle = place / 10_000 ** (torch.arange(0, 512, 2) / 512)
    sinusoids = torch.cat([angle.sin(), angle.cos()], 1)
    assert abs(sinusoids.square().mean() - 0.5) < 1e-6


def test_a_class_that_is_no_subclass_cannot_call_super_of_another():
    class Other(nn.Module):
        pass

    class Layer(nn.Module):
        def __init__(self):
            super(Other, self).__init__()

    with pytest.raises(TypeError):
        Layer()


def test_links_lead_to_places_that_exist():
    anchors = set()
    for path in course.notebook_paths(ROOT):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                anchors |= set(re.findall(r"^\(([\w-]+)\)=$", "".join(
                    cell["source"]), re.M))
    links = re.findall(r"^\| \[\w{3}-\d\d\]\(([^)]*)\)", PAGE, re.M)
    assert len(links) == 16 + 19 + 29 + 28 + 25 + 10 + 18 + 10 + 7 + 1 + 1
    missing = [link for link in links if (
        link[1:] not in anchors if link[0] == "#"
        else not (ROOT / "book" / link).is_file())]
    assert not missing


def test_values_of_shared_keys_are_right():
    keys = 2 * 96 * 96 * 192 * 4096     # numbers of keys and values, 96 key heads
    bits, gb, gib = numbers("VAR-06")[1:4]
    assert numbers("VAR-06")[0] == 96 and bits == 16 * keys
    assert close(gb, D(2 * keys) / 10**9) and close(gib, D(2 * keys) / 2**30)
    assert 2**37 == 8 * 16 * 2**30
    weights, heads, gb, gib, less = numbers("VAR-13")
    assert weights == 2 * 341 and heads == 8 and less == 96 / 8
    assert close(gb, D(2 * keys) / 12 / 10**9)
    assert close(gib, D(2 * keys) / 12 / 2**30)
    j = range(8)
    assert numbers("VAR-05") == [*[i % 2 for i in j], *[i // 4 for i in j]]


def test_values_of_latent_attention_are_right():
    content, rotary, one, two, three = numbers("VAR-10")[:5]
    assert close(one, 1 / (content + rotary).sqrt())
    assert close(two, 1 / content.sqrt()) and close(three, 1 / rotary.sqrt())


def test_training_values_are_right():
    for n in (4, 100):
        assert close(numbers("TRN-07")[{4: 1, 100: 3}[n]], n * D(50).ln())
    assert close(numbers("TRN-13")[-2],
                 D("1e-8") / (1 - D("0.999")).sqrt())


def test_decoding_values_are_right():
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    before = p.cumsum(0) - p
    assert (before <= 0.75).sum() == 3 and (before < 0.75).sum() == 2
    with pytest.raises(RuntimeError):
        torch.multinomial((torch.tensor([1.0, 2.0]) / 0).softmax(-1), 1)
    z = torch.randn(1, 9)
    with pytest.raises(IndexError):
        z[z < z.topk(3)[0][..., None]] = 0
    gone = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    z = torch.zeros(2, 4)
    z[:, gone.nonzero()[:, 1]] = 1
    assert z.all()                      # each row lost what the other lost
