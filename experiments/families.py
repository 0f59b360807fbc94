"""Which attention has a model family of today? What transformers ships, read out.

    python experiments/families.py                      all families, ten seconds
    python experiments/families.py --out some.csv
    python experiments/families.py llama gpt_oss        print these, write nothing

One row for each family of language models that the installed `transformers` knows:
every type that it lists for causal language models, for text beside images, or for
text beside several media, and of those that read more than text the text model. Nothing
is downloaded, and no weights are made. Encoders and encoder-decoders have no row.

All numbers are those of the default configuration, which is what a family's class gives
without arguments. The default sizes of a family are usually those of one published
model, and not always. `checkpoint` is the model that the class says it resembles, and
is not read here: the default of qwen3 has a key head for each of its 32 query heads,
and Qwen3-8B has 8. Some defaults leave out what the published models have; `unused`
names what a default sets and no layer of it uses.

* `model_type` is the family, by the name that transformers gives it.
* `keys` says how the query heads share keys: each has its own ("mha"), several share
  one ("gqa"), all share one ("mqa"), or each computes its own from one latent ("mla").
  It is empty if no layer attends.
* `reads` says what the layers read, joined by " + " if they differ: "all" earlier
  tokens, a "window" of the nearest, a "chunk" (the tokens so far of a block of fixed
  length), a "sparse" choice that learned scores make, a "compressed" text whose entries
  stand for many tokens each, or a state: "linear" for linear attention and state-space
  layers, "conv" for short convolutions.
* `heads` and `kv_heads` are the heads of queries and of keys, `d_head` is the width of
  a head's queries and keys. With a latent, `kv_heads` is empty; `kv_rank` is the width
  of the latent, and `d_rope` that of the key which all heads share beside it and which
  most families rotate. Where the configuration does not give `d_head`, it is the
  model's width over the heads.
* `layers` counts layers, and one that runs twice or holds two attentions counts twice.
  Of these, `full_layers` read all, `local_layers` a window or a chunk of `window`
  tokens, the token itself among them, `sparse_layers` the `index_top_k` tokens that
  they choose, and `compressed_layers` and `linear_layers` what is said above.
  `other_layers` do none of that. A layer with both attention and a state counts as
  both. In deepseek_v4 each layer reads its window as well, and `index_top_k` counts
  entries, of which there is one for every four tokens. `reusing_layers` read the keys
  of an earlier layer.
* `local_sizes` are sizes that differ in the local layers.
* `undecided` says why a row has no verdict: `keys`, `reads` and all kinds of layers are
  empty then. An attribute whose name sounds like attention and that is not known here
  is such a reason, and so is modelling code that makes a mask of its own.

An attribute counts if the family's modelling code uses it; where that cannot be seen
from names, the code was read, and the tables below say what it does. `transformers` is
the version. The rows go to tformer/records/families.csv.
"""

import argparse
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import common

