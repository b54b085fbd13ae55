"""One run from a recipe to a trained model: everything is checked first, then trained, then summed up."""

import logging
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
import transformers
from rich.console import Console
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from pumice.errors import UserError
from pumice.integrations.topology import TopologyCallback
from pumice.integrations.transformers import (
    OptimizerFactory,
    ReportOptimizer,
    optimizer_cls_and_kwargs,
    prepare_model,
)
from pumice.sparse import BlockSparseLinear, densify
from pumice.train import checkpoints, stream, summary
from pumice.train.arguments import training_arguments
from pumice.train.callbacks import MetricsFile, ProgressReport, read_metrics
from pumice.train.data import Documents, load_documents, pack
from pumice.train.evaluation import sequence_losses, token_average
from pumice.train.folder import RunFolder
from pumice.train.meter import Meter
from pumice.train.model import build_config, build_model, check_seq_len, is_pretrained
from pumice.train.recipe import Recipe
from pumice.train.signals import StopOnSignal
from pumice.train.tokenizer import build_tokenizer
from pumice.train.trainer import RunTrainer

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """What is trained, and on what."""

    tokenizer: PreTrainedTokenizerFast
    train: datasets.Dataset | stream.TokenStream
    validation: datasets.Dataset
    model: nn.Module
    callbacks: list[TopologyCallback]  # of the method


def run(recipe: Recipe, resume: str = "never") -> int:
    """Train as a recipe says, and report by ``logging`` and, at the end, on stdout.

    Args:
        recipe: From :func:`pumice.train.load.load`.
        resume: ``never``, ``auto`` or the path of a checkpoint; see :meth:`RunFolder.start`.

    Returns:
        0, or 128 + the number of the signal that stopped the training after a checkpoint was saved.

    Raises:
        UserError: Something in the recipe, the data or the output folder cannot work; nothing was trained.
    """
    if recipe.output.dir is None:
        raise UserError("output.dir is not set")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # of writing a file
    folder = RunFolder(Path(recipe.output.dir))
    args = training_arguments(recipe.trainer, folder.path)
    config = build_config(recipe.model)
    check_seq_len(config, recipe.data.seq_len)
    stream.check(recipe, is_pretrained(recipe.model))
    optimizer = optimizer_cls_and_kwargs(recipe.method.name, args, **recipe.method.options)
    _try_out(recipe, args, *optimizer, config)
    with args.main_process_first(local=False, desc="the output folder"):
        checkpoint = folder.start(recipe, resume)
        if resume == "auto" and (figures := folder.finished()):
            logger.info("the run in '%s' is finished already", folder.path)
            _show(figures, args)
            return 0
    with args.main_process_first(local=False, desc="data and tokenizer"):
        prepared = _prepare(recipe, args, folder, anew=checkpoint is None and not folder.begun())

    trainer = _trainer(prepared, args, optimizer, folder, checkpoint)
    if args.should_save:
        folder.keep(recipe)
    if checkpoint is not None and _complete(checkpoint, args):
        trainer.restore(checkpoint)
    else:
        with StopOnSignal() as stop:
            trainer.add_callback(stop)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if stop.received:
            logger.info("stopped after step %d; --resume auto continues", trainer.state.global_step)
            return 128 + stop.received
    _finish(recipe, trainer, prepared.tokenizer, folder)
    return 0


