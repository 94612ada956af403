"""The two graphs of a bundle under ONNX Runtime, on a CPU or an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, Contract, GraphName, TensorSpec, graph_file, hidden_state
from kvgraph.runtime.checks import check_step
from kvgraph.runtime.element_types import ort_element_type
from kvgraph.runtime.kernels import instruction_set
from kvgraph.runtime.ort_binding import Binding
from kvgraph.runtime.ort_cache import OrtCache
from kvgraph.runtime.ort_load import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    check_interface,
    check_providers,
    device_in_use,
    import_onnxruntime,
    load_graph,
    runtime_errors,
    session_options,
)
from kvgraph.runtime.resident_weights import WEIGHTS_FILE, load_weights
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo
from kvgraph.runtime.threads import Threads


class OrtSession:
    """A bundle under ONNX Runtime, see `kvgraph.runtime.session.Session`.

    Float32 weights are used where they lie in the mapped file, so that the two graphs share one copy of them and
    opening takes no time. ONNX Runtime would repack them for each graph instead: twice the memory, the same speed in
    decode, and 10% (512 tokens) to 30% (128 tokens) less time in prefill; the target "ort-cpu" is faster than either.
    Other weights are converted when a graph is opened, each graph has its own copy.

    Args:
        bundle: What to run.
        providers: ONNX Runtime execution providers; it is an error if one of them is not used.
        device_id: Which GPU.
        threads: What computes on a CPU: a number of threads, default one a core, or more about them.
        debug_outputs: Give `hidden_states` after each call; the graphs must have them as outputs.
        graphs: Bytes to run instead of the bundle's ONNX files; without decode, prefill does its work, too.
        contract: What `graphs` promise, default the bundle's contract.
        folder: Where the external data of `graphs` lies, default the bundle.
        library: The shared library of the operators in `graphs` that are not ONNX Runtime's own.
        target: Name of the target that `graphs` are of, for reports.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: A provider is not available, or a graph differs from the contract.
        RuntimeError: ONNX Runtime does not load a graph, or runs it elsewhere than asked.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        providers: Sequence[str] = (CPU_PROVIDER,),
        device_id: int = 0,
        threads: int | Threads | None = None,
        debug_outputs: bool = False,
        graphs: Mapping[GraphName, bytes] | None = None,
        contract: Contract | None = None,
        folder: Path | None = None,
        library: Path | None = None,
        target: str | None = None,
    ) -> None:
        check_providers(providers)
        self._contract = contract or bundle.contract
        self._device = ("cuda", device_id) if providers[0] == CUDA_PROVIDER else ("cpu", 0)
        self._check_device(bundle, own_graphs=graphs is None)
        mapped = bundle.dtype == "float32" and bundle.recipe is None and self._device[0] == "cpu"
        hidden_names = [hidden_state(layer) for layer in range(self._contract.num_layers + 1)]
        self._sessions: dict[GraphName, Any] = {}
        self._hidden: dict[GraphName, tuple[TensorSpec, ...]] = {}
        # They outlive the sessions, which use them where they lie.
        self._weights = {} if library is None or folder is None else load_weights(folder / WEIGHTS_FILE)
        self._decodes_by_prefill = graphs is not None and "decode" not in graphs
        takes_turns = len(self._contract.graphs) - self._decodes_by_prefill > 1
        for name in self._contract.graphs:
            if name == "decode" and self._decodes_by_prefill:
                self._sessions[name], self._hidden[name] = self._sessions["prefill"], self._hidden["prefill"]
                continue
            label = graph_file(name)
            options = session_options(Threads.of(threads), mapped, library, self._weights, takes_turns)
            source = bundle.graph_path(name) if graphs is None else graphs[name]
            session = load_graph(label, source, folder or bundle.path, options, providers, device_id)
            check_interface(label, session, self._contract.graph(name), hidden_names)
            self._sessions[name] = session
            self._hidden[name] = (
                _hidden_outputs(label, session, hidden_names) if debug_outputs and name in GRAPHS else ()
            )
        self._latest: Binding | None = None
        self._errors = runtime_errors()
        self._info = SessionInfo(
            runtime="onnxruntime",
            version=import_onnxruntime().__version__,
            device=device_in_use(self._sessions["decode"]),
            dtype=self._contract.state[0].dtype,
            source=str(bundle.path),
            kernels=None if library is None else instruction_set(),
            recipe=bundle.recipe_name,
            target=target,
        )

    @property
    def contract(self) -> Contract:
        """What the graphs promise."""
        return self._contract

    @property
    def info(self) -> SessionInfo:
        """What the session runs on."""
        return self._info

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> OrtCache:
        """A zero-filled cache for `batch_size` rows of at most `limit` slots (default: what the model allows).

        Raises:
            ValueError: `batch_size` or `limit` is out of its range.
        """
        most = self._contract.capacity or self._contract.max_positions
        limit = most if limit is None else limit
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected 1 or more")
        if not 1 <= limit <= most:
            raise ValueError(f"limit is {limit}, expected 1 to {most}, the slots that the model allows")
        return OrtCache(self, self._contract.state, batch_size, limit, *self._device)

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """Logits [B, N, V] of the tokens at `logit_positions`, see `kvgraph.runtime.session.Session.prefill`."""
        return self._run("prefill", cache, input_ids, past_length, logit_positions, new_length)

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """Logits [B, 1, V] after one token a row, in an array that the next call writes again."""
        return self._run("decode", cache, input_ids, past_length)

    def hidden_states(self) -> tuple[Floats, ...]:
        """Residual stream before each layer and after the last, of the latest call: num_layers + 1 x [B, S, E].

        Raises:
            RuntimeError: The session was opened without `debug_outputs`, or has not run yet.
        """
        if not self._hidden["decode"]:
            raise RuntimeError("hidden states are not bound; open the session with debug_outputs=True")
        if self._latest is None:
            raise RuntimeError(
                "hidden states are those of the latest call, and there was none; run a step first"
            )
        return self._latest.hidden_states()

    def _run(
        self,
        graph: GraphName,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids | None = None,
        new_length: Ids | None = None,
    ) -> Floats:
        if not isinstance(cache, OrtCache) or cache.owner is not self:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        inputs = check_step(
            self._contract, cache.batch_size, cache.limit, input_ids, past_length, logit_positions, new_length
        )
        # Padding counts: ONNX Runtime refuses a scatter whose last row of padding is past the end.
        cache.reserve(int(inputs.past_length.max()) + inputs.input_ids.shape[1])
        binding = cache.bindings.get(graph)
        if binding is None:
            session, hidden = self._sessions[graph], self._hidden[graph]
            by_prefill = graph == "decode" and self._decodes_by_prefill
            binding = Binding(
                session, self._contract, cache, self._device, hidden, decodes_by_prefill=by_prefill
            )
            cache.bindings[graph] = binding
        self._latest = binding
        try:
            return binding.run(inputs, cache)
        except self._errors as error:
            raise RuntimeError(f"{graph_file(graph)}: ONNX Runtime failed in a step: {error}") from error

    def _check_device(self, bundle: Bundle, own_graphs: bool) -> None:
        dtypes = {tensor.dtype for tensor in self._contract.state}
        if self._device[0] == "cpu":
            # No MatMul, Add or Attention for it in ONNX Runtime 1.32.
            if "bfloat16" in dtypes or (own_graphs and bundle.dtype == "bfloat16"):
                raise ValueError(
                    f"{bundle.path}: the graphs are bfloat16, which ONNX Runtime does not compute on a CPU; "
                    f"run kvgraph build {bundle.path} --target ort-cpu, then use that target"
                )
            if own_graphs and any(entry["dtype"] == "float4_e2m1" for entry in bundle.weights.values()):
                raise ValueError(
                    f"{bundle.path}: the weights are 4-bit floats, which ONNX Runtime does not have on a CPU; "
                    f"run kvgraph build {bundle.path} --target ort-cpu, then use that target"
                )
        elif any(tensor.form == "delta" for tensor in self._contract.state):
            raise ValueError(
                f"{bundle.path}: the cache is {', '.join(sorted(dtypes))} in delta form, which this runtime writes on "
                "a CPU only; ask for CPUExecutionProvider, or build a TensorRT target"
            )


def _hidden_outputs(label: str, session: Any, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The graph's residual outputs, [B, S, E] each."""
    outputs = {arg.name: arg for arg in session.get_outputs()}
    missing = [name for name in names if name not in outputs]
    if missing:
        raise ValueError(
            f"{label}: has no output {missing[0]!r}, so hidden states cannot be compared; "
            "re-export with kvgraph export --debug-outputs"
        )
    return tuple(
        TensorSpec(name, ort_element_type(outputs[name].type).name, tuple(outputs[name].shape))
        for name in names
    )
