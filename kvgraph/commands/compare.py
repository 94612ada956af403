"""`kvgraph compare BUNDLE [--checkpoint CHECKPOINT | --against BUNDLE]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.commands.perplexity import read_text
from kvgraph.files import check_folder
from kvgraph.thread_arguments import add_thread_arguments, threads_of

if TYPE_CHECKING:
    from kvgraph.export.bundle import Bundle
    from kvgraph.export.contract import GraphName
    from kvgraph.runtime.parity_bands import Band
    from kvgraph.runtime.parity_report import ParityReport
    from kvgraph.runtime.session import Ids, Session
    from kvgraph.runtime.threads import Threads

NAME = "compare"
HELP = "compare a bundle with its checkpoint, or with another bundle, step by step over the same tokens"

_PREFILL, _STEPS = 32, 64
# Of unequal length, so that rows are padded and end at different steps.
_TEXTS = (
    "The lighthouse keeper counted the ships every evening, and wrote the number into a thick green book. One day "
    "there were none at all, so he walked down to the harbour to ask why. The sailors laughed, because it was the "
    "first warm Sunday of the year, and all of them were at home in their gardens, planting beans and onions.",
    "A small robot wanted to learn how to bake bread. It mixed flour, water and salt, and waited for an hour, but "
    "nothing happened. Then the baker told it about yeast.",
    "Rain fell on the roof all night long.",
)
_SEED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle to judge")
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument(
        "--checkpoint",
        help="run this checkpoint in PyTorch as the reference (without --against: the one that the bundle was "
        "exported from, as bundle.json names it)",
    )
    reference.add_argument("--against", metavar="BUNDLE", help="take another bundle as the reference")
    parser.add_argument("--against-target", metavar="NAME", help="a target of it, in place of its own graphs")
    parser.add_argument("--target", metavar="NAME", help="judge this target of the bundle")
    parser.add_argument(
        "--text", metavar="FILE", help="compare over this UTF-8 text (a few built-in sentences)"
    )
    parser.add_argument(
        "--target-text",
        metavar="FILE",
        help="for a model with an encoder, whose source is --text: what the decoder is forced along (what the "
        "reference writes)",
    )
    parser.add_argument(
        "--prefill", type=int, default=_PREFILL, metavar="N", help=f"tokens of the prefill ({_PREFILL})"
    )
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="most tokens of one prefill call (all)"
    )
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help=f"tokens decoded one by one ({_STEPS})"
    )
    parser.add_argument(
        "--layers", action="store_true", help="compare the hidden state after every layer, too"
    )
    add_thread_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the errors as PNG")
    parser.add_argument(
        "--save-polygraphy",
        metavar="DIR",
        help="write inputs and reference outputs of chosen steps as Polygraphy JSON",
    )


def run(args: argparse.Namespace) -> int:
    """Compare, print the report, and give 0 in band or 1 out of it."""
    from kvgraph.compare_sources import compare_sources
    from kvgraph.export.bundle import Bundle
    from kvgraph.runtime.encoder_session import has_encoder
    from kvgraph.runtime.parity import compare_sessions

    for file in (args.json, args.plot):
        if file is not None:
            check_folder(file)
    bundle = Bundle.open(args.bundle)
    if args.save_polygraphy is not None:
        bundle.require_whole("--save-polygraphy")
    threads = threads_of(args)
    candidate = _open_bundle(bundle, args.target, args.layers, threads)
    other = None if args.against is None else Bundle.open(args.against)
    if other is not None:
        reference = _open_bundle(other, args.against_target, args.layers, threads)
    elif args.against_target is None:
        reference = _open_checkpoint(args, bundle)
    else:
        raise ValueError(
            "--against-target names a target of --against, which is missing; give both, or neither"
        )
    band = _band(candidate, bundle, *([] if other is None else [other]))
    same_basis = bundle.is_rotated == (other is not None and other.is_rotated)
    if args.layers and not same_basis:
        raise ValueError(
            "--layers compares the residual stream, which one of the two has rotated; leave it out, or compare rotated "
            "bundles with each other"
        )
    if has_encoder(reference) and has_encoder(candidate):
        if bundle.residual_dtype == "float16" and other is None:
            print("overflow   not looked for: the residual stream is measured of models without an encoder")
        texts = _TEXTS if args.text is None else (read_text(args.text),)
        return _report(args, compare_sources(args, bundle, reference, candidate, texts, band))
    if args.target_text is not None:
        raise ValueError(
            "--target-text is for models with an encoder; leave it out: others are forced along --text"
        )
    sequences = _sequences(args, bundle, reference, candidate)
    report = compare_sessions(
        reference,
        candidate,
        sequences,
        prefill=args.prefill,
        band=band,
        chunk=args.prefill_chunk,
        layers=args.layers,
        values=same_basis,
    )
    code = _report(args, _with_overflow(report, bundle, reference, sequences))
    if args.save_polygraphy is not None:
        _save_polygraphy(args, bundle, report, reference, candidate, sequences)
    return code


def _with_overflow(
    report: ParityReport, bundle: Bundle, reference: Session, sequences: Sequence[Sequence[int] | Ids]
) -> ParityReport:
    """The report, with what a float16 residual stream of the bundle does not hold of the checkpoint's."""
    if bundle.residual_dtype != "float16" or reference.info.runtime != "torch":
        return report
    from kvgraph.export.residual_range import session_residual_range
    from kvgraph.float16_range import find_overflow

    return replace(report, overflow=find_overflow(session_residual_range(reference, sequences), bundle.dtype))


