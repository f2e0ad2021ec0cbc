"""Blocks of `paged`: small ones waste less, large ones cost less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.charts.palette import SERIES
from vattn.lab.experiments.experiment import Experiment, Parts
from vattn.lab.experiments.panels import COLOURS, axes
from vattn.lab.experiments.reading import median, names, point_interval, run_of
from vattn.lab.experiments.words import apart, percent, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting


class BlockSize(Experiment):
    """The tail waste of served requests, and attention and planning over full contexts, by block size."""

    name = "block-size"
    question = "Block size: tail waste against table and kernel cost"
    times = True

    def measure(self, setting: Setting) -> dict[str, Any]:
        sizes = setting.pick((8, 16, 32, 64, 128), (4, 16))
        longest, n = setting.pick((512, 12), (64, 4))
        served = setting.limits(longest, rows=4)
        lengths = Lengths("loguniform", longest // 32, longest * 7 // 8)
        workload = RandomWorkload(n, lengths, Lengths("uniform", longest // 32, longest // 8))
        context, batch = setting.pick((1024, 4), (64, 2))
        full = setting.limits(context + 128, rows=batch + 1)

        def paged(limits: Any) -> list[Any]:
            return [setting.system(str(b), limits, kv_backend="paged", block_size=b) for b in sizes]

        contiguous = setting.system("contiguous", full, kv_backend="static", kv_layout="per_layer")
        return {
            "memory": setting.compare(workload, served, paged(served), timed=False),
            "kernels": setting.kernels([contiguous, *paged(full)], [context], batch=batch),
        }

    def findings(self, parts: Parts) -> tuple[str, str, str]:
        memory, kernels = parts["memory"], parts["kernels"]
        sizes = names(memory)
        small, large = sizes[0], sizes[-1]
        context = run_of(kernels, small)["points"][0]["context"]
        attend = {name: point_interval(kernels, name, 0) for name in names(kernels)}
        plan = {name: point_interval(kernels, name, 0, "plan_us") for name in sizes}
        ms = {name: found.median / 1e3 for name, found in attend.items()}
        took = sorted(ms[size] for size in sizes)
        if not attend[small].enough:
            cost = "too few repeats to tell what blocks cost attention"
        elif apart(attend[small], attend[large]):
            cost = (
                f"attention over {context:,} tokens takes {ms[small]:.1f} ms with blocks of {small} and "
                f"{ms[large]:.1f} ms with blocks of {large}"
            )
        else:
            cost = (
                f"attention over {context:,} tokens takes {took[0]:.1f} to {took[-1]:.1f} ms, and "
                f"blocks of {small} and {large} can't be told apart"
            )
        return (
            sentence(
                "unused ends of blocks take "
                + ", ".join(
                    f"{percent(median(memory, s, 'tail_waste_share'))} with blocks of {s}" for s in sizes
                )
            ),
            sentence(
                f"a request of {context:,} tokens has {-(-context // int(small))} entries in its table with "
                f"blocks of {small} and {-(-context // int(large))} with blocks of {large}",
                f"planning a step, tables included, takes {plan[small].median:.0f} and "
                f"{plan[large].median:.0f} µs"
                + ("" if apart(plan[small], plan[large]) else ", which noise does not let us tell apart"),
            ),
            sentence(
                cost,
                f"contiguous memory, which needs no table and no gather, takes {ms['contiguous']:.1f} ms",
            ),
        )

    def draw(self, parts: Parts, figure: Figure) -> None:
        memory, kernels = parts["memory"], parts["kernels"]
        left, right = axes(figure)
        sizes = names(memory)
        where = range(len(sizes))
        left.bar(
            where, [100 * median(memory, s, "tail_waste_share") for s in sizes], color="#E69F00", width=0.65
        )
        left.set_title("unused ends of blocks")
        left.set_ylabel("% of memory held by requests")
        for name in ("attend_us", "plan_us"):
            found = [point_interval(kernels, s, 0, name) for s in sizes]
            y = [f.median / 1e3 for f in found]
            error = [[(f.median - f.low) / 1e3 for f in found], [(f.high - f.median) / 1e3 for f in found]]
            label = "attention, blocks" if name == "attend_us" else "planning the step"
            colour = COLOURS["paged"] if name == "attend_us" else SERIES[3]
            right.errorbar(list(where), y, yerr=error, marker="o", capsize=3, label=label, color=colour)
        flat = point_interval(kernels, "contiguous", 0)
        right.axhline(
            flat.median / 1e3, color=COLOURS["static"], linestyle="--", label="attention, contiguous"
        )
        right.set_title(f"a decode step over {run_of(kernels, sizes[0])['points'][0]['context']:,} tokens")
        right.set_ylabel("ms, all layers")
        right.set_ylim(bottom=0)
        right.legend(loc="center right")
        for ax in (left, right):
            ax.set_xticks(where, sizes)
            ax.set_xlabel("tokens in a block")
