"""Evaluation and report: paired gains, agreement from the ledger alone, strict JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from solrl import adapters, report
from solrl.adapters import Manifest
from solrl.config import Config, load_config, to_toml
from solrl.errors import ConfigError
from solrl.evaluation import Cell, Pictures, compare, evaluation_seed, real_pictures
from solrl.ledger import Ledger, Reward
from solrl.report import PHASES, Evaluated, Sheet, rank_agreement
from solrl.seeds import candidate_seed
from solrl.stats import clustered_mean

# --- evaluation ----------------------------------------------------------------------------------


def pictures(levels: dict[str, list[int]]) -> Pictures:
    """Flat pictures: brightness stands for quality."""
    return Pictures(
        prompts=list(levels),
        images=[
            np.stack([np.full((8, 8, 3), level, np.uint8) for level in group])
            for group in levels.values()
        ],
    )


def brightness(images: NDArray[np.uint8], prompts: Sequence[str], name: str) -> list[float]:
    assert len(images) == len(prompts)
    factor = {"bright": 1.0, "dark": -1.0}[name]
    return [factor * float(image.mean()) for image in images]


BASE = {"a": [10, 20], "b": [30, 40], "c": [50, 60]}
TUNED = {"a": [11, 23], "b": [34, 42], "c": [50, 66]}
SCORERS = {"reward": "bright", "judge": "dark"}


def test_gains_are_paired_by_seed_and_clustered_by_prompt() -> None:
    real = [np.full((1, 8, 8, 3), level, np.uint8) for level in (100, 110, 120)]
    cells = compare(pictures(BASE), pictures(TUNED), real, scorers=SCORERS, score=brightness)
    expected = clustered_mean([[1, 3], [4, 2], [0, 6]])
    reward, judge = cells["reward"], cells["judge"]
    assert (reward.base, reward.tuned, reward.real) == (35, pytest.approx(226 / 6), 110)
    assert reward.gain == pytest.approx(expected.mean)
    assert reward.ci95 == pytest.approx((expected.low, expected.high))
    assert reward.images == 6
    assert judge.gain == -reward.gain
    assert judge.real == -110
    # Within a prompt: 10 of 255 levels apart at first.
    assert cells["diversity"].base == pytest.approx(10 / 255)
    assert cells["diversity"].real is None
    assert set(cells) == {"reward", "judge", "diversity"}


def test_scores_go_to_their_own_prompt() -> None:
    asked: list[str] = []

    def score(images: NDArray[np.uint8], prompts: Sequence[str], name: str) -> list[float]:
        asked.extend(prompts)
        return [1.0 if p == "b" else 0.0 for p in prompts]

    uneven = {"a": [1, 2, 3], "b": [4, 5]}
    cells = compare(
        pictures(uneven), pictures(uneven), None, scorers={"reward": "bright"}, score=score
    )
    assert asked[:5] == ["a", "a", "a", "b", "b"]
    # Prompts weigh the same however many pictures they have.
    assert cells["reward"].base == 0.5


def test_a_single_prompt_has_no_interval_and_that_is_stated() -> None:
    one = {"a": [10, 20]}
    cells = compare(pictures(one), pictures(one), None, scorers=SCORERS, score=brightness)
    assert cells["reward"].ci95 is None
    text = cells["reward"].model_dump_json()
    assert Cell.model_validate_json(text) == cells["reward"]


def test_evaluation_seeds_are_never_those_of_training() -> None:
    evaluated = {
        evaluation_seed(1, prompt_set, prompt, picture)
        for prompt_set in ("train_prompts", "unseen_prompts")
        for prompt in range(80)
        for picture in range(20)
    }
    explored = {
        candidate_seed(1, "explore", iteration, slot, candidate)
        for iteration in range(20)
        for slot in range(4)
        for candidate in range(96)
    }
    assert len(evaluated) == 2 * 80 * 20
    assert not evaluated & explored


def test_real_pictures_are_all_or_none(tmp_path: Path) -> None:
    for level, name in enumerate(("a", "b")):
        Image.new("RGBA", (8, 8), (level, 0, 0, 255)).save(tmp_path / f"{name}.png")
    found = real_pictures(tmp_path, ["b", "a"])
    assert found is not None
    assert [x.shape for x in found] == [(1, 8, 8, 3)] * 2
    assert [int(x[0, 0, 0, 0]) for x in found] == [1, 0]
    assert real_pictures(tmp_path, ["a", "c"]) is None
    assert real_pictures(None, ["a"]) is None


# --- rank agreement ------------------------------------------------------------------------------


def add(
    ledger: Ledger,
    iteration: int,
    stages: dict[str, list[float | None]],
    *,
    slot: int = 0,
    name: str = "emoji_clip",
) -> None:
    rewards = [
        Reward(iteration, slot, candidate, stage, name, "1", value)
        for stage, values in stages.items()
        for candidate, value in enumerate(values)
    ]
    ledger.commit_iteration(
        [], rewards, iteration=iteration, epoch=1, policy_version=iteration, metrics="{}"
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def test_agreement_is_taken_within_a_group_and_averaged(ledger: Ledger) -> None:
    """Groups on different levels: pooled, the second would drown the first's disorder."""
    add(ledger, 0, {"proxy": [1, 2, 3, 4], "audit": [1, 2, 3, 4], "ceiling": [1, 2, 3, 4]})
    add(
        ledger,
        1,
        {
            "proxy": [104, 103, 102, 101],
            "audit": [101, 102, 103, 104],
            "ceiling": [101, 102, 104, 103],
        },
    )
    seen = rank_agreement(ledger)
    assert seen["kendall_tau"] == pytest.approx(0.0)
    assert seen["kendall_tau_ceiling"] == pytest.approx((1 + 4 / 6) / 2)
    assert seen["spearman_rho"] == pytest.approx(0.0)
    assert seen["topk_overlap"] == pytest.approx(0.5)
    assert (seen["groups"], seen["seeds_per_group"]) == (2, 4)
    low, high = seen["kendall_tau_ci95"]
    assert low < 0 < high


