"""From a recipe's name or file and command-line overrides to a checked, resolved :class:`Recipe`, and back to YAML."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from pumice import methods
from pumice.errors import UserError, nearest
from pumice.integrations.transformers import TRAINERS_OWN, settle
from pumice.train.arguments import DEFAULTS, ELSEWHERE
from pumice.train.model import presets
from pumice.train.recipe import DataConfig, Recipe, is_hub_name

_RECIPES = resources.files("pumice") / "recipes"

# What may differ between a run and its resumption: none of it reaches the weights.
_INCONSEQUENTIAL = re.compile(
    r"output\..*|trainer\.(dataloader_(num_workers|pin_memory|prefetch_factor|persistent_workers)|disable_tqdm"
    r"|report_to|run_name|log_level|save_total_limit|hub_token)"
)


class _Yaml(yaml.SafeLoader):
    """YAML with the booleans and numbers of version 1.2: ``no`` is a word, ``1e-3`` a number."""


_Yaml.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def bundled() -> list[str]:
    """Return the names of the recipes that come with pumice, sorted."""
    return sorted(file.name.removesuffix(".yaml") for file in _RECIPES.iterdir() if file.name.endswith(".yaml"))


def parser() -> jsonargparse.ArgumentParser:
    """Return the parser of a recipe's fields, made from the dataclasses."""
    made = jsonargparse.ArgumentParser(prog="pumice train", exit_on_error=False)
    made.add_class_arguments(Recipe)
    for action in made._actions:
        if action.dest in _sections():  # a file for one section alone: no part of the command line
            action.help = jsonargparse.SUPPRESS
    return made


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, check every name and type, and fill in what is derived.

    Args:
        source: The name of a bundled recipe, or the path of a YAML file.
        overrides: Command-line tokens like ``["--trainer.max_steps", "20"]``. If they choose another method than the
            recipe's, the recipe's ``method.options`` do not apply.

    Returns:
        The recipe with absolute paths, a folder in ``output.dir``, and every option of the method.

    Raises:
        UserError: The recipe does not exist or is not YAML, or a key, type or value is wrong.
    """
    name, given = _read(source)
    _check_keys(given, name)
    _check_options(overrides)
    base = _method(given)
    chosen = _last(overrides, "--method.name") or base
    if chosen != base:
        given["method"] = {"name": chosen}
    fields = parser()
    try:
        parsed = fields.parse_args(list(overrides), namespace=fields.parse_object(given))
    except Exception as error:  # which exceptions mean a wrong type differs between releases of jsonargparse
        raise UserError(_type_error(str(error))) from error
    return _resolve(Recipe(**{key: cls(**parsed[key].as_dict()) for key, cls in _sections().items()}), name)


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML that :func:`load` reads back as the same recipe, but for access tokens.

    Of ``trainer`` it holds what pumice has a default of its own for and what is not TrainingArguments' default.
    """
    tree = dataclasses.asdict(recipe)
    tree["trainer"] = {
        field.name: tree["trainer"][field.name]
        for field in dataclasses.fields(recipe.trainer)
        if field.name in DEFAULTS or tree["trainer"][field.name] != _default(field)
        if not field.name.endswith("_token")
    }
    text: str = yaml.safe_dump(_plain(tree), sort_keys=False, allow_unicode=True)
    return text


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the keys in which two recipes differ, except those that do not change the weights."""
    left, right = dict(_leaves(dataclasses.asdict(one))), dict(_leaves(dataclasses.asdict(other)))
    keys = [key for key in left | right if left.get(key) != right.get(key)]
    return [key for key in keys if not _INCONSEQUENTIAL.fullmatch(key)]


def method_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return a method's options dataclass, made from plain values.

    Raises:
        UserError: Unknown method or option (with the nearest right one), or a wrong type or value.
    """
    method = methods.get(name)
    known = [field.name for field in dataclasses.fields(method.options)]
    for key in options:
        if key not in known:
            raise UserError(f"unknown option method.options.{key} of {name}: {nearest(key, known)}")
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_class_arguments(method.options)
    try:
        values = made.parse_object(dict(options)).as_dict()
    except Exception as error:  # as in load
        raise UserError(_type_error(str(error), method.options, "method.options.")) from error
    return method.options(**values)


# --- reading -------------------------------------------------------------------------------------------------------


def _read(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source).expanduser()
    if source in bundled() and not path.is_file():
        name, text = source, (_RECIPES / f"{source}.yaml").read_text(encoding="utf-8")
    elif path.is_file():
        name, text = path.stem, path.read_text(encoding="utf-8")
    elif path.suffix or len(path.parts) > 1:
        raise UserError(f"recipe '{source}' does not exist: give a YAML file or one of {', '.join(bundled())}")
    else:
        raise UserError(f"unknown recipe '{source}': {nearest(source, bundled())}")
    try:
        given = yaml.load(text, Loader=_Yaml)
    except yaml.YAMLError as error:
        where = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise UserError(f"recipe '{source}' is not YAML{where}: {getattr(error, 'problem', error)}") from error
    if not isinstance(given or {}, dict):
        raise UserError(f"recipe '{source}' must be a mapping with the keys {', '.join(_sections())}")
    return name, {key: value for key, value in (given or {}).items() if value is not None}


