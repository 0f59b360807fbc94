"""The attention of the families of transformers: their code against the record."""

import csv
import socket
import sys
from collections import Counter

import pytest
import torch

from conftest import ROOT

transformers = pytest.importorskip("transformers")
from transformers import AutoModel, masking_utils  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tformer.models.mini_gpt import load_record  # noqa: E402

HERE = ("torch", "python", "machine", "date")
# What was found by reading the modelling code, and for some by running small models:
# keys and reads, heads and key heads, and layers by kind.
READ = {
    "llama": ("mha", "all", 32, 32, dict(full=32)),
    "mistral": ("gqa", "window", 32, 8, dict(local=32, window=4096)),
    "mixtral": ("gqa", "all", 32, 8, dict(full=32)),
    "gemma2": ("gqa", "all + window", 8, 4, dict(full=13, local=13, window=4096)),
    "gemma3_text": ("gqa", "all + window", 8, 4, dict(full=4, local=22, window=4096)),
    "gpt_oss": ("gqa", "all + window", 64, 8, dict(full=18, local=18, window=128)),
    "qwen2": ("mha", "all", 32, 32, dict(full=32)),
    "qwen3": ("mha", "all", 32, 32, dict(full=32)),
    "qwen3_moe": ("gqa", "all", 32, 4, dict(full=24)),
    "qwen3_next": ("gqa", "all + linear", 16, 2, dict(full=12, linear=36)),
    "deepseek_v2": ("mla", "all", 32, "", dict(full=32, rank=512, rope=64)),
    "deepseek_v3": ("mla", "all", 128, "", dict(full=61, rank=512, rope=64)),
    "deepseek_v32": (
        "mla",
        "sparse",
        128,
        "",
        dict(sparse=61, top=2048, rank=512, rope=64),
    ),
    "deepseek_v4": (
        "mqa",
        "sparse + compressed",
        64,
        1,
        dict(sparse=20, compressed=23, top=512, window=128),
    ),
    "glm_moe_dsa": (
        "mla",
        "sparse",
        64,
        "",
        dict(sparse=78, top=2048, rank=512, rope=64),
    ),
    "glm5_next_text": (
        "mla",
        "sparse + linear",
        64,
        "",
        dict(sparse=11, linear=34, top=2048, rank=512, rope=0),
    ),
    "minimax_m3_vl_text": ("gqa", "all", 64, 4, dict(full=60)),
    "gpt_neo": ("mha", "all + window", 16, 16, dict(full=12, local=12, window=256)),
    "falcon": ("mqa", "all", 71, 1, dict(full=32)),
    "gpt_bigcode": ("mqa", "all", 12, 1, dict(full=12)),
    "gpt2": ("mha", "all", 12, 12, dict(full=12)),
    "gptj": ("mha", "all", 16, 16, dict(full=28)),
    "phi3": ("mha", "all", 32, 32, dict(full=32)),
    "cohere2": ("mha", "all + window", 64, 64, dict(full=10, local=30, window=4096)),
    "olmo2": ("mha", "all", 32, 32, dict(full=32)),
    "olmo3": ("mha", "all + window", 32, 32, dict(full=8, local=24, window=4096)),
    "smollm3": ("gqa", "all", 16, 4, dict(full=36)),
    "llama4_text": ("gqa", "all + chunk", 40, 8, dict(full=12, local=36, window=8192)),
    "kimi_linear": (
        "mla",
        "all + linear",
        32,
        "",
        dict(full=6, linear=21, rank=512, rope=64),
    ),
    "mistral_large4_text": (
        "mla",
        "sparse",
        64,
        "",
        dict(sparse=72, top=2048, rank=512, rope=64),
    ),
    "longcat_flash": ("mla", "all", 64, "", dict(full=56, rank=512, rope=64)),
    "hy_v4": ("mla", "sparse", 32, "", dict(sparse=34, top=2048, rank=512, rope=64)),
    "exaone4": ("mha", "all + window", 32, 32, dict(full=8, local=24, window=4096)),
    "mimo_v2_flash": ("gqa", "all + window", 64, 4, dict(full=9, local=39, window=129)),
    "recurrent_gemma": (
        "mha",
        "window + linear",
        10,
        10,
        dict(local=8, linear=18, window=2048),
    ),
    "mllama_text_model": ("gqa", "all", 32, 8, dict(full=32)),
    "doge": ("mha", "sparse", 8, 8, dict(sparse=32, top=2048)),
    "falcon_h1": ("gqa", "all + linear", 32, 8, dict(full=32, linear=32)),
    "mamba2": ("", "linear", "", "", dict(linear=64)),
}
KINDS = ("full", "local", "sparse", "compressed", "linear")
NUMBERS = {
    "window": "window",
    "top": "index_top_k",
    "rank": "kv_rank",
    "rope": "d_rope",
}


