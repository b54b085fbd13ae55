import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from pumice.errors import UserError
from pumice.train.model import build_config, build_model, check_seq_len, is_pretrained
from pumice.train.recipe import ModelConfig
from pumice.train.tokenizer import train_tokenizer

TINY = ModelConfig("llama-tiny")


def parameters(name: str) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(build_config(ModelConfig(name))).num_parameters()


def test_llama_60m_is_the_model_of_the_papers() -> None:
    config = build_config(ModelConfig("llama-60m"))
    assert isinstance(config, LlamaConfig)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (512, 1376, 8)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 8, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (32000, 1024)
    # two embeddings, eight layers of four square and three wide matrices and two norms, and the last norm
    assert parameters("llama-60m") == 2 * 32000 * 512 + 8 * (4 * 512**2 + 3 * 512 * 1376 + 2 * 512) + 512


def test_presets_are_what_they_are_for() -> None:
    assert parameters("llama-tiny") < 60_000
    assert parameters("qwen3-tiny") < 60_000
    assert 500_000 < parameters("llama-quickstart") < 3_000_000


# Sizes by hand: embeddings, per layer the four attention matrices (less for fewer KV heads), three wide ones, two norms
# (Qwen3: two more of the width of a head), and the last norm.
SIZES = {
    "llama-130m": (768, 2048, 12, 12, 12, 32_000),
    "llama-350m": (1024, 2736, 24, 16, 16, 32_000),
    "llama-1b": (2048, 5461, 24, 32, 32, 32_000),
    "llama-7b": (4096, 11008, 32, 32, 32, 32_000),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128_256),
    "qwen3-60m": (512, 1376, 8, 8, 4, 32_000),
    "qwen3-130m": (768, 2048, 12, 12, 6, 32_000),
    "qwen3-350m": (1024, 2736, 24, 16, 8, 32_000),
    "qwen3-1b": (2048, 5461, 24, 32, 16, 32_000),
    "qwen3-7b": (4096, 11008, 32, 32, 16, 32_000),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_presets(name: str) -> None:
    hidden, wide, layers, heads, kv_heads, vocabulary = SIZES[name]
    head = hidden // heads
    layer = 2 * hidden**2 + 2 * hidden * kv_heads * head + 3 * hidden * wide + 2 * hidden
    layer += 2 * head if name.startswith("qwen3") else 0
    assert parameters(name) == 2 * vocabulary * hidden + layers * layer + hidden


def test_llama_3_1_scales_its_positions_as_published() -> None:
    config = build_config(ModelConfig("llama-3.1-8b"))
    assert (config.max_position_embeddings, config.dtype, config.rms_norm_eps) == (131_072, torch.bfloat16, 1e-5)
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    build_model(build_config(ModelConfig("qwen3-tiny", {"dtype": "bfloat16"})), seed=3).save_pretrained(folder)
    return folder


def test_a_folder_gives_its_weights_in_float32_and_its_config_json_new_ones(pretrained: Path) -> None:
    name = str(pretrained)
    saved = load_file(pretrained / "model.safetensors")
    loaded = build_model(build_config(ModelConfig(name)), seed=0, pretrained=name)
    assert loaded.dtype == torch.float32
    assert all(torch.equal(loaded.state_dict()[key], saved[key].float()) for key in saved)
    half = build_model(build_config(ModelConfig(name, {"dtype": "bfloat16"})), seed=0, pretrained=name)
    assert half.dtype == torch.bfloat16
    scratch = ModelConfig(str(pretrained / "config.json"), {"num_hidden_layers": 1})
    assert (is_pretrained(ModelConfig(name)), is_pretrained(scratch), is_pretrained(TINY)) == (True, False, False)
    new = build_model(build_config(scratch), seed=0)
    assert new.config.num_hidden_layers == 1
    assert not torch.equal(new.lm_head.weight.float(), saved["lm_head.weight"].float())


def test_a_folder_that_holds_no_such_model_is_said(pretrained: Path, tmp_path: Path) -> None:
    def folder(name: str, **fields: object) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
        return str(tmp_path / name)

    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    for name, message in (
        (str(tmp_path / "empty"), "is a folder without config.json"),
        (str(tmp_path / "broken.json"), "is not JSON"),
        (str(tmp_path / "absent.json"), "does not exist: expected the config.json"),
        (str(tmp_path / "absent"), "does not exist: expected a folder with a model, or a hub name"),
        (folder("untyped", hidden_size=4), "has no model_type"),
        (folder("encoder", model_type="t5"), "of type t5, which is no causal language model"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            build_config(ModelConfig(name))
        assert "\n" not in str(raised.value)
    config = build_config(ModelConfig(str(pretrained)))
    bare = folder("bare", **config.to_dict())
    cut = tmp_path / "cut"
    shutil.copytree(pretrained, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:999])
    few = tmp_path / "few"
    shutil.copytree(pretrained, few)
    weights = load_file(few / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, few / "model.safetensors", metadata={"format": "pt"})
    for name, message in (
        (bare, "cannot be loaded"),
        (str(cut), "cannot be loaded"),
        (str(few), "for model.norm.weight"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            build_model(config, seed=0, pretrained=name)
        assert "\n" not in str(raised.value)
    wider = build_config(ModelConfig(str(pretrained), {"hidden_size": 64}))
    with pytest.raises(UserError, match="cannot be loaded"):
        build_model(wider, seed=0, pretrained=str(pretrained))


def test_overrides_reach_the_model_and_leave_derived_fields_consistent() -> None:
    config = build_config(ModelConfig("llama-tiny", {"num_attention_heads": 4, "hidden_size": 64, "dtype": "bfloat16"}))
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    model = build_model(config, seed=0)
    assert model.dtype == torch.bfloat16
    ids = torch.arange(10)[None]
    assert model(input_ids=ids).logits.shape == (1, 10, config.vocab_size)


def test_weights_are_a_function_of_the_seed_alone() -> None:
    config = build_config(TINY)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = build_model(config, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (build_model(config, seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_tokenizer_gives_its_special_tokens() -> None:
    tokenizer = train_tokenizer([], vocab_size=257)
    config = build_config(TINY, tokenizer)
    end = tokenizer.eos_token_id
    assert (config.bos_token_id, config.eos_token_id) == (end, end)
    model = build_model(config, seed=0)
    assert model.generation_config.eos_token_id == end
    model(input_ids=torch.tensor([[end, 5]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[end].any()  # as padding it would be zero and never train
    with pytest.raises(UserError, match="vocabulary of 257 exceeds the model's of 256"):
        build_config(ModelConfig("llama-tiny", {"vocab_size": 256}), tokenizer)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig("lama-60m"), r"unknown model 'lama-60m': did you mean 'llama-60m'\?"),
        (ModelConfig("gpt"), r"unknown model 'gpt': expected one of: llama-130m, llama-1b, llama-3"),
        (
            ModelConfig("llama-tiny", {"hiden_size": 64}),
            r"unknown field model\.config\.hiden_size of a llama model: did you mean 'hidden_size'\?",
        ),
        (ModelConfig("llama-tiny", {"model_type": "gpt2"}), r"unknown field model\.config\.model_type"),
        (ModelConfig("llama-tiny", {"hidden_size": "wide"}), r"^model\.config is not possible: .+"),
    ],
)
def test_a_model_that_cannot_be_is_said(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        build_config(config)
    assert "\n" not in str(raised.value)


def test_blocks_must_fit_the_positions() -> None:
    config = build_config(TINY)
    check_seq_len(config, 256)
    with pytest.raises(UserError, match=r"data\.seq_len is 257, more than the model's 256 positions"):
        check_seq_len(config, 257)
