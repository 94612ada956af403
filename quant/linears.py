"""The weights of a canonical graph that can be quantized.

| kind | stored | read by | module |
|---|---|---|---|
| matmul | [I, O] | `MatMul` as its second input | `model.layers.0.mlp.up_proj`, `lm_head` |
| table | [V, E] | `Gather` along V, by `Gemm` with transB as a head that is tied or was | `model.embed_tokens` |
| experts | [X, I, O] | `Gather` along X, or `MatMul` as its second input | `model.layers.0.mlp.experts.up_proj` |

A table's scales run along E, the inputs of the tied head: in the terms of a matrix product it is [I = E, O = V],
stored the other way round. Tables and experts are quantized weight-only, experts to nearest whatever the algorithm.
Routers, which choose experts, stay float: they are small, and of two close scores rounding would choose another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from kvgraph.quant.recipe import EMBEDDING, LM_HEAD

WEIGHT_SUFFIX = ".weight"
_ROUTERS = ("gate", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that can be quantized.

    Attributes:
        module: Its name without ".weight", which recipes match.
        tensor: Its name in the graph and in the weights file.
        kind: How it is stored and read, see the module docstring.
        shape: As it is stored.
    """

    module: str
    tensor: str
    kind: Literal["matmul", "table", "experts"]
    shape: tuple[int, ...]

    @property
    def inputs_axis(self) -> int:
        """Which axis is I, the length of the sums in its products."""
        return 0 if self.kind == "matmul" else 1

    @property
    def inputs(self) -> int:
        """I."""
        return self.shape[self.inputs_axis]

    @property
    def outputs(self) -> int:
        """O."""
        return self.shape[0] if self.kind == "table" else self.shape[-1]

    @property
    def experts(self) -> int:
        """X; 1 for a matrix."""
        return self.shape[0] if self.kind == "experts" else 1


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """What a graph's weights are good for.

    Attributes:
        linears: Those that can be quantized, in the order in which the graph reads them.
        others: The other tensors of two or more dimensions -> why they cannot.
    """

    linears: tuple[Linear, ...]
    others: dict[str, str]


def find_linears(model: ir.Model) -> FoundWeights:
    """Sort the weights of a canonical graph."""
    linears: list[Linear] = []
    others: dict[str, str] = {}
    seen: set[str] = set()
    for node in model.graph:
        for value in node.inputs:
            if value is None or not value.is_initializer() or value.name in seen:
                continue
            name = value.name
            if name is None or not name.endswith(WEIGHT_SUFFIX) or len(value.shape or ()) < 2:
                continue
            seen.add(name)
            found = _classify(name, value)
            if isinstance(found, Linear):
                linears.append(found)
            else:
                others[name] = found
    return FoundWeights(tuple(linears), others)


def _classify(name: str, value: ir.Value) -> Linear | str:
    """A linear, or why it is none."""
    assert value.shape is not None
    module = name.removesuffix(WEIGHT_SUFFIX)
    if module.rpartition(".")[2] in _ROUTERS:
        return "is a router"
    shape, uses = value.shape.numpy(), value.uses()
    if len(shape) == 2 and all(_is_factor(use.node, use.idx) for use in uses):
        return Linear(module, name, "matmul", shape)
    if len(shape) == 3 and all(
        _is_factor(use.node, use.idx) or _is_lookup(use.node, use.idx) for use in uses
    ):
        return Linear(module, name, "experts", shape)
    if len(shape) == 2 and all(
        _is_lookup(use.node, use.idx) or _is_tied_head(use.node, use.idx) for use in uses
    ):
        if module not in (EMBEDDING, LM_HEAD):
            return "is a table other than the token embedding"
        return Linear(module, name, "table", shape)
    readers = sorted({use.node.op_type for use in uses})
    return f"{list(shape)} is read by {', '.join(readers)}, which has no quantized form"


def _is_factor(node: ir.Node, index: int) -> bool:
    return node.op_type == "MatMul" and index == 1


def _is_lookup(node: ir.Node, index: int) -> bool:
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and index == 0 and (axis is None or axis.as_int() == 0)


def _is_tied_head(node: ir.Node, index: int) -> bool:
    transposed = node.attributes.get("transB")
    return node.op_type == "Gemm" and index == 1 and transposed is not None and transposed.as_int() == 1