def _report(args: argparse.Namespace, report: ParityReport) -> int:
    """Print a report and write what was asked for; 0 in band or 1 out of it."""
    from kvgraph.runtime.parity_table import format_report

    print(format_report(report))
    _write_files(args, report)
    return 0 if report.in_band else 1


def _open_checkpoint(args: argparse.Namespace, bundle: Bundle) -> Session:
    """PyTorch in float32 on the checkpoint that was named, or else on the one that was exported.

    Float32 whatever the bundle's type: an error then is all of the bundle's and none of the reference's.
    """
    from kvgraph.export.torch_encoder_session import open_torch_session
    from kvgraph.models.checkpoint import open_checkpoint

    if args.checkpoint is not None:
        return open_torch_session(open_checkpoint(args.checkpoint), "float32")
    name, revision = bundle.source["name"], bundle.source["revision"]
    if bundle.source["kind"] in ("directory", "gguf") and not Path(name).exists():
        raise FileNotFoundError(
            f"{name}: the checkpoint that was exported is not there any more; name it with --checkpoint, or compare "
            "with another bundle by --against"
        )
    checkpoint = open_checkpoint(name, revision)
    if checkpoint.digest() != bundle.source["digest"]:
        raise ValueError(
            f"{name}: changed since it was exported; export it again, or name it with --checkpoint"
        )
    return open_torch_session(checkpoint, "float32")


def _open_bundle(bundle: Bundle, target: str | None, layers: bool, threads: Threads | None) -> Session:
    from kvgraph.runtime.open import open_session, ort_session
    from kvgraph.runtime.target import Target

    if not layers:
        return open_session(bundle, target, threads=threads)
    bundle.require_whole("--layers")
    if target not in (None, "ort-cpu"):
        raise ValueError(
            f"--layers compares ONNX graphs on a CPU, target {target!r} is none; leave out one of the two"
        )
    bundle.verify_graphs()
    graphs = _with_hidden_states(bundle, _graph_paths(bundle, target))
    contract = None if target is None else Target.open(bundle, target).contract
    return ort_session(bundle)(
        bundle, threads=threads, debug_outputs=True, graphs=graphs, contract=contract, target=target
    )


