"""A checkpoint as a module in eager torch, every weight read."""

from __future__ import annotations

import torch
from torch import nn

from kvgraph.export.parameter_rows import ParameterRows
from kvgraph.export.weight_bytes import check_tied
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.encoder_decoder import Model
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import plan_weights


def load_module(checkpoint: Checkpoint, dtype: str = "float32", residual_dtype: str | None = None) -> Model:
    """The module of a checkpoint on the CPU.

    Args:
        checkpoint: From `open_checkpoint`.
        dtype: Of weights and activations.
        residual_dtype: Of the residual stream, default `dtype`.

    Raises:
        ValueError: The checkpoint is damaged or does not fit its config.
    """
    config = checkpoint.config
    precision = Precision(getattr(torch, dtype), getattr(torch, residual_dtype or dtype))
    with torch.device("meta"):
        model = family(config.model_type).build(config, precision)
    stream = checkpoint.weights()
    plan = plan_weights(family(config.model_type), model, stream.names)
    stream.check(plan.shapes, plan.ignorable)
    check_tied(stream, plan)
    names, rows = model.names(), ParameterRows(stream, plan.sources)
    for path in [path for path, _ in model.named_parameters()]:
        owner, _, attribute = path.rpartition(".")
        unset, name = model.get_parameter(path), names[path]
        values = torch.cat(list(rows.pieces(name, unset.dtype))).view(unset.shape)
        # A module that several pieces share gets it in all of them.
        setattr(model.get_submodule(owner), attribute, nn.Parameter(values, False))
    return model.requires_grad_(False)
