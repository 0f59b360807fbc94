"""BERT against transformers, by its laws, in files, and in training."""

import dataclasses
import inspect
import json
import math
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

warnings.filterwarnings("ignore", message="IProgress not found")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from helpers import close, plain_only  # noqa: E402
from tformer import check  # noqa: E402
from tformer.models import mini_gpt  # noqa: E402
from tformer.models.bert import (  # noqa: E402
    BERT_NAME_MAP,
    Bert,
    BertClassifier,
    BertConfig,
    BertEmbedding,
    BertMaskedLM,
    BertPretraining,
    BertTagger,
    MaskedLMHead,
    Pooler,
    from_hf_bert_name,
    load_bert,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TINY = BertConfig(
    vocab_size=40, d_model=16, n_layers=2, n_heads=4, d_ff=24, max_len=20, n_labels=3
)
TWINS = {
    Bert: "BertModel",
    BertMaskedLM: "BertForMaskedLM",
    BertPretraining: "BertForPreTraining",
    BertTagger: "BertForTokenClassification",
    BertClassifier: "BertForSequenceClassification",
}
each = pytest.mark.parametrize("cls", TWINS, ids=lambda c: c.__name__)


def draw(*shape, seed=0, low=1, high=40):
    "Random ids; not 0, whose row transformers gives no gradient."
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=g)


def kinds(*shape, n=2, seed=1):
    "Random segments."
    return draw(*shape, seed=seed, low=0, high=n)


@torch.no_grad()
def spread(module, std=0.1, seed=0):
    "Weights of standard deviation 0.1, norms and biases away from 1, 0."
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        p.normal_(
            1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0,
            std,
            generator=g,
        )
    return module.eval()


def their_config(config=TINY, **more):
    return transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_labels=config.n_labels,
        num_attention_heads=config.n_heads,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.max_len,
        type_vocab_size=config.n_segments,
        **more,
    )


def make_twin(cls, seed=0, **more):
    config = their_config(**more)
    return spread(getattr(transformers, TWINS[cls])(config), seed=seed)


def pair(cls, tmp_path, **more):
    "A model of ours and its twin, the weights by way of files."
    twin = make_twin(cls, **more)
    twin.save_pretrained(tmp_path)
    return load_bert(cls, tmp_path), twin


def outputs(model, ids, **how):
    "What a model of ours or of transformers returns, as a tuple."
    out = model(ids, **how)
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, tuple):
        return out
    names = (
        "prediction_logits",
        "seq_relationship_logits",
        "logits",
        "last_hidden_state",
    )
    return tuple(out[n] for n in names if n in out)


def lean(out, keep=None):
    "A sum in which no two outputs count alike, padding left out."
    total = 0.0
    for y in out:
        tilt = torch.linspace(-1, 1, y.numel()).view(y.shape)
        y = y * tilt
        if keep is not None and y.ndim == 3:
            y = y[keep]
        total = total + y.sum()
    return total


def compare_gradients(ours, theirs):
    "Every gradient, by our names; a tied table has the sum in both."
    expected = {}
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            name = from_hf_bert_name(name)
            if isinstance(ours, Bert):
                name = name.removeprefix("bert.")
            expected[name] = p.grad
    found = {n: p.grad for n, p in ours.named_parameters()}
    assert set(found) == set(expected)
    for name, grad in found.items():
        close(grad, expected[name])


def ragged(side, t=9):
    "Which places of four rows hold tokens: 9, 6, 8 and 5 of them."
    lack = torch.tensor([0, 3, 1, 4])[:, None]
    place = torch.arange(t)
    return place >= lack if side == "left" else place < t - lack


def count(keep):
    return torch.where(keep, keep.cumsum(1) - 1, -1)


# parity


@each
@pytest.mark.parametrize("how", ["bare", "segments", "right", "left"])
def test_equal_to_transformers_in_value_and_gradient(cls, how, tmp_path):
    ours, theirs = pair(cls, tmp_path)
    ids = draw(4, 9)
    keep = None
    mine = {}
    other = {}
    if how != "bare":
        segments = kinds(4, 9)
        mine["segment_ids"] = segments
        other["token_type_ids"] = segments
    if how in ("left", "right"):
        keep = ragged(how)
        mine["positions"] = count(keep)
        other["attention_mask"] = keep.long()
        other["position_ids"] = count(keep).clamp(min=0)
    a = outputs(ours, ids, **mine)
    b = outputs(theirs, ids, **other)
    pooled = cls in (BertPretraining, BertClassifier)
    if how == "left" and pooled:  # theirs pools padding: see below
        a, b = [x[:-1] if len(x) > 1 else [x[0][:1]] for x in (a, b)]
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        whole = keep is None or x.ndim == 2
        close(x if whole else x[keep], y if whole else y[keep])
    lean(a, keep).backward()
    lean(b, keep).backward()
    if how == "left" and pooled:
        grads = [
            m.bert.embed.tokens.weight.grad
            if m is ours
            else m.bert.embeddings.word_embeddings.weight.grad
            for m in (ours, theirs)
        ]
        return close(*grads)
    compare_gradients(ours, theirs)


