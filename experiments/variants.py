"""What does a small decoder learn with each kind of attention?

    python experiments/variants.py                  three seeds, 70 minutes
    python experiments/variants.py --only mla --seeds 1
    python experiments/variants.py --steps 2 --seeds 1 --out some.csv

The same decoder is trained once with each attention of part VII; nothing else in it
differs. It has 4 layers, 8 heads of 16 numbers, and the tokenizer of the storyteller.
`variant` says how its layers attend:

* "mha": each head has keys and values of its own. "gqa": two key heads, "mqa": one.
* "mla": latent attention that keeps 24 + 8 numbers of each token, which are as many as
  those of "mqa". "mla_wide": 56 + 8 numbers, which are as many as those of "gqa".
* "sliding": "gqa" with a window of 24 tokens in every layer. "alternating": in the
  first and the third layer only.
* "sparse": "gqa" with a lightning indexer, of which each query attends to the best 24
  tokens. The indexers learn from the attention in all steps; in the last fifth of them
  the model attends to what they pick, and before that to everything.

All variants with the same seed get the same batches. A batch has rows of stories, whose
loss counts at every token, and rows with pairs of a name and a word:

    Mia kite Tom red …, a part of a story without these names, Tom red Mia kite …

There are six pairs, and the names are asked for in another order. The loss of these
rows counts where an answer is due. The first steps copy such rows in their own order,
with up to 8 tokens of a story somewhere between, because copying is learned in 200
steps, and answering follows from it in 50. The story between the pairs and the
questions then grows until a row has 128 tokens; rows without one stay among them. In
the long rows, a question stands 105 to 125 tokens behind its answer, and four layers
with a window of 24 can look back over 92.

The rows go to tformer/records/variants.csv. `loss` is in nats per byte of 200 new rows
of stories with 128 tokens, where the end of a story counts as one byte. `near` is the
share of right answers to 1,200 new questions without any story between, and `far`
that in rows of 128 tokens. `seconds` is the processor time of the training, on a
machine that did other work as well: variants_speed.py measures what a step takes. A
run that was stopped goes on with the variant and the seed where it was.
"""

import functools
import random
from contextlib import nullcontext

import torch
from torch.nn import functional as F

import common
import tformer
from tformer.bundle import ENDOFTEXT
from tformer.corpora import stories
from tformer.models.llama import Llama, LlamaConfig
from tformer.training.optimizers import AdamW, Muon, hidden_matrices
from tformer.variants.mla import make_mla_factory
from tformer.variants.sliding_window import make_window_factory
from tformer.variants.sparse import (
    collect_indexer_losses,
    make_sparse_factory,
    set_top_k,
)

SHAPE = dict(d_model=128, n_layers=4, n_heads=8, max_len=256, tie_word_embeddings=True)
WINDOW = 24
KV_HEADS = {
    "mha": 8,
    "gqa": 2,
    "mqa": 1,
    "mla": 8,
    "mla_wide": 8,
    "sliding": 2,
    "alternating": 2,
    "sparse": 2,
}
KV_RANKS = {"mla": 24, "mla_wide": 56}
LATENT = dict(d_nope=16, d_rope=8, d_v=16)
INDEXER = dict(n_index_heads=4, d_index=16, d_index_rope=8)
# of the rows with questions
NAMES = stories.LEXICON["child"][0]
WORDS = [
    *stories.LEXICON["color"][0],
    *"ball doll car boat drum book kite plane hat".split(),
    *"little happy kind sunny warm cold".split(),
]
PAIRS = 6
ASKED = 2 * PAIRS  # tokens of all pairs, and of all questions with answers
FILLER = 8  # tokens of a story in a row that is copied
NEAR = 2 * ASKED  # tokens before the last one of a row without a story
FAR = 128
NEAR_ROWS = 8  # beside longer ones, so that these are not forgotten
# what is read, tokens of such a row, steps, and how many such rows and rows of stories
STAGES = (
    ("copies", 2 * ASKED + FILLER, 250, 32, 10),
    ("questions", NEAR, 75, 32, 10),
    ("questions", 64, 50, 16, 8),
    ("questions", FAR, 225, 12, 8),
)
STEPS = sum(stage[2] for stage in STAGES)
POOL = 4000  # rows of each kind that are drawn from
WARMUP = 40
DECAY = 0.4  # of the steps, at the end
SPARSE = 0.2  # of the steps, at the end
LR = 0.02
TABLE_LR = 5e-3
INDEXER_LR = 2e-3
NEW = 200


