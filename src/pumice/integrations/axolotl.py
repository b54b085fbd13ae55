"""pumice's methods in Axolotl: a plugin that is named in the YAML.

SinkGD takes the place of Axolotl's own:

    plugins: [pumice.integrations.axolotl.PumicePlugin]
    optimizer: sinkgd
    sinkhorn_iters: 1        # these two may stand in optim_args as well
    sinkgd_lr_scale: 0.05

Any method, with any of its options:

    plugins: [pumice.integrations.axolotl.PumicePlugin]
    pumice: {method: smet, density: 0.4, interval: 100}
"""

from types import SimpleNamespace
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator
from torch import nn

from pumice import methods
from pumice.errors import UserError
from pumice.integrations.hosts import require
from pumice.integrations.topology import TopologyCallback
from pumice.integrations.transformers import ReportOptimizer, optimizer_cls_and_kwargs, prepare_model
from pumice.sparse import BlockSparseLinear, densify

OLDEST = "0.16"
_TOP = {"sinkhorn_iters": "sinkhorn_iters", "sinkgd_lr_scale": "lr_scale"}
# What the options of Axolotl's SinkGD are called here.
_RENAMED = {**_TOP, "sinkgd_base_width": "base_width", "bf16_stochastic_round": "stochastic_rounding"}
# Settings of Axolotl that would silently not be followed: groups of parameters are the method's.
_IGNORED = ("lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio")


class PumiceArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration, checked before anything is loaded.

    Args:
        sinkhorn_iters: Balancing iterations of an update of SinkGD.
        sinkgd_lr_scale: Factor on the learning rate of balanced matrices, or "match_rms_adamw".
        pumice: ``method`` (default: sinkgd) and the method's options.
    """

    sinkhorn_iters: int | None = None
    sinkgd_lr_scale: float | str | None = None
    pumice: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def check_pumice(cls, data: Any) -> Any:
        """Refuse what cannot work in one sentence."""
        method, _ = chosen(data)
        sparse = methods.get(method).prepare is not None
        if ignored := [name for name in _IGNORED if data.get(name) is not None]:
            raise UserError(f"pumice does not follow {ignored[0]}: remove it; the method's options set learning rates")
        if data.get("deepspeed"):
            raise UserError("pumice does not train under DeepSpeed, which flattens the weights: use FSDP2")
        if sparse and data.get("adapter"):
            raise UserError(
                f"{method} trains the weights of sparse layers, which adapter: {data['adapter']} freezes: "
                "remove the adapter, or use optimizer: sinkgd with it"
            )
        return data


def chosen(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the method and the options that an Axolotl configuration asks for.

    Args:
        config: A mapping with Axolotl's keys, checked or not.

    Raises:
        UserError: It asks for none or for two, or for an unknown method or option.
    """
    section, optimizer = config.get("pumice"), str(getattr(o := config.get("optimizer"), "value", o) or "")
    given = config.get("optim_args") or {}
    if not isinstance(given, dict):
        raise UserError(f"optim_args must be a mapping for pumice, got '{given}'")
    theirs = {**given, **{name: config[name] for name in _TOP if config.get(name) is not None}}
    if section is None and optimizer != "sinkgd":
        raise UserError(
            f"the pumice plugin has nothing to do with optimizer: {optimizer or 'none'}; set optimizer: sinkgd, "
            "or a pumice: section with a method"
        )
    if section is not None and not isinstance(section, dict):
        raise UserError(f"pumice must be a mapping of method and options, got {section!r}")
    options = dict(section or {})
    method = str(options.pop("method", "sinkgd"))
    asked_for = methods.get(method)
    if method != "sinkgd" and (optimizer == "sinkgd" or theirs):
        asked = "optimizer: sinkgd" if optimizer == "sinkgd" else next(iter(theirs))
        raise UserError(f"pumice: method is {method}, but {asked} belongs to sinkgd: remove one of them")
    for name, value in theirs.items():
        ours = _RENAMED.get(name, name)
        if options.setdefault(ours, value) != value:
            raise UserError(f"{name} is {value}, but pumice: {ours} is {options[ours]}: set one of them")
    asked_for.settings(options)
    return method, options


class PumicePlugin(BasePlugin):  # type: ignore[misc]
    """Trains with a method of pumice in Axolotl."""

    def __init__(self) -> None:
        require("axolotl", OLDEST)
        super().__init__()
        self._callbacks: list[TopologyCallback] = []

    def get_input_args(self) -> str:
        """Return the name of the class that checks the configuration."""
        return f"{__name__}.{PumiceArgs.__name__}"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Make the model sparse, if the method is."""
        method, options = chosen(cfg)
        args = SimpleNamespace(seed=cfg.seed or 0, max_steps=cfg.max_steps or 0)
        _, self._callbacks = prepare_model(method, model, args, **options)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callbacks that move blocks and say which optimizer runs."""
        for callback in self._callbacks:
            callback.log = trainer.log
        _, options = chosen(cfg)
        return [ReportOptimizer(options.get("overrides"), options.get("embeddings")), *self._callbacks]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Have the trainer build the method's optimizer."""
        method, options = chosen(cfg)
        trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(method, trainer.args, **options)

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        """Make the model dense again, so that what Axolotl saves loads everywhere."""
        if any(isinstance(module, BlockSparseLinear) for module in model.modules()):
            densify(model)