@each
def test_check_same_agrees(cls, tmp_path):
    ours, theirs = pair(cls, tmp_path)
    if cls is BertClassifier:  # one output for a text: as one token
        return close(ours(draw(2, 9)), theirs(draw(2, 9)).logits)
    reference = theirs
    if cls is BertPretraining:

        def reference(ids):
            return theirs(ids).prediction_logits

    report = check.same(
        ours, reference, TINY.vocab_size, ids=draw(2, 12), name_map=BERT_NAME_MAP
    )
    assert report, report


def test_a_padded_batch_pools_the_first_token_of_each_row(tmp_path):
    "Theirs takes place 0, which on the left is padding; ours the token."
    ours, theirs = pair(BertClassifier, tmp_path)
    for side in ("left", "right"):
        keep = ragged(side)
        ids = draw(4, 9)
        out = ours(ids, positions=count(keep))
        for i in range(4):
            alone = ids[i, keep[i]][None]
            close(out[i : i + 1], theirs(alone).logits)
            close(out[i : i + 1], ours(alone))


def test_shared_positions_of_a_left_padded_batch():
    ids = draw(3, 5)
    positions = torch.tensor([[-1, -1, 0, 1, 2]])
    for cls in (BertClassifier, BertPretraining):
        model = spread(cls(TINY))
        close(
            outputs(model, ids, positions=positions)[-1], outputs(model, ids[:, 2:])[-1]
        )


def test_the_pooler_of_transformers_is_ours(tmp_path):
    theirs = make_twin(Bert)
    theirs.save_pretrained(tmp_path)
    ours = load_bert(Bert, tmp_path)
    pooler = Pooler(16)
    pooler.proj.load_state_dict(theirs.pooler.dense.state_dict())
    out = theirs(draw(2, 7))
    ids = draw(2, 7)
    close(ours(ids), out.last_hidden_state)
    close(pooler(ours(ids)), out.pooler_output)


