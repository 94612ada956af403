"""Float bundles to quantize, quantized ones, and ONNX Runtime as the tests of quantization want it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import kvgraph.runtime.ort
from kvgraph.export.bundle import Bundle, hash_file
from kvgraph.export.targets.ort_cpu import widened_contract
from kvgraph.export.targets.ort_cpu_graph import lower_for_ort_cpu, needs_lowering
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import CalibrationOptions, check_sequences, read_calibration
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.linears import find_linears
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe
from kvgraph.quant.scheme import CacheScheme
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.perplexity import measure_perplexity
from kvgraph.runtime.session import Ids
from kvgraph.runtime.tokenizer import Tokenizer

# Stands for a calibrated scale of every input: those of the tiny models reach some 3.
_INPUT_SCALES = {"int8": 0.02, "float8_e4m3fn": 0.01}
# Every form of a quantized cache; the last two are what `--kv-cache` asks for.
_CACHE_SCHEMES = [
    *(
        CacheScheme(form, granularity)  # type: ignore[arg-type]
        for form in ("int8", "float8_e4m3fn")
        for granularity in ("tensor", "head", "channel")
    ),
    CacheScheme("int8", "channel", "unrotated"),
    CacheScheme("float8_e4m3fn", "tensor", "unrotated"),
]
# What one channel of the outlier model is multiplied by.
_OUTLIER_CHANNEL, _OUTLIER = 10, 100.0


@pytest.fixture(scope="session")
def tiny(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    """Two layers of odd sizes: 20 and 44 inputs are not whole blocks of 16 or 32."""
    return exported(tiny_llama())


@pytest.fixture(scope="session")
def tied(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    """The same with the embedding table as its head."""
    return exported(tiny_llama(tie_word_embeddings=True))


@pytest.fixture(scope="session")
def stories(exported: Callable[..., Bundle], shared_data: Path) -> Bundle:
    """A model that was trained."""
    return exported(shared_data / "stories260k")


@pytest.fixture(scope="session")
def input_scales() -> dict[str, float]:
    """Format -> the scale that `quantized` gives every input that has one for the whole tensor."""
    return _INPUT_SCALES


def _with_scales(bundle: Bundle, plan: QuantizationPlan) -> QuantizationPlan:
    """A plan with one of `_INPUT_SCALES` for every input that has one scale."""

    def complete(plan: GraphPlan) -> GraphPlan:
        found = find_linears(ir.load(bundle.graph_path("prefill")))
        scales = {}
        for linear in found.linears:
            scheme = plan.recipe.module_scheme(linear.module)
            if scheme is not None and scheme.activation is not None:
                scales[linear.module] = _INPUT_SCALES[scheme.activation.format]
        # SmoothQuant is a matter of calibration.
        return GraphPlan(replace(plan.recipe, smooth_quant=None), activation_scales=scales)

    prefill = complete(plan.prefill)
    return QuantizationPlan(prefill, prefill if plan.prefill is plan.decode else complete(plan.decode))


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Bundle, str], Bundle]:
    """Quantizes a bundle by a recipe, once for each pair."""

    @functools.cache
    def quantize(path: Path, recipe: str) -> Bundle:
        bundle = Bundle.open(path)
        output = tmp_path_factory.mktemp("quantized") / "bundle"
        return quantize_bundle(bundle, _with_scales(bundle, parse_plan(recipe)), output)

    return lambda bundle, recipe: quantize(bundle.path, recipe)


@pytest.fixture(scope="session")
def run_exactly() -> Callable[[Bundle], OrtSession]:
    """A bundle under ONNX Runtime, lowered for it where need be, whose weight-only products keep their input float.

    By default ONNX Runtime rounds that input to 8 bits in blocks of 32, which is no part of the graph.
    """
    options = kvgraph.runtime.ort.session_options

    def exact_options(*arguments: Any) -> object:
        found = options(*arguments)
        found.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        return found

    @functools.cache
    def open_path(path: Path) -> OrtSession:
        bundle = Bundle.open(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvgraph.runtime.ort, "session_options", exact_options)
            if not needs_lowering(bundle):
                return OrtSession(bundle, threads=1)
            graphs = lower_for_ort_cpu(bundle)
            return OrtSession(bundle, threads=1, graphs=graphs, contract=widened_contract(bundle.contract))

    return lambda bundle: open_path(bundle.path)


@pytest.fixture(scope="session")
def story_file(
    repository: Path, load_module: Callable[[Path], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Text to calibrate on, a story a line: from the grammar that the repository's own model was trained on."""
    stories = load_module(repository / "tests" / "tiny_model" / "stories.py")
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    told = itertools.islice(stories.tell_stories(0), 64)
    path.write_text("\n".join(story.text.replace("\n", " ") for story in told), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory, story_file: Path) -> Callable[..., Bundle]:
    """Quantizes a bundle that has a tokenizer by a recipe, or by one for each graph, calibrated on stories or `file`.

    Statistics of a bundle are collected once for all recipes.
    """
    statistics = tmp_path_factory.mktemp("statistics")

    @functools.cache
    def quantize(path: Path, prefill: Recipe, decode: Recipe | None, file: Path) -> Bundle:
        bundle = Bundle.open(path)
        graph = GraphPlan(prefill)
        plan = QuantizationPlan(graph, graph if decode is None else GraphPlan(decode))
        data = read_calibration(file, bundle, CalibrationOptions(samples=48))
        output = tmp_path_factory.mktemp("calibrated") / "bundle"
        with BundleWeights(bundle) as weights:
            complete = calibrate_plan(LayerwiseModel(bundle, weights, data), plan, statistics)
            return quantize_bundle(bundle, complete, output)

    return lambda bundle, prefill, decode=None, file=None: quantize(
        bundle.path, prefill, decode, file or story_file
    )


