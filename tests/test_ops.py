"""torch.ops.mla_prefill.*: schemas, torch's own checks of an op, fake tensors, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case
from helpers import (
    FP8,
    Inputs,
    assert_same_bits,
    cu_seqlens,
    int32,
    make_inputs,
    quantize,
    skip_without_kernel,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config as shape_config

import mla_prefill

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own

OPS = torch.ops.mla_prefill
DIMS = (16, 8, 16)
RAGGED = Case("ragged", (4, 0, 70), (6, 3, 90), 3, True)

SCHEMAS = {
    "ragged_prefill": "(Tensor q, Tensor k, Tensor v, Tensor? k_pe, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "float scale, bool causal, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? plan, Tensor(a!) out, "
    "Tensor(b!)? lse, bool accumulate, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale) -> ()",
    "plan_prefill": "(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int num_heads, bool causal, int dim_nope, "
    "int dim_rope, int dim_v, ScalarType dtype, SymInt max_tokens_q) -> Tensor",
    "merge_states": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "gather_latent": "(Tensor cache, Tensor block_table, Tensor cu_seqlens, Tensor starts, Tensor(a!) out, "
    "Tensor? k_scale, str layout) -> ()",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str) -> None:
    """Callers and compiled graphs depend on it; `!` marks what an op writes."""
    assert str(getattr(OPS, name).default._schema) == f"mla_prefill::{name}{SCHEMAS[name]}"


# ---- arguments -------------------------------------------------------------------------------------------------------


def prefill_sample(device: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> tuple:
    """Positional arguments of the op."""
    case = changes.pop("case", RAGGED)
    inputs: Inputs = make_inputs(case, torch.float32 if dtype == FP8 else dtype, device, scale=0.2)
    if dtype == FP8:
        inputs = quantize(inputs)
    arguments = {
        **inputs.kwargs(),
        "max_seqlen_q": None,
        "max_seqlen_k": None,
        "plan": None,
        "out": torch.zeros(inputs.out_shape, dtype=inputs.out_dtype, device=device),
        "lse": torch.zeros(inputs.lse_shape, device=device),
        "accumulate": False,
        **changes,
    }
    return tuple(arguments[argument.name] for argument in OPS.ragged_prefill.default._schema.arguments)


def plan_sample(device: str, case: Case = RAGGED, max_tokens_q: int | None = None) -> tuple:
    q, k = cu_seqlens(case.q_lens, device), cu_seqlens(case.kv_lens, device)
    rows = sum(case.q_lens) if max_tokens_q is None else max_tokens_q
    return (q, k, case.num_heads, case.causal, *case.head_dims, torch.bfloat16, rows)


def merge_sample(device: str, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> tuple:
    outs = [torch.randn(tokens, 3, 16, device=device).to(dtype) for _ in range(3)]
    lses = [torch.randn(3, tokens, device=device) for _ in range(3)]
    return (outs[0], lses[0], outs[1], lses[1], outs[2], lses[2])


def gather_sample(device: str, cache: torch.Tensor, layout: str = "auto", k_scale: torch.Tensor | None = None) -> tuple:
    dtype = cache.dtype if cache.dtype.itemsize > 1 else torch.bfloat16
    out = torch.zeros(9, 576, dtype=dtype, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    return (cache.to(device), table, int32([0, 4, 7], device), int32([0, 5], device), out, k_scale, layout)


SAMPLES: dict[str, tuple[str, Callable[[str], tuple]]] = {
    "prefill": ("ragged_prefill", prefill_sample),
    "prefill_without_lse": ("ragged_prefill", lambda device: prefill_sample(device, lse=None)),
    "prefill_full_mask": ("ragged_prefill", lambda device: prefill_sample(device, causal=False)),
    "prefill_accumulate": ("ragged_prefill", lambda device: prefill_sample(device, accumulate=True)),
    "prefill_hints": ("ragged_prefill", lambda device: prefill_sample(device, max_seqlen_q=70, max_seqlen_k=90)),
    "prefill_plan": (
        "ragged_prefill",
        lambda device: prefill_sample(device, plan=OPS.plan_prefill(*plan_sample(device))),
    ),
    "prefill_joined_k": (
        "ragged_prefill",
        lambda device: prefill_sample(device, case=Case("joined", (4,), (6,), 2, True, (192, 0, 128))),
    ),
    "prefill_empty": ("ragged_prefill", lambda device: prefill_sample(device, case=Case("e", (), (), 2, True))),
    "prefill_float32": ("ragged_prefill", lambda device: prefill_sample(device, torch.float32)),
    "prefill_float8": ("ragged_prefill", lambda device: prefill_sample(device, FP8)),
    "plan": ("plan_prefill", plan_sample),
    "plan_with_room": ("plan_prefill", lambda device: plan_sample(device, max_tokens_q=5000)),
    "plan_empty": ("plan_prefill", lambda device: plan_sample(device, Case("empty", (), (), 2, True))),
    "merge": ("merge_states", merge_sample),
    "merge_float32": ("merge_states", lambda device: merge_sample(device, dtype=torch.float32)),
    "merge_empty": ("merge_states", lambda device: merge_sample(device, tokens=0)),
    "gather": ("gather_latent", lambda device: gather_sample(device, torch.randn(4, 16, 576).bfloat16())),
    "gather_fp8": (
        "gather_latent",
        lambda device: gather_sample(device, torch.randn(4, 16, 576).to(FP8), k_scale=torch.ones(1, device=device)),
    ),
    "gather_ds_mla": (
        "gather_latent",
        lambda device: gather_sample(device, torch.zeros(4, 16, 656, dtype=torch.uint8), "fp8_ds_mla"),
    ),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: str, device: str) -> None:
    """Schema against behaviour (what is mutated, what aliases), fake against real, and the op under AOT autograd."""
    name, make = SAMPLES[sample]
    skip_without_kernel(name, device)
    if device != "cpu" and sample in ("prefill_float32", "prefill_float8"):
        pytest.skip("a dtype for the CPU; test_cuda.py shows that CUDA refuses it")
    arguments = make(device)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(x, torch.Tensor) and x.dtype == FP8 for x in arguments):
        checks.remove("test_schema")  # torch's check multiplies tensors, which it can't do in float8
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=checks)


@pytest.mark.parametrize("sample", SAMPLES)
def test_op_returns_nothing_but_the_plan(sample: str) -> None:
    name, make = SAMPLES[sample]
    result = getattr(OPS, name)(*make("cpu"))
    assert isinstance(result, torch.Tensor) if name == "plan_prefill" else result is None


# ---- without data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32, FP8], ids=str)
def test_fake_ragged_prefill(q_dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(n, 4, 192).to(q_dtype) for n in (9, 20, 20))
        bounds = torch.empty(3, dtype=torch.int32)
        out, lse = mla_prefill.ragged_prefill(
            q, k, v[..., :128], bounds, bounds, scale=0.1, causal=True, return_lse=True
        )
    assert out.shape == (9, 4, 128) and out.dtype == (torch.bfloat16 if q_dtype == FP8 else q_dtype)
    assert lse.shape == (4, 9) and lse.dtype == torch.float32


def test_fake_plan_has_the_size_of_the_real_one() -> None:
    for case in (RAGGED, Case("e", (), (), 2, True), Case("many", (1,) * 300, (7,) * 300, 16, True)):
        for room in (0, 1000):
            real = plan_sample("cpu", case, sum(case.q_lens) + room)
            with FakeTensorMode() as mode:
                fake = OPS.plan_prefill(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in real))
            expected = OPS.plan_prefill(*real)
            assert (fake.shape, fake.dtype, fake.device) == (expected.shape, expected.dtype, expected.device)


def test_fake_merge_and_gather() -> None:
    with FakeTensorMode():
        out, lse = mla_prefill.merge_states(*merge_sample("cpu")[:4])
        cache, table, bounds, starts, rows, *_ = gather_sample("cpu", torch.empty(4, 16, 656, dtype=torch.uint8))
        latent = mla_prefill.gather_latent(cache, table, bounds, starts, out=rows)
    assert out.shape == (5, 3, 16) and lse.shape == (3, 5) and latent.shape == (9, 576)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def assert_compiles(function: Callable, make: Callable[[int], tuple]) -> None:
    """One graph without breaks, equal to eager on outputs and on mutated arguments, and good for other lengths and
    batch sizes without another compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for size in (5, 9, 70):
        arguments = make(size)
        copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
        # Duck shaping would take two sizes that happen to be equal at first (heads, sequences) for one.
        with shape_config.patch(use_duck_shape=False):
            results = compiled(*arguments)
        expected = function(*copies)
        for got, want in zip((*results, *arguments), (*expected, *copies), strict=True):
            if isinstance(want, torch.Tensor):
                assert_same_bits(got, want)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1], f"compilations after each size: {compilations}"


