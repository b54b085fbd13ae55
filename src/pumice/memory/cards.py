"""Memory of graphics cards by name, as their drivers report it."""

import re

from pumice.errors import UserError, nearest

GIB = 1 << 30
_MIB = 1 << 20

# MiB of `nvidia-smi --query-gpu=memory.total`; AMD's and Intel's from their data sheets.
CARDS = {
    "t4": 15360,
    "v100-16g": 16384,
    "v100-32g": 32768,
    "rtx3060": 12288,
    "rtx3090": 24576,
    "rtx4060ti-16g": 16380,
    "rtx4070": 12282,
    "rtx4080": 16376,
    "rtx4090": 24564,
    "rtx5080": 16303,
    "rtx5090": 32607,
    "rtx6000-ada": 49140,
    "a10": 23028,
    "a10g": 23028,
    "l4": 23034,
    "l40s": 46068,
    "a40": 46068,
    "a100-40g": 40960,
    "a100-80g": 81920,
    "h100-80g": 81559,
    "h200": 143771,
    "b200": 183359,
    "mi250x": 65536,
    "mi300x": 196608,
}


def card_bytes(text: str) -> int:
    """Return the bytes of a card from its name (``rtx4090``) or its size (``24GiB``, ``24GB``).

    Raises:
        UserError: Neither a name nor a size.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|G)", text.strip(), re.IGNORECASE)
    if size:
        unit = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": _MIB}[size[2].lower()]
        if (found := int(float(size[1]) * unit)) > 0:
            return found
    elif (key := text.strip().lower().replace(" ", "").replace("_", "-")) in CARDS:
        return CARDS[key] * _MIB
    raise UserError(f"unknown card '{text}': give a size like 24GiB or a name; {nearest(text.lower(), CARDS)}")
