"""Trainings on a machine: stages, tiers, and what a user does between the backwards of a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardopt import Offload, ShardedAdamW, ShardedOptimizer, Tuning
from shardopt.remote.epoch import Moment

from .machine import Machine

WIDTH = 64  # a weight is two blocks on each of eight ranks, so that its gradient can be the buffer that is reduced
ONE, TWO = 9_000, 18_000  # bytes of a bucket: one weight, two weights or a wide one
LEAF_STREAMS = 3
TIERS: dict[str, Offload | None] = {
    "memory": None,
    "ring": Offload(step="gpu"),
    "CPU step": Offload(step="cpu"),
    "ring, gradients at rest": Offload(step="gpu", gradients="cpu"),
    "CPU step, gradients at rest": Offload(step="cpu", gradients="cpu"),
    "ring, params and gradients at rest": Offload(step="gpu", gradients="cpu", params="cpu"),
    "ring, params at rest": Offload(step="gpu", params="cpu"),
    "CPU step, params at rest": Offload(step="cpu", params="cpu"),
    "ring, early updates": Offload(early_bytes=1 << 20),
}


class Layers(nn.Module):
    """Weights of their own buckets, and biases that share one."""

    def __init__(self, depth: int = 5, again: bool = False, hidden: bool = False, wide: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(
            _wide() if wide and index % 3 == 0 else nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0)
            for index in range(depth)
        )
        self.order = list(range(depth))
        self._again = again  # runs the first layers again in backward, in a backward of their own
        self._hidden = hidden  # the loss is no output, whose gradient would say that a backward begins

    def forward(self, x: Tensor) -> Any:
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=True) if self._again and index < 2 else layer(x)
        loss = x.float().square().mean()
        self.kept = loss if self._hidden else None
        return None if self._hidden else loss


def _wide() -> nn.Module:
    """Weights twice as large."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False))


Way = Callable[["Training"], None]


@dataclass
class Training:
    """A model and its optimizer on a machine."""

    machine: Machine
    model: Layers
    optimizer: ShardedOptimizer

    def backward(self) -> None:
        x = self.machine.tensor(torch.randn(4, WIDTH).bfloat16()).requires_grad_()
        with self.machine.during("forward"):
            loss = self.model(x)
        with self.machine.during("backward"):
            (self.model.kept if loss is None else loss).backward()

    def step(self) -> None:
        with self.machine.during("step"):
            self.optimizer.step()
        self.optimizer.zero_grad()


def accumulated(training: Training) -> None:
    """Two backwards reduce their gradients."""
    training.backward()
    training.backward()
    training.step()


def without_sync(training: Training) -> None:
    """The first of two backwards keeps its gradients to itself."""
    with training.optimizer.no_sync():
        training.backward()
    training.backward()
    training.step()


def clipped(training: Training) -> None:
    """Gradients are scaled, and added to afterwards."""
    clip_first(training)
    training.backward()
    training.step()


def clip_first(training: Training) -> None:
    training.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


def reordered(training: Training) -> None:
    """The same, but the second backward begins with a param of a bucket that is reduced later."""
    order = list(training.model.order)
    clip_first(training)
    training.model.order = [*order[:1], *order[2:], order[1]]
    training.backward()
    training.step()
    training.model.order = order


def partial(training: Training) -> None:
    """Every other step has gradients of one layer only."""
    model = training.model
    whole = model.order
    for layer in whole[1:]:
        once(training)
        model.order = [layer]
        once(training)
        model.order = whole


def zeroed(training: Training) -> None:
    """Gradients are zeroed where they lie, and added to."""
    training.backward()
    with training.machine.during("step"):
        training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def left(training: Training) -> None:
    """A backward raises half-way; the next one reduces the same buckets."""
    once(training)

    def fail(_: Tensor) -> None:
        raise ValueError("half-way")

    hook = training.model.layers[1].register_forward_hook(
        lambda layer, given, output: output.register_hook(fail) and None
    )
    with pytest.raises(ValueError, match="half-way"):
        training.backward()
    hook.remove()
    training.optimizer.zero_grad()
    once(training)


def read(training: Training) -> None:
    """A gradient is read, and added to afterwards; whole params are looked at."""
    training.backward()
    for param in training.model.parameters():
        float(param.grad.local.sum())  # type: ignore[union-attr]
    training.backward()
    training.step()
    with training.optimizer.unsharded():
        float(sum(param.detach().float().sum() for param in training.model.parameters()))


def once(training: Training) -> None:
    training.backward()
    training.step()


def moved(training: Training) -> None:
    """States go to host memory and come back; a step at either place."""
    once(training)
    training.optimizer.offload("cpu")
    once(training)
    training.optimizer.reload()


