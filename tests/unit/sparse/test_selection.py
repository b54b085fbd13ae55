"""Ties and random draws."""

import torch

from pumice.sparse.selection import largest, random_scores


def test_first_wins_among_equals():
    assert largest(torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0]), 3).tolist() == [0, 1, 3]
    assert largest(torch.zeros(5), 2).tolist() == [0, 1]
    assert largest(torch.zeros(5), 0).tolist() == []
    assert largest(torch.tensor([2.0, 1.0]), 2).tolist() == [0, 1]


def test_what_is_not_finite():
    scores = torch.tensor([float("nan"), -1.0, float("inf"), float("-inf"), 0.0])
    assert largest(scores, 3).tolist() == [0, 2, 4]
    assert largest(scores, 5).tolist() == [0, 1, 2, 3, 4]


def test_random_scores_depend_on_their_arguments_alone():
    base = random_scores(50, 0, "a", 1)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(random_scores(50, 0, "a", 1), base)
    assert torch.equal(torch.get_rng_state(), state)
    others = [random_scores(50, *key) for key in [(1, "a", 1), (0, "b", 1), (0, "a", 2)]]
    assert not any(torch.equal(base, other) for other in others)
