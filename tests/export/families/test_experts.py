"""Which weights of experts the graphs read, and what becomes of them for a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from family_cases import experts

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.targets.ort_cpu_graph import lower_to_kernels


def consumers(path: Path) -> dict[str, set[str]]:
    """What kinds of operators read each parameter of experts."""
    model = onnx.load(path, load_external_data=False)
    read: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            if ".experts." in name:
                read.setdefault(name, set()).add(node.op_type)
    return read


@pytest.mark.parametrize("name", [case.name for case in experts.CASES])
def test_decode_gathers_the_weights_of_chosen_experts_alone(name: str, bundle: Bundle) -> None:
    decode, prefill = (consumers(bundle.graph_path(graph)) for graph in ("decode", "prefill"))
    assert decode.keys() == prefill.keys()
    assert decode
    assert set.union(*decode.values()) == {"Gather"}
    assert set.union(*prefill.values()) == {"Gather" if name == experts.GROUPED else "MatMul"}


@pytest.mark.parametrize("name", [case.name for case in experts.CASES])
def test_experts_of_a_layer_are_one_operator_for_a_cpu(name: str, bundle: Bundle) -> None:
    layers = sum(weight.endswith("experts.down_proj.weight") for weight in bundle.weights)
    for graph in GRAPHS:
        model = lower_to_kernels(ir.load(bundle.graph_path(graph)))
        counts = Counter(node.op_type for node in model.graph)
        assert counts["PackedExperts"] == layers
        assert not {"Gather", "MatMul", "ScatterElements", "Where"} & set(counts)
