"""When memory runs out: compute again, copy away, or whatever is cheaper?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.charts.palette import SERIES
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import axes, bars
from vattn.lab.experiments.reading import bounds, median, names, ratio_of
from vattn.lab.experiments.words import compared, mib, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

ENOUGH, RECOMPUTE, SWAP, AUTO = "enough memory", "recompute", "swap", "auto"


class Preemption(Experiment):
    """Requests that grow out of a cache which holds a few of them; beside them one that holds all."""

    name = "preemption"
    question = "Preemption: recompute, swap or auto"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        n, prompt, answer, fits = setting.pick((6, 64, 64, 3), (6, 16, 24, 2))
        longest = prompt + answer
        tight, ample = setting.limits(longest, rows=fits), setting.limits(longest, rows=2 * n)
        workload = RandomWorkload(n, Lengths("fixed", prompt, prompt), Lengths("fixed", answer, answer))
        # Without a prefix cache: what is dropped is gone, and only the policies differ.
        common = {"kv_backend": "paged", "enable_prefix_caching": False}
        systems = [
            setting.system(ENOUGH, ample, **common),
            *(setting.system(how, tight, **common, preemption=how) for how in (RECOMPUTE, SWAP, AUTO)),
        ]
        return {"served": setting.compare(workload, tight, systems, timed=True)}

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        part = parts["served"]

        def against(name: str, other: str) -> str:
            found = ratio_of(part, name, other, "output_throughput")
            return compared(found, name, other, "output tokens a second")

        return (
            sentence(
                f"in memory for a few, requests are preempted {median(part, RECOMPUTE, 'preemptions'):.0f} "
                f"times; recompute computes {median(part, RECOMPUTE, 'recomputed_tokens'):,.0f} tokens anew, "
                f"swap copies {mib(median(part, SWAP, 'swap_out_bytes'))} out and back, and auto recomputes "
                f"{median(part, AUTO, 'recomputed_tokens'):,.0f} and swaps "
                f"{mib(median(part, AUTO, 'swap_out_bytes'))}"
            ),
            sentence(against(SWAP, RECOMPUTE), against(AUTO, RECOMPUTE)),
            sentence(against(SWAP, ENOUGH), against(RECOMPUTE, ENOUGH)),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        part = parts["served"]
        left, middle, right = axes(figure, 3)
        tight = [name for name in names(part) if name != ENOUGH]

        def draw(ax: Any, shown: list[str], metric: str, scale: float, title: str, unit: str) -> None:
            colours = [SERIES[names(part).index(name)] for name in shown]
            values = [bounds(part, name, metric) for name in shown]
            scaled = [(a * scale, b * scale, c * scale) for a, b, c in values]
            bars(ax, [n.replace(" ", "\n") for n in shown], scaled, title, unit, colours=colours)

        draw(left, names(part), "output_throughput", 1.0, "speed", "output tokens/s")
        draw(middle, tight, "recomputed_tokens", 1.0, "computed again", "tokens a run")
        draw(right, tight, "swap_out_bytes", 2.0**-20, "swapped out", "MiB a run")
