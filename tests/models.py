"""The one table of whole models; a contract is one test over its rows."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers import by_day, draw_ids, spread
from tformer.models.gpt import GPT, GPT1, GPTConfig
from tformer.models.llama import Llama, LlamaConfig, Qwen3
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2Seq, Seq2SeqConfig
from tformer.nn.positions import next_positions
from tformer.nn.static_cache import new_static_cache
from tformer.variants.gqa import convert_to_gqa
from tformer.variants.mla import make_mla_factory
from tformer.variants.sliding_window import make_window_factory
from tformer.variants.sparse import make_sparse_factory

try:
    from tformer.models import bert
except ImportError as problem:
    bert = None
    NO_BERT = f"tformer.models.bert cannot be imported: {problem}"

VOCAB = 47
MAX_LEN = 20
SIZE = dict(
    vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=4, d_ff=24, max_len=MAX_LEN
)
SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=16
)


@dataclass(frozen=True)
class Row:
    """A model of the table: what it is made of, and how it is called.

    ``causal``: it continues texts, with a cache; ``source``: it reads
    another text beside. ``kept``: numbers that a layer keeps of a token, where
    these are no keys and values. ``windows``: what each layer sees, None: all.
    """

    name: str
    cls: Any
    config: Any
    causal: bool = True
    source: bool = False
    kept: int | None = None
    windows: tuple = (None, None)

    def change(self, **changes):
        return dataclasses.replace(self.config, **changes)

    def depth(self, n):
        "What to change, so that every stack has n layers."
        own = getattr(self.config, "n_decoder_layers", None) is not None
        return dict(n_layers=n) | (dict(n_decoder_layers=n) if own else {})

    def make(self, std=0.3, **changes):
        "In eval mode, all parameters drawn anew."
        return spread(self.cls(self.change(**changes)), std)

    def ids(self, b=3, t=12, seed=0):
        return draw_ids(b, t, low=1, high=VOCAB, seed=seed)

    def run(self, model, ids, rows=None, via="forward", **how):
        """What a model answers; all of it in one tensor.

        ``rows``: whose sources are read, of three, one of them padded.
        """
        call = model if via == "forward" else getattr(model, via)
        if self.source and (how.get("cache") is None or how["cache"].is_empty):
            rows = torch.arange(len(ids)) if rows is None else rows
            src = draw_ids(3, 7, low=1, high=self.config.vocab_size, seed=9)
            src = src[rows].to(ids.device)
            keep = torch.ones(3, 7).bool()
            keep[1, :3] = False
            keep = keep[rows].to(ids.device)
            how |= dict(
                encoder_hidden_states=model.encode(src, keep),
                encoder_attention_mask=keep,
            )
        out = call(ids, **how)
        if isinstance(out, torch.Tensor):
            return out
        return torch.cat([part.flatten() for part in out])


class ConvertedRow(Row):
    "A model with as many key heads as query heads, converted to two."

    def make(self, std=0.3, **changes):
        model = super().make(std, n_kv_heads=None, **changes)
        return convert_to_gqa(model, 2, calibration_ids=self.ids())


class LatentLlama(Llama):
    "A Llama with latent attention."

    def __init__(self, config):
        def attention(layer):
            return make_mla_factory(
                config, kv_rank=6, d_nope=4, d_rope=4, d_v=3, q_rank=8
            )(layer)

        super().__init__(config, attention)


class WindowedLlama(Llama):
    "A Llama whose layers see the last 5 tokens, or all, in turn."

    def __init__(self, config):
        super().__init__(config, make_window_factory(config, [5, None]))


class SinkLlama(Llama):
    "A Llama whose layers have windows, sinks and biases."

    def __init__(self, config):
        super().__init__(config, make_window_factory(config, 7, sinks=True, bias=True))


class SparseLlama(Llama):
    "A Llama whose tokens read the 4 best tokens of a lightning indexer."

    def __init__(self, config):
        super().__init__(
            config, make_sparse_factory(config, 4, d_index=8, n_index_heads=2)
        )


class SparseLatentLlama(Llama):
    "A Llama with latent attention to the 4 best tokens, as in DeepSeek-V3.2."

    def __init__(self, config):
        super().__init__(
            config,
            make_sparse_factory(
                config,
                4,
                d_index=8,
                n_index_heads=2,
                d_index_rope=4,
                latent=dict(kv_rank=6, d_nope=4, d_rope=4, d_v=3, q_rank=8),
            ),
        )


class BlockLlama(Llama):
    "A Llama whose groups read their own block and another one, as in MiniMax-M3."

    def __init__(self, config):
        super().__init__(
            config,
            make_sparse_factory(
                config, 2, d_index=8, n_index_heads=None, block_size=3, n_local=1
            ),
        )


ROWS = [
    Row("Seq2Seq", Seq2Seq, Seq2SeqConfig(**SIZE), source=True),
    Row("PreNormSeq2Seq", PreNormSeq2Seq, Seq2SeqConfig(**SIZE), source=True),
    Row(
        "Seq2Seq, own sizes",
        Seq2Seq,
        Seq2SeqConfig(
            **SIZE
            | dict(
                vocab_size=53,
                decoder_vocab_size=VOCAB,
                n_layers=3,
                n_decoder_layers=2,
                tie_word_embeddings=False,
            )
        ),
        source=True,
    ),
    Row("GPT", GPT, GPTConfig(**SIZE)),
    Row("GPT1", GPT1, GPTConfig(**SIZE)),
    Row("Llama", Llama, LlamaConfig(**SIZE)),
    Row(
        "Llama, grouped, tied, scaled",
        Llama,
        LlamaConfig(
            **SIZE, n_kv_heads=2, tie_word_embeddings=True, rope_scaling=SCALING
        ),
    ),
    Row("Qwen3", Qwen3, LlamaConfig(**SIZE, n_kv_heads=1, d_head=6)),
    ConvertedRow("GPT, converted", GPT, GPTConfig(**SIZE, n_kv_heads=2)),
    ConvertedRow("Llama, converted", Llama, LlamaConfig(**SIZE, n_kv_heads=2)),
    Row("Llama, latent", LatentLlama, LlamaConfig(**SIZE), kept=6 + 4),
    Row(
        "Llama, windows",
        WindowedLlama,
        LlamaConfig(**SIZE, n_kv_heads=2),
        windows=(5, None),
    ),
    Row("Llama, sinks", SinkLlama, LlamaConfig(**SIZE), windows=(7, 7)),
    Row(
        "Llama, sparse",
        SparseLlama,
        LlamaConfig(**SIZE, n_kv_heads=2),
        kept=2 * 2 * 4 + 8,
    ),
    Row("Llama, sparse latent", SparseLatentLlama, LlamaConfig(**SIZE), kept=6 + 4 + 8),
    Row(
        "Llama, sparse blocks",
        BlockLlama,
        LlamaConfig(**SIZE, n_kv_heads=2),
        kept=2 * 2 * 4 + 8,
    ),
]
BERTS = ["Bert", "BertMaskedLM", "BertPretraining", "BertTagger", "BertClassifier"]
ROWS += [
    Row(
        name,
        bert and getattr(bert, name),
        bert and bert.BertConfig(**SIZE, n_labels=3),
        causal=False,
    )
    for name in BERTS
]


class Preallocates:
    """A model whose cache has as many slots as it is told, and no more.

    So do the models of other people whose cache is one tensor.
    """

    def __init__(self, model):
        self.model = model
        self.max_len = model.max_len
        self.asked = []

    def __call__(self, ids, **more):
        return self.model(ids, **more)

    def parameters(self):
        return self.model.parameters()

    def new_cache(self, batch_size, max_len):
        assert max_len <= self.max_len
        self.asked.append(max_len)
        return new_static_cache(self.model, batch_size, max_len)


def marks(row, usual):
    "Without its class a row is skipped; if it is not usual, it is run at night."
    skip = [] if row.cls else [pytest.mark.skip(reason=NO_BERT)]
    return skip if row.name in usual else [*skip, pytest.mark.nightly]


def rows(*kinds, usual=None):
    """A test over the rows that are all of this, such as "causal".

    Where `usual` names rows, the others are run at night.
    """
    found = [row for row in ROWS if all(getattr(row, kind) for kind in kinds)]
    names = {row.name for row in found}
    usual = names if usual is None else usual
    if not names.issuperset(usual):
        raise ValueError(f"no such rows: {sorted(set(usual) - names)}")
    return pytest.mark.parametrize(
        "row",
        [pytest.param(row, id=row.name, marks=marks(row, usual)) for row in found],
    )


def num_read(cache):
    "How many tokens each row has read; a layer with a window keeps fewer."
    return next_positions(cache, 1)[:, 0].expand(len(cache.lengths))


# one model of each family
FAMILIES = ["Seq2Seq", "GPT", "Llama, grouped, tied, scaled", "Bert"]
# one model of each family that writes, and of each kind of cache
WRITERS = [
    "Seq2Seq",
    "GPT",
    "Llama, grouped, tied, scaled",
    "Llama, latent",
    "Llama, windows",
    "Llama, sparse blocks",
]
every = rows()
causal = rows("causal")


# --- texts of twelve ids that are fed in pieces, whole or padded on the left

RAGGED = torch.stack([torch.arange(12) - n for n in (0, 3, 5)]).clamp(min=-1)


def in_pieces(test):
    "Over all causal rows, over sizes of pieces, without padding and with."
    for name, values, ids in (
        ("positions", [None, RAGGED], ["plain", "ragged"]),
        (
            "sizes",
            by_day([(1,) * 12, (5, 4, 3), (6, 1, 1, 3, 1)], (6, 1, 1, 3, 1)),
            None,
        ),
    ):
        test = pytest.mark.parametrize(name, values, ids=ids)(test)
    return causal(test)


def pieces(row, model, ids, cache, sizes, positions=None):
    "Logits of a text that is fed in pieces."
    parts = []
    start = 0
    for n in sizes:
        part = slice(start, start := start + n)
        how = {} if positions is None else dict(positions=positions[:, part])
        parts.append(row.run(model, ids[:, part], cache=cache, **how))
    return torch.cat(parts, 1)
