"""`kvgraph run BUNDLE`: text on stdout as it is made, everything else on stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvgraph.numbers_argument import numbers
from kvgraph.thread_arguments import add_thread_arguments, threads_of

if TYPE_CHECKING:
    from kvgraph.runtime.generation import Event, Options
    from kvgraph.runtime.model import Model, Prompt

NAME = "run"
HELP = "generate text from a bundle"

_TOKEN_IDS = numbers("integers such as 1,2,3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="directory that kvgraph export or kvgraph quantize wrote"
    )
    parser.add_argument("--target", metavar="NAME", help="run what kvgraph build made for this target")
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cpu, or cuda for a target that needs it)"
    )
    parser.add_argument("--verify", action="store_true", help="hash all files first")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to go on from")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file with that text")
    source.add_argument("--token-ids", type=_TOKEN_IDS, metavar="1,2,3", help="the prompt as token ids")
    source.add_argument("--chat", action="store_true", help="talk: each line of stdin is a turn")
    add_thread_arguments(parser)
    # What is not given is left to the library, so that each default is written down once.
    options = parser.add_argument_group("generation", argument_default=argparse.SUPPRESS)
    options.add_argument("--max-new-tokens", type=int, metavar="N", help="default: until the cache is full")
    options.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    options.add_argument(
        "--eos-token-ids", type=_TOKEN_IDS, metavar="1,2", help="default: those of the model"
    )
    options.add_argument("--temperature", type=float, metavar="X", help="default: 0, the likeliest token")
    options.add_argument(
        "--top-k", type=int, metavar="N", help="draw from the N likeliest tokens; 0: from all"
    )
    options.add_argument(
        "--top-p", type=float, metavar="X", help="draw from the likeliest that reach this share"
    )
    options.add_argument(
        "--min-p", type=float, metavar="X", help="least probability, relative to the likeliest"
    )
    options.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: repeat less")
    options.add_argument("--seed", type=int, metavar="N", help="draw the same tokens each time")
    options.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="feed the prompt N tokens at a time; default: all at once",
    )
    options.add_argument("--num-beams", type=int, metavar="N", help="beam search; the text comes at the end")
    options.add_argument(
        "--length-penalty", type=float, metavar="X", help="with beams, above 0: longer texts gain (1)"
    )
    options.add_argument(
        "--early-stopping",
        type=_early_stopping,
        metavar="true|false|never",
        help="with beams: end when N texts are finished, when no beam looks better (false), or can become better",
    )


def run(args: argparse.Namespace) -> int:
    """Generate, and say on stderr where and how fast."""
    from kvgraph.runtime.generation import GenerationParams, Options
    from kvgraph.runtime.model import load

    options = cast(
        "Options", {name: value for name, value in vars(args).items() if name in Options.__annotations__}
    )
    # Opening a large bundle takes long: a mistyped number is refused before.
    num_beams = GenerationParams.of(**options).num_beams
    if args.chat and num_beams > 1:
        raise ValueError(
            f"--chat shows an answer as it is made, which --num-beams {num_beams} cannot; leave one out"
        )
    prompt = _read_prompt(args)
    model = load(args.bundle, args.target, device=args.device, threads=threads_of(args), verify=args.verify)
    info = model.session.info
    print(f"{info.subject}: {info.title}", file=sys.stderr)
    if prompt is None:
        _chat(model, options)
    elif num_beams > 1:
        _run_beams(model, prompt, options)
    else:
        events = model.stream(prompt, **options)
        _report(_write(events, model.tokenizer is None), len(model.encode(prompt)[0]))
    return 0


def _read_prompt(args: argparse.Namespace) -> Prompt | None:
    """The prompt, None for a chat."""
    if args.prompt_file is not None:
        try:
            return cast("Path", args.prompt_file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompt_file}: not UTF-8 ({error}); convert the file") from error
    if args.token_ids is not None:
        return cast("tuple[int, ...]", args.token_ids)
    return cast("str | None", args.prompt)


def _run_beams(model: Model, prompt: Prompt, options: Options) -> None:
    start = time.perf_counter()
    generation = model.generate(prompt, **options)
    total_s = time.perf_counter() - start
    print(generation.text if model.tokenizer is not None else ",".join(map(str, generation.token_ids)))
    tokens = len(generation.token_ids)
    score = "" if generation.score is None else f", score {generation.score:.3f}"
    print(
        f"{len(model.encode(prompt)[0])} prompt tokens, {tokens} new tokens in {options['num_beams']} beams, "
        f"ended by {generation.finish_reason}{score}, {tokens / max(total_s, 1e-9):.0f} tokens/s",
        file=sys.stderr,
    )


def _chat(model: Model, options: Options) -> None:
    from kvgraph.runtime.conversation import Conversation

    conversation = Conversation(model)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        with closing(conversation.send(line.rstrip("\r\n"), **options)) as answer:
            try:
                speed = _write(answer, model.tokenizer is None)
            except KeyboardInterrupt:  # ends the answer, not the conversation
                print()
                continue
        _report(speed, conversation.prompt_tokens, conversation.cached_tokens)


@dataclass(frozen=True, slots=True)
class _Speed:
    """What was written, and when."""

    new_tokens: int
    first_token_s: float
    total_s: float
    finish_reason: str | None


def _write(events: Iterable[Event], as_ids: bool) -> _Speed:
    """Write the text of one row as it comes; token ids where there is no tokenizer to make text of them."""
    start = first = time.perf_counter()
    tokens = 0
    reason = None
    for event in events:
        if event.token_id is not None:
            tokens += 1
            first = time.perf_counter() if tokens == 1 else first
            if as_ids:
                print("" if tokens == 1 else ",", event.token_id, sep="", end="", flush=True)
        print(event.text, end="", flush=True)
        reason = event.finish_reason
    print()
    return _Speed(tokens, first - start, time.perf_counter() - start, reason)


def _report(speed: _Speed, prompt_tokens: int, cached_tokens: int = 0) -> None:
    prompt = f"{prompt_tokens} prompt tokens"
    if cached_tokens:
        prompt += f" ({cached_tokens} cached)"
    parts = [prompt, f"{speed.new_tokens} new tokens, ended by {speed.finish_reason}"]
    if speed.new_tokens:
        parts.append(f"first after {speed.first_token_s * 1e3:.0f} ms")
    if speed.new_tokens > 1:
        rest = (speed.new_tokens - 1) / max(speed.total_s - speed.first_token_s, 1e-9)
        parts.append(f"then {rest:.0f} tokens/s")
    print(", ".join(parts), file=sys.stderr)


def _early_stopping(text: str) -> bool | str:
    """True, False or "never"."""
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(values)}")
    return values[text]