def step_inputs(size: int) -> tuple:
    """``size`` query rows in a batch whose number of sequences grows with it, and a running state."""
    lens = (1,) * (size // 4) + (size - size // 4,)
    inputs = make_inputs(Case("step", lens, tuple(2 * n for n in lens), 5, True, DIMS), torch.bfloat16, seed=size)
    running = torch.randn(inputs.out_shape).bfloat16(), torch.randn(inputs.lse_shape)
    return (inputs.q, inputs.k, inputs.v, inputs.k_pe, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *running)


def test_compile_ragged_prefill() -> None:
    def step(q, k, v, k_pe, cu_q, cu_k, out, lse):
        return mla_prefill.ragged_prefill(q * 2, k, v, cu_q, cu_k, scale=0.2, causal=True, k_pe=k_pe, return_lse=True)

    assert_compiles(step, step_inputs)


def test_compile_accumulate() -> None:
    """In place on the caller's tensors, and on a state made inside the graph."""

    def step(q, k, v, k_pe, cu_q, cu_k, out, lse):
        options = {"scale": 0.2, "k_pe": k_pe}
        own, own_lse = mla_prefill.ragged_prefill(q, k, v, cu_q, cu_k, causal=True, return_lse=True, **options)
        for state in ((out, lse), (own, own_lse)):
            mla_prefill.ragged_prefill(
                q, k, v, cu_q, cu_k, causal=False, out=state[0], lse=state[1], accumulate=True, **options
            )
        return own + 1, own_lse

    assert_compiles(step, step_inputs)


def test_compile_plan() -> None:
    """Made once in the graph from max_tokens_q, without a look at the lengths, and used by two layers."""

    def step(q, k, v, k_pe, cu_q, cu_k, out, lse):
        plan = mla_prefill.plan_prefill(
            cu_q, cu_k, num_heads=5, causal=True, head_dims=DIMS, dtype=q.dtype, max_tokens_q=q.shape[0]
        )
        options = {"scale": 0.2, "causal": True, "k_pe": k_pe, "plan": plan}
        first = mla_prefill.ragged_prefill(q, k, v, cu_q, cu_k, **options)
        return first, mla_prefill.ragged_prefill(q + 1, k, v, cu_q, cu_k, **options), plan.tensor[:2]

    assert_compiles(step, step_inputs)


def test_compile_merge_states() -> None:
    def step(out_a, lse_a, out_b, lse_b, out, lse):
        fresh = mla_prefill.merge_states(out_a, lse_a, out_b, lse_b)
        return (*fresh, *mla_prefill.merge_states(*fresh, out_b, lse_b, out=out, lse=lse))

    assert_compiles(step, lambda size: merge_sample("cpu", size))


@pytest.mark.parametrize("k_scale", [None, 0.5, "tensor"], ids=str)
def test_compile_gather_latent(k_scale: float | str | None) -> None:
    k_scale = torch.tensor(0.25) if k_scale == "tensor" else k_scale

    def step(cache, table, bounds, starts, out):
        return (mla_prefill.gather_latent(cache, table, bounds, starts, out=out, k_scale=k_scale) * 2,)

    def make(size: int) -> tuple:
        cache = torch.randn(size, 4, 576).to(FP8)
        table = torch.arange(size, dtype=torch.int32).reshape(1, size)
        return cache, table, cu_seqlens([size]), int32([3]), torch.zeros(size + 2, 576, dtype=torch.bfloat16)

    assert_compiles(step, make)