def test_only_audited_candidates_with_all_three_scores_count(ledger: Ledger) -> None:
    add(
        ledger,
        0,
        {
            "proxy": [1, None, 3, 4, 5, 99, 98],
            "audit": [1, 9, 3, 4, None],
            "ceiling": [1, 9, 3, 4, 5],
            "true": [9, 8, 7, 6, 5],
        },
    )
    seen = rank_agreement(ledger)
    assert (seen["groups"], seen["seeds_per_group"]) == (1, 3)
    assert seen["kendall_tau"] == pytest.approx(1.0)
    assert seen["kendall_tau_ci95"] is None


def test_rewards_of_different_names_are_not_compared_with_each_other(ledger: Ledger) -> None:
    up, down = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    ledger.commit_iteration(
        [],
        [
            Reward(0, 0, c, stage, name, "1", values[c])
            for name, values in (("one", up), ("two", down))
            for stage in ("proxy", "audit", "ceiling")
            for c in range(3)
        ],
        iteration=0,
        epoch=1,
        policy_version=0,
        metrics="{}",
    )
    seen = rank_agreement(ledger)
    assert (seen["groups"], seen["kendall_tau"]) == (2, pytest.approx(1.0))


def test_without_an_audit_there_is_no_figure(ledger: Ledger) -> None:
    seen = rank_agreement(ledger)
    assert seen["kendall_tau"] is None
    assert seen["groups"] == 0
    add(ledger, 0, {"proxy": [1, 1, 1], "audit": [1, 2, 3], "ceiling": [1, 2, 3]})
    seen = rank_agreement(ledger)
    assert seen["kendall_tau"] is None  # no spread: not zero agreement
    assert seen["kendall_tau_ceiling"] == pytest.approx(1.0)


# --- the report ----------------------------------------------------------------------------------


def cell(**changes: Any) -> Cell:
    values: dict[str, Any] = {
        "base": 0.5,
        "tuned": 0.6,
        "real": 0.9,
        "gain": 0.1,
        "ci95": (0.05, 0.15),
        "images": 200,
    }
    return Cell(**(values | changes))


