"""Which 8 bits hold a state of AdamW best: codes compared on the recorded gradients of a GPT.

    python bench/codes.py                  blocks of 256 that lie within a row of the params
    python bench/codes.py --width 128      blocks that hold two rows, as of a frequent and of a rare token
    python bench/codes.py --noise          gradients of pure noise alone, in a minute
    python bench/codes.py --quick          does it run?

The example's GPT (examples/train_gpt.py) trains in fp32, and the first elements of some params have their gradients
recorded. AdamW then runs on them by itself, in fp32 and with states that are stored in a code after each step: first
one state, the other one in fp32, then both. (bench/codes_train.py trains with codes.)

* `update`: m / (sqrt(v) + eps), bias corrected, against fp32's at the same step. rms: of the error over the update's.
* `v`: mean of log2(v / fp32's v), the bias, and its rms, over elements that have had a gradient. `lost`: their v is 0.
* `drift`: |param - fp32's|, mean; and relative to |param|, as sum over sum.
* `noise`: the same on gradients of 0.01 randn for params of 0.1 randn, 50 steps; also of one state at a time, and of a
  first moment that is dithered.
* `idle`: half of the elements of each block have no gradient after step 20; what they go on doing.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from code_book import BLOCK, Offset, check_nearest, codes_of, golden, half, linear
from common import parser_of, show, write_result
from simulate import AdamW, Pair, Size, Training, pairs
from torch import Tensor
from tqdm import tqdm

LR, DECAY = 1e-3, 0.01
BETA2S = (0.999, 0.95)
CHECKPOINTS = (50, 200, 500)


# ---- Gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """`grads[t]` are the gradients of `params`' elements at step t; `slices` index the kinds among them."""

    params: Tensor  # [elements] fp32, before the first step
    grads: Tensor  # [steps, elements] fp32
    slices: dict[str, slice | Tensor]


SIZE = Size(layers=2)
RECORDED = {
    "embedding": ("bytes.weight",),
    "attention": ("blocks.0.qkv.weight", "blocks.1.qkv.weight", "blocks.1.attention_out.weight"),
    "mlp": ("blocks.0.mlp_in.weight", "blocks.1.mlp_out.weight"),
    "head": ("head.weight",),
}


