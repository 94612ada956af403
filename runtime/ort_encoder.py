"""The three graphs of an encoder-decoder bundle under ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraph.export.contract import (
    ENCODE,
    ENCODER_LENGTH,
    INPUT_IDS,
    EncoderContract,
    GraphName,
    graph_file,
)
from kvgraph.runtime.checks import check_source, check_source_of_row
from kvgraph.runtime.element_types import to_float32
from kvgraph.runtime.encoder_session import Encoded
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.ort_cache import OrtCache
from kvgraph.runtime.ort_load import import_onnxruntime
from kvgraph.runtime.session import Cache, Floats, Ids


@dataclass(frozen=True, slots=True)
class OrtEncoded:
    """Sources as the decoder reads them, where the session computes; see `kvgraph.runtime.encoder_session.Encoded`.

    Attributes:
        owner: The session that made it.
        values: Cross tensor -> its OrtValue [N, K, C, D].
        dtypes: Cross tensor -> its element type.
        encoder_length: [N] int64.
    """

    owner: object
    values: Mapping[str, Any]
    dtypes: Mapping[str, str]
    encoder_length: Ids

    @property
    def num_sources(self) -> int:
        """N, how many there are."""
        return len(self.encoder_length)

    def read(self, name: str) -> Floats:
        """See `Encoded.read`."""
        if name not in self.values:
            raise ValueError(f"cross tensor {name!r} is unknown; there are {', '.join(self.values)}")
        return to_float32(self.values[name].numpy(), self.dtypes[name])


class OrtEncoderSession(OrtSession):
    """An encoder-decoder bundle under ONNX Runtime, see `kvgraph.runtime.encoder_session.EncoderSession`.

    What the encoder gives stays on the device and is bound once into prefill and decode. Arguments: see `OrtSession`.
    """

    def encode(self, input_ids: Ids, encoder_length: Ids) -> OrtEncoded:
        """What the decoder reads of each source, see `EncoderSession.encode`."""
        encoder = self._encoder
        source = check_source(encoder, input_ids, encoder_length)
        session = self._sessions[ENCODE]
        binding = session.io_binding()
        binding.bind_cpu_input(INPUT_IDS, source.input_ids)
        binding.bind_cpu_input(ENCODER_LENGTH, source.encoder_length)
        for tensor in encoder.cross:
            binding.bind_output(tensor.name, *self._device)
        try:
            session.run_with_iobinding(binding)
        except self._errors as error:
            raise RuntimeError(f"{graph_file(ENCODE)}: ONNX Runtime failed: {error}") from error
        names = [tensor.name for tensor in encoder.cross]
        values = dict(zip(names, binding.get_outputs(), strict=True))
        dtypes = {tensor.name: tensor.dtype for tensor in encoder.cross}
        return OrtEncoded(self, values, dtypes, source.encoder_length.copy())

    def attach(self, cache: Cache, encoded: Encoded, source_of_row: Ids | None = None) -> None:
        """Let the rows of a cache read sources, see `EncoderSession.attach`; rows that share one get copies."""
        if not isinstance(cache, OrtCache) or cache.owner is not self:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        if not isinstance(encoded, OrtEncoded) or encoded.owner is not self:
            raise ValueError("the sources were encoded by another session; use this session's encode")
        rows = check_source_of_row(source_of_row, encoded.num_sources, cache.batch_size)
        values = dict(encoded.values)
        if not np.array_equal(rows, np.arange(encoded.num_sources)):
            values = {name: self._value(value.numpy()[rows]) for name, value in values.items()}
        cache.set_fixed_inputs({ENCODER_LENGTH: self._value(encoded.encoder_length[rows]), **values})

    @property
    def _encoder(self) -> EncoderContract:
        assert self._contract.encoder is not None, "a decoder-only bundle is run by OrtSession"
        return self._contract.encoder

    def _value(self, content: Any) -> Any:
        return import_onnxruntime().OrtValue.ortvalue_from_numpy(content, *self._device)

    def _run(
        self,
        graph: GraphName,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids | None = None,
        new_length: Ids | None = None,
    ) -> Floats:
        if isinstance(cache, OrtCache) and not cache.fixed_inputs:
            raise ValueError("the cache's rows have no sources; call encode, then attach")
        return super()._run(graph, cache, input_ids, past_length, logit_positions, new_length)
