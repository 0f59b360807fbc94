"""What drafts gain: python tests/bench/bench_speculative.py

A model of 6 layers, d 384 and 10,000 ids reads 64 ids and writes 200 more,
greedily. The rows divide the processor time of ``generate`` by that of
``speculative_generate`` with a ``PromptLookup``: medians over rounds in which both run
in turn. Both must write the same ids. What the text is decides everything, so it
is prescribed: the model computes as ever, and then its logits of the
prescribed id are raised. The kinds of text:

"loop"      40 ids over and over;
"phrases"   made of pieces, 3 to 14 ids long, of one run of 40;
"errors"    40 ids over and over, every tenth of them another;
"own"       what the model, with random weights, writes by itself;
"nothing"   no id comes twice, so nothing is ever found;
"refused"   every pair came before, and went on otherwise: always wrong;
"letters"   four ids by chance: now and then right, the hardest to judge.

Then, what a step with k drafts costs, relative to one without; and the time
and the memory of weights of one byte, relative to float32. One thread.

--quick    small sizes, one round: that everything runs, not how fast
"""

import random
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.inference.generation import generate
from tformer.inference.speculative import PromptLookup, speculative_generate
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.quantized import quantize_int8
from timing import AT_LEAST

PROMPT = 64
NEW = 200
VOCAB = 10_000
TARGETS = {
    "loop": 1.5,
    "phrases": 1.5,
    "errors": None,
    "own": None,
    "nothing": 0.95,
    "refused": 0.95,
    "letters": 0.95,
}


def our_model():
    torch.manual_seed(0)
    size = dict(vocab_size=VOCAB, d_model=384, n_layers=6, n_heads=6)
    if timing.quick:
        size |= dict(d_model=32, n_layers=2, n_heads=2)
    return Llama(LlamaConfig(**size, max_len=PROMPT + NEW)).eval()


class Prescribed(nn.Module):
    "Computes all that the model does, and then says what it is told."

    def __init__(self, model, text):
        super().__init__()
        self.model = model
        self.max_len = model.max_len
        self.text = text
        self.end = 0

    def new_cache(self, batch_size, max_len=None):
        return self.model.new_cache(batch_size, max_len)

    def forward(self, ids, *, cache, positions=None, logits_to_keep=0):
        past = 0 if cache.is_empty else cache.key_positions.end
        self.end = past + ids.shape[1]
        logits = self.model(
            ids, cache=cache, positions=positions, logits_to_keep=logits_to_keep
        )
        rows = logits.view(-1, logits.shape[-1])
        n = len(rows)
        for row, i in zip(
            rows, self.text[self.end - n + 1 : self.end + 1], strict=False
        ):
            row[i] += 1e4
        return logits


def texts():
    "For each kind, a text as long as prompt and new ids together."
    rng = random.Random(0)
    n = PROMPT + NEW
    run = rng.sample(range(VOCAB), 40)
    found = {"loop": (run * n)[:n], "phrases": []}
    while len(found["phrases"]) < n:
        start = rng.randrange(40)
        found["phrases"] += run[start : start + rng.randrange(3, 15)]
    found["errors"] = [
        i if rng.random() > 0.1 else rng.randrange(VOCAB) for i in found["loop"]
    ]
    found["nothing"] = rng.sample(range(VOCAB), n)
    last = {}
    refused = [0, 0]
    while len(refused) < n:
        pair = (*refused[-2:],)
        last[pair] = (last.get(pair, rng.randrange(8)) + 1) % 8
        refused.append(last[pair])
    found["refused"] = refused
    found["letters"] = [rng.randrange(4) for _ in range(n)]
    return {kind: text[:n] for kind, text in found.items()}


def lookup(model, rounds=7):
    told = texts()
    for kind, target in TARGETS.items():
        said = model
        ids = torch.tensor([told["nothing"][:PROMPT]])
        if kind in told:
            said = Prescribed(model, told[kind]).eval()
            ids = torch.tensor([told[kind][:PROMPT]])
        ways = {
            "plain": lambda: generate(said, ids, max_new_tokens=NEW)[0].ids,
            "drafts": lambda: (
                speculative_generate(
                    said, ids[0], PromptLookup(), max_new_tokens=NEW
                ).ids
            ),
        }
        wrote = [way() for way in ways.values()]
        assert wrote[0] == wrote[1], f"{kind}: other ids"
        assert kind not in told or wrote[0] == told[kind][PROMPT:]
        took = timing.in_turn(ways, rounds)
        timing.row(
            f"generate / speculative, {kind}",
            took["plain"] / took["drafts"],
            None if target is None else (AT_LEAST, target),
            f"{took['plain']:.2f} s, {took['drafts']:.2f} s",
        )


@torch.inference_mode()
def steps(model, rounds=25):
    cache = model.new_cache(1)
    past = PROMPT
    model(torch.randint(VOCAB, (1, past)), cache=cache)
    drafts = (1, 2, 3, 4, 6, 8, 10, 16)

    def step(n):
        ids = torch.randint(VOCAB, (1, n))

        def run():
            model(ids, cache=cache)
            cache.crop(past)

        return run

    ways = {k: step(k + 1) for k in (0, *drafts)}
    for way in ways.values():
        way()
    took = timing.in_turn(ways, rounds)
    for k in drafts:
        timing.row(
            f"a step with {k} drafts / without",
            took[k] / took[0],
            None,
            f"{1e3 * took[k]:.1f}, {1e3 * took[0]:.1f} ms",
        )


def one_byte(model, rounds=5):
    small = quantize_int8(model)
    ids = torch.randint(VOCAB, (1, PROMPT))
    ways = {
        name: lambda m=m: generate(m, ids, max_new_tokens=NEW // 4)
        for name, m in (("float32", model), ("int8", small))
    }
    took = timing.in_turn(ways, rounds)
    timing.row(
        "float32 / int8, time of a text",
        took["float32"] / took["int8"],
        None,
        f"{took['float32']:.2f} s, {took['int8']:.2f} s",
    )
    size = {
        name: sum(x.nbytes for x in m.state_dict().values())
        for name, m in (("float32", model), ("int8", small))
    }
    timing.row(
        "float32 / int8, memory",
        size["float32"] / size["int8"],
        None,
        " and ".join(f"{n / 1e6:.1f} MB" for n in size.values()),
    )


def main():
    timing.begin(__doc__)
    model = our_model()
    timing.head("Prompt lookup, 10,000 ids, one text")
    lookup(model)
    timing.head("A step that reads drafts")
    steps(model)
    timing.head("Weights of one byte")
    one_byte(model)


if __name__ == "__main__":
    main()
