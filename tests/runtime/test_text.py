import itertools
import random

import pytest
import tokenizers

from kvgraph.runtime.text import Detokenizer, StopMatcher
from kvgraph.runtime.tokenizer import Tokenizer

KINDS = ("gpt2", "llama-spm", "stories260k")
BYTE_FALLBACK = ("llama-spm", "stories260k")


def load(data, kind):
    if kind == "gpt2":
        files = [str(data / "tokenizers" / "gpt2" / name) for name in ("vocab.json", "merges.txt")]
        made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        return Tokenizer(made)
    return Tokenizer.load(data / kind if kind == "stories260k" else data / "tokenizers" / kind)


@pytest.fixture(scope="module")
def loaded(shared_data):
    return {kind: load(shared_data, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def golden_texts(shared_data):
    file = shared_data / "tokenizers" / "llama-spm" / "golden.inp"
    return file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")


@pytest.fixture(scope="module")
def japanese(shared_data):
    return (shared_data / "text" / "wagahai_ja.txt").read_text(encoding="utf-8")[1000:4000]


def stream(tokenizer, ids, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def bytes_of(tokenizer, *values):
    return [tokenizer.backend.token_to_id(f"<0x{value:02X}>") for value in values]


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_the_text_on_all_goldens(loaded, kind, golden_texts):
    tokenizer = loaded[kind]
    for text in golden_texts:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.backend.decode(ids), text
        assert "".join(pieces) == text, text
        assert not any("\ufffd" in piece for piece in pieces), text


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_the_text_in_japanese(loaded, kind, japanese):
    tokenizer = loaded[kind]
    pieces = stream(tokenizer, tokenizer.encode(japanese))
    assert "".join(pieces) == japanese
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_comes_out_with_its_last_token(loaded, kind):
    tokenizer, text = loaded[kind], "日本語🦙 は A"
    detokenizer, shown = Detokenizer(tokenizer), ""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push(token)
        if "\ufffd" not in (whole := tokenizer.backend.decode(ids[:count])):
            assert shown == whole


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, "I have a 🦙") for kind in KINDS] + [("gpt2", "吾輩は猫"), ("stories260k", "吾輩は猫")],
)
def test_stream_that_ends_inside_a_character_is_flushed(loaded, kind, text):
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    *pieces, flushed = stream(tokenizer, ids[:-1])
    assert "".join(pieces) == text[:-1]
    assert set(flushed) == {"\ufffd"}


