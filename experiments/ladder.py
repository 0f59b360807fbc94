"""Measure each part of the book in what it is for.

    python experiments/ladder.py             all runs, three seeds, recorded
    python experiments/ladder.py --steps 4 --seeds 1 --folder some/folder

The tour's model, on tokens, is trained on the tour's stories with one part
after another replaced, always by AdamW at a constant rate (3e-3, reached after
20 steps), so that the end of a schedule favors nobody; only chapter 16 trains
by other rules. Each run looks at the held-out loss every 10 steps, and only the
training between the looks is timed. The tour's own runs, on bytes, are those of
parts.py.

Four records travel with the package. A run in `ladder_runs.csv` is a variant and
a seed with its curve; `ladder_times.csv` has CPU seconds, medians over rounds in
which the rivals take turns; both are written as they come, and a run that was
stopped goes on where it was. From them come `ladder.csv`, a row for each part
(before and after: the middle one of the seeds with the lowest and the highest,
of a clock the median with its quartiles; the verdict is "gained" or "lost" where
these ranges do not overlap), and
`ladder_line.csv`, how soon the model of each part of the book has the loss at
which the tour ended.
"""

import argparse
import statistics
import time
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import common
from common import BATCH, D_MODEL, HELD_OUT, N_HEADS, N_LAYERS, TRAIN
from tformer.corpora import stories
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from tformer.models.mini_gpt import MiniGPT, next_token_loss, random_windows
from tformer.nn.attention import SelfAttention
from tformer.nn.embedding import Embedding, SinusoidalPositionEmbedding
from tformer.nn.feed_forward import FeedForward, GatedFeedForward, swiglu_width
from tformer.nn.layers import Linear, PreNorm, init_weights
from tformer.nn.norms import LayerNorm, RMSNorm
from tformer.nn.rotary import RotaryEmbedding
from tformer.text.bpe import BPE
from tformer.training import optimizers, schedules

VOCAB = 512
LENGTH = 64
MAX_LEN = 128
EVERY = 10
LOOKED_AT = 10_000  # bytes of held-out stories
# each rate: the best of two or three
RATE = 3e-3
WARMUP = 20
HORIZON = 160
GOAL = 0.25
RESULT = 0.193
TOUR_STEPS = 1800


class Grown(nn.Module):
    "The tour's model, with the parts of the chapters up to `chapter`."

    def __init__(
        self, chapter, n_layers=N_LAYERS, norms=True, places=True, vocab_size=VOCAB
    ):
        super().__init__()
        self.chapter = chapter
        self.norms = norms
        self.max_len = MAX_LEN
        self.embed = Embedding(vocab_size, D_MODEL, scale=D_MODEL**0.5)
        self.positions = (
            SinusoidalPositionEmbedding(MAX_LEN, D_MODEL)
            if chapter < 5 and places
            else None
        )
        self.blocks = nn.Sequential(
            *(
                PreNorm(self.new_norm(), part)
                for _ in range(n_layers)
                for part in (self.attention(), self.feed_forward())
            )
        )
        self.norm = self.new_norm()
        self.lm_head = Linear(D_MODEL, vocab_size)

    def new_norm(self):
        if not self.norms:
            return nn.Identity()
        return (LayerNorm if self.chapter < 6 else RMSNorm)(D_MODEL)

    def attention(self):
        rotary = RotaryEmbedding(D_MODEL // N_HEADS) if self.chapter >= 5 else None
        return SelfAttention(
            D_MODEL,
            N_HEADS,
            causal=True,
            fused_qkv=True,
            rotary=rotary,
            fused=self.chapter >= 7,
        )

    def feed_forward(self):
        if self.chapter >= 6:
            return GatedFeedForward(D_MODEL, swiglu_width(D_MODEL))
        return FeedForward(D_MODEL, 4 * D_MODEL, activation="gelu")

    def forward(self, ids):
        x = self.embed(ids)
        if self.positions is not None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            x = x + self.positions(positions)
        return self.lm_head(self.norm(self.blocks(x)))


def gpt(max_len=MAX_LEN, tied=True):
    "GPT-2 in the tour's size."
    model = GPT(
        GPTConfig(
            vocab_size=VOCAB,
            d_model=D_MODEL,
            dropout=0.0,
            n_layers=N_LAYERS,
            n_heads=N_HEADS,
            max_len=max_len,
        )
    )
    if not tied:
        model.lm_head.weight = nn.Parameter(model.embed.weight.clone())
    return model


def gpt_started_as_the_tour():
    "GPT-2 with first weights like the tour's: PyTorch's, and tables of size 0.1."
    model = gpt()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear) and module is not model.lm_head:
                fresh = nn.Linear(module.weight.shape[1], module.weight.shape[0])
                module.weight.copy_(fresh.weight)
                module.bias.copy_(fresh.bias)
        for name, p in model.named_parameters():
            if name.startswith("embed"):
                nn.init.normal_(p, std=0.1)
    return model


