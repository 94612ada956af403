"""Packed weights against the description of their layout, taken apart one byte after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from kvgraph.export.packed.packed_weight import PackedWeight
from kvgraph.export.packed.stored_matrix import StoredMatrix
from kvgraph.export.packed.target_weights import TargetWeights
from kvgraph.export.passes import packed_operators as packed

# K and N that fill blocks and panels, that do not, and that are less than one of either.
SIZES = [(64, 48), (40, 17), (7, 3), (33, 16)]
RNG = np.random.default_rng(3)

InFile = Callable[[str, NDArray[Any], ir.DataType], ir.ExternalTensor]


@pytest.fixture
def in_file(tmp_path: Path) -> InFile:
    """Writes a tensor into a file of its own, at an offset that is no multiple of anything."""

    def write(name: str, values: NDArray[Any], dtype: ir.DataType) -> ir.ExternalTensor:
        octets = values.reshape(-1).view(np.uint8)
        if dtype in (ir.DataType.INT4, ir.DataType.UINT4):
            halves = np.append(octets & 15, np.zeros(octets.size % 2, np.uint8))
            octets = halves[::2] | halves[1::2] << 4
        (tmp_path / name).write_bytes(b"?" * 13 + octets.tobytes())
        shape = ir.Shape(values.shape)
        return ir.ExternalTensor(name, 13, octets.size, dtype, shape=shape, name=name, base_dir=tmp_path)

    return write


def unpacked(module: ModuleType, weight: PackedWeight) -> NDArray[np.float32]:
    storage = weight.storage()
    data = np.concatenate(list(weight.pieces(storage)))
    assert data.size == weight.size(storage)
    inputs, outputs = weight.in_features, weight.out_features
    result: NDArray[np.float32] = module.unpack(data, inputs, outputs, storage.format, storage.scale_format)
    return result


def floats(rows: int, columns: int, dtype: Any = np.float32) -> NDArray[Any]:
    return RNG.standard_normal((rows, columns)).astype(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize(
    ("dtype", "element"),
    [("FLOAT", np.float32), ("FLOAT16", np.float16), ("BFLOAT16", ml_dtypes.bfloat16)],
)
def test_floats_keep_their_values(
    inputs: int, outputs: int, dtype: str, element: Any, in_file: InFile, packed_reference: ModuleType
) -> None:
    values = floats(inputs, outputs, element)
    weight = PackedWeight((StoredMatrix(in_file("w", values, ir.DataType[dtype])),))
    assert weight.storage().format == {"FLOAT": "float32"}.get(dtype, dtype.lower())
    np.testing.assert_array_equal(unpacked(packed_reference, weight), values.astype(np.float32))


@pytest.mark.parametrize("element", [np.float16, ml_dtypes.bfloat16])
def test_float32_values_of_16_bits_are_stored_in_16(
    element: Any, in_file: InFile, packed_reference: ModuleType
) -> None:
    values = floats(40, 17, element).astype(np.float32)
    weight = PackedWeight((StoredMatrix(in_file("w", values, ir.DataType.FLOAT)),))
    assert weight.storage().format == np.dtype(element).name
    np.testing.assert_array_equal(unpacked(packed_reference, weight), values)
    values[39, 16] = 1 + 2.0**-20
    changed = PackedWeight((StoredMatrix(in_file("w", values, ir.DataType.FLOAT)),))
    assert changed.storage().format == "float32"


def test_a_value_beyond_float16_is_kept(in_file: InFile, packed_reference: ModuleType) -> None:
    values = np.array([[1.0, 70000.0 + 2.0**-7]], np.float32)
    weight = PackedWeight((StoredMatrix(in_file("w", values, ir.DataType.FLOAT)),))
    np.testing.assert_array_equal(unpacked(packed_reference, weight), values)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_table_is_the_head_turned(
    inputs: int, outputs: int, in_file: InFile, packed_reference: ModuleType
) -> None:
    table = floats(outputs, inputs)
    weight = PackedWeight((StoredMatrix(in_file("w", table, ir.DataType.FLOAT), transposed=True),))
    np.testing.assert_array_equal(unpacked(packed_reference, weight), table.T)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_int8_has_a_scale_for_each_output(
    inputs: int, outputs: int, transposed: bool, in_file: InFile, packed_reference: ModuleType
) -> None:
    codes = RNG.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    scale = floats(1, outputs)[0]
    stored = codes.T.copy() if transposed else codes
    matrix = StoredMatrix(
        in_file("w", stored, ir.DataType.INT8), transposed, in_file("s", scale, ir.DataType.FLOAT)
    )
    weight = PackedWeight((matrix,))
    assert weight.storage().format == "int8"
    np.testing.assert_array_equal(unpacked(packed_reference, weight), codes.astype(np.float32) * scale)


def in_blocks(values: NDArray[Any], block_size: int | None, inputs: int) -> NDArray[Any]:
    """[blocks, N] as [K, N]."""
    return np.repeat(values, block_size or inputs, axis=0)[:inputs]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block_size", [32, 64, None])
@pytest.mark.parametrize("kind", ["int8-block", "int4", "uint4", "uint4 stored as int4"])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_blocks_keep_their_scales_and_zero_points(
    inputs: int,
    outputs: int,
    kind: str,
    block_size: int | None,
    transposed: bool,
    in_file: InFile,
    packed_reference: ModuleType,
) -> None:
    blocks = 1 if block_size is None else -(-inputs // block_size)
    block_size = inputs if kind == "int8-block" and block_size is None else block_size
    low, high, dtype = {
        "int8-block": (-127, 128, ir.DataType.INT8),
        "int4": (-8, 8, ir.DataType.INT4),
        "uint4": (0, 16, ir.DataType.UINT4),
        "uint4 stored as int4": (-8, 8, ir.DataType.INT4),
    }[kind]
    codes = RNG.integers(low, high, (inputs, outputs)).astype(np.int8)
    scale = floats(blocks, outputs, np.float16).astype(np.float32)
    zeros = RNG.integers(low, high, (blocks, outputs)).astype(np.int8)

    def put(name: str, values: NDArray[Any], dtype: ir.DataType) -> ir.ExternalTensor:
        shaped = values.T.copy() if transposed else values
        whole = kind != "int8-block" and block_size is None and name != "w"
        return in_file(name, shaped.reshape(-1) if whole else shaped, dtype)

    points = put("z", zeros, dtype) if "uint4" in kind else None
    matrix = StoredMatrix(
        put("w", codes, dtype), transposed, put("s", scale, ir.DataType.FLOAT), points, block_size
    )
    weight = PackedWeight((matrix,))
    assert weight.storage().format == kind.split()[0]
    shifted = codes.astype(np.float32)
    if points is not None:
        shifted -= in_blocks(zeros, block_size, inputs)
    expected = shifted * in_blocks(scale, block_size, inputs)
    np.testing.assert_array_equal(unpacked(packed_reference, weight), expected)


def test_scales_are_float16_only_where_all_of_them_are(in_file: InFile) -> None:
    codes = in_file("w", RNG.integers(-8, 8, (64, 20)).astype(np.int8), ir.DataType.INT4)
    scale = floats(2, 20, np.float16).astype(np.float32)
    for value, expected in ((0.5, "float16"), (1 / 3, "float32"), (1e6, "float32")):
        scale[1, 19] = value
        matrix = StoredMatrix(codes, False, in_file("s", scale, ir.DataType.FLOAT), None, 32)
        assert PackedWeight((matrix,)).storage().scale_format == expected


def test_parts_follow_one_another(in_file: InFile, packed_reference: ModuleType) -> None:
    values = [floats(40, width) for width in (20, 6, 9)]
    parts = [StoredMatrix(in_file(f"w{i}", part, ir.DataType.FLOAT)) for i, part in enumerate(values)]
    found = unpacked(packed_reference, PackedWeight(tuple(parts)))
    np.testing.assert_array_equal(found, np.concatenate(values, axis=1))


def test_panels_of_gate_and_up_take_turns(in_file: InFile, packed_reference: ModuleType) -> None:
    gate, up = floats(40, 20), floats(40, 20)
    parts = [StoredMatrix(in_file(n, v, ir.DataType.FLOAT)) for n, v in (("g", gate), ("u", up))]
    weight = PackedWeight(tuple(parts), gated=True)
    data = np.concatenate(list(weight.pieces(weight.storage())))
    assert data.size == weight.size(weight.storage())
    found = packed_reference.unpack(data, 40, 64, "float32", "")
    np.testing.assert_array_equal(found[:, :16], gate[:, :16])
    np.testing.assert_array_equal(found[:, 16:32], up[:, :16])
    np.testing.assert_array_equal(found[:, 32:36], gate[:, 16:])
    np.testing.assert_array_equal(found[:, 48:52], up[:, 16:])
    assert not found[:, 36:48].any()
    assert not found[:, 52:].any()


@pytest.mark.parametrize("kind", ["float", "int4"])
def test_a_wide_matrix_is_packed_in_slabs(
    kind: str, in_file: InFile, packed_reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "float":
        matrix = StoredMatrix(in_file("w", floats(40, 70), ir.DataType.FLOAT))
    else:
        codes = in_file("w", RNG.integers(-8, 8, (40, 70)).astype(np.int8), ir.DataType.INT4)
        matrix = StoredMatrix(codes, False, in_file("s", floats(2, 70), ir.DataType.FLOAT), None, 32)
    weight = PackedWeight((matrix, matrix))
    whole = unpacked(packed_reference, weight)
    for name in ("_SLAB_ELEMENTS", "_COMPILED_ELEMENTS"):
        monkeypatch.setattr(f"kvgraph.export.packed.packed_weight.{name}", 40 * 16)
    monkeypatch.setattr("kvgraph.export.packed.packed_weight._MAPPED_ELEMENTS", 40 * 48)
    assert len(list(weight.pieces(weight.storage()))) == 9
    np.testing.assert_array_equal(unpacked(packed_reference, weight), whole)


def test_the_file_holds_each_tensor_once_and_aligned(in_file: InFile, tmp_path: Path) -> None:
    table = StoredMatrix(in_file("table", floats(17, 7), ir.DataType.FLOAT), transposed=True)
    norm = in_file("norm", floats(1, 7), ir.DataType.FLOAT)
    models = [lookup_and_head(table, norm), lookup_and_head(table, norm)]
    weights = TargetWeights(models)
    weights.place()
    weights.write(tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "np") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    assert set(stored) == {"table/packed", "norm"}
    assert {array.size % 64 for array in stored.values()} == {0}
    assert weights.size == 2 * 16 * 7 * 4 + 7 * 4
    assert weights.sizes == (weights.size, weights.size)
    for model in models:
        tensors = [value.const_value for value in model.graph.initializers.values()]
        assert {tensor.offset % 64 for tensor in tensors if isinstance(tensor, ir.ExternalTensor)} == {0}
        assert model.graph[0].inputs[0] is model.graph[2].inputs[1]
        assert model.graph[2].attributes["format"].as_string() == "float32"


def lookup_and_head(table: StoredMatrix, norm: ir.ExternalTensor) -> ir.Model:
    """Ids to rows of a table, times a weight, to their products with the table."""
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["B"]))
    scale = ir.Value(name="norm", const_value=norm, type=ir.TensorType(ir.DataType.FLOAT), shape=norm.shape)
    lookup = packed.operator(packed.GATHER, [packed.weight_value(table), ids], [], "lookup")
    scaled = ir.Node("", "Mul", [lookup.outputs[0], scale], name="scaled")
    head = packed.linear(scaled.outputs[0], packed.weight_value(table), None, "float", None, "head")
    graph = ir.Graph([ids], head.outputs, nodes=[lookup, scaled, head], initializers=[scale], name="g")
    return ir.Model(graph, ir_version=11)