@each
def test_a_mask_of_the_caller_equals_theirs(cls, tmp_path):
    ours, theirs = pair(cls, tmp_path)
    ids = draw(2, 6)
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 1, 6, 6, generator=g) < 0.5
    mask |= torch.eye(6).bool()
    bias = torch.zeros(2, 1, 6, 6).masked_fill(~mask, -math.inf)
    for a, b in zip(
        outputs(ours, ids, mask=mask),
        outputs(theirs, ids, attention_mask=bias),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize(
    "act, name",
    [
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("relu", "relu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("silu", "silu"),
    ],
)
def test_activations_by_their_names(act, name, tmp_path):
    ours, theirs = pair(BertMaskedLM, tmp_path, hidden_act=act)
    assert ours.config.activation == name
    ids = draw(2, 9)
    close(ours(10 * ids % 40), theirs(10 * ids % 40).logits)


def test_eps_is_that_of_the_file(tmp_path):
    ours, theirs = pair(BertMaskedLM, tmp_path, layer_norm_eps=0.5)
    assert ours.config.eps == 0.5
    close(ours(draw(2, 9)), theirs(draw(2, 9)).logits)


def test_eps_is_small_where_the_stream_is_small():
    "An eps of 1e-5 would be seen here; it must be 1e-12."
    torch.manual_seed(0)
    part = BertEmbedding(9, 8, max_len=5)
    with torch.no_grad():
        for table in (part.tokens, part.positions, part.segments):
            table.weight.mul_(1e-3)
    x = part(draw(2, 5, high=9))
    close(x.std(-1, correction=0), torch.ones(2, 5), 1e-3)


def test_the_parts_add_up():
    part = spread(BertEmbedding(9, 8, max_len=5, n_segments=3))
    ids = draw(2, 5, high=9)
    segments = kinds(2, 5, n=3)
    positions = torch.tensor([[4, 3, 2, 1, 0], [0, 0, 1, 2, 4]])
    x = (
        part.tokens.weight[ids]
        + part.positions.weight[positions]
        + part.segments.weight[segments]
    )
    want = F.layer_norm(x, (8,), part.norm.weight, part.norm.bias, 1e-12)
    close(part(ids, positions=positions, segment_ids=segments), want)
    nothing = torch.zeros_like(ids)
    close(part(ids), part(ids, positions=torch.arange(5)[None], segment_ids=nothing))
    assert not torch.equal(part(ids), part(ids, segment_ids=nothing + 1))


def test_as_many_kinds_of_segments_as_the_configuration_says():
    model = Bert(dataclasses.replace(TINY, n_segments=3)).eval()
    ids = draw(1, 4)
    assert model(ids, segment_ids=torch.full_like(ids, 2)).isfinite().all()
    with pytest.raises(ValueError, match=r"id 3 is outside .* of 3 ids"):
        model(ids, segment_ids=torch.full_like(ids, 3))


def test_the_head_is_written_out():
    g = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.empty(11, 8))
    head = spread(MaskedLMHead(table), std=0.5)
    x = 2 * torch.randn(2, 3, 8, generator=g)
    hidden = F.linear(x, head.proj.weight, head.proj.bias)
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    hidden = F.layer_norm(hidden, (8,), head.norm.weight, head.norm.bias, 1e-12)
    close(head(x), hidden @ table.T + head.bias)
    assert head.weight is table


def test_hidden_states_has_every_parameter_of_the_encoder():
    hidden, encoder, logits = (
        [str(parameter) for parameter in inspect.signature(f).parameters.values()]
        for f in (BertMaskedLM.hidden_states, Bert.forward, BertMaskedLM.forward)
    )
    assert hidden == encoder == logits
    model = spread(BertMaskedLM(TINY), std=0.3)
    ids = draw(2, 6)
    plain = model.hidden_states(ids)
    for option in (
        dict(positions=torch.arange(6)[None] + 2),
        dict(mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()),
        dict(segment_ids=kinds(2, 6)),
    ):
        vectors = model.hidden_states(ids, **option)
        assert torch.equal(vectors, model.bert(ids, **option))
        assert not torch.allclose(vectors, plain, atol=1e-3), [*option]


def test_bert_base_has_110_million_parameters():
    def size(*modules):
        return sum(p.numel() for m in modules for p in m.parameters())

    with torch.device("meta"):
        base = BertConfig()
        assert size(Bert(base)) == 108_891_648
        assert size(Bert(base), Pooler(768)) == 109_482_240
        assert size(BertMaskedLM(base)) == 109_514_298
        assert size(BertPretraining(base)) == 110_106_428
        large = BertConfig(d_model=1024, n_layers=24, n_heads=16)
        assert size(Bert(large), Pooler(1024)) == 335_141_888
        theirs = transformers.BertModel(transformers.BertConfig())
        assert size(theirs) == 109_482_240


# the checks of chapter 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_checks_pass(dtype):
    model = spread(BertMaskedLM(TINY), std=0.3).to(dtype)
    assert check.run_all(model, 40, skip=("causal",))


def test_taggers_and_encoders_pass_the_checks():
    tagger = spread(BertTagger(TINY), std=0.3)
    assert check.run_all(tagger, 3, skip=("causal",))
    encoder = spread(Bert(TINY), std=0.3)
    assert check.padding(encoder, 16)
    both = spread(BertPretraining(TINY), std=0.3)
    assert check.shapes(both, 40) and check.padding(both, 40)
    assert check.gradients(both, 40, frozen=("pooler.*", "next_sentence_head.*"))


def test_every_output_sees_every_token():
    model = spread(BertMaskedLM(TINY), std=0.3)
    moved, _ = check.influence(model, draw(1, 8), draw(1, 8, seed=3) + 0)
    other = draw(1, 8) != draw(1, 8, seed=3)
    assert (moved[:, other[0]] > 1e-6).all()
    with pytest.raises(check.CheckFailed, match="no causal mask"):
        check.causal(model, 40)


# tying, initialization, dropout


def test_the_decoder_is_the_table_and_is_saved_once(tmp_path):
    for cls in (BertMaskedLM, BertPretraining):
        model = cls(TINY)
        assert model.lm_head.weight is model.bert.embed.tokens.weight
        names = [n for n, _ in model.named_parameters()]
        assert "lm_head.weight" not in names and "lm_head.bias" in names
        model.save(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        assert "lm_head.weight" not in saved
        again = cls.load(tmp_path)
        assert again.lm_head.weight is again.bert.embed.tokens.weight


@each
def test_first_weights(cls):
    torch.manual_seed(0)
    model = cls(dataclasses.replace(TINY, d_model=64, vocab_size=300, n_labels=40))
    for name, p in model.named_parameters():
        if p.ndim == 2 and p.numel() > 900:
            assert 0.017 < p.std().item() < 0.023, name
        elif p.ndim == 1:
            assert (p == (1.0 if "norm.weight" in name else 0.0)).all()


def test_where_dropout_acts():
    model = BertMaskedLM(dataclasses.replace(TINY, dropout=0.3))
    rates = {
        n: m.p
        for n, m in model.named_modules()
        if type(m).__name__ == "Dropout" and m.p
    }
    sites = [
        f"bert.blocks.{i}.{n}.dropout"
        for i in range(2)
        for n in ("attention", "feed_forward")
    ]
    assert rates == dict.fromkeys(["bert.embed.dropout", *sites], 0.3)
    assert [b.attention.sublayer.dropout for b in model.bert.blocks] == [0.3, 0.3]
    for cls in (BertTagger, BertClassifier):
        assert cls(dataclasses.replace(TINY, dropout=0.3)).dropout.p == 0.3


@each
def test_dropout_acts_in_training_only(cls):
    model = cls(TINY)
    ids = draw(2, 9)
    a, b = (lean(outputs(model.train(), ids)) for _ in range(2))
    assert a != b
    a, b = (lean(outputs(model.eval(), ids)) for _ in range(2))
    assert a == b


def test_dropout_of_the_embedding_comes_after_its_norm():
    part = BertEmbedding(9, 64, max_len=5, dropout=0.5).train()
    share = (part(draw(4, 5, high=9)) == 0).float().mean().item()
    assert 0.4 < share < 0.6


def test_dropout_before_the_labels():
    "With the encoder at rest, only the last dropout is left."
    for cls in (BertTagger, BertClassifier):
        model = cls(dataclasses.replace(TINY, dropout=0.5)).train()
        model.bert.eval()
        a, b = (lean(model(draw(2, 9))[None]) for _ in range(2))
        assert a != b


# files


def test_pickle_is_never_used(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle")

    make_twin(BertMaskedLM).save_pretrained(tmp_path / "theirs")
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("load", "loads", "dump", "dumps", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    BertMaskedLM.from_bert(tmp_path / "theirs").save(tmp_path / "ours")
    BertMaskedLM.load(tmp_path / "ours")


def test_weights_that_do_not_fit_are_listed(tmp_path):
    twin = make_twin(BertMaskedLM)
    twin.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    word = "bert.embeddings.word_embeddings.weight"
    query = "bert.encoder.layer.1.attention.self.query.weight"
    bad = {n: t for n, t in good.items() if n != query}
    bad |= {word: good[word][:, :-1].clone(), "bert.extra.weight": torch.ones(2)}
    save_file(bad, path)
    with pytest.raises(ValueError) as caught:
        load_bert(BertMaskedLM, tmp_path)
    said = str(caught.value)
    assert "missing: bert.blocks.1.attention.sublayer.q_proj.weight" in said
    assert "unknown: extra.weight (2,)" in said
    assert "bert.embed.tokens.weight: (40, 15), expected (40, 16)" in said
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_bert(BertMaskedLM, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        load_bert(BertMaskedLM, tmp_path)


def test_old_files_are_read(tmp_path):
    "gamma and beta, a stored buffer, and the tied matrix a second time."
    twin = make_twin(BertPretraining)
    twin.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): t
        for n, t in load_file(path).items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(20)[None]
    word = old["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.weight"] = word.clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    save_file(old, path)
    for cls in (BertMaskedLM, BertPretraining, Bert):
        ours = load_bert(cls, tmp_path)
        ids = draw(2, 6)
        got = outputs(ours, ids)[0]
        if cls is Bert:
            close(got, twin.bert(ids).last_hidden_state)
        else:
            close(got, twin(ids).prediction_logits)
    old["cls.predictions.decoder.weight"] = word + 1.0
    save_file(old, path)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_bert(BertMaskedLM, tmp_path)


def test_a_new_head_on_a_trained_encoder(tmp_path):
    twin = make_twin(BertPretraining)
    twin.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"missing: classifier\.weight"):
        BertTagger.from_bert(tmp_path)
    tagger = BertTagger.from_bert(tmp_path, new_heads=("classifier",), n_labels=7)
    ids = draw(2, 6)
    segments = kinds(2, 6)
    assert tagger(ids).shape == (2, 6, 7)
    out = twin.bert(ids, token_type_ids=segments)
    close(tagger.bert(ids, segment_ids=segments), out.last_hidden_state)
    texts = BertClassifier.from_bert(tmp_path, new_heads=("classifier",), n_labels=5)
    assert texts(ids).shape == (2, 5)
    hidden = texts.bert(ids, segment_ids=segments)
    close(texts.pooler(hidden), out.pooler_output)
    with pytest.raises(ValueError, match="no part tail; its parts are bert"):
        BertTagger.from_bert(tmp_path, new_heads=("tail",))
    BertTagger.from_bert(tmp_path, new_heads="classifier")  # one name is enough


def test_our_own_folder_is_not_taken_for_theirs(tmp_path):
    Bert(TINY).save(tmp_path)
    with pytest.raises(ValueError, match="not of a BERT of transformers"):
        Bert.from_bert(tmp_path)


def test_a_segment_without_a_row_is_named_as_one():
    with pytest.raises(ValueError, match="segment_ids: id 2 is outside"):
        Bert(TINY)(draw(2, 4), segment_ids=torch.full((2, 4), 2))


def test_a_head_in_the_file_gives_way_to_a_new_one(tmp_path):
    twin = make_twin(BertTagger)
    twin.save_pretrained(tmp_path)
    kept = BertTagger.from_bert(tmp_path)
    assert kept.config.n_labels == 3
    assert torch.equal(kept.classifier.weight, twin.classifier.weight)
    new = BertTagger.from_bert(tmp_path, new_heads=("classifier",))
    assert not torch.equal(new.classifier.weight, twin.classifier.weight)
    wide = BertTagger.from_bert(tmp_path, new_heads=("classifier",), n_labels=9)
    assert wide.classifier.weight.shape == (9, 16)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(model_type="roberta"), "model_type must be 'bert', got 'roberta'"),
        (dict(position_embedding_type="relative_key"), "'relative_key'"),
        (dict(is_decoder=True), "is_decoder must be False, got True"),
        (
            dict(tie_word_embeddings=False),
            "tie_word_embeddings must be True, got False",
        ),
        (dict(hidden_act="mish"), "activation must be one of .*'mish'"),
        (dict(hidden_size=18), "18 is no multiple of n_heads 4"),
    ],
)
def test_what_is_no_bert_of_ours_is_refused(change, said, tmp_path):
    make_twin(BertMaskedLM).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=said):
        load_bert(BertMaskedLM, tmp_path)