def late_edits(training: Training) -> None:
    """Each gradient is scaled between the last backward of some steps and the step."""
    once(training)
    once(training)
    clip_first(training)
    training.step()


def elsewhere(training: Training) -> None:
    """A param is read on another stream before the forward, and written on the first one."""
    once(training)
    side, first = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(first)
    with torch.cuda.stream(side):
        copies = [param.detach().clone() for param in training.model.parameters()]
    with torch.no_grad():
        for param in training.model.parameters():
            float(param.sum())
    first.wait_stream(side)
    del copies


def viewed(training: Training) -> None:
    """Something shows the memory of params throughout: each step waits for them."""
    kept = [param.detach() for param in training.model.parameters()]
    once(training)
    float(sum(each.float().sum() for each in kept))


def served(training: Training) -> None:
    """After a step another rank reads a state of this one, in a thread that knows nothing of what the host did."""
    once(training)
    domain = training.optimizer.engine.domain
    remote, shard = domain.remote, domain.shards[0]
    with training.machine.other_thread(), remote.slice_at(domain.epoch.now("exp_avg"), 0, "exp_avg", 0, 256) as found:
        assert found.numel() == 256 and shard.device.type == "cuda"


def asked(training: Training) -> None:
    """Before a step another rank reads a gradient of this one, before and after it was clipped."""
    training.backward()
    domain = training.optimizer.engine.domain
    remote, shard = domain.remote, domain.shards[0]
    grad: Any = domain.entries[shard.bucket.params[0]].param.grad
    own = grad.gradient_slice

    def read(round: int, edits: int) -> None:
        moment, numel = Moment(round, edits), own.total.numel()
        with training.machine.other_thread(), remote.slice_at(moment, 0, "gradient 0", 0, numel) as found:
            assert found.numel() == numel and found.device.type == "cpu"

    read(*own.moment)
    copied = grad.clone()  # as this rank may read it later, its slice is kept
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
    read(own.round, 0)
    read(own.round, 1)
    del copied
    training.step()


WAYS: dict[str, Way] = {
    each.__name__: each
    for each in (
        accumulated,
        without_sync,
        clipped,
        reordered,
        partial,
        zeroed,
        left,
        read,
        once,
        moved,
        late_edits,
        elsewhere,
        viewed,
        served,
        asked,
    )
}


@dataclass(frozen=True)
class Scenario:
    """A training of three steps."""

    stage: int
    tier: str = "memory"
    way: str = "accumulated"
    leaf_streams: int = LEAF_STREAMS  # on how many streams autograd accumulates gradients
    world: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    again: bool = False
    hidden: bool = False
    bucket_bytes: int = ONE
    depth: int = 5
    wide: bool = False
    by_hand: bool = False  # the optimizer knows params, and no module
    overlaps: bool = False  # params arrive during the next forward

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        more = [
            name for name, given in (("checkpointed", self.again), ("loss kept by the module", self.hidden)) if given
        ]
        more += [f"{self.depth} layers, {self.bucket_bytes} bytes a bucket"] if self.depth != 5 else []
        more += ["params only"] if self.by_hand else []
        more += ["wide layers"] if self.wide else []
        more += ["params arrive in the forward"] if self.overlaps else []
        more += [f"{self.leaf_streams} leaf streams"] if self.leaf_streams != LEAF_STREAMS else []
        more += [*options, *([f"world {self.world}"] if self.world < 8 else [])]
        return ", ".join([f"stage {self.stage}", self.tier, self.way, *more])

    @property
    def nonfinite(self) -> str:
        return "propagate" if self.by_hand else "raise"  # without the host's waits for what the gradients hold

    def machine(self) -> Machine:
        return Machine(self.world, self.leaf_streams)

    def start(self, machine: Machine) -> Training:
        torch.manual_seed(0)
        model = Layers(self.depth, self.again, self.hidden, self.wide).bfloat16()
        machine.move(model)
        tuning = Tuning(
            bucket_bytes=self.bucket_bytes,
            keep_below=1000,
            live_bytes=40_000,
            chunk_bytes=1024,
            nonfinite=self.nonfinite,
            overlap_gather=self.overlaps,
        )
        optimizer = ShardedAdamW(
            model.parameters() if self.by_hand else model,
            lr=1e-3,
            stage=self.stage,
            process_group=machine.group,
            offload=TIERS[self.tier],
            tuning=tuning,
            **self.options,
        )
        return Training(machine, model, optimizer)

    def run(self, steps: int = 3) -> Machine:
        with self.machine() as machine:
            training = self.start(machine)
            for _ in range(steps):
                WAYS[self.way](training)
            training.optimizer.close()
            del training
        return machine


