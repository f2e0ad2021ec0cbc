"""How much of static reservation is waste, by the histogram of lengths?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import UNUSED, USED, WASTE, axes
from vattn.lab.experiments.reading import median, names
from vattn.lab.experiments.words import percent, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting


class Waste(Experiment):
    """Four histograms of prompt lengths; every backend has the memory `static` needs for four requests."""

    name = "waste"
    question = "How much of static reservation is waste, by length histogram?"
    times = False

    def measure(self, setting: Setting) -> dict[str, Any]:
        longest, n = setting.pick((512, 12), (64, 4))
        top, answers = longest * 7 // 8, Lengths("uniform", longest // 32, longest // 8)
        limits = setting.limits(longest, rows=4)
        systems = [
            setting.system("static", limits, kv_backend="static"),
            setting.system("paged", limits, kv_backend="paged"),
            setting.system("virtual", limits, kv_backend="virtual", kv_layout="per_layer"),
            setting.system("virtual, interleaved", limits, kv_backend="virtual", kv_layout="interleaved"),
        ]
        if setting.smoke:  # its memory is so small that pages must be, too
            for system in systems[2:]:
                system.options["page_bytes"] = 4096
        histograms = {
            "near the limit": Lengths("uniform", top * 3 // 4, top),
            "uniform": Lengths("uniform", longest // 32, top),
            "log-uniform": Lengths("loguniform", longest // 32, top),
            "bimodal, 15 % long": Lengths("bimodal", longest // 16, top, 0.15),
        }
        return {
            name: setting.compare(RandomWorkload(n, lengths, answers), limits, systems, timed=False)
            for name, lengths in histograms.items()
        }

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        unused = {name: median(part, "static", "external_waste_share") for name, part in parts.items()}
        tails = {
            system: [median(part, system, "tail_waste_share") for part in parts.values()]
            for system in names(next(iter(parts.values())))
        }
        running = {
            system: [median(part, system, "peak_running") for part in parts.values()] for system in tails
        }
        return (
            sentence(
                "of the memory static reserves, this much is never written: "
                + ", ".join(f"{percent(share)} ({name})" for name, share in unused.items())
            ),
            sentence(
                "what the others waste is the unused end of last blocks and pages: "
                + ", ".join(
                    f"{percent(min(shares))} to {percent(max(shares))} for {system}"
                    for system, shares in tails.items()
                    if system != "static"
                )
            ),
            sentence(
                "in the same bytes static runs "
                + f"{max(running['static']):.0f} requests at once, and "
                + ", ".join(
                    f"{system} {min(counts):.0f} to {max(counts):.0f}"
                    for system, counts in running.items()
                    if system != "static"
                )
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        panels = axes(figure, len(parts))
        for ax, (name, part) in zip(panels, parts.items(), strict=True):
            systems = names(part)
            below = [0.0] * len(systems)
            for key, label, colour in (
                ("kv_utilization", "tokens", USED),
                ("tail_waste_share", "unused ends", WASTE),
                ("external_waste_share", "reserved, never used", UNUSED),
            ):
                shares = [100 * median(part, system, key) for system in systems]
                ax.bar(range(len(systems)), shares, bottom=below, color=colour, label=label, width=0.7)
                below = [a + b for a, b in zip(below, shares, strict=True)]
            ax.set_xticks(
                range(len(systems)), [s.replace(", ", ",\n") for s in systems], rotation=45, ha="right"
            )
            ax.set_title(name)
            ax.set_ylim(0, 100)
            ax.grid(axis="x", visible=False)
        panels[0].set_ylabel("% of KV memory held by requests")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
