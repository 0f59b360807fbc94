"""The benchmarks of parts and models run, and compare like with like."""

import re
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import bench_command_line
import bench_compiled
import bench_data
import bench_generate
import bench_models
import bench_parts
import bench_serving
import bench_training
import bench_variants
import timing


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "quick", True)


@pytest.fixture
def quickly(monkeypatch, capsys):
    """What a benchmark prints that is run with --quick.

    Here, not in a process of its own: what it imports is imported.
    """

    def printed(bench):
        monkeypatch.setattr(sys, "argv", [bench.__file__, "--quick"])
        monkeypatch.setattr(timing, "quick", False)  # and back afterwards
        monkeypatch.setattr(timing, "keep_memory", lambda: None)
        capsys.readouterr()
        bench.main()
        return capsys.readouterr().out

    return printed


@pytest.mark.nightly
def test_the_benchmark_of_the_parts_runs(quickly):
    printed = quickly(bench_parts)
    for part in (
        "Embedding",
        "SinusoidalPositionEmbedding",
        "LearnedPositionEmbedding",
        "RotaryEmbedding",
        "ShawRelativePositions",
        "T5RelativeBias",
        "ALiBi",
        "Linear",
        "LayerNorm",
        "RMSNorm",
        "ACTIVATIONS",
        "FeedForward, relu",
        "FeedForward, gelu_tanh",
        "GatedFeedForward",
        "PreNorm",
        "PostNorm",
        "attention, apart",
        "attention, fused",
        "fused_attend",
        "DynamicLayerCache.update",
        "cached decoding",
    ):
        assert re.search(rf"^{part}.* / .* x ", printed, re.M), part


@pytest.mark.nightly
def test_the_benchmark_of_the_models_runs(quickly):
    printed = quickly(bench_models)
    ways = "forward", "and backward", "a step, 1 x 8", "a step, 2 x 8"
    for name, peer, n in (
        ("Seq2Seq", "MarianMTModel", 4),
        ("BERT", "BertForPreTraining", 2),
        ("GPT", "GPT2LMHeadModel", 4),
        ("GPT1", "OpenAIGPTLMHeadModel", 2),
        ("Llama", "LlamaForCausalLM", 4),
        ("Llama, GQA", "LlamaForCausalLM", 4),
        ("Qwen3", "Qwen3ForCausalLM", 4),
    ):
        for way in ways[:n]:
            assert re.search(rf"^{name} / {peer}, {way} .* x ", printed, re.M), (
                name,
                way,
            )


@pytest.mark.nightly
def test_the_benchmark_of_compiled_steps_runs(quickly):
    printed = quickly(bench_compiled)
    for batch in (1, 8):
        for peer in ("growing", "fixed"):
            assert re.search(
                rf"^compiled / eager {peer}, batch {batch} .* x ", printed, re.M
            ), (batch, peer)


@pytest.mark.nightly
def test_the_benchmark_of_the_variants_runs(quickly):
    printed = quickly(bench_variants)
    for name in (
        "quarter of the key heads, width 256",
        "whole step, width 256",
        "bytes kept, 4 key heads, width 256",
        "bytes kept, 1 key heads, width 256",
        "latent layer / DeepseekV3Attention",
        "latent step / DeepseekV3ForCausalLM",
        "bytes kept, latent",
        "window decode, 8w / 2w",
        "window prefill / full causal kernel",
        "window prefill / masked kernel",
        "window prefill / FlexAttention",
        "window step / MistralForCausalLM, 2w",
        "window step / MistralForCausalLM, 8w",
        "sparse / dense attention",
        "sparse / dense layer",
        "sparse layer / DeepseekV32Attention",
        "bytes kept, sparse",
    ):
        assert re.search(rf"^{name} .* x ", printed, re.M), name


@pytest.mark.nightly
def test_the_benchmark_of_training_runs(quickly, monkeypatch):
    monkeypatch.setattr(bench_training, "LAYERS", 2)
    printed = quickly(bench_training)
    for name, peer in (("GPT", "GPT2LMHeadModel"), ("Llama", "LlamaForCausalLM")):
        for row in (
            f"{name} / {peer}",
            f"{name}, share of the matmul peak",
            f"{peer}, share of the matmul peak",
            f"{name}, float32 / bfloat16",
            f"{name}, all logits at once / in chunks",
            f"{name}, compiled / not",
        ):
            assert re.search(rf"^{row} .* x ", printed, re.M), row


def test_both_sides_of_a_step_begin_and_learn_alike(quick, monkeypatch):
    monkeypatch.setattr(bench_training, "LAYERS", 2)
    twins = bench_training.llama_twins(bench_parts.SMALL[0])
    ours, peer = bench_training.sides_of(twins)
    for _ in range(3):  # other weights each time, equal ones on both
        assert bench_training.must_agree(twins, ours, peer) < 1e-5
        ours.step(), peer.step()
    twins.ours.norm.eps = 0.1
    with pytest.raises(AssertionError, match=r"Llama.*sides differ"):
        bench_training.must_agree(twins, ours, peer)


def test_flops_of_a_step_are_six_for_each_weight_and_token(quick):
    size = bench_parts.SMALL[0]
    model = bench_training.gpt_twins(size).ours
    n = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and not name.startswith("embed_positions")
    )
    pairs = size.t * (size.t + 1) // 2
    assert bench_training.work_of(model, size) == size.b * (
        6 * n * size.t + 12 * bench_training.LAYERS * size.d * pairs
    )


