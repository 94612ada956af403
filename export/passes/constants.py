"""Small constants that passes add to a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


def constant(
    graph: ir.Graph, name: str, array: NDArray[np.generic], dtype: ir.DataType | None = None
) -> ir.Value:
    """The initializer `name`, made on first use; whoever asks for a name again means the same content.

    Args:
        graph: Where it is stored.
        name: Unique to its content.
        array: The content, converted to `dtype`.
        dtype: Element type; default that of the array.
    """
    if name in graph.initializers:
        return graph.initializers[name]
    converted = array if dtype is None else array.astype(dtype.numpy())
    tensor = ir.Tensor(converted, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def scalar(graph: ir.Graph, number: float, dtype: ir.DataType) -> ir.Value:
    """A number, shared by all who ask for the same."""
    return constant(graph, f"{dtype.name.lower()}.{float(number)!r}", np.array(number), dtype)


def int64_constant(graph: ir.Graph, *numbers: int) -> ir.Value:
    """A one-dimensional int64 initializer, shared by all who ask for the same numbers."""
    name = "int64." + "_".join(map(str, numbers))
    return constant(graph, name, np.array(numbers, dtype=np.int64))


def ir_dtype(name: str) -> ir.DataType:
    """The ONNX element type of a dtype name such as "float16" or "float8_e4m3fn"."""
    return ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.replace("_", "").upper())]
