from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import onnx_ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.export.contract import GRAPHS, past_key, past_value
from kvgraph.export.exporter import expose_hidden_states
from kvgraph.export.passes.bind_capacity import bind_capacity
from kvgraph.runtime import ort_cache
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.threads import Threads

V = 97
# float32 sums in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def bundle(tiny_llama, exported):
    return exported(tiny_llama())


@pytest.fixture(scope="module")
def session(bundle):
    return OrtSession(bundle, threads=1)


@pytest.fixture
def ids():
    return np.random.default_rng(3).integers(0, V, (2, 40))


def changed(bundle, change):
    """The bytes of both graphs after `change(model)`."""
    graphs = {}
    for graph in GRAPHS:
        model = onnx_ir.load(bundle.graph_path(graph))
        change(model)
        graphs[graph] = onnx_ir.to_proto(model).SerializeToString()
    return graphs


def every(ids):
    """Logit positions for all of the new tokens."""
    return np.tile(np.arange(ids.shape[1]), (len(ids), 1))


def prefill(session, cache, ids, past=0):
    return session.prefill(cache, ids, np.full(len(ids), past), every(ids))


class TestCache:
    def test_steps_leave_every_buffer_where_it_is_and_write_the_new_slot_alone(self, session, ids):
        cache = session.allocate_cache(2)
        prefill(session, cache, ids[:, :5])
        pointers = [cache.buffer(tensor.name).pointer for tensor in session.contract.state]
        before = {tensor.name: cache.read(tensor.name) for tensor in session.contract.state}
        session.decode(cache, ids[:, 5:6], np.array([5, 5]))
        assert [cache.buffer(tensor.name).pointer for tensor in session.contract.state] == pointers
        for name, content in before.items():
            changed = (cache.read(name) != content).any(axis=(0, 1, 3))
            assert np.flatnonzero(changed).tolist() == [5]

    def test_onnx_runtime_is_given_one_memory_for_past_and_present(self, session, ids, monkeypatch):
        bound = {}
        cache = session.allocate_cache(2)
        inner = session._sessions["decode"]

        class Spy:
            def io_binding(self):
                io = inner.io_binding()
                for kind in ("input", "output"):
                    bind = getattr(io, f"bind_{kind}")
                    monkeypatch.setattr(io, f"bind_{kind}", self.record(bind), raising=True)
                return io

            def record(self, bind):
                def call(name, *place):
                    bound[name] = place
                    bind(name, *place)

                return call

            def run_with_iobinding(self, io):
                inner.run_with_iobinding(io)

        monkeypatch.setitem(session._sessions, "decode", Spy())
        session.decode(cache, ids[:, :1], np.zeros(2, int))
        for tensor in session.contract.state:
            assert bound[tensor.name] == bound[tensor.output]

    def test_buffers_start_small_and_double_up_to_the_limit_keeping_what_is_there(
        self, session, ids, monkeypatch
    ):
        monkeypatch.setattr(ort_cache, "FIRST_CAPACITY", 4)
        growing, roomy = session.allocate_cache(2, limit=40), session.allocate_cache(2, limit=40)
        roomy.reserve(40)
        capacities = []
        for start in range(40):
            step = ids[:, start : start + 1], np.full(2, start)
            np.testing.assert_allclose(
                session.decode(growing, *step).copy(), session.decode(roomy, *step), atol=TOLERANCE
            )
            capacities.append(growing.capacity)
        assert sorted(set(capacities)) == [4, 8, 16, 32, 40]
        assert roomy.capacity == 40

    def test_a_prefill_grows_the_buffer_at_once_to_a_power_of_two(self, session, ids, monkeypatch):
        monkeypatch.setattr(ort_cache, "FIRST_CAPACITY", 4)
        cache = session.allocate_cache(2)
        prefill(session, cache, ids[:, :9])
        assert cache.capacity == 16

    def test_padding_at_the_end_is_given_room(self, session, ids, monkeypatch):
        monkeypatch.setattr(ort_cache, "FIRST_CAPACITY", 4)
        cache = session.allocate_cache(2)
        # Row 0 holds 6 tokens; 3 of padding after them reach slot 8, past the 8 slots of a cache for 6.
        session.prefill(cache, ids[:, :3], np.array([6, 0]), every(ids[:, :3]))
        assert cache.capacity == 16

    def test_a_full_cache_refuses_the_next_token_and_stays_as_it_is(self, session, ids):
        cache = session.allocate_cache(2, limit=8)
        prefill(session, cache, ids[:, :8])
        before = cache.read(past_key(0))
        with pytest.raises(ValueError, match=r"row 0 has 8 tokens in the cache.*the cache allows 8"):
            session.decode(cache, ids[:, 8:9], np.array([8, 8]))
        np.testing.assert_array_equal(cache.read(past_key(0)), before)

    def test_reserve_refuses_more_than_the_limit(self, session):
        with pytest.raises(ValueError, match="9 cache slots asked for, this cache may have 8"):
            session.allocate_cache(1, limit=8).reserve(9)

    @pytest.mark.parametrize(("batch_size", "limit"), [(0, 8), (1, 0), (1, 65)])
    def test_impossible_sizes_are_refused(self, session, batch_size, limit):
        with pytest.raises(ValueError, match=r"batch_size is 0|limit is \d+, expected 1 to 64"):
            session.allocate_cache(batch_size, limit)

    def test_reset_fills_with_zeros(self, session, ids):
        cache = session.allocate_cache(2)
        first = prefill(session, cache, ids[:, :5])
        cache.reset()
        assert not cache.read(past_value(1)).any()
        np.testing.assert_array_equal(prefill(session, cache, ids[:, :5]), first)

    def test_a_state_tensor_that_is_not_there_is_refused(self, session):
        with pytest.raises(
            ValueError, match=r"'past_key_values.7.key' is unknown; the cache has past_key_values.0.key"
        ):
            session.allocate_cache(1).read("past_key_values.7.key")

    def test_a_capacity_that_is_written_in_is_allocated_whole(self, bundle, ids, session):
        state = [
            dataclasses.replace(tensor, shape=("B", *tensor.shape[1:2], 48, *tensor.shape[3:]))
            for tensor in bundle.contract.state
        ]
        contract = dataclasses.replace(bundle.contract, state=tuple(state))
        graphs = changed(bundle, lambda model: bind_capacity(model, bundle.contract, 48))
        fixed = OrtSession(bundle, threads=1, graphs=graphs, contract=contract)
        cache = fixed.allocate_cache(2)
        assert (cache.capacity, cache.limit) == (48, 48)
        expected = prefill(session, session.allocate_cache(2), ids)
        np.testing.assert_allclose(prefill(fixed, cache, ids), expected, atol=TOLERANCE)
        assert fixed.allocate_cache(1, limit=10).capacity == 48

    def test_the_buffers_go_with_the_last_reference(self, session, ids):
        cache = session.allocate_cache(2)
        prefill(session, cache, ids[:, :5])
        gone = weakref.ref(cache)
        del cache
        assert gone() is None