@pytest.fixture(scope="module")
def families():
    "The experiment's module."
    sys.path.insert(0, str(ROOT / "experiments"))
    import families

    yield families
    sys.path.remove(str(ROOT / "experiments"))


@pytest.fixture(scope="module")
def made(families):
    "Rows made now, by family, as text, and without a network."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", None)
        return {
            row["model_type"]: {key: str(x) for key, x in row.items()}
            for row in families.rows()
        }


def test_the_record_is_what_this_transformers_says(families, made):
    kept = load_record("families")
    assert len({row["model_type"] for row in kept}) == len(kept) > 150
    assert {row["transformers"] for row in kept} == {kept[0]["transformers"]}
    if kept[0]["transformers"] != transformers.__version__:
        pytest.skip(f"the record is of transformers {kept[0]['transformers']}")
    assert list(kept[0]) == list(next(iter(made.values())))
    assert [row["model_type"] for row in kept] == list(made)
    for row in kept:
        found = made[row["model_type"]]
        assert {k: x for k, x in row.items() if k not in HERE} == {
            k: x for k, x in found.items() if k not in HERE
        }


@pytest.mark.parametrize("name", READ)
def test_a_family_whose_code_was_read_has_that_verdict(made, name):
    keys, reads, heads, kv_heads, numbers = READ[name]
    row = made[name]
    assert row["undecided"] == ""
    assert (row["keys"], row["reads"]) == (keys, reads)
    assert (row["heads"], row["kv_heads"]) == (str(heads), str(kv_heads))
    for kind in KINDS:
        assert row[f"{kind}_layers"] == str(numbers.get(kind, 0)), kind
    for ours, column in NUMBERS.items():
        assert row[column] == str(numbers.get(ours, "")), column


def test_a_row_is_whole(made):
    for name, row in made.items():
        counts = [row[f"{kind}_layers"] for kind in (*KINDS, "other", "reusing")]
        if row["undecided"]:
            assert {row["keys"], row["reads"], *counts} == {""}, name
            continue
        assert row["reads"], name
        numbers = dict(zip((*KINDS, "other"), map(int, counts[:-1]), strict=True))
        both = name in ("falcon_h1", "zamba", "zamba2")
        assert sum(numbers.values()) == int(row["layers"]) * (1 + both) - (
            both and int(row["linear_layers"]) - int(row["full_layers"])
        ), name
        attends = sum(numbers[kind] for kind in KINDS[:-1])
        assert (row["keys"] != "") == (row["heads"] != "") == (attends > 0), name
        assert (row["kv_rank"] != "") == (row["keys"] == "mla"), name
        if numbers["local"]:
            assert int(row["window"]) > 0, name
        # the default of qwen4_exp has indexers of no size
        if name != "qwen4_exp_text":
            assert (row["index_top_k"] != "") == (numbers["sparse"] > 0), name


def test_what_is_set_and_off_does_not_count(made):
    off = {name: row["unused"] for name, row in made.items() if row["unused"]}
    assert off == {
        "cohere_compass_text": "sliding_window 4096",
        "dots1": "sliding_window 4096",
        "laguna": "sliding_window 512",
        "mellum": "sliding_window 1024",
        "minimax_m3_vl_text": "index_topk_blocks 16",
    }
    assert all(
        made[name]["reads"] == "all" and made[name]["window"] == "" for name in off
    )


