"""When, and how much."""

import pytest

from pumice.errors import UserError
from pumice.sparse.schedule import Schedule


def test_updates_fall_on_multiples_from_start_to_stop():
    schedule = Schedule(interval=10, total_steps=100, start=20, stop=0.75)
    assert [step for step in range(101) if schedule.due(step)] == [20, 30, 40, 50, 60, 70]
    assert schedule.updates == 6
    assert Schedule(10, 100, start=21, stop=29).updates == 0
    assert Schedule(10, 100).updates == 7
    assert [step for step in range(5) if Schedule(1, 4, stop=1.0).due(step)] == [1, 2, 3, 4]


def test_drop_fraction_is_half_a_cosine_wave():
    schedule = Schedule(10, 100, stop=0.8)
    assert schedule.drop_fraction_at(0) == pytest.approx(0.2)
    assert schedule.drop_fraction_at(40) == pytest.approx(0.1025)
    assert schedule.drop_fraction_at(20) == pytest.approx(0.005 + 0.195 * 0.853553390593)
    assert schedule.drop_fraction_at(80) == pytest.approx(0.005)


def test_share_falls_with_a_cube():
    schedule = Schedule(10, 100, start=20, stop=60, final_share=0.5)
    assert schedule.share_at(20) == 1.0
    assert schedule.share_at(40) == pytest.approx(0.5 + 0.5 / 8)
    assert schedule.share_at(60) == schedule.share_at(99) == 0.5


def test_up_to_one_is_a_fraction_and_more_is_a_step():
    """Whether it is an int or a float: YAML and JSON do not keep that apart."""
    assert Schedule(1, 200, start=0.25, stop=100).start_step == 50
    assert Schedule(1, 200, start=2.0, stop=100.0).start_step == 2
    assert Schedule(1, 200, stop=1).stop_step == Schedule(1, 200, stop=1.0).stop_step == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval must be a whole number of optimizer steps, at least 1, got 0"),
        ({"interval": 2.5}, "interval must be a whole number"),
        ({"total_steps": 0}, "total_steps must be a whole number"),
        (
            {"start": 0.5, "stop": 0.25},
            r"stop must come after start, got start=0.5 \(step 50\) and stop=0.25 \(step 25",
        ),
        ({"start": 75}, "stop must come after start"),
        ({"stop": 1.5}, r"stop must be a fraction of the run in \[0, 1\] or a whole step, got 1.5"),
        ({"start": -1}, "start must be a fraction"),
        ({"drop_fraction": 1.1}, r"drop_fraction must be in \[0, 1\], got 1.1"),
        ({"drop_fraction": 0.1, "final_drop_fraction": 0.2}, r"in \[0, drop_fraction=0.1\], got 0.2"),
        ({"final_share": 0.0}, r"final_share must be in \(0, 1\], got 0.0"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(UserError, match=message):
        Schedule(**({"interval": 10, "total_steps": 100} | settings))
