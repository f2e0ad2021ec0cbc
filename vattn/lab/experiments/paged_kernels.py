"""Attention over contiguous memory and over blocks, by context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import COLOURS, axes
from vattn.lab.experiments.reading import names, point_interval, run_of
from vattn.lab.experiments.words import apart, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting


class Kernels(Experiment):
    """A decode step of four requests, and a chunk of a prompt; no model around them."""

    name = "kernels"
    question = "Contiguous against paged attention, by context length"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        contexts, chunk = setting.pick(((128, 512, 1024, 2048), 128), ((32, 96), 16))

        def systems(batch: int) -> list[Any]:
            limits = setting.limits(max(contexts) + 1, rows=2 * batch + 2)
            page = {"page_bytes": 4096} if setting.smoke else {}
            return [
                setting.system("static", limits, kv_backend="static", kv_layout="per_layer"),
                setting.system("virtual", limits, kv_backend="virtual", kv_layout="per_layer", **page),
                setting.system(
                    "virtual, interleaved", limits, kv_backend="virtual", kv_layout="interleaved", **page
                ),
                setting.system("paged", limits, kv_backend="paged"),
            ]

        return {
            "decode": setting.kernels(systems(4), contexts, batch=4),
            "prompt": setting.kernels(systems(1), contexts[1:], batch=1, queries=chunk),
        }

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        return (
            self._sentence(parts, "decode", "paged"),
            self._sentence(parts, "prompt", "paged"),
            sentence(
                self._clause(parts, "decode", "virtual", -1),
                self._clause(parts, "decode", "virtual, interleaved", -1),
            ),
        )

    def _sentence(self, parts: Parts, part: str, name: str) -> str:
        return sentence(self._clause(parts, part, name, 0), self._clause(parts, part, name, -1))

    def _clause(self, parts: Parts, part: str, name: str, index: int) -> str:
        """A system against static memory at one context."""
        flat, found = (point_interval(parts[part], s, index) for s in ("static", name))
        point = run_of(parts[part], name)["points"][index]
        what = (
            f"a decode step over {point['context']:,} tokens"
            if point["queries"] == 1
            else f"a chunk of {point['queries']} prompt tokens at {point['context']:,}"
        )
        if not found.enough:
            return f"{found.n} repeats can't tell {name} from static in {what}"
        ms = f"({found.median / 1e3:.1f} and {flat.median / 1e3:.1f} ms)"
        if not apart(flat, found):
            return f"{name} can't be told from static in {what} {ms}"
        return (
            f"{what} spends {found.median / flat.median:.2f} times as long in attention with {name} as with "
            f"static {ms}"
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        left, right = axes(figure)
        styles = {"static": "-", "virtual": "--", "virtual, interleaved": "-.", "paged": "-"}
        for ax, key in ((left, "decode"), (right, "prompt")):
            part = parts[key]
            contexts = [point["context"] for point in run_of(part, "static")["points"]]
            for name in names(part):
                found = [point_interval(part, name, i) for i in range(len(contexts))]
                ax.errorbar(
                    contexts,
                    [f.median / 1e3 for f in found],
                    yerr=[
                        [(f.median - f.low) / 1e3 for f in found],
                        [(f.high - f.median) / 1e3 for f in found],
                    ],
                    marker="o",
                    markersize=4,
                    capsize=3,
                    color=COLOURS[name],
                    linestyle=styles[name],
                    label=name,
                )
            ax.set_xlabel("tokens of context")
            ax.set_ylabel("ms in attention, all layers")
            ax.set_ylim(bottom=0)
        first = run_of(parts["prompt"], "static")["points"][0]
        left.set_title("decode step of four requests")
        right.set_title(f"chunk of {first['queries']} prompt tokens")
        left.legend()
