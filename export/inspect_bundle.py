"""What a bundle holds. Nothing but the operators of its graphs needs a package beyond the standard library."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from kvgraph.export.bundle import BUNDLE_FILE, TARGETS, Bundle
from kvgraph.export.contract import GraphName, graph_file
from kvgraph.export.inspect import BuiltTarget, Inspection, Operators, group_contract, size_cache
from kvgraph.export.weight_kinds import Weight, group_weights, part_of, size_parts

TARGET_FILE = "target.json"
_STANDARD_DOMAINS = ("", "ai.onnx")


def inspect_bundle(path: Path, batch_size: int, context: int | None) -> Inspection:
    """Look into a bundle, see `kvgraph.export.inspect.inspect`.

    Raises:
        ValueError: The bundle is damaged, or an argument is out of its range.
    """
    bundle = Bundle.open(path)
    kinds = group_weights(
        Weight(name, part_of(name), entry["dtype"], tuple(entry["shape"]), _is_parameter(bundle, name))
        for name, entry in bundle.weights.items()
    )
    sizes = {name: entry.size for name, entry in bundle.files.items()}
    return Inspection(
        kind="bundle",
        path=str(path),
        model_type=bundle.model_type,
        dtype=bundle.dtype,
        config=bundle.config,
        parts=size_parts(kinds),
        weights=kinds,
        tied_head=bool(bundle.config["tie_word_embeddings"]),
        cache=size_cache(bundle.contract, batch_size, context),
        contract=group_contract(bundle.contract),
        operators=_operators(bundle),
        files={BUNDLE_FILE: (path / BUNDLE_FILE).stat().st_size, **sizes},
        targets=find_targets(bundle),
        recipe=bundle.recipe,
        source=bundle.source,
        versions={"kvgraph": bundle.tool_version, **bundle.versions},
        standalone=None if bundle.standalone is None else bundle.standalone.target,
    )


def _is_parameter(bundle: Bundle, name: str) -> bool:
    """Not a scale or a zero point, and not decode's own copy of what prefill has, too."""
    twin = name.replace("decode.", "prefill.", 1) if name.startswith("decode.") else None
    return "role" not in bundle.weights[name] and twin not in bundle.weights


def _operators(bundle: Bundle) -> Mapping[GraphName, Operators] | None:
    if importlib.util.find_spec("onnx") is None:
        return None
    if bundle.standalone is None:
        return {graph: count_operators(bundle.graph_path(graph)) for graph in bundle.contract.graphs}
    # An engine has none that could be told.
    folder = bundle.target_path(bundle.standalone.target)
    built = {graph: folder / graph_file(graph) for graph in bundle.contract.graphs}
    return {graph: count_operators(path) for graph, path in built.items() if path.is_file()}


def count_operators(path: Path) -> Operators:
    """The operators of an ONNX file, whose weights are not read.

    Raises:
        ValueError: It is not an ONNX file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{path}: not an ONNX file ({error}); export the bundle again") from error
    counts = Counter(
        node.op_type if node.domain in _STANDARD_DOMAINS else f"{node.domain}::{node.op_type}"
        for node in model.graph.node
    )
    opset = next(entry.version for entry in model.opset_import if entry.domain in _STANDARD_DOMAINS)
    return Operators(opset, dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def find_targets(bundle: Bundle) -> tuple[BuiltTarget, ...]:
    """Everything that has been built from a bundle, by name.

    Raises:
        ValueError: A target.json is not a JSON object.
    """
    targets = []
    for file in sorted(bundle.path.glob(f"{TARGETS}/[!.]*/{TARGET_FILE}")):
        try:
            description = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not valid JSON ({error}); build the target again") from error
        if not isinstance(description, dict):
            raise ValueError(f"{file}: holds no JSON object; build the target again")
        current = description.get("bundle_digest") == bundle.digest()
        files = {
            entry.name: entry.stat().st_size for entry in sorted(file.parent.iterdir()) if entry.is_file()
        }
        targets.append(BuiltTarget(file.parent.name, current, description, files))
    return tuple(targets)
