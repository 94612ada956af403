"""What bundle.json says twice has to be the same twice: an edited file would misplace the cache without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraph.export.contract import Contract

DTYPES = ("float32", "float16", "bfloat16")
_MEND = "restore the file, or export the bundle again"


def check_consistent(
    file: Path, config: Mapping[str, Any], dtype: str, residual_dtype: str, contract: Contract
) -> None:
    """Compare the contract of a bundle with its config and its types.

    Args:
        file: bundle.json, for the message.
        config: `ModelConfig.to_json()`.
        dtype: Type of weights and activations.
        residual_dtype: Type of the residual stream.
        contract: What the graphs promise.

    Raises:
        ValueError: Names the field, what it is and what the others say.
    """
    for name, value in (("dtype", dtype), ("residual_dtype", residual_dtype)):
        if value not in DTYPES:
            raise ValueError(f"{file}: {name} is {value!r}, expected one of {', '.join(DTYPES)}; {_MEND}")
    for name, ours, key in (
        ("num_layers", contract.num_layers, "num_hidden_layers"),
        ("vocab_size", contract.vocab_size, "vocab_size"),
    ):
        if key in config and config[key] != ours:
            raise _error(file, f"contract.{name}", ours, f"config.{key}", config[key])
    _check_positions(file, config, contract)
    _check_state(file, dtype, contract)


def _check_positions(file: Path, config: Mapping[str, Any], contract: Contract) -> None:
    known, ours = config.get("max_position_embeddings"), contract.max_positions
    if contract.encoder is not None or known is None:  # a decoder's own length has a name of its own there
        return
    rope = config.get("rope")
    stretched = isinstance(rope, Mapping) and rope.get("factor") is not None
    if ours != known and not (stretched and isinstance(ours, int) and ours > known):
        raise _error(file, "contract.max_positions", ours, "config.max_position_embeddings", known)


def _check_state(file: Path, dtype: str, contract: Contract) -> None:
    owners = [(tensor.layer, tensor.role) for tensor in contract.state]
    expected = [(layer, role) for layer in range(contract.num_layers) for role in ("key", "value")]
    if owners != expected:
        layers = len({layer for layer, _ in owners})
        raise ValueError(
            f"{file}: contract.state holds {len(owners)} tensors of {layers} layers, expected a key and a value of "
            f"each of contract.num_layers, {contract.num_layers}, in order; {_MEND}"
        )
    for tensor in contract.state:
        # An 8-bit cache, in delta form, has a type of its own.
        if tensor.form == "scatter" and tensor.dtype != dtype:
            raise _error(file, f"dtype of {tensor.name}", tensor.dtype, "dtype", dtype)
        if tensor.capacity is not None and tensor.capacity > contract.max_positions:
            raise _error(
                file,
                f"capacity of {tensor.name}",
                tensor.capacity,
                "contract.max_positions",
                contract.max_positions,
            )


def _error(file: Path, name: str, value: object, other: str, expected: object) -> ValueError:
    return ValueError(f"{file}: {name} is {value!r}, {other} {expected!r}; {_MEND}")
