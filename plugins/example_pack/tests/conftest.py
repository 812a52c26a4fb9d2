"""Lets the pack's tests run from its folder, also where the pack is not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
