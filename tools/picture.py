"""Draws ``docs/picture.svg``, the processes and the cache tiers: ``python -m tools.picture [--check]``."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

PATH = Path(__file__).parent.parent / "docs" / "picture.svg"
WIDTH, HEIGHT = 1100, 500
TITLE = "hiserve: processes and cache tiers"
# The background is opaque, so that the picture is legible on any page; its colours follow the reader's colour scheme.
STYLE = """
  .back { fill: #ffffff } .process { fill: #eef3fa; stroke: #5b7aa8 } .half { fill: #ffffff; stroke: #5b7aa8 }
  .tier { fill: #eaf6ee; stroke: #3f8f5f } .line { stroke: #55606e; fill: none } .tip { fill: #55606e }
  text { fill: #1c2430; font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
  .title { font-weight: 600; font-size: 15px } .small { font-size: 12.5px; fill: #55606e }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181f } .process { fill: #1d2735; stroke: #7f9cc7 } .half { fill: #14181f; stroke: #7f9cc7 }
    .tier { fill: #18291f; stroke: #5fb384 } .line { stroke: #a4afbd } .tip { fill: #a4afbd }
    text { fill: #e6ebf2 } .small { fill: #a4afbd }
  }
"""


def box(style: str, left: int, top: int, width: int, height: int) -> str:
    """Returns a rectangle with round corners."""
    return f'<rect class="{style}" x="{left}" y="{top}" width="{width}" height="{height}" rx="8" stroke-width="1.5"/>'


def words(x: int, y: int, *lines: str, style: str = "", anchor: str = "middle") -> str:
    """Returns lines of text, one below the other."""
    return "\n".join(
        f'<text class="{style}" x="{x}" y="{y + 19 * n}" text-anchor="{anchor}">{escape(line)}</text>'
        for n, line in enumerate(lines)
    )


def arrow(*points: tuple[int, int], both: bool = False, dashed: bool = False) -> str:
    """Returns a line through points with a tip at its end; with ``both``, also at its beginning."""
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    more = ' marker-start="url(#tip)"' if both else ""
    more += ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path class="line" d="{path}" stroke-width="1.5" marker-end="url(#tip)"{more}/>'


def processes() -> list[str]:
    """Returns the upper half: client, API process, scheduler, worker with its two halves."""
    return [
        box("process", 20, 140, 100, 60),
        words(70, 166, "client", style="title"),
        words(70, 186, "OpenAI API", style="small"),
        arrow((123, 170), (182, 170), both=True),
        words(152, 160, "HTTP", style="small"),
        box("process", 185, 50, 180, 190),
        words(275, 78, "API process", style="title"),
        words(275, 108, "routes, keys, limits", "streaming, metrics", "tokenizer", "chat template", "detokenizer"),
        words(275, 226, "no torch", style="small"),
        arrow((368, 170), (427, 170), both=True),
        words(397, 160, "ZMQ", style="small"),
        box("process", 430, 50, 170, 190),
        words(515, 78, "Scheduler process", style="title"),
        words(515, 108, "queue, fairness", "placement by prefix", "ledger, replay", "crash isolation", "supervisor"),
        words(515, 226, "no torch", style="small"),
        arrow((603, 170), (660, 170), both=True),
        words(631, 160, "ZMQ", style="small"),
        box("process", 663, 14, 427, 226),
        words(876, 38, "Worker process, one per replica", style="title"),
        box("half", 676, 50, 150, 178),
        words(751, 76, "Planning half", style="title"),
        words(751, 104, "planner", "token budget", "load or compute", "one prefix index:", "radix tree"),
        words(751, 216, "integers, no torch", style="small"),
        box("half", 926, 50, 150, 178),
        words(1001, 76, "Executing half", style="title"),
        words(1001, 104, "gate", "graph or eager run", "model, attention", "draft, verify", "sampling"),
        words(1001, 216, "tensors", style="small"),
        arrow((829, 140), (923, 140)),
        words(876, 131, "BatchPlan", style="small"),
        arrow((923, 190), (829, 190)),
        words(876, 181, "StepResult", style="small"),
    ]


def tiers() -> list[str]:
    """Returns the lower half: the index, and the tiers with the transfers between them."""
    return [
        box("tier", 110, 344, 220, 90),
        words(220, 372, "Store tier", style="title"),
        words(220, 394, "files on disk"),
        words(220, 416, "outlives the server", style="small"),
        box("tier", 480, 344, 240, 90),
        words(600, 372, "Host tier", style="title"),
        words(600, 394, "shared memory"),
        words(600, 416, "outlives workers or the server", style="small"),
        box("tier", 870, 344, 220, 90),
        words(980, 372, "Device tier", style="title"),
        words(980, 394, "KV page pool"),
        words(980, 416, "GPU, or CPU memory", style="small"),
        arrow((333, 374), (477, 374)),
        words(405, 365, "prefetch", style="small"),
        arrow((477, 408), (333, 408)),
        words(405, 399, "upload", style="small"),
        arrow((723, 374), (867, 374)),
        words(795, 365, "load", style="small"),
        arrow((867, 408), (723, 408)),
        words(795, 399, "offload", style="small"),
        arrow((1001, 230), (1001, 341), both=True),
        words(1010, 290, "keys, values", style="small", anchor="start"),
        arrow((751, 230), (751, 294), (220, 294), (220, 341), dashed=True),
        arrow((600, 294), (600, 341), dashed=True),
        arrow((751, 294), (930, 294), (930, 341), dashed=True),
        words(415, 286, "the index knows which page of which tier holds which prefix", style="small"),
        words(
            550,
            476,
            "A prefix moves between tiers while the engine plans ahead, replays graphs and verifies drafts; the tokens stay the same.",
            style="small",
        ),
    ]


def picture() -> str:
    """Returns the whole file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{TITLE}">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        *processes(),
        *tiers(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Writes the picture; with ``--check``, returns 1 if it is out of date."""
    if "--check" in sys.argv:
        return int(not PATH.is_file() or PATH.read_text() != picture())
    PATH.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
