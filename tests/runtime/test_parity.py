from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from kvgraph.export.contract import Contract, past_key, past_value, scatter_state
from kvgraph.runtime.parity import compare_sessions, plan_steps
from kvgraph.runtime.parity_bands import BANDS, band_for
from kvgraph.runtime.parity_metrics import compare_logits
from kvgraph.runtime.parity_plot import plot_report
from kvgraph.runtime.parity_table import format_report, verdict
from kvgraph.runtime.session import SessionInfo

V, LAYERS, HEADS, HEAD_DIM, EMBEDDING = 11, 3, 2, 4, 5
BAND = BANDS["float32"]
ROWS = [np.arange(9) % V, np.array([5, 2, 8, 0]), np.array([7])]


class FakeCache:
    def __init__(self, state, batch_size, limit):
        self.batch_size, self.limit, self.capacity = batch_size, limit, limit
        self.buffers = {tensor.name: np.zeros((batch_size, HEADS, limit, HEAD_DIM)) for tensor in state}

    def read(self, name):
        return self.buffers[name].astype(np.float32)


class FakeSession:
    """Caches and logits are waves of token and position; `spoil(call, cache, logits, hidden)` puts errors in them."""

    def __init__(self, spoil=None, name="fake", **changes):
        contract = Contract(V, LAYERS, 64, False, scatter_state([(HEADS, HEAD_DIM)] * LAYERS, "float32"))
        self.contract = dataclasses.replace(contract, **changes)
        self.info = SessionInfo(name, "1", "cpu", "float32", "tests")
        self.spoil = spoil or (lambda *_: None)
        self.calls = []

    def allocate_cache(self, batch_size, limit=None):
        return FakeCache(self.contract.state, batch_size, limit or 64)

    def prefill(self, cache, input_ids, past_length, logit_positions, new_length=None):
        return np.take_along_axis(
            self._run(cache, input_ids, past_length), logit_positions[:, :, None], axis=1
        )

    def decode(self, cache, input_ids, past_length):
        return self._run(cache, input_ids, past_length)

    def hidden_states(self):
        return self._hidden

    def _run(self, cache, input_ids, past_length):
        position = past_length[:, None] + np.arange(input_ids.shape[1])
        phase = (input_ids * 3 + position * 7)[..., None]
        for index, buffer in enumerate(cache.buffers.values()):
            entries = np.sin(phase + index + np.arange(HEADS * HEAD_DIM)).reshape(
                *position.shape, HEADS, HEAD_DIM
            )
            for row, slots in enumerate(position):
                buffer[row, :, slots] = entries[row]
        logits = np.sin(phase * np.arange(1, V + 1)).astype(np.float32)
        self._hidden = tuple(
            np.cos(phase + index + np.arange(EMBEDDING)).astype(np.float32) for index in range(LAYERS + 1)
        )
        self.spoil(len(self.calls), cache, logits, self._hidden)
        self.calls.append((input_ids.copy(), past_length.copy()))
        return logits


def compare(spoil=None, rows=ROWS, prefill=3, **options):
    return compare_sessions(
        FakeSession(name="reference"),
        FakeSession(spoil, "candidate"),
        rows,
        prefill=prefill,
        band=BAND,
        **options,
    )


class TestPlan:
    @pytest.mark.parametrize("chunk", [None, 1, 2, 5])
    @pytest.mark.parametrize("prefill", [1, 3, 9])
    def test_every_token_of_every_row_comes_once_and_in_order(self, prefill, chunk):
        seen = [[] for _ in ROWS]
        for step in plan_steps(ROWS, prefill, chunk):
            assert step.graph == ("prefill" if max(map(len, seen)) < prefill else "decode")
            for row, tokens in enumerate(seen):
                if step.valid[row]:
                    assert step.past_length[row] == len(tokens)
                tokens += step.input_ids[row, : step.valid[row]].tolist()
        assert seen == [row.tolist() for row in ROWS]

    def test_a_row_that_has_ended_repeats_its_last_token_in_place(self):
        last = plan_steps(ROWS, 3)[-1]
        assert last.input_ids[:, 0].tolist() == [8, 0, 7]
        assert last.past_length.tolist() == [8, 3, 0]
        assert last.valid.tolist() == [1, 0, 0]

    def test_the_length_of_a_whole_prefill_is_told_in_every_chunk(self):
        chunks = [step for step in plan_steps([np.zeros(7, int)], 5, 2) if step.graph == "prefill"]
        assert [int((step.past_length + step.new_length)[0]) for step in chunks] == [5, 5, 5]

    @pytest.mark.parametrize(
        ("rows", "prefill", "chunk"), [([], 1, None), ([[]], 1, None), ([[1]], 0, None), ([[1]], 1, 0)]
    )
    def test_nothing_to_compare_is_refused(self, rows, prefill, chunk):
        with pytest.raises(ValueError, match=r"expected (one or more rows|1 or more tokens)"):
            plan_steps(rows, prefill, chunk)