class TestCalls:
    def test_two_interleaved_sequences_do_not_disturb_each_other(self, session, ids):
        def alone(row):
            cache = session.allocate_cache(1)
            logits = [prefill(session, cache, ids[row : row + 1, :4])[:, -1]]
            for at in range(4, 12):
                logits.append(
                    session.decode(cache, ids[row : row + 1, at : at + 1], np.array([at]))[:, 0].copy()
                )
            return np.array(logits)

        expected = [alone(0), alone(1)]
        caches = [session.allocate_cache(1) for _ in range(2)]
        found = [[prefill(session, caches[row], ids[row : row + 1, :4])[:, -1]] for row in range(2)]
        for at in range(4, 12):
            for row in range(2):
                step = ids[row : row + 1, at : at + 1], np.array([at])
                found[row].append(session.decode(caches[row], *step)[:, 0].copy())
        np.testing.assert_array_equal(np.array(found), np.array(expected))

    def test_a_prefill_of_another_size_between_decodes_changes_nothing(self, session, ids):
        caches = [session.allocate_cache(2) for _ in range(2)]
        full = prefill(session, session.allocate_cache(2), ids[:, :12])
        prefill(session, caches[0], ids[:, :6])
        session.decode(caches[0], ids[:, 6:7], np.array([6, 6]))
        prefill(session, caches[1], ids[:, :3])
        chunk = prefill(session, caches[0], ids[:, 7:11], past=7)
        np.testing.assert_allclose(chunk, full[:, 7:11], atol=TOLERANCE)
        last = session.decode(caches[0], ids[:, 11:12], np.array([11, 11]))
        np.testing.assert_allclose(last[:, 0], full[:, 11], atol=TOLERANCE)

    def test_logits_of_a_prefill_outlive_the_next_one(self, session, ids):
        first = prefill(session, session.allocate_cache(2), ids[:, :5])
        kept = first.copy()
        prefill(session, session.allocate_cache(2), ids[:, 5:10])
        np.testing.assert_array_equal(first, kept)

    def test_a_cache_of_another_session_is_refused(self, session, bundle, ids):
        other = OrtSession(bundle, threads=1)
        with pytest.raises(ValueError, match="belongs to another session"):
            prefill(session, other.allocate_cache(2), ids)

    def test_ids_are_checked_before_onnx_runtime_sees_them(self, session):
        with pytest.raises(ValueError, match=r"input_ids\[0, 0\] is 97"):
            prefill(session, session.allocate_cache(1), np.array([[V]]))

    def test_no_threads_at_all_is_refused(self, bundle):
        with pytest.raises(ValueError, match="threads is 0, expected a number from 1 on"):
            OrtSession(bundle, threads=0)

    @pytest.mark.parametrize("threads", [Threads(2, spin=False), Threads(cores=(1, 0))])
    def test_threads_give_the_same_logits(self, bundle, session, ids, threads):
        other = OrtSession(bundle, threads=threads)
        found, expected = (prefill(one, one.allocate_cache(2), ids) for one in (other, session))
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