def _try_out(
    recipe: Recipe,
    args: TrainingArguments,
    factory: type[OptimizerFactory],
    kwargs: dict[str, Any],
    config: PretrainedConfig,
) -> None:
    """Prepare a model without storage and build its optimizer: what is not possible is refused before any work."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        model, _ = prepare_model(recipe.method.name, model, args, **recipe.method.options)
        factory()(model, **kwargs)
    except (ValueError, TypeError) as error:
        raise UserError(f"method.options: {error}") from error


def _prepare(recipe: Recipe, args: TrainingArguments, folder: RunFolder, anew: bool) -> Prepared:
    if anew and args.should_save:
        shutil.rmtree(folder.tokenizer, ignore_errors=True)  # of an attempt that never came to train
    held = stream.hold_out(recipe.data, args.seed) if recipe.data.streaming else None
    documents = Documents(held.documents, held.documents) if held else load_documents(recipe.data, args.seed)
    vocab_size = build_config(recipe.model).vocab_size
    pretrained = recipe.model.name if is_pretrained(recipe.model) else None
    tokenizer = build_tokenizer(recipe.tokenizer, documents.train, vocab_size, folder.tokenizer, pretrained)
    train = (
        stream.TokenStream(recipe.data, held, tokenizer, args.seed)
        if held
        else pack(documents.train, tokenizer, recipe.data.seq_len)
    )
    validation = pack(documents.validation, tokenizer, recipe.data.seq_len, part="validation")
    model = build_model(build_config(recipe.model, tokenizer), args.seed, pretrained)
    logger.info(
        "%s tokens to train on, %s held out; vocabulary %s; %s with %s weights",
        f"{len(train) * recipe.data.seq_len:,}" if isinstance(train, datasets.Dataset) else "a stream of",
        f"{len(validation) * recipe.data.seq_len:,}",
        f"{len(tokenizer):,}",
        recipe.model.name,
        f"{model.num_parameters():,}",
    )
    prepared, callbacks = prepare_model(recipe.method.name, model, args, **recipe.method.options)
    return Prepared(tokenizer, train, validation, prepared, callbacks)


def _complete(checkpoint: Path, args: TrainingArguments) -> bool:
    """Tell whether no step is left after a checkpoint: Trainer would take one more."""
    state = checkpoints.state_of(checkpoint)
    return state.global_step >= (args.max_steps if args.max_steps > 0 else state.max_steps)


def _trainer(
    prepared: Prepared,
    args: TrainingArguments,
    optimizer: tuple[Any, dict[str, Any]],
    folder: RunFolder,
    checkpoint: Path | None,
) -> RunTrainer:
    bar = not args.disable_tqdm and sys.stderr.isatty()
    args.disable_tqdm = True  # the progress shown is ours
    if checkpoint is not None:
        logger.info("continuing from %s", checkpoint.name)
        args.eval_on_start = False
    trainer = RunTrainer(
        model=prepared.model,
        args=args,
        data_collator=collate,
        train_dataset=prepared.train.with_format("torch")
        if isinstance(prepared.train, datasets.Dataset)
        else prepared.train,
        eval_dataset=prepared.validation.with_format("torch"),
        processing_class=prepared.tokenizer,
        optimizer_cls_and_kwargs=optimizer,
        compute_metrics=token_average,
        preprocess_logits_for_metrics=sequence_losses,
        callbacks=[
            Meter(),
            MetricsFile(folder.metrics),
            ProgressReport(bar),
            ReportOptimizer(*map(optimizer[1].get, ("overrides", "embeddings"))),
            *prepared.callbacks,
        ],
    )
    for callback in prepared.callbacks:
        callback.log = trainer.log
    trainer.remove_callback(PrinterCallback)
    if "tensorboard" in (args.report_to or ()):
        trainer.remove_callback(TensorBoardCallback)
        if args.should_save:
            step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
            trainer.add_callback(tensorboard(folder.tensorboard, step))
    return trainer


def tensorboard(path: Path, step: int) -> TensorBoardCallback:
    """Return Trainer's callback, writing to a folder of our own and replacing what was logged beyond ``step``."""
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardCallback(SummaryWriter(str(path), purge_step=step + 1 if step else None))


def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack blocks of equal length; every token is a target."""
    ids = torch.stack([block["input_ids"] for block in blocks]).long()
    return {"input_ids": ids, "labels": ids.clone()}


def _finish(recipe: Recipe, trainer: RunTrainer, tokenizer: PreTrainedTokenizerFast, folder: RunFolder) -> None:
    args, state, meter = trainer.args, trainer.state, trainer.meter
    evaluated = [line for line in state.log_history if "eval_loss" in line]
    if args.load_best_model_at_end or not evaluated or evaluated[-1]["step"] != state.global_step:
        trainer.evaluate()
        evaluated.append(state.log_history[-1])
    model = trainer.accelerator.unwrap_model(trainer.model)
    stored = model.num_parameters()
    if any(isinstance(module, BlockSparseLinear) for module in model.modules()):
        if args.should_save:
            summary.density_map(model, folder.density_map)
        densify(model)  # so that it loads everywhere
    model.config.use_cache = True  # Trainer turns it off; who loads the model wants it
    trainer.save_model(str(folder.model))
    meter.measure()
    written = None
    if recipe.output.sample_tokens:
        written = summary.sample(model, tokenizer, recipe.output.prompt, recipe.output.sample_tokens, args.seed)
    if not args.should_save:
        return
    first = evaluated[0] if evaluated[0]["step"] == 0 else None
    figures = {
        "method": recipe.method.name,
        "steps": state.global_step,
        "tokens": meter.tokens,
        "parameters": model.num_parameters(),
        "stored_parameters": stored,
        "start_loss": first and first["eval_loss"],
        "start_perplexity": first and first["eval_perplexity"],
        "end_loss": evaluated[-1]["eval_loss"],
        "end_perplexity": evaluated[-1]["eval_perplexity"],
        "tokens_per_second": meter.tokens_per_second,
        "device": args.device.type,
        "peak_memory_bytes": meter.peak_memory,
        "optimizer_state_bytes": meter.optimizer_state,
        "adamw_state_bytes": summary.adamw_state_bytes(model),
        "batches_sha256": meter.batches,
        "sample": written,
        "model": str(folder.model),
    }
    metrics = read_metrics(folder.metrics)
    summary.loss_curve(metrics, folder.loss_curve)
    if trainer.topology is not None and trainer.topology.monitor is not None:
        summary.topology_updates(metrics, trainer.topology.monitor, folder.topology)
    folder.conclude(figures)
    _show(figures, args)


def _show(figures: dict[str, Any], args: TrainingArguments) -> None:
    if args.should_save:
        console = Console()
        console.print(summary.table(figures))
        if figures["sample"] is not None:
            console.print("sample:", style="bold")
            console.print(figures["sample"], markup=False, highlight=False)
        console.print(f"model: {figures['model']}", markup=False, highlight=False, soft_wrap=True)
