"""Running calibration data through a bundle, and keeping what was learned.

Statistics are cached by the digest of bundle and data: a second recipe for the same bundle costs no second run, and a
run that was stopped goes on with the layer that it was in. A process that wants statistics that another one is
collecting waits for them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from kvgraph.quant.layer_graph import HEAD, Piece
from kvgraph.quant.layerwise import LayerwiseModel, Stream
from kvgraph.quant.statistics import InputStatistics, LayerStatistics, StatisticsCollector

_LOG = logging.getLogger(__name__)
# Raised whenever statistics change their meaning: older files are then left alone.
_VERSION = 2


def cache_directory(parent: Path, model: LayerwiseModel) -> Path:
    """Where statistics of this bundle and data lie under `parent`; made if it is not there."""
    key = f"{_VERSION}:{model.bundle.digest()}:{model.data.digest()}"
    directory = parent / hashlib.sha256(key.encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def collect_statistics(model: LayerwiseModel, directory: Path) -> Iterator[tuple[Piece, LayerStatistics]]:
    """Every layer and, last, the head, each with the statistics of its activations.

    Args:
        model: The bundle with its data.
        directory: From `cache_directory`; what it already holds is not computed again.

    Raises:
        ValueError: An activation is not finite; the message names the layer.
    """
    last = model.graph.num_layers
    with _alone(directory):
        if (stopped_at := _first_missing(model, directory)) <= last and not Stream(
            directory, stopped_at
        ).exists():
            # Nothing to go on from: at the start, or where files were removed.
            _clear(model, directory)
            model.embed(Stream(directory, 0))
        for index in tqdm(range(last + 1), desc="calibrating", unit="layer", disable=None):
            piece = model.graph.piece(index)
            file = directory / f"{piece.name}.npz"
            source = Stream(directory, index)
            if not file.exists():
                _run_piece(model, piece, source, directory).save(file)
            source.remove()
            yield piece, LayerStatistics.load(file, piece)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes from collecting the same statistics; the lock goes with the process that holds it."""
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.warning("waiting for another process that collects the same statistics in %s", directory)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clear(model: LayerwiseModel, directory: Path) -> None:
    """Remove statistics and streams; what GPTQ keeps beside them may be in use."""
    for file in directory.glob("*.npz"):
        file.unlink()
    for layer in range(model.graph.num_layers + 1):
        Stream(directory, layer).remove()


def _first_missing(model: LayerwiseModel, directory: Path) -> int:
    """The first piece without statistics; one past the head where all have them."""
    names = [*(f"layers.{layer}" for layer in range(model.graph.num_layers)), HEAD]
    return next(
        (index for index, name in enumerate(names) if not (directory / f"{name}.npz").exists()), len(names)
    )


def _run_piece(model: LayerwiseModel, piece: Piece, source: Stream, directory: Path) -> LayerStatistics:
    """Statistics of a piece; leaves the stream for the next one behind."""
    layer = source.layer if piece.name != HEAD else None
    collector = StatisticsCollector(piece, model.data.tokens, layer)
    target = None if layer is None else Stream(directory, layer + 1)
    model.run(piece, model.layer_weights(piece), source, collector.visit, target)
    return collector.finish()


class StatisticsReader:
    """Statistics that were collected, by module.

    Args:
        model: Whose.
        directory: Where `collect_statistics` left them.
    """

    def __init__(self, model: LayerwiseModel, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._piece_of = model.graph.pieces_by_module()
        self._latest: tuple[int, Piece, LayerStatistics] | None = None

    def inputs(self, module: str) -> InputStatistics | None:
        """Of a module's inputs; None where it is no product of a layer or the head."""
        index = self._piece_of.get(module)
        if index is None:
            return None
        if self._latest is None or self._latest[0] != index:
            piece = self._model.graph.piece(index)
            self._latest = (index, piece, LayerStatistics.load(self._directory / f"{piece.name}.npz", piece))
        _, piece, statistics = self._latest
        name = next(product.input for product in piece.products if product.module == module)
        return statistics.inputs[name]