def test_what_no_rule_decides_is_said(made):
    why = {name: row["undecided"] for name, row in made.items() if row["undecided"]}
    # the masks of these read all, and their caches keep a window
    assert "for window" in why["moshi"] and "for window" in why["kyutai_speech_to_text"]
    assert why["xlnet"] == "unknown attn_type"
    assert "reference_sliding" in why["unlimited_ocr_text"]
    assert why["nemotron"] == "num_key_value_heads is None"
    assert why["blt"] == why["pi0"] == "no number of layers"
    assert set(why) == {
        "bert-generation",
        "blt",
        "cpmant",
        "diffusion_gemma_text",
        "evolla",
        "gemma4_assistant",
        "kyutai_speech_to_text",
        "moshi",
        "nemotron",
        "pi0",
        "trocr",
        "unlimited_ocr_text",
        "xlnet",
    }


def test_encoders_and_encoder_decoders_have_no_row(made):
    assert not {"bert", "roberta", "bart", "whisper", "t5gemma2_decoder"} & set(made)


def of(families, name, **options):
    "The row of a configuration that is not the default."
    return families.row_of(name, CONFIG_MAPPING[name](**options))


@pytest.mark.parametrize(
    "name, options, says",
    [
        (
            "qwen2",
            dict(
                use_sliding_window=True,
                sliding_window=64,
                max_window_layers=20,
                num_hidden_layers=24,
            ),
            dict(reads="all + window", full_layers=20, local_layers=4, window=64),
        ),
        (
            "qwen2",
            dict(use_sliding_window=False, sliding_window=64, max_window_layers=0),
            dict(reads="all", local_layers=0, window=""),
        ),
        ("qwen3", dict(num_key_value_heads=8), dict(keys="gqa", kv_heads=8)),
        ("mixtral", dict(sliding_window=64), dict(reads="window", window=64)),
        ("mistral", dict(sliding_window=None), dict(reads="all", window="")),
        (
            "falcon",
            dict(
                new_decoder_architecture=True,
                num_kv_heads=8,
                num_attention_heads=64,
                hidden_size=4096,
            ),
            dict(keys="gqa", kv_heads=8),
        ),
        ("falcon", dict(multi_query=False), dict(keys="mha", kv_heads=71)),
        ("gpt_bigcode", dict(multi_query=False), dict(keys="mha", kv_heads=12)),
        (
            "minimax_m3_vl_text",
            dict(sparse_attention_config={"sparse_attention_freq": [0] * 3 + [1] * 57}),
            dict(
                reads="all + sparse",
                full_layers=3,
                sparse_layers=57,
                index_top_k=2048,
                unused="",
            ),
        ),
        (
            "mellum",
            dict(layer_types=["sliding_attention"] * 21 + ["full_attention"] * 7),
            dict(reads="all + window", window=1024, unused=""),
        ),
        (
            "deepseek_v4",
            dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2),
            dict(
                keys="mqa",
                reads="window",
                local_layers=2,
                window=128,
                unused="index_topk 512",
            ),
        ),
        (
            "gemma3_text",
            dict(use_bidirectional_attention=True),
            dict(undecided="reads the future", reads=""),
        ),
        (
            "llama",
            dict(sparse_window=3),
            dict(undecided="unknown sparse_window", keys=""),
        ),
        (
            "llama",
            dict(sliding_window=3),
            dict(undecided="the code makes no usual mask or choice for window"),
        ),
        (
            "smollm3",
            dict(layer_types=["sliding_attention"] * 36, sliding_window=64),
            dict(undecided="layers with a window of no size"),
        ),
        (
            "olmo3",
            dict(sliding_window=None),
            dict(undecided="layers with a window of no size"),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_switches_are_obeyed(families, name, options, says):
    row = of(families, name, **options)
    assert {key: row[key] for key in says} == says


def test_other_sizes_of_local_layers_are_named(made):
    assert made["mimo_v2_flash"]["local_sizes"] == "kv_heads 8"
    assert made["gemma4_text"]["local_sizes"] == "d_head 256"
    assert made["inkling_text"]["local_sizes"] == "kv_heads 16"
    assert made["dots3_note_text"]["local_sizes"] == (
        "heads 64; kv_rank 1024; d_head 256"
    )
    assert made["gemma3n_text"]["reusing_layers"] == "15"
    assert made["gemma2"]["local_sizes"] == ""


# --- the code of the families, run without weights

LENGTH = 9000  # longer than all windows
# their attention is called twice in a layer, or reads entries beside the tokens
ELSE = {"diffllama", "doge", "deepseek_v4"}
SLOW = {"bailing_hybrid", "jamba", "recurrent_gemma", "zamba"}  # many seconds each


class Spy:
    "Stands in for attention and its masks, and notes what reaches it."

    def __init__(self):
        self.seen = Counter()

    def attend(self, module, q, k, v, attention_mask, **more):
        window = getattr(attention_mask, "last_row", LENGTH)
        chosen = more.get("indices")
        self.seen[
            q.shape[1],
            k.shape[1],
            q.shape[-1],
            window,
            None if chosen is None else chosen.shape[-1],
        ] += 1
        return torch.empty(
            *q.shape[:1], q.shape[2], q.shape[1], v.shape[-1], device="meta"
        ), None

    def mask(self, *, q_length, kv_length, mask_function, **more):
        at = torch.arange(kv_length)
        zero = torch.tensor(0)
        mask = torch.empty(1, 1, q_length, kv_length, device="meta")
        row = mask_function(zero, zero, torch.tensor(q_length - 1), at)
        mask.last_row = int(row.expand(kv_length).sum())
        if int(mask_function(zero, zero, zero, at).sum()) != 1:
            mask.last_row = None  # the first token reads later ones
        return mask


def watch(config, monkeypatch):
    "What attention gets in the default model of a family; None where it cannot run."
    spy = Spy()
    AttentionInterface.register("spy", spy.attend)
    AttentionMaskInterface.register("spy", spy.mask)
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda *a, **k: None
    )
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation="spy").eval()
            ids = torch.zeros(1, LENGTH, dtype=torch.long)
        for part in model.modules():
            if type(part).__name__.endswith("Experts"):
                part.forward = lambda x, *a, **k: torch.zeros_like(x)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except Exception:
        return None
    return spy.seen


