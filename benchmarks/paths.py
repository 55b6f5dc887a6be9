"""Ways to compute a step, from the new tokens' projection to the layer's output: ours and vLLM's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import concat_k
from benchmarks.peers_cuda import Fa3
from benchmarks.steps import LATENT, NOPE, ROPE, SCALE, StepInputs, V
from benchmarks.timer import Run
from mla_prefill.backends import SplitKey


class Ours:
    """The layer's own code, from the projection of the new tokens on."""

    name = "ours"

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.layer = inputs.layer
        self.out = inputs.q.new_empty(inputs.q.shape[0], inputs.case.num_heads, V)
        self.lse: Tensor | None = None  # what the last run of a phase left
        self.projected: list[tuple[SplitKey, Tensor]] = []

    @torch.no_grad()
    def run(self) -> Tensor:
        self._new_tokens()
        if self.lse is not None:
            self.layer._attend_context(self.inputs.q, self.out, self.lse, self.inputs.cache, self.inputs.metadata)
        return self.out

    def phases(self) -> dict[str, Run]:
        """Parts of ``run``, each over all chunks. Called once in order, each prepares what the next ones read."""
        inputs = self.inputs
        phases: dict[str, Run] = {"attention, new": self._new_tokens}
        if inputs.chunks:
            phases |= {"gather": self._gather, "projection": self._project, "attention, context": self._context}
        return phases

    def _new_tokens(self) -> None:
        inputs = self.inputs
        k_nope, v = inputs.kv.split([NOPE, V], dim=-1)
        self.lse = self.layer._attend_new_tokens(inputs.q, SplitKey(k_nope, inputs.k_pe), v, self.out, inputs.metadata)

    def _gather(self) -> list[tuple[Tensor, Tensor]]:
        return [self.layer._gather(self.inputs.cache, chunk) for chunk in self.inputs.chunks]

    @torch.no_grad()
    def _project(self) -> None:
        self.projected = [self.layer._project(*latent) for latent in self._latents()]

    def _latents(self) -> list[tuple[Tensor, Tensor]]:
        return [chunk.latent.split([LATENT, ROPE], dim=1) for chunk in self.inputs.chunks]

    def _context(self) -> None:
        inputs = self.inputs
        for chunk, (k, v) in zip(inputs.chunks, self.projected, strict=True):
            self.layer._accumulate(chunk, inputs.q, k, v, self.out, self.lse, inputs.metadata)


