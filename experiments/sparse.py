"""What does a query lose that reads only the k tokens that its indexer picks?

    python experiments/sparse.py                    three seeds, 15 minutes
    python experiments/sparse.py --steps 2 --seeds 1 --out some.csv

The storyteller of the package, `tformer.load("stories")`, gets an untrained lightning
indexer in every layer. A seed draws the weights of the indexers and the batches. The
indexers learn from the attention, while the model stays as it is and reads all
("dense warm-up"); `--steps` says for how long, and nothing else takes more steps than
that. The tasks:

* "stories": the loss on 100 new stories of 64 tokens, if each query of every layer
  reads k tokens. `chooser` says which: those of the largest attention weights
  ("oracle"), those of the "indexer", the nearest ones ("window"), any ("random"),
  those of an "untrained" indexer, or all tokens ("dense").
* "sparse stage": 150 more steps with k = 8, in which the model learns from the loss
  and the indexers from the attention to what they have picked. "dense" and "indexer"
  are the model before, "sparse stage" and "sparse stage dense" after. "control dense"
  is the model that has read the same batches in full, "control indexer" this model
  with the indexers from before.
* "rotation": the trained indexers turn pairs that are not those of their training,
  in all layers ("wrong") or in one ("wrong layer 1"), or none ("no rotation").
* "lists": the model is trained further, on 16 words, stories, and the same 16 words
  again, and on plain stories, all of 128 tokens. New indexers learn from lists and
  stories. `accuracy` is the share of the words 2 to 16 of the copy that are predicted,
  `loss` that of plain stories.
* "answers": in the copy of such a list, how often the word to be written next is among
  the k tokens that a query of the `layer` picks from the list. This is `recall` here.
* "told" and "told after lists": `right` is the share of right sentences in 20 stories
  that the model of "stories" or of "lists" tells at temperature 0.8. The seed also
  draws the words.

`loss` is in nats per byte; the end of a text counts as one byte. `recall` is the share
of the attention's weights, those of all heads together, that lies on the k picks, where
the model reads all: the mean over queries 32 to 63, the stories, and the layers. Layers
are counted from 1. `seed` is empty where nothing is drawn.

The rows go to tformer/records/sparse.csv. sparse_training.csv beside it has one row for
each layer on the way through the warm-up: `kl` is the loss of the indexer, `recall` and
`oracle_recall` are for 8 picks. sparse_indexers.safetensors beside it are the trained
indexers of seed 0 in float16, to which those of every seed are rounded before anything
is measured. A run that was stopped goes on with the task and seed where it was.
"""

import copy
import functools
import math
import random
from contextlib import contextmanager, nullcontext

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import common
import tformer
from tformer.base import files
from tformer.bundle import ENDOFTEXT, ModelBundle, fraction_correct, tell
from tformer.corpora import stories
from tformer.models.llama import Llama
from tformer.nn.positions import Positions
from tformer.training.optimizers import AdamW
from tformer.variants.sparse import (
    choose_candidates,
    collect_indexer_losses,
    indexer_loss,
    make_sparse_factory,
    set_top_k,
)

INDEXER = {"d_index": 16, "n_index_heads": 4, "d_index_rope": 8}
COLUMNS = (
    "task",
    "seed",
    "chooser",
    "k",
    "layer",
    "loss",
    "accuracy",
    "recall",
    "right",
)
# dense warm-up
STEPS = 1500
BATCH = 16
POOL = 1500  # stories that are read, again and again
INDEXER_LR = 2e-3
WATCHED = (0, 25, 50, 100, 200, 300, 400, 600, 800, 1000, 1200, 1500)
# what is measured
NEW = 100
LENGTH = 64  # tokens of a story
LATE = 32  # queries from here on count for the recall
KS = (4, 8, 16, 32)
CURVE_K = 8
# sparse stage
STAGE_STEPS = 150
STAGE_K = 8
STAGE_POOL = 3000
STAGE_LR = {"model": 1e-4, "indexer": 1e-3}
# lists
WORDS = [
    *stories.LEXICON["child"][0],
    *stories.LEXICON["color"][0],
    *"ball doll car boat drum book kite plane hat".split(),
    *"Mom Dad little happy kind sunny warm cold".split(),
]
LISTED = 16
LIST_LENGTH = 128
# tokens of a row, steps, and how many lists and stories are in a batch
LIST_STAGES = ((32, 125, 32, 16), (64, 25, 16, 8), (LIST_LENGTH, 200, 8, 8))
LIST_LR = 2e-3
LIST_WARMUP = 20
LIST_INDEXER_STEPS = 500
LIST_INDEXER_BATCH = 12
LIST_KS = (8, 16, 32, 64)
ANSWERS_K = 16
# stories that are told
TOLD = 20
TOLD_KS = (16, 32)