class TestSessions:
    def test_equal_sessions_have_no_errors(self):
        report = compare(layers=True)
        totals = report.totals
        assert report.in_band
        assert report.first_out is None
        assert (totals.steps, totals.tokens) == (7, sum(map(len, ROWS)))
        assert (totals.logits.max_abs, totals.logits.kl, totals.logits.agree) == (0, 0, totals.tokens)
        assert totals.cache == (0,) * LAYERS
        assert totals.hidden == (0,) * (LAYERS + 1)

    def test_both_sessions_get_the_same_tokens(self):
        sessions = FakeSession(), FakeSession()
        compare_sessions(*sessions, ROWS, prefill=3, band=BAND, chunk=2)
        for calls in zip(sessions[0].calls, sessions[1].calls, strict=True):
            np.testing.assert_equal(*calls)

    def test_an_error_of_the_logits_is_found_in_its_step(self):
        def spoil(call, cache, logits, hidden):
            if call == 2:
                logits[0, 0, 4] += 0.01

        report = compare(spoil)
        assert report.first_out.step == 2
        assert report.first_out.graph == "decode"
        assert report.first_out.first_layer is None
        assert report.first_out.logits.max_abs == pytest.approx(0.01, abs=1e-6)
        assert [step.step for step in report.steps if not step.in_band] == [2]
        assert report.totals.logits.mean_abs == pytest.approx(0.01 / V / report.totals.tokens, rel=1e-3)

    @pytest.mark.parametrize("role", [past_key, past_value])
    def test_an_error_of_a_cache_is_found_with_its_layer(self, role):
        def spoil(call, cache, logits, hidden):
            if call == 3:
                cache.buffers[role(1)][0, 1, 4, 2] += 0.5
                cache.buffers[role(2)][0, 1, 4, 2] += 0.5

        report = compare(spoil)
        assert (report.first_out.step, report.first_out.first_layer) == (3, 1)
        assert report.totals.cache[0] == 0
        assert report.totals.cache[1] == pytest.approx(0.5, abs=1e-6)

    def test_an_old_slot_that_is_overwritten_is_an_error(self):
        def spoil(call, cache, logits, hidden):
            if call == 5:
                cache.buffers[past_key(0)][1, 0, 0] = 0

        assert compare(spoil).first_out.step == 5

    def test_what_lies_behind_a_row_is_no_error(self):
        def spoil(call, cache, logits, hidden):
            cache.buffers[past_key(0)][2, :, 1:] = 9
            logits[2, 1:] = 9

        assert compare(spoil).in_band

    def test_the_first_hidden_state_out_of_band_is_named(self):
        def spoil(call, cache, logits, hidden):
            if call >= 4:
                for index in (2, 3):
                    hidden[index][0] += 1

        report = compare(spoil, layers=True)
        assert (report.first_out.step, report.first_out.first_hidden) == (4, 2)
        assert "first step 4 (decode, position 6), caches in band, first hidden state layer 1" in verdict(
            report
        )

    def test_no_number_is_out_of_band_and_null_in_json(self):
        def spoil(call, cache, logits, hidden):
            if call == 1:
                logits[0, 0, 0] = np.nan

        report = compare(spoil)
        assert report.first_out.step == 1
        assert report.worst.step == 1
        assert report.first_out.logits.differ == 1
        data = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert data["totals"]["logits"]["max_abs"] is None
        assert data["first_step_out_of_band"] == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"vocab_size": 12},
            {"num_layers": 4},
            {"state": scatter_state([(1, HEAD_DIM)] * LAYERS, "float32")},
        ],
    )
    def test_different_models_are_refused(self, changes):
        with pytest.raises(ValueError, match="compare one model with itself"):
            compare_sessions(FakeSession(), FakeSession(**changes), ROWS, prefill=1, band=BAND)


