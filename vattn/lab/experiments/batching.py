"""What continuous batching gains, and what memory adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.charts.palette import SERIES
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import axes, bars
from vattn.lab.experiments.reading import bounds, median, names, ratio_of, run_of
from vattn.lab.experiments.words import compared, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

BARRIER, CONTINUOUS, MAPPED = "static batches", "continuous", "continuous, virtual"


class Batching(Experiment):
    """Short answers beside long ones, in the memory that `static` needs for four requests.

    Three engines: static batches of four, continuous batching on the same `static` memory, and continuous
    batching on `virtual`, which fits more requests into the same bytes.
    """

    name = "batching"
    question = "Static batching against continuous batching"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        longest, n, short, long = setting.pick((256, 16, 8, 56), (48, 6, 2, 12))
        limits = setting.limits(longest, rows=4)
        workload = RandomWorkload(
            n,
            Lengths("uniform", longest // 16, longest // 8),
            Lengths("bimodal", short, long, 0.35),
        )
        page = setting.pick(None, 4096)
        systems = [
            setting.system(BARRIER, limits, kv_backend="static", kv_layout="per_layer", max_num_seqs=4),
            setting.system(CONTINUOUS, limits, kv_backend="static", kv_layout="per_layer"),
            setting.system(MAPPED, limits, kv_backend="virtual", kv_layout="interleaved", page_bytes=page),
        ]
        systems[0].barrier = True
        return {"served": setting.compare(workload, limits, systems, timed=True)}

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        part = parts["served"]

        def against(name: str, other: str, metric: str, quantity: str) -> str:
            return compared(ratio_of(part, name, other, metric), name, other, quantity)

        return (
            sentence(
                against(CONTINUOUS, BARRIER, "output_throughput", "output tokens a second"),
                f"{median(part, BARRIER, 'mean_running'):.2f} requests run in an average step of static "
                f"batches, {median(part, CONTINUOUS, 'mean_running'):.2f} with continuous batching",
            ),
            sentence(
                against(MAPPED, CONTINUOUS, "output_throughput", "output tokens a second"),
                f"in the same bytes {median(part, MAPPED, 'peak_running'):.0f} requests run at once instead "
                f"of {median(part, CONTINUOUS, 'peak_running'):.0f}",
            ),
            sentence(
                against(CONTINUOUS, BARRIER, "mean_ttft_ms", "mean time to first token"),
                against(MAPPED, CONTINUOUS, "mean_ttft_ms", "mean time to first token"),
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        part = parts["served"]
        left, middle, right = axes(figure, 3)
        for i, name in enumerate(names(part)):
            steps = run_of(part, name)["repeats"][0]["steps"]
            left.step(steps["time_s"], steps["running"], where="post", color=SERIES[i], label=name)
        left.set_title("requests running, first repeat")
        left.set_xlabel("s")
        left.set_ylim(bottom=0)
        left.legend()
        short = [name.replace(", ", ",\n").replace(" batches", "\nbatches") for name in names(part)]
        colours = list(SERIES[: len(short)])
        for ax, metric, title, unit in (
            (middle, "output_throughput", "throughput", "output tokens/s"),
            (right, "mean_ttft_ms", "mean time to first token", "ms"),
        ):
            bars(ax, short, [bounds(part, n, metric) for n in names(part)], title, unit, colours=colours)