def llama(n_kv_heads=2, width=D_MODEL, n_layers=N_LAYERS, n_heads=N_HEADS):
    "The modern decoder, in the tour's size or wider."
    return Llama(
        LlamaConfig(
            vocab_size=VOCAB,
            d_model=width,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            max_len=MAX_LEN,
        )
    )


def deep(start=False, norms=True):
    "Sixteen layers."
    model = Grown(5, n_layers=16, norms=norms)
    if start:
        init_weights(model, n_layers=16)
    return model


def level(step):
    "A factor that rises to 1 and stays there."
    return min(1.0, step / WARMUP)


def adamw(model, rate=RATE, factor=level):
    return [optimizers.AdamW(optimizers.param_groups(model, 0.1), rate)], factor


def sgd(model):
    return [optimizers.SGD(model.parameters(), 0.1, momentum=0.9)], level


def clipped_sgd(model):
    return [optimizers.SGD(model.parameters(), 0.3, momentum=0.9)], level, 1.0


def clipped_adamw(model):
    return *adamw(model), 1.0


def cosine(model):
    return adamw(
        model, 6e-3, schedules.warmup_cosine(HORIZON, WARMUP, min_lr_ratio=0.0)
    )


def constant(model):
    "As `cosine`, without the cosine."
    return adamw(model, 6e-3)


def apart(model, learn=optimizers.AdamW, rate=6e-3):
    "The hidden matrices learn at another rate than the rest, or by another rule."
    matrices = optimizers.hidden_matrices(model)
    rest = {*model.parameters()} - {*matrices}
    return [
        learn(matrices, rate, weight_decay=0.0),
        optimizers.AdamW(
            [p for p in model.parameters() if p in rest], 1e-2, weight_decay=0.0
        ),
    ], schedules.warmup_cosine(HORIZON, WARMUP, min_lr_ratio=0.0)


def muon(model):
    return apart(model, optimizers.Muon, 0.02)


TOKENS = partial(MiniGPT, VOCAB, max_len=MAX_LEN)
VARIANTS = {  # the model, how it learns, at most so many steps
    "tokens": (TOKENS, adamw, 600),
    "no positions": (partial(Grown, 4, places=False), adamw, 600),
    "sinusoids": (partial(Grown, 4), adamw, 600),
    "rotary": (partial(Grown, 5), adamw, 600),
    "RMSNorm, SwiGLU": (partial(Grown, 6), adamw, 600),
    "fused": (partial(Grown, 7), adamw, 600),
    "GPT": (gpt, adamw, 600),
    "GPT, tour's start": (gpt_started_as_the_tour, adamw, 600),
    "Llama": (llama, adamw, 600),
    "SGD": (llama, sgd, HORIZON),
    "SGD clipped": (llama, clipped_sgd, HORIZON),
    "AdamW clipped": (llama, clipped_adamw, HORIZON),
    "constant": (llama, constant, HORIZON),
    "cosine": (llama, cosine, HORIZON),
    "AdamW apart": (llama, apart, HORIZON),
    "Muon": (llama, muon, HORIZON),
    "deep, no norms": (partial(deep, True, norms=False), adamw, 100),
    "deep, no norms, 1/d": (partial(deep, norms=False), adamw, 100),
    "deep": (deep, adamw, 100),
    "deep, small start": (partial(deep, start=True), adamw, 100),
}


