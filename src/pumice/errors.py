"""Mistakes of the user, told in one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user gave cannot work; the message is one sentence that says what to do.

    The command line prints it as one line on stderr and exits with code 2.
    """


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest of ``choices`` if there is one, else all of them."""
    choices = sorted(choices)
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"expected one of: {', '.join(choices)}"
