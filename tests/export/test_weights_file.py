"""The weights file: any safetensors tool reads it, and the graphs' external data points into it."""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.external_data_helper
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightsWriter, plan_layout, write_weights

ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "uint8": 8, "int4": 4, "int64": 64}
SPECS = {
    "odd bytes": ("int8", (3, 5)),
    "half": ("bfloat16", (7, 3)),
    "packed": ("int4", (5, 3)),
    "single": ("float32", (11,)),
    "scalar": ("float16", ()),
    "empty": ("float32", (0, 4)),
    "wide": ("int64", (2,)),
}


def pieces(content: bytes, size: int) -> Iterator[memoryview]:
    for start in range(0, len(content), size):
        yield memoryview(content)[start : start + size]


def written(path: Path) -> dict[str, bytes]:
    """Write a file of `SPECS` with counting bytes; returns each tensor's bytes."""
    layout = plan_layout(SPECS)
    contents = {
        name: bytes((index * 37 + byte) % 256 for byte in range(stored.size))
        for index, (name, stored) in enumerate(layout.tensors.items())
    }
    digest = write_weights(path, layout, ((name, pieces(contents[name], 8)) for name in layout.tensors))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert layout.size == path.stat().st_size
    return contents


def test_safetensors_reads_every_type_and_shape(tmp_path: Path) -> None:
    contents = written(tmp_path / WEIGHTS_FILE)
    loaded = load_file(tmp_path / WEIGHTS_FILE)
    assert {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in loaded.items()
    } == (contents)
    for name, (dtype, shape) in SPECS.items():
        if dtype != "int4":
            assert (str(loaded[name].dtype), tuple(loaded[name].shape)) == (f"torch.{dtype}", shape)


def test_four_bit_types_are_bytes_to_safetensors_tools(tmp_path: Path) -> None:
    written(tmp_path / WEIGHTS_FILE)
    packed = load_file(tmp_path / WEIGHTS_FILE)["packed"]
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (8,))


def test_every_tensor_starts_on_a_multiple_of_its_element_size() -> None:
    layout = plan_layout(SPECS)
    assert len(layout.header) % 4096 == 0
    for stored in layout.tensors.values():
        assert stored.offset % max(1, ITEM_BITS[stored.dtype] // 8) == 0


def test_tensors_follow_one_another_without_gaps() -> None:
    layout = plan_layout(SPECS)
    end = len(layout.header)
    for stored in layout.tensors.values():
        assert stored.offset == end
        assert stored.size == math.ceil(math.prod(stored.shape) * ITEM_BITS[stored.dtype] / 8)
        end += stored.size
    assert layout.size == end


def test_layout_of_a_file_beyond_4_gib_needs_no_memory() -> None:
    layout = plan_layout({f"layer {i}": ("bfloat16", (8192, 28672)) for i in range(80)})
    last = layout.tensors["layer 79"]
    assert last.offset + last.size == layout.size == len(layout.header) + 80 * 8192 * 28672 * 2


def test_order_of_tensors_is_that_of_the_layout(tmp_path: Path) -> None:
    layout = plan_layout({"a": ("int8", (2,)), "b": ("int8", (2,))})
    with pytest.raises(ValueError, match=r"tensor 'b' comes where the layout has .*'a'"):
        write_weights(tmp_path / "file", layout, [("b", pieces(b"12", 2))])


@pytest.mark.parametrize("content", [b"1", b"123"])
def test_tensor_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=rf"'a' has {len(content)} bytes, the layout says 2"):
        write_weights(tmp_path / "file", plan_layout({"a": ("int8", (2,))}), [("a", pieces(content, 1))])


def test_tensor_that_is_never_written_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'a' was not written"):
        write_weights(tmp_path / "file", plan_layout({"a": ("int8", (2,))}), [])


def test_full_disk_is_noticed_before_the_first_tensor_is_read(tmp_path: Path, file_limit: int) -> None:
    def unread() -> Iterator[tuple[str, Iterator[memoryview]]]:
        raise AssertionError("came to the tensors")
        yield

    layout = plan_layout({"a": ("int8", (file_limit,))})
    with pytest.raises(OSError, match="File too large") as caught:
        write_weights(tmp_path / "file", layout, unread())
    assert caught.value.errno == errno.EFBIG


