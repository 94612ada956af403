import numpy as np
import pytest

from kvgraph.export.contract import Contract, scatter_state
from kvgraph.runtime.checks import check_step

V, SLOTS = 97, 8


@pytest.fixture
def contract():
    return Contract(V, 1, SLOTS, False, scatter_state([(2, 8)], "float32"))


@pytest.fixture
def length_contract():
    return Contract(V, 1, SLOTS, True, scatter_state([(2, 8)], "float32"))


def ids(*rows):
    return np.array(rows, np.int64)


def test_right_arrays_are_passed_through_without_a_copy(contract):
    tokens, past, positions = ids([1, 2, 96]), ids(5)[0:1], ids([0, 2])
    step = check_step(contract, 1, SLOTS, tokens, past, positions)
    assert step.input_ids is tokens
    assert step.logit_positions is positions
    assert step.past_length.base is past.base
    assert step.new_length is None


@pytest.mark.parametrize("bad", [-1, V, 2**40, -(2**62)])
def test_token_id_out_of_range_is_refused_with_its_place(contract, bad):
    with pytest.raises(ValueError, match=rf"input_ids\[1, 2\] is {bad}, expected 0 <= value < {V}"):
        check_step(contract, 2, SLOTS, ids([1, 2, 3], [4, 5, bad]), ids(0, 0), ids([0], [0]))


@pytest.mark.parametrize(
    "tokens",
    [
        np.ones((1, 3), np.float32),
        np.ones((1, 3), bool),
        np.array([["a"]]),
        np.array([[2**70]], object),
        [[1.0]],
    ],
)
def test_type_that_is_not_an_integer_is_refused(contract, tokens):
    with pytest.raises(TypeError, match=r"input_ids is .*, expected int64"):
        check_step(contract, 1, SLOTS, tokens, ids(0), ids([0]))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint64])
def test_other_integer_types_are_converted(contract, dtype):
    step = check_step(
        contract, 1, SLOTS, np.array([[1, 2]], dtype), np.array([3], dtype), np.array([[1]], dtype)
    )
    for array, expected in zip(
        (step.input_ids, step.past_length, step.logit_positions), ([[1, 2]], [3], [[1]]), strict=True
    ):
        assert array.dtype == np.int64
        assert array.tolist() == expected


def test_unsigned_number_beyond_int64_is_refused(contract):
    with pytest.raises(ValueError, match="int64 cannot hold"):
        check_step(contract, 1, SLOTS, np.array([[2**63]], np.uint64), ids(0), ids([0]))


@pytest.mark.parametrize("step", [slice(None, None, 2), slice(None, None, -1)])
def test_slices_are_made_contiguous(contract, step):
    tokens = np.arange(12, dtype=np.int64).reshape(2, 6)[:, step]
    positions = np.zeros((4, 2), np.int64)[::2, :1]
    checked = check_step(contract, 2, SLOTS, tokens, np.zeros(4, np.int64)[::2], positions)
    for array in (checked.input_ids, checked.past_length, checked.logit_positions):
        assert array.flags.c_contiguous
    np.testing.assert_array_equal(checked.input_ids, tokens)


@pytest.mark.parametrize("tokens", [np.int64(3), ids(1, 2), np.zeros((1, 1, 1), np.int64)])
def test_wrong_rank_is_refused(contract, tokens):
    with pytest.raises(ValueError, match=r"input_ids has shape \[.*expected 2 dimensions, \[B, S\]"):
        check_step(contract, 1, SLOTS, tokens, ids(0), ids([0]))


@pytest.mark.parametrize(
    ("tokens", "positions"), [([[]], [[0]]), (np.zeros((1, 0), np.int64), [[0]]), ([[1]], [[]])]
)
def test_empty_arrays_are_refused(contract, tokens, positions):
    with pytest.raises(ValueError, match="is empty"):
        check_step(contract, 1, SLOTS, tokens, ids(0), positions)


def test_rows_must_be_those_of_the_cache(contract):
    with pytest.raises(ValueError, match="past_length has 1 rows, the cache has 2"):
        check_step(contract, 2, SLOTS, ids([1], [2]), ids(0), ids([0], [0]))


@pytest.mark.parametrize("past", [-1, -(2**63)])
def test_negative_past_length_is_refused(contract, past):
    with pytest.raises(ValueError, match=rf"past_length\[1\] is {past}, expected 0 or more"):
        check_step(contract, 2, SLOTS, ids([1], [2]), ids(7, past))


def test_last_slot_may_be_written_and_none_beyond(contract):
    check_step(contract, 2, SLOTS, ids([1], [2]), ids(0, SLOTS - 1))
    with pytest.raises(
        ValueError, match=r"row 1 has 8 tokens in the cache and 1 more .* make 9, the cache allows 8"
    ):
        check_step(contract, 2, SLOTS, ids([1], [2]), ids(0, SLOTS))
    with pytest.raises(ValueError, match=r"row 0 has 6 tokens in the cache and 3 more .* make 9"):
        check_step(contract, 1, SLOTS, ids([1, 2, 3]), ids(6), ids([0]))


@pytest.mark.parametrize("position", [-1, 2, 2**40])
def test_logit_position_outside_the_new_tokens_is_refused(contract, position):
    with pytest.raises(ValueError, match=rf"logit_positions\[0, 1\] is {position}, expected 0 <= value < 2"):
        check_step(contract, 1, SLOTS, ids([1, 2]), ids(0), ids([1, position]))


def test_decode_takes_one_token_a_row(contract):
    with pytest.raises(ValueError, match="3 tokens a row, decode takes 1"):
        check_step(contract, 1, SLOTS, ids([1, 2, 3]), ids(0))


def test_new_length_is_given_only_to_graphs_that_take_it(contract, length_contract):
    assert check_step(contract, 1, SLOTS, ids([1, 2]), ids(0), ids([1]), ids(7)).new_length is None
    assert check_step(
        length_contract, 1, SLOTS, ids([1, 2]), ids(0), ids([1]), ids(7)
    ).new_length.tolist() == [7]


def test_new_length_is_all_new_tokens_by_default(length_contract):
    step = check_step(length_contract, 2, SLOTS, ids([1, 2], [3, 4]), ids(0, 1), ids([1], [1]))
    assert step.new_length.tolist() == [2, 2]


@pytest.mark.parametrize("new_length", [0, -3, 7])
def test_new_length_out_of_range_is_refused(length_contract, new_length):
    with pytest.raises(
        ValueError, match=rf"new_length\[0\] is {new_length} with 2 .* at least 1 and at most 6"
    ):
        check_step(length_contract, 1, SLOTS, ids([1, 2]), ids(2), ids([1]), ids(new_length))
