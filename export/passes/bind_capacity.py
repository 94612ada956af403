"""The cache capacity as a number."""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.contract import CAPACITY, Contract


def bind_capacity(model: ir.Model, contract: Contract, capacity: int) -> bool:
    """Write `capacity` wherever a shape says T; TensorRT's cache layer takes no symbolic one.

    Args:
        model: A canonical graph.
        contract: What names its state tensors.
        capacity: Slots a row of the cache will have.

    Raises:
        ValueError: The graph has another capacity written in.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    for tensor in contract.state:
        fixed = None if (shape := inputs[tensor.name].shape) is None else shape[2]
        if isinstance(fixed, int) and fixed != capacity:
            raise ValueError(
                f"{model.graph.name}: {tensor.name} has a capacity of {fixed} written in, {capacity} is asked for; "
                f"build with --max-context {fixed}, or export without --capacity"
            )
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    return sum(_bind(value, capacity) for value in values) > 0


def _bind(value: ir.Value, capacity: int) -> bool:
    if value.shape is None or not any(is_capacity(dim) for dim in value.shape):
        return False
    value.shape = ir.Shape([capacity if is_capacity(dim) else dim for dim in value.shape])
    return True


def is_capacity(dim: int | ir.SymbolicDim, capacity: int | None = None) -> bool:
    """Whether a dimension is T, which is `capacity` where that is written in."""
    return dim == capacity if isinstance(dim, int) else dim.value == CAPACITY
