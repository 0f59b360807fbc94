"""The right values on the errata page are computed again, and failures seen again."""

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
from tformer.costs import ACCELERATORS, decode_workload, estimate_costs
from tformer.inference.logits import apply_top_p
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import LlamaConfig
from tformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tformer.nn.attention import SelfAttention
from tformer.nn.embedding import Embedding, SinusoidalPositionEmbedding
from tformer.nn.functional import attend, causal_mask
from tformer.nn.static_cache import StaticLayerCache
from tformer.tasks.masked_lm import mask_tokens
from tformer.text.bpe import pretokenize_text, split_special, train_bpe
from tformer.training.losses import cross_entropy
from tformer.training.optimizers import AdamW, param_groups

PAGE = (ROOT / "book" / "errata.md").read_text(encoding="utf-8")
getcontext().prec = 40
ROWS = [[D("0.1"), D("0.3")], [D("0.4"), D("0.6")], [D("0.7"), D("0.9")]]


def right(number):
    "The third cell of an entry."
    line = re.search(rf"^\| \[{number}\].*$", PAGE, re.M)[0]
    return re.split(r"(?<!\\)\|", line)[3]


def numbers(number):
    text = right(number).replace("−", "-")
    found = re.findall(
        r"(?<![\w√.,])-?\d+(?:,\d{3})*(?:\.\d+)?"
        r"(?:e-\d+)?",
        text,
    )
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
    return [[D(first + cols * r + c) / 10 for c in range(cols)] for r in range(rows)]


def head(first, scale=D(1)):
    "q, k, v, scores, weights, output of one head of the second example."
    wq, wk, wv = (block(first + 8 * i, 4, 2) for i in range(3))
    q, k, v = (
        matmul(x, w)
        for x, w in ((block(5, 1, 4), wq), (block(1, 3, 4), wk), (block(13, 3, 4), wv))
    )
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
    "TRN-12": [
        (1 - D("0.9") ** t) / (1 - D("0.999") ** t).sqrt() for t in (1, 12, 1000)
    ],
}


@pytest.mark.parametrize("number", EXPECTED)
def test_values_are_right(number):
    exact = EXPECTED[number]
    shown = numbers(number)[: len(exact)]
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
    for kind, n in (
        ("TOY", 16),
        ("TOK", 19),
        ("POS", 29),
        ("ATT", 28),
        ("ARC", 25),
        ("TRN", 18),
        ("DEC", 33),
        ("VAR", 19),
    ):
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
        "x",
        "<|a|><|b|>",
        "y",
    ]
    assert close(D("3.614"), D("373.58") / D("103.37"))
    assert "3.614" in right("TOK-18")
    assert ord("ê") == 0xEA and len("e\u0302") == 2
    assert train_bpe("ab cd", 257)[0] != train_bpe("ab cd", 257, tie_break="ids")[0]


