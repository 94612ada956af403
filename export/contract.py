"""The graph contract: the only place that spells the name of a graph's input or output.

Letters used in shapes everywhere: B batch, S new tokens, N rows that reach the head, T cache capacity,
K key/value heads, D head dimension, V vocabulary, E hidden size, C tokens of a source.

| graph | tensor | shape, dtype | meaning |
|---|---|---|---|
| both, in | `input_ids` | [B, S] int64 | the new tokens; decode: S = 1 |
| both, in | `past_length` | [B] int64 | tokens already in each row's cache: write position and first position |
| both, in | `new_length` | [B] int64 | valid new tokens; only where the rotary base depends on the total |
| prefill, in | `logit_positions` | [B, N] int64 | which of the S new tokens reach the head |
| both, in | `past_key_values.{i}.key`, `.value` | [B, K, T, D] | the whole cache buffer of layer i |
| both, out | `logits` | [B, N, V] float32 | decode: N = 1 |
| both, out | `present.{i}.key`, `.value` | [B, K, T, D] | scatter form: the same buffer |

An encoder-decoder model has a third graph, `encode`, which is run once for each source. "Both" are prefill and decode.

| graph | tensor | shape, dtype | meaning |
|---|---|---|---|
| encode, in | `input_ids` | [B, C] int64 | the sources; shorter rows are padded on the right |
| encode, both, in | `encoder_length` | [B] int64 | tokens of each row's source, at least 1 |
| encode, out; both, in | `cross.{i}.key`, `.value` | [B, K, C, D] | what layer i of the decoder reads of the source |

A state tensor has a *form*. `scatter`: the graph writes the new entries into the buffer and returns the buffer.
`delta`: the graph reads the buffer and returns only the new entries, [B, K, S, D]; the runtime writes them at
`past_length`. A reader that meets a form it does not know refuses the bundle.

This module imports neither torch nor onnx: the runtime and the exporter both ask it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

GraphName = Literal["prefill", "decode", "encode"]
# The graphs that every model has; `Contract.graphs` are those of one model.
GRAPHS: tuple[GraphName, GraphName] = ("prefill", "decode")
ENCODE: GraphName = "encode"

INPUT_IDS = "input_ids"
PAST_LENGTH = "past_length"
NEW_LENGTH = "new_length"
LOGIT_POSITIONS = "logit_positions"
ENCODER_LENGTH = "encoder_length"
LOGITS = "logits"
# Exists in TensorRT engines only: how much of the cache a step attends to.
CONTEXT_LENGTH = "context_length"

BATCH, NEW_TOKENS, LOGIT_ROWS, CAPACITY, SOURCE_TOKENS = "B", "S", "N", "T", "C"

STATE_FORMS = ("scatter", "delta")

Dim = str | int


def graph_file(graph: GraphName) -> str:
    """File name of a graph inside a bundle."""
    return f"{graph}.onnx"


def past_key(layer: int) -> str:
    """Input name of a layer's key cache."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Input name of a layer's value cache."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """Output name of a layer's key cache."""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """Output name of a layer's value cache."""
    return f"present.{layer}.value"


def cross_key(layer: int) -> str:
    """Name of the keys that a layer of the decoder reads of the source."""
    return f"cross.{layer}.key"


def cross_value(layer: int) -> str:
    """Name of the values that a layer of the decoder reads of the source."""
    return f"cross.{layer}.value"


def encoder_hidden_state(layer: int) -> str:
    """Name of the residual stream that enters layer `layer` of the encoder; the last one leaves its last layer."""
    return f"encoder_hidden_states.{layer}"


def hidden_state(layer: int) -> str:
    """Name of the residual stream that enters layer `layer`; the last one, `num_layers`, leaves the last layer."""
    return f"hidden_states.{layer}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, ONNX-style dtype ("int64", "float16", ...) and shape (letters are symbolic) of a graph tensor."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that lives from step to step.

    Attributes:
        name: Input name, as `past_key(i)`.
        output: Output name, as `present_key(i)`.
        layer: The layer that owns it.
        role: "key" or "value".
        form: "scatter" or "delta", see the module docstring.
        dtype: Element type of the buffer.
        shape: Buffer dimensions, ("B", K, "T", D) with T a number where the capacity is written in.
    """

    name: str
    output: str
    layer: int
    role: Literal["key", "value"]
    form: Literal["scatter", "delta"]
    dtype: str
    shape: tuple[Dim, Dim, Dim, Dim]

    @property
    def capacity(self) -> int | None:
        """Slots of the buffer where the graph fixes them, else None."""
        return self.shape[2] if isinstance(self.shape[2], int) else None

    @property
    def output_shape(self) -> tuple[Dim, ...]:
        """Shape of the output: the buffer (scatter), or the new entries alone (delta)."""
        if self.form == "scatter":
            return self.shape
        return (self.shape[0], self.shape[1], NEW_TOKENS, self.shape[3])


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Inputs and outputs of one graph, in order."""

    name: GraphName
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class EncoderContract:
    """What the encoder of an encoder-decoder model promises.

    Attributes:
        vocab_size: Valid ids of a source are 0 <= id < vocab_size.
        max_positions: Most tokens of a source.
        cross: What the encoder gives and the decoder reads: key before value, layer by layer of the decoder.
    """

    vocab_size: int
    max_positions: int
    cross: tuple[TensorSpec, ...]

    @property
    def length(self) -> TensorSpec:
        """The input that says how long each source is."""
        return TensorSpec(ENCODER_LENGTH, "int64", (BATCH,))

    @property
    def graph(self) -> GraphSpec:
        """Inputs and outputs of `encode`."""
        source = TensorSpec(INPUT_IDS, "int64", (BATCH, SOURCE_TOKENS))
        return GraphSpec(ENCODE, (source, self.length), self.cross)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EncoderContract:
        """Read what `Contract.to_json` wrote."""
        cross = tuple(TensorSpec(**{**entry, "shape": tuple(entry["shape"])}) for entry in data["cross"])
        return cls(**{**data, "cross": cross})


@dataclass(frozen=True, slots=True)
class Contract:
    """What the graphs of a model promise to whoever runs them.

    Attributes:
        vocab_size: V; valid token ids are 0 <= id < V.
        num_layers: Layers of the decoder.
        max_positions: Highest position + 1 that the model knows.
        takes_new_length: Whether both graphs take `new_length`.
        state: Every state tensor, key before value, layer by layer.
        encoder: What the encoder promises; None of a decoder-only model.
    """

    vocab_size: int
    num_layers: int
    max_positions: int
    takes_new_length: bool
    state: tuple[StateTensor, ...]
    encoder: EncoderContract | None = None

    @property
    def graphs(self) -> tuple[GraphName, ...]:
        """The graphs that the model has, in the order in which they run."""
        return GRAPHS if self.encoder is None else (ENCODE, *GRAPHS)

    @property
    def capacity(self) -> int | None:
        """Cache slots where they are written into the graphs, else None (the buffer may grow)."""
        return next((tensor.capacity for tensor in self.state if tensor.capacity is not None), None)

    def graph(self, name: GraphName) -> GraphSpec:
        """Inputs and outputs of a graph, in the order of the ONNX file."""
        if name == ENCODE:
            assert self.encoder is not None, "a decoder-only model has no such graph"
            return self.encoder.graph
        prefill = name == "prefill"
        new_tokens: Dim = NEW_TOKENS if prefill else 1
        rows: Dim = LOGIT_ROWS if prefill else 1
        inputs = [
            TensorSpec(INPUT_IDS, "int64", (BATCH, new_tokens)),
            TensorSpec(PAST_LENGTH, "int64", (BATCH,)),
        ]
        if self.takes_new_length:
            inputs.append(TensorSpec(NEW_LENGTH, "int64", (BATCH,)))
        if prefill:
            inputs.append(TensorSpec(LOGIT_POSITIONS, "int64", (BATCH, LOGIT_ROWS)))
        inputs += [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in self.state]
        if self.encoder is not None:
            inputs += [self.encoder.length, *self.encoder.cross]
        outputs = [TensorSpec(LOGITS, "float32", (BATCH, rows, self.vocab_size))]
        for tensor in self.state:
            shape = tuple(new_tokens if dim == NEW_TOKENS else dim for dim in tensor.output_shape)
            outputs.append(TensorSpec(tensor.output, tensor.dtype, shape))
        return GraphSpec(name, tuple(inputs), tuple(outputs))

    def to_json(self) -> dict[str, Any]:
        """The contract as plain JSON values; `encoder` only where there is one."""
        data = asdict(self)
        return data if self.encoder is not None else {key: data[key] for key in data if key != "encoder"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """Read what `to_json` wrote.

        Raises:
            ValueError: A state tensor has a form that this version does not know.
        """
        state = []
        for entry in data["state"]:
            if entry["form"] not in STATE_FORMS:
                raise ValueError(
                    f"state tensor {entry['name']!r} has form {entry['form']!r}, this version of kvgraph knows "
                    f"{', '.join(STATE_FORMS)}; install the kvgraph that made the bundle"
                )
            state.append(StateTensor(**{**entry, "shape": tuple(entry["shape"])}))
        encoder = data.get("encoder")
        read = None if encoder is None else EncoderContract.from_json(encoder)
        return cls(**{**data, "state": tuple(state), "encoder": read})


def scatter_state(
    kv_shapes: Sequence[tuple[int, int]], dtype: str, capacity: int | None = None
) -> tuple[StateTensor, ...]:
    """State tensors of a float cache in scatter form.

    Args:
        kv_shapes: (K, D) of each layer.
        dtype: "float32", "float16" or "bfloat16".
        capacity: T as a number, or None to leave it symbolic.
    """
    slots: Dim = CAPACITY if capacity is None else capacity
    state = []
    for layer, (heads, head_dim) in enumerate(kv_shapes):
        shape = (BATCH, heads, slots, head_dim)
        state.append(StateTensor(past_key(layer), present_key(layer), layer, "key", "scatter", dtype, shape))
        state.append(
            StateTensor(past_value(layer), present_value(layer), layer, "value", "scatter", dtype, shape)
        )
    return tuple(state)


def cross_tensors(kv_shapes: Sequence[tuple[int, int]], dtype: str) -> tuple[TensorSpec, ...]:
    """What the encoder gives to the layers of the decoder, whose cross-attention has (K, D) each."""
    return tuple(
        TensorSpec(name, dtype, (BATCH, heads, SOURCE_TOKENS, head_dim))
        for layer, (heads, head_dim) in enumerate(kv_shapes)
        for name in (cross_key(layer), cross_value(layer))
    )
