"""What is kept of a run layer by layer, against transformers with hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.export.bundle import Bundle
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibration import StatisticsReader, cache_directory, collect_statistics
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.statistics import LayerStatistics
from kvgraph.runtime.session import Floats, Ids

# Sums in another order.
TOLERANCE = 1e-4

Exported = Callable[..., Bundle]
TinyLlama = Callable[..., Path]
Opened = Callable[[Bundle, Sequence[Ids]], LayerwiseModel]


def oracle(checkpoint: Path, sequences: Sequence[Ids]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Inputs of every linear layer [tokens, I], and cached keys and values [tokens, K, D], of all sequences in turn."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs: dict[str, list[Floats]] = {}
    cached: dict[str, list[Floats]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, args: inputs.setdefault(name, []).append(args[0][0].numpy())

    def keep_keys(layer: int) -> Callable[..., None]:
        heads = (-1, model.config.num_key_value_heads, model.config.head_dim)
        entries = cached.setdefault(f"layers.{layer}.unrotated_key", [])
        return lambda _, args, keys: entries.append(keys[0].reshape(heads).numpy())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(keep(name))
    for layer, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(keep_keys(layer))
    with torch.no_grad():
        for ids in sequences:
            found = model(torch.from_numpy(ids)[None], use_cache=True).past_key_values
            for layer, entry in enumerate(found.layers):
                for role, tensor in (("key", entry.keys), ("value", entry.values)):
                    name = f"layers.{layer}.{role}"
                    cached.setdefault(name, []).append(tensor[0].transpose(0, 1).numpy())
    return (
        {name: np.concatenate(parts) for name, parts in inputs.items()},
        {name: np.concatenate(parts) for name, parts in cached.items()},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=["plain", "biases, multi-query", "dynamic rope"],
)
def test_statistics_are_those_of_transformers(
    tiny_llama: TinyLlama,
    exported: Exported,
    opened: Opened,
    sequences: list[Ids],
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    checkpoint = tiny_llama(**changes)
    inputs, cached = oracle(checkpoint, sequences)
    model = opened(exported(checkpoint, dtype="float32"), sequences)
    seen = set()
    for piece, statistics in collect_statistics(model, cache_directory(tmp_path, model)):
        for product in piece.products:
            rows, found = inputs[product.module], statistics.inputs[product.input]
            np.testing.assert_allclose(
                found.largest, np.abs(rows).max(axis=0), rtol=TOLERANCE, atol=TOLERANCE
            )
            np.testing.assert_allclose(found.mean, np.abs(rows).mean(axis=0), rtol=TOLERANCE, atol=TOLERANCE)
            # All tokens are kept, for there are few; batches put them in another order.
            assert found.rows.shape == rows.shape
            np.testing.assert_allclose(np.sort(found.rows, axis=0), np.sort(rows, axis=0), atol=5e-3)
            seen.add(product.module)
        for role, found in statistics.cache.items():
            entries = cached[f"{piece.name}.{role}"]
            np.testing.assert_allclose(found.high, entries.max(axis=0), atol=TOLERANCE)
            np.testing.assert_allclose(found.low, entries.min(axis=0), atol=TOLERANCE)
            np.testing.assert_allclose(found.mean, entries.mean(axis=0), atol=TOLERANCE)
            half = entries.shape[-1] // 2
            pairs = np.hypot(entries[..., :half], entries[..., half:]).max(axis=0)
            expected = np.tile(pairs, 2) if role == "key" else np.abs(entries).max(axis=0)
            np.testing.assert_allclose(found.length, expected, atol=TOLERANCE)
            assert found.turned.all() == (role == "key")
    assert seen == inputs.keys()


def test_a_stopped_run_goes_on_with_its_layer(
    tiny_llama: TinyLlama,
    exported: Exported,
    opened: Opened,
    sequences: list[Ids],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opened(exported(tiny_llama()), sequences)
    directory = cache_directory(tmp_path, model)
    whole = cache_directory(tmp_path / "whole", model)
    expected = {piece.name: statistics for piece, statistics in collect_statistics(model, whole)}
    for piece, _ in collect_statistics(model, directory):
        if piece.name == "layers.0":
            break
    ran: list[str] = []
    run = LayerwiseModel.run

    def counted(self: LayerwiseModel, piece: Any, *args: Any, **keywords: Any) -> None:
        ran.append(piece.name)
        run(self, piece, *args, **keywords)

    monkeypatch.setattr(LayerwiseModel, "run", counted)
    found = {piece.name: statistics for piece, statistics in collect_statistics(model, directory)}
    assert ran == ["layers.1", "head"]
    assert_same(found, expected)
    # A third run, as of another recipe, computes nothing.
    assert_same({piece.name: entry for piece, entry in collect_statistics(model, directory)}, expected)
    assert ran == ["layers.1", "head"]
    assert not list(directory.glob("stream.*"))


def test_lost_files_are_computed_again(
    tiny_llama: TinyLlama, exported: Exported, opened: Opened, sequences: list[Ids], tmp_path: Path
) -> None:
    model = opened(exported(tiny_llama()), sequences)
    directory = cache_directory(tmp_path, model)
    expected = {piece.name: statistics for piece, statistics in collect_statistics(model, directory)}
    (directory / "layers.1.npz").unlink()
    found = {piece.name: statistics for piece, statistics in collect_statistics(model, directory)}
    assert_same(found, expected)


def test_two_processes_share_one_run(
    tiny_llama: TinyLlama, exported: Exported, opened: Opened, sequences: list[Ids], tmp_path: Path
) -> None:
    """The second waits for the first, computes nothing, and leaves what GPTQ keeps there alone."""
    bundle = exported(tiny_llama())
    first, second = (opened(bundle, sequences) for _ in range(2))
    directory = cache_directory(tmp_path, first)
    (directory / "gptq.other").mkdir()
    # A process of its own is not needed: locks belong to open files.
    collecting = collect_statistics(first, directory)
    expected = [next(collecting)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(collect_statistics(second, directory)))
        expected += list(collecting)
        found = waiting.result(timeout=60)
    assert_same(*({piece.name: entry for piece, entry in each} for each in (found, expected)))
    assert (directory / "gptq.other").is_dir()
    assert not list(directory.glob("stream.*"))


def assert_same(found: dict[str, LayerStatistics], expected: dict[str, LayerStatistics]) -> None:
    assert found.keys() == expected.keys()
    for name, statistics in found.items():
        for value, entry in statistics.inputs.items():
            np.testing.assert_array_equal(entry.largest, expected[name].inputs[value].largest)
            np.testing.assert_array_equal(entry.rows, expected[name].inputs[value].rows)


def test_the_cache_is_that_of_bundle_and_data(
    tiny_llama: TinyLlama, exported: Exported, opened: Opened, sequences: list[Ids], tmp_path: Path
) -> None:
    models = [
        opened(exported(tiny_llama()), sequences),
        opened(exported(tiny_llama()), [ids[::-1].copy() for ids in sequences]),
        opened(exported(tiny_llama(num_key_value_heads=1)), sequences),
    ]
    assert len({cache_directory(tmp_path, model) for model in models}) == 3


def test_a_reader_finds_a_module_s_inputs(
    tiny_llama: TinyLlama, exported: Exported, opened: Opened, sequences: list[Ids], tmp_path: Path
) -> None:
    model = opened(exported(tiny_llama()), sequences)
    directory = cache_directory(tmp_path, model)
    expected = {
        product.module: statistics.inputs[product.input]
        for piece, statistics in collect_statistics(model, directory)
        for product in piece.products
    }
    reader = StatisticsReader(model, directory)
    for module, inputs in expected.items():
        found = reader.inputs(module)
        assert found is not None
        np.testing.assert_array_equal(found.rows, inputs.rows)
    assert reader.inputs("model.embed_tokens") is None


def test_activations_that_are_not_finite_name_their_layer(
    tiny_llama: TinyLlama,
    exported: Exported,
    opened: Opened,
    sequences: list[Ids],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opened(exported(tiny_llama()), sequences)
    own = LayerwiseModel.layer_weights

    def broken(self: LayerwiseModel, piece: Any) -> dict[str, Floats]:
        weights = own(self, piece)
        if piece.name == "layers.1":
            weights["model.layers.1.mlp.up_proj.weight"] = np.full((20, 44), 3e38, np.float32)
        return weights

    monkeypatch.setattr(LayerwiseModel, "layer_weights", broken)
    with pytest.raises(ValueError, match=r"layers\.1: calibration makes .* NaN or infinite"):
        list(collect_statistics(model, cache_directory(tmp_path, model)))


def test_only_one_layer_is_in_memory(
    tiny_llama: TinyLlama,
    exported: Exported,
    opened: Opened,
    sequences: list[Ids],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the weights, each is read once, and the embedding table by the rows in use."""
    model = opened(exported(tiny_llama()), sequences)
    read: list[tuple[str, int]] = []
    own = BundleWeights.read

    def counted(self: BundleWeights, name: str, *args: Any) -> Any:
        found = own(self, name, *args)
        read.append((name, len(found)))
        return found

    monkeypatch.setattr(BundleWeights, "read", counted)
    for piece, _ in collect_statistics(model, cache_directory(tmp_path, model)):
        names = {name for name, _ in read}
        if piece.name == "layers.0":
            assert not any("layers.1" in name for name in names)
    table = [rows for name, rows in read if name == "model.embed_tokens.weight"]
    assert set(table) == {1}
    assert len(table) == len(np.unique(np.concatenate(sequences)))
    others = [name for name, _ in read if name != "model.embed_tokens.weight"]
    assert len(others) == len(set(others))
