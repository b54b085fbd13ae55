import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from pumice import methods
from pumice.errors import UserError
from pumice.memory import Plan, Sharding, card_bytes, measure, plan
from pumice.memory.trace import Timeline, record, stored
from pumice.optim import GradientRelease

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    use_cache=False,
)
SHAPE = (2, 48)


def model_of(method: str, checkpointing: bool, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = methods.get(method)
    return chosen.prepare(model, chosen.settings({}), 0) if chosen.prepare else model


def optimizer_of(model: nn.Module, method: str) -> torch.optim.Optimizer:
    chosen = methods.get(method)
    return chosen.build(model, 1e-3, 0.0, chosen.settings({}))


def forward(model: nn.Module) -> Tensor:
    ids = torch.zeros(SHAPE, dtype=torch.long)
    return model(input_ids=ids, labels=ids).loss


def timeline(method: str = "sinkgd", checkpointing: bool = False, whole: bool = False) -> Timeline:
    return record(model_of(method, checkpointing, "meta"), forward, whole)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["adamw", "sinkgd", "smet"])
def test_three_layers_stand_for_all(method: str, checkpointing: bool) -> None:
    made = stored(model_of(method, checkpointing, "meta"), lambda model: optimizer_of(model, method), False)
    short, whole = (timeline(method, checkpointing, whole) for whole in (False, True))
    for release in (False, True):
        assert plan(short, made, release=release) == plan(whole, made, release=release)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["adamw", "sinkgd"])
def test_against_a_real_step(method: str, checkpointing: bool, release: bool) -> None:
    made = stored(model_of(method, checkpointing, "meta"), lambda model: optimizer_of(model, method), False)
    planned = plan(timeline(method, checkpointing), made, release=release)
    model = model_of(method, checkpointing, "cpu").train()
    optimizer = optimizer_of(model, method)
    if release:
        GradientRelease(optimizer)
    for _ in range(3):
        with measure(model, optimizer) as found:
            forward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    # The plan is up to 4 % above for so small a model without checkpointing; why, is not known.
    assert planned.peak_bytes == pytest.approx(found.peak_bytes, rel=0.08)
    for category in ("weights", "optimizer_state"):
        assert planned.breakdown_bytes[category] == found.breakdown_bytes[category]


def test_what_is_known_by_arithmetic() -> None:
    made = stored(model_of("adamw", False, "meta"), lambda model: optimizer_of(model, "adamw"), False)
    weights = sum(p.numel() for p in model_of("adamw", False, "meta").parameters())
    tensors = len(list(model_of("adamw", False, "meta").parameters()))
    assert made.gradients == 4 * weights
    assert made.state == 8 * weights + 4 * tensors
    found = plan(timeline("adamw", True), made)
    assert found.peak_bytes == sum(found.breakdown_bytes.values())


def test_optimizers_of_torch_take_all_parameters_at_once_on_a_gpu() -> None:
    model = model_of("adamw", False, "meta")
    one, all_at_once = (stored(model, lambda model: optimizer_of(model, "adamw"), gpu).step for gpu in (False, True))
    assert all_at_once > 3 * one


def of(sharding: Sharding | None, release: bool = False) -> Plan:
    made = stored(model_of("adamw", True, "meta"), lambda model: optimizer_of(model, "adamw"), False)
    return plan(timeline("adamw", True), made, sharding=sharding, release=release)


def test_sharding() -> None:
    alone, replicated, sharded = of(None), of(Sharding(4, "ddp")), of(Sharding(4, "fsdp"))
    assert replicated.peak_bytes > alone.peak_bytes
    assert sharded.breakdown_bytes["optimizer_state"] == alone.breakdown_bytes["optimizer_state"] // 4
    assert sharded.peak_bytes < alone.peak_bytes
    with pytest.raises(UserError, match="gradient release works on one device, got 4"):
        of(Sharding(4), release=True)
    for wrong, sentence in (((0,), "at least 1, got 0"), ((2, "zero"), "'ddp' or 'fsdp', got 'zero'")):
        with pytest.raises(UserError, match=sentence):
            Sharding(*wrong)  # type: ignore[arg-type]


def test_the_model_is_not_changed() -> None:
    model = model_of("sinkgd", False, "meta")
    record(model, forward)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(model.model.layers) == 6


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24 gb", 24 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("rtx4090", 24564 << 20),
        ("RTX 4090", 24564 << 20),
        ("h100_80g", 81559 << 20),
    ],
)
def test_cards(text: str, size: int) -> None:
    assert card_bytes(text) == size


@pytest.mark.parametrize("text", ["rtx4091", "0GiB", "24", "", "-3GiB"])
def test_unknown_cards(text: str) -> None:
    with pytest.raises(UserError, match=f"unknown card '{text}': give a size like 24GiB or a name"):
        card_bytes(text)
