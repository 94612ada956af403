"""The two kinds of tokenizer that GGUF files describe, built with the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvgraph.models.gguf_vocabulary import SPACE, Vocabulary

# The words of cl100k, with digits in groups of up to three or one by one; those of o200k, by case.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE cuts a text into words before it merges within each.

    Attributes:
        pattern: What a word is; None for GPT-2's own, which the library knows.
        single_digits: Whether every digit is a word, whatever the pattern says.
        composed: Whether the text is brought into Unicode's composed form first.
        whole_words: Whether a word that is a token is left whole, though merges may not lead to it.
        adds_bos: Whether texts begin with the BOS, where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    composed: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(_CL100K % "{1,3}", whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer(_CL100K % "", composed=True)
_DIGITS = PreTokenizer(single_digits=True)
_DBRX = PreTokenizer(_CL100K % "{1,3}")
# As files name them, which is by the model that first had them.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "phi-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "gpt-4o": PreTokenizer(_O200K),
}


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that a vocabulary describes.

    Raises:
        ValueError: Its model or pre-tokenizer is not known, or it is not complete.
    """
    if vocabulary.model == "llama":
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
    elif vocabulary.model == "gpt2":
        pre = _pre_tokenizer(vocabulary)
        tokenizer, adds_bos = _byte_level(vocabulary, pre), pre.adds_bos
    else:
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.model {vocabulary.model!r} is not implemented; known: llama, gpt2"
        )
    special = vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    added = vocabulary.of_types(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    first = _framing(vocabulary, "add_bos_token", "bos", adds_bos)
    last = _framing(vocabulary, "add_eos_token", "eos", False)
    if framing := [*first, *last]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(token for token, _ in first), "$A", *(token for token, _ in last)],
            special_tokens=framing,
        )
    return tokenizer


def _framing(vocabulary: Vocabulary, flag: str, role: str, default: bool) -> list[tuple[str, int]]:
    """Text and id of the token that goes around every text, if one does."""
    if not vocabulary.flags.get(flag, default):
        return []
    token = vocabulary.token(role)
    if token is None:
        raise ValueError(
            f"{vocabulary.path}: texts get a {role} token, but tokenizer.ggml.{role}_token_id is missing"
        )
    return [(token, vocabulary.ids[role])]


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: spaces are letters, and what the vocabulary cannot spell is spelled in bytes."""
    if not vocabulary.scores:
        raise ValueError(f"{vocabulary.path}: tokenizer.ggml.scores is missing; merges follow from it")
    has_bytes = len(vocabulary.of_types(TokenType.BYTE)) == 256
    model = models.BPE(
        {token: id_ for id_, token in enumerate(vocabulary.tokens)},
        merges_by_score(vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    prefixed = vocabulary.flags.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the higher its score the earlier.

    SentencePiece merges whichever neighbours make the token with the highest score, the leftmost first. Of the ways
    to make one token, the one with the longer left part comes first: it is what merging from the left leads to.
    """
    kinds = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in kinds if kind == TokenType.NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in scores
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]
    return sorted(merges, key=lambda merge: -scores["".join(merge)])


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    if vocabulary.pre is None or vocabulary.pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{vocabulary.path}: tokenizer.ggml.pre {vocabulary.pre!r} is not implemented; known: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[vocabulary.pre]


def _byte_level(vocabulary: Vocabulary, pre: PreTokenizer) -> Tokenizer:
    """GPT-2's BPE: words, spelled in bytes, are merged pair by pair."""
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    for merge in vocabulary.merges:
        if missing := [token for token in (*merge, "".join(merge)) if token not in ids]:
            raise ValueError(
                f"{vocabulary.path}: merge {' '.join(merge)!r} needs {missing[0]!r}, which is no token"
            )
    tokenizer = Tokenizer(models.BPE(ids, list(vocabulary.merges), ignore_merges=pre.whole_words))
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    words: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        words.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        words.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