def test_the_fields_of_the_file_are_ours(tmp_path):
    make_twin(BertTagger, hidden_dropout_prob=0.25).save_pretrained(tmp_path)
    assert load_bert(BertTagger, tmp_path).config == dataclasses.replace(
        TINY, dropout=0.25
    )
    assert BertTagger.from_bert(tmp_path, dropout=0.0).config.dropout == 0


def test_names_are_one_to_one():
    for cls in TWINS:
        with torch.device("meta"):
            theirs = getattr(transformers, TWINS[cls])(their_config())
            ours = cls(TINY)
        names = {from_hf_bert_name(n) for n, _ in theirs.named_parameters()}
        own = {
            n if hasattr(ours, "bert") else f"bert.{n}"
            for n, _ in ours.named_parameters()
        }
        extra = {"pooler.proj.weight", "pooler.proj.bias"}
        assert names - (extra if cls is Bert else set()) == own


# configuration and calls


def test_configuration():
    config = BertConfig(vocab_size=9, d_model=8, n_heads=2)
    assert config.d_ff == 32 and config.eps == 1e-12
    assert eval(repr(config)) == config
    assert BertConfig.from_dict(config.to_dict()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 16
    with pytest.raises(ValueError, match="has no field depth"):
        BertConfig.from_dict({"depth": 3})


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(vocab_size=0), "vocab_size must be .* 1, got 0"),
        (dict(d_model=7), "d_model 7 is no multiple of n_heads 12"),
        (dict(d_model=7.5), "d_model must be a whole number .* got 7.5"),
        (dict(n_layers=0), "n_layers"),
        (dict(d_ff=-4), "d_ff .* got -4"),
        (dict(max_len=0), "max_len"),
        (dict(n_segments=0), "n_segments"),
        (dict(n_labels=0), "n_labels"),
        (dict(n_heads=0), "n_heads"),
        (dict(dropout=1.0), "dropout must be .* got 1.0"),
        (dict(eps=0.0), "eps must be above 0 .* got 0.0"),
        (dict(activation="gleu"), "activation must be one of .*'gleu'"),
    ],
)
def test_fields_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        BertConfig(**fields)