def record(steps: int, blocks: int, width: int, directory: str) -> Record:
    """Train, and keep some blocks, evenly spread, of each param of RECORDED."""
    training = Training(0, max(steps, 800), replace(SIZE, width=width))
    params = dict(training.model.named_parameters())
    names = [name for kind in RECORDED.values() for name in kind]

    def some(of: Tensor) -> Tensor:
        every = of.detach().view(-1, BLOCK)
        return every[torch.arange(blocks) * len(every) // blocks].flatten()

    opt = torch.optim.AdamW(params.values(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    shape = (steps, BLOCK * blocks * len(names))
    grads = torch.from_file(str(Path(directory) / "gradients"), shared=True, size=math.prod(shape)).view(shape)
    first = torch.cat([some(params[name]) for name in names])
    for step in tqdm(range(steps), desc="record", disable=None):
        opt.zero_grad()
        training.backward()
        for group in opt.param_groups:
            group["lr"] = training.lr(step)
        torch.cat([some(params[name].grad) for name in names], out=grads[step])
        opt.step()
    slices: dict[str, slice | Tensor] = {}
    start = 0
    for kind, of_kind in RECORDED.items():
        slices[kind] = slice(start, start := start + BLOCK * blocks * len(of_kind))
    return Record(first, grads, slices)


def noise(steps: int = 50, elements: int = 1 << 18) -> Record:
    generator = torch.Generator().manual_seed(0)
    grads = (0.01 * torch.randn(elements, generator=generator) for _ in range(steps))
    params = 0.1 * torch.randn(elements, generator=generator)
    return Record(params, torch.stack(list(grads)), {})


def idle(steps: int = 300, elements: int = 1 << 16, until: int = 20) -> Record:
    """Half of each block has no gradient any more: the row of a rare token, what a dead unit feeds."""
    grads = 0.01 * torch.randn(steps, elements, generator=torch.Generator().manual_seed(0))
    halves = grads.view(steps, -1, 2, BLOCK // 2)
    halves[until:, :, 1] = 0
    kinds = {"busy": torch.arange(elements) // (BLOCK // 2) % 2 == 0}
    return Record(torch.zeros(elements), grads, kinds | {"idle": ~kinds["busy"]})


# ---- Replay ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    step: int
    update: Tensor
    exp_avg_sq: Tensor  # as stored
    param: Tensor


def replay(recorded: Record, pair: Pair, beta2: float) -> Iterator[Snapshot]:
    opt = AdamW(recorded.params.clone(), pair, beta2, DECAY)
    for step, grad in enumerate(recorded.grads, 1):
        update = opt.step(grad, LR)
        if step in CHECKPOINTS or step == len(recorded.grads):
            yield Snapshot(step, update, opt.exp_avg_sq, opt.param.clone())


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def compare(ours: Snapshot, theirs: Snapshot, slices: dict[str, slice | Tensor]) -> dict[str, Any]:
    error, drift = (ours.update - theirs.update).abs(), (ours.param - theirs.param).abs()
    had = theirs.exp_avg_sq > 0
    held = had & (ours.exp_avg_sq > 0)
    log_ratio = (ours.exp_avg_sq[held].double() / theirs.exp_avg_sq[held]).log2()
    return {
        "update mean": error.mean().item(),
        "update rms": rms(error) / rms(theirs.update),
        "update 99.9": error.kthvalue(math.ceil(0.999 * error.numel())).values.item(),
        "update max": error.max().item(),
        "update mean of": {kind: error[at].mean().item() for kind, at in slices.items()},
        "update rms of": {kind: rms(error[at]) / (rms(theirs.update[at]) or 1) for kind, at in slices.items()},
        "v bias": log_ratio.mean().item(),
        "v rms": rms(log_ratio),
        "v lost": 1 - held.sum().item() / had.sum().item(),
        "drift": drift.mean().item(),
        "drift relative": drift.sum().item() / theirs.param.abs().sum().item(),
        "drift mean of relative": (drift / (theirs.param.abs() + 1e-9)).mean().item(),
    }


Found = dict[str, dict[str, Any]]  # pair -> step -> what `compare` says


def replays(recorded: Record, formats: list[Pair], beta2: float, what: str) -> Found:
    reference = list(replay(recorded, Pair("fp32"), beta2))
    found: Found = {}
    for pair in tqdm(formats, desc=what, disable=None):
        snapshots = replay(recorded, pair, beta2)
        found[pair.name] = {
            str(ours.step): compare(ours, theirs, recorded.slices)
            for ours, theirs in zip(snapshots, reference, strict=True)
        }
    return found


def show_replays(title: str, found: Found) -> None:
    columns = ("mean", "rms", "99.9 %", "v bias", "v rms", "lost", "drift", "relative")
    for step in next(iter(found.values())):
        rows = []
        for name, by_step in found.items():
            one = by_step[step]
            keys = ("update mean", "update rms", "update 99.9", "v bias", "v rms", "v lost", "drift", "drift relative")
            rows.append([name, *(f"{one[key]:.2g}" for key in keys)])
        show(f"{title}, step {step}", ("code", *columns), rows)


def run_replays(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        recorded = record(args.steps, args.blocks, args.width, directory)
        one_state = {
            "exp_avg": [Pair(name, exp_avg=code) for name, code in codes_of(signed=True).items()],
            "exp_avg_sq": [Pair(name, exp_avg_sq=code) for name, code in codes_of(signed=False).items()],
        }
        for what, formats in (one_state | {"both": pairs()}).items():
            for beta2 in BETA2S:
                key = f"{what}, beta2 {beta2}"
                results[key] = replays(recorded, formats, beta2, key)
                show_replays(key, results[key])
    results["noise"] = run_noise()
    for beta2 in BETA2S:
        results[f"idle, beta2 {beta2}"] = replays(idle(), pairs(), beta2, f"idle, beta2 {beta2}")
        show_replays(f"idle, beta2 {beta2}", results[f"idle, beta2 {beta2}"])
    return results


def run_noise() -> Found:
    wide, fine, second = Offset(4, True), Offset(5, True), Offset(5, False, golden)
    alone = [Pair(f"{name} + fp32", code) for name, code in (("offset m4", wide), ("offset m5", fine))]
    alone += [Pair("linear + fp32", linear(True)), Pair("fp32 + offset m5 golden", exp_avg_sq=second)]
    dithered = [Pair(f"offset m{m} golden + m5 golden", Offset(m, True, golden), second) for m in (4, 5)]
    found = replays(noise(), [*pairs(), *alone, *dithered], 0.999, "noise")
    show_replays("noise, beta2 0.999", found)
    return found


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--noise", action="store_true", help="gradients of pure noise alone")
    parser.add_argument("--steps", type=int, default=500, help="of the replay")
    parser.add_argument("--blocks", type=int, default=48, help="recorded of a param")
    parser.add_argument("--width", type=int, default=256, help="of the GPT: the elements in a row of most params")
    args = parser.parse_args()
    if args.quick:
        args.steps = 50
    for signed in (True, False):
        for code in codes_of(signed).values():
            if isinstance(code, Offset) and code.rounding is half:
                check_nearest(code)
    if args.noise:
        write_result("codes-noise", args, torch.device("cpu"), {"noise": run_noise()})
    else:
        write_result(f"codes-width-{args.width}", args, torch.device("cpu"), run_replays(args))


if __name__ == "__main__":
    main()
