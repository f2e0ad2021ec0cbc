"""When does paging not help?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import axes, bars
from vattn.lab.experiments.reading import bounds, median, names, ratio_of
from vattn.lab.experiments.words import compared, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

SHORT, LONG, PROMPTS = "short requests, two at a time", "a few very long ones", "prompts alone"
METRIC = {SHORT: "output_throughput", LONG: "output_throughput", PROMPTS: "total_token_throughput"}
QUANTITY = {
    "output_throughput": "output tokens a second",
    "total_token_throughput": "tokens a second",
}


class NoGain(Experiment):
    """Three loads that `static` serves as well: memory is no limit, so paging can only cost."""

    name = "no-gain"
    question = "When does paging not help?"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        smoke = setting.smoke
        loads = {
            SHORT: (setting.pick(8, 4), setting.pick((16, 16), (4, 4)), 2),
            LONG: (2, setting.pick((704, 24), (80, 4)), None),
            PROMPTS: (4, setting.pick((320, 1), (48, 1)), None),
        }
        parts = {}
        for name, (n, (prompt, answer), concurrency) in loads.items():
            # The longest possible request is what comes: static reserves nothing in vain.
            limits = setting.limits(prompt + answer, rows=2 * n)
            pages = {"page_bytes": 4096} if smoke else {}
            if name == SHORT:  # a request of this length is smaller than a page in every range
                limits = setting.limits(prompt + answer, rows=setting.pick(64, 32))
            systems = [
                setting.system("static", limits, kv_backend="static", kv_layout="per_layer", max_num_seqs=n),
                setting.system("paged", limits, kv_backend="paged", max_num_seqs=n),
                setting.system(
                    "virtual", limits, kv_backend="virtual", kv_layout="per_layer", max_num_seqs=n, **pages
                ),
            ]
            workload = RandomWorkload(n, Lengths("fixed", prompt, prompt), Lengths("fixed", answer, answer))
            parts[name] = setting.compare(workload, limits, systems, timed=True, max_concurrency=concurrency)
        return parts

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        first, second, third = (self._sentence(name, parts[name]) for name in (SHORT, LONG, PROMPTS))
        return first, second, third

    def _sentence(self, load: str, part: Any) -> str:
        metric = METRIC[load]
        clauses = [
            compared(ratio_of(part, name, "static", metric), name, "static", QUANTITY[metric])
            for name in names(part)
            if name != "static"
        ]
        most = {name: f"{median(part, name, 'peak_running'):.0f}" for name in names(part)}
        runs = (
            f"all run {most['static']} at once"
            if len(set(most.values())) == 1
            else "they run " + ", ".join(f"{count} ({name})" for name, count in most.items())
        )
        return sentence(f"{load}: {clauses[0]}", *clauses[1:], runs)

    def draw(self, parts: Parts, figure: Figure) -> None:
        for ax, (load, part) in zip(axes(figure, 3), parts.items(), strict=True):
            metric = METRIC[load]
            bars(ax, names(part), [bounds(part, n, metric) for n in names(part)], load, QUANTITY[metric])
