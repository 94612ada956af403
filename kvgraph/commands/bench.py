"""`kvgraph bench BUNDLE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.files import check_folder
from kvgraph.numbers_argument import numbers
from kvgraph.table import format_table
from kvgraph.thread_arguments import add_thread_arguments, threads_of

if TYPE_CHECKING:
    from kvgraph.runtime.bench_report import BenchOptions, BenchReport, Timing
    from kvgraph.runtime.session import Session

NAME = "bench"
HELP = "measure prefill and decode speed, loop overhead, memory and load time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="directory that kvgraph export or kvgraph quantize wrote"
    )
    parser.add_argument("--target", metavar="NAME", help="measure what kvgraph build made for this target")
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cpu, or cuda for a target that needs it)"
    )
    # What is not given is left to the library, so that each default is written down once.
    sizes = parser.add_argument_group("sizes", argument_default=argparse.SUPPRESS)
    sizes.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of each prompt (128)")
    sizes.add_argument(
        "--source-tokens",
        type=int,
        metavar="N",
        help="tokens of each source, for a model with an encoder (128, or as many as it takes)",
    )
    sizes.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens to generate, and steps to time at a context (32)"
    )
    sizes.add_argument(
        "--context",
        dest="contexts",
        type=numbers("a number, or several as in 128,1024"),
        metavar="N[,N...]",
        help="tokens in use at which to time decode (those of the prompt)",
    )
    sizes.add_argument("--batch", dest="batch_size", type=int, metavar="N", help="rows (1)")
    sizes.add_argument(
        "--limit", type=int, metavar="N", help="most slots of the cache (what the model allows)"
    )
    sizes.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="feed the prompt N tokens at a time (all at once)"
    )
    sizes.add_argument("--runs", type=int, metavar="N", help="runs that count, after one to warm up (3)")
    sizes.add_argument("--seed", type=int, metavar="N", help="of the random token ids (0)")
    add_thread_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print the report, and write it."""
    from dataclasses import fields

    from kvgraph.export.bundle import Bundle
    from kvgraph.runtime.bench import bench
    from kvgraph.runtime.bench_report import BenchOptions
    from kvgraph.runtime.open import open_session
    from kvgraph.runtime.tokenizer import TOKENIZER, Tokenizer

    names = {field.name for field in fields(BenchOptions)}
    options = BenchOptions(**{name: value for name, value in vars(args).items() if name in names})
    if args.json is not None:
        check_folder(args.json)
    bundle = Bundle.open(args.bundle)
    tokenizer = Tokenizer.load(bundle.path, bundle.config) if TOKENIZER in bundle.files else None

    threads = threads_of(args)

    def opened() -> Session:
        return open_session(bundle, args.target, args.device, threads=threads)

    report = bench(bundle, opened, options, tokenizer, args.target)
    print(render(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0


def render(report: BenchReport) -> str:
    """A report as text: the setting, what happens once, and a line for each context."""
    return "\n\n".join([_setting(report), _phases(report), _decode(report), _memory(report)])


def _setting(report: BenchReport) -> str:
    machine, session, options = report.machine, report.session, report.options
    load = "" if machine.load_average is None else f", load average {machine.load_average:.1f}"
    kind = [report.model_type, report.dtype, *([] if session.recipe is None else [session.recipe])]
    threads = "one a core" if options.threads is None else str(options.threads)
    rows = [
        ("bundle", f"{report.bundle} ({', '.join(kind)})"),
        ("target", report.target or "none, the bundle's own graphs"),
        ("session", session.title),
        ("machine", f"{machine.cpu}, {machine.cores} cores, {_bytes(machine.memory_bytes)}{load}"),
        ("system", f"{machine.system}, Python {machine.python}, NumPy {machine.numpy}"),
        (
            "sizes",
            f"batch {options.batch_size}, {_source(options)}{options.prompt_tokens} prompt and "
            f"{options.new_tokens} new tokens, "
            f"cache limit {options.limit}, threads {threads}, {options.runs} runs, seed {options.seed}",
        ),
    ]
    return format_table(rows, "ll")


def _phases(report: BenchReport) -> str:
    rows = [
        ("", "median", "fastest", "slowest", ""),
        ("load", _time(report.load_s), "", "", ""),
        ("first token, first run", _time(report.first_run_s), "", "", ""),
        ("first token", *_timing(report.time_to_first_token), ""),
        *([] if report.encode is None else [("encode", *_timing(report.encode), _source_rate(report))]),
        ("prefill", *_timing(report.prefill), f"{report.prefill_tokens_per_s:,.1f} tokens/s"),
        ("loop outside the session, a step", *_timing(report.loop_overhead), ""),
    ]
    return format_table(rows, "lrrrr")


def _source(options: BenchOptions) -> str:
    return "" if options.source_tokens is None else f"{options.source_tokens} source, "


def _source_rate(report: BenchReport) -> str:
    tokens = report.options.batch_size * (report.options.source_tokens or 0)
    return "" if report.encode is None else f"{tokens / report.encode.median_s:,.1f} tokens/s"


def _decode(report: BenchReport) -> str:
    unshared = "-" if report.memory_bandwidth_bytes_per_s is None else "in cache"
    header = (
        "decode at",
        "slots",
        "median",
        "fastest",
        "slowest",
        "tokens/s",
        "read a step",
        "bandwidth",
        "share",
    )
    rows = [
        (
            f"{speed.context:,} tokens",
            f"{speed.capacity:,}",
            *_timing(speed.step),
            f"{speed.tokens_per_s:,.1f}",
            _bytes(speed.bytes_read),
            f"{_bytes(speed.bytes_per_s)}/s",
            unshared if speed.bandwidth_share is None else f"{speed.bandwidth_share:.0%}",
        )
        for speed in report.decode
    ]
    return format_table([header, *rows], "lrrrrrrrr")


def _memory(report: BenchReport) -> str:
    bandwidth = report.memory_bandwidth_bytes_per_s
    in_use = report.memory_in_use_bytes
    rows = [
        ("memory in use", "unknown" if in_use is None else f"{_bytes(in_use)}, each page once"),
        ("peak memory", f"{_bytes(report.peak_memory_bytes)} resident, mapped weights once a graph"),
        ("weights read a step", _bytes(report.weights_bytes)),
        ("cache a token", f"{report.cache_bytes_per_token:,} bytes"),
        (
            "memory bandwidth",
            "not measured on a GPU" if bandwidth is None else f"{_bytes(bandwidth)}/s, reading",
        ),
    ]
    return format_table(rows, "ll")


def _timing(timing: Timing) -> tuple[str, str, str]:
    return _time(timing.median_s), _time(timing.fastest_s), _time(timing.slowest_s)


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.3f} ms"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1e3:,.2f} kB"
