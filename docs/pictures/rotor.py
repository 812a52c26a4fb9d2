"""Draws docs/images/rotor.svg: ViT-L's blocks by Rotor with offloading; ``python docs/pictures/rotor.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.planning import draw_schedule
from dlo_plugins.memory.rotor import keep_fastest
from dlo_plugins.memory.schedule import Chain, Link, Mode, Stage

FILE = Path(__file__).parents[1] / "images" / "rotor.svg"
#: ViT-L/16 at 224 on a V100: images, tokens, width, FLOP/s in float32, bytes per second of PCIe 3.
IMAGES, TOKENS, WIDTH, FLOPS, PCIE = 64, 197, 1024, 12e12, 12e9
BLOCKS, SHARE = 24, 0.3


def main() -> None:
    """Plans the chain for a share of its memory, and draws the schedule."""
    rows = IMAGES * TOKENS
    unit, scores = 4 * rows * WIDTH, 4 * IMAGES * 16 * TOKENS**2
    seconds = rows * (24 * WIDTH**2 + 4 * TOKENS * WIDTH) / FLOPS
    modes = (
        Mode("all", 16 * unit + 2 * scores, seconds, 2 * seconds),
        Mode("selective", 12 * unit, seconds, 2.06 * seconds),
    )
    head = Stage("head", 0, (Mode("all", unit, seconds / 50, seconds / 25),))
    chain = Chain((Stage("block", unit, modes, forward_peak=5 * unit),) * BLOCKS + (head,), input=unit)
    budget, link = int(SHARE * keep_fastest(chain).peak), Link(PCIE, PCIE)
    matplotlib.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9}
    figure = draw_schedule(chain, solve_offload(chain, budget, link), 0, budget, link)
    figure.savefig(FILE, metadata={"Date": None})


if __name__ == "__main__":
    main()