# --- texts


@functools.cache
def tokenizer():
    "The storyteller's: its tokens are words."
    return tformer.load("stories").tokenizer


def encode(text):
    "The ids of a text."
    return tokenizer().encode(text)


def end():
    "The token between two texts."
    return tokenizer().token_to_id(ENDOFTEXT)


def word_ids(words):
    "The one token of each word."
    return [encode(f" {word}")[0] for word in words]


@functools.cache
def story_rows(n, seed, length=FAR):
    "Stories one after another, cut into rows of so many tokens and one more."
    ids = []
    draw = 0
    while len(ids) < n * (length + 1):
        for text in stories.generate_stories(200, 1000 * seed + draw, level=1):
            ids += [end(), *encode(text.strip())]
        draw += 1
    return torch.tensor(ids[: n * (length + 1)]).view(n, length + 1)


@functools.cache
def copies(n, seed):
    "Rows of names and words in any order, some of a story, and the same again."
    draw = random.Random(seed)
    known = word_ids(NAMES) + word_ids(WORDS)
    rows = []
    for filler in story_rows(n, seed + 100, FILLER).tolist():
        listed = draw.sample(known, ASKED)
        cut = draw.randint(0, FILLER)
        rows.append([*filler[:cut], end(), *listed, *filler[cut:FILLER], *listed])
    return torch.tensor(rows)


@functools.cache
def questions(n, seed, length=FAR):
    "Rows of so many tokens and one more: pairs, a part of a story, and questions."
    draw = random.Random(seed)
    names = word_ids(NAMES)
    words = word_ids(WORDS)
    room = length - NEAR
    fillers = iter(
        story_rows(4 * n, seed + 100, room - 1).tolist() if room else [[]] * n
    )
    rows = []
    while len(rows) < n:
        filler = next(fillers)
        free = [name for name in names if name not in filler]
        if len(free) < PAIRS:
            continue
        answers = dict(
            zip(draw.sample(free, PAIRS), draw.sample(words, PAIRS), strict=True)
        )
        told = [token for pair in answers.items() for token in pair]
        asked = draw.sample(list(answers), PAIRS)
        rows.append(
            [
                end(),
                *told,
                *filler,
                *(token for name in asked for token in (name, answers[name])),
            ]
        )
    return torch.tensor(rows)


def num_bytes(rows):
    "The bytes of all tokens that are predicted; the end of a text is one."
    texts = map(tokenizer().decode, rows[:, 1:].tolist())
    return sum(len(text.replace(ENDOFTEXT, "\n").encode()) for text in texts)


# --- models


def make_model(variant, top_k=None):
    "The decoder with this attention, its weights drawn anew."
    config = LlamaConfig(
        vocab_size=len(tokenizer()), **SHAPE, n_kv_heads=KV_HEADS[variant]
    )
    if variant in KV_RANKS:
        return Llama(
            config, make_mla_factory(config, kv_rank=KV_RANKS[variant], **LATENT)
        )
    make = {
        "sliding": lambda: make_window_factory(config, WINDOW),
        "alternating": lambda: make_window_factory(config, [WINDOW, None]),
        "sparse": lambda: make_sparse_factory(config, top_k, **INDEXER),
    }
    return Llama(config, make[variant]() if variant in make else None)


