"""Checkpoints: every bit back at any number of ranks, stage and bucket size; whatever does not fit is named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build, facts, save, train
from ranks import Pool

import shardopt

STAGES = (0, 1, 2, 3)

# -- the same bits everywhere ------------------------------------------------------------------------------------------


def uninterrupted(kind: str) -> dict[int, dict[str, str]]:
    model, optimizer = build(0, kind=kind)
    found = {}
    for steps in (range(2), range(2, 4), range(4, 6)):
        train(model, optimizer, steps)
        found[steps.stop] = facts(model, optimizer)
    return found


def begun(root: Path, kind: str) -> list[Any]:
    found = []
    for stage in STAGES:
        model, optimizer = build(stage, kind=kind)
        train(model, optimizer, range(2))
        save(root / str(stage), model, optimizer, extra={"stage": stage, "pair": (1.5, torch.arange(3))})
        found.append(facts(model, optimizer))
    return found


def gone_on(root: Path, kind: str, pairs: list[tuple[int, int]], steps: range) -> list[Any]:
    found = []
    for number, (before, stage) in enumerate(pairs):
        # Other weights, other bucket sizes, and in every other case states of another training.
        model, optimizer = build(stage, seed=5, kind=kind, bucket_bytes=1500 + 700 * stage)
        if number % 2:
            train(model, optimizer, range(50, 52))
        loaded = shardopt.load_checkpoint(root / str(before), model, optimizer)
        assert loaded["stage"] == before % 10 and loaded["pair"][0] == 1.5 and loaded.step == steps.start
        assert torch.equal(loaded["pair"][1], torch.arange(3)) and not loaded.mismatches
        just_loaded = facts(model, optimizer)
        train(model, optimizer, steps)
        save(root / str(100 + 10 * before + stage), model, optimizer, extra=dict(loaded, stage=stage))
        found.append((just_loaded, facts(model, optimizer)))
    return found


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_two_then_three_ranks_then_one_and_every_pair_of_stages(ranks: Pool, tmp_path: Path, kind: str) -> None:
    (expected,) = ranks.run(uninterrupted, kind, world=1)
    for whole, found in enumerate(zip(*ranks.run(begun, tmp_path, kind, world=2), strict=True)):
        assert same_on_all(found, expected[2]), f"stage {whole}"
    pairs = [(before, stage) for before in STAGES for stage in STAGES]
    last = [(100 + 10 * before + stage, (before + stage) % 4) for before, stage in pairs]
    for its_pairs, world, steps in ((pairs, 3, range(2, 4)), (last, 1, range(4, 6))):
        results = ranks.run(gone_on, tmp_path, kind, its_pairs, steps, world=world)
        for pair, by_rank in zip(its_pairs, zip(*results, strict=True), strict=True):
            assert same_on_all([loaded for loaded, _ in by_rank], expected[steps.start]), f"{pair} when loaded"
            assert same_on_all([after for _, after in by_rank], expected[steps.stop]), f"{pair} later"


def same_on_all(found: Sequence[dict[str, str]], expected: dict[str, str]) -> bool:
    """Rank 0 knows all, the others know the values of the module."""
    return found[0] == expected and all(each.items() <= expected.items() for each in found)
