"""Running layer by layer: streams, batches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import hidden_state
from kvgraph.quant.calibration_data import check_sequences
from kvgraph.quant.layerwise import LayerwiseModel, Stream, make_batches
from kvgraph.runtime.session import Floats, Ids

# Sums in another order.
TOLERANCE = 1e-4

Exported = Callable[..., Bundle]
TinyLlama = Callable[..., Path]
Opened = Callable[[Bundle, Sequence[Ids]], LayerwiseModel]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_bundles_run_in_float32(
    tiny_llama: TinyLlama,
    exported: Exported,
    opened: Opened,
    sequences: list[Ids],
    tmp_path: Path,
    dtype: str,
) -> None:
    """The stream is that of the float32 model but for the rounding of the weights, which one layer shows."""
    streams = []
    for name in ("float32", dtype):
        model = opened(exported(tiny_llama(), dtype=name), sequences)
        first, second = Stream(tmp_path / name, 0), Stream(tmp_path / name, 1)
        model.embed(first)
        piece = model.graph.layer(0)
        weights = {name: values.astype(np.float32) for name, values in model.layer_weights(piece).items()}
        if name == "float32":
            exact = {name: _rounded(values, dtype) for name, values in weights.items()}
            for batch in model.batches:
                first.write(batch, _rounded(first.read(batch), dtype))
            weights = {**exact, **{name: weights[name] for name in weights if "layernorm" in name}}
        model.run(piece, weights, first, target=second)
        streams.append(second.read(model.batches[0]))
    assert streams[1].dtype == np.float32
    np.testing.assert_allclose(streams[1], streams[0], atol=TOLERANCE)


def _rounded(values: Floats, dtype: str) -> Floats:
    rounded: Floats = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    return rounded


def test_the_stream_of_a_batch_is_that_of_its_sequences_alone(
    tiny_llama: TinyLlama, exported: Exported, opened: Opened, sequences: list[Ids], tmp_path: Path
) -> None:
    model = opened(exported(tiny_llama()), sequences)
    alone = opened(exported(tiny_llama()), [sequences[0], np.zeros(32, np.int64)])
    length = len(sequences[0])
    lasts = []
    for number, each in enumerate((model, alone)):
        source = Stream(tmp_path / str(number), 0)
        each.embed(source)
        for layer in range(2):
            piece, target = each.graph.layer(layer), Stream(tmp_path / str(number), layer + 1)
            each.run(piece, each.layer_weights(piece), source, target=target)
            source = target
        (batch,) = each.batches
        row = next(row for row, ids in enumerate(each.data.sequences) if len(ids) == length)
        lasts.append(source.read(batch)[row, :length])
    np.testing.assert_allclose(lasts[0], lasts[1], atol=TOLERANCE)


def test_batches_hold_every_token_once(tiny_llama: TinyLlama, exported: Exported) -> None:
    sequences = [np.full(length, length) for length in (700, 900, 3000, 2, 5)]
    data = check_sequences([np.minimum(ids, 96) for ids in sequences], exported(tiny_llama()), "test")
    batches = make_batches(data)
    assert [batch.ids.shape[1] for batch in batches] == [3000, 900, 5]
    assert sum(int(batch.valid.sum()) for batch in batches) == data.tokens
    assert [batch.first_token for batch in batches] == [0, 3000, 4600]


def test_quantized_bundles_are_refused(
    tiny: Bundle, quantized: Callable[[Bundle, str], Bundle], sequences: list[Ids], opened: Opened
) -> None:
    with pytest.raises(ValueError, match="calibrate and quantize the float bundle"):
        opened(quantized(tiny, "int8-wo"), sequences)


def test_every_layer_ends_in_the_next_one_s_stream(
    tiny: Bundle, opened: Opened, sequences: list[Ids]
) -> None:
    graph = opened(tiny, sequences).graph
    for layer in range(2):
        piece = graph.layer(layer)
        assert piece.stream == hidden_state(layer)
        assert piece.outputs[0] == hidden_state(layer + 1)
        assert all(name.startswith(f"model.layers.{layer}.") for name in piece.parameters)
    assert graph.head().parameters == ("model.norm.weight",)
    assert graph.piece(2).name == "head"
