"""A float bundle of the same function whose residual stream and values are rotated: what channel stood out is spread.

Scales that many channels share (of a tensor, of a token, of a block) then fit all of them. The rotated bundle goes
through calibration and quantization in the place of the one that it was made from.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.bundle import ROTATED, Bundle, FileEntry, hash_file
from kvgraph.export.contract import graph_file
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightsWriter, plan_layout
from kvgraph.quant.bundle_weights import BundleWeights, as_float32
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import EMBEDDING_TABLE
from kvgraph.quant.orthogonal import random_hadamard
from kvgraph.quant.rewrite import relocate_weights
from kvgraph.quant.rotation import RotationSites, find_rotation_sites

HEAD = "lm_head.weight"
# Rows of a table that are rotated at a time.
_ROWS = 4096


@contextmanager
def rotated_bundle(bundle: Bundle, folder: Path) -> Iterator[Bundle]:
    """A rotated copy of a float bundle, in a temporary directory in `folder`.

    Raises:
        ValueError: The bundle is quantized, has an encoder, or its graph lets no rotation through.
    """
    if bundle.recipe is not None or bundle.contract.encoder is not None:
        what = "is quantized" if bundle.recipe is not None else "has an encoder"
        raise ValueError(f"{bundle.path}: {what}; only float bundles of decoders can be rotated")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rotated-") as directory:
        yield rotate_bundle(bundle, Path(directory))


def rotate_bundle(bundle: Bundle, directory: Path) -> Bundle:
    """Write a rotated copy into an empty directory; bundle.json is not written.

    Raises:
        ValueError: The graph lets no rotation through.
    """
    models = {graph: ir.load(bundle.graph_path(graph)) for graph in bundle.contract.graphs}
    sites = find_rotation_sites(models["prefill"], bundle.weights.keys(), bundle.contract.num_layers)
    described = {name: {**entry, ROTATED: True} for name, entry in bundle.weights.items()}
    if sites.tied_norm is not None:
        described[HEAD] = described[EMBEDDING_TABLE]
    with BundleWeights(bundle) as weights:
        specs = {
            name: (stored.dtype, stored.shape)
            for name in described
            for stored in (weights.tensors[_source(name, weights)],)
        }
        layout = plan_layout(specs)
        rotation = _Rotation(weights, sites, weights.shape(EMBEDDING_TABLE)[1])
        with WeightsWriter(directory / WEIGHTS_FILE, layout) as writer:
            for name in layout.tensors:
                offset = 0
                for values in rotation.pieces(name):
                    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                    writer.write(name, data, offset)
                    offset += data.nbytes
            sha256 = writer.finish()
    for graph, model in models.items():
        if sites.tied_norm is not None:
            _untie(model.graph)
        relocate_weights(model, layout, {})
        (directory / graph_file(graph)).write_bytes(ir.to_proto(model).SerializeToString())
    for name in bundle.files.keys() - {WEIGHTS_FILE, *map(graph_file, models)}:
        shutil.copyfile(bundle.path / name, directory / name)
    files = {
        file.name: FileEntry(file.stat().st_size, sha256 if file.name == WEIGHTS_FILE else hash_file(file))
        for file in sorted(directory.iterdir())
    }
    return replace(bundle, path=directory, weights=described, files=files)


def _source(name: str, weights: BundleWeights) -> str:
    return EMBEDDING_TABLE if name not in weights.tensors else name


def _untie(graph: ir.Graph) -> None:
    """Give the head, which read the embedding table, a table of its own."""
    table = graph.initializers[EMBEDDING_TABLE]
    head = ir.Value(name=HEAD, shape=table.shape, type=table.type, const_value=table.const_value)
    graph.register_initializer(head)
    for use in list(table.uses()):
        if use.node.op_type == "Gemm":
            use.node.replace_input_with(use.idx, head)


class _Rotation:
    """The rotated tensors of a bundle, a piece at a time."""

    def __init__(self, weights: BundleWeights, sites: RotationSites, hidden_size: int) -> None:
        self._weights = weights
        self._sites = sites
        self._stream = random_hadamard(hidden_size).astype(np.float32)
        self._head = random_hadamard(sites.head_dim, seed=1).astype(np.float32)

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """A tensor in pieces along its first axis, in its stored type."""
        source = _source(name, self._weights)
        kind = self._weights.read(source, 0, 1).dtype
        if name not in (EMBEDDING_TABLE, HEAD) or name in self._sites.readers:
            yield self._rotated(name, self._weights.read(name)).astype(kind)
            return
        norm = self._sites.tied_norm if name == HEAD else None
        for start in range(0, self._weights.shape(source)[0], _ROWS):
            stop = min(start + _ROWS, self._weights.shape(source)[0])
            rows = as_float32(self._weights.read(source, start, stop))
            if norm is not None:
                rows = rows * as_float32(self._weights.read(norm))
            yield (rows @ self._stream).astype(kind)

    def _rotated(self, name: str, values: NDArray[np.generic]) -> Floats:
        sites, result = self._sites, as_float32(values)
        if name in sites.norms:
            return np.ones_like(result)
        if name in sites.readers:
            norm = sites.readers[name]
            if norm is not None:
                result = result * as_float32(self._weights.read(norm))[:, None]
            result = self._stream.T @ result
        if name in sites.outputs:
            heads = result.reshape(-1, len(self._head), result.shape[-1])
            result = np.matmul(self._head.T, heads).reshape(result.shape)
        if name in sites.values:
            heads = result.reshape(*result.shape[:-1], -1, len(self._head))
            result = np.matmul(heads, self._head).reshape(result.shape)
        return result @ self._stream if name in sites.writers else result
