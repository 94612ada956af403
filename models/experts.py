"""A feed-forward part of which every token uses a few of many: a router and its experts.

Everything here is made of standard operators with shapes that do not depend on what the router chooses. A step of one
token (decode) gathers the chosen experts' weights, so that no others are read. A step of many (prefill) would gather
them anew for every token, so there each expert's weights are read once, for all tokens, and what a token did not choose
counts for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.family import Part
from kvgraph.models.layers import GatedMLP, Linear, activation

# What holds a layer's experts in the graphs.
EXPERTS = "model.layers.{i}.mlp.experts"


class Router(Linear):
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
        super().__init__(hidden_size, num_experts, False, torch.float32)
        self.top_k = top_k
        self.normalized = normalized

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two results where Linear has one
        """[N, E] -> weights [N, k] float32 and experts [N, k] int64, by falling weight."""
        scores = super().forward(x.to(torch.float32))
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
        """The weights of `experts` [N, k] -> [N, k, in, out]."""
        rows = torch.index_select(self.weight, 0, experts.flatten())
        return rows.view(-1, experts.shape[1], *self.weight.shape[1:])


class Experts(nn.Module):
    """down(act(gate(x)) * up(x)) by the chosen experts, weighted and added."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.gate_proj = StackedLinear(num_experts, hidden_size, intermediate_size, dtype)
        self.up_proj = StackedLinear(num_experts, hidden_size, intermediate_size, dtype)
        self.down_proj = StackedLinear(num_experts, intermediate_size, hidden_size, dtype)
        self.act = activation(hidden_act)
        self.num_experts = num_experts

    def gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """For few tokens: reads the chosen experts alone, once for each token; types as in `everywhere`."""
        x = x.unsqueeze(1).unsqueeze(1)
        inner = self.act(x @ self.gate_proj.of(chosen)) * (x @ self.up_proj.of(chosen))
        outputs = (inner @ self.down_proj.of(chosen)).squeeze(2)
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
        inner = self.act(x @ self.gate_proj.weight) * (x @ self.up_proj.weight)
        outputs = inner @ self.down_proj.weight
        return (outputs.to(torch.float32) * share).sum(0)


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
        """[B, S, E] -> [B, S, E]."""
        rows = x.flatten(0, 1)
        # A number in the decode graph, a symbol that is at least 2 in the prefill graph.
        run = self.experts.gathered if x.shape[1] == 1 else self.experts.everywhere
        result = run(rows, *self.gate(rows)).view(x.shape)
        if self.shared_expert is not None:
            share = torch.sigmoid(self.shared_expert_gate(x.to(torch.float32)))
            result = result + self.shared_expert(x).to(torch.float32) * share
        return result.to(x.dtype)


def expert_names(
    experts: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Part]:
    """Names of a layer's experts whose projections a checkpoint stores one by one.

    Args:
        experts: What holds them in the checkpoint, "model.layers.{i}.mlp.experts".
        gate: What the checkpoint calls the gate projection.
        up: Likewise.
        down: Likewise.
    """
    stored = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    return {
        f"{experts}.{{e}}.{name}.weight": Part(f"{EXPERTS}.{projection}.weight", transpose=True)
        for name, projection in stored.items()
    }


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