@each
def test_calls_that_cannot_be(cls):
    model = cls(TINY).eval()
    assert model.max_len == 20
    ids = draw(2, 5)
    with pytest.raises(ValueError, match=r"21 .* max_len 20"):
        model(draw(1, 21))
    with pytest.raises(ValueError, match=r"ids must be of shape \(b, t\)"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"id 40 is outside .* 40 ids"):
        model(ids + 40 - ids)
    with pytest.raises(ValueError, match=r"id 2 is outside .* of 2 ids"):
        model(ids, segment_ids=torch.full_like(ids, 2))
    with pytest.raises(ValueError, match=r"21 tokens.*max_len.* 20"):
        model(ids, positions=torch.arange(16, 21)[None])
    with pytest.raises(ValueError, match=r"positions of shape \(2, 4\)"):
        model(ids, positions=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"segment_ids must .*got \(3, 5\)"):
        model(ids, segment_ids=torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="a mask is boolean"):
        model(ids, mask=torch.ones(2, 5).long())


def test_a_text_without_tokens_has_no_first_one():
    none = draw(2, 0)
    assert BertMaskedLM(TINY)(none).shape == (2, 0, 40)
    for cls in (BertPretraining, BertClassifier):
        for positions in (None, none):
            with pytest.raises(ValueError, match="0 tokens"):
                cls(TINY)(none, positions=positions)
        assert outputs(cls(TINY), draw(0, 5))[-1].shape[0] == 0


