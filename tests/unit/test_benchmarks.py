"""The benchmarks run, and what they compute besides is right. What they measure is not tested."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pumice.optim.sinkhorn import balance

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _beside_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("optimizer_step", []),
        ("train_throughput", []),
        ("sinkhorn_iterations", ["--seeds", "1"]),
        ("sinkgd_variants", ["--seeds", "1"]),
        ("bf16_training", ["--seeds", "1"]),
        ("moment_codes", []),
        ("dst_stability", ["--parts", "late"]),
        ("sparse_memory", []),
        ("sparse_throughput", []),
        ("stateless_sparse", ["--seeds", "1"]),
    ],
)
def test_every_script_runs_saves_and_makes_its_tables(name: str, arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    script(name).main(["--quick", "--out", str(path), *arguments])
    result = json.loads(path.read_text())
    assert set(result) == {"name", "command", "commit", "date", "machine", "versions", "settings", "values"}
    assert str(tmp_path) not in path.read_text()
    for text in script(name).tables(result["values"]).values():
        lines = text.split("\n\n")[0].splitlines()
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1


def test_tables_in_the_documentation_are_up_to_date() -> None:
    assert script("tables").main(["--check"]) == 0


def test_a_table_is_replaced_between_its_marks_and_nothing_else() -> None:
    text = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n<!-- end -->\n"
    filled = script("tables").fill(text, {"one": "| new |"})
    assert filled == "a\n<!-- table: one -->\n| new |\n<!-- end -->\nb\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="no result gives the table one"):
        script("tables").fill(text, {"two": ""})


def test_alternating_calls_take_turns_at_being_first() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = script("common").alternate(calls, rounds=3, warmup=1)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(found) for name, found in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_grid_grows_until_the_best_lies_inside() -> None:
    study = script("study")
    best, losses = study.tune(lambda lr: abs(math.log2(lr / 16)), [1, 2, 4])
    assert best == 16
    assert list(losses) == [1, 2, 4, 8, 16, 32]
    best, losses = study.tune(lambda lr: None if lr > 0.5 else lr, [1, 2], most=3)
    assert best == 0.5
    assert losses[1] == math.inf


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    study = script("study")
    path = tmp_path / "runs.json"
    study.Runs(path, {"steps": 1}).get({"lr": 1.0, "betas": (0.9, 0.95)}, lambda: {"loss": 2.5})
    again = study.Runs(path, {"steps": 1})
    assert again.get({"lr": 1.0, "betas": (0.9, 0.95)}, lambda: pytest.fail("was repeated")) == {"loss": 2.5}
    assert again.get({"lr": 2.0}, lambda: {"loss": 3.5}) == {"loss": 3.5}
    with pytest.raises(SystemExit, match="other settings"):
        study.Runs(path, {"steps": 2})


def test_the_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    plan = script("study").Plan(steps=100, warmup=0.1, floor=0.1)
    assert plan.rate(0) == pytest.approx(0.1)
    assert plan.rate(9) == plan.rate(10) == 1
    assert plan.rate(55) == pytest.approx(0.55)
    assert plan.rate(100) == pytest.approx(0.1)


def test_methods_start_from_equal_weights_and_see_equal_batches() -> None:
    study, models = script("study"), script("models")
    plan = study.Plan(steps=2, batch=2, length=8, validation_windows=2, evaluations=1)
    bench = study.Bench(models.tiny_llama(layers=1), models.corpus(None, 1 << 16), plan, compile=False)

    def first_gradient(spec: dict[str, object], seed: int) -> torch.Tensor:
        seen = []

        def observe(step: int, optimizer: torch.optim.Optimizer) -> None:
            if step == 0:
                seen.append(bench.model.model.layers[0].mlp.up_proj.weight.grad.clone())

        bench.train(seed, lambda model: study.optimizer(model, spec, False), None, observe)
        return seen[0]

    ours, theirs = {"method": "sinkgd", "lr": 0.1}, {"method": "adamw", "lr": 0.1, "betas": (0.9, 0.95)}
    assert torch.equal(first_gradient(ours, 0), first_gradient(theirs, 0))
    assert not torch.equal(first_gradient(ours, 0), first_gradient(ours, 1))


def test_balanced_embeddings_get_options_of_their_own() -> None:
    study, models = script("study"), script("models")
    model = models.build(models.tiny_llama(layers=1))
    spec = {"method": "sinkgd", "lr": 0.1, "adamw_lr": 0.05, "embeddings": {"negligible_rows": 0.3, "lr_scale": 2.0}}
    groups = study.optimizer(model, spec, False).param_groups
    found = {name: group for group in groups for name in group["param_names"]}
    assert found["model.embed_tokens.weight"]["lr_scale"] == found["lm_head.weight"]["lr_scale"] == 2
    assert found["model.layers.0.mlp.up_proj.weight"]["negligible_rows"] == 0
    assert found["model.norm.weight"]["lr"] == 0.05
    assert len(found) == len(list(model.parameters()))


def test_updates_to_a_goal_are_interpolated() -> None:
    first_below = script("sinkgd_variants").first_below
    curve = [(10, 4.0), (20, 3.0), (30, 2.0)]
    assert first_below(curve, 2.5) == 25
    assert first_below(curve, 1.0) is None


def test_the_materialised_loop_is_sinkgd_with_five_cold_iterations() -> None:
    step = script("optimizer_step")
    torch.manual_seed(0)
    gradient, weight = torch.randn(12, 20, dtype=torch.float64), torch.zeros(12, 20, dtype=torch.float64)
    norms = torch.tensor(20.0).double().sqrt(), torch.tensor(12.0).double().sqrt()
    step.materialised_step(weight, gradient, *norms, torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(weight, -0.5 * balance(gradient, 5))


def test_scratch_is_what_is_allocated_at_once() -> None:
    def work() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 21, dtype=torch.uint8)
        del first
        third = torch.empty(1 << 19, dtype=torch.uint8)
        del second, third

    assert script("optimizer_step").scratch_bytes(work) == 3 << 20


def test_state_counts_the_parts_of_quantised_tensors() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones(64, 64)
    plain = torch.optim.AdamW([parameter], fused=True)
    plain.step()
    state_bytes = script("optimizer_step").state_bytes
    assert state_bytes([plain]) == 2 * 64 * 64 * 4 + 4
    plain.state[parameter] = {"m": OptimState8bit.zeros(64 * 64, True, 256)}
    assert state_bytes([plain]) == 64 * 64 + 16 * 4 + 256 * 4


def test_storage_in_bfloat16_hands_its_weights_to_the_model() -> None:
    training, models = script("bf16_training"), script("models")
    model = models.build(models.tiny_llama(layers=1))
    made = training.stored(model, "bfloat16, rounding to nearest", 0.1, 0, False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = model.lm_head.weight.clone()
    made.step()
    assert not torch.equal(model.lm_head.weight, before)
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