@pytest.mark.parametrize("seed", range(20))
def test_random_byte_level_tokens_decode_as_the_library_decodes_them(loaded, seed):
    tokenizer = loaded["gpt2"]
    # The 256 single bytes and what tokens begin or end inside a character make malformed text of every kind.
    ids = random.Random(seed).choices([*range(256), *range(40000, 40064)], k=200)
    assert "".join(stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
@pytest.mark.parametrize("seed", range(10))
def test_random_byte_fallback_tokens_decode_as_their_bytes(loaded, kind, seed):
    tokenizer, draw = loaded[kind], random.Random(seed)
    values = draw.choices([*range(256), *"あé🦙".encode() * 20], k=200)
    text = "".join(stream(tokenizer, bytes_of(tokenizer, *values), prompt=tokenizer.encode("x")))
    expected = bytes(values).decode("utf-8", errors="replace")
    # The library's rule is one U+FFFD a byte, Python's one for what could have been the start of a character.
    assert text.replace("\ufffd", "") == expected.replace("\ufffd", "")
    assert text.encode("utf-16-le").count(b"\xfd\xff") >= expected.count("\ufffd")


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
@pytest.mark.parametrize("values", [[0xE3, 0x81], [0xFF], [0x82, 0x82], [0xF0, 0x9F, 0xA6], [0xC3, 0x28]])
def test_malformed_run_gives_one_replacement_a_byte_as_the_library_does(loaded, kind, values):
    tokenizer = loaded[kind]
    ids = [*tokenizer.encode("a"), *bytes_of(tokenizer, *values), *tokenizer.encode("b", False)]
    expected = "".join("\ufffd" if value > 0x7F else chr(value) for value in values)
    assert "".join(stream(tokenizer, ids)) == f"a{expected} b"


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_malformed_end_does_not_take_back_good_characters(loaded, kind):
    tokenizer = loaded[kind]
    assert "".join(stream(tokenizer, bytes_of(tokenizer, *"あ".encode(), 0xE3, 0x81))) == "あ\ufffd\ufffd"


def test_real_replacement_characters_are_text_and_do_not_slow_the_stream(loaded):
    for tokenizer in loaded.values():
        ids = tokenizer.encode("\ufffd" * 40 + "a" + "\ufffd", add_special_tokens=False)
        assert "".join(stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_prompt_continues_it(loaded, kind):
    tokenizer = loaded[kind]
    text = "Once upon a time 日本 é"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        before, after = stream(tokenizer, ids[:cut])[:-1], stream(tokenizer, ids[cut:], ids[:cut])
        assert "".join(before) + "".join(after) == text


def test_leading_space_is_dropped_only_at_the_start_of_a_text(loaded):
    tokenizer = loaded["llama-spm"]
    (hello,) = tokenizer.encode("Hello", add_special_tokens=False)
    (space,) = bytes_of(tokenizer, 0x20)
    assert "".join(stream(tokenizer, [hello, hello])) == "Hello Hello"
    assert "".join(stream(tokenizer, [hello], prompt=[tokenizer.bos_token_id or 1])) == "Hello"
    assert "".join(stream(tokenizer, [hello], prompt=[1, hello])) == " Hello"
    assert "".join(stream(tokenizer, [space, hello])) == tokenizer.backend.decode([space, hello])


@pytest.mark.parametrize("kind", KINDS)
def test_decode_equals_the_stream(loaded, kind, japanese):
    tokenizer = loaded[kind]
    ids = tokenizer.encode(japanese[:50])[:-1]
    assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_cost_of_a_token_does_not_grow(loaded, kind, japanese):
    tokenizer = loaded[kind]
    lengths = []

    class Counting(Tokenizer):
        def decode_tokens(self, token_ids):
            lengths.append(len(token_ids))
            return super().decode_tokens(token_ids)

    stream(Counting(tokenizer.backend), tokenizer.encode(japanese[:400]))
    assert max(lengths) <= 16


def matched(stop, text, cuts=()):
    """Text shown, whether a stop ended it, for a text cut into pieces at `cuts`."""
    matcher, shown = StopMatcher(stop), ""
    edges = [0, *cuts, len(text)]
    for start, end in itertools.pairwise(edges):
        piece, stopped = matcher.push(text[start:end])
        shown += piece
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


STOP_CASES = [
    (["own fox"], "the brown fox jumps", "the br", True),
    (["ab", "abc"], "xxabcd", "xx", True),
    (["abc", "ab"], "xxabcd", "xx", True),
    (["abcd", "bc"], "xabcd", "xa", True),
    (["aab"], "aaab", "a", True),
    (["abab", "ba"], "aababa", "aa", True),
    (["\n\n"], "one\ntwo\n", "one\ntwo\n", False),
    (["語。"], "日本語。猫", "日本", True),
    (["end"], "en", "en", False),
    ([], "text", "text", False),
]


@pytest.mark.parametrize(("stop", "text", "shown", "stopped"), STOP_CASES)
def test_stop_does_not_depend_on_the_cut_into_tokens(stop, text, shown, stopped):
    for mask in range(2 ** (len(text) - 1) if len(text) <= 10 else 1):
        cuts = [i + 1 for i in range(len(text) - 1) if mask >> i & 1]
        assert matched(stop, text, cuts) == (shown, stopped)
    assert matched(stop, text, range(1, len(text))) == (shown, stopped)


def test_only_what_may_become_a_stop_is_held_back():
    matcher = StopMatcher(["stop", "top it"])
    pieces = [matcher.push(piece)[0] for piece in ["s", "t", "a", " sto", "o", "to"]]
    assert pieces == ["", "", "sta", " ", "stoo", ""]
    assert matcher.flush() == "to"


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_empty_stop_is_refused(stop):
    with pytest.raises(ValueError, match="stop string is empty"):
        StopMatcher(stop)


def test_single_stop_is_one_text_and_not_its_letters():
    assert matched("end", "an end", range(1, 6)) == ("an ", True)
