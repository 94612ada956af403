"""Query, key and value projections that a checkpoint holds as one tensor.

Graphs hold three, so that quantization and inspection find the same names in every family. Each helper says which rows
of the fused tensor, counted in its output features, belong to which projection.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.models.config import ModelConfig
from kvgraph.models.family import Part

Ranges = tuple[tuple[int, int], ...]


def stacked_ranges(config: ModelConfig) -> dict[str, Ranges]:
    """All queries, then all keys, then all values."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "q": ((0, queries),),
        "k": ((queries, queries + keys),),
        "v": ((queries + keys, queries + 2 * keys),),
    }


def grouped_ranges(config: ModelConfig) -> dict[str, Ranges]:
    """For each key/value head in turn: the query heads that read it, its key, its value.

    With as many key/value heads as heads that is query, key, value of one head after another; with a single one it is
    the same as stacked.
    """
    dim, heads = config.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // heads * dim
    starts = [head * (queries + 2 * dim) for head in range(heads)]
    return {
        "q": tuple((start, start + queries) for start in starts),
        "k": tuple((start + queries, start + queries + dim) for start in starts),
        "v": tuple((start + queries + dim, start + queries + 2 * dim) for start in starts),
    }


def qkv_parts(
    ranges: Mapping[str, Ranges], layer: str, kind: str, axis: int = 0, transpose: bool | None = None
) -> tuple[Part, ...]:
    """The three parameters that a fused tensor becomes.

    Args:
        ranges: From one of the functions above.
        layer: Prefix of the graph's names, "model.layers.{i}.".
        kind: "weight" or "bias".
        axis: Where the output features lie in the checkpoint's tensor.
        transpose: See `Part`.
    """
    return tuple(
        Part(f"{layer}self_attn.{name}_proj.{kind}", taken, axis, transpose) for name, taken in ranges.items()
    )
