"""Takes one feature of the package away at a time: the tests that promise it must fail.

    python -m tests.mutation.features [WORDS ...]     writes rows of results/features.md: all, or those with a word

A feature goes by a few edits of one file, in a copy of the checkout. Its tests must pass before, and each must fail
after. ``tests/support/test_mutation.py`` checks in every run of the tests that the edits still fit the package.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.scratch import Scratch
from tests.support.paths import ROOT

RESULTS = Path(__file__).parent / "results" / "features.md"
LIMIT = 900.0  # seconds, of one test: it only ends a hang


@dataclass(frozen=True)
class Feature:
    """One promise.

    Attributes:
        edits: text that stands once in the file, and what replaces it.
        tests: each must fail without the feature.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def removed_from(self, source: str) -> str:
        """Returns the file without the feature.

        Raises:
            ValueError: a text does not stand once in the file.
        """
        for before, after in self.edits:
            if source.count(before) != 1:
                raise ValueError(f"{self.name}: {self.file} has {source.count(before)} times: {before}")
            source = source.replace(before, after)
        return source


_DEEPSPEED = ("tests/integrations/test_deepspeed_training.py::test_trains_as_torch_does_and_resumes",)

FEATURES = (
    Feature(
        "prefetch: units are gathered ahead of their use",
        "shardopt/units/schedule.py",
        (("while budget.looks_ahead and budget.lists is None", "while False and budget.lists is None"),),
        (
            "tests/partition/test_prefetch.py::test_what_comes_next_is_asked_for_while_there_is_room",
            "tests/partition/test_prefetch.py::test_all_but_the_first_gather_are_ahead",
        ),
    ),
    Feature(
        "traffic at default settings, stage 3: a unit that is gathered ahead stays until it is used",
        "shardopt/units/schedule.py",
        (("for each in here if last.get(each, -1) >= at or each in stays}", "for each in here if each in stays}"),),
        ("tests/partition/test_traffic.py::test_at_most_three_units_at_stage_3",),
    ),
    Feature(
        "traffic at default settings, stages 1 and 2: gradients travel once",
        "shardopt/partition/comm/reduce_scatter_p2p.py",
        (
            (
                "        pending = self._ranks.exchange_slices(",
                "        self._ranks.wait(self._ranks.exchange_slices(own, others, self._tag(), PHASE))\n"
                "        pending = self._ranks.exchange_slices(",
            ),
        ),
        ("tests/partition/test_traffic.py::test_no_more_than_ddp",),
    ),
    Feature(
        "collectives of the backend at stage 3, where it has them",
        "shardopt/partition/comm/transport.py",
        (
            ("if ranks.has_collectives(device):", "if False:"),
            (
                "            return CollectiveReduceScatter(self.ranks, self.traffic)\n",
                "            return P2PReduceScatter(self.ranks, self.traffic, self._number)\n",
            ),
        ),
        (
            "tests/partition/test_collective_wire.py::test_trains_as_stage_1",
            "tests/partition/test_collective_wire.py::test_deadlines_do_not_make_the_host_wait",
        ),
    ),
    Feature(
        "several transfers of a disk at a time",
        "shardopt/offload/disk/pipeline.py",
        (("THREADS = 4", "THREADS = 1"),),
        (
            "tests/offload/test_overlap.py::test_a_step_reads_several_chunks_at_a_time",
            "tests/offload/test_overlap.py::test_a_step_writes_several_chunks_at_a_time",
            "tests/offload/test_overlap.py::test_moves_state_dicts_and_checkpoints",
            "tests/offload/test_overlap.py::test_params_are_read_several_chunks_at_a_time",
        ),
    ),
    Feature(
        "DeepSpeed config: the learning rate to 2 %",
        "shardopt/integrations/deepspeed/optimizer.py",
        (
            (
                "    if is_corrected:\n",
                '    arguments["lr"] = 1.02 * arguments.get("lr", 1e-3)\n    if is_corrected:\n',
            ),
        ),
        _DEEPSPEED,
    ),
    Feature(
        "DeepSpeed config: clipping",
        "shardopt/integrations/deepspeed/config.py",
        (('"max_grad_norm": clip_of(keys)', '"max_grad_norm": clip_of(keys) and None'),),
        _DEEPSPEED,
    ),
    Feature(
        "DeepSpeed config: weight decay",
        "shardopt/integrations/deepspeed/optimizer.py",
        (("    if is_corrected:\n", '    arguments["weight_decay"] = 0.0\n    if is_corrected:\n'),),
        _DEEPSPEED,
    ),
    Feature(
        "DeepSpeed config: the schedule of the learning rate",
        "shardopt/integrations/deepspeed/config.py",
        (("None if schedule is None else ScheduleLR(made, schedule)", "None"),),
        _DEEPSPEED,
    ),
    Feature(
        "planned bytes on the wire: params that are gathered twice at stage 3 count twice",
        "shardopt/tools/plan_traffic.py",
        ((" + domain.gathered * gathered", " + domain.gathered * gathered // 2"),),
        ("tests/partition/test_traffic.py::test_at_most_three_units_at_stage_3",),
    ),
    Feature(
        "planned bytes on the wire: updated params travel at stages 1 and 2",
        "shardopt/tools/plan_traffic.py",
        (("gradients, params = reduced * rounds, after", "gradients, params = reduced * rounds, 0"),),
        ("tests/partition/test_traffic.py::test_no_more_than_ddp",),
    ),
    Feature(
        "one launch covers a shard, whatever the groups of its params",
        "shardopt/step/launches.py",
        (
            ("rows[variant_of[each.group], each.grad", "rows[each.group, each.grad"),
            (
                "for (whole, dtype, divisor, is_on_host, ties), members in rows.items():",
                "for (group, dtype, divisor, is_on_host, ties), members in rows.items():\n"
                "        whole = variant_of[group]",
            ),
        ),
        ("tests/step/test_counts.py::test_one_launch_a_shard",),
    ),
    Feature(
        "a clipped step agrees once: the norm travels with the digest",
        "shardopt/domain/agreement.py",
        (
            (
                'rows = ranks.exchange(view.row(), "agreeing on the step")',
                'halves = [ranks.exchange(half, "agreeing on the step") for half in (view.row()[:8], view.row()[8:])]\n'
                "    rows = [digest + limbs for digest, limbs in zip(*halves, strict=True)]",
            ),
        ),
        ("tests/step/test_counts.py::test_a_step_agrees_once",),
    ),
    Feature(
        "compiled models: hooks stay out of the graphs",
        "shardopt/module/hooks.py",
        (('    @uncompiled("it communicates with other ranks")\n', ""),),
        ("tests/module/test_inductor.py::test_inductor",),
    ),
    Feature(
        "int8 states: the second moment is dithered",
        "shardopt/kernels/formats.py",
        (
            (
                '"unsigned8", torch.uint8, torch.uint8, 1, rounding="dithered"',
                '"unsigned8", torch.uint8, torch.uint8, 1',
            ),
        ),
        ("tests/step/test_format_drift.py::test_how_far_it_ends_from_fp32[int8-0.0175-0.001]",),
    ),
    Feature(
        "a first step's memory: masters and states are encoded a piece at a time",
        "shardopt/kernels/codecs.py",
        (("_PIECE = 1024 * BLOCK", "_PIECE = 1 << 40"),),
        ("tests/step/test_first_steps_memory.py::test_the_first_steps_need_no_more_than_later_ones",),
    ),
    Feature(
        "a fresh process: importing the package imports no compiler",
        "shardopt/__init__.py",
        (("from .config import Offload, Tuning\n", "import numba\n\nfrom .config import Offload, Tuning\n"),),
        ("tests/optim/test_fresh_process.py::test_import_loads_and_does_little",),
    ),
)


