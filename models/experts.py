"""A feed-forward part of which every token uses a few of many: a router and its experts.

Everything here is made of standard operators with shapes that do not depend on what the router chooses, so three forms
of the same sum stand side by side:

- gathered, for one token at a time: the chosen experts' weights are copied out, and no others are read;
- everywhere, for many tokens: every expert's weights are read where they lie, for all tokens, and what a token did not
  choose counts for nothing;
- grouped, for many tokens and experts of which few are chosen: tokens are sorted by expert into blocks of one size,
  and each block takes a copy of its expert's weights.

Which is cheaper where is measured by `tests/bench/experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.family import Into, Part
from kvgraph.models.layers import GatedMLP, Linear, Precision, activation, gated, stream_product

# What holds a layer's router and experts in the graphs.
BLOCK = "model.layers.{i}.mlp"
# From how many experts for each that a token uses on a prompt is grouped. Measured (tests/bench/experts.py): with 16,
# grouping breaks even at 128 tokens and is 3.8 times as fast at 1024; with 4, at 256 and 1.7 times, which is not worth
# the memory that two copies of an expert's weights take where experts are few and large.
GROUPED_FROM = 8


class Router(nn.Module):
    """Which experts a token uses, and how much each of them counts.

    Scores are float32 whatever the compute type, as two of them that round to one would make the choice arbitrary.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, normalized: bool) -> None:
        """Choose `top_k` of `num_experts`.

        Args:
            hidden_size: E.
            num_experts: X.
            top_k: k.
            normalized: Whether the weights of the chosen add up to one. A softmax over all experts, cut to the chosen
                and normalized, is the softmax over the chosen alone: the two orders of top-k and softmax are then one.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, num_experts, dtype=torch.float32))
        self.top_k = top_k
        self.normalized = normalized

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, E] -> weights [N, k] float32 and experts [N, k] int64, by falling weight."""
        scores = x.to(torch.float32) @ self.weight
        if self.normalized:
            highest, chosen = torch.topk(scores, self.top_k)
            return torch.softmax(highest, dim=-1), chosen
        weights, chosen = torch.topk(torch.softmax(scores, dim=-1), self.top_k)
        return weights, chosen