@cache
def texts():
    "Ids to learn from, ids held out, bytes in a token."
    text = stories.story_corpus(TRAIN, seed=0, level=1)
    held_out = stories.story_corpus(HELD_OUT, seed=1, level=1)[:LOOKED_AT]
    bpe = BPE.train(text, VOCAB)
    ids, other = (torch.tensor(bpe.encode(t)) for t in (text, held_out))
    return ids, other, len(held_out.encode()) / len(other)


@torch.no_grad()
def held_out_loss(model, length=LENGTH, first=0):
    "Nats per byte, of the ids from place `first` on in windows."
    _, ids, per_token = texts()
    rows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    logits = torch.cat([model(part[:, :-1]) for part in rows.split(64)])
    return (
        float(
            F.cross_entropy(
                logits[:, first:].flatten(0, 1), rows[:, first + 1 :].flatten()
            )
        )
        / per_token
    )


class Lesson:
    "A model that is trained a step at a time."

    def __init__(self, name, seed=0):
        make, learn, _ = VARIANTS[name]
        torch.manual_seed(seed)
        self.model = make()
        self.taken = 0
        self.optimizers, self.factor, *limit = learn(self.model)
        self.max_norm = limit[0] if limit else None
        self.rates = [
            [group["lr"] for group in o.param_groups] for o in self.optimizers
        ]
        self.batches = random_windows(texts()[0], LENGTH, BATCH, seed)

    def step(self):
        self.taken += 1
        loss = next_token_loss(self.model, next(self.batches))
        loss.backward()
        if self.max_norm is not None:
            optimizers.clip_grad_norm_(self.model.parameters(), self.max_norm)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self.factor(self.taken)
            optimizer.step()
            optimizer.zero_grad()


def train(name, seed, steps):
    "One run, until it has the tour's result."
    lesson = Lesson(name, seed)
    watch = common.Stopwatch()
    curve = []
    most = min(steps or VARIANTS[name][2], VARIANTS[name][2])
    while lesson.taken < most:
        with watch:
            lesson.step()
        if lesson.taken % EVERY == 0 or lesson.taken == most:
            curve.append((lesson.taken, held_out_loss(lesson.model)))
            if curve[-1][1] < RESULT and most > HORIZON:
                break
    beyond = held_out_loss(lesson.model, 2 * LENGTH, first=LENGTH)
    print(
        f"{name}, seed {seed}: {curve[-1][1]:.3f} after {lesson.taken} "
        f"steps, {watch.seconds:.0f} s",
        flush=True,
    )
    return {
        "variant": name,
        "seed": str(seed),
        "of": str(steps or ""),
        "seconds": f"{watch.seconds:.2f}",
        "nats_per_byte": f"{curve[-1][1]:.3f}",
        "beyond": f"{beyond:.3f}",
        "curve": " ".join(f"{at}:{loss:.4f}" for at, loss in curve),
        **common.about(),
    }


# seconds


def layer_of(fused):
    "Attention of the tour's size over 1,024 tokens, there and back."
    torch.manual_seed(0)
    layer = SelfAttention(D_MODEL, N_HEADS, causal=True, fused=fused)
    x = torch.randn(1, 1024, D_MODEL)
    return lambda: layer(x).sum().backward()


@torch.no_grad()
def writes(cached, n=200):
    "Two hundred tokens, one after another."
    torch.manual_seed(0)
    model = gpt(max_len=n)
    ids = torch.zeros(1, 1, dtype=torch.long)

    def write():
        with torch.no_grad():
            kept = model.new_cache(1) if cached else None
            seen = ids
            for _ in range(n - 1):
                part = seen[:, -1:] if cached else seen
                new = model(part, cache=kept)[:, -1:].argmax(-1)
                seen = torch.cat([seen, new], 1)

    return write


