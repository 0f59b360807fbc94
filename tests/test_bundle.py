"""The models that travel with the package: their files, and what is refused."""

import hashlib
import json
import math
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

import tformer
from conftest import ROOT, load_experiment, run
from helpers import close, equal_models, plain_only
from tformer.bundle import (
    BUNDLE_FILES,
    BUNDLED_DIR,
    CARD_NAME,
    ENDOFTEXT,
    TOKENIZER_NAME,
    MiniGPTConfig,
    ModelBundle,
    SavableMiniGPT,
    file_fingerprint,
    find_bundle,
    format_card,
    fraction_copied,
    fraction_correct,
    load_bundle,
    read_verified_card,
    save_bundle,
    tell,
)
from tformer.corpora import bilingual, stories
from tformer.corpora.stories import grade_sentences
from tformer.inference.sampler import SamplingParams
from tformer.models import mini_gpt
from tformer.models.base import load_model
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.quantized import quantize_int8
from tformer.tasks import translation
from tformer.tasks.masked_lm import generate_by_unmasking
from tformer.text.tokenizer import Tokenizer, cut_at_stop_string
from tformer.text.vocabulary import Vocabulary
from tformer.training.checkpoints import CheckpointManager
from tformer.training.trainer import Trainer

NAMES = ["bert", "stories", "stories_mha", "tour", "tour_no_mask", "translator"]
each_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def storyteller():
    return load_bundle("stories")


@pytest.fixture
def folder(tmp_path):
    "A copy of the tour's folder, to be spoiled."
    return shutil.copytree(BUNDLED_DIR / "tour", tmp_path / "tour")


# text in, text out


def test_one_text_or_several_are_continued(storyteller):
    alone = storyteller.generate("Once there was", max_new_tokens=9)
    assert alone.startswith("Once there was") and alone != "Once there was"
    both = storyteller.generate(["Once there was", "Tom"], max_new_tokens=9)
    assert both[0] == alone and both[1].startswith("Tom") and len(both) == 2
    assert storyteller.generate(iter(["Tom"]), max_new_tokens=9) == both[1:]
    drawn = {
        storyteller.generate(
            "Tom", max_new_tokens=9, sampling_params=SamplingParams(seed=n)
        )
        for n in range(4)
    }
    assert len(drawn) > 1


def test_a_seed_is_a_text_and_another_seed_is_another(storyteller):
    def told(prompts, seed):
        params = SamplingParams(temperature=1.5, seed=seed)
        return storyteller.generate(
            prompts, max_new_tokens=20, sampling_params=params
        ), "".join(
            storyteller.stream("One day", max_new_tokens=20, sampling_params=params)
        )

    first = told("One day", 3)
    other = told("One day", 4)
    assert first == told("One day", 3) and first[0] == first[1]
    assert first[0] != other[0] and first[1] != other[1]


def test_pieces_are_the_text(storyteller):
    for prompt, params in (("Once there was", None), ("", SamplingParams(seed=3))):
        pieces = [*storyteller.stream(prompt, sampling_params=params)]
        assert len(pieces) > 10 and "" not in pieces
        assert "".join(pieces) == storyteller.generate(prompt, sampling_params=params)


def count_calls(model, call):
    "What a call returns, and how many passes of the model it took."
    passes = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        return call(), len(passes)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "strings",
    [
        ".",
        "\n",
        "Mia.",  # three tokens
        ["One day", "named"],  # the second begins first
        ["named M", "amed Mia. One"],  # one begins in the other
        ["in", "garden", "nothing of this"],
        "Once",  # stands in the prompt only
        [],
    ],
)
def test_a_text_ends_before_its_stop_string(storyteller, strings):
    "Alone or in a batch, whole or in pieces, in equally many passes of the model."
    prompts = ["Once there was", "Tom", ""]
    options = dict(max_new_tokens=20)
    whole = storyteller.generate(prompts, **options)
    listed = [strings] if isinstance(strings, str) else strings
    expected = []
    for prompt, text in zip(prompts, whole, strict=True):
        added = text[len(prompt) :]
        ends = [added.find(string) for string in listed if string in added]
        expected.append(prompt + added[: min(ends, default=len(added))])
    assert storyteller.generate(prompts, stop_strings=strings, **options) == expected
    for prompt, text in zip(prompts, expected, strict=True):
        alone, n = count_calls(
            storyteller.model,
            lambda p=prompt: storyteller.generate(p, stop_strings=strings, **options),
        )
        pieces, m = count_calls(
            storyteller.model,
            lambda p=prompt: [*storyteller.stream(p, stop_strings=strings, **options)],
        )
        assert alone == "".join(pieces) == text and "" not in pieces
        assert n == m


def test_the_model_stops_with_the_token_that_completes_a_stop_string(storyteller):
    prompt = "Once there was"
    pieces = [*storyteller.stream(prompt, max_new_tokens=9)]
    assert pieces[1:8] == [" a", " kind", " girl", " named", " Mia", ".", " One"]

    def whole():
        return storyteller.generate(prompt, stop_strings="named Mia. O")

    def in_pieces():
        return "".join(storyteller.stream(prompt, stop_strings="named Mia. O"))

    for call in (whole, in_pieces):
        assert count_calls(storyteller.model, call) == (f"{prompt} a kind girl ", 7)


def test_a_finished_row_leaves_the_batch(storyteller):
    rows = []
    hook = storyteller.model.blocks[0].register_forward_pre_hook(
        lambda block, args: rows.append(len(args[0]))
    )
    texts = storyteller.generate(
        ["Once there was", "Tom"], stop_strings="girl", max_new_tokens=20
    )
    hook.remove()
    assert texts[0] == "Once there was a kind " and "girl" not in texts[1]
    assert rows == [2] * 3 + [1] * 17  # the first row has three tokens


