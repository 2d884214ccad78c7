# What `make aot` compiles, by the kernels' own names for what they take: a name that none has is one that was changed.

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.compile_ahead import variants


def test_every_argument_that_is_typed_is_a_kernels() -> None:
    """Else it is taken for a number, and the compiler says no word of which variant that is."""
    listed = list(variants())
    taken = {name for variant in listed for name in variant.kernel.arg_names}

    assert {name for variant in listed for name in variant.types} <= taken
    assert all(variant.constants.keys() <= {*variant.kernel.arg_names} for variant in listed)
