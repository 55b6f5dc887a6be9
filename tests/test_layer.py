"""The layer, its builder and its backend against the float64 oracle over each request's whole history."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace

import pytest
import torch
from cases import MLA
from helpers import INF, NAN, assert_same_bits, cu_seqlens, embed
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import mla_prefill
from mla_prefill.backends import MLAPrefillBackend, NativePrefillBackend, SplitKey, native
from mla_prefill.forward_context import EngineConfig, StageClock
from mla_prefill.layer import MLAAttention
from mla_prefill.metadata import MLAMetadataBuilder, PrefillMetadata
from mla_prefill.scale import softmax_scale

YARN = {"type": "yarn", "factor": 40, "mscale_all_dim": 0.707}
NAME = "model.layers.0.self_attn"
REQUESTS = [(0, 5), (130, 7), (0, 1), (333, 40), (64, 1), (0, 17)]  # (context, new tokens)


class Projection(torch.nn.Linear):
    """As vLLM's linear layers: the result comes with a bias that was not added."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


@dataclass
class Model:
    """A layer, a builder, and a paged cache full of NaN."""

    block_size: int = 16
    workspace_rows: int = 4096
    dtype: torch.dtype = torch.float32
    heads: int = 3
    kv_lora: int = 64
    dims: tuple[int, int, int] = (32, 16, 24)
    backend: type[MLAPrefillBackend] = NativePrefillBackend
    projection: type[torch.nn.Linear] = torch.nn.Linear
    config: EngineConfig = field(default_factory=EngineConfig)
    device: str = "cpu"
    cache_tokens: int = 8192

    def __post_init__(self) -> None:
        nope, rope, v = self.dims
        self.random = torch.Generator().manual_seed(0)
        projection = self.projection(self.kv_lora, self.heads * (nope + v), bias=False, dtype=self.dtype)
        projection = projection.to(self.device)
        with torch.no_grad():
            projection.weight.copy_(self.randn(*projection.weight.shape) / self.kv_lora**0.5)
        self.layer = MLAAttention(
            num_heads=self.heads,
            kv_lora_rank=self.kv_lora,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=v,
            kv_b_proj=projection,
            prefix=NAME,
            vllm_config=self.config,
            rope_scaling=YARN,
            prefill_backend_cls=self.backend,
        )
        self.builder = self.new_builder()
        shape = (self.cache_tokens // self.block_size, self.block_size, self.kv_lora + rope)
        self.cache = torch.full(shape, NAN, dtype=self.dtype, device=self.device)
        self.free = torch.randperm(len(self.cache), generator=self.random).tolist()

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

    def new_builder(self) -> MLAMetadataBuilder:
        return MLAMetadataBuilder(
            [NAME],
            self.config,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            workspace_rows=self.workspace_rows,
        )


@dataclass
class Sequence:
    """A request: its latents, its cache blocks and how much is computed."""

    latent: Tensor
    blocks: Tensor
    computed: int = 0

    def slots(self, begin: int, end: int, block_size: int) -> Tensor:
        positions = torch.arange(begin, end)
        return self.blocks[positions // block_size] * block_size + positions % block_size


@dataclass
class Step:
    """The inputs of one step: the next ``new`` tokens of each sequence."""

    model: Model
    sequences: list[Sequence]
    new: list[int]

    def __post_init__(self) -> None:
        nope, rope, _ = self.model.dims
        self.begin = [sequence.computed for sequence in self.sequences]
        self.end = [begin + new for begin, new in zip(self.begin, self.new, strict=True)]
        self.q = 2 * self.model.randn(sum(self.new), self.model.heads, nope + rope)
        spans = list(zip(self.sequences, self.begin, self.end, strict=True))
        latent = torch.cat([s.latent[b:e] for s, b, e in spans])
        self.kv_c, self.k_pe = latent.split([self.model.kv_lora, rope], dim=1)
        self.slots = torch.cat([s.slots(b, e, self.model.block_size) for s, b, e in spans])
        width = max(len(s.blocks) for s in self.sequences)
        self.block_table = torch.stack(
            [torch.nn.functional.pad(s.blocks, (0, width - len(s.blocks))) for s in self.sequences]
        )

    def build(self, builder: MLAMetadataBuilder | None = None) -> PrefillMetadata:
        return (builder or self.model.builder).build(self.new, self.end, self.block_table, self.slots)

    def run(self, metadata: PrefillMetadata | None = None, output: Tensor | None = None) -> Tensor:
        out = self.model.layer(self.q, self.kv_c, self.k_pe, self.model.cache, metadata or self.build(), output=output)
        for sequence, end in zip(self.sequences, self.end, strict=True):
            sequence.computed = end
        return out

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Attention over the whole histories, everything from the projection on in ``dtype``."""
        nope, rope, v_dim = self.model.dims
        latent = torch.cat([s.latent[:end] for s, end in zip(self.sequences, self.end, strict=True)]).to(dtype)
        weight = self.model.layer.kv_b_proj.weight.detach().to(dtype)
        kv = (latent[:, : self.model.kv_lora] @ weight.T).view(-1, self.model.heads, nope + v_dim)
        k_pe = latent[:, None, self.model.kv_lora :].expand(-1, self.model.heads, rope)
        k, v = torch.cat([kv[..., :nope], k_pe], dim=-1), kv[..., nope:]
        scale = softmax_scale(nope + rope, YARN)
        bounds_q, bounds_k = cu_seqlens(self.new, self.model.device), cu_seqlens(self.end, self.model.device)
        if dtype == torch.float64:
            return mla_prefill.reference.ragged_prefill(self.q, k, v, bounds_q, bounds_k, scale=scale, causal=True)
        rows = []
        for i in range(len(self.new)):
            one_q, one_k, one_v = (
                x[b[i] : b[i + 1]].transpose(0, 1) for x, b in ((self.q, bounds_q), (k, bounds_k), (v, bounds_k))
            )
            seen = torch.ones_like(one_q[0] @ one_k[0].T, dtype=torch.bool).tril(self.begin[i])
            logits = (scale * (one_q @ one_k.transpose(1, 2))).masked_fill(~seen, -INF)
            rows.append((torch.softmax(logits, dim=-1) @ one_v).transpose(0, 1))
        return torch.cat(rows)

    def check(self, out: Tensor, passes: int = 1) -> None:
        """The error is at most twice that of plain torch, plus a rounding for each pass over the running state."""
        oracle = self.expected(torch.float64)
        scale = oracle.abs().amax(dim=-1, keepdim=True)
        assert out.dtype == self.model.dtype and out.shape == oracle.shape and out.isfinite().all()

        def worst(result: Tensor) -> float:
            return float(((result.double() - oracle).abs() / scale).max()) if result.numel() else 0.0

        allowed = 2 * worst(self.expected(self.model.dtype)) + passes * torch.finfo(self.model.dtype).eps / 2
        assert worst(out) <= allowed, f"relative error {worst(out):.3g}, allowed {allowed:.3g}"


def start(model: Model, requests: list[tuple[int, int]]) -> Step:
    """Requests whose context was computed by earlier steps, that is: whose latents are in the cache."""
    sequences = []
    for context, new in requests:
        blocks = torch.tensor(
            [model.free.pop() for _ in range(-(-(context + new) // model.block_size))], dtype=torch.int64
        )
        sequence = Sequence(model.randn(context + new, model.kv_lora + model.dims[1]), blocks, context)
        slots = sequence.slots(0, context, model.block_size)
        model.cache.view(-1, model.cache.shape[2])[slots] = sequence.latent[:context]
        sequences.append(sequence)
    return Step(model, sequences, [new for _, new in requests])


def num_chunks(metadata: PrefillMetadata) -> int:
    return len(metadata.chunked_context.chunks) if metadata.chunked_context else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("workspace_rows", [64, 4096])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_whole_history(block_size: int, workspace_rows: int, dtype: torch.dtype) -> None:
    step = start(Model(block_size=block_size, workspace_rows=workspace_rows, dtype=dtype), REQUESTS)
    metadata = step.build()
    assert num_chunks(metadata) == 1 if workspace_rows == 4096 else num_chunks(metadata) >= 9
    step.check(step.run(metadata), passes=8)  # 333 rows of context in up to seven pieces, and the new tokens


@pytest.mark.parametrize(
    ("heads", "kv_lora", "dims"),
    [(4, 512, (128, 64, 128)), (5, 512, (192, 64, 256)), (2, 256, (64, 64, 128)), (1, 512, (256, 0, 256))],
)
def test_dimensions_of_real_models(heads: int, kv_lora: int, dims: tuple[int, int, int]) -> None:
    model = Model(heads=heads, kv_lora=kv_lora, dims=dims, dtype=torch.bfloat16, block_size=64, workspace_rows=128)
    step = start(model, [(200, 3), (0, 70), (64, 1)])
    step.check(step.run(), passes=3)


def test_chunked_prefill_in_any_steps() -> None:
    """The same prompts in one step, or in several of uneven sizes, with the cache written on the way."""
    plans = [[[90, 40, 3]], [[50, 40, 0], [0, 0, 3], [40, 0, 0]], [[1, 39, 1], [63, 1, 1], [26, 0, 1]]]
    for plan in plans:
        model = Model(workspace_rows=32)
        sequences = start(model, [(0, 90), (0, 40), (0, 3)]).sequences
        for new in plan:
            step = Step(model, sequences, new)
            step.check(step.run(), passes=5)
        assert [sequence.computed for sequence in sequences] == [90, 40, 3]


def test_result_does_not_depend_on_the_workspace() -> None:
    results = []
    for workspace_rows in (16, 48, 128, 1024):
        step = start(Model(workspace_rows=workspace_rows), REQUESTS)
        results.append(step.run())
        step.check(results[-1], passes=22)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


def test_cache_holds_the_latents_and_nothing_else() -> None:
    step = start(Model(), REQUESTS)
    before = step.model.cache.clone()
    step.slots[3] = -1  # a token that is not to be cached
    step.run()
    rows = step.model.cache.view(-1, step.model.cache.shape[2])
    expected = before.view_as(rows)
    kept = step.slots >= 0
    expected[step.slots[kept]] = torch.cat([step.kv_c, step.k_pe], dim=1)[kept]
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

GPU_REQUESTS = [(0, 200), (130, 7), (0, 1), (1000, 33), (64, 1), (0, 17)]


def gpu_model(**changes: object) -> Model:
    return Model(
        **{"kv_lora": 512, "dims": MLA, "dtype": torch.bfloat16, "block_size": 64, "device": "cuda", **changes}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("workspace_rows", [128, 4096])
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_on_a_gpu_without_waiting_for_it(dtype: torch.dtype, heads: int, workspace_rows: int) -> None:
    """Neither the builder nor the layer reads the device, with or without context."""
    for requests in (GPU_REQUESTS, [(0, 200), (0, 1), (0, 33)]):
        model = gpu_model(heads=heads, dtype=dtype, workspace_rows=workspace_rows)
        step = start(model, requests)
        step.slots[7] = -1
        step.run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            metadata = step.build()
            out = step.run(metadata)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.check(out, passes=1 + num_chunks(metadata))


@pytest.mark.gpu
def test_memory_of_a_step_is_one_projection() -> None:
    """Above inputs, output, cache and workspace; whatever the context's length. And 17 MiB where keys are in pieces."""
    heads, rows = 32, 4096
    projection = rows * heads * (MLA[0] + MLA[2]) * 2
    for context in (4096, 30000):
        step = start(gpu_model(heads=heads, workspace_rows=rows, cache_tokens=32768), [(context, 1500)])
        output = torch.empty(1500, heads, MLA[2], dtype=torch.bfloat16, device="cuda")
        metadata = step.build()
        step.run(metadata, output)  # whatever libraries allocate once
        gc.collect()  # tests before this one may have left tensors in cycles, that would be freed in between
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step.run(metadata, output)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert projection <= peak <= projection + 20 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("workspace_rows", [128, 4096])
def test_a_step_replays_as_a_graph(workspace_rows: int) -> None:
    """Lengths as captured, everything else new."""
    step = start(gpu_model(heads=16, workspace_rows=workspace_rows), GPU_REQUESTS)
    metadata = step.build()
    output = torch.empty(len(step.q), 16, MLA[2], dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run(metadata, output)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(metadata, output)
    for repeat in range(3):
        output.fill_(NAN)
        graph.replay()
        replayed = output.clone()
        if repeat == 0:
            step.check(replayed, passes=1 + num_chunks(metadata))
        assert_same_bits(replayed, step.run(metadata))
        for x in (step.q, step.kv_c, step.k_pe, step.model.cache):
            x.copy_(x.roll(1, 0))  # unwritten rows of the cache stay NaN, and may now be read
        step.model.cache.nan_to_num_(0.5)


def test_no_slots_at_all() -> None:
    step = start(Model(), [(0, 5)])
    step.slots.fill_(-1)
    step.check(step.run())
    assert step.model.cache.isnan().all()


def test_k_pe_of_three_dimensions_and_a_projection_that_returns_a_pair() -> None:
    step = start(Model(projection=Projection), REQUESTS)
    step.k_pe = step.k_pe.unsqueeze(1)
    step.check(step.run())


def test_output_and_padding() -> None:
    """Rows past the step's tokens are neither read nor written; output may be a strided view."""
    step = start(Model(), REQUESTS)
    tokens, pad = len(step.q), 4
    metadata = step.build()
    step.q, step.kv_c, step.k_pe = (
        torch.cat([x, torch.full((pad, *x.shape[1:]), NAN)]) for x in (step.q, step.kv_c, step.k_pe)
    )
    output = embed((tokens + pad, 3, 24), torch.float32, layout="sliced")
    output.view.fill_(1.25)
    assert step.run(metadata, output.view) is output.view
    output.assert_rest_untouched()
    assert (output.view[tokens:] == 1.25).all()
    step.q = step.q[:tokens]
    step.check(output.view[:tokens])


@pytest.mark.parametrize("requests", [[], [(0, 0)], [(100, 0), (0, 0)]])
def test_no_tokens(requests: list[tuple[int, int]]) -> None:
    """A28: a micro-batch may be empty."""
    model = Model()
    metadata = model.builder.build(
        [new for _, new in requests],
        [context + new for context, new in requests],
        torch.zeros(len(requests), 7, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    )
    assert metadata.chunked_context is None
    out = model.layer(torch.empty(0, 3, 48), torch.empty(0, 64), torch.empty(0, 16), model.cache, metadata)
    assert out.shape == (0, 3, 24)
    assert model.cache.isnan().all()


def test_requests_without_new_tokens_gather_nothing() -> None:
    step = start(Model(workspace_rows=64), [(100, 0), (30, 4), (500, 0), (10, 1)])
    metadata = step.build()
    assert num_chunks(metadata) == 1
    assert metadata.chunked_context.chunks[0].num_context_tokens == 40
    step.check(step.run(metadata), passes=2)


def test_keys_are_handed_on_as_views() -> None:
    """No K is concatenated: the backend gets slices of the projection's output and of the caller's k_pe."""
    seen: list[tuple[SplitKey, Tensor]] = []

    class Recording(NativePrefillBackend):
        def run_prefill_new_tokens(self, **arguments):
            seen.append((arguments["k"], arguments["v"]))
            return super().run_prefill_new_tokens(**arguments)

        def accumulate_context_chunk(self, **arguments):
            seen.append((arguments["k"], arguments["v"]))
            return super().accumulate_context_chunk(**arguments)

    step = start(Model(backend=Recording), REQUESTS)
    step.run()
    assert len(seen) == 2
    for k, v in seen:
        assert k.k_nope.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert k.k_nope.stride() == v.stride() == (3 * 56, 56, 1)
    assert seen[0][0].k_pe.data_ptr() == step.k_pe.data_ptr()
    workspace = step.model.builder.workspace
    assert seen[1][0].k_pe.untyped_storage().data_ptr() == workspace.untyped_storage().data_ptr()


def test_a_backend_that_cannot_accumulate_merges() -> None:
    class Merging(NativePrefillBackend):
        accumulate_context_chunk = MLAPrefillBackend.accumulate_context_chunk

    steps = [start(Model(workspace_rows=64, backend=backend), REQUESTS) for backend in (NativePrefillBackend, Merging)]
    outs = [step.run() for step in steps]
    steps[1].check(outs[1], passes=7)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


def test_the_layer_owns_scale_and_backend() -> None:
    model = Model()
    layer, backend = model.layer, model.layer.prefill_backend
    assert layer.scale == backend.scale == softmax_scale(48, YARN) != 48**-0.5
    assert type(backend) is NativePrefillBackend
    assert model.config.compilation_config.static_forward_context == {NAME: layer}


def test_a_name_is_used_once() -> None:
    config = EngineConfig()
    Model(config=config)
    with pytest.raises(ValueError, match=f"Duplicate layer name: {NAME}"):
        Model(config=config)


def test_clone_has_the_configuration_and_none_of_the_state() -> None:
    class Derived(NativePrefillBackend):
        pass

    step = start(Model(backend=Derived), REQUESTS)
    own, prepared = step.model.layer.prefill_backend, step.model.builder.prefill_backend
    assert type(prepared) is Derived and prepared is not own
    arguments = (
        "num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vllm_config"
    )  # fmt: skip
    for name in arguments:
        assert getattr(prepared, name) is getattr(own, name)
    step.build()
    fresh = prepared.clone()
    for backend in (own, fresh):
        with pytest.raises(ValueError, match="expected prepare_metadata before the layers run"):
            backend.run_prefill_new_tokens(step.q, step.q, step.q, return_softmax_lse=False)


def test_builders_do_not_touch_each_other() -> None:
    """A27: two micro-batches prepared one after the other and then run, as if each were alone."""
    model = Model(workspace_rows=64)
    steps = [start(model, REQUESTS), start(model, [(77, 9), (200, 2)])]
    builders = [model.builder, model.new_builder()]
    alone = [step.run(step.build(builder)).clone() for step, builder in zip(steps, builders, strict=True)]
    prepared = [step.build(builder) for step, builder in zip(steps, builders, strict=True)]
    assert prepared[0].prefill_backend is not prepared[1].prefill_backend
    assert prepared[0].chunked_context.workspace.data_ptr() != prepared[1].chunked_context.workspace.data_ptr()
    for step, metadata, expected in zip(steps, prepared, alone, strict=True):
        assert torch.equal(step.run(metadata), expected)


@pytest.mark.parametrize("requests", [REQUESTS, [(0, 5), (0, 9)], [(70, 3)], [(0, 0)]], ids=str)
def test_a_step_that_is_not_the_prepared_one_is_refused(requests: list[tuple[int, int]]) -> None:
    """The backend has one step's lengths: with another's metadata they would be taken without a word."""
    model = Model(workspace_rows=64)
    first, second = start(model, requests), start(model, [(0, 6), (0, 8)])
    stale, fresh = first.build(), second.build()
    output = torch.full((len(first.q), model.heads, model.dims[2]), NAN)
    cache = model.cache.clone()
    with pytest.raises(ValueError, match=r"metadata: expected the step .* prepared for last .*, got another step"):
        first.run(stale, output)
    assert output.isnan().all() and torch.equal(model.cache.isnan(), cache.isnan())
    second.check(second.run(fresh), passes=1)
    first.check(first.run(first.build()), passes=7)


def test_metadata_that_was_never_prepared_is_refused() -> None:
    step = start(Model(), [(0, 6)])
    metadata = replace(step.build(), prefill_backend=step.model.layer.prefill_backend)
    with pytest.raises(ValueError, match=r"metadata: expected the step .* prepared for last .*, got none"):
        step.run(metadata)


def test_one_plan_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = native.plan_prefill
    monkeypatch.setattr(native, "plan_prefill", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    step = start(Model(workspace_rows=64), REQUESTS)
    metadata = step.build()
    assert len(calls) == 1 + num_chunks(metadata)
    outs = [step.run(metadata) for _ in range(3)]
    assert len(calls) == 1 + num_chunks(metadata)
    assert torch.equal(outs[0], outs[2])
    step.build()
    assert len(metadata.prefill_backend._plans) == 1 + num_chunks(metadata), "plans of the last step are kept"


def test_workspace_is_a_cap_of_whole_blocks() -> None:
    """A24: never sized by a sequence; a context longer than the workspace takes more chunks."""
    model = Model(block_size=64, workspace_rows=100)
    assert model.builder.workspace.shape == (128, 80)
    step = start(model, [(1000, 2)])
    metadata = step.build()
    assert num_chunks(metadata) == 8
    step.check(step.run(metadata), passes=9)


def test_one_projection_is_held_at_a_time() -> None:
    """A24: what a step holds does not grow with its context."""
    held: list[StorageWeakRef] = []

    class Watched(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert all(storage.expired() for storage in held)
            result = super().forward(x)
            held.append(StorageWeakRef(result.untyped_storage()))
            return result

    step = start(Model(projection=Watched, workspace_rows=64), REQUESTS)
    metadata = step.build()
    step.run(metadata)
    assert len(held) == 1 + num_chunks(metadata) > 8


def test_stages_are_timed_and_profiled() -> None:
    step = start(Model(), REQUESTS)
    metadata, clock = step.build(), StageClock()
    stages = {"write_cache", "gather", "projection", "attention"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, clock.active():
        step.run(metadata)
    assert stages == set(clock.seconds) and all(seconds > 0 for seconds in clock.seconds.values())
    assert {f"mla_prefill::{stage}" for stage in stages} <= {event.key for event in profile.key_averages()}
    before = dict(clock.seconds)
    step.run(metadata)
    assert dict(clock.seconds) == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[:-1], r"q: expected shape \[at least 71, 3, 48\], got \[70, 3, 48\]"),
        ("q", lambda x: x[..., :-1], r"q: expected shape .*, got \[71, 3, 47\]"),
        ("q", lambda x: x.half(), "q: expected dtype torch.float32, got torch.float16"),
        ("kv_c", lambda x: x[:, :-1], r"kv_c_normed: expected shape \[at least 71, 64\], got \[71, 63\]"),
        ("k_pe", lambda x: x[:, :-1], r"k_pe: expected shape \[at least 71, 16\], got \[71, 15\]"),
    ],
)
def test_the_layer_names_a_wrong_input(name: str, change, message: str) -> None:
    step = start(Model(), REQUESTS)
    metadata = step.build()
    setattr(step, name, change(getattr(step, name)))
    with pytest.raises(ValueError, match=message):
        step.run(metadata)


def test_the_layer_names_a_wrong_cache_or_output() -> None:
    step = start(Model(), REQUESTS)
    metadata, cache = step.build(), step.model.cache
    with pytest.raises(ValueError, match=r"output: expected shape .*, got \[71, 72\]"):
        step.run(metadata, torch.empty(71, 72))
    step.model.cache = cache.view(-1, 8, 80)
    with pytest.raises(ValueError, match=r"kv_cache: expected shape \[blocks, 16, 80\], got \[1024, 8, 80\]"):
        step.run(metadata)
    step.model.cache = cache.half()
    with pytest.raises(ValueError, match=r"kv_cache: expected dtype .*32, got .*16"):
        step.run(metadata)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query_lens": [3, -1]}, r"query_lens\[1\]: expected at least 0, got -1"),
        ({"seq_lens": [2, 9]}, r"seq_lens\[0\]: expected at least the 3 new tokens, got 2"),
        ({"seq_lens": [3]}, r"seq_lens: expected one entry for each of query_lens, got shapes \(1,\) and \(2,\)"),
        ({"block_table": torch.zeros(3, 4)}, r"block_table: expected \[2, max_blocks\], got \[3, 4\]"),
        ({"seq_lens": [3, 90]}, "block_table: expected room for 88 context tokens, got 4 blocks of 16"),
        ({"slot_mapping": torch.zeros(4)}, r"slot_mapping: expected \[5\], got \[4\]"),
    ],
)
def test_the_builder_names_a_wrong_argument(arguments: dict, message: str) -> None:
    valid = {
        "query_lens": [3, 2],
        "seq_lens": [3, 9],
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        Model().builder.build(**{**valid, **arguments})


def test_the_builder_needs_a_registered_layer() -> None:
    for names in (["model.layers.9.self_attn"], []):
        with pytest.raises(ValueError, match=rf"layer_names: expected names among \['{NAME}'\], got"):
            MLAMetadataBuilder(names, Model().config, block_size=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="block_size: expected at least 1, got 0"):
        Model(block_size=16).builder.__class__([NAME], Model().config, block_size=0, dtype=torch.float32)


def test_native_refuses_a_quantised_output() -> None:
    step = start(Model(), REQUESTS)
    backend = step.build().prefill_backend
    with pytest.raises(ValueError, match="output_scale: expected None"):
        backend.run_prefill_new_tokens(step.q, step.q, step.q, False, output_scale=torch.ones(1))


def test_the_layer_names_a_projection_that_does_not_fit() -> None:
    step = start(Model(), REQUESTS)
    step.model.layer.kv_b_proj = torch.nn.Linear(64, 100)
    with pytest.raises(ValueError, match="kv_b_proj: expected 168 output features, got 100"):
        step.run()