def test_drawn_texts_end_at_stop_strings_too(storyteller):
    for seed in range(3):
        options = dict(sampling_params=SamplingParams(seed=seed), max_new_tokens=30)
        whole = storyteller.generate("Tom", **options)
        strings = [whole[9:13], whole[20:22]]
        text = storyteller.generate("Tom", stop_strings=strings, **options)
        assert text == "Tom" + cut_at_stop_string(whole[3:], strings) != whole
        pieces = storyteller.stream("Tom", stop_strings=strings, **options)
        assert "".join(pieces) == text


def test_what_cannot_be_continued_is_refused(storyteller):
    for name, words in (
        ("translator", "'translator' does not continue texts: .*it translates"),
        ("bert", "'bert' does not continue texts: its BertMaskedLM"),
    ):
        bundle = load_bundle(name)
        for call in (bundle.generate, bundle.stream):
            with pytest.raises(ValueError, match=words):
                call("Once")
    for bad, message in (
        (dict(max_new_tokens=0), "max_new_tokens.*got 0"),
        (dict(stop_strings=[".", ""]), "stop string must hold a character"),
        (dict(prompts=[]), "no prompt"),
        (dict(prompts=["a" * 999]), "has 999 tokens.*at most"),
    ):
        with pytest.raises(ValueError, match=message):
            storyteller.generate(**bad)
        if "prompts" not in bad:
            with pytest.raises(ValueError, match=message):
                storyteller.stream(**bad)


@pytest.mark.parametrize("name", ["tour", "tour_no_mask"])
def test_the_models_of_the_tour_continue_texts(name):
    "Each token is what the model says of all before it, as in the tour."
    bundle = load_bundle(name)
    model = bundle.model
    ids = mini_gpt.encode_bytes("Once there was")
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, model(ids[None])[0, -1:].argmax(-1)])
    expected = mini_gpt.decode_bytes(ids)
    options = dict(max_new_tokens=20)
    assert bundle.generate("Once there was", **options) == expected
    assert "".join(bundle.stream("Once there was", **options)) == expected
    # others beside it, longer and shorter
    prompts = ["Tom", "Once there was", "One day, Mia went to the park."]
    texts = bundle.generate(prompts, **options)
    assert texts == [bundle.generate(prompt, **options) for prompt in prompts]
    full = bundle.generate("Tom")
    assert len(bundle.tokenizer.encode(full)) == model.max_len
    stopped = bundle.generate(prompts, stop_strings="a", **options)
    assert stopped == [
        prompt + text[len(prompt) :].split("a")[0]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    drawn = [bundle.generate(prompts, seed=3, temperature=0.9, **options)] * 2
    assert drawn[0] == bundle.generate(prompts, seed=3, temperature=0.9, **options)
    with pytest.raises(ValueError, match=r"no prompt was given: .* no <\|endoftext\|>"):
        bundle.generate("")


def test_a_text_without_endoftext_begins_with_its_prompt():
    "A model that never read the token has no vector for it, nor an end."
    tokenizer = Tokenizer.train(["class Batch: a class of batches"], 262)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=262, d_model=16, n_layers=1, n_heads=2, max_len=32)
    bundle = ModelBundle(Llama(config).eval(), tokenizer, {"name": "mine"})
    ids = tokenizer.encode("class")
    for _ in range(9):
        with torch.no_grad():
            ids.append(bundle.model(torch.tensor([ids]))[0, -1].argmax().item())
    assert bundle.generate("class", max_new_tokens=9) == tokenizer.decode(ids)
    for room, n in ((32, 31), (32, 32)):
        prompt = "z" * n
        if n == 32:
            with pytest.raises(ValueError, match=r"has 32 tokens.* at most 31 before"):
                bundle.generate(prompt)
        else:
            text = bundle.generate(prompt)
            assert text.startswith(prompt) and text != prompt, room


