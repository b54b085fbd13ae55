import dataclasses
from pathlib import Path

import pytest
import yaml
from transformers.training_args import TrainingArguments

from pumice.errors import UserError
from pumice.methods import METHODS
from pumice.train import load as loading
from pumice.train.arguments import ELSEWHERE, TrainerConfig
from pumice.train.load import bundled, differences, dump, load
from pumice.train.model import build_config, check_seq_len


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", bundled())
def test_bundled_recipe_is_possible_and_survives_saving(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    check_seq_len(build_config(recipe.model), recipe.data.seq_len)
    assert load(write(tmp_path / "saved.yaml", dump(recipe))) == recipe


def test_overrides_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "trainer: {max_steps: 5, learning_rate: 3e-3}\nmethod: {name: adamw}")
    recipe = load(path, ["--trainer.max_steps", "7", "--data.seq_len=64", "--output.prompt", "no"])
    assert (recipe.trainer.max_steps, recipe.trainer.learning_rate, recipe.data.seq_len) == (7, 0.003, 64)
    assert recipe.output.prompt == "no"
    assert recipe.trainer.save_steps == TrainerConfig().save_steps


def test_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text.txt", "stone")
    recipe = load(write(tmp_path / "mine.yaml", "data: {path: text.txt}\ntokenizer: {path: tok}\ntrainer:"))
    assert recipe.output.dir == str(tmp_path / "runs" / "mine")
    assert recipe.data.path == str(tmp_path / "text.txt")
    assert recipe.tokenizer.path == str(tmp_path / "tok")
    assert recipe.method.options == dataclasses.asdict(METHODS["sinkgd"].options())
    assert load(write(tmp_path / "mine.yaml", "")).data.path == "python-sources"


def test_options_of_another_method_do_not_apply(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "method: {name: sinkgd, options: {lr_scale: 0.5, sinkhorn_iters: 3}}")
    assert load(path).method.options["lr_scale"] == 0.5
    mixed = load(path, ["--method.options.lr_scale", "0.2"]).method.options
    assert (mixed["lr_scale"], mixed["sinkhorn_iters"]) == (0.2, 3)
    other = load(path, ["--method.name=adamw", "--method.options.betas", "[0.9, 0.95]"])
    assert other.method.options == {"betas": (0.9, 0.95), "eps": None, "state_bits": 32}


def test_words_and_numbers_of_yaml(tmp_path: Path) -> None:
    """YAML 1.1 reads ``no`` as false and ``1e-3`` as text."""
    recipe = load(write(tmp_path / "r.yaml", "trainer: {eval_strategy: no, learning_rate: 1e-3, bf16: true}"))
    assert (recipe.trainer.eval_strategy, recipe.trainer.learning_rate, recipe.trainer.bf16) == ("no", 1e-3, True)


def test_every_training_argument_passes() -> None:
    theirs = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert {field.name for field in dataclasses.fields(TrainerConfig)} == theirs - ELSEWHERE.keys()
    words = ["--trainer.lr_scheduler_kwargs.min_lr", "1e-5", "--trainer.gradient_accumulation_steps", "4"]
    trainer = load("quickstart", words).trainer
    assert trainer.lr_scheduler_kwargs == {"min_lr": 1e-5}
    assert trainer.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.max_step", "3"], "unknown option --trainer.max_step: did you mean '--trainer.max_steps'?"),
        (["--max_steps", "3"], "unknown option --max_steps: did you mean '--trainer.max_steps'?"),
        (["--method.nam", "adamw"], "unknown option --method.nam: did you mean '--method.name'?"),
        (["--trainr.foo=1"], "unknown option --trainr.foo: did you mean 'trainer'?"),
        (["--trainer.optim", "sgd"], "unknown option --trainer.optim: it is set by method.name"),
        (["--trainer.output_dir", "x"], "unknown option --trainer.output_dir: it is set by output.dir"),
        (["--method.name", "sinkgp"], "unknown method 'sinkgp': did you mean 'sinkgd'?"),
        (
            ["--method.options.lr_scal", "1"],
            "unknown option method.options.lr_scal of sinkgd: did you mean 'lr_scale'?",
        ),
        (["--trainer.max_steps", "ten"], "trainer.max_steps must be a whole number, got ten"),
        (["--trainer.tf32", "x"], "trainer.tf32 must be true or false or none, got x"),
        (["--trainer.eval_strategy", "on"], "trainer.eval_strategy must be one of no, steps, epoch, got on"),
        (["--method.options.betas", "[1]"], "method.options.betas must be tuple[float, float] or none, got [1]"),
        (
            ["--method.options.lr_scale", "x"],
            "method.options.lr_scale must be a number or one of match_rms_adamw, got x",
        ),
        (
            ["--method.options.lr", "1"],
            "method option lr is 1 but trainer.learning_rate is 0.003: set only the latter",
        ),
        (["stray"], "unrecognized arguments: stray"),
        (["--output.dir"], "argument --output.dir: expected one argument"),
    ],
)
def test_wrong_override(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load("quickstart", ["--trainer.learning_rate", "0.003", *words])
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: {max_step: 3}", "unknown key 'trainer.max_step' in recipe 'r': did you mean 'trainer.max_steps'?"),
        ("trainr: {max_steps: 3}", "unknown key 'trainr' in recipe 'r': did you mean 'trainer'?"),
        ("trainer: 3", "'trainer' in recipe 'r' must be a mapping, got 3"),
        ("- 3", "must be a mapping with the keys model, data, tokenizer, method, trainer, memory, output"),
        ("trainer: {max_steps: x}", "trainer.max_steps must be a whole number, got x"),
        ("method: {name: adamx}", "unknown method 'adamx': did you mean 'adamw'?"),
        ("method: {options: {eps: [1]}}", "method.options.eps must be a number or none, got [1]"),
        ("trainer:\n  max_steps: [", "is not YAML, line 2: "),
    ],
)
def test_wrong_recipe(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load(write(tmp_path / "r.yaml", text))
    assert sentence in str(error.value)


def test_missing_recipe() -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'quikstart': did you mean 'quickstart'\?"):
        load("quikstart")
    with pytest.raises(UserError, match=r"recipe 'none/there\.yaml' does not exist: .* quickstart"):
        load("none/there.yaml")


def test_differences_are_those_that_change_the_weights() -> None:
    one = load("quickstart")
    words = ["--output.dir", "elsewhere", "--trainer.dataloader_num_workers", "3", "--trainer.save_total_limit", "9"]
    assert differences(one, load("quickstart", words)) == []
    words = ["--trainer.seed", "1", "--data.seq_len", "64", "--model.config.num_hidden_layers", "1"]
    assert differences(one, load("quickstart", words)) == [
        "model.config",
        "data.seq_len",
        "trainer.seed",
        "model.config.num_hidden_layers",
    ]


def test_saved_recipe_holds_no_secret() -> None:
    recipe = load("quickstart", ["--trainer.hub_token", "sesame"])
    assert recipe.trainer.hub_token == "sesame"
    assert "sesame" not in dump(recipe)
    assert differences(recipe, load("quickstart")) == []


def test_saved_recipe_pins_pumices_own_defaults() -> None:
    """So that a later version with other defaults runs a saved recipe as it was run."""
    saved = yaml.safe_load(dump(load("quickstart", ["--trainer.adam_beta2", "0.95"])))["trainer"]
    assert saved.keys() >= loading.DEFAULTS.keys()
    assert saved["adam_beta2"] == 0.95
    assert "adam_beta1" not in saved
