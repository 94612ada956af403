"""`kvgraph inspect CHECKPOINT | BUNDLE | config.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvgraph.table import format_table

if TYPE_CHECKING:
    from kvgraph.export.inspect import BuiltTarget, Inspection, TensorGroup

NAME = "inspect"
HELP = "show what a checkpoint or a bundle holds: parameters, cache, operators, files"

# Of target.json; what is longer (contract, shapes) is left to --json.
_LONGEST_VALUE = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "source",
        metavar="CHECKPOINT|BUNDLE|config.json",
        help="Hugging Face directory, GGUF file, hub id, config.json, or a bundle",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="size the cache for N rows (1)")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="size the cache for N tokens a row (all that the model allows)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the cache that a checkpoint would be exported with (the checkpoint's)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Inspect and print."""
    from kvgraph.export.inspect import inspect

    found = inspect(
        args.source, batch_size=args.batch, context=args.context, dtype=args.dtype, revision=args.revision
    )
    print(json.dumps(found.to_json(), indent=1, ensure_ascii=False) if args.json else render(found))
    return 0


def render(found: Inspection) -> str:
    """An inspection as text: a few tables under headings."""
    return "\n\n".join(text for text in _sections(found) if text)


def _sections(found: Inspection) -> Iterator[str]:
    yield _summary(found)
    yield _parameters(found)
    yield _weights(found)
    yield _cache(found)
    yield _contract(found.contract)
    yield _operators(found)
    yield _files(found.files)
    yield _targets(found.targets)


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    return format_table([(title, *header), *((f"  {row[0]}", *row[1:]) for row in rows)], align)


def _summary(found: Inspection) -> str:
    source = " ".join(str(value) for key, value in found.source.items() if value and key != "digest")
    rows = [("kind", found.kind), ("model_type", found.model_type), ("dtype", found.dtype)]
    rows += [("source", source), ("digest", found.source["digest"])]
    if found.standalone is not None:
        rows.append(("holds", f"the target {found.standalone} alone"))
    if found.recipe is not None:
        names = [f"{graph} {recipe['name']}" for graph, recipe in found.recipe.items()]
        rows.append(("recipe", ", ".join(names)))
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))]
    return _section(found.path, (), [row for row in rows if row[1]], "ll")


def _parameters(found: Inspection) -> str:
    rows = []
    for part in found.parts:
        note = "the embedding table" if part.name == "head" and found.tied_head else ""
        rows.append([part.name, _number(part.parameters), f"{part.share:.2%}", _number(part.nbytes), note])
    rows.append(["total", _number(found.parameters), f"{1:.2%}", _number(found.nbytes)])
    return _section("parameters", ("count", "share", "bytes"), rows, "lrrrl")


def _weights(found: Inspection) -> str:
    rows = [
        (
            kind.name,
            kind.dtype,
            _shape(kind.shape),
            _number(kind.count),
            _number(kind.parameters),
            _number(kind.nbytes),
        )
        for kind in found.weights
    ]
    return _section("weights", ("dtype", "shape", "tensors", "parameters", "bytes"), rows, "lllrrr")


def _cache(found: Inspection) -> str:
    cache = found.cache
    whole = f"batch {cache.batch_size}, context {_number(cache.context)}"
    rows = [("per token", _number(cache.bytes_per_token)), (whole, _number(cache.nbytes))]
    if cache.bytes_per_source_token:
        rows.append(("per token of a source", _number(cache.bytes_per_source_token)))
    return _section(f"cache, {', '.join(cache.dtypes)}", ("bytes",), rows, "lr")


def _contract(groups: Sequence[TensorGroup]) -> str:
    rows = [
        (
            f"{group.graph}, {group.direction}",
            group.name,
            group.dtype,
            _shape(group.shape),
            _number(group.count),
        )
        for group in groups
    ]
    return _section("contract", ("tensor", "dtype", "shape", "tensors"), rows, "llllr")


def _operators(found: Inspection) -> str:
    if found.kind != "bundle" or found.operators == {}:
        return ""
    if found.operators is None:
        return "operators\n  onnx is not installed; to count them install kvgraph[export]"
    graphs = list(found.operators.items())
    names = dict.fromkeys(name for _, operators in graphs for name in operators.counts)
    rows = [(name, *(_number(operators.counts.get(name, 0)) for _, operators in graphs)) for name in names]
    rows.append(("total", *(_number(sum(operators.counts.values())) for _, operators in graphs)))
    rows.append(("opset", *(str(operators.opset) for _, operators in graphs)))
    return _section("operators", [graph for graph, _ in graphs], rows, "l" + "r" * len(graphs))


def _files(files: Mapping[str, int]) -> str:
    rows = [(name, _number(size)) for name, size in files.items()]
    return _section("files", ("bytes",), [*rows, ("total", _number(sum(files.values())))], "lr")


def _targets(targets: Sequence[BuiltTarget]) -> str:
    sections = []
    for target in targets:
        state = "yes" if target.current else "no, the bundle has changed since; build it again"
        texts = {key: _text(value) for key, value in target.description.items()}
        rows = [("current", state)]
        rows += [(key, text) for key, text in texts.items() if len(text) <= _LONGEST_VALUE]
        rows += [(name, f"{_number(size)} bytes") for name, size in target.files.items()]
        sections.append(_section(f"target {target.name}", (), rows, "ll"))
    return "\n\n".join(sections)


def _number(value: int) -> str:
    return f"{value:,}"


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(dim) for dim in shape)}]"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