def test_settings_may_be_given_by_their_names(storyteller):
    options = dict(max_new_tokens=12)
    for settings in (
        {"temperature": 0.8, "seed": 3},
        {"top_k": 3, "top_p": 0.9, "seed": 1},
        {"temperature": 0},
        {"repetition_penalty": 1.5, "temperature": 0},
    ):
        expected = storyteller.generate(
            "Tom", sampling_params=SamplingParams(**settings), **options
        )
        assert storyteller.generate("Tom", **settings, **options) == expected
        assert "".join(storyteller.stream("Tom", **settings, **options)) == expected
    assert len({storyteller.generate("Tom", temperature=2.0) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    "wrong, words",
    [
        (
            {"top_q": 0.8},
            "no setting top_q; its settings are temperature, top_k, top_p",
        ),
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        (
            {"temperature": 0.8, "sampling_params": SamplingParams()},
            "temperature stands beside sampling_params: give it there",
        ),
    ],
)
def test_wrong_settings_are_named(wrong, words, storyteller):
    for call in (storyteller.generate, storyteller.stream):
        with pytest.raises(ValueError, match=words):
            call("Tom", **wrong)


def test_a_bundle_translates():
    bundle = load_bundle("translator")
    texts = ["The dog eats.", "The cat sees the dog."]
    both = bundle.translate(texts)
    assert both == ["Le chien mange.", "Le chat voit le chien."]
    assert bundle.translate(texts[0]) == both[0]
    words = "'tour' does not translate: its SavableMiniGPT"
    with pytest.raises(ValueError, match=words):
        load_bundle("tour").translate("The dog sleeps.")


# what the package carries


@each_name
def test_a_name_is_enough(name):
    model, tokenizer, card = tformer.load(name)
    assert not model.training and card["name"] == name
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    table = model.bert.embed.tokens if name == "bert" else model.embed
    assert len(tokenizer) == table.weight.shape[0]
    text = "Tom has a ball. Zoë too."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    size = card["files"]["model.safetensors"]["bytes"]
    assert size <= (0.6e6 if name.startswith("tour") else 3e6)
    assert sum(p.numel() for p in model.parameters()) == card["parameters"]
    assert (ROOT / card["script"]).exists()
    loss = "blank_loss" if name == "bert" else "loss"
    for key in (
        "about",
        "seed",
        "steps",
        "seconds",
        loss,
        "torch",
        "python",
        "machine",
        "date",
    ):
        assert key in card
    assert abs(card[loss] - card[f"{loss}_float32"]) < 2e-3


def test_the_bundled_folders_are_those_that_are_named():
    assert sorted(p.name for p in BUNDLED_DIR.iterdir()) == NAMES
    for name in NAMES:
        files = {p.name for p in (BUNDLED_DIR / name).iterdir()}
        assert files == {*BUNDLE_FILES, CARD_NAME}


def test_the_storyteller_is_as_good_as_was_asked():
    "The card, and what is told now, in one band."
    trained = load_bundle("stories")
    card = trained.card
    assert card["right"] >= 0.9 and card["copied"] < 0.1
    assert card["floor"] < card["loss"] < 0.09 and card["samples"] >= 100
    told = tell(trained, 60, seed=7)
    assert fraction_correct(told) > 0.9
    assert len(set(told)) > 55
    rights = [look["right"] for look in card["curve"]]
    assert rights[-1] > rights[0] and len(rights) >= 5
    for run_ in card["runs"]:  # no more read than an honest new story
        assert run_["told"] < run_["new"] + 0.05


def test_the_loss_on_the_card_is_the_loss(storyteller):
    "Computed here from probabilities, in float64."
    model, tokenizer, card = storyteller
    end = tokenizer.token_to_id(ENDOFTEXT)
    cost = 0.0
    size = 0
    for story in stories.generate_stories(40, 1, 1):
        ids = [end, *tokenizer.encode(story.strip()), end]
        with torch.no_grad():
            p = model(torch.tensor([ids]))[0].double().softmax(-1)
        cost -= sum(float(p[i, ids[i + 1]].log()) for i in range(len(ids) - 1))
        size += len(story.encode())
    assert abs(cost / size - card["loss"]) < 0.006


def test_the_tour_is_the_model_of_chapter_0():
    held_out = mini_gpt.encode_bytes(stories.story_corpus(30_000, seed=1, level=1))
    tour = load_bundle("tour")
    blind = load_bundle("tour_no_mask")
    recorded = float(mini_gpt.load_record("ladder_line")[0]["nats_per_byte"])
    loss = mini_gpt.mean_loss(tour.model, held_out)
    assert abs(loss - recorded) < 0.02 and abs(loss - tour.card["loss"]) < 0.01
    assert mini_gpt.mean_loss(blind.model, held_out) < loss / 4
    assert isinstance(tour.model, mini_gpt.MiniGPT)
    text = "Once there was"
    assert tour.tokenizer.encode(text) == mini_gpt.encode_bytes(text).tolist()
    ids = mini_gpt.encode_bytes("Tom went outside")
    other = ids.clone()
    other[9] += 1
    for trained, still in ((tour, 9), (blind, 0)):
        with torch.no_grad():
            a, b = trained.model(torch.stack([ids, other]))
        moved = (a != b).any(-1)
        assert not moved[:still].any() and moved[still:].all()


@plain_only
def test_transformers_computes_the_same_from_the_file(storyteller):
    transformers = pytest.importorskip("transformers")
    model, tokenizer, _ = storyteller
    c = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=model.blocks[
                0
            ].feed_forward.sublayer.gate_proj.weight.shape[0],
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            max_position_embeddings=c.max_len,
            rms_norm_eps=c.eps,
            rope_theta=c.rope_theta,
            tie_word_embeddings=True,
        )
    ).eval()
    names = {
        "attention.sublayer.": "self_attn.",
        "feed_forward.sublayer.": "mlp.",
        "attention.norm.": "input_layernorm.",
        "feed_forward.norm.": "post_attention_layernorm.",
        "blocks.": "model.layers.",
        "embed.": "model.embed_tokens.",
    }
    state = {}
    for name, x in model.state_dict().items():
        name = "model.norm.weight" if name == "norm.weight" else name
        for ours, other in names.items():
            name = name.replace(ours, other)
        state[name] = x
    theirs.load_state_dict(state)
    ids = torch.tensor(
        [
            tokenizer.encode(
                "Once there was a girl named Mia. One day, she went to the park."
            )
        ]
    )
    with torch.no_grad():
        close(model(ids), theirs(ids).logits, 1e-4)


