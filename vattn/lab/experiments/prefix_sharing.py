"""What a prefix in common is worth, by its length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import SharedPrefixWorkload
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import COLOURS, axes
from vattn.lab.experiments.reading import bounds, median, names, ratio_of
from vattn.lab.experiments.words import compared, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting


class Prefix(Experiment):
    """Requests with one prefix in common and prompts of their own; caching on and off."""

    name = "prefix"
    question = "Prefix caching, by the length of what is shared"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        shared = setting.pick((32, 128, 384), (16, 48))
        n, own, answer = setting.pick((6, 32, 8), (4, 6, 3))
        parts = {}
        for length in shared:
            limits = setting.limits(length + own + answer, rows=4 * n)
            systems = [
                setting.system(
                    f"{backend}, {'on' if on else 'off'}",
                    limits,
                    kv_backend=backend,
                    kv_layout="per_layer",
                    enable_prefix_caching=on,
                    **({"page_bytes": 4096} if setting.smoke and backend == "virtual" else {}),
                )
                for backend in ("paged", "virtual")
                for on in (False, True)
            ]
            workload = SharedPrefixWorkload(
                n, 1, length, Lengths("fixed", own, own), Lengths("fixed", answer, answer)
            )
            parts[str(length)] = setting.compare(workload, limits, systems, timed=True)
        return parts

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        short, *_, long = parts

        def computed(length: str, name: str) -> str:
            return f"{median(parts[length], name, 'computed_tokens'):,.0f}"

        def ttft(length: str, backend: str) -> str:
            found = ratio_of(parts[length], f"{backend}, on", f"{backend}, off", "mean_ttft_ms")
            return compared(found, f"{backend} with a cache", "that without", "mean time to first token")

        return (
            sentence(
                f"with {long} tokens shared, {computed(long, 'paged, on')} tokens are computed (paged) and "
                f"{computed(long, 'virtual, on')} (virtual) instead of {computed(long, 'paged, off')}",
                f"with {short} shared, {computed(short, 'paged, on')} and {computed(short, 'virtual, on')} "
                f"instead of {computed(short, 'paged, off')}",
            ),
            sentence(f"{long} tokens shared: {ttft(long, 'paged')}", ttft(long, "virtual")),
            sentence(f"{short} tokens shared: {ttft(short, 'paged')}", ttft(short, "virtual")),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        left, right = axes(figure)
        lengths = list(parts)
        for name in names(parts[lengths[0]]):
            backend, mode = name.split(", ")
            style = "-" if mode == "on" else "--"
            for ax, metric in ((left, "mean_ttft_ms"), (right, "computed_tokens")):
                found = [bounds(parts[length], name, metric) for length in lengths]
                ax.errorbar(
                    range(len(lengths)),
                    [f[0] for f in found],
                    yerr=[[f[1] for f in found], [f[2] for f in found]],
                    marker="o",
                    capsize=3,
                    color=COLOURS[backend],
                    linestyle=style,
                    linewidth=3.5 if backend == "paged" else 1.5,  # where both lie on each other
                    label=f"{backend}, caching {mode}",
                )
        for ax, title, unit in (
            (left, "mean time to first token", "ms"),
            (right, "tokens computed", "tokens a run"),
        ):
            ax.set_title(title)
            ax.set_ylabel(unit)
            ax.set_xticks(range(len(lengths)), lengths)
            ax.set_xlabel("tokens shared")
            ax.set_ylim(bottom=0)
        left.legend()
