"""The comparison with other engines: sizes, medians, tables, and processes that fail; nothing is installed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

import peer_child
import peer_llama
import peer_table
import peers
from peer_environment import environment_variables, run_measured
from peer_rows import ENVIRONMENTS, ROWS, SHAPES

OURS, GENAI, LLAMA, FLOAT = (
    next(row for row in ROWS if row.name == name)
    for name in ("kvgraph int4", "genai int4", "llama.cpp Q4_0", "genai float32")
)
RATES = peer_table.Rates(read_bytes_per_s=10e9, float32_ops_per_s=100e9, int8_ops_per_s=400e9)
SPEED = peer_table.Speed(100.0, 10.0, 0.5, 10**9, 2 * 10**9, (7, 8, 9, 10))


@pytest.mark.parametrize("name", list(SHAPES))
def test_weights_are_those_of_transformers(name: str) -> None:
    import torch

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[name], tie_word_embeddings=True))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    head = model.lm_head.weight.numel()
    assert peer_table.layer_weights(SHAPES[name]) + head == matrices
    # A prompt of one token meets every matrix once.
    assert peer_table.prompt_operations(SHAPES[name], 1) == 2 * matrices


def test_step_reads_weights_and_cache_at_their_width() -> None:
    shape = SHAPES["1b"]
    short, long = (peer_table.step_bytes(LLAMA, shape, context) for context in (0, 10))
    assert short == (16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 128256 * 2048) * 18 / 32
    # Keys and values of 10 tokens, 16 layers, 8 heads of 64 numbers in float16.
    assert long - short == 2 * 10 * 16 * 8 * 64 * 2


def test_medians_are_of_each_number_and_memory_is_the_most() -> None:
    numbers = ("prefill_tokens_per_s", "decode_tokens_per_s", "load_s", "load_peak_bytes", "peak_bytes")
    rounds = [{**dict.fromkeys(numbers, value), "tokens": [value]} for value in (30, 10, 20)]
    rounds[0]["load_s"] = 1
    assert peer_table.median_speed(rounds) == peer_table.Speed(20, 20, 10, 30, 30, (30,))


def test_table_has_shares_of_the_machine_and_says_what_failed() -> None:
    table = peer_table.speed_table(
        [OURS, GENAI, FLOAT],
        {OURS.name: SPEED},
        {OURS.name: peer_table.Conversion(12.4, 3 * 10**9)},
        {GENAI.name: "no wheel"},
        RATES,
        SHAPES["1b"],
        512,
    )
    header, rule, ours, failed = table.splitlines()
    assert header.count("|") == rule.count("|") == ours.count("|") == failed.count("|")
    cells = [cell.strip() for cell in ours.split("|")[1:-1]]
    # 2 x 973 million products a token, 100 tokens a second, and the head once in 512.
    assert cells[:4] == [OURS.name, "100", "195%", "49%"]
    # 4.5 bits of 1236 million weights and 17 million float32 numbers of cache, ten times a second.
    assert cells[4:6] == ["10.0", "73%"]
    assert cells[6:] == ["0.50", "1.00 / 2.00", "12", "3.0", "7 8 9"]
    assert "no wheel" in failed


def test_ratios_are_within_a_group() -> None:
    speeds = {
        OURS.name: SPEED,
        LLAMA.name: replace(SPEED, prefill_tokens_per_s=50.0, decode_tokens_per_s=8.0, peak_bytes=10**9),
        FLOAT.name: SPEED,
    }
    _, _, *lines = peer_table.ratio_table(ROWS, speeds).splitlines()
    assert lines == [f"| {OURS.name} | {LLAMA.name} | 2.00 | 1.25 | 2.00 |"]


def test_rows_have_their_scripts_environments_and_own_directories() -> None:
    for row in ROWS:
        assert Path(peers.__file__).with_name(f"peer_{row.engine}.py").exists()
        assert row.is_ours or row.engine in ENVIRONMENTS
    models = [Path("models") / peers.directory_name(row) for row in ROWS]
    # None is where another's is, nor where another's record is.
    assert len({*models, *map(peers.record_of, models)}) == 2 * len(ROWS)


class _Counts:
    """An engine that counts on from the length of its prompt."""

    def generate(self, input_ids, new_tokens, on_token) -> None:
        for token in range(new_tokens):
            on_token(len(input_ids) + token)


def test_child_measures_the_whole_prompt_and_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    words = ["peer", "--model", "m", "--prompt-tokens", "600", "--new-tokens", "3", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    peer_child.main(lambda *_: pytest.fail("nothing is to be converted"), lambda *_: _Counts())
    result = json.loads(file.read_text())
    assert result["tokens"] == [600, 601, 602, 603]
    assert peer_table.median_speed([result]).peak_bytes > 0
    assert peer_child.prompt_ids(600)[:20] == peer_child.prompt_ids(20)


def test_measured_process_reports_its_memory(tmp_path: Path) -> None:
    # From a small process, as the script is one: until it runs its program, a child counts its parent's pages.
    bench = str(Path(peers.__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {bench!r}); from pathlib import Path; import peer_environment as e\n"
        "command = [sys.executable, '-c', \"b = b'x' * 300_000_000\"]\n"
        f"print(e.run_measured(command, e.environment_variables(2), Path({str(tmp_path / 'log')!r}), 60)['peak_bytes'])"
    )
    done = peers.subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 300e6 < float(done.stdout) < 600e6


def test_measured_process_leaves_its_last_words(tmp_path: Path) -> None:
    log, variables = tmp_path / "log", environment_variables(2)
    with pytest.raises(peers.subprocess.CalledProcessError) as caught:
        run_measured([sys.executable, "-c", "raise SystemExit('no\\nwheel')"], variables, log, 60)
    assert caught.value.stderr == "wheel"
    with pytest.raises(peers.subprocess.CalledProcessError):
        run_measured([sys.executable, "-c", "import time; time.sleep(60)"], variables, log, 0.5)


def test_gguf_names_and_pairs() -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    assert peer_llama.gguf_name(name) == "blk.3.attn_q.weight"
    assert peer_llama.gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    # Two heads of four rows: rows 0 and 2 of a head are rotated together.
    rows = np.arange(8)[:, None]
    assert peer_llama.interleave(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