# --- texts


@functools.cache
def storyteller():
    "The model that gets indexers, its tokenizer, and its card."
    return tformer.load("stories")


def encode(text):
    "The ids of a text."
    return storyteller().tokenizer.encode(text)


def end():
    "The token between two texts."
    return storyteller().tokenizer.token_to_id(ENDOFTEXT)


@functools.cache
def encode_stories(n, seed):
    "The first 64 tokens of so many long stories, behind the end of one."
    texts = stories.generate_stories(2 * n + 20, seed, level=1)
    rows = [[end(), *encode(text.strip())] for text in texts]
    return torch.tensor([r[: LENGTH + 1] for r in rows if len(r) > LENGTH][:n])


@functools.cache
def story_rows(n, seed, length=LIST_LENGTH):
    "Stories one after another, cut into rows of so many tokens and one more."
    ids = []
    for text in stories.generate_stories(3 * n + 20, seed, level=1):
        ids += [end(), *encode(text.strip())]
    return torch.tensor(ids[: n * (length + 1)]).view(n, length + 1)


@functools.cache
def list_rows(n, seed, length=LIST_LENGTH):
    "Rows as long: words, stories that fill the row, and the same words again."
    draw = random.Random(seed)
    words = [encode(f" {word}")[0] for word in WORDS]
    room = length - 2 * LISTED
    fill = story_rows(n, seed + 100, room - 1).tolist() if room else [[]] * n
    rows = []
    for middle in fill:
        listed = draw.sample(words, LISTED)
        rows.append([end(), *listed, *middle, *listed])
    return torch.tensor(rows)


def num_bytes(rows):
    "The bytes of all tokens that are predicted; the end of a text is one."
    texts = map(storyteller().tokenizer.decode, rows[:, 1:].tolist())
    return sum(len(text.replace(ENDOFTEXT, "\n").encode()) for text in texts)


def new_stories(steps):
    "The stories that losses are measured on: fewer if there are few steps."
    return encode_stories(min(NEW, 2 * steps), 1)


# --- who chooses, and what


def attention_layers(model):
    "The attention of each block."
    return [block.attention.sublayer for block in model.blocks]


def oracle(layer, x):
    "The attention's weights themselves, the mean over the heads."
    return layer.forward(x, need_weights=True)[1].mean(1, keepdim=True)


def window(layer, x):
    "The nearest tokens score highest."
    t = x.shape[1]
    return torch.arange(float(t)).expand(len(x), 1, t, t)


def make_random(seed):
    "A chooser whose scores are drawn."
    draw = torch.Generator().manual_seed(seed)

    def choose(layer, x):
        return torch.rand(len(x), 1, x.shape[1], x.shape[1], generator=draw)

    return choose


def by_indexer(layer, x):
    "The scores of a layer's own indexer."
    positions = Positions(start=0, length=x.shape[1])
    keys = layer.indexer.project_keys(x, positions)
    return layer.indexer.score(*layer.indexer.project_queries(x, x, positions), keys)


def hide_later(scores):
    "Scores that no query has for a token after it."
    t = scores.shape[-1]
    return scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)


def pick(scores, k):
    "Which tokens each query reads: the best k, and none after it."
    scores = hide_later(scores)
    positions = Positions(start=0, length=scores.shape[-1])
    best, _ = choose_candidates(scores, positions, positions, k)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return picked & (scores > -math.inf)


