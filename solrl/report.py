"""The report of a run: report.json, report.html and pictures, from the run directory alone."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from solrl import adapters, atomic
from solrl.config import Config, load_config
from solrl.errors import ConfigError
from solrl.evaluation import Cell, Pictures
from solrl.ledger import Ledger
from solrl.stats import clustered_mean, kendall_tau, spearman_rho, topk_overlap

PHASES = ("explore", "score", "regenerate", "train", "publish", "evaluate", "other")
EVALUATED = "evaluation.json"
_ENLARGE = 3


class Evaluated(BaseModel):
    """What only the learner knows; kept beside the ledger as evaluation.json."""

    model_config = ConfigDict(extra="forbid")

    plain: dict[str, dict[str, Cell]]
    guided: dict[str, dict[str, Cell]]
    guidance: float
    phases: dict[str, float]
    precision: dict[str, str]
    fp4_share: float
    adapter: str


class Sheet(BaseModel):
    """A before/after picture: per prompt base and tuned from the same seeds, and the real one."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompts: list[str]
    base: list[NDArray[np.uint8]]
    tuned: list[NDArray[np.uint8]]
    real: list[NDArray[np.uint8]] | None

    @classmethod
    def first_pictures(
        cls,
        base: Pictures,
        tuned: Pictures,
        real: list[NDArray[np.uint8]] | None,
        *,
        prompts: int = 8,
        pictures: int = 4,
    ) -> Sheet:
        """The first seeds of evenly spaced prompts: fixed, not chosen by how they look."""
        count = min(prompts, len(base.prompts))
        chosen = [i * len(base.prompts) // count for i in range(count)]
        return cls(
            prompts=[base.prompts[i] for i in chosen],
            base=[base.images[i][:pictures] for i in chosen],
            tuned=[tuned.images[i][:pictures] for i in chosen],
            real=None if real is None else [real[i] for i in chosen],
        )

    def draw(self) -> Image.Image:
        """A row a prompt: its words, base pictures, tuned pictures, the real one."""
        side = self.base[0].shape[1] * _ENLARGE
        shown = len(self.base[0])
        words, gap, head = 190, 14, 26
        columns = words + 2 * shown * side + 2 * gap + (side if self.real else 0)
        canvas = Image.new("RGB", (columns, head + len(self.prompts) * (side + 4)), "white")
        pen = ImageDraw.Draw(canvas)
        starts = [words, words + shown * side + gap, words + 2 * (shown * side + gap)]
        for start, title in zip(starts, ("base", "tuned", "real"), strict=True):
            if title != "real" or self.real:
                pen.text((start, 6), title, fill="black", font_size=14)
        for row, prompt in enumerate(self.prompts):
            top = head + row * (side + 4)
            pen.multiline_text(
                (4, top + side // 3), prompt.replace(", ", ",\n"), fill="black", font_size=14
            )
            groups = [self.base[row], self.tuned[row], *([self.real[row]] if self.real else [])]
            for start, group in zip(starts, groups, strict=False):
                for place, pixels in enumerate(group):
                    picture = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
                    canvas.paste(picture, (start + place * side, top))
        return canvas


def write(run: Path, evaluated: Evaluated, sheets: dict[str, Sheet]) -> None:
    """Store the evaluation and its pictures, then build the report from the directory."""
    for name, sheet in sheets.items():
        data = io.BytesIO()
        sheet.draw().save(data, "PNG")
        atomic.write_bytes(run / f"before_after_{name}.png", data.getvalue())
    atomic.write_text(run / EVALUATED, evaluated.model_dump_json(indent=2))
    rebuild(run)


def evaluated_at(run: Path) -> int | None:
    """Iterations done when the run was evaluated; None when it was not."""
    try:
        evaluated = Evaluated.model_validate_json((run / EVALUATED).read_bytes())
    except FileNotFoundError:
        return None
    return int(Path(evaluated.adapter).name)


def rebuild(run: Path) -> None:
    """(Re)write report.json and report.html of a finished run. ConfigError when it has none."""
    if not (run / EVALUATED).is_file():
        raise ConfigError(
            f"{run} holds no finished run ({EVALUATED} is missing); finish it with --resume"
        )
    config = load_config(run / "config.toml", environment={})
    evaluated = Evaluated.model_validate_json((run / EVALUATED).read_bytes())
    ledger = Ledger(run / "ledger.sqlite", read_only=True)
    try:
        iterations = [
            {"iteration": row["iteration"], **json.loads(row["metrics"])}
            for row in ledger.rows("SELECT iteration, metrics FROM iterations ORDER BY iteration")
        ]
        report = _report(config, evaluated, rank_agreement(ledger), iterations)
    finally:
        ledger.close()
    atomic.write_text(run / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    atomic.write_text(run / "report.html", _page(run, report, iterations))


def rank_agreement(ledger: Ledger) -> dict[str, Any]:
    """Proxy against true rewards of audit seeds, within prompt and version, averaged.

    The ceiling compares full precision at the explorer's steps with full precision at the
    regenerator's: what is lost to fewer steps alone. Intervals over audited groups.
    """
    rows = ledger.rows(
        "SELECT name, a.iteration, a.slot, p.value AS proxy, a.value AS true, c.value AS ceiling "
        "FROM rewards a "
        "JOIN rewards p USING (iteration, slot, candidate, name) "
        "JOIN rewards c USING (iteration, slot, candidate, name) "
        "WHERE a.stage = 'audit' AND p.stage = 'proxy' AND c.stage = 'ceiling' "
        "AND a.value + p.value + c.value IS NOT NULL "
        "ORDER BY name, a.iteration, a.slot, a.candidate"
    )
    groups: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    for row in rows:
        key = (row["name"], row["iteration"], row["slot"])
        groups.setdefault(key, []).append((row["proxy"], row["true"], row["ceiling"]))
    columns = [tuple(zip(*g, strict=True)) for g in groups.values() if len(g) >= 3]

    def average(values: list[float]) -> tuple[float | None, tuple[float, float] | None]:
        found = clustered_mean([[v] for v in values if math.isfinite(v)])
        interval = (found.low, found.high) if math.isfinite(found.low) else None
        return (found.mean if math.isfinite(found.mean) else None), interval

    tau, tau_interval = average([kendall_tau(p, t) for p, t, _ in columns])
    ceiling, ceiling_interval = average([kendall_tau(c, t) for _, t, c in columns])
    rho, _ = average([spearman_rho(p, t) for p, t, _ in columns])
    overlap, _ = average([topk_overlap(p, t, max(1, len(p) // 4)) for p, t, _ in columns])
    return {
        "kendall_tau": tau,
        "kendall_tau_ci95": tau_interval,
        "kendall_tau_ceiling": ceiling,
        "kendall_tau_ceiling_ci95": ceiling_interval,
        "spearman_rho": rho,
        "topk_overlap": overlap,
        "groups": len(columns),
        "seeds_per_group": len(columns[0][0]) if columns else 0,
    }


def _report(
    config: Config,
    evaluated: Evaluated,
    agreement: dict[str, Any],
    iterations: list[dict[str, Any]],
) -> dict[str, Any]:
    phases = {name: evaluated.phases.get(name, 0.0) for name in PHASES}
    manifest = adapters.read_manifest(Path(evaluated.adapter))
    cells = {
        "plain": {k: {n: c.model_dump() for n, c in v.items()} for k, v in evaluated.plain.items()},
        "guided": {
            k: {n: c.model_dump() for n, c in v.items()} for k, v in evaluated.guided.items()
        },
    }
    return {
        "run": config.run.name,
        "seed": config.run.seed,
        "arm": config.run.arm,
        "iterations": len(iterations),
        "seconds": sum(phases.values()),
        "precision": evaluated.precision,
        "phases": phases,
        "rank_agreement": {**agreement, "fp4_share": evaluated.fp4_share},
        "evaluation": cells["plain"],
        "evaluation_guided": {"guidance": evaluated.guidance, **cells["guided"]},
        "adapter": {
            "version": manifest.version,
            "sha256": manifest.sha256,
            "path": evaluated.adapter,
        },
        "curves": iterations,
    }


def show(run: Path, console: Console) -> None:
    """Print the table base -> tuned, the agreement, the time split and where things lie."""
    report = json.loads((run / "report.json").read_text())
    table = Table(
        # No rules: with them the widest row does not fit 80 columns.
        box=None,
        padding=(0, 1, 0, 0),
        title=f"{report['run']}: base → tuned ({report['iterations']} iterations)",
    )
    for name in ("", "base", "tuned", "gain", "95 %", "real", "closed"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for label, block in (
        ("", report["evaluation"]),
        (f" CFG {report['evaluation_guided']['guidance']}", report["evaluation_guided"]),
    ):
        for prompt_set in ("train_prompts", "unseen_prompts"):
            for name, cell in block[prompt_set].items():
                real = cell["real"]
                gap = 0.0 if real is None else real - cell["base"]
                table.add_row(
                    f"{prompt_set.removesuffix('_prompts')} {name}{label}",
                    f"{cell['base']:.3f}",
                    f"{cell['tuned']:.3f}",
                    f"{cell['gain']:+.3f}",
                    _interval(cell["ci95"], "…", 3),
                    "" if real is None else f"{real:.3f}",
                    f"{cell['gain'] / gap:+.1%}" if gap else "",
                )
    console.print(table)
    agreement = report["rank_agreement"]
    if agreement["kendall_tau"] is not None:
        low, high = agreement["kendall_tau_ci95"] or (math.nan, math.nan)
        console.print(
            f"rank agreement: tau {agreement['kendall_tau']:.3f} (95 % {low:.3f} to {high:.3f}), "
            f"ceiling {agreement['kendall_tau_ceiling']:.3f}, FP4 share of block multiply-adds "
            f"{agreement['fp4_share']:.0%}",
            highlight=False,
        )
    phases = "  ".join(f"{name} {seconds:.0f}" for name, seconds in report["phases"].items())
    console.print(f"seconds {report['seconds']:.0f}: {phases}", highlight=False)
    console.print(f"precision: {report['precision']}", highlight=False, markup=False)
    for what, path in (
        ("LoRA", f"{report['adapter']['path']}/{adapters.WEIGHTS}"),
        ("report", run / "report.html"),
        ("figures", run / "report.json"),
        ("before/after", run / "before_after_train_prompts.png"),
    ):
        console.print(f"{what:<13} {path}", highlight=False, soft_wrap=True)


def _interval(bounds: tuple[float, float] | None, between: str = " to ", digits: int = 4) -> str:
    if bounds is None:
        return "one prompt"
    return f"{bounds[0]:+.{digits}f}{between}{bounds[1]:+.{digits}f}"


def _page(run: Path, report: dict[str, Any], iterations: list[dict[str, Any]]) -> str:
    """One self-contained page: table, curves, pictures."""
    rows = []
    for label, block in (
        ("", report["evaluation"]),
        (f", CFG {report['evaluation_guided']['guidance']}", report["evaluation_guided"]),
    ):
        for prompt_set in ("train_prompts", "unseen_prompts"):
            for name, cell in block[prompt_set].items():
                real = "" if cell["real"] is None else f"{cell['real']:.4f}"
                rows.append(
                    f"<tr><td>{prompt_set.replace('_', ' ')}{label}: {name}"
                    f"<td>{cell['base']:.4f}<td>{cell['tuned']:.4f}<td>{cell['gain']:+.4f}"
                    f"<td>{_interval(cell['ci95'])}<td>{real}"
                )
    pictures = "".join(
        f"<h2>{title}</h2><img alt='{title}' src='{_data_url(path.read_bytes())}'>"
        for title, path in (
            ("Before and after, prompts trained on", run / "before_after_train_prompts.png"),
            ("Before and after, prompts never trained on", run / "before_after_unseen_prompts.png"),
        )
        if path.is_file()
    )
    shown = {k: v for k, v in report.items() if k not in ("curves", "evaluation")}
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<title>solrl: {html.escape(report['run'])}</title>"
        "<meta name='viewport' content='width=device-width'><style>"
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem "
        "auto;padding:0 1rem}table{border-collapse:collapse}td,th{padding:.2rem .8rem;"
        "border-bottom:1px solid #8884;text-align:right}td:first-child{text-align:left}"
        "img{max-width:100%;background:#fff}pre{overflow:auto}</style>"
        f"<h1>{html.escape(report['run'])}: base → tuned</h1>"
        f"<p>{report['iterations']} iterations of arm {html.escape(report['arm'])} in "
        f"{report['seconds']:.0f} s.</p>"
        "<table><tr><th><th>base<th>tuned<th>gain<th>95 % interval<th>real"
        + "".join(rows)
        + f"</table><h2>Curves</h2><img alt='curves' src='{_data_url(_curves(iterations))}'>"
        + pictures
        + f"<h2>Figures</h2><pre>{html.escape(json.dumps(shown, indent=2))}</pre></html>\n"
    )


def _curves(iterations: list[dict[str, Any]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, names in zip(
        figure.subplots(1, 3),
        (("reward_all", "reward_kept"), ("contrast",), ("kendall_tau", "kendall_tau_ceiling")),
        strict=True,
    ):
        for name in names:
            points = [(i["iteration"] + 1, i[name]) for i in iterations if i[name] is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
        axes.set_xlabel("iteration")
        axes.legend(fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