OUT = common.RECORDS / "families.csv"
LISTS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
READS = ("all", "window", "chunk", "sparse", "compressed", "linear", "conv")
LOCAL = ("window", "chunk")
ATTENTION = ("all", "sparse", "compressed", *LOCAL)
# what layers of a type read; () for layers that are a feed-forward alone
LAYER_TYPES = {
    "full_attention": ("all",),
    "global": ("all",),
    "sliding_attention": ("window",),
    "local": ("window",),
    "chunked_attention": ("chunk",),
    "indexed_attention": ("sparse",),
    "minimax_m3_sparse": ("sparse",),
    "compressed_sparse_attention": ("sparse",),
    "heavily_compressed_attention": ("compressed",),
    "linear_attention": ("linear",),
    "conv": ("conv",),
    "moe": (),
    "mlp": (),
}
# Families whose layers of type "hybrid" attend and have a state of their own; and those
# in which "hybrid" is attention whose queries and keys pass a short convolution.
TWO_IN_ONE = ("falcon_h1", "zamba", "zamba2")
CONVOLVED = ("inkling_text", "inkling2_text", "zaya")
# What configurations do not say, and the code does.
RECURRENT = ("rwkv", "xlstm")  # no layer attends
CHOOSES = ("doge",)  # keeps the `keep_window_size` best keys
OWN_CAUSAL_MASK = ("openai-gpt", "kosmos_2_text_model")  # a triangle
OWN_WINDOW_MASK = ("gpt_neo",)  # a triangle without a smaller one
WINDOW_BESIDE = ("deepseek_v4",)  # all layers read a window as well
DOUBLE_LOCAL_KV = ("mimo_v2_flash",)  # twice the key heads in local layers
READ = {
    "diffusion_gemma_text": "writes blocks of tokens that see each other",
}
# Attributes that sound like attention. Those of the second group are no part of what is
# recorded: sizes of an indexer or of queries, or other spellings of the layer types.
SOUNDS = re.compile(
    "window|sliding|chunk|local|global_attn|full_at|sparse|index|compress|latent|kv|"
    "key_value|multi_query|swa_|lora_rank|(attn|attention|block)_type|layer_types"
)
OTHER = re.compile(
    "mlp|moe|mtp|expert|mamba|decoder_sparse|chunk_size_feed|qkv|"
    "alpha_factor|beta_factor|resampler|ngram"
)
KNOWN = set(
    """
    sliding_window use_sliding_window attention_window_size window_size layer_types
    layers_block_type attention_chunk_size kv_lora_rank num_key_value_heads num_kv_heads
    multi_query index_topk index_topk_blocks index_block_size indexer_budget
    keep_window_size swa_head_dim swa_num_attention_heads swa_num_key_value_heads
    num_kv_shared_layers sliding_window_size num_sliding_attention_heads

    attention_types block_types full_attn_idxs global_attn_every_n_layers
    local_attention local_layer_ids max_window_layers sliding_window_pattern
    _sliding_window_pattern kv_source_layers kv_channels index_head_dim index_n_heads
    index_kpool index_kpool_always_select_tail index_local_blocks indexer_types
    indexer_head_dim indexer_kv_heads indexer_n_heads indexer_compress_ratio
    compress_rates compress_rope_theta q_lora_rank o_lora_rank chunk_size
    chunkwise_kernel max_inference_chunksize prefix_dense_sliding_window_pattern
""".split()
)
COLUMNS = (
    "model_type",
    "keys",
    "reads",
    "heads",
    "kv_heads",
    "d_head",
    "kv_rank",
    "d_rope",
    "layers",
    "full_layers",
    "local_layers",
    "window",
    "sparse_layers",
    "index_top_k",
    "compressed_layers",
    "linear_layers",
    "other_layers",
    "reusing_layers",
    "local_sizes",
    "unused",
    "undecided",
    "checkpoint",
)


class Undecided(Exception):
    "Why the rules say nothing about a family."


def listed():
    "All types of models that write text, each with the name of its class."
    return {
        name: cls
        for what in reversed(LISTS)
        for name, cls in getattr(
            modeling_auto, f"MODEL_FOR_{what}_MAPPING_NAMES"
        ).items()
    }


def text_configs():
    "The default configuration of each family, or the reason why there is none."
    found = {}
    for name in sorted(listed()):
        try:
            whole = CONFIG_MAPPING[name]()
        except (StrictDataclassError, ValueError) as error:
            found[name] = f"no default: {str(error).split(chr(10))[-1].strip()}"
            continue
        text = whole.get_text_config(decoder=True)
        name = text.model_type
        if not (
            whole.is_encoder_decoder
            or text.is_encoder_decoder
            or name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        ):
            found[name] = CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else text
    return dict(sorted(found.items()))


@cache
def text_of(folder):
    return "\n".join(
        path.read_text("utf-8") for path in sorted(folder.glob("modeling_*.py"))
    )


def modelling(config):
    "The code that reads a configuration."
    code = text_of(Path(inspect.getfile(type(config))).parent)
    if not code:  # the family has the model of another one
        cls = getattr(transformers, listed()[config.model_type])
        code = text_of(Path(inspect.getfile(cls)).parent)
    # what an example in a docstring sets is not read
    return re.sub(r"^\s*>>>.*$", "", code, flags=re.M)


