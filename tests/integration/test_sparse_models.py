"""Block-sparse conversion of the models it is for."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

from pumice.errors import UserError
from pumice.sparse import BlockSparseLinear, Topology, densify, sparsify

LLAMA = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=43,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
)
GPT2 = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
INPUTS = torch.arange(12).view(2, 6)


def build(config, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(config)(**(config.to_dict() | changes))).eval()


def sparse_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]


@pytest.mark.parametrize("tied", [True, False])
def test_llama_has_sparse_layers_but_no_sparse_head(tied):
    model = build(LLAMA, tie_word_embeddings=tied)
    logits = model(INPUTS).logits
    sparsify(model, 1.0, (1, 16))  # 43 columns of down_proj are 16 + 16 + 11
    assert len(sparse_names(model)) == 2 * 7
    assert not any("lm_head" in name for name in sparse_names(model))
    torch.testing.assert_close(model(INPUTS).logits, logits)


def test_gpt2_conv1d_comes_back_as_conv1d():
    model = build(GPT2)
    logits = model(INPUTS).logits
    sparsify(model, 1.0, (4, 4))
    assert len(sparse_names(model)) == 2 * 4
    torch.testing.assert_close(model(INPUTS).logits, logits)
    densify(model)
    assert isinstance(model.transformer.h[0].attn.c_attn, Conv1D)
    assert torch.equal(model(INPUTS).logits, logits)


def test_a_sparse_llama_trains_with_checkpointing_and_autocast():
    model = build(LLAMA).train()
    sparsify(model, 0.25, (1, 16), keep="random", rescale=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    topology = Topology(model, 4, 0.3, "gradient", total_steps=12, stop=1.0)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(INPUTS, labels=INPUTS).loss
        loss.backward()
        optimizer.step()
        topology.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    assert topology.updates == 3
    assert losses[-1] < 0.7 * losses[0]


def test_lora_is_refused_with_a_sentence():
    model = peft.get_peft_model(build(LLAMA), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(
        UserError, match=r"q_proj.base_layer': .* is an adapter \(Linear\) around a layer; merge or remove"
    ):
        sparsify(model, 0.5, (1, 16))
    assert not sparse_names(model)
