"""``python -m pumice`` is the same as ``pumice``."""

import sys

from pumice.cli import main

sys.exit(main())