def test_the_translator_is_as_good_as_was_asked():
    "The card; and some sentences translated now, in one band."
    trained = load_bundle("translator")
    model, tokenizer, card = trained
    assert card["parameters"] <= 1.5e6 and card["tried"] == 2000
    assert card["seconds"] <= 15 * 60
    shares = card["exact_by_phenomenon"]
    assert {*shares} == {*bilingual.PHENOMENA}
    assert min(shares.values()) >= 0.85
    assert card["bleu"] > 90 > 45 > card["word_for_word"]["bleu"]
    assert card["word_for_word"]["exact"] < 0.05
    assert card["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    some = bilingual.generate_pairs(150, 1, held_out_only=True)
    wrote = translation.translate(model, tokenizer, [p.source for p in some])
    share = translation.exact_match_by_phenomenon(wrote, some)["all"].accuracy
    assert abs(share - card["exact"]) < 0.06
    assert abs(script().nats_per_target_byte(trained, some) - card["loss"]) < 0.02
    exact = [look["exact"] for look in card["curve"]]
    assert exact[0] < 0.1 and max(exact[-3:]) > 0.9
    assert card["measured"]["exact"].startswith(f"{card['exact']:.1%} of")


def test_the_translator_was_tried_on_what_it_never_read():
    read = {pair.source for pair in bilingual.generate_pairs(5000)}
    new = bilingual.generate_pairs(200, script().NEW_SEED, held_out_only=True)
    assert not read & {pair.source for pair in new}


@pytest.mark.nightly
def test_the_masked_model_reads_and_writes():
    "The card, and what is filled and written now, in one band."
    bert = load_bundle("bert")
    card = bert.card
    made = script()
    best = max(p for name, p in card["share"].items() if name != "model")
    assert card["filled"] == card["share"]["model"] > best + 0.2
    new = made.told(120, 5)
    kinds = made.fill_told(bert, new, {})
    total = sum(by["blanks"] for by in kinds.values())
    filled = sum(by["model"] * by["blanks"] for by in kinds.values()) / total
    assert abs(filled - card["filled"]) < 0.05
    assert abs(made.nats_per_blank(bert, new) - card["blank_loss"]) < 0.05
    (row,) = [w for w in card["writes"] if w["order"] == "random" and w["passes"] == 32]
    lengths = [len(x) for x in bert.tokenizer.encode_batch(new[:60])]
    right = fraction_correct(
        generate_by_unmasking(bert, lengths, steps=32, order="random")
    )
    assert abs(right - row["right"]) < 0.12


# how it is loaded


def test_types_and_devices(storyteller):
    kept = load_bundle("stories", dtype=None)
    assert {p.dtype for p in kept.model.parameters()} == {torch.bfloat16}
    assert equal_models(kept.model.float(), storyteller.model)
    on = load_bundle("stories", device="meta")
    assert {p.device.type for p in on.model.parameters()} == {"meta"}
    assert (
        load_bundle("tour", dtype=torch.float64).model.embed.weight.dtype
        == torch.float64
    )
    assert load_bundle(BUNDLED_DIR / "tour").card == load_bundle("tour").card


@plain_only
def test_what_is_no_device_and_no_type_is_told_of():
    for options, says in (
        ({"device": "gpu"}, "device must be a device that PyTorch knows, .* got 'gpu'"),
        ({"device": "cuda:99"}, "PyTorch finds no 'cuda:99'"),
        ({"dtype": "bfloat16"}, "got 'bfloat16': write torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=says):
            load_bundle("stories", **options)


def test_a_file_is_no_folder_to_save_into(tmp_path):
    path = tmp_path / "model"
    path.write_text("mine", "utf-8")
    bundle = load_bundle("stories")
    for save in (bundle.save, bundle.model.save):
        with pytest.raises(
            ValueError, match=r"folder must be a folder, and .* is a fi"
        ):
            save(path)
        assert path.read_text("utf-8") == "mine"


@pytest.mark.gpu
def test_it_tells_on_a_gpu(storyteller):
    there = load_bundle("stories", device="cuda")
    assert fraction_correct(tell(there, 20)) > 0.85


def test_it_prints_what_it_is(storyteller):
    text = repr(storyteller)
    assert text.startswith("stories: ") and "MB" in text
    assert "experiments/trained.py" in text and "nats per byte" in text
    assert str(storyteller) == text == "\n".join(format_card(storyteller.card))
    assert format_card({})[0].startswith("unnamed")


def test_nothing_is_imported_before_it_is_asked_for():
    run(
        sys.executable,
        "-c",
        """
import sys, tformer
assert "load" in dir(tformer) and "load" not in tformer.__all__
assert "torch" not in sys.modules
assert tformer.load is tformer.bundle.load_bundle
""",
    )


# what is refused


@pytest.mark.parametrize(
    "name, words",
    [
        ("storys", ["'storys'", ", ".join(NAMES)]),
        ("", ["has no card.json"]),
        ("no/such/place", ["no/such/place"]),
    ],
)
def test_an_unknown_name_lists_the_names(name, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        load_bundle(name)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def hf_folder(path, config, *files):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    for file in files:
        (path / file).write_bytes(b"\0")
    return path


FROM_GPT2 = "tformer.models.gpt.GPT.from_gpt2({0!r}) makes the model"
FROM_BERT = "tformer.models.bert.BertMaskedLM.from_bert({0!r}) makes the model"
NO_MODEL = "the package reads only models with model_type 'gpt2' or 'bert'"
LATER = ", once its weights are saved as model.safetensors"
FROM_HF = (
    ", and tformer.text.tokenizer.Tokenizer.from_hf({1!r}) reads its tokenizer if that "
    "is byte-level BPE"
)


@pytest.mark.parametrize(
    "config, files, kind, advice",
    [
        ({"model_type": "gpt2"}, ["model.safetensors"], "model_type 'gpt2'", FROM_GPT2),
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            ["pytorch_model.bin", "tokenizer.json"],
            "model_type 'gpt2'",
            FROM_GPT2 + LATER + FROM_HF,
        ),
        ({"model_type": "bert"}, ["model.safetensors"], "model_type 'bert'", FROM_BERT),
        (
            {"model_type": "llama"},
            ["pytorch_model.bin"],
            "model_type 'llama'",
            "lesson 13 shows how its weights are copied into a Llama",
        ),
        ({"model_type": "mamba"}, [], "model_type 'mamba'", NO_MODEL),
        (
            {"architectures": ["OwnModel"]},
            ["tokenizer.json"],
            "architectures \"['OwnModel']\"",
            NO_MODEL + FROM_HF,
        ),
    ],
    ids=["gpt2", "gpt2 pickled", "bert", "llama", "mamba", "no type"],
)
@pytest.mark.parametrize("load", [load_bundle, GPT.load], ids=["load", "load_model"])
def test_a_folder_of_hugging_face_is_told_what_reads_it(
    config, files, kind, advice, load, tmp_path
):
    folder = hf_folder(tmp_path / "theirs", config, *files)
    if load == GPT.load and "model.safetensors" in files:
        save_file({"wte.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load(folder)
    said = advice.format(str(folder), str(folder / "tokenizer.json"))
    assert str(caught.value) == (
        f"{folder} holds a Hugging Face checkpoint with {kind}, and no model that "
        f"save wrote: {said}"
    )


def test_the_calls_that_are_named_read_what_hugging_face_wrote(tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=8
    )
    bert = transformers.BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    for theirs, kind in (
        (transformers.GPT2LMHeadModel(gpt2), "GPT"),
        (transformers.BertForMaskedLM(bert), "BertMaskedLM"),
    ):
        folder = tmp_path / kind
        theirs.save_pretrained(folder)
        with pytest.raises(ValueError, match="Hugging Face") as caught:
            tformer.load(folder)
        call = re.search(r"tformer\S+\('.*?'\)", str(caught.value))[0]
        made = eval(call)
        ids = torch.arange(5)[None]
        close(made(ids), theirs.eval()(ids).logits)
        made.save(folder)  # over their files: now it is ours
        assert type(made).load(folder).max_len == 8


def test_other_files_make_no_checkpoint(tmp_path):
    "Neither a config.json of something else, nor one that is no JSON."
    for text in ('{"name": "x"}', "[1]", "{", '{"model_type": "x", "model": "GPT"}'):
        (tmp_path / "config.json").write_text(text, "utf-8")
        with pytest.raises(
            ValueError, match=r"has no card\.json and no checkpoint of a training"
        ):
            load_bundle(tmp_path)


@pytest.mark.parametrize("bad", [None, 3, b"stories"])
def test_a_name_is_a_text_or_a_path(bad):
    with pytest.raises(ValueError, match="name_or_folder"):
        load_bundle(bad)


def test_a_folder_without_a_card_is_refused(folder):
    (folder / CARD_NAME).unlink()
    with pytest.raises(ValueError, match=f"has no {CARD_NAME}"):
        load_bundle(folder)


@pytest.mark.parametrize("name", BUNDLE_FILES)
@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_file_cut_short_is_refused(folder, name, share):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(share * len(data))])
    with pytest.raises(
        ValueError,
        match=rf"{name} is not the file .* "
        rf"{int(share * len(data))} bytes, not {len(data)}$",
    ):
        load_bundle(folder)


@pytest.mark.parametrize("name", BUNDLE_FILES)
def test_an_altered_file_is_refused(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is not the file .* SHA"):
        load_bundle(folder)


@pytest.mark.parametrize("name", BUNDLE_FILES)
def test_a_file_that_is_gone_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"lacks {name}$"):
        load_bundle(folder)


def rewrite(folder, **changes):
    card = json.loads((folder / CARD_NAME).read_text("utf-8")) | changes
    (folder / CARD_NAME).write_text(json.dumps(card), "utf-8")


@pytest.mark.parametrize(
    "files, words",
    [
        (None, "files in"),
        ({}, "needs a value for model.safetensors"),
        (dict.fromkeys(BUNDLE_FILES), "is not the file"),
        ({name: {} for name in (*BUNDLE_FILES, "more.txt")}, "has no file more.txt"),
    ],
)
def test_a_card_without_hashes_is_refused(folder, files, words):
    rewrite(folder, files=files)
    with pytest.raises(ValueError, match=words):
        load_bundle(folder)


def test_a_card_that_is_no_json_is_refused(folder):
    text = (folder / CARD_NAME).read_text("utf-8")
    (folder / CARD_NAME).write_text(text[:40], "utf-8")
    with pytest.raises(ValueError, match=r"card\.json is no JSON"):
        load_bundle(folder)


def test_a_model_that_nobody_knows_is_refused(folder):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"model": "Mamba"}), "utf-8"
    )
    card = read_verified_card(BUNDLED_DIR / "tour")["files"]
    rewrite(
        folder, files=card | {"config.json": file_fingerprint(folder / "config.json")}
    )
    with pytest.raises(ValueError, match=r"SavableMiniGPT.*Mamba"):
        load_bundle(folder)