def test_rows_may_be_longer_than_max_len_by_padding():
    model = spread(BertMaskedLM(TINY))
    ids = draw(1, 20)
    padded = torch.cat([draw(1, 5, seed=2), ids], 1)
    positions = torch.cat([torch.full((1, 5), -1), torch.arange(20)[None]], 1)
    close(model(padded, positions=positions)[:, 5:], model(ids))


# machines


@pytest.mark.nightly
@pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="checked signatures cannot be compiled"
)
def test_compiled_in_one_graph():
    model = spread(BertClassifier(TINY))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = draw(4, 9)
    positions = count(ragged("left"))
    close(fast(ids), model(ids))
    close(fast(ids, positions=positions), model(ids, positions=positions))
    two = kinds(4, 9)
    close(fast(ids, segment_ids=two), model(ids, segment_ids=two))


@each
def test_half_precision_stays_close(cls):
    model = spread(cls(TINY))
    want = outputs(model, draw(2, 9))
    for x, y in zip(outputs(model.bfloat16(), draw(2, 9)), want, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.float() - y).abs().max() < 0.05 * y.abs().max()


@pytest.mark.gpu
@each
def test_on_cuda(cls):
    model = spread(cls(TINY))
    ids = draw(4, 9)
    positions = count(ragged("left"))
    want = outputs(model, ids, positions=positions)
    model.cuda()
    got = outputs(model, ids.cuda(), positions=positions.cuda())
    for x, y in zip(got, want, strict=True):
        keep = positions >= 0 if x.ndim == 3 else slice(None)
        assert (x.cpu()[keep] - y[keep]).abs().max() < 1e-3


@pytest.mark.nightly
@plain_only
def test_it_learns_to_predict_masked_tokens():
    "Rows are abab…: what is hidden is told by either side."
    torch.manual_seed(0)
    config = dataclasses.replace(TINY, d_model=32, dropout=0.0)
    model = BertMaskedLM(config)
    g = torch.Generator().manual_seed(0)

    def loss_of(model, ids):
        hidden = torch.rand(ids.shape, generator=g) < 0.15
        logits = model(ids.masked_fill(hidden, 0))
        return F.cross_entropy(logits[hidden], ids[hidden])

    batches = (
        torch.randint(1, 6, (32, 2), generator=g).repeat(1, 4) for _ in range(600)
    )
    losses = mini_gpt.train(model, batches, 600, loss_of)
    assert sum(losses[-50:]) / 50 < 0.5 < 1.5 < losses[0]
    ids = torch.tensor([[0, 5, 3, 5, 3, 5, 3, 5], [2, 4, 2, 0, 2, 4, 2, 4]])
    guess = model.eval()(ids).argmax(-1)
    assert guess[0, 0] == 3 and guess[1, 3] == 4
