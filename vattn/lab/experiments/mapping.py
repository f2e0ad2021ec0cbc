"""What driver calls cost on the critical path, and whether a thread hides them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.charts.palette import SERIES
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import axes, bars
from vattn.lab.experiments.reading import bounds, median, names, ratio_of
from vattn.lab.experiments.words import compared, percent, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

STATIC, SHOWN, HIDDEN, BOTH = "static", "in the step", "in a thread", "in a thread, overlap"


class Mapping(Experiment):
    """Fresh engines, so that every page is made and mapped anew; small pages, in every range, so that
    most of them come while requests decode, where they can be foreseen.

    `static` beside them makes no driver call at all.
    """

    name = "mapping"
    question = "Mapping cost, hidden and not hidden"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        n, prompt, answer = setting.pick((8, 16, 64), (4, 8, 12))
        limits = setting.limits(prompt + answer, rows=4 * n)
        workload = RandomWorkload(n, Lengths("fixed", prompt, prompt), Lengths("fixed", answer, answer))
        pages = {"kv_layout": "per_layer", "page_bytes": setting.pick(16 << 10, 4 << 10)}

        def virtual(name: str, **options: Any) -> Any:
            return setting.system(name, limits, kv_backend="virtual", **pages, **options)

        systems = [
            setting.system(STATIC, limits, kv_backend="static", kv_layout="per_layer"),
            virtual(SHOWN, background_mapping=False, overlap=False),
            virtual(HIDDEN, background_mapping=True, overlap=False),
            virtual(BOTH, background_mapping=True, overlap=True),
        ]
        return {"served": setting.compare(workload, limits, systems, timed=True)}

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        part = parts["served"]

        def against(name: str, other: str, metric: str, quantity: str) -> str:
            said = other if other == STATIC else f"mapping {other}"
            return compared(ratio_of(part, name, other, metric), f"mapping {name}", said, quantity)

        stall = median(part, SHOWN, "map_stall_ms")
        share = stall / 1e3 / median(part, SHOWN, "duration")
        return (
            sentence(
                f"steps that map their pages themselves wait {stall:,.1f} ms for "
                f"{median(part, SHOWN, 'map_calls'):,.0f} pages, {percent(share)} of the run",
                against(SHOWN, STATIC, "output_throughput", "output tokens a second"),
            ),
            sentence(
                against(HIDDEN, SHOWN, "map_stall_ms", "waiting time"),
                against(BOTH, SHOWN, "map_stall_ms", "waiting time"),
            ),
            sentence(
                against(HIDDEN, SHOWN, "output_throughput", "output tokens a second"),
                against(BOTH, SHOWN, "output_throughput", "output tokens a second"),
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        part = parts["served"]
        left, right = axes(figure)
        mapped = [name for name in names(part) if name != STATIC]
        for ax, shown, metric, title, unit in (
            (left, mapped, "map_stall_ms", "steps wait for mapping", "ms a run"),
            (right, names(part), "output_throughput", "speed", "output tokens/s"),
        ):
            colours = [SERIES[names(part).index(name)] for name in shown]
            labels = [name.replace(", ", ",\n") for name in shown]
            bars(ax, labels, [bounds(part, n, metric) for n in shown], title, unit, colours=colours)
