"""Draws docs/images/pipeline-schedules.svg from the schedules themselves; run it with ``python``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES, flushes, make_schedule
from dlo_plugins.parallel.pipeline.simulation import StageCosts, simulate
from dlo_plugins.parallel.pipeline.timeline import COLOURS, NAMES

FILE = Path(__file__).parents[1] / "images" / "pipeline-schedules.svg"
RANKS, MICRO_BATCHES = 4, 8
UNIT, ROW, LEFT, GAP = 24, 17, 50, 34  # pixels: forward of one rank, row of a rank, left margin, gap between schedules


def draw() -> str:
    """Returns the picture of each schedule, where forward, input gradient and weight gradient take equal time."""
    body: list[str] = []
    top, width = 0, 0.0
    for name in SCHEDULES.loaded():
        schedule = make_schedule(name, RANKS, MICRO_BATCHES)
        if not schedule.flushes:
            schedule = make_schedule(name, RANKS, MICRO_BATCHES // 2).unroll(3)
        chunks = schedule.placement.stages_per_rank
        timeline = simulate(schedule, StageCosts.equal(schedule.placement.stages, *[1 / chunks] * 3))
        stages = f"{chunks} stages per rank" if chunks > 1 else "one stage per rank"
        if not flushes(name):
            stages += f", three steps of {MICRO_BATCHES // 2} micro-batches"
        body.append(f'<text x="{LEFT}" y="{top + 20}">{name}, {stages}: bubble {timeline.bubble:.0%}</text>')
        for rank, row in enumerate(timeline.rows):
            y = top + 27 + rank * ROW
            body.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end" font-size="10">rank {rank}</text>')
            own = schedule.placement.stages_of(rank)
            for item in row:
                kind, stage, number = item.action
                x, length = LEFT + item.start * UNIT, (item.end - item.start) * UNIT
                body.append(
                    f'<rect x="{x:g}" y="{y}" width="{length - 1:g}" height="{ROW - 2}"'
                    f' fill="{COLOURS[kind][own.index(stage)]}"/>'
                    f'<text x="{x + length / 2 - 0.5:g}" y="{y + 11}" class="n">{number}</text>'
                )
        top += RANKS * ROW + GAP
        width = max(width, timeline.makespan * UNIT)
    body += _legend(top + 20)
    size = f"{LEFT + width + 10:g} {top + 34}"
    style = ".n { font-size: 9px; fill: white; text-anchor: middle }"
    title = f"pipeline schedules on {RANKS} ranks, {MICRO_BATCHES} micro-batches: computation over time"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="system-ui, sans-serif"'
    head += f' font-size="12" fill="#808080">\n<style>{style}</style>\n<title>{title}</title>'
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for kind, name in NAMES.items():
        yield f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{COLOURS[kind][0]}"/>'
        yield f'<text x="{x + 17}" y="{y}">{name}</text>'
        x += 130
    yield f'<text x="{x}" y="{y}">paler: a rank\'s second stage</text>'


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
