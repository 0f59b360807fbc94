"""What must not depend on the device: jobs that a card and the CPU both do.

A job returns ids, words, numbers and tensors.  `tests/test_gpu.py` does each on a
real card, `tests/test_devices.py` on a pretended one (`tests/pretend.py`), and both
compare the result with the CPU's by `same_results`.

Ids must be equal. They can only be so where rounding decides between no two ids, so
whatever writes does it in float64: there the two devices differ by some 1e-15, and
the logits of two ids by far more.
"""

import copy
import itertools

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import test_caches
from helpers import draw_ids, padded, randn
from models import ROWS, VOCAB
from tformer import check
from tformer.bundle import load_bundle, tell
from tformer.inference.beam import beam_search
from tformer.inference.generation import generate, stream
from tformer.inference.prefix import PrefixedModel
from tformer.inference.sampler import SamplingParams
from tformer.inference.scoring import strided_token_log_probs
from tformer.inference.speculative import DraftModel, PromptLookup, speculative_generate
from tformer.nn.paged_cache import BlockPool, new_paged_cache
from tformer.nn.quantized import quantize_int8
from tformer.nn.static_cache import new_static_cache
from tformer.serving.engine import Engine
from tformer.serving.requests import Request
from tformer.tasks import masked_lm
from tformer.tasks.translation import translate
from tformer.training.data import RandomWindowLoader
from tformer.training.losses import chunked_cross_entropy, cross_entropy, kl_divergence
from tformer.training.optimizers import (
    SGD,
    AdamW,
    RMSprop,
    clip_grad_norm_,
    orthogonalize,
)
from tformer.training.schedules import scale_lr, warmup_cosine
from tformer.training.trainer import Trainer
from tformer.variants.sparse import collect_indexer_losses

PROMPTS = [[3, 4, 5, 3, 4], [6, 7], [8, 9, 10, 11, 12, 13, 14]]
SAMPLED = SamplingParams(
    temperature=1.3,
    top_k=30,
    top_p=0.95,
    typical_p=0.98,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={5: 1.0},
    seed=7,
)


def same_results(found, expected, tolerance):
    "Equal but for rounding: floats relative to the largest of them, at least 1."
    found, form = tree_flatten(found)
    expected, other = tree_flatten(expected)
    assert form == other
    for a, b in zip(found, expected, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            a = a.detach().cpu()
            if a.is_floating_point():
                worst = (a - b).abs().max().item() if a.numel() else 0.0
                scale = max(1.0, b.abs().max().item() if b.numel() else 0.0)
                assert worst <= tolerance * scale, f"{worst:.3g} apart"
            else:
                assert torch.equal(a, b)
        elif isinstance(a, float):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), (a, b)
        else:
            assert a == b


# --- what every model does


def logits_and_gradients(row, model, device):
    "Of whole rows and of padded ones: logits at tokens, gradients of all weights."
    ids = row.ids().to(device)
    positions = padded().to(device)
    found = {}
    for name, how in {"whole": {}, "padded": {"positions": positions}}.items():
        model.zero_grad()
        out = row.run(model, ids, **how)
        if how and out.ndim == 3:
            out = out[positions >= 0]
        (out * randn(*out.shape, seed=1).to(out)).mean().backward()
        found[name] = (
            out,
            {
                n: p.grad.clone()
                for n, p in model.named_parameters()
                if p.grad is not None
            },
        )
    return found


# --- what every model that writes does


def source(row, model, rows=(0, 1, 2)):
    "What it reads beside, if it does."
    if not row.source:
        return {}
    device = next(model.parameters()).device
    ids = row.ids(3, 7, seed=9)[[*rows]].to(device)
    keep = torch.ones(ids.shape, dtype=torch.bool, device=device)
    keep[0, :3] = False
    with torch.no_grad():
        return dict(
            encoder_hidden_states=model.encode(ids, keep), encoder_attention_mask=keep
        )


def write(row, model, n=10, **how):
    return [*generate(model, PROMPTS, max_new_tokens=n, **source(row, model), **how)]


def greedy(row, model, device):
    "Texts of unequal length, of which some end before the others."
    first = write(row, model)
    return first, write(row, model, stop_token_ids=first[0].ids[3])


def sampled(row, model, device):
    return write(row, model, sampling_params=SAMPLED)


def sampled_by_row(row, model, device):
    return write(
        row,
        model,
        sampling_params=[
            SamplingParams(seed=1),
            SamplingParams(temperature=0),
            SamplingParams(min_p=0.05, seed=3),
        ],
    )