@pytest.fixture(
    params=_CACHE_SCHEMES, ids=lambda scheme: f"{scheme.format} {scheme.granularity} {scheme.keys}"
)
def cache_scheme(request: pytest.FixtureRequest) -> CacheScheme:
    """Each form of a quantized cache in turn."""
    return request.param


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle whose cache alone is quantized, calibrated on random tokens; each is made once."""
    made: dict[tuple[Path, CacheScheme, Recipe], Bundle] = {}

    def make(bundle: Bundle, scheme: CacheScheme, recipe: Recipe = Recipe("float")) -> Bundle:  # noqa: B008
        key = (bundle.path, scheme, recipe)
        if key not in made:
            folder = tmp_path_factory.mktemp("cached")
            random = np.random.default_rng(11)
            graph = GraphPlan(replace(recipe, kv_cache=scheme))
            data = check_sequences([random.integers(0, 97, 60) for _ in range(8)], bundle, "random")
            with BundleWeights(bundle) as weights:
                model = LayerwiseModel(bundle, weights, data)
                plan = calibrate_plan(model, QuantizationPlan(graph, graph), folder / "statistics")
                made[key] = quantize_bundle(bundle, plan, folder / "bundle")
        return made[key]

    return make


@pytest.fixture(scope="session")
def sequences() -> list[Ids]:
    """Random tokens for the tiny models to be calibrated on."""
    random = np.random.default_rng(3)
    return [random.integers(0, 97, length) for length in (17, 1, 30, 9, 2)]


@pytest.fixture
def opened() -> Iterator[Callable[[Bundle, Sequence[Ids]], LayerwiseModel]]:
    """Opens bundles with their data, and closes them."""
    weights: list[BundleWeights] = []

    def make(bundle: Bundle, sequences: Sequence[Ids]) -> LayerwiseModel:
        weights.append(BundleWeights(bundle))
        return LayerwiseModel(bundle, weights[-1], check_sequences(sequences, bundle, "test"))

    yield make
    for file in weights:
        file.close()


@pytest.fixture(scope="session")
def perplexity(shared_data: Path) -> Callable[[Bundle], float]:
    """Of a bundle on the text that stories260k's figure is given for, in windows of 255 tokens after BOS."""
    text = (shared_data / "text" / "tinystories_sample_en.txt").read_text(encoding="utf-8")

    @functools.cache
    def measure(path: Path) -> float:
        bundle = Bundle.open(path)
        tokenizer = Tokenizer.load(path, bundle.config)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return measure_perplexity(OrtSession(bundle), ids, 255, tokenizer.bos_token_id).perplexity

    return lambda bundle: measure(bundle.path)


@pytest.fixture(scope="session")
def outlier_model(stories: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same function with one channel of every normed stream times 100, its inverse in the weights that follow."""
    path = tmp_path_factory.mktemp("outlier") / "bundle"
    shutil.copytree(stories.path, path)
    with BundleWeights(stories) as weights, (path / WEIGHTS_FILE).open("r+b") as file:
        for name, stored in weights.tensors.items():
            module = name.split(".")[-2]
            if "layers" not in name or module in ("o_proj", "down_proj"):
                continue
            values = np.array(weights.read(name))
            values[_OUTLIER_CHANNEL] *= _OUTLIER if "layernorm" in module else 1 / _OUTLIER
            file.seek(stored.offset)
            file.write(values.tobytes())
    description = json.loads((path / "bundle.json").read_text())
    description["files"][WEIGHTS_FILE]["sha256"] = hash_file(path / WEIGHTS_FILE)
    (path / "bundle.json").write_text(json.dumps(description))
    return Bundle.open(path, verify=True)
