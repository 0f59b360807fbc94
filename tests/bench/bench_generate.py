"""What writing a text costs: python tests/bench/bench_generate.py

A model of 6 layers, d 384 and 10,000 ids reads prompts of 64 ids and writes
256 more, greedily. Every row of the table is a ratio of two ways that run in
turn in this process: the medians, over the rounds, of the processor time of
one whole text, prompt included. All ways have the same weights and must write
the same ids; where they do not, both are run again in float64, and must then.
One thread.

The ways: "generate" is ours; "transformers" the generate of GPT2LMHeadModel or
LlamaForCausalLM, eager, with its growing cache; "functional" a step written by
hand for this model, of PyTorch's kernels, with a preallocated cache and nothing
around them;
"uncached" reads the whole text again for each token; "compiled" is ours with a
model whose steps are one program; "products" are the products with the weights,
and nothing else.

--quick    small sizes, one round: that everything runs, not how fast
--only     rows whose names hold the word; --model, --batch, --rounds: fewer
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers import LlamaConfig as TheirConfig
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent))
import timing
from bench_models import GPT2, LLAMA, renamed
from tformer.inference.compiled import CompiledModel
from tformer.inference.generation import generate
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from timing import AT_LEAST

logging.set_verbosity_error()
PROMPT = 64
NEW = 256
# numerator, denominator, targets by batch size, and what the numerator is;
# whoever has another way puts it into WAYS, and a row of it here
TABLE = [
    ("transformers", "generate", {1: 1.1, 8: 1.15}, "eager"),
    ("functional", "generate", {1: 0.85, 8: 0.85}, "eager, by hand"),
    ("uncached", "generate", {1: 8.0}, "eager"),
    ("generate", "compiled", {1: 1.0, 8: 1.0}, "eager"),
    ("functional", "compiled", {1: 0.85, 8: 0.85}, "eager, by hand"),
    ("products", "generate", {1: None, 8: None}, "a share of the time"),
]


def our_model(kind, dtype=torch.float32, d=384, layers=6, vocab=10_000):
    torch.manual_seed(0)
    if timing.quick:
        d = 32
        layers = 2
        vocab = 100
    numbers = dict(
        vocab_size=vocab,
        d_model=d,
        n_layers=layers,
        n_heads=max(1, d // 64),
        max_len=PROMPT + NEW,
    )
    model = (
        GPT(GPTConfig(**numbers, dropout=0.0))
        if kind == "GPT"
        else Llama(LlamaConfig(**numbers))
    )
    return model.to(dtype).eval()


def their_model(ours):
    "The twin in transformers, with the very weights of ours."
    c = ours.config
    attention = dict(
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    if isinstance(ours, GPT):
        rules = GPT2
        peer = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=c.vocab_size,
                n_embd=c.d_model,
                n_layer=c.n_layers,
                n_head=c.n_heads,
                n_positions=c.max_len,
                **attention,
            )
        )
    else:
        rules = LLAMA
        peer = LlamaForCausalLM(
            TheirConfig(
                vocab_size=c.vocab_size,
                hidden_size=c.d_model,
                intermediate_size=ours.blocks[
                    0
                ].feed_forward.sublayer.up_proj.weight.shape[0],
                num_hidden_layers=c.n_layers,
                num_attention_heads=c.n_heads,
                num_key_value_heads=c.n_heads,
                rms_norm_eps=c.eps,
                rope_theta=c.rope_theta,
                attention_bias=False,
                max_position_embeddings=c.max_len,
                tie_word_embeddings=False,
                **attention,
            )
        )
    peer.to(ours.lm_head.weight.dtype)
    known = dict(peer.named_parameters())
    given = renamed(dict(ours.named_parameters()), rules)
    assert known.keys() == given.keys(), known.keys() ^ given.keys()
    for name, x in given.items():
        known[name].data = x.data.contiguous()
    return peer.eval()


@dataclass
class Functional:
    "A model by hand: kernels, weights, and a cache of a fixed size."

    model: GPT | Llama

    def __post_init__(self):
        c = self.model.config
        self.eps = c.eps
        self.d = (c.d_model,)
        self.width = c.d_model // c.n_heads
        self.prepare()

    def read(self, ids, cache, n):
        "Logits after the last of ids, which stand at n, n + 1, …"
        x = self.enter(ids, n)
        for layer, kept in zip(self.layers, cache, strict=True):
            x = self.block(x, layer, kept, n)
        return F.linear(self.norm(x[:, -1], self.last), self.model.lm_head.weight)

    def attend(self, q, k, v, kept, n):
        t = q.shape[2]
        kept[0][:, :, n : n + t] = k
        kept[1][:, :, n : n + t] = v
        y = F.scaled_dot_product_attention(
            q, kept[0][:, :, : n + t], kept[1][:, :, : n + t], is_causal=t > 1
        )
        return y.transpose(1, 2).flatten(2)

    @torch.inference_mode()
    def __call__(self, ids, new):
        c = self.model.config
        cache = self.model.lm_head.weight.new_empty(
            c.n_layers, 2, len(ids), c.n_heads, PROMPT + NEW, self.width
        )
        wrote = []
        n = 0
        while len(wrote) < new:
            logits = self.read(ids, cache, n)
            n += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True)
            wrote.append(ids)
        return torch.cat(wrote, 1).tolist()


class FunctionalLlama(Functional):
    def prepare(self):
        m = self.model
        half = torch.arange(0, self.width, 2) / self.width
        angles = torch.outer(
            torch.arange(PROMPT + NEW).double(), m.config.rope_theta ** -half.double()
        )
        angles = torch.cat([angles, angles], -1)
        dtype = m.lm_head.weight.dtype
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)
        self.last = m.norm.weight
        self.layers = [
            (
                b.attention.norm.weight,
                *(
                    getattr(b.attention.sublayer, f"{name}_proj").weight
                    for name in "qkvo"
                ),
                b.feed_forward.norm.weight,
                *(
                    getattr(b.feed_forward.sublayer, f"{name}_proj").weight
                    for name in ("gate", "up", "down")
                ),
            )
            for b in m.blocks
        ]

    def norm(self, x, weight):
        return F.rms_norm(x, self.d, weight, self.eps)

    def enter(self, ids, n):
        return F.embedding(ids, self.model.embed.weight)

    def turn(self, x, at):
        a, b = x.chunk(2, -1)
        return x * self.cos[at] + torch.cat([-b, a], -1) * self.sin[at]

    def block(self, x, layer, kept, n):
        first, q, k, v, o, second, gate, up, down = layer
        y = self.norm(x, first)
        shape = (*x.shape[:2], -1, self.width)
        at = slice(n, n + x.shape[1])
        q, k, v = (F.linear(y, w).view(shape).transpose(1, 2) for w in (q, k, v))
        x = x + F.linear(self.attend(self.turn(q, at), self.turn(k, at), v, kept, n), o)
        y = self.norm(x, second)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


class FunctionalGPT(Functional):
    def prepare(self):
        def both(part):
            return part.weight, part.bias

        self.last = both(self.model.norm)
        self.layers = [
            [
                both(part)
                for part in (
                    b.attention.norm,
                    b.attention.sublayer.qkv_proj,
                    b.attention.sublayer.o_proj,
                    b.feed_forward.norm,
                    b.feed_forward.sublayer.up_proj,
                    b.feed_forward.sublayer.down_proj,
                )
            ]
            for b in self.model.blocks
        ]

    def norm(self, x, both):
        return F.layer_norm(x, self.d, *both, self.eps)

    def enter(self, ids, n):
        return (
            F.embedding(ids, self.model.embed.weight)
            + (self.model.embed_positions.weight[n : n + ids.shape[1]])
        )

    def block(self, x, layer, kept, n):
        first, qkv, o, second, up, down = layer
        q, k, v = (
            F.linear(self.norm(x, first), *qkv)
            .view(*x.shape[:2], 3, -1, self.width)
            .permute(2, 0, 3, 1, 4)
        )
        x = x + F.linear(self.attend(q, k, v, kept, n), *o)
        y = F.linear(self.norm(x, second), *up)
        return x + F.linear(F.gelu(y, approximate="tanh"), *down)


def functional(model):
    return (FunctionalGPT if isinstance(model, GPT) else FunctionalLlama)(model)


def ours(model):
    return lambda ids, new: [
        text.ids for text in generate(model, ids, max_new_tokens=new)
    ]


def transformers(model):
    peer = their_model(model)
    return lambda ids, new: peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )[:, ids.shape[1] :].tolist()


def uncached(model):
    @torch.inference_mode()
    def write(ids, new):
        n = ids.shape[1]
        for _ in range(new):
            best = model(ids)[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], 1)
        return ids[:, n:].tolist()

    return write


def products(model):
    "One product with each matrix for each token; None: writes nothing."
    matrices = [
        p
        for name, p in model.named_parameters()
        if p.ndim == 2 and not name.startswith("embed")
    ]

    @torch.inference_mode()
    def work(ids, new):
        rows = {
            w.shape[1]: torch.ones(len(ids), 1, w.shape[1], dtype=w.dtype)
            for w in matrices
        }
        for _ in range(new):
            for w in matrices:
                F.linear(rows[w.shape[1]], w)

    return work


def compiled(model):
    "Ours, each step one program; compiled before anything is timed."
    made = CompiledModel(model, **(dict(backend="eager") if timing.quick else {}))
    return lambda ids, new: [
        text.ids
        for text in generate(made, ids, max_new_tokens=new, drop_finished=False)
    ]


WAYS = {
    "generate": ours,
    "transformers": transformers,
    "functional": functional,
    "uncached": uncached,
    "compiled": compiled,
    "products": products,
}


def must_agree(texts, kind, batch):
    "All ways write the same ids; in float64, if rounding may decide."
    wrong = [
        name for name, text in texts.items() if text not in (None, texts["generate"])
    ]
    if wrong:
        model = our_model(kind, torch.float64)
        texts = {
            name: WAYS[name](model)(*work_of(model, batch))
            for name in ("generate", *wrong)
        }
        assert all(text == texts["generate"] for text in texts.values()), (
            f"other ids than generate's, in float64 too: {wrong}"
        )
    return wrong


def work_of(model, batch):
    prompt, new = (8, 6) if timing.quick else (PROMPT, NEW)
    made = torch.Generator().manual_seed(batch)
    return torch.randint(model.config.vocab_size, (batch, prompt), generator=made), new


def bench(kind, batch, rounds=7, only=""):
    "All rows of the table for a model and a batch size."
    model = our_model(kind)
    table = [row for row in TABLE if batch in row[2] and only in " / ".join(row[:2])]
    names = dict.fromkeys(["generate", *(name for row in table for name in row[:2])])
    made = {name: WAYS[name](model) for name in names}
    work = work_of(model, batch)
    near = must_agree({name: way(*work) for name, way in made.items()}, kind, batch)
    took = timing.in_turn(
        {name: lambda way=way: way(*work) for name, way in made.items()}, rounds
    )
    for name, against, targets, what in table:
        a, b = (1e3 * took[k] / work[1] for k in (name, against))
        told = f"{a:.2f} to {b:.2f} ms a step ({what})"
        if name in near:
            told += "; equal ids in float64"
        goal = targets[batch]
        timing.row(
            f"{kind}: {name} / {against}, batch {batch}",
            a / b,
            None if goal is None else (AT_LEAST, goal),
            told,
        )


def main():
    args = timing.begin(
        __doc__,
        batch=dict(type=int, nargs="*", default=[1, 8]),
        model=dict(nargs="*", default=["GPT", "Llama"]),
        only=dict(default="", help="only ways whose name holds the word"),
        rounds=dict(type=int, default=7),
    )
    timing.head(f"A text of {NEW} ids after {PROMPT}")
    for kind in args.model:
        for b in args.batch:
            bench(kind, b, args.rounds, args.only)


if __name__ == "__main__":
    main()
