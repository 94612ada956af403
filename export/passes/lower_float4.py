"""4-bit floats (E2M1) for runtimes that have no kernel for them, not even a cast: as integers of twice their value."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.passes.constants import constant, int64_constant, scalar
from kvgraph.export.passes.insert import insert

# Twice the value of each code: a sign bit, two exponent bits (bias 1), one mantissa bit. Twice, they are integers.
_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def lower_float4(model: ir.Model) -> bool:
    """Make every stored E2M1 tensor an INT8 one with half the scale; the bytes stay where they are stored.

    Rules, for a `DequantizeLinear` of an E2M1 initializer:
        * Its bytes are read as UINT8, each is split into its two codes, and a table gives twice the codes' values.
        * Its scale is halved. A scale that is dequantized itself (NVFP4) is cast and multiplied instead.

    All of this depends on initializers alone: ONNX Runtime computes it once, while it loads, then fuses
    `DequantizeLinear` and `MatMul` as it does for INT8. Nothing is rounded on the way.
    """
    changed = False
    for node in list(model.graph):
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is None or codes.dtype != ir.DataType.FLOAT4E2M1:
            continue
        if not isinstance(codes.const_value, ir.ExternalTensor):
            raise ValueError(
                f"{model.graph.name}: {codes.name!r} is a 4-bit float that no weights file holds"
            )
        tape = Tape()
        integers = _as_integers(model.graph, tape, codes, codes.const_value)
        scale = _half_scale(model.graph, tape, node, f"{codes.name}/half_scale")
        del model.graph.initializers[codes.name or ""]
        node.replace_input_with(0, integers)
        node.replace_input_with(1, scale)
        model.graph.insert_before(node, tape.nodes)
        changed = True
    for node in reversed(list(model.graph)):
        # What multiplied NVFP4's scales.
        if node.op_type == "DequantizeLinear" and not node.outputs[0].uses():
            model.graph.remove(node, safe=True)
    return changed


def _as_integers(graph: ir.Graph, tape: Tape, codes: ir.Value, stored: ir.ExternalTensor) -> ir.Value:
    """Twice the values of packed codes, as INT8 of the codes' shape."""
    assert codes.shape is not None
    shape, name = codes.shape.numpy(), f"{codes.name}"
    octets = _bytes(graph, stored, f"{name}/bytes")
    low_half = constant(graph, "uint8.15", np.array(15, np.uint8))
    four = constant(graph, "uint8.4", np.array(4, np.uint8))
    low = insert(tape, "BitwiseAnd", [octets, low_half], f"{name}/low")
    high = insert(tape, "BitShift", [octets, four], f"{name}/high", {"direction": "RIGHT"})
    pairs = insert(tape, "Concat", [low, high], f"{name}/pairs", {"axis": 1})
    if math.prod(shape) % 2:
        flat = insert(tape, "Reshape", [pairs, int64_constant(graph, -1)], f"{name}/flat")
        ends = [int64_constant(graph, 0), int64_constant(graph, math.prod(shape))]
        pairs = insert(tape, "Slice", [flat, *ends], f"{name}/unpadded")
    indices = insert(tape, "Reshape", [pairs, int64_constant(graph, *shape)], f"{name}/codes")
    indices = insert(tape, "Cast", [indices], f"{name}/indices", {"to": int(ir.DataType.INT32)})
    table = constant(graph, "float4e2m1.twice", _TWICE)
    integers = insert(tape, "Gather", [table, indices], f"{name}/twice", {"axis": 0})
    integers.type, integers.shape = ir.TensorType(ir.DataType.INT8), codes.shape
    return integers


def _bytes(graph: ir.Graph, stored: ir.ExternalTensor, name: str) -> ir.Value:
    """The same bytes of the weights file as a UINT8 column."""
    assert stored.length is not None
    shape = ir.Shape([stored.length, 1])
    tensor = ir.ExternalTensor(
        stored.location,
        stored.offset,
        stored.length,
        ir.DataType.UINT8,
        shape=shape,
        name=name,
        base_dir=stored.base_dir,
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.UINT8), const_value=tensor)
    graph.register_initializer(value)
    return value


def _half_scale(graph: ir.Graph, tape: Tape, node: ir.Node, name: str) -> ir.Value:
    """Half of a DequantizeLinear's scale, in its result's type."""
    scale, result = node.inputs[1], node.outputs[0]
    assert scale is not None
    assert result.dtype is not None
    producer = scale.producer()
    if producer is not None:
        fine, factor = producer.inputs
        assert fine is not None
        assert factor is not None
        assert factor.dtype is not None
        widened = insert(tape, "Cast", [fine], f"{name}/float8", {"to": int(factor.dtype)})
        scale = insert(tape, "Mul", [widened, factor], f"{name}/product")
        scale = insert(tape, "Cast", [scale], f"{name}/whole", {"to": int(result.dtype)})
    halved = insert(tape, "Mul", [scale, scalar(graph, 0.5, result.dtype)], name)
    halved.type = result.type
    return halved