class TestMetrics:
    def test_errors_are_those_of_the_textbook(self):
        generator = np.random.default_rng(0)
        reference, candidate = generator.normal(size=(2, 6, V)).astype(np.float32)
        found = compare_logits(reference, candidate, tie=0)
        kls, cosines = [], []
        for right, other in zip(reference.tolist(), candidate.tolist(), strict=True):
            p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (right, other))
            kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            dot = sum(a * b for a, b in zip(right, other, strict=True))
            cosines.append(dot / math.hypot(*right) / math.hypot(*other))
        assert found.kl == pytest.approx(max(kls))
        assert found.kl_mean == pytest.approx(sum(kls) / 6)
        assert found.cosine == pytest.approx(min(cosines))
        assert found.max_abs == pytest.approx(np.abs(reference - candidate).max())
        assert found.mean_abs == pytest.approx(np.abs(reference - candidate).mean())
        assert found.agree == (reference.argmax(1) == candidate.argmax(1)).sum()

    def test_near_ties_are_told_apart_from_clear_differences(self):
        reference = np.array([[1.0, 0.999, 0], [1, 0.5, 0], [1, 0.5, 0], [0, 0.999, 1]], np.float32)
        candidate = np.array([[1.0, 1.001, 0], [1, 1.1, 0], [1, 0.9, 0], [1.2, 0, 1]], np.float32)
        found = compare_logits(reference, candidate, tie=0.01)
        # The last row's choice is far behind, though the reference's two best are near each other.
        assert (found.agree, found.ambiguous, found.differ) == (1, 1, 2)

    def test_logits_that_are_large_do_not_overflow(self):
        reference = np.array([[1e4, 0, -1e4]], np.float32)
        assert compare_logits(reference, reference + 1, tie=0).kl == pytest.approx(0, abs=1e-9)

    def test_the_coarsest_type_gives_the_band(self):
        assert band_for("float32", "float32").name == "float32"
        assert band_for("float32", "bfloat16", "float16").name == "bfloat16"
        assert band_for("float16", "float8e4m3fn").name == "int8"
        assert band_for("float32", "float8_e4m3fn", "float4_e2m1").name == "int4"
        assert band_for("uint4", "int8").name == "int4"
        assert band_for("int8", "int64").name == "int8"

    def test_a_tolerance_follows_outliers(self):
        assert BAND.tolerance(1.0) == 1e-4
        assert BAND.tolerance(1000.0) == pytest.approx(5e-3)


class TestPresentation:
    def test_the_table_shows_the_sessions_the_worst_step_and_the_verdict(self):
        def spoil(call, cache, logits, hidden):
            if call == 21:
                logits[0, 0] += 1

        text = format_report(compare(spoil, rows=[np.arange(40) % V], layers=True))
        assert "reference  reference 1 on cpu, float32 cache: tests" in text
        (worst,) = (line for line in text.splitlines() if line.endswith("OUT"))
        assert worst.split()[:5] == ["21", "decode", "23", "1", "1.00e+00"]
        assert "OUT OF BAND: 1 of 38 steps" in text.splitlines()[-1]
        assert "layer 2" in text

    def test_near_ties_are_named(self):
        def spoil(call, cache, logits, hidden):
            logits[:, :, :2] = 5
            logits[:, :, 1] += 1e-5

        def reference(call, cache, logits, hidden):
            logits[:, :, :2] = 5

        report = compare_sessions(
            FakeSession(reference), FakeSession(spoil), [[1, 2, 3]], prefill=2, band=BAND
        )
        assert report.in_band
        assert "top-1 0/3 3 AMBIGUOUS" in verdict(report)

    @pytest.mark.parametrize("layers", [True, False])
    def test_the_picture_is_a_png(self, tmp_path, layers):
        def spoil(call, cache, logits, hidden):
            if call == 5:
                hidden[1][:] = np.nan
                logits[0] += 1

        plot_report(compare(spoil, layers=layers), tmp_path / "errors.png")
        assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
