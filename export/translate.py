"""The ONNX half of `kvgraph.models.ops`: each custom operator becomes one node of the standard domain, or a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.values import Opset

# Importing the module registers the operators that the table names.
from kvgraph.models.ops import LOG2_E

OPSET = 24
op = Opset("", OPSET)


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    # Only the first output exists in our form: the others return a past that this contract does not pass in.
    return op.Attention(query, key, value, mask, scale=scale)[0]


def _rotary_embedding(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    rotated_size = 2 * cos.shape[-1]
    partial = rotated_size if rotated_size != x.shape[-1] else 0
    return op.RotaryEmbedding(x, cos, sin, interleaved=int(interleaved), rotary_embedding_dim=partial)


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return op.RMSNormalization(x, weight, axis=-1, epsilon=eps)


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    # Its other outputs are the mean and the deviation.
    return op.LayerNormalization(x, weight, bias, axis=-1, epsilon=eps)[0]


def _row_scale(x: Any) -> Any:
    magnitude = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-1]), keepdims=1)
    largest = op.Max(magnitude, op.Constant(value_float=1.0))
    exponent = op.Ceil(op.Mul(op.Log(largest), op.Constant(value_float=LOG2_E)))
    return op.Pow(op.Constant(value_float=2.0), exponent)


def _tensor_scatter(past: Any, update: Any, past_length: Any) -> Any:
    return op.TensorScatter(past, update, past_length, axis=2)


def _gather_rows(x: Any, indices: Any) -> Any:
    last = op.Constant(value_ints=[-1])
    return op.GatherND(x, op.Unsqueeze(indices, last), batch_dims=1)


def _tied_head(x: Any, embedding: Any) -> Any:
    # Gemm reads the table as it lies; a Transpose would make ONNX Runtime keep a second copy of it.
    return op.Gemm(x, embedding, transB=1)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export` takes as `custom_translation_table`."""
    namespace = torch.ops.kvgraph
    return {
        namespace.attention.default: _attention,
        namespace.rotary_embedding.default: _rotary_embedding,
        namespace.rms_norm.default: _rms_norm,
        namespace.layer_norm.default: _layer_norm,
        namespace.row_scale.default: _row_scale,
        namespace.tensor_scatter.default: _tensor_scatter,
        namespace.gather_rows.default: _gather_rows,
        namespace.tied_head.default: _tied_head,
    }
