"""From measurements of several rounds to the tables that are printed; nothing is run here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer_rows import Row

_GROUPS = ("4 bit", "8 bit", "float")


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine can do, a second."""

    read_bytes_per_s: float
    float32_ops_per_s: float
    int8_ops_per_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the rounds of one configuration; memory is the most that was seen.

    Attributes:
        tokens: What the first round made, to see who computes the same.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    load_s: float
    load_peak_bytes: int
    peak_bytes: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came before: export, quantization, build; the peak is of the largest process."""

    seconds: float
    peak_bytes: int


def median_rates(rounds: Sequence[Mapping[str, float]]) -> Rates:
    """The medians of what `peer_rates.py` wrote."""
    return Rates(**{name: statistics.median(one[name] for one in rounds) for name in Rates.__slots__})


def median_speed(rounds: Sequence[Mapping[str, object]]) -> Speed:
    """The medians of what a child wrote in each round."""

    def median(name: str) -> float:
        return statistics.median(float(str(one[name])) for one in rounds)

    return Speed(
        prefill_tokens_per_s=median("prefill_tokens_per_s"),
        decode_tokens_per_s=median("decode_tokens_per_s"),
        load_s=median("load_s"),
        load_peak_bytes=max(int(str(one["load_peak_bytes"])) for one in rounds),
        peak_bytes=max(int(str(one["peak_bytes"])) for one in rounds),
        tokens=tuple(rounds[0]["tokens"]),  # type: ignore[call-overload]  # a list of numbers in JSON
    )


def layer_weights(shape: Mapping[str, int]) -> int:
    """Numbers in the matrices of all layers."""
    hidden = shape["hidden_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    one = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * one


def step_bytes(row: Row, shape: Mapping[str, int], context: int) -> float:
    """Bytes that one decode step has to read: every matrix, the head once, and the cache."""
    weights = layer_weights(shape) + shape["vocab_size"] * shape["hidden_size"]
    slot = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return (weights * row.weight_bits + context * slot * row.cache_bits) / 8


def prompt_operations(shape: Mapping[str, int], tokens: int) -> int:
    """Multiplications and additions with weights in a prompt, whose last token alone meets the head."""
    return 2 * (layer_weights(shape) * tokens + shape["vocab_size"] * shape["hidden_size"])


def speed_table(
    rows: Sequence[Row],
    speeds: Mapping[str, Speed],
    conversions: Mapping[str, Conversion],
    failures: Mapping[str, str],
    rates: Rates,
    shape: Mapping[str, int],
    context: int,
) -> str:
    """A line a configuration: speeds, shares of the machine's, memory, times."""
    lines = [
        "| | prefill tokens/s | of float32 GEMM | of INT8 GEMM | decode tokens/s | of read bandwidth | load s "
        "| peak GB, load / use | convert s | convert peak GB | first tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.name in failures:
            lines.append(f"| {row.name} | failed: {failures[row.name]} |" + " |" * 9)
        if (speed := speeds.get(row.name)) is None:
            continue
        operations = prompt_operations(shape, context) / context * speed.prefill_tokens_per_s
        read = step_bytes(row, shape, context) * speed.decode_tokens_per_s
        made = conversions[row.name]
        cells = (
            row.name,
            f"{speed.prefill_tokens_per_s:.0f}",
            f"{operations / rates.float32_ops_per_s:.0%}",
            f"{operations / rates.int8_ops_per_s:.0%}",
            f"{speed.decode_tokens_per_s:.1f}",
            f"{read / rates.read_bytes_per_s:.0%}",
            f"{speed.load_s:.2f}",
            f"{speed.load_peak_bytes / 1e9:.2f} / {speed.peak_bytes / 1e9:.2f}",
            f"{made.seconds:.0f}",
            f"{made.peak_bytes / 1e9:.1f}",
            " ".join(map(str, speed.tokens[:3])),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(rows: Sequence[Row], speeds: Mapping[str, Speed]) -> str:
    """A line for kvgraph against each peer of its group: how many times as fast."""
    lines = ["| | against | prefill | decode | peak memory |", "|---|---|---|---|---|"]
    for group in _GROUPS:
        measured = [row for row in rows if row.group == group and row.name in speeds]
        for ours in (row for row in measured if row.is_ours):
            for peer in (row for row in measured if not row.is_ours):
                mine, theirs = speeds[ours.name], speeds[peer.name]
                lines.append(
                    f"| {ours.name} | {peer.name} "
                    f"| {mine.prefill_tokens_per_s / theirs.prefill_tokens_per_s:.2f} "
                    f"| {mine.decode_tokens_per_s / theirs.decode_tokens_per_s:.2f} "
                    f"| {mine.peak_bytes / theirs.peak_bytes:.2f} |"
                )
    return "\n".join(lines)


def rates_line(rates: Rates, threads: int) -> str:
    """What the shares are shares of."""
    return (
        f"{threads} threads: reads {rates.read_bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{rates.float32_ops_per_s / 1e9:.0f} GFLOP/s in float32 and {rates.int8_ops_per_s / 1e9:.0f} GOP/s in INT8"
    )