def external_tensors(bundle: Bundle, graph: str) -> dict[str, tuple[onnx.TensorProto, dict[str, str]]]:
    model = onnx.load(str(bundle.path / f"{graph}.onnx"), load_external_data=False)
    return {
        tensor.name: (tensor, {entry.key: entry.value for entry in tensor.external_data})
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


@pytest.fixture(scope="session", params=[{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def checkpoint_and_bundle(
    request: pytest.FixtureRequest, tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]
) -> tuple[Path, Bundle]:
    return tiny_llama(), exported(tiny_llama(), **request.param)


def test_weights_equal_the_checkpoints_bit_for_bit(checkpoint_and_bundle: tuple[Path, Bundle]) -> None:
    checkpoint, bundle = checkpoint_and_bundle
    source, stored = load_file(checkpoint / "model.safetensors"), load_file(bundle.path / WEIGHTS_FILE)
    assert stored.keys() == source.keys() == bundle.weights.keys()
    for name, tensor in stored.items():
        # Every linear layer is stored [in, out]; norms are float32 whatever the rest is.
        linear = "_proj.weight" in name or name == "lm_head.weight"
        expected = source[name].T if linear else source[name]
        expected = expected.to(torch.float32 if "norm" in name else getattr(torch, bundle.dtype))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        assert bundle.weights[name]["source"] == [name]
        assert bundle.weights[name]["transposed"] == linear
        assert bundle.weights[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert bundle.weights[name]["shape"] == list(tensor.shape)


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_both_graphs_point_at_every_tensor(checkpoint_and_bundle: tuple[Path, Bundle], graph: str) -> None:
    """However small: weights are never inside the graph."""
    _, bundle = checkpoint_and_bundle
    tensors = external_tensors(bundle, graph)
    assert tensors.keys() == bundle.weights.keys()
    file_size = (bundle.path / WEIGHTS_FILE).stat().st_size
    with safe_open(bundle.path / WEIGHTS_FILE, "pt") as file:
        for name, (tensor, place) in tensors.items():
            assert place["location"] == WEIGHTS_FILE
            assert int(place["offset"]) + int(place["length"]) <= file_size
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(bundle.path))
            assert tensor.raw_data == file.get_tensor(name).view(torch.uint8).numpy().tobytes()
            assert list(tensor.dims) == file.get_slice(name).get_shape()


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_what_a_graph_holds_itself_is_small(checkpoint_and_bundle: tuple[Path, Bundle], graph: str) -> None:
    _, bundle = checkpoint_and_bundle
    model = onnx.load(str(bundle.path / f"{graph}.onnx"), load_external_data=False)
    inside = [
        tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL
    ]
    assert max(math.prod(tensor.dims) for tensor in inside) <= 4


def test_bfloat16_of_the_file_is_that_of_ml_dtypes(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    name = "model.embed_tokens.weight"
    bundle = exported(tiny_llama(), dtype="bfloat16")
    tensor, _ = external_tensors(bundle, "prefill")[name]
    onnx.external_data_helper.load_external_data_for_tensor(tensor, str(bundle.path))
    expected = load_file(tiny_llama() / "model.safetensors")[name].numpy().astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.frombuffer(tensor.raw_data, ml_dtypes.bfloat16), expected.reshape(-1))


def test_written_in_any_order_the_file_is_the_same(tmp_path: Path) -> None:
    contents = written(tmp_path / "streamed")
    layout = plan_layout(SPECS)
    with WeightsWriter(tmp_path / "random", layout) as writer:
        for name in reversed(contents):
            half = len(contents[name]) // 2
            writer.write(name, memoryview(contents[name])[half:], half)
            writer.write(name, memoryview(contents[name])[:half])
        digest = writer.finish()
    assert (tmp_path / "random").read_bytes() == (tmp_path / "streamed").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "random").read_bytes()).hexdigest()


def test_writer_refuses_what_is_missing_or_has_no_room(tmp_path: Path) -> None:
    with WeightsWriter(tmp_path / "file", plan_layout({"a": ("int8", (4,)), "b": ("int8", (2,))})) as writer:
        writer.write("a", memoryview(b"123"))
        with pytest.raises(ValueError, match="2 tensors were not written, 'a' the first"):
            writer.finish()
        for data, offset in ((b"12", 3), (b"12", 0), (b"1", -1)):
            with pytest.raises(ValueError, match="'a', which has 4 bytes and misses 1"):
                writer.write("a", memoryview(data), offset)
        with pytest.raises(ValueError, match="no tensor 'c'"):
            writer.write("c", memoryview(b"1"))
