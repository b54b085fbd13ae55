"""From what a recipe names as data to texts, one at a time: files of any supported format, datasets, Python sources.

Every reader is lazy: it holds one line, one record batch or, of plain text, one file.
"""

import gzip
import io
import json
import lzma
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow as pa
import pyarrow.parquet

from pumice.errors import UserError
from pumice.train.recipe import DataConfig, is_hub_name

PYTHON_SOURCES = "python-sources"
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_TEXT, _JSON_LINES, _TABLES = {".txt"}, {".jsonl", ".ndjson"}, {".parquet", ".arrow"}
_OPEN: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(pa.input_stream(str(file), compression="zstd")),
}
_FORMATS = ".txt, .jsonl (also .gz, .zst, .xz), .parquet and .arrow"


def read(path: str, config: DataConfig) -> Iterator[str]:
    """Yield the texts of one source, in an order that depends on nothing but its contents and file names.

    Args:
        path: A file, a folder, a glob pattern, a dataset saved by ``save_to_disk``, a hub name or ``python-sources``.
        config: Where the column with the text and the like are named.

    Raises:
        UserError: The source is missing or cannot be read as what its name says; the message names the file and, where
            there is one, the byte, line or column.
    """
    where = Path(path).expanduser()
    if path == PYTHON_SOURCES:
        yield from _python_sources(config.site_packages)
    elif where.is_dir() and any((where / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _saved(where, config.text_column)
    elif not where.exists() and is_hub_name(path):
        yield from _hub(path, config)
    else:
        for file in _files(path, where):
            yield from _file(file, config.text_column)


def _files(path: str, where: Path) -> list[Path]:
    if where.is_dir():
        files = [file for file in where.rglob("*") if not _hidden(file.relative_to(where)) and _format(file)]
        if not files:
            raise UserError(f"data.path '{path}' is a folder without files that can be read: {_FORMATS}")
        return sorted(files, key=lambda file: file.relative_to(where).as_posix())
    if where.exists():
        return [where]
    if any(letter in path for letter in "*?["):
        base = Path(where.anchor) if where.is_absolute() else Path()
        pattern = str(where.relative_to(where.anchor)) if where.is_absolute() else str(where)
        if files := sorted(file for file in base.glob(pattern) if file.is_file()):
            return files
        raise UserError(f"data.path '{path}' matches no file")
    raise UserError(
        f"data.path '{path}' does not exist: expected a file ({_FORMATS}), a folder or a pattern of them, "
        f"a saved dataset, a hub name or '{PYTHON_SOURCES}'"
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _format(file: Path) -> str | None:
    """Return the suffix that tells a file's format, without that of its compression; None if there is none known."""
    suffix = Path(file.stem).suffix if file.suffix in _OPEN else file.suffix
    return suffix if suffix in _TEXT | _JSON_LINES | _TABLES else None


def _file(file: Path, column: str) -> Iterator[str]:
    suffix = Path(file.stem).suffix if file.suffix in _OPEN else file.suffix
    try:
        if suffix in _TABLES:
            yield from _table(file, suffix, column)
            return
        with _OPEN.get(file.suffix, _plain)(file) as opened:
            if suffix in _JSON_LINES or suffix == ".json":
                yield from _json_lines(opened, file, column)
            else:
                yield _decode(opened.read(), file).removeprefix("\ufeff")
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, pa.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(f"'{file}' is damaged or not what its name says: {reason}") from error
    except OSError as error:
        raise UserError(f"data.path: '{file}' cannot be read: {error.strerror or error}") from error


def _plain(file: Path) -> IO[bytes]:
    return file.open("rb")


def _decode(data: bytes, file: Path, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{file}' is not UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}): convert it first"
        ) from error


def _json_lines(lines: IO[bytes], file: Path, column: str) -> Iterator[str]:
    offset = 0
    for number, data in enumerate(lines, start=1):
        line = _decode(data, file, offset).removeprefix("\ufeff")
        offset += len(data)
        if line.strip():
            yield _field(line, column, where=f"'{file}', line {number}")


def _field(line: str, column: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets too deep
        raise UserError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    _check_column(column, list(row), where)
    text = _string(row[column], column, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: half a surrogate pair at character {error.start} of column '{column}'") from error
    return text


def _check_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        among = ", ".join(sorted(columns)) or "none at all"
        raise UserError(f"{where}: no column '{column}' among {among}: set data.text_column")


def _string(text: Any, column: str, where: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where}: column '{column}' must be a string, got {type(text).__name__}")
    return text


def _table(file: Path, suffix: str, column: str) -> Iterator[str]:
    if suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as parquet:
            _check_column(column, parquet.schema_arrow.names, f"'{file}'")
            yield from _rows(parquet.iter_batches(batch_size=1024, columns=[column]), column, file)
        return
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # the other of arrow's two formats, in which datasets caches
            source.seek(0)
            reader = batches = pa.ipc.open_stream(source)
        _check_column(column, reader.schema.names, f"'{file}'")
        yield from _rows(batches, column, file)


def _rows(batches: Any, column: str, file: Path) -> Iterator[str]:
    before = 0
    for batch in batches:
        try:
            texts = batch.column(batch.schema.get_field_index(column)).to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(f"'{file}': a text after row {before} of column '{column}' is not UTF-8") from error
        for number, text in enumerate(texts, start=before + 1):
            yield _string(text, column, f"'{file}', row {number}")
        before += len(texts)


def _saved(folder: Path, column: str) -> Iterator[str]:
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # of files, of arrow, of JSON: there is no common class
        raise UserError(f"the dataset in '{folder}' cannot be read: {str(error).strip().splitlines()[0]}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise UserError(
                f"the dataset in '{folder}' has no split 'train' among {', '.join(loaded)}: give one's folder"
            )
        loaded = loaded["train"]
    _check_column(column, loaded.column_names, f"'{folder}'")
    for number, row in enumerate(loaded.select_columns([column]), start=1):
        yield _string(row[column], column, f"'{folder}', row {number}")


def _hub(name: str, config: DataConfig) -> Iterator[str]:
    try:
        stream = datasets.load_dataset(name, config.subset, split="train", streaming=True)
        for number, row in enumerate(stream, start=1):
            _check_column(config.text_column, list(row), f"dataset '{name}'")
            yield _string(row[config.text_column], config.text_column, f"dataset '{name}', row {number}")
    except UserError:
        raise
    except Exception as error:  # of the network, of the hub, of a format: there is no common class
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(f"data.path '{name}' does not exist, and as a hub name it cannot be had: {reason}") from error


def _python_sources(site_packages: bool) -> Iterator[str]:
    """Yield the running interpreter's Python files, in an order that does not depend on where they lie.

    Test suites are left out, as some distributions leave them out; so are files that cannot be decoded, which are
    not the user's to mend.
    """
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("purelib", "platlib")}
    base = Path(paths["stdlib"]).resolve()
    roots = [base, *sorted(installed)] if site_packages else [base]
    for root in roots:
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            inside = file.relative_to(root).parts
            if _TEST_FOLDERS.intersection(inside) or (root == base and "site-packages" in inside):
                continue
            try:
                with tokenize.open(file) as source:  # honours the encoding that a file declares
                    yield source.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue
