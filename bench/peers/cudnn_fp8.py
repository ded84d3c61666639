# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FP8 attention through its front end: one scale a tensor, batched, FP8 in and out, casts not timed."""
from __future__ import annotations

from typing import Callable

import torch

from common import DEVICE, Absent, Inputs, Measurement, median_ms

Scalars = dict[str, float]


class Graphs:
    """Builds the forward and the backward graph over one set of tensors [documents, heads, length, d]; all scales are 1."""

    def __init__(self, x: Inputs) -> None:
        try:
            import cudnn
        except ImportError as error:
            raise Absent(f"nvidia-cudnn-frontend is not installed ({error})") from error
        self.cudnn, self.x = cudnn, x
        batch, length, heads, d = len(x.lengths), x.longest, x.q.shape[1], x.q.shape[2]
        self.dim, self.stride = (batch, heads, length, d), (length * heads * d, d, heads * d, 1)
        self.stats_dim, self.stats_stride = (batch, heads, length, 1), (heads * length, length, 1, 1)
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.stats = torch.empty(self.stats_dim, device=DEVICE, dtype=torch.float32)
        self.tensors = {name: t.to(torch.float8_e4m3fn) for name, t in
                        {"q": x.q, "k": x.k, "v": x.v, "o": x.q, "dO": x.dout}.items()}

    @staticmethod
    def scalar(value: float = 1.0) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value, device=DEVICE, dtype=torch.float32)

    def build(self, method: str, inputs: tuple[str, ...], scalars: tuple[str, ...], outputs: tuple[str, ...], takes_stats: bool,
              **more: object) -> tuple[Callable[[], None], list[torch.Tensor]]:
        kinds = self.cudnn.data_type
        graph = self.cudnn.pygraph(io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT,
                                   handle=self.handle)
        node = {n: graph.tensor(name=n, dim=self.dim, stride=self.stride, data_type=kinds.FP8_E4M3) for n in inputs}
        node |= {n: graph.tensor(name=n, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kinds.FLOAT) for n in scalars}
        pack = {node[n]: self.tensors[n] for n in inputs} | {node[n]: self.scalar() for n in scalars}
        if takes_stats:
            node["stats"] = graph.tensor(name="stats", dim=self.stats_dim, stride=self.stats_stride, data_type=kinds.FLOAT)
            pack[node["stats"]] = self.stats
        if self.x.causal:
            more["use_causal_mask"] = True
        results = getattr(graph, method)(**node, attn_scale=self.dim[3]**-0.5, **more)
        kept = []
        for result, kind in zip(results, outputs):
            result.set_output(True)
            if kind == "fp8":
                result.set_dim(self.dim).set_stride(self.stride).set_data_type(kinds.FP8_E4M3)
                kept.append(torch.empty(self.x.q.shape, device=DEVICE, dtype=torch.float8_e4m3fn))
                pack[result] = kept[-1]
            elif kind == "stats":
                result.set_dim(self.stats_dim).set_stride(self.stats_stride).set_data_type(kinds.FLOAT)
                pack[result] = self.stats
            else:
                result.set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(kinds.FLOAT)
                pack[result] = self.scalar()
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        space = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
        return (lambda: graph.execute(pack, space, handle=self.handle)), kept


def cudnn_fp8(x: Inputs, mode: str) -> Measurement:
    if not x.equal_lengths:
        raise Absent("takes batches of equal lengths only")
    if x.q.shape[1] != x.k.shape[1]:
        raise Absent("measured with equal head counts only")
    graphs = Graphs(x)
    forward, (out,) = graphs.build("sdpa_fp8", ("q", "k", "v"),
                                   ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
                                   ("fp8", "stats", "amax", "amax"), False, generate_stats=True)
    forward_ms = median_ms(forward, mode)
    result = out.float()
    graphs.tensors["o"].copy_(out)
    names = tuple("descale_" + n for n in ("q", "k", "v", "o", "dO", "s", "dP")) + tuple("scale_" + n for n in ("s", "dQ", "dK", "dV", "dP"))
    backward, grads = graphs.build("sdpa_fp8_backward", ("q", "k", "v", "o", "dO"), names, ("fp8",) * 3 + ("amax",) * 4, True)
    return Measurement(forward_ms, median_ms(backward, mode), [result, *(g.float() for g in grads)])