def scenarios() -> list[Scenario]:
    """Every stage with every tier, and each way at least once with each kind of wire."""

    def stages(tier: str) -> tuple[int, ...]:
        if "early" in tier:
            return 1, 2, 3
        return (3,) if "params" in tier else (2, 3) if "gradients" in tier else (0, 1, 2, 3)

    grid = [Scenario(stage, tier) for tier in TIERS for stage in stages(tier)]
    ways = [
        Scenario(stage, way=way)
        for way in WAYS
        if way not in ("accumulated", "moved", "left", "late_edits", "elsewhere", "viewed")
        for stage in (1, 3)
    ]
    others = [
        Scenario(2, options={"reduce_dtype": torch.float32}),
        Scenario(0, way="once", options={"release_gradients": True}),
        Scenario(1, way="once", options={"release_gradients": True}),
        *(Scenario(stage, bucket_bytes=TWO, depth=9) for stage in (1, 2, 3)),
        Scenario(2, way="moved"),
        Scenario(2, way="left"),
        Scenario(2, way="left", bucket_bytes=TWO, depth=9, leaf_streams=16),
        Scenario(2, way="without_sync", bucket_bytes=TWO, depth=9),
        Scenario(2, "ring, gradients at rest", bucket_bytes=TWO, depth=9),
        Scenario(1, way="once", options={"release_gradients": True}, bucket_bytes=TWO, depth=9),
        Scenario(2, way="accumulated", hidden=True, bucket_bytes=TWO, depth=9),
        Scenario(1, way="read", hidden=True, bucket_bytes=TWO, depth=9),
        Scenario(2, way="clipped", hidden=True, bucket_bytes=TWO, depth=9),
        *(
            Scenario(stage, way="reordered", hidden=True, bucket_bytes=TWO, depth=9, leaf_streams=16)
            for stage in (1, 2)
        ),
        Scenario(2, way="reordered"),
        Scenario(2, way="reordered", leaf_streams=16),
        *(Scenario(2, tier, way="partial") for tier in ("ring", "CPU step")),
        # The last chunks of a step are the first of the next one, in other slots of the ring.
        *(Scenario(2, "ring", way="partial", depth=depth) for depth in (4, 6)),
        *(
            Scenario(2, tier, way="zeroed")
            for tier in TIERS
            if tier.endswith("step, gradients at rest") or "ring, g" in tier
        ),
        *(Scenario(0, tier, way="once", world=1, by_hand=True) for tier in ("memory", "ring", "CPU step")),
        *(Scenario(1, tier, way="once", by_hand=True) for tier in ("memory", "ring", "CPU step")),
        Scenario(2, bucket_bytes=TWO, depth=9, wide=True, leaf_streams=16),
        Scenario(2, way="reordered", bucket_bytes=TWO, depth=9, wide=True, leaf_streams=16),
        Scenario(2, again=True),
        Scenario(3, again=True),
        Scenario(2, world=3),
        Scenario(0, way="once", world=1, options={"release_gradients": True}),
        # Each bucket is a pass of the ring, in mid-backward.
        *(Scenario(stage, "ring", way="once", options={"release_gradients": True}) for stage in (1, 3)),
        Scenario(2, "ring", way="once", options={"release_gradients": True}, bucket_bytes=TWO, depth=9),
        Scenario(3, "ring, params at rest", way="once", options={"release_gradients": True}),
        *(Scenario(2, "ring, early updates", way=way, depth=9, leaf_streams=16) for way in ("once", "late_edits")),
        Scenario(1, world=1),
        *(Scenario(stage, way="once", overlaps=True) for stage in (1, 2)),
        Scenario(2, "ring", way="read", overlaps=True),
        *(Scenario(2, way=way, overlaps=True) for way in ("elsewhere", "viewed")),
        Scenario(2, options={"gather_dtype": "int8"}),
        Scenario(2, way="elsewhere", overlaps=True, options={"gather_dtype": "int8"}),
        Scenario(1, "ring", way="read"),
        Scenario(2, "CPU step, gradients at rest", way="clipped"),
        # Two passes with an all-reduce in between; the second one reads the states that the first one wrote.
        *(Scenario(2, tier, way="once", options={"clip_update": 1.0}) for tier in ("memory", "ring", "CPU step")),
    ]
    return [*grid, *ways, *others]


def is_dear(scenario: Scenario) -> bool:
    """True for those that the default run can do without: another one is much like them."""
    offloads_states = scenario.tier in ("ring", "CPU step")
    return (scenario.way == "partial" and scenario.stage == 3) or (
        offloads_states and scenario.way == "accumulated" and scenario.stage in (0, 1)
    )
