"""Tracing costs by the kinds of layer and not by their number."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from kvgraph.export import trace as tracing
from kvgraph.export.assemble import assemble
from kvgraph.export.decoder_contract import decoder_contract
from kvgraph.export.trace import Argument, TracedDecoder, fake_model, trace_decoder
from kvgraph.export.weights_file import plan_layout
from kvgraph.models.config import ModelConfig
from kvgraph.models.decoder import Decoder
from kvgraph.models.layers import Precision

FLOAT32 = Precision(torch.float32, torch.float32)


@pytest.fixture(scope="module")
def config_json(tiny_llama: Callable[..., Path]) -> dict[str, Any]:
    return json.loads((tiny_llama() / "config.json").read_text())


def decoder_of(config_json: dict[str, Any], layers: int, use: Callable[[Decoder], Any]) -> Any:
    config = ModelConfig.from_hf({**config_json, "num_hidden_layers": layers})
    with fake_model(config, FLOAT32) as decoder:
        return use(decoder)


@pytest.fixture(scope="module")
def pieces(config_json: dict[str, Any], quick_tracing: None) -> dict[type[nn.Module], ir.Graph]:
    """The traced pieces of a decode graph by their module."""
    found: dict[type[nn.Module], ir.Graph] = {}

    def recorded(module: nn.Module, arguments: Sequence[Argument]) -> ir.Graph:
        found[type(module)] = original(module, arguments)
        return found[type(module)]

    original = tracing.trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", recorded)
        decoder_of(config_json, 2, lambda decoder: trace_decoder(decoder, "decode"))
    return found


@pytest.fixture
def calls(pieces: dict[type[nn.Module], ir.Graph], monkeypatch: pytest.MonkeyPatch) -> list[type[nn.Module]]:
    """What is given to the tracer from here on; it gives what it found before."""
    made: list[type[nn.Module]] = []

    def counted(module: nn.Module, arguments: Sequence[Argument]) -> ir.Graph:
        made.append(type(module))
        return pieces[type(module)]

    monkeypatch.setattr(tracing, "trace", counted)
    return made


@pytest.mark.parametrize("layers", [1, 2, 80])
def test_number_of_traces_does_not_depend_on_the_number_of_layers(
    config_json: dict[str, Any], calls: list[type[nn.Module]], layers: int
) -> None:
    decoder_of(config_json, layers, lambda decoder: trace_decoder(decoder, "decode"))
    assert [call.__name__ for call in calls] == ["Prelude", "SequentialLayer", "Head"]


def assembled(decoder: Decoder, traced: TracedDecoder) -> ir.Model:
    layout = plan_layout(
        {name: ("float32", tuple(weight.shape)) for name, weight in decoder.weights().items()}
    )
    constants = {name: ir.tensor([0.0] * 4, name=name) for name in decoder.prelude.constants}
    return assemble(traced, "decode", decoder_contract(decoder), layout, constants)


def sizes(config_json: dict[str, Any], layers: int) -> tuple[int, int, int]:
    """Nodes, weights and small constants of a decode graph."""

    def count(decoder: Decoder) -> tuple[int, int, int]:
        graph = assembled(decoder, trace_decoder(decoder, "decode")).graph
        external = [
            value for value in graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)
        ]
        return len(graph), len(external), len(graph.initializers) - len(external)

    return decoder_of(config_json, layers, count)


def test_a_layer_more_adds_its_own_nodes_and_weights_and_no_constants(
    config_json: dict[str, Any], calls: list[type[nn.Module]], pieces: dict[type[nn.Module], ir.Graph]
) -> None:
    (layer,) = (graph for module, graph in pieces.items() if module.__name__ == "SequentialLayer")
    few, many = sizes(config_json, 2), sizes(config_json, 80)
    assert many[0] - few[0] == 78 * len(layer)
    # Seven matrices and two norms.
    assert many[1] - few[1] == 78 * 9
    assert many[2] == few[2]


def test_every_layer_reads_its_own_weights_and_cache(
    config_json: dict[str, Any], calls: list[type[nn.Module]]
) -> None:
    def check(decoder: Decoder) -> None:
        graph = assembled(decoder, trace_decoder(decoder, "decode")).graph
        for layer in range(80):
            inside = [node for node in graph if (node.name or "").startswith(f"layers.{layer}/")]
            read = {value.name or "" for node in inside for value in node.inputs if value is not None}
            own = [name for name in read if name.startswith(("model.layers.", "past_key_values."))]
            assert len(own) == 11
            assert {name.split(".")[2 if name.startswith("model") else 1] for name in own} == {str(layer)}
            assert f"hidden_states.{layer}" in read

    decoder_of(config_json, 80, check)


def test_fake_model_holds_no_weights(config_json: dict[str, Any]) -> None:
    """A model of 80 layers and 70 billion parameters is built at once."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "head_dim": 128}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    count = decoder_of(
        {**config_json, **large, **heads},
        80,
        lambda decoder: sum(weight.numel() for weight in decoder.weights().values()),
    )
    assert count == 70_553_706_496