def checkpoint(config):
    "The published model that a class names in its docstring."
    links = re.findall(
        r"\(https://huggingface\.co/([\w.-]+/[\w.-]+)\)", type(config).__doc__ or ""
    )
    return next((x for x in links if not x.startswith(("papers/", "docs/"))), "")


def value(config, *names):
    "The first of these attributes that is set."
    return next((x for x in (getattr(config, name, None) for name in names) if x), None)


def window_of(config):
    "The window that a configuration sets and does not switch off."
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return value(config, "sliding_window", "window_size")


def top_k(config):
    "How many tokens a configuration lets a layer choose."
    blocks = value(config, "index_topk_blocks")
    return (
        blocks * config.index_block_size
        if blocks
        else value(config, "index_topk", "indexer_budget", "keep_window_size")
    )


def kinds(config, code):
    "What each layer reads: a tuple for each."
    name = config.model_type
    if name in RECURRENT:
        return [("linear",)] * config.num_hidden_layers
    if name in CHOOSES:
        return [("sparse",)] * config.num_hidden_layers
    types = value(config, "layer_types", "attention_layers")
    if types is None:
        one = (
            "sliding"
            if window_of(config)
            else "chunked"
            if value(config, "attention_chunk_size")
            else "full"
        )
        types = [f"{one}_attention"] * config.num_hidden_layers
    meaning = dict(LAYER_TYPES)
    if name in TWO_IN_ONE or name in CONVOLVED:
        more = ("linear",) if name in TWO_IN_ONE else ()
        meaning |= {"hybrid": ("all", *more), "hybrid_sliding": ("window", *more)}
    strange = sorted(set(types) - set(meaning))
    if strange:
        raise Undecided(f"layers of type {', '.join(strange)}")
    read = [meaning[kind] for kind in types]
    for layer in getattr(config, "cross_attention_layers", None) or ():
        read[layer] = ()  # they read the image
    prove(config, code, {kind for layer in read for kind in layer})
    return read


def prove(config, code, read):
    "Refuse what the modelling code does not confirm."
    name = config.model_type
    evidence = {
        "all": "create_causal_mask",
        "window": "sliding_window_causal_mask",
        "chunk": "create_chunked_causal_mask",
        "sparse": "Indexer(",
    }
    own = {"all": OWN_CAUSAL_MASK, "window": OWN_WINDOW_MASK}
    for kind in sorted(read & set(evidence)):
        if evidence[kind] not in code and name not in own.get(kind, ()):
            raise Undecided(f"the code makes no usual mask or choice for {kind}")
    if "window" in read and not window_of(config):
        raise Undecided("layers with a window of no size")
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        raise Undecided("reads the future")
    if getattr(config, "is_decoder", None) is False and re.search(
        r"config\.is_decoder\b", code
    ):
        raise Undecided("is_decoder is False, and the code asks for it")


def kv_heads(config):
    "How many heads have keys of their own."
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        if config.new_decoder_architecture:
            return config.num_kv_heads
        return 1 if config.multi_query else heads
    if getattr(config, "num_key_value_heads", heads) is None:
        raise Undecided("num_key_value_heads is None")
    return value(config, "num_key_value_heads") or heads


def sizes(config, code, local=False):
    "The sizes of attention that a configuration of one layer gives."
    heads = config.num_attention_heads
    if value(config, "kv_lora_rank") and "kv_lora_rank" in code:
        return {
            "heads": heads,
            "kv_heads": "",
            "kv_rank": config.kv_lora_rank,
            "d_rope": config.qk_rope_head_dim,
            "d_head": config.qk_nope_head_dim + config.qk_rope_head_dim,
        }
    found = {
        "heads": heads,
        "kv_heads": kv_heads(config),
        "kv_rank": "",
        "d_rope": "",
        "d_head": value(config, "head_dim", "dim_head") or config.hidden_size // heads,
    }
    if local:
        for ours, theirs in (
            ("heads", "num_attention_heads"),
            ("d_head", "head_dim"),
            ("kv_heads", "num_key_value_heads"),
        ):
            found[ours] = value(config, f"swa_{theirs}") or found[ours]
        if config.model_type in DOUBLE_LOCAL_KV:
            found["kv_heads"] *= 2
    return found