def wide_step(precision=None, compiled=False):
    "A step of four layers, width 384, on 8 × 128 tokens."
    torch.manual_seed(0)
    model = llama(width=384, n_layers=4, n_heads=6)
    call = torch.compile(model) if compiled else model
    ids = torch.randint(VOCAB, (8, 129))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(precision)):
            logits = call(ids[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


def steps_of(name):
    "Ten steps of training, as a train of them takes."
    lesson = Lesson(name)
    return lambda: [lesson.step() for _ in range(EVERY)]


def bytes_step():
    "Ten steps of the tour's own training."
    torch.manual_seed(0)
    model = MiniGPT()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    batch = torch.randint(256, (BATCH, model.max_len + 1))

    def step():
        for _ in range(EVERY):
            next_token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


CLOCKED = {  # rivals take turns; so many calls are one of them
    "attention": (
        {"explicit": partial(layer_of, False), "fused": partial(layer_of, True)},
        1,
    ),
    "writing": ({"anew": partial(writes, False), "cached": partial(writes, True)}, 1),
    "training": (
        {"tour": bytes_step}
        | {
            name: partial(steps_of, name)
            for name in ("tokens", "fused", "Llama", "cosine", "Muon")
        },
        EVERY,
    ),
    "wide": (
        {
            "float32": wide_step,
            "bf16": partial(wide_step, "bf16"),
            "compiled": partial(wide_step, compiled=True),
        },
        1,
    ),
}


def clock(group, rounds):
    "CPU seconds of each rival: the median and the quartiles."
    rivals, calls = CLOCKED[group]
    made = {name: make() for name, make in rivals.items()}
    for call in made.values():
        call()
    taken = {name: [] for name in made}
    for _ in range(rounds):
        for name, call in made.items():
            watch = common.Stopwatch()
            with watch:
                call()
            taken[name].append(watch.seconds / calls)
    for name, seconds in taken.items():
        print(f"{group}, {name}: {statistics.median(seconds):.4f} s", flush=True)
        quarter = statistics.quantiles(seconds, n=4) if rounds > 1 else [seconds[0]] * 3
        yield {
            "group": group,
            "what": name,
            "rounds": str(rounds),
            **{
                key: f"{value:.5f}"
                for key, value in zip(("low", "seconds", "high"), quarter, strict=True)
            },
            **common.about(),
        }


# what the rows are made of


def crossing(curve, goal):
    "The step at which the loss is first at most `goal`, interpolated."
    points = [tuple(map(float, p.split(":"))) for p in curve.split()]
    for (at, loss), (then, less) in pairwise([(0, 6.0), *points]):
        if less <= goal:
            return at + (then - at) * (loss - goal) / (loss - less)
    return points[-1][0]  # not within the run: at least that


def at_step(curve, step):
    "The loss at the look nearest to a step."
    points = [tuple(map(float, p.split(":"))) for p in curve.split()]
    return min(points, key=lambda p: abs(p[0] - step))[1]


class Evidence:
    "What the runs and the clock say, as numbers: one for each seed."

    def __init__(self, runs, times):
        self.runs = runs
        self.times = {
            (t["group"], t["what"]): [
                float(t[key]) for key in ("seconds", "low", "high")
            ]
            for t in times
        }
        tour = [
            row["curve"].split()
            for row in common.read(common.RECORDS / "parts.csv")
            if row["variant"] == "all parts"
        ]
        gap = TOUR_STEPS // (len(tour[0]) - 1)
        self.tour = [
            " ".join(f"{gap * i}:{loss}" for i, loss in enumerate(c)) for c in tour
        ]

    def curves(self, name):
        if name == "tour":
            return self.tour
        return [r["curve"] for r in self.runs if r["variant"] == name]

    def steps(self, name, goal=GOAL):
        return [crossing(curve, goal) for curve in self.curves(name)]

    def seconds(self, name, goal=GOAL, pace_of=None):
        """Of all seeds, at the median pace and at both of its quartiles.

        `pace_of` names a variant whose steps take as long, if its own were not timed.
        """
        steps = (
            [TOUR_STEPS]
            if (name, goal) == ("tour", RESULT)
            else (self.steps(name, goal))
        )
        pace, low, high = self.times["training", pace_of or name]
        return [statistics.median(steps) * pace, min(steps) * low, max(steps) * high]

    def loss(self, name, step):
        return [at_step(curve, step) for curve in self.curves(name)]

    def beyond(self, name):
        return [float(r["beyond"]) for r in self.runs if r["variant"] == name]

    def clock(self, group, what):
        return [1000 * s for s in self.times[group, what]]


def cache_bytes(n_kv_heads):
    "Of a cache of 1,024 tokens in float32, both layers, in kilobytes."
    return [2 * N_LAYERS * n_kv_heads * (D_MODEL // N_HEADS) * 1024 * 4 / 1e3]


def weights(tied):
    "Of the parameters in float32, in kilobytes."
    return [sum(p.numel() for p in gpt(tied=tied).parameters()) * 4 / 1e3]


def verdict(before, after):
    "Less is better in every row."
    if max(after) < min(before):
        return "gained"
    return "lost" if min(after) > max(before) else "nothing shown"


def parts(e):
    "The rows: chapter, part, what for, unit, was, now, before, after."
    to = f"steps to {GOAL} nats/byte"
    far = "nats/byte beyond what was trained"
    s = "seconds to 0.25 nats/byte"
    deep_loss = "nats/byte, 16 layers"
    yield 2, "tokens", to, "bytes", "tokens", e.steps("tour"), e.steps("tokens")
    yield 2, "tokens", s, "bytes", "tokens", e.seconds("tour"), e.seconds("tokens")
    yield (
        4,
        "positions",
        to,
        "none",
        "sinusoids",
        e.steps("no positions"),
        e.steps("sinusoids"),
    )
    yield (
        4,
        "sinusoids",
        to,
        "learned",
        "sinusoids",
        e.steps("tokens"),
        e.steps("sinusoids"),
    )
    yield (
        5,
        "rotary positions",
        far,
        "learned",
        "rotary",
        e.beyond("tokens"),
        e.beyond("rotary"),
    )
    yield (
        5,
        "rotary positions",
        to,
        "sinusoids",
        "rotary",
        e.steps("sinusoids"),
        e.steps("rotary"),
    )
    yield (
        6,
        "norms",
        deep_loss,
        "without",
        "with",
        e.loss("deep, no norms", 100),
        e.loss("deep, small start", 100),
    )
    yield (
        6,
        "initialization",
        deep_loss,
        "variance 1/d",
        "GPT-2's",
        e.loss("deep", 100),
        e.loss("deep, small start", 100),
    )
    yield (
        6,
        "RMSNorm, SwiGLU",
        to,
        "LayerNorm, GELU",
        "RMSNorm, SwiGLU",
        e.steps("rotary"),
        e.steps("RMSNorm, SwiGLU"),
    )
    yield (
        7,
        "fused attention",
        "ms, 1,024 tokens",
        "explicit",
        "fused",
        e.clock("attention", "explicit"),
        e.clock("attention", "fused"),
    )
    yield (
        7,
        "the cache",
        "ms to write 200 tokens",
        "anew",
        "cached",
        e.clock("writing", "anew"),
        e.clock("writing", "cached"),
    )
    yield (
        12,
        "tied head",
        "kB of weights",
        "two tables",
        "one",
        weights(False),
        weights(True),
    )
    yield (
        12,
        "GPT-2's start",
        to,
        "the tour's",
        "GPT-2's",
        e.steps("GPT, tour's start"),
        e.steps("GPT"),
    )
    yield (
        13,
        "grouped heads",
        "kB of cache, 1,024 tokens",
        "4 key heads",
        "2",
        cache_bytes(4),
        cache_bytes(2),
    )
    yield 13, "Llama's parts", to, "GPT", "Llama", e.steps("GPT"), e.steps("Llama")
    yield (
        16,
        "clipping",
        f"nats/byte, {HORIZON} steps",
        "SGD",
        "clipped",
        e.loss("SGD", HORIZON),
        e.loss("SGD clipped", HORIZON),
    )
    yield (
        16,
        "AdamW",
        f"nats/byte, {HORIZON} steps",
        "SGD, clipped",
        "AdamW, clipped",
        e.loss("SGD clipped", HORIZON),
        e.loss("AdamW clipped", HORIZON),
    )
    yield (
        16,
        "cosine",
        f"nats/byte, {HORIZON} steps",
        "constant",
        "cosine",
        e.loss("constant", HORIZON),
        e.loss("cosine", HORIZON),
    )
    yield (
        16,
        "two rates",
        to,
        "one rate",
        "two",
        e.steps("cosine"),
        e.steps("AdamW apart"),
    )
    yield 16, "Muon", to, "AdamW", "Muon", e.steps("AdamW apart"), e.steps("Muon")
    yield (
        16,
        "Muon",
        s,
        "AdamW",
        "Muon",
        e.seconds("AdamW apart", pace_of="cosine"),
        e.seconds("Muon"),
    )
    yield (
        17,
        "bf16",
        "ms a step, width 384",
        "float32",
        "bf16",
        e.clock("wide", "float32"),
        e.clock("wide", "bf16"),
    )
    yield (
        17,
        "compile",
        "ms a step, width 384",
        "as it is",
        "compiled",
        e.clock("wide", "float32"),
        e.clock("wide", "compiled"),
    )


def spread(name, values):
    "The middle of the seeds or rounds, the range and how wide it is."
    low = min(values)
    high = max(values)
    return {
        name: f"{statistics.median(values):.3f}",
        f"{name}_low": f"{low:.3f}",
        f"{name}_high": f"{high:.3f}",
        f"{name}_spread": f"{high - low:.3f}",
    }


def ladder(e, seeds):
    "One row for each part."
    for chapter, part, purpose, was, now, before, after in parts(e):
        yield {
            "chapter": chapter,
            "part": part,
            "purpose": purpose,
            "was": was,
            "now": now,
            **spread("before", before),
            **spread("after", after),
            "better": "less",
            "verdict": verdict(before, after),
            "seeds": seeds,
            **common.about(),
        }


LINE = {
    0: ("tour", "the tour"),
    2: ("tokens", "II: tokens"),
    7: ("fused", "III: the parts"),
    13: ("Llama", "IV: Llama"),
    16: ("Muon", "V: Llama, Muon"),
}


def line(e, seeds):
    "How soon each model has what the tour ended with."
    for chapter, (name, model) in LINE.items():
        steps = [TOUR_STEPS] * seeds if name == "tour" else e.steps(name, RESULT)
        yield {
            "chapter": chapter,
            "model": model,
            "nats_per_byte": RESULT,
            **spread("steps", steps),
            **spread("seconds", e.seconds(name, RESULT)),
            "seeds": seeds,
            **common.about(),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="at most, in every run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--again", action="store_true", help="measure what the files have, too"
    )
    parser.add_argument("--folder", type=Path, default=common.RECORDS)
    args = parser.parse_args()
    began = time.process_time()
    out = args.folder / "ladder_runs.csv"
    runs = common.kept(out, args.again, of=args.steps or "")
    done = {(row["variant"], int(row["seed"])) for row in runs}
    for seed in range(args.seeds):
        for name in VARIANTS:
            if (name, seed) not in done:
                runs.append(train(name, seed, args.steps))
                common.write(common.sort_by(runs, VARIANTS), out)
    out = args.folder / "ladder_times.csv"
    times = common.kept(out, args.again, rounds=args.rounds)
    for group in CLOCKED:
        if group in {row["group"] for row in times}:
            continue
        times += clock(group, args.rounds)
        common.write(times, out)
    e = Evidence(common.sort_by(runs, VARIANTS), times)
    for name, rows in (("ladder", ladder), ("ladder_line", line)):
        common.write([*rows(e, args.seeds)], args.folder / f"{name}.csv")
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