def test_no_pickle_is_read(folder, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    import pickle

    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    load_bundle(folder), load_bundle("stories")


# saved and loaded again


def small(kind):
    torch.manual_seed(0)
    tokenizer = Tokenizer(Vocabulary([], [ENDOFTEXT]))
    if kind is GPT:
        model = GPT(
            GPTConfig(vocab_size=257, d_model=16, n_layers=2, n_heads=2, max_len=32)
        )
    elif kind is Llama:
        model = Llama(
            LlamaConfig(
                vocab_size=257,
                d_model=16,
                n_layers=2,
                n_heads=2,
                max_len=32,
                tie_word_embeddings=True,
            )
        )
    else:
        model = SavableMiniGPT(
            MiniGPTConfig(vocab_size=257, d_model=16, n_heads=2, max_len=32)
        )
    return ModelBundle(model.eval(), tokenizer, {"name": "small"})


@pytest.mark.parametrize("kind", [GPT, Llama, SavableMiniGPT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_loaded(kind, dtype, tmp_path):
    made = small(kind)
    made.model.to(dtype)
    made.save(tmp_path / "a" / "b")
    again = load_bundle(tmp_path / "a" / "b", dtype=None)
    assert equal_models(again.model, made.model)
    assert again.tokenizer == made.tokenizer
    assert again.card["name"] == "small"
    assert again.card["model"] == kind.__name__
    for name in BUNDLE_FILES:
        data = (tmp_path / "a" / "b" / name).read_bytes()
        assert again.card["files"][name] == {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {
        *BUNDLE_FILES,
        CARD_NAME,
    }


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    "When a bundle is made, when another is made of it, and when it is loaded."
    made = small(GPT)
    tokenizer = Tokenizer(Vocabulary([]))
    said = "^the model has vocab_size 257, and the tokenizer 256 ids"
    with pytest.raises(ValueError, match=said):
        ModelBundle(made.model, tokenizer, {})
    with pytest.raises(ValueError, match=said):
        made._replace(tokenizer=tokenizer)
    spare = GPT(GPTConfig(vocab_size=320, d_model=16, n_layers=1, n_heads=2))
    with pytest.raises(ValueError, match=r"^the model has vocab_size 320, .* 257 ids"):
        made._replace(model=spare)
    padded = made.tokenizer.with_reserved_tokens(320)
    ModelBundle(spare, padded, {"name": "padded"}).save(tmp_path / "padded")
    assert load_bundle(tmp_path / "padded").tokenizer == padded
    made.save(tmp_path)
    tokenizer.save(tmp_path / TOKENIZER_NAME)
    card = json.loads((tmp_path / CARD_NAME).read_text())
    card["files"][TOKENIZER_NAME] = file_fingerprint(tmp_path / TOKENIZER_NAME)
    (tmp_path / CARD_NAME).write_text(json.dumps(card))
    with pytest.raises(ValueError, match=said):
        load_bundle(tmp_path)


def test_a_bundle_of_one_byte_for_each_weight(storyteller, tmp_path):
    int8 = storyteller._replace(model=quantize_int8(storyteller.model))
    int8.save(tmp_path)
    again = load_bundle(tmp_path)
    assert again.generate("Tom", max_new_tokens=9) == int8.generate(
        "Tom", max_new_tokens=9
    )


def test_a_save_that_was_cut_off_is_not_loaded(folder, monkeypatch):
    "The new weights with the old card are refused, not mixed."
    made = small(SavableMiniGPT)

    def full(path):
        raise OSError("no space left on device")

    monkeypatch.setattr(Tokenizer, "save", lambda self, path: full(path))
    with pytest.raises(OSError, match="no space"):
        made.save(folder)
    with pytest.raises(ValueError, match="is not the file"):
        load_bundle(folder)


# a training's folder


def trained(folder, kind=GPT, metrics=((10, 3.0), (20, 1.0), (30, 2.0)), **options):
    "A folder of checkpoints, each of other weights, and the bundle it was made of."
    made = small(kind)
    options = {"tokenizer": made.tokenizer, "keep_last": 9} | options
    saved = CheckpointManager(folder, **options)
    for step, metric in metrics:
        with torch.no_grad():
            next(made.model.parameters()).fill_(step / 100)
        saved.save(step, made.model, {}, metric)
    return saved, made


def step_of(bundle):
    "What `trained` wrote into the weights."
    return round(100 * next(bundle.model.parameters()).flatten()[0].item())


@pytest.mark.parametrize("kind", [GPT, Llama, SavableMiniGPT])
def test_the_folder_of_a_training_is_text_in_text_out(kind, tmp_path):
    saved, made = trained(tmp_path, kind)
    again = tformer.load(tmp_path)
    assert not again.model.training and type(again.model) is kind
    assert again.tokenizer == made.tokenizer
    saved.load(made.model, 20)
    assert equal_models(again.model, made.model)
    if kind is not SavableMiniGPT:
        made.model.eval()
        told = [
            one.generate(
                "Tom", max_new_tokens=5, sampling_params=SamplingParams(seed=1)
            )
            for one in (again, made)
        ]
        assert told[0] == told[1] != "Tom"


def test_the_best_checkpoint_is_loaded_or_the_last_or_another(tmp_path):
    trained(tmp_path)
    assert step_of(load_bundle(tmp_path)) == 20
    assert step_of(load_bundle(tmp_path, checkpoint="best")) == 20
    assert step_of(load_bundle(str(tmp_path), checkpoint="last")) == 30
    assert step_of(load_bundle(tmp_path, checkpoint=10)) == 10
    assert step_of(load_bundle(tmp_path / "step-000010")) == 10


def test_without_metrics_the_last_checkpoint_is_loaded(tmp_path):
    trained(tmp_path, metrics=((10, None), (9, float("nan"))))
    assert step_of(load_bundle(tmp_path)) == 10
    with pytest.raises(ValueError) as caught:
        load_bundle(tmp_path, checkpoint="best")
    assert str(caught.value) == (
        f"no checkpoint in {tmp_path} was saved with a metric, so that none is the "
        "best; the last one is that of step 10"
    )


def test_what_a_training_writes_is_loaded(tmp_path):
    made = small(GPT)
    steps = iter([3.0, 1.0, 2.0])
    Trainer(
        made.model,
        [torch.randint(257, (2, 9))],
        max_steps=3,
        eval_every=1,
        eval_fn=lambda model: next(steps),
        output_dir=tmp_path,
        tokenizer=made.tokenizer,
    ).fit()
    again = load_bundle(tmp_path, checkpoint="last")
    assert equal_models(again.model, made.model.eval())
    assert load_bundle(tmp_path).card["about"] == (
        f"step 2 of the training in {tmp_path}, metric 1"
    )
    assert again.generate("Tom", max_new_tokens=3).startswith("Tom")


def test_the_card_of_a_checkpoint(tmp_path):
    _, made = trained(tmp_path / "run")
    loaded = load_bundle(tmp_path / "run")
    folder = tmp_path / "run" / "step-000020"
    assert loaded.card == {
        "name": "step-000020",
        "about": f"step 20 of the training in {tmp_path / 'run'}, metric 1",
        "model": "GPT",
        "parameters": sum(p.numel() for p in made.model.parameters()),
        "files": {name: file_fingerprint(folder / name) for name in BUNDLE_FILES},
    }
    assert repr(loaded).startswith("step-000020: step 20 of the training in ")
    loaded.save(tmp_path / "kept")  # a bundle as any other
    assert equal_models(load_bundle(tmp_path / "kept").model, loaded.model)


def test_a_bundle_in_the_folder_of_a_training_comes_first(tmp_path):
    _, made = trained(tmp_path)
    made.save(tmp_path)
    assert load_bundle(tmp_path).card["name"] == "small"
    assert step_of(load_bundle(tmp_path / "step-000010")) == 10


@pytest.mark.parametrize(
    "wrong, said",
    [
        (15, r"/run has no checkpoint of step 15; it has \[10, 20, 30\]$"),
        ("newest", r"has no checkpoint of step 'newest'; it has \[10, 20, 30\]$"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(wrong, said, tmp_path):
    trained(tmp_path / "run")
    with pytest.raises(ValueError, match=said):
        load_bundle(tmp_path / "run", checkpoint=wrong)


def test_only_a_training_has_checkpoints_to_choose_from(tmp_path):
    trained(tmp_path)
    for one in ("stories", tmp_path / "step-000010"):
        with pytest.raises(
            ValueError, match="holds one model: give checkpoint= only with the folder"
        ):
            load_bundle(one, checkpoint="last")


def test_a_checkpoint_without_a_tokenizer_says_what_to_call(tmp_path):
    trained(tmp_path, tokenizer=None)
    folder = tmp_path / "step-000020"
    with pytest.raises(ValueError) as caught:
        load_bundle(tmp_path)
    call = f"load_model(GPT, {str(folder)!r})"
    assert str(caught.value) == (
        f"{folder} has no vocabulary.json: give the training its tokenizer=, or load "
        f"the model alone by {call}"
    )
    assert load_model(GPT, str(folder)).max_len == 32


def test_a_tokenizer_under_the_name_of_hugging_face_is_told_apart(folder, tmp_path):
    "The file is of our own format, so their library cannot read it."
    trained(tmp_path / "run")
    rename = (
        "has a tokenizer.json and no vocabulary.json, as a tokenizer that save wrote "
        "is named: rename the file if save wrote it, and its name in card.json where "
        "there is one"
    )
    for made, load in (
        (folder, read_verified_card),
        (folder, load_bundle),
        (tmp_path / "run" / "step-000010", load_bundle),
    ):
        ours = made / "vocabulary.json"
        if ours.is_file():
            ours.rename(made / "tokenizer.json")
        with pytest.raises(ValueError) as caught:
            load(made)
        assert str(caught.value) == f"{made} {rename}"
    (folder / "tokenizer.json").rename(folder / "vocabulary.json")
    (folder / "tokenizer.json").write_text("of another program", "utf-8")
    load_bundle(folder)  # what stands beside changes nothing


def test_the_name_that_hugging_face_gives_a_tokenizer_is_not_ours(tmp_path):
    trained(tmp_path / "run")
    small(GPT).save(tmp_path / "saved")
    for path in (tmp_path, BUNDLED_DIR):
        assert not list(path.rglob("tokenizer.json"))
        assert list(path.rglob("vocabulary.json"))


def test_a_checkpoint_of_a_model_of_ones_own_says_what_to_call(tmp_path):
    class Own(GPT):
        pass

    own = Own(GPTConfig(vocab_size=257, d_model=16, n_layers=1, n_heads=2))
    for name, model in (("Own", own), ("model of another kind", torch.nn.Linear(2, 2))):
        folder = tmp_path / name
        CheckpointManager(folder).save(7, model, {})
        with pytest.raises(ValueError) as caught:
            load_bundle(folder)
        assert str(caught.value).startswith(
            f"{folder / 'step-000007'} holds a {name}, and tformer.load makes only "
        )
        call = f"CheckpointManager({str(folder)!r}).load(model, 7)"
        assert str(caught.value).endswith(f": make the model, and call {call}")
        CheckpointManager(str(folder)).load(model, 7)


@pytest.mark.parametrize("name", BUNDLE_FILES)
def test_an_altered_checkpoint_is_refused(name, tmp_path):
    trained(tmp_path)
    path = tmp_path / "step-000020" / name
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=str(path.parent)):
        load_bundle(tmp_path)


def test_only_models_that_can_be_loaded_are_saved(tmp_path):
    with pytest.raises(ValueError, match="Linear"):
        save_bundle(ModelBundle(torch.nn.Linear(2, 2), None, {}), tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="MiniGPTConfig"):
        SavableMiniGPT(LlamaConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1))
    assert find_bundle("tour") == BUNDLED_DIR / "tour"


# telling, judging, copying


def test_a_text_goes_on_from_its_start(storyteller):
    start = "Once there was a girl named Mia."
    told = tell(storyteller, 3, start=start, temperature=0.5)
    assert all(text.startswith(start + " ") for text in told)
    assert tell(storyteller, 3, start=start, temperature=0.5) == told
    assert tell(storyteller, 3, start=start, seed=1) != told
    assert not any(ENDOFTEXT in text for text in told)


@pytest.mark.parametrize("start", ["", "Once there was a boy named Tom."])
def test_texts_are_drawn_together_until_all_have_ended(storyteller, start):
    """The loop written out, without a cache: one draw for all rows at each step.

    Recorded shares of right sentences are those of these draws, so a row that
    has ended keeps its place in them.
    """
    model, tokenizer, _ = storyteller
    end = tokenizer.token_to_id(ENDOFTEXT)
    ids = torch.tensor([[end, *tokenizer.encode(start)]] * 6)
    first = ids.shape[1]
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        while not (ids[:, first:] == end).any(1).all():
            p = (model(ids)[:, -1] / 1.4).softmax(-1)
            ids = torch.cat([ids, p.multinomial(1, generator=chance)], 1)
    ends = (ids[:, first:] == end).int().argmax(1)
    assert len({*ends.tolist()}) > 3  # they end one after the other
    assert tell(storyteller, 6, start=start, temperature=1.4, seed=2) == [
        tokenizer.decode(row[1 : first + n])
        for row, n in zip(ids.tolist(), ends, strict=True)
    ]


def test_one_text_is_what_it_is_beside_others(storyteller):
    "Greedy, nearly: the rows of a batch do not move each other."
    alone = tell(storyteller, 1, temperature=1e-4)
    assert tell(storyteller, 4, temperature=1e-4) == alone * 4


def test_a_text_without_an_end_stops_at_the_limit():
    made = small(Llama)
    with torch.no_grad():
        made.model.embed.weight[made.tokenizer.token_to_id(ENDOFTEXT)] = 0
    made = made._replace(model=made.model)
    (text,) = tell(made, start="ab", temperature=0.01)
    assert len(text.encode("utf-8", "replace")) >= 31 - 2 or "\ufffd" in text


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=0.0),
        dict(temperature=-1.0),
        dict(n=0),
        dict(temperature=math.nan),
        dict(n=2.5),
        dict(n=True),
        dict(start="once " * 400),
    ],
)
def test_bad_wishes_are_refused(storyteller, bad):
    with pytest.raises(ValueError, match=r"above 0|at least 1|no room"):
        tell(storyteller, **bad)


STORY = "Once there was a girl named Mia. One day, she went to the park. He sat down."


def test_each_sentence_has_its_verdict():
    for story in stories.generate_stories(50, 3, 3):
        assert not any(v.problems for v in grade_sentences(story))
    found = grade_sentences("Once there was a happy girl named Mia. Mia flew xyz.")
    assert [v.sentence for v in found][1] == "Mia flew xyz."
    assert not found[0].problems and "cannot read" in found[1].problems[0]
    assert grade_sentences("") == []
    with pytest.raises(ValueError, match="text must be a str"):
        grade_sentences(3)


def test_the_verdicts_are_the_graders():
    told = list(stories.generate_stories(60, 4, 1))
    spoiled = [
        s.replace("She", "He", 1) if i % 3 else s.replace("found", "fond")
        for i, s in enumerate(told)
    ]
    grade = stories.grade_stories("".join(spoiled))
    assert sum(len(v.problems) for s in spoiled for v in grade_sentences(s)) == len(
        grade.problems
    )
    assert fraction_correct(spoiled, per_story=True) == grade.flawless / 60
    assert fraction_correct(told) == fraction_correct(told, per_story=True) == 1.0
    with pytest.raises(ValueError, match="no sentence"):
        fraction_correct([])


def test_copies_are_found():
    read = ["a b c d e", "f g h"]
    assert fraction_copied(["a b c d e\n", "a b c"], read) == 0.5
    assert fraction_copied(["a b c x"], read, 2) == 2 / 3
    assert fraction_copied(["c d", "e f"], read, 2) == 0.5  # not across texts
    assert fraction_copied(["h g"], read, 1) == 1.0
    with pytest.raises(ValueError, match="no text"):
        fraction_copied(["a b"], read, 3)
    with pytest.raises(ValueError, match="words"):
        fraction_copied(["a b"], read, -1)
    with pytest.raises(ValueError, match=r"num_words .* at least 1, got 0"):
        fraction_copied(["a b"], read, 0)


# the script


def script():
    return load_experiment("trained")


@pytest.mark.nightly
@plain_only
def test_the_models_are_made_by_their_script(tmp_path, monkeypatch):
    words = ["trained.py", "--steps", "2", "--out", str(tmp_path)]
    run(
        sys.executable, ROOT / "experiments" / words[0], *words[1:], "--only", "stories"
    )
    made = script()
    monkeypatch.setattr(sys, "argv", [*words, "--only", "tour"])
    made.main()
    for name in ("tour", "stories"):
        short = load_bundle(tmp_path / name).card
        kept = load_bundle(name).card
        assert short.keys() == kept.keys()
        for same in ("model", "parameters", "seed", "script", "about"):
            assert short[same] == kept[same]
        assert short["steps"] == 2 and short["loss"] > kept["loss"]
        for file in ("config.json", TOKENIZER_NAME):
            assert short["files"][file] == kept["files"][file]
    before = (tmp_path / "tour" / CARD_NAME).read_bytes()
    monkeypatch.setattr(sys, "argv", [*words, "--only", "tour", "--check"])
    made.main()  # the same again: nothing is written
    assert (tmp_path / "tour" / CARD_NAME).read_bytes() == before
    monkeypatch.setattr(made, "read_verified_card", lambda folder: {"loss": 0.1})
    with pytest.raises(SystemExit, match=r"tour: loss .* was 0\.1"):
        made.main()


@plain_only
def test_the_translator_is_made_by_its_script():
    short = script().train_one("translator", 2)
    kept = load_bundle("translator").card
    missing = {"model", "parameters", "files"}  # until it is saved
    assert short.card.keys() == kept.keys() - missing
    assert short.card["steps"] == 2 and short.card["loss"] > kept["loss"]
    assert short.model.config.d_model == 128
    assert short.tokenizer.token_to_id(translation.TRANSLATION_SPECIAL_TOKENS[0]) >= 0


def test_a_retraining_outside_its_band_is_told():
    made = script()
    kept = dict(name="stories", loss=0.08, right=0.97, copied=0.0)
    assert made.differences(kept, kept) == []
    found = made.differences(kept | {"right": 0.8, "loss": 0.085}, kept)
    assert len(found) == 1 and "right 0.8, was 0.97" in found[0]
    tour = dict(name="tour", loss=0.19)
    assert made.differences(tour | {"loss": 0.3}, tour)


def test_the_script_rounds_to_what_the_file_can_hold():
    made = script()
    model = small(Llama).model
    exact = {name: p.clone() for name, p in model.named_parameters()}
    made.round_weights(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, exact[name].bfloat16().float())
    assert not torch.equal(model.embed.weight, exact["embed.weight"])


def test_every_parameter_has_one_optimizer():
    made = script()
    model = small(Llama).model
    muon, adamw = made.optimizers(model)
    parts = [
        [id(p) for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (muon, adamw)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(id(p) for p in model.parameters())
    assert all(p.ndim == 2 for p in muon.param_groups[0]["params"])
    assert id(model.embed.weight) in parts[1]


def test_the_loss_of_the_script_is_that_of_whole_texts(storyteller):
    made = script()
    texts = [s.strip() for s in stories.generate_stories(7, 5, 1)]
    alone = [made.nats_per_byte(storyteller, [text]) for text in texts]
    sizes = [len(text) + 1 for text in texts]
    expected = sum(a * n for a, n in zip(alone, sizes, strict=True)) / sum(sizes)
    assert abs(made.nats_per_byte(storyteller, texts) - expected) < 1e-5
