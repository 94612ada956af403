"""GPTQ layer after layer: every layer is rounded on the activations that the rounded layers before it give."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.quant.formats import Floats
from kvgraph.quant.gptq import GptqOptions, InputGram, gptq
from kvgraph.quant.layer_graph import Piece, Product
from kvgraph.quant.layerwise import Batch, LayerwiseModel, Stream
from kvgraph.quant.plan import Rescaling, WeightPart, round_to_nearest
from kvgraph.quant.quantized_weight import QuantizedWeight
from kvgraph.quant.rescaling import rescale_all

_LOG = logging.getLogger(__name__)


class GptqQuantizer:
    """A `kvgraph.quant.plan.WeightQuantizer`: parts of modules in the graph's order in, GPTQ's codes out.

    Holds one layer's X^T X and rounded weights. When a module of a later layer comes, the stream of the calibration
    data is run through the layers before it as they are rounded. Weights that no layer's product reads in the stored
    order (embedding tables, tied heads) are rounded to nearest.

    Args:
        model: The float bundle with its data.
        modules: Those that will be rounded.
        rescalings: Factors that all weights get first.
        directory: Where the stream waits between layers; what is left there is removed with this object.
        options: See `GptqOptions`.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        modules: Collection[str],
        rescalings: Mapping[str, Rescaling],
        directory: Path,
        options: GptqOptions | None = None,
    ) -> None:
        self._model = model
        self._modules = frozenset(modules)
        self._rescalings = rescalings
        self._options = options or GptqOptions()
        self._piece_of = model.graph.pieces_by_module()
        self._waiting = tempfile.TemporaryDirectory(dir=directory, prefix="gptq.")
        self._directory = Path(self._waiting.name)
        self._stream: Stream | None = None
        self._piece: Piece | None = None
        self._inputs: dict[str, InputGram] = {}
        self._rounded: dict[str, Floats] = {}

    def __call__(self, part: WeightPart) -> QuantizedWeight:
        """Round a part of a module."""
        index = self._piece_of.get(part.module)
        if index is None:
            return round_to_nearest(part)
        self._advance(index)
        inputs = self._inputs[part.module]
        found, better = gptq(part.weight, part.scheme, part.scale_dtype, inputs, part.largest)
        if not better.all():
            kept = int(np.count_nonzero(~better))
            _LOG.info(
                "%s: %d of %d outputs keep the nearest codes, GPTQ's are no better",
                part.module,
                kept,
                len(better),
            )
        self._keep(part, found)
        return found

    def _advance(self, index: int) -> None:
        """Come to the piece with this number: rounded layers behind, its inputs' X^T X at hand."""
        if self._stream is None:
            self._stream = Stream(self._directory, 0)
            self._model.embed(self._stream)
        while self._stream.layer < index:
            piece = self._piece or self._model.graph.piece(self._stream.layer)
            following = Stream(self._directory, self._stream.layer + 1)
            self._inputs.clear()
            self._model.run(piece, self._weights(piece), self._stream, target=following)
            self._stream.remove()
            self._stream, self._piece = following, None
            self._rounded.clear()
        assert self._stream.layer == index, "modules come in the graph's order"
        if self._piece is None:
            self._piece = self._model.graph.piece(index)
            self._collect(self._piece, self._stream)

    def _collect(self, piece: Piece, stream: Stream) -> None:
        """X^T X of every input that a module to be rounded reads."""
        wanted: dict[str, list[Product]] = {
            name: products
            for name, products in piece.product_inputs().items()
            if any(product.module in self._modules for product in products)
        }
        grams: dict[str, Floats] = {}

        def visit(batch: Batch, outputs: Mapping[str, NDArray[Any]]) -> None:
            for name in wanted:
                rows = batch.rows(outputs[name])
                if name in grams:
                    grams[name] += rows.T @ rows
                else:
                    grams[name] = rows.T @ rows

        self._model.run(piece, self._weights(piece), stream, visit)
        for name, products in wanted.items():
            shared = InputGram(grams[name], self._options)
            self._inputs |= {product.module: shared for product in products}

    def _weights(self, piece: Piece) -> dict[str, Floats]:
        """A piece's weights, rounded where they have been."""
        weights = rescale_all(self._model.layer_weights(piece), self._rescalings)
        return {**weights, **{f"{module}.weight": values for module, values in self._rounded.items()}}

    def _keep(self, part: WeightPart, found: QuantizedWeight) -> None:
        values = found.dequantize()
        outputs = self._model.weights.shape(f"{part.module}.weight")[1]
        if part.module not in self._rounded:
            self._rounded[part.module] = np.empty((len(values), outputs), np.float32)
        self._rounded[part.module][:, part.first_output : part.first_output + values.shape[1]] = values