def streamed(row, model, device):
    return [*stream(model, PROMPTS, max_new_tokens=8, **source(row, model))]


def shifted(row, model, device):
    "A text beyond the model's length forgets its beginning."
    return write(row, model, 24, context_shift=True)


def beams(row, model, device):
    return beam_search(
        model,
        PROMPTS,
        num_beams=3,
        max_new_tokens=7,
        num_return_sequences=3,
        stop_token_ids=(7, 9, 20),
        **source(row, model),
    )


def static(row, model, device):
    return write(row, model, cache=new_static_cache(model, 3), drop_finished=False)


def paged(row, model, device):
    return write(row, model, cache=new_paged_cache(model, BlockPool(20, 3), 3))


def int8(row, model, device):
    return write(row, quantize_int8(model))


def served(row, model, device, **how):
    "More requests than rows, with samplers of their own; all that it tells."
    engine = Engine(model, 3, **how)
    requests = []
    for i, n in enumerate((9, 1, 2, 5, 1, 7)):
        text = source(row, model, [i % 3])
        requests.append(
            Request(
                [*range(1, 1 + n)],
                4 + n % 5,
                SAMPLED if i % 2 else None,
                **{name: x[0] for name, x in text.items()},
            )
        )
    handles = engine.run(requests)
    return engine.scheduler.num_preemptions, [
        (t.output_ids, t.log_probs, t.finish_reason, t.error) for t in handles
    ]


def served_from_blocks(row, model, device):
    "So few blocks that requests are preempted, in pieces of five tokens."
    found = served(
        row, model, device, num_blocks=9, block_size=2, max_len=16, max_prefill_tokens=5
    )
    assert found[0] > 0
    return found


OF_MODELS = [logits_and_gradients]
OF_WRITERS = [
    greedy,
    sampled,
    sampled_by_row,
    streamed,
    shifted,
    beams,
    static,
    paged,
    int8,
    served,
    served_from_blocks,
]


# --- what writes one text after a prompt alone


def speculated(row, model, device):
    "By a smaller model, which is the same with other weights, and by looking up."
    small = copy.deepcopy(model)
    with torch.no_grad():
        for p in small.parameters():
            p.mul_(0.9)
    found = []
    for draft, params in itertools.product(
        (lambda: DraftModel(small, 3), lambda: PromptLookup(1, 4)),
        (None, SamplingParams(top_k=20, seed=3)),
    ):
        found.append(
            speculative_generate(
                model, PROMPTS[0], draft(), max_new_tokens=12, sampling_params=params
            )
        )
    return found


def prefixed(row, model, device):
    "A beginning that is read once, for several texts at once and in an engine."
    begun = PrefixedModel(model, [9, 3, 5, 1])
    more = beam_search(begun, PROMPTS, num_beams=2, max_new_tokens=4)
    return write(row, begun, 6), more, begun(row.ids(2, 5).to(device))


def strided(row, model, device):
    return strided_token_log_probs(model, row.ids(1, 50)[0].to(device), 12, 5)


def checked(row, model, device):
    "What the checks say of the model."
    # what an indexer chooses is no number, and has no gradient
    skip = ("gradients",) if "sparse" in row.name else ()
    return [*check.run_all(model, VOCAB, skip=skip).notes]


OF_CONTINUERS = [checked, speculated, prefixed, strided]


# --- caches


def cached(name, device):
    "Every verb of a cache: update, select, crop, set_rows, lengths."
    model = test_caches.model_of(name).double().to(device)
    ids = draw_ids(3, 16, high=test_caches.VOCAB).to(device)
    positions = (torch.arange(6) - torch.tensor([[0], [2], [4]])).clamp(min=-1)
    found = []
    with torch.no_grad():
        cache = model.new_cache(3)
        if hasattr(cache, "allow_rollback"):
            cache.allow_rollback(1)
        found.append(model(ids[:, :6], positions=positions.to(device), cache=cache))
        found.append(model(ids[:, 6:7], cache=cache))
        cache.select(torch.tensor([2, 0, 1], device=device))
        found.append(model(ids[:, 7:9], cache=cache))
        cache.crop(torch.tensor([4, 8, 6], device=device))
        found.append(model(ids[:, 9:10], cache=cache))
        other = model.new_cache(1)
        model(ids[:1, :5], cache=other)
        cache.set_rows(torch.tensor([1], device=device), other)
        found.append(model(ids[:, 10:12], cache=cache))
    at = torch.cat([(positions >= 0).flatten(), torch.ones(3).bool()])
    first = found[0].flatten(0, 1)[at[:18].to(device)]
    # where no padding is
    return first, found[1:], cache.lengths, generate(model, PROMPTS, max_new_tokens=9)