def evaluated(run: Path, reward: Cell) -> Evaluated:
    block = {
        prompt_set: {"reward": reward, "judge": cell(), "diversity": cell(real=None)}
        for prompt_set in ("train_prompts", "unseen_prompts")
    }
    return Evaluated(
        plain=block,
        guided=block,
        guidance=2.5,
        phases={"explore": 10.0, "train": 5.0, "score": 1.0},
        precision={"explorer": "nvfp4-emulated", "learner": "fp32"},
        fp4_share=0.6,
        adapter=str(run / "ema" / "2"),
    )


@pytest.mark.parametrize("done", [0, 2, 40])
def test_an_evaluated_run_says_after_how_many_iterations_it_was(tmp_path: Path, done: int) -> None:
    """It is asked before every evaluation: an answer of its own means that there was none."""
    assert report.evaluated_at(tmp_path) is None
    assert report.evaluated_at(tmp_path / "nowhere") is None
    made = evaluated(tmp_path, cell()).model_copy(update={"adapter": str(tmp_path / f"ema/{done}")})
    (tmp_path / report.EVALUATED).write_text(made.model_dump_json())
    assert report.evaluated_at(tmp_path) == done


def sheet(prompts: int = 3, real: bool = True) -> Sheet:
    made = pictures({f"prompt {i}, <b>": [10 * i, 20, 30] for i in range(prompts)})
    reals = [group[:1] for group in made.images] if real else None
    return Sheet.first_pictures(made, made, reals, prompts=2, pictures=2)