def optimizers(model):
    "Muon for the matrices of the blocks, AdamW for the rest; indexers apart."
    indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
    apart = set(map(id, indexers))
    matrices = [p for p in hidden_matrices(model) if id(p) not in apart]
    apart |= set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in apart]
    found = [
        Muon(matrices, lr=LR, weight_decay=0.01),
        AdamW(rest, lr=TABLE_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    if indexers:
        found.append(AdamW(indexers, lr=INDEXER_LR, weight_decay=0.0))
    return found


# --- training


def cross_entropy(logits, targets, **options):
    "The loss of logits (b, t, vocab), in nats per token unless options say otherwise."
    return F.cross_entropy(logits.transpose(1, 2), targets, **options)


def due(tokens, kind):
    "The part of a row's predictions or targets that counts."
    if kind == "copies":
        return tokens[:, 1 - ASKED :]
    return tokens[:, -ASKED:][:, 1::2]


def draw_batches(steps, seed):
    "For each step, rows of stories, and rows with answers by their kind."
    draw = torch.Generator().manual_seed(seed)

    def some(rows, n):
        return rows[torch.randint(len(rows), (n,), generator=draw)]

    pool = min(POOL, 50 * steps)
    told = story_rows(pool, 2)
    near = questions(pool, 4, NEAR)
    for kind, length, most, n_rows, n_stories in STAGES:
        rows = copies(pool, 3) if kind == "copies" else questions(pool, 4, length)
        for _ in range(min(most, -(-steps * most // STEPS))):
            asked = [(kind, some(rows, n_rows))]
            if length > NEAR and kind == "questions":
                asked.append((kind, some(near, NEAR_ROWS)))
            yield some(told, n_stories), asked


def learning_rate(step, steps):
    "The share of the highest rate: a short rise, a plateau, and a fall."
    return min(1.0, (step + 1) / WARMUP) * min(1.0, (steps - step) / (DECAY * steps))


def train_model(variant, steps, seed):
    "The trained decoder, and the processor seconds that its steps took."
    torch.manual_seed(seed)
    model = make_model(variant)
    used = optimizers(model)
    highest = [optimizer.param_groups[0]["lr"] for optimizer in used]
    batches = list(draw_batches(steps, seed))
    watch = common.Stopwatch()
    for step, (told, asked) in enumerate(batches):
        if variant == "sparse" and step >= (1 - SPARSE) * len(batches):
            set_top_k(model, WINDOW)
        factor = learning_rate(step, len(batches))
        for optimizer, lr in zip(used, highest, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
        with watch:
            take_step(model, used, told, asked)
    return model.eval(), watch.seconds


def take_step(model, used, told, asked):
    "Change the parameters once."
    sparse = any(".indexer." in name for name, _ in model.named_parameters())
    with collect_indexer_losses(model) if sparse else nullcontext([]) as extra:
        loss = cross_entropy(model(told[:, :-1]), told[:, 1:])
        for kind, rows in asked:
            answers = due(model(rows[:, :-1]), kind)
            loss = loss + cross_entropy(answers, due(rows, kind))
    for optimizer in used:
        optimizer.zero_grad()
    (loss + sum(extra)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in used:
        optimizer.step()


# --- measures


@torch.no_grad()
def nats_per_byte(model, rows):
    "The loss on all tokens of the rows but the first ones."
    total = sum(
        cross_entropy(model(part[:, :-1]), part[:, 1:], reduction="sum").item()
        for part in rows.split(50)
    )
    return total / num_bytes(rows)


@torch.no_grad()
def answered(model, rows):
    "The share of right answers."
    right = [
        due(model(part[:, :-1]).argmax(-1), "questions") == due(part, "questions")
        for part in rows.split(50)
    ]
    return torch.cat(right).float().mean().item()


def train(variant, steps, seed):
    "What is found about one model."
    model, seconds = train_model(variant, steps, seed)
    n = min(NEW, 2 * steps)
    return {
        "loss": f"{nats_per_byte(model, story_rows(n, 1)):.4f}",
        "near": f"{answered(model, questions(n, 5, NEAR)):.4f}",
        "far": f"{answered(model, questions(n, 6, FAR)):.4f}",
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "seconds": f"{seconds:.0f}",
    }


def main():
    made = common.parser(__doc__, "variants.csv")
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--only", choices=KV_HEADS, nargs="+", default=list(KV_HEADS))
    args = made.parse_args()
    torch.set_num_threads(1)
    common.run([{"variant": variant} for variant in args.only], train, args)


if __name__ == "__main__":
    main()
