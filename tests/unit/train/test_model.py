import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pumice.errors import UserError
from pumice.train.model import build_config, build_model, check_seq_len, presets
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
    assert presets() == ["llama-60m", "llama-quickstart", "llama-tiny"]
    assert parameters("llama-tiny") < 60_000
    assert 500_000 < parameters("llama-quickstart") < 3_000_000


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
        (ModelConfig("gpt"), r"unknown model 'gpt': expected one of: llama-60m, llama-quickstart, llama-tiny"),
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
