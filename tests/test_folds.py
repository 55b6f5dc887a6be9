"""Context folded into the running state chunk by chunk: the error does not depend on how many there are."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from helpers import accumulate, assert_matches_oracle, make_inputs, partial_passes

CASE = Case("folds", (33, 5, 1, 64), (3033, 755, 51, 1064), 3, True)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("num_chunks", [1, 7, 50])
def test_any_number_of_chunks_is_as_good_as_one_pass(
    num_chunks: int, backwards: bool, dtype: torch.dtype, device: str
) -> None:
    """The tolerance is that of one pass: twice the error of plain torch, and one rounding of the result."""
    inputs = make_inputs(CASE, dtype, device, layout="projection")
    passes = partial_passes(inputs, num_chunks)
    out, lse = accumulate(passes[::-1] if backwards else passes)
    assert_matches_oracle(inputs, out, lse, passes=1 if dtype != torch.float32 else len(passes))