@pytest.mark.nightly
def test_the_benchmark_of_the_data_runs(quickly):
    printed = quickly(bench_data)
    for loader in ("RandomWindowLoader", "PackedLoader", "PaddedLoader"):
        assert re.search(rf"^{loader} / a step .* x ", printed, re.M), loader


@pytest.mark.nightly
def test_the_benchmark_of_the_command_runs(quickly):
    printed = quickly(bench_command_line)
    assert printed.count("a story beyond import torch") == 2


@pytest.mark.nightly
def test_the_benchmark_of_writing_runs(quickly):
    printed = quickly(bench_generate)
    for kind in ("GPT", "Llama"):
        for way, batches in (
            ("transformers", 2),
            ("functional", 2),
            ("uncached", 1),
            ("products", 2),
        ):
            found = re.findall(
                rf"^{kind}: {way} / generate, batch .* x ", printed, re.M
            )
            assert len(found) == batches, (kind, way)
        for way in ("generate", "functional"):
            assert printed.count(f"{kind}: {way} / compiled") == 2, way


@pytest.mark.nightly
def test_the_benchmark_of_serving_runs(quickly, monkeypatch):
    monkeypatch.setattr(bench_serving, "FAILED", [])
    printed = quickly(bench_serving)
    for kind in ("lognormal", "uniform", "stories"):
        for name in (
            r"steps / \(bound \+ drain\)",
            "static / in flight, steps",
            "sorted static / in flight, steps",
            "static / in flight, seconds",
            "leaving / in flight, seconds",
            "slots / blocks, bytes",
        ):
            assert re.search(rf"^{kind}: {name} .* x ", printed, re.M), name
    for name in ("the engine's own work / a step", "a step while 100", "memory after"):
        assert re.search(rf"^{name} .* x ", printed, re.M), name


def test_ways_that_write_other_ids_are_refused(quick, monkeypatch):
    monkeypatch.setitem(
        bench_generate.WAYS,
        "transformers",
        lambda model: lambda ids, new: [[0] * new] * len(ids),
    )
    with pytest.raises(AssertionError, match=r"other ids.*transformers"):
        bench_generate.bench("GPT", 1, only="transformers")


def test_twins_must_have_the_same_weights_and_gradients(quick):
    size = bench_parts.SMALL[0]
    *_, twins = bench_models.bench_seq2seq(size)
    twins.ours.blocks[0].cross_attention.norm.eps = 0.1
    with pytest.raises(AssertionError, match=r"Seq2Seq.*forward.* differ"):
        twins.measure()
    *_, twins = bench_models.bench_bert(size)
    run, twins.run_ours = (
        twins.run_ours,
        lambda ids, segments: [x + (x - x.detach()) for x in run(ids, segments)],
    )
    with pytest.raises(AssertionError, match=r"BERT.*and backward.* differ"):
        twins.measure()
    *_, twins = bench_models.bench_llama(size)
    twins.step = None
    twins.measure()
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        bench_models.decoder(
            "", twins.ours, twins.peer, bench_models.LLAMA[:1], *twins.inputs
        )


def test_the_record_of_a_step_is_made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import step

    monkeypatch.setattr(
        sys, "argv", ["step.py", "--quick", "--out", str(tmp_path / "step.csv")]
    )
    step.main()
    rows = step.common.read(tmp_path / "step.csv")
    for name in ("GPT", "Llama"):
        for precision in step.PRECISIONS:
            mine = [
                r for r in rows if (r["model"], r["precision"]) == (name, precision)
            ]
            assert {r["phase"] for r in mine} == set(step.PHASES)
            assert {r["part"] for r in mine} == set(step.PARTS)
            total = sum(float(r["ms"]) for r in mine)
            assert total == pytest.approx(float(mine[0]["step_ms"]), rel=0.1)
            assert not any(
                r["part"] == "optimizer" for r in mine if r["phase"] != "update"
            )


def test_sides_that_differ_are_refused(quick):
    x = torch.ones(2, 3)
    case = bench_parts.Case("doubled", lambda x: 2 * x, torch.clone, (x,))
    with pytest.raises(AssertionError, match=r"doubled, forward.* differ: 1"):
        bench_parts.measure(case)
    # equal values, other gradients
    case = bench_parts.Case(
        "kept", lambda x: x + 2 * (x - x.detach()), torch.clone, (x,)
    )
    with pytest.raises(AssertionError, match=r"kept, and backward.* differ"):
        bench_parts.measure(case)
    case = bench_parts.Case("wider", torch.Tensor.double, torch.clone, (x,))
    with pytest.raises(AssertionError, match=r"float64.*float32"):
        bench_parts.measure(case)


def test_a_slow_side_misses_its_target(capsys, monkeypatch):
    monkeypatch.setattr(bench_parts, "SAMPLE", 0.002)
    monkeypatch.setattr(bench_parts, "BUDGET", 0.03)
    monkeypatch.setattr(bench_parts, "FAILED", [])
    x = torch.ones(200, 200)
    case = bench_parts.Case(
        "slow",
        lambda x: sum(x.clone() for _ in range(8)) / 8,
        torch.clone,
        (x,),
        backward=False,
    )
    bench_parts.measure(case)
    assert "NOT met" in capsys.readouterr().out
    [(name, value)] = bench_parts.FAILED
    assert name == "slow, forward" and value > 2


def test_every_other_round_runs_backwards():
    seen = []
    times = timing.rounds_of({k: lambda k=k: seen.append(k) for k in "ab"}, 3)
    assert "".join(seen) == "abbaab"
    assert [len(t) for t in times.values()] == [3, 3]
