"""Levels of `make test-portable` are those that loops in C are compiled for."""

import portable

from arbcli.kernels.runtime import native_library


def test_levels_are_those_that_the_loops_can_be_compiled_for():
    assert set(portable.LEVELS) <= {
        name for names in native_library.LEVELS.values() for name in names
    }
    assert set(native_library.levels_here()[:1]) <= set(portable.LEVELS)
