"""A residual stream that float16 does not hold is found, named and cured, whatever the graphs make of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.residual_range import require_float16_range, residual_range, session_residual_range
from kvgraph.export.torch_session import TorchSession
from kvgraph.float16_range import LARGEST, ResidualPeak, find_overflow, residual_peak
from kvgraph.models.checkpoint import open_checkpoint

# float32 sums in another order, of values up to 1e5.
RELATIVE = 1e-5
VOCABULARY, TEXT = 97, "the residual stream grows with every layer that adds to it"
WIDE = {"initializer_range": 0.4, "intermediate_size": 64, "num_hidden_layers": 3}
# Layer -> factor of its down_proj. What one layer adds is out of range; or what all of them add together is.
ONE_LAYER, ALL_LAYERS = {1: 3000.0}, dict.fromkeys(range(5), 4000.0)

Scaled = Callable[..., Path]


@pytest.fixture(scope="session")
def scaled(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    """Makes a Llama with a tokenizer of single characters, some of whose down projections are larger."""

    def make(factors: Mapping[int, float], **changes: Any) -> Path:
        path = tmp_path_factory.mktemp("scaled") / "checkpoint"
        shutil.copytree(tiny_llama(**changes), path)
        weights = load_file(path / "model.safetensors")
        for layer, factor in factors.items():
            weights[f"model.layers.{layer}.mlp.down_proj.weight"] *= factor
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        words = {chr(32 + index): index for index in range(VOCABULARY)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=" "))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        backend.save(str(path / "tokenizer.json"))
        return path

    return make


@pytest.fixture(scope="session")
def one_layer(scaled: Scaled) -> Path:
    return scaled(ONE_LAYER, **WIDE)


@pytest.fixture(scope="session")
def all_layers(scaled: Scaled) -> Path:
    return scaled(ALL_LAYERS, num_hidden_layers=5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "sample.txt"
    path.write_text(TEXT)
    return path


def encoded() -> list[int]:
    return [ord(letter) - 32 for letter in TEXT]


def transformers_stream(checkpoint: Path, ids: list[int]) -> list[torch.Tensor]:
    """The stream [S, E] before each layer and after the last, as transformers' layers pass it on."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    stream: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0][0]))
    # The last of `hidden_states` is behind the norm, what goes into the norm is not.
    model.model.norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0][0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return stream


@pytest.mark.parametrize("measure", ["checkpoint", "session"])
def test_peaks_equal_those_of_transformers(one_layer: Path, measure: str) -> None:
    checkpoint, rows = open_checkpoint(one_layer), [encoded(), encoded()[::-1][:9]]
    if measure == "checkpoint":
        peaks = residual_range(checkpoint, rows)
    else:
        peaks = session_residual_range(TorchSession.open(checkpoint), rows)
    expected = [transformers_stream(one_layer, row) for row in rows]
    assert len(peaks) == len(expected[0]) == 4
    for index, peak in enumerate(peaks):
        largest = [row[index].abs().max().item() for row in expected]
        assert peak.row == int(np.argmax(largest))
        assert peak.position == int(expected[peak.row][index].abs().amax(-1).argmax())
        assert peak.magnitude == pytest.approx(max(largest), rel=RELATIVE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"hidden_size": 32, "num_key_value_heads": 4, "n_inner": 44}),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_layer_at_a_time_gives_what_the_whole_model_does(
    tiny_checkpoint: Callable[..., Path], family: str, changes: dict[str, Any]
) -> None:
    checkpoint = tiny_checkpoint(family, **changes)
    opened, rows = open_checkpoint(checkpoint), [encoded()]
    expected = [stream.abs().max().item() for stream in transformers_stream_of(checkpoint, rows[0])]
    found = [peak.magnitude for peak in residual_range(opened, rows)]
    np.testing.assert_allclose(found[:-1], expected[:-1], rtol=1e-4)