@contextmanager
def restrict(model, choose, k):
    "Let each query of a dense model read only the k tokens that are chosen."

    def add_mask(layer, given, named):
        return given, named | {"mask": pick(choose(layer, given[0]), k)}

    hooks = [
        layer.register_forward_pre_hook(add_mask, with_kwargs=True)
        for layer in attention_layers(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- indexers


def add_indexers(model, seed):
    "A sparse copy of a model that reads all; its indexers are not trained."
    torch.manual_seed(seed)
    sparse = Llama(model.config, make_sparse_factory(model.config, None, **INDEXER))
    missing, unknown = sparse.load_state_dict(model.state_dict(), strict=False)
    assert not unknown and all(".indexer." in name for name in missing)
    return sparse.eval()


def indexer_parameters(model):
    "The parameters of all indexers by name; none in a dense model."
    return {name: p for name, p in model.named_parameters() if ".indexer." in name}


def turn_otherwise(model, layers):
    "A copy in some of whose layers the indexer, and it alone, turns other pairs."
    model = copy.deepcopy(model)
    for number in layers:
        indexer = attention_layers(model)[number - 1].indexer
        indexer.rotary = copy.deepcopy(indexer.rotary)  # the others share it
        indexer.rotary.layout = "interleaved"
    return model


def turn_nothing(model):
    "A copy whose indexers know no positions."
    model = copy.deepcopy(model)
    for layer in attention_layers(model):
        layer.indexer.rotary = None
    return model


def rotations(model):
    "The model and all its copies that turn in another way, by name."
    numbers = range(1, len(model.blocks) + 1)
    yield "indexer", model
    yield "wrong", turn_otherwise(model, numbers)
    for number in numbers:
        yield f"wrong layer {number}", turn_otherwise(model, [number])
    yield "no rotation", turn_nothing(model)


# --- training


def draw_batches(rows, batch, steps, seed):
    "So many batches, each of rows that are drawn anew."
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield rows[torch.randint(len(rows), (batch,), generator=draw)]


def take_step(optimizer, loss):
    "Change the parameters of an optimizer once."
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def cross_entropy(logits, targets, **options):
    "The loss of logits (b, t, vocab), in nats per token unless options say otherwise."
    return F.cross_entropy(logits.transpose(1, 2), targets, **options)


def warm_up(model, batches, watch=lambda step: None):
    "Train the indexers of a model that reads all, and nothing but them."
    set_top_k(model, None)
    model.requires_grad_(False)
    trained = list(indexer_parameters(model).values())
    for p in trained:
        p.requires_grad_(True)
    optimizer = AdamW(trained, lr=INDEXER_LR, weight_decay=0.0)
    step = 0
    for step, batch in enumerate(batches, 1):
        watch(step - 1)
        with collect_indexer_losses(model) as losses:
            model(batch[:, :-1])
        take_step(optimizer, sum(losses))
    watch(step)


@functools.cache
def trained_indexers(seed, steps):
    """The storyteller with trained indexers, and rows about how they learned.

    The indexers are rounded to float16 at the end, as they are in the file.
    """
    model = add_indexers(storyteller().model, seed)
    seen = look(model, new_stories(steps))
    curve = []

    def watch(step):
        if step in WATCHED or step == steps:
            curve.extend({"seed": seed, "step": step} | row for row in follow(seen))

    pool = encode_stories(min(POOL, steps * BATCH), 2)
    warm_up(model, draw_batches(pool, BATCH, steps, seed), watch)
    with torch.no_grad():
        for p in indexer_parameters(model).values():
            p.copy_(p.half())
    return model, curve


def train_on(model, steps, seed):
    "Train all of a model on stories, and its indexers, if any, on its attention."
    model.requires_grad_(True)
    indexers = list(indexer_parameters(model).values())
    known = set(map(id, indexers))
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [
        {"params": rest, "lr": STAGE_LR["model"]},
        {"params": indexers, "lr": STAGE_LR["indexer"]},
    ]
    optimizer = AdamW([g for g in groups if g["params"]], weight_decay=0.0)
    pool = encode_stories(min(STAGE_POOL, steps * BATCH), 3)
    for batch in draw_batches(pool, BATCH, steps, 100 + seed):
        collect = collect_indexer_losses(model) if indexers else nullcontext([])
        with collect as losses:
            loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        take_step(optimizer, loss + sum(losses))
    return model


def list_batches(steps):
    "Batches of lists and of stories, the shortest first."
    for length, most, n_lists, n_stories in LIST_STAGES:
        some = min(most, steps)
        lists = list_rows(min(4000, 20 * steps), 20, length)
        plain = story_rows(min(2000, 20 * steps), 22, length)
        yield from zip(
            draw_batches(lists, n_lists, some, length),
            draw_batches(plain, n_stories, some, length + 1),
            strict=True,
        )


@functools.cache
def list_teller(steps):
    "The storyteller, dense, after it has learned to repeat lists."
    model = copy.deepcopy(storyteller().model)
    optimizer = AdamW(model.parameters(), lr=LIST_LR, weight_decay=0.0)
    total = sum(min(most, steps) for _, most, *_ in LIST_STAGES)
    for step, (lists, plain) in enumerate(list_batches(steps)):
        lr = LIST_LR * min(1, (step + 1) / LIST_WARMUP) * (1 - 0.9 * step / total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        copied = cross_entropy(list_logits(model, lists), list_answers(lists))
        told = cross_entropy(model(plain[:, :-1]), plain[:, 1:])
        optimizer.zero_grad()
        (copied / 2 + told).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@functools.cache
def list_indexers(seed, steps):
    "The same model with trained indexers."
    model = add_indexers(list_teller(steps), seed)
    steps = min(steps, LIST_INDEXER_STEPS)
    n = min(300, 20 * steps)
    pool = torch.cat([list_rows(n, 30), story_rows(n, 31)])
    warm_up(model, draw_batches(pool, LIST_INDEXER_BATCH, steps, seed))
    return model


# --- measures


@torch.no_grad()
def nats_per_byte(model, rows):
    "The loss of a model, as it is, on the tokens of all rows but the first ones."
    total = sum(
        cross_entropy(model(part[:, :-1]), part[:, 1:], reduction="sum").item()
        for part in rows.split(50)
    )
    return total / num_bytes(rows)


def list_answers(rows):
    "The words of the copy that can be known: all but the first."
    return rows[:, 1 - LISTED :]


def list_logits(model, rows):
    "What is predicted where these words stand."
    return model(rows[:, :-1])[:, 1 - LISTED :]


@torch.no_grad()
def list_accuracy(model, rows):
    "The share of these words that a model predicts."
    right = [
        list_logits(model, part).argmax(-1) == list_answers(part)
        for part in rows.split(50)
    ]
    return torch.cat(right).float().mean().item()


@torch.no_grad()
def look(model, rows):
    "Each layer of a model that reads all, what it is given, and its weights."
    seen = []

    def keep(layer, given):
        seen.append((layer, given[0], layer.forward(given[0], need_weights=True)[1]))

    hooks = [layer.register_forward_pre_hook(keep) for layer in attention_layers(model)]
    model(rows[:, :-1])
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def recalls(seen, choose, k):
    "For each layer, the share of the weights that lies on what is chosen."
    return [
        (weights.mean(1, keepdim=True) * pick(choose(layer, x), k))[:, :, LATE:]
        .sum(-1)
        .mean()
        .item()
        for layer, x, weights in seen
    ]


@torch.no_grad()
def follow(seen):
    "A row for each layer: how far its indexer has come."
    losses = [
        indexer_loss(hide_later(by_indexer(layer, x)), weights)
        for layer, x, weights in seen
    ]
    found = zip(
        losses,
        recalls(seen, by_indexer, CURVE_K),
        recalls(seen, oracle, CURVE_K),
        strict=True,
    )
    for number, values in enumerate(found, 1):
        yield {"layer": number} | {
            name: f"{value:.4f}"
            for name, value in zip(
                ("kl", "recall", "oracle_recall"), values, strict=True
            )
        }


@torch.no_grad()
def answer_shares(seen, choose, k):
    "For each layer, how often the next word of a copy is among the picks."
    shares = []
    for layer, x, _ in seen:
        picked = pick(choose(layer, x), k)[:, 0]
        queries = torch.arange(x.shape[1] + 1 - LISTED, x.shape[1])
        places = torch.arange(2, LISTED + 1)  # of words 2 to 16 in the list
        shares.append(picked[:, queries, places].float().mean().item())
    return shares


def measure(model, chooser, k, rows, choose):
    "A row about stories, of a dense model whose queries read what is chosen."
    recall = recalls(look(model, rows), choose, k)
    with restrict(model, choose, k):
        loss = nats_per_byte(model, rows)
    return make_row(chooser, k, loss=loss, recall=sum(recall) / len(recall))


def measure_sparse(model, chooser, k, rows):
    "The same of a model with indexers; it reads k tokens from now on."
    set_top_k(model, None)
    recall = recalls(look(model, rows), by_indexer, k)
    set_top_k(model, k)
    return make_row(
        chooser, k, loss=nats_per_byte(model, rows), recall=sum(recall) / len(recall)
    )


def measure_lists(model, chooser, k, steps):
    "A row about lists, of a model as it is."
    n = min(NEW, 2 * steps)
    return make_row(
        chooser,
        k,
        loss=nats_per_byte(model, story_rows(n // 2, 13)),
        accuracy=list_accuracy(model, list_rows(n, 21)),
    )


def measure_told(model, chooser, k, seed, n):
    "A row about the stories that a model tells."
    bundle = ModelBundle(model, storyteller().tokenizer, {})
    told = tell(bundle, n, temperature=0.8, seed=seed)
    return make_row(chooser, k, right=fraction_correct(told))


def make_row(chooser, k="", layer="", **found):
    "The columns of a row; numbers are rounded."
    return {
        "chooser": chooser,
        "k": k,
        "layer": layer,
        **{name: f"{value:.4f}" for name, value in found.items()},
    }


# --- tasks; seed "" stands for what no seed changes


def run_stories(seed, args):
    "Rows of the losses under each choice, and the two files about the indexers."
    rows = new_stories(args.steps)
    if seed == "":
        model = storyteller().model
        yield make_row("dense", loss=nats_per_byte(model, rows))
        for k in KS:
            yield measure(model, "oracle", k, rows, oracle)
            yield measure(model, "window", k, rows, window)
        return
    model, curve = trained_indexers(seed, args.steps)
    write_curve(curve, seed, args)
    if seed == 0:
        write_indexers(model, args)
    untrained = add_indexers(storyteller().model, seed)
    for k in KS:
        yield measure_sparse(model, "indexer", k, rows)
        yield measure(storyteller().model, "random", k, rows, make_random(seed))
        yield measure_sparse(untrained, "untrained", k, rows)


def run_stage(seed, args):
    "Rows before and after the sparse stage, and of a dense model in its place."
    rows = new_stories(args.steps)
    steps = min(args.steps, STAGE_STEPS)
    before = trained_indexers(seed, args.steps)[0]
    yield make_row("dense", loss=nats_per_byte(storyteller().model, rows))
    for k in KS:
        yield measure_sparse(before, "indexer", k, rows)
    after = copy.deepcopy(before)
    set_top_k(after, STAGE_K)
    train_on(after, steps, seed)
    for k in KS:
        yield measure_sparse(after, "sparse stage", k, rows)
    set_top_k(after, None)
    yield make_row("sparse stage dense", loss=nats_per_byte(after, rows))
    control = train_on(copy.deepcopy(storyteller().model), steps, seed)
    yield make_row("control dense", loss=nats_per_byte(control, rows))
    mixed = copy.deepcopy(before)
    mixed.load_state_dict(control.state_dict(), strict=False)
    for k in KS:
        yield measure_sparse(mixed, "control indexer", k, rows)


def run_rotation(seed, args):
    "Rows of indexers that are turned in other ways."
    model = trained_indexers(seed, args.steps)[0]
    for name, turned in rotations(model):
        for k in KS:
            yield measure_sparse(turned, name, k, new_stories(args.steps))


def run_lists(seed, args):
    "Rows of the lists that are copied under each choice."
    dense = list_teller(args.steps)
    if seed == "":
        yield measure_lists(dense, "dense", "", args.steps)
        masked = {"oracle": oracle, "window": window}
    else:
        for name, model in rotations(list_indexers(seed, args.steps)):
            for k in LIST_KS:
                set_top_k(model, k)
                yield measure_lists(model, name, k, args.steps)
        masked = {"random": make_random(seed)}
    for name, choose in masked.items():
        for k in LIST_KS:
            with restrict(dense, choose, k):
                yield measure_lists(dense, name, k, args.steps)


def run_answers(seed, args):
    "Rows of what each layer picks from a list that it copies."
    rows = list_rows(min(NEW, 2 * args.steps), 21)
    if seed == "":
        found = {"oracle": (list_teller(args.steps), oracle)}
    else:
        good = list_indexers(seed, args.steps)
        set_top_k(good, None)
        wrong = turn_otherwise(good, range(1, len(good.blocks) + 1))
        found = {"indexer": (good, by_indexer), "wrong": (wrong, by_indexer)}
    for name, (model, choose) in found.items():
        shares = answer_shares(look(model, rows), choose, ANSWERS_K)
        for number, share in enumerate(shares, 1):
            yield make_row(name, ANSWERS_K, number, recall=share)


def tell_stories(dense, model, seed, steps):
    "Rows about the stories of a model that reads all, or what indexers pick."
    n = min(TOLD, 2 * steps)
    yield measure_told(dense, "dense", "", seed, n)
    wrong = turn_otherwise(model, range(1, len(model.blocks) + 1))
    for name, sparse in {"indexer": model, "wrong": wrong}.items():
        for k in TOLD_KS:
            set_top_k(sparse, k)
            yield measure_told(sparse, name, k, seed, n)


def run_told(seed, args):
    "Rows of the stories that the storyteller tells."
    model = trained_indexers(seed, args.steps)[0]
    yield from tell_stories(storyteller().model, model, seed, args.steps)


def run_told_after_lists(seed, args):
    "Rows of the stories that it tells after it has learned lists."
    model = list_indexers(seed, args.steps)
    yield from tell_stories(list_teller(args.steps), model, seed, args.steps)


# a task, and whether a part of it has no seed
TASKS = {
    "stories": (run_stories, True),
    "sparse stage": (run_stage, False),
    "rotation": (run_rotation, False),
    "lists": (run_lists, True),
    "answers": (run_answers, True),
    "told": (run_told, False),
    "told after lists": (run_told_after_lists, False),
}


# --- files


def write_curve(curve, seed, args):
    "Put the rows of a seed into the record of the warm-up."
    out = args.out.with_name(f"{args.out.stem}_training.csv")
    others = [row for row in common.read(out) if row["seed"] != str(seed)]
    rows = others + [row | common.about() for row in curve]
    common.write(sorted(rows, key=lambda row: int(row["seed"])), out)


def write_indexers(model, args):
    "Keep trained indexers, under the names that they have in the model."
    tensors = {name: p.detach().half() for name, p in indexer_parameters(model).items()}
    out = args.out.with_name(f"{args.out.stem}_indexers.safetensors")
    files.write_files_atomically({out: lambda beside: save_file(tensors, beside)})


def main():
    args = common.arguments(__doc__, STEPS, "sparse.csv")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = common.kept(args.out, args.again)
    done = {(row["task"], row["seed"]) for row in rows}
    jobs = [
        (task, seed)
        for task, (_, unseeded) in TASKS.items()
        for seed in [""] * unseeded + list(range(args.seeds))
    ]
    for task, seed in jobs:
        if (task, str(seed)) in done:
            continue
        for found in TASKS[task][0](seed, args):
            row = dict.fromkeys(COLUMNS, "") | {"task": task, "seed": str(seed)} | found
            print(*row.values(), sep=",", flush=True)
            rows.append(row | common.about())
        rows.sort(key=lambda row: (list(TASKS).index(row["task"]), row["seed"]))
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
