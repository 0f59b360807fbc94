"""A card gives what the CPU gives: everything that the package computes.

`make gpu` runs this on a machine with one; elsewhere all of it is skipped, and
`tests/test_devices.py` does the same jobs on a pretended card.

In float64 both devices agree to about 1e-15 of the largest number, times the number
of operations in a row, so 1e-10 leaves room for a deep sum and still finds any
product in TF32 (1e-3) or float32 (1e-7). Two things are float32 in every model: the
cosines and sines of rotary positions, which each device computes for itself, and the
log-probabilities of long texts; where they are, 1e-5 is allowed. What writes ids does
so in float64, and the ids are equal. In float32, with TF32 off, logits may differ by
1e-4 of the largest: a sum of 24 products, in another order, in 2 layers of weights as
large as here.
"""

import functools
import math

import pytest
import torch

import device_jobs as jobs
import test_caches
from helpers import by_day, randn
from models import ROWS, causal, every
from pretend import MIXTURES, refusal
from tformer.base.runtime import require_compiler
from tformer.bundle import load_bundle
from tformer.inference.compiled import CompiledModel
from tformer.inference.generation import generate
from tformer.models.gpt import GPT, GPTConfig
from tformer.nn.rotary import RotaryEmbedding
from tformer.training import optimizers, schedules
from tformer.training.data import RandomWindowLoader
from tformer.training.trainer import Trainer

pytestmark = pytest.mark.gpu
EXACT = 1e-10  # float64
ANGLES = 1e-5  # float64, but for the angles of rotary positions
ROUNDED = 1e-4  # float32
# a bfloat16 has 8 bits; a loss is a mean of many terms, all rounded once or twice
BF16 = 2e-2


@pytest.fixture(autouse=True)
def no_tf32():
    "Products in float32 are products of float32; this is PyTorch's default, too."
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_both(job, *args, tolerance=EXACT):
    jobs.same_results(job(*args, "cuda"), job(*args, "cpu"), tolerance)


def with_model(job, row, dtype, device):
    return job(row, row.make().to(device, dtype), device)


def exactness(row):
    "What a row in float64 may differ by."
    return (
        ANGLES
        if any(isinstance(part, RotaryEmbedding) for part in row.make().modules())
        else EXACT
    )


def over(functions):
    return pytest.mark.parametrize("job", functions, ids=lambda f: f.__name__)


@every
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["float64", "float32"]
)
def test_logits_and_gradients(row, dtype):
    tolerance = ROUNDED if dtype == torch.float32 else exactness(row)
    on_both(with_model, jobs.logits_and_gradients, row, dtype, tolerance=tolerance)


@causal
@over(jobs.OF_WRITERS)
def test_what_writes(row, job):
    on_both(with_model, job, row, torch.float64, tolerance=exactness(row))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name) for row in ROWS if row.causal and not row.source],
)
@over(jobs.OF_CONTINUERS)
def test_what_goes_on(row, job):
    tolerance = ANGLES if job is jobs.strided else exactness(row)
    on_both(with_model, job, row, torch.float64, tolerance=tolerance)


@pytest.mark.parametrize("name", test_caches.TABLE)
def test_caches(name):
    on_both(jobs.cached, name, tolerance=ANGLES)


@over(jobs.OTHERS)
def test_everything_else(job):
    rotary = job in (jobs.indexer_trained, jobs.story)
    on_both(job, tolerance=ANGLES if rotary else EXACT)


def test_training(tmp_path):
    on_both(lambda device: jobs.trained(device, tmp_path / device), tolerance=ANGLES)


@pytest.mark.parametrize(
    "how",
    [
        dict(activation_checkpointing=True),
        dict(lr_schedule=schedules.warmup_cosine(6, 2)),
    ],
    ids=lambda how: next(iter(how)),
)
def test_other_trainings(how, tmp_path):
    on_both(
        lambda device: jobs.trained(device, tmp_path / device, **how), tolerance=ANGLES
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_a_card_refuses_what_a_pretended_one_refuses(name):
    refused, mix = MIXTURES[name]
    here = torch.arange(6.0)
    with refusal(refused):
        mix(here, here.cuda(), torch.arange(2).cuda())


# --- what the CPU does otherwise, or not at all


def test_bfloat16_trains():
    "Autocast: the first loss is that of float32 but for rounding, the last lower."
    if not torch.cuda.is_bf16_supported():
        pytest.skip("this card has no bfloat16")
    row = jobs.row_named("Llama")
    records = {}
    for precision in (None, "bf16"):
        loader = RandomWindowLoader(row.ids(1, 200)[0], 12, 8)
        trainer = Trainer(
            row.make().cuda(), loader, max_steps=30, lr=0.01, precision=precision
        )
        records[precision] = [r["loss"] for r in trainer.fit()]
    assert records["bf16"][0] == pytest.approx(records[None][0], rel=BF16)
    assert all(map(math.isfinite, records["bf16"]))
    assert records["bf16"][-1] < 0.8 * records["bf16"][0]


def test_muon():
    "Its iteration is in bfloat16, so a step is only compared loosely."
    found = []
    for device in ("cuda", "cpu"):
        p = torch.nn.Parameter(randn(6, 4).to(device))
        optimizer = optimizers.Muon([p], 0.1)
        p.grad = randn(6, 4, seed=1).to(device)
        optimizer.step()
        found.append(p.detach().cpu())
    jobs.same_results(*found, BF16)


@functools.cache
def has_compiler():
    try:
        require_compiler()
    except RuntimeError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    "name",
    by_day(
        ["GPT", "Llama", "Seq2Seq", "Llama, latent", "Llama, sparse"], "GPT", "Llama"
    ),
)
def test_compiled_steps(name):
    "In float64, so that the ids are those of the model that is not compiled."
    if problem := has_compiler():
        pytest.skip(problem)
    row = jobs.row_named(name)
    model = row.make().double().cuda()
    found = jobs.write(row, model)
    compiled = CompiledModel(model)
    got = generate(
        compiled,
        jobs.PROMPTS,
        max_new_tokens=10,
        drop_finished=False,
        **jobs.source(row, model),
    )
    jobs.same_results([*got], found, exactness(row))


def test_a_compiled_training():
    if problem := has_compiler():
        pytest.skip(problem)
    row = jobs.row_named("Llama")
    records = []
    for compiled in (False, True):
        loader = RandomWindowLoader(row.ids(1, 200)[0], 12, 4)
        trainer = Trainer(row.make().cuda(), loader, max_steps=3, compile=compiled)
        records.append([r["loss"] for r in trainer.fit()])
    jobs.same_results(*records, ROUNDED)


@pytest.mark.parametrize("name", ["stories", "stories_mha", "tour"])
def test_weights_in_float32(name):
    "As one loads them."
    here = load_bundle(name)
    ids = here.tokenizer.encode("One day a little cat saw a big dog in the park. ")
    ids = torch.tensor([ids, ids[::-1]])
    there = load_bundle(name, device="cuda")
    with torch.no_grad():
        jobs.same_results(there.model(ids.cuda()), here.model(ids), ROUNDED)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"]
)
def test_half_precision(dtype):
    "A head of 64 and 300 tokens, for which a card has kernels of its own."
    config = GPTConfig(
        vocab_size=61, d_model=128, n_layers=2, n_heads=2, d_ff=256, max_len=320
    )
    torch.manual_seed(0)
    model = GPT(config).eval()
    ids = torch.randint(61, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = model.double()(ids)
        found = model.to("cuda", dtype)(ids.cuda())
    assert found.dtype == dtype
    jobs.same_results(found.double(), right, 3e-2)
