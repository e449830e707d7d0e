"""Python imports this first in the children of a recorded test."""

import os
import sys
from pathlib import Path

if "FLASHTILE_LINES_OF" in os.environ:
    sys.path.append(str(Path(__file__).parents[2]))
    from mutation.cover import follow

    follow()
