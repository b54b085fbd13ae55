"""The command line: ``pumice VERB …``. A mistake of the user is one line on stderr and exit code 2."""

import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from pumice import __version__
from pumice.errors import UserError, nearest

_USAGE = """\
usage: pumice VERB ...

  plan     tell whether a training fits into memory, and what else would
  train    train a language model as a recipe says

options:
  --help, -h    this text; after a verb, its own
  --version     the version of pumice
  --debug       show the traceback of an error
"""

_TRAIN_USAGE = """\
pumice train RECIPE [--section.key value ...] [--resume auto|never|PATH] [--debug]

RECIPE is a YAML file or one of: {recipes}

--resume auto     continue the run in output.dir if one was begun there, else begin
--resume PATH     continue from a checkpoint, or from the last one of a run folder
--resume never    begin; refused if output.dir holds a run (default)

methods, and their options as --method.options.NAME:
{methods}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Its words, without the program's name; by default those of the process.

    Returns:
        The exit code: 0; 1 if training came to values that are not finite; 2 for a mistake of the user; or 128 + the
        number of the signal that stopped a run.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        return _dispatch(words)
    except (UserError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _say(error, 2)
    except FloatingPointError as error:  # the training itself came to nothing
        if debug:
            traceback.print_exc()
        return _say(error, 1)
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("pumice: interrupted", file=sys.stderr)
        return 130


def _say(error: Exception, code: int) -> int:
    print(f"pumice: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    verbs = {"plan": _plan, "train": _train}
    if not words or words[0] in ("--help", "-h"):
        print(_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in verbs:
        raise UserError(f"unknown verb '{words[0]}': {nearest(words[0], verbs)}")
    return verbs[words[0]](words[1:])


def _plan(words: list[str]) -> int:
    _listen()
    from pumice.plan import parser, run

    if "--help" in words or "-h" in words:
        print(parser().format_help(), end="")
        return 0
    return run(words)


def _train(words: list[str]) -> int:
    _listen()
    from pumice.train import load

    if "--help" in words or "-h" in words:
        fields = load.parser()
        fields.usage = _TRAIN_USAGE.format(recipes=", ".join(load.bundled()), methods=_methods())
        print(fields.format_help(), end="")
        return 0
    recipes, resume, overrides = _sort(words)
    if len(recipes) != 1:
        wanted = f"a YAML file or one of: {', '.join(load.bundled())}"
        raise UserError(f"one recipe, please, not {' and '.join(recipes) or 'none'}: {wanted}")
    recipe = load.load(recipes[0], overrides)

    from pumice.train.run import run

    return run(recipe, resume)


def _sort(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Part the words after ``train`` into recipes, the value of --resume, and overrides with their values."""
    recipes, resume, overrides = [], "never", []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            recipes.append(word)
            continue
        option, equals, value = word.partition("=")
        following = [value] if equals else [next(remaining, None)]
        given = [text for text in following if text is not None]
        if option != "--resume":
            overrides += [option, *given]
        elif given:
            resume = given[0]
        else:
            raise UserError("--resume needs a value: auto, never or the path of a checkpoint")
    return recipes, resume, overrides


def _methods() -> str:
    from pumice.methods import METHODS

    lines = []
    for method in METHODS.values():
        options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(method.options))
        lines += [f"  {method.name}: {method.summary}", f"    {options}"]
    return "\n".join(lines)


class _Stderr(logging.Handler):
    """Prints to what is ``sys.stderr`` at that moment: a progress bar puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _listen() -> None:
    """Show what pumice logs, and of other libraries only what a user can act on."""
    ours = logging.getLogger("pumice")
    if not any(isinstance(handler, _Stderr) for handler in ours.handlers):
        ours.addHandler(_Stderr())
    ours.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)  # of torchrun: one speaks
    ours.propagate = False
    for noisy in ("torchao", "torch.utils._pytree"):  # on import: extensions for other hardware, deprecations inside
        logging.getLogger(noisy).setLevel(logging.ERROR)