def _graph_paths(bundle: Bundle, target: str | None) -> dict[GraphName, Path]:
    """The ONNX files: of a target for ONNX Runtime its own, else the canonical ones."""
    from kvgraph.runtime.open import ORT_CPU
    from kvgraph.runtime.target import Target

    owner = Target.open(bundle, ORT_CPU) if target == ORT_CPU else bundle
    return {graph: owner.graph_path(graph) for graph in bundle.contract.graphs}


def _with_hidden_states(bundle: Bundle, paths: Mapping[GraphName, Path]) -> dict[GraphName, bytes]:
    """The graphs with the residual stream, which has fixed names in each of them, among their outputs."""
    import onnx_ir

    from kvgraph.export.contract import GRAPHS, hidden_state
    from kvgraph.export.exporter import expose_hidden_states

    graphs = {}
    for graph, path in paths.items():
        model = onnx_ir.load(path)
        # What is compared layer by layer is the decoder.
        if graph in GRAPHS and hidden_state(0) not in [value.name for value in model.graph.outputs]:
            expose_hidden_states(model, bundle.contract.num_layers)
        graphs[graph] = onnx_ir.to_proto(model).SerializeToString()
    return graphs


def _band(candidate: Session, *bundles: Bundle) -> Band:
    """The band of the coarsest type that takes part."""
    from kvgraph.runtime.parity_bands import band_for

    formats = [
        scheme["format"]
        for bundle in bundles
        if bundle.quantization is not None
        for module in bundle.quantization["modules"]
        for scheme in (module["weight"], *module["activations"].values())
    ]
    return band_for(candidate.info.dtype, *(bundle.dtype for bundle in bundles), *formats)


def _sequences(
    args: argparse.Namespace, bundle: Bundle, reference: Session, candidate: Session
) -> Sequence[Sequence[int] | Ids]:
    """Rows of tokens: of the text, else of the built-in ones, else at random where there is no tokenizer."""
    import numpy as np

    from kvgraph.runtime.tokenizer import TOKENIZER, Tokenizer

    if args.prefill < 1 or args.steps < 0:
        raise ValueError(f"--prefill is {args.prefill} and --steps {args.steps}, expected at least 1 and 0")
    contracts = [session.contract for session in (reference, candidate)]
    limit = min(contract.capacity or contract.max_positions for contract in contracts)
    length = min(args.prefill + args.steps, limit)
    if args.text is None and not (bundle.path / TOKENIZER).is_file():
        generator = np.random.default_rng(_SEED)
        lengths = [max(1, length // share) for share in (1, 2, 4)]
        return [generator.integers(0, candidate.contract.vocab_size, size) for size in lengths]
    tokenizer = Tokenizer.load(bundle.path, bundle.config)
    texts = _TEXTS if args.text is None else (read_text(args.text),)
    rows = [tokenizer.encode(text)[:length] for text in texts]
    if not all(rows):
        raise ValueError(f"{args.text}: the text is empty; give one of at least a few tokens")
    return rows


def _write_files(args: argparse.Namespace, report: ParityReport) -> None:
    if args.json is not None:
        text = json.dumps(report.to_json(), indent=1, allow_nan=False)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        from kvgraph.runtime.parity_plot import plot_report

        plot_report(report, args.plot)


def _save_polygraphy(
    args: argparse.Namespace,
    bundle: Bundle,
    report: ParityReport,
    reference: Session,
    candidate: Session,
    sequences: Sequence[Sequence[int] | Ids],
) -> None:
    from kvgraph.runtime.parity import plan_steps
    from kvgraph.runtime.polygraphy_export import record_steps, save_polygraphy, steps_worth_replaying

    chosen = steps_worth_replaying(report)
    steps = plan_steps(sequences, args.prefill, args.prefill_chunk)
    recorded = record_steps(reference, candidate.contract, steps, chosen)
    graphs = _graph_paths(bundle, args.target)
    commands = save_polygraphy(args.save_polygraphy, recorded, graphs, bundle.path, report.band)
    print(f"steps {', '.join(map(str, chosen))} for Polygraphy: run the commands in {commands}")
