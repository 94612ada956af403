"""Nodes that passes add to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.tape import Tape


def insert(
    tape: Tape,
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str,
    attributes: Mapping[str, int | str] | None = None,
) -> ir.Value:
    """The result of a new node, of unknown type and shape; `name` is that of the result."""
    result = tape.op(op_type, list(inputs), dict(attributes or {}), name=f"{name}/{op_type}")
    result.name = name
    return result