METRICS = {
    "reward_all": 0.1,
    "reward_kept": 0.2,
    "contrast": 0.3,
    "kendall_tau": None,
    "kendall_tau_ceiling": 0.7,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's directory, as the learner leaves it before the report."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    config = load_config(None, {"run.name": "r", "run.directory": str(folder.parent)}, {})
    (folder / "config.toml").write_text(to_toml(config))
    ledger = Ledger(folder / "ledger.sqlite")
    for iteration in range(2):
        ledger.commit_iteration(
            [],
            [
                Reward(iteration, 0, c, stage, "emoji_clip", "1", c + 0.1 * iteration)
                for stage in ("proxy", "audit", "ceiling")
                for c in range(8)
            ],
            iteration=iteration,
            epoch=1,
            policy_version=iteration,
            metrics=json.dumps(METRICS),
        )
    ledger.close()
    data = b"weights"
    adapters.publish(
        folder / "ema" / "2",
        data,
        Manifest(
            run="r",
            epoch=1,
            version=2,
            step=2,
            policy="ema",
            base_id="x",
            base_sha256="b" * 64,
            rank=4,
            alpha=8.0,
            targets=("a",),
            sha256=hashlib.sha256(data).hexdigest(),
        ),
    )
    return folder


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_report_json_holds_what_is_promised(run: Path) -> None:
    report.write(run, evaluated(run, cell()), {"train_prompts": sheet()})
    seen = strict((run / "report.json").read_text())
    assert {"run", "arm", "iterations", "seconds", "precision", "phases", "rank_agreement",
            "evaluation", "adapter"} <= set(seen)  # fmt: skip
    assert (seen["run"], seen["arm"], seen["iterations"]) == ("r", "24-in-96 (NVFP4)", 2)
    assert set(seen["phases"]) == set(PHASES)
    assert seen["seconds"] == sum(seen["phases"].values()) == 16.0
    assert {"kendall_tau", "kendall_tau_ceiling", "spearman_rho", "topk_overlap",
            "fp4_share"} <= set(seen["rank_agreement"])  # fmt: skip
    assert seen["rank_agreement"]["kendall_tau"] == pytest.approx(1.0)
    for prompt_set in ("train_prompts", "unseen_prompts"):
        block = seen["evaluation"][prompt_set]
        assert set(block) == {"reward", "judge", "diversity"}
        for values in block.values():
            assert {"base", "tuned", "real", "gain", "ci95"} <= set(values)
        assert block["reward"]["ci95"] == [0.05, 0.15]
    manifest = adapters.read_manifest(Path(seen["adapter"]["path"]))
    assert (seen["adapter"]["version"], seen["adapter"]["sha256"]) == (2, manifest.sha256)
    assert [c["iteration"] for c in seen["curves"]] == [0, 1]


def test_the_report_is_rebuilt_from_the_directory_alone(run: Path) -> None:
    report.write(run, evaluated(run, cell()), {"train_prompts": sheet(), "unseen_prompts": sheet()})
    first = (run / "report.json").read_bytes()
    page = (run / "report.html").read_text()
    for name in ("report.json", "report.html"):
        (run / name).unlink()
    report.rebuild(run)
    assert (run / "report.json").read_bytes() == first
    assert (run / "report.html").read_text() == page
    assert page.count("data:image/png;base64,") == 3
    assert not any(p.name.startswith(".") for p in run.iterdir())


def test_the_page_needs_nothing_from_elsewhere(run: Path) -> None:
    report.write(run, evaluated(run, cell()), {"train_prompts": sheet()})
    page = (run / "report.html").read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "+0.0500 to +0.1500" in page


ODD_CELLS = {
    "one prompt": (cell(ci95=None), "one prompt", "one prompt"),
    "no real pictures": (cell(real=None), "+0.050…+0.150", "+0.0500 to +0.1500"),
    "nothing to close": (cell(base=0.9, real=0.9), "0.900", "0.9000"),
    "a fall": (cell(gain=-0.1, ci95=(-0.15, -0.05)), "-0.150…-0.050", "-0.1500 to -0.0500"),
}


@pytest.mark.parametrize("name", ODD_CELLS)
def test_odd_figures_are_shown_not_stumbled_over(run: Path, name: str) -> None:
    made, in_table, on_page = ODD_CELLS[name]
    report.write(run, evaluated(run, made), {})
    strict((run / "report.json").read_text())
    console = Console(width=200, record=True, quiet=False, file=(run / "out").open("w"))
    report.show(run, console)
    printed = console.export_text()
    assert in_table in printed
    assert on_page in (run / "report.html").read_text()
    assert str(run / "report.html") in printed
    assert "tau 1.000" in printed


def test_the_table_states_the_share_of_the_gap_closed(run: Path) -> None:
    report.write(run, evaluated(run, cell()), {})
    console = Console(width=200, record=True, file=(run / "out").open("w"))
    report.show(run, console)
    # (0.6 - 0.5) of (0.9 - 0.5)
    assert "+25.0%" in console.export_text()


def test_an_unfinished_run_has_no_report(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no finished run \(evaluation.json is missing\)"):
        report.rebuild(run)
    assert not (run / "report.json").exists()


def test_a_sheet_takes_evenly_spaced_prompts_and_first_seeds() -> None:
    made = pictures({f"p{i}": [i, 100 + i, 200] for i in range(10)})
    chosen = Sheet.first_pictures(made, made, None, prompts=4, pictures=2)
    assert chosen.prompts == ["p0", "p2", "p5", "p7"]
    assert [[int(x[0, 0, 0]) for x in group] for group in chosen.base] == [
        [0, 100], [2, 102], [5, 105], [7, 107]
    ]  # fmt: skip


@pytest.mark.parametrize("real", [True, False])
def test_a_sheet_shows_each_picture_where_it_belongs(real: bool) -> None:
    drawn = np.asarray(sheet(real=real).draw())
    height, width = drawn.shape[:2]
    assert height > 2 * 24
    assert width == 190 + 4 * 24 + 28 + (24 if real else 0)
    # The second row: prompt 1, level 10, in base and tuned, then the same as the real one.
    row = drawn[26 + 28 + 12]
    starts = [190, 190 + 48 + 14] + ([190 + 2 * 62] if real else [])
    assert [int(row[start + 3, 0]) for start in starts] == [10] * len(starts)


def test_config_of_the_run_is_read_not_the_environment(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOLRL__RUN__NAME", "impostor")
    report.write(run, evaluated(run, cell()), {})
    assert strict((run / "report.json").read_text())["run"] == "r"
    assert Config().run.name != "r"
    assert math.isfinite(strict((run / "report.json").read_text())["seconds"])
