"""What tells the compiled kernels of configs apart."""

import pytest
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from strobe.kernels.sm80 import config as sm80_config
from strobe.kernels.sm90 import backward_config, config
from strobe.kernels.sm100 import config as sm100_config


def kernel(C):
    pass


CONFIGS = [
    (config.Config(64, 64, 2, 128, 4), "tile_q"),
    (backward_config.Config(96, 96, 64, turns=True), "k_stages"),
    (backward_config.SplitConfig(256, 256), "v_stages"),
    (backward_config.DqConfig(256, 256), "stages"),
    (sm80_config.Config(96, 96, 64, 64, 4), "leaves_by_q"),
    (sm100_config.Config(128, 128), "ctas"),
]


def name_on_disk(config) -> str:
    """As Triton makes it, of the kernel's source and its compile-time arguments."""
    return ASTSource(JITFunction(kernel), {"C": "constexpr"}, {(0,): config}).hash()


@pytest.mark.parametrize("config, derived", CONFIGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_rule_behind_a_property_counts(config, derived, monkeypatch):
    """Or a version that changes nothing else would run what an older one compiled."""
    before = name_on_disk(config)
    assert name_on_disk(config) == before
    monkeypatch.setattr(type(config), derived, property(lambda self: 7))
    assert name_on_disk(config) != before
