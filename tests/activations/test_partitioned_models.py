"""Promise: with activations partitioned, models train to the same bits, and keep 1/N of what all ranks have alike.

Bytes are those of all tensors that are alive after forward, counted by who made them, not by what the package says.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardopt
from shardopt import ShardedAdamW, Tuning
from tests.support.launch import launch
from tests.support.live_bytes import LiveBytes
from tests.support.llama import WIDTH, WORDS, Llama
from tests.support.moments import until
from tests.support.ranks import Pool
from tests.support.training import Net, raises

Context = Callable[[], AbstractContextManager[Any]]
LAYERS, BATCH, LENGTH = 3, 2, 40
CHECKPOINT = BATCH * LENGTH * WIDTH * 4  # bytes


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the local params; they are dropped."""
    found = [param.grad for param in model.parameters()]
    model.zero_grad()
    assert all(each is not None for each in found)
    return [each.to_local() if isinstance(each, DTensor) else each for each in found if each is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def wait_for_slices(live: LiveBytes, live_whole: LiveBytes, freed: int) -> None:
    """Until all that is partitioned is gone from memory but for its slice.

    gloo's thread drops a message a little after its wait has ended, in either forward. So both counts are read again
    each time: a count of the whole forward that is read once may hold a message for good.
    """
    until(lambda: live.now() == live_whole.now() - freed, "slices alone")


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class Checkpointed(Llama):
    reentrant: bool | None = None

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def parallel(mesh: DeviceMesh) -> Checkpointed:
    model = Checkpointed(LAYERS)
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    parallelize_module(model, mesh, plan | {"blocks.*.out": RowwiseParallel(), "blocks.*.down": RowwiseParallel()})
    return model


def words(step: int) -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def tensor_parallel() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for reentrant in (True, False, None):
        model = parallel(mesh)
        model.reentrant = reentrant
        for step in range(3):
            with LiveBytes() as live_whole:
                whole = model(words(step)).square().mean()
            with LiveBytes() as live, shardopt.partition_activations(mesh["tp"], check=step == 2) as context:
                loss = model(words(step)).square().mean()
            kept = context.memory()
            wait_for_slices(live, live_whole, (size - 1) * kept["partitioned"]["device"])
            whole.backward()
            expected = gradients(model)
            if reentrant is None:
                # Residual streams and inputs of norms are alike; what lies between cut weights differs, and is whole.
                assert kept["partitioned"]["device"] >= 2 * LAYERS * CHECKPOINT // size
                assert kept["whole"]["device"] >= 4 * LAYERS * CHECKPOINT // size
            else:
                # A checkpoint a block, and behind the blocks: the norm's input, its output, and the head's output.
                behind = 2 * CHECKPOINT + BATCH * LENGTH * WORDS * 4
                assert kept["partitioned"]["device"] >= (LAYERS * CHECKPOINT + behind) // size
                assert kept["whole"].get("device", 0) < 2**13
            loss.backward()
            assert same(gradients(model), expected), (reentrant, step)
            del loss
            assert context.memory() == {"partitioned": {}, "whole": {}}


def test_tensor_parallel_models_keep_each_activation_once(ranks: Pool) -> None:
    ranks.run(tensor_parallel, world=2)


# -- every way to run forward and backward -----------------------------------------------------------------------------


@contextmanager
def nested(inner: Context) -> Iterator[None]:
    with inner(), inner():
        yield


def runs(context: Context) -> dict[str, list[Tensor]]:
    """Gradients of one step, by the way in which it ran."""
    torch.manual_seed(0)
    found = {}
    x = torch.randn(4, 7, 33)
    for kind in (True, False):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 33)) for _ in range(3)))

        def forward(x: Tensor, model: nn.Sequential = model, kind: bool = kind) -> Tensor:
            y = x * model[0][0].weight.sum()  # reentrant checkpoints want an input with a gradient
            for block in model:
                y = y + checkpoint(block, torch.tanh(y), use_reentrant=kind)
            return y.square().mean()

        with context():
            loss = forward(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found[f"retained, {kind}"] = gradients(model)
        with context(), torch.autocast("cpu", torch.bfloat16):
            loss = forward(x)
        loss.backward()
        found[f"autocast, {kind}"] = gradients(model)
        with context():
            forward(x).backward()
        found[f"backward within, {kind}"] = gradients(model)
        losses = []
        for micro in range(3):
            with context():
                losses.append(forward(x + micro))
        for loss in losses[::-1]:
            loss.backward()
        found[f"three under way, {kind}"] = gradients(model)
        with nested(context), context():
            loss = forward(x)
        loss.backward()
        found[f"nested, {kind}"] = gradients(model)
        with context(), torch.no_grad():
            assert kind or not forward(x).requires_grad  # reentrant ones warn
        with raises(ArithmeticError, "in the middle"), context():
            forward(x)
            raise ArithmeticError("in the middle")
        with context():
            loss = forward(x)
        loss.backward()
        found[f"after an error, {kind}"] = gradients(model)
    weight, given = torch.randn(33, 33, requires_grad=True), x.clone().requires_grad_()
    with context():
        y = torch.tanh(torch.tanh(given * 2) @ weight)
    (first,) = torch.autograd.grad(y.sum(), given, create_graph=True)
    first.square().sum().backward()
    assert weight.grad is not None and given.grad is not None
    found["twice"] = [first.detach(), weight.grad, given.grad]
    return found


def every_way() -> None:
    expected = runs(nullcontext)
    seen: list[dict[str, dict[str, int]]] = []
    entered: list[shardopt.activations.partition.ActivationPartition] = []

    @contextmanager
    def partitioned() -> Iterator[None]:
        with shardopt.partition_activations(keep_below=100) as context:
            entered.append(context)
            yield
            seen.append(context.memory())

    found = runs(partitioned)
    for way, theirs in expected.items():
        assert same(found[way], theirs), way
    assert all(site.saved is None for context in entered for site in context._sites)
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert sum(bool(each["partitioned"]) for each in seen) >= len(expected)
        # 924 elements of 4 bytes: no half of them is a whole number of 16 bytes.
        assert seen[0]["partitioned"]["device"] % 1856 == 0
    else:
        assert not any(each["partitioned"] or each["whole"] for each in seen)


def test_every_way_to_run_gives_the_same_bits(ranks: Pool) -> None:
    ranks.run(every_way, world=2)
    ranks.run(every_way, world=1)


def test_without_a_process_group_nothing_changes() -> None:
    every_way()


# -- beside ZeRO -------------------------------------------------------------------------------------------------------


def beside_stage_3() -> None:
    """Four ranks: states, gradients and params over two of them, activations over the other two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tuning = Tuning(bucket_bytes=2000, keep_below=100, live_bytes=0)
    for reentrant in (False, True):
        ended = []
        for context in (nullcontext, lambda: shardopt.partition_activations(mesh["tp"], keep_below=100)):
            model = Net(checkpointed=True, reentrant=reentrant)
            opt = ShardedAdamW(model, lr=0.01, stage=3, tuning=tuning, process_group=mesh["dp"].get_group())
            for step in range(3):
                draw = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
                tokens = torch.randint(0, 11, (4, 7), generator=draw)
                with context() as entered:
                    loss = model(tokens).square().mean()
                if entered is not None:
                    # The embedding's output, in which the convolution reads, the checkpoint's input.
                    assert entered.memory()["partitioned"]["device"] >= 4 * 7 * 20 * 4 // 2
                loss.backward()
                opt.step()
                opt.zero_grad()
            with opt.unsharded():
                ended.append([param.detach().clone() for param in model.parameters()])
            opt.close()
        assert same(*ended), reentrant


def test_stage_3_and_partitioned_activations(ranks: Pool) -> None:
    ranks.run(beside_stage_3, world=4)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def hugging_face() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, max_position_embeddings=64, use_cache=False, **sizes))
    parallelize_module(model, mesh, plan)
    model.train()
    hidden = 2 * 48 * 64 * 4  # bytes of one layer's input
    for reentrant in (True, False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for step in range(2):
            tokens = torch.randint(0, 48, (2, 48), generator=torch.Generator().manual_seed(step))
            with LiveBytes() as live_whole:
                whole = model(input_ids=tokens, labels=tokens).loss
            with LiveBytes() as live, shardopt.partition_activations(mesh["tp"].get_group()) as context:
                loss = model(input_ids=tokens, labels=tokens).loss
            kept = context.memory()["partitioned"]["device"]
            assert kept >= 4 * hidden // 2
            wait_for_slices(live, live_whole, kept)
            whole.backward()
            expected = gradients(model)
            loss.backward()
            assert same(gradients(model), expected), (reentrant, step)
    dist.destroy_process_group()


def test_hugging_faces_gradient_checkpointing() -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    launch(hugging_face, frameworks=True)