class StackedLinear(nn.Module):
    """The weights of every expert's projection, [X, in, out]."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features, dtype=dtype))

    def of(self, experts: Tensor) -> Tensor:
        """The weights of `experts` [R] -> [R, in, out], as a copy."""
        return torch.index_select(self.weight, 0, experts)


class Experts(nn.Module):
    """down(act(gate(x)) * up(x)) by the chosen experts, weighted and added."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        precision: Precision,
    ) -> None:
        super().__init__()
        dtype = precision.compute
        self.precision = precision
        self.gate_proj = StackedLinear(num_experts, hidden_size, intermediate_size, dtype)
        self.up_proj = StackedLinear(num_experts, hidden_size, intermediate_size, dtype)
        self.down_proj = StackedLinear(num_experts, intermediate_size, hidden_size, dtype)
        self.act = activation(hidden_act)
        self.num_experts = num_experts

    def gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """For few tokens: reads the chosen experts alone, once for each token; types as in `everywhere`."""
        top_k, expert = chosen.shape[1], chosen.flatten()
        rows = x.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1).unsqueeze(1)
        inner = self._inner(rows @ self.gate_proj.of(expert), rows @ self.up_proj.of(expert))
        outputs = self._outer(inner, self.down_proj.of(expert)).view(-1, top_k, x.shape[1])
        return (outputs.to(torch.float32) * weights.unsqueeze(-1)).sum(1)

    def everywhere(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """For many tokens: reads every expert once.

        Args:
            x: [N, E].
            weights: [N, k] float32.
            chosen: [N, k] int64.

        Returns:
            [N, E] float32.
        """
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)
        # [X, N, 1]: nothing where a token did not choose the expert.
        share = (weights.unsqueeze(-1) * is_chosen).sum(1).T.unsqueeze(-1)
        inner = self._inner(x @ self.gate_proj.weight, x @ self.up_proj.weight)
        outputs = self._outer(inner, self.down_proj.weight).to(torch.float32)
        # Not a product alone: what overflows in an expert that was not made for the token, times zero, is not a number.
        return torch.where(share == 0, 0.0, outputs * share).sum(0)

    def grouped(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """For many tokens and few chosen experts: types as in `everywhere`.

        A block holds as many rows as an expert would have if all were chosen alike, so that at most two blocks for each
        expert hold any choice. Few tokens make blocks of one row, which is `gathered`.
        """
        top_k, rows = chosen.shape[1], chosen.shape[0] * chosen.shape[1]
        block_rows = (rows + self.num_experts - 1) // self.num_experts
        # An expert's last block may lack all rows but one.
        blocks = (rows + self.num_experts * (block_rows - 1)) // block_rows
        slots, ends = self._slots(chosen.flatten(), block_rows)
        # Spare blocks take the last expert and spare slots the first token; nothing reads what they compute.
        expert = (torch.arange(blocks, device=x.device).unsqueeze(1) >= ends).sum(1)
        expert = expert.clamp(max=self.num_experts - 1)
        empty = torch.zeros(blocks * block_rows, dtype=torch.int64, device=x.device)
        token = empty.scatter(0, slots, torch.arange(rows, device=x.device) // top_k)
        sorted_x = torch.index_select(x, 0, token).view(blocks, block_rows, x.shape[1])
        inner = self._inner(sorted_x @ self.gate_proj.of(expert), sorted_x @ self.up_proj.of(expert))
        outputs = self._outer(inner, self.down_proj.of(expert)).flatten(0, 1)
        of_token = torch.index_select(outputs, 0, slots).view(-1, top_k, x.shape[1])
        return (of_token.to(torch.float32) * weights.unsqueeze(-1)).sum(1)

    def _inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return gated(self.act, gate, up, self.precision)

    def _outer(self, inner: Tensor, weight: Tensor) -> Tensor:
        return stream_product(inner, weight, self.precision)

    def _slots(self, chosen: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
        """Where each choice [R] goes when sorted by expert into blocks [R], and each expert's end in blocks [X]."""
        numbers = torch.arange(self.num_experts, device=chosen.device)
        is_chosen = (chosen.unsqueeze(1) == numbers).to(torch.int64)
        so_far = is_chosen.cumsum(0)
        blocks = (so_far[-1] + block_rows - 1) // block_rows
        ends = blocks.cumsum(0)
        first = (ends - blocks) * block_rows
        return ((first + so_far - 1) * is_chosen).sum(1), ends


class ExpertsMLP(nn.Module):
    """The experts that the router chooses and, where the family has it, one that every token uses."""

    def __init__(self, gate: Router, experts: Experts, shared_expert: GatedMLP | None = None) -> None:
        """Compose the parts; the shared expert's output counts by the sigmoid of a score of its own."""
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        if shared_expert is not None:
            self.shared_expert_gate = Linear(gate.weight.shape[0], 1, False, gate.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E] in `Precision.branch`."""
        rows = x.flatten(0, 1)
        result = self._form(x.shape[1])(rows, *self.gate(rows)).view(x.shape)
        if self.shared_expert is not None:
            share = torch.sigmoid(self.shared_expert_gate(x.to(torch.float32)))
            result = result + self.shared_expert(x).to(torch.float32) * share
        return result.to(self.experts.precision.branch)

    def _form(self, new_tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """How to compute a step; `new_tokens` is a symbol that is at least 2 in the prefill graph."""
        if new_tokens == 1:
            return self.experts.gathered
        few_of_many = self.experts.num_experts >= GROUPED_FROM * self.gate.top_k
        return self.experts.grouped if few_of_many else self.experts.everywhere


def expert_names(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Into]:
    """Names of a layer's router and of its experts, whose projections the checkpoint stores one by one.

    Args:
        block: What holds them in the checkpoint, "model.layers.{i}.mlp".
        gate: What the checkpoint calls the gate projection.
        up: Likewise.
        down: Likewise.
    """
    stored = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    experts = {
        f"{block}.experts.{{e}}.{name}.weight": Part(f"{BLOCK}.experts.{projection}.weight", transpose=True)
        for name, projection in stored.items()
    }
    return {f"{block}.gate.weight": Part(f"{BLOCK}.gate.weight", transpose=True), **experts}


def read_top_k(reader: ConfigReader, num_experts: int) -> int:
    """`num_experts_per_tok`; what a config says of the router in training alone is passed over.

    Raises:
        ValueError: It is missing, or more than there are.
    """
    reader.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(f"num_experts_per_tok is {top_k}, expected at most the {num_experts} experts")
    return top_k