def outcome(feature: Feature, scratch: Scratch) -> list[tuple[str, str]]:
    """Returns each test of the feature and what became of it: "fails", or what is wrong."""
    path = scratch.root / feature.file
    source = path.read_text()
    if (killer := scratch.run(list(feature.tests), [], LIMIT).killer) is not None:
        return [(killer, "does not pass with the feature either")]
    path.write_text(feature.removed_from(source))
    found = []
    for test in feature.tests:
        killer = scratch.run([test], [], LIMIT).killer
        fails = killer is not None and killer.partition("[")[0] == test.partition("[")[0]
        found.append((test, "fails" if fails else f"STILL PASSES ({killer})"))
    path.write_text(source)
    return found


def main() -> int:
    words = sys.argv[1:]
    scratch, wrong = Scratch(), False
    kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = {feature: [row for row in kept if row.startswith(f"| {feature.name} |")] for feature in FEATURES}
    for feature in FEATURES:
        if words and not any(word in feature.name for word in words):
            continue
        rows[feature] = []
        for test, what in outcome(feature, scratch):
            wrong |= what != "fails"
            test = re.sub("^tests/", "", test)
            rows[feature].append(f"| {feature.name} | `{feature.file}` | `{test}` | {what} | {_commit()} |")
            print(rows[feature][-1], flush=True)
    RESULTS.write_text("\n".join([*_HEAD, *(row for feature in FEATURES for row in rows[feature]), ""]))
    return 1 if wrong else 0


_HEAD = (
    "# Features, taken away one at a time",
    "",
    "`python -m tests.mutation.features` wrote this. Every test passes with the feature.",
    "",
    "| without | in | test | | at |",
    "|---|---|---|---|---|",
)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
