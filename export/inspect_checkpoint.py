"""What a checkpoint holds, and what an export of it would give: from its configuration and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from kvgraph.export.architecture import model_contract
from kvgraph.export.inspect import Inspection, group_contract, size_cache
from kvgraph.export.weight_kinds import Weight, group_weights, part_of, size_parts
from kvgraph.models.checkpoint import Checkpoint, open_checkpoint
from kvgraph.models.config import DTYPES, ModelConfig
from kvgraph.models.encoder_decoder import Model
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import WeightPlan, plan_weights

# What is assumed of a bare config.json that names none; exporting it would need --dtype.
_ASSUMED_DTYPE = "float16"


def inspect_checkpoint(
    source: str | Path, batch_size: int, context: int | None, dtype: str | None, revision: str | None
) -> Inspection:
    """Look into a checkpoint, see `kvgraph.export.inspect.inspect`.

    The weights of a directory or GGUF file are those that it holds, checked against the model. Of a bare config.json
    and of a hub checkpoint, whose weights are not fetched, they are those that an export would write.

    Raises:
        ValueError: The checkpoint is damaged or not known, or an argument is out of its range.
        OSError: It cannot be read or fetched.
    """
    checkpoint = open_checkpoint(source, revision, weights=False)
    config, stored = checkpoint.config, checkpoint.source.kind in ("directory", "gguf")
    dtype = _dtype(checkpoint, config, dtype, stored)
    model = meta_model(config, dtype)
    names = checkpoint.weights().names if stored else ()
    plan = plan_weights(family(config.model_type), model, names)
    kinds = group_weights(_stored(checkpoint, plan) if stored else _planned(model))
    contract = model_contract(model)
    return Inspection(
        kind="checkpoint" if stored else "config",
        path=str(source),
        model_type=config.model_type,
        dtype=dtype,
        config=config.to_json(),
        parts=size_parts(kinds),
        weights=kinds,
        tied_head=model.head.lm_head is None,
        cache=size_cache(contract, batch_size, context),
        contract=group_contract(contract),
        operators=None,
        files=checkpoint.files(),
        targets=(),
        recipe=None,
        source={**asdict(checkpoint.source), "digest": checkpoint.digest(weights=stored)},
        versions={},
    )


def meta_model(config: ModelConfig, dtype: str) -> Model:
    """The module with parameters that have shapes and types and take no memory."""
    torch_dtype = getattr(torch, dtype)
    with torch.device("meta"):
        return family(config.model_type).build(config, Precision(torch_dtype, torch_dtype))


def _dtype(checkpoint: Checkpoint, config: ModelConfig, asked: str | None, stored: bool) -> str:
    if asked is not None:
        if asked not in DTYPES:
            raise ValueError(f"dtype is {asked!r}, expected one of {', '.join(DTYPES)}")
        return asked
    return checkpoint.dtype() if stored else config.dtype or _ASSUMED_DTYPE


def _stored(checkpoint: Checkpoint, plan: WeightPlan) -> Iterator[Weight]:
    """The tensors that the files hold and the model reads."""
    stream = checkpoint.weights()
    stream.check(plan.shapes, plan.ignorable)
    parts: dict[str, str] = {}
    for parameter, source in plan.sources.items():
        for name in source.names:
            # A tensor that is split into several parameters belongs where the first of them does.
            parts.setdefault(name, part_of(parameter))
    for name, shape in plan.shapes.items():
        dtype = str(stream.spec(name).dtype).removeprefix("torch.")
        yield Weight(name, parts[name], dtype, shape)


def _planned(model: Model) -> Iterator[Weight]:
    """The parameters as an export would store them."""
    for name, parameter in model.weights().items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        yield Weight(name, part_of(name), dtype, tuple(parameter.shape))
