"""The kernels for AArch64, emulated, have the bits of those that run here: see ``scripts/test_neon.sh``."""

from __future__ import annotations

import pytest
from cpu_helpers import attend_calls_of_every_kind
from emulated_library import host_library

from warmattn.backend.cpu import native
from warmattn.testing import VALUE_FORMS, assert_same_bits


def named(name: str) -> native.Isa:
    """The instruction set of this name in the library that ``native.load_library`` gives just now."""
    (isa,) = (isa for isa in native.isas.__wrapped__() if isa.name == name)
    assert isa.missing is None
    return isa


@pytest.mark.parametrize("form", VALUE_FORMS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(("there", "here"), [("neon", "avx2"), ("portable", "portable")])
def test_bits_are_those_of_this_machine(
    there: str, here: str, head_dim: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = list(attend_calls_of_every_kind(named(there), head_dim, form))
    monkeypatch.setattr(native, "load_library", host_library)
    for results in zip(emulated, attend_calls_of_every_kind(named(here), head_dim, form), strict=True):
        assert_same_bits(*results)