# --- everything else


def optimizers(device):
    "Three steps of each, from the same weights by the same gradients."
    makers = {
        "SGD": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        "RMSprop": lambda p: RMSprop(p, 0.01),
        "AdamW": lambda p: AdamW(p, 0.01),
        "Adam": lambda p: AdamW(p, 0.01, decoupled_weight_decay=False),
        "AdamW, biased": lambda p: AdamW(p, 0.01, bias_correction=False),
    }
    found = {}
    for name, make in makers.items():
        weights = [
            nn.Parameter(randn(*s, seed=i).double().to(device))
            for i, s in enumerate([(5, 3), (4,), (2, 2, 2)])
        ]
        optimizer = make(weights)
        norms = []
        for step in range(3):
            for i, p in enumerate(weights):
                p.grad = randn(*p.shape, seed=10 * step + i).to(p)
            norms.append(clip_grad_norm_(weights, 1.0))
            scale_lr(optimizer, warmup_cosine(9, 2)(step + 1))
            optimizer.step()
        found[name] = weights, norms
    return found


def orthogonalized(device):
    "Muon's iteration in float64; its steps in bfloat16 are compared loosely."
    return [
        orthogonalize(randn(*s).double().to(device), dtype=torch.float64)
        for s in ((5, 3), (3, 5))
    ]


def losses(device):
    logits = randn(2, 9, 13).double().to(device).requires_grad_()
    targets = draw_ids(2, 9, high=13).to(device)
    targets[0, :3] = -100
    weight = randn(13, 6, seed=2).double().to(device).requires_grad_()
    hidden = randn(2, 9, 6, seed=3).double().to(device).requires_grad_()
    found = [
        cross_entropy(logits, targets, label_smoothing=0.1),
        chunked_cross_entropy(
            hidden, weight, targets, chunk_size=4, label_smoothing=0.1
        ),
        kl_divergence(logits, logits.flip(-1)).mean(),
    ]
    sum(found).backward()
    return found, logits.grad, weight.grad, hidden.grad


def row_named(name):
    return next(row for row in ROWS if row.name == name)


def trained(device, folder, **how):
    "Six steps, of which the last three are done again from a checkpoint."
    row = row_named("Llama, grouped, tied, scaled")
    loader = RandomWindowLoader(row.ids(1, 200)[0], 12, 4)

    def trainer():
        model = row.make().double().to(device)
        return Trainer(
            model,
            loader,
            max_steps=6,
            lr=0.01,
            eval_every=3,
            gradient_accumulation_steps=2,
            output_dir=folder,
            **how,
        )

    first = trainer()
    records = [[r["loss"], r["grad_norm"]] for r in first.fit()]
    weights = [p.detach().clone() for p in first.model.parameters()]
    first.checkpoints.path(6).rename(folder / "away")
    again = trainer().resume()
    assert again.step == 3
    again.fit()
    for a, b in zip(weights, again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    return records, weights


def indexer_trained(device):
    "Losses of the indexers of all layers, and their gradients."
    row = row_named("Llama, sparse")
    model = row.make().double().to(device)
    with collect_indexer_losses(model) as found:
        model(row.ids().to(device))
    sum(found).backward()
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def story(device):
    "A bundle tells a story, greedily and by draws."
    bundle = load_bundle("stories", device=device, dtype=torch.float64)
    ids = bundle.tokenizer.encode("One day")
    return generate(bundle.model, [ids], max_new_tokens=40), tell(bundle, 2, seed=3)


def translation(device):
    bundle = load_bundle("translator", device=device, dtype=torch.float64)
    return translate(
        bundle.model,
        bundle.tokenizer,
        ["the cat sleeps.", "she gives him the red book."],
    )


def masked(device):
    "A masked token is predicted, and texts are made of masked tokens alone."
    bundle = load_bundle("bert", device=device, dtype=torch.float64)
    return (
        masked_lm.fill_mask(bundle, "Tom was [MASK].", 3),
        masked_lm.generate_by_unmasking(bundle, [8, 11], steps=4, seed=1),
    )


OTHERS = [
    optimizers,
    orthogonalized,
    losses,
    indexer_trained,
    story,
    translation,
    masked,
]
