"""Pages of `virtual`, and whether a token lies together or layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import COLOURS, axes
from vattn.lab.experiments.reading import bounds, median, names, ratio_of, run_of
from vattn.lab.experiments.words import compared, percent, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

LAYOUTS = {"interleaved": "interleaved", "per-layer": "per_layer"}
LINES = {"interleaved": COLOURS["virtual, interleaved"], "per-layer": COLOURS["virtual"]}


class PageSize(Experiment):
    """Both layouts with three page sizes; memory is no limit, so speed and waste are what differ."""

    name = "page-size"
    question = "Page size and layout of virtual: a token together, or layer by layer"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        pages = setting.pick((64 << 10, 512 << 10, 2 << 20), (4 << 10, 16 << 10))
        longest, n = setting.pick((256, 10), (64, 4))
        workload = RandomWorkload(
            n,
            Lengths("loguniform", longest // 16, longest * 3 // 4),
            Lengths("uniform", longest // 16, longest // 8),
        )
        ranges = 2 * setting.loaded.spec.num_layers
        # every request may need a page in every range
        rows = 1 + n * ranges * 2 * max(pages) // (longest * setting.token_bytes)
        limits = setting.limits(longest, rows=max(rows, 2 * n))
        systems = [
            setting.system(f"{name}, {page >> 10} KiB", limits, kv_layout=layout, page_bytes=page)
            for name, layout in LAYOUTS.items()
            for page in pages
        ]
        return {"served": setting.compare(workload, limits, systems, timed=True)}

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        part = parts["served"]
        groups = {name: [s for s in names(part) if s.startswith(f"{name},")] for name in LAYOUTS}
        ends = [s for group in groups.values() for s in (group[0], group[-1])]
        together, apart = groups["interleaved"], groups["per-layer"]
        quickest = [
            max(group, key=lambda s: median(part, s, "output_throughput")) for group in (together, apart)
        ]
        return (
            sentence(
                "of the memory requests hold, tokens fill "
                + ", ".join(f"{percent(median(part, s, 'kv_utilization'))} ({s})" for s in ends)
            ),
            sentence(
                f"mapping takes {median(part, ends[0], 'map_calls'):,.0f} map calls and "
                f"{median(part, ends[0], 'driver_ms'):,.0f} ms in the driver ({ends[0]}), "
                f"{median(part, ends[2], 'map_calls'):,.0f} and {median(part, ends[2], 'driver_ms'):,.0f} ms "
                f"({ends[2]}), {median(part, ends[3], 'map_calls'):,.0f} and "
                f"{median(part, ends[3], 'driver_ms'):,.0f} ms ({ends[3]})"
            ),
            sentence(
                compared(
                    ratio_of(part, quickest[1], quickest[0], "output_throughput"),
                    quickest[1],
                    quickest[0],
                    "output tokens a second",
                ),
                "each is its layout's best page here",
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        part = parts["served"]
        panels = axes(figure, 3)
        for ax, metric, scale, title, unit in (
            (panels[0], "kv_utilization", 100.0, "KV utilization", "% filled by tokens"),
            (panels[1], "driver_ms", 1.0, "in the driver", "ms a run"),
            (panels[2], "output_throughput", 1.0, "speed", "output tokens/s"),
        ):
            for layout, colour in LINES.items():
                group = [s for s in names(part) if s.startswith(f"{layout},")]
                found = [bounds(part, s, metric) for s in group]
                sizes = [run_of(part, s)["kv"]["page_bytes"] >> 10 for s in group]
                ax.errorbar(
                    range(len(group)),
                    [scale * f[0] for f in found],
                    yerr=[[scale * f[1] for f in found], [scale * f[2] for f in found]],
                    marker="o",
                    capsize=3,
                    color=colour,
                    label=layout,
                )
                ax.set_xticks(range(len(group)), [f"{size:,} KiB" for size in sizes])
            ax.set_title(title)
            ax.set_ylabel(unit)
            ax.set_xlabel("page")
            ax.set_ylim(bottom=0)
        panels[0].legend()
