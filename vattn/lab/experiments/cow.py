"""Several outputs of one prompt: who shares it, and what a fork copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import BeamSearchWorkload, ParallelSamplingWorkload
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import axes, bars
from vattn.lab.experiments.reading import bounds, median, names
from vattn.lab.experiments.words import mib, percent, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting


class CopyOnWrite(Experiment):
    """Four samples, and four beams, of every prompt; `static` copies the prompt for each."""

    name = "cow"
    question = "Copy-on-write for parallel sampling and beams"
    times = False

    def measure(self, setting: Setting) -> dict[str, Any]:
        prompt, answer, n = setting.pick((256, 32, 3), (40, 6, 2))
        limits = setting.limits(prompt + answer, rows=4 * (n + 1))
        page = setting.pick(None, 4096)
        systems = [
            setting.system("static", limits, kv_backend="static"),
            setting.system("paged", limits, kv_backend="paged"),
            setting.system("virtual", limits, kv_backend="virtual", kv_layout="per_layer", page_bytes=page),
            setting.system(
                "virtual, interleaved",
                limits,
                kv_backend="virtual",
                kv_layout="interleaved",
                page_bytes=page,
            ),
        ]
        lengths = Lengths("uniform", prompt * 3 // 4, prompt), Lengths("fixed", answer, answer)
        return {
            "samples": setting.compare(
                ParallelSamplingWorkload(n, 4, *lengths), limits, systems, timed=False
            ),
            "beams": setting.compare(BeamSearchWorkload(n, 4, *lengths), limits, systems, timed=False),
        }

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        samples, beams = parts["samples"], parts["beams"]
        sharing = [name for name in names(samples) if name != "static"]

        def each(part: Any, metric: str, show: Any, systems: list[str]) -> str:
            return ", ".join(f"{show(median(part, name, metric))} ({name})" for name in systems)

        return (
            sentence(
                "four samples of a prompt take at their peak "
                + each(samples, "peak_in_use_bytes", mib, names(samples)),
                "sharing saves this much of what their requests map: "
                + each(samples, "shared_saved_share", percent, sharing),
            ),
            sentence(
                "four beams take " + each(beams, "peak_in_use_bytes", mib, names(beams)),
                "sharing saves " + each(beams, "shared_saved_share", percent, sharing),
            ),
            sentence(
                f"the {median(beams, 'static', 'forks'):,.0f} forks of the beam searches copy "
                + each(beams, "bytes_copied", mib, names(beams)),
                "static copies whole texts, the others the last block or page at most",
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        panels = axes(figure, 3)
        for ax, part, metric, title in (
            (panels[0], "samples", "peak_in_use_bytes", "4 samples: peak in use"),
            (panels[1], "beams", "peak_in_use_bytes", "4 beams: peak in use"),
            (panels[2], "beams", "bytes_copied", "4 beams: copied by forks"),
        ):
            found = parts[part]
            values = [bounds(found, name, metric) for name in names(found)]
            scaled = [(a / 2**20, b / 2**20, c / 2**20) for a, b, c in values]
            bars(ax, names(found), scaled, title, "MiB", rotation=30, ha="right")
