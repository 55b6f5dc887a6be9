"""The benchmark of whole steps computes what it times: each path against float64, on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import mla_prefill
from benchmarks.paths import Generic, Ours
from benchmarks.steps import TRACE_BUDGET, StepCase, StepInputs, trace_steps
from benchmarks.trace import calls_of

CASES = [
    StepCase("new", ((0, 40), (0, 3)), 2, 64),
    StepCase("one chunk", ((90, 8), (64, 1)), 2, 256),
    StepCase("one chunk for some", ((0, 5), (90, 8), (0, 2)), 2, 256),
    StepCase("many chunks", ((300, 8), (0, 4), (100, 30), (20, 2)), 2, 128),
]


class Attention:
    """Stands in for FlashAttention-3."""

    def call(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale):
        return lambda: mla_prefill.ragged_prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal, return_lse=True
        )


@pytest.fixture
def merge_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("benchmarks.triton_kernels")
    module.merge = lambda *state, **_: mla_prefill.merge_states(*state[:4], out=state[4], lse=state[5])
    monkeypatch.setitem(sys.modules, "benchmarks.triton_kernels", module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paths_compute_the_step(case: StepCase, merge_without_triton: None) -> None:
    for path in (Ours, lambda inputs: Generic(inputs, Attention())):
        inputs = StepInputs(case, device="cpu")
        computed = path(inputs)
        assert inputs.error(computed.run(), samples=20) < 0.03
        for _ in range(2):
            for part in computed.phases().values():
                part()
        assert inputs.error(computed.run(), samples=20) < 0.03  # phases leave nothing behind


def test_steps_of_the_trace() -> None:
    steps = trace_steps(50, 16)
    assert len(steps) == 50 and all(step.new_tokens == TRACE_BUDGET for step in steps)
    assert max(step.context_tokens for step in steps) > 80_000
    for step in steps:
        new, *context = calls_of(step)
        assert new.causal and sum(new.q_lens) == TRACE_BUDGET
        assert sum(sum(case.kv_lens) for case in context) == step.context_tokens
        assert all(sum(case.kv_lens) <= step.workspace_rows and not case.causal for case in context)
