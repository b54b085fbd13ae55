import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from pumice.errors import UserError
from pumice.memory import chunked_cross_entropy, use_chunked_loss

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((13, 8), (50, 8), (50,)))
    labels = torch.randint(50, (13,))
    labels[[0, 5, 6, 12]] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_loss_and_gradients(chunk: int, with_bias: bool) -> None:
    hidden, weight, bias, labels = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    for leaf in leaves:
        leaf.requires_grad_(True)
    given = bias if with_bias else None
    expected = nn.functional.cross_entropy(nn.functional.linear(hidden, weight, given), labels, reduction="sum")
    loss = chunked_cross_entropy(hidden, weight, labels, given, chunk=chunk)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    ours, theirs = (torch.autograd.grad(3 * value, leaves) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_masked_tokens_alone_have_no_gradient() -> None:
    hidden, weight, _, labels = inputs()
    hidden.requires_grad_(True)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk=4)
    loss.backward()
    assert float(loss.detach()) == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_bfloat16_against_float64() -> None:
    hidden, weight, _, labels = (t.bfloat16() if t.is_floating_point() else t for t in inputs())
    expected = nn.functional.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=4)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=0.01)  # logits are bfloat16, as in the model


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    hidden, weight, _, labels = inputs()
    weight.requires_grad_(True)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        chunked_cross_entropy(hidden, weight, labels, chunk=2)
    assert profiler.profiler is not None
    largest = max(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    assert 2 * 50 * 8 <= largest < 4 * 50 * 8


@pytest.mark.parametrize("tied", [True, False])
def test_in_a_model(tied: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()
    chunked = copy.deepcopy(model)
    use_chunked_loss(chunked, 5)
    ids = torch.randint(50, (3, 7))
    labels = ids.masked_fill(ids % 4 == 0, -100)
    for extra in ({}, {"num_items_in_batch": torch.tensor(11)}):
        losses = [m.train()(input_ids=ids, labels=labels, **extra).loss for m in (model, chunked)]
        torch.testing.assert_close(
            losses[1].float(), losses[0].float(), rtol=1e-6, atol=0
        )  # the model's own is in float32
        for m, loss in zip((model, chunked), losses, strict=True):
            m.zero_grad()
            loss.backward()
        for left, right in zip(model.parameters(), chunked.parameters(), strict=True):
            torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-7)
    chunked.eval()
    torch.testing.assert_close(chunked(input_ids=ids, labels=labels).logits, model.eval()(input_ids=ids).logits)


def refused(model: nn.Module, chunk: int = 5) -> str:
    with pytest.raises(UserError) as error:
        use_chunked_loss(model, chunk)
    return str(error.value)


def test_models_with_another_loss_are_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MixtralConfig(
            **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0
        )
    )
    model.train()
    assert "more than a cross-entropy" in refused(model)
    assert model.training
    assert "forward" not in vars(model)


def test_wrong_calls() -> None:
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert refused(model, 0) == "the chunk of the loss must be at least 1 token, got 0"
    assert "Linear has no linear output head" in refused(nn.Linear(2, 2))
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match="chunk must be at least 1 token, got 0"):
        chunked_cross_entropy(hidden, weight, labels, chunk=0)