class Generic:
    """vLLM's generic path: rows by index, K in one piece, FlashAttention-3 for each part, merges in Triton.

    The part that is vLLM's own: what a chunk gives is copied to a running state, or merged into it where its first
    request began in an earlier chunk, and one merge over the whole batch comes last. The index of the cache's rows is
    made outside the clock.
    """

    name = "vLLM's path"

    def __init__(self, inputs: StepInputs, attention: Fa3) -> None:
        from benchmarks.triton_kernels import merge

        self.inputs, self.attention, self.merge = inputs, attention, merge
        self.rows = inputs.chunk_rows
        self.cache = inputs.cache.view(-1, inputs.cache.shape[2]).view(torch.int64)  # moves 8 bytes at a time
        self.state: dict[str, object] = {}

    @torch.no_grad()
    def run(self) -> Tensor:
        out, lse = self._attend_new(self._concat_new())
        if not self.inputs.chunks:
            return out
        state = self._new_state()
        for index in range(len(self.inputs.chunks)):
            k, v = self._split(self._project(self._gather(index)))
            state = self._fold(state, index, self._attend_chunk(index, concat_k(k, self._rope(index)), v))
        return self._finish(out, lse, state)

    @torch.no_grad()
    def phases(self) -> dict[str, Run]:
        chunks = range(len(self.inputs.chunks))
        k_new = self._concat_new()
        new = self._attend_new(k_new)
        phases: dict[str, Run] = {"attention, new": lambda: self._attend_new(k_new)}
        if not chunks:
            return phases | {"K concat": self._concat_new}
        latents = [self._gather(i).clone() for i in chunks]
        projected = [self._split(self._project(latent)) for latent in latents]
        keys = [concat_k(k, latents[i][:, LATENT:]) for i, (k, _) in enumerate(projected)]
        partials = [self._attend_chunk(i, keys[i], projected[i][1]) for i in chunks]

        @torch.no_grad()
        def project() -> None:
            for latent in latents:
                self._project(latent)

        def merge() -> None:
            state = self._new_state()
            for i in chunks:
                state = self._fold(state, i, partials[i])
            self._finish(*new, state)

        def concat() -> None:
            self._concat_new()
            for i, (k, _) in enumerate(projected):
                concat_k(k, latents[i][:, LATENT:])

        return phases | {
            "gather": lambda: [self._gather(i) for i in chunks],
            "projection": project,
            "attention, context": lambda: [self._attend_chunk(i, keys[i], projected[i][1]) for i in chunks],
            "K concat": concat,
            "merge": merge,
        }

    def _concat_new(self) -> Tensor:
        return concat_k(self.inputs.kv[..., :NOPE], self.inputs.k_pe)

    def _attend_new(self, k: Tensor) -> tuple[Tensor, Tensor]:
        metadata = self.inputs.metadata
        bounds, longest = metadata.query_start_loc, metadata.max_query_len
        return self.attention.call(
            self.inputs.q, k, self.inputs.kv[..., NOPE:], bounds, bounds, longest, longest, True, SCALE
        )()

    def _gather(self, index: int) -> Tensor:
        latent = self.inputs.chunks[index].latent
        torch.index_select(self.cache, 0, self.rows[index], out=latent.view(torch.int64))
        return latent

    def _rope(self, index: int) -> Tensor:
        return self.inputs.chunks[index].latent[:, LATENT:]

    def _project(self, latent: Tensor) -> Tensor:
        return self.inputs.layer.kv_b_proj(latent[:, :LATENT])

    def _split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv.view(-1, self.inputs.case.num_heads, NOPE + V).split([NOPE, V], dim=-1)

    def _attend_chunk(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        chunk = self.inputs.chunks[index]
        lengths = (chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len)
        return self.attention.call(self.inputs.q[chunk.token_slice], k, v, *lengths, False, SCALE)()

    def _new_state(self) -> tuple[Tensor, Tensor] | None:
        """Of all tokens; None where one chunk holds the whole context of all of them."""
        inputs, (first, *others) = self.inputs, self.inputs.chunks
        if not others and first.token_slice == slice(0, inputs.case.new_tokens):
            return None
        heads, tokens = inputs.case.num_heads, inputs.case.new_tokens
        lse = torch.full((heads, tokens), -torch.inf, device=inputs.q.device)
        return inputs.q.new_empty(tokens, heads, V), lse

    def _fold(
        self, state: tuple[Tensor, Tensor] | None, index: int, partial: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            return partial
        chunk = self.inputs.chunks[index]
        (out, lse), (own_out, own_lse) = state, partial
        begin, end = chunk.token_slice.start, chunk.token_slice.stop
        continued = 0
        if chunk.is_continuation:
            request = chunk.request_slice.start
            continued = int(self.inputs.metadata.query_lens_cpu[request])
            rows = slice(begin, begin + continued)
            into = (out[rows], lse[:, rows])
            self.merge(*into, own_out[:continued], own_lse[:, :continued], *into)
        if begin + continued < end:
            out[begin + continued : end] = own_out[continued:]
            lse[:, begin + continued : end] = own_lse[:, continued:]
        return out, lse

    def _finish(self, out: Tensor, lse: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        result, result_lse = torch.empty_like(out), torch.empty_like(lse)
        self.merge(out, lse, *state, result, result_lse)
        return result
