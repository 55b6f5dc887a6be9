"""What the CUDA benchmark prints and draws, from the report it writes as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill


@dataclass(frozen=True)
class Target:
    """``ratio`` to the best peer's time, and the share of the matmul rate, to be reached."""

    ratio: float
    matmul_share: float = 0.0


TARGETS = {
    **{case: Target(1.05, 0.90) for case in "afi"},
    "b": Target(1.05),
    "c": Target(1.25),
    "d": Target(1.20),
    "e": Target(1.00),
    "g": Target(1.80),
    **{case: Target(1.15) for case in "hj"},
}


def progress(row: dict) -> str:
    """All figures of one case, fastest first, then what failed."""
    clocks = " -> ".join(" ".join(row[key].values()) or "no clock" for key in ("gpu_before", "gpu_after"))
    lines = [f"\n{row['case']}: {row['lengths']}: {row['tflop']:.3f} TFLOP; {clocks}"]
    for name, figure in sorted(row["figures"].items(), key=lambda item: item[1]["ms"]):
        line = f"  {name:24s} {figure['ms']:9.4f} ms  host {figure['host_us']:7.1f} us"
        if "tflops" in figure:
            line += f"  {figure['tflops']:6.1f} TFLOP/s"
        if "agrees" in figure:
            line += f"  max diff {figure['max_abs_diff']:.1e}, relative {figure['relative_error']:.1e}"
            line += f", lse {figure['lse_max_abs_diff']:.1e}" if "lse_max_abs_diff" in figure else ", lse not compared"
            line += "" if figure["agrees"] else "  DIFFERS FROM OURS"
        lines.append(line)
    lines += [f"  {name:24s} failed: {reason}" for name, reason in row["failed"].items()]
    return "\n".join(lines)


def figures_table(report: dict) -> str:
    """TFLOP/s and host time per call of everything measured."""
    names = list(dict.fromkeys(name for row in report["cases"] for name in row["figures"]))

    def cell(row: dict, name: str) -> str:
        figure = row["figures"].get(name)
        if figure is None:
            return "–"
        speed = f"{figure['tflops']:.0f}" if "tflops" in figure else f"{figure['ms']:.3f} ms"
        return f"{speed}, {figure['host_us']:.0f} µs" + ("" if figure.get("agrees", True) else " (differs)")

    lines = ["| TFLOP/s, host time | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    lines += [f"| {row['case']} | " + " | ".join(cell(row, name) for name in names) + " |" for row in report["cases"]]
    return "\n".join(lines)


def summary_table(report: dict) -> str:
    """Ours with K in two parts and the plan made before, against the best peer; the targets and whether they are met.

    ``ratio`` is the peer's time over ours, K given to the peer in one piece; then with that concatenation charged.
    """
    matmul = statistics.mean(report["ceilings"]["matmul_tflops"])
    copy = statistics.mean(report["ceilings"]["copy_tb_per_s"])
    host = [row["figures"]["ours"]["host_us"] for row in report["cases"] if "ours" in row["figures"]]
    lines = [
        f"{report['device']['name']}, {report['rounds']} rounds; 8192^3 bf16 matmul {matmul:.0f} TFLOP/s, "
        f"copy {copy:.2f} TB/s (means of before and after)"
        + (f"; a call of ours takes the host {statistics.median(host):.1f} µs" if host else ""),
        "",
        "| shape | ours TFLOP/s | ms | best peer | TFLOP/s | ratio | with concat | of matmul | target | met |",
        "|" + "---|" * 10,
    ]
    return "\n".join(lines + [_summary(row, matmul) for row in report["cases"]])


def _summary(row: dict, matmul: float) -> str:
    target = TARGETS[row["case"]]
    peers = {name: figure for name, figure in row["figures"].items() if figure["kind"] == "peer"}
    best = _fastest(peers)
    ours, concat = row["figures"].get("ours"), row["figures"].get("K concat")

    wanted = f"{target.ratio:.2f} x best"
    if target.matmul_share:
        wanted += f", {target.matmul_share:.0%} of matmul"
    cells = [f"{row['case']} {row['lengths']}"] + ["–"] * 7 + [wanted, "–"]
    if ours:
        share = ours["tflops"] / matmul
        cells[1], cells[2], cells[7] = f"{ours['tflops']:.0f}", f"{ours['ms']:.3f}", f"{share:.1%}"
    if best:
        flag = "" if peers[best].get("agrees", True) else " (differs)"
        cells[3], cells[4] = best + flag, f"{peers[best]['tflops']:.0f}"
    if ours and best:
        ratio = peers[best]["ms"] / ours["ms"]
        cells[5] = f"{ratio:.3f}"
        if concat:
            cells[6] = f"{(peers[best]['ms'] + concat['ms']) / ours['ms']:.3f}"
        cells[9] = "yes" if ratio >= target.ratio and share >= target.matmul_share else "no"
    return "| " + " | ".join(cells) + " |"


def _fastest(figures: dict[str, dict]) -> str | None:
    return min(figures, key=lambda name: figures[name]["ms"], default=None)


def chart(report: dict, path: Path) -> str | None:
    """Bars per shape, ours and the peers, with the matmul rate as the line above; a reason where it can't be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return str(error)
    rows = report["cases"]
    names = dict.fromkeys(n for row in rows for n, f in row["figures"].items() if n == "ours" or f["kind"] == "peer")
    figure = Figure(figsize=(1.5 + 1.4 * len(rows), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.85 / max(1, len(names))
    for index, name in enumerate(names):
        heights = [row["figures"].get(name, {}).get("tflops", 0.0) for row in rows]
        places = [x + (index - (len(names) - 1) / 2) * width for x in range(len(rows))]
        color = "black" if name == "ours" else f"C{index}"
        axes.bar(places, heights, width, label=name, color=color)
    matmul = statistics.mean(report["ceilings"]["matmul_tflops"])
    axes.axhline(matmul, color="grey", linestyle="--", linewidth=1, label="8192³ matmul")
    axes.set_xticks(range(len(rows)), [f"{row['case']}\n{fill(row['lengths'], 17)}" for row in rows])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("TFLOP/s, bf16")
    axes.set_title(f"{report['device']['name']}, median of {report['rounds']} rounds")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    return None