def shared(found):
    "The word for how query heads share keys."
    if found["kv_rank"]:
        return "mla"
    if found["kv_heads"] == found["heads"]:
        return "mha"
    return "mqa" if found["kv_heads"] == 1 else "gqa"


def unused(config, read):
    "What is set, and no layer uses."
    names = {
        "window": ("sliding_window",),
        "chunk": ("attention_chunk_size",),
        "sparse": ("index_topk", "index_topk_blocks", "indexer_budget"),
    }
    used = set(read) | ({"window"} if config.model_type in WINDOW_BESIDE else set())
    return "; ".join(
        f"{name} {value(config, name)}"
        for kind, group in names.items()
        if kind not in used
        for name in group
        if value(config, name)
    )


def verdict(config, code):
    "The columns that the rules decide."
    unknown = sorted(
        name
        for name in config.to_dict()
        if SOUNDS.search(name) and not OTHER.search(name) and name not in KNOWN
    )
    if unknown:
        raise Undecided(f"unknown {', '.join(unknown)}")
    if config.model_type in READ:
        raise Undecided(READ[config.model_type])
    read = kinds(config, code)
    count = Counter(kind for layer in read for kind in layer)
    row = {
        "reads": " + ".join(kind for kind in READS if kind in count),
        "full_layers": count["all"],
        "sparse_layers": count["sparse"],
        "local_layers": count["window"] + count["chunk"],
        "compressed_layers": count["compressed"],
        "linear_layers": count["linear"],
        "other_layers": count["conv"] + read.count(()),
        "reusing_layers": sum(
            "reuse" in (mode or "")
            for mode in getattr(config, "kv_sharing_modes", None) or ()
        ),
        "unused": unused(config, count),
    }
    # a layer of each kind that attends
    first = {
        kind: n
        for n, layer in reversed([*enumerate(read)])
        for kind in layer
        if kind in ATTENTION
    }
    if not first:
        return row
    layers = config.per_layer_config
    main = next(kind for kind in ATTENTION if kind in first)
    row |= sizes(layers[first[main]], code, main in LOCAL)
    row["keys"] = shared(row)
    if count["sparse"]:
        row["index_top_k"] = top_k(config) or ""
    if count["window"] or config.model_type in WINDOW_BESIDE:
        row["window"] = window_of(config)
    if count["chunk"]:
        row["window"] = config.attention_chunk_size
    if main not in LOCAL and set(LOCAL) & set(first):
        near = next(kind for kind in LOCAL if kind in first)
        other = sizes(layers[first[near]], code, local=True)
        if shared(other) != row["keys"]:
            raise Undecided(f"{row['keys']}, and {shared(other)} in local layers")
        row["local_sizes"] = "; ".join(
            f"{name} {x}" for name, x in other.items() if x != row[name]
        )
    return row


def row_of(name, config):
    "The row of a family: a configuration, or the reason why it has none."
    row = dict.fromkeys(COLUMNS, "") | {"model_type": name}
    try:
        if isinstance(config, str):
            raise Undecided(config)
        if not hasattr(config, "num_hidden_layers"):
            raise Undecided("no number of layers")
        row["layers"] = config.num_hidden_layers
        row["checkpoint"] = checkpoint(config)
        row |= verdict(config, modelling(config))
    except Undecided as reason:
        row["undecided"] = str(reason)
    return row | {"transformers": transformers.__version__} | common.about()


def rows(names=()):
    "The rows of these families, or of all."
    configs = text_configs()
    strange = [name for name in names if name not in configs]
    if strange:
        raise SystemExit(
            f"expected families that transformers "
            f"{transformers.__version__} has, such as llama; "
            f"found {', '.join(strange)}"
        )
    return [row_of(name, configs[name]) for name in names or configs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="print these, write nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    made = rows(args.families)
    for row in made:
        print(
            *(f"{key}={x}" for key, x in row.items() if x != "" and key in COLUMNS),
            flush=True,
        )
    if not args.families:
        common.write(made, args.out)


if __name__ == "__main__":
    main()
