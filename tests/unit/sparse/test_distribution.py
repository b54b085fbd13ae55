"""How many blocks each layer gets."""

import pytest

from pumice.errors import UserError
from pumice.sparse.distribution import active_blocks, erk_densities
from pumice.sparse.layout import BlockGrid


def grids(**shapes):
    return {name: BlockGrid(*shape, 1, 2) for name, shape in shapes.items()}


def test_uniform_counts_give_the_total_that_is_nearest():
    """20 blocks each at 0.32 are 6.4; three layers should have 19.2 in all: 6 each, and the first one more."""
    assert active_blocks(grids(a=(4, 10), b=(4, 10), c=(4, 10)), 0.32, "uniform") == {"a": 7, "b": 6, "c": 6}


def test_no_layer_is_empty_and_density_one_is_everything():
    layers = grids(small=(1, 2), large=(10, 20))
    assert active_blocks(layers, 0.01, "uniform") == {"small": 1, "large": 1}
    for distribution in ("uniform", "erk"):
        assert active_blocks(layers, 1.0, distribution) == {"small": 1, "large": 100}


def test_decimal_densities_do_not_lose_a_block():
    """0.7 − 0.4 is 0.29999999999999993, so that 10 times it is less than 3."""
    assert active_blocks(grids(a=(2, 10)), 0.3, "uniform") == {"a": 3}
    assert active_blocks(grids(a=(2, 10)), 0.7 - 0.4, "uniform") == {"a": 3}


def test_short_blocks_count_by_their_entries():
    """(2, 5) in blocks of 2 has 6 blocks of 5/3 entries on average: 0.5 of them is 3, not 10 / 2 / 2."""
    assert active_blocks(grids(a=(2, 5)), 0.5, "uniform") == {"a": 3}


def test_erk_by_hand():
    """Raw densities (r + c)/(r c): 30/200 = 0.15, 60/800 = 0.075; 0.3 · 1000 = s · (30 + 60), so s = 10/3."""
    layers = grids(a=(10, 20), b=(20, 40))
    assert erk_densities(layers, 0.3) == pytest.approx({"a": 0.5, "b": 0.25})
    assert active_blocks(layers, 0.3, "erk") == {"a": 50, "b": 100}


def test_erk_caps_at_one_and_gives_the_rest_to_others():
    """s = 600/94 would give the (2, 2) layer 6.4: it is dense, and the others share 600.4 − 4 entries."""
    layers = grids(tiny=(2, 2), a=(10, 20), b=(20, 40))
    densities = erk_densities(layers, 0.6)
    assert densities["tiny"] == 1.0
    left = 0.6 * 1004 - 4
    assert densities["a"] == pytest.approx(left / 90 * 30 / 200)  # 0.9987: just not capped
    assert sum(densities[name] * grid.entries for name, grid in layers.items()) == pytest.approx(0.6 * 1004)


def test_expressions_first_match_wins():
    layers = {f"layers.{i}.{kind}": BlockGrid(4, 10, 1, 2) for i in range(2) for kind in ("up", "down")}
    counts = active_blocks(layers, 0.5, {r"0\.up$": 0.25, "up": 1.0})
    assert counts == {"layers.0.up": 5, "layers.0.down": 10, "layers.1.up": 20, "layers.1.down": 10}


@pytest.mark.parametrize(
    ("density", "distribution", "message"),
    [
        (0.0, "uniform", r"density must be in \(0, 1\], got 0.0"),
        (1.5, "uniform", r"density must be in \(0, 1\], got 1.5"),
        (float("nan"), "uniform", "got nan"),
        ("half", "uniform", "got half"),
        (0.5, "balanced", "unknown distribution 'balanced'; expected one of: erk, uniform"),
        (0.5, {"lm": 0.5}, "'lm' matches no layer to sparsify"),
        (0.5, {"(": 0.5}, r"'\(' is not a regular expression"),
        (0.5, {"a": 2}, r"density of 'a' must be in \(0, 1\], got 2"),
    ],
)
def test_wrong_settings(density, distribution, message):
    with pytest.raises(UserError, match=message):
        active_blocks(grids(a=(4, 10)), density, distribution)