def cosines(offset, d):
    "Sum of cos(offset / 10000^(2k/d)) over the pairs of columns."
    return math.fsum(math.cos(offset / 10_000 ** (2 * k / d)) for k in range(d // 2))


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
    + [2 * math.fsum(math.cos(k * i) for i in range(32)) for k in (0, 1, 2, 8, 64)]
    + [4095 * 10_000 ** (-62 / 64), 4095 * 31],
    "POS-14": [256, *(cosines(k, 512) for k in (1, 2, 10, 64))],
    "POS-15": [math.cos(10), math.cos(10 / 10_000 ** (1 / 512))],
    "POS-16": [math.sqrt(2 * 512), math.sqrt(2 * 256), math.sqrt(2)],
    "POS-20": [cosines(1, 512), cosines(45, 512)],
    "POS-21": [cosines(10, 512)],
    "POS-26": [2 * math.pi, *(2 * math.pi * 10_000 ** (1 - 2 / d) for d in (64, 128))],
    "ATT-13": [4 * 4096**2],
    "ATT-21": [512 // 8],
    "ATT-22": [4 * NEMOTRON["d"] / (4 * NEMOTRON["d"] + 2 * NEMOTRON["n"])],
    "ARC-06": [12 * 512**2, 8 * 512**2],
    "ARC-10": [
        base_parameters(True),
        base_parameters(False),
        base_parameters(True) - base_parameters(False),
    ],
    "ARC-12": [
        xavier(10_000, 512),
        normed(xavier(10_000, 512)),
        normed(xavier(50_257, 768)),
    ],
    "ARC-25": [2.0**-5 * (1 + 52 / 128), 2.0**-5 / 128, 2**8, 1e-4, 1 + 1 / 2],
    "ARC-13": [
        int(8 * 512 / 3),
        int(8 * 4096 / 3),
        64 * round(8 * 512 / 3 / 64),
        64 * round(8 * 4096 / 3 / 64),
    ],
    "ARC-15": [
        2 * 512 * 2048 + 2048 + 512,
        4 * (512**2 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512,
    ],
}


@pytest.mark.parametrize("number", VALUES)
def test_values_of_the_parts_are_right(number):
    shown = list(numbers(number))
    for value in VALUES[number]:
        exact = D(value)
        assert any(close(n, exact) for n in shown), (
            f"{number}: {value:.10g} is right, not among {shown}"
        )


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
        x = nn.init.trunc_normal_(
            torch.empty(1000, size[1]), std=std, a=-3 * std, b=3 * std
        )
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
    moved = {
        mask is None: (
            model(src, other, tgt_mask=mask) - model(src, tgt, tgt_mask=mask)
        )[0, 0]
        .abs()
        .max()
        .item()
        for mask in (None, later)
    }
    assert moved[True] > 0.01 and moved[False] < 1e-6
    assert "output 0 moves" in right("ARC-14")


def test_masks_fail_as_is_said():
    lower = torch.ones(4, 4).tril().bool()
    with pytest.raises(RuntimeError, match="bool"):
        1 - lower.triu()
    weights = torch.zeros(4, 4).masked_fill(lower, -math.inf).softmax(-1)
    seen = weights > 0  # of the inverted mask, ARC-07
    assert torch.equal(seen[:3], ~lower[:3])
    assert weights[3].isnan().all() and not weights[:3].isnan().any()
    pads = torch.tensor([False, False, True, True])
    # ARC-08
    joined = ~lower | pads
    met = ~lower & pads
    assert joined[:, 2:].all() and not met[3].any()
    keep = (~pads).expand(4, 4)  # given where True = blocked
    scores = torch.zeros(4, 4).masked_fill(keep, -math.inf)
    assert (scores.softmax(-1)[:, :2] == 0).all()
    everything = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).bool(), -math.inf)
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


def test_only_the_page_sources_names_the_documents_as_well():
    names = re.findall(r"^- .*?\*((?:Show|Modern)[\w ]+)[*:]", PAGE, re.M)
    assert names == ["Show Me The Code", "Modern Transformers"]
    pages = [
        *course.notebook_paths(ROOT),
        *(ROOT / "book").rglob("*.md"),
        *ROOT.glob("*.md"),
    ]
    naming = [
        path.name
        for path in pages
        if any(name in path.read_text(encoding="utf-8") for name in names)
    ]
    assert sorted(naming) == ["errata.md", "sources.md"]


def test_sources_are_listed_by_their_names_with_as_many_rows():
    documents = [
        re.findall(r"\*([^*]+)\*", line.rsplit("|", 2)[1])
        for line in re.findall(r"^\| \[\w{3}-\d\d\].*\|$", PAGE, re.M)
    ]
    rows = Counter(name for names in documents for name in names)
    head = re.findall(r"^- \*([^*]+)\*", PAGE, re.M)
    page = (ROOT / "book" / "sources.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| \[.*\]\(#([\w-]+)\).*\| \*(.+)\* \| (\d+) \|$", page, re.M
    )
    assert [name for _, name, _ in listed] == head
    assert {name: int(number) for _, name, number in listed} == rows
    assert sum(len(names) == 2 for names in documents) == 2  # as the page says
    places = re.findall(r"^\(([\w-]+)\)=$", page, re.M)
    assert places == [*(place for place, _, _ in listed), "source-names"]


def test_links_lead_to_places_that_exist():
    anchors = set()
    for path in course.notebook_paths(ROOT):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                anchors |= set(
                    re.findall(r"^\(([\w-]+)\)=$", "".join(cell["source"]), re.M)
                )
    links = re.findall(r"^\| \[\w{3}-\d\d\]\(([^)]*)\)", PAGE, re.M)
    assert len(links) == 16 + 19 + 29 + 28 + 25 + 18 + 33 + 19
    missing = [
        link
        for link in links
        if (
            link[1:] not in anchors
            if link[0] == "#"
            else not (ROOT / "book" / link).is_file()
        )
    ]
    assert not missing


def test_values_of_shared_keys_are_right():
    keys = 2 * 96 * 96 * 192 * 4096  # numbers of keys and values, 96 key heads
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
    assert close(numbers("TRN-13")[-2], D("1e-8") / (1 - D("0.999")).sqrt())


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
    assert z.all()  # each row lost what the other lost


TINY = GPTConfig(
    vocab_size=20, d_model=16, n_layers=1, n_heads=4, max_len=8, dropout=0.0
)


def drawn(model):
    "The model in eval mode, with weights that are large enough to differ."
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def test_prompt_with_a_third_axis_loses_its_context():
    # DEC-01
    model = drawn(GPT(TINY))
    ids = torch.tensor([[5, 6, 7]])
    assert ids[..., None].shape == (1, 3, 1)
    alone = model(ids[0, :, None])  # (N, 1): three texts
    together = model(ids)
    assert alone.shape == (3, 1, 20) and together.shape == (1, 3, 20)
    torch.testing.assert_close(alone[0, 0], together[0, 0])
    for i in (1, 2):
        assert (alone[i, 0] - together[0, i]).abs().max() > 0.1
        torch.testing.assert_close(alone[i], model(ids[:, i : i + 1])[0])
    assert torch.equal(ids[0][None], ids)


def test_new_id_needs_an_axis_for_texts_and_one_for_tokens():
    # DEC-02
    ids = torch.tensor([[5, 6, 7]])
    log_probs = torch.arange(9.0)[None].log_softmax(-1)
    greedy = log_probs.argmax()
    sampled = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
    for new, axes in ((greedy, 0), (sampled, 1)):
        assert new.ndim == axes
        with pytest.raises(RuntimeError, match=r"concatenate|number of dim"):
            torch.cat([ids, new], -1)
    kept = log_probs.argmax(-1, keepdim=True)
    assert torch.cat([ids, kept], -1).tolist() == [[5, 6, 7, 8]]


def test_beam_search_calls_lack_their_arguments():
    ended = (torch.tensor([[4, 1, 1], [4, 4, 1]]) == 1).cumsum(1) > 0
    with pytest.raises(TypeError):  # DEC-06
        ended.ne()
    assert (~ended).sum(1).tolist() == [1, 2]
    beams = torch.arange(6).view(3, 2)
    with pytest.raises(TypeError):  # DEC-08
        beams.transpose()
    assert torch.equal(beams.t(), beams.transpose(0, 1))


def test_padding_mask_without_an_axis_for_queries_mixes_texts():
    # DEC-09; True = may attend
    may = causal_mask(*[torch.arange(4)[None]] * 2)[0, 0]
    with pytest.raises(RuntimeError, match="must match"):
        may & torch.ones(3, 4).bool()
    real = torch.ones(4, 4).bool()
    real[3, 0] = False  # text 3 is padded on the left
    mixed = may & real
    assert mixed.shape == (4, 4)  # one mask for all texts
    assert torch.equal(mixed[:3], may[:3]) and mixed[3].tolist() == [
        False,
        True,
        True,
        True,
    ]
    right_mask = may & real[:, None]
    assert right_mask.shape == (4, 4, 4)
    assert torch.equal(right_mask[0], may)
    assert not right_mask[3, :, 0].any()
    assert "(B, 1, N)" in right("DEC-09")


def test_misspelled_fields_of_a_configuration_fail():
    # DEC-12, DEC-13
    class Config:
        seq_len = 12

    for name in ("deq_eln", "max_seq_len"):
        with pytest.raises(AttributeError):
            getattr(Config(), name)
    with pytest.raises(TypeError):  # ours refuse them at once
        GPTConfig(vocab_size=20, max_seq_len=12)
    for config in (GPTConfig, LlamaConfig, Seq2SeqConfig):
        assert "max_len" in config.__dataclass_fields__


def test_scatter_of_keys_fails_or_exchanges_axes():
    # DEC-14
    def scatter(heads, t, places):
        "Keys (b, h, t, d) into a cache (b, places, h, d)."
        keys = torch.arange(2.0 * heads * t * 4).view(2, heads, t, 4)
        cache = torch.zeros(2, places, heads, 4)
        index = torch.arange(places)[:, None, None].expand(cache.shape)
        return keys, cache.scatter_(1, index, keys)

    for t in (1, 6, 12):
        with pytest.raises(RuntimeError, match="index"):
            scatter(2, t, 12)
    keys, cache = scatter(2, 2, 2)
    assert torch.equal(cache, keys)  # not transposed: exchanged
    assert not torch.equal(cache.transpose(1, 2), keys)
    ours = StaticLayerCache(2, 12)
    for i in range(2):
        stored, _ = ours.update(keys[:, :, i : i + 1], positions=torch.tensor([[i]]))
    stored = ours.tensors[0]
    assert torch.equal(stored[:, :, :2], keys) and stored.shape[2] > 2


def test_mask_of_a_cache_has_a_column_for_each_place():
    # DEC-15
    lower = torch.ones(12, 12).tril().bool()
    scores = torch.zeros(2, 4, 6, 12)
    with pytest.raises(RuntimeError, match="must match"):
        scores.masked_fill(~lower[:6, :6], -math.inf)
    one = scores[:, :, :1].masked_fill(~lower[:1, :1], -math.inf)
    assert one.isfinite().all()  # blocks nothing
    places = torch.arange(12)[None]
    mask = causal_mask(places[:, 3:9], places)
    assert mask.shape[-2:] == scores.shape[-2:]
    assert mask[0, 0].sum(1).tolist() == [4, 5, 6, 7, 8, 9]
    assert numbers("DEC-15")[:4] == [6, 6, 6, 12]


def test_embeddings_without_their_factor_are_too_small():
    # DEC-21
    d, times = map(int, numbers("DEC-21"))
    embed = Embedding(20, d, scale=d**0.5)
    ids = torch.arange(20)
    torch.testing.assert_close(embed(ids), times * embed.weight)
    model = drawn(
        Seq2Seq(
            Seq2SeqConfig(
                vocab_size=20,
                d_model=16,
                n_layers=1,
                n_heads=4,
                d_ff=32,
                max_len=8,
                dropout=0.0,
            )
        )
    )
    before = model.encode(ids[None, :5])
    model.embed.scale = 1.0
    assert (model.encode(ids[None, :5]) - before).abs().max() > 0.1


def test_source_is_read_in_both_directions():
    # DEC-29
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    other = torch.cat([x[:, :4], torch.randn(1, 1, 16)], 1)
    later = nn.Transformer.generate_square_subsequent_mask(5)
    for mask, moves in ((None, True), (later, False)):
        moved = layer(other, src_mask=mask) - layer(x, src_mask=mask)
        assert (moved[0, 0].abs().max() > 1e-3) == moves
    model = drawn(
        Seq2Seq(
            Seq2SeqConfig(
                vocab_size=20,
                d_model=16,
                n_layers=1,
                n_heads=4,
                d_ff=32,
                max_len=8,
                dropout=0.0,
            )
        )
    )
    a, b = model.encode(torch.tensor([[5, 6, 7], [5, 6, 8]]))
    assert (a[0] - b[0]).abs().max() > 1e-3


LLAMA = estimate_costs(
    LlamaConfig(
        vocab_size=128_256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14_336,
        max_len=8192,
    )
)


def products(n, cached):
    "Of scores and of sums over values, for token n, a number of the width."
    costs = (
        LLAMA.flops_by_component(1, past_tokens=n - 1)
        if cached and n > 1
        else LLAMA.flops_by_component(n)
    )
    return costs["pairs"] // (2 * 4096 * 32)


def test_a_cache_takes_one_from_the_exponent():
    # DEC-30
    n = 1000
    exact = (
        [n]
        + [products(n, cached) for cached in (False, True)]
        + [n]
        + [
            sum(products(i, cached) for i in range(1, n + 1))
            for cached in (False, True)
        ]
    )
    assert exact == [
        n,
        2 * n**2,
        2 * n,
        n,
        sum(2 * i**2 for i in range(n + 1)),
        sum(2 * i for i in range(n + 1)),
    ]
    assert numbers("DEC-30")[-6:] == exact


def test_a_step_waits_for_memory():
    # DEC-31
    h100 = ACCELERATORS["H100"]
    tokens, each, could = (numbers("DEC-31")[i] for i in (0, 3, 4))
    work = decode_workload(LLAMA, int(tokens))
    assert close(each, D(work.arithmetic_intensity))
    assert close(could, D(h100.ridge_point))
    assert h100.bottleneck(work) == "memory"
    assert products(2000, True) == 2 * products(1000, True)


def test_top_p_adds_up_probabilities():
    # DEC-32
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    kept = [apply_top_p(z, 0.7).isfinite().tolist() for z in (logits, logits + 5)]
    assert kept[0] == kept[1] == [True, True, False, False]
    assert logits.softmax(0).cumsum(0)[:2].tolist() == pytest.approx(
        [0.643914, 0.880797], abs=1e-6
    )
    sums = [z.cumsum(0) / z.sum() for z in (logits, logits + 5)]
    assert sums[0].tolist() == [1.0, 1.5, 1.5, 1.0]  # no shares of anything
    assert not torch.equal(*sums)


def test_a_token_attends_to_itself():
    # DEC-33
    place = torch.arange(4)[None]
    may = causal_mask(place, place)[0, 0]
    assert may.diagonal().all() and not may.triu(1).any()
    strictly = may & ~torch.eye(4).bool()
    x = torch.randn(4, 8)
    assert (attend(x, x, x, strictly)[1][0] == 0).all()
    plain = torch.zeros(4, 4).masked_fill(~strictly, -math.inf).softmax(-1)
    assert plain[0].isnan().all() and not plain[1:].isnan().any()


def test_a_plain_table_does_not_move_with_its_model():
    # TRN-02; the meta device stands for a GPU
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(4, 4)
            self.table = torch.zeros(9, 4)

        def forward(self, x):
            return self.project(x) + self.table[: len(x)]

    model = Plain().to("meta")
    assert model.table.device.type == "cpu"
    with pytest.raises(RuntimeError, match="device"):
        model(torch.zeros(3, 4, device="meta"))
    ours = SinusoidalPositionEmbedding(9, 4).to("meta")
    assert ours.table.device.type == "meta" and "table" in dict(ours.named_buffers())


def test_masked_training_hides_something():
    # TRN-06: pad 0, mask token 1, ten ids
    batch = torch.tensor([[5, 6, 1, 7, 0, 0]])
    counted = (batch != 0) & (batch != 1)
    copied = 50 * nn.functional.one_hot(batch, 10).double()
    loss = nn.functional.cross_entropy(copied[0], batch[0], reduction="none")
    assert (loss * counted[0]).mean() < 1e-6
    assert counted.tolist() == [[True, True, False, True, False, False]]
    words = torch.arange(2, 10)
    ids = words[
        torch.randint(8, (200, 500), generator=torch.Generator().manual_seed(0))
    ]
    masked = mask_tokens(
        ids,
        mask_token_id=1,
        special_ids=[0],
        replacement_ids=words,
        generator=torch.Generator().manual_seed(1),
    )
    chosen = masked.targets != -100
    hidden = masked.ids == 1
    replaced = (masked.ids != ids) & ~hidden
    of_chosen = chosen.sum()
    chosen_percent, hidden_percent, replaced_percent = numbers("TRN-06")[1:4]
    for part, whole, percent in (
        (chosen.sum(), ids.numel(), chosen_percent),
        (hidden.sum(), of_chosen, hidden_percent),
        # one in eight of the words that are drawn is the same word
        (replaced.sum() / (7 / 8), of_chosen, replaced_percent),
    ):
        assert abs(part / whole - float(percent) / 100) < 0.01
    assert not (replaced | hidden)[~chosen].any()
    copied = 50 * nn.functional.one_hot(masked.ids, 10).double()
    assert cross_entropy(copied, masked.targets) > 30


def test_without_a_mask_the_target_is_copied():
    # TRN-08: a start, three words and an end; each looks one place ahead
    target = torch.tensor([0, 5, 6, 7, 1])
    ids = target[:-1]
    place = torch.eye(4)
    ahead = torch.roll(place, -1, 0)
    losses = {}
    for causal in (False, True):
        mask = torch.ones(4, 4).tril().bool() if causal else None
        logits, _ = attend(
            50 * ahead, 50 * place, 50 * nn.functional.one_hot(ids, 8).float(), mask
        )
        losses[causal] = cross_entropy(logits[:3], target[1:4]).item()
    assert losses[False] < 1e-6 and losses[True] > 10


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_changes_a_sentence_unless_it_is_hidden():
    # TRN-09
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    src = torch.randn(1, 6, 16)
    tgt = torch.randn(1, 5, 16)
    alone = model(src[:, :4], tgt[:, :3])
    pads = {
        "src_key_padding_mask": torch.arange(6)[None] > 3,
        "memory_key_padding_mask": torch.arange(6)[None] > 3,
        "tgt_key_padding_mask": torch.arange(5)[None] > 2,
    }
    for left_out in (*pads, None):  # each of the three is needed
        masks = {name: x for name, x in pads.items() if name != left_out}
        moved = (model(src, tgt, **masks)[:, :3] - alone).abs().max()
        assert (moved > 1e-3) == (left_out is not None)


def test_a_step_in_place_keeps_the_memory():
    # TRN-10
    whole = torch.ones(4)
    weight = nn.Parameter(whole[:2])
    before = weight.data_ptr()
    weight.grad = torch.ones(2)
    ours = AdamW([weight], lr=0.1)
    moments = set()
    for _ in range(3):
        ours.step()
        moments.add(
            tuple(
                x.data_ptr()
                for x in ours.state[weight].values()
                if torch.is_tensor(x) and x.ndim
            )
        )
    assert len(moments) == 1 and weight.data_ptr() == before
    assert (whole[:2] < 1).all()  # goes along
    after = whole.clone()
    weight.data = weight.data - 0.1
    assert weight.data_ptr() != before and torch.equal(whole, after)


def test_a_mean_of_means_weighs_tokens_unequally():
    # TRN-11: words of the five targets, each with an end
    lengths = [n + 1 for n in (4, 4, 4, 2, 3)]
    counts = [sum(lengths[i : i + 2]) for i in (0, 2, 4)]
    assert numbers("TRN-11")[:3] == counts
    assert numbers("TRN-11")[3] == D(counts[0]) / counts[2]
    logits = torch.zeros(sum(counts), 2, requires_grad=True)
    targets = torch.zeros(sum(counts)).long()
    parts = [
        cross_entropy(x, y)
        for x, y in zip(logits.split(counts), targets.split(counts), strict=True)
    ]
    (slopes,) = torch.autograd.grad(sum(parts) / 3, logits)
    assert slopes[-1, 1] / slopes[0, 1] == pytest.approx(2.5)
    (slopes,) = torch.autograd.grad(cross_entropy(logits, targets), logits)
    assert slopes[-1, 1] == slopes[0, 1]


def test_the_mean_loss_is_entropy_plus_divergence():
    # TRN-16
    targets = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    p = targets.bincount().double() / len(targets)
    entropy = -(p * p.log()).sum()
    for q in (p, torch.tensor([0.1, 0.2, 0.3, 0.4]).double()):
        divergence = (p * (p / q).log()).sum()
        loss = cross_entropy(q.log().expand(8, 4), targets)
        assert loss.item() == pytest.approx((entropy + divergence).item())
        assert divergence.item() == pytest.approx(0) or q is not p
    assert loss > entropy + 0.1


def test_parameter_groups_are_a_list_of_dictionaries():
    # TRN-17
    layer = nn.Linear(2, 2)
    for groups in (
        torch.optim.AdamW(layer.parameters()).param_groups,
        AdamW(layer.parameters()).param_groups,
        param_groups(layer, 0.1),
    ):
        assert isinstance(groups, list) and all(
            isinstance(group, dict) for group in groups
        )
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_values_of_positions_are_right():
    table = torch.zeros(64, 16)  # POS-03: cut to d_model rows
    for n in (2, 64):
        with pytest.raises(RuntimeError, match="must match"):
            torch.zeros(2, n, 16) + table[:16]
    assert numbers("POS-03")[1:] == [
        2,
        1,
        16,
        *(torch.zeros(2, 1, 16) + table[:16]).shape,
        -2,
    ]
    places, width = map(int, numbers("POS-07"))
    with pytest.raises(IndexError):
        nn.Embedding(width, width)(torch.arange(places))
    nn.Embedding(places, width)(torch.arange(places))
    frequencies = [10_000 ** (-2 * i / 8) for i in range(5)]
    for shown, i in zip(numbers("POS-10")[-4:], (1, 4, 0, 3), strict=True):
        assert close(shown, D(frequencies[i]))


def test_last_output_does_not_know_the_order():
    # POS-13
    orders = re.findall(r"\[([\d, ]+)\]", right("POS-13"))
    ids = torch.tensor([[int(i) for i in order.split(",")] for order in orders])
    layer = drawn(nn.Sequential(nn.Embedding(5, 16), SelfAttention(16, 4, causal=True)))
    first, second = layer(ids)
    assert not torch.equal(*ids) and torch.equal(*ids.sort().values)
    torch.testing.assert_close(first[-1], second[-1])
    assert (first[0] - second[0]).abs().max() > 0.1


def test_three_in_front_mixes_tokens():
    # ATT-11
    torch.manual_seed(0)
    project = nn.Linear(8, 24)
    may = torch.ones(6, 6).tril().bool()

    def output(x, split):
        return attend(*split(project(x)), may)[0]

    def in_front(y):
        return y.view(3, 6, 8)

    def in_place(y):
        return y.view(6, 3, 8).transpose(0, 1)

    x = torch.randn(6, 8)
    other = torch.cat([x[:5], torch.randn(1, 8)])
    moved = [
        (output(x, split) - output(other, split))
        .abs()
        .amax(1)
        .nonzero()
        .flatten()
        .tolist()
        for split in (in_front, in_place)
    ]
    assert moved == [[3, 4, 5], [5]]
    assert numbers("ATT-11") == [5, 6, *moved[0]]
    place = torch.arange(6)[None]  # ATT-28
    assert causal_mask(place, place).sum() == 6 * 7 // 2


def test_all_rows_of_a_table_move():
    # TRN-14
    used, moved, rows = map(int, numbers("TRN-14"))
    table = nn.Embedding(rows, 4)
    before = table.weight.detach().clone()
    table(torch.arange(used)).sum().backward()
    assert (table.weight.grad != 0).any(1).sum() == used
    AdamW(table.parameters()).step()
    assert (table.weight != before).any(1).sum() == moved


def test_values_of_cache_and_beams_are_right():
    places, first_lost = map(int, numbers("DEC-05"))
    table = nn.Embedding(places, 4)
    table(torch.arange(first_lost - 1))
    with pytest.raises(IndexError):
        table(torch.arange(first_lost))
    new, old, *shape = map(int, numbers("DEC-11"))
    with pytest.raises(RuntimeError, match="must match"):
        torch.zeros(new, old + new).masked_fill(
            torch.ones(new, new).triu(1).bool(), -math.inf
        )
    place = torch.arange(old + new)[None]
    assert [*causal_mask(place[:, old:], place).shape[-2:]] == shape
    beams = torch.zeros(2, 3, 2)  # DEC-17: expanded to all beams
    best = torch.zeros(2, 1, 2)
    assert numbers("DEC-17") == [
        *torch.cat([beams, best.expand(-1, 3, -1)], -2).shape,
        *torch.cat([beams, best], -2).shape,
    ]
    d, n, again, kept = map(int, numbers("DEC-27")[-4:])
    assert again == 4 * n**2 * d == 8 * n * d**2
    assert kept == 4 * n * d == 8 * d**2