def _sections() -> dict[str, Any]:
    hints = typing.get_type_hints(Recipe)
    return {field.name: hints[field.name] for field in dataclasses.fields(Recipe)}


def _keys() -> dict[str, Any]:
    """Every key of a recipe and its type, like ``trainer.max_steps``: int."""
    return {
        f"{section}.{field.name}": hints[field.name]
        for section, cls in _sections().items()
        for hints in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
    }


def _check_keys(given: Mapping[str, Any], name: str) -> None:
    for section, values in given.items():
        if section not in _sections():
            raise UserError(f"unknown key '{section}' in recipe '{name}': {_hint(str(section))}")
        if not isinstance(values, dict):
            raise UserError(f"'{section}' in recipe '{name}' must be a mapping, got {values!r}")
        for key in values:
            if (dotted := f"{section}.{key}") not in _keys():
                raise UserError(f"unknown key '{dotted}' in recipe '{name}': {_hint(dotted)}")


def _check_options(tokens: Sequence[str]) -> None:
    for token in tokens:
        if token.startswith("--") and not _known(key := token[2:].partition("=")[0]):
            raise UserError(f"unknown option --{key}: {_hint(key, '--')}")


def _known(key: str) -> bool:
    keys = _keys()
    return key in keys or any(key.startswith(f"{parent}.") and _is_mapping(keys[parent]) for parent in keys)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict or any(typing.get_origin(member) is dict for member in typing.get_args(hint))


def _hint(key: str, prefix: str = "") -> str:
    section, _, name = key.rpartition(".")
    if section in ("trainer", "") and (place := ELSEWHERE.get(name)):
        return f"it is set by {place}"
    keys = list(_keys())
    closest = [known for known in keys if known.endswith(f".{name}")] or difflib.get_close_matches(
        key, [known for known in keys if known.startswith(f"{section}.")], n=1, cutoff=0.0
    )
    return f"did you mean '{prefix}{closest[0]}'?" if closest else nearest(section or name, _sections())


def _method(given: Mapping[str, Any]) -> str:
    name = given.get("method", {}).get("name", Recipe().method.name)
    return str(name)


def _last(tokens: Sequence[str], option: str) -> str | None:
    found = None
    for position, token in enumerate(tokens):
        if token.startswith(f"{option}="):
            found = token.partition("=")[2]
        elif token == option and position + 1 < len(tokens):
            found = tokens[position + 1]
    return found


# --- telling -------------------------------------------------------------------------------------------------------


def _type_error(message: str, cls: Any = None, prefix: str = "") -> str:
    """Turn jsonargparse's account of a wrong value, which may fill a screen, into one sentence."""
    key, value = re.search(r'Parser key "([^"]+)"', message), re.findall(r"(?:Got|Given) value: (.*)", message)
    if key is None or not value:
        return " ".join(message.split())
    hints = typing.get_type_hints(cls) if cls else _keys()
    parent = key[1] if key[1] in hints else next((known for known in hints if key[1].startswith(known)), None)
    expected = _type_name(hints[parent]) if parent else "another type"
    return f"{prefix}{key[1]} must be {expected}, got {value[-1]}"


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, type) and not typing.get_args(hint):
        return _WORDS.get(hint, hint.__name__)
    if members := [m for m in typing.get_args(hint) if typing.get_origin(hint) not in (dict, list, tuple)]:
        return " or ".join(_type_name(member) for member in members)
    return str(hint).replace("typing.", "")


# --- resolving -----------------------------------------------------------------------------------------------------


def _resolve(recipe: Recipe, name: str) -> Recipe:
    method, given = recipe.method.name, recipe.method.options
    own = {key: value for key, value in given.items() if key not in TRAINERS_OWN}
    options = dataclasses.asdict(method_options(method, own))
    settle(method, recipe.trainer, given | options)
    data, tokenizer = recipe.data, recipe.tokenizer
    if data.path != DataConfig().path:
        data = dataclasses.replace(data, path=_existing(data.path))
    if data.sources is not None:
        data = dataclasses.replace(data, sources={_existing(path): weight for path, weight in data.sources.items()})
    if tokenizer.path is not None and not (is_hub_name(tokenizer.path) and _existing(tokenizer.path) == tokenizer.path):
        tokenizer = dataclasses.replace(tokenizer, path=str(Path(tokenizer.path).expanduser().resolve()))
    model = recipe.model
    if model.name not in presets():
        model = dataclasses.replace(model, name=_existing(model.name))
    folder = Path(recipe.output.dir or f"runs/{name}").expanduser().resolve()
    return dataclasses.replace(
        recipe,
        model=model,
        data=data,
        tokenizer=tokenizer,
        method=dataclasses.replace(recipe.method, options=options),
        output=dataclasses.replace(recipe.output, dir=str(folder)),
    )


def _existing(path: str) -> str:
    """Return the absolute path of what exists, and any other name as it is."""
    return str(found.resolve()) if (found := Path(path).expanduser()).exists() else path


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, _plain(tree)
