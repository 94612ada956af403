from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.runtime.element_types import element_type, ort_element_type, to_float32


@pytest.mark.parametrize("name", ["bfloat16", "float8e4m3fn"])
def test_types_that_numpy_lacks_are_read_as_ml_dtypes_reads_them(name):
    kind = element_type(name)
    codes = np.arange(2 ** (8 * kind.carrier.itemsize)).astype(kind.carrier)
    own = {"bfloat16": ml_dtypes.bfloat16, "float8e4m3fn": ml_dtypes.float8_e4m3fn}[name]
    np.testing.assert_array_equal(to_float32(codes, name), codes.view(own).astype(np.float32))


def test_an_unknown_element_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'float4' is unknown.*float32, int8"):
        element_type("float4")


def test_types_are_found_by_onnx_runtimes_names_too():
    assert ort_element_type("tensor(float16)").name == "float16"
    with pytest.raises(ValueError, match=r"'tensor\(string\)' is unknown"):
        ort_element_type("tensor(string)")
