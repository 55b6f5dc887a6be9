"""cuDNN's attention through its frontend: ragged offsets, padding mask, stats."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.peers_cuda import Library
from benchmarks.timer import Run


class Cudnn(Library):
    """The graph is built per shape, outside the clock."""

    name, module, distribution = "cudnn", "cudnn", "nvidia-cudnn-frontend"

    def load(self) -> None:
        super().load()
        self.handle = self.library.create_handle()
        self.library.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)

    def version(self) -> str:
        return f"{super().version()}, cuDNN {self.library.backend_version()}"

    def prepare(self, inputs: Inputs) -> Run:
        try:
            return self._build(inputs, ragged_stats=True)
        except Exception:  # its own type; some builds refuse ragged stats
            return self._build(inputs, ragged_stats=False)

    def state(self, result: object) -> tuple[Tensor, Tensor | None]:
        out, lse = result
        return out, lse.T if lse.ndim == 2 else None  # dense stats are padded per sequence

    def _build(self, inputs: Inputs, ragged_stats: bool) -> Run:
        case, types = inputs.case, self.library.data_type
        batch, heads, max_q, max_k = len(case.q_lens), case.num_heads, max(case.q_lens), max(case.kv_lens)
        dim_v = inputs.dim_v
        out = inputs.q.new_empty(inputs.q.shape[0], heads, dim_v)
        io_type = types.BFLOAT16 if inputs.q.dtype == torch.bfloat16 else types.HALF
        graph = self.library.pygraph(
            io_data_type=io_type,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )
        wide = max(inputs.q.shape[0], inputs.k.shape[0]) * heads * inputs.dim_qk >= 2**31
        pack = {}

        def per_sequence(name: str, values: Tensor, wide: bool = False) -> object:
            values = values.to(torch.int64 if wide else torch.int32).view(-1, 1, 1, 1).contiguous()
            dtype = types.INT64 if wide else types.INT32
            node = graph.tensor(name=name, dim=list(values.shape), stride=[1, 1, 1, 1], data_type=dtype)
            pack[node] = values
            return node

        def ragged(node: object, name: str, cu_seqlens: Tensor, row: int) -> object:
            node.set_ragged_offset(per_sequence(name, cu_seqlens.long() * row, wide))
            return node

        def operand(name: str, tensor: Tensor, length: int, cu_seqlens: Tensor) -> object:
            row, head, _ = tensor.stride()
            node = graph.tensor(
                name=name,
                dim=[batch, heads, length, tensor.shape[2]],
                stride=[length * row, head, row, 1],
                data_type=io_type,
            )
            pack[node] = tensor
            return ragged(node, name + "_offset", cu_seqlens, row)

        mask = {}
        if case.causal:
            same = case.q_lens == case.kv_lens
            mask["use_causal_mask" if same else "use_causal_mask_bottom_right"] = True
        result, stats = graph.sdpa(
            name="sdpa",
            q=operand("q", inputs.q, max_q, inputs.cu_seqlens_q),
            k=operand("k", inputs.k, max_k, inputs.cu_seqlens_k),
            v=operand("v", inputs.v_dense, max_k, inputs.cu_seqlens_k),
            generate_stats=True,
            attn_scale=inputs.scale,
            use_padding_mask=True,
            seq_len_q=per_sequence("len_q", inputs.cu_seqlens_q.diff()),
            seq_len_kv=per_sequence("len_k", inputs.cu_seqlens_k.diff()),
            **mask,
        )
        row = heads * dim_v
        result.set_output(True).set_dim([batch, heads, max_q, dim_v]).set_stride([max_q * row, dim_v, row, 1])
        pack[ragged(result, "out_offset", inputs.cu_seqlens_q, row)] = out
        stats.set_output(True).set_dim([batch, heads, max_q, 1]).set_data_type(types.FLOAT)
        if ragged_stats:
            lse = torch.empty(inputs.q.shape[0], heads, dtype=torch.float32, device=out.device)
            stats.set_stride([max_q * heads, 1, heads, 1])
            ragged(stats, "stats_offset", inputs.cu_seqlens_q, heads)
        else:
            lse = torch.empty(batch, heads, max_q, 1, dtype=torch.float32, device=out.device)
            stats.set_stride([heads * max_q, max_q, 1, 1])
        pack[stats] = lse

        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.library.heur_mode.A, self.library.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(graph.get_workspace_size(), 16), dtype=torch.uint8, device=out.device)

        def run() -> tuple[Tensor, Tensor]:
            graph.execute(pack, workspace, handle=self.handle)
            return out, lse

        run()  # a refusal of ragged stats can come as late as here
        return run
