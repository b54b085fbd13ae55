"""Train all weights of language models that do not fit with AdamW."""

from importlib.metadata import version

__version__ = version("pumice")