class TestHiddenStates:
    @pytest.fixture
    def open_session(self, bundle):
        graphs = changed(bundle, lambda model: expose_hidden_states(model, bundle.contract.num_layers))
        return lambda: OrtSession(bundle, threads=1, debug_outputs=True, graphs=graphs)

    def test_they_are_the_residual_stream_of_the_latest_call(self, tiny_llama, open_session, ids):
        session, path = open_session(), tiny_llama()
        # transformers norms what leaves its last layer before it shows it.
        model, raw = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
        model.model.layers[-1].register_forward_hook(lambda *call: raw.append(call[2]))
        with torch.no_grad():
            states = model(torch.from_numpy(ids[:, :7]), output_hidden_states=True).hidden_states
        expected = [*(state.numpy() for state in states[:-1]), raw[0].numpy()]
        cache = session.allocate_cache(2)
        prefill(session, cache, ids[:, :6])
        assert [state.shape for state in session.hidden_states()] == [(2, 6, 20)] * 3
        session.decode(cache, ids[:, 6:7], np.array([6, 6]))
        for found, state in zip(session.hidden_states(), expected, strict=True):
            np.testing.assert_allclose(found, state[:, 6:], atol=TOLERANCE)

    def test_without_debug_outputs_they_are_refused(self, session):
        with pytest.raises(RuntimeError, match="debug_outputs=True"):
            session.hidden_states()

    def test_before_the_first_call_there_are_none(self, open_session):
        session = open_session()
        with pytest.raises(RuntimeError, match="run a step first"):
            session.hidden_states()

    def test_a_bundle_without_them_is_refused(self, bundle):
        with pytest.raises(
            ValueError, match=r"prefill.onnx: has no output 'hidden_states.0'.*--debug-outputs"
        ):
            OrtSession(bundle, debug_outputs=True)