@pytest.mark.nightly
def test_the_code_of_the_families_does_what_their_rows_say(families, made, monkeypatch):
    ran = []
    for name, row in made.items():
        if (
            row["undecided"]
            or not row["keys"]
            or name in ELSE | SLOW
            or (name not in CONFIG_MAPPING)
        ):
            continue
        seen = watch(CONFIG_MAPPING[name](), monkeypatch)
        if not seen:
            continue
        layers = Counter()
        for (heads, kv_heads, d_head, window, chosen), n in seen.items():
            assert window is not None, name
            local = window < LENGTH
            sizes = row | (
                dict(x.split(" ") for x in row["local_sizes"].split("; "))
                if local and row["local_sizes"]
                else {}
            )
            mla = row["keys"] == "mla"
            assert (heads, d_head) == (int(sizes["heads"]), int(sizes["d_head"])), name
            assert kv_heads == (heads if mla else int(sizes["kv_heads"])), name
            assert not local or window == int(row["window"]), name
            assert chosen is None or chosen == int(row["index_top_k"]), name
            layers["local" if local else "sparse" if chosen else "full"] += n
        assert layers == Counter(
            {
                kind: int(row[f"{kind}_layers"])
                for kind in ("full", "local", "sparse")
                if row[f"{kind}_layers"] != "0"
            }
        ), name
        ran.append(name)
    # fewer where a later transformers calls its attention in another way
    assert len(ran) > 100, ran
    assert {"gpt_oss", "mistral", "deepseek_v32", "qwen3_next"} <= set(ran)


# --- the command line


def test_the_script_writes_what_it_makes(families, made, tmp_path, monkeypatch):
    out = tmp_path / "new" / "some.csv"
    monkeypatch.setattr(sys, "argv", ["families.py", "--out", str(out)])
    families.main()
    with out.open(encoding="utf-8", newline="") as lines:
        rows = {row["model_type"]: row for row in csv.DictReader(lines)}
    assert rows == made


def test_chosen_families_are_printed_and_nothing_is_written(
    families, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "some.csv"
    monkeypatch.setattr(
        sys, "argv", ["families.py", "llama", "gpt_oss", "--out", str(out)]
    )
    families.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("model_type=llama keys=mha reads=all")
    assert second.startswith("model_type=gpt_oss keys=gqa reads=all + window")
    assert not out.exists()


@pytest.mark.parametrize("names", [["gpt9"], ["llama", "gpt9"], [""], ["bert"]])
def test_a_family_that_is_not_there_is_refused(families, names):
    with pytest.raises(SystemExit, match="such as llama; found "):
        families.rows(names)
