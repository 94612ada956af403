"""What `kvgraph compare` feeds a model with an encoder: texts as sources, and what the decoder is forced along."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgraph.commands.perplexity import read_text

if TYPE_CHECKING:
    from kvgraph.export.bundle import Bundle
    from kvgraph.runtime.encoder_session import EncoderSession
    from kvgraph.runtime.parity_bands import Band
    from kvgraph.runtime.parity_report import ParityReport

_SEED = 0


def compare_sources(
    args: argparse.Namespace,
    bundle: Bundle,
    reference: EncoderSession,
    candidate: EncoderSession,
    texts: Sequence[str],
    band: Band,
) -> ParityReport:
    """Compare two sessions over sources.

    Args:
        args: Of `kvgraph compare`.
        bundle: Whose tokenizer and settings are used.
        reference: What is right.
        candidate: What is judged.
        texts: The sources; random ones stand in for them where there is no tokenizer.
        band: Which errors are accepted.

    Raises:
        ValueError: A text is empty, or there is none where one is needed.
    """
    from kvgraph.runtime.parity_sources import compare_encoder_decoders

    if args.save_polygraphy is not None:
        raise ValueError(
            "--save-polygraphy is for models without an encoder; leave it out, and run the graphs with kvgraph run"
        )
    if args.prefill < 1 or args.steps < 0:
        raise ValueError(f"--prefill is {args.prefill} and --steps {args.steps}, expected at least 1 and 0")
    sources = _sources(args, bundle, candidate, texts)
    targets = _targets(args, bundle, reference, candidate, sources)
    return compare_encoder_decoders(
        reference,
        candidate,
        sources,
        targets,
        band=band,
        prefill=args.prefill,
        chunk=args.prefill_chunk,
        layers=args.layers,
    )


def _sources(
    args: argparse.Namespace, bundle: Bundle, candidate: EncoderSession, texts: Sequence[str]
) -> list[Any]:
    """Token ids of each text, as far as the candidate's encoder goes."""
    import numpy as np

    from kvgraph.runtime.tokenizer import TOKENIZER, Tokenizer

    encoder = candidate.contract.encoder
    assert encoder is not None
    if args.text is None and not (bundle.path / TOKENIZER).is_file():
        generator, longest = (
            np.random.default_rng(_SEED),
            min(args.prefill + args.steps, encoder.max_positions),
        )
        lengths = [max(1, longest // share) for share in (1, 2, 4)]
        return [generator.integers(0, encoder.vocab_size, size) for size in lengths]
    tokenizer = Tokenizer.load(bundle.path, bundle.config)
    rows = [tokenizer.encode(text)[: encoder.max_positions] for text in texts]
    if not all(rows):
        raise ValueError(f"{args.text}: the text is empty; give one of at least a few tokens")
    return rows


def _targets(
    args: argparse.Namespace,
    bundle: Bundle,
    reference: EncoderSession,
    candidate: EncoderSession,
    sources: Sequence[Any],
) -> list[list[int]]:
    """The decoder's rows: the start token, then the text of --target-text, or else what the reference writes."""
    from kvgraph.runtime.encoder_decoder_model import read_decoder_start, read_rules
    from kvgraph.runtime.generate import generate
    from kvgraph.runtime.generation import GenerationParams
    from kvgraph.runtime.sources import SourcedSession, encode_sources
    from kvgraph.runtime.tokenizer import Tokenizer

    start, contracts = read_decoder_start(bundle), (reference.contract, candidate.contract)
    slots = (contract.capacity or contract.max_positions for contract in contracts)
    limit = min(args.prefill + args.steps, *slots)
    if args.target_text is not None:
        tokenizer = Tokenizer.load(bundle.path, bundle.config)
        tokens = tokenizer.encode(read_text(args.target_text))
        return [[start, *tokens][:limit]] * len(sources)
    if limit == 1:
        return [[start]] * len(sources)
    # To the full length, whatever ends a text: there is more to compare then.
    params = GenerationParams(max_new_tokens=limit - 1, eos_token_ids=(), rules=read_rules(bundle))
    session = SourcedSession(reference, encode_sources(reference, sources))
    found = generate(session, [[start]] * len(sources), params)
    return [[start, *generation.token_ids] for generation in found]