def transformers_stream_of(checkpoint: Path, ids: list[int]) -> list[torch.Tensor]:
    """As `transformers_stream` of any family, but for the last one, which is behind the norm."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in states]


def test_compare_names_layer_magnitude_and_cure(
    all_layers: Path, text: Path, exported: Callable[..., Bundle], tmp_path: Path, capsys: Any
) -> None:
    bundle = exported(all_layers, dtype="float16")
    report = tmp_path / "report.json"
    flags = ["--checkpoint", str(all_layers), "--text", str(text), "--json", str(report)]
    assert main(["compare", str(bundle.path), *flags]) == 1
    stream = transformers_stream(all_layers, encoded())
    largest = [state.abs().max().item() for state in stream]
    first = next(index for index, value in enumerate(largest) if value > LARGEST)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("overflow"))
    found = re.search(r"at layer (\d+), where it reaches ([\d.]+) at position (\d+) of row 0", line)
    assert found is not None
    assert int(found[1]) == first - 1
    assert float(found[2]) == pytest.approx(largest[first], rel=RELATIVE)
    assert int(found[3]) == int(stream[first].abs().amax(-1).argmax())
    assert line.endswith("kvgraph export --dtype float16 --residual-dtype float32 keeps it")
    written = json.loads(report.read_text())
    assert written["in_band"] is False
    assert written["overflow"]["first"]["hidden_state"] == first


def test_float32_residual_cures_it(
    all_layers: Path, text: Path, quick_tracing: None, tmp_path: Path, capsys: Any
) -> None:
    bundle = str(tmp_path / "bundle")
    flags = ["--dtype", "float16", "--residual-dtype", "float32", "--sample-text", str(text)]
    assert main(["export", str(all_layers), "-o", bundle, *flags]) == 0
    assert main(["compare", bundle, "--text", str(text)]) == 0
    out = capsys.readouterr().out
    assert "overflow" not in out
    assert out.splitlines()[-1].startswith("in band")


@pytest.mark.parametrize(
    ("model", "residual_dtype", "holds"),
    [
        ("all_layers", "float16", False),
        ("all_layers", "float32", True),
        ("one_layer", "float16", False),
        ("one_layer", "float32", True),
    ],
)
def test_what_is_said_of_the_cure_is_so_where_every_product_is_rounded(
    model: str, residual_dtype: str, holds: bool, request: pytest.FixtureRequest
) -> None:
    checkpoint, ids = open_checkpoint(request.getfixturevalue(model)), encoded()
    session = TorchSession.open(checkpoint, "float16", residual_dtype)
    zero = np.zeros(1, np.int64)
    with np.errstate(all="ignore"):
        logits = session.prefill(session.allocate_cache(1), np.array([ids]), zero, np.array([[len(ids) - 1]]))
    assert bool(np.isfinite(session.hidden_states()[-1]).all() and np.isfinite(logits).all()) is holds
    overflow = find_overflow(residual_range(checkpoint, [ids]), "float16")
    assert overflow is not None
    assert overflow.describe().endswith("--residual-dtype float32 keeps it")


def test_a_model_within_range_gives_no_report(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], capsys: Any
) -> None:
    checkpoint = tiny_llama(num_hidden_layers=len(ALL_LAYERS))
    bundle = exported(checkpoint, dtype="float16")
    assert main(["compare", str(bundle.path), "--checkpoint", str(checkpoint)]) == 0
    assert "overflow" not in capsys.readouterr().out
    require_float16_range(open_checkpoint(checkpoint), [encoded()], "float16")


def test_export_refuses_an_overflow_on_the_sample_text(
    one_layer: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    flags = ["--dtype", "float16", "--sample-text", str(text)]
    assert main(["export", str(one_layer), "-o", str(tmp_path / "bundle"), *flags]) == 2
    error = capsys.readouterr().err
    largest = transformers_stream(one_layer, encoded())[2].abs().max().item()
    found = re.search(r"at layer 1, where it reaches ([\d.]+) at position", error)
    assert found is not None
    assert float(found[1]) == pytest.approx(largest, rel=RELATIVE)
    assert error.startswith(f"kvgraph: error: {one_layer}: the residual stream leaves float16's range")
    assert "--dtype float16 --residual-dtype float32" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "bundle").exists()


def test_sample_text_needs_weights_tokenizer_and_text(
    one_layer: Path, tiny_llama: Callable[..., Path], text: Path, tmp_path: Path, capsys: Any
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for checkpoint, flags, message in (
        (one_layer, ["--sample-text", str(text), "--no-weights"], "leave out --no-weights"),
        (one_layer, ["--sample-text", str(empty)], "the text is empty"),
        (tiny_llama(), ["--sample-text", str(text)], "has no tokenizer for --sample-text"),
    ):
        command = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--dtype", "float16", *flags]
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_a_model_with_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 20, "d_kv": 8, "d_ff": 44, "num_heads": 4, "num_layers": 1, "vocab_size": VOCABULARY}
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without an encoder, t5 has one"):
        residual_range(open_checkpoint(tmp_path), [[1, 2, 3]])


@pytest.mark.parametrize("ids", [[], [[1, 2]], [VOCABULARY], [-1], [1] * 65])
def test_rows_that_do_not_fit_are_refused(tiny_llama: Callable[..., Path], ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        residual_range(open_checkpoint(tiny_llama()), [ids])


@pytest.mark.parametrize(
    ("value", "out"), [(65504.0, False), (65505.0, True), (np.inf, True), (np.nan, True)]
)
def test_what_float16_does_not_hold_is_out_of_range(value: float, out: bool) -> None:
    stream = np.zeros((5, 3), np.float32)
    stream[3, 1] = -value
    peaks = [
        ResidualPeak(0, 1.0, 0, 0),
        residual_peak(1, [np.ones((2, 3), np.float32), stream]),
    ]
    assert (peaks[1].row, peaks[1].position) == (1, 3)
    overflow = find_overflow(peaks, "float16")
    assert (overflow is not None) is out
    if overflow is not None:
        assert overflow.place == "layer 0"
